"""Layout `h5`: everything in one HDF5 file, one dataset for each leaf, the manifest in front."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ..format import fs
from ..format.contracts import Array, StepReader
from ..format.digest import FileRecord, digest_bytes
from ..format.episodes import column_types, episode_text_bytes
from ..format.manifest import Manifest
from ..format.open_files import digest_mapped
from ..format.syncing import sync_file
from ..progress import Progress
from ..ted.schema import Field, file_stem
from .compact import CompactLayout, FilledStorage, LeafSink, states_in_place, write_compact
from .h5_layout import (
    DATA,
    EPISODES,
    SOURCE,
    STORAGE,
    TEXT,
    Compression,
    block_bytes,
    block_size,
    h5_path,
)
from .output_files import Blocks, LatchedFile, Stream
from .rows import with_ends


class H5Sink(LeafSink):
    """Writes one leaf after another: through libhdf5, using a file that never reports failure to it, or directly into
    place.

    Each method raises failures that happened meanwhile. Leaving the context waits for background writes.
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
        """Write bytes, as a UTF-8 string if they are one."""
        try:
            text = bool(data.decode()) and b"\0" not in data
        except UnicodeDecodeError:
            text = False
        if text:
            self._create(name, data=data, dtype=h5py.string_dtype("utf-8", len(data)))
        else:
            self._create(name, data=np.frombuffer(data, np.uint8))

    def finish(self) -> None:
        """Write what is still buffered."""
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
    """Let HDF5 allocate a dataset before anything is written to it; chunks are allocated one by one."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    return properties


class _FilePlace(Stream):
    """The place in the file where the rows of a dataset are, one after another."""

    def __init__(self, file: LatchedFile, offset: int) -> None:
        self._file = file
        self._offset = offset

    def write(self, parts: list[memoryview]) -> None:
        fs.write_parts(self._file.descriptor, parts, self._file.path, self._offset)
        self._offset += sum(map(len, parts))

    def finish(self) -> None:
        """Start syncing the rows while the rows of the next dataset are read; at the end everything is synced."""
        sync_file(self._file.descriptor, self._file.path)


class _Chunks:
    """Collects rows, so that only whole chunks are written, each once."""

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
"""Makes the manifest from the record of the data, the number of explicit episodes, and records of small parts."""


def write_h5(
    source: StepReader,
    path: Path,
    compression: Compression,
    filled: FilledStorage,
    seal: Seal,
    progress: Progress,
) -> Manifest:
    """Write the rows of a dataset, a checkpoint or a storage (`filled`), with episodes, text and documents, into a new
    file.
    """
    rest, types = _rest(source, filled), column_types(source.episodes)
    parts = tuple(FileRecord(name, len(data), digest_bytes(data)) for name, data in rest.items())
    block = block_size(seal(FileRecord(DATA, 1 << 62, "xxh3-128:" + "0" * 32), source.manifest.episodes, parts))
    with LatchedFile(path) as file:
        # Each chunk is written once as a whole, so a chunk cache would only cost memory, for every leaf.
        with h5py.File(file, "w", userblock_size=block, rdcc_nbytes=0) as h5:
            with H5Sink(h5, file, compression) as sink:
                explicit = write_compact(source, CompactLayout.of(source.fields, "h5"), sink, progress)
                sink.finish()
            for name, data in rest.items():
                if name.startswith(f"{EPISODES}/"):
                    dtype = types[name.removeprefix(f"{EPISODES}/")]
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
    """Return the bytes of everything except rows, by name."""
    columns, types = source.episodes.columns(), column_types(source.episodes)
    rest = {f"{EPISODES}/{name}": np.asarray(columns[name], dtype).tobytes() for name, dtype in types.items()}
    text = episode_text_bytes(source.episode_text or ())
    if text:
        rest[TEXT] = text
    rest |= {f"{SOURCE}/{file_stem(name)}": data for name, data in source.documents().items()}
    return rest | {STORAGE: filled.to_bytes()}
