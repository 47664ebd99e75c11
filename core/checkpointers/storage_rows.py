"""The rows of a storage as steps of episodes: what checkpoints of datasets are written from, too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..checkpoint import STORAGE, FilledStorage
from ..dataset import Array, EpisodeTable, Manifest, Request, StepReader, created_by
from ..errors import SchemaError, UsageError
from ..storages import TensorStorage
from ..storages.cursors import last_row
from ..storages.describe import describe
from ..storages.layout import is_tree
from ..ted import DTYPES, FLAGS, NEXT, REWARD, Field, Key, key_name, role_of
from .episode_ends import find_episodes
from .lanes import LaneLeaf, Order

__all__ = ["KeyLike", "StorageRows", "keys_of"]

KeyLike: TypeAlias = str | tuple[str, ...]

_ELSEWHERE = "a TensorStorageCheckpointer saves any storage of tensors"


class StorageRows(StepReader):
    """Gives the valid rows of a storage of tensordicts in the order of time, and the episodes they make up.

    `done_keys` and `reward_keys` are those below `next` that are no observations; None stands for done, terminated
    and truncated (wherever they are below `next`, if not directly) and for reward. SchemaError for what has no
    episodes: bare tensors and nests of other kinds, and data without any done flag.

    Arrays that `read` returns may be views of the storage.
    """

    def __init__(
        self,
        storage: TensorStorage,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
    ) -> None:
        self.path = Path(type(storage).__name__)
        if not is_tree(storage.structure):
            raise SchemaError(
                f"the storage holds a {storage.structure}; whole episodes can be saved of tensordicts only",
                hint=_ELSEWHERE,
            )
        keys = list(storage.structure.paths())
        dones = _done_keys(keys, done_keys)
        rewards = keys_of(reward_keys, "reward_keys") or [REWARD]
        columns = storage.columns
        last = last_row(storage._last_cursor)
        rows = columns.lead[0]
        self.filled = FilledStorage(
            tuple(storage.shape), math.prod(columns.lead), None if last is None else (last + 1) % rows,
            describe(storage.structure),
        )  # fmt: skip
        self._order = Order(storage.rows, math.prod(columns.others), self.filled.oldest)
        fields = [
            Field(key, _dtype_name(leaf.dtype, key), tuple(leaf.shape[storage.ndim :]), _role(key, dones, rewards))
            for key, leaf in zip(keys, columns.leaves, strict=True)
        ]
        self._leaves = {
            field.key: LaneLeaf(leaf, field, storage.ndim) for field, leaf in zip(fields, columns.leaves, strict=True)
        }
        self.manifest = self._manifest(fields, 0)
        self._episodes = find_episodes(self, self._order, self.filled, [(NEXT, *key) for key in dones])
        self.manifest = self._manifest(fields, len(self._episodes))

    def _manifest(self, fields: Sequence[Field], episodes: int) -> Manifest:
        kind = str(self.path)
        return Manifest(
            kind="checkpoint", layout="ted", request=Request(STORAGE, kind, kind), steps=self.filled.length,
            episodes=episodes, fields=tuple(fields), files=(), content_digest="", created_by=created_by(),
        )  # fmt: skip

    @property
    def episodes(self) -> EpisodeTable:
        """The episode table: every lane ends with one, finished or not."""
        return self._episodes

    @property
    def episode_text(self) -> list[dict[str, str]] | None:
        """A storage has none."""
        return None

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Return rows `[start, stop)` of one leaf."""
        field, leaf = self._leaf(key, start, stop), self._leaves[key]
        parts = [leaf.read(run) for run in self._order.runs(start, stop)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, *field.shape), field.numpy)

    def documents(self) -> dict[str, bytes]:
        """A storage has none."""
        return {}

    def verify_files(self) -> None:
        """There are no files."""


def keys_of(keys: Sequence[KeyLike] | None, argument: str) -> list[Key]:
    """Read keys below `next`: texts or tuples of texts, with or without `next` in front; None is no key."""
    given: Iterable[Any] = [keys] if isinstance(keys, str) else keys or ()
    found = []
    for key in given:
        parts = (key,) if isinstance(key, str) else key
        if not isinstance(parts, tuple) or not parts or not all(isinstance(part, str) for part in parts):
            raise UsageError(f"{argument} holds {key!r}; keys are texts or tuples of texts")
        found.append(parts[1:] if parts[0] == NEXT and len(parts) > 1 else parts)
    return found


def _done_keys(keys: Sequence[Key], asked: Sequence[KeyLike] | None) -> list[Key]:
    after = [key[1:] for key in keys if key[0] == NEXT and len(key) > 1]
    if asked is None:
        named = {flag[0] for flag in FLAGS}
        found = [key for key in after if key in FLAGS] or [key for key in after if key[-1] in named]
    else:
        found = [key for key in keys_of(asked, "done_keys") if key in after]
    if found:
        return found
    wanted = "done, terminated or truncated" if asked is None else ", ".join(map(key_name, keys_of(asked, "done_keys")))
    raise SchemaError(
        f"there is no {wanted} below 'next', so that it cannot be told where episodes end",
        hint=f"name the flags with done_keys=[...]; {_ELSEWHERE}",
    )


def _role(key: Key, dones: Sequence[Key], rewards: Sequence[Key]) -> Any:
    inner = key[1:] if key[0] == NEXT else ()
    return "done" if inner in dones else "reward" if inner in rewards else role_of(key)


def _dtype_name(dtype: Any, key: Key) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SchemaError(f"the entry {key_name(key)!r} is of {dtype}, which this form cannot hold", hint=_ELSEWHERE)
    return name
