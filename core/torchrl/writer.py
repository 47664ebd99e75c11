"""Writes TED rows in the layouts that TorchRL 0.14 reads: flat, nested and H5.

H5 may have very many small datasets. For speed, they are created with h5py's low-level interface, and their rows are
written directly to their offsets in the file, without libhdf5. A dataset to which nothing is written, as for rows that
the storage never had, gets no space.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..encodings.compact import CompactForm, FilledStorage, differing_rows, leaf_parts, with_ends
from ..encodings.flat import nested_leaves, write_tables
from ..encodings.foreign import OWN_FORM
from ..encodings.h5 import Compression
from ..encodings.output_files import LatchedFile, LeafFile
from ..errors import SchemaError
from ..format import fs
from ..format.contracts import Array, StepReader
from ..format.files import bytes_of, read_regular
from ..format.memmap.tree import MappedLeaf, leaf_path, write_tree_meta
from ..format.syncing import replace_file, sync_file, write_file
from ..progress import Progress
from ..ted.schema import NEXT, Field, Key, as_numbers, field_named, file_stem, key_name
from .layout import H5_LENGTH, LENGTH, STORAGE_SHAPE, TRAJECTORY, Counts, TorchrlHeader, TorchrlKeys, TorchrlSink

if TYPE_CHECKING:
    import h5py

_DIMENSIONS = 2
"""The largest number of dimensions of a storage that TorchRL 0.14 loads from these layouts."""
_RESERVED = frozenset({"shape", "device", "_type"})
"""Names that tensordict reserves: leaves with such a name would be missing when the folder is loaded."""


@dataclass(frozen=True, slots=True)
class TorchrlPlan:
    """The leaves to store, by the TED key of their values; the key of each field is its key in the layout.

    `states` have an additional row after every end, `steps` one row for each step. `silent` are root done flags, which
    are not stored: TorchRL loads them as false, so they must be false.
    """

    header: TorchrlHeader
    done: Key
    states: Mapping[Key, Field]
    steps: Mapping[Key, Field]
    silent: Sequence[Key]

    @classmethod
    def of(cls, fields: Sequence[Field], filled: FilledStorage, keys: TorchrlKeys, form: CompactForm) -> TorchrlPlan:
        """Assign fields to the leaves of a form; SchemaError for the first one that the form cannot store."""
        header = _header(filled)
        by_key = {field.key: field for field in fields}
        _require_one_flag(by_key, keys)
        results = [key for key in dict.fromkeys((*keys.dones, *keys.rewards)) if (NEXT, *key) in by_key]
        after = [field.key[1:] for field in fields if field.key[0] == NEXT]
        states = {}
        for key in after:
            if key in results:
                continue
            if key not in by_key:
                raise _refused(f"{NEXT}.{key_name(key)} is below {NEXT!r} only", "its states are at the root, too")
            if (by_key[key].dtype, by_key[key].shape) != (by_key[NEXT, *key].dtype, by_key[NEXT, *key].shape):
                raise _refused(f"{key_name(key)} and what is below {NEXT!r} differ in type or shape", "they are alike")
            states[key] = by_key[key]
        reward = next((key for key in keys.rewards if key in by_key), None)
        if reward is not None:
            raise _refused(f"there is a {key_name(reward)} at the root", f"rewards are below {NEXT!r} only")
        silent = [key for key in keys.dones if key in by_key]
        lone = next((key for key in silent if key not in results), None)
        if lone is not None:
            raise _refused(f"{key_name(lone)} is at the root only", f"done flags are below {NEXT!r}")
        taken = {*states, *silent}
        steps = {key: by_key[key] for key in by_key if key[0] != NEXT and key not in taken}
        steps |= {(NEXT, *key): _moved(by_key[NEXT, *key], key) for key in results}
        plan = cls(header, (NEXT, *keys.done), states, steps, silent)
        _require_places(plan.leaves, form, keys)
        return plan

    @property
    def leaves(self) -> list[Field]:
        """All stored leaves."""
        return [*self.states.values(), *self.steps.values()]

    def bytes(self, ends: int) -> int:
        """Return the size of all rows in bytes, including those that were never written."""
        per_state = sum(field.row_bytes for field in self.states.values())
        return per_state * (self.header.steps + ends) + self.header.steps * sum(
            field.row_bytes for field in self.steps.values()
        )


def _require_places(leaves: Sequence[Field], form: CompactForm, keys: TorchrlKeys) -> None:
    names = keys.names | ({H5_LENGTH} if form == "h5" else {LENGTH})
    for field in leaves:
        if field.key[0] in names and form != "h5":
            raise _refused(f"there is an entry {field.name!r}", "that name is the layout's own")
        if form != "h5" and _RESERVED & set(field.key):
            raise _refused(f"there is an entry {field.name!r}", "tensordict keeps that name for itself")
        if form == "h5" and any("/" in part or "\0" in part or part in {"", ".", ".."} for part in field.key):
            raise _refused(f"there is an entry {field.name!r}", "HDF5 takes such a name for a path")
        if form == "h5" and field.dtype == "bfloat16":
            raise _refused(f"{field.name} is of bfloat16", "HDF5 has no such type", "use the flat or nested form")
        if "complex" in field.dtype:
            raise _refused(f"{field.name} is of {field.dtype}", "its memory-mapped tensors hold no such numbers")
        if not math.prod(field.shape):
            raise _refused(f"{field.name} has rows without elements", "every row has some")


def _header(filled: FilledStorage) -> TorchrlHeader:
    if len(filled.shape) > _DIMENSIONS:
        raise _refused(
            f"the storage has ndim={len(filled.shape)}", f"TorchRL 0.14 loads up to {_DIMENSIONS} dimensions"
        )
    if not filled.length:
        raise SchemaError("the storage holds no row; TorchRL's layout needs one", hint="write to it first")
    rows, *lanes = filled.shape
    capacity = filled.capacity // math.prod(lanes)
    if not filled.full:
        # The row before `shift` counts as an end. The last valid row must be one, because no written row follows it.
        return TorchrlHeader((capacity, *lanes), False, rows, filled.length)
    # For rows that are not rotated, TorchRL writes the capacity, but cannot load that into most buffers. It loads the
    # negative capacity, which means the same, into all of them.
    return TorchrlHeader((capacity, *lanes), True, filled.oldest or -capacity, filled.length)


def _require_one_flag(fields: Mapping[Key, Field], keys: TorchrlKeys) -> None:
    done = fields.get((NEXT, *keys.done))
    if done is None:
        raise _refused(
            f"there is no {NEXT}.{key_name(keys.done)}", "that flag ends episodes", "name it with done_key=..."
        )
    if done.shape not in {(), (1,)}:
        raise _refused(f"{done.name} has {list(done.shape)} numbers a step", "one flag ends an episode for all agents")


def _moved(field: Field, place: Key) -> Field:
    return Field(place, field.dtype, field.shape, field.role)


def _refused(found: str, expected: str, hint: str = OWN_FORM) -> SchemaError:
    return SchemaError(f"{found}, which TorchRL's layout cannot hold: {expected}", hint=hint)


@dataclass(frozen=True, slots=True)
class StatePart:
    """Consecutive rows of a state in a lane, at the root and below `next`.

    `ends` are the rows at which an episode ends, counted from the first of these rows. `broken` is the first row of the
    lane whose next observation differs from the following row although no episode ends there; None if there is none up
    to here.
    """

    root: Array
    after: Array
    ends: Array
    broken: int | None


def state_parts(
    source: StepReader, key: Key, leaf: Field, header: TorchrlHeader, ends: Array, lane: int
) -> Iterator[StatePart]:
    """Yield the valid rows of a lane in parts. `ends` count the capacity of all lanes, `source` only valid rows."""
    first, offset = lane * header.capacity, lane * header.rows
    own = ends[slice(*np.searchsorted(ends, (first, first + header.rows)))] - first
    held: Array | None = None
    for start, stop in leaf_parts(header.rows, leaf.row_bytes):
        root = source.read(key, offset + start, offset + stop)
        after = source.read((NEXT, *key), offset + start, offset + stop)
        wrong = differing_rows(after[:-1], root[1:]) + start
        if held is not None and len(differing_rows(held, root[:1])):
            wrong = np.append(start - 1, wrong)
        wrong = np.setdiff1d(wrong, own)
        held = after[-1:].copy()
        inside = own[slice(*np.searchsorted(own, (start, stop)))] - start
        yield StatePart(root, after, inside, int(wrong[0]) if len(wrong) else None)


def step_ends(source: StepReader, done: Key, header: TorchrlHeader) -> Array:
    """Return the steps, counted over the capacity of all lanes, after which states have an additional row.

    These are the steps with the flag `done`, and in every lane the one that ends an episode in the layout
    (`TorchrlHeader.forced`).
    """
    field, found = field_named(source.fields, done), [header.forced_steps]
    for start, stop in leaf_parts(source.manifest.steps, field.row_bytes):
        flags = as_numbers(source.read(field.key, start, stop), field.dtype).reshape(stop - start, -1) != 0
        lane, row = np.divmod(np.flatnonzero(flags.any(1)) + start, header.rows)
        found.append(lane * header.capacity + row)
    return np.unique(np.concatenate(found))


def write_torchrl(
    source: StepReader,
    target: Path,
    form: CompactForm,
    filled: FilledStorage,
    keys: TorchrlKeys,
    progress: Progress,
    compression: Compression | None = None,
) -> None:
    """Write the rows of the storage `filled` to `target`: a folder in a staging area or, for `h5`, a file in one.

    SchemaError for data that the layout cannot hold: ends of single agents, keys that are only below `next`, a root
    reward, root done flags that are set, next observations that differ from the following row although no episode ends,
    types or names that the files cannot hold, more than two dimensions. The files written before an error are not a
    valid checkpoint.
    """
    plan = TorchrlPlan.of(source.fields, filled, keys, form)
    ends = step_ends(source, plan.done, plan.header)
    fs.require_space(target.parent, plan.bytes(len(ends)) * plan.header.rows // plan.header.capacity)
    for key in plan.silent:
        _require_unset(source, key)
    with _sink(target, form, compression or Compression()) as sink:
        write_leaves(source, sink, plan.header, ends, plan.states, plan.steps)
        sink.finish(plan.header, keys)
    progress.advance(source.manifest.steps)


def write_leaves(
    source: StepReader,
    sink: TorchrlSink,
    header: TorchrlHeader,
    ends: Array,
    states: Mapping[Key, Field],
    steps: Mapping[Key, Field],
    *,
    every: bool = False,
) -> None:
    """Write all leaves, one after the other, each lane after lane. All layouts and the hooks use this loop.

    `states` and `steps` map the TED key of the rows to the leaf that stores them. `ends` come from `step_ends`; for
    `every`, see `Counts`. SchemaError for a state whose next observation differs from the following row although no
    episode ends.
    """
    counts = Counts(header, ends, every=every)
    for key, leaf in states.items():
        sink.begin(leaf, counts.states)
        for lane in range(header.lanes):
            for part in state_parts(source, key, leaf, header, ends, lane):
                if part.broken is not None and part.broken <= header.forced:
                    raise SchemaError(
                        f"{NEXT}.{key_name(key)} of step {lane * header.rows + part.broken:,} differs from the "
                        "following row, although no episode ends there: TorchRL's layout cannot hold that",
                        hint=OWN_FORM,
                    )
                sink.append(with_ends(part.root, part.after, part.ends))
            sink.skip(header.capacity - header.rows)
        sink.end()
    for key, leaf in steps.items():
        sink.begin(leaf, counts.steps)
        for lane in range(header.lanes):
            offset = lane * header.rows
            for start, stop in leaf_parts(header.rows, leaf.row_bytes):
                sink.append(source.read(key, offset + start, offset + stop))
            sink.skip(header.capacity - header.rows)
        sink.end()


_CONSTANT = {"_type": "<class 'tensordict.tensorclass.NonTensorData'>", "_is_non_tensor": True, "_metadata": None}


class FolderSink(TorchrlSink):
    """Writes the flat or nested layout into an empty folder; if `counted`, also the number of valid elements."""

    def __init__(self, folder: Path, *, nested: bool, counted: bool = True) -> None:
        self._folder = folder
        self._counted = counted
        self._nested = nested
        self._leaves: dict[Key, MappedLeaf] = {}
        self._counts: dict[Key, Array] = {}
        self._file: LeafFile | None = None

    def begin(self, leaf: Field, counts: Array) -> None:
        self._leaves[leaf.key] = MappedLeaf(leaf.dtype, (int(counts.sum()), *leaf.shape))
        self._counts[leaf.key] = counts
        self._row_bytes = leaf.row_bytes
        self._file = LeafFile(self._folder / leaf_path(leaf.key), hashed=False)

    def append(self, rows: Array) -> None:
        self._open_file.write([bytes_of(rows)])

    def skip(self, rows: int) -> None:
        self._open_file.skip(rows * self._row_bytes)

    def end(self) -> None:
        self._open_file.finish()

    @property
    def _open_file(self) -> LeafFile:
        assert self._file is not None, "begin comes first"
        return self._file

    def finish(self, header: TorchrlHeader, keys: TorchrlKeys) -> None:
        """Write the documents that describe the leaves, and the tables of the nested layout."""
        leaves, trajectories = self._leaves, len(next(iter(self._counts.values())))
        if self._nested:
            write_tables(self._folder, leaves, self._counts)
            leaves = nested_leaves(leaves, trajectories)
        write_tree_meta(self._folder, leaves, (trajectories,) if self._nested else ())
        meta = self._folder / "meta.json"
        entries = {keys.is_full: header.full, keys.shift: header.shift, STORAGE_SHAPE: list(header.shape)}
        document = {name: {"type": "NonTensorData"} for name in entries} | json.loads(read_regular(meta))
        replace_file(meta, json.dumps(document, ensure_ascii=False).encode())
        for name, value in entries.items():
            path = self._folder / file_stem(name) / "meta.json"
            fs.make_folder(path.parent)
            write_file(path, json.dumps(_CONSTANT | {"data": value}).encode())
        if self._counted:
            length = {"metadata": {}, "is_pytree": False, "len": header.length}
            write_file(self._folder / LENGTH, json.dumps(length).encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


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
        """Do nothing: rows are written when they are appended."""

    def finish(self, header: TorchrlHeader, keys: TorchrlKeys) -> None:
        """Write the four small datasets of the header, and flush the file to the disk."""
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
        """Create the next dataset if the current one is full. It gets space in the file only if it is `written`."""
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
    """The creation properties of datasets and of the groups around them."""

    def __init__(self) -> None:
        from h5py import h5p, h5t

        from ..encodings.h5 import allocated_at_once

        self.placed, self.unplaced = allocated_at_once(), h5p.create(h5p.DATASET_CREATE)
        for stored in (self.placed, self.unplaced):
            stored.set_obj_track_times(False)  # so that equal rows give equal files
        self.links, self.unicode_links = (h5p.create(h5p.LINK_CREATE) for _ in range(2))
        self.unicode_links.set_char_encoding(h5t.CSET_UTF8)
        for links in (self.links, self.unicode_links):
            links.set_create_intermediate_group(True)


def _sink(target: Path, form: CompactForm, compression: Compression) -> TorchrlSink:
    if form == "h5":
        return GroupSink(target, compression)
    return FolderSink(target, nested=form == "nested")


def _require_unset(source: StepReader, key: Key) -> None:
    field = field_named(source.fields, key)
    for start, stop in leaf_parts(source.manifest.steps, field.row_bytes):
        if source.read(key, start, stop).any():
            raise SchemaError(
                f"{key_name(key)} is set at the root, which TorchRL's layout cannot hold: it loads as false",
                hint=OWN_FORM,
            )
