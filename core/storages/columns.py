"""Reads and writes rows of plain tensors, and fills the batches of earlier calls again.

Random rows on the CPU are gathered by NumPy's `take`: with 11 leaves it takes 0.5 to 0.8 of the time of torch's
`index_select`, starts no threads and releases the interpreter lock. If the rows exceed the processor's caches, they are
gathered by a compiled loop over all leaves. Consecutive rows are copied in one piece.

For a write, one compiled call of `TensorFinder` determines where the bytes of all leaves are. Reading the type, shape,
device, strides and address of a tensor takes 0.4 µs in Python, and 4.5 µs for 11 leaves. The exchange interface of
DLPack 1.3, which torch offers to C, describes a tensor in 20 ns.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from threading import Thread
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import MemoryMappedTensor, TensorDict, is_tensor_collection
from torch.autograd.graph import increment_version

from ..errors import SchemaError
from ..format.threads import available_memory, run_together, started, threads_for_memory
from ..kernels.rows import PlainRows, compiled_module, fastest_rows, warm
from ..ted.schema import Array, Numbers
from .cursors import Index, row_numbers
from .pytree import MappingNode, TensorDictNode, TensorNode, TreeSpec, place, tree_spec_of

_CAPSULE = "__dlpack_c_exchange_api__"
# Types for which DLPack's description is unambiguous.
_KINDS = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
})  # fmt: skip


class _Exchange(ctypes.Structure):
    """`DLPackExchangeAPI` of DLPack's header."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("export_managed", ctypes.c_void_p),
        ("import_managed", ctypes.c_void_p),
        ("describe", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    )


def _functions() -> list[int] | None:
    """Return the addresses of the C functions that describe a tensor, and that clear Python's error.

    None if torch does not offer DLPack's exchange interface.
    """
    capsule = getattr(torch.Tensor, _CAPSULE, None)
    if capsule is None:
        return None
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    try:
        exchange = _Exchange.from_address(pointer(capsule, b"dlpack_exchange_api"))
    except (TypeError, ValueError):  # not a capsule, or one with another name
        return None
    if exchange.major != 1 or not exchange.describe:
        return None
    return [exchange.describe, ctypes.cast(ctypes.pythonapi.PyErr_Clear, ctypes.c_void_p).value or 0]


class Sources(NamedTuple):
    """Where the bytes of rows are.

    Attributes:
        addresses: the address of each leaf.
        steps: the distances between elements in bytes, int64 `[columns, ndim]`; None for rows without gaps.
    """

    addresses: Sequence[int] | Numbers
    steps: Numbers | None = None


class TensorFinder:
    """Finds the bytes of tensors that are written as rows of columns, in one compiled call.

    Args:
        compiled: the module `compiled_tensors`.
        functions: the addresses of the C functions.
        columns: the columns.
        ndim: how many of their leading dimensions count elements.
        memory: the memory of the columns, ranges of addresses in ascending order.
    """

    def __init__(
        self, compiled: ModuleType, functions: Sequence[int], columns: Sequence[torch.Tensor], ndim: int,
        memory: Sequence[tuple[int, int]],
    ) -> None:  # fmt: skip
        self._find, self._copy, self._copy_few = compiled.find_sources, compiled.copy_apart, compiled.copy_tensors
        self._ndim, self._other = ndim, compiled.OTHER
        self._memory = np.array(memory, np.int64)
        self._head = np.array([*functions, *columns[0].shape[1:ndim]], np.int64)
        self._leaves = np.zeros((len(columns), 5 + max(column.dim() - ndim for column in columns)), np.int64)
        widths = [column[:1].numel() * column.element_size() for column in columns]
        self._table = np.array([column.data_ptr() for column in columns], np.int64), np.array(widths, np.int64)
        words = np.zeros(compiled.WORDS, np.int64)
        self.complete = True
        """Whether all columns can be described."""
        for leaf, column, width in zip(self._leaves, columns, widths, strict=True):
            if column.dtype not in _KINDS or not compiled.describe(self._head, id(column), words):
                self.complete = False
                break
            row = column.shape[ndim:]
            leaf[: 5 + len(row)] = [words[1], words[2] >> 32, width, len(row), column.element_size(), *row]

    def find(self, values: Sequence[torch.Tensor], lead: tuple[int, ...]) -> Sources | None:
        """Return where the bytes of values are.

        None unless all values have the type and shape of the columns, with `lead` in front, are on the same device and
        in other memory, and have no gaps within an element.
        """
        found = np.fromiter(map(id, values), np.int64, len(self._leaves))
        count = lead[0] if len(lead) == self._ndim else -1
        steps = np.empty((len(found), self._ndim), np.int64)
        layout = self._find(found, self._head, self._leaves, self._memory, steps, count)
        return None if layout == self._other else Sources(found, steps if layout else None)  # 0 is contiguous

    def copied(self, values: tuple[torch.Tensor, ...], start: int, count: int) -> bool:
        """Copy a few rows to the columns, from row `start` on; False, with nothing changed, if they have gaps.

        It also returns False for values that `find` returns None for. A `count` of -1 is one row without its dimension.
        """
        items = id(values) + tuple.__basicsize__  # where a tuple stores the addresses of its items
        known = (self._head, self._leaves, self._memory, *self._table)
        assert len(values) == len(self._leaves)  # the loop would read beyond the tuple
        return not self._copy_few(items, *known, start, count)

    def copy(self, start: int, count: int, sources: Sources) -> None:
        """Copy rows whose elements have gaps between them to the columns, from row `start` on."""
        self._copy(*self._table, sources.addresses, sources.steps, self._head[2:], start, count)


