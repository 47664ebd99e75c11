"""`checkpoint save`, `checkpoint load` and `checkpoint verify`: steps in the form that a reader needs."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from ..encodings.compact import BUFFER, CompactForm, CompactLayout, Difference, FilledStorage, Form, compare_steps
from ..encodings.foreign import foreign_form
from ..encodings.h5 import Compression
from ..encodings.save import dataset_digest, load_checkpoint, save_checkpoint, steps_digest
from ..errors import UsageError, suggests_keywords
from ..format import fs
from ..format.contracts import StepReader
from ..format.locate import find_dataset, require_apart
from ..format.manifest import Manifest
from ..format.memmap.builder import Origin, provenance_step
from ..format.packed.builder import write_dataset
from ..format.staging import Outcome, Publication, Staging, files_below, is_ours, named_files
from ..format.syncing import Durable
from ..format.videos import refuse_videos
from ..open_steps import BufferSteps, ForeignSteps, finished_manifest, open_steps
from ..progress import Progress, Silent
from ..results import Published, Result, published_entries, require_layout, seconds_since
from ..saved_steps import open_saved, verified_steps
from ..ted.schema import row_bytes
from .convert import Rewriting

PathLike: TypeAlias = str | os.PathLike[str]
Library: TypeAlias = Literal["torchrl"]
_H5_NAME = "checkpoint.h5"
_LOAD = "checkpoint load"
_LOST = frozenset({"episodes.seed", "episodes.has_seed", "episodes.end_reason", "episodes_text"})
"""Entries that TorchRL's layout cannot store."""
_ROWS_ONLY = "TorchRL's layout keeps the rows alone: no episode table, no text, no spaces, no digests"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaveResult(Published):
    """A checkpoint. `dataset_digest` is the content digest of the dataset that `load` restores.

    `explicit_next` counts the episodes whose next observations are not the next rows and are stored in full.
    """

    kind: ClassVar[str] = "checkpoint save"
    compression: str
    explicit_next: int
    dataset_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoadResult(Published):
    """A dataset loaded from a checkpoint in the layout `form`."""

    kind: ClassVar[str] = "checkpoint load"
    form: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointVerifyResult(Result):
    """Whether a checkpoint equals a dataset bit for bit in steps, episodes and text; if not, the differences.

    `notes` name the entries of the dataset that the checkpoint's layout cannot store; they do not count as
    differences.
    """

    kind: ClassVar[str] = "checkpoint verify"
    checkpoint: Path
    dataset: Path
    layout: str
    steps: int
    episodes: int
    equal: bool
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()
    seconds: float


