"""TorchRL's H5 layout: a group a trajectory, and in it a dataset a leaf.

Put one behind the other, the groups' rows are those of the flat layout. There may be very many small datasets, so they
are made by the lowest of h5py's interfaces, and their rows written past libhdf5 into their places. Datasets to which
nothing is written, as for rows that the storage never had, get no place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..encodings.h5_layout import Compression, H5Source, begins_as_h5
from ..encodings.streams import LatchedFile
from ..errors import CorruptDataError, FormatError, SchemaError
from ..format import fs
from ..format.contracts import Array
from ..format.digest import bytes_of
from ..format.open_files import OpenFiles
from ..format.syncing import sync_file
from ..ted.schema import Field, Key, dtype_name, key_name, role_of
from .layout import STORAGE_SHAPE, Counts, StoredLeaves, TorchrlHeader, TorchrlKeys, TorchrlSink

if TYPE_CHECKING:
    import h5py

TRAJECTORY = "traj"
H5_LENGTH = "_len"


def looks_like_torchrl(path: Path) -> bool:
    """Whether a file is HDF5 in TorchRL's layout. A file of ours has a manifest in front of the HDF5 data."""
    if not begins_as_h5(path):
        return False
    from ..encodings.hdf5_files import root_members  # loads h5py, which is needed for such files alone

    try:
        return STORAGE_SHAPE in root_members(path)
    except (OSError, RuntimeError, ValueError):
        return False


class _Groups(H5Source):
    """A file of many small datasets: they are looked at, by the lowest of h5py's interfaces, and closed again."""

    def __init__(self, path: Path, place: Path) -> None:
        super().__init__(path, place)
        self._types: dict[Key, tuple[Any, np.dtype[Any], bool]] = {}

    def leaves(self, group: str) -> Iterator[tuple[Key, np.dtype[Any], tuple[int, ...], int]]:
        """Yield the key, the element type and the shape of every dataset in a group, and at which byte its rows begin.

        The byte is -1 where they lie in chunks, or nowhere yet, or are not of a type this machine has.
        """
        yield from self._inside(self._file.id, group, group, ())

    def _inside(
        self, above: Any, member: str, name: str, key: Key
    ) -> Iterator[tuple[Key, np.dtype[Any], tuple[int, ...], int]]:
        from h5py import h5d, h5g, h5o

        with self._reading(name):
            found = h5o.open(above, member.encode())
            if isinstance(found, h5d.DatasetID):
                dtype, plain = self._type_of(found, key)
                # Chunked data has no offset. What was never written has no size, and an odd offset behind a user block.
                begin = found.get_offset() if plain and found.get_storage_size() else None
                if begin is None:
                    self._require(name)
                entry = (key, dtype, tuple(found.shape), -1 if begin is None else int(begin))
            members = [part.decode() for part in found] if isinstance(found, h5g.GroupID) else []
        if isinstance(found, h5d.DatasetID):
            yield entry
        for part in members:
            yield from self._inside(found, part, f"{name}/{part}", (*key, part))

    def _type_of(self, dataset: Any, key: Key) -> tuple[np.dtype[Any], bool]:
        """Return the element type, and whether the file has its numbers just as memory has them."""
        from h5py import h5t

        found = dataset.get_type()
        held = self._types.get(key)
        if held is None or held[0] != found:
            dtype = dataset.dtype
            held = self._types[key] = (
                found,
                dtype,
                dtype.isnative and bool(found == h5t.py_create(dtype, logical=True)),
            )
        return held[1:]

    def raw(self, begin: int, rows: Array) -> None:
        """Fill an array with the bytes from one byte of the file on."""
        view = memoryview(rows.reshape(-1).view(np.uint8).data)
        while view:
            got = os.preadv(self._descriptor, [view], begin)
            if not got:
                raise CorruptDataError(f"{self.path} ends {len(view):,} bytes too early: it was cut")
            view, begin = view[got:], begin + got

    def part(self, name: str, start: int, stop: int) -> Array:
        """Read rows of a dataset."""
        with self._reading(name):
            found: h5py.Dataset = self._require(name)
            rows: Array = found[start:stop]
            return rows

    def value(self, name: str) -> Any:
        """Read a whole small dataset as a number or a list; None where there is none."""
        if not self.has(name):
            return None
        with self._reading(name):
            found = self._require(name)
            if found.size > 1 << 10:
                raise CorruptDataError(f"{self.path}: {name} has {found.size:,} values, expected one number")
            return found[()].tolist()


