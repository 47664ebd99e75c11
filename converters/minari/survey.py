"""The first pass over a Minari dataset: the structure of every episode, and its text, but no numbers.

Every episode must have the columns of the observation and action spaces, rewards and flags."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...core.errors import FormatError
from ...core.format.episodes import normal_form
from ...core.ted.schema import LONGEST_ROW, Key, Role
from ..files.columns import ColumnForm, ColumnPath, StoredColumn, column_name
from .extras import ExtraColumns
from .metadata import MinariMetadata
from .spaces import space_leaves
from .store import EpisodeStore, StoredEpisode, look_at_text

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
        """Whether the element type of the space differs from that of the data, which is kept."""
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
        """Raise FormatError if the totals of the metadata differ from those of the data."""
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
            _look_at_text(required, number, episode, steps[index])
            attributes.update(episode.attribute_paths())
        except FormatError as error:
            problems[number], steps[index] = error, 0
            continue
        extras.add(index, number, episode, columns, steps[index])
    extras.finish()
    return Survey(store.numbers, steps, problems, required, extras, attributes)


def _look_at_text(required: RequiredColumns, number: int, episode: StoredEpisode, steps: int) -> None:
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
