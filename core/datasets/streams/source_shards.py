"""Shards of datasets of other formats on their remotes: each is fetched and converted when its turn comes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...declarations import default_layout
from ...encodings.pickles import require_trust
from ...format import fs
from ...format.digest import digest_text
from ...format.locate import reader_class, source_class
from ...format.manifest import Request
from ...format.sources import RemoteFile, RemoteShard, Source, safe_id
from ...format.videos import refuse_videos
from ...opening import open_dataset
from ...progress import Silent
from ...storages.stream import OpenShard
from ...verbs.results import PICKLED
from ...verbs.source_conversion import SourceConversion, facts_of
from .cache import ShardFiles
from .ted_shards import storage_of

_METADATA, _LOCK, _FILES, _DATASET = "metadata", "metadata.lock", "files", "dataset"
_EPISODE = 32
"""Bits of an episode's number that are its number in the shard, where remotes do not number episodes."""


class SourceShards(ShardFiles):
    """The shards of dataset `dataset_id` of a source, as the source divides it.

    The remote is asked once for the state that all shards are of. Files that all shards need are fetched into `folder`
    once; those of a shard are fetched, converted to TED with the `options` of the reader, and removed. How many steps a
    shard has is known then.

    Videos are decoded. UsageError without the trust that pickles need, and what the source and the reader raise.
    """

    def __init__(
        self, source: str, dataset_id: str, revision: str | None, options: Mapping[str, Any], folder: Path
    ) -> None:
        self.name, self.id, self.options = source, safe_id(dataset_id), dict(options)
        if "images" in reader_class(source).option_names:
            self.options.setdefault("images", "decode")  # videos that are kept are of several shards
        self._process, self._guard = os.getpid(), threading.Lock()
        if self.source.pickled:
            require_trust(Path(self.id), self.options.get("trust_pickle"), PICKLED)
        self.remote = self.source.describe(self.id, revision)
        self.address = self.remote.address
        state = sorted(f"{file.path}\0{file.checksum}\0{file.version}\0{file.size}" for file in self.remote.files)
        given = sorted(f"{name}={value}" for name, value in self.options.items())
        self.identity = digest_text("\n".join([source, self.id, *given, *state]))
        self.folder = folder / f"{source}-{self.identity.rpartition(':')[2][:16]}"
        with self._metadata() as there:
            self.shards = [
                replace(shard, files=tuple(self.source.files_read(shard.files, self.options)))
                for shard in self.source.shards(self.remote, there)
            ]

    @property
    def source(self) -> Source:
        """The connections of this process."""
        if self._process != os.getpid():
            self._process, self._guard = os.getpid(), threading.Lock()
            self.__dict__.pop("_connected", None)
        return self._connected

    @cached_property
    def _connected(self) -> Source:
        return source_class(self.name)()

    def __len__(self) -> int:
        return len(self.shards)

    @cached_property
    def _shared(self) -> frozenset[str]:
        """The paths of the files that every shard needs; of a single one, those that are here already."""
        paths = [{file.path for file in shard.files} for shard in self.shards]
        if len(paths) == 1:
            return frozenset(path for path in paths[0] if (self.folder / _METADATA / path).is_file())
        return frozenset(set.intersection(*paths))

    def size(self, number: int) -> int:
        """Return the bytes of the files of a shard: what its rows take is not known before."""
        return sum(file.known_size for file in self.shards[number].files if file.path not in self._shared)

    # Fetching ----------------------------------------------------------------------------------------

    def fetch(self, number: int, folder: Path) -> None:
        """Fetch the files of a shard, and convert them."""
        shard, files = self.shards[number], folder / _FILES
        own = [file for file in shard.files if file.path not in self._shared]
        self._bring_metadata([file for file in shard.files if file.path in self._shared], files)
        self.source.fetch(own, files)
        with self._guard:  # one conversion at a time: it takes memory, and the interpreter
            self._convert(shard, files, folder / _DATASET)
        fs.remove(files)

    def _bring_metadata(self, shared: list[RemoteFile], files: Path) -> None:
        """Fetch the files that all shards need unless they are there, and link to them from `files`."""
        fs.make_folder(files)
        if not shared:
            return
        with self._metadata() as there:
            self.source.fetch(shared, there)
            for file in shared:
                fs.make_folder((files / file.path).parent)
                fs.link_to(there / file.path, files / file.path)

    @contextlib.contextmanager
    def _metadata(self) -> Iterator[Path]:
        """Return the folder of files that all shards need, which one process at a time changes."""
        there = self.folder / _METADATA
        fs.make_folder(there)
        lock = fs.open_to_append(self.folder / _LOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield there
        finally:
            os.close(lock)

    def _convert(self, shard: RemoteShard, files: Path, destination: Path) -> None:
        options = {**self.source.reader_options(self.id), **self.options}
        layout = default_layout(self.name)
        with reader_class(self.name)(files, options=options) as reader:
            facts = facts_of(reader, shard.episodes or ":", Silent())  # not all: that asks for the other shards, too
            SourceConversion(
                reader=reader, facts=facts, source=files, destination=destination,
                request=Request(self.name, self.id, self.id, self.remote.revision, shard.episodes, layout, "remote"),
                verb="download", arguments={"from": self.address}, force=False, dry_run=False, progress=Silent(),
                inputs={file.path: file.checksum or "" for file in shard.files}, revision=self.remote.revision,
            ).run()  # fmt: skip

    def open(self, number: int, folder: Path) -> OpenShard:
        """Map a shard that is in a folder."""
        numbered = self.shards[number].episodes is not None or len(self.shards) == 1
        with open_dataset(folder / _DATASET) as reader:
            refuse_videos(reader, "a stream of shards")
            lengths = reader.episodes.length
            return OpenShard(storage_of(reader), 0, lengths, 0 if numbered else number << _EPISODE)

    def close(self) -> None:
        """Close the connections."""
        self.source.close()

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_guard", "_connected", "_process"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._process, self._guard = os.getpid(), threading.Lock()
