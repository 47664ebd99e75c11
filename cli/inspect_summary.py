"""The summary that `rbtool inspect` shows: what is there, how episodes end, which fields, where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from .published import ends, not_following, without_final
from .spaces import space_text
from .text import Cell, Line, Styled, Table, counted, folded, number, size, sparkline

if TYPE_CHECKING:
    from ..core.verbs.inspect import FieldView, InspectResult, Spread

__all__ = ["summary_lines"]

_INDENT = "  "
_TITLE = 9
_STEPS_TO_NEXT = ("steps_to_next_obs",)


def summary_lines(result: InspectResult, width: int | None = None) -> Iterator[list[Cell]]:
    """Set the summary; the first line answers the question. Words go into lines of `width` columns."""
    what = {"dataset": "TED", "checkpoint": "checkpoint"}.get(result.type, "raw dataset")
    title: Line = [
        Styled(result.name, "bold"),
        f"   {what}, {'format' if result.type == 'source' else 'layout'} {result.layout}",
        f"   {counted(result.steps, 'step')}   {counted(result.episodes, 'episode')}   {size(result.bytes)}",
    ]
    yield from folded(title, width, len(_INDENT))
    counts = {name: getattr(result.ends, name) for name in result.ends.__slots__}
    yield from folded(_titled("ends", ends(counts)), width, _TITLE)
    if apart := not_following(counts, n_step=any(field.key == _STEPS_TO_NEXT for field in result.fields)):
        yield from folded(_titled("next", apart), width, _TITLE)
    if apart := without_final(counts):
        yield from folded(_titled("final", f"{apart}: the source has no observation after it"), width, _TITLE)
    spreads = [("length", result.length), ("return", result.returns)]
    rows = [_spread(title, spread) for title, spread in spreads if spread is not None]
    yield from Table(rows, indent=_TITLE).lines(width)
    if result.layouts:
        yield from folded(_titled("layouts", _layouts(result)), width, _TITLE)
    yield [Styled("fields", "dim")]
    yield from Table(list(_field_rows(result.fields)), frozenset({3, 4, 6}), frozenset({5, 6}), _TITLE).lines(width)
    for problem in result.problems:
        yield from folded([Styled(f"{'damaged':<{_TITLE}}", "red"), problem], width, _TITLE)
    for line in (*_spaces(result), *_remarks(result), *_origin(result)):
        yield from folded(line, width, _TITLE)


def _layouts(result: InspectResult) -> str:
    """Bytes of the rows in each layout, and what is saved, or could be."""
    shown = [f"{name} {size(count)}" for name, count in result.layouts.items()]
    ted, packed = result.layouts["ted"], result.layouts["packed"]
    share = f" ({100 - round(100 * packed / ted)} % less)" if packed < ted else ""
    return f"{' · '.join(shown)}{share}"


def _titled(title: str, text: str) -> list[Cell]:
    return [Styled(f"{title:<{_TITLE}}", "dim"), text]


def _spread(title: str, spread: Spread) -> Line:
    return [
        Styled(f"{title:<7}", "dim"),
        f"mean {number(spread.mean)}",
        f"min {number(spread.min)}",
        f"max {number(spread.max)}",
        Styled(sparkline(spread.histogram), "cyan"),
    ]


def _field_rows(fields: tuple[FieldView, ...]) -> Iterator[Line]:
    """One row a leaf, indented as a tree; neighbours that differ in nothing but their name share one."""
    shown: tuple[str, ...] = ()
    for _, same in groupby(enumerate(fields), key=lambda item: _likeness(*item)):
        group = [field for _, field in same]
        *folders, _ = group[0].key
        for depth, folder in enumerate(folders):
            if shown[: depth + 1] != tuple(folders[: depth + 1]):
                yield [_INDENT * (depth + 1) + folder]
        shown = tuple(folders)
        yield _field_row(_INDENT * (len(folders) + 1) + ", ".join(field.key[-1] for field in group), group)


def _likeness(position: int, field: FieldView) -> tuple[Any, ...]:
    """Flags share a row; anything else stands alone."""
    return (field.key[:-1], field.dtype, field.shape) if field.role == "done" else (position,)


def _field_row(name: str, group: list[FieldView]) -> Line:
    field = group[0]
    low, high = field.min, field.max
    known = low is not None and high is not None and field.dtype != "bool"
    return [
        name,
        Styled(field.dtype, "cyan"),
        f"[{', '.join(map(str, field.shape))}]",
        size(sum(one.bytes for one in group)),
        number(low) if known and low is not None else "",
        "…" if known else "",
        number(high) if known and high is not None else "",
    ]


def _spaces(result: InspectResult) -> Iterator[list[Cell]]:
    for name, space in result.spaces.items():
        yield _titled("space", f"{name}: {space_text(space)}")


def _remarks(result: InspectResult) -> Iterator[list[Cell]]:
    for before, after in result.renamed_keys.items():
        yield _titled("renamed", f"{before} → {after}")
    for dropped in result.dropped_keys:
        yield _titled("left out", f"{dropped.key} ({dropped.why})")
    for note in result.notes:
        yield _titled("note", note)


def _origin(result: InspectResult) -> Iterator[list[Cell]]:
    for step in result.provenance:
        what = f"{step.verb} {_arguments(step.arguments)}".rstrip()
        yield _titled("made", f"{what} · {step.time[:10]} · rbtool {step.version}")
    if result.content_digest:
        yield _titled("digest", result.content_digest)


def _arguments(arguments: Mapping[str, Any]) -> str:
    said = {name: value for name, value in arguments.items() if value not in (None, False, "", {}, [])}
    if operations := said.pop("operations", None):  # in full under --json, with the constants that were measured
        said.pop("constants", None)
        said = {", ".join(dict.fromkeys(str(part["name"]) for part in operations)): True, **said}
    return " ".join(name if value is True else f"{name}={value}" for name, value in said.items())
