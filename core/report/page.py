"""The page of a report: one HTML file with its style, its script and all that it shows, which requests nothing."""

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
"""No page is larger."""
IMAGE_BYTES = 1_200_000
"""Of all images of a page, about."""
_FRAME_BYTES = 60_000
"""Of style, script, head and contents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a page states about itself: who made it, when (UTC), and by which command."""

    made_by: str
    made_at: str
    command: str


def page_of(subjects: Sequence[Subject], words: Words) -> bytes:
    """Write the page, at most `MOST_BYTES` long; it states what is left out for that."""
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
    """Write the parts of the page in order; the one about fields takes what room the others leave."""
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
    """The content security policy: this style and this script, images in the page, and nothing else."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
