"""Reads values that HDF5 files have in heaps: text and arrays of variable length, of attributes and of datasets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import h5py
from h5py import h5a, h5d, h5f, h5g, h5i, h5o

from .h5_headers import attribute_data, compact_data
from .h5_heap import is_in_heap, unit_in_heap
from .h5_open import Checked, open_checked

_BLOCK = 1 << 20


class HeapValues:
    """Values of an open file, which is opened once more for the first one in a heap.

    Damage raises one of the errors of libhdf5, `stored_columns.DAMAGED`, in bounded time.
    """

    def __init__(self, file: h5f.FileID) -> None:
        self._file = file
        self._held: Checked | None = None
        self._chunks: dict[bytes, list[tuple[int, int, int]]] = {}

    def attribute(self, group: h5g.GroupID, name: str) -> Any:
        """Read an attribute of a group of the file, as h5py gives it."""
        attribute = h5a.open(group, name.encode())
        kind, count = attribute.get_type(), attribute.get_space().get_simple_extent_npoints()
        if not is_in_heap(kind):
            return h5py.Group(group).attrs[name]
        file, data = self._opened()
        again = h5g.open(file, h5i.get_name(group))
        if unit := unit_in_heap(kind):
            for stored in attribute_data(data.read_at, h5o.get_info(again).addr, data.widths, name.encode()):
                data.require_references(stored, unit, count)
        return h5py.Group(again).attrs[name]

    def dataset(self, name: str | bytes, start: int = 0, stop: int | None = None) -> h5py.Dataset:
        """Return a dataset of which rows `[start, stop)` are safe to read, by default all."""
        file, data = self._opened()
        name = name.encode() if isinstance(name, str) else name
        dataset = h5d.open(file, name)
        kind = dataset.get_type()
        if is_in_heap(kind) and (unit := unit_in_heap(kind)):
            for stored in self._references(name, dataset, start, stop):
                data.require_references(stored, unit, len(stored) // data.reference_bytes)
        return h5py.Dataset(dataset)

    def close(self) -> None:
        """Close what was opened here."""
        if self._held is not None and self._held.file is not self._file:
            self._held.file.close()

    def _opened(self) -> Checked:
        if self._held is None:
            self._held = open_checked(self._file)
        return self._held

    def _references(self, name: bytes, dataset: h5d.DatasetID, start: int, stop: int | None) -> Iterator[bytes]:
        """Yield the references of rows, and perhaps of others; none of packed chunks, which have checksums."""
        data, made = self._opened().data, dataset.get_create_plist()
        layout, shape = made.get_layout(), dataset.shape or (1,)
        if layout == h5d.COMPACT:
            yield from compact_data(data.read_at, h5o.get_info(dataset).addr, data.widths)
        elif layout == h5d.CONTIGUOUS and dataset.get_storage_size():
            place = dataset.get_offset()
            row = data.reference_bytes * math.prod(shape[1:])
            yield from self._pieces(place + start * row, place + (shape[0] if stop is None else stop) * row)
        elif layout == h5d.CHUNKED and not made.get_nfilters():
            rows = made.get_chunk()[0]
            for first, place, size in self._chunks_of(name, dataset):
                if first + rows > start and (stop is None or first < stop):
                    yield from self._pieces(place, place + size)

    def _pieces(self, place: int, end: int) -> Iterator[bytes]:
        """Read references block by block; OSError where the file ends before."""
        data = self._opened().data
        while place < end:
            size = min(_BLOCK * data.reference_bytes, end - place)
            found = data.read_at(place - data.base, size)
            if len(found) < size:
                raise OSError(f"{size - len(found):,} bytes of it are missing")
            yield found
            place += size

    def _chunks_of(self, name: bytes, dataset: h5d.DatasetID) -> list[tuple[int, int, int]]:
        """List the first row of each chunk, where it is and how many bytes it has."""
        found = self._chunks.get(name)
        if found is None:
            found = self._chunks[name] = []

            def look(chunk: h5d.StoreInfo) -> None:
                found.append((chunk.chunk_offset[0], chunk.byte_offset, chunk.size))

            dataset.chunk_iter(look)
        return found
