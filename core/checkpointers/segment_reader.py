"""Reads the segments of a checkpoint: mapped into memory where that is possible, else copied."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from ..errors import CorruptDataError, SchemaError
from ..format.digest import digest_descriptor, open_folder, open_regular
from ..format.private_memory import PrivateMemory, can_map
from ..format.together import run_together, threads_for_memory
from ..format.unreadable import reading_from
from ..storages.codec import dtype_named
from ..storages.item_documents import read_shape
from ..storages.lazy_tensor import LazyTensorStorage
from ..storages.pytree import TreeSpec
from ..storages.tensor import TensorStorage
from ..storages.tree_files import spec_from_json
from .runs import common
from .segment_layout import PAGE, Segment, SegmentManifest

_MAPPED_FROM = 1 << 15
"""Bytes of a block from which on mapping it costs less than reading it."""
_MOST_ROOMS = 512
"""Pieces of memory that one call fills; Linux takes 1,024."""
_ALWAYS_VERIFIED = 64 << 20
"""Bytes of all segments up to which they are compared with their digests in any case: it takes some milliseconds."""


class SegmentFolder:
    """A checkpoint in segments, open: what takes its place meanwhile is not mixed with it. Made by `opened`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.manifest = SegmentManifest.load(path, descriptor)
        self._widths = self.manifest.widths
        self._descriptor = descriptor

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path) -> Iterator[SegmentFolder]:
        """Open a folder; CorruptDataError and FormatError as for `SegmentManifest.load`."""
        descriptor = open_folder(path)
        try:
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    def structure_for(self, target: TensorStorage, *, raw: bool = False) -> TreeSpec | None:
        """How the data is made, None where nothing was ever written.

        Classes that are not loaded here are taken from the target, whose `ndim` must be the saved one, else SchemaError
        is raised; `raw` data has nothing to do with it.
        """
        described, ndim = self.manifest.structure, self.manifest.ndim
        if described is None:
            return None
        if not raw and ndim != target.ndim:
            raise SchemaError(f"{self.path} was saved with ndim={ndim}, this storage has ndim={target.ndim}")
        found = spec_from_json(described, target.structure if target.initialized and not raw else None)
        if list(found.paths()) != [leaf.name for leaf in self.manifest.leaves]:
            raise CorruptDataError(f"{self.path} does not say how its leaves belong together")
        return found

    def verify(self) -> None:
        """Raise CorruptDataError unless all segments hold the bytes that were saved."""
        run_together([partial(self._verify, segment) for segment in self.manifest.segments], threads_for_memory())

    def tensors(self, rows: int, *, verify: bool) -> list[torch.Tensor]:
        """Return tensors of `rows` rows, zeros behind the ones that were saved.

        Sizes are checked, and with `verify` the bytes of all segments; also where they are few, and where nobody waited
        for the disk when they were saved. CorruptDataError for what is not as it was saved.
        """
        manifest, widths = self.manifest, self._widths
        if verify or not manifest.synced or manifest.rows * sum(widths) <= _ALWAYS_VERIFIED:
            self.verify()
        memories, maps = [PrivateMemory(rows * width) for width in widths], can_map(self._descriptor)
        for segment, runs in manifest.valid([(0, manifest.rows)]):
            with self._opened(segment) as descriptor:
                copied = list[tuple[int, memoryview]]()
                for leaf, its, start in segment.blocks(widths):
                    width = widths[leaf]
                    for first, stop in common(runs, [its]):
                        place, size = first * width, (stop - first) * width
                        offset = start + (first - its[0]) * width
                        copied += _mapped(memories[leaf], place, size, descriptor if maps else -1, offset)
                read_blocks(descriptor, copied)
        return [
            tensor_of(memory, dtype_named(leaf.dtype), (rows, *read_shape(leaf.shape)))
            for leaf, memory in zip(manifest.leaves, memories, strict=True)
        ]

    def _verify(self, segment: Segment) -> None:
        with self._opened(segment) as descriptor:
            if digest_descriptor(descriptor) != segment.digest:
                path = self.path / segment.file
                raise CorruptDataError(f"{path} does not hold the bytes that were saved: it was changed")

    @contextlib.contextmanager
    def _opened(self, segment: Segment) -> Iterator[int]:
        """Open a segment, which must have its size; give its descriptor."""
        path, size = self.path / segment.file, segment.size(self._widths)
        try:
            descriptor = open_regular(path, within=self._descriptor)
        except FileNotFoundError:
            raise CorruptDataError(f"{path} is missing, expected {size:,} bytes") from None
        try:
            found = os.fstat(descriptor).st_size
            if found != size:
                raise CorruptDataError(f"{path} has {found:,} bytes, expected {size:,}: it was cut or overwritten")
            with reading_from(path):
                yield descriptor
        finally:
            os.close(descriptor)


