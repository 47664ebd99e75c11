"""The shards of a dataset of Open X-Embodiment: tar archives `NAME_00000.tar` with a pickle for each episode.

Large shards are fetched in pieces: the episodes that begin in a range of an archive become an archive of their own.
"""

from __future__ import annotations

import itertools
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format import fs
from ...core.format.contracts import Closing
from ...core.format.files import no_match, read_regular, refuse_pointer
from ..files.archives import LARGEST_MEMBER, LONGEST_HEADER, Archive, ArchiveMember, CutError, begins_as_archive

SUFFIX = ".tar"
_PICKLE_SUFFIXES = (".pickle", ".pkl")
_PICKLE = b"\x80"
_NUMBERED = re.compile(r"(?P<name>.*?)[_-]?(?P<number>\d{1,9})\.tar", re.ASCII | re.DOTALL)
_HEAD = 4096
_TRIED = 16
_SHARDS_TRIED = 3
_MOST_NAMED = 5
_EMPTY_BYTES = 10 << 10
_AGAIN = "fetch it again"


@dataclass(frozen=True, slots=True)
class EpisodeArchive:
    """An archive; `number` is the one in its name, None where it has none."""

    path: Path
    name: str
    number: int | None


def shards_at(path: Path) -> list[EpisodeArchive]:
    """Return the archive at a path, or those directly in a folder, in the order of their numbers."""
    return ordered_shards([path] if not path.is_dir() else [file for file in path.iterdir() if _is_shard(file)])


def ordered_shards(files: Iterable[Path]) -> list[EpisodeArchive]:
    """Return archives in the order of their numbers, by their names alone."""
    found = [_shard(file) for file in files]
    return sorted(found, key=lambda one: (one.name, -1 if one.number is None else one.number, one.path.name))


def _is_shard(file: Path) -> bool:
    return file.name.lower().endswith(SUFFIX) and not file.name.startswith(".") and file.is_file()


def _shard(file: Path) -> EpisodeArchive:
    match = _NUMBERED.fullmatch(file.name)
    if match is None:
        return EpisodeArchive(file, file.stem, None)
    return EpisodeArchive(file, match["name"], int(match["number"]))


def dataset_name(path: Path, shards: Sequence[EpisodeArchive]) -> str:
    """Return the name of the dataset, from the names of its shards; else the name of the folder or file."""
    return (shards[0].name if shards else "") or path.name.partition(".")[0]


def missing_shards(path: Path, shards: Sequence[EpisodeArchive]) -> list[CorruptDataError]:
    """Return an error for each shard that a folder lacks below the last one it has; of a single file none is known."""
    return lacking_shards(path, shards) if path.is_dir() else []


def lacking_shards(where: object, shards: Sequence[EpisodeArchive]) -> list[CorruptDataError]:
    """Return an error if these shards lack any below the last one; it names `where`."""
    numbers = {one.number for one in shards if one.number is not None}
    if not numbers:
        return []
    lacking = sorted(set(range(max(numbers))) - numbers)
    if not lacking:
        return []
    name = shards[0].path.name
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    width, stem = len(match["number"]), name[: match.start("number")]
    named = ", ".join(f"{stem}{number:0{width}}{SUFFIX}" for number in lacking[:_MOST_NAMED])
    more = f" and {len(lacking) - _MOST_NAMED:,} more" if len(lacking) > _MOST_NAMED else ""
    lacks = "a shard is" if len(lacking) == 1 else f"{len(lacking):,} shards are"
    return [CorruptDataError(f"{where}: {lacks} missing: {named}{more}")]


def require_one_dataset(path: Path, shards: Sequence[EpisodeArchive]) -> None:
    """Raise FormatError for a folder with shards of several datasets, or with one shard twice."""
    names = sorted({one.name for one in shards})
    if len(names) > 1:
        some = ", ".join(map(repr, names[:_MOST_NAMED]))
        raise FormatError(f"{path} has shards of several datasets: {some}", hint="put each in a folder of its own")
    numbers = [one.number for one in shards]
    if len(set(numbers)) < len(numbers):
        twice = next(one for one in shards if numbers.count(one.number) > 1)
        raise FormatError(f"{path} has two shards with the number {twice.number}")


