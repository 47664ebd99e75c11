"""Slices drawn by the priority of their first step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict.utils import NestedKey

from ..errors import warn_caller
from ..kernels.slices import Anchor, SliceRule
from ..storages.base import Storage
from .base import Index
from .prioritized import PrioritizedSampler, StartTree
from .slices import SliceSampler
from .trajectories import TrajectoryTable

Numbers: TypeAlias = NDArray[np.int64]

_CHUNK = 1 << 18


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Draws slices in proportion to the priority of their first step, among all legal first steps.

    A slice may start wherever a whole one fits into the trajectory; with `strict_length=False` a shorter trajectory is
    taken from its first step. The info has `"priority_weight"`, float32: for each step the importance weight of the
    first step of its slice, relative to the least weight of all steps.

    Two trees on the CPU hold the weights of all steps and of legal starts, and are updated with each write. The time of
    a batch does not depend on the number of steps, except for the first batch and after a change of the slice length.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, normalize: see
            `PrioritizedSampler`.
        span: slices may extend beyond the ends of trajectories, but not beyond their starts, where no step has a
            priority: a left `span` is ignored, with a warning.
        **options: the other arguments of `SliceSampler`, whose output is the same.

    Raises:
        SchemaError: (a RuntimeError) from `sample`: no trajectory is long enough, or all starts have weight 0.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import TensorStorage
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
        """Draw slices by the priority of their first step."""
        count, slice_len = self._measure(batch_size)
        table = self.trajectories(storage)
        self.on_attach(storage)
        tree = self._mark_starts(table, storage, slice_len)
        if not tree.total and not tree.any_legal:
            self._refuse_short(table, slice_len)
        index, drawn = PrioritizedSampler.draw(self, storage, count)
        lane, start = _places(table, storage, index)
        if self._rule(slice_len).is_plain:
            length = np.full(count, slice_len)  # a whole slice fits at every legal start
        else:
            length = np.minimum(table.reach(start, lane, slice_len), slice_len)
        places, info = self._assemble(storage, table, lane, start, length, slice_len)
        size = places[0].shape
        steps = slice_len if size.numel() == count * slice_len else length
        info["priority_weight"] = torch.from_numpy(np.repeat(drawn["priority_weight"].numpy(), steps)).view(size)
        return places, info

    def _mark_starts(self, table: TrajectoryTable, storage: Storage, slice_len: int) -> StartTree:
        """Bring the legal starts up to date with the trajectory table of a storage."""
        tree = self._priorities.tree
        assert isinstance(tree, StartTree)  # `_make_tree` made it
        rule = self._rule(slice_len)
        known = self._marked
        same = known is not None and known.table() is table and known.rule == rule
        if known is not None and same and known.version == table.version:
            return tree
        added, rows = table.changes(known.version) if known is not None and same else None, storage.shape[0]
        if added is None:
            tree.allow_only(_all_legal(rule, table, rows, tree.capacity))
        else:
            # New steps may complete slices that start at the last older steps, and where steps were overwritten, a
            # trajectory now starts at the oldest step.
            stop = table.newest + 1
            _allow(tree, rule, table, rows, max(table.oldest, added[0] - slice_len), stop)
            if not rule.looks_ahead_only:
                _allow(tree, rule, table, rows, table.oldest, min(table.oldest + slice_len, stop))
        self._marked = _Marked(weakref.ref(table), rule, table.version)
        return tree

    # Methods of both bases ----------------------------------------------------------------------------

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
    """The table, rule and version with which the legal starts were computed."""

    table: weakref.ref[TrajectoryTable]
    rule: SliceRule
    version: int


def _all_legal(rule: SliceRule, table: TrajectoryTable, rows: int, capacity: int) -> torch.Tensor:
    """Return whether each element is a legal start, bool `[capacity]`."""
    legal = np.zeros((rows, table.lanes), np.bool_)  # of the rows written, as the capacity may be unbounded
    for first in range(table.oldest, table.newest + 1, _CHUNK):
        stop = min(first + _CHUNK, table.newest + 1)
        slots = np.arange(first, stop) % table.capacity
        written = slots < rows
        legal[slots[written]] = _legal_rows(rule, table, rows, first, stop)[written]
    found = torch.zeros(capacity, dtype=torch.bool)
    elements = torch.from_numpy(legal).flatten()[:capacity]
    found[: len(elements)] = elements
    return found


def _allow(tree: StartTree, rule: SliceRule, table: TrajectoryTable, rows: int, first: int, stop: int) -> None:
    """Update the legal starts among the absolute steps `first` to `stop - 1`."""
    slots = np.arange(first, stop) % table.capacity
    numbers = slots[:, None] * table.lanes + np.arange(table.lanes)
    legal = _legal_rows(rule, table, rows, first, stop)
    tree.allow(torch.from_numpy(numbers.reshape(-1)), torch.from_numpy(legal.reshape(-1)))


def _legal_rows(rule: SliceRule, table: TrajectoryTable, rows: int, first: int, stop: int) -> NDArray[np.bool_]:
    """Return whether slices may start at the absolute steps `first` to `stop - 1`; bool `[steps, lanes]`.

    `rows` rows of the storage are written. The cost depends on the number of steps, not on the length of trajectories.
    """
    # Steps whose trajectory starts before this are at least a slice's length away from its start.
    begin = max(table.oldest, first - rule.length)
    steps = np.arange(begin, stop)[:, None]
    shape = len(steps), table.lanes
    reach = table.reach(np.repeat(steps, table.lanes), np.tile(np.arange(table.lanes), len(steps)))
    ends = steps + reach.reshape(shape)
    written = steps % table.capacity < rows
    ends = np.where(written, ends, -1)
    begins = np.full(shape, begin)
    begins[1:] = np.where(ends[1:] != ends[:-1], steps[1:], begin)
    begins = np.maximum.accumulate(begins)
    legal: NDArray[np.bool_] = (rule.allows(ends - begins, steps - begins) & written)[first - begin :]
    return legal


def _places(table: TrajectoryTable, storage: Storage, index: Index) -> tuple[Numbers, Numbers]:
    """Return lanes and absolute step numbers of elements."""
    first, *others = index if isinstance(index, tuple) else (index,)
    lane: Numbers = np.zeros(len(first), np.int64)
    if others:
        for part, size in zip(others, storage.shape[1:], strict=True):
            lane = lane * size + part.numpy()
    return lane, table.oldest + (first.numpy() - table.oldest) % table.capacity


def _without_left(span: Any) -> Any:
    """Return a span without its left part, and warn if there was one."""
    left, *right = span if isinstance(span, tuple | list) else (span, span)
    if not left or len(right) != 1:
        return span
    warn_caller(
        f"slices drawn by the priority of their first step cannot begin before it: span={span!r} is used "
        f"as {(False, *right)!r}"
    )
    return (False, *right)