class H5Leaves(StoredLeaves):
    """The leaves of an HDF5 file in TorchRL's layout."""

    def __init__(self, path: Path, keys: TorchrlKeys, files: OpenFiles) -> None:
        super().__init__(path, keys, files)
        self._source = _Groups(path, files.place(path.name))
        self._begins: dict[Key, list[int]] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        value = self._source.value
        self.header = TorchrlHeader.checked(
            value(STORAGE_SHAPE), value(self.keys.is_full), value(self.keys.shift), value(H5_LENGTH), str(self.path)
        )
        names = self._source.names("")
        self._groups = _in_order([name for name in names if name.startswith(TRAJECTORY)])
        if not self._groups:
            raise CorruptDataError(f"{self.path} has no group of a trajectory")
        odd = set(names) - set(self._groups) - self.keys.names - {H5_LENGTH}
        if odd:
            raise FormatError(f"{self.path} has the entry {min(odd)!r}, which is not of TorchRL's layout")
        self._stops = self._lay_out()
        found = {key: int(stops[-1]) for key, stops in self._stops.items()}
        self._require_steps(found)
        self.ends = self._find_ends()
        counts = Counts(self.header, self.ends)
        self.states = self._choose_states(found, int(counts.states.sum()))
        for key, stops in self._stops.items():
            if not np.array_equal(np.diff(stops, prepend=0), counts.states if key in self.states else counts.steps):
                raise CorruptDataError(
                    f"{self.path}: {key_name(key)!r} gives the trajectories other lengths than the done flags"
                )

    def fetch(self, key: Key, start: int, stop: int) -> Array:
        stops, leaf = self._stops[key], self.fields[key]
        if start == stop or not leaf.row_bytes:
            return np.empty((stop - start, *leaf.shape), leaf.numpy)
        if stop > stops[-1]:
            raise CorruptDataError(f"{self.path}: {key_name(key)!r} ends {stop - int(stops[-1]):,} rows too early")
        rows = np.empty((stop - start, *leaf.shape), leaf.numpy)
        first, last = np.searchsorted(stops, (start, stop - 1), side="right").tolist()
        for number in range(first, last + 1):
            before = int(stops[number - 1]) if number else 0
            low, high = max(start, before), min(stop, int(stops[number]))
            begin, part = self._begins[key][number], rows[low - start : high - start]
            if begin >= 0:
                self._source.raw(begin + (low - before) * leaf.row_bytes, part)
            else:
                name = "/".join((self._groups[number], *key))
                part[:] = self._source.part(name, low - before, high - before)
        return rows

    def close(self) -> None:
        self._source.close()
        super().close()

    def _lay_out(self) -> dict[Key, Array]:
        """Read the shapes of all datasets; return behind which row of a leaf each trajectory ends."""
        self.fields, self._begins = {}, {}
        lengths: dict[Key, list[int]] = {}
        for group in self._groups:
            present = 0
            for key, dtype, shape, begin in self._source.leaves(group):
                name = f"{self.path}: {'/'.join((group, *key))}"
                if not shape:
                    raise FormatError(f"{name} is a single number, expected rows")
                field = Field(key, _dtype_name(dtype, name), tuple(shape[1:]), role_of(key))
                if group == self._groups[0]:
                    self.fields[key], lengths[key], self._begins[key] = field, [], []
                if self.fields.get(key) != field:
                    raise CorruptDataError(f"{name} is not like the rows of the first trajectory")
                lengths[key].append(shape[0])
                self._begins[key].append(begin)
                present += 1
            if present != len(self.fields):
                raise CorruptDataError(f"{self.path}: {group} has {present} leaves, expected {len(self.fields)}")
        return {key: np.cumsum(sizes, dtype=np.int64) for key, sizes in lengths.items()}


def _in_order(names: list[str]) -> list[str]:
    """Sort by number where all names have one: TorchRL pads it with zeros, others may not."""
    numbers = [name.rpartition("_")[2] for name in names]
    if all(number.isdecimal() for number in numbers):
        return [name for _, name in sorted(zip(map(int, numbers), names, strict=True))]
    return sorted(names)


