"""Headers of objects in HDF5 files, read without libhdf5: the places in them that lead to a heap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

Read: TypeAlias = Callable[[int, int], bytes]
"""Returns so many bytes from an address on."""

_OLD_FILL, _FILL, _LAYOUT, _ATTRIBUTE, _CONTINUATION = 0x04, 0x05, 0x08, 0x0C, 0x10
_SHARED = 0x02
_LARGEST = 64 << 20
"""Bytes of a header that are read, at most."""


class Widths(NamedTuple):
    """How many bytes of a file an address and a size take."""

    address: int = 8
    size: int = 8


def attribute_data(read: Read, at: int, widths: Widths, name: bytes) -> Iterator[bytes]:
    """Yield the stored data of an attribute, with what fills its message up; none where the header does not have it.

    Attributes that are elsewhere have checksums.
    """
    for kind, data in _messages(read, at, widths):
        if kind != _ATTRIBUTE or len(data) < 9:
            continue
        version, sizes = data[0], [int.from_bytes(data[place : place + 2], "little") for place in (2, 4, 6)]
        place = 9 if version == 3 else 8
        if data[place : place + sizes[0]].split(b"\0")[0] == name:
            yield data[place + sum(-(-size // 8) * 8 if version == 1 else size for size in sizes) :]


def fill_values(read: Read, at: int, widths: Widths) -> Iterator[bytes]:
    """Yield the fill values of a dataset."""
    for kind, data in _messages(read, at, widths):
        if kind in (_OLD_FILL, _FILL):
            place = 0 if kind == _OLD_FILL else 2 if data[:1] == b"\3" else 4
            size = int.from_bytes(data[place : place + 4], "little")
            if 0 < size <= len(data) - place - 4:
                yield data[place + 4 : place + 4 + size]


def compact_data(read: Read, at: int, widths: Widths) -> Iterator[bytes]:
    """Yield the data of a dataset that are in its header."""
    for kind, data in _messages(read, at, widths):
        if kind == _LAYOUT and data[1:2] == b"\0":
            yield data[4 : 4 + int.from_bytes(data[2:4], "little")]


def _messages(read: Read, at: int, widths: Widths) -> Iterator[tuple[int, bytes]]:
    """Yield type and data of each message that is in a header itself; none from damage on."""
    head = read(at, 32)
    if head[:4] == b"OHDR":
        form = _MessageForm.of(head[5])
        place = 6 + (16 if head[5] & 0x20 else 0) + (4 if head[5] & 0x10 else 0)
        wide = 1 << (head[5] & 3)
        blocks = [(at + place + wide, int.from_bytes(head[place : place + wide], "little"))]
    else:
        form = _OLD
        blocks = [(at + 16, int.from_bytes(head[8:12], "little"))]
    left = _LARGEST
    for number, (begin, size) in enumerate(blocks):  # which grows
        left -= size
        data = read(begin, size) if size and left >= 0 else b""
        for kind, flags, body in form.messages(data[form.start : len(data) - form.end] if number else data):
            if kind == _CONTINUATION:
                parts = body[: widths.address], body[widths.address :][: widths.size]
                block = int.from_bytes(parts[0], "little"), int.from_bytes(parts[1], "little")
                if block not in blocks:
                    blocks.append(block)
            elif not flags & _SHARED:
                yield kind, body


class _MessageForm(NamedTuple):
    """How messages begin: the bytes of their type, and all; what comes before and after them in later blocks."""

    type_bytes: int
    head: int
    start: int = 0
    end: int = 0

    @classmethod
    def of(cls, flags: int) -> _MessageForm:
        """The form in a header of version 2 with these flags: the order of creation may be with each message."""
        return cls(1, 6 if flags & 4 else 4, 4, 4)

    def messages(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yield type, flags and data of the messages in a block."""
        place, wide = 0, self.type_bytes
        while place + self.head <= len(data):
            kind = int.from_bytes(data[place : place + wide], "little")
            length = int.from_bytes(data[place + wide : place + wide + 2], "little")
            flags = data[place + wide + 2]
            place += self.head
            yield kind, flags, data[place : place + length]
            place += length


_OLD = _MessageForm(2, 8)
