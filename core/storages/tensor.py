"""A storage on tensors that are there already; lazy storages make their tensors themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from ..errors import RbtoolError, SchemaError, UsageError
from .columns import Columns
from .cursors import as_index, grown_rows, last_of_repeats, rows_of
from .pytree import TreeSpec, tree_spec_of
from .tensor_state import TensorState
from .write_log import Counter

_WHOLE = frozenset({TensorDict, torch.Tensor, dict})
"""What is surely no list of rows: to ask so is faster than to ask for those."""


class TensorStorage(TensorState):
    """Wraps a tensor, a tensordict, a tensorclass or a nest of them, and counts as full.

    Dimension 0 is the capacity; the first `ndim` dimensions, which all leaves share, count elements. A `max_size`
    that is neither the number of rows nor of elements raises UsageError (a ValueError), as do `storage=None` and a
    `device` other than the data's; `"auto"` follows the data. What is written must have the keys, element types
    and shapes of what is stored, else SchemaError (a RuntimeError) is raised and nothing changes.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> storage = TensorStorage(TensorDict({"action": torch.arange(4)}, [4]))
    >>> storage[torch.tensor([3, 0])]["action"]
    tensor([3, 0])
    """

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
        structure = tree_spec_of(storage, ndim)
        self._take(structure, structure.flatten(storage))
        lead = self.columns.lead
        super().__init__(math.prod(lead), checkpointer, compilable)
        if max_size not in (None, lead[0], self.max_size):
            raise UsageError(f"max_size is {max_size}, but the tensors hold {self.max_size} elements")
        found = self.columns.leaves[0].device
        self.device = found if device == "auto" else torch.device(device)
        if any(leaf.device.type != self.device.type for leaf in self.columns.leaves):
            raise UsageError(f"the tensors are on {found}, not on {self.device}", hint='say device="auto"')
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
        """Make these tensors the contents. They must share their leading dimensions."""
        leads = {leaf.shape[: self.ndim] for leaf in leaves}
        if len(leads) != 1 or len(min(leads)) != self.ndim:
            shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves) or "no tensor"
            raise SchemaError(f"expected tensors that share their first {self.ndim} dimensions, found {shapes}")
        self._columns = Columns(leaves, [".".join(path) for path in structure.paths()], self.ndim)
        self._structure = structure
        self._wrapped = None

    @property
    def initialized(self) -> bool:
        """Whether the tensors are there; a lazy storage makes them at its first write."""
        return self._columns is not None

    @property
    def columns(self) -> Columns:
        """The tensors, cut into rows; SchemaError before the first write to a lazy storage."""
        if self._columns is None and not self.initialized:
            raise SchemaError("the storage is empty: nothing was ever written to it", hint="write to it first")
        return self._columns  # type: ignore[return-value]  # initialized means that they are there

    @property
    def structure(self) -> TreeSpec:
        """How the data is made; SchemaError before the first write to a lazy storage."""
        if self._structure is None:
            raise SchemaError("the storage is empty: nothing was ever written to it", hint="write to it first")
        return self._structure

    @property
    def rows(self) -> int:
        """The number of valid rows."""
        return self._filled.value

    @property
    def capacity_rows(self) -> int:
        """How many rows there is room for, along dimension 0; SchemaError before the first write to a lazy storage."""
        columns = self._columns or self.columns
        return columns.lead[0]

    @property
    def _storage(self) -> Any:  # the name in TorchRL's storages
        return self.contents

    @property
    def contents(self) -> Any:
        """All tensors, valid rows or not, put together as the data is; None before the first write."""
        self.log.lend()
        if self._wrapped is None and self.initialized:
            columns = self.columns
            self._wrapped = self.structure.unflatten(iter(columns.leaves), columns.lead)
        return self._wrapped

    def __len__(self) -> int:
        if self._columns is None and not self.initialized:
            return 0
        rows = self._filled.value
        return rows if self.ndim == 1 else rows * math.prod(self.columns.others)

    @property
    def shape(self) -> torch.Size:
        """Valid rows, then the other dimensions that count elements; `[0]` before the first write."""
        return torch.Size([self.rows, *self.columns.lead[1:]]) if self.initialized else torch.Size([0])

    # Reading ---------------------------------------------------------------------------------------

    def read_at(self, index: Any) -> Any:
        """Read the valid elements at `index`: an int, a slice, a list, a mask, a tensor, or a tuple of coordinates.

        Row numbers, masks and slices backwards give fresh tensors, ints and other slices views of the stored ones.
        SchemaError (a RuntimeError) where nothing was ever written, IndexError for rows that are not there.
        """
        if type(index) is not torch.Tensor or index.dtype is not torch.int64:
            index = as_index(index, self.ndim)
        columns, structure = self._columns or self.columns, self._structure or self.structure
        found, batch = columns.read(index, self._filled.value)
        return structure.unflatten(iter(found), batch)

    def gather_into(self, index: torch.Tensor, targets: Sequence[torch.Tensor], chosen: Sequence[int]) -> None:
        """Copy the rows `index`, int64 `[n]`, of the columns `chosen` to tensors; see `Columns.gather_into`."""
        self.columns.gather_into(index, self._filled.value, targets, chosen)

    def expect(self, rows: np.ndarray[Any, Any]) -> None:
        """Called with the numbers of rows that are read next, int64 `[n]`: they may be on a disk."""

    def flatten(self) -> TensorStorage:
        """Return a one-dimensional storage of the valid elements, on the same memory where torch can."""
        if self.ndim == 1:
            return self
        self.log.lend()
        size = torch.Size([len(self)])
        flat = [leaf[: self.rows].flatten(0, self.ndim - 1) for leaf in self.columns.leaves]
        return TensorStorage(self.structure.unflatten(iter(flat), size), device="auto", compilable=self.compilable)

    # Writing ---------------------------------------------------------------------------------------

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> slice | torch.Tensor | None:
        """Write the rows of `data` at `cursor`, later ones over earlier ones where it repeats a row.

        An int takes one row without its leading dimension, a tuple of coordinates takes elements, anything else
        takes rows; a list and a lazy stack are rows one by one. Data and cursor may be views of what is stored here:
        they are read whole before the first row is written. The length grows up to the highest row written. A write
        beyond the capacity, or one that would leave rows below it unwritten, raises SchemaError.
        """
        before = (self._structure, self._columns) if self.initialized else (None, None)
        try:
            if before[1] is not None and (run := self._copied_run(before[1], cursor, data)) is not None:
                return run
            if before[1] is None:
                self._initialize(as_index(cursor, self.ndim), data)
            elif not set_cursor:
                self._take_in_new(cursor, data)
            return self._set(cursor, data)
        except BaseException as error:
            if self._columns is not before[1]:
                self._go_back(*before)
            if before[1] is not None and not isinstance(error, RbtoolError):
                self.log.changed()  # an interrupt: some columns may be written already
            if isinstance(error, NotImplementedError):  # of a device without bytes, like `meta`
                raise SchemaError(f"the data cannot be brought to {self.device}: {error}") from error
            raise

    def _copied_run(self, columns: Columns, cursor: Any, data: Any) -> slice | None:
        """Write rows that follow one another, and whose bytes can be copied as they are, as most can; return the rows.

        None, with nothing changed, for anything else, and for what does not fit: the general way names what differs.
        """
        run, valid = _run(cursor, columns.lead[0]), self._filled.value
        if run is None or type(data) not in _WHOLE or run.start > valid or run.start == run.stop:
            return None
        start, stop = run.start, run.stop
        try:
            values = self.structure.flatten(data)
        except SchemaError:
            return None
        lead = columns.others if type(cursor) is int else (stop - start, *columns.others)
        sources = columns.sources(values, lead, stop)
        if sources is None:
            return None
        if stop > valid or self.journal is not None or self.log.snapshots:
            self._prepare(run)
        columns.copy_run(start, stop - start, sources)
        if stop > valid:
            self._filled.value = stop
        return run

    def _set(self, cursor: Any, data: Any) -> slice | torch.Tensor | None:
        """Write, and return the rows that were written; None for elements of rows."""
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
        if type(data) not in _WHOLE and not single and isinstance(data, list | LazyStackedTensorDict):
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
            self.columns.write_run(rows.start, count, values)
            return
        values = self._values(data, (len(rows), *lead))
        self._prepare(rows)
        if (kept := last_of_repeats(rows)) is not None:
            rows, values = rows[kept], [value[kept.to(value.device)] for value in values]
        self.columns.write_rows(rows, values)

    def _write_items(self, rows: slice | torch.Tensor, data: Any) -> None:
        """Write rows that are given one by one."""
        items = data if isinstance(data, list) else data.unbind(0)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        if len(items) != count:
            raise SchemaError(f"{len(items)} rows given for {count} places")
        lead = self.columns.others
        checked = [self._values(item, lead) for item in items]
        self._prepare(rows)
        if isinstance(rows, torch.Tensor) and (kept := last_of_repeats(rows)) is not None:
            rows, checked = rows[kept], [checked[number] for number in kept.tolist()]
        if checked:
            self.columns.write_stacked(rows, checked)

    def _values(self, data: Any, lead: tuple[int, ...]) -> list[torch.Tensor]:
        """Take `data` apart; its tensors must be what this storage keeps, with `lead` in front."""
        values = self._taken_apart(data)  # which may leave out columns
        self.columns.check(values, lead)
        return values

    # What lazy storages do otherwise ---------------------------------------------------------------

    def _initialize(self, index: Any, data: Any) -> None:
        """Make the tensors after the first data."""

    def clear_rows(self) -> None:
        """Set the length to 0; the tensors stay."""
        self._filled.value = 0

    # Processes -------------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether other processes see the same rows and the same length."""
        return self._filled.shared

    def share(self) -> None:
        """Move rows and length into memory that processes started from now on share; SchemaError if there are none."""
        self.log.settle()
        for leaf in self.columns.leaves:
            if leaf.is_cpu and not leaf.is_shared():
                leaf.share_memory_()
        self._share_counts()

    def _share_counts(self) -> None:
        """Move into shared memory what other processes have to count with."""
        self._filled.share_()
        self.log.share_()

    def __getstate__(self) -> dict[str, Any]:
        self.log.settle()
        state = super().__getstate__() | {"_columns": None, "_wrapped": None, "_filler": None}
        if self.initialized:
            # torch pickles no wide unsigned integers: their bits go in the signed type of the same width.
            columns = self.columns
            wide = [leaf.dtype in {torch.uint16, torch.uint32, torch.uint64} for leaf in columns.leaves]
            pairs = zip(wide, columns.leaves, columns.plain, strict=True)
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


def _coordinates(mask: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, ...]:
    """Name the elements that a mask of several dimensions selects; IndexError for a mask of another shape."""
    if mask.shape != shape[: mask.dim()]:
        raise IndexError(f"a mask of shape {list(mask.shape)} given for elements of shape {list(shape)}")
    return mask.nonzero().unbind(1)


def _run(cursor: Any, capacity: int) -> slice | None:
    """Which rows an int or a range of step 1 names, as most writes do; None for anything else, and beyond the ends."""
    if type(cursor) is int:
        return slice(cursor, cursor + 1) if 0 <= cursor < capacity else None
    if type(cursor) is not range or cursor.step != 1:
        return None
    start, stop = cursor.start, cursor.stop
    return slice(start, stop) if 0 <= start <= stop <= capacity else None
