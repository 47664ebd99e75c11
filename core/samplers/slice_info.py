"""The info of slices: which of their steps are first, last and real, and the flags that follow from that."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..storages.base import Storage
from ..storages.pytree import entry_of
from ..storages.tensor import TensorStorage
from .boundaries import Key, stored_entry

Numbers: TypeAlias = NDArray[np.int64]


class SliceEnds(NamedTuple):
    """Which steps of slices are first, last and real (not padding): bool `[slices, steps]`, or flattened.

    `last` has a trailing dimension of size one, like the flags of TED. `place` numbers the steps of one slice.
    """

    first: torch.Tensor
    last: torch.Tensor
    real: torch.Tensor
    place: Numbers

    @classmethod
    def of(cls, taken: Numbers, slice_len: int, *, flat: bool) -> SliceEnds:
        """Mark slices of `slice_len` steps, of which `taken` are real; `flat` flattens the result."""
        place = np.arange(slice_len)
        shape = (len(taken) * slice_len,) if flat else (len(taken), slice_len)
        first = np.broadcast_to(place == 0, (len(taken), slice_len)).reshape(shape)
        last = (place == taken[:, None] - 1).reshape(*shape, 1)
        real = (place < taken[:, None]).reshape(shape)
        return cls(torch.tensor(first), torch.from_numpy(last), torch.from_numpy(real), place)

    @classmethod
    def whole(cls, size: torch.Size, slice_len: int) -> SliceEnds:
        """Mark whole slices, one after the other, in a batch of this size."""
        ends = cls.of(np.full(size.numel() // slice_len, slice_len), slice_len, flat=True)
        return cls(ends.first.view(size), ends.last.view(*size, 1), ends.real.view(size), ends.place)

    def kept(self) -> SliceEnds:
        """Return the marks of the real steps, flattened."""
        return SliceEnds(self.first[self.real], self.last[self.real], self.real[self.real], self.place)


class SliceMarks:
    """Makes the flags of a sampler's info: `is_init`, `truncated`, and `done` and `terminated` next to it."""

    def __init__(self, truncated: Key | None) -> None:
        self.key = truncated
        siblings = () if truncated is None else ((*truncated[:-1], "done"), (*truncated[:-1], "terminated"))
        self._keys: tuple[Key, ...] = (("is_init",), *siblings)
        flags = () if truncated is None else (truncated, *siblings)
        self._names = [key[0] if len(key) == 1 else key for key in flags]
        self._known: tuple[weakref.ref[Any], list[torch.Tensor | None]] | None = None
        self.keeps_rows = False
        """Whether whole rows are read, and kept as `rows`, instead of single entries."""
        self.rows: Any = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[SliceMarks]:
        """Keep the rows that are read inside the context."""
        self.keeps_rows = True
        try:
            yield self
        finally:
            self.keeps_rows, self.rows = False, None

    def of(self, storage: Storage, index: tuple[torch.Tensor, ...], ends: SliceEnds) -> dict[Any, torch.Tensor]:
        """Return the flags of the steps at an index, with `ends` the marks of their slices."""
        return self._marked(self._stored(storage, index), ends)

    def of_rows(self, rows: Any, ends: SliceEnds) -> dict[Any, torch.Tensor]:
        """Return the flags of steps that were read, a tensordict of the shape of the marks."""
        return self._marked(self._shown(rows, self._keys), ends)

    def _marked(self, found: Sequence[torch.Tensor | None], ends: SliceEnds) -> dict[Any, torch.Tensor]:
        info: dict[Any, torch.Tensor] = {}
        if found[0] is not None:
            info["is_init"] = found[0] | _like(ends.first, found[0])
        if self._names:
            last = ends.last
            done, terminated = (  # with a trailing dimension of size one, also if they are stored without it
                flags.unsqueeze(-1) if flags is not None and flags.dim() < last.dim() else flags for flags in found[1:]
            )
            info[self._names[0]] = last.clone()
            info[self._names[1]] = last.clone() if done is None else done | _like(last, done)
            info[self._names[2]] = torch.zeros_like(last) if terminated is None else terminated
        return info

    def _stored(self, storage: Storage, index: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
        """Read the flags of the steps at an index; None for those that are not stored."""
        if not isinstance(storage, TensorStorage):
            return self._shown(storage.get(index if len(index) > 1 else index[0]), self._keys)
        columns = storage.columns
        if self._known is None or self._known[0]() is not columns:
            self._known = weakref.ref(columns), [stored_entry(storage, key) for key in self._keys]
        leaves = self._known[1]
        if self.keeps_rows:
            there = [None if leaf is None else key for key, leaf in zip(self._keys, leaves, strict=True)]
            return self._shown(storage.get(index if len(index) > 1 else index[0]), there)
        return [None if leaf is None else _gathered(leaf, index) for leaf in leaves]

    def _shown(self, rows: Any, keys: Sequence[Key | None]) -> list[torch.Tensor | None]:
        """Return the flags of rows, and keep the rows if `keeps_rows`."""
        if self.keeps_rows:
            self.rows = rows
        if isinstance(rows, list):
            rows = torch.stack(rows)
        found = [None if key is None else entry_of(rows, key) for key in keys]
        return [flags if flags is None or flags.dtype == torch.bool else flags.bool() for flags in found]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": None, "rows": None, "keeps_rows": False}


def _gathered(leaf: torch.Tensor, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    if len(index) == 1 and index[0].dim() == 1:
        found = leaf.index_select(0, index[0].to(leaf.device))
    else:
        found = leaf[tuple(part.to(leaf.device) for part in index)]
    return found if found.dtype == torch.bool else found.bool()


def _like(flags: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return flags of steps with as many dimensions as values of steps, on their device."""
    if flags.dim() < values.dim():
        flags = flags.view(*flags.shape, *(1,) * (values.dim() - flags.dim()))
    return flags if values.is_cpu else flags.to(values.device)
