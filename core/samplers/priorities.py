"""Priorities of elements, and the weights that they are drawn with: of all elements, or of legal starts of slices."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import SchemaError, UsageError
from ..kernels.trees import PriorityTree, bounds, priority_tree

SCHEMA_VERSION = 1
"""Version of a state; in older states without one, `_max_priority` may hold a weight instead."""

NEVER_WRITTEN = torch.finfo(torch.float32).max
"""Leaf of the min tree for an element that was never written; that of the sum tree is 0."""

_STATE = ("_alpha", "_eps", "_max_priority", "_sum_tree", "_min_tree")
_INITIAL = 1.0  # the priority of elements before any was given, which counts as given
_SURELY = 1 - 1e-6  # of the heaviest weight: what is near it is compared in float64
_ROUNDING = 1e-5  # of a weight that was made of the same priority elsewhere, in float32


class Priorities:
    """The weights `(priority + eps) ** alpha` of up to `capacity` elements in a tree, and what new elements get.

    The elements 0 to `known - 1` have a weight, all others weight 0. An update of element n makes all elements before
    n known, with the default priority: with `within_buffer` the largest of the known elements, else the largest that
    was ever given, and 1 before any was. What is refused changes nothing.
    """

    def __init__(
        self,
        capacity: int,
        alpha: float,
        eps: float,
        dtype: torch.dtype = torch.float32,
        within_buffer: bool = False,
        device: torch.device | None = None,
        make_tree: Callable[[int, torch.dtype, torch.device | None], PriorityTree] = priority_tree,
    ) -> None:
        self.alpha = at_least_zero("alpha", alpha)
        self.eps = at_least_zero("eps", eps)
        self.within_buffer = within_buffer
        self._make_tree = make_tree
        self.tree = make_tree(capacity, dtype, device)
        self._largest_sum = torch.finfo(dtype).max
        self._forget()
        self._check_weight(self.default)

    def _forget(self) -> None:
        self.known = 0
        self._largest: float | None = None  # of the priorities that were given
        self._largest_number = -1
        self._forget_weights()

    def _forget_weights(self) -> None:
        # A number of torch's, where the priorities are, is added in half the time.
        self._offset = torch.tensor(self.eps, dtype=self.tree.dtype, device=self.tree.device)
        self._weighed: tuple[float, float] | None = None  # a priority and its weight
        self._heaviest: float | None = None  # the weight that the largest priority was last compared with

    def clear(self) -> None:
        """Forget all elements."""
        self.tree.clear()
        self._forget()

    @property
    def heaviest(self) -> float:
        """The largest weight that may be: so that the sum of all is finite."""
        return self._largest_sum / self.tree.capacity

    def grow(self, capacity: int) -> None:
        """Make room for more elements; SchemaError (a RuntimeError) if the weights would be too large then."""
        heaviest, weight = self._largest_sum / capacity, max(self.tree.maximum, self._weight(self.default))
        if weight > heaviest:
            raise SchemaError(f"a weight is {weight:g}, {capacity} elements can have up to {heaviest:g}")
        self.tree = self.tree.grown(capacity)

    def move(self, device: torch.device) -> None:
        """Move the weights to another device."""
        previous = self.tree
        self.tree = self._make_tree(previous.capacity, previous.dtype, device)
        self.tree.load(previous.weights())
        self._forget_weights()

    # Priorities that are given ------------------------------------------------------------------------

    def update(self, numbers: torch.Tensor, priorities: torch.Tensor, *, only_known: bool = False) -> None:
        """Set the priorities, `[n]` or `[1]`, of the elements `numbers`, int64 `[n]`; the last one of each counts.

        Skips negative numbers. UsageError (a ValueError) for priorities that are negative or not finite, IndexError
        for elements beyond the capacity, and with `only_known` for unknown ones, SchemaError (a RuntimeError) for
        another number of priorities.
        """
        values = priorities.to(self.tree.device, self.tree.dtype)
        if len(values) not in (1, len(numbers)):
            raise SchemaError(f"there are {len(values)} priorities, expected {len(numbers)}: one for each element")
        if not len(numbers):
            return
        weights = self._weights(values)
        found = self.tree.update(numbers, values, weights, self.heaviest * _SURELY, self.known)
        if found is not None:
            self._note_largest(found[0], numbers, found[1])
            return
        low, high = bounds(numbers)
        if low < 0:
            kept = numbers >= 0
            values = values[kept.to(values.device)] if len(values) > 1 else values
            self.update(numbers[kept], values, only_known=only_known)
            return
        least, largest = bounds(values)
        if not 0 <= least <= largest < math.inf:  # nor is NaN
            raise UsageError(f"priorities are {least:g} to {largest:g}, expected finite ones of at least 0")
        self._check_weight(largest)
        if high >= self.tree.capacity:
            raise IndexError(f"element {high} was named, the sampler's max_capacity is {self.tree.capacity}")
        if high >= self.known:
            if only_known:
                raise IndexError(f"element {high} was named, the storage has {self.known}")
            self.renew_run(self.known, high + 1)
        self.tree.set(numbers, weights)
        self._note_largest(largest, numbers, int(values.argmax()))

    def _note_largest(self, priority: float, numbers: torch.Tensor, place: int) -> None:
        if self._largest is None or priority > self._largest:
            self._largest, self._largest_number = priority, int(numbers[place])
            self._heaviest = None

    def _check_weight(
        self, priority: float, alpha: float | None = None, eps: float | None = None, capacity: int | None = None
    ) -> None:
        """Refuse a priority whose weight, by these numbers or those that hold now, is too large."""
        alpha, eps = self.alpha if alpha is None else alpha, self.eps if eps is None else eps
        capacity = self.tree.capacity if capacity is None else capacity
        try:
            weight = (priority + eps) ** alpha
        except OverflowError:
            weight = math.inf
        if weight > self._largest_sum / capacity:
            raise UsageError(
                f"a priority is {priority:g}: with alpha={alpha:g} and eps={eps:g} its weight is beyond "
                f"{self._largest_sum / capacity:g}, what {capacity} elements of {self.tree.dtype} can have"
            )

    def change_alpha(self, value: float) -> None:
        """Transform the weights to another alpha; warns where it was 0, from which priorities cannot be restored."""
        alpha = at_least_zero("alpha", value)
        self._check_weight(self.default, alpha)  # new elements get it, even if none has it now
        if self.alpha and alpha != self.alpha:
            weights = self.tree.weights()
            weights[: self.known] = weights[: self.known].pow(alpha / self.alpha)
            if float(weights.max()) > self.heaviest:
                raise UsageError(f"alpha is {value}: the largest weight would be beyond {self.heaviest:g}")
            self.tree.load(weights)
        elif alpha and self.known and not self.alpha:
            warnings.warn(
                "alpha was 0: what the priorities were is not known, all are alike until they are updated", stacklevel=3
            )
        self.alpha = alpha
        self._forget_weights()

    # The default priority -----------------------------------------------------------------------------

    @property
    def default(self) -> float:
        """Priority of new elements: the largest that was ever given, and at least 1, or the largest in the buffer."""
        if not (self.within_buffer and self.alpha):
            return max(_INITIAL, self._largest or 0.0)
        heaviest = self.tree.maximum
        if not heaviest:
            return _INITIAL
        if self._heaviest != heaviest:
            self._heaviest = heaviest
            if self._largest is None or not self._is_weight_of(self._largest, heaviest):  # its element was overwritten
                initial = self._is_weight_of(_INITIAL, heaviest)
                left = max(heaviest ** (1 / self.alpha) - self.eps, 0.0)
                self._largest, self._largest_number = _INITIAL if initial else left, -1
        return _INITIAL if self._largest is None else self._largest

    def _is_weight_of(self, priority: float, weight: float) -> bool:
        return abs(self._weight(priority) - weight) <= _ROUNDING * weight

    def _weight(self, priority: float) -> float:
        """Return the weight of a priority, as the tree holds it."""
        if self._weighed is None or self._weighed[0] != priority:
            self._weighed = (
                priority,
                float(self._weights(torch.tensor(priority, dtype=self.tree.dtype, device=self.tree.device))),
            )
        return self._weighed[1]

    def _weights(self, priorities: torch.Tensor) -> torch.Tensor:
        return priorities.to(self.tree.dtype).add(self._offset).pow_(self.alpha)

    def renew(self, numbers: torch.Tensor) -> None:
        """Give elements the default priority; skips negative numbers. SchemaError for elements beyond the capacity."""
        if not len(numbers):
            return
        low, high = bounds(numbers)
        if low < 0:
            self.renew(numbers[numbers >= 0])
            return
        self._check_written(high)
        replaces = self.within_buffer and low < self.known
        if replaces and float(self.tree.get(numbers).max()) >= self.tree.maximum:
            self.tree.set(numbers, 0.0)  # what is replaced is no longer the largest
        weight = self._weight(self.default)
        if low < self.known:
            self.tree.set(numbers, weight)
        if high >= self.known:
            self.tree.fill(self.known, high + 1, weight)
            self.known = high + 1

    def renew_run(self, start: int, stop: int) -> None:
        """Give the elements `start` to `stop - 1` the default priority, without an index tensor."""
        if stop <= start:
            return
        self._check_written(stop - 1)
        if self.within_buffer and start < self.known:
            self.renew(torch.arange(start, stop))
            return
        self.tree.fill(min(start, self.known), stop, self._weight(self.default))
        self.known = max(self.known, stop)

    def meet(self, count: int) -> None:
        """Set the known elements to 0 to `count - 1`."""
        if count >= self.known:
            self.renew_run(self.known, count)
        else:
            self.tree.fill(count, self.known, 0.0)
            self.known = count

    def turn(self, number: int, count: int) -> None:
        """Rotate the weights of the first `count` elements, so that element `number` becomes element 0."""
        weights = self.tree.weights()
        weights[:count] = weights[:count].roll(-number)
        self.tree.load(weights)
        if 0 <= self._largest_number < count:
            self._largest_number = (self._largest_number - number) % count

    def _check_written(self, number: int) -> None:
        if number >= self.tree.capacity:
            raise SchemaError(
                f"element {number} was written, the sampler's max_capacity is {self.tree.capacity}",
                hint="make the sampler with the max_size of the storage",
            )

    # State --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state under TorchRL's names; `PrioritizedSampler.save_state` documents the entries."""
        weights = self.tree.weights().to("cpu", torch.float64)
        lows = weights.clone()
        lows[self.known :] = NEVER_WRITTEN
        largest, number = self.default, self._largest_number
        if self._largest is not None and number < 0:
            number = int(weights.argmax())
        return {
            "_schema_version": SCHEMA_VERSION,
            "_alpha": self.alpha,
            "_eps": self.eps,
            "_max_priority": torch.tensor([largest, number], dtype=torch.float64),
            "_max_capacity": self.tree.capacity,
            "_sum_tree": weights,
            "_min_tree": lows,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, any_capacity: bool = False) -> None:
        """Load a state; with `any_capacity`, grow to its capacity. SchemaError (a RuntimeError) for an invalid one."""
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise SchemaError(f"{', '.join(missing)} is missing in the state of priorities")
        version = int(state.get("_schema_version", 0))
        if version > SCHEMA_VERSION:
            raise SchemaError(f"the state has version {version}, those up to {SCHEMA_VERSION} are known")
        sums, lows = _checked_leaves(state, None if any_capacity else self.tree.capacity)
        capacity = max(len(sums), self.tree.capacity)
        heaviest = self._largest_sum / capacity
        if not bool(((sums >= 0) & (sums <= heaviest)).all()):
            raise SchemaError(f"the state holds weights that are not from 0 to {heaviest:g}")
        alpha, eps = (at_least_zero(name, state[f"_{name}"]) for name in ("alpha", "eps"))
        largest, number = _checked_largest(state, capacity)
        if number >= 0:
            # States without a version hold the weight instead, where the largest is one in the buffer: pytorch/rl#3925.
            if alpha and self.within_buffer and not version:
                largest = max(largest ** (1 / alpha) - eps, 0.0)
        else:
            largest = 1.0
        self._check_weight(largest, alpha, eps, capacity)
        self.alpha, self.eps = alpha, eps
        self._forget()
        if capacity > self.tree.capacity:
            self.tree = self.tree.grown(capacity)
        self.tree.load(sums)
        written = ((sums > 0) | (lows < NEVER_WRITTEN)).nonzero()
        self.known = int(written[-1]) + 1 if len(written) else 0
        if number >= 0:
            self._largest, self._largest_number = largest, number


