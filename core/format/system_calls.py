"""Calls of the C library that Python has no function for, for `fs` alone."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import sys

NO_REPLACE, EXCHANGE = 1, 2  # the flags of renameat2
SYNC_WAIT, SYNC_WRITE = 1, 2  # the flags of sync_file_range: wait for what was started, start without waiting
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM})
_KEEP_SIZE = 1  # the flag of fallocate
_MACOS_FLAGS = {NO_REPLACE: 4, EXCHANGE: 2}
_CURRENT_FOLDER = {"linux": -100, "darwin": -2}  # AT_FDCWD


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def reserve(descriptor: int, size: int) -> None:
    """Let the system find room for `size` bytes of a file, which keeps its size, where it can."""
    libc = _libc()
    if sys.platform == "linux" and sys.maxsize > 1 << 32 and hasattr(libc, "fallocate"):
        libc.fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size))


def sync_range(descriptor: int, start: int, size: int, flag: int) -> None:
    """Start to write a range of a file, or wait for what was started; nothing where the system cannot."""
    libc = _libc()
    if sys.platform != "linux" or not hasattr(libc, "sync_file_range"):
        return
    if libc.sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), flag):
        code = ctypes.get_errno()
        if code not in _UNSUPPORTED:
            raise OSError(code, os.strerror(code))


def rename_with(flag: int, one: str, other: str, within: int | None, into: int | None) -> bool:
    """Call renameat2 (Linux) or renameatx_np (macOS); False, with nothing changed, where that cannot be had.

    The names count from the folders with the descriptors `within` and `into`, None for the current one.
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
