"""Streams as data sets of `torch.utils.data`: every worker, of every rank, has shards of its own."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..buffers.data_loader import SharedSlots, fetcher_asking, serve
from ..buffers.replay_buffer import ReplayBuffer
from ..errors import EmptyPartError, SchemaError, UsageError
from ..loading.torch_dataset import Passes, Retried, Start, check_number, refuse_batching, shard_of_process
from ..samplers.stream import Part, StreamSampler
from ..storages.dataset import StreamStorage


class StreamDataset(IterableDataset[Any]):
    """An `IterableDataset` of the batches of a stream, for `DataLoader(…, batch_size=None)`.

    The shards of an epoch are divided among the ranks, and the shards of a rank among its workers: together they draw
    every element once. The batches of one worker depend on the seed, the epoch, the number of workers and its own
    number alone. How many a rank gets depends on its shards: ranks can differ, and a worker without a shard has none.
    Every pass is the next epoch.

    - `buffer`: what `load_dataset(…, streaming=True)` returns, without `prefetch`; its sampler, batch size and
      transforms are taken.
    - `seed`: without one a fresh seed is drawn; ranks need the same one.
    - `rank`, `world_size`: as for `torch_dataset`.

    `state_dict()` is the place after the last batch that this process took, a few numbers; `load_state_dict` continues
    there with the next pass. torchdata's `StatefulDataLoader` has the state of all workers, and needs as many of them
    to continue. After the last batch of an epoch the pass that continues has no batch.

    UsageError (a ValueError) for another buffer, for one without a batch size, for ranks without a seed and for more
    ranks than there are shards; SchemaError (a RuntimeError) for a state of another part.
    """

    def __init__(
        self, buffer: ReplayBuffer, *, seed: int | None = None, rank: int | None = None, world_size: int | None = None
    ) -> None:
        sampler, storage = getattr(buffer, "sampler", None), getattr(buffer, "storage", None)
        if not isinstance(sampler, StreamSampler) or not isinstance(storage, StreamStorage):
            raise UsageError(
                f"expected a stream, found a {type(buffer).__name__}",
                hint="rbtool.load_dataset(…, streaming=True); rbtool.torch_dataset takes other buffers",
            )
        if buffer.batch_size is None:
            raise UsageError("no batch size is known", hint="load_dataset(…, batch_size=256, streaming=True)")
        sampler.check_batch_size(buffer.batch_size)
        if buffer.batches_ahead:
            raise UsageError("the stream has prefetch, expected none: workers make batches ahead", hint="leave it out")
        self.buffer = buffer
        self._sampler = sampler
        self._shards = storage.shards
        self._rank = shard_of_process(rank, world_size)
        if seed is None and self._rank.ranks > 1:
            raise UsageError(f"{self._rank.ranks} ranks have no seed in common", hint="seed=0")
        shards = len(storage.shards)
        if shards < self._rank.ranks:
            raise UsageError(f"there are {shards} shards for {self._rank.ranks} ranks, one each is needed")
        self.slots = SharedSlots()
        self.passes = Passes(secrets.randbits(63) if seed is None else seed)
        self._loaded: Mapping[str, Any] | None = None
        self._before: Mapping[str, Any] | None = None  # the place of a batch that is being made, or could not be
        self._entered = False

    def __iter__(self) -> Iterator[Any]:
        """Start a pass: yield the batches of an epoch, in a worker the batches of its shards."""
        if (fetcher := fetcher_asking(self)) is not None:
            if fetcher.auto_collation:
                refuse_batching()
            serve(fetcher, self.slots)
        loaded, self._loaded = self._loaded, None
        self._entered = True
        self.buffer.settle()  # in a worker it begins an epoch of its own
        if loaded is None:
            start = self.passes.enter()
            self._go_to(start)
            return self._pass()
        self._load(loaded)  # passes since may have been others
        return iter(()) if self._sampler.ran_out else self._pass()

    @property
    def _part(self) -> Part:
        """The part of all shards that this process reads; the part of a rank does not depend on its workers."""
        worker, rank = get_worker_info(), self._rank
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return Part(rank.rank + rank.ranks * number, rank.ranks * workers)

    def _pass(self) -> Iterator[Any]:
        batches = iter(self.buffer if self._sampler.part.number < len(self._shards) else ())
        return Retried(itertools.count, lambda _: self._next_of(batches))

    def _next_of(self, batches: Iterator[Any]) -> Any:
        self._before = self._sampler.state_dict()
        try:
            batch = next(batches, self)
        except EmptyPartError:  # before the first batch: no shard of this part has a step
            if self._sampler.part.of == 1:
                raise
            batch = self
        self._before = None
        if batch is self:
            raise StopIteration
        return batch

    def _go_to(self, start: Start) -> None:
        """Go to the beginning of an epoch."""
        self._forget()
        self._sampler.go_to(start.seed, start.epoch, self._part)

    def _forget(self) -> None:
        """Forget a batch that could not be made."""
        self._before = None
        self.buffer.forget_drawn()

    # State -------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass with the first batch of `epoch`."""
        check_number("the epoch", epoch, 0)
        self.passes.start_at(Start(self.passes.next.seed, epoch, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last batch of this process."""
        if get_worker_info() is None and self.passes.by_workers:
            raise SchemaError(
                "the workers of a loader are ahead of the training loop: which batches it took is not known here",
                hint="torchdata's StatefulDataLoader has the state of its workers",
            )
        if not self._entered and self._loaded is None:
            self._go_to(self.passes.next)
        return {"identity": self._shards.identity, **(self._before or self._sampler.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state with the next pass; SchemaError for a state of other data, or of another part."""
        self._load(state_dict)
        epoch = self._sampler.epoch + (not self._sampler.ran_out)
        self.passes.start_at(Start(int(state_dict["seed"]), epoch, 0), by_workers=get_worker_info() is not None)
        self._loaded = dict(state_dict)

    def _load(self, state: Mapping[str, Any]) -> None:
        if state.get("identity") != self._shards.identity:
            raise SchemaError(f"the state belongs to other data than {self._shards.address}")
        before = self._sampler.part
        self._sampler.part = self._part
        try:
            self._sampler.load_state_dict({name: value for name, value in state.items() if name != "identity"})
        except SchemaError:
            self._sampler.part = before
            raise
        self._forget()
