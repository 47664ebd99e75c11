"""The shards of a dataset of Open X-Embodiment, their pickled episodes, and the repository that contains them.

A shard is a tar archive `NAME_00000.tar` with one pickle per episode, which is unpickled in a confined process. Large
shards are fetched in pieces: the episodes that begin in a range of an archive become a separate archive.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import tarfile
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, cast

import numpy as np

from ...core.errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError
from ...core.format import fs
from ...core.format.contracts import Array, Closing
from ...core.format.converter import Advance, Ids, LocalCache, Note, RemoteDataset, RemoteFile, RemoteShard, Source
from ...core.format.files import no_match, open_regular, read_regular, refuse_pointer
from ...core.remote.hub import HubFolderSource
from ...core.remote.transport import read_range
from ..files.archives import (
    LARGEST_MEMBER,
    LONGEST_HEADER,
    Archive,
    ArchiveMember,
    CutError,
    MemberFile,
    begins_as_archive,
)
from ..files.images import ImageForm, image_form, is_image
from ..files.pickles import PickledArray, PickledBytes, PickledList, PickleReader, Value

LeafPath: TypeAlias = tuple[str, ...]
Step: TypeAlias = dict[LeafPath, Value]
Kind: TypeAlias = Literal["number", "text", "image", "none", "other"]

_IMAGE_KEYS = frozenset({"bytes", "path"})
_ROWS = 256
_TEXT_KINDS = "SU"
_NUMBER_KINDS = "biuf"
_DEEPEST = 12


@dataclass(frozen=True, slots=True)
class LeafForm:
    """The form of the values of a leaf.

    Attributes:
        kind: the kind of values; `other` cannot be read.
        dtype: the element type of a `number`.
        shape: the shape of a `number`.
        python: whether numbers were Python's, not NumPy's.
        why: why `other` cannot be read.
    """

    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()
    python: bool = False
    why: str = ""

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" if self.kind == "number" else self.kind


TEXT, IMAGE, NONE = LeafForm("text"), LeafForm("image"), LeafForm("none")
_SCALARS = {
    bool: LeafForm("number", "bool", python=True),
    int: LeafForm("number", "int64", python=True),
    float: LeafForm("number", "float64", python=True),
    str: TEXT,
    type(None): NONE,
}
_WIDER = {frozenset({"int64", "float64"}): "float64"}
RAGGED = LeafForm("other", why="its values differ in form between the steps of an episode")


def form_of(value: Value) -> LeafForm:
    """Return the form of a value; bytes are an image if they begin like one, else text."""
    if isinstance(value, PickledArray):
        return _array_form(value.dtype, value.shape, value.python)
    if isinstance(value, PickledBytes):
        return IMAGE if is_image(value.head) else TEXT
    if isinstance(value, PickledList):
        return LeafForm("other", why="it is a list of anything but numbers of one form")
    if isinstance(value, dict):
        return IMAGE if image_bytes(value) is not None else LeafForm("other", why="it has no values")
    return _SCALARS.get(type(value), LeafForm("other", why=f"it is of type {type(value).__name__}"))


@functools.lru_cache(maxsize=1024)
def _array_form(dtype: np.dtype[Any], shape: tuple[int, ...], python: bool) -> LeafForm:
    if dtype.kind in _TEXT_KINDS and not shape:
        return TEXT
    if dtype.kind not in _NUMBER_KINDS:
        return LeafForm("other", why=f"it is an array of {dtype}")
    return LeafForm("number", dtype.newbyteorder("=").name, shape, python)


def joined_form(one: LeafForm, other: LeafForm) -> LeafForm | None:
    """Return the form that can hold values of both forms, None if there is none."""
    if one == other:
        return one
    if one.kind == other.kind == "number" and one.python and other.python and one.shape == other.shape:
        wider = _WIDER.get(frozenset({one.dtype, other.dtype}))
        return None if wider is None else LeafForm("number", wider, one.shape, python=True)
    return None


def leaves_of(step: Value, what: str) -> Step:
    """Return the leaves of a step by their paths; FormatError for a step that is not a dictionary."""
    if not isinstance(step, dict):
        raise FormatError(f"{what} is not a dictionary")
    found: Step = {}
    _collect(step, (), found)
    return found


def _collect(nested: Mapping[str, Value], path: LeafPath, found: Step) -> None:
    for name, value in nested.items():
        here = (*path, name)
        if isinstance(value, dict) and value and not value.keys() <= _IMAGE_KEYS and len(here) < _DEEPEST:
            _collect(value, here, found)
        else:
            found[here] = value


def image_bytes(value: Value) -> PickledBytes | None:
    """Return the bytes of an image in the form of the library datasets, a dictionary of `bytes` and `path`."""
    data = value.get("bytes") if isinstance(value, dict) and value.keys() <= _IMAGE_KEYS else None
    return data if isinstance(data, PickledBytes) else None


class Episode:
    """An unpickled episode, a dictionary with a list of `length` steps and other entries, `others`.

    Values are read from the process of `reader` on demand; `what` names the episode in messages.
    """

    def __init__(self, reader: PickleReader, found: Value, what: str) -> None:
        steps = found.get("steps") if isinstance(found, dict) else None
        if not isinstance(found, dict) or not isinstance(steps, PickledList) or len(steps.shape) != 1:
            raise FormatError(f"{what} is not an episode, expected a dictionary with a list of steps")
        self.what = what
        self.length = len(steps)
        self.others = {name: value for name, value in found.items() if name != "steps"}
        self._reader, self._steps = reader, steps

    def steps(self, start: int, stop: int) -> Iterator[list[Step]]:
        """Yield the leaves of the steps `[start, stop)`, up to 256 steps at a time."""
        for first in range(start, stop, _ROWS):
            values = self._reader.items(self._steps, first, min(first + _ROWS, stop))
            yield [leaves_of(one, f"{self.what}: step {first + at}") for at, one in enumerate(values)]

    def forms(self, steps: Sequence[Step]) -> dict[LeafPath, LeafForm]:
        """Return the form of each leaf in some steps; a leaf whose form varies is of the kind `other`."""
        found: dict[LeafPath, LeafForm] = {}
        for number, step in enumerate(steps):
            if number and step.keys() != found.keys():
                for path in step.keys() ^ found.keys():
                    found[path] = RAGGED
            for path, value in step.items():
                form, before = form_of(value), found.get(path)
                if before is not form:
                    found[path] = form if before is None else joined_form(before, form) or RAGGED
        return found

    def fetched(self, values: Sequence[PickledArray | PickledBytes]) -> list[Array | bytes]:
        """Return the values of arrays and bytes with one request to the process."""
        return self._reader.parts(values)

    def image_form(self, value: Value, what: str) -> ImageForm:
        """Return the form of the image in a leaf."""
        [data] = self.fetched([_image(value)])
        return image_form(cast(bytes, data), what)

    def columns(self, steps: Sequence[Step], forms: Mapping[LeafPath, LeafForm]) -> dict[LeafPath, list[Any]]:
        """Return the values of leaves in each step: arrays, Python numbers, text as UTF-8, or encoded images."""
        places: list[tuple[LeafPath, int]] = []
        asked: list[PickledArray | PickledBytes] = []
        found: dict[LeafPath, list[Any]] = {}
        for path, form in forms.items():
            found[path] = values = [_image(step[path]) if form.kind == "image" else step[path] for step in steps]
            for at, value in enumerate(values):
                if isinstance(value, PickledArray | PickledBytes):
                    places.append((path, at))
                    asked.append(value)
        for (path, at), data in zip(places, self.fetched(asked), strict=True):
            found[path][at] = data
        for path, form in forms.items():
            if form.kind == "text":
                found[path] = [_utf8(value) for value in found[path]]
        return found


def _image(value: Value) -> PickledBytes:
    data = value if isinstance(value, PickledBytes) else image_bytes(value)
    if data is None:
        raise FormatError("a value is not an image")
    return data


def _utf8(value: Any) -> bytes:
    """Return text as UTF-8; bytes that are not UTF-8 are taken for Latin-1."""
    if isinstance(value, np.ndarray):
        value = value.item()
    if isinstance(value, str):
        return value.encode("utf-8", "replace")
    try:
        bytes(value).decode("utf-8")
    except UnicodeDecodeError:
        return bytes(value).decode("latin-1").encode("utf-8")
    return bytes(value)


def numbers(values: Sequence[Any], dtype: str, shape: tuple[int, ...], what: str) -> Array:
    """Return values of one leaf as `[n, *shape]`; FormatError if they do not fit the type or the shape."""
    rows = np.array(values) if not shape else np.stack([np.asarray(value) for value in values])
    if rows.shape != (len(values), *shape):
        raise FormatError(f"{what}: values have the shape {list(rows.shape[1:])}, expected {list(shape)}")
    if rows.dtype.name == dtype:
        return rows
    with np.errstate(over="ignore", invalid="ignore"):
        cast_rows = rows.astype(dtype)
        if not np.array_equal(cast_rows.astype(rows.dtype), rows, equal_nan=rows.dtype.kind == "f"):
            raise FormatError(f"{what}: {dtype} cannot hold all values, which are {rows.dtype}")
    return cast_rows


def is_single_precision(rows: Array) -> bool:
    """Return whether float32 can hold every value exactly."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.array_equal(rows.astype(np.float32).astype(rows.dtype), rows, equal_nan=True))


