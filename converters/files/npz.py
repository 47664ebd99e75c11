"""Reads `.npz` files, zip archives of NumPy arrays, and gzip files of one array, in rows and in bounded memory.

A compressed member is unpacked as a stream, and nothing unpacked is kept: rows that are read in ascending order are
unpacked once. `numpy.load` unpacks a member whole, and unpickles when it is asked to, so it is not used here.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import CorruptDataError, FormatError, MissingKeyError, RbtoolError, did_you_mean
from ...core.format.contracts import Array, Closing
from ...core.format.files import open_regular, refuse_pointer
from ...core.format.manifest import is_inside
from .npy import ArrayRows, ByteRange, StoredBytes, damaged

INFLATES = 1032
"""How many bytes one byte of zlib can stand for, at most."""
SLACK = 4096
UNPACKED_BLOCK = 256 << 10
_PACKED_BLOCK = 64 << 10
_HEADER_BLOCK = 4 << 10
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = zlib.MAX_WBITS | 16
"""For zlib: a gzip header, and the checksum and size after the data, which it verifies."""


class InflatedBytes(ByteRange):
    """Compressed bytes, unpacked in blocks: one is kept, and what is before it needs a new start.

    `packed` has the compressed ones, `window` is zlib's `wbits`. A subclass may implement `on_start` and `on_block`.
    """

    def __init__(self, packed: StoredBytes, size: int, window: int, what: str) -> None:
        self.size = size
        self._packed = packed
        self._window = window
        self._what = what
        self._is_sound = False
        self._restart()

    def on_start(self) -> None:
        """Prepare for all bytes from the first one on."""

    def on_block(self, block: memoryview) -> None:
        """Take the bytes that come next, before anybody gets them; may raise CorruptDataError."""

    def read_into(self, target: memoryview, position: int) -> None:
        if position < self._stop - len(self._block):
            self._restart()
        done = 0
        while done < len(target):
            behind = self._stop - position - done
            if behind <= 0:
                self._unpack()
                continue
            part = self._block[len(self._block) - behind :][: len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)

    def verify(self) -> None:
        """Read what is left, unless all was read once; CorruptDataError if the bytes are not sound."""
        while not self._is_sound:
            self._unpack()

    def close(self) -> None:
        self._packed.close()

    def _restart(self) -> None:
        self._block = memoryview(b"")
        self._stop = 0
        self._taken = 0
        self._waiting = b""
        self._inflate = zlib.decompressobj(self._window)
        self.on_start()

    def _unpack(self) -> None:
        """Unpack the next block; after the last one the stream has to end, too. After an error, all starts again."""
        try:
            block = self._inflated(UNPACKED_BLOCK if self._stop else _HEADER_BLOCK)
            self._stop += len(block)
            if not block or self._stop > self.size or (self._stop == self.size and self._inflated(1)):
                raise damaged(self._what, f"it does not unpack to the {self.size:,} bytes that are stated")
            self._block = memoryview(block)
            self.on_block(self._block)
        except CorruptDataError:
            self._restart()
            raise
        self._is_sound |= self._stop == self.size

    def _inflated(self, most: int) -> bytes:
        """Unpack up to `most` bytes; none at the end of the stream."""
        while not self._inflate.eof:
            left = self._packed.size - self._taken
            if not self._waiting and left:
                self._waiting = self._packed.read(self._taken, min(_PACKED_BLOCK, left))
                self._taken += len(self._waiting)
            try:
                found = self._inflate.decompress(self._waiting, most)
            except zlib.error as error:
                raise damaged(self._what, f"its compressed bytes cannot be unpacked ({error})") from error
            if found:
                self._waiting = self._inflate.unconsumed_tail
                return found
            if not self._waiting and not self._inflate.eof:
                raise damaged(self._what, "its compressed bytes end too early: it was cut")
            self._waiting = self._inflate.unconsumed_tail
        return b""


class _GzipBytes(InflatedBytes):
    """What is in a gzip file. `size` is an upper bound until the array in it is known."""

    is_bound = True

    def __init__(self, path: Path) -> None:
        descriptor = open_regular(path)
        packed = StoredBytes(descriptor, 0, os.fstat(descriptor).st_size, str(path), owned=True)
        self._damage: CorruptDataError | None = None
        try:
            head = packed.read(0, min(packed.size, len(_GZIP)))
            if not head:
                raise CorruptDataError(f"{path} is an empty file", hint="copy or fetch the file again")
            if head != _GZIP:
                refuse_pointer(path)
                raise FormatError(f"{path} is no gzip file: it begins with {head!r}")
            super().__init__(packed, packed.size * INFLATES + SLACK, _GZIP_WINDOW, str(path))
        except BaseException:
            packed.close()
            raise

    def end_at(self, size: int) -> None:
        """Take how many bytes there are; CorruptDataError if there are more."""
        self.size = size
        if self._stop >= size:
            if self._stop > size or self._inflated(1):
                raise damaged(self._what, f"it has more than the {size:,} bytes that its array states")
            self._is_sound = True

    def verify(self) -> None:
        """Read to the end, and continue where it was: rows that follow are not unpacked from the start."""
        if self._damage is not None:
            raise self._damage
        if self._is_sound:
            return
        place = self._block, self._stop, self._taken, self._waiting, self._inflate.copy()
        try:
            super().verify()
        except CorruptDataError as error:
            self._damage = error
            raise
        self._block, self._stop, self._taken, self._waiting, self._inflate = place


class GzipArray(ArrayRows):
    """A gzip file of one `.npy` array, read in rows as a stream; ascending rows are unpacked once.

    The checksum of the file is compared when its last row was read, and by `verify`. Raises FormatError for what is no
    such file, CorruptDataError for one that is cut or damaged, or that states more rows than its bytes can hold.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _GzipBytes(path)
        try:
            super().__init__(self._bytes, str(path))
            if self.is_pickled:
                raise FormatError(f"{path} is a pickle of Python objects, which can run any code: it is not unpacked")
            self._bytes.end_at(self.header.size + self.header.data_bytes)
        except BaseException:
            self._bytes.close()
            raise

    def verify(self) -> None:
        """Read what is left; CorruptDataError, at every call, for a file that is damaged anywhere."""
        self._bytes.verify()