@suggests_keywords()
def save(
    dataset: PathLike,
    dest: PathLike,
    *,
    form: Form,
    compression: str | None = None,
    for_library: Library | None = None,
    durable: Durable = "full",
    force: bool = False,
    dry_run: bool = False,
    root: PathLike | None = None,
    progress: Progress | None = None,
) -> CheckpointSaveResult:
    """Save a dataset, or a checkpoint in another form, as a checkpoint at `dest`.

    `dataset` is a path or `source:id`. `form` is `ted` (a copy), `flat` (each observation once), `nested` (flat,
    and ragged tensors for tensordict) or `h5` (one file, which `compression` may make smaller: `gzip`, `gzip:1` to
    `gzip:9`, `lzf`). `for_library="torchrl"` writes the rows as TorchRL lays out a storage in that form; SchemaError
    is raised for what that cannot hold. `dest` is replaced only with `force`; an equal checkpoint there is left as it
    is, except in TorchRL's layout, which does not record what it was made from. `durable` is that of
    `ReplayBuffer.dumps`. Raises UsageError, DatasetNotFoundError, FormatError, CorruptDataError for a damaged source,
    OutOfSpaceError.
    """
    started = time.perf_counter()
    chosen = _require_form(form, compression, for_library)
    path, target = find_dataset(dataset, root), fs.expanded(dest).absolute()
    require_apart(path, target)
    with open_saved(path) as source:
        if isinstance(source, BufferSteps) and source.manifest.kind == "checkpoint":
            hint = f"make a dataset of it first: rbtool checkpoint load {shlex.quote(str(path))} DEST"
            what = "in TorchRL's layout, with no manifest" if isinstance(source, ForeignSteps) else "of a buffer"
            raise UsageError(f"{path} is a checkpoint {what}, expected a dataset", hint=hint)
        digest = steps_digest(source)
        if for_library is not None and form != "ted":
            theirs = _TorchrlStaging(target, replace=force, durable=durable)
            manifest, changes = _save_for_torchrl(source, theirs, form, chosen, dry_run, progress or Silent())
        else:
            name, size = _H5_NAME if form == "h5" else None, _size(source, form)
            arguments = {"dataset": str(dataset), "form": form, "compression": str(chosen)}

            def build(staging: Staging) -> Outcome[Manifest]:
                place = staging.path / name if name else staging.path
                made = save_checkpoint(source, place, form, compression=chosen, arguments=arguments, progress=progress)
                return Outcome(made)

            publication = Publication(
                staging=Staging(target, replace=force, durable=durable),
                find=lambda: _equal_checkpoint(target, digest, form, chosen),
                needed=lambda: size if chosen.method is None else None,
                dry_run=dry_run,
                name=name,
            )
            planned = Outcome(source.manifest, {"layout": form, "bytes": size, "content_digest": None})
            manifest, changes = publication.run(lambda: planned, build)
        return CheckpointSaveResult(
            **{**published_entries(manifest, target, started, source), **changes},
            compression=str(chosen),
            explicit_next=manifest.boundary.explicit_next,
            dataset_digest=digest,
        )


def _save_for_torchrl(
    source: StepReader,
    staging: Staging,
    form: CompactForm,
    compression: Compression,
    dry_run: bool,
    progress: Progress,
) -> Outcome[Manifest]:
    """Write TorchRL's layout. It has no manifest, so an equal checkpoint that is there cannot be recognised."""
    filled = FilledStorage.of_dataset(source.manifest.steps)
    size = foreign_form().bytes(source.fields, filled, form, source.manifest.episodes)
    notes = (*source.manifest.notes, _ROWS_ONLY)
    manifest = replace(source.manifest, kind="checkpoint", layout=form, notes=notes)

    def build(staging: Staging) -> Outcome[Manifest]:
        written = _build_for_torchrl(source, staging.path, form, compression, progress)
        return Outcome(manifest, {"bytes": written, "content_digest": None})

    # An H5 file is published as it is if the destination is named like one, else in a folder.
    name = _H5_NAME if form == "h5" and staging.destination.suffix == ".h5" else None
    planned = Outcome(manifest, {"bytes": size, "content_digest": None})
    publication = Publication[Manifest](staging=staging, dry_run=dry_run, name=name)
    return publication.run(lambda: planned, build)


