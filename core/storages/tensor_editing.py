"""What is changed of the rows of a storage of tensors, and entries that are added to all of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection

from ..errors import MissingKeyError, SchemaError, did_you_mean
from .base import IndexedStorage
from .columns import Columns, zeros
from .cursors import as_index, rows_named, rows_of
from .filling import Filler
from .pytree import MappingNode, Path, TensorDictNode, TreeSpec, tree_spec_of
from .snapshots import Snapshot
from .write_log import Counter


class TensorEditing(IndexedStorage):
    """Edits rows that are there.

    Entries that were added to all rows belong to these: they are gone as soon as rows are written without them.
    """

    device: Any
    _structure: TreeSpec | None
    _filled: Counter
    _declared: TreeSpec | None = None
    """How the data is made without the entries that were added; None if there never were any."""

    @property
    @abstractmethod
    def initialized(self) -> bool:
        """Whether the tensors are there."""

    @property
    @abstractmethod
    def columns(self) -> Columns:
        """The tensors, cut into rows."""

    @property
    @abstractmethod
    def structure(self) -> TreeSpec:
        """How the data is made."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of valid rows."""

    @abstractmethod
    def _take(self, structure: TreeSpec, leaves: Sequence[torch.Tensor]) -> None:
        """Make these tensors the contents."""

    def _make_room(self, rows: slice | torch.Tensor) -> None:
        """Make sure that writing these rows cannot fail for want of space."""

    # Batches that are filled again -----------------------------------------------------------------

    _filler: Filler | None = None

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may share memory with the rows."""
        return self.initialized and self.columns.may_hold(tensor)

    def read_into(self, out: Any, index: Any, added: Mapping[Any, torch.Tensor]) -> Any:
        """Copy the rows at `index`, and entries that are added to them, to `out`, in one call where that can be."""
        columns, structure = self.columns, self.structure
        if type(index) is not torch.Tensor or index.dtype is not torch.int64 or index.dim() != 1:
            return super().read_into(out, index, added)
        filler = self._filler
        if filler is None or filler.columns is not columns or filler.added != tuple(added):
            filler = self._filler = Filler.of(structure, columns, out, added)
            if filler is None:
                return super().read_into(out, index, added)
        return filler.fill(index, self.rows, out, added)

    # Writes of other processes ---------------------------------------------------------------------

    def _prepare(self, rows: slice | torch.Tensor) -> None:
        """Prepare a write of checked values to these rows."""
        self._make_room(rows)
        self.keep(rows)

    def keep(self, rows: slice | torch.Tensor, key: Path | None = None) -> None:
        """Before rows are replaced, keep them: for dumps, and for a process that has to undo this write."""
        for snapshot in tuple(self.log.snapshots):
            snapshot.keep(rows)
        journal = self.journal
        if journal is None:
            return
        valid, columns = self.rows, self.columns
        if isinstance(rows, slice):
            kept: Any = slice(rows.start, min(rows.stop, valid))
            if kept.start >= kept.stop:
                return
        else:
            numbers = rows.numpy(force=True)
            kept = np.unique(numbers[numbers < valid])
        arrays = columns.arrays
        if key is None:
            journal.keep(arrays, kept)
        else:
            number = list(self.structure.paths()).index(key)
            journal.keep([arrays[number]], kept, number)

    def undo(self) -> None:
        """Undo the write of a process that was killed."""
        if self.journal is not None:
            before = self.log.now
            self.journal.undo(self.columns.arrays if self.initialized else [])
            self.log.undone(before)

    @property
    def counters(self) -> list[Counter]:
        """The numbers that every write changes."""
        return [self._filled, *self.log.counters]

    # Dumps in the background -----------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """Whether no other process can write to the rows."""
        return not self._filled.shared

    def snapshot(self, part_rows: int) -> Snapshot | None:
        """Return the valid rows as they are now, in parts; who gets it calls `end_snapshot`.

        None where they could be replaced unnoticed: on other devices, by other processes, and through references.
        """
        if not (self.initialized and self.columns.gathers_into):
            return None
        found = Snapshot(
            self.columns.arrays, self.rows, part_rows, next_row=self.log.now.next_row, shared=self._filled.shared
        )
        self.log.snapshots.append(found)
        if self.log.lent or not self.alone:  # asked afterwards: a caller in between waits
            self.end_snapshot(found)
            return None
        return found

    def end_snapshot(self, snapshot: Snapshot) -> None:
        """State that a snapshot is not read any more, if it still was; may be repeated."""
        snapshot.close()
        if snapshot in self.log.snapshots:
            self.log.snapshots.remove(snapshot)

    # Cells -----------------------------------------------------------------------------------------

    def elements_of_cells(self, index: Any, dim: int) -> Any:
        """Return the numbers of the elements that a write at such an index concerns, or their coordinates."""
        tail = self._tail
        numbers = torch.arange(len(self)).reshape(*self.shape, *[1] * len(tail)).expand(*self.shape, *tail)
        chosen = numbers.transpose(0, dim)[index].unique()
        return torch.unravel_index(chosen, self.shape) if self.ndim > 1 else chosen

    def write_cells(self, index: Any, data: Any, dim: int = 0, label: str | None = None) -> None:
        """Write at an index of several dimensions; see `set_cells`."""
        structure, columns, kept = self.structure, self.columns, None
        depth = self.ndim + len(self._tail)
        if isinstance(index, tuple) and len(index) > depth:
            raise IndexError(f"{len(index)} coordinates given, elements have {depth} dimensions")
        if label and label in structure.children and label not in list(data.keys()):
            kept = list(structure.paths()).index((label,))
            structure = structure.with_children({k: part for k, part in structure.children.items() if k != label})
        values = structure.flatten(data)
        self.keep(rows_named(index, self.rows) if not dim else slice(0, self.rows))
        if kept is not None:
            values.insert(kept, columns.leaves[kept][: self.rows].transpose(0, dim)[index])
        columns.write_cells(index, self.rows, values, depth=depth, dim=dim, whole=kept)

    @property
    def _tail(self) -> tuple[int, ...]:
        """The batch size of one element."""
        return tuple(self.structure.tail) if isinstance(self.structure, TensorDictNode) else ()

    def repeated(self, index: Any, data: Any) -> Any:
        """Return data for each element at `index`, if `data` lacks dimensions of it; anything else as it is."""
        if (type(index) is int and self.ndim == 1) or not self.initialized or isinstance(data, list):
            return data
        plain = isinstance(index, slice) or (isinstance(index, torch.Tensor) and index.dim() == 1)
        if plain and is_tensor_collection(data) and not self.lacks_dimensions(data):  # as most writes are
            return data
        found = as_index(index, self.ndim)
        mask = isinstance(found, torch.Tensor) and found.dtype == torch.bool
        if isinstance(found, tuple) or (mask and found.dim() > 1):  # type: ignore[union-attr]
            return data  # writing cells repeats
        columns = self.columns
        if isinstance(found, int):
            selected, flat = torch.Size([]), torch.Size([])
        else:
            rows = rows_of(found, self.rows, columns.lead[0])
            flat = torch.Size([rows.stop - rows.start if isinstance(rows, slice) else len(rows)])
            selected = found.shape if isinstance(found, torch.Tensor) and not mask else flat
        return self._spread(data, torch.Size([*selected, *columns.others]), torch.Size([*flat, *columns.others]))

    def lacks_dimensions(self, data: Any) -> bool:
        """Whether data has fewer dimensions than all elements together."""
        if is_tensor_collection(data):
            return len(data.batch_size) < self.ndim + len(self._tail)
        try:
            pairs = zip(self.structure.flatten(data), self.columns.leaves, strict=True)
        except SchemaError:  # the write raises the error
            return False
        return any(value.dim() < leaf.dim() for value, leaf in pairs)

    def _spread(self, data: Any, lead: torch.Size, flat: torch.Size) -> Any:
        """Repeat data up to the leading shape `lead`, and give it the shape `flat` of as many elements."""
        if is_tensor_collection(data):
            tail, size = self._tail, data.batch_size
            own = len(lead) + len(tail) - len(size)
            if size == flat + tail or len(size) < len(tail) or (lead + tail)[max(own, 0) :] != size:
                return data
            known = dict(zip(self.structure.paths(), self.columns.leaves, strict=True))
            front = len(size) - len(tail)
            for key, value in data.items(include_nested=True, leaves_only=True):
                leaf = known.get((key,) if isinstance(key, str) else key)
                if leaf is not None and value.shape[front:] != leaf.shape[self.ndim :]:
                    return data
            return data.expand(lead + tail).reshape(flat + tail)
        structure, columns = self.structure, self.columns
        try:
            values = structure.flatten(data)
            if {
                value.shape[: value.dim() - leaf.dim() + self.ndim]
                for value, leaf in zip(values, columns.leaves, strict=True)
            } == {flat}:
                return data
            tails = [leaf.dim() - self.ndim for leaf in columns.leaves]
            shapes = [torch.Size([*lead, *leaf.shape[self.ndim :]]) for leaf in columns.leaves]
            spread = columns.repeated(values, shapes, tails)
        except SchemaError:  # the write raises the error
            return data
        fitting = [value.reshape(*flat, *value.shape[len(lead) :]) for value in spread]
        return structure.unflatten(iter(fitting), flat)

    # Entries ---------------------------------------------------------------------------------------

    def editable(self, key: Path) -> torch.Tensor:
        """Return a view of one entry of all valid elements; MissingKeyError for one that is not there."""
        found = dict(zip(self.structure.paths(), self.columns.leaves, strict=True)).get(key)
        if found is not None:
            self.log.lend()
            return found[: self.rows]
        if any(path[: len(key)] == key for path in self.structure.paths()):
            raise SchemaError(f"{'.'.join(key)!r} holds several entries, expected the key of a tensor")
        names = self.columns.names
        raise MissingKeyError(
            f"there is no entry {'.'.join(key)!r}{did_you_mean('.'.join(key), names)}",
            hint=f"entries are {', '.join(names)}" if names else "",
        )

    def create_entries(self, values: Mapping[Path, torch.Tensor]) -> None:
        """Add entries, values of all valid elements, to tensordicts or dicts in memory.

        SchemaError for values of other elements, MissingKeyError for a storage that cannot take new entries.
        """
        if not self._takes_entries:
            super().create_entries(values)
        for path, value in values.items():
            if value.shape[: self.ndim] != self.shape:
                raise SchemaError(
                    f"{'.'.join(path)!r} is {list(value.shape)}, expected {list(self.shape)} in front: "
                    "a new entry is one of all elements"
                )
        self._begin_entries(tree_spec_of(_nested(values, self.shape, self.structure), self.ndim), values)
        for path, value in values.items():
            self.editable(path).copy_(value)

    @property
    def _takes_entries(self) -> bool:
        """Whether entries can be added: the storage has rows and no other process shares them."""
        return self.initialized and isinstance(self._structure, MappingNode) and self.rows > 0 and not self.shared

    def _begin_entries(self, brought: TreeSpec, values: Mapping[Path, torch.Tensor]) -> None:
        """Make columns, all zeros, for the entries that only `brought` has, like those of `values`."""
        columns, declared = self.columns, self._declared or self.structure
        known = dict(zip(self.structure.paths(), columns.leaves, strict=True))
        structure = self.structure.joined(brought.placed(torch.device(self.device)))
        leaves = [
            known[path]
            if path in known
            else zeros(values[path].dtype, (*columns.lead, *values[path].shape[self.ndim :]), torch.device(self.device))
            for path in structure.paths()
        ]
        self._take(structure, leaves)
        self._declared = declared

    def _take_in_new(self, cursor: Any, data: Any) -> None:
        """Make columns for entries that only the data has, if it is written over all rows: see `create_entries`."""
        if not (self._takes_entries and (is_tensor_collection(data) or isinstance(data, Mapping))):
            return
        index = as_index(cursor, self.ndim)
        if isinstance(index, int | tuple) or rows_of(index, self.rows, self.columns.lead[0]) != slice(0, self.rows):
            return
        try:
            brought = tree_spec_of(data, self.ndim)
        except SchemaError:  # the write raises the error
            return
        values = dict(zip(brought.paths(), brought.flatten(data), strict=True))
        if values.keys() - set(self.structure.paths()) and all(v.dim() >= self.ndim for v in values.values()):
            self._begin_entries(brought, values)

    def _taken_apart(self, data: Any) -> list[torch.Tensor]:
        """Return the tensors of data; SchemaError if it has not the entries that the rows have, or had at first."""
        try:
            return self.structure.flatten(data)
        except SchemaError:
            if not self._leave_out_added(data):
                raise
            return self.structure.flatten(data)

    def _leave_out_added(self, data: Any) -> bool:
        """Drop the added entries if the data lacks exactly these; return whether it did."""
        declared = self._declared
        if declared is None or declared is self._structure:
            return False
        try:
            declared.flatten(data)
        except SchemaError:
            return False
        known = dict(zip(self.structure.paths(), self.columns.leaves, strict=True))
        self._take(declared, [known[path] for path in declared.paths()])
        return True


def _nested(values: Mapping[Path, torch.Tensor], lead: torch.Size, structure: TreeSpec) -> Any:
    """Make a nest of the root's kind of tensors by path."""
    found: dict[str, Any] = {}
    for path, value in values.items():
        inner = found
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return TensorDict(found, lead) if isinstance(structure, TensorDictNode) else found
