"""The page of a report: one self-contained HTML file with style, script, charts and images, without any request.

`element` makes HTML with everything escaped; each section is a function from datasets to HTML; `page_of` joins them.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, TypeAlias

import numpy as np

from ..format.contracts import Array
from ..format.documents import dump_json
from ..format.manifest import Manifest, Provenance, space_text
from ..progress import counted, readable_size, redact
from ..stats import QUANTILE_ERROR
from ..ted.episodes import EndReason
from ..ted.rules import RULE_BY_ID, Finding, known_rules
from ..ted.schema import key_name
from .charts import Bars, Chart, ChartLabels, Heatmap, Lines, Series, inline_svg, readable, style_sheet
from .charts import Histogram as HistogramChart
from .charts import shown as rounded
from .figures import FRACTIONS, MOST_COLUMNS, ColumnHistogram, Distribution, FieldFigures
from .subject import CheckedSubject, Evidence, Sheet, ShownEpisode, ShownImages, Subject, Trace


class Html(str):
    """Markup that may be inserted unescaped: made by `element` and `joined`, never taken from a dataset."""

    __slots__ = ()


Child: TypeAlias = str | None
_VOID = frozenset({"br", "col", "img", "input", "meta"})
_SHAPES = frozenset({"line", "path", "polyline", "rect"})
"""SVG elements without content; they have to be closed, or browsers nest the following elements in them, undrawn."""


def text(value: str) -> Html:
    """Escape a text; control characters and those that change the writing direction become visible."""
    return value if isinstance(value, Html) else Html(html.escape(readable(value)))


def joined(children: Iterable[Child], between: str = "") -> Html:
    """Join markup and texts; texts are escaped."""
    return Html(text(between).join(text(child) for child in children if child is not None))


def element(tag: str, *children: Child, **attributes: str | float | bool | None) -> Html:
    """Return an element; attribute values are escaped.

    In attribute names `class_` stands for `class`, and `_` for `-`. The value True makes an attribute without a value;
    False and None leave the attribute out.
    """
    given = []
    for name, value in attributes.items():
        key = name.rstrip("_").replace("_", "-")
        if value is True:
            given.append(f" {key}")
        elif value is not None and value is not False:
            given.append(f' {key}="{text(str(value))}"')
    if tag in _SHAPES:
        return Html(f"<{tag}{''.join(given)} />")
    start = f"<{tag}{''.join(given)}>"
    return Html(start if tag in _VOID else f"{start}{joined(children)}</{tag}>")


def table(
    heads: Iterable[Child], rows: Iterable[Iterable[Child]], *, label: str, row_heads: bool = True, class_: str = ""
) -> Html:
    """Return a table that scrolls by itself if the page is too narrow; the first cell of a row is its heading."""

    def cells(row: Iterable[Child]) -> Iterable[Html]:
        for place, cell in enumerate(row):
            yield element("th", cell, scope="row") if row_heads and not place else element("td", cell)

    head = element("thead", element("tr", *(element("th", one, scope="col") for one in heads)))
    body = element("tbody", *(element("tr", *cells(row)) for row in rows))
    inner = element("table", element("caption", label, class_="unseen"), head, body, class_=class_ or None)
    return element("div", inner, class_="scroll", tabindex=0, role="region", aria_label=label)


def shown(value: float | None) -> str:
    """Format a number: whole numbers of up to nine digits in full, others to four digits, None as a dash."""
    return "–" if value is None else rounded(value)


def number(value: float | None) -> Html | str:
    """Return a rounded number; if rounding changed it, as a `<data>` element with the exact value."""
    short = shown(value)
    return short if value is None or repr(value) == short else element("data", short, value=repr(value))


def share(part: int, whole: int) -> str:
    """Format a share in per cent; never "0 %" if it is more than nothing, nor "100 %" if it is not all."""
    if not whole:
        return "–"
    percent = 100 * part / whole
    if part and percent < 0.1:
        return "< 0.1 %"
    if part < whole and percent > 99.9:
        return "> 99.9 %"
    return f"{percent:.1f} %".replace(".0 %", " %")


Cards: TypeAlias = Callable[[Subject, str], Child]
"""Makes the card of one dataset; the text is a prefix for all ids in it."""
WIDTH = 336
"""Width of a chart in pixels: it fits on a phone without scaling, and several fit side by side."""
_HEIGHT = 210
_LONGEST = 3000


def section(anchor: str, title: str, *children: Child) -> Html:
    """Return a section of the page."""
    return element("section", element("h2", title), *children, id=anchor, aria_label=title)


def side_by_side(subjects: Sequence[Subject], make: Cards) -> Html:
    """Return a card for each dataset, with a heading if there are several."""
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
    """Draw a chart as inline SVG (which escapes its own labels)."""
    return element("div", Html(inline_svg(drawn, name=name, width=WIDTH, height=height)), class_="figure")


def details(summary: str, *children: Child) -> Html:
    """Return a part that is collapsed at first on a screen, and expanded in print."""
    return element("details", element("summary", summary), *children)


# What it is ---------------------------------------------------------------------------------------


def overview(subjects: Sequence[Subject]) -> Html:
    """Return the facts about each dataset, side by side."""
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
        yield f"space of {name}", _space(space)
    if manifest.files:
        yield "content digest", element("code", manifest.content_digest)


def _spread(found: Distribution) -> Child:
    if found.mean is None:
        return "–"
    return joined(["mean ", number(found.mean), ", from ", number(found.min), " to ", number(found.max)])


def _space(space: Any) -> Child:
    """Describe a space in words; a collapsed part has the whole document, with the bounds of each number."""
    words, document = space_text(space), dump_json(space)
    if isinstance(space, Mapping) and space.get("type") in {"Discrete", "MultiDiscrete", "MultiBinary", "Text"}:
        return words[:_LONGEST]
    return details(words[:_LONGEST], element("code", document[:_LONGEST], " …" if document[_LONGEST:] else None))


# Findings -----------------------------------------------------------------------------------------


def verdict(checked: CheckedSubject) -> Html:
    """Return a summary of a dataset's findings: errors, warnings, or none."""
    words = f"{counted(checked.errors, 'error')}, {counted(checked.warnings, 'warning')}"
    state = "bad" if checked.errors else "doubtful" if checked.warnings else "good"
    return element("a", words, href="#findings", class_=f"verdict {state}")


