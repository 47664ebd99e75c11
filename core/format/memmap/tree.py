"""The tensordict memory-map directory: headerless `*.memmap` files with a `meta.json` a folder.

tensordict opens such a folder unaided. This module reads and writes the layout with numpy and the standard
library alone; `facts` in comments are about tensordict 0.14 and 0.15.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from ...errors import CorruptDataError, FormatError, SchemaError
from ...ted.schema import Array, Field, Key, as_numbers, file_stem, key_name, numpy_dtype, torch_name
from .. import fs
from ..documents import Count, decode, is_sound_array, parse_json
from ..files import FileRecord, digest_bytes, read_regular
from ..syncing import NewFile, write_file

FieldRange: TypeAlias = tuple[int | float, int | float] | None
_DEPTH = 50
_NODE = "<class 'tensordict._td.TensorDict'>"


@dataclass(frozen=True, slots=True)
class MappedLeaf:
    """A tensor file: its element type by name and its full shape, rows first.

    For a `nested`, ragged leaf, `shape` is the shape of the table of row shapes next to it.
    """

    dtype: str
    shape: tuple[int, ...]
    nested: bool = False


def leaf_path(key: Key, suffix: str = ".memmap") -> str:
    """Return the path of a leaf's file inside its folder, with `/` between the parts."""
    *folders, name = (file_stem(part) for part in key)
    return "/".join((*folders, name + suffix))


def plain_leaves(fields: Iterable[Field], rows: int) -> dict[Key, MappedLeaf]:
    """Describe the leaves of so many rows of some fields."""
    return {field.key: MappedLeaf(field.dtype, (rows, *field.shape)) for field in fields}


def leaf_sizes(fields: Iterable[Field], rows: int) -> dict[str, int]:
    """Return the bytes of the files of so many rows of some fields, by their paths.

    SchemaError where a key has no file of its own.
    """
    fields = tuple(fields)
    require_own_files(field.key for field in fields)
    return {leaf_path(field.key): rows * field.row_bytes for field in fields}


def require_own_files(keys: Iterable[Key]) -> None:
    """Raise SchemaError for two keys that need the same file, or one's file where the other's folder must be."""
    leaves: set[Key] = set()
    taken: dict[str, Key] = {}
    for key in keys:
        paths = {"/".join(map(file_stem, key[:depth])): key[:depth] for depth in range(1, len(key))}
        paths[leaf_path(key)] = key
        for path, part in paths.items():
            if taken.setdefault(path, part) != part or (part in leaves):
                raise _shared(taken[path], key)
        leaves.add(key)
    for path, part in taken.items():
        if part in leaves and path != leaf_path(part):
            raise _shared(part, part)


def _shared(one: Key, other: Key) -> SchemaError:
    return SchemaError(f"the keys {key_name(one)!r} and {key_name(other)!r} need the same file")


def tree_documents(leaves: Mapping[Key, MappedLeaf], batch: tuple[int, ...]) -> dict[str, bytes]:
    """Return the `meta.json` files of a tree by their paths."""
    nodes: dict[Key, dict[str, Any]] = {(): {}}
    for key, leaf in leaves.items():
        for depth in range(len(key)):
            if key[:depth] not in nodes:
                nodes[key[:depth]] = {}
                nodes[key[: depth - 1]][key[depth - 1]] = {"type": "TensorDict"}
        nodes[key[:-1]][key[-1]] = {
            "device": "cpu", "shape": list(leaf.shape), "dtype": torch_name(leaf.dtype), "is_nested": leaf.nested
        }  # fmt: skip
    found = {}
    for key, entries in nodes.items():
        entries |= {"shape": list(batch), "device": "cpu", "_type": _NODE}
        path = "/".join((*(file_stem(part) for part in key), "meta.json"))
        found[path] = json.dumps(entries, ensure_ascii=False).encode()
    return found


def write_tree_meta(
    folder: Path, leaves: Mapping[Key, MappedLeaf], batch: tuple[int, ...], prefix: str = ""
) -> list[FileRecord]:
    """Write the `meta.json` files of a tree whose leaf files already exist; return them, listed below `prefix`."""
    records = []
    for path, data in tree_documents(leaves, batch).items():
        fs.make_folder((folder / path).parent)
        records.append(write_listed(folder, path, data, prefix))
    return records


