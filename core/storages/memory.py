"""Tells which tensors may lie in the same memory as others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import torch

from .columns import plain_column

__all__ = ["Memory"]


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

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Tell whether `tensor` may share an element with one of the tensors."""
        start, stop = _addresses(tensor)
        before = bisect_left(self._starts, stop)
        return before > 0 and self._stops[before - 1] > start

    def apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` itself, or a copy where it may share memory."""
        return plain_column(tensor).clone() if self.may_hold(tensor) else tensor


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    memory = tensor.untyped_storage()
    start = memory.data_ptr()
    return start, start + memory.nbytes()
