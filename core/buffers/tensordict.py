"""Buffers of tensordicts, whose batches have index and info as entries, and buffers with a prioritized sampler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar, Literal, overload

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError, WrongKindError, require_choice, require_flags
from ..samplers.base import Index, Sampler
from ..samplers.prioritized import PrioritizedSampler, checked_device
from ..samplers.sample_units import Sequence
from ..storages.base import Storage
from ..storages.list_storage import ListStorage
from ..storages.pytree import added
from ..torchrl_classes import counterpart
from ..writers.base import INDEX, Writer
from ..writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter
from .draws import Draw
from .pytrees import ragged_elements
from .replay_buffer import ReplayBuffer, WriteResult

_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "max": torch.amax,
    "mean": torch.mean,
    "median": lambda priority, dim: priority.median(dim).values,
    "min": torch.amin,
    "sum": torch.sum,
}
_STEPS_OF_SLICES, _STEPS_OF_TRAJECTORIES = ("collector", "mask"), "mask"


def one_each(priority: torch.Tensor, count: int, reduction: str) -> torch.Tensor:
    """Reduce priorities `[count, ...]` to one for each element, `[count]`.

    Raises:
        SchemaError: (a RuntimeError) there are priorities for another number of elements.
        UsageError: the reduction is unknown.
    """
    if not priority.numel() or priority.numel() % count:
        raise SchemaError(f"the priorities have the shape {list(priority.shape)}, expected {count} elements")
    priority = priority.reshape(count, -1)
    if priority.shape[1] == 1:
        return priority[:, 0]
    require_choice("the sampler's reduction", reduction, _REDUCTIONS)
    return _REDUCTIONS[reduction](priority if priority.is_floating_point() else priority.float(), dim=1)


def by_element(
    batch: TensorDictBase, index: torch.Tensor, priority: torch.Tensor, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of a batch, int64 `[n, ndim]`, and one priority for each, `[n]`. Padding is ignored.

    If all steps in each row of the batch have the same index, each row is one element, a whole trajectory.

    Args:
        batch: the batch, for its padding mask.
        index: int64 `[*batch.shape, ndim]`.
        priority: the priorities, `[*batch.shape, ...]`.
        reduction: how several numbers of an element are reduced to one.
    """
    elements, steps = index.reshape(-1, index.shape[-1]), batch.get(_STEPS_OF_SLICES, None)
    if steps is not None:
        real, priority = steps.reshape(-1), one_each(priority, len(elements), reduction)
        return elements[real.to(elements.device)], priority[real.to(priority.device)]
    rows = elements.reshape(len(index), -1, index.shape[-1]) if batch.ndim > 1 else elements.unsqueeze(1)
    if rows.shape[1] == 1 or not bool((rows == rows[:, :1]).all()):
        return elements, one_each(priority, len(elements), reduction)
    steps = batch.get(_STEPS_OF_TRAJECTORIES, None)
    if steps is None or steps.dtype != torch.bool or steps.shape != batch.shape:
        return rows[:, 0], one_each(priority, len(rows), reduction)
    each = zip(priority, steps.to(priority.device), strict=True)
    return rows[:, 0], torch.cat([one_each(row[real], 1, reduction) for row, real in each])


