"""The columns of RLlib's files under their TED keys, from the forms that they have in all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import FormatError, SchemaError
from ...core.format.contracts import Array
from ...core.format.manifest import Dropped
from ...core.ted.schema import ACTION, REWARD, Field, Key, Role, Timing, dtype_name, safe_part
from .blocks import (
    ACTIONS,
    AGENTS,
    DONES,
    EPS_ID,
    INFOS,
    NEXT_OBS,
    OBS,
    REQUIRED,
    REWARDS,
    STEP,
    TERMINATEDS,
    TRUNCATEDS,
    ColumnPath,
    RowBlock,
    common_type,
    first_inexact,
)

_OBSERVATION: Key = ("observation",)
_FLAGS = (DONES, TERMINATEDS, TRUNCATEDS)
_WHOLE = (*REQUIRED, *_FLAGS, NEXT_OBS, EPS_ID, STEP, *AGENTS)
"""Columns that have to be in every row, or in none."""


@dataclass
class _ValueForm:
    """What a column has been so far: `why` it is none, where it is none.

    `inexact` states where the first whole number is that has no equal float64, "" where there is none.
    """

    dtypes: set[np.dtype[Any]]
    shape: tuple[int, ...]
    rows: int = 0
    why: str = ""
    negative: bool = False
    inexact: str = ""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type that all its rows get."""
        return common_type(self.dtypes, negative=self.negative)

    def add(self, array: Array, place: Callable[[int], str], inexact: int | None) -> None:
        """Take rows; `place` states where a row is, and `inexact` is one of them that the block knows of."""
        if array.shape[1:] != self.shape:
            self.why = self.why or "its rows have different shapes"
        elif (array.dtype == bool) != (np.dtype(bool) in self.dtypes):
            self.why = self.why or "it has both flags and numbers"
        else:
            self.dtypes.add(array.dtype)
            self.negative = self.negative or (array.dtype.kind == "i" and bool((array < 0).any()))
            inexact = first_inexact(array) if inexact is None and not self.inexact else inexact
            self.inexact = self.inexact or ("" if inexact is None else place(inexact))
        self.rows += len(array)

    def join(self, other: _ValueForm) -> None:
        """Take over the types of another column that is to have the same one, and give it those of this."""
        self.dtypes = other.dtypes = self.dtypes | other.dtypes
        self.negative = other.negative = self.negative or other.negative


