"""Bringing files to a folder: resumed after a cut, verified before they get their name, from mirrors in order.

A file that bears its own name is whole and matched its checksum once, or its size where the remote gives no checksum.
What is not yet whole is next to it as `<name>.part` and holds the first bytes of the file; after any crash,
the next fetch continues from there.
"""

from __future__ import annotations

import functools
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from ..errors import CorruptDataError, FormatError, NetworkError, OutOfSpaceError, RbtoolError
from ..format import fs
from ..format.manifest import is_inside
from ..format.sources import Advance, Note, RemoteFile
from .checksums import hasher, matches
from .partial import RECORD, PartialFile, VerifiedPart, VersionedPart
from .threads import Watch, ignore, run_together
from .transport import Answer, Transient, Transport, retrying

_Part = TypeVar("_Part", bound=PartialFile)
_PART = ".part"
_FAIR_BYTES = 1 << 20  # a cut after so many bytes, or this part of the file, was bad luck and not a bad server
_FAIR_PARTS = 64


class _Different(Exception):
    """The bytes are not those that were announced."""


def fetch_files(
    files: Sequence[RemoteFile],
    folder: Path,
    transport: Transport,
    *,
    progress: Advance | None = None,
    note: Note | None = None,
    workers: int = 4,
) -> None:
    """Bring files to `folder`, each below its path, verified; several at a time.

    A file that is there with the right bytes is not fetched; one with other bytes is removed and fetched. A cut is
    resumed, and counts as a failed attempt only if it brought nothing. Bytes that do not match are thrown away and
    fetched once more from each address in turn.

    A file without a checksum must have the size that is listed, or else that of the answer, and is read again from the
    disk. It is resumed only in the same version, by the remote's own word. One that is there is taken as it is if it
    has the size that is listed, and fetched again if none is.

    `progress` receives how many more bytes are there and may be right, also those that were there before; negative
    when some turn out to be wrong. At the end the sum is the size of all files. `note` receives what went wrong and is
    tried again. Both are called in the calling thread.

    Raises what the first failure was: FormatError before anything is done for files that make no sense together,
    CorruptDataError for bytes that never match, OutOfSpaceError, or the NetworkError, AuthorisationError or
    DatasetNotFoundError of the file's first address. Parts stay, to be resumed.
    """
    parts = _parts(files, folder)
    jobs = [
        functools.partial(_fetch_file, file, folder, part, transport) for file, part in zip(files, parts, strict=True)
    ]
    watch = Watch(progress or ignore, note or ignore)
    run_together(jobs, watch, workers=workers, interrupt=transport.interrupt)


def _parts(files: Sequence[RemoteFile], folder: Path) -> list[Path]:
    """Check what the remote states about its files and choose the name of each one's part."""
    names = {file.path for file in files}
    if len(names) < len(files):
        raise FormatError("the remote lists a file twice")
    parts = []
    for file in files:
        if not is_inside(file.path):
            raise FormatError(f"the remote lists {file.path!r}, a path that leads out of the folder")
        if not file.addresses or (file.size is not None and file.size < 0):
            raise FormatError(f"the remote lists {file.path!r} with {file.size} bytes at {len(file.addresses)} places")
        if not names.isdisjoint(_folders_of(file.path)):
            raise FormatError(f"the remote lists a file in the way of {file.path!r}")
        if file.checksum is not None:
            hasher(file.checksum, file.known_size)
        part = file.path + _PART
        while part in names or part + RECORD in names:  # the dataset has a file of that very name
            part += _PART
        parts.append(folder / part)
    return parts