def has_episodes(shards: Sequence[EpisodeArchive]) -> bool:
    """Whether one of the first shards that are not empty has a pickle of steps among its first members."""
    filled = (one.path for one in shards if not is_empty_archive(one.path))
    return any(_has_episode(path) for path in itertools.islice(filled, _SHARDS_TRIED))


def _has_episode(path: Path) -> bool:
    try:
        if not begins_as_archive(path):
            return False
        with Archive(path) as archive:
            for count, member in enumerate(archive.members()):
                if is_episode(member):
                    head = archive.read(member.start, min(member.size, _HEAD))
                    return head.startswith(_PICKLE) and b"steps" in head
                if count >= _TRIED:
                    break
    except (RbtoolError, OSError) as error:
        return no_match(error)
    return False


def is_episode(member: ArchiveMember) -> bool:
    """Whether a member is the pickle of an episode, by its name."""
    name = Path(member.name).name
    return name.lower().endswith(_PICKLE_SUFFIXES) and not name.startswith(".")


def is_empty_archive(path: Path) -> bool:
    """Whether a file is nothing but the end of an archive; a larger one of zeros is a copy that failed."""
    return path.stat().st_size <= _EMPTY_BYTES and not any(read_regular(path))


class EpisodeArchives(Closing):
    """Opens the archives of a dataset, one at a time. Not for several threads."""

    def __init__(self, shards: Sequence[EpisodeArchive]) -> None:
        self.all = tuple(shards)
        self._number = -1
        self._archive: Archive | None = None

    def archive(self, number: int) -> Archive:
        """Return the archive in that place; raises FormatError for a file that is none."""
        if self._archive is None or self._number != number:
            self.close()
            path = self.all[number].path
            refuse_pointer(path)
            if not path.stat().st_size:
                raise CutError(f"{path} is an empty file", hint=_AGAIN)
            if not begins_as_archive(path) and not is_empty_archive(path):
                raise CorruptDataError(f"{path} is no tar archive", hint=_AGAIN)
            self._number, self._archive = number, Archive(path)
        return self._archive

    def members(self, number: int) -> Iterator[ArchiveMember]:
        """Yield the files in an archive; raises what `Archive.members` does."""
        yield from self.archive(number).members()

    def close(self) -> None:
        if self._archive is not None:
            self._archive.close()
            self._archive = None


Fetch: TypeAlias = Callable[[int, int, Callable[[memoryview, int], None]], None]
"""Passes the bytes `[start, stop)` of the archive to the function, each block with its position."""

PIECE_BYTES = 64 << 20
"""Bytes of an archive that a piece has, but for its last episode. A multiple of 512."""
_BLOCK = 512
_MAGIC, _MAGIC_AT = np.frombuffer(b"ustar", np.uint8), 257
_SCANNED = 4 << 20
_LOOKED_BACK = 16 << 10
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)


def pieces_of(size: int) -> list[tuple[int, int]]:
    """Return the ranges of the pieces of an archive of `size` bytes."""
    return [(start, min(start + PIECE_BYTES, size)) for start in range(0, max(1, size), PIECE_BYTES)]


def fetch_piece(fetch: Fetch, size: int, span: tuple[int, int], path: Path, what: str) -> bool:
    """Write the members that begin in `span` of an archive of `size` bytes to `path`, as an archive.

    An archive does not state where the first of them is: it is the first block that is a header by its magic, its
    checksum, and the header that follows its data. From there on one header leads to the next. A member begins with
    its extended headers, which may be before the span. Return whether there is a member; nothing is left at `path` if
    not. CorruptDataError, which names `what`, for headers that do not follow each other, and what `fetch` raises.
    """
    descriptor = fs.create(path)
    try:
        found = _Piece(descriptor, path, fetch, size, span, what).complete()
    finally:
        fs.close(descriptor, path)
    if not found:
        fs.remove(path)
    return found


@dataclass(frozen=True, slots=True)
class _TarHeader:
    """What a header states: how many bytes it and its data take, and whether it is for the header after it."""

    bytes: int
    extended: bool


