"""Batches of one CUDA stream used in another: when they may be read, and when their memory may be used again.

Work of different streams is not ordered by itself, and memory of a freed tensor is given to later work of the stream
that it was allocated in: see "CUDA semantics" of PyTorch's documentation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .pytrees import map_tensors


class OnCallersStreams:
    """Makes batches in a thread as its caller would: on the caller's device, in the caller's stream of each device.

    A new thread has device 0 and the default streams, which wait for no stream of the caller: rows that the caller has
    just written in a stream of its own might be read before they are there.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._streams = _current_streams() if torch.cuda.is_initialized() else []

    def __call__(self, draw: Any) -> Any:
        """Make a batch, as a `StreamedBatch` if there is work left to do for it on a device."""
        with contextlib.ExitStack() as streams:
            for stream in self._streams:
                streams.enter_context(torch.cuda.stream(stream))
            batch = self._make(draw)
            return StreamedBatch.of(batch) if torch.cuda.is_initialized() else batch


def _current_streams() -> list[torch.cuda.Stream]:
    """Return the current stream of each device that has one of its own, that of the current device last.

    Devices with the default stream are left out: selecting it would start CUDA on devices that nobody uses.
    """
    here = torch.cuda.current_device()
    others = [number for number in range(torch.cuda.device_count()) if number != here]
    found = [torch.cuda.current_stream(number) for number in others]
    own = [one for number, one in zip(others, found, strict=True) if one != torch.cuda.default_stream(number)]
    return [*own, torch.cuda.current_stream(here)]


class StreamedBatch:
    """A batch that is complete once the streams that make it have come to an event."""

    def __init__(self, batch: Any, made: Mapping[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]]) -> None:
        self._batch, self._made = batch, made

    @classmethod
    def of(cls, batch: Any) -> Any:
        """Record an event in the current stream of each device of the batch; a batch of the CPU is returned as is."""
        streams = {device: torch.cuda.current_stream(device) for device in cuda_devices(batch)}
        made = {device: (stream, stream.record_event()) for device, stream in streams.items()}
        return cls(batch, made) if made else batch

    def received(self) -> Any:
        """Return the batch for work of the current streams."""
        for device, (stream, event) in self._made.items():
            current = torch.cuda.current_stream(device)
            if current != stream:
                arrived(self._batch, event, current, device)
        return self._batch


def cuda_devices(batch: Any) -> set[torch.device]:
    """Return the CUDA devices that tensors of a batch are on."""
    found: set[torch.device] = set()

    def noted(part: Any) -> Any:
        devices = [part.device]
        if not isinstance(part, torch.Tensor) and part.device is None:
            devices = [leaf.device for leaf in part.values(True, True)]
        found.update(device for device in devices if device.type == "cuda")
        return part

    map_tensors(noted, batch)
    return found


def arrived(batch: Any, event: torch.cuda.Event, current: torch.cuda.Stream, device: torch.device) -> Any:
    """Return a batch for work of a device's current stream, which first waits for the event.

    The memory of the batch is not given to work of the stream that it is from before that work is done.
    """
    current.wait_event(event)

    def used(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda and tensor.device == device:
            tensor.record_stream(current)
        return tensor

    each_tensor(used, batch)
    return batch


def each_tensor(function: Callable[[torch.Tensor], torch.Tensor], batch: Any, **options: Any) -> Any:
    """Apply a function to the tensors of a batch, also to those of tensordicts; `options` are those of their apply."""

    def applied(part: Any) -> Any:
        return function(part) if isinstance(part, torch.Tensor) else part.apply(function, **options)

    return map_tensors(applied, batch)
