"""The first pass over a Minari dataset: the structure of every episode, and its text, but no numbers.

Every episode must have the columns of the observation and action spaces, rewards and flags. Extra columns, such as
infos, may be missing: each episode has such a column with a row before the first step (T+1 rows), without it (T rows),
or not at all. A column that cannot be kept is listed with the reason.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal

import numpy as np

from ...core.errors import FormatError
from ...core.format.documents import dump_json
from ...core.format.episodes import normal_form
from ...core.format.manifest import ENV_METADATA, HIDDEN, Dropped
from ...core.ted.schema import LONGEST_ROW, Key, Role, file_stem, key_name, length_key, safe_part
from ..files.columns import ColumnForm, ColumnPath, StoredColumn, column_name
from .metadata import MinariMetadata, space_leaves
from .store import DERIVED, EpisodeStore, StoredEpisode, look_at_text

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
                _look_at_extra_text(extra, episode, column.rows, number)

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


_RENAMED_TOPS = {"observations": "observation", "actions": "action", "infos": "info"}
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
        path: (_RENAMED_TOPS.get(path[0], path[0]), *(part(path, depth) for depth in range(1, len(path))))
        for path in paths
    }


def free_keys(keys: Mapping[ColumnPath, Key], texts: Collection[ColumnPath]) -> dict[ColumnPath, Key]:
    """Map each column from its key to a free one: a reserved name gets a trailing `_`.

    Reserved are tensordict's own names, TED's names at the top level, and the lengths of the columns in `texts`. A
    reserved name that ends in `_` already gets one more, so that no two columns get the same key.
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


CONTRADICTION = "metadata.json contradicts the data: correct it, or copy or fetch the dataset again"
REWARDS: ColumnPath = ("rewards",)
FLAGS: tuple[ColumnPath, ColumnPath] = (("terminations",), ("truncations",))
_TOPS: dict[str, Literal["observation", "action"]] = {"observations": "observation", "actions": "action"}
_INDEX = re.compile(r"_index_(\d+)")


@dataclass(slots=True)
class Required:
    """An observation or action column: its space and, after the first episode, how it is stored.

    `more` is the number of rows beyond one for each step; `space_dtype` is the element type in the space, "" without
    a space.
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
        """Whether space and data differ in element type; the data's is kept."""
        return (
            self.kind == "array"
            and self.form is not None
            and bool(self.space_dtype)
            and np.dtype(self.space_dtype) != self.dtype
        )

    def stored_dtype(self, form: ColumnForm) -> str:
        """Element type of the rows as read, or raise FormatError if they contradict the space."""
        if self.kind == "text":
            if form.kind == "text":
                return "uint8"
        elif self.kind == "image" and form.is_jpeg:
            return "uint8"
        elif form.kind == "array":
            if form.shape == self.shape or (form.flat and math.prod(form.shape) == math.prod(self.shape)):
                return form.dtype
            found, wanted = list(form.shape), list(self.shape)
            raise FormatError(f"{self._name} has rows of shape {found}, the {self.role} space says {wanted}")
        why = form.why or f"it holds {form.kind}"
        raise FormatError(f"{self._name} is not what the {self.role} space says, {self.kind}: {why}")

    @property
    def _name(self) -> str:
        return repr(column_name(self.path))


def plain_part(name: str) -> str:
    """Name of a Tuple element without the prefix of HDF5."""
    match = _INDEX.fullmatch(name)
    return match[1] if match else name


class RequiredColumns:
    """Compares each episode with the spaces, and with the first sound episode."""

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
                raise FormatError(f"episode {number}: {column_name(path)!r} is not one number a step")
        self._refuse_unknown(number, columns)
        self._remember(number, columns, dtypes)
        return steps

    def _add_without_space(self, columns: Mapping[ColumnPath, StoredColumn]) -> None:
        """Take the columns of the first episode where there is no space."""
        for top in self._without_space:
            for path, column in columns.items():
                form = column.form
                if path[0] == top and form.kind in ("array", "text"):
                    key = (_TOPS[top], *(plain_part(part) for part in path[1:]))
                    self._want(path, key, "text" if form.kind == "text" else "array", form.dtype, form.shape)
        self._without_space = []

    def _steps(self, number: int, columns: Mapping[ColumnPath, StoredColumn]) -> int:
        """Compare the lengths of all columns."""
        stepwise = [REWARDS, *FLAGS, *(want.path for want in self.columns if not want.more)]
        steps = columns[REWARDS].rows
        if any(columns[path].rows != steps for path in stepwise):
            lengths = ", ".join(f"{column_name(path)} {columns[path].rows}" for path in sorted(stepwise))
            raise FormatError(f"episode {number}: columns that have one row a step differ in length: {lengths}")
        if not steps:
            raise FormatError(f"episode {number} has no steps; every episode needs one at least")
        for want in self.columns:
            rows = columns[want.path].rows
            if want.more and rows != steps + 1:
                raise FormatError(
                    f"episode {number} has {rows} rows of {column_name(want.path)!r} for {steps} steps, "
                    f"expected {steps + 1}: the one after the last step too"
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
                f"episode {number}: {column_name(want.path)!r} is {dtype}, in episode {want.seen_in} it is {want.dtype}"
            )
        return dtype

    def _refuse_unknown(self, number: int, columns: Mapping[ColumnPath, StoredColumn]) -> None:
        for path in columns:
            if path[0] in _TOPS and path not in self._paths:
                raise FormatError(
                    f"episode {number} holds {column_name(path)!r}, which the {_TOPS[path[0]]} space does not name",
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
        """Type that holds the rewards of all episodes, which may be integers in some and floats in others."""
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
        """Raise FormatError if the metadata state other totals than the data have."""
        for what, stated, found in (
            ("episodes", metadata.total_episodes, len(self.numbers)),
            ("steps", metadata.total_steps, sum(self.steps)),
        ):
            if stated is not None and stated != found:
                raise FormatError(
                    f"metadata.json says {stated:,} {what}, the data hold {found:,}",
                    hint="copy or fetch the dataset again" + self._episodes_option(),
                )

    def _episodes_option(self) -> str:
        """Write the choice of all episodes as an `--episodes` option: a choice is not compared with the totals."""
        runs: list[tuple[int, int | None]] = []
        for number in self.numbers:
            if runs and runs[-1][1] == number:
                runs[-1] = runs[-1][0], number + 1
            else:
                runs.append((number, number + 1))
        return f"; to take the episodes that are there, add --episodes {normal_form(runs)}" if runs else ""


def survey(store: EpisodeStore, metadata: MinariMetadata, progress: Callable[[int], None] | None = None) -> Survey:
    """Look at every episode once; the error of a damaged one is kept until that episode is requested."""
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
    """Find the longest row of the observations and actions that are text."""
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
