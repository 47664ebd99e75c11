"""`checkpoint save`, `checkpoint load` and `checkpoint verify`: datasets as checkpoints, and back."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np

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
from ..format.videos import refuse_videos
from ..open_steps import BufferSteps, ForeignSteps, finished_manifest, open_steps
from ..options import PathLike, takes
from ..progress import Progress
from ..results import Published, Result, published_entries, require_layout, seconds_since
from ..saved_steps import open_saved, verified_steps
from ..ted.schema import row_bytes
from .convert import Rewriting
from .options import LoadOptions, SaveOptions

_LIBRARIES = ("torchrl",)
_H5_NAME = "checkpoint.h5"
_LOAD = "checkpoint load"
_LOST = frozenset({"episodes.seed", "episodes.has_seed", "episodes.end_reason", "episodes_text"})
"""Entries that TorchRL's layout cannot store."""
_ROWS_ONLY = "TorchRL's layout keeps only the rows: no episode table, no text, no spaces, no digests"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaveResult(Published):
    """A written checkpoint. `dataset_digest` is the content digest of the dataset that `load` restores.

    `explicit_next` counts the episodes whose next observations differ from the following rows and are stored in full.
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


@takes(SaveOptions)
def save(asked: SaveOptions) -> CheckpointSaveResult:
    """Save a dataset, or a checkpoint in another form, as a checkpoint.

    Args:
        dataset: a path or `source:id`.
        dest: the folder to write, or the file if `form` is `h5`.
        form: `ted` (a copy), `flat` (each observation once), `nested` (flat, and ragged tensors for tensordict) or `h5`
            (one file).
        compression: for `h5`: `gzip`, `gzip:1` to `gzip:9`, or `lzf`.
        for_library: `torchrl` writes the layout of TorchRL's checkpointers of that form.
        durable: what survives a power failure, as for `ReplayBuffer.dumps`.
        root: where stored datasets are.
        force: replace what is at `dest`.
        dry_run: do everything but writing.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        What was written. An equal checkpoint at `dest` is left as it is, and `already_there` is True. TorchRL's layout
        does not record its source, so that equal checkpoints in it are not recognised.

    Raises:
        UsageError: arguments make no sense, or something else is at `dest`.
        DatasetNotFoundError, FormatError, CorruptDataError: the dataset does not exist, cannot be read, or is damaged.
        SchemaError: TorchRL's layout cannot hold the data.
        OutOfSpaceError: the disk has no room for the result.
    """
    started, chosen = time.perf_counter(), _require_form(asked)
    path, target = find_dataset(asked.dataset, asked.root), fs.expanded(asked.dest).absolute()
    require_apart(path, target)
    with open_saved(path) as source:
        if isinstance(source, BufferSteps) and source.manifest.kind == "checkpoint":
            what = "in TorchRL's layout, with no manifest" if isinstance(source, ForeignSteps) else "of a buffer"
            raise UsageError(
                f"{path} is a checkpoint {what}, expected a dataset",
                hint=f"make a dataset of it first: rbtool checkpoint load {shlex.quote(str(path))} DEST",
            )
        digest = steps_digest(source)
        if asked.for_library is None:
            manifest, changes = _save(asked, source, target, chosen, digest)
        else:
            manifest, changes = _save_for_torchrl(asked, source, target, chosen)
        return CheckpointSaveResult(
            **published_entries(manifest, target, started, source) | changes,
            compression=str(chosen),
            explicit_next=manifest.boundary.explicit_next,
            dataset_digest=digest,
        )


def _save(
    asked: SaveOptions, source: StepReader, target: Path, compression: Compression, digest: str
) -> Outcome[Manifest]:
    form, size = asked.form, _size(source, asked.form)
    name = _H5_NAME if form == "h5" else None
    arguments = {"dataset": str(asked.dataset), "form": form, "compression": str(compression)}

    def build(staging: Staging) -> Outcome[Manifest]:
        place = staging.path / name if name else staging.path
        made = save_checkpoint(
            source, place, form, compression=compression, arguments=arguments, progress=asked.progress
        )
        return Outcome(made)

    publication = Publication(
        staging=Staging(target, replace=asked.force, durable=asked.durable),
        find=lambda: _equal_checkpoint(target, source, digest, form, compression),
        needed=lambda: size if compression.method is None else None,
        dry_run=asked.dry_run,
        name=name,
    )
    planned = Outcome(source.manifest, {"layout": form, "bytes": size, "content_digest": None})
    return publication.run(lambda: planned, build)


def _save_for_torchrl(
    asked: SaveOptions, source: StepReader, target: Path, compression: Compression
) -> Outcome[Manifest]:
    """Write TorchRL's layout. It has no manifest, so an equal checkpoint that is there cannot be recognised."""
    form: CompactForm = asked.form  # type: ignore[assignment]  # not ted, which `_require_form` refuses
    filled = FilledStorage.of_dataset(source.manifest.steps)
    size = foreign_form().bytes(source.fields, filled, form, source.manifest.episodes)
    notes = (*source.manifest.notes, _ROWS_ONLY)
    manifest = replace(source.manifest, kind="checkpoint", layout=form, notes=notes)

    def build(staging: Staging) -> Outcome[Manifest]:
        written = _build_for_torchrl(source, staging.path, form, compression, asked.reporter)
        return Outcome(manifest, {"bytes": written, "content_digest": None})

    # An HDF5 file is published as a file if the destination has its suffix, else in a folder.
    name = _H5_NAME if form == "h5" and target.suffix == ".h5" else None
    staging = _TorchrlStaging(target, replace=asked.force, durable=asked.durable)
    planned = Outcome(manifest, {"bytes": size, "content_digest": None})
    publication = Publication[Manifest](staging=staging, dry_run=asked.dry_run, name=name)
    return publication.run(lambda: planned, build)


