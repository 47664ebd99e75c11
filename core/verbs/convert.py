"""`convert`: a dataset in a foreign format, anywhere on disk, or in another layout, becomes a TED dataset."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..checkpoint import is_steps
from ..errors import UsageError
from ..format import Request, find_dataset, fs, normal_form, open_source, require_final_step
from ..progress import Progress, Silent
from .layouts import Rewriting, final_step_arguments, layout_arguments, require_layout
from .results import Published
from .saved_steps import is_of_buffer
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
    layout: str = "ted",
    compress: Sequence[str] = (),
    skip_bad: bool = False,
    root: str | os.PathLike[str] | None = None,
    force: bool = False,
    dry_run: bool = False,
    final_step: str = "auto",
    progress: Progress | None = None,
) -> ConvertResult:
    """Convert the dataset at `path`, recognised by its content, into a TED dataset at `dest`.

    `path` may also be a dataset of ours, `source:id` or a path, or a checkpoint, ours or TorchRL's, to be written in
    another `layout`: `ted`, or `packed`, which takes less room and is faster to draw from. There `compress` makes
    fields smaller: `observation.image=zstd:3` (zstd with a level of 1 to 22, or lz4). The rows are the same in either.
    `episodes` chooses some of a foreign dataset by its numbers, like `0:100,250`. What is at `dest` is replaced only
    with `force`; an equal conversion of an unchanged source that stands there is left as it is (`already_there`).
    `skip_bad` takes the sound episodes of a damaged dataset in TED, and notes name the others.
    `final_step` is what becomes of a last step after which the source has no observation: `auto` keeps it if it is
    terminated, with the last observation repeated, and leaves it out otherwise, so that the step before it is the
    truncated end; `drop` leaves all of them out, `repeat` keeps all. The episode table says what was done.
    `dry_run` does everything up to writing and gives sizes. Values and element types are those of the source.

    Raises DatasetNotFoundError, FormatError or CorruptDataError for the source, UsageError for `episodes` and
    `dest`, OutOfSpaceError; in every case `dest` is what it was.
    """
    source, destination = find_dataset(path, root), fs.expanded(dest)
    heard = progress or Silent()
    wanted, methods = require_layout(layout, compress), tuple(compress)
    ends = require_final_step(final_step)
    if is_steps(source) or is_of_buffer(source):
        _refuse_choices(source, episodes, final_step)
        rewriting = Rewriting(
            source=source, asked=os.fspath(path), destination=destination, layout=wanted, compress=methods,
            force=force, dry_run=dry_run, progress=heard, skip_bad=skip_bad,
        )  # fmt: skip
        return ConvertResult(**rewriting.run(), source=source)
    if skip_bad:
        raise UsageError(
            f"--skip-bad chooses from a damaged dataset in TED, and {source} is none",
            hint="choose the sound episodes: --episodes A:B,C",
        )
    chosen = normal_form(episodes) if episodes is not None else None
    with open_source(source, final_step=ends) as reader:
        facts = facts_of(reader, episodes if chosen else None, heard)
        ends = ends if facts.final_missing else "auto"
        request = Request(
            facts.source, os.fspath(path), facts.id, episodes=chosen, layout=wanted, origin="file", final_step=ends
        )
        conversion = SourceConversion(
            reader=reader,
            facts=facts,
            source=source,
            destination=destination,
            request=request,
            verb="convert",
            arguments={"path": os.fspath(path), "episodes": chosen}
            | layout_arguments(wanted, methods)
            | final_step_arguments(ends),
            force=force,
            dry_run=dry_run,
            progress=heard,
            compress=methods,
        )
        return ConvertResult(**conversion.run(), source=source)


def _refuse_choices(source: Path, episodes: str | None, final_step: str) -> None:
    """Refuse what is about raw datasets for one that is TED."""
    if final_step != "auto":
        raise UsageError("--final-step is about raw datasets of other libraries", hint=f"leave it out: {source} is TED")
    if episodes is not None:
        raise UsageError("--episodes chooses from a dataset of another library", hint=f"leave it out: {source} is TED")
