"""Slices that are drawn by the priority of their first step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict.utils import NestedKey

from ..kernels.trees import PriorityTree, priority_tree
from ..storages import Storage
from .base import Index
from .prioritized import PrioritizedSampler
from .slices import Anchor, SliceSampler
from .trajectories import TrajectoryTable

__all__ = ["PrioritizedSliceSampler", "StartRule", "StartTree"]


@dataclass(frozen=True, slots=True)
class StartRule:
    """What decides whether a slice may begin at a step; the arguments are those of `SliceSampler`.

    A trajectory that is shorter than a slice is taken as a slice of its own length, or with `strict_length` not at
    all. Slices may hang over its end by `overhang` steps. Of what is legal then, the anchor leaves the first or last.
    """

    slice_len: int
    strict_length: bool
    overhang: int
    anchor: str

    @property
    def looks_ahead_only(self) -> bool:
        """Whether all that counts is how many steps the trajectory still has, and not how many it had before."""
        return self.strict_length and not self.overhang and self.anchor == "any"

    def legal(self, length: NDArray[np.int64], place: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell whether a slice may begin at these places of trajectories of these lengths."""
        taken = np.minimum(length, self.slice_len)
        last = length - taken + np.minimum(self.overhang, taken - 1)
        legal: NDArray[np.bool_]
        if self.anchor == "any":
            legal = place <= last
        else:
            legal = place == (0 if self.anchor == "start" else last)
        if self.strict_length:
            legal &= length >= self.slice_len
        return legal

    def legal_rows(self, table: TrajectoryTable, rows: int, first: int, stop: int) -> NDArray[np.bool_]:
        """Tell it of all steps from `first` up to but not including `stop`, numbered in time: `[steps, lanes]`.

        `rows` of the storage are written. What it costs depends on how many steps these are, and not on how long their
        trajectories are.
        """
        # Of a trajectory that begins before this, all there is to know is that these steps are far from its begin.
        begin = max(table.oldest, first - self.slice_len)
        steps = np.arange(begin, stop)[:, None]
        shape = len(steps), table.lanes
        reach = table.reach(np.repeat(steps, table.lanes), np.tile(np.arange(table.lanes), len(steps)))
        ends = steps + reach.reshape(shape)
        written = steps % table.capacity < rows
        ends = np.where(written, ends, -1)
        begins = np.full(shape, begin)
        begins[1:] = np.where(ends[1:] != ends[:-1], steps[1:], begin)
        begins = np.maximum.accumulate(begins)
        legal: NDArray[np.bool_] = (self.legal(ends - begins, steps - begins) & written)[first - begin :]
        return legal