class TreeFiles(Protocol):
    """The files of a memory-map directory, open."""

    root: Path

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""

    def read(self, name: str) -> bytes:
        """All bytes of a file."""


def read_tree(files: TreeFiles, *, exact: bool = True, skipped: Collection[str] = ()) -> dict[Key, MappedLeaf]:
    """List the leaves of a memory-map directory in the order of the tensordict that wrote it.

    Every leaf's file must be there with just the bytes its shape asks for: a cut or a missing one raises
    CorruptDataError. Without `exact` no file is looked at, nor are the files `skipped`.
    """
    leaves = dict(_walk(files, ()))
    for key, leaf in leaves.items():
        if exact and not leaf.nested and leaf_path(key) not in skipped:
            _check_size(files, leaf_path(key), leaf)
    return leaves


def tree_files(files: TreeFiles, prefix: Key = ()) -> Iterator[str]:
    """Name the files of a memory-map directory by what its `meta.json` files state: those, and the leaves.

    FormatError where one of them is missing, or is none.
    """
    node = leaf_path((*prefix, "meta"), ".json")
    origin = str(files.root / node)
    if len(prefix) > _DEPTH or files.size(node) is None:
        raise FormatError(f"{(files.root / node).parent} is not a tensordict folder: it has no meta.json")
    yield node
    for name, entry in _entries(parse_json(files.read(node), origin), origin):
        if _is_leaf(entry):
            yield leaf_path((*prefix, name))
            if entry.get("is_nested"):
                yield leaf_path((*prefix, name), ".shape.memmap")
        elif entry.get("type") == "TensorDict":
            yield from tree_files(files, (*prefix, name))
        else:  # non-tensor values are in the document itself
            yield leaf_path((*prefix, name, "meta"), ".json")


def parse_node(data: bytes, origin: str) -> dict[str, MappedLeaf]:
    """List the leaves described by one `meta.json`, without its sub-folders."""
    return {name: _leaf(entry, origin) for name, entry in _entries(parse_json(data, origin), origin) if _is_leaf(entry)}


@dataclass(frozen=True, slots=True)
class _BatchDocument:
    """What the `meta.json` of a tensordict states about all of it."""

    shape: tuple[Count, ...] | None = None


def batch_of(document: Any, origin: str) -> tuple[int, ...]:
    """Read the batch size of a tensordict, whose `meta.json` is the document; none at all for one without."""
    return decode(_BatchDocument, document, origin).shape or ()


def _walk(files: TreeFiles, prefix: Key) -> Iterable[tuple[Key, MappedLeaf]]:
    if len(prefix) > _DEPTH:
        raise FormatError(f"{files.root} is nested deeper than {_DEPTH} folders, which no tensordict is")
    node = "/".join((*map(file_stem, prefix), "meta.json"))
    origin = str(files.root / node)
    if files.size(node) is None:
        raise FormatError(f"{(files.root / node).parent} is not a tensordict folder: it has no meta.json")
    for name, entry in _entries(parse_json(files.read(node), origin), origin):
        if _is_leaf(entry):
            yield (*prefix, name), _leaf(entry, origin)
        elif entry.get("type") == "TensorDict":
            yield from _walk(files, (*prefix, name))


def _entries(document: Any, origin: str) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(document, dict) or "_type" not in document:
        raise FormatError(f"{origin} does not describe a tensordict: it has no _type")
    return [(name, entry) for name, entry in document.items() if isinstance(entry, dict)]


def _is_leaf(entry: Mapping[str, Any]) -> bool:
    return "dtype" in entry and "shape" in entry


def _leaf(entry: Mapping[str, Any], origin: str) -> MappedLeaf:
    leaf = decode(MappedLeaf, {**entry, "nested": entry.get("is_nested", False)}, origin)
    leaf = replace(leaf, dtype=leaf.dtype.removeprefix("torch."))
    try:
        numpy_dtype(leaf.dtype)
    except SchemaError as error:
        raise FormatError(f"{origin}: {error}") from error
    if not is_sound_array(leaf.dtype, leaf.shape):
        raise FormatError(f"{origin} holds {list(leaf.shape)!r:.60} where a shape should be")
    return leaf