@counterpart
class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` of tensordicts, whose batches have the index and the sampler's info as entries.

    `"index"` is int64 `[batch]`, or `[batch, ndim]` for a storage of several dimensions. If elements are whole
    trajectories, batches are `[batch, steps]`, and the info of an element is repeated at every step. The default writer
    stores the number of each row as `"index"`.

    Args:
        priority_key: the entry from which priorities are read.
        **arguments: the arguments of `ReplayBuffer`.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import LazyTensorStorage
    >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> buffer.extend(TensorDict({"action": torch.arange(10)}, [10]))
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> batch = buffer.sample()
    >>> bool((batch["action"] == batch["index"]).all())
    True
    """

    _label: ClassVar[str | None] = INDEX
    carries_info: ClassVar[bool] = True

    def __init__(self, *, priority_key: str | tuple[str, ...] = "td_error", **arguments: Any) -> None:
        self.priority_key = priority_key
        super().__init__(**arguments)

    def _default_writer(self) -> Writer:
        return TensorDictRoundRobinWriter(compilable=self._compilable)

    # Writing ---------------------------------------------------------------------------------------

    def add(self, data: Any) -> Any:
        """Write one tensordict and its priority; see `ReplayBuffer.add`.

        Args:
            data: a tensordict, or a nest of dicts of tensors, NumPy arrays and numbers.

        Raises:
            UsageError: (a ValueError) the data is neither.
        """
        if type(data) is dict and (index := self._written_as_is(data, True)) is not None:
            return index
        written = self._write_one(_tensordict_of(data, 0))
        self._take_priorities(written)
        return written.index

    def extend(  # type: ignore[override]  # TorchRL's name for the data, and ours
        self, tensordicts: Any = None, *, update_priority: bool | None = None, data: Any = None
    ) -> torch.Tensor:
        """Write a batch and its priorities; see `ReplayBuffer.extend`.

        Args:
            tensordicts: a tensordict, or a nest of dicts of tensors and NumPy arrays that share as many leading
                dimensions as the storage has.
            update_priority: unless it is False, a sampler that draws by priority takes the priorities from the entry
                `priority_key` of the written elements, after the transforms. If a transform holds data back, this
                happens when the data is written.
            data: another name for `tensordicts`.

        Returns:
            The indices; see `ReplayBuffer.extend`. A batch without rows changes nothing and has the index `[0]`.

        Raises:
            UsageError: (a ValueError) the data is neither a tensordict nor such a nest.
            SchemaError: (an IndexError) the batch has no rows, and the storage does not know its entries yet.
            SchemaError: (a RuntimeError) the priorities cannot be used; the elements are stored nevertheless.
        """
        given = data if tensordicts is None else tensordicts
        index: torch.Tensor | None = self._written_as_is(given, False) if type(given) is dict else None
        if index is None:
            written = self._write_batch(_tensordict_of(given, self._storage.ndim))
            if update_priority is not False:
                self._take_priorities(written)
            index = written.index
        return index

    def _written_as_is(self, data: dict[Any, Any], single: bool) -> Any:
        """Write a dict of NumPy arrays and numbers without making a tensordict, and return the index.

        None, with nothing changed, if a tensordict is necessary: for other values, for transforms and for priorities.
        """
        if not self._transform.is_empty or (self._sampler.takes_priorities and self._has_priorities(data)):
            return None
        return self._put(single, self._writer.write_as_is, data, single)

    def _has_priorities(self, data: Any) -> bool:
        for part in (self.priority_key,) if isinstance(self.priority_key, str) else self.priority_key:
            data = data.get(part) if type(data) is dict else None
        return data is not None

    def _write(self, data: Any, *, single: bool = False) -> WriteResult:
        dim, storage = self._dim_extend, self._storage
        empty = not single and is_tensor_collection(data) and 0 in data.shape[dim : dim + 1]
        if not (empty and self._writer.writes and getattr(storage, "initialized", True)):
            return super()._write(data, single=single)
        return WriteResult(None, torch.empty(0 if storage.ndim == 1 else (0, storage.ndim), dtype=torch.int64))

    def flush(self) -> torch.Tensor:
        """Write the data that transforms hold back, and its priorities; see `ReplayBuffer.flush`."""
        written = self._write_held()
        self._take_priorities(written)
        index: torch.Tensor = written.index
        return index

    def _renumber_rows(self) -> None:
        storage, path = self._storage, (INDEX,)
        if storage.entry(path, slice(0, 1)) is None:
            return
        if isinstance(storage, ListStorage):
            for row in range(len(storage)):
                item = storage.get(row)
                storage.set(row, item.copy().set(INDEX, torch.full_like(item.get(INDEX), row)), set_cursor=False)
            return
        labels = storage.editable(path)
        labels.copy_(torch.arange(len(labels)).reshape(-1, *[1] * (labels.dim() - 1)).expand(labels.shape))

    # Priorities ------------------------------------------------------------------------------------

    def _take_priorities(self, written: WriteResult) -> None:
        """Set the priorities of elements just written from their entry `priority_key`."""
        data, index, grown = written
        if data is None or index is None or not self._prioritised:  # a writer may reject an element
            return
        index = index if isinstance(index, torch.Tensor) else torch.tensor([index])
        try:
            priority = self._priority_in(data)
            if priority is not None and len(index):
                self.update_priority(index, one_each(priority.transpose(0, grown), len(index), self._reduction))
        except Exception as error:
            raise SchemaError(
                f"the entry {self.priority_key!r} could not be used as priorities: {error}",
                hint="the elements are stored; extend(…, update_priority=False) leaves priorities alone",
            ) from error

    @property
    def _prioritised(self) -> bool:
        return self._sampler.takes_priorities

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of the elements of a sampled batch from its entry `priority_key`.

        Several numbers for an element are reduced by the sampler's `reduction`; the anchor of a `Sequence` gets the
        highest priority of its steps. Without the entry, elements get the default priority. Padding, marked by
        `("collector", "mask")` or the `"mask"` of whole trajectories, is ignored. If the sampler does not draw by
        priority, nothing happens.

        Raises:
            UsageError: (a ValueError) the data is not a tensordict.
            MissingKeyError: (a KeyError) the batch has no `"index"`.
            SchemaError: (a RuntimeError) the number of priorities does not match.
        """
        if not self._prioritised:
            return
        _require_tensordict(data)
        if (elements := ragged_elements(data)) is not None:
            for element in elements:  # each one as a batch of one element, whose steps have the same index
                self.update_tensordict_priority(element.unsqueeze(0))
            return
        index = data.get("index", None)
        if index is None:
            raise MissingKeyError('the batch has no "index": it was not sampled from a buffer of tensordicts')
        if not index.numel():
            return
        priority = self._priority_in(data)
        if priority is None:
            priority = torch.full(data.shape, float(self._sampler.default_priority))
        if isinstance(self._sample_unit, Sequence):
            priority = one_each(priority, data.numel(), self._reduction)
            index, priority = self._sample_unit.by_anchor(data, priority)
            if len(index):
                self.update_priority(index, priority)
            return
        ndim = self._storage.ndim
        index, priority = by_element(data, index.reshape(*data.shape, ndim), priority, self._reduction)
        self.update_priority(index if ndim > 1 else index[:, 0], priority)

    @property
    def _reduction(self) -> str:
        return str(getattr(self._sampler, "reduction", "max"))

    def _priority_in(self, data: TensorDictBase) -> torch.Tensor | None:
        if (elements := ragged_elements(data)) is not None:
            parts = [self._priority_in(element) for element in elements]
            known = [one_each(part, 1, self._reduction) for part in parts if part is not None]
            return torch.cat(known) if len(known) == len(parts) else None
        priority = data.get(self.priority_key, None)
        if priority is not None and not isinstance(priority, torch.Tensor):
            raise SchemaError(f"{self.priority_key!r} is a {type(priority).__name__}, expected a tensor")
        return None if priority is None else priority.detach()

    # Sampling --------------------------------------------------------------------------------------

    @overload  # type: ignore[override]  # mypy compares the overloads one by one
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True], out: Any = None
    ) -> tuple[TensorDictBase, dict[Any, Any]]: ...

    @overload
    def sample(
        self, batch_size: int | None = None, return_info: Literal[False] = False, *, out: Any = None
    ) -> TensorDictBase: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        out: Any = None,
    ) -> Any: ...

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        out: Any = None,
    ) -> Any:
        """Draw a batch; see `ReplayBuffer.sample`. The deprecated `include_info=False` leaves out index and info."""
        if include_info is None:
            return super().sample(batch_size, return_info, out=out)
        require_flags(return_info=return_info, include_info=include_info)
        if out is not None:
            raise UsageError(f"out is a {type(out).__name__} and include_info is {include_info}: give one of them")
        warnings.warn("include_info is deprecated: batches carry the info", DeprecationWarning, stacklevel=2)
        batch, info = super().sample(batch_size, return_info=True)
        if not include_info:
            batch = batch.exclude(*info)
        return (batch, info) if return_info else batch

    def _completed(self, batch: Any, draw: Draw) -> Any:
        entries = {key: _joined(value) if type(value) is tuple else value for key, value in draw.info.items()}
        if added(batch, entries):
            return batch
        if not is_tensor_collection(batch):
            raise SchemaError(
                f"expected a tensordict to sample, found a {type(batch).__name__}", hint="use a ReplayBuffer"
            )
        elements = ragged_elements(batch)
        for key, value in entries.items():
            try:
                if elements is not None:
                    for element, part in zip(elements, value, strict=True):
                        element.set(key, _of_every_step(part[None], element.unsqueeze(0))[0])
                    continue
                batch.set(key, _of_every_step(value, batch) if batch.ndim > 1 else value)
            except RuntimeError as error:
                raise SchemaError(
                    f"{key!r} has the shape {list(value.shape)}, expected it to begin with the batch's, "
                    f"{list(batch.shape)}",
                    hint="keep the leading dimensions in transforms, or use a ReplayBuffer with return_info=True",
                ) from error
        return batch


class RemoteTensorDictReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` by the name of TorchRL's class for `torch.distributed.rpc`.

    It is the same buffer: every buffer can be called through RPC, as in `reference.rpc_sync().sample(32)` for an RRef.
    A `RayReplayBuffer` can also be used from several machines, and copies batches less often.

    >>> from rbtool import LazyTensorStorage
    >>> RemoteTensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4).batch_size
    4
    """


def _joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Stack coordinates, given as one tensor for each dimension, along a new last dimension."""
    return torch.stack(parts, -1) if len(parts) > 1 else parts[0].unsqueeze(-1)


