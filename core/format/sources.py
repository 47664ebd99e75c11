"""The contract of a remote catalogue: what datasets there are, what files make up one, and how to get them.

A `Source` hands a folder of fetched files to the `Reader` of the same name. It talks to the network only in
`ids`, `catalogue`, `describe` and `fetch`; making one does not.
"""

from __future__ import annotations

import difflib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias, final

from ..errors import DatasetNotFoundError, FormatError, RbtoolError, UsageError
from . import fs
from .contracts import Closing, own_attributes, refuse_overrides
from .documents import written_time
from .episodes import EpisodeRanges
from .reader import Reader

Advance: TypeAlias = Callable[[int], None]
"""Receives how many more bytes there are; negative where bytes turn out to be wrong."""
Note: TypeAlias = Callable[[str], None]
"""Receives a sentence on what went wrong and is tried again."""


_LONGEST_ID = 200  # with room for what is added to make a file name of it
_ODD = re.compile("[\0\ud800-\udfff]")


def safe_id(name: str) -> str:
    """Return a dataset id that cannot leave its folder, or raise UsageError."""
    parts = name.split("/")
    if not name or name.startswith(("/", "~")) or "\\" in name or _ODD.search(name) or re.match("[A-Za-z]:", name):
        raise UsageError(f"{name!r} is not a dataset id: ids are relative, like D4RL/door/human-v2")
    if len(name.encode()) > _LONGEST_ID:
        raise UsageError(f"{name[:40]}… is not a dataset id: ids have at most {_LONGEST_ID} bytes")
    if any(part in {"", ".", ".."} or part.startswith(".") for part in parts):
        raise UsageError(f"{name!r} is not a dataset id: no part of an id may be empty or begin with a dot")
    return name


@dataclass(frozen=True, slots=True)
class LocalCache:
    """A source's cache: the environment variable that names it, and where it is without."""

    source: str
    variable: str
    default: str

    @property
    def folder(self) -> Path:
        """The folder that holds `<id>`."""
        try:
            return fs.expanded(os.environ.get(self.variable) or self.default).absolute()
        except UsageError as error:
            error.hint = f"set {self.variable}, or HOME"
            raise

    def find(self, dataset_id: str, reader: type[Reader]) -> Path:
        """Return the folder of a dataset, or raise DatasetNotFoundError that names the folder searched."""
        path = self.folder / safe_id(dataset_id)
        if reader.recognises(path):
            return path
        raise DatasetNotFoundError(
            f"the local {self.source} cache {self.folder} has no dataset {dataset_id!r}: looked in {path}",
            hint=self._near(dataset_id, reader),
        )

    def ids(self, reader: type[Reader]) -> Iterator[str]:
        """Ids of all datasets in the cache."""
        for folder, names, _ in os.walk(self.folder):
            names[:] = sorted(name for name in names if not name.startswith("."))
            path = Path(folder)
            if path != self.folder and reader.recognises(path):
                names.clear()
                yield path.relative_to(self.folder).as_posix()

    def _near(self, dataset_id: str, reader: type[Reader]) -> str:
        known = list(self.ids(reader))
        bare = re.sub(r"-v\d+$", "", dataset_id)
        versions = [name for name in known if re.fullmatch(re.escape(bare) + r"-v\d+", name)]
        near = versions or difflib.get_close_matches(dataset_id, known, n=3, cutoff=0.4)
        if near:
            return f"there {'is' if len(near) == 1 else 'are'} {', '.join(near)}"
        return f"{self.variable} names the folder, if it is another; `rbtool convert PATH DEST` takes any path"


_FINAL = {
    "ids": "list_ids", "catalogue": "list_catalogue", "describe": "look_up", "needed": "choose_files",
    "fetch": "download", "close": "on_close",
}  # fmt: skip
"""The methods that a source has for its users, and what it implements in place of each."""


class StaleListing(DatasetNotFoundError):
    """The remote no longer has a file that it listed: a caller that asks for the dataset has to describe it again."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a remote dataset.

    Attributes:
        path: relative to the dataset's folder, with `/` between its parts.
        checksum: what the remote states about the bytes: `sha256:…`, `git-sha1:…` (of the git blob), `md5:…` or
            `crc32c:…` in lower-case hex. None if it states nothing, as for plain URLs: then the size decides, and the
            manifest records that the file is not verified by the remote.
        size: in bytes; None if the remote does not give it, which is only possible without a checksum.
        addresses: from where it can be fetched, in the order in which to try them.
        version: any text that changes with the bytes, such as an ETag; None if there is none, or the checksum serves.
    """

    path: str
    size: int | None
    checksum: str | None
    addresses: tuple[str, ...]
    version: str | None = None

    @property
    def known_size(self) -> int:
        """The size; FormatError for a file with a checksum and without a size, 0 for one that has neither."""
        if self.size is None and self.checksum is not None:
            raise FormatError(f"the remote lists {self.path!r} with a checksum and without a size")
        return self.size or 0

    def is_same_as(self, other: RemoteFile) -> bool:
        """Whether both are certainly the same bytes: by checksum, else by size and version, which must be known."""
        if self.checksum is not None or other.checksum is not None:
            return self.checksum == other.checksum
        return self.version is not None and (self.size, self.version) == (other.size, other.version)


