"""What is said of the steps of slices: where they begin, and that they were cut off at their ends."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..storages import Storage, TensorStorage
from .signals import Key, stored_entry

__all__ = ["SliceEnds", "SliceMarks"]

Marks: TypeAlias = NDArray[np.bool_]

_IS_INIT: Key = ("is_init",)


class SliceEnds(NamedTuple):
    """Which steps of slices come first, which last, and which are real; bool `[slices, steps]`, or as one vector."""

    first: Marks
    last: Marks
    real: Marks

    @classmethod
    def of(cls, taken: NDArray[np.int64], slice_len: int) -> SliceEnds:
        """Mark slices of `slice_len` steps, of which so many are real."""
        shape = len(taken), slice_len
        first, last = np.zeros(shape, bool), np.zeros(shape, bool)
        first[:, 0] = True
        real = np.arange(slice_len) < taken[:, None]
        last[np.arange(len(taken)), taken - 1] = True
        return cls(first, last, real)

    def flat(self) -> SliceEnds:
        """Put the slices one behind the other."""
        return SliceEnds(*(part.reshape(-1) for part in self))

    def kept(self) -> SliceEnds:
        """Leave the real steps, one slice behind the other."""
        return SliceEnds(*(part[self.real] for part in self))


class SliceMarks:
    """Makes the entries of a sampler's info that concern ends: `truncated`, and `done` and `terminated` beside it."""

    def __init__(self, truncated: Key | None) -> None:
        self.truncated = truncated
        parent = () if truncated is None else truncated[:-1]
        beside = () if truncated is None else ((*parent, "done"), (*parent, "terminated"))
        self._keys: tuple[Key, ...] = (_IS_INIT, *beside)
        self._known: tuple[weakref.ref[Any], list[torch.Tensor | None]] | None = None
        self.rows: Any = None
        self._keeps_rows = False

    def of(self, storage: Storage, index: tuple[torch.Tensor, ...], ends: SliceEnds) -> dict[Any, torch.Tensor]:
        """Return the info on the steps at an index, of which `ends` says which come first and last in a slice."""
        found = self._stored(storage, index)
        info: dict[Any, torch.Tensor] = {}
        if found[0] is not None:
            info[_IS_INIT[0]] = found[0] | _like(torch.from_numpy(ends.first), found[0])
        if self.truncated is not None:
            _, done_key, terminated_key = self._keys
            done, terminated = found[1:]
            last = torch.from_numpy(ends.last.copy()).unsqueeze(-1)
            info[_info_key(self.truncated)] = last
            info[_info_key(done_key)] = last.clone() if done is None else done | _like(last, done)
            info[_info_key(terminated_key)] = torch.zeros_like(last) if terminated is None else terminated
        return info

    def _stored(self, storage: Storage, index: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
        """Read the entries of the steps at an index; None for what is not stored."""
        if self._keeps_rows or not isinstance(storage, TensorStorage):
            rows: Any = storage.get(index if len(index) > 1 else index[0])
            self.rows = rows if self._keeps_rows else None
            if isinstance(rows, list):
                rows = torch.stack(rows)
            found = [rows.get(key, None) for key in self._keys]
            return [flags if flags is None or flags.dtype == torch.bool else flags.bool() for flags in found]
        columns = storage.columns
        if self._known is None or self._known[0]() is not columns:
            self._known = weakref.ref(columns), [stored_entry(storage, key, valid=False) for key in self._keys]
        return [None if leaf is None else _gathered(leaf, index) for leaf in self._known[1]]

    @contextlib.contextmanager
    def reading_rows(self) -> Iterator[None]:
        """Have what is read of the storage be whole rows, and kept as `rows` meanwhile."""
        self._keeps_rows = True
        try:
            yield
        finally:
            self._keeps_rows, self.rows = False, None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": None}


def _gathered(leaf: torch.Tensor, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if len(index) == 1 and index[0].dim() == 1:
        found = leaf.index_select(0, index[0].to(leaf.device))
    else:
        found = leaf[tuple(part.to(leaf.device) for part in index)]
    return found if found.dtype == torch.bool else found.bool()


def _like(flags: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Give flags of steps the dimensions that values of steps have."""
    if flags.dim() < values.dim():
        flags = flags.view(*flags.shape, *(1,) * (values.dim() - flags.dim()))
    return flags if values.is_cpu else flags.to(values.device)


def _info_key(key: Key) -> str | Key:
    return key[0] if len(key) == 1 else key
