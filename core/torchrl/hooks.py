"""Hooks that convert the rows of a tensordict to TorchRL's layouts of episodes, and back.

The layouts are flat, nested (ragged tensors), and one entry for each episode.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from ..checkpointers.storage_rows import KeyLike, StorageRows
from ..checkpointers.tensor import dense_rows, ragged_tensor
from ..encodings.compact import leaf_parts
from ..errors import CorruptDataError, MissingKeyError, SchemaError, UsageError
from ..format.contracts import Array
from ..storages.codec import dtype_named
from ..storages.tensor import TensorStorage
from ..ted.schema import DEFAULT_DONE_KEYS, NEXT, Field, Key, key_name
from .layout import STORAGE_SHAPE, TRAJECTORY, TorchrlHeader, TorchrlKeys, TorchrlSink, in_order
from .writer import FolderSink, state_parts, step_ends, write_leaves


class MemorySink(TorchrlSink):
    """Collects the leaves in a tensordict, `result`: flat, or with the trajectories as ragged tensors."""

    def __init__(self, *, nested: bool) -> None:
        self.result: TensorDict | None = None
        self._nested = nested
        self._leaves: dict[Key, torch.Tensor] = {}
        self._trajectories = 0

    def begin(self, leaf: Field, counts: Array) -> None:
        dtype, rows = dtype_named(f"torch.{leaf.dtype}"), int(counts.sum())
        self._trajectories = len(counts)
        if self._nested and leaf.row_bytes:
            shapes = torch.tensor([[count, *leaf.shape] for count in counts.tolist()])
            self._leaves[leaf.key], self._rows = ragged_tensor(shapes, dtype)
        else:
            self._leaves[leaf.key] = self._rows = torch.empty((rows, *leaf.shape), dtype=dtype)
        self._row = 0

    def append(self, rows: Array) -> None:
        tensor = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
        last = self._row + len(rows)
        same = tensor.dtype is self._rows.dtype
        self._rows[self._row : last].copy_(tensor if same else tensor.view(self._rows.dtype))
        self._row = last

    def skip(self, rows: int) -> None:
        self._rows[self._row : self._row + rows].zero_()
        self._row += rows

    def end(self) -> None:
        """Do nothing: rows are copied when they are appended."""

    def finish(self, header: TorchrlHeader, keys: TorchrlKeys) -> None:
        batch = [self._trajectories] if self._nested else []
        entries: dict[str, Any] = {
            keys.is_full: header.full, keys.shift: header.shift, STORAGE_SHAPE: list(header.shape)
        }  # fmt: skip
        result = TensorDict({}, batch)
        for name, value in entries.items():
            result.set_non_tensor(name, value)
        for key, leaf in self._leaves.items():
            result.set(key, leaf)
        self.result = result

    def close(self) -> None:
        """Do nothing: no file is open."""


AT_ROOT = "at_root"


@dataclass(frozen=True, slots=True)
class FlatPlan:
    """The rows of a tensordict, rotated so that the oldest comes first, and the leaves that store them.

    Two nodes are added to TorchRL's layout if they are needed: `next` for keys that are only below `next`, or whose
    values differ from the following row; `at_root` for done flags and rewards of the root. `states` have an additional
    row after every end. Both mappings are by the TED key of the rows.
    """

    source: StorageRows
    header: TorchrlHeader
    ends: Array
    states: Mapping[Key, Field]
    steps: Mapping[Key, Field]

    @classmethod
    def of(cls, data: TensorDictBase, keys: TorchrlKeys, is_full: bool, shift: int) -> FlatPlan:
        """Check the rows; SchemaError for data without rows of tensors, and for names that the layout reserves."""
        header = _header(data, is_full, shift)
        storage = TensorStorage(data, device="auto", ndim=data.ndim)
        value = next(storage.structure.values(), None)
        if value is not None:
            raise SchemaError(f"{key_name(value[0])} is not a tensor; only rows of tensors can be laid out flat")
        storage.last_cursor = (shift - 1) % len(data) if is_full else None
        source = StorageRows(storage, [(NEXT, *keys.done)])
        taken = next((field for field in source.fields if field.key[0] in keys.names | {AT_ROOT}), None)
        if taken is not None:
            raise SchemaError(f"there is an entry {taken.name!r}, a name that the flat layout reserves")
        ends = step_ends(source, (NEXT, *keys.done), header)
        return cls(source, header, ends, *_choose_leaves(source, header, ends, keys))

    def write(self, sink: TorchrlSink, keys: TorchrlKeys) -> None:
        """Write all leaves."""
        write_leaves(self.source, sink, self.header, self.ends, self.states, self.steps, every=True)
        sink.finish(self.header, keys)


def _choose_leaves(
    source: StorageRows, header: TorchrlHeader, ends: Array, keys: TorchrlKeys
) -> tuple[dict[Key, Field], dict[Key, Field]]:
    """Return the leaves with an additional row after every end, and the leaves with one row for each step."""
    known = {field.key: field for field in source.fields}
    results = {*keys.dones, *keys.rewards}
    states: dict[Key, Field] = {}
    places: dict[Key, Key] = {}
    for key, field in known.items():
        after = known.get((NEXT, *key))
        if key[0] == NEXT:
            places[key] = key[1:] if key[1:] in results else key
        elif key not in results:
            places[key] = key
            alike = after is not None and (field.dtype, field.shape) == (after.dtype, after.shape)
            if alike and _follows(source, header, ends, field):
                states[key] = field
        elif key not in keys.dones or after is None or not _is_unset(source, field):
            places[key] = (AT_ROOT, *key)
    for key in states:
        del places[key], places[NEXT, *key]
    steps = {key: Field(place, known[key].dtype, known[key].shape, known[key].role) for key, place in places.items()}
    return states, steps


def _follows(source: StorageRows, header: TorchrlHeader, ends: Array, state: Field) -> bool:
    """Whether the next values of a state equal the following rows, as far as rows were written."""
    return not any(
        part.broken is not None and part.broken <= header.forced
        for lane in range(header.lanes)
        for part in state_parts(source, state.key, state, header, ends, lane)
    )


def _is_unset(source: StorageRows, field: Field) -> bool:
    return not any(source.read(field.key, *part).any() for part in leaf_parts(source.manifest.steps, field.row_bytes))


def _header(data: Any, is_full: bool, shift: int) -> TorchrlHeader:
    if not isinstance(data, TensorDictBase) or not data.ndim or not data.numel():
        what = f"batch size {list(data.batch_size)}" if isinstance(data, TensorDictBase) else type(data).__name__
        raise SchemaError(f"expected a tensordict of rows [time, ...], found {what}")
    if abs(shift) > len(data) or (shift < 1 and not is_full and shift):
        raise SchemaError(f"shift is {shift}; the {len(data):,} rows are counted from 1")
    return TorchrlHeader(tuple(data.batch_size), is_full, shift or len(data), data.numel())


_REWARDS = ("reward",)


class WrongTypeError(UsageError, TypeError):
    """An attribute of a hook is not set, or has a value of the wrong type."""


class _Names:
    """The names of entries in the layout. All of them are attributes that may be assigned."""

    def __init__(
        self,
        done_key: KeyLike,
        shift_key: str,
        is_full_key: str,
        done_keys: Sequence[KeyLike],
        reward_keys: Sequence[KeyLike],
    ) -> None:
        self.done_key, self.shift_key, self.is_full_key = done_key, shift_key, is_full_key
        self.done_keys: Any = done_keys
        self.reward_keys: Any = reward_keys
        TorchrlKeys.of(vars(self))  # raises UsageError for values that are not keys
        self.done_keys, self.reward_keys = _as_set(done_keys), _as_set(reward_keys)

    @property
    def _keys(self) -> TorchrlKeys:
        return TorchrlKeys.of(vars(self))


def _as_set(keys: Any) -> Any:
    if keys is None or isinstance(keys, str):
        return keys and {keys}
    return {tuple(key) if isinstance(key, list) else key for key in keys}


class TED2Flat(_Names):
    """A save hook that converts rows `[time, ...]` to the flat layout.

    Before a call, `is_full` and `shift` must be set: whether the rows are a full ring, and the row that would be
    written next (1 to the number of rows). Checkpointers set them. A full ring is rotated so that the oldest row comes
    first. In a ring that is not full, the row before `shift` counts as an end. Lanes, the other dimensions of the
    batch, follow one another.

    The result has batch size `[]` and the entries `is_full`, `shift` and `_storage_shape`. Leaves have n rows; those
    that are both at the root and below `next` have an additional row after every end. Done flags and rewards at the
    root of the result are the ones below `next`.

    Nothing is lost: next observations that differ from the following row are kept below `next`, and so are keys that
    exist only there; done flags and rewards of the root are kept below `at_root`. Names, arguments and the layout match
    TorchRL, which does not keep these.
    """

    writes_in_place = True
    _nested = False

    def __init__(
        self,
        done_key: KeyLike = (NEXT, "done"),
        shift_key: str = "shift",
        is_full_key: str = "is_full",
        done_keys: Sequence[KeyLike] = DEFAULT_DONE_KEYS,
        reward_keys: Sequence[KeyLike] = _REWARDS,
    ) -> None:
        super().__init__(done_key, shift_key, is_full_key, done_keys, reward_keys)
        self._is_full: bool | None = None
        self._shift: int | None = None

    @property
    def is_full(self) -> bool | None:
        """Whether the rows are a full ring; None until it is set."""
        return self._is_full

    @is_full.setter
    def is_full(self, value: Any) -> None:
        if not isinstance(value, bool):
            raise WrongTypeError(f"is_full is {value!r}, expected True or False")
        self._is_full = value

    @property
    def shift(self) -> int | None:
        """The row that would be written next; None until it is set."""
        return self._shift

    @shift.setter
    def shift(self, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise WrongTypeError(f"shift is {value!r}, expected the number of a row")
        self._shift = value

    def __call__(self, data: Any, path: str | os.PathLike[str] | None = None) -> TensorDictBase:
        """Return the layout in memory, or memory-mapped from files written into the empty folder `path`.

        WrongTypeError (a TypeError) if `is_full` or `shift` is not set, SchemaError (a RuntimeError) for data other
        than rows of tensors with a done flag, UsageError for a folder that is not empty.
        """
        if self._is_full is None or self._shift is None:
            raise WrongTypeError("is_full and shift must be set before a call; a checkpointer sets them")
        plan = FlatPlan.of(data, self._keys, self._is_full, self._shift)
        if path is None:
            sink = MemorySink(nested=self._nested)
            plan.write(sink, self._keys)
            if sink.result is None:
                raise SchemaError("the tensordict has no leaf")
            return sink.result
        folder = Path(path)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is not an empty folder; left unchanged", hint="choose another path")
        with FolderSink(folder, nested=self._nested, counted=False) as files:
            plan.write(files, self._keys)
        return TensorDict.load_memmap(folder)


class Flat2TED(_Names):
    """A load hook that converts the flat layout back to rows: the inverse of `TED2Flat`.

    Root done flags that the layout does not contain are false, as in TorchRL. `done_key` is the flag that ends
    episodes, with or without `next` in front.
    """

    writes_in_place = True

    def __init__(
        self,
        done_key: KeyLike = "done",
        shift_key: str = "shift",
        is_full_key: str = "is_full",
        done_keys: Sequence[KeyLike] = DEFAULT_DONE_KEYS,
        reward_keys: Sequence[KeyLike] = _REWARDS,
    ) -> None:
        super().__init__(done_key, shift_key, is_full_key, done_keys, reward_keys)

    def __call__(self, data: Any, out: TensorDictBase | None = None) -> TensorDictBase:
        """Return the rows, `[time, ...]`. If `out` is given, they are written into it.

        MissingKeyError (a KeyError) if an entry of the layout is missing, CorruptDataError (a ValueError) for leaves
        whose lengths do not fit, SchemaError (a RuntimeError) for an `out` with other entries or another shape.
        """
        return self._filled(self._rows(data), out)

    def _rows(self, data: Any) -> TensorDict:
        header, leaves = self._opened(data)
        done = leaves.get(self._keys.done)
        if done is None:
            raise MissingKeyError(f"there is no {key_name(self._keys.done)!r}, so the ends of episodes are unknown")
        if len(done) != header.steps:
            raise CorruptDataError(
                f"{key_name(self._keys.done)!r} has {len(done):,} rows, a storage of {list(header.shape)} has "
                f"{header.steps:,}"
            )
        places = _Places(header, done)
        found: dict[Key, torch.Tensor] = {}
        for key, leaf in leaves.items():
            found |= self._expanded(key, leaf, places)
        for key in self._keys.dones:
            if key in leaves and key not in found:
                found[key] = torch.zeros_like(found[NEXT, *key])
        result = TensorDict({}, header.shape)
        for key, leaf in found.items():
            result.set(key, leaf)
        return result

    def _expanded(self, key: Key, leaf: torch.Tensor, places: _Places) -> dict[Key, torch.Tensor]:
        """Convert a stored leaf to one or two entries of the rows."""
        result = key in self._keys.dones or key in self._keys.rewards
        if places.is_state(len(leaf)) and not result:
            root, after = places.states(leaf)
            return {key: places.rotated(root), (NEXT, *key): places.rotated(after)}
        if len(leaf) != places.header.steps:
            raise CorruptDataError(
                f"{key_name(key)!r} has {len(leaf):,} rows, expected one for each of {places.header.steps:,} "
                f"steps, or also for their {len(places.ends):,} ends"
            )
        own = key[1:] if key[0] == AT_ROOT and len(key) > 1 else (NEXT, *key) if result else key
        return {own: places.rotated(leaf)}

    def _opened(self, data: Any) -> tuple[TorchrlHeader, dict[Key, torch.Tensor]]:
        """Read the header and the leaves of the layout."""
        if not isinstance(data, TensorDictBase):
            raise SchemaError(f"expected a tensordict in the flat layout, found a {type(data).__name__}")
        shape = entry_value(data, STORAGE_SHAPE)
        is_full, shift = (entry_value(data, name) for name in (self._keys.is_full, self._keys.shift))
        steps = torch.Size(shape).numel() if _is_shape(shape) else None
        header = TorchrlHeader.checked(shape, is_full, shift, steps, "the flat layout", all_rows=True)
        leaves: dict[Key, torch.Tensor] = {}
        entries: Any = data.items(include_nested=True, leaves_only=True)
        for name, leaf in entries:
            key = name if isinstance(name, tuple) else (name,)
            if key[0] not in {*self._keys.names, "_len"}:
                leaves[key] = self._dense(key, leaf)
        return header, leaves

    def _dense(self, key: Key, leaf: Any) -> torch.Tensor:
        if leaf.is_nested or not leaf.dim():
            raise SchemaError(f"{key_name(key)!r} is ragged or a single number; Nested2TED takes ragged tensors")
        plain: torch.Tensor = leaf.as_subclass(torch.Tensor)
        return plain

    def _filled(self, rows: TensorDict, out: TensorDictBase | None) -> TensorDictBase:
        """Copy rows into `out`, after all checks, so that an error changes nothing."""
        if out is None:
            return rows
        if out.batch_size != rows.batch_size:
            raise SchemaError(f"rows of shape {list(rows.batch_size)} do not fit into {list(out.batch_size)}")
        known, found = set(out.keys(True, True)), set(rows.keys(True, True))
        made_up = {name for name in found - known if (name if isinstance(name, tuple) else (name,)) in self._keys.dones}
        odd = sorted(map(str, (known | found) - (known & found) - made_up))
        if odd:
            raise SchemaError(f"the entry {odd[0]} is only in the rows or only in `out`, expected the same entries")
        for name in known:
            if (rows[name].shape, rows[name].dtype) != (out[name].shape, out[name].dtype):
                raise SchemaError(f"the entry {name!r} has another type or shape in `out`")
        for name in known:
            out[name].copy_(rows[name])
        return out


class _Places:
    """The positions of the rows of each step in the flat layout.

    A state has an additional row after every end. The row of a step at the root is therefore the number of the step
    plus the number of ends before it, and its row under `next` is the one after that:

        step    0  1  2  3        ends: 1, 3
        root    0  1  3  4        rows of the leaf, of which there are six
        next    1  2  4  5
    """

    def __init__(self, header: TorchrlHeader, done: torch.Tensor) -> None:
        self.header = header
        is_end = (done != 0).reshape(header.steps, -1).any(1)
        is_end[torch.from_numpy(header.forced_steps)] = True
        self.ends = is_end.nonzero()[:, 0]
        lane_ends = torch.from_numpy(header.lane_ends)
        self._bare = lane_ends[~is_end[lane_ends]]
        uncounted = 0 if header.full else int(is_end[lane_ends].sum())
        self._lengths = {header.steps + len(self.ends), header.steps + len(self.ends) - uncounted}
        self._root = torch.arange(header.steps) + is_end.cumsum(0) - is_end.long()

    def is_state(self, rows: int) -> bool:
        """Whether a leaf with this number of rows has an additional one after every end."""
        return rows != self.header.steps and rows in self._lengths

    def states(self, leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows at the root and those below `next`; zeros for rows that were never written."""
        last = len(leaf) - 1
        root, after = leaf[self._root.clamp(max=last)], leaf[(self._root + 1).clamp(max=last)]
        root[self._root > last] = 0
        after[self._root + 1 > last] = 0
        after[self._bare] = 0
        return root, after

    def rotated(self, rows: torch.Tensor) -> torch.Tensor:
        """Move steps `[n, ...]`, lane after lane, back to their rows in the storage."""
        header = self.header
        lanes = rows.reshape(header.lanes, header.capacity, *rows.shape[1:])
        if header.full and header.shift % header.capacity:
            lanes = lanes.roll(header.shift, 1)
        return lanes.transpose(0, 1).reshape(*header.shape, *rows.shape[1:]).clone()


