"""Rows of a storage as of one instant, for checkpointers that read entry after entry, in the background."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch

from ..format import fs
from ..format.private_memory import PrivateMemory, can_map
from ..storages.base import Storage
from ..storages.cursors import last_row
from ..storages.lazy_tensor import LazyTensorStorage
from ..storages.snapshots import Snapshot
from ..storages.tensor import TensorStorage
from .segment_layout import block_rows
from .segment_reader import read_blocks, tensor_of

_BLOCKS = 8
"""Blocks of rows that are read at once: one alone has few bytes of each entry."""


class CapturedRows:
    """The rows of a storage as they are now, of which `write` gives `save` a storage of their own.

    Writers continue, in other threads than the one of `write`. A context manager: leaving it ends the capture.

    A snapshot is read in parts of some rows with all entries, and released part by part, while the forms of whole
    episodes read entry after entry. So rows first go to a file without a name, next to the checkpoint, which is mapped
    in place of memory: what is held in memory stays bounded, and writers wait for no digest, compression or sync.
    """

    def __init__(
        self, storage: TensorStorage, snapshot: Snapshot, part_rows: int, path: Path, save: Callable[[Storage], None]
    ) -> None:
        columns = storage.columns
        self._save = save
        self._storage, self._snapshot, self._part_rows = storage, snapshot, part_rows
        self._file = path.with_name(f".{path.name}.rows")
        self._rows, self._lead, self._widths = storage.rows, columns.lead, columns.widths
        self._structure, self._last_row = storage.structure, last_row(storage.last_cursor)
        self._types = list(zip(columns.dtypes, [leaf.shape for leaf in columns.leaves], strict=True))
        sizes = (-(-self._rows * width // mmap.PAGESIZE) * mmap.PAGESIZE for width in self._widths)
        self._starts = list(itertools.accumulate(sizes, initial=0))

    @classmethod
    def of(cls, storage: TensorStorage, path: Path, save: Callable[[Storage], None]) -> Self | None:
        """Capture the rows for a checkpoint at `path`; None where they could be replaced unnoticed."""
        if not storage.initialized:
            return None
        columns = storage.columns
        part_rows = _BLOCKS * block_rows(storage.rows, sum(columns.widths))
        snapshot = storage.snapshot(part_rows)
        return None if snapshot is None else cls(storage, snapshot, part_rows, path, save)

    def write(self) -> None:
        """Save the rows."""
        fs.make_folder(self._file.parent)
        descriptor = fs.create(self._file)
        try:
            fs.remove(self._file)
            self._put_aside(descriptor)
            held = LazyTensorStorage(math.prod(self._lead), ndim=self._storage.ndim)
            held.take_over(self._structure, self._tensors(descriptor), self._rows, self._last_row)
        finally:
            fs.close(descriptor, self._file)
        self._save(held)

    def _put_aside(self, descriptor: int) -> None:
        """Write the rows to the file, entry after entry, each from a page on."""
        fs.require_space(self._file.parent, self._starts[-1])
        fs.truncate(descriptor, self._starts[-1], self._file)
        for number in self._snapshot.parts():
            rows = range(number * self._part_rows, min((number + 1) * self._part_rows, self._rows))
            for leaf, width in enumerate(self._widths):
                place = self._starts[leaf] + rows.start * width
                for data in self._snapshot.read(leaf, rows):
                    fs.pwrite(descriptor, data, place, self._file)
                    place += len(data)

    def _tensors(self, descriptor: int) -> list[torch.Tensor]:
        """Return the entries, with zeros in rows that are not valid, mapped where the file system allows it."""
        found, maps = [], can_map(descriptor)
        for (dtype, shape), width, start, stop in zip(
            self._types, self._widths, self._starts[:-1], self._starts[1:], strict=True
        ):
            memory = PrivateMemory(self._lead[0] * width)
            if stop > start and not (maps and memory.map_file(0, stop - start, descriptor, start)):
                read_blocks(descriptor, [(start, memory.bytes[: self._rows * width])])
            found.append(tensor_of(memory, dtype, shape))
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._storage.end_snapshot(self._snapshot)
