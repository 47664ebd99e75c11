"""What verbs do around their work, so that a destination is the old one or the new one, and nothing is made twice.

existing    a swap that was cut in half is finished; an equal result at the destination is the answer
refuse      anything else there stays, unless it may be replaced
space       there has to be as much as the result needs
dry run     ends here, with a plan
build       in a hidden folder next to the destination; after an error it goes, or is kept to resume from
publish     in one step; if another process was faster, its result is the answer, if it is an equal one
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ..errors import UsageError
from . import fs
from .digest import open_regular
from .manifest import Manifest
from .staging import Staging, mend

Content = TypeVar("Content")
_SMALL_FILES = 64 << 10  # what metadata and block sizes take, roughly


class Outcome(NamedTuple, Generic[Content]):
    """What is at the destination, or would be, and the entries of a verb's result that it does not state itself."""

    content: Content
    entries: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


@dataclass(frozen=True, kw_only=True)
class Publication(Generic[Content]):
    """One result on its way to the destination of `staging`.

    `find` returns an equal result that is there and None for anything else, or raises UsageError where it can say what
    is there instead. `needed` returns the bytes that the result takes, None where they are not known. `name` is the
    file or folder inside the staging folder that is published, by default all of it.
    """

    staging: Staging
    find: Callable[[], Content | None] = lambda: None
    needed: Callable[[], int | None] = lambda: None
    dry_run: bool = False
    name: str | None = None

    def run(
        self, plan: Callable[[], Outcome[Content]], build: Callable[[Staging], Outcome[Content]]
    ) -> Outcome[Content]:
        """Return the existing result, the plan of a dry run, or what is built and published.

        Raises UsageError if something else is at the destination, OutOfSpaceError, and what the callables raise. The
        destination is unchanged after an error.
        """
        return self.prepare(plan) or self.publish(build)

    def prepare(self, plan: Callable[[], Outcome[Content]]) -> Outcome[Content] | None:
        """Do all that precedes building; return the result if nothing is to be built."""
        if (there := self.existing()) is not None:
            return there
        self.staging.refuse_if_taken()
        if (needed := self.needed()) is not None:
            fs.require_space(self.staging.destination.parent, needed + _SMALL_FILES)
        if not self.dry_run:
            return None
        planned = plan()
        return Outcome(planned.content, {**planned.entries, "dry_run": True})

    def existing(self) -> Outcome[Content] | None:
        """Return an equal result at the destination; None without one, and where the destination is to be replaced."""
        mend(self.staging.destination)
        there = None if self.staging.replace else self.find()
        return None if there is None else Outcome(there, {"already_there": True, "dry_run": self.dry_run})

    def publish(
        self,
        build: Callable[[Staging], Outcome[Content]],
        keeping: Callable[[Staging], AbstractContextManager[None]] | None = None,
    ) -> Outcome[Content]:
        """Build and publish; return what another process has published meanwhile, if that is the same.

        `keeping` surrounds both: it decides what becomes of the staging folder after an error.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self.staging)
            except UsageError:
                if (there := self.existing()) is None:
                    raise
                return there
            if keeping is not None:
                stack.enter_context(keeping(self.staging))
            made = build(self.staging)
            if self.staging.publish(self.name):
                return made
        there = self.existing()
        if there is None or _digest(there.content) != _digest(made.content):
            raise UsageError(
                f"{self.staging.destination} was just created by another process", hint="add --force to replace it"
            )
        return there


def _digest(content: Any) -> str | None:
    return content.content_digest if isinstance(content, Manifest) else None


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
