"""The rows of a storage as steps of episodes, which checkpoints of datasets are written from, too."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from ..encodings.layout import STORAGE, FilledStorage
from ..errors import CorruptDataError, SchemaError, UsageError
from ..format.contracts import Array, StepReader
from ..format.episodes import EpisodeTable
from ..format.manifest import Manifest, Request
from ..format.packed.reader import PackedReader
from ..format.ted.builder import created_by
from ..storages.base import Storage
from ..storages.compressed import CompressedListStorage
from ..storages.cursors import last_row
from ..storages.list_storage import ListStorage
from ..storages.packed import PackedStorage
from ..storages.packed_recording import PackedRecording
from ..storages.pytree import TreeSpec, tree_spec_of
from ..storages.tensor import TensorStorage
from ..storages.tree_files import is_tree, spec_to_json
from ..ted.schema import DTYPES, NEXT, REWARD, Field, Key, key_name, role_of
from .episode_ends import (
    ELSEWHERE,
    KeyLike,
    LaneLeaf,
    Order,
    done_keys_of,
    find_episodes,
    host_array,
    keys_of,
    require_keys,
    role_below_next,
)
from .folders import article


class EpisodeRows(StepReader, ABC):
    """The valid rows of a storage in the order of time, and the episodes they make up.

    `filled` are their places in the storage. A subclass reads the rows, and calls `_describe`.
    """

    filled: FilledStorage

    def _describe(self, kind: str, fields: Sequence[Field], done_keys: Any, reward_keys: Any) -> list[Key]:
        """Give every field its role; return the flags below `next` that end episodes."""
        self.path = Path(kind)
        for argument, asked in (("done_keys", done_keys), ("reward_keys", reward_keys)):
            require_keys(asked, argument, fields, f"the {kind}")
        dones = done_keys_of([field.key for field in fields], done_keys)
        rewards = keys_of(reward_keys, "reward_keys") or [REWARD]
        self._fields = [
            Field(field.key, field.dtype, field.shape, role_below_next(field.key, dones, rewards)) for field in fields
        ]
        self._count(0)
        return dones

    def _count(self, episodes: int) -> None:
        """Describe the rows, which are of so many episodes."""
        kind = str(self.path)
        self.manifest = Manifest(
            kind="checkpoint", layout="ted", request=Request(STORAGE, kind, kind), steps=self.filled.length,
            episodes=episodes, fields=tuple(self._fields), files=(), content_digest="", created_by=created_by(),
        )  # fmt: skip

    @property
    def episodes(self) -> EpisodeTable:
        """The episode table: every lane ends with one, finished or not."""
        return self._episodes

    def _find(self, order: Order, dones: Sequence[Key]) -> None:
        """Find the episodes by their flags."""
        self._episodes = find_episodes(self, order, self.filled, [(NEXT, *key) for key in dones])
        self._count(len(self._episodes))

    @property
    def episode_text(self) -> list[dict[str, str]] | None:
        """A storage has none."""
        return None

    def documents(self) -> dict[str, bytes]:
        """A storage has none."""
        return {}

    def verify_files(self) -> None:
        """There are no files."""


class StorageRows(EpisodeRows):
    """Gives the rows of a storage of tensordicts.

    `done_keys` and `reward_keys` are those below `next` that are no observations; None means done, terminated
    and truncated (wherever they are below `next`, if not directly) and for reward. SchemaError for what has no
    episodes: bare tensors and nests of other kinds, and data without any done flag. MissingKeyError for a key that is
    not there.

    Arrays that `read` returns may be views of the storage.
    """

    def __init__(
        self,
        storage: TensorStorage,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
    ) -> None:
        if not is_tree(storage.structure):
            raise SchemaError(
                f"the storage holds a {storage.structure}; whole episodes can be saved of tensordicts only",
                hint=ELSEWHERE,
            )
        keys, columns = list(storage.structure.paths()), storage.columns
        self.filled = FilledStorage(
            tuple(storage.shape), math.prod(columns.lead), next_row(storage, columns.lead[0]),
            spec_to_json(storage.structure),
        )  # fmt: skip
        self._order = Order(storage.rows, math.prod(columns.others), self.filled.oldest)
        fields = fields_of(storage.structure, columns.leaves, storage.ndim)
        dones = self._describe(type(storage).__name__, fields, done_keys, reward_keys)
        self._leaves = {
            key: LaneLeaf(leaf, field, storage.ndim)
            for key, field, leaf in zip(keys, fields, columns.leaves, strict=True)
        }
        self._find(self._order, dones)

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Return rows `[start, stop)` of one leaf."""
        field, leaf = self._leaf(key, start, stop), self._leaves[key]
        parts = [leaf.read(run) for run in self._order.runs(start, stop)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, *field.shape), field.numpy)


def next_row(storage: Any, rows: int) -> int | None:
    """The row behind the one that was written last, of so many; None where that is not known."""
    last = last_row(storage.last_cursor)
    return None if last is None else (last + 1) % rows


def fields_of(structure: TreeSpec, leaves: Sequence[Any], lead: int) -> list[Field]:
    """Describe tensors, of whose dimensions `lead` count elements; SchemaError for types that no file can hold."""
    pairs = zip(structure.paths(), leaves, strict=True)
    return [Field(key, _dtype_name(leaf.dtype, key), tuple(leaf.shape[lead:]), role_of(key)) for key, leaf in pairs]


def _dtype_name(dtype: Any, key: Key) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SchemaError(f"the entry {key_name(key)!r} is of {dtype}, which this form cannot hold", hint=ELSEWHERE)
    return name


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
                    f"{storage.path} has the content {found}, expected {storage.content_digest}: it was replaced"
                )
            self.filled = FilledStorage.of_dataset(len(storage))
            self._describe(type(storage).__name__, self._reader.fields, done_keys, reward_keys)
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
        structure = tree_spec_of(first, 1)
        self.filled = FilledStorage((count,), count, 0, spec_to_json(structure))
        fields = fields_of(structure, structure.flatten(first), 1)
        dones = self._describe(type(recording).__name__, fields, done_keys, reward_keys)
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
        structure = tree_spec_of(first)
        self.filled = FilledStorage(
            (len(storage),), storage.max_size, next_row(storage, storage.max_size), spec_to_json(structure)
        )
        fields = fields_of(structure, structure.flatten(first), 0)
        self._order = Order(len(storage), 1, self.filled.oldest)
        self._find(self._order, self._describe(type(storage).__name__, fields, done_keys, reward_keys))

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
    structure = tree_spec_of(item)
    leaves = tuple(
        (path, leaf.dtype, leaf.shape) for path, leaf in zip(structure.paths(), structure.flatten(item), strict=True)
    )
    return (leaves, spec_to_json(structure))


def _unlike(found: str) -> SchemaError:
    return SchemaError(
        f"{found}; a form of whole episodes holds steps that are all alike, tensordicts of batch size []",
        hint="a ListStorageCheckpointer saves any list",
    )
