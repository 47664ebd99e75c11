"""The lists of a `tf.train.Example`, taken out of its bytes: the wire format of protobuf, without protobuf.

An Example is a map from names to lists of floats, of integers or of byte strings. Which bytes a list has is found at
once; its values are decoded where they are asked for, so that a look at the flags of an episode costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ...core.errors import CorruptDataError
from ...core.format.contracts import Array

_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5
_BYTES, _FLOATS, _INTS = 1, 2, 3
_ENTRY, _FEATURE = 1 << 3 | _LENGTH, 2 << 3 | _LENGTH
_KINDS = frozenset(kind << 3 | _LENGTH for kind in (_BYTES, _FLOATS, _INTS))
_BLOCK = 1 << 16
_AT_ONCE = 1 << 18
_LONGEST_VARINT = 10


@dataclass(frozen=True, slots=True)
class Floats:
    """A list of floats."""

    values: Array

    def __len__(self) -> int:
        return len(self.values)

    def read(self, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
        """Return values as an element type; CorruptDataError where that changes one."""
        found = self.values[start:stop]
        if dtype.kind == "f" and dtype.itemsize >= found.itemsize:
            return found.astype(dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            made = found.astype(dtype)
        _require_same(made, found, dtype)
        return made


class Ints:
    """A list of integers: varints, of which the number in each block of bytes is known."""

    def __init__(self, packed: Array) -> None:
        self._packed = packed
        self._largest = int(packed.max()) if len(packed) else 0
        if self._largest < 0x80:  # a byte each: flags, and other small numbers
            self._count, self._before = len(packed), np.zeros(1, np.int64)
            return
        starts = range(0, len(packed), _BLOCK)
        counts = [np.count_nonzero(packed[start : start + _BLOCK] < 0x80) for start in starts]
        self._before = np.concatenate(([0], np.cumsum(np.array(counts, np.int64))))
        self._count = int(self._before[-1])
        if packed[-1] >= 0x80:
            raise _damaged("a number in it has no end")

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
        """Return values as an element type; CorruptDataError for one that it cannot hold."""
        if self._largest < (2 if dtype.kind == "b" else 0x80):
            return self._packed[start:stop].astype(dtype)
        made = np.empty(stop - start, dtype)
        for first in range(start, stop, _AT_ONCE):
            last = min(first + _AT_ONCE, stop)
            values = self._decoded(first, last)
            part = values.view(np.uint64) if dtype == np.uint64 else values
            made[first - start : last - start] = part
            if dtype.itemsize < 8 or dtype.kind == "f":
                _require_same(made[first - start : last - start], part, dtype)
        return made

    def _decoded(self, start: int, stop: int) -> Array:
        if len(self) == len(self._packed):
            return self._packed[start:stop].astype(np.int64)
        return _varints(self._packed[self._place(start) : self._place(stop)])

    def _place(self, number: int) -> int:
        """The byte after the first `number` values."""
        if not number:
            return 0
        block = int(np.searchsorted(self._before, number, side="left")) - 1
        ends = np.flatnonzero(self._packed[block * _BLOCK : (block + 1) * _BLOCK] < 0x80)
        return block * _BLOCK + int(ends[number - int(self._before[block]) - 1]) + 1


@dataclass(frozen=True, slots=True)
class Strings:
    """A list of byte strings in `data`."""

    data: bytes
    spans: Sequence[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.spans)

    def read(self, start: int, stop: int) -> list[bytes]:
        """Return some of the strings."""
        return [self.data[first:last] for first, last in self.spans[start:stop]]

    @property
    def longest(self) -> int:
        """Bytes of the longest string."""
        return max((last - first for first, last in self.spans), default=0)


Values: TypeAlias = Floats | Ints | Strings


class EpisodeExample:
    """The lists of an Example by name. CorruptDataError for bytes that are no Example."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._lists: dict[str, tuple[int, int, int]] = {}
        try:
            self._find_lists()
        except (IndexError, UnicodeDecodeError) as error:
            raise _damaged("it ends inside a field") from error

    @property
    def names(self) -> Sequence[str]:
        """The names of the lists that have a kind, empty or not."""
        return tuple(self._lists)

    def get(self, name: str) -> Values | None:
        """Return a list; None where there is none of that name."""
        found = self._lists.get(name)
        if found is None:
            return None
        kind, start, stop = found
        try:
            if kind == _FLOATS:
                return Floats(self._floats(start, stop))
            if kind == _INTS:
                return Ints(self._ints(start, stop))
            return Strings(self._data, self._strings(start, stop))
        except IndexError as error:
            raise _damaged(f"{name!r} ends inside a value") from error

    def _find_lists(self) -> None:
        data = self._data
        for number, wire, start, stop in _fields(data, 0, len(data)):
            if number == 1 and wire == _LENGTH:
                while start < stop:
                    start = self._take_entry(start, stop)

    def _take_entry(self, at: int, stop: int) -> int:
        """Take an entry of the map at a place of it; return the place after it.

        Field 1 is the name, field 2 the Feature, whose field number is the kind of its list. Written this way they are
        taken at once, and any other way one field after the other.
        """
        data = self._data
        size, begin = (data[at + 1], at + 2) if data[at + 1] < 0x80 else _varint(data, at + 1)
        end = begin + size
        if data[at] != _ENTRY or end > stop:
            return self._take_field(at, stop)
        if data[begin] == _ENTRY and data[begin + 1] < 0x80:
            place = begin + 2 + data[begin + 1]
            name = data[begin + 2 : place]
            if place < end and data[place] == _FEATURE:
                size, place = (data[place + 1], place + 2) if data[place + 1] < 0x80 else _varint(data, place + 1)
                if place < end and place + size == end and data[place] in _KINDS:
                    kind = data[place] >> 3
                    size, place = (data[place + 1], place + 2) if data[place + 1] < 0x80 else _varint(data, place + 1)
                    if place + size == end:
                        self._lists[name.decode()] = kind, place, end
                        return end
        self._take_fields(begin, end)
        return end

    def _take_field(self, at: int, stop: int) -> int:
        """Take a field of the Features, which may be an entry; return the place after it."""
        number, wire, first, last = next(_fields(self._data, at, stop))
        if number == 1 and wire == _LENGTH:
            self._take_fields(first, last)
        return last

    def _take_fields(self, start: int, stop: int) -> None:
        """Take the fields of an entry."""
        data, name, found = self._data, "", None
        for number, wire, first, last in _fields(data, start, stop):
            if wire != _LENGTH:
                continue
            if number == 1:
                name = data[first:last].decode()
            elif number == 2:
                for kind, wire_inside, begin, end in _fields(data, first, last):
                    if kind in (_BYTES, _FLOATS, _INTS) and wire_inside == _LENGTH:
                        found = kind, begin, end
        if found is None:
            self._lists.pop(name, None)
        else:
            self._lists[name] = found

    def _packed(self, start: int, stop: int, wire_alone: int) -> Sequence[tuple[int, int]]:
        """The places of the packed values of a list; of one that is not packed, of each value."""
        data = self._data
        if start < stop and data[start] == _ENTRY:
            size, place = (data[start + 1], start + 2) if data[start + 1] < 0x80 else _varint(data, start + 1)
            if place + size == stop:
                return ((place, stop),)
        fields = _fields(data, start, stop)
        return [(first, last) for number, wire, first, last in fields if number == 1 and wire in (_LENGTH, wire_alone)]

    def _floats(self, start: int, stop: int) -> Array:
        parts: list[Array] = []
        for first, last in self._packed(start, stop, _FOUR):
            if (last - first) % 4:
                raise _damaged("a list of floats has a part of one")
            parts.append(np.frombuffer(self._data, "<f4", (last - first) // 4, first))
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, "<f4"), *parts])

    def _ints(self, start: int, stop: int) -> Array:
        parts: list[Array] = []
        for first, last in self._packed(start, stop, _VARINT):
            part = np.frombuffer(self._data, np.uint8, last - first, first)
            if len(part) and part[-1] >= 0x80:
                raise _damaged("a number in it has no end")
            parts.append(part)
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.uint8), *parts])

    def _strings(self, start: int, stop: int) -> list[tuple[int, int]]:
        data, at, spans = self._data, start, []
        while at < stop:
            if data[at] != _ENTRY:  # not the tag of the only field there is
                return [(first, last) for number, wire, first, last in _fields(data, start, stop)
                        if number == 1 and wire == _LENGTH]  # fmt: skip
            size = data[at + 1]
            at += 2
            if size >= 0x80:
                if data[at] < 0x80:  # the size of a small image: a call would take as long as the rest
                    size, at = size & 0x7F | data[at] << 7, at + 1
                else:
                    size, at = _varint(data, at - 1)
            if at + size > stop:
                raise IndexError
            spans.append((at, at + size))
            at += size
        return spans


