"""Minari's Arrow and Parquet storage: a folder for each episode, with columns of equal length.

Actions, rewards and flags are padded by one row to the length of the observations; that last row is ignored. Arrow
files are memory-mapped and sliced without a copy, Parquet files are streamed batch by batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...core.errors import CorruptDataError, FormatError
from ...core.format.contracts import Array
from ...core.format.documents import load_json
from ..files.arrow import require_bounded_ipc, require_bounded_parquet
from ..files.readers import ColumnForm, ColumnPath, StoredColumn, column_name, reading
from .metadata import METADATA_FILE, SpacePath
from .store import EpisodeStore, StoredEpisode

_EPISODE = re.compile(r"0|[1-9]\d{0,17}")
_PART = re.compile(r"part-(\d+)\.(\w+)")
_PADDED = frozenset({"actions", "rewards", "terminations", "truncations"})
_REQUIRED = _PADDED | {"observations"}
_BATCH_BYTES = 4 << 20
_ROWS_OF_FREE_LENGTH = 64
"""The number of rows of text or lists that are read at a time; their length cannot be told from the size of the file,
because Parquet stores equal rows once."""


class ArrowStore(EpisodeStore):
    """The episodes in `data/<number>/part-*.arrow` or `.parquet`."""

    def __init__(self, folder: Path, data_format: str) -> None:
        self.folder = folder
        self.format = data_format
        self.numbers = sorted(
            int(path.name) for path in folder.iterdir() if _EPISODE.fullmatch(path.name) and path.is_dir()
        )

    def episode(self, number: int) -> StoredEpisode:
        """Open the files of one episode."""
        return _ArrowEpisode(self, number)

    def parts(self, number: int) -> list[Path]:
        """Return the files with an episode's rows, in order."""
        found = {}
        for path in (self.folder / str(number)).iterdir():
            match = _PART.fullmatch(path.name)
            if match and match[2] == self.format:
                found[int(match[1])] = path
        return [found[part] for part in sorted(found)]

    def location(self, path: SpacePath) -> ColumnPath:
        """Map a path: Tuple elements are named by their index."""
        return tuple(str(part) for part in path)

    def files(self) -> list[Path]:
        """Return the files with the rows and the metadata of every episode."""
        files = []
        for number in self.numbers:
            metadata = self.folder / str(number) / METADATA_FILE
            files += [*self.parts(number), *([metadata] if metadata.is_file() else [])]
        return files


class _ArrowEpisode(StoredEpisode):
    def __init__(self, store: ArrowStore, number: int) -> None:
        self._folder = store.folder / str(number)
        self._what = f"episode {number}"
        parts = store.parts(number)
        self._file = parts[0] if parts else self._folder / f"part-0.{store.format}"
        if not parts:
            raise FormatError(f"{self._file} is missing", hint="copy or fetch the dataset again, whole")
        opened = _IpcPart if store.format == "arrow" else _ParquetPart
        with reading(self._what, self._file, pa.ArrowException):
            self._parts = [opened(path) for path in parts]
        if any(part.schema != self._parts[0].schema for part in self._parts):
            raise FormatError(f"the files in {self._folder} differ in their columns")
        names = self._parts[0].schema.names
        if len(set(names)) < len(names):
            raise FormatError(f"the files in {self._folder} have a column twice: {', '.join(sorted(names))}")
        self._rows = sum(part.rows for part in self._parts)
        self._streams: dict[str, _Stream] = {}

    def columns(self) -> dict[ColumnPath, StoredColumn]:
        steps = self.attributes().get(("total_steps",), self._rows - 1)
        if steps != self._rows - 1:
            raise FormatError(
                f"{self._what} has {self._rows} observations for {steps} steps, expected one more than steps"
            )
        found: dict[ColumnPath, StoredColumn] = {}
        with reading(self._what, self._file, pa.ArrowException):
            for field in self._parts[0].schema:
                forms = declared_forms(field)
                look = forms_with_holes if field.name in _REQUIRED else found_forms
                forms = look(forms, self._chunks(field.name))
                rows = self._rows - (field.name in _PADDED)
                found |= {path: StoredColumn(form, rows) for path, form in forms.items()}
        return found

    def form(self, path: ColumnPath) -> ColumnForm:
        return declared_forms(self._parts[0].schema.field(path[0]))[path]

    def array(self, path: ColumnPath, start: int, stop: int, form: ColumnForm | None = None) -> Array:
        form = form or self.form(path)
        with reading(self._what, self._file, pa.ArrowException):
            return as_array(self._leaf(path, start, stop), form, f"{column_name(path)!r} of {self._what}")

    def strings(self, path: ColumnPath, start: int, stop: int) -> list[bytes]:
        with reading(self._what, self._file, pa.ArrowException):
            return as_strings(self._leaf(path, start, stop), f"{column_name(path)!r} of {self._what}")

    def attribute_paths(self) -> Collection[ColumnPath]:
        return self._attributes.keys()

    def attributes(self) -> Mapping[ColumnPath, Any]:
        return self._attributes

    @cached_property
    def _attributes(self) -> dict[ColumnPath, Any]:
        path = self._folder / METADATA_FILE
        document = load_json(path) if path.is_file() else {}
        if not isinstance(document, dict):
            raise FormatError(f"{path} holds a JSON {type(document).__name__}, expected an object")
        return dict(_flat(document))

    def _leaf(self, path: ColumnPath, start: int, stop: int) -> pa.Array:
        stream = self._streams.get(path[0])
        if stream is None or start < stream.first:
            stream = self._streams[path[0]] = _Stream(self._chunks(path[0]))
        return at(stream.rows(start, stop), path[1:])

    def _chunks(self, name: str) -> Iterator[pa.Array]:
        """Yield a top-level column, batch by batch."""
        for part in self._parts:
            yield from part.chunks(name)


