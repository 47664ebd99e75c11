"""Samplers that draw elements, or slices, in proportion to priorities, with weights that are kept in sum trees.

`Priorities` converts priorities to weights and keeps them in a tree, which `core/kernels/trees.py` explains with a
picture. `PrioritizedSampler` draws elements from the tree. `PrioritizedSliceSampler` draws first steps of slices, from
a tree in which only legal first steps have a weight.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict.utils import NestedKey

from ..errors import (
    CorruptDataError,
    DatasetNotFoundError,
    SchemaError,
    UsageError,
    require_choice,
    require_flags,
    warn_caller,
)
from ..format import fs
from ..format.documents import load_json
from ..format.syncing import replace_file
from ..kernels.slices import Anchor, SliceRule
from ..kernels.trees import DTYPES, PriorityTree, bounds, priority_tree
from ..storages.base import Storage
from ..storages.cursors import NoNumbersError, as_numbers, element_numbers, marked_numbers
from ..storages.write_log import Written
from ..ted.schema import Numbers
from ..torchrl_classes import counterpart
from .base import Index, Sampler
from .slices import SliceSampler
from .trajectories import TrajectoryTable

SCHEMA_VERSION = 1
"""Version of saved states. States of older programs have no version, and their `_max_priority` may be a weight."""

NEVER_WRITTEN = torch.finfo(torch.float32).max
"""The value of elements that were never written in the min tree of a saved state; in its sum tree they have 0."""

_STATE = ("_alpha", "_eps", "_max_priority", "_sum_tree", "_min_tree")
_INITIAL = 1.0  # the default priority before any priority was set; it counts as one that was set
_SURELY = 1 - 1e-6  # weights below this fraction of the largest one allowed are within it in spite of rounding
_ROUNDING = 1e-5  # the relative difference allowed between weights of the same priority in float32


_METADATA = "sampler_metadata.json"
_FILES = {"_sum_tree": "sumtree.memmap", "_min_tree": "mintree.memmap"}
_NUMBERS = ("_alpha", "_beta", "_eps", "_max_capacity")
_REDUCTIONS = ("max", "mean", "median", "min", "sum")
_NORMALIZATIONS = ("batch", "buffer")
_CPU = torch.device("cpu")
_BOUNDLESS = 1 << 62
"""A storage whose `max_size` is at least this is unbounded."""


class UnknownOptionError(UsageError, NotImplementedError):
    """An argument has a value that is not supported."""


@counterpart
class PrioritizedSampler(Sampler):
    """Draws elements with probability in proportion to `(priority + eps) ** alpha`, with replacement.

    The info has `"priority_weight"`, float32 `[batch_size]`: importance weights in (0, 1] that correct for the unequal
    probabilities. With the weight w = `(priority + eps) ** alpha`, they are `(w / w_min) ** -beta`. Elements of
    priority 0 are never drawn if `eps=0`. Elements whose priority was never set have the default priority.

    Args:
        max_capacity: the number of elements, over all dimensions of the storage. It grows as needed for storages whose
            number of elements is known only later: storages of several dimensions, and unbounded lists. For any other
            storage with a larger capacity it grows as well, and the buffer warns once.
        alpha: the exponent of priorities; 0 draws uniformly. Assigning it transforms the present weights. From 0 this
            is impossible, and gives a warning.
        beta: how far the importance weights correct the probabilities: 0 not at all, 1 completely.
        eps: a number that is added to every priority.
        dtype: float32 or float64, for priorities; sums are float64.
        reduction: how a buffer reduces several priorities of an element: `"max"`, `"min"`, `"mean"`, `"median"` or
            `"sum"`.
        max_priority_within_buffer: whether new elements get the largest priority of the elements now in the buffer,
            instead of the largest one ever set. Before any was set, it is 1.
        normalize: what w_min is: with `"buffer"` the least weight of all elements; with `"batch"` the least one of the
            batch, so that a single tiny priority does not bring all importance weights near 0.
        device: where priorities are kept; by default the storage's device if that is CUDA, otherwise the CPU.

    Raises:
        UsageError: (a ValueError) alpha, beta or eps is negative or not finite.
        UnknownOptionError: (also a NotImplementedError) dtype or reduction is not supported.

    Schaul et al., "Prioritized experience replay", 2016; names and the formula of the weights are TorchRL's.

    >>> import torch
    >>> from rbtool import TensorStorage
    >>> sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0, eps=0.0)
    >>> sampler.update_priority(torch.arange(10), torch.tensor([0.0] * 8 + [1, 3]))
    >>> index, info = sampler.sample(TensorStorage(torch.arange(10)), 100)
    >>> sorted(set(index.tolist())), sorted(set(info["priority_weight"].mul(3).round().tolist()))
    ([8, 9], [1.0, 3.0])
    """

    reads_rows: ClassVar[bool] = False
    writes_are_updates: ClassVar[bool] = True

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: str = "max",
        max_priority_within_buffer: bool = False,
        device: torch.device | str | int | None = None,
        *,
        normalize: str = "buffer",
    ) -> None:
        require_flags(max_priority_within_buffer=max_priority_within_buffer)
        self.beta = beta
        if dtype not in DTYPES:
            raise UnknownOptionError(f"dtype is {dtype}, expected {' or '.join(map(str, DTYPES))}")
        if reduction not in _REDUCTIONS:
            raise UnknownOptionError(f"reduction is {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
        require_choice("normalize", normalize, _NORMALIZATIONS)
        self.reduction = reduction
        self.normalize = normalize
        self._device = checked_device("device", device)
        self._priorities = Priorities(
            max_capacity, alpha, eps, dtype, max_priority_within_buffer, self._device, self._make_tree
        )
        self._fits = False
        self._open = False
        self._ring: Storage | None = None
        self._ring_seen: Written | None = None
        self._forget()

    @staticmethod
    def _make_tree(capacity: int, dtype: torch.dtype, device: torch.device | None) -> PriorityTree:
        return priority_tree(capacity, dtype, device)

    def _forget(self) -> None:
        self._lanes: tuple[int, ...] | None = None  # the storage's dimensions after the first
        self._unnumbered: list[torch.Tensor] = []  # written coordinates, until the storage's shape is known

    # Arguments --------------------------------------------------------------------------------------

    @property
    def max_capacity(self) -> int:
        """The number of elements that can have a priority."""
        return self._priorities.tree.capacity

    @property
    def max_size(self) -> int:
        """Another name for `max_capacity`."""
        return self.max_capacity

    @property
    def dtype(self) -> torch.dtype:
        """The element type of priorities."""
        return self._priorities.tree.dtype

    @property
    def device(self) -> torch.device:
        """The device of the priorities. If none was given, it follows the storage."""
        return self._priorities.tree.device

    @property
    def max_priority_within_buffer(self) -> bool:
        """Whether new elements get the largest priority now in the buffer."""
        return self._priorities.within_buffer

    @property
    def eps(self) -> float:
        """The number added to every priority."""
        return self._priorities.eps

    @property
    def alpha(self) -> float:
        """The exponent of priorities."""
        return self._priorities.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._priorities.change_alpha(value)

    @property
    def beta(self) -> float:
        """The exponent of the importance weights."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = at_least_zero("beta", value)

    # Sampling ---------------------------------------------------------------------------------------

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw elements, with `"priority_weight"` in the info; SchemaError if all weights are 0."""
        tree, generator = self.tree_of(storage), self.generator
        if not 0 < tree.total < math.inf:
            raise SchemaError(
                f"non-positive p_sum: the weights of {self._priorities.known} elements add up to {tree.total:g}",
                hint="set priorities above 0, or create the sampler with eps above 0",
            )
        device = tree.device if generator is None else generator.device
        numbers, weights = tree.draw(torch.rand(batch_size, dtype=torch.float64, generator=generator, device=device))
        least = tree.minimum if self.normalize == "buffer" else float(weights.min())
        weights = weights.double().div_(least).pow_(-self._beta).float()  # the quotient may exceed float32
        if tree.device != _CPU and getattr(storage, "device", _CPU) == _CPU:
            numbers, weights = numbers.cpu(), weights.cpu()
        index = numbers if storage.ndim == 1 else torch.unravel_index(numbers, storage.shape)
        return index, {"priority_weight": weights}

    def sampleable(self, storage: Storage, batch_size: int | None = None) -> int:
        """Return the number of elements; 0 if the weights of all are 0."""
        return len(storage) if storage.has_rows and 0 < self.tree_of(storage).total < math.inf else 0

    def tree_of(self, storage: Storage, length: int = -1) -> PriorityTree:
        """Return the tree with the weights of a storage's elements.

        `length` is the number of elements if the caller knows it, which saves time.
        """
        self._catch_up()
        if length != self._priorities.known:
            self.on_attach(storage)
        return self._priorities.tree

    def on_share(self, storage: Storage | None) -> None:
        """Follow what other processes write to the ring: at the next use, new rows get the default priority."""
        self._ring = storage
        self._see_ring()

    def _see_ring(self) -> None:
        self._ring_seen = None if self._ring is None else self._ring.log.now

    def _catch_up(self) -> None:
        """Give the default priority to rows that were written to a shared ring since the last call.

        The rows that this process wrote are among them: it sets their priorities only after this.
        """
        storage, seen = self._ring, self._ring_seen
        if storage is None or seen is None or (now := storage.log.now).rows == seen.rows:
            return
        self._ring_seen = now
        length, capacity = self.on_attach(storage), storage.capacity_rows
        added, lanes = min(now.rows - seen.rows, capacity), math.prod(storage.shape[1:])
        if added > 0:  # negative after a write was undone
            first = (now.next_row - added) % capacity
            for start, stop in ((first, min(first + added, capacity)), (0, max(first + added - capacity, 0))):
                self._priorities.renew_run(start * lanes, min(stop * lanes, length))

    def fit(self, storage: Storage) -> None:
        """Grow to the capacity of this storage, and to other capacities later, without a warning."""
        self._fits = True
        self._make_room(storage)

    def _make_room(self, storage: Storage) -> None:
        """Grow to the capacity of a storage; if it is unbounded, in powers of two with its length."""
        boundless = storage.max_size >= _BOUNDLESS
        self._open = boundless or storage.ndim > 1
        capacity = 1 << len(storage).bit_length() if boundless else storage.max_size
        if capacity > self.max_capacity:
            self._priorities.grow(capacity)

    def check_storage(self, storage: Storage) -> None:
        """Warn once if a storage has a larger capacity than `max_capacity`."""
        if not self._fits and storage.ndim == 1 and self.max_capacity < storage.max_size < _BOUNDLESS:
            self._fits = True
            warn_caller(
                f"max_capacity is {self.max_capacity}, but the storage has room for {storage.max_size} elements: the "
                "sampler grows to as many"
            )

    def on_attach(self, storage: Storage) -> int:
        """Adapt to the device, capacity and length of a storage; return its length."""
        self._make_room(storage)
        device, priorities = getattr(storage, "device", _CPU), self._priorities
        if self._device is None and device != priorities.tree.device:
            place = device if getattr(device, "type", "") == "cuda" else _CPU
            if place != priorities.tree.device:
                priorities.move(place)
        if storage.ndim > 1:
            self._lanes = tuple(storage.shape[1:])
            while self._unnumbered:
                self.on_write(self._unnumbered.pop(0))
        length = len(storage)
        if length != priorities.known:
            priorities.set_known(length)
        return length

    # Priorities -------------------------------------------------------------------------------------

    def set_priorities(self, index: Any, priority: Any, storage: Storage | None) -> None:
        """Set priorities of elements. If this fails, nothing is changed.

        Args:
            index: an int, int64 `[n]` or `[n, ndim]`, or a tuple with one tensor for each dimension; several dimensions
                need `storage`. Negative numbers, of elements that were not kept, are skipped.
            priority: one number for all elements, or one for each; if an element occurs several times, its last one
                counts.
            storage: the storage, if it is known.

        Raises:
            UsageError: (a ValueError) a priority is negative or not finite.
            NoNumbersError: (also a TypeError) index or priorities are not numbers.
            IndexError: an element is beyond the capacity or, with `storage`, beyond its length.
            SchemaError: (a RuntimeError) the number of priorities does not match.
        """
        self._catch_up()
        if storage is not None:
            self.on_attach(storage)
        values = _priority_values(priority, self.dtype)
        self._priorities.update(element_numbers(index, self._lanes), values, only_known=storage is not None)

    @property
    def default_priority(self) -> float:
        """The priority of new elements."""
        return self._priorities.default

    def on_update(self, index: Any, storage: Storage | None) -> None:
        """Give changed elements the default priority; without `storage`, `index` consists of element numbers."""
        self._catch_up()
        if storage is None:
            self._priorities.renew(element_numbers(index, self._lanes))
            return
        length = self.on_attach(storage)
        if type(index) is int and storage.ndim == 1 and -length <= index < length:
            self._priorities.renew_run(index % length, index % length + 1)
        else:
            self._priorities.renew(marked_numbers(index, storage.shape, storage.ndim))

    def on_write(self, index: Any) -> None:
        """Give new elements the default priority, skipping negative numbers; SchemaError beyond the capacity."""
        if isinstance(index, int):
            self.extend_run(index, index + 1)
            return
        if self._lanes is None and isinstance(index, torch.Tensor) and index.dim() == 2 and index.shape[1] > 1:
            # The numbers of these elements depend on the storage; `on_attach` finds them.
            if self._priorities.known:
                self._unnumbered.append(index.clone())
            return
        self._priorities.renew(element_numbers(index, self._lanes))

    def extend_run(self, start: int, stop: int) -> None:
        """Give the elements `start` to `stop - 1` the default priority; the same as `on_write`, without a tensor."""
        self._priorities.renew_run(start, stop)

    def on_rotate(self, row: int, storage: Storage) -> None:
        """Rotate the priorities with the rows."""
        self._priorities.rotate(row * (len(storage) // storage.shape[0]), len(storage))

    def reset(self) -> None:
        """Forget all priorities."""
        self._priorities.clear()
        self._forget()

    # State ------------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return alpha, beta and eps, the largest priority and its element, and the weights.

        In `_sum_tree` and `_min_tree`, float64 `[max_capacity]`, elements that were never written have 0 and the
        largest float32. `_max_priority` is float64 `[2]`: the largest priority and its element, -1 if none was given.
        """
        self._catch_up()
        return self._priorities.state_dict() | {"_beta": self._beta}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state of this class, or of TorchRL with its compiled trees.

        Raises:
            SchemaError: (a RuntimeError) the state is invalid, or has another capacity and `max_capacity` does not grow
                with the storage. Nothing is changed.
        """
        try:
            beta = at_least_zero("beta", state.get("_beta", math.nan))
            self._priorities.load_state_dict(_plain_priorities(state), any_capacity=self._open)
        except UsageError as error:
            raise SchemaError(f"this state cannot be loaded: {error}") from error
        self._beta = beta
        self._see_ring()
        self._forget()

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write the leaves of both trees, then a JSON file, in TorchRL's layout. Each file is replaced atomically."""
        fs.make_folder(folder)
        for name, file in _FILES.items():
            replace_file(folder / file, state[name].numpy().tobytes())
        metadata: dict[str, Any] = {name: float(state[name]) for name in ("_alpha", "_beta", "_eps")}
        metadata["_max_priority"] = [float(number) for number in state["_max_priority"]]
        metadata["_max_capacity"] = float(state["_max_capacity"])
        metadata["_schema_version"] = int(state["_schema_version"])
        replace_file(folder / _METADATA, json.dumps(metadata).encode())

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read a state written by `write_state` or by TorchRL; SchemaError for another capacity."""
        return _read_priorities(folder, None if self._open else self.max_capacity)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise SchemaError(
                f"a {type(self).__name__} cannot go to another process: priorities are not shared",
                hint="create the buffer with sync=False: other processes write, and this one samples",
            )
        self._catch_up()
        return super().__getstate__() | {"_ring": None, "_ring_seen": None}

    def __repr__(self) -> str:
        numbers = f"alpha={self.alpha:g}, beta={self.beta:g}, eps={self.eps:g}"
        return f"{type(self).__name__}(max_capacity={self.max_capacity}, {numbers})"


def _priority_values(priority: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return priorities, given as a number, a tensor or nested lists, as `[n]`; NoNumbersError for anything else."""
    if isinstance(priority, torch.Tensor) and priority.is_complex():
        raise NoNumbersError(f"priorities must be real numbers, found {priority.dtype}")
    return as_numbers("priorities are numbers", priority, dtype).detach().reshape(-1)


