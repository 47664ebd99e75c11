"""One-hot rows: truth values of which exactly one is set, once or for each of several columns."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from ..errors import SchemaError, UsageError
from .base import batch_of, batched, concrete
from .categorical import Categorical
from .leaf import LeafSpec
from .multi_categorical import MultiCategorical
from .shaping import ShapeChange, changed_parameter, changed_shape, normal_dim
from .values import (
    FEW,
    WHOLE_TYPES,
    Box,
    BoxList,
    CategoricalBox,
    DeviceLike,
    NotInSpecError,
    ShapeLike,
    as_count,
    as_int64,
    as_shape,
    combinations,
    encoded,
    mask_over,
    small_integers,
    to_array,
)

_Spec = TypeVar("_Spec", bound="_OneHotSpec")


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the columns are in a row, as tensors on one device; int64.

    `places` number the elements of a row, `counts` those of each column, which are from `starts` to `ends`, both
    included; `ordinals` number the columns from 1.
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
    """What one-hot specs have in common: the last dimension holds the categories of all columns and never changes."""

    domain = "discrete"
    _PARAMETERS = ("_mask",)
    _FACTS = ("_counts", "_use_register")

    def __init__(
        self,
        counts: Sequence[int],
        shape: ShapeLike | None,
        device: DeviceLike | None,
        dtype: torch.dtype | str | None,
        use_register: bool,
        mask: torch.Tensor | None,
    ) -> None:
        self._counts = tuple(as_count(count, "a number of categories") for count in counts)
        if not self._counts or min(self._counts) < 1:
            raise UsageError(f"the categories are {list(self._counts)}, expected 1 or more in each column")
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
    def mask(self) -> torch.Tensor | None:
        """Which categories are legal, of the spec's shape; None for all."""
        return self._mask

    def update_mask(self, mask: torch.Tensor | None) -> None:
        """Replace the mask, in place; None lifts it. A mask that fits no value or not the shape raises UsageError."""
        shape = concrete(self._shape)
        self._mask = None if mask is None else mask_over(mask, shape, self._counts, self._device)

    # Values ----------------------------------------------------------------------------------------

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        size = batched(shape, self._shape)
        if self._mask is None:
            layout = self._layout_on(self._device)
            lead = torch.Size([*size[:-1], len(self._counts)])
            if len(self._counts) == 1 and self._counts[0] <= FEW and generator is None:
                return self._rows(torch.randint(self._counts[0], lead, device=self._device))
            return self._rows(small_integers(layout.counts, lead, torch.int64, generator))
        draws = torch.rand(size, device=self._device, generator=generator)  # the largest of even draws is even
        return self._rows(self._largest(draws.masked_fill_(~self._mask, -1.0)))

    def _layout_on(self, device: torch.device) -> _Layout:
        if self._layout.counts.device != device:
            self._layout = _Layout.of(self._counts, device)
        return self._layout

    def _rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return one-hot rows of the numbers of categories, `[..., columns]`; they are not checked."""
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
        """Return for each row whether it is legal; bool `[..., 1]`."""
        is_set = value if value.dtype is torch.bool else value != 0
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
        if len(self._counts) > 1 or not (value.is_floating_point() or value.dtype in WHOLE_TYPES):
            return super()._are_members(value)
        if not torch.equal(self._rows(value.argmax(-1, keepdim=True)), value):
            return False
        return self._mask is None or not bool((value * ~self._mask.to(value.device)).any())

    def _nearest(self, value: torch.Tensor) -> torch.Tensor:
        """Set the largest legal element of each column, the first of equal ones; NaN is below all numbers."""
        if value.is_floating_point():
            scores = value.double().nan_to_num(_LEAST)  # infinity becomes the largest number: what is illegal is below
            return self._rows(self._largest(self._legal_scores(scores, -math.inf)))
        scores = as_int64(value).clamp(min=-(2**63) + 1)
        return self._rows(self._largest(self._legal_scores(scores, -(2**63))))

    def _legal_scores(self, scores: torch.Tensor, below: float) -> torch.Tensor:
        return scores if self._mask is None else scores.masked_fill(~self._mask.to(scores.device), below)

    def _numbers(self, value: torch.Tensor, safe: bool | None) -> torch.Tensor:
        """Return the number of the category that is set in each column, int64 `[..., columns]`."""
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
        """Make rows of the numbers of categories: a tensor of them may have a batch in front, other values not."""
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
        """Make the row of one number; None for what is not one, or out of range."""
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
        """Number values in the order in which they first appear, in each column; UsageError if there are too many."""
        items = np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
        table = items.reshape(-1, len(self._counts)) if items.size % len(self._counts) == 0 else items.reshape(-1, 1)
        numbers = np.zeros(table.shape, np.int64)
        for place in np.ndindex(*table.shape):
            register, item = self._registers[place[1]], table[place].item()
            if item not in register and len(register) == self._counts[place[1]]:
                raise UsageError(f"{item!r} is one value more than the {len(register)} categories of its column")
            numbers[place] = register.setdefault(item, len(register))
        return torch.from_numpy(numbers.reshape(items.shape))

    @property
    def _number_shape(self) -> torch.Size:
        """The shape of the numbers of categories of one value."""
        return torch.Size([*self._shape[:-1], len(self._counts)])

    def to_numpy(self, value: Any, safe: bool | None = None) -> Any:
        """Return the numbers of the categories, or the values registered for them.

        NotInSpecError for what is no member, which has no number; `safe=False` skips that check.
        """
        numbers = self.to_categorical(torch.as_tensor(value), safe)
        if not self._use_register:
            return to_array(numbers)
        columns = numbers.unsqueeze(-1) if len(self._number_shape) < self.ndim else numbers
        names = [list(register) for register in self._registers]
        known = [
            names[place[-1]][number] if number < len(names[place[-1]]) else None
            for place, number in np.ndenumerate(columns.cpu().numpy())
        ]
        if None in known:
            raise SchemaError("the register has no value for a category: none was encoded as it")
        return np.asarray(known).reshape(numbers.shape)

    def to_categorical(self, value: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return the number of the category that is set, int64: `[*batch, *shape[:-1]]`, and a dimension of columns.

        NotInSpecError if the value is not a member; `safe=False` skips that check.
        """
        numbers = self._numbers(value, safe)
        return numbers if len(self._number_shape) == self.ndim else numbers.squeeze(-1)

    def to_one_hot(self, value: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return the value, which is one-hot already; `safe` checks it against the spec."""
        if safe:
            self.assert_is_in(value)
        return value

    def to_one_hot_spec(self: _Spec) -> _Spec:
        return self

    def cardinality(self) -> float:
        """Count the rows, masked ones included: the product over the columns."""
        return math.prod(self._counts)

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """List the rows along dimension 0, each filling the whole shape; `use_mask` leaves out those not legal."""
        sizes = concrete(self._shape)
        rows = self._rows(combinations(self._counts, self._device))
        listed = rows.reshape(-1, *[1] * (len(sizes) - 1), sizes[-1]).expand(-1, *sizes)
        if use_mask and self._mask is not None:
            listed = listed[self._members(listed).flatten(1).all(1)]
        return listed.clone()

    def index(self, index: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Pick from the last dimension of `tensor`, which has one entry for each category of each column.

        `index` are rows whose leading dimensions broadcast to those of `tensor`; the result has one entry a column.
        """
        numbers = self._numbers(index, None) + self._layout_on(index.device).starts
        return tensor.gather(-1, numbers.expand(*tensor.shape[:-1], numbers.shape[-1]))

    # Shape, copies ---------------------------------------------------------------------------------

    def _changed(self: _Spec, change: ShapeChange) -> _Spec:
        """Return this spec with other leading dimensions; UsageError if the last would not stay as it is."""
        shape = changed_shape(self._shape, change)
        places = self._layout_on(torch.device("cpu")).places
        if shape[-1:] == self._shape[-1:]:
            found = changed_parameter(places.expand(concrete(self._shape)), self._shape, change, shape)
            if bool((found == places).all()):
                return super()._changed(change)
        raise UsageError(
            f"a change from the shape {list(self._shape)} to {list(shape)} does not leave the categories in the last "
            "dimension"
        )

    def _stack(self, specs: Sequence[Any], dim: int) -> LeafSpec:
        self._expect_place(dim)
        return super()._stack(specs, dim)

    def _expect_place(self, dim: int) -> None:
        if dim == self.ndim:
            raise UsageError("nothing can be behind the last dimension of a one-hot spec, which holds the categories")

    def make_neg_dim(self, dim: int) -> None:
        """Let one dimension but the last have any size, in place."""
        if normal_dim(dim, self.ndim) == self.ndim - 1:
            raise UsageError("the last dimension of a one-hot spec holds the categories: it has one size")
        super().make_neg_dim(dim)

    def clone(self: _Spec) -> _Spec:
        copy = super().clone()
        copy._registers = tuple(dict(register) for register in self._registers)
        return copy


_LEAST = torch.finfo(torch.float64).min


class OneHot(_OneHotSpec):
    """Rows of `n` elements of which one is set: the one-hot form of a Categorical; bool `[n]` by default.

    The last size of `shape` is `n` (UsageError, a ValueError), and stays the last: a change of shape that would move,
    cut or drop it is refused. `mask`, a bool tensor that broadcasts to the shape, marks the legal categories.
    `encode` takes the numbers of categories; with `use_register` any values, which are numbered in the order in which
    they first appear and which `to_numpy` returns.

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

    @property
    def space(self) -> Box:
        return CategoricalBox(self.n)

    @property
    def _number_shape(self) -> torch.Size:
        return self._shape[:-1]

    def to_categorical_spec(self) -> Categorical:
        """Return the spec of the numbers of categories."""
        return Categorical(self.n, self._shape[:-1], self._device, mask=self._mask)


class MultiOneHot(_OneHotSpec):
    """Several one-hot rows in one, for columns with `nvec` categories each: the one-hot form of a MultiCategorical.

    The last size of `shape` is `sum(nvec)`. Numbers of categories, as `encode` takes and `to_numpy` returns them, have
    one entry for each column in their last dimension. The rest is as for OneHot.

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
    def nvec(self) -> torch.Tensor:
        """Number of categories of each column; int64."""
        return torch.tensor(self._counts)

    @property
    def space(self) -> Box:
        return BoxList(tuple(CategoricalBox(count) for count in self._counts))

    def to_categorical_spec(self) -> MultiCategorical:
        """Return the spec of the numbers of categories."""
        return MultiCategorical(self._counts, self._number_shape, self._device, mask=self._mask, remove_singleton=False)
