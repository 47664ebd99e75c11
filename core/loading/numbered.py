"""Batches by number: each depends on the seed, the epoch and its number alone.

So workers need no word of each other, and a stream continues from any batch at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..buffers.base import ReplayBuffer
from ..errors import SchemaError, UsageError
from ..samplers.base import Sampler
from ..samplers.ensemble import SamplerEnsemble
from ..samplers.uniform import EpochSampler, seed_of
from ..storages.base import Storage
from ..storages.ensemble import StorageEnsemble
from ..storages.write_log import Written
from ..writers.base import Writer
from ..writers.ensemble import WriterEnsemble
from .orders import KeyedOrder, Shard

_VERSION = 1


class NumberedBatches:
    """The batches of a buffer, by epoch and number.

    A sampler with epochs is given the elements of its epoch in a `KeyedOrder`, of which each rank of `shard` has its
    part. Any other draws each batch with a generator of its own; an epoch then has `batches` batches, or no end.

    UsageError (a ValueError) for a sampler whose batches depend on those before, or on priorities.
    """

    def __init__(
        self, buffer: ReplayBuffer, batch_size: int, *, seed: int, shard: Shard, batches: int | None, drop_last: bool
    ) -> None:
        self.buffer = buffer
        self.batch_size = batch_size
        self.seed = seed
        self.shard = shard
        self._epoch_sampler = epoch_sampler_of(buffer.sampler)
        if self._epoch_sampler is None and drop_last:
            raise UsageError(f"drop_last=True was given, and every batch of a {type(buffer.sampler).__name__} is whole")
        if self._epoch_sampler is not None and batches is not None:
            raise UsageError(
                f"batches={batches} was given, and a {type(buffer.sampler).__name__} has epochs of its own",
                hint="leave batches out, or take a sampler with replacement",
            )
        self._batches = batches
        self._drop_last = drop_last or (self._epoch_sampler is not None and self._epoch_sampler.drop_last)
        self._forget()

    def _forget(self) -> None:
        self._generator: torch.Generator | None = None
        self._order: tuple[tuple[int, int, int], KeyedOrder] | None = None
        self._epoch = -1
        self._size: tuple[int, int] | None = None
        self._written: Written | None = None

    # What an epoch has -------------------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Start a pass: the epoch is of the elements that there are now."""
        self._epoch, self._written = epoch, self.buffer.storage.log.now
        self._size = None if self._epoch_sampler is None else self._measured(self._epoch_sampler)

    def _measured(self, sampler: EpochSampler) -> tuple[int, int]:
        """Return how many elements an epoch has now, and how many a batch; SchemaError for too few."""
        size, each = sampler.epoch_size(self.buffer.storage, self.batch_size)
        least = self.shard.ranks * (each if self._drop_last else 1)
        if size < least:
            kind = "elements" if each == self.batch_size else "trajectories of the length of a slice"
            raise SchemaError(f"there are {size} {kind}, at least {least} are needed for a batch on each rank")
        return size, each

    def count(self) -> int | None:
        """Return how many batches an epoch of this rank has; None for one without end."""
        if self._epoch_sampler is None:
            return self._batches
        return self.shard.batches(*self._measured(self._epoch_sampler), drop_last=self._drop_last)

    @property
    def copied(self) -> bool:
        """Whether workers have a copy of rows that this process can write."""
        return _copied(self.buffer.writer, self.buffer.storage)

    # Batches -----------------------------------------------------------------------------------------

    def make(self, epoch: int, number: int) -> Any:
        """Return a batch of this rank."""
        if self._generator is None:
            self._generator = torch.Generator()
        generator = self._generator
        generator.manual_seed(seed_of(self.seed, epoch, number * self.shard.ranks + self.shard.rank, 1))
        if epoch != self._epoch:
            self.begin(epoch)
        sampler = self._epoch_sampler
        if sampler is None or self._size is None:
            return self.buffer.sample_with(generator, self.batch_size)
        if self.buffer.storage.log.now != self._written:
            raise SchemaError("rows were written to the buffer during an epoch, whose elements are chosen at its start")
        size, each = self._size
        places = self.shard.places(size, each, number, drop_last=self._drop_last)
        numbers = self._order_of(epoch, size).at(places) if getattr(sampler, "shuffle", True) else places
        return self.buffer.sample_with(
            generator, choose=lambda storage: sampler.draw_numbered(storage, numbers, self.batch_size)
        )

    def _order_of(self, epoch: int, size: int) -> KeyedOrder:
        key = self.seed, epoch, size
        if self._order is None or self._order[0] != key:
            self._order = key, KeyedOrder(size, seed_of(self.seed, epoch, 0))
        return self._order[1]

    # State -------------------------------------------------------------------------------------------

    def state(self, epoch: int, batch: int) -> dict[str, Any]:
        """Return the state of a stream whose next batch is this one: numbers and texts."""
        return {"version": _VERSION, "seed": self.seed, "epoch": epoch, "batch": batch, **self._described()}

    def _described(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "rank": self.shard.rank,
            "world_size": self.shard.ranks,
            "sampler": type(self.buffer.sampler).__name__,
            "size": None if self._epoch_sampler is None else self._measured(self._epoch_sampler)[0],
            "batches": self.count(),
            "content": getattr(self.buffer.storage, "content_digest", None),
        }

    def take_over(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Take over the seed of a state; return its epoch and batch.

        SchemaError (a RuntimeError), with nothing changed, for a state of other batches.
        """
        missing = {"version", "seed", "epoch", "batch"} - set(state)
        if missing or state["version"] != _VERSION:
            raise SchemaError(f"the state of a torch dataset is expected, found {', '.join(map(str, state)) or 'none'}")
        for name, value in self._described().items():
            if name in state and state[name] != value:
                raise SchemaError(f"the state has {name}={state[name]!r}, this dataset {name}={value!r}")
        self.seed = int(state["seed"])
        return int(state["epoch"]), int(state["batch"])

    def __getstate__(self) -> dict[str, Any]:
        left_out = {"_generator", "_order", "_epoch", "_size", "_written"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def epoch_sampler_of(sampler: Sampler) -> EpochSampler | None:
    """Return the sampler if it draws in epochs whose elements can be numbered, None if it has no epochs.

    UsageError (a ValueError) for one whose batches depend on those before, or on priorities.
    """
    name = type(sampler).__name__
    if isinstance(sampler, SamplerEnsemble):
        for number, member in enumerate(sampler.members):
            if epoch_sampler_of(member) is not None:
                raise UsageError(
                    f"member {number} has a {type(member).__name__}, whose batches in an ensemble depend on those "
                    "before",
                    hint="give it a sampler with replacement",
                )
        return None
    if sampler.takes_priorities:
        raise UsageError(
            f"a {name} draws by priorities of the training process, which loader workers do not see",
            hint="sample the buffer in the training process: for batch in buffer",
        )
    if isinstance(sampler, EpochSampler) and _defines(sampler, "draw_numbered", "draw"):
        return sampler
    kind = type(sampler)
    if sampler.has_epochs or kind.save_state is not Sampler.save_state or kind.state_dict is not Sampler.state_dict:
        raise UsageError(
            f"the batches of a {name} depend on those before, so that workers cannot divide them",
            hint="take a SamplerWithoutReplacement, a SliceSamplerWithoutReplacement or a sampler with replacement",
        )
    return None


def _copied(writer: Writer, storage: Storage) -> bool:
    if isinstance(writer, WriterEnsemble) and isinstance(storage, StorageEnsemble):
        return any(map(_copied, writer.members, storage.members))
    return writer.writes and not storage.shared


def _defines(sampler: Sampler, method: str, other: str) -> bool:
    """Whether a class defines a method together with, or after, another one that a subclass may have replaced."""
    classes = type(sampler).__mro__
    return (
        next(cls for cls in classes if method in vars(cls))
        in classes[: 1 + classes.index(next(cls for cls in classes if other in vars(cls)))]
    )
