"""The rows of a storage as steps of episodes: what checkpoints of datasets are written from, too."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..encodings import STORAGE, FilledStorage
from ..errors import SchemaError
from ..format import Array, EpisodeTable, Manifest, Request, StepReader, created_by
from ..storages import TensorStorage
from ..storages.cursors import last_row
from ..storages.describe import describe
from ..storages.layout import is_tree
from ..storages.structure import Structure
from ..ted import DTYPES, NEXT, REWARD, Field, Key, key_name, role_of
from .episode_ends import find_episodes
from .keys import ELSEWHERE, KeyLike, done_keys_of, keys_of, require_keys, role_below_next
from .lanes import LaneLeaf, Order

__all__ = ["EpisodeRows", "StorageRows", "fields_of", "next_row"]


class EpisodeRows(StepReader, ABC):
    """The valid rows of a storage in the order of time, and the episodes they make up.

    `filled` says where in the storage they are. A subclass gives the rows, and calls `_begin`.
    """

    filled: FilledStorage

    def _begin(self, kind: str, fields: Sequence[Field], done_keys: Any, reward_keys: Any) -> list[Key]:
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

    `done_keys` and `reward_keys` are those below `next` that are no observations; None stands for done, terminated
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
            describe(storage.structure),
        )  # fmt: skip
        self._order = Order(storage.rows, math.prod(columns.others), self.filled.oldest)
        fields = fields_of(storage.structure, columns.leaves, storage.ndim)
        dones = self._begin(type(storage).__name__, fields, done_keys, reward_keys)
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
    """The row behind the one that was written last, of so many; None where nobody knows."""
    last = last_row(storage.last_cursor)
    return None if last is None else (last + 1) % rows


def fields_of(structure: Structure, leaves: Sequence[Any], lead: int) -> list[Field]:
    """Describe tensors, of whose dimensions `lead` count elements; SchemaError for types that no file can hold."""
    pairs = zip(structure.paths(), leaves, strict=True)
    return [Field(key, _dtype_name(leaf.dtype, key), tuple(leaf.shape[lead:]), role_of(key)) for key, leaf in pairs]


def _dtype_name(dtype: Any, key: Key) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SchemaError(f"the entry {key_name(key)!r} is of {dtype}, which this form cannot hold", hint=ELSEWHERE)
    return name
