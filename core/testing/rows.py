"""Rows to test storages with, of every kind of data, and how they are compared and spoiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict

from ..storages import tree_spec_of

__all__ = ["LANES", "Listener", "episode_steps", "overwrite", "same", "sample_rows", "spoiled"]

LANES = 3


def same(one: Any, other: Any) -> bool:
    """Tell whether two nests of tensors have the same leaves, bit for bit and type for type."""
    structure = tree_spec_of(one)
    pairs = zip(structure.flatten(one), structure.flatten(other), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def overwrite(rows: Any) -> None:
    """Set every number of a nest of tensors to 0, in place."""
    for leaf in tree_spec_of(rows).flatten(rows):
        leaf.copy_(torch.zeros_like(leaf))


class Listener:
    """Takes note of the elements that a storage reports."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def mark_update(self, index: Any) -> None:
        """Take note of an index."""
        self.heard.append(index)


def sample_rows(kind: str, rows: list[int], ndim: int = 1) -> Any:
    """Make rows of a kind of data ("tensor", "tensordict", "nested tensordict", "pytree"), which their numbers show."""
    shape = (len(rows), LANES)[:ndim]
    numbers = torch.tensor(rows, dtype=torch.int64).reshape(-1, *[1] * (ndim - 1)).expand(shape) * 4
    wide = torch.stack([numbers, numbers + 1], -1).double() + 0.5
    flag = (numbers % 8 == 0).unsqueeze(-1)
    if kind == "tensor":
        return wide
    if kind == "pytree":
        return {"a.b": wide, "c": [numbers.to(torch.uint16), (flag, numbers.bfloat16())]}
    inner = {"next": TensorDict({"observation": -wide.float(), "done": flag}, shape)} if "nested" in kind else {}
    return TensorDict({"observation": wide, "action": numbers.to(torch.int16), **inner}, shape)


def spoiled(kind: str, ndim: int) -> Iterator[Any]:
    """Make two rows in which one tensor is wider than elsewhere: each of them in turn."""
    rows = sample_rows(kind, [50, 51], ndim)
    structure = tree_spec_of(rows, ndim)
    leaves = structure.flatten(rows)
    for place, leaf in enumerate(leaves):
        wide = leaf.unsqueeze(-1).expand(*leaf.shape, 2).clone()
        yield structure.unflatten(iter([*leaves[:place], wide, *leaves[place + 1 :]]), leaves[0].shape[:ndim])


def episode_steps(first: int, count: int, every: int = 5) -> TensorDict:
    """Make steps of episodes of `every` steps."""
    step = torch.arange(first, first + count)
    done = (step % every == every - 1).unsqueeze(-1)
    return TensorDict({"step": step, "next": TensorDict({"done": done}, [count])}, [count])
