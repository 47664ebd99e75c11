"""Layout `h5`: a checkpoint in one HDF5 file, with one dataset for each leaf, and the manifest in front.

The manifest is text in the user block of the file. HDF5 looks for its signature at byte 0, 512, 1024, 2048, … and
ignores all bytes before it, so that the manifest can be read without h5py, whose import takes 100 ms.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CorruptDataError, FormatError, RbtoolError, SchemaError, UsageError
from ..format import fs
from ..format.contracts import Array, StepReader
from ..format.documents import parse_json
from ..format.episodes import COLUMNS, FINAL, SCORE, EpisodeTable, column_types, episode_text_bytes, parse_episode_text
from ..format.files import FileRecord, digest_bytes, open_regular
from ..format.manifest import Manifest, is_canonical
from ..format.open_files import MappedWindow, OpenedReader, OpenFiles, changed, digest_mapped
from ..format.staging import is_ours, mend
from ..format.syncing import sync_file
from ..progress import Progress
from ..ted.schema import DTYPES, Field, Key, file_stem, key_from_stem
from .compact import (
    EXPLICIT_EPISODES,
    CompactLayout,
    CompactReader,
    FilledStorage,
    LeafSink,
    require_ascending,
    states_in_place,
    with_ends,
    write_compact,
)
from .output_files import Blocks, LatchedFile, Stream

if TYPE_CHECKING:
    import h5py

DATA = "data"
"""The name by which the manifest lists everything after the user block."""
EPISODES = "episodes"
TEXT = "episodes_text"
SOURCE = "source"
STORAGE = "storage"


def h5_path(place: Key) -> str:
    """Return the name of a leaf in the file; keys are escaped, so that none can point into another group."""
    return "/".join(map(file_stem, place))


HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_END_OF_FILE = {0: 40, 1: 44, 2: 28, 3: 28}
"""The offset in a header at which the size of the file is stored, by version. h5py writes addresses of 8 bytes."""
_HEADER = 52
_SMALLEST = 512
_ROOM = 1024
_FOR_PROVENANCE = 8192


def block_size(manifest: Manifest) -> int:
    """Return the size of a user block for this manifest, and for the same manifest with other digests and counts.

    HDF5 writes this size into its data. For equal data to have equal digests, the size therefore depends only on
    entries of the manifest that describe the data. Room of a fixed size is added for the provenance, unless that is
    longer.
    """
    needed = max(
        2 * len(replace(manifest, provenance=()).to_bytes()) + _FOR_PROVENANCE, len(manifest.to_bytes()) + _ROOM
    )
    return 1 << (needed - 1).bit_length()


def block_bytes(manifest: Manifest, size: int) -> bytes:
    """Return the whole block: the manifest, padded with spaces."""
    text = manifest.to_bytes()
    if len(text) > size:
        raise SchemaError(f"a manifest of {len(text):,} bytes does not fit into a user block of {size:,}")
    return text.ljust(size, b" ")


def read_block(path: Path, place: Path | None = None) -> tuple[Manifest, int]:
    """Read the manifest of an H5 checkpoint without HDF5; return it with the size of the block.

    Args:
        path: the file's name in messages.
        place: the file to open; default `path`.

    Raises:
        FormatError: rbtool did not write the file.
        CorruptDataError: the file is damaged.
    """
    block = _read(path, place or path)
    return Manifest.from_dict(parse_json(block, str(path)), str(path)), len(block)


def verify_block(path: Path, place: Path | None = None) -> None:
    """Raise CorruptDataError unless the block is byte for byte as it was written."""
    block = _read(path, place or path)
    text = block.rstrip(b" ")
    if not is_canonical(text):
        raise changed(path)


def _read(path: Path, place: Path) -> bytes:
    start = data_start(place)
    if not is_ours(place):
        if start is not None:
            _require_readable(path)
        what = "an HDF5 file not written by rbtool" if start is not None else "not a dataset or checkpoint"
        raise FormatError(f"{path} is {what}")
    if start is None:
        raise CorruptDataError(f"{path} begins with a manifest, but no HDF5 data follow: it was cut or overwritten")
    with os.fdopen(open_regular(place), "rb") as file:
        return file.read(start)


def _require_readable(path: Path) -> None:
    """Raise CorruptDataError for a truncated HDF5 file, whose manifest may be missing for this reason."""
    from .hdf5_files import root_members  # imports h5py, which is not needed for files with a manifest

    try:
        root_members(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise CorruptDataError(f"{path}: HDF5 cannot read the file: {error}") from error


def stated_bytes(path: Path) -> int | None:
    """Return the size of a file according to its HDF5 header; None if it does not begin with one.

    A smaller file was truncated, and libhdf5 does not open it. OSError if the file cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        head = file.read(_HEADER)
    place = (
        _END_OF_FILE.get(head[len(HDF5_SIGNATURE)])
        if len(head) == _HEADER and head.startswith(HDF5_SIGNATURE)
        else None
    )
    return None if place is None else int.from_bytes(head[place : place + 8], "little")


