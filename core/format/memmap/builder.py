"""Builds dataset folders in layout `ted`: row by row, or with rows that arrive in any order from any process.

`OverlappedBuilder` passes rows to another builder in a thread, while the caller reads the next rows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ... import __version__
from ...errors import FormatError
from ...ted.episodes import BoundaryCounts
from ...ted.schema import Field, Key, field_named
from .. import fs
from ..contracts import Array, Closing
from ..documents import written_time
from ..episodes import EpisodeRow, EpisodeTable, write_episode_text
from ..files import FileRecord, Hasher, bytes_of
from ..manifest import (
    ENV_METADATA,
    SOURCE_DOCUMENTS,
    Dropped,
    Layout,
    Manifest,
    Provenance,
    Request,
    content_digest,
    is_inside,
)
from ..open_files import pread_into, pread_rows
from ..syncing import sync_file
from ..threads import started
from ..videos import VideoContents, reference_keys, write_videos
from .tree import (
    FieldRange,
    Rows,
    TreeWriter,
    as_array,
    leaf_path,
    leaf_sizes,
    plain_leaves,
    write_listed,
    write_tree_meta,
)

_CHUNK = 4 << 20
_BUFFER = 1 << 19
"""The number of bytes that are read back at a time for a digest; they fit into the processor's cache."""


class RowFiles:
    """The leaf files of a `PositionedTree`, open in one process to be written at any row."""

    def __init__(self, folder: Path, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)
        self._open: list[tuple[Field, int, Path]] = []
        try:
            for field in fields:
                path = folder / leaf_path(field.key)
                self._open.append((field, fs.open_to_fill(path), path))
        except BaseException:
            self.close()
            raise

    def write(self, columns: Mapping[Key, Array], start: int) -> None:
        """Write rows from row `start` on: arrays `[n, *shape]` of the element type of each field."""
        for field, descriptor, path in self._open:
            array = columns[field.key]
            if array.size:
                fs.pwrite(descriptor, bytes_of(array), start * field.row_bytes, path)

    def close(self) -> None:
        """Close the files; harmless when done twice."""
        while self._open:
            _, descriptor, path = self._open.pop()
            fs.close(descriptor, path)


class PositionedFiles(Closing):
    """Creates files of known sizes, which any process may write in any order, and computes their digests.

    The digest of a file is taken from its beginning on, as far as the bytes are settled, which means final.
    OutOfSpaceError if there is not enough space. Leaving the context closes the files, finished or not.

    Args:
        folder: where the files are.
        sizes: the size of each file in bytes, by its path inside the folder.
        reuse: whether to continue with files that an earlier instance created.
        reserve: whether to allocate the disk space at once, if all bytes will certainly be written.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int], *, reuse: bool = False, reserve: bool = False) -> None:
        self.folder = folder
        self._sizes = dict(sizes)
        self._settled = dict.fromkeys(sizes, 0)  # bytes whose digest is taken
        self._open: dict[str, int] = {}
        self._buffer = np.empty(_BUFFER, np.uint8)
        self._hashers = {name: Hasher() for name in sizes}
        if not reuse:
            fs.require_space(folder, sum(sizes.values()))
        try:
            for name, size in sizes.items():
                path = folder / name
                make = not reuse or not path.exists()
                if make:
                    fs.make_folder(path.parent)
                self._open[name] = fs.create(path) if make else fs.open_to_change(path)
                if reserve and size > _CHUNK:
                    fs.reserve(self._open[name], size)
        except BaseException:
            self.close()
            raise

    def place(self, name: str) -> tuple[int, Path]:
        """Return the descriptor and the path of a file."""
        return self._open[name], self.folder / name

    def digest(self, name: str, start: int, stop: int) -> str:
        """Return the digest of bytes that were written; CorruptDataError if the file ends before them."""
        hasher = Hasher()
        self._update(hasher, name, start, stop)
        return hasher.digest

    def forget(self, name: str, start: int, stop: int) -> None:
        """Drop bytes that another machine wrote from the page cache, which may have older ones of a shared folder."""
        if hasattr(os, "posix_fadvise"):
            page = os.sysconf("SC_PAGESIZE")
            first = start // page * page
            os.posix_fadvise(self._open[name], first, -(-stop // page) * page - first, os.POSIX_FADV_DONTNEED)

    def settle(self, name: str, stop: int) -> None:
        """Record that all bytes before `stop` are final: compute their digest, and start to write them to the disk.

        Both are put off until there are enough bytes.
        """
        if stop - self._settled[name] >= _CHUNK:
            self._settle(name, stop)

    def _settle(self, name: str, stop: int) -> None:
        before = self._settled[name]
        self._update(self._hashers[name], name, before, stop)
        fs.start_syncing(self._open[name], before, stop - before)
        self._settled[name] = stop

    def _update(self, hasher: Hasher, name: str, start: int, stop: int) -> None:
        descriptor, path = self.place(name)
        for at in range(start, stop, len(self._buffer)):
            part = self._buffer[: stop - at]
            pread_into(part, descriptor, path, at, f"byte {stop}")
            hasher.update(part.data)

    def finish(self) -> list[FileRecord]:
        """Sync and close all files, remove the empty ones, and return the others with their digests."""
        records = []
        for name, size in self._sizes.items():
            self._settle(name, size)
        for name, size in self._sizes.items():
            descriptor, path = self.place(name)
            if size:
                sync_file(descriptor, path)
                records.append(FileRecord(name, size, self._hashers[name].digest))
            else:
                fs.remove(path)
        self.close()
        return records

    def close(self) -> None:
        """Close every descriptor; harmless when done twice."""
        while self._open:
            name, descriptor = self._open.popitem()
            fs.close(descriptor, self.folder / name)


class PositionedTree(PositionedFiles):
    """The leaf files of a memory-map directory with `rows` rows of all fields; `finish` completes the directory."""

    def __init__(self, folder: Path, fields: Sequence[Field], rows: int, *, reuse: bool = False) -> None:
        self.fields = tuple(fields)
        self.rows = rows
        super().__init__(folder, leaf_sizes(fields, rows), reuse=reuse)

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read written rows back."""
        field = field_named(self.fields, key)
        if not field.row_bytes or start == stop:
            return np.empty((stop - start, *field.shape), field.numpy)
        return pread_rows(*self.place(leaf_path(key)), field, start, stop)

    def write(self, key: Key, start: int, array: Array) -> None:
        """Overwrite rows of one leaf before they are settled."""
        descriptor, path = self.place(leaf_path(key))
        fs.pwrite(descriptor, bytes_of(array), start * field_named(self.fields, key).row_bytes, path)

    def settle_rows(self, rows: int) -> None:
        """Settle everything before row `rows`."""
        for field in self.fields:
            self.settle(leaf_path(field.key), rows * field.row_bytes)

    def finish(self) -> list[FileRecord]:
        """Sync and close all leaves, write the `meta.json` files, return what was written."""
        return super().finish() + write_tree_meta(self.folder, plain_leaves(self.fields, self.rows), (self.rows,))