class _Piece:
    """A piece in a file that has the bytes of the archive from `begin` on, some before its span."""

    def __init__(self, descriptor: int, path: Path, fetch: Fetch, size: int, span: tuple[int, int], what: str) -> None:
        self._descriptor, self._path, self._fetch = descriptor, path, fetch
        self._size, (self._start, self._stop), self._what = size, span, what
        self._begin = self._there = max(0, self._start - _LOOKED_BACK)

    def complete(self) -> bool:
        """Fetch the piece, and make the file an archive; return whether it has a member."""
        self._bring(self._stop)
        first = self._first() if self._start else 0
        end = None if first is None else self._end(first)
        if first is None or end is None:
            return False
        hidden = first - self._begin
        if hidden:  # what is before becomes a member that is no episode
            header = tarfile.TarInfo("before")
            header.size = hidden - _BLOCK
            fs.pwrite(self._descriptor, memoryview(header.tobuf()), 0, self._path)
        fs.truncate(self._descriptor, end - self._begin, self._path)
        fs.pwrite(self._descriptor, memoryview(bytes(2 * _BLOCK)), end - self._begin, self._path)
        return True

    def _bring(self, stop: int) -> None:
        """Fetch up to a position of the archive."""
        stop = min(stop, self._size)
        if stop > self._there:
            self._fetch(self._there, stop, self._write)
            self._there = stop

    def _write(self, data: memoryview, position: int) -> None:
        fs.pwrite(self._descriptor, data, position - self._begin, self._path)

    def _block(self, position: int) -> bytes:
        return os.pread(self._descriptor, _BLOCK, position - self._begin)

    def _first(self) -> int | None:
        """Return where the first member begins; None for a piece that is inside of one."""
        for position in self._candidates():
            header = self._leading(position)
            if header is not None and position >= self._start:
                return position
            if header is not None and header.extended and position + header.bytes >= self._start:
                return self._after(position)  # it begins before the piece, with that header
        return None

    def _candidates(self) -> Iterator[int]:
        for position in range(self._begin, self._stop, _SCANNED):
            data = os.pread(self._descriptor, min(_SCANNED, self._stop - position), position - self._begin)
            blocks = np.frombuffer(data[: len(data) // _BLOCK * _BLOCK], np.uint8).reshape(-1, _BLOCK)
            magic = blocks[:, _MAGIC_AT : _MAGIC_AT + len(_MAGIC)]
            for number in np.flatnonzero((magic == _MAGIC).all(1)).tolist():
                yield position + number * _BLOCK

    def _leading(self, position: int) -> _TarHeader | None:
        """Return the header in a position that leads to another one, or to the end; None if there is none."""
        header = _header(self._block(position))
        if header is None:
            return None
        self._bring(position + header.bytes + _BLOCK)
        return header if self._is_sound(position + header.bytes) else None

    def _is_sound(self, position: int) -> bool:
        """Whether a header or the end of the archive is in a position."""
        block = self._block(position)
        return len(block) == _BLOCK and (not any(block) or _header(block) is not None)

    def _after(self, position: int) -> int:
        """Return where the member that begins in a position ends, with its extended headers."""
        extended = True
        while extended:
            self._bring(position + _BLOCK)
            header = _header(self._block(position))
            if header is None:
                cut = position + _BLOCK > self._size
                why = f"cut: it ends after {self._size:,} bytes" if cut else f"damaged: byte {position:,} is no header"
                raise CorruptDataError(f"{self._what} is {why}")
            position += header.bytes
            extended = header.extended
        return position

    def _end(self, first: int) -> int | None:
        """Follow the members from the first one on; return where the last one ends, None if there is none."""
        position = first
        while position < self._stop and any(self._block(position)):
            position = self._after(position)
        if position < self._stop:
            self._require_zeros(position)
        else:
            self._bring(position + _BLOCK)
            if not self._is_sound(position):
                self._after(position)  # raises
        return None if position == first else position

    def _require_zeros(self, position: int) -> None:
        for start in range(position, self._stop, _SCANNED):
            if any(os.pread(self._descriptor, min(_SCANNED, self._stop - start), start - self._begin)):
                raise CorruptDataError(f"{self._what} is damaged: more follows the end of the archive")


def _header(block: bytes) -> _TarHeader | None:
    """Read a header; None for a block that is none, or one that no archive of episodes has."""
    try:
        found = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
    except tarfile.HeaderError:
        return None
    extended = found.type in _EXTENDED
    if not 0 <= found.size <= (LONGEST_HEADER if extended else LARGEST_MEMBER):
        return None
    return _TarHeader(_BLOCK + -(-found.size // _BLOCK) * _BLOCK, extended)
