"""`check --rules`: list what `check` checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..results import Result
from ..ted.rules import RULES, RuleEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesResult(Result):
    """The rules of `check`: id, name, what each is about, the severities of its findings, and what it checks."""

    kind: ClassVar[str] = "rules"
    rules: tuple[RuleEntry, ...] = RULES
