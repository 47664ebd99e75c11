"""Addresses of datasets on a Hugging Face hub, `hf://OWNER/NAME@REVISION`, and the record of transfers."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import RbtoolError, UsageError
from ..format import fs
from ..format.documents import decode, dump_json, parse_json
from ..format.files import read_regular
from ..format.locate import HUB
from ..format.manifest import TRANSFERS, Request

_SCHEME = f"{HUB}://"
_PAGE = re.compile(r"https?://[^/]+/datasets/([^/?#]+/[^/?#]+)")
_LONGEST = 96
_PART = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
_REVISION = re.compile(r"[\w][\w./+-]*", re.ASCII)
_EXPECTED = "expected hf://OWNER/NAME"
_MOST_BYTES = 1 << 20


class HubAddress(NamedTuple):
    """A dataset repository and its revision: a branch, a tag or a commit; None for the newest commit of `main`."""

    repository: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str, revision: str | None = None) -> HubAddress:
        """Parse `hf://OWNER/NAME[@REVISION]`, or the same with `hf:`; UsageError for anything else.

        `revision` is a revision that is given separately.
        """
        name, at, named = text.removeprefix(_SCHEME).removeprefix(f"{HUB}:").partition("@")
        parts = name.split("/")
        if parts[0] == "datasets" and len(parts) == 3:
            raise UsageError(f"{text} is not the address of a dataset", hint=f"write {_SCHEME}{'/'.join(parts[1:])}")
        if page := _PAGE.match(text):
            raise UsageError(f"{text} is the address of a page", hint=f"write {_SCHEME}{page[1]}")
        if len(parts) != 2 or not all(map(_is_name, parts)) or len(name) > _LONGEST:
            raise UsageError(f"{text} is not the address of a dataset on the hub: {_EXPECTED}")
        if at and revision is not None and revision != named:
            raise UsageError(f"{text} and --revision {revision} name two revisions", hint="leave one out")
        chosen = named if at else revision
        if chosen is not None and not _is_revision(chosen):
            raise UsageError(f"{chosen!r} is not a revision, expected a branch, a tag or a commit")
        return cls(name, chosen)

    @property
    def request(self) -> Request:
        """The request, which determines the place below the storage root."""
        return Request(HUB, f"{HUB}:{self.repository}", self.repository, self.revision, origin="remote")

    def at(self, commit: str) -> str:
        """The address of the repository at one commit."""
        return f"{_SCHEME}{self.repository}@{commit}"

    def __str__(self) -> str:
        return f"{_SCHEME}{self.repository}" + (f"@{self.revision}" if self.revision else "")


def _is_name(part: str) -> bool:
    return bool(_PART.fullmatch(part)) and not {"--", ".."} & {part[n : n + 2] for n in range(len(part))}


def _is_revision(text: str) -> bool:
    return bool(_REVISION.fullmatch(text)) and ".." not in text and not text.endswith(("/", "."))


@dataclass(frozen=True, slots=True)
class Transfer:
    """An upload of a dataset to a hub, or a download from it: the address, the commit and the time (UTC)."""

    verb: Literal["upload", "download"]
    address: str
    revision: str | None
    commit: str
    hub: str
    content_digest: str
    time: str

    @property
    def what(self) -> tuple[str | None, ...]:
        """All fields except the time."""
        return self.verb, self.address, self.revision, self.commit, self.hub, self.content_digest


def transfers_of(folder: Path) -> list[Transfer]:
    """Read the record of transfers of the dataset in `folder`, oldest first, without damaged lines."""
    found, path = list[Transfer](), folder / TRANSFERS
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            for line in read_regular(path).splitlines():
                with contextlib.suppress(RbtoolError):
                    found.append(decode(Transfer, parse_json(line, str(path)), str(path)))
    return found


def add_transfer(folder: Path, transfer: Transfer) -> None:
    """Record a transfer; OSError if the folder cannot be written to."""
    path, line = folder / TRANSFERS, f"{dump_json(asdict(transfer))}\n".encode()
    descriptor = fs.open_to_append(path)
    try:
        size = os.fstat(descriptor).st_size
        cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        fs.write(descriptor, memoryview(b"\n" + line if cut else line), path)
        fs.fsync(descriptor, path)
    finally:
        os.close(descriptor)
