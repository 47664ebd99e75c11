"""Drawings of trees, as SVG text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args
from xml.sax.saxutils import escape

from ..errors import UsageError

Figure = Literal["tree", "box"]

_WIDTH, _HEIGHT, _MARGIN, _LINE = 96, 84, 30, 13
_RADIUS = 16

# Attributes instead of a style sheet, which some viewers ignore, and which would reach other pictures of a notebook.
_LABELS = 'font-family="sans-serif" font-size="11" text-anchor="middle" fill="#222"'
_ACTIONS = 'font-family="sans-serif" font-size="10" text-anchor="start" fill="#666"'
_STEPS = 'stroke="#999"'
_VERTICES = 'fill="#dce8f5" stroke="#4a78a8"'


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
