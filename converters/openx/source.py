"""Downloads datasets of Open X-Embodiment from the repository on the Hugging Face hub that has them as tar archives."""

from __future__ import annotations

import contextlib
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

from ...core.errors import DatasetNotFoundError, RbtoolError
from ...core.format import fs
from ...core.format.converter import Advance, Ids, LocalCache, Note, RemoteDataset, RemoteFile, RemoteShard, Source
from ...core.format.files import open_regular
from ...core.remote.hub import HubFolderSource
from ...core.remote.transport import read_range
from .shards import (
    Fetch,
    fetch_piece,
    is_empty_archive,
    lacking_shards,
    ordered_shards,
    pieces_of,
    require_one_dataset,
    shards_at,
)

REPOSITORY = "jxu124/OpenX-Embodiment"
"""The repository on the hub."""
_READ = 4 << 20
_Write: TypeAlias = Callable[[memoryview, int], None]
_NUMBER = re.compile(r"(\d{1,15})\D*", re.ASCII)


def _number_of(name: str) -> int | None:
    found = _NUMBER.fullmatch(name.rpartition("_")[2])
    return None if found is None else int(found[1])


class _ArchiveSource(Source):
    """Datasets of numbered tar archives; large ones are fetched in parts."""

    name = "openx"
    pickled = True

    @abstractmethod
    def reading(self, file: RemoteFile) -> AbstractContextManager[Fetch]:
        """Open an archive: a function that fetches the bytes from `start` to `stop`."""

    def shards(self, dataset: RemoteDataset, folder: Path) -> list[RemoteShard]:
        """Return the archives in the order of their numbers; archives of more than 64 MiB come in parts."""
        files, found = {file.path: file for file in dataset.files}, list[RemoteShard]()
        for one in ordered_shards(map(Path, files)):
            file = files[str(one.path)]
            found += [RemoteShard((file,), span=span) for span in pieces_of(file.known_size)]
        return found

    def lacking(self, dataset: RemoteDataset) -> Sequence[RbtoolError]:
        """Return an error if archives between the others are missing."""
        return lacking_shards(dataset.address, ordered_shards(map(Path, dataset.paths)))

    def episode_number(self, text: Mapping[str, str]) -> int | None:
        """Return the number that the name of its file ends in."""
        return _number_of(text.get("file", ""))

    def fetch_part(self, shard: RemoteShard, folder: Path) -> bool:
        """Fetch the episodes that begin in a part of an archive; of one in one part, the whole, which is verified."""
        [file], span = shard.files, shard.span
        assert span is not None
        if span == (0, file.size):
            self.fetch([file], folder)
            return not is_empty_archive(folder / file.path)
        with self.reading(file) as fetch:
            return fetch_piece(fetch, file.known_size, span, folder / file.path, f"{self.remote}: {file.path}")


class OpenXSource(_ArchiveSource, HubFolderSource):
    """The repository `jxu124/OpenX-Embodiment`: ids are its folders with tar archives, like `bridge`.

    The loader script of the repository is neither fetched nor run.
    """

    repository = REPOSITORY
    suffixes = (".tar",)
    local_cache = LocalCache("openx", "OPENX_DATASET_DIR", "~/openx")

    @contextlib.contextmanager
    def reading(self, file: RemoteFile) -> Iterator[Fetch]:
        """Fetch from the hub."""

        def fetch(start: int, stop: int, write: _Write) -> None:
            read_range(self.hub, file.addresses[0], start, stop, write, what=file.path)

        yield fetch

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """The id, which the shards need not bear."""
        return {"id": dataset_id}


class OpenXFolder(_ArchiveSource):
    """The archives in `<folder>/<id>`, as a source of streams."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def remote(self) -> str:
        """The folder."""
        return str(self.folder)

    def list_ids(self) -> Ids:
        """List the folders that have archives."""
        return Ids(tuple(sorted(path.name for path in self.folder.iterdir() if path.is_dir() and shards_at(path))))

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Find the archives."""
        folder = self.folder / dataset_id
        found = shards_at(folder) if folder.is_dir() else []
        if not found:
            raise DatasetNotFoundError(f"{folder} has no tar archives")
        require_one_dataset(folder, found)
        files = []
        for one in found:
            state = one.path.stat()
            files.append(RemoteFile(one.path.name, state.st_size, None, (str(one.path),), str(state.st_mtime_ns)))
        return RemoteDataset(dataset_id, str(folder), None, tuple(files))

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Link to the archives."""
        for file in files:
            fs.link_to(Path(file.addresses[0]), folder / file.path)

    @contextlib.contextmanager
    def reading(self, file: RemoteFile) -> Iterator[Fetch]:
        """Read from the disk."""
        descriptor = open_regular(Path(file.addresses[0]))

        def fetch(start: int, stop: int, write: _Write) -> None:
            for position in range(start, stop, _READ):
                write(memoryview(os.pread(descriptor, min(_READ, stop - position), position)), position)

        try:
            yield fetch
        finally:
            os.close(descriptor)