def _folders_of(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _fetch_file(file: RemoteFile, folder: Path, part_path: Path, transport: Transport, watch: Watch) -> None:
    """Bring one file to its place, from the first address that has it; into no folder that a link leads to."""
    target = folder / file.path
    with fs.folder_below(folder, target.parent, make=True) as within:
        if _is_there(file, target, within, watch):
            watch.progress(file.known_size)
        elif file.checksum is None:
            _fetch_unverified(file, target, part_path, within, transport, watch)
        else:
            _fetch_verified(file, target, part_path, within, transport, watch)


def _fetch_verified(
    file: RemoteFile, target: Path, part_path: Path, within: int, transport: Transport, watch: Watch
) -> None:
    with VerifiedPart(file, part_path, within, watch) as part:
        failures = _failed_addresses(_VerifiedFetch(file, part, transport, watch))
        if failures:
            if not part.received or isinstance(failures[0], CorruptDataError):
                part.discard()
            raise _first_of(failures)
        part.sync()
        watch.check()
        part.publish(target)


def _fetch_unverified(
    file: RemoteFile, target: Path, part_path: Path, within: int, transport: Transport, watch: Watch
) -> None:
    """Bring a file without a checksum to `target`: sizes, versions and a second reading decide.

    A part is resumed only if the remote confirms, with a strong validator, that it still serves the same bytes.
    CorruptDataError if the disk gives back other bytes than those received.
    """
    with VersionedPart(part_path, within, watch) as part:
        failures = _failed_addresses(_UnverifiedFetch(file, part, transport, watch))
        if failures:
            if not part.version or not part.received:
                part.discard()
            raise _first_of(failures)
        part.read_again(file.path)
        watch.check()
        part.publish(target)


def _failed_addresses(fetch: _FileFetch[Any]) -> list[RbtoolError]:
    """Complete a part from the first address that has the file; return the failures of all if none has it."""
    failures: list[RbtoolError] = []
    for address in fetch.file.addresses:
        try:
            fetch.run(address)
            return []
        except OutOfSpaceError:
            raise
        except RbtoolError as error:
            failures.append(error)
    fetch.watch.check()
    return failures


def _is_there(file: RemoteFile, target: Path, within: int, watch: Watch) -> bool:
    """Return whether the file is there and right; one that is wrong is removed."""
    try:
        kind = os.stat(target.name, dir_fd=within, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(kind):
        raise FormatError(f"{target} is a folder, the file {file.path} belongs there")
    if _is_as_listed(file, target, within):
        return True
    watch.check()
    watch.note(f"{file.path} was there, but not as its source has it; it is fetched again")
    fs.remove(target, within=within)
    return False


def _is_as_listed(file: RemoteFile, target: Path, within: int) -> bool:
    if file.size is None:
        return False
    if file.checksum is None:
        found = os.stat(target.name, dir_fd=within, follow_symlinks=False)
        return stat.S_ISREG(found.st_mode) and found.st_size == file.size
    return matches(target, file.size, file.checksum, within=within)


def _first_of(failures: Sequence[RbtoolError]) -> RbtoolError:
    """The failure of the first address, which names how many others were tried."""
    first = failures[0]
    if len(failures) == 1:
        return first
    error = type(first)(
        f"{first.message}; {len(failures)} addresses were tried, and no other had it either", hint=first.hint
    )
    error.__cause__ = first
    return error


class _FileFetch(ABC, Generic[_Part]):
    """Fetches what is missing of one file, from one address at a time."""

    def __init__(self, file: RemoteFile, part: _Part, transport: Transport, watch: Watch) -> None:
        self.file = file
        self.part = part
        self.transport = transport
        self.watch = watch
        self.address = ""

    @abstractmethod
    def run(self, address: str) -> None:
        """Complete the part."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether nothing is missing."""

    @abstractmethod
    def _read(self) -> None:
        """Make one request and add what it brings to the part."""

    @property
    def host(self) -> str:
        return urlsplit(self.address).hostname or "its source"

    def too_short(self, size: int) -> Transient:
        """Make the failure of an answer that ends before the file does."""
        ended = f"it ended after {self.part.received:,} of {size:,} bytes"
        return Transient(NetworkError(f"{self.file.path} could not be fetched from {self.host}: {ended}"))

    def _read_until_complete(self) -> None:
        while not self.is_complete:
            retrying(self._attempt, note=self.watch.note, sleep=self.watch.sleep)

    def _attempt(self) -> None:
        """Make one request; a failure after a fair part of the file is reported and does not count as an attempt."""
        self.watch.check()
        before = self.part.received
        try:
            self._read()
        except Transient as failure:
            if self.is_complete:
                return
            fair = _FAIR_BYTES if self.part.size is None else min(_FAIR_BYTES, self.part.size // _FAIR_PARTS)
            if not self.part.can_resume or self.part.received - before <= fair:
                raise
            self.watch.note(f"{failure}; resuming at byte {self.part.received:,}")
            if failure.retry_after is not None:
                raise  # the wait that the server asks for has priority


class _VerifiedFetch(_FileFetch[VerifiedPart]):
    """Fetches a file with a checksum."""

    @property
    def is_complete(self) -> bool:
        return self.part.whole

    def run(self, address: str) -> None:
        """Complete the part; a part that does not match is discarded and fetched from its start once."""
        self.address = address
        for remedy in ("it is fetched again from the start", ""):
            try:
                self._read_until_complete()
                if not self.part.matches():
                    raise _Different(f"{self.part.found} came")
                return
            except _Different as found:
                self.watch.check()
                self.part.restart()
                sentence = f"{self.file.path} is not what was announced: {self.file.checksum} was expected, {found}"
                if not remedy:
                    raise CorruptDataError(
                        f"{sentence} from {self.host}; nothing of it was kept",
                        hint="the file is damaged at its source or on the way: try again later",
                    ) from None
                self.watch.note(f"{sentence} from {self.host}; {remedy}")

    def _read(self) -> None:
        try:
            with self.transport.open(self.address, self.part.received) as (start, blocks):
                skip = self.part.received - start
                if skip < 0:
                    raise NetworkError(f"{self.host} sends another part of {self.file.path} than requested")
                for block in blocks:
                    self.watch.check()
                    fresh, skip = block[skip:], max(0, skip - len(block))
                    if self.part.received + len(fresh) > self.part.size:
                        raise _Different(f"more than its {self.part.size:,} bytes came")
                    self.part.append(fresh)
        finally:
            if not self.watch.abandoned():
                self.part.flush()
        if not self.part.whole:
            raise self.too_short(self.part.size)


class _UnverifiedFetch(_FileFetch[VersionedPart]):
    """Fetches a file without a checksum."""

    is_complete = False

    def run(self, address: str) -> None:
        """Complete the part."""
        self.address = address
        self._read_until_complete()

    def _read(self) -> None:
        """Resume the version that the part holds, or start again with the version that the remote has now."""
        version = self.part.version_at(self.address)
        if version is not None:
            with self.transport.open_version(self.address, self.part.resumed_at, version) as answer:
                if self._continues(answer, version):
                    self._receive(answer, skip=self.part.received - answer.start)
                    return
            self.watch.note(f"{self.file.path} changed at {self.host}: it is fetched again from the start")
        with self.transport.open_version(self.address, 0) as answer:
            self.part.begin(self.address, answer)
            if answer.start:
                raise NetworkError(f"{self.host} sends another part of {self.file.path} than requested")
            self._receive(answer, skip=0)

    def _continues(self, answer: Answer, version: str) -> bool:
        """Return whether an answer is certainly of the bytes that the part begins with."""
        return answer.version == version and answer.size == self.part.size and answer.start <= self.part.received

    def _receive(self, answer: Answer, skip: int) -> None:
        """Append the bytes of an answer after its first `skip`; whatever ends it, what came is written."""
        expected = answer.size if answer.size is not None else self.file.size
        self._require_size(answer)
        try:
            for block in answer.blocks:
                self.watch.check()
                fresh, skip = block[skip:], max(0, skip - len(block))
                self.part.append(fresh)
                if expected is not None and self.part.received > expected:
                    self.part.restart()
                    raise CorruptDataError(f"{self.file.path} from {self.host} has more than {expected:,} bytes")
        finally:
            if not self.watch.abandoned():
                self.part.flush()
        if expected is not None and self.part.received < expected:
            raise self.too_short(expected)
        self.is_complete = True

    def _require_size(self, answer: Answer) -> None:
        """Refuse a file of another size than was listed, and one whose end cannot be determined."""
        listed = self.file.size
        if listed is not None and answer.size is not None and answer.size != listed:
            raise CorruptDataError(
                f"{self.file.path} has {answer.size:,} bytes at {self.host}, {listed:,} were announced",
                hint="the file was replaced at its source, or is damaged there",
            )
        if listed is None and answer.size is None and not answer.ends:
            raise NetworkError(
                f"{self.host} does not give the size of {self.file.path}, which has no checksum either: whether it "
                "came whole cannot be determined"
            )