def findings(subjects: Sequence[Subject]) -> Html:
    """Return what `rbtool check` found, with the meaning of each rule."""
    named = {one.rule for subject in subjects for one in subject.checked.findings}
    rows = [
        [
            element("span", rule.rule, id=f"rule-{rule.rule}"),
            rule.name,
            rule.checks,
            f"docs/reference/{'checks' if rule.rule in RULE_BY_ID else 'behaviour'}.md, {rule.rule}",
        ]
        for rule in known_rules()
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
    items = (_finding(one, subject.evidence.get(place)) for place, one in enumerate(checked.findings[:_FINDINGS]))
    parts.append(element("ul", *items, class_="findings"))
    if len(checked.findings) > _FINDINGS:
        parts.append(element("p", f"{len(checked.findings) - _FINDINGS:,} more are left out here."))
    return joined(parts)


def _finding(one: Finding, evidence: Evidence | None) -> Html:
    link = element("a", one.rule, href=f"#rule-{one.rule}")
    head = element("strong", one.severity, class_="bad" if one.severity == "error" else "doubtful")
    text = "; ".join(filter(None, (f" {one.name}: {one.message[:_LONGEST]}", one.why, one.mend)))
    return element("li", head, " ", link, text, _places(one), None if evidence is None else _evidence(evidence))


def _evidence(one: Evidence) -> Html:
    """Draw the components and frames of an episode in which a finding is seen, with the steps concerned marked."""
    words = f"Episode {one.number:,}, {counted(one.length, 'step')}"
    if one.marks:
        low, high = one.marks[0]
        words += f"; marked: {f'step {low:,}' if high == low + 1 else f'steps {low:,} to {high - 1:,}'}"
        words += f" and {len(one.marks) - 1:,} more places" if len(one.marks) > 1 else ""
    if one.usual:
        words += "; the thin line is an episode without the finding"
    parts: list[Child] = [element("figcaption", words)]
    if one.frames is not None:
        at = ", ".join(f"{step:,}" for step in one.frame_steps)
        caption = f"{one.camera} at steps {at}"
        parts.append(element("img", src=one.frames.data, alt=caption, class_="sheet"))
        parts.append(element("figcaption", caption))
    usual = one.usual or (None,) * len(one.traces)
    lanes = [_marked_lane(trace, one, other) for trace, other in zip(one.traces, usual, strict=True)]
    parts.append(element("div", *lanes, class_="lanes") if lanes else None)
    return element("figure", *parts, class_="evidence")


def _marked_lane(trace: Trace, one: Evidence, usual: Array | None) -> Html:
    everything = trace.values if usual is None else np.concatenate((trace.values, usual))
    finite = everything[np.isfinite(everything)]
    limits = f"{shown(float(finite.min()))} … {shown(float(finite.max()))}" if len(finite) else "no finite value"
    within = (float(finite.min()), float(finite.max())) if len(finite) else None
    scale = _TRACE_WIDTH / max(1, one.length - 1)
    marks = [
        element("rect", class_="mark", x=round(low * scale, 1), y=0, height=_TRACE_HEIGHT,
                width=max(4.0, round((high - 1 - low) * scale, 1)))
        for low, high in one.marks
    ]  # fmt: skip
    drawn = [element("polyline", points=points) for points in _lines(trace.values, one.steps, within)]
    if usual is not None and len(usual):
        thin = _lines(usual, np.arange(len(usual)), within)
        drawn = [*(element("polyline", points=points, class_="usual") for points in thin), *drawn]
    svg = element(
        "svg", *marks, *drawn, class_=f"lane {trace.kind}", viewBox=f"0 0 {_TRACE_WIDTH} {_TRACE_HEIGHT}",
        preserveAspectRatio="none", role="img", aria_label=f"{trace.name}, {limits}",
    )  # fmt: skip
    return element("figure", element("figcaption", element("code", trace.name), " ", element("span", limits)), svg)


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
    """Return charts of how episodes end, their lengths and returns; several datasets share the axes."""
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
    """Return common bin edges for several arrays, each with one number per episode."""
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
    """Return the steps that made each dataset, with the commands that repeat them."""
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
            "li", element("p", element("strong", step.verb), f", {_moment(step.time)}, rbtool {step.version}"),
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


def _moment(time: str) -> str:
    """Return a time to the minute; all recorded times are UTC."""
    return f"{time[:16].replace('T', ' ')} UTC" if "T" in time else time


def described(distribution: Distribution) -> str:
    """Describe a distribution in a few words, for readers who cannot see its histogram."""
    return f"from {shown(distribution.min)} to {shown(distribution.max)}, median {shown(distribution.quantiles[2])}"


# Commands that make the dataset again, from the steps of its provenance ---------------------------


_SWITCHES = frozenset(
    {"skip_bad", "local", "in_order", "allow_duplicates", "cast", "trust_pickle", "render", "trim_idle", "full"}
)
_OPTIONS = (
    "episodes", "layout", "final_step", "horizon", "ends", "filter_key", "reward", "episode_key", "images",
    "jpeg", "trust_pickle", "rlds_last", "skip_bad", "max_episodes",
)  # fmt: skip
"""Arguments of `convert` and `download` that are options of the same name."""


def reproducing(manifest: Manifest) -> list[tuple[Provenance, str]]:
    """Return each step of the provenance with the command that repeats it, or "" if no command does.

    The intermediate datasets are called `step-1`, `step-2`, …, and the last one `DEST`. The command of a merge names
    the datasets that were merged; their own steps come before it.
    """
    steps = manifest.provenance
    found, before = [], ""
    for count, step in enumerate(steps, start=1):
        after = "DEST" if count == len(steps) else f"step-{count}"
        command = _command(step, before, after, manifest)
        found.append((step, command))
        before = after
        if step.verb == "download":
            before = f"{step.arguments.get('source')}:{step.arguments.get('id')}"
        elif step.verb == "split":
            before = f"{after}/{step.arguments.get('part')}"
    return found


def _command(step: Provenance, before: str, after: str, manifest: Manifest) -> str:
    given, verb = step.arguments, step.verb
    if verb in {"convert", "download"} and ("path" in given or "id" in given):
        return _of_source(verb, given, after, manifest)
    if verb == "preprocess":
        return _preprocess(given, before or "DATASET", after)
    if verb == "clean":
        names = ("drop", "dedupe", "min_length", "trim_idle", "fix", "full", "thresholds", "baseline")
        return _line(verb, before or str(given.get("dataset")), after, **{name: given.get(name) for name in names})
    if verb == "merge" and _are_texts(given.get("datasets")):
        schema = "" if given.get("schema") in (None, "error") else str(given["schema"])
        return _line("merge", *given["datasets"], after, schema=schema, cast=given.get("cast"), **_layout(given))
    if verb == "split" and isinstance(given.get("parts"), Mapping):
        parts = {name: share for name, share in given["parts"].items() if name in {"train", "val", "test"}}
        by = None if given.get("by") == "episode" else given.get("by")
        more = {name: given.get(name) for name in ("seed", "stratify", "in_order", "allow_duplicates")}
        return _line("split", before or str(given.get("dataset")), dest=after, **parts, by=by, **more, **_layout(given))
    if verb == "record" and (given.get("policy") in ("random", "expert") or ".py:" in str(given.get("policy"))):
        policy = None if given["policy"] == "random" else given["policy"]
        more = {name: given.get(name) for name in ("episodes", "seed", "max_steps", "render")}
        return _line(verb, str(given.get("env")), after, **more, policy=policy)
    if verb == "checkpoint save" and "form" in given:
        return _line(verb, before or str(given.get("dataset")), after, **{"as": given["form"]})
    if verb == "checkpoint load":
        return _line(verb, before or str(given.get("checkpoint")), after, **_layout(given))
    return ""


def _of_source(verb: str, given: Mapping[str, Any], after: str, manifest: Manifest) -> str:
    options = {name: given.get(name) for name in _OPTIONS if name not in ("layout", "final_step")}
    final = None if given.get("final_step") == "auto" else given.get("final_step")
    options |= {"final_step": final, **_layout(given)}
    if _are_texts(given.get("map")):
        options["map"] = given["map"]
    if verb == "convert":
        return _line(verb, str(given["path"]), after, **options)
    local = given.get("local")
    revision = None if local else manifest.resolved_revision or given.get("revision")
    return _line(verb, str(given.get("source")), str(given["id"]), local=local, revision=revision, **options)


def _layout(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"layout": given.get("layout"), "compress": given.get("compress")}


def _preprocess(given: Mapping[str, Any], before: str, after: str) -> str:
    options = {"chunk_size": given.get("chunk_size"), "num_frames": given.get("num_frames"), "dest": after}
    skip_bad = given.get("skip_bad")
    if isinstance(given.get("operations"), list):
        document = "\n\n".join(_operation(one) for one in given["operations"] if isinstance(one, Mapping))
        command = _line("preprocess", before, pipeline="operations.toml", **options, skip_bad=skip_bad)
        return f"cat > operations.toml <<'END'\n{document}\nEND\n{command}"
    if isinstance(given.get("function"), str):
        unit = None if given.get("unit") == "step" else given.get("unit")
        seed = given.get("seed")
        return _line("preprocess", before, fn=given["function"], unit=unit, seed=seed, **options, skip_bad=skip_bad)
    return ""


def _operation(document: Mapping[str, Any]) -> str:
    """Return an operation as an inline table of a pipeline file; JSON of these types is valid TOML."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in document.items() if value is not None]
    return "\n".join(["[[operation]]", *lines])


def _line(verb: str, *words: str, **options: Any) -> str:
    return " ".join(["rbtool", verb, *map(shlex.quote, words), *_given(options)])


def _given(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if name in _SWITCHES:
            if value:
                yield flag
        elif isinstance(value, list | tuple):
            yield from (f"{flag} {shlex.quote(str(one))}" for one in value)
        elif value is not None and value is not False and value != "":  # 0 is a seed
            yield f"{flag} {shlex.quote(str(value))}"


def _are_texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value)


_FINDINGS, _RANGES, _STEPS, _NOTES = 100, 12, 30, 40


# Fields -------------------------------------------------------------------------------------------


_MARGIN = 20_000
"""Bytes reserved for everything but table rows in the section about fields."""
_AT_FIRST = 30
"""Rows that are visible at first; a click opens the others."""
_MOST_ACTIONS, _MOST_BARS = 24, 15
_FULL = 5
"""A cell of the map of actions has the full colour at this multiple of a uniform distribution."""
_JOINED = 2
"""Histogram bins per cell of the map of actions."""


def fields(subjects: Sequence[Subject], most_bytes: int) -> Html:
    """Return a table of the distributions of all columns, cut off at about `most_bytes`."""
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
            element("p", f"{counted(left, 'row')} left out, to limit the size of the page: rbtool stats shows all.")
        )
    if not all(column.exact for found in subject.figures.fields for column in found.columns):
        parts.append(element("p", f"≈ Quantiles of large fields are estimates, accurate to {QUANTILE_ERROR:.1%}."))
    if sum(len(found.columns) for found in subject.figures.fields) >= MOST_COLUMNS:
        parts.append(element("p", f"After {MOST_COLUMNS:,} columns, fields are described as a whole."))
    others = (
        [field.name for field in subject.manifest.fields if _has_none(subject, field.name)] if subject.manifest else []
    )
    if others:
        names = f"{', '.join(others[:_AT_FIRST])}{', …' if len(others) > _AT_FIRST else ''}"
        why = "Next observations repeat the observations; text, ids and complex numbers have no figures."
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
    """Draw a histogram in a table cell; the numbers beside it serve readers who cannot see it."""
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
    """Return which actions were taken, and which parts of the action space they leave out."""
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
        return element("p", "There are no numeric actions.")
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
    """Draw a heatmap with a row for each action column: the share of steps in each part of its range."""
    counts = np.array([_range(column).counts for _, column in columns], np.float64)
    joined_counts = counts.reshape(len(columns), -1, _JOINED).sum(2)
    shares = joined_counts / np.maximum(joined_counts.sum(1, keepdims=True), 1)
    ends = [(_range(column).low, _range(column).high) for _, column in columns]
    names = [f"{label} {shown(low)} … {shown(high)}" for (label, _), (low, high) in zip(columns, ends, strict=True)]
    limit = _FULL / shares.shape[1]
    labels = ChartLabels(title="Where actions are in their range", x="from the low to the high end of the range")
    drawn = Heatmap(shares, names, [""] * shares.shape[1], labels, limit)
    words = f"The full colour marks parts with {limit:.0%} of the steps or more."
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
    """Return which columns correlate with the return of an episode."""
    words = (
        "Pearson's correlation between the mean of a column in each episode and the return of that episode. It does "
        "not show a cause: longer episodes alone can produce it."
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
        return element("p", "There is none: it needs at least two episodes with different returns.")
    strongest = sorted(found, key=lambda one: -abs(one[0]))[:_MOST_BARS]
    labels = ChartLabels(title=f"Strongest of {counted(len(found), 'column')}", x="correlation with the return")
    drawn = Bars([label for _, label in strongest], np.array([value for value, _ in strongest]), labels)
    return chart(drawn, f"{name}-correlation", height=None)


def continuity(subjects: Sequence[Subject]) -> Html:
    """Return how many next observations equal the observation of the following row."""
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
        f"{counted(explicit, 'episode')} with next observations that the source stores separately." if explicit else ""
    )
    return joined([
        table(["state", "steps inside episodes", "followed", "share"], rows, label=f"Continuity: {subject.name}"),
        element("p", note) if note else None,
    ])  # fmt: skip


# Images and the player ----------------------------------------------------------------------------


_TRACE_WIDTH, _TRACE_HEIGHT = 1000, 48
"""The view box of a trace, which is stretched to the width of the page."""


def images(subjects: Sequence[Subject]) -> Html | None:
    """Return sheets and strips of the fields with images; None if no dataset has any."""
    if not any(subject.images for subject in subjects):
        return None
    return section("images", "Images", side_by_side(subjects, _images))


def _images(subject: Subject, name: str) -> Child:
    parts: list[Child] = [_field(one) for one in subject.images]
    if not parts:
        parts.append(element("p", "There are no images."))
    if subject.more_images:
        parts.append(element("p", f"{counted(subject.more_images, 'more field')} with images left out."))
    return joined(parts)


def _field(one: ShownImages) -> Html:
    head = element("h4", element("code", one.name))
    if one.sheet is None:
        return joined([head, element("p", f"The images cannot be shown: {one.note}.")])
    words = f"{counted(one.sheet.count, 'frame')} of {one.name}, spread over all steps"
    parts: list[Child] = [head, _figure(element("img", src=one.sheet.data, alt=words, class_="sheet"), words)]
    if one.strip is not None:
        words = f"The first {counted(one.strip.count, 'step')} of episode {one.episode}"
        button = element("button", "Pause", type="button", hidden=True)
        strip = element("div", _frame(one.strip, f"{words}, {one.name}"), button, class_="strip")
        parts.append(_figure(strip, words))
    return joined(parts)


def _figure(child: Child, words: str) -> Html:
    return element("figure", child, element("figcaption", words))


def _frame(sheet: Sheet, words: str) -> Html:
    """Show one frame of a one-row sheet; a script moves the image to show the others."""
    image = element("image", href=sheet.data, x=0, y=0, width=sheet.width * sheet.count, height=sheet.height)
    return element(
        "svg", image, class_="frame", viewBox=f"0 0 {sheet.width} {sheet.height}", width=2 * sheet.width,
        height=2 * sheet.height, role="img", aria_label=words, data_count=sheet.count, data_width=sheet.width,
    )  # fmt: skip


def player(subjects: Sequence[Subject]) -> Html | None:
    """Return a player for the chosen episodes of each dataset; None if no episode was chosen."""
    if not any(subject.shown for subject in subjects):
        return None
    return section("steps", "Episodes step by step", side_by_side(subjects, _player))


def _player(subject: Subject, name: str) -> Child:
    if not subject.shown:
        return element("p", "No episode can be shown.")
    options = [
        element("option", f"Episode {one.number:,}: {one.why}", value=f"{name}-e{place}")
        for place, one in enumerate(subject.shown)
    ]
    choice = element(
        "p", element("label", "Episode ", element("select", *options)), class_="choice", hidden=True
    )  # fmt: skip
    shown_episodes = [_episode(one, f"{name}-e{place}") for place, one in enumerate(subject.shown)]
    return element("div", choice, *shown_episodes, class_="player")


def _episode(one: ShownEpisode, name: str) -> Html:
    returned = "" if one.total is None else f", return {shown(one.total)}"
    facts = f"{counted(one.length, 'step')}{returned}, end: {one.end}."
    if one.stride > 1:
        facts += f" One step in {one.stride:,} is shown, and the last."
    if one.left_out:
        facts += f" Left out: {one.left_out}."
    frame = _frame(one.frames, f"Frame of episode {one.number}") if one.frames is not None else None
    slider = element("input", type="range", min=0, max=len(one.steps) - 1, value=0, aria_label="Step")
    controls = element(
        "div", element("button", "Play", type="button"), slider, element("output", ""), class_="controls", hidden=True
    )  # fmt: skip
    lanes = [_lane(trace, one) for trace in one.traces]
    data = {
        "steps": one.steps.tolist(),
        "frames": list(one.frame_steps),
        "traces": [[_json(value) for value in trace.values.tolist()] for trace in one.traces],
    }
    return element(
        "article", element("h4", f"Episode {one.number:,}: {one.why}"), element("p", facts),
        element("p", f"No frames: {one.note}.") if one.note else None,
        element("div", frame, element("div", *lanes, class_="lanes"), class_="stage"), controls,
        script_data(data), class_="episode", id=name, data_last=one.length - 1,
    )  # fmt: skip


def _json(value: float) -> float | str:
    return float(f"{value:.6g}") if np.isfinite(value) else str(value)


def script_data(document: object) -> Html:
    """Return a JSON element for the script, escaped so that no content can close the element."""
    written = json.dumps(document, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        written = written.replace(sign, f"\\u{ord(sign):04x}")
    return element("script", Html(written), type="application/json")


def _lane(trace: Trace, one: ShownEpisode) -> Html:
    finite = trace.values[np.isfinite(trace.values)]
    limits = f"{shown(float(finite.min()))} … {shown(float(finite.max()))}" if len(finite) else "no finite value"
    head = element(
        "figcaption", element("code", trace.name), " ", element("span", limits), element("b", "", class_="now")
    )
    drawn = [element("polyline", points=points) for points in _lines(trace.values, one.steps)]
    cursor = element("line", class_="cursor", x1=0, x2=0, y1=0, y2=_TRACE_HEIGHT)
    svg = element(
        "svg", *drawn, cursor, class_=f"lane {trace.kind}", viewBox=f"0 0 {_TRACE_WIDTH} {_TRACE_HEIGHT}",
        preserveAspectRatio="none", role="img", aria_label=f"{trace.name}, {limits}",
    )  # fmt: skip
    return element("figure", head, svg)


def _lines(values: Array, steps: Array, limits: tuple[float, float] | None = None) -> list[str]:
    """Return the points of one line for each run of consecutive finite values, drawn between `limits`, or their own."""
    there = np.isfinite(values)
    if not there.any():
        return []
    low, high = limits or (values[there].min(), values[there].max())
    half = high / 2 - low / 2  # high - low could overflow
    x = np.round(_TRACE_WIDTH * steps / max(1, int(steps[-1])), 1)
    middle = np.full(len(values), 0.5)
    y = middle if half <= 0 else (np.where(there, values, low) / 2 - low / 2) / half
    y = np.round((_TRACE_HEIGHT - 4) * (1 - y) + 2, 1)
    runs = np.split(np.flatnonzero(there), np.flatnonzero(np.diff(np.flatnonzero(there)) > 1) + 1)
    return [" ".join(f"{x[place]:g},{y[place]:g}" for place in run) if len(run) > 1 else _dash(x[run[0]], y[run[0]])
            for run in runs]  # fmt: skip


def _dash(x: float, y: float) -> str:
    """Return the points of a short line for a single finite value between gaps."""
    return f"{max(0.0, x - 4):g},{y:g} {min(_TRACE_WIDTH, x + 4):g},{y:g}"


MOST_BYTES = 3_000_000
"""The largest size of a page."""
IMAGE_BYTES = 1_200_000
"""About how much of a page may be images."""
_FRAME_BYTES = 60_000
"""Reserved for style, script, head and table of contents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a page says about itself: the program that made it, when (UTC), and the command."""

    made_by: str
    made_at: str
    command: str


def page_of(subjects: Sequence[Subject], words: Words) -> bytes:
    """Return the page, at most `MOST_BYTES` long; it says what was left out to stay below that."""
    for simpler in (_whole, _without_episodes, _without_images):
        written = _page([simpler(subject) for subject in subjects], words).encode()
        if len(written) <= MOST_BYTES:
            break
    return written


def _whole(subject: Subject) -> Subject:
    return subject


def _without_episodes(subject: Subject) -> Subject:
    return replace(subject, shown=())  # the evidence of findings stays


def _without_images(subject: Subject) -> Subject:
    more = len(subject.images) + subject.more_images
    return replace(subject, shown=(), images=(), evidence={}, more_images=more)


def _page(subjects: Sequence[Subject], words: Words) -> str:
    style, script = f"{style_sheet()}{_asset('page.css')}", _asset("page.js")
    names = ", ".join(subject.name for subject in subjects)
    parts = _parts(subjects, words)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=words.made_by),
        element("title", f"{names} – dataset report"),
        element("style", Html(style)),
    )
    body = element(
        "body",
        element("a", "To the contents", href="#overview", class_="skip"),
        element("header", element("h1", names),
                element("p", f"Dataset report, {words.made_by}, {_moment(words.made_at)}"), _contents(parts)),
        element("main", *(part for _, _, part in parts), class_="one" if len(subjects) == 1 else None),
        element("script", Html(script)),
    )  # fmt: skip
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


_Part: TypeAlias = tuple[str, str, Html]
"""Anchor, title and contents."""


def _parts(subjects: Sequence[Subject], words: Words) -> list[_Part]:
    """Return the sections in order; the one about fields gets the bytes that the others leave."""
    made: dict[tuple[str, str], Html | None] = {
        ("overview", "What it is"): overview(subjects),
        ("findings", "Findings"): findings(subjects),
        ("episodes", "Episodes"): episodes(subjects),
        ("steps", "Step by step"): player(subjects),
        ("images", "Images"): images(subjects),
        ("fields", "Fields"): None,
        ("actions", "Actions"): actions(subjects),
        ("correlation", "Correlation"): correlation(subjects),
        ("continuity", "Next observations"): continuity(subjects),
        ("provenance", "How it was made"): provenance(subjects, words.command),
    }
    taken = sum(len(part.encode()) for part in made.values() if part is not None)
    made["fields", "Fields"] = fields(subjects, MOST_BYTES - taken - _FRAME_BYTES)
    return [(anchor, title, part) for (anchor, title), part in made.items() if part is not None]


def _contents(parts: Sequence[_Part]) -> Child:
    links = [element("li", element("a", title, href=f"#{anchor}")) for anchor, title, _ in parts]
    return element("nav", element("ul", joined(links)), aria_label="Contents")


def _policy(style: str, script: str) -> str:
    """Return the content security policy: only this style, this script and embedded images are allowed."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
