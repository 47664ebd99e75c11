"""Reads and writes the wire format of `tf.train.Example` without protobuf.

An Example is a map from names to lists of floats, of integers or of byte strings. The bytes of all lists are located
first; values are decoded when they are read, so that reading only the flags of an episode is cheap.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from ...core.errors import CorruptDataError
from ...core.format.contracts import Array
from .shards import masked_crc

_BLOCK = 1 << 16
_AT_ONCE = 1 << 18
_LONGEST_VARINT = 10
_INT64 = np.dtype(np.int64)
_NOT_COUNTED: Array = np.zeros(0, np.int64)

_loops: ModuleType | None = None


def warm() -> ModuleType | None:
    """Import the compiled loops, which are used from then on; None without numba.

    The import takes 0.4 s, the first one on a machine 2 s.
    """
    global _loops
    if _loops is None:
        with contextlib.suppress(ImportError):
            from . import compiled

            _loops = compiled
    return _loops


class Floats:
    """A list of floats: `values`, float32 `[n]`, a view of the bytes of the record."""

    __slots__ = ("values",)

    def __init__(self, values: Array) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def read(self, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
        """Return values as an element type; CorruptDataError if that changes one of them."""
        found = self.values[start:stop]
        if dtype.kind == "f" and dtype.itemsize >= found.itemsize:
            return found.astype(dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            made = found.astype(dtype)
        _require_same(made, found, dtype)
        return made


class Ints:
    """A list of integers, stored as varints of one to ten bytes.

    To read a range of values, the varints in each block of bytes are counted once, when that is first needed.
    """

    __slots__ = ("_before", "_bits", "_count", "_packed")

    def __init__(self, packed: Array, count: int | None = None, bits: int | None = None) -> None:
        """Make a list of the whole varints in `packed`, uint8 `[bytes]`.

        `count` is their number, `bits` the bitwise or of all bytes; both are computed if None.
        """
        self._packed, self._before = packed, _NOT_COUNTED
        if count is not None and bits is not None:
            self._count, self._bits = count, bits
            return
        self._bits = int(np.bitwise_or.reduce(packed))
        if len(packed) and packed[-1] >= 0x80:
            raise damaged("a number in it has no end")
        self._count = len(packed) if self._bits < 0x80 else int(self._counts()[-1])

    def __len__(self) -> int:
        return self._count

    @property
    def values(self) -> Array:
        """All values, int64 `[n]`."""
        if self._bits < 0x80:  # one byte for each value: flags, and other small numbers
            return self._packed.astype(_INT64)
        return self.read(0, self._count, _INT64)

    def read(self, start: int, stop: int, dtype: np.dtype[Any]) -> Array:
        """Return values as an element type; CorruptDataError for one that it cannot hold."""
        if self._bits < (2 if dtype.kind == "b" else 0x80):
            return self._packed[start:stop].astype(dtype)
        if dtype == np.int64 and stop - start == self._count:
            return _varints(self._packed, self._count)
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
        if self._count == len(self._packed):
            return self._packed[start:stop].astype(np.int64)
        return _varints(self._packed[self._place(start) : self._place(stop)], stop - start)

    def _place(self, number: int) -> int:
        """Return the offset after the first `number` values."""
        if not number:
            return 0
        if number == self._count:
            return len(self._packed)
        before = self._counts()
        block = int(np.searchsorted(before, number, side="left")) - 1
        ends = np.flatnonzero(self._packed[block * _BLOCK : (block + 1) * _BLOCK] < 0x80)
        return block * _BLOCK + int(ends[number - int(before[block]) - 1]) + 1

    def _counts(self) -> Array:
        """Return the number of values that end before each block of bytes, and the total."""
        if self._before is _NOT_COUNTED:
            starts = range(0, len(self._packed), _BLOCK)
            counts = [np.count_nonzero(self._packed[start : start + _BLOCK] < 0x80) for start in starts]
            self._before = np.concatenate(([0], np.cumsum(np.array(counts, np.int64))))
        return self._before


class Strings:
    """A list of byte strings; `spans`, int64 `[n, 2]`, are the offsets in `data` at which each begins and ends."""

    __slots__ = ("data", "spans")

    def __init__(self, data: bytes, spans: Array) -> None:
        self.data, self.spans = data, spans

    def __len__(self) -> int:
        return len(self.spans)

    def read(self, start: int, stop: int) -> list[bytes]:
        """Return some of the strings."""
        data = self.data
        return [data[first:last] for first, last in self.spans[start:stop].tolist()]

    @property
    def longest(self) -> int:
        """Bytes of the longest string."""
        return int((self.spans[:, 1] - self.spans[:, 0]).max(initial=0))


Values: TypeAlias = Floats | Ints | Strings


def _varints(packed: Array, count: int) -> Array:
    """Decode `count` whole varints, by the compiled loop or with NumPy: one pass for each byte of the longest."""
    if _loops is not None:
        decoded = np.empty(count, np.int64)
        if not _loops.decode_varints(packed, decoded):
            raise damaged(f"a number has more than {_LONGEST_VARINT} bytes")
        return decoded
    ends = np.flatnonzero(packed < 0x80)
    starts = np.concatenate(([0], ends[:-1] + 1))[: len(ends)]
    lengths = ends - starts + 1
    longest = int(lengths.max(initial=0))
    if longest > _LONGEST_VARINT:
        raise damaged(f"a number has more than {_LONGEST_VARINT} bytes")
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


def damaged(why: str) -> CorruptDataError:
    """Return the error for bytes that are not a valid Example."""
    return CorruptDataError(f"not a sound Example: {why}")


_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5
_BYTES, _FLOATS, _INTS = 1, 2, 3
_ENTRY, _FEATURE = 1 << 3 | _LENGTH, 2 << 3 | _LENGTH
_KINDS = frozenset(kind << 3 | _LENGTH for kind in (_BYTES, _FLOATS, _INTS))
_FLOAT, _BYTE = np.dtype("<f4"), np.dtype(np.uint8)
_MOST_NAMES = 1 << 10
_NO_SPANS: Array = np.empty((0, 2), np.int64)


class EpisodeExample:
    """The lists of an Example by name, parsed in Python. CorruptDataError for bytes that are not an Example."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._lists: dict[str, tuple[int, int, int]] = {}
        try:
            self._find_lists()
        except (IndexError, UnicodeDecodeError) as error:
            raise damaged("it ends inside a field") from error

    @property
    def names(self) -> Sequence[str]:
        """The names of the lists; a list may be empty."""
        return tuple(self._lists)

    def get(self, name: str) -> Values | None:
        """Return a list by name, None if there is none."""
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
        """Parse the entry of the map at the offset `at`; return the offset after it.

        An entry has the name in field 1 and the Feature in field 2; the field number inside the Feature is the kind of
        its list. Entries in exactly this order, as all writers produce them, are parsed without a loop; others field by
        field.
        """
        data = self._data
        size, begin = (data[at + 1], at + 2) if data[at + 1] < 0x80 else _read_varint(data, at + 1)
        end = begin + size
        if data[at] != _ENTRY or end > stop:
            return self._take_field(at, stop)
        if data[begin] == _ENTRY and data[begin + 1] < 0x80:
            place = begin + 2 + data[begin + 1]
            name = data[begin + 2 : place]
            if place < end and data[place] == _FEATURE:
                size, place = (data[place + 1], place + 2) if data[place + 1] < 0x80 else _read_varint(data, place + 1)
                if place < end and place + size == end and data[place] in _KINDS:
                    kind = data[place] >> 3
                    size, place = (
                        (data[place + 1], place + 2) if data[place + 1] < 0x80 else _read_varint(data, place + 1)
                    )
                    if place + size == end:
                        self._lists[name.decode()] = kind, place, end
                        return end
        self._take_fields(begin, end)
        return end

    def _take_field(self, at: int, stop: int) -> int:
        """Parse a field of the Features, which may be an entry; return the offset after it."""
        number, wire, first, last = next(_fields(self._data, at, stop))
        if number == 1 and wire == _LENGTH:
            self._take_fields(first, last)
        return last

    def _take_fields(self, start: int, stop: int) -> None:
        """Parse an entry field by field."""
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
        """Return the spans of the packed values of a list; if it is not packed, the span of each value."""
        data = self._data
        if start < stop and data[start] == _ENTRY:
            size, place = (data[start + 1], start + 2) if data[start + 1] < 0x80 else _read_varint(data, start + 1)
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
            if data[at] != _ENTRY:  # not the tag of the only known field
                return [(first, last) for number, wire, first, last in _fields(data, start, stop)
                        if number == 1 and wire == _LENGTH]  # fmt: skip
            size = data[at + 1]
            at += 2
            if size >= 0x80:
                if data[at] < 0x80:  # two bytes, as for a small image: inline, since a call doubles the time
                    size, at = size & 0x7F | data[at] << 7, at + 1
                else:
                    size, at = _read_varint(data, at - 1)
            if at + size > stop:
                raise IndexError
            spans.append((at, at + size))
            at += size
        return spans


