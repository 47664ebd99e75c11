"""`convert`: make a TED dataset of one in another format or layout, anywhere on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Unpack

from ..declarations import ReaderOptions, default_layout
from ..encodings.save import dataset_digest
from ..errors import CorruptDataError, UsageError, suggests_keywords
from ..format import fs
from ..format.checks import SoundSteps, damage_explained, sound_steps
from ..format.contracts import StepReader
from ..format.episodes import normal_form
from ..format.locate import find_source, open_source, require_apart
from ..format.manifest import Layout, Manifest, Request
from ..format.memmap.builder import Origin, provenance_step
from ..format.packed.builder import write_dataset
from ..format.packed.reader import PackedReader
from ..format.packed.row_files import parse_codecs
from ..format.packed.schema import PackedSchema
from ..format.read_errors import reading_from
from ..format.reader import require_final_step
from ..format.staging import Staging, mend, share_files
from ..format.videos import UNDECODED
from ..open_steps import BufferSteps, is_steps, refuse_several
from ..progress import Progress, Silent
from ..results import (
    Published,
    existing_result,
    final_step_arguments,
    given_options,
    layout_arguments,
    occupied_error,
    published_entries,
    refuse_other_compression,
    refuse_raw_options,
    require_engine,
    require_layout,
    require_workers,
    seconds_since,
)
from ..saved_steps import is_of_buffer, open_saved, verified_steps
from .source_conversion import SourceConversion, facts_of, hinting_at_skip_bad, rows_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertResult(Published):
    """The dataset at `path`, made from the one at `source`."""

    kind: ClassVar[str] = "convert"
    source: Path


@suggests_keywords(*ReaderOptions.__annotations__)
def convert(
    path: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    *,
    episodes: str | None = None,
    layout: str | None = None,
    compress: Sequence[str] = (),
    skip_bad: bool = False,
    root: str | os.PathLike[str] | None = None,
    force: bool = False,
    dry_run: bool = False,
    final_step: str = "auto",
    format: str | None = None,
    num_workers: int = 0,
    engine: str = "local",
    resume: bool = False,
    progress: Progress | None = None,
    **options: Unpack[ReaderOptions],
) -> ConvertResult:
    """Convert the dataset at `path`, whose format is detected from its content, into a TED dataset at `dest`.

    `path` may also be an rbtool dataset (`source:id` or a path) or a checkpoint of rbtool or TorchRL, which is then
    written in another `layout`: `ted`, or `packed`, which is smaller and faster to sample from; None is `packed` for
    formats that declare it, such as Atari frames, and `ted` for all others. `compress` compresses fields of layout
    `packed`: `observation.image=zstd:3` (a level of 1 to 22, or lz4). Values and types are those of the source.
    `episodes` selects episodes of a foreign dataset by number, like `0:100,250`. `skip_bad` takes the sound episodes of
    a damaged dataset, which is then read twice; notes name the others. `final_step` applies to a last step without a
    next observation in the source: `auto` keeps it if it is terminated, with the last observation repeated, and drops
    it otherwise, so that the step before it is the truncated end; `drop` drops all of them, `repeat` keeps all. The
    episode table records which. `format` names the format in place of its detection; with `table`, `path` may be a
    folder of CSV or Parquet files, or a pattern like `runs/*.csv`, which are one dataset. `options` are those that only
    some formats have (`ReaderOptions`). `num_workers` processes read and write a foreign dataset (0: this one alone),
    here or, with `engine="ray"`, on a Ray cluster that shares the folders. The bytes are the same. `resume` continues
    what they left unfinished. `dest` is replaced only with `force`; an equal conversion of an unchanged source is left
    as it is (`already_there`). `dry_run` does everything but writing. Raises DatasetNotFoundError, FormatError or
    CorruptDataError for the source, UsageError for arguments, OutOfSpaceError; `dest` is then unchanged.
    """
    source, pattern = find_source(path, root, format)
    destination, progress = fs.expanded(dest), progress or Silent()
    require_layout(layout or "packed", methods := tuple(compress))  # before anything is read
    ends, workers = require_final_step(final_step), require_workers(num_workers, resume=resume)
    given, engine = given_options(options), require_engine(engine, workers)
    if pattern and "files" in given:
        raise UsageError(f"{path} is a pattern, and --files another one", hint="leave out --files")
    given |= pattern
    if is_steps(source, format) or is_of_buffer(source):
        named = {"format": format, "episodes": episodes, "num_workers": workers or None}
        refuse_raw_options(source, named | final_step_arguments(final_step) | given)
        rewriting = Rewriting(
            source=source, asked=os.fspath(path), destination=destination, compress=methods, progress=progress,
            layout=require_layout(layout or "ted", compress), force=force, dry_run=dry_run, skip_bad=skip_bad,
        )  # fmt: skip
        return ConvertResult(**rewriting.run(), source=source)
    refuse_several(source)
    chosen = normal_form(episodes) if episodes is not None else None
    with (
        reading_from(source),
        open_source(source, format=format, final_step=ends, options=given) as reader,
        hinting_at_skip_bad(reader, possible=not skip_bad),
    ):
        facts = facts_of(reader, episodes if chosen else None, progress, skip_bad=skip_bad, num_workers=workers)
        wanted = require_layout(layout or default_layout(facts.source), compress)
        given |= {"skip_bad": True} if skip_bad else {}
        ends = ends if facts.final_missing else "auto"
        request = Request(
            facts.source, os.fspath(path), facts.id, episodes=chosen, layout=wanted, origin="file",
            final_step=ends, options=given,
        )  # fmt: skip
        conversion = SourceConversion(
            reader=reader, facts=facts, source=source, destination=destination, request=request, verb="convert",
            arguments={"path": os.fspath(path), "episodes": chosen} | layout_arguments(wanted, methods)
            | final_step_arguments(ends) | given, force=force, dry_run=dry_run, progress=progress, compress=methods,
            num_workers=workers, engine=engine, resume=resume,
        )  # fmt: skip
        return ConvertResult(**conversion.run(), source=source)


_SMALL_FILES = 64 << 10
_REWRITING = ("convert", "checkpoint load")


@dataclass(frozen=True, kw_only=True)
class Rewriting:
    """Rewrites a dataset or checkpoint of rbtool or TorchRL, or a tensordict folder, as a dataset at `destination`.

    `verb` is the verb that is recorded in the provenance.
    """

    source: Path
    asked: str
    destination: Path
    layout: Layout
    compress: tuple[str, ...]
    force: bool
    dry_run: bool
    progress: Progress
    verb: str = "convert"
    skip_bad: bool = False

    def run(self) -> dict[str, Any]:
        """Write the dataset unless an equal one exists; return the entries of a `Published`.

        Every byte of the source is compared with its digest, and the rows of a checkpoint with the digest of the
        dataset that it was saved from. Raises UsageError if the destination must not be replaced, CorruptDataError for
        a damaged source, OutOfSpaceError.
        """
        started = time.perf_counter()
        require_apart(self.source, self.destination)
        explained = damage_explained(self.source, can_skip=self.verb == "convert" and not self.skip_bad)
        with explained, open_saved(self.source, damaged=self.skip_bad) as opened:
            reader = sound_steps(opened) if self.skip_bad else opened
            PackedSchema.of(reader.fields, parse_codecs(self.compress, reader.fields))
            manifest = self._rewritten(reader, started)
            if isinstance(manifest, dict):
                return manifest
            there, changes = manifest
            entries = published_entries(there, self.destination, started, reader) | changes
            if self.skip_bad and reader.videos() and UNDECODED not in entries["notes"]:
                entries["notes"] = (*entries["notes"], UNDECODED)
            return entries

    def _rewritten(self, reader: StepReader, started: float) -> dict[str, Any] | tuple[Manifest, dict[str, Any]]:
        """Return the manifest at the destination and how it came there; with `dry_run`, the planned entries."""
        if not self.dry_run:
            mend(self.destination)
        there = None if self.force else self._existing(reader)
        if there is not None:
            return there, {"already_there": True, "dry_run": self.dry_run}
        staging = Staging(self.destination, replace=self.force)
        staging.refuse_if_taken()
        size = rows_bytes(reader.fields, self.layout, reader.manifest.steps, reader.manifest.episodes)
        if not self.compress:
            fs.require_space(self.destination.parent, size + _SMALL_FILES)
        if self.dry_run:
            planned = replace(_planned(reader), layout=self.layout, request=self._request(reader.manifest))
            changes = {"bytes": size, "content_digest": None, "dry_run": True, "seconds": seconds_since(started)}
            return published_entries(planned, self.destination, started, reader) | changes
        with staging:
            manifest = self._write(reader, staging.path)
            shared = share_files(staging.path, manifest, [reader])  # without links: the result can be edited
            if staging.publish():
                return manifest, {"shared_bytes": shared}
        there = None if self.force else self._existing(reader)
        if there is None or there.content_digest != manifest.content_digest:
            raise occupied_error(self.destination, "was just created by another process")
        return there, {"already_there": True}

    def _existing(self, reader: StepReader) -> Manifest | None:
        there = existing_result(self.destination, self._request(reader.manifest))
        if there is None or not there.provenance:
            return there
        made = there.provenance[-1]
        if made.inputs.get("content_digest") != reader.manifest.content_digest:
            raise occupied_error(self.destination, "was made from another dataset")
        if made.verb not in _REWRITING:  # preprocess results keep the request of their source
            raise occupied_error(self.destination, f"was made from the same dataset by {made.verb}")
        if there.steps != reader.manifest.steps:
            raise occupied_error(self.destination, f"has {there.steps:,} of its steps, not {reader.manifest.steps:,}")
        sound = isinstance(reader, SoundSteps)  # whose notes name the damaged files and the episodes left out
        if sound != bool(made.arguments.get("skip_bad")) or (sound and there.notes != reader.manifest.notes):
            raise occupied_error(self.destination, "was made while other files of the dataset were damaged")
        refuse_other_compression(self.destination, there, self.compress)
        return there

    def _request(self, manifest: Manifest) -> Request:
        return replace(manifest.request, layout=self.layout)

    def _write(self, reader: StepReader, folder: Path) -> Manifest:
        manifest = reader.manifest
        codecs = parse_codecs(self.compress, reader.fields)
        origin = replace(
            Origin.of(_planned(reader), reader.documents(), reader.videos()),
            request=self._request(manifest),
            provenance=(*manifest.provenance, self._step(reader)),
        )
        with verified_steps(reader) as steps:
            self.progress.start("converting", manifest.steps, "steps")
            made = write_dataset(steps, folder, self.layout, origin, codecs, self.progress.advance)
        if _is_saved(reader):
            _require_digest(reader, folder, made)
        self.progress.done()
        return made

    def _step(self, reader: StepReader) -> Any:
        named = "path" if self.verb == "convert" else "checkpoint"
        arguments: Mapping[str, Any] = {named: self.asked, "layout": self.layout}
        arguments = {**arguments, **layout_arguments(self.layout, self.compress)}
        if isinstance(reader, SoundSteps):
            arguments["skip_bad"] = True
        return provenance_step(self.verb, arguments, {"content_digest": reader.manifest.content_digest})


def _planned(reader: StepReader) -> Manifest:
    return reader.planned if isinstance(reader, BufferSteps) else reader.manifest


def _is_saved(reader: StepReader) -> bool:
    """Return whether the reader is of an rbtool checkpoint, whose manifest records the digest of its dataset."""
    return reader.manifest.kind == "checkpoint" and not isinstance(reader, BufferSteps)


def _require_digest(reader: StepReader, folder: Path, made: Manifest) -> None:
    """Raise CorruptDataError unless the written dataset is the one that the checkpoint was saved from."""
    expected, found = dataset_digest(reader.manifest), made.content_digest
    if made.layout == "packed":
        with PackedReader(folder) as written:
            found = written.ted_digest
    if found != expected:
        raise CorruptDataError(
            f"{reader.path} does not give the data it was saved from: their digest is {found}, expected {expected}"
        )
