"""Buffers as data sets of torch's `DataLoader`: recognises calls by a loader, and sends batches out of its workers.

torch's own transport opens a connection for each batch and passes a file descriptor, which takes about a millisecond.
Here a worker writes the tensors of a batch one after another into a slot of shared memory; the receiving process copies
them out in one piece and frees the slot for a later batch. Each process maps the memory only once.

    lane of worker 0   [ slot 0 | slot 1 | … ]     each slot has two numbers:
    lane of worker 1   [ slot 0 | slot 1 | … ]       `written`: the number of the last message in it
                                                     `taken`: the number of the last message that was copied out
                                                   it is free when the two are equal
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
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader, default_convert

from ..errors import NoLengthError, SchemaError, WorkerDiedError
from ..samplers.base import Sampler
from ..storages.base import Storage
from ..storages.pytree import NO_BATCH, TreeSpec, tree_spec_of

_ALIGNMENT = 64
_ZEROS = bytes(_ALIGNMENT)
_NUMPY = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64})
"""Common element types that NumPy also has, and whose tensors are never lazily conjugated."""
_Place: TypeAlias = tuple[int, torch.dtype, torch.Size]
"""A leaf in the bytes of a piece: its first byte, element type and shape."""


class NestLayout(NamedTuple):
    """How a nest is rebuilt from the bytes of a piece."""

    structure: TreeSpec
    places: list[_Place]

    def views(self, content: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as views of memory, uint8 `[size]`."""
        found = []
        for start, dtype, shape in self.places:
            size = shape.numel() * dtype.itemsize
            found.append(content[start : start + size].view(dtype).view(shape))
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle names and tuples instead of torch's own types, which take several times as long.
        return _layout, (self.structure, [(start, str(dtype)[6:], tuple(shape)) for start, dtype, shape in self.places])

    def nest(self, content: torch.Tensor) -> Any:
        """Return the nest, whose tensors are views of memory, uint8 `[size]`."""
        return self.structure.unflatten(iter(self.views(content)), NO_BATCH)

    def nest_in(self, content: bytearray) -> Any:
        """Return the nest, whose tensors are views of the bytes, and keep the bytes alive."""
        found = []
        for start, dtype, shape in self.places:
            count = shape.numel()
            part = torch.frombuffer(content, dtype=dtype, count=count, offset=start) if count else torch.empty(0)
            found.append(part.view(shape) if count else part.to(dtype).reshape(shape))
        return self.structure.unflatten(iter(found), NO_BATCH)


def _layout(structure: TreeSpec, places: Sequence[tuple[int, str, tuple[int, ...]]]) -> NestLayout:
    return NestLayout(structure, [(start, getattr(torch, name), torch.Size(shape)) for start, name, shape in places])


class NestPiece:
    """A nest of dense tensors that is sent as its layout, which is pickled, and one piece of `size` bytes."""

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
        """Return the piece for a nest that can be rebuilt exactly; None for anything else.

        These are tensordicts, dicts, lists and tuples of plain CPU tensors without gradients.
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
        """Yield the bytes of the tensors (by reference if they are contiguous) and the padding between them."""
        for leaf in self._leaves:
            plain = leaf.contiguous()
            if plain.dtype not in _NUMPY or plain.is_neg():
                plain = plain.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
            yield plain.numpy()
            if rest := -leaf.numel() * leaf.element_size() % _ALIGNMENT:
                yield _ZEROS[:rest]


def _is_dense(part: Any, leaves: list[torch.Tensor]) -> bool:
    """Append the tensors of a part of a nest; return whether they are dense and it has no other types of objects."""
    kind = type(part)
    if kind is torch.Tensor:
        leaves.append(part)
        return part.is_cpu and part.layout is torch.strided and not (part.requires_grad or part.is_quantized)
    if issubclass(kind, NonTensorData | NonTensorStack):
        return True
    if kind not in (TensorDict, dict, list, tuple) or (kind is TensorDict and any(part.names)):
        return False
    return all(_is_dense(child, leaves) for child in (part if kind in (list, tuple) else part.values()))


CAPACITY = 8 << 20
"""The bytes of a slot. For larger batches torch's transport is as fast, and copies nothing."""

_LANES, _SLOTS = 64, 8
"""How many workers can have slots at a time, and how many slots each has. Unused slots take no memory."""