def tensor_finder(columns: Sequence[torch.Tensor], ndim: int, memory: Sequence[tuple[int, int]]) -> TensorFinder | None:
    """Return a `TensorFinder` of these columns.

    None without numba, without torch's exchange interface, and for types that DLPack does not have.
    """
    functions = _functions()
    compiled = None if functions is None else compiled_module("compiled_tensors")
    if functions is None or compiled is None:
        return None
    finder = TensorFinder(compiled, functions, columns, ndim, memory)
    return finder if finder.complete else None


class Memory:
    """The memory of some tensors, to find out whether other tensors share it.

    The addresses of whole allocations are compared. Two views of one allocation count as shared even if they do not
    overlap, and so do two tensors that wrap the same buffer separately.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        ranges = sorted({_addresses(tensor) for tensor in tensors})
        self._starts = [start for start, _ in ranges]
        self._stops: list[int] = []
        for _, stop in ranges:
            self._stops.append(max(stop, self._stops[-1]) if self._stops else stop)

    @property
    def span(self) -> tuple[int, int]:
        """The lowest address, and the address behind the highest."""
        return (self._starts[0], self._stops[-1]) if self._starts else (0, 0)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """First address, and address behind the last, of each part, in ascending order."""
        return list(zip(self._starts, self._stops, strict=True))

    def may_hold(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` may share an element with any of the tensors."""
        return self.touches(*_addresses(tensor))

    def touches(self, start: int, stop: int) -> bool:
        """Whether any address from `start` up to but not including `stop` belongs to the memory of a tensor."""
        before = bisect_left(self._starts, stop)
        return before > 0 and self._stops[before - 1] > start

    def apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, or a copy if it may share memory with the tensors."""
        return tensor.detach().as_subclass(torch.Tensor).clone() if self.may_hold(tensor) else tensor


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    memory = tensor.untyped_storage()
    start = memory.data_ptr()
    return start, start + memory.nbytes()


# torch cannot gather unsigned integers wider than a byte, and cannot write numbered rows of floats of one byte: such a
# write would fail after other columns were written. The bits of these types are handled as integers of the same width.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOATS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_AS_BITS = {one: _BITS[one.itemsize] for one in (torch.uint16, torch.uint32, torch.uint64, *_FLOATS)}


def plain_column(leaf: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory that torch indexes quickly: a plain tensor of a type that torch can index."""
    column = leaf.detach().as_subclass(torch.Tensor)
    return column.view(_AS_BITS[column.dtype]) if column.dtype in _AS_BITS else column


