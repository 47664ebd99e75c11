"""The rows of a storage in the order of time, which keys are done flags and rewards, and where episodes end.

Rows are read lane after lane, in each lane the oldest first. A lane is one element of the dimensions after the first
that count elements, such as one of several environments; a storage of one dimension has one lane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from ..encodings.layout import FilledStorage
from ..encodings.rows import differing_rows, leaf_parts, table_of_ends
from ..errors import MissingKeyError, SchemaError, UsageError, nearest
from ..format.contracts import Array, StepReader
from ..format.episodes import EpisodeTable
from ..storages.columns import plain_column
from ..ted.schema import (
    FLAGS,
    NEXT,
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

_KNOWN_TO_NUMPY = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of some lanes: the steps from `start` to before `stop` lie in `rows` of `lanes`."""

    start: int
    stop: int
    lanes: slice
    rows: slice


@dataclass(frozen=True, slots=True)
class Order:
    """Where steps lie in a storage of `rows` valid rows and so many `lanes`, of whose rows `oldest` came first."""

    rows: int
    lanes: int
    oldest: int

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield the places of the steps `[start, stop)`. A run of several lanes holds each of them in full."""
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
    """One leaf of a storage, of which `ndim` dimensions count elements, read and written by runs."""

    def __init__(self, tensor: torch.Tensor, field: Field, ndim: int) -> None:
        self._field = field
        self._others = tensor.shape[1:ndim]
        plain = plain_column(tensor)
        self._lane_by_lane = ndim > 1 and not plain.is_contiguous()
        # Where the lanes do not lie side by side, a view with one dimension for all of them need not exist.
        self._rows = plain if ndim == 1 or self._lane_by_lane else plain.flatten(1, ndim - 1)
        self._array = _array(self._rows, field) if _is_plain(self._rows) else None
        self._one_lane = ndim == 1

    @property
    def in_place(self) -> bool:
        """Whether `read` shows the storage's own memory, so that rows can be put there, too."""
        return self._array is not None and self._one_lane

    def read(self, run: Run) -> Array:
        """Return the rows of a run, as a view of the storage where they lie together in memory."""
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
        """Put the rows of a run into the storage."""
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
        """The rows of a run, `[rows, lanes, ...]`."""
        if not self._lane_by_lane:
            return self._rows[run.rows, run.lanes]
        lanes = range(run.lanes.stop - run.lanes.start)
        return torch.stack([self._rows[self._place(run, number)] for number in lanes], 1)

    def _place(self, run: Run, number: int) -> tuple[slice | int, ...]:
        """Index of the `number`-th lane of a run."""
        coordinates = np.unravel_index(run.lanes.start + number, self._others)
        return (run.rows, *map(int, coordinates))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether numpy sees the values of a tensor in its memory."""
    return tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


def host_array(tensor: torch.Tensor, field: Field) -> Array:
    """Return the values of a tensor on any device as an array; bfloat16 as its bits."""
    return _array(tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg(), field)


def _array(tensor: torch.Tensor, field: Field) -> Array:
    """View a tensor as an array; bfloat16 as its bits."""
    known = tensor if tensor.dtype in _KNOWN_TO_NUMPY else tensor.view(torch.int16)
    return known.numpy().view(field.numpy)


KeyLike: TypeAlias = str | tuple[str, ...]

ELSEWHERE = "a TensorStorageCheckpointer saves any storage of tensors"


def keys_of(keys: Sequence[KeyLike] | None, argument: str) -> list[Key]:
    """Read keys below `next`: texts or tuples of texts, with or without `next` in front; None is no key."""
    given: Any = [keys] if isinstance(keys, str) else () if keys is None else keys
    if not isinstance(given, Iterable):
        raise UsageError(f"{argument} is {given!r}; keys are texts or tuples of texts")
    found = []
    for key in given:
        parts = (key,) if isinstance(key, str) else key
        if not isinstance(parts, tuple) or not parts or not all(isinstance(part, str) for part in parts):
            raise UsageError(f"{argument} holds {key!r}; keys are texts or tuples of texts")
        found.append(parts[1:] if parts[0] == NEXT and len(parts) > 1 else parts)
    return found


def require_keys(
    asked: Sequence[KeyLike] | None, argument: str, fields: Iterable[Field], place: object, *, anywhere: bool = False
) -> None:
    """Raise MissingKeyError for a key that is not below `next`: it may be misspelt.

    TED's own done, terminated, truncated and reward may be missing: they mean those that exist.
    With `anywhere`, keys at the root count too, for a layout that has all keys there and is separated by these.
    """
    below = (
        field.key[1:] if field.key[0] == NEXT else field.key for field in fields if anywhere or field.key[0] == NEXT
    )
    there = list(dict.fromkeys(key for key in below if key))
    lacking = next((key for key in keys_of(asked, argument) if key not in there and key not in SINGLETONS), None)
    if lacking is None:
        return
    names = [key_name(key) for key in there]
    near = nearest(key_name(lacking), names)
    raise MissingKeyError(
        f"{argument} names {key_name(lacking)!r}, but below {NEXT!r} {place} has only {', '.join(names) or 'nothing'}",
        hint=f"did you mean {near!r}?" if near else "",
    )


def done_keys_of(keys: Collection[Key], asked: Sequence[KeyLike] | None) -> list[Key]:
    """Choose the flags that end episodes, as keys below `next`; SchemaError where there is none."""
    after = [key[1:] for key in keys if key[0] == NEXT and len(key) > 1]
    if asked is None:
        named = {flag[0] for flag in FLAGS}
        found = [key for key in after if key in FLAGS] or [key for key in after if key[-1] in named]
    else:
        found = [key for key in keys_of(asked, "done_keys") if key in after]
    if found:
        return found
    wanted = "done, terminated or truncated" if asked is None else ", ".join(map(key_name, keys_of(asked, "done_keys")))
    raise SchemaError(
        f"there is no {wanted} below 'next', so the ends of episodes are unknown",
        hint=f"name the flags with done_keys=[...]; {ELSEWHERE}",
    )


def role_below_next(key: Key, dones: Collection[Key], rewards: Collection[Key]) -> Role:
    """What a leaf is, given the flags and rewards below `next`."""
    inner = key[1:] if key[0] == NEXT else ()
    return "done" if inner in dones else "reward" if inner in rewards else role_of(key)


def find_episodes(reader: StepReader, order: Order, filled: FilledStorage, flags: Sequence[Key]) -> EpisodeTable:
    """Make the episode table of rows that lie lane after lane.

    An episode ends where a flag is set, with the last row of a lane, and between the newest and the oldest row.
    Where a flag is set for some agents and not for others, the episode continues if the next observation follows.
    """
    steps = reader.manifest.steps
    every, some = _flagged(reader, flags)
    partial = some & ~every
    if partial.any():
        every |= partial & _broken(reader)
    ended = every.copy()
    if steps:
        ended.reshape(order.lanes, order.rows)[:, -1] = True
        seam = filled.cursor if filled.cursor and not filled.full else order.rows
        ended.reshape(order.lanes, order.rows)[:, seam - 1] = True
    last = np.flatnonzero(ended)
    return table_of_ends(reader, last, every[last])


def _flagged(reader: StepReader, flags: Sequence[Key]) -> tuple[Array, Array]:
    """Of each step, whether all numbers of some flag are set, and whether any is."""
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
    """Of each step, whether its next observation is another than the observation of the step after it."""
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
