"""The rows of storages that are no tensors: packed datasets, recordings, lists of tensordicts that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from ..encodings import FilledStorage
from ..errors import CorruptDataError, SchemaError, UsageError
from ..format import Array, PackedReader
from ..storages import (
    CompressedListStorage,
    ListStorage,
    PackedRecording,
    PackedStorage,
    Storage,
    TensorStorage,
)
from ..storages.describe import describe
from ..storages.structure import structure_of
from ..ted import Key
from .folders import article
from .keys import KeyLike
from .lanes import Order, host_array
from .storage_rows import EpisodeRows, StorageRows, fields_of, next_row

__all__ = ["ListRows", "PackedRows", "RecordingRows", "rows_of_storage"]


def rows_of_storage(
    storage: Storage, done_keys: Sequence[KeyLike] | None, reward_keys: Sequence[KeyLike] | None, asked: str
) -> EpisodeRows:
    """Return the rows of any storage that has episodes; UsageError for others, which `asked` was to save."""
    if isinstance(storage, TensorStorage):
        return StorageRows(storage, done_keys, reward_keys)
    if isinstance(storage, PackedStorage):
        return PackedRows(storage, done_keys, reward_keys)
    if isinstance(storage, PackedRecording):
        return RecordingRows(storage, done_keys, reward_keys)
    if isinstance(storage, ListStorage) and not isinstance(storage, CompressedListStorage):
        return ListRows(storage, done_keys, reward_keys)
    kind = type(storage).__name__
    hint = "a CompressedListStorageCheckpointer saves it" if isinstance(storage, CompressedListStorage) else ""
    raise UsageError(
        f"{article(asked)} serves storages of tensors and of steps, found {article(kind)}",
        hint=hint or "leave the checkpointer out: every storage has one that saves it",
    )


class PackedRows(EpisodeRows):
    """The steps of a packed dataset, read from its files; the episodes are those of its table."""

    def __init__(
        self,
        storage: PackedStorage,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
    ) -> None:
        self._reader = PackedReader(storage.path)
        try:
            found = self._reader.manifest.content_digest
            if found != storage.content_digest:
                raise CorruptDataError(
                    f"{storage.path} has the content {found}, {storage.content_digest} is expected: it was replaced"
                )
            self.filled = FilledStorage.of_dataset(len(storage))
            self._begin(type(storage).__name__, self._reader.fields, done_keys, reward_keys)
            self._episodes = self._reader.episodes
            self._count(len(self._episodes))
        except BaseException:
            self._reader.close()
            raise

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows of one leaf."""
        return self._reader.read(key, start, stop)

    def verify_files(self) -> None:
        """Compare the files of the dataset with their digests."""
        self._reader.verify_files()

    def close(self) -> None:
        """Close the files of the dataset."""
        self._reader.close()


class RecordingRows(EpisodeRows):
    """The rows of a recording, those of the episode under way included."""

    def __init__(
        self,
        recording: PackedRecording,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
    ) -> None:
        self._recording = recording
        count, first = len(recording), recording[:1]
        structure = structure_of(first, 1)
        self.filled = FilledStorage((count,), count, 0, describe(structure))
        fields = fields_of(structure, structure.leaves(first), 1)
        dones = self._begin(type(recording).__name__, fields, done_keys, reward_keys)
        self._find(Order(count, 1, 0), dones)

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows of one leaf."""
        field, rows = self._leaf(key, start, stop), self._recording.entry(key, slice(start, stop))
        assert rows is not None, "its fields are those of the recording"
        return host_array(rows, field)


class ListRows(EpisodeRows):
    """The elements of a list, tensordicts without batch dimensions that have the same entries, types and shapes.

    SchemaError names the first one that is something else.
    """

    def __init__(
        self,
        storage: ListStorage,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
    ) -> None:
        if not len(storage):
            raise SchemaError("the storage is empty: nothing was ever written to it", hint="write to it first")
        self._storage = storage
        first = storage[0]
        looks = _looks(first, 0)
        row = next((row for row in range(1, len(storage)) if _looks(storage[row], row) != looks), None)
        if row is not None:
            raise _unlike(f"row {row} of the list has other entries, types or shapes than row 0")
        structure = structure_of(first)
        self.filled = FilledStorage(
            (len(storage),), storage.max_size, next_row(storage, storage.max_size), describe(structure)
        )
        fields = fields_of(structure, structure.leaves(first), 0)
        self._order = Order(len(storage), 1, self.filled.oldest)
        self._find(self._order, self._begin(type(storage).__name__, fields, done_keys, reward_keys))

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Gather rows of one leaf."""
        field = self._leaf(key, start, stop)
        rows = [row for run in self._order.runs(start, stop) for row in range(run.rows.start, run.rows.stop)]
        if not rows:
            return np.empty((0, *field.shape), field.numpy)
        return host_array(torch.stack([self._storage[row].get(key) for row in rows]), field)


def _looks(item: Any, row: int) -> tuple[Any, ...]:
    """What all elements of a list must have in common."""
    if not isinstance(item, TensorDictBase) or item.batch_dims:
        what = (
            f"batch size {list(item.batch_size)}" if isinstance(item, TensorDictBase) else article(type(item).__name__)
        )
        raise _unlike(f"row {row} of the list is {what}")
    structure = structure_of(item)
    leaves = tuple(
        (path, leaf.dtype, leaf.shape) for path, leaf in zip(structure.paths(), structure.leaves(item), strict=True)
    )
    return (leaves, describe(structure))


def _unlike(found: str) -> SchemaError:
    return SchemaError(
        f"{found}; a form of whole episodes holds steps that are all alike, tensordicts of batch size []",
        hint="a ListStorageCheckpointer saves any list",
    )
