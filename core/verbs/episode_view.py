"""One episode as rows to look at: what was observed, what was done, what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..dataset import Array, EpisodeTable, Reader, StepReader, returns_are_known, table_with_returns
from ..errors import UsageError
from ..stats import mean_of
from ..ted import NEXT, EndReason, Field, Final, Key, as_numbers, key_name, ted_fields

__all__ = ["EpisodeView", "RowView", "source_view", "steps_view"]

_MOST_NUMBERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """Step `step` of the episode. `values` maps each leaf's dotted name to its value.

    Text is decoded; a row of more than 64 numbers is given as its shape, range and mean.
    """

    step: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeView:
    """An episode: its number, its length in steps, how it ends, and some of its rows (the last one always).

    `total_reward` is None where rewards are sums over n steps and those of single steps are not kept. `final` says of
    the observation after the last step whether it is `observed`, is the last one `repeated`, or was absent, so that
    the step before it was `dropped`.
    """

    episode: int
    length: int
    end: str
    total_reward: float | None
    rows: tuple[RowView, ...]
    final: str = "observed"


def steps_view(reader: StepReader, number: int, head: int | None) -> EpisodeView:
    """Show an episode of what rbtool wrote."""
    table = table_with_returns(reader)
    row = _row_of(table, number)
    start = int(table.start[row])

    def read(key: Key, step: int) -> Array:
        return np.asarray(reader.read(key, start + step, start + step + 1)[0])

    wanted = _wanted(int(table.length[row]), head)
    rows = [_row_view(reader.fields, step, lambda key, step=step: read(key, step)) for step in wanted]  # type: ignore[misc]
    return _view(table, row, rows, known=returns_are_known(reader.manifest))


def source_view(reader: Reader, table: EpisodeTable, number: int, head: int | None) -> EpisodeView:
    """Show an episode of a raw dataset."""
    row = _row_of(table, number)
    source = reader.facts().fields
    fields, timings = ted_fields(source), {field.key: timing for field, timing in source}
    wanted, rows, before = set(_wanted(int(table.length[row]), head)), list[RowView](), 0
    for piece in reader.pieces([number]):
        for step in sorted(wanted & set(range(before, before + len(piece)))):
            values = {key: array[step - before] for key, array in piece.columns.items()}
            values |= {
                (NEXT, *key): piece.rows_after(key)[step - before]
                if timings[key] == "state"
                else piece.columns[key][step - before]
                for key in piece.columns
            }
            values |= _flags(piece.terminated[step - before], piece.truncated[step - before], number)
            if piece.last and step - before == len(piece) - 1:
                values |= _flags(table.terminated[row], table.truncated[row], number)
            rows.append(_row_view(fields, step, lambda key, values=values: np.asarray(values[key])))  # type: ignore[misc]
        before += len(piece)
    return _view(table, row, rows)


def _flags(terminated: Any, truncated: Any, number: int) -> dict[Key, Any]:
    return {
        ("episode",): number,
        (NEXT, "terminated"): terminated,
        (NEXT, "truncated"): truncated,
        (NEXT, "done"): terminated | truncated,
    }


def _row_of(table: EpisodeTable, number: int) -> int:
    found = np.flatnonzero(table.episode == number)
    if not len(found):
        known = f"{int(table.episode.min())} to {int(table.episode.max())}" if len(table) else "none"
        raise UsageError(f"episode {number} is not there: there are {len(table)} ({known})")
    return int(found[0])


def _wanted(length: int, head: int | None) -> list[int]:
    """Steps to show: the first ones, and the last."""
    return sorted({*range(min(length, length if head is None else head)), length - 1})


def _view(table: EpisodeTable, row: int, rows: Iterable[RowView], *, known: bool = True) -> EpisodeView:
    return EpisodeView(
        episode=int(table.episode[row]),
        length=int(table.length[row]),
        end=EndReason(int(table.end_reason[row])).name.lower().replace("_", " "),
        total_reward=float(table.total_reward[row]) if known else None,
        rows=tuple(rows),
        final=Final(int(table.final[row])).name.lower(),
    )


def _row_view(fields: Iterable[Field], step: int, read: Callable[[Key], Array]) -> RowView:
    listed = list(fields)
    lengths = {field.key for field in listed if field.role == "text" and field.dtype == "int32"}
    values = {}
    for field in listed:
        if field.role == "text" and field.dtype == "uint8":
            length = (*field.key[:-1], f"{field.key[-1]}_length")
            row = read(field.key)
            used = int(read(length)) if length in lengths else len(row)
            values[field.name] = row[:used].tobytes().decode("utf-8", "replace")
        elif field.key not in lengths:
            values[key_name(field.key)] = _value(read(field.key), field)
    return RowView(step=step, values=values)


def _value(row: Array, field: Field) -> Any:
    numbers = as_numbers(row, field.dtype)
    if numbers.dtype.kind == "c":
        return np.array2string(numbers)
    if numbers.size <= _MOST_NUMBERS:
        return numbers.tolist()
    low, high = numbers.min().item(), numbers.max().item()
    return {"shape": list(numbers.shape), "min": low, "max": high, "mean": mean_of(numbers)}
