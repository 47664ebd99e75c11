"""Buffers as the data set of torch's `DataLoader`."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, default_convert, get_worker_info

from ..errors import SchemaError, UsageError

if TYPE_CHECKING:
    from .parts import BufferParts

__all__ = ["NoLengthError", "loader_asking", "loader_counting", "number_of_batches", "serve_loader"]

_LINE = "DataLoader(buffer, batch_size=None)"
_FETCHERS = "torch.utils.data._utils.fetch"  # named, not imported: a module that torch may move
_COUNTING = DataLoader.__len__.__code__


class NoLengthError(UsageError, TypeError):
    """The number of batches of a loader is asked for, and its sampler has no epochs."""


def loader_asking(buffer: BufferParts) -> Any:
    """Return the part of a `DataLoader` that iterates over a buffer; None if something else does.

    A loader calls `iter(dataset)` as a loop does; the frame of the call is the only sign of it that torch gives.
    Frames of the buffer are passed over: a subclass may call the `__iter__` of its parent.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_locals.get("self") is buffer:
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != _FETCHERS:
        return None
    return frame.f_locals.get("self")


def serve_loader(buffer: BufferParts, fetcher: Any) -> None:
    """Have a loader pass batches on as they are; SchemaError where it would make something else of them."""
    worker = get_worker_info()
    _check_use(buffer, 0 if worker is None else worker.num_workers, batches_again=fetcher.auto_collation)
    if fetcher.collate_fn is default_convert:
        fetcher.collate_fn = _as_it_is  # torch's own takes a tensordict for a dict, and fails


def loader_counting(buffer: BufferParts) -> DataLoader[Any] | None:
    """Return the `DataLoader` over a buffer that asks for its length; None if something else does.

    `len(loader)` is `len(dataset)` for torch, which has to be the number of batches that iteration yields.
    """
    frame: FrameType | None = sys._getframe(2)  # of the caller of `__len__`
    while frame is not None and frame.f_code.co_name == "__len__":
        if frame.f_code is _COUNTING:
            loader: Any = frame.f_locals["self"]
            return loader if loader.dataset is buffer else None
        frame = frame.f_back
    return None


def number_of_batches(buffer: BufferParts, size: int, loader: DataLoader[Any]) -> int:
    """Return how many batches of `size` elements an epoch has.

    NoLengthError (a TypeError) for a sampler without epochs, SchemaError for a loader that cannot iterate either.
    """
    _check_use(buffer, loader.num_workers, batches_again=loader.batch_size is not None)
    found = buffer.sampler.epoch_batches(buffer.storage, size)
    if found is None:
        raise NoLengthError(f"a loader of a buffer with a {type(buffer.sampler).__name__} has no len(): it never ends")
    return found


def _check_use(buffer: BufferParts, workers: int, *, batches_again: bool) -> None:
    if batches_again:
        raise SchemaError(
            "a DataLoader was to make batches of the batches of a buffer, which come from its sampler",
            hint=f"give the buffer its batch_size, and write {_LINE}",
        )
    if workers > 1 and buffer.sampler.has_epochs:
        raise SchemaError(
            f"each of {workers} workers would go through a whole epoch, one worker is expected",
            hint=f"write {_LINE[:-1]}, num_workers=1)",
        )


def _as_it_is(batch: Any) -> Any:
    return batch
