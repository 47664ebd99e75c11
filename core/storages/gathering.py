"""Rows of several storages of tensors, gathered into one batch without a copy in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import from_numpy

from ..kernels.parts import gather_parts, warm
from ..kernels.rows import BatchPool, Numbers
from .base import Storage
from .columns import Columns, renames
from .ensemble import BUFFER_IDS, INDEX
from .pytree import Path, TensorDictNode, TensorNode, TreeSpec
from .tensor import TensorStorage

# Batches after which the import of compiled loops, half a second, pays.
_PATIENCE = 50

_ODD = (1).__and__
_ADDRESS = torch.Tensor.data_ptr


class Parts:
    """Which rows of a batch are of which storage: the first part is of `members[0]` and ends at `stops[0]`, and so on.

    `members` and `stops` are int64 `[parts]`; nothing is changed.
    """

    def __init__(self, counts: Sequence[tuple[int, int]]) -> None:
        self.listed = [member for member, _ in counts]
        self.members = np.array(self.listed, np.int64)
        self.stops = np.cumsum([count for _, count in counts], dtype=np.int64)
        self.size = int(self.stops[-1])
        self._labels: tuple[Numbers, Numbers, Numbers] | None = None

    @cached_property
    def memory(self) -> Numbers:
        """Memory for numbers of its rows, int64 `[size]`, that is used again."""
        return np.empty(self.size, np.int64)

    @cached_property
    def pieces(self) -> list[torch.Tensor]:
        """The memory of each part."""
        return [from_numpy(self.memory[part]) for _, part in self]

    @property
    def equal(self) -> bool:
        """Whether all parts have as many rows."""
        return len(set(np.diff(self.stops, prepend=0).tolist())) == 1

    def labels(self, sources: Numbers) -> tuple[Numbers, Numbers]:
        """Return for each row the member and the source, one of each member; int64 `[size]`, in memory of their own."""
        if self._labels is None or self._labels[0] is not sources:
            counts = np.diff(self.stops, prepend=0)
            self._labels = sources, np.repeat(self.members, counts), np.repeat(sources[self.members], counts)
        _, ids, numbers = self._labels
        return ids.copy(), numbers.copy()

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Yield each member, and where its rows are in the batch."""
        start = 0
        for member, stop in zip(self.listed, self.stops.tolist(), strict=True):
            yield member, slice(start, stop)
            start = stop

    def __len__(self) -> int:
        return len(self.listed)


class MemberRows(NamedTuple):
    """Rows of several storages by number, int64 `[n]`, and which of them are of which storage."""

    parts: Parts
    numbers: Numbers


class Guarding(Protocol):
    """Reads rows of several storages, each of one instant, as the guards of buffers do."""

    def sequences(self, numbers: Sequence[int]) -> list[int]:
        """Return a number for each of some storages that is odd during a write, and another one after it."""

    def read(self, number: int, get: Callable[[Any], Any], index: Any) -> Any:
        """Return `get(index)` of a storage, in which no row is half-written."""


class _Plan:
    """What is gathered from storages that have the same columns: all but the rows' own index, which labels replace.

    It is not changed, as several threads use it; storages that are exchanged or initialized take another plan.
    """

    def __init__(self, storages: Sequence[Storage], source_key: str | None) -> None:
        self.storages: Sequence[Any] = storages
        self.columns = [_columns_of(storage) for storage in storages]
        self._addresses = [[] if columns is None else columns.addresses() for columns in self.columns]
        self._watched = [leaf for columns in self.columns if columns is not None for leaf in columns.plain]
        self._watched_at = [place for addresses in self._addresses for place in addresses]
        self.orders: list[list[int] | None] = [None] * len(storages)
        """The columns of each storage that are gathered, in the order of the batch; None for a storage that differs."""
        self.capacities = [0 if columns is None else columns.lead[0] for columns in self.columns]
        self.expecting = any(getattr(storage, "expects_rows", False) for storage in storages)
        """Whether a storage is notified of the rows that are read next."""
        self._memory: tuple[Any, BatchPool] = (None, BatchPool([], []))
        self._lengths: tuple[list[int], Numbers] = ([], np.zeros(0, np.int64))
        leaves: dict[Path, Any] = {}
        for member, (storage, columns) in enumerate(zip(storages, self.columns, strict=True)):
            if not isinstance(storage, TensorStorage) or columns is None or not columns.gathers_into:
                continue
            if not _is_plain(storage.structure) or source_key in storage.structure.children:
                continue
            found = _leaves_of(storage)
            if not leaves:
                leaves = found
                self._take(storage, columns, source_key)
            if leaves == found:
                paths = list(found)
                self.orders[member] = order = [paths.index(path) for path in self._kept]
                self.places[member] = [self._addresses[member][number] for number in order]
        self.partial = None in self.orders
        """Whether there is a storage that differs."""

    def _take(self, storage: TensorStorage, columns: Columns, source_key: str | None) -> None:
        """Make batches like the rows of a storage, with labels."""
        paths = list(storage.structure.paths())
        chosen = [number for number, path in enumerate(paths) if path[0] != INDEX]
        self._kept = [paths[number] for number in chosen]
        self.rows = [columns.leaves[number].shape[1:] for number in chosen]
        self._types = [columns.numpy_types[number] for number in chosen]
        self.widths = np.array([columns.widths[number] for number in chosen], np.int64)
        self.places = np.zeros((len(self.columns), len(chosen)), np.int64)
        dtypes = [columns.dtypes[number] for number in chosen]
        self._renamed = [(number, kind) for number, kind in enumerate(dtypes) if renames(kind)]
        children = {key: child for key, child in storage.structure.children.items() if key != INDEX}
        children[INDEX] = TensorDictNode({BUFFER_IDS: TensorNode(), INDEX: TensorNode()})
        if source_key is not None:
            children[source_key] = TensorNode()
        self._structure = TensorDictNode(children, device=getattr(storage.structure, "device", None))

    def follows(self, members: Sequence[int], storages: Sequence[Any]) -> bool:
        """Whether the storages of some members, and the memory of their columns, are as they were."""
        if storages is not self.storages:
            return False
        for member in members:
            columns, storage = self.columns[member], storages[member]
            if (_columns_of(storage) if columns is None else storage.columns) is not columns:
                return False
        if 2 * len(members) > len(storages):  # all at once, without a call for each
            return list(map(_ADDRESS, self._watched)) == self._watched_at
        for member in members:
            columns = self.columns[member]
            if columns is not None and columns.addresses() is not self._addresses[member]:
                return False
        return True

    def lengths(self, members: Sequence[int]) -> Numbers:
        """Return the valid rows of some members, but no more than the memory that is known here holds, int64 `[n]`."""
        found = [min(self.storages[member].rows, self.capacities[member]) for member in members]
        known, lengths = self._lengths
        if found != known:
            lengths = np.array(found, np.int64)
            self._lengths = found, lengths
        return lengths

    def targets(self, size: torch.Size) -> tuple[list[torch.Tensor], Numbers]:
        """Return memory for the columns of a batch of this size, and its addresses."""
        known, memory = self._memory
        if known != size:
            memory = BatchPool([(*size, *row) for row in self.rows], self._types)
            self._memory = size, memory
        return memory()

    def batch(self, leaves: list[torch.Tensor], labels: Sequence[torch.Tensor], size: torch.Size) -> TensorDict:
        """Make a batch of gathered columns and labels."""
        for number, dtype in self._renamed:
            leaves[number] = leaves[number].view(dtype)
        batch: TensorDict = self._structure.unflatten(iter([*leaves, *labels]), size)
        return batch


