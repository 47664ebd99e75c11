"""Extra columns: infos and all other columns that an episode need not have.

Each episode has an extra column with a row before the first step (T+1 rows), without it (T rows), or not at all. A
column that cannot be kept is listed with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from ...core.errors import FormatError
from ...core.format.manifest import Dropped
from ...core.ted.schema import file_stem
from .store import LONGEST_ROW, ColumnForm, ColumnPath, StoredColumn, StoredEpisode, column_name, look_at_text

_LONGEST_NAME = 240
"""Bytes of a name: 255 at most in a file system, less suffixes such as `_length.memmap`."""
_NOT_EXTRA = frozenset({"observations", "actions", "rewards", "terminations", "truncations"})


class ExtraRows(IntEnum):
    """The rows of an extra column that an episode has."""

    NONE = 0
    AFTER_STEPS = 1
    """One after each step; none at reset."""
    ALL = 2


@dataclass(slots=True)
class Extra:
    """One extra column over all episodes: `rows` has an `ExtraRows` for each, `why` is set if it cannot be kept.

    `dtypes` maps each element type to the first episode that has it; `dtype_of` has the position of each episode's type
    in `dtypes`. The type of `form` holds the values of all. `holes` are the episodes with missing values.
    """

    path: ColumnPath
    form: ColumnForm
    rows: bytearray
    why: str = ""
    varies: bool = False
    longest: int = 1
    dtypes: dict[str, int] = field(default_factory=dict)
    dtype_of: bytearray = field(default_factory=bytearray)
    holes: set[int] = field(default_factory=set)

    def clash(self, form: ColumnForm, number: int) -> str:
        """Return why rows of this form do not fit, "" if they do; widens this column for all episodes if necessary."""
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

    def stored(self, index: int) -> ColumnForm:
        """How the `index`-th episode stores its rows."""
        return replace(self.form, dtype=list(self.dtypes)[self.dtype_of[index]])

    def widened(self) -> str:
        """Describe the element types of the episodes, "" if there is only one."""
        if len(self.dtypes) < 2:
            return ""
        present = [kind for kind, rows in zip(self.dtype_of, self.rows, strict=True) if rows != ExtraRows.NONE]
        counts = {dtype: present.count(kind) for kind, dtype in enumerate(self.dtypes)}
        found = ", ".join(f"{dtype} in {count}" for dtype, count in sorted(counts.items()))
        return f"{found} episodes; {self.form.dtype} holds them all"


@dataclass(slots=True)
class ExtraColumns:
    """Collects the extra columns of all episodes."""

    episodes: int
    found: dict[ColumnPath, Extra] = field(default_factory=dict)

    def add(
        self, index: int, number: int, episode: StoredEpisode, columns: Mapping[ColumnPath, StoredColumn], steps: int
    ) -> None:
        """Add the columns of one sound episode, the `index`-th of all."""
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
            extra.rows[index] = ExtraRows.ALL if column.rows == steps + 1 else ExtraRows.AFTER_STEPS
            if column.form.holes:
                extra.holes.add(number)
            extra.dtype_of[index] = list(extra.dtypes).index(column.form.dtype)
            if extra.form.kind == "text":
                _look_at_text(extra, episode, column.rows, number)

    def finish(self) -> None:
        """Drop columns that are groups in other episodes; call it after the last episode."""
        for path, extra in self.found.items():
            above = next((path[:depth] for depth in range(1, len(path)) if path[:depth] in self.found), None)
            if above is not None:
                extra.why = f"{column_name(above)!r} is a group in some episodes and a column in others"
                self.found[above].why = "it is a column in some episodes and a group in others"

    def kept(self) -> list[Extra]:
        """The columns that can be kept, in the order of their paths."""
        return [extra for _, extra in sorted(self.found.items()) if not extra.why]

    def dropped(self, names: Mapping[ColumnPath, str]) -> list[Dropped]:
        """The other columns by the given names, with the reasons."""
        return [Dropped(names[path], extra.why) for path, extra in sorted(self.found.items()) if extra.why]


def _extra(path: ColumnPath, form: ColumnForm, number: int, episodes: int) -> Extra:
    rows, dtype_of = bytearray(episodes), bytearray(episodes)
    return Extra(path, form, rows, dtypes={form.dtype: number}, dtype_of=dtype_of)


def _why_not(extra: Extra, column: StoredColumn, number: int, steps: int) -> str:
    """Return why this column cannot be kept, "" if it can."""
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


def _shown(form: ColumnForm) -> str:
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


_MANTISSA = {2: 11, 4: 24, 8: 53}
"""Bits of a whole number that a float of so many bytes holds."""


def wider(names: Sequence[str]) -> str | None:
    """Return the common element type that holds every value of these types, None where NumPy's does not.

    NumPy calls int64 to float64 safe; from 2**53 on it is not.
    """
    if len(set(names)) == 1:
        return names[0]
    dtypes = sorted(map(np.dtype, names), key=lambda dtype: (dtype.kind, dtype.itemsize))
    wide = np.result_type(*dtypes)
    return wide.name if all(_holds(wide, dtype) for dtype in dtypes) else None


def _holds(wide: np.dtype[np.generic], narrow: np.dtype[np.generic]) -> bool:
    if narrow.kind in "iu" and wide.kind in "fc":
        bits = 8 * narrow.itemsize - (narrow.kind == "i")
        return bits <= _MANTISSA[wide.itemsize // (2 if wide.kind == "c" else 1)]
    return np.can_cast(narrow, wide, "safe")
