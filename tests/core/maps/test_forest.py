"""Trees and forests against dictionaries: vertices, paths, copies and drawings of small graphs of numbered states."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack

import rbtool
from rbtool import Categorical, LazyTensorStorage, MCTSForest, QueryModule, SchemaError, TensorDictMap, Tree
from rbtool.core.maps import forest as forests

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


@pytest.fixture
def tree() -> Tree:
    """0 leads to 1, which leads to 2 by one action, and by 3 to 4 and 5, the end."""
    forest = MCTSForest()
    for steps in ([(0, 0, 1), (1, 0, 2)], [(1, 1, 3), (3, 0, 4)], [(3, 1, 5)]):
        forest.extend(rollout(steps, done=steps[-1][2] == 5))
    return forest.get_tree(state(0), compact=False)


def diamond() -> Tree:
    """0 leads to 3 by 1 and by 2; then comes 4."""
    forest = MCTSForest()
    for steps in ([(0, 1, 1), (1, 0, 3), (3, 0, 4)], [(0, 2, 2), (2, 0, 3)]):
        forest.extend(rollout(steps))
    return forest.get_tree(state(0), compact=False)


def test_vertices_by_every_key(tree: Tree) -> None:
    paths = [(), (0,), (0, 0), (0, 1), (0, 1, 0), (0, 1, 1)]
    by_path, by_id, by_hash = (tree.vertices(key_type=kind) for kind in ("path", "id", "hash"))
    assert (list(by_path), list(by_id)) == (paths, [*range(6)])
    assert list(by_hash) == [vertex.hash for vertex in by_id.values()]
    assert len(by_hash) == 6
    assert [int(vertex.node_observation) for vertex in by_path.values()] == [0, 1, 2, 3, 4, 5]
    assert tree.vertices().keys() == by_hash.keys()
    with pytest.raises(rbtool.UsageError, match="key_type is 'name'"):
        tree.vertices(key_type="name")  # type: ignore[arg-type]


def test_one_vertex(tree: Tree) -> None:
    vertex = tree.get_vertex_by_id(3)
    assert vertex.hash == tree.get_vertex_by_hash(vertex.hash).hash
    assert (vertex.branching_action.item(), vertex.prev_action.item(), vertex.num_children) == (1, 1, 2)
    assert (vertex.selected_actions.tolist(), vertex.index.tolist()) == ([0, 1], [3, 4])
    assert vertex.node_observations.keys() == {"observation"}
    assert (vertex.visits.item(), vertex.wins.item()) == (0, 0)
    assert (vertex in tree, tree in vertex, "text" in tree) == (True, False, False)


def test_vertices_without_hashes_are_in_their_own_tree_only() -> None:
    above, below, other = (Tree.make_node(state(number)) for number in (1, 2, 2))
    above.set_children([below])
    assert (above in above, below in above, above.subtree[0] in above) == (True, True, True)
    assert (other in above, above in other, above in below) == (False, False, False)


def test_a_vertex_that_is_not_there(tree: Tree) -> None:
    with pytest.raises(ValueError, match="no vertex with the id 99"):
        tree.get_vertex_by_id(99)
    with pytest.raises(ValueError, match="no vertex with the hash 99"):
        tree.get_vertex_by_hash(99)
    for path in ((1,), (0, 2), (0, 0, 0), (-2,)):
        with pytest.raises(IndexError, match="goes to child"):
            tree.rollout_from_path(path)


def test_the_root_has_neither_action_nor_parent(tree: Tree) -> None:
    assert tree.branching_action is None
    assert tree.prev_action is None
    assert tree.parent is None
    assert tree.rollout_from_path(()) is None
    assert tree.get_vertex_by_id(2).selected_actions is None


def test_the_end_of_an_episode(tree: Tree) -> None:
    found = {number: vertex.is_terminal for number, vertex in tree.vertices(key_type="id").items()}
    assert found == {0: False, 1: False, 2: False, 3: False, 4: False, 5: True}
    assert Tree.make_node(state(0)).is_terminal


def test_paths_and_edges(tree: Tree) -> None:
    assert list(tree.valid_paths()) == [(0, 0), (0, 1, 0), (0, 1, 1)]
    assert MCTSForest.valid_paths(tree) == [(0, 0), (0, 1, 0), (0, 1, 1)]
    assert tree.edges() == [(0, 1), (1, 2), (1, 3), (3, 4), (3, 5)]
    assert (tree.max_length(), tree.num_vertices()) == (3, 6)
    assert tree.rollout_from_path((0, 1, 1))["next", "observation"].tolist() == [1, 3, 5]


def test_parents(tree: Tree) -> None:
    vertex = tree.subtree[0].subtree[1]
    assert vertex.parent.node_id == 1
    assert vertex.parent.parent.node_id == 0
    alone = diamond().get_vertex_by_id(5)
    assert alone.parent is None


def test_a_vertex_that_is_reached_in_two_ways() -> None:
    tree = diamond()
    assert (tree.num_vertices(), tree.num_vertices(count_repeat=True)) == (6, 7)
    assert tree.edges() == [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)]
    vertex = tree.get_vertex_by_id(5)
    assert [parent.node_id for parent in vertex.parent.unbind(0)] == [3, 4]
    vertex.count += 3
    assert tree.subtree[1].subtree[0].subtree[0].visits.item() == 3


def test_fully_expanded(tree: Tree) -> None:
    for actions, expanded in ((2, True), (3, False)):
        env = SimpleNamespace(action_spec=Categorical(actions))
        assert tree.get_vertex_by_id(3).fully_expanded(env) is expanded


def test_a_tree_of_your_own() -> None:
    tree = Tree.make_node(TensorDict(observation=torch.tensor(1)))
    below = [Tree.make_node(TensorDict(observation=torch.tensor(number))) for number in (3, 4)]
    tree.set_children(below)
    assert tree.subtree[1].parent.node_observation.item() == 1
    assert list(tree.vertices(key_type="id")) == [(), (0,), (1,)]
    assert tree.to_string(lambda vertex: int(vertex.node_observation)) == "(0,) 3\n(1,) 4"
    tree.set_children([])
    assert tree.num_children == 0
    batch = Tree.make_node(TensorDict(observation=torch.zeros(3, 2), batch_size=3))
    assert (batch.batch_size, batch.visits.tolist()) == ((3,), [0, 0, 0])


@pytest.mark.parametrize("stacked", [lazy_stack, torch.stack])
def test_children_that_are_assigned_know_their_parent(stacked: Any) -> None:
    tree, *below = (Tree.make_node(TensorDict(observation=torch.tensor(number))) for number in (1, 3, 4))
    tree.subtree = stacked(below)
    assert [tree.subtree[number].parent.node_observation.item() for number in (0, 1)] == [1, 1]
    if stacked is lazy_stack:  # the other one copies them
        assert [child.parent.node_observation.item() for child in below] == [1, 1]
    tree.count = torch.tensor(7)
    assert tree.subtree[1].parent.visits.item() == 7
    assert tree.parent is None
    tree.subtree = None
    assert tree.num_children == 0
    del tree
    assert below[0].parent is None  # the reference is weak
    assert Tree(_parent=None).parent is None


@pytest.mark.parametrize("compact", [True, False])
def test_trees_below_a_state_are_in_trees_that_pass_it(compact: bool) -> None:
    forest = forest_of([(0, 1, 5), (5, 1, 6), (6, 2, 7), (7, 1, 8)], [(6, 3, 9)], [(20, 1, 6)])
    whole = forest.get_tree(state(0), compact=compact)
    for number in (0, 5, 6, 7, 8, 9):  # 5 and 7 are no vertices of a compact tree
        assert forest.get_tree(state(number), compact=compact) in whole
    assert all(vertex in whole for vertex in whole.vertices().values())
    assert forest.get_tree(state(20), compact=compact) not in whole
    assert whole not in forest.get_tree(state(5), compact=compact)
    other = forest_of([(5, 4, 6), (6, 2, 8)]).get_tree(state(5), compact=False)
    assert (other.subtree[0] in whole, other.subtree[0].subtree[0] in whole) == (False, True)  # by the first step


def test_trees_are_copied_and_pickled(tree: Tree) -> None:
    for copy in (tree.clone(), pickle.loads(pickle.dumps(tree))):
        assert shape_of(copy) == shape_of(tree)
        copy.subtree[0].count += 1
        assert tree.subtree[0].visits.item() == 0


# Pictures ------------------------------------------------------------------------------------------


def parts_of(svg: str) -> tuple[ElementTree.Element, dict[str, int]]:
    """Read a picture; count its elements."""
    root = ElementTree.fromstring(svg)
    kinds = [element.tag.rpartition("}")[2] for element in root.iter()]
    return root, {kind: kinds.count(kind) for kind in kinds}


@pytest.mark.parametrize(("figure", "drawn"), [("tree", {"circle": 6, "line": 5}), ("box", {"rect": 6})])
def test_a_picture_has_every_vertex_and_step(tree: Tree, figure: Any, drawn: dict[str, int]) -> None:
    svg = tree.plot(figure=figure)
    root, counts = parts_of(svg)
    assert {kind: counts[kind] for kind in drawn} == drawn
    texts = [(element.text or "").removeprefix("action: ") for element in root.iter() if element.tag.endswith("text")]
    assert sorted(texts) == sorted([*"012345", *"00101"])
    assert svg._repr_svg_() == svg


@pytest.mark.parametrize("figure", ["tree", "box"])
def test_nothing_is_drawn_outside_or_twice_in_one_place(tree: Tree, figure: Any) -> None:
    root, _ = parts_of(tree.plot(figure=figure))
    kind, names = ("circle", ("cx", "cy")) if figure == "tree" else ("rect", ("x", "y"))
    shapes = [element for element in root.iter() if element.tag.endswith(kind)]
    places = [tuple(float(shape.get(name, "nan")) for name in names) for shape in shapes]
    assert all(0 < x < float(root.get("width", 0)) and 0 < y < float(root.get("height", 0)) for x, y in places)
    assert len({*places}) == len(places)


def test_labels_of_your_own(tree: Tree) -> None:
    svg = tree.plot(make_labels=lambda vertex: f"<{int(vertex.node_observation)}> & more", info=["visits", "index"])
    texts = [element.text for element in parts_of(svg)[0].iter() if element.tag.endswith("text")]
    assert "<4> & more" in texts
    assert "visits: 0" in texts
    assert "index: [1, 2]" in texts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "plotly"}, "expected 'svg'"),
        ({"figure": "star"}, "figure is 'star'"),
        ({"info": ["colour"]}, "info has 'colour'"),
    ],
)
def test_pictures_of_nonsense(tree: Tree, options: dict[str, Any], message: str) -> None:
    with pytest.raises(rbtool.UsageError, match=message):
        tree.plot(**options)


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


def test_saved_trees_are_found_where_their_class_is_in_another_module_by_now() -> None:
    saved, target = LazyTensorStorage(1), LazyTensorStorage(1)
    saved.set(range(1), forest_of([(0, 1, 1), (1, 1, 2)]).get_tree(state(0))[None])
    state_dict = saved.state_dict()
    assert state_dict["_structure"]["class"].endswith(":Tree")
    for module, found in (("trees.forest", False), ("rbtool.core.trees.forest", True), ("rbtool.core.errors", True)):
        state_dict["_structure"]["class"] = f"{module}:Tree"
        with contextlib.nullcontext() if found else pytest.raises(SchemaError, match="is not imported"):
            target.load_state_dict(state_dict)
    assert isinstance(target[:], Tree)


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
