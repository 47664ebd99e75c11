"""The memory behind tensors: plain views of it, and which tensors may share it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
import torch

__all__ = ["Memory", "plain_column", "zeros"]

# torch gathers no unsigned integers wider than a byte; their bits travel in the signed type of the same width.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def plain_column(leaf: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory that torch indexes without detours: no subclass, no wide unsigned type."""
    column = leaf.detach().as_subclass(torch.Tensor)
    return column.view(_SIGNED[column.dtype]) if column.dtype in _SIGNED else column


class Memory:
    """The memory behind some tensors, as it lies now.

    Whole allocations are compared by their addresses: two views of one count as the same memory even where they
    do not overlap, and so do two that were wrapped separately around one buffer.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        ranges = sorted({_addresses(tensor) for tensor in tensors})
        self._starts = [start for start, _ in ranges]
        self._stops: list[int] = []
        for _, stop in ranges:
            self._stops.append(max(stop, self._stops[-1]) if self._stops else stop)

    @property
    def span(self) -> tuple[int, int]:
        """The lowest address, and the one behind the highest."""
        return (self._starts[0], self._stops[-1]) if self._starts else (0, 0)

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Tell whether `tensor` may share an element with one of the tensors."""
        return self.touches(*_addresses(tensor))

    def touches(self, start: int, stop: int) -> bool:
        """Tell whether addresses from `start` to before `stop` lie in the memory of one of the tensors."""
        before = bisect_left(self._starts, stop)
        return before > 0 and self._stops[before - 1] > start

    def apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` itself, or a copy where it may share memory."""
        return plain_column(tensor).clone() if self.may_hold(tensor) else tensor


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    memory = tensor.untyped_storage()
    start = memory.data_ptr()
    return start, start + memory.nbytes()


def zeros(dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Make zeros; on the CPU, of memory that is only taken when it is first written."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    whole = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
    return whole.view(dtype).view(tuple(shape))
