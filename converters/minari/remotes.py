"""Where Minari datasets are published: an organisation on a Hugging Face hub, or a bucket.

On the hub the first part of an id is a repository and the rest a folder in it; the repository's
`namespace_metadata.json` lists the datasets. In a bucket the id is a folder.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.errors import DatasetNotFoundError, FormatError, NetworkError, RbtoolError, UsageError
from ...core.format.contracts import Closing
from ...core.format.documents import parse_json
from ...core.format.sources import Ids, RemoteDataset, RemoteFile, safe_id
from ...core.remote.bucket import Bucket, BucketObject
from ...core.remote.hub import Hub, HubFile, HubRepository, hub_endpoint
from ...core.remote.threads import ask_all
from ...core.remote.transport import Transport, read_small
from .metadata import METADATA_FILE, NAMESPACE_FILE

DATA_METADATA = f"data/{METADATA_FILE}"
_INDEX_BYTES = 16 << 20
_INDEX_NAMES = 50_000
_METADATA_BYTES = 64 << 20  # the bounds of an image space are written out in full
_VERSIONED = re.compile(r".*-v\d+")
_REPOSITORY = re.compile(r"[\w.-]{1,96}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Found:
    """Datasets with all their files; `problems` and `unreachable` as `Ids` has them."""

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
        """List the ids alone."""

    @abstractmethod
    def datasets(self) -> Found:
        """List all datasets and their files, without their steps and episodes."""

    @abstractmethod
    def describe(self, dataset_id: str, revision: str | None) -> RemoteDataset:
        """List the files of one dataset, without its steps and episodes."""

    def totals(self, dataset: RemoteDataset) -> tuple[int | None, int | None]:
        """Request the steps and episodes from the metadata of the dataset; None where they are not there."""
        file = next(file for file in dataset.files if file.path == DATA_METADATA)
        if file.known_size > _METADATA_BYTES:
            return None, None
        raw = read_small(
            self.transport, file.addresses[0], limit=_METADATA_BYTES, size=file.size, checksum=file.checksum
        )
        return _totals(raw)

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
                hint="MINARI_REMOTE names the organisation, HF_TOKEN holds a token that may see them",
            )
        return found

    def _not_found(self, dataset_id: str, commit: str, revision: str | None) -> DatasetNotFoundError:
        where = f"at {revision} ({commit[:7]})" if revision else f"at {commit[:7]}"
        hint = "it may be there in another revision: leave out --revision for the newest" if revision else ""
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

    def _ids_in(self, repository: HubRepository) -> tuple[list[str], list[str]]:
        """List the ids in one repository as it is now."""
        try:
            index = read_small(self.hub, self.hub.address(repository.name, "main", NAMESPACE_FILE), limit=_INDEX_BYTES)
        except DatasetNotFoundError:
            index = None
        return _ids_of(repository.name, index)

    def _datasets_in(self, repository: HubRepository) -> tuple[list[RemoteDataset], list[str]]:
        """List the datasets in one repository, all as of one commit, with one listing of all its files."""
        commit = repository.commit or self.hub.commit(repository.name)
        tree = self.hub.tree(repository.name, commit)
        index = None
        for file in tree:
            if file.path == NAMESPACE_FILE:
                address = self.hub.address(repository.name, commit, file.path)
                index = read_small(self.hub, address, limit=_INDEX_BYTES, size=file.size, checksum=file.checksum)
        ids, problems = _ids_of(repository.name, index)
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
                problems.append(f"hf://{repository.name} names {dataset_id} in its index and has no data of it")
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
        # Not every metadata.json: Arrow and Parquet datasets have one for each episode.
        ends = f"/{DATA_METADATA}"
        ids = {entry.name.removesuffix(ends) for entry in objects if entry.name.endswith(ends)}
        folders: dict[str, list[BucketObject]] = {name: [] for name in sorted(ids) if _is_dataset_id(name)}
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
                f"{self.address} keeps no history: revision {revision} cannot be asked for", hint="leave out --revision"
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


def _is_dataset_id(name: object) -> bool:
    """Return whether the name of a dataset in a remote can be an id: safe as a path, and printable."""
    if not isinstance(name, str) or not name.isprintable() or " " in name:
        return False
    try:
        return bool(safe_id(name))
    except UsageError:
        return False


def _totals(raw: bytes) -> tuple[int | None, int | None]:
    """Read the steps and episodes from `metadata.json`; None for missing or invalid ones."""
    try:
        document = parse_json(raw, DATA_METADATA)
    except FormatError:
        return None, None
    if not isinstance(document, dict):
        return None, None
    steps, episodes = (document.get(name) for name in ("total_steps", "total_episodes"))
    return _count(steps), _count(episodes)


def state_of(dataset: RemoteDataset) -> str:
    """A text that changes with any file of the dataset."""
    lines = "".join(f"{path}\0{checksum}\n" for path, checksum in sorted(dataset.checksums.items()))
    return hashlib.sha256(lines.encode(errors="surrogatepass")).hexdigest()


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _remote_dataset(
    dataset_id: str, address: str, revision: str | None, files: Iterable[RemoteFile]
) -> RemoteDataset | None:
    """Make a dataset of the visible files below its `data` folder; None if there are no metadata among them."""
    data = tuple(file for file in files if file.path.startswith("data/") and "/." not in file.path)
    if all(file.path != DATA_METADATA for file in data):
        return None
    return RemoteDataset(dataset_id, address, revision, tuple(sorted(data, key=lambda file: file.path)))


def _ids_of(repository: str, index: bytes | None) -> tuple[list[str], list[str]]:
    """List the ids in a repository by its index, or by its name if it has none, and the problems of the index."""
    name = repository.partition("/")[2]
    if index is None:
        if _VERSIONED.fullmatch(name):
            return [name], []
        return [], [f"hf://{repository} has no {NAMESPACE_FILE}, and its name is not that of a dataset"]
    origin = f"{NAMESPACE_FILE} of hf://{repository}"
    listed = _listed(index, origin)
    ids = {entry for entry in listed if _is_dataset_id(entry) and f"{entry}/".startswith(f"{name}/")}
    strange = (entry for entry in listed if not isinstance(entry, str) or entry not in ids)
    problems = [
        f"{origin} lists {entry!r:.80}, which can be no dataset in it" for entry in itertools.islice(strange, 3)
    ]
    return sorted(ids), problems


def _listed(raw: bytes, origin: str) -> list[Any]:
    """Read the datasets that a namespace's index lists."""
    document = parse_json(raw, origin)
    listed = document.get("datasets") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise FormatError(f"{origin} has no list of datasets")
    if len(listed) > _INDEX_NAMES:
        raise FormatError(f"{origin} lists {len(listed):,} datasets, {_INDEX_NAMES:,} at most are expected")
    return listed
