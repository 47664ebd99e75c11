"""The parts of the page about whole datasets: what they are, their episodes, findings and provenance."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from ..charts.figure import inline_svg
from ..charts.marks import Chart, ChartLabels, Lines, Series
from ..charts.marks import Histogram as HistogramChart
from ..format.contracts import Array
from ..format.documents import dump_json
from ..progress import counted, readable_size, redact
from ..ted.episodes import EndReason
from ..ted.rules import RULES, Finding
from .columns import Distribution
from .commands import reproducing
from .html import Child, Html, element, joined, table
from .subject import CheckedSubject, Subject
from .words import number, share, shown

Cards: TypeAlias = Callable[[Subject, str], Child]
"""Makes what is shown of one dataset; the text begins all ids in it."""

WIDTH = 336
"""Pixels of a chart: it fits on a telephone without being scaled, and several fit next to each other."""
_HEIGHT = 210
_FINDINGS, _RANGES, _STEPS, _NOTES = 100, 12, 30, 40
_LONGEST = 3000


def section(anchor: str, title: str, *children: Child) -> Html:
    """Write a part of the page."""
    return element("section", element("h2", title), *children, id=anchor, aria_label=title)


def side_by_side(subjects: Sequence[Subject], make: Cards) -> Html:
    """Write a card for each dataset, with its name where there are several."""
    several = len(subjects) > 1
    cards = [
        element(
            "article",
            element("h3", subject.name, class_=None if several else "unseen"),
            make(subject, f"d{place}"),
            class_="card",
        )
        for place, subject in enumerate(subjects, start=1)
    ]
    return element("div", *cards, class_="grid" if several else "one")


def chart(drawn: Chart, name: str, *, height: int | None = _HEIGHT) -> Html:
    """Draw a chart, which escapes its own words."""
    return element("div", Html(inline_svg(drawn, name=name, width=WIDTH, height=height)), class_="figure")


def details(summary: str, *children: Child) -> Html:
    """Write what is open on paper and closed at first on a screen."""
    return element("details", element("summary", summary), *children)


# What it is ---------------------------------------------------------------------------------------


def overview(subjects: Sequence[Subject]) -> Html:
    """Write a column of facts for each dataset."""
    facts = [dict(_facts(subject)) for subject in subjects]
    names = list(dict.fromkeys(name for one in facts for name in one))
    rows = [[name, *(one.get(name, "–") for one in facts)] for name in names]
    heads = ["fact", *(subject.name for subject in subjects)]
    return section("overview", "What it is", table(heads, rows, label="Facts", class_="facts"))


def _facts(subject: Subject) -> Iterator[tuple[str, Child]]:
    manifest, figures, checked = subject.manifest, subject.figures, subject.checked
    yield "place", element("code", subject.path)
    yield "check", verdict(checked)
    if subject.share is not None:
        yield "share of the mixture", f"{subject.share:.4g}"
    if manifest is None or figures is None:
        yield "contents", "It cannot be opened: see the findings."
        return
    kind = "tensordict folder" if not manifest.files and manifest.kind == "dataset" else manifest.kind
    yield "form", f"{kind}, layout {manifest.layout}, {readable_size(manifest.bytes)}"
    yield "steps", number(manifest.steps)
    yield "episodes", number(manifest.episodes)
    if figures.episodes is not None:
        counts = figures.episodes.ends.to_dict()
        ends = {reason.name.lower().replace("_", " "): counts[reason.name.lower()] for reason in EndReason}
        yield "ends", ", ".join(f"{count:,} {name}" for name, count in ends.items() if count) or "–"
        yield "length", _spread(figures.episodes.length)
        yield "return", _spread(figures.episodes.returns) if figures.episodes.returns else figures.episodes.no_returns
    yield "source", f"{manifest.request.source}: {manifest.request.id}"
    if manifest.resolved_revision:
        yield "revision", manifest.resolved_revision
    for transfer in subject.transfers[-1:]:
        yield "hub", f"{transfer.verb} {transfer.address}@{transfer.commit[:12]}, {transfer.time[:10]}"
    for key, value in subject.stated.items():
        yield key.replace("_", " "), redact(value)[:_LONGEST]
    for name, space in manifest.spaces.items():
        yield f"space of {name}", _long(dump_json(space))
    if manifest.files:
        yield "content digest", element("code", manifest.content_digest)


def _spread(found: Distribution) -> Child:
    if found.mean is None:
        return "–"
    return joined(["mean ", number(found.mean), ", from ", number(found.min), " to ", number(found.max)])


def _long(value: str) -> Child:
    if len(value) <= 160:
        return element("code", value)
    cut = value if len(value) <= _LONGEST else f"{value[:_LONGEST]} …"
    return details(f"{value[:40]} …", element("code", cut))


def verdict(checked: CheckedSubject) -> Html:
    """Write how many findings there are."""
    words = f"{counted(checked.errors, 'error')}, {counted(checked.warnings, 'warning')}"
    state = "bad" if checked.errors else "doubtful" if checked.warnings else "good"
    return element("a", words, href="#findings", class_=f"verdict {state}")


# Findings -----------------------------------------------------------------------------------------


def findings(subjects: Sequence[Subject]) -> Html:
    """Write what `rbtool check` found, and what the rules check."""
    named = {one.rule for subject in subjects for one in subject.checked.findings}
    rows = [
        [
            element("span", rule.rule, id=f"rule-{rule.rule}"),
            rule.name,
            rule.checks,
            f"docs/reference/checks.md, {rule.rule}",
        ]
        for rule in RULES
        if rule.rule in named
    ]
    known = table(["rule", "name", "what holds", "described in"], rows, label="Rules with findings")
    return section(
        "findings", "Findings of rbtool check", side_by_side(subjects, lambda subject, name: _findings(subject)),
        details("What these rules check", known) if rows else None,
    )  # fmt: skip


def _findings(subject: Subject) -> Html:
    checked = subject.checked
    ran = f"{counted(checked.rules, 'rule')} ran: " if checked.rules else ""
    parts: list[Child] = [element("p", ran, verdict(checked), ".")]
    if checked.skipped:
        parts.append(element("p", f"Not tried, because files are damaged: {', '.join(checked.skipped)}."))
    parts += [element("p", f"Note: {note}.", class_="note") for note in checked.notes]
    parts.append(element("ul", *(_finding(one) for one in checked.findings[:_FINDINGS]), class_="findings"))
    if len(checked.findings) > _FINDINGS:
        parts.append(element("p", f"{len(checked.findings) - _FINDINGS:,} more are left out here."))
    return joined(parts)


def _finding(one: Finding) -> Html:
    link = element("a", one.rule, href=f"#rule-{one.rule}")
    head = element("strong", one.severity, class_="bad" if one.severity == "error" else "doubtful")
    return element("li", head, " ", link, f" {one.name}: {one.message[:_LONGEST]}", _places(one))


def _places(one: Finding) -> Child:
    steps = [f"{low:,}" if high == low + 1 else f"{low:,} to {high - 1:,}" for low, high in one.steps[:_RANGES]]
    episodes = [f"{number:,}" for number in one.episodes[:_RANGES]]
    lines = [("Steps", steps, len(one.steps)), ("Episodes", episodes, len(one.episodes))]
    parts = [f"{name}: {', '.join(shown_ones)}{_more(total)}." for name, shown_ones, total in lines if total]
    return details("Where", *(element("p", part) for part in parts)) if parts else None


def _more(total: int) -> str:
    return f", and {total - _RANGES:,} more" if total > _RANGES else ""


# Episodes -----------------------------------------------------------------------------------------


def episodes(subjects: Sequence[Subject]) -> Html:
    """Write how episodes end, how long they are, and what they return; alike axes where there are several datasets."""
    known = [subject.figures.episodes for subject in subjects if subject.figures and subject.figures.episodes]
    lengths = _edges([one.table.length for one in known])
    returns = _edges([one.table.total_reward for one in known if one.returns is not None])

    def card(subject: Subject, name: str) -> Child:
        figures = subject.figures
        if figures is None or figures.episodes is None:
            return element("p", f"There is no episode table that can be read. {figures.lost if figures else ''}")
        found = figures.episodes
        if not len(found.table):
            return element("p", "There are no episodes.")
        parts: list[Child] = [
            _ends(subject),
            _histogram(found.table.length, lengths, "Length", "steps", f"{name}-length"),
        ]
        if found.returns is None:
            return joined([*parts, element("p", f"There are no returns. {found.no_returns}")])
        parts.append(_histogram(found.table.total_reward, returns, "Return", "return", f"{name}-return"))
        return element("div", *parts, _curve(subject, name), class_="figures")

    return section("episodes", "Episodes", side_by_side(subjects, card))


def _ends(subject: Subject) -> Child:
    assert subject.figures is not None
    assert subject.figures.episodes is not None
    counts, total = subject.figures.episodes.ends.to_dict(), len(subject.figures.episodes.table)
    reasons = [(reason.name.lower().replace("_", " "), counts[reason.name.lower()]) for reason in EndReason]
    rows = [[name, number(count), share(count, total)] for name, count in reasons]
    return element(
        "div", table(["end", "episodes", "share"], rows, label=f"How episodes end: {subject.name}"), class_="figure"
    )


def _edges(values: Sequence[Array]) -> Array:
    """Return the edges of bins that all of these numbers, one for each episode, are counted in."""
    together = np.concatenate([np.zeros(0), *(one.astype(np.float64) for one in values)])
    finite = together[np.isfinite(together)]
    if not len(finite):
        return np.linspace(0, 1, 2)
    low, high = finite.min(), finite.max()
    whole = all(one.dtype.kind in "iu" for one in values)
    if whole and high - low < 24:
        return np.arange(low, high + 2) - 0.5
    with np.errstate(over="ignore"):
        edges = np.linspace(low, high, 25)
    return edges if np.isfinite(edges).all() and (np.diff(edges) > 0).all() else np.array([low, high])


def _histogram(values: Array, edges: Array, title: str, unit: str, name: str) -> Html:
    finite = values[np.isfinite(values)]
    if len(finite) and finite.min() == finite.max():
        same = f"{title}: {shown(finite[0].item())} in all {len(finite):,} episodes."
        return element("p", same) if len(finite) == len(values) else element("p", f"{same[:-1]} with a finite one.")
    with np.errstate(over="ignore"):
        counts = np.histogram(finite, edges)[0] if edges[0] < edges[-1] else np.array([len(finite)])
    apart = len(values) - len(finite)
    note = element("p", f"{apart:,} episodes have no finite return.") if apart else None
    drawn = HistogramChart(counts, edges, ChartLabels(title=title, x=unit, y="episodes"))
    return element("div", chart(drawn, name), note)


def _curve(subject: Subject, name: str) -> Child:
    assert subject.figures is not None
    assert subject.figures.episodes is not None
    curve, table = subject.figures.episodes.curve, subject.figures.episodes.table
    if curve is None:
        return None
    series = [Series("mean", curve.first, curve.mean)]
    if len(curve.first) < len(table):
        series += [Series("lowest", curve.first, curve.low), Series("highest", curve.first, curve.high)]
    labels = ChartLabels(title="Return over episodes", x="episode, in the order of storage", y="return")
    return chart(Lines(series, labels), f"{name}-curve", height=_HEIGHT + 20)


# Provenance ---------------------------------------------------------------------------------------


def provenance(subjects: Sequence[Subject], command: str) -> Html:
    """Write the steps by which each dataset was made, with the commands that do them again."""
    again = element("p", "This page: ", element("code", command))
    return section(
        "provenance", "How it was made", side_by_side(subjects, lambda subject, name: _provenance(subject)), again
    )


def _provenance(subject: Subject) -> Child:
    manifest = subject.manifest
    if manifest is None:
        return element("p", "The manifest cannot be read.")
    steps = reproducing(manifest)
    items = []
    for step, command in steps[-_STEPS:]:
        arguments = redact(json.dumps(dict(step.arguments), ensure_ascii=False, indent=1, default=str))
        inputs = [f"{name} {digest}" for name, digest in list(step.inputs.items())[:_RANGES]]
        items.append(element(
            "li", element("p", element("strong", step.verb), f", {step.time}, rbtool {step.version}"),
            element("pre", element("code", redact(command)[:_LONGEST]), tabindex=0) if command
            else element("p", "No single command does this again."),
            details("Arguments and inputs", element("pre", element("code", arguments[:_LONGEST]), tabindex=0),
                    element("p", f"Inputs: {'; '.join(inputs) or 'none recorded'}.")),
        ))  # fmt: skip
    notes = [element("li", note) for note in manifest.notes[:_NOTES]]
    notes += [element("li", f"{key} was renamed to {to}") for key, to in list(manifest.renamed_keys.items())[:_NOTES]]
    notes += [element("li", f"{one.key} was left out: {one.why}") for one in manifest.dropped_keys[:_NOTES]]
    more = element("p", f"The first {len(steps) - _STEPS:,} steps are left out.") if len(steps) > _STEPS else None
    return joined([
        more, element("ol", *items) if items else element("p", "No step is recorded."),
        element("h4", "Notes") if notes else None, element("ul", *notes) if notes else None,
        element("p", f"Written by {manifest.created_by}.") if manifest.files else None,
    ])  # fmt: skip


def described(distribution: Distribution) -> str:
    """Describe a distribution in a few words, for those who do not see its histogram."""
    return f"from {shown(distribution.min)} to {shown(distribution.max)}, median {shown(distribution.quantiles[2])}"
