"""Trees: everything that was tried from one state on, with text and SVG output."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args
from xml.sax.saxutils import escape

import torch
from tensordict import TensorClass, TensorDictBase

from ..errors import UsageError
from ..maps.tensordict_map import Key

Figure = Literal["tree", "box"]

_WIDTH, _HEIGHT, _MARGIN, _LINE = 96, 84, 30, 13
_RADIUS = 16

# Attributes instead of a style sheet: some viewers ignore it, and in a notebook it would affect other pictures.
_LABELS = 'font-family="sans-serif" font-size="11" text-anchor="middle" fill="#222"'
_ACTIONS = 'font-family="sans-serif" font-size="10" text-anchor="start" fill="#666"'
_STEPS = 'stroke="#999"'
_VERTICES = 'fill="#dce8f5" stroke="#4a78a8"'


class Shape(NamedTuple):
    """A vertex to draw: its path, label lines, the label of the step leading to it, and its children."""

    path: tuple[int, ...]
    lines: tuple[str, ...]
    action: str
    children: int


class Drawing(str):
    """SVG text that notebooks show as a picture."""

    def _repr_svg_(self) -> str:
        return str(self)


def draw(shapes: Sequence[Shape], figure: Figure) -> Drawing:
    """Draw vertices, which are given level by level from the root."""
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
    """Return for each path the index of the first leaf below the vertex and the number of its leaves (1 for a leaf)."""
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
    """Weak references to the tensordicts of a vertex's parents; copies and pickles have none."""

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
    have several steps. A vertex that is reached in several ways is the same object below each of its parents.

    - `node_data`: the observations of the state.
    - `rollout`: the steps in TED, `[steps]`, that lead from the parent to this state; at the root, the steps from the
      requested state to the first branching, if any.
    - `subtree`: the children, a stack of batch size `[children]`.
    - `index`: the rows of the branches in the forest's data map, int64 `[children]`.
    - `hash`: the hash of the first step of `rollout`; at the root, of the observations.
    - `node_id`: the number of the vertex, level by level from 0.
    - `count` (int32), `wins` (float32): 0 in a new tree, for the search algorithm to use.
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
    parents: Any = None
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
        """Create a vertex without children for the state in `data`."""
        size = data.batch_size if batch_size is None else batch_size
        device = data.device if device is None else device
        count, wins = torch.zeros(size, dtype=torch.int32, device=device), torch.zeros(size, device=device)
        made: Tree = cls(count=count, wins=wins, node_data=data, specs=specs, batch_size=size, device=device)
        return made

    def set_children(self, children: Sequence[Tree]) -> None:
        """Replace the children of this vertex."""
        for child in children:
            if child.parents is None:
                child.parents = Parents()
            child.parents.add(self._tensordict)  # type: ignore[attr-defined]  # of every TensorClass
        self.subtree = Tree.lazy_stack(list(children)) if children else None

    # The vertex ------------------------------------------------------------------------------------

    @property
    def parent(self) -> Tree | None:
        """The parent, a stack if there are several; None at the root, or if the tree above was garbage-collected."""
        above = [] if self.parents is None else [type(self).from_tensordict(found) for found in self.parents.alive()]
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
        """Whether the episode ended here, by the flags of the last step; without flags, whether this is a leaf."""
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
        """The action of the last step before this state, like `branching_action`."""
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

    # What is below ---------------------------------------------------------------------------------

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
            key_type: what the vertices are keyed by: "id" (`node_id`), "hash", or "path", a tuple of child indices from
                here. By path, a vertex that is reached in several ways appears several times. A vertex without an id
                or hash is keyed by its path.
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
        """Return the pairs of ids of parent and child, level by level."""
        pairs = ((vertex.node_id, child.node_id) for _, vertex, below in self._walk() for child in below)
        return list(dict.fromkeys(pairs))

    def valid_paths(self) -> Iterator[Path]:
        """Yield the paths to the leaves, shortest first."""
        return (path for path, _, children in self._walk() if not children)

    def max_length(self) -> int:
        """Return the length of the longest path."""
        return max(map(len, self.valid_paths()))

    def rollout_from_path(self, path: Sequence[int]) -> TensorDictBase | None:
        """Return the steps along a path, `[steps]`, or None if it has none; IndexError if a child does not exist."""
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
        """Return whether a vertex has the hash of another tree, or, if that has no hash, is that tree."""
        if not isinstance(other, Tree):
            return False
        mine = (vertex for _, vertex, _ in self._walk())
        if other.hash is None:
            return any(vertex._tensordict is other._tensordict for vertex in mine)  # type: ignore[attr-defined]
        return any(vertex.hash == other.hash for vertex in mine)

    # Text and pictures -----------------------------------------------------------------------------

    def to_string(self, node_format_fn: Callable[[Tree], Any] | None = None) -> str:
        """Return a line for each vertex with a rollout: its path, indented by level, and its state.

        Args:
            node_format_fn: called with a vertex; what it returns is printed instead of the state.
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
            make_labels: called with a vertex, returns its label; by default the `node_id`.
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


def _chosen(step: TensorDictBase, keys: Sequence[Key]) -> Any:
    return step.get(keys[0]) if len(keys) == 1 else step.select(*keys)


def _short(value: Any) -> str:
    """Format a field in a few characters."""
    text = str(value.tolist() if isinstance(value, torch.Tensor) else value)
    return text if len(text) <= 24 else text[:23] + "…"
