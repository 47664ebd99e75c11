"""The layouts a dataset can be written in, and datasets written again in another one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint import BufferSteps, VerifyingReader, dataset_digest
from ..errors import CorruptDataError, UsageError
from ..format import (
    Layout,
    Manifest,
    Origin,
    PackedReader,
    PackedSchema,
    Request,
    SoundSteps,
    Staging,
    StepReader,
    TedReader,
    damage_explained,
    fs,
    mend,
    parse_codecs,
    provenance_step,
    require_apart,
    sound_steps,
    write_dataset,
)
from ..progress import Progress
from ..ted import Field, row_bytes
from .results import published_entries, seconds_since, standing, taken
from .saved_steps import open_saved

__all__ = [
    "Rewriting",
    "final_step_arguments",
    "layout_arguments",
    "refuse_other_compression",
    "require_layout",
    "rows_bytes",
]

_SMALL_FILES = 64 << 10
_REWRITING = ("convert", "checkpoint load")


def require_layout(layout: str, compress: Sequence[str]) -> Layout:
    """Return a layout that datasets have; UsageError for others, and for compression where there is none."""
    if layout == "packed":
        return "packed"
    if layout != "ted":
        raise UsageError(f"there is no dataset layout {layout!r}", hint="take ted or packed")
    if compress:
        raise UsageError("layout ted has no compressed fields, only packed has", hint="add --layout packed")
    return "ted"


def final_step_arguments(final_step: str) -> dict[str, Any]:
    """What the provenance says of last steps without an observation after them; nothing of the default."""
    return {} if final_step == "auto" else {"final_step": final_step}


def layout_arguments(layout: Layout, compress: Sequence[str]) -> dict[str, Any]:
    """What the provenance says of it; nothing of the default."""
    said = {"layout": layout} if layout != "ted" else {}
    return said | ({"compress": sorted(compress)} if compress else {})


def refuse_other_compression(destination: Path, manifest: Manifest, compress: Sequence[str]) -> None:
    """Raise UsageError if the dataset that stands at `destination` was compressed in another way."""
    if manifest.provenance[-1].arguments.get("compress", []) != sorted(compress):
        raise taken(destination, "was compressed in another way")


def rows_bytes(fields: Sequence[Field], layout: Layout, steps: int, episodes: int) -> int:
    """Bytes of all rows in a layout, as long as nothing is compressed and all next rows follow."""
    if layout == "packed":
        return PackedSchema.of(fields).size(steps, episodes)
    return row_bytes(fields) * steps


@dataclass(frozen=True, kw_only=True)
class Rewriting:
    """One dataset or checkpoint of ours (or a tensordict folder), or a checkpoint of TorchRL's, written again at
    `destination` as a dataset in a layout. `verb` is who asks."""

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
        """Write it, unless an equal dataset is there already; return the entries of a `Published`.

        Every byte of the source is compared with its digest, and the rows of a checkpoint with the digest of the
        dataset that it was saved from; those of a buffer's become a dataset. UsageError for what may not be replaced,
        CorruptDataError for a damaged source, OutOfSpaceError.
        """
        begun = time.perf_counter()
        require_apart(self.source, self.destination)
        explained = damage_explained(self.source, can_skip=self.verb == "convert" and not self.skip_bad)
        with explained, open_saved(self.source, damaged=self.skip_bad) as opened:
            reader = sound_steps(opened) if self.skip_bad else opened
            PackedSchema.of(reader.fields, parse_codecs(self.compress, reader.fields))
            manifest = self._rewritten(reader, begun)
        if isinstance(manifest, dict):
            return manifest
        there, already = manifest
        return published_entries(there, self.destination, begun) | {"already_there": already, "dry_run": self.dry_run}

    def _rewritten(self, reader: StepReader, begun: float) -> dict[str, Any] | tuple[Manifest, bool]:
        """Return what stands there in the end and whether it did before, or what would be written."""
        if not self.dry_run:
            mend(self.destination)
        there = None if self.force else self._standing(reader)
        if there is not None:
            return there, True
        staging = Staging(self.destination, replace=self.force)
        staging.refuse_if_taken()
        size = rows_bytes(reader.fields, self.layout, reader.manifest.steps, reader.manifest.episodes)
        if not self.compress:
            fs.require_space(self.destination.parent, size + _SMALL_FILES)
        if self.dry_run:
            planned = replace(_planned(reader), layout=self.layout, request=self._request(reader.manifest))
            changes = {"bytes": size, "content_digest": None, "dry_run": True, "seconds": seconds_since(begun)}
            return published_entries(planned, self.destination, begun) | changes
        with staging:
            manifest = self._write(reader, staging.path)
            if staging.publish():
                return manifest, False
        there = None if self.force else self._standing(reader)
        if there is None or there.content_digest != manifest.content_digest:
            raise taken(self.destination, "was put there by another process just now")
        return there, True

    def _standing(self, reader: StepReader) -> Manifest | None:
        there = standing(self.destination, self._request(reader.manifest))
        if there is None or not there.provenance:
            return there
        made = there.provenance[-1]
        if made.inputs.get("content_digest") != reader.manifest.content_digest:
            raise taken(self.destination, "was made from another dataset")
        if made.verb not in _REWRITING:  # the requests of what preprocess makes of its own results are equal
            raise taken(self.destination, f"was made from the same dataset by {made.verb}")
        if there.steps != reader.manifest.steps:
            raise taken(self.destination, f"has {there.steps:,} of its steps, not {reader.manifest.steps:,}")
        sound = isinstance(reader, SoundSteps)  # whose notes name the files that are damaged, and the episodes left out
        if sound != bool(made.arguments.get("skip_bad")) or (sound and there.notes != reader.manifest.notes):
            raise taken(self.destination, "was made while other files of the dataset were damaged")
        refuse_other_compression(self.destination, there, self.compress)
        return there

    def _request(self, manifest: Manifest) -> Request:
        return replace(manifest.request, layout=self.layout)

    def _write(self, reader: StepReader, folder: Path) -> Manifest:
        checked: StepReader = reader
        if isinstance(reader, TedReader):
            checked = VerifyingReader(reader)
        else:
            reader.verify_files()
        manifest = reader.manifest
        self.progress.start("converting", manifest.steps, "steps")
        codecs = parse_codecs(self.compress, reader.fields)
        origin = replace(
            Origin.of(_planned(reader), reader.documents()),
            request=self._request(manifest),
            provenance=(*manifest.provenance, self._step(reader)),
        )
        made = write_dataset(checked, folder, self.layout, origin, codecs, self.progress.advance)
        if checked is not reader:
            checked.verify_files()
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
    """Whether these are the rows of a checkpoint of ours, which knows the digest of its dataset."""
    return reader.manifest.kind == "checkpoint" and not isinstance(reader, BufferSteps)


def _require_digest(reader: StepReader, folder: Path, made: Manifest) -> None:
    """Raise CorruptDataError unless what was written is the dataset that a checkpoint was saved from."""
    expected, found = dataset_digest(reader.manifest), made.content_digest
    if made.layout == "packed":
        with PackedReader(folder) as written:
            found = written.ted_digest
    if found != expected:
        raise CorruptDataError(
            f"{reader.path} does not give the data it was saved from: their digest is {found}, expected {expected}"
        )
