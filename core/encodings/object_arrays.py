"""Arrays of Python objects as arrays of numbers or text: what is in the pickle of a `.npy` array, read by `pickles`."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import CorruptDataError, FormatError
from ..format.contracts import Array
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
    if form[0].kind == "b" and rows.size and rows.view(np.uint8).max() > 1:
        raise CorruptDataError(f"{what} is damaged: a truth value in it is neither 0 nor 1")
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
