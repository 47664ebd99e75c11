"""Writes a storage of tensors in segments, and shares unchanged ones with the checkpoint that is replaced."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

from ..encodings.digests import write_digests
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
from .runs import Run, count_of, joined, without
from .segment_layout import Segment, SegmentManifest, block_rows, leaves_of
from .segment_plan import merged, written

_READ_ONLY = 0o444


def write_segments(storage: TensorStorage, path: str | os.PathLike[str], durable: Durable = "full") -> None:
    """Write a storage to the folder `path`, where an older checkpoint is replaced at one instant.

    Onto the checkpoint that the storage wrote or loaded there last, only rows that changed are written.
    """
    position = storage.log.now  # before any row is read: what is written meanwhile counts as changed later
    place = Path(os.path.realpath(path))
    with _staged(place, durable) as staged, _opened(published_place(place)) as earlier:
        _publish(_Dump(storage, earlier), storage, position, staged)


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
        with _staged(self._path) as staged:
            _publish(self._dump, self._storage, self._position, staged)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()


class _Staged(NamedTuple):
    """A folder to write a checkpoint to, and what puts it in place, which is given the files with digests elsewhere."""

    folder: Path
    publish: Callable[[Collection[str]], None]


@contextlib.contextmanager
def _staged(place: Path, durable: Durable = "full") -> Iterator[_Staged]:
    """Give a folder that is put at `place` at one instant; inside of what is staged already, `place` itself."""
    if unsynced_around(place) is not None and not os.path.lexists(place):
        fs.make_folder(place)
        yield _Staged(place, lambda covered: write_digests(place, covered=covered))
        return
    with CheckpointStaging(place, durable) as staging:
        yield _Staged(staging.path, lambda covered: staging.publish_noted(covered=covered))


def _publish(dump: _Dump, storage: TensorStorage, position: Written, staged: _Staged) -> None:
    """Write a dump into a folder, put that in place, and remember what it holds."""
    around = unsynced_around(staged.folder / SegmentManifest.FILE)
    synced = around is None or around.durable != "none"
    manifest = dump.write(staged.folder, synced=synced)
    staged.publish(manifest.files)
    storage.log.saved_as(manifest.digest, position)


class _Earlier:
    """The checkpoint at the destination, by the descriptor of its folder: another process may replace it."""

    def __init__(self, manifest: SegmentManifest, descriptor: int) -> None:
        self.manifest = manifest
        self._widths = manifest.widths
        self._descriptor = descriptor

    def share(self, segment: Segment, path: Path) -> bool:
        """Make a hard link to a segment; False where it cannot be had, and for a file that somebody may write to."""
        try:
            found = os.stat(segment.file, dir_fd=self._descriptor, follow_symlinks=False)
            whole = stat.S_ISREG(found.st_mode) and found.st_size == segment.size(self._widths)
            if not whole or found.st_mode & 0o222:
                return False
            fs.link_to(Path(segment.file), path, among=self._descriptor)
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
        self._widths = self._manifest.widths
        self._block = block_rows(self._manifest.rows, sum(self._widths))
        self._lent = storage.log.lent
        self._snapshot: Snapshot | None = None
        self._compare(storage, earlier)
        if captured:
            self._snapshot = storage.snapshot(self._block)

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
        self._changed: list[Run] | None = None
        position = None if earlier is None else storage.log.position_of(earlier.manifest.digest)
        if earlier is None or position is None or not self._manifest.resembles(earlier.manifest):
            return  # the storage neither wrote nor loaded it
        self._earlier = earlier
        found = storage.log.changed_rows(position, self._manifest.capacity, self._block)
        self._changed = None if found is None else joined(found)

    def write(self, folder: Path, *, synced: bool) -> SegmentManifest:
        """Share or write all segments, then write the manifest, into an empty folder; `synced` is noted in it."""
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
        """Yield segments to be written, of a snapshot those first that writers need soon, and release their rows."""
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
        """Return the segments of the earlier checkpoint that can stay, with the rows that are read from each.

        Where the log does not reach, and where references to rows were handed out, the bytes of segments decide.
        """
        if self._earlier is None:
            return {}
        earlier = self._earlier.manifest
        left = without([(0, min(self._manifest.rows, earlier.rows))], self._changed or [])
        found: dict[Segment, Sequence[Run]] = {one: runs for one, runs in earlier.valid(left) if runs}
        if self._changed is not None and not self._lent:
            return found
        asked, same = [one for one, runs in found.items() if count_of(runs) == one.rows], set[Segment]()

        def look(one: Segment) -> None:
            if _digest(self._parts(one)) == one.digest:
                same.add(one)

        run_together([partial(look, one) for one in asked], threads_for_memory())
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
    """Return the numbers of the blocks of so many rows that have some of these."""
    return {number for start, stop in runs for number in range(start // block, -(-stop // block))}


def _at_blocks(start: int, stop: int, block: int) -> Iterator[range]:
    """Cut a run at the bounds of blocks."""
    while start < stop:
        end = min(stop, (start // block + 1) * block)
        yield range(start, end)
        start = end


def _described(storage: TensorStorage) -> SegmentManifest:
    """Describe a storage, without its segments yet."""
    if not storage.initialized:
        return SegmentManifest(None, storage.ndim, 0, 0, None, 0, True, ())
    columns, structure = storage.columns, storage.structure
    return SegmentManifest(
        spec_to_json(structure), storage.ndim, len(storage), storage.rows, last_row(storage.last_cursor),
        columns.lead[0], True, leaves_of(list(structure.paths()), columns.leaves),
    )  # fmt: skip


def _digest(parts: Iterable[memoryview]) -> str:
    hasher = Hasher()
    for part in parts:
        hasher.update(part)
    return hasher.digest
