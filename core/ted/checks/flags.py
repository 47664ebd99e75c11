"""Rules on the flags: consistent with each other and with the episodes."""

from __future__ import annotations

from collections.abc import Sequence

from ..keys import NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED
from ..schema import Field
from .rules import Finding, Rows, Rule, Tally, ends_text, steps_text

__all__ = ["DoneRule", "MidEpisodeFlagRule"]


class DoneRule(Rule):
    """`done` is `terminated` or `truncated`, everywhere."""

    rule_id = "TED003"
    name = "done = terminated | truncated"

    def __init__(self, fields: Sequence[Field], steps: int) -> None:
        super().__init__(fields, steps)
        self._wrong = Tally()

    def see(self, rows: Rows) -> None:
        """Compare the three flags."""
        if not {NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED} <= rows.columns.keys():
            return
        expected = rows.columns[NEXT_TERMINATED] | rows.columns[NEXT_TRUNCATED]
        wrong = (rows.columns[NEXT_DONE] != expected).reshape(len(rows), -1).any(1)
        self._wrong.add(rows, wrong)

    def findings(self) -> list[Finding]:
        """Report how many steps, and the first."""
        if not self._wrong.count:
            return []
        count = steps_text(self._wrong.count, self.steps)
        return [
            self.report(
                "error", f"{count}: done is not terminated | truncated (first: {self._wrong.first})", self._wrong
            )
        ]


class MidEpisodeFlagRule(Rule):
    """No flag is set before the last step of an episode, and one is set there.

    `unfinished` allows for episodes without an end, as in a buffer that is still being written.
    """

    rule_id = "TED006"
    name = "flags at the ends of episodes"

    def __init__(self, fields: Sequence[Field], steps: int, *, unfinished: bool = False) -> None:
        super().__init__(fields, steps)
        self._unfinished = unfinished
        self._early, self._missing = Tally(), Tally()

    def see(self, rows: Rows) -> None:
        """Look for ends inside episodes and for episodes without an end."""
        if NEXT_DONE not in rows.columns:
            return
        done = rows.columns[NEXT_DONE].reshape(len(rows), -1).any(1)
        self._early.add(rows, done & ~rows.last)
        self._missing.add(rows, rows.last & ~done)

    def findings(self) -> list[Finding]:
        """Report both kinds."""
        found = []
        if self._missing.count and not self._unfinished:
            text = f"{ends_text(self._missing.count)} without done (first: {self._missing.first})"
            found.append(self.report("error", text, self._missing))
        if self._early.count:
            count, are = steps_text(self._early.count, self.steps), "is" if self._early.count == 1 else "are"
            found.append(
                self.report(
                    "warning", f"{count} {are} done inside an episode (first: {self._early.first})", self._early
                )
            )
        return found
