"""Reads Minari datasets: HDF5, Arrow and Parquet storage, every space and every kind of info that Minari writes.

It imports h5py, pyarrow or Pillow only for datasets that need them, and never minari, gymnasium or torch.

A first pass reads the structure and the text of every episode, but no numbers. Every episode must have the columns of
the observation and action spaces, rewards and flags. Extra columns, such as infos, may be missing: each episode has
such a column with a row before the first step (T+1 rows), without that row (T rows), or not at all. A column that
cannot be kept is listed with the reason.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.documents import dump_json
from ...core.format.episodes import normal_form
from ...core.format.manifest import ENV_METADATA, HIDDEN, Dropped
from ...core.ted.schema import (
    LONGEST_ROW,
    REWARD,
    Field,
    Key,
    Role,
    Timing,
    encode_text,
    file_stem,
    key_name,
    length_key,
    safe_part,
    text_fields,
)
from ..files.readers import OUTCOME_ROWS, ColumnForm, ColumnPath, FileReader, StoredColumn, column_name
from .metadata import METADATA_FILE, MinariMetadata, env_metadata, looks_like_minari, space_leaves, strict_space
from .store import DERIVED, EpisodeStore, Hdf5Store, StoredEpisode, look_at_text

_LONGEST_NAME = 240
"""The longest name in bytes: file systems allow 255, which include suffixes such as `_length.memmap`."""
_NOT_EXTRA = frozenset({"observations", "actions", "rewards", "terminations", "truncations"})


class ExtraRows(IntEnum):
    """The rows of an extra column that an episode has."""

    NONE = 0
    AFTER_STEPS = 1
    """One row after each step, but none at reset."""
    ALL = 2
    """One row at reset, and one after each step."""


@dataclass(slots=True)
class Extra:
    """An extra column, over all episodes.

    Attributes:
        path: the path of the column.
        form: the form of its rows, whose element type holds the values of all episodes.
        rows: an `ExtraRows` for each episode.
        why: the reason why the column cannot be kept; "" if it can.
        varies: for text, whether rows differ within an episode.
        longest: for text, the bytes of the longest row.
        dtypes: the first episode that has each element type.
        dtype_of: for each episode, the position of its element type in `dtypes`.
        holes: the episodes with missing values.
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
        """Return why rows of this form do not fit, "" if they do; widen the element type of the column if necessary."""
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
        """Return the form of the rows of the `index`-th episode."""
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
                _look_at_extra_text(extra, episode, column.rows, number)

    def finish(self) -> None:
        """Drop columns that are groups in other episodes; call it after the last episode."""
        for path, extra in self.found.items():
            above = next((path[:depth] for depth in range(1, len(path)) if path[:depth] in self.found), None)
            if above is not None:
                extra.why = f"{column_name(above)!r} is a group in some episodes and a column in others"
                self.found[above].why = "it is a column in some episodes and a group in others"

    def kept(self) -> list[Extra]:
        """Return the columns that can be kept, in the order of their paths."""
        return [extra for _, extra in sorted(self.found.items()) if not extra.why]

    def dropped(self, names: Mapping[ColumnPath, str]) -> list[Dropped]:
        """Return the other columns, by the given names, with the reasons."""
        return [Dropped(names[path], extra.why) for path, extra in sorted(self.found.items()) if extra.why]


def _extra(path: ColumnPath, form: ColumnForm, number: int, episodes: int) -> Extra:
    rows, dtype_of = bytearray(episodes), bytearray(episodes)
    return Extra(path, form, rows, dtypes={form.dtype: number}, dtype_of=dtype_of)


def _why_not(extra: Extra, column: StoredColumn, number: int, steps: int) -> str:
    """Return why this column cannot be kept, "" if it can."""
    form = column.form
    if max(len(file_stem(str(part)).encode()) for part in extra.path) > _LONGEST_NAME:
        return f"its name is longer than {_LONGEST_NAME} bytes, the limit for the name of a file"
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


def _look_at_extra_text(extra: Extra, episode: StoredEpisode, rows: int, number: int) -> None:
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
"""The bits of an integer that a float holds exactly, by the bytes of the float."""


