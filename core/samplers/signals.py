"""What tells where trajectories end: ids, end flags, an episode table, or tensors given once and for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_tensor_collection

from ..errors import MissingKeyError, SchemaError
from ..storages import Storage, TensorStorage

__all__ = [
    "Ends",
    "EpisodeSignal",
    "FlagSignal",
    "IdSignal",
    "Key",
    "Signal",
    "StaticSignal",
    "changes_of",
    "has_entry",
    "stored_entry",
]

Key: TypeAlias = tuple[str, ...]
Ends: TypeAlias = NDArray[np.bool_]


class Signal(ABC):
    """Tells of rows whether they end a trajectory. Equal signals tell the same."""

    keys: tuple[Key, ...] = ()
    """The entries that it reads."""

    looks_ahead = False
    """Whether it takes the following row to tell whether a row is the last of its trajectory."""

    @abstractmethod
    def ends(self, storage: Storage, rows: NDArray[np.int64] | slice) -> Ends:
        """Tell of rows, named in the order of time, whether they end a trajectory; `[rows, lanes]`.

        Where it `looks_ahead`, the last of the rows is not known to be an end. SchemaError (a RuntimeError) for a
        signal of another shape than the storage's, MissingKeyError (a KeyError) for one that is not there.
        """


@dataclass(frozen=True)
class FlagSignal(Signal):
    """A row is an end where any of several flags is set, each with any number of further dimensions."""

    keys: tuple[Key, ...]

    def ends(self, storage: Storage, rows: NDArray[np.int64] | slice) -> Ends:
        found: Ends | None = None
        for key in self.keys:
            flags = stored_entry(storage, key)
            if flags is None:
                continue
            part: Ends = np.any(_by_lane(flags, rows, storage, key).astype(bool, copy=False), axis=2)
            found = part if found is None else np.logical_or(found, part)
        if found is None:
            raise MissingKeyError(f"{_listed(self.keys)} is not in the storage: nothing tells where a trajectory ends")
        return found


@dataclass(frozen=True)
class IdSignal(Signal):
    """A row is an end where the id of the following one differs."""

    key: Key
    looks_ahead = True

    @property
    def keys(self) -> tuple[Key, ...]:  # type: ignore[override]
        """The entry that it reads."""
        return (self.key,)

    def ends(self, storage: Storage, rows: NDArray[np.int64] | slice) -> Ends:
        ids = stored_entry(storage, self.key)
        if ids is None:
            raise MissingKeyError(f"{_listed(self.keys)} is not in the storage: nothing tells trajectories apart")
        return changes_of(_by_lane(ids, rows, storage, self.key))


@dataclass(frozen=True, eq=False)
class StaticSignal(Signal):
    """Ends that were given for the rows of a full storage, and stay what they are; `[rows, lanes]`."""

    given: Ends

    def ends(self, storage: Storage, rows: NDArray[np.int64] | slice) -> Ends:
        count = storage.shape[0]
        if self.given.shape[0] != count:
            raise SchemaError(
                f"the ends that were given are of {self.given.shape[0]:,} rows, the storage holds {count:,}",
                hint="give them for all rows, or name the entry that holds them: end_key or traj_key",
            )
        return self.given[rows]


def changes_of(ids: np.ndarray[Any, Any]) -> Ends:
    """Tell of ids `[rows, lanes, further]` after which ones another follows; of the last it is not known: False."""
    found = np.zeros(ids.shape[:2], bool)
    np.any(ids[1:] != ids[:-1], axis=2, out=found[:-1])
    return found


@dataclass(frozen=True)
class EpisodeSignal(Signal):
    """The episodes that a dataset lists, whatever its rows say."""

    def ends(self, storage: Storage, rows: NDArray[np.int64] | slice) -> Ends:
        lengths = storage.episode_lengths()
        if lengths is None or int(lengths.sum()) != storage.shape[0]:
            raise SchemaError("the storage lists no episodes, or others than it holds")
        found = np.zeros((storage.shape[0], 1), bool)
        found[np.cumsum(lengths[lengths > 0]) - 1] = True
        return found[rows]


def has_entry(storage: Storage, key: Key) -> bool:
    """Tell whether there is such an entry."""
    return stored_entry(storage, key) is not None


def stored_entry(storage: Storage, key: Key, *, valid: bool = True) -> torch.Tensor | None:
    """Return the tensor behind an entry, of all valid rows, or of all that there is room for; None if there is none."""
    if isinstance(storage, TensorStorage):
        if not storage.initialized:
            return None
        paths: Sequence[Key] = [tuple(map(str, path)) for path in storage.structure.paths()]
        if key not in paths:
            return None
        leaf = storage.columns.leaves[paths.index(key)]
        return leaf[: storage.rows] if valid else leaf
    rows = storage.get(slice(None))
    if isinstance(rows, list):
        rows = torch.stack([row.select(key, strict=False) for row in rows])
    if not is_tensor_collection(rows):
        raise SchemaError(f"slices are sampled from tensordicts, the storage holds a {type(rows).__name__}")
    found = rows.get(key, None)
    return found if isinstance(found, torch.Tensor) else None


def _by_lane(leaf: torch.Tensor, rows: NDArray[np.int64] | slice, storage: Storage, key: Key) -> np.ndarray[Any, Any]:
    """Read rows of a leaf as `[rows, lanes, further]`."""
    lead = tuple(storage.shape)
    if leaf.shape[: len(lead)] != lead:
        raise SchemaError(
            f"{_listed((key,))} is {list(leaf.shape)}, a signal of the storage's {len(lead)} dimensions "
            f"{list(lead)} is expected"
        )
    chosen = leaf[rows] if isinstance(rows, slice) else leaf[torch.from_numpy(rows).to(leaf.device)]
    lanes = int(np.prod(lead[1:], dtype=np.int64))
    return chosen.reshape(len(chosen), lanes, -1).numpy(force=True)


def _listed(keys: Sequence[Key]) -> str:
    return " or ".join(repr(".".join(key)) for key in keys)