def _of_every_step(value: Any, batch: TensorDictBase) -> Any:
    """Repeat the info of elements, such as whole trajectories, along the remaining dimensions of a batch.

    The result is contiguous; for a lazy stack, in each of its parts.
    """
    size = batch.batch_size
    if not isinstance(value, torch.Tensor) or value.shape[:1] != size[:1]:
        return value
    if value.shape[: len(size)] != size:
        steps = value.reshape(len(value), *[1] * (len(size) - 1), *value.shape[1:])
        value = steps.expand(*size, *value.shape[1:])
    dim = batch.stack_dim if isinstance(batch, LazyStackedTensorDict) else 0
    return value.movedim(dim, 0).contiguous().movedim(0, dim)


def _tensordict_of(data: Any, ndim: int) -> TensorDictBase:
    """Return data as a tensordict. A nest of dicts is converted to one with `ndim` batch dimensions.

    UsageError for anything else, and for a dict whose values differ in these dimensions.
    """
    if type(data) is TensorDict:  # the general check would take 0.7 of 9.7 µs of a step
        return data
    if not isinstance(data, Mapping) or is_tensor_collection(data):
        _require_tensordict(data)
        return data  # type: ignore[no-any-return]
    entries = [(key, _tensor_of(key, value)) for key, value in _leaves(data, ())]
    if not entries:
        raise UsageError("the dict has no entries to write")
    first, size = entries[0][0], entries[0][1].shape[:ndim]
    for key, value in entries:
        if value.ndim < ndim or value.shape[:ndim] != size:
            raise UsageError(
                f"{'.'.join(key)!r} is {list(value.shape)} and {'.'.join(first)!r} is {list(entries[0][1].shape)}, "
                f"expected the same {'number of rows' if ndim == 1 else f'{ndim} leading dimensions'}"
            )
    made = TensorDict({}, batch_size=size)
    for key, value in entries:
        made.set(key, value)
    return made