def created_by() -> str:
    """Return the entry `created_by` of a manifest: rbtool and its version."""
    return f"rbtool {__version__}"


def provenance_step(verb: str, arguments: Mapping[str, Any], inputs: Mapping[str, str]) -> Provenance:
    """Return a step of the provenance with the current time (UTC)."""
    return Provenance(verb, dict(arguments), __version__, dict(inputs), written_time())


@dataclass(frozen=True, slots=True)
class Origin:
    """The entries of a manifest that do not follow from the rows: request, provenance, spaces, notes, documents."""

    request: Request
    provenance: tuple[Provenance, ...] = ()
    resolved_revision: str | None = None
    spaces: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    renamed_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dropped_keys: tuple[Dropped, ...] = ()
    notes: tuple[str, ...] = ()
    documents: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    videos: VideoContents = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest, documents: Mapping[str, bytes], videos: VideoContents | None = None) -> Origin:
        """Take the entries of the manifest of another dataset or checkpoint, with its documents and kept videos."""
        return cls(
            manifest.request, manifest.provenance, manifest.resolved_revision, manifest.spaces,
            manifest.renamed_keys, manifest.dropped_keys, manifest.notes, documents, videos or {},
        )  # fmt: skip


def write_documents(root: Path, documents: Mapping[str, bytes]) -> list[FileRecord]:
    """Keep the source's metadata files under `.rbtool/source/`, and `env_metadata.json` next to the data."""
    records = []
    for name, data in documents.items():
        if not is_inside(name):
            raise FormatError(f"{name!r} cannot be kept as a file: it leads out of its folder")
        path = ENV_METADATA if name == ENV_METADATA else f"{SOURCE_DOCUMENTS}{name}"
        fs.make_folder((root / path).parent)
        records.append(write_listed(root, path, data))
    return records


