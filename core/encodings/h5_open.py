"""Opens HDF5 files for reading: the only module that does.

An HDF5 file can refer to any file of the machine: external links, the external storage of a dataset, virtual
datasets. An untrusted file must not read other files, so its whole structure is checked before anything is read.
So are compressed chunks: libhdf5 unpacks a chunk to its end, however large, and compares sizes afterwards.

libhdf5 keeps one state for each file of a process, and refuses to open a file again with another kind of locking or
of closing. A file that is read through a Python object is a different file to libhdf5: the structure is checked
through one, for virtual datasets and fill values of text are in heaps.
"""

from __future__ import annotations

import atexit
import math
import os
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from h5py import Group, h5d, h5f, h5fd, h5g, h5l, h5o, h5p, h5z

from ..errors import CorruptDataError, UsageError
from ..format.digest import open_regular, require_regular
from .h5_headers import Widths, fill_values
from .h5_heap import CheckedFile, is_in_heap, unit_in_heap

LARGEST = 512 << 20
"""Bytes that one chunk may take in memory, and any dataset may state."""
_HARMLESS = 1100 << 20
"""Bytes that no chunk of up to 1 MiB, which h5py makes, unpacks to; it is not unpacked to see."""
_INFLATES = 1032
"""How many bytes one byte of zlib can stand for, at most."""
_PIECE = 1 << 20
_SLACK = 4096
"""What data that do not compress take beyond their size, with one percent of it."""
_NOT_PACKING = {h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32}


def unbounded_chunks(dataset: h5d.DatasetID, made: h5p.PropDCID) -> str:
    """Return what is wrong with the compressed chunks of a dataset, whose properties are `made`; empty for nothing.

    Raises libhdf5's error where the chunks cannot all be listed.
    """
    filters = [made.get_filter(number)[0] for number in range(made.get_nfilters())]
    packing = [kind for kind in filters if kind not in _NOT_PACKING]
    if not packing:
        return ""
    size = math.prod(made.get_chunk()) * dataset.get_type().get_size()
    if size > LARGEST:
        return f"is compressed in chunks of {size:,} bytes, of which {LARGEST:,} can be read at a time"
    if len(packing) > 1:
        return "is compressed by two methods at once"
    large: list[tuple[tuple[int, ...], int]] = []

    def look(chunk: h5d.StoreInfo) -> None:
        if chunk.size * _INFLATES > _HARMLESS:
            large.append((chunk.chunk_offset, chunk.size))

    # An index that is damaged in one place can state no size at all, and leads to the chunks before it all the same.
    if not 0 < dataset.get_storage_size() * _INFLATES <= _HARMLESS:
        dataset.chunk_iter(look)
    for place, stored in large:
        if stored > size + size // 100 + _SLACK:
            return f"has a chunk of {stored:,} stored bytes that hold {size:,}"
        if packing == [h5z.FILTER_DEFLATE] and _inflates_beyond(dataset, place, filters, size):
            return f"has a chunk that unpacks to more than the {size:,} bytes of a chunk"
    return ""


def absurd_size(dataset: h5d.DatasetID) -> str:
    """Return that a dataset states more data than its stored bytes can hold; empty where it does not."""
    size = math.prod(dataset.shape) * dataset.get_type().get_size()
    if size <= LARGEST or size <= (stored := dataset.get_storage_size()) * _INFLATES:
        return ""
    return f"states {size:,} bytes of data, of which {stored:,} bytes are stored"


def _inflates_beyond(dataset: h5d.DatasetID, place: tuple[int, ...], filters: list[int], size: int) -> bool:
    """Unpack a chunk piece by piece, and keep none, to see whether it ends in time."""
    skipped, left = dataset.read_direct_chunk(place)
    if skipped >> filters.index(h5z.FILTER_DEFLATE) & 1:
        return False
    inflate, total = zlib.decompressobj(), 0
    try:
        while left and not inflate.eof and total <= size + _SLACK:
            total += len(inflate.decompress(left, _PIECE))
            left = inflate.unconsumed_tail
    except zlib.error:  # libhdf5 refuses it too
        return False
    return total > size + _SLACK


_DEEPEST = 64
_KEPT_STRUCTURE = 1 << 20
_UNREADABLE = (OSError, RuntimeError, LookupError, TypeError, ValueError)


