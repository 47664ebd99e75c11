"""Files of a folder that are opened once, so that all reads see one generation of the folder.

If the folder is replaced meanwhile, open descriptors still lead to the old files. Files that a manifest lists are
compared with it: their sizes, and on every read of a small file its digest. Large files can be read through short-lived
read-only maps.

`PrivateMemory` makes one array of several files, mapped copy-on-write: edits stay in this process. Python's `mmap`
chooses the address of a map itself, so each file is mapped by the system's `mmap` with MAP_FIXED into an address range
that was reserved before:

    reserved range   |     zeros      |
    after map_file   | file A | file B | zeros |

If a mapped file is shortened, a process that reads beyond its new end is killed (SIGBUS). Therefore only files that
nobody changes may be mapped, after their size was checked, and only on file systems of this machine, since another
machine could shorten files of a shared one.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, UsageError
from ..ted.schema import Field
from .contracts import Array, Closing, StepReader
from .documents import parse_json
from .files import (
    FileRecord,
    Hasher,
    digest_bytes,
    digest_descriptor,
    located,
    open_regular,
    reading_from,
    require_regular,
)
from .manifest import MANIFEST, Manifest, is_canonical

_PART = 8 << 20
"""Maps begin and end at multiples of this number of bytes. Pages are only loaded when they are touched, so that
overlapping maps cost little."""


class MappedWindow(threading.local):
    """A map of the part of a file that a thread read last, kept because the next read is often in the same part."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._begin = 0
        self._bytes = np.empty(0, np.uint8)

    def rows(self, file: tuple[int, int], path: Path, leaf: Field, start: int, stop: int) -> Array:
        """Return a read-only view of rows `[start, stop)` of a leaf.

        `file` is a descriptor and the offset in bytes of row 0. CorruptDataError if the file ends before the rows.
        """
        if not leaf.row_bytes or start == stop:
            return np.empty((stop - start, *leaf.shape), leaf.numpy)
        descriptor, offset = file
        begin, end = offset + start * leaf.row_bytes, offset + stop * leaf.row_bytes
        known = self._descriptor == descriptor and self._begin <= begin
        if not known or end > self._begin + len(self._bytes):
            self._begin, self._bytes = _mapped(descriptor, path, begin, end)
            self._descriptor = descriptor
        data = self._bytes[begin - self._begin : end - self._begin]
        return data.view(leaf.numpy).reshape(stop - start, *leaf.shape)

    def close(self) -> None:
        """Drop the map, which is freed with the last array that views it."""
        self._descriptor, self._bytes = -1, np.empty(0, np.uint8)


def digest_mapped(descriptor: int, path: Path, start: int = 0) -> str:
    """Return the digest of the bytes from `start` to the end of an open file; `path` names it in errors."""
    hasher, size = Hasher(), os.fstat(descriptor).st_size
    while start < size:
        stop = min(start - start % _PART + _PART, size)
        begin, data = _mapped(descriptor, path, start, stop)
        hasher.update(data[start - begin : stop - begin].data)
        start = stop
    return hasher.digest


def _mapped(descriptor: int, path: Path, begin: int, end: int) -> tuple[int, Array]:
    """Map the whole parts of a file that contain the bytes `[begin, end)`; return their offset and a view of them.

    The size is checked first, because reading a map beyond the end of its file kills the process.
    """
    size = os.fstat(descriptor).st_size
    if size < end:
        raise CorruptDataError(f"{path} ends {end - size:,} bytes too early: it was cut")
    start, stop = begin - begin % _PART, min(end + -end % _PART, size)
    memory = mmap.mmap(descriptor, stop - start, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start)
    return start, np.frombuffer(memory, np.uint8)


_MAPPED = 8 << 20
"""Files larger than this are digested through maps; for smaller ones a map takes longer than a copy."""


