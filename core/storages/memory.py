"""Which tensors share memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

import torch


class Memory:
    """The current memory of some tensors.

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

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The first address and the one behind the last of each part, in ascending order."""
        return list(zip(self._starts, self._stops, strict=True))

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` may share an element with one of the tensors."""
        return self.touches(*_addresses(tensor))

    def touches(self, start: int, stop: int) -> bool:
        """Whether addresses from `start` to before `stop` are in the memory of one of the tensors."""
        before = bisect_left(self._starts, stop)
        return before > 0 and self._stops[before - 1] > start

    def apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` itself, or a copy where it may share memory."""
        return tensor.detach().as_subclass(torch.Tensor).clone() if self.may_hold(tensor) else tensor


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    memory = tensor.untyped_storage()
    start = memory.data_ptr()
    return start, start + memory.nbytes()
