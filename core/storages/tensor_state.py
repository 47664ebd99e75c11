"""The state of a storage of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ..errors import SchemaError
from .columns import Columns
from .pytree import MappingNode, TensorDictNode, TensorNode, TreeSpec, place
from .tensor_editing import TensorEditing
from .tree_files import spec_from_json, spec_to_json
from .write_log import Counter


def named_tensors(names: Sequence[str], leaves: Sequence[torch.Tensor]) -> Any:
    """Return the leaves by name, or the only one where it has none."""
    if list(names) == [""]:
        return leaves[0]
    if len(set(names)) < len(names):
        raise SchemaError(f"two of the keys {', '.join(names)} are written alike with dots")
    return dict(zip(names, leaves, strict=True))


def saved_tensors(
    saved: Any, description: Mapping[str, Any] | None, like: TreeSpec | None
) -> tuple[TreeSpec, list[torch.Tensor]]:
    """Undo `named_tensors`. Without a description of the data, dots in names separate the keys of a tensordict.

    Classes that are not loaded are taken from `like`, how the data of the receiver is made.
    """
    if isinstance(saved, torch.Tensor):
        return TensorNode(), [saved]
    tensors = {name: value for name, value in dict(saved).items() if not name.startswith("__")}
    if description:
        structure = spec_from_json(description, like)
    else:
        structure = TensorDictNode.nested(tuple(name.split(".")) for name in tensors)
    names = [".".join(path) for path in structure.paths()]
    if sorted(names) != sorted(tensors):
        raise SchemaError(f"the state holds {', '.join(tensors)}; it says that it holds {', '.join(names)}")
    return structure, [tensors[name] for name in names]


def in_order(names: Sequence[str], structure: TreeSpec, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, which belong together like `structure`, in the order of `names`."""
    found = {".".join(path): tensor for path, tensor in zip(structure.paths(), tensors, strict=True)}
    if sorted(found) != sorted(names):
        raise SchemaError(f"what was saved holds {', '.join(found)}; this storage holds {', '.join(names)}")
    return [found[name] for name in names]


def with_numbers(
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


def rows_to_fill(length: int, columns: Columns, max_size: int) -> int:
    """The number of rows that make up `length` elements; SchemaError if they do not fit."""
    rows, rest = divmod(length, math.prod(columns.lead[1:]))
    if rest or not 0 <= rows <= columns.lead[0]:
        raise SchemaError(f"what was saved counts {length} elements; this storage has room for {max_size}")
    return rows


def refuse_other_constants(ours: TreeSpec, saved: TreeSpec) -> None:
    """Raise SchemaError if what is no tensor differs between a storage and what was saved of another."""
    known = dict(ours.constants())
    for path, value in saved.constants():
        if path not in known or known[path] != value:
            raise SchemaError(f"{place(path)} is {value!r} in what was saved, {known.get(path, 'nothing')!r} here")


_Write: TypeAlias = Callable[[Columns, bool], None] | None


class TensorState(TensorEditing):
    """Saves and loads in memory; checkpoints are loaded through `fill`."""

    _columns: Columns | None
    _wrapped: Any
    _filled: Counter

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
        self, structure: TreeSpec, tensors: Sequence[torch.Tensor], length: int, write: _Write = None, *,
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
        """Set the number of valid elements, from the first row on; SchemaError for more than there is room for."""
        self._filled.value = rows_to_fill(length, self.columns, self.max_size)
        self.mark_replaced(self._filled.value % self.columns.lead[0])

    def _allocate(self, structure: TreeSpec, rows: Sequence[tuple[torch.dtype, torch.Size]]) -> None:
        """Make tensors for rows of these types and shapes."""

    def _go_back(self, structure: TreeSpec | None, columns: Columns | None) -> None:
        """Return to the tensors of before, because the write that new ones were made for failed."""
        self._structure, self._columns, self._wrapped = structure, columns, None
