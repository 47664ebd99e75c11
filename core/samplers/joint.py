"""Draws from several storages in one go, where their samplers are of one kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..kernels.parts import SliceTables, scaled_parts
from ..kernels.trees import Forest
from ..storages.base import Storage
from ..storages.gathering import MemberRows, Parts
from .base import Sampler
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
        found = [sampler.generator for sampler in self._samplers]
        return found.count(generator) == len(found)

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

    def __init__(self, samplers: Sequence[Sampler], storages: Sequence[Storage]) -> None:
        super().__init__(samplers, storages)
        self._lengths: tuple[list[int], NDArray[np.int64]] = ([], np.zeros(0, np.int64))
        self._on_cpu: list[torch.Generator | None] = []

    def draw(self, counts: Counts, sizes: Sequence[int], chances: Chances | None) -> tuple[MemberRows, Info] | None:
        """Draw elements; None for a member without any, and for generators of its own that are not on the CPU."""
        found = [sizes[member] for member, _ in counts]
        if 0 in found:
            return None
        parts = self._parts_of(counts)
        if chances is None:
            rows = self._own_rows(parts, found)
            return None if rows is None else (MemberRows(parts, rows), {})
        known, lengths = self._lengths
        if known != found:
            lengths = np.array(found, np.int64)
            self._lengths = found, lengths
        return MemberRows(parts, scaled_parts(chances, parts.stops, lengths)), {}

    def _own_rows(self, parts: Parts, lengths: Sequence[int]) -> NDArray[np.int64] | None:
        """Draw rows of each member with its own generator, as its sampler does; None for generators off the CPU."""
        generators = [self._samplers[member].generator for member in parts.listed]
        if generators != self._on_cpu:
            if any(generator is not None and generator.device.type != "cpu" for generator in generators):
                return None
            self._on_cpu = generators
        for piece, generator, length in zip(parts.pieces, generators, lengths, strict=True):
            piece.random_(length, generator=generator)  # in memory that already exists: half of the time
        return parts.memory.copy()


class SlicesDraw(JointDraw):
    """Draws as `SliceSampler` does, where all members have whole slices, drawn and marked alike."""

    reads_rows = True
    uses_state = True

    def __init__(self, samplers: Sequence[Sampler], storages: Sequence[Storage]) -> None:
        super().__init__(samplers, storages)
        self._form: WholeSlices | None = None
        self._trajectories = SliceTables(len(samplers))
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
        for member, count in counts:
            if not sizes[member] or count % length or not self._lists(member, form):
                return None
        chances = self._own_chances(counts) if chances is None else chances
        parts = self._parts_of(counts)
        drawn = self._trajectories.draw(chances, parts.members, parts.stops // length, length, form.anchor)
        return MemberRows(parts, drawn), {}

    def _lists(self, member: int, form: WholeSlices) -> bool:
        """List the trajectories of a member as they are now; return whether there are any."""
        table = self._samplers[member].trajectories(self._storages[member])
        runs = table.eligible(form.window)
        if not runs.count:
            return False
        self._trajectories.put(member, runs.table(table.capacity, by_start=form.weight == "step"))
        return True

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
        self._forest = Forest(len(samplers))
        self._attached = [False] * len(samplers)

    @property
    def possible(self) -> bool:
        """Whether weights are made alike."""
        first, *others = self._samplers
        return all(sampler.beta == first.beta and sampler.normalize == first.normalize for sampler in others)

    def draw(self, counts: Counts, sizes: Sequence[int], chances: Chances | None) -> tuple[MemberRows, Info] | None:
        """Draw elements, with `"priority_weight"`; None for a member whose priorities are 0, or not on the CPU."""
        for member, _ in counts:
            size = sizes[member]
            if not size:
                return None
            tree = self._samplers[member].tree_of(self._storages[member], size if self._attached[member] else -1)
            self._attached[member] = True
            if not self._forest.plant(member, tree):
                return None
        first, parts = self._samplers[0], self._parts_of(counts)
        chances = self._own_chances(counts) if chances is None else chances
        by_batch = first.normalize == "batch"
        drawn = self._forest.draw(chances, parts.members, parts.stops, by_batch=by_batch)
        if drawn is None:
            return None
        weights = torch.from_numpy(drawn[1]).pow_(-first.beta).float()
        return MemberRows(parts, drawn[0]), {"priority_weight": weights}


_KINDS: dict[type[Sampler], type[JointDraw]] = {
    RandomSampler: UniformDraw,
    SliceSampler: SlicesDraw,
    PrioritizedSampler: PrioritiesDraw,
}
