"""Downloads published Minari datasets from an organisation on a Hugging Face hub or from a bucket, without minari.

On the hub the first part of an id is a repository and the rest a folder in it; the repository's
`namespace_metadata.json` lists the datasets. In a bucket the id is a folder.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.errors import DatasetNotFoundError, NetworkError, RbtoolError, UsageError
from ...core.format.contracts import Closing
from ...core.format.converter import (
    Advance,
    Catalogue,
    CatalogueEntry,
    Ids,
    LocalCache,
    Note,
    RemoteDataset,
    RemoteFile,
    Source,
    safe_id,
)
from ...core.format.documents import written_time
from ...core.format.episodes import EpisodeRanges, select_episodes
from ...core.remote.bucket import Bucket, BucketObject
from ...core.remote.fetch import fetch_files
from ...core.remote.hub import Hub, HubFile, HubRepository, hub_endpoint
from ...core.remote.threads import Watch, ask_all
from ...core.remote.transport import Transport, read_small
from .metadata import METADATA_FILE, NAMESPACE_FILE, ids_in, is_dataset_id, totals_in

DATA_METADATA = f"data/{METADATA_FILE}"
_INDEX_BYTES = 16 << 20
_METADATA_BYTES = 64 << 20  # the bounds of an image space are written out in full
_REPOSITORY = re.compile(r"[\w.-]{1,96}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Found:
    """Datasets with all their files; `problems` and `unreachable` as in `Ids`."""

    datasets: tuple[RemoteDataset, ...]
    problems: tuple[str, ...] = ()
    unreachable: bool = False


class MinariRemote(Closing, ABC):
    """A place with Minari datasets. `address` is shown to users, `key` identifies it."""

    address: str
    key: str
    transport: Transport

    @abstractmethod
    def ids(self) -> Ids:
        """List the ids, without the files."""

    @abstractmethod
    def datasets(self) -> Found:
        """List all datasets and their files, without their steps and episodes."""

    @abstractmethod
    def describe(self, dataset_id: str, revision: str | None) -> RemoteDataset:
        """List the files of one dataset, without its steps and episodes."""

    def totals(self, dataset: RemoteDataset, watch: Watch) -> tuple[int | None, int | None]:
        """Request the steps and episodes from the metadata of the dataset; None for missing ones."""
        file = next(file for file in dataset.files if file.path == DATA_METADATA)
        if file.known_size > _METADATA_BYTES:
            return None, None
        raw = read_small(
            self.transport, file.addresses[0], limit=_METADATA_BYTES, size=file.size, checksum=file.checksum,
            sleep=watch.sleep,
        )  # fmt: skip
        return totals_in(raw)

    def close(self) -> None:
        """Close the connections."""
        self.transport.close()


class MinariOrganisation(MinariRemote):
    """The repositories of an organisation on the hub that the environment names."""

    def __init__(self, organisation: str) -> None:
        self.organisation = organisation
        self.address = f"hf://{organisation}"
        self.key = f"{hub_endpoint()}/{organisation}"
        self.hub = self.transport = Hub()

    def ids(self) -> Ids:
        repositories = self._repositories()
        calls = [functools.partial(self._ids_in, repository) for repository in repositories]
        results = ask_all(calls, self.hub)
        names, problems = self._merged(repositories, results)
        return Ids(tuple(sorted(names)), tuple(problems), _is_any_unreachable(results))

    def datasets(self) -> Found:
        repositories = self._repositories()
        calls = [functools.partial(self._datasets_in, repository) for repository in repositories]
        results = ask_all(calls, self.hub)
        found, problems = self._merged(repositories, results)
        ordered = tuple(sorted(found, key=lambda dataset: dataset.id))
        return Found(ordered, tuple(problems), _is_any_unreachable(results))

    def describe(self, dataset_id: str, revision: str | None) -> RemoteDataset:
        first, _, folder = safe_id(dataset_id).partition("/")
        if not _REPOSITORY.fullmatch(first):
            raise DatasetNotFoundError(
                f"{self.address} has no dataset {dataset_id!r}: no repository is called {first!r}"
            )
        repository = f"{self.organisation}/{first}"
        commit = self.hub.commit(repository, revision)
        inside = f"{folder}/data" if folder else "data"
        try:
            tree = self.hub.tree(repository, commit, inside)
        except DatasetNotFoundError as error:
            raise self._not_found(dataset_id, commit, revision) from error
        dataset = self._dataset(dataset_id, repository, commit, tree)
        if dataset is None:
            raise self._not_found(dataset_id, commit, revision)
        return dataset

    def _repositories(self) -> list[HubRepository]:
        found = self.hub.repositories(self.organisation)
        if not found:
            raise DatasetNotFoundError(
                f"{self.address} shows no datasets: there is no such organisation, or its datasets are private",
                hint="MINARI_REMOTE names the organisation, HF_TOKEN holds a token with access to them",
            )
        return found

    def _not_found(self, dataset_id: str, commit: str, revision: str | None) -> DatasetNotFoundError:
        where = f"at {revision} ({commit[:7]})" if revision else f"at {commit[:7]}"
        hint = "it may exist in another revision: leave out --revision for the newest" if revision else ""
        return DatasetNotFoundError(f"{self.address} has no dataset {dataset_id!r} {where}", hint=hint)

    def _merged(
        self, repositories: Sequence[HubRepository], results: Sequence[tuple[list[Any], list[str]] | RbtoolError]
    ) -> tuple[list[Any], list[str]]:
        """Merge the results of the repositories; a failed one is a problem; if all fail, raise the first error."""
        found, problems = [], []
        for repository, result in zip(repositories, results, strict=True):
            if isinstance(result, RbtoolError):
                problems.append(f"hf://{repository.name} could not be listed: {result.message}")
            else:
                found += result[0]
                problems += result[1]
        raise_if_all_failed(results)
        return found, problems

    def _ids_in(self, repository: HubRepository, watch: Watch) -> tuple[list[str], list[str]]:
        """List the ids in the current revision of a repository."""
        try:
            address = self.hub.address(repository.name, "main", NAMESPACE_FILE)
            index = read_small(self.hub, address, limit=_INDEX_BYTES, sleep=watch.sleep)
        except DatasetNotFoundError:
            index = None
        return ids_in(repository.name, index)

    def _datasets_in(self, repository: HubRepository, watch: Watch) -> tuple[list[RemoteDataset], list[str]]:
        """List the datasets in one commit of a repository, with a single listing of all its files."""
        commit = repository.commit or self.hub.commit(repository.name)
        tree = self.hub.tree(repository.name, commit)
        index = None
        for file in tree:
            if file.path == NAMESPACE_FILE:
                address = self.hub.address(repository.name, commit, file.path)
                index = read_small(
                    self.hub, address, limit=_INDEX_BYTES, size=file.size, checksum=file.checksum, sleep=watch.sleep
                )
        ids, problems = ids_in(repository.name, index)
        folders: dict[str, list[HubFile]] = {dataset_id.partition("/")[2]: [] for dataset_id in ids}
        for file in tree:
            for owner in _folders_above_data(file.path):
                if owner in folders:
                    folders[owner].append(file)
        found = []
        for dataset_id in ids:
            files = folders[dataset_id.partition("/")[2]]
            dataset = self._dataset(dataset_id, repository.name, commit, files)
            if dataset is None:
                problems.append(f"hf://{repository.name} has no data of {dataset_id}, which its index lists")
            else:
                found.append(dataset)
        return found, problems

    def _dataset(self, dataset_id: str, repository: str, commit: str, tree: Iterable[HubFile]) -> RemoteDataset | None:
        """Select the files of one dataset from a tree; None if there are none."""
        folder = dataset_id.partition("/")[2]
        prefix = f"{folder}/" if folder else ""
        files = [
            RemoteFile(
                file.path.removeprefix(prefix), file.size, file.checksum,
                (self.hub.address(repository, commit, file.path),),
            )
            for file in tree
            if file.path.startswith(prefix)
        ]  # fmt: skip
        where = f"hf://{repository}@{commit}" + (f"/{folder}" if folder else "")
        return _remote_dataset(dataset_id, where, commit, files)


class MinariBucket(MinariRemote):
    """A public bucket with the data of each dataset in `<id>/data/`. It has no revisions."""

    def __init__(self, bucket: str) -> None:
        self.address = self.key = f"gcp://{bucket}"
        self.bucket = self.transport = Bucket(bucket)

    def ids(self) -> Ids:
        return Ids(tuple(dataset.id for dataset in self.datasets().datasets))

    def datasets(self) -> Found:
        objects = self.bucket.objects()
        # Only those in data/: Arrow and Parquet datasets have a further metadata.json for each episode.
        ends = f"/{DATA_METADATA}"
        ids = {entry.name.removesuffix(ends) for entry in objects if entry.name.endswith(ends)}
        folders: dict[str, list[BucketObject]] = {name: [] for name in sorted(ids) if is_dataset_id(name)}
        for entry in objects:
            for owner in _folders_above_data(entry.name):
                if owner in folders:
                    folders[owner].append(entry)
        if not folders:
            raise DatasetNotFoundError(
                f"{self.address} holds no Minari datasets", hint="MINARI_REMOTE names the bucket"
            )
        found = [self._dataset(dataset_id, entries) for dataset_id, entries in folders.items()]
        return Found(tuple(dataset for dataset in found if dataset is not None))

    def describe(self, dataset_id: str, revision: str | None) -> RemoteDataset:
        if revision is not None:
            raise UsageError(
                f"--revision is {revision}, expected none: {self.address} keeps no history", hint="leave out --revision"
            )
        found = self._dataset(safe_id(dataset_id), self.bucket.objects(f"{dataset_id}/data/"))
        if found is None:
            raise DatasetNotFoundError(f"{self.address} has no dataset {dataset_id!r}")
        return found

    def _dataset(self, dataset_id: str, objects: Iterable[BucketObject]) -> RemoteDataset | None:
        files = [
            RemoteFile(entry.name.removeprefix(f"{dataset_id}/"), entry.size, entry.checksum, (entry.address,))
            for entry in objects
        ]
        return _remote_dataset(dataset_id, f"{self.address}/{dataset_id}", None, files)


def raise_if_all_failed(results: Sequence[object]) -> None:
    """Raise the first failure if all requests failed."""
    failures = [result for result in results if isinstance(result, RbtoolError)]
    if failures and len(failures) == len(results):
        raise failures[0]


def _is_any_unreachable(results: Iterable[object]) -> bool:
    return any(isinstance(result, NetworkError) for result in results)


def _folders_above_data(name: str) -> Iterator[str]:
    """Yield every folder that has an object in its `data`."""
    parts = name.split("/")
    return ("/".join(parts[:depth]) for depth in range(len(parts) - 1) if parts[depth] == "data")


def state_of(dataset: RemoteDataset) -> str:
    """Return a digest of the paths and checksums of all files of the dataset."""
    lines = "".join(f"{path}\0{checksum}\n" for path, checksum in sorted(dataset.checksums.items()))
    return hashlib.sha256(lines.encode(errors="surrogatepass")).hexdigest()


def _remote_dataset(
    dataset_id: str, address: str, revision: str | None, files: Iterable[RemoteFile]
) -> RemoteDataset | None:
    """Return a dataset with the visible files below its `data` folder; None if the metadata are not among them."""
    data = tuple(file for file in files if file.path.startswith("data/") and "/." not in file.path)
    if all(file.path != DATA_METADATA for file in data):
        return None
    return RemoteDataset(dataset_id, address, revision, tuple(sorted(data, key=lambda file: file.path)))


_REMOTE = "MINARI_REMOTE"
_DEFAULT = "hf://farama-minari"
_NAMED = re.compile(r"(?P<kind>hf|gcp)://(?P<name>[A-Za-z0-9][\w.-]*)/?", re.ASCII)
_KINDS: dict[str, type[MinariOrganisation | MinariBucket]] = {"hf": MinariOrganisation, "gcp": MinariBucket}
_EPISODE_FILE = re.compile(r"data/(0|[1-9]\d{0,17})/.+")


class MinariSource(Source):
    """Downloads from the remote in `MINARI_REMOTE`: `hf://ORGANISATION`, or `gcp://BUCKET`.

    The default is `hf://farama-minari`.
    """

    name = "minari"
    local_cache = LocalCache("minari", "MINARI_DATASETS_PATH", "~/.minari/datasets")

    @property
    def remote(self) -> str:
        """The address of the remote; raises UsageError if the variable has another form."""
        return self._remote.address

    @property
    def key(self) -> str:
        """The address of the remote, with the host of the hub."""
        return self._remote.key

    @cached_property
    def _remote(self) -> MinariRemote:
        address = os.environ.get(_REMOTE) or _DEFAULT
        named = _NAMED.fullmatch(address)
        if named is None:
            raise UsageError(
                f"{_REMOTE} is {address!r}, expected hf://ORGANISATION or gcp://BUCKET",
                hint=f"unset it for {_DEFAULT}",
            )
        return _KINDS[named["kind"]](named["name"])

    def list_ids(self) -> Ids:
        """List the ids; on a hub with one request for the repositories and one for the index of each."""
        return self._remote.ids()

    def list_catalogue(self, known: Catalogue | None, progress: Callable[[int, int], None]) -> Catalogue:
        """List all datasets, and request the metadata of those that differ from `known`."""
        found = self._remote.datasets()
        fetched = written_time()
        before = {entry.state: entry for entry in known.entries if entry.state} if known else {}
        entries = {
            dataset.id: CatalogueEntry(dataset.id, dataset.bytes, old.steps, old.episodes, old.state)
            for dataset in found.datasets
            if (old := before.get(state_of(dataset))) is not None
        }
        fresh = [dataset for dataset in found.datasets if dataset.id not in entries]
        done = len(entries)

        def report(more: int) -> None:
            nonlocal done
            done += more
            progress(done, len(found.datasets))

        report(0)
        calls = [functools.partial(self._remote.totals, dataset) for dataset in fresh]
        results = ask_all(calls, self._remote.transport, done=report)
        if not entries:
            raise_if_all_failed(results)
        problems = list(found.problems)
        for dataset, result in zip(fresh, results, strict=True):
            if isinstance(result, RbtoolError):
                problems.append(f"the steps and episodes of {dataset.id} are not known: {result.message}")
                entries[dataset.id] = CatalogueEntry(dataset.id, dataset.bytes)
            else:
                entries[dataset.id] = CatalogueEntry(dataset.id, dataset.bytes, *result, state_of(dataset))
        ordered = tuple(entries[dataset.id] for dataset in found.datasets)
        unreachable = found.unreachable or any(isinstance(result, NetworkError) for result in results)
        return Catalogue(self.remote, fetched, ordered, tuple(problems), unreachable)

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Find the files of a dataset, and request its metadata if `totals` is true."""
        found = self._remote.describe(dataset_id, revision)
        if not totals:
            return found
        steps, episodes = self._remote.totals(found, Watch())
        return replace(found, steps=steps, episodes=episodes)

    def episode_numbers(self, dataset: RemoteDataset) -> Sequence[int] | None:
        """Return the numbers of episodes for Arrow and Parquet, from their folders; None for HDF5."""
        return sorted(set(_numbered(dataset).values())) or None

    def choose_files(self, dataset: RemoteDataset, episodes: EpisodeRanges) -> Sequence[RemoteFile]:
        """Return the files that contain episodes: all for HDF5, the folders of these episodes for Arrow and Parquet.

        Raises UsageError for episodes that have no folder.
        """
        numbers = self.episode_numbers(dataset)
        if numbers is None:
            return dataset.files
        chosen = set(select_episodes(episodes, numbers))
        numbered = _numbered(dataset)
        return tuple(file for file in dataset.files if numbered.get(file.path, -1) in {-1, *chosen})

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Download the files to `folder`, a few at a time."""
        fetch_files(files, folder, self._remote.transport, progress=progress, note=note)

    def on_close(self) -> None:
        """Close the connections, if there are any."""
        if "_remote" in self.__dict__:
            self._remote.close()


def _numbered(dataset: RemoteDataset) -> dict[str, int]:
    """Return the episode number of every file in the folder of an episode."""
    return {file.path: int(found[1]) for file in dataset.files if (found := _EPISODE_FILE.fullmatch(file.path))}