def open_h5(path: Path, access: h5p.PropFAID | None = None, place: Path | None = None) -> h5f.FileID:
    """Open a file for reading that keeps all of its data in itself; `access` are libhdf5's properties for it.

    `place` is where to open it, and `path` what to call it.

    Every link in it must be a hard one, no group may be linked twice, no dataset may be virtual or stored outside
    the file, and no chunk may unpack to more than its size: else CorruptDataError, as for a group or the compressed
    chunks of a dataset that cannot be listed. What cannot be opened is passed over, as reading it fails as well.
    FormatError for a FIFO or a device; UsageError if this process has the file open for writing, in a way that shuts
    other readers out; OSError, libhdf5's own, for a file that cannot be read. Values in heaps are read with
    `HeapValues` alone.
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
    """Return properties to open a file with that is read once.

    By default HDF5 caches up to 32 MB of metadata, which takes 400 MB of memory. Each episode is read once, and a
    cache of 1 MB is even faster.
    """
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_file_locking(True, True)  # file systems without locks will do
    cache = access.get_mdc_config()
    cache.set_initial_size = True
    cache.initial_size = cache.min_size = cache.max_size = _KEPT_STRUCTURE
    cache.incr_mode = cache.flash_incr_mode = cache.decr_mode = 0
    access.set_mdc_config(cache)
    return access


class Checked(NamedTuple):
    """A file that Python reads for libhdf5, and the bytes of it."""

    file: h5f.FileID
    data: CheckedFile


def open_checked(file: h5f.FileID) -> Checked:
    """Open a file once more, so that its heaps are checked; one that Python reads already is returned as it is."""
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
"""By name: h5py hashes a file by its root group, which a damaged one may not have."""


def _open_data(data: CheckedFile, access: h5p.PropFAID) -> h5f.FileID:
    """Open a file that Python reads; `data` is closed if that fails."""
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
    """Close what Python reads: libhdf5 would close it when there is no Python left."""
    for file in list(_opened.values()):
        if file.valid:
            file.close()


def root_members(path: Path, group: str = "") -> list[str]:
    """List the names in the root group of a file, or in a group in it, of which nothing else is read.

    Empty where there is no such group; raises as `open_h5` does.
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
    """Yield what an open file of h5py has apart from groups, each with its path, sorted."""
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
    """Raise CorruptDataError for the first thing that leads out of the file, in circles, or to a damaged heap."""
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
        why = _why_not(found, opened.data) if isinstance(found, h5d.DatasetID) else ""
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
    """Yield the names in a group, none of which is a soft link, an external one or one of a user's own kind."""
    names: list[bytes] = []
    others: list[str] = []

    def look(name: bytes, link: h5l.LinkInfo) -> bool | None:
        if link.type == h5l.TYPE_HARD:
            names.append(name)
            return None
        others.append(name.decode(errors="backslashreplace"))
        return True  # ends it: an exception must not pass through libhdf5

    try:
        group.links.iterate(look, info=True)
    except _UNREADABLE as error:
        # What comes behind the damage can still be reached by its name.
        raise CorruptDataError(f"{path} is damaged: the group {where or '/'} cannot be listed") from error
    if others:
        raise _refused(path, f"{where}/{others[0]} is a link to another name or to another file")
    yield from names


def _why_not(dataset: h5d.DatasetID, data: CheckedFile) -> str:
    """Return why a dataset must not be read, or an empty string."""
    # An offset in the file proves nothing: libhdf5 reads external storage even where the dataset states one, too.
    try:
        if is_in_heap(dataset.get_type()):
            _require_fill(dataset, data)
        made = dataset.get_create_plist()
        if made.get_layout() == h5d.VIRTUAL or made.get_external_count():
            return "takes its data from other files or datasets"
    except _UNREADABLE:
        return "does not say where its data are: its header cannot be read, the file is damaged or was cut"
    try:
        return unbounded_chunks(dataset, made) if made.get_layout() == h5d.CHUNKED else ""
    except _UNREADABLE:  # libhdf5 reads the chunks that come before the damage
        return "has an index of chunks that cannot be read, the file is damaged or was cut"


def _require_fill(dataset: h5d.DatasetID, data: CheckedFile) -> None:
    """Raise OSError unless a fill value that is in a heap is there: libhdf5 reads it along with the properties."""
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
    access.set_fapl_sec2()  # whatever driver the environment names
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
        except (OSError, ValueError):  # it has no name on the disk, or was removed
            continue
    return False
