"""Specs of categories: as numbers (Categorical, Binary, MultiCategorical) and as one-hot rows (OneHot, MultiOneHot)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch

from ..errors import SchemaError, UsageError, require_flags, suggests_keywords
from .base import (
    Box,
    BoxList,
    CategoricalBox,
    DeviceLike,
    LeafSpec,
    NotInSpecError,
    ShapeChange,
    ShapeLike,
    SpecTypeError,
    SpecValueError,
    TensorSpec,
    as_count,
    as_shape,
    batch_of,
    batched,
    changed_parameter,
    changed_shape,
    combinations,
    concrete,
    encoded,
    normal_dim,
    to_array,
)
from .bounded import (
    FEW,
    FEWER_THAN_FLOATS,
    MANY,
    WHOLE_TYPES,
    as_int64,
    nearest_integers,
    small_integers,
    type_limits,
    uniform_integers,
    whole,
)


@dataclass(frozen=True, slots=True)
class BinaryBox(Box):
    """Rows of `n` bits."""

    n: int


class CategoriesSpec(LeafSpec):
    """The base of specs whose values are category numbers."""

    domain = "discrete"

    @abstractmethod
    def _legal(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the number of categories of each element, and a mask of the legal ones (None: all)."""

    def _members(self, value: torch.Tensor) -> torch.Tensor:
        return are_categories(value, *self._legal())

    def _nearest(self, value: torch.Tensor) -> torch.Tensor:
        return nearest_categories(value, *self._legal()).to(self._dtype)

    @suggests_keywords()
    def to_categorical(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return the value, which already consists of category numbers; `safe` checks it against the spec."""
        if safe:
            self.assert_is_in(val)
        return val

    def to_categorical_spec(self) -> Self:
        return self


class Categorical(CategoriesSpec):
    """Category numbers: each element is a whole number from 0 to `n - 1`.

    Args:
        n: the number of categories. With -1 it is set later by `set_provisional_n`; until then every number from 0 is a
            member, and reading `n` or drawing raises SchemaError (a RuntimeError).
        shape: by default a scalar, `[]`.
        device: by default torch's default device.
        dtype: int64 by default.
        mask: marks the legal categories, a bool tensor that broadcasts to `[*shape, n]`; each element needs at least
            one.

    >>> import torch
    >>> from rbtool import Categorical
    >>> Categorical(4, mask=torch.tensor([True, False, False, True])).enumerate(use_mask=True)
    tensor([0, 3])
    """

    _PARAMETERS = ("_mask",)
    _INNER_DIMS: ClassVar = {"_mask": 1}
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
            raise SchemaError("the number of categories is not set", hint="set_provisional_n(n) sets it")
        return self._n

    def set_provisional_n(self, n: int) -> None:
        """Set the number of categories, in place."""
        if self._mask is not None and self._mask.shape[-1] != n:
            raise UsageError(f"{n} categories do not fit the mask, which has {self._mask.shape[-1]}")
        self._n = expect_countable(as_count(n, "n"), self._dtype)

    @property
    def mask(self) -> torch.Tensor | None:
        """Mask of the legal categories, bool `[*shape, n]`; None if all are legal."""
        return self._mask

    def update_mask(self, mask: torch.Tensor | None) -> None:
        """Replace the mask, in place; None removes it. UsageError if its shape is wrong or it leaves no category."""
        if mask is not None:
            mask = mask_over(mask, (*concrete(self._shape), self.n), (self.n,), self._device)
        self._mask = mask

    def _box(self) -> Box:
        return CategoricalBox(self._n)

    def _takes(self, box: Any) -> bool:
        if not isinstance(box, CategoricalBox):
            return False
        if box.n == -1 and self._mask is None:
            self._n = -1
        else:
            self.set_provisional_n(box.n)
        return True

    # Values ----------------------------------------------------------------------------------------

    def is_in(self, val: Any) -> bool:
        """Return whether a value is a tensor of this element type and trailing shape with legal categories only."""
        if not isinstance(val, torch.Tensor) or val.dtype != self._dtype:
            return False
        if val.shape or self._shape or self._n == -1 or val.is_complex() or val.device.type == "meta":
            return super().is_in(val)
        number, mask = val.item(), self._mask
        return 0 <= number < self._n and number == int(number) and (mask is None or bool(mask[int(number)]))

    def _are_members(self, value: torch.Tensor) -> bool:
        mask = self._mask
        if self._n < 1 or not (value.is_floating_point() or value.dtype in WHOLE_TYPES):
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
                return finite.round_().clamp_(0, self._n - 1).abs_()  # abs turns -0.0 into 0.0
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
            shift = max(0, 33 - self._n.bit_length())  # torch draws 64 bits for ranges from 2**32
            drawn = torch.randint(self._n << shift, size, device=self._device, generator=generator)
            return drawn.bitwise_right_shift_(shift).to(self._dtype)
        expect_categories([self.n])
        counts = torch.tensor(self.n, device=self._device).expand(concrete(self._shape))
        return draw_categories(counts, self._mask, size, generator).to(self._dtype)

    def cardinality(self) -> float:
        """Return the number of categories, including masked ones."""
        return self.n

    @suggests_keywords()
    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """Return the categories along dimension 0, each filling the whole shape.

        `use_mask` leaves out masked categories; UsageError if the mask differs between elements.
        """
        values = torch.arange(self.n, device=self._device)
        if use_mask and self._mask is not None:
            rows = self._mask.reshape(-1, self.n)
            if not bool((rows == rows[:1]).all()):
                raise UsageError("the mask differs between elements, so there is no single list of legal categories")
            values = values[rows[0]]
        shape = concrete(self._shape)
        return values.to(self._dtype).reshape(-1, *[1] * len(shape)).expand(-1, *shape).clone()

    def index(self, index: torch.Tensor, tensor_to_index: torch.Tensor) -> torch.Tensor:
        """Select from the last dimension of `tensor_to_index`, which has one entry for each category.

        `index` is one category, or categories whose leading dimensions broadcast to its own.
        """
        number = index.to(torch.int64)
        if not number.dim():
            return tensor_to_index[..., number]
        return tensor_to_index.gather(-1, number.expand(*tensor_to_index.shape[:-1], number.shape[-1]))

    @suggests_keywords()
    def to_one_hot(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return the one-hot form of a value, bool `[*value.shape, n]`.

        NotInSpecError if the value is not a member; `safe=False` skips that check.
        """
        if safe is not False:
            self.assert_is_in(val)
        return one_hot(val, self.n)

    def to_one_hot_spec(self) -> OneHot:
        """Return the spec of the values that `to_one_hot` returns."""
        return OneHot(self.n, (*self._shape, self.n), self._device, mask=self._mask)

    def _to_dtype(self, dtype: torch.dtype) -> Any:
        if self._n != -1:
            expect_countable(self._n, dtype)
        return self._twin(_dtype=dtype)

    def _family(self) -> type[LeafSpec]:
        return Categorical


class Binary(Categorical):
    """Tensors of zeros and ones: a Categorical with two categories for each bit.

    One event is the last dimension: `cardinality` and `enumerate` count and list its `2**n` rows.

    Args:
        n: the number of bits in a row; by default the last size of `shape`.
        shape: by default `[n]`. UsageError (a ValueError) if its last size is not `n`; SpecTypeError (a TypeError) if
            neither is given.
        device: by default torch's default device.
        dtype: int8 by default.

    >>> from rbtool import Binary
    >>> Binary(2).enumerate()
    tensor([[0, 0],
            [0, 1],
            [1, 0],
            [1, 1]], dtype=torch.int8)
    """

    _LAST_IS_EVENT = True

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

    def _box(self) -> Box:
        return BinaryBox(self.bits)

    def _takes(self, box: Any) -> bool:
        return False  # the number of bits is the last size

    def cardinality(self) -> float:
        """Count the rows of bits."""
        return int(2**self.bits)

    @suggests_keywords()
    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """List the rows of bits along dimension 0; `use_mask` leaves out rows with an illegal bit."""
        sizes = concrete(self._shape)
        rows = combinations([2] * self.bits, self._device).to(self._dtype)
        listed = rows.reshape(len(rows), *[1] * (len(sizes) - 1), *sizes[-1:]).expand(-1, *sizes)
        if use_mask and self._mask is not None:
            listed = listed[self._members(listed).flatten(1).all(1)]
        return listed.clone()


class MultiCategorical(CategoriesSpec):
    """Category numbers with a different number of categories for each element: element `i` is below `nvec[i]`.

    One event is the last dimension if all rows of `nvec` are equal, otherwise the whole shape.

    Args:
        nvec: the numbers of categories: one number, a tensor, or nested lists; broadcasts to `shape`.
        shape: by default the shape of `nvec`.
        device: by default torch's default device.
        dtype: int64 by default.
        mask: marks the legal categories, a bool tensor whose last dimension has the categories of all columns one after
            the other.
        remove_singleton: a spec of shape `[1]` draws values without that dimension, and accepts both forms; False
            keeps it.

    >>> import torch
    >>> from rbtool import MultiCategorical
    >>> MultiCategorical([2, 5]).is_in(torch.tensor([[1, 4], [0, 0]]))
    True
    """

    _PARAMETERS = ("_nvec", "_allowed")
    _INNER_DIMS: ClassVar = {"_allowed": 1}

    def __init__(
        self,
        nvec: int | Sequence[Any] | torch.Tensor,
        shape: ShapeLike | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | str | None = torch.int64,
        mask: torch.Tensor | None = None,
        remove_singleton: bool = True,
    ) -> None:
        require_flags(remove_singleton=remove_singleton)
        counts = torch.as_tensor(nvec)
        if counts.is_floating_point() or counts.is_complex() or counts.dtype is torch.bool:
            raise UsageError(f"nvec is {nvec}, expected whole numbers")
        counts = counts.to(torch.int64)
        counts = counts.reshape(1) if not counts.dim() else counts
        sizes = counts.shape if shape is None else as_shape(shape)
        super().__init__(sizes, device, dtype, torch.int64)
        try:
            self._nvec = counts.to(self._device).expand(concrete(sizes)).clone(memory_format=torch.contiguous_format)
        except RuntimeError:
            found = list(counts.shape)
            raise UsageError(f"an nvec of shape {found} does not broadcast to the shape {list(sizes)}") from None
        for count in self._nvec.unique().tolist():
            expect_countable(count, self._dtype)
        self._all_small = bool(((self._nvec > 0) & (self._nvec <= FEWER_THAN_FLOATS)).all())
        self._remove_singleton = remove_singleton
        self._allowed: torch.Tensor | None = None
        self.update_mask(mask)

    @property
    def nvec(self) -> torch.Tensor:
        """Number of categories of each element, of the spec's shape."""
        return self._nvec

    @property
    def remove_singleton(self) -> bool:
        """Whether a spec of shape `[1]` draws values without that dimension."""
        return self._remove_singleton

    def _box(self) -> Box:
        return BoxList.from_nvec(self._nvec) if self._nvec.dim() else CategoricalBox(int(self._nvec))

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
        """Which categories are legal, with all columns side by side in the last dimension; None for all."""
        if self._allowed is None:
            return None
        columns = self._allowed if self._nvec.dim() else self._allowed.unsqueeze(0)
        return torch.cat([columns[..., column, :count] for column, count in enumerate(self._row())], -1)

    def update_mask(self, mask: torch.Tensor | None) -> None:
        """Replace the mask, in place; None removes it. UsageError if its shape is wrong or it leaves no category."""
        if mask is None:
            self._allowed = None
            return
        counts, lead = self._row(), concrete(self._shape)[:-1]
        wide = mask_over(mask, (*lead, sum(counts)), counts, self._device)
        allowed = torch.zeros(*lead, len(counts), max(counts), dtype=torch.bool, device=self._device)
        for column, part in enumerate(wide.split(counts, -1)):
            allowed[..., column, : counts[column]] = part
        self._allowed = allowed if self._nvec.dim() else allowed.squeeze(-2)

    # Values ----------------------------------------------------------------------------------------

    def _legal(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._nvec, self._allowed

    def _drops_last(self) -> bool:
        return self._remove_singleton and self._shape == (1,)

    def rand(self, shape: ShapeLike | None = None, *, generator: torch.Generator | None = None) -> torch.Tensor:
        drawn: torch.Tensor = super().rand(shape, generator=generator)
        return drawn.squeeze(-1) if self._drops_last() else drawn

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        size = batched(shape, self._shape)
        if self._allowed is None and self._all_small and self._device.type != "mps":  # which has no float64
            return small_integers(self._nvec, size, self._dtype, generator)
        expect_categories(self._nvec.flatten().tolist())
        return draw_categories(self._nvec, self._allowed, size, generator).to(self._dtype)

    def is_in(self, val: Any) -> bool:
        """Whether a value is a tensor of this element type and trailing shape, with every number in its range."""
        return super().is_in(val.unsqueeze(-1) if self._lacks_last(val) else val)

    def _are_members(self, value: torch.Tensor) -> bool:
        if self._allowed is None and value.dtype in WHOLE_TYPES:
            return bool(((value >= 0) & (value < self._nvec.to(value.device))).all())
        return super()._are_members(value)

    def project(self, val: Any) -> torch.Tensor:
        """Return the value if it is a member, else a new tensor with the nearest legal category of each element."""
        if not self._lacks_last(val):
            return super().project(val)
        wide = val.unsqueeze(-1)
        found = super().project(wide)
        return val if found is wide else found.squeeze(-1)

    def _lacks_last(self, value: Any) -> bool:
        return self._drops_last() and isinstance(value, torch.Tensor) and batch_of(value.shape, self._shape) is None

    def cardinality(self) -> float:
        """Count the values of one event, masked ones included: the product of its numbers of categories."""
        return math.prod(self._row() if self._rows_alike() else self._nvec.flatten().tolist())

    @suggests_keywords()
    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """List the values of one event along dimension 0; `use_mask` leaves out illegal ones."""
        sizes, alike = self._nvec.shape, self._rows_alike()
        rows = combinations(self._row() if alike else self._nvec.flatten().tolist(), self._device)
        rows = rows.reshape(len(rows), *([*[1] * (len(sizes) - 1), *sizes[-1:]] if alike else sizes))
        listed = rows.to(self._dtype).expand(-1, *sizes)
        if use_mask and self._allowed is not None:
            listed = listed[self._members(listed).flatten(1).all(1)]
        return listed.clone()

    def index(self, index: torch.Tensor, tensor_to_index: torch.Tensor) -> torch.Tensor:
        """Select from the last dimension of `tensor_to_index`; leading dimensions of `index` broadcast to its own."""
        return tensor_to_index.gather(-1, index.to(torch.int64).expand(*tensor_to_index.shape[:-1], index.shape[-1]))

    @suggests_keywords()
    def to_one_hot(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return the one-hot rows of all columns, one after the other; bool `[*batch, sum(nvec)]`.

        NotInSpecError if the value is not a member; `safe=False` skips that check.
        """
        if safe is not False:
            self.assert_is_in(val)
        full = val.unsqueeze(-1) if self._lacks_last(val) or not self._nvec.dim() else val
        return torch.cat([one_hot(full[..., column], count) for column, count in enumerate(self._row())], -1)

    def to_one_hot_spec(self) -> MultiOneHot:
        """Return the spec of the values that `to_one_hot` returns; UsageError if the rows of `nvec` differ."""
        counts = self._row()
        shape = (*self._shape[:-1], sum(counts))
        return MultiOneHot(counts, shape, self._device, mask=self.mask)

    # Shape -----------------------------------------------------------------------------------------

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """Return the specs along one dimension; UsageError for the last one, in which all columns are one event."""
        if normal_dim(dim, self.ndim) == self.ndim - 1:
            raise UsageError("the columns of a MultiCategorical are one event", hint="index the spec to select columns")
        return super().unbind(dim)

    def _stack(self, specs: Sequence[Any], dim: int) -> LeafSpec:
        if len({allowed.shape[-1] for spec in specs if (allowed := spec._allowed) is not None}) > 1:
            raise SchemaError("masked specs that differ in their largest number of categories cannot be stacked")
        stacked: Any = super()._stack(specs, dim)
        stacked._all_small = all(spec._all_small for spec in specs)
        return stacked  # type: ignore[no-any-return]

    def _to_dtype(self, dtype: torch.dtype) -> Any:
        for count in self._nvec.unique().tolist():
            expect_countable(count, dtype)
        return self._twin(_dtype=dtype)


def expect_categories(counts: Sequence[int]) -> None:
    """Raise SchemaError if there is a column without categories, so that a spec has no members."""
    if 0 in counts:
        raise SchemaError(f"the numbers of categories are {list(counts)}: without categories there is nothing to draw")


def expect_countable(n: int, dtype: torch.dtype) -> int:
    """Return a number of categories, or raise UsageError if an element type cannot number them."""
    if n < 0:
        raise UsageError(f"n is {n}, expected a number of categories, or -1 to leave it open")
    if n - 1 > (1 / torch.finfo(dtype).eps if dtype.is_floating_point else type_limits(dtype)[1]):
        raise UsageError(f"n is {n}, expected no more categories than {dtype} can number")
    return n


def one_hot(value: torch.Tensor, count: int) -> torch.Tensor:
    """Return one-hot rows of truth values: in each row, the element with the number in `value` is True."""
    return value.to(torch.int64).unsqueeze(-1) == torch.arange(count, device=value.device)


_SMALL = 2**14  # up to this many random numbers are drawn at once to choose among legal categories


def draw_categories(
    counts: torch.Tensor, allowed: torch.Tensor | None, shape: torch.Size, generator: torch.Generator | None
) -> torch.Tensor:
    """Draw uniformly among the allowed categories of each element; int64 of `shape`."""
    if allowed is None:
        return uniform_integers(torch.zeros_like(counts), counts - 1, shape, generator)
    size = (*shape, allowed.shape[-1])
    if math.prod(size) <= _SMALL:  # one draw for each category, and the largest one wins: few calls, many draws
        draws = torch.rand(size, device=allowed.device, generator=generator)
        return draws.masked_fill_(~allowed, -1.0).argmax(-1)
    in_front = allowed.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    numbers = allowed.sum(-1)
    return looked_up(in_front, uniform_integers(torch.zeros_like(numbers), numbers - 1, shape, generator))


def mask_over(
    mask: torch.Tensor, shape: Sequence[int], counts: Sequence[int], device: torch.device | None
) -> torch.Tensor:
    """Copy a mask of legal categories into a bool tensor of this shape.

    `counts` are the categories of each column; all columns are side by side in the last dimension. SpecValueError for
    a mask that does not broadcast to the shape, UsageError for one without a legal category in a column.
    """
    found = torch.as_tensor(mask, dtype=torch.bool, device=device)
    try:
        wide = found.expand(*shape)
    except RuntimeError:
        raise SpecValueError(f"the mask has the shape {list(found.shape)}, expected {list(shape)}") from None
    if not all(bool(column.any(-1).all()) for column in wide.split(list(counts), -1)):
        raise UsageError("the mask leaves an element without a legal category")
    return wide.clone(memory_format=torch.contiguous_format)


def are_categories(value: torch.Tensor, counts: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    """Return which elements are the number of an existing, allowed category; bool."""
    counts, allowed = counts.to(value.device), None if allowed is None else allowed.to(value.device)
    safe = value.nan_to_num(-1.0, posinf=-1.0, neginf=-1.0) if value.is_floating_point() else value
    number = as_int64(safe)
    found = whole(safe) & (number >= 0) & (number < counts)
    if allowed is None:
        return found
    return found & looked_up(allowed, number.clamp(0, allowed.shape[-1] - 1))


def nearest_categories(value: torch.Tensor, counts: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
    """Return the nearest category of each element, int64; the lower one of two at the same distance."""
    counts, allowed = counts.to(value.device), None if allowed is None else allowed.to(value.device)
    number = nearest_integers(value, torch.zeros_like(counts), counts - 1)
    if allowed is None:
        return number
    places = torch.arange(allowed.shape[-1], device=allowed.device)
    distance = (places[:, None] - places).abs()
    nearest = distance.where(allowed.unsqueeze(-2), allowed.shape[-1]).argmin(-1)
    return looked_up(nearest, number)


def looked_up(table: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return `table[..., number]` for each element."""
    return table.expand(*number.shape, table.shape[-1]).gather(-1, number.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The positions of the columns in a one-hot row, as int64 tensors on one device.

    `places` numbers the elements of a row. Column i has `counts[i]` elements, from `starts[i]` to `ends[i]`, both
    included; `ordinals` numbers the columns from 1. With 2 and 3 categories:

        row        0 1 | 0 0 1
        places     0 1   2 3 4       starts 0 2, ends 1 4, ordinals 1 2
    """

    places: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    ordinals: torch.Tensor

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> _Layout:
        sizes = torch.tensor(counts, device=device)
        ends = sizes.cumsum(0)
        ordinals = torch.arange(1, len(counts) + 1, device=device)
        return cls(torch.arange(sum(counts), device=device), sizes, ends - sizes, ends - 1, ordinals)


class _OneHotSpec(LeafSpec):
    """The base of one-hot specs. The last dimension holds the categories of all columns, and cannot be changed."""

    domain = "discrete"
    _PARAMETERS = ("_mask",)
    _FACTS = ("_counts", "_use_register")
    _LAST_IS_EVENT = True

    def __init__(
        self,
        counts: Sequence[int],
        shape: ShapeLike | None,
        device: DeviceLike | None,
        dtype: torch.dtype | str | None,
        use_register: bool,
        mask: torch.Tensor | None,
    ) -> None:
        require_flags(use_register=use_register)
        self._counts = tuple(as_count(count, "a number of categories") for count in counts)
        if not self._counts or min(self._counts) < 0:
            raise UsageError(f"the categories are {list(self._counts)}, expected their number in each column")
        total = sum(self._counts)
        sizes = as_shape((total,) if shape is None else shape)
        if sizes[-1:] != (total,):
            raise UsageError(f"the shape is {list(sizes)}, its last size should be {total}: the number of categories")
        super().__init__(sizes, device, dtype, torch.bool)
        self._layout = _Layout.of(self._counts, self._device)
        self._use_register = use_register
        self._registers: tuple[dict[Hashable, int], ...] = tuple({} for _ in self._counts)
        self._mask: torch.Tensor | None = None
        self.update_mask(mask)

    @property
    def use_register(self) -> bool:
        """Whether `encode` takes any values, and numbers them in the order of their first appearance."""
        return self._use_register

    @property
    def mask(self) -> torch.Tensor | None:
        """Which categories are legal, of the spec's shape; None for all."""
        return self._mask

    def update_mask(self, mask: torch.Tensor | None) -> None:
        """Replace the mask, in place; None removes it. UsageError if its shape is wrong or it leaves no category."""
        shape = concrete(self._shape)
        self._mask = None if mask is None else mask_over(mask, shape, self._counts, self._device)

    # Values ----------------------------------------------------------------------------------------

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        size = batched(shape, self._shape)
        if self._mask is None:
            layout = self._layout_on(self._device)
            lead = torch.Size([*size[:-1], len(self._counts)])
            if len(self._counts) == 1 and 0 < self._counts[0] <= FEW and generator is None:
                return self._rows(torch.randint(self._counts[0], lead, device=self._device))
            expect_categories(self._counts)
            return self._rows(small_integers(layout.counts, lead, torch.int64, generator))
        draws = torch.rand(size, device=self._device, generator=generator)  # the position of the largest is uniform
        return self._rows(self._largest(draws.masked_fill_(~self._mask, -1.0)))

    def _layout_on(self, device: torch.device) -> _Layout:
        if self._layout.counts.device != device:
            self._layout = _Layout.of(self._counts, device)
        return self._layout

    def _rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the one-hot rows of category numbers `[..., columns]`, which are not checked."""
        layout = self._layout_on(numbers.device)
        if len(self._counts) == 1:
            found = numbers == layout.places
            return found if self._dtype is torch.bool else found.to(self._dtype)
        rows = torch.zeros(*numbers.shape[:-1], sum(self._counts), dtype=self._dtype, device=numbers.device)
        return rows.scatter_(-1, numbers + layout.starts, 1)

    def _largest(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the number of the largest score of each column, the first of equal ones; int64 `[..., columns]`."""
        if len(self._counts) == 1:
            return scores.argmax(-1, keepdim=True)
        return torch.stack([column.argmax(-1) for column in scores.split(self._counts, -1)], -1)

    def _members(self, value: torch.Tensor) -> torch.Tensor:
        """Return for each row whether it is legal; bool `[..., 1]`.

        In a legal row with several columns, the number of set elements up to the end of column i is i + 1.
        """
        is_set = value if value.dtype is torch.bool else value != 0
        if 0 in self._counts:
            return is_set.new_zeros(*value.shape[:-1], 1)
        if len(self._counts) == 1:
            found = is_set.sum(-1, keepdim=True) == 1
        else:
            layout = self._layout_on(value.device)
            found = (is_set.cumsum(-1).index_select(-1, layout.ends) == layout.ordinals).all(-1, keepdim=True)
        if value.dtype is not torch.bool:
            found = found & ((value == 1) | ~is_set).all(-1, keepdim=True)
        if self._mask is not None:
            found = found & ~(is_set & ~self._mask.to(value.device)).any(-1, keepdim=True)
        return found

    def _are_members(self, value: torch.Tensor) -> bool:
        simple = value.is_floating_point() or value.dtype in WHOLE_TYPES
        if not simple or len(self._counts) > 1 or not self._counts[0]:
            return super()._are_members(value)
        if not torch.equal(self._rows(value.argmax(-1, keepdim=True)), value):
            return False
        return self._mask is None or not bool((value * ~self._mask.to(value.device)).any())

    def _nearest(self, value: torch.Tensor) -> torch.Tensor:
        """Set the largest legal element of each column, the first of equal ones; NaN is below all numbers."""
        expect_categories(self._counts)
        if value.is_floating_point():
            scores = value.double().nan_to_num(_LEAST)  # makes all finite, so that -inf can mark illegal categories
            return self._rows(self._largest(self._legal_scores(scores, -math.inf)))
        scores = as_int64(value).clamp(min=-(2**63) + 1)
        return self._rows(self._largest(self._legal_scores(scores, -(2**63))))

    def _legal_scores(self, scores: torch.Tensor, below: float) -> torch.Tensor:
        return scores if self._mask is None else scores.masked_fill(~self._mask.to(scores.device), below)

    def _numbers(self, value: torch.Tensor, safe: bool | None) -> torch.Tensor:
        """Return the category that is set in each column, int64 `[..., columns]`."""
        if safe is not False:
            self.assert_is_in(value)
        return self._largest(value.to(torch.uint8) if value.dtype is torch.bool else value)

    def _encode(self, value: Any, ignore_device: bool) -> torch.Tensor:
        if isinstance(value, torch.Tensor) and (
            value.dtype == self._dtype and batch_of(value.shape, self._shape) is not None
        ):
            return value
        if isinstance(value, int | np.ndarray) and not self._use_register and self._number_shape == ():
            found = self._row_of(value)
            if found is not None:
                return found if ignore_device else found.to(self._device)
        if isinstance(value, np.ndarray | list | tuple) and np.asarray(value).dtype == np.bool_:
            return super()._encoded(value, ignore_device)
        return self._encoded(value, ignore_device)

    def _encoded(self, value: Any, ignore_device: bool) -> torch.Tensor:
        """Convert category numbers to one-hot rows; only a tensor of numbers may have batch dimensions."""
        numbers = self._registered(value) if self._use_register else self._as_numbers(value)
        lead = self._number_shape
        fits = batch_of(numbers.shape, lead)
        if fits is None or (fits and not isinstance(value, torch.Tensor)):
            if numbers.numel() != concrete(lead).numel():
                raise SchemaError(f"a value of shape {list(numbers.shape)} does not fill the spec's {list(lead)}")
            numbers = numbers.reshape(concrete(lead))
        columns = numbers.unsqueeze(-1) if len(lead) < self.ndim else numbers
        counts = self._layout_on(columns.device).counts
        if not bool(((columns >= 0) & (columns < counts)).all()):
            raise NotInSpecError(f"cannot encode {value!r}, expected categories from 0 to below {self._limits}")
        rows = self._rows(columns)
        return rows if ignore_device else rows.to(self._device)

    def _row_of(self, value: int | np.ndarray[Any, Any]) -> torch.Tensor | None:
        """Return the one-hot row of a category number; None if it is not a number, or out of range."""
        if isinstance(value, np.ndarray):
            if value.size != 1 or value.dtype.kind not in "iu":
                return None
            number: int = value.item()
        else:
            number = value
        if isinstance(number, bool) or not 0 <= number < self._counts[0]:
            return None
        found = self._layout_on(torch.device("cpu")).places.eq(number)
        return found if self._dtype is torch.bool else found.to(self._dtype)

    @property
    def _limits(self) -> str:
        return ", ".join(map(str, self._counts))

    def _as_numbers(self, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            return encoded(value, torch.int64, torch.device("cpu"))
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            found = f"a tensor of {value.dtype} {list(value.shape)}"
            raise SchemaError(f"cannot encode {found}, expected whole numbers, or rows of {self._dtype}")
        return as_int64(value)

    def _registered(self, value: Any) -> torch.Tensor:
        """Number the values of each column in the order of their first appearance; UsageError if there are too many."""
        items = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
        table = items.reshape(-1, len(self._counts)) if items.size % len(self._counts) == 0 else items.reshape(-1, 1)
        numbers = np.zeros(table.shape, np.int64)
        for place in np.ndindex(*table.shape):
            register, item = self._registers[place[1]], table[place].item()
            if item not in register and len(register) == self._counts[place[1]]:
                raise UsageError(f"no category is left for {item!r}: its column has {len(register)} categories")
            numbers[place] = register.setdefault(item, len(register))
        return torch.from_numpy(numbers.reshape(items.shape))

    @property
    def _number_shape(self) -> torch.Size:
        """Return the shape of the category numbers of one value."""
        return torch.Size([*self._shape[:-1], len(self._counts)])

    @suggests_keywords()
    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """Return the category numbers, or the values registered for them.

        NotInSpecError if the value is not a member; `safe=False` skips that check.
        """
        return super().to_numpy(torch.as_tensor(val), safe is not False)

    def _to_numpy(self, value: Any) -> Any:
        numbers = self.to_categorical(torch.as_tensor(value), safe=False)
        if not self._use_register:
            return to_array(numbers)
        columns = numbers.unsqueeze(-1) if len(self._number_shape) < self.ndim else numbers
        names = [list(register) for register in self._registers]
        known = [
            names[place[-1]][number] if number < len(names[place[-1]]) else None
            for place, number in np.ndenumerate(columns.cpu().numpy())
        ]
        if None in known:
            raise SchemaError("no value is registered for a category, because none was encoded as it")
        return np.asarray(known).reshape(numbers.shape)

    @suggests_keywords()
    def to_categorical(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return category numbers, int64 `[*batch, *shape[:-1]]`, and a dimension of columns if there are several.

        NotInSpecError if the value is not a member; `safe=False` skips that check.
        """
        numbers = self._numbers(val, safe)
        return numbers if len(self._number_shape) == self.ndim else numbers.squeeze(-1)

    @suggests_keywords()
    def to_one_hot(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return the value, which is one-hot already; `safe` checks it against the spec."""
        if safe:
            self.assert_is_in(val)
        return val

    def to_one_hot_spec(self) -> Self:
        return self

    def cardinality(self) -> float:
        """Return the number of rows, including masked ones: the product over the columns."""
        return math.prod(self._counts)

    @suggests_keywords()
    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """Return the rows along dimension 0, each filling the whole shape; `use_mask` leaves out masked ones."""
        sizes = concrete(self._shape)
        rows = self._rows(combinations(self._counts, self._device))
        listed = rows.reshape(len(rows), *[1] * (len(sizes) - 1), sizes[-1]).expand(-1, *sizes)
        if use_mask and self._mask is not None:
            listed = listed[self._members(listed).flatten(1).all(1)]
        return listed.clone()

    def index(self, index: torch.Tensor, tensor_to_index: torch.Tensor) -> torch.Tensor:
        """Select from the last dimension of `tensor_to_index`, which has one entry for each category of each column.

        `index` are one-hot rows whose leading dimensions broadcast to its own. The result has one
        entry per column.
        """
        numbers = self._numbers(index, None) + self._layout_on(index.device).starts
        return tensor_to_index.gather(-1, numbers.expand(*tensor_to_index.shape[:-1], numbers.shape[-1]))

    # Shape, copies ---------------------------------------------------------------------------------

    def _changed(self, change: ShapeChange) -> Self:
        """Return this spec with other leading dimensions; UsageError if the last dimension would change."""
        shape = changed_shape(self._shape, change)
        places = self._layout_on(torch.device("cpu")).places
        if shape[-1:] == self._shape[-1:]:
            found = changed_parameter(places.expand(concrete(self._shape)), self._shape, change, shape)
            if bool((found == places).all()):
                return super()._changed(change)
        raise UsageError(
            f"a change from the shape {list(self._shape)} to {list(shape)} would move the categories out of the last "
            "dimension"
        )

    def _stack(self, specs: Sequence[Any], dim: int) -> LeafSpec:
        self._expect_place(dim)
        return super()._stack(specs, dim)

    def _expect_place(self, dim: int) -> None:
        if dim == self.ndim:
            raise UsageError("no dimension can follow the last one of a one-hot spec, which holds the categories")

    def make_neg_dim(self, dim: int) -> None:
        """Allow any size for a dimension other than the last, in place."""
        if normal_dim(dim, self.ndim) == self.ndim - 1:
            raise UsageError("the last dimension of a one-hot spec holds the categories, so its size is fixed")
        super().make_neg_dim(dim)

    def clone(self) -> Self:
        copy = super().clone()
        copy._registers = tuple(dict(register) for register in self._registers)
        return copy


_LEAST = torch.finfo(torch.float64).min


class OneHot(_OneHotSpec):
    """One-hot rows of `n` elements, of which one is set: the one-hot form of a Categorical.

    `encode` takes category numbers. The categories stay in the last dimension: a change of shape that would move, split
    or remove it raises UsageError (a ValueError).

    Args:
        n: the number of categories.
        shape: by default `[n]`; its last size must be `n`.
        device: by default torch's default device.
        dtype: bool by default.
        use_register: let `encode` take any values, which are numbered in the order of their first appearance, and let
            `to_numpy` return them.
        mask: marks the legal categories, a bool tensor that broadcasts to `shape`.

    >>> from rbtool import OneHot
    >>> OneHot(3).encode(1)
    tensor([False,  True, False])
    """

    def __init__(
        self,
        n: int,
        shape: ShapeLike | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | str | None = torch.bool,
        use_register: bool = False,
        mask: torch.Tensor | None = None,
    ) -> None:
        super().__init__((n,), shape, device, dtype, use_register, mask)

    @property
    def n(self) -> int:
        """Number of categories."""
        return self._counts[0]

    def _box(self) -> Box:
        return CategoricalBox(self.n)

    @property
    def _number_shape(self) -> torch.Size:
        return self._shape[:-1]

    def to_categorical_spec(self) -> Categorical:
        """Return the spec of the category numbers."""
        return Categorical(self.n, self._shape[:-1], self._device, mask=self._mask)


class MultiOneHot(_OneHotSpec):
    """Several one-hot rows joined into one, for columns with `nvec` categories each: the form of a MultiCategorical.

    Category numbers, as `encode` takes and `to_numpy` returns them, have one entry for each column in their last
    dimension. Arguments not listed here are as for OneHot.

    Args:
        nvec: the number of categories of each column.
        shape: by default `[sum(nvec)]`; its last size must be `sum(nvec)`.

    >>> from rbtool import MultiOneHot
    >>> MultiOneHot([2, 3]).encode([1, 0])
    tensor([False,  True,  True, False, False])
    """

    def __init__(
        self,
        nvec: Sequence[int],
        shape: ShapeLike | None = None,
        device: DeviceLike | None = None,
        dtype: torch.dtype | str | None = torch.bool,
        use_register: bool = False,
        mask: torch.Tensor | None = None,
    ) -> None:
        super().__init__(nvec, shape, device, dtype, use_register, mask)

    @property
    def nvec(self) -> list[int]:
        """The number of categories of each column."""
        return list(self._counts)

    def _box(self) -> Box:
        return BoxList([CategoricalBox(count) for count in self._counts])

    def to_categorical_spec(self) -> MultiCategorical:
        """Return the spec of the category numbers."""
        return MultiCategorical(self._counts, self._number_shape, self._device, mask=self._mask)


_WORDS: dict[str, tuple[str, ...]] = {
    "one_hot": (),
    "mult_one_hot": ("multi_one_hot",),
    "binary": (),
    "categorical": (),
    "multi_categorical": ("multi_discrete",),
}


ACTION_SPACE_MAP: dict[type[TensorSpec] | str, str] = {
    OneHot: "one_hot",
    MultiOneHot: "mult_one_hot",
    Binary: "binary",
    Categorical: "categorical",
    MultiCategorical: "multi_categorical",
    **{
        spelled: word
        for word, others in _WORDS.items()
        for known in (word, *others)
        for spelled in (known, known.replace("_", "-"))
    },
}
"""Maps spec classes, and the spellings of their names, to TorchRL's names of action spaces."""