def _mapped(
    memory: PrivateMemory, place: int, size: int, descriptor: int, offset: int
) -> Iterator[tuple[int, memoryview]]:
    """Map the whole pages of some bytes of a file, -1 for none, into memory; yield what is to be copied."""
    head = -place % PAGE
    whole = max(size - head, 0) // PAGE * PAGE
    possible = descriptor >= 0 and whole > 0 and size >= _MAPPED_FROM
    if not (possible and memory.map_file(place + head, whole, descriptor, offset + head)):
        head, whole = size, 0
    for start, stop in ((0, head), (head + whole, size)):
        if start < stop:
            yield offset + start, memory.bytes[place + start : place + stop]


def tensor_of(memory: PrivateMemory, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """View memory as a tensor, which keeps it."""
    tensor = torch.from_numpy(memory.array).view(dtype) if len(memory.array) else torch.empty(0, dtype=dtype)
    return tensor.view(*shape)


def read_blocks(descriptor: int, blocks: Sequence[tuple[int, memoryview]]) -> None:
    """Fill memory from a file that is long enough: each with the bytes from a place on; places ascend.

    Neighbours in the file, with less than `PAGE` bytes between them, are read by one call of the system.
    """
    waiting = [(start, into) for start, into in blocks if len(into)]
    while waiting:
        place = first = waiting[0][0]
        rooms, taken = list[memoryview](), 0
        for start, into in waiting:
            if start - place >= PAGE or len(rooms) > _MOST_ROOMS:
                break
            if start > place:
                rooms.append(memoryview(bytearray(start - place)))
            rooms.append(into)
            place, taken = start + len(into), taken + 1
        end = first + os.preadv(descriptor, rooms, first)
        if end == first:
            raise CorruptDataError("a file ends in the middle of a leaf: it was cut meanwhile")
        short = [(max(start, end), into[max(end - start, 0) :]) for start, into in waiting[:taken]]
        waiting[:taken] = [(start, into) for start, into in short if len(into)]


def load_segments(storage: TensorStorage, path: Path, *, verify: bool) -> None:
    """Put a checkpoint in segments into a storage, whose next dump at the same place writes what changed since.

    A `LazyTensorStorage` of which nobody has references to rows takes mapped memory over, and does not read it; bytes
    that are copied are always verified. SchemaError, with nothing changed, for data of other keys, types or shapes,
    and for more rows than there is room for.
    """
    with SegmentFolder.opened(path) as folder:
        manifest, structure = folder.manifest, folder.structure_for(storage)
        if structure is None:
            storage.empty()
            return
        if not _taken_over(storage, folder, structure, verify):
            tensors = folder.tensors(manifest.rows, verify=True)
            capacity, last = manifest.capacity, manifest.last_row
            storage.fill(structure, tensors, manifest.length, capacity=capacity, last_row=last)
    if not storage.rotated:  # else the rows are in another order now
        storage.log.saved_as(manifest.digest, storage.log.now)


def _taken_over(storage: TensorStorage, folder: SegmentFolder, structure: TreeSpec, verify: bool) -> bool:
    """Have a storage take mapped rows over if it can."""
    manifest = folder.manifest
    if not isinstance(storage, LazyTensorStorage) or not storage.takes_over or not manifest.rows:
        return False
    if storage.numbered_by is not None and (storage.numbered_by,) not in structure.paths():
        return False
    room = storage.rows_for(read_shape(manifest.leaves[0].shape)[: manifest.ndim - 1])
    if manifest.rows > room or storage.rotation_of(manifest.rows, room, manifest.capacity, manifest.last_row):
        return False
    last = manifest.last_row if storage.rotated is None else manifest.rows - 1
    storage.take_over(structure, folder.tensors(room, verify=verify), manifest.rows, last)
    return True
