"""Puts the rows of a checkpoint into any storage that has episodes; what cannot be written must hold them already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ..encodings import FilledStorage, differing_rows, leaf_parts
from ..errors import SchemaError
from ..format import Array, StepReader
from ..storages import ListStorage, PackedRecording, PackedStorage, Storage, TensorStorage
from ..storages.dataset import tensor_of
from ..ted import Field, Key, key_name
from .filling import fill_storage, structure_for
from .other_rows import rows_of_storage

__all__ = ["fill", "held_keys", "require_equal_rows"]

Fetch: TypeAlias = Callable[[Field, int, int], Array]
"""Reads rows `[start, stop)` of a leaf."""

_HERE = "load it into a LazyTensorStorage, which can be written to"


def fill(storage: Storage, reader: StepReader, filled: FilledStorage, asked: str) -> None:
    """Put the rows of a checkpoint, made of the storage `filled`, where they were there.

    Tensors and lists take them over. A packed dataset and a recording cannot: SchemaError unless they hold these very
    rows already. UsageError for other storages, which `asked` was to load.
    """
    if isinstance(storage, TensorStorage):
        fill_storage(storage, reader, filled)
    elif isinstance(storage, PackedStorage | PackedRecording):
        with rows_of_storage(storage, None, None, asked) as rows:
            _require_one_run(reader, filled, len(storage))
            require_equal_rows(
                rows, list(reader.fields), lambda field, *part: reader.read(field.key, *part), reader.path
            )
    else:
        _fill_list(storage, reader, filled, asked)


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
        rows_of_storage(storage, None, None, asked)  # says that there is no such thing
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
            items[row] = structure.build(iter([leaf[number].clone() for leaf in leaves]), torch.Size([]))
    storage.replace_all(items, capacity=filled.rows, last_row=filled.last_row)
