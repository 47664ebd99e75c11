"""`report`: one HTML file about datasets: their figures, episodes, images, findings and provenance."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .. import __version__
from ..errors import CorruptDataError, FormatError, UsageError, suggests_keywords
from ..format import fs
from ..format.documents import written_time
from ..format.locate import find_dataset
from ..format.staging import FileStaging, require_suffix
from ..open_steps import open_steps, whole_episodes
from ..options import PathLike
from ..progress import Progress, Silent
from ..report.charts import require_matplotlib
from ..report.page import IMAGE_BYTES, Words, page_of
from ..report.subject import CheckedSubject, Subject, subject_of
from ..results import Result, seconds_since
from ..saved_steps import has_steps
from .check import check
from .inspect import PartsResult, inspect_several
from .mix import MixResult

MOST_DATASETS = 8
"""The most datasets that fit side by side on a page."""
_FILE = "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedDataset:
    """A dataset of a report; `errors` and `warnings` count the findings of `check`."""

    name: str
    path: Path
    steps: int
    episodes: int
    errors: int
    warnings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult(Result):
    """The page at `path`, `bytes` long, and the datasets that it shows."""

    kind: ClassVar[str] = "report"
    path: Path
    bytes: int
    datasets: tuple[ReportedDataset, ...]
    seconds: float

    def failed(self) -> bool:
        """Return whether `check` found errors in a dataset."""
        return any(dataset.errors for dataset in self.datasets)


@suggests_keywords()
def report(
    datasets: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    root: PathLike | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> ReportResult:
    """Write a report on datasets or checkpoints to an HTML file.

    The page needs no other file and no network, and is at most 3 MB large; it states what was left out to stay below
    that. The datasets of a mixture or a split are shown side by side. Every row is read, in bounded memory, and
    checked; a damaged dataset is shown as far as it can be read, with the findings about the damage.

    Args:
        datasets: up to 8 paths or `source:id`.
        output: the file to write.
        root: where stored datasets are.
        force: replace an existing file, if it is an HTML page.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        The datasets on the page.

    Raises:
        DatasetNotFoundError, FormatError: a dataset does not exist or cannot be read. `output` is unchanged after any
            error.
        UsageError: `output` cannot be written, a dataset is one of another library, there are more than 8, or
            matplotlib is not installed.
        OutOfSpaceError: the disk has no room for the page.
    """
    started, progress = time.perf_counter(), progress or Silent()
    require_matplotlib()
    given = [datasets] if isinstance(datasets, str | os.PathLike) else list(datasets)
    destination = fs.expanded(output)
    require_suffix(destination, (".html",))
    staging = FileStaging(destination, replace=force)
    staging.refuse_if_taken()
    places = _distinct([place for one in given for place in _places(find_dataset(one, root), os.fspath(one), root)])
    if not 1 <= len(places) <= MOST_DATASETS:
        raise UsageError(
            f"there are {len(places)} datasets, expected from 1 to {MOST_DATASETS}", hint="make several reports"
        )
    command = shlex.join(["rbtool", "report", *(os.fspath(one) for one in given), "-o", os.fspath(output)])
    with staging:  # first, so that a folder that cannot be written fails before the work
        subjects = [_subject(place, len(places), root, progress) for place in places]
        progress.start("drawing", len(subjects), "datasets")
        written = page_of(subjects, Words(made_by=f"rbtool {__version__}", made_at=written_time(), command=command))
        progress.advance(len(subjects))
        progress.done()
        fs.write_file(staging.path / _FILE, written)
        staging.publish_file(_FILE)
    return ReportResult(
        path=destination, bytes=len(written), datasets=tuple(map(_reported, subjects)), seconds=seconds_since(started)
    )


@dataclass(frozen=True, slots=True)
class _ReportPlace:
    path: Path
    name: str
    share: float | None = None


def _places(path: Path, name: str, root: PathLike | None, share: float | None = None) -> Iterator[_ReportPlace]:
    """Yield the dataset at a path, or the datasets of a mixture or a split."""
    several = inspect_several(path, root)
    if isinstance(several, MixResult):
        for member in several.members:
            yield from _places(member.path, member.name, root, member.share * (1.0 if share is None else share))
    elif isinstance(several, PartsResult):
        yield from (_ReportPlace(part.path, f"{name}/{part.name}", share) for part in several.parts)
    else:
        has_steps(path)
        yield _ReportPlace(path, name, share)


def _distinct(places: Sequence[_ReportPlace]) -> list[_ReportPlace]:
    """Make names unique: `name`, `name (2)`, …."""
    found: list[_ReportPlace] = []
    for place in places:
        same = sum(one.name == place.name for one in places[: len(found)])
        found.append(_ReportPlace(place.path, f"{place.name} ({same + 1})", place.share) if same else place)
    return found


def _subject(place: _ReportPlace, datasets: int, root: PathLike | None, progress: Progress) -> Subject:
    result = check(place.path, root=root, progress=progress)
    checked = CheckedSubject(findings=result.findings, rules=result.rules, skipped=result.skipped, notes=result.notes)
    try:
        reader = whole_episodes(open_steps(place.path, damaged=True))
    except (CorruptDataError, FormatError):  # a finding states why
        return Subject(name=place.name, path=str(place.path), checked=checked, share=place.share)
    with reader:
        return subject_of(
            reader, place.name, checked, progress, image_bytes=IMAGE_BYTES // datasets,
            episodes=5 if datasets == 1 else 3 if datasets <= 3 else 2, share=place.share,
        )  # fmt: skip


def _reported(subject: Subject) -> ReportedDataset:
    manifest = subject.manifest
    return ReportedDataset(
        name=subject.name, path=Path(subject.path), steps=manifest.steps if manifest else 0,
        episodes=manifest.episodes if manifest else 0, errors=subject.checked.errors, warnings=subject.checked.warnings,
    )  # fmt: skip
