"""Chosen episodes step by step: rewards, actions and frames, for a page on which one moves through them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import CorruptDataError, FormatError, SchemaError, UsageError
from ..format.contracts import Array, StepReader
from ..format.episodes import EpisodeTable
from ..format.returns import return_field_of
from ..ted.episodes import EndReason
from ..ted.schema import Field, as_numbers
from .figures import Figures
from .images import ImageSource, Sheet, sheet_of

_STEPS = 500
"""Steps of an episode that are shown; of longer ones, every second, third, …"""
_FRAMES = 40
_ACTIONS = 8
"""Columns of actions that are shown."""
_TOGETHER = 1 << 15
"""Rows that are read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The values of one column at the steps shown, float64 `[n]`."""

    name: str
    values: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEpisode:
    """An episode: why it was chosen, the steps shown and their traces; frames of some of the steps.

    `row` is its place in the storage order, `stride` the distance between the steps shown; the last step is always
    among them. `frame_steps` are the steps that `frames` show. `more_actions` counts the columns of actions left out.
    """

    row: int
    number: int
    why: str
    length: int
    total: float | None
    end: str
    stride: int
    steps: Array
    traces: tuple[Trace, ...]
    more_actions: int
    frames: Sheet | None = None
    frame_steps: tuple[int, ...] = ()
    note: str = ""


def chosen_episodes(table: EpisodeTable, most: int, *, returns: bool) -> list[tuple[int, str]]:
    """Choose rows of the episode table that are worth a look, each with the reason: at most so many."""
    if not len(table):
        return []
    reasons: dict[int, list[str]] = {}

    def add(row: int, why: str) -> None:
        reasons.setdefault(row, []).append(why)

    known = np.flatnonzero(np.isfinite(table.total_reward)) if returns else np.zeros(0, np.int64)
    if len(known):
        order = known[np.argsort(table.total_reward[known], kind="stable")]
        add(int(order[-1]), "highest return")
        add(int(order[0]), "lowest return")
        add(int(order[(len(order) - 1) // 2]), "median return")
    add(int(table.length.argmax()), "longest")
    add(0, "first")
    add(len(table) - 1, "last")
    return [(row, ", ".join(why)) for row, why in list(reasons.items())[:most]]


def show_episodes(
    reader: StepReader, figures: Figures, sources: list[ImageSource], most: int, frame_bytes: int
) -> list[ShownEpisode]:
    """Read the chosen episodes; frames are those of the first field with images, in so many bytes an episode."""
    if figures.episodes is None or not figures.episodes.table.covers(figures.steps):
        return []
    table = figures.episodes.table
    returns = figures.episodes.returns is not None
    found = []
    for row, why in chosen_episodes(table, most, returns=returns):
        try:
            found.append(_shown(reader, table, row, why, sources, frame_bytes, returns=returns))
        except (CorruptDataError, FormatError):
            continue  # what is damaged is among the findings
    return found


def _shown(
    reader: StepReader, table: EpisodeTable, row: int, why: str, sources: list[ImageSource], frame_bytes: int, *,
    returns: bool,
) -> ShownEpisode:  # fmt: skip
    start, length = int(table.start[row]), int(table.length[row])
    stride = -(-length // _STEPS)
    steps = np.union1d(np.arange(0, length, stride), [length - 1])
    traces, more = _traces(reader, start, steps)
    sheet, frame_steps, note = None, np.zeros(0, np.int64), ""
    if sources and frame_bytes:
        frame_steps = np.unique(np.linspace(0, length - 1, min(length, _FRAMES)).round().astype(np.int64))
        try:
            sheet = sheet_of(sources[0].frames((start + frame_steps).tolist()), len(frame_steps), frame_bytes)
        except (CorruptDataError, SchemaError, UsageError) as error:
            note = str(error)
    return ShownEpisode(
        row=row, number=int(table.episode[row]), why=why, length=length,
        total=float(table.total_reward[row]) if returns else None,
        end=EndReason(int(table.end_reason[row])).name.lower().replace("_", " "),
        stride=stride, steps=steps, traces=traces, more_actions=more, frames=sheet,
        frame_steps=tuple(frame_steps.tolist()) if sheet else (), note=note,
    )  # fmt: skip


def _traces(reader: StepReader, start: int, steps: Array) -> tuple[tuple[Trace, ...], int]:
    traces, columns = [], []
    reward = return_field_of(reader.manifest)
    if reward is not None:
        traces.append(Trace(name="reward", values=_values(reader, reward, start, steps)[:, 0]))
    for field in reader.fields:
        if field.key[0] == "action" and "complex" not in field.dtype and field.role != "text" and field.row_bytes:
            values = _values(reader, field, start, steps)
            width = values.shape[1]
            names = [field.name] if width == 1 else [f"{field.name}[{place}]" for place in range(width)]
            columns += [Trace(name=name, values=values[:, place]) for place, name in enumerate(names)]
    return (*traces, *columns[:_ACTIONS]), max(0, len(columns) - _ACTIONS)


def _values(reader: StepReader, field: Field, start: int, steps: Array) -> Array:
    """Return the rows of these steps of an episode, ascending, as float64 `[n, width]`."""
    found, last = [], int(steps[-1]) + 1
    for low in range(0, last, _TOGETHER):
        high = min(low + _TOGETHER, last)
        wanted = steps[(steps >= low) & (steps < high)] - low
        if len(wanted):
            rows = as_numbers(reader.read(field.key, start + low, start + high), field.dtype)[wanted]
            found.append(rows.reshape(len(rows), -1).astype(np.float64))
    return np.concatenate(found)
