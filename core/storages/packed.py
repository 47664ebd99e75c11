"""PackedStorage: the rows of a dataset in layout packed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from ..errors import CorruptDataError, SchemaError, UsageError
from ..format.contracts import Array
from ..format.episodes import EpisodeTable
from ..format.packed.reader import PackedReader
from ..format.packed.recording import SYNC_SECONDS
from ..ted.schema import Field
from .base import IndexedStorage
from .cursors import as_index, row_numbers
from .dataset import exceeds_memory, tensordict_of
from .packed_leaves import PackedLeaves
from .packed_recording import PackedRecording
from .pytree import TreeSpec, tree_spec_of

Numbers = NDArray[np.int64]


class PackedStorage(IndexedStorage):
    """The steps of the packed dataset at `path`, one a row, read from the disk when first touched.

    Rows are those of the same dataset in layout `ted`. Every batch is a fresh copy, also where an int or a slice is
    asked for, so that an edit never reaches the dataset; nothing can be written. With `views` the leaves of a batch
    are views, with strides, of one tensor: the cheapest batch to make, which goes to another `device` in one copy.
    (Fields in files of their own, like images, are tensors apart.)

    `larger_than_memory` is whether the files exceed memory, by default found out from their sizes: then the kernel is
    advised that access is random, and of the rows of each batch before they are read.

    Instead of the path of a dataset, a reader that has it open will do. A pickle holds the path alone and opens the
    dataset again. DatasetNotFoundError where nothing is, UsageError (a ValueError) for a dataset without steps,
    FormatError for another layout and what is no dataset, CorruptDataError for files that are missing or cut, and
    where what is reopened is another dataset.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | PackedReader,
        *,
        views: bool = False,
        device: torch.device | str = "cpu",
        larger_than_memory: bool | None = None,
        checkpointer: Any = None,
    ) -> None:
        reader = path if isinstance(path, PackedReader) else None
        self.path = (reader.path if reader is not None else Path(path)).absolute()  # type: ignore[arg-type]
        self.views = views
        self.device = torch.device(device)
        self.larger_than_memory = larger_than_memory
        if reader is None:
            self._open()
        else:
            self._take(reader)
        super().__init__(len(self), checkpointer)

    @staticmethod
    def create(
        path: str | os.PathLike[str], *, max_size: int | None = None, sync_seconds: float = SYNC_SECONDS
    ) -> PackedRecording:
        """Begin a recording at `path`, a storage that episodes are appended to, and that `finish` makes a dataset of.

        `sync_seconds` is what a power failure may cost, see `PackedRecording`; a killed process loses no episode.
        UsageError where something is at `path` already.
        """
        if max_size is None:
            return PackedRecording(path, sync_seconds=sync_seconds)
        return PackedRecording(path, max_size=max_size, sync_seconds=sync_seconds)

    def _open(self) -> None:
        with PackedReader(self.path) as reader:
            self._take(reader)

    def _take(self, reader: PackedReader) -> None:
        """Map the files of a dataset that is open."""
        manifest = reader.manifest
        if not manifest.steps:
            raise UsageError(f"{self.path} has no steps: there is nothing to sample")
        self.content_digest = manifest.content_digest
        self.fields: tuple[Field, ...] = reader.fields
        self.episodes: EpisodeTable = reader.episodes
        self._steps = manifest.steps
        self._structure, self._ordered = _structure(reader.fields)
        advise = self.larger_than_memory
        self._leaves = PackedLeaves(
            reader, self._ordered, advise=exceeds_memory(manifest.bytes) if advise is None else advise
        )

    def __len__(self) -> int:
        return self._steps

    def episode_lengths(self) -> Numbers:
        """List the lengths of the episodes."""
        return self.episodes.length

    def read_at(self, index: Any) -> TensorDict:
        """Read the rows at `index` (an int, a slice, a list, a mask, a tensor) into fresh tensors.

        IndexError for rows that are not there.
        """
        if type(index) is not torch.Tensor or index.dtype is not torch.int64:
            index = as_index(index, 1)
        if type(index) is torch.Tensor and index.dim() == 1 and index.dtype is torch.int64:
            return self._rows((index if index.is_cpu else index.cpu()).numpy(), index.shape)
        numbers = row_numbers(index, len(self))
        return self._rows(np.ascontiguousarray(numbers.reshape(-1)), torch.Size(numbers.shape))

    def _rows(self, numbers: Array, batch: torch.Size) -> TensorDict:
        if self.views:
            found = self._leaves.gather_views(numbers, self.device)
        else:
            found = self._leaves.gather(numbers)
            if self.device.type != "cpu":
                found = [leaf.to(self.device) for leaf in found]
        if len(batch) != 1:
            found = [leaf.reshape((*batch, *leaf.shape[1:])) for leaf in found]
        built: TensorDict = self._structure.unflatten(iter(found), batch)
        return built

    def entry(self, key: tuple[str, ...], index: Any) -> torch.Tensor | None:
        """Read one leaf of the rows at `index` alone, into a fresh tensor; None where there is none."""
        number = next((number for number, field in enumerate(self._ordered) if field.key == key), None)
        if number is None:
            return None
        numbers = row_numbers(as_index(index, 1), len(self))
        found = self._leaves.gather_leaf(number, np.ascontiguousarray(numbers.reshape(-1)))
        return found.reshape((*numbers.shape, *found.shape[1:])).to(self.device)

    def write_at(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> NoReturn:
        """Refuse: datasets are never edited."""
        raise SchemaError(f"{self.path} is read-only: datasets in layout packed are never edited in place")

    def editable(self, key: tuple[str, ...]) -> torch.Tensor:
        """Refuse: datasets are never edited."""
        raise SchemaError(f"{self.path} is read-only: datasets in layout packed are never edited in place")

    def save_state(self) -> dict[str, Any]:
        """Return the digest of the contents, which lie on disk."""
        return {"content_digest": self.content_digest, "_len": len(self)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Check that the state is of these very contents; SchemaError if not."""
        if state.get("content_digest") != self.content_digest:
            raise SchemaError(f"the state belongs to other data than {self.path}")

    def clear_rows(self) -> None:
        """Refuse: datasets are never edited."""
        raise SchemaError(f"{self.path} is read-only: datasets in layout packed are never edited in place")

    @property
    def shared(self) -> bool:
        """Whether other processes see the same rows: nobody can change them."""
        return True

    def share(self) -> None:
        """Do nothing: other processes read the same files."""

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        left_out = {"_leaves", "_structure", "_ordered", "fields", "episodes"}
        return {name: value for name, value in state.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        digest = self.content_digest
        self._open()
        if digest != self.content_digest:
            raise CorruptDataError(
                f"{self.path} has the content {self.content_digest}, expected {digest}: it was replaced since"
            )


def _structure(fields: tuple[Field, ...]) -> tuple[TreeSpec, list[Field]]:
    """Return the tree spec of a batch, and the fields in the order of its leaves."""
    by_path = {field.key: field for field in fields}
    nothing = {key: torch.empty((0, *field.shape)) for key, field in by_path.items()}
    structure = tree_spec_of(tensordict_of(nothing, (0,)), 1)
    return structure, [by_path[path] for path in structure.paths()]
