"""Forests: rollouts from any states, stored as steps and as a graph of states, and the search trees built from them.

Rollouts that pass through the same state share it. Steps are rows of the data map. The node map numbers the states, and
lists the steps ("branches") that start at each state:

    rollouts                  graph of states                 compact tree from s0

    s0 -a-> s1 -b-> s2        s0 -a-> s1 -b-> s2              s1, rollout [a]
    s0 -a-> s1 -c-> s3                  -c-> s3 -d-> s4         (0,)  s2, rollout [b]
    s3 -d-> s4                                                  (1,)  s4, rollout [c, d]

In a compact tree, a state with a single branch is not a vertex: its step belongs to the rollout of the vertex below. A
tree holds everything that was tried from one state on. It can be shown as text or SVG.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args
from xml.sax.saxutils import escape

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, TensorDictBase, is_tensor_collection, unravel_key

from ..errors import MissingKeyError, SchemaError, UsageError, require_flags
from ..specs.composite import Composite
from .tensordict_map import Hashed, Key, QueryModule, TensorDictMap, TensorMap, known_only, row_bytes

Figure = Literal["tree", "box"]

_WIDTH, _HEIGHT, _MARGIN, _LINE = 96, 84, 30, 13
_RADIUS = 16

# Attributes instead of a style sheet, which some viewers ignore, and which would affect other pictures in a notebook.
_LABELS = 'font-family="sans-serif" font-size="11" text-anchor="middle" fill="#222"'
_ACTIONS = 'font-family="sans-serif" font-size="10" text-anchor="start" fill="#666"'
_STEPS = 'stroke="#999"'
_VERTICES = 'fill="#dce8f5" stroke="#4a78a8"'


class Shape(NamedTuple):
    """A vertex to draw: its path, the lines of its label, the label of the step to it, and its number of children."""

    path: tuple[int, ...]
    lines: tuple[str, ...]
    action: str
    children: int


class Drawing(str):
    """SVG text, which notebooks show as a picture."""

    def _repr_svg_(self) -> str:
        return str(self)


def draw(shapes: Sequence[Shape], figure: Figure) -> Drawing:
    """Draw vertices, given level by level from the root."""
    if figure not in get_args(Figure):
        raise UsageError(f"figure is {figure!r}, expected 'tree' or 'box'")
    spans = _spans(shapes)
    depth = max(len(shape.path) for shape in shapes)
    width = _WIDTH * spans[()][1] + 2 * _MARGIN
    height = _HEIGHT * (depth + 1) + 2 * _MARGIN
    parts = _boxes(shapes, spans) if figure == "box" else _circles(shapes, spans)
    body = "\n".join(parts)
    return Drawing(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'style="background:#fff">\n{body}\n</svg>\n'
    )


def _spans(shapes: Sequence[Shape]) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return for each path the number of the first leaf below its vertex, and how many leaves it has (1 for a leaf)."""
    sizes = {shape.path: 0 if shape.children else 1 for shape in shapes}
    for shape in reversed(shapes):
        if shape.path:
            sizes[shape.path[:-1]] += sizes[shape.path]
    spans: dict[tuple[int, ...], tuple[int, int]] = {(): (0, sizes[()])}
    for shape in shapes:
        start = spans[shape.path][0]
        for number in range(shape.children):
            below = (*shape.path, number)
            spans[below] = (start, sizes[below])
            start += sizes[below]
    return spans


def _circles(shapes: Sequence[Shape], spans: dict[tuple[int, ...], tuple[int, int]]) -> list[str]:
    places = {
        path: (_MARGIN + _WIDTH * (start + count / 2), _MARGIN + _HEIGHT * (len(path) + 0.5))
        for path, (start, count) in spans.items()
    }
    lines, actions, circles, labels = [], [], [], []
    for shape in shapes:
        x, y = places[shape.path]
        circles.append(f'<circle cx="{x:g}" cy="{y:g}" r="{_RADIUS}"/>')
        labels += [*_text(shape.lines[:1], x, y), *_text(shape.lines[1:], x, y + _RADIUS + _LINE / 2)]
        if shape.path:
            above_x, above_y = places[shape.path[:-1]]
            lines.append(f'<line x1="{above_x:g}" y1="{above_y:g}" x2="{x:g}" y2="{y:g}"/>')
            # The label is closer to the child, because lines to many children are further apart there.
            actions += _text([shape.action], x + (above_x - x) * 0.4 + 6, y + (above_y - y) * 0.4)
    parts = ((_STEPS, lines), (_ACTIONS, actions), (_VERTICES, circles), (_LABELS, labels))
    return [_group(*part) for part in parts]


