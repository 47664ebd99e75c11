"""Buffers as the data set of torch's `DataLoader`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_convert, get_worker_info

from ..errors import SchemaError

if TYPE_CHECKING:
    from .parts import BufferParts

__all__ = ["loader_asking", "serve_loader"]

_LINE = "DataLoader(buffer, batch_size=None)"
_FETCHERS = "torch.utils.data._utils.fetch"  # named, not imported: a module that torch may move


def loader_asking() -> Any:
    """Return the part of a `DataLoader` that calls the caller of this function; None if something else does.

    A loader calls `iter(dataset)` as a loop does; the frame of the call is the only sign of it that torch gives.
    """
    frame = sys._getframe(2)
    return frame.f_locals.get("self") if frame.f_globals.get("__name__") == _FETCHERS else None


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
