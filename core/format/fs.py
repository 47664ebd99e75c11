"""The one module that changes the file system.

Every write, fsync, rename, exchange and removal goes through here, so that a full disk always becomes an
`OutOfSpaceError` and a crash test can stop the process at any of them: each is announced before and after with
`sys.audit("rbtool.fs", operation, path)`. Bytes are written with `write` and `pwrite`, never through a memory
map: on a full disk a map kills the process with SIGBUS. Calls that Python has no function for (fallocate,
sync_file_range, renameat2) are made in the C library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..errors import OutOfSpaceError, RbtoolError, UsageError

_NO_REPLACE, _EXCHANGE = 1, 2  # the flags of renameat2
_SYNC_WAIT, _SYNC_WRITE = 1, 2  # the flags of sync_file_range: wait for what was started, start without waiting
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM})
_KEEP_SIZE = 1  # the flag of fallocate
_MACOS_FLAGS = {_NO_REPLACE: 4, _EXCHANGE: 2}
_CURRENT_FOLDER = {"linux": -100, "darwin": -2}  # AT_FDCWD


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _fallocate(descriptor: int, size: int) -> None:
    """Allocate disk space for `size` bytes of a file, if the system supports it; the file keeps its size."""
    libc = _libc()
    if sys.platform == "linux" and sys.maxsize > 1 << 32 and hasattr(libc, "fallocate"):
        libc.fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size))


def _sync_range(descriptor: int, start: int, size: int, flag: int) -> None:
    """Start to write a range of a file to the disk, or wait for writes that were started; does nothing elsewhere."""
    libc = _libc()
    if sys.platform != "linux" or not hasattr(libc, "sync_file_range"):
        return
    if libc.sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), flag):
        code = ctypes.get_errno()
        if code not in _UNSUPPORTED:
            raise OSError(code, os.strerror(code))


def _rename_with(flag: int, one: str, other: str, within: int | None, into: int | None) -> bool:
    """Call renameat2 (Linux) or renameatx_np (macOS); False, with nothing changed, if it is not supported.

    The names are relative to the folders with the descriptors `within` and `into`, None for the current folder.
    """
    libc, here = _libc(), _CURRENT_FOLDER.get(sys.platform, 0)
    first, second = os.fsencode(one), os.fsencode(other)
    within, into = (here if folder is None else folder for folder in (within, into))
    if sys.platform == "linux" and hasattr(libc, "renameat2"):
        failed = libc.renameat2(within, first, into, second, flag)
    elif sys.platform == "darwin" and hasattr(libc, "renameatx_np"):
        failed = libc.renameatx_np(within, first, into, second, _MACOS_FLAGS[flag])
    else:
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), one, None, other)


_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL})
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_CLOEXEC, _DIRECTORY = getattr(os, "O_CLOEXEC", 0), getattr(os, "O_DIRECTORY", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_OURS = _NOFOLLOW | getattr(os, "O_NONBLOCK", 0) | _CLOEXEC  # opening a FIFO in place of a file must not block
_PIECE = 1 << 19  # bytes a call: for several MB, Linux searches for large free pages, which can take four times as long


@contextlib.contextmanager
def announced(operation: str, path: str | Path) -> Iterator[None]:
    """Announce a change of the file system before and after it; errors are converted as by `_named`."""
    sys.audit("rbtool.fs", operation, str(path))
    with _named(path):
        yield
    sys.audit("rbtool.fs", operation, str(path))


@contextlib.contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """Turn errors about a full disk into OutOfSpaceError, and add the path to other errors of the system."""
    try:
        yield
    except OSError as error:
        if isinstance(error, RbtoolError) or error.errno is None:
            raise
        if out_of_space(error):
            raise _no_room(Path(path), error) from error
        if not isinstance(error.filename, str) or not os.path.isabs(error.filename):
            error.filename = str(path)  # calls with descriptors report no path, or only a name
        raise


def out_of_space(error: OSError) -> bool:
    """Return whether an error means lack of space: a full disk, a quota, or a limit on file size."""
    return error.errno in _NO_SPACE


def _no_room(path: Path, error: OSError) -> OutOfSpaceError:
    """Return the error for a write that failed for lack of space, with the number of free bytes."""
    if error.errno == errno.EFBIG:
        return OutOfSpaceError(f"{path} may not grow further: the limit on file size is reached (ulimit -f)")
    cause = "the disk quota is used up" if error.errno == errno.EDQUOT else "no space is left"
    return OutOfSpaceError(
        f"{cause} for {path}: {free_space(path):,} bytes are free there", hint="free some space and run it again"
    )


def free_space(path: Path) -> int:
    """Bytes that an ordinary user may still write on the file system of `path`."""
    for folder in (path, *path.parents):
        if folder.is_dir():
            return shutil.disk_usage(folder).free
    return 0


def require_space(folder: Path, needed: int) -> None:
    """Raise OutOfSpaceError if the file system of `folder` has fewer than `needed` bytes free."""
    free = free_space(folder)
    if needed > free:
        raise OutOfSpaceError(
            f"{folder} has {free:,} bytes free, {needed:,} are needed", hint="free some space or choose another place"
        )


def create(path: Path, *, within: int | None = None, mode: int = 0o666) -> int:
    """Create a file that must not exist yet and return its descriptor, open for writing and reading.

    Here and below, `within` is the descriptor of the parent folder, so that no other folder can take its place.
    """
    with announced("create", path):
        name = path if within is None else path.name
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _CLOEXEC, mode, dir_fd=within)


@contextlib.contextmanager
def created(path: Path) -> Iterator[BinaryIO]:
    """Create a file as `create` does, and yield it as a buffered one, for a library that writes it."""
    with announced("write", path), os.fdopen(create(path), "w+b", buffering=1 << 20) as file:
        yield file


def open_to_fill(path: Path) -> int:
    """Open for writing a file that `create` made, perhaps in another process, and return its descriptor.

    Here and below, a symbolic link is refused, so that no other file is written to.
    """
    with announced("open", path):
        return os.open(path, os.O_WRONLY | _OURS)


def open_to_change(path: Path) -> int:
    """Open for reading and writing a file that `create` made and return its descriptor."""
    with announced("open", path):
        return os.open(path, os.O_RDWR | _OURS)


def open_to_append(path: Path, *, within: int | None = None) -> int:
    """Open a file for reading and for writing at its end, creating it if necessary; return its descriptor."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | _OURS
    with announced("open", path):
        return os.open(path if within is None else path.name, flags, 0o666, dir_fd=within)


