"""Opens untrusted HDF5 files safely, and reads rows and values from them.

All of rbtool opens HDF5 files for reading with this module.

An HDF5 file can refer to any file of the machine: by external links, by external storage of a dataset, and by virtual
datasets. An untrusted file must not make us read other files, so its whole structure is checked before anything is
read. Compressed chunks are checked as well, because libhdf5 unpacks a chunk completely, however large it is, and
compares its size only afterwards.

libhdf5 keeps one state for each file of a process, and refuses to open a file again with other settings for locking or
closing. A file that is read through a Python object counts as a different file, so it can be opened in addition. The
structure is checked in such a file, because virtual datasets and fill values of text are in heaps.

Text and arrays of variable length are stored in heaps. A value is a reference: its length, the address of the heap, and
the number of the object in it.

    reference   length 5 | heap at 4096 | object 2             heap    GCOL | size | object 1 … | object 2: "hello" | …

libhdf5 has two weaknesses here. It clears as much memory as the length states, up to 4 GiB, before it compares the
length with the object. And it walks through the objects of a heap by the sizes that they state, endlessly if one states
zero. A heap is therefore checked at the moment when libhdf5 reads its bytes, which works for attributes and for
datasets of every layout. For this, Python has to read the bytes of the file; rows of numbers are read without it, which
is faster. References in attributes and in compact data are read from object headers without libhdf5.
"""

from __future__ import annotations

import atexit
import io
import math
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import h5py
import numpy as np
from h5py import Group, h5a, h5d, h5f, h5fd, h5g, h5i, h5l, h5o, h5p, h5t, h5z

from ..errors import CorruptDataError, UsageError
from ..format.contracts import Array
from ..format.files import open_regular, require_regular
from ..format.open_files import pread_into

Read: TypeAlias = Callable[[int, int], bytes]
"""Reads a number of bytes at an address."""

_OLD_FILL, _FILL, _LAYOUT, _ATTRIBUTE, _CONTINUATION = 0x04, 0x05, 0x08, 0x0C, 0x10
_SHARED = 0x02
_LARGEST = 64 << 20
"""The largest header that is read, in bytes."""


class Widths(NamedTuple):
    """How many bytes an address and a size take in a file."""

    address: int = 8
    size: int = 8


def attribute_data(read: Read, at: int, widths: Widths, name: bytes) -> Iterator[bytes]:
    """Yield the stored data of an attribute, with the padding of its message.

    Nothing is yielded if the header does not contain the attribute. It is then stored in a place with checksums.
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
    """Yield the data of a dataset with a compact layout, which is stored in its header."""
    for kind, data in _messages(read, at, widths):
        if kind == _LAYOUT and data[1:2] == b"\0":
            yield data[4 : 4 + int.from_bytes(data[2:4], "little")]


def _messages(read: Read, at: int, widths: Widths) -> Iterator[tuple[int, bytes]]:
    """Yield type and data of each message in an object header, until damage is found.

    Messages that are shared with other headers are left out.
    """
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
    for number, (begin, size) in enumerate(blocks):  # `blocks` grows meanwhile
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
    """The layout of the messages in an object header, in bytes.

    Attributes:
        type_bytes: the size of a message's type.
        head: the size of everything before a message's data.
        start: what precedes the messages in blocks after the first one.
        end: what follows them there.
    """

    type_bytes: int
    head: int
    start: int = 0
    end: int = 0

    @classmethod
    def of(cls, flags: int) -> _MessageForm:
        """Return the layout in a header of version 2 with these flags, which say whether messages are numbered."""
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


_SIGNATURE = b"GCOL"
_SIZE_AT = 8
"""Offset of the size in a heap and in each of its objects, after a number and reserved bytes."""
_ADDRESSES = {2: "H", 4: "I", 8: "Q"}
_MOST_OBJECTS = 1 << 16
"""Numbers of objects have 16 bits, and 0 means free space."""
_KEPT_HEAPS = 8
_WITHOUT_HEAP = frozenset({h5t.INTEGER, h5t.FLOAT, h5t.ENUM, h5t.BITFIELD, h5t.OPAQUE, h5t.TIME})


_KIND_AT = 3
"""Offset of the kind in an encoded type, after two bytes of the encoding and one of the class."""


def is_in_heap(kind: h5t.TypeID) -> bool:
    """Return whether values of this type, or parts of them, are in a heap.

    Raises:
        OSError: the type is damaged: reading its values would crash libhdf5.
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
    """Return the bytes of an element of text or of an array of variable length; 0 for any other type."""
    if kind.get_class() == h5t.STRING:
        return int(kind.is_variable_str())
    if kind.get_class() != h5t.VLEN or is_in_heap(inner := kind.get_super()):
        return 0
    return int(inner.get_size())


