"""Reads columns of groups in HDF5 files of other libraries, checks that files are whole, and writes exports.

Groups are read with h5py's low-level API: a dataset of a thousand episodes has ten thousand HDF5 datasets, and each
access through the high-level API takes 60 to 100 microseconds.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5g, h5i, h5o, h5s, h5t

from ...core.encodings.h5 import begins_as_h5, stated_bytes
from ...core.encodings.hdf5_files import LARGEST, HeapValues, absurd_size, members, open_h5, root_members, small_cache
from ...core.encodings.output_files import LatchedFile
from ...core.errors import CorruptDataError, FormatError, RbtoolError, SchemaError
from ...core.format import fs
from ...core.format.contracts import Array
from ...core.format.files import FETCH_AGAIN
from ...core.progress import some_of
from ...core.ted.schema import Key, dtype_name, field_named
from .exports import RowSink
from .readers import DAMAGED, ColumnForm, ColumnPath, StoredColumn, column_name, reading

MARK = "rbtool_export"
"""The attribute of a file that names the format in which rbtool wrote it; readers ignore it."""
_UNREADABLE: tuple[type[Exception], ...] = (RbtoolError, *DAMAGED)
_SHOWN = 3
_SUFFIXES = frozenset({".hdf5", ".h5", ".hdf"})


def h5_files_in(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder that have a suffix of HDF5, sorted."""
    yield from (file for file in sorted(folder.iterdir()) if file.suffix.lower() in _SUFFIXES and file.is_file())


def h5_file_at(path: Path) -> Path | None:
    """Return `path` if it is a file, or the only HDF5 file in that folder; None for anything else."""
    if path.is_file():
        return path
    if not path.is_dir():
        return None
    found = list(h5_files_in(path))
    return found[0] if len(found) == 1 else None


def other_files_note(path: Path, read: Path) -> Iterator[str]:
    """Yield a note on the other entries of a folder from which only the file `read` is read, except hidden ones."""
    if path == read:
        return
    names = sorted(one.name for one in path.iterdir() if one.name != read.name and not one.name.startswith("."))
    if names:
        listed = some_of(names, _SHOWN)
        which = (
            "another entry of the folder is" if len(names) == 1 else f"{len(names):,} other entries of the folder are"
        )
        yield f"{which} not read: {listed}"


def is_whole_h5(file: Path) -> bool:
    """Return whether a file has a header of HDF5 and at least as many bytes as it states. Never raises."""
    try:
        stated = stated_bytes(file)
        return stated is not None and file.stat().st_size >= stated
    except (RbtoolError, OSError):
        return False


def require_whole_h5(file: Path, *, hint: str = FETCH_AGAIN) -> None:
    """Raise CorruptDataError for a file that is not HDF5, or is shorter than its header states."""
    if not begins_as_h5(file):
        with file.open("rb") as opened:
            head = opened.read(16)
        raise CorruptDataError(f"{file} is not an HDF5 file: it begins with {head!r}", hint=hint)
    stated, size = stated_bytes(file), file.stat().st_size
    if stated is not None and size < stated:
        raise CorruptDataError(
            f"{file} was cut: it has {size:,} bytes, and its header states {stated:,} (a truncated file)", hint=hint
        )


def names_in(file: Path, group: str = "") -> list[str]:
    """List the names in the root group of a file, or in another group; none for a damaged file. Never raises."""
    try:
        return root_members(file, group) if is_whole_h5(file) else []
    except _UNREADABLE:
        return []


def has_name(pattern: re.Pattern[bytes], file: Path, group: str = "") -> bool:
    """Return whether a name in the root group of a file, or in another group, matches a pattern. Never raises."""
    return any(pattern.fullmatch(name.encode(errors="surrogateescape")) for name in names_in(file, group))


