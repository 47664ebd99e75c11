"""Reads the arrays of Zarr stores, formats 2 and 3, in folders and zip files.

Chunks are decoded with numcodecs alone, without the zarr library: zarr lets codecs trust the header of a chunk, and
Blosc then reads beyond the end of a damaged one; zarr also needs a thread with an event loop to read a shard. Here the
size that a chunk must have is known before it is decoded, and no codec may return more bytes.
"""

from __future__ import annotations

import base64
import bz2
import gzip
import importlib
import io
import lzma
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import zstandard

from ...core.errors import CorruptDataError, FormatError, RbtoolError, SchemaError, not_installed
from ...core.format.contracts import Array, Closing
from ...core.format.documents import parse_json
from ...core.format.files import FETCH_AGAIN, no_match, open_regular, reading_from
from ...core.ted.schema import dtype_name
from ..files.numpy_files import stated_members
from ..files.readers import DAMAGED, reading

GROUP_2, ARRAY_2, ATTRIBUTES_2, NODE_3 = ".zgroup", ".zarray", ".zattrs", "zarr.json"
_USUAL = re.compile(r"\.z(array|attrs|group|metadata)|zarr\.json|[0-9]+(\.[0-9]+)*|c")
"""Last part of the names of metadata files and chunks."""
_METADATA = frozenset({GROUP_2, ARRAY_2, ATTRIBUTES_2, NODE_3, ".zmetadata"})
DATA, META = "data/", "meta/"
ENDS = f"{META}episode_ends"
OURS = "rbtool"
"""The attribute that rbtool gives to an array: an object with its `key` (a list of parts), `role` and `timing`."""
META_TYPES = "meta.json"
"""The kept document with the element types of the arrays of `meta` that became texts."""
_ZIP = b"PK"
"""First bytes of a zip file."""
_LARGEST_METADATA = 64 << 20
LARGEST_CHUNK = 2 << 30
"""Limit in bytes for a decoded chunk, and for a band: all chunks with the same rows."""
_ROOM, _LARGEST_TEXT = 64 << 10, 64 << 20
_DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, MemoryError, struct.error)
_UNREADABLE: tuple[type[Exception], ...] = (RbtoolError, *DAMAGED, *_DAMAGED)
_NO_PLACE = (1 << 64) - 1
"""Start and length of a chunk that a shard does not contain."""


def is_store(path: Path) -> bool:
    """Return whether a folder or a zip file is a store with `meta/episode_ends`; raises only errors of the disk."""
    if path.is_dir():
        return any((path / ENDS / name).is_file() for name in (ARRAY_2, NODE_3))
    if not path.is_file():
        return False
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            if stream.read(len(_ZIP)) != _ZIP:
                return False
            with zipfile.ZipFile(stream) as archive:
                return _prefix(archive.namelist()) is not None
    except _UNREADABLE as error:
        return no_match(error)


def _prefix(names: Iterable[str]) -> str | None:
    """Return the folder in a zip file that is the store, with a slash; "" for the root of the zip file.

    A file manager that zips a folder puts the folder's name before all names. None if there is no store, or if there
    are several.
    """
    ends = tuple(f"{ENDS}/{name}" for name in (ARRAY_2, NODE_3))
    found = [name.removesuffix(end) for name in names for end in ends if name.endswith(end)]
    whole = [prefix for prefix in found if not prefix or prefix.endswith("/")]
    least = min((prefix.count("/") for prefix in whole), default=0)
    outermost = {prefix for prefix in whole if prefix.count("/") == least}
    return outermost.pop() if len(outermost) == 1 else None


@contextmanager
def _reading(what: str, file: Path) -> Iterator[None]:
    """Turn the exceptions that libraries raise for damaged bytes into CorruptDataError."""
    try:
        with reading(what, file, *_DAMAGED):
            yield
    except MemoryError as error:
        raise CorruptDataError(
            f"{what} in {file} cannot be read: it states an impossible size", hint=FETCH_AGAIN
        ) from error


