"""Drawings of trees, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args
from xml.sax.saxutils import escape

from ..errors import UsageError

Figure = Literal["tree", "box"]

_WIDTH, _HEIGHT, _MARGIN, _LINE = 96, 84, 30, 13
_RADIUS = 16

_STYLE = (
    "text{font:11px sans-serif;text-anchor:middle;fill:#222}"
    ".action{font-size:10px;fill:#666;paint-order:stroke;stroke:#fff;stroke-width:3px}"
    "line{stroke:#999}circle,rect{fill:#dce8f5;stroke:#4a78a8}"
)


class Shape(NamedTuple):
    """A vertex to draw: its path, its label line by line, that of the step that leads to it, and how many are below."""

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
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f"<style>{_STYLE}</style>\n{body}\n</svg>\n"
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
    lines, labels, circles = [], [], []
    for shape in shapes:
        x, y = places[shape.path]
        circles.append(f'<circle cx="{x:g}" cy="{y:g}" r="{_RADIUS}"/>')
        circles.extend(_text(shape.lines, x, y))
        if shape.path:
            above_x, above_y = places[shape.path[:-1]]
            lines.append(f'<line x1="{above_x:g}" y1="{above_y:g}" x2="{x:g}" y2="{y:g}"/>')
            labels.extend(_text([shape.action], (x + above_x) / 2, (y + above_y) / 2, "action"))
    return [*lines, *labels, *circles]


def _boxes(shapes: Sequence[Shape], spans: dict[tuple[int, ...], tuple[int, int]]) -> list[str]:
    parts = []
    for shape in shapes:
        start, count = spans[shape.path]
        x, y = _MARGIN + _WIDTH * start, _MARGIN + _HEIGHT * len(shape.path)
        parts.append(f'<rect x="{x}" y="{y}" width="{_WIDTH * count}" height="{_HEIGHT}"/>')
        lines = [*shape.lines, shape.action] if shape.action else shape.lines
        parts.extend(_text(lines, x + _WIDTH * count / 2, y + _HEIGHT / 2 - _LINE * (len(lines) - 1) / 2))
    return parts


def _text(lines: Sequence[str], x: float, y: float, kind: str = "") -> list[str]:
    named = f' class="{kind}"' if kind else ""
    return [
        f'<text x="{x:g}" y="{y + 4 + _LINE * number:g}"{named}>{escape(line)}</text>'
        for number, line in enumerate(lines)
        if line
    ]
