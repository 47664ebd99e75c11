"""Which steps start at an observation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from ..errors import UsageError
from ..maps.query import QueryModule, known_only
from ..maps.tensordict_map import TensorMap


class NodeMap(TensorMap[TensorDictBase, TensorDictBase]):
    """The branches at each observation: the rows of the steps that start there, in the order in which they came.

    `nodes[td]` reads, for observations of any batch size, the rows `_index` and hashes `_hash` of these steps, int64
    `[*batch, branches]` (a lazy stack where the numbers of branches differ), and `count`, int32 `[*batch]`: how many
    steps were added there, repeated ones included. Observations that no rollout has raise MissingKeyError (a
    KeyError). A forest writes; `query_module` numbers the observations.
    """

    def __init__(self, query_module: QueryModule) -> None:
        self.query_module = query_module
        self.branches: list[list[int]] = []
        """The rows of the steps that start at each node."""
        self.targets: list[int] = []
        """The node to which each step leads."""
        self.hashes: list[int] = []
        """The hash of each step."""
        self._visits: list[int] = []
        self._forward = True
        """Whether each step leads to a node of a higher number, as without states that are met again."""

    def __len__(self) -> int:
        return len(self.branches)

    def clear(self) -> None:
        self.query_module.truncate(0)
        for part in (self.branches, self.targets, self.hashes, self._visits):
            part.clear()
        self._forward = True

    def contains(self, item: TensorDictBase) -> torch.Tensor:
        hashed = self.query_module.hashed(item)
        return (self.query_module.find(hashed) >= 0).reshape(hashed.batch)

    def connect(self, nodes: Sequence[int], targets: Sequence[int], rows: Sequence[int], hashes: Sequence[int]) -> None:
        """Add steps from nodes to nodes; those whose row is known count as a visit."""
        while len(self.branches) < len(self.query_module):
            self.branches.append([])
            self._visits.append(0)
        for node, target, row, value in zip(nodes, targets, rows, hashes, strict=True):
            self._visits[node] += 1
            if row == len(self.targets):
                self.targets.append(target)
                self.hashes.append(value)
                self.branches[node].append(row)
                self._forward &= target > node

    def __getitem__(self, item: TensorDictBase) -> TensorDictBase:
        hashed = self.query_module.hashed(item)
        nodes = known_only(self.query_module.find(hashed)).tolist()
        found = [self._node(node) for node in nodes]
        if not hashed.batch:
            return found[0]
        stacked: TensorDictBase = LazyStackedTensorDict.maybe_dense_stack(found)
        return stacked if len(hashed.batch) == 1 else stacked.reshape(hashed.batch)

    def _node(self, node: int) -> TensorDict:
        rows = self.branches[node]
        hashes = torch.tensor([self.hashes[row] for row in rows], dtype=torch.int64)
        count = torch.tensor(self._visits[node], dtype=torch.int32)
        return TensorDict({"_index": torch.tensor(rows, dtype=torch.int64), "_hash": hashes, "count": count}, [])

    def __setitem__(self, key: TensorDictBase, value: TensorDictBase) -> None:
        raise UsageError("branches are not written one by one", hint="add rollouts with the forest's extend")

    def acyclic_from(self, start: int) -> bool:
        """Whether no path from a node leads back to where it was."""
        if self._forward:
            return True
        active, done = {start}, set[int]()
        stack = [(start, iter(self.branches[start]))]
        while stack:
            node, rows = stack[-1]
            target = next((self.targets[row] for row in rows if self.targets[row] not in done), None)
            if target is None:
                stack.pop()
                active.remove(node)
                done.add(node)
            elif target in active:
                return False
            else:
                active.add(target)
                stack.append((target, iter(self.branches[target])))
        return True
