"""Numbers of categories, of which each column has its own count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import SchemaError, UsageError
from .base import batch_of, batched, concrete
from .categorical import CategoriesSpec, expect_countable, one_hot
from .leaf import LeafSpec
from .values import (
    FEWER_THAN_FLOATS,
    WHOLE_TYPES,
    Box,
    BoxList,
    CategoricalBox,
    DeviceLike,
    ShapeLike,
    as_shape,
    combinations,
    draw_categories,
    mask_over,
    small_integers,
)

if TYPE_CHECKING:
    from .one_hot import MultiOneHot


class MultiCategorical(CategoriesSpec):
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
            raise UsageError(f"nvec is {nvec}, expected whole numbers")
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
        self._all_small = bool((self._nvec <= FEWER_THAN_FLOATS).all())
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

    def rand(self, shape: ShapeLike = (), *, generator: torch.Generator | None = None) -> torch.Tensor:
        drawn: torch.Tensor = super().rand(shape, generator=generator)
        return drawn.squeeze(-1) if self._drops_last() else drawn

    def _draw(self, shape: torch.Size, generator: torch.Generator | None) -> torch.Tensor:
        size = batched(shape, self._shape)
        if self._allowed is None and self._all_small and self._device.type != "mps":  # which has no float64
            return small_integers(self._nvec, size, self._dtype, generator)
        return draw_categories(self._nvec, self._allowed, size, generator).to(self._dtype)

    def is_in(self, value: Any) -> bool:
        """Whether a value is a tensor of this element type and trailing shape, with every number in its range."""
        return super().is_in(value.unsqueeze(-1) if self._lacks_last(value) else value)

    def _are_members(self, value: torch.Tensor) -> bool:
        if self._allowed is None and value.dtype in WHOLE_TYPES:
            return bool(((value >= 0) & (value < self._nvec.to(value.device))).all())
        return super()._are_members(value)

    def project(self, value: Any) -> torch.Tensor:
        """Return the value if it is a member, else a new tensor with the nearest legal category of each element."""
        if not self._lacks_last(value):
            return super().project(value)
        wide = value.unsqueeze(-1)
        found = super().project(wide)
        return value if found is wide else found.squeeze(-1)

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

    def to_one_hot_spec(self) -> MultiOneHot:
        """Return the spec of what `to_one_hot` makes of members; UsageError if the columns differ from row to row."""
        from .one_hot import MultiOneHot

        counts = self._row()
        shape = (*self._shape[:-1], sum(counts))
        return MultiOneHot(counts, shape, self._device, mask=self.mask)

    # Shape -----------------------------------------------------------------------------------------

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


def _box_list(counts: torch.Tensor) -> Box:
    if not counts.dim():
        return CategoricalBox(int(counts))
    return BoxList(tuple(_box_list(part) for part in counts.unbind(-1)))
