"""Readers get no half-written rows, from threads or processes, and do not wait for each other."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict
from waiting import HANG

from rbtool.core.buffers.processes import Guard, SharedGuard
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.samplers.prioritized_slices import PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.tensor import TensorStorage

# Rows that take a while to copy, of one number each: a row of two numbers was read while it was written.
WIDTH = 20_000


def is_whole(rows: torch.Tensor) -> bool:
    return bool((rows == rows[:, :1]).all())


def ring(storage: Callable[[int], object] = LazyTensorStorage, **arguments: object) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=storage(8), batch_size=4, **arguments)
    buffer.extend(torch.zeros(8, WIDTH))
    return buffer


def write_alone(*arguments: object) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    write(*arguments)


def write(buffer: ReplayBuffer, stop: object, first: int = 1, step: int = 1) -> None:
    number = first
    while not stop.is_set():
        buffer.extend(torch.full((4, WIDTH), float(number)))
        number += step


def read_until_much_was_written(buffer: ReplayBuffer) -> list[torch.Tensor]:
    """Sample fifty batches, and on until rows of ten writes were among them."""
    batches, seen = [], set()
    while len(batches) < 50 or len(seen) < 10:
        batches.append(buffer.sample())
        seen |= set(batches[-1][:, 0].tolist())
        batches = batches[-200:]
    return batches


@pytest.mark.parametrize("prefetch", [None, 2])
def test_threads_read_whole_rows(prefetch: int | None) -> None:
    buffer, stop = ring(prefetch=prefetch), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write, buffer, stop)
        batches = read_until_much_was_written(buffer)
        stop.set()
        writing.result()
    assert all(map(is_whole, batches))


def test_several_threads_read_and_write() -> None:
    buffer, stop = ring(), threading.Event()

    def read() -> bool:
        return all(is_whole(buffer.sample()) and is_whole(buffer[torch.arange(8)]) for _ in range(60))

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, buffer, stop, first, 2) for first in (1, 2)]
        readers = [pool.submit(read) for _ in range(2)]
        found = [reader.result() for reader in readers]
        stop.set()
        for writer in writers:
            writer.result()
    assert found == [True, True]
    assert is_whole(buffer[:])
    assert buffer.write_count % 8 == buffer.writer._cursor


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_write_and_read_whole_rows(method: str) -> None:
    context = multiprocessing.get_context(method)
    buffer, stop = ring(LazyMemmapStorage, shared=True), context.Event()
    writers = [context.Process(target=write_alone, args=(buffer, stop, first, 2)) for first in (1, 2)]
    for writer in writers:
        writer.start()
    batches = read_until_much_was_written(buffer)
    stop.set()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert all(map(is_whole, batches))
    assert is_whole(buffer[:])
    # Each write of either process is counted, and lies where the one before it ended.
    assert buffer.writer._cursor == buffer.write_count % 8
    assert buffer.write_count % 4 == 0


def hold_in_the_middle(buffer: ReplayBuffer, begun: object) -> None:
    with buffer._guard:
        begun.set()
        signal.pause()


def test_a_process_killed_in_the_middle_of_a_write_holds_up_nobody() -> None:
    context = multiprocessing.get_context("fork")
    buffer, begun = ring(LazyMemmapStorage, shared=True), context.Event()
    process = context.Process(target=hold_in_the_middle, args=(buffer, begun))
    process.start()
    assert begun.wait(HANG)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert is_whole(buffer.sample())
    buffer.extend(torch.ones(1, WIDTH))
    assert buffer._guard.sequence % 2 == 0


def test_readers_do_not_wait_for_each_other() -> None:
    guard, both = Guard(), threading.Barrier(2, timeout=HANG)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: guard.read(lambda _: both.wait(), None), range(2)))


def test_a_reader_does_not_hold_up_a_writer() -> None:
    guard, reads = Guard(), []

    def get(_: object) -> str:
        reads.append(1)
        if len(reads) == 1:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(write_once, guard).result(HANG)
        return "read"

    assert guard.read(get, None) == "read"
    assert len(reads) == 2, "what was read while it was written is read again"


def write_once(guard: Guard) -> None:
    with guard:
        pass


def test_a_reader_that_always_loses_makes_the_writers_wait() -> None:
    guard, reads = Guard(), []

    def get(_: object) -> int:
        reads.append(guard._depth)
        if not guard._depth:
            write_once(guard)
        return len(reads)

    assert guard.read(get, None) == len(reads)
    assert (reads[-1], set(reads[:-1])) == (1, {0})


def test_an_error_of_a_read_that_was_disturbed_is_no_error() -> None:
    guard, reads = Guard(), []

    def get(_: object) -> str:
        reads.append(1)
        if len(reads) == 1:
            write_once(guard)
            raise IndexError("half old, half new")
        return "read"

    assert guard.read(get, None) == "read"
    with pytest.raises(IndexError, match="no such row"):
        guard.read(lambda _: (_ for _ in ()).throw(IndexError("no such row")), None)


@pytest.mark.parametrize("made", [Guard, SharedGuard])
def test_writes_nest_and_may_read_what_they_write(made: type[Guard]) -> None:
    guard = made()
    with guard, guard:
        assert guard.sequence == 1
        assert guard.read(lambda index: index, 5) == 5
    assert guard.sequence == 2
    with guard.hold():
        assert guard.sequence == 2


def test_a_pickled_guard_is_one_of_its_own() -> None:
    guard = SharedGuard()
    with guard:
        copy = pickle.loads(pickle.dumps(guard))
        assert (copy.sequence, guard.sequence) == (0, 1)


def test_a_fork_in_the_middle_of_a_write_leaves_the_child_free() -> None:
    buffer = ring()
    with buffer._guard:
        process = multiprocessing.get_context("fork").Process(target=extend_and_check, args=(buffer,))
        forking = threading.Thread(target=process.start)  # a thread that does not hold the lock
        forking.start()
        forking.join(HANG)
        process.join(HANG)
    assert process.exitcode == 0


def extend_and_check(buffer: ReplayBuffer) -> None:
    torch.set_num_threads(1)
    buffer.extend(torch.ones(2, WIDTH))
    assert is_whole(buffer.sample())


def test_only_shared_buffers_lock_across_processes() -> None:
    buffer = ReplayBuffer(storage=TensorStorage(torch.arange(4)))
    assert (buffer.shared, type(buffer._guard)) == (False, Guard)
    buffer.share()
    assert (buffer.shared, type(buffer._guard)) == (True, SharedGuard)
    buffer.share(False)
    assert not buffer.shared
    with pytest.raises(ValueError, match="prefetches"):
        ReplayBuffer(storage=TensorStorage(torch.arange(4)), batch_size=2, prefetch=1).share()


def test_slices_of_a_shared_ring_take_the_lock_after_writes_only() -> None:
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(20), sampler=SliceSampler(slice_len=2, traj_key="id"), batch_size=4, shared=True
    )
    taken, acquire = [], buffer._guard.acquire
    buffer._guard.acquire = lambda: (taken.append(1), acquire())[1]  # type: ignore[method-assign]
    counts = []
    for first in (0, 7, 14, 21):
        buffer.extend(TensorDict({"id": torch.arange(first, first + 7) // 5, "n": torch.arange(first, first + 7)}, [7]))
        for _ in range(5):
            taken.clear()
            assert bool((buffer.sample()["n"].view(2, 2).diff(dim=1) == 1).all())
            counts.append(len(taken))
    assert counts == [1, 0, 0, 0, 0] * 4


def test_a_draw_that_was_disturbed_is_made_again_under_the_lock() -> None:
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(20), sampler=SliceSampler(slice_len=2, traj_key="id"), batch_size=4, shared=True
    )
    rows = TensorDict({"id": torch.zeros(20), "n": torch.arange(20)}, [20])
    buffer.extend(rows)
    buffer.sample()
    draw, drawn = buffer.sampler.draw_rows, []

    def draw_while_written(storage: object, size: int) -> object:
        found = draw(storage, size)
        drawn.append(found)
        if len(drawn) == 1:
            buffer.extend(rows)
        return found

    buffer.sampler.draw_rows = draw_while_written  # type: ignore[method-assign]
    batch = buffer.sample()
    assert len(drawn) == 2
    assert torch.equal(batch["n"], drawn[1][2]["n"])


@pytest.mark.parametrize("prefetch", [None, 2])
def test_draws_and_writes_of_a_sampler_that_follows_both_end(prefetch: int | None) -> None:
    # Draws held the sampler's lock while they waited for the rows', writes the other way round: both hung.
    def rows(count: int) -> TensorDict:
        done = (torch.arange(count) % 5 == 4)[:, None]
        return TensorDict({"episode": torch.arange(count) // 5, "next": {"done": done}}, [count])

    sampler = PrioritizedSliceSampler(200, 0.7, 0.5, slice_len=2)
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), sampler=sampler, batch_size=8, prefetch=prefetch)
    buffer.extend(rows(100))
    ended = threading.Event()

    def follow() -> None:
        while not ended.is_set():
            buffer.extend(rows(10))

    def draw() -> None:
        try:
            for _ in range(300):
                buffer.sample() if prefetch else buffer.draw(8)
        finally:
            ended.set()

    threads = [threading.Thread(target=work, daemon=True) for work in (follow, draw)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert not any(thread.is_alive() for thread in threads)
