"""Locks on folders: a process that dies gives them back, whatever kills it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["lock_folder"]

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # a FIFO there would keep us waiting
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


def lock_folder(folder: Path, *, wait: bool = False, within: int | None = None) -> int:
    """Lock a folder for this process and return the descriptor whose closing unlocks it.

    Returns -1 if the folder is not there, or was removed or replaced meanwhile; without `wait` also if another
    process has it. `within` is the descriptor of the parent folder; OSError then for a link.
    """
    name: str | Path = folder if within is None else folder.name
    try:
        descriptor = os.open(name, _FLAGS | (0 if within is None else _NOFOLLOW), dir_fd=within)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.stat(name, dir_fd=within).st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return -1
