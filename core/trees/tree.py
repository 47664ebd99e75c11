"""Trees: all that was tried from one state on, as text and as a drawing in SVG."""

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

# Attributes instead of a style sheet, which some viewers ignore, and which would reach other pictures of a notebook.
_LABELS = 'font-family="sans-serif" font-size="11" text-anchor="middle" fill="#222"'
_ACTIONS = 'font-family="sans-serif" font-size="10" text-anchor="start" fill="#666"'
_STEPS = 'stroke="#999"'
_VERTICES = 'fill="#dce8f5" stroke="#4a78a8"'


class Shape(NamedTuple):
    """A vertex to draw: its path, the lines of its label, the label of the step that leads to it, and its children."""

    path: tuple[int, ...]
    lines: tuple[str, ...]
    action: str
    children: int


class Drawing(str):
    """SVG text, which notebooks show as a picture."""

    def _repr_svg_(self) -> str:
        return str(self)


def draw(shapes: Sequence[Shape], figure: Figure) -> Drawing:
    """Draw vertices that come level by level, from the root on."""
    if figure not in get_args(Figure):
        raise UsageError(f"figure is {figure!r}; it can be 'tree' or 'box'")
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
    """Return by path the first of the leaves below a vertex, and how many there are, itself where it is a leaf."""
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
            # Nearer to the vertex below: there the lines of many children are further apart.
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
    """The tensordicts of the vertices above one, for as long as others keep these; copies to elsewhere have none."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[TensorDictBase]] = []

    def add(self, parent: TensorDictBase) -> None:
        self._found.append(weakref.ref(parent))

    def alive(self) -> list[TensorDictBase]:
        return [parent for found in self._found if (parent := found()) is not None]

    def __reduce__(self) -> tuple[type[Parents], tuple[()]]:
        return Parents, ()


class Tree(TensorClass["nocast"]):  # type: ignore[type-arg,name-defined]  # an option of tensordict, no type
    """A vertex, and all that is below it; the children are the stack `subtree`, of the batch size `[children]`.

    A vertex is a state, which `node_data` shows, and `rollout` leads to it from the vertex above: steps in
    TED, `[steps]`. In a compact tree, states with a single branch are not vertices, so rollouts may have many steps,
    and the root's rollout leads from the requested state to the first branching, if there is one. A vertex that is
    reached in several ways is the same object below each of its parents.

    `index` are the rows of the branches in the forest's data map, int64 `[children]`; `hash` is the hash of the first
    step of `rollout`, or of the observations at the root; `node_id` numbers vertices level by level from 0. `count`
    (int32) and `wins` (float32) are 0 in a new tree: they belong to the search that uses it. `specs`, a `Composite`,
    names the keys of actions in `full_action_spec` (default "action"), of flags in `full_done_spec` (default "done",
    "terminated", "truncated") and of observations in `full_observation_spec` (default: all of `node_data`).

    Ideas and names are from TorchRL.

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
        """Make a vertex without children for the state in `data`."""
        size = data.batch_size if batch_size is None else batch_size
        device = data.device if device is None else device
        count, wins = torch.zeros(size, dtype=torch.int32, device=device), torch.zeros(size, device=device)
        made: Tree = cls(count=count, wins=wins, node_data=data, specs=specs, batch_size=size, device=device)
        return made

    def set_children(self, children: Sequence[Tree]) -> None:
        """Put vertices below this one, in place of those that are there."""
        for child in children:
            if child.parents is None:
                child.parents = Parents()
            child.parents.add(self._tensordict)  # type: ignore[attr-defined]  # of every TensorClass
        self.subtree = Tree.lazy_stack(list(children)) if children else None

    # The vertex ------------------------------------------------------------------------------------

    @property
    def parent(self) -> Tree | None:
        """The vertex above, of several a stack; None for the root, and once the tree above is no more."""
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
        """Whether the episode ended here, by the flags of the last step; without any, whether there are no children."""
        after = None if self.rollout is None else self.rollout[..., -1].get("next")
        keys = self._keys("full_done_spec", "done", "terminated", "truncated")
        flags = [] if after is None else [flag for key in keys if (flag := after.get(key, None)) is not None]
        return any(bool(flag.any()) for flag in flags) if flags else not self.num_children

    @property
    def branching_action(self) -> Any:
        """The action of the first step from the vertex above: a tensor, of several keys a tensordict, or None."""
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
        """The branching actions of the children, `[children, …]`; None where there are none."""
        return torch.stack([child.branching_action for child in self._children()]) if self.num_children else None

    @property
    def node_observation(self) -> Any:
        """The observation of this state: a tensor, of several keys a tensordict."""
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
        """Whether there are as many children as `env.action_spec` has values."""
        return bool(self.num_children == env.action_spec.cardinality())

    # What is below ---------------------------------------------------------------------------------

    def _children(self) -> list[Tree]:
        return [] if self.subtree is None else [self.subtree[number] for number in range(len(self.subtree))]

    def _walk(self) -> Iterator[tuple[Path, Tree, Sequence[Tree]]]:
        """Yield each path, level by level, with the vertex where it ends and the children of that."""
        queue: deque[tuple[Path, Tree]] = deque([((), self)])
        while queue:
            path, vertex = queue.popleft()
            children = vertex._children()
            yield path, vertex, children
            queue.extend(((*path, number), child) for number, child in enumerate(children))

    def vertices(self, *, key_type: KeyType = "hash") -> dict[Any, Tree]:
        """Return all vertices by `node_id`, by `hash`, or by path, the numbers of the children from here on.

        By path, a vertex that is reached in several ways appears several times. A vertex of your own without an id
        or hash has its path instead.
        """
        found: dict[Any, Tree] = {}
        for path, vertex, _ in self._walk():
            key = {"id": vertex.node_id, "hash": vertex.hash, "path": path}.get(key_type, "")
            if key == "":
                raise UsageError(f"key_type is {key_type!r}; it can be 'id', 'hash' or 'path'")
            found.setdefault(path if key is None else key, vertex)
        return found

    def num_vertices(self, *, count_repeat: bool = False) -> int:
        """Count the vertices, with `count_repeat` once for each way to reach them."""
        return len(self.vertices(key_type="path" if count_repeat else "id"))

    def edges(self) -> list[tuple[int, int]]:
        """Return the ids of each vertex and child, level by level."""
        pairs = ((vertex.node_id, child.node_id) for _, vertex, below in self._walk() for child in below)
        return list(dict.fromkeys(pairs))

    def valid_paths(self) -> Iterator[Path]:
        """Yield the paths that end at vertices without children, the shortest first."""
        return (path for path, _, children in self._walk() if not children)

    def max_length(self) -> int:
        """Return the length of the longest path."""
        return max(map(len, self.valid_paths()))

    def rollout_from_path(self, path: Sequence[int]) -> TensorDictBase | None:
        """Return the steps along a path, `[steps]`, None without any; IndexError for a child that is not there."""
        vertex, parts = self, [self.rollout]
        for number in path:
            if not -vertex.num_children <= number < vertex.num_children:
                raise IndexError(
                    f"child {number} is in the path {tuple(path)}, expected one of {vertex.num_children} children there"
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
        """Whether a vertex has the hash of another tree, or is the other tree where that has no hash."""
        if not isinstance(other, Tree):
            return False
        mine = (vertex for _, vertex, _ in self._walk())
        if other.hash is None:
            return any(vertex._tensordict is other._tensordict for vertex in mine)  # type: ignore[attr-defined]
        return any(vertex.hash == other.hash for vertex in mine)

    # Text and pictures -----------------------------------------------------------------------------

    def to_string(self, node_format_fn: Callable[[Tree], Any] | None = None) -> str:
        """Return a line for each vertex that a rollout leads to: its path, indented by level, and its state.

        `node_format_fn(vertex)` gives what is shown instead of the state.
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
        """Draw the tree as SVG, circles and lines, or with `figure="box"` boxes below one another.

        The result is a str to be written to a file, and is shown in notebooks. A vertex has its `node_id` for a label,
        with `info` the values of these fields below, or what `make_labels(vertex)` returns instead. UsageError (a
        ValueError) for another backend: no browser is needed here, and none of TorchRL's `"plotly"`.
        """
        if backend != "svg":
            raise UsageError(f"backend is {backend!r}; trees are drawn as 'svg'")
        if unknown := [name for name in info if name not in _FIELDS]:
            raise UsageError(f"info names {unknown[0]!r}; it can name {', '.join(_FIELDS)}")
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
    """Write a field in a few characters."""
    text = str(value.tolist() if isinstance(value, torch.Tensor) else value)
    return text if len(text) <= 24 else text[:23] + "…"
