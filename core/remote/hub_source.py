"""Sources on a Hugging Face hub: of the folders of one repository, and of any repository."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from ..errors import DatasetNotFoundError
from ..format.documents import written_time
from ..format.sources import (
    Advance,
    Catalogue,
    CatalogueEntry,
    Ids,
    Note,
    RemoteDataset,
    RemoteFile,
    Source,
    safe_id,
)
from .fetch import fetch_files
from .hub import Hub, HubFile, hub_endpoint


class HubSource(Source):
    """Datasets on the hub that the environment names (`HF_ENDPOINT`, `HF_TOKEN`)."""

    @property
    @abstractmethod
    def listed(self) -> str:
        """What the datasets are listed from: an owner or a repository."""

    @property
    def remote(self) -> str:
        """The address of what is listed."""
        return f"hf://{self.listed}"

    @property
    def key(self) -> str:
        """The address of what is listed, with the host of the hub."""
        return f"{hub_endpoint()}/{self.listed}"

    @cached_property
    def hub(self) -> Hub:
        """The connections to the hub."""
        return Hub()

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Bring the files to `folder`, a few at a time."""
        fetch_files(files, folder, self.hub, progress=progress, note=note)

    def on_close(self) -> None:
        """Close the connections, if there are any."""
        if "hub" in self.__dict__:
            self.hub.close()


class HubRepositorySource(HubSource):
    """Any dataset repository, by its `OWNER/NAME`, which is taken as it is; those of one owner are listed.

    A subclass sets `name` and `owner`, and implements `look_up` with `described`.
    """

    open_ended = True
    owner: ClassVar[str]
    """The organisation whose repositories are listed."""

    @property
    def listed(self) -> str:
        """The owner."""
        return self.owner

    def list_ids(self) -> Ids:
        """List the repositories of the owner."""
        return Ids(tuple(one.name for one in self.hub.repositories(self.owner)))

    def reader_options(self, dataset_id: str) -> Mapping[str, str]:
        """The id, which the files do not state."""
        return {"id": dataset_id}

    def described(self, dataset_id: str, repository: str, commit: str, files: Iterable[HubFile]) -> RemoteDataset:
        """Describe a dataset that is made of these files of a repository."""
        remote = (
            RemoteFile(file.path, file.size, file.checksum, (self.hub.address(repository, commit, file.path),))
            for file in files
        )
        ordered = tuple(sorted(remote, key=lambda file: file.path))
        return RemoteDataset(dataset_id, f"hf://{repository}@{commit}", commit, ordered)


class HubFolderSource(HubSource):
    """The datasets in one dataset repository.

    A subclass sets `name`, `repository` and `suffixes`. By default every folder that has files of these suffixes in it
    is a dataset of those files, without those in folders inside it. Its id is its path below `folder`, and names that
    very folder. A source with another rule overrides `datasets_among` and `place_of`.

    The revision of a dataset is the commit that its files are taken from. Sizes and checksums are those of the hub.
    """

    namespaced = False
    repository: ClassVar[str]
    """The repository with its owner: `OWNER/NAME`."""
    folder: ClassVar[str] = ""
    """The folder of the repository that ids begin below."""
    suffixes: ClassVar[tuple[str, ...]]
    """The ends of the names of data files, in lower case."""

    @property
    def listed(self) -> str:
        """The repository."""
        return self.repository

    def datasets_among(self, files: Sequence[HubFile]) -> Mapping[str, Sequence[HubFile]]:
        """Return the ids of all datasets, each with its files, by a listing of the whole repository."""
        start = f"{self.folder}/" if self.folder else ""
        found: dict[str, list[HubFile]] = {}
        for file in self.data_files(files):
            parent = _parent(file)
            if parent.startswith(start) and parent != start.rstrip("/"):
                found.setdefault(parent.removeprefix(start), []).append(file)
        return found

    def place_of(self, dataset_id: str) -> str | None:
        """Return the folder whose files make up a dataset; None where only a listing of the repository shows them."""
        return f"{self.folder}/{dataset_id}" if self.folder else dataset_id

    def data_files(self, files: Iterable[HubFile]) -> list[HubFile]:
        """Return the data files, by their suffixes; hidden ones are none."""
        return [
            file
            for file in files
            if file.path.lower().endswith(self.suffixes)
            and not any(part.startswith(".") for part in file.path.split("/"))
        ]

    def list_ids(self) -> Ids:
        """List the ids: a request for the commit, and one for every 1,000 files or so."""
        return Ids(tuple(sorted(self._all())))

    def list_catalogue(self, known: Catalogue | None, progress: Callable[[int, int], None]) -> Catalogue:
        """List all datasets with their sizes, by the same requests."""
        found = self._all()
        entries = tuple(CatalogueEntry(one, sum(file.size for file in found[one])) for one in sorted(found))
        progress(len(entries), len(entries))
        return Catalogue(self.remote, written_time(), entries)

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Find the files of a dataset: a request for the commit, and one or more for the files."""
        place = self.place_of(safe_id(dataset_id))
        commit = self.hub.commit(self.repository, revision)
        try:
            files = self.datasets_among(self.hub.tree(self.repository, commit, place or "")).get(dataset_id)
        except DatasetNotFoundError as error:
            raise self._not_found(dataset_id, commit, revision) from error
        if not files:
            raise self._not_found(dataset_id, commit, revision)
        parent = _parent(files[0])
        remote = (
            RemoteFile(
                file.path.removeprefix(parent).lstrip("/"), file.size, file.checksum,
                (self.hub.address(self.repository, commit, file.path),),
            )
            for file in files
        )  # fmt: skip
        where = f"{self.remote}@{commit}" + (f"/{parent}" if parent else "")
        return RemoteDataset(dataset_id, where, commit, tuple(sorted(remote, key=lambda file: file.path)))

    def _all(self) -> Mapping[str, Sequence[HubFile]]:
        """All datasets at the newest commit; DatasetNotFoundError for a repository without any."""
        commit = self.hub.commit(self.repository)
        found = self.datasets_among(self.hub.tree(self.repository, commit))
        if not found:
            raise DatasetNotFoundError(f"{self.remote} has no datasets at {commit[:7]}")
        return found

    def _not_found(self, dataset_id: str, commit: str, revision: str | None) -> DatasetNotFoundError:
        where = f"at {revision} ({commit[:7]})" if revision else f"at {commit[:7]}"
        hint = "it may be there in another revision: leave out --revision for the newest" if revision else ""
        return DatasetNotFoundError(f"{self.remote} has no dataset {dataset_id!r} {where}", hint=hint)


def _parent(file: HubFile) -> str:
    return file.path.rpartition("/")[0]
