"""In-place edits of entries: of all stored elements, of some, or of those not overwritten since they were sampled."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorClass, is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError
from ..storages.base import Storage
from ..storages.cursors import rows_named
from ..storages.tensor import TensorStorage
from ..storages.write_log import Change
from ..ted.schema import Key, Numbers, as_key
from ..writers.base import Writer
from .pytrees import without_arrays

EntryKey: TypeAlias = str | tuple[str, ...]
WHOLE = slice(None)
Flags: TypeAlias = NDArray[np.bool_]


def edit_entries(storage: Storage, values: Mapping[Any, Any], index: Any = WHOLE, dim_extend: int = 0) -> None:
    """Replace entries of the elements at `index` in place: all of the entries, or none if one does not fit.

    The caller excludes other writers.

    Raises:
        SchemaError: a value does not have the shape and element type of `rb[:][key]`.
        MissingKeyError: an entry does not exist.
    """
    checked = []
    index = _apart(storage, index)
    for key, value in values.items():
        leaf = _leaf(storage, key, dim_extend)
        fitting = _apart(storage, _like(leaf, value, key))
        expected = leaf.shape if index is WHOLE else leaf[index].shape
        if expected != fitting.shape:
            raise SchemaError(f"{_name(key)} is {list(fitting.shape)}, expected {list(expected)}")
        checked.append((as_key(key), leaf, fitting))
    count = storage.shape[0]
    rows = slice(0, count) if dim_extend or index is WHOLE else rows_named(index, count)
    for path, leaf, fitting in checked:
        storage.keep(rows, path)
        leaf[index] = fitting
    for path, leaf, _ in checked:
        storage.put_back(path, leaf, index)
    storage.mark_changed(Change(keys=tuple(path for path, _, _ in checked)))


def replace_entry(storage: Storage, key: EntryKey, value: Any, dim_extend: int) -> None:
    """Replace or add an entry, or a nest of entries, of all elements; the caller excludes other writers."""
    values = dict(flat_entries(value, as_key(key)))
    try:
        edit_entries(storage, values, dim_extend=dim_extend)
    except MissingKeyError:
        if not all(isinstance(part, torch.Tensor) for part in values.values()):
            raise
        storage.add_entries({
            path: part.transpose(0, dim_extend) if part.dim() > dim_extend else part
            for path, part in values.items()
        })  # fmt: skip


def _leaf(storage: Storage, key: EntryKey, dim_extend: int) -> torch.Tensor:
    """Return an editable tensor with an entry of all elements, in the user's layout of dimensions."""
    leaf = storage.editable(as_key(key))
    return leaf.transpose(0, dim_extend) if dim_extend else leaf


def _name(key: EntryKey) -> str:
    return repr(key if isinstance(key, str) else ".".join(key))


def _like(leaf: torch.Tensor, value: Any, key: EntryKey) -> torch.Tensor:
    """Return `value` as a tensor of the leaf's element type.

    SchemaError if it is a tensor of another type, or numbers that a type of whole numbers cannot hold.
    """
    if not isinstance(value, torch.Tensor):
        made = torch.as_tensor(value, dtype=leaf.dtype, device=leaf.device)
        whole = not (leaf.is_floating_point() or leaf.is_complex())
        if whole and not np.array_equal(made.numpy(force=True), np.asarray(value)):
            raise SchemaError(f"{_name(key)} is {leaf.dtype}, which cannot hold {reprlib.repr(value)}")
        return made
    if value.dtype != leaf.dtype:
        raise SchemaError(f"{_name(key)} is {value.dtype}, expected {leaf.dtype}")
    return value


def _apart(storage: Storage, value: Any) -> Any:
    """Return a value, or a copy of a tensor that may be a view of stored elements, which the edit changes."""
    return value.clone() if isinstance(value, torch.Tensor) and storage.may_hold(value) else value


