"""What a page shows of one dataset: its manifest, its figures, what `check` found, its images and chosen episodes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import CorruptDataError, FormatError, SchemaError, UsageError
from ..format.contracts import StepReader
from ..format.documents import parse_json
from ..format.hub_address import Transfer, transfers_of
from ..format.manifest import Manifest
from ..progress import Progress
from ..ted.rules import Finding
from .episodes import ShownEpisode, show_episodes
from .figures import Figures, measure
from .images import ImageSource, Sheet, image_sources, sheet_of

_SHEET_FRAMES, _SHEET_COLUMNS = 24, 8
_STRIP_FRAMES = 32
_FIELDS = 4
"""Fields with images that are shown."""
_STATED = ("license", "licence", "citation", "author", "author_email", "algorithm_name", "code_permalink", "env_id")
"""Entries of the source's own metadata that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSubject:
    """What `check` found: the findings, how many rules ran, those that could not run, and notes."""

    findings: tuple[Finding, ...] = ()
    rules: int = 0
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def errors(self) -> int:
        """How many findings are errors."""
        return sum(finding.severity == "error" for finding in self.findings)

    @property
    def warnings(self) -> int:
        """How many findings are warnings."""
        return len(self.findings) - self.errors


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownImages:
    """A field with images: frames spread over all steps, and consecutive ones of one episode.

    Both are None where they cannot be read, for the reason in `note`.
    """

    name: str
    sheet: Sheet | None = None
    strip: Sheet | None = None
    episode: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One dataset of a report; without `manifest` and `figures` where it cannot be opened.

    `share` is that of a dataset in a mixture. `stated` has entries of the source's own metadata.
    """

    name: str
    path: str
    checked: CheckedSubject
    manifest: Manifest | None = None
    figures: Figures | None = None
    images: tuple[ShownImages, ...] = ()
    more_images: int = 0
    shown: tuple[ShownEpisode, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    stated: Mapping[str, str] = field(default_factory=dict)
    share: float | None = None


def subject_of(
    reader: StepReader, name: str, checked: CheckedSubject, progress: Progress, *, image_bytes: int, episodes: int,
    share: float | None = None,
) -> Subject:  # fmt: skip
    """Measure a dataset; images take at most about `image_bytes`, and up to `episodes` episodes are shown."""
    figures = measure(reader, progress)
    sources = image_sources(reader) if reader.manifest.steps else []
    chosen = sources[:_FIELDS]
    frame_bytes = image_bytes // (2 * max(1, episodes)) if chosen else 0
    shown = show_episodes(reader, figures, chosen, episodes, frame_bytes)
    half = image_bytes // (4 * max(1, len(chosen)))
    return Subject(
        name=name, path=str(reader.path), checked=checked, manifest=reader.manifest, figures=figures,
        images=tuple(_images_of(source, figures, shown, half) for source in chosen),
        more_images=len(sources) - len(chosen), shown=tuple(shown), transfers=tuple(transfers_of(reader.path)),
        stated=dict(_stated(reader)), share=share,
    )  # fmt: skip


def _images_of(source: ImageSource, figures: Figures, shown: list[ShownEpisode], most_bytes: int) -> ShownImages:
    steps = np.unique(np.linspace(0, figures.steps - 1, min(figures.steps, _SHEET_FRAMES)).round().astype(np.int64))
    try:
        sheet = sheet_of(source.frames(steps.tolist()), _SHEET_COLUMNS, most_bytes, gap=2)
        strip, number = None, None
        if shown and figures.episodes is not None:
            start, number = int(figures.episodes.table.start[shown[0].row]), shown[0].number
            count = min(shown[0].length, _STRIP_FRAMES)
            strip = sheet_of(source.frames(list(range(start, start + count))), count, most_bytes)
    except (CorruptDataError, FormatError, SchemaError, UsageError) as error:
        return ShownImages(name=source.name, note=f"{error}{f'; {error.hint}' if error.hint else ''}")
    return ShownImages(name=source.name, sheet=sheet, strip=strip, episode=number)


def _stated(reader: StepReader) -> Iterator[tuple[str, str]]:
    """Yield what the source's own metadata states of where it comes from."""
    with contextlib.suppress(CorruptDataError):
        for name, data in sorted(reader.documents().items()):
            document: Any = None
            if name.endswith(".json"):
                with contextlib.suppress(FormatError, ValueError):
                    document = parse_json(data, name)
            for key in _STATED if isinstance(document, dict) else ():
                value = document.get(key)
                if value and isinstance(value, str | list):
                    yield key, ", ".join(map(str, value)) if isinstance(value, list) else value