def write(descriptor: int, data: memoryview, path: Path) -> None:
    """Write all of `data` (bytes) at the descriptor's position."""
    with announced("write", path):
        while data:
            data = data[os.write(descriptor, data[:_PIECE]) :]


def write_parts(descriptor: int, parts: list[memoryview], path: Path, offset: int | None = None) -> None:
    """Write all bytes of up to 1000 parts, one after another, at `offset` or at the descriptor's position."""
    with announced("write", path):
        while parts:
            written = os.writev(descriptor, parts) if offset is None else os.pwritev(descriptor, parts, offset)
            offset = None if offset is None else offset + written
            whole = 0
            while whole < len(parts) and written >= len(parts[whole]):
                written -= len(parts[whole])
                whole += 1
            parts = [parts[whole][written:], *parts[whole + 1 :]] if whole < len(parts) else []


def pwrite(descriptor: int, data: memoryview, offset: int, path: Path) -> None:
    """Write all of `data` (bytes) at `offset`, leaving the descriptor's position alone.

    Pieces begin at multiples of their size where possible, which leaves the file less fragmented.
    """
    with announced("write", path):
        while data:
            written = os.pwrite(descriptor, data[: _PIECE - offset % _PIECE], offset)
            data, offset = data[written:], offset + written


def truncate(descriptor: int, size: int, path: Path) -> None:
    """Cut the file, or lengthen it with zeros, to `size` bytes."""
    with announced("truncate", path):
        os.ftruncate(descriptor, size)


def reserve(descriptor: int, size: int) -> None:
    """Allocate disk space for a file that will have `size` bytes, if the system supports it; writes take half as long.

    The file keeps its size. If there is not enough space, the writes fail.
    """
    _fallocate(descriptor, size)


def fsync(descriptor: int, path: Path) -> None:
    """Wait until the file's bytes are on the disk."""
    with announced("fsync", path):
        os.fsync(descriptor)


