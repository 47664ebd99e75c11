"""Rules that TED data must keep, each a small class that sees the rows chunk by chunk."""

from .data_rules import (
    AcrossRule,
    AllZeroRule,
    ContinuityRule,
    DoneRule,
    MidEpisodeFlagRule,
    NotFiniteRule,
    SchemaRule,
    SingletonRule,
    ZeroVarianceRule,
)
from .rules import Finding, Rows, Rule, Severity, Tally, steps_text

__all__ = [
    "DATA_RULES",
    "AcrossRule",
    "AllZeroRule",
    "ContinuityRule",
    "DoneRule",
    "Finding",
    "MidEpisodeFlagRule",
    "NotFiniteRule",
    "Rows",
    "Rule",
    "SchemaRule",
    "Severity",
    "SingletonRule",
    "Tally",
    "ZeroVarianceRule",
    "steps_text",
]

DATA_RULES: tuple[type[Rule], ...] = (
    SchemaRule,
    SingletonRule,
    DoneRule,
    ContinuityRule,
    AcrossRule,
    MidEpisodeFlagRule,
    NotFiniteRule,
    AllZeroRule,
    ZeroVarianceRule,
)