def entry_value(data: TensorDictBase, name: str) -> Any:
    """Return an entry that is not data: a value, or a tensor if it was read from HDF5."""
    found = data.get(name, None)
    if found is None:
        raise MissingKeyError(f"there is no entry {name!r}, which the flat layout must have")
    found = found.data if isinstance(found, NonTensorData) else found
    return found.tolist() if hasattr(found, "tolist") else found


def _is_shape(found: Any) -> bool:
    return isinstance(found, list | tuple) and all(type(size) is int and size >= 0 for size in found)


class TED2Nested(TED2Flat):
    """A save hook that converts rows to the layout of `TED2Flat`, in ragged tensors `[episodes, rows, ...]`.

    The result has the batch size `[episodes]`. Episodes end where the flag is set, before `shift` if the ring is not
    full, and with every lane. It has the arguments of `TED2Flat`.
    """

    _nested = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Nested2TED(Flat2TED):
    """A load hook that converts ragged episodes back to rows: the inverse of `TED2Nested`.

    It has the arguments of `Flat2TED`.
    """

    def _dense(self, key: Key, leaf: Any) -> torch.Tensor:
        return dense_rows(leaf) if leaf.is_nested else super()._dense(key, leaf)


class H5Split(TED2Flat):
    """A save hook that splits a tensordict of n ragged episodes into an entry for each: `traj_0`, `traj_1`, ….

    It is called after `TED2Nested`. Numbers are padded with zeros to the width of the last one. Other entries are kept.
    """

    def __call__(self, data: Any, path: Any = None) -> TensorDict:
        """Return the episodes by name; SchemaError (a RuntimeError) for data other than ragged episodes."""
        if not isinstance(data, TensorDictBase) or data.ndim != 1:
            what = f"batch size {list(data.batch_size)}" if isinstance(data, TensorDictBase) else type(data).__name__
            raise SchemaError(f"expected a tensordict of episodes [n], found {what}")
        count = data.batch_size[0]
        width = len(str(max(count - 1, 0)))
        result = TensorDict({}, [])
        parts = [TensorDict({}, []) for _ in range(count)]
        for name in map(str, data.keys()):
            if isinstance(data.get(name), NonTensorData):
                result.set_non_tensor(name, entry_value(data, name))
        for key, leaf in _leaves(data):
            for part, rows in zip(parts, leaf.unbind(0), strict=True):
                part.set(key, rows)
        for number, part in enumerate(parts):
            result.set(f"{TRAJECTORY}_{number:0{width}d}", part)
        return result


