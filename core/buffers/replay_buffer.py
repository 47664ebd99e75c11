"""The replay buffer: a storage, a sampler, a writer and transforms that work as one.

    extend(data) ─► transform.inv ─► writer: which rows ─► storage: write ─► sampler: notified
    sample(n)    ─► sampler: which rows ─► storage: read ─► collate ─► transform ─► pin ─► batch

A batch is made in three steps. The sampler draws an index, always in the caller's thread, so that the elements drawn do
not depend on the timing of threads. The storage reads the rows without locking out writers: a read is repeated if a
write overlapped with it (see `Guard`). Collation, transforms and pinning then turn rows into a batch. With `prefetch`,
threads do the last two steps in advance.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch.utils.data import IterableDataset, get_worker_info

from .. import checkpointers as _checkpointers  # noqa: F401  # importing it registers the default checkpointers
from ..declarations import from_leaf
from ..engine.ray_cluster import imported_ray
from ..errors import (
    FormatError,
    RbtoolError,
    SchemaError,
    UnsupportedError,
    UsageError,
    WrongKindError,
    keywords_of,
    quiet,
    require_flags,
    require_number,
    unknown_keyword,
    warn_caller,
)
from ..format.syncing import Durable
from ..options import PathLike
from ..samplers.base import Index, Sampler
from ..samplers.sample_units import ANCHOR, SampleUnit
from ..samplers.steps_around import Ages, MemoryPool, StepsAround, StreamAges
from ..samplers.trajectories import StrictBoundaries, TableFinder
from ..samplers.uniform import ConsumedTypeError, ConsumingSampler, RandomSampler, checked_sample_count
from ..storages.base import Storage
from ..storages.columns import fill
from ..storages.cursors import as_index, row_numbers
from ..storages.dataset import StreamStorage
from ..storages.list_storage import ListStorage
from ..storages.write_log import Written
from ..ted.schema import as_key
from ..torchrl_classes import Rebased, counterpart, described
from ..transforms.base import Compose, as_transform, with_flags
from ..writers.base import Writer, batch_length
from ..writers.round_robin import RoundRobinWriter
from .checkpoint import (
    BackgroundDump,
    BufferFolder,
    SavedParts,
    claimed,
    in_background,
    load_folder,
    refuse_home_of,
    staged_buffer,
)
from .data_loader import check_use, fetcher_asking, loader_counting, number_of_batches, serve
from .draws import Draw, ExpandedDraws, Prefetcher, StreamedBatch, check_expansion, checked_unit, drawing_with
from .editing import WHOLE, ConditionalUpdateResult, EntryKey, edit_entries, flat_entries, replace_entry, update_present
from .processes import Guard, HoldAll, Place, SharedGuard, branch, call_at_fork, place, reseed, stand_in
from .pytrees import (
    checked_batch_size,
    default_collate,
    entry,
    is_key,
    is_single,
    map_tensors,
    stack_elements,
    swap,
    without_arrays,
)
from .trajectories import Trajectory, TrajectoryPredicate, stored_trajectories

_Found = TypeVar("_Found")


@counterpart
class ReplayBuffer(Rebased):
    """Keeps elements in a storage and returns batches of them.

    The writer chooses the rows of new elements, the sampler the rows of each batch. Names, arguments and documented
    behaviour are TorchRL's; all arguments are keywords.

    Args:
        storage: a `Storage`, or a callable that makes one; default `ListStorage(1_000)`.
        sampler: a `Sampler`, or a callable that makes one; default `RandomSampler()`.
        sample_unit: a `SampleUnit` that expands each drawn element: `Sequence(8)` gives 8 steps of its episode.
        writer: a `Writer`, or a callable that makes one; default `RoundRobinWriter()`.
        collate_fn: a function that makes a batch of the rows that the storage returns. By default elements of a list
            storage are stacked; other storages return batches already.
        pin_memory: whether batches are put in page-locked memory, for fast copies to an accelerator. Entries on a
            device stay there. Workers of a `DataLoader` do not pin; the loader does it, if it has `pin_memory=True`.
        prefetch: how many batches are prepared ahead, in as many threads. It needs `batch_size`, and does not change
            which elements are drawn.
        transform: a `Transform` of rbtool or TorchRL, a module or any callable. It is applied to batches, and its
            `inv`, if it has one, to data that is written.
        transform_factory: a function that makes the transform when it is first needed, instead of `transform`.
        batch_size: how many elements `sample()` and iteration return.
        consume_after_n_samples: after how many draws an element is used up and its slot may be written again; see
            `ConsumingSampler`. `len(buffer)` then counts the elements that can still be sampled.
        dim_extend: the dimension of the user's data along which a storage of several dimensions grows, by default the
            last one. The storage keeps it as dimension 0.
        checkpointer: the object that saves and loads the storage; default the one registered for the storage's class.
        generator: the random generator of storage, sampler, writer and transforms; default torch's global one.
        shared: whether several processes write at the same time. If not, any number of processes may read, and forked
            or spawned children may continue the same ring one after the other.
        compilable: whether the default writer counts in plain ints, which other processes do not see.
        delayed_init: whether the parts are made only when one of them is first needed; by default only with
            `transform_factory`.
        service_backend: `"direct"`, the default: the buffer is in this process. `"ray"` makes a `RayReplayBuffer` whose
            actor has a buffer of this class and these arguments.
        service_backend_options: with `"ray"`, a dict with `ray_init_config` and `remote_config`, as for that class.
        transport, transport_options: how data is sent to the buffer: `"auto"` or the name of the backend, and no
            options.
        use_ray_service: True is the older form of `service_backend="ray"`, with a FutureWarning.

    Raises:
        UsageError: (a ValueError) arguments contradict each other.
        WrongKindError: (a TypeError) a part has the wrong type.

    `sample` and indexing with lists or tensors of numbers never return half-written rows, in any thread or process.
    Indexing with an int or a slice returns a view, in which later writes become visible.

    `DataLoader(buffer, batch_size=None)` yields the batches that the buffer's sampler draws. Each worker has its own
    random stream: with a `generator`, one derived from it and the worker's number; without, the worker's
    `torch.initial_seed()`. Copies of a buffer in other processes draw the same batches only if a generator was given.

    >>> import torch
    >>> from rbtool import LazyTensorStorage
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    >>> buffer.extend(torch.arange(10))
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> buffer.sample().shape, len(buffer)
    (torch.Size([4]), 10)
    """

    _storage: Storage
    _sampler: Sampler
    _drawing: Sampler | ExpandedDraws
    """The sampler, or with a `sample_unit` the `ExpandedDraws` around it."""
    _writer: Writer
    _transform: Compose
    _guard: Guard
    _prefetcher: Prefetcher | None
    _undelivered: list[Draw]
    """Draws whose batches could not be made, oldest first; they are delivered next."""
    _rng: torch.Generator | None
    _recipe: dict[str, Any] | None
    _unshared: bool
    """Whether several processes may write, but the rows are not in shared memory yet."""
    _cut_off: bool
    """Whether this process is a forked child that has only a private copy of the rows of a shared buffer."""
    unseeded = False
    """Whether the user gave no seed for the generator, so that copies in other processes have to draw other samples."""
    _place: Place
    """The process that drew the last batch, or in which the generator was set."""
    _sampling: threading.RLock
    """Held during each draw, and each change of the sampler."""
    _seen: Written | None = None
    """The state of the write log when a sampler that reads rows last drew under the lock."""
    _copies = 0
    """The number of copies of this buffer that were made for other processes."""
    _revision = 0
    _ended = False
    _closed = False
    _failed: BaseException | None = None
    """The error of an update that was submitted, until `synchronize` raises it."""
    carries_info: ClassVar[bool] = False
    """Whether batches carry the sampler's info as entries."""
    draws_apart: ClassVar[bool] = False
    """Whether its draws hold more than the sampler's index and info, such as random numbers for new goals."""
    _reads_by_index: ClassVar[bool] = True
    """Whether the rows of a draw are simply `storage.get(index)`."""
    _label: ClassVar[str | None] = None
    """The entry in which the writer stores row numbers; assigning data without it keeps them."""

    def __init__(
        self,
        *,
        storage: Any = None,
        sampler: Any = None,
        sample_unit: SampleUnit | None = None,
        writer: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        transform_factory: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        dim_extend: int | None = None,
        checkpointer: Any = None,
        generator: torch.Generator | None = None,
        shared: bool = False,
        compilable: bool | None = None,
        delayed_init: bool | None = None,
        **newer: Any,
    ) -> None:
        require_flags(pin_memory=pin_memory, shared=shared)
        require_flags(compilable=compilable or False, delayed_init=delayed_init or False)
        self._sample_unit = checked_unit(sample_unit)
        self._consumed_after = newer.pop(_CONSUME, None)
        _check_deployment(type(self), newer)
        self._check_arguments(prefetch, batch_size, dim_extend, shared, transform, transform_factory)
        self._batch_size = batch_size
        self._pin_memory = pin_memory
        self._adopt(generator)
        self._compilable = bool(compilable)
        self._prefetcher = Prefetcher(prefetch) if prefetch else None
        self._undelivered = []
        self._guard: Guard = SharedGuard() if shared else Guard()
        self._sampling = threading.RLock()
        self._ended = False
        self._unshared = False
        self._cut_off = False
        self._history = _History()
        self._recipe: dict[str, Any] | None = {
            "storage": storage,
            "sampler": sampler,
            "writer": writer,
            "collate_fn": collate_fn,
            "transform": transform,
            "transform_factory": transform_factory,
            "dim_extend": dim_extend,
            "checkpointer": checkpointer,
        }
        call_at_fork(self, self._before_fork, self._after_fork)
        if not (transform_factory is not None if delayed_init is None else delayed_init):
            self._build()

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        if options.get("service_backend") == "ray" or options.get("use_ray_service"):
            made: Self = from_leaf("deployed_on_ray")(cls, arguments, options)
            return made
        return super().__new__(cls)

    @staticmethod
    def _check_arguments(
        prefetch: int | None,
        batch_size: int | None,
        dim_extend: int | None,
        shared: bool,
        transform: Any,
        transform_factory: Any,
    ) -> None:
        checked_batch_size(batch_size)
        if prefetch is not None:
            require_number("prefetch", prefetch, 0, "batches")
        if prefetch and batch_size is None:
            raise UsageError("prefetch needs a batch_size: it says how large the batches prepared ahead are")
        if prefetch and shared:
            raise UsageError(
                "prefetch and shared exclude each other: the threads of prefetch do not exist in other processes"
            )
        if dim_extend is not None:
            require_number("dim_extend", dim_extend, 0)
        if transform is not None and transform_factory is not None:
            raise WrongKindError("transform and transform_factory are both set: give one of them")

    def folder_notes(self) -> dict[str, Any]:
        """Return notes about this buffer for a checkpoint, besides the state of its parts."""
        return {}

    # Making the parts ------------------------------------------------------------------------------

    def _build(self) -> None:
        with self._sampling:
            recipe = self._recipe
            if recipe is None:
                return
            storage: Storage = _made(recipe["storage"], Storage, "storage", lambda: ListStorage(1_000))
            sampler: Sampler = _made(recipe["sampler"], Sampler, "sampler", lambda: self._default_sampler(storage))
            writer: Writer = _made(recipe["writer"], Writer, "writer", self._default_writer)
            factory = recipe["transform_factory"]
            transform = _composed(factory() if factory is not None else recipe["transform"])
            dim_extend = _checked_dim(recipe["dim_extend"], storage)
            sampler = _consuming(self._consumed_after, sampler)
            self._check_parts(storage, sampler, writer)
            writer.register_storage(storage)
            if recipe["checkpointer"] is not None:
                storage.checkpointer = recipe["checkpointer"]
            self._recipe = None
            self._storage, self._sampler, self._writer, self._transform = storage, sampler, writer, transform
            self._collate_fn = recipe["collate_fn"] or default_collate(storage)
            self._dim_extend = dim_extend
            self._given_dim = recipe["dim_extend"] is not None
            self._connect()
            self._introduce()
            if self.shared:
                transform.share_memory_()
                self._share_rows()

    def __getattr__(self, name: str) -> Any:
        # Python calls this for missing attributes only; the parts are missing until they are made.
        if name in _LATE and self.__dict__.get("_recipe") is not None:
            self._build()
            return getattr(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _default_writer(self) -> Writer:
        return RoundRobinWriter(compilable=self._compilable)

    def _default_sampler(self, storage: Storage) -> Sampler:
        return RandomSampler()

    def _check_parts(self, storage: Storage, sampler: Sampler, writer: Writer) -> None:
        """Raise UsageError or SchemaError, before anything is changed, if the parts do not fit together."""
        if sampler.needs_order and not writer.keeps_order:
            raise UsageError(
                f"a {type(writer).__name__} puts rows anywhere, and a {type(sampler).__name__} needs them in order",
                hint="take a RoundRobinWriter, or make whole trajectories the elements",
            )
        sampler.check_storage(storage)
        check_expansion(self._sample_unit, storage, sampler, writer)
        if isinstance(sampler, ConsumingSampler):
            _check_consumption(writer, prefetches=self._prefetcher is not None, shared=self.shared)
        if getattr(sampler, "drop_last", False) and self._batch_size is None:
            raise UsageError("a sampler with drop_last=True needs a buffer with a batch_size")

    def _connect(self) -> None:
        """Subscribe to the storage's changes, and set the generator of all parts."""
        sampler, self._seen = self._sampler, None
        self._drawing = drawing_with(sampler, self._sample_unit)
        self._revision += 1
        self._listener = _Listener(self)
        if sampler.follows_updates:
            self._storage.attach(self._listener)
        self._notify_sampler = sampler.follows_writes and not sampler.writes_are_updates
        self._write_error = sampler.write_error(self._storage)
        sampler.on_share(self._storage if self.shared else None)
        if isinstance(self._writer, RoundRobinWriter):
            self._writer.reuse = sampler.freed if isinstance(sampler, ConsumingSampler) else None
        self._set_generators(self._rng)

    def _introduce(self) -> None:
        """Attach the storage to the sampler; if the sampler follows writes, report the stored elements as written."""
        self._sampler.on_attach(self._storage)
        if not (self._notify_sampler and self._storage.has_rows):
            return
        coordinates = [torch.arange(size) for size in self._storage.shape]
        self._sampler.extend(coordinates[0] if len(coordinates) == 1 else torch.cartesian_prod(*coordinates))

    # The parts -------------------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """Whether the parts have been made; False only with `delayed_init`."""
        return self._recipe is None

    @property
    def storage(self) -> Storage:
        """The storage that keeps the elements."""
        return self._storage

    @property
    def sampler(self) -> Sampler:
        """The sampler that draws the indices of batches."""
        return self._sampler

    @property
    def sample_unit(self) -> SampleUnit | None:
        """The unit that expands drawn elements; None if batches consist of the drawn elements."""
        return self._sample_unit

    @property
    def writer(self) -> Writer:
        """The writer that chooses the rows of new elements."""
        return self._writer

    @property
    def transform(self) -> Compose:
        """The transforms of batches and written data; empty if there are none."""
        return self._transform

    @property
    def collate_fn(self) -> Callable[[Any], Any] | None:
        """The function that makes a batch of the storage's rows; None if the storage returns batches."""
        return self._collate_fn

    @property
    def rows_are_batches(self) -> bool:
        """Whether a batch is the storage's rows unchanged, apart from transforms and the sampler's info."""
        return self._collate_fn is None and not self._pin_memory

    @property
    def batch_size(self) -> int | None:
        """How many elements `sample()` returns by default."""
        return self._batch_size

    @property
    def dim_extend(self) -> int:
        """The dimension along which `extend` grows the storage; it can be set once, before anything is written."""
        return self._dim_extend

    @dim_extend.setter
    def dim_extend(self, dim: int) -> None:
        checked = _checked_dim(dim, self._storage)
        if checked != self._dim_extend and (self._given_dim or self._storage.has_rows):
            raise SchemaError(f"dim_extend is {self._dim_extend} already, and cannot become {dim}")
        self._dim_extend, self._given_dim = checked, True

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> Storage:
        """Replace the storage, and return the previous one. Writes continue behind the rows of the new one."""
        storage = _made(storage, Storage, "storage")
        with self._guard, self._sampling:
            dim = self._dim_extend if self._given_dim else None
            dim_extend = _checked_dim(dim, storage)
            self._check_parts(storage, self._sampler, self._writer)
            self._writer.register_storage(storage)
            previous, self._storage = self._storage, storage
            previous.detach(self._listener)
            previous.generator = previous.journal = None
            self._dim_extend = dim_extend
            self._collate_fn = collate_fn or default_collate(storage)
            self._sampler.empty()
            self.forget_drawn()
            self._connect()
            self._introduce()
            if self.shared:
                self._share_rows()
        return previous

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Replace the sampler, and return the previous one."""
        sampler = _made(sampler, Sampler, "sampler")
        self._check_parts(self._storage, sampler, self._writer)
        with self._guard.hold(), self._sampling:
            previous, self._sampler = self._sampler, sampler
            previous.generator = None
            self.forget_drawn()
            self._connect_again()
            self._introduce()
        return previous

    def set_writer(self, writer: Writer) -> Writer:
        """Replace the writer, and return the previous one, whose cursor and count the new one takes over."""
        writer = _made(writer, Writer, "writer")
        self._check_parts(self._storage, self._sampler, writer)
        with self._guard.hold(), self._sampling:
            writer.register_storage(self._storage)
            previous, self._writer = self._writer, writer
            previous.generator = None
            rings = all(part.keeps_order and part.writes for part in (writer, previous))
            if rings and not writer.write_count:
                writer.cursor, writer.write_count = previous.cursor, previous.write_count
            writer.sync_cursor()
            self._connect_again()
            if self.shared:
                self._share_rows()
        return previous

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Set the generator of all parts."""
        self._adopt(generator)
        self.draw_from(generator)

    def draw_from(self, generator: torch.Generator | None) -> None:
        """Set the generator of all parts, which may be shared with another buffer.

        In contrast to `set_rng`, this does not mark the generator as set in this process.
        """
        self._rng = generator
        with self._sampling:
            self._set_generators(generator)

    def append_transform(self, transform: Any, *, invert: bool = False) -> Any:
        """Add a transform after the others.

        Args:
            transform: anything that the argument `transform` of the class accepts.
            invert: whether to exchange its two directions, so that it changes written data instead of batches.

        Returns:
            This buffer.

        Raises:
            SchemaError: (a RuntimeError) the buffer is shared and the transform has state that changes with every write
                and cannot be shared. Nothing is changed.
        """
        require_flags(invert=invert)
        with self._sampling:
            self._transform.append(as_transform(transform, invert=invert))
            self._transform_changed()
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Any:
        """Insert a transform before the one at position `index`; otherwise like `append_transform`."""
        require_flags(invert=invert)
        with self._sampling:
            self._transform.insert(index, as_transform(transform, invert=invert))
            self._transform_changed()
        return self

    def _transform_changed(self) -> None:
        self._transform.set_rng(self._rng)
        if self._prefetcher is not None:
            self._prefetcher.restore(list(self._prefetcher))  # batches made with the old transform are made again

    def _connect_again(self) -> None:
        self._storage.detach(self._listener)
        self._connect()

    def forget_drawn(self) -> None:
        self._ended, self._undelivered = False, []
        if self._prefetcher is not None:
            self._prefetcher.clear()

    def mark_update(self, index: Any) -> None:
        """Report changed elements to the sampler. A prioritized sampler gives them the default priority.

        Args:
            index: any index accepted by `rb[index] = …`, or coordinates, int64 `[n, ndim]`.
        """
        storage, index = self._storage, without_arrays(index)
        if isinstance(index, torch.Tensor) and index.dim() == 2 and 1 < storage.ndim == index.shape[1]:
            index = index.unbind(-1)  # coordinates as writers return them, which a storage would take for rows
        with self._sampling:
            self._sampler.mark_update(index, storage=storage)

    # Drawing and making batches -----------------------------------------------------------------------
    # If the batch of a draw cannot be made, because reading fails or is interrupted, the draw is kept. The next call
    # for the same number of elements delivers it, so that no element of an epoch is lost.

    def _deliver(self, size: int, out: Any = None) -> tuple[Draw, Any]:
        """Return the next draw of this size and its batch; with `out`, the batch is copied there."""
        draw: Draw | None = None
        future: Future[Any] | None = None
        with self._sampling:
            self.settle()
            kept = self._undelivered  # `forget_drawn` replaces this list: after it, a failed draw is not kept
            if not kept and self._prefetcher is None and not self._drawing.reads_rows:
                draw = self._draw(size)
        if draw is None:
            draw, future = self._next_draw(size)
        try:
            if future is None:
                return draw, self.batch_of(draw) if out is None else self._filled(out, draw)
            made = future.result()
            rows = made.received() if isinstance(made, StreamedBatch) else made
            batch = self._changed(rows, draw) if self._transform.draws else rows
            return draw, batch if out is None else fill(out, batch, self._storage.may_hold)
        except BaseException:
            if not (self._sampler.has_epochs or draw.parts):  # drop older ones, whose size may never be needed again
                kept.clear()
            draw.size = size
            kept.append(draw)
            raise

    def _next_draw(self, size: int) -> tuple[Draw, Future[Any] | None]:
        """Return the next draw, with the future of its batch if a thread makes it."""
        if self._undelivered and (draw := self._kept(size)) is not None:
            return draw, None
        prefetcher = self._prefetcher
        if prefetcher is None or size != self._batch_size:
            return self._draw(size), None
        with self._rows_stay(), self._sampling:
            make = self._rows_of if self._transform.draws else self.batch_of
            while True:
                newest = prefetcher.newest
                # Draw one more than the capacity, because the oldest is removed only after all draws have succeeded.
                while newest is None or (len(prefetcher) <= prefetcher.capacity and not newest.last):
                    newest = self._draw_ahead(prefetcher, size, make)
                draw, future = prefetcher.oldest
                valid = future is not None or self.restored(draw)
                prefetcher.pop()
                if valid:
                    return draw, future

    def _draw_ahead(self, prefetcher: Prefetcher, size: int, make: Callable[[Draw], Any]) -> Draw:
        """Draw once more, and have a thread make the batch."""
        waiting = len(self._undelivered)
        try:
            draw = self._draw(size)
        except BaseException:
            for kept in self._undelivered[waiting:]:  # a draw that was kept on failure comes after those in the queue
                kept.size = None
                prefetcher.push(kept, None)
            del self._undelivered[waiting:]
            raise
        prefetcher.push(draw, make)
        return draw

    def _rows_stay(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that excludes writers if the sampler reads rows. Enter it before taking `_sampling`.

        Writers take the guard first and then `_sampling`, to notify the sampler; the other order could deadlock.
        """
        return self._guard.hold() if self._drawing.reads_rows else contextlib.nullcontext()

    def _kept(self, size: int, *, or_fewer: bool = False) -> Draw | None:
        """Remove and return a draw of this size whose batch was not made; None if there is none."""
        with self._rows_stay(), self._sampling:
            place = 0
            while place < len(self._undelivered):
                draw = self._undelivered[place]
                if draw.size != size and not (or_fewer and draw.size is not None and draw.size < size):
                    place += 1
                    continue
                valid = self.restored(draw)  # if this fails, the draw stays where it is
                del self._undelivered[place]
                if valid:
                    return draw
        return None

    def restored(self, draw: Draw) -> bool:
        """Read the rows of an interrupted draw again, as a transform may have changed them.

        Returns:
            False if the rows have been overwritten since the draw.
        """
        if draw.written is None or self._sampler.rows_come_once:
            return True
        with self._guard.hold():
            storage, index = self._storage, draw.index
            rows = index[0] if isinstance(index, tuple) else index
            if not storage.log.left_alone(rows, draw.written, storage.capacity_rows):
                return False
            draw.rows = self.with_past(index, None)
            return True

    def draw(self, size: int, *, with_rows: bool = True, or_fewer: bool = False) -> Draw:
        """Draw the index of a batch, to be passed to `batch_of`; batches prepared ahead are not touched.

        Args:
            size: how many elements to draw.
            with_rows: whether a sampler that reads rows returns them with the draw. If False, the caller excludes
                writers and reads the rows itself.
            or_fewer: whether a draw that was passed to `keep` may be returned even if it has fewer elements. Draws that
                were kept are returned first.
        """
        with self._sampling:
            self.settle()
        if self._undelivered and self._sampler.has_epochs:
            draw = self._kept(size, or_fewer=or_fewer)
            if draw is not None:
                return draw
        return self._draw(size, with_rows)

    def keep(self, draw: Draw, size: int) -> None:
        """Keep a draw whose batch was not made, if the sampler has epochs and would not draw its elements again."""
        if self._sampler.has_epochs:
            with self._sampling:
                draw.size = size
                self._undelivered.append(draw)

    def _draw(self, size: int, with_rows: bool = True) -> Draw:
        """Draw an index; if the sampler reads rows, together with the rows as of the same instant."""
        storage, sampler = self._storage, self._drawing
        if sampler.reads_rows and with_rows:
            return self._undisturbed(size) or self._locked(size)
        with self._sampling:
            index, found = sampler.sample(storage, size)
            last = sampler.has_epochs and sampler.ran_out
            written = storage.log.now if sampler.reads_rows else None
        return self._with_info(index, found, last, None, written)

    def _with_info(
        self, index: Any, found: Mapping[Any, Any], last: bool = False, rows: Any = None, written: Written | None = None
    ) -> Draw:
        """Make a `Draw` of an index and the sampler's info."""
        storage = self._storage
        info = dict(found)
        info["index"] = index
        if self._writer.tracks_generations:
            info["index_generation"] = self._writer.generations_of(index)
        device = getattr(storage, "device", None)
        if device is not None and device != _CPU and torch.device(device).type != "cpu":
            info = {key: map_tensors(lambda value: value.to(device), value) for key, value in info.items()}
        return Draw(index, info, bool(last), rows, written=written)

    def _locked(self, size: int) -> Draw:
        storage, sampler = self._storage, self._drawing
        with self._guard.hold(), self._sampling:
            index, found, rows = sampler.sample_rows(storage, size)
            last, self._seen = sampler.has_epochs and sampler.ran_out, storage.log.now
            try:
                return self._with_info(index, found, last, self.with_past(index, rows), self._seen)
            except BaseException:
                self.keep(self._with_info(index, found, last, None, self._seen), size)
                raise

    def _undisturbed(self, size: int) -> Draw | None:
        """Draw and read rows without the lock, so that processes do not wait for each other.

        This is safe if nothing was written since the last draw, because what the sampler has derived from the rows is
        then up to date. Samplers whose draws must not be repeated, such as those with epochs, are excluded.

        Returns:
            The draw; None if this is not safe, or if a write interfered.
        """
        sampler, storage, guard, seen = self._drawing, self._storage, self._guard, self._seen
        if (
            not self.shared
            or sampler.has_epochs
            or self._sampler.draws_once
            or (before := guard.sequence) & 1
            or storage.log.now != seen
        ):
            return None
        try:
            with self._sampling:
                index, found, rows = sampler.sample_rows(storage, size)
                rows = self.with_past(index, rows)
        except Exception:
            if guard.sequence == before:
                raise
            return None
        return self._with_info(index, found, False, rows, seen) if guard.sequence == before else None

    def _rows_of(self, draw: Draw, collate: Callable[[Any], Any] | None = None) -> Any:
        rows = self._drawn_rows(draw)
        collate = collate or self._collate_fn
        return rows if collate is None else collate(rows)

    def _drawn_rows(self, draw: Draw) -> Any:
        """Return the rows of a draw, before they are collated."""
        if draw.rows is None:
            return self._guard.read(self._read, draw.index)
        if self._sampler.rows_come_once and not self.returns_rows:
            return map_tensors(lambda value: value.clone(), draw.rows)  # the originals are needed for a retry
        return draw.rows

    def _read(self, index: Any) -> Any:
        """Read rows, and the steps around them if transforms look back; the caller's guard makes this consistent."""
        return self._storage.get(index) if self._transform.is_empty else self.with_past(index, None)

    @property
    def _looking_back(self) -> list[Any]:
        """The transforms that need the steps around a batch's steps, and are therefore applied while rows are read."""
        return self._transform.looking_back

    def with_past(self, index: Any, rows: Any, dim_extend: int = 0) -> Any:
        """Apply the transforms that look back to rows that were just read; if `rows` is None, read them now.

        The caller excludes writers, or repeats the call if one interfered.
        """
        if self._transform.is_empty or not (transforms := self._looking_back):
            return self._storage.get(index) if rows is None else rows
        return self._history.complete(transforms, self._storage, index, rows, dim_extend)

    def batch_of(self, draw: Draw, collate: Callable[[Any], Any] | None = None) -> Any:
        """Make the batch of a draw as `sample` does; `collate`, if given, replaces the buffer's collate function."""
        if draw.rows is None and collate is None and self._reads_by_index and self.returns_rows:
            return self._completed(self._guard.read(self._storage.get, draw.index), draw)
        return self._changed(self._rows_of(draw, collate), draw)

    def _filled(self, out: Any, draw: Draw) -> Any:
        """Make the batch of a draw in the memory of `out`, without an intermediate copy if it is just stored rows."""
        storage, added = self._storage, draw.info if self.carries_info else {}
        plain = draw.rows is None and self._reads_by_index and self.returns_rows
        plain = plain and (not added or getattr(out, "batch_dims", 0) == 1)  # else info is repeated in the others
        if plain and all(type(value) is torch.Tensor for value in added.values()):
            return self._guard.read(lambda index: storage.read_into(out, index, added), draw.index)
        return fill(out, self.batch_of(draw), storage.may_hold)

    @property
    def returns_rows(self) -> bool:
        """Whether batches are the storage's rows unchanged, apart from the sampler's info."""
        return self.rows_are_batches and self._transform.is_empty

    def _changed(self, rows: Any, draw: Draw) -> Any:
        """Turn collated rows into a batch: apply transforms, add the info, pin."""
        transform = self._transform
        if not transform.is_empty and (self.carries_info or transform.crosses_steps):
            rows = with_flags(rows, draw.info, windows=transform.crosses_steps)
        batch = self._completed(self._transformed(rows), draw)
        return self._pinned(batch) if self._pin_memory else batch

    def _completed(self, batch: Any, draw: Draw) -> Any:
        """Add the info to a batch; the default returns it unchanged."""
        return batch

    def _transformed(self, rows: Any) -> Any:
        transform = self._transform
        if transform.is_empty:
            return rows
        if self._storage.returns_objects:  # transforms may set entries of the objects that they get
            rows = map_tensors(lambda part: part if isinstance(part, torch.Tensor) else part.copy(), rows)
        done = len(self._looking_back)
        if done:
            return transform(rows, done)
        if is_tensor_collection(rows) and rows.is_locked:
            with rows.unlock_():
                return transform(rows)
        return transform(rows)

    def _pinned(self, batch: Any) -> Any:
        if get_worker_info() is not None:  # the loader's process gets a copy, which would not be pinned
            return batch
        if not torch.accelerator.is_available():
            warn_caller("pin_memory=True has no effect: there is no accelerator to copy to")
            return batch
        return map_tensors(_pin, batch)

    def __len__(self) -> int:
        """Return the number of elements; for a call by a `DataLoader` over this buffer, the batches of an epoch."""
        # Start with the caller's frame: this function's own frame in a local variable would be a reference cycle, which
        # keeps all objects of the callers alive until the garbage collector runs.
        caller = sys._getframe(1)
        if caller.f_code.co_name == "__len__" and (loader := loader_counting(self, caller)) is not None:
            return number_of_batches(self._sampler, self._storage, self._known_batch_size(), loader)
        return self._sampler.elements(self._storage)

    # Sampling --------------------------------------------------------------------------------------

    @overload
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True], out: Any = None
    ) -> tuple[Any, dict[Any, Any]]: ...

    @overload
    def sample(self, batch_size: int | None = None, return_info: bool = False, *, out: Any = None) -> Any: ...

    def sample(self, batch_size: int | None = None, return_info: bool = False, *, out: Any = None) -> Any:
        """Draw a batch.

        Args:
            batch_size: how many elements to draw; default the buffer's batch size. Another size gives a warning, and
                bypasses batches prepared ahead.
            return_info: whether to return a pair `(batch, info)`. `info["index"]` is the index of the elements: int64
                `[batch_size]`, or a tuple with one such tensor for each dimension of the storage. All of `info` is on
                the storage's device.
            out: a batch of an earlier call with the same number of elements, into whose memory the new batch is copied.

        Returns:
            The batch, or `(batch, info)`.

        Raises:
            SchemaError: (a RuntimeError) the batch size is unknown, or the storage is empty. Also if `out` differs in
                entries, element types, shapes or devices, or has tensors that are not contiguous, require gradients, or
                share memory with stored rows or with each other; `out` is then unchanged, and the next call for the
                same number of elements returns the batch that was drawn.
        """
        require_flags(return_info=return_info)
        size = self._size_of(batch_size)
        if batch_size is not None and self._batch_size not in (None, batch_size) and not quiet():
            warn_caller(f"a batch of {batch_size} is drawn, the buffer's batch_size is {self._batch_size}")
        draw, batch = self._deliver(size, out)
        return (batch, draw.info) if return_info else batch

    def _size_of(self, batch_size: int | None) -> int:
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise SchemaError("sample() needs a batch size", hint="pass batch_size to sample() or to the buffer")
        return size

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether there are enough elements for `sample(batch_size)`; nothing is drawn.

        Use it in loops that wait for data: for slices, a few elements may not be enough.

        Raises:
            SchemaError: (a RuntimeError) the batch size is unknown.
        """
        size = self._size_of(batch_size)
        with self.paused():
            return self.sampler.can_sample(self.storage, size)

    def sample_with(
        self,
        generator: torch.Generator,
        batch_size: int | None = None,
        *,
        choose: Callable[[Storage], tuple[Index, Mapping[Any, Any], Any]] | None = None,
    ) -> Any:
        """Draw a batch with another generator; equal generator states give equal batches, in any process.

        The buffer's own random stream, its epoch and the batches prepared ahead are not affected.

        Args:
            generator: the source of random numbers; it advances.
            batch_size: how many elements to draw; default the buffer's batch size.
            choose: a function to use instead of the sampler. `choose(storage)` returns index, info and rows; if the
                rows are None, they are read.

        Raises:
            SchemaError: (a RuntimeError) the sampler has epochs, so that its batches depend on earlier ones, and
                `choose` is not given.
        """
        if choose is None and self._sampler.has_epochs:
            raise SchemaError(f"a {type(self._sampler).__name__} draws in epochs: its batches depend on those before")
        with self.drawing_from(generator):
            if choose is None:
                return self.batch_of(self._draw(self._known_batch_size() if batch_size is None else batch_size))
            with self._guard.hold():
                index, info, rows = choose(self._storage)
                if isinstance(self._drawing, ExpandedDraws):
                    index, info = self._drawing.expanded(self._storage, index, info)
                    rows = self._read(index)
                elif rows is not None:
                    rows = self.with_past(index, rows)
                draw = self._with_info(index, info, rows=rows)
            return self.batch_of(draw)

    def check_draws(self, batch_size: int) -> None:
        """Draw an index and discard it, to raise the errors of the first batch before any rows are read."""
        with self.drawing_from(torch.Generator()):
            self._draw(batch_size, with_rows=False)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the end of an epoch, or without end if the sampler has no epochs.

        If a batch cannot be made, this iterator, or the next one, tries the same batch again.

        Raises:
            SchemaError: (a RuntimeError) the buffer has no batch size; a `DataLoader` has a batch size of its own; or
                several workers of a `DataLoader` iterate over a sampler with epochs, and would each yield a whole
                epoch.
        """
        size = self._known_batch_size()
        if (fetcher := fetcher_asking(self)) is not None:
            worker = get_worker_info()
            check_use(self._sampler, 0 if worker is None else worker.num_workers, batches_again=fetcher.auto_collation)
            serve(fetcher)
        return _ReadEpoch(partial(self._deliver, size), ended=self._sampler.exhausted)

    def next(self) -> Any:
        """Return the next batch, without its device; None once after the last batch of each epoch."""
        if self._ended:
            self._ended = False
            return None
        draw, batch = self._deliver(self._known_batch_size())
        self._ended = draw.last
        return batch.clear_device_() if is_tensor_collection(batch) else batch

    def _known_batch_size(self) -> int:
        if self._batch_size is None:
            raise SchemaError(
                "iteration needs a buffer with a batch_size",
                hint="make the buffer with batch_size=…",
            )
        return self._batch_size

    # Looking up ------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Return elements by number, or one entry of all elements by key.

        Args:
            index: an int (one element), a slice, a list, a tensor of numbers, a mask, or the key of an entry. A tuple
                of indices addresses the dimensions of `rb[:]`. With a `dim_extend` above 0, dimension 0 is the first
                one of the user's data.

        Returns:
            The elements, collated and transformed. Their tensors are views for ints and slices, otherwise new.

        Raises:
            IndexError: an element does not exist.
            MissingKeyError: (a KeyError) an entry does not exist.
        """
        if is_key(index):
            return entry(self[:], index)
        if isinstance(index, tuple) and len(index) != 1:
            return map_tensors(lambda value: value[index], self[:])
        found = self._looked_up(without_arrays(index))
        if self._collate_fn is not None and not is_single(index):
            found = self._collate_fn(found)
        if not self._transform.is_empty:
            if self._transform.draws:
                with self._sampling:
                    self.settle()
            found = self._transformed(found)
        return self._pinned(found) if self._pin_memory else found

    def _looked_up(self, index: Any) -> Any:
        if not self._dim_extend:
            return self._guard.read(self._read, index)
        whole = slice(None)
        rows = swap(self._storage.get(whole), self._dim_extend)
        if index == whole if isinstance(index, slice) else index is Ellipsis:
            return (
                rows
                if self._transform.is_empty
                else self._guard.read(lambda _: self.with_past(whole, rows, self._dim_extend), None)
            )
        index = index[0] if isinstance(index, tuple) else index

        def chosen(index: Any) -> Any:
            return self.with_past(index, map_tensors(lambda value: value[index], rows), self._dim_extend)

        return self._guard.read(chosen, index)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Return all elements in the order of their numbers; with `end`, those before it."""
        return self[:end]

    # Statistics -------------------------------------------------------------------------------------

    @property
    def write_count(self) -> int:
        """How many elements `add` and `extend` have written in total, along the dimension that grows."""
        return self._writer.write_count

    def stats(self) -> dict[str, Any]:
        """Return size, write_count, prefetch_queue_size, initialized, capacity and utilization.

        This does not make the parts of a buffer with `delayed_init`; if its storage has yet to be made, capacity and
        utilization are left out.
        """
        recipe = self._recipe
        storage = self._storage if recipe is None else recipe["storage"]
        there = isinstance(storage, Storage)
        size = len(self) if recipe is None else len(storage) if there else 0
        return {
            "size": size,
            "write_count": self.write_count if recipe is None else 0,
            "prefetch_queue_size": 0 if self._prefetcher is None else len(self._prefetcher),
            "initialized": recipe is None,
            **({"capacity": storage.max_size, "utilization": size / storage.max_size} if there else {}),
        }

    def __repr__(self) -> str:
        if not self.initialized:
            return f"{type(self).__name__}(initialized=False)"
        return f"{type(self).__name__}({', '.join(f'{name}={part}' for name, part in self._shown().items())})"

    def _shown(self) -> dict[str, Any]:
        """Return the parts and arguments of an initialised buffer that `repr` shows, by name."""
        return {
            "storage": self._storage,
            "sampler": self._sampler,
            "writer": self._writer,
            "batch_size": self._batch_size,
        }

    # Writing ------------------------------------------------------------------------------------------
    # A write that fails changes nothing, and the caller's data is never changed.

    def add(self, data: Any) -> Any:
        """Write one element.

        Args:
            data: the element. A transform gets a tensordict with a trailing dimension of size 1.

        Returns:
            Its index: an int, or int64 `[k, ndim]` for a storage of several dimensions. If the transform returns None,
            nothing is written, and the index is empty, `[0, ndim]`.

        Raises:
            SchemaError: (a RuntimeError) the data does not fit the storage.
        """
        return self._write_one(data).index

    def _write_one(self, data: Any) -> WriteResult:
        storage = self._storage
        if not self._transform.is_empty:
            with self._held_again_on_failure():
                if not is_tensor_collection(data):
                    return self._write(self._transform.inv(data), single=True)
                changed = self._transform.inv(data.unsqueeze(-1))
                single = changed is not None and changed.ndim == data.ndim + 1 and changed.shape[-1] == 1
                return self._write(changed.squeeze(-1) if single else changed, single=single)
        if storage.ndim == 1 and _has_batch(data) and not quiet():
            warn_caller(
                f"a tensordict of batch size {list(data.batch_size)} is added as one element; "
                "extend() writes its rows one by one"
            )
        return WriteResult(data, self._put(True, self._writer.add, data))

    def _write(self, data: Any, *, single: bool = False) -> WriteResult:
        """Write an element or a batch; nothing if the transforms returned None."""
        if data is None:
            return WriteResult(None, torch.empty((0, self._storage.ndim), dtype=torch.int64))
        if single:
            return WriteResult(data, self._put(True, self._writer.add, data))
        dim = self._dim_extend
        return WriteResult(data, self._put(False, self._writer.extend, swap(data, dim) if dim else data), dim)

    def _put(self, single: bool, write: Callable[..., Any], *data: Any) -> Any:
        """Call a method of the writer, and notify the sampler; return the index, or None if nothing was written."""
        with self._guard:
            if self._unshared:
                self._share_rows()
            if self._write_error is not None:
                raise self._write_error.with_traceback(None)
            index = write(*data)
            if self._unshared:
                self._share_rows()
            if self._notify_sampler and index is not None:
                with self._sampling:
                    (self._sampler.add if single else self._sampler.extend)(index)
        return index

    def extend(self, data: Any, *, update_priority: bool | None = None) -> torch.Tensor:
        """Write a batch of elements. If it is longer than the capacity, only its last elements are kept.

        Args:
            data: a tensor, tensordict or tensorclass, which is a batch along its first dimension (along `dim_extend`
                for a storage of several dimensions); a list of elements; or a nest of tuples and dicts whose leaves
                share their first dimension.
            update_priority: only for buffers of tensordicts.

        Returns:
            The indices, int64 `[n]`, or `[n, ndim]` for a storage of several dimensions. If a transform returns None,
            nothing is written, and the index is empty, `[0, ndim]`.

        Raises:
            SchemaError: (a RuntimeError) the batch is empty or does not fit the storage. Nothing is changed.
            UnsupportedError: (a NotImplementedError) `update_priority` is given.
        """
        if update_priority is not None:
            raise UnsupportedError(
                f"update_priority is set, but a {type(self).__name__} does not know which entry holds priorities",
                hint="take a TensorDictReplayBuffer, or call update_priority()",
            )
        index: torch.Tensor = self._write_batch(data).index
        return index

    def _write_batch(self, data: Any) -> WriteResult:
        if data is not None and self._transform.is_empty:
            return self._write(data)
        with self._held_again_on_failure():
            return self._write(self._inward(data, self._transform.inv))

    def flush(self) -> torch.Tensor:
        """Write the data that transforms such as `MultiStepTransform` hold back; return indices as `extend` does."""
        index: torch.Tensor = self._write_held().index
        return index

    def _write_held(self) -> WriteResult:
        with self._held_again_on_failure():
            return self._write(self._transform.flush())

    @contextlib.contextmanager
    def _held_again_on_failure(self) -> Iterator[None]:
        """If the context fails, give the transforms back the data that they held; if they hold any, exclude writers.

        Otherwise two threads could both write the held data, or a checkpoint could miss data that is neither held
        anymore nor written yet.
        """
        holds = bool(self._transform.held_back())
        with self._guard.hold() if holds else contextlib.nullcontext():
            held = self._transform.held_back()
            try:
                yield
            except BaseException:
                self._transform.hold_back(held)
                raise

    # Priorities and emptying -----------------------------------------------------------------------

    def update_priority(self, index: Any, priority: Any) -> None:
        """Set the priorities of elements. A sampler without priorities warns.

        Args:
            index: an int, int64 `[n]` or `[n, ndim]`, or a tuple with one tensor for each dimension.
            priority: one number for all elements, or one for each; gradients are dropped.

        Raises:
            WrongKindError: (a TypeError) index or priorities are not numbers.
            UsageError: (a ValueError) a priority is negative or not finite.
            SchemaError: (a RuntimeError) the number of priorities does not match the index. Nothing is changed by any
                of these.
        """
        if isinstance(index, slice | str) or index is None or index is Ellipsis or is_tensor_collection(index):
            raise WrongKindError(f"priorities are set by the numbers of elements, found a {type(index).__name__}")
        with self._sampling:
            self._sampler.update_priority(without_arrays(index), _numbers(priority), storage=self._storage)

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all elements and reset sampler and writer; the memory is kept.

        Args:
            empty_write_count: whether `write_count` starts again from 0.

        Raises:
            SchemaError: (a RuntimeError) the storage is a dataset that does not allow writing. Nothing is changed.
        """
        with self._guard, self._sampling:
            self._writer.empty(empty_write_count)
            self._sampler.empty()
            self._storage.empty()
            self._transform.hold_back(None)
            self.forget_drawn()

    # Editing ----------------------------------------------------------------------------------------

    def __setitem__(self, index: Any, data: Any) -> None:
        """Replace stored elements, by number, or one entry of all elements, by key.

        Elements pass through the transforms on the way in, except through those that hold data back, such as
        `MultiStepTransform`. Entries are stored as they are.

        Args:
            index: as for reading; a tuple of indices addresses the dimensions of `rb[:]`.
            data: the new elements. Data without the leading dimensions of the selection is repeated along them, as in
                `rb[0:2] = rb[0]`; dimensions of size 1 are not expanded. For a list storage, only a tensor or
                tensordict without rows is repeated. If the storage is in memory, the data may have new entries, which
                are zero in all other elements, and `rb[key]` may be a new entry. A tensor storage keeps a new entry
                until elements are written without it.

        Raises:
            IndexError: an element does not exist.
            SchemaError: (a RuntimeError) the data does not fit the stored data.
            MissingKeyError: (a KeyError) the entry is unknown and cannot be added.
        """
        if is_key(index):
            with self._guard:
                replace_entry(self._storage, index, data, self._dim_extend)
            return
        if (data := self._inward(data, self._transform.inv_in_place)) is None:
            return
        with self._guard:
            storage, index = self._storage, without_arrays(index)
            if self._dim_extend and self._names_all(index) and not storage.lacks_dimensions(data):
                index, data = slice(0, storage.shape[0]), swap(data, self._dim_extend)
            elif self._dim_extend or (isinstance(index, tuple) and len(index) > 1):
                storage.set_cells(index, data, dim=self._dim_extend, label=self._label)
                return
            places = self._places(index)
            storage[places] = self._complete(storage.repeated(places, data), places)

    def _inward(self, data: Any, through: Callable[[Any], Any]) -> Any:
        """Apply a method of the transforms to data, or to a shallow copy of a tensordict."""
        if data is None:
            raise SchemaError("there is no data to write, found None: did a function forget to return it?")
        if self._transform.is_empty:
            return data
        return through(data.copy() if isinstance(data, TensorDictBase) else data)

    def _names_all(self, index: Any) -> bool:
        """Return whether an index selects all elements along dimension 0 of the user's data."""
        size = self._storage.shape[self._dim_extend]
        return index is Ellipsis or (isinstance(index, slice) and range(size)[index] == range(size))

    def _complete(self, data: Any, places: Any) -> Any:
        """Add the stored row numbers of the replaced elements to data that lacks them."""
        if self._label is not None and is_tensor_collection(data) and data.get(self._label, None) is None:
            rows = places.reshape(-1) if isinstance(places, torch.Tensor) and places.dim() > 1 else places
            labels = self._storage.entry((self._label,), rows)
            if labels is not None:
                if labels.shape[: data.batch_dims] != data.batch_size:
                    found, expected = list(data.batch_size), list(labels.shape[: self._storage.ndim])
                    raise SchemaError(f"the data has the batch size {found}, expected {expected}")
                return data.copy().set(self._label, labels)
        return data

    def _places(self, index: Any) -> Any:
        """Convert the index to the form that storages take; IndexError for elements that do not exist."""
        rows, found = self._storage.shape[0], as_index(index, 1)
        highest = -1
        if isinstance(found, slice):
            highest = rows if found.stop is not None and found.stop > rows else -1
        elif isinstance(found, int):
            highest = found
        elif isinstance(found, torch.Tensor) and found.numel():
            highest = len(found) - 1 if found.dtype == torch.bool else int(found.max())
        if highest >= rows:
            raise IndexError(f"element {highest} cannot be replaced: there are {rows}; extend() adds elements")
        return found

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Replace the first elements along dimension 0 of `rb[:]`; length and cursor do not change.

        Args:
            data: the new elements, as for `rb[:] = data`.
            end: how many elements are replaced; default the length of `data`.
        """
        self[: batch_length(data) if end is None else end] = data

    # Entries ---------------------------------------------------------------------------------------

    def set_(self, key: EntryKey, value: Any) -> Any:
        """Replace an entry of all elements, in place and without transforms.

        Returns:
            This buffer.

        Raises:
            SchemaError: (a RuntimeError) `value` does not have the shape and element type of `rb[:][key]`, or the
                storage cannot be edited.
            MissingKeyError: (a KeyError) the entry does not exist.
        """
        return self._edit({key: value})

    def set_at_(self, key: EntryKey, value: Any, index: Any) -> Any:
        """Replace an entry of the elements at `index`; otherwise like `set_`."""
        return self._edit({key: value}, without_arrays(index))

    def update_(
        self, input_dict_or_td: Any, clone: bool = False, *, keys_to_update: Sequence[EntryKey] | None = None
    ) -> Any:
        """Replace several entries as `set_` does, either all of them or none.

        Args:
            input_dict_or_td: the new values by key.
            clone: has no effect, as values are always copied; it exists for compatibility with TorchRL.
            keys_to_update: replace only these of the given entries.

        Returns:
            This buffer.
        """
        require_flags(clone=clone)
        values = dict(flat_entries(input_dict_or_td))
        if keys_to_update is not None:
            wanted = [as_key(key) for key in keys_to_update]
            values = {key: value for key, value in values.items() if any(key[: len(part)] == part for part in wanted)}
        return self._edit(values)

    def _edit(self, values: Mapping[Any, Any], index: Any = WHOLE) -> Self:
        with self._guard:
            edit_entries(self._storage, values, index, self._dim_extend)
        return self

    def update_if_present(
        self,
        *,
        index: Any,
        generation: Any,
        patch: Any,
        version_key: str | tuple[str, ...] | None = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Replace entries of sampled elements, skipping elements that have been overwritten since they were sampled.

        This is for learners that compute something for a batch (advantages, targets) while actors keep writing. It
        needs a `TensorStorage`, and a writer with `track_generations=True`. Transforms are not applied. Rows and
        generations of the elements do not change, so that the same batch can be updated again.

        Args:
            index: the entry `"index"` of a batch of N elements, int64 `[N]`, or `[N, ndim]`.
            generation: the entry `"index_generation"` of that batch, int64 `[N]`.
            patch: the new values, a tensordict or a dict of entries `[N, *feature]`.
            version_key: the stored entry that holds the version of each element.
            version: the version of this update, one number for all elements or one for each. An element is only updated
                if its stored version is not higher, and gets this version in the same write. Of several records for
                the same element, the one with the highest version is applied, and the last one of equal versions.
            require_newer: whether the stored version has to be lower, instead of lower or equal.

        Returns:
            Which records were applied, and which ones were rejected or stale.

        Raises:
            SchemaError: (a RuntimeError) the storage or writer does not support this, or nothing was ever written.
            MissingKeyError: (a KeyError) an entry is not stored.
            UsageError: (a ValueError) the number of records, an element type or a shape does not match; only one of
                `version` and `version_key` is given; or the version does not fit its entry. Nothing is changed by any
                of these.
        """
        return self._update_present(index, generation, patch, version_key, version, require_newer)

    def submit_update_if_present(
        self,
        *,
        index: Any,
        generation: Any,
        patch: Any,
        version_key: str | tuple[str, ...] | None = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> Future[ConditionalUpdateResult]:
        """Wait for the batches that are being prepared ahead, and then update as `update_if_present` does.

        These batches, which `sample` returns next, have the earlier values; later ones have the updated values. The
        update is complete when this method returns.

        Returns:
            A future with the result, or with the error that `update_if_present` raises; `synchronize` raises it, too.

        Raises:
            SchemaError: (a RuntimeError) `shutdown` was called.
        """
        if self._closed:
            raise SchemaError("the buffer was shut down, and takes no further updates", hint="call update_if_present()")
        if self._prefetcher is not None:
            self._prefetcher.wait(self._sampling)
        future = completed(partial(self._update_present, index, generation, patch, version_key, version, require_newer))
        self._failed = future.exception() or self._failed
        return future

    def _update_present(
        self, index: Any, generation: Any, patch: Any, version_key: Any, version: Any, require_newer: bool
    ) -> ConditionalUpdateResult:
        require_flags(require_newer=require_newer)
        with self._guard:
            return update_present(
                self._storage, self._writer, index, generation, patch, version_key, version, require_newer=require_newer
            )

    def synchronize(self) -> None:
        """Wait for the batches being prepared ahead, which stay in the queue; raise errors that occurred meanwhile."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        for future in () if self._prefetcher is None else self._prefetcher.wait(self._sampling):
            future.result()

    # Trajectories -----------------------------------------------------------------------------------

    def query(self, predicate: Any = None, *, trajectory_key: Any = None) -> list[Trajectory]:
        """Return the trajectories that meet a condition, in the order in which they were written.

        Trajectories continue across the wrap of a ring. For a storage of several dimensions, they are listed lane by
        lane; for an ensemble, member by member. The last one of a ring may be unfinished. Only entries that the
        condition uses are read.

        Args:
            predicate: the condition, see `filter_trajectories`; default all trajectories.
            trajectory_key: the entry with trajectory ids; see `filter_trajectories` for the default. A dataset uses its
                episode table.

        Raises:
            WrongKindError: (a TypeError) the elements are not tensordicts.
            MissingKeyError: (a KeyError) nothing in the data separates trajectories.
            UnsupportedError: (a NotImplementedError) the buffer is a stream.
        """
        holds = None if predicate is None else TrajectoryPredicate.of(predicate)
        with self._guard.hold():
            return [one for one in self.trajectories(trajectory_key) if holds is None or holds(one)]

    def trajectories(self, trajectory_key: Any = None) -> Iterator[Trajectory]:
        """Yield the trajectories stored now; see `query`."""
        return stored_trajectories(self, trajectory_key)

    def steps_at(self, index: Any) -> Any:
        """Return elements as they appear in batches, but without the sampler's info."""
        if self._transform.draws:
            with self._sampling:
                self.settle()
        rows = self._read(index)
        return self._transformed(rows if self._collate_fn is None else self._collate_fn(rows))

    # State ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts and of the batches prepared ahead; tensors are references, not copies."""
        with self.paused():
            generator, queue = self._rng, tuple(map(_as_dict, self._waiting()))
            return {
                "_storage": self._storage.state_dict(),
                "_sampler": self._sampler.state_dict(),
                "_writer": self._writer.state_dict(),
                "_transforms": self._transform.state_dict(),
                "_batch_size": self._batch_size,
                "_consume_after_n_samples": getattr(self._sampler, "max_sample_count", None),
                "_rng": None if generator is None else (generator.get_state(), str(generator.device)),
                "_prefetch_state": {"version": 1, "capacity": self.batches_ahead, "queue": queue},
            }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, here or in TorchRL.

        Raises:
            SchemaError: (a RuntimeError) the state belongs to other parts, has more elements than the capacity, or
                another number of batches prepared ahead. Nothing is changed.
        """
        missing = {"_transforms", "_writer", "_sampler", "_storage"} - set(state_dict)
        if missing:
            raise SchemaError(f"this is not the state of a buffer: {', '.join(sorted(missing))} is missing")
        batch_size = checked_batch_size(state_dict.get("_batch_size", self._batch_size))
        try:
            self._take_over(state_dict, batch_size)
        except RbtoolError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SchemaError(f"the state does not belong to a {type(self).__name__}: {error!r}") from error

    def _take_over(self, state_dict: Mapping[str, Any], batch_size: int | None) -> None:
        ahead = self._prepared_in(state_dict)
        with self._all_or_nothing():
            self._transform.load_state_dict(dict(state_dict["_transforms"]))
            self._writer.load_state_dict(state_dict["_writer"])
            self._sampler.load_state_dict(state_dict["_sampler"])
            if state_dict.get("_rng") is not None:
                self._restore_rng(*state_dict["_rng"])
            self._batch_size = batch_size
            with self._loading_ring(self._writer):
                self._storage.load_state_dict(state_dict["_storage"])
            self._writer.sync_cursor()
            self._restore_ahead(self.rotated_draws(ahead))

    def _prepared_in(self, state_dict: Mapping[str, Any]) -> list[Draw]:
        """Return the draws prepared ahead in a state; SchemaError if it has room for another number of them."""
        ahead = state_dict.get("_prefetch_state") or {"capacity": self.batches_ahead, "queue": ()}
        if ahead["capacity"] != self.batches_ahead:
            raise SchemaError(
                f"the state has {ahead['capacity']} batches prepared ahead, this buffer prepares {self.batches_ahead}"
            )
        return [as_draw(item) for item in ahead["queue"]]

    @overload
    def dumps(self, path: PathLike, *, durable: Durable = "full", background: Literal[True]) -> BackgroundDump: ...

    @overload
    def dumps(self, path: PathLike, *, durable: Durable = "full", background: Literal[False] = False) -> None: ...

    def dumps(self, path: PathLike, *, durable: Durable = "full", background: bool = False) -> BackgroundDump | None:
        """Write a checkpoint to the folder `path`, replacing an older checkpoint atomically.

        If the process is killed, either the older or the new checkpoint is in place. If this storage, a storage of
        tensors, saved or loaded the older one, only changed rows are written. Digests of all files are saved. TorchRL
        can read the checkpoint if the storage's checkpointer has `compatible=True`.

        Args:
            path: the folder; it is created, or holds an older checkpoint, or is empty.
            durable: what is on the disk when this returns, in case the whole machine stops (a power cut):

                - `"full"`: everything.
                - `"data"`: the bytes of all files. After a power cut, one of the checkpoints is in place; some files of
                  the new one may be missing, which `loads` reports.
                - `"none"`: perhaps nothing yet. After a power cut within about a minute, both checkpoints may be
                  incomplete, which `loads` reports.
            background: whether to write the rows, as they are at the call, in a thread. Meanwhile writers copy the rows
                of tensors that they are about to replace, and wait once these copies exceed 64 MiB. Calls that return
                references to rows, such as `rb[:]`, wait for the dump. This call itself waits for all files if such
                references were returned earlier, if there are save hooks, and for other kinds of storages and
                checkpointers (lists, packed rows, other devices, classes of your own).

        Returns:
            With `background`, a `BackgroundDump`, whose `result()` waits for the dump and raises its error, if any.

        Raises:
            UsageError: (a ValueError) the folder holds anything other than a checkpoint, or is the folder of the
                storage itself; or `durable` is unknown.
        """
        require_flags(background=background)
        place = Path(path)
        self._prepare_dump(place)
        with contextlib.ExitStack() as stack:
            stack.enter_context(claimed(place))
            with self.paused():
                ahead = self._waiting(), self.batches_ahead
                staged = staged_buffer(stack, self, self._rng, place, *ahead, durable, background=background)
            if not background:
                staged.publish()
                return None
            rest = stack.pop_all()

        def finish() -> None:
            with rest:
                staged.publish()

        return in_background(place, finish)

    def _prepare_dump(self, path: Path) -> None:
        """Refuse a destination that contains the storage's own files."""
        refuse_home_of(self._storage, path)

    def loads(self, path: PathLike, *, verify: bool = False) -> None:
        """Load a checkpoint of rbtool or TorchRL, of any capacity, if its elements fit into this buffer.

        Nothing is unpickled. If the checkpoint is replaced by another one during the load, the new one is loaded.

        Args:
            path: the folder.
            verify: whether to read all rows and compare them with their digests. Otherwise rows of more than 64 MiB are
                mapped, if the storage can use mapped memory, and read when used. Everything else is always verified.

        Raises:
            DatasetNotFoundError: (a FileNotFoundError) the folder does not exist.
            FormatError: the folder is something else, or damaged.
            SchemaError: (a RuntimeError) the checkpoint does not fit this buffer. Nothing is changed by any of these.
        """
        require_flags(verify=verify)
        load_folder(Path(path), partial(self._load_folder, verify=verify))

    dump = save = dumps

    load = loads

    def _load_folder(self, folder: BufferFolder, *, verify: bool) -> None:
        draws = folder.drawn_ahead(self.batches_ahead)
        self.load_saved(replace(folder.saved(), verify=verify), draws)

    def load_saved(self, saved: SavedParts, draws: Sequence[Draw] = ()) -> None:
        """Load the parts read from a checkpoint, and the draws prepared ahead; a failure changes nothing."""
        with self._all_or_nothing():
            self._load_saved(saved)
            saved.confirm()
            self._restore_ahead(self.rotated_draws(list(draws)))

    def _load_saved(self, saved: SavedParts) -> None:
        if "members" in saved.notes:
            raise FormatError("a checkpoint of an ensemble was found, expected one of a single buffer")
        if saved.notes.get("consume_after_n_samples") is not None and not isinstance(self._sampler, ConsumingSampler):
            raise SchemaError("the checkpoint is from a buffer that consumes its elements, and this one does not")
        if saved.transforms is not None:
            self._transform.load_state_dict(saved.transforms)
        if saved.writer is not None:
            self._writer.loads(saved.writer)
        if saved.sampler is not None:
            self._sampler.loads(saved.sampler)
        else:
            self._sampler.empty()
        if saved.generator is not None:
            self._restore_rng(*saved.generator)
        self._batch_size = saved.batch_size
        with self._loading_ring(None if saved.writer is None else self._writer):
            if saved.storage is not None:
                self._storage.loads(saved.storage, verify=saved.verify)
            else:
                self._storage.empty()
        if saved.writer is None:
            self._writer.resume_after()
        self._writer.sync_cursor()
        if saved.sampler is None:
            self._introduce()

    @classmethod
    def as_remote(cls, remote_config: Mapping[str, Any] | None = None) -> Any:
        """Return this class as a Ray actor class: `ReplayBuffer.as_remote().remote(storage=…)` starts an actor.

        A `RayReplayBuffer` is easier to use and faster: here data is sent as Ray sends it, and calls return references.

        Args:
            remote_config: options of `ray.remote`, default `{"num_cpus": 1}`.

        Raises:
            UsageError: (a ValueError) Ray is not installed.
        """
        return imported_ray("as_remote()").remote(**(remote_config or {"num_cpus": 1}))(cls)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Call `hook(data, path=…)` on the storage's data before it is saved; hooks themselves are not saved."""
        self._storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Call `hook(data, out=…)` on data that is loaded into the storage; hooks themselves are not saved."""
        self._storage.register_load_hook(hook)

    # A full ring in a larger storage ---------------------------------------------------------------

    @contextlib.contextmanager
    def _loading_ring(self, writer: Writer | None) -> Iterator[None]:
        """Load the storage inside the context, after `writer` (None if it has no state) has been restored.

        A full ring that is loaded into a larger storage has to continue in the free rows behind its newest row. Its
        rows are therefore rotated into the order of time, and then the other parts are rotated to match:

            saved, capacity 4, cursor 2:      6 7 4 5
            loaded, capacity 6, cursor 4:     4 5 6 7 _ _
        """
        storage = self._storage
        if not self._rings():
            yield
            return
        with storage.loading_ring(None if writer is None else writer.cursor):
            yield
        if (row := storage.rotated) is None:
            return
        self._writer.rotate(row)
        if row:
            self._sampler.on_rotate(row, storage)
            self._renumber_rows()

    def _rings(self) -> bool:
        """Whether the writer fills the rows as a ring."""
        return self._writer.keeps_order and self._writer.writes

    def _renumber_rows(self) -> None:
        """After a rotation, store the new row numbers in the rows that hold their number."""

    def rotated_draws(self, draws: list[Draw]) -> list[Draw]:
        """Convert the indices of loaded draws, in place, to the row numbers after the rotation; return the draws."""
        row, storage = self._storage.rotated, self._storage
        if not row or not self._rings():
            return draws
        rows = storage.shape[0]
        for draw in draws:
            first, *others = draw.index if isinstance(draw.index, tuple) else (draw.index,)
            first = (first - row) % rows
            draw.index = (first, *others) if isinstance(draw.index, tuple) else first
            draw.info["index"] = draw.index
            if ANCHOR in draw.info:
                draw.info[ANCHOR] = moved = draw.info[ANCHOR].clone()
                times = moved if moved.dim() == 1 else moved[:, 0]
                times.copy_((times - row) % rows)
        return draws

    # Details ---------------------------------------------------------------------------------------

    @property
    def batches_ahead(self) -> int:
        """How many batches are prepared ahead: `prefetch`, or 0."""
        return 0 if self._prefetcher is None else self._prefetcher.capacity

    def _restore_rng(self, state: torch.Tensor, device: str) -> None:
        generator = self._rng
        if generator is None or generator.device.type != torch.device(device).type:
            generator = torch.Generator(device)
        try:
            generator.set_state(state.to("cpu", torch.uint8).contiguous())
        except RuntimeError as error:
            raise SchemaError(f"the state of the generator does not fit one on {device}: {error}") from error
        self.unseeded = False
        self.draw_from(generator)

    def _waiting(self) -> list[Draw]:
        """Return the draws that are not delivered yet, oldest first."""
        return [*self._undelivered, *(() if self._prefetcher is None else self._prefetcher)]

    def _restore_ahead(self, draws: list[Draw]) -> None:
        self._ended, self._undelivered = False, [draw for draw in draws if draw.size is not None]
        for draw in draws:
            self.date(draw)
        if self._prefetcher is not None:
            self._prefetcher.restore(draw for draw in draws if draw.size is None)

    def date(self, draw: Draw) -> None:
        """Note the state of the write log in a loaded draw, which is dropped if slices or windows are overwritten."""
        if self._drawing.reads_rows:
            draw.written = self._storage.log.now

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Load inside the context; on failure restore everything except the storage, which restores itself."""
        with self._guard, self._sampling:
            self.settle()  # now, so that the loaded random stream is not replaced at the next draw
            rng, batch_size = self._rng, self._batch_size
            rng_state = None if rng is None else rng.get_state()
            kept = [(part, copy.deepcopy(part.state_dict())) for part in (self._writer, self._sampler, self._transform)]
            try:
                yield
            except BaseException:
                for part, state in kept:
                    part.load_state_dict(state)
                if rng is not None and rng_state is not None:
                    rng.set_state(rng_state)
                self._batch_size = batch_size
                self.draw_from(rng)
                raise

    # Threads and processes ----------------------------------------------------------------------------
    # Rows in memory maps or shared memory are common to all processes, as are their length, cursor and count. Of other
    # rows, a forked child has a private copy, to which it may not write if the buffer is `shared`.

    @property
    def service_backend(self) -> str:
        """Where the buffer lives: `"direct"` for this process."""
        return "direct"

    def start(self) -> Self:
        """Return this buffer, which needs no start; it exists for code that also uses a `RayReplayBuffer`.

        Raises:
            SchemaError: (a RuntimeError) `shutdown` was called.
        """
        if self._closed:
            raise SchemaError("the buffer was shut down, and is not started again", hint="make a new one")
        return self

    def client(self) -> Self:
        """Return this buffer, which needs no client."""
        return self

    @property
    def is_alive(self) -> bool:
        """Whether `shutdown` was not called."""
        return not self._closed

    def shutdown(self, timeout: float | None = None) -> None:
        """Wait for batches being prepared ahead, and end their threads; the elements stay.

        A later batch starts the threads again.

        Args:
            timeout: seconds to wait; default without limit.

        Raises:
            TimeoutError: the threads are still working after `timeout` seconds. Errors of the threads are raised here,
                too.
        """
        if self._prefetcher is not None:
            self._prefetcher.finish(self._sampling, timeout)
        self._closed = True

    @property
    def revision(self) -> object:
        """A value that changes whenever a part or a lock is replaced."""
        return self._revision

    @property
    def shared(self) -> bool:
        """Whether several processes may write."""
        return isinstance(self._guard, SharedGuard)

    def share(self, shared: bool = True) -> Self:
        """Set whether several processes may write. Call it before the other processes start.

        Returns:
            This buffer.

        Raises:
            UsageError: (a ValueError) the buffer prefetches, or consumes its elements.
            SchemaError: (a RuntimeError) a transform has state that changes with every write and cannot be shared.
        """
        require_flags(shared=shared)
        if shared == self.shared:
            return self
        if shared and self._prefetcher is not None:
            raise UsageError("a buffer that prefetches cannot be shared: its threads do not exist in other processes")
        if isinstance(self._sampler, ConsumingSampler):
            _check_consumption(self._writer, prefetches=False, shared=shared)
        if shared:
            self._transform.share_memory_()
        else:
            self._transform.shared = False
        with self._guard:
            self._guard = SharedGuard() if shared else Guard()
            self._revision += 1
            self._unshared, self._storage.journal = False, None
            if shared:
                self._share_rows()
            self._sampler.on_share(self._storage if shared else None)
        return self

    def _share_rows(self) -> None:
        """Move the rows, if there are any, to shared memory; SchemaError in a process that has only a copy of them."""
        if self._cut_off:
            raise SchemaError(
                "this process has a private copy of the rows, which the other processes do not see",
                hint="use a storage of memory maps or tensors, and write to it before the other processes start",
            )
        storage = self._storage
        if not storage.shared and hasattr(storage, "share") and getattr(storage, "initialized", True):
            storage.share()
        self._unshared = not storage.shared
        if isinstance(self._guard, SharedGuard) and not self._unshared:
            self._guard.protect(storage, [*storage.counters, *self._writer.counters])

    @property
    def guard(self) -> Guard:
        """The guard of the rows: excludes writers, and reads rows as of one instant."""
        return self._guard

    @property
    def draw_lock(self) -> threading.RLock:
        """The lock held by each draw and by each change of the sampler."""
        return self._sampling

    def paused(self) -> HoldAll:
        """Return a context that excludes writers and draws."""
        return HoldAll([self._guard, self._sampling])

    # Names of TorchRL's buffers

    @property
    def _replay_lock(self) -> HoldAll:
        return self.paused()

    @property
    def _prefetch(self) -> bool:
        return self._prefetcher is not None

    @property
    def _prefetch_cap(self) -> int:
        return 0 if self._prefetcher is None else self._prefetcher.capacity

    # Random streams --------------------------------------------------------------------------------

    @property
    def generator(self) -> torch.Generator | None:
        """The source of random numbers; None for torch's global generator."""
        return self._rng

    def settle(self, here: Place | None = None) -> None:
        """Before a draw in another process, switch to a random stream of its own, unless a generator was given.

        Workers of a `DataLoader` always switch; if a generator was given, to a branch of it. After a switch, draws
        prepared ahead are dropped, and a new epoch starts.

        Args:
            here: the current process, if the caller knows it already.
        """
        here = place() if here is None else here
        if here != self._place:
            self.move_to(here, begins_epoch=self._change_stream())
        if self._rng is None:
            generator = stand_in()
            if generator is not self._sampler.generator:
                self._set_generators(generator)

    def _change_stream(self) -> bool:
        """Switch to the random stream of this process; return whether its draws differ from other processes' draws."""
        worker, generator = get_worker_info(), self._rng
        if worker is None and generator is not None:
            if not self.unseeded:
                return False
            reseed(generator)
        elif worker is not None and generator is not None:
            branch(generator, worker.id, self._copies, *([worker.seed] if self.unseeded else []))
        return True

    def move_to(self, here: Place, *, begins_epoch: bool) -> None:
        """Record that draws are now made in this process, after the random stream was switched if necessary."""
        self._place = here
        if begins_epoch:
            self._sampler.begin_epoch()
            self.forget_drawn()

    def _adopt(self, generator: torch.Generator | None) -> None:
        """Use a generator that the user gave; in a worker of a `DataLoader`, make it a branch of the given one."""
        self._rng, self.unseeded, self._place = generator, False, place()
        worker = get_worker_info()
        if generator is not None and worker is not None:
            branch(generator, worker.id)

    @contextlib.contextmanager
    def drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        """Draw from another generator inside the context; the buffer's own does not advance."""
        with self._sampling:
            self.settle()
            own, self._rng = self._rng, generator
            self._set_generators(generator)
            try:
                yield
            finally:
                self._rng = own
                self._set_generators(own)

    def _set_generators(self, generator: torch.Generator | None) -> None:
        """Set the generator of all parts."""
        self._storage.generator = self._sampler.generator = self._writer.generator = generator
        self._transform.set_rng(generator)

    def _before_fork(self) -> None:
        self._copies += 1
        self._refuse_other_writers()

    def _refuse_other_writers(self) -> None:
        """Detect writes that overlap, if other processes have the rows, too, but no lock is taken for a write."""
        if self._recipe is None and not self.shared and self._storage.log.process.shared:
            self._guard.refuse_others(self._storage.log.process)

    def _after_fork(self) -> None:
        self._sampling = threading.RLock()
        self._revision += 1
        self._guard.after_fork()
        if self._prefetcher is not None:
            self._prefetcher.after_fork()
        if self._recipe is None and not self._storage.shared:
            # This process has a private copy of the rows, so its writes must not move the parent's cursor.
            self._cut_off = self.shared
            self._writer.unshare()
            if (generations := self._storage.generations) is not None:
                self._storage.generations = generations.apart()

    def __getstate__(self) -> dict[str, Any]:
        generator = self._rng
        if get_spawning_popen() is not None:
            self._copies += 1
            self._refuse_other_writers()
        own = {"_sampling", "_listener", "_rng", "_prefetcher", "_seen", "_drawing"}
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        with self._sampling:
            # Pickle bytes, as the descriptor of a tensor would be closed before a spawned child reads it.
            saved = None if generator is None else (generator.get_state().numpy().tobytes(), str(generator.device))
            state["_rng_state"] = saved
            state["_queue"] = None if self._prefetcher is None else (self._prefetcher.capacity, list(self._prefetcher))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        rng_state, queue = state.pop("_rng_state"), state.pop("_queue")
        self.__dict__.update(state)
        self._sampling = threading.RLock()
        self._rng = None if rng_state is None else torch.Generator(rng_state[1])
        if self._rng is not None:
            self._rng.set_state(torch.frombuffer(bytearray(rng_state[0]), dtype=torch.uint8))
        self._prefetcher = None
        if queue is not None:
            self._prefetcher = Prefetcher(queue[0])
            self._prefetcher.restore(queue[1])
        call_at_fork(self, self._before_fork, self._after_fork)
        if self._recipe is None:
            self._writer.register_storage(self._storage)
            self._connect()
            self._refuse_other_writers()
            if self.shared:
                self._cut_off = False
                self._share_rows()


setattr(ReplayBuffer.__new__, "__wrapped__", ReplayBuffer.__init__)  # noqa: B010  # `inspect` shows these arguments
IterableDataset.register(ReplayBuffer)  # otherwise a DataLoader would read single rows, without the sampler


class _History:
    """Applies transforms that look back, such as frame stacks, to rows that were just read."""

    def __init__(self) -> None:
        self._tables: dict[Any, TableFinder] = {}
        self._pool = MemoryPool()

    def complete(self, transforms: Sequence[Any], storage: Storage, index: Any, rows: Any, dim_extend: int = 0) -> Any:
        """Return the rows at an index, in any form, after these transforms; rows are read if they are None.

        With a `dim_extend` above 0, dimension 0 of the index is the first one of the user's data. Rows and the steps
        around them are consistent only if the caller excludes writers, or repeats the call if one interfered.
        """
        if rows is None and not (transforms[0].reads_rows and storage.entry_keys is not None):
            rows = storage.get(index)
        objects = isinstance(rows, list)
        if objects:
            rows = stack_elements(rows)
        numbers = _coordinates(storage, index, dim_extend)
        for transform in transforms:
            ages = self._ages(transform, storage)
            past = StepsAround(storage, ages, numbers, transform.looks_back, self._pool)
            rows = transform.with_past(rows, past)
        return list(rows.unbind(0)) if objects else rows

    def _ages(self, transform: Any, storage: Storage) -> Ages:
        """Return the object that says where steps lie in their episodes, as this transform separates them."""
        done_key, traj_key = transform.episode_keys
        if isinstance(storage, StreamStorage):
            if traj_key is not None:
                raise SchemaError(
                    f"traj_key {'.'.join(traj_key)} cannot be used: a stream knows the episodes from its shards",
                    hint="leave traj_key out",
                )
            return StreamAges(storage)
        tables = self._tables.get(transform.episode_keys)
        if tables is None:
            boundaries = StrictBoundaries(done_key, traj_key)
            tables = self._tables[transform.episode_keys] = TableFinder(boundaries.source)
        return tables.table(storage)


def _coordinates(storage: Storage, index: Any, dim_extend: int) -> tuple[NDArray[np.int64], ...]:
    """Convert a valid index to coordinates: one array for each dimension of the storage, in the shape of the index."""
    if isinstance(storage, StreamStorage):
        return (storage.numbers_at(index),)
    if storage.ndim == 1:
        return (row_numbers(as_index(index, 1), len(storage)),)
    if isinstance(index, tuple) and len(index) == storage.ndim and all(isinstance(one, torch.Tensor) for one in index):
        return tuple(one.numpy(force=True).astype(np.int64, copy=False) for one in index)
    cells = swap(torch.arange(storage.shape.numel()).reshape(storage.shape), dim_extend)[index]
    return tuple(np.unravel_index(cells.numpy(), tuple(storage.shape)))


def _consuming(count: Any, sampler: Sampler) -> Sampler:
    """Return the sampler for a buffer with this `consume_after_n_samples`, or the given one if the count is None.

    Raises:
        ConsumedTypeError: (a TypeError) the count is not an int.
        UsageError: the count is invalid, or the sampler of another kind.
    """
    if count is None:
        return sampler
    count = checked_sample_count("consume_after_n_samples", count)
    if type(sampler) is RandomSampler:
        return ConsumingSampler(count)
    if not isinstance(sampler, ConsumingSampler):
        raise UsageError(
            f"consume_after_n_samples is {count}, but a {type(sampler).__name__} does not consume elements"
        )
    if sampler.max_sample_count != count:
        raise UsageError(
            f"consume_after_n_samples is {count}, the sampler consumes after {sampler.max_sample_count} samples"
        )
    return sampler


def _check_consumption(writer: Writer, *, prefetches: bool, shared: bool) -> None:
    """Raise UsageError for a buffer that cannot consume its elements; for its writer it is also a TypeError."""
    if not isinstance(writer, RoundRobinWriter) or not callable(writer.write_at):
        raise ConsumedTypeError(f"a {type(writer).__name__} cannot write to the slots of consumed elements")
    if prefetches:
        raise UsageError("consume_after_n_samples excludes prefetch, which would consume elements before they are used")
    if shared:
        raise UsageError("consume_after_n_samples excludes shared: only one process can consume elements")


_DEPLOYMENT: Mapping[str, tuple[Any, ...]] = {
    "service_backend": ("direct", None),
    "service_backend_options": (None, {}),
    "transport": ("auto", "direct"),
    "transport_options": (None, {}),
    "use_ray_service": (False, None),
}
"""The arguments that say where a buffer lives, and their values for a buffer in this process."""


_CONSUME = "consume_after_n_samples"


_LATE = frozenset({"_storage", "_sampler", "_drawing", "_writer", "_transform", "_collate_fn", "_dim_extend"})


def completed(act: Callable[[], _Found]) -> Future[_Found]:
    """Call a function now, and return a future with its result or error."""
    future: Future[_Found] = Future()
    try:
        future.set_result(act())
    except Exception as error:
        future.set_exception(error)
    return future


class _Listener:
    """Passes on notices of a storage's writes to a buffer. The storage does not keep the buffer alive."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = weakref.ref(buffer)

    def mark_update(self, index: Any) -> None:
        buffer = self._buffer()
        if buffer is not None:
            buffer.mark_update(index)


def arguments_of(kind: Callable[..., Any]) -> list[str]:
    """Return the names of all arguments of a class of buffers, or of a function that makes one."""
    return [*keywords_of(kind), _CONSUME, *_DEPLOYMENT]


def _check_deployment(kind: type[Any], given: dict[str, Any]) -> None:
    """Raise UsageError for arguments of a buffer that is not in this process, TypeError for unknown arguments."""
    for argument, value in given.items():
        if argument not in _DEPLOYMENT:
            raise unknown_keyword(kind.__name__, argument, arguments_of(kind))
        if argument == "service_backend" and value not in _DEPLOYMENT[argument]:
            raise UsageError(f"Unsupported service backend {value!r}, expected 'direct' or 'ray'")
        if value not in _DEPLOYMENT[argument]:
            expected = " or ".join(map(repr, _DEPLOYMENT[argument]))
            raise UsageError(
                f"{argument} is {value!r}, expected {expected} for a buffer in this process",
                hint='service_backend="ray" makes a buffer for several processes and machines',
            )


def _made(given: Any, kind: type[Any], name: str, default: Callable[[], Any] | None = None) -> Any:
    """Return the given part, or make it; WrongKindError (a TypeError) if it has the wrong type."""
    if given is None and default is not None:
        return default()
    part = given() if not isinstance(given, kind) and callable(given) else given
    if not isinstance(part, kind):
        expected = f"a {kind.__name__} or a callable that returns one"
        raise WrongKindError(f"{name} is {described(part, expected)}")
    return part


def _composed(transform: Any) -> Compose:
    if isinstance(transform, Compose):
        return transform.eval()
    found = Compose()
    if transform is not None:
        found.append(transform)
    return found


def _checked_dim(dim: int | None, storage: Storage) -> int:
    if dim is None:
        return storage.ndim - 1
    if not 0 <= dim < storage.ndim:
        raise UsageError(f"dim_extend is {dim}, the storage has the dimensions 0 to {storage.ndim - 1}")
    return dim


_CPU = torch.device("cpu")


def _pin(value: Any) -> Any:
    """Pin tensors on the CPU; tensors on a device next to them stay as they are."""
    if value.device is None and any(leaf.device != _CPU for leaf in value.values(True, True)):
        return value.apply(_pin)
    return value.pin_memory() if value.device in (None, _CPU) else value


class _ReadEpoch(Iterator[Any]):
    """Yields batches until the last one of an epoch; if making a batch failed, the next call tries it again."""

    def __init__(self, deliver: Callable[[], tuple[Draw, Any]], *, ended: bool) -> None:
        self._deliver = deliver
        self._ended = ended

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        draw, batch = self._deliver()
        self._ended = draw.last
        return batch


class WriteResult(NamedTuple):
    """Written data, after the transforms, and its index; `data` is None if nothing was written."""

    data: Any
    index: Any
    grown: int = 0
    """The dimension of the data along which the storage grew."""


def _has_batch(data: Any) -> bool:
    """Whether data is a tensordict or a tensorclass with a batch size."""
    if type(data) is TensorDict:
        return bool(data.batch_size)
    return type(data) is not dict and is_tensor_collection(data) and data.ndim > 0


def _numbers(values: Any) -> torch.Tensor:
    """Return priorities without gradients; WrongKindError (a TypeError) for anything but numbers."""
    if isinstance(values, torch.Tensor):
        return values.detach()
    if isinstance(values, list | tuple):
        values = [value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value for value in values]
    if values is None:  # NumPy would convert it to NaN
        raise WrongKindError("priorities are numbers, found None")
    try:
        return torch.from_numpy(np.array(values, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise WrongKindError(f"priorities are numbers, found a {type(values).__name__}: {error}") from error


def _as_dict(draw: Draw) -> dict[str, Any]:
    parts = [(member, _as_dict(part)) for member, part in draw.parts]
    more = {"parts": parts} if parts else {} if draw.chances is None else {"chances": draw.chances}
    return {"index": draw.index, "info": draw.info, "last": draw.last, "size": draw.size} | more


def as_draw(item: Any) -> Draw:
    """Read one entry of a saved queue; in TorchRL's it is a pair of a batch and its info."""
    if isinstance(item, Mapping):
        parts = [(member, as_draw(part)) for member, part in item.get("parts", ())]
        index, info, last = item["index"], dict(item["info"]), bool(item["last"])
        return Draw(index, info, last, parts=parts, chances=item.get("chances"), size=item.get("size"))
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Mapping) and "index" in item[1]:
        return Draw(item[1]["index"], dict(item[1]))
    raise SchemaError(f"a batch prepared ahead is a {type(item).__name__} without an index")
