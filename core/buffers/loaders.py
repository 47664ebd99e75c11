"""Buffers as the data set of torch's `DataLoader`: what a loader asks of them, and how batches leave its workers."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, default_convert

from ..errors import NoLengthError, SchemaError
from .parts import BufferParts
from .pieces import NestPiece
from .slots import Sent, SharedSlots

LINE = "DataLoader(buffer, batch_size=None)"
_FETCHERS = "torch.utils.data._utils.fetch"  # not imported: torch may move this module
_MAKER = "create_fetcher"
_COUNTING = DataLoader.__len__.__code__


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


def serve(fetcher: Any, slots: SharedSlots | None = None) -> None:
    """Make a loader without a function of its own yield batches unchanged; workers send them through the slots."""
    if fetcher.collate_fn is default_convert:  # it converts a tensordict like a dict, and fails
        fetcher.collate_fn = partial(_Message, slots=slots) if _sends_batches(sys._getframe(1)) else _as_it_is


def _sends_batches(caller: FrameType) -> bool:
    """Whether the fetcher that asks is that of a worker, not that of a loader which a worker uses itself."""
    frame: FrameType | None = caller
    while frame is not None and frame.f_globals.get("__name__") != _FETCHERS:
        frame = frame.f_back
    while frame is not None and (frame.f_globals.get("__name__") == _FETCHERS or frame.f_code.co_name == _MAKER):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_worker_loop"


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
            "a DataLoader cannot make batches of the batches of a buffer: they come from its sampler",
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


class _Message:
    """A batch on its way to another process; unpickled, it is the same batch.

    The tensors of a nest travel as one piece, of which they are views on arrival: in a slot, else in shared memory with
    one file descriptor. Anything else travels as torch sends it. All of it is pickled here: in the thread of the queue
    an error would only be printed, and the loader would wait for the batch without end.
    """

    def __init__(self, batch: Any, slots: SharedSlots | None = None) -> None:
        self.content: Sent | bytes | None = None
        piece = NestPiece.of(batch)
        self.document = _pickled(batch if piece is None else piece.layout)
        if piece is None:
            return
        claimed = None if slots is None else slots.claim(piece.size)
        if claimed is None:
            storage = torch.UntypedStorage._new_shared(piece.size)
            content = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type, unused-ignore]
            self.content = _pickled(content)
        else:
            content, self.content = claimed
        piece.write(content)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.document, self.content)


def _pickled(value: Any) -> bytes:
    return bytes(ForkingPickler.dumps(value))


def _arrived(document: bytes, content: Sent | bytes | None) -> Any:
    found = pickle.loads(document)  # safe, as below: from a worker of this program
    if content is None:
        return found
    return found.nest(pickle.loads(content) if isinstance(content, bytes) else content.received())
