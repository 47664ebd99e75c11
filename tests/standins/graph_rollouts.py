"""Rollouts of small graphs of numbered states, and the trees that dictionaries make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict

Step = tuple[int, int, int]
"""A state, an action and the state that follows."""


def rollout(steps: Sequence[Step], *, done: bool = False) -> TensorDict:
    """Make the TED rows of steps."""
    state, action, after = torch.tensor(steps, dtype=torch.int64).reshape(-1, 3).unbind(1)
    last = torch.zeros(len(steps), 1, dtype=torch.bool)
    last[-1:] = done
    following = {"observation": after, "reward": after[:, None].float(), "done": last}
    return TensorDict({"observation": state, "action": action, "next": following}, [len(steps)])


def state(number: int) -> TensorDict:
    """Make the tensordict of a state."""
    return TensorDict(observation=torch.tensor(number))


class Shape(NamedTuple):
    """What a tree looks like: the steps that lead to each vertex, where they lead, and what is below."""

    steps: tuple[Step, ...]
    state: int
    below: tuple[Any, ...]


class OracleForest:
    """Steps by state in a dict; no path repeats a step."""

    def __init__(self) -> None:
        self.branches: dict[int, list[Step]] = {}

    def extend(self, steps: Sequence[Step]) -> None:
        for step in steps:
            known = self.branches.setdefault(step[0], [])
            if step not in known:
                known.append(step)

    def __len__(self) -> int:
        return sum(map(len, self.branches.values()))

    def tree(self, root: int, *, compact: bool, max_depth: int | None) -> Shape:
        return self._vertex((), root, (), 0, compact, max_depth)

    def _vertex(
        self, steps: tuple[Step, ...], at: int, path: tuple[Step, ...], depth: int, compact: bool, most: int | None
    ) -> Shape:
        found = [step for step in self.branches.get(at, []) if step not in path]
        if compact and len(found) == 1:
            return self._vertex((*steps, found[0]), found[0][2], (*path, found[0]), depth, compact, most)
        if most is not None and depth > most:
            return Shape(steps, at, ())
        below = [self._vertex((step,), step[2], (*path, step), depth + 1, compact, most) for step in found]
        return Shape(steps, at, tuple(below))


def shape_of(tree: Any) -> Shape:
    """Describe a tree as the oracle does."""
    steps: tuple[Step, ...] = ()
    if tree.rollout is not None:
        rows = tree.rollout
        columns = (rows["observation"].tolist(), rows["action"].tolist(), rows["next", "observation"].tolist())
        steps = tuple(zip(*columns, strict=True))
    below = tuple(shape_of(tree.subtree[number]) for number in range(tree.num_children))
    return Shape(steps, int(tree.node_observation), below)
