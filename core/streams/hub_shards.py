"""Shards of a dataset of rbtool on a hub, whose rows are fetched from its files by range."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptDataError, DatasetNotFoundError, UsageError
from ..format import fs
from ..format.digest import digest_file, digest_text, open_regular, read_regular
from ..format.manifest import MANIFEST, VIDEOS, Manifest
from ..format.memmap.reader import TedReader
from ..format.open_files import ListedFiles
from ..format.packed.reader import PackedReader
from ..format.packed.schema import SCHEMA
from ..format.shards import SHARD_DIGESTS, EpisodeShards, Range, ShardDigests, row_files, row_ranges
from ..format.sources import RemoteFile
from ..format.videos import ids_of_episodes, index_name, video_name
from ..remote.fetch import fetch_files
from ..remote.hub import Hub, HubFile, hub_endpoint
from ..remote.transport import read_range
from ..storages.stream import OpenShard
from ..transforms.video import frames_below
from .cache import ShardFiles
from .local_shards import disagreement, open_shard, storage_of

_LOG = logging.getLogger("rbtool.remote")
_BASE = "base"
_LOCK = "base.lock"
_PAGE = 8 << 10
"""Bytes by which a range can take more on the disk, at its two ends."""


class HubShards(ShardFiles):
    """The shards of a dataset at a commit of a hub.

    Manifest, episode table and other files without rows are fetched into `folder` once, and compared with the
    checksums of the hub and the digests of the manifest. Of the files with rows a shard has the ranges of its episodes:
    they are as long as in the dataset, with holes, and no manifest is next to them. It also has the videos that its
    rows refer to, whole; several shards that are there share the file of one.

    DatasetNotFoundError for a repository without a dataset, UsageError for a dataset without steps, and what a `Hub`
    raises. A pickle has the commit, and asks the hub for nothing that is there.
    """

    def __init__(self, repository: str, revision: str | None, folder: Path) -> None:
        self.repository = repository
        self._connect()
        self.commit = self.hub.commit(repository, revision)
        self.folder = folder / _folder_name(repository, self.commit)
        self._videos: dict[str, RemoteFile] = {}
        self._fetch_base()
        self._open_base()

    def _connect(self) -> None:
        self._hub, self._process, self._fetching_videos = Hub(), os.getpid(), threading.Lock()

    @property
    def hub(self) -> Hub:
        """The connections of this process; a forked process makes new ones."""
        if self._process != os.getpid():
            self._connect()
        return self._hub

    @property
    def address(self) -> str:  # type: ignore[override]
        """The repository at its commit."""
        return f"hf://{self.repository}@{self.commit[:7]}"

    def __len__(self) -> int:
        return len(self._shards.rows)

    # Files without rows ------------------------------------------------------------------------------

    def _fetch_base(self) -> None:
        """Fetch the files that hold no rows, in one process at a time."""
        base = self.folder / _BASE
        fs.make_folder(base)
        lock = fs.open_to_append(self.folder / _LOCK)
        try:
            fs.lock(lock, fcntl.LOCK_EX, self.folder)
            files = {file.path: self._remote(file) for file in self.hub.tree(self.repository, self.commit)}
            if MANIFEST not in files:
                raise DatasetNotFoundError(f"{self.address} is no rbtool dataset: it has no {MANIFEST}")
            fetch_files([files[MANIFEST]], base, self.hub)
            manifest = Manifest.load(base)
            if missing := {file.path for file in manifest.files} - files.keys():
                raise CorruptDataError(f"{self.address} has no {min(missing)}, which its manifest lists")
            for file in manifest.files:
                if files[file.path].size != file.size:
                    raise CorruptDataError(f"{self.address}: {file.path} has another size than its manifest lists")
            if manifest.layout == "packed":
                fetch_files([files[SCHEMA]], base, self.hub)
            later = self._files_of_rows(manifest)
            videos = {file.path: files[file.path] for file in manifest.files if file.path.startswith(VIDEOS)}
            later.update(videos)
            wanted = [files[file.path] for file in manifest.files if file.path not in later]
            fetch_files([*wanted, *(files[name] for name in files.keys() & {SHARD_DIGESTS})], base, self.hub)
            self._videos = videos
        finally:
            os.close(lock)

    def _remote(self, file: HubFile) -> RemoteFile:
        return RemoteFile(file.path, file.size, file.checksum, (self._address_of(file.path),))

    def _address_of(self, path: str) -> str:
        return self.hub.address(self.repository, self.commit, path)

    def _files_of_rows(self, manifest: Manifest) -> set[str]:
        return row_files(manifest, lambda: read_regular(self.folder / _BASE / SCHEMA))

    def _open_base(self) -> None:
        """Open the dataset without its rows."""
        manifest = Manifest.load(self.folder / _BASE)
        if not manifest.steps:
            raise UsageError(f"{self.address} has no steps: there is nothing to sample")
        rows = self._files_of_rows(manifest)
        self._sizes = {file.path: file.size for file in manifest.files if file.path in rows}
        self._digests = {file.path: file.digest for file in manifest.files}
        self._others = [file.path for file in manifest.files if file.path not in {*rows, *self._videos}]
        self._reader = self._opened(lambda name: self._hole(self._sizes[name]))
        self._shards = EpisodeShards.of(self._reader)
        self._digests_of_parts = self._read_shard_digests()
        self.identity = manifest.content_digest
        self.rows, self.episodes = self._shards.rows, len(self._shards.lengths)

    def _read_shard_digests(self) -> ShardDigests | None:
        try:
            data = read_regular(self.folder / _BASE / SHARD_DIGESTS)
        except FileNotFoundError:  # uploaded by something else
            return None
        found = ShardDigests.parse(data, self._reader, self._shards.bounds)
        if found is None and len(self) > 1:
            said = "%s has digests of other shards: parts of its files are not compared with them; upload it again"
            _LOG.warning(said, self.address)
        return found

    def _hole(self, size: int) -> int:
        """Return the descriptor of a file of this size without bytes or a name."""
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
        """Open the dataset with files of rows of which `rows` gives the descriptors."""
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
        """Return how many bytes the rows of a shard take on the disk: which videos they need is not known before."""
        return sum(stop - start + _PAGE for start, stop in self._ranges(number).values())

    def fetch(self, number: int, folder: Path, more: Callable[[int], None]) -> None:
        """Fetch the ranges of a shard into files with holes; CorruptDataError for other bytes than were announced.

        A hub has checksums of whole files, and the manifest digests of them: they are compared where a shard has all of
        a file, as it has of videos. Parts are compared with the digests of shards that rbtool uploads. Without these,
        rows of a part have to agree with the episode table, which has their numbers, flags and returns.
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
        for name, size in self._sizes.items():
            path = folder / name
            fs.make_folder(path.parent)
            descriptor = fs.create(path)
            try:
                fs.truncate(descriptor, size, path)
                if name in ranges:
                    self._fetch_range(name, ranges[name], descriptor, path)
                    fs.fsync(descriptor, path)
            finally:
                fs.close(descriptor, path)

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
        """Fetch the videos that the rows refer to; link to files that other shards have, and compare all."""
        names = self._names_of_videos(number, folder)
        more(sum(self._videos[name].known_size + _PAGE for name in names))
        fs.make_folder(folder / VIDEOS)
        with self._fetching_videos:  # one shard at a time: the next one has files of it
            for name in names:
                _link_to_another(folder, name)
            fetch_files([self._videos[name] for name in names], folder, self.hub)
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
            raise CorruptDataError(f"{name} of {self.address} is not what its manifest announced")

    def _fetch_range(self, name: str, range_: Range, descriptor: int, path: Path) -> None:
        def write(data: memoryview, position: int) -> None:
            fs.pwrite(descriptor, data, position, path)

        read_range(self.hub, self._address_of(name), *range_, write, what=f"{name} of {self.address}")

    def open(self, number: int, folder: Path) -> OpenShard:
        """Map a shard that is in a folder."""
        with self._opened(lambda name: open_regular(folder / name)) as reader:
            frames = frames_below(folder, reader.fields)
            return open_shard(self._shards, storage_of(reader), number, reader.fields, frames)

    def close(self) -> None:
        """Close the connections and the files."""
        self._reader.close()
        self.hub.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("repository", "commit", "folder", "_videos")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()
        try:
            self._open_base()
        except (DatasetNotFoundError, FileNotFoundError, CorruptDataError):  # the cache was pruned since
            self._fetch_base()
            self._open_base()


class _FilesWithoutVideos(ListedFiles):
    """Files of a dataset whose videos are where its shards are."""

    def check_sizes(self) -> None:
        for file in self.manifest.files:
            if not file.path.startswith(VIDEOS) and (problem := self.size_problem(file)):
                raise CorruptDataError(problem)


def _link_to_another(folder: Path, name: str) -> None:
    """Link to a file of another shard next to the one in `folder`, where one is there and the file system has links."""
    for other in folder.parent.glob(f"*/{name}"):
        with contextlib.suppress(OSError):  # it is removed now
            place = os.open(other.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fs.link_to(Path(other.name), folder / name, among=place)
            finally:
                os.close(place)
            return


def _folder_name(repository: str, commit: str) -> str:
    whole = digest_text(f"{hub_endpoint()}/{repository}@{commit}")
    return f"{repository.replace('/', '--')}-{whole.rpartition(':')[2][:16]}"