def begins_as_h5(path: Path) -> bool:
    """Return whether a file begins with the signature of HDF5. OSError for one that cannot be read."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(len(HDF5_SIGNATURE)) == HDF5_SIGNATURE


def data_start(path: Path) -> int | None:
    """Return the offset at which HDF5 begins."""
    size, offset = path.stat().st_size, 0
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while offset + len(HDF5_SIGNATURE) <= size:
            file.seek(offset)
            if file.read(len(HDF5_SIGNATURE)) == HDF5_SIGNATURE:
                return offset
            offset = offset * 2 or _SMALLEST
    return None


_CHUNK_BYTES = 1 << 19
_FORM = re.compile(r"(?P<method>gzip|lzf)(?::(?P<level>[1-9]))?")
_DEFAULT_LEVEL = 4
_FLAGS = {"shuffle": True, "fletcher32": False}
_KNOWN = "known: compression='gzip' or 'lzf', compression_opts=0 to 9, shuffle, fletcher32 and chunks=True"


@dataclass(frozen=True, slots=True)
class Compression:
    """How leaves are compressed in the file.

    Attributes:
        method: `gzip`, `lzf`, or None for no compression; h5py always includes both.
        level: the level of `gzip`.
        shuffle: whether bytes of equal significance are grouped before compression.
        fletcher32: whether every chunk has a checksum of HDF5.
        chunked: whether data are divided into chunks even if they are not compressed.
    """

    method: str | None = None
    level: int | None = None
    shuffle: bool = True
    fletcher32: bool = False
    chunked: bool = False

    @classmethod
    def parse(cls, text: str | None) -> Compression:
        """Read `gzip`, `gzip:1` to `gzip:9`, `lzf` or `none`; raise UsageError for anything else."""
        if text in {None, "none"}:
            return cls()
        match = _FORM.fullmatch(text or "")
        if match is None or (match["method"] == "lzf" and match["level"]):
            raise UsageError(f"--compression {text!r} is not known", hint="use gzip, gzip:1 to gzip:9, lzf or none")
        level = int(match["level"] or _DEFAULT_LEVEL) if match["method"] == "gzip" else None
        return cls(match["method"], level)

    @classmethod
    def from_h5_kwargs(cls, given: Mapping[str, Any] | None) -> Compression:
        """Convert arguments of h5py's `create_dataset`.

        These are compression, compression_opts, shuffle, fletcher32 and chunks=True. UsageError for other arguments,
        and for methods that need a plug-in of HDF5.
        """
        left = dict(given or {})
        method, level = left.pop("compression", None), left.pop("compression_opts", None)
        if type(method) is int:  # h5py's short form for a gzip level
            method, level = "gzip", method
        flags = {name: left.pop(name, default) for name, default in _FLAGS.items()}
        chunked = left.pop("chunks", None)
        odd = next((name for name, value in flags.items() if type(value) is not bool), None)
        if left or odd or chunked not in (None, True, False):
            name = min(left, default=odd or "chunks")
            value = {**flags, "chunks": chunked, **left}[name]
            raise UsageError(f"h5_kwargs has {name}={value!r}, which is unknown", hint=_KNOWN)
        if method not in {None, "gzip", "lzf"} or (method != "gzip" and level is not None):
            raise UsageError(f"h5_kwargs has compression={method!r} with compression_opts={level!r}", hint=_KNOWN)
        if method == "gzip" and (type(level or 0) is not int or not 0 <= (level or 0) <= 9):
            raise UsageError(f"h5_kwargs has compression_opts={level!r}; gzip has the levels 0 to 9", hint=_KNOWN)
        level = _DEFAULT_LEVEL if method == "gzip" and level is None else level
        return cls(method, level, chunked=bool(chunked) or flags["fletcher32"], **flags)

    def __str__(self) -> str:
        return "none" if self.method is None else self.method + (f":{self.level}" if self.level else "")

    def chunk_rows(self, leaf: Field) -> int:
        """Return the rows of a chunk: about half a megabyte."""
        return max(1, _CHUNK_BYTES // max(1, leaf.row_bytes))

    def options(self, leaf: Field, rows: int) -> dict[str, Any]:
        """Return keyword arguments for `create_dataset`; data without elements cannot have chunks."""
        if (self.method is None and not self.chunked) or not rows or not math.prod(leaf.shape):
            return {}
        chunks = (min(rows, self.chunk_rows(leaf)), *leaf.shape)
        shuffle = self.shuffle and self.method is not None
        return {
            "chunks": chunks, "compression": self.method, "compression_opts": self.level, "shuffle": shuffle,
            "fletcher32": self.fletcher32,
        }  # fmt: skip


_FILTERS = frozenset({None, "gzip", "lzf"})
"""The filters that HDF5 or h5py include; any other would be loaded as a plug-in."""

_CHUNK_CACHE = 1 << 20


class H5Source:
    """An HDF5 file that is opened at its first use, separately in every process.

    Methods raise CorruptDataError for files that `open_h5` refuses, for unknown filters, and for anything that HDF5
    cannot read.

    Args:
        path: the file's name in messages.
        place: the file to open; default `path`.
    """

    def __init__(self, path: Path, place: Path | None = None) -> None:
        self.path = path
        self._place = place or path
        self._files: dict[int, h5py.File] = {}
        self._datasets: dict[tuple[int, str], h5py.Dataset] = {}
        self._descriptors: dict[int, int] = {}

    def names(self, group: str) -> list[str]:
        """List the members of a group; empty if there is no such group."""
        with self._reading(group):
            found = self._walk(group)
            return [] if found is None else list(found)

    def has(self, name: str) -> bool:
        """Whether there is a group or a dataset of this name."""
        with self._reading(name):
            return self._walk(name) is not None

    def rows(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], start: int, stop: int) -> Array:
        """Read rows `[start, stop)` of a dataset, which must have this type and shape."""
        with self._reading(name):
            found: Array = self._dataset(name, dtype, shape)[start:stop]
            return found

    def place(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return a descriptor of the file, and the offset of a dataset's rows; None if they are in chunks."""
        with self._reading(name):
            found = self._dataset(name, dtype, shape)
            offset = found.id.get_offset() if found.chunks is None and found.id.get_storage_size() else None
            if offset is None:
                return None
            return self._descriptor, int(offset)

    def column(self, name: str, dtype: np.dtype[Any]) -> Array:
        """Read a whole dataset with one number a row."""
        with self._reading(name):
            found: Array = self._dataset(name, dtype, (self._require(name).size,))[:]
            return found

    def read_bytes(self, name: str) -> bytes:
        """Read bytes that were written as a UTF-8 string or as numbers."""
        with self._reading(name):
            found = self._require(name)
            if found.shape == () and found.dtype.kind == "S":
                return bytes(found[()])
            return bytes(self._dataset(name, np.dtype(np.uint8), (found.size,))[:])

    def close(self) -> None:
        """Close the file if this process opened it."""
        here = os.getpid()
        self._datasets = {key: dataset for key, dataset in self._datasets.items() if key[0] != here}
        descriptor = self._descriptors.pop(here, None)
        if descriptor is not None:
            os.close(descriptor)
        file = self._files.pop(here, None)
        if file is not None:
            file.close()

    @property
    def _file(self) -> h5py.File:
        # One handle for each process: after a fork, the child's copy of libhdf5's caches would be out of date.
        if os.getpid() not in self._files:
            import h5py  # imported late, because reading the manifest does not need it

            from .hdf5_files import open_h5

            access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
            access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
            access.set_file_locking(False, False)
            # For each leaf, a sequential reader needs only the chunk that it has read last.
            elements, slots, _, preemption = access.get_cache()
            access.set_cache(elements, slots, _CHUNK_CACHE, preemption)
            self._files[os.getpid()] = h5py.File(open_h5(self.path, access, self._place))
        return self._files[os.getpid()]

    @property
    def _descriptor(self) -> int:
        held = self._descriptors.get(os.getpid())
        if held is None:
            held = self._descriptors[os.getpid()] = open_regular(self._place)
        return held

    def _dataset(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> h5py.Dataset:
        held = self._datasets.get((os.getpid(), name))
        if held is None:
            held = self._datasets[os.getpid(), name] = self._require(name)
        if held.dtype != dtype or held.shape != shape:
            found, expected = f"{held.dtype} {list(held.shape)}", f"{dtype} {list(shape)}"
            raise CorruptDataError(f"{self.path}: the dataset {name} is {found}, expected {expected}")
        return held

    def _require(self, name: str) -> h5py.Dataset:
        import h5py

        found = self._walk(name)
        if not isinstance(found, h5py.Dataset):
            raise CorruptDataError(f"{self.path}: the dataset {name} is missing")
        if found.compression not in _FILTERS or found.scaleoffset is not None:
            raise CorruptDataError(f"{self.path}: the dataset {name} stores its data in a way that rbtool never writes")
        return found

    def _walk(self, name: str) -> h5py.Group | h5py.Dataset | None:
        import h5py

        found: h5py.Group | h5py.Dataset = self._file
        for part in filter(None, name.split("/")):
            if not isinstance(found, h5py.Group) or part not in found:
                return None
            found = found[part]
        return found

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except RbtoolError:
            raise
        except (OSError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{self.path}: HDF5 cannot read {name or 'the file'}: {error}") from error


class H5Reader(CompactReader, OpenedReader):
    """Reads the TED rows of a checkpoint in layout `h5`."""

    serves_threads = True  # libhdf5 serves one thread at a time, but contiguous rows are read without it

    def __init__(self, path: Path, files: OpenFiles | None = None) -> None:
        mend(path)
        self.path = path
        self.files = files or OpenFiles(path.parent)
        place = self.files.place(path.name)
        self.manifest, self._block = read_block(path, place)
        if self.manifest.layout != "h5" or [file.path for file in self.manifest.files] != [DATA]:
            raise FormatError(f"{path} has layout {self.manifest.layout}, expected h5")
        self._check_size()
        self._layout = CompactLayout.of(self.fields, "h5")
        self._source = H5Source(path, place)
        self._window = MappedWindow()

    @cached_property
    def episodes(self) -> EpisodeTable:
        count = self.manifest.episodes
        columns = {}
        stored = self._names(EPISODES)
        later = {name: "uint8" if name == FINAL else "float64" for name in stored if name.startswith((FINAL, SCORE))}
        for name, dtype in (COLUMNS | later).items():
            place = f"{EPISODES}/{name}"
            columns[name] = self._source.rows(place, DTYPES[dtype], (count,), 0, count)
            self._check_part(place, columns[name].tobytes())
        return EpisodeTable.from_columns(columns)

    @cached_property
    def episode_text(self) -> list[dict[str, str]] | None:
        if TEXT not in self._names(""):
            return None
        return parse_episode_text(self._read_part(TEXT), f"{self.path}/{TEXT}")

    def documents(self) -> dict[str, bytes]:
        return {key_from_stem(stem): self._read_part(f"{SOURCE}/{stem}") for stem in self._names(SOURCE)}

    def verify_files(self) -> None:
        """Compare all data with their digest, and the manifest with its canonical form."""
        self._check_size()
        verify_block(self.path, self.files.place(self.path.name))
        descriptor = self.files.descriptor(self.path.name)
        if digest_mapped(descriptor, self.path, self._block) != self.manifest.files[0].digest:
            raise changed(self.path)

    def close(self) -> None:
        self._window.close()
        self._source.close()
        self.files.close()

    @cached_property
    def filled(self) -> FilledStorage:
        """The storage that these rows filled."""
        if STORAGE not in self._names(""):
            return FilledStorage.of_dataset(self.manifest.steps)
        origin = f"{self.path}/{STORAGE}"
        return FilledStorage.from_document(parse_json(self._read_part(STORAGE), origin), self.manifest.steps, origin)

    def _is_stored(self, leaf: Field) -> bool:
        return self._source.has(h5_path(leaf.key))

    @cached_property
    def _explicit(self) -> Array:
        name = h5_path(EXPLICIT_EPISODES.key)
        if name not in self._source.names(""):
            return np.empty(0, np.int64)
        explicit = self._source.column(name, EXPLICIT_EPISODES.numpy)
        return require_ascending(explicit, self.manifest.episodes, f"{self.path}/{name}")

    def _fetch(self, leaf: Field, start: int, stop: int) -> Array:
        if not leaf.row_bytes:
            return np.empty((stop - start, *leaf.shape), leaf.numpy)
        return self._source.rows(h5_path(leaf.key), leaf.numpy, (self._rows[leaf.key], *leaf.shape), start, stop)

    def _view(self, leaf: Field, start: int, stop: int) -> Array:
        shape = (self._rows[leaf.key], *leaf.shape)
        place = self._source.place(h5_path(leaf.key), leaf.numpy, shape) if leaf.row_bytes else None
        if place is None:
            return self._fetch(leaf, start, stop)
        return self._window.rows(place, self.path, leaf, start, stop)

    @cached_property
    def _parts(self) -> dict[str, FileRecord]:
        return {part.path: part for part in self.manifest.parts}

    def _names(self, group: str) -> list[str]:
        """List the small parts in a group: from the manifest, or from HDF5 for older files, which do not list them."""
        if not self._parts:
            return self._source.names(group)
        prefix = f"{group}/" if group else ""
        inside = (name.removeprefix(prefix) for name in self._parts if name.startswith(prefix))
        return [name for name in inside if "/" not in name]

    def _read_part(self, name: str) -> bytes:
        data = self._source.read_bytes(name)
        self._check_part(name, data)
        return data

    def _check_part(self, name: str, data: bytes) -> None:
        """Raise CorruptDataError unless a small part has the digest recorded in the manifest."""
        part = self._parts.get(name)
        if part is None and self._parts:
            raise CorruptDataError(f"{self.path}/{name} is missing in the manifest")
        if part is not None and digest_bytes(data) != part.digest:
            raise changed(self.path / name)

    def _check_size(self) -> None:
        expected, found = self._block + self.manifest.files[0].size, self.files.size(self.path.name) or 0
        if found != expected:
            raise CorruptDataError(f"{self.path} has {found:,} bytes, the manifest states {expected:,}: it was cut")


class H5Sink(LeafSink):
    """Writes one leaf after another to an HDF5 file.

    Rows of contiguous datasets are written directly to their place in the file, by background threads. Chunks are
    written by libhdf5 through a `LatchedFile`. Methods raise the failures of earlier writes. Leaving the context waits
    for background writes.
    """

    def __init__(self, h5: h5py.File, file: LatchedFile, compression: Compression) -> None:
        self._h5 = h5
        self._file = file
        self._compression = compression
        self._chunked: _Chunks | None = None
        self._blocks = Blocks()

    def create(self, leaf: Field, rows: int) -> None:
        """Create the dataset of a leaf, to which rows are appended from now on."""
        options = self._compression.options(leaf, rows) or {"dcpl": allocated_at_once()}
        chunked = "chunks" in options
        dataset = self._create(h5_path(leaf.key), shape=(rows, *leaf.shape), dtype=leaf.numpy, **options)
        self._flush()
        self._chunked = _Chunks(dataset, self._compression.chunk_rows(leaf), leaf) if chunked else None
        offset = None if chunked else dataset.id.get_offset()
        self._blocks.begin(None if offset is None else _FilePlace(self._file, int(offset)))

    def append(self, leaf: Field, rows: Array) -> None:
        """Append rows to the leaf created last."""
        if self._chunked is None:
            self._blocks.append(rows)
        elif leaf.row_bytes:
            self._chunked.append(rows)
            self._file.check()

    def append_states(self, leaf: Field, root: Array, after: Array, ends: Array) -> None:
        """Append the rows of `with_ends` to the leaf created last."""
        if self._chunked is None:
            states_in_place(self._blocks, root, after, ends)
        else:
            self.append(leaf, with_ends(root, after, ends))

    def put_array(self, name: str, array: Array) -> None:
        """Write a whole array at once."""
        self._create(name, data=array)

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write bytes: as a UTF-8 string if possible, otherwise as numbers."""
        try:
            text = bool(data.decode()) and b"\0" not in data
        except UnicodeDecodeError:
            text = False
        if text:
            import h5py

            self._create(name, data=data, dtype=h5py.string_dtype("utf-8", len(data)))
        else:
            self._create(name, data=np.frombuffer(data, np.uint8))

    def finish(self) -> None:
        """Write the rows that are still in buffers."""
        self._flush()
        self._blocks.finish()

    def _flush(self) -> None:
        if self._chunked is not None:
            self._chunked.flush()
            self._file.check()

    def _create(self, name: str, **options: Any) -> h5py.Dataset:
        with fs.announced("h5 dataset", f"{self._file.path}/{name}"):
            dataset = self._h5.create_dataset(name, **options)
            self._file.check()
        return dataset

    def __enter__(self) -> H5Sink:
        return self

    def __exit__(self, *raised: object) -> None:
        self._blocks.__exit__(None, None, None)


def allocated_at_once() -> h5py.h5p.PropDCID:
    """Return the properties of a dataset whose bytes HDF5 allocates at once, so that its place in the file is known."""
    import h5py

    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return properties


class _FilePlace(Stream):
    """The part of the file that holds the rows of a contiguous dataset."""

    def __init__(self, file: LatchedFile, offset: int) -> None:
        self._file = file
        self._offset = offset

    def write(self, parts: list[memoryview]) -> None:
        fs.write_parts(self._file.descriptor, parts, self._file.path, self._offset)
        self._offset += sum(map(len, parts))

    def finish(self) -> None:
        """Sync the rows, while the rows of the next dataset are being read."""
        sync_file(self._file.descriptor, self._file.path)


class _Chunks:
    """Collects rows until a chunk is complete, so that each chunk is compressed and written once."""

    def __init__(self, dataset: h5py.Dataset, batch: int, leaf: Field) -> None:
        self._dataset = dataset
        self._batch = batch
        self._gathered = np.empty((batch, *leaf.shape), leaf.numpy)
        self._count = 0
        self._written = 0

    def append(self, rows: Array) -> None:
        while len(rows):
            if self._count == 0 and len(rows) >= self._batch:
                whole = len(rows) // self._batch * self._batch
                self._put(rows[:whole])
            else:
                whole = min(self._batch - self._count, len(rows))
                self._gathered[self._count : self._count + whole] = rows[:whole]
                self._count += whole
                if self._count == self._batch:
                    self.flush()
            rows = rows[whole:]

    def flush(self) -> None:
        if self._count:
            self._put(self._gathered[: self._count])
            self._count = 0

    def _put(self, rows: Array) -> None:
        self._dataset[self._written : self._written + len(rows)] = rows
        self._written += len(rows)


Seal = Callable[[FileRecord, int, tuple[FileRecord, ...]], Manifest]
"""Makes the manifest, given the record of the data, the number of explicit episodes, and the records of small parts."""


def write_h5(
    source: StepReader,
    path: Path,
    compression: Compression,
    filled: FilledStorage,
    seal: Seal,
    progress: Progress,
) -> Manifest:
    """Write the rows of a dataset, a checkpoint or a storage to a new file, with episode table, texts and documents.

    Args:
        source: the rows.
        path: the file.
        compression: how leaves are compressed.
        filled: the storage that the rows fill.
        seal: makes the manifest.
        progress: reports progress.
    """
    import h5py

    rest, types = _rest(source, filled), column_types(source.episodes)
    parts = tuple(FileRecord(name, len(data), digest_bytes(data)) for name, data in rest.items())
    block = block_size(seal(FileRecord(DATA, 1 << 62, "xxh3-128:" + "0" * 32), source.manifest.episodes, parts))
    with LatchedFile(path) as file:
        # Each chunk is written once as a whole, so a chunk cache would only take memory.
        with h5py.File(file, "w", userblock_size=block, rdcc_nbytes=0) as h5:
            with H5Sink(h5, file, compression) as sink:
                explicit = write_compact(source, CompactLayout.of(source.fields, "h5"), sink, progress)
                sink.finish()
            for name, data in rest.items():
                if name.startswith(f"{EPISODES}/"):
                    dtype = types.get(name.removeprefix(f"{EPISODES}/"), "float64")
                    sink.put_array(name, np.frombuffer(data, dtype))
                else:
                    sink.put_bytes(name, data)
        file.check()
        size = path.stat().st_size - block
        manifest = seal(FileRecord(DATA, size, digest_mapped(file.descriptor, path, block)), len(explicit), parts)
        fs.pwrite(file.descriptor, memoryview(block_bytes(manifest, block)), 0, path)
        sync_file(file.descriptor, path)
    return manifest


def _rest(source: StepReader, filled: FilledStorage) -> dict[str, bytes]:
    """Return the bytes of all small parts, which are everything except the rows, by name."""
    columns, types = source.episodes.columns(), column_types(source.episodes)
    rest = {
        f"{EPISODES}/{name}": np.asarray(column, types.get(name, "float64")).tobytes()
        for name, column in columns.items()
    }
    text = episode_text_bytes(source.episode_text or ())
    if text:
        rest[TEXT] = text
    rest |= {f"{SOURCE}/{file_stem(name)}": data for name, data in source.documents().items()}
    return rest | {STORAGE: filled.to_bytes()}
