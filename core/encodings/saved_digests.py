"""Digests of the files of a saved buffer or storage, in a hidden file that TorchRL ignores.

For a folder inside it that has digests or a manifest of its own, only that file is recorded; and for a file with
digests in its header, such as an H5 checkpoint, only the header. All files are covered in this way, and no large file
is read twice.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CorruptDataError, FormatError
from ..format import fs
from ..format.documents import Count, decode, dump_json, load_json, newer_version
from ..format.files import Hasher, digest_bytes, open_regular
from ..format.manifest import HIDDEN, MANIFEST, has_manifest, is_inside
from ..format.staging import is_ours
from ..format.syncing import write_file
from .h5 import data_start

DIGESTS = f"{HIDDEN}/digests.json"
_VERSION = 1
_CHUNK = 1 << 20
_HINT = "if TorchRL overwrote this checkpoint, remove the folders .rbtool in it; otherwise save it again"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file of the folder: its path, its size, and the digest of its first `covered` bytes."""

    path: str
    size: Count
    covered: Count
    digest: str


@dataclass(frozen=True, slots=True)
class _DigestDocument:
    """The recorded digests of a folder."""

    files: tuple[_Entry, ...]


def write_digests(folder: Path, *, covered: Collection[str] = (), known: Mapping[str, str] | None = None) -> None:
    """Record the digest of every file in a folder that is not published yet.

    Args:
        folder: the folder.
        covered: paths of files that are not recorded, because their digests are in another file.
        known: digests by path, of files that need not be read.
    """
    known, paths = known or {}, sorted(path for path in _files(folder, "") if path not in covered)
    entries = [_entry(folder, path, known.get(path)) for path in paths]
    document: dict[str, Any] = {"format_version": _VERSION, "files": entries}
    document["digest"] = digest_bytes(dump_json(document).encode())
    fs.make_folder(folder / HIDDEN)
    write_file(folder / DIGESTS, dump_json(document).encode())


def require_digests(folder: Path) -> frozenset[str] | None:
    """Compare the files of a folder with their digests and return their paths; None if no digests were recorded.

    Raises:
        CorruptDataError: a file is missing, truncated or changed, or belongs to another checkpoint.
    """
    path = folder / DIGESTS
    if not path.is_file():
        return None
    entries = _read(path)
    for entry in entries:
        file = folder / entry.path
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            raise CorruptDataError(f"{file} is missing, but belongs to the checkpoint {folder}", hint=_HINT)
        if size != entry.size:
            raise CorruptDataError(f"{file} has {size:,} bytes, but {entry.size:,} were saved", hint=_HINT)
        if _digest(file, entry.covered) != entry.digest:
            raise CorruptDataError(
                f"{file} does not hold the bytes that were saved: it was changed, or belongs to another checkpoint",
                hint=_HINT,
            )
    return frozenset(entry.path for entry in entries)


def noted_files(folder: Path) -> frozenset[str]:
    """Return the paths of the files with recorded digests, without comparing them; empty if there are none."""
    path = folder / DIGESTS
    try:
        return frozenset(entry.path for entry in _read(path)) if path.is_file() else frozenset()
    except FormatError:  # damaged, or written by a newer version
        return frozenset()


def _read(path: Path) -> tuple[_Entry, ...]:
    try:
        document = load_json(path)
        version = document.get("format_version") if isinstance(document, dict) else None
        if type(version) is int and version > _VERSION:
            raise newer_version(str(path), version, _VERSION, "format version")
        own = document.pop("digest", None) if isinstance(document, dict) else None
        if own != digest_bytes(dump_json(document).encode()):
            raise CorruptDataError(f"{path} was changed after it was written: its digest does not match", hint=_HINT)
        entries = decode(_DigestDocument, document, str(path)).files
    except CorruptDataError:
        raise
    except FormatError as error:
        raise CorruptDataError(f"{path} is damaged: {error}", hint=error.hint or _HINT) from error
    if not all(is_inside(entry.path) for entry in entries):
        raise CorruptDataError(f"{path} lists a file outside of its folder", hint=_HINT)
    return entries


def _files(folder: Path, prefix: str) -> Iterator[str]:
    """List the files whose digests are recorded, by path in the folder."""
    if prefix and (folder / DIGESTS).is_file():
        yield prefix + DIGESTS
    elif prefix and has_manifest(folder):
        yield prefix + MANIFEST
    else:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                yield from _files(folder / entry.name, f"{prefix}{entry.name}/")
            else:
                yield prefix + entry.name


def _entry(folder: Path, path: str, known: str | None) -> dict[str, Any]:
    file = folder / path
    size = file.stat().st_size
    covered = (data_start(file) or size) if is_ours(file) and path.endswith(".h5") else size
    return {"path": path, "size": size, "covered": covered, "digest": known or _digest(file, covered)}


def _digest(file: Path, count: int) -> str:
    """Return the digest of the first `count` bytes of a file."""
    hasher = Hasher()
    with os.fdopen(open_regular(file), "rb", buffering=0) as data:
        while count and (part := data.read(min(count, _CHUNK))):
            hasher.update(part)
            count -= len(part)
    return hasher.digest