def wider(names: Sequence[str]) -> str | None:
    """Return the common element type that holds every value of these types exactly; None if there is none.

    NumPy considers int64 to float64 a safe cast, but it is not exact from 2**53 on.
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


_RENAMED_TOPS = {"observations": "observation", "actions": "action", "infos": "info"}
_TAKEN_AT_TOP = frozenset(
    {"action", "done", "episode", "index", "info", "next", "observation", "reward", "terminated", "truncated"}
)
_FILES = frozenset({"meta.json", ENV_METADATA, HIDDEN})


def extra_keys(paths: Collection[ColumnPath]) -> dict[ColumnPath, Key]:
    """Map columns outside the spaces to keys: `infos` becomes `info`, and elements of tuples are named by their index.

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
        path: (_RENAMED_TOPS.get(path[0], path[0]), *(part(path, depth) for depth in range(1, len(path))))
        for path in paths
    }


def free_keys(keys: Mapping[ColumnPath, Key], texts: Collection[ColumnPath]) -> dict[ColumnPath, Key]:
    """Return a key for each column in which reserved names have a trailing `_`.

    Reserved are tensordict's own names, TED's names at the top level, and the lengths of the columns in `texts`. A
    reserved name that already ends in `_` gets one more, so that no two columns get the same key.
    """
    free = {
        path: tuple(_free(part, at_top=not depth and path[0] not in _RENAMED_TOPS) for depth, part in enumerate(key))
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
    """Return the dotted names that changed, old to new."""
    return {key_name(key): key_name(free[path]) for path, key in keys.items() if free[path] != key}


_SEED: ColumnPath = ("seed",)


class EpisodeTexts:
    """Gives every episode text a unique name.

    Names are dotted, and a part may itself contain a dot. So `a/b` and `a.b` would have the same name: the later one in
    the order of paths gets a trailing `_`, and so does an attribute with the name of a column. `columns` has the key of
    each column that is constant text; `attributes` are the paths of all attributes of any episode.
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
        """Return new names by the names in the source (with slashes), if the path does not follow from the new name."""
        return dict(self._renamed)

    def of_column(self, path: ColumnPath) -> str:
        """Return the name of the text of a column."""
        return self._names["column", path]

    def of_attributes(self, attributes: Mapping[ColumnPath, Any]) -> dict[str, str]:
        """Return all attributes of an episode except its seed, as JSON."""
        spare = {path: value for path, value in attributes.items() if not _derived(path) and value is not None}
        if seed_of(attributes) is not None:
            del spare[_SEED]
        return {self._names["attribute", path]: dump_json(value) for path, value in sorted(spare.items())}


def seed_of(attributes: Mapping[ColumnPath, Any]) -> int | None:
    """Return the seed of an episode; None if it is not an integer that fits into 64 bits."""
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


CONTRADICTION = "metadata.json contradicts the data: correct it, or copy or fetch the dataset again"
REWARDS: ColumnPath = ("rewards",)
FLAGS: tuple[ColumnPath, ColumnPath] = (("terminations",), ("truncations",))
_TOPS: dict[str, Literal["observation", "action"]] = {"observations": "observation", "actions": "action"}
_INDEX = re.compile(r"_index_(\d+)")


@dataclass(slots=True)
class Required:
    """An observation or action column, as its space describes it and, after the first episode, as it is stored.

    `more` is 1 for columns with a row more than steps, else 0; `space_dtype` is the element type in the space, "" if
    there is no space.
    """

    path: ColumnPath
    key: Key
    role: Role
    kind: Literal["array", "image", "text"]
    dtype: str
    shape: tuple[int, ...]
    more: int
    form: ColumnForm | None = None
    seen_in: int = -1
    longest: int = 1
    space_dtype: str = ""

    @property
    def contradicts(self) -> bool:
        """Whether the element types of space and data differ; the data keeps its own."""
        return (
            self.kind == "array"
            and self.form is not None
            and bool(self.space_dtype)
            and np.dtype(self.space_dtype) != self.dtype
        )

    def stored_dtype(self, form: ColumnForm) -> str:
        """Return the element type of the rows as read; raise FormatError if they contradict the space."""
        if self.kind == "text":
            if form.kind == "text":
                return "uint8"
        elif self.kind == "image" and form.is_jpeg:
            return "uint8"
        elif form.kind == "array":
            if form.shape == self.shape or (form.flat and math.prod(form.shape) == math.prod(self.shape)):
                return form.dtype
            found, wanted = list(form.shape), list(self.shape)
            raise FormatError(f"{self._name} has rows of shape {found}, but the {self.role} space says {wanted}")
        why = form.why or f"it holds {form.kind}"
        raise FormatError(f"{self._name} does not hold {self.kind}, as the {self.role} space says: {why}")

    @property
    def _name(self) -> str:
        return repr(column_name(self.path))


def plain_part(name: str) -> str:
    """Return the name of a Tuple element without the prefix that it has in HDF5."""
    match = _INDEX.fullmatch(name)
    return match[1] if match else name


class RequiredColumns:
    """The columns that every episode must have; compares each episode with the spaces and the first sound episode."""

    def __init__(self, metadata: MinariMetadata, store: EpisodeStore) -> None:
        self._without_space: list[str] = []
        self._paths: set[ColumnPath] = set()
        self.columns: list[Required] = []
        self.reward_dtypes: dict[str, int] = {}
        self.holes: dict[ColumnPath, set[int]] = {}
        """The episodes with missing values, for each column."""
        self.forms: dict[ColumnPath, ColumnForm | None] = {}
        spaces = {"observations": metadata.observation_space, "actions": metadata.action_space}
        for top, space in spaces.items():
            if space is None:
                self._without_space.append(top)
                continue
            for leaf in space_leaves(space):
                path = (top, *store.location(leaf.path))
                key = (_TOPS[top], *(str(part) for part in leaf.path))
                self._want(path, key, leaf.kind, leaf.dtype, leaf.shape)
                self.columns[-1].space_dtype = leaf.dtype

    def _want(
        self, path: ColumnPath, key: Key, kind: Literal["array", "image", "text"], dtype: str, shape: tuple[int, ...]
    ) -> None:
        role = _TOPS[path[0]]
        self._paths.add(path)
        self.columns.append(Required(path, key, role, kind, dtype, shape, more=int(role == "observation")))

    def check(self, number: int, columns: Mapping[ColumnPath, StoredColumn]) -> int:
        """Return the number of steps of a sound episode; raise FormatError for any other."""
        self._add_without_space(columns)
        for path in (REWARDS, *FLAGS, *(want.path for want in self.columns)):
            if path not in columns:
                raise FormatError(
                    f"episode {number} has no {column_name(path)!r}", hint="copy or fetch the dataset again, whole"
                )
        steps = self._steps(number, columns)
        dtypes = [self._dtype(number, want, columns[want.path].form) for want in self.columns]
        for path in (REWARDS, *FLAGS):
            form = columns[path].form
            if form.kind != "array" or math.prod(form.shape) != 1 or form.dtype.startswith("complex"):
                raise FormatError(f"episode {number}: {column_name(path)!r} is not one number for each step")
        self._refuse_unknown(number, columns)
        self._remember(number, columns, dtypes)
        return steps

    def _add_without_space(self, columns: Mapping[ColumnPath, StoredColumn]) -> None:
        """Require the columns of the first episode for observations or actions without a space."""
        for top in self._without_space:
            for path, column in columns.items():
                form = column.form
                if path[0] == top and form.kind in ("array", "text"):
                    key = (_TOPS[top], *(plain_part(part) for part in path[1:]))
                    self._want(path, key, "text" if form.kind == "text" else "array", form.dtype, form.shape)
        self._without_space = []

    def _steps(self, number: int, columns: Mapping[ColumnPath, StoredColumn]) -> int:
        """Return the number of steps; raise FormatError if the columns disagree about it."""
        stepwise = [REWARDS, *FLAGS, *(want.path for want in self.columns if not want.more)]
        steps = columns[REWARDS].rows
        if any(columns[path].rows != steps for path in stepwise):
            lengths = ", ".join(f"{column_name(path)} {columns[path].rows}" for path in sorted(stepwise))
            raise FormatError(f"episode {number}: columns with one row for each step differ in length: {lengths}")
        if not steps:
            raise FormatError(f"episode {number} has no steps; every episode needs at least one")
        for want in self.columns:
            rows = columns[want.path].rows
            if want.more and rows != steps + 1:
                raise FormatError(
                    f"episode {number} has {rows} rows of {column_name(want.path)!r} for {steps} steps, "
                    f"expected {steps + 1}, including the one after the last step"
                )
        return steps

    def _dtype(self, number: int, want: Required, form: ColumnForm) -> str:
        if form == want.form:
            return want.dtype
        try:
            dtype = want.stored_dtype(form)
        except FormatError as error:
            raise FormatError(f"episode {number}: {error}", hint=CONTRADICTION) from error
        if want.form is not None and dtype != want.dtype:
            raise FormatError(
                f"episode {number}: {column_name(want.path)!r} is {dtype}, but {want.dtype} in episode {want.seen_in}"
            )
        return dtype

    def _refuse_unknown(self, number: int, columns: Mapping[ColumnPath, StoredColumn]) -> None:
        for path in columns:
            if path[0] in _TOPS and path not in self._paths:
                raise FormatError(
                    f"episode {number} has {column_name(path)!r}, which is not in the {_TOPS[path[0]]} space",
                    hint=CONTRADICTION,
                )

    def _remember(self, number: int, columns: Mapping[ColumnPath, StoredColumn], dtypes: Sequence[str]) -> None:
        for want, dtype in zip(self.columns, dtypes, strict=True):
            if want.form is None:
                want.form, want.dtype, want.seen_in = columns[want.path].form, dtype, number
        for path in (REWARDS, *(want.path for want in self.columns)):
            if columns[path].form.holes:
                self.holes.setdefault(path, set()).add(number)
        for path in (REWARDS, *FLAGS):
            form = columns[path].form
            if self.forms.setdefault(path, form) != form:
                self.forms[path] = None  # it differs between episodes: look it up for each
        dtype = columns[REWARDS].form.dtype
        self.reward_dtypes[dtype] = self.reward_dtypes.get(dtype, 0) + 1

    @property
    def reward_dtype(self) -> str:
        """The element type that holds the rewards of all episodes, which may be integers in some of them."""
        return np.result_type(*(self.reward_dtypes or ["float64"])).name


@dataclass(frozen=True, slots=True)
class Survey:
    """The structure of all episodes.

    `steps` has the length of each episode of `numbers`, 0 for those in `problems`, which cannot be read.
    """

    numbers: Sequence[int]
    steps: Sequence[int]
    problems: dict[int, FormatError]
    required: RequiredColumns
    extras: ExtraColumns
    attributes: Collection[ColumnPath]

    def require_sound(self, numbers: Sequence[int]) -> None:
        """Raise the FormatError of the first of these episodes that cannot be read."""
        for number in numbers:
            if number in self.problems:
                raise self.problems[number]

    def require_totals(self, metadata: MinariMetadata) -> None:
        """Raise FormatError if the totals in the metadata differ from the data."""
        for what, stated, found in (
            ("episodes", metadata.total_episodes, len(self.numbers)),
            ("steps", metadata.total_steps, sum(self.steps)),
        ):
            if stated is not None and stated != found:
                raise FormatError(
                    f"metadata.json says {stated:,} {what}, but the data have {found:,}",
                    hint="copy or fetch the dataset again" + self._episodes_option(),
                )

    def _episodes_option(self) -> str:
        """Return the hint to choose all existing episodes, because chosen episodes are not compared with the totals."""
        runs: list[tuple[int, int | None]] = []
        for number in self.numbers:
            if runs and runs[-1][1] == number:
                runs[-1] = runs[-1][0], number + 1
            else:
                runs.append((number, number + 1))
        return f"; to convert the existing episodes, add --episodes {normal_form(runs)}" if runs else ""


def survey(store: EpisodeStore, metadata: MinariMetadata, progress: Callable[[int], None] | None = None) -> Survey:
    """Examine every episode once; the error of a damaged one is kept until that episode is read."""
    required, extras = RequiredColumns(metadata, store), ExtraColumns(len(store.numbers))
    steps, problems, attributes = [0] * len(store.numbers), {}, set[ColumnPath]()
    for index, number in enumerate(store.numbers):
        if progress is not None:
            progress(1)
        try:
            episode = store.episode(number)
            columns = episode.columns()
            steps[index] = required.check(number, columns)
            _look_at_required_text(required, number, episode, steps[index])
            attributes.update(episode.attribute_paths())
        except FormatError as error:
            problems[number], steps[index] = error, 0
            continue
        extras.add(index, number, episode, columns, steps[index])
    extras.finish()
    return Survey(store.numbers, steps, problems, required, extras, attributes)


def _look_at_required_text(required: RequiredColumns, number: int, episode: StoredEpisode, steps: int) -> None:
    """Find the longest row of observations and actions that are text."""
    for want in required.columns:
        if want.kind != "text":
            continue
        look = look_at_text(episode, want.path, steps + want.more, f"episode {number}")
        if look.longest > LONGEST_ROW:
            raise FormatError(
                f"{column_name(want.path)!r} of episode {number} has {look.longest:,} bytes of text in row "
                f"{look.longest_row}; rows of up to {LONGEST_ROW:,} bytes can be kept"
            )
        want.longest = max(want.longest, look.longest)


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A column that is kept: its path in the file, its key, and how its rows are read."""

    path: ColumnPath
    key: Key
    kind: Literal["array", "image", "text"]
    dtype: str
    shape: tuple[int, ...]
    role: Role
    timing: Timing
    form: ColumnForm | None
    extra: Extra | None = None

    def fields(self) -> list[Field]:
        """Return the fields of the column: one, or two for text."""
        if self.kind == "text":
            return text_fields(self.key, self.shape[0])
        return [Field(self.key, self.dtype, self.shape, self.role)]

    def rows(self, index: int) -> ExtraRows:
        """Return which rows the `index`-th episode has."""
        return ExtraRows.ALL if self.extra is None else ExtraRows(self.extra.rows[index])

    def of_episode(self, index: int) -> SourceColumn:
        """Return the column as the `index`-th episode stores it."""
        if self.extra is None or len(self.extra.dtypes) == 1:
            return self
        return replace(self, form=self.extra.stored(index))

    def read(self, episode: StoredEpisode, what: str, start: int, stop: int, rows: ExtraRows) -> dict[Key, Array]:
        """Read the rows of steps `[start, stop)` of an episode; `rows` states which rows the episode has."""
        after = self.timing == "state"
        if rows is ExtraRows.ALL:
            return self._stored(episode, what, start, stop + after)
        count = stop - start + after
        columns = {field.key: np.zeros((count, *field.shape), field.numpy) for field in self.fields()}
        if rows is ExtraRows.AFTER_STEPS:  # row t was recorded after step t, so it is row t + 1 of a state
            stored = self._stored(episode, what, max(start - 1, 0), stop)
            for key, values in stored.items():
                columns[key][count - len(values) :] = values
        return columns

    def _stored(self, episode: StoredEpisode, what: str, first: int, stop: int) -> dict[Key, Array]:
        if self.kind == "text":
            characters, lengths = encode_text(episode.strings(self.path, first, stop), self.shape[0])
            return {self.key: characters, length_key(self.key): lengths}
        form = episode.form(self.path) if self.kind == "image" else self.form
        if form is not None and self.kind == "image" and form.is_jpeg:
            frames = episode.strings(self.path, first, stop)
            return {self.key: decode_images(frames, self.shape, f"{column_name(self.path)!r} of {what}", first)}
        values = episode.array(self.path, first, stop, form)
        return {self.key: _exact(values.reshape(len(values), *self.shape), self.dtype, what, self.path)}


def _exact(values: Array, dtype: str, what: str, path: ColumnPath) -> Array:
    """Widen values to the type that the column has in other episodes."""
    if values.dtype == dtype:
        return values
    widened: Array = values.astype(dtype)
    back = widened.real if widened.dtype.kind == "c" and values.dtype.kind != "c" else widened
    if not np.array_equal(back.astype(values.dtype), values, equal_nan=values.dtype.kind in "fc"):
        raise FormatError(
            f"{column_name(path)!r} of {what} is {values.dtype}, which does not fit into the {dtype} of other episodes"
        )
    return widened


class SourceColumns:
    """The columns of a surveyed dataset with their keys, and the reasons why others are dropped."""

    def __init__(self, found: Survey) -> None:
        self._survey = found
        self._index = {number: index for index, number in enumerate(found.numbers)}
        extras, self._texts = found.extras.kept(), list[Extra]()
        self._plain = {want.path: want.key for want in found.required.columns} | extra_keys(found.extras.found)
        texts = [want.path for want in found.required.columns if want.kind == "text"]
        texts += [extra.path for extra in extras if extra.varies]
        self._keys = free_keys(self._plain, texts)
        self._rewards = self._reward()
        self.kept = [*self._required(), self._rewards]
        for extra in extras:
            if extra.form.kind == "text" and not extra.varies:
                self._texts.append(extra)
            else:
                self.kept.append(self._extra(extra))
        constant = {extra.path: self._plain[extra.path] for extra in self._texts}
        self._episode_texts = EpisodeTexts(constant, found.attributes)

    def _required(self) -> Iterator[SourceColumn]:
        for want in self._survey.required.columns:
            shape = (want.longest,) if want.kind == "text" else want.shape
            yield SourceColumn(
                want.path, self._keys[want.path], want.kind, want.dtype, shape, want.role,
                "state" if want.more else "step", want.form,
            )  # fmt: skip

    def _reward(self) -> SourceColumn:
        required = self._survey.required
        form = required.forms.get(REWARDS)
        return SourceColumn(REWARDS, REWARD, "array", required.reward_dtype, (), "reward", "result", form)

    def _extra(self, extra: Extra) -> SourceColumn:
        role: Role = "info" if extra.path[0] == "infos" else "state"
        kind: Literal["array", "text"] = "text" if extra.form.kind == "text" else "array"
        shape = (extra.longest,) if kind == "text" else extra.form.shape
        key = self._keys[extra.path]
        return SourceColumn(extra.path, key, kind, extra.form.dtype, shape, role, "state", extra.form, extra)

    def fields(self) -> tuple[tuple[Field, Timing], ...]:
        """Return the fields with their timing."""
        return tuple((field, column.timing) for column in self.kept for field in column.fields())

    def renamed_keys(self) -> dict[str, str]:
        """Return the dotted names that changed, old to new."""
        kept = {column.path: column.key for column in self.kept if column.path in self._plain}
        return renamed({path: self._plain[path] for path in kept}, kept) | self._episode_texts.renamed()

    def dropped_keys(self) -> tuple[Dropped, ...]:
        """Return the columns that cannot be kept, with the reasons."""
        return tuple(self._survey.extras.dropped({path: key_name(key) for path, key in self._plain.items()}))

    def notes(self, numbers: Sequence[int]) -> list[str]:
        """Return notes about these episodes: several element types, missing values, rows that were filled in."""
        notes, total = list[str](), len(numbers)
        dtypes = self._survey.required.reward_dtypes
        if len(dtypes) > 1:
            found = ", ".join(f"{dtype} in {count}" for dtype, count in sorted(dtypes.items()))
            notes.append(f"rewards are {found} episodes; {self._survey.required.reward_dtype} holds them all")
        notes += [
            f"{key_name(self._keys[want.path])} is {want.dtype} in the data and {want.space_dtype} in the {want.role} "
            f"space; {want.dtype} is kept"
            for want in self._survey.required.columns
            if want.contradicts
        ]
        for column in self.kept:
            name, extra = key_name(column.key), column.extra
            if extra is not None and (widened := extra.widened()):
                notes.append(f"{name} is {widened}")
            missing = self._survey.required.holes.get(column.path, set()) if extra is None else extra.holes
            if holes := missing.intersection(numbers):
                notes.append(f"{name} has no value in some rows of {len(holes)} of {total} episodes: NaN there")
            if extra is None:
                continue
            rows = [extra.rows[self._index[number]] for number in numbers]
            blank = "empty" if column.kind == "text" else "zero"
            if late := rows.count(ExtraRows.AFTER_STEPS):
                notes.append(f"{name} has no value at reset in {late} of {total} episodes: {blank} rows there")
            if absent := rows.count(ExtraRows.NONE):
                notes.append(f"{name} is missing in {absent} of {total} episodes: {blank} rows there")
        return notes

    def read(self, episode: StoredEpisode, number: int, start: int, stop: int) -> dict[Key, Array]:
        """Read every column for steps `[start, stop)` of one episode."""
        index, what = self._index[number], f"episode {number}"
        columns: dict[Key, Array] = {}
        for column in self.kept:
            columns |= column.of_episode(index).read(episode, what, start, stop, column.rows(index))
        return columns

    def read_rewards(self, episode: StoredEpisode, number: int, start: int, stop: int) -> Array:
        """Read the rewards of steps `[start, stop)` alone."""
        return self._rewards.read(episode, f"episode {number}", start, stop, ExtraRows.ALL)[REWARD]

    def read_flags(self, episode: StoredEpisode, number: int, start: int, stop: int) -> tuple[Array, Array]:
        """Read `terminated` and `truncated` as bool `[stop - start]`, however they are stored."""
        terminated, truncated = (self._flag(episode, path, number, start, stop) for path in FLAGS)
        return terminated, truncated

    def _flag(self, episode: StoredEpisode, path: ColumnPath, number: int, start: int, stop: int) -> Array:
        values = episode.array(path, start, stop, self._survey.required.forms.get(path)).reshape(-1)
        if values.dtype == bool:
            return values
        odd = np.flatnonzero((values != 0) & (values != 1))
        if odd.size:
            raise FormatError(
                f"episode {number} has {values[odd[0]].item()} for {column_name(path)!r} of step {start + odd[0]}, "
                "expected 0 or 1"
            )
        return values.astype(bool)

    def read_texts(self, episode: StoredEpisode, number: int, attributes: Mapping[ColumnPath, Any]) -> dict[str, str]:
        """Return the texts of an episode, from columns of constant text and from its `attributes`."""
        name, index = self._episode_texts.of_column, self._index[number]
        present = (extra.path for extra in self._texts if extra.rows[index] != ExtraRows.NONE)
        texts = {name(path): episode.strings(path, 0, 1)[0].decode() for path in present}
        return texts | self._episode_texts.of_attributes(attributes)


_WORTH_THREADS = 8  # starting threads for fewer frames takes longer than decoding them


def decode_images(frames: Sequence[bytes], shape: tuple[int, ...], what: str, first: int) -> Array:
    """Decode frames to uint8 `[n, *shape]`; `first` is the row of the first frame, for messages.

    Raises CorruptDataError for a frame that cannot be decoded, FormatError for one of another shape.
    """
    images = np.empty((len(frames), *shape), np.uint8)

    def decode(number: int) -> None:
        images[number] = _decode(frames[number], shape, f"{what}, row {first + number}")

    if len(frames) < _WORTH_THREADS:
        for number in range(len(frames)):
            decode(number)
    else:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            list(pool.map(decode, range(len(frames))))
    return images


def _decode(frame: bytes, shape: tuple[int, ...], what: str) -> Array:
    from PIL import Image  # needed only where there are images

    try:
        with Image.open(io.BytesIO(frame), formats=("JPEG",)) as image:
            bands = len(image.getbands())
            found = (image.height, image.width, *([bands] if bands > 1 else []))
            if found == shape:  # checked before the image takes memory
                return np.asarray(image, np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).partition("<")[0].strip() or type(error).__name__
        raise CorruptDataError(f"{what}: the image is damaged or was cut: {reason}") from error
    raise FormatError(f"{what}: the image has shape {list(found)}, but its space says {list(shape)}")


class MinariReader(FileReader):
    """Reads a Minari dataset in any folder, or in its `data` folder. Episodes are in the order of their numbers.

    Raises FormatError for contradictions and CorruptDataError for damaged files.
    """

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the folder has Minari's files, sound or not."""
        return looks_like_minari(path)

    def on_open(self) -> None:
        """Read the metadata, and open the store of episodes."""
        self.metadata = MinariMetadata.load(self.path)
        self._store = _open_store(self.metadata)
        self._found: Survey | None = None

    @property
    def folder(self) -> Path:
        """The folder that holds `metadata.json`."""
        return self.metadata.folder

    @property
    def _survey(self) -> Survey:
        return self._surveyed(None)

    def _surveyed(self, progress: Callable[[int], None] | None) -> Survey:
        if self._found is None:
            self._found = survey(self._store, self.metadata, progress)
        return self._found

    @cached_property
    def _columns(self) -> SourceColumns:
        return SourceColumns(self._survey)

    @cached_property
    def _steps(self) -> dict[int, int]:
        return dict(zip(self._survey.numbers, self._survey.steps, strict=True))

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Examine every episode, and return the facts."""
        found = self._surveyed(progress)
        return SourceFacts(
            source="minari",
            id=self.metadata.id,
            fields=self._columns.fields(),
            episode_numbers=list(found.numbers),
            steps=sum(found.steps),
            spaces={name: strict_space(space) for name, space in self.metadata.spaces().items()},
            renamed_keys=self._columns.renamed_keys(),
            dropped_keys=self._columns.dropped_keys(),
            notes=tuple(f"{name!r} is not an episode and was left out" for name in self._store.other_names()),
            documents=self.metadata.documents(),
            env_metadata=env_metadata(self.metadata),
            lengths=list(found.steps),
        )

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise the error of a damaged episode; if all are read, compare their totals with the metadata."""
        self._survey.require_sound(numbers)
        if everything:
            self._survey.require_totals(self.metadata)

    def notes_on(self, numbers: Sequence[int]) -> Sequence[str]:
        """Return notes about widened types, missing values and contradictions to the spaces in these episodes."""
        return self._columns.notes(numbers)

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        size = self.piece_rows(self._columns.fields())
        episode, steps = self._store.episode(number), self._steps[number]
        attributes = episode.attributes()
        text = self._columns.read_texts(episode, number, attributes)
        for start in range(0, steps, size):
            stop = min(start + size, steps)
            terminated, truncated = self._columns.read_flags(episode, number, start, stop)
            columns = self._columns.read(episode, number, start, stop)
            yield Piece(
                number, columns, terminated, truncated, first=not start, last=stop == steps,
                seed=seed_of(attributes), text=text,
            )  # fmt: skip

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards, and the flags of the last step, of one episode."""
        episode, steps = self._store.episode(number), self._steps[number]
        seed = seed_of(episode.attributes())
        for start in range(0, steps, OUTCOME_ROWS):
            stop = min(start + OUTCOME_ROWS, steps)
            rewards = self._columns.read_rewards(episode, number, start, stop)
            terminated, truncated = np.zeros((2, stop - start), bool)
            if stop == steps:
                ends = self._columns.read_flags(episode, number, steps - 1, steps)
                terminated[-1:], truncated[-1:] = ends
            yield Piece(
                number, {REWARD: rewards}, terminated, truncated, first=not start, last=stop == steps, seed=seed
            )

    def files(self) -> list[Path]:
        """Return the metadata and the files of the store."""
        return [self.metadata.folder / METADATA_FILE, *self._store.files()]

    def on_close(self) -> None:
        """Close the files."""
        self._store.close()


def _open_store(metadata: MinariMetadata) -> EpisodeStore:
    if metadata.data_format == "hdf5":
        return Hdf5Store(metadata.folder)
    from .arrow import ArrowStore

    return ArrowStore(metadata.folder, metadata.data_format)
