"""`list`: which datasets are stored below the root."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

from ..dataset import Manifest, storage_root, stored_datasets
from ..errors import UsageError
from .results import Result

__all__ = ["ListResult", "StoredDataset", "fits", "list_datasets", "stored_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredDataset:
    """A dataset below the root. `created` is the UTC time of the last step of how it was made.

    `problem` says what is wrong with one that cannot be read; its other entries are then empty.
    """

    name: str
    path: Path
    layout: str = ""
    steps: int = 0
    episodes: int = 0
    bytes: int = 0
    created: str | None = None
    content_digest: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListResult(Result):
    """The stored datasets in the order of their names."""

    kind: ClassVar[str] = "list"
    root: Path
    datasets: tuple[StoredDataset, ...]


def list_datasets(pattern: str | None = None, *, root: str | os.PathLike[str] | None = None) -> ListResult:
    """List every dataset below the root, those that cannot be read too.

    `pattern` keeps the names, `source:id`, that it fits: as a shell pattern where it has one of `*?[`, else as a
    part of the name. A root that is not there holds nothing. Raises UsageError where the root is no folder.
    """
    folder = storage_root(root)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder, so no datasets can be stored in it", hint="choose another --root")
    found = [
        _entry(name, path, manifest)
        for path, manifest in stored_datasets(folder)
        if not (isinstance(manifest, Manifest) and manifest.kind != "dataset")
        if fits(name := stored_name(path, folder), pattern)
    ]
    return ListResult(root=folder, datasets=tuple(sorted(found, key=lambda entry: entry.name)))


def stored_name(path: Path, root: Path) -> str:
    """Name what lies at a path below the root: `source:id`, or the path itself where it is too short for that."""
    source, *rest = path.relative_to(root).parts or ("",)
    return f"{source}:{'/'.join(rest)}" if rest else str(path)


def fits(name: str, pattern: str | None) -> bool:
    """Tell whether a pattern keeps `source:id`: as a shell pattern where it has one of `*?[`, else as a part of it.

    The source may be left out of a pattern, and upper and lower case are alike.
    """
    if pattern is None:
        return True
    name, pattern = name.lower(), pattern.lower()
    if not set(pattern) & set("*?["):
        return pattern in name
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition(":")[2], pattern)


def _entry(name: str, path: Path, manifest: Manifest | Exception) -> StoredDataset:
    if isinstance(manifest, Exception):
        return StoredDataset(name=name, path=path, problem=str(manifest))
    return StoredDataset(
        name=name,
        path=path,
        layout=manifest.layout,
        steps=manifest.steps,
        episodes=manifest.episodes,
        bytes=manifest.bytes,
        created=manifest.provenance[-1].time if manifest.provenance else None,
        content_digest=manifest.content_digest,
    )
