"""Reads rows of Arrow and Parquet files in batches, limits what they decompress to, and writes Parquet files.

Compressed buffers of Arrow files and pages of Parquet files state their uncompressed size. pyarrow allocates that much
memory without a limit, and does not expose the sizes. So the structures that contain them are parsed here, flatbuffers
in Arrow files and Thrift's compact protocol in Parquet files, and the sizes compared with the compressed ones.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...core.encodings.output_files import LatchedFile
from ...core.errors import CorruptDataError, FormatError
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.documents import load_json
from ...core.format.files import open_regular, refuse_pointer

_FREE = 64 << 20
"""An uncompressed size up to which nothing is refused, in bytes."""
_RATIO = 200
"""The largest plausible ratio of uncompressed to compressed bytes, above `_FREE`."""
_COMPRESSED_PARTS = {2: 1, 3: None}
"""Types of messages with buffers: 2, a dictionary, whose entry 1 is a batch of rows, and 3, a batch of rows itself."""
_DEEPEST = 32
_HEADERS = (256, 16 << 10, 16 << 20)
_BITS, _BYTE, _DOUBLE, _BINARY, _LISTS, _MAP, _STRUCT = (1, 2), 3, 7, 8, (9, 10), 11, 12


def require_bounded_ipc(path: Path) -> None:
    """Raise CorruptDataError if the buffers of a batch state an implausible uncompressed size.

    Raises ValueError for a file that is not a complete Arrow file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            for stated, stored in _batches(file):
                _require(path, "a batch", stated, stored)
        except (struct.error, IndexError) as error:
            raise ValueError(f"no whole Arrow file: {error}") from error


def require_bounded_parquet(path: Path, *, unread: str | None = None) -> None:
    """Raise CorruptDataError if a page states an implausible uncompressed size.

    Columns whose names begin with `unread` are not checked. Raises ValueError for a file that is not a complete Parquet
    file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            for stated, stored in _pages(file, unread):
                _require(path, "a page", stated, stored)
        except (struct.error, IndexError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no whole Parquet file: {error}") from error
        except OSError as error:
            if error.errno is not None:  # an error of the disk, not of the contents
                raise
            raise ValueError(f"no whole Parquet file: {error}") from error


STATE = "state.json"
"""The file next to the Arrow files that `save_to_disk` of the library datasets writes."""


def saved_files(folder: Path) -> list[Path]:
    """List the Arrow files in a folder of `save_to_disk`; FormatError if its `state.json` does not name them."""
    state = load_json(folder / STATE)
    listed = state.get("_data_files") if isinstance(state, dict) else None
    stated = [one.get("filename") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    names = [name for name in stated if is_name(name)]
    if not names or len(names) < len(stated):
        raise FormatError(f"{folder / STATE} does not list Arrow files of the folder")
    return [folder / name for name in names]


def is_name(name: object) -> TypeGuard[str]:
    """Return whether `name` is a plain name of a file or folder, without separators."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


class ArrowPart:
    """An Arrow stream or a Parquet file whose rows are read in batches."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with os.fdopen(open_regular(path), "rb") as file:
            self._is_parquet = file.read(4) == b"PAR1"
        refuse_pointer(path)
        if self._is_parquet:
            require_bounded_parquet(path)
            schema = self._parquet().schema_arrow
        else:
            with pa.memory_map(str(path)) as mapped:
                schema = pa.ipc.open_stream(mapped).schema
        self.schema = schema.remove_metadata()
        self.names = set(self.schema.names)

    def _parquet(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False)

    def batches(self, names: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Yield all rows of these columns in batches of at most `rows`."""
        if self._is_parquet:
            yield from self._parquet().iter_batches(batch_size=rows, columns=names, use_threads=False)
            return
        with pa.memory_map(str(self.path)) as mapped, pa.ipc.open_stream(mapped) as stream:
            for batch in stream:
                batch.validate(full=True)
                for start in range(0, batch.num_rows, rows):
                    yield batch.select(names).slice(start, rows)


