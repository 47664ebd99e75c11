"""The buffer of tensordicts, which puts what is known of a batch into the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError
from ..samplers import Sampler
from ..writers import TensorDictRoundRobinWriter, Writer
from .base import ReplayBuffer
from .prefetch import Draw

__all__ = ["TensorDictReplayBuffer"]

_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "max": torch.amax,
    "min": torch.amin,
    "mean": torch.mean,
    "sum": torch.sum,
}


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` of tensordicts: batches carry the index of their elements, and whatever else the sampler says.

    `"index"` is int64, `[batch]`, or `[batch, ndim]` where the storage has several dimensions. `priority_key` names
    the entry that priorities are read from. The default writer also stores the number of every row as `"index"`.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool.core.storages import LazyTensorStorage
    >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> buffer.extend(TensorDict({"action": torch.arange(10)}, [10]))
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> batch = buffer.sample()
    >>> bool((batch["action"] == batch["index"]).all())
    True
    """

    def __init__(self, *, priority_key: str | tuple[str, ...] = "td_error", **arguments: Any) -> None:
        self.priority_key = priority_key
        super().__init__(**arguments)

    def _default_writer(self) -> Writer:
        return TensorDictRoundRobinWriter(compilable=self._compilable)

    # Writing ---------------------------------------------------------------------------------------

    def add(self, data: Any) -> Any:
        """Write one tensordict; see `ReplayBuffer.add`. UsageError (a ValueError) for anything else."""
        _require_tensordict(data)
        return super().add(data)

    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Write a batch; see `ReplayBuffer.extend`. UsageError (a ValueError) for what is no tensordict.

        Unless `update_priority` is False, elements that come with a priority are given it, if the sampler looks at
        priorities; SchemaError (a RuntimeError) if that fails. The elements are stored then all the same.
        """
        _require_tensordict(data)
        index = super().extend(data)
        if update_priority is not False and self._prioritised and len(index):
            self._push_priority(data, index)
        return index

    def _push_priority(self, data: TensorDictBase, index: torch.Tensor) -> None:
        priority = data.get(self.priority_key, None)
        if priority is None:
            return
        try:
            if self._dim_extend:
                priority = priority.transpose(0, self._dim_extend)
            self.update_priority(index, self._reduced(priority, index))
        except Exception as error:
            raise SchemaError(
                f"the entry {self.priority_key!r} could not be taken for priorities: {error}",
                hint="the elements are stored; extend(…, update_priority=False) leaves priorities alone",
            ) from error

    @property
    def _prioritised(self) -> bool:
        return type(self._sampler).update_priority is not Sampler.update_priority

    def _reduced(self, priority: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Make one number an element of its priorities: `[n]` of anything that has as many elements in front."""
        priority = priority.reshape(len(index), -1)
        if priority.shape[1] == 1:
            return priority[:, 0]
        name = getattr(self._sampler, "reduction", "max")
        if name == "median":
            return priority.median(dim=1).values
        if name not in _REDUCTIONS:
            raise UsageError(f"the sampler's reduction is {name!r}, expected median or one of {', '.join(_REDUCTIONS)}")
        return _REDUCTIONS[name](priority, dim=1)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Give the elements of a batch that was sampled the priorities that it holds now.

        Elements without a priority get the default one. Nothing happens if the sampler looks at no priorities.
        MissingKeyError (a KeyError) for a batch without `"index"`.
        """
        if not self._prioritised:
            return
        index = data.get("index", None)
        if index is None:
            raise MissingKeyError('the batch has no "index": it was not sampled from a buffer of tensordicts')
        several = self._storage.ndim > 1
        index = index.reshape(-1, self._storage.ndim) if several else index.reshape(-1)
        priority = data.get(self.priority_key, None)
        if priority is None:
            self.update_priority(index, torch.full((len(index),), float(self._sampler.default_priority)))
        else:
            self.update_priority(index, self._reduced(priority, index))

    # Sampling --------------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """Draw a batch; see `ReplayBuffer.sample`. `include_info=False`, deprecated, leaves the info out."""
        if include_info is None:
            return super().sample(batch_size, return_info)
        warnings.warn("include_info is deprecated: batches carry the info", DeprecationWarning, stacklevel=2)
        batch, info = super().sample(batch_size, return_info=True)
        if not include_info:
            batch = batch.exclude(*info)
        return (batch, info) if return_info else batch

    def _completed(self, batch: Any, draw: Draw) -> Any:
        if not is_tensor_collection(batch):
            raise SchemaError(
                f"a tensordict was to be sampled, found a {type(batch).__name__}", hint="take a ReplayBuffer"
            )
        for key, value in draw.info.items():
            value = torch.stack(value, -1) if isinstance(value, tuple) else value
            try:
                batch.set(key, value)
            except RuntimeError as error:
                raise SchemaError(
                    f"{key!r} is {list(value.shape)}, expected the shape of the batch, {list(batch.shape)}, in front",
                    hint="keep the leading dimensions in transforms, or take a ReplayBuffer with return_info=True",
                ) from error
        return batch


def _require_tensordict(data: Any) -> None:
    if not isinstance(data, TensorDictBase):
        raise UsageError(f"a tensordict is expected, found a {type(data).__name__}", hint="take a ReplayBuffer")
