"""`rbtool stats`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.progress import counted
from .help import Example
from .options import Dataset, Root, verb
from .output import Output
from .text import Cell, Line, Styled, Table, folded, number

if TYPE_CHECKING:
    from ..core.stats import FieldStats
    from ..core.verbs.stats import StatsResult

EXAMPLES = (
    Example("rbtool stats ./cartpole", "mean, deviation, extremes and quantiles of every field"),
    Example("rbtool stats ./cartpole --write-lerobot ./stats.json", "for meta/stats.json of LeRobot"),
    Example("rbtool stats ./cartpole --field observation --quantiles 0.05,0.95 --json", "one field, as JSON"),
)

_DIMENSIONS_SHOWN = 12


@verb("stats", EXAMPLES)
def stats(
    dataset: Dataset,
    *,
    out: Output,
    field: Annotated[
        list[str] | None, typer.Option("--field", metavar="KEY", help="Only this field, or group; may be repeated.")
    ] = None,
    quantiles: Annotated[
        list[str] | None,
        typer.Option("--quantiles", metavar="Q,Q", help="Numbers from 0 to 1, may be repeated. Default: 0.01 to 0.99."),
    ] = None,
    write_lerobot: Annotated[
        str | None,
        typer.Option("--write-lerobot", metavar="FILE", help="A new stats.json for LeRobot, exact over all rows."),
    ] = None,
    root: Root = None,
) -> None:
    """Show statistics of every field of a dataset.

    Reads every row once, and caches the result until a file of the dataset changes.
    """
    from ..core.verbs.stats import FRACTIONS
    from ..core.verbs.stats import stats as run

    fractions = _fractions(",".join(quantiles)) if quantiles else FRACTIONS
    result = out.run(run, dataset, fields=field, quantiles=fractions, write_lerobot=write_lerobot, root=root)
    out.show(result, [".".join(item.key) for item in result.fields], stats_lines)


def _fractions(text: str) -> Sequence[float]:
    from ..core.errors import UsageError

    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--quantiles is {text!r}, expected numbers from 0 to 1 with commas between them") from None


def stats_lines(result: StatsResult, width: int | None) -> list[list[Cell]]:
    """Return a row per dimension of small leaves and per large leaf, and remarks.

    If `width` columns are too few, each row becomes a block of lines.
    """
    shown = _middle_and_ends(result.fractions)
    heads = ["mean", "std", "min", *(_name(result.fractions[place]) for place in shown), "max"]
    rows: list[Line] = [[Styled(text, "dim") for text in ("field", "dtype", *heads, "")]]
    for field in result.fields:
        rows += _field_rows(field, shown)
    remarks = [line for field in result.fields if (line := _remark(field)) is not None]
    facts = [
        counted(result.steps, "step"),
        counted(result.episodes, "episode"),
        f"lower quantiles, exact within {result.quantile_error:.1%}",
        "remembered" if result.remembered else f"{result.seconds:.1f} s",
    ]
    table = Table(rows, right=frozenset(range(2, 2 + len(heads)))).lines(width) if result.fields else []
    lines: list[Line] = [*remarks, [" · ".join(facts if result.fields else facts[:2])]]
    if result.written is not None:
        lines.append([f"for LeRobot: {result.written}"])
    return [*table, *(part for line in lines for part in folded(line, width, 2))]


def _middle_and_ends(fractions: Sequence[float]) -> list[int]:
    """Return the quantiles to show: the lowest, the one nearest to the median, and the highest."""
    order = sorted(range(len(fractions)), key=lambda place: fractions[place])
    middle = min(order, key=lambda place: abs(fractions[place] - 0.5))
    return sorted({order[0], middle, order[-1]}, key=lambda place: fractions[place])


def _name(fraction: float) -> str:
    return f"q{100 * fraction:g}"


def _field_rows(field: FieldStats, shown: Sequence[int]) -> list[Line]:
    name, width = ".".join(field.key), len(field.count)
    if width > _DIMENSIONS_SHOWN:
        return [
            [f"{name} [{width}]", Styled(field.dtype, "cyan"), *(_spread(column) for column in _columns(field, shown))]
        ]
    rows: list[Line] = []
    for place in range(width):
        label = name if width == 1 else f"{name}[{place}]"
        note = Styled("constant", "yellow") if place in field.constant and field.count[place] else ""
        cells = [_cell(column[place]) for column in _columns(field, shown)]
        rows.append([label, Styled(field.dtype, "cyan"), *cells, note])
    return rows


def _columns(field: FieldStats, shown: Sequence[int]) -> list[Sequence[float | None]]:
    return [field.mean, field.std, field.min, *(field.quantiles[place] for place in shown), field.max]


def _cell(value: float | None) -> str:
    return "-" if value is None else number(value)


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{number(min(known))}…{number(max(known))}" if known else "-"


def _remark(field: FieldStats) -> list[Cell] | None:
    parts = []
    for count, what in ((sum(field.nan), "NaN"), (sum(field.infinite), "infinite value")):
        if count:
            parts.append(f"{count:,} NaN" if what == "NaN" else counted(count, what))
    if len(field.count) > _DIMENSIONS_SHOWN and field.constant:
        parts.append(
            f"{counted(len(field.constant), 'dimension')} never {'vary' if len(field.constant) > 1 else 'varies'}"
        )
    return [Styled(".".join(field.key), "yellow"), f"  {', '.join(parts)}"] if parts else None
