"""Takes the leaves of the flat and the ragged layout into memory."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from ...format import Array
from ...storages.codec import dtype_named
from ...ted import Field, Key
from ...torchrl import (
    STORAGE_SHAPE,
    TorchrlHeader,
    TorchrlKeys,
    TorchrlSink,
)
from ..ragged import ragged_tensor

__all__ = ["MemorySink"]


class MemorySink(TorchrlSink):
    """Makes a tensordict `result` of the leaves: flat, or with the trajectories as ragged tensors."""

    def __init__(self, *, nested: bool) -> None:
        self.result: TensorDict | None = None
        self._nested = nested
        self._leaves: dict[Key, torch.Tensor] = {}
        self._trajectories = 0

    def begin(self, leaf: Field, counts: Array) -> None:
        dtype, rows = dtype_named(f"torch.{leaf.dtype}"), int(counts.sum())
        self._trajectories = len(counts)
        if self._nested and leaf.row_bytes:
            shapes = torch.tensor([[count, *leaf.shape] for count in counts.tolist()])
            self._leaves[leaf.key], self._rows = ragged_tensor(shapes, dtype)
        else:
            self._leaves[leaf.key] = self._rows = torch.empty((rows, *leaf.shape), dtype=dtype)
        self._row = 0

    def append(self, rows: Array) -> None:
        tensor = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
        last = self._row + len(rows)
        same = tensor.dtype is self._rows.dtype
        self._rows[self._row : last].copy_(tensor if same else tensor.view(self._rows.dtype))
        self._row = last

    def skip(self, rows: int) -> None:
        self._rows[self._row : self._row + rows].zero_()
        self._row += rows

    def end(self) -> None:
        """Nothing is gathered."""

    def finish(self, header: TorchrlHeader, keys: TorchrlKeys) -> None:
        batch = [self._trajectories] if self._nested else []
        entries: dict[str, Any] = {
            keys.is_full: header.full, keys.shift: header.shift, STORAGE_SHAPE: list(header.shape)
        }  # fmt: skip
        result = TensorDict({}, batch)
        for name, value in entries.items():
            result.set_non_tensor(name, value)
        for key, leaf in self._leaves.items():
            result.set(key, leaf)
        self.result = result

    def close(self) -> None:
        """Nothing is open."""