def start_syncing(descriptor: int, start: int = 0, size: int = 0) -> None:
    """Start to write these bytes of a file to the disk, if the system supports it, so that `fsync` waits less.

    A `size` of 0 means all from `start` on.
    """
    with contextlib.suppress(OSError):  # `fsync` reports the error
        _sync_range(descriptor, start, size, _SYNC_WRITE)


def wait_for_writes(descriptor: int, path: Path) -> None:
    """Wait for the writes that `start_syncing` started. The file is safe only after `fsync`, which is then quick."""
    with announced("fsync", path):  # the system reports an error once, so that a later `fsync` would succeed
        _sync_range(descriptor, 0, 0, _SYNC_WAIT)


def close(descriptor: int, path: Path) -> None:
    """Close a file that was written; network file systems and quotas may only now report that they cannot store it."""
    with _named(path):
        os.close(descriptor)


def lock(descriptor: int, how: int, path: Path) -> None:
    """Lock an open file or folder as `fcntl.flock` does; BlockingIOError where another process has it."""
    try:
        with _named(path):
            fcntl.flock(descriptor, how)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in _NO_LOCKS:
            error.add_note(
                "hint: this file system has no file locks, which keep processes from spoiling each other's work: mount "
                "it with them (NFS without nolock, Lustre with flock), or choose another place"
            )
        raise


def write_file(path: Path, data: bytes, *, within: int | None = None, synced: bool = True) -> None:
    """Create a small file with these bytes, and sync it unless told otherwise."""
    descriptor = create(path, within=within)
    try:
        write(descriptor, memoryview(data), path)
        if synced:
            fsync(descriptor, path)
    finally:
        close(descriptor, path)


def expanded(path: str | os.PathLike[str]) -> Path:
    """Replace `~` by the home folder; UsageError if the user has none, and for a path with a NUL character."""
    if "\0" in os.fspath(path):
        raise UsageError(f"{os.fspath(path)!r} is not a path: it has a NUL character")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"{os.fspath(path)} cannot be found: HOME is not set, and the system has no home folder for this user",
            hint="set HOME, or write the path in full",
        ) from error


def replace_file(
    path: Path, data: bytes, *, within: int | None = None, mode: int | None = None, synced: bool = True
) -> None:
    """Replace the file at `path` atomically: readers see the old contents or the new ones.

    `mode` has its permissions. Without `synced` the function does not wait for the disk, and a power failure may lose
    the old and the new contents.
    """
    staged = path.with_name(f".{path.name}.{os.getpid()}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(staged if within is None else staged.name, dir_fd=within)
    try:
        write_file(staged, data, within=within, synced=synced)
        if mode is not None:
            os.chmod(staged if within is None else staged.name, mode, dir_fd=within)
        rename(staged, path, within=within)
    except OSError:
        with contextlib.suppress(OSError):
            remove(staged, within=within)
        raise
    if synced:
        sync_folder(path.parent) if within is None else fsync(within, path.parent)


def replace_file_below(root: Path, path: Path, data: bytes) -> None:
    """Replace a file as `replace_file` does, in a folder that is opened and created as by `folder_below`."""
    with folder_below(root, path.parent, make=True) as within:
        replace_file(path, data, within=within)


def make_new_folder(path: Path, *, within: int) -> None:
    """Create a folder whose name must be free, in the folder `within`."""
    with announced("mkdir", path):
        os.mkdir(path.name, dir_fd=within)


def make_folder(path: Path) -> None:
    """Create a folder and those above it; NotADirectoryError where one of them is a file."""
    with announced("mkdir", path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), error.filename) from error


@contextlib.contextmanager
def folder_below(root: Path, folder: Path, *, make: bool = False) -> Iterator[int]:
    """Open a folder at or below a root without following symbolic links, creating it if necessary; yields its
    descriptor.

    The root itself may be a link. UsageError for any other link, FileNotFoundError if the folder does not exist.
    """
    if make:
        make_folder(root)
    descriptor, here = os.open(root, os.O_RDONLY | _DIRECTORY | _CLOEXEC), root
    try:
        for name in folder.relative_to(root).parts:
            here /= name
            if make:
                with announced("mkdir", here), contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=descriptor)
            above, descriptor = descriptor, _open_own(name, descriptor, here)
            os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


