"""One episode row by row: what was seen, what was done → what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .text import Cell, Line, Styled, Table, counted, folded, number, vector

if TYPE_CHECKING:
    from ..core.verbs.episode_view import EpisodeView, RowView
    from ..core.verbs.inspect import FieldView

__all__ = ["episode_lines"]

_FLAGS = ("next.terminated", "next.truncated")
_HIDDEN = {"episode", "next.done", "next.reward", *_FLAGS}
_WIDEST = 160


def episode_lines(view: EpisodeView, fields: tuple[FieldView, ...], width: int | None) -> list[list[Cell]]:
    """Set an episode as a table, or step by step where that would be too wide."""
    states, actions, results = _split(view.rows[0].values, fields) if view.rows else ([], [], [])
    table = Table([_header(states, actions, results), *_rows(view, states, actions, results)], right=frozenset({0}))
    facts = [counted(view.length + 1, "observation"), counted(view.length, "step"), view.end]
    facts.append("no return" if view.total_reward is None else f"return {number(view.total_reward)}")
    head: list[Cell] = [Styled(f"episode {view.episode}", "bold"), f"   {', '.join(facts)}"]
    if table.width <= (width or _WIDEST):
        return [*folded(head, width, 4), *table.lines()]
    return [*folded(head, width, 4), *_step_by_step(view, states, actions, results, width)]


def _split(values: Any, fields: tuple[FieldView, ...]) -> tuple[list[str], list[str], list[str]]:
    """Sort the names of the leaves into what was known before the action, the action, and what came after it."""
    roles = {".".join(field.key): field.role for field in fields}
    names = [name for name in values if name not in _HIDDEN]
    results = [name for name in names if name.startswith("next.")]
    actions = [name for name in names if roles.get(name) == "action"]
    return [name for name in names if name not in {*results, *actions}], actions, results


def _header(states: list[str], actions: list[str], results: list[str]) -> Line:
    names = ["t", *states, *actions, "→", "reward", *(_after(name) for name in results), "end"]
    return [Styled(name, "dim") for name in names]


def _after(name: str) -> str:
    return f"next {name.removeprefix('next.')}"


def _rows(view: EpisodeView, states: list[str], actions: list[str], results: list[str]) -> list[Line]:
    rows: list[Line] = []
    before = -1
    for row in view.rows:
        if row.step != before + 1:
            rows.append(["…"])
        before = row.step
        known = [vector(row.values[name]) for name in (*states, *actions)]
        after = [vector(row.values[name]) for name in results]
        rows.append([f"{row.step:,}", *known, "→", _reward(row), *after, Styled(_end(row), "yellow")])
    return rows


def _reward(row: RowView) -> str:
    value = row.values.get("next.reward")
    return vector(value[0] if isinstance(value, list) and len(value) == 1 else value) if value is not None else ""


def _end(row: RowView) -> str:
    return " ".join(name.removeprefix("next.") for name in _FLAGS if row.values.get(name) in (True, [True]))


def _step_by_step(
    view: EpisodeView, states: list[str], actions: list[str], results: list[str], width: int | None
) -> list[list[Cell]]:
    """One leaf a line, what it was before the step and after it."""
    lines: list[list[Cell]] = []
    before = -1
    for row in view.rows:
        if row.step != before + 1:
            lines.append(["…"])
        before = row.step
        parts: list[Line] = []
        for name in states:
            after = f"next.{name}"
            arrow = [f"→ {vector(row.values[after])}"] if after in results else []
            parts.append([name, vector(row.values[name]), *arrow])
        parts += [[name, vector(row.values[name])] for name in actions]
        parts += [["reward", f"→ {_reward(row)}"]]
        only_after = [name for name in results if name.removeprefix("next.") not in states]
        parts += [[name, f"→ {vector(row.values[name])}"] for name in only_after]
        lines.append([Styled(f"t = {row.step:,}", "bold"), Styled(f"  {_end(row)}".rstrip(), "yellow")])
        lines += [["  ", *line] for line in Table(parts).lines(width and width - 2)]
    return lines
