"""Helpers for the suites of storages and writers: rows of every kind of data, comparisons, and errors of calls.

Nothing here depends on pytest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict

from ..buffers.replay_buffer import ReplayBuffer
from ..storages.pytree import tree_spec_of


def error_of(act: Callable[[], Any]) -> Exception | None:
    """Return the error that `act` raises, or None."""
    try:
        act()
    except Exception as error:
        return error
    return None


LANES = 3
"""Elements per row of a storage with two dimensions."""


def same(one: Any, other: Any) -> bool:
    """Return whether two nests of tensors have the same leaves, bit for bit and type for type."""
    structure = tree_spec_of(one)
    pairs = zip(structure.flatten(one), structure.flatten(other), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def overwrite(rows: Any) -> None:
    """Set every number of a nest of tensors to 0, in place."""
    for leaf in tree_spec_of(rows).flatten(rows):
        leaf.copy_(torch.zeros_like(leaf))


class MarkRecorder:
    """Records the elements that a storage reports as updated."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def mark_update(self, index: Any) -> None:
        """Record an index."""
        self.marks.append(index)


def sample_rows(kind: str, rows: list[int], ndim: int = 1) -> Any:
    """Make rows of a kind of data ("tensor", "tensordict", "nested tensordict", "pytree") from their numbers."""
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
    """Yield two rows once for each tensor in them, with this tensor too wide."""
    rows = sample_rows(kind, [50, 51], ndim)
    structure = tree_spec_of(rows, ndim)
    leaves = structure.flatten(rows)
    for place, leaf in enumerate(leaves):
        wide = leaf.unsqueeze(-1).expand(*leaf.shape, 2).clone()
        yield structure.unflatten(iter([*leaves[:place], wide, *leaves[place + 1 :]]), leaves[0].shape[:ndim])


def episode_steps(first: int, count: int, every: int = 5) -> TensorDict:
    """Make `count` steps numbered from `first`, in episodes of `every` steps."""
    step = torch.arange(first, first + count)
    done = (step % every == every - 1).unsqueeze(-1)
    return TensorDict({"step": step, "next": TensorDict({"done": done}, [count])}, [count])


CAPACITY = 5
"""Rows in the storages of the suites."""

Leaves: TypeAlias = dict[tuple[str, ...], torch.Tensor]

FILLED = {"empty": 0, "partly filled": 3, "exactly full": CAPACITY, "wrapped": CAPACITY + 3}
KINDS = ("tensor", "tensordict", "nested", "tree")


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of data, the number of dimensions of the storage, and its fill level before a test."""

    kind: str
    ndim: int
    filled: str

    def __str__(self) -> str:
        return f"{self.kind}, ndim={self.ndim}, {self.filled}"

    def rows(self, first: int, count: int) -> Any:
        """Make the rows numbered from `first` on."""
        return numbered_rows(self.kind, self.ndim, range(first, first + count))

    def row(self, number: int) -> Any:
        """Make one row, without its leading dimension."""
        return _first(self.rows(number, 1))


def paired(kinds: tuple[str, ...], ndims: tuple[int, ...], fills: Iterable[str]) -> list[tuple[str, int, str]]:
    """Return half of the combinations of kinds of data, numbers of dimensions and fill levels: each pair occurs."""
    every = list(product(enumerate(kinds), enumerate(ndims), enumerate(fills)))
    few = min(len(kinds), len(ndims)) < 2
    return [(a, b, c) for (one, a), (two, b), (three, c) in every if few or (one + two + three) % 2 == 0]


def numbered_rows(kind: str, ndim: int, numbers: range) -> Any:
    """Make rows of a kind of data whose leaves all differ: tensor, tensordict, nested tensordict, dicts and tuples."""
    count, lanes = len(numbers), (LANES,) * (ndim - 1)
    base = torch.tensor(list(numbers), dtype=torch.int64).reshape(count, *[1] * (ndim - 1))
    base = (base * 10 + torch.arange(lanes[0]) if lanes else base * 10).expand(count, *lanes)
    wide = base.unsqueeze(-1) * 2.0 + torch.tensor([0.25, 0.5])
    if kind == "tensor":
        return wide
    if kind == "tree":
        return {"a": wide, "b": [base + 7, (base.to(torch.int16),)]}
    rows = TensorDict({"observation": wide, "score": base + 0.5}, [count, *lanes])
    if kind == "nested":
        rows["next"] = TensorDict({"reward": base.unsqueeze(-1).double(), "deep": {"x": base + 3}}, [count, *lanes])
    return rows


def leaves_of(data: Any) -> Leaves:
    """Return the tensors of a nest by path, without the `"index"` that some writers store."""
    return {path: leaf for path, leaf in _walk(data, ()) if path != ("index",)}


def _walk(data: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    if isinstance(data, torch.Tensor):
        yield path, data
        return
    for key, child in data.items() if hasattr(data, "items") else enumerate(data):
        yield from _walk(child, (*path, str(key)))


def same_leaves(one: Any, other: Any) -> bool:
    """Return whether two nests have the same tensors in the same places, apart from `"index"`."""
    return same_tensors(leaves_of(one), leaves_of(other))


def same_tensors(one: Leaves, other: Leaves) -> bool:
    """Return whether two sets of leaves are the same."""
    return one.keys() == other.keys() and all(torch.equal(one[path], other[path]) for path in one)


def _first(data: Any) -> Any:
    if isinstance(data, torch.Tensor | TensorDict):
        return data[0]
    if isinstance(data, dict):
        return {key: _first(child) for key, child in data.items()}
    return type(data)(_first(child) for child in data)


def copied_leaves(data: Any) -> Leaves:
    """Return copies of the leaves of a nest, without `"index"`."""
    return {path: leaf.clone() for path, leaf in leaves_of(data).items()}


def layout_of(data: Any) -> Any:
    """Return the names, dtypes and shapes of the leaves of a nest."""
    if isinstance(data, torch.Tensor):
        return data.dtype, tuple(data.shape)
    return {str(k): layout_of(v) for k, v in (data.items() if hasattr(data, "items") else enumerate(data))}


def widened(data: Any) -> Any:
    """Return a copy in which the last dimension of one leaf is longer, so that it no longer fits the storage."""
    if isinstance(data, torch.Tensor):
        return torch.cat([data, data[..., :1]], -1)
    copied = data.copy()
    key = "a" if "a" in copied.keys() else "observation"  # noqa: SIM118 - a tensordict is not a container of keys
    wide = copied[key]
    copied[key] = torch.cat([wide, wide[..., :1]], -1)
    return copied


def restore(buffer: ReplayBuffer, saved: ReplayBuffer, way: str) -> None:
    """Load another buffer into this one, through its `state_dict` ("state") or a saved folder ("folder")."""
    if way == "state":
        buffer.load_state_dict(saved.state_dict())
        return
    with tempfile.TemporaryDirectory() as folder:
        saved.dumps(folder)
        buffer.loads(folder)
