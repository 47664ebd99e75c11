"""`convert`: a dataset in a foreign format, anywhere on disk, becomes a TED dataset."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..dataset import Request, normal_form, open_source, parse_episodes
from ..progress import Progress, Silent
from .results import Published
from .source_conversion import SourceConversion, facts_of

__all__ = ["ConvertResult", "convert"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertResult(Published):
    """The dataset at `path`, made from the one at `source`."""

    kind: ClassVar[str] = "convert"
    source: Path


def convert(
    path: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    episodes: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Convert the dataset at `path`, recognised by its content, into a TED dataset at `dest`.

    `episodes` chooses some by the source's numbers, like `0:100,250`. What is at `dest` is replaced only with
    `force`; an equal conversion of an unchanged source that stands there is left as it is (`already_there`).
    `dry_run` does everything up to writing and gives sizes. Values and element types are those of the source.

    Raises DatasetNotFoundError, FormatError or CorruptDataError for the source, UsageError for `episodes` and
    `dest`, OutOfSpaceError; in every case `dest` is what it was.
    """
    source, destination = Path(path).expanduser(), Path(dest).expanduser()
    heard = progress or Silent()
    chosen = normal_form(parse_episodes(episodes)) if episodes is not None else None
    with open_source(source) as reader:
        facts = facts_of(reader, chosen, heard)
        conversion = SourceConversion(
            reader=reader,
            facts=facts,
            source=source,
            destination=destination,
            request=Request(facts.source, os.fspath(path), facts.id, episodes=chosen, origin="file"),
            verb="convert",
            arguments={"path": os.fspath(path), "episodes": chosen},
            force=force,
            dry_run=dry_run,
            progress=heard,
        )
        return ConvertResult(**conversion.run(), source=source)