class Gatherer:
    """Gathers rows of storages that have the same columns, in memory that is used again once a batch is freed.

    Batches have labels: the index of an ensemble, and under `source_key` the sources of rows.
    """

    def __init__(self, source_key: str | None) -> None:
        self._source_key = source_key
        self._patience = _PATIENCE
        self._plan: _Plan | None = None

    def covers(self, storages: Sequence[Storage]) -> bool:
        """Return whether rows of all of these storages can be gathered, as far as is known before they are read."""
        plan = self._plan
        if plan is None or (plan.partial and not plan.follows(range(len(storages)), storages)):
            plan = self._plan = _Plan(storages, self._source_key)
        return not plan.partial

    def gather(
        self,
        storages: Sequence[Storage],
        guards: Guarding,
        rows: MemberRows,
        labels: Sequence[torch.Tensor],
    ) -> TensorDict | None:
        """Return a batch of rows with their labels, of whose shape it is: `[n]`, or `[draws, n / draws]`.

        None for storages that differ, that are not of plain tensors, or that have an entry of the name of the source.
        """
        members, plan = rows.parts.listed, self._plan
        if plan is None or not plan.follows(members, storages):
            plan = self._plan = _Plan(storages, self._source_key)
        if plan.partial and not all(plan.orders[member] for member in members):
            return None
        size = labels[0].shape
        targets, places = plan.targets(size)
        self._fill(plan, storages, guards, rows, targets, places)
        return plan.batch(targets, labels[:2] if self._source_key is None else labels, size)

    def _fill(
        self,
        plan: _Plan,
        storages: Sequence[Any],
        guards: Guarding,
        rows: MemberRows,
        targets: Sequence[torch.Tensor],
        places: Numbers,
    ) -> None:
        """Copy the rows to the targets, at these addresses, those of each storage of one instant."""
        parts, members = rows.parts, rows.parts.listed
        if plan.expecting:
            for member, part in parts:
                storages[member].expect(rows.numbers[part])
        if self._patience:
            self._patience -= 1
        elif warm():
            before = guards.sequences(members)
            # No row is read beyond the memory that the plan holds, even if a storage is exchanged meanwhile.
            lengths = plan.lengths(members)
            done = gather_parts(plan.places, plan.widths, places, rows.numbers, parts.members, parts.stops, lengths)
            if done and guards.sequences(members) == before and not any(map(_ODD, before)):
                return
        count = len(rows.numbers)
        targets = [target.view(count, *row) for target, row in zip(targets, plan.rows, strict=True)]
        for member, part in parts:
            index = from_numpy(np.ascontiguousarray(rows.numbers[part]))
            order = plan.orders[member] or []
            get = partial(_gather, storages[member], order, [target[part] for target in targets])
            guards.read(member, get, index)


def _columns_of(storage: Storage) -> Columns | None:
    """Return the columns of a storage of one dimension; None for one that has none."""
    if not isinstance(storage, TensorStorage) or storage.ndim != 1 or not storage.initialized:
        return None
    return storage.columns


def _leaves_of(storage: TensorStorage) -> dict[Path, Any]:
    """Return the element type and the row shape of each column, by path."""
    columns = storage.columns
    kinds = [(dtype, leaf.shape[1:]) for dtype, leaf in zip(columns.dtypes, columns.leaves, strict=True)]
    return dict(zip(storage.structure.paths(), kinds, strict=True))


def _gather(storage: TensorStorage, order: Sequence[int], targets: Sequence[torch.Tensor], index: torch.Tensor) -> None:
    storage.gather_into(index, targets, order)


def _is_plain(structure: TreeSpec) -> bool:
    """Whether data is a tensordict of tensors and of such tensordicts."""
    if type(structure) is not TensorDictNode or structure.kind is not None or structure.tail:
        return False
    return all(isinstance(child, TensorNode) or _is_plain(child) for child in structure.children.values())