class H5Combine:
    """A load hook that joins the episodes of `H5Split`; it is called before `Nested2TED`.

    Episodes are copied one after the other, in the order of their numbers, directly to their place in the result.
    """

    writes_in_place = True

    def __call__(self, data: Any, out: Any = None) -> TensorDict:
        """Return a tensordict of ragged episodes; `out` is not used.

        CorruptDataError (a ValueError) for episodes of different entries, types or shapes, SchemaError (a RuntimeError)
        for a tensordict without any.
        """
        names = in_order([name for name in map(str, data.keys()) if name.startswith(TRAJECTORY)])
        if not names:
            raise SchemaError(f"there is no entry {TRAJECTORY}_0 of an episode")
        first = data.get(names[0])
        keys = [key for key, _ in _leaves(first)]
        result = TensorDict({}, [len(names)])
        for key in keys:
            result.set(key, _combined(data, names, key))
        for name in map(str, data.keys()):
            if name not in names:
                result.set_non_tensor(name, entry_value(data, name))
        odd = next((name for name in names if [key for key, _ in _leaves(data.get(name))] != keys), None)
        if odd is not None:
            raise CorruptDataError(f"the episode {odd} has other entries than {names[0]}")
        return result


def _combined(data: Any, names: list[str], key: Key) -> torch.Tensor:
    parts = [data.get((name, *key), None) for name in names]
    shapes = [None if part is None else (part.dtype, *part.shape[1:]) for part in parts]
    odd = next((name for name, shape in zip(names, shapes, strict=True) if shape is None or shape != shapes[0]), None)
    if odd is not None or not parts[0].dim():
        raise CorruptDataError(f"{key_name(key)!r} of the episode {odd or names[0]} does not match {names[0]}")
    table = torch.tensor([list(part.shape) for part in parts])
    ragged, flat = ragged_tensor(table, parts[0].dtype)
    row = 0
    for part in parts:
        flat[row : row + len(part)].copy_(part)
        row += len(part)
    return ragged


def _leaves(data: Any) -> Iterator[tuple[Key, torch.Tensor]]:
    for name, value in data.items(include_nested=True, leaves_only=True):
        yield (name if isinstance(name, tuple) else (name,)), value
