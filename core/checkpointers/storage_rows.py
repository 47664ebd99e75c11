"""Reads the rows of a storage as steps of episodes, in the order of time, and fills a storage with such steps.

Checkpoints of whole episodes are written from these steps. They are read lane after lane, in each lane from the oldest
to the newest. A lane is one of several parallel environments: an element of the dimensions after the first that count
elements. A storage of one dimension has one lane.

    storage [rows 4, lanes 2], full, row 2 is the oldest       steps in the order of time
        row 0    a2  b2                                        a0 a1 a2 a3 │ b0 b1 b2 b3
        row 1    a3  b3
        row 2    a0  b0
        row 3    a1  b1

A read-only storage cannot be filled: it can only "load" a checkpoint of the rows that it holds already.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase

from ..encodings.compact import STORAGE, FilledStorage, differing_rows, leaf_parts, table_of_ends
from ..errors import CorruptDataError, MissingKeyError, SchemaError, UsageError, nearest
from ..format.contracts import Array, StepReader
from ..format.episodes import EpisodeTable
from ..format.manifest import Manifest, Request
from ..format.memmap.builder import created_by
from ..format.packed.reader import PackedReader
from ..format.threads import run_together, threads_for_memory
from ..storages.base import Storage
from ..storages.codec import dtype_named
from ..storages.columns import Columns, plain_column, renames
from ..storages.cursors import newest_row
from ..storages.dataset import tensor_of
from ..storages.list_storage import CompressedListStorage, ListStorage
from ..storages.packed import PackedRecording, PackedStorage
from ..storages.pytree import (
    TensorDictNode,
    TreeSpec,
    has_stacks,
    in_order,
    is_tree,
    spec_from_json,
    spec_to_json,
    tree_spec_of,
)
from ..storages.tensor import TensorStorage
from ..ted.schema import (
    DTYPES,
    FLAGS,
    NEXT,
    REWARD,
    SINGLETONS,
    Field,
    Key,
    Role,
    as_numbers,
    field_named,
    key_name,
    role_of,
    state_keys,
)


@dataclass(frozen=True, slots=True)
class Run:
    """Where consecutive steps are in a storage: steps `[start, stop)` are in `rows` of `lanes`."""

    start: int
    stop: int
    lanes: slice
    rows: slice


@dataclass(frozen=True, slots=True)
class Order:
    """The order of steps in a storage.

    Attributes:
        rows: the number of valid rows.
        lanes: the number of lanes.
        oldest: the row that was written first.
    """

    rows: int
    lanes: int
    oldest: int

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield where the steps `[start, stop)` are. A run of several lanes has all rows of each of them."""
        while start < stop:
            lane, begin = divmod(start, self.rows)
            whole = (stop - start) // self.rows if begin == 0 and not self.oldest else 0
            if whole > 1:
                end = start + whole * self.rows
                yield Run(start, end, slice(lane, lane + whole), slice(0, self.rows))
            else:
                row = (self.oldest + begin) % self.rows
                count = min(stop - start, self.rows - begin, self.rows - row)
                end = start + count
                yield Run(start, end, slice(lane, lane + 1), slice(row, row + count))
            start = end


