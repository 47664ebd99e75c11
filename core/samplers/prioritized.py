"""Sampling with probabilities in proportion to priorities."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..errors import CorruptDataError, DatasetNotFoundError, SchemaError, UsageError, require_flags
from ..format import fs
from ..format.documents import load_json
from ..format.syncing import replace_file
from ..kernels.trees import DTYPES, PriorityTree, priority_tree
from ..storages.base import Storage
from ..storages.cursors import NoNumbersError, as_numbers, element_numbers, marked_numbers
from .base import Index, Sampler
from .priorities import Priorities, at_least_zero

_METADATA = "sampler_metadata.json"
_FILES = {"_sum_tree": "sumtree.memmap", "_min_tree": "mintree.memmap"}
_NUMBERS = ("_alpha", "_beta", "_eps", "_max_capacity")
_REDUCTIONS = ("max", "mean", "median", "min", "sum")
_NORMALIZATIONS = ("batch", "buffer")
_CPU = torch.device("cpu")
_BOUNDLESS = 1 << 62
"""A `max_size` of at least this means a storage without bounds."""


class UnknownOptionError(UsageError, NotImplementedError):
    """An argument has a value that is not supported."""


class PrioritizedSampler(Sampler):
    """Draws elements with a probability in proportion to `(priority + eps) ** alpha`, with replacement.

    - `max_capacity`: the number of elements, over all dimensions of the storage. It grows for storages whose number of
      elements is known later: those of several dimensions, and lists without bounds. A buffer warns of a sampler of a
      smaller capacity than its storage, and raises SchemaError (a RuntimeError) for a write, or a storage, beyond it.
    - `alpha`: 0 draws uniformly. An assignment transforms the present weights; from 0 it cannot, and warns.
    - `beta`: how far `"priority_weight"`, float32 `[batch_size]`, corrects the unequal probabilities: it is
      `(w / least w) ** -beta` of the weights w, in (0, 1]. The least one is that of all elements that can be drawn, or
      with `normalize="batch"` of the batch, so that one tiny priority does not bring all others near 0.
    - `dtype`: float32 or float64, for priorities; sums are float64.
    - `reduction`: how a buffer reduces several priorities of an element: max, min, mean, median or sum.
    - `max_priority_within_buffer`: whether new elements get the largest priority in the buffer instead of the largest
      that was ever given. The first ones get 1.
    - `device`: where the priorities are kept. None follows the storage, to CUDA or else the CPU.

    Elements of priority 0 with `eps=0` are never drawn. Elements of the storage without a priority get the default one.

    UsageError (a ValueError) for an alpha, beta or eps that is negative or not finite; UnknownOptionError (also a
    NotImplementedError) for another dtype or reduction. The method is that of Schaul et al., Prioritized Experience
    Replay (2016); names and the formula of the weights are those of TorchRL.

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
        return priority_tree(capacity, dtype, device)

    def _forget(self) -> None:
        self._lanes: tuple[int, ...] | None = None  # dimensions of the storage after the first
        self._unnumbered: list[torch.Tensor] = []

    # Arguments --------------------------------------------------------------------------------------

    @property
    def max_capacity(self) -> int:
        """The number of elements that can have a priority."""
        return self._priorities.tree.capacity

    @property
    def dtype(self) -> torch.dtype:
        """The element type of priorities."""
        return self._priorities.tree.dtype

    @property
    def device(self) -> torch.device:
        """The device of the priorities; it may change with the first storage."""
        return self._priorities.tree.device

    @property
    def max_priority_within_buffer(self) -> bool:
        """Whether new elements get the largest priority in the buffer."""
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
        """The exponent of the weights of a batch."""
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
                hint="give priorities above 0, or the sampler an eps above 0",
            )
        device = tree.device if generator is None else generator.device
        numbers, weights = tree.draw(torch.rand(batch_size, dtype=torch.float64, generator=generator, device=device))
        least = tree.minimum if self.normalize == "buffer" else float(weights.min())
        weights = weights.double().div_(least).pow_(-self._beta).float()  # the quotient may be beyond float32
        if tree.device != _CPU and getattr(storage, "device", _CPU) == _CPU:
            numbers, weights = numbers.cpu(), weights.cpu()
        index = numbers if storage.ndim == 1 else torch.unravel_index(numbers, storage.shape)
        return index, {"priority_weight": weights}

    def tree_of(self, storage: Storage, length: int = -1) -> PriorityTree:
        """Return the weights of the elements of a storage; `length` is that of one which was asked for before."""
        if length != self._priorities.known:
            self.on_attach(storage)
        return self._priorities.tree

    def fit(self, storage: Storage) -> None:
        """Grow to the capacity of this storage, and of every later one."""
        self._fits = True
        self._make_room(storage)

    def _make_room(self, storage: Storage) -> None:
        """Grow to the capacity of a storage, or in powers of two with its length if it is without bounds."""
        boundless = storage.max_size >= _BOUNDLESS
        self._open = boundless or storage.ndim > 1
        if self._open or self._fits:
            capacity = 1 << len(storage).bit_length() if boundless else storage.max_size
            if capacity > self.max_capacity:
                self._priorities.grow(capacity)

    def check_storage(self, storage: Storage) -> None:
        """Raise SchemaError for a storage with more elements than `max_capacity`; warn of one with more capacity."""
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
        """Return `max_capacity`, if it is below the capacity of the storage and does not grow with it."""
        bounded = not self._fits and storage.ndim == 1 and self.max_capacity < storage.max_size < _BOUNDLESS
        return self.max_capacity if bounded else None

    def on_attach(self, storage: Storage) -> int:
        """Follow device, capacity and length of a storage; return its length."""
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
            priorities.meet(length)
        return length

    # Priorities -------------------------------------------------------------------------------------

    def set_priorities(self, index: Any, priority: Any, storage: Storage | None) -> None:
        """Set priorities of elements, or change nothing.

        `index` is an int, int64 `[n]`, `[n, ndim]`, or a tuple of one tensor a dimension; several dimensions need the
        storage. Negative numbers, of elements that were not kept, are skipped. `priority` is one number for all, or
        one for each element; of several for one element the last counts.

        UsageError (a ValueError) for priorities that are negative or not finite, NoNumbersError (also a TypeError)
        for an index or priorities that are no numbers, IndexError for elements beyond the capacity or, with the
        storage, beyond its length, SchemaError (a RuntimeError) for another number of priorities.
        """
        if storage is not None:
            self.on_attach(storage)
        values = _priority_values(priority, self.dtype)
        self._priorities.update(element_numbers(index, self._lanes), values, only_known=storage is not None)

    @property
    def default_priority(self) -> float:
        """Priority of new elements."""
        return self._priorities.default

    def on_update(self, index: Any, storage: Storage | None) -> None:
        """Give changed elements the default priority; without the storage, `index` holds their numbers."""
        if storage is None:
            self._priorities.renew(element_numbers(index, self._lanes))
            return
        length = self.on_attach(storage)
        if type(index) is int and storage.ndim == 1 and -length <= index < length:
            self._priorities.renew_run(index % length, index % length + 1)
        else:
            self._priorities.renew(marked_numbers(index, storage.shape, storage.ndim))

    def on_write(self, index: Any) -> None:
        """Give new elements the default priority; skips negative numbers. SchemaError beyond the capacity."""
        if isinstance(index, int):
            self.extend_run(index, index + 1)
            return
        if self._lanes is None and isinstance(index, torch.Tensor) and index.dim() == 2 and index.shape[1] > 1:
            # Their numbers depend on the storage; those that are new when it is attached are found then.
            if self._priorities.known:
                self._unnumbered.append(index.clone())
            return
        self._priorities.renew(element_numbers(index, self._lanes))

    def extend_run(self, start: int, stop: int) -> None:
        """Give the elements `start` to `stop - 1` the default priority, without an index tensor."""
        self._priorities.renew_run(start, stop)

    def on_rotate(self, row: int, storage: Storage) -> None:
        """Rotate the priorities with the rows."""
        self._priorities.turn(row * (len(storage) // storage.shape[0]), len(storage))

    def reset(self) -> None:
        """Forget all priorities."""
        self._priorities.clear()
        self._forget()

    # State ------------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return alpha, beta and eps, the largest priority and its element, and the weights.

        In `_sum_tree` and `_min_tree`, float64 `[max_capacity]`, elements that were never written have 0 and the
        largest float32. `_max_priority` is float64 `[2]`: a priority and its element, -1 if none was given.
        """
        return self._priorities.state_dict() | {"_beta": self._beta}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state, also one of TorchRL with compiled trees.

        SchemaError (a RuntimeError), with nothing changed, for an invalid one, and for one of another capacity unless
        `max_capacity` grows with the storage.
        """
        try:
            beta = at_least_zero("beta", state.get("_beta", math.nan))
            self._priorities.load_state_dict(_plain_priorities(state), any_capacity=self._open)
        except UsageError as error:
            raise SchemaError(f"this state cannot be taken over: {error}") from error
        self._beta = beta
        self._forget()

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write the leaves of both trees, then a JSON file, in TorchRL's layout; each file is replaced atomically."""
        fs.make_folder(folder)
        for name, file in _FILES.items():
            replace_file(folder / file, state[name].numpy().tobytes())
        metadata: dict[str, Any] = {name: float(state[name]) for name in ("_alpha", "_beta", "_eps")}
        metadata["_max_priority"] = [float(number) for number in state["_max_priority"]]
        metadata["_max_capacity"] = float(state["_max_capacity"])
        metadata["_schema_version"] = int(state["_schema_version"])
        replace_file(folder / _METADATA, json.dumps(metadata).encode())

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read a state that `write_state`, or TorchRL, wrote; SchemaError for another capacity."""
        return _read_priorities(folder, None if self._open else self.max_capacity)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise SchemaError(
                f"a {type(self).__name__} cannot go to another process: priorities are not shared",
                hint="make the buffer with sync=False: other processes write, and this one samples",
            )
        return super().__getstate__()

    def __repr__(self) -> str:
        numbers = f"alpha={self.alpha:g}, beta={self.beta:g}, eps={self.eps:g}"
        return f"{type(self).__name__}(max_capacity={self.max_capacity}, {numbers})"


def _priority_values(priority: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return priorities, a number or nested lists, as `[n]` without gradients; NoNumbersError for anything else."""
    if isinstance(priority, torch.Tensor) and priority.is_complex():
        raise NoNumbersError(f"priorities are real numbers, found {priority.dtype}")
    return as_numbers("priorities are numbers", priority, dtype).detach().reshape(-1)


def checked_device(name: str, device: Any) -> torch.device | None:
    """Return an available CPU or CUDA device, or None for None; UsageError for any other."""
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


# The folder of a state -----------------------------------------------------------------------------


def _read_priorities(folder: Path, capacity: int | None) -> dict[str, Any]:
    """Read a state that `write_state`, or TorchRL, wrote, of `capacity` elements, or of any number for None.

    DatasetNotFoundError for a folder without a state, SchemaError (a RuntimeError) for another capacity, FormatError
    for invalid JSON, CorruptDataError for invalid numbers and for a file that is missing or has another size.
    """
    if not (folder / _METADATA).is_file():
        raise DatasetNotFoundError(f"{folder} holds no priorities: it has no {_METADATA}")
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
    """Return a state with tensors in place of the compiled trees that a sampler of TorchRL has in its state."""
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
    """Return the largest priority and its element, float64 `[2]`, with -1 where none was given."""
    value, number = (None, None) if given is None else given
    found = [0.0, -1.0] if value is None else [float(value), -1.0 if number is None else float(number)]
    return torch.tensor(found, dtype=torch.float64)


def _leaves(path: Path, capacity: int) -> torch.Tensor:
    if not path.is_file():
        raise CorruptDataError(f"{path} is missing")
    if path.stat().st_size != 8 * capacity:
        raise CorruptDataError(f"{path} has {path.stat().st_size} bytes, expected {8 * capacity}")
    return torch.from_numpy(np.fromfile(path, np.float64))
