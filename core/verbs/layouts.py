"""Layouts of datasets, and rewriting a dataset in another layout."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..encodings.save import dataset_digest
from ..errors import CorruptDataError, UsageError
from ..format import fs
from ..format.checks import SoundSteps, damage_explained, sound_steps
from ..format.contracts import StepReader
from ..format.locate import require_apart
from ..format.manifest import Layout, Manifest, Request
from ..format.packed.builder import write_dataset
from ..format.packed.reader import PackedReader
from ..format.packed.row_files import parse_codecs
from ..format.packed.schema import PackedSchema
from ..format.staging import Staging, mend
from ..format.ted.builder import Origin, provenance_step
from ..opening import BufferSteps
from ..progress import Progress
from ..ted.schema import Field, row_bytes
from .results import existing_result, occupied_error, published_entries, seconds_since
from .saved_steps import open_saved, verified_steps

_SMALL_FILES = 64 << 10
_REWRITING = ("convert", "checkpoint load")


def require_layout(layout: str, compress: Sequence[str]) -> Layout:
    """Validate a layout of datasets; UsageError for an unknown one, and for compression in a layout without it."""
    if layout == "packed":
        return "packed"
    if layout != "ted":
        raise UsageError(f"there is no dataset layout {layout!r}", hint="take ted or packed")
    if compress:
        raise UsageError("layout ted has no compressed fields, only packed has", hint="add --layout packed")
    return "ted"


def final_step_arguments(final_step: str) -> dict[str, Any]:
    """Return the provenance entry for last steps without a next observation; {} for the default."""
    return {} if final_step == "auto" else {"final_step": final_step}


def layout_arguments(layout: Layout, compress: Sequence[str]) -> dict[str, Any]:
    """Return the provenance entries of layout and compression; {} for the defaults."""
    named = {"layout": layout} if layout != "ted" else {}
    return named | ({"compress": sorted(compress)} if compress else {})


def refuse_other_compression(destination: Path, manifest: Manifest, compress: Sequence[str]) -> None:
    """Raise UsageError if the existing dataset at `destination` was compressed in another way."""
    if manifest.provenance[-1].arguments.get("compress", []) != sorted(compress):
        raise occupied_error(destination, "was compressed in another way")


def rows_bytes(fields: Sequence[Field], layout: Layout, steps: int, episodes: int) -> int:
    """Return the bytes of all rows in a layout, without compression and with every `next` row implied."""
    if layout == "packed":
        return PackedSchema.of(fields).size(steps, episodes)
    return row_bytes(fields) * steps


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
        there, already = manifest
        return published_entries(there, self.destination, started) | {"already_there": already, "dry_run": self.dry_run}

    def _rewritten(self, reader: StepReader, started: float) -> dict[str, Any] | tuple[Manifest, bool]:
        """Return the manifest at the destination and whether it existed before; with `dry_run`, the planned entries."""
        if not self.dry_run:
            mend(self.destination)
        there = None if self.force else self._existing(reader)
        if there is not None:
            return there, True
        staging = Staging(self.destination, replace=self.force)
        staging.refuse_if_taken()
        size = rows_bytes(reader.fields, self.layout, reader.manifest.steps, reader.manifest.episodes)
        if not self.compress:
            fs.require_space(self.destination.parent, size + _SMALL_FILES)
        if self.dry_run:
            planned = replace(_planned(reader), layout=self.layout, request=self._request(reader.manifest))
            changes = {"bytes": size, "content_digest": None, "dry_run": True, "seconds": seconds_since(started)}
            return published_entries(planned, self.destination, started) | changes
        with staging:
            manifest = self._write(reader, staging.path)
            if staging.publish():
                return manifest, False
        there = None if self.force else self._existing(reader)
        if there is None or there.content_digest != manifest.content_digest:
            raise occupied_error(self.destination, "was put there by another process just now")
        return there, True

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
            Origin.of(_planned(reader), reader.documents()),
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
