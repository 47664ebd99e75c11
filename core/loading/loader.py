"""A `DataLoader` with a state: it resumes with any number of workers, and copies batches to a device ahead."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..buffers.draws import arrived, cuda_devices, each_tensor
from ..errors import UsageError, WorkerDiedError, keywords_of, require_keywords, require_number
from ..storages.lazy_tensor import available_device
from .torch_dataset import Feed, LoaderDataset

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class TorchLoader(DataLoader[Any]):
    """A `DataLoader` of a torch dataset or a stream, with a state, and with batches on a device.

    - `num_workers` and further options are as in `DataLoader`; the data set makes the batches, so that there is no
      `batch_size`, `shuffle` or `sampler`.
    - `state_dict()`: the state after the last batch that the loop took, even if workers have made more batches. A
      loader with any other number of workers, or a `TorchDataset`, continues from it at once; it includes the seed. A
      state taken after the last batch of an epoch, before the loop has ended, continues with a pass without batches.
      The state of a `StreamDataset` is for the same number of workers; a list of the states of all ranks is for any
      number of ranks and workers.
    - `device`, `prefetch`: where batches go, and how many are being copied there while one is used. To CUDA they are
      copied from pinned memory in a separate CUDA stream, so that copies and kernels overlap; with `prefetch=0` each
      batch is copied when it is requested.

    Every pass is the next epoch. A pass that was left early is not continued, except by loading its state. After an
    error the iterator continues with the batch that failed, from new workers. The death of a worker raises a
    RuntimeError: torch's, or WorkerDiedError if a batch was being sent.

    UsageError (a ValueError) for anything but a torch dataset or a stream, for options that the data set decides, for a
    negative `prefetch`, for a missing device, for workers if the rows are on CUDA, and for persistent workers if they
    would keep copies of rows that this process can write.

    >>> import rbtool
    >>> storage = rbtool.TensorStorage(torch.arange(10))
    >>> batches = rbtool.torch_dataset(rbtool.ReplayBuffer(storage=storage), 4, seed=0)
    >>> loader = TorchLoader(batches)
    >>> first = next(iter(loader))
    >>> state = loader.state_dict()
    >>> state["epoch"], state["batch"]
    (0, 1)
    """

    def __init__(
        self,
        dataset: LoaderDataset,
        *,
        num_workers: int = 0,
        device: torch.device | str | int | None = None,
        prefetch: int = 2,
        **options: Any,
    ) -> None:
        if not isinstance(dataset, LoaderDataset):
            raise UsageError(
                f"expected a torch dataset or a stream, found a {type(dataset).__name__}",
                hint="rbtool.torch_dataset(…)",
            )
        require_keywords(type(self).__name__, options, keywords_of(type(self)))
        if refused := [name for name in _OURS if options.get(name)]:
            raise UsageError(f"{refused[0]} is set, expected in torch_dataset(), which makes the batches")
        if not options.get("in_order", True):
            raise UsageError("in_order is False, expected True: the state counts batches in their order")
        require_number("prefetch", prefetch, 0)
        self._feed = dataset.feed(num_workers, persistent=bool(options.get("persistent_workers")))
        self.device = None if device is None else available_device(device)
        self.ahead = prefetch
        self._next: Any = None  # the place after the last batch that the loop took
        options = {name: value for name, value in options.items() if name not in _OURS}
        if self.device is not None and self.device.type == "cuda":
            # Without workers, `on_device` pins: torch's loader refuses batches with entries on a device.
            options["pin_memory"] = bool(options.get("pin_memory", True) and num_workers)
        super().__init__(
            self._feed.dataset, batch_size=None, sampler=self._feed.sampler, num_workers=num_workers, **options
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Start a pass, and yield its batches."""
        self._next = self._feed.begin()
        return _LoaderPass(self._feed, self._batches_from, self._took, self._failed, self._next)

    def _batches_from(self, place: Any) -> Iterator[Any]:
        """Start the workers, or make persistent ones start, at this place."""
        self._feed.start(place)
        batches = self._feed.received(super().__iter__())
        return batches if self.device is None else on_device(batches, self.device, self.ahead)

    def _took(self, following: Any) -> None:
        """Record the place after a batch that the loop took."""
        self._next = following

    def _failed(self, error: BaseException) -> None:
        """End the workers after a failure, since their batches are for an iterator that is no longer used."""
        self._iterator = None
        if self.num_workers:
            # The frames of the error refer to the iterator, whose workers end only when it is deleted. If new workers
            # were forked before that, each would inherit a copy, and wait 5 s for its queues when it ends.
            traceback.clear_frames(error.__traceback__)

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass with the first batch of `epoch`."""
        self._feed.dataset.set_epoch(epoch)
        self._next = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that the loop took: a few numbers and texts."""
        return self._feed.state(self._next or self._feed.next())

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Make the next pass continue from a state; for a stream also from a list of the states of all ranks.

        SchemaError (a RuntimeError), with nothing changed, for a state of other batches: of another dataset, batch
        size, sampler or rank.
        """
        self._feed.load(state_dict)
        self._next = self._iterator = None  # also ends persistent workers, which do not have the state


class _LoaderPass(Iterator[Any]):
    """Yields the batches of an epoch from `place` on; after a failure it continues with the failed batch."""

    def __init__(
        self,
        feed: Feed,
        batches_from: Callable[[Any], Iterator[Any]],
        took: Callable[[Any], None],
        failed: Callable[[BaseException], None],
        place: Any,
    ) -> None:
        self._feed = feed
        self._batches_from = batches_from
        self._took = took
        self._failed = failed
        self._place = place
        self._batches: Iterator[Any] | None = batches_from(place)
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        place = self._place
        try:
            if self._batches is None:
                self._batches = self._batches_from(place)
            batch = next(self._batches)
        except StopIteration:
            self._ended = True
            self._took(self._feed.next())
            raise
        except BaseException as error:
            self._batches = None
            self._failed(error)
            if isinstance(error, ConnectionError | EOFError):
                raise WorkerDiedError(
                    "a worker of the loader died before its batch arrived", hint="it may have run out of memory"
                ) from error
            raise
        self._place = self._feed.after(place)
        self._took(self._place)
        return batch


# Devices --------------------------------------------------------------------------------------------


def on_device(batches: Iterator[Any], device: torch.device, ahead: int) -> Iterator[Any]:
    """Yield batches on a device, with `ahead` further batches being copied there while one is used.

    On a CUDA device, copies run in a separate stream. Before a batch is yielded, the current stream is made to wait for
    its copy, and its memory is recorded as used by the current stream, so that no later copy reuses it before the
    kernels that read it have finished. Torch's allocator of pinned memory records copies in the same way. So the CPU
    never waits, and batches can be kept.
    """
    if device.type != "cuda":
        for batch in batches:
            yield each_tensor(lambda tensor: tensor.to(device), batch, device=device)
        return
    if device.index is None:  # fix the device, as the current one may change
        device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)
    queue: deque[tuple[Any, torch.cuda.Event]] = deque()
    for batch in batches:
        queue.append(_copied(batch, device, stream))
        if len(queue) > ahead:
            yield arrived(*queue.popleft(), torch.cuda.current_stream(device), device)
    while queue:
        yield arrived(*queue.popleft(), torch.cuda.current_stream(device), device)


def _copied(batch: Any, device: torch.device, stream: torch.cuda.Stream) -> tuple[Any, torch.cuda.Event]:
    """Start to copy a batch in a CUDA stream; return the copy, and the event that marks its end."""
    if device in cuda_devices(batch):  # the kernels that compute it may still run
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy = each_tensor(lambda tensor: _pinned(tensor).to(device, non_blocking=True), batch, device=device)
        return copy, stream.record_event()


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