def checked_device(name: str, device: Any) -> torch.device | None:
    """Return an available CPU or CUDA device, or None for None; UsageError otherwise."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{name} is {device!r}, which is not the name of a device") from error
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"{name} is {str(device)!r}, but priorities can only be kept on the CPU or a CUDA device")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"{name} is {str(device)!r}, but this machine has no CUDA device")
    return found


# The folder of a state -----------------------------------------------------------------------------


def _read_priorities(folder: Path, capacity: int | None) -> dict[str, Any]:
    """Read a state written by `write_state` or by TorchRL.

    Args:
        folder: the folder.
        capacity: the expected number of elements; None for any.

    Raises:
        DatasetNotFoundError: the folder holds no state.
        SchemaError: (a RuntimeError) the capacity is another one.
        FormatError: the JSON is invalid.
        CorruptDataError: a number is invalid, or a file is missing or has the wrong size.
    """
    if not (folder / _METADATA).is_file():
        raise DatasetNotFoundError(f"{folder} holds no priorities: {_METADATA} is missing")
    metadata = load_json(folder / _METADATA)
    try:
        state: dict[str, Any] = {name: float(metadata[name]) for name in _NUMBERS}
        state["_max_priority"] = _largest(metadata["_max_priority"])
        if "_schema_version" in metadata:
            state["_schema_version"] = int(metadata["_schema_version"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise CorruptDataError(f"{folder / _METADATA} cannot be read: {error!r}") from error
    if capacity is None:
        capacity = int(state["_max_capacity"]) if 1 <= state["_max_capacity"] < math.inf else 0
        if capacity != state["_max_capacity"]:
            raise CorruptDataError(f"{folder / _METADATA} cannot be read: _max_capacity is {state['_max_capacity']:g}")
    if state["_max_capacity"] != capacity:
        raise SchemaError(
            f"{folder} holds {state['_max_capacity']:g} priorities, the sampler's max_capacity is {capacity}"
        )
    return state | {name: _leaves(folder / file, capacity) for name, file in _FILES.items()}


def _plain_priorities(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with tensors in place of the compiled trees that TorchRL's samplers keep in it."""
    found = dict(state)
    try:
        for name in _FILES:
            tree = found.get(name)
            if tree is not None and not isinstance(tree, torch.Tensor) and callable(getattr(tree, "query", None)):
                found[name] = torch.as_tensor(tree[torch.arange(len(tree))], dtype=torch.float64)
        if "_max_priority" in found and not isinstance(found["_max_priority"], torch.Tensor):
            found["_max_priority"] = _largest(found["_max_priority"])
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(f"the priorities in the state cannot be read: {error!r}") from error
    return found


