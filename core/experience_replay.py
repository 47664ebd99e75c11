"""Buffers on published datasets: where their files are, how they are fetched, and their metadata."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import numpy as np
import torch

from .buffers.replay_buffer import arguments_of
from .datasets.buffer import DatasetReplayBuffer
from .datasets.storage import DatasetStorage
from .declarations import from_leaf
from .errors import (
    CorruptDataError,
    DatasetNotFoundError,
    UsageError,
    did_you_mean,
    keywords_of,
    require_flags,
    require_keywords,
    warn_caller,
)
from .format import fs
from .format.contracts import StepReader
from .format.converter import safe_id
from .format.documents import decode, parse_json
from .format.locate import KnownNames, find_dataset, storage_root, substitution_text
from .format.manifest import ENV_METADATA, Manifest, has_manifest
from .format.staging import Staging, mend, remove_dataset
from .open_steps import open_steps
from .options import PathLike
from .samplers.sample_units import SampleUnit
from .storages.base import Storage
from .storages.packed import PackedStorage
from .transforms.video import with_frames

_STORE = ".rbtool-store"


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """The folder with the datasets of `source`: the dataset `<id>` is at `<folder>/<id>`.

    With `trusted`, pickles are read, as with `trust_pickle` of `download`.
    """

    source: str
    folder: Path
    trusted: bool = False

    @classmethod
    def below(cls, source: str, root: PathLike | None, *, trusted: bool = False) -> SourceFolder:
        """Return the folder `root`, by default the one of the source below the storage root."""
        return cls(source, fs.expanded(root).absolute() if root is not None else storage_root() / source, trusted)

    @property
    def _store(self) -> Path:
        """The storage root to download into: `download` writes datasets to `<store>/<source>/<id>`.

        If the folder has the source's name, the store is its parent, and downloads are in place at once; a link is
        excepted, since a store contains none. For any other folder the store is hidden inside it, on the same file
        system, and finished downloads are moved out. UsageError if the hidden store is a link: downloads would change
        and remove files at its target.
        """
        if self.folder.name == self.source and not self.folder.is_symlink():
            return self.folder.parent
        fs.refuse_links(self.folder, self.folder / _STORE)
        return self.folder / _STORE

    def find(self, asked: str) -> Path | None:
        """Return the path of a stored dataset, by its id or by search words that led to it before; None without one."""
        known = KnownNames(self._store, self.source).get(asked)
        for dataset_id in (safe_id(asked), known.id if known is not None else None):
            if dataset_id is not None:
                mend(self.folder / dataset_id)
                if has_manifest(self.folder / dataset_id):
                    return self.folder / dataset_id
        return None

    def fetch(self, asked: str, *, force: bool = False) -> Path:
        """Download the dataset and return its path; warn if search words were replaced by another name.

        `force` replaces a stored dataset. Raises what `download` raises.
        """
        result = from_leaf("download")(self.source, asked, root=self._store, force=force, trust_pickle=self.trusted)
        if result.resolved == "words":
            warn_caller(substitution_text(asked, result.id))
        return self._placed(result, replace=force)

    def rebuild(self, asked: str) -> Path:
        """Convert the dataset from the source's own local cache, unless an equal one is stored, and return its path."""
        there, download = self._store / self.source / safe_id(asked), from_leaf("download")
        try:
            result = download(self.source, asked, local=True, root=self._store, trust_pickle=self.trusted)
        except UsageError:
            if not has_manifest(there):
                raise
            options: dict[str, Any] = {"local": True, "root": self._store, "force": True}
            result = download(self.source, asked, trust_pickle=self.trusted, **options)
        return self._placed(result, replace=True)

    def _placed(self, result: Any, *, replace: bool) -> Path:
        """Move the dataset of a `DownloadResult` out of the hidden store, if it was downloaded there."""
        place: Path = self.folder / result.id
        if result.path == place:
            return place
        try:
            with (
                Staging(place, replace=replace, below=self.folder) as staging,
                fs.folder_below(self._store, result.path.parent) as within,
                fs.folder_below(self.folder, staging.path) as into,
            ):
                fs.rename(result.path, staging.path / "dataset", within=within, into=into)
                staging.publish("dataset")
        except (FileNotFoundError, UsageError):
            if replace or not has_manifest(place):
                raise
            if has_manifest(result.path):  # another process was quicker
                remove_dataset(result.path, below=self._store)
        return place


