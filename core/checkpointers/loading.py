"""Puts the rows of a checkpoint into a storage; a storage that cannot be written to must hold them already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from ..encodings.layout import FilledStorage
from ..encodings.rows import differing_rows, leaf_parts
from ..errors import CorruptDataError, SchemaError
from ..format.contracts import Array, StepReader
from ..format.together import run_together, threads_for_memory
from ..storages.base import Storage
from ..storages.codec import dtype_named
from ..storages.columns import Columns
from ..storages.dataset import tensor_of
from ..storages.list_storage import ListStorage
from ..storages.packed import PackedStorage
from ..storages.packed_recording import PackedRecording
from ..storages.pytree import TensorDictNode, TreeSpec, tree_spec_of
from ..storages.tensor import TensorStorage
from ..storages.tree_files import spec_from_json
from ..ted.schema import NEXT, Field, Key, key_name
from .episode_ends import LaneLeaf, Order
from .storage_rows import rows_of_storage


def fill_storage(
    storage: TensorStorage, reader: StepReader, filled: FilledStorage, checks: Sequence[Callable[[], None]] = ()
) -> None:
    """Replace the contents of a storage by the rows of a checkpoint, each where it was in the storage `filled`.

    If a buffer loads a ring that was full into a larger storage, they lie in the order of time instead.

    SchemaError, with nothing changed, for data of other keys, types or shapes, and for more rows than there is room
    for. The bytes must have been verified before: what fails then leaves only part of the rows replaced. A storage
    that holds nothing yet may have them verified meanwhile, by `checks`: if one of them raises, it is empty again.
    """
    if len(filled.shape) != storage.ndim:
        raise SchemaError(
            f"{reader.path} was saved with ndim={len(filled.shape)}, this storage has ndim={storage.ndim}"
        )
    fields = {field.key: field for field in reader.fields}
    structure = structure_for(storage, reader, filled)
    keys = list(structure.paths())
    lead = filled.shape
    likes = [torch.empty((*lead, *fields[key].shape), dtype=_dtype(fields[key]), device="meta") for key in keys]

    def write(columns: Columns, in_time: bool) -> None:
        order = Order(lead[0], filled.length // max(lead[0], 1), 0 if in_time else filled.oldest)
        leaves = dict(zip(columns.names, columns.leaves, strict=True))
        groups = [
            [(field, LaneLeaf(leaves[key_name(field.key)], field, storage.ndim)) for field in group]
            for group in _groups(fields)
        ]
        parts = [
            partial(_fill_part, targets, reader, order, *part) for targets in groups for part in _parts(targets, reader)
        ]
        together = reader.serves_threads and all(leaf.in_place for targets in groups for _, leaf in targets)
        if parts and together:
            parts.pop()()  # what the reader makes at its first use is there for all threads
        run_together([*checks, *parts], threads_for_memory() if together else 1)

    storage.fill(structure, likes, filled.length, write, capacity=filled.rows, last_row=filled.last_row)


def _groups(fields: Mapping[Key, Field]) -> list[list[Field]]:
    """Put fields together whose rows are read from the same place: a key at the root and below `next`."""
    alone = [key for key in fields if key[0] != NEXT or key[1:] not in fields]
    pairs = {key: [key, (NEXT, *key)] if (NEXT, *key) in fields else [key] for key in alone}
    return [[fields[key] for key in keys] for keys in pairs.values()]


_Targets: TypeAlias = Sequence[tuple[Field, LaneLeaf]]


def _parts(targets: _Targets, reader: StepReader) -> Iterator[tuple[int, int]]:
    return leaf_parts(reader.manifest.steps, max(field.row_bytes for field, _ in targets))


def _fill_part(targets: _Targets, reader: StepReader, order: Order, start: int, stop: int) -> None:
    """Put the steps from `start` to `stop` into leaves that are read from the same place."""
    for field, leaf in targets:
        if leaf.in_place:
            for run in order.runs(start, stop):
                _copy(reader.pieces(field.key, run.start, run.stop), leaf.read(run))
        else:
            _write(reader.pieces(field.key, start, stop), leaf, order, start)


def _copy(pieces: Iterable[Array], rows: Array) -> None:
    """Put rows, piece by piece, into an array that is a storage's own memory."""
    begin = 0
    for piece in pieces:
        end = begin + len(piece)
        rows[begin:end] = piece
        begin = end


def _write(pieces: Iterable[Array], leaf: LaneLeaf, order: Order, start: int) -> None:
    """Put rows, piece by piece, where a storage has those from step `start` on."""
    for piece in pieces:
        for run in order.runs(start, start + len(piece)):
            leaf.write(run, piece[run.start - start : run.stop - start])
        start += len(piece)


def _dtype(field: Field) -> torch.dtype:
    return dtype_named(f"torch.{field.dtype}")


def structure_for(storage: TensorStorage | None, reader: StepReader, filled: FilledStorage) -> TreeSpec:
    """How the data is made. A class that is not loaded here is not needed where the storage has the same leaves.

    CorruptDataError if these are not the leaves there are.
    """
    keys = [field.key for field in reader.fields]
    if filled.structure is None:
        return TensorDictNode.nested(keys)
    try:
        structure = spec_from_json(filled.structure)
    except SchemaError:
        if storage is None or not storage.initialized or list(storage.structure.paths()) != keys:
            raise
        return storage.structure
    if sorted(structure.paths()) != sorted(keys):
        raise CorruptDataError(f"{reader.path} does not say how its leaves belong together")
    return structure