class StoreFiles(Closing):
    """The files of a store by name, in a folder or a zip file; if a name occurs twice in a zip, the last one counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive: zipfile.ZipFile | None = None
        self._held: tuple[str, bytes] = ("", b"")
        self._prefix = ""
        if path.is_dir():
            self.names = frozenset(self._below(path))
            return
        stream = os.fdopen(open_regular(path), "rb")
        try:
            with _reading("the list of its members", path):
                self._archive = zipfile.ZipFile(stream)
        except BaseException:
            stream.close()
            raise
        self._stream = stream
        found = [name for name in self._archive.namelist() if not name.endswith("/")]
        self._prefix = _prefix(found) or ""
        inside = (name for name in found if name.startswith(self._prefix))
        self.names = frozenset(name.removeprefix(self._prefix) for name in inside)
        stated = stated_members(stream.fileno())
        if stated not in (None, len(self._archive.infolist())):
            self.close()
            raise CorruptDataError(
                f"{path} states {stated:,} members, and lists {len(found):,}: it is damaged", hint=FETCH_AGAIN
            )
        if not all(_USUAL.fullmatch(name.rpartition("/")[2]) for name in self.names):
            try:
                self.require_names()
            except BaseException:
                self.close()
                raise

    def require_names(self) -> None:
        """Compare each name in the directory of a zip file with the name in front of the member's bytes.

        A name damaged in the directory would hide a chunk, and its rows would silently get the fill value. Raises
        CorruptDataError.
        """
        if self._archive is None:
            return
        for member in self._archive.infolist():
            with _reading(repr(member.filename), self.path):
                self._archive.open(member).close()

    @staticmethod
    def _below(folder: Path) -> Iterator[str]:
        for place, _, names in os.walk(folder):
            begin = os.path.relpath(place, folder).replace(os.sep, "/")
            for name in names:
                yield name if begin == "." else f"{begin}/{name}"

    def files(self) -> list[Path]:
        """All files of the store on the disk."""
        if self._archive is not None:
            return [self.path]
        return [self.path / name for name in sorted(self.names)]

    def place(self, name: str) -> Path:
        """The file on the disk that contains the file `name` of the store."""
        return self.path if self._archive is not None else self.path / name

    def read(self, name: str, most: int, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes `[start, stop)` of a file; FormatError if the range has more than `most` bytes.

        Negative positions count from the end, as in slices. A zip member is read whole, and limited as a whole.
        """
        if self._archive is not None:
            return self._member(name, most)[start:stop]
        path = self.path / name
        descriptor = open_regular(path)
        try:
            with reading_from(path):
                size = os.fstat(descriptor).st_size
                start, stop, _ = slice(start, stop).indices(size)
                _require_size(path, name, stop - start, most)
                found = os.pread(descriptor, max(0, stop - start), start)
                while len(found) < stop - start:  # a read may give less than 2 GiB at once
                    part = os.pread(descriptor, stop - start - len(found), start + len(found))
                    if not part:
                        break
                    found += part
                return found
        finally:
            os.close(descriptor)

    def _member(self, name: str, most: int) -> bytes:
        """Read a whole member and compare its checksum; the last member is kept for reads of further ranges."""
        if self._held[0] != name:
            assert self._archive is not None
            with _reading(repr(name), self.path):
                member = self._archive.getinfo(self._prefix + name)
                _require_size(self.path, name, member.file_size, most)
                self._held = name, self._archive.read(member)
        return self._held[1]

    def document(self, name: str) -> dict[str, Any]:
        """Read a metadata file; FormatError if it is not a JSON object."""
        found = parse_json(self.read(name, _LARGEST_METADATA), f"{name} in {self.path}")
        if not isinstance(found, dict):
            raise FormatError(f"{name} in {self.path} is not a JSON object")
        return found

    def metadata(self) -> list[str]:
        """The names of the metadata files, sorted."""
        return sorted(name for name in self.names if name.rpartition("/")[2] in _METADATA)

    def close(self) -> None:
        if self._archive is not None:
            self._archive.close()
            self._stream.close()
            self._held = "", b""


def _require_size(path: Path, name: str, size: int, most: int) -> None:
    if size > most:
        raise FormatError(f"{path}: {name} has {size:,} bytes, at most {most:,} are expected")


Decoder: TypeAlias = Callable[[Any, int], Any]
"""Decodes bytes or an array; the second argument limits the size of the result in bytes."""


class ZarrForm(NamedTuple):
    """The kind of elements of an array: `number`, `text`, or `odd`, which cannot be read for the reason in `why`."""

    kind: str
    dtype: np.dtype[Any]
    why: str = ""


@dataclass(slots=True)
class _Layout:
    """How an array is stored, from its metadata of either format."""

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    form: ZarrForm
    fill: Any
    decoders: list[Decoder]
    """In the order in which they are applied to the bytes of a chunk."""
    key: Callable[[tuple[int, ...]], str]
    """Returns the file name of the chunk at a position in the grid of chunks."""
    finish: Callable[[Any, tuple[int, ...]], Array]
    """Makes an array of a chunk's shape from the output of the decoders."""
    exact: bool = True
    """Whether every decoder returns exactly the size of the chunk's elements."""
    shard: _Shard | None = None


@dataclass(slots=True)
class _Shard:
    """The form of shards: files that each contain several chunks.

        chunk chunk ... chunk | index: start and length of each chunk, as two uint64 | CRC-32C

    The index may be at the start instead.
    """

    counts: tuple[int, ...]
    """Number of chunks along each axis."""
    at_end: bool
    """Whether the index is at the end of the file; else at its start."""
    checked: bool
    """Whether a CRC-32C follows the index."""
    order: str
    """Byte order of the index, `<` or `>`."""
    known: dict[str, Array] = field(default_factory=dict)
    """Indexes that were read last, by file, `[*counts, 2]`."""


_MOST_INDEXES = 16