@dataclass(frozen=True, slots=True)
class RemoteDataset:
    """One dataset at one state of the remote.

    Attributes:
        address: where it is, for people: `hf://ORGANISATION/REPOSITORY@9f31c2e…/door/human-v2`.
        revision: the exact state, which can be requested from the remote again; None if it keeps no history.
        steps, episodes: what the source's own metadata claims; None if it does not say.
    """

    id: str
    address: str
    revision: str | None
    files: tuple[RemoteFile, ...]
    steps: int | None = None
    episodes: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all files whose size is known."""
        return sum(file.known_size for file in self.files)

    @property
    def checksums(self) -> dict[str, str]:
        """The remote's checksum of every file that has one, by its path."""
        return {file.path: file.checksum for file in self.files if file.checksum is not None}

    @property
    def unverified(self) -> tuple[str, ...]:
        """Paths of the files for which the remote gives no checksum."""
        return tuple(file.path for file in self.files if file.checksum is None)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all files."""
        return tuple(file.path for file in self.files)


@dataclass(frozen=True, slots=True)
class RemoteShard:
    """A part of a remote dataset that can be read alone: its files, including metadata.

    `episodes` are the numbers of its episodes, `A:B` or several of these; None if it has all episodes in its files,
    which are then numbered from 0 in each shard. With a `span` it is the part of its only file that begins in these
    bytes.
    """

    files: tuple[RemoteFile, ...]
    episodes: str | None = None
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Ids:
    """Ids of all datasets of a remote, sorted; `problems` has a sentence for each part that could not be read.

    `unreachable` states that some of those may be readable another time: what is not listed may exist.
    """

    ids: tuple[str, ...]
    problems: tuple[str, ...] = ()
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """What a catalogue states about one dataset; None where the remote does not state.

    `state` is any text that changes when the dataset does: with it a later listing need not ask again.
    """

    id: str
    bytes: int | None = None
    steps: int | None = None
    episodes: int | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All datasets of a remote, ordered by id, as they were at `fetched` (UTC, ISO 8601).

    `problems` and `unreachable` are explained at `Ids`.
    """

    remote: str
    fetched: str
    entries: tuple[CatalogueEntry, ...]
    problems: tuple[str, ...] = ()
    unreachable: bool = False


