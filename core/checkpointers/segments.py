"""Writes a storage of tensors in segments, and shares unchanged ones with the checkpoint that is replaced."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..encodings.streams import Blocks, LeafFile
from ..errors import OutOfSpaceError, RbtoolError
from ..format import fs
from ..format.digest import Hasher, open_folder
from ..format.syncing import Durable, published_place, skip_sync, unsynced_around
from ..format.together import run_together, threads_for_memory
from ..storages.codec import tensor_bytes
from ..storages.cursors import last_row
from ..storages.snapshots import Snapshot
from ..storages.tensor import TensorStorage
from ..storages.tree_files import spec_to_json
from ..storages.write_log import Written
from .folders import CheckpointStaging
from .segment_layout import SegmentManifest, leaves_of, segment_rows

_READ_ONLY = 0o444


def write_segments(storage: TensorStorage, path: str | os.PathLike[str], durable: Durable = "full") -> None:
    """Write a storage to the folder `path`, where an older checkpoint is replaced at one instant.

    Onto the checkpoint that the storage wrote or loaded there last, only segments with changed rows are written.
    """
    position = storage.log.now  # before any row is read: what is written meanwhile counts as changed later
    with CheckpointStaging(path, durable) as staging, _opened(published_place(staging.destination)) as earlier:
        _publish(_Dump(storage, earlier), storage, position, staging)


class CapturedSegments:
    """The rows of a storage as they are now, which `write` writes to the folder `path` as `write_segments` does.

    Writers continue, in other threads than the one of `write`. A context manager: leaving it ends the capture.
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
        """Whether it is known which rows writers replace."""
        return self._dump.captured

    def write(self) -> None:
        """Write the checkpoint."""
        with CheckpointStaging(self._path) as staging:
            _publish(self._dump, self._storage, self._position, staging)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()


def _publish(dump: _Dump, storage: TensorStorage, position: Written, staging: CheckpointStaging) -> None:
    """Write a dump into a folder, put that in place, and remember what it holds."""
    around = unsynced_around(staging.path / SegmentManifest.FILE)
    synced = around is None or around.durable != "none"
    manifest = dump.write(staging.path, synced=synced)
    staging.publish_noted(covered=manifest.files)
    storage.log.saved_as(manifest.digest, position)


class _Earlier:
    """The checkpoint at the destination, by the descriptor of its folder: another process may replace it."""

    def __init__(self, manifest: SegmentManifest, descriptor: int) -> None:
        self.manifest = manifest
        self._sizes = manifest.sizes
        self._descriptor = descriptor

    def share(self, number: int, path: Path) -> bool:
        """Make a hard link to a segment; False where it cannot be had, and for a file that somebody may write to."""
        name = self.manifest.file(number)
        try:
            found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            whole = stat.S_ISREG(found.st_mode) and found.st_size == self._sizes[number]
            if not whole or found.st_mode & 0o222:
                return False
            fs.link_to(Path(name), path, among=self._descriptor)
        except OutOfSpaceError:
            raise
        except OSError:  # another file system, too many links, none at all there
            return False
        if self.manifest.synced:
            skip_sync(path, found)
        return True


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[_Earlier | None]:
    descriptor, earlier = -1, None
    try:
        with contextlib.suppress(RbtoolError, OSError):  # nothing there, another form, or damaged: nothing is shared
            descriptor = open_folder(place, follow_links=False)
            earlier = _Earlier(SegmentManifest.load(place, descriptor), descriptor)
        yield earlier
    finally:
        if descriptor >= 0:
            os.close(descriptor)


