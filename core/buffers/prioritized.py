"""Buffers with a prioritized sampler as large as their storage."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar

import torch

from ..errors import SchemaError, UsageError, WrongKindError, require_flags
from ..samplers.base import Index, Sampler
from ..samplers.prioritized import PrioritizedSampler, checked_device
from ..storages.base import Storage
from ..writers.base import Writer
from ..writers.round_robin import RoundRobinWriter
from .replay_buffer import ReplayBuffer, WriteResult
from .tensordict import TensorDictReplayBuffer

_WITH_THE_LEARNER = "only the process that created this buffer has its priorities"


class LearnerSampler(PrioritizedSampler):
    """A `PrioritizedSampler` of one process, for rows that other processes write.

    Before each draw it compares the count and cursor of the ring's writer, which are in shared memory, with their
    values at the last draw. The rows written in between get the default priority; if the ring has wrapped around
    completely, all rows do. A spawned child gets a `WorkerSampler` instead, a forked one a copy of the priorities.
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

    def catch_up(self) -> None:
        """Give the rows written since the last update the default priority."""
        writer, storage = self._writer, self._storage
        if writer is None or storage is None:
            return
        # Read the count first: a write in another process moves the cursor before the count. The cursor alone decides
        # which rows are updated, so each row is updated exactly once.
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
        """Catch up with the writers, so that this change is not overwritten later, and set priorities."""
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
    """Stands in for a `LearnerSampler` in writing processes; draws and priorities raise SchemaError (a
    RuntimeError).
    """

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
        PrioritizedSampler(1, **priorities)  # checks the arguments before the parts are made
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

    def _connect(self) -> None:
        super()._connect()
        if isinstance(self._sampler, LearnerSampler):
            self._sampler.follow(self._writer, self._storage)

    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
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
        return super().extend(data, update_priority=update_priority)


class PrioritizedReplayBuffer(_Prioritised):
    """A `ReplayBuffer` that samples elements in proportion to their priority.

    Its `PrioritizedSampler` is as large as the storage. The info of batches has `"priority_weight"`, the weights that
    correct the bias of such samples: multiply losses by them. New elements, and those in the storage from the start,
    get the highest priority ever given; `update_priority(index, priority)` sets others.

    Args:
        alpha, beta, eps, dtype: arguments of the `PrioritizedSampler`.
        sampler: a `PrioritizedSampler` to use instead.
        sampler_device: the device of the priorities; default the storage's.
        sync: False if other processes write into the same ring, without knowing priorities. Only the learner, the
            process that made the buffer, has them; before each batch it gives the rows written meanwhile the default
            priority. It follows `add` and `extend` of other processes, not `write_at`.
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


class TensorDictPrioritizedReplayBuffer(_Prioritised, TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` that samples elements in proportion to their priority; see `PrioritizedReplayBuffer`.

    Batches have the entries `"index"` and `"priority_weight"`. Priorities are read from the entry `priority_key`: of
    written data, unless `extend` is called with `update_priority=False`, and of batches passed to
    `update_tensordict_priority`. With `sync=False` written elements get the default priority.

    Args:
        priority_key: the entry of priorities.
        reduction: how several numbers of an element become one: `"max"`, `"min"`, `"mean"`, `"median"` or `"sum"`.
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
