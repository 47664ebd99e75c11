"""Rules that TED data must keep, each a small class that sees the rows chunk by chunk."""

from .flags import DoneRule, MidEpisodeFlagRule
from .following import AcrossRule, ContinuityRule
from .layout import SchemaRule, SingletonRule
from .rules import Finding, Rows, Rule, Severity, Tally, steps_text
from .values import AllZeroRule, NotFiniteRule, ZeroVarianceRule

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
