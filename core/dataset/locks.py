"""Locks on folders: a process that dies gives them back, whatever kills it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["lock_folder"]


def lock_folder(folder: Path, *, wait: bool = False) -> int:
    """Lock a folder for this process and return the descriptor whose closing unlocks it.

    Returns -1 if the folder is not there, or was removed or replaced meanwhile; without `wait` also if another
    process has it.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a FIFO there would keep us waiting
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if folder.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return -1
