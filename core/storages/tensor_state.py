"""What a storage of tensors saves and loads in memory, and how checkpoints fill it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ..errors import SchemaError
from .columns import Columns
from .pytree import MappingNode, TensorNode, TreeSpec
from .tensor_editing import TensorEditing
from .tree_files import in_order, named_tensors, saved_tensors, spec_to_json

_Write: TypeAlias = Callable[[Columns, bool], None]


class TensorState(TensorEditing):
    """Saves and loads in memory; checkpoints are loaded through `fill`."""

    _columns: Columns | None
    _wrapped: Any

    def save_state(self) -> dict[str, Any]:
        """Return `_storage` (tensors by dotted name, or the one tensor), `_len` and `initialized`, by reference.

        `_structure` is their tree spec as JSON, for storages that hold nothing yet.
        """
        if not self.initialized:
            return {"_storage": {}, "_len": 0, "initialized": False}
        return {
            "_storage": named_tensors(self.columns.names, self.columns.leaves),
            "_len": len(self),
            "initialized": True,
            "_structure": spec_to_json(self.structure),
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
        self, structure: TreeSpec, tensors: Sequence[torch.Tensor], length: int, write: _Write | None = None, *,
        capacity: int | None = None, last_row: int | None = None,
    ) -> None:  # fmt: skip
        """Replace the contents by the first `length` elements of tensors that belong together like `structure`.

        They may have more rows than that, and than this storage. SchemaError, and nothing changes, for other names,
        types or shapes, and for more elements than there is room for. Checkpoints are loaded through this. With
        `write(columns, in_time)`, which puts the rows into the columns, tensors of the device `meta` give the types and
        shapes to come; only if that fails halfway, rows that were there are changed. They are from a storage of
        `capacity` rows of which `last_row` was written last: a buffer has the oldest become row 0 if it was full and
        this is larger.
        """
        fresh = not self.initialized
        try:
            if fresh:
                self._allocate(structure, [(tensor.dtype, tensor.shape[1:]) for tensor in tensors])
            self.structure.refuse_other_constants(structure)
            columns = self.columns
            structure, tensors = _with_numbers(None if write else self.numbered_by, structure, tensors, columns)
            rows = self._rows_to_fill(length)
            values = [value[:rows] for value in in_order(columns.names, structure, tensors)]
            columns.check(values, (rows, *columns.lead[1:]))
            self._make_room(slice(0, rows))
            if self.journal is not None:
                self.journal.discard()
            self.log.settle()
            turn = self.rotation_of(rows, columns.lead[0], capacity, last_row)
            if write is not None:
                write(columns, self.rotated is not None)
            else:
                columns.write_run(0, rows - turn, [value[turn:] for value in values], together=True)
                if turn:
                    columns.write_run(rows - turn, turn, [value[:turn] for value in values], together=True)
        except BaseException as error:
            if fresh:
                self._go_back(None, None)
            elif not isinstance(error, SchemaError):
                self.log.changed()  # some rows may be there already
            raise
        self._filled.value = rows
        self.mark_replaced(rows % columns.lead[0], last_row if self.rotated is None else rows - 1)

    def set_length(self, length: int) -> None:
        """Set the number of valid elements, from the first row on; SchemaError for more than there is room for."""
        self._filled.value = self._rows_to_fill(length)
        self.mark_replaced(self._filled.value % self.columns.lead[0])

    def _rows_to_fill(self, length: int) -> int:
        """Return the number of rows that make up `length` elements; SchemaError if they do not fit."""
        lead = self.columns.lead
        rows, rest = divmod(length, math.prod(lead[1:]))
        if rest or not 0 <= rows <= lead[0]:
            raise SchemaError(f"what was saved counts {length} elements; this storage has room for {self.max_size}")
        return rows

    def _allocate(self, structure: TreeSpec, rows: Sequence[tuple[torch.dtype, torch.Size]]) -> None:
        """Make tensors for rows of these types and shapes."""

    def _go_back(self, structure: TreeSpec | None, columns: Columns | None) -> None:
        """Return to the tensors of before, because the write that new ones were made for failed."""
        self._structure, self._columns, self._wrapped = structure, columns, None


def _with_numbers(
    key: str | None, structure: TreeSpec, tensors: Sequence[torch.Tensor], columns: Columns
) -> tuple[TreeSpec, Sequence[torch.Tensor]]:
    """Add the entry of the rows' numbers, which a writer keeps here and another one did not save."""
    if key is None or key not in columns.names or not tensors:
        return structure, tensors
    if not isinstance(structure, MappingNode) or key in structure.children:
        return structure, tensors
    like, rows = columns.leaves[columns.names.index(key)], tensors[0].shape[0]
    numbers = torch.arange(rows, device=like.device).reshape(-1, *[1] * (like.dim() - 1))
    structure = structure.with_children({**structure.children, key: TensorNode()})
    return structure, [*tensors, numbers.expand(rows, *like.shape[1:])]
