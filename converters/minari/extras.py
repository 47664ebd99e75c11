"""Infos, and whatever else an episode holds beside what every episode must have.

Each episode may have an extra column with a row before the first step (T+1 rows), without it (T rows), or not at
all. What cannot be kept is named with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from ...core.errors import FormatError
from ...core.format import Dropped
from ...core.ted import file_stem
from .store import Column, ColumnPath, Form, StoredEpisode, column_name
from .text import LONGEST_ROW, look_at_text
from .widening import wider

__all__ = ["Extra", "ExtraColumns", "Rows"]

_LONGEST_NAME = 240
"""Bytes of a name: 255 at most in a file system, less what is added to it, such as `_length.memmap`."""
_NOT_EXTRA = frozenset({"observations", "actions", "rewards", "terminations", "truncations"})


class Rows(IntEnum):
    """Which rows an episode has of an extra column."""

    NONE = 0
    AFTER_STEPS = 1
    """One after each step; none at reset."""
    ALL = 2


@dataclass(slots=True)
class Extra:
    """One extra column over all episodes: `rows` has a `Rows` an episode, `why` is set if it cannot be kept.

    `dtypes` maps the element types found to the first episode that has each, `dtype_of` has the position in it of
    every episode's; the one of `form` holds the values of all. `holes` are the episodes in which values are missing.
    """

    path: ColumnPath
    form: Form
    rows: bytearray
    why: str = ""
    varies: bool = False
    longest: int = 1
    dtypes: dict[str, int] = field(default_factory=dict)
    dtype_of: bytearray = field(default_factory=bytearray)
    holes: set[int] = field(default_factory=set)

    def clash(self, form: Form, number: int) -> str:
        """Say what keeps rows of this form out, or nothing; widens this column for all episodes if need be."""
        if form == self.form and len(self.dtypes) == 1:
            return ""
        known = self.dtypes
        if replace(form, dtype=self.form.dtype) == self.form:
            dtype = wider([*self.dtypes, form.dtype])
            if dtype is not None:
                self.form = replace(self.form, dtype=dtype)
                self.dtypes.setdefault(form.dtype, number)
                return ""
            known = {dtype: seen_in for dtype, seen_in in self.dtypes.items() if wider([dtype, form.dtype]) is None}
        other, seen_in = next(iter((known or self.dtypes).items()))
        before = _shown(replace(self.form, dtype=other))
        return f"it is {_shown(form)} in episode {number} and {before} in episode {seen_in}"

    def stored(self, index: int) -> Form:
        """How the `index`-th episode stores its rows."""
        return replace(self.form, dtype=list(self.dtypes)[self.dtype_of[index]])

    def widened(self) -> str:
        """Say which types episodes have, where there is more than one."""
        if len(self.dtypes) < 2:
            return ""
        present = [kind for kind, rows in zip(self.dtype_of, self.rows, strict=True) if rows != Rows.NONE]
        counts = {dtype: present.count(kind) for kind, dtype in enumerate(self.dtypes)}
        found = ", ".join(f"{dtype} in {count}" for dtype, count in sorted(counts.items()))
        return f"{found} episodes; {self.form.dtype} holds them all"


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
                extra = self.found[path] = _extra(path, column.form, number, self.episodes)
            if not extra.why:
                extra.why = _why_not(extra, column, number, steps)
            if extra.why:
                continue
            extra.rows[index] = Rows.ALL if column.rows == steps + 1 else Rows.AFTER_STEPS
            if column.form.holes:
                extra.holes.add(number)
            extra.dtype_of[index] = list(extra.dtypes).index(column.form.dtype)
            if extra.form.kind == "text":
                _look_at_text(extra, episode, column.rows, number)

    def finish(self) -> None:
        """Settle what only all episodes together show."""
        for path, extra in self.found.items():
            above = next((path[:depth] for depth in range(1, len(path)) if path[:depth] in self.found), None)
            if above is not None:
                extra.why = f"{column_name(above)!r} is a group in some episodes and a column in others"
                self.found[above].why = "it is a column in some episodes and a group in others"

    def kept(self) -> list[Extra]:
        """The columns that can be kept, in the order of their paths."""
        return [extra for _, extra in sorted(self.found.items()) if not extra.why]

    def dropped(self, names: Mapping[ColumnPath, str]) -> list[Dropped]:
        """The others, under the names given, with the reason."""
        return [Dropped(names[path], extra.why) for path, extra in sorted(self.found.items()) if extra.why]


def _extra(path: ColumnPath, form: Form, number: int, episodes: int) -> Extra:
    rows, dtype_of = bytearray(episodes), bytearray(episodes)
    return Extra(path, form, rows, dtypes={form.dtype: number}, dtype_of=dtype_of)


def _why_not(extra: Extra, column: Column, number: int, steps: int) -> str:
    """Say why this column cannot be kept, or nothing."""
    form = column.form
    if max(len(file_stem(str(part)).encode()) for part in extra.path) > _LONGEST_NAME:
        return f"its name has more than the {_LONGEST_NAME} bytes that a file's name has room for"
    if form.kind == "odd":
        return f"in episode {number} {form.why}"
    if form.kind == "bytes":
        return "it holds byte strings"
    if clash := extra.clash(form, number):
        return clash
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
    if look.longest > LONGEST_ROW:
        extra.why = (
            f"episode {number} has {look.longest:,} bytes of text in row {look.longest_row}; rows of up to "
            f"{LONGEST_ROW:,} bytes can be kept"
        )
