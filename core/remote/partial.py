"""The first bytes of a file that is being fetched, on disk as `<name>.part`."""

from __future__ import annotations

import contextlib
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import CorruptDataError, FormatError
from ..format import fs
from ..format.contracts import Closing
from ..format.digest import open_regular
from ..format.documents import Count, decode, dump_json, parse_json
from ..format.read_errors import reading_from
from ..format.sources import RemoteFile
from .checksums import blocks_of, hasher
from .threads import Watch
from .transport import Answer

RECORD = ".json"
"""Suffix of the file that records where a part without a checksum comes from, after the name of the part."""

_WRITTEN_AT_ONCE = 256 << 10
_RECORDED_AT_ONCE = 64 << 20
_RECORD_BYTES = 64 << 10


class PartialFile(Closing, ABC):
    """Appends a file's bytes to its part and hashes them.

    `within` is the descriptor of the parent folder. Opening hashes what an earlier run left. `watch.progress` is called
    with the number of bytes added to the part, negative when bytes are discarded; `watch.check` between blocks.
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
        """Keep what can be kept of the `size` bytes that an earlier run left."""

    def _hash_written(self, count: Callable[[int], None]) -> None:
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        with os.fdopen(self._descriptor, "rb", buffering=0, closefd=False) as written, reading_from(self._path):
            for block in blocks_of(written):
                self._watch.check()
                self._hasher.update(block)
                count(len(block))

    @property
    def received(self) -> int:
        """How many bytes of the file there are, written or buffered."""
        return self._written + len(self._buffer)

    @property
    def can_resume(self) -> bool:
        """Whether a later request can continue from the bytes that there are."""
        return True

    def append(self, block: bytes | memoryview) -> None:
        """Add the next bytes; they are written when there are enough of them."""
        self._buffer += block
        if len(self._buffer) >= _WRITTEN_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write the buffered bytes."""
        data, self._buffer = self._buffer, bytearray()  # first: after a failed write nothing may follow
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
            descriptor, self._descriptor = self._descriptor, -1  # it is gone even where closing it fails
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
        """Whether there are as many bytes as the file has."""
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
    """The source of a part: its first `bytes` bytes have the digest `sha256` and are of `version` at `address`."""

    address: str
    version: str
    size: Count | None
    bytes: Count
    sha256: str


class VersionedPart(PartialFile):
    """The part of a file without a checksum, in one version of the file.

    `version` is the validator of these bytes at `address`, None if unknown. `<name>.part.json` records both and the
    digest of the bytes, so that no two versions are joined and no bytes that a crash damaged are kept.
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
        """Keep those bytes of an earlier run that are recorded, and no others."""
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
        """The byte to request next; the last one again if all are there, because an answer has at least one."""
        return self.received if self.size is None else min(self.received, max(0, self.size - 1))

    def version_at(self, address: str) -> str | None:
        """The validator with which the part can be resumed from an address; None if it has to start again there."""
        return self.version if self.received and self.address == address else None

    def begin(self, address: str, answer: Answer) -> None:
        """Start the file again, in the version that the answer has."""
        if self.received:
            self.restart()
        self.address, self.version, self.size = address, answer.version, answer.size

    def flush(self) -> None:
        """Write the buffered bytes, and the record from time to time."""
        super().flush()
        if self.version and self._written - self._recorded >= _RECORDED_AT_ONCE:
            self.record()

    def record(self) -> None:
        """Record how many bytes there are, once they are on the disk; the next run resumes there."""
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
        with contextlib.suppress(AttributeError, OSError):  # not everywhere; then the page cache may answer
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
