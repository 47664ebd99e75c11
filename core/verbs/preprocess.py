"""`preprocess`: a dataset through a function, into a new dataset."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..checkpoint import open_steps, standing
from ..dataset import (
    Manifest,
    Provenance,
    Staging,
    StepReader,
    find_dataset,
    provenance_step,
    require_apart,
)
from ..preprocess import ChunkFunction, Plan, Preprocessing, find_function
from ..progress import Progress, Silent
from ..ted import row_bytes
from .results import Published, published_entries

__all__ = ["PreprocessResult", "preprocess"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessResult(Published):
    """The new dataset, the one it was made from, and how: `num_workers` 0 means in one process."""

    kind: ClassVar[str] = "preprocess"
    source: Path
    function: str
    chunk_size: int
    num_workers: int


def preprocess(
    dataset: str | os.PathLike[str],
    fn: Callable[[Any], Any] | str,
    dest: str | os.PathLike[str],
    *,
    num_workers: int | None = None,
    chunk_size: int | None = None,
    num_frames: int | None = None,
    force: bool = False,
    dry_run: bool = False,
    root: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> PreprocessResult:
    """Take `dataset` (a path or `source:id`) through `fn`, chunk by chunk, into a new dataset at `dest`.

    `fn` is a callable, `FILE.py:NAME` or `module:name`. It takes a tensordict of batch size `[K]` with the keys of
    the dataset and returns K rows, a tensordict or a dict of tensors, under any keys; the first chunk decides keys,
    element types and shapes. Its tensors are its own to edit. Episodes stay as they are; their returns, flags and
    continuity are taken from the result.

    Chunks of `chunk_size` steps (about 16 MB by default) go to `num_workers` processes (one a core by default), which
    read and write by path; 0 stays in this process. The same `content_digest` comes out whatever the number.
    `num_frames` takes the first so many steps, and an episode cut there is marked truncated. A dataset at `dest` is
    replaced with `force`; one that the same file has made from the same data is left as it is.

    Raises UsageError for arguments that make no sense and functions that cannot be found, imported or sent to a
    worker; RbtoolError where the function raises and SchemaError where it returns something else than in the first
    chunk, both naming steps and episodes; OutOfSpaceError. In each case nothing is left at `dest` but what was there.
    """
    begun = time.perf_counter()
    with open_steps(find_dataset(dataset, root)) as reader:
        destination = Path(dest).expanduser().absolute()
        function = find_function(fn)
        plan = Plan.of(reader.manifest, num_workers, chunk_size, num_frames)
        require_apart(reader.path, destination)
        step = _step(reader, function, plan, num_frames)
        there = None if force else _already_there(destination, function, step)
        if there is not None:
            entries = published_entries(there, destination, begun)
            return _result(entries, reader, function, plan, already_there=True)
        staging = Staging(destination, replace=force)
        staging.refuse_if_taken()
        work = Preprocessing(reader, function, plan)
        if dry_run:
            return _preview(work, destination)
        manifest = work.publish(staging, os.fspath(dataset), step, progress or Silent())
        return _result(published_entries(manifest, destination, begun), reader, function, plan)


def _step(reader: StepReader, function: ChunkFunction, plan: Plan, num_frames: int | None) -> Provenance:
    """What the provenance says: all that decides the contents, so not the number of workers."""
    arguments = {"function": function.label, "chunk_size": plan.chunk_size, "num_frames": num_frames}
    inputs = {"content_digest": reader.manifest.content_digest, **function.inputs()}
    return provenance_step("preprocess", arguments, inputs)


def _already_there(destination: Path, function: ChunkFunction, step: Provenance) -> Manifest | None:
    """The dataset at `destination`, if the same function file has made it from the same data in the same way."""
    manifest = standing(destination) if function.inputs() else None
    if manifest is None:
        return None
    last = manifest.provenance[-1] if manifest.provenance else None
    same = last is not None and (last.verb, last.arguments, last.inputs) == (step.verb, step.arguments, step.inputs)
    return manifest if same else None


def _preview(work: Preprocessing, destination: Path) -> PreprocessResult:
    reader, plan = work.reader, work.plan
    fields = work.preview()
    episodes = int((reader.episodes.start < plan.steps).sum())
    entries = {
        "path": destination, "layout": "ted", "steps": plan.steps, "episodes": episodes,
        "bytes": plan.steps * row_bytes(fields), "content_digest": None, "boundary": {}, "renamed_keys": {},
        "dropped_keys": (), "notes": tuple(f"{field.name}: {field.dtype} {list(field.shape)}" for field in fields),
        "request": {}, "dry_run": True,
    }  # fmt: skip
    return _result(entries, reader, work.function, plan)


def _result(
    entries: Mapping[str, Any], reader: StepReader, function: ChunkFunction, plan: Plan, **changes: Any
) -> PreprocessResult:
    return PreprocessResult(
        **{**entries, **changes},
        source=reader.path,
        function=function.label,
        chunk_size=plan.chunk_size,
        num_workers=plan.workers,
    )
