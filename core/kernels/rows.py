"""Gathers rows of several columns, or fields of packed records, into the memory of a batch, and writes rows.

All columns are copied in one call. With 11 columns of a million rows (758 bytes a row), the compiled loop takes two
thirds to three quarters of NumPy's time for batches of 256 rows and more, because it prefetches rows, and it releases
the GIL throughout. For a few rows both take the same time. Writing all columns in one call takes half of the time of
one call for each.

A batch is gathered by one thread, the caller's. Waking another thread and waiting for it takes 40 to 100 µs, while
700 kB are gathered in 70 µs: on two idle cores, two threads take 1.2 to 0.8 of the time for 1 to 7 MB and 0.9 to 0.7
for more; if no core is idle, twice as long or much longer. torch's threads spin and need no waking, but a process that
is forked after their first use hangs in torch. To use other cores, set `prefetch` of the buffer: its threads gather
whole batches.

The memory of a batch is reused once the batch is freed, because allocating memory takes longer than filling it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import from_numpy

from ..format.threads import run_together, threads_for_memory
from ..ted.schema import Array, Numbers

Addresses = NDArray[np.int64]
Memory = Callable[[], Array]
"""Makes uninitialised arrays of one shape and type."""

# A column of a batch is reused if its bytes are between these limits: for smaller ones the allocator is fast enough,
# and larger ones would keep too much memory.
_LARGE, _TOO_LARGE = 1 << 18, 1 << 26
_KEPT = 2

T = TypeVar("T")


def memory_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Memory:
    """Return a function that makes uninitialised arrays of one shape and type, reusing the memory of large ones."""
    size = math.prod(shape) * dtype.itemsize
    return ArrayPool(shape, dtype) if _LARGE <= size <= _TOO_LARGE else functools.partial(np.empty, shape, dtype)


class ArrayPool:
    """Makes uninitialised arrays of one shape and type, and reuses the last two.

    Tensors and arrays that are views of an array hold a reference to it. Once the last of them is freed, the array has
    no reference but the pool's own, and the pool returns it again. Thread-safe: a thread takes an array off the list
    before it looks at the reference count.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._shape = shape
        self._dtype = dtype
        self._kept: list[Array] = []

    def __call__(self) -> Array:
        kept = self._kept
        for _ in range(len(kept)):
            try:
                array, references = _first_of(kept)
            except IndexError:  # another thread took it
                break
            if references == _UNUSED:
                kept.insert(0, array)  # first in line, as it is still in the CPU's caches
                return array
            kept.append(array)
        array = np.empty(self._shape, self._dtype)
        kept.append(array)
        del kept[:-_KEPT]
        return array


def _first_of(kept: list[T]) -> tuple[T, int]:
    """Take the first item off the list; return it and its reference count inside this function."""
    first = kept.pop(0)
    return first, sys.getrefcount(first)


# The reference count of an object without other references depends on the version of Python.
_UNUSED = _first_of([object()])[1]