class StartTree(PriorityTree):
    """Two trees that change together: `whole` has the weights of all elements, `starts` those of legal starts alone.

    Weights, minimum and maximum are those of all elements, as if there were no second tree. What is drawn, and the
    total, are of legal starts. Which ones are legal is told with `allow`; at first none is. Both are on the CPU.
    """

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__(capacity, dtype, torch.device("cpu"))
        self.whole = priority_tree(capacity, dtype)
        self.starts = priority_tree(capacity, dtype)
        self._legal = torch.zeros(self.capacity, dtype=torch.bool)
        self._flags = self._legal.numpy()  # the same memory: numpy looks up few numbers in a third of the time

    def allow(self, index: torch.Tensor, legal: torch.Tensor) -> None:
        """Say of the leaves `index`, int64 `[n]`, whether a slice may begin there, bool `[n]`; none is named twice."""
        self._legal[index] = legal
        self.starts.set(index, self.whole.get(index).where(legal, 0))

    def allow_only(self, legal: torch.Tensor) -> None:
        """Say of all leaves, bool `[capacity]`, whether a slice may begin there."""
        self._legal.copy_(legal)
        self.starts.load(self.whole.weights().where(self._legal, 0))

    def set(self, index: torch.Tensor, weights: torch.Tensor | float) -> None:
        self.whole.set(index, weights)
        legal = self._flags[index.numpy(force=True)]
        values = weights.numpy(force=True) if isinstance(weights, torch.Tensor) else weights
        self.starts.set(index, torch.from_numpy(np.where(legal, values, 0.0)))

    def fill(self, start: int, stop: int, weight: float) -> None:
        self.whole.fill(start, stop, weight)
        if stop - start == 1:
            self.starts.fill(start, stop, weight if self._legal[start] else 0.0)
        else:
            self.starts.set(self._legal[start:stop].nonzero()[:, 0] + start, weight)

    def draw(self, fractions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.starts.draw(fractions)

    def get(self, index: torch.Tensor) -> torch.Tensor:
        return self.whole.get(index)

    def weights(self) -> torch.Tensor:
        return self.whole.weights()

    def load(self, weights: torch.Tensor) -> None:
        self.whole.load(weights)
        kept = self._legal[: len(weights)]
        self.starts.load(weights.cpu().where(kept, 0))

    def grown(self, capacity: int) -> StartTree:
        larger = StartTree(capacity, self.dtype, self.device)
        more = torch.zeros(larger.capacity - len(self._legal), dtype=torch.bool)
        larger.allow_only(torch.cat([self._legal, more]))
        larger.load(self.weights())
        return larger

    @property
    def any_legal(self) -> bool:
        """Whether a slice may begin anywhere, be its weight 0; looks at all leaves."""
        return bool(self._legal.any())

    @property
    def total(self) -> float:
        """The sum of the weights of legal starts."""
        return self.starts.total

    @property
    def minimum(self) -> float:
        """The smallest weight above 0 of any element."""
        return self.whole.minimum

    @property
    def maximum(self) -> float:
        """The largest weight of any element."""
        return self.whole.maximum


Numbers: TypeAlias = NDArray[np.int64]

_CHUNK = 1 << 18


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Draws the first steps of slices, among all that a slice may begin at, in proportion to their weights.

    The weight of a step is `(priority + eps) ** alpha`; `max_capacity`, `alpha`, `beta`, `eps`, `dtype`, `reduction`,
    `max_priority_within_buffer` and `normalize` are those of `PrioritizedSampler`, all others and the output those of
    `SliceSampler`. A slice may begin where a whole one has room in the trajectory; with `strict_length=False` a
    shorter trajectory is taken from its first step on. The info has in addition `"priority_weight"`, float32, for
    each step that of the first one of its slice. The least weight it is measured by is that of all steps, whether or
    not a slice may begin there.

    Slices may hang over the ends of trajectories, but not over their beginnings, where there is no step with a
    priority: a left `span` is left out, with a warning.

    Two trees are kept, one with the weights of all steps and one with those that a slice may begin at, and follow what
    is written and updated. So a batch costs the same whatever the number of steps, and only the first one, or one
    with slices of another length than those before, looks at all of them. Both are in the memory of the CPU.

    SchemaError (a RuntimeError) where no trajectory is long enough, and where all starts have weight 0.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool.core.storages import TensorStorage
    >>> storage = TensorStorage(TensorDict({"episode": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])}, [8]))
    >>> sampler = PrioritizedSliceSampler(8, alpha=1.0, beta=0.0, eps=0.0, slice_len=2)
    >>> sampler.update_priority(torch.arange(8), torch.tensor([0.0, 0, 0, 9, 0, 1, 0, 9]))
    >>> index, info = sampler.sample(storage, 4)
    >>> index
    (tensor([5, 6, 5, 6]),)
    """

    draw_rows = SliceSampler.draw_rows

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: str = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        traj_key: NestedKey | None = None,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        cache_values: bool = False,
        truncated_key: NestedKey | None = ("next", "truncated"),
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,
        span: bool | int | tuple[bool | int, bool | int] = False,
        use_gpu: bool | torch.device | str = False,
        max_priority_within_buffer: bool = False,
        normalize: str = "buffer",
        anchor: Anchor = "any",
        batched: bool = False,
    ) -> None:
        SliceSampler.__init__(
            self,
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            cache_values=cache_values,
            truncated_key=truncated_key,
            strict_length=strict_length,
            pad_output=pad_output,
            compile=compile,
            span=_without_left(span),
            use_gpu=use_gpu,
            anchor=anchor,
            batched=batched,
        )
        within = max_priority_within_buffer
        PrioritizedSampler.__init__(
            self, max_capacity, alpha, beta, eps, dtype, reduction, within, "cpu", normalize=normalize
        )
        self._marked: _Marked | None = None

    @staticmethod
    def _make_tree(capacity: int, dtype: torch.dtype, device: torch.device | None) -> StartTree:
        return StartTree(capacity, dtype, device)

    # Sampling ---------------------------------------------------------------------------------------

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw slices that begin where priorities are high."""
        count, slice_len = self._measure(batch_size)
        table = self._table(storage)
        self.on_attach(storage)
        tree = self._mark_starts(table, storage, slice_len)
        if not tree.total and not tree.any_legal:
            self._refuse_short(table, slice_len)
        index, drawn = PrioritizedSampler.draw(self, storage, count)
        lane, start = _places(table, storage, index)
        if self.strict_length and not self._overhang(slice_len):
            length = np.full(count, slice_len)  # all that is legal has room for a whole slice
        else:
            length = np.minimum(table.reach(start, lane, slice_len), slice_len)
        places, info = self._assemble(storage, table, lane, start, length, slice_len)
        size = places[0].shape
        steps = slice_len if size.numel() == count * slice_len else length
        info["priority_weight"] = torch.from_numpy(np.repeat(drawn["priority_weight"].numpy(), steps)).view(size)
        return places, info

    def _mark_starts(self, table: TrajectoryTable, storage: Storage, slice_len: int) -> StartTree:
        """Bring the tree of starts up to date with a table, which is that of this storage."""
        tree = self._priorities.tree
        assert isinstance(tree, StartTree)  # made so above
        rule = StartRule(slice_len, self.strict_length, self._overhang(slice_len), self.anchor)
        known = self._marked
        same = known is not None and known.table() is table and known.rule == rule
        if known is not None and same and known.version == table.version:
            return tree
        added, rows = table.changes(known.version) if known is not None and same else None, storage.shape[0]
        if added is None:
            tree.allow_only(_all_legal(rule, table, rows, tree.capacity))
        else:
            # Of what was there, the last steps have more room now, and the oldest may have become the first ones.
            stop = table.newest + 1
            _allow(tree, rule, table, rows, max(table.oldest, added[0] - slice_len), stop)
            if not rule.looks_ahead_only:
                _allow(tree, rule, table, rows, table.oldest, min(table.oldest + slice_len, stop))
        self._marked = _Marked(weakref.ref(table), rule, table.version)
        return tree

    # What both parents have ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all trajectories and priorities."""
        SliceSampler.reset(self)
        PrioritizedSampler.reset(self)
        self._marked = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_marked": None}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(starts={PrioritizedSampler.__repr__(self)}, slices={SliceSampler.__repr__(self)})"
        )