def _boxes(shapes: Sequence[Shape], spans: dict[tuple[int, ...], tuple[int, int]]) -> list[str]:
    boxes, labels = [], []
    for shape in shapes:
        start, count = spans[shape.path]
        x, y = _MARGIN + _WIDTH * start, _MARGIN + _HEIGHT * len(shape.path)
        boxes.append(f'<rect x="{x}" y="{y}" width="{_WIDTH * count}" height="{_HEIGHT}"/>')
        lines = [f"action: {shape.action}", *shape.lines] if shape.action else shape.lines
        labels += _text(lines, x + _WIDTH * count / 2, y + _HEIGHT / 2 - _LINE * (len(lines) - 1) / 2)
    return [_group(_VERTICES, boxes), _group(_LABELS, labels)]


def _group(attributes: str, parts: Sequence[str]) -> str:
    return "\n".join([f"<g {attributes}>", *parts, "</g>"])


def _text(lines: Sequence[str], x: float, y: float) -> list[str]:
    return [
        f'<text x="{x:g}" y="{y + 4 + _LINE * number:g}">{escape(line)}</text>'
        for number, line in enumerate(lines)
        if line
    ]


Path = tuple[int, ...]
KeyType = Literal["id", "hash", "path"]

_FIELDS = ("count", "wins", "index", "hash", "node_id", "node_data", "visits", "num_children")


