"""What the verbs return: frozen dataclasses that the command line renders, and prints whole under `--json`.

Each document has `schema`, the version of its shape, and `kind`, the name of the verb.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..errors import CorruptDataError, RbtoolError, UsageError
from ..format import ListedFiles, Manifest, Request, has_manifest, plain

__all__ = ["Published", "Result", "published_entries", "seconds_since", "standing", "taken", "to_document"]


class Result:
    """Base of every verb's result."""

    schema: ClassVar[int] = 1
    kind: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Result):
    """A dataset or checkpoint that a verb put at `path`, or would put there (`dry_run`).

    `already_there` says that an equal one stood there and nothing was written. `bytes` counts all files.
    """

    kind: ClassVar[str] = "published"
    path: Path
    layout: str
    steps: int
    episodes: int
    bytes: int
    content_digest: str | None
    boundary: Mapping[str, int]
    renamed_keys: Mapping[str, str]
    dropped_keys: tuple[Mapping[str, str], ...]
    notes: tuple[str, ...]
    request: Mapping[str, Any]
    already_there: bool = False
    dry_run: bool = False
    seconds: float = 0.0


def published_entries(manifest: Manifest, path: Path, begun: float) -> dict[str, Any]:
    """The entries of a `Published` as a manifest tells them; `begun` is when the verb started (perf_counter)."""
    return {
        "path": path,
        "layout": manifest.layout,
        "steps": manifest.steps,
        "episodes": manifest.episodes,
        "bytes": manifest.bytes,
        "content_digest": manifest.content_digest,
        "boundary": manifest.boundary.to_dict(),
        "renamed_keys": manifest.renamed_keys,
        "dropped_keys": tuple(dataclasses.asdict(item) for item in manifest.dropped_keys),
        "notes": manifest.notes,
        "request": manifest.request.to_dict(),
        "seconds": seconds_since(begun),
    }


def seconds_since(begun: float) -> float:
    """How long a verb took, to the millisecond."""
    return round(time.perf_counter() - begun, 3)


def to_document(result: Any) -> dict[str, Any]:
    """Turn a result into its JSON document: `schema` and `kind` first, then the fields in order."""
    return {"schema": result.schema, "kind": result.kind, **plain(_plain_paths(result))}


def _plain_paths(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain_paths(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_paths(item) for item in value]
    return value


def standing(destination: Path, request: Request) -> Manifest | None:
    """Return the manifest of the dataset at `destination` if an equal request made it and all its files are there.

    None if the place is free of datasets. Raises UsageError if another dataset is there, or a damaged one.
    """
    if not has_manifest(destination):
        return None
    try:
        files = ListedFiles.at(destination)
    except RbtoolError as error:
        raise taken(destination, f"is damaged ({error})") from error
    with files:
        return _equal(files, destination, request)


def _equal(files: ListedFiles, destination: Path, request: Request) -> Manifest:
    manifest = files.manifest
    if manifest.kind != "dataset":
        raise taken(destination, f"is a {manifest.kind} of {_shown(manifest.request)}, not a dataset")
    if manifest.request.identity() != request.identity():
        raise taken(destination, f"is dataset {_shown(manifest.request)}, not {_shown(request)}")
    try:
        files.check_sizes()
    except CorruptDataError as error:
        raise taken(destination, f"is damaged ({error})") from error
    return manifest


def taken(destination: Path, why: str) -> UsageError:
    """Make the error that says why a destination is not written to."""
    return UsageError(f"{destination} is there already and {why}", hint="add --force to replace it")


def _shown(request: Request) -> str:
    episodes = f", episodes {request.episodes}" if request.episodes else ""
    revision = f", revision {request.revision}" if request.revision else ""
    layout = f", layout {request.layout}" if request.layout != "ted" else ""
    return f"{request.source}:{request.id}{revision}{episodes}{layout}"
