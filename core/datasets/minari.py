"""Datasets of Minari as buffers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import CorruptDataError, DatasetNotFoundError, UsageError
from ..format import find_dataset, has_manifest
from ..verbs.listing import list_remote
from .base import BaseDatasetExperienceReplay
from .metadata import environment_metadata
from .places import SourceFolder
from .storage import DatasetStorage

__all__ = ["MinariExperienceReplay"]

_SOURCE = "minari"


class _AvailableDatasets:
    """An attribute of the class that asks the remote when it is read, and not before."""

    def __get__(self, instance: object, owner: type) -> list[str]:
        listed = list_remote(_SOURCE)
        for problem in listed.problems:
            warnings.warn(f"passed over: {problem}", stacklevel=2)
        return [entry.name.removeprefix(f"{_SOURCE}:") for entry in listed.datasets]


class MinariExperienceReplay(BaseDatasetExperienceReplay):
    """A dataset of Minari as a buffer of TED steps; one that is not stored yet is downloaded first.

    - `dataset_id`: an id of `available_datasets`, like `D4RL/door/human-v2`. One without its version means the
      latest; a name from before there were namespaces, like `door-human-v1`, means the dataset that has the same
      words in its name today, with a warning.
    - `batch_size`: how many elements `sample()` and iteration give.
    - `root`: the folder in which the dataset is at `<root>/<dataset_id>`; `minari` below the storage root by default.
    - `download`: whether it is downloaded if it is not there; `"force"` downloads it again and replaces it.
    - `sampler`, `writer`, `collate_fn`, `pin_memory`, `prefetch`, `transform`: those of `ReplayBuffer`; the default
      writer refuses to add anything.
    - `split_trajs`: whether elements are whole trajectories, padded to one length. Batches are then
      `[batch, longest]`, with `"mask"` (bool) where a step is and `"traj_ids"`. A trajectory ends with its episode
      and with `done`.
    - `load_from_local_minari`: take it from Minari's own cache (`MINARI_DATASETS_PATH`, else `~/.minari/datasets`)
      without any use of the network. What was made from it before is made again where the cache has changed.

    Rows are read from the disk when first touched; what is edited, in a batch or in place, stays in this process.
    A pickle reopens the dataset. A dataset that is stored is opened without the network.

    DatasetNotFoundError (a FileNotFoundError) for one that is not there and may not or cannot be downloaded,
    CorruptDataError for one that is damaged, UsageError (a ValueError) for arguments that make no sense, and what
    `rbtool.download` raises. Names and form are those of TorchRL; the values are those of the source.
    """

    available_datasets = _AvailableDatasets()
    """Ids of all datasets that can be downloaded. The remote is asked once a day."""

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None,
        *,
        root: str | os.PathLike[str] | None = None,
        download: bool | str = True,
        sampler: Any = None,
        writer: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        split_trajs: bool = False,
        load_from_local_minari: bool = False,
    ) -> None:
        if not isinstance(download, bool) and download != "force":
            raise UsageError(f"download is {download!r}, True, False or 'force' is expected")
        place = SourceFolder.below(_SOURCE, root)
        self.dataset_id = dataset_id
        self.root = place.folder
        self.download = download
        self.split_trajs = split_trajs
        self._folder = _provided(place, dataset_id, download, load_from_local_minari)
        super().__init__(
            storage=_opened(self._folder, split_trajs),
            batch_size=batch_size,
            sampler=sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
        )

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
        """What Minari states about the dataset; `observation_space` and `action_space` are specs.

        See `environment_metadata`.
        """
        return environment_metadata(self._folder)


def _provided(place: SourceFolder, dataset_id: str, download: bool | str, local: bool) -> Path:
    """Return the folder of a dataset, which is made or fetched first if need be."""
    if local:
        return place.rebuild(dataset_id)
    if download == "force":
        return place.fetch(dataset_id, force=True)
    found = place.find(dataset_id)
    if found is not None:
        return find_dataset(found, place.folder.parent)  # which counts as a use of it
    if not download:
        raise DatasetNotFoundError(
            f"{dataset_id} is not in {place.folder}, and download=False was given",
            hint="download=True fetches it, load_from_local_minari=True takes it from Minari's own cache",
        )
    return place.fetch(dataset_id)


def _opened(folder: Path, split_trajs: bool) -> DatasetStorage:
    try:
        return DatasetStorage(folder, split_trajs=split_trajs)
    except CorruptDataError as error:
        raise CorruptDataError(error.message, hint='download="force" replaces it with a sound one') from error
