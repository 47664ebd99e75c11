"""Reads rows of NumPy arrays in bounded memory: `.npy` files, `.npz` archives, and gzip files of one array.

An array of Python objects is a pickle, as its header states. It is refused unless `unpickle` is called: then the module
`pickles` reads it, and its objects become an array of numbers or text.

Compressed members are unpacked as a stream, one block at a time; reading rows in ascending order unpacks each once.
`numpy.load` is not used because it unpacks members whole, and can unpickle.
"""

from __future__ import annotations

import ast
import contextlib
import io
import math
import os
import re
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...core.errors import CorruptDataError, FormatError, MissingKeyError, RbtoolError, SchemaError, did_you_mean
from ...core.format.contracts import Array, Closing
from ...core.format.files import bytes_of, located, open_regular, refuse_pointer
from ...core.format.manifest import is_inside
from ...core.ted.schema import odd_truths
from .pickles import PickledArray, PickledList, PickleReader, Value

MOST_BYTES = 256 << 20
"""Limit in bytes for a pickle, and for the array that is made of it."""
_AT_ONCE = 4096
_BYTES_AT_ONCE = 16 << 20
_INT64, _UINT64 = np.iinfo(np.int64), np.iinfo(np.uint64)


def array_of_objects(data: bytes, shape: tuple[int, ...], what: str) -> Array:
    """Return a pickled array of Python objects as an array of numbers or text.

    Elements that are arrays of one type and shape are stacked. Bools become bool, integers int64 (or uint64 if they do
    not fit), numbers float64 if none is rounded by that, and strings stay `str` objects.

    Args:
        data: the pickle.
        shape: the shape that the header states.
        what: the name of the array in messages.

    Returns:
        An array `[*shape]`, or `[*shape, *their shape]` for elements that are arrays.

    Raises:
        FormatError: elements have different types or shapes, are None or containers, or exceed `MOST_BYTES`.
        CorruptDataError: the pickle is damaged, or has another shape.
    """
    with PickleReader(what, len(data)) as reader:
        found = reader.load(io.BytesIO(data), len(data))
        if not isinstance(found, PickledList) or found.shape != shape:
            raise CorruptDataError(f"{what} is damaged: its pickle does not have the shape {list(shape)} of its header")
        if not len(found):
            raise FormatError(f"{what} is an empty array of Python objects, so that their type is unknown")
        first = reader.items(found, 0, 1)[0]
        if isinstance(first, PickledArray):
            rows = _stacked(reader, found, first, what)
        else:
            rows = _of_values([value for part in _parts(reader, found, what) for value in part], what)
    return rows.reshape(*shape, *rows.shape[1:])


def _parts(reader: PickleReader, found: PickledList, what: str) -> Iterator[list[Value]]:
    """Yield the elements a few thousand at a time; FormatError if their strings exceed `MOST_BYTES`."""
    characters = 0
    for start in range(0, len(found), _AT_ONCE):
        part = reader.items(found, start, min(start + _AT_ONCE, len(found)))
        characters += sum(len(value) for value in part if isinstance(value, str))
        if characters > MOST_BYTES:
            raise _too_large(what)
        yield part


