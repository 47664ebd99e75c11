"""Where things lie in the folder in which a result is built."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ..format import Array, Hasher, bytes_of, fs, leaf_path
from ..ted import Field, Key

__all__ = [
    "PartFile",
    "journal_path",
    "part_path",
    "placed_folder",
    "result_folder",
    "rows_digest",
    "take_back",
    "work_folder",
    "write_part",
]


def result_folder(folder: Path) -> Path:
    """Return the folder of the result, the only part that is published; the state of the run stays whole until then."""
    return folder / "dataset"


def work_folder(folder: Path) -> Path:
    """What is not part of the result."""
    return folder / "work"


def placed_folder(folder: Path) -> Path:
    """The leaf files in which tasks that return as many rows as they take have their own place."""
    return work_folder(folder) / "placed"


def part_path(folder: Path, index: int) -> Path:
    """The rows of a task that returned more or fewer."""
    return work_folder(folder) / "parts" / f"{index}.rows"


def journal_path(folder: Path) -> Path:
    """What is finished."""
    return work_folder(folder) / "journal.jsonl"


def take_back(folder: Path, fields: Sequence[Field], steps: int) -> None:
    """Bring a folder whose result was being completed, or published, back to where only tasks have written into it.

    What is published instead of another result takes that one's place here; none of it may be taken for rows of ours.
    """
    placed, result = placed_folder(folder), result_folder(folder)
    if placed.is_dir() or not result.is_dir():
        fs.remove(result)
    else:
        fs.rename(result, placed)
    sizes = {placed / leaf_path(field.key): steps * field.row_bytes for field in fields}
    for path in sorted(placed.rglob("*")):
        if not path.is_dir() and (path.is_symlink() or path.stat().st_size > sizes.get(path, -1)):
            fs.remove(path)
    fs.make_folder(placed)
    fs.make_folder(part_path(folder, 0).parent)


def write_part(path: Path, arrays: Sequence[Array]) -> None:
    """Write the rows of all leaves, one leaf after the other; what an interrupted run left there goes."""
    fs.remove(path)
    descriptor = fs.create(path)
    try:
        parts = [bytes_of(array) for array in arrays if array.size]
        for first in range(0, len(parts), 1000):
            fs.write_parts(descriptor, parts[first : first + 1000], path)
    finally:
        os.close(descriptor)


def rows_digest(arrays: Iterable[Array]) -> str:
    """One digest over the bytes of all leaves, in the order given: what a journal holds of a task's rows."""
    hasher = Hasher()
    for array in arrays:
        if array.size:
            hasher.update(bytes_of(array))
    return hasher.digest


class PartFile:
    """What `write_part` wrote: `rows` rows of each of the `fields`."""

    def __init__(self, path: Path, fields: Sequence[Field], rows: int) -> None:
        self._path = path
        self._fields = {field.key: field for field in fields}
        sizes = np.array([rows * field.row_bytes for field in fields], np.int64)
        self._start = dict(zip(self._fields, (np.cumsum(sizes) - sizes).tolist(), strict=True))

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of one leaf."""
        field = self._fields[key]
        shape = (stop - start, *field.shape)
        if not field.row_bytes or start == stop:
            return np.empty(shape, field.numpy)
        count = (stop - start) * (field.row_bytes // field.numpy.itemsize)
        offset = self._start[key] + start * field.row_bytes
        return np.fromfile(self._path, field.numpy, count, offset=offset).reshape(shape)

    def write(self, key: Key, start: int, array: Array) -> None:
        """Write rows of one leaf over what is there."""
        descriptor = fs.open_to_change(self._path)
        try:
            offset = self._start[key] + start * self._fields[key].row_bytes
            fs.pwrite(descriptor, bytes_of(array), offset, self._path)
        finally:
            os.close(descriptor)
