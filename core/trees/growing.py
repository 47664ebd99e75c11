"""From the steps of a forest to a tree: which vertices there are, then their data."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from ..errors import SchemaError
from ..maps.query import Key
from ..maps.tensordict_map import TensorDictMap
from .node_map import NodeMap
from .tree import Tree

_MOST = 100_000


class Vertex:
    """A vertex to be: the rows of the steps that lead to it, and the vertices that follow."""

    def __init__(self, steps: list[int], node: int, depth: int, passed: frozenset[int]) -> None:
        self.steps = steps
        self.node = node
        self.depth = depth
        self.passed = passed
        """The steps on the path, where paths may come back to a state."""
        self.below: list[Vertex] = []


def grow(nodes: NodeMap, start: int, steps: list[int] | None, *, max_depth: int | None, compact: bool) -> list[Vertex]:
    """Return the vertices of the tree below a node, level by level; the root has `steps`, or those to a branching."""
    acyclic = nodes.acyclic_from(start)
    known: dict[Any, Vertex] = {}

    def branches(vertex: Vertex) -> list[int]:
        rows = nodes.branches[vertex.node]
        return rows if acyclic else [row for row in rows if row not in vertex.passed]

    def follow(vertex: Vertex, row: int) -> None:
        vertex.steps.append(row)
        vertex.node = nodes.targets[row]
        if not acyclic:
            vertex.passed |= {row}

    def lengthened(vertex: Vertex) -> Vertex:
        while compact and len(rows := branches(vertex)) == 1:
            follow(vertex, rows[0])
        return vertex

    root = Vertex(list(steps or ()), start, 0, frozenset(steps or ()))
    found = [root if steps is not None else lengthened(root)]
    queue = deque(found)
    while queue:
        vertex = queue.popleft()
        if max_depth is not None and vertex.depth > max_depth:
            continue
        for row in branches(vertex):
            key = (row, None if max_depth is None else vertex.depth, vertex.passed)
            child = known.get(key)
            if child is None:
                child = known[key] = Vertex([], vertex.node, vertex.depth + 1, vertex.passed)
                follow(child, row)
                found.append(lengthened(child))
                queue.append(child)
            vertex.below.append(child)
        if len(found) > _MOST:
            raise SchemaError(f"the tree has more than {_MOST:,} vertices", hint="say max_depth=…")
    return found


def planted(
    vertices: Sequence[Vertex],
    data_map: TensorDictMap,
    nodes: NodeMap,
    root: TensorDictBase,
    observation_keys: Sequence[Key],
    specs: Any,
) -> Tree:
    """Make the tree of its vertices; all of its steps are read at once."""
    lengths = [len(vertex.steps) for vertex in vertices]
    parts: list[TensorDictBase | None] = [None] * len(vertices)
    states: list[TensorDictBase] = [root] * len(vertices)
    if any(lengths):
        steps = data_map[torch.tensor([row for vertex in vertices for row in vertex.steps], dtype=torch.int64)]
        ends = torch.tensor(lengths).cumsum(0) - 1
        last = steps[ends.clamp(min=0)]["next"].select(*observation_keys).unbind(0)
        for number, (part, state) in enumerate(zip(steps.split(lengths), last, strict=True)):
            if lengths[number]:
                parts[number], states[number] = part, state
    trees = []
    counts, wins = torch.zeros(len(vertices), dtype=torch.int32).unbind(), torch.zeros(len(vertices)).unbind()
    for number, vertex in enumerate(vertices):
        value = nodes.hashes[vertex.steps[0]] if number else int(nodes.query_module.hashed(root).hashes)
        rows = [child.steps[0] for child in vertex.below]
        index = torch.tensor(rows, dtype=torch.int64) if rows else None
        trees.append(
            Tree(
                count=counts[number], wins=wins[number], index=index, hash=value, node_id=number, rollout=parts[number],
                node_data=states[number], specs=specs, batch_size=[],
            )
        )  # fmt: skip
    numbers = {id(vertex): number for number, vertex in enumerate(vertices)}
    for tree, vertex in zip(trees, vertices, strict=True):
        if vertex.below:
            tree.set_children([trees[numbers[id(child)]] for child in vertex.below])
    return trees[0]
