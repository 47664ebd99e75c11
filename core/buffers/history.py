"""Rows of a storage with what transforms need of the steps before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import SchemaError
from ..samplers.boundaries import StrictBoundaries
from ..samplers.earlier_steps import Ages, EarlierSteps, Rooms, StreamAges
from ..samplers.trajectories import TableFinder
from ..storages.base import Storage
from ..storages.cursors import as_index, row_numbers
from ..storages.stream import StreamStorage
from .pytrees import stack_elements, swap


class History:
    """Applies the transforms that look back to rows that were just read."""

    def __init__(self) -> None:
        self._tables: dict[Any, TableFinder] = {}
        self._rooms = Rooms()

    def complete(self, transforms: Sequence[Any], storage: Storage, index: Any, rows: Any, dim_extend: int = 0) -> Any:
        """Return the rows at an index, in any form, as these transforms make them.

        With a `dim_extend` above 0, dimension 0 of the index is the first one of the user's data.
        Rows and steps before them are those of one moment only if the caller excludes writers, or notices them.
        """
        objects = isinstance(rows, list)
        if objects:
            rows = stack_elements(rows)
        numbers = _coordinates(storage, index, dim_extend)
        for transform in transforms:
            ages = self._ages(transform, storage)
            past = EarlierSteps(storage, ages, numbers, transform.looks_back, self._rooms)
            rows = transform.with_past(rows, past)
        return list(rows.unbind(0)) if objects else rows

    def _ages(self, transform: Any, storage: Storage) -> Ages:
        """Return how far back the episodes of a storage go."""
        done_key, traj_key = transform.episode_keys
        if isinstance(storage, StreamStorage):
            if traj_key is not None:
                raise SchemaError(
                    f"traj_key is {'.'.join(traj_key)}, and the episodes of a stream are those of its shards",
                    hint="leave traj_key out",
                )
            return StreamAges(storage)
        tables = self._tables.get(transform.episode_keys)
        if tables is None:
            boundaries = StrictBoundaries(done_key, traj_key)
            tables = self._tables[transform.episode_keys] = TableFinder(boundaries.source)
        return tables.table(storage)


def _coordinates(storage: Storage, index: Any, dim_extend: int) -> tuple[NDArray[np.int64], ...]:
    """Return the elements at an index of valid ones: an array for each dimension of the storage, in its shape."""
    if isinstance(storage, StreamStorage):
        return (storage.numbers_at(index),)
    if storage.ndim == 1:
        return (row_numbers(as_index(index, 1), len(storage)),)
    if isinstance(index, tuple) and len(index) == storage.ndim and all(isinstance(one, torch.Tensor) for one in index):
        return tuple(one.numpy(force=True).astype(np.int64, copy=False) for one in index)
    cells = swap(torch.arange(storage.shape.numel()).reshape(storage.shape), dim_extend)[index]
    return tuple(np.unravel_index(cells.numpy(), tuple(storage.shape)))
