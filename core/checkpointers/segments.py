"""Checkpoints of tensor storages in segments, of which each dump writes only the rows that have changed.

    segments.json              structure of the data, its length and leaves, rows and digest of every segment
    segment-00000.memmap …     some runs of rows: for each leaf, one block for each run
    .rbtool/digests.json       the digest of segments.json, which also contains one of its own

Segments are numbered in the order in which they were written. A row that is in several segments is read from the last:

    rows               0 1 2 3 4 5 6 7
    segment-00000      0 1 2 3 4 5 6 7        first dump: all rows
    segment-00001          2 3                second dump: rows 2 and 3 had changed
    segment-00002            3 4              third dump: rows 3 and 4 had changed
    read from          0 0 1 2 2 0 0 0

A published segment never changes, and its file is read-only, so that later checkpoints at the same place share it by
hard link, and processes can map it. Log-structured file systems and Lucene store data in such segments.

Each dump adds a segment with the rows that changed. Two rules bound the number of segments and the space:

- Merging. Segments have size classes, each eight times as large as the one before. As soon as a new segment and seven
  existing ones are of the same class or smaller, they are written again as one. As in log-structured merge trees, a row
  is written about twice if each dump changes a per cent of the rows, and three times if it changes a thousandth, for
  any number of dumps. Segments with more than a 32nd of all rows are not merged.
- Overwritten rows. If more than a quarter of all rows are in segments from which they are no longer read, the segments
  with most of these rows are written again.

A block starts at an offset in the file that is congruent, modulo 4 KiB, to its offset in a tensor with all rows of the
leaf. Its whole pages can therefore be mapped into the memory of such a tensor:

    tensor of a leaf    |        |     ---|--------|--      |       a run of rows, in pages of memory
    segment file        |00000---|--------|--                       its block, in pages of the file, after a gap

Gaps between blocks are zeros.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import mmap
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import torch

from ..encodings.compact import SEGMENTS_FILE
from ..encodings.output_files import Blocks, LeafFile
from ..encodings.saved_digests import write_digests
from ..errors import CorruptDataError, OutOfSpaceError, RbtoolError, SchemaError
from ..format import fs
from ..format.documents import Count, decode, document_digest, dump_with_digest, newer_version, parse_json
from ..format.files import Hasher, digest_descriptor, open_folder, open_regular, reading_from
from ..format.manifest import HIDDEN
from ..format.open_files import PrivateMemory, can_map
from ..format.syncing import Durable, published_place, skip_sync, unsynced_around, write_file
from ..format.threads import run_together, threads_for_memory
from ..storages.base import Storage
from ..storages.codec import byte_count, dtype_named, tensor_bytes
from ..storages.cursors import newest_row
from ..storages.lazy_tensor import LazyTensorStorage
from ..storages.list_storage import read_shape
from ..storages.pytree import TreeSpec, spec_from_json, spec_to_json
from ..storages.tensor import TensorStorage
from ..storages.write_log import Snapshot, Written
from .base import CheckpointStaging

Run: TypeAlias = tuple[int, int]
Runs: TypeAlias = Sequence[Run]


def count_of(runs: Iterable[Run]) -> int:
    """Return how many rows the runs have.

    >>> count_of([(0, 3), (5, 6)])
    4
    """
    return sum(stop - start for start, stop in runs)


def joined(runs: Iterable[Run]) -> list[Run]:
    """Join runs that overlap or touch.

    >>> joined([(5, 9), (0, 2), (2, 3), (8, 8), (6, 12)])
    [(0, 3), (5, 12)]
    """
    found = list[Run]()
    for start, stop in sorted(run for run in runs if run[0] < run[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def common(runs: Runs, others: Runs) -> list[Run]:
    """Return the rows that are in both sequences of runs.

    >>> common([(0, 10), (20, 30)], [(5, 22), (29, 40)])
    [(5, 10), (20, 22), (29, 30)]
    """
    found, place = list[Run](), 0
    for start, stop in runs:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at = place
        while at < len(others) and others[at][0] < stop:
            found.append((max(start, others[at][0]), min(stop, others[at][1])))
            at += 1
    return found


def without(runs: Runs, others: Runs) -> list[Run]:
    """Return the rows of the first sequence that are not in the second.

    >>> without([(0, 10), (20, 30)], [(5, 22), (29, 40)])
    [(0, 5), (22, 29)]
    """
    if not runs:
        return []
    bounds = [runs[0][0], *(bound for run in others for bound in run), runs[-1][1]]
    gaps = [(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop]
    return common(runs, gaps)


def cut(runs: Runs, most: int, block: int) -> list[list[Run]]:
    """Divide runs into groups of about `most` rows, at multiples of `block`.

    >>> cut([(0, 8), (10, 30)], 10, 4)
    [[(0, 8), (10, 12)], [(12, 24)], [(24, 30)]]
    """
    total = count_of(runs)
    size = -(-total // max(1, round(total / most))) if total else 0
    groups, group, room = list[list[Run]](), list[Run](), size
    for start, stop in runs:
        while start < stop:
            end = min(stop, -(-(start + room) // block) * block)
            group.append((start, end))
            room -= end - start
            start = end
            if room <= 0:
                groups.append(group)
                group, room = [], size
    return [*groups, group] if group else groups


PAGE = 4096
"""Files are mapped in units of this."""
_BLOCKS, _FEWEST_BYTES = 1024, 1 << 19
_VERSION = 2
_HINT = "if TorchRL overwrote this checkpoint, remove segments.json and .rbtool in it; otherwise save it again"


@dataclass(frozen=True, slots=True)
class SegmentLeaf:
    """A leaf: its path of keys, element type, and row shape."""

    name: tuple[str, ...]
    dtype: str
    shape: tuple[Count, ...]


@functools.lru_cache(256)
def _width(dtype: str, shape: tuple[int, ...]) -> int:
    return byte_count(dtype_named(dtype), read_shape(shape))


def leaves_of(names: Sequence[tuple[str, ...]], tensors: Sequence[torch.Tensor]) -> tuple[SegmentLeaf, ...]:
    """Describe tensors whose first dimension counts rows."""
    pairs = zip(names, tensors, strict=True)
    return tuple(SegmentLeaf(tuple(name), str(tensor.dtype), tuple(tensor.shape[1:])) for name, tensor in pairs)


def block_rows(filled: int, row_bytes: int) -> int:
    """Return the number of rows in a block of rows, a power of two.

    Scattered changes are rounded to whole blocks of rows, and segments are divided at their bounds. There are at most
    1,024 such blocks, of at least 512 KiB each.
    """
    least = max(filled / _BLOCKS, _FEWEST_BYTES / max(row_bytes, 1), 1)
    return 1 << math.ceil(math.log2(least))


class Block(NamedTuple):
    """The bytes of one run in one leaf: its rows, and its offset in the segment's file."""

    leaf: int
    rows: Run
    start: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A file with the rows of some runs, and its digest."""

    number: Count
    runs: tuple[tuple[Count, Count], ...]
    digest: str = ""
    whole_pages: bool = field(default=False, metadata={"json": False})
    """Whether blocks start and end at multiples of 4 KiB, as they did in format version 1."""

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"segment-{self.number:05}.memmap"

    @property
    def rows(self) -> int:
        """The number of its rows, including those replaced by later segments."""
        return count_of(self.runs)

    def blocks(self, widths: Sequence[int]) -> Iterator[Block]:
        """Yield the blocks in the order of the file: leaf after leaf, and within a leaf run after run.

        `widths` are the bytes of a row of each leaf.
        """
        end = 0
        for leaf, width in enumerate(widths):
            for run in self.runs:
                start = end + self._gap(run[0] * width, end)
                yield Block(leaf, run, start)
                end = start + (run[1] - run[0]) * width

    def size(self, widths: Sequence[int]) -> int:
        """Return the size of the file, given the bytes of a row of each leaf."""
        end = 0
        for width in widths:
            for first, stop in self.runs:
                end += self._gap(first * width, end) + (stop - first) * width
        return end + self._gap(0, end) if self.whole_pages else end

    def _gap(self, place: int, end: int) -> int:
        """Return the bytes between `end` and a block whose offset among all rows of its leaf is `place`."""
        return (-end if self.whole_pages else place - end) % PAGE


@dataclass(frozen=True, slots=True)
class SegmentManifest:
    """The document of a checkpoint in segments, `segments.json`.

    Attributes:
        structure: how the data is nested; None if nothing was ever written.
        ndim: how many dimensions count elements.
        length: the number of elements.
        rows: the number of valid rows.
        last_row: the row written last; None if unknown.
        capacity: the capacity of the storage in rows.
        synced: whether the segments were synced to the disk before they were published.
        leaves: the tensors, in the order of their blocks.
        segments: the segments, in the order in which they were written.
        digest: the digest of the document, which contains the digests of all segments: equal digests mean equal
            contents.
    """

    structure: Mapping[str, Any] | None
    ndim: Count
    length: Count
    rows: Count
    last_row: Count | None
    capacity: Count
    synced: bool
    leaves: tuple[SegmentLeaf, ...]
    segments: tuple[Segment, ...] = ()
    digest: str = ""
    format_version: int = _VERSION

    FILE: ClassVar[str] = SEGMENTS_FILE

    @property
    def widths(self) -> list[int]:
        """The bytes of a row of each leaf."""
        return [_width(leaf.dtype, leaf.shape) for leaf in self.leaves]

    @property
    def files(self) -> list[str]:
        """The files of all segments."""
        return [segment.file for segment in self.segments]

    def valid(self, rows: Sequence[Run]) -> Iterator[tuple[Segment, list[Run]]]:
        """Yield the segments, the last one first, each with the part of `rows` that is read from it."""
        left = rows
        for segment in reversed(self.segments):
            yield segment, common(left, segment.runs)
            left = without(left, segment.runs)

    def resembles(self, other: SegmentManifest) -> bool:
        """Whether this checkpoint can share segments of another one: they have the same leaves and format."""
        return self.leaves == other.leaves and self.format_version == other.format_version

    # The document ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> SegmentManifest:
        """Write the document to a folder; return it with its digest."""
        document = {name: getattr(self, name) for name in _ENTRIES}
        document["leaves"] = [{"name": leaf.name, "dtype": leaf.dtype, "shape": leaf.shape} for leaf in self.leaves]
        document["segments"] = [
            {"number": segment.number, "runs": segment.runs, "digest": segment.digest} for segment in self.segments
        ]
        text, digest = dump_with_digest(document)
        write_file(folder / self.FILE, text.encode())
        return replace(self, digest=digest)

    @classmethod
    def load(cls, folder: Path, descriptor: int) -> SegmentManifest:
        """Read the document of the folder open as `descriptor`, even if another checkpoint has replaced it meanwhile.

        Raises:
            CorruptDataError: the document is damaged, or there are files that do not belong to the checkpoint.
            FormatError: a newer version wrote it.
        """
        path = folder / cls.FILE
        with os.fdopen(open_regular(path, within=descriptor), "rb") as file:
            document = parse_json(file.read(), str(path))
        version = document.get("format_version") if isinstance(document, dict) else None
        if type(version) is int and version > _VERSION:
            raise newer_version(str(path), version, _VERSION, "format version")
        if version == 1:
            found = decode(_Version1, document, str(path), CorruptDataError).manifest
        else:
            found = decode(cls, document, str(path), CorruptDataError)
        if found.digest != document_digest(document, "digest"):
            raise CorruptDataError(f"{path} was changed after it was written: its digest does not match", hint=_HINT)
        found._require_rows(path)
        known = {cls.FILE, HIDDEN, *found.files}
        strange = next((name for name in sorted(os.listdir(descriptor)) if name not in known and name[0] != "."), None)
        if strange is not None:
            raise CorruptDataError(f"{folder / strange} does not belong to the checkpoint {folder}", hint=_HINT)
        return found

    def _require_rows(self, path: Path) -> None:
        """Raise CorruptDataError unless the segments are in order and contain all rows."""
        numbers = [segment.number for segment in self.segments]
        in_order = numbers == sorted(set(numbers)) and all(
            list(segment.runs) == joined(segment.runs) and segment.runs for segment in self.segments
        )
        found = sum(count_of(runs) for _, runs in self.valid([(0, self.rows)])) if in_order else -1
        if found != self.rows:
            raise CorruptDataError(f"{path} does not list segments for all {self.rows:,} rows")


_ENTRIES = [entry.name for entry in fields(SegmentManifest) if entry.name != "digest"]


@dataclass(frozen=True, slots=True)
class _Version1:
    """A document of format version 1, in which each file has `segment_rows` consecutive rows."""

    structure: Mapping[str, Any] | None
    ndim: Count
    length: Count
    rows: Count
    last_row: Count | None
    capacity: Count
    segment_rows: Count
    synced: bool
    leaves: tuple[SegmentLeaf, ...]
    digests: tuple[str, ...]
    digest: str

    @property
    def manifest(self) -> SegmentManifest:
        """Convert it to the present version."""
        segments = tuple(
            Segment(number, ((start, min(start + self.segment_rows, self.rows)),), digest, whole_pages=True)
            for number, digest in enumerate(self.digests)
            if (start := number * self.segment_rows) < self.rows
        )
        return SegmentManifest(
            self.structure, self.ndim, self.length, self.rows, self.last_row, self.capacity, self.synced, self.leaves,
            segments, self.digest, format_version=1,
        )  # fmt: skip


_ALIKE = 8
"""How many segments are merged, and the ratio of the size classes."""
_LARGE = 32
"""Segments with more than one row in this many of all rows are not merged."""
_WHOLE = 16
"""How many segments a complete dump is divided into."""

Kept = Mapping[Segment, Sequence[Run]]
"""Segments, with the rows that are read from each."""


def merged(kept: Kept, rows: int, block: int) -> dict[Segment, Sequence[Run]]:
    """Return the segments that are shared with the earlier checkpoint; the rows of all others are written again.

    Args:
        kept: the segments that can be shared, with the rows that are read from each. All other rows have changed.
        rows: the number of rows in the storage.
        block: the result of `block_rows`.
    """
    valid = {segment: count_of(runs) for segment, runs in kept.items()}
    new = rows - sum(valid.values())
    if new:
        new += _merge_alike(valid, new, rows, block)
    unused = {segment: segment.rows - count for segment, count in valid.items()}
    while sum(unused.values()) > max(rows // 4, block):
        most = max(unused, key=unused.__getitem__)
        del unused[most], valid[most]
    return {segment: runs for segment, runs in kept.items() if segment in valid}


def _merge_alike(valid: dict[Segment, int], new: int, rows: int, block: int) -> int:
    """Remove segments to be merged with `new` rows from `valid`; return how many rows they have."""
    large, found = max(rows // _LARGE, block), 0
    while True:
        most = _size(new, block)
        alike = [segment for segment, count in valid.items() if count < large and _size(count, block) <= most]
        if len(alike) < _ALIKE - 1:
            return found
        taken = sum(valid.pop(segment) for segment in alike)
        new, found = new + taken, found + taken


def _size(rows: int, block: int) -> int:
    """Return the size class of a segment; each class is `_ALIKE` times as large as the one before."""
    return max(0, math.floor(math.log(rows / block, _ALIKE)))


def written(kept: Kept, rows: int, block: int, first: int) -> list[Segment]:
    """Return the segments to be written, numbered from `first`, for all rows that are not in a kept segment."""
    left: list[Run] = [(0, rows)] if rows else []
    for runs in kept.values():
        left = without(left, runs)
    groups = cut(left, max(rows // _WHOLE, block), block)
    return [Segment(number, tuple(group)) for number, group in enumerate(groups, first)]


_MAPPED_FROM = 1 << 15
"""Above this size of a block, mapping it costs less than reading it."""
_MOST_ROOMS = 512
"""How many pieces of memory one system call fills; Linux accepts 1,024."""
_ALWAYS_VERIFIED = 64 << 20
"""Segments of up to this total size are always compared with their digests: it takes a few milliseconds."""


class SegmentFolder:
    """An open checkpoint in segments, made by `opened`.

    All files are opened within the descriptor of the folder, so that a checkpoint that replaces this one meanwhile is
    not mixed with it.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.manifest = SegmentManifest.load(path, descriptor)
        self._widths = self.manifest.widths
        self._descriptor = descriptor

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path) -> Iterator[SegmentFolder]:
        """Open a folder; raises what `SegmentManifest.load` raises."""
        descriptor = open_folder(path)
        try:
            yield cls(path, descriptor)
        finally:
            os.close(descriptor)

    def structure_for(self, target: TensorStorage, *, raw: bool = False) -> TreeSpec | None:
        """Return how the data is nested; None if nothing was ever written.

        Classes that are not imported are taken from the target; SchemaError if its `ndim` differs. With `raw`, the
        data is not compared with the target, because load hooks will change it.
        """
        described, ndim = self.manifest.structure, self.manifest.ndim
        if described is None:
            return None
        if not raw and ndim != target.ndim:
            raise SchemaError(f"{self.path} was saved with ndim={ndim}, but this storage has ndim={target.ndim}")
        found = spec_from_json(described, target.structure if target.initialized and not raw else None)
        if list(found.paths()) != [leaf.name for leaf in self.manifest.leaves]:
            raise CorruptDataError(f"{self.path} does not describe how its leaves are nested")
        return found

    def verify(self) -> None:
        """Raise CorruptDataError unless all segments hold the bytes that were saved."""
        run_together([partial(self._verify, segment) for segment in self.manifest.segments], threads_for_memory())

    def tensors(self, rows: int, *, verify: bool) -> list[torch.Tensor]:
        """Return tensors with `rows` rows; rows behind the saved ones are zeros.

        The sizes of segments are always checked. Their bytes are compared with their digests if `verify` is set, if
        they are few, or if they were saved without syncing.

        Raises:
            CorruptDataError: a segment is missing, or was changed.
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
                raise CorruptDataError(f"{path} does not hold the bytes that were saved: it has been changed")

    @contextlib.contextmanager
    def _opened(self, segment: Segment) -> Iterator[int]:
        """Open a segment and check its size; yields its descriptor."""
        path, size = self.path / segment.file, segment.size(self._widths)
        try:
            descriptor = open_regular(path, within=self._descriptor)
        except FileNotFoundError:
            raise CorruptDataError(f"{path} is missing, expected {size:,} bytes") from None
        try:
            found = os.fstat(descriptor)
            if stat.S_ISDIR(found.st_mode):
                raise CorruptDataError(f"{path} is a folder, expected a regular file")
            if found.st_size != size:
                raise CorruptDataError(
                    f"{path} has {found.st_size:,} bytes, expected {size:,}: it was cut or overwritten"
                )
            with reading_from(path):
                yield descriptor
        finally:
            os.close(descriptor)


def _mapped(
    memory: PrivateMemory, place: int, size: int, descriptor: int, offset: int
) -> Iterator[tuple[int, memoryview]]:
    """Map the whole pages of a range of bytes of a file into memory, and yield the parts that have to be copied.

    The range has `size` bytes from `offset` on in the file, and goes to `place` in the memory. With a `descriptor` of
    -1, nothing is mapped. Each part is an offset in the file and the memory that gets its bytes.
    """
    head = -place % PAGE
    whole = max(size - head, 0) // PAGE * PAGE
    possible = descriptor >= 0 and whole > 0 and size >= _MAPPED_FROM
    if not (possible and memory.map_file(place + head, whole, descriptor, offset + head)):
        head, whole = size, 0
    for start, stop in ((0, head), (head + whole, size)):
        if start < stop:
            yield offset + start, memory.bytes[place + start : place + stop]


def tensor_of(memory: PrivateMemory, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """View memory as a tensor, which keeps a reference to it."""
    tensor = torch.from_numpy(memory.array).view(dtype) if len(memory.array) else torch.empty(0, dtype=dtype)
    return tensor.view(*shape)


def read_blocks(descriptor: int, blocks: Sequence[tuple[int, memoryview]]) -> None:
    """Fill pieces of memory from a file, each with the bytes at an offset; offsets must ascend.

    Pieces that are less than `PAGE` bytes apart in the file are read by one system call. The file must be long enough.
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
            raise CorruptDataError("a file ends in the middle of a leaf: it was cut while it was read")
        short = [(max(start, end), into[max(end - start, 0) :]) for start, into in waiting[:taken]]
        waiting[:taken] = [(start, into) for start, into in short if len(into)]