class FoundExample:
    """An Example whose lists were found by `compiled.find_lists`, which fills a row of `lists` for each name."""

    __slots__ = ("_data", "_lists", "_rows", "_spans")

    def __init__(self, data: bytes, rows: Mapping[str, int], lists: list[list[int]], spans: Array) -> None:
        self._data, self._rows, self._lists, self._spans = data, rows, lists, spans

    @property
    def names(self) -> Sequence[str]:
        """The names of the lists; a list may be empty."""
        lists = self._lists
        return [name for name, row in self._rows.items() if lists[row][0]]

    def get(self, name: str) -> Values | None:
        """Return a list by name, None if there is none."""
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
    """Parses the Examples of a dataset, which mostly have the same names. Not thread-safe.

    With `is_compiled` and numba installed, compiled loops find the lists of Examples whose names occurred before. The
    results are the same; importing the loops takes 0.4 s, the first time 2 s.
    """

    def __init__(self, *, is_compiled: bool = False) -> None:
        self._loops = warm() if is_compiled else None
        self._rows: dict[str, int] = {}
        self._names, self._ends = b"", np.zeros(0, np.int64)
        self._lists, self._spans = np.empty((0, 5), np.int64), np.empty((64, 2), np.int64)

    def parse(self, data: bytes) -> Example:
        """Parse an Example; CorruptDataError for bytes that are not one."""
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
        """Parse an Example in Python, and add its names to the known ones."""
        found = EpisodeExample(data)
        names = dict.fromkeys([*self._rows, *found.names])  # in the order in which they are written, mostly
        if len(names) <= _MOST_NAMES:
            encoded = [name.encode() for name in names]
            self._rows = {name: row for row, name in enumerate(names)}
            self._lists = np.empty((len(names), 5), np.int64)
            self._names, self._ends = b"".join(encoded), np.cumsum([*map(len, encoded)], dtype=np.int64)
        return found