def _stacked(reader: PickleReader, found: PickledList, first: PickledArray, what: str) -> Array:
    form = _form(first)
    if form[0].kind not in "biufc":
        raise FormatError(f"{what} has arrays of {form[0]} as elements, which are not numbers")
    if len(found) * max(1, form[0].itemsize * int(np.prod(form[1], dtype=object))) > MOST_BYTES:
        raise _too_large(what)
    rows: Array = np.empty((len(found), *form[1]), form[0])
    at_once = max(1, _BYTES_AT_ONCE // max(1, rows.nbytes // len(found)))
    number = 0
    for part in _parts(reader, found, what):
        arrays = [_alike(value, first, number + place, what) for place, value in enumerate(part)]
        for start in range(0, len(arrays), at_once):
            for values in reader.parts(arrays[start : start + at_once]):
                rows[number] = values
                number += 1
    return rows


def _alike(value: Value, first: PickledArray, number: int, what: str) -> PickledArray:
    """Return an element if it has the type and shape of the first one; FormatError if not."""
    if not isinstance(value, PickledArray) or _form(value) != _form(first):
        raise FormatError(
            f"{what} has elements of different types or shapes: {_name(first)} first, and {_name(value)} as element "
            f"{number:,}"
        )
    return value


def _of_values(values: list[Value], what: str) -> Array:
    kinds = {type(value) for value in values}
    if kinds == {str}:
        text: Array = np.empty(len(values), object)
        text[:] = values
        return text
    if kinds == {bool}:
        return np.array(values, bool)
    if kinds == {int}:
        return np.array(values, _whole_type(values, what))
    if kinds and kinds <= {int, float}:
        return np.array([_float_of(value, what) for value in values], np.float64)
    names = sorted({_name(value) for value in values})
    if len(names) > 1:
        raise FormatError(f"{what} has elements of different types: {', '.join(names[:5])}")
    raise FormatError(f"{what} has elements of type {names[0]}: numbers, text and arrays of numbers are read")


def _whole_type(values: list[Any], what: str) -> type[np.integer[Any]]:
    low, high = min(values), max(values)
    if _INT64.min <= low and high <= _INT64.max:
        return np.int64
    if low >= 0 and high <= _UINT64.max:
        return np.uint64
    raise FormatError(f"{what} has whole numbers that do not fit into 64 bits")


def _float_of(value: Any, what: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if isinstance(value, int) and number != value:
        raise FormatError(f"{what} has the whole number {str(value)[:40]} among floats, and no float equals it")
    return number


def _form(value: PickledArray) -> tuple[np.dtype[Any], tuple[int, ...]]:
    return value.dtype.newbyteorder("="), value.shape


def _name(value: Value) -> str:
    if isinstance(value, PickledArray):
        return f"{_form(value)[0]} {list(value.shape)}"
    return "a container" if isinstance(value, PickledList) else type(value).__name__


def _too_large(what: str) -> FormatError:
    return FormatError(f"{what} has more than {MOST_BYTES:,} bytes of Python objects, which are read at once")


MAGIC = b"\x93NUMPY"
"""First bytes of a `.npy` file."""
_FETCH_AGAIN = "copy or fetch the file again, whole"
_LONGEST_HEADER = 10_000
"""Limit in bytes for a header, the same as in NumPy: a long literal can exhaust the parser."""
_MOST_BYTES = 1 << 62
_FORTRAN_BYTES = 64 << 20
"""Limit in bytes for an array in Fortran order, which is read whole because its rows are not contiguous."""


class ByteRange(Closing, ABC):
    """A range of `size` bytes, which can be read in any order; ascending order is always fast."""

    size: int
    is_bound: ClassVar[bool] = False
    """Whether `size` is only an upper bound, because the size is not known before the end was read."""

    @abstractmethod
    def read_into(self, target: memoryview, position: int) -> None:
        """Fill `target` with the bytes from `position` on, all of which are in the range.

        Raises CorruptDataError if the file is too short for them.
        """

    def read(self, position: int, count: int) -> bytes:
        """Return `count` bytes from `position` on."""
        data = bytearray(count)
        self.read_into(memoryview(data), position)
        return bytes(data)


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """The header of a `.npy` file: element type as stored, shape, order, and the size of the header in bytes."""

    stored: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    size: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type in the byte order of this machine."""
        return self.stored.newbyteorder("=")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the first axis, or of the value if the array has no axes."""
        return self.stored.itemsize * math.prod(self.shape[1:])

    @property
    def data_bytes(self) -> int:
        """Bytes of all elements."""
        return self.stored.itemsize * math.prod(self.shape)


def read_header(data: ByteRange, what: str) -> NpyHeader:
    """Read the header at the start of `data`; `what` names the array in messages.

    Raises:
        FormatError: this is not a `.npy` file, or its element type contains arrays.
        CorruptDataError: the header makes no sense, or does not agree with the number of bytes.
    """
    head = data.read(0, min(data.size, 12))
    if not head.startswith(MAGIC) or len(head) < 12:
        raise FormatError(f"{what} is not a NumPy array: it does not begin with the header of one")
    version = head[6]
    if version not in (1, 2, 3):
        raise FormatError(f"{what} has version {version} of NumPy's header; known: 1, 2 and 3")
    start = 10 if version == 1 else 12
    length = int.from_bytes(head[8:start], "little")
    if length > _LONGEST_HEADER:
        raise damaged(what, f"its header has {length:,} bytes, expected at most {_LONGEST_HEADER:,}")
    if start + length > data.size:
        raise damaged(what, "its header is cut")
    text = data.read(start, length)
    header = _parsed(text.decode("utf-8" if version == 3 else "latin-1", "replace"), what, start + length)
    needed = header.size + header.data_bytes
    if not header.stored.hasobject and (needed > data.size if data.is_bound else needed != data.size):
        raise damaged(
            what,
            f"its header states {header.stored} {list(header.shape)}, which is {header.data_bytes:,} bytes, and "
            f"{'at most ' if data.is_bound else ''}{data.size - header.size:,} follow",
        )
    return header


def _parsed(text: str, what: str, size: int) -> NpyHeader:
    try:
        try:
            stated = ast.literal_eval(text)
        except SyntaxError:
            stated = ast.literal_eval(re.sub(r"(?<=\d)L(?=\s*[,)])", "", text))  # long integers of Python 2
        described, shape, fortran = stated["descr"], stated["shape"], stated["fortran_order"]
        dtype = np.lib.format.descr_to_dtype(described)
    except (
        SyntaxError, ValueError, TypeError, LookupError, RecursionError, MemoryError, AttributeError,
        Warning,  # where warnings are errors: NumPy warns of deprecated names of element types, which it never writes
    ) as error:  # fmt: skip
        raise damaged(what, f"its header cannot be read ({type(error).__name__})") from error
    if not isinstance(shape, tuple) or not all(type(side) is int and side >= 0 for side in shape):
        raise damaged(what, "its header states no shape")
    if type(fortran) is not bool:
        raise damaged(what, "its header does not state the order of elements")
    if dtype.subdtype is not None:
        raise FormatError(f"{what} has elements of type {dtype}, which are arrays themselves")
    if len(shape) > 64 or math.prod(side for side in shape if side) * max(1, dtype.itemsize) > _MOST_BYTES:
        raise damaged(what, "its header states a shape that no array has")
    return NpyHeader(dtype, shape, fortran, size)


class ArrayRows(Closing):
    """Reads ranges of rows of an array in `.npy` form; it owns `data`. Raises the errors of `read_header`."""

    def __init__(self, data: ByteRange, what: str) -> None:
        self._data = data
        self._what = what
        self._kept: Array | None = None
        self._unpickled: Array | None = None
        self.header = read_header(data, what)

    @property
    def is_pickled(self) -> bool:
        """Whether its elements are Python objects in a pickle that was not read by `unpickle`."""
        return self._unpickled is None and bool(self.header.stored.hasobject)

    def unpickle(self) -> None:
        """Read the pickle of an array of Python objects, which a user trusts, so that it can be read like any array.

        `header` is replaced by one for the elements in memory. Raises the errors of `array_of_objects`.
        """
        found = array_of_objects(self.raw(MOST_BYTES), self.header.shape, self._what)
        self._unpickled = found
        self.header = replace(self.header, stored=found.dtype, shape=found.shape, fortran=False)

    def read(self, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` as a fresh array `[stop - start, *shape[1:]]` in the machine's byte order.

        Raises:
            SchemaError: the range exceeds the array.
            FormatError: the array is a pickle, a single value, or too large for rows of an array in Fortran order.
        """
        header = self.header
        if not header.shape:
            raise FormatError(f"{self._what} is a single value, expected rows")
        if not 0 <= start <= stop <= header.shape[0]:
            raise SchemaError(f"rows of {self._what} are {start}:{stop}, expected within {header.shape[0]} rows")
        if self._unpickled is not None:
            return self._unpickled[start:stop].copy()
        if header.fortran and len(header.shape) > 1:
            return self._whole_fortran()[start:stop].copy()
        return self._elements((stop - start, *header.shape[1:]), header.size + start * header.row_bytes)

    def whole(self, most_bytes: int) -> Array:
        """Read the array as a fresh one; FormatError if it is a pickle, or has more than `most_bytes`."""
        header = self.header
        if header.data_bytes > most_bytes:
            raise FormatError(f"{self._what} has {header.data_bytes:,} bytes, at most {most_bytes:,} are read at once")
        if self._unpickled is not None:
            return self._unpickled.copy()
        shape = header.shape[::-1] if header.fortran else header.shape
        found = self._elements(shape, header.size)
        return np.ascontiguousarray(found.T) if header.fortran and len(shape) > 1 else found

    def raw(self, most_bytes: int) -> bytes:
        """Return the bytes after the header, which are a pickle for Python objects; FormatError for too many."""
        count = self._data.size - self.header.size
        if count > most_bytes:
            raise FormatError(f"{self._what} has {count:,} bytes, at most {most_bytes:,} are read at once")
        return self._data.read(self.header.size, count)

    def close(self) -> None:
        self._data.close()

    def _whole_fortran(self) -> Array:
        if self._kept is None:
            if self.header.data_bytes > _FORTRAN_BYTES:
                raise FormatError(
                    f"{self._what} is stored column by column (Fortran order) and has {self.header.data_bytes:,} "
                    f"bytes: rows of such arrays are read up to {_FORTRAN_BYTES:,} bytes",
                    hint="save it again with numpy.ascontiguousarray(ARRAY)",
                )
            self._kept = self.whole(_FORTRAN_BYTES)
        return self._kept

    def _elements(self, shape: tuple[int, ...], position: int) -> Array:
        header = self.header
        if self.is_pickled:
            raise FormatError(f"{self._what} is a pickle of Python objects, which can run any code: it is not unpacked")
        array: Array = np.empty(shape, header.stored)
        if array.nbytes:
            self._data.read_into(bytes_of(array), position)
        if header.stored.kind == "b" and odd_truths(array).any():
            raise damaged(self._what, "a truth value in it is neither 0 nor 1")
        return array if header.stored.isnative else array.astype(header.dtype)


class NpyFile(ArrayRows):
    """A `.npy` file, open for reading. Not thread-safe.

    Raises FormatError if this is not a `.npy` file, CorruptDataError if it is cut or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = open_regular(path)
        data = StoredBytes(descriptor, 0, os.fstat(descriptor).st_size, str(path), owned=True)
        try:
            super().__init__(data, str(path))
        except BaseException:
            data.close()
            raise


class StoredBytes(ByteRange):
    """`size` bytes of a file from `start` on; if `owned`, closing this closes the descriptor."""

    def __init__(self, descriptor: int, start: int, size: int, what: str, *, owned: bool = False) -> None:
        self.size = size
        self._descriptor = descriptor
        self._start = start
        self._what = what
        self._owned = owned

    def read_into(self, target: memoryview, position: int) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:]], self._start + position + done)
            except OSError as error:
                raise located(error, self._what) from None
            if not count:
                raise damaged(self._what, "the file ends inside")
            done += count

    def close(self) -> None:
        if self._owned:
            self._owned = False
            os.close(self._descriptor)


def damaged(what: str, why: str) -> CorruptDataError:
    """Return the error for a damaged array or file."""
    return CorruptDataError(f"{what} is damaged: {why}", hint=_FETCH_AGAIN)


INFLATES = 1032
"""The largest ratio of uncompressed to compressed bytes that zlib can reach."""
SLACK = 4096
UNPACKED_BLOCK = 256 << 10
_PACKED_BLOCK = 64 << 10
_HEADER_BLOCK = 4 << 10
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = zlib.MAX_WBITS | 16
"""`wbits` of zlib for a gzip stream, whose header and checksum zlib verifies."""


class InflatedBytes(ByteRange):
    """Compressed bytes, unpacked one block at a time.

    Only the last block is kept; to read bytes before it, unpacking starts again from the first byte.

        unpacked   |-------------|== _block ==|......................|
                   0                        _stop                   size
        compressed |-------------------| _waiting |..................|
                                                _taken

    A subclass may override `on_start` and `on_block`, for example to compare a checksum.

    Args:
        packed: the compressed bytes.
        size: the number of bytes when unpacked.
        window: zlib's `wbits`.
        what: the name of the array in messages.
    """

    def __init__(self, packed: StoredBytes, size: int, window: int, what: str) -> None:
        self.size = size
        self._packed = packed
        self._window = window
        self._what = what
        self._is_sound = False
        self._restart()

    def on_start(self) -> None:
        """Handle a start: all bytes will be unpacked from the first one on."""

    def on_block(self, block: memoryview) -> None:
        """Handle the next block before it is returned; may raise CorruptDataError."""

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
        """Unpack to the end, unless that was done once; CorruptDataError if the bytes are damaged."""
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
        """Unpack the next block; after the last one, the stream must end. After an error, unpacking starts again."""
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
        """Unpack at most `most` bytes; none at the end of the stream."""
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
    """The unpacked bytes of a gzip file. `size` is an upper bound until `end_at` sets it from the array's header."""

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
                raise FormatError(f"{path} is not a gzip file: it begins with {head!r}")
            super().__init__(packed, packed.size * INFLATES + SLACK, _GZIP_WINDOW, str(path))
        except BaseException:
            packed.close()
            raise

    def end_at(self, size: int) -> None:
        """Set the number of bytes; CorruptDataError if there are more."""
        self.size = size
        if self._stop >= size:
            if self._stop > size or self._inflated(1):
                raise damaged(self._what, f"it has more than the {size:,} bytes that its array states")
            self._is_sound = True

    def verify(self) -> None:
        """Unpack to the end, then restore the position, so that the next rows are not unpacked from the start."""
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
    """A gzip file of one `.npy` array, whose rows are read as a stream; ascending reads unpack it once.

    The checksum is compared after the last row was read, and by `verify`. Raises FormatError if this is not a gzip file
    of an array, CorruptDataError if it is cut or damaged, or states more rows than its bytes can hold.
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
        """Read to the end; raises CorruptDataError, at every call, if the file is damaged anywhere."""
        self._bytes.verify()


_SUFFIX = ".npy"
_BEGINS = (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08")
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LARGEST_DIRECTORY = 4 << 20
"""Limit in bytes for the directory of a zip file, enough for ten thousand arrays."""
_ENCRYPTED = 0x1
_UTF8 = 0x800
_UNREADABLE = (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, LookupError, EOFError)


def begins_as_zip(path: Path) -> bool:
    """Return whether a file begins like a zip archive; raises OSError, and FormatError for a FIFO or a device."""
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
    """Return the name of the first array of a `.npz` file that was cut before its directory; "" for anything else."""
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
    """A `.npz` file, open for reading. Not thread-safe.

    When the last byte of a member was read, its checksum is compared.

    Attributes:
        names: the arrays, in the order of the file.
        others: the members that are not `.npy`.

    Raises:
        FormatError: this is not a zip archive.
        CorruptDataError: the archive is cut or damaged, or a member's name leads out of the archive, occurs twice, or
            has an impossible size.
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
        """Return element type (in the byte order of this machine) and shape of an array, reading only its header."""
        header = self._array(name).header
        return header.dtype, header.shape

    def is_pickled(self, name: str) -> bool:
        """Return whether an array is a pickle of Python objects, which `read` and `whole` refuse."""
        return self._array(name).is_pickled

    def unpickle(self, name: str) -> None:
        """Read the pickle of an array, which a user trusts, so that `form`, `read` and `whole` apply to its elements.

        Raises FormatError for elements that do not fit into one array, CorruptDataError for a damaged pickle.
        """
        self._read.add(name)
        self._array(name).unpickle()

    def read(self, name: str, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` along the first axis as a fresh array in the byte order of this machine.

        Ascending reads unpack a compressed array once; to go back, unpacking starts again.

        Raises:
            SchemaError: the range exceeds the array.
            FormatError: the array is a pickle, a single value, or too large for rows of an array in Fortran order.
        """
        self._read.add(name)
        return self._array(name).read(start, stop)

    def whole(self, name: str, most_bytes: int) -> Array:
        """Read a whole array; FormatError if it is a pickle, or has more than `most_bytes`."""
        self._read.add(name)
        return self._array(name).whole(most_bytes)

    def raw(self, name: str, most_bytes: int) -> bytes:
        """Return the bytes after the header of an array, which are a pickle for Python objects."""
        self._read.add(name)
        return self._array(name).raw(most_bytes)

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Read arrays (by default all members) to the end; CorruptDataError for one whose checksum does not match."""
        wanted = self._members if names is None else [name + _SUFFIX for name in names]
        for name in wanted:
            self._bytes_of(self._members[name]).verify()

    @contextlib.contextmanager
    def damage_first(self) -> Iterator[None]:
        """Raise CorruptDataError in place of FormatError if a member is damaged, since damage may be the cause."""
        try:
            yield
        except CorruptDataError:
            raise
        except FormatError:
            self.verify()
            raise

    def verify_read(self) -> None:
        """Verify the checksums of all arrays from which anything was read, reading their remaining bytes.

        Raises CorruptDataError, at every call, for an array whose checksum does not match. Arrays that were verified
        are not read again.
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
        """Read the directory of the archive, and check its statements about each member."""
        size = os.fstat(self._descriptor).st_size
        head = os.pread(self._descriptor, 4, 0)
        try:
            with zipfile.ZipFile(_Directory(self._descriptor, size)) as archive:
                members = archive.infolist()
        except _UNREADABLE as error:
            if head not in _BEGINS:
                raise FormatError(f"{self.path} is not an npz file: it begins with {head!r}") from error
            raise self._damaged(f"the list of its arrays, at its end, cannot be read ({error}): it was cut") from error
        found: dict[str, zipfile.ZipInfo] = {}
        for member in members:
            if member.is_dir() and not member.file_size:  # file managers add entries for folders
                continue
            if why := _refused(member, size):
                raise self._damaged(f"{member.filename[:200]!r} {why}")
            if member.filename in found:
                raise self._damaged(f"{member.filename[:200]!r} is in it twice")
            found[member.filename] = member
            self._bytes_of(member)  # compares the name with the one in front of the bytes: it may be of another array
        if (stated := stated_members(self._descriptor)) not in (None, len(members)):
            raise self._damaged(f"it states {stated:,} arrays, and lists {len(members):,}")
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


_END, _LARGEST_END, _IN_ZIP64 = b"PK\5\6", 22 + (1 << 16), (1 << 16) - 1
"""Of the record at the end of a zip file: its first bytes, its largest size, and the count that refers to ZIP64."""


def stated_members(descriptor: int) -> int | None:
    """Return the number of members in the record at the end of a zip file; None if a ZIP64 record holds it instead.

    `zipfile` does not compare this number with the directory, where damage can hide members in silence.
    """
    start = max(0, os.fstat(descriptor).st_size - _LARGEST_END)
    end = os.pread(descriptor, _LARGEST_END, start).rpartition(_END)[2]
    stated = int.from_bytes(end[6:8], "little")
    return None if stated == _IN_ZIP64 else stated


def _refused(member: zipfile.ZipInfo, size: int) -> str:
    """Return why a member must not be read, or an empty string; `size` is the archive's."""
    if not is_inside(member.orig_filename) or "\\" in member.filename:
        return "is the name of a member, and leads out of the archive's folder"
    if member.flag_bits & _ENCRYPTED:
        return "is encrypted"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"is compressed by method {member.compress_type}, expected stored or deflated"
    if not 0 <= member.header_offset <= size or not 0 <= member.compress_size <= size:
        return "reaches beyond the end of the file"
    if member.compress_type == zipfile.ZIP_STORED and member.compress_size != member.file_size:
        return f"states {member.file_size:,} bytes, of which {member.compress_size:,} are stored"
    if member.file_size > member.compress_size * INFLATES + SLACK:
        return f"states {member.file_size:,} bytes, more than {member.compress_size:,} compressed bytes can unpack to"
    return ""


class _Member(ByteRange):
    """The bytes of a member of an archive."""

    @abstractmethod
    def verify(self) -> None:
        """Read the remaining bytes, unless all were verified; CorruptDataError if the checksum does not match."""


class _StoredMember(StoredBytes, _Member):
    """The bytes of an uncompressed member, verified once all of them were read in order."""

    def __init__(self, descriptor: int, start: int, member: zipfile.ZipInfo, what: str) -> None:
        super().__init__(descriptor, start, member.file_size, what)
        self._verification = _Verification(member, what)

    def read_into(self, target: memoryview, position: int) -> None:
        gap = position - self._verification.taken
        if 0 < gap <= UNPACKED_BLOCK:  # checksum a few skipped rows now: later they would cost another pass
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
        """Read the next bytes that are not yet in the checksum, and add them to it."""
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
    """The running checksum of a member; it is compared once all bytes were added in order."""

    def __init__(self, member: zipfile.ZipInfo, what: str) -> None:
        self.taken = 0
        self._member = member
        self._what = what
        self._checksum = 0

    def add(self, data: memoryview) -> None:
        """Add the next bytes; CorruptDataError if they are the last and the checksum does not match."""
        self._checksum = zlib.crc32(data, self._checksum)
        self.taken += len(data)
        self.refuse_damage()

    def refuse_damage(self) -> None:
        """Raise CorruptDataError if all bytes were added and the checksum does not match."""
        if self.taken == self._member.file_size and self._checksum != self._member.CRC:
            raise damaged(self._what, "its bytes have another checksum (CRC-32) than the archive states")


class _Directory(io.RawIOBase):
    """The archive as a file for zipfile, which refuses to read more than `_LARGEST_DIRECTORY` bytes at once."""

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