class NotStoredError(DatasetNotFoundError, RuntimeError):
    """A dataset is not stored and may not be downloaded; also a RuntimeError, which TorchRL's classes raise."""


class BaseDatasetExperienceReplay(DatasetReplayBuffer, ABC):
    """A buffer on a dataset that has an id and a place of its own below a root.

    Takes the arguments of `TensorDictReplayBuffer`; the writer refuses to add anything unless another one is given.
    The name is TorchRL's.
    """

    _root: Path

    @property
    def root(self) -> Path:
        """The folder that holds the datasets of this kind."""
        return self._root

    @root.setter
    def root(self, root: PathLike) -> None:
        self._root = fs.expanded(root).absolute()

    @property
    @abstractmethod
    def data_path(self) -> Path:
        """The folder of the form of the dataset that is in use."""

    @property
    @abstractmethod
    def data_path_root(self) -> Path:
        """The folder of the dataset with all its forms."""

    @abstractmethod
    def _is_downloaded(self) -> bool:
        """Return whether the complete dataset is stored."""

    def delete(self) -> None:
        """Remove the dataset from the disk, for good; a process that has it open can continue to read.

        Raises:
            DatasetNotFoundError: (a FileNotFoundError) it is not there.
            UsageError: (a ValueError) it contains files that rbtool did not write, or another process is replacing it;
                nothing is removed.
        """
        mend(self.data_path)
        if not has_manifest(self.data_path):
            raise DatasetNotFoundError(f"there is no dataset at {self.data_path} to remove")
        remove_dataset(self.data_path)


class _AvailableDatasets:
    """A class attribute that requests the ids from the remote when it is read."""

    def __get__(self, instance: object, owner: type[SourceExperienceReplay]) -> list[str]:
        listed = from_leaf("list_remote")(owner.source)
        for problem in listed.problems:
            warn_caller(f"passed over: {problem}")
        return [entry.name.removeprefix(f"{owner.source}:") for entry in listed.datasets]


class BufferArguments(TypedDict, total=False):
    """Arguments that classes of datasets pass on to their buffer; `ReplayBuffer` documents them."""

    sampler: Any
    sample_unit: SampleUnit | None
    writer: Any
    collate_fn: Callable[[Any], Any] | None
    pin_memory: bool
    prefetch: int | None
    transform: Any


def refuse_env_kwargs(kind: type[Any], arguments: Mapping[str, Any], read: str) -> None:
    """Raise UsageError for arguments that buffers do not take: TorchRL passes them to an environment.

    `kind` is the class whose nearest argument is suggested; `read` is "file is" or "files are", for the hint.
    """
    others = sorted(arguments.keys() - BufferArguments.__annotations__.keys())
    if others:
        raise UsageError(
            f"{', '.join(others)} would be for an environment, and none is made"
            f"{did_you_mean(others[0], keywords_of(kind))}",
            hint=f"leave them out: the published {read} read",
        )


