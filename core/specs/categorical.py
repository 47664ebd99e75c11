"""Numbers of categories: of one count, of two (bits), and of a count for each column."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from ..errors import SchemaError, UsageError
from .base import batch_of, concrete
from .bounded import type_limits
from .leaf import LeafSpec
from .values import (
    BinaryBox,
    Box,
    BoxList,
    CategoricalBox,
    DeviceLike,
    ShapeLike,
    SpecTypeError,
    are_categories,
    as_shape,
    combinations,
    draw_categories,
    nearest_categories,
)

_Spec = TypeVar("_Spec", bound="_CategoriesSpec")


class _CategoriesSpec(LeafSpec):
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


class Categorical(_CategoriesSpec):
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
        self._n = int(n)
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
        self._n = expect_countable(int(n), self._dtype)

    @property
    def mask(self) -> torch.Tensor | None:
        """Which categories are legal, of shape `[*shape, n]`; None for all."""
        return self._mask

    def update_mask(self, mask: torch.Tensor | None) -> None:
        """Replace the mask, in place; None lifts it. A mask that fits no value or not the shape raises UsageError."""
        if mask is None:
            self._mask = None
            return
        found = torch.as_tensor(mask, dtype=torch.bool, device=self._device)
        try:
            wide = found.expand(*concrete(self._shape), self.n)
        except RuntimeError:
            expected = [*self._shape, self.n]
            raise UsageError(f"the mask has the shape {list(found.shape)}, expected is {expected}") from None
        if not bool(found.any(-1).all()):
            raise UsageError("the mask leaves an element without a legal category")
        self._mask = wide.clone(memory_format=torch.contiguous_format)

    @property
    def space(self) -> Box:
        return CategoricalBox(self._n)

    # Values ----------------------------------------------------------------------------------------

    def _legal(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        most = 2**63 - 1 if self._n == -1 else self._n
        return torch.tensor(most, device=self._device).expand(concrete(self._shape)), self._mask

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        size = torch.Size([*shape, *concrete(self._shape)])
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

    def _to_dtype(self, dtype: torch.dtype) -> Any:
        if self._n != -1:
            expect_countable(self._n, dtype)
        return self._twin(_dtype=dtype)

    def _family(self) -> type[LeafSpec]:
        return Categorical


def expect_countable(n: int, dtype: torch.dtype) -> int:
    """Return a number of categories, or raise UsageError if an element type cannot number them."""
    if n < 1:
        raise UsageError(f"{n} categories were asked for; expected is 1 or more, or -1 to leave it open")
    if n - 1 > (1 / torch.finfo(dtype).eps if dtype.is_floating_point else type_limits(dtype)[1]):
        raise UsageError(f"{n} categories were asked for, more than {dtype} can number")
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


class MultiCategorical(_CategoriesSpec):
    """Whole numbers that are each below a number of their own: element `i` is below `nvec[i]`; int64.

    `nvec` is one number, or a tensor or nested lists of them, and broadcasts to `shape`, which is its own shape unless
    given. One event is the last dimension where the rows are alike, else the whole shape. `mask` is a bool tensor over
    the categories of all columns, one after the other along its last dimension. A spec of shape `[1]` draws without
    that dimension unless `remove_singleton` is False, and takes values of either form.

    >>> import torch
    >>> from rbtool import MultiCategorical
    >>> MultiCategorical([2, 5]).is_in(torch.tensor([[1, 4], [0, 0]]))
    True
    """

    _PARAMETERS = ("_nvec", "_allowed")
    _FACTS = ("_remove_singleton",)

    def __init__(
        self,
        nvec: int | Sequence[Any] | torch.Tensor,
        shape: ShapeLike | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | str | None = torch.int64,
        mask: torch.Tensor | None = None,
        remove_singleton: bool = True,
    ) -> None:
        counts = torch.as_tensor(nvec)
        if counts.is_floating_point() or counts.is_complex() or counts.dtype is torch.bool:
            raise UsageError(f"nvec is {nvec}, whole numbers are expected")
        counts = counts.to(torch.int64)
        counts = counts.reshape(1) if not counts.dim() else counts
        sizes = counts.shape if shape is None else as_shape(shape)
        super().__init__(sizes, device, dtype, torch.int64)
        try:
            self._nvec = counts.to(self._device).expand(concrete(sizes)).clone(memory_format=torch.contiguous_format)
        except RuntimeError:
            found = list(counts.shape)
            raise UsageError(f"an nvec of shape {found} does not go with the shape {list(sizes)}") from None
        for count in self._nvec.unique().tolist():
            expect_countable(count, self._dtype)
        self._remove_singleton = remove_singleton
        self._allowed: torch.Tensor | None = None
        self.update_mask(mask)

    @property
    def nvec(self) -> torch.Tensor:
        """Number of categories of each element, of the spec's shape."""
        return self._nvec

    @property
    def space(self) -> Box:
        return _box_list(self._nvec)

    def _row(self) -> list[int]:
        """Categories of the columns; UsageError if the rows differ."""
        rows = self._nvec.reshape(-1, self._nvec.shape[-1]) if self._nvec.dim() else self._nvec.reshape(1, 1)
        if not bool((rows == rows[:1]).all()):
            raise UsageError("the numbers of categories differ from row to row")
        return [int(count) for count in rows[0].tolist()] if len(rows) else []

    def _rows_alike(self) -> bool:
        return self._nvec.dim() <= 1 or bool((self._nvec == self._nvec.flatten(0, -2)[:1]).all())

    @property
    def mask(self) -> torch.Tensor | None:
        """Which categories are legal, those of all columns along the last dimension; None for all."""
        if self._allowed is None:
            return None
        columns = self._allowed if self._nvec.dim() else self._allowed.unsqueeze(0)
        return torch.cat([columns[..., column, :count] for column, count in enumerate(self._row())], -1)

    def update_mask(self, mask: torch.Tensor | None) -> None:
        """Replace the mask, in place; None lifts it. A mask that fits no value or not the shape raises UsageError."""
        if mask is None:
            self._allowed = None
            return
        counts, lead = self._row(), concrete(self._shape)[:-1]
        found = torch.as_tensor(mask, dtype=torch.bool, device=self._device)
        try:
            wide = found.expand(*lead, sum(counts))
        except RuntimeError:
            expected = [*lead, sum(counts)]
            raise UsageError(f"the mask has the shape {list(found.shape)}, expected is {expected}") from None
        allowed = torch.zeros(*lead, len(counts), max(counts), dtype=torch.bool, device=self._device)
        for column, part in enumerate(wide.split(counts, -1)):
            allowed[..., column, : counts[column]] = part
        if not bool(allowed.any(-1).all()):
            raise UsageError("the mask leaves an element without a legal category")
        self._allowed = allowed if self._nvec.dim() else allowed.squeeze(-2)

    # Values ----------------------------------------------------------------------------------------

    def _legal(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._nvec, self._allowed

    def _drops_last(self) -> bool:
        return self._remove_singleton and self._shape == (1,)

    def rand(self, shape: ShapeLike = (), *, generator: torch.Generator | None = None) -> torch.Tensor:
        drawn: torch.Tensor = super().rand(shape, generator=generator)
        return drawn.squeeze(-1) if self._drops_last() else drawn

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        size = torch.Size([*shape, *concrete(self._shape)])
        return draw_categories(self._nvec, self._allowed, size, generator).to(self._dtype)

    def is_in(self, value: Any) -> bool:
        """Whether a value is a tensor of this element type and trailing shape, with every number in its range."""
        return super().is_in(value.unsqueeze(-1) if self._lacks_last(value) else value)

    def project(self, value: Any) -> torch.Tensor:
        """Return the value if it is a member, else a new tensor with the nearest legal category of each element."""
        if self.is_in(value) or not self._lacks_last(value):
            return super().project(value)
        return super().project(value.unsqueeze(-1)).squeeze(-1)

    def _lacks_last(self, value: Any) -> bool:
        return self._drops_last() and isinstance(value, torch.Tensor) and batch_of(value.shape, self._shape) is None

    def cardinality(self) -> float:
        """Count the values of one event, masked ones included: the product of its numbers of categories."""
        return math.prod(self._row() if self._rows_alike() else self._nvec.flatten().tolist())

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """List the values of one event along dimension 0; `use_mask` leaves out those that are not legal."""
        sizes = self._nvec.shape
        if self._rows_alike():
            rows = combinations(self._row(), self._device).reshape(-1, *[1] * (len(sizes) - 1), *sizes[-1:])
        else:
            rows = combinations(self._nvec.flatten().tolist(), self._device).reshape(-1, *sizes)
        listed = rows.to(self._dtype).expand(-1, *sizes)
        if use_mask and self._allowed is not None:
            listed = listed[self._members(listed).flatten(1).all(1)]
        return listed.clone()

    def index(self, index: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Pick from the last dimension of `tensor` by numbers whose leading dimensions broadcast to its own."""
        return tensor.gather(-1, index.to(torch.int64).expand(*tensor.shape[:-1], index.shape[-1]))

    def to_one_hot(self, value: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return truth values in which each column's own category is True, column after column.

        The shape is `[*batch, sum(nvec)]`. NotInSpecError if the value is not a member; `safe=False` skips that check.
        """
        if safe is not False:
            self.assert_is_in(value)
        full = value.unsqueeze(-1) if self._lacks_last(value) or not self._nvec.dim() else value
        return torch.cat([one_hot(full[..., column], count) for column, count in enumerate(self._row())], -1)

    # Shape -----------------------------------------------------------------------------------------

    def _stack(self, specs: Sequence[Any], dim: int) -> LeafSpec:
        if len({allowed.shape[-1] for spec in specs if (allowed := spec._allowed) is not None}) > 1:
            raise SchemaError("masked specs that differ in their largest number of categories cannot be stacked")
        return super()._stack(specs, dim)

    def _to_dtype(self, dtype: torch.dtype) -> Any:
        for count in self._nvec.unique().tolist():
            expect_countable(count, dtype)
        return self._twin(_dtype=dtype)


def _box_list(counts: torch.Tensor) -> Box:
    if not counts.dim():
        return CategoricalBox(int(counts))
    return BoxList(tuple(_box_list(part) for part in counts.unbind(-1)))
