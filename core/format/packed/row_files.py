"""Files of fixed-size rows that are appended to and read back, whole or in chunks compressed with zstd or LZ4."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import CorruptDataError, FormatError, UsageError
from ...ted.schema import Field, Key, key_called, unknown_field
from ..contracts import Array
from ..digest import FileRecord, Hasher, bytes_of
from ..open_files import pread_into
from ..syncing import NewFile

CODECS = ("zstd", "lz4")
_FORM = re.compile(r"(?P<name>[a-z0-9]+)(?::(?P<level>-?\d+))?")
_LEVELS = range(1, 23)
_DEFAULT_LEVEL = 3
_CHUNK_BYTES = 16 << 10
_MOST_PER_BYTE = 1 << 15
"""More than one compressed byte can stand for."""


@dataclass(frozen=True)
class RowCodec:
    """A method by name, and how hard it tries: `zstd` takes a level of 1 to 22, `lz4` (its block format) none."""

    name: str
    level: int | None = None

    @classmethod
    def parse(cls, text: str) -> RowCodec:
        """Read `zstd`, `zstd:1` to `zstd:22` or `lz4`; FormatError for anything else."""
        match = _FORM.fullmatch(text)
        if match is None or match["name"] not in CODECS or (match["name"] == "lz4" and match["level"]):
            raise FormatError(f"the codec {text!r} is unknown; known: zstd, zstd:1 to zstd:22 and lz4")
        if match["name"] == "lz4":
            return cls("lz4")
        level = int(match["level"] or _DEFAULT_LEVEL)
        if level not in _LEVELS:
            raise FormatError(f"the codec {text!r} has the level {level}; zstd has the levels 1 to {_LEVELS[-1]}")
        return cls("zstd", level)

    def __str__(self) -> str:
        return self.name if self.level is None else f"{self.name}:{self.level}"

    @staticmethod
    def chunk_rows(field: Field) -> int:
        """Rows of one chunk, about 16 KiB: a random row costs little more than itself, and small rows share a chunk."""
        return max(1, _CHUNK_BYTES // max(1, field.row_bytes))

    def compressor(self) -> Callable[[memoryview], bytes]:
        """Return what compresses one chunk after the other; not by several threads at a time, so each makes its own."""
        if self.name == "zstd":
            import zstandard

            engine = zstandard.ZstdCompressor(level=self.level or _DEFAULT_LEVEL)
            return lambda data: engine.compress(data)
        import pyarrow  # half a second, which only those wait for who chose it

        return lambda data: pyarrow.Codec("lz4_raw").compress(data, asbytes=True)

    def decompress(self, chunks: Sequence[memoryview], sizes: Sequence[int], origin: str) -> Array:
        """Decompress several chunks, whose original `sizes` in bytes are known; uint8, one after another.

        No more memory is used than these sizes, which must be possible for the chunks.

        Raises:
            CorruptDataError: a chunk cannot be read, or has another size.
        """
        if not chunks:
            return np.empty(0, np.uint8)
        for chunk, size in zip(chunks, sizes, strict=True):
            if size > len(chunk) * _MOST_PER_BYTE:
                raise CorruptDataError(
                    f"{origin} holds a chunk of {len(chunk):,} bytes, which cannot hold the {size:,} expected"
                )
        lengths = np.asarray(sizes, np.uint64)
        whole, start = np.empty(int(lengths.sum()), np.uint8), 0
        try:
            parts = _zstd_chunks(chunks, lengths) if self.name == "zstd" else _lz4_chunks(chunks, lengths)
            for part, length in zip(parts, lengths.tolist(), strict=True):
                whole[start : start + length] = np.frombuffer(part, np.uint8, length)
                start += length
        except Exception as error:  # each library raises its own
            if isinstance(error, MemoryError):
                raise
            raise CorruptDataError(f"{origin} holds a chunk that is not {self.name} data: {error}") from error
        return whole


def _zstd_chunks(chunks: Sequence[memoryview], lengths: Array) -> Iterable[Any]:
    import zstandard

    engine = zstandard.ZstdDecompressor()
    for chunk, size in zip(chunks, lengths.tolist(), strict=True):
        # zstandard takes memory for what a frame states, whatever it may put out at most.
        stated = zstandard.frame_content_size(chunk)
        if stated not in (-1, size):
            raise ValueError(f"a frame states {stated:,} bytes, expected {size:,}")
    if len(chunks) > 1 and "multi_decompress_to_buffer" in zstandard.backend_features:  # one call for all of them
        found = engine.multi_decompress_to_buffer(list(chunks), decompressed_sizes=lengths.tobytes(), threads=1)
        return (found[number] for number in range(len(found)))
    pairs = zip(chunks, lengths.tolist(), strict=True)
    return [engine.decompress(chunk, max_output_size=max(size, 1), allow_extra_data=False) for chunk, size in pairs]


def _lz4_chunks(chunks: Sequence[memoryview], lengths: Array) -> Iterable[Any]:
    import pyarrow

    codec = pyarrow.Codec("lz4_raw")
    pairs = zip(chunks, lengths.tolist(), strict=True)
    return (codec.decompress(pyarrow.py_buffer(chunk), decompressed_size=size) for chunk, size in pairs)


def parse_codecs(asked: Sequence[str], fields: Sequence[Field]) -> Mapping[Key, RowCodec]:
    """Read options such as `observation.image=zstd:3`; UsageError for fields that do not exist and unknown methods."""
    codecs: dict[Key, RowCodec] = {}
    for name, codec in named_codecs(asked).items():
        key = key_called(name, [field.key for field in fields])
        if key is None:
            raise unknown_field(name, [field.name for field in fields])
        codecs[key] = codec
    return codecs


def named_codecs(asked: Sequence[str]) -> Mapping[str, RowCodec]:
    """Read `observation.image=zstd:3` and its like while it is not known which fields there are; UsageError."""
    found: dict[str, RowCodec] = {}
    for text in asked:
        name, sign, method = text.partition("=")
        if not sign:
            raise UsageError(f"--compress {text!r} names no method", hint="write it like observation.image=zstd:3")
        if name in found:
            raise UsageError(f"--compress names the field {name!r} twice")
        try:
            found[name] = RowCodec.parse(method)
        except FormatError as error:
            raise UsageError(f"--compress {text!r}: {error}") from error
    return found


def pread_bytes(descriptor: int, path: Path, offset: int, size: int) -> Array:
    """Read bytes into a fresh array; CorruptDataError where the file ends before."""
    found = np.empty(size, np.uint8)
    pread_into(found, descriptor, path, offset, "the rows to read")
    return found


def read_chunks(
    descriptor: int, path: Path, codec: RowCodec, offsets: Array, rows: tuple[int, int], layout: tuple[int, int, int]
) -> Array:
    """Read `rows` (first and stop) out of compressed chunks, which begin at `offsets`; uint8 `[n, row bytes]`.

    `layout` is the rows of a chunk, the bytes of a row, and how many rows there are in all.
    """
    (start, stop), (per, width, total) = rows, layout
    first, last = start // per, (stop - 1) // per
    origin, end = int(offsets[first]), int(offsets[last + 1])
    data = memoryview(pread_bytes(descriptor, path, origin, end - origin).data) if end > origin else memoryview(b"")
    bounds = (offsets[first : last + 2] - offsets[first]).tolist()
    chunks = [data[low:high] for low, high in pairwise(bounds)]
    sizes = [(min(total, (number + 1) * per) - number * per) * width for number in range(first, last + 1)]
    found = codec.decompress(chunks, sizes, str(path)).reshape(-1, width)
    return found[start - first * per : stop - first * per]


class AppendedFile(NewFile):
    """A file that grows at its end, with the digest of what is in it."""

    def __init__(self, folder: Path, name: str, resumed: FileRecord | None = None) -> None:
        super().__init__(folder / name, resumed)
        self.name = name
        self._since = Hasher()
        self._cut = self.size

    def append(self, data: memoryview) -> None:
        self._since.update(data)
        super().append(data)

    def cut(self) -> str:
        """Return the digest of what was appended since the last cut, or nothing if nothing was."""
        digest = self._since.digest if self.size > self._cut else ""
        self._since, self._cut = Hasher(), self.size
        return digest

    @property
    def record(self) -> FileRecord:
        """What is written so far, as a manifest lists it."""
        return FileRecord(self.name, self.size, self.digest)

    def finish(self) -> FileRecord:
        """Sync and close; return the file as a manifest lists it."""
        self.complete()
        return self.record


class StoreState(NamedTuple):
    """The rows of a store at some point: their number, its files, and the bytes of those that are held back."""

    rows: int
    files: tuple[FileRecord, ...]
    held: bytes = b""


class RowStore(ABC):
    """Takes rows of `width` bytes in order, after the rows of the state `resumed`, which it verifies."""

    def __init__(self, width: int, resumed: StoreState | None = None) -> None:
        self.width = width
        self.rows = resumed.rows if resumed else 0

    @abstractmethod
    def append(self, rows: Array) -> None:
        """Append rows of any shape and type that have `width` bytes each."""

    @abstractmethod
    def read(self, start: int, stop: int) -> Array:
        """Read rows that were appended; uint8 `[n, width]`."""

    @abstractmethod
    def flush(self) -> None:
        """Write out what is held back, so that the rows until now can be read from the disk."""

    @property
    @abstractmethod
    def files(self) -> list[AppendedFile]:
        """What is written to."""

    @property
    def state(self) -> StoreState:
        """What another store continues from."""
        return StoreState(self.rows, tuple(file.record for file in self.files))

    def finish(self) -> list[FileRecord]:
        """Sync and close; return the files as a manifest lists them."""
        self.flush()
        return [file.finish() for file in self.files]

    def close(self) -> None:
        """Close the descriptors; harmless when closed already."""
        for file in self.files:
            file.close()


class WholeRows(RowStore):
    """Uncompressed rows, one after another."""

    def __init__(self, folder: Path, name: str, width: int, resumed: StoreState | None = None) -> None:
        super().__init__(width, resumed)
        self._file = AppendedFile(folder, name, resumed.files[0] if resumed else None)

    @property
    def files(self) -> list[AppendedFile]:
        return [self._file]

    def append(self, rows: Array) -> None:
        self.rows += len(rows)
        if rows.size:
            self._file.append(bytes_of(rows))

    def read(self, start: int, stop: int) -> Array:
        found = pread_bytes(self._file.descriptor, self._file.path, start * self.width, (stop - start) * self.width)
        return found.reshape(stop - start, self.width)

    def flush(self) -> None:
        """Nothing is held back."""


class ChunkedRows(RowStore):
    """Rows in compressed chunks of `per` rows, with a file of the offsets at which chunks begin and the last ends."""

    def __init__(
        self, folder: Path, name: str, index: str, width: int, codec: RowCodec, per: int,
        resumed: StoreState | None = None,
    ) -> None:  # fmt: skip
        super().__init__(width, resumed)
        self._codec = codec
        self._compress = codec.compressor()
        self._per = per
        data, offsets = resumed.files if resumed else (None, None)
        self._data = AppendedFile(folder, name, data)
        self._index = AppendedFile(folder, index, offsets)
        self._offsets = [0]
        self._pending: list[Array] = []
        self._held = 0
        if resumed is None:
            self._index.append(_offset(0))
        else:
            self._offsets = (
                pread_bytes(self._index.descriptor, self._index.path, 0, self._index.size).view("<u8").tolist()
            )
            self._pending = [
                np.frombuffer(resumed.held, np.uint8).reshape(resumed.rows - (len(self._offsets) - 1) * per, width)
            ]
            self._held = len(self._pending[0])

    @property
    def files(self) -> list[AppendedFile]:
        return [self._data, self._index]

    @property
    def state(self) -> StoreState:
        """What another store continues from, with less than a chunk of rows that are held back."""
        return super().state._replace(held=b"".join(rows.tobytes() for rows in self._pending))

    def append(self, rows: Array) -> None:
        self.rows += len(rows)
        rows = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8).reshape(-1, self.width)
        self._pending.append(rows.copy())
        self._held += len(rows)
        if self._held >= self._per:
            held = np.concatenate(self._pending)
            whole = len(held) - len(held) % self._per
            for start in range(0, whole, self._per):
                self._put(held[start : start + self._per])
            self._pending, self._held = [held[whole:]], len(held) - whole

    def _put(self, rows: Array) -> None:
        data = self._compress(memoryview(rows.reshape(-1).data))
        self._data.append(memoryview(data))
        self._offsets.append(self._data.size)
        self._index.append(_offset(self._data.size))

    def read(self, start: int, stop: int) -> Array:
        written = self.rows - self._held
        parts = [np.concatenate(self._pending)[max(0, start - written) : stop - written]] if stop > written else []
        if start < written:
            span, layout = (start, min(stop, written)), (self._per, self.width, written)
            offsets = np.array(self._offsets, np.int64)
            data = read_chunks(self._data.descriptor, self._data.path, self._codec, offsets, span, layout)
            parts.insert(0, data)
        return np.concatenate(parts) if parts else np.empty((0, self.width), np.uint8)

    def flush(self) -> None:
        """Write the last chunk, which may have fewer rows."""
        if self._held:
            self._put(np.concatenate(self._pending))
            self._pending, self._held = [], 0


def _offset(offset: int) -> memoryview:
    return memoryview(np.array([offset], "<u8").tobytes())