_LARGEST = 512 << 20


class EpisodeUnpickler(Closing):
    """Loads episodes, one at a time, in one confined process. Not thread-safe.

    The process ends when this object is closed or deleted. After a fork or in a pickled copy, another process is
    started.
    """

    def __init__(self) -> None:
        self._reader: PickleReader | None = None
        self._owner = os.getpid()
        self._end: Callable[[], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_reader": None, "_owner": 0, "_end": None}

    @property
    def is_here(self) -> bool:
        """Whether this process started the other one; a forked child must not share its pipes."""
        return self._owner == os.getpid()

    def load(self, file: BinaryIO, size: int, what: str) -> Episode:
        """Unpickle the next `size` bytes of a file; the episode before can no longer be read. `what` is its name."""
        with self.explained(what):
            if self._reader is None or not self.is_here:
                self._reader = reader = PickleReader("the episode", _LARGEST)
                self._owner, self._end = os.getpid(), weakref.finalize(self, reader.close)
            return Episode(self._reader, self._reader.load(file, size, pack=True), what)

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Add the name of the episode to errors."""
        try:
            yield
        except CutError:
            raise
        except FormatError as error:
            if error.message.startswith(what):
                raise
            kind = CorruptDataError if isinstance(error, CorruptDataError) else FormatError
            raise kind(f"{what}: {error.message}", hint=error.hint) from error

    def close(self) -> None:
        """End the process."""
        if self._end is not None and self.is_here:
            self._end()
        self._reader = self._end = None


def load_episode(unpickler: EpisodeUnpickler, archive: Archive, member: ArchiveMember) -> Episode:
    """Unpickle the episode in a member of an archive."""
    file = cast(BinaryIO, MemberFile(archive, member.start, member.size))
    return unpickler.load(file, member.size, f"{archive.path}: {member.name}")


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
    """A shard; `name` and `number` come from the name of its file, `number` is None if that has none."""

    path: Path
    name: str
    number: int | None


def shards_at(path: Path) -> list[EpisodeArchive]:
    """Return the archive at a path, or those directly in a folder, ordered by number."""
    return ordered_shards([path] if not path.is_dir() else [file for file in path.iterdir() if _is_shard(file)])


def ordered_shards(files: Iterable[Path]) -> list[EpisodeArchive]:
    """Return archives ordered by the numbers in their names."""
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
    """Return the name of the dataset from the names of its shards, else from the folder or file."""
    return (shards[0].name if shards else "") or path.name.partition(".")[0]


def missing_shards(path: Path, shards: Sequence[EpisodeArchive]) -> list[CorruptDataError]:
    """Return an error if a folder lacks shards before its last one; none for a single file."""
    return lacking_shards(path, shards) if path.is_dir() else []


def lacking_shards(where: object, shards: Sequence[EpisodeArchive]) -> list[CorruptDataError]:
    """Return an error if numbers before the last one are missing; `where` is the place in the message."""
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
    """Raise FormatError for a folder with shards of several datasets, or with two shards of one number."""
    names = sorted({one.name for one in shards})
    if len(names) > 1:
        some = ", ".join(map(repr, names[:_MOST_NAMED]))
        raise FormatError(f"{path} has shards of several datasets: {some}", hint="put each in a folder of its own")
    numbers = [one.number for one in shards]
    if len(set(numbers)) < len(numbers):
        twice = next(one for one in shards if numbers.count(one.number) > 1)
        raise FormatError(f"{path} has two shards with the number {twice.number}")


def has_episodes(shards: Sequence[EpisodeArchive]) -> bool:
    """Return whether one of the first non-empty shards has a pickle of steps among its first members."""
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
    """Return whether a member is the pickle of an episode, by its name."""
    name = Path(member.name).name
    return name.lower().endswith(_PICKLE_SUFFIXES) and not name.startswith(".")


def is_empty_archive(path: Path) -> bool:
    """Return whether a file is an archive without members; a larger file of zeros is a failed copy."""
    return path.stat().st_size <= _EMPTY_BYTES and not any(read_regular(path))


class EpisodeArchives(Closing):
    """Opens the archives of a dataset, one at a time. Not thread-safe."""

    def __init__(self, shards: Sequence[EpisodeArchive]) -> None:
        self.all = tuple(shards)
        self._number = -1
        self._archive: Archive | None = None

    def archive(self, number: int) -> Archive:
        """Return the archive at an index, opened; FormatError for a file that is not an archive."""
        if self._archive is None or self._number != number:
            self.close()
            path = self.all[number].path
            refuse_pointer(path)
            if not path.stat().st_size:
                raise CutError(f"{path} is an empty file", hint=_AGAIN)
            if not begins_as_archive(path) and not is_empty_archive(path):
                raise CorruptDataError(f"{path} is not a tar archive", hint=_AGAIN)
            self._number, self._archive = number, Archive(path)
        return self._archive

    def members(self, number: int) -> Iterator[ArchiveMember]:
        """Yield the files in an archive; raises the errors of `Archive.members`."""
        yield from self.archive(number).members()

    def close(self) -> None:
        if self._archive is not None:
            self._archive.close()
            self._archive = None


Fetch: TypeAlias = Callable[[int, int, Callable[[memoryview, int], None]], None]
"""Calls its third argument with each block of the bytes `[start, stop)` of an archive, and the block's position."""

PIECE_BYTES = 64 << 20
"""Bytes of an archive in which the episodes of a piece begin, a multiple of 512."""
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

    Tar archives have no index: each header only leads to the next one. So the first member in the span has to be found
    by its header, the first block with the magic number and the checksum of a header whose data are followed by another
    header or the end of the archive.

        ... data of a member | header data data data | header data | header data data | header ...
                       ^ start of the span                        ^ stop of the span
                               first member ......................................... | end of the piece

    A member begins with its extended headers, which may lie before the span.

    Args:
        fetch: fetches a range of the archive.
        size: bytes of the archive.
        span: the range `[start, stop)` in which members must begin.
        path: the new file.
        what: the name of the archive in messages.

    Returns:
        Whether a member begins in the span; if not, `path` does not exist.

    Raises:
        CorruptDataError: a header does not lead to another one.
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
    """A header: the bytes of it and its data, and whether it extends the header that follows."""

    bytes: int
    extended: bool


class _Piece:
    """A piece in the making: a file with the bytes of the archive from `_begin` on, a little before its span."""

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
        if hidden:  # the bytes before the first member become the data of a dummy member that is not an episode
            header = tarfile.TarInfo("before")
            header.size = hidden - _BLOCK
            fs.pwrite(self._descriptor, memoryview(header.tobuf()), 0, self._path)
        fs.truncate(self._descriptor, end - self._begin, self._path)
        fs.pwrite(self._descriptor, memoryview(bytes(2 * _BLOCK)), end - self._begin, self._path)
        return True

    def _bring(self, stop: int) -> None:
        """Fetch the archive up to a position."""
        stop = min(stop, self._size)
        if stop > self._there:
            self._fetch(self._there, stop, self._write)
            self._there = stop

    def _write(self, data: memoryview, position: int) -> None:
        fs.pwrite(self._descriptor, data, position - self._begin, self._path)

    def _block(self, position: int) -> bytes:
        return os.pread(self._descriptor, _BLOCK, position - self._begin)

    def _first(self) -> int | None:
        """Return the position of the first member, None if no member begins in the span."""
        for position in self._candidates():
            header = self._leading(position)
            if header is not None and position >= self._start:
                return position
            if header is not None and header.extended and position + header.bytes >= self._start:
                return self._after(position)  # a member of the piece before, whose extended header lies before the span
        return None

    def _candidates(self) -> Iterator[int]:
        """Yield the positions of blocks with the magic number of a header."""
        for position in range(self._begin, self._stop, _SCANNED):
            data = os.pread(self._descriptor, min(_SCANNED, self._stop - position), position - self._begin)
            blocks = np.frombuffer(data[: len(data) // _BLOCK * _BLOCK], np.uint8).reshape(-1, _BLOCK)
            magic = blocks[:, _MAGIC_AT : _MAGIC_AT + len(_MAGIC)]
            for number in np.flatnonzero((magic == _MAGIC).all(1)).tolist():
                yield position + number * _BLOCK

    def _leading(self, position: int) -> _TarHeader | None:
        """Return the header at a position if it leads to another header or to the end, else None."""
        header = _header(self._block(position))
        if header is None:
            return None
        self._bring(position + header.bytes + _BLOCK)
        return header if self._is_sound(position + header.bytes) else None

    def _is_sound(self, position: int) -> bool:
        """Return whether there is a header or the end of the archive at a position."""
        block = self._block(position)
        return len(block) == _BLOCK and (not any(block) or _header(block) is not None)

    def _after(self, position: int) -> int:
        """Return the end of the member, including extended headers, that begins at a position."""
        extended = True
        while extended:
            self._bring(position + _BLOCK)
            header = _header(self._block(position))
            if header is None:
                cut = position + _BLOCK > self._size
                damage = f"damaged: no header begins at byte {position:,}"
                why = f"cut: it ends after {self._size:,} bytes" if cut else damage
                raise CorruptDataError(f"{self._what} is {why}")
            position += header.bytes
            extended = header.extended
        return position

    def _end(self, first: int) -> int | None:
        """Follow the headers from the first member on; return the end of the last member, None if there is none."""
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
    """Parse a header; None for any other block, or a size that no archive of episodes has."""
    try:
        found = tarfile.TarInfo.frombuf(block, "utf-8", "replace")
    except tarfile.HeaderError:
        return None
    extended = found.type in _EXTENDED
    if not 0 <= found.size <= (LONGEST_HEADER if extended else LARGEST_MEMBER):
        return None
    return _TarHeader(_BLOCK + -(-found.size // _BLOCK) * _BLOCK, extended)


REPOSITORY = "jxu124/OpenX-Embodiment"
"""The repository on the hub."""
_READ = 4 << 20
_Write: TypeAlias = Callable[[memoryview, int], None]
_NUMBER = re.compile(r"(\d{1,15})\D*", re.ASCII)


def _number_of(name: str) -> int | None:
    found = _NUMBER.fullmatch(name.rpartition("_")[2])
    return None if found is None else int(found[1])


class _ArchiveSource(Source):
    """A source of datasets of numbered tar archives, of which large ones are fetched in parts."""

    name = "openx"
    pickled = True

    @abstractmethod
    def reading(self, file: RemoteFile) -> AbstractContextManager[Fetch]:
        """Open an archive; the context gives a function that fetches ranges of it."""

    def shards(self, dataset: RemoteDataset, folder: Path) -> list[RemoteShard]:
        """Return the archives ordered by number; archives of more than 64 MiB are divided into parts."""
        files, found = {file.path: file for file in dataset.files}, list[RemoteShard]()
        for one in ordered_shards(map(Path, files)):
            file = files[str(one.path)]
            found += [RemoteShard((file,), span=span) for span in pieces_of(file.known_size)]
        return found

    def lacking(self, dataset: RemoteDataset) -> Sequence[RbtoolError]:
        """Return an error if archives before the last one are missing."""
        return lacking_shards(dataset.address, ordered_shards(map(Path, dataset.paths)))

    def episode_number(self, text: Mapping[str, str]) -> int | None:
        """Return the number at the end of the name of an episode's file, None if there is none."""
        return _number_of(text.get("file", ""))

    def fetch_part(self, shard: RemoteShard, folder: Path) -> bool:
        """Fetch the episodes that begin in a part of an archive; one of a single part is fetched whole and verified."""
        [file], span = shard.files, shard.span
        assert span is not None
        if span == (0, file.size):
            self.fetch([file], folder)
            return not is_empty_archive(folder / file.path)
        with self.reading(file) as fetch:
            return fetch_piece(fetch, file.known_size, span, folder / file.path, f"{self.remote}: {file.path}")


class OpenXSource(_ArchiveSource, HubFolderSource):
    """The repository `jxu124/OpenX-Embodiment`; an id is a folder with tar archives, like `bridge`.

    The loader script of the repository is neither fetched nor run.
    """

    repository = REPOSITORY
    suffixes = (".tar",)
    local_cache = LocalCache("openx", "OPENX_DATASET_DIR", "~/openx")

    @contextlib.contextmanager
    def reading(self, file: RemoteFile) -> Iterator[Fetch]:
        """Open an archive on the hub."""

        def fetch(start: int, stop: int, write: _Write) -> None:
            read_range(self.hub, file.addresses[0], start, stop, write, what=file.path)

        yield fetch

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """The id of the dataset, which the names of shards may not contain."""
        return {"id": dataset_id}


class OpenXFolder(_ArchiveSource):
    """A local folder with archives in `<folder>/<id>`, as a source of streams."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def remote(self) -> str:
        """The folder."""
        return str(self.folder)

    def list_ids(self) -> Ids:
        """List the folders that have archives."""
        return Ids(tuple(sorted(path.name for path in self.folder.iterdir() if path.is_dir() and shards_at(path))))

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Find the archives of a dataset."""
        folder = self.folder / dataset_id
        found = shards_at(folder) if folder.is_dir() else []
        if not found:
            raise DatasetNotFoundError(f"{folder} has no tar archives")
        require_one_dataset(folder, found)
        files = []
        for one in found:
            state = one.path.stat()
            files.append(RemoteFile(one.path.name, state.st_size, None, (str(one.path),), str(state.st_mtime_ns)))
        return RemoteDataset(dataset_id, str(folder), None, tuple(files))

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Link to the archives."""
        for file in files:
            fs.link_to(Path(file.addresses[0]), folder / file.path)

    @contextlib.contextmanager
    def reading(self, file: RemoteFile) -> Iterator[Fetch]:
        """Open an archive on the disk."""
        descriptor = open_regular(Path(file.addresses[0]))

        def fetch(start: int, stop: int, write: _Write) -> None:
            for position in range(start, stop, _READ):
                write(memoryview(os.pread(descriptor, min(_READ, stop - position), position)), position)

        try:
            yield fetch
        finally:
            os.close(descriptor)
