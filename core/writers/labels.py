"""Puts into a tensordict the numbers of the rows it goes to."""

from __future__ import annotations

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection

from ..storages import Storage

__all__ = ["INDEX", "Labels"]

INDEX = "index"


class Labels:
    """Labels what goes into one storage, unless its rows have no place for labels.

    A storage has none if it was filled without: by another writer, from a checkpoint, or by whoever made its tensors.
    """

    def __init__(self) -> None:
        self._kept: bool | None = None

    def put(self, data: TensorDictBase, rows: int | range | torch.Tensor, storage: Storage) -> TensorDictBase:
        """Return `data` with `"index"`, int64 of its batch size; it shares its other entries with the caller's."""
        if self._kept is None:
            self._kept = _has_place(storage)
        if self._kept is False:
            return data
        numbers = torch.arange(rows.start, rows.stop) if isinstance(rows, range) else torch.as_tensor(rows)
        storage.numbered_by = INDEX
        labelled = data.copy()
        if isinstance(labelled, LazyStackedTensorDict) and labelled.stack_dim == 0 and numbers.dim():
            for row, element in zip(numbers, labelled.tensordicts, strict=True):  # whose shapes may differ
                element.set(INDEX, row.expand(element.batch_size))
            return labelled
        numbers = numbers.reshape(-1, *[1] * (data.ndim - 1)) if data.ndim and numbers.dim() else numbers
        return labelled.set(INDEX, numbers.expand(data.batch_size))


def _has_place(storage: Storage) -> bool | None:
    """Look whether the rows of a storage have an `"index"`; None while there is nothing to look at."""
    try:
        rows = storage.get(slice(0, 0))
    except (RuntimeError, IndexError):  # nothing was ever written
        return None
    if not is_tensor_collection(rows):  # a list, whose rows need not be alike
        return True
    names = set(rows.keys())
    return INDEX in names if names else None