def _check_size(files: TreeFiles, name: str, leaf: MappedLeaf) -> None:
    path, expected = files.root / name, numpy_dtype(leaf.dtype).itemsize
    for size in leaf.shape:
        expected *= size
    found = files.size(name)
    if found is None and expected:
        raise CorruptDataError(f"{path} is missing, expected {expected:,} bytes")
    if found is not None and found != expected:
        raise CorruptDataError(f"{path} has {found:,} bytes, expected {expected:,}: it was cut or overwritten")


_PIECE = 1 << 19


def range_of(array: Array, field: Field, known: FieldRange = None) -> FieldRange:
    """Smallest and largest value, also of those in `known`, NaN left out; None for flags, text, complex and no data.

    Where pictures have had all values of their type, no more are looked at.
    """
    is_full = known == (0, 255) and field.dtype == "uint8"
    if is_full or field.dtype == "bool" or "complex" in field.dtype or field.role == "text" or not array.size:
        return known
    numbers = as_numbers(array, field.dtype)
    low, high = numbers.min(), numbers.max()
    if np.isnan(low):
        low, high = np.fmin.reduce(numbers, axis=None), np.fmax.reduce(numbers, axis=None)
        if np.isnan(low):
            return known
    return merge_ranges(known, (_plain(low.item()), _plain(high.item())))


def _plain(number: float) -> int | float:
    """The number itself, and 0.0 for -0.0: which of two equal ones is found depends on how rows are cut."""
    return number or abs(number)


def merge_ranges(one: FieldRange, other: FieldRange) -> FieldRange:
    """Range of the values of both."""
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])


