"""The state of a storage of tensors, and how what was saved of another one is taken over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from .columns import Columns
from .counter import Counter
from .describe import describe
from .state import in_order, named_tensors, refuse_other_constants, rows_to_fill, saved_tensors, with_numbers
from .structure import Structure
from .tensor_editing import TensorEditing

__all__ = ["TensorState"]

_Write: TypeAlias = Callable[[Columns, bool], None] | None


class TensorState(TensorEditing):
    """Saves and loads in memory; checkpoints are loaded through `fill`."""

    _columns: Columns | None
    _wrapped: Any
    _filled: Counter

    def save_state(self) -> dict[str, Any]:
        """Return `_storage` (tensors by dotted name, or the one tensor), `_len` and `initialized`, by reference.

        `_structure` says how they belong together, for storages that hold nothing yet.
        """
        if not self.initialized:
            return {"_storage": {}, "_len": 0, "initialized": False}
        return {
            "_storage": named_tensors(self.columns.names, self.columns.leaves),
            "_len": len(self),
            "initialized": True,
            "_structure": describe(self.structure),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Copy the valid rows of what `save_state` returned; they must be alike in names, types and shapes.

        The capacities may differ as long as the rows fit. A lazy storage that holds nothing yet makes its tensors
        after the saved ones.
        """
        if not state.get("initialized", True):
            self.empty()
        else:
            structure, tensors = saved_tensors(state["_storage"], state.get("_structure"), self._structure)
            capacity = len(tensors[0]) if tensors else None
            self.fill(structure, tensors, int(state["_len"]), capacity=capacity)

    def fill(
        self, structure: Structure, tensors: Sequence[torch.Tensor], length: int, write: _Write = None, *,
        capacity: int | None = None, last_row: int | None = None,
    ) -> None:  # fmt: skip
        """Replace the contents by the first `length` elements of tensors that belong together like `structure`.

        They may have more rows than that, and than this storage. SchemaError, and nothing changes, for other names,
        types or shapes, and for more elements than there is room for. Checkpoints are loaded through this. With
        `write(columns, in_time)`, which puts the rows into the columns, tensors of the device `meta` say what is to
        come; only if that fails halfway, rows that were there are changed. They are from a storage of `capacity` rows
        of which `last_row` was written last: a buffer has the oldest become row 0 if it was full and this is larger.
        """
        fresh = not self.initialized
        try:
            if fresh:
                self._allocate(structure, [(tensor.dtype, tensor.shape[1:]) for tensor in tensors])
            refuse_other_constants(self.structure, structure)
            columns = self.columns
            structure, tensors = with_numbers(None if write else self.numbered_by, structure, tensors, columns)
            rows = rows_to_fill(length, columns, self.max_size)
            values = [value[:rows] for value in in_order(columns.names, structure, tensors)]
            columns.check(values, (rows, *columns.lead[1:]))
            self._make_room(slice(0, rows))
            turn = self.rotation_of(rows, columns.lead[0], capacity, last_row)
            if write is not None:
                write(columns, self.rotated is not None)
            else:
                columns.write_run(0, rows - turn, [value[turn:] for value in values])
                if turn:
                    columns.write_run(rows - turn, turn, [value[:turn] for value in values])
        except BaseException:
            if fresh:
                self._go_back(None, None)
            raise
        self._filled.value = rows
        self.mark_replaced(rows % columns.lead[0], last_row if self.rotated is None else rows - 1)

    def set_length(self, length: int) -> None:
        """Say how many elements, from the first row on, are valid; SchemaError for more than there is room for."""
        self._filled.value = rows_to_fill(length, self.columns, self.max_size)
        self.mark_replaced(self._filled.value % self.columns.lead[0])

    def _allocate(self, structure: Structure, rows: Sequence[tuple[torch.dtype, torch.Size]]) -> None:
        """Make tensors for rows of these types and shapes."""

    def _go_back(self, structure: Structure | None, columns: Columns | None) -> None:
        """Return to the tensors of before, because the write that new ones were made for failed."""
        self._structure, self._columns, self._wrapped = structure, columns, None
