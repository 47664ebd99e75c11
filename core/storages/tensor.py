"""A storage that wraps existing tensors; the base of lazy storages, which create their tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, is_tensor_collection

from ..errors import MissingKeyError, RbtoolError, SchemaError, UsageError, did_you_mean
from ..torchrl_classes import counterpart
from .base import IndexedStorage
from .columns import ArrayRows, Columns, Filler, require_like, zeros
from .cursors import as_index, grown_rows, last_of_repeats, rows_named, rows_of
from .pytree import (
    MappingNode,
    Path,
    StackNode,
    TensorDictNode,
    TensorNode,
    TextGrows,
    TextNode,
    TreeSpec,
    in_order,
    is_plain,
    named_tensors,
    place,
    saved_tensors,
    spec_to_json,
    tree_spec_of,
)
from .text import column_of, encoded
from .write_log import Counter, Snapshot

_Write: TypeAlias = Callable[[Columns, bool], None]

_WHOLE = frozenset({TensorDict, torch.Tensor, dict})
"""The frequent types that are not lists of rows; testing for them is faster than testing for lists."""


@counterpart
class TensorStorage(IndexedStorage):
    """Wraps an existing tensor, tensordict, tensorclass or nest of them, without a copy; all rows count as written.

    The size of dimension 0 is the capacity in rows. The first `ndim` dimensions, which all leaves share, count
    elements. Data that is written must have the keys, element types and shapes of the stored data.

    Args:
        storage: the data. If it is a tensordict without entries, such as `TensorDict(batch_size=[100])`, the first
            write makes the entries, with zeros in all other rows.
        max_size: if given, must be the number of rows or of elements.
        device: the data's device, or `"auto"`.
        ndim: how many leading dimensions count elements.
        checkpointer: saves and loads the storage.
        compilable: whether `torch.compile` may trace the methods.

    Raises:
        UsageError: (a ValueError) `storage` is None, or `max_size` or `device` do not match it.
        SchemaError: (a RuntimeError) when written: the data does not fit. Nothing is changed.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> storage = TensorStorage(TensorDict({"action": torch.arange(4)}, [4]))
    >>> storage[torch.tensor([3, 0])]["action"]
    tensor([3, 0])
    """

    device: Any
    _filler: Filler | None = None
    _array_rows: ArrayRows | None = None
    _declared: TreeSpec | None = None
    """The structure of the data before entries were added to all rows; None if none were added.

    Added entries belong to the rows that exist: a write of rows without them removes these columns.
    """
    _bare: Any = None
    """A wrapped tensordict without entries; the first write determines its entries."""

    def __init__(
        self,
        storage: Any,
        max_size: int | None = None,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        checkpointer: Any = None,
    ) -> None:
        if storage is None:
            raise UsageError("a TensorStorage needs tensors to wrap, found None")
        self._begin(ndim)
        structure = tree_spec_of(storage, ndim, dense=False)
        if _is_bare(structure):
            self._bare, lead = storage, storage.batch_size[:ndim]
            devices = [storage.device] if storage.device else []
        else:
            if next(structure.paths(), None) is None:
                structure = structure.in_columns()
            self._take(structure, structure.flatten(storage))
            lead = self.columns.lead
            devices = [leaf.device for leaf in self.columns.leaves]
        super().__init__(math.prod(lead), checkpointer, compilable)
        if max_size not in (None, lead[0], self.max_size):
            raise UsageError(f"max_size is {max_size}, but the tensors hold {self.max_size} elements")
        found = devices[0] if devices else torch.device("cpu")
        self.device = found if device == "auto" else torch.device(device)
        if any(one.type != self.device.type for one in devices):
            raise UsageError(f"the tensors are on {found}, not on {self.device}", hint='use device="auto"')
        self._wrapped = storage
        self._filled.value = lead[0]
        self.log.lend()

    def _begin(self, ndim: int) -> None:
        if ndim < 1:
            raise UsageError(f"ndim is {ndim}; at least the first dimension counts elements")
        self.ndim = ndim
        self._filled = Counter()
        self._structure: TreeSpec | None = None
        self._columns: Columns | None = None
        self._wrapped = None

    def _take(self, structure: TreeSpec, leaves: Sequence[torch.Tensor]) -> None:
        """Use these tensors as the contents; SchemaError unless they share their first `ndim` dimensions."""
        leads = {leaf.shape[: self.ndim] for leaf in leaves}
        if len(leads) != 1 or len(min(leads)) != self.ndim:
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves) or "no tensor"
            raise SchemaError(f"expected tensors that share their first {self.ndim} dimensions, found {shapes}")
        paths = list(structure.paths())
        texts = frozenset(paths.index(path) for path, _ in structure.texts())
        self._columns = Columns(leaves, [".".join(path) for path in paths], self.ndim, texts)
        self._structure = structure
        self._wrapped = None

    @property
    def initialized(self) -> bool:
        """Whether the tensors exist; a lazy storage creates them at its first write."""
        return self._columns is not None

    @property
    def columns(self) -> Columns:
        """The tensors, divided into rows; SchemaError before the first write to a lazy storage."""
        if self._columns is None and not self.initialized:
            raise SchemaError("the storage is empty: nothing was ever written to it", hint="write to it first")
        return self._columns  # type: ignore[return-value]  # initialized means that they are there

    @property
    def structure(self) -> TreeSpec:
        """The structure of the data; SchemaError before the first write to a lazy storage."""
        if self._structure is None:
            raise SchemaError("the storage is empty: nothing was ever written to it", hint="write to it first")
        return self._structure

    @property
    def rows(self) -> int:
        """The number of valid rows."""
        return self._filled.value

    @property
    def _lead(self) -> torch.Size:
        """The size of the dimensions that count elements; SchemaError before the first write to a lazy storage."""
        if self._columns is None and self._bare is not None:
            return self._bare.batch_size[: self.ndim]  # type: ignore[no-any-return]
        return self.columns.lead

    @property
    def capacity_rows(self) -> int:
        """How many rows fit along dimension 0; SchemaError before the first write to a lazy storage."""
        return self._lead[0]

    @property
    def _storage(self) -> Any:  # the name in TorchRL's storages
        return self.contents

    @property
    def contents(self) -> Any:
        """All data in one nest, including rows that are not valid; None before the first write."""
        self.log.lend()
        if not self.initialized:
            return self._bare
        if self._wrapped is None or self.columns.texts:  # text is decoded from its rows, so it has to be made again
            columns = self.columns
            self._wrapped = self.structure.unflatten(iter(columns.given), columns.lead)
        return self._wrapped

    def __len__(self) -> int:
        if self._columns is None and self._bare is None and not self.initialized:
            return 0
        rows = self._filled.value
        return rows if self.ndim == 1 else rows * math.prod(self._lead[1:])

    @property
    def shape(self) -> torch.Size:
        """The number of valid rows, followed by the other dimensions of elements; `[0]` before the first write."""
        if self._bare is None and not self.initialized:
            return torch.Size([0])
        return torch.Size([self.rows, *self._lead[1:]])

    # Reading ---------------------------------------------------------------------------------------

    def read_at(self, index: Any) -> Any:
        """Read the valid elements at `index`.

        Args:
            index: an int, a slice, a list, a mask, a tensor, or a tuple of coordinates.

        Returns:
            Fresh tensors for row numbers, masks and slices with a negative step; views for ints and other slices.

        Raises:
            SchemaError: (a RuntimeError) nothing was ever written.
            IndexError: a row does not exist.
        """
        if type(index) is not torch.Tensor or index.dtype is not torch.int64:
            index = as_index(index, self.ndim)
        if self._columns is None and self._bare is not None:
            return self._bare[: self.rows][index]
        columns, structure = self._columns or self.columns, self._structure or self.structure
        found, batch = columns.read(index, self._filled.value)
        if columns.texts and isinstance(index, int | slice | tuple):  # views; text is decoded when it is first used
            found = [leaf.clone() if number in columns.texts else leaf for number, leaf in enumerate(found)]
        return structure.unflatten(iter(found), batch)

    def gather_into(self, index: torch.Tensor, targets: Sequence[torch.Tensor], chosen: Sequence[int]) -> None:
        """Copy the rows `index`, int64 `[n]`, of the columns `chosen` to given tensors; see `Columns.gather_into`."""
        self.columns.gather_into(index, self._filled.value, targets, chosen)

    def expect(self, rows: np.ndarray[Any, Any], key: tuple[str, ...] | None = None) -> None:
        """Prepare to read rows, int64 `[n]`, or only the entry `key` of them; for storages whose rows are on a disk."""

    @property
    def entry_keys(self) -> Sequence[tuple[str, ...]] | None:
        """The entries, if elements are plain tensordicts."""
        return list(self.structure.paths()) if self.initialized and is_plain(self.structure) else None

    def flatten(self) -> TensorStorage:
        """Return a one-dimensional storage of the valid elements, in the same memory if torch can view it so."""
        if self.ndim == 1:
            return self
        self.log.lend()
        size = torch.Size([len(self)])
        flat = [leaf[: self.rows].flatten(0, self.ndim - 1) for leaf in self.columns.leaves]
        return TensorStorage(self.structure.unflatten(iter(flat), size), device="auto", compilable=self.compilable)

    # Batches that are filled again -----------------------------------------------------------------

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may share memory with the rows."""
        return self.initialized and self.columns.may_hold(tensor)

    def read_into(self, out: Any, index: Any, added: Mapping[Any, torch.Tensor]) -> Any:
        """Copy the rows at `index`, and additional entries, to `out`; in one call for all columns if possible."""
        columns, structure = self.columns, self.structure
        if type(index) is not torch.Tensor or index.dtype is not torch.int64 or index.dim() != 1:
            return super().read_into(out, index, added)
        filler = self._filler
        if filler is None or filler.columns is not columns or filler.added != tuple(added):
            filler = self._filler = Filler.of(structure, columns, out, added)
            if filler is None:
                return super().read_into(out, index, added)
        return filler.fill(index, self.rows, out, added)

    # Writing ---------------------------------------------------------------------------------------

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> slice | torch.Tensor | None:
        """Write the rows of `data` at `cursor`; if a row occurs twice, the later one of its values is stored.

        The length grows to the highest row written. If text differs between rows, or is too long for its column, the
        storage first makes a column for it, or a wider one.

        Args:
            cursor: an int for one row without its dimension, a tuple of coordinates for elements, anything else for
                rows.
            data: the rows; a list or a lazy stack contains them one by one. Data and `cursor` may be views of stored
                rows: both are read completely before the first row is written.
            set_cursor: False if existing elements are replaced.

        Raises:
            SchemaError: (a RuntimeError) rows are beyond the capacity or would leave a gap, or the data does not fit.
        """
        while True:
            try:
                return self._write_at(cursor, data, set_cursor)
            except TextGrows as grows:
                self._set_text(grows.path, grows.node, keep=True)

    def _write_at(self, cursor: Any, data: Any, set_cursor: bool) -> slice | torch.Tensor | None:
        before = (self._structure, self._columns) if self.initialized else (None, None)
        try:
            if before[1] is None:
                self._initialize(as_index(cursor, self.ndim), data)
            elif not set_cursor:
                self._take_in_new(cursor, data)
            return self._set(cursor, data)
        except BaseException as error:
            if self._columns is not before[1]:
                self._go_back(*before)
            if before[1] is not None and not isinstance(error, RbtoolError):
                self.log.changed()  # after an interrupt, some columns may be written already
            if isinstance(error, NotImplementedError):  # a device without bytes, such as `meta`
                raise SchemaError(f"the data cannot be brought to {self.device}: {error}") from error
            raise

    def array_rows(self, label: str | None) -> ArrayRows | None:
        """Return the object that divides tensordicts and dicts into columns for `write_arrays`.

        None before the first write. `label` is the entry in which a writer stores the number of each row, if it does.
        """
        columns, known = self._columns, self._array_rows
        if columns is None or known is None or known.columns is not columns or known.label != label:
            known = self._array_rows = None if columns is None else ArrayRows(self.structure, columns, label)
        return known

    def write_arrays(
        self, rows: ArrayRows, cursor: int | range, values: Sequence[Any], numbers: Any, lent: bool
    ) -> bool:
        """Write the values of one row or of consecutive ones; see `ArrayRows.put`.

        Returns:
            False, with nothing changed, if tensors do not fit, or rows are beyond the capacity or would leave a gap.
        """
        valid, capacity, log = self._filled.value, rows.columns.lead[0], self.log
        run = _run(cursor, capacity)
        if run is None or run.start > valid:
            return False
        stop = run.stop
        if stop > valid or self.journal is not None or log.snapshots:
            self._prepare(run)
        try:
            if not rows.put(cursor, values, numbers, lent):
                return False
            if stop > valid:
                self._filled.value = stop
            self.last_cursor = cursor
            log.wrote(run, capacity)
        except BaseException:  # an interrupt
            log.changed()
            raise
        return True

    def _set(self, cursor: Any, data: Any) -> slice | torch.Tensor | None:
        """Write, and return the rows that were written; None if only some elements of rows were."""
        columns, valid = self.columns, self._filled.value
        rows: slice | torch.Tensor
        run = _run(cursor, columns.lead[0])
        if run is not None:
            rows, single = run, type(cursor) is int
        else:
            index = as_index(cursor, self.ndim)
            if isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() > 1:
                index = _coordinates(index, self.shape)
            if isinstance(index, tuple):
                self.write_cells(index, data)
                return None
            rows, single = rows_of(index, valid, columns.lead[0]), isinstance(index, int)
        grown = grown_rows(rows, valid)
        if type(data) not in _WHOLE and not single and _is_list(data):
            self._write_items(rows, data)
        else:
            self._write(rows, data, single)
        if grown != valid:
            self._filled.value = grown
        return rows

    def _write(self, rows: slice | torch.Tensor, data: Any, single: bool) -> None:
        lead = self.columns.others
        if isinstance(rows, slice):
            count = rows.stop - rows.start
            values = self._values(data, lead if single else (count, *lead))
            self._prepare(rows)
            self.columns.write_run(rows.start, count, values, single=single)
            return
        values = self._values(data, (len(rows), *lead))
        self._prepare(rows)
        if (kept := last_of_repeats(rows)) is not None:
            rows, values = rows[kept], [value[kept.to(value.device)] for value in values]
        self.columns.write_rows(rows, values)

    def _write_items(self, rows: slice | torch.Tensor, data: Any) -> None:
        """Write rows that are given as a list."""
        items = data if isinstance(data, list) else data.unbind(0)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        if len(items) != count:
            raise SchemaError(f"found {len(items)} rows for {count} places")
        lead = self.columns.others
        checked = [self._values(item, lead) for item in items]
        self._prepare(rows)
        if isinstance(rows, torch.Tensor) and (kept := last_of_repeats(rows)) is not None:
            rows, checked = rows[kept], [checked[number] for number in kept.tolist()]
        if checked:
            self.columns.write_stacked(rows, checked)

    def _values(self, data: Any, lead: tuple[int, ...]) -> list[torch.Tensor]:
        """Return the tensors of `data`; SchemaError unless they fit the columns, with `lead` in front of a row."""
        values = self._flattened(data)  # may remove the columns of added entries
        self.columns.check(values, lead)
        return values

    def clear_rows(self) -> None:
        """Set the length to 0; the tensors are kept."""
        self._filled.value = 0

    # Cells -----------------------------------------------------------------------------------------

    def elements_of_cells(self, index: Any, dim: int) -> Any:
        """Return the numbers, or coordinates, of the elements affected by a write at such an index."""
        tail = self._tail
        numbers = torch.arange(len(self)).reshape(*self.shape, *[1] * len(tail)).expand(*self.shape, *tail)
        chosen = numbers.transpose(0, dim)[index].unique()
        return torch.unravel_index(chosen, self.shape) if self.ndim > 1 else chosen

    def write_cells(self, index: Any, data: Any, dim: int = 0, label: str | None = None) -> None:
        """Write at an index of several dimensions; see `set_cells`."""
        while True:
            try:
                return self._write_at_cells(index, data, dim, label)
            except TextGrows as grows:
                self._set_text(grows.path, grows.node, keep=True)

    def _write_at_cells(self, index: Any, data: Any, dim: int, label: str | None) -> None:
        before = self._structure, self._columns
        self._take_in_new(index, data)
        try:
            self._write_cells(index, data, dim, label)
        except BaseException:
            if self._columns is not before[1]:
                self._go_back(*before)
            raise

    def _write_cells(self, index: Any, data: Any, dim: int, label: str | None) -> None:
        structure, columns, kept = self.structure, self.columns, None
        depth = self.ndim + len(self._tail)
        if isinstance(index, tuple) and len(index) > depth:
            raise IndexError(f"found {len(index)} coordinates, but elements have {depth} dimensions")
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
        return tuple(self.structure.tail) if isinstance(self.structure, TensorDictNode | StackNode) else ()

    def repeated(self, index: Any, data: Any) -> Any:
        """Return data repeated for each element at `index`, if it lacks leading dimensions; otherwise unchanged."""
        if (type(index) is int and self.ndim == 1) or not self.initialized or isinstance(data, list):
            return data
        plain = isinstance(index, slice) or (isinstance(index, torch.Tensor) and index.dim() == 1)
        if plain and is_tensor_collection(data) and not self.lacks_dimensions(data):  # the most frequent case
            return data
        found = as_index(index, self.ndim)
        mask = isinstance(found, torch.Tensor) and found.dtype == torch.bool
        if isinstance(found, tuple) or (mask and found.dim() > 1):  # type: ignore[union-attr]
            return data  # `write_cells` repeats it
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
        """Repeat data up to the leading shape `lead`, and reshape these dimensions to `flat`."""
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

    # Text that differs between rows ----------------------------------------------------------------

    def _set_text(self, path: Path, node: TreeSpec | None, *, keep: bool) -> None:
        """Store the text at `path` as `node` describes: in a column, or once for all rows. None removes it.

        Args:
            path: the entry.
            node: a TextNode for a column, a ConstantNode for a shared value.
            keep: whether a new column gets the present values of the rows.

        Raises:
            SchemaError: other processes use the present column.
        """
        columns = self.columns
        if not self.alone or self.journal is not None:
            raise SchemaError(
                f"{place(path)} needs a wider column for this text, but other processes use the present one",
                hint="write a row with the longest text before the storage is shared",
            )
        known = dict(zip(self.structure.paths(), columns.given, strict=True))
        structure, old = self.structure.with_node(path, node), known.pop(path, None)
        if isinstance(node, TextNode) and (old is None or old.shape[-1] != node.width):
            if not keep:
                rows = torch.empty(0, dtype=torch.uint8)
            elif old is not None:
                rows = old[: self.rows]
            else:
                shared = encoded(dict(self.structure.constants()).get(path), place(path))
                rows = column_of([shared], node.width).expand(self.rows, *columns.lead[1:], *node.tail, node.width)
            old = self._text_column(structure, path, (*columns.lead, *node.tail, node.width), rows)
        if old is not None:
            known[path] = old
        self._take(structure, [known[leaf] for leaf in structure.paths()])
        if self._declared is not None:
            self._declared = self._declared.with_text_of(structure)

    def _text_column(self, structure: TreeSpec, path: Path, shape: tuple[int, ...], rows: torch.Tensor) -> torch.Tensor:
        """Make a column for the text at `path` of the new `structure`, with `rows` as its first rows."""
        made = zeros(torch.uint8, shape, torch.device(self.device))
        if len(rows):
            made[: len(rows), ..., : rows.shape[-1]] = rows
        return made

    # Entries ---------------------------------------------------------------------------------------

    def editable(self, key: Path) -> torch.Tensor:
        """Return a view of one entry of all valid elements; MissingKeyError if it does not exist."""
        found = dict(zip(self.structure.paths(), self.columns.leaves, strict=True)).get(key)
        if found is not None and key not in self.structure.places:
            raise SchemaError(f"{place(key)} holds text, expected the key of a tensor", hint="write whole rows instead")
        if found is not None:
            self.log.lend()
            return found[: self.rows]
        if any(path[: len(key)] == key for path in self.structure.paths()):
            raise SchemaError(f"{'.'.join(key)!r} holds several entries, expected the key of a tensor")
        names = self.columns.names
        raise MissingKeyError(
            f"entry {'.'.join(key)!r} not found{did_you_mean('.'.join(key), names)}",
            hint=f"entries are {', '.join(names)}" if names else "",
        )

    def create_entries(self, values: Mapping[Path, torch.Tensor]) -> None:
        """Add entries, with values for all valid elements, to tensordicts or dicts in memory.

        Raises:
            SchemaError: the values are for another number of elements.
            MissingKeyError: the storage cannot take new entries.
        """
        if not self._takes_entries:
            super().create_entries(values)
        for path, value in values.items():
            if value.shape[: self.ndim] != self.shape:
                raise SchemaError(
                    f"{'.'.join(path)!r} has the shape {list(value.shape)}, expected it to begin with "
                    f"{list(self.shape)}: a new entry needs values for all elements"
                )
        brought = tree_spec_of(_nested(values, self.shape, self.structure), self.ndim)
        self._begin_entries(brought, values, self.ndim)
        for path, value in values.items():
            self.editable(path).copy_(value)

    @property
    def _takes_entries(self) -> bool:
        """Whether entries can be added: there are rows, and no other process shares them."""
        return self.initialized and isinstance(self._structure, MappingNode) and self.rows > 0 and not self.shared

    def _begin_entries(self, brought: TreeSpec, values: Mapping[Path, torch.Tensor], lead: int) -> None:
        """Make columns of zeros for the entries that only `brought` has.

        They get the types and row shapes of `values`, whose first `lead` dimensions count elements.
        """
        columns, declared = self.columns, self._declared or self.structure
        known = dict(zip(self.structure.paths(), columns.given, strict=True))
        structure = self.structure.joined(brought.placed(torch.device(self.device)))
        leaves = [
            known[path]
            if path in known
            else zeros(values[path].dtype, (*columns.lead, *values[path].shape[lead:]), torch.device(self.device))
            for path in structure.paths()
        ]
        self._take(structure, leaves)
        self._declared = declared

    def _take_in_new(self, cursor: Any, data: Any) -> None:
        """Make columns for new entries of data that replaces elements; all other elements get zeros there."""
        if not (self._takes_entries and (is_tensor_collection(data) or isinstance(data, Mapping))):
            return
        if is_tensor_collection(data):
            lead = data.batch_dims - len(self._tail)
            if lead < 0 or data.batch_size[lead:] != self._tail:
                return
        elif isinstance(index := as_index(cursor, self.ndim), tuple):
            return
        else:
            lead = self.ndim - isinstance(index, int)
        try:
            brought = tree_spec_of(data, lead)
            values = dict(zip(brought.paths(), brought.flatten(data), strict=True))
        except SchemaError:  # the write raises the error
            return
        if values.keys() - set(self.structure.paths()) and all(value.dim() >= lead for value in values.values()):
            self._begin_entries(brought, values, lead)

    def _flattened(self, data: Any) -> list[torch.Tensor]:
        """Return the tensors of data; SchemaError unless it has all entries, or all except those that were added."""
        try:
            return self.structure.flatten(data)
        except SchemaError:
            if not self._remove_added(data):
                raise
            return self.structure.flatten(data)

    def _remove_added(self, data: Any) -> bool:
        """Remove the columns of added entries if data has all other entries; return whether they were removed."""
        declared = self._declared
        if declared is None or declared is self._structure:
            return False
        try:
            declared.flatten(data)
        except TextGrows:  # the write makes room for it
            pass
        except SchemaError:
            return False
        known = dict(zip(self.structure.paths(), self.columns.given, strict=True))
        self._take(declared, [known[path] for path in declared.paths()])
        return True

    # State, and checkpoints that are loaded --------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return the contents; tensors are references.

        `_storage` holds tensors by their `leaf_names`, or a single tensor, and `_len` the number of elements.
        `initialized` is False for a storage that was never written to. `_structure` is the tree spec as JSON, from
        which an empty storage makes its tensors.
        """
        if not self.initialized:
            return {"_storage": {}, "_len": 0, "initialized": False}
        return {
            "_storage": named_tensors(self.structure.paths(), self.columns.leaves),
            "_len": len(self),
            "initialized": True,
            "_structure": spec_to_json(self.structure),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Copy the valid rows of what `save_state` returned; names, types and shapes must match.

        Capacities may differ as long as the rows fit. An empty lazy storage creates its tensors like the saved ones.
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
        """Replace the contents by the first `length` elements of tensors; checkpoints are loaded through this.

        Args:
            structure: how the tensors are nested.
            tensors: the tensors; they may have more rows than `length`, and than this storage. With `write`, they only
                give types and shapes, and may be on the device `meta`.
            length: how many elements are valid.
            write: called as `write(columns, in_time)` to write the rows into the columns; with `in_time`, a full ring
                in the order of time. If it fails, some of the existing rows may have changed.
            capacity: the capacity of the storage that the rows come from; None if unknown.
            last_row: the row written last there; None if unknown. When a buffer loads a full ring into a larger
                storage, the oldest row becomes row 0.

        Raises:
            SchemaError: names, types or shapes differ, or the elements do not fit. Nothing is changed.
        """
        fresh = not self.initialized
        try:
            if fresh:
                self._allocate(structure, [(tensor.dtype, tensor.shape[1:]) for tensor in tensors])
            own, numbered = self._with_text_of(structure), None if write else self.numbered_by
            structure, tensors = _with_numbers(numbered, structure, tensors, self.columns)
            rows = self._rows_to_fill(length)
            values = [value[:rows] for value in in_order(own, structure, tensors)]
            self._take_text(own, values, (rows, *self.columns.lead[1:]))
            columns = self.columns
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
                self.log.changed()  # some rows may be written already
            raise
        self._filled.value = rows
        self.mark_replaced(rows % columns.lead[0], last_row if self.rotated is None else rows - 1)

    def _with_text_of(self, saved: TreeSpec) -> TreeSpec:
        """Return the structure with the text of saved data that will replace all rows.

        SchemaError if the data differs in values that are the same in all rows.
        """
        found = self.structure.with_text_of(saved)
        found.refuse_other_constants(saved)
        return found

    def _take_text(self, structure: TreeSpec, values: Sequence[torch.Tensor], lead: tuple[int, ...]) -> None:
        """Store text as `structure` describes it; SchemaError, with nothing changed, unless all values fit."""
        known = dict(zip(self.structure.paths(), self.columns.leaves, strict=True))
        shapes = {path: leaf.shape[self.ndim :] for path, leaf in known.items()}
        shapes |= {path: torch.Size([*node.tail, node.width]) for path, node in structure.texts()}
        dtypes = [known[path].dtype if path in known else torch.uint8 for path in structure.paths()]
        names = [".".join(path) for path in structure.paths()]
        require_like(names, values, dtypes, [torch.Size([*lead, *shapes[path]]) for path in structure.paths()])
        own, wanted = dict(self.structure.values()), dict(structure.values())
        for path in own | wanted:
            if wanted.get(path) is not own.get(path):
                self._set_text(path, wanted.get(path), keep=False)

    def set_length(self, length: int) -> None:
        """Set the number of valid elements; SchemaError if there is not enough room."""
        self._filled.value = self._rows_to_fill(length)
        self.mark_replaced(self._filled.value % self.columns.lead[0])

    def _rows_to_fill(self, length: int) -> int:
        """Return the number of rows for `length` elements; SchemaError if they do not fit."""
        lead = self._lead
        rows, rest = divmod(length, math.prod(lead[1:]))
        if rest or not 0 <= rows <= lead[0]:
            raise SchemaError(f"{length} saved elements do not fit: this storage has room for {self.max_size}")
        return rows

    # The first write -------------------------------------------------------------------------------

    def _initialize(self, index: Any, data: Any) -> None:
        """Create the tensors for the first data."""
        if isinstance(index, tuple):
            raise SchemaError("single elements cannot be written to an empty storage", hint="write rows first")
        rows, items = not isinstance(index, int), list[Any]()
        if rows and _is_list(data):
            if not len(data):
                raise SchemaError(
                    "the first write has no rows, expected at least one, which determines the structure of the storage"
                )
            items = data if isinstance(data, list) else list(data.unbind(0))
            data, rows = items[0], False
        structure = tree_spec_of(data, self.ndim if rows else self.ndim - 1)
        if self._bare is not None or next(structure.paths(), None) is None:  # rows that are not written have None
            structure = structure.in_columns()
        for item in items if next(structure.values(), None) else ():  # each item may have longer text
            structure = structure.with_room_for(item)
        leaves = structure.flatten(data)
        if rows and not all(leaf.dim() for leaf in leaves):
            raise SchemaError("the rows are a tensor without dimensions, expected a first dimension that counts rows")
        if self.device == "auto" and leaves:
            self.device = leaves[next(iter(structure.places.values()), 0)].device
        self._allocate(structure, [(leaf.dtype, leaf.shape[1:] if rows else leaf.shape) for leaf in leaves])

    def _allocate(self, structure: TreeSpec, rows: Sequence[tuple[torch.dtype, torch.Size]]) -> None:
        """Create tensors for rows of these types and shapes."""
        lead = self._lead
        self._take(
            structure.placed(self._bare.device), [zeros(dtype, (lead[0], *row), self.device) for dtype, row in rows]
        )
        if self.columns.lead != lead:
            raise SchemaError(f"such rows make tensors {list(self.columns.lead)}, expected {list(lead)}")

    # Overridden by lazy storages -------------------------------------------------------------------

    def _go_back(self, structure: TreeSpec | None, columns: Columns | None) -> None:
        """Restore the previous tensors after a failed write for which new ones were made."""
        self._structure, self._columns, self._wrapped = structure, columns, None

    def _make_room(self, rows: slice | torch.Tensor) -> None:
        """Ensure that there is space for these rows before the first of them is written."""

    # Writes of other processes ---------------------------------------------------------------------

    def _prepare(self, rows: slice | torch.Tensor) -> None:
        """Prepare a write of checked values to these rows."""
        self._make_room(rows)
        self.keep(rows)

    def keep(self, rows: slice | torch.Tensor, key: Path | None = None) -> None:
        """Keep the old contents of rows that are about to be replaced, for background dumps and for `undo`."""
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
        """Undo the write of a killed process."""
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
        """Return a snapshot of the valid rows, in parts of `part_rows` rows; the caller has to call `end_snapshot`.

        None if rows may change without a call of `keep`: on other devices, by other processes, or through references.
        """
        if not (self.initialized and self.columns.gathers_into):
            return None
        found = Snapshot(
            self.columns.arrays, self.rows, part_rows, next_row=self.log.now.next_row, shared=self._filled.shared
        )
        self.log.snapshots.append(found)
        # Checked only now: from here on, a thread that takes references waits for the snapshot.
        if self.log.lent or not self.alone:
            self.end_snapshot(found)
            return None
        return found

    def end_snapshot(self, snapshot: Snapshot) -> None:
        """Release a snapshot; may be called repeatedly."""
        snapshot.close()
        if snapshot in self.log.snapshots:
            self.log.snapshots.remove(snapshot)

    # Processes -------------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether other processes see the same rows and the same length."""
        return self._filled.shared

    def share(self) -> None:
        """Move rows and length to memory shared with processes that are started from now on.

        Raises:
            SchemaError: nothing was written yet.
        """
        self.log.settle()
        try:
            for leaf in self.columns.leaves:
                if leaf.is_cpu and not leaf.is_shared():
                    leaf.share_memory_()
        finally:
            self.columns.addresses()  # even if shared memory is full, some columns may have moved
        self._share_counts()

    def _share_counts(self) -> None:
        """Move the numbers that other processes have to update to shared memory."""
        self._filled.share_()
        self.log.share_()

    def __getstate__(self) -> dict[str, Any]:
        if self._bare is not None and not self.initialized and get_spawning_popen() is not None:
            raise SchemaError(
                "a storage without entries cannot be passed to another process: both would make their own",
                hint="write to it first",
            )
        self.log.settle()
        state = super().__getstate__() | {"_columns": None, "_wrapped": None, "_filler": None, "_array_rows": None}
        if self.initialized:
            # torch cannot pickle wide unsigned integers, so their bits are sent as the signed type of the same width.
            columns = self.columns
            columns.pickled = True
            wide = [leaf.dtype in {torch.uint16, torch.uint32, torch.uint64} for leaf in columns.leaves]
            pairs = zip(wide, columns.given, columns.plain, strict=True)
            state["_leaves"] = [plain if is_wide else leaf for is_wide, leaf, plain in pairs]
            state["_dtypes"] = columns.dtypes
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        leaves, dtypes = state.pop("_leaves", None), state.pop("_dtypes", [])
        self.__dict__.update(state)
        if leaves is not None and self._structure is not None:
            pairs = zip(leaves, dtypes, strict=True)
            typed = [leaf if leaf.dtype is dtype else leaf.view(dtype) for leaf, dtype in pairs]
            self._take(self._structure, typed)