@takes(LoadOptions)
def load(asked: LoadOptions) -> CheckpointLoadResult:
    """Restore the dataset of a checkpoint, with the same content digest.

    The checkpoint may also be of a buffer or a storage of steps, rbtool's or TorchRL's (a folder or a file): its
    valid rows become a dataset, lane by lane and oldest first. An unfinished episode is marked truncated, with a note.

    Args:
        checkpoint: the folder or the file.
        dest: the folder to write.
        layout, compress: as in `convert`. With layout `packed`, it equals the result of a later `convert`, and is
            compared with the digest of the saved dataset.
        force: replace what is at `dest`.
        dry_run: do everything but writing.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        What was written. An equal dataset at `dest` is left as it is, and `already_there` is True.

    Raises:
        CorruptDataError: the checkpoint is damaged; nothing is written.
        UsageError: arguments make no sense, or something else is at `dest`.
        DatasetNotFoundError, FormatError: the checkpoint does not exist or cannot be read.
        OutOfSpaceError: the disk has no room for the result.
    """
    started = time.perf_counter()
    path, target = find_dataset(asked.checkpoint), fs.expanded(asked.dest).absolute()
    require_apart(path, target)
    layout = require_layout(asked.layout, asked.compress)
    with open_saved(path) as source:
        _require_checkpoint(source)
        form = source.manifest.layout
        if layout != "ted":
            return CheckpointLoadResult(**Rewriting(asked, path, target, layout).run(), form=form)
        digest = None if isinstance(source, BufferSteps) else dataset_digest(source.manifest)
        size = _size(source, "ted")

        def find() -> Manifest | None:
            if isinstance(source, BufferSteps):
                return _loaded_before(target, source)
            return _equal_dataset(target, source, dataset_digest(source.manifest))

        def build(staging: Staging) -> Outcome[Manifest]:
            arguments = {"checkpoint": str(asked.checkpoint)}
            if isinstance(source, BufferSteps):
                return Outcome(_build_dataset(source, staging.path, arguments, asked.reporter))
            return Outcome(load_checkpoint(source, staging.path, arguments=arguments, progress=asked.progress))

        publication = Publication(
            staging=Staging(target, replace=asked.force), find=find, needed=lambda: size, dry_run=asked.dry_run
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

    Bits are compared: NaN equals NaN, 0.0 does not equal -0.0.

    Args:
        checkpoint: the folder or the file.
        dataset: a path or `source:id` of a dataset or of another checkpoint.
        root: where stored datasets are.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        The differences. Entries that TorchRL's layout cannot store are named in a note and do not count.

    Raises:
        CorruptDataError: the checkpoint is damaged.
        UsageError, DatasetNotFoundError, FormatError: the checkpoint or the dataset does not exist.
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


def _require_form(asked: SaveOptions) -> Compression:
    form, library = asked.form, asked.for_library
    if library not in (None, *_LIBRARIES):
        raise UsageError(f"checkpoints are not written for {library!r}", hint=f"take {', '.join(_LIBRARIES)}")
    if library is not None and form == "ted":
        raise UsageError(f"the form ted is not written for {library}", hint="use --as flat, nested or h5")
    if form not in get_args(Form):
        raise UsageError(f"checkpoint form {form!r} not found", hint=f"choose from {', '.join(get_args(Form))}")
    chosen = Compression.parse(asked.compression)
    if form != "h5" and chosen.method is not None:
        raise UsageError(
            f"form {form} cannot be compressed, only h5 can", hint="leave out --compression, or use --as h5"
        )
    return chosen


def _require_checkpoint(reader: StepReader) -> None:
    if reader.manifest.kind != "checkpoint":
        raise UsageError(
            f"{reader.path} is a {reader.manifest.kind}, not a checkpoint",
            hint="save one with: rbtool checkpoint save DATASET DEST --as h5",
        )


def _equal_checkpoint(
    target: Path, source: StepReader, digest: str, form: Form, compression: Compression
) -> Manifest | None:
    """Return the manifest at `target` if it is a checkpoint of the same data in the same form."""
    there = finished_manifest(target)
    if there is None or (there.kind, there.layout) != ("checkpoint", form) or dataset_digest(there) != digest:
        return None
    same = there.provenance[-1].arguments.get("compression") == str(compression) and _has_scores_of(source, target)
    return there if same else None


def _equal_dataset(target: Path, source: StepReader, digest: str) -> Manifest | None:
    there = finished_manifest(target)
    same = there is not None and there.kind == "dataset" and there.content_digest == digest
    return there if same and _has_scores_of(source, target) else None


def _has_scores_of(source: StepReader, target: Path) -> bool:
    """Return whether the episodes at `target` have the scores of the source's, which no content digest covers."""
    with open_steps(target) as made:
        scores, found = source.episodes.scores, made.episodes.scores
    alike = (np.array_equal(scores[name], found[name], equal_nan=True) for name in scores if name in found)
    return scores.keys() == found.keys() and all(alike)


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


def _build_dataset(source: BufferSteps, folder: Path, arguments: Mapping[str, Any], progress: Progress) -> Manifest:
    """Write the steps of a saved buffer as a dataset into a new folder, and verify their digests."""
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