def load_segments(storage: TensorStorage, path: Path, *, verify: bool) -> None:
    """Load a checkpoint in segments into a storage, whose next dump to the same place only writes changed rows.

    A `LazyTensorStorage` uses the mapped segments as its memory, without reading them, if there are no references to
    its present rows. Otherwise rows are copied, and always verified.

    Raises:
        SchemaError: keys, types or shapes differ, or there is not enough room. Nothing is changed.
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
    if not storage.rotated:  # otherwise the rows are in another order now
        storage.log.saved_as(manifest.digest, storage.log.now)


def _taken_over(storage: TensorStorage, folder: SegmentFolder, structure: TreeSpec, verify: bool) -> bool:
    """Give mapped rows to a storage as its memory; False, with nothing changed, if they have to be copied."""
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


_BLOCKS_AT_ONCE = 8
"""How many blocks of rows are read at once: a single one may have few bytes of each entry."""


class CapturedRows:
    """The captured rows of a storage; `write` calls `save` with a new storage that holds them.

    Other threads may write to the storage meanwhile. Leaving the context ends the capture.

    A snapshot is read and released part by part, each with all entries of some rows, but the layouts of whole episodes
    read one entry after another. Rows are therefore first copied to an unnamed file next to the checkpoint, which is
    then mapped: memory stays bounded, and writers do not have to wait for digests, compression or syncs.
    """

    def __init__(
        self, storage: TensorStorage, snapshot: Snapshot, part_rows: int, path: Path, save: Callable[[Storage], None]
    ) -> None:
        columns = storage.columns
        self._save = save
        self._storage, self._snapshot, self._part_rows = storage, snapshot, part_rows
        self._file = path.with_name(f".{path.name}.rows")
        self._rows, self._lead, self._widths = storage.rows, columns.lead, columns.widths
        self._structure, self._last_row = storage.structure, newest_row(storage)
        self._types = list(zip(columns.dtypes, [leaf.shape for leaf in columns.leaves], strict=True))
        sizes = (-(-self._rows * width // mmap.PAGESIZE) * mmap.PAGESIZE for width in self._widths)
        self._starts = list(itertools.accumulate(sizes, initial=0))

    @classmethod
    def of(cls, storage: TensorStorage, path: Path, save: Callable[[Storage], None]) -> Self | None:
        """Capture the rows for a checkpoint at `path`; None if `TensorStorage.snapshot` is not possible."""
        if not storage.initialized:
            return None
        columns = storage.columns
        part_rows = _BLOCKS_AT_ONCE * block_rows(storage.rows, sum(columns.widths))
        snapshot = storage.snapshot(part_rows)
        return None if snapshot is None else cls(storage, snapshot, part_rows, path, save)

    def write(self) -> None:
        """Save the rows."""
        fs.make_folder(self._file.parent)
        descriptor = fs.create(self._file)
        try:
            fs.remove(self._file)
            self._copy_rows(descriptor)
            held = LazyTensorStorage(math.prod(self._lead), ndim=self._storage.ndim)
            held.take_over(self._structure, self._tensors(descriptor), self._rows, self._last_row)
        finally:
            fs.close(descriptor, self._file)
        self._save(held)

    def _copy_rows(self, descriptor: int) -> None:
        """Write the rows to the file, entry after entry, each aligned to a page."""
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
        """Return the entries, with zeros in rows that are not valid; mapped if the file system allows it."""
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


_READ_ONLY = 0o444


def write_segments(storage: TensorStorage, path: str | os.PathLike[str], durable: Durable = "full") -> None:
    """Write a storage to the folder `path`, atomically replacing an older checkpoint.

    If this storage has written or loaded the older one, only rows that have changed since are written.
    """
    position = storage.log.now  # before any row is read, so that concurrent writes count as changed next time
    place = Path(os.path.realpath(path))
    with _staged(place, durable) as staged, _opened(published_place(place)) as earlier:
        _publish(_Dump(storage, earlier), storage, position, staged)


class CapturedSegments:
    """The captured rows of a storage, which `write` writes to the folder `path` like `write_segments`.

    Other threads may write to the storage meanwhile. Leaving the context ends the capture.
    """

    def __init__(self, storage: TensorStorage, path: Path) -> None:
        self._storage, self._path = storage, path
        self._position = storage.log.now
        self._open = contextlib.ExitStack()
        try:
            earlier = self._open.enter_context(_opened(published_place(path)))
            self._dump = _Dump(storage, earlier, captured=True)
            self._open.callback(self._dump.close)
        except BaseException:
            self._open.close()
            raise

    @property
    def possible(self) -> bool:
        """Whether the rows are captured: writers copy the rows that they replace."""
        return self._dump.captured

    def write(self) -> None:
        """Write the checkpoint."""
        with _staged(self._path) as staged:
            _publish(self._dump, self._storage, self._position, staged)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()


class _Staged(NamedTuple):
    """A folder to write a checkpoint to, and a function that publishes it.

    The function is called with the names of files whose digests are in another file of the checkpoint.
    """

    folder: Path
    publish: Callable[[Collection[str]], None]


@contextlib.contextmanager
def _staged(place: Path, durable: Durable = "full") -> Iterator[_Staged]:
    """Provide a folder that is atomically moved to `place`; inside another staging folder, this is `place` itself."""
    if unsynced_around(place) is not None and not os.path.lexists(place):
        fs.make_folder(place)
        yield _Staged(place, lambda covered: write_digests(place, covered=covered))
        return
    with CheckpointStaging(place, durable) as staging:
        yield _Staged(staging.path, lambda covered: staging.publish_noted(covered=covered))


def _publish(dump: _Dump, storage: TensorStorage, position: Written, staged: _Staged) -> None:
    """Write a dump to a folder, publish it, and record in the write log which rows it holds."""
    around = unsynced_around(staged.folder / SegmentManifest.FILE)
    synced = around is None or around.durable != "none"
    manifest = dump.write(staged.folder, synced=synced)
    staged.publish(manifest.files)
    storage.log.saved_as(manifest.digest, position)


class _Earlier:
    """The checkpoint at the destination, accessed by the descriptor of its folder: another process may replace it."""

    def __init__(self, manifest: SegmentManifest, descriptor: int) -> None:
        self.manifest = manifest
        self._widths = manifest.widths
        self._descriptor = descriptor

    def share(self, segment: Segment, path: Path) -> bool:
        """Make a hard link to a segment; False if that is impossible, or if the file is not read-only."""
        try:
            found = os.stat(segment.file, dir_fd=self._descriptor, follow_symlinks=False)
            whole = stat.S_ISREG(found.st_mode) and found.st_size == segment.size(self._widths)
            if not whole or found.st_mode & 0o222:
                return False
            fs.link_to(Path(segment.file), path, among=self._descriptor)
        except OutOfSpaceError:
            raise
        except OSError:  # another file system, too many links, or no support for links
            return False
        if self.manifest.synced:
            skip_sync(path, found)
        return True


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[_Earlier | None]:
    descriptor, earlier = -1, None
    try:
        with contextlib.suppress(RbtoolError, OSError):  # missing, of another form, or damaged: nothing can be shared
            descriptor = open_folder(place, follow_links=False)
            earlier = _Earlier(SegmentManifest.load(place, descriptor), descriptor)
        yield earlier
    finally:
        if descriptor >= 0:
            os.close(descriptor)


class _Dump:
    """A dump of a storage: which segments it shares with an earlier checkpoint, and which it writes.

    With `captured`, rows are saved as they are now, if `TensorStorage.snapshot` is possible; `close` ends the capture.
    """

    def __init__(self, storage: TensorStorage, earlier: _Earlier | None, *, captured: bool = False) -> None:
        self._storage = storage
        self._tensors = storage.columns.leaves if storage.initialized else []
        self._manifest = _described(storage)
        self._widths = self._manifest.widths
        self._block = block_rows(self._manifest.rows, sum(self._widths))
        self._lent = storage.log.lent
        self._snapshot: Snapshot | None = None
        self._compare(storage, earlier)
        if captured:
            self._snapshot = storage.snapshot(self._block)

    @property
    def captured(self) -> bool:
        """Whether the rows are captured: writers copy the rows that they replace."""
        return self._snapshot is not None

    def close(self) -> None:
        """End the capture."""
        if self._snapshot is not None:
            self._storage.end_snapshot(self._snapshot)

    def _compare(self, storage: TensorStorage, earlier: _Earlier | None) -> None:
        self._earlier: _Earlier | None = None
        self._changed: list[Run] | None = None
        position = None if earlier is None else storage.log.position_of(earlier.manifest.digest)
        if earlier is None or position is None or not self._manifest.resembles(earlier.manifest):
            return  # this storage has neither written nor loaded the checkpoint
        self._earlier = earlier
        found = storage.log.changed_rows(position, self._manifest.capacity, self._block)
        self._changed = None if found is None else joined(found)

    def write(self, folder: Path, *, synced: bool) -> SegmentManifest:
        """Share or write all segments, then write the manifest, to an empty folder; `synced` is recorded in it."""
        manifest, earlier = replace(self._manifest, synced=synced), self._earlier
        kept = merged(self._kept(), manifest.rows, self._block)
        if earlier is not None:
            kept = {one: runs for one, runs in kept.items() if earlier.share(one, folder / one.file)}
        before = () if earlier is None else earlier.manifest.segments
        new = written(kept, manifest.rows, self._block, before[-1].number + 1 if before else 0)
        fs.require_space(folder, sum(one.size(self._widths) for one in new))
        files = dict[Segment, LeafFile]()
        with contextlib.ExitStack() as stack, Blocks(len(new)) as blocks:
            for one in new:
                files[one] = LeafFile(folder / one.file, mode=_READ_ONLY)
                stack.callback(files[one].close)
            for one in self._in_order(new):
                blocks.begin(files[one])
                for part in self._parts(one):
                    blocks.append_bytes(part)
            blocks.finish()
        done = (replace(one, digest=file.digest) for one, file in files.items())
        return replace(manifest, segments=(*sorted(kept, key=lambda one: one.number), *done)).save(folder)

    def _in_order(self, new: Sequence[Segment]) -> Iterator[Segment]:
        """Yield the segments to be written, and release the rows of each in the snapshot after it was written.

        With a snapshot, segments come first whose rows writers wait for or will replace soon.
        """
        if self._snapshot is None:
            yield from new
            return
        left, parts = {one: _blocks_of(one.runs, self._block) for one in new}, self._snapshot.parts()
        self._snapshot.release(*self._snapshot.left.difference(*left.values()))
        for part in parts:
            for one in [one for one, its in left.items() if part in its]:
                yield one
                its = left.pop(one)
                self._snapshot.release(*its.difference(*left.values()))

    def _kept(self) -> dict[Segment, Sequence[Run]]:
        """Return the segments of the earlier checkpoint that can be shared, with the rows that are read from each.

        If the write log lacks some changes, or references to rows were handed out, a segment can only be shared
        if all of its rows are read from it and their present bytes have its digest.
        """
        if self._earlier is None:
            return {}
        earlier = self._earlier.manifest
        left = without([(0, min(self._manifest.rows, earlier.rows))], self._changed or [])
        found: dict[Segment, Sequence[Run]] = {one: runs for one, runs in earlier.valid(left) if runs}
        if self._changed is not None and not self._lent:
            return found
        whole, same = [one for one, runs in found.items() if count_of(runs) == one.rows], set[Segment]()

        def compare(one: Segment) -> None:
            if _digest(self._parts(one)) == one.digest:
                same.add(one)

        run_together([partial(compare, one) for one in whole], threads_for_memory())
        return {one: runs for one, runs in found.items() if one in same}

    def _parts(self, one: Segment) -> Iterator[memoryview]:
        """Yield the bytes of a segment's file."""
        end = 0
        for leaf, (start, stop), place in one.blocks(self._widths):
            if place > end:
                yield memoryview(bytes(place - end))
            if self._snapshot is None:
                yield tensor_bytes(self._tensors[leaf][start:stop])
            else:
                for run in _at_blocks(start, stop, self._block):
                    yield from self._snapshot.read(leaf, run)
            end = place + (stop - start) * self._widths[leaf]


def _blocks_of(runs: Iterable[Run], block: int) -> set[int]:
    """Return the numbers of the blocks that contain some of these rows."""
    return {number for start, stop in runs for number in range(start // block, -(-stop // block))}


def _at_blocks(start: int, stop: int, block: int) -> Iterator[range]:
    """Divide a run at the bounds of blocks."""
    while start < stop:
        end = min(stop, (start // block + 1) * block)
        yield range(start, end)
        start = end


def _described(storage: TensorStorage) -> SegmentManifest:
    """Return the manifest of a storage, still without segments."""
    if not storage.initialized:
        return SegmentManifest(None, storage.ndim, 0, 0, None, 0, True, ())
    columns, structure = storage.columns, storage.structure
    return SegmentManifest(
        spec_to_json(structure), storage.ndim, len(storage), storage.rows, newest_row(storage),
        columns.lead[0], True, leaves_of(list(structure.paths()), columns.leaves),
    )  # fmt: skip


def _digest(parts: Iterable[memoryview]) -> str:
    hasher = Hasher()
    for part in parts:
        hasher.update(part)
    return hasher.digest