def flat_entries(nest: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return the leaves of a tensordict or a nest of dicts with their keys."""
    if not (is_tensor_collection(nest) or isinstance(nest, Mapping)):
        return [(path, nest)]
    found = []
    for key, value in nest.items():
        found += flat_entries(value, (*path, *((key,) if isinstance(key, str) else key)))
    return found


class ConditionalUpdateResult(TensorClass["nocast"]):  # type: ignore[type-arg, name-defined]
    """The outcome of each record passed to `ReplayBuffer.update_if_present`: a tensorclass `[N]`.

    Attributes:
        updated: whether the record was applied, bool `[N]`. Without versions, this includes records that a later record
            for the same element replaced.
        version_rejected: whether the element still exists, but its version, or another record for it, is newer, bool
            `[N]`; None for updates without versions.

    All other records are stale: their element was overwritten, or never written.
    """

    updated: torch.Tensor
    version_rejected: torch.Tensor | None = None

    def __post_init__(self) -> None:  # also called when an object is indexed or stacked
        if self.batch_size != self.updated.shape:
            self.batch_size = self.updated.shape

    @property
    def updated_count(self) -> int:
        """The number of applied records."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """The number of records whose version is too old."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """The number of records whose element no longer exists."""
        return self.updated.numel() - self.updated_count - self.version_rejected_count


def update_present(
    storage: Storage,
    writer: Writer,
    index: Any,
    generation: Any,
    patch: Any,
    version_key: str | tuple[str, ...] | None,
    version: Any,
    *,
    require_newer: bool,
) -> ConditionalUpdateResult:
    """Update the elements that have not been overwritten; see `ReplayBuffer.update_if_present`.

    The caller excludes other writers.
    """
    if (version_key is None) != (version is None):
        raise UsageError("version_key and version go together: give both or neither")
    storage = _required_storage(storage, writer)
    places, rows = _places_of(storage, index)
    stamps = _numbers("generation", generation, len(rows))
    entries = [_entry_of(storage, as_key(key), values, len(rows)) for key, values in flat_entries(patch)]
    versions = None
    if version_key is not None:
        versions = _versions(storage, as_key(version_key), version, len(rows), entries)
    now = writer.generations_of(torch.from_numpy(rows)).numpy()
    live: Flags = (now == stamps) & (now >= 0) & (rows < storage.shape[0])
    accepted = live.copy()
    if versions is not None:
        stored = versions.leaf[places].reshape(-1).numpy(force=True)[live]
        new = versions.values.reshape(-1).numpy(force=True)
        accepted[live] = new[live] > stored if require_newer else new[live] >= stored
    winners = _apply(storage, [*entries, *([versions] if versions else [])], places, rows, accepted, versions)
    if versions is not None:
        accepted = winners
    rejected = None if versions is None else torch.from_numpy(live & ~accepted)
    return ConditionalUpdateResult(torch.from_numpy(accepted), rejected)


class _ConditionalEntry(NamedTuple):
    """An entry of all stored elements, and new values for some of them, `[N, *feature]`."""

    key: Key
    leaf: torch.Tensor
    values: torch.Tensor


def _required_storage(storage: Storage, writer: Writer) -> TensorStorage:
    if not isinstance(storage, TensorStorage):
        raise SchemaError(f"conditional updates need a TensorStorage, found a {type(storage).__name__}")
    if not writer.tracks_generations:
        raise SchemaError(
            f"conditional updates need generations, which this {type(writer).__name__} does not track",
            hint="create the writer with track_generations=True",
        )
    if not storage.initialized:
        raise SchemaError("conditional updates need stored elements, and nothing was ever written")
    return storage


def _places_of(storage: Storage, index: Any) -> tuple[Any, Numbers]:
    """Return the index of the records' elements, in which missing ones are replaced by row 0, and their rows."""
    ndim, shape = storage.ndim, tuple(storage.shape)
    parts = [_numbers("index", part) for part in index] if isinstance(index, tuple) else None
    given = np.stack(parts, -1) if parts else _numbers("index", index)
    given = given.reshape(-1, ndim) if ndim > 1 or given.ndim > 1 else given.reshape(-1, 1)
    if (given[:, 1:] < 0).any() or (given[:, 1:] >= np.array(shape[1:], np.int64)).any():
        raise UsageError(f"the index has coordinates outside the lanes {list(shape[1:])}")
    rows = given[:, 0]
    valid = np.where((rows >= 0) & (rows < shape[0]), rows, 0)
    columns = [torch.from_numpy(valid), *(torch.from_numpy(given[:, dim].copy()) for dim in range(1, ndim))]
    return tuple(columns), rows


def _entry_of(storage: Storage, key: Key, given: Any, count: int) -> _ConditionalEntry:
    leaf = storage.editable(key)
    feature = leaf.shape[storage.ndim :]
    values = without_arrays(given)
    if not isinstance(values, torch.Tensor) or values.dtype != leaf.dtype:
        found = values.dtype if isinstance(values, torch.Tensor) else type(values).__name__
        raise UsageError(f"{'.'.join(key)!r} is {found} in the patch, expected {leaf.dtype}")
    if values.numel() != count * feature.numel():
        raise UsageError(f"{'.'.join(key)!r} is {list(values.shape)} in the patch, expected {[count, *feature]}")
    values = _apart(storage, values.detach())
    return _ConditionalEntry(key, leaf, values.reshape(count, *feature).to(leaf.device))


def _versions(
    storage: Storage, key: Key, version: Any, count: int, entries: list[_ConditionalEntry]
) -> _ConditionalEntry:
    if any(entry.key[: len(key)] == key[: len(entry.key)] for entry in entries):
        raise UsageError(f"the version {'.'.join(key)!r} is part of the patch: pass it as `version` instead")
    if any("." in part for part in key):
        raise UsageError(f"version_key is {'.'.join(key)!r}, expected a key without dots, or a tuple of keys")
    leaf = storage.editable(key)
    if leaf.shape[storage.ndim :].numel() != 1:
        raise UsageError(
            f"the version {'.'.join(key)!r} has the shape {list(leaf.shape)}, expected one number for each element"
        )
    version = without_arrays(version)
    if not isinstance(version, torch.Tensor):
        version = _exact_numbers(key, version, leaf.dtype)
    if version.numel() == 1:
        version = version.reshape(1).expand(count)
    return _entry_of(storage, key, version, count)


def _apply(
    storage: TensorStorage,
    entries: list[_ConditionalEntry],
    places: Any,
    rows: Numbers,
    accepted: Flags,
    versions: _ConditionalEntry | None,
) -> Flags:
    """Write the accepted records, at most one for each element; return which ones were written, bool `[N]`."""
    found = np.zeros(len(accepted), np.bool_)
    chosen = np.flatnonzero(accepted)
    if not len(chosen):
        return found
    cells = np.ravel_multi_index([part.numpy()[chosen] for part in places], tuple(storage.shape))
    rank = np.zeros(len(chosen)) if versions is None else versions.values.reshape(-1).numpy(force=True)[chosen]
    order = np.lexsort((np.arange(len(chosen)), rank, cells))
    last = np.append(cells[order][1:] != cells[order][:-1], True)
    found[chosen[order[last]]] = True
    winners = torch.from_numpy(np.flatnonzero(found))
    where = tuple(part[winners] for part in places)
    changed = torch.from_numpy(np.unique(rows[winners.numpy()]))
    for entry in entries:
        storage.keep(changed, entry.key)
        entry.leaf[where] = entry.values[winners.to(entry.values.device)]
        storage.put_back(entry.key, entry.leaf, where if len(where) > 1 else where[0])
    storage.mark_changed(Change(changed, tuple(entry.key for entry in entries)))
    return found


def _exact_numbers(key: Key, given: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a number or a list of numbers as a tensor of this element type.

    Fractions may be rounded to a floating type. UsageError if any other value cannot be represented exactly.
    """
    try:
        values = np.asarray(given)
        whole = np.can_cast(values.dtype, np.int64)
        found = torch.from_numpy(values.astype(np.int64 if whole else np.float64, casting="safe"))
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"version is {given!r}, expected numbers for {'.'.join(key)!r}") from error
    made = found.to(dtype)
    if (whole or not dtype.is_floating_point) and not torch.equal(made.to(found.dtype), found):
        raise UsageError(f"version is {given!r}, which {'.'.join(key)!r}, {dtype}, cannot hold")
    return made


def _numbers(name: str, given: Any, count: int | None = None) -> Numbers:
    """Return whole numbers as an int64 array `[count]`; UsageError for anything else."""
    found = torch.as_tensor(without_arrays(given)) if not isinstance(given, Mapping | str) else torch.empty(0)
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise UsageError(f"{name} is {found.dtype}, expected whole numbers")
    if count is not None and found.numel() != count:
        raise UsageError(f"{name} has {found.numel()} numbers for {count} elements")
    values = found.numpy(force=True).astype(np.int64)
    return values if count is None else values.reshape(-1)
