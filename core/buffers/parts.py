"""What a buffer is made of, how the parts get to know each other, and how they are exchanged."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import SchemaError, UsageError
from ..samplers import RandomSampler, Sampler
from ..storages import ListStorage, Storage
from ..transforms import Compose, as_transform
from ..writers import RoundRobinWriter, Writer
from .locks import Guard, SharedGuard, reset_after_fork
from .prefetch import Prefetcher
from .pytrees import checked_batch_size, default_collate, without_arrays
from .sharing import Sharing

__all__ = ["BufferParts", "UnsupportedError", "WrongKindError"]

_NEWER = {
    "consume_after_n_samples": None,
    "sample_unit": None,
    "service_backend": "direct",
    "service_backend_options": None,
    "transport": "auto",
    "transport_options": None,
}
"""Arguments of TorchRL's buffers that are not built here, with the values that ask for nothing."""

_LATE = frozenset({"_storage", "_sampler", "_writer", "_transform", "_collate_fn", "_dim_extend"})


class WrongKindError(UsageError, TypeError):
    """A part of a buffer was to be something that it cannot be."""


class UnsupportedError(UsageError, NotImplementedError):
    """A buffer was asked for something that only buffers of another kind do."""


class BufferParts(Sharing):
    """The parts of a buffer: storage, sampler, writer, transform, and what ties them together.

    See `ReplayBuffer` for the arguments. With `delayed_init` the parts are made when one of them is first needed.
    """

    def __init__(
        self,
        *,
        storage: Any = None,
        sampler: Any = None,
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
        _refuse_newer(type(self).__name__, newer)
        self._check_arguments(prefetch, batch_size, dim_extend, shared, transform, transform_factory)
        self._batch_size = batch_size
        self._pin_memory = pin_memory
        self._adopt(generator)
        self._compilable = bool(compilable)
        self._prefetcher = Prefetcher(prefetch) if prefetch else None
        self._guard: Guard = SharedGuard() if shared else Guard()
        self._sampling = threading.RLock()
        self._ended = False
        self._unshared = False
        self._cut_off = False
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
        reset_after_fork(self)
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
            raise UsageError(f"prefetch is {prefetch}, a number of batches is expected")
        if prefetch and batch_size is None:
            raise UsageError("prefetch was given without batch_size: what to make ahead is not known")
        if prefetch and shared:
            raise UsageError("prefetch and shared=True were given: threads do not cross processes")
        if dim_extend is not None and dim_extend < 0:
            raise UsageError(f"dim_extend is {dim_extend}, a dimension from 0 is expected")
        if transform is not None and transform_factory is not None:
            raise WrongKindError("transform and transform_factory were given, one of them is expected")

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
        # Reached only for what is not there: a part that is yet to be made, or nothing at all.
        if name in _LATE and self.__dict__.get("_recipe") is not None:
            self._build()
            return getattr(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _default_writer(self) -> Writer:
        return RoundRobinWriter(compilable=self._compilable)

    def _default_sampler(self, storage: Storage) -> Sampler:
        return RandomSampler()

    def _check_parts(self, storage: Storage, sampler: Sampler, writer: Writer) -> None:
        """Refuse parts that do not go together, before any of them is put in place."""
        if sampler.needs_order and not writer.keeps_order:
            raise UsageError(
                f"a {type(writer).__name__} puts rows anywhere, and a {type(sampler).__name__} needs them in order",
                hint="take a RoundRobinWriter, or make whole trajectories the elements",
            )
        sampler.check_storage(storage)
        if getattr(sampler, "drop_last", False) and self._batch_size is None:
            raise UsageError("a sampler with drop_last=True needs the buffer's batch_size, found None")

    def _connect(self) -> None:
        """Have the storage tell this buffer what is written, and hand the generator on."""
        sampler = self._sampler
        self._ear = _Ear(self)
        if sampler.follows_updates:
            self._storage.attach(self._ear)
        self._tell_sampler = sampler.follows_writes and not sampler.writes_are_updates
        self._room = sampler.capacity_for(self._storage)
        self._hand_on(self._rng)

    def _introduce(self) -> None:
        """Have the sampler get to know the storage, and where it wants to hear of them, the elements that are there."""
        self._sampler.on_attach(self._storage)
        if not (self._tell_sampler and len(self._storage)):
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
        """Where the elements live."""
        return self._storage

    @property
    def sampler(self) -> Sampler:
        """What chooses elements."""
        return self._sampler

    @property
    def writer(self) -> Writer:
        """What decides where new elements go."""
        return self._writer

    @property
    def transform(self) -> Compose:
        """What batches and data go through; an empty one changes nothing."""
        return self._transform

    @property
    def batch_size(self) -> int | None:
        """How many elements `sample()` gives where it is not told."""
        return self._batch_size

    @property
    def dim_extend(self) -> int:
        """The dimension along which `extend` grows the storage; it can be set once, before anything is written."""
        return self._dim_extend

    @dim_extend.setter
    def dim_extend(self, dim: int) -> None:
        checked = _checked_dim(dim, self._storage)
        if checked != self._dim_extend and (self._given_dim or len(self._storage)):
            raise SchemaError(f"dim_extend is {self._dim_extend} already, and was to become {dim}")
        self._dim_extend, self._given_dim = checked, True

    def set_storage(self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None) -> Storage:
        """Put another storage in place of this one, and return this one; writing goes on behind what it holds."""
        storage = _made(storage, Storage, "storage")
        with self._guard, self._sampling:
            dim = self._dim_extend if self._given_dim else None
            dim_extend = _checked_dim(dim, storage)
            self._check_parts(storage, self._sampler, self._writer)
            self._writer.register_storage(storage)
            previous, self._storage = self._storage, storage
            previous.detach(self._ear)
            previous.generator = None
            self._dim_extend = dim_extend
            self._collate_fn = collate_fn or default_collate(storage)
            self._sampler.empty()
            self._forget_drawn()
            self._connect()
            self._introduce()
            if self.shared:
                self._share_rows()
        return previous

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Put another sampler in place of this one, and return this one."""
        sampler = _made(sampler, Sampler, "sampler")
        self._check_parts(self._storage, sampler, self._writer)
        with self._guard.hold(), self._sampling:
            previous, self._sampler = self._sampler, sampler
            previous.generator = None
            self._forget_drawn()
            self._connect_again()
            self._introduce()
        return previous

    def set_writer(self, writer: Writer) -> Writer:
        """Put another writer in place of this one, and return this one; a writer that is new goes on where it was."""
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
        return previous

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw from this generator from now on, everywhere."""
        self._adopt(generator)
        self._draw_from(generator)

    def _draw_from(self, generator: torch.Generator | None) -> None:
        self._rng = generator
        with self._sampling:
            self._hand_on(generator)

    def append_transform(self, transform: Any, *, invert: bool = False) -> Any:
        """Add a transform at the end, with `invert` the other way round; returns this buffer.

        SchemaError (a RuntimeError), with nothing changed, for a shared buffer and a transform that changes its state
        with every write and cannot share it.
        """
        with self._sampling:
            self._transform.append(as_transform(transform, invert=invert))
            self._transform_changed()
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Any:
        """Add a transform in front of the one at `index`, as `append_transform` does at the end; return this buffer."""
        with self._sampling:
            self._transform.insert(index, as_transform(transform, invert=invert))
            self._transform_changed()
        return self

    def _transform_changed(self) -> None:
        self._transform.set_rng(self._rng)
        if self._prefetcher is not None:
            self._prefetcher.restore(list(self._prefetcher))  # batches made with the old transform are made again

    def _connect_again(self) -> None:
        self._storage.detach(self._ear)
        self._connect()

    def _forget_drawn(self) -> None:
        self._ended = False
        if self._prefetcher is not None:
            self._prefetcher.clear()

    def mark_update(self, index: Any) -> None:
        """Tell the sampler that elements have changed; one that looks at priorities gives them the default one.

        `index` is anything that elements can be replaced at, or int64 `[n, ndim]`, their coordinates.
        """
        storage, index = self._storage, without_arrays(index)
        if isinstance(index, torch.Tensor) and index.dim() == 2 and 1 < storage.ndim == index.shape[1]:
            index = index.unbind(-1)  # as writers name elements; to a storage it would be a matrix of rows
        with self._sampling:
            self._sampler.mark_update(index, storage=storage)


class _Ear:
    """What a storage tells of its writes; it keeps no buffer alive."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: BufferParts) -> None:
        self._buffer = weakref.ref(buffer)

    def mark_update(self, index: Any) -> None:
        buffer = self._buffer()
        if buffer is not None:
            buffer.mark_update(index)


def _refuse_newer(name: str, given: dict[str, Any]) -> None:
    """Refuse arguments that are not built yet, and any that no buffer has."""
    for argument, value in given.items():
        if argument not in _NEWER:
            raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}")
        if value != _NEWER[argument]:
            raise UnsupportedError(f"{argument}={value!r} was given, which rbtool does not support yet: leave it out")


def _made(given: Any, kind: type[Any], name: str, default: Callable[[], Any] | None = None) -> Any:
    """Return a part, or make it; WrongKindError (a TypeError) for what is neither a part nor makes one."""
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
