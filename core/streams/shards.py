"""The shards of a stream: on this disk, in files at a remote, or converted one by one from a source of another format.

`load_dataset(…, streaming=True)` calls `open_stream`. `LocalShards` are read in place. `HostedShards` fetch ranges of
the files of a dataset at a remote. `SourceShards` are fetched and converted one by one. `CachedShards` wraps the latter
two: it fetches shards into a folder of bounded size, in the background and in the order in which they are needed.

    StreamStorage -> CachedShards.take(k) -> HostedShards.fetch(k, folder)    ranges of files, over http
                                          -> SourceShards.fetch(k, folder)    files of a source, converted to TED
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import queue
import re
import secrets
import sys
import threading
import time
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
from tensordict import TensorDictBase

from ..datasets.load_dataset import texts_of
from ..datasets.storage import DatasetStorage
from ..declarations import default_layout
from ..encodings.video import close_videos_below
from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, UsageError
from ..format import fs
from ..format.checks import sound_episodes
from ..format.contracts import Closing, SourceFacts
from ..format.converter import PartsReader, Reader, RemoteFile, RemoteShard, Source, require_trust, safe_id
from ..format.documents import decode, dump_json, load_json
from ..format.episodes import parse_episodes, select_episodes
from ..format.files import digest_file, digest_text, open_regular, read_regular
from ..format.locate import find_dataset, is_hub_address, reader_class, source_class, source_names, streams_folder
from ..format.manifest import MANIFEST, VIDEOS, Manifest, Request
from ..format.memmap.reader import TedReader
from ..format.open_files import ListedFiles
from ..format.packed.reader import PackedReader
from ..format.packed.schema import SCHEMA
from ..format.returns import return_field_of, sum_rewards
from ..format.videos import ids_of_episodes, index_name, stated_fps, video_name
from ..open_steps import open_dataset
from ..options import PathLike
from ..progress import Silent, readable_size
from ..remote.folders import RemoteFolder, hub_folder, is_web_address, web_folder
from ..remote.hub_address import HubAddress
from ..remote.shards import SHARD_DIGESTS, EpisodeShards, Range, ShardDigests, row_files, row_ranges
from ..remote.threads import Watch, ignore, run_together
from ..results import PICKLED
from ..storages.base import Storage
from ..storages.dataset import OpenShard, ShardedData, StreamShards, StreamStorage
from ..storages.packed import PackedStorage
from ..ted.schema import EPISODE, NEXT_REWARD, NEXT_TERMINATED, NEXT_TRUNCATED, Field, key_name
from ..transforms.video import frames_below, with_frames
from ..verbs.convert import SourceConversion, choose_episodes
from ..verbs.options import DownloadOptions


class Fetchers:
    """A pool of up to `limit` daemon threads, for which an exiting process does not wait.

    A thread that is interrupted by the exit leaves the same partial files as a killed process; the next fetch of the
    shard removes them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._jobs.put((future, job))
        if len(self._threads) < self._limit:
            thread = threading.Thread(target=_work, args=(self._jobs,), name="rbtool-stream", daemon=True)
            thread.start()
            self._threads.append(thread)
        return future

    def end(self, *, wait: bool) -> None:
        """Cancel jobs that have not started and end the threads; with `wait`, wait for their current jobs."""
        with contextlib.suppress(queue.Empty):
            while True:
                left = self._jobs.get_nowait()
                if left is not None:
                    left[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads if wait else ():
            thread.join()


def _work(jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    while (taken := jobs.get()) is not None:
        future, job = taken
        if future.set_running_or_notify_cancel():
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        del future, job, taken  # so that the stream to which they belong can be freed during the next wait


_LOCK = ".lock"
_PART = ".part"
_BAD = "bad.txt"
_BLOCK = 512
_LOOK_SECONDS = 0.02
_READ_SECONDS = 10.0
"""How long `CachedShards` waits for space that is taken by shards which threads are still reading."""


class ShardFiles(ShardedData, Closing):
    """A dataset at a remote whose shards can be fetched one by one; used by several threads at once."""

    @abstractmethod
    def size(self, number: int) -> int:
        """Return how many bytes a shard takes on the disk, 0 if it is not known."""

    @abstractmethod
    def fetch(self, number: int, folder: Path, more: Callable[[int], None]) -> None:
        """Fetch a shard into an empty folder. Raises NetworkError and similar; the caller then removes the folder.

        If the shard turns out to take more bytes than `size`, `more` is called with their number before they are
        written. It raises an error if there is no space for them, which is passed on.
        """

    @abstractmethod
    def open(self, number: int, folder: Path) -> OpenShard:
        """Map a fetched shard; its folder must exist as long as the shard or its `decode` is in use."""


class _Lock:
    """A lock of a shard, which is released with the last reference, since threads may still read a closed shard."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._descriptor)


class _HeldShard(NamedTuple):
    """An open shard, and the lock that keeps other processes from removing it."""

    shard: OpenShard
    lock: _Lock


class _NoRoomError(Exception):
    """There is not enough space for a shard that is fetched ahead."""


class CachedShards(StreamShards):
    """A cache of fetched shards in `folder`, of at most `limit` bytes; missing shards are fetched when needed.

        folder/0/         a complete shard, renamed from 0.part when it was finished
        folder/0.lock     locked shared while a process has shard 0 open, exclusively while one fetches or removes it
        folder/1.part/    a shard that is being fetched, or was when its process was killed

    `threads` shards are fetched at a time. If there is not enough space, shards that are not open are removed, the
    least recently used first. Several processes can share a folder: a shard is fetched once, and stays as long as one
    of them has it open. The parent of `folder` is locked (shared) while the stream is open, so that `rbtool cache
    prune` does not remove it.

    With `skip_bad` an unreadable shard counts as empty, as long as it is in the folder.

    UsageError if the shards that are open at the same time do not fit. An error of `ShardFiles` is raised when the
    shard is taken, and the next `take` tries again. An unpickled copy opens the same folder.
    """

    def __init__(
        self, files: ShardFiles, folder: Path, limit: int, *, threads: int = 2, skip_bad: bool = False
    ) -> None:
        self.files = files
        self.folder = folder
        self.limit = limit
        self.threads = threads
        self.skip_bad = skip_bad
        self.address, self.identity, self.rows = files.address, files.identity, files.rows
        self.episodes, self.lacking = files.episodes, files.lacking
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._guard = threading.Lock()
        self._making_room = threading.Lock()
        self._taking = threading.Lock()
        self._held: dict[int, _HeldShard] = {}
        self._closed = weakref.WeakSet[_Lock]()  # locks of closed shards that threads still read
        self._coming: dict[int, Future[None]] = {}
        self._reserved: dict[int, int] = {}
        self._wanted: list[int] = []
        self._pool: Fetchers | None = None
        self._use: int | None = None

    def _mark_use(self) -> None:
        if self._use is None:
            fs.make_folder(self.folder)
            self._use = os.open(self.folder.parent, os.O_RDONLY | os.O_DIRECTORY)
            fs.lock(self._use, fcntl.LOCK_SH, self.folder)

    def _unmark_use(self) -> None:
        if self._use is not None:
            os.close(self._use)
            self._use = None

    def __len__(self) -> int:
        return len(self.files)

    def texts(self) -> Mapping[int, Mapping[str, str]]:
        """Return the texts of each episode, as the files have them."""
        return self.files.texts()

    # Taking shards -----------------------------------------------------------------------------------

    def take(self, number: int) -> OpenShard:
        """Return a shard; wait until it is fetched."""
        self._after_fork()
        held = self._held.get(number)
        if held is None:
            with self._taking:  # so that two threads do not both lock it, and leave a lock that is never released
                held = self._held.get(number) or self._held.setdefault(number, self._awaited(number))
        return held.shard

    def _awaited(self, number: int) -> _HeldShard:
        """Open a shard, after a background fetch of it has ended."""
        with self._guard:
            coming = self._coming.pop(number, None)
        if coming is not None:
            coming.exception()  # wait, and ignore an error, which may be temporary: this thread fetches again below
        return self._opened(number)

    def expect(self, numbers: Sequence[int]) -> None:
        """Close all shards but these, and start to fetch those that are missing."""
        self._after_fork()
        self._wanted = list(numbers)
        for number in self._held.keys() - set(numbers):
            self._closed.add(self._held.pop(number).lock)
            close_videos_below(self._place(number))  # an open file takes disk space even after its removal
        with self._guard:
            for number in self._coming.keys() - set(numbers):
                if self._coming[number].cancel() or self._coming[number].done():
                    del self._coming[number]
            for number in numbers:
                if number not in self._held and number not in self._coming:
                    self._coming[number] = self._fetchers().submit(functools.partial(self._fetch_ahead, number))

    def _fetchers(self) -> Fetchers:
        if self._pool is None:
            self._pool = Fetchers(self.threads)
        return self._pool

    def _after_fork(self) -> None:
        """Reset the state in a forked process, which has no threads, and only shares the locks of its parent."""
        if self._process != os.getpid():
            self._unmark_use()
            self._begin()
        self._mark_use()

    def _opened(self, number: int) -> _HeldShard:
        """Fetch a shard if it is missing, and open it under a shared lock."""
        while True:
            self._fetch(number, needed=True)
            lock = _Lock(self._locked(number, fcntl.LOCK_SH))
            try:
                if (place := self._place(number)).is_dir():
                    with contextlib.suppress(OSError):  # records the time of the last use
                        fs.touch(place)
                    shard = self._open(number, place)
                    return _HeldShard(shard if shard.decode is None else shard._replace(kept=lock), lock)
            finally:
                del lock  # releases it if another process has removed the shard, or it cannot be opened

    def _open(self, number: int, place: Path) -> OpenShard:
        if self.skip_bad and (place / _BAD).is_file():
            return OpenShard.nothing((read_regular(place / _BAD).decode(),))
        return self.files.open(number, place)

    # Fetching ----------------------------------------------------------------------------------------

    def _fetch_ahead(self, number: int) -> None:
        self._fetch(number, needed=False)

    def _fetch(self, number: int, *, needed: bool) -> None:
        """Fetch a shard unless it exists; one that is not `needed` yet is left out if there is no space."""
        place, lock = self._place(number), self._locked_to_fetch(number)
        if lock is None:
            return
        make_room = functools.partial(self._make_room, number, needed=needed)
        try:
            if place.is_dir():
                return
            make_room(self.files.size(number))
            part = self._part(number)
            fs.remove(part)  # left by a killed process
            fs.make_folder(part)
            try:
                self._fetch_into(number, part, make_room)
                fs.sync_folder(part)
                fs.rename(part, place)
            except BaseException:
                with contextlib.suppress(OSError):
                    fs.remove(part)
                raise
        except _NoRoomError:
            pass
        finally:
            self._reserved.pop(number, None)
            os.close(lock)

    def _fetch_into(self, number: int, part: Path, more: Callable[[int], None]) -> None:
        try:
            self.files.fetch(number, part, more)
        except FormatError as error:
            if not self.skip_bad:
                raise
            fs.remove(part)
            fs.make_folder(part)
            fs.write_file(part / _BAD, error.message.encode())

    def _locked_to_fetch(self, number: int) -> int | None:
        """Lock a missing shard exclusively; None as soon as another process has fetched it.

        Does not block on the lock, because that process may keep the shard open, and locked, for as long as it runs.
        """
        while not self._place(number).is_dir():
            with contextlib.suppress(BlockingIOError):
                return self._locked(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(_LOOK_SECONDS)
        return None

    def _make_room(self, number: int, size: int, *, needed: bool) -> None:
        """Reserve `size` more bytes for a shard; UsageError if a `needed` one does not fit.

        A needed shard waits until other fetches have ended and closed shards are no longer read, so that they can be
        removed.
        """
        until = time.monotonic() + _READ_SECONDS
        while (used := self._reserved_unless_full(number, size, needed)) is not None:
            if not needed:
                raise _NoRoomError
            is_read = self._closed and time.monotonic() < until
            if not (is_read or self._reserved.keys() - {number}):
                raise UsageError(
                    f"the shards of {self.address} that are used at the same time take {readable_size(used + size)}, "
                    f"and the cache may take {readable_size(self.limit)}",
                    hint="give it a larger cache_size, or a smaller window",
                )
            time.sleep(_LOOK_SECONDS)

    def _reserved_unless_full(self, number: int, size: int, needed: bool) -> int | None:
        """Remove unused shards until `size` more bytes fit, and reserve them; else return the number of bytes used.

        A shard that is not needed yet has to leave space for another one of its size, which may be needed.
        """
        with self._making_room:
            whole = self._reserved.get(number, 0) + size
            room = size if needed else size + whole
            for part in self.folder.glob(f"*{_PART}"):
                self._removed(part)
            there = {place: _files_in(place) for place in self._places()}
            used = self._used(there)
            for place in sorted(there, key=_last_use):
                if used + room <= self.limit:
                    break
                if (needed or int(place.name) not in self._wanted) and self._removed(place):
                    del there[place]
                    used = self._used(there)
            if used + room > self.limit:
                return used
            self._reserved[number] = whole
            return None

    def _used(self, there: Mapping[Path, Mapping[int, int]]) -> int:
        """Return the bytes of all files, counting files that shards share once, and the reserved bytes."""
        files = {file: size for files in there.values() for file, size in files.items()}
        return sum(files.values()) + sum(self._reserved.values())

    def _removed(self, place: Path) -> bool:
        """Remove a shard, or the part that a killed process left, unless a process has it open; return if removed."""
        number = int(place.name.removesuffix(_PART))
        try:
            lock = self._locked(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            part = self._part(number)
            close_videos_below(place)
            if place != part and place.is_dir():
                fs.remove(part)
                fs.rename(place, part)  # so that an interruption does not leave half a shard under its final name
            fs.remove(part)
            return True
        finally:
            os.close(lock)

    # Places ------------------------------------------------------------------------------------------

    def _place(self, number: int) -> Path:
        return self.folder / str(number)

    def _part(self, number: int) -> Path:
        return self.folder / f"{number}{_PART}"

    def _places(self) -> Iterator[Path]:
        return (path for path in self.folder.iterdir() if path.name.isdecimal())

    def _locked(self, number: int, how: int) -> int:
        """Lock a shard, and return the descriptor whose closing unlocks it."""
        lock = fs.open_to_append(self.folder / f"{number}{_LOCK}")
        try:
            fs.lock(lock, how, self.folder)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def close(self) -> None:
        """Close all shards, and wait for running fetches."""
        self._end(wait=True)
        self._begin()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if "_process" in self.__dict__ and not is_finalizing():
            self._end(wait=False)

    def _end(self, *, wait: bool) -> None:
        if self._process == os.getpid():
            if self._pool is not None:
                self._pool.end(wait=wait)
            self._unmark_use()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("files", "folder", "limit", "threads", "skip_bad")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _files_in(folder: Path) -> dict[int, int]:
    """Return the disk space of each file of a folder, by inode; files with holes take less than their size.

    Another process may remove the folder meanwhile.
    """
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                stated = Path(parent, name).lstat()
                found[stated.st_ino] = stated.st_blocks * _BLOCK
    return found


def _last_use(place: Path) -> float:
    try:
        return place.stat().st_mtime
    except FileNotFoundError:
        return 0.0


Decode: TypeAlias = Callable[[TensorDictBase], TensorDictBase]


def open_shard(
    shards: EpisodeShards, storage: Storage, number: int, fields: Sequence[Field], decode: Decode | None,
    fps: Callable[[], float | None],
) -> OpenShard:  # fmt: skip
    """Return a shard as a range of rows in a storage of the whole dataset."""
    first, stop = shards.bounds[number : number + 2]
    lengths = shards.lengths[first:stop]
    return OpenShard(storage, int(shards.starts[number]), lengths, decode=decode, fields=fields, fps=fps)


def _fps_of(path: Path) -> float | None:
    """Return the steps a second that a dataset states."""
    with open_dataset(path) as reader:
        return stated_fps(reader)


def storage_of(reader: TedReader | PackedReader) -> Storage:
    """Map the rows of an open dataset."""
    return DatasetStorage(reader) if isinstance(reader, TedReader) else PackedStorage(reader)


class LocalShards(StreamShards):
    """The shards of a dataset on this disk, which are read in place."""

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path).absolute()
        self.address = str(self.path)
        with open_dataset(self.path) as reader:
            self._shards = EpisodeShards.of(reader)
            self._storage = storage_of(reader)
            self._decode = with_frames(reader, None)
            self._fields, self.identity = reader.fields, reader.manifest.content_digest
        self.rows, self.episodes = self._shards.rows, len(self._shards.lengths)

    def __len__(self) -> int:
        return len(self._shards.rows)

    def texts(self) -> Mapping[int, Mapping[str, str]]:
        """Return the texts of each episode."""
        with open_dataset(self.path) as reader:
            return texts_of(reader)

    def take(self, number: int) -> OpenShard:
        """Return a shard."""
        fps = functools.partial(_fps_of, self.path)
        return open_shard(self._shards, self._storage, number, self._fields, self._decode, fps)


# Rows -----------------------------------------------------------------------------------------------


def disagreement(reader: TedReader | PackedReader, first: int, stop: int) -> str:
    """Describe a difference between the rows of the episodes `[first, stop)` and the episode table; "" if they agree.

    Compares the numbers of the episodes, the flags of their last steps, and their returns, to the last bit.
    """
    table, there = reader.episodes, {field.key for field in reader.fields}
    if first == stop:
        return ""
    starts, lengths = table.start[first:stop], table.length[first:stop]
    begin, end = int(starts[0]), int(starts[-1] + lengths[-1])
    if EPISODE in there and (reader.read(EPISODE, begin, end) != np.repeat(table.episode[first:stop], lengths)).any():
        return "a step has the number of another episode than the table states"
    for key, stated in ((NEXT_TERMINATED, table.terminated), (NEXT_TRUNCATED, table.truncated)):
        if key in there:
            flags = reader.read(key, begin, end).reshape(end - begin, -1)[starts + lengths - 1 - begin]
            if (flags.any(1) != stated[first:stop]).any():
                return f"{key_name(key)} of a last step differs from the table"
    reward = return_field_of(reader.manifest)
    if reward is not None and reward.key == NEXT_REWARD:  # tables of n-step data may hold other sums
        returns = sum_rewards(reader, starts, lengths)
        if not np.array_equal(returns, table.total_reward[first:stop], equal_nan=True):
            return "the return of an episode differs from the table"
    return ""


_LOG = logging.getLogger("rbtool.remote")
_BASE = "base"
_BASE_LOCK = "base.lock"
_ASKED_AT_ONCE = 40
"""The number of parallel requests for files without rows (an episode table has a dozen) and for versions of others."""
_CONNECTIONS = 8
"""The number of pieces of a shard that are fetched in parallel."""
_PIECE = 16 << 20
"""The most bytes that one request fetches."""
_SYNCED_AT_ONCE = 2 << 20
_COMPARED = "parts of its files are "
_WRITES_DIGESTS = "rbtool.write_shard_digests() writes it before a copy"
_LAST_PART = 8
"""The fetch of the next shard starts when 1/8 of one is missing, so that the first answers arrive without a pause."""
_PAGE = 8 << 10
"""The bytes that a range can take in addition on the disk, for incomplete pages at its two ends."""


class HostedShards(ShardFiles):
    """The shards of a dataset in a remote folder: at a commit of a hub, in a bucket or on a web server.

    The manifest, the episode table and other files without rows are fetched into `folder` once, and compared with the
    checksums of the remote and the digests of the manifest. A shard consists of files with rows that are as long as in
    the dataset, but contain only the ranges of its episodes; the rest is holes, which take no disk space:

        observation.memmap of the dataset   | episodes 0…99 | 100…199 | 200…299 |
        of shard 1                          |     hole      | 100…199 |  hole   |

    It also contains the complete videos to which its rows refer; shards share such files by hard links.

    DatasetNotFoundError for a folder without a dataset, UsageError for a dataset without steps, and the errors of
    transports, such as ChangedMeanwhileError for files that were changed after the folder was opened. An unpickled copy
    uses the files that are already fetched.
    """

    def __init__(self, remote: RemoteFolder, folder: Path) -> None:
        self.remote, self.address = remote, remote.address
        self.folder = folder / f"{remote.name}-{digest_text(remote.key).rpartition(':')[2][:16]}"
        try:
            self._fetch_base()
            self._open_base()
        except BaseException:
            remote.close()
            raise
        if len(self) > 1 and self._digests_of_parts is None:  # not in `_open_base`: copies in workers would repeat it
            if SHARD_DIGESTS in remote.files:
                said = f"has digests of other shards: {_COMPARED}not compared with them; upload it again"
            else:
                said = f"has no {SHARD_DIGESTS}: {_COMPARED}compared with its episode table alone; {_WRITES_DIGESTS}"
            _LOG.warning("%s %s", self.address, said)

    def __len__(self) -> int:
        return len(self._shards.rows)

    def texts(self) -> Mapping[int, Mapping[str, str]]:
        """Return the texts of each episode."""
        return texts_of(self._reader)

    # Files without rows ------------------------------------------------------------------------------

    def _fetch_base(self) -> None:
        """Fetch the files without rows; only one process does so at a time."""
        base = self.folder / _BASE
        fs.make_folder(base)
        lock = fs.open_to_append(self.folder / _BASE_LOCK)
        try:
            fs.lock(lock, fcntl.LOCK_EX, self.folder)
            files = self.remote.files
            if MANIFEST not in files:
                raise DatasetNotFoundError(f"{self.address} is not an rbtool dataset: it has no {MANIFEST}")
            self.remote.fetch([name for name in (MANIFEST, SHARD_DIGESTS) if name in files], base)
            manifest = Manifest.load(base)
            if missing := {file.path for file in manifest.files} - files.keys():
                raise CorruptDataError(f"{self.address} has no {min(missing)}, which its manifest lists")
            for file in manifest.files:
                if files[file.path].size != file.size:
                    raise CorruptDataError(f"{self.address}: {file.path} has another size than its manifest lists")
            if manifest.layout == "packed":
                self._fetch_listed({SCHEMA}, manifest)
            rows = self._files_of_rows(manifest)
            others = {file.path for file in manifest.files if not file.path.startswith(VIDEOS)} - rows
            self._fetch_listed(others, manifest, pinned=sorted(rows))
        finally:
            os.close(lock)

    def _fetch_listed(self, names: set[str], manifest: Manifest, pinned: Sequence[str] = ()) -> None:
        """Fetch files, compare those without a checksum of the remote with the manifest, and pin the others."""
        base, digests = self.folder / _BASE, {file.path: file.digest for file in manifest.files}
        for last in (False, True):
            self.remote.fetch(sorted(names), base, pinned=pinned, workers=_ASKED_AT_ONCE)
            unknown = [name for name in sorted(names) if self.remote.files[name].checksum is None]
            wrong = [name for name in unknown if digest_file(base / name) != digests[name]]
            if not wrong:
                return
            for name in wrong:  # damaged on this disk or on the way
                fs.remove(base / name)
            if last:
                raise self._is_another(wrong[0])

    def _files_of_rows(self, manifest: Manifest) -> set[str]:
        return row_files(manifest, lambda: read_regular(self.folder / _BASE / SCHEMA))

    def _open_base(self) -> None:
        """Open the dataset without its rows."""
        manifest = Manifest.load(self.folder / _BASE)
        if not manifest.steps:
            raise UsageError(f"{self.address} has no steps to sample")
        rows = self._files_of_rows(manifest)
        self._sizes = {file.path: file.size for file in manifest.files if file.path in rows}
        self._digests = {file.path: file.digest for file in manifest.files}
        videos = {path for path in self._digests if path.startswith(VIDEOS)}
        self._videos = {path: self.remote.files[path].known_size for path in videos}
        self._others = [file.path for file in manifest.files if file.path not in {*rows, *videos}]
        self._reader = self._opened(lambda name: self._hole(self._sizes[name]))
        self._shards = EpisodeShards.of(self._reader)
        self._digests_of_parts = self._read_shard_digests()
        self.identity = manifest.content_digest
        self.rows, self.episodes = self._shards.rows, len(self._shards.lengths)

    def _read_shard_digests(self) -> ShardDigests | None:
        try:
            data = read_regular(self.folder / _BASE / SHARD_DIGESTS)
        except FileNotFoundError:  # the dataset was not uploaded by rbtool
            return None
        return ShardDigests.parse(data, self._reader, self._shards.bounds)

    def _hole(self, size: int) -> int:
        """Return the descriptor of an unnamed file of this size that consists of a hole."""
        path = self.folder / f"hole-{secrets.token_hex(8)}"
        descriptor = fs.create(path)
        try:
            fs.remove(path)
            fs.truncate(descriptor, size, path)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _opened(self, rows: Callable[[str], int]) -> TedReader | PackedReader:
        """Open the dataset with the files of rows whose descriptors `rows` returns."""
        opened: dict[str, int] = {}
        try:
            for name in (MANIFEST, *self._others):
                opened[name] = open_regular(self.folder / _BASE / name)
            for name in self._sizes:
                opened[name] = rows(name)
        except BaseException:
            for descriptor in opened.values():
                os.close(descriptor)
            raise
        listed = _FilesWithoutVideos(self.folder / _BASE, opened)
        return (PackedReader if listed.manifest.layout == "packed" else TedReader)(listed.root, listed)

    # Shards ------------------------------------------------------------------------------------------

    def _ranges(self, number: int) -> dict[str, Range]:
        first, stop = self._shards.bounds[number : number + 2].tolist()
        return row_ranges(self._reader, first, stop)

    def size(self, number: int) -> int:
        """Return how many bytes the rows of a shard take on the disk; its videos are only known from the rows."""
        return sum(stop - start + _PAGE for start, stop in self._ranges(number).values())

    def fetch(self, number: int, folder: Path, more: Callable[[int], None]) -> None:
        """Fetch the ranges of a shard into files with holes; CorruptDataError if the bytes are wrong twice.

        A shard with all bytes of a file, and videos, are compared with the digests of the manifest, which are of whole
        files. Parts of files are compared with the digests of shards, which rbtool uploads. Without these, the rows
        have to agree with the numbers, flags and returns in the episode table.
        """
        self._fetch_ranges(self._ranges(number), folder)
        try:
            self._verify(number, folder)
        except CorruptDataError as error:
            _LOG.warning("%s; it is fetched again", error.message)
            fs.remove(folder)
            fs.make_folder(folder)
            self._fetch_ranges(self._ranges(number), folder)
            self._verify(number, folder)
        if self._videos:
            self._fetch_videos(number, folder, more)

    def _fetch_ranges(self, ranges: dict[str, Range], folder: Path) -> None:
        """Create files with holes and fetch these ranges; the next shard may start when most bytes have arrived."""
        for name, size in self._sizes.items():
            fs.make_folder((folder / name).parent)
            descriptor = fs.create(folder / name)
            try:
                fs.truncate(descriptor, size, folder / name)
            finally:
                fs.close(descriptor, folder / name)
        pieces = [
            (min(_PIECE, stop - start), start, name)
            for name, (first, stop) in ranges.items()
            for start in range(first, stop, _PIECE)
        ]
        missing = sum(size for size, _, _ in pieces) * (_LAST_PART - 1) // _LAST_PART
        with contextlib.ExitStack() as turn:
            turn.enter_context(self.remote.turn_lock)

            def count(size: int) -> None:
                nonlocal missing
                missing -= size
                if missing <= 0:
                    turn.close()

            # Large pieces first, so that small ones are fetched meanwhile. `interrupt` does nothing, because another
            # thread may be fetching another shard over the same connections.
            jobs = [functools.partial(self._fetch_piece, folder, *piece) for piece in sorted(pieces, reverse=True)]
            run_together(jobs, Watch(progress=count), workers=_CONNECTIONS, interrupt=ignore)

    def _verify(self, number: int, folder: Path) -> None:
        known = self._digests_of_parts
        for name, range_ in self._ranges(number).items():
            if range_ == (0, self._sizes[name]):
                self._verify_file(name, folder)
            elif known is not None and not known.fits(name, number, folder / name, range_):
                raise CorruptDataError(f"shard {number} of {self.address} has other bytes of {name} than were uploaded")
        if known is not None:
            return
        first, stop = self._shards.bounds[number : number + 2].tolist()
        with self._opened(lambda name: open_regular(folder / name)) as reader:
            problem = disagreement(reader, first, stop)
        if problem:
            raise CorruptDataError(f"shard {number} of {self.address} is not what was announced: {problem}")

    def _fetch_videos(self, number: int, folder: Path, more: Callable[[int], None]) -> None:
        """Fetch the videos to which the rows refer, or link to the files of other shards, and verify all of them."""
        names = self._names_of_videos(number, folder)
        more(sum(self._videos[name] + _PAGE for name in names))
        fs.make_folder(folder / VIDEOS)
        with self.remote.files_lock:  # one shard at a time, so that the next one can link to its files
            for name in names:
                _link_to_another(folder, name)
            self.remote.fetch(names, folder)
        for name in names:
            self._verify_file(name, folder)

    def _names_of_videos(self, number: int, folder: Path) -> list[str]:
        first, stop = self._shards.bounds[number : number + 2].tolist()
        with self._opened(lambda name: open_regular(folder / name)) as reader:
            ids = ids_of_episodes(reader, np.arange(first, stop)) - {0}
        if not all(f"{VIDEOS}{video_name(one)}" in self._videos for one in ids):
            raise CorruptDataError(f"rows of {self.address} refer to a video that its manifest does not list")
        names = (f"{VIDEOS}{name}" for one in sorted(ids) for name in (video_name(one), index_name(one)))
        return [name for name in names if name in self._videos]

    def _verify_file(self, name: str, folder: Path) -> None:
        if digest_file(folder / name) != self._digests[name]:
            raise self._is_another(name)

    def _is_another(self, name: str) -> CorruptDataError:
        return CorruptDataError(f"{name} of {self.address} is not what its manifest announced")

    def _fetch_piece(self, folder: Path, size: int, start: int, name: str, watch: Watch) -> None:
        """Write bytes of a file to their place."""
        path, unsynced = folder / name, start

        def write(data: memoryview, position: int) -> None:
            nonlocal unsynced
            watch.check()
            fs.pwrite(descriptor, data, position, path)
            if (stop := position + len(data)) - unsynced >= _SYNCED_AT_ONCE:
                fs.start_syncing(descriptor, unsynced, stop - unsynced)
                watch.progress(stop - unsynced)
                unsynced = stop

        descriptor = fs.open_to_fill(path)  # one for each thread, so that an abandoned one cannot write elsewhere
        try:
            self.remote.read(name, start, start + size, write)
            watch.progress(start + size - unsynced)
            fs.fsync(descriptor, path)
        finally:
            fs.close(descriptor, path)

    def open(self, number: int, folder: Path) -> OpenShard:
        """Map a shard that is in a folder."""
        with self._opened(lambda name: open_regular(folder / name)) as reader:
            frames = frames_below(folder, reader.fields)
            fps = functools.partial(stated_fps, self._reader)
            return open_shard(self._shards, storage_of(reader), number, reader.fields, frames, fps)

    def close(self) -> None:
        """Close the connections and the files."""
        self._reader.close()
        self.remote.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("remote", "address", "folder")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        try:
            self._open_base()
        except (DatasetNotFoundError, FileNotFoundError, CorruptDataError):  # the cache was pruned meanwhile
            self._fetch_base()
            self._open_base()


class _FilesWithoutVideos(ListedFiles):
    """The files of a dataset without its videos, which are in the folders of its shards."""

    def check_sizes(self) -> None:
        for file in self.manifest.files:
            if not file.path.startswith(VIDEOS) and (problem := self.size_problem(file)):
                raise CorruptDataError(problem)


def _link_to_another(folder: Path, name: str) -> None:
    """Create a hard link to the same file of another shard, if one has it and the file system supports links."""
    for other in folder.parent.glob(f"*/{name}"):
        with contextlib.suppress(OSError):  # it was just removed
            place = os.open(other.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fs.link_to(Path(other.name), folder / name, among=place)
            finally:
                os.close(place)
            return


_METADATA, _SETTLED, _FILES, _DATASET, _LEFT_OUT = "metadata", "settled", "files", "dataset", "left_out.json"
_MOST_ASKED = 16
_EPISODE = 32
"""If the remote does not number episodes, a number is shard << 32 | number in the shard."""


class SourceShards(ShardFiles):
    """The shards of dataset `dataset_id` of a source, as the source divides it.

    The remote is asked once, so that all shards have the same state. Files that all shards need are fetched into
    `folder` once. The files of a shard are fetched, converted to TED with the `options` of the reader, and removed;
    only then the number of steps of the shard is known.

    The first shards decide what an option `auto` means for the whole dataset. With `skip_bad` unreadable episodes are
    left out. `make` creates the source, if it is not the registered one.

    Videos are kept by default, as in a download, and decoded when rows are read. UsageError if the source has pickles
    and they are not trusted; the errors of the source and the reader.
    """

    def __init__(
        self, source: str, dataset_id: str, revision: str | None, options: Mapping[str, Any], folder: Path,
        *, skip_bad: bool = False, make: Callable[[], Source] | None = None,
    ) -> None:  # fmt: skip
        self.skip_bad, self._make = skip_bad, make or source_class(source)
        self.name, self.id, self.options = source, safe_id(dataset_id), dict(options)
        self._process, self._guard = os.getpid(), threading.Lock()
        if self.source.pickled:
            require_trust(Path(self.id), self.options.get("trust_pickle"), PICKLED)
        self.remote = self.source.describe(self.id, revision)
        self.address = self.remote.address
        state = sorted(f"{file.path}\0{file.checksum}\0{file.version}\0{file.size}" for file in self.remote.files)
        given = sorted(f"{name}={value}" for name, value in self.options.items()) + ["skip_bad"] * skip_bad
        lacking = self.source.lacking(self.remote)
        if lacking and not skip_bad:
            raise lacking[0]
        self.lacking = tuple(error.message for error in lacking)
        self.identity = digest_text("\n".join([source, self.id, *given, *state]))
        self.folder = folder / f"{source}-{self.identity.rpartition(':')[2][:16]}"
        self._growth = 1.0
        with self._metadata() as there:
            self.shards = [
                replace(shard, files=tuple(self.source.files_read(shard.files, self.options)))
                for shard in self.source.shards(self.remote, there)
            ]

    def texts(self) -> NoReturn:
        """Raise UsageError: the texts of episodes are only known after their shards are fetched."""
        raise UsageError(f"texts is set, expected False: {self.address} has the texts of its episodes in its shards")

    @property
    def source(self) -> Source:
        """The connections of this process."""
        if self._process != os.getpid():
            self._process, self._guard = os.getpid(), threading.Lock()
            self.__dict__.pop("_connected", None)
        return self._connected

    @cached_property
    def _connected(self) -> Source:
        return self._make()

    def __len__(self) -> int:
        return len(self.shards)

    @cached_property
    def _shared(self) -> frozenset[str]:
        """The paths of the files that every shard needs; with a single shard, those that are fetched already."""
        paths = [{file.path for file in shard.files} for shard in self.shards]
        if len(paths) == 1:
            return frozenset(path for path in paths[0] if (self.folder / _METADATA / path).is_file())
        return frozenset(set.intersection(*paths))

    def size(self, number: int) -> int:
        """Return an estimate of the size of a shard, from its files and the growth of earlier shards by conversion."""
        return int(self._growth * self._files_size(number))

    def _files_size(self, number: int) -> int:
        shard = self.shards[number]
        if shard.span is not None:
            return shard.span[1] - shard.span[0]
        return sum(file.known_size for file in shard.files if file.path not in self._shared)

    # Fetching ----------------------------------------------------------------------------------------

    def fetch(self, number: int, folder: Path, more: Callable[[int], None]) -> None:
        """Fetch the files of a shard, and convert them."""
        options = self._options
        files, left_out = folder / _FILES, list[str]()
        if self._bring(number, files):
            with self._guard:  # one conversion at a time, which limits memory; the interpreter runs one anyway
                left_out = self._convert(self.shards[number], files, folder / _DATASET, options)
        fs.remove(files)
        fs.write_file(folder / _LEFT_OUT, dump_json(left_out).encode())
        taken = sum(path.lstat().st_size for path in folder.rglob("*"))
        self._growth = max(self._growth, taken / max(1, self._files_size(number)))

    def _bring(self, number: int, files: Path) -> bool:
        """Fetch the files of a shard; return whether there are episodes in it."""
        shard = self.shards[number]
        fs.make_folder(files)
        if shard.span is not None:
            return self.source.fetch_part(shard, files)
        self._bring_metadata([file for file in shard.files if file.path in self._shared], files)
        self.source.fetch([file for file in shard.files if file.path not in self._shared], files)
        return True

    def _bring_metadata(self, shared: list[RemoteFile], files: Path) -> None:
        """Fetch the files that all shards need unless they are there, and link to them from `files`."""
        if not shared:
            return
        with self._metadata() as there:
            self.source.fetch(shared, there)
            for file in shared:
                fs.make_folder((files / file.path).parent)
                fs.link_to(there / file.path, files / file.path)

    @contextlib.contextmanager
    def _metadata(self) -> Iterator[Path]:
        """Yield the folder of the files that all shards need, locked against other processes."""
        there = self.folder / _METADATA
        fs.make_folder(there)
        with self._locked(_METADATA):
            yield there

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        lock = fs.open_to_append(self.folder / f"{name}.lock")
        try:
            fs.lock(lock, fcntl.LOCK_EX, self.folder)
            yield
        finally:
            os.close(lock)

    def _reader(self, shard: RemoteShard, files: Path, options: Mapping[str, Any]) -> Reader:
        path = files / shard.files[0].path if shard.span is not None else files
        return reader_class(self.name)(path, options={**self.source.reader_options(self.id), **options})

    @property
    def _options(self) -> Mapping[str, Any]:
        """The options of the reader, with `auto` replaced by its meaning for the dataset.

        It is decided once, by as many of the first shards as necessary, and stored in the folder.
        """
        kind = reader_class(self.name)
        if not issubclass(kind, PartsReader):
            return self.options
        if not {name for name in kind.settled_names if self.options.get(name) in (None, "auto")}:
            return self.options
        path, folder = self.folder / _SETTLED, self.folder / f"{_SETTLED}-files"
        with self._locked(_SETTLED):
            if not path.is_file():
                fs.replace_file(path, dump_json(self._settled(kind, folder)).encode())
            return self.options | decode(dict[str, Any], load_json(path), str(path))

    def _settled(self, kind: type[PartsReader], folder: Path) -> dict[str, str]:
        counted = Counter[str]()
        for number in range(min(len(self.shards), _MOST_ASKED)):
            fs.remove(folder)  # left by a killed process
            try:
                if self._bring(number, folder):
                    with self._reader(self.shards[number], folder, self.options) as reader:
                        assert isinstance(reader, PartsReader)
                        counted.update(reader.evidence())
            except FormatError:
                if not self.skip_bad:
                    raise
            finally:
                fs.remove(folder)
            if counted and kind.settled(counted)[1]:
                break
        return kind.settled(counted)[0]

    def _convert(self, shard: RemoteShard, files: Path, destination: Path, options: Mapping[str, Any]) -> list[str]:
        """Convert a shard, unless it has no steps; return sentences on the episodes that are left out."""
        with self._reader(shard, files, options) as reader:
            if not reader.stated().episode_numbers:
                return []
            facts, left_out = self._facts(reader, shard)
            if not facts.steps:
                return left_out
            asked = DownloadOptions(self.name)
            request = Request(
                self.name, self.id, self.id, self.remote.revision, shard.episodes, default_layout(self.name), "remote"
            )
            inputs = {file.path: file.checksum or "" for file in shard.files}
            SourceConversion(
                asked, reader, facts, files, destination, request, {"from": self.address}, inputs=inputs,
                revision=self.remote.revision,
            ).run()  # fmt: skip
            return left_out

    def _facts(self, reader: Reader, shard: RemoteShard) -> tuple[SourceFacts, list[str]]:
        """Return the facts of the episodes of a shard, and sentences on those that are left out."""
        if not self.skip_bad:
            return choose_episodes(reader, shard.episodes, DownloadOptions(self.name)), []
        numbers = reader.stated().episode_numbers
        chosen = numbers if shard.episodes is None else select_episodes(parse_episodes(shard.episodes), numbers)
        sound, left_out = sound_episodes(reader, chosen, Silent())
        if shard.episodes is None and not left_out:
            try:
                return reader.facts(), []
            except FormatError as error:  # a fault of the shard as a whole, such as a missing end
                left_out.append(error.message)
        return reader.facts([(number, number + 1) for number in sound]), left_out

    def open(self, number: int, folder: Path) -> OpenShard:
        """Map a shard that is in a folder."""
        left_out = decode(tuple[str, ...], load_json(folder / _LEFT_OUT), str(folder / _LEFT_OUT))
        if not (folder / _DATASET).is_dir():
            return OpenShard.nothing(left_out)
        with open_dataset(folder / _DATASET) as reader:
            first, frames = self._first_episode(number, reader), with_frames(reader, None)
            fps = functools.partial(_fps_of, folder / _DATASET)
            return OpenShard(
                storage_of(reader), 0, reader.episodes.length, first, left_out, frames, reader.fields, fps=fps
            )

    def _first_episode(self, number: int, reader: TedReader | PackedReader) -> int:
        """Return the number to add to episode numbers, which begin at 0 in each shard."""
        if self.shards[number].episodes is not None or len(self.shards) == 1:
            return 0
        own = reader.episodes.episode.tolist()
        known = [self.source.episode_number(text) for text in reader.episode_text or [{}] * len(own)]
        offsets = {-1 if one is None else one - at for one, at in zip(known, own, strict=True)}
        return offset if len(offsets) == 1 and (offset := offsets.pop()) >= 0 else number << _EPISODE

    def close(self) -> None:
        """Close the connections."""
        self.source.close()

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_guard", "_connected", "_process"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._process, self._guard = os.getpid(), threading.Lock()


_NAMED = re.compile(r"(?P<source>[a-z][a-z0-9_-]*):(?P<id>[^@]+)(?:@(?P<revision>.+))?")
_CACHE_SIZE = 8 << 30
_VARIABLE = "RBTOOL_CACHE_SIZE"
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kMGT]?)i?B?", re.ASCII | re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def open_stream(
    dataset: PathLike,
    root: PathLike | None,
    cache_size: int | str | None,
    options: Mapping[str, Any],
    *,
    skip_bad: bool = False,
) -> StreamStorage:
    """Open a dataset as a storage of shards: a path, `hf://OWNER/NAME[@REVISION]`, `source:id[@REVISION]`, or a folder
    in a bucket or on a web server, `s3://BUCKET/FOLDER`, `gs://BUCKET/FOLDER`, `https://HOST/FOLDER`.

    A stored dataset is read in place. Shards of a remote are cached below the storage root, in at most `cache_size`
    bytes (`RBTOOL_CACHE_SIZE`, else 8 GiB); `options` go to the source's reader. With `skip_bad` unreadable episodes
    and shards are left out. UsageError for an invalid address or size.
    """
    limit = _limit(cache_size)
    files = _opened(os.fspath(dataset), root, options, skip_bad)
    return StreamStorage(files if isinstance(files, LocalShards) else cached(files, limit, skip_bad=skip_bad))


def cached(files: HostedShards | SourceShards, limit: int | str | None, *, skip_bad: bool) -> CachedShards:
    """Cache shards of a remote in their folder below the storage root, in at most `limit` bytes (8 GiB)."""
    folder = files.folder / ("sound" if skip_bad else "shards")
    return CachedShards(files, folder, _limit(limit), skip_bad=skip_bad)


def _limit(given: int | str | None) -> int:
    """Return how many bytes shards may take: as given, else as the environment states, else 8 GiB."""
    if given is not None:
        return bytes_of_size(given)
    stated = os.environ.get(_VARIABLE)
    try:
        return bytes_of_size(stated) if stated else _CACHE_SIZE
    except UsageError as error:
        raise UsageError(f"{_VARIABLE} is {stated!r}, which is not a size", hint=error.hint) from error


def _opened(
    dataset: str, root: PathLike | None, options: Mapping[str, Any], skip_bad: bool
) -> LocalShards | HostedShards | SourceShards:
    if is_hub_address(dataset):
        return HostedShards(hub_folder(HubAddress.parse(dataset)), streams_folder(root))
    if is_web_address(dataset):
        return HostedShards(web_folder(dataset), streams_folder(root))
    try:
        return LocalShards(find_dataset(dataset, root))
    except DatasetNotFoundError:
        named = _NAMED.fullmatch(dataset)
        if named is None or named["source"] not in source_names():
            raise
    return SourceShards(
        named["source"], named["id"], named["revision"], options, streams_folder(root), skip_bad=skip_bad
    )


def bytes_of_size(size: int | str) -> int:
    """Read a size like `500MB`, `2 GB` or a number of bytes; UsageError for anything else."""
    found = _SIZE.fullmatch(str(size).strip())
    count = 0 if found is None else int(float(found["number"]) * _UNITS[found["unit"].lower()])
    if isinstance(size, bool) or count < 1:
        raise UsageError(f"{size!r} is not a size", hint="write it like 500MB, 2GB or a number of bytes")
    return count
