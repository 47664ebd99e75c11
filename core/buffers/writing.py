"""What goes into a buffer, and what is changed there."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_tensor_collection

from ..errors import SchemaError
from ..writers.batches import batch_length
from .editing import Editing
from .layout import swap, without_arrays
from .parts import UnsupportedError, WrongKindError
from .reading import quiet

__all__ = ["Writing", "Written"]


class Written(NamedTuple):
    """What transforms made of data that was given, with the index it got; `data` is None where nothing was written.

    `grown` is the dimension of the data along which the storage grew.
    """

    data: Any
    index: Any
    grown: int = 0


class Writing(Editing):
    """Adds, extends and empties. What fails changes nothing, and the caller's data is never changed."""

    def add(self, data: Any) -> Any:
        """Write one element; return its index, an int, or int64 `[k, ndim]` where the storage has several dimensions.

        A transform sees a tensordict with one more dimension at the end, of size one. If it returns None, nothing is
        written and the index is empty, `[0, ndim]`. SchemaError (a RuntimeError) for what the storage cannot take.
        """
        return self._write_one(data).index

    def _write_one(self, data: Any) -> Written:
        storage = self._storage
        if not self._transform.is_empty:
            with self._held_again_on_failure():
                if is_tensor_collection(data):
                    return self._add_transformed(data.unsqueeze(-1))
                return self._add_unless_none(self._transform.inv(data))
        if storage.ndim == 1 and type(data) is not dict and is_tensor_collection(data) and data.ndim and not quiet():
            warnings.warn(
                f"a tensordict of batch size {list(data.batch_size)} is added as one element; "
                "extend() writes its rows one by one",
                stacklevel=3,
            )
        return Written(data, self._add(data))

    def _add_unless_none(self, data: Any) -> Written:
        return self._nothing_written() if data is None else Written(data, self._add(data))

    def _nothing_written(self) -> Written:
        return Written(None, torch.empty((0, self._storage.ndim), dtype=torch.int64))

    def _add(self, data: Any) -> Any:
        with self._guard:
            if self._unshared:
                self._share_rows()
            if self._room is not None:
                self._require_room(self._room, 1)
            index = self._writer.add(data)
            if self._unshared:
                self._share_rows()
            if self._tell_sampler and index is not None:  # a writer may keep an element out
                with self._sampling:
                    self._sampler.add(index)
        return index

    def _require_room(self, room: int, count: int) -> None:
        """Refuse to write elements that the sampler could not choose, before anything is changed."""
        storage, writer = self._storage, self._writer
        behind = (writer.cursor if writer.keeps_order else len(storage)) + count
        if min(behind, storage.max_size) > room:
            raise SchemaError(
                f"element {min(behind, storage.max_size) - 1} was to be written, the sampler's max_capacity is {room}",
                hint="make the sampler with the max_size of the storage",
            )

    def _add_transformed(self, data: Any) -> Written:
        changed = self._transform.inv(data)
        if changed is not None and changed.ndim == data.ndim and changed.shape[-1] == 1:
            return self._add_unless_none(changed.squeeze(-1))
        return self._extend_unless_none(changed)

    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Write a batch of elements; return their indices, int64 `[n]`, or `[n, ndim]` of several dimensions.

        A tensor, a tensordict and a tensorclass are batches along their first dimension, or along `dim_extend` where
        the storage has several; a list is a sequence of elements; a tuple or a dict is a nest whose leaves share
        their first dimension. Of a batch longer than the capacity the last elements are kept. A transform that
        returns None leaves nothing to write: the index is empty, `[0, ndim]`.

        SchemaError (a RuntimeError) for what the storage cannot take, and for an empty batch, with nothing changed;
        `update_priority` is a NotImplementedError here: it belongs to buffers of tensordicts.
        """
        if update_priority is not None:
            raise UnsupportedError(
                f"update_priority was given, a {type(self).__name__} does not know where priorities are",
                hint="take a TensorDictReplayBuffer, or call update_priority()",
            )
        index: torch.Tensor = self._write_batch(data).index
        return index

    def _write_batch(self, data: Any) -> Written:
        if data is not None and self._transform.is_empty:
            return self._extend_unless_none(data)
        with self._held_again_on_failure():
            return self._extend_unless_none(self._inward(data, self._transform.inv))

    def flush(self) -> torch.Tensor:
        """Write what transforms held back, as `MultiStepTransform` does; return the indices as `extend` does."""
        index: torch.Tensor = self._write_held().index
        return index

    def _write_held(self) -> Written:
        with self._held_again_on_failure():
            return self._extend_unless_none(self._transform.flush())

    def _extend_unless_none(self, data: Any) -> Written:
        return self._nothing_written() if data is None else Written(data, self._extend(data), self._dim_extend)

    @contextlib.contextmanager
    def _held_again_on_failure(self) -> Iterator[None]:
        """Have transforms that hold data back hold again what then cannot be written."""
        held = self._transform.held_back()
        try:
            yield
        except BaseException:
            self._transform.hold_back(held)
            raise

    def _extend(self, data: Any) -> torch.Tensor:
        if self._dim_extend:
            data = swap(data, self._dim_extend)
        with self._guard:
            if self._unshared:
                self._share_rows()
            if self._room is not None:
                self._require_room(self._room, batch_length(data))
            index = self._writer.extend(data)
            if self._unshared:
                self._share_rows()
            if self._tell_sampler:
                with self._sampling:
                    self._sampler.extend(index)
        return index

    # Priorities and emptying -----------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any) -> None:
        """Give elements another priority, one for all or as many as there are elements, without gradients.

        `index` is an int, or int64 `[n]`, `[n, ndim]`, or a tuple of a tensor a dimension. A sampler that looks at no
        priorities warns. WrongKindError (a TypeError) for an index or a priority of no numbers, UsageError (a
        ValueError) for priorities that are negative or not finite, SchemaError (a RuntimeError) for another number of
        them: all with nothing changed.
        """
        if isinstance(index, slice | str) or index is None or index is Ellipsis or is_tensor_collection(index):
            raise WrongKindError(f"elements are named by their numbers, found a {type(index).__name__}")
        with self._sampling:
            self._sampler.update_priority(without_arrays(index), _numbers(priority), storage=self._storage)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget all elements, and where sampler and writer were; memory is kept.

        SchemaError (a RuntimeError), with nothing changed, for a dataset that does not allow writing.
        """
        with self._guard, self._sampling:
            self._writer.empty(empty_write_count)
            self._sampler.empty()
            self._storage.empty()
            self._transform.hold_back(None)
            self._forget_drawn()


def _numbers(values: Any) -> torch.Tensor:
    """Return priorities without their gradients; WrongKindError (a TypeError) for what are no numbers."""
    if isinstance(values, torch.Tensor):
        return values.detach()
    if isinstance(values, list | tuple):
        values = [value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value for value in values]
    if values is None:  # which numpy takes for NaN
        raise WrongKindError("priorities are numbers, found None")
    try:
        return torch.from_numpy(np.array(values, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise WrongKindError(f"priorities are numbers, found a {type(values).__name__}: {error}") from error
