"""The form of a checkpoint of a storage of tensors in segments.

    segments.json              how the data is made, its length, its leaves, and the digest of every segment
    segment-00000.memmap …     rows [0, n), [n, 2n), … of all leaves: one block a leaf, each at a multiple of 4 KiB
    .rbtool/digests.json       the digest of segments.json, which has one of its own, too

n is a power of two. A segment is never changed once it is published, and its file is read-only: later checkpoints at
the same place, and processes that mapped it, share it.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..encodings.layout import SEGMENTS_FILE
from ..errors import CorruptDataError
from ..format.digest import open_regular
from ..format.documents import Count, decode, document_digest, dump_json, newer_version, parse_json
from ..format.manifest import HIDDEN
from ..format.syncing import write_file
from ..storages.codec import byte_count, dtype_named
from ..storages.item_documents import read_shape

BLOCK = 4096
"""Blocks of leaves in a segment start at multiples of this."""
_MOST, _FEWEST_BYTES = 128, 1 << 20
_VERSION = 1
_HINT = "if TorchRL wrote over this checkpoint, remove segments.json and .rbtool in it; else save it again"


@dataclass(frozen=True, slots=True)
class SegmentLeaf:
    """A leaf: the path of its keys, its element type and the shape of a row."""

    name: tuple[str, ...]
    dtype: str
    shape: tuple[Count, ...]

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return _width(self.dtype, self.shape)


@functools.lru_cache(256)
def _width(dtype: str, shape: tuple[int, ...]) -> int:
    return byte_count(dtype_named(dtype), read_shape(shape))


def leaves_of(names: Sequence[tuple[str, ...]], tensors: Sequence[torch.Tensor]) -> tuple[SegmentLeaf, ...]:
    """Describe tensors whose first dimension counts rows."""
    pairs = zip(names, tensors, strict=True)
    return tuple(SegmentLeaf(tuple(name), str(tensor.dtype), tuple(tensor.shape[1:])) for name, tensor in pairs)


def segment_rows(capacity: int, filled: int, row_bytes: int) -> int:
    """Return how many rows a segment has: a power of two, such that there are at most 128 for twice the filled rows.

    Segments have at least 1 MiB. So a few per cent of the rows are in a few segments, and the size changes no more
    than once each time that the rows double.
    """
    least = max(min(capacity, 2 * filled) / _MOST, _FEWEST_BYTES / max(row_bytes, 1), 1)
    return 1 << math.ceil(math.log2(least))


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
    segment_rows: Count
    synced: bool
    leaves: tuple[SegmentLeaf, ...]
    digests: tuple[str, ...] = ()
    digest: str = ""
    format_version: int = _VERSION

    FILE: ClassVar[str] = SEGMENTS_FILE

    # Segments --------------------------------------------------------------------------------------

    def rows_of(self, number: int) -> range:
        """Return the rows of a segment."""
        start = number * self.segment_rows
        return range(start, min(start + self.segment_rows, self.rows))

    @staticmethod
    def file(number: int) -> str:
        """Name the file of a segment."""
        return f"segment-{number:05}.memmap"

    @property
    def files(self) -> list[str]:
        """The files of all segments."""
        return [self.file(number) for number in range(len(self.digests))]

    def blocks(self, rows: int) -> list[int]:
        """Return where the blocks of the leaves start in a segment of so many rows; last, the size of the file."""
        starts = [0]
        for leaf in self.leaves:
            starts.append(starts[-1] + -(-rows * leaf.width // BLOCK) * BLOCK)
        return starts

    @property
    def sizes(self) -> list[int]:
        """The bytes of each segment's file."""
        whole, rest = divmod(self.rows, self.segment_rows)
        full, last = self.blocks(self.segment_rows)[-1], self.blocks(rest)[-1]
        return [full] * whole + [last] * (rest > 0)

    def resembles(self, other: SegmentManifest) -> bool:
        """Whether segments of the other one's size do for this storage, and its leaves are the same."""
        wanted = self.segment_rows
        return self.leaves == other.leaves and wanted // 2 <= other.segment_rows <= 2 * wanted

    # The document ----------------------------------------------------------------------------------

    def save(self, folder: Path) -> SegmentManifest:
        """Write the document into a folder; return it with its digest."""
        document = asdict(self)
        document["digest"] = document_digest(document, "digest")
        write_file(folder / self.FILE, dump_json(document).encode())
        return replace(self, digest=document["digest"])

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
        found = decode(cls, document, str(path), CorruptDataError)
        if found.digest != document_digest(document, "digest"):
            raise CorruptDataError(f"{path} was changed after it was written: its digest does not match", hint=_HINT)
        if found.segment_rows < 1 or len(found.digests) != -(-found.rows // found.segment_rows):
            raise CorruptDataError(f"{path} does not list the segments of {found.rows:,} rows")
        known = {cls.FILE, HIDDEN, *found.files}
        strange = next((name for name in sorted(os.listdir(descriptor)) if name not in known and name[0] != "."), None)
        if strange is not None:
            raise CorruptDataError(f"{folder / strange} was not saved with the rest of {folder}", hint=_HINT)
        return found
