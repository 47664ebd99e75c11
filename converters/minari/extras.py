"""Extra columns, those that an episode need not have, such as infos, and the keys and names that columns and texts get.

Each episode has an extra column with a row before the first step (T+1 rows), without it (T rows), or not at all. A
column that cannot be kept is listed with the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np

from ...core.errors import FormatError
from ...core.format.documents import dump_json
from ...core.format.manifest import ENV_METADATA, HIDDEN, Dropped
from ...core.ted.schema import LONGEST_ROW, Key, file_stem, key_name, length_key, safe_part
from ..files.columns import ColumnForm, ColumnPath, StoredColumn, column_name
from .store import DERIVED, StoredEpisode, look_at_text

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


_TOPS = {"observations": "observation", "actions": "action", "infos": "info"}
_TAKEN_AT_TOP = frozenset(
    {"action", "done", "episode", "index", "info", "next", "observation", "reward", "terminated", "truncated"}
)
_FILES = frozenset({"meta.json", ENV_METADATA, HIDDEN})


def extra_keys(paths: Collection[ColumnPath]) -> dict[ColumnPath, Key]:
    """Map columns outside the spaces to keys: `infos` becomes `info`.

    In HDF5 the elements of a tuple are named `_index_0`, …: a group with only such names is a tuple.
    """
    members: defaultdict[ColumnPath, set[str]] = defaultdict(set)
    for path in paths:
        for depth in range(1, len(path)):
            members[path[:depth]].add(path[depth])
    tuples = {group for group, names in members.items() if names == {f"_index_{i}" for i in range(len(names))}}

    def part(path: ColumnPath, depth: int) -> str:
        return path[depth].removeprefix("_index_") if path[:depth] in tuples else path[depth]

    return {
        path: (_TOPS.get(path[0], path[0]), *(part(path, depth) for depth in range(1, len(path)))) for path in paths
    }


def free_keys(keys: Mapping[ColumnPath, Key], texts: Collection[ColumnPath]) -> dict[ColumnPath, Key]:
    """Map each column from its key to a free one: a reserved name gets a trailing `_`.

    Reserved are tensordict's own names, those of TED at the top level, and the lengths of the columns in `texts`. A
    reserved name that ends in `_` already gets one more, so that no two columns get the same key.
    """
    free = {
        path: tuple(_free(part, at_top=not depth and path[0] not in _TOPS) for depth, part in enumerate(key))
        for path, key in keys.items()
    }
    lengths = {length_key(free[path]) for path in texts}
    return {path: _without_lengths(key, lengths) for path, key in free.items()}


def _free(part: str, *, at_top: bool) -> str:
    bare = part.rstrip("_")
    if bare in _FILES or bare.endswith(".memmap") or (at_top and bare in _TAKEN_AT_TOP):
        return part + "_"
    return safe_part(part)


def _without_lengths(key: Key, lengths: Collection[Key]) -> Key:
    return tuple(part + "_" if (*key[:depth], part.rstrip("_")) in lengths else part for depth, part in enumerate(key))


def renamed(keys: Mapping[ColumnPath, Key], free: Mapping[ColumnPath, Key]) -> dict[str, str]:
    """Dotted names before and after, of those that changed."""
    return {key_name(key): key_name(free[path]) for path, key in keys.items() if free[path] != key}


_SEED: ColumnPath = ("seed",)


class EpisodeTexts:
    """Gives every text of episodes a unique name.

    Names are dotted, and a part may contain a dot: of `a/b` and `a.b` the later in the order of paths gets a trailing
    `_`, and so does an attribute with the name of a column. `columns` maps the columns to their keys;
    `attributes` are the paths of all attributes of any episode.
    """

    def __init__(self, columns: Mapping[ColumnPath, Key], attributes: Iterable[ColumnPath]) -> None:
        dotted = {("column", path): key_name(columns[path]) for path in sorted(columns)}
        dotted |= {("attribute", path): _dotted(path) for path in sorted(attributes) if not _derived(path)}
        taken = set(dotted.values())
        given: set[str] = set()
        self._names: dict[tuple[str, ColumnPath], str] = {}
        for source, name in dotted.items():
            free = name
            while free in given or (free != name and free in taken):
                free += "_"
            given.add(free)
            self._names[source] = free
        self._renamed = {
            _source_name(*source): self._names[source]
            for source, name in dotted.items()
            if self._names[source] != name or any("." in part for part in source[1])
        }

    def renamed(self) -> dict[str, str]:
        """Names in the source, with slashes, and the names given instead, where dots alone do not tell the path."""
        return dict(self._renamed)

    def of_column(self, path: ColumnPath) -> str:
        """Name of the text of a column."""
        return self._names["column", path]

    def of_attributes(self, attributes: Mapping[ColumnPath, Any]) -> dict[str, str]:
        """All attributes of an episode except its seed, as JSON, so that none is lost."""
        spare = {path: value for path, value in attributes.items() if not _derived(path) and value is not None}
        if seed_of(attributes) is not None:
            del spare[_SEED]
        return {self._names["attribute", path]: dump_json(value) for path, value in sorted(spare.items())}


def seed_of(attributes: Mapping[ColumnPath, Any]) -> int | None:
    """The seed of an episode; None unless NumPy accepts it as a seed."""
    seed = attributes.get(_SEED)
    if isinstance(seed, bool | np.bool_) or not isinstance(seed, int | np.integer):
        return None
    return int(seed) if 0 <= seed < 1 << 64 else None


def _derived(path: ColumnPath) -> bool:
    return len(path) == 1 and path[0] in DERIVED


def _dotted(path: ColumnPath) -> str:
    name = ".".join(path)
    return name if name.startswith("options.") else f"attributes.{name}"


def _source_name(source: str, path: ColumnPath) -> str:
    return column_name(path) if source == "column" or path[0] == "options" else f"attributes/{column_name(path)}"