class ZarrArray:
    """An array of a store, read in rows along its first axis.

    All chunks that contain the same rows form a band of `chunk_rows` rows. The last band that was decoded is kept, so
    that ascending reads decode each chunk once.
    """

    def __init__(self, files: StoreFiles, name: str, attributes: Mapping[str, Any], layout: _Layout) -> None:
        self._files, self._layout = files, layout
        self.name, self.attributes = name, attributes
        self.shape, self.form = layout.shape, layout.form
        self.chunk_rows = layout.chunks[0] if layout.chunks else 1
        self._start = self._stop = 0
        self._band: Array = np.zeros(0)

    @property
    def rows(self) -> int:
        """The number of rows; 0 for an array without axes."""
        return self.shape[0] if self.shape else 0

    def absent(self, rows: int) -> int:
        """Count the chunks of the first `rows` rows that have no file, whose elements are the fill value.

        Of a sharded array, this counts missing shards.
        """
        layout = self._layout
        sizes = layout.chunks
        if layout.shard is not None:
            sizes = tuple(size * count for size, count in zip(sizes, layout.shard.counts, strict=True))
        shape = (min(rows, self.rows), *self.shape[1:])
        counts = [-(-length // size) for length, size in zip(shape, sizes, strict=True)]
        total = math.prod(counts)
        below = f"{self.name}/"
        there = [name for name in self._files.names if name.startswith(below)]
        if total > len(there) + 1:  # some are absent, perhaps billions: count the files instead
            return total - sum(self._is_chunk(name, counts) for name in there)
        return sum(f"{below}{layout.key(at)}" not in self._files.names for at in np.ndindex(*counts))

    def _is_chunk(self, name: str, counts: Sequence[int]) -> bool:
        parts = name.removeprefix(f"{self.name}/").removeprefix("c").replace("/", ".").split(".")
        numbers = [part for part in parts if part]
        if len(numbers) != len(counts) or not all(part.isdecimal() and len(part) < 19 for part in numbers):
            return False
        at = tuple(map(int, numbers))
        inside = all(one < count for one, count in zip(at, counts, strict=True))
        return inside and name == f"{self.name}/{self._layout.key(at)}"

    def read(self, start: int, stop: int) -> Array:
        """Read rows `[start, stop)` as a fresh array; ascending reads decode each band once."""
        found = np.empty((stop - start, *self.shape[1:]), self.form.dtype)
        at = start
        while at < stop:
            if not self._start <= at < self._stop:
                number = at // self.chunk_rows
                self._band = self._rows_of(number)
                self._start = number * self.chunk_rows
                self._stop = self._start + len(self._band)
            end = min(stop, self._stop)
            found[at - start : end - start] = self._band[at - self._start : end - self._start]
            at = end
        return found

    def whole(self) -> Array:
        """Read all rows of a small array."""
        return self.read(0, self.rows)

    def texts(self, start: int, stop: int) -> list[str]:
        """Read rows of a `text` array as strings."""
        values = self.read(start, stop).reshape(stop - start).tolist()
        return [one.decode("utf-8", "backslashreplace") if isinstance(one, bytes) else str(one) for one in values]

    def _rows_of(self, number: int) -> Array:
        """Decode one band: the chunks at `number` along the first axis."""
        layout = self._layout
        self._start = self._stop = 0  # if a chunk cannot be read, no band is kept
        first = number * self.chunk_rows
        count = min(self.chunk_rows, self.rows - first)
        counts = [-(-length // size) for length, size in zip(self.shape[1:], layout.chunks[1:], strict=True)]
        band = np.empty((count, *self.shape[1:]), self.form.dtype)
        for rest in np.ndindex(*counts):
            at = (number, *rest)
            chunk = self._chunk(at)
            begins = [place * size for place, size in zip(rest, layout.chunks[1:], strict=True)]
            spans = tuple(slice(one, one + size) for one, size in zip(begins, layout.chunks[1:], strict=True))
            part = band[(slice(None), *spans)]
            part[...] = chunk if chunk.ndim == 0 else chunk[tuple(slice(0, size) for size in part.shape)]
        return band

    def _chunk(self, at: tuple[int, ...]) -> Array:
        layout = self._layout
        shard, where = layout.shard, at
        if shard is not None:
            where = tuple(one // count for one, count in zip(at, shard.counts, strict=True))
        name = f"{self.name}/{layout.key(where)}"
        if name not in self._files.names:
            return self._filled(name)
        size = math.prod(layout.chunks) * self.form.dtype.itemsize
        most = size + size // 4 + _ROOM if layout.exact else 16 * size + _ROOM
        most = max(most, _LARGEST_TEXT) if self.form.kind == "text" else most
        if shard is None:
            data = self._files.read(name, most)
        else:
            start, length = self._place(name, shard, at)
            if length == start == _NO_PLACE:
                return self._filled(name)
            _require_size(self._files.path, f"a chunk in {name}", length, most)
            limit = _largest_shard(shard, most)
            data = self._files.read(name, limit, start, start + length)
            if len(data) != length:
                raise CorruptDataError(
                    f"{self._files.place(name)} is cut: a chunk of {length:,} bytes is at {start:,}", hint=FETCH_AGAIN
                )
        with _reading(f"a chunk of {self.name!r}", self._files.place(name)):
            found: Any = data
            for decode in layout.decoders:
                found = decode(found, size if layout.exact else most)
            return layout.finish(found, layout.chunks)

    def _filled(self, name: str) -> Array:
        if self._layout.fill is None:
            raise CorruptDataError(
                f"{self._files.path} has no {name}, and its metadata state no fill value for missing chunks",
                hint=FETCH_AGAIN,
            )
        return np.array(self._layout.fill, self.form.dtype)

    def _place(self, name: str, shard: _Shard, at: tuple[int, ...]) -> tuple[int, int]:
        """Return the position of a chunk in its shard and its length, both in bytes."""
        index = shard.known.get(name)
        if index is None:
            size = 16 * math.prod(shard.counts) + 4 * shard.checked
            span = (-size, None) if shard.at_end else (0, size)
            most = _largest_shard(shard, LARGEST_CHUNK)
            data = self._files.read(name, most, *span)
            if len(data) != size:
                raise CorruptDataError(f"{self._files.place(name)} is cut: its index is not whole", hint=FETCH_AGAIN)
            if shard.checked:
                with _reading("the index of a shard", self._files.place(name)):
                    data = _checked_crc32c(data, size)
            index = np.frombuffer(data, f"{shard.order}u8").reshape(*shard.counts, 2)
            while len(shard.known) >= _MOST_INDEXES:
                shard.known.pop(next(iter(shard.known)))
            shard.known[name] = index
        start, length = index[tuple(one % count for one, count in zip(at, shard.counts, strict=True))].tolist()
        return int(start), int(length)


def _largest_shard(shard: _Shard, chunk: int) -> int:
    """Limit the bytes of a shard whose chunks have at most `chunk` bytes."""
    return 16 * math.prod(shard.counts) + 4 + min(LARGEST_CHUNK, chunk * math.prod(shard.counts))


# Arrays ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StoreArrays:
    """The arrays of a store, the errors of arrays with unreadable metadata, and the attributes of nodes, by name."""

    arrays: dict[str, ZarrArray] = field(default_factory=dict)
    problems: dict[str, FormatError] = field(default_factory=dict)
    attributes: dict[str, Mapping[str, Any]] = field(default_factory=dict)


def arrays_of(files: StoreFiles) -> StoreArrays:
    """Read the metadata of all nodes; FormatError for a damaged metadata file."""
    found = StoreArrays()
    # Attributes of format 2 are in a file of their own: those come first, for the array that is made of them.
    for name in sorted(files.metadata(), key=lambda name: not name.endswith(ATTRIBUTES_2)):
        node, _, file = name.rpartition("/")
        document = files.document(name)
        if file == ATTRIBUTES_2 and document:
            found.attributes[node] = document
        if file not in (ARRAY_2, NODE_3):
            continue
        if file == NODE_3:
            if document.get("node_type") not in ("array", "group"):
                raise FormatError(f"{name} in {files.path} states no node_type, array or group")
            stated = document.get("attributes")
            if stated and isinstance(stated, dict):
                found.attributes[node] = stated
            if document["node_type"] == "group":
                continue
        try:
            with _reading(f"the metadata of {node!r}", files.place(name)):
                layout = _layout_2(document) if file == ARRAY_2 else _layout_3(document)
                _require_bounded(layout)
        except FormatError as error:
            found.problems[node] = type(error)(f"{files.path}: {node!r}: {error.message}", hint=error.hint)
            continue
        found.arrays[node] = ZarrArray(files, node, found.attributes.get(node, {}), layout)
    return found


def _require_bounded(layout: _Layout) -> None:
    item = max(1, layout.form.dtype.itemsize)
    row = math.prod(layout.shape[1:]) * item
    for size, what in (
        (math.prod(layout.chunks) * item, "a chunk"),
        (row * min(layout.chunks[0], max(1, layout.shape[0])) if layout.shape else 0, "the rows of a chunk"),
    ):
        if size > LARGEST_CHUNK:
            raise FormatError(f"{what} takes {size:,} bytes, at most {LARGEST_CHUNK:,} are read")
    if layout.shard is not None and math.prod(layout.shard.counts) > 1 << 22:
        raise FormatError(f"a shard has {math.prod(layout.shard.counts):,} chunks, at most {1 << 22:,} are read")


def _sizes(value: Any, name: str, least: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(one) is int and least <= one < 1 << 62 for one in value):
        raise FormatError(f"{name} is {str(value)[:80]}, expected numbers of {least} or more")
    return tuple(value)


def _shapes(document: Mapping[str, Any], chunks: Any, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape, sizes = _sizes(document.get("shape"), "shape", 0), _sizes(chunks, name, 1)
    if len(shape) != len(sizes):
        raise FormatError(f"shape has {len(shape)} dimensions, and {name} {len(sizes)}")
    if len(shape) > 32:
        raise FormatError(f"it has {len(shape)} dimensions, at most 32 are read")
    return shape, sizes


_TYPE_2 = re.compile(r"[<>|=]?[?biufcmMSUVO]\d{0,12}(\[\w+\])?", re.ASCII)
_PICKLED = frozenset({"pickle", "json2", "msgpack2", "categorize"})
_OBJECTS = "it holds Python objects, which are never read"


def _layout_2(document: Mapping[str, Any]) -> _Layout:
    """Make the layout of an array from its `.zarray`, format 2."""
    if document.get("zarr_format") != 2:
        raise FormatError(f"zarr_format is {document.get('zarr_format')!r}, expected 2")
    shape, chunks = _shapes(document, document.get("chunks"), "chunks")
    stated = [document.get("compressor"), *reversed(document.get("filters") or [])]
    codecs = [one for one in stated if one is not None]
    form, is_strings = _form_2(document.get("dtype"), codecs)
    order = document.get("order", "C")
    if order not in ("C", "F"):
        raise FormatError(f"order is {order!r}, expected C or F")
    separator = document.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise FormatError(f"dimension_separator is {separator!r}, expected . or /")
    decoders: list[Decoder] = []
    exact = True
    if form.kind != "odd":
        plain = codecs[:-1] if is_strings else codecs
        found = [_codec(str(one.get("id")) if isinstance(one, dict) else "", one) for one in plain]
        decoders, exact = [one for one, _ in found], all(one for _, one in found) and not is_strings
    stored = form.dtype if is_strings else np.dtype(document["dtype"] if form.kind != "odd" else "u1")
    return _Layout(
        shape, chunks, form, _fill_2(document.get("fill_value"), form), decoders,
        lambda at: separator.join(map(str, at)) if at else "0",
        _finish_strings if is_strings else _finish(stored, form.dtype, order), exact,
    )  # fmt: skip


def _form_2(stated: Any, codecs: Sequence[Any]) -> tuple[ZarrForm, bool]:
    """Return the form of elements of a `dtype` of format 2, and whether they are strings of variable length."""
    if not isinstance(stated, str):
        return ZarrForm("odd", np.dtype("u1"), "its elements are records"), False
    try:
        if not _TYPE_2.fullmatch(stated):
            raise TypeError("NumPy accepts names that Zarr does not have")
        dtype = np.dtype(stated)
    except TypeError:
        raise FormatError(f"dtype is {stated[:40]!r}, which Zarr does not have") from None
    if dtype.hasobject:
        last = codecs[-1].get("id") if codecs and isinstance(codecs[-1], dict) else None
        if last == "vlen-utf8":
            return ZarrForm("text", dtype), True
        return ZarrForm("odd", np.dtype("u1"), _OBJECTS), False
    if any(isinstance(one, dict) and one.get("id") in _PICKLED for one in codecs):
        return ZarrForm("odd", np.dtype("u1"), _OBJECTS), False
    return _form_of(dtype), False


def _form_of(dtype: np.dtype[Any]) -> ZarrForm:
    if dtype.kind in "US" and dtype.itemsize:
        return ZarrForm("text", dtype.newbyteorder("="))
    try:
        dtype_name(dtype)
    except SchemaError as error:
        return ZarrForm("odd", np.dtype("u1"), f"its {error.message.partition(';')[0]}")
    return ZarrForm("number", dtype.newbyteorder("="))


def _fill_2(value: Any, form: ZarrForm) -> Any:
    if value is None or form.kind == "odd":
        return None
    if form.dtype.kind == "S" and isinstance(value, str):
        return base64.standard_b64decode(value)
    return _fill(value, form)


def _fill(value: Any, form: ZarrForm) -> Any:
    """Return the value of chunks that are not stored; FormatError for a value that the element type cannot hold."""
    kind = form.dtype.kind
    if form.kind == "text":
        return "" if value in (0, None) else str(value)
    if kind == "c" and isinstance(value, list) and len(value) == 2:
        value = complex(*(float(one) for one in value))
    if isinstance(value, str):
        if value.startswith(("0x", "0b")) and form.dtype.itemsize <= 8:
            bits = np.array(int(value, 0), f"u{form.dtype.itemsize}")
            return bits.view(form.dtype)[()]
        if value in ("NaN", "Infinity", "-Infinity") and kind in "fc":
            return float(value.replace("Infinity", "inf"))
        raise FormatError(f"fill_value is {value[:40]!r}, expected a value of type {form.dtype}")
    if not isinstance(value, int | float | complex):
        raise FormatError(f"fill_value is {str(value)[:40]}, expected a value of type {form.dtype}")
    if np.array(value).astype(form.dtype) != value and value == value and kind not in "fc":
        raise FormatError(f"fill_value is {value}, expected a value of type {form.dtype}")
    return value


def _finish(stored: np.dtype[Any], native: np.dtype[Any], letter: Any) -> Callable[[Any, tuple[int, ...]], Array]:
    """Return a function that makes an array of the bytes of a chunk; `letter` is the memory order, `C` or `F`."""

    def made(found: Any, shape: tuple[int, ...]) -> Array:
        flat = _flat(found)
        if flat.nbytes != math.prod(shape) * stored.itemsize:
            raise ValueError(f"it has {flat.nbytes:,} bytes, expected {math.prod(shape) * stored.itemsize:,}")
        array: Array = flat.view(stored).reshape(shape, order=letter)
        return array.astype(native, copy=False)

    return made


def _flat(found: Any) -> Array:
    """Return bytes or an array as bytes, uint8 `[n]`."""
    if isinstance(found, np.ndarray):
        return np.ascontiguousarray(found).reshape(-1).view(np.uint8)
    return np.frombuffer(found, np.uint8)


def _finish_strings(found: Any, shape: tuple[int, ...]) -> Array:
    """Make an array of strings from vlen-utf8: the number of strings, then the length and the bytes of each."""
    count = math.prod(shape)
    data = bytes(_flat(found))
    if len(data) < 4 or struct.unpack_from("<I", data)[0] != count:
        raise ValueError(f"it does not have {count:,} strings")
    at, values = 4, []
    for _ in range(count):
        (length,) = struct.unpack_from("<I", data, at)
        text = data[at + 4 : at + 4 + length]
        if len(text) != length:
            raise ValueError("its strings are cut")
        values.append(text.decode())
        at += 4 + length
    made = np.empty(count, object)
    made[:] = values
    return made.reshape(shape)


def _layout_3(document: Mapping[str, Any]) -> _Layout:
    """Make the layout of an array from its `zarr.json`, format 3."""
    if document.get("zarr_format") != 3:
        raise FormatError(f"zarr_format is {document.get('zarr_format')!r}, expected 3")
    if document.get("storage_transformers"):
        raise FormatError("it has storage transformers, which rbtool does not support")
    grid, keys = (_named(document.get(name), name) for name in ("chunk_grid", "chunk_key_encoding"))
    if grid[0] != "regular":
        raise FormatError(f"chunk_grid is {grid[0]!r}, expected regular")
    shape, outer = _shapes(document, grid[1].get("chunk_shape"), "chunk_shape")
    form, is_strings = _form_3(document.get("data_type"))
    codecs = [_named(one, "codecs") for one in document.get("codecs") or []]
    shard, chunks = None, outer
    if any(name == "sharding_indexed" for name, _ in codecs):
        if len(codecs) > 1:
            raise FormatError("it has codecs beside sharding_indexed, which rbtool does not support")
        shard, chunks, codecs = _shard(outer, codecs[0][1])
    found = _Chain(form, is_strings)
    if form.kind != "odd":
        for name, settings in codecs:
            found.add(name, settings, len(shape))
        found.require_bytes()
    fill = None if form.kind == "odd" else _fill(document.get("fill_value"), form)
    return _Layout(
        shape, chunks, form, fill, found.decoders, _keys_3(*keys), found.finish, found.exact, shard
    )  # fmt: skip


def _named(value: Any, what: str) -> tuple[str, Mapping[str, Any]]:
    """Return name and configuration of an extension point of format 3: a data type, grid, key encoding or codec."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        settings = value.get("configuration") or {}
        if isinstance(settings, dict):
            return value["name"], settings
    raise FormatError(f"{what} is {str(value)[:80]}, expected a name and settings")


def _keys_3(name: str, settings: Mapping[str, Any]) -> Callable[[tuple[int, ...]], str]:
    separator = settings.get("separator", "/" if name == "default" else ".")
    if name not in ("default", "v2") or separator not in (".", "/"):
        raise FormatError(f"chunk_key_encoding is {name!r} with {separator!r}, expected default or v2")
    if name == "default":
        return lambda at: separator.join(("c", *map(str, at)))
    return lambda at: separator.join(map(str, at)) if at else "0"


_TYPE_3 = re.compile("bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)", re.ASCII)
_TEXT_3 = {"fixed_length_utf32": "<U", "null_terminated_bytes": "S", "fixed_length_ascii": "S"}


def _form_3(stated: Any) -> tuple[ZarrForm, bool]:
    name, settings = _named(stated, "data_type")
    if name == "string":
        return ZarrForm("text", np.dtype(object)), True
    if name in _TEXT_3:
        size = settings.get("length_bytes")
        if type(size) is not int or not 0 < size < 1 << 20 or (name == "fixed_length_utf32" and size % 4):
            raise FormatError(f"data_type is {name} of {size} bytes")
        kind = _TEXT_3[name]
        return _form_of(np.dtype(f"{kind}{size // 4 if kind == '<U' else size}")), False
    try:
        if not _TYPE_3.fullmatch(name):
            raise TypeError("it is not a number")
        return _form_of(np.dtype(name)), False
    except TypeError:
        return ZarrForm("odd", np.dtype("u1"), f"its elements are {name[:40]}"), False


def _shard(outer: tuple[int, ...], settings: Mapping[str, Any]) -> tuple[_Shard, tuple[int, ...], list[Any]]:
    inner = _sizes(settings.get("chunk_shape"), "chunk_shape of a shard", 1)
    if len(inner) != len(outer) or any(one % other for one, other in zip(outer, inner, strict=False)):
        raise FormatError(f"shards of {list(outer)} cannot have chunks of {list(inner)}")
    codecs = [_named(one, "codecs") for one in settings.get("codecs") or []]
    if any(name == "sharding_indexed" for name, _ in codecs):
        raise FormatError("it has shards in shards, which rbtool does not support")
    index = [_named(one, "index_codecs") for one in settings.get("index_codecs") or []]
    names, where = [name for name, _ in index], settings.get("index_location", "end")
    if names not in (["bytes"], ["bytes", "crc32c"]) or where not in ("start", "end"):
        raise FormatError(f"the index of shards has the codecs {names} at the {where}, which rbtool does not support")
    order = ">" if index[0][1].get("endian") == "big" else "<"
    counts = tuple(one // other for one, other in zip(outer, inner, strict=True))
    return _Shard(counts, where == "end", len(names) == 2, order), inner, codecs


class _Chain:
    """The codecs of an array of format 3, added in the order of encoding and applied in reverse to decode.

        array codecs, such as transpose  ->  `bytes` or `vlen-utf8`  ->  codecs of bytes, such as zstd
        `_axes`, `_arrays`                   `_bytes`                    `_packed`

    `exact` states whether every codec keeps the size, so that the bytes of a chunk have one possible length.
    """

    def __init__(self, form: ZarrForm, is_strings: bool) -> None:
        self._form, self._is_strings = form, is_strings
        self._bytes: np.dtype[Any] | None = None
        self._axes: list[tuple[int, ...]] = []
        self._arrays: list[Decoder] = []
        self._packed: list[Decoder] = []
        self.exact = not is_strings

    @property
    def decoders(self) -> list[Decoder]:
        """The decoders from the bytes of a chunk's file to the bytes of its elements."""
        return [*reversed(self._packed)]

    def add(self, name: str, settings: Mapping[str, Any], dimensions: int) -> None:
        """Add the next codec in the order of encoding."""
        if name == "transpose" and self._bytes is None:
            order = settings.get("order")
            if not isinstance(order, list) or sorted(map(str, order)) != sorted(map(str, range(dimensions))):
                raise FormatError(f"transpose has the order {str(order)[:80]}, expected the {dimensions} dimensions")
            self._axes.append(tuple(map(int, order)))
        elif name == ("vlen-utf8" if self._is_strings else "bytes") and self._bytes is None:
            endian = settings.get("endian", "little")
            if endian not in ("little", "big"):
                raise FormatError(f"bytes has the endian {endian!r}, expected little or big")
            self._bytes = self._form.dtype.newbyteorder(">" if endian == "big" else "<")
        else:
            plain = name.removeprefix("numcodecs.")
            decode, exact = _codec(plain, {"id": plain, **settings}, version=3)
            (self._arrays if self._bytes is None else self._packed).append(decode)
            self.exact = self.exact and exact

    def require_bytes(self) -> None:
        """Raise FormatError unless a codec turns elements into bytes, in a combination that `finish` can decode."""
        if self._bytes is None:
            raise FormatError("its codecs do not include bytes")
        if self._arrays and self._axes:
            raise FormatError("it combines transpose with other codecs of arrays, which rbtool does not support")
        if self._arrays and not self._bytes.isnative:
            raise FormatError("it combines big-endian bytes with codecs of arrays, which rbtool does not support")

    def finish(self, found: Any, shape: tuple[int, ...]) -> Array:
        """Make the array of a chunk from the bytes of its elements."""
        if self._is_strings:
            return _finish_strings(found, shape)
        assert self._bytes is not None
        stored = shape
        for axes in self._axes:
            stored = tuple(stored[axis] for axis in axes)
        if self._arrays:
            most = 16 * math.prod(shape) * self._form.dtype.itemsize + _ROOM
            for decode in reversed(self._arrays):
                found = decode(_flat(found), most)
            array = _finish(self._form.dtype, self._form.dtype, "C")(found, shape)
        else:
            array = _finish(self._bytes, self._form.dtype, "C")(found, stored)
        for axes in reversed(self._axes):
            array = array.transpose(np.argsort(axes))
        return array


# Codecs ------------------------------------------------------------------------------------------

_IMAGES = frozenset({"jpegxl", "jpeg", "jpeg2k", "jpegls", "jpegxr", "png", "webp", "avif", "qoi"})
"""Image codecs of imagecodecs; stores name them with the prefix `imagecodecs_`."""
_OF_ELEMENTS = frozenset({"delta", "bitround", "fixedscaleoffset", "quantize", "astype", "packbits"})
_SAME_SIZE = frozenset({"delta", "bitround", "shuffle"})
_STATED = frozenset({"blosc", "zstd", "lz4", "zlib", "bz2"})
"""Codecs that decode without their settings: the compressed bytes contain all that is needed."""
_CHECKSUMS = frozenset({"adler32", "crc32", "jenkins_lookup3", "fletcher32"})
_KNOWN = frozenset({"blosc", "zstd", "lz4", "zlib", "gzip", "bz2", "lzma", "shuffle", "crc32c"})


def _codec(name: str, settings: Mapping[str, Any], version: int = 2) -> tuple[Decoder, bool]:
    """Return the decoder of a codec, and whether it returns exactly the size of the elements."""
    if name in _PICKLED:
        raise FormatError(f"its codec {name!r} makes Python objects, which are never read")
    image = name.removeprefix("imagecodecs_")
    known = _KNOWN | _OF_ELEMENTS | _CHECKSUMS
    if name not in known and (name == image or image not in _IMAGES):
        raise FormatError(f"its codec is {name[:60]!r}, which rbtool does not support")
    if version == 3 and name == "crc32c":
        return _checked_crc32c, False
    if name == "gzip":
        return _gunzip, True
    made = made_codec({"id": name} if name in _STATED else settings)
    if name == "blosc":
        return lambda data, most: _blosc(made, data, most), True
    if name == "zstd":
        return lambda data, most: _zstd(made, data, most), True
    if name == "lz4":
        return lambda data, most: _lz4(made, data, most), True
    if name in _UNPACKED:
        return lambda data, most: _UNPACKED[name](made, _bytes(data), most), True
    return lambda data, most: _within(made.decode(data), most), name in _SAME_SIZE or name != image


def made_codec(settings: Mapping[str, Any]) -> Any:
    """Make the codec `settings["id"]` of numcodecs or imagecodecs; FormatError if the library refuses the settings."""
    name = str(settings["id"])
    try:
        library = importlib.import_module("numcodecs")
    except ImportError as error:
        raise not_installed("Zarr stores need zarr and its numcodecs", "zarr", error) from error
    if name.startswith("imagecodecs_"):
        try:
            importlib.import_module("imagecodecs.numcodecs").register_codecs(name, verbose=False)
        except ImportError as error:
            raise not_installed(f"the codec {name} needs imagecodecs", "jpegxl", error) from error
    try:
        return library.get_codec(dict(settings))
    except Exception as error:  # of many kinds: unknown names, unknown settings, values
        said = " ".join(str(error).split())[:160]
        raise FormatError(f"its codec {name!r} cannot be made here: {said}") from error


def _bytes(data: Any) -> bytes:
    return data if isinstance(data, bytes) else bytes(_flat(data))


def _within(found: Any, most: int) -> Any:
    size = found.nbytes if isinstance(found, np.ndarray) else len(found)
    if size > most:
        raise ValueError(f"it has {size:,} bytes, at most {most:,} are expected")
    return found


def _blosc(codec: Any, data: Any, most: int) -> Any:
    """Decode with Blosc after a check of the header: Blosc trusts it, and would read or write beyond its buffers."""
    data = _bytes(data)
    if len(data) < 16:
        raise ValueError("it has no header of Blosc")
    unpacked, _, packed = struct.unpack_from("<III", data, 4)
    if packed != len(data):
        raise ValueError(f"its header states {packed:,} bytes, there are {len(data):,}")
    if unpacked > most:
        raise ValueError(f"its header states {unpacked:,} bytes, at most {most:,} are expected")
    return codec.decode(data)


def _zstd(codec: Any, data: Any, most: int) -> Any:
    data = _bytes(data)
    try:
        stated = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if stated < 0:  # the header states no size
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            found: bytes = stream.read(most + 1)
        return _bounded(found, most)
    if stated > most:
        raise ValueError(f"its header states {stated:,} bytes, at most {most:,} are expected")
    return codec.decode(data)


def _lz4(codec: Any, data: Any, most: int) -> Any:
    data = _bytes(data)
    (stated,) = struct.unpack_from("<i", data)
    if not 0 <= stated <= most:
        raise ValueError(f"its header states {stated:,} bytes, at most {most:,} are expected")
    return codec.decode(data)


def _gunzip(data: Any, most: int) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(_bytes(data))) as file:
        return _bounded(file.read(most + 1), most)


def _inflated(inflate: Any, data: bytes, most: int) -> bytes:
    found: bytes = inflate.decompress(data, most + 1)
    if not inflate.eof:
        raise ValueError(f"it is cut, or has more than {most:,} bytes")
    return found


def _unlzma(codec: Any, data: bytes, most: int) -> bytes:
    inflate = lzma.LZMADecompressor(codec.format, filters=codec.filters if codec.format == lzma.FORMAT_RAW else None)
    found = inflate.decompress(data, most + 1)
    return _bounded(found, most)


_UNPACKED: Mapping[str, Callable[[Any, bytes, int], bytes]] = {
    "zlib": lambda codec, data, most: _inflated(zlib.decompressobj(), data, most),
    "bz2": lambda codec, data, most: _inflated(bz2.BZ2Decompressor(), data, most),
    "lzma": _unlzma,
}


def _bounded(found: bytes, most: int) -> bytes:
    if len(found) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return found


def _checked_crc32c(data: Any, most: int) -> bytes:
    """Return the data without its last four bytes, their CRC-32C, if that matches; ValueError if it does not."""
    library = importlib.import_module("google_crc32c")
    whole = _bytes(data)
    if len(whole) < 4 or library.value(whole[:-4]) != int.from_bytes(whole[-4:], "little"):
        raise ValueError("its checksum does not match")
    return whole[:-4]
