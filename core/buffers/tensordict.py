"""The buffer of tensordicts, whose batches carry index and info as entries."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from ..errors import MissingKeyError, SchemaError, UsageError
from ..samplers.sample_units import Sequence
from ..storages.list_storage import ListStorage
from ..storages.pytree import added
from ..writers.base import INDEX, Writer
from ..writers.round_robin import TensorDictRoundRobinWriter
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
    if reduction not in _REDUCTIONS:
        raise UsageError(f"the sampler's reduction is {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
    return _REDUCTIONS[reduction](priority if priority.is_floating_point() else priority.float(), dim=1)


def by_element(
    batch: TensorDictBase, index: torch.Tensor, priority: torch.Tensor, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of a batch, int64 `[n, ndim]`, and one priority for each, `[n]`. Padding is ignored.

    If all steps of each row have the same index, the elements are whole trajectories, with one priority for all steps.

    Args:
        batch: the batch, for its padding mask.
        index: int64 `[*batch.shape, ndim]`.
        priority: the priorities, `[*batch.shape, ...]`.
        reduction: how several numbers of an element become one.
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


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` of tensordicts, whose batches carry the index and the sampler's info as entries.

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
        written = self._write_one(_tensordict_of(data, 0))
        self._take_priorities(written)
        return written.index

    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Write a batch and its priorities; see `ReplayBuffer.extend`.

        Args:
            data: a tensordict, or a nest of dicts of tensors and NumPy arrays that share as many leading dimensions as
                the storage has.
            update_priority: unless it is False, a sampler that draws by priority gets the entry `priority_key` of the
                written elements, as it is after the transforms. If a transform holds data back, this happens when it is
                written.

        Raises:
            UsageError: (a ValueError) the data is neither a tensordict nor such a nest.
            SchemaError: (a RuntimeError) the priorities cannot be used; the elements are stored nevertheless.
        """
        written = self._write_batch(_tensordict_of(data, self._storage.ndim))
        if update_priority is not False:
            self._take_priorities(written)
        index: torch.Tensor = written.index
        return index

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
        """Set the priorities of a sampled batch's elements from its entry `priority_key`.

        Several numbers of an element are reduced by the sampler's `reduction`; the anchor of a `Sequence` gets the
        highest priority of its steps. Without the entry, elements get the default priority. Padding, marked by
        `("collector", "mask")` or the `"mask"` of whole trajectories, is ignored. Does nothing if the sampler does not
        draw by priority.

        Raises:
            UsageError: (a ValueError) the data is not a tensordict.
            MissingKeyError: (a KeyError) the batch has no `"index"`.
            SchemaError: (a RuntimeError) the number of priorities does not match.
        """
        if not self._prioritised:
            return
        _require_tensordict(data)
        if (elements := ragged_elements(data)) is not None:
            for element in elements:  # each as a batch of one element, whose steps share an index
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
                        element.set(key, _of_every_step(part[None], torch.Size([1, *element.shape]))[0])
                    continue
                batch.set(key, _of_every_step(value, batch.shape) if batch.ndim > 1 else value)
            except RuntimeError as error:
                raise SchemaError(
                    f"{key!r} has the shape {list(value.shape)}, expected it to begin with the batch's, "
                    f"{list(batch.shape)}",
                    hint="keep the leading dimensions in transforms, or use a ReplayBuffer with return_info=True",
                ) from error
        return batch


def _joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Stack coordinates, given as one tensor for each dimension, along a new last dimension."""
    return torch.stack(parts, -1) if len(parts) > 1 else parts[0].unsqueeze(-1)


def _of_every_step(value: Any, batch: torch.Size) -> Any:
    """Repeat the info of elements, such as whole trajectories, along the remaining dimensions of a batch."""
    if not isinstance(value, torch.Tensor) or value.shape[:1] != batch[:1] or value.shape[: len(batch)] == batch:
        return value
    steps = value.reshape(len(value), *[1] * (len(batch) - 1), *value.shape[1:])
    return steps.expand(*batch, *value.shape[1:]).contiguous()


def _tensordict_of(data: Any, ndim: int) -> TensorDictBase:
    """Return a tensordict with `ndim` batch dimensions, made from a nest of dicts if necessary; UsageError
    otherwise.
    """
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
    """Return a value of a dict as a tensor; arrays are copied, as the caller may change them later."""
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