class SourceExperienceReplay(BaseDatasetExperienceReplay):
    """A dataset of one source as a buffer of TED steps; one that is not stored yet is downloaded first.

    A subclass sets `source`, and `local_option` if it has an argument that it passes on as `local`. All other arguments
    go to `DatasetReplayBuffer`.
    """

    source: ClassVar[str]
    """Name of the source, as for `rbtool.download`."""
    local_option: ClassVar[str] = ""
    """Sentence on how to take a dataset from the source's own cache, for the hint of an error."""

    trusted: ClassVar[bool] = False
    """Whether pickles of the source are read, by the restricted unpickler."""

    storage_class: ClassVar[type[DatasetStorage]] = DatasetStorage
    """The class of the storage."""

    available_datasets = _AvailableDatasets()
    """Ids of all datasets that can be downloaded; the list is cached for a day."""

    def __init__(
        self,
        dataset_id: str,
        *,
        root: PathLike | None,
        download: bool | str,
        split_trajs: bool = False,
        local: bool = False,
        **arguments: Any,
    ) -> None:
        require_flags(split_trajs=split_trajs, local=local)
        if not isinstance(download, bool) and download != "force":
            raise UsageError(f"download is {download!r}, expected True, False or 'force'")
        require_keywords(type(self).__name__, arguments, arguments_of(type(self)))  # before anything is downloaded
        place = SourceFolder.below(self.source, root, trusted=self.trusted)
        self.dataset_id = dataset_id
        self.root = place.folder
        self.download = download
        self.split_trajs = split_trajs
        self._folder = place.rebuild(dataset_id) if local else self._provided(place)
        try:
            storage = self._opened(split_trajs)
        except CorruptDataError as error:
            raise CorruptDataError(error.message, hint='download="force" replaces it with a sound one') from error
        with open_steps(self._folder) as reader:
            arguments["transform"] = self.transform_for(reader, arguments.get("transform"))
        super().__init__(storage=storage, **arguments)

    def transform_for(self, reader: StepReader, transform: Any) -> Any:
        """Return the transform of the buffer: one that decodes kept videos, if the dataset has any, and `transform`."""
        return with_frames(reader, transform)

    def _opened(self, split_trajs: bool) -> Storage:
        """Open the storage that the layout of the dataset asks for."""
        if self.storage_class is DatasetStorage and not split_trajs and Manifest.load(self._folder).layout == "packed":
            return PackedStorage(self._folder)
        return self.storage_class(self._folder, split_trajs=split_trajs)

    def _provided(self, place: SourceFolder) -> Path:
        """Return the folder of the dataset, which is downloaded first if necessary and allowed."""
        found = None if self.download == "force" else place.find(self.dataset_id)
        if found is not None:
            return find_dataset(found, place.folder.parent)  # also records the time of this use
        if not self.download:
            raise NotStoredError(
                f"{self.dataset_id} is not in {place.folder}, and download is False",
                hint=", ".join(filter(None, ("download=True fetches it", self.local_option))),
            )
        return place.fetch(self.dataset_id, force=self.download == "force")

    @property
    def data_path(self) -> Path:
        """The folder of the dataset."""
        return self._folder

    @property
    def data_path_root(self) -> Path:
        """The folder of the dataset: padded trajectories are made in memory, so there is one form."""
        return self._folder

    def _is_downloaded(self) -> bool:
        return has_manifest(self._folder)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """What the source states about the dataset; `observation_space` and `action_space` are specs.

        See `environment_metadata`.
        """
        return environment_metadata(self._folder)


def episode_of_steps(path: Path) -> torch.Tensor:
    """Return the episode number of each step of the dataset at `path`, int64 `[steps]`."""
    with open_steps(path) as reader:
        table = reader.episodes
    return torch.from_numpy(np.repeat(table.episode, table.length))


_SOURCE_DOCUMENT = "metadata.json"


def environment_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of the dataset at `path`.

    `observation_space` and `action_space` are specs: None where the source does not state them, Unbounded where no
    bound is finite. `total_steps` and `total_episodes` count the stored rows and episodes. All other entries are the
    source's: those of `env_metadata.json`, in which `env_spec` is a dictionary as in TorchRL, else those of its
    `metadata.json`. FormatError for spaces that have no spec.
    """
    with open_steps(path) as reader:
        manifest, documents = reader.manifest, reader.documents()
    document = _read(documents)
    document.setdefault("dataset_id", manifest.request.id)
    spaces = {
        f"{name}_space": from_leaf("spec_of_space")(manifest.spaces[name]) if manifest.spaces.get(name) else None
        for name in ("observation", "action")
    }
    return {**document, "total_episodes": manifest.episodes, "total_steps": manifest.steps, **spaces}


def _read(documents: Mapping[str, bytes]) -> dict[str, Any]:
    """Read `env_metadata.json`, or else the source's `metadata.json`, with `env_spec` as a dictionary."""
    if ENV_METADATA in documents:
        return decode(dict[str, Any], parse_json(documents[ENV_METADATA], ENV_METADATA), ENV_METADATA)
    text = documents.get(_SOURCE_DOCUMENT, b"{}")
    document = decode(dict[str, Any], parse_json(text, _SOURCE_DOCUMENT), _SOURCE_DOCUMENT)
    if isinstance(document.get("env_spec"), str):
        document["env_spec"] = parse_json(document["env_spec"], f"env_spec in {_SOURCE_DOCUMENT}")
    return document
