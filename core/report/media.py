"""The parts of the page with images, and the player that moves through chosen episodes."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from ..format.contracts import Array
from ..progress import counted
from .episodes import ShownEpisode, Trace
from .html import Child, Html, element, joined
from .images import Sheet
from .sections import section, side_by_side
from .subject import ShownImages, Subject
from .words import shown

_WIDTH, _HEIGHT = 1000, 48
"""The box in which a trace is drawn; it is stretched to the width of the page."""


def images(subjects: Sequence[Subject]) -> Html | None:
    """Write sheets and strips of the fields with images; None where no dataset has any."""
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
    """Show one frame of a sheet of one row; a script moves the image to show the others."""
    image = element("image", href=sheet.data, x=0, y=0, width=sheet.width * sheet.count, height=sheet.height)
    return element(
        "svg", image, class_="frame", viewBox=f"0 0 {sheet.width} {sheet.height}", width=2 * sheet.width,
        height=2 * sheet.height, role="img", aria_label=words, data_count=sheet.count, data_width=sheet.width,
    )  # fmt: skip


def player(subjects: Sequence[Subject]) -> Html | None:
    """Write the chosen episodes of each dataset; None where there are none."""
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
    if one.more_actions:
        facts += f" {counted(one.more_actions, 'more action column')} left out."
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
    """Write a document that the script reads; nothing in it can end the element."""
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
    cursor = element("line", class_="cursor", x1=0, x2=0, y1=0, y2=_HEIGHT)
    svg = element(
        "svg", *drawn, cursor, class_="lane", viewBox=f"0 0 {_WIDTH} {_HEIGHT}", preserveAspectRatio="none",
        role="img", aria_label=f"{trace.name}, {limits}",
    )  # fmt: skip
    return element("figure", head, svg)


def _lines(values: Array, steps: Array) -> list[str]:
    """Return the points of a line for each run of finite values."""
    there = np.isfinite(values)
    if not there.any():
        return []
    low, high = values[there].min(), values[there].max()
    half = high / 2 - low / 2  # the range of float64 is twice what float64 holds
    x = np.round(_WIDTH * steps / max(1, int(steps[-1])), 1)
    middle = np.full(len(values), 0.5)
    y = middle if half <= 0 else (np.where(there, values, low) / 2 - low / 2) / half
    y = np.round((_HEIGHT - 4) * (1 - y) + 2, 1)
    runs = np.split(np.flatnonzero(there), np.flatnonzero(np.diff(np.flatnonzero(there)) > 1) + 1)
    return [" ".join(f"{x[place]:g},{y[place]:g}" for place in run) if len(run) > 1 else _dash(x[run[0]], y[run[0]])
            for run in runs]  # fmt: skip


def _dash(x: float, y: float) -> str:
    """Return the points of a short line for a value with none next to it."""
    return f"{max(0.0, x - 4):g},{y:g} {min(_WIDTH, x + 4):g},{y:g}"