class _Dump:
    """What is to be written of a storage, and what can be shared with an earlier checkpoint.

    With `captured`, if that is possible, the rows are those of now until `close`.
    """

    def __init__(self, storage: TensorStorage, earlier: _Earlier | None, *, captured: bool = False) -> None:
        self._storage = storage
        self._tensors = storage.columns.leaves if storage.initialized else []
        self._manifest = _described(storage)
        self._lent = storage.log.lent
        self._snapshot: Snapshot | None = None
        self._compare(storage, earlier)
        if captured:
            self._snapshot = storage.snapshot(self._manifest.segment_rows)

    @property
    def captured(self) -> bool:
        """Whether writers keep the rows that they replace."""
        return self._snapshot is not None

    def close(self) -> None:
        """Have writers keep nothing any more."""
        if self._snapshot is not None:
            self._storage.end_snapshot(self._snapshot)

    def _compare(self, storage: TensorStorage, earlier: _Earlier | None) -> None:
        self._earlier: _Earlier | None = None
        self._changed: NDArray[np.bool_] | None = None
        position = None if earlier is None else storage.log.position_of(earlier.manifest.digest)
        if earlier is None or position is None or not self._manifest.resembles(earlier.manifest):
            return  # the storage neither wrote nor loaded it
        capacity, rows = self._manifest.capacity, earlier.manifest.segment_rows
        self._earlier = earlier
        self._manifest = replace(self._manifest, segment_rows=rows)
        self._changed = storage.log.blocks_changed(position, capacity, rows)

    def write(self, folder: Path, *, synced: bool) -> SegmentManifest:
        """Write or share all segments, then the manifest, into an empty folder; `synced` is noted in it."""
        manifest, digests = replace(self._manifest, synced=synced), dict(self._unchanged())
        sizes, written = manifest.sizes, dict[int, LeafFile]()
        fs.require_space(folder, sum(size for number, size in enumerate(sizes) if number not in digests))
        earlier, snapshot = self._earlier, self._snapshot
        shared = {
            number
            for number in digests
            if earlier is not None and earlier.share(number, folder / manifest.file(number))
        }
        if snapshot is not None:
            snapshot.release(*shared)
        numbers = range(len(sizes)) if snapshot is None else snapshot.parts()
        with contextlib.ExitStack() as files, Blocks() as blocks:
            for number in numbers:
                if number in shared:
                    continue
                file = written[number] = LeafFile(folder / manifest.file(number), mode=_READ_ONLY)
                files.callback(file.close)
                blocks.begin(file)
                for part in self._parts(number):
                    blocks.append_bytes(part)
            blocks.finish()
        digests |= {number: file.digest for number, file in written.items()}
        return replace(manifest, digests=tuple(digests[number] for number in range(len(sizes)))).save(folder)

    def _unchanged(self) -> Iterable[tuple[int, str]]:
        """Return the numbers and digests of segments whose rows are those of the earlier checkpoint.

        Where the log does not reach, their bytes decide.
        """
        if self._earlier is None:
            return []
        before, manifest = self._earlier.manifest, self._manifest
        same = [
            (number, digest)
            for number, digest in enumerate(before.digests)
            if before.rows_of(number) == manifest.rows_of(number)
        ]
        known = [pair for pair in same if self._changed is not None and not self._changed[pair[0]]]
        if self._changed is not None and not self._lent:
            return known
        asked = same if self._changed is None else known
        found = dict[int, str]()

        def look(number: int) -> None:
            found[number] = _digest(self._parts(number))

        run_together([partial(look, number) for number, _ in asked], threads_for_memory())
        return [(number, digest) for number, digest in asked if found[number] == digest]

    def _parts(self, number: int) -> Iterator[memoryview]:
        """Yield the bytes of a segment's file."""
        rows = self._manifest.rows_of(number)
        starts = self._manifest.blocks(len(rows))
        for leaf, (tensor, start, stop) in enumerate(zip(self._tensors, starts[:-1], starts[1:], strict=True)):
            if self._snapshot is None:
                yield tensor_bytes(tensor[rows.start : rows.stop])
            else:
                yield from self._snapshot.read(leaf, rows)
            if padding := stop - start - len(rows) * self._manifest.leaves[leaf].width:
                yield memoryview(bytes(padding))


def _described(storage: TensorStorage) -> SegmentManifest:
    """Describe a storage, without its segments yet."""
    if not storage.initialized:
        return SegmentManifest(None, storage.ndim, 0, 0, None, 0, 1, True, ())
    columns, structure, rows = storage.columns, storage.structure, storage.rows
    size = segment_rows(columns.lead[0], rows, sum(columns.widths))
    return SegmentManifest(
        spec_to_json(structure), storage.ndim, len(storage), rows, last_row(storage.last_cursor),
        columns.lead[0], size, True, leaves_of(list(structure.paths()), columns.leaves),
    )  # fmt: skip


def _digest(parts: Iterable[memoryview]) -> str:
    hasher = Hasher()
    for part in parts:
        hasher.update(part)
    return hasher.digest