_SUFFIX = ".npy"
_BEGINS = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LARGEST_DIRECTORY = 4 << 20
"""Bytes of the list of members: some ten thousand arrays."""
_ENCRYPTED = 0x1
_UTF8 = 0x800
_UNREADABLE = (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, LookupError, EOFError)


def begins_as_zip(path: Path) -> bool:
    """Return whether a file begins as zip archives do; raises OSError, and FormatError for a FIFO or a device."""
    descriptor = open_regular(path)
    try:
        return os.pread(descriptor, 4, 0) in _BEGINS
    finally:
        os.close(descriptor)


def array_names(path: Path) -> tuple[str, ...]:
    """Return the names of the arrays in a `.npz` file, none for anything else; never raises."""
    try:
        if not begins_as_zip(path):
            return ()
        with NpzFile(path) as file:
            return file.names
    except (RbtoolError, OSError):
        return ()


def first_name_of_cut(path: Path) -> str:
    """Return the name of the first array of a `.npz` file whose list of arrays is lost; "" for anything else."""
    try:
        descriptor = open_regular(path)
    except (RbtoolError, OSError):
        return ""
    try:
        head = os.pread(descriptor, _LOCAL_HEADER.size + 256, 0)
    finally:
        os.close(descriptor)
    if len(head) < _LOCAL_HEADER.size or not head.startswith(_BEGINS[0]):
        return ""
    length = _LOCAL_HEADER.unpack_from(head)[-2]
    name = head[_LOCAL_HEADER.size :][:length].decode("utf-8", "replace")
    return name.removesuffix(_SUFFIX) if name.endswith(_SUFFIX) and not array_names(path) else ""


