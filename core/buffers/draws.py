"""Draws of a sampler: their expansion by a sample unit, and the queue of draws whose batches threads make in advance.

Two rules of CUDA matter here (see "CUDA semantics" in PyTorch's documentation): work on different streams is not
ordered, and the memory of a freed tensor is reused by later work on the stream in which it was allocated.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..errors import SchemaError, UsageError
from ..samplers.base import Index, Sampler
from ..samplers.sample_units import SampleUnit, SampleUnitTypeError, Transition
from ..samplers.uniform import ConsumingSampler
from ..storages.base import Storage
from ..storages.dataset import StreamStorage
from ..torchrl_classes import described
from ..writers.base import Writer
from .pytrees import map_tensors


class OnCallersStreams:
    """Makes batches in a thread, on the device and in the CUDA streams of the thread that created this object.

    A new thread starts with device 0 and the default streams, which do not wait for other streams. Without this, it
    could read rows that the caller is still writing in a stream of its own.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._streams = _current_streams() if torch.cuda.is_initialized() else []

    def __call__(self, draw: Any) -> Any:
        """Make a batch; wrapped in a `StreamedBatch` if a device still has work to do for it."""
        with contextlib.ExitStack() as streams:
            for stream in self._streams:
                streams.enter_context(torch.cuda.stream(stream))
            batch = self._make(draw)
            return StreamedBatch.of(batch) if torch.cuda.is_initialized() else batch


def _current_streams() -> list[torch.cuda.Stream]:
    """Return the current streams of all devices where it is not the default stream; the current device comes last.

    Other devices on the default stream are left out, as selecting them would start CUDA on devices that nobody uses.
    """
    here = torch.cuda.current_device()
    others = [number for number in range(torch.cuda.device_count()) if number != here]
    found = [torch.cuda.current_stream(number) for number in others]
    own = [one for number, one in zip(others, found, strict=True) if one != torch.cuda.default_stream(number)]
    return [*own, torch.cuda.current_stream(here)]


class StreamedBatch:
    """A batch that is complete as soon as the CUDA streams that make it have reached their events."""

    def __init__(self, batch: Any, made: Mapping[torch.device, tuple[torch.cuda.Stream, torch.cuda.Event]]) -> None:
        self._batch, self._made = batch, made

    @classmethod
    def of(cls, batch: Any) -> Any:
        """Record an event in the current stream of each device of a batch; a batch on the CPU is returned unchanged."""
        streams = {device: torch.cuda.current_stream(device) for device in cuda_devices(batch)}
        made = {device: (stream, stream.record_event()) for device, stream in streams.items()}
        return cls(batch, made) if made else batch

    def received(self) -> Any:
        """Return the batch; later work of the current streams waits until it is complete."""
        for device, (stream, event) in self._made.items():
            current = torch.cuda.current_stream(device)
            if current != stream:
                arrived(self._batch, event, current, device)
        return self._batch


