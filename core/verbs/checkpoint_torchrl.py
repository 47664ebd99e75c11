"""Write datasets in TorchRL's checkpoint layouts, and restore datasets from the checkpoints of buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..encodings import CompactForm, Compression, FilledStorage
from ..errors import UsageError
from ..format import (
    Manifest,
    Origin,
    Staging,
    StepReader,
    is_ours,
    provenance_step,
    write_dataset,
)
from ..opening import BufferSteps, finished_manifest
from ..progress import Progress, Silent
from ..torchrl import (
    TorchrlKeys,
    TorchrlPlan,
    find_torchrl,
    write_torchrl,
)
from .saved_steps import verified_steps

__all__ = ["build_dataset", "build_for_torchrl", "loaded_before", "size_for_torchrl", "staging_for_torchrl"]

_FILE = "checkpoint.h5"
_LOAD = "checkpoint load"


class _TorchrlStaging(Staging):
    """A `Staging` that can also replace a checkpoint in TorchRL's layout."""

    def refuse_if_taken(self) -> None:
        """Raise UsageError if the destination must not be replaced; changes nothing."""
        place, inside = find_torchrl(self.destination), self.destination
        if place is None or is_ours(inside) or not (place == inside or place.parent == inside):
            super().refuse_if_taken()
            return
        if not self.replace:
            raise UsageError(f"{inside} is there already", hint="add --force to replace it")
        known = {".json", ".memmap", ".h5"}
        strange = next((file for file in inside.rglob("*") if file.is_file() and file.suffix not in known), None)
        if strange is not None:
            raise UsageError(f"{strange} is not part of the checkpoint around it; nothing is replaced")


def staging_for_torchrl(target: Path, *, replace: bool) -> Staging:
    """Return a staging folder whose publication can replace an older checkpoint in TorchRL's layout."""
    return _TorchrlStaging(target, replace=replace)


def size_for_torchrl(source: StepReader, form: CompactForm) -> int:
    """Return the bytes of the rows; SchemaError if TorchRL's layout cannot store a leaf."""
    filled = FilledStorage.of_dataset(source.manifest.steps)
    return TorchrlPlan.of(source.fields, filled, TorchrlKeys(), form).bytes(source.manifest.episodes)


def build_for_torchrl(
    source: StepReader, staging: Staging, form: CompactForm, compression: Compression, progress: Progress | None
) -> tuple[str | None, int]:
    """Write a dataset in TorchRL's layout and verify its digests; return the name to publish and the bytes.

    The name is that of an H5 file if the destination ends in `.h5`; None publishes the folder.
    """
    progress = progress or Silent()
    target = staging.path / _FILE if form == "h5" else staging.path
    filled = FilledStorage.of_dataset(source.manifest.steps)
    with verified_steps(source) as steps:
        progress.start(f"saving {form} for torchrl", source.manifest.steps, "steps")
        write_torchrl(steps, target, form, filled, TorchrlKeys(), progress, compression)
    progress.done()
    size = sum(file.stat().st_size for file in staging.path.rglob("*") if file.is_file())
    return (_FILE if form == "h5" and staging.destination.suffix == ".h5" else None), size


def build_dataset(
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


def loaded_before(target: Path, source: BufferSteps) -> Manifest | None:
    """Return the manifest at `target` if it is a dataset loaded from these very files."""
    there = finished_manifest(target)
    if there is None or there.kind != "dataset" or not there.provenance:
        return None
    last, digest = there.provenance[-1], source.manifest.content_digest
    return there if last.verb == _LOAD and last.inputs.get("content_digest") == digest else None