_HEADER = -(-2 * _LANES * _SLOTS * 8 // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY

_KNOWN: weakref.WeakValueDictionary[int, SharedSlots] = weakref.WeakValueDictionary()
"""All `SharedSlots` of this process, by the token that messages carry."""


class Sent(NamedTuple):
    """Identifies a message: its slots, the slot and number in these, and its size."""

    token: int
    slot: int
    number: int
    size: int

    def received(self) -> torch.Tensor:
        """Return a copy of the bytes, uint8 `[size]`, and free the slot.

        Raises:
            WorkerDiedError: (a RuntimeError) the sender has ended, and the slot holds another worker's message already.
        """
        slots = _KNOWN.get(self.token)
        if slots is None:
            raise WorkerDiedError(
                "a batch arrived in a process that does not have the dataset of the worker that sent it"
            )
        return slots.receive(self)


class SharedSlots:
    """Slots of memory that this process shares with the workers it forks or spawns later.

    Each worker owns a lane of slots, and fills the first free one. It owns the lane by a file lock, which the system
    releases when the worker ends; the next worker then takes over the lane and its memory.

    A slot has two numbers, each with a single writer. The worker sets `written` before it writes a message; the
    receiver sets `taken` to the number of the message after copying it out. The slot is free when they are equal. After
    copying, the receiver also compares `written` with the expected number: if a new owner has taken over the lane
    meanwhile, it raises an error instead of returning another worker's bytes.

    Nobody waits for a slot: `claim` returns None if all are taken. The memory is in anonymous files, so that the limit
    of `/dev/shm` does not apply. It grows to the most that was in transit at once, and is freed with this object. A
    plain pickle or a copy has memory of its own.
    """

    def __init__(self) -> None:
        self._open(_anonymous_files(_HEADER, _LANES * _SLOTS * CAPACITY), secrets.randbits(63), os.getpid())

    def _open(self, descriptors: list[int], token: int, home: int) -> None:
        """Map the numbers; `descriptors` are the files of the numbers and of the slots, or an empty list."""
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
        """Return memory for a message of this worker, uint8 `[size]`, and the `Sent` to send once it is written.

        None if no slot is free, the message is too large, or this is the process that made the slots.
        """
        if not self._descriptors or size > CAPACITY or os.getpid() == self._home:
            return None
        try:
            lane = self._own_lane()
            content = None if lane is None else self._lane(lane)
        except OSError:  # the process may not map more memory
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
        """Return the lane of this process; take one without an owner if it has none yet."""
        pid = os.getpid()
        if self._own is not None and self._own[0] == pid:
            return self._own[1]
        for lane in range(_LANES):
            # A process loses such a lock when it closes any descriptor of the file, so this one stays open.
            try:
                fcntl.lockf(self._descriptors[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, lane)
            except (BlockingIOError, PermissionError):
                continue
            self._own, self._sent = (pid, lane), [0] * _SLOTS
            return lane
        return None

    def _lane(self, lane: int) -> torch.Tensor:
        """Return the memory of a lane, uint8 `[slots * capacity]`, which is mapped once."""
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
            raise WorkerDiedError("the worker that sent a batch has ended, and another one took over its memory")
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
    """Return descriptors of memory-only files of these sizes; an empty list if the system has none."""
    found: list[int] = []
    try:
        for size in sizes:
            found.append(os.memfd_create("rbtool-batches", os.MFD_CLOEXEC))
            os.ftruncate(found[-1], size)
    except (AttributeError, OSError):  # not Linux, or a limit on descriptors or file sizes
        for descriptor in found:
            os.close(descriptor)
        return []
    return found


LINE = "DataLoader(buffer, batch_size=None)"
_FETCHERS = "torch.utils.data._utils.fetch"  # not imported: torch may move this module
_MAKER = "create_fetcher"
_COUNTING = DataLoader.__len__.__code__


# Calls by a loader ----------------------------------------------------------------------------------


def fetcher_asking(dataset: object) -> Any:
    """Return the fetcher of the `DataLoader` that called a method of its data set; None for any other caller.

    Only the calling frame distinguishes a loader from a loop in user code. Frames of the data set itself are skipped,
    because a subclass may call the method of its parent.
    """
    # Start with the caller's frame: a frame that refers to itself is a reference cycle, see `ReplayBuffer.__len__`.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_locals.get("self") is dataset:
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != _FETCHERS:
        return None
    return frame.f_locals.get("self")


def serve(fetcher: Any, slots: SharedSlots | None = None) -> None:
    """Make a loader with the default collate function yield batches unchanged; workers send them in the slots."""
    if fetcher.collate_fn is default_convert:  # this function treats a tensordict as a dict, and fails
        fetcher.collate_fn = partial(_Message, slots=slots) if _sends_batches(sys._getframe(1)) else _as_it_is


def _sends_batches(caller: FrameType) -> bool:
    """Return whether the calling fetcher runs in a worker's loop, rather than in a loader that a worker uses."""
    frame: FrameType | None = caller
    while frame is not None and frame.f_globals.get("__name__") != _FETCHERS:
        frame = frame.f_back
    while frame is not None and (frame.f_globals.get("__name__") == _FETCHERS or frame.f_code.co_name == _MAKER):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_worker_loop"


def loader_counting(dataset: object, caller: FrameType) -> DataLoader[Any] | None:
    """Return the `DataLoader` over a data set whose `len()` was called; None for any other caller.

    torch returns `len(dataset)` as the length of such a loader, so that it has to be the number of batches.
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

    Raises:
        NoLengthError: (a TypeError) the sampler has no epochs.
        SchemaError: the loader cannot iterate over the buffer.
    """
    check_use(sampler, loader.num_workers, batches_again=loader.batch_size is not None)
    found = sampler.epoch_batches(storage, size)
    if found is None:
        raise NoLengthError(f"a loader over a buffer with a {type(sampler).__name__} has no len(): it never ends")
    return found


def check_use(sampler: Sampler, workers: int, *, batches_again: bool) -> None:
    """Raise SchemaError for a loader that would batch batches again, or whose workers would each draw a whole epoch."""
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
    """A batch on its way to another process; unpickling it gives the batch.

    The tensors of a nest are sent as one piece, of which the received tensors are views: in a slot if one is free,
    otherwise in shared memory with one file descriptor. Anything else is sent as torch does it. Everything is pickled
    in the worker's main thread, when this object is made: in the thread of the queue, an error would only be printed,
    and the loader would wait forever.
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
    found = pickle.loads(document)  # safe, as below: it comes from a worker of this program
    if content is None:
        return found
    return found.nest(pickle.loads(content) if isinstance(content, bytes) else content.received())
