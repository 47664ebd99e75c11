"""The checksums that remotes give of their files: sha256, git blobs, md5 and crc32c."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FormatError, UsageError
from ..format.digest import open_regular
from ..format.read_errors import reading_from

_BLOCK = 1 << 20


class ChecksumHasher:
    """Takes the bytes of one file in their order and determines whether they are the ones that were announced."""

    def __init__(self, checksum: str, state: Any) -> None:
        self.expected = checksum
        self._kind = checksum.partition(":")[0]
        self._state = state

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes."""
        self._state.update(data)

    @property
    def found(self) -> str:
        """The checksum of the bytes so far, written like the one expected."""
        return f"{self._kind}:{self._state.hexdigest()}"

    def matches(self) -> bool:
        """Return whether the bytes so far are the whole file as it was announced."""
        return self.found == self.expected


class _Crc32c:
    """The CRC that buckets keep, behind the methods of hashlib."""

    def __init__(self) -> None:
        try:
            import google_crc32c
        except ImportError as error:
            raise UsageError(
                "checking crc32c checksums needs the package google-crc32c, which is not installed",
                hint="pip install 'rbtool[gcp]'",
            ) from error
        self._extend: Callable[[int, bytes], int] = google_crc32c.extend
        self._value = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._value = self._extend(self._value, bytes(data))

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class _Kind(NamedTuple):
    """How many hex digits a kind of checksum has, and how to begin one for a file of so many bytes."""

    digits: int
    begin: Callable[[int], Any]


_KINDS = {
    "sha256": _Kind(64, lambda size: hashlib.sha256()),
    "git-sha1": _Kind(40, lambda size: hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)),
    "md5": _Kind(32, lambda size: hashlib.md5(usedforsecurity=False)),
    "crc32c": _Kind(8, lambda size: _Crc32c()),
}


def hasher(checksum: str, size: int) -> ChecksumHasher:
    """Begin to check a file of `size` bytes against `sha256:…`, `git-sha1:…`, `md5:…` or `crc32c:…` (lower-case hex).

    `git-sha1` is the id of the git blob, which begins with the size. Raises FormatError for any other text, and
    UsageError for crc32c without the extra `gcp`.
    """
    kind, _, digits = checksum.partition(":")
    known = _KINDS.get(kind)
    if known is None:
        raise FormatError(f"the checksum {checksum!r} is of no known kind: {', '.join(_KINDS)}")
    if not re.fullmatch(f"[0-9a-f]{{{known.digits}}}", digits):
        raise FormatError(f"the checksum {checksum!r} is not {kind}: and {known.digits} lower-case hex digits")
    return ChecksumHasher(checksum, known.begin(size))


def matches(path: Path, size: int, checksum: str, *, within: int | None = None) -> bool:
    """Return whether the file at `path` has this size and checksum; its bytes are read only if the size is right.

    `within` is the descriptor of the parent folder; a link, or anything else but a file, does not match.
    """
    checking = hasher(checksum, size)
    try:
        descriptor = open_regular(path, within=within)
    except (FormatError, OSError):
        if within is None:
            raise
        return False
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if os.fstat(descriptor).st_size != size:
            return False
        with reading_from(path):
            for block in blocks_of(file):
                checking.update(block)
    return checking.matches()


def blocks_of(file: io.FileIO) -> Iterator[memoryview]:
    """Yield the bytes of a file in blocks of 1 MiB; each is gone when the next is asked for."""
    buffer = memoryview(bytearray(_BLOCK))
    while got := file.readinto(buffer):
        yield buffer[:got]
