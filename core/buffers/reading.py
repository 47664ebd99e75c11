"""What comes out of a buffer: batches that a sampler draws, and rows that are named."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import is_tensor_collection
from torch.utils.data import get_worker_info

from ..errors import SchemaError
from ..samplers.base import Index
from ..storages.base import Storage
from .batches import Batches
from .concurrency import Draw
from .expansion import ExpandedDraws
from .loaders import check_use, fetcher_asking, loader_counting, number_of_batches, serve
from .pytrees import entry, is_key, map_tensors, swap, without_arrays


class Reading(Batches):
    """Samples, iterates and looks up.

    A sample takes three steps: the sampler draws an index, always in the caller's thread; the storage reads the rows,
    without a lock that excludes writers; collation, transform and pinning make the batch.
    """

    def __len__(self) -> int:
        """Return the number of elements; to a `DataLoader` over this buffer, the number of batches of an epoch."""
        # `inspect.currentframe` in a local makes a cycle: what the callers hold would wait for the garbage collection.
        caller = sys._getframe(1)
        if caller.f_code.co_name == "__len__" and (loader := loader_counting(self, caller)) is not None:
            return number_of_batches(self, self._known_batch_size(), loader)
        return self._sampler.elements(self._storage)

    # Sampling --------------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, return_info: bool = False, *, out: Any = None) -> Any:
        """Draw a batch; with `return_info`, return a pair of batch and info.

        The batch is copied to `out`, if it is given, which is a batch of as many elements that an earlier call
        returned. SchemaError (a RuntimeError), with `out` unchanged, for other entries, element types, shapes or
        devices, and for tensors that are not contiguous, require gradients, or share memory with stored rows or each
        other; the next call for as many elements delivers what was drawn.

        `info["index"]` is the index, int64 `[batch_size]` or a tuple of one such tensor a dimension, on the storage's
        device like the rest of `info`. A `batch_size` other than the buffer's is used with a warning, and bypasses
        batches made ahead. SchemaError (a RuntimeError) if there is no batch size, and for an empty storage.
        """
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise SchemaError("no batch size is known", hint="give sample(batch_size) or the buffer a batch size")
        if batch_size is not None and self._batch_size not in (None, batch_size) and not quiet():
            warnings.warn(
                f"a batch of {batch_size} is drawn, the buffer's batch_size is {self._batch_size}", stacklevel=2
            )
        draw, batch = self._deliver(size, out)
        return (batch, draw.info) if return_info else batch

    def sample_with(
        self,
        generator: torch.Generator,
        batch_size: int | None = None,
        *,
        choose: Callable[[Storage], tuple[Index, Mapping[Any, Any], Any]] | None = None,
    ) -> Any:
        """Draw a batch with this generator: equal states of it give equal batches, in any process.

        The random stream of the buffer, its epoch and the batches made ahead stay as they are. `choose(storage)`
        returns index, info and rows (None to have them read) in place of the sampler; without it SchemaError (a
        RuntimeError) for a sampler with epochs, whose batches depend on those before.
        """
        if choose is None and self._sampler.has_epochs:
            raise SchemaError(f"a {type(self._sampler).__name__} draws in epochs: its batches depend on those before")
        with self.drawing_from(generator):
            if choose is None:
                return self.batch_of(self._draw(self._known_batch_size() if batch_size is None else batch_size))
            with self._guard.hold():
                index, info, rows = choose(self._storage)
                if isinstance(self._drawing, ExpandedDraws):
                    index, info = self._drawing.expanded(self._storage, index, info)
                    rows = self._read(index)
                elif rows is not None:
                    rows = self.with_past(index, rows)
                draw = self._with_info(index, info, rows=rows)
            return self.batch_of(draw)

    def check_draws(self, batch_size: int) -> None:
        """Draw the index of a batch and drop it: raises what the first batch would, before rows are read."""
        with self.drawing_from(torch.Generator()):
            self._draw(batch_size, with_rows=False)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the end of an epoch, or without end if the sampler has no epochs.

        A batch that cannot be made is the next one again: the iterator, or another one, continues with it.

        SchemaError (a RuntimeError) without a batch size, for a `DataLoader` with a batch size of its own, and in one
        of several workers of a `DataLoader` for a sampler with epochs: each would yield a whole epoch.
        """
        size = self._known_batch_size()
        if (fetcher := fetcher_asking(self)) is not None:
            worker = get_worker_info()
            check_use(self, 0 if worker is None else worker.num_workers, batches_again=fetcher.auto_collation)
            serve(fetcher)
        return _ReadEpoch(partial(self._deliver, size), ended=self._sampler.exhausted)

    def next(self) -> Any:
        """Return the next batch, without a device, or None once at the end of an epoch."""
        if self._ended:
            self._ended = False
            return None
        draw, batch = self._deliver(self._known_batch_size())
        self._ended = draw.last
        return batch.clear_device_() if is_tensor_collection(batch) else batch

    def _known_batch_size(self) -> int:
        if self._batch_size is None:
            raise SchemaError(
                "iteration needs a batch size, the buffer has none",
                hint="make the buffer with batch_size=…",
            )
        return self._batch_size

    # Looking up ------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Return elements by number, or an entry of all of them by key.

        An int returns one element; ints and slices return views, lists, tensors of numbers and masks new tensors,
        collated. All are transformed. Several indices in a tuple are those of the dimensions of `rb[:]`. With a
        `dim_extend` above 0, dimension 0 is the first one of the user's data. IndexError for elements that do not
        exist, MissingKeyError (a KeyError) for a missing entry.
        """
        if is_key(index):
            return entry(self[:], index)
        if isinstance(index, tuple) and len(index) != 1:
            return map_tensors(lambda value: value[index], self[:])
        found = self._looked_up(without_arrays(index))
        if self._collate_fn is not None and not is_single(index):
            found = self._collate_fn(found)
        if not self._transform.is_empty:
            if self._transform.draws:
                with self._sampling:
                    self.settle()
            found = self._transformed(found)
        return self._pinned(found) if self._pin_memory else found

    def _looked_up(self, index: Any) -> Any:
        if not self._dim_extend:
            return self._guard.read(self._read, index)
        whole = slice(None)
        rows = swap(self._storage.get(whole), self._dim_extend)
        if index == whole if isinstance(index, slice) else index is Ellipsis:
            return (
                rows
                if self._transform.is_empty
                else self._guard.read(lambda _: self.with_past(whole, rows, self._dim_extend), None)
            )
        index = index[0] if isinstance(index, tuple) else index

        def chosen(index: Any) -> Any:
            return self.with_past(index, map_tensors(lambda value: value[index], rows), self._dim_extend)

        return self._guard.read(chosen, index)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Return all elements in the order of their numbers, or those before `end`."""
        return self[:end]

    # Statistics -------------------------------------------------------------------------------------

    @property
    def write_count(self) -> int:
        """How many elements were written by `add` and `extend` in all, along the dimension that grows."""
        return self._writer.write_count

    def stats(self) -> dict[str, Any]:
        """Return size, write_count, prefetch_queue_size, initialized, capacity and utilization."""
        if not self.initialized:
            return {"size": 0, "write_count": 0, "prefetch_queue_size": 0, "initialized": False}
        size, capacity = len(self), self._storage.max_size
        return {
            "size": size,
            "write_count": self.write_count,
            "prefetch_queue_size": 0 if self._prefetcher is None else len(self._prefetcher),
            "initialized": True,
            "capacity": capacity,
            "utilization": size / capacity,
        }

    def __repr__(self) -> str:
        if not self.initialized:
            return f"{type(self).__name__}(initialized=False)"
        parts = {
            "storage": f"{type(self._storage).__name__}(len={len(self)}, max_size={self._storage.max_size})",
            "sampler": self._sampler,
            "writer": self._writer,
            "batch_size": self._batch_size,
        }
        return f"{type(self).__name__}({', '.join(f'{name}={part}' for name, part in parts.items())})"


def quiet() -> bool:
    """Whether warnings are disabled by TorchRL's variable `RL_WARNINGS=0`."""
    return os.environ.get("RL_WARNINGS", "1").lower() in {"0", "false", "no"}


def is_single(index: Any) -> bool:
    """Whether an index is that of one element, not of a batch."""
    if isinstance(index, tuple):
        index = index[0]
    return isinstance(index, int | np.integer) or getattr(index, "ndim", None) == 0


class _ReadEpoch(Iterator[Any]):
    """Yields batches until the last one of an epoch; one that failed may succeed with the next call."""

    def __init__(self, deliver: Callable[[], tuple[Draw, Any]], *, ended: bool) -> None:
        self._deliver = deliver
        self._ended = ended

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        draw, batch = self._deliver()
        self._ended = draw.last
        return batch
