"""Whole trajectories as rows: padded to one length, with a mask."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict

from ..errors import SchemaError
from ..storages.columns import plain_column
from ..storages.dataset import tensordict_of
from ..ted import Key

__all__ = ["MASK", "TRAJECTORY_IDS", "padded", "trajectory_lengths"]

Array = np.ndarray[Any, Any]

MASK: Key = ("mask",)
TRAJECTORY_IDS: Key = ("traj_ids",)


def trajectory_lengths(episode_lengths: Array, done: Array) -> Array:
    """Count the steps of each trajectory, in storage order: int64 `[trajectories]`.

    One ends where its episode does, regardless of the flags, and wherever `done` (bool `[steps]`) is set.
    """
    ends = done.astype(bool, copy=True)
    ends[np.cumsum(episode_lengths[episode_lengths > 0]) - 1] = True
    return np.diff(np.flatnonzero(ends) + 1, prepend=0)


def padded(rows: TensorDict, lengths: Array) -> TensorDict:
    """Give every trajectory a row of its own: `[steps]` becomes `[trajectories, longest]`, zero where one is over.

    `lengths` are those of trajectories that lie one after the other and are all there is. `"mask"` (bool) is set
    where a step is, `"traj_ids"` (int64) is the number of the trajectory. The time this takes grows with the number of
    steps; the result is in memory, and pages that hold nothing but padding take none. Names and form are those of
    TorchRL's `split_trajectories`. SchemaError (a RuntimeError) if the data has entries of these names.
    """
    mask = torch.arange(int(lengths.max())) < torch.from_numpy(lengths).unsqueeze(1)
    places = mask.flatten().nonzero().squeeze(1)
    tensors: dict[Key, torch.Tensor] = {}
    for name in rows.keys(include_nested=True, leaves_only=True):
        key = _unravelled(name)
        if key in (MASK, TRAJECTORY_IDS):
            raise SchemaError(f"the dataset has an entry {key[0]!r} of its own, which the padded form needs")
        tensors[key] = _spread(cast("torch.Tensor", rows.get(key)), places, mask.shape)
    tensors[MASK] = mask
    tensors[TRAJECTORY_IDS] = torch.arange(len(lengths)).unsqueeze(1) * mask
    return tensordict_of(tensors, tuple(mask.shape))


def _unravelled(name: Any) -> Key:
    """Write a key of a tensordict as a tuple."""
    return (name,) if isinstance(name, str) else tuple(name)


def _spread(leaf: torch.Tensor, places: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """Put the rows of a leaf at these places of `lead`, and zeros elsewhere."""
    target = torch.zeros((lead.numel(), *leaf.shape[1:]), dtype=leaf.dtype)
    plain_column(target).index_copy_(0, places, plain_column(leaf))
    return target.reshape(*lead, *leaf.shape[1:])
