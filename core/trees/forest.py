"""Forests: the rollouts that start anywhere, stored as steps, from which trees are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection, unravel_key

from ..errors import MissingKeyError, SchemaError, UsageError
from ..maps.query import Hashed, Key, QueryModule
from ..maps.tensordict_map import TensorDictMap
from ..specs.composite import Composite
from .growing import grow, planted
from .node_map import NodeMap
from .tree import Path, Tree

_DONE: tuple[Key, ...] = ("done", "terminated", "truncated")


class MCTSForest:
    """Collects rollouts, and makes trees of all that was tried from a state on.

    `extend(rollout)` adds steps in TED. Each pair of observation and action is stored once, so rollouts that begin
    alike share their first steps, and rollouts that start at a state of another one continue it. `get_tree(state)`
    returns the tree of the steps from a state on, `len(forest)` the number of steps.

    `data_map` (from observation and action to the step) and `node_map` (from an observation to the rows of the steps
    that start there) are made from the first rollout. A `data_map` of your own is used as it is; of an empty
    `TensorDictMap` given as `node_map` the query module is used. `max_size` bounds the number of steps; without it
    the forest grows. `excluded_keys` of rollouts are not stored, also under `next`; `consolidated` puts the entries of
    steps into one buffer. Keys that are not given are "observation", "action", "reward" and "done", "terminated",
    "truncated".

    A pair of observation and action leads to one next observation: a step that contradicts this raises SchemaError (a
    RuntimeError), and nothing of its rollout is added. With `stochastic` every outcome is a step of its own.

    Ideas and names are those of TorchRL; there a later outcome replaces the earlier one.

    >>> from tensordict import TensorDict
    >>> forest = MCTSForest()
    >>> for actions, states in (([1, 2], [0, 5, 7]), ([1, 3], [0, 5, 9])):
    ...     path = torch.tensor(states)
    ...     steps = {"observation": path[:-1], "action": torch.tensor(actions), "next": {"observation": path[1:]}}
    ...     forest.extend(TensorDict(steps, [2]))
    >>> print(forest.to_string(TensorDict(observation=torch.tensor(0))))
    () {'observation': tensor(5)}
    (0,) {'observation': tensor(7)}
    (1,) {'observation': tensor(9)}
    """

    def __init__(
        self,
        *,
        data_map: TensorDictMap | None = None,
        node_map: NodeMap | TensorDictMap | None = None,
        max_size: int | None = None,
        done_keys: Sequence[Key] | None = None,
        reward_keys: Sequence[Key] | None = None,
        observation_keys: Sequence[Key] | None = None,
        action_keys: Sequence[Key] | None = None,
        excluded_keys: Sequence[Key] | None = None,
        consolidated: bool | None = None,
        stochastic: bool = False,
    ) -> None:
        known = None if data_map is None else data_map.max_size
        if data_map is not None and max_size not in (None, known):
            raise UsageError(f"max_size is {max_size}, that of the data map is {known}")
        if node_map is not None and len(node_map):
            raise UsageError(f"the node map has {len(node_map)} entries, expected none")
        if data_map is not None and len(data_map):
            raise UsageError(f"the data map has {len(data_map)} entries, expected none")
        self.data_map = data_map
        self.node_map = NodeMap(node_map.query_module) if isinstance(node_map, TensorDictMap) else node_map
        self.max_size = known if max_size is None else max_size
        self._keys: dict[str, list[Key] | None] = {
            "done": _listed(done_keys), "reward": _listed(reward_keys),
            "observation": _listed(observation_keys), "action": _listed(action_keys),
        }  # fmt: skip
        self.excluded_keys = _listed(excluded_keys) or []
        self.consolidated = consolidated
        self.stochastic = stochastic

    @property
    def done_keys(self) -> list[Key]:
        """The keys of the flags that end an episode."""
        return self._keys["done"] or list(_DONE)

    @property
    def reward_keys(self) -> list[Key]:
        """The keys of rewards."""
        return self._keys["reward"] or ["reward"]

    @property
    def observation_keys(self) -> list[Key]:
        """The keys that make up a state."""
        return self._keys["observation"] or ["observation"]

    @property
    def action_keys(self) -> list[Key]:
        """The keys that make up an action."""
        return self._keys["action"] or ["action"]

    def get_keys_from_env(self, env: Any) -> None:
        """Take the keys that were not given from an environment: its `done_keys`, `reward_keys` and so on.

        UsageError (a ValueError) for what has none of them, and for a forest that has steps.
        """
        if len(self):
            raise UsageError("the keys of a forest cannot change once it has steps")
        if not any(hasattr(env, f"{name}_keys") for name in self._keys):
            raise UsageError(f"the {type(env).__name__} has no keys of an environment, such as action_keys")
        for name, keys in self._keys.items():
            found = getattr(env, f"{name}_keys", None)
            if keys is None and found:
                self._keys[name] = _listed(found)

    def __len__(self) -> int:
        return 0 if self.data_map is None else len(self.data_map)

    # Adding ----------------------------------------------------------------------------------------

    def extend(self, rollout: TensorDictBase, *, return_node: bool = False) -> Tree | None:
        """Add the steps of a rollout, `[steps]`, or of several, `[rollouts, steps]`; known steps change nothing.

        With `return_node` the vertex after the last step is returned, whose `rollout` is the one that was added.
        MissingKeyError (a KeyError) where observation, action or next observation is not there, SchemaError (a
        RuntimeError) for steps that differ in kind, that contradict a known one, and beyond `max_size`; then nothing
        is added.
        """
        if not is_tensor_collection(rollout) or not rollout.batch_dims:
            raise UsageError("a rollout is a tensordict whose last dimension counts steps", hint="add takes one step")
        excluded = [*self.excluded_keys, *_below_next(self.excluded_keys)]
        steps = rollout.reshape(math.prod(rollout.batch_size)).exclude("_index", "_hash", *excluded)
        self._require(steps)
        if not len(steps):
            raise SchemaError("the rollout has no steps")
        data_map, nodes = self._maps(steps)
        if len(data_map) != len(nodes.targets) or len(data_map.query_module) != len(data_map):
            raise SchemaError("the data map has entries that the forest did not write")
        queries = nodes.query_module
        count = len(queries)
        try:
            starts = queries.add(queries.hashed(steps)).tolist()
            targets = queries.add(queries.hashed(steps["next"])).tolist()
            hashed = data_map.query_module.hashed(steps)
            new = self._new(hashed, data_map.query_module.find(hashed).tolist(), targets, nodes)
            if new:
                added = steps if len(new) == len(steps) else steps[new]
                data_map[added.copy()] = added
        except BaseException:
            queries.truncate(count)
            raise
        rows = data_map.query_module.find(hashed)
        nodes.connect(starts, targets, rows.tolist(), hashed.hashes.tolist())
        if not return_node:
            return None
        state = steps[-1]["next"].select(*self.observation_keys)
        return self._tree(state, targets[-1], rows.tolist())

    def add(self, step: TensorDictBase, *, return_node: bool = False) -> Tree | None:
        """Add one step, a tensordict of batch size `[]`; see `extend`."""
        return self.extend(step.unsqueeze(0), return_node=return_node)

    def _require(self, steps: TensorDictBase) -> None:
        for key in (*self.observation_keys, *self.action_keys, *_below_next(self.observation_keys)):
            if steps.get(key, None) is None:
                raise MissingKeyError(
                    f"the rollout has no entry {key!r}; its keys are {list(steps.keys(True, True))}",
                    hint="name those of this environment with observation_keys and action_keys",
                )

    def _maps(self, steps: TensorDictBase) -> tuple[TensorDictMap, NodeMap]:
        if self.node_map is None:
            self.node_map = NodeMap(QueryModule(in_keys=self.observation_keys))
        if self.data_map is None:
            keys = [
                *self.observation_keys,
                *self.action_keys,
                *(_below_next(self.observation_keys) if self.stochastic else ()),
            ]
            self.data_map = TensorDictMap.from_tensordict_pair(
                steps, steps, in_keys=keys, max_size=self.max_size, consolidated=self.consolidated
            )
        return self.data_map, self.node_map

    def _new(self, hashed: Hashed, rows: list[int], targets: list[int], nodes: NodeMap) -> list[int]:
        """Return which steps are new, each once; SchemaError for one that leads to two observations."""
        found: dict[bytes, int] = {}
        new: list[int] = []
        for number, (row, target) in enumerate(zip(rows, targets, strict=True)):
            known = found.setdefault(hashed.keys[number].tobytes(), target) if row < 0 else nodes.targets[row]
            if known != target:
                raise SchemaError(
                    f"step {number} leads to another observation than the same observation and action did before",
                    hint="use stochastic=True to keep every outcome",
                )
            if row < 0 and len(found) > len(new):
                new.append(number)
        return new

    # Trees -----------------------------------------------------------------------------------------

    def get_tree(self, root: TensorDictBase, *, max_depth: int | None = None, compact: bool = True) -> Tree:
        """Return the tree of all steps from the state in `root` on, a tensordict of batch size `[]`.

        In a compact tree, states with a single branch are no vertices of their own. Vertices more than `max_depth`
        levels below the root have no children. No path repeats a step: where a rollout came back to a state, the tree
        continues with the steps that are not on the path yet; such a tree may be large, and SchemaError is raised
        beyond 100,000 vertices. MissingKeyError (a KeyError) for a state that no rollout has.
        """
        if not is_tensor_collection(root) or math.prod(root.batch_size) != 1:
            raise UsageError("the root of a tree is a tensordict with one state, of batch size []")
        if max_depth is not None and max_depth < 0:
            raise UsageError(f"max_depth is {max_depth}; expected a whole number from 0")
        return self._tree(root.reshape(()), self._node(root), None, max_depth=max_depth, compact=compact)

    def _node(self, root: TensorDictBase) -> int:
        if self.node_map is None:
            raise MissingKeyError("the forest is empty: no rollout was added")
        queries = self.node_map.query_module
        node = int(queries.find(queries.hashed(root)))
        if node < 0:
            raise MissingKeyError("no rollout of the forest has this state")
        return node

    def _tree(
        self,
        root: TensorDictBase,
        node: int,
        steps: list[int] | None,
        *,
        max_depth: int | None = None,
        compact: bool = True,
    ) -> Tree:
        """Make the tree below a node, whose root has these steps for its rollout."""
        assert self.data_map is not None
        assert self.node_map is not None
        vertices = grow(self.node_map, node, steps, max_depth=max_depth, compact=compact)
        return planted(
            vertices, self.data_map, self.node_map, root.select(*self.observation_keys).clone(), self.observation_keys,
            self._specs(),
        )  # fmt: skip

    def _specs(self) -> Any:
        """The specs of vertices, None where the keys are the usual ones."""
        if self.action_keys == ["action"] and self.done_keys == list(_DONE):
            return None
        named = {"full_action_spec": self.action_keys, "full_done_spec": self.done_keys}
        return Composite({name: Composite(dict.fromkeys(keys)) for name, keys in named.items()})

    def get_child(self, root: TensorDictBase) -> TensorDictBase:
        """Return the steps that start at the state in `root`, `[branches]`; KeyError for an unknown one."""
        node = self._node(root)
        assert self.data_map is not None
        assert self.node_map is not None
        return self.data_map[torch.tensor(self.node_map.branches[node], dtype=torch.int64)]

    @staticmethod
    def valid_paths(tree: Tree) -> list[Path]:
        """Return the paths to the vertices of a tree that have no children."""
        return list(tree.valid_paths())

    def to_string(self, td_root: TensorDictBase, node_format_fn: Callable[[Tree], Any] | None = None) -> str:
        """Return the compact tree below a state as text; see `Tree.to_string`."""
        return self.get_tree(td_root).to_string(node_format_fn)


def _listed(keys: Sequence[Key] | None) -> list[Key] | None:
    if isinstance(keys, str):
        raise UsageError(f"keys is {keys!r}, expected a list")
    return None if keys is None else [unravel_key(key) for key in keys]


def _below_next(keys: Sequence[Key]) -> list[Key]:
    return [unravel_key(("next", key)) for key in keys]
