"""Buffers as the data set of torch's `DataLoader`."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_convert, get_worker_info

from ..errors import SchemaError

if TYPE_CHECKING:
    from .parts import BufferParts

__all__ = ["loader_asking", "serve_loader"]

_LINE = "DataLoader(buffer, batch_size=None)"
_FETCHERS = "torch.utils.data._utils.fetch"  # named, not imported: a module that torch may move


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
    if fetcher.auto_collation:
        raise SchemaError(
            "a DataLoader was to make batches of the batches of a buffer, which come from its sampler",
            hint=f"give the buffer its batch_size, and write {_LINE}",
        )
    worker = get_worker_info()
    if worker is not None and worker.num_workers > 1 and buffer.sampler.has_epochs:
        raise SchemaError(
            f"each of {worker.num_workers} workers would go through a whole epoch, one worker is expected",
            hint=f"write {_LINE[:-1]}, num_workers=1)",
        )
    if fetcher.collate_fn is default_convert:
        fetcher.collate_fn = _as_it_is  # torch's own takes a tensordict for a dict, and fails


def _as_it_is(batch: Any) -> Any:
    return batch
