"""Reads and writes rows of plain tensors, and fills batches again.

Random rows on the CPU are gathered by numpy's `take`: with 11 leaves it needs 0.5 to 0.8 of the time of torch's
`index_select`, starts no threads and releases the interpreter lock. Where the rows exceed the processor's caches, a
compiled loop over all leaves takes over. Consecutive rows are copied whole.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection
from torch.autograd.graph import increment_version

from ..errors import SchemaError
from ..kernels.rows import Numbers, PlainRows, fastest_rows
from ..kernels.tensors import Sources, TensorFinder, tensor_finder
from .cursors import Index, row_numbers
from .pytree import TensorDictNode, TreeSpec, place, tree_spec_of


class Memory:
    """The current memory of some tensors.

    Whole allocations are compared by their addresses: two views of one count as the same memory even where they
    do not overlap, and so do two that were wrapped separately around one buffer.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        ranges = sorted({_addresses(tensor) for tensor in tensors})
        self._starts = [start for start, _ in ranges]
        self._stops: list[int] = []
        for _, stop in ranges:
            self._stops.append(max(stop, self._stops[-1]) if self._stops else stop)

    @property
    def span(self) -> tuple[int, int]:
        """The lowest address, and the one behind the highest."""
        return (self._starts[0], self._stops[-1]) if self._starts else (0, 0)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The first address and the one behind the last of each part, in ascending order."""
        return list(zip(self._starts, self._stops, strict=True))

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` may share an element with one of the tensors."""
        return self.touches(*_addresses(tensor))

    def touches(self, start: int, stop: int) -> bool:
        """Whether addresses from `start` to before `stop` are in the memory of one of the tensors."""
        before = bisect_left(self._starts, stop)
        return before > 0 and self._stops[before - 1] > start

    def apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor` itself, or a copy where it may share memory."""
        return tensor.detach().as_subclass(torch.Tensor).clone() if self.may_hold(tensor) else tensor


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    memory = tensor.untyped_storage()
    start = memory.data_ptr()
    return start, start + memory.nbytes()


# torch gathers no unsigned integers wider than a byte; their bits travel in the signed type of the same width.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def plain_column(leaf: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory that torch indexes without detours: no subclass, no wide unsigned type."""
    column = leaf.detach().as_subclass(torch.Tensor)
    return column.view(_SIGNED[column.dtype]) if column.dtype in _SIGNED else column


def zeros(dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Make zeros; on the CPU, of memory that is only taken when it is first written."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    whole = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
    return whole.view(dtype).view(tuple(shape))


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_KNOWN_TO_NUMPY = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip


# Bytes of rows from which on it pays to import what compiles loops: they no longer fit into the processor's caches.
_MANY = 32 << 20


_DATA_PTR = torch.Tensor.data_ptr


def renames(dtype: torch.dtype) -> bool:
    """Whether numpy has no name for a type, whose bits are then copied as integers."""
    return dtype not in _KNOWN_TO_NUMPY


class Columns:
    """The leaves of a storage, cut along their first dimension into rows.

    `ndim` leading dimensions count elements; all leaves share them. What is written must have been
    compared with `check`.
    """

    def __init__(self, leaves: Sequence[torch.Tensor], names: Sequence[str], ndim: int) -> None:
        self.leaves = list(leaves)
        self.names = list(names)
        self.dtypes = [leaf.dtype for leaf in leaves]
        self.ndim = ndim
        self.lead = leaves[0].shape[:ndim]
        self.others = tuple(self.lead[1:])
        self.plain = [plain_column(leaf) for leaf in leaves]
        self.widths = [math.prod(column.shape[1:]) * column.element_size() for column in self.plain]
        """Bytes of a row of each column."""
        # numpy has no word for these types: their bits are gathered, and named again afterwards.
        self._renamed = [(number, dtype) for number, dtype in enumerate(self.dtypes) if renames(dtype)]
        self._widest = max(self.widths)
        marks = [(number, _mark_of(dtype)) for number, dtype in enumerate(self.dtypes)]
        self._marks = [(number, mark) for number, mark in marks if mark is not None]
        self._expected: tuple[tuple[int, ...] | None, list[torch.Size]] = (None, [])
        self._locate()

    def _locate(self) -> None:
        """Note where the rows lie. Sharing a tensor with another process moves it, so this may be asked again."""
        self._memory = Memory(self.plain)
        self._span = self._memory.span
        self._places = [column.data_ptr() for column in self.plain]
        self._stays = all(column.is_shared() for column in self.plain)
        self._in_rows = all(leaf.is_cpu and leaf.is_contiguous() for leaf in self.leaves)
        self._arrays = [_array(column) for column in self.plain] if self._in_rows else []
        self._rows = PlainRows(self._arrays)
        self._by_row = self._in_rows and not (self._renamed or self.others)
        self._finder: TensorFinder | None = None
        self._many: float = _MANY // max(sum(self.widths), 1)
        self._valid: tuple[int, list[torch.Tensor]] = (-1, [])
        self._elements: Columns | None = None

    def _follow_moves(self) -> None:
        if not self._stays and list(map(_DATA_PTR, self.plain)) != self._places:
            self._locate()

    def _mover(self, rows: int) -> PlainRows:
        """What moves rows of which there are so many."""
        if rows >= self._many:
            self._rows, self._many = fastest_rows(self._arrays), math.inf
            self._finder = tensor_finder(self.leaves, self.ndim, self._memory.ranges) if self._in_rows else None
        return self._rows

    def _of(self, rows: int) -> list[torch.Tensor]:
        """The first `rows` rows."""
        if self._valid[0] != rows:
            self._valid = (rows, [column[:rows] for column in self.plain])
        return self._valid[1]

    @property
    def arrays(self) -> list[np.ndarray[Any, Any]]:
        """The columns on the CPU as arrays, bits that numpy has no word for as integers."""
        self._follow_moves()
        return self._arrays or [_array(column.cpu()) for column in self.plain]

    # Reading ---------------------------------------------------------------------------------------

    def read(self, index: Index, rows: int) -> tuple[list[torch.Tensor], torch.Size]:
        """Read `index` among the first `rows` rows; return the tensors and their leading shape.

        Tensors of row numbers, and tuples of `ndim` of them, give fresh tensors; ints and slices give views, but of
        slices that go backwards. IndexError for rows that are not there.
        """
        if not self._stays:
            self._follow_moves()
        if type(index) is torch.Tensor and index.dtype is torch.int64 and index.dim():
            if self._by_row and index.is_cpu and index.dim() == 1:
                return self._mover(rows).gather(index.numpy(), rows), index.shape
            batch = torch.Size([*index.shape, *self.others]) if self.others else index.shape
            found = self._gather(index if index.dim() == 1 else index.flatten(), rows)
            return _shaped(found, index.shape), batch
        if isinstance(index, tuple) and (flat := self._flat(index, rows)) is not None:
            if self._elements is None:
                self._elements = Columns([leaf.flatten(0, self.ndim - 1) for leaf in self.leaves], self.names, 1)
            found = self._elements._gather(flat, rows * math.prod(self.lead[1:]))
            return _shaped(found, index[0].shape), index[0].shape
        if isinstance(index, int) and not -rows <= index < rows:
            raise IndexError(f"row is {index}, expected one of {rows} rows")
        found = [column[index] for column in self._of(rows)] if _forwards(index) else self._backwards(index, rows)
        batch = found[0].shape[: found[0].dim() - self.plain[0].dim() + self.ndim]
        return self._typed(found), batch

    def _backwards(self, index: Index, rows: int) -> list[torch.Tensor]:
        """Read what is named with slices that go backwards, which torch has no views for: it is copied turned round."""
        parts = index if isinstance(index, tuple) else (index,)
        found = self._of(rows)
        for dimension, part in enumerate(parts):
            if not _forwards(part):
                turned = torch.from_numpy(row_numbers(part, found[0].shape[dimension])).to(found[0].device)
                found = [column.index_select(dimension, turned) for column in found]
        rest = tuple(part if _forwards(part) else slice(None) for part in parts)
        return [column[rest] for column in found]

    def _gather(self, index: torch.Tensor, rows: int) -> list[torch.Tensor]:
        if self._in_rows:
            numbers = (index if index.is_cpu else index.cpu()).numpy()
            found = self._mover(rows).gather(numbers, rows)
            for number, dtype in self._renamed:
                found[number] = found[number].view(dtype)
            return found
        index = index.to(self.plain[0].device)
        if index.is_cpu:
            try:
                return self._typed([column.index_select(0, index) for column in self._of(rows)])
            except IndexError:  # a negative number, or one out of range: torch's indexing handles both
                pass
        elif index.numel() and not -rows <= int(index.min()) <= int(index.max()) < rows:
            # Indexing there would stop the device for the rest of the process.
            raise IndexError(f"rows are {int(index.min())} to {int(index.max())}, expected within {rows} rows")
        return self._typed([column[index] for column in self._of(rows)])

    @property
    def gathers_into(self) -> bool:
        """Whether rows can be copied to given memory: they are contiguous, and on the CPU."""
        return self._in_rows

    @property
    def numpy_types(self) -> list[np.dtype[Any]]:
        """The types of the memory that rows are copied to: integers where numpy has no name for a type."""
        return [array.dtype for array in self._arrays]

    @property
    def known_addresses(self) -> list[int]:
        """Where the columns were in memory when it was last asked for."""
        return self._places

    def addresses(self) -> list[int]:
        """Return where the columns are in memory; the same list as long as they stay there."""
        self._follow_moves()
        return self._places

    def gather_into(
        self,
        index: torch.Tensor,
        rows: int,
        targets: Sequence[torch.Tensor],
        chosen: Sequence[int] | None = None,
        addresses: Sequence[int] | Numbers | None = None,
    ) -> None:
        """Copy the rows `index`, int64 `[n]`, of the columns `chosen`, or of all, to tensors of their `numpy_types`.

        They are contiguous. `addresses`, of all, are those that `sources` just found, without gaps.
        """
        if addresses is None:
            self._follow_moves()
        mover = self._mover(rows) if chosen is None else self._rows
        numbers = (index if index.is_cpu else index.cpu()).numpy()
        if addresses is None or not mover.gather_to(numbers, rows, addresses):
            mover.gather_into(numbers, rows, targets, range(len(self.plain)) if chosen is None else chosen)

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may share memory with the columns."""
        self._follow_moves()
        return self._memory.may_hold(tensor)

    def _flat(self, index: tuple[Any, ...], rows: int) -> torch.Tensor | None:
        """One row number for each element that a tuple of tensors names; None if it is something else."""
        if len(index) != self.ndim or not self._in_rows:
            return None
        if any(not isinstance(part, torch.Tensor) or part.dtype != torch.int64 or not part.dim() for part in index):
            return None
        if any(part.shape != index[0].shape for part in index):
            return None
        try:
            parts = tuple(part.flatten().numpy(force=True) for part in index)
            return torch.from_numpy(np.ravel_multi_index(parts, (rows, *self.lead[1:])))
        except ValueError:  # negative coordinates, which torch counts from the end, or coordinates out of range
            return None

    def _typed(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            rows if rows.dtype is dtype else rows.view(dtype) for rows, dtype in zip(found, self.dtypes, strict=True)
        ]

    # Writing ---------------------------------------------------------------------------------------

    def check(self, values: Sequence[torch.Tensor], lead: tuple[int, ...]) -> None:
        """Raise SchemaError unless the values are what these columns keep, with `lead` in front."""
        shapes = self._shapes(lead)
        if [value.dtype for value in values] == self.dtypes and [value.shape for value in values] == shapes:
            return
        for name, value, dtype, shape in zip(self.names, values, self.dtypes, shapes, strict=True):
            if value.dtype != dtype or value.shape != shape:
                found = f"{value.dtype} {list(value.shape)}"
                raise SchemaError(f"{name or 'the tensor'} is {found}, expected {dtype} {list(shape)}")

    def _shapes(self, lead: tuple[int, ...]) -> list[torch.Size]:
        """The shapes of values with `lead` in front."""
        known, shapes = self._expected
        if known != lead:
            shapes = [torch.Size([*lead, *leaf.shape[self.ndim :]]) for leaf in self.leaves]
            self._expected = (lead, shapes)
        return shapes

    def sources(self, values: Sequence[torch.Tensor], lead: tuple[int, ...], stop: int) -> Sources | None:
        """Return where the bytes of values are that can be copied as they are, to rows before `stop` by `copy_run`.

        None unless all of them are what these columns keep, with `lead` in front, on the CPU, in other memory, and
        contiguous; compiled loops also take contiguous elements. It replaces `check`, which names what differs.
        """
        self._follow_moves()
        if not self._in_rows:
            return None
        self._mover(stop)
        for number, mark in self._marks:
            if mark(values[number]):
                return None
        if self._finder is not None:
            return self._finder.find(values, lead)
        found = []
        for value, dtype, shape in zip(values, self.dtypes, self._shapes(lead), strict=True):
            if value.dtype is not dtype or value.shape != shape or not (value.is_cpu and value.is_contiguous()):
                return None
            found.append(value.data_ptr())
        count = lead[0] if len(lead) == self.ndim else 1
        if max(found) < self._span[0] - count * self._widest or min(found) >= self._span[1]:
            return Sources(found)
        touches = self._memory.touches
        pairs = zip(found, self.widths, strict=True)
        return None if any(touches(at, at + count * width) for at, width in pairs) else Sources(found)

    def copy_run(self, start: int, count: int, sources: Sources, *, together: bool = False) -> None:
        """Copy rows that follow one another from where `sources` found them; `together`, by several threads."""
        if sources.steps is None:
            write = self._rows.write_together if together else self._rows.write
            write(start, count, sources.addresses)
        else:
            assert self._finder is not None  # it found them
            self._finder.copy(start, count, sources)

    def write_run(self, start: int, count: int, values: Sequence[torch.Tensor], *, together: bool = False) -> None:
        """Write rows that follow one another; the values may be views of the columns. For `together` see `copy_run`."""
        sources = self.sources(values, (count, *self.others), start + count)
        if sources is not None:
            self.copy_run(start, count, sources, together=together)
            return
        self._follow_moves()
        targets = [column[start : start + count] for column in self.plain]
        pairs = [pair for pair in zip(targets, values, strict=True) if not _are_one(*pair)]
        fresh = self.apart(value for _, value in pairs)
        for (target, _), value in zip(pairs, fresh, strict=True):
            target.copy_(plain_column(value))

    def write_rows(self, rows: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """Write rows by number, of which none repeats; the values may be views of the columns."""
        for column, value in zip(self.plain, self.apart(values), strict=True):
            column.index_copy_(0, rows.to(column.device), plain_column(value).to(column.device))

    def write_cells(
        self,
        index: Any,
        rows: int,
        values: Sequence[torch.Tensor],
        *,
        depth: int,
        dim: int = 0,
        whole: int | None = None,
    ) -> None:
        """Write at any index of the first `rows` rows, with dimension `dim` in front; nothing is written beyond them.

        The index concerns up to `depth` dimensions. Values are repeated along those in front that all of them lack,
        but for the value `whole`, which lacks none.
        SchemaError, with nothing written, for values of other types and shapes.
        """
        targets = [column.transpose(0, dim) for column in self._of(rows)]
        shapes = [target[index].shape for target in targets]
        apart = self.apart(self.repeated(values, shapes, [target.dim() - depth for target in targets], whole))
        parts = index if isinstance(index, tuple) else (index,)
        place = tuple(self.apart([part])[0] if isinstance(part, torch.Tensor) else part for part in parts)
        for target, value in zip(targets, apart, strict=True):
            target[place] = plain_column(value).to(target.device)

    def repeated(
        self,
        values: Sequence[torch.Tensor],
        shapes: Sequence[torch.Size],
        tails: Sequence[int],
        whole: int | None = None,
    ) -> list[torch.Tensor]:
        """Repeat values along leading dimensions that all of them lack, up to these shapes.

        The last `tails` dimensions of each are those of one element. The value `whole` lacks none.
        SchemaError for other types and shapes.
        """
        lacking = {
            len(shape) - value.dim()
            for number, (value, shape) in enumerate(zip(values, shapes, strict=True))
            if number != whole
        }
        found = []
        for value, dtype, shape, tail, name in zip(values, self.dtypes, shapes, tails, self.names, strict=True):
            fits = tail <= value.dim() <= len(shape) and value.shape == shape[len(shape) - value.dim() :]
            if value.dtype != dtype or not fits or len(lacking) > 1:
                given = f"{value.dtype} {list(value.shape)}"
                raise SchemaError(f"{name or 'the tensor'} is {given}, expected {dtype} {list(shape)}")
            found.append(value.expand(shape))
        return found

    def write_stacked(self, rows: slice | torch.Tensor, items: Sequence[Sequence[torch.Tensor]]) -> None:
        """Write items, each a list of values, one below the other, without a stack of the whole in between."""
        fresh = [self.apart(parts) for parts in zip(*items, strict=True)]
        for column, parts in zip(self.plain, fresh, strict=True):
            plain = [plain_column(part).to(column.device) for part in parts]
            if isinstance(rows, slice):
                torch.stack(plain, out=column[rows])
            else:
                column.index_copy_(0, rows.to(column.device), torch.stack(plain))

    def apart(self, values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Copy those values that a write into the columns, any of them, might change before they are read."""
        self._follow_moves()
        return [self._memory.apart(value) for value in values]


def _mark_of(dtype: torch.dtype) -> Callable[[torch.Tensor], bool] | None:
    """Return what finds out whether numbers of a type read otherwise than their bytes; None for types that never do.

    Views of complex numbers, and of their halves, may be marked as conjugate or negative.
    """
    if dtype.is_complex:
        return lambda value: value.is_conj() or value.is_neg()
    return torch.Tensor.is_neg if dtype.is_floating_point else None


def _forwards(index: Index) -> bool:
    """Whether torch takes an index as it is: it takes no slices with negative steps."""
    if isinstance(index, tuple):
        return all(_forwards(part) for part in index)
    return not (isinstance(index, slice) and index.step is not None and index.step < 0)


def _shaped(found: list[torch.Tensor], batch: torch.Size) -> list[torch.Tensor]:
    """Give rows that were gathered one below the other the shape of the index that named them."""
    return found if len(batch) == 1 else [rows.view(*batch, *rows.shape[1:]) for rows in found]


def _are_one(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one type and shape are the same elements."""
    return one.device == other.device and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """View a tensor as an array; bits that numpy has no word for as integers."""
    return (tensor if tensor.dtype in _KNOWN_TO_NUMPY else tensor.view(_BITS[tensor.element_size()])).numpy()


_ADDRESS = torch.Tensor.data_ptr
_REQUIRES_GRAD = attrgetter("requires_grad")
_CPU = torch.device("cpu")
_HINT = "give a batch of that size which an earlier call returned, without entries that were added to it"


def fill(out: Any, batch: Any, stored: Callable[[torch.Tensor], bool]) -> Any:
    """Copy a batch into another one that is made as it is, and return that one.

    `stored` returns whether a tensor may share memory with stored rows. SchemaError (a RuntimeError), with nothing
    changed, for other entries, element types, shapes or devices, and for tensors that are not contiguous, that require
    gradients, or that share memory with each other or with stored rows.
    """
    try:
        structure = tree_spec_of(batch)
        values, targets = structure.flatten(batch), structure.flatten(out)
    except SchemaError as error:
        raise _refused(str(error)) from error
    if is_tensor_collection(batch) and out.batch_size != batch.batch_size:
        raise _refused(f"its batch size is {list(out.batch_size)}, expected {list(batch.batch_size)}")
    for path, value, target in zip(structure.paths(), values, targets, strict=True):
        _require_like(place(path), target, value.dtype, value.shape, value.device)
    _require_apart(structure, targets, stored)
    with torch.no_grad():
        for value, target in zip(values, targets, strict=True):
            target.copy_(value)
    return out


class Filler:
    """Fills batches of rows of a storage of tensors, in one call for all columns.

    Batches may have more entries at their root than the rows, which are copied.
    """

    def __init__(self, structure: TreeSpec, columns: Columns, added: Sequence[str]) -> None:
        self.structure, self.columns, self.added = structure, columns, added
        whole = structure
        if added:
            whole = structure.joined(TensorDictNode.nested([(name,) for name in added]))
        paths = list(whole.paths())
        self._whole = whole
        self._paths = paths
        self._order = [paths.index(path) for path in structure.paths()]
        self._places = [paths.index((name,)) for name in added]
        # Several threads use this: it is replaced as a whole.
        self._apart: tuple[list[int], list[int], int] = ([], [], -1)

    @classmethod
    def of(cls, structure: TreeSpec, columns: Columns, out: Any, added: Mapping[Any, Any]) -> Filler | None:
        """Return what fills such a batch; None where rows are not copied as they are."""
        if not columns.gathers_into or columns.ndim != 1 or any(map(renames, columns.dtypes)):
            return None
        if added and not (type(structure) is TensorDictNode and structure.kind is None and type(out) is TensorDict):
            return None
        return cls(structure, columns, tuple(added)) if all(type(key) is str for key in added) else None

    def fill(self, index: torch.Tensor, rows: int, out: Any, added: Mapping[str, torch.Tensor]) -> Any:
        """Copy the rows `index`, int64 `[n]`, among the first `rows`, and the entries `added`; see `fill`."""
        try:
            leaves = self._whole.flatten(out)
        except SchemaError as error:
            raise _refused(str(error)) from error
        count = index.shape[0]
        if type(out) is TensorDict and out.batch_size[:1] != index.shape:
            raise _refused(f"its batch size is {list(out.batch_size)}, expected {count} elements")
        targets = [leaves[number] for number in self._order]
        found = self.columns.sources(targets, (count,), rows)  # other memory of the same kind, as of rows to write
        addresses = None if found is None or found.steps is not None else found.addresses
        if addresses is None:
            self._require_rows(targets, count)
        values = [added[name] for name in self.added]
        for number, value in zip(self._places, values, strict=True):
            _require_like(place(self._paths[number]), leaves[number], value.dtype, value.shape, value.device)
        self._require_apart(leaves, count, addresses)
        self.columns.gather_into(index, rows, targets, addresses=addresses)
        try:
            increment_version(targets)
        except RuntimeError:  # tensors of inference have no version
            increment_version([target for target in targets if not target.is_inference()])
        for number, value in zip(self._places, values, strict=True):
            leaves[number].copy_(value)
        return out

    def _require_rows(self, targets: Sequence[torch.Tensor], count: int) -> None:
        for number, target, leaf in zip(self._order, targets, self.columns.leaves, strict=True):
            _require_like(place(self._paths[number]), target, leaf.dtype, torch.Size([count, *leaf.shape[1:]]), _CPU)

    def _require_apart(
        self, leaves: Sequence[torch.Tensor], count: int, addresses: Sequence[int] | Numbers | None
    ) -> None:
        """Refuse tensors as `fill` does; those that were there with the batch before are looked at only once."""
        if addresses is None:
            places = list(map(_ADDRESS, leaves))
        else:
            places = addresses.tolist() if isinstance(addresses, np.ndarray) else list(addresses)
            places.extend(leaves[number].data_ptr() for number in self._places)
        stored = self.columns.known_addresses  # `sources` has asked for them
        if self._apart != (places, stored, count):
            _require_apart(self._whole, leaves, self.columns.may_hold)
            self._apart = places, stored, count
        elif any(map(_REQUIRES_GRAD, leaves)):
            raise _refused("one of its tensors requires gradients")


def _require_like(name: str, target: torch.Tensor, dtype: torch.dtype, shape: torch.Size, device: torch.device) -> None:
    if target.dtype is not dtype or target.shape != shape or target.device != device:
        found = f"{target.dtype} {list(target.shape)} on {target.device}"
        raise _refused(f"{name} is {found}, expected {dtype} {list(shape)} on {device}")
    if not target.is_contiguous():
        raise _refused(f"{name} is not contiguous")
    if target.is_neg() or target.is_conj():
        raise _refused(f"{name} is a negated or conjugate view")


def _require_apart(structure: TreeSpec, leaves: Sequence[torch.Tensor], stored: Callable[[torch.Tensor], bool]) -> None:
    """Refuse tensors of which a write changes another one, or stored rows, and tensors of a graph."""
    end, before = 0, ""
    named = zip(map(place, structure.paths()), leaves, strict=True)
    for name, leaf in sorted(named, key=lambda pair: pair[1].data_ptr()):
        if leaf.requires_grad:
            raise _refused(f"{name} requires gradients")
        if not (size := leaf.numel() * leaf.element_size()):
            continue
        if stored(leaf):
            raise _refused(f"{name} may be a view of stored rows")
        if leaf.data_ptr() < end:
            raise _refused(f"{name} shares memory with {before}")
        end, before = leaf.data_ptr() + size, name


def _refused(why: str) -> SchemaError:
    return SchemaError(f"out cannot be filled: {why}", hint=_HINT)