def plain_value(value: Any) -> Any:
    """Return a value of HDF5 as a value of JSON; NaN and infinities, which JSON lacks, become strings."""
    if isinstance(value, np.ndarray | list | tuple):
        return [plain_value(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


_DEEPEST = 32
_NO_DATA = ColumnForm("odd", why="it is a type without data")
SINGLE = ColumnForm("odd", why="it is a single value, not one per step")
"""The form of a dataset without rows; some readers take it as text of the episode."""


class GroupFile:
    """An open HDF5 file, whose groups are opened as `StoredGroup`.

    Opening raises the errors of `open_h5`, and CorruptDataError for damaged files.
    """

    def __init__(self, path: Path, *, hint: str = FETCH_AGAIN) -> None:
        self.path = path
        self.hint = hint
        self.forms: dict[tuple[bytes, tuple[int, ...]], _Form] = {}
        with reading("the structure", path, hint=hint):
            self._file: h5f.FileID = open_h5(path, small_cache())
        plain = self._file.get_access_plist().get_driver() == h5fd.SEC2
        self.descriptor: int = int(self._file.get_vfd_handle()) if plain else -1
        """libhdf5's descriptor of the file; -1 if its driver has none."""
        self.values = HeapValues(self._file)

    def names(self, group: bytes = b"/") -> list[bytes]:
        """List the names in a group."""
        with reading("the structure", self.path, hint=self.hint):
            return members(self.group_id(group))

    def group_id(self, name: bytes) -> h5g.GroupID:
        """Open a group for the low-level API; errors of libhdf5 are not translated."""
        return h5g.open(self._file, name)

    def has_group(self, name: bytes) -> bool:
        """Return whether there is a group of that name."""
        parent, _, last = name.rpartition(b"/")
        if last not in self.names(parent or b"/"):
            return False
        with reading("the structure", self.path, hint=self.hint):
            return isinstance(h5o.open(self._file, name), h5g.GroupID)

    def group(self, name: bytes, what: str) -> StoredGroup:
        """Open a group, which `what` names in messages."""
        with reading(what, self.path, hint=self.hint):
            return StoredGroup(self, self.group_id(name), what)

    def close(self) -> None:
        """Close the file and all objects that were opened in it."""
        self.values.close()
        self._file.close()


class StoredGroup:
    """A group of a `GroupFile`, open for reading its columns and attributes."""

    def __init__(self, file: GroupFile, group: h5g.GroupID, what: str) -> None:
        self._file = file
        self._group = group
        self._what = what
        self._open: dict[ColumnPath, h5d.DatasetID] = {}

    def columns(self) -> dict[ColumnPath, StoredColumn]:
        """List all columns of the group and of groups in it, without reading rows."""
        found: dict[ColumnPath, StoredColumn] = {}
        with self._reading(self._what):
            self._walk(self._group, (), found)
        return found

    def _walk(self, group: h5g.GroupID, prefix: ColumnPath, found: dict[ColumnPath, StoredColumn]) -> None:
        if len(prefix) > _DEEPEST:
            raise FormatError(f"{self._what} is nested more than {_DEEPEST} groups deep")
        for name in members(group):
            path = (*prefix, text_of_name(name, self._what))
            item = h5o.open(group, name)
            if isinstance(item, h5g.GroupID):
                self._walk(item, path, found)
            elif isinstance(item, h5d.DatasetID):
                self._open[path] = item
                found[path] = self._column(item)
            else:
                found[path] = StoredColumn(_NO_DATA, 0)

    def _column(self, dataset: h5d.DatasetID) -> StoredColumn:
        kind = dataset.get_type()
        space = dataset.get_space()
        if space.get_simple_extent_type() != h5s.SIMPLE:
            return StoredColumn(SINGLE, 0)
        rows, *row = space.get_simple_extent_dims()
        known = (kind.encode(), tuple(row))
        form = self._file.forms.get(known)
        if form is None:
            form = self._file.forms[known] = _Form.of(kind, tuple(row))
        size = rows * form.row_bytes
        if size > LARGEST and (why := absurd_size(dataset)):
            raise FormatError(f"a dataset of {self._what} {why}", hint=self._file.hint)
        place = dataset.get_offset() if form.as_in_memory and self._file.descriptor >= 0 else None
        if place is None or dataset.get_storage_size() != size:
            place = -1
        return StoredColumn(form.column, rows, int(place))

    def form(self, path: ColumnPath) -> ColumnForm:
        """Look up how one column is stored."""
        return self._column(self._dataset(path)).form

    def array(self, path: ColumnPath, start: int, stop: int, form: ColumnForm | None = None) -> Array:
        """Read rows of an `array` column; with `form`, if it is known, the type is not read again."""
        dataset = self._dataset(path)
        form = form or self._column(dataset).form
        rows = np.empty((stop - start, *form.shape), form.dtype)
        if rows.size:
            self._read(path, dataset, start, rows)
        return rows

    def encoded(self, path: ColumnPath, start: int, stop: int) -> list[bytes]:
        """Read rows that are files, such as JPEG, stored as byte strings or as rows of uint8 padded with zeros."""
        if self.form(path).kind == "array":
            return [row.tobytes() for row in self.array(path, start, stop)]
        return self.strings(path, start, stop)

    def strings(self, path: ColumnPath, start: int, stop: int) -> list[bytes]:
        """Read rows of a `text` column (as UTF-8) or of a `bytes` column."""
        where = b"/".join((h5i.get_name(self._group), *(part.encode() for part in path)))
        with self._reading(f"{column_name(path)!r} of {self._what}"):
            rows = self._file.values.dataset(where, start, stop)[start:stop] if stop > start else ()
        return [row if isinstance(row, bytes) else row.tobytes() for row in rows]

    def attribute_names(self) -> list[str]:
        """List the names of the attributes, sorted."""
        names: list[bytes] = []
        with self._reading(f"the attributes of {self._what}"):
            h5a.iterate(self._group, names.append)
        return sorted(text_of_name(name, self._what) for name in names)

    def attribute(self, name: str) -> Any:
        """Read an attribute as a value of h5py."""
        with self._reading(f"the attributes of {self._what}"):
            return self._file.values.attribute(self._group, name)

    def _dataset(self, path: ColumnPath) -> h5d.DatasetID:
        found = self._open.get(path)
        if found is None:
            with self._reading(f"{column_name(path)!r} of {self._what}"):
                found = self._open[path] = h5d.open(self._group, column_name(path).encode())
        return found

    def _read(self, path: ColumnPath, dataset: h5d.DatasetID, start: int, rows: Array) -> None:
        """Fill `rows` from row `start` of the column on."""
        with self._reading(f"{column_name(path)!r} of {self._what}"):
            chosen = dataset.get_space()
            chosen.select_hyperslab((start, *(0 for _ in rows.shape[1:])), rows.shape)
            dataset.read(h5s.create_simple(rows.shape), chosen, rows)

    def _reading(self, what: str) -> Any:
        return reading(what, self._file.path, hint=self._file.hint)


def text_of_name(name: bytes, where: str) -> str:
    """Decode a name in a file; CorruptDataError for one that is not UTF-8."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise CorruptDataError(f"the name {name!r} in {where} is not UTF-8") from None


@dataclass(frozen=True, slots=True)
class _Form:
    """A form, the bytes of a row in the file, and whether a row has the same bytes in memory."""

    column: ColumnForm
    row_bytes: int
    as_in_memory: bool

    @classmethod
    def of(cls, kind: h5t.TypeID, row: tuple[int, ...]) -> _Form:
        """The form of columns of this HDF5 type with rows of this shape."""
        column, size = _form(kind, row), kind.get_size() * math.prod(row)
        dtype = kind.dtype if column.kind == "array" else None
        alike = dtype is not None and dtype.isnative and kind.equal(h5t.py_create(dtype, logical=True))
        return cls(column, size, bool(alike))


def _form(kind: h5t.TypeID, row: tuple[int, ...]) -> ColumnForm:
    """The form of a column of this HDF5 type."""
    try:
        dtype = kind.dtype
    except (TypeError, ValueError):
        return ColumnForm("odd", why="its HDF5 type is unknown")
    if h5py.check_string_dtype(dtype) is not None:
        return ColumnForm("odd", why="it holds strings in more than one dimension") if row else ColumnForm("text")
    inner = h5py.check_vlen_dtype(dtype)
    if inner is not None:
        if inner == np.uint8 and not row:
            return ColumnForm("bytes")
        return ColumnForm("odd", why="its rows are arrays of different lengths")
    try:
        return ColumnForm("array", dtype_name(dtype), row)
    except SchemaError:
        return ColumnForm("odd", why=f"its element type {dtype} cannot be stored")


class H5Sink(RowSink):
    """An export to one HDF5 file. Its attribute named `mark` is `format`, the name of the library with that layout.

    A subclass implements `prepare()`, which calls `place`, and `fill(h5)`.
    """

    mark: ClassVar[str] = MARK
    format: ClassVar[str]

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether rbtool wrote the file in this format, by its mark."""
        try:
            with h5py.File(open_h5(path)) as file, closing(HeapValues(file.id)) as values:
                return cls.mark in file.attrs and str(values.attribute(file["/"].id, cls.mark)) == cls.format
        except _UNREADABLE:
            return False

    @abstractmethod
    def fill(self, h5: h5py.File) -> Iterator[int]:
        """Write all data to the open file, and yield the number of bytes after each write; their sum is `size()`."""

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        with LatchedFile(target) as file:
            with h5py.File(file, "w", libver=("v108", "v108")) as h5:
                h5.attrs[self.mark] = self.format
                for amount in self.fill(h5):
                    file.check()
                    progress(amount)
            file.check()
            fs.fsync(file.descriptor, target)

    def column(self, h5: Any, name: str, key: Key, *, single: bool = False) -> Iterator[int]:
        """Write all rows of a leaf to a new dataset; `single` drops the trailing dimension of one number per row."""
        field = field_named(self.chosen.fields, key)
        shape = () if single else field.shape
        dataset, done = h5.create_dataset(name, (self.chosen.steps, *shape), field.numpy), 0
        for rows in self.chosen.chunks(key, field.row_bytes):
            if dataset.size:
                dataset[done : done + len(rows)] = rows.reshape(len(rows), *shape)
            done += len(rows)
            yield len(rows) * field.row_bytes

    def read(self, key: Key, position: int) -> Array:
        """Read the rows of an episode."""
        return self.chosen.reader.read(key, *self.chosen.episode(position))