def cuda_devices(batch: Any) -> set[torch.device]:
    """Return the CUDA devices on which a batch has tensors."""
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
    """Make a device's current stream wait for `event`, and return the batch for use in that stream.

    The stream that made the batch does not reuse its memory before the work of the current stream on it is done.
    """
    current.wait_event(event)

    def used(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_cuda and tensor.device == device:
            tensor.record_stream(current)
        return tensor

    each_tensor(used, batch)
    return batch


def each_tensor(function: Callable[[torch.Tensor], torch.Tensor], batch: Any, **options: Any) -> Any:
    """Apply a function to all tensors of a batch, also in tensordicts, whose `apply` gets the `options`."""

    def applied(part: Any) -> Any:
        return function(part) if isinstance(part, torch.Tensor) else part.apply(function, **options)

    return map_tensors(applied, batch)


_WEIGHT, _REAL = "priority_weight", ("collector", "mask")


class ExpandedDraws:
    """Draws anchors with a sampler and expands them with a sample unit. A buffer uses it in place of the sampler.

    Rows are read together with the draw, so that no write can come between the computation of the windows and the read.
    """

    reads_rows: ClassVar[bool] = True

    def __init__(self, sampler: Sampler, unit: SampleUnit) -> None:
        self._sampler = sampler
        self._unit = unit

    @property
    def has_epochs(self) -> bool:
        """Whether the sampler draws in epochs."""
        return self._sampler.has_epochs

    @property
    def ran_out(self) -> bool:
        """Whether the last batch was the last of its epoch."""
        return self._sampler.ran_out

    def sample(self, storage: Storage, batch_size: int) -> tuple[Index, dict[Any, Any]]:
        """Draw anchors; return the index and info of all their rows."""
        return self.expanded(storage, *self._sampler.sample(storage, batch_size))

    def sample_rows(self, storage: Storage, batch_size: int) -> tuple[Index, dict[Any, Any], Any]:
        """Draw as `sample` does; the rows are None, so that the caller reads them."""
        return *self.sample(storage, batch_size), None

    def expanded(self, storage: Storage, index: Index, info: Mapping[Any, Any]) -> tuple[Index, dict[Any, Any]]:
        """Return the index and info of all rows that belong to the anchors.

        Raises:
            SampleUnitTypeError: (a TypeError) the unit did not return a pair of index and info.
        """
        if self._sampler.needs_order and self._unit.needs_order:
            index, info = _without_slices(index, info)
        found: Any = self._unit.expand(index, info, storage)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
            raise SampleUnitTypeError(f"{type(self._unit).__name__}.expand returned {found!r}, expected index and info")
        return found[0], dict(found[1])


def drawing_with(sampler: Sampler, unit: SampleUnit | None) -> Sampler | ExpandedDraws:
    """Return the object that draws for a buffer: the sampler itself, or `ExpandedDraws` if there is a sample unit."""
    return sampler if unit is None or type(unit) is Transition else ExpandedDraws(sampler, unit)


def checked_unit(unit: Any) -> SampleUnit | None:
    """Return a sample unit or None; SampleUnitTypeError (a TypeError) for anything else."""
    if unit is not None and not isinstance(unit, SampleUnit):
        raise SampleUnitTypeError(f"sample_unit is {described(unit, 'a SampleUnit such as Sequence(8)')}")
    return unit


def check_expansion(unit: SampleUnit | None, storage: Storage, sampler: Sampler, writer: Writer) -> None:
    """Raise UsageError or SchemaError if a unit cannot expand the elements of a buffer with these parts."""
    if unit is None or type(unit) is Transition:
        return
    name = type(unit).__name__
    if isinstance(storage, StreamStorage):
        raise SchemaError(
            f"a {name} needs the steps around a batch, which a stream does not keep",
            hint="use a StreamSliceSampler, or download the dataset and open it without streaming",
        )
    if unit.needs_order and not writer.keeps_order:
        raise UsageError(f"a {type(writer).__name__} puts rows anywhere, and a {name} needs them in order")
    if unit.needs_order and isinstance(sampler, ConsumingSampler):
        raise UsageError(f"the slots of consumed elements are written in any order, and a {name} needs rows in order")


def refuse_units(owner: str, units: Mapping[str, SampleUnit | None]) -> None:
    """Raise UsageError (a ValueError) if a member of an owner that draws single elements has a sample unit."""
    for where, unit in units.items():
        if unit is not None and type(unit) is not Transition:
            raise UsageError(
                f"{where} has the sample unit {unit!r}, and {owner} draws single elements",
                hint="use a SliceSampler in each member, or sample the members in turn",
            )


def _without_slices(index: Index, info: Mapping[Any, Any]) -> tuple[Index, dict[Any, Any]]:
    """Return the real steps of slices, and their info without the marks of slice ends, as windows end elsewhere."""
    parts = index if isinstance(index, tuple) else (index,)
    weight, real = info.get(_WEIGHT), info.get(_REAL)
    lead = parts[0].dim()
    kept = [part.reshape(-1) for part in parts]
    weight = None if weight is None else weight.flatten(0, lead - 1)
    if real is not None:
        real = real.reshape(-1)
        kept = [part[real] for part in kept]
        weight = None if weight is None else weight[real.to(weight.device)]
    return tuple(kept) if isinstance(index, tuple) else kept[0], {} if weight is None else {_WEIGHT: weight}


@dataclass(slots=True)
class Draw:
    """What a sampler drew for a batch.

    Attributes:
        index: the index of the elements, as `Sampler.draw` returns it.
        info: the sampler's info, and the index under `"index"`.
        last: whether the batch is the last one of an epoch.
        rows: the rows, if they were read with the draw; None if they are read later.
        written: the state of the write log at the draw.
        size: how many elements were requested; set for parts of another draw, and if the batch could not be made.
    """

    index: Any
    info: dict[Any, Any]
    last: bool = False
    rows: Any = field(default=None, compare=False, repr=False)
    parts: Sequence[tuple[int, Draw]] = ()
    """For an ensemble, the draws of its members."""
    chances: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """Random numbers, float64 `[n]` in [0, 1), for choices that are made only when the rows are read."""
    written: Any = field(default=None, compare=False, repr=False)
    size: int | None = field(default=None, compare=False, repr=False)


class Prefetcher:
    """A queue of draws whose batches are made by threads: up to `capacity` draws, and as many threads.

    No draw is added behind the last one of an epoch. Threads start with the first draw. A forked child has no threads,
    and makes the batches of the draws that it inherits when they are removed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._queue: deque[tuple[Draw, Future[Any] | None]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Draw]:
        return (draw for draw, _ in self._queue)

    @property
    def newest(self) -> Draw | None:
        """The last draw of the queue."""
        return self._queue[-1][0] if self._queue else None

    def push(self, draw: Draw, make: Callable[[Draw], Any] | None) -> None:
        """Queue a draw, whose batch a thread makes; if `make` is None, the caller makes it when the draw is removed."""
        if make is None:
            self._queue.append((draw, None))
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.capacity, thread_name_prefix="rbtool-prefetch")
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        self._queue.append((draw, self._pool.submit(OnCallersStreams(make), draw)))

    @property
    def oldest(self) -> tuple[Draw, Future[Any] | None]:
        """The first draw of the queue, and the future of its batch, or None if no thread makes the batch."""
        return self._queue[0]

    def pop(self) -> None:
        """Remove the oldest draw."""
        self._queue.popleft()

    def clear(self) -> None:
        """Empty the queue, and drop the batches in progress."""
        while self._queue:
            _, future = self._queue.popleft()
            if future is not None:
                future.cancel()

    def wait(self, drawing: contextlib.AbstractContextManager[Any], timeout: float | None = None) -> list[Future[Any]]:
        """Wait for the batches in progress, which stay in the queue, and return their futures."""
        with drawing:
            futures = [future for _, future in self._queue if future is not None]
        if waiting := wait(futures, timeout).not_done:
            raise TimeoutError(f"{len(waiting)} batches are still being made after {timeout} seconds")
        return futures

    def finish(self, drawing: contextlib.AbstractContextManager[Any], timeout: float | None) -> None:
        """Wait for the batches in progress, and end the threads; see `ReplayBuffer.shutdown`."""
        futures = self.wait(drawing, timeout)
        with drawing:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        for future in futures:
            future.result()

    def restore(self, draws: Iterable[Draw]) -> None:
        """Replace the queue by these draws, whose batches are made when they are removed."""
        self.clear()
        self._queue.extend((draw, None) for draw in draws)

    def after_fork(self) -> None:
        """Drop the threads, which belong to the parent process; keep the draws."""
        self._pool = None
        self._queue = deque((draw, None) for draw, _ in self._queue)
