"""Batches of one CUDA stream used in another: when they may be read, and when their memory may be used again.

Work of different streams is not ordered by itself, and memory of a freed tensor is given to later work of the stream
that it was allocated in: see "CUDA semantics" of PyTorch's documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .pytrees import map_tensors


class OnCallersStream:
    """Makes batches in a thread as its caller would: on the caller's device, in the caller's stream.

    A new thread has device 0 and its default stream, which waits for no stream of the caller: rows that the caller has
    just written in a stream of its own might be read before they are there.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._stream = torch.cuda.current_stream()

    def __call__(self, draw: Any) -> StreamedBatch:
        """Make a batch; what is left to do of it on the device is of that stream."""
        with torch.cuda.stream(self._stream):
            batch = self._make(draw)
            return StreamedBatch(batch, self._stream, self._stream.record_event())


class StreamedBatch:
    """A batch that is complete once its stream has come to an event."""

    def __init__(self, batch: Any, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        self._batch, self._stream, self._event = batch, stream, event

    def received(self) -> Any:
        """Return the batch for work of the current stream."""
        current = torch.cuda.current_stream(self._stream.device)
        return self._batch if current == self._stream else arrived(self._batch, self._event, current)


def arrived(batch: Any, event: torch.cuda.Event, current: torch.cuda.Stream) -> Any:
    """Return a batch for work of the current stream, which first waits for the event.

    The memory of the batch is not given to work of the stream that it is from before that work is done.
    """
    current.wait_event(event)

    def used(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda:
            tensor.record_stream(current)
        return tensor

    each_tensor(used, batch)
    return batch


def each_tensor(function: Callable[[torch.Tensor], torch.Tensor], batch: Any, **options: Any) -> Any:
    """Apply a function to the tensors of a batch, also to those of tensordicts; `options` are those of their apply."""

    def applied(part: Any) -> Any:
        return function(part) if isinstance(part, torch.Tensor) else part.apply(function, **options)

    return map_tensors(applied, batch)
