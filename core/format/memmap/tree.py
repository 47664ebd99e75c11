"""The tensordict memory-map directory: headerless `*.memmap` files with a `meta.json` a folder.

tensordict opens such a folder without rbtool. This module reads and writes the layout with NumPy and the standard
library only, as tensordict 0.14 and 0.15 do.

    walks/meta.json                 the batch size; type and shape of each leaf
    walks/observation.memmap        one leaf: the bytes of its rows
    walks/next/meta.json
    walks/next/observation.memmap
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
    """A tensor file: the name of its element type and its full shape, rows first.

    For a `nested` (ragged) leaf, `shape` is the shape of the table of row shapes, which is in a file next to it.
    """

    dtype: str
    shape: tuple[int, ...]
    nested: bool = False


def leaf_path(key: Key, suffix: str = ".memmap") -> str:
    """Return the path of a leaf's file inside its folder, with `/` between the parts."""
    *folders, name = (file_stem(part) for part in key)
    return "/".join((*folders, name + suffix))


def plain_leaves(fields: Iterable[Field], rows: int) -> dict[Key, MappedLeaf]:
    """Return the leaves of `rows` rows of some fields, by key."""
    return {field.key: MappedLeaf(field.dtype, (rows, *field.shape)) for field in fields}


def leaf_sizes(fields: Iterable[Field], rows: int) -> dict[str, int]:
    """Return the sizes in bytes of the files of `rows` rows of some fields, by path.

    SchemaError if two keys need the same file.
    """
    fields = tuple(fields)
    require_own_files(field.key for field in fields)
    return {leaf_path(field.key): rows * field.row_bytes for field in fields}


def require_own_files(keys: Iterable[Key]) -> None:
    """Raise SchemaError if two keys need the same file, or one key needs a file where another needs a folder."""
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
    """List the leaves of a memory-map directory, in the order in which tensordict wrote them.

    CorruptDataError if the file of a leaf is missing or has another size than its shape requires. Without `exact` no
    sizes are checked; the sizes of the files `skipped` never are.
    """
    leaves = dict(_walk(files, ()))
    for key, leaf in leaves.items():
        if exact and not leaf.nested and leaf_path(key) not in skipped:
            _check_size(files, leaf_path(key), leaf)
    return leaves


def tree_files(files: TreeFiles, prefix: Key = ()) -> Iterator[str]:
    """Yield the names of the files of a memory-map directory: its `meta.json` files, and the leaves listed in them.

    FormatError if a `meta.json` is missing or invalid.
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
        else:  # a non-tensor value, which is stored in a `meta.json` of its own
            yield leaf_path((*prefix, name, "meta"), ".json")


def parse_node(data: bytes, origin: str) -> dict[str, MappedLeaf]:
    """List the leaves described by one `meta.json`, without its sub-folders."""
    return {name: _leaf(entry, origin) for name, entry in _entries(parse_json(data, origin), origin) if _is_leaf(entry)}


@dataclass(frozen=True, slots=True)
class _BatchDocument:
    """The entries of a tensordict's `meta.json` that concern the tensordict as a whole."""

    shape: tuple[Count, ...] | None = None


def batch_of(document: Any, origin: str) -> tuple[int, ...]:
    """Return the batch size of a tensordict, given the document of its `meta.json`; () if it states none."""
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
    """Return the smallest and largest value of an array and of the range `known`, ignoring NaN.

    None for flags, text, complex numbers and no data. If images have covered the whole range of uint8 already, further
    ones are not read.
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
    """Return the number, and 0.0 for -0.0, so that the range does not depend on how rows are divided into pieces."""
    return number or abs(number)


def merge_ranges(one: FieldRange, other: FieldRange) -> FieldRange:
    """Range of the values of both."""
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])


class LeafWriter:
    """Appends rows of one field to a headerless file.

    Rows are buffered and written in pieces of half a megabyte, at multiples of that size. A short episode then costs a
    copy instead of a system call, and a long one takes half the time of unaligned writes.

    `ranged=False` does not compute `range`, for copies, which have the range of their source. `rows` is the final
    number of rows, if known.
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
        """Append rows: an array `[n, *field.shape]` of the field's element type, or runs of rows of such an array."""
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
        """Write the buffered rows, and start to write the file to the disk."""
        self._flush()
        self.file.start_syncing()

    def finish(self) -> None:
        """Write the buffered rows, sync and close."""
        self._flush()
        self.file.complete()


class TreeWriter:
    """Appends rows to every leaf of a memory-map directory, and computes the digests of the files.

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
        except BaseException:  # if the limit of open files is reached, the folder could not be removed
            self.close()
            raise

    def append(self, columns: Mapping[Key, Rows]) -> None:
        """Append rows to the leaves named."""
        for key, rows in columns.items():
            self.leaves[key].append(rows)

    def finish(self, batch: tuple[int, ...]) -> list[FileRecord]:
        """Sync and close all leaves, write the `meta.json` files for this batch size; return the files written."""
        records, leaves = [], {}
        for leaf in self.leaves.values():
            leaf.flush()  # all before the first sync, so that the file system writes them to the disk together
        for key, leaf in self.leaves.items():
            leaf.finish()
            leaves[key] = MappedLeaf(leaf.field.dtype, (leaf.rows, *leaf.field.shape))
            if leaf.file.size:
                records.append(FileRecord(self.prefix + leaf_path(key), leaf.file.size, leaf.file.digest))
            else:  # tensordict has no file for a tensor without elements
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


# Rows to be written: runs of rows of an array, which are copied only when they are written ---------------

_LONG = 64
"""The average length from which on runs are copied one by one, and not their rows by an index."""
_WIDE = 16
"""The largest size in bytes of a row, such as a flag or a reward, that is copied at once and not later."""


class RowSpans:
    """Runs of row numbers, `[start, stop)` each, in order; empty ones are left out."""

    def __init__(self, starts: Array, stops: Array) -> None:
        there = stops > starts
        self.starts, self.stops = starts[there], stops[there]
        self._lengths = self.stops - self.starts
        self._count = int(self._lengths.sum())
        self._rows: Array | None = None

    def __len__(self) -> int:
        return self._count

    def of(self, array: Array) -> Rows:
        """Return the rows of an array: as a fresh array, or as `RowRuns` if runs are long and rows wide."""
        if self._count < _LONG * len(self.starts):
            if self._rows is None:
                first = self.starts - np.cumsum(self._lengths) + self._lengths
                self._rows = np.arange(self._count) + np.repeat(first, self._lengths)
            return np.take(array, self._rows, axis=0)
        rows = RowRuns(array, self)
        return rows if array.nbytes > _WIDE * len(array) else rows.whole()


@dataclass(frozen=True, slots=True)
class RowRuns:
    """The rows of `array` in `runs`, not copied yet, with `shape` and `dtype` like an array; `whole` copies them."""

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