def _fields(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type, start and end of each field of a message; IndexError where one has no end."""
    while at < stop:
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, at = _varint(data, at - 1)
        wire, start = tag & 7, at
        if wire == _LENGTH:
            size = data[at]
            start = at + 1
            if size >= 0x80:
                size, start = _varint(data, at)
            at = start + size
        elif wire == _VARINT:
            _, at = _varint(data, at)
        elif wire in (_FOUR, _EIGHT):
            at += 4 if wire == _FOUR else 8
        else:
            raise _damaged(f"a field has the wire type {wire}, which is not used in one")
        if at > stop:
            raise IndexError
        yield tag >> 3, wire, start, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and the place after it."""
    value = 0
    for shift in range(0, 7 * _LONGEST_VARINT, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise _damaged(f"a number has more than {_LONGEST_VARINT} bytes")


def _varints(packed: Array) -> Array:
    """Decode whole varints, all at once: one pass for each byte of the longest."""
    ends = np.flatnonzero(packed < 0x80)
    starts = np.concatenate(([0], ends[:-1] + 1))[: len(ends)]
    lengths = ends - starts + 1
    longest = int(lengths.max(initial=0))
    if longest > _LONGEST_VARINT:
        raise _damaged(f"a number has more than {_LONGEST_VARINT} bytes")
    values = (packed[starts] & 0x7F).astype(np.uint64)
    for byte in range(1, longest):
        which = np.flatnonzero(lengths > byte)
        values[which] |= (packed[starts[which] + byte] & 0x7F).astype(np.uint64) << np.uint64(7 * byte)
    return values.view(np.int64)


def _require_same(made: Array, found: Array, dtype: np.dtype[Any]) -> None:
    differs = made != found
    if found.dtype.kind == "f":
        differs &= ~(np.isnan(found) & np.isnan(made)) if made.dtype.kind == "f" else True
    if differs.any():
        value = found[int(differs.argmax())]
        raise CorruptDataError(f"the value {value} does not fit {dtype}, the type that features.json states")


def _damaged(why: str) -> CorruptDataError:
    return CorruptDataError(f"no sound Example: {why}")
