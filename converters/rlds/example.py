"""The lists of a `tf.train.Example`, taken out of its bytes: the wire format of protobuf, without protobuf.

An Example is a map from names to lists of floats, of integers or of byte strings. Which bytes a list has is found at
once; its values are decoded where they are asked for, so that a look at the flags of an episode costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from ...core.format.contracts import Array
from .values import Floats, Ints, Strings, Values, damaged, warm

_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5
_BYTES, _FLOATS, _INTS = 1, 2, 3
_ENTRY, _FEATURE = 1 << 3 | _LENGTH, 2 << 3 | _LENGTH
_KINDS = frozenset(kind << 3 | _LENGTH for kind in (_BYTES, _FLOATS, _INTS))
_LONGEST_VARINT = 10
_FLOAT, _BYTE = np.dtype("<f4"), np.dtype(np.uint8)
_MOST_NAMES = 1 << 10
_NO_SPANS: Array = np.empty((0, 2), np.int64)


class EpisodeExample:
    """The lists of an Example by name. CorruptDataError for bytes that are no Example."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._lists: dict[str, tuple[int, int, int]] = {}
        try:
            self._find_lists()
        except (IndexError, UnicodeDecodeError) as error:
            raise damaged("it ends inside a field") from error

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
            return Strings(self._data, np.array(self._strings(start, stop), np.int64).reshape(-1, 2))
        except IndexError as error:
            raise damaged(f"{name!r} ends inside a value") from error

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
                raise damaged("a list of floats has a part of one")
            parts.append(np.frombuffer(self._data, "<f4", (last - first) // 4, first))
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, "<f4"), *parts])

    def _ints(self, start: int, stop: int) -> Array:
        parts: list[Array] = []
        for first, last in self._packed(start, stop, _VARINT):
            part = np.frombuffer(self._data, np.uint8, last - first, first)
            if len(part) and part[-1] >= 0x80:
                raise damaged("a number in it has no end")
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


class FoundExample:
    """An Example whose lists are found: `lists` has a row for each name, as `compiled.find_lists` fills it."""

    __slots__ = ("_data", "_lists", "_rows", "_spans")

    def __init__(self, data: bytes, rows: Mapping[str, int], lists: list[list[int]], spans: Array) -> None:
        self._data, self._rows, self._lists, self._spans = data, rows, lists, spans

    @property
    def names(self) -> Sequence[str]:
        """The names of the lists that have a kind, empty or not."""
        lists = self._lists
        return [name for name, row in self._rows.items() if lists[row][0]]

    def get(self, name: str) -> Values | None:
        """Return a list; None where there is none of that name."""
        row = self._rows.get(name)
        if row is None:
            return None
        kind, start, stop, count, more = self._lists[row]
        if kind == _FLOATS:
            return Floats(np.frombuffer(self._data, _FLOAT, count, start))
        if kind == _INTS:
            return Ints(np.frombuffer(self._data, _BYTE, stop - start, start), count, more)
        return Strings(self._data, self._spans[more : more + count]) if kind else None


Example: TypeAlias = EpisodeExample | FoundExample


class ExampleParser:
    """Parses the Examples of a dataset, which have lists of the same names; not for several threads.

    `is_compiled` states that compiled loops find the lists of those whose names others had, where numba is installed.
    To import the loops takes 0.4 s, the first time 2 s; results are the same.
    """

    def __init__(self, *, is_compiled: bool = False) -> None:
        self._loops = warm() if is_compiled else None
        self._rows: dict[str, int] = {}
        self._names, self._ends = b"", np.zeros(0, np.int64)
        self._lists, self._spans = np.empty((0, 5), np.int64), np.empty((64, 2), np.int64)

    def parse(self, data: bytes) -> Example:
        """Return the lists of an Example; CorruptDataError for bytes that are none."""
        if self._loops is None:
            return EpisodeExample(data)
        if not self._rows:
            return self._learned(data)
        count = self._loops.find_lists(data, self._names, self._ends, self._lists, self._spans)
        if count < 0:
            return EpisodeExample(data) if count == self._loops.OTHER else self._learned(data)
        if count > len(self._spans):
            self._spans = np.empty((2 * count, 2), np.int64)
            return self.parse(data)
        return FoundExample(data, self._rows, self._lists.tolist(), self._spans[:count].copy() if count else _NO_SPANS)

    def _learned(self, data: bytes) -> EpisodeExample:
        """Parse an Example with names that none had before, and note them."""
        found = EpisodeExample(data)
        names = dict.fromkeys([*self._rows, *found.names])  # in the order in which they are written, mostly
        if len(names) <= _MOST_NAMES:
            encoded = [name.encode() for name in names]
            self._rows = {name: row for row, name in enumerate(names)}
            self._lists = np.empty((len(names), 5), np.int64)
            self._names, self._ends = b"".join(encoded), np.cumsum([*map(len, encoded)], dtype=np.int64)
        return found


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
            raise damaged(f"a field has the wire type {wire}, which is not used in one")
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
    raise damaged(f"a number has more than {_LONGEST_VARINT} bytes")