def _leaves(nest: Mapping[Any, Any], prefix: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in nest.items():
        path = (name,) if isinstance(name, str) else name
        if not (isinstance(path, tuple) and path and all(isinstance(part, str) for part in path)):
            raise UsageError(f"the dict has the key {name!r}, expected a name or a tuple of names")
        if isinstance(value, Mapping | TensorDictBase):
            yield from _leaves(value, (*prefix, *path))
        else:
            yield (*prefix, *path), value


def _tensor_of(key: tuple[str, ...], value: Any) -> torch.Tensor:
    """Return a value of a dict as a tensor. Arrays are copied, as the caller may change them later."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
    raise UsageError(
        f"{'.'.join(key)!r} is {kind}, expected a tensor, a NumPy array of numbers or a dict of them",
        hint="make a tensordict of it, or use a ReplayBuffer with a ListStorage",
    )


def _require_tensordict(data: Any) -> None:
    if not isinstance(data, TensorDictBase):
        raise UsageError(f"expected a tensordict, found a {type(data).__name__}", hint="use a ReplayBuffer")


_WITH_THE_LEARNER = "only the process that created this buffer has its priorities"


class LearnerSampler(PrioritizedSampler):
    """A `PrioritizedSampler` of one process, for a ring that other processes write to.

    Before each draw it compares the writer's count and cursor, which are in shared memory, with their values at the
    last draw. The rows written in between get the default priority; if the ring was overwritten completely, all rows
    do. A spawned child gets a `WorkerSampler` instead, a forked child a copy of the priorities.
    """

    reads_rows: ClassVar[bool] = False
    writes_are_updates: ClassVar[bool] = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._writer: Writer | None = None
        self._storage: Storage | None = None
        self._seen: tuple[int, int] | None = None
        """The writer's count and cursor at the last update; None before the first."""

    def follow(self, writer: Writer, storage: Storage) -> None:
        """Set the writer and the storage to follow."""
        self._writer, self._storage = writer, storage

    def on_share(self, storage: Storage | None) -> None:
        """Do nothing: the writer's counters, shared or not, say what is new."""

    def catch_up(self) -> None:
        """Give the rows written since the last update the default priority."""
        writer, storage = self._writer, self._storage
        if writer is None or storage is None:
            return
        # Read the count first, because a write in another process changes the cursor before the count. Only the cursor
        # decides which rows are updated, so each row is updated exactly once.
        count, cursor = writer.write_count, writer.cursor
        if (count, cursor) == self._seen:
            return
        seen, self._seen = self._seen, (count, cursor)
        length, capacity = len(storage), storage.max_size
        if seen is None or not 0 <= count - seen[0] < capacity:
            rows = torch.arange(length)
        else:
            rows = (seen[1] + torch.arange((cursor - seen[1]) % capacity)) % capacity
        if len(rows):
            super().on_update(rows, storage)

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Catch up with the writers, and draw."""
        self.catch_up()
        return super().draw(storage, batch_size)

    def set_priorities(self, index: Any, priority: Any, storage: Storage | None) -> None:
        """Catch up with the writers, which would overwrite this change if done later, and set priorities."""
        self.catch_up()
        super().set_priorities(index, priority, storage)

    def on_update(self, index: Any, storage: Storage | None) -> None:
        """Give elements changed by this process the default priority."""
        self.catch_up()
        super().on_update(index, storage)

    def on_rotate(self, row: int, storage: Storage) -> None:
        """Rotate the priorities with the rows."""
        super().on_rotate(row, storage)
        self._seen_all()

    def reset(self) -> None:
        """Forget all priorities."""
        super().reset()
        self._seen = None

    # State -----------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Catch up with the writers, and return the state of a `PrioritizedSampler`."""
        self.catch_up()
        return super().save_state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that was saved at the writer's present count."""
        super().load_state(state)
        self._seen_all()

    def _seen_all(self) -> None:
        self._seen = None if self._writer is None else (self._writer.write_count, self._writer.cursor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (WorkerSampler, ()) if get_spawning_popen() is not None else super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_writer": None, "_storage": None}


class WorkerSampler(Sampler):
    """Replaces a `LearnerSampler` in writing processes. Draws and priorities raise SchemaError (a RuntimeError)."""

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        raise SchemaError(f"no batch can be drawn here: {_WITH_THE_LEARNER}", hint="sample there, or with sync=True")

    def set_priorities(self, index: Any, priority: Any, storage: Storage | None) -> None:
        raise SchemaError(f"priorities cannot be updated here: {_WITH_THE_LEARNER}", hint="update them there")


class _Prioritised(ReplayBuffer):
    """A buffer that makes a prioritized sampler with the capacity of its storage."""

    def __init__(
        self,
        *,
        priorities: dict[str, Any],
        sampler: Any,
        sampler_device: torch.device | str | None,
        sync: bool,
        **arguments: Any,
    ) -> None:
        require_flags(sync=sync)
        if sampler is not None and sampler_device is not None:
            raise WrongKindError("sampler_device cannot be set with sampler, which has a device of its own")
        if sampler is not None and not sync:
            raise UsageError("sampler cannot be set with sync=False: the learner makes its own sampler")
        if arguments.get("consume_after_n_samples") is not None:
            raise WrongKindError("consume_after_n_samples cannot be used in a buffer with priorities")
        PrioritizedSampler(1, **priorities)  # check the arguments before the parts are made
        self._priorities = priorities | {"device": checked_device("sampler_device", sampler_device)}
        self._sync = bool(sync)
        super().__init__(sampler=sampler, **arguments)

    def _default_sampler(self, storage: Storage) -> Sampler:
        kind = PrioritizedSampler if self._sync else LearnerSampler
        sampler = kind(1, **self._priorities)
        sampler.fit(storage)
        return sampler

    def _check_parts(self, storage: Storage, sampler: Sampler, writer: Writer) -> None:
        super()._check_parts(storage, sampler, writer)
        if self._sync:
            return
        if storage.ndim > 1:
            raise UsageError(f"sync=False needs a storage of one dimension, this one has {storage.ndim}")
        if not isinstance(writer, RoundRobinWriter):
            raise UsageError(f"sync=False needs a RoundRobinWriter, found a {type(writer).__name__}")

    @property
    def prioritized_sampler(self) -> Sampler:
        """The sampler, which has the priorities."""
        return self.sampler

    def _connect(self) -> None:
        super()._connect()
        if isinstance(self._sampler, LearnerSampler):
            self._sampler.follow(self._writer, self._storage)

    def extend(self, *data: Any, update_priority: bool | None = None, **named: Any) -> torch.Tensor:
        """Write a batch of elements; see the buffers without priorities.

        With `sync=False`, new elements get the default priority at the next draw.

        Raises:
            SchemaError: (a RuntimeError) `update_priority=True` with `sync=False`.
        """
        if update_priority and not self._sync:
            raise SchemaError(
                "update_priority=True cannot be used with sync=False: writers have no priorities",
                hint="call update_priority() where batches are sampled",
            )
        return super().extend(*data, update_priority=update_priority, **named)


@counterpart
class PrioritizedReplayBuffer(_Prioritised):
    """A `ReplayBuffer` that samples elements in proportion to their priority.

    Its `PrioritizedSampler` has the capacity of the storage. The info of batches has `"priority_weight"`, the
    importance weights that correct the bias of such samples: multiply losses by them. New elements, and elements in the
    storage from the start, get the highest priority ever set; `update_priority(index, priority)` changes priorities.

    Args:
        alpha, beta, eps, dtype: arguments of the `PrioritizedSampler`.
        sampler: a `PrioritizedSampler` to use instead.
        sampler_device: the device of the priorities; default the storage's.
        sync: False if other processes write to the same ring. Priorities then exist only in the learner, the process
            that made the buffer. Before each batch it gives the default priority to rows written by `add` and `extend`
            in any process, but not to rows written by `write_at`.
        **arguments: the arguments of `ReplayBuffer`.

    Raises:
        WrongKindError: (a TypeError) both `sampler` and `sampler_device` are given.
        UsageError: (a ValueError) with `sync=False`, the storage has several dimensions or the writer is not a ring.
        SchemaError: (a RuntimeError) with `sync=False`, a spawned child draws.

    Schaul et al., "Prioritized experience replay", 2016; names are TorchRL's.

    >>> import torch
    >>> from rbtool import LazyTensorStorage
    >>> buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(100), batch_size=4)
    >>> index = buffer.extend(torch.arange(10))
    >>> buffer.update_priority(index, torch.zeros(10))
    >>> buffer.update_priority(3, 2.0)
    >>> batch, info = buffer.sample(return_info=True)
    >>> batch, info["priority_weight"].shape
    (tensor([3, 3, 3, 3]), torch.Size([4]))
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        storage: Any = None,
        sampler: Any = None,
        sampler_device: torch.device | str | None = None,
        sync: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__(
            priorities={"alpha": alpha, "beta": beta, "eps": eps, "dtype": dtype},
            storage=storage,
            sampler=sampler,
            sampler_device=sampler_device,
            sync=sync,
            **arguments,
        )


@counterpart
class TensorDictPrioritizedReplayBuffer(_Prioritised, TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` that samples elements in proportion to their priority; see `PrioritizedReplayBuffer`.

    Batches have the entries `"index"` and `"priority_weight"`. Priorities are read from the entry `priority_key`: of
    written data, unless `extend` is called with `update_priority=False`, and of batches passed to
    `update_tensordict_priority`. With `sync=False` written elements get the default priority.

    Args:
        priority_key: the entry of priorities.
        reduction: how several priorities of an element are reduced to one: `"max"`, `"min"`, `"mean"`, `"median"` or
            `"sum"`.
        **arguments: the arguments of `PrioritizedReplayBuffer`.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import LazyTensorStorage
    >>> buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(100), batch_size=4)
    >>> index = buffer.extend(TensorDict({"action": torch.arange(10)}, [10]))
    >>> batch = buffer.sample()
    >>> batch["td_error"] = torch.ones(4)
    >>> buffer.update_tensordict_priority(batch)
    >>> sorted(batch.keys())
    ['action', 'index', 'priority_weight', 'td_error']
    """

    def __init__(
        self,
        *,
        alpha: float,
        beta: float,
        priority_key: str | tuple[str, ...] = "td_error",
        eps: float = 1e-8,
        storage: Any = None,
        sampler_device: torch.device | str | None = None,
        sync: bool = True,
        reduction: str = "max",
        **arguments: Any,
    ) -> None:
        super().__init__(
            priorities={"alpha": alpha, "beta": beta, "eps": eps, "reduction": reduction},
            priority_key=priority_key,
            storage=storage,
            sampler=arguments.pop("sampler", None),
            sampler_device=sampler_device,
            sync=sync,
            **arguments,
        )

    def _take_priorities(self, written: WriteResult) -> None:
        if self._sync:
            super()._take_priorities(written)
