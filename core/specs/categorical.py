"""Numbers of categories, and bits."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import SchemaError, UsageError
from .base import batched, concrete
from .bounded import type_limits
from .leaf import LeafSpec
from .values import (
    FEW,
    MANY,
    WHOLE_TYPES,
    BinaryBox,
    Box,
    CategoricalBox,
    DeviceLike,
    ShapeLike,
    SpecTypeError,
    are_categories,
    as_count,
    as_shape,
    combinations,
    draw_categories,
    looked_up,
    mask_over,
    nearest_categories,
)

if TYPE_CHECKING:
    from .one_hot import OneHot

_Spec = TypeVar("_Spec", bound="CategoriesSpec")


class CategoriesSpec(LeafSpec):
    """What specs of numbers of categories have in common."""

    domain = "discrete"

    @abstractmethod
    def _legal(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the number of categories of each element, and which of them are legal (None: all)."""

    def _members(self, value: torch.Tensor) -> torch.Tensor:
        return are_categories(value, *self._legal())

    def _nearest(self, value: torch.Tensor) -> torch.Tensor:
        return nearest_categories(value, *self._legal()).to(self._dtype)

    def to_categorical(self, value: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return the value, which is numbers of categories already; `safe` checks it against the spec."""
        if safe:
            self.assert_is_in(value)
        return value

    def to_categorical_spec(self: _Spec) -> _Spec:
        return self


class Categorical(CategoriesSpec):
    """Whole numbers from 0 to `n - 1`, each element for itself; int64 scalars by default.

    `n=-1` leaves the number of categories open until `set_provisional_n`: until then every number from 0 is a member,
    and there is no `n` to ask for and nothing to draw (SchemaError, a RuntimeError). `mask`, a bool tensor that
    broadcasts to `[*shape, n]`, marks the legal categories; at least one has to be for each element.

    >>> import torch
    >>> from rbtool import Categorical
    >>> Categorical(4, mask=torch.tensor([True, False, False, True])).enumerate(use_mask=True)
    tensor([0, 3])
    """

    _PARAMETERS = ("_mask",)
    _FACTS = ("_n",)

    def __init__(
        self,
        n: int,
        shape: ShapeLike | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | str | None = torch.int64,
        mask: torch.Tensor | None = None,
    ) -> None:
        super().__init__(() if shape is None else shape, device, dtype, torch.int64)
        self._mask: torch.Tensor | None = None
        self._n = as_count(n, "n")
        if self._n != -1:
            self._n = expect_countable(self._n, self._dtype)
        self.update_mask(mask)

    @property
    def n(self) -> int:
        """Number of categories."""
        if self._n == -1:
            raise SchemaError("the number of categories is open", hint="set_provisional_n(n) sets it")
        return self._n

    def set_provisional_n(self, n: int) -> None:
        """Set the number of categories, in place."""
        if self._mask is not None and self._mask.shape[-1] != n:
            raise UsageError(f"{n} categories do not go with a mask of {self._mask.shape[-1]}")
        self._n = expect_countable(as_count(n, "n"), self._dtype)

    @property
    def mask(self) -> torch.Tensor | None:
        """Which categories are legal, of shape `[*shape, n]`; None for all."""
        return self._mask

    def update_mask(self, mask: torch.Tensor | None) -> None:
        """Replace the mask, in place; None lifts it. A mask that fits no value or not the shape raises UsageError."""
        if mask is not None:
            mask = mask_over(mask, (*concrete(self._shape), self.n), (self.n,), self._device)
        self._mask = mask

    @property
    def space(self) -> Box:
        return CategoricalBox(self._n)

    # Values ----------------------------------------------------------------------------------------

    def is_in(self, value: Any) -> bool:
        """Return whether a value is a tensor of this element type and trailing shape, with every category legal."""
        if not isinstance(value, torch.Tensor) or value.dtype != self._dtype:
            return False
        if value.shape or self._shape or self._n == -1 or value.is_complex() or value.device.type == "meta":
            return super().is_in(value)
        number, mask = value.item(), self._mask
        return 0 <= number < self._n and number == int(number) and (mask is None or bool(mask[int(number)]))

    def _are_members(self, value: torch.Tensor) -> bool:
        mask = self._mask
        if self._n == -1 or not (value.is_floating_point() or value.dtype in WHOLE_TYPES):
            return (mask is None and self._n == 2 and value.dtype is torch.bool) or super()._are_members(value)
        numbers = (value.floor() if value.is_floating_point() else value).clamp(0, self._n - 1)
        if not torch.equal(numbers, value):
            return False
        if mask is None:
            return True
        mask, numbers = mask.to(value.device), numbers.long()
        return bool((mask.take(numbers) if mask.dim() == 1 else looked_up(mask, numbers)).all())

    def _members(self, value: torch.Tensor) -> torch.Tensor:
        if self._mask is None and self._n > 0 and value.dtype == self._dtype in WHOLE_TYPES:
            return (value >= 0) & (value <= self._n - 1)
        return super()._members(value)

    def _nearest(self, value: torch.Tensor) -> torch.Tensor:
        if self._mask is None and self._n > 0 and value.dtype == self._dtype:
            if value.dtype in WHOLE_TYPES:
                return value.clamp(0, self._n - 1)
            if value.is_floating_point():
                finite = value.nan_to_num(0.0, posinf=math.inf, neginf=-math.inf)
                return finite.round_().clamp_(0, self._n - 1).abs_()  # no zero has a sign
        return super()._nearest(value)

    def _legal(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        most = 2**63 - 1 if self._n == -1 else self._n
        return torch.tensor(most, device=self._device).expand(concrete(self._shape)), self._mask

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        size = batched(shape, self._shape)
        if self._mask is None and 0 < self._n <= FEW:
            if generator is None:
                return torch.randint(self._n, size, dtype=self._dtype, device=self._device)
            return torch.randint(self._n, size, dtype=self._dtype, device=self._device, generator=generator)
        if self._mask is None and 0 < self._n <= MANY:
            shift = max(0, 33 - self._n.bit_length())  # torch draws 64 bits for a range of 2**32 or more
            drawn = torch.randint(self._n << shift, size, device=self._device, generator=generator)
            return drawn.bitwise_right_shift_(shift).to(self._dtype)
        counts = torch.tensor(self.n, device=self._device).expand(concrete(self._shape))
        return draw_categories(counts, self._mask, size, generator).to(self._dtype)

    def cardinality(self) -> float:
        """Count the categories, masked ones included."""
        return self.n

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """List the categories along dimension 0, each filling the whole shape.

        `use_mask` leaves out those that are not legal; UsageError if that differs from element to element.
        """
        values = torch.arange(self.n, device=self._device)
        if use_mask and self._mask is not None:
            rows = self._mask.reshape(-1, self.n)
            if not bool((rows == rows[:1]).all()):
                raise UsageError("the mask differs from element to element: there is no one list of legal categories")
            values = values[rows[0]]
        shape = concrete(self._shape)
        return values.to(self._dtype).reshape(-1, *[1] * len(shape)).expand(-1, *shape).clone()

    def index(self, index: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Pick from the last dimension of `tensor`, which has one entry for each category.

        `index` is one number, or numbers whose leading dimensions broadcast to those of `tensor`.
        """
        number = index.to(torch.int64)
        if not number.dim():
            return tensor[..., number]
        return tensor.gather(-1, number.expand(*tensor.shape[:-1], number.shape[-1]))

    def to_one_hot(self, value: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return `[*value.shape, n]` truth values, of which the category's own is True.

        `safe=False` takes the caller's word that the value is a member; else NotInSpecError is raised if it is not.
        """
        if safe is not False:
            self.assert_is_in(value)
        return one_hot(value, self.n)

    def to_one_hot_spec(self) -> OneHot:
        """Return the spec of what `to_one_hot` makes of members."""
        from .one_hot import OneHot

        return OneHot(self.n, (*self._shape, self.n), self._device, mask=self._mask)

    def _to_dtype(self, dtype: torch.dtype) -> Any:
        if self._n != -1:
            expect_countable(self._n, dtype)
        return self._twin(_dtype=dtype)

    def _family(self) -> type[LeafSpec]:
        return Categorical


def expect_countable(n: int, dtype: torch.dtype) -> int:
    """Return a number of categories, or raise UsageError if an element type cannot number them."""
    if n < 1:
        raise UsageError(f"n is {n}, expected 1 or more categories, or -1 to leave it open")
    if n - 1 > (1 / torch.finfo(dtype).eps if dtype.is_floating_point else type_limits(dtype)[1]):
        raise UsageError(f"n is {n}, expected no more categories than {dtype} can number")
    return n


def one_hot(value: torch.Tensor, count: int) -> torch.Tensor:
    """Return truth values of which in each row the one numbered by `value` is True."""
    return value.to(torch.int64).unsqueeze(-1) == torch.arange(count, device=value.device)


class Binary(Categorical):
    """Tensors of zeros and ones, int8 by default: a Categorical of two for each bit.

    `n` bits in a row, or a `shape` whose last size is `n`; UsageError if it is another, SpecTypeError (a TypeError) if
    neither is given. One event is the last dimension: `cardinality` and `enumerate` count and list its `2**n` rows.

    >>> from rbtool import Binary
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
        n = None if n is None else as_count(n, "n")
        if n is not None and n < 0:
            raise UsageError(f"n is {n}, expected a number of bits")
        if shape is None:
            if n is None:
                raise SpecTypeError("Binary() was called without n and without shape; one of them is needed")
            shape = (n,)
        sizes = as_shape(shape)
        if n is not None and (not sizes or sizes[-1] != n):
            raise UsageError(f"the shape is {list(sizes)}, expected the last size {n}: the bits of a Binary")
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
