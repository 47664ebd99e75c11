"""Fetching a file for which the remote gives no checksum: sizes, versions and a second reading decide.

A part is resumed only if the remote confirms, with a strong validator, that it still serves the same bytes. The file
`<name>.part.json` records where the part came from, and the digest of its bytes, so that no two versions are joined
and no bytes that a crash damaged are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import CorruptDataError, FormatError, NetworkError, OutOfSpaceError, RbtoolError
from ..format import Closing, Count, RemoteFile, decode, dump_json, fs, open_regular, parse_json
from .checksums import blocks_of
from .retries import Transient, retrying
from .threads import Watch
from .transport import Answer, Transport

__all__ = ["RECORD", "fetch_unverified"]

RECORD = ".json"
"""Suffix of the file that records where a part comes from, after the name of the part."""

_WRITTEN_AT_ONCE = 256 << 10
_RECORDED_AT_ONCE = 64 << 20
_RECORD_BYTES = 64 << 10
_FAIR_BYTES = 1 << 20  # as for files with a checksum
_FAIR_PARTS = 64


def fetch_unverified(
    file: RemoteFile, target: Path, part_path: Path, within: int, transport: Transport, watch: Watch
) -> list[RbtoolError]:
    """Bring a file without a checksum to `target`, from the first address that has it.

    Returns the failures of all addresses if none has it, an empty list otherwise. Raises CorruptDataError if the disk
    gives back other bytes than those received, and OutOfSpaceError.
    """
    failures: list[RbtoolError] = []
    with _Part(part_path, within, watch) as part:
        for address in file.addresses:
            try:
                _Fetch(file, address, part, transport, watch).run()
                break
            except OutOfSpaceError:
                raise
            except RbtoolError as error:
                failures.append(error)
        else:
            watch.check()
            if not part.version or not part.received:
                part.discard()
            return failures
        part.read_again(file.path)
        watch.check()
        part.publish(target)
    return []


@dataclass(frozen=True, slots=True)
class _Record:
    """What is known of a part: its first `bytes` bytes have the digest `sha256` and are of `version` at `address`."""

    address: str
    version: str
    size: Count | None
    bytes: Count
    sha256: str


class _Part(Closing):
    """The first bytes of one version of a file, in `<name>.part`.

    `version` is the validator of these bytes at `address` and `size` the size of the whole file, each None if unknown.
    """

    def __init__(self, path: Path, within: int, watch: Watch) -> None:
        self.address = ""
        self.version: str | None = None
        self.size: int | None = None
        self._path = path
        self._record = path.with_name(path.name + RECORD)
        self._within = within
        self._watch = watch
        self._buffer = bytearray()
        self._written = 0
        self._recorded = 0
        self._sha256 = hashlib.sha256()
        self._descriptor = fs.open_to_append(path, within=within)
        try:
            self._take_over()
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take_over(self) -> None:
        """Keep those bytes of an earlier run that are recorded, and no others."""
        record = self._read_record()
        if record is None or os.fstat(self._descriptor).st_size < record.bytes:
            fs.truncate(self._descriptor, 0, self._path)
            return
        fs.truncate(self._descriptor, record.bytes, self._path)
        self._hash_written(count=True)
        if self._sha256.hexdigest() != record.sha256:
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

    def _hash_written(self, *, count: bool) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        with os.fdopen(self._descriptor, "rb", buffering=0, closefd=False) as written:
            for block in blocks_of(written):
                self._watch.check()
                self._sha256.update(block)
                if count:
                    self._count(len(block))

    @property
    def received(self) -> int:
        """How many bytes there are, written or about to be."""
        return self._written + len(self._buffer)

    @property
    def resumed_at(self) -> int:
        """The byte to ask for next; the last one once more if all are there, for the answer has to have some."""
        return self.received if self.size is None else min(self.received, max(0, self.size - 1))

    def version_at(self, address: str) -> str | None:
        """The validator with which the part can be resumed from an address; None if it has to start again there."""
        return self.version if self.received and self.address == address else None

    def begin(self, address: str, answer: Answer) -> None:
        """Restart a file, in the version that the answer has."""
        if self.received:
            self.restart()
        self.address, self.version, self.size = address, answer.version, answer.size

    def append(self, block: bytes | memoryview) -> None:
        """Add the next bytes; they are written when there are enough of them."""
        self._buffer += block
        if len(self._buffer) >= _WRITTEN_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write what was added and is not yet written."""
        data, self._buffer = self._buffer, bytearray()
        if data:
            fs.write(self._descriptor, memoryview(data), self._path)
            self._sha256.update(data)
            self._count(len(data))
        if self.version and self._written - self._recorded >= _RECORDED_AT_ONCE:
            self.record()

    def record(self) -> None:
        """Record how many bytes there are, once they are on the disk; the next run resumes there."""
        if self.version is None or self._written == self._recorded:
            return
        fs.fsync(self._descriptor, self._path)
        record = _Record(self.address, self.version, self.size, self._written, self._sha256.hexdigest())
        descriptor = fs.open_to_append(self._record, within=self._within)
        try:
            fs.truncate(descriptor, 0, self._record)
            fs.write(descriptor, memoryview(dump_json(asdict(record)).encode()), self._record)
            fs.fsync(descriptor, self._record)
        finally:
            os.close(descriptor)
        self._recorded = self._written

    def restart(self) -> None:
        """Throw all bytes away."""
        self._buffer.clear()
        fs.truncate(self._descriptor, 0, self._path)
        fs.remove(self._record, within=self._within)
        self._sha256 = hashlib.sha256()
        self.address, self.version, self.size, self._recorded = "", None, None, 0
        self._count(-self._written)

    def read_again(self, name: str) -> None:
        """Compare the bytes on the disk with those received; CorruptDataError, with nothing kept, if they differ."""
        fs.fsync(self._descriptor, self._path)
        with contextlib.suppress(AttributeError, OSError):  # not everywhere; then the page cache may answer
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        received, self._sha256 = self._sha256.digest(), hashlib.sha256()
        self._hash_written(count=False)
        if self._sha256.digest() != received or os.fstat(self._descriptor).st_size != self._written:
            self.discard()
            raise CorruptDataError(
                f"{name} does not read back from the disk as it was received; nothing of it was kept",
                hint="check the disk below the storage root",
            )

    def publish(self, target: Path) -> None:
        """Give the file its name."""
        fs.rename(self._path, target, within=self._within)
        fs.remove(self._record, within=self._within)
        self._recorded, self.version = self._written, None

    def discard(self) -> None:
        """Remove the part and its record."""
        self._buffer.clear()
        self.version = None
        for path in (self._path, self._record):
            fs.remove(path, within=self._within)
        self._count(-self._written)

    def close(self) -> None:
        if self._descriptor < 0:
            return
        try:
            if not self._watch.abandoned():
                self.record()
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _count(self, more: int) -> None:
        self._written += more
        if more:
            self._watch.progress(more)


