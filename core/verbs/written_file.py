"""One file that a verb writes for people, such as a picture: published whole, and never over something else."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UsageError
from ..format.digest import open_regular
from ..format.staging import Staging

_BEGINNINGS: dict[str, tuple[bytes, ...]] = {
    ".html": (b"<!doctype html",),
    ".svg": (b"<?xml", b"<svg"),
    ".png": (b"\x89PNG\r\n",),
    ".pdf": (b"%PDF-",),
    ".gif": (b"GIF87a", b"GIF89a"),
    ".mp4": (b"ftyp",),
}
_LONGEST = 16
_SKIPPED = {".mp4": 4}  # bytes before the beginning that is compared


def require_suffix(path: Path, suffixes: tuple[str, ...]) -> str:
    """Return the suffix of a path in lower case; UsageError unless it is one of `suffixes`."""
    suffix = path.suffix.lower()
    if suffix not in suffixes:
        raise UsageError(f"{path} ends in {suffix or 'no suffix'}, expected {' or '.join(suffixes)}")
    return suffix


class FileStaging(Staging):
    """A staging folder whose publication can replace a file of the same kind, going by its suffix, and nothing else."""

    def refuse_if_taken(self) -> None:
        path = self.destination
        self._require_place()
        if path.is_dir():
            raise UsageError(f"{path} is a folder, and a file is to be written", hint="choose another destination")
        if not path.exists():
            return
        if not self.replace:
            raise UsageError(f"{path} already exists", hint="choose another destination, or add --force")
        if not _is_alike(path):
            raise UsageError(
                f"{path} already exists and is no {path.suffix.lower()[1:]} file; left unchanged",
                hint="choose another destination",
            )

    def publish_file(self, name: str) -> None:
        """Put the file `name` of the staging folder at the destination; UsageError if another one is there by now."""
        if not self.publish(name):
            raise UsageError(f"another process put something at {self.destination}", hint="add --force to replace it")


def _is_alike(path: Path) -> bool:
    """Whether the content of a file is that of its suffix; an empty file counts as well."""
    suffix = path.suffix.lower()
    with os.fdopen(open_regular(path), "rb") as file:
        begin = file.read(_LONGEST)
    return not begin or begin[_SKIPPED.get(suffix, 0) :].startswith(_BEGINNINGS.get(suffix, ()))
