"""One writer and many readers of a shared ring, all killed now and then: every row read was once written whole.

A row has the number of its write, from which all its other bytes follow, and a checksum over all of them. Row `i` of
the ring has a number that is `i` modulo the capacity, and a slice has consecutive numbers of one episode.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from waiting import HANG

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.samplers.slices import SliceSampler
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage

FORK = multiprocessing.get_context("fork")
CAPACITY, EPISODE, LONGEST = 1_000, 13, 300


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    leaves = {
        "number": number,
        "image": (number[:, None] * torch.arange(1, 193)).to(torch.uint8),
        "observation": number[:, None] / torch.arange(1, 40),
        "episode": number // EPISODE,
    }
    return TensorDict(leaves | {"checksum": checksum(leaves), "done": (number + 1) % EPISODE == 0}, [count])


def checksum(leaves: Any) -> torch.Tensor:
    parts = [leaves[key] for key in ("number", "image", "observation", "episode")]
    return torch.cat([part.reshape(len(part), -1).view(torch.uint8).long() for part in parts], 1).sum(1)


def check(batch: TensorDict) -> None:
    assert torch.equal(checksum(batch), batch["checksum"])
    assert torch.equal(batch["number"] // EPISODE, batch["episode"])
    assert torch.equal(batch["number"] % CAPACITY, batch["index"].flatten())


def ring(storage: Callable[[int], Any], **arguments: Any) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=storage(CAPACITY), batch_size=32, shared=True, **arguments)
    buffer.extend(rows(0, 20))
    return buffer


def write(buffer: TensorDictReplayBuffer, done: Any) -> None:
    draw = random.Random(os.getpid())
    while True:
        count = draw.choice([1, 1, 7, 32, LONGEST])
        if count == 1:
            buffer.add(rows(buffer.write_count, 1)[0])
        else:
            buffer.extend(rows(buffer.write_count, count))
        done.value += 1


def read_any(buffer: TensorDictReplayBuffer) -> None:
    check(buffer.sample())
    named = torch.randint(0, min(len(buffer), CAPACITY), (8,))
    check(buffer[named])


def read_slices(buffer: TensorDictReplayBuffer) -> None:
    batch = buffer.sample()
    check(batch)
    numbers = batch["number"].view(-1, 4)
    assert bool((numbers.diff(dim=1) == 1).all()), numbers
    assert bool((batch["episode"].view(-1, 4).diff(dim=1) == 0).all())


def read(buffer: TensorDictReplayBuffer, once: Callable[..., None], done: Any, failed: Any) -> None:
    try:
        while True:
            once(buffer)
            done.value += 1
    except BaseException as error:
        failed.put(f"{once.__name__}: {type(error).__name__}: {error}")
        raise


class Workers:
    """Processes that are started again when they are killed."""

    def __init__(self, buffer: TensorDictReplayBuffer, readers: list[Callable[..., None]]) -> None:
        self.failed = FORK.SimpleQueue()
        self.counts = [FORK.RawValue("q") for _ in range(1 + len(readers))]
        self.works = [(write, (buffer, self.counts[0]))]
        pairs = zip(readers, self.counts[1:], strict=True)
        self.works += [(read, (buffer, once, count, self.failed)) for once, count in pairs]
        self.processes = [self._started(number) for number in range(len(self.works))]

    def _started(self, number: int) -> Any:
        work, arguments = self.works[number]
        process = FORK.Process(target=alone, args=(work, *arguments), daemon=True)
        process.start()
        return process

    def kill(self, number: int) -> None:
        os.kill(self.processes[number].pid, signal.SIGKILL)
        self.processes[number].join()

    def replace(self, number: int) -> None:
        self.kill(number)
        self.processes[number] = self._started(number)

    @property
    def operations(self) -> int:
        return sum(count.value for count in self.counts)


def alone(work: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    work(*arguments)


def torture(buffer: TensorDictReplayBuffer, readers: list[Callable[..., None]], operations: int, kills: int) -> None:
    """Kill so often, and go on until there were so many operations, some of each process, and two rings of rows."""
    workers, draw, killed = Workers(buffer, readers), random.Random(0), 0

    def is_enough() -> bool:
        done = killed == kills and workers.operations >= operations and all(count.value for count in workers.counts)
        return done and buffer.write_count > 2 * CAPACITY

    try:
        last, since = workers.operations, time.monotonic()
        while not is_enough() and workers.failed.empty():
            if workers.operations > last:
                last, since = workers.operations, time.monotonic()
            assert time.monotonic() - since < HANG, f"nothing happens after {last} operations and {killed} kills"
            time.sleep(draw.uniform(0.02, 0.1))
            if killed < kills:
                workers.replace(0 if draw.random() < 0.7 else draw.randrange(len(workers.works)))
                killed += 1
    finally:
        for number in range(len(workers.works)):
            workers.kill(number)
    assert workers.failed.empty(), workers.failed.get()


def sampler_of_slices() -> SliceSampler:
    return SliceSampler(slice_len=4, traj_key="episode")


READERS = {"uniform": (read_any, None), "slices": (read_slices, sampler_of_slices)}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("storage", "operations", "kills"),
    [
        (LazyMemmapStorage, 1_500, 8),
        pytest.param(LazyMemmapStorage, 100_000, 80, marks=pytest.mark.slow),
        pytest.param(LazyTensorStorage, 30_000, 30, marks=pytest.mark.slow),
    ],
)
def test_rows_are_whole_whoever_is_killed(
    kind: str, storage: Callable[[int], Any], operations: int, kills: int
) -> None:
    once, sampler = READERS[kind]
    buffer = ring(storage, sampler=sampler)
    torture(buffer, [once, once], operations, kills)
    check(buffer[torch.arange(CAPACITY)])
    numbers = np.sort(buffer[:]["number"].numpy())
    assert (numbers == np.arange(buffer.write_count - CAPACITY, buffer.write_count)).all(), "the newest rows are there"
