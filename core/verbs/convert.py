"""`convert`: make a TED dataset of one in another format or layout, anywhere on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..errors import UsageError
from ..format import fs
from ..format.episodes import normal_form
from ..format.locate import find_dataset, open_source
from ..format.manifest import Request
from ..format.reader import require_final_step
from ..opening import is_steps
from ..progress import Progress, Silent
from .layouts import Rewriting, final_step_arguments, layout_arguments, require_layout
from .results import Published
from .saved_steps import is_of_buffer
from .source_conversion import SourceConversion, facts_of


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
    """Convert the dataset at `path`, whose format is detected from its content, into a TED dataset at `dest`.

    `path` may also be an rbtool dataset (`source:id` or a path) or a checkpoint of rbtool or TorchRL, which is then
    written in another `layout`: `ted`, or `packed`, which is smaller and faster to sample from. `compress` compresses
    fields of layout `packed`: `observation.image=zstd:3` (zstd with a level of 1 to 22, or lz4). Values and element
    types are those of the source in every layout.
    `episodes` selects episodes of a foreign dataset by number, like `0:100,250`. `skip_bad` takes the valid episodes
    of a damaged TED dataset; notes name the others. `final_step` applies to a last step without a next observation in
    the source: `auto` keeps it if it is terminated, with the last observation repeated, and drops it otherwise, so
    that the step before it is the truncated end; `drop` drops all of them, `repeat` keeps all. The episode table
    records which.
    `dest` is replaced only with `force`; an equal conversion of an unchanged source is left as it is
    (`already_there`). `dry_run` does everything up to writing and returns sizes.

    Raises DatasetNotFoundError, FormatError or CorruptDataError for the source, UsageError for `episodes` and
    `dest`, OutOfSpaceError; `dest` is unchanged in every case.
    """
    source, destination = find_dataset(path, root), fs.expanded(dest)
    progress = progress or Silent()
    wanted, methods = require_layout(layout, compress), tuple(compress)
    ends = require_final_step(final_step)
    if is_steps(source) or is_of_buffer(source):
        _refuse_choices(source, episodes, final_step)
        rewriting = Rewriting(
            source=source, asked=os.fspath(path), destination=destination, layout=wanted, compress=methods,
            force=force, dry_run=dry_run, progress=progress, skip_bad=skip_bad,
        )  # fmt: skip
        return ConvertResult(**rewriting.run(), source=source)
    if skip_bad:
        raise UsageError(
            f"--skip-bad chooses from a damaged dataset in TED, and {source} is none",
            hint="choose the sound episodes: --episodes A:B,C",
        )
    chosen = normal_form(episodes) if episodes is not None else None
    with open_source(source, final_step=ends) as reader:
        facts = facts_of(reader, episodes if chosen else None, progress)
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
            progress=progress,
            compress=methods,
        )
        return ConvertResult(**conversion.run(), source=source)


def _refuse_choices(source: Path, episodes: str | None, final_step: str) -> None:
    """Raise UsageError if options for raw datasets are given for a TED dataset."""
    if final_step != "auto":
        raise UsageError("--final-step is about raw datasets of other libraries", hint=f"leave it out: {source} is TED")
    if episodes is not None:
        raise UsageError("--episodes chooses from a dataset of another library", hint=f"leave it out: {source} is TED")