def _dtype_name(dtype: np.dtype[Any], name: str) -> str:
    try:
        return dtype_name(dtype)
    except SchemaError as error:
        raise FormatError(f"{name}: {error}") from error


class GroupSink(TorchrlSink):
    """Writes the H5 layout into a new file."""

    def __init__(self, path: Path, compression: Compression) -> None:
        import h5py

        self._file = LatchedFile(path)
        self._compression = compression
        self._made = _Properties()
        try:
            self._h5 = h5py.File(self._file, "w", rdcc_nbytes=0)
        except BaseException:
            self._file.__exit__()
            raise

    def begin(self, leaf: Field, counts: Array) -> None:
        from h5py import h5t

        self._leaf, self._counts = leaf, counts.tolist()
        self._type = h5t.py_create(leaf.numpy, logical=True)
        self._digits = len(str(len(counts) - 1)) if len(counts) > 1 else 1
        self._number, self._row = -1, 0
        self._rows = 0  # of the dataset that is being written
        self._begin: int | None = None
        self._dataset: h5py.Dataset | None = None

    def append(self, rows: Array) -> None:
        data = bytes_of(rows)
        width, done = self._leaf.row_bytes, 0
        while done < len(rows):
            self._next(written=True)
            count = min(len(rows) - done, self._rows - self._row)
            if self._dataset is not None:
                self._dataset[self._row : self._row + count] = rows[done : done + count]
                self._file.check()
            elif self._begin is not None:
                part = data[done * width : (done + count) * width]
                fs.pwrite(self._file.descriptor, part, self._begin + self._row * width, self._file.path)
            self._row, done = self._row + count, done + count

    def skip(self, rows: int) -> None:
        while rows:
            self._next(written=False)
            count = min(rows, self._rows - self._row)
            self._row, rows = self._row + count, rows - count

    def end(self) -> None:
        """Nothing is gathered."""

    def finish(self, header: TorchrlHeader, keys: TorchrlKeys) -> None:
        """Write the four small datasets, and sync."""
        entries: dict[str, Any] = {
            H5_LENGTH: np.int64(header.length), keys.is_full: np.bool_(header.full), keys.shift: np.int64(header.shift),
            STORAGE_SHAPE: np.array(header.shape, np.int64),
        }  # fmt: skip
        for name, value in entries.items():
            with fs.announced("h5 dataset", f"{self._file.path}/{name}"):
                self._h5.create_dataset(name, data=value)
                self._file.check()
        self._h5.close()
        self._file.check()
        sync_file(self._file.descriptor, self._file.path)

    def close(self) -> None:
        self._h5.close()
        self._file.__exit__()

    def _next(self, *, written: bool) -> None:
        """Create the next dataset where this one is full; it gets a place if it is to be written to."""
        while self._row == self._rows:
            self._number, self._row = self._number + 1, 0
            self._rows = self._counts[self._number]
            name = "/".join((f"{TRAJECTORY}_{self._number:0{self._digits}d}", *self._leaf.key))
            with fs.announced("h5 dataset", f"{self._file.path}/{name}"):
                self._create(name, self._compression.options(self._leaf, self._rows), written)
                self._file.check()

    def _create(self, name: str, options: dict[str, Any], written: bool) -> None:
        shape = (self._rows, *self._leaf.shape)
        if options:
            self._dataset = self._h5.create_dataset(name, shape, self._leaf.numpy, **options)
            return
        from h5py import h5d, h5s

        encoded, made = name.encode(), self._made
        links = made.links if name.isascii() else made.unicode_links
        stored = made.placed if written else made.unplaced
        dataset = h5d.create(self._h5.id, encoded, self._type, h5s.create_simple(shape), stored, links)
        self._begin = dataset.get_offset() if written else None


class _Properties:
    """How datasets and the groups around them are made."""

    def __init__(self) -> None:
        from h5py import h5p, h5t

        from ..encodings.h5_writer import allocated_at_once

        self.placed, self.unplaced = allocated_at_once(), h5p.create(h5p.DATASET_CREATE)
        for stored in (self.placed, self.unplaced):
            stored.set_obj_track_times(False)  # the same rows are the same bytes
        self.links, self.unicode_links = (h5p.create(h5p.LINK_CREATE) for _ in range(2))
        self.unicode_links.set_char_encoding(h5t.CSET_UTF8)
        for links in (self.links, self.unicode_links):
            links.set_create_intermediate_group(True)
