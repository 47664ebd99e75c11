"""Heaps of HDF5 files, which have text and arrays of variable length: none that is damaged keeps a reader busy.

libhdf5 goes through the objects of a heap by the sizes that they state, and never ends where one states none. So a
heap is checked when libhdf5 asks for its bytes, which is the same for attributes and datasets of every layout. That
needs a file whose bytes Python reads. Rows of numbers need none of this, and are faster without.

A value is a reference: its length, the place of the heap, and the number of the object there. libhdf5 clears as much
memory as the length states, up to 4 GiB, before it compares that with the object.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator

from h5py import h5t

from .h5_headers import Widths

_SIGNATURE = b"GCOL"
_SIZE_AT = 8
"""Where a heap, and each object in it, states its size, after a number and what is reserved."""
_ADDRESSES = {2: "H", 4: "I", 8: "Q"}
_MOST_OBJECTS = 1 << 16
"""Numbers of objects have 16 bits, and 0 means free space."""
_KEPT_HEAPS = 8
_WITHOUT_HEAP = frozenset({h5t.INTEGER, h5t.FLOAT, h5t.ENUM, h5t.BITFIELD, h5t.OPAQUE, h5t.TIME})


_KIND_AT = 3
"""Where an encoded type has the kind of its class, after two bytes of the encoding and one of the class."""


def is_in_heap(kind: h5t.TypeID) -> bool:
    """Return whether values of this type, or parts of them, are in a heap; OSError for an unknown kind of these.

    Reading values of such a kind would crash libhdf5.
    """
    name = kind.get_class()
    if name in _WITHOUT_HEAP:
        return False
    if name == h5t.STRING:
        return bool(kind.is_variable_str())
    if name == h5t.ARRAY:
        return is_in_heap(kind.get_super())
    if name == h5t.COMPOUND:
        return any(is_in_heap(kind.get_member_type(number)) for number in range(kind.get_nmembers()))
    if name == h5t.VLEN:
        if kind.encode()[_KIND_AT] & 0xF:
            raise OSError("its type is damaged")
        is_in_heap(kind.get_super())
    return not (name == h5t.REFERENCE and kind.equal(h5t.STD_REF_OBJ))


def unit_in_heap(kind: h5t.TypeID) -> int:
    """Return the bytes of an element of text, or of an array of variable length; 0 for any other type."""
    if kind.get_class() == h5t.STRING:
        return int(kind.is_variable_str())
    if kind.get_class() != h5t.VLEN or is_in_heap(inner := kind.get_super()):
        return 0
    return int(inner.get_size())


class CheckedFile(io.RawIOBase):
    """A file with the methods that h5py's `fileobj` driver calls, open at `descriptor`, which it closes.

    A heap is checked before libhdf5 gets it: OSError for a damaged one, and `damage` names the first.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._at = 0
        self._size = os.fstat(descriptor).st_size
        self._heaps: dict[int, dict[int, int]] = {}
        self.widths = Widths()
        self.base = 0
        """The byte that addresses count from, the first of the superblock, which states the widths, too."""
        self.damage = ""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            found = os.preadv(self._descriptor, [buffer], self._at)
        except OverflowError as error:
            raise OSError(f"byte {self._at} is beyond every file: an address in it is damaged") from error
        if bytes(buffer[:4]) == _SIGNATURE:  # h5py's buffer has a format of its own, and never equals bytes
            try:
                for _ in self._objects(self._at, bytes(buffer[:found])):
                    pass
            except ValueError as error:
                self.damage = self.damage or str(error)
                raise OSError(self.damage) from error
        self._at += found
        return found

    def read_at(self, at: int, size: int) -> bytes:
        """Read bytes from an address on: fewer where the file ends, none beyond every file."""
        try:
            return os.pread(self._descriptor, min(size, self._size), self.base + at)
        except OverflowError:
            return b""

    @property
    def reference_bytes(self) -> int:
        """The bytes of a reference: two numbers, and an address between them."""
        return 8 + self.widths.address

    def require_references(self, data: bytes, unit: int, count: int) -> None:
        """Raise OSError unless so many references lead to objects of their length, in elements of `unit` bytes."""
        address = _ADDRESSES.get(self.widths.address)
        if address is None:
            raise OSError(f"its addresses have {self.widths.address} bytes")
        form = struct.Struct(f"<I{address}I")
        if len(data) < count * form.size:
            raise OSError("the text in it was cut")
        for length, at, number in form.iter_unpack(data[: count * form.size]):
            if length and self._heap(at).get(number) != length * unit:
                raise OSError(f"a text of {length * unit:,} bytes is not in the heap at byte {at:,}")

    def _heap(self, at: int) -> dict[int, int]:
        """Return the bytes of each object of the heap at an address by its number; none for what is no sound heap."""
        known = self._heaps.get(at)
        if known is None:
            start = self.read_at(at, 4096)
            try:
                known = dict(self._objects(self.base + at, start)) if start[:4] == _SIGNATURE else {}
            except ValueError:
                known = {}
            if len(self._heaps) == _KEPT_HEAPS:
                self._heaps.clear()
            self._heaps[at] = known
        return known

    def _objects(self, at: int, start: bytes) -> Iterator[tuple[int, int]]:
        """Yield number and size of the objects in the heap that begins with `start`; ValueError for a damaged one."""
        wide, what = self.widths.size, f"the heap of text at byte {at:,}"
        head = -(-(_SIZE_AT + wide) // 8) * 8
        size = int.from_bytes(start[_SIZE_AT : _SIZE_AT + wide], "little")
        if not head <= size <= self._size - at:
            raise ValueError(f"{what} states {size:,} bytes, and the file has {self._size - at:,} from there on")
        data = start if size <= len(start) else self.read_at(at - self.base, size)
        place = head
        for _ in range(_MOST_OBJECTS + 1):
            if place + head > size:  # the rest is too short for an object
                return
            number = int.from_bytes(data[place : place + 2], "little")
            length = int.from_bytes(data[place + _SIZE_AT : place + _SIZE_AT + wide], "little")
            taken = head + -(-length // 8) * 8 if number else length
            if not 0 < taken <= size - place:
                raise ValueError(f"{what} has an object of {taken:,} bytes where {size - place:,} are left")
            if number:
                yield number, length
            place += taken
        raise ValueError(f"{what} has more than {_MOST_OBJECTS:,} objects")

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()
