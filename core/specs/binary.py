"""Bits."""

from __future__ import annotations

import torch

from ..errors import UsageError
from .base import concrete
from .boxes import BinaryBox, Box
from .categorical import Categorical
from .enumeration import combinations
from .failures import SpecTypeError
from .values import DeviceLike, ShapeLike, as_shape

__all__ = ["Binary"]


class Binary(Categorical):
    """Tensors of zeros and ones, int8 by default: a Categorical of two for each bit.

    `n` bits in a row, or a `shape` whose last size is `n`; UsageError if it is another, SpecTypeError (a TypeError) if
    neither is given. One event is the last dimension: `cardinality` and `enumerate` count and list its `2**n` rows.

    >>> from rbtool.core.specs import Binary
    >>> Binary(2).enumerate()
    tensor([[0, 0],
            [0, 1],
            [1, 0],
            [1, 1]], dtype=torch.int8)
    """

    def __init__(
        self,
        n: int | None = None,
        shape: ShapeLike | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | str | None = torch.int8,
    ) -> None:
        if shape is None:
            if n is None:
                raise SpecTypeError("Binary() was called without n and without shape; one of them is needed")
            shape = (n,)
        sizes = as_shape(shape)
        if n is not None and (not sizes or sizes[-1] != n):
            raise UsageError(f"Binary of {n} bits was asked for in the shape {list(sizes)}, whose last size is another")
        super().__init__(2, sizes, device, torch.int8 if dtype is None else dtype)

    @property
    def bits(self) -> int:
        """Bits of one event: the last size, 1 for a single bit."""
        sizes = concrete(self._shape)
        return sizes[-1] if sizes else 1

    @property
    def space(self) -> Box:
        return BinaryBox(self.bits)

    def cardinality(self) -> float:
        """Count the rows of bits."""
        return int(2**self.bits)

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """List the rows of bits along dimension 0; `use_mask` leaves out those with a bit that is not legal."""
        sizes = concrete(self._shape)
        rows = combinations([2] * self.bits, self._device).to(self._dtype)
        listed = rows.reshape(-1, *[1] * (len(sizes) - 1), *sizes[-1:]).expand(-1, *sizes)
        if use_mask and self._mask is not None:
            listed = listed[self._members(listed).flatten(1).all(1)]
        return listed.clone()
