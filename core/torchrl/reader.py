"""Reads checkpoints in TorchRL's flat, nested and H5 layouts as TED rows.

Flat and nested have one file for each leaf; nested also has a table of the trajectories' shapes. The bytes of the
leaves are the same in both. A file may be longer than its shape says: TorchRL leaves the rest of an older, larger
checkpoint in place, and after a trajectory that ends an unfinished lane it leaves a row that no table counts. Rows that
were never written are holes in the file.

H5 has a group for each trajectory, with a dataset for each leaf. The rows of all groups, one after the other, are the
rows of the flat layout. A dataset to which nothing was written, as for rows that the storage never had, occupies no
space in the file.

The layouts do not store all of TED. The next observation of a step that ends nothing is read from the following row,
root done flags are read as false, and there is no root reward.

`TorchrlForm` is the interface of these layouts to the trunk: it recognises, opens and writes them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..encodings.compact import (
    BUFFER,
    STORAGE_FOLDER,
    CompactForm,
    FilledStorage,
    flags_at,
    table_of_ends,
    without_ends,
)
from ..encodings.foreign import ForeignForm, ForeignReader
from ..encodings.h5 import Compression, H5Source, begins_as_h5
from ..encodings.saved_digests import DIGESTS, noted_files, require_digests
from ..errors import CorruptDataError, FormatError, RbtoolError, SchemaError, UsageError
from ..format.contracts import Array, StepReader
from ..format.documents import load_json, parse_json
from ..format.episodes import EpisodeTable
from ..format.manifest import Manifest, Request, has_manifest
from ..format.memmap.builder import created_by
from ..format.memmap.tree import MappedLeaf, leaf_path, read_tree
from ..format.open_files import OpenFiles
from ..progress import Progress
from ..ted.schema import NEXT, Field, Key, dtype_name, file_stem, key_name, role_of
from .layout import (
    H5_LENGTH,
    LENGTH,
    STORAGE_SHAPE,
    TRAJECTORY,
    Counts,
    StoredLeaves,
    TorchrlHeader,
    TorchrlKeys,
    in_order,
)
from .writer import TorchrlPlan, write_torchrl

if TYPE_CHECKING:
    import h5py


_TABLE = ".shape.memmap"


class FolderLeaves(StoredLeaves):
    """The leaves of a folder in layout flat or nested."""

    def __init__(self, path: Path, keys: TorchrlKeys, files: OpenFiles) -> None:
        super().__init__(path, keys, files)
        self.header = TorchrlHeader.checked(
            _constant(files, STORAGE_SHAPE), _constant(files, keys.is_full), _constant(files, keys.shift),
            _length(files), str(path),
        )  # fmt: skip
        _refuse_other_entries(files, "", keys.names)
        leaves = read_tree(files, exact=False)
        if len({leaf.nested for leaf in leaves.values()}) != 1:
            raise FormatError(f"{path} is neither flat nor nested: some of its leaves are ragged and others are not")
        self.nested = next(iter(leaves.values())).nested
        tables = {key: self._table(key, leaf) for key, leaf in leaves.items()} if self.nested else {}
        rows, self.fields = {}, {}
        for key, leaf in leaves.items():
            rows[key] = int(tables[key][:, 0].sum()) if self.nested else _rows(path, key, leaf)
            shape = tuple(map(int, tables[key][0, 1:])) if self.nested else leaf.shape[1:]
            self.fields[key] = Field(key, leaf.dtype, shape, role_of(key))
            self._require_bytes(key, rows[key])
        self._require_steps(rows)
        self.ends = self._find_ends()
        counts = Counts(self.header, self.ends)
        with_ends = int(counts.states.sum()) if self.nested else self.header.steps + len(self.ends)
        self.states = self._choose_states(rows, with_ends)
        for key, table in tables.items():
            if not np.array_equal(table[:, 0], counts.states if key in self.states else counts.steps):
                raise CorruptDataError(
                    f"{path / leaf_path(key, _TABLE)} gives the trajectories other lengths than the done flags"
                )

    def fetch(self, key: Key, start: int, stop: int) -> Array:
        return self.files.rows(leaf_path(key), self.fields[key], start, stop)

    def _table(self, key: Key, leaf: MappedLeaf) -> Array:
        name = leaf_path(key, _TABLE)
        path, found = self.path / name, self.files.size(name)
        size = math.prod(leaf.shape)
        if len(leaf.shape) != 2 or not size:
            raise CorruptDataError(f"{self.path}: {key_name(key)!r} has a table of shapes of size {list(leaf.shape)}")
        if found is None:
            raise CorruptDataError(f"{path}, the table of the shapes of {key_name(key)!r}, is missing")
        if found < size * 8:
            raise CorruptDataError(f"{path} has {found:,} bytes, expected {size * 8:,}: it was cut")
        table: Array = np.frombuffer(self.files.read(name), np.int64, size).reshape(leaf.shape)
        if (table < 0).any() or (table[:, 1:] != table[0, 1:]).any():
            raise CorruptDataError(f"{path} does not give all trajectories rows of one shape")
        return table

    def _require_bytes(self, key: Key, rows: int) -> None:
        path, needed = self.path / leaf_path(key), rows * self.fields[key].row_bytes
        found = self.files.size(leaf_path(key))
        if found is None and needed:
            raise CorruptDataError(f"{path} is missing, expected {needed:,} bytes")
        if (found or 0) < needed:
            raise CorruptDataError(f"{path} has {found:,} bytes, expected {needed:,}: it was cut")


def _rows(path: Path, key: Key, leaf: MappedLeaf) -> int:
    if not leaf.shape:
        raise FormatError(f"{path}: {key_name(key)!r} is a single number, expected rows")
    return leaf.shape[0]


def _constant(files: OpenFiles, name: str) -> Any:
    """Read an entry that is not a tensor. An entry in a pickle is not opened, because a pickle can run any code."""
    place = f"{file_stem(name)}/meta.json"
    file = files.root / place
    if files.size(place) is None:
        raise CorruptDataError(f"{file} is missing; it holds the entry {name!r} of TorchRL's layout")
    document = parse_json(files.read(place), str(file))
    if not isinstance(document, dict) or "data" not in document:
        raise CorruptDataError(f"{file} does not hold the entry {name!r}")
    return document["data"]


def _length(files: OpenFiles) -> int | None:
    """Return the number of valid elements; None if it was not saved, as after a hook without a checkpointer."""
    file = files.root / LENGTH
    document = parse_json(files.read(LENGTH), str(file)) if files.size(LENGTH) is not None else {}
    if not isinstance(document, dict):
        raise CorruptDataError(f"{file} does not say how many elements were saved")
    length = document.get("len")
    if length is not None and type(length) is not int:
        raise CorruptDataError(f"{file} counts {length!r} elements")
    return length


def _refuse_other_entries(files: OpenFiles, folder: str, known: frozenset[str] = frozenset()) -> None:
    """Raise FormatError for entries that are not tensors, except the `known` ones: they would be lost silently."""
    place = f"{folder}meta.json"
    file = files.root / place
    document = parse_json(files.read(place), str(file)) if files.size(place) is not None else {}
    for name, entry in document.items() if isinstance(document, dict) else ():
        if not isinstance(entry, dict) or "type" not in entry:
            continue
        if entry["type"] == "TensorDict":
            _refuse_other_entries(files, f"{folder}{file_stem(name)}/")
        elif name not in known:
            raise FormatError(f"{file} has the entry {name!r} that is not a tensor, expected rows")


class _Groups(H5Source):
    """A file with many small datasets. They are examined with h5py's low-level interface, and closed at once."""

    def __init__(self, path: Path, place: Path) -> None:
        super().__init__(path, place)
        self._types: dict[Key, tuple[Any, np.dtype[Any], bool]] = {}

    def leaves(self, group: str) -> Iterator[tuple[Key, np.dtype[Any], tuple[int, ...], int]]:
        """Yield the key, the element type, the shape and the byte offset of the rows of every dataset in a group.

        The offset is -1 if the rows are stored in chunks, have not been written, or are not in the format of this
        machine.
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
                # Chunked data has no offset. Unwritten data has no size, and a wrong offset if there is a user block.
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
        """Return the element type, and whether the bytes in the file are those in memory."""
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
        """Fill an array with the bytes of the file from an offset on."""
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
        """Read a whole small dataset as a number or a list; None if it does not exist."""
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
        self._groups = in_order([name for name in names if name.startswith(TRAJECTORY)])
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
        """Read the shapes of all datasets; return for each leaf the number of rows up to the end of each trajectory."""
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


def _dtype_name(dtype: np.dtype[Any], name: str) -> str:
    try:
        return dtype_name(dtype)
    except SchemaError as error:
        raise FormatError(f"{name}: {error}") from error


class TorchrlReader(ForeignReader):
    """The valid rows of a storage that TorchRL saved, lane after lane; the rows of a lane start with the oldest.

    `keys` are the entries that are done flags and rewards. Root done flags in `left_out` are not among the fields.
    Opening checks that the files are consistent (FormatError, CorruptDataError). `files` are already open files, which
    the reader closes: files that replace them at `path` later are not read.
    """

    def __init__(
        self,
        path: Path,
        form: CompactForm,
        keys: TorchrlKeys,
        left_out: frozenset[Key] = frozenset(),
        files: OpenFiles | None = None,
    ) -> None:
        self._form, self.files = form, files or OpenFiles(path.parent if form == "h5" else path)
        self.path = path
        self.keys = keys
        self._left_out = left_out
        self._stored: StoredLeaves = (H5Leaves if self._form == "h5" else FolderLeaves)(path, self.keys, self.files)
        self._header = self._stored.header
        fields = self._ted_fields()
        self._ended = self._valid_ends()
        self.manifest = Manifest(
            kind="checkpoint", layout=self._form, request=Request("torchrl", str(path), path.name),
            steps=self._header.length, episodes=len(self._ended), fields=fields, files=(),
            content_digest=self.files_state(), created_by=created_by(),
        )  # fmt: skip

    def _arguments(self, files: OpenFiles) -> tuple[object, ...]:
        return self.path, self._form, self.keys, self._left_out, files

    @property
    def filled(self) -> FilledStorage:
        """The storage that these rows filled."""
        return self._header.filled

    @cached_property
    def episodes(self) -> EpisodeTable:
        """The episodes that done flags end, and the last one of every lane, whether it is finished or not."""
        return table_of_ends(self, self._ended, self.flagged)

    @cached_property
    def flagged(self) -> Array:
        """For each episode, whether it ends with a flag; otherwise it ends with its lane."""
        return flags_at(self, (NEXT, *self.keys.done), self._ended)

    @property
    def episode_text(self) -> list[dict[str, str]] | None:
        """None: TorchRL stores no texts of episodes."""
        return None

    def read(self, key: Key, start: int, stop: int) -> Array:
        leaf = self._leaf(key, start, stop)
        parts = [self._read(leaf, *run) for run in self._runs(start, stop)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, *leaf.shape), leaf.numpy)

    def pieces(self, key: Key, start: int, stop: int) -> Iterator[Array]:
        for first, last in self._runs(start, stop):
            yield self._read(self._leaf(key, start, stop), first, last)

    def documents(self) -> dict[str, bytes]:
        """Empty: TorchRL stores no documents."""
        return {}

    @property
    def has_digests(self) -> bool:
        """Whether there are digests next to the files: rbtool writes them, TorchRL does not."""
        return self._noted is not None

    def verify_files(self) -> None:
        """Compare the files with the digests, if there are any."""
        if self._noted is not None:
            require_digests(self._noted)

    @cached_property
    def _noted(self) -> Path | None:
        """The folder with the digests of these files."""
        folder = self.path.parent if self._form == "h5" else self.path
        if not (folder / DIGESTS).is_file():
            return None
        of_others = self._form == "h5" and self.path.name not in (noted_files(folder) or {self.path.name})
        return None if of_others else folder

    def close(self) -> None:
        self._stored.close()

    def _ted_fields(self) -> tuple[Field, ...]:
        root: list[Field] = []
        after: list[Field] = []
        for key, leaf in self._stored.fields.items():
            done, reward = key in self.keys.dones, key in self.keys.rewards
            field = Field(key, leaf.dtype, leaf.shape, "done" if done else "reward" if reward else leaf.role)
            if key[0] == NEXT:
                raise FormatError(f"{self.path} has the entry {key_name(key)!r}, which TorchRL's layout does not have")
            if not reward and not (done and key in self._left_out):
                root.append(field)
            if done or reward or key in self._stored.states:
                after.append(Field((NEXT, *key), field.dtype, field.shape, field.role))
        return (*root, *after)

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the runs of steps of the checkpoint that hold the valid steps `[start, stop)`, each within a lane.

        The checkpoint has the whole capacity of every lane, but only `rows` of it are valid:

            checkpoint, capacity 5    [a a a . .] [b b b . .]
            valid steps, rows 3       [a a a] [b b b]              steps [2, 5) -> runs [2, 3) and [5, 7)
        """
        rows, capacity = self._header.rows, self._header.capacity
        while start < stop:
            lane, row = divmod(start, rows)
            count = min(stop - start, rows - row)
            yield lane * capacity + row, lane * capacity + row + count
            start += count

    def _read(self, leaf: Field, start: int, stop: int) -> Array:
        """Read one run."""
        ahead = int(leaf.key[0] == NEXT)
        key = leaf.key[ahead:]
        if not ahead and key in self.keys.dones:
            return np.zeros((stop - start, *leaf.shape), leaf.numpy)
        if key not in self._stored.states:
            return self._stored.fetch(key, start, stop)
        ends = self._stored.ends
        low, high = np.searchsorted(ends, (start, stop - 1))
        first, last = start + int(low) + ahead, stop - 1 + int(high) + ahead
        return without_ends(self._stored.fetch(key, first, last + 1), ends[low:high] - start)

    def _valid_ends(self) -> Array:
        """Return the valid steps that end an episode: those with an extra row, and the last one of every lane."""
        rows, capacity = self._header.rows, self._header.capacity
        lane, row = np.divmod(self._stored.ends, capacity)
        valid = row < rows
        last = np.arange(1, self._header.lanes + 1, dtype=np.int64) * rows - 1
        return np.union1d(lane[valid] * rows + row[valid], last)