class BatchPool:
    """Makes uninitialised tensors for all columns of a batch in one call, and reuses the last two batches.

    An array is reused once no tensor and no array is a view of it, as in an `ArrayPool`, even if other arrays of its
    batch are still in use. Thread-safe: a thread takes a batch off the list before it looks at reference counts.

    Args:
        shapes: the shape of each column.
        dtypes: the element type of each column.
        first: if given, each call also returns a tensor of the first `first` rows of each column, behind the tensors of
            whole columns. Making a tensor from a view of an array takes a third of the time of a view of a tensor.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]], first: int | None = None
    ) -> None:
        self._makers = [functools.partial(np.empty, shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        self._first = first
        self._unused = [_UNUSED_IN_LIST] * len(self._makers)
        if first is not None:  # these arrays are views of the others
            self._unused = [_UNUSED_IN_LIST + 1] * len(self._makers) + self._unused
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        self._keeps = max(sizes, default=0) <= _TOO_LARGE
        self._kept: list[tuple[list[Array], Addresses]] = []

    def __call__(self) -> tuple[list[torch.Tensor], Addresses]:
        """Return a tensor for each column, and the addresses of the columns; the caller must not change these."""
        kept = self._kept
        for _ in range(len(kept)):
            try:
                batch = kept.pop(0)
            except IndexError:  # another thread took it
                break
            if list(map(sys.getrefcount, batch[0])) == self._unused:
                # The batch goes back to the list only after its tensors exist: their references mark it as used.
                found = list(map(from_numpy, batch[0]))
                kept.insert(0, batch)
                return found, batch[1]
            kept.append(batch)
        arrays = self._unused_of_oldest() if len(kept) >= _KEPT else [make() for make in self._makers]
        if self._first is not None:
            arrays += [array[: self._first] for array in arrays]
        found = list(map(from_numpy, arrays))
        addresses = np.array(list(map(torch.Tensor.data_ptr, found[: len(self._makers)])), np.int64)
        if self._keeps:
            kept.append((arrays, addresses))
            del kept[:-_KEPT]
        return found, addresses

    def _unused_of_oldest(self) -> list[Array]:
        """Return the arrays of the oldest batch, with new ones in place of those that are still used."""
        try:
            arrays, _ = self._kept.pop(0)
        except IndexError:
            return [make() for make in self._makers]
        counts, columns = list(map(sys.getrefcount, arrays)), len(self._makers)
        unused = [counts[number::columns] == self._unused[number::columns] for number in range(columns)]
        # With `first`, views of the columns follow the columns in `arrays`; `zip` stops before them.
        return [make() if not free else array for make, free, array in zip(self._makers, unused, arrays, strict=False)]


_UNUSED_IN_LIST = next(map(sys.getrefcount, [object()]))


_PART = 8 << 20
"""How many bytes of rows a thread copies at a time."""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector while numba is imported and first used, which takes half of the time.

    numba makes many long-lived objects. Each collection visits all of them, and all of torch's, and frees nothing.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_ADDRESS = torch.Tensor.data_ptr

# ctypes.memmove without its result, which costs as much as copying a small row.
_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


class PlainRows:
    """The rows of contiguous arrays of equal length, copied by NumPy."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = list(arrays)
        self._places = [array.__array_interface__["data"][0] for array in arrays]
        self._widths = [math.prod(array.shape[1:]) * array.itemsize for array in arrays]
        self._takers: tuple[int, list[Callable[..., Array]]] = (-1, [])

    def gather(self, numbers: Numbers, rows: int) -> list[torch.Tensor]:
        """Return the rows `numbers`, int64 `[n]`, of each array, `[n, …]`, in fresh memory.

        Negative numbers count from the end of the first `rows` rows; IndexError for rows beyond them.
        """
        known, takers = self._takers
        if known != rows:
            takers = [array[:rows].take for array in self._arrays]
            self._takers = (rows, takers)
        return [from_numpy(take(numbers, 0)) for take in takers]

    def gather_into(self, numbers: Numbers, rows: int, targets: Sequence[torch.Tensor], chosen: Sequence[int]) -> None:
        """Copy the rows `numbers` of the arrays `chosen` to contiguous targets `[n, …]`; IndexError as for `gather`."""
        self._raise_beyond(numbers, rows)
        for number, target in zip(chosen, targets, strict=True):
            self._arrays[number][:rows].take(numbers, 0, out=target.numpy(), mode="wrap")

    def gather_to(self, numbers: Numbers, rows: int, addresses: Sequence[int] | Numbers) -> bool:
        """Copy the rows `numbers` of each array to one of the addresses; False, with nothing copied, without numba."""
        return False

    @staticmethod
    def _raise_beyond(numbers: Numbers, rows: int) -> None:
        if len(numbers) and not -rows <= int(numbers.min()) <= int(numbers.max()) < rows:
            raise IndexError(f"rows are {int(numbers.min())} to {int(numbers.max())}, expected within {rows} rows")

    def write(self, start: int, count: int, sources: Sequence[int] | Numbers) -> None:
        """Copy `count` rows into each array, from row `start` on.

        `sources` are the addresses of the new rows, one for each array, in memory that does not overlap with any of the
        arrays. Neither the addresses nor the number of rows are checked.
        """
        for place, source, width in zip(self._places, sources, self._widths, strict=True):
            _memmove(place + start * width, source, count * width)

    def write_together(self, start: int, count: int, sources: Sequence[int] | Numbers) -> None:
        """Like `write`, with several threads, each for a part of the rows.

        It pays for memory that is written for the first time: the threads also share the kernel's work of clearing
        pages.
        """
        addresses, widths = np.array(sources, np.int64), np.array(self._widths, np.int64)
        part = max(_PART // max(1, int(widths.sum())), 1)
        calls = [
            functools.partial(
                self.write, start + first, min(part, count - first), (addresses + first * widths).tolist()
            )
            for first in range(0, count, part)
        ]
        run_together(calls, threads_for_memory())


class CompiledRows(PlainRows):
    """The rows of contiguous arrays of equal length, copied by the compiled loops in `compiled`."""

    def __init__(self, arrays: Sequence[Array], compiled: ModuleType) -> None:
        super().__init__(arrays)
        self._gather = compiled.gather_rows
        self._copy = compiled.copy_runs
        self._table = np.array(self._places, np.int64), np.array(self._widths, np.int64)
        self._batch = (-1, BatchPool([], []))

    def gather(self, numbers: Numbers, rows: int) -> list[torch.Tensor]:
        count, memory = self._batch
        if count != len(numbers):
            count = len(numbers)
            shapes = [(count, *array.shape[1:]) for array in self._arrays]
            memory = BatchPool(shapes, [array.dtype for array in self._arrays])
            self._batch = (count, memory)
        found, targets = memory()
        if self._gather(*self._table, targets, np.ascontiguousarray(numbers), rows) >= 0:
            return super().gather(numbers, rows)  # numpy raises the error for the missing row
        return found

    def gather_into(self, numbers: Numbers, rows: int, targets: Sequence[torch.Tensor], chosen: Sequence[int]) -> None:
        places, widths = self._table
        if len(chosen) != len(places) or not isinstance(chosen, range):
            order = list(chosen)
            places, widths = places[order], widths[order]
        ends = np.array(list(map(_ADDRESS, targets)), np.int64)
        if self._gather(places, widths, ends, np.ascontiguousarray(numbers), rows) >= 0:
            super().gather_into(numbers, rows, targets, chosen)  # raises the error for the missing row

    def gather_to(self, numbers: Numbers, rows: int, addresses: Sequence[int] | Numbers) -> bool:
        ends = np.asarray(addresses, np.int64)
        if self._gather(*self._table, ends, np.ascontiguousarray(numbers), rows) >= 0:
            self._raise_beyond(numbers, rows)
        return True

    def write(self, start: int, count: int, sources: Sequence[int] | Numbers) -> None:
        self._copy(*self._table, np.asarray(sources, np.int64), start, count)


def fastest_rows(arrays: Sequence[Array]) -> PlainRows:
    """Return `CompiledRows` of these arrays if numba can be imported, otherwise `PlainRows`.

    The first import of numba takes half a second.
    """
    compiled = compiled_loops()
    return PlainRows(arrays) if compiled is None else CompiledRows(arrays, compiled)


def compiled_loops() -> ModuleType | None:
    """Import the module `compiled`; None without numba."""
    return compiled_module("compiled")


@functools.cache
def compiled_module(name: str, package: str | None = __package__) -> ModuleType | None:
    """Import a module of compiled loops, by default of this package; None without numba.

    The first import takes half a second.
    """
    try:
        with collector_paused():
            return importlib.import_module(f".{name}", package)
    except ImportError:
        return None


# Rows of several tables with the same columns --------------------------------------------------

_loops: ModuleType | None = None


def warm(*, importing: bool = True) -> bool:
    """Return whether the compiled loops can be used from now on.

    They are imported if necessary; with `importing=False`, only used if something else has imported them.
    """
    global _loops
    if _loops is None and (importing or f"{__package__}.compiled" in sys.modules):
        _loops = compiled_loops()
    return _loops is not None


def is_warm() -> bool:
    """Whether `warm` has made the compiled loops available."""
    return _loops is not None


def scaled_parts(chances: NDArray[np.float64], stops: Numbers, sizes: Numbers) -> Numbers:
    """Scale fractions in [0, 1) to integers: those before `stops[0]` below `sizes[0]`, and so on; int64 `[n]`."""
    if _loops is None:
        return (chances * np.repeat(sizes, np.diff(stops, prepend=0))).astype(np.int64)
    numbers = np.empty(len(chances), np.int64)
    _loops.scale_parts(chances, stops, sizes, numbers)
    return numbers


def gather_parts(
    places: Numbers,
    widths: Numbers,
    targets: Numbers,
    numbers: Numbers,
    members: Numbers,
    stops: Numbers,
    rows: Numbers,
) -> bool:
    """Copy rows of several tables to the addresses `targets`, one for each column.

    Numbers before `stops[0]` belong to the table `members[0]`, with `rows[0]` rows of `widths` bytes at the addresses
    `places[members[0]]`, and so on.

    Returns:
        False without compiled loops, and if a row does not exist.
    """
    if _loops is None:
        return False
    beyond: int = _loops.gather_parts(places, widths, targets, np.ascontiguousarray(numbers), members, stops, rows)
    return beyond < 0


# Packed records ------------------------------------------------------------------------------------

_LINE = 64


class RecordColumn(NamedTuple):
    """A field of packed records: its place, in bytes from the start of the record, its element type and its shape.

    With `after`, a step takes the field from the record after its own, which holds its `next`.
    """

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    after: bool

    @property
    def width(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class RecordPlaces(NamedTuple):
    """Where the records of the steps of a packed dataset are.

    An episode of n steps has n + 1 records: the last one holds the observation after the last step. Step s of episode e
    is therefore in record s + e, and the following record holds its `next`. An episode whose next observations do not
    follow from the following rows stores them explicitly, one record for each step.

    Attributes:
        records: the records of all episodes, uint8 `[n, bytes]`.
        explicit: the records of explicit next rows, uint8 `[m, bytes]`.
        starts: the first step of each episode, followed by the number of steps, int64 `[episodes + 1]`.
        explicit_starts: where in `explicit` the next rows of each episode begin, int64 `[episodes]`; -1 if it has none.
    """

    records: Array
    explicit: Array
    starts: Numbers
    explicit_starts: Numbers

    def find(self, numbers: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return steps without negative numbers, and the episode and the record of each, int64 `[n]`.

        IndexError for a step that does not exist.
        """
        steps = int(self.starts[-1])
        outside = (numbers < -steps) | (numbers >= steps)
        if outside.any():
            raise IndexError(f"row is {int(numbers[outside][0])}, expected one of {steps} rows")
        numbers = np.where(numbers < 0, numbers + steps, numbers)
        episodes = np.searchsorted(self.starts[1:], numbers, side="right")
        return numbers, episodes, numbers + episodes

    def explicit_of(self, steps: Numbers, episodes: Numbers) -> tuple[Numbers, Numbers]:
        """Return the positions of the steps that have explicit next rows, and the numbers of these rows."""
        chosen = np.flatnonzero(self.explicit_starts[episodes] >= 0)
        which = episodes[chosen]
        return chosen, self.explicit_starts[which] + steps[chosen] - self.starts[which]


class PlainRecords:
    """Fields of packed records, gathered by NumPy."""

    def __init__(self, places: RecordPlaces, columns: Sequence[RecordColumn], after_bytes: int) -> None:
        self.places = places
        self.columns = list(columns)
        self.size = places.records.shape[1]
        self.after_bytes = after_bytes
        self._items = np.dtype((np.void, self.size))

    def gather(self, numbers: Numbers) -> list[torch.Tensor]:
        """Return each column at the steps `numbers`, int64 `[n]`: `[n, *shape]` in fresh memory.

        Negative numbers count from the end; IndexError for steps that do not exist.
        """
        here, after = self._records(numbers)
        found = []
        for column in self.columns:
            source = after if column.after else here
            rows = source[:, column.offset : column.offset + column.width]
            whole = np.ascontiguousarray(rows).view(column.dtype).reshape(len(numbers), *column.shape)
            found.append(torch.from_numpy(whole))
        return found

    def spans(self, numbers: Numbers) -> torch.Tensor:
        """Return each record, followed by the beginning of the record after it: uint8 `[n, bytes]` in fresh memory."""
        here, after = self._records(numbers)
        found = torch.empty((len(numbers), self.size + self.after_bytes), dtype=torch.uint8)
        np.concatenate([here, after[:, : self.after_bytes]], axis=1, out=found.numpy())
        return found

    def _records(self, numbers: Numbers) -> tuple[Array, Array]:
        """Return the whole records of some steps, and the records after them."""
        places = self.places
        steps, episodes, records = places.find(numbers)
        here, after = self._take(places.records, records), self._take(places.records, records + 1)
        chosen, explicit = places.explicit_of(steps, episodes)
        if len(chosen):
            after[chosen] = self._take(places.explicit, explicit)
        return here, after

    def _take(self, records: Array, numbers: Numbers) -> Array:
        if not len(numbers):
            return np.empty((0, self.size), np.uint8)
        taken = records.reshape(-1).view(self._items).take(numbers)
        return taken.view(np.uint8).reshape(len(numbers), self.size)


class _Batch:
    """How the columns of a batch of `count` rows are placed in one piece of memory, so that it is allocated at once.

    Each column starts at a multiple of the size of a cache line.
    """

    def __init__(self, count: int, columns: Sequence[RecordColumn], order: Sequence[int]) -> None:
        self.count = count
        places = np.zeros(len(columns) + 1, np.int64)
        np.cumsum([-(-column.width * count // _LINE) * _LINE for column in columns], out=places[1:])
        self.memory: Memory = memory_of((int(places[-1]),), np.dtype(np.uint8))
        self.leaves = [
            ((count, *column.shape), column.dtype, place)
            for column, place in zip(columns, places.tolist(), strict=False)
        ]
        fields = [(columns[number].offset, columns[number].width, int(places[number])) for number in order]
        self.fields = np.array(fields, np.int64).reshape(-1, 3)


class CompiledRecords(PlainRecords):
    """Fields of packed records, gathered by the compiled loops in `compiled`."""

    def __init__(
        self, places: RecordPlaces, columns: Sequence[RecordColumn], after_bytes: int, compiled: ModuleType
    ) -> None:
        super().__init__(places, columns, after_bytes)
        self._gather_fields, self._gather_spans = compiled.gather_fields, compiled.gather_spans
        self._order = sorted(range(len(self.columns)), key=lambda number: self.columns[number].after)
        self._span = self.size + after_bytes
        shift, coarse = _coarse_episodes(places.starts)
        records, explicit = (part.__array_interface__["data"][0] for part in (places.records, places.explicit))
        first_after = sum(not column.after for column in self.columns)
        episodes = len(places.explicit_starts)
        self._head = np.array([episodes, shift, records, explicit, self.size, self._span, first_after], np.int64)
        self._table = np.concatenate((places.starts, places.explicit_starts, coarse))
        self._batch = _Batch(0, self.columns, self._order)

    def gather(self, numbers: Numbers) -> list[torch.Tensor]:
        batch = self._batch
        if batch.count != len(numbers):
            batch = self._batch = _Batch(len(numbers), self.columns, self._order)
        memory = batch.memory()
        if self._gather_fields(np.ascontiguousarray(numbers), self._table, self._head, batch.fields, memory) >= 0:
            return super().gather(numbers)  # numpy raises the error for the missing row
        view = np.ndarray
        return [from_numpy(view(shape, dtype, memory, place)) for shape, dtype, place in batch.leaves]

    def spans(self, numbers: Numbers) -> torch.Tensor:
        found = torch.empty((len(numbers), self._span), dtype=torch.uint8)
        if self._gather_spans(np.ascontiguousarray(numbers), self._table, self._head, found.data_ptr()) >= 0:
            return super().spans(numbers)
        return found


def _coarse_episodes(starts: Numbers) -> tuple[int, Numbers]:
    """Return a shift, and the episode of every 2^shift-th step, to shorten the search for the episode of a step.

    The shift is chosen so that there are about as many of these as episodes.
    """
    steps, episodes = int(starts[-1]), len(starts) - 1
    shift = max(0, (steps // max(1, episodes)).bit_length() - 1)
    marks = np.arange((steps >> shift) + 2, dtype=np.int64) << shift
    return shift, np.minimum(np.searchsorted(starts[1:], marks, side="right"), max(0, episodes - 1)).astype(np.int64)


def fastest_records(places: RecordPlaces, columns: Sequence[RecordColumn], after_bytes: int) -> PlainRecords:
    """Return `CompiledRecords` if numba can be imported, otherwise `PlainRecords`."""
    compiled = compiled_loops()
    if compiled is None:
        return PlainRecords(places, columns, after_bytes)
    return CompiledRecords(places, columns, after_bytes, compiled)