def _is_list(data: Any) -> bool:
    """Whether data is a list of rows, or a lazy stack along the dimension of rows."""
    return isinstance(data, list) or (isinstance(data, LazyStackedTensorDict) and not data.stack_dim)


def _is_bare(structure: TreeSpec) -> bool:
    """Whether data is a tensordict without entries, except nested tensordicts that have none either."""
    plain = isinstance(structure, TensorDictNode) and structure.kind is None
    return plain and next(structure.paths(), None) is None and next(structure.constants(), None) is None


def _coordinates(mask: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, ...]:
    """Return the coordinates of the elements that a mask selects; IndexError unless it has the shape of elements."""
    if mask.shape != shape[: mask.dim()]:
        raise IndexError(f"found a mask of shape {list(mask.shape)} for elements of shape {list(shape)}")
    return mask.nonzero().unbind(1)


def _run(cursor: Any, capacity: int) -> slice | None:
    """Return the rows of an int or of a range with step 1, the most frequent cursors.

    None for other cursors, and for rows beyond the capacity.
    """
    if type(cursor) is int:
        return slice(cursor, cursor + 1) if 0 <= cursor < capacity else None
    if type(cursor) is not range or cursor.step != 1:
        return None
    start, stop = cursor.start, cursor.stop
    return slice(start, stop) if 0 <= start <= stop <= capacity else None


def _nested(values: Mapping[Path, torch.Tensor], lead: torch.Size, structure: TreeSpec) -> Any:
    """Nest tensors by their paths, in a tensordict or a dict as at the root of `structure`."""
    found: dict[str, Any] = {}
    for path, value in values.items():
        inner = found
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return TensorDict(found, lead) if isinstance(structure, TensorDictNode) else found


def _with_numbers(
    key: str | None, structure: TreeSpec, tensors: Sequence[torch.Tensor], columns: Columns
) -> tuple[TreeSpec, Sequence[torch.Tensor]]:
    """Add the entry with row numbers, which a writer stores here, to saved data that does not have it."""
    if key is None or key not in columns.names or not tensors:
        return structure, tensors
    if not isinstance(structure, MappingNode) or key in structure.children:
        return structure, tensors
    like, rows = columns.leaves[columns.names.index(key)], tensors[0].shape[0]
    numbers = torch.arange(rows, device=like.device).reshape(-1, *[1] * (like.dim() - 1))
    structure = structure.with_children({**structure.children, key: TensorNode()})
    return structure, [*tensors, numbers.expand(rows, *like.shape[1:])]