class Parents:
    """Weak references to the tensordicts of a vertex's parents. Copies and pickles have no references."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[TensorDictBase]] = []

    def add(self, parent: TensorDictBase) -> None:
        self._found.append(weakref.ref(parent))

    def alive(self) -> list[TensorDictBase]:
        return [parent for found in self._found if (parent := found()) is not None]

    def __reduce__(self) -> tuple[type[Parents], tuple[()]]:
        return Parents, ()


class Tree(TensorClass["nocast"]):  # type: ignore[type-arg,name-defined]  # an option of tensordict, no type
    """A vertex of a search tree with everything below it. The idea and the names are TorchRL's.

    A vertex stands for a state. In a compact tree, states with a single branch are not vertices, so that a rollout may
    have several steps. A vertex that is reached in several ways is the same object below each of its parents. Its
    fields are

    - `node_data`: the observations of the state.
    - `rollout`: the steps in TED, `[steps]`, that lead from the parent to this state; at the root, the steps from the
      requested state to the first branching, if any.
    - `subtree`: the children, a stack of batch size `[children]`. Assigning it makes this vertex their `parent`.
    - `index`: the rows of the branches in the forest's data map, int64 `[children]`.
    - `hash`: the hash of the first step of `rollout`; at the root, the hash of the observations.
    - `node_id`: the number of the vertex, counted level by level from 0.
    - `count` (int32), `wins` (float32): for the use of a search algorithm; 0 in a new tree.
    - `specs`: a `Composite` that names the keys of actions in `full_action_spec` (default "action"), of flags in
      `full_done_spec` (default "done", "terminated", "truncated") and of observations in `full_observation_spec`
      (default: all of `node_data`).

    >>> from tensordict import TensorDict
    >>> below = [Tree.make_node(TensorDict(observation=torch.tensor(number))) for number in (3, 4)]
    >>> tree = Tree.make_node(TensorDict(observation=torch.tensor(1)))
    >>> tree.set_children(below)
    >>> print(tree.to_string())
    (0,) {'observation': tensor(3)}
    (1,) {'observation': tensor(4)}
    """

    count: Any = None
    wins: Any = None
    index: Any = None
    hash: Any = None
    node_id: Any = None
    rollout: Any = None
    node_data: Any = None
    subtree: Any = None
    _parent: Any = None
    specs: Any = None

    @classmethod
    def make_node(
        cls,
        data: TensorDictBase,
        *,
        device: torch.device | None = None,
        batch_size: torch.Size | None = None,
        specs: Any = None,
    ) -> Tree:
        """Make a vertex without children for the state in `data`."""
        size = data.batch_size if batch_size is None else batch_size
        device = data.device if device is None else device
        count, wins = torch.zeros(size, dtype=torch.int32, device=device), torch.zeros(size, device=device)
        made: Tree = cls(count=count, wins=wins, node_data=data, specs=specs, batch_size=size, device=device)
        return made

    def set_children(self, children: Sequence[Tree]) -> None:
        """Replace the children of this vertex."""
        self._adopt(children)
        _set_field(self, "subtree", Tree.lazy_stack(list(children)) if children else None)

    def _adopt(self, children: Sequence[Tree]) -> None:
        for child in children:
            if child._parent is None:
                child._parent = Parents()
            child._parent.add(self._tensordict)  # type: ignore[attr-defined]  # of every TensorClass

    # The vertex ------------------------------------------------------------------------------------

    @property
    def parent(self) -> Tree | None:
        """The parent, or a stack of parents; None at the root, or if the tree above was garbage-collected."""
        above = [] if self._parent is None else [type(self).from_tensordict(found) for found in self._parent.alive()]
        if len(above) < 2:
            return above[0] if above else None
        stacked: Tree = type(self).lazy_stack(above)
        return stacked

    @property
    def num_children(self) -> int:
        return 0 if self.subtree is None else len(self.subtree)

    @property
    def visits(self) -> torch.Tensor:
        """The same as `count`."""
        count: torch.Tensor = self.count
        return count

    @property
    def is_terminal(self) -> bool:
        """Whether the episode ended here, by the flags of the last step; if there are none, whether this is a leaf."""
        after = None if self.rollout is None else self.rollout[..., -1].get("next")
        keys = self._keys("full_done_spec", "done", "terminated", "truncated")
        flags = [] if after is None else [flag for key in keys if (flag := after.get(key, None)) is not None]
        return any(bool(flag.any()) for flag in flags) if flags else not self.num_children

    @property
    def branching_action(self) -> Any:
        """The action of the first step from the parent: a tensor, a tensordict if there are several keys, or None."""
        return self._action(0)

    @property
    def prev_action(self) -> Any:
        """The action of the last step before this state, in the form of `branching_action`."""
        return self._action(-1)

    def _action(self, step: int) -> Any:
        return (
            None if self.rollout is None else _chosen(self.rollout[..., step], self._keys("full_action_spec", "action"))
        )

    @property
    def selected_actions(self) -> Any:
        """The branching actions of the children, `[children, …]`; None without children."""
        return torch.stack([child.branching_action for child in self._children()]) if self.num_children else None

    @property
    def node_observation(self) -> Any:
        """The observation of this state: a tensor, or a tensordict if there are several keys."""
        observations = self.node_observations
        keys = list(observations.keys(True, True))
        return observations.get(keys[0]) if len(keys) == 1 else observations

    @property
    def node_observations(self) -> TensorDictBase:
        """The observations of this state as a tensordict."""
        found: TensorDictBase = self.node_data.select(
            *self._keys("full_observation_spec", *self.node_data.keys(True, True))
        )
        return found

    def _keys(self, kind: str, *default: Key) -> list[Key]:
        known = None if self.specs is None else self.specs.get(kind, None)
        return list(default) if known is None else list(known.keys(True, True))

    def fully_expanded(self, env: Any) -> bool:
        """Return whether there are as many children as `env.action_spec` has values."""
        return bool(self.num_children == env.action_spec.cardinality())

    # Below the vertex ------------------------------------------------------------------------------

    def _children(self) -> list[Tree]:
        return [] if self.subtree is None else [self.subtree[number] for number in range(len(self.subtree))]

    def _walk(self) -> Iterator[tuple[Path, Tree, Sequence[Tree]]]:
        """Yield each path, level by level, with its last vertex and the children of that vertex."""
        queue: deque[tuple[Path, Tree]] = deque([((), self)])
        while queue:
            path, vertex = queue.popleft()
            children = vertex._children()
            yield path, vertex, children
            queue.extend(((*path, number), child) for number, child in enumerate(children))

    def vertices(self, *, key_type: KeyType = "hash") -> dict[Any, Tree]:
        """Return all vertices in a dictionary.

        Args:
            key_type: the kind of keys: "id" (`node_id`), "hash", or "path", a tuple of child indices from here. By
                path, a vertex that is reached in several ways appears several times. The key of a vertex without an id
                or hash is its path.
        """
        found: dict[Any, Tree] = {}
        for path, vertex, _ in self._walk():
            key = {"id": vertex.node_id, "hash": vertex.hash, "path": path}.get(key_type, "")
            if key == "":
                raise UsageError(f"key_type is {key_type!r}, expected 'id', 'hash' or 'path'")
            found.setdefault(path if key is None else key, vertex)
        return found

    def num_vertices(self, *, count_repeat: bool = False) -> int:
        """Return the number of vertices; with `count_repeat`, a vertex counts once for each path to it."""
        return len(self.vertices(key_type="path" if count_repeat else "id"))

    def edges(self) -> list[tuple[int, int]]:
        """Return pairs of the ids of parent and child, level by level."""
        pairs = ((vertex.node_id, child.node_id) for _, vertex, below in self._walk() for child in below)
        return list(dict.fromkeys(pairs))

    def valid_paths(self) -> Iterator[Path]:
        """Yield the paths to the leaves, shortest first."""
        return (path for path, _, children in self._walk() if not children)

    def max_length(self) -> int:
        """Return the length of the longest path."""
        return max(map(len, self.valid_paths()))

    def rollout_from_path(self, path: Sequence[int]) -> TensorDictBase | None:
        """Return the steps along a path, `[steps]`, or None if there are none; IndexError if a child does not exist."""
        vertex, parts = self, [self.rollout]
        for number in path:
            if not -vertex.num_children <= number < vertex.num_children:
                raise IndexError(
                    f"the path {tuple(path)} goes to child {number} of a vertex with {vertex.num_children} children"
                )
            vertex = vertex.subtree[number]
            parts.append(vertex.rollout)
        parts = [part for part in parts if part is not None]
        steps: Any = torch.cat(parts, -1) if parts else None
        found: TensorDictBase | None = steps
        return found

    def get_vertex_by_id(self, id: int) -> Tree:
        """Return the vertex with this `node_id`; UsageError (a ValueError) if there is none."""
        return self._vertex("id", id)

    def get_vertex_by_hash(self, hash: int) -> Tree:
        """Return the vertex nearest to the root with this `hash`; UsageError (a ValueError) if there is none."""
        return self._vertex("hash", hash)

    def _vertex(self, key_type: KeyType, key: int) -> Tree:
        for _, vertex, _ in self._walk():
            if key == (vertex.node_id if key_type == "id" else vertex.hash):
                return vertex
        raise UsageError(f"the tree has no vertex with the {key_type} {key}")

    def __contains__(self, other: Any) -> bool:
        """Return whether a vertex of this tree has the hash of `other`, or is `other` if that has no hash.

        A tree that `MCTSForest.get_tree` made for a state is also contained if the state lies on the way to a vertex.
        """
        if not isinstance(other, Tree):
            return False
        vertices = [vertex for _, vertex, _ in self._walk()]
        if other.hash is None:
            return any(vertex._tensordict is other._tensordict for vertex in vertices)  # type: ignore[attr-defined]
        if any(vertex.hash == other.hash for vertex in vertices):
            return True
        if other.node_id != 0:  # below the root, the hash is of a step
            return False
        keys = list(other.node_observations.keys(True, True))
        return other._states(keys) <= set().union(*(vertex._states(keys) for vertex in vertices))

    def _states(self, keys: Sequence[Key]) -> set[bytes]:
        """Return the bytes of this state and of the states on the way to it."""
        found: set[bytes] = set()
        for data, count in ((self.node_data, 1), (self.rollout, 0 if self.rollout is None else len(self.rollout))):
            if count and all(data.get(key, None) is not None for key in keys):
                parts = [row_bytes(data.get(key).reshape(count, -1)) for key in keys]
                found |= {row.tobytes() for row in np.concatenate(parts, 1)}
        return found

    # Text and pictures -----------------------------------------------------------------------------

    def to_string(self, node_format_fn: Callable[[Tree], Any] | None = None) -> str:
        """Return a line for each vertex with a rollout: its path, indented by level, and its state.

        Args:
            node_format_fn: a function of a vertex whose result is shown instead of the state.
        """
        lines: list[str] = []
        stack: list[tuple[Path, Tree]] = [((), self)]
        while stack:
            path, vertex = stack.pop()
            if path or vertex.rollout is not None:
                shown = vertex.node_data.to_dict() if node_format_fn is None else node_format_fn(vertex)
                lines.append(f"{' ' * (len(path) - 1)}{path} {shown}")
            children = list(enumerate(vertex._children()))
            stack.extend(((*path, number), child) for number, child in reversed(children))
        return "\n".join(lines)

    def plot(
        self,
        backend: str = "svg",
        figure: Figure = "tree",
        info: Sequence[str] = (),
        make_labels: Callable[[Tree], Any] | None = None,
    ) -> Drawing:
        """Draw the tree as SVG text, which can be written to a file and is shown by notebooks.

        Args:
            backend: only "svg"; TorchRL's "plotly" is not available and raises UsageError (a ValueError).
            figure: "tree" for circles and lines, "box" for nested boxes.
            info: fields whose values are shown below the label.
            make_labels: a function of a vertex that returns its label; by default the `node_id`.
        """
        if backend != "svg":
            raise UsageError(f"backend is {backend!r}, expected 'svg'")
        if unknown := [name for name in info if name not in _FIELDS]:
            raise UsageError(f"info has {unknown[0]!r}, expected {', '.join(_FIELDS)}")
        shapes: list[Shape] = []
        for path, vertex, children in self._walk():
            shown = vertex.node_id if make_labels is None else make_labels(vertex)
            lines = [
                str(path if shown is None else shown),
                *(f"{name}: {_short(getattr(vertex, name))}" for name in info),
            ]
            action = None if not path else vertex.branching_action
            shapes.append(Shape(path, tuple(lines), "" if action is None else _short(action), len(children)))
        return draw(shapes, figure)


_set_field = Tree.__setattr__


def _assign(tree: Tree, name: str, value: Any) -> None:
    """Set an attribute; assigning the children also sets their parent."""
    if name == "subtree" and isinstance(value, Tree) and len(value.batch_size) == 1:
        tree.set_children([value[number] for number in range(len(value))])
    else:
        _set_field(tree, name, value)


Tree.__setattr__ = _assign  # type: ignore[method-assign, assignment]  # tensordict sets its own with the class


def _chosen(step: TensorDictBase, keys: Sequence[Key]) -> Any:
    return step.get(keys[0]) if len(keys) == 1 else step.select(*keys)


def _short(value: Any) -> str:
    """Format a field in a few characters."""
    text = str(value.tolist() if isinstance(value, torch.Tensor) else value)
    return text if len(text) <= 24 else text[:23] + "…"


class NodeMap(TensorMap[TensorDictBase, TensorDictBase]):
    """Maps observations to their branches: the rows of the steps that start there, in the order they were added.

    `nodes[td]` returns a tensordict for observations of any batch size, with

    - `_index` and `_hash`: the rows and hashes of these steps, int64 `[*batch, branches]` (a lazy stack if the numbers
      of branches differ);
    - `count`: how many steps were added there, including repeated ones, int32 `[*batch]`.

    Unknown observations raise MissingKeyError (a KeyError). Only a forest writes to the map.

    Args:
        query_module: the module that numbers the observations.
    """

    def __init__(self, query_module: QueryModule) -> None:
        self.query_module = query_module
        self.branches: list[list[int]] = []
        """For each node, the rows of the steps that start there."""
        self.targets: list[int] = []
        """For each step, the node it leads to."""
        self.hashes: list[int] = []
        """For each step, its hash."""
        self._visits: list[int] = []
        self._forward = True
        """Whether every step leads to a node with a higher number, so that there can be no cycle."""

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
        """Add steps between nodes; a step whose row is known only increases `count`."""
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
        raise UsageError("branches cannot be written one by one", hint="add rollouts with the forest's extend")

    def acyclic_from(self, start: int) -> bool:
        """Return whether no path that starts at a node visits any node twice."""
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


_MOST = 100_000
"""The largest number of vertices of a tree."""


class Vertex:
    """A vertex while a tree is built: the rows of the steps that lead to it, and its children."""

    def __init__(self, steps: list[int], node: int, depth: int, passed: frozenset[int]) -> None:
        self.steps = steps
        self.node = node
        self.depth = depth
        self.passed = passed
        """The steps on the path from the root; only recorded if the graph has cycles."""
        self.below: list[Vertex] = []


def grow(nodes: NodeMap, start: int, steps: list[int] | None, *, max_depth: int | None, compact: bool) -> list[Vertex]:
    """Return the vertices of the tree below a node, level by level.

    The root's rollout is `steps`, or if that is None, the steps up to the first branching. In a graph without cycles, a
    state that is reached in several ways is one vertex. With cycles, no path repeats a step, and each path has vertices
    of its own.
    """
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
            raise SchemaError(f"the tree has more than {_MOST:,} vertices", hint="set max_depth")
    return found


_DONE: tuple[Key, ...] = ("done", "terminated", "truncated")


class MCTSForest:
    """Collects rollouts, and builds the tree of everything that was tried from a state on.

    `extend(rollout)` adds steps in TED. Each pair of observation and action is stored once, so that rollouts with a
    common beginning share their first steps, and a rollout that starts at a state of another one continues it.
    `get_tree(state)` returns the tree below a state, `len(forest)` the number of steps. The idea and the names are
    TorchRL's; there, a later outcome of a pair silently replaces an earlier one.

    Args:
        data_map: an empty map from observation and action to the step; by default it is made for the first rollout.
        node_map: an empty map, or an empty `TensorDictMap` whose query module numbers the observations; by default it
            is made for the first rollout.
        max_size: the largest number of steps; by default the forest grows.
        done_keys: the keys of flags, by default "done", "terminated" and "truncated".
        reward_keys, observation_keys, action_keys: by default "reward", "observation" and "action".
        excluded_keys: entries that are not stored, at the root and under `next`.
        consolidated: whether to put the entries of steps into one piece of memory.
        stochastic: whether every outcome of a pair of observation and action is stored as a step of its own. If not, a
            step with another next observation than before raises SchemaError (a RuntimeError), and its rollout is not
            added.

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
        require_flags(consolidated=consolidated or False, stochastic=stochastic)
        known = None if data_map is None else data_map.max_size
        if data_map is not None and max_size not in (None, known):
            raise UsageError(f"max_size is {max_size}, but the data map has {known}")
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
        """Take the keys that were not given from an environment's `done_keys`, `reward_keys` and so on.

        UsageError (a ValueError) if the environment has none of them, or the forest already has steps.
        """
        if len(self):
            raise UsageError("the forest has steps, so its keys cannot change")
        if not any(hasattr(env, f"{name}_keys") for name in self._keys):
            raise UsageError(f"the {type(env).__name__} has none of an environment's keys, such as action_keys")
        for name, keys in self._keys.items():
            found = getattr(env, f"{name}_keys", None)
            if keys is None and found:
                self._keys[name] = _listed(found)

    def __len__(self) -> int:
        return 0 if self.data_map is None else len(self.data_map)

    # Adding ----------------------------------------------------------------------------------------

    def extend(self, rollout: TensorDictBase, *, return_node: bool = False) -> Tree | None:
        """Add the steps of one or several rollouts; steps that are stored already only count as visits.

        If an error is raised, nothing is added.

        Args:
            rollout: steps in TED, `[steps]` or `[rollouts, steps]`.
            return_node: whether to return the vertex after the last step, whose `rollout` has the added steps.

        Raises:
            MissingKeyError (a KeyError): an observation, action or next observation is missing.
            SchemaError (a RuntimeError): a step has other dtypes or shapes than before, contradicts a known step, or
                exceeds `max_size`.
        """
        if not is_tensor_collection(rollout) or not rollout.batch_dims:
            raise UsageError("expected a tensordict whose last dimension counts steps", hint="add() takes one step")
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
                    hint="pass the keys of this environment as observation_keys and action_keys",
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
        """Return which steps are new, without repetitions; SchemaError if a step has two next observations."""
        found: dict[bytes, int] = {}
        new: list[int] = []
        for number, (row, target) in enumerate(zip(rows, targets, strict=True)):
            known = found.setdefault(hashed.keys[number].tobytes(), target) if row < 0 else nodes.targets[row]
            if known != target:
                raise SchemaError(
                    f"step {number} has another next observation than the same observation and action had before",
                    hint="use stochastic=True to keep every outcome",
                )
            if row < 0 and len(found) > len(new):
                new.append(number)
        return new

    # Trees -----------------------------------------------------------------------------------------

    def get_tree(self, root: TensorDictBase, *, max_depth: int | None = None, compact: bool = True) -> Tree:
        """Return the tree of all steps from a state on.

        No path in the tree repeats a step. If a rollout came back to an earlier state, the tree continues from there
        with the steps that are not on the path yet, so that it may be large.

        Args:
            root: a tensordict of batch size `[]` with the state.
            max_depth: vertices this many levels below the root have no children; by default all levels are built.
            compact: whether states with a single branch are left out; their steps then belong to the rollout of the
                vertex below.

        Raises:
            MissingKeyError (a KeyError): no rollout has the state.
            SchemaError (a RuntimeError): the tree has more than 100,000 vertices.
        """
        if not is_tensor_collection(root) or math.prod(root.batch_size) != 1:
            raise UsageError("expected the root as a tensordict of batch size [], with one state")
        if max_depth is not None and max_depth < 0:
            raise UsageError(f"max_depth is {max_depth}, expected a whole number from 0")
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
        """Build the tree below a node; the root's rollout has the given steps. All steps are read in one call."""
        assert self.data_map is not None
        assert self.node_map is not None
        nodes, state = self.node_map, root.select(*self.observation_keys).clone()
        vertices = grow(nodes, node, steps, max_depth=max_depth, compact=compact)
        lengths = [len(vertex.steps) for vertex in vertices]
        rollouts: list[TensorDictBase | None] = [None] * len(vertices)
        states: list[TensorDictBase] = [state] * len(vertices)
        if any(lengths):
            read = self.data_map[torch.tensor([row for vertex in vertices for row in vertex.steps], dtype=torch.int64)]
            ends = torch.tensor(lengths).cumsum(0) - 1
            last = read[ends.clamp(min=0)]["next"].select(*self.observation_keys).unbind(0)
            for number, (part, after) in enumerate(zip(read.split(lengths), last, strict=True)):
                if lengths[number]:
                    rollouts[number], states[number] = part, after
        trees, specs = [], self._specs()
        counts, wins = torch.zeros(len(vertices), dtype=torch.int32).unbind(), torch.zeros(len(vertices)).unbind()
        for number, vertex in enumerate(vertices):
            value = nodes.hashes[vertex.steps[0]] if number else int(nodes.query_module.hashed(state).hashes)
            rows = [child.steps[0] for child in vertex.below]
            index = torch.tensor(rows, dtype=torch.int64) if rows else None
            trees.append(
                Tree(
                    count=counts[number], wins=wins[number], index=index, hash=value, node_id=number,
                    rollout=rollouts[number], node_data=states[number], specs=specs, batch_size=[],
                )
            )  # fmt: skip
        numbers = {id(vertex): number for number, vertex in enumerate(vertices)}
        for tree, vertex in zip(trees, vertices, strict=True):
            if vertex.below:
                tree.set_children([trees[numbers[id(child)]] for child in vertex.below])
        return trees[0]

    def _specs(self) -> Any:
        """Return the specs that name the keys of vertices; None if the keys are the default ones."""
        if self.action_keys == ["action"] and self.done_keys == list(_DONE):
            return None
        named = {"full_action_spec": self.action_keys, "full_done_spec": self.done_keys}
        return Composite({name: Composite(dict.fromkeys(keys)) for name, keys in named.items()})

    def get_child(self, root: TensorDictBase) -> TensorDictBase:
        """Return the steps that start at the state in `root`, `[branches]`; KeyError if the state is unknown."""
        node = self._node(root)
        assert self.data_map is not None
        assert self.node_map is not None
        return self.data_map[torch.tensor(self.node_map.branches[node], dtype=torch.int64)]

    @staticmethod
    def valid_paths(tree: Tree) -> list[Path]:
        """Return the paths to the leaves of a tree."""
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