class NpzFile(Closing):
    """A `.npz` file, open for reading. Not for several threads at once.

    `names` lists its arrays in the order of the file, `others` the members that are no arrays (not `.npy`). All of
    the archive is taken as untrusted: FormatError for what is no such archive, CorruptDataError for one that is cut
    or damaged, or whose members have names that lead out of a folder, occur twice, or state impossible sizes.
    A member that is read to its end has the checksum that the archive states.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        self._open: dict[str, ArrayRows] = {}
        self._data: dict[str, _Member] = {}
        self._read: set[str] = set()
        try:
            self._members = self._listed()
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = -1
            raise
        self.names = tuple(name.removesuffix(_SUFFIX) for name in self._members if name.endswith(_SUFFIX))
        self.others = tuple(name for name in self._members if not name.endswith(_SUFFIX))

    def form(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return element type, in the byte order of this machine, and shape of an array, from its header alone."""
        header = self._array(name).header
        return header.dtype, header.shape

    def is_pickled(self, name: str) -> bool:
        """Return whether an array has Python objects as elements, in a pickle: `read` and `whole` refuse it."""
        return self._array(name).is_pickled

    def unpickle(self, name: str) -> None:
        """Read the pickle of an array, which a user trusts: `form`, `read` and `whole` then have its elements.

        FormatError for elements that no array holds, CorruptDataError for a damaged pickle.
        """
        self._read.add(name)
        self._array(name).unpickle()

    def read(self, name: str, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` along the first axis as a fresh array in the byte order of this machine.

        In ascending order, a compressed array is unpacked once; to read further back starts again. SchemaError for
        rows that are not there; FormatError for pickles, for a single value, and for a large array in Fortran order.
        """
        self._read.add(name)
        return self._array(name).read(start, stop)

    def whole(self, name: str, most_bytes: int) -> Array:
        """Read an array whole; FormatError where it has more than `most_bytes`, and for pickles."""
        self._read.add(name)
        return self._array(name).whole(most_bytes)

    def raw(self, name: str, most_bytes: int) -> bytes:
        """Return the bytes after the header of an array: its pickle, where it has one. Errors as of `whole`."""
        self._read.add(name)
        return self._array(name).raw(most_bytes)

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Read arrays to their ends, by default all members; CorruptDataError for one that has another checksum."""
        wanted = self._members if names is None else [name + _SUFFIX for name in names]
        for name in wanted:
            self._bytes_of(self._members[name]).verify()

    @contextlib.contextmanager
    def damage_first(self) -> Iterator[None]:
        """Raise CorruptDataError in place of FormatError if a member is damaged: what is odd may be due to that."""
        try:
            yield
        except CorruptDataError:
            raise
        except FormatError:
            self.verify()
            raise

    def verify_read(self) -> None:
        """Verify the arrays of which something was read, whatever the rows: the bytes that were not read are, now.

        CorruptDataError for one that has not the checksum that is stated of it, at every call. An array that was
        verified once is not read again.
        """
        for name in sorted(self._read & self._data.keys()):
            self._data[name].verify()

    def close(self) -> None:
        """Close the file; harmless when done twice."""
        self._open.clear()
        self._data.clear()
        self._read.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _array(self, name: str) -> ArrayRows:
        found = self._open.get(name)
        if found is None:
            member = self._members.get(name + _SUFFIX)
            if member is None:
                raise MissingKeyError(f"{self.path} has no array {name!r}{did_you_mean(name, self.names)}")
            data = self._data[name] = self._bytes_of(member)
            found = self._open[name] = ArrayRows(data, f"{self.path}: {name!r}")
        return found

    def _listed(self) -> dict[str, zipfile.ZipInfo]:
        """Read the list of members and check what it states of each."""
        size = os.fstat(self._descriptor).st_size
        head = os.pread(self._descriptor, 4, 0)
        try:
            with zipfile.ZipFile(_Directory(self._descriptor, size)) as archive:
                members = archive.infolist()
        except _UNREADABLE as error:
            if head not in _BEGINS:
                raise FormatError(f"{self.path} is no npz file: it begins with {head!r}") from error
            raise self._damaged(f"the list of its arrays, at its end, cannot be read ({error}): it was cut") from error
        found: dict[str, zipfile.ZipInfo] = {}
        for member in members:
            if why := _refused(member, size):
                raise self._damaged(f"{member.filename[:200]!r} {why}")
            if member.filename in found:
                raise self._damaged(f"{member.filename[:200]!r} is in it twice")
            found[member.filename] = member
        return found

    def _bytes_of(self, member: zipfile.ZipInfo) -> _Member:
        head = os.pread(self._descriptor, _LOCAL_HEADER.size, member.header_offset)
        if len(head) < _LOCAL_HEADER.size or not head.startswith(_BEGINS[0]):
            raise self._damaged(f"{member.filename!r} is not where the list of arrays states")
        *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(head)
        start = member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        name = os.pread(self._descriptor, name_bytes, member.header_offset + _LOCAL_HEADER.size)
        if name.decode("utf-8" if member.flag_bits & _UTF8 else "cp437", "replace") != member.orig_filename:
            raise self._damaged(f"{member.filename!r} has another name where it is stored")
        if start + member.compress_size > os.fstat(self._descriptor).st_size:
            raise self._damaged(f"{member.filename!r} reaches beyond the end of the file")
        kind = _DeflatedMember if member.compress_type == zipfile.ZIP_DEFLATED else _StoredMember
        return kind(self._descriptor, start, member, f"{self.path}: {member.filename.removesuffix(_SUFFIX)!r}")

    def _damaged(self, why: str) -> CorruptDataError:
        return damaged(str(self.path), why)


def _refused(member: zipfile.ZipInfo, size: int) -> str:
    """Return why a member must not be read, or an empty string; `size` is the archive's."""
    if not is_inside(member.orig_filename) or "\\" in member.filename:
        return "is the name of a member, and leads out of a folder"
    if member.flag_bits & _ENCRYPTED:
        return "is encrypted"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"is compressed by method {member.compress_type}, expected stored or deflated"
    if not 0 <= member.header_offset <= size or not 0 <= member.compress_size <= size:
        return "reaches beyond the end of the file"
    if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
        return f"states {member.file_size:,} bytes, of which {member.compress_size:,} are stored"
    if member.file_size > member.compress_size * INFLATES + SLACK:
        return f"states {member.file_size:,} bytes, and {member.compress_size:,} compressed ones cannot be as many"
    return ""


class _Member(ByteRange):
    """The bytes of a member."""

    @abstractmethod
    def verify(self) -> None:
        """Read what is left, unless all was verified; CorruptDataError if the checksum is another."""


class _StoredMember(StoredBytes, _Member):
    """The bytes of a member that is not compressed: verified once all were read, from the first on."""

    def __init__(self, descriptor: int, start: int, member: zipfile.ZipInfo, what: str) -> None:
        super().__init__(descriptor, start, member.file_size, what)
        self._verification = _Verification(member, what)

    def read_into(self, target: memoryview, position: int) -> None:
        gap = position - self._verification.taken
        if 0 < gap <= UNPACKED_BLOCK:  # a few rows that nobody asked for: later they would cost another pass
            self._take(bytearray(gap))
        super().read_into(target, position)
        fresh = self._verification.taken - position
        if 0 <= fresh < len(target):
            self._verification.add(target[fresh:])
        self._verification.refuse_damage()

    def verify(self) -> None:
        buffer = bytearray(min(self.size, UNPACKED_BLOCK))
        while left := self.size - self._verification.taken:
            self._take(memoryview(buffer)[:left])
        self._verification.refuse_damage()

    def _take(self, buffer: bytearray | memoryview) -> None:
        """Read the bytes that come next in the verification."""
        target = memoryview(buffer)
        super().read_into(target, self._verification.taken)
        self._verification.add(target)


class _DeflatedMember(InflatedBytes, _Member):
    """The bytes of a compressed member."""

    def __init__(self, descriptor: int, start: int, member: zipfile.ZipInfo, what: str) -> None:
        self._member = member
        packed = StoredBytes(descriptor, start, member.compress_size, what)
        super().__init__(packed, member.file_size, -zlib.MAX_WBITS, what)

    def on_start(self) -> None:
        self._verification = _Verification(self._member, self._what)

    def on_block(self, block: memoryview) -> None:
        self._verification.add(block)


class _Verification:
    """Takes the bytes of a member in order, and compares their checksum once there are all."""

    def __init__(self, member: zipfile.ZipInfo, what: str) -> None:
        self.taken = 0
        self._member = member
        self._what = what
        self._checksum = 0

    def add(self, data: memoryview) -> None:
        """Take the bytes that come next; CorruptDataError if they are the last and the checksum is another."""
        self._checksum = zlib.crc32(data, self._checksum)
        self.taken += len(data)
        self.refuse_damage()

    def refuse_damage(self) -> None:
        """Raise CorruptDataError if all bytes were taken and the checksum is another."""
        if self.taken == self._member.file_size and self._checksum != self._member.CRC:
            raise damaged(self._what, "its bytes have another checksum (CRC-32) than the archive states")


class _Directory(io.RawIOBase):
    """The archive as zipfile reads its list of members: no more than `_LARGEST_DIRECTORY` bytes at a time."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("before the start of the file")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._position)
        count = left if size is None or size < 0 else min(size, left)
        if count > _LARGEST_DIRECTORY:
            raise zipfile.BadZipFile(f"it states {count:,} bytes, expected at most {_LARGEST_DIRECTORY:,}")
        data = os.pread(self._descriptor, count, self._position)
        self._position += len(data)
        return data
