"""Draws from several storages in one go, where their samplers are of one kind."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernels.parts import SliceTable, SliceTables, scaled_parts
from ..kernels.trees import Forest
from ..storages.base import Storage
from ..storages.gathering import MemberRows, Parts
from .base import Sampler
from .lane_runs import LaneRuns
from .prioritized import PrioritizedSampler
from .slice_info import SliceEnds, SliceMarks
from .slices import SliceSampler, WholeSlices
from .uniform import RandomSampler, fractions

Chances: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = list[tuple[int, int]]
"""Members, each with the number of elements to draw of it."""
Info: TypeAlias = dict[Any, torch.Tensor]

_KEPT = 1 << 16
"""Parts of batches with so many rows in all are kept."""


class JointDraw(ABC):
    """Draws elements of the members of an ensemble in one go, with the probabilities of their samplers.

    It belongs to certain samplers and storages; the arguments of these samplers may be assigned between draws.
    """

    reads_rows: ClassVar[bool] = False
    """Whether the rows of a draw are those of its instant: the caller excludes writers until they are read."""

    uses_state: ClassVar[bool] = False
    """Whether samplers are not thread-safe: the caller excludes other draws and updates of them."""

    def __init__(self, samplers: Sequence[Sampler], storages: Sequence[Storage]) -> None:
        self._samplers: Sequence[Any] = samplers
        self._storages = storages
        self._known: dict[tuple[tuple[int, int], ...], Parts] = {}
        self._kept = 0

    @property
    def possible(self) -> bool:
        """Whether the arguments of the samplers, as they are now, allow it."""
        return True

    @property
    def unit(self) -> int:
        """The number that the count of each member is a multiple of."""
        return 1

    def chances_of(self, count: int) -> int:
        """Return how many random numbers it takes to draw `count` elements."""
        return count

    def shares(self, generator: torch.Generator | None) -> bool:
        """Whether all samplers draw from this generator."""
        return all(sampler.generator is generator for sampler in self._samplers)

    @abstractmethod
    def draw(self, counts: Counts, sizes: Sequence[int], chances: Chances | None) -> tuple[MemberRows, Info] | None:
        """Draw so many elements of members with so many; return their rows, and the info of all, `[n, …]`.

        `chances` in [0, 1) are as many as `chances_of` returns for all counts together; None has each sampler draw
        from its own generator. None is returned where the samplers have to draw one by one, or would refuse to.
        """

    def info_of(self, rows: Any) -> Info:
        """Return the info that follows from the rows of a draw, a tensordict; it has the shape of the rows."""
        return {}

    def _parts_of(self, counts: Counts) -> Parts:
        """Return the parts of a batch, which are kept: there are few ways to round the shares of members."""
        key = tuple(counts)
        found = self._known.get(key)
        if found is None:
            found = Parts(counts)
            self._kept += found.size
            if self._kept > _KEPT:
                self._known, self._kept = {}, found.size
            self._known[key] = found
        return found

    def _own_chances(self, counts: Counts) -> Chances:
        return np.concatenate(
            [fractions(self.chances_of(count), self._samplers[member].generator) for member, count in counts]
        )


def joint_draw(samplers: Sequence[Sampler], storages: Sequence[Storage]) -> JointDraw | None:
    """Make the joint draw of these samplers; None unless they are of one known kind, for storages of one dimension."""
    kinds = {type(sampler) for sampler in samplers}
    kind = _KINDS.get(kinds.pop()) if len(kinds) == 1 else None
    return None if kind is None or any(storage.ndim != 1 for storage in storages) else kind(samplers, storages)


class UniformDraw(JointDraw):
    """Draws as `RandomSampler` does."""

    def draw(self, counts: Counts, sizes: Sequence[int], chances: Chances | None) -> tuple[MemberRows, Info] | None:
        """Draw elements; None for a member without any."""
        lengths = [sizes[member] for member, _ in counts]
        if not all(lengths):
            return None
        parts = self._parts_of(counts)
        if chances is not None:
            return MemberRows(parts, scaled_parts(chances, parts.stops, np.array(lengths, np.int64))), {}
        numbers = []
        for (member, count), length in zip(counts, lengths, strict=True):
            generator = self._samplers[member].generator
            device = None if generator is None else generator.device
            numbers.append(torch.randint(length, (count,), generator=generator, device=device).numpy(force=True))
        return MemberRows(parts, np.concatenate(numbers)), {}


class _Table(NamedTuple):
    """The trajectories that slices of a member are drawn from, and what they were listed of."""

    runs: LaneRuns
    version: int
    weight: str
    table: SliceTable


class SlicesDraw(JointDraw):
    """Draws as `SliceSampler` does, where all members have whole slices, drawn and marked alike."""

    reads_rows = True
    uses_state = True

    def __init__(self, samplers: Sequence[Sampler], storages: Sequence[Storage]) -> None:
        super().__init__(samplers, storages)
        self._form: WholeSlices | None = None
        self._tables: list[_Table | None] = [None] * len(samplers)
        self._drawn: SliceTables | None = None
        self._marks = SliceMarks(None)
        self._ends: tuple[Any, SliceEnds] | None = None

    @property
    def possible(self) -> bool:
        """Whether slices are whole, and drawn and marked alike."""
        form = self._form = self._samplers[0].whole_slices
        return form is not None and all(sampler.whole_slices == form for sampler in self._samplers[1:])

    @property
    def unit(self) -> int:
        """The steps of a slice."""
        assert self._form is not None  # it is asked for where draws are possible
        return self._form.window.length

    def chances_of(self, count: int) -> int:
        """Return two for each slice: for the trajectory, and for the place in it."""
        return 2 * (count // self.unit)

    def draw(self, counts: Counts, sizes: Sequence[int], chances: Chances | None) -> tuple[MemberRows, Info] | None:
        """Draw slices; None for a part of one, and for a member without a trajectory that is long enough."""
        form, length = self._form, self.unit
        assert form is not None
        tables = []
        for member, count in counts:
            if not sizes[member] or count % length or (table := self._table_of(member, form)) is None:
                return None
            tables.append(table)
        if self._drawn is None or self._drawn.tables != tables:
            self._drawn = SliceTables(tables)
        chances = self._own_chances(counts) if chances is None else chances
        parts = self._parts_of(counts)
        return MemberRows(parts, self._drawn.draw(chances, parts.stops // length, length, form.anchor)), {}

    def _table_of(self, member: int, form: WholeSlices) -> SliceTable | None:
        """Return the trajectories of a member as they are now; None if there are none."""
        trajectories = self._samplers[member].trajectories(self._storages[member])
        runs, known = trajectories.eligible(form.window), self._tables[member]
        if not runs.count:
            return None
        if known is None or known[:3] != (runs, trajectories.version, form.weight):
            table = runs.table(trajectories.capacity, by_start=form.weight == "step")
            known = self._tables[member] = _Table(runs, trajectories.version, form.weight, table)
        return known.table

    def info_of(self, rows: Any) -> Info:
        """Return the flags of slices: see `truncated_key` of `SliceSampler`."""
        form, size = self._form, rows.batch_size
        assert form is not None
        if self._marks.key != form.truncated_key:
            self._marks = SliceMarks(form.truncated_key)
        if self._ends is None or self._ends[0] != (size, self.unit):
            self._ends = (size, self.unit), SliceEnds.whole(size, self.unit)
        return self._marks.of_rows(rows, self._ends[1])


class PrioritiesDraw(JointDraw):
    """Draws as `PrioritizedSampler` does, where all members have the same `beta` and `normalize`."""

    uses_state = True

    def __init__(self, samplers: Sequence[Sampler], storages: Sequence[Storage]) -> None:
        super().__init__(samplers, storages)
        self._forest: Forest | None = None

    @property
    def possible(self) -> bool:
        """Whether weights are made alike."""
        first, *others = self._samplers
        return all(sampler.beta == first.beta and sampler.normalize == first.normalize for sampler in others)

    def draw(self, counts: Counts, sizes: Sequence[int], chances: Chances | None) -> tuple[MemberRows, Info] | None:
        """Draw elements, with `"priority_weight"`; None for a member whose priorities are 0, or not on the CPU."""
        if not all(sizes[member] for member, _ in counts):
            return None
        trees = [self._samplers[member].tree_of(self._storages[member]) for member, _ in counts]
        if (forest := self._forest) is None or forest.trees != trees:
            forest = self._forest = Forest(trees)
        if not forest.compiled or not all(0 < tree.total < math.inf for tree in trees):
            return None
        parts = self._parts_of(counts)
        first = self._samplers[0]
        chances = self._own_chances(counts) if chances is None else chances
        numbers, weights = forest.draw(chances, parts.stops, by_batch=first.normalize == "batch")
        return MemberRows(parts, numbers), {"priority_weight": torch.from_numpy(weights).pow_(-first.beta).float()}


_KINDS: dict[type[Sampler], type[JointDraw]] = {
    RandomSampler: UniformDraw,
    SliceSampler: SlicesDraw,
    PrioritizedSampler: PrioritiesDraw,
}
