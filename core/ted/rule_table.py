"""The rules of `check`: the one table of their ids, names, severities, and what each checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """A rule: its id and name, which never change meaning, what it is about, what it checks, and how bad findings are.

    `severities` are those that its findings can have.
    """

    rule: str
    name: str
    about: Literal["rows", "folder", "saved buffers"]
    severities: tuple[Severity, ...]
    checks: str

    @property
    def named(self) -> tuple[str, str]:
        """Id and name, with which a finding begins."""
        return self.rule, self.name


_ERROR: tuple[Severity, ...] = ("error",)
_WARNING: tuple[Severity, ...] = ("warning",)
_BOTH: tuple[Severity, ...] = ("error", "warning")

RULES: tuple[RuleEntry, ...] = (
    RuleEntry(
        "TED001", "schema", "rows", _BOTH,
        "Flags under next are there and bool, every observation has a counterpart under next, and there are rewards, "
        "which are real numbers, and actions.",
    ),
    RuleEntry("TED002", "singleton dimensions", "rows", _ERROR, "Rewards and flags have a last dimension of 1."),
    RuleEntry("TED003", "done = terminated | truncated", "rows", _ERROR, "The three flags agree in every step."),
    RuleEntry(
        "TED004", "continuity", "rows", _BOTH, "Inside an episode, next of every row equals the row that follows."
    ),
    RuleEntry(
        "TED005", "no continuity across episodes", "rows", _WARNING,
        "No episode begins with the observation with which the one before it ends.",
    ),
    RuleEntry(
        "TED006", "flags at the ends of episodes", "rows", _BOTH,
        "The last step of every episode is done, and no step before it is.",
    ),
    RuleEntry("TED007", "NaN and infinity", "rows", _BOTH, "Every number is finite."),
    RuleEntry("TED008", "all zero", "rows", _BOTH, "Not all numbers of an observation or an action are zero."),
    RuleEntry("TED009", "zero variance", "rows", _WARNING, "Every component of an observation or an action varies."),
    RuleEntry(
        "TED010", "episode table", "folder", _ERROR,
        "The episode table and the rows agree about number, position, return and end of every episode.",
    ),
    RuleEntry(
        "TED011", "lengths", "folder", _ERROR, "Every file has the rows that the manifest and its metadata state."
    ),
    RuleEntry("TED012", "sizes", "folder", _ERROR, "Every file has the size that the manifest states."),
    RuleEntry("TED013", "digests", "folder", _ERROR, "The bytes of every file match their digest."),
    RuleEntry(
        "TED014", "opens", "folder", _ERROR,
        "The manifest, the files that everything depends on and every episode can be read.",
    ),
    RuleEntry(
        "TED015", "recorded spaces", "rows", _WARNING,
        "Observations and actions are inside the spaces that the source records.",
    ),
    RuleEntry("TED016", "truth values", "rows", _ERROR, "Every byte of a bool field is 0 or 1."),
    RuleEntry(
        "TED017", "kept videos", "folder", _ERROR,
        "Rows refer to frames of kept videos that are there and can be decoded: some of long videos, all with --full.",
    ),
    RuleEntry("BUF001", "buffer digests", "saved buffers", _ERROR, "The files of the checkpoint match their digests."),
    RuleEntry(
        "BUF002", "buffer counts", "saved buffers", _ERROR,
        "Length, cursor, capacity and files of the storage and the writer agree.",
    ),
    RuleEntry("BUF003", "buffer sampler", "saved buffers", _ERROR, "The state of the sampler fits the storage."),
)  # fmt: skip
"""All rules, in the order of their ids."""

RULE_BY_ID = {entry.rule: entry for entry in RULES}
