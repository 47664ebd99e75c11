"""Whether what a verb would make stands at its destination already."""

from __future__ import annotations

from pathlib import Path

from ..dataset import ListedFiles, Manifest, Request, has_manifest
from ..errors import CorruptDataError, RbtoolError, UsageError

__all__ = ["standing", "taken"]


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