class Source(Closing, ABC):
    """A remote catalogue of datasets in one format.

    The public methods are final. A subclass implements these:

    - `remote`: the remote that is used, as text for people; a class attribute or a property.
    - `list_ids()`: the ids of all datasets.
    - `look_up(dataset_id, revision, totals)`: the files of one dataset.
    - `download(files, folder, progress, note)`: bring files to a folder; `core.remote.fetch_files` does that.

    and may implement `key`, `list_catalogue`, `choose_files`, `files_read`, `episode_numbers`, `reader_options`,
    `on_close`, and for streams `shards`, `lacking`, `fetch_part`, `episode_number`. `core.remote.HttpSource` is a
    source of plain URLs with less to implement; `core.testing.sources` holds the tests of the contract.

    Every method that talks to the network raises NetworkError (also where the network is forbidden),
    AuthorisationError, DatasetNotFoundError, or FormatError for answers that make no sense.
    """

    name: ClassVar[str]
    """Name of the source, and of the reader of what it fetches."""

    local_cache: ClassVar[LocalCache | None] = None
    """Where the source's own tools keep what they fetched."""

    namespaced: ClassVar[bool] = True
    """Whether ids have a namespace, as `D4RL/door/human-v2` has: one without may be the older name of another."""

    open_ended: ClassVar[bool] = False
    """Whether an id with an owner, `OWNER/NAME`, is taken as it is: no list has all datasets."""

    pickled: ClassVar[bool] = False
    """Whether its files hold pickles without which there is nothing to read: downloads then need `trust_pickle`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_overrides(cls, own_attributes(cls, Source), _FINAL)

    @property
    @abstractmethod
    def remote(self) -> str:
        """The remote that is used, as the environment states: `hf://ORGANISATION`."""

    @property
    def key(self) -> str:
        """Text that no other remote has, whatever host serves it: names the cached catalogue. Default: `remote`."""
        return self.remote

    @abstractmethod
    def list_ids(self) -> Ids:
        """Return the ids of all datasets, with as few requests as possible."""

    def list_catalogue(self, known: Catalogue | None, progress: Callable[[int, int], None]) -> Catalogue:
        """Return all datasets with what the remote states about them; the default only gives their ids.

        Entries of `known` whose state is unchanged need not be requested again. `progress` gets how many datasets are
        done, and how many there are.
        """
        found = self.ids()
        entries = tuple(CatalogueEntry(one) for one in found.ids)
        progress(len(entries), len(entries))
        return Catalogue(self.remote, written_time(), entries, found.problems, found.unreachable)

    @abstractmethod
    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Return the files of exactly this dataset, at a branch, tag or commit (None: the newest).

        Its steps and episodes are only needed with `totals`. DatasetNotFoundError if the id does not exist.
        """

    def choose_files(self, dataset: RemoteDataset, episodes: EpisodeRanges) -> Sequence[RemoteFile]:
        """Return the files that hold these episodes and all metadata; all files by default."""
        return dataset.files

    def files_read(self, files: Sequence[RemoteFile], options: Mapping[str, Any]) -> Sequence[RemoteFile]:
        """Return the files that the reader opens with these options; by default all."""
        return files

    def shards(self, dataset: RemoteDataset, folder: Path) -> Sequence[RemoteShard]:
        """Return the parts of a dataset that a stream reads one after another; by default a single part.

        Files that are fetched to find them are put into `folder`, and are not fetched again for each shard.
        """
        return [RemoteShard(dataset.files)]

    def lacking(self, dataset: RemoteDataset) -> Sequence[RbtoolError]:
        """Return errors about files that the dataset should have, and the remote does not; none by default."""
        return ()

    def episode_number(self, text: Mapping[str, str]) -> int | None:
        """Return the number of an episode of the whole dataset by its text; None where that does not state it.

        For sources whose `shards` number their episodes from 0.
        """
        return None

    def fetch_part(self, shard: RemoteShard, folder: Path) -> bool:
        """Bring a shard with a `span` to `folder`, as a file of its own; return whether any episode begins in it.

        Raises what `fetch` raises. For sources whose `shards` have such parts.
        """
        raise NotImplementedError(f"{self.name} has no shards that are parts of files")

    @abstractmethod
    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Bring the files to `folder`, as `fetch` promises."""

    def episode_numbers(self, dataset: RemoteDataset) -> Sequence[int] | None:
        """Return the numbers of its episodes, ascending, where the names of its files give them; else None."""
        return None

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """Return the options with which the reader opens the files of a dataset; none by default."""
        return {}

    def on_close(self) -> None:
        """Close connections."""

    @final
    def ids(self) -> Ids:
        """List the ids, sorted. FormatError for a remote that lists one twice."""
        found = self.list_ids()
        if len(set(found.ids)) < len(found.ids):
            twice = next(one for one in found.ids if found.ids.count(one) > 1)
            raise FormatError(f"{self.remote} lists {twice!r} twice")
        return found if list(found.ids) == sorted(found.ids) else replace(found, ids=tuple(sorted(found.ids)))

    @final
    def catalogue(
        self, known: Catalogue | None = None, *, progress: Callable[[int, int], None] | None = None
    ) -> Catalogue:
        """List all datasets with their sizes, steps and episodes, as far as the remote states them."""
        return self.list_catalogue(known, progress or (lambda done, total: None))

    @final
    def describe(self, dataset_id: str, revision: str | None = None, *, totals: bool = False) -> RemoteDataset:
        """Find the files of exactly this dataset; FormatError where the remote answers with another one."""
        found = self.look_up(dataset_id, revision, totals)
        if found.id != dataset_id:
            raise FormatError(f"{self.remote} answered with {found.id!r}, expected {dataset_id!r}")
        return found

    @final
    def needed(
        self,
        dataset: RemoteDataset,
        episodes: EpisodeRanges | None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Sequence[RemoteFile]:
        """Choose the files with these episodes and all metadata that the reader opens with these options."""
        chosen = dataset.files if episodes is None else self.choose_files(dataset, episodes)
        chosen = self.files_read(chosen, options)
        if not {file.path for file in chosen} <= set(dataset.paths):
            raise FormatError(f"files were chosen that {dataset.address} does not have")
        return chosen

    @final
    def fetch(
        self,
        files: Sequence[RemoteFile],
        folder: Path,
        *,
        progress: Advance | None = None,
        note: Note | None = None,
    ) -> None:
        """Fetch the files to `folder` and verify each; files that already exist and are sound are not fetched again.

        `progress` gets how many more bytes are sound, including existing ones; `note` gets what went wrong and is tried
        again. An interrupted fetch keeps what it has, and the next one resumes it.

        Raises:
            OutOfSpaceError: the disk is full.
            CorruptDataError: the bytes of a file never match its checksum.
            StaleListing: the remote has changed since it was described.
            FormatError: a file is missing in the end.
        """
        self.download(files, folder, progress or (lambda amount: None), note or (lambda text: None))
        for file in files:
            path = folder / file.path
            if not path.is_file() or file.size not in (None, path.stat().st_size):
                raise FormatError(f"{self.name} did not bring {file.path} with {file.size} bytes to {folder}")

    @final
    def close(self) -> None:
        """Close the connections, if there are any."""
        self.on_close()
