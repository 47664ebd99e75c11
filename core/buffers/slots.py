"""Memory through which loader workers pass batches: written in place, and copied out by the process that receives.

torch's own transport opens a connection for each batch and passes a file descriptor, which takes a millisecond. A slot
is mapped once by each process and used again for the next batches.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import torch

from ..errors import WorkerDiedError

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
