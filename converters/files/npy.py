"""NumPy arrays in the `.npy` form, read in rows: the header, the rows after it, and files of one array.

An array of Python objects is a pickle: its header shows that, and it is refused unless `unpickle` is asked for. Then
`rbtool.converters.files.pickles` reads it, and its objects become arrays of numbers or text.
"""

from __future__ import annotations

import ast
import io
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...core.errors import CorruptDataError, FormatError, SchemaError
from ...core.format.contracts import Array, Closing
from ...core.format.files import bytes_of, located, open_regular
from ...core.ted.schema import odd_truths
from .pickles import PickledArray, PickledList, PickleReader, Value

MOST_BYTES = 256 << 20
"""Bytes of a pickle that is read, and of the array that is made of it."""
_AT_ONCE = 4096
_BYTES_AT_ONCE = 16 << 20
_INT64, _UINT64 = np.iinfo(np.int64), np.iinfo(np.uint64)


def array_of_objects(data: bytes, shape: tuple[int, ...], what: str) -> Array:
    """Return the elements of a pickled array `[*shape]` of Python objects as one array.

    Elements that are arrays of one type and one shape give `[*shape, *their shape]` of this type. Truth values give
    bool, whole numbers int64 (uint64 where that is too small), numbers float64, and text an array of `str` objects.
    Nothing is rounded and nothing is made up: FormatError for elements of different types or shapes, for None and
    containers, and for more than `MOST_BYTES`. CorruptDataError for a pickle that is damaged, or of another shape.
    """
    with PickleReader(what, len(data)) as reader:
        found = reader.load(io.BytesIO(data), len(data))
        if not isinstance(found, PickledList) or found.shape != shape:
            raise CorruptDataError(f"{what} is damaged: its pickle has another shape than {list(shape)}, as its header")
        if not len(found):
            raise FormatError(f"{what} has no elements, whose type would be known")
        first = reader.items(found, 0, 1)[0]
        if isinstance(first, PickledArray):
            rows = _stacked(reader, found, first, what)
        else:
            rows = _of_values([value for part in _parts(reader, found, what) for value in part], what)
    return rows.reshape(*shape, *rows.shape[1:])


def _parts(reader: PickleReader, found: PickledList, what: str) -> Iterator[list[Value]]:
    """Yield the elements a few thousand at a time; FormatError where their text is too long to keep."""
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
        raise FormatError(f"{what} has arrays of {form[0]} as elements, which are no numbers")
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
    """Return an element of the type and shape of the first; FormatError for another one."""
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
    raise FormatError(f"{what} has whole numbers that 64 bits do not hold")


def _float_of(value: Any, what: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if isinstance(value, int) and number != value:
        raise FormatError(f"{what} has the whole number {str(value)[:40]} among floats, which they do not hold exactly")
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
"""What every `.npy` file begins with."""
_FETCH_AGAIN = "copy or fetch the file again, whole"
_LONGEST_HEADER = 10_000
"""Characters of a header; NumPy reads no longer ones either, since a long literal can exhaust the parser."""
_MOST_BYTES = 1 << 62
_FORTRAN_BYTES = 64 << 20
"""Bytes up to which an array is read whole whose rows are not in one piece."""


class ByteRange(Closing, ABC):
    """`size` bytes, read in any order; ascending order is never slow."""

    size: int
    is_bound: ClassVar[bool] = False
    """Whether there may be fewer bytes than `size`: only reading to the end shows how many there are."""

    @abstractmethod
    def read_into(self, target: memoryview, position: int) -> None:
        """Fill `target` with the bytes from `position` on, which are all inside; CorruptDataError where some lack."""

    def read(self, position: int, count: int) -> bytes:
        """Return `count` bytes from `position` on."""
        data = bytearray(count)
        self.read_into(memoryview(data), position)
        return bytes(data)


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a `.npy` header states: element type as stored, shape, order, and how many bytes the header itself has."""

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
        """Bytes of one row along the first axis; of the value itself where there are no axes."""
        return self.stored.itemsize * math.prod(self.shape[1:])

    @property
    def data_bytes(self) -> int:
        """Bytes of all elements."""
        return self.stored.itemsize * math.prod(self.shape)


def read_header(data: ByteRange, what: str) -> NpyHeader:
    """Read the header at the start of `data`; `what` names the array in errors.

    Raises FormatError for what is no `.npy`, and for types that contain arrays; CorruptDataError for headers that
    make no sense, or that state another number of bytes than there is.
    """
    head = data.read(0, min(data.size, 12))
    if not head.startswith(MAGIC) or len(head) < 12:
        raise FormatError(f"{what} is no array of NumPy: it has not the header of one")
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
        Warning,  # where warnings are errors: of names of element types that NumPy never writes
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
    """An array in `.npy` form, whose rows are read one range after the other; it owns `data`.

    Raises what `read_header` raises.
    """

    def __init__(self, data: ByteRange, what: str) -> None:
        self._data = data
        self._what = what
        self._kept: Array | None = None
        self._unpickled: Array | None = None
        self.header = read_header(data, what)

    @property
    def is_pickled(self) -> bool:
        """Whether its elements are Python objects, in a pickle that was not read."""
        return self._unpickled is None and bool(self.header.stored.hasobject)

    def unpickle(self) -> None:
        """Read the pickle of an array of Python objects, which a user trusts: it is then read like any array.

        `header` then states the elements in memory, numbers or `str` objects. Raises what `array_of_objects` raises.
        """
        found = array_of_objects(self.raw(MOST_BYTES), self.header.shape, self._what)
        self._unpickled = found
        self.header = replace(self.header, stored=found.dtype, shape=found.shape, fortran=False)

    def read(self, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` as a fresh array `[stop - start, *shape[1:]]` in the machine's byte order.

        SchemaError for rows that are not there; FormatError for pickles, for a single value, and for a large array in
        Fortran order, whose rows are spread over all of it.
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
        """Read all of it as a fresh array; FormatError where it has more than `most_bytes`, and for pickles."""
        header = self.header
        if header.data_bytes > most_bytes:
            raise FormatError(f"{self._what} has {header.data_bytes:,} bytes, at most {most_bytes:,} are read at once")
        if self._unpickled is not None:
            return self._unpickled.copy()
        shape = header.shape[::-1] if header.fortran else header.shape
        found = self._elements(shape, header.size)
        return np.ascontiguousarray(found.T) if header.fortran and len(shape) > 1 else found

    def raw(self, most_bytes: int) -> bytes:
        """Return the bytes after the header: the pickle of an array of Python objects. Errors as of `whole`."""
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
    """A `.npy` file, open for reading. Not for several threads at once.

    Raises FormatError for what is no such file, CorruptDataError for one that is cut or damaged.
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
    """Bytes as they are in a file: `size` from `start` on. `owned` closes the descriptor at the end."""

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
    """Make the error for an array, or a file, that is damaged."""
    return CorruptDataError(f"{what} is damaged: {why}", hint=_FETCH_AGAIN)
