"""Names: where the root is, which folder an id means, and which ids are safe to use as a path."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from platformdirs import user_cache_path

from ..errors import DatasetNotFoundError, UsageError
from . import fs
from .manifest import HIDDEN, Manifest, Request, has_manifest
from .staging import mend

__all__ = [
    "dataset_folder",
    "find_dataset",
    "last_use",
    "require_apart",
    "safe_id",
    "storage_root",
    "stored_datasets",
]

_LONGEST_ID = 200  # with room for what is added to make a file name of it
_NAMED = re.compile(r"(?P<source>[a-z][a-z0-9_]*):(?P<id>[^:\\].*)")


def storage_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Folder that holds `<source>/<id>`: the argument, else `RBTOOL_HOME`, else the platform's cache folder."""
    chosen = root or os.environ.get("RBTOOL_HOME")
    return Path(chosen).expanduser().absolute() if chosen else user_cache_path("rbtool", appauthor=False)


def safe_id(name: str) -> str:
    """Return a dataset id that cannot leave its folder, or raise UsageError."""
    parts = name.split("/")
    if not name or name.startswith(("/", "~")) or "\\" in name or "\0" in name or re.match("[A-Za-z]:", name):
        raise UsageError(f"{name!r} is not a dataset id: ids are relative, like D4RL/door/human-v2")
    if len(name.encode()) > _LONGEST_ID:
        raise UsageError(f"{name[:40]}… is not a dataset id: ids have at most {_LONGEST_ID} bytes")
    if any(part in {"", ".", ".."} or part.startswith(".") for part in parts):
        raise UsageError(f"{name!r} is not a dataset id: no part of an id may be empty or begin with a dot")
    return name


def dataset_folder(request: Request, root: Path) -> Path:
    """Folder of a request below the root: the bare id for all of the latest, `<id>@<8 hex>` for anything else."""
    name = safe_id(request.id) if request.whole else f"{safe_id(request.id)}@{request.identity().split(':')[1][:8]}"
    return root / request.source / name


def require_apart(source: Path, destination: Path) -> None:
    """Refuse a destination that is the source, lies in it or around it: what is read is never edited."""
    one, other = source.resolve(), destination.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise UsageError(
            f"the destination {destination} and the source {source} lie one in the other",
            hint="choose a destination outside the source",
        )


def find_dataset(name: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> Path:
    """Turn what a user types, an existing path or `source:id`, into a path; raise DatasetNotFoundError.

    This counts as a use of a dataset that is stored below the root.
    """
    path = Path(name).expanduser()
    mend(path)
    if path.exists():
        _mark_use(path, root)
        return path
    named = _NAMED.fullmatch(os.fspath(name))
    if named is None:
        raise DatasetNotFoundError(
            f"there is nothing at {path}", hint="name an existing path, or a dataset like minari:ID"
        )
    folder = storage_root(root) / named["source"] / safe_id(named["id"])
    mend(folder)
    if not has_manifest(folder):
        raise DatasetNotFoundError(
            f"{name} is not in {storage_root(root)}", hint=_how_to_get(folder, named["source"], named["id"])
        )
    _mark_use(folder, root)
    return folder


def last_use(folder: Path) -> float | None:
    """When the dataset in `folder` was last opened by its name or path, in seconds since the epoch; None if unknown."""
    try:
        return (folder / HIDDEN).stat().st_mtime
    except OSError:
        return None


def _mark_use(path: Path, root: str | os.PathLike[str] | None) -> None:
    """Leave the time on the folder that is ours: nothing else changes it afterwards, and no digest covers it."""
    if has_manifest(path) and storage_root(root).resolve() in path.resolve().parents:
        with contextlib.suppress(OSError):  # a disk that cannot be written to
            fs.touch(path / HIDDEN)


def _how_to_get(folder: Path, source: str, name: str) -> str:
    parts = sorted(path.name for path in folder.parent.glob("*@*") if path.name.startswith(f"{folder.name}@"))
    if parts:
        inside = name.rpartition("/")[0]
        return "parts of it are: " + ", ".join(
            f"{source}:{inside}/{part}" if inside else f"{source}:{part}" for part in parts
        )
    return f"fetch it with: rbtool download {source} {name.partition('@')[0]}"


def stored_datasets(root: Path) -> Iterator[tuple[Path, Manifest | Exception]]:
    """Yield every dataset below the root with its manifest, or with what is wrong with it."""
    for folder, names, _ in os.walk(root):
        here = Path(folder)
        names[:] = sorted(name for name in names if not name.startswith("."))
        if has_manifest(here):
            names.clear()
            try:
                yield here, Manifest.load(here)
            except (ValueError, OSError) as error:
                yield here, error