Fetch: TypeAlias = Callable[[Field, int, int], Array]
"""Reads rows `[start, stop)` of a leaf."""

_HERE = "load it into a LazyTensorStorage, which can be written to"


def fill(
    storage: Storage, reader: StepReader, filled: FilledStorage, asked: str, checks: Sequence[Callable[[], None]] = ()
) -> None:
    """Put the rows of a checkpoint, made of the storage `filled`, where they were there.

    Tensors and lists take them over. A packed dataset and a recording cannot: SchemaError unless they hold these very
    rows already. UsageError for other storages, which `asked` was to load. `checks` are those of `fill_storage`.
    """
    if isinstance(storage, TensorStorage):
        fill_storage(storage, reader, filled, checks)
    elif isinstance(storage, PackedStorage | PackedRecording):
        with rows_of_storage(storage, None, None, asked) as rows:
            _require_one_run(reader, filled, len(storage))
            require_equal_rows(
                rows, list(reader.fields), lambda field, *part: reader.read(field.key, *part), reader.path
            )
    else:
        _fill_list(storage, reader, filled, asked)


def replace_rows(storage: Storage, rows: Any, *, capacity: int | None = None, last_row: int | None = None) -> None:
    """Replace the contents of any storage that can be written; SchemaError, with nothing changed, where it cannot hold
    them.

    The rows are from a storage with room for `capacity` rows, of which `last_row` was written last.
    """
    if isinstance(storage, TensorStorage):
        structure = tree_spec_of(rows, storage.ndim)
        tensors = structure.flatten(rows)
        if not tensors:
            raise SchemaError("the rows to load have no tensor")
        lead = tensors[0].shape[: storage.ndim]
        storage.fill(structure, tensors, lead.numel(), capacity=capacity, last_row=last_row)
    elif isinstance(storage, ListStorage):
        storage.replace_all(list(rows), capacity=capacity, last_row=last_row)
    else:
        storage.load_state_dict({"_storage": rows, "_len": len(rows), "_capacity": capacity})
        storage.last_cursor = last_row


def held_keys(storage: Storage) -> frozenset[Key] | None:
    """The keys of what a storage holds; None where it holds nothing yet."""
    if isinstance(storage, TensorStorage):
        return frozenset(storage.structure.paths()) if storage.initialized else None
    if isinstance(storage, PackedStorage):
        return frozenset(field.key for field in storage.fields)
    if not len(storage):
        return None
    first: Any = storage[0]
    return frozenset(key if isinstance(key, tuple) else (key,) for key in first.keys(True, True))


def require_equal_rows(rows: StepReader, fields: list[Field], fetch: Fetch, place: object) -> None:
    """Compare every value of `rows` with what `fetch` reads from `place`; SchemaError names the first that differs."""
    one, other = ({field.key: (field.dtype, field.shape) for field in side} for side in (rows.fields, fields))
    odd = next((key for key in {**one, **other} if one.get(key) != other.get(key)), None)
    if odd is not None:
        raise SchemaError(
            f"{key_name(odd)!r} of {place} is not that of the {rows.path}, which cannot be written to", hint=_HERE
        )
    for field in fields:
        for start, stop in leaf_parts(rows.manifest.steps, field.row_bytes):
            wrong = differing_rows(rows.read(field.key, start, stop), fetch(field, start, stop))
            if len(wrong):
                raise SchemaError(
                    f"{field.name!r} of step {start + int(wrong[0]):,} of {place} is not that of the {rows.path}, "
                    "which cannot be written to",
                    hint=_HERE,
                )


def _require_one_run(reader: StepReader, filled: FilledStorage, steps: int) -> None:
    if filled.shape != (steps,) or filled.oldest:
        raise SchemaError(
            f"{reader.path} holds {reader.manifest.steps:,} steps of a storage of {list(filled.shape)}, this one has "
            f"{steps:,} and cannot be written to",
            hint=_HERE,
        )


def _fill_list(storage: Storage, reader: StepReader, filled: FilledStorage, asked: str) -> None:
    """Make an element of every row."""
    if not isinstance(storage, ListStorage) or type(storage).__name__ == "CompressedListStorage":
        rows_of_storage(storage, None, None, asked)  # raises UsageError
        return
    if len(filled.shape) != 1:
        raise SchemaError(f"{reader.path} was saved with ndim={len(filled.shape)}, a list has ndim=1")
    storage.require_room(filled.length)
    structure = structure_for(None, reader, filled)
    fields = {field.key: field for field in reader.fields}
    ordered = [fields[path] for path in structure.paths()]
    items: list[Any] = [None] * filled.length
    for start, stop in reader.chunks():
        leaves = [tensor_of(reader.read(field.key, start, stop).copy(), field) for field in ordered]
        for number in range(stop - start):
            row = (start + number + filled.oldest) % filled.length
            items[row] = structure.unflatten(iter([leaf[number].clone() for leaf in leaves]), torch.Size([]))
    storage.replace_all(items, capacity=filled.rows, last_row=filled.last_row)
