"""The page of a report: one self-contained HTML file with style, script, charts and images, without any request."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TypeAlias

from ..charts.figure import style_sheet
from .html import Child, Html, element, joined
from .sections import actions, continuity, correlation, episodes, fields, findings, images, overview, player, provenance
from .subject import Subject

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
    return replace(subject, shown=())


def _without_images(subject: Subject) -> Subject:
    return replace(subject, shown=(), images=(), more_images=len(subject.images) + subject.more_images)


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
        element("header", element("h1", names), element("p", f"Dataset report, {words.made_by}, {words.made_at}."),
                _contents(parts)),
        element("main", *(part for _, _, part in parts)),
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