class CheckedFile(io.RawIOBase):
    """A file with the methods that h5py's `fileobj` driver calls; it owns `descriptor`, and closes it.

    Each heap is checked before libhdf5 gets its bytes: OSError if it is damaged. `damage` describes the first one.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._at = 0
        self._size = os.fstat(descriptor).st_size
        self._heaps: dict[int, dict[int, int]] = {}
        self.widths = Widths()
        self.base = 0
        """The offset from which addresses count: the first byte of the superblock, which also states the widths."""
        self.damage = ""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            found = os.preadv(self._descriptor, [buffer], self._at)
        except OverflowError as error:
            raise OSError(f"byte {self._at} is beyond any file: an address in it is damaged") from error
        if bytes(buffer[:4]) == _SIGNATURE:  # without bytes(), h5py's buffer never equals bytes: its format differs
            try:
                for _ in self._objects(self._at, bytes(buffer[:found])):
                    pass
            except ValueError as error:
                self.damage = self.damage or str(error)
                raise OSError(self.damage) from error
        self._at += found
        return found

    def read_at(self, at: int, size: int) -> bytes:
        """Read bytes at an address: fewer at the end of the file, and none at an address that is no offset at all."""
        try:
            return os.pread(self._descriptor, min(size, self._size), self.base + at)
        except OverflowError:
            return b""

    @property
    def reference_bytes(self) -> int:
        """The bytes of a reference: a length, an address and an object number."""
        return 8 + self.widths.address

    def require_references(self, data: bytes, unit: int, count: int) -> None:
        """Raise OSError unless the first `count` references in `data` refer to objects of the length that they state.

        `unit` is the number of bytes of an element: lengths count elements.
        """
        address = _ADDRESSES.get(self.widths.address)
        if address is None:
            raise OSError(f"its addresses have {self.widths.address} bytes")
        form = struct.Struct(f"<I{address}I")
        if len(data) < count * form.size:
            raise OSError("the text in it is truncated")
        for length, at, number in form.iter_unpack(data[: count * form.size]):
            if length and self._heap(at).get(number) != length * unit:
                raise OSError(f"a text of {length * unit:,} bytes is not in the heap at byte {at:,}")

    def _heap(self, at: int) -> dict[int, int]:
        """Return the size of each object in the heap at an address, by number; empty if it is no heap, or damaged."""
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
        """Yield number and size of the objects in a heap at the offset `at`; ValueError if it is damaged.

        `start` are its first bytes.
        """
        wide, what = self.widths.size, f"the heap of text at byte {at:,}"
        head = -(-(_SIZE_AT + wide) // 8) * 8
        size = int.from_bytes(start[_SIZE_AT : _SIZE_AT + wide], "little")
        if not head <= size <= self._size - at:
            raise ValueError(f"{what} states {size:,} bytes, but the file has only {self._size - at:,} from there on")
        data = start if size <= len(start) else self.read_at(at - self.base, size)
        place = head
        for _ in range(_MOST_OBJECTS + 1):
            if place + head > size:  # no room for another object
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


LARGEST = 512 << 20
"""The largest size of a chunk in memory, and the size up to which a dataset may state more than is stored."""
_HARMLESS = 1100 << 20
"""Chunks whose stored bytes cannot unpack to more than this are not tested; h5py makes chunks of up to 1 MiB."""
_INFLATES = 1032
"""One byte of zlib unpacks to at most this many bytes."""
_PIECE = 1 << 20
_SLACK = 4096
"""Overhead of incompressible data, in addition to one percent of its size."""
_NOT_PACKING = {h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32}


def unbounded_chunks(dataset: h5d.DatasetID, made: h5p.PropDCID) -> str:
    """Return what is wrong with the compressed chunks of a dataset; an empty text if nothing is.

    `made` are the dataset's creation properties. Raises libhdf5's error if not all chunks can be listed.
    """
    filters = [made.get_filter(number)[0] for number in range(made.get_nfilters())]
    packing = [kind for kind in filters if kind not in _NOT_PACKING]
    if not packing:
        return ""
    size = math.prod(made.get_chunk()) * dataset.get_type().get_size()
    if size > LARGEST:
        return f"is compressed in chunks of {size:,} bytes, but at most {LARGEST:,} can be read at a time"
    if len(packing) > 1:
        return "is compressed by two methods at once"
    large: list[tuple[tuple[int, ...], int]] = []

    def look(chunk: h5d.StoreInfo) -> None:
        if chunk.size * _INFLATES > _HARMLESS:
            large.append((chunk.chunk_offset, chunk.size))

    # A damaged index of chunks may have a size of 0, and still lead to the chunks before the damage.
    if not 0 < dataset.get_storage_size() * _INFLATES <= _HARMLESS:
        dataset.chunk_iter(look)
    for place, stored in large:
        if stored > size + size // 100 + _SLACK:
            return f"has a chunk of {stored:,} stored bytes for {size:,} bytes of data"
        if packing == [h5z.FILTER_DEFLATE] and _inflates_beyond(dataset, place, filters, size):
            return f"has a chunk that unpacks to more than the {size:,} bytes of a chunk"
    return ""


def absurd_size(dataset: h5d.DatasetID) -> str:
    """Return a message if a dataset states more data than its stored bytes can unpack to; otherwise an empty text."""
    size = math.prod(dataset.shape) * dataset.get_type().get_size()
    if size <= LARGEST or size <= (stored := dataset.get_storage_size()) * _INFLATES:
        return ""
    return f"states {size:,} bytes of data, but only {stored:,} bytes are stored"


def _inflates_beyond(dataset: h5d.DatasetID, place: tuple[int, ...], filters: list[int], size: int) -> bool:
    """Return whether a chunk unpacks to more than `size` bytes. It is unpacked in pieces, which are discarded."""
    skipped, left = dataset.read_direct_chunk(place)
    if skipped >> filters.index(h5z.FILTER_DEFLATE) & 1:
        return False
    inflate, total = zlib.decompressobj(), 0
    try:
        while left and not inflate.eof and total <= size + _SLACK:
            total += len(inflate.decompress(left, _PIECE))
            left = inflate.unconsumed_tail
    except zlib.error:  # libhdf5 refuses it, too
        return False
    return total > size + _SLACK


_DEEPEST = 64
_KEPT_STRUCTURE = 1 << 20
_UNREADABLE = (OSError, RuntimeError, LookupError, TypeError, ValueError)


def open_h5(path: Path, access: h5p.PropFAID | None = None, place: Path | None = None) -> h5f.FileID:
    """Open a file for reading, after checking that all of its data is in the file itself.

    Every link must be a hard link, no group may be linked twice, no dataset may be virtual or stored outside of the
    file, and no chunk may unpack to more than its size. Objects that cannot be opened are skipped: reading them fails
    as well. Values in heaps must only be read with `HeapValues`.

    Args:
        path: the file's name in messages.
        access: libhdf5's access properties.
        place: the file to open; default `path`.

    Raises:
        CorruptDataError: one of these rules is violated, or a group or the compressed chunks cannot be listed.
        FormatError: it is a FIFO or a device.
        UsageError: this process has the file open for writing, with a lock that excludes readers.
        OSError: libhdf5 cannot read the file.
    """
    file = _open(path, access, place or path)
    try:
        with _checked(file) as opened:
            _require_contained(opened, path)
    except BaseException:
        file.close()
        raise
    return file


def small_cache() -> h5p.PropFAID:
    """Return access properties for a file whose parts are read once.

    By default HDF5 caches up to 32 MB of metadata, which takes 400 MB of memory. For parts that are read once, a cache
    of 1 MB is even faster.
    """
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_file_locking(True, True)  # ignore file systems without locks
    cache = access.get_mdc_config()
    cache.set_initial_size = True
    cache.initial_size = cache.min_size = cache.max_size = _KEPT_STRUCTURE
    cache.incr_mode = cache.flash_incr_mode = cache.decr_mode = 0
    access.set_mdc_config(cache)
    return access


class Checked(NamedTuple):
    """A file that libhdf5 reads through Python, and the object through which it does."""

    file: h5f.FileID
    data: CheckedFile


def open_checked(file: h5f.FileID) -> Checked:
    """Open a file again, with checks of its heaps; a file that is already read through Python is returned as it is."""
    if file.get_access_plist().get_driver() != h5fd.SEC2:
        return Checked(file, _data_of[h5f.get_name(file)])
    data = CheckedFile(os.dup(file.get_vfd_handle()))
    return Checked(_open_data(data, small_cache()), data)


@contextmanager
def _checked(file: h5f.FileID) -> Iterator[Checked]:
    opened = open_checked(file)
    try:
        yield opened
    finally:
        if opened.file is not file:
            opened.file.close()


_data_of: weakref.WeakValueDictionary[bytes, CheckedFile] = weakref.WeakValueDictionary()
_opened: weakref.WeakValueDictionary[bytes, h5f.FileID] = weakref.WeakValueDictionary()
"""Open files by name. They are not in a set, because h5py hashes a file by its root group, which may be damaged."""


def _open_data(data: CheckedFile, access: h5p.PropFAID) -> h5f.FileID:
    """Open a file that libhdf5 reads through `data`, which is closed on failure."""
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_fileobj_driver(h5fd.fileobj_driver, data)
    name = repr(data).encode()
    try:
        file = h5f.open(name, h5f.ACC_RDONLY, fapl=access)
        made = file.get_create_plist()
        data.widths, data.base = Widths(*made.get_sizes()), made.get_userblock()
    except BaseException:
        data.close()
        raise
    _data_of[name] = data
    _opened[name] = file
    return file


@atexit.register
def _close_all() -> None:
    """Close the files that are read through Python, before Python ends: libhdf5 would close them later."""
    for file in list(_opened.values()):
        if file.valid:
            file.close()


def root_members(path: Path, group: str = "") -> list[str]:
    """List the names in the root group of a file, or in another group, without reading anything else.

    Empty if there is no such group; raises what `open_h5` raises.
    """
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_file_locking(False, False)
    file = _open(path, access, path)
    try:
        with _checked(file) as opened:
            inside, name = h5g.open(opened.file, b"/"), group.encode()
            if name:
                if name not in members(inside) or inside.links.get_info(name).type != h5l.TYPE_HARD:
                    return []
                inside = h5o.open(inside, name)
                if not isinstance(inside, h5g.GroupID):
                    return []
            return [one.decode(errors="surrogateescape") for one in members(inside)]
    finally:
        file.close()


def members(group: h5g.GroupID) -> list[bytes]:
    """List the names in a group."""
    names: list[bytes] = []
    h5g.iterate(group, names.append)
    return names


def datasets_in(file: Any) -> Iterator[tuple[str, Any]]:
    """Yield everything in an open h5py file except groups, with its path, sorted."""
    pending: list[tuple[str, Any]] = [("", file)]
    found: list[tuple[str, Any]] = []
    while pending:
        prefix, group = pending.pop()
        for name in group:
            path, item = f"{prefix}{name}", group.get(name)
            if isinstance(item, Group):
                pending.append((f"{path}/", item))
            else:
                found.append((path, item))
    yield from sorted(found, key=lambda one: one[0])


def _require_contained(opened: Checked, path: Path) -> None:
    """Raise CorruptDataError for the first object that leads out of the file, in a circle, or to a damaged heap."""
    root = h5g.open(opened.file, b"/")
    seen = {h5o.get_info(root).addr}
    above: list[tuple[str, h5g.GroupID, Iterator[bytes]]] = [("", root, _hard_members(root, "", path))]
    while above:
        prefix, group, left = above[-1]
        name = next(left, None)
        if name is None:
            above.pop()
            continue
        where = f"{prefix}/{name.decode(errors='backslashreplace')}"
        try:
            found = h5o.open(group, name)
        except _UNREADABLE:
            if opened.data.damage:
                raise CorruptDataError(f"{path} is damaged: {opened.data.damage}") from None
            continue
        why = _refusal(found, opened.data) if isinstance(found, h5d.DatasetID) else ""
        if why:
            raise _refused(path, f"the dataset {where} {why}")
        if isinstance(found, h5g.GroupID):
            address = h5o.get_info(found).addr
            if address in seen:
                raise _refused(path, f"the group {where} is linked from more than one place")
            if len(above) == _DEEPEST:
                raise _refused(path, f"{where} is nested more than {_DEEPEST} groups deep")
            seen.add(address)
            above.append((where, found, _hard_members(found, where, path)))


def _hard_members(group: h5g.GroupID, where: str, path: Path) -> Iterator[bytes]:
    """Yield the names in a group, after checking that none is a soft, external or user-defined link."""
    names: list[bytes] = []
    others: list[str] = []

    def look(name: bytes, link: h5l.LinkInfo) -> bool | None:
        if link.type == h5l.TYPE_HARD:
            names.append(name)
            return None
        others.append(name.decode(errors="backslashreplace"))
        return True  # stops the iteration: an exception must not pass through libhdf5

    try:
        group.links.iterate(look, info=True)
    except _UNREADABLE as error:
        # Members that come after the damage could still be opened by name.
        raise CorruptDataError(f"{path} is damaged: the group {where or '/'} cannot be listed") from error
    if others:
        raise _refused(path, f"{where}/{others[0]} is a link to another name or to another file")
    yield from names


def _refusal(dataset: h5d.DatasetID, data: CheckedFile) -> str:
    """Return why a dataset must not be read; an empty text if it may be read."""
    # A dataset with an offset in the file may still have external storage, which libhdf5 then reads.
    try:
        if is_in_heap(dataset.get_type()):
            _require_fill(dataset, data)
        made = dataset.get_create_plist()
        if made.get_layout() == h5d.VIRTUAL or made.get_external_count():
            return "takes its data from other files or datasets"
    except _UNREADABLE:
        return "has an unreadable header: the file is damaged or truncated"
    try:
        return unbounded_chunks(dataset, made) if made.get_layout() == h5d.CHUNKED else ""
    except _UNREADABLE:  # libhdf5 would still read the chunks before the damage
        return "has an unreadable index of chunks: the file is damaged or truncated"


def _require_fill(dataset: h5d.DatasetID, data: CheckedFile) -> None:
    """Raise OSError unless a fill value in a heap can be read: libhdf5 reads it together with the properties."""
    for value in fill_values(data.read_at, h5o.get_info(dataset).addr, data.widths):
        if unit := unit_in_heap(dataset.get_type()):
            data.require_references(value, unit, 1)


def _refused(path: Path, why: str) -> CorruptDataError:
    return CorruptDataError(
        f"{path}: {why}; expected plain groups and datasets whose data are in the file itself, in chunks of the "
        "size that they state",
        hint="if you trust it, copy its data into one new file with h5py",
    )


def _open(path: Path, access: h5p.PropFAID | None, place: Path) -> h5f.FileID:
    require_regular(place)
    access = access or h5p.create(h5p.FILE_ACCESS)
    access.set_fapl_sec2()  # even if the environment selects another driver
    try:
        return h5f.open(os.fsencode(place), h5f.ACC_RDONLY, fapl=access)
    except OSError as error:
        if _is_written_to(place):
            raise UsageError(f"{path} is open for writing in this process", hint="close it there first") from error
        try:
            return _open_data(CheckedFile(open_regular(place)), access.copy())
        except OSError:
            raise error from None


def _is_written_to(path: Path) -> bool:
    """Whether libhdf5 has a file open for writing in this process."""
    for held in h5f.get_obj_ids(h5f.OBJ_ALL, h5f.OBJ_FILE):
        try:
            if held.get_intent() & h5f.ACC_RDWR and path.samefile(os.fsdecode(h5f.get_name(held))):
                return True
        except (OSError, ValueError):  # it is not a file on the disk, or was removed
            continue
    return False


_BLOCK = 1 << 20


class HeapValues:
    """Reads values of an open file that may be in heaps. The file is opened again when the first such value is read.

    Damaged values raise one of libhdf5's errors, in bounded time.
    """

    def __init__(self, file: h5f.FileID) -> None:
        self._file = file
        self._held: Checked | None = None
        self._chunks: dict[bytes, list[tuple[int, int, int]]] = {}

    def attribute(self, owner: h5g.GroupID | h5d.DatasetID, name: str) -> Any:
        """Read an attribute of a group or a dataset of the file, as h5py gives it."""
        attribute = h5a.open(owner, name.encode())
        kind, count = attribute.get_type(), attribute.get_space().get_simple_extent_npoints()
        wrapped = h5py.Dataset if isinstance(owner, h5d.DatasetID) else h5py.Group
        if not is_in_heap(kind):
            return wrapped(owner).attrs[name]
        file, data = self._opened()
        again = h5o.open(file, h5i.get_name(owner))
        if unit := unit_in_heap(kind):
            for stored in attribute_data(data.read_at, h5o.get_info(again).addr, data.widths, name.encode()):
                data.require_references(stored, unit, count)
        return wrapped(again).attrs[name]

    def dataset(self, name: str | bytes, start: int = 0, stop: int | None = None) -> h5py.Dataset:
        """Return a dataset after checking that rows `[start, stop)`, by default all, are safe to read."""
        file, data = self._opened()
        name = name.encode() if isinstance(name, str) else name
        dataset = h5d.open(file, name)
        kind = dataset.get_type()
        if is_in_heap(kind) and (unit := unit_in_heap(kind)):
            for stored in self._references(name, dataset, start, stop):
                data.require_references(stored, unit, len(stored) // data.reference_bytes)
        return h5py.Dataset(dataset)

    def close(self) -> None:
        """Close the file that was opened again."""
        if self._held is not None and self._held.file is not self._file:
            self._held.file.close()

    def _opened(self) -> Checked:
        if self._held is None:
            self._held = open_checked(self._file)
        return self._held

    def _references(self, name: bytes, dataset: h5d.DatasetID, start: int, stop: int | None) -> Iterator[bytes]:
        """Yield the references of rows, and possibly of others; none for compressed chunks, which have checksums."""
        data, made = self._opened().data, dataset.get_create_plist()
        layout, shape = made.get_layout(), dataset.shape or (1,)
        if layout == h5d.COMPACT:
            yield from compact_data(data.read_at, h5o.get_info(dataset).addr, data.widths)
        elif layout == h5d.CONTIGUOUS and dataset.get_storage_size():
            place = dataset.get_offset()
            row = data.reference_bytes * math.prod(shape[1:])
            yield from self._pieces(place + start * row, place + (shape[0] if stop is None else stop) * row)
        elif layout == h5d.CHUNKED and not made.get_nfilters():
            rows = made.get_chunk()[0]
            for first, place, size in self._chunks_of(name, dataset):
                if first + rows > start and (stop is None or first < stop):
                    yield from self._pieces(place, place + size)

    def _pieces(self, place: int, end: int) -> Iterator[bytes]:
        """Yield the references between two offsets in blocks; OSError if the file ends before."""
        data = self._opened().data
        while place < end:
            size = min(_BLOCK * data.reference_bytes, end - place)
            found = data.read_at(place - data.base, size)
            if len(found) < size:
                raise OSError(f"{size - len(found):,} bytes of it are missing")
            yield found
            place += size

    def _chunks_of(self, name: bytes, dataset: h5d.DatasetID) -> list[tuple[int, int, int]]:
        """List first row, offset and size of each chunk."""
        found = self._chunks.get(name)
        if found is None:
            found = self._chunks[name] = []

            def look(chunk: h5d.StoreInfo) -> None:
                found.append((chunk.chunk_offset[0], chunk.byte_offset, chunk.size))

            dataset.chunk_iter(look)
        return found


class H5Rows:
    """Reads the rows of a dataset of numbers into fresh arrays in this machine's byte order.

    Rows that are contiguous in the file, in the same form as in memory, are read without libhdf5, which takes longer
    for a few rows and holds the interpreter lock meanwhile. `path` is the file's name in messages.
    """

    def __init__(self, dataset: h5py.Dataset, path: Path) -> None:
        self.dataset = dataset
        self.shape: tuple[int, ...] = dataset.shape
        self.dtype: np.dtype[np.generic] = dataset.dtype.newbyteorder("=")
        self._path = path
        self._what = f"the rows of {dataset.name!r}"
        self._row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
        self._descriptor, self._begin = _place(dataset) or (-1, 0)

    def read(self, start: int, stop: int) -> Array:
        """Read rows `[start, stop)`; CorruptDataError, or an h5py error, if they do not exist."""
        rows = np.empty((stop - start, *self.shape[1:]), self.dtype)
        if not rows.size:
            return rows
        if self._descriptor < 0:
            self.dataset.read_direct(rows, np.s_[start:stop])
        else:
            begin = self._begin + start * self._row_bytes
            pread_into(rows, self._descriptor, self._path, begin, self._what)
        return rows


def _place(dataset: h5py.Dataset) -> tuple[int, int] | None:
    """Return libhdf5's descriptor of the file and the offset of the rows; None if only libhdf5 can read the rows."""
    made, file = dataset.id.get_create_plist(), dataset.file.id
    if made.get_layout() != h5d.CONTIGUOUS or file.get_access_plist().get_driver() != h5fd.SEC2:
        return None
    size = dataset.dtype.itemsize * math.prod(dataset.shape)
    begin = dataset.id.get_offset()  # None if nothing was ever written
    if begin is None or dataset.id.get_storage_size() != size or not dataset.dtype.isnative:
        return None
    if not dataset.id.get_type().equal(h5t.py_create(dataset.dtype, logical=True)):
        return None
    return int(file.get_vfd_handle()), int(begin)