class BatchColumns:
    """What all blocks have; `finish` makes fields of it.

    `has_limits` states that infos mark time limits. `sources` are the columns with their keys and when they are known,
    `next_sources` those under `next`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = 0
        self.has_limits = False
        self._forms: dict[ColumnPath, _ValueForm] = {}
        self._text: dict[ColumnPath, int] = {}
        self._odd: dict[ColumnPath, str] = {}
        self.fields: tuple[tuple[Field, Timing], ...] = ()
        self.sources: list[tuple[ColumnPath, Key, Timing]] = []
        self.next_sources: list[tuple[ColumnPath, Key]] = []
        self.renamed: dict[str, Key] = {}
        self.dropped: tuple[Dropped, ...] = ()

    def add(self, block: RowBlock, path: Path) -> None:
        """Take note of the columns of a block of the file at `path`."""

        def place(row: int) -> str:
            return path.name if block.lines is None else f"{path.name}, line {block.lines[row]:,}"

        self._rows += block.rows
        self.has_limits = self.has_limits or block.limits is not None
        for column, array in block.columns.items():
            form = self._forms.setdefault(column, _ValueForm({array.dtype}, array.shape[1:]))
            form.add(array, place, block.inexact.get(column))
        for column, texts in block.text.items():
            self._text[column] = self._text.get(column, 0) + len(texts)
        for column, why in block.odd.items():
            self._odd.setdefault(column, why)

    def has(self, name: str) -> bool:
        """Whether there is a column of that name."""
        return any(path[0] == name for path in (*self._forms, *self._text))

    @property
    def has_next(self) -> bool:
        """Whether the observation after each step is stored."""
        return bool(self.next_sources)

    def finish(self) -> None:
        """Make fields of the columns; FormatError where RLlib's own columns contradict each other."""
        dropped: list[Dropped] = []
        for path in [*self._forms]:
            if why := self._why_not(path):
                del self._forms[path]
                self._odd[path] = why
        for path, why in self._odd.items():
            if path[0] in _WHOLE:
                raise FormatError(f"{self._path}: {'.'.join(path)!r} cannot be read as rows: {why}")
            dropped.append(Dropped(".".join(path), why))
        for path, rows in self._text.items():
            if path[0] in (EPS_ID, *AGENTS) and len(path) == 1 and rows == self._rows:
                continue
            if path[0] in _WHOLE:
                raise FormatError(f"{self._path}: {'.'.join(path)!r} has text in {rows:,} rows of {self._rows:,}")
            dropped.append(Dropped(".".join(path), "it is text, a value a row"))
        for name in REQUIRED:
            if not self.has(name):
                raise FormatError(f"{self._path} has no {name!r} in its rows")
        self._match_next()
        self._lay_out(dropped)
        self.dropped = tuple(sorted(dropped, key=lambda one: one.key))

    def _why_not(self, path: ColumnPath) -> str:
        form = self._forms[path]
        if path in self._odd or path in self._text:
            return self._odd.get(path, "it has text in some rows")
        if form.rows != self._rows:
            return f"it is in {form.rows:,} of {self._rows:,} rows"
        try:
            dtype_name(form.dtype)
        except SchemaError as error:
            return str(error)
        return form.why

    def _match_next(self) -> None:
        """Give observations and those after them one type; FormatError where their shapes differ."""
        after = {path[1:]: form for path, form in self._forms.items() if path[0] == NEXT_OBS}
        before = {path[1:]: form for path, form in self._forms.items() if path[0] == OBS}
        if after and (
            after.keys() != before.keys() or any(after[name].shape != form.shape for name, form in before.items())
        ):
            raise FormatError(f"{self._path}: {OBS} and {NEXT_OBS} have different forms")
        for name, form in after.items():
            form.join(before[name])

    def _lay_out(self, dropped: list[Dropped]) -> None:
        fields: list[tuple[Field, Timing]] = []
        for path, form in sorted(self._forms.items()):
            if path[0] in _FLAGS:
                if path[0] == DONES and self.has(TERMINATEDS):
                    dropped.append(Dropped(DONES, "terminateds and truncateds state the same"))
                continue
            key, role, timing = _place(path)
            if path[0] == NEXT_OBS:
                self.next_sources.append((path, key))
                continue
            self.sources.append((path, key, timing))
            shape = () if key == REWARD else form.shape
            if key == REWARD and np.prod(form.shape, dtype=int) != 1:
                raise FormatError(f"{self._path}: rewards have rows of shape {list(form.shape)}, expected one number")
            fields.append((Field(key, dtype_name(form.dtype), shape, role), timing))
            if tuple(key[1:]) != path and role == "info":
                self.renamed[".".join(path)] = key
        self.fields = tuple(fields)

    @property
    def notes(self) -> Iterator[str]:
        """Name the columns of which float64 does not hold all whole numbers."""
        for path, form in sorted(self._forms.items()):
            if form.inexact and form.dtype.kind == "f":
                yield (
                    f"{'.'.join(path)} is {form.dtype}, since not every value is a whole number of 64 bits: not all of "
                    f"its whole numbers are exact, the first that is not is in {form.inexact}"
                )

    def like(self, block: RowBlock) -> RowBlock:
        """Give the columns of a block the types that they have in all rows."""
        for path, form in self._forms.items():
            array = block.columns[path]
            array = array.reshape(len(array)) if path == (REWARDS,) else array
            block.columns[path] = array.astype(form.dtype, copy=False)
        return block

    def text_of(self, key: tuple[Any, ...]) -> dict[str, str]:
        """Return the ids of an episode that are text."""
        names = [name for name in (EPS_ID, *AGENTS) if self.has(name)]
        return {name: value for name, value in zip(names, key, strict=False) if isinstance(value, str)}


def _place(path: ColumnPath) -> tuple[Key, Role, Timing]:
    """Return the key of a column, its role, and when it is known."""
    name, rest = path[0], tuple(map(safe_part, path[1:]))
    if name in (OBS, NEXT_OBS):
        return (*_OBSERVATION, *rest), "observation", "state"
    if name == ACTIONS:
        return (*ACTION, *rest), "action", "step"
    if name == REWARDS:
        return REWARD, "reward", "result"
    return ("info", safe_part(name), *rest), "info", "result" if name == INFOS else "step"
