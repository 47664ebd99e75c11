"""Buffers as the data set of torch's `DataLoader`: what a loader asks of them, and how batches leave its workers."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, default_convert, get_worker_info

from ..errors import SchemaError, UsageError
from ..storages.pytree import TreeSpec, tree_spec_of
from .parts import BufferParts

LINE = "DataLoader(buffer, batch_size=None)"
_FETCHERS = "torch.utils.data._utils.fetch"  # not imported: torch may move this module
_COUNTING = DataLoader.__len__.__code__


class NoLengthError(UsageError, TypeError):
    """`len()` of a `DataLoader` or of its data set was called, and there are no epochs."""


# What a loader asks ---------------------------------------------------------------------------------


def fetcher_asking(dataset: object) -> Any:
    """Return the fetcher of a `DataLoader` that called a method of its data set; None if the caller is none.

    Only the frame of the call distinguishes a loader from a loop. Frames of the data set are skipped: a subclass may
    call the method of its parent.
    """
    frame: FrameType | None = sys._getframe(1)  # not a local of its own frame: that is a cycle, see `Reading.__len__`
    while frame is not None and frame.f_locals.get("self") is dataset:
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != _FETCHERS:
        return None
    return frame.f_locals.get("self")


def serve(fetcher: Any) -> None:
    """Make a loader without a function of its own yield batches unchanged; workers send them in one piece."""
    if fetcher.collate_fn is default_convert:  # it converts a tensordict like a dict, and fails
        fetcher.collate_fn = _as_it_is if get_worker_info() is None else in_one_piece


def loader_counting(dataset: object, caller: FrameType) -> DataLoader[Any] | None:
    """Return the `DataLoader` over a data set whose `len()` was called; None if the caller is none.

    Torch returns `len(dataset)`, which then has to be the number of batches.
    """
    frame: FrameType | None = caller
    while frame is not None and frame.f_code.co_name == "__len__":
        if frame.f_code is _COUNTING:
            loader: Any = frame.f_locals["self"]
            return loader if loader.dataset is dataset else None
        frame = frame.f_back
    return None


def number_of_batches(buffer: BufferParts, size: int, loader: DataLoader[Any]) -> int:
    """Return how many batches of `size` elements an epoch has.

    NoLengthError (a TypeError) for a sampler without epochs, SchemaError for a loader that cannot iterate.
    """
    check_use(buffer, loader.num_workers, batches_again=loader.batch_size is not None)
    found = buffer.sampler.epoch_batches(buffer.storage, size)
    if found is None:
        raise NoLengthError(f"a loader of a buffer with a {type(buffer.sampler).__name__} has no len(): it never ends")
    return found


def check_use(buffer: BufferParts, workers: int, *, batches_again: bool) -> None:
    """Raise SchemaError for a loader that would batch batches, or whose workers would each draw a whole epoch."""
    if batches_again:
        raise SchemaError(
            "a DataLoader was to make batches of the batches of a buffer, which come from its sampler",
            hint=f"give the buffer its batch_size, and write {LINE}",
        )
    if workers > 1 and buffer.sampler.has_epochs:
        raise SchemaError(
            f"each of {workers} workers would go through a whole epoch of the buffer",
            hint=f"write DataLoader(rbtool.torch_dataset(buffer), batch_size=None, num_workers={workers})",
        )


def _as_it_is(batch: Any) -> Any:
    return batch


# How batches leave workers --------------------------------------------------------------------------

_ALIGNMENT = 64
_Place: TypeAlias = tuple[int, torch.dtype, torch.Size]
"""Where a leaf is in the bytes of a batch."""


def in_one_piece(batch: Any) -> Any:
    """Return a batch of a worker in a form that becomes the same batch in the process that receives it.

    A tensordict of dense tensors is sent as one piece of shared memory, with one file descriptor, of which its leaves
    are views; anything else is returned as it is.
    """
    if type(batch) is not TensorDict:
        return batch
    structure = tree_spec_of(batch, batch.ndim)
    leaves = structure.flatten(batch)
    if not leaves or any(type(leaf) is not torch.Tensor or leaf.layout is not torch.strided for leaf in leaves):
        return batch
    return _Parcel(structure, leaves, batch.batch_size)


class _Parcel:
    """A batch on its way to another process."""

    def __init__(self, structure: TreeSpec, leaves: list[torch.Tensor], batch_size: torch.Size) -> None:
        places: list[_Place] = []
        end = 0
        for leaf in leaves:
            places.append((end, leaf.dtype, leaf.shape))
            end += -(-leaf.numel() * leaf.element_size() // _ALIGNMENT) * _ALIGNMENT
        self.content = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(end))  # type: ignore[arg-type, unused-ignore]
        for leaf, target in zip(leaves, _views(self.content, places), strict=True):
            target.copy_(leaf)
        self.description = structure, places, batch_size

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self.content, *self.description)


def _unpacked(content: torch.Tensor, structure: TreeSpec, places: list[_Place], batch_size: torch.Size) -> TensorDict:
    batch: TensorDict = structure.unflatten(iter(_views(content, places)), batch_size)
    return batch


def _views(content: torch.Tensor, places: list[_Place]) -> list[torch.Tensor]:
    found = []
    for start, dtype, shape in places:
        size = shape.numel() * dtype.itemsize
        found.append(content[start : start + size].view(dtype).view(shape))
    return found
