"""Divides datasets into shards, which are ranges of whole episodes; finds and digests their bytes in each file."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..format.documents import decode, dump_json, parse_json
from ..format.files import digest_file
from ..format.manifest import HIDDEN, SHARDS_DOCUMENT, VIDEOS, Manifest
from ..format.memmap.reader import TedReader
from ..format.memmap.tree import leaf_path
from ..format.packed.reader import PackedReader
from ..format.packed.schema import EXPLICIT, RECORDS, SCHEMA, PackedField, PackedSchema
from ..format.videos import reference_keys
from ..ted.schema import NEXT, row_bytes

Numbers: TypeAlias = NDArray[np.int64]
Range: TypeAlias = tuple[int, int]

SHARD_BYTES = 64 << 20
"""The size of a shard in bytes, with videos, unless one episode, or one video of each camera, is larger."""
_LARGEST_BYTES = 8 * SHARD_BYTES


@dataclass(frozen=True)
class EpisodeShards:
    """The division of a dataset into shards: shard k has the episodes `[bounds[k], bounds[k + 1])`.

    `bounds` is int64 `[shards + 1]`. The division depends on the fields, the lengths of the episodes and the sizes of
    kept videos, and not on the layout or the place of the dataset, so that it is the same for a stream and a download.
    """

    lengths: Numbers
    bounds: Numbers

    @classmethod
    def of(cls, reader: TedReader | PackedReader) -> EpisodeShards:
        """Divide a dataset into the shards of the source from which it was made, or into shards of `SHARD_BYTES`.

        The shards of the source are used unless they are much larger. In the other case a shard ends with the episode
        that exceeds the size. Videos count as an average number of bytes a step. A shard is at least as large as the
        largest video times the number of cameras, so that few shards share a video.
        """
        lengths = reader.episodes.length.astype(np.int64)
        videos = [file.size for file in reader.manifest.files if file.path.startswith(VIDEOS)]
        taken = row_bytes(reader.fields) + sum(videos) // max(1, int(lengths.sum()))
        cameras = sum(key[0] != NEXT for key in reference_keys(reader.fields))
        most = max(SHARD_BYTES, cameras * max(videos, default=0))
        ends = np.cumsum(lengths) * max(1, taken)
        bounds, begin = [0], 0
        while bounds[-1] < len(lengths):
            stop = int(np.searchsorted(ends, begin + most, side="left")) + 1
            bounds.append(min(max(stop, bounds[-1] + 1), len(lengths)))
            begin = int(ends[bounds[-1] - 1])
        found = cls(lengths, np.array(bounds, np.int64))
        stated = _stated_bounds(reader)
        own = found if stated is None else cls(lengths, stated)
        return own if max(own.rows, default=0) * row_bytes(reader.fields) <= _LARGEST_BYTES else found

    @functools.cached_property
    def starts(self) -> Numbers:
        """The first steps of the shards and, at the end, the number of steps: int64 `[shards + 1]`."""
        return np.concatenate([[0], np.cumsum(self.lengths)])[self.bounds]

    @property
    def rows(self) -> list[int]:
        """The number of steps of each shard."""
        return list(map(int, np.diff(self.starts)))


def _stated_bounds(reader: TedReader | PackedReader) -> Numbers | None:
    """Return the bounds of the source's shards, which a document states as episode numbers; None without one."""
    numbers = reader.episodes.episode
    if not reader.manifest.request.source or (np.diff(numbers) <= 0).any():
        return None
    document = reader.documents().get(SHARDS_DOCUMENT)
    if document is None:
        return None
    starts = np.array(decode(tuple[int, ...], parse_json(document, SHARDS_DOCUMENT), SHARDS_DOCUMENT), np.int64)
    return np.concatenate([[0], np.searchsorted(numbers, starts[1:]), [len(numbers)]]).astype(np.int64)


# Files ----------------------------------------------------------------------------------------------


def row_files(manifest: Manifest, schema: Callable[[], bytes]) -> set[str]:
    """Return the names of the files that hold rows; `schema` gives the bytes of `schema.json` in layout packed."""
    if manifest.layout == "ted":
        return {leaf_path(field.key) for field in manifest.fields if field.row_bytes}
    if manifest.layout != "packed":
        raise FormatError(f"a dataset in layout {manifest.layout} is in no shards, expected ted or packed")
    found = PackedSchema.parse(schema(), manifest.fields, SCHEMA)
    own = {one.file(explicit=explicit) for one in found.own_files for explicit in (False, True)}
    return {file.path for file in manifest.files} & {RECORDS, EXPLICIT, *own}


