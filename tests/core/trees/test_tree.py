"""Trees: vertices, paths, copies and drawings."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from graph_rollouts import rollout, shape_of, state
from tensordict import TensorDict

import rbtool
from rbtool import Categorical, MCTSForest, Tree


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