class LeafWriter:
    """Appends rows of one field to a headerless file.

    They are written in pieces of half a megabyte, each at a multiple of that: so a short episode costs a copy and not a
    system call, and a long one half as much as pieces that begin anywhere. `ranged=False` leaves `range` alone: a copy
    has the range of its source. `rows` is how many there will be, if that is known.
    """

    def __init__(self, path: Path, field: Field, *, ranged: bool = True, rows: int = 0) -> None:
        self.field = field
        self._ranged = ranged
        self.rows = 0
        self.range: FieldRange = None
        self._dtype = field.numpy
        self.file = NewFile(path, expected=rows * field.row_bytes)
        expected = min(_PIECE, rows * field.row_bytes) if rows else _PIECE
        self._buffer = np.empty(max(1, expected // self._dtype.itemsize), self._dtype)
        self._used = 0

    def append(self, rows: Rows) -> None:
        """Append rows: an array of `[n, *field.shape]` of the field's own element type, or runs out of one."""
        if rows.shape[1:] != self.field.shape or rows.dtype != self._dtype:
            found = f"{rows.dtype} {list(rows.shape[1:])}"
            raise SchemaError(
                f"rows of {self.field.name!r} are {found}, expected {self._dtype} {list(self.field.shape)}"
            )
        self.rows += len(rows)
        for part in rows.parts() if isinstance(rows, RowRuns) else (rows,):
            self._take(np.ascontiguousarray(part).reshape(-1))

    def _take(self, flat: Array) -> None:
        """Fill the buffer, write whole pieces, and keep the rest in the buffer."""
        room, start = self._buffer.size - self._used, 0
        if self._used and flat.size >= room:
            self._buffer[self._used :] = flat[:room]
            self._put(self._buffer)
            self._used, start, room = 0, room, self._buffer.size
        while flat.size - start >= self._buffer.size:
            self._put(flat[start : start + self._buffer.size])
            start += self._buffer.size
        kept = flat.size - start
        self._buffer[self._used : self._used + kept] = flat[start:]
        self._used += kept

    def _put(self, flat: Array) -> None:
        if self._ranged:
            self.range = range_of(flat, self.field, self.range)
        self.file.append(memoryview(flat.view(np.uint8).data))

    def _flush(self) -> None:
        if self._used:
            self._put(self._buffer[: self._used])
            self._used = 0

    def flush(self) -> None:
        """Write what is gathered, and let the disk begin."""
        self._flush()
        self.file.start_syncing()

    def finish(self) -> None:
        """Write what is gathered, sync, close."""
        self._flush()
        self.file.complete()


class TreeWriter:
    """Appends rows to every leaf of a memory-map directory; has the digests when it is finished.

    `ranged` and `rows` are as for `LeafWriter`.
    """

    def __init__(
        self, folder: Path, fields: Iterable[Field], prefix: str = "", *, ranged: bool = True, rows: int = 0
    ) -> None:
        self.folder = folder
        self.prefix = prefix
        self.leaves: dict[Key, LeafWriter] = {}
        listed = list(fields)
        require_own_files(field.key for field in listed)
        fs.make_folder(folder)
        try:
            for field in listed:
                self.leaves[field.key] = LeafWriter(folder / leaf_path(field.key), field, ranged=ranged, rows=rows)
        except BaseException:  # with all files open that can be, the folder could not even be removed
            self.close()
            raise

    def append(self, columns: Mapping[Key, Rows]) -> None:
        """Append rows to the leaves named."""
        for key, rows in columns.items():
            self.leaves[key].append(rows)

    def finish(self, batch: tuple[int, ...]) -> list[FileRecord]:
        """Sync and close all leaves, describe a tensordict of this batch; return what was written."""
        records, leaves = [], {}
        for leaf in self.leaves.values():
            leaf.flush()  # of all first: the file system then brings the files to the disk together
        for key, leaf in self.leaves.items():
            leaf.finish()
            leaves[key] = MappedLeaf(leaf.field.dtype, (leaf.rows, *leaf.field.shape))
            if leaf.file.size:
                records.append(FileRecord(self.prefix + leaf_path(key), leaf.file.size, leaf.file.digest))
            else:  # tensordict keeps no file for a tensor without elements
                fs.remove(leaf.file.path)
        return records + write_tree_meta(self.folder, leaves, batch, self.prefix)

    @property
    def ranges(self) -> dict[Key, FieldRange]:
        """Range of each leaf."""
        return {key: leaf.range for key, leaf in self.leaves.items()}

    def close(self) -> None:
        """Close every descriptor, finished or not."""
        for leaf in self.leaves.values():
            leaf.file.close()


def write_listed(folder: Path, path: str, data: bytes, prefix: str = "") -> FileRecord:
    """Write a small file at `path` in a folder; return it as a manifest lists it, below `prefix`."""
    write_file(folder / path, data)
    return FileRecord(prefix + path, len(data), digest_bytes(data))


def record_file(path: Path, name: str) -> FileRecord:
    """Digest a small file that was just written."""
    data = read_regular(path)
    return FileRecord(name, len(data), digest_bytes(data))


# Rows to be written: taken out of an array in runs, and only copied where they are written ---------------

_LONG = 64
"""Rows that runs have on average where they are copied whole, and not row by row."""
_WIDE = 16
"""Bytes of the widest rows that are copied at once: as of flags and rewards."""


class RowSpans:
    """Runs of row numbers, `[start, stop)` each, one after another; empty ones are left out."""

    def __init__(self, starts: Array, stops: Array) -> None:
        there = stops > starts
        self.starts, self.stops = starts[there], stops[there]
        self._lengths = self.stops - self.starts
        self._count = int(self._lengths.sum())
        self._rows: Array | None = None

    def __len__(self) -> int:
        return self._count

    def of(self, array: Array) -> Rows:
        """Take the rows out of an array: as a fresh array, or put off where runs are long and rows wide."""
        if self._count < _LONG * len(self.starts):
            if self._rows is None:
                first = self.starts - np.cumsum(self._lengths) + self._lengths
                self._rows = np.arange(self._count) + np.repeat(first, self._lengths)
            return np.take(array, self._rows, axis=0)
        rows = RowRuns(array, self)
        return rows if array.nbytes > _WIDE * len(array) else rows.whole()


@dataclass(frozen=True, slots=True)
class RowRuns:
    """The rows of `array` that are in `runs`, with what an array has of shape and type; `whole` makes one of them."""

    array: Array
    runs: RowSpans

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of rows, and the shape of one."""
        return len(self.runs), *self.array.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        found: np.dtype[Any] = self.array.dtype
        return found

    def __len__(self) -> int:
        return len(self.runs)

    def parts(self) -> Iterator[Array]:
        """Yield views of the runs, in order."""
        for start, stop in zip(self.runs.starts.tolist(), self.runs.stops.tolist(), strict=True):
            yield self.array[start:stop]

    def whole(self) -> Array:
        """Copy the rows into a fresh array."""
        return np.concatenate([*self.parts()])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        found = self.whole()
        return found if dtype is None else found.astype(dtype)


Rows: TypeAlias = Array | RowRuns


def as_array(rows: Rows) -> Array:
    """Return the rows as an array."""
    return rows.whole() if isinstance(rows, RowRuns) else rows