def _fields(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, wire type, start and end of each field of a message; IndexError if a field is cut."""
    while at < stop:
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, at = _read_varint(data, at - 1)
        wire, start = tag & 7, at
        if wire == _LENGTH:
            size = data[at]
            start = at + 1
            if size >= 0x80:
                size, start = _read_varint(data, at)
            at = start + size
        elif wire == _VARINT:
            _, at = _read_varint(data, at)
        elif wire in (_FOUR, _EIGHT):
            at += 4 if wire == _FOUR else 8
        else:
            raise damaged(f"a field has the wire type {wire}, which is not used in one")
        if at > stop:
            raise IndexError
        yield tag >> 3, wire, start, at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read a varint; return its value and the offset after it."""
    value = 0
    for shift in range(0, 7 * _LONGEST_VARINT, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise damaged(f"a number has more than {_LONGEST_VARINT} bytes")


Listed: TypeAlias = Array | Sequence[bytes]
"""The values of a list to write: an array of floats or integers, or byte strings."""


def framed(data: bytes) -> list[memoryview]:
    """Return the parts of a TFRecord with this data: head, data and checksum."""
    length = struct.pack("<Q", len(data))
    head = length + struct.pack("<I", masked_crc(length))
    return [memoryview(part) for part in (head, data, struct.pack("<I", masked_crc(data)))]


def example_bytes(lists: Mapping[str, Listed]) -> bytes:
    """Encode an Example; lists are sorted by name, so that equal data have equal bytes."""
    entries = [
        _field(1, [*_field(1, [name.encode()]), *_field(2, _feature(lists[name]))]) for name in sorted(lists)
    ]  # fmt: skip
    return b"".join(_field(1, [part for entry in entries for part in entry]))


def _field(number: int, parts: Sequence[bytes]) -> list[bytes]:
    """Return the parts of a length-delimited field."""
    return [bytes([number << 3 | 2]), _packed_varint(sum(map(len, parts))), *parts]


def _feature(values: Listed) -> list[bytes]:
    if not isinstance(values, np.ndarray):
        return _field(1, [part for value in values for part in _field(1, [value])])
    flat = np.ascontiguousarray(values).reshape(-1)
    if flat.dtype.kind == "f":
        return _field(2, _field(1, [flat.astype("<f4").tobytes()]))
    return _field(3, _field(1, [packed_varints(flat.astype(np.int64))]))


def _packed_varint(number: int) -> bytes:
    made = bytearray()
    while number >= 0x80:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def packed_varints(values: Array) -> bytes:
    """Encode int64 numbers as varints, with one NumPy pass for each byte of the longest; negative ones have ten."""
    bits = values.view(np.uint64)
    lengths = np.ones(len(bits), np.int64)
    for byte in range(1, 10):
        longer = bits >= np.uint64(1 << 7 * byte)
        if not longer.any():
            break
        lengths += longer
    starts = np.cumsum(lengths) - lengths
    made = np.empty(int(lengths.sum()), np.uint8)
    for byte in range(int(lengths.max(initial=0))):
        which = np.flatnonzero(lengths > byte)
        group = (bits[which] >> np.uint64(7 * byte)).astype(np.uint8) & 0x7F
        made[starts[which] + byte] = group | ((lengths[which] > byte + 1).astype(np.uint8) << 7)
    return made.tobytes()