def row_ranges(reader: TedReader | PackedReader, first: int, stop: int) -> dict[str, Range]:
    """Return the bytes of each file that hold the rows of the episodes `[first, stop)` of the table."""
    table = reader.episodes
    if first == stop:
        return {}
    steps = int(table.start[first]), int(table.start[stop - 1] + table.length[stop - 1])
    if isinstance(reader, TedReader):
        sized = (field for field in reader.fields if field.row_bytes)
        return {leaf_path(field.key): _bytes(steps, field.row_bytes) for field in sized}
    numbers, schema = reader.numbers, reader.schema
    records = steps[0] + first, steps[1] + stop
    starts = numbers.explicit_starts[first:stop]
    apart = np.flatnonzero(starts >= 0)
    explicit = None
    if len(apart):
        explicit = int(starts[apart[0]]), int(starts[apart[-1]] + table.length[first + apart[-1]])
    found = {RECORDS: _bytes(records, schema.record_bytes)}
    if explicit is not None:
        found[EXPLICIT] = _bytes(explicit, schema.record_bytes)
    for one in schema.own_files:
        found[one.file()] = _own_bytes(reader, one, records if one.state else steps, explicit=False)
        if one.state and explicit is not None:
            found[one.file(explicit=True)] = _own_bytes(reader, one, explicit, explicit=True)
    return found


def _bytes(rows: Range, width: int) -> Range:
    return rows[0] * width, rows[1] * width


def _own_bytes(reader: PackedReader, one: PackedField, rows: Range, *, explicit: bool) -> Range:
    """Return the range of bytes of rows in the file of a field, or of the compressed chunks that contain them."""
    if one.codec is None:
        return _bytes(rows, one.field.row_bytes)
    offsets = reader.offsets(one, explicit)
    return int(offsets[rows[0] // one.chunk_rows]), int(offsets[-(-rows[1] // one.chunk_rows)])


# Digests --------------------------------------------------------------------------------------------

SHARD_DIGESTS = f"{HIDDEN}/shard-digests.json"
"""The file next to a dataset on a hub that has the digests of its shards."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class ShardDigests:
    """The digests of the bytes of each shard in each file of rows, "" if a shard has no bytes in a file.

    `content_digest` identifies the dataset, and `bounds` its shards. The manifest only has digests of whole files,
    which cannot verify a part of a file.
    """

    content_digest: str
    bounds: tuple[int, ...]
    files: Mapping[str, tuple[str, ...]]
    format_version: int = _VERSION

    @classmethod
    def of(
        cls, reader: TedReader | PackedReader, place: Callable[[str], Path], advance: Callable[[int], None]
    ) -> ShardDigests:
        """Compute the digests of a dataset. `place` finds its files; `advance` is called with the bytes read."""
        bounds: list[int] = EpisodeShards.of(reader).bounds.tolist()
        found: dict[str, list[str]] = {}
        for number, (first, stop) in enumerate(pairwise(bounds)):
            for name, range_ in row_ranges(reader, first, stop).items():
                digests = found.setdefault(name, [""] * (len(bounds) - 1))
                digests[number] = digest_file(place(name), *range_)
                advance(range_[1] - range_[0])
        files = {name: tuple(digests) for name, digests in found.items()}
        return cls(reader.manifest.content_digest, tuple(bounds), files)

    def document(self) -> bytes:
        """Return the bytes of the file; `parse` reads them."""
        return dump_json(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes, reader: TedReader | PackedReader, bounds: Numbers) -> ShardDigests | None:
        """Read the digests of the shards of a dataset; None if they belong to another dataset, or to other shards.

        FormatError if the bytes are something else.
        """
        found = decode(cls, parse_json(data, SHARD_DIGESTS), SHARD_DIGESTS)
        if any(len(digests) != len(found.bounds) - 1 for digests in found.files.values()):
            raise FormatError(f"{SHARD_DIGESTS} does not have one digest for each shard")
        same = found.format_version == _VERSION and found.content_digest == reader.manifest.content_digest
        return found if same and list(found.bounds) == bounds.tolist() else None

    def fits(self, name: str, number: int, path: Path, range_: Range) -> bool:
        """Return whether a range of the file at `path` has the bytes of shard `number` in the file `name`."""
        digests = self.files.get(name)
        return digests is not None and digest_file(path, *range_) == digests[number]