def _require(path: Path, what: str, stated: int, stored: int) -> None:
    if stated > max(_FREE, stored * _RATIO):
        raise CorruptDataError(
            f"{path} has {what} of {stored:,} bytes that states {stated:,} bytes of data, expected at most {_RATIO} "
            "times as many",
            hint="if you trust it, write it again without compression",
        )


def _read(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(max(start, 0))
    return file.read(max(size, 0))


# Arrow ------------------------------------------------------------------------------------------------


class _Table:
    """A table in a flatbuffer. Its vtable holds the offset of each entry, or 0 for an absent one."""

    def __init__(self, data: bytes, place: int | None = None) -> None:
        self._data = data
        self._place = self.number("<I", 0) if place is None else place

    def number(self, form: str, place: int) -> int:
        return int(struct.unpack_from(form, self._data, place)[0])

    def entry(self, index: int) -> int | None:
        """Return the position of an entry, None if it is absent."""
        known = self._place - self.number("<i", self._place)
        if 4 + 2 * index >= self.number("<H", known):
            return None
        offset = self.number("<H", known + 4 + 2 * index)
        return self._place + offset if offset else None

    def table(self, index: int) -> _Table:
        place = self.entry(index)
        if place is None:
            raise IndexError(f"a table lacks its entry {index}")
        return _Table(self._data, place + self.number("<I", place))

    def structs(self, index: int, form: str) -> Iterator[tuple[Any, ...]]:
        place = self.entry(index)
        if place is None:
            return
        start = place + self.number("<I", place)
        for number in range(self.number("<I", start)):
            yield struct.unpack_from(form, self._data, start + 4 + number * struct.calcsize(form))


def _batches(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield for each compressed batch the stated uncompressed size of its buffers, and their size in the file."""
    end = file.seek(0, 2)
    (size,) = struct.unpack("<i", _read(file, end - 10, 4))
    footer = _Table(_read(file, end - 10 - size, size))
    for index in (2, 3):
        for start, around, body in footer.structs(index, "<qi4xq"):
            head = _read(file, start, around)
            message = _Table(head[8:] if head.startswith(b"\xff\xff\xff\xff") else head[4:])
            kind = message.entry(1)
            kind = 0 if kind is None else message.number("<B", kind)
            if kind not in _COMPRESSED_PARTS:
                continue
            rows, inner = message.table(2), _COMPRESSED_PARTS[kind]
            rows = rows if inner is None else rows.table(inner)
            if rows.entry(3) is None:  # not compressed
                continue
            buffers = [(offset, length) for offset, length in rows.structs(2, "<qq") if length > 0]
            states = (struct.unpack("<q", _read(file, start + around + offset, 8))[0] for offset, _ in buffers)
            yield sum(max(0, stated) for stated in states), min(body, sum(length for _, length in buffers))


# Parquet ----------------------------------------------------------------------------------------------


class _Compact:
    """Parses Thrift's compact protocol; a struct becomes a dictionary of its fields' values by their numbers."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.place = 0

    def _byte(self) -> int:
        self.place += 1
        return self._data[self.place - 1]

    def _count(self) -> int:
        value = shift = 0
        while shift < 70:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise IndexError("a number is too long")

    def _skip(self, size: int) -> None:
        self.place += size
        if self.place > len(self._data):
            raise IndexError("the end is missing")

    def _number(self) -> int:
        value = self._count()
        return (value >> 1) ^ -(value & 1)

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Read one struct."""
        found: dict[int, Any] = {}
        last = 0
        while head := self._byte():
            last = last + (head >> 4) if head >> 4 else self._number()
            found[last] = None if head & 15 in _BITS else self._value(head & 15, depth + 1)
        return found

    def entries(self, number: int) -> Iterator[Any]:
        """Parse one struct, and yield the items of the list that is its field `number`, one at a time."""
        last = 0
        while head := self._byte():
            last = last + (head >> 4) if head >> 4 else self._number()
            if last == number and head & 15 in _LISTS:
                yield from self._items(1)
            elif head & 15 not in _BITS:
                self._value(head & 15, 1)

    def _items(self, depth: int) -> Iterator[Any]:
        head = self._byte()
        for _ in range(self._count() if head >> 4 == 15 else head >> 4):
            yield self._value(head & 15, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEEPEST:
            raise IndexError(f"it is nested more than {_DEEPEST} deep")
        if kind == _STRUCT:
            return self.struct(depth)
        if kind in _LISTS:
            return list(self._items(depth + 1))
        if kind == _MAP:
            count = self._count()
            kinds = self._byte() if count else 0
            return [self._value(part, depth + 1) for _ in range(count) for part in (kinds >> 4, kinds & 15)]
        if kind == _BINARY:
            size = self._count()
            self._skip(size)
            return self._data[self.place - size : self.place]
        if kind in (_DOUBLE, _BYTE, *_BITS):
            return self._skip(8 if kind == _DOUBLE else 1)
        return self._number()


def _pages(file: BinaryIO, unread: str | None) -> Iterator[tuple[int, int]]:
    """Yield for each page its stated uncompressed size, and its size in the file.

    The positions of the pages are parsed from the footer here, because pyarrow aborts the process for some damaged
    footers.
    """
    end = file.seek(0, 2)
    size, magic = struct.unpack("<i4s", _read(file, end - 8, 8))
    if magic != b"PAR1" or not 0 < size <= end - 12:
        raise IndexError("it is encrypted" if magic == b"PARE" else "it does not end as one")
    for group in _Compact(_read(file, end - 8 - size, size)).entries(4):
        for chunk in (column[3] for column in group[1]):
            if unread is not None and b".".join(chunk[3]).startswith(unread.encode()):
                continue
            place = min((start for start in (chunk[9], chunk.get(11)) if start), default=end)  # no rows, no pages
            stop = min(place + chunk[7], end)
            while place < stop:
                around, page = _page(file, place)
                yield page[2], page[3]
                place += around + max(page[3], 0)


def _page(file: BinaryIO, place: int) -> tuple[int, dict[int, Any]]:
    """Read the header of a page, and return its length and its fields."""
    for size in _HEADERS:
        reader = _Compact(_read(file, place, size))
        try:
            page = reader.struct()
        except IndexError:
            continue
        return reader.place, page
    raise IndexError("the header of a page has no end")


class _ParquetFile(LatchedFile):
    """A LatchedFile with the additional methods that pyarrow calls."""

    closed = False

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: the code that opened the file closes the descriptor."""


@contextlib.contextmanager
def parquet_writer(path: Path, schema: pa.Schema) -> Iterator[tuple[pq.ParquetWriter, LatchedFile]]:
    """Open a new Parquet file; yield its writer, and the file, whose `check` raises the error of a failed write.

    Pages have checksums, which readers can verify. The file is synced at the end.
    """
    file, dictionary = _ParquetFile(path), text_columns(schema)
    with file:
        with pq.ParquetWriter(
            file, schema, compression="zstd", use_dictionary=dictionary, write_page_checksum=True
        ) as writer:
            yield writer, file
        file.check()
        fs.fsync(file.descriptor, path)


def text_columns(schema: pa.Schema) -> list[str]:
    """The columns to write with dictionary encoding: strings only, as numbers rarely repeat."""
    return [column.name for column in schema if pa.types.is_string(column.type)]


def nested(rows: Array) -> pa.Array:
    """Return rows as an Arrow array of nested lists, one level for each dimension after the first."""
    array = pa.array(np.ascontiguousarray(rows).reshape(-1))
    for depth in range(rows.ndim - 1, 0, -1):
        count, size = math.prod(rows.shape[:depth]), rows.shape[depth]
        array = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(size)), array)
    return array
