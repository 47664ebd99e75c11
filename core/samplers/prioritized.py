"""Sampling in proportion to priorities."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..errors import SchemaError, UsageError
from ..kernels.trees import DTYPES, PriorityTree, priority_tree
from ..storages import Storage
from .base import Index, Sampler
from .indexing import element_numbers, marked_numbers, priority_values
from .priorities import Priorities, at_least_zero, plain_priorities, read_priorities, write_priorities

__all__ = ["PrioritizedSampler", "UnknownOptionError", "checked_device"]

_REDUCTIONS = ("max", "mean", "median", "min", "sum")
_NORMALIZATIONS = ("batch", "buffer")
_CPU = torch.device("cpu")
_BOUNDLESS = 1 << 62
"""What storages have room for that have no bounds, or more."""


class UnknownOptionError(UsageError, NotImplementedError):
    """An argument names something that is not built."""


class PrioritizedSampler(Sampler):
    """Draws elements with a probability in proportion to `(priority + eps) ** alpha`, with replacement.

    - `max_capacity`: how many elements there may be, counted over all dimensions of the storage. It grows with a
      storage that says only later how many it has room for: one of several dimensions, which holds whole rows, and a
      list without bounds. A buffer warns of a sampler that has less room than its storage, and refuses the write for
      which it would have none, and a storage that holds more already: SchemaError (a RuntimeError).
    - `alpha`: 0 draws uniformly. Set, it transforms the weights that are there; from 0 it cannot, and warns.
    - `beta`: how far `"priority_weight"`, float32 `[batch_size]`, makes up for the unequal probabilities: it is
      `(w / least w) ** -beta` of the weights w, in (0, 1]. The least one is that of all elements that can be drawn, or
      with `normalize="batch"` of the batch, so that one tiny priority does not bring all others near 0.
    - `dtype`: what priorities are kept in, float32 or float64; sums are float64 in any case.
    - `reduction`: how a buffer makes one priority of several numbers: max, min, mean, median or sum.
    - `max_priority_within_buffer`: new elements get the largest priority among those that are there, also where none
      was given to these, instead of the largest that was ever given. The first ones get 1, which counts as given.
    - `device`: where the priorities live. None follows the storage, to CUDA or else the CPU, and takes along what is
      there already.

    Elements of priority 0 with `eps=0` are never drawn. Elements that a storage has and this was not told of get the
    default priority. Draws come from the generator a buffer set, else from torch's own.

    UsageError (a ValueError) for an alpha, beta or eps that is negative or not finite; UnknownOptionError (also a
    NotImplementedError) for another dtype or reduction. The idea is Schaul et al., Prioritized Experience Replay
    (2016); names and the formula of the weights are those of TorchRL.

    >>> import torch
    >>> from rbtool.core.storages import TensorStorage
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
        self.beta = beta
        if dtype not in DTYPES:
            raise UnknownOptionError(f"dtype is {dtype}, expected {' or '.join(map(str, DTYPES))}")
        if reduction not in _REDUCTIONS:
            raise UnknownOptionError(f"reduction is {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
        if normalize not in _NORMALIZATIONS:
            raise UsageError(f"normalize is {normalize!r}, expected one of {', '.join(_NORMALIZATIONS)}")
        self.reduction = reduction
        self.normalize = normalize
        self._device = checked_device("device", device)
        self._priorities = Priorities(
            max_capacity, alpha, eps, dtype, max_priority_within_buffer, self._device, self._make_tree
        )
        self._fits = False
        self._open = False
        self._forget()

    @staticmethod
    def _make_tree(capacity: int, dtype: torch.dtype, device: torch.device | None) -> PriorityTree:
        """Make what weights are kept in and drawn from."""
        return priority_tree(capacity, dtype, device)

    def _forget(self) -> None:
        self._lanes: tuple[int, ...] | None = None  # dimensions of the storage after the first
        self._unnumbered: list[torch.Tensor] = []

    # What it was made with --------------------------------------------------------------------------

    @property
    def max_capacity(self) -> int:
        """How many elements there may be."""
        return self._priorities.tree.capacity

    @property
    def dtype(self) -> torch.dtype:
        """What priorities are kept in."""
        return self._priorities.tree.dtype

    @property
    def device(self) -> torch.device:
        """Where priorities live, as far as is known yet."""
        return self._priorities.tree.device

    @property
    def max_priority_within_buffer(self) -> bool:
        """Whether new elements get the largest priority of those that are there."""
        return self._priorities.within_buffer

    @property
    def eps(self) -> float:
        """What is added to every priority."""
        return self._priorities.eps

    @property
    def alpha(self) -> float:
        """How much priorities count."""
        return self._priorities.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._priorities.change_alpha(value)

    @property
    def beta(self) -> float:
        """How far the weights of a batch make up for unequal probabilities."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = at_least_zero("beta", value)

    # Sampling ---------------------------------------------------------------------------------------

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Draw `batch_size` elements; the info holds their `"priority_weight"`.

        SchemaError (a RuntimeError) where no element can be drawn.
        """
        self.on_attach(storage)
        tree, generator = self._priorities.tree, self.generator
        if not 0 < tree.total < math.inf:
            raise SchemaError(
                f"non-positive p_sum: the weights of {self._priorities.known} elements add up to {tree.total:g}",
                hint="give priorities above 0, or the sampler an eps above 0",
            )
        device = tree.device if generator is None else generator.device
        fractions = torch.rand(batch_size, dtype=torch.float64, generator=generator, device=device)
        numbers, weights = tree.draw(fractions)
        least = tree.minimum if self.normalize == "buffer" else float(weights.min())
        weights = weights.double().div_(least).pow_(-self._beta).float()  # the quotient may be beyond float32
        if tree.device != _CPU and getattr(storage, "device", _CPU) == _CPU:
            numbers, weights = numbers.cpu(), weights.cpu()
        index = numbers if storage.ndim == 1 else torch.unravel_index(numbers, storage.shape)
        return index, {"priority_weight": weights}

    def fit(self, storage: Storage) -> None:
        """Have room for whatever this storage, and any other one that comes in its place, can hold; never less."""
        self._fits = True
        self._make_room(storage)

    def _make_room(self, storage: Storage) -> None:
        """Grow to what a storage has room for; from what it has in powers of two, if that is without bounds."""
        boundless = storage.max_size >= _BOUNDLESS
        self._open = boundless or storage.ndim > 1
        if self._open or self._fits:
            capacity = 1 << len(storage).bit_length() if boundless else storage.max_size
            if capacity > self.max_capacity:
                self._priorities.grow(capacity)

    def check_storage(self, storage: Storage) -> None:
        """Refuse a storage with more elements than `max_capacity`; warn of one that has room for more."""
        room = self.capacity_for(storage)
        if room is None:
            return
        found = f"the sampler's max_capacity is {room}, the storage has room for {storage.max_size}"
        if len(storage) > room:
            raise SchemaError(
                f"{found} and {len(storage)} elements", hint="make the sampler with the max_size of the storage"
            )
        warnings.warn(f"{found}: the write that passes element {room - 1} will be refused", stacklevel=5)

    def capacity_for(self, storage: Storage) -> int | None:
        """Return `max_capacity`, where it is less than the storage has room for and does not grow with it."""
        bounded = not self._fits and storage.ndim == 1 and self.max_capacity < storage.max_size < _BOUNDLESS
        return self.max_capacity if bounded else None

    def on_attach(self, storage: Storage) -> int:
        """Learn from a storage where it is, and how many elements it may have and has, which is returned."""
        self._make_room(storage)
        device, priorities = getattr(storage, "device", _CPU), self._priorities
        if self._device is None and device != priorities.tree.device:
            place = device if getattr(device, "type", "") == "cuda" else _CPU  # a lazy storage may not know yet
            if place != priorities.tree.device:
                priorities.move(place)
        if storage.ndim > 1:
            self._lanes = tuple(storage.shape[1:])
            while self._unnumbered:
                self.on_write(self._unnumbered.pop(0))
        length = len(storage)
        if length != priorities.known:
            priorities.meet(length)
        return length

    # Priorities -------------------------------------------------------------------------------------

    def set_priorities(self, index: Any, priority: Any, storage: Storage | None) -> None:
        """Give elements other priorities.

        `index` is an int, int64 `[n]`, `[n, ndim]`, or a tuple of one tensor a dimension; what has several dimensions
        needs the storage. Negative numbers stand for elements that were not written, and are passed over. `priority`
        is one number for all, or has as many elements as `index` names; of several for one element the last counts.

        UsageError (a ValueError) for priorities that are negative or not finite, NoNumbersError (also a TypeError)
        for an index or priorities that are no numbers, IndexError for elements beyond the capacity or, with the
        storage, beyond those that it has, SchemaError (a RuntimeError) for another number of priorities. Then nothing
        has changed.
        """
        if storage is not None:
            self.on_attach(storage)
        values = priority_values(priority, self.dtype)
        self._priorities.update(element_numbers(index, self._lanes), values, only_known=storage is not None)

    @property
    def default_priority(self) -> float:
        """Priority of new elements."""
        return self._priorities.default

    def on_update(self, index: Any, storage: Storage | None) -> None:
        """Give elements that were changed the default priority, as if they were new.

        `index` is anything that a storage can be written at; without the storage, numbers.
        """
        if storage is None:
            self._priorities.renew(element_numbers(index, self._lanes))
            return
        length = self.on_attach(storage)
        if type(index) is int and storage.ndim == 1 and -length <= index < length:
            self._priorities.renew_run(index % length, index % length + 1)
        else:
            self._priorities.renew(marked_numbers(index, storage))

    def on_write(self, index: Any) -> None:
        """Give elements that were written the default priority. Negative numbers are passed over.

        SchemaError (a RuntimeError) for an element beyond the capacity.
        """
        if isinstance(index, int):
            self.extend_run(index, index + 1)
            return
        if self._lanes is None and isinstance(index, torch.Tensor) and index.dim() == 2 and index.shape[1] > 1:
            # How to number them is not known before the storage was seen; elements that are new by then are found then.
            if self._priorities.known:
                self._unnumbered.append(index.clone())
            return
        self._priorities.renew(element_numbers(index, self._lanes))

    def extend_run(self, start: int, stop: int) -> None:
        """Give the elements from `start` up to but not including `stop` the default priority, at the least cost."""
        self._priorities.renew_run(start, stop)

    def on_rotate(self, row: int, storage: Storage) -> None:
        """Move the priorities along with the rows."""
        self._priorities.turn(row * (len(storage) // storage.shape[0]), len(storage))

    def reset(self) -> None:
        """Forget all priorities."""
        self._priorities.clear()
        self._forget()

    # State ------------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return alpha, beta and eps, the largest priority and whose it is, and the weights.

        Of `_sum_tree` and `_min_tree`, float64 `[max_capacity]`, elements that were never written have 0 and float32's
        largest number. `_max_priority` is float64 `[2]`: a priority and an element, -1 where none was given.
        """
        return self._priorities.state_dict() | {"_beta": self._beta}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state, also of a sampler of TorchRL's, whose trees are read.

        SchemaError (a RuntimeError), with nothing changed, for one that cannot be this one's.
        That of another capacity is none, unless the storage is one that `max_capacity` grows with.
        """
        try:
            beta = at_least_zero("beta", state.get("_beta", math.nan))
            self._priorities.load_state_dict(plain_priorities(state), any_capacity=self._open)
        except UsageError as error:
            raise SchemaError(f"this state cannot be taken over: {error}") from error
        self._beta = beta
        self._forget()

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write the leaves of both trees, and a JSON file, as TorchRL does."""
        write_priorities(folder, state)

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read what `write_state`, or TorchRL, wrote.

        SchemaError (a RuntimeError) for another capacity, CorruptDataError for what cannot be such a state.
        """
        return read_priorities(folder, None if self._open else self.max_capacity)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise SchemaError(
                f"a {type(self).__name__} cannot go to another process: priorities are not shared",
                hint="make the buffer with sync=False: other processes write, and this one samples",
            )
        return super().__getstate__()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(max_capacity={self.max_capacity}, alpha={self.alpha:g}, beta={self.beta:g}, "
            f"eps={self.eps:g})"
        )


def checked_device(name: str, device: Any) -> torch.device | None:
    """Return a device on which priorities can be kept, or None for none; UsageError for one that is not there."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{name} is {device!r}, which is the name of no device") from error
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"{name} is {str(device)!r}, priorities are kept on the CPU or on a CUDA device")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"{name} is {str(device)!r}, this machine has no CUDA device")
    return found
