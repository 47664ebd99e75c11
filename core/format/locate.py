"""Names: where the root is, which folder an id means, and which ids are safe to use as a path."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from platformdirs import user_cache_path

from ..declarations import source_example
from ..errors import DatasetNotFoundError, UsageError, nearest
from . import fs
from .manifest import HIDDEN, Manifest, Request, has_manifest
from .staging import mend

__all__ = [
    "dataset_folder",
    "find_dataset",
    "known_root",
    "last_use",
    "require_apart",
    "safe_id",
    "storage_root",
    "stored_datasets",
]

_LONGEST_ID = 200  # with room for what is added to make a file name of it
_ODD = re.compile("[\0\ud800-\udfff]")
_NAMED = re.compile(r"(?P<source>[a-z][a-z0-9_]*):(?P<id>[^:\\].*)")


def storage_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Folder that holds `<source>/<id>`: the argument, else `RBTOOL_HOME`, else the platform's cache folder.

    UsageError for a user without a home folder, and so without a cache folder.
    """
    try:
        return fs.expanded(root or os.environ.get("RBTOOL_HOME") or _cache_folder()).absolute()
    except UsageError as error:
        error.hint = "set RBTOOL_HOME, or name the folder: --root DIR"
        raise


def _cache_folder() -> Path:
    try:
        return user_cache_path("rbtool", appauthor=False)
    except RuntimeError:  # no home folder: older versions of platformdirs leave the ~ in it
        return Path("~/.cache/rbtool")


def known_root(root: str | os.PathLike[str] | None = None) -> Path | None:
    """The storage root for those who can do without: None for a user without a home folder."""
    try:
        return storage_root(root)
    except UsageError:
        return None


def safe_id(name: str) -> str:
    """Return a dataset id that cannot leave its folder, or raise UsageError."""
    parts = name.split("/")
    if not name or name.startswith(("/", "~")) or "\\" in name or _ODD.search(name) or re.match("[A-Za-z]:", name):
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
    """Refuse a destination that is the source, is inside it or contains it: what is read is never edited."""
    one, other = source.resolve(), destination.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise UsageError(
            f"the destination {destination} and the source {source} overlap",
            hint="choose a destination outside the source",
        )


def find_dataset(name: str | os.PathLike[str], root: str | os.PathLike[str] | None = None) -> Path:
    """Turn what a user types, an existing path or `source:id`, into a path; raise DatasetNotFoundError.

    This counts as a use of a dataset that is stored below the root.
    """
    path = fs.expanded(name)
    mend(path)
    if path.exists():
        _mark_use(path, root)
        return path
    named = _NAMED.fullmatch(os.fspath(name))
    if named is None:
        hint = (
            _stored_like(os.fspath(name), known_root(root))
            or f"name an existing path, or a dataset like {source_example()}:ID"
        )
        raise DatasetNotFoundError(f"there is nothing at {path}", hint=hint)
    folder = storage_root(root) / named["source"] / safe_id(named["id"])
    mend(folder)
    if not has_manifest(folder):
        hint = _parts_of(folder, named["source"], named["id"]) or _how_to_get(named[0], storage_root(root))
        raise DatasetNotFoundError(f"{name} is not in {storage_root(root)}", hint=hint)
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
    store = known_root(root)
    if store is not None and has_manifest(path) and store.resolve() in path.resolve().parents:
        with contextlib.suppress(OSError):  # a disk that cannot be written to
            fs.touch(path / HIDDEN)


def _parts_of(folder: Path, source: str, name: str) -> str:
    """Name the datasets of chosen episodes, or in another layout, that are stored of one that is not."""
    parts = sorted(path.name for path in folder.parent.glob("*@*") if path.name.startswith(f"{folder.name}@"))
    inside = f"{source}:{name.rpartition('/')[0]}/" if "/" in name else f"{source}:"
    return "parts of it are: " + ", ".join(f"{inside}{part}" for part in parts) if parts else ""


def _how_to_get(name: str, root: Path) -> str:
    from .registry import source_names  # which needs the sources, and they this module

    known, (source, _, id) = source_names(), name.partition(":")
    if source not in known:
        return f"there is no source {source!r} here; known are {', '.join(known)}"
    return _stored_like(name, root) or f"fetch it with: rbtool download {source} {shlex.quote(id.partition('@')[0])}"


def _stored_like(name: str, root: Path | None) -> str:
    """Offer the stored dataset whose name ends like `name`, or is another version of it; "" where there is none.

    Names that only look alike are offered where no source is named, and paths never.
    """
    if root is None or name.startswith((".", "/", "~")):
        return ""
    stored = sorted(folder.relative_to(root).as_posix() for folder in _dataset_folders(root))
    words = name.replace(":", "/", 1).strip("/")
    near = [one for one in stored if f"/{one}".endswith(f"/{words}")]
    near = near or [one for one in stored if f"/{_family(one)}".endswith(f"/{_family(words)}")]
    if not near and ":" not in name:
        near = [one for one in stored if one.partition("/")[2] == _near_id(words, stored)]
    return f"did you mean {near[0].replace('/', ':', 1)}, which is stored?" if near and "/" in near[0] else ""


def _family(name: str) -> str:
    return re.sub(r"-v\d+$", "", name)


def _near_id(words: str, stored: Iterable[str]) -> str:
    """Find the nearest id; the source, which many have in common, makes none alike."""
    sources = {one.partition("/")[0] for one in stored}
    source, _, rest = words.partition("/")
    return nearest(rest if source in sources and rest else words, [one.partition("/")[2] for one in stored])


def _dataset_folders(root: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(root):
        here = Path(folder)
        names[:] = sorted(name for name in names if not name.startswith("."))
        if has_manifest(here):
            names.clear()
            yield here


def stored_datasets(root: Path) -> Iterator[tuple[Path, Manifest | Exception]]:
    """Yield every dataset below the root with its manifest, or with what is wrong with it."""
    for here in _dataset_folders(root):
        try:
            yield here, Manifest.load(here)
        except (ValueError, OSError) as error:
            yield here, error