@dataclass(frozen=True, slots=True)
class _Marked:
    """What the tree of starts was brought up to date with."""

    table: weakref.ref[TrajectoryTable]
    rule: StartRule
    version: int


def _all_legal(rule: StartRule, table: TrajectoryTable, rows: int, capacity: int) -> torch.Tensor:
    """Tell of all elements, bool `[capacity]`, whether a slice may begin there."""
    legal = np.zeros((rows, table.lanes), np.bool_)  # a storage without bounds has room for more than memory has
    for first in range(table.oldest, table.newest + 1, _CHUNK):
        stop = min(first + _CHUNK, table.newest + 1)
        slots = np.arange(first, stop) % table.capacity
        written = slots < rows
        legal[slots[written]] = rule.legal_rows(table, rows, first, stop)[written]
    found = torch.zeros(capacity, dtype=torch.bool)
    elements = torch.from_numpy(legal).flatten()[:capacity]
    found[: len(elements)] = elements
    return found


def _allow(tree: StartTree, rule: StartRule, table: TrajectoryTable, rows: int, first: int, stop: int) -> None:
    """Tell the tree at which of the steps from `first` to `stop` a slice may begin."""
    slots = np.arange(first, stop) % table.capacity
    numbers = slots[:, None] * table.lanes + np.arange(table.lanes)
    legal = rule.legal_rows(table, rows, first, stop)
    tree.allow(torch.from_numpy(numbers.reshape(-1)), torch.from_numpy(legal.reshape(-1)))


def _places(table: TrajectoryTable, storage: Storage, index: Index) -> tuple[Numbers, Numbers]:
    """Return the lanes of elements, and their rows as they are numbered in time."""
    first, *others = index if isinstance(index, tuple) else (index,)
    lane: Numbers = np.zeros(len(first), np.int64)
    if others:
        for part, size in zip(others, storage.shape[1:], strict=True):
            lane = lane * size + part.numpy()
    return lane, table.oldest + (first.numpy() - table.oldest) % table.capacity


def _without_left(span: Any) -> Any:
    """Leave out by how far slices may hang over beginnings, and say so."""
    left, *right = span if isinstance(span, tuple | list) else (span, span)
    if not left or len(right) != 1:
        return span
    warnings.warn(
        f"slices that are drawn by the priority of their first step cannot begin before it: span={span!r} is taken "
        f"as {(False, *right)!r}",
        stacklevel=4,
    )
    return (False, *right)