class RowBuilder(Closing, ABC):
    """Writes a dataset: takes TED rows, then the episode table and the origin. Leaving the context closes the files."""

    @abstractmethod
    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Append the same number of rows to every leaf; `last`, bool `[n]`, marks those that end an episode."""

    def append_fresh(self, columns: Mapping[Key, Rows], last: Array) -> None:
        """Append rows in arrays that the caller will not change, so that they may be written later."""
        self.append({key: as_array(rows) for key, rows in columns.items()}, last)

    def finish(
        self,
        episodes: EpisodeTable | Sequence[EpisodeRow],
        origin: Origin,
        text: Sequence[dict[str, str]] | None = None,
    ) -> Manifest:
        """Write the episode table, the text, the source's metadata and, last, the manifest.

        SchemaError if the table has other episodes than those that were appended, in a layout that marks their ends.
        """
        table = episodes if isinstance(episodes, EpisodeTable) else EpisodeTable.from_rows(episodes)
        return self._complete(table, origin, text or ())

    @abstractmethod
    def _complete(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        """Complete the files, then write the table, the text, the source's metadata and the manifest."""


class DatasetBuilder(RowBuilder):
    """Writes a dataset in layout `ted` to a new folder; `rows` is the final number of rows, if known."""

    def __init__(self, folder: Path, fields: Sequence[Field], rows: int = 0) -> None:
        self.folder = folder
        self.fields = tuple(fields)
        self._tree = TreeWriter(folder, fields, rows=rows)

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        self._tree.append(columns)

    def append_fresh(self, columns: Mapping[Key, Rows], last: Array) -> None:
        self._tree.append(columns)

    def _complete(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        data = self._tree.finish((table.steps,))
        return write_manifest(self.folder, self.fields, data, self._tree.ranges, table, origin, text)

    def close(self) -> None:
        self._tree.close()


def write_manifest(
    folder: Path,
    leaves: Sequence[Field],
    data: Sequence[FileRecord],
    ranges: Mapping[Key, FieldRange],
    table: EpisodeTable,
    origin: Origin,
    text: Sequence[dict[str, str]] | None = None,
    *,
    layout: Layout = "ted",
    boundary: BoundaryCounts | None = None,
    at_once: bool = False,
) -> Manifest:
    """Complete a folder whose data files are written: episodes, text, documents and, last, the manifest."""
    files = [*data, *table.save(folder), *write_episode_text(folder, text or ())]
    files += write_documents(folder, origin.documents)
    files += write_videos(folder, origin.videos if reference_keys(leaves) else {})
    files.sort()
    manifest = Manifest(
        kind="dataset", layout=layout, request=origin.request, steps=table.steps, episodes=len(table),
        fields=tuple(leaves), files=tuple(files), content_digest=content_digest(tuple(files)), created_by=created_by(),
        resolved_revision=origin.resolved_revision, ranges=dict(ranges), spaces=origin.spaces,
        renamed_keys=origin.renamed_keys, dropped_keys=origin.dropped_keys, notes=origin.notes,
        boundary=boundary or table.counts(), provenance=origin.provenance,
    )  # fmt: skip
    manifest.save(folder, at_once=at_once)
    return manifest


def env_metadata_bytes(metadata: Mapping[str, Any]) -> bytes:
    """Return the bytes of `env_metadata.json` for TorchRL, which needs the literal Infinity for unbounded spaces."""
    return json.dumps(metadata).encode()


_Rows: TypeAlias = tuple[Mapping[Key, Rows], Array]
_WAITING = 1
"""The number of blocks of rows that may wait to be written."""


class OverlappedBuilder(RowBuilder):
    """Passes rows to `builder` in a thread; digests, writes and ranges of arrays release Python's global lock.

    Rows are written in the order in which they arrive. An error of the thread is raised by the next call. Leaving the
    context stops the thread and closes `builder`.
    """

    def __init__(self, builder: RowBuilder) -> None:
        self._builder = builder
        self._waiting: queue.Queue[_Rows | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopped = False

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Write the waiting rows, then these."""
        self._end_thread()
        self._raise_error()
        self._builder.append(columns, last)

    def append_fresh(self, columns: Mapping[Key, Rows], last: Array) -> None:
        """Append rows in the thread, after waiting for space in the queue; in this thread if none can be started."""
        self._raise_error()
        if self._thread is None:
            self._thread = started(self._write, "rbtool-writer")
        if self._thread is None:
            self._builder.append_fresh(columns, last)
        else:
            self._waiting.put((columns, last))

    def _write(self) -> None:
        while (rows := self._waiting.get()) is not None:
            if self._error is None and not self._stopped:
                try:
                    self._builder.append_fresh(*rows)
                except BaseException as error:
                    self._error = error
            del rows  # frees them before the wait for the next ones

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _end_thread(self) -> None:
        """Wait until everything is written, and end the thread."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _complete(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        self._end_thread()
        self._raise_error()
        return self._builder.finish(table, origin, text)

    def close(self) -> None:
        """End the thread without writing the waiting rows, and close the builder."""
        self._stopped = True
        try:
            self._end_thread()
        finally:
            self._builder.close()