class _Fetch:
    """Fetches what is missing of one file from one address."""

    def __init__(self, file: RemoteFile, address: str, part: _Part, transport: Transport, watch: Watch) -> None:
        self._file = file
        self._address = address
        self._part = part
        self._transport = transport
        self._watch = watch
        self._complete = False

    @property
    def _host(self) -> str:
        return urlsplit(self._address).hostname or "its source"

    def run(self) -> None:
        """Complete the part."""
        while not self._complete:
            retrying(self._attempt, note=self._watch.note, sleep=self._watch.sleep)

    def _attempt(self) -> None:
        """Read once; a failure after a fair part of the file does not count as an attempt."""
        self._watch.check()
        before = self._part.received
        try:
            self._read()
        except Transient as failure:
            fair = _FAIR_BYTES if self._part.size is None else min(_FAIR_BYTES, self._part.size // _FAIR_PARTS)
            if self._part.version is None or self._part.received - before <= fair:
                raise
            self._watch.note(f"{failure}; resuming at byte {self._part.received:,}")
            if failure.retry_after is not None:
                raise

    def _read(self) -> None:
        """Resume the version that the part holds, or start again with the version that the remote has now."""
        version = self._part.version_at(self._address)
        if version is not None:
            with self._transport.open_version(self._address, self._part.resumed_at, version) as answer:
                if self._continues(answer, version):
                    self._receive(answer, skip=self._part.received - answer.start)
                    return
            self._watch.note(f"{self._file.path} changed at {self._host}: it is fetched again from the start")
        with self._transport.open_version(self._address, 0) as answer:
            self._part.begin(self._address, answer)
            if answer.start:
                raise NetworkError(f"{self._host} sends another part of {self._file.path} than was asked for")
            self._receive(answer, skip=0)

    def _continues(self, answer: Answer, version: str) -> bool:
        """Whether an answer is certainly of the bytes that the part begins with."""
        return answer.version == version and answer.size == self._part.size and answer.start <= self._part.received

    def _receive(self, answer: Answer, skip: int) -> None:
        """Append the bytes of an answer behind its first `skip`; whatever ends it, what came is written."""
        expected = answer.size if answer.size is not None else self._file.size
        self._require_size(answer)
        try:
            for block in answer.blocks:
                self._watch.check()
                fresh, skip = block[skip:], max(0, skip - len(block))
                self._part.append(fresh)
                if expected is not None and self._part.received > expected:
                    self._part.restart()
                    raise CorruptDataError(f"{self._file.path} from {self._host} has more than {expected:,} bytes")
        finally:
            if not self._watch.abandoned():
                self._part.flush()
        if expected is not None and self._part.received < expected:
            size = f"{self._part.received:,} of {expected:,} bytes"
            raise Transient(
                NetworkError(f"{self._file.path} could not be fetched from {self._host}: it ended after {size}")
            )
        self._complete = True

    def _require_size(self, answer: Answer) -> None:
        """Refuse a file of another size than was listed, and one whose end cannot be determined."""
        listed = self._file.size
        if listed is not None and answer.size is not None and answer.size != listed:
            raise CorruptDataError(
                f"{self._file.path} has {answer.size:,} bytes at {self._host}, {listed:,} were announced",
                hint="the file was replaced at its source, or is damaged there",
            )
        if listed is None and answer.size is None and not answer.ends:
            raise NetworkError(
                f"{self._host} does not give the size of {self._file.path}, which has no checksum either: whether it "
                "came whole cannot be determined"
            )