def _open_own(name: str, within: int, path: Path) -> int:
    try:
        return os.open(name, os.O_RDONLY | _DIRECTORY | _NOFOLLOW | _CLOEXEC, dir_fd=within)
    except OSError as error:
        error.filename = str(path)
        _refuse_link(path)
        raise


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise UsageError(
            f"{path} is a symbolic link, expected a folder: nothing is written or removed through links",
            hint="move the link away, or name the folder that it leads to with --root",
        )


def refuse_links(root: Path, path: Path) -> None:
    """Raise UsageError for a symbolic link below a root on the way to a path, or at the path itself."""
    for above in reversed((path, *path.parents)):
        if root in above.parents:
            _refuse_link(above)


def make_folder_below(root: Path, folder: Path) -> None:
    """Create a folder at or below a root as `folder_below` does."""
    with folder_below(root, folder, make=True):
        pass


def sync_folder(path: Path) -> None:
    """Wait until the folder's entries (created, renamed) are on the disk."""
    with announced("fsync", path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Names(NamedTuple):
    """Two names and the descriptors of the folders to which they are relative, None for the current folder."""

    one: str
    other: str
    within: int | None
    into: int | None

    @classmethod
    def of(cls, one: Path, other: Path, within: int | None, into: int | None) -> _Names:
        if within is None:
            return cls(os.fspath(one), os.fspath(other), None, None)
        return cls(one.name, other.name, within, within if into is None else into)


def rename(source: Path, target: Path, *, within: int | None = None, into: int | None = None) -> None:
    """Rename; a file replaces an existing file atomically, a folder must not replace another.

    Here and below, `within` is the descriptor of the first path's folder, and `into` of the second path's, by
    default the same.
    """
    names = _Names.of(source, target, within, into)
    with announced("rename", target):
        os.rename(names.one, names.other, src_dir_fd=names.within, dst_dir_fd=names.into)


def rename_new(source: Path, target: Path, *, within: int | None = None, into: int | None = None) -> None:
    """Rename a file or folder to a name that must be free; raises FileExistsError if it is taken."""
    names = _Names.of(source, target, within, into)
    with announced("rename", target):
        done = _rename_with(_NO_REPLACE, *names)
        if not done:  # second best: a link never replaces anything, and a folder replaces only an empty one
            if stat.S_ISDIR(os.stat(names.one, dir_fd=names.within, follow_symlinks=False).st_mode):
                os.rename(names.one, names.other, src_dir_fd=names.within, dst_dir_fd=names.into)
            else:
                os.link(names.one, names.other, src_dir_fd=names.within, dst_dir_fd=names.into)
                os.unlink(names.one, dir_fd=names.within)


def remove(path: Path, *, within: int | None = None) -> None:
    """Remove a file, a link or a whole folder, if it exists, without following links."""
    name = path if within is None else path.name
    with announced("remove", path):
        try:
            is_folder = stat.S_ISDIR(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode)
            if not is_folder:
                os.unlink(name, dir_fd=within)
        except FileNotFoundError:
            return
        if is_folder:
            shutil.rmtree(name, dir_fd=within)


def remove_below(root: Path, path: Path) -> None:
    """Remove a path as `remove` does, in a folder opened as by `folder_below`; do nothing if that does not exist."""
    with contextlib.suppress(FileNotFoundError), folder_below(root, path.parent) as within:
        remove(path, within=within)


def link_to(target: Path, path: Path, *, among: int | None = None) -> None:
    """Create a symbolic link at `path` to `target`; a hard link with `among`, the descriptor of the target's folder."""
    with announced("link", path):
        path.symlink_to(target) if among is None else os.link(target, path, src_dir_fd=among, follow_symlinks=False)


def remove_empty_folder(path: Path, *, within: int | None = None) -> None:
    """Remove a folder; raises OSError if anything is in it."""
    with announced("rmdir", path):
        os.rmdir(path if within is None else path.name, dir_fd=within)


def touch(path: Path) -> None:
    """Set the time at which a file or folder was last changed to now."""
    with announced("touch", path):
        os.utime(path, follow_symlinks=os.utime not in os.supports_follow_symlinks)


def exchange(one: Path, other: Path, *, within: int | None = None, into: int | None = None) -> bool:
    """Atomically exchange two paths.

    Returns:
        False, with nothing changed, if the system or the file system does not support it.
    """
    with announced("exchange", other):
        return _rename_with(_EXCHANGE, *_Names.of(one, other, within, into))
