"""Buffers as the data set of torch's `DataLoader`: what a loader asks of them, and how batches leave its workers.

torch's own transport opens a connection for each batch and passes a file descriptor, which takes a millisecond. Here a
worker writes the tensors of a batch one behind the other into a slot of shared memory, which each process maps once and
which is used again for the next batches; the process that receives copies them out in one piece.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
import secrets
import sys
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import NonTensorData, TensorDict
from torch.utils.data import DataLoader, default_convert

from ..errors import NoLengthError, SchemaError, WorkerDiedError
from ..samplers.base import Sampler
from ..storages.base import Storage
from ..storages.pytree import NO_BATCH, TreeSpec, tree_spec_of

_ALIGNMENT = 64
_ZEROS = bytes(_ALIGNMENT)
_NUMPY = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64})
"""Common element types that NumPy has, too, and that have no bit which negates or conjugates."""
_Place: TypeAlias = tuple[int, torch.dtype, torch.Size]
"""Where a leaf is in the bytes of a piece."""


class NestLayout(NamedTuple):
    """How a nest is made of the bytes of a piece."""

    structure: TreeSpec
    places: list[_Place]

    def views(self, content: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in memory, uint8 `[size]`."""
        found = []
        for start, dtype, shape in self.places:
            size = shape.numel() * dtype.itemsize
            found.append(content[start : start + size].view(dtype).view(shape))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        # Names and tuples: torch takes several times as long for its own types.
        return _layout, (self.structure, [(start, str(dtype)[6:], tuple(shape)) for start, dtype, shape in self.places])

    def nest(self, content: torch.Tensor) -> Any:
        """Return the nest, whose tensors are views of memory, uint8 `[size]`."""
        return self.structure.unflatten(iter(self.views(content)), NO_BATCH)

    def nest_in(self, content: bytearray) -> Any:
        """Return the nest, whose tensors are views of the bytes, and keep them."""
        found = []
        for start, dtype, shape in self.places:
            count = shape.numel()
            part = torch.frombuffer(content, dtype=dtype, count=count, offset=start) if count else torch.empty(0)
            found.append(part.view(shape) if count else part.to(dtype).reshape(shape))
        return self.structure.unflatten(iter(found), NO_BATCH)


def _layout(structure: TreeSpec, places: Sequence[tuple[int, str, tuple[int, ...]]]) -> NestLayout:
    return NestLayout(structure, [(start, getattr(torch, name), torch.Size(shape)) for start, name, shape in places])


