"""A storage that reads rows from disk when they are asked for, out of any layout rbtool writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from ..errors import SchemaError
from ..format import Array, StepReader
from ..ted import Field, Key
from .arrays import tensor_of, tensordict_of
from .base import IndexedStorage
from .cursors import as_index, row_numbers

__all__ = ["StepStorage"]


class StepStorage(IndexedStorage):
    """The rows behind a `StepReader`, as a storage that cannot be written: each `get` reads just those rows.

    Neighbouring rows are read together. Writing raises SchemaError.
    """

    def __init__(self, reader: StepReader) -> None:
        super().__init__(max(1, reader.manifest.steps))
        self._reader = reader

    def __len__(self) -> int:
        return self._reader.manifest.steps

    def episode_lengths(self) -> NDArray[np.int64]:
        """List the lengths of the episodes."""
        return self._reader.episodes.length

    def entry(self, key: tuple[str, ...], index: Any) -> torch.Tensor | None:
        """Read one leaf of the rows at `index` alone; None where there is none."""
        field = next((field for field in self._reader.fields if field.key == key), None)
        return None if field is None else self._tensors([field], row_numbers(as_index(index, 1), len(self)))[key]

    def read_at(self, index: Any) -> TensorDict:
        """Read the rows at `index` into fresh tensors."""
        numbers = row_numbers(as_index(index, 1), len(self))
        return tensordict_of(self._tensors(self._reader.fields, numbers), numbers.shape)

    def _tensors(self, fields: Iterable[Field], numbers: Array) -> dict[Key, torch.Tensor]:
        unique, place = np.unique(numbers.reshape(-1), return_inverse=True)
        tensors = {}
        for field in fields:
            rows = self._read(field, unique)[place.reshape(-1)]
            tensors[field.key] = tensor_of(rows.reshape((*numbers.shape, *field.shape)), field)
        return tensors

    def _read(self, field: Field, rows: Array) -> Array:
        """Read sorted rows of one leaf, each run of neighbours at once."""
        found = np.empty((len(rows), *field.shape), field.numpy)
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        for run in np.split(np.arange(len(rows)), breaks) if len(rows) else ():
            found[run] = self._reader.read(field.key, int(rows[run[0]]), int(rows[run[-1]]) + 1)
        return found

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """Refuse: datasets are never edited."""
        raise SchemaError(f"{self._reader.path} is read-only: datasets are never edited in place")

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Refuse: datasets are never edited."""
        raise SchemaError(f"{self._reader.path} is read-only: datasets are never edited in place")

    def save_state(self) -> dict[str, Any]:
        """Return the digest of the contents, which lie on disk."""
        return {"content_digest": self._reader.manifest.content_digest, "_len": len(self)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Check that the state is of these very contents."""
        if state["content_digest"] != self._reader.manifest.content_digest:
            raise SchemaError(f"the state belongs to other data than {self._reader.path}")

    def clear_rows(self) -> None:
        """Refuse: datasets are never edited."""
        raise SchemaError(f"{self._reader.path} is read-only: datasets are never edited in place")