def _checked_leaves(state: Mapping[str, Any], capacity: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    sums, lows = state["_sum_tree"], state["_min_tree"]
    for name, leaves in (("_sum_tree", sums), ("_min_tree", lows)):
        if not isinstance(leaves, torch.Tensor):
            raise SchemaError(f"{name} is a {type(leaves).__name__} in the state, expected a tensor")
        if capacity is None and leaves.dim() == 1:
            capacity = len(leaves)
        if leaves.shape != (capacity,):
            raise SchemaError(f"the state holds {leaves.numel()} priorities, the sampler's max_capacity is {capacity}")
    return sums, lows


def _checked_largest(state: Mapping[str, Any], capacity: int) -> tuple[float, int]:
    largest = torch.as_tensor(state["_max_priority"], dtype=torch.float64)
    if largest.shape != (2,) or not -math.inf < float(largest[1]) < capacity:
        raise SchemaError(f"_max_priority is {largest.tolist()} in the state, expected a priority and an element")
    return at_least_zero("the largest priority", float(largest[0])), int(largest[1])


def at_least_zero(name: str, value: float) -> float:
    """Return a value as a float; UsageError (a ValueError) unless it is a finite number of at least 0."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(f"{name} is {value!r}, expected a finite number of at least 0")
    return number


class StartTree(PriorityTree):
    """Two trees on the CPU: `whole` has the weights of all elements, `starts` those of legal starts.

    Draws and the total are those of legal starts, everything else is of all elements. Initially no start is legal;
    `allow` and `allow_only` change that.
    """

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__(capacity, dtype, torch.device("cpu"))
        self.whole = priority_tree(capacity, dtype)
        self.starts = priority_tree(capacity, dtype)
        self._legal = torch.zeros(self.capacity, dtype=torch.bool)
        self._flags = self._legal.numpy()  # the same memory: numpy looks up few numbers in a third of the time

    def allow(self, index: torch.Tensor, legal: torch.Tensor) -> None:
        """Set whether the leaves `index`, int64 `[n]` without repetitions, are legal starts, bool `[n]`."""
        self._legal[index] = legal
        self.starts.set(index, self.whole.get(index).where(legal, 0))

    def allow_only(self, legal: torch.Tensor) -> None:
        """Set whether each leaf is a legal start, bool `[capacity]`."""
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
        """Whether there is a legal start, also of weight 0; reads all leaves."""
        return bool(self._legal.any())

    @property
    def total(self) -> float:
        """The sum of the weights of legal starts."""
        return self.starts.total

    @property
    def minimum(self) -> float:
        """The smallest positive weight of any element."""
        return self.whole.minimum

    @property
    def maximum(self) -> float:
        """The largest weight of any element."""
        return self.whole.maximum