class NestPiece:
    """A nest of dense tensors that is to be one piece: its layout, to be pickled, and its `size` in bytes."""

    def __init__(self, structure: TreeSpec, leaves: Sequence[torch.Tensor]) -> None:
        self._leaves = leaves
        places: list[_Place] = []
        self.size = 0
        for leaf in leaves:
            places.append((self.size, leaf.dtype, leaf.shape))
            self.size += -(-leaf.numel() * leaf.element_size() // _ALIGNMENT) * _ALIGNMENT
        self.layout = NestLayout(structure, places)

    @classmethod
    def of(cls, nest: Any) -> NestPiece | None:
        """Return the layout of a nest that becomes the same nest again; None for anything else.

        Such are plain tensors on the CPU, without gradients, in tensordicts, dicts, lists and tuples.
        """
        found: list[torch.Tensor] = []
        with contextlib.suppress(SchemaError):
            if _is_dense(nest, found) and found:
                structure = tree_spec_of(nest)
                return cls(structure, structure.flatten(nest))
        return None

    def write(self, content: torch.Tensor) -> None:
        """Copy the tensors into memory, uint8 `[size]`."""
        for leaf, target in zip(self._leaves, self.layout.views(content), strict=True):
            target.copy_(leaf)

    def parts(self) -> Iterator[Any]:
        """Yield the bytes of the tensors, by reference where they are contiguous, and those between them."""
        for leaf in self._leaves:
            plain = leaf.contiguous()
            if plain.dtype not in _NUMPY or plain.is_neg():
                plain = plain.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
            yield plain.numpy()
            if rest := -leaf.numel() * leaf.element_size() % _ALIGNMENT:
                yield _ZEROS[:rest]


def _is_dense(part: Any, leaves: list[torch.Tensor]) -> bool:
    """Append the tensors of a part of a nest; return whether all of them are dense and the nest has no other types."""
    kind = type(part)
    if kind is torch.Tensor:
        leaves.append(part)
        return part.is_cpu and part.layout is torch.strided and not (part.requires_grad or part.is_quantized)
    if kind is NonTensorData:
        return True
    if kind not in (TensorDict, dict, list, tuple) or (kind is TensorDict and any(part.names)):
        return False
    return all(_is_dense(child, leaves) for child in (part if kind in (list, tuple) else part.values()))


CAPACITY = 8 << 20
"""How many bytes a slot has room for. Beyond, torch's transport is as fast, and copies nothing."""

_LANES, _SLOTS = 64, 8
"""How many workers can have slots at a time, and how many each. Slots that nobody writes take no memory."""

_HEADER = -(-2 * _LANES * _SLOTS * 8 // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY

_KNOWN: weakref.WeakValueDictionary[int, SharedSlots] = weakref.WeakValueDictionary()
"""All slots of this process, by the token that messages have."""


class Sent(NamedTuple):
    """Where the bytes of a message are."""

    token: int
    slot: int
    number: int
    size: int

    def received(self) -> torch.Tensor:
        """Return a copy of the bytes, uint8 `[size]`, and free the slot.

        WorkerDiedError (a RuntimeError) if the slot has another message by now, because its sender ended.
        """
        slots = _KNOWN.get(self.token)
        if slots is None:
            raise WorkerDiedError("a batch arrived in a process without the dataset of its worker")
        return slots.receive(self)


class SharedSlots:
    """Slots of memory that this process shares with the workers that it forks or spawns later.

    Each worker has a lane of slots of its own, of which it fills the first free one. The system releases its lock on
    the lane when it ends; the next worker then takes over the lane with its memory. A slot has two numbers, with one
    writer each: that of the message in it, and that of the last one that was copied out. It is free where they are
    equal. The first is set before bytes are written, and compared after they are copied: a message whose lane has a new
    owner is an error, and never other bytes.

    Nobody waits for a slot: where none is free, `claim` returns None. The memory is in anonymous files, which the limit
    on `/dev/shm` does not concern; it has the size of what was on its way at once, and is freed with this object. A
    plain pickle or a copy has memory of its own.
    """

    def __init__(self) -> None:
        self._open(_anonymous_files(_HEADER, _LANES * _SLOTS * CAPACITY), secrets.randbits(63), os.getpid())

    def _open(self, descriptors: list[int], token: int, home: int) -> None:
        """Map the numbers; the descriptors are those of the numbers and of the slots, or none."""
        self._descriptors, self._token, self._home = descriptors, token, home
        self._lanes: dict[int, torch.Tensor] = {}
        self._own: tuple[int, int] | None = None
        self._sent = [0] * _SLOTS
        for descriptor in descriptors:
            weakref.finalize(self, os.close, descriptor)
        if descriptors:
            numbers = memoryview(mmap.mmap(descriptors[0], _HEADER)).cast("q")
            self._written, self._taken = numbers[: _LANES * _SLOTS], numbers[_LANES * _SLOTS :]
            _KNOWN[token] = self

    # Sending ----------------------------------------------------------------------------------------

    def claim(self, size: int) -> tuple[torch.Tensor, Sent] | None:
        """Return memory for a message of this worker, uint8 `[size]`, and what to send once it is written.

        None if there is no slot for it, and in the process that made the slots.
        """
        if not self._descriptors or size > CAPACITY or os.getpid() == self._home:
            return None
        try:
            lane = self._own_lane()
            content = None if lane is None else self._lane(lane)
        except OSError:  # a limit on the memory of a process
            return None
        if lane is None or content is None:
            return None
        for place, sent in enumerate(self._sent):
            slot = lane * _SLOTS + place
            if sent in (0, self._taken[slot]):
                self._sent[place] = self._written[slot] = number = self._written[slot] + 1
                return content.narrow(0, place * CAPACITY, size), Sent(self._token, slot, number, size)
        return None

    def _own_lane(self) -> int | None:
        """Return the lane of this process; one that nobody has, if it has none."""
        pid = os.getpid()
        if self._own is not None and self._own[0] == pid:
            return self._own[1]
        for lane in range(_LANES):
            # Such a lock is lost once the process closes any descriptor of the file: that of the numbers stays open.
            try:
                fcntl.lockf(self._descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, lane)
            except (BlockingIOError, PermissionError):
                continue
            self._own, self._sent = (pid, lane), [0] * _SLOTS
            return lane
        return None

    def _lane(self, lane: int) -> torch.Tensor:
        """Return the memory of a lane, uint8 `[slots * capacity]`; mapped once."""
        if lane not in self._lanes:
            size = _SLOTS * CAPACITY
            mapped = mmap.mmap(self._descriptors[1], size, offset=lane * size)
            self._lanes[lane] = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._lanes[lane]

    # Receiving --------------------------------------------------------------------------------------

    def receive(self, sent: Sent) -> torch.Tensor:
        """Return a copy of the bytes of a message, uint8 `[size]`, and free its slot; see `Sent.received`."""
        lane, place = divmod(sent.slot, _SLOTS)
        content = self._lane(lane).narrow(0, place * CAPACITY, sent.size).clone()
        if self._written[sent.slot] != sent.number:
            raise WorkerDiedError("the worker that sent a batch ended, and another one took over its memory")
        self._taken[sent.slot] = sent.number
        return content

    # Copies -----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is None:
            return {}
        return {"descriptors": [*map(DupFd, self._descriptors)], "token": self._token, "home": self._home}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state:
            self._open([one.detach() for one in state["descriptors"]], state["token"], state["home"])
        else:
            self.__init__()  # type: ignore[misc]


def _anonymous_files(*sizes: int) -> list[int]:
    """Return the descriptors of files of these sizes that are in memory alone; none where there are no such files."""
    found: list[int] = []
    try:
        for size in sizes:
            found.append(os.memfd_create("rbtool-batches", os.MFD_CLOEXEC))
            os.ftruncate(found[-1], size)
    except (AttributeError, OSError):  # another system than Linux, a limit on descriptors or on the size of files
        for descriptor in found:
            os.close(descriptor)
        return []
    return found


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
    frame: FrameType | None = sys._getframe(
        1
    )  # not a local of its own frame: that is a cycle, see `ReplayBuffer.__len__`
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


def number_of_batches(sampler: Sampler, storage: Storage, size: int, loader: DataLoader[Any]) -> int:
    """Return how many batches of `size` elements an epoch has.

    NoLengthError (a TypeError) for a sampler without epochs, SchemaError for a loader that cannot iterate.
    """
    check_use(sampler, loader.num_workers, batches_again=loader.batch_size is not None)
    found = sampler.epoch_batches(storage, size)
    if found is None:
        raise NoLengthError(f"a loader of a buffer with a {type(sampler).__name__} has no len(): it never ends")
    return found


def check_use(sampler: Sampler, workers: int, *, batches_again: bool) -> None:
    """Raise SchemaError for a loader that would batch batches, or whose workers would each draw a whole epoch."""
    if batches_again:
        raise SchemaError(
            "a DataLoader cannot make batches of the batches of a buffer: they come from its sampler",
            hint=f"give the buffer its batch_size, and write {LINE}",
        )
    if workers > 1 and sampler.has_epochs:
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
