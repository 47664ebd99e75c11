"""Opens HDF5 files for reading, also where the same process has them open in another way.

libhdf5 keeps one state for each file of a process, and refuses to open a file again with another kind of locking or
of closing. A file that is read through a Python object is another one to it.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

from h5py import h5f, h5fd, h5p

from ..errors import UsageError

__all__ = ["open_h5"]


def open_h5(path: Path, access: h5p.PropFAID) -> h5f.FileID:
    """Open a file for reading; `access` are libhdf5's properties for it.

    UsageError if this process has it open for writing, in a way that shuts other readers out; OSError, libhdf5's own,
    for a file that cannot be read.
    """
    try:
        return h5f.open(os.fsencode(path), h5f.ACC_RDONLY, fapl=access)
    except OSError as error:
        if _is_written_to(path):
            raise UsageError(f"{path} is open for writing in this process", hint="close it there first") from error
        through = access.copy()
        file = _ReadOnly(path)
        through.set_fileobj_driver(h5fd.fileobj_driver, file)
        try:
            return h5f.open(repr(file).encode(), h5f.ACC_RDONLY, fapl=through)
        except OSError:
            file.close()
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


class _ReadOnly(io.RawIOBase):
    """A file with the methods that h5py's `fileobj` driver calls; closed with the last reference to it."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return os.readv(self._descriptor, [buffer])

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._descriptor, offset, whence)

    def tell(self) -> int:
        return os.lseek(self._descriptor, 0, os.SEEK_CUR)

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()
