"""The leaves of a packed dataset, gathered from its mapped files: records, and fields in files of their own."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import CorruptDataError
from ..format.contracts import Array
from ..format.open_files import ListedFiles
from ..format.packed.reader import PackedReader
from ..format.packed.row_files import RowCodec
from ..format.packed.schema import PackedField
from ..kernels.rows import PlainRecords, PlainRows, RecordColumn, RecordPlaces, fastest_records, fastest_rows
from ..ted.schema import Field
from .dataset import Pages

Numbers = NDArray[np.int64]

_RECORDS, _EXPLICIT = "records.bin", "explicit_next.bin"
_LARGE = 4 << 20
"""Bytes of records from which on it pays to import what compiles loops."""


class PackedLeaves:
    """The leaves `fields` of a packed dataset, mapped read-only. With `advise` it exceeds memory."""

    def __init__(self, reader: PackedReader, fields: Sequence[Field], *, advise: bool) -> None:
        self._schema, numbers = reader.schema, reader.numbers
        self._advise = advise
        self._fields = list(fields)
        size = self._schema.record_bytes
        self._records = _MappedFile(reader.listed, _RECORDS, numbers.records * size, advise)
        self._explicit = _MappedFile(reader.listed, _EXPLICIT, numbers.explicit_records * size, advise)
        self.places = RecordPlaces(
            self._records.bytes.reshape(-1, size), self._explicit.bytes.reshape(-1, size),
            numbers.starts, numbers.explicit_starts,
        )  # fmt: skip
        found = [self._schema.place(field) for field in fields]
        self.columns = {
            number: RecordColumn(one.offset, field.numpy, field.shape, after)
            for number, (field, (one, after)) in enumerate(zip(fields, found, strict=True))
            if one.offset is not None
        }
        self._make = fastest_records if len(self._records.bytes) >= _LARGE else PlainRecords
        self._gatherer = self._make(self.places, list(self.columns.values()), self._schema.state_bytes)
        self._single: dict[int, PlainRecords] = {}
        self._layout = self._strided()
        self._without_elements = [number for number, field in enumerate(fields) if not field.row_bytes]
        self._halves = [number for number, field in enumerate(fields) if field.dtype == "bfloat16"]
        self._own = {one.field.key: _OwnField(reader, one, advise) for one, _ in found if one.stem is not None}
        self._apart = {
            number: (self._own[one.field.key], after)
            for number, (one, after) in enumerate(found)
            if one.stem is not None
        }

    def gather(self, numbers: Numbers) -> list[torch.Tensor]:
        """Read each leaf at these steps: `[n, *shape]`; negative numbers count from the end, IndexError beyond."""
        self._expect(numbers)
        found = self._empty(len(numbers))
        for number, rows in zip(self.columns, self._gatherer.gather(numbers), strict=True):
            found[number] = rows
        self._gather_apart(numbers, found)
        return self._typed(found)

    def gather_leaf(self, number: int, numbers: Numbers) -> torch.Tensor:
        """Read one of the leaves at these steps; see `gather`."""
        if number in self._without_elements:
            return self._empty(len(numbers))[number]
        if number in self.columns:
            if self._advise:
                _, _, records = self.places.find(numbers)
                size = self._schema.record_bytes
                self._records.expect(records * size, size + self._schema.state_bytes)
            if number not in self._single:
                self._single[number] = self._make(self.places, [self.columns[number]], self._schema.state_bytes)
            [found] = self._single[number].gather(numbers)
        else:
            steps, episodes, records = self.places.find(numbers)
            explicit = self.places.explicit_of(steps, episodes)
            own, after = self._apart[number]
            if self._advise:
                own.expect(steps, records, explicit[1])
            found = torch.from_numpy(own.gather(steps, records, [after], explicit)[0])
        return found.view(torch.bfloat16) if number in self._halves and found.dtype != torch.bfloat16 else found

    def gather_views(self, numbers: Numbers, device: torch.device) -> list[torch.Tensor]:
        """As `gather`, but fields of the records are views, with strides, of one tensor on `device`."""
        self._expect(numbers)
        spans = self._gatherer.spans(numbers)
        spans = spans if device.type == "cpu" else spans.to(device)
        found, bases = self._empty(len(numbers)), {}
        for number, dtype, lead, strides, offset in self._layout:
            if dtype not in bases:
                bases[dtype] = spans.view(dtype)
            found[number] = bases[dtype].as_strided((len(numbers), *lead), strides, offset)
        self._gather_apart(numbers, found)
        return [rows if rows.device == device else rows.to(device) for rows in self._typed(found)]

    def _strided(self) -> list[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...], int]]:
        """The layout of each leaf in a row of spans: number, type, shape, strides and offset counted in elements."""
        size, found = self._schema.record_bytes, []
        for number, column in self.columns.items():
            width = column.dtype.itemsize
            inner = tuple(stride // width for stride in np.empty((1, *column.shape), column.dtype).strides[1:])
            strides = ((size + self._schema.state_bytes) // width, *inner)
            dtype = getattr(torch, self._fields[number].dtype)
            found.append((number, dtype, column.shape, strides, (column.offset + size * column.after) // width))
        return found

    def _empty(self, count: int) -> list[torch.Tensor]:
        """One tensor a leaf, which all but those without elements are put in the place of."""
        found = [_NOTHING] * len(self._fields)
        for number in self._without_elements:
            field = self._fields[number]
            found[number] = torch.empty((count, *field.shape), dtype=getattr(torch, field.dtype))
        return found

    def _typed(self, found: list[torch.Tensor]) -> list[torch.Tensor]:
        for number in self._halves:
            if found[number].dtype != torch.bfloat16:
                found[number] = found[number].view(torch.bfloat16)
        return found

    def _gather_apart(self, numbers: Numbers, found: list[torch.Tensor]) -> None:
        if not self._apart:
            return
        places = self.places
        steps, episodes, records = places.find(numbers)
        explicit = places.explicit_of(steps, episodes)
        wanted: dict[_OwnField, dict[bool, int]] = {}
        for number, (own, after) in self._apart.items():
            wanted.setdefault(own, {})[after] = number
        for own, leaves in wanted.items():
            for number, rows in zip(leaves.values(), own.gather(steps, records, list(leaves), explicit), strict=True):
                found[number] = torch.from_numpy(rows)

    def _expect(self, numbers: Numbers) -> None:
        """Hint at the rows to come."""
        if not self._advise:
            return
        places, size = self.places, self._schema.record_bytes
        steps, episodes, records = places.find(numbers)
        _, explicit = places.explicit_of(steps, episodes)
        self._records.expect(records * size, size + self._schema.state_bytes)
        self._explicit.expect(explicit * size, self._schema.state_bytes)
        for own in self._own.values():
            own.expect(steps, records, explicit)


_NOTHING = torch.empty(0)


class _MappedFile:
    """A file of known size, mapped read-only: an array of its bytes, which nobody outside gets hold of."""

    def __init__(self, files: ListedFiles, name: str, size: int, advise: bool) -> None:
        self._pages: Pages | None = None
        self.bytes: Array = np.empty(0, np.uint8)
        if not size:
            return
        path, descriptor = files.root / name, files.descriptor(name)
        found = os.fstat(descriptor).st_size
        if found != size:  # a read beyond the end of a mapped file would kill the process
            raise CorruptDataError(f"{path} has {found:,} bytes, expected {size:,}: it was cut or overwritten")
        pages = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
        self.bytes = np.frombuffer(pages, np.uint8)
        self._pages = Pages(pages) if advise else None

    def expect(self, starts: Numbers, lengths: int | Numbers) -> None:
        if self._pages is not None:
            self._pages.expect(starts, lengths)


class _OwnField:
    """A field in a file of its own, with the file of its explicit next rows."""

    def __init__(self, reader: PackedReader, one: PackedField, advise: bool) -> None:
        self._state = one.state
        self._rows = _rows_of(reader, one, advise, explicit=False)
        self._explicit = _rows_of(reader, one, advise, explicit=True) if one.state else None

    def gather(
        self, steps: Numbers, records: Numbers, leaves: Sequence[bool], explicit: tuple[Numbers, Numbers]
    ) -> list[Array]:
        """Read the rows of the steps, of what came after them, or both: [False], [True] or [False, True]."""
        if not self._state:
            return [self._rows.take(steps)]
        found = self._rows.take_all([records + after for after in leaves])
        chosen, places = explicit
        if len(chosen) and True in leaves and self._explicit is not None:
            found[list(leaves).index(True)][chosen] = self._explicit.take(places)
        return found

    def expect(self, steps: Numbers, records: Numbers, explicit: Numbers) -> None:
        """Hint at the rows to come."""
        self._rows.expect(np.concatenate((records, records + 1)) if self._state else steps)
        if self._explicit is not None:
            self._explicit.expect(explicit)


class _Whole:
    """Rows as they are."""

    def __init__(self, file: _MappedFile, field: Field, rows: int) -> None:
        self._file = file
        self._width = field.row_bytes
        self._count = rows
        array = file.bytes.view(field.numpy).reshape(rows, *field.shape)
        self._gatherer: PlainRows = (fastest_rows if array.nbytes >= _LARGE else PlainRows)([array])

    def take(self, rows: Numbers) -> Array:
        return self._gatherer.gather(rows, self._count)[0].numpy()

    def take_all(self, wanted: Sequence[Numbers]) -> list[Array]:
        return [self.take(rows) for rows in wanted]

    def expect(self, rows: Numbers) -> None:
        self._file.expect(rows * self._width, self._width)


class _Chunked:
    """Rows in compressed chunks."""

    def __init__(self, file: _MappedFile, field: Field, rows: int, codec: RowCodec, per: int, offsets: Numbers) -> None:
        self._file = file
        self._field = field
        self._count = rows
        self._codec = codec
        self._per = per
        self._offsets = offsets
        self._data = memoryview(file.bytes.data) if len(file.bytes) else memoryview(b"")

    def take(self, rows: Numbers) -> Array:
        return self.take_all([rows])[0]

    def take_all(self, wanted: Sequence[Numbers]) -> list[Array]:
        """Read several lots of rows; chunks that they share are undone once."""
        per, offsets = self._per, self._offsets
        rows = np.concatenate(wanted)
        chunks, which = np.unique(rows // per, return_inverse=True)
        bounds = zip(offsets[chunks].tolist(), offsets[chunks + 1].tolist(), strict=True)
        data = [self._data[start:stop] for start, stop in bounds]
        held = np.minimum(self._count - chunks * per, per)
        whole = self._codec.decompress(data, (held * self._field.row_bytes).tolist(), "a compressed field")
        items = whole.view(self._field.numpy).reshape(-1, *self._field.shape)
        places = which * per + rows % per  # only the last chunk of all can be shorter
        found, start = [], 0
        for lot in wanted:
            found.append(items[places[start : start + len(lot)]])
            start += len(lot)
        return found

    def expect(self, rows: Numbers) -> None:
        chunks = np.unique(rows // self._per)
        self._file.expect(self._offsets[chunks], self._offsets[chunks + 1] - self._offsets[chunks])


def _rows_of(reader: PackedReader, one: PackedField, advise: bool, *, explicit: bool) -> _Whole | _Chunked:
    numbers = reader.numbers
    rows = numbers.explicit_records if explicit else numbers.records if one.state else numbers.steps
    name = one.file(explicit=explicit)
    if one.codec is None:
        return _Whole(_MappedFile(reader.listed, name, rows * one.field.row_bytes, advise), one.field, rows)
    offsets = reader.offsets(one, explicit) if rows else np.zeros(1, np.int64)
    file = _MappedFile(reader.listed, name, int(offsets[-1]), advise)
    return _Chunked(file, one.field, rows, one.codec, one.chunk_rows, offsets)
