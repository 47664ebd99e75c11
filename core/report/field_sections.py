"""The parts of the page about fields: distributions, actions, correlation with the return, continuity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ..charts.marks import Bars, ChartLabels, Heatmap
from ..charts.marks import Histogram as HistogramChart
from ..progress import counted
from ..stats import QUANTILE_ERROR
from ..ted.schema import key_name
from .columns import FRACTIONS, ColumnHistogram, Distribution
from .figures import MOST_COLUMNS, FieldFigures
from .html import Child, Html, element, joined, table
from .sections import chart, details, section, side_by_side
from .subject import Subject
from .words import number, share, shown

_MARGIN = 20_000
"""Bytes of all else in the part about fields."""
_AT_FIRST = 30
"""Rows that are seen at once; more open with a click."""
_MOST_ACTIONS, _MOST_BARS = 24, 15
_FULL = 5
"""Times the steps of an even spread: the full colour of the map of actions."""
_JOINED = 2
"""Bins that are one cell of the map of actions."""


def fields(subjects: Sequence[Subject], most_bytes: int) -> Html:
    """Write the distributions of all columns, as many as take up to so many bytes."""
    own = max(0, most_bytes - _MARGIN) // len(subjects)
    return section("fields", "Fields", side_by_side(subjects, lambda subject, name: _fields(subject, own)))


def _fields(subject: Subject, most_bytes: int) -> Child:
    if subject.figures is None:
        return element("p", "No field can be read.")
    heads = ["field", "type", "histogram", "mean", "std", "min",
             *(f"{100 * fraction:g} %" for fraction in FRACTIONS), "max", "remarks"]  # fmt: skip
    rows, used, left = list[list[Child]](), 0, 0
    for found in subject.figures.fields:
        for row in _rows_of(found, subject.figures.steps):
            used += sum(len((cell or "").encode()) + 10 for cell in row) + 30
            if used <= most_bytes:
                rows.append(row)
            else:
                left += 1
    parts: list[Child] = [table(heads, rows[:_AT_FIRST], label=f"Distributions: {subject.name}", class_="fields")]
    if rows[_AT_FIRST:]:
        more = table(heads, rows[_AT_FIRST:], label=f"More distributions: {subject.name}", class_="fields")
        parts.append(details(f"{counted(len(rows) - _AT_FIRST, 'more row')}", more))
    if left:
        parts.append(
            element("p", f"{counted(left, 'row')} left out, for the size of the page: rbtool stats shows all.")
        )
    if not all(column.exact for found in subject.figures.fields for column in found.columns):
        parts.append(element("p", f"≈ Quantiles of large fields are within {QUANTILE_ERROR:.1%} of their value."))
    if sum(len(found.columns) for found in subject.figures.fields) >= MOST_COLUMNS:
        parts.append(element("p", f"After {MOST_COLUMNS:,} columns, fields are described as a whole."))
    others = (
        [field.name for field in subject.manifest.fields if _has_none(subject, field.name)] if subject.manifest else []
    )
    if others:
        names = f"{', '.join(others[:_AT_FIRST])}{', …' if len(others) > _AT_FIRST else ''}"
        why = "Next observations repeat those of the rows; text, ids and complex numbers have none."
        parts.append(element("p", f"Without figures here: {names}. {why}"))
    return joined(parts)


def _has_none(subject: Subject, name: str) -> bool:
    return subject.figures is not None and all(found.field.name != name for found in subject.figures.fields)


def _rows_of(found: FieldFigures, steps: int) -> Iterator[list[Child]]:
    form = f"{found.field.dtype} [{', '.join(map(str, found.field.shape))}]"
    if found.lost:
        lost = element("span", found.lost, class_="bad")
        yield [element("code", found.field.name), form, *[""] * (5 + len(FRACTIONS)), lost]
    for place, column in enumerate(found.columns):
        about = "≈ " if not column.exact and column.count else ""
        yield [
            element("code", found.label(place)), form, spark(column.histogram),
            number(column.mean), number(column.std), number(column.min),
            *(joined([about, number(value)]) for value in column.quantiles), number(column.max),
            ", ".join(_remarks(found, column, steps)),
        ]  # fmt: skip


def _remarks(found: FieldFigures, column: Distribution, steps: int) -> Iterator[str]:
    if found.rows < steps:
        yield f"only the first {found.rows:,} of {steps:,} rows, the others are lost"
    if column.constant:
        yield "constant"
    if column.nan:
        yield f"{column.nan:,} NaN"
    if column.infinite:
        yield f"{column.infinite:,} infinite"
    if found.pooled:
        yield f"all {math.prod(found.field.shape):,} numbers of a row together"


def spark(histogram: ColumnHistogram | None) -> Child:
    """Draw a histogram in a cell of a table; the numbers next to it are for those who do not see it."""
    if histogram is None:
        return ""
    top = max(histogram.counts, default=0) or 1
    heights = (max(0.5, 16 * count / top) if count else 0 for count in histogram.counts)
    path = f"M0 16{''.join(f'V{16 - height:.3g}h1' for height in heights)}V16z"
    drawn = element("path", d=path)
    return element("svg", drawn, class_="spark", viewBox=f"0 0 {len(histogram.counts)} 16", preserveAspectRatio="none",
                   aria_hidden="true", width=120, height=22)  # fmt: skip


# Actions ------------------------------------------------------------------------------------------


def actions(subjects: Sequence[Subject]) -> Html:
    """Write which actions there are, and which parts of the action space they leave out."""
    return section("actions", "Actions", side_by_side(subjects, _actions))


def _actions(subject: Subject, name: str) -> Child:
    columns = [
        (found.label(place), column)
        for found in (subject.figures.fields if subject.figures else ())
        if found.field.role == "action"
        for place, column in enumerate(found.columns)
        if column.histogram is not None
    ]
    if not columns:
        return element("p", "There are no actions in numbers.")
    shown_columns = columns[:_MOST_ACTIONS]
    few = [(label, column) for label, column in shown_columns if column.values]
    many = [(label, column) for label, column in shown_columns if not column.values]
    parts: list[Child] = [
        _counts(label, column, f"{name}-action{place}") for place, (label, column) in enumerate(few[:6])
    ]
    if len(many) == 1:
        parts.append(_one_action(*many[0], f"{name}-action"))
    elif many:
        parts.append(_map(many, f"{name}-actions"))
    rows = [_coverage(label, column) for label, column in shown_columns]
    heads = ["action", "range", "bins with actions", "at the low bound", "at the high bound", "outside"]
    left = len(columns) - len(shown_columns)
    return element(
        "div", *parts, table(heads, rows, label=f"Coverage of the action space: {subject.name}", class_="tight"),
        element("p", f"{counted(left, 'more action column')} left out.") if left else None, class_="figures",
    )  # fmt: skip


def _range(column: Distribution) -> ColumnHistogram:
    found = column.bounded or column.histogram
    assert found is not None
    return found


def _counts(label: str, column: Distribution, name: str) -> Html:
    values = dict(column.values)
    bounds = column.bounded
    if bounds is not None and bounds.high - bounds.low < 64:
        values = dict.fromkeys(range(round(bounds.low), round(bounds.high) + 1), 0) | values
    listed = sorted(values.items())[:64]
    labels = ChartLabels(title=f"{label}: steps with each value", x="steps")
    return chart(
        Bars([str(value) for value, _ in listed], np.array([count for _, count in listed]), labels), name, height=None
    )


def _one_action(label: str, column: Distribution, name: str) -> Html:
    bins = _range(column)
    edges = np.linspace(bins.low, bins.high, len(bins.counts) + 1)
    return chart(HistogramChart(np.array(bins.counts), edges, ChartLabels(title=label, x="value", y="steps")), name)


def _map(columns: Sequence[tuple[str, Distribution]], name: str) -> Html:
    """Draw a row for each column of the action: the share of its steps in each part of its range."""
    counts = np.array([_range(column).counts for _, column in columns], np.float64)
    joined_counts = counts.reshape(len(columns), -1, _JOINED).sum(2)
    shares = joined_counts / np.maximum(joined_counts.sum(1, keepdims=True), 1)
    ends = [(_range(column).low, _range(column).high) for _, column in columns]
    names = [f"{label} {shown(low)} … {shown(high)}" for (label, _), (low, high) in zip(columns, ends, strict=True)]
    limit = _FULL / shares.shape[1]
    labels = ChartLabels(title="Where actions are in their range", x="from the low to the high end of the range")
    drawn = Heatmap(shares, names, [""] * shares.shape[1], labels, limit)
    words = f"The full colour is a part with {limit:.0%} of the steps or more."
    return element("div", chart(drawn, name, height=None), element("p", words, class_="note"))


def _coverage(label: str, column: Distribution) -> list[Child]:
    bins = _range(column)
    limits = f"{shown(bins.low)} to {shown(bins.high)}"
    if column.values and bins.high - bins.low < 1e6:
        size = round(bins.high) - round(bins.low) + 1
        inside = sum(bins.low <= value <= bins.high for value, _ in column.values)
        covered = f"{inside:,} of {size:,} values"
    else:
        covered = f"{sum(count > 0 for count in bins.counts)} of {len(bins.counts)}"
    if column.bounded is None:
        return [element("code", label), f"{limits}, as recorded", covered, "–", "–", "–"]
    at = [share(count, column.count) for count in (column.at_low, column.at_high, bins.below + bins.above)]
    return [element("code", label), f"{limits}, the space", covered, *at]


# Correlation and continuity -----------------------------------------------------------------------


def correlation(subjects: Sequence[Subject]) -> Html:
    """Write which columns go along with the return of an episode."""
    words = (
        "Pearson's correlation between the mean of a column in each episode and the return of that episode. It is no "
        "cause: longer episodes alone can bring it about."
    )
    return section(
        "correlation", "Correlation with the return", element("p", words), side_by_side(subjects, _correlation)
    )


def _correlation(subject: Subject, name: str) -> Child:
    found = [
        (value, one.label(place))
        for one in (subject.figures.fields if subject.figures else ())
        if one.field.role not in {"reward", "done"}
        for place, value in enumerate(one.correlations)
        if value is not None
    ]
    if not found:
        return element("p", "There is none: it needs two episodes or more with returns that differ.")
    strongest = sorted(found, key=lambda one: -abs(one[0]))[:_MOST_BARS]
    labels = ChartLabels(title=f"Strongest of {counted(len(found), 'column')}", x="correlation with the return")
    drawn = Bars([label for _, label in strongest], np.array([value for value, _ in strongest]), labels)
    return chart(drawn, f"{name}-correlation", height=None)


def continuity(subjects: Sequence[Subject]) -> Html:
    """Write how many next observations are the observation of the row after them."""
    words = "Steps inside episodes whose next observation is, bit for bit, the observation of the following row."
    return section("continuity", "Next observations", element("p", words), side_by_side(subjects, _continuity))


def _continuity(subject: Subject, name: str) -> Child:
    followed = subject.figures.followed if subject.figures else ()
    if not followed:
        return element("p", "No field is both at the root and under next, or the episodes cannot be read.")
    rows = [
        [element("code", key_name(one.key)), number(one.steps), number(one.following), share(one.following, one.steps)]
        for one in followed
    ]
    episodes = subject.figures.episodes if subject.figures else None
    explicit = episodes.ends.explicit_next if episodes else 0
    note = (
        f"{counted(explicit, 'episode')} with next observations of their own, as the source has them."
        if explicit
        else ""
    )
    return joined([
        table(["state", "steps inside episodes", "followed", "share"], rows, label=f"Continuity: {subject.name}"),
        element("p", note) if note else None,
    ])  # fmt: skip
