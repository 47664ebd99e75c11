"""Buffers with a prioritized sampler of their storage's size."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar

import torch

from ..errors import SchemaError, UsageError
from ..samplers import Index, Sampler
from ..samplers.prioritized import PrioritizedSampler, checked_device
from ..storages import Storage
from ..writers import RoundRobinWriter, Writer
from .base import ReplayBuffer
from .parts import WrongKindError
from .tensordict import TensorDictReplayBuffer
from .writing import WriteResult

__all__ = ["LearnerSampler", "PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer", "WorkerSampler"]

_WITH_THE_LEARNER = "the priorities of this buffer are with the process that made it"


class LearnerSampler(PrioritizedSampler):
    """A `PrioritizedSampler` of one process that finds out by itself what was written since it was last used.

    Before each draw it reads how many rows the ring's writer has counted, in shared memory, and where it goes on; the
    rows in between get the default priority, and all of them if the ring went round. A child that is spawned gets a
    `WorkerSampler` in its place; a forked one goes on with a copy of the priorities.
    """

    reads_rows: ClassVar[bool] = False
    writes_are_updates: ClassVar[bool] = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._writer: Writer | None = None
        self._storage: Storage | None = None
        self._seen: tuple[int, int] | None = None
        """How many rows were counted, and where the ring went on, at the last look; None before the first."""

    def follow(self, writer: Writer, storage: Storage) -> None:
        """Look at this writer, and at this storage, from now on."""
        self._writer, self._storage = writer, storage

    def catch_up(self) -> None:
        """Give what was written since the last look the default priority."""
        writer, storage = self._writer, self._storage
        if writer is None or storage is None:
            return
        # In this order: of a write that is going on in another process, the cursor moves first. What it has moved
        # over is told once, whatever was counted by then.
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
        """Catch up with what was written, and draw."""
        self.catch_up()
        return super().draw(storage, batch_size)

    def set_priorities(self, index: Any, priority: Any, storage: Storage | None) -> None:
        """Catch up with what was written, so that it takes no priority back, and give elements another priority."""
        self.catch_up()
        super().set_priorities(index, priority, storage)

    def on_update(self, index: Any, storage: Storage | None) -> None:
        """Give elements that this process replaced the default priority."""
        self.catch_up()
        super().on_update(index, storage)

    def on_rotate(self, row: int, storage: Storage) -> None:
        """Move the priorities along with the rows."""
        super().on_rotate(row, storage)
        self._seen_all()

    def reset(self) -> None:
        """Forget all priorities."""
        super().reset()
        self._seen = None

    # State -----------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Catch up, and return the state of a `PrioritizedSampler`."""
        self.catch_up()
        return super().save_state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state that belongs to what the writer has counted by now."""
        super().load_state(state)
        self._seen_all()

    def _seen_all(self) -> None:
        self._seen = None if self._writer is None else (self._writer.write_count, self._writer.cursor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (WorkerSampler, ()) if get_spawning_popen() is not None else super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_writer": None, "_storage": None}


class WorkerSampler(Sampler):
    """Stands for a `LearnerSampler` in the processes that write; SchemaError (a RuntimeError) if asked to draw."""

    def draw(self, storage: Storage, batch_size: int) -> tuple[Index, dict[str, Any]]:
        """Refuse."""
        raise SchemaError(f"a batch was to be drawn, but {_WITH_THE_LEARNER}", hint="sample there, or with sync=True")

    def set_priorities(self, index: Any, priority: Any, storage: Storage | None) -> None:
        """Refuse."""
        raise SchemaError(f"priorities were to be updated, but {_WITH_THE_LEARNER}", hint="update them there")


class _Prioritised(ReplayBuffer):
    """Makes the sampler of its storage's size, once there is a storage."""

    def __init__(
        self,
        *,
        priorities: dict[str, Any],
        sampler: Any,
        sampler_device: torch.device | str | None,
        sync: bool,
        **arguments: Any,
    ) -> None:
        if sampler is not None and sampler_device is not None:
            raise WrongKindError("sampler and sampler_device were given: a sampler has a device already")
        if sampler is not None and not sync:
            raise UsageError("sampler and sync=False were given: with sync=False the learner makes its own sampler")
        PrioritizedSampler(1, **priorities)  # wrong numbers are refused here, also where the parts are made later
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

        With `sync=False`, elements get the default priority when they are first sampled from, and
        `update_priority=True` is a SchemaError (a RuntimeError).
        """
        if update_priority and not self._sync:
            raise SchemaError(
                "update_priority=True was given to a buffer with sync=False: writers have no priorities",
                hint="call update_priority() where batches are sampled",
            )
        return super().extend(data, update_priority=update_priority)


class PrioritizedReplayBuffer(_Prioritised):
    """A `ReplayBuffer` that samples elements by their priority, with a `PrioritizedSampler` of its storage's size.

    `alpha`, `beta`, `eps` and `dtype` are those of the `PrioritizedSampler`; a `sampler` goes before them. With
    `return_info`, batches come with `"priority_weight"`, what losses are to be multiplied with. New elements get the
    highest priority ever seen; `update_priority(index, priority)` gives others. Elements that the storage has from
    the start are new, too.

    - `sampler_device`: where priorities are kept; where the storage is, by default. WrongKindError (a TypeError) if a
      sampler is given.
    - `sync=False`: other processes write, in this very ring, and know no priorities. The learner, which is the
      process that made the buffer, keeps them for itself, and before each batch gives what was written since the
      default one. A child that is spawned cannot sample: SchemaError (a RuntimeError). UsageError (a ValueError) for
      a storage of several dimensions, and for a writer that is no ring. It sees what is written with `add` and
      `extend`: let no other process name the rows itself.

    The other arguments are those of `ReplayBuffer`. The idea is that of Schaul et al., "Prioritized experience
    replay", 2016; names are those of TorchRL.

    >>> import torch
    >>> from rbtool.core.storages import LazyTensorStorage
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
    """A `TensorDictReplayBuffer` that samples elements by their priority: see `PrioritizedReplayBuffer`.

    Batches carry `"index"` and `"priority_weight"`. Priorities are read from the entry `priority_key`: of what is
    written, unless `extend` is told otherwise, and of a batch that `update_tensordict_priority` is given. Of several
    numbers an element `reduction` makes one: `"max"`, `"min"`, `"mean"`, `"median"` or `"sum"`. With `sync=False`
    what is written begins with the default priority.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool.core.storages import LazyTensorStorage
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
