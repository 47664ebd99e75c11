"""The columns that every episode must have: observations and actions as the spaces say, rewards and flags."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...core.errors import FormatError
from ...core.ted import Key, Role
from .metadata import MinariMetadata
from .spaces import space_leaves
from .store import Column, ColumnPath, EpisodeStore, Form, column_name

__all__ = ["CONTRADICTION", "FLAGS", "REWARDS", "Required", "RequiredColumns", "plain_part"]

CONTRADICTION = "metadata.json contradicts the data: correct it, or copy or fetch the dataset again"
REWARDS: ColumnPath = ("rewards",)
FLAGS: tuple[ColumnPath, ColumnPath] = (("terminations",), ("truncations",))
_TOPS: dict[str, Literal["observation", "action"]] = {"observations": "observation", "actions": "action"}
_INDEX = re.compile(r"_index_(\d+)")


@dataclass(slots=True)
class Required:
    """An observation or action column: what the space wants and, once an episode was seen, how it is stored.

    `more` is the number of rows it has beyond one a step; `said` is the element type in the space, if there is one.
    """

    path: ColumnPath
    key: Key
    role: Role
    kind: Literal["array", "image", "text"]
    dtype: str
    shape: tuple[int, ...]
    more: int
    form: Form | None = None
    seen_in: int = -1
    longest: int = 1
    said: str = ""

    @property
    def contradicts(self) -> bool:
        """Whether the space says another element type than the data, which count, have."""
        return self.kind == "array" and self.form is not None and bool(self.said) and np.dtype(self.said) != self.dtype

    def stored_dtype(self, form: Form) -> str:
        """Element type of the rows as they will be read, or raise FormatError where the space contradicts."""
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
    """Name of a Tuple element without what HDF5 puts before its number."""
    match = _INDEX.fullmatch(name)
    return match[1] if match else name


class RequiredColumns:
    """Holds episode after episode against the spaces, and against the first sound one."""

    def __init__(self, metadata: MinariMetadata, store: EpisodeStore) -> None:
        self._unsaid: list[str] = []
        self._paths: set[ColumnPath] = set()
        self.columns: list[Required] = []
        self.reward_dtypes: dict[str, int] = {}
        self.holes: dict[ColumnPath, set[int]] = {}
        """The episodes in which values of a column are missing."""
        self.forms: dict[ColumnPath, Form | None] = {}
        spaces = {"observations": metadata.observation_space, "actions": metadata.action_space}
        for top, space in spaces.items():
            if space is None:
                self._unsaid.append(top)
                continue
            for leaf in space_leaves(space):
                path = (top, *store.location(leaf.path))
                key = (_TOPS[top], *(str(part) for part in leaf.path))
                self._want(path, key, leaf.kind, leaf.dtype, leaf.shape)
                self.columns[-1].said = leaf.dtype

    def _want(
        self, path: ColumnPath, key: Key, kind: Literal["array", "image", "text"], dtype: str, shape: tuple[int, ...]
    ) -> None:
        role = _TOPS[path[0]]
        self._paths.add(path)
        self.columns.append(Required(path, key, role, kind, dtype, shape, more=int(role == "observation")))

    def check(self, number: int, columns: Mapping[ColumnPath, Column]) -> int:
        """Return the number of steps of a sound episode; raise FormatError for any other."""
        self._learn(columns)
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
        self._refuse_strangers(number, columns)
        self._remember(number, columns, dtypes)
        return steps

    def _learn(self, columns: Mapping[ColumnPath, Column]) -> None:
        """Without a space, take the first episode for what the columns are."""
        for top in self._unsaid:
            for path, column in columns.items():
                form = column.form
                if path[0] == top and form.kind in ("array", "text"):
                    key = (_TOPS[top], *(plain_part(part) for part in path[1:]))
                    self._want(path, key, "text" if form.kind == "text" else "array", form.dtype, form.shape)
        self._unsaid = []

    def _steps(self, number: int, columns: Mapping[ColumnPath, Column]) -> int:
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
                    f"{steps + 1} are expected: the one after the last step too"
                )
        return steps

    def _dtype(self, number: int, want: Required, form: Form) -> str:
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

    def _refuse_strangers(self, number: int, columns: Mapping[ColumnPath, Column]) -> None:
        for path in columns:
            if path[0] in _TOPS and path not in self._paths:
                raise FormatError(
                    f"episode {number} holds {column_name(path)!r}, which the {_TOPS[path[0]]} space does not name",
                    hint=CONTRADICTION,
                )

    def _remember(self, number: int, columns: Mapping[ColumnPath, Column], dtypes: Sequence[str]) -> None:
        for want, dtype in zip(self.columns, dtypes, strict=True):
            if want.form is None:
                want.form, want.dtype, want.seen_in = columns[want.path].form, dtype, number
        for path in (REWARDS, *(want.path for want in self.columns)):
            if columns[path].form.holes:
                self.holes.setdefault(path, set()).add(number)
        for path in (REWARDS, *FLAGS):
            form = columns[path].form
            if self.forms.setdefault(path, form) != form:
                self.forms[path] = None  # it differs from episode to episode: look each time
        dtype = columns[REWARDS].form.dtype
        self.reward_dtypes[dtype] = self.reward_dtypes.get(dtype, 0) + 1

    @property
    def reward_dtype(self) -> str:
        """Type that holds the rewards of all episodes: whole numbers in some and fractions in others happen."""
        return np.result_type(*(self.reward_dtypes or ["float64"])).name
