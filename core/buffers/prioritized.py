"""Buffers with a prioritised sampler that fits their storage."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import SchemaError, UsageError
from ..samplers import Sampler
from ..samplers.prioritized import PrioritizedSampler, checked_device
from ..storages import Storage
from ..writers import RoundRobinWriter, Writer
from .base import ReplayBuffer
from .parts import WrongKindError
from .tensordict import TensorDictReplayBuffer
from .unsynced import LearnerSampler
from .writing import Written

__all__ = ["PrioritizedReplayBuffer", "TensorDictPrioritizedReplayBuffer"]


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

    def _take_priorities(self, written: Written) -> None:
        if self._sync:
            super()._take_priorities(written)
