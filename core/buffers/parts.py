"""The parts of a buffer: how they are made, connected and exchanged."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import SchemaError, UsageError, keywords_of, require_flags, unknown_keyword
from ..samplers.base import Sampler
from ..samplers.consuming import ConsumingSampler
from ..samplers.sample_units import SampleUnit
from ..samplers.uniform import RandomSampler
from ..storages.base import Storage
from ..storages.list_storage import ListStorage
from ..transforms.base import Compose, as_transform
from ..writers.base import Writer
from ..writers.round_robin import RoundRobinWriter
from .concurrency import Prefetcher, Sharing
from .consumption import check_consumption, consuming
from .expansion import check_expansion, checked_unit, drawing_with
from .history import History
from .locks import Guard, SharedGuard, call_at_fork
from .pytrees import checked_batch_size, default_collate, without_arrays

_NEWER = {
    "service_backend": "direct",
    "service_backend_options": None,
    "transport": "auto",
    "transport_options": None,
}
"""Arguments of TorchRL's buffers that are not supported, with the values that are accepted."""

_CONSUME = "consume_after_n_samples"
_LATE = frozenset({"_storage", "_sampler", "_drawing", "_writer", "_transform", "_collate_fn", "_dim_extend"})


class WrongKindError(UsageError, TypeError):
    """A part of a buffer, or an argument, is of the wrong type."""


class UnsupportedError(UsageError, NotImplementedError):
    """An argument is not supported by this kind of buffer."""


