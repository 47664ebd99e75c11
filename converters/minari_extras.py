"""Infos, and whatever else an episode holds beside what every episode must have.

Each episode may have an extra column with a row before the first step (T+1 rows), without it (T rows), or not at
all. What cannot be kept is named with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from ..core.dataset import Dropped
from ..core.errors import FormatError
from .minari_store import Column, ColumnPath, Form, StoredEpisode, column_name
from .minari_text import LONGEST_ROW, look_at_text

__all__ = ["Extra", "ExtraColumns", "Rows"]

_NOT_EXTRA = frozenset({"observations", "actions", "rewards", "terminations", "truncations"})


class Rows(IntEnum):
    """Which rows an episode has of an extra column."""

    NONE = 0
    AFTER_STEPS = 1
    """One after each step; none at reset."""
    ALL = 2


@dataclass(slots=True)
class Extra:
    """One extra column over all episodes: `rows` has a `Rows` an episode, `why` is set if it cannot be kept."""

    path: ColumnPath
    form: Form
    seen_in: int
    rows: bytearray
    why: str = ""
    varies: bool = False
    longest: int = 1
    overlong: str = ""


@dataclass(slots=True)
class ExtraColumns:
    """Gathers the extra columns of episode after episode."""

    episodes: int
    found: dict[ColumnPath, Extra] = field(default_factory=dict)

    def look_at(
        self, index: int, number: int, episode: StoredEpisode, columns: Mapping[ColumnPath, Column], steps: int
    ) -> None:
        """Take in one sound episode, the `index`-th of all."""
        for path, column in columns.items():
            if path[0] in _NOT_EXTRA:
                continue
            extra = self.found.get(path)
            if extra is None:
                extra = self.found[path] = Extra(path, column.form, number, bytearray(self.episodes))
            if not extra.why:
                extra.why = _why_not(extra, column, number, steps)
            if extra.why:
                continue
            extra.rows[index] = Rows.ALL if column.rows == steps + 1 else Rows.AFTER_STEPS
            if extra.form.kind == "text":
                _look_at_text(extra, episode, column.rows, number)

    def finish(self) -> None:
        """Settle what only all episodes together show."""
        for path, extra in self.found.items():
            above = next((path[:depth] for depth in range(1, len(path)) if path[:depth] in self.found), None)
            if above is not None:
                extra.why = f"{column_name(above)!r} is a group in some episodes and a column in others"
                self.found[above].why = "it is a column in some episodes and a group in others"
            if extra.varies and extra.overlong and not extra.why:
                raise FormatError(
                    f"{column_name(path)!r} of {extra.overlong} has a row of {extra.longest:,} bytes of text; rows of "
                    f"up to {LONGEST_ROW:,} bytes can be kept"
                )

    def kept(self) -> list[Extra]:
        """The columns that can be kept, in the order of their paths."""
        return [extra for _, extra in sorted(self.found.items()) if not extra.why]

    def dropped(self, names: Mapping[ColumnPath, str]) -> list[Dropped]:
        """The others, under the names given, with the reason."""
        return [Dropped(names[path], extra.why) for path, extra in sorted(self.found.items()) if extra.why]


def _why_not(extra: Extra, column: Column, number: int, steps: int) -> str:
    """Say why this column cannot be kept, or nothing."""
    form = column.form
    if form.kind == "odd":
        return f"in episode {number} {form.why}"
    if form.kind == "bytes":
        return "it holds byte strings"
    if form != extra.form:
        return f"it is {_shown(form)} in episode {number} and {_shown(extra.form)} in episode {extra.seen_in}"
    if column.rows not in (steps, steps + 1):
        return f"it has {column.rows} rows in episode {number}, which has {steps} steps"
    return ""


def _shown(form: Form) -> str:
    return f"{form.dtype} {list(form.shape)}" if form.kind == "array" else form.kind


def _look_at_text(extra: Extra, episode: StoredEpisode, rows: int, number: int) -> None:
    try:
        look = look_at_text(episode, extra.path, rows, f"episode {number}")
    except FormatError as error:
        extra.why = str(error)
        return
    extra.varies = extra.varies or not look.constant
    extra.longest = max(extra.longest, look.longest)
    if look.longest > LONGEST_ROW and not extra.overlong:
        extra.overlong = f"episode {number}"
