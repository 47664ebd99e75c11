"""Memory of this process onto which files are mapped copy-on-write: opened at once, read from disk when it is used.

Python's `mmap` chooses the place of a map itself. Here several files become one array, so each has to be mapped at a
place in a range that was taken before: the system's own `mmap` with MAP_FIXED does that. Edits stay in this process:
they never reach a file.

A file that is cut while it is mapped kills the process that reads there (SIGBUS). So only files that nobody changes
are to be mapped, after a look at their size, and only where the file system is of this machine: elsewhere another
machine can remove them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import weakref
from typing import Any

import numpy as np

_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_FILE = mmap.MAP_PRIVATE | 0x10  # MAP_FIXED, which Python does not name
_LOCAL = frozenset({
    0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x2FC12FC1, 0xF2F52010, 0x794C7630, 0x858458F6, 0xCA451A4E,
})  # fmt: skip
"""What statfs calls ext2 to ext4, XFS, Btrfs, tmpfs, ZFS, F2FS, overlayfs, ramfs and bcachefs."""
_MOST_MAPS = 1 << 14
"""Maps of files in this process; Linux allows a process 65,530 maps of all kinds."""
_maps = 0


class PrivateMemory:
    """`size` bytes, zeros at first, in `array`, uint8, and in `bytes`.

    The system has them back when nobody refers to them any more.
    """

    def __init__(self, size: int) -> None:
        self._count = [0]
        self.array: np.ndarray[Any, Any] = np.zeros(0, np.uint8)
        if size:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            weakref.finalize(memory, _forget, self._count).atexit = False
            self.array = np.frombuffer(memory, np.uint8)
        self.bytes = memoryview(self.array.data)
        self._address = self.array.ctypes.data

    def map_file(self, start: int, size: int, descriptor: int, offset: int) -> bool:
        """Map bytes of an open file, which has them, at `start`; False, with zeros there, where that cannot be had.

        It needs a file for which `can_map` is true, and multiples of a page.
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