class BufferParts(Sharing):
    """Storage, sampler, writer and transform of a buffer; `ReplayBuffer` documents the arguments."""

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
        self._sample_unit = checked_unit(sample_unit)
        self._consumed_after = newer.pop(_CONSUME, None)
        _refuse_newer(type(self), newer)
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
        self._history = History()
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
        if prefetch is not None and prefetch < 0:
            raise UsageError(f"prefetch is {prefetch}, expected a number of batches")
        if prefetch and batch_size is None:
            raise UsageError("prefetch is set, expected with batch_size: what to make ahead is not known")
        if prefetch and shared:
            raise UsageError("prefetch and shared are both set, expected one: threads do not cross processes")
        if dim_extend is not None and dim_extend < 0:
            raise UsageError(f"dim_extend is {dim_extend}, expected a dimension from 0")
        if transform is not None and transform_factory is not None:
            raise WrongKindError("transform and transform_factory are both set, expected one of them")

    def folder_notes(self) -> dict[str, Any]:
        """Return what a checkpoint records of this buffer in addition to the state of its parts."""
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
            sampler = consuming(self._consumed_after, sampler)
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
        # Called only for missing attributes, among them the parts before they are made.
        if name in _LATE and self.__dict__.get("_recipe") is not None:
            self._build()
            return getattr(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _default_writer(self) -> Writer:
        return RoundRobinWriter(compilable=self._compilable)

    def _default_sampler(self, storage: Storage) -> Sampler:
        return RandomSampler()

    def _check_parts(self, storage: Storage, sampler: Sampler, writer: Writer) -> None:
        """Raise UsageError or SchemaError, with nothing changed, for parts that do not fit together."""
        if sampler.needs_order and not writer.keeps_order:
            raise UsageError(
                f"a {type(writer).__name__} puts rows anywhere, and a {type(sampler).__name__} needs them in order",
                hint="take a RoundRobinWriter, or make whole trajectories the elements",
            )
        sampler.check_storage(storage)
        check_expansion(self._sample_unit, storage, sampler, writer)
        if isinstance(sampler, ConsumingSampler):
            check_consumption(writer, prefetches=self._prefetcher is not None, shared=self.shared)
        if getattr(sampler, "drop_last", False) and self._batch_size is None:
            raise UsageError("a sampler with drop_last=True needs the buffer's batch_size, found None")

    def _connect(self) -> None:
        """Attach this buffer to the storage, and set the generator of all parts."""
        sampler, self._seen = self._sampler, None
        self._drawing = drawing_with(sampler, self._sample_unit)
        self._revision += 1
        self._listener = _Listener(self)
        if sampler.follows_updates:
            self._storage.attach(self._listener)
        self._notify_sampler = sampler.follows_writes and not sampler.writes_are_updates
        self._room = sampler.capacity_for(self._storage)
        if isinstance(self._writer, RoundRobinWriter):
            self._writer.reuse = sampler.freed if isinstance(sampler, ConsumingSampler) else None
        self._set_generators(self._rng)

    def _introduce(self) -> None:
        """Pass the storage to the sampler, and report its elements as written, if the sampler follows writes."""
        self._sampler.on_attach(self._storage)
        if not (self._notify_sampler and self._storage.has_rows):
            return
        coordinates = [torch.arange(size) for size in self._storage.shape]
        self._sampler.extend(coordinates[0] if len(coordinates) == 1 else torch.cartesian_prod(*coordinates))

    # The parts -------------------------------------------------------------------------------------

    @property
    def initialized(self) -> bool:
        """Whether the parts are made already."""
        return self._recipe is None

    @property
    def storage(self) -> Storage:
        """Keeps the elements."""
        return self._storage

    @property
    def sampler(self) -> Sampler:
        """Draws the indices of batches."""
        return self._sampler

    @property
    def sample_unit(self) -> SampleUnit | None:
        """Expands what the sampler draws; None if batches have just that."""
        return self._sample_unit

    @property
    def writer(self) -> Writer:
        """Chooses the rows of new elements."""
        return self._writer

    @property
    def transform(self) -> Compose:
        """The transforms of batches and written data, maybe none."""
        return self._transform

    @property
    def collate_fn(self) -> Callable[[Any], Any] | None:
        """Makes a batch of rows of the storage; None where they are one."""
        return self._collate_fn

    @property
    def rows_are_batches(self) -> bool:
        """Whether rows are batches as the storage returns them, but for transforms and the info."""
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
        """Replace the storage, and return the previous one; the next write is behind the rows of the new one."""
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
        """Replace the writer, and return the previous one, whose cursor and count a new writer takes over."""
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
        """Set the generator of all parts, whose stream may be that of another buffer; the process stays as it was."""
        self._rng = generator
        with self._sampling:
            self._set_generators(generator)

    def append_transform(self, transform: Any, *, invert: bool = False) -> Any:
        """Add a transform at the end, inverted with `invert`; returns this buffer.

        SchemaError (a RuntimeError), with nothing changed, for a shared buffer and a transform whose state changes with
        every write and cannot be shared.
        """
        with self._sampling:
            self._transform.append(as_transform(transform, invert=invert))
            self._transform_changed()
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Any:
        """Insert a transform before the one at `index`, as `append_transform` does at the end; returns this buffer."""
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
        """Report changed elements to the sampler; one that draws by priority gives them the default priority.

        `index` is any index for `rb[index] = …`, or coordinates, int64 `[n, ndim]`.
        """
        storage, index = self._storage, without_arrays(index)
        if isinstance(index, torch.Tensor) and index.dim() == 2 and 1 < storage.ndim == index.shape[1]:
            index = index.unbind(-1)  # as writers return them; a storage would take them for rows
        with self._sampling:
            self._sampler.mark_update(index, storage=storage)


class _Listener:
    """Receives the writes of a storage, with a weak reference to the buffer."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: BufferParts) -> None:
        self._buffer = weakref.ref(buffer)

    def mark_update(self, index: Any) -> None:
        buffer = self._buffer()
        if buffer is not None:
            buffer.mark_update(index)


def arguments_of(kind: Callable[..., Any]) -> list[str]:
    """Return the names of all arguments of a class of buffers, or of a function that makes one."""
    return [*keywords_of(kind), _CONSUME, *_NEWER]


def _refuse_newer(kind: type[Any], given: dict[str, Any]) -> None:
    """Raise UnsupportedError for arguments of TorchRL that are not supported, TypeError for unknown ones."""
    for argument, value in given.items():
        if argument not in _NEWER:
            raise unknown_keyword(kind.__name__, argument, arguments_of(kind))
        if value != _NEWER[argument]:
            raise UnsupportedError(f"{argument} is {value!r}, which rbtool does not support yet: leave it out")


def _made(given: Any, kind: type[Any], name: str, default: Callable[[], Any] | None = None) -> Any:
    """Return a part, or make it; WrongKindError (a TypeError) for one of another type."""
    if given is None and default is not None:
        return default()
    part = given() if not isinstance(given, kind) and callable(given) else given
    if not isinstance(part, kind):
        raise WrongKindError(
            f"{name} is a {type(part).__name__}, expected a {kind.__name__} or a callable that returns one"
        )
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