@suggests_keywords()
def load(
    checkpoint: PathLike,
    dest: PathLike,
    *,
    layout: str = "ted",
    compress: Sequence[str] = (),
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> CheckpointLoadResult:
    """Restore the dataset of a checkpoint at `dest`, with the same content digest.

    `layout` and `compress` are those of `convert`: a dataset in layout `packed` equals the one that converting
    afterwards makes, and is compared with the digest of the saved dataset.

    The valid rows of the checkpoint of a buffer or of a storage of steps, rbtool's or TorchRL's (a folder or a file),
    become a dataset, lane by lane and oldest first. An unfinished episode is marked truncated, with a note.

    `dest` is replaced only with `force`; an equal dataset there is left as it is. Raises CorruptDataError, with
    nothing at `dest`, for a damaged checkpoint; UsageError, DatasetNotFoundError, FormatError, OutOfSpaceError.
    """
    started = time.perf_counter()
    path, target = find_dataset(checkpoint), fs.expanded(dest).absolute()
    require_apart(path, target)
    wanted = require_layout(layout, compress)
    with open_saved(path) as source:
        _require_checkpoint(source)
        form = source.manifest.layout
        if wanted != "ted":
            rewriting = Rewriting(
                source=path, asked=os.fspath(checkpoint), destination=target, layout=wanted, compress=tuple(compress),
                force=force, dry_run=dry_run, progress=progress or Silent(), verb=_LOAD,
            )  # fmt: skip
            return CheckpointLoadResult(**rewriting.run(), form=form)
        digest, size = (
            None if isinstance(source, BufferSteps) else dataset_digest(source.manifest),
            _size(source, "ted"),
        )

        def find() -> Manifest | None:
            if isinstance(source, BufferSteps):
                return _loaded_before(target, source)
            return _equal_dataset(target, dataset_digest(source.manifest))

        def build(staging: Staging) -> Outcome[Manifest]:
            arguments = {"checkpoint": str(checkpoint)}
            if isinstance(source, BufferSteps):
                return Outcome(_build_dataset(source, staging.path, arguments, progress))
            return Outcome(load_checkpoint(source, staging.path, arguments=arguments, progress=progress))

        publication = Publication(
            staging=Staging(target, replace=force), find=find, needed=lambda: size, dry_run=dry_run
        )
        planned = Outcome(
            source.planned if isinstance(source, BufferSteps) else source.manifest,
            {"layout": "ted", "bytes": size, "content_digest": digest},
        )
        manifest, changes = publication.run(lambda: planned, build)
        return CheckpointLoadResult(**published_entries(manifest, target, started, source) | changes, form=form)


@suggests_keywords()
def verify(
    checkpoint: PathLike,
    dataset: PathLike,
    *,
    root: PathLike | None = None,
    progress: Progress | None = None,
) -> CheckpointVerifyResult:
    """Check a checkpoint against its own digests, then compare it value for value with a dataset.

    Bits are compared: NaN equals NaN, 0.0 does not equal -0.0. `dataset` is a path or `source:id` of a dataset or of
    another checkpoint. Entries that TorchRL's layout cannot store are named in a note and are not differences.
    Differences are returned; CorruptDataError is raised if the checkpoint is damaged.
    """
    started = time.perf_counter()
    with open_saved(find_dataset(checkpoint)) as saved, open_steps(find_dataset(dataset, root)) as steps:
        _require_checkpoint(saved)
        saved.verify_files()
        found = compare_steps(steps, saved, progress)
        lost = [one.key for one in found if one.key in _LOST and isinstance(saved, ForeignSteps)]
        differences = tuple(one for one in found if one.key not in lost)
        return CheckpointVerifyResult(
            checkpoint=saved.path,
            dataset=steps.path,
            layout=saved.manifest.layout,
            steps=saved.manifest.steps,
            episodes=saved.manifest.episodes,
            equal=not differences,
            differences=differences,
            notes=(f"TorchRL's layout has no place for {', '.join(lost)}",) if lost else (),
            seconds=seconds_since(started),
        )


def _require_form(form: str, compression: str | None, library: str | None) -> Compression:
    if library not in {None, *get_args(Library)}:
        raise UsageError(f"checkpoints are not written for {library!r}", hint=f"take {', '.join(get_args(Library))}")
    if library is not None and form == "ted":
        raise UsageError(f"for {library} whole episodes are saved", hint="use --as flat, nested or h5")
    if form not in get_args(Form):
        raise UsageError(f"there is no checkpoint form {form!r}", hint=f"choose from {', '.join(get_args(Form))}")
    chosen = Compression.parse(compression)
    if form != "h5" and chosen.method is not None:
        raise UsageError(
            f"form {form} cannot be compressed, only h5 can", hint="leave out --compression, or use --as h5"
        )
    return chosen


def _require_checkpoint(reader: StepReader) -> None:
    if reader.manifest.kind != "checkpoint":
        hint = "save one with: rbtool checkpoint save DATASET DEST --as h5"
        raise UsageError(f"{reader.path} is a {reader.manifest.kind}, not a checkpoint", hint=hint)


def _equal_checkpoint(target: Path, digest: str, form: Form, compression: Compression) -> Manifest | None:
    """Return the manifest at `target` if it is a checkpoint of the same data in the same form."""
    there = finished_manifest(target)
    if there is None or (there.kind, there.layout) != ("checkpoint", form) or dataset_digest(there) != digest:
        return None
    return there if there.provenance[-1].arguments.get("compression") == str(compression) else None


def _equal_dataset(target: Path, digest: str) -> Manifest | None:
    there = finished_manifest(target)
    same = there is not None and there.kind == "dataset" and there.content_digest == digest
    return there if same else None


def _size(source: StepReader, form: Form) -> int:
    """Estimate the bytes of the rows."""
    steps, episodes = source.manifest.steps, source.manifest.episodes
    if form == "ted":
        return row_bytes(source.fields) * steps
    return CompactLayout.of(source.fields, form).bytes(steps, episodes)


class _TorchrlStaging(Staging):
    """A `Staging` that can also replace a checkpoint in TorchRL's layout."""

    def refuse_if_taken(self) -> None:
        """Raise UsageError if the destination must not be replaced; changes nothing."""
        place, inside = foreign_form().find(self.destination), self.destination
        if place is None or is_ours(inside) or not (place == inside or place.parent == inside):
            super().refuse_if_taken()
            return
        if not self.replace:
            raise UsageError(f"{inside} already exists", hint="add --force to replace it")
        known = {inside / BUFFER, place} | named_files(place if place.is_dir() else inside)
        parts = {inside / "sampler", inside / "writer"} if (inside / BUFFER).is_file() else set()
        for file in files_below(inside):
            ours = file in known or (file.suffix in {".json", ".memmap"} and not parts.isdisjoint(file.parents))
            if not ours:
                raise UsageError(f"{file} is not part of the checkpoint around it; nothing is replaced")


def _build_for_torchrl(
    source: StepReader, folder: Path, form: CompactForm, compression: Compression, progress: Progress
) -> int:
    """Write a dataset in TorchRL's layout into a new folder and verify its digests; return the bytes."""
    refuse_videos(source, "a checkpoint for TorchRL")
    target = folder / _H5_NAME if form == "h5" else folder
    filled = FilledStorage.of_dataset(source.manifest.steps)
    with verified_steps(source) as steps:
        progress.start(f"saving {form} for torchrl", source.manifest.steps, "steps")
        foreign_form().write(steps, target, form, filled, {}, progress, compression)
    progress.done()
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _build_dataset(
    source: BufferSteps, folder: Path, arguments: Mapping[str, Any], progress: Progress | None
) -> Manifest:
    """Write the steps of a saved buffer as a dataset into a new folder, and verify their digests."""
    progress = progress or Silent()
    source.verify_files()
    progress.start("loading", source.manifest.steps, "steps")
    step = provenance_step(_LOAD, arguments, {"content_digest": source.manifest.content_digest})
    planned = source.planned
    origin = replace(Origin.of(planned, source.documents()), provenance=(*planned.provenance, step))
    manifest = write_dataset(source, folder, "ted", origin, progress=progress.advance)
    progress.done()
    return manifest


def _loaded_before(target: Path, source: BufferSteps) -> Manifest | None:
    """Return the manifest at `target` if it is a dataset loaded from these very files."""
    there = finished_manifest(target)
    if there is None or there.kind != "dataset" or not there.provenance:
        return None
    last, digest = there.provenance[-1], source.manifest.content_digest
    return there if last.verb == _LOAD and last.inputs.get("content_digest") == digest else None