def zeros(dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Make zeros; memory on the CPU is only taken when it is first written."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    whole = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
    return whole.view(dtype).view(tuple(shape))


_KNOWN_TO_NUMPY = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip


# Above this many bytes, rows no longer fit into the processor's caches, and importing the compiled loops pays off. Once
# they are imported, they also gather fewer rows, in two thirds of NumPy's time.
_MANY = 32 << 20


# Up to this many bytes are copied without releasing the interpreter lock.
_SMALL = 1 << 16
# If new rows have at least this many bytes in a column, they are written to its file by a system call.
_LARGE = 1 << 20
# For how many bytes pages are made ahead of the writes, and how much memory must be available for that.
_AHEAD, _SPARE = 16 << 20, 256 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


_DATA_PTR = torch.Tensor.data_ptr


def renames(dtype: torch.dtype) -> bool:
    """Whether the bits of a type are handled as integers, because NumPy does not have it."""
    return dtype not in _KNOWN_TO_NUMPY


class MappedView(MemoryMappedTensor):
    """A view of rows in a memory-mapped file, with the name of the file.

    Its clones are plain tensors. Unlike the pickle of a MemoryMappedTensor, which only names the file, its pickle holds
    the values: temporary files are removed with their storage.
    """

    _filename: Any = None  # with a name here, `memmap(folder)` would refuse to copy
    _handler: Any = None
    _mode: Any = None
    _index: Any = None
    _path: str

    @classmethod
    def of(cls, view: torch.Tensor, filename: str) -> MappedView:
        """Make one of a view; nothing is copied or mapped."""
        found = view.as_subclass(cls)
        found._path = filename
        return found

    @property  # type: ignore[misc]  # it can be set there
    def filename(self) -> str:
        """The path of the file."""
        return self._path

    def _index_wrap(self, tensor: torch.Tensor, item: Any, check: bool = False) -> torch.Tensor:
        shares = not check or tensor.untyped_storage().data_ptr() == self.untyped_storage().data_ptr()
        return MappedView.of(tensor, self._path) if shares else tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def _reopened(
    path: str, dtype: torch.dtype, size: int, shape: torch.Size, strides: tuple[int, ...], offset: int
) -> MappedView:
    whole = torch.from_file(path, shared=True, size=size, dtype=torch.uint8).view(dtype)
    return MappedView.of(whole.as_strided(shape, strides, offset), path)


def _pass_on(view: MappedView) -> tuple[Any, ...]:
    """Pickle a view for a child process, which maps the same rows of the same file."""
    size = view.untyped_storage().nbytes()
    return _reopened, (view.filename, view.dtype, size, view.shape, view.stride(), view.storage_offset())


ForkingPickler.register(MappedView, _pass_on)


def _file_of(leaf: torch.Tensor) -> str | None:
    """Return the name of the file of a memory-mapped tensor; None if it has none."""
    if not isinstance(leaf, MemoryMappedTensor):
        return None
    try:
        return str(leaf.filename)
    except RuntimeError:  # anonymous memory
        return None


class Columns:
    """The leaves of a storage, divided into rows along their first dimension.

    All leaves share the `ndim` leading dimensions that count elements. Values must be compared with `check` before they
    are written.
    """

    def __init__(
        self, leaves: Sequence[torch.Tensor], names: Sequence[str], ndim: int, texts: frozenset[int] = frozenset()
    ) -> None:
        self.texts = texts
        """The numbers of the leaves that hold the bytes of text."""
        self.given = list(leaves)
        """The leaves as they were given, for example as MemoryMappedTensors; `leaves` are plain tensors."""
        self.files = [_file_of(leaf) for leaf in leaves]
        """For each leaf, the path of the file that it maps; None for other memory."""
        # A view of a memory-mapped tensor takes six times as long as one of a plain tensor, so only users get them.
        self.leaves = [
            leaf if file is None else leaf.as_subclass(torch.Tensor)
            for leaf, file in zip(leaves, self.files, strict=True)
        ]
        self.names = list(names)
        self.dtypes = [leaf.dtype for leaf in leaves]
        self.ndim = ndim
        self.lead = leaves[0].shape[:ndim]
        self.others = tuple(self.lead[1:])
        self.plain = [plain_column(leaf) for leaf in leaves]
        self.widths = [math.prod(column.shape[1:]) * column.element_size() for column in self.plain]
        """Bytes of one row, for each column."""
        self._maps_files = any(file is not None for file in self.files)
        # NumPy does not have these types: their bits are gathered, and viewed as the type afterwards.
        self._renamed = [(number, dtype) for number, dtype in enumerate(self.dtypes) if renames(dtype)]
        self._widest, self._few = max(self.widths), _SMALL // max(sum(self.widths), 1)
        # Views of complex numbers, or of their parts, may be marked as conjugate or negative.
        self._markable = [dtype.is_floating_point or dtype.is_complex for dtype in self.dtypes]
        self._mark = _is_marked if any(dtype.is_complex for dtype in self.dtypes) else torch.Tensor.is_neg
        self._expected: tuple[tuple[int, ...] | None, list[torch.Size]] = (None, [])
        self.write_file: Callable[[int, int, memoryview], bool] | None = None
        """Writes bytes to the file that a column maps, given the number of the column and the offset; returns False if
        it cannot. None if the storage has made no files."""
        self._unused = 0  # the rows from here on were never written, so that their pages need not exist in new files
        self.pickled = False
        """Whether the columns were passed to a process, which moves them to shared memory, one by one: from then on,
        their addresses are read again at every write."""
        self.prepared = 0
        """How many rows have disk blocks and pages: a write beyond them prepares more, see `make_pages`."""
        self._made = 0  # pages of the rows before this one exist in new files, or are being made
        self._maker: Thread | None = None
        self._locate()

    def _locate(self) -> None:
        """Determine the addresses of the columns; called again after sharing with a process has moved them."""
        self._memory = Memory(self.plain)
        self._span = self._memory.span
        self._places = [column.data_ptr() for column in self.plain]
        self._stays = all(column.is_shared() for column in self.plain)
        self._in_rows = all(leaf.is_cpu and leaf.is_contiguous() for leaf in self.leaves)
        self._arrays = [_array(column) for column in self.plain] if self._in_rows else []
        self._rows = PlainRows(self._arrays)
        self._by_row = self._in_rows and not (self._renamed or self.others)
        self._finder: TensorFinder | None = None
        self._many: float = 0 if warm(importing=False) else _MANY // max(sum(self.widths), 1)
        self._valid: tuple[int, list[torch.Tensor]] = (-1, [])
        self._elements: Columns | None = None

    def _follow_moves(self) -> None:
        if not self._stays and list(map(_DATA_PTR, self.plain)) != self._places:
            self._locate()

    def own_arrays(self, lent: bool) -> list[Array]:
        """Return the `arrays`; faster, because addresses are only compared if the columns can have moved.

        `lent` says whether others may have references to the columns.
        """
        if lent or self.pickled:
            self._follow_moves()
        return self._arrays

    def _mover(self, rows: int) -> PlainRows:
        """Return the object that copies rows; it is replaced by compiled loops once there are many rows."""
        if rows >= self._many:
            self._rows, self._many = fastest_rows(self._arrays), math.inf
            self._finder = tensor_finder(self.leaves, self.ndim, self._memory.ranges) if self._in_rows else None
        return self._rows

    def _of(self, rows: int) -> list[torch.Tensor]:
        """Return the first `rows` rows."""
        if self._valid[0] != rows:
            self._valid = (rows, [column[:rows] for column in self.plain])
        return self._valid[1]

    @property
    def arrays(self) -> list[Array]:
        """The columns on the CPU as arrays; types that NumPy lacks as integers."""
        self._follow_moves()
        return self._arrays or [_array(column.cpu()) for column in self.plain]

    # Reading ---------------------------------------------------------------------------------------

    def read(self, index: Index, rows: int) -> tuple[list[torch.Tensor], torch.Size]:
        """Read elements of the first `rows` rows.

        Args:
            index: row numbers or a tuple of `ndim` tensors give fresh tensors; ints and slices give views, except
                slices with a negative step.
            rows: the number of valid rows.

        Returns:
            The tensors, and their common leading shape.

        Raises:
            IndexError: a row does not exist.
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
        found = self._typed(found)
        if self._maps_files and _makes_views(index):
            pairs = zip(found, self.files, strict=True)
            found = [view if file is None else MappedView.of(view, file) for view, file in pairs]
        return found, batch

    def _backwards(self, index: Index, rows: int) -> list[torch.Tensor]:
        """Read slices with a negative step, which torch cannot view: their rows are copied in reverse."""
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
            except IndexError:  # a negative or invalid number: torch's indexing handles both
                pass
        elif index.numel() and not -rows <= int(index.min()) <= int(index.max()) < rows:
            # An invalid index on the device would make it unusable for the rest of the process.
            raise IndexError(f"rows are {int(index.min())} to {int(index.max())}, expected within {rows} rows")
        return self._typed([column[index] for column in self._of(rows)])

    @property
    def gathers_into(self) -> bool:
        """Whether rows can be copied to given memory, because they are contiguous and on the CPU."""
        return self._in_rows

    @property
    def numpy_types(self) -> list[np.dtype[Any]]:
        """The types of the memory that rows are copied to; integers for types that NumPy lacks."""
        return [array.dtype for array in self._arrays]

    @property
    def known_addresses(self) -> list[int]:
        """The columns' addresses when they were last determined."""
        return self._places

    def addresses(self) -> list[int]:
        """Return the columns' addresses in memory; the same list as long as they do not move."""
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
        """Copy rows to given tensors, which are contiguous.

        Args:
            index: the rows, int64 `[n]`.
            rows: the number of valid rows.
            targets: tensors of the columns' `numpy_types`.
            chosen: the columns; default all.
            addresses: the addresses of the targets, for all columns, if `sources` has just determined them.
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
        """Return the row number of each element that a tuple of tensors selects; None for other indices."""
        if len(index) != self.ndim or not self._in_rows:
            return None
        if any(not isinstance(part, torch.Tensor) or part.dtype != torch.int64 or not part.dim() for part in index):
            return None
        if any(part.shape != index[0].shape for part in index):
            return None
        try:
            parts = tuple(part.flatten().numpy(force=True) for part in index)
            return torch.from_numpy(np.ravel_multi_index(parts, (rows, *self.lead[1:])))
        except ValueError:  # negative coordinates, which count from the end, or invalid ones
            return None

    def _typed(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        return [
            rows if rows.dtype is dtype else rows.view(dtype) for rows, dtype in zip(found, self.dtypes, strict=True)
        ]

    # Writing ---------------------------------------------------------------------------------------

    def check(self, values: Sequence[torch.Tensor], lead: tuple[int, ...]) -> None:
        """Raise SchemaError unless values have the types and shapes of these columns, with `lead` in front."""
        shapes = self._shapes(lead)
        if [value.dtype for value in values] == self.dtypes and [value.shape for value in values] == shapes:
            return
        require_like(self.names, values, self.dtypes, shapes)

    def _shapes(self, lead: tuple[int, ...]) -> list[torch.Size]:
        """Return the shapes of values with `lead` in front."""
        known, shapes = self._expected
        if known != lead:
            shapes = [torch.Size([*lead, *leaf.shape[self.ndim :]]) for leaf in self.leaves]
            self._expected = (lead, shapes)
        return shapes

    def copy_tensors(self, values: tuple[torch.Tensor, ...], cursor: int | range) -> bool:
        """Copy values to one row or to consecutive rows; False, with nothing changed, if `sources` returns None.

        The caller has made sure that the addresses of the columns are up to date.
        """
        start, count, lead = (cursor, 1, ()) if isinstance(cursor, int) else (cursor.start, len(cursor), (len(cursor),))
        finder = None if count > self._few or self._differ(values) else self._finder
        if finder is not None and finder.copied(values, start, count if lead else -1):
            return True
        sources = self.sources(values, (*lead, *self.others), start + count)
        if sources is not None:
            self.copy_run(start, count, sources)
        return sources is not None

    def sources(self, values: Sequence[torch.Tensor], lead: tuple[int, ...], stop: int) -> Sources | None:
        """Return the addresses of values whose bytes `copy_run` can copy as they are, to rows before `stop`.

        None unless all values match these columns, with `lead` in front, and are contiguous, on the CPU and in other
        memory; compiled loops also accept values of which only the elements are contiguous. Values with addresses need
        no `check`, which raises an error that names the difference.
        """
        self._follow_moves()
        if not self._in_rows or self._differ(values):
            return None
        self._mover(stop)
        if self._finder is not None:
            return self._finder.find(values, lead)
        found = []
        for value, dtype, shape in zip(values, self.dtypes, self._shapes(lead), strict=True):
            if value.dtype is not dtype or value.shape != shape or not (value.is_cpu and value.is_contiguous()):
                return None
            found.append(value.data_ptr())
            if not found[-1] and value.numel():  # a tensor without memory
                return None
        count = lead[0] if len(lead) == self.ndim else 1
        if max(found) < self._span[0] - count * self._widest or min(found) >= self._span[1]:
            return Sources(found)
        touches = self._memory.touches
        pairs = zip(found, self.widths, strict=True)
        return None if any(touches(at, at + count * width) for at, width in pairs) else Sources(found)

    def _differ(self, values: Sequence[torch.Tensor]) -> bool:
        """Whether the numbers of a value differ from its bytes: a conjugate or negative view."""
        return any(map(self._mark, compress(values, self._markable)))

    def copy_run(self, start: int, count: int, sources: Sources, *, together: bool = False) -> None:
        """Copy consecutive rows from the addresses that `sources` has determined; `together` uses several threads."""
        if sources.steps is None:
            if self.write_file is not None and start >= self._unused and count * self._widest >= _LARGE:
                self._copy_new(start, count, sources.addresses, threads_for_memory() if together else 1)
                return
            write = self._rows.write_together if together else self._rows.write
            write(start, count, sources.addresses)
        else:
            assert self._finder is not None  # `sources` made it
            self._finder.copy(start, count, sources)

    def _copy_new(self, start: int, count: int, sources: Sequence[int] | Numbers, threads: int) -> None:
        """Copy many rows to parts of files that were never written, with system calls.

        This takes half of the time of copying through the map, where each new page costs a page fault.
        """
        self._unused = start + count
        columns = zip(self._places, self.widths, sources, strict=True)
        run_together(
            [
                functools.partial(self._copy_to_file, number, where, start * width, int(source), count * width)
                for number, (where, width, source) in enumerate(columns)
            ],
            threads,
        )

    def _copy_to_file(self, number: int, where: int, offset: int, source: int, size: int) -> None:
        """Copy bytes to an offset of a column at the address `where`; many bytes by a system call.

        The pages are then mapped all at once, so that later writes through the map need no page faults.
        """
        data = (ctypes.c_char * size).from_address(source)
        write = self.write_file
        if size < _LARGE or write is None or not write(number, offset, memoryview(data).cast("B")):
            ctypes.memmove(where + offset, data, size)
        else:
            _make_pages(where + offset, size)

    def make_pages(self, start: int, top: int, stop: int) -> int:
        """Make pages of new files for the rows that will follow, in another thread.

        Without this, small writes take several times as long, because of page faults. As many bytes get pages as were
        written so far, at most `_AHEAD`. Disk blocks are allocated already, and no byte changes, so that writes and
        page faults may take place at the same time.

        Args:
            start: the first row that is written now.
            top: the row after the last one.
            stop: disk blocks are allocated for the rows before this one.

        Returns:
            The new value of `prepared`.
        """
        width = max(sum(self.widths), 1)
        if self.write_file is None or (top - start) * self._widest >= _LARGE:  # `_copy_to_file` makes the pages
            return top
        if top * width < _LARGE:
            return min(_LARGE // width + 1, stop)
        ahead = min(_AHEAD // width, top)
        first, last = max(self._made, top), min(top + ahead, stop)
        if first < last and (self._maker is None or not self._maker.is_alive()):
            places = zip(self._places, self.widths, strict=True)
            parts = [(where + first * size, (last - first) * size) for where, size in places]
            # The thread keeps a reference to the tensors, so that their memory stays mapped.
            self._maker = started(functools.partial(_make_pages_of, self.plain, parts), "rbtool-pages")
            self._made = last
        return min(top + ahead // 2, stop)

    def write_run(
        self, start: int, count: int, values: Sequence[torch.Tensor], *, single: bool = False, together: bool = False
    ) -> None:
        """Write consecutive rows; the values may be views of the columns.

        With `single`, the values are one row without its dimension. `together` uses several threads if it can.
        """
        sources = self.sources(values, self.others if single else (count, *self.others), start + count)
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
        """Write rows by number, without repeats; the values may be views of the columns."""
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
        """Write at an index of several dimensions; only the first `rows` rows can be written.

        Args:
            index: the index, of up to `depth` dimensions; its parts count the dimensions of the user's data.
            rows: the number of valid rows.
            values: the values, repeated along leading dimensions that all of them lack.
            depth: the number of dimensions that can be indexed.
            dim: the dimension of the user's data that is dimension 0 here.
            whole: the position of a value that lacks no dimensions.

        Raises:
            SchemaError: types or shapes differ; nothing is written.
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

        Args:
            values: the values.
            shapes: their final shapes.
            tails: how many of the last dimensions of each belong to one element.
            whole: the position of a value that lacks no dimensions.

        Raises:
            SchemaError: types or shapes differ.
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
        """Write items, each with one value for every column, one to a row; only one column is stacked at a time."""
        fresh = [self.apart(parts) for parts in zip(*items, strict=True)]
        for column, parts in zip(self.plain, fresh, strict=True):
            plain = [plain_column(part).to(column.device) for part in parts]
            if isinstance(rows, slice):
                torch.stack(plain, out=column[rows])
            else:
                column.index_copy_(0, rows.to(column.device), torch.stack(plain))

    def apart(self, values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the values, with copies of those that share memory with the columns: a write would change them."""
        self._follow_moves()
        return [self._memory.apart(value) for value in values]


def require_like(
    names: Sequence[str], values: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], shapes: Sequence[torch.Size]
) -> None:
    """Raise SchemaError for the first value of another type or shape."""
    for name, value, dtype, shape in zip(names, values, dtypes, shapes, strict=True):
        if value.dtype != dtype or value.shape != shape:
            found = f"{value.dtype} {list(value.shape)}"
            raise SchemaError(f"{name or 'the tensor'} is {found}, expected {dtype} {list(shape)}")


def _is_marked(value: torch.Tensor) -> bool:
    return value.is_conj() or value.is_neg()


def _forwards(index: Index) -> bool:
    """Whether torch accepts the index as it is: it has no slices with negative steps."""
    if isinstance(index, tuple):
        return all(_forwards(part) for part in index)
    return not (isinstance(index, slice) and index.step is not None and index.step < 0)


def _makes_views(index: Index) -> bool:
    """Whether an index of ints and slices, which torch accepts as it is, selects views."""
    parts = index if isinstance(index, tuple) else (index,)
    return _forwards(index) and not any(isinstance(part, torch.Tensor | np.ndarray | list) for part in parts)


def _shaped(found: list[torch.Tensor], batch: torch.Size) -> list[torch.Tensor]:
    """Give gathered rows the shape of the index that selected them."""
    return found if len(batch) == 1 else [rows.view(*batch, *rows.shape[1:]) for rows in found]


def _are_one(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one type and shape are the same memory."""
    return one.device == other.device and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _make_pages(place: int, size: int) -> None:
    """Map the pages at an address for writing; does nothing if the disk is full, or before Linux 5.14."""
    if sys.platform == "linux":
        first = place // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise(first, place + size - first, _POPULATE_WRITE)


def _make_pages_of(columns: Sequence[torch.Tensor], parts: Sequence[tuple[int, int]]) -> None:
    """Make pages of columns, at these addresses and of these sizes, unless memory is scarce."""
    available = available_memory()
    if available is None or available >= _SPARE:
        for place, size in parts:
            _make_pages(place, size)


def _array(tensor: torch.Tensor) -> Array:
    """View a tensor as an array; types that NumPy lacks as integers."""
    return (tensor if tensor.dtype in _KNOWN_TO_NUMPY else tensor.view(_BITS[tensor.element_size()])).numpy()


_REQUIRES_GRAD = attrgetter("requires_grad")
_CPU = torch.device("cpu")
_HINT = "pass a batch of the same size that an earlier call returned, without entries added since"


def fill(out: Any, batch: Any, stored: Callable[[torch.Tensor], bool]) -> Any:
    """Copy a batch into another batch of the same structure, and return that one.

    Args:
        out: the batch to be filled.
        batch: the batch to be copied.
        stored: returns whether a tensor may share memory with stored rows.

    Raises:
        SchemaError: (a RuntimeError) `out` differs in entries, element types, shapes or devices; or has tensors that
            are not contiguous, require gradients, or share memory with each other or with stored rows. Nothing is
            changed.
    """
    try:
        structure = tree_spec_of(batch)
        values, targets = structure.flatten(batch), structure.flatten(out)
    except SchemaError as error:
        raise _refused(str(error)) from error
    if (text := next(structure.texts(), None)) is not None:
        raise _refused(f"{place(text[0])} is text that differs between rows")
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
    """Copies rows of a tensor storage into the batches of earlier calls, in one call for all columns.

    Batches may have additional entries at their root, `added`, which get their values from the caller.
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
        # Several threads use this, so it is only replaced as a whole.
        self._apart: tuple[list[int], list[int], int] = ([], [], -1)

    @classmethod
    def of(cls, structure: TreeSpec, columns: Columns, out: Any, added: Mapping[Any, Any]) -> Filler | None:
        """Return a filler for batches like `out`; None if the bytes of rows cannot be copied as they are."""
        if not columns.gathers_into or columns.ndim != 1 or columns.texts or any(map(renames, columns.dtypes)):
            return None
        if added and not (type(structure) is TensorDictNode and structure.kind is None and type(out) is TensorDict):
            return None
        return cls(structure, columns, tuple(added)) if all(type(key) is str for key in added) else None

    def fill(self, index: torch.Tensor, rows: int, out: Any, added: Mapping[str, torch.Tensor]) -> Any:
        """Copy the rows `index`, int64 `[n]`, of the first `rows`, and the entries `added`, to `out`; see `fill`."""
        try:
            leaves = self._whole.flatten(out)
        except SchemaError as error:
            raise _refused(str(error)) from error
        count = index.shape[0]
        if type(out) is TensorDict and out.batch_size[:1] != index.shape:
            raise _refused(f"its batch size is {list(out.batch_size)}, expected {count} elements")
        targets = [leaves[number] for number in self._order]
        found = self.columns.sources(targets, (count,), rows)  # targets have the same requirements as written values
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
        except RuntimeError:  # inference tensors have no version counter
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
        """Refuse tensors as `fill` does; the tensors of the previous batch are not checked again."""
        if addresses is None:
            places = list(map(_DATA_PTR, leaves))
        else:
            places = addresses.tolist() if isinstance(addresses, np.ndarray) else list(addresses)
            places.extend(leaves[number].data_ptr() for number in self._places)
        stored = self.columns.known_addresses  # `sources` has just determined them
        if self._apart != (places, stored, count):
            _require_apart(self._whole, leaves, self.columns.may_hold)
            self._apart = places, stored, count
        elif any(map(_REQUIRES_GRAD, leaves)):
            raise _refused("one of its tensors requires gradients")


class _Entry(NamedTuple):
    """The requirements for an entry of a dict whose bytes a column can store as they are.

    Attributes:
        nest: the number of the nested dict that contains it; 0 for the root.
        key: its key there.
        dtype, shape: the type and shape of an array.
        scalar: the type of a NumPy number that is accepted in place of an array; None for none.
        number: the type of a Python number that is accepted as well, if torch would convert it to this element type.
    """

    nest: int
    key: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    scalar: type[Any] | None
    number: type[Any] | None


# The element types to which torch converts Python's numbers; float only while torch's default is float32.
_NUMBERS: Mapping[Any, type[Any]] = {np.bool_: bool, np.int64: int, np.float32: float}
_LARGEST = float(np.finfo(np.float32).max)


class ArrayRows:
    """Writes rows whose bytes can be copied as they are, without making tensors of them, in a tenth of the time.

    Rows are tensordicts, or dicts of NumPy arrays and numbers.

    Args:
        structure: how the columns are nested.
        columns: the columns.
        label: the entry in which the number of each row is stored, which the data does not have; None if there is none.
    """

    def __init__(self, structure: TreeSpec, columns: Columns, label: str | None) -> None:
        self.columns, self.label = columns, label
        own = {key: child for key, child in structure.children.items() if key != label}
        self._structure = structure if label is None else TensorDictNode(own)
        self._nests: list[tuple[int, str, int]] = []
        self._size = len(structure.children) - (label is not None)
        places: list[tuple[int, str]] = []
        fits = columns.gathers_into and not any(map(renames, columns.dtypes)) and type(structure) is TensorDictNode
        self._fits = fits and self._find(structure, 0, places)
        paths = list(structure.paths())
        self._labels = paths.index((label,)) if label is not None and (label,) in paths else None
        if label is not None:
            leaf = None if self._labels is None else columns.plain[self._labels]
            self._fits = self._fits and leaf is not None and leaf.dtype is torch.int64 and leaf.dim() == 1
        self._numbers = [number for number in range(len(places)) if number != self._labels]
        self._one = [self._entry(number, *places[number]) for number in self._numbers] if self._fits else []
        self._fits = bool(self._one)
        # Several threads use these, so they are only replaced as a whole.
        self._many = (-1, self._one)
        self._known: tuple[list[Any], list[Any]] = ([], [])

    def _find(self, node: TreeSpec, nest: int, places: list[tuple[int, str]]) -> bool:
        """Append the place of each leaf below a node to `places`; False if a leaf is not in nested dicts."""
        for key, child in node.children.items():
            if type(child) is TensorNode and type(key) is str:
                places.append((nest, key))
                continue
            if type(key) is not str or not isinstance(child, MappingNode) or not child.children:
                return False
            self._nests.append((nest, key, len(child.children)))
            if not self._find(child, len(self._nests), places):
                return False
        return True

    def _entry(self, number: int, nest: int, key: str) -> _Entry:
        dtype, shape = self.columns.numpy_types[number], tuple(self.columns.plain[number].shape[1:])
        scalar = None if shape else dtype.type
        return _Entry(nest, key, dtype, shape, scalar, _NUMBERS.get(scalar))

    def tensors(self, data: TensorDict, single: bool) -> tuple[int, tuple[Any, ...]] | None:
        """Return the number of rows in a tensordict, and its tensors in the order of the columns.

        None unless it has all entries and, if rows are numbered, no dimension except rows.
        """
        size = data.batch_size
        count = 1 if single else next(iter(size), 0)
        if not count or (self.label is not None and (self._labels is None or len(size) + single != 1)):
            return None
        try:
            return count, tuple(self._structure.flatten(data))
        except SchemaError:  # the general path raises the error
            return None

    def take(self, data: dict[Any, Any], single: bool) -> tuple[int, list[Any]] | None:
        """Return the number of rows in a dict, and their values in the order of the columns.

        None unless the dict has all entries, and all of them can be stored as they are.
        """
        if not self._fits or len(data) != self._size:
            return None
        nests, found, count, entries = [data], [], 1, self._one
        try:
            for nest, key, size in self._nests:
                inner = nests[nest][key]
                if type(inner) is not dict or len(inner) != size:
                    return None
                nests.append(inner)
            if not single:
                count = len(nests[entries[0].nest][entries[0].key])
                entries = self._entries(count)
            for nest, key, dtype, shape, scalar, number in entries:
                value = nests[nest][key]
                kind = type(value)
                if kind is np.ndarray:
                    if value.shape != shape or (value.dtype is not dtype and value.dtype != dtype):
                        return None
                elif kind is number is not None:
                    if kind is not bool and (value := _as_number(value)) is None:
                        return None
                elif kind is not scalar:
                    return None
                found.append(value)
        except (KeyError, TypeError, FloatingPointError):  # an entry is missing, or the first one has no length
            return None
        return (count, found) if count else None

    def _entries(self, count: int) -> list[_Entry]:
        """Return the requirements for the entries of a dict with this many rows."""
        if self._many[0] != count:
            many = [entry._replace(shape=(count, *entry.shape), scalar=None, number=None) for entry in self._one]
            self._many = count, many
            return many
        return self._many[1]

    def put(self, cursor: int | range, values: Sequence[Any], numbers: Any, lent: bool) -> bool:
        """Write the values that `tensors` or `take` has returned to one row or to consecutive rows.

        Args:
            cursor: the rows.
            values: the values; arrays must not share memory with the columns.
            numbers: the numbers of the rows, int64, which are stored as the label.
            lent: whether others may have references to the columns.

        Returns:
            False, with nothing changed, for tensors whose bytes cannot be copied as they are; see `Columns.sources`.
        """
        arrays = self.columns.own_arrays(lent)
        if type(values) is tuple:
            if self._labels is not None:
                label = torch.from_numpy(np.array(numbers))
                values = (*values[: self._labels], label, *values[self._labels :])
            return self.columns.copy_tensors(values, cursor)
        if arrays is not self._known[0]:
            self._known = arrays, [arrays[number] for number in self._numbers]
        rows = cursor if isinstance(cursor, int) else slice(cursor.start, cursor.stop)
        for array, value in zip(self._known[1], values, strict=True):
            array[rows] = value
        if self._labels is not None:
            arrays[self._labels][rows] = numbers
        return True


def _as_number(value: float) -> Any:
    """Return an int as it is and a float as float32, like torch; None if torch would refuse it or warn."""
    if type(value) is int:
        return value if -1 << 63 <= value < 1 << 63 else None
    return np.float32(value) if -_LARGEST <= value <= _LARGEST and torch.get_default_dtype() is torch.float32 else None


def _require_like(name: str, target: torch.Tensor, dtype: torch.dtype, shape: torch.Size, device: torch.device) -> None:
    if target.dtype is not dtype or target.shape != shape or target.device != device:
        found = f"{target.dtype} {list(target.shape)} on {target.device}"
        raise _refused(f"{name} is {found}, expected {dtype} {list(shape)} on {device}")
    if not target.is_contiguous():
        raise _refused(f"{name} is not contiguous")
    if target.is_neg() or target.is_conj():
        raise _refused(f"{name} is a negated or conjugate view")


def _require_apart(structure: TreeSpec, leaves: Sequence[torch.Tensor], stored: Callable[[torch.Tensor], bool]) -> None:
    """Refuse tensors that share memory with each other or with stored rows, and tensors that require gradients."""
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
