"""What the buffers on published datasets share."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

from ..errors import DatasetNotFoundError
from ..format import fs, has_manifest, mend, remove_dataset
from .buffer import DatasetReplayBuffer

__all__ = ["BaseDatasetExperienceReplay"]


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
    def root(self, root: str | os.PathLike[str]) -> None:
        self._root = fs.expanded(root).absolute()

    @property
    @abstractmethod
    def data_path(self) -> Path:
        """The folder of the dataset, or of that form of it which is in use."""

    @property
    @abstractmethod
    def data_path_root(self) -> Path:
        """The folder of the dataset with all its forms."""

    @abstractmethod
    def _is_downloaded(self) -> bool:
        """Return whether the dataset is there, whole."""

    def delete(self) -> None:
        """Remove the dataset from the disk, for good; a process that has it open can continue to read.

        DatasetNotFoundError (a FileNotFoundError) if it is not there; UsageError (a ValueError), with nothing removed,
        if somebody keeps files of their own in it, or another process is just replacing it.
        """
        mend(self.data_path)
        if not has_manifest(self.data_path):
            raise DatasetNotFoundError(f"there is no dataset at {self.data_path} to remove")
        remove_dataset(self.data_path)