class LaneLeaf:
    """A leaf of a storage with lanes, which is read and written in runs; `ndim` dimensions count elements."""

    def __init__(self, tensor: torch.Tensor, field: Field, ndim: int) -> None:
        self._field = field
        self._others = tensor.shape[1:ndim]
        plain = plain_column(tensor)
        self._lane_by_lane = ndim > 1 and not plain.is_contiguous()
        # If lanes are not adjacent in memory, there may be no view with a single dimension for all of them.
        self._rows = plain if ndim == 1 or self._lane_by_lane else plain.flatten(1, ndim - 1)
        self._array = _array(self._rows, field) if _is_plain(self._rows) else None
        self._one_lane = ndim == 1

    @property
    def in_place(self) -> bool:
        """Whether `read` returns the storage's own memory, so that rows can also be written there."""
        return self._array is not None and self._one_lane

    def read(self, run: Run) -> Array:
        """Return the steps of a run in their order; a view of the storage if they are adjacent in memory."""
        if self._array is not None and self._one_lane:
            return self._array[run.rows]
        if self._array is not None:
            found = self._array[run.rows, run.lanes]
        elif self._one_lane:
            return host_array(self._rows[run.rows], self._field)
        else:
            found = host_array(self._part(run), self._field)
        lanes_first: Array = np.ascontiguousarray(found.swapaxes(0, 1))
        return lanes_first.reshape(run.stop - run.start, *self._field.shape)

    def write(self, run: Run, rows: Array) -> None:
        """Write the steps of a run to the storage."""
        if self.in_place:
            self.read(run)[...] = rows
            return
        count, lanes = run.rows.stop - run.rows.start, run.lanes.stop - run.lanes.start
        tensor = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
        tensor = tensor if tensor.dtype is self._rows.dtype else tensor.view(self._rows.dtype)
        by_row = tensor.reshape(lanes, count, *self._field.shape).swapaxes(0, 1)
        if self._one_lane:
            self._rows[run.rows].copy_(by_row[:, 0])
        elif self._lane_by_lane:
            for number in range(lanes):
                self._rows[self._place(run, number)].copy_(by_row[:, number])
        else:
            self._rows[run.rows, run.lanes].copy_(by_row)

    def _part(self, run: Run) -> torch.Tensor:
        """Return the rows of a run, `[rows, lanes, ...]`."""
        if not self._lane_by_lane:
            return self._rows[run.rows, run.lanes]
        lanes = range(run.lanes.stop - run.lanes.start)
        return torch.stack([self._rows[self._place(run, number)] for number in lanes], 1)

    def _place(self, run: Run, number: int) -> tuple[slice | int, ...]:
        """Return the index of the `number`-th lane of a run."""
        coordinates = np.unravel_index(run.lanes.start + number, self._others)
        return (run.rows, *map(int, coordinates))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether NumPy can view the memory of a tensor as its values."""
    return tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


def host_array(tensor: torch.Tensor, field: Field) -> Array:
    """Return the values of a tensor on any device as an array; bfloat16 as its bits."""
    return _array(tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg(), field)


def _array(tensor: torch.Tensor, field: Field) -> Array:
    """View a tensor as an array; bfloat16 as its bits."""
    return (tensor.view(torch.int16) if renames(tensor.dtype) else tensor).numpy().view(field.numpy)


KeyLike: TypeAlias = str | tuple[str, ...]

ELSEWHERE = "a TensorStorageCheckpointer saves any storage of tensors"


def keys_of(keys: Sequence[KeyLike] | None, argument: str) -> list[Key]:
    """Read keys below `next`: texts or tuples of texts, with or without a leading `next`; None gives no keys."""
    given: Any = [keys] if isinstance(keys, str) else () if keys is None else keys
    if not isinstance(given, Iterable):
        raise UsageError(f"{argument} is {given!r}, expected keys: texts or tuples of texts")
    found = []
    for key in given:
        parts = (key,) if isinstance(key, str) else key
        if not isinstance(parts, tuple) or not parts or not all(isinstance(part, str) for part in parts):
            raise UsageError(f"{argument} has {key!r}, expected keys: texts or tuples of texts")
        found.append(parts[1:] if parts[0] == NEXT and len(parts) > 1 else parts)
    return found


def require_keys(
    given: Sequence[KeyLike] | None, argument: str, fields: Iterable[Field], place: object, *, anywhere: bool = False
) -> None:
    """Raise MissingKeyError for a key that does not exist below `next`: it may be misspelt.

    TED's own done, terminated, truncated and reward may be missing. With `anywhere`, keys at the root are accepted as
    well: TorchRL's layouts have all keys there, and these arguments tell which of them belong below `next`.
    """
    below = (
        field.key[1:] if field.key[0] == NEXT else field.key for field in fields if anywhere or field.key[0] == NEXT
    )
    there = list(dict.fromkeys(key for key in below if key))
    lacking = next((key for key in keys_of(given, argument) if key not in there and key not in SINGLETONS), None)
    if lacking is None:
        return
    names = [key_name(key) for key in there]
    near = nearest(key_name(lacking), names)
    raise MissingKeyError(
        f"{argument} has {key_name(lacking)!r}, but below {NEXT!r} {place} has only {', '.join(names) or 'nothing'}",
        hint=f"did you mean {near!r}?" if near else "",
    )


def done_keys_of(keys: Collection[Key], given: Sequence[KeyLike] | None) -> list[Key]:
    """Choose the flags that end episodes, as keys below `next`; SchemaError if there are none."""
    after = [key[1:] for key in keys if key[0] == NEXT and len(key) > 1]
    if given is None:
        named = {flag[0] for flag in FLAGS}
        found = [key for key in after if key in FLAGS] or [key for key in after if key[-1] in named]
    else:
        found = [key for key in keys_of(given, "done_keys") if key in after]
    if found:
        return found
    wanted = "done, terminated or truncated" if given is None else ", ".join(map(key_name, keys_of(given, "done_keys")))
    raise SchemaError(
        f"the data has no {wanted} below 'next', so the ends of episodes are unknown",
        hint=f"name the flags with done_keys=[...]; {ELSEWHERE}",
    )


def role_below_next(key: Key, dones: Collection[Key], rewards: Collection[Key]) -> Role:
    """Return the role of a leaf, given the flags and rewards below `next`."""
    inner = key[1:] if key[0] == NEXT else ()
    return "done" if inner in dones else "reward" if inner in rewards else role_of(key)


def find_episodes(reader: StepReader, order: Order, filled: FilledStorage, flags: Sequence[Key]) -> EpisodeTable:
    """Make the episode table of rows that are ordered lane after lane.

    An episode ends at a step whose flag is set, at the last step of a lane, and at the newest row, which the row after
    it does not continue. If a flag is set for some agents only, the episode ends only if its next observation differs
    from the observation of the following step.
    """
    steps = reader.manifest.steps
    every, some = _flagged(reader, flags)
    partial = some & ~every
    if partial.any():
        every |= partial & _broken(reader)
    ended = every.copy()
    if steps:
        ended.reshape(order.lanes, order.rows)[:, -1] = True
        # In a storage that is not full, rows keep their places, and the newest one is before the cursor.
        newest = (filled.cursor if filled.cursor and not filled.full else order.rows) - 1
        ended.reshape(order.lanes, order.rows)[:, newest] = True
    last = np.flatnonzero(ended)
    return table_of_ends(reader, last, every[last])


def _flagged(reader: StepReader, flags: Sequence[Key]) -> tuple[Array, Array]:
    """Return for each step whether a flag is set for all agents, and whether a flag is set for at least one agent."""
    steps = reader.manifest.steps
    every, some = np.zeros(steps, bool), np.zeros(steps, bool)
    for key in flags:
        field = field_named(reader.fields, key)
        for start, stop in leaf_parts(steps, field.row_bytes):
            values = as_numbers(reader.read(key, start, stop), field.dtype).reshape(stop - start, -1) != 0
            found = values[:, 0] if values.shape[1] == 1 else values.any(1)
            some[start:stop] |= found
            every[start:stop] |= found if values.shape[1] == 1 else found & values.all(1)
    return every, some


def _broken(reader: StepReader) -> Array:
    """Return for each step whether its next observation differs from the observation of the following step."""
    steps = reader.manifest.steps
    broken = np.zeros(steps, bool)
    for key in state_keys(reader.fields):
        field = field_named(reader.fields, key)
        if field_named(reader.fields, (NEXT, *key)).role in {"done", "reward"}:
            continue
        for start, stop in leaf_parts(steps - 1, field.row_bytes):
            rows = differing_rows(reader.read((NEXT, *key), start, stop), reader.read(key, start + 1, stop + 1))
            broken[rows + start] = True
    return broken


class EpisodeRows(StepReader, ABC):
    """The valid rows of a storage in the order of time, and the episodes that they form.

    A subclass sets `filled`, implements `read`, and calls `_describe` and `_find`.
    """

    filled: FilledStorage
    """The storage: its shape, capacity and cursor."""

    def _describe(self, kind: str, fields: Sequence[Field], done_keys: Any, reward_keys: Any) -> list[Key]:
        """Set the fields, with their roles; return the flags below `next` that end episodes."""
        self.path = Path(kind)
        for argument, given in (("done_keys", done_keys), ("reward_keys", reward_keys)):
            require_keys(given, argument, fields, f"the {kind}")
        dones = done_keys_of([field.key for field in fields], done_keys)
        rewards = keys_of(reward_keys, "reward_keys") or [REWARD]
        self._fields = [
            field
            if field.role == "text"
            else Field(field.key, field.dtype, field.shape, role_below_next(field.key, dones, rewards))
            for field in fields
        ]
        self._count(0)
        return dones

    def _count(self, episodes: int) -> None:
        """Set the manifest, with this many episodes."""
        kind = str(self.path)
        self.manifest = Manifest(
            kind="checkpoint", layout="ted", request=Request(STORAGE, kind, kind), steps=self.filled.length,
            episodes=episodes, fields=tuple(self._fields), files=(), content_digest="", created_by=created_by(),
        )  # fmt: skip

    @property
    def episodes(self) -> EpisodeTable:
        """The episode table; each lane ends with an episode, finished or not."""
        return self._episodes

    def _find(self, order: Order, dones: Sequence[Key]) -> None:
        """Make the episode table from the flags."""
        self._episodes = find_episodes(self, order, self.filled, [(NEXT, *key) for key in dones])
        self._count(len(self._episodes))

    @property
    def episode_text(self) -> list[dict[str, str]] | None:
        """None: a storage has no texts of episodes."""
        return None

    def documents(self) -> dict[str, bytes]:
        """Empty: a storage has no documents."""
        return {}

    def verify_files(self) -> None:
        """Do nothing: a storage has no files."""


class StorageRows(EpisodeRows):
    """The rows of a storage of tensordicts. Arrays returned by `read` may be views of the storage.

    Args:
        storage: the storage.
        done_keys: the keys below `next` that are flags; None for done, terminated and truncated, directly below `next`
            or, if there are none, in any nest below it.
        reward_keys: the keys below `next` that are rewards; None for reward.

    Raises:
        SchemaError: the data has no episodes: tensors, nests of other kinds, or tensordicts without a done flag.
        MissingKeyError: a key does not exist.
    """

    def __init__(
        self,
        storage: TensorStorage,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
    ) -> None:
        if not is_tree(storage.structure) or has_stacks(storage.structure):
            found = "lazy stacks" if has_stacks(storage.structure) else f"a {storage.structure}"
            raise SchemaError(
                f"the storage holds {found}, but only tensordicts can be saved as whole episodes", hint=ELSEWHERE
            )
        keys, columns = list(storage.structure.paths()), storage.columns
        self.filled = FilledStorage(
            tuple(storage.shape), math.prod(columns.lead), next_row(storage, columns.lead[0]),
            spec_to_json(storage.structure),
        )  # fmt: skip
        self._order = Order(storage.rows, math.prod(columns.others), self.filled.oldest)
        fields = fields_of(storage.structure, columns.leaves, storage.ndim)
        dones = self._describe(type(storage).__name__, fields, done_keys, reward_keys)
        self._leaves = {
            key: LaneLeaf(leaf, field, storage.ndim)
            for key, field, leaf in zip(keys, fields, columns.leaves, strict=True)
        }
        self._find(self._order, dones)

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Return rows `[start, stop)` of one leaf."""
        field, leaf = self._leaf(key, start, stop), self._leaves[key]
        parts = [leaf.read(run) for run in self._order.runs(start, stop)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty((0, *field.shape), field.numpy)


def next_row(storage: Any, rows: int) -> int | None:
    """Return the row after the one written last, for a storage with room for this many rows; None if unknown."""
    last = newest_row(storage)
    return None if last is None else (last + 1) % rows


def fields_of(structure: TreeSpec, leaves: Sequence[Any], lead: int) -> list[Field]:
    """Return the fields of tensors, whose first `lead` dimensions count elements; SchemaError for unknown types."""
    pairs, texts = zip(structure.paths(), leaves, strict=True), dict(structure.texts())
    return [
        Field(key, _dtype_name(leaf.dtype, key), tuple(leaf.shape[lead:]), "text" if key in texts else role_of(key))
        for key, leaf in pairs
    ]


def _dtype_name(dtype: Any, key: Key) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SchemaError(f"the entry {key_name(key)!r} is of {dtype}, which this form cannot hold", hint=ELSEWHERE)
    return name


def article(name: str) -> str:
    """Prefix the name of a class with its article."""
    return f"an {name}" if name[:1] in "AEIO" or name.startswith("H5") else f"a {name}"


def rows_of_storage(
    storage: Storage, done_keys: Sequence[KeyLike] | None, reward_keys: Sequence[KeyLike] | None, checkpointer: str
) -> EpisodeRows:
    """Return the rows of a storage of steps; UsageError, which names `checkpointer`, for other storages."""
    if isinstance(storage, TensorStorage):
        return StorageRows(storage, done_keys, reward_keys)
    if isinstance(storage, PackedStorage):
        return PackedRows(storage, done_keys, reward_keys)
    if isinstance(storage, PackedRecording):
        return RecordingRows(storage, done_keys, reward_keys)
    if isinstance(storage, ListStorage) and not isinstance(storage, CompressedListStorage):
        return ListRows(storage, done_keys, reward_keys)
    kind = type(storage).__name__
    hint = "a CompressedListStorageCheckpointer saves it" if isinstance(storage, CompressedListStorage) else ""
    raise UsageError(
        f"{article(checkpointer)} saves storages of tensors and of steps, found {article(kind)}",
        hint=hint or "leave the checkpointer out: every storage has a default one",
    )


class PackedRows(EpisodeRows):
    """The steps of a packed dataset, read from its files; the episodes come from its table."""

    def __init__(
        self,
        storage: PackedStorage,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
    ) -> None:
        self._reader = PackedReader(storage.path)
        try:
            found = self._reader.manifest.content_digest
            if found != storage.content_digest:
                raise CorruptDataError(
                    f"{storage.path} has the content {found}, expected {storage.content_digest}: it was replaced"
                )
            self.filled = FilledStorage.of_dataset(len(storage))
            self._describe(type(storage).__name__, self._reader.fields, done_keys, reward_keys)
            self._episodes = self._reader.episodes
            self._count(len(self._episodes))
        except BaseException:
            self._reader.close()
            raise

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows of one leaf."""
        return self._reader.read(key, start, stop)

    def verify_files(self) -> None:
        """Compare the files of the dataset with their digests."""
        self._reader.verify_files()

    def close(self) -> None:
        """Close the files of the dataset."""
        self._reader.close()


class RecordingRows(EpisodeRows):
    """The rows of a recording, including the unfinished episode."""

    def __init__(
        self,
        recording: PackedRecording,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
    ) -> None:
        self._recording = recording
        count, first = len(recording), recording[:1]
        structure = tree_spec_of(first, 1)
        self.filled = FilledStorage((count,), count, 0, spec_to_json(structure))
        fields = fields_of(structure, structure.flatten(first), 1)
        dones = self._describe(type(recording).__name__, fields, done_keys, reward_keys)
        self._find(Order(count, 1, 0), dones)

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows of one leaf."""
        field, rows = self._leaf(key, start, stop), self._recording.entry(key, slice(start, stop))
        assert rows is not None  # `_leaf` has found the field
        return host_array(rows, field)


class ListRows(EpisodeRows):
    """The elements of a list as steps.

    They must be tensordicts without batch dimensions, with the same entries, types and shapes. SchemaError names the
    first element that differs.
    """

    def __init__(
        self,
        storage: ListStorage,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
    ) -> None:
        if not len(storage):
            raise SchemaError("the storage is empty: nothing was ever written to it", hint="write to it first")
        self._storage = storage
        first = storage[0]
        outline = _outline(first, 0)
        row = next((row for row in range(1, len(storage)) if _outline(storage[row], row) != outline), None)
        if row is not None:
            raise _refused(f"row {row} of the list has other entries, types or shapes than row 0")
        structure = tree_spec_of(first)
        self.filled = FilledStorage(
            (len(storage),), storage.max_size, next_row(storage, storage.max_size), spec_to_json(structure)
        )
        fields = fields_of(structure, structure.flatten(first), 0)
        self._order = Order(len(storage), 1, self.filled.oldest)
        self._find(self._order, self._describe(type(storage).__name__, fields, done_keys, reward_keys))

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Gather rows of one leaf."""
        field = self._leaf(key, start, stop)
        rows = [row for run in self._order.runs(start, stop) for row in range(run.rows.start, run.rows.stop)]
        if not rows:
            return np.empty((0, *field.shape), field.numpy)
        return host_array(torch.stack([self._storage[row].get(key) for row in rows]), field)


def _outline(item: Any, row: int) -> tuple[Any, ...]:
    """Return the entries, types and shapes of an element, which all elements of a list must have."""
    if not isinstance(item, TensorDictBase) or item.batch_dims:
        what = (
            f"batch size {list(item.batch_size)}" if isinstance(item, TensorDictBase) else article(type(item).__name__)
        )
        raise _refused(f"row {row} of the list is {what}")
    structure = tree_spec_of(item)
    leaves = tuple(
        (path, leaf.dtype, leaf.shape) for path, leaf in zip(structure.paths(), structure.flatten(item), strict=True)
    )
    return (leaves, spec_to_json(structure))


def _refused(found: str) -> SchemaError:
    return SchemaError(
        f"{found}; whole episodes need steps with the same structure, tensordicts of batch size []",
        hint="a ListStorageCheckpointer saves any list",
    )


def fill_storage(
    storage: TensorStorage, reader: StepReader, filled: FilledStorage, checks: Sequence[Callable[[], None]] = ()
) -> None:
    """Replace the contents of a storage by the rows of a checkpoint, each at its place in the saved storage.

    When a buffer loads a full ring into a larger storage, rows are put in the order of time instead.

    Args:
        storage: the storage.
        reader: the rows. Their bytes must have been verified: a failure while they are written would leave only some
            of the rows replaced.
        filled: the saved storage.
        checks: for a storage that is still empty, calls that verify the bytes while rows are written; if one of them
            raises an error, the storage becomes empty again.

    Raises:
        SchemaError: keys, types or shapes differ, or there is not enough room. Nothing is changed.
    """
    if len(filled.shape) != storage.ndim:
        raise SchemaError(
            f"{reader.path} was saved with ndim={len(filled.shape)}, but this storage has ndim={storage.ndim}"
        )
    fields = {field.key: field for field in reader.fields}
    structure = structure_for(storage, reader, filled)
    keys = list(structure.paths())
    lead = filled.shape
    likes = [
        torch.empty((*lead, *fields[key].shape), dtype=dtype_named(f"torch.{fields[key].dtype}"), device="meta")
        for key in keys
    ]

    def write(columns: Columns, in_time: bool) -> None:
        order = Order(lead[0], filled.length // max(lead[0], 1), 0 if in_time else filled.oldest)
        leaves = dict(zip(keys, in_order(structure, storage.structure, columns.leaves), strict=True))
        groups = [
            [(field, LaneLeaf(leaves[field.key], field, storage.ndim)) for field in group] for group in _groups(fields)
        ]
        parts = [
            partial(_fill_part, targets, reader, order, *part) for targets in groups for part in _parts(targets, reader)
        ]
        together = reader.serves_threads and all(leaf.in_place for targets in groups for _, leaf in targets)
        if parts and together:
            parts.pop()()  # one in this thread first, because a reader creates some objects at its first use
        run_together([*checks, *parts], threads_for_memory() if together else 1)

    storage.fill(structure, likes, filled.length, write, capacity=filled.rows, last_row=filled.last_row)


def _groups(fields: Mapping[Key, Field]) -> list[list[Field]]:
    """Group fields that are read from the same rows of a file: a key at the root, and the same key below `next`."""
    alone = [key for key in fields if key[0] != NEXT or key[1:] not in fields]
    pairs = {key: [key, (NEXT, *key)] if (NEXT, *key) in fields else [key] for key in alone}
    return [[fields[key] for key in keys] for keys in pairs.values()]


_Targets: TypeAlias = Sequence[tuple[Field, LaneLeaf]]


def _parts(targets: _Targets, reader: StepReader) -> Iterator[tuple[int, int]]:
    return leaf_parts(reader.manifest.steps, max(field.row_bytes for field, _ in targets))


def _fill_part(targets: _Targets, reader: StepReader, order: Order, start: int, stop: int) -> None:
    """Write the steps `[start, stop)` to the leaves of a group."""
    for field, leaf in targets:
        if leaf.in_place:
            for run in order.runs(start, stop):
                _copy(reader.pieces(field.key, run.start, run.stop), leaf.read(run))
        else:
            _write(reader.pieces(field.key, start, stop), leaf, order, start)


def _copy(pieces: Iterable[Array], rows: Array) -> None:
    """Copy pieces, one after another, to an array that is memory of the storage."""
    begin = 0
    for piece in pieces:
        end = begin + len(piece)
        rows[begin:end] = piece
        begin = end


def _write(pieces: Iterable[Array], leaf: LaneLeaf, order: Order, start: int) -> None:
    """Write pieces, one after another, to the leaf of a storage, from step `start` on."""
    for piece in pieces:
        for run in order.runs(start, start + len(piece)):
            leaf.write(run, piece[run.start - start : run.stop - start])
        start += len(piece)


def structure_for(storage: TensorStorage | None, reader: StepReader, filled: FilledStorage) -> TreeSpec:
    """Return how the data is nested.

    If a class in it is not imported, the structure of the storage is used, provided that it has the same leaves.

    Raises:
        SchemaError: a class is not imported.
        CorruptDataError: the description does not have the leaves of the checkpoint.
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
        raise CorruptDataError(f"{reader.path} does not describe how its leaves are nested")
    return structure


Fetch: TypeAlias = Callable[[Field, int, int], Array]
"""Reads rows `[start, stop)` of a leaf."""

_HERE = "load it into a LazyTensorStorage, which is writable"


def fill(
    storage: Storage,
    reader: StepReader,
    filled: FilledStorage,
    checkpointer: str,
    checks: Sequence[Callable[[], None]] = (),
) -> None:
    """Load the rows of a checkpoint into any kind of storage, each at its place in the saved storage `filled`.

    Storages of tensors and lists are overwritten. A packed dataset and a recording are read-only, and must already hold
    the same rows.

    Args:
        storage: the storage.
        reader: the rows.
        filled: the saved storage.
        checkpointer: the name of the checkpointer, for messages.
        checks: see `fill_storage`.

    Raises:
        SchemaError: the rows do not fit, or a read-only storage has other rows.
        UsageError: the storage has another kind of rows.
    """
    if isinstance(storage, TensorStorage):
        fill_storage(storage, reader, filled, checks)
    elif isinstance(storage, PackedStorage | PackedRecording):
        with rows_of_storage(storage, None, None, checkpointer) as rows:
            _require_one_run(reader, filled, len(storage))
            require_equal_rows(
                rows, list(reader.fields), lambda field, *part: reader.read(field.key, *part), reader.path
            )
    else:
        _fill_list(storage, reader, filled, checkpointer)


def replace_rows(storage: Storage, rows: Any, *, capacity: int | None = None, last_row: int | None = None) -> None:
    """Replace the contents of a storage; SchemaError, with nothing changed, if it cannot hold them.

    Args:
        storage: the storage.
        rows: the new rows.
        capacity: the capacity in rows of the storage from which they come; None if unknown.
        last_row: the row written last there; None if unknown.
    """
    if isinstance(storage, TensorStorage):
        structure = tree_spec_of(rows, storage.ndim)
        tensors = structure.flatten(rows)
        if not tensors:
            raise SchemaError("the rows to load have no tensors")
        lead = tensors[0].shape[: storage.ndim]
        storage.fill(structure, tensors, lead.numel(), capacity=capacity, last_row=last_row)
    elif isinstance(storage, ListStorage):
        storage.replace_all(list(rows), capacity=capacity, last_row=last_row)
    else:
        storage.load_state_dict({"_storage": rows, "_len": len(rows), "_capacity": capacity})
        storage.last_cursor = last_row


def held_keys(storage: Storage) -> frozenset[Key] | None:
    """Return the keys that a storage holds; None if it is still empty."""
    if isinstance(storage, TensorStorage):
        return frozenset(storage.structure.paths()) if storage.initialized else None
    if isinstance(storage, PackedStorage):
        return frozenset(field.key for field in storage.fields)
    if not len(storage):
        return None
    first: Any = storage[0]
    return frozenset(key if isinstance(key, tuple) else (key,) for key in first.keys(True, True))


def require_equal_rows(rows: StepReader, fields: list[Field], fetch: Fetch, place: object) -> None:
    """Raise SchemaError, which names the first difference, unless `rows` have the values that `fetch` reads."""
    one, other = ({field.key: (field.dtype, field.shape) for field in side} for side in (rows.fields, fields))
    odd = next((key for key in {**one, **other} if one.get(key) != other.get(key)), None)
    if odd is not None:
        raise SchemaError(f"{key_name(odd)!r} of {place} differs from the {rows.path}, which is read-only", hint=_HERE)
    for field in fields:
        for start, stop in leaf_parts(rows.manifest.steps, field.row_bytes):
            wrong = differing_rows(rows.read(field.key, start, stop), fetch(field, start, stop))
            if len(wrong):
                raise SchemaError(
                    f"{field.name!r} of step {start + int(wrong[0]):,} of {place} differs from the {rows.path}, "
                    "which is read-only",
                    hint=_HERE,
                )


def _require_one_run(reader: StepReader, filled: FilledStorage, steps: int) -> None:
    if filled.shape != (steps,) or filled.oldest:
        raise SchemaError(
            f"{reader.path} holds {reader.manifest.steps:,} steps of a storage {list(filled.shape)}, this one has "
            f"{steps:,} and is read-only",
            hint=_HERE,
        )


def _fill_list(storage: Storage, reader: StepReader, filled: FilledStorage, checkpointer: str) -> None:
    """Make a list element of every row."""
    if not isinstance(storage, ListStorage) or type(storage).__name__ == "CompressedListStorage":
        rows_of_storage(storage, None, None, checkpointer)  # raises UsageError
        return
    if len(filled.shape) != 1:
        raise SchemaError(f"{reader.path} was saved with ndim={len(filled.shape)}, but a list has ndim=1")
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
