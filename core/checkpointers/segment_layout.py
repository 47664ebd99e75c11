"""The form of a checkpoint of a storage of tensors in segments.

    segments.json              how the data is made, its length, its leaves, the rows and the digest of every segment
    segment-00000.memmap …     some runs of rows: for each leaf, a block for each run
    .rbtool/digests.json       the digest of segments.json, which has one of its own, too

Segments are numbered in the order in which they were written: a row that is in several is that of the last one. A
segment is never changed once it is published, and its file is read-only: later checkpoints at the same place, and
processes that mapped it, share it. Log-structured file systems and Lucene keep data in such segments.

A block starts at the first place in the file that is, modulo 4 KiB, its place among the bytes of all rows of the leaf:
so whole pages of it can be mapped there. Bytes between blocks are zeros.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from ..encodings.layout import SEGMENTS_FILE
from ..errors import CorruptDataError
from ..format.digest import open_regular
from ..format.documents import Count, decode, document_digest, dump_with_digest, newer_version, parse_json
from ..format.manifest import HIDDEN
from ..format.syncing import write_file
from ..storages.codec import byte_count, dtype_named
from ..storages.item_documents import read_shape
from .runs import Run, common, count_of, joined, without

PAGE = 4096
"""Blocks can be mapped in units of this."""
_BLOCKS, _FEWEST_BYTES = 1024, 1 << 19
_VERSION = 2
_HINT = "if TorchRL wrote over this checkpoint, remove segments.json and .rbtool in it; else save it again"


@dataclass(frozen=True, slots=True)
class SegmentLeaf:
    """A leaf: the path of its keys, its element type and the shape of a row."""

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
    """Return in what units rows are written that changed here and there, and segments are cut: a power of two.

    There are at most 1,024 of them, of at least 512 KiB.
    """
    least = max(filled / _BLOCKS, _FEWEST_BYTES / max(row_bytes, 1), 1)
    return 1 << math.ceil(math.log2(least))


class Block(NamedTuple):
    """The bytes of one run in one leaf: its rows, and where it starts in the file of the segment."""

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
    """Whether blocks start and end at multiples of 4 KiB, as in format version 1."""

    @property
    def file(self) -> str:
        """The name of the file."""
        return f"segment-{self.number:05}.memmap"

    @property
    def rows(self) -> int:
        """How many rows it has, also those that are in later segments."""
        return count_of(self.runs)

    def blocks(self, widths: Sequence[int]) -> Iterator[Block]:
        """Yield the blocks in the order of the file: leaf after leaf, of rows of so many bytes, and run after run."""
        end = 0
        for leaf, width in enumerate(widths):
            for run in self.runs:
                start = end + self._gap(run[0] * width, end)
                yield Block(leaf, run, start)
                end = start + (run[1] - run[0]) * width

    def size(self, widths: Sequence[int]) -> int:
        """Return the bytes of the file, of leaves with rows of so many bytes."""
        end = 0
        for width in widths:
            for first, stop in self.runs:
                end += self._gap(first * width, end) + (stop - first) * width
        return end + self._gap(0, end) if self.whole_pages else end

    def _gap(self, place: int, end: int) -> int:
        """Return the bytes between `end` and a block of which `place` is the place among all rows of the leaf."""
        return (-end if self.whole_pages else place - end) % PAGE


@dataclass(frozen=True, slots=True)
class SegmentManifest:
    """The document of a checkpoint in segments; `structure` is None where nothing was ever written.

    `ndim` dimensions count elements, of which there are `length` in `rows` rows; the storage had room for `capacity`.
    `synced`: the segments were brought to the disk before they were published. `digest` is that of the document, and
    covers all bytes of the checkpoint: what has the same one has the same contents.
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
        """Bytes of a row of each leaf."""
        return [_width(leaf.dtype, leaf.shape) for leaf in self.leaves]

    @property
    def files(self) -> list[str]:
        """The files of all segments."""
        return [segment.file for segment in self.segments]

    def valid(self, rows: Sequence[Run]) -> Iterator[tuple[Segment, list[Run]]]:
        """Yield the segments, the last one first, with those of these rows that are not in a later one."""
        left = rows
        for segment in reversed(self.segments):
            yield segment, common(left, segment.runs)
            left = without(left, segment.runs)

    def resembles(self, other: SegmentManifest) -> bool:
        """Whether segments of another checkpoint can be part of this one."""
        return self.leaves == other.leaves and self.format_version == other.format_version

    # The document ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> SegmentManifest:
        """Write the document into a folder; return it with its digest."""
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
        """Read the document of the folder with this descriptor, also where another one is at its path by now.

        CorruptDataError if it is damaged, or if there are files that do not belong to the checkpoint. FormatError for
        one of a newer version.
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
            raise CorruptDataError(f"{folder / strange} was not saved with the rest of {folder}", hint=_HINT)
        return found

    def _require_rows(self, path: Path) -> None:
        """Raise CorruptDataError unless the segments are in order and have all rows."""
        numbers = [segment.number for segment in self.segments]
        in_order = numbers == sorted(set(numbers)) and all(
            list(segment.runs) == joined(segment.runs) and segment.runs for segment in self.segments
        )
        found = sum(count_of(runs) for _, runs in self.valid([(0, self.rows)])) if in_order else -1
        if found != self.rows:
            raise CorruptDataError(f"{path} does not list the segments of {self.rows:,} rows")


_ENTRIES = [entry.name for entry in fields(SegmentManifest) if entry.name != "digest"]


@dataclass(frozen=True, slots=True)
class _Version1:
    """A document of format version 1: each file has `segment_rows` consecutive rows."""

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
        """The same as a document of today."""
        segments = tuple(
            Segment(number, ((start, min(start + self.segment_rows, self.rows)),), digest, whole_pages=True)
            for number, digest in enumerate(self.digests)
            if (start := number * self.segment_rows) < self.rows
        )
        return SegmentManifest(
            self.structure, self.ndim, self.length, self.rows, self.last_row, self.capacity, self.synced, self.leaves,
            segments, self.digest, format_version=1,
        )  # fmt: skip