def _largest(given: Any) -> torch.Tensor:
    """Return the largest priority and its element, float64 `[2]`; the element is -1 if no priority was set."""
    value, number = (None, None) if given is None else given
    found = [0.0, -1.0] if value is None else [float(value), -1.0 if number is None else float(number)]
    return torch.tensor(found, dtype=torch.float64)


def _leaves(path: Path, capacity: int) -> torch.Tensor:
    if not path.is_file():
        raise CorruptDataError(f"{path} is missing")
    if path.stat().st_size != 8 * capacity:
        raise CorruptDataError(f"{path} has {path.stat().st_size} bytes, expected {8 * capacity}")
    return torch.from_numpy(np.fromfile(path, np.float64))


class Priorities:
    """The weights `(priority + eps) ** alpha` of up to `capacity` elements in a tree, and the priority of new elements.

    Elements 0 to `known - 1` have a priority; all others have the weight 0. Setting the priority of element n gives the
    default priority to all elements before it that have none. The default priority is the largest one ever set; with
    `within_buffer`, the largest one of the present elements; and 1 before any was set. An update that is refused
    changes nothing.
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
        self._largest: float | None = None  # the largest priority set so far, and its element
        self._largest_number = -1
        self._forget_weights()

    def _forget_weights(self) -> None:
        # Adding a tensor on the device of the priorities takes half the time of adding a Python number.
        self._offset = torch.tensor(self.eps, dtype=self.tree.dtype, device=self.tree.device)
        self._weighed: tuple[float, float] | None = None  # the last priority converted, and its weight
        self._heaviest: float | None = None  # the weight last compared with the largest priority

    def clear(self) -> None:
        """Forget all elements."""
        self.tree.clear()
        self._forget()

    @property
    def heaviest(self) -> float:
        """The largest weight allowed, so that the sum of all weights is finite."""
        return self._largest_sum / self.tree.capacity

    def grow(self, capacity: int) -> None:
        """Make room for more elements; SchemaError (a RuntimeError) if a present weight would be too large then."""
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

    # Setting priorities -------------------------------------------------------------------------------

    def update(self, numbers: torch.Tensor, priorities: torch.Tensor, *, only_known: bool = False) -> None:
        """Set priorities of elements. If this fails, nothing is changed.

        Args:
            numbers: the elements, int64 `[n]`; negative numbers are skipped.
            priorities: `[n]` or `[1]`; if an element occurs several times, the last one counts.
            only_known: whether unknown elements are refused.

        Raises:
            UsageError: (a ValueError) a priority is negative or not finite.
            IndexError: an element is beyond the capacity, or with `only_known` unknown.
            SchemaError: (a RuntimeError) the number of priorities does not match.
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
        if not 0 <= least <= largest < math.inf:  # also refuses NaN
            raise UsageError(f"priorities range from {least:g} to {largest:g}, expected finite numbers of at least 0")
        self._check_weight(largest)
        if high >= self.tree.capacity:
            raise IndexError(f"there is no element {high}: the sampler's max_capacity is {self.tree.capacity}")
        if high >= self.known:
            if only_known:
                raise IndexError(f"there is no element {high}: the storage has {self.known}")
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
        """Raise UsageError if the weight of a priority is too large, with these or the present values."""
        alpha, eps = self.alpha if alpha is None else alpha, self.eps if eps is None else eps
        capacity = self.tree.capacity if capacity is None else capacity
        try:
            weight = (priority + eps) ** alpha
        except OverflowError:
            weight = math.inf
        if weight > self._largest_sum / capacity:
            raise UsageError(
                f"a priority is {priority:g}: with alpha={alpha:g} and eps={eps:g} its weight is beyond "
                f"{self._largest_sum / capacity:g}, the limit for {capacity} elements of {self.tree.dtype}"
            )

    def change_alpha(self, value: float) -> None:
        """Transform the weights to another alpha. From alpha 0 priorities cannot be recovered; this gives a warning."""
        alpha = at_least_zero("alpha", value)
        self._check_weight(self.default, alpha)  # new elements will get it, even if no element has it now
        if self.alpha and alpha != self.alpha:
            weights = self.tree.weights()
            weights[: self.known] = weights[: self.known].pow(alpha / self.alpha)
            if float(weights.max()) > self.heaviest:
                raise UsageError(f"alpha is {value}: the largest weight would be beyond {self.heaviest:g}")
            self.tree.load(weights)
        elif alpha and self.known and not self.alpha:
            warn_caller("alpha was 0, so priorities cannot be recovered: all are equal until they are updated")
        self.alpha = alpha
        self._forget_weights()

    # The default priority -----------------------------------------------------------------------------

    @property
    def default(self) -> float:
        """The priority of new elements: the largest one ever set (at least 1), or the largest one in the buffer."""
        if not (self.within_buffer and self.alpha):
            return max(_INITIAL, self._largest or 0.0)
        heaviest = self.tree.maximum
        if not heaviest:
            return _INITIAL
        if self._heaviest != heaviest:
            self._heaviest = heaviest
            # If the element with the largest priority was overwritten, recover the priority from the largest weight.
            if self._largest is None or not self._is_weight_of(self._largest, heaviest):
                initial = self._is_weight_of(_INITIAL, heaviest)
                left = max(heaviest ** (1 / self.alpha) - self.eps, 0.0)
                self._largest, self._largest_number = _INITIAL if initial else left, -1
        return _INITIAL if self._largest is None else self._largest

    def _is_weight_of(self, priority: float, weight: float) -> bool:
        return abs(self._weight(priority) - weight) <= _ROUNDING * weight

    def _weight(self, priority: float) -> float:
        """Return the weight of a priority, rounded as the tree stores it."""
        if self._weighed is None or self._weighed[0] != priority:
            self._weighed = (
                priority,
                float(self._weights(torch.tensor(priority, dtype=self.tree.dtype, device=self.tree.device))),
            )
        return self._weighed[1]

    def _weights(self, priorities: torch.Tensor) -> torch.Tensor:
        return priorities.to(self.tree.dtype).add(self._offset).pow_(self.alpha)

    def renew(self, numbers: torch.Tensor) -> None:
        """Give elements the default priority, skipping negative numbers; SchemaError beyond the capacity."""
        if not len(numbers):
            return
        low, high = bounds(numbers)
        if low < 0:
            self.renew(numbers[numbers >= 0])
            return
        self._check_written(high)
        replaces = self.within_buffer and low < self.known
        if replaces and float(self.tree.get(numbers).max()) >= self.tree.maximum:
            self.tree.set(numbers, 0.0)  # the largest priority must not be one of a replaced element
        weight = self._weight(self.default)
        if low < self.known:
            self.tree.set(numbers, weight)
        if high >= self.known:
            self.tree.fill(self.known, high + 1, weight)
            self.known = high + 1

    def renew_run(self, start: int, stop: int) -> None:
        """Give the elements `start` to `stop - 1` the default priority; as `renew`, without an index tensor."""
        if stop <= start:
            return
        self._check_written(stop - 1)
        if self.within_buffer and start < self.known:
            self.renew(torch.arange(start, stop))
            return
        self.tree.fill(min(start, self.known), stop, self._weight(self.default))
        self.known = max(self.known, stop)

    def set_known(self, count: int) -> None:
        """Set the number of known elements to `count`."""
        if count >= self.known:
            self.renew_run(self.known, count)
        else:
            self.tree.fill(count, self.known, 0.0)
            self.known = count

    def rotate(self, number: int, count: int) -> None:
        """Rotate the weights of the first `count` elements, so that element `number` becomes element 0."""
        weights = self.tree.weights()
        weights[:count] = weights[:count].roll(-number)
        self.tree.load(weights)
        if 0 <= self._largest_number < count:
            self._largest_number = (self._largest_number - number) % count

    def _check_written(self, number: int) -> None:
        if number >= self.tree.capacity:
            raise SchemaError(
                f"element {number} was written, but the sampler's max_capacity is {self.tree.capacity}",
                hint="create the sampler with the max_size of the storage",
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
        """Load a state; with `any_capacity`, grow to its capacity. SchemaError (a RuntimeError) if it is invalid."""
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise SchemaError(f"{', '.join(missing)} is missing in the state of priorities")
        version = int(state.get("_schema_version", 0))
        if version > SCHEMA_VERSION:
            raise SchemaError(f"the state has version {version}, but only versions up to {SCHEMA_VERSION} can be read")
        sums, lows = _checked_leaves(state, None if any_capacity else self.tree.capacity)
        capacity = max(len(sums), self.tree.capacity)
        heaviest = self._largest_sum / capacity
        if not bool(((sums >= 0) & (sums <= heaviest)).all()):
            raise SchemaError(f"the state holds weights outside of 0 to {heaviest:g}")
        alpha, eps = (at_least_zero(name, state[f"_{name}"]) for name in ("alpha", "eps"))
        largest, number = _checked_largest(state, capacity)
        if number >= 0:
            # In states without a version this is a weight if the largest priority is in the buffer: pytorch/rl#3925.
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
    """Two trees on the CPU: `whole` has the weights of all elements, `starts` only the weights of legal first steps.

    Draws and the total refer to the legal starts, everything else to all elements. Initially no start is legal; `allow`
    and `allow_only` change that.
    """

    def __init__(self, capacity: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        super().__init__(capacity, dtype, torch.device("cpu"))
        self.whole = priority_tree(capacity, dtype)
        self.starts = priority_tree(capacity, dtype)
        self._legal = torch.zeros(self.capacity, dtype=torch.bool)
        self._flags = self._legal.numpy()  # the same memory; for few numbers NumPy is three times as fast as torch

    def allow(self, index: torch.Tensor, legal: torch.Tensor) -> None:
        """Set whether the leaves `index`, int64 `[n]` without repetitions, are legal starts, bool `[n]`."""
        self._legal[index] = legal
        self.starts.set(index, self.whole.get(index).where(legal, 0))

    def allow_only(self, legal: torch.Tensor) -> None:
        """Set for all leaves whether they are legal starts, bool `[capacity]`."""
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
        """Whether there is a legal start, even one of weight 0. This reads all leaves."""
        return bool(self._legal.any())

    @property
    def total(self) -> float:
        """The sum of the weights of the legal starts."""
        return self.starts.total

    @property
    def minimum(self) -> float:
        """The smallest positive weight of any element."""
        return self.whole.minimum

    @property
    def maximum(self) -> float:
        """The largest weight of any element."""
        return self.whole.maximum


_CHUNK = 1 << 18


@counterpart
class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Draws slices in proportion to the priority of their first step, among all legal first steps.

    A slice may start wherever a whole slice fits into the trajectory; with `strict_length=False` a shorter trajectory
    is taken from its first step. The info has `"priority_weight"`, float32: for each step, the importance weight of the
    first step of its slice, relative to the least weight of all steps.

    Two trees on the CPU hold the weights of all steps and of the legal starts, and are updated with each write. The
    time of a batch does not depend on the number of stored steps, except for the first batch and the first one after a
    change of the slice length.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, normalize: see
            `PrioritizedSampler`.
        span: slices may extend beyond the ends of trajectories, but not beyond their starts, where no step has a
            priority: a left `span` is ignored, with a warning. A slice has at least `slice_len - span` steps, and at
            least two for True. With `strict_length`, trajectories that have at least this many steps are drawn as well.
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
        init_key: NestedKey | None = "is_init",
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
        self.init_key = init_key
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

    def sampleable(self, storage: Storage, batch_size: int | None = None) -> int:
        """Return the number of possible slices; 0 if the weights of all are 0."""
        found = SliceSampler.sampleable(self, storage, batch_size)
        if not found:
            return 0
        self.on_attach(storage)
        tree = self._mark_starts(self.trajectories(storage), storage, self._measure_of(batch_size)[1])
        return found if 0 < tree.total < math.inf else 0

    def _mark_starts(self, table: TrajectoryTable, storage: Storage, slice_len: int) -> StartTree:
        """Update the legal starts to the trajectory table of a storage."""
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
            # New steps may complete slices that start shortly before them. Where steps were overwritten, a trajectory
            # now starts at the oldest step, so that other starts near it may be legal.
            stop = table.newest + 1
            _allow(tree, rule, table, rows, max(table.oldest, added[0] - slice_len), stop)
            if not rule.looks_ahead_only:
                _allow(tree, rule, table, rows, table.oldest, min(table.oldest + slice_len, stop))
        self._marked = _Marked(weakref.ref(table), rule, table.version)
        return tree

    def _made_rule(self, slice_len: int) -> SliceRule:
        rule = super()._made_rule(slice_len)
        right = max(slice_len - 2, 0) if self.span[1] is True else rule.right
        return rule._replace(right=right, minimum=slice_len - right if self.strict_length else 1)

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
    legal = np.zeros((rows, table.lanes), np.bool_)  # only for rows that were written, as the capacity may be huge
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
    # If a trajectory starts before this step, all steps asked for are at least a slice's length away from its start, so
    # that it makes no difference where it starts exactly.
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