class TorchrlForm(ForeignForm):
    """TorchRL's flat, nested and H5 layouts of whole episodes."""

    def form_at(self, path: Path) -> CompactForm | None:
        try:
            if path.is_file():
                return "h5" if _is_h5(path) else None
            if has_manifest(path) or not (path / "meta.json").is_file():
                return None
            document = load_json(path / "meta.json")
        except UsageError:
            raise  # the file is in use
        except (RbtoolError, OSError):
            return None
        if not isinstance(document, dict) or STORAGE_SHAPE not in document:
            return None
        return "nested" if _is_nested(path) else "flat"

    def find(self, path: Path) -> Path | None:
        if self.form_at(path) is not None:
            return path
        if not path.is_dir() or has_manifest(path):
            return None
        folder = path / STORAGE_FOLDER if (path / BUFFER).is_file() else path
        if folder != path and self.form_at(folder) is not None:
            return folder
        files = sorted(folder.glob("*.h5")) if folder.is_dir() else []
        return files[0] if len(files) == 1 and self.form_at(files[0]) == "h5" else None

    def open(
        self, path: Path, options: Mapping[str, Any] | None = None, held: Collection[Key] | None = None
    ) -> TorchrlReader:
        form, keys = self.form_at(path), TorchrlKeys.of(options or {})
        if form is None:
            raise FormatError(f"{path} is not in TorchRL's flat, nested or H5 layout")
        return TorchrlReader(path, form, keys, frozenset() if held is None else frozenset(keys.dones).difference(held))

    def done_key(self, options: Mapping[str, Any]) -> Key:
        return TorchrlKeys.of(options).done

    def bytes(self, fields: Sequence[Field], filled: FilledStorage, form: CompactForm, episodes: int) -> int:
        return TorchrlPlan.of(fields, filled, TorchrlKeys(), form).bytes(episodes)

    def write(
        self, source: StepReader, target: Path, form: CompactForm, filled: FilledStorage, options: Mapping[str, Any],
        progress: Progress, compression: Compression | None = None,
    ) -> None:  # fmt: skip
        write_torchrl(source, target, form, filled, TorchrlKeys.of(options), progress, compression)


def _is_nested(folder: Path) -> bool:
    """Whether the leaves are ragged. For a damaged folder this is False; the reader raises the error."""
    try:
        with OpenFiles(folder) as files:
            return any(leaf.nested for leaf in read_tree(files, exact=False).values())
    except (RbtoolError, OSError):
        return False


def _is_h5(path: Path) -> bool:
    """Whether a file is HDF5 in TorchRL's layout. Files of rbtool begin with a manifest, before the HDF5 data."""
    if not begins_as_h5(path):
        return False
    from ..encodings.hdf5_files import root_members  # loads h5py, which other files do not need

    try:
        return STORAGE_SHAPE in root_members(path)
    except (OSError, RuntimeError, ValueError):
        return False
