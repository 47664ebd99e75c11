"""Reads members of tar archives, plain or compressed by xz; a compressed archive is read as a stream.

Nothing is extracted. Archives are untrusted: links, devices, names that lead out of the folder, and impossible sizes of
members and headers are refused.
"""

from __future__ import annotations

import lzma
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Closing
from ...core.format.files import open_regular, reading_from
from ...core.format.manifest import is_inside

XZ = b"\xfd7zXZ\x00"
_USTAR, _USTAR_AT = b"ustar", 257
_BLOCK = 512
_PACKED_BLOCK = 64 << 10
_UNPACKED_BLOCK = 256 << 10
_XZ_MEMORY = 256 << 20
LONGEST_HEADER = 1 << 20
LARGEST_MEMBER = 512 << 20
_MOST_MEMBERS = 10_000_000
_LONGEST_END = 64 << 20
_AGAIN = "copy or fetch the file again, whole"


class CutError(CorruptDataError):
    """An archive ends too early; the members read before the end are intact."""


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A file in an archive: its name, the position of its bytes in the uncompressed archive, and its size.

    `header` is the position of its first header, -1 if it has none.
    """

    name: str
    start: int
    size: int
    header: int = -1


def begins_as_archive(path: Path) -> bool:
    """Return whether a file begins like xz or tar; raises OSError, and FormatError for a FIFO or a device."""
    descriptor = open_regular(path)
    try:
        with reading_from(path):
            head = os.pread(descriptor, _BLOCK, 0)
    finally:
        os.close(descriptor)
    return head.startswith(XZ) or head[_USTAR_AT:].startswith(_USTAR)


class Archive(Closing):
    """An archive, open for reading; ascending reads unpack a compressed one only once. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        self._size = os.fstat(self._descriptor).st_size
        with reading_from(path):
            self._is_packed = os.pread(self._descriptor, len(XZ), 0) == XZ
        self._position = self._taken = 0
        self._inflate: lzma.LZMADecompressor | None = None
        self._restart()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def files(self) -> list[Path]:
        """The file of the archive."""
        return [self.path]

    def read(self, position: int, count: int) -> bytes:
        """Return `count` bytes from a position in the uncompressed archive; CutError if it ends before that."""
        if position < self._position:
            self._restart()
        if self._inflate is None:
            self._position = self._taken = position
        while position > self._position:
            self._take(min(position - self._position, _UNPACKED_BLOCK))
        parts = []
        while count:
            parts.append(self._take(min(count, _UNPACKED_BLOCK)))
            count -= len(parts[-1])
        return b"".join(parts)

    def members(self) -> Iterator[ArchiveMember]:
        """Yield the regular files in order; after the last one, the checksums of a compressed stream are compared.

        Raises:
            FormatError: the archive holds anything but files and folders below one folder.
            CutError: the archive ends too early; the members before the cut were yielded.
            CorruptDataError: the archive is damaged.
        """
        position, long_name, long_size = 0, "", -1
        begin = -1
        for _ in range(_MOST_MEMBERS):
            block = self.read(position, _BLOCK)
            begin = position if begin < 0 else begin
            position += _BLOCK
            if not any(block):
                self._require_end()
                return
            header = self._header(block)
            size = long_size if long_size >= 0 and header.isreg() else header.size
            if size < 0:
                raise self._damaged(f"{header.name[:80]!r} states a size of {size:,} bytes")
            if header.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                if size > LONGEST_HEADER:
                    raise self._damaged(f"a header of {size:,} bytes, at most {LONGEST_HEADER:,} are read")
                extended = self.read(position, size)
                if header.type == tarfile.GNUTYPE_LONGNAME:
                    long_name = extended.split(b"\0", 1)[0].decode("utf-8", "replace")
                elif header.type == tarfile.XHDTYPE:
                    long_name, long_size = self._extended(extended)
            else:
                name, long_name, long_size = long_name or header.name, "", -1
                self._refuse_odd(header, name, size)
                if header.isreg():
                    yield ArchiveMember(name, position, size, begin)
                begin = -1
            position += -(-size // _BLOCK) * _BLOCK
        raise self._damaged(f"it has more than {_MOST_MEMBERS:,} members")

    def _header(self, block: bytes) -> tarfile.TarInfo:
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "replace")
        except tarfile.HeaderError as error:
            raise self._damaged(f"the header of a member cannot be read ({error})") from error

    def _extended(self, data: bytes) -> tuple[str, int]:
        """Return the path and the size in an extended (PAX) header, "" and -1 if they are not in it."""
        name, size = "", -1
        while data:
            length = data[:10].partition(b" ")[0]
            if not length.isdigit() or not len(length) + 1 < int(length) <= len(data):
                raise self._damaged("an extended header cannot be read")
            key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
            if key == b"path":
                name = value.decode("utf-8", "replace")
            elif key == b"size" and value.isdigit() and len(value) < 20:
                size = int(value)
            data = data[int(length) :]
        return name, size

    def _refuse_odd(self, header: tarfile.TarInfo, name: str, size: int) -> None:
        shown = repr(name[:80])
        if not is_inside(name.rstrip("/")) and name.rstrip("/") != ".":
            raise FormatError(f"{self.path}: the name of the member {shown} leads out of the archive's folder")
        if header.issym() or header.islnk():
            raise FormatError(f"{self.path}: {shown} is a link, expected files")
        if not (header.isreg() or header.isdir()) or header.type == tarfile.GNUTYPE_SPARSE:
            raise FormatError(f"{self.path}: {shown} is neither a file nor a folder")
        if size > LARGEST_MEMBER:
            raise FormatError(f"{self.path}: {shown} has {size:,} bytes, at most {LARGEST_MEMBER:,} are read")

    def _require_end(self) -> None:
        """Read the zeros after the last member, up to the end of the stream, where xz compares its checksums."""
        left = _LONGEST_END
        while part := self._next(_UNPACKED_BLOCK):
            left -= len(part)
            if any(part) or left < 0:
                raise self._damaged("more follows the end of the archive")

    def _take(self, most: int) -> bytes:
        found = self._next(most)
        if not found:
            raise CutError(f"{self.path} is cut: it ends after {self._position:,} bytes of the archive", hint=_AGAIN)
        return found

    def _restart(self) -> None:
        self._position = self._taken = 0
        self._inflate = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY) if self._is_packed else None
        self._waiting = b""

    def _next(self, most: int) -> bytes:
        """Return at most `most` of the following bytes; none at the end."""
        found = self._stored(most) if self._inflate is None else self._unpacked(most)
        self._position += len(found)
        return found

    def _stored(self, most: int) -> bytes:
        with reading_from(self.path):
            found = os.pread(self._descriptor, most, self._taken)
        self._taken += len(found)
        return found

    def _unpacked(self, most: int) -> bytes:
        inflate = self._inflate
        assert inflate is not None
        while not inflate.eof:
            if inflate.needs_input:
                self._waiting = self._stored(_PACKED_BLOCK)
                if not self._waiting:
                    raise CutError(f"{self.path} is cut: its compressed stream has no end", hint=_AGAIN)
            try:
                found = inflate.decompress(self._waiting, most)
            except lzma.LZMAError as error:
                raise self._damaged(f"its compressed bytes cannot be unpacked ({error})") from error
            self._waiting = b""
            if found:
                return found
        return b""

    def _damaged(self, why: str) -> CorruptDataError:
        return CorruptDataError(f"{self.path} is damaged: {why}", hint=_AGAIN)


class MemberBytes(Protocol):
    """An object with the method `read` of `Archive`, for members that are stored elsewhere."""

    def read(self, position: int, count: int) -> bytes:
        """Return `count` bytes from a position."""


class MemberFile:
    """A range of an archive as a file that can be read once; `head` are the first bytes, if they were read already."""

    def __init__(self, archive: MemberBytes, position: int, size: int, head: bytes = b"") -> None:
        self._archive, self._position, self._left = archive, position, size
        self._head = head

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer only at the end of the range; CutError if the archive ends in it."""
        size = min(size, self._left)
        found = self._head[:size]
        self._head = self._head[size:]
        if len(found) < size:
            found += self._archive.read(self._position + len(found), size - len(found))
        self._position += size
        self._left -= size
        return found
