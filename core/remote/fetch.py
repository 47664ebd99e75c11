"""Fetches files into a folder: resumed after an interruption, verified before they get their name, with mirrors.

A file under its own name is complete, and has matched its checksum, or its size if the remote gives no checksum. An
incomplete file is next to it as `<name>.part`, with the first bytes of the file; after any crash the next fetch
continues from there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from ..errors import CorruptDataError, FormatError, NetworkError, OutOfSpaceError, RbtoolError
from ..format import fs
from ..format.contracts import Closing
from ..format.converter import Advance, Note, RemoteFile
from ..format.documents import Count, decode, dump_json, parse_json
from ..format.files import open_regular, reading_from
from ..format.manifest import is_inside
from .threads import Job, Watch, ignore, run_together
from .transport import Answer, Transient, Transport, blocks_of, hasher, matches, retrying

RECORD = ".json"
"""Suffix, after the name of a part without a checksum, of the file that records where the part comes from."""

_WRITTEN_AT_ONCE = 256 << 10
_RECORDED_AT_ONCE = 64 << 20
_RECORD_BYTES = 64 << 10


class PartialFile(Closing, ABC):
    """The part of a file, to which bytes are appended while they are hashed.

    `within` is the descriptor of the parent folder. Opening hashes the bytes that an earlier run left. `watch.progress`
    is called with the number of bytes added to the part, negative if bytes are discarded; `watch.check` between blocks.
    """

    size: int | None
    """Bytes of the whole file, None if unknown."""

    def __init__(self, path: Path, within: int, watch: Watch) -> None:
        self._path = path
        self._within = within
        self._watch = watch
        self._buffer = bytearray()
        self._written = 0
        self._hasher = self._new_hasher()
        self._descriptor = fs.open_to_append(path, within=within)
        try:
            self._take_over(os.fstat(self._descriptor).st_size)
        except BaseException:
            os.close(self._descriptor)
            raise

    @abstractmethod
    def _new_hasher(self) -> Any:
        """Return the hasher of an empty part."""

    @abstractmethod
    def _take_over(self, size: int) -> None:
        """Keep the usable ones of the `size` bytes that an earlier run left."""

    def _hash_written(self, count: Callable[[int], None]) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        with os.fdopen(self._descriptor, "rb", buffering=0, closefd=False) as written, reading_from(self._path):
            for block in blocks_of(written):
                self._watch.check()
                self._hasher.update(block)
                count(len(block))

    @property
    def received(self) -> int:
        """The number of bytes of the file that have arrived, written or buffered."""
        return self._written + len(self._buffer)

    @property
    def can_resume(self) -> bool:
        """Whether a later request can continue after the bytes that have arrived."""
        return True

    def append(self, block: bytes | memoryview) -> None:
        """Add the next bytes; they are written when there are enough of them."""
        self._buffer += block
        if len(self._buffer) >= _WRITTEN_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write the buffered bytes."""
        data, self._buffer = self._buffer, bytearray()  # before the write: after a failure nothing may be written
        if data:
            fs.write(self._descriptor, memoryview(data), self._path)
            self._hasher.update(data)
            self._count(len(data))

    def restart(self) -> None:
        """Discard all bytes."""
        self._buffer.clear()
        fs.truncate(self._descriptor, 0, self._path)
        self._hasher = self._new_hasher()
        self._count(-self._written)

    def sync(self) -> None:
        """Wait until all bytes are on the disk."""
        fs.fsync(self._descriptor, self._path)

    def publish(self, target: Path) -> None:
        """Rename the part to the file's name."""
        fs.rename(self._path, target, within=self._within)

    def discard(self) -> None:
        """Remove the part."""
        self._buffer.clear()
        fs.remove(self._path, within=self._within)
        self._count(-self._written)

    def close(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1  # it is invalid even if closing it fails
            fs.close(descriptor, self._path)

    def _count(self, more: int) -> None:
        self._written += more
        if more:
            self._watch.progress(more)


class VerifiedPart(PartialFile):
    """The part of a file whose size and checksum the remote gives."""

    size: int

    def __init__(self, file: RemoteFile, path: Path, within: int, watch: Watch) -> None:
        self.size, self._checksum = file.known_size, file.checksum or ""
        super().__init__(path, within, watch)

    def _new_hasher(self) -> Any:
        return hasher(self._checksum, self.size)

    def _take_over(self, size: int) -> None:
        if size > self.size:
            fs.truncate(self._descriptor, 0, self._path)
            return
        self._hash_written(self._count)
        if size and self.whole and not self.matches():
            self.restart()

    @property
    def whole(self) -> bool:
        """Whether as many bytes have arrived as the file has."""
        return self.received == self.size

    @property
    def found(self) -> str:
        """The checksum of the written bytes."""
        checksum: str = self._hasher.found
        return checksum

    def matches(self) -> bool:
        """Return whether the written bytes are the whole file."""
        return bool(self._hasher.matches())


@dataclass(frozen=True, slots=True)
class _Record:
    """The origin of a part: its first `bytes` bytes have the digest `sha256` and come from `version` at `address`."""

    address: str
    version: str
    size: Count | None
    bytes: Count
    sha256: str


class VersionedPart(PartialFile):
    """The part of a file without a checksum, in one version of the file.

    `version` is the validator of these bytes at `address`, None if unknown. `<name>.part.json` records both and the
    digest of the bytes, so that parts of two versions are never joined, and bytes damaged by a crash are discarded.
    """

    def __init__(self, path: Path, within: int, watch: Watch) -> None:
        self._forget_version()
        self._record = path.with_name(path.name + RECORD)
        super().__init__(path, within, watch)

    def _forget_version(self) -> None:
        self.address = ""
        self.version: str | None = None
        self.size: int | None = None
        self._recorded = 0

    def _new_hasher(self) -> Any:
        return hashlib.sha256()

    def _take_over(self, size: int) -> None:
        """Keep the recorded bytes of an earlier run, if they match their digest."""
        record = self._read_record()
        if record is None or size < record.bytes:
            fs.truncate(self._descriptor, 0, self._path)
            return
        fs.truncate(self._descriptor, record.bytes, self._path)
        self._hash_written(self._count)
        if self._hasher.hexdigest() != record.sha256:
            self.restart()
            return
        self.address, self.version, self.size = record.address, record.version, record.size
        self._recorded = record.bytes

    def _read_record(self) -> _Record | None:
        try:
            with os.fdopen(open_regular(self._record, within=self._within), "rb") as file:
                return decode(_Record, parse_json(file.read(_RECORD_BYTES), self._record.name), self._record.name)
        except (OSError, FormatError):
            return None

    @property
    def can_resume(self) -> bool:
        return self.version is not None

    @property
    def resumed_at(self) -> int:
        """The byte to request next; the last one again if all have arrived, since a range cannot be empty."""
        return self.received if self.size is None else min(self.received, max(0, self.size - 1))

    def version_at(self, address: str) -> str | None:
        """Return the validator to resume the part from an address; None if it has to start again there."""
        return self.version if self.received and self.address == address else None

    def begin(self, address: str, answer: Answer) -> None:
        """Start the file again, in the version of the answer."""
        if self.received:
            self.restart()
        self.address, self.version, self.size = address, answer.version, answer.size

    def flush(self) -> None:
        """Write the buffered bytes, and the record from time to time."""
        super().flush()
        if self.version and self._written - self._recorded >= _RECORDED_AT_ONCE:
            self.record()

    def record(self) -> None:
        """Sync the bytes and record their number; the next run resumes there."""
        if self.version is None or self._written == self._recorded:
            return
        self.sync()
        record = _Record(self.address, self.version, self.size, self._written, self._hasher.hexdigest())
        descriptor = fs.open_to_append(self._record, within=self._within)
        try:
            fs.truncate(descriptor, 0, self._record)
            fs.write(descriptor, memoryview(dump_json(asdict(record)).encode()), self._record)
            fs.fsync(descriptor, self._record)
        finally:
            fs.close(descriptor, self._record)
        self._recorded = self._written

    def restart(self) -> None:
        """Discard all bytes and the record."""
        super().restart()
        fs.remove(self._record, within=self._within)
        self._forget_version()

    def read_again(self, name: str) -> None:
        """Compare the bytes on the disk with those received; CorruptDataError, with nothing kept, if they differ."""
        self.sync()
        with contextlib.suppress(AttributeError, OSError):  # if it is not supported, the page cache may be read
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        received, self._hasher = self._hasher.digest(), self._new_hasher()
        self._hash_written(lambda size: None)
        if self._hasher.digest() != received or os.fstat(self._descriptor).st_size != self._written:
            self.discard()
            raise CorruptDataError(
                f"{name} does not read back from the disk as it was received; nothing of it was kept",
                hint="check the disk below the storage root",
            )

    def publish(self, target: Path) -> None:
        """Rename the part to the file's name and remove its record."""
        super().publish(target)
        fs.remove(self._record, within=self._within)
        self._recorded, self.version = self._written, None

    def discard(self) -> None:
        """Remove the part and its record."""
        self.version = None
        super().discard()
        fs.remove(self._record, within=self._within)

    def close(self) -> None:
        if self._descriptor < 0:
            return
        try:
            if not self._watch.abandoned():
                self.record()
        finally:
            super().close()


_Part = TypeVar("_Part", bound=PartialFile)
_PART = ".part"
_FAIR_BYTES = 1 << 20  # an interruption after this many bytes, or 1/64 of the file, does not count as a failed attempt
_FAIR_PARTS = 64


class _Different(Exception):
    """The bytes do not match the announced checksum."""


def fetch_files(
    files: Sequence[RemoteFile],
    folder: Path,
    transport: Transport,
    *,
    progress: Advance | None = None,
    note: Note | None = None,
    workers: int = 4,
) -> None:
    """Fetch files into `folder`, each to its path, and verify them; several at a time.

    An existing file with the right bytes is not fetched; one with other bytes is removed and fetched. An interrupted
    transfer is resumed, and counts as a failed attempt only if hardly any bytes arrived. Bytes that do not match the
    checksum are discarded and fetched once more, from each address in turn.

    A file without a checksum must have the listed size, or else the size in the answer, and is read back from the disk
    once. It is resumed only if the remote confirms that it still has the same version. An existing one is kept if it
    has the listed size, and fetched again if no size is listed.

    Args:
        files: the files, with sizes and checksums as far as they are known.
        folder: where they go.
        transport: reads them.
        progress: called with the number of additional bytes, existing files included; negative if bytes turn out to be
            wrong. In the end the sum is the size of all files.
        note: called with a sentence about each failure that is retried. Both are called in the calling thread.
        workers: how many files are fetched at a time.

    Raises:
        FormatError: the list of files is contradictory; nothing was done.
        CorruptDataError: bytes never match.
        OutOfSpaceError: the disk is full.
        NetworkError, AuthorisationError, DatasetNotFoundError: the error of the first address of a file. Parts are
            kept, to be resumed.
    """
    watch = Watch(progress or ignore, note or ignore)
    run_together(fetching(files, folder, transport), watch, workers=workers, interrupt=transport.interrupt)


def fetching(files: Sequence[RemoteFile], folder: Path, transport: Transport) -> list[Job]:
    """Return a job for each file, as `fetch_files` runs them, to run them together with other jobs."""
    parts = _parts(files, folder)
    return [
        functools.partial(_fetch_file, file, folder, part, transport) for file, part in zip(files, parts, strict=True)
    ]


def _parts(files: Sequence[RemoteFile], folder: Path) -> list[Path]:
    """Check the list of files, and return the path of the part of each file."""
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
        while part in names or part + RECORD in names:  # the dataset has a file with the name of the part
            part += _PART
        parts.append(folder / part)
    return parts


def _folders_of(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _fetch_file(file: RemoteFile, folder: Path, part_path: Path, transport: Transport, watch: Watch) -> None:
    """Fetch one file from the first address that has it; UsageError for a link on the way to its folder."""
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
    """Fetch a file without a checksum to `target`, and verify it by its size and by reading it back.

    A part is resumed only if the remote confirms, with a strong validator, that it still serves the same bytes.
    CorruptDataError if the disk returns other bytes than those received.
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
    """Return whether the file exists with the right bytes; remove one with other bytes."""
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
    """Return the failure of the first address, with the number of addresses that were tried."""
    first = failures[0]
    if len(failures) == 1:
        return first
    error = type(first)(
        f"{first.message}; {len(failures)} addresses were tried, and no other had it either", hint=first.hint
    )
    error.__cause__ = first
    return error


class _FileFetch(ABC, Generic[_Part]):
    """Fetches the missing bytes of one file, from one address at a time."""

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
        """Make one request and add the bytes of its answer to the part."""

    @property
    def host(self) -> str:
        return urlsplit(self.address).hostname or "its source"

    def too_short(self, size: int) -> Transient:
        """Return the failure for an answer that ends before the file does."""
        ended = f"it ended after {self.part.received:,} of {size:,} bytes"
        return Transient(NetworkError(f"{self.file.path} could not be fetched from {self.host}: {ended}"))

    def _read_until_complete(self) -> None:
        while not self.is_complete:
            retrying(self._attempt, note=self.watch.note, sleep=self.watch.sleep)

    def _attempt(self) -> None:
        """Make one request; a failure after a good part of the file is reported and does not count as an attempt."""
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
                raise  # `retrying` waits as long as the server asks


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
        """Resume the version of the part, or start again with the current version of the remote."""
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
        """Return whether an answer certainly continues the bytes of the part."""
        return answer.version == version and answer.size == self.part.size and answer.start <= self.part.received

    def _receive(self, answer: Answer, skip: int) -> None:
        """Append the bytes of an answer after its first `skip`; also after an error, received bytes are written."""
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