_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""Errors that mean that a file does not exist."""
_Opened = TypeVar("_Opened", bound=Closing)


def one_generation(path: Path, make: Callable[[], _Opened]) -> _Opened:
    """Call `make`, which opens files at `path`, until the folder or file there stays the same during the call.

    `make` must open everything that it will ever read. If `path` is replaced meanwhile, it is called again, so that all
    its files belong to one generation.
    """
    while True:
        before = _identity(path)
        try:
            found = make()
        except (RbtoolError, OSError):
            if _identity(path) == before:
                raise
            continue
        if _identity(path) == before:
            return found
        found.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


class OpenFiles(Closing):
    """Files of the folder `root`, each opened at its first use and kept open until `close`.

    All reads give a position, so that threads can share a file. `opened` are open descriptors by name, of which this
    object becomes the owner; it then opens no other files. A pickle leads to the same open files as long as this
    process has them open, else to the files at the path.
    """

    _missing = ""

    def __init__(self, root: Path, opened: Mapping[str, int] | None = None) -> None:
        self.root = root
        self._open: dict[str, int] = dict(opened or {})
        self._folder = -1
        if opened is None:
            self._folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None if there is no regular file with that name."""
        descriptor = self._opened(name)
        return None if descriptor < 0 else os.fstat(descriptor).st_size

    def descriptor(self, name: str) -> int:
        """Return the descriptor of a file, to be read by position and left open; CorruptDataError if it is missing."""
        descriptor = self._opened(name)
        if descriptor < 0:
            require_regular(self.root / name)
            raise CorruptDataError(f"{self.root / name} is missing{self._missing}")
        return descriptor

    def place(self, name: str) -> Path:
        """Return a path by which a library can open the same file: `/proc/self/fd/N` if the system has it."""
        link = Path(f"/proc/self/fd/{self.descriptor(name)}")
        return link if link.exists() else self.root / name

    def read(self, name: str) -> bytes:
        """Read all bytes of a file."""
        descriptor, parts, offset = self.descriptor(name), [], 0
        # `pread` allocates the requested size, so that pieces of 16 MB would be wasteful for small files.
        piece = min(os.fstat(descriptor).st_size + 1, 1 << 24)
        with reading_from(self.root / name):
            while part := os.pread(descriptor, piece, offset):
                parts.append(part)
                offset += len(part)
        return b"".join(parts)

    def rows(self, name: str, leaf: Field, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a headerless file into a fresh array; an empty leaf needs no file."""
        if not leaf.row_bytes or start == stop:
            return np.empty((stop - start, *leaf.shape), leaf.numpy)
        return pread_rows(self.descriptor(name), self.root / name, leaf, start, stop)

    def digest(self, name: str) -> str:
        """Digest of all bytes of a file."""
        descriptor = self.descriptor(name)
        if os.fstat(descriptor).st_size > _MAPPED:
            return digest_mapped(descriptor, self.root / name)
        with reading_from(self.root / name):
            return digest_descriptor(descriptor)

    def state(self) -> str:
        """Identify the state of the open files without reading them: by names, sizes, times and inodes."""
        lines = []
        for name, descriptor in sorted(self._open.items()):
            if descriptor >= 0:
                found = os.fstat(descriptor)
                place = os.path.realpath(self.root / name)
                lines.append(f"{place}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ino}\n")
        return "stat:" + digest_bytes("".join(lines).encode(errors="surrogateescape"))

    def again(self) -> Self:
        """Return the same files with descriptors of their own."""
        return type(self)(self.root, {name: os.dup(one) for name, one in self._open.items() if one >= 0})

    def close(self) -> None:
        """Close all files; harmless when done twice."""
        while self._open:
            descriptor = self._open.popitem()[1]
            if descriptor >= 0:
                os.close(descriptor)
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # `__init__` may have failed; and when the interpreter exits, modules are gone, and the system closes files.
        if "_folder" in self.__dict__ and not is_finalizing():
            self.close()

    def __reduce__(self) -> tuple[object, ...]:
        held = {name: (one, *_inode(one)) for name, one in self._open.items() if one >= 0}
        return _reopened, (type(self), self.root.absolute(), os.getpid(), held)

    @classmethod
    def at(cls, path: Path) -> Self:
        """Open the files that are at the path now, all of one generation."""
        return one_generation(path, lambda: cls(path))

    def _opened(self, name: str) -> int:
        if name not in self._open:
            self._open[name] = self._open_below(name) if self._folder >= 0 else -1
        return self._open[name]

    def _open_below(self, name: str) -> int:
        try:
            descriptor = open_regular(name, relative_to=self._folder)
        except OSError as error:
            if error.errno in _MISSING:
                return -1
            if error.errno not in {errno.EMFILE, errno.ENFILE}:
                raise OSError(error.errno, error.strerror, str(self.root / name)) from error
            raise UsageError(
                f"{self.root} has more files than this process may hold open", hint="raise the limit: ulimit -n 65536"
            ) from error
        except FormatError:
            return -1
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        return -1


class OpenedReader(StepReader):
    """A reader of `files`, which are opened once, and closed with it; files put at `path` later are never read."""

    files: OpenFiles

    def _arguments(self, files: OpenFiles) -> tuple[object, ...]:
        """Return the constructor's arguments for a reader of `files`."""
        return self.path, files

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._arguments(self.files)

    def again(self) -> Self:
        make: Callable[..., Self] = type(self)
        return make(*self._arguments(self.files.again()))

    def files_state(self) -> str:
        return self.files.state()

    def close(self) -> None:
        self.files.close()


def _inode(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _reopened(kind: type[OpenFiles], root: Path, process: int, held: Mapping[str, tuple[int, int, int]]) -> OpenFiles:
    """Open the files that a process of this machine has open, by `/proc`; if that fails, the files at the path now."""
    opened: dict[str, int] = {}
    try:
        for name, (descriptor, *inode) in held.items():
            opened[name] = open_regular(f"/proc/{process}/fd/{descriptor}")
            if [*_inode(opened[name])] != inode:
                raise FileNotFoundError(name)  # the process has reused the number for another file
    except (OSError, RbtoolError):
        for one in opened.values():
            os.close(one)
        return kind.at(root)
    return kind(root, opened)


def pread_rows(descriptor: int, path: Path, leaf: Field, start: int, stop: int) -> Array:
    """Read rows `[start, stop)` of a headerless file into a fresh array."""
    array = np.empty((stop - start, *leaf.shape), leaf.numpy)
    pread_into(array, descriptor, path, start * leaf.row_bytes, f"row {stop}")
    return array


def pread_into(array: Array, descriptor: int, path: Path, offset: int, end: str) -> None:
    """Fill an array with the bytes from `offset` on; CorruptDataError, which names `end`, if the file is shorter."""
    view = memoryview(array.reshape(-1).view(np.uint8).data)
    while view:
        try:
            got = os.preadv(descriptor, [view], offset)
        except OSError as error:
            raise located(error, path) from None
        if not got:
            raise CorruptDataError(f"{path} ends {len(view):,} bytes before {end}: it was cut")
        view, offset = view[got:], offset + got


class ListedFiles(OpenFiles):
    """The dataset or checkpoint in the folder `root`: its manifest, and all files that it lists, open.

    Open it with `at`, so that all files belong to one generation. DatasetNotFoundError for a folder without a manifest;
    missing files are reported when they are used.
    """

    _missing = "; the manifest lists it"

    def __init__(self, root: Path, opened: Mapping[str, int] | None = None) -> None:
        missing = DatasetNotFoundError(f"{root} is not an rbtool dataset: it has no {MANIFEST}")
        try:
            super().__init__(root, opened)
        except (FileNotFoundError, NotADirectoryError):
            raise missing from None
        try:
            if self.size(MANIFEST) is None:
                raise missing
            self.manifest = Manifest.from_dict(
                parse_json(super().read(MANIFEST), str(root / MANIFEST)), str(root / MANIFEST)
            )
            self._files = {file.path: file for file in self.manifest.files}
            for name in self._files:
                self._opened(name)
        except BaseException:
            self.close()
            raise

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def listed_size(self, name: str) -> int | None:
        """Return the listed size of a file; None if it is not listed."""
        file = self._files.get(name)
        return None if file is None else file.size

    def read(self, name: str) -> bytes:
        """Return the bytes of a small file; CorruptDataError if they were changed."""
        path, file = self.root / name, self._files.get(name)
        if file is None:
            raise CorruptDataError(f"{path} is not listed in the manifest, which has to list it")
        problem = self.size_problem(file)
        if problem:
            raise CorruptDataError(problem)
        data = super().read(name)
        if digest_bytes(data) != file.digest:
            raise changed(path)
        return data

    def size_problem(self, file: FileRecord) -> str:
        """Describe a wrong size of a listed file; "" if it is right."""
        path, found = self.root / file.path, self.size(file.path)
        if found is None:
            return f"{path} is missing; the manifest lists it"
        return f"{path} has {found:,} bytes, the manifest states {file.size:,}" if found != file.size else ""

    def problem(self, file: FileRecord) -> str:
        """Read all bytes of a listed file and describe what is wrong with it; "" if it is unchanged."""
        if found := self.size_problem(file):
            return found
        return "" if self.digest(file.path) == file.digest else str(changed(self.root / file.path))

    def manifest_problem(self) -> str:
        """Describe the problem that the manifest is not byte for byte as it was written; "" if it is."""
        return "" if is_canonical(super().read(MANIFEST)) else str(changed(self.root / MANIFEST))

    def check_sizes(self) -> None:
        """Raise CorruptDataError for the first listed file that is missing or has another size."""
        for file in self.manifest.files:
            if problem := self.size_problem(file):
                raise CorruptDataError(problem)

    def verify(self, files: Iterable[FileRecord]) -> None:
        """Raise CorruptDataError for the first of these listed files that is missing, cut or changed."""
        for file in files:
            if problem := self.problem(file):
                raise CorruptDataError(problem)


def changed(path: Path) -> CorruptDataError:
    """Return the error for a file whose bytes differ from those that were written."""
    return CorruptDataError(f"{path} was changed after it was written: its digest does not match the manifest")


_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_FILE = mmap.MAP_PRIVATE | 0x10  # MAP_FIXED, which Python does not name
_LOCAL = frozenset({
    0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x2FC12FC1, 0xF2F52010, 0x794C7630, 0x858458F6, 0xCA451A4E,
})  # fmt: skip
"""The types in `statfs` of ext2 to ext4, XFS, Btrfs, tmpfs, ZFS, F2FS, overlayfs, ramfs and bcachefs."""
_MOST_MAPS = 1 << 14
"""Maps of files in this process; Linux allows a process 65,530 maps of all kinds."""
_maps = 0


class PrivateMemory:
    """`size` bytes of memory, initially zeros, as `array` (uint8) and as `bytes`, into which files can be mapped.

    The memory is freed when nothing refers to it any more.
    """

    def __init__(self, size: int) -> None:
        self._count = [0]
        self.array: Array = np.zeros(0, np.uint8)
        if size:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            weakref.finalize(memory, _forget, self._count).atexit = False
            self.array = np.frombuffer(memory, np.uint8)
        self.bytes = memoryview(self.array.data)
        self._address = self.array.ctypes.data

    def map_file(self, start: int, size: int, descriptor: int, offset: int) -> bool:
        """Map bytes of an open file at `start`; the file must be long enough, and `can_map` true for it.

        Returns False, and leaves zeros there, if the numbers are not multiples of a page or the system refuses.
        """
        global _maps
        if _maps >= _MOST_MAPS or (start | size | offset) % mmap.PAGESIZE:
            return False
        place = self._address + start
        if _libc().mmap(place, size, _PROTECTION, _FILE, descriptor, offset) == place:
            _maps += 1
            self._count[0] += 1
            return True
        # The failure may have left a hole in the range.
        if _libc().mmap(place, size, _PROTECTION, _FILE | mmap.MAP_ANONYMOUS, -1, 0) != place:
            raise MemoryError(f"the system gives no memory for {size:,} bytes")
        return False


def _forget(count: list[int]) -> None:
    global _maps
    _maps -= count[0]


def can_map(descriptor: int) -> bool:
    """Whether an open file may be mapped: on 64-bit Linux, on a file system that only this machine writes to."""
    if sys.platform != "linux" or sys.maxsize <= 1 << 32:
        return False
    described = (ctypes.c_long * 64)()  # struct statfs begins with its type; all of it is 120 bytes
    return _libc().fstatfs(descriptor, described) == 0 and (described[0] & 0xFFFFFFFF) in _LOCAL


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    return libc