class _Stream:
    """Reads rows of a column from front to back, and releases batches before the rows that were read last."""

    def __init__(self, chunks: Iterator[pa.Array]) -> None:
        self.first = 0
        self._stop = 0
        self._chunks = chunks
        self._held: list[pa.Array] = []

    def rows(self, start: int, stop: int) -> pa.Array:
        while self._stop < stop:
            chunk = next(self._chunks, None)
            if chunk is None:
                raise ValueError(f"it has {self._stop} rows, expected {stop}")
            self._held.append(chunk)
            self._stop += len(chunk)
        while len(self._held) > 1 and self.first + len(self._held[0]) <= start:
            self.first += len(self._held.pop(0))
        wanted, first = [], self.first
        for chunk in self._held:  # slice before joining: a chunk of a mapped file may be larger than memory
            begin, end = max(start - first, 0), min(stop - first, len(chunk))
            if begin < end:
                wanted.append(chunk.slice(begin, end - begin))
            first += len(chunk)
        return pa.concat_arrays(wanted) if len(wanted) > 1 else wanted[0]


class _IpcPart:
    """One mapped Arrow file."""

    def __init__(self, path: Path) -> None:
        require_bounded_ipc(path)
        self._file = pa.ipc.open_file(pa.memory_map(str(path)))
        self.schema = self._file.schema
        self.rows: int = sum(self._batch(number).num_rows for number in range(self._file.num_record_batches))

    def _batch(self, number: int) -> pa.RecordBatch:
        batch = self._file.get_batch(number)
        batch.validate()
        return batch

    def chunks(self, name: str) -> Iterator[pa.Array]:
        for number in range(self._file.num_record_batches):
            yield self._batch(number).column(name)


