"""Forests, and the trees made of them."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_rollouts import OracleForest, rollout, shape_of, state
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import rbtool
from rbtool import MCTSForest, QueryModule, TensorDictMap
from rbtool.core.trees import forest as forests

# The tree that the reference shows: lists of actions and the states that they lead to, all from state 0.
SHOWN = [
    [(3, 123), (1, 456)],
    [(2, 359), (2, 3094)],
    [(3, 123), (9, 392), (6, 989), (20, 809), (21, 847)],
    [(1, 75)],
    [(3, 123), (0, 948)],
    [(2, 359), (2, 3094), (10, 68)],
    [(2, 359), (2, 3094), (11, 9045)],
]


TEXT = """\
(0,) {'observation': tensor(123)}
 (0, 0) {'observation': tensor(456)}
 (0, 1) {'observation': tensor(847)}
 (0, 2) {'observation': tensor(948)}
(1,) {'observation': tensor(3094)}
 (1, 0) {'observation': tensor(68)}
 (1, 1) {'observation': tensor(9045)}
(2,) {'observation': tensor(75)}"""


def forest_of(*rollouts: list[tuple[int, int, int]], **options: Any) -> MCTSForest:
    forest = MCTSForest(**options)
    for steps in rollouts:
        forest.extend(rollout(steps))
    return forest


def test_the_example_of_the_reference() -> None:
    forest = MCTSForest()
    td_root = TensorDict({"observation": 0})
    for rollout_data in SHOWN:
        td = td_root.clone().unsqueeze(0)
        for action, obs in rollout_data:
            after = TensorDict({"observation": [obs]}, [1])
            td = td.update(TensorDict({"action": [action], "next": after}, [1]))
            forest.extend(td)
            td = td["next"].clone()
    assert forest.to_string(td_root) == TEXT
    assert forest.get_tree(td_root).to_string() == TEXT


def test_rollouts_that_begin_alike_share_their_steps() -> None:
    forest = MCTSForest()
    obs0, obs1 = torch.tensor([0, 123, 392, 989, 809, 847]), torch.tensor([0, 123, 392, 235, 38])
    for actions, obs in ((torch.tensor([1, 2, 3, 4, 5]), obs0), (torch.tensor([1, 2, 6, 7]), obs1)):
        steps = {"action": actions, "next": {"observation": obs[1:]}, "observation": obs[:-1]}
        forest.extend(TensorDict(steps, [len(actions)]))
    tree = forest.get_tree(TensorDict(observation=torch.tensor(0)))
    assert (tree.rollout.batch_size, tree.num_children, tree.num_vertices()) == ((2,), 2, 3)
    assert tree.edges() == [(0, 1), (0, 2)]
    assert tree.node_observation.item() == 392
    assert tree.rollout_from_path((1,))["action"].tolist() == [1, 2, 6, 7]
    assert len(forest) == 7


@st.composite
def walks(draw: st.DrawFn, states: int = 4, actions: int = 2) -> list[list[tuple[int, int, int]]]:
    """Rollouts of one random deterministic environment, with cycles, repeats and states on several paths."""
    table = draw(st.lists(st.integers(0, states - 1), min_size=states * actions, max_size=states * actions))
    found = []
    for start, chosen in draw(
        st.lists(
            st.tuples(st.integers(0, states - 1), st.lists(st.integers(0, actions - 1), min_size=1, max_size=6)),
            min_size=1,
            max_size=5,
        )
    ):
        steps, at = [], start
        for action in chosen:
            steps.append((at, action, table[at * actions + action]))
            at = steps[-1][2]
        found.append(steps)
    return found


@settings(max_examples=60, deadline=None)
@given(rollouts=walks(), compact=st.booleans(), max_depth=st.sampled_from([None, 0, 1, 2]))
def test_trees_are_those_that_dictionaries_make(rollouts: Any, compact: bool, max_depth: int | None) -> None:
    forest, oracle = MCTSForest(), OracleForest()
    for steps in rollouts:
        forest.extend(rollout(steps))
        oracle.extend(steps)
        assert len(forest) == len(oracle)
    for root in {step[0] for steps in rollouts for step in steps} | {rollouts[-1][-1][2]}:
        tree = forest.get_tree(state(root), compact=compact, max_depth=max_depth)
        assert shape_of(tree) == oracle.tree(root, compact=compact, max_depth=max_depth)


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=5))
def test_every_outcome_is_a_branch_where_they_are_random(steps: Any) -> None:
    forest, oracle = MCTSForest(stochastic=True), OracleForest()
    forest.extend(rollout(steps))
    oracle.extend(steps)
    assert shape_of(forest.get_tree(state(steps[0][0]))) == oracle.tree(steps[0][0], compact=True, max_depth=None)


@pytest.mark.parametrize(
    "steps",
    [[(0, 1, 9)], [(5, 5, 6), (0, 1, 9)], [(7, 1, 8), (7, 1, 9)]],
    ids=["known step", "after a new step", "within one rollout"],
)
def test_a_step_that_contradicts_a_known_one_adds_nothing(steps: list[tuple[int, int, int]]) -> None:
    forest = forest_of([(0, 1, 2)])
    with pytest.raises(rbtool.SchemaError, match="has another next observation"):
        forest.extend(rollout(steps))
    assert len(forest) == 1
    with pytest.raises(KeyError):
        forest.get_tree(state(5))
    forest.extend(rollout([(5, 5, 6)]))
    assert forest.to_string(state(5)) == "() {'observation': tensor(6)}"


def test_known_steps_change_nothing_but_visits() -> None:
    forest = forest_of([(0, 1, 2), (2, 1, 3)])
    again = rollout([(0, 1, 2), (0, 1, 2)])
    again["next", "reward"].fill_(-1)
    forest.extend(again)
    assert forest.get_tree(state(0)).rollout["next", "reward"].tolist() == [[2], [3]]
    assert forest.node_map[state(0)]["count"].item() == 3


def test_the_maps_of_a_forest() -> None:
    forest = forest_of([(0, 1, 1), (1, 3, 3)], [(0, 2, 2), (0, 1, 1)])
    metadata = forest.node_map[state(0)]
    assert metadata["_index"].tolist() == [0, 2]
    assert forest.data_map[metadata["_index"]]["next", "observation"].tolist() == [1, 2]
    key = rollout([(0, 2, 2)])
    assert forest.data_map[key]["next", "observation"].tolist() == [2]
    ragged = forest.node_map[TensorDict(observation=torch.tensor([0, 1, 2]), batch_size=3)]
    assert [row["_index"].tolist() for row in ragged.unbind(0)] == [[0, 2], [1], []]
    assert forest.node_map.contains(TensorDict(observation=torch.tensor([0, 9]), batch_size=2)).tolist() == [
        True,
        False,
    ]
    assert forest.get_child(state(0))["action"].tolist() == [1, 2]
    with pytest.raises(rbtool.UsageError, match="cannot be written one by one"):
        forest.node_map[state(0)] = state(0)


def test_a_cleared_node_map_is_empty() -> None:
    nodes = forest_of([(0, 1, 1), (1, 1, 0)]).node_map
    nodes.clear()
    assert (len(nodes), nodes.contains(state(0)).item()) == (0, False)


def test_a_tree_keeps_its_root_when_the_state_changes() -> None:
    forest, root = forest_of([(0, 1, 1)], [(0, 2, 2)]), state(0)
    tree = forest.get_tree(root)
    root["observation"].fill_(9)
    assert tree.node_observation.item() == 0


def test_one_step_and_several_rollouts_at_once() -> None:
    forest, steps = MCTSForest(), rollout([(0, 1, 1), (1, 1, 2), (0, 2, 3), (3, 1, 4)])
    forest.add(steps[0])
    forest.extend(steps.reshape(2, 2))
    assert [len(forest), list(forest.get_tree(state(0)).valid_paths())] == [4, [(0,), (1,)]]


def test_the_vertex_after_a_rollout() -> None:
    forest = forest_of([(2, 1, 3), (3, 1, 4)], [(2, 2, 5)])
    node = forest.extend(rollout([(0, 1, 1), (1, 1, 2)]), return_node=True)
    assert node is not None
    assert node.rollout["observation"].tolist() == [0, 1]
    assert (node.node_observation.item(), node.num_children) == (2, 2)
    assert node.subtree[0].rollout["next", "observation"].tolist() == [3, 4]
    assert forest.add(rollout([(9, 1, 8)])[0], return_node=True).node_observation.item() == 8


def test_other_keys() -> None:
    forest = MCTSForest(observation_keys=["x", ("deep", "y")], action_keys=["left", "right"], excluded_keys=["z"])
    x, y = torch.tensor([[0.0], [1], [2]]), torch.tensor([5, 5, 6])
    ends = TensorDict({"x": x[1:], "deep": {"y": y[1:]}}, [2])
    steps = TensorDict({"x": x[:2], "deep": {"y": y[:2]}, "z": y[:2], "left": y[:2], "right": x[:2], "next": ends}, [2])
    forest.extend(steps)
    tree = forest.get_tree(steps[0], compact=False)
    assert tree.node_observation["deep", "y"].item() == 5
    assert tree.subtree[0].branching_action.keys() == {"left", "right"}
    assert "z" not in tree.subtree[0].rollout
    assert tree.selected_actions["left"].tolist() == [5]


@pytest.mark.parametrize("key", ["z", ("next", "z"), ("info", "z")])
def test_excluded_keys_are_not_stored_under_next_either(key: Any) -> None:
    steps = rollout([(0, 1, 1), (1, 1, 2)])
    entries = TensorDict({"z": torch.zeros(2), "info": {"z": torch.zeros(2), "kept": torch.ones(2)}}, [2])
    steps.update(entries)
    steps["next"].update(entries.clone())
    forest = MCTSForest(excluded_keys=[key])
    forest.extend(steps)
    stored = forest.get_tree(state(0)).rollout
    expected = steps.exclude(key, ("next", *([key] if isinstance(key, str) else key)))
    assert set(stored.keys(True, True)) == set(expected.keys(True, True))


def test_keys_of_an_environment() -> None:
    env = SimpleNamespace(action_keys=["move"], reward_keys=["r"], done_keys=["over"], observation_keys=["pixels"])
    forest = MCTSForest(action_keys=["given"])
    forest.get_keys_from_env(env)
    assert (forest.action_keys, forest.reward_keys) == (["given"], ["r"])
    assert (forest.done_keys, forest.observation_keys) == (["over"], ["pixels"])
    with pytest.raises(rbtool.UsageError, match="cannot change"):
        forest_of([(0, 1, 2)]).get_keys_from_env(env)
    with pytest.raises(rbtool.UsageError, match="the int has none of an environment's keys"):
        MCTSForest().get_keys_from_env(3)


def test_flags_of_other_names_end_a_vertex() -> None:
    forest = MCTSForest(done_keys=["over"])
    steps = rollout([(0, 1, 2), (2, 1, 3)])
    steps["next", "over"] = torch.tensor([[False], [True]])
    forest.extend(steps)
    assert forest.get_tree(state(0)).is_terminal is True


def test_maps_of_your_own() -> None:
    data_map = TensorDictMap.from_tensordict_pair(
        rollout([(0, 0, 0)]), rollout([(0, 0, 0)]), in_keys=["observation", "action"], max_size=3
    )
    nodes = TensorDictMap.from_tensordict_pair(state(0)[None], state(0)[None], in_keys=["observation"])
    forest = MCTSForest(data_map=data_map, node_map=nodes)
    assert forest.max_size == 3
    forest.extend(rollout([(0, 1, 1), (1, 1, 2)]))
    assert (len(data_map), len(forest.node_map)) == (2, 3)
    with pytest.raises(rbtool.SchemaError, match="found 4 different keys, but the map has room for 3"):
        forest.extend(rollout([(2, 1, 3), (3, 1, 4)]))
    assert (len(forest), len(forest.node_map)) == (2, 3)
    data_map[rollout([(7, 7, 7)])] = rollout([(7, 7, 7)])
    with pytest.raises(rbtool.SchemaError, match="entries that the forest did not write"):
        forest.extend(rollout([(2, 1, 3)]))


@pytest.mark.parametrize("compact", [True, False])
def test_long_rollouts(compact: bool) -> None:
    steps = [(number, 0, number + 1) for number in range(300)]
    forest = forest_of(steps, [(300, 0, 301), (150, 1, 400)])
    tree = forest.get_tree(state(0), compact=compact)
    assert tree.max_length() == (1 if compact else 301)
    assert max(len(tree.rollout_from_path(path)) for path in tree.valid_paths()) == 301
    assert len(forest_of([(number, 0, number + 1) for number in range(3000)])) == 3000


def test_states_on_many_paths_are_one_vertex() -> None:
    steps = [(at, action, at + 1 + action) for at in range(0, 60, 3) for action in (0, 1)]
    steps += [(at + 1 + action, 0, at + 3) for at in range(0, 60, 3) for action in (0, 1)]
    forest = forest_of(steps)
    vertices = forests.grow(forest.node_map, 0, None, max_depth=None, compact=False)
    assert len(vertices) == len(forest) + 1 == 81


def test_a_tree_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forests, "_MOST", 500)
    forest = forest_of([(at, action, (at + action) % 4) for at in range(4) for action in range(4)])
    with pytest.raises(rbtool.SchemaError, match="the tree has more than 500 vertices"):
        forest.get_tree(state(0))
    assert forest.get_tree(state(0), max_depth=1).num_children == 4


def test_a_forest_is_pickled() -> None:
    forest = forest_of([(0, 1, 1), (1, 1, 2)], [(0, 2, 3)])
    copy = pickle.loads(pickle.dumps(forest))
    copy.extend(rollout([(1, 2, 5)]))
    assert (len(copy), len(forest)) == (4, 3)
    assert copy.to_string(state(0)).splitlines()[-1] == "(1,) {'observation': tensor(3)}"


@pytest.mark.parametrize(
    ("given_rollout", "kind", "message"),
    [
        (rollout([(0, 1, 2)])[0], rbtool.UsageError, "whose last dimension counts steps"),
        (rollout([(0, 1, 2)]).exclude("action"), rbtool.MissingKeyError, "no entry 'action'"),
        (rollout([(0, 1, 2)]).exclude("next"), rbtool.MissingKeyError, r"no entry \('next', 'observation'\)"),
        (rollout([(0, 1, 2)])[:0], rbtool.SchemaError, "has no steps"),
        (rollout([(0, 1, 2)]).apply(torch.Tensor.double), rbtool.SchemaError, "'observation' is torch.float64"),
    ],
)
def test_rollouts_that_cannot_be_added(given_rollout: TensorDict, kind: type[Exception], message: str) -> None:
    forest = forest_of([(0, 1, 2)])
    with pytest.raises(kind, match=message):
        forest.extend(given_rollout)
    assert (len(forest), len(forest.node_map)) == (1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_size": 5}, "max_size is 5, but the data map has 3"),
        ({"observation_keys": "pixels"}, "keys is 'pixels', expected a list"),
    ],
)
def test_forests_of_nonsense(options: dict[str, Any], message: str) -> None:
    storage = rbtool.LazyTensorStorage(3)
    data_map = TensorDictMap(query_module=QueryModule(in_keys=["observation", "action"]), storage=storage)
    with pytest.raises(ValueError, match=message):
        MCTSForest(data_map=data_map, **options)


@pytest.mark.parametrize(
    ("root", "options", "kind", "message"),
    [
        (state(7), {}, KeyError, "no rollout of the forest has this state"),
        (rollout([(0, 1, 2), (0, 1, 2)]), {}, ValueError, "of batch size"),
        (torch.tensor(0), {}, ValueError, "of batch size"),
        (state(0), {"max_depth": -1}, ValueError, "max_depth is -1"),
    ],
)
def test_roots_that_are_not_there(root: Any, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        forest_of([(0, 1, 2)]).get_tree(root, **options)
    with pytest.raises(KeyError, match="the forest is empty"):
        MCTSForest().get_tree(state(0))
