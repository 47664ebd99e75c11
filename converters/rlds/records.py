"""Shards of records: TFRecord files, whose checksums are compared, and ArrayRecord files through their library.

A TFRecord file is a sequence of records: the length (uint64, little-endian), the masked CRC-32C of these 8 bytes, the
data, and the masked CRC-32C of the data.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c

from ...core.errors import CorruptDataError, UsageError
from ...core.format.contracts import Closing
from ...core.format.digest import open_regular, refuse_pointer

_HEAD = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_LARGEST = 0x7FFFF000
"""Bytes of a record: messages of protobuf have 2 GiB at most."""
_MASK = 0xA282EAD8
_SMALL, _AHEAD = 16 << 10, 64 << 10
"""Below so many bytes, records that follow are read with one, so many bytes: a call takes longer than the copy."""
AGAIN = "copy or fetch the file again, whole"


class RecordPlace(NamedTuple):
    """Where a record is in its shard: the byte, or the number in an ArrayRecord file, and the bytes of its data."""

    position: int
    size: int


class RecordShard(Closing, ABC):
    """A file of records, open for reading. Raises CorruptDataError for damage."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def records(self) -> Iterator[tuple[RecordPlace, bytes | CorruptDataError]]:
        """Yield the records in order; in place of data that is damaged, the error.

        Raises CorruptDataError where the records that follow cannot be found.
        """

    @abstractmethod
    def count(self) -> int:
        """Count the records without reading their data."""

    @abstractmethod
    def read(self, place: RecordPlace) -> bytes:
        """Read the data of a record, and compare its checksum."""


def masked_crc(data: bytes) -> int:
    """Return the checksum of TFRecord: CRC-32C, rotated, and increased by a constant."""
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


class TfRecordShard(RecordShard):
    """A TFRecord file; one record is in memory at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        refuse_pointer(path)
        self._descriptor = open_regular(path)
        self._size = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def records(self) -> Iterator[tuple[RecordPlace, bytes | CorruptDataError]]:
        position = number = first = 0
        block = os.pread(self._descriptor, _HEAD.size, 0)  # of the file, from its byte `first` on
        while position < self._size:
            at = position - first
            place = self._place(block[at : at + _HEAD.size], position, number)
            begin, end = at + _HEAD.size, at + _HEAD.size + place.size
            if end + _CHECKSUM.size + _HEAD.size <= len(block):
                data, rest = block[begin:end], block[end : end + _CHECKSUM.size]
            else:
                first = place.position + place.size
                data = os.pread(self._descriptor, place.size, place.position)
                more = _AHEAD if place.size < _SMALL else _CHECKSUM.size + _HEAD.size  # with the head of the next one
                rest = block = os.pread(self._descriptor, more, first)
            position, number = place.position + place.size + _CHECKSUM.size, number + 1
            try:
                self._compare(place, data, rest)
            except CorruptDataError as error:
                yield place, error
            else:
                yield place, data

    def count(self) -> int:
        position = number = 0
        while position < self._size:
            place = self._place(os.pread(self._descriptor, _HEAD.size, position), position, number)
            position, number = place.position + place.size + _CHECKSUM.size, number + 1
        return number

    def read(self, place: RecordPlace) -> bytes:
        data = os.pread(self._descriptor, place.size, place.position)
        self._compare(place, data, os.pread(self._descriptor, _CHECKSUM.size, place.position + place.size))
        return data

    def _compare(self, place: RecordPlace, data: bytes, rest: bytes) -> None:
        """Raise CorruptDataError for data without the checksum that follows."""
        if len(data) < place.size or len(rest) < _CHECKSUM.size:
            raise self._damaged(f"it ends inside the record at byte {place.position:,}")
        if masked_crc(data) != _CHECKSUM.unpack_from(rest)[0]:
            raise self._damaged(f"the record at byte {place.position:,} has another checksum than it states")

    def _place(self, head: bytes, position: int, number: int) -> RecordPlace:
        """Return where the record is whose head is at a position."""
        if len(head) < _HEAD.size:
            raise self._cut(number)
        size, checksum = _HEAD.unpack(head)
        if masked_crc(head[:8]) != checksum:
            raise self._damaged(
                f"the length of record {number:,}, at byte {position:,}, has another checksum than it states"
            )
        if size > _LARGEST:
            raise self._damaged(f"record {number:,} has {size:,} bytes, at most {_LARGEST:,} are read")
        if position + _HEAD.size + size + _CHECKSUM.size > self._size:
            raise self._cut(number)
        return RecordPlace(position + _HEAD.size, size)

    def _cut(self, number: int) -> CorruptDataError:
        return CorruptDataError(
            f"{self.path} is cut: it ends after {self._size:,} bytes, inside record {number:,}", hint=AGAIN
        )

    def _damaged(self, why: str) -> CorruptDataError:
        return CorruptDataError(f"{self.path} is damaged: {why}", hint=AGAIN)


class ArrayRecordShard(RecordShard):
    """An ArrayRecord file, which its library reads and verifies; one record is in memory at a time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        refuse_pointer(path)
        os.close(open_regular(path))
        self._reader = self._opened()

    def _opened(self) -> Any:
        try:
            library = importlib.import_module("array_record.python.array_record_module")
        except ImportError as error:
            raise UsageError(
                f"{self.path} is an ArrayRecord file, and the package array-record is not installed",
                hint="pip install 'rbtool[array-record]'",
            ) from error
        try:
            reader = library.ArrayRecordReader(str(self.path), "readahead_buffer_size:0")
            if not reader.ok():
                reader.close()  # raises what is wrong
        except Exception as error:  # the library states that in many ways
            raise self._damaged(error) from error
        return reader

    def records(self) -> Iterator[tuple[RecordPlace, bytes | CorruptDataError]]:
        for number in range(self.count()):
            try:
                data = self.read(RecordPlace(number, 0))
            except CorruptDataError as error:
                yield RecordPlace(number, 0), error
            else:
                yield RecordPlace(number, len(data)), data

    def count(self) -> int:
        try:
            return int(self._reader.num_records())
        except Exception as error:  # as above
            raise self._damaged(error) from error

    def read(self, place: RecordPlace) -> bytes:
        try:
            [data] = self._reader.read([place.position])
        except Exception as error:  # as above
            raise self._damaged(error) from error
        return bytes(data)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # raises once more what was wrong before
            self._reader.close()

    def _damaged(self, error: Exception) -> CorruptDataError:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        return CorruptDataError(f"{self.path} is damaged: {said}", hint=AGAIN)