class _ParquetPart:
    """One Parquet file, read in batches of a few megabytes."""

    def __init__(self, path: Path) -> None:
        require_bounded_parquet(path)
        self._file = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
        self.schema = self._file.schema_arrow
        self.rows: int = self._file.metadata.num_rows

    def chunks(self, name: str) -> Iterator[pa.Array]:
        size = max(_BATCH_BYTES // self._row_bytes(name), 1)
        if of_free_length(self.schema.field(name).type):
            size = min(size, _ROWS_OF_FREE_LENGTH)
        for batch in self._file.iter_batches(batch_size=size, columns=[name], use_threads=False):
            yield batch.column(name)

    def _row_bytes(self, name: str) -> int:
        """Estimate the bytes of a row of a column from its type and, for text and images, the size of the row groups.

        The metadata of single column chunks are not used, because pyarrow aborts the process if they are damaged.
        """
        metadata = self._file.metadata
        groups = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
        return max(row_width(self.schema.field(name).type), int(groups) // max(self.rows, 1), 1)


def _flat(document: Mapping[str, Any], above: ColumnPath = ()) -> Iterator[tuple[ColumnPath, Any]]:
    """Flatten attributes as in HDF5, with a path for each nested option."""
    for name, value in document.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, (*above, name))
        else:
            yield (*above, name), value


_RAGGED = "its rows are lists of different lengths"
_ABSENT = "it has no value in some rows"


def declared_forms(field: pa.Field, prefix: ColumnPath = ()) -> dict[ColumnPath, ColumnForm]:
    """Return the forms of the leaves of a top-level column according to its type."""
    path = (*prefix, field.name)
    if not pa.types.is_struct(field.type):
        return {path: _form(field)}
    return {name: form for child in field.type for name, form in declared_forms(child, path).items()}


def _form(field: pa.Field) -> ColumnForm:
    kind, shape, ragged = field.type, [], False
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return ColumnForm("text")
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return ColumnForm("bytes")
    while _is_list(kind):
        if pa.types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
        else:
            ragged = True
        kind = kind.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return ColumnForm("odd", why=f"its Arrow type {field.type} is neither numbers nor text")
    dtype = np.dtype(kind.to_pandas_dtype()).name
    if ragged:
        return ColumnForm("odd", dtype, why=_RAGGED)
    declared = (field.metadata or {}).get(b"shape")
    if declared is None:
        return ColumnForm("array", dtype, tuple(shape), flat=bool(shape))
    # Infos are flat too, with their shape in the metadata of the field.
    sizes = tuple(int(size) for size in declared.split(b",") if size.isdigit())
    return ColumnForm("array", dtype, sizes if math.prod(sizes) == math.prod(shape) else tuple(shape))


def found_forms(forms: Mapping[ColumnPath, ColumnForm], chunks: Iterable[pa.Array]) -> dict[ColumnPath, ColumnForm]:
    """Refine the forms of the leaves by the rows of one episode: lengths of lists, and rows without a value."""
    absent: set[ColumnPath] = set()
    holes: set[ColumnPath] = set()
    shapes: dict[ColumnPath, set[tuple[int, ...] | None]] = {
        path: set() for path, form in forms.items() if form.why == _RAGGED
    }
    for chunk in chunks:
        for path in forms:
            array = at(chunk, path[1:])
            if _has_holes(array):
                holes.add(path)
            if array.null_count and not pa.types.is_floating(array.type):
                absent.add(path)
            elif path in shapes and len(array):
                shapes[path].add(_row_shape(array))
    found = dict(forms)
    for path in absent:  # integers with missing values are read as floats, as Minari does
        whole = forms[path].kind == "array" and "int" in forms[path].dtype and not forms[path].shape
        found[path] = (
            ColumnForm("array", "float64", forms[path].shape, holes=True) if whole else ColumnForm("odd", why=_ABSENT)
        )
    for path, seen in shapes.items():
        if path not in absent and len(seen) == 1 and None not in seen:
            found[path] = ColumnForm("array", forms[path].dtype, next(shape for shape in seen if shape is not None))
    return found | {path: replace(found[path], holes=True) for path in holes if found[path].kind == "array"}


def forms_with_holes(
    forms: Mapping[ColumnPath, ColumnForm], chunks: Iterable[pa.Array]
) -> dict[ColumnPath, ColumnForm]:
    """Mark the forms of the leaves in which floats are missing; rows are read only for leaves of floats."""
    floats = {path for path, form in forms.items() if form.kind == "array" and "float" in form.dtype}
    holes: set[ColumnPath] = set()
    for chunk in chunks if floats else ():
        holes |= {path for path in floats - holes if _has_holes(at(chunk, path[1:]))}
    return {path: replace(form, holes=path in holes) for path, form in forms.items()}


def _has_holes(array: pa.Array) -> bool:
    """Return whether floats are missing, also within rows that are lists."""
    while _is_list(array.type):
        array = array.flatten()
    return bool(pa.types.is_floating(array.type) and array.null_count)


def _row_shape(array: pa.Array) -> tuple[int, ...] | None:
    """Return the shape of the rows of a list column, or None if rows differ."""
    shape = []
    while _is_list(array.type):
        lengths = pc.unique(pc.list_value_length(array)).to_pylist()
        if len(lengths) != 1 or lengths[0] is None:
            return None
        shape.append(lengths[0])
        array = array.flatten()
    return None if array.null_count else tuple(shape)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def at(array: pa.Array, path: ColumnPath) -> pa.Array:
    """Return the leaf at a path of names in nested structs; a row without the struct has no value in the leaf."""
    for name in path:
        place = array.type.get_field_index(name)
        if place < 0:  # what pyarrow returns for a duplicate name
            raise FormatError(f"the column {name!r} exists twice")
        array = array.flatten()[place]
    return array


def as_array(array: pa.Array, form: ColumnForm, what: str) -> Array:
    """Convert rows of numbers to an array `[n, *shape]`; missing floats become NaN."""
    rows = len(array)
    if not math.prod(form.shape):
        return np.empty((rows, *form.shape), form.dtype)
    while _is_list(array.type):
        _require_values(array, what)
        array = array.flatten()
    if "float" not in form.dtype:
        _require_values(array, what)
    values: Array = array.to_numpy(zero_copy_only=False)
    return values.astype(form.dtype, copy=False).reshape(rows, *form.shape)


def as_strings(array: pa.Array, what: str) -> list[bytes]:
    """Convert rows of text or of byte strings to bytes."""
    array.validate(full=True)  # offsets that point outside the file would crash the process
    _require_values(array, what)
    rows: list[bytes] = array.cast(pa.large_binary()).to_pylist()
    return rows


def _require_values(array: pa.Array, what: str) -> None:
    if array.null_count:
        raise CorruptDataError(f"{what} has no value in {array.null_count} rows")


def of_free_length(kind: pa.DataType) -> bool:
    """Return whether rows of this type have no fixed length: text, byte strings, lists."""
    if kind.num_fields and not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return any(of_free_length(kind.field(number).type) for number in range(kind.num_fields))
    return not (pa.types.is_primitive(kind) or pa.types.is_null(kind))


def row_width(kind: pa.DataType) -> int:
    """Return the bytes of one row of this type; 64 if the type has no fixed width."""
    if pa.types.is_struct(kind):
        return sum(row_width(child.type) for child in kind)
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * row_width(kind.value_type)
    try:
        return max(int(kind.bit_width) // 8, 1)
    except ValueError:
        return 64
