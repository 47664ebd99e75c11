"""Buffers in several threads and processes: what they see of each other, and what a killed one leaves."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import ChildError, in_a_child
from tensordict import TensorDict
from waiting import HANG, run_threads

from rbtool.core.buffers.processes import Guard, SharedGuard
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import OutOfSpaceError, SchemaError
from rbtool.core.samplers.prioritized import PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler
from rbtool.core.storages import write_log
from rbtool.core.storages.columns import Columns, TensorFinder
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.storages.write_log import Counter

# What other processes see -------------------------------------------------------------------------


def extend(buffer: ReplayBuffer, first: int) -> list[int]:
    index = buffer.extend(torch.arange(first, first + 3))
    assert buffer[:][index].tolist() == [first, first + 1, first + 2]
    return index.tolist()


def made(storage: type, **arguments: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=storage(10), **arguments)
    buffer.extend(torch.arange(3))
    return buffer


@pytest.mark.parametrize(
    ("storage", "shared", "method"),
    [
        (LazyMemmapStorage, False, "fork"),
        (LazyMemmapStorage, True, "fork"),
        (LazyTensorStorage, True, "fork"),
        pytest.param(LazyMemmapStorage, False, "spawn", marks=pytest.mark.slow),
        pytest.param(LazyMemmapStorage, True, "spawn", marks=pytest.mark.slow),
        pytest.param(LazyTensorStorage, True, "spawn", marks=pytest.mark.slow),
    ],
)
def test_a_child_continues_the_same_ring(storage: type, shared: bool, method: str) -> None:
    buffer = made(storage, shared=shared)
    assert in_a_child(extend, buffer, 100, method=method) == [3, 4, 5]
    assert buffer[:].tolist() == [0, 1, 2, 100, 101, 102]
    assert in_a_child(extend, buffer, 200, method=method) == [6, 7, 8]
    assert extend(buffer, 300) == [9, 0, 1]
    assert (len(buffer), buffer.write_count, buffer.writer._cursor) == (10, 12, 2)


# The edge: length and cursor are shared where the rows are not.
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_forked_child_with_rows_of_its_own_leaves_the_parents_alone(storage: type) -> None:
    buffer = made(storage)
    assert in_a_child(extend_tensors, buffer, 100) == [3, 4, 5]
    assert (buffer[:].tolist(), len(buffer), buffer.write_count, buffer.writer._cursor) == ([0, 1, 2], 3, 3, 3)
    assert extend_tensors(buffer, 200) == [3, 4, 5]


def extend_tensors(buffer: ReplayBuffer, first: int) -> list[int]:
    return buffer.extend(list(torch.arange(first, first + 3))).tolist()


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_writes_that_nobody_would_see_are_refused(storage: type) -> None:
    buffer = ReplayBuffer(storage=storage(10), shared=True)
    if storage is ListStorage:
        buffer.extend([torch.tensor(1)])
    before = len(buffer)
    with pytest.raises(ChildError, match="SchemaError: this process has a private copy of the rows"):
        in_a_child(extend_tensors, buffer, 100)
    assert (len(buffer), buffer.write_count) == (before, before)


def test_a_buffer_that_is_shared_later_shares_its_next_storage_too() -> None:
    buffer = made(LazyTensorStorage)
    buffer.share()
    assert in_a_child(extend, buffer, 100) == [3, 4, 5]
    assert len(buffer) == 6
    buffer.set_storage(LazyTensorStorage(5))
    buffer.extend(torch.arange(1))
    assert in_a_child(extend, buffer, 100) == [1, 2, 3]
    assert buffer[:].tolist() == [0, 100, 101, 102]


@pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
def test_rows_that_a_spawned_child_could_not_share_are_refused(storage: type) -> None:
    buffer = ReplayBuffer(storage=storage(10))
    process = multiprocessing.get_context("spawn").Process(target=extend, args=(buffer, 1))
    with pytest.raises(RuntimeError):
        process.start()


def sample_many(buffer: TensorDictReplayBuffer) -> bool:
    return all(torch.equal(batch["a"], batch["index"]) for batch in (buffer.sample() for _ in range(20)))


def test_a_forked_child_samples() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, prefetch=2)
    buffer.extend(TensorDict({"a": torch.arange(10)}, [10]))
    buffer.sample()
    assert in_a_child(sample_many, buffer) is True


def test_a_copy_of_a_shared_buffer_is_shared_by_itself() -> None:
    buffer = made(LazyTensorStorage, shared=True)
    other = pickle.loads(pickle.dumps(buffer))
    assert in_a_child(extend, other, 100) == [3, 4, 5]
    assert (other[:].tolist(), buffer[:].tolist()) == ([0, 1, 2, 100, 101, 102], [0, 1, 2])


# No half-written rows, and no waiting for each other ----------------------------------------------


# Rows that take a while to copy, of one number each: a row of two numbers was read while it was written.
WIDTH = 20_000


def is_whole(rows: torch.Tensor) -> bool:
    return bool((rows == rows[:, :1]).all())


def ring(storage: Callable[[int], object] = LazyTensorStorage, **arguments: object) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=storage(8), batch_size=4, **arguments)
    buffer.extend(torch.zeros(8, WIDTH))
    return buffer


def alone(work: Callable[..., None], *arguments: Any) -> None:
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    work(*arguments)


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
    writers = [context.Process(target=alone, args=(write, buffer, stop, first, 2)) for first in (1, 2)]
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


def test_a_process_killed_in_the_middle_of_a_write_blocks_nobody() -> None:
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


def hold_until(buffer: ReplayBuffer, begun: Any, go_on: Any) -> None:
    with buffer._guard:
        begun.set()
        go_on.wait(HANG)


@pytest.mark.parametrize("storage", [LazyMemmapStorage, pytest.param(LazyTensorStorage, id="shared before")])
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_writes_that_overlap_without_a_lock_are_refused(storage: type, method: str) -> None:
    context = multiprocessing.get_context(method)
    buffer = ReplayBuffer(storage=storage(8), shared=storage is LazyTensorStorage)
    buffer.extend(torch.zeros(4, 3))
    buffer.share(False)  # the rows stay in shared memory
    begun, go_on = context.Event(), context.Event()
    process = context.Process(target=hold_until, args=(buffer, begun, go_on))
    process.start()
    assert begun.wait(HANG)
    for write in (
        partial(buffer.extend, torch.ones(2, 3)),
        buffer.empty,
        partial(buffer.__setitem__, 0, torch.ones(3)),
    ):
        with pytest.raises(SchemaError, match="another process writes to this buffer at the same time"):
            write()
    assert (len(buffer), buffer.write_count) == (4, 4)
    go_on.set()
    process.join()
    assert process.exitcode == 0
    buffer.extend(torch.ones(2, 3))
    assert len(buffer) == 6


def test_a_write_that_began_at_the_same_instant_as_another_is_found_at_its_end() -> None:
    guard, process = Guard(), Counter()
    guard.refuse_others(process)
    with pytest.raises(SchemaError, match="at the same time"), guard:
        process.value = os.getppid()  # as another process that also found 0
    with pytest.raises(OverflowError), guard:  # an error of the write itself stays
        process.value, process.value = os.getppid(), 1 << 63
    with guard:
        assert process.value == os.getpid()


def test_a_writer_that_was_killed_without_a_lock_refuses_nobody() -> None:
    context = multiprocessing.get_context("fork")
    buffer, begun = ring(LazyMemmapStorage), context.Event()
    process = context.Process(target=hold_in_the_middle, args=(buffer, begun))
    process.start()
    assert begun.wait(HANG)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    buffer.extend(torch.ones(1, WIDTH))


def test_readers_do_not_wait_for_each_other() -> None:
    guard, both = Guard(), threading.Barrier(2, timeout=HANG)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: guard.read(lambda _: both.wait(), None), range(2)))


def test_a_reader_does_not_block_a_writer_and_reads_again() -> None:
    guard, reads = Guard(), []

    def get(_: object) -> str:
        reads.append(1)
        if len(reads) == 1:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(write_once, guard).result(HANG)
        return "read"

    assert guard.read(get, None) == "read"
    assert len(reads) == 2


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


def test_an_error_is_raised_only_by_an_undisturbed_read() -> None:
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
        copy = pickle.loads(pickle.dumps(guard))
        assert (copy.sequence, guard.sequence) == (0, 1)  # a copy is free
    assert guard.sequence == 2
    with guard.hold():
        assert guard.sequence == 2


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


def shared_slices() -> ReplayBuffer:
    sampler = SliceSampler(slice_len=2, traj_key="id")
    return ReplayBuffer(storage=LazyMemmapStorage(20), sampler=sampler, batch_size=4, shared=True)


def test_slices_of_a_shared_ring_take_the_lock_after_writes_only() -> None:
    buffer = shared_slices()
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
    buffer = shared_slices()
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

    run_threads(follow, draw)


# Processes that are killed in the middle of a write -----------------------------------------------


FORK = multiprocessing.get_context("fork")
CAPACITY = 10


def rows(value: int, count: int) -> TensorDict:
    leaves = {"a": torch.full((count, 3), float(value)), "b": torch.full((count,), value), "half": torch.zeros(count)}
    leaves["half"] = leaves["half"].bfloat16() + value
    return TensorDict(leaves, [count])


def killed_ring(storage: Callable[[int], Any] = LazyMemmapStorage, **arguments: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=storage(CAPACITY), batch_size=4, shared=True, **arguments)
    buffer.extend(rows(0, 7))
    return buffer


def killed_in(act: Callable[[ReplayBuffer], Any], buffer: ReplayBuffer) -> None:
    """Run a write in another process, which is killed when the first column is written and the others are not."""
    process = FORK.Process(target=_write_half, args=(act, buffer))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _write_half(act: Callable[[ReplayBuffer], Any], buffer: ReplayBuffer) -> None:
    torch.set_num_threads(1)
    counting = type(Counter(0)).value.fset  # type: ignore[attr-defined]

    def end(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def copy_run(columns: Columns, start: int, count: int, sources: Any, **_: Any) -> None:
        width = columns.widths[0]
        ctypes.memmove(columns.plain[0].data_ptr() + start * width, int(sources.addresses[0]), count * width)
        end()

    def write_rows(columns: Columns, numbers: torch.Tensor, values: Any) -> None:
        columns.plain[0][numbers] = values[0]
        end()

    def count(counter: Counter, value: int) -> None:
        counting(counter, value)
        if value == CAPACITY:  # the storage was just full
            end()

    TensorFinder.copied = lambda *_: False  # type: ignore[method-assign]  # which copies all columns in one call
    Columns.copy_run, Columns.write_rows, Columns.write_cells = copy_run, write_rows, end  # type: ignore[method-assign]
    if act is fill_up:
        Columns.copy_run = lambda *_, **__: None  # type: ignore[method-assign]
        Counter.value = property(Counter.value.fget, count)  # type: ignore[attr-defined, method-assign]
    if act in (edit, edit_some):
        buffer.storage.put_back = end  # type: ignore[method-assign]
    act(buffer)


def fill_up(buffer: ReplayBuffer) -> None:
    buffer.extend(rows(9, 3))


def edit(buffer: ReplayBuffer) -> None:
    buffer.set_("b", torch.full((len(buffer),), 9))


def edit_some(buffer: ReplayBuffer) -> None:
    buffer.set_at_("b", torch.tensor([9, 9]), torch.tensor([1, 3]))


WRITES: dict[str, Callable[[ReplayBuffer], Any]] = {
    "fill up": fill_up,
    "extend": lambda buffer: buffer.extend(rows(9, 2)),
    "extend beyond the end": lambda buffer: buffer.extend(rows(9, 8)),
    "extend by more than there is room": lambda buffer: buffer.extend(rows(9, 25)),
    "add": lambda buffer: buffer.add(rows(9, 1)[0]),
    "a row": lambda buffer: buffer.__setitem__(2, rows(9, 1)[0]),
    "some rows": lambda buffer: buffer.__setitem__(torch.tensor([5, 1]), rows(9, 2)),
    "edit an entry": edit,
    "edit some of an entry": edit_some,
}


def state(buffer: ReplayBuffer) -> list[Any]:
    with buffer._guard.hold():  # the write that was killed had set the length already
        pass
    found = buffer[torch.arange(len(buffer))]
    return [len(buffer), buffer.write_count, buffer.writer.cursor, *(found[key].tolist() for key in ("a", "b", "half"))]


@pytest.mark.parametrize(
    ("name", "more", "storage"),
    [
        (name, more, (LazyMemmapStorage, LazyTensorStorage)[(number + more) % 2])
        for number, name in enumerate(WRITES)
        for more in (0, 3, 8)
        if name != "fill up"
    ]
    + [("fill up", 0, LazyMemmapStorage), ("fill up", 0, LazyTensorStorage)],
)
def test_a_write_that_was_killed_never_happened(name: str, more: int, storage: Callable[[int], Any]) -> None:
    buffer = killed_ring(storage)
    if more:
        buffer.extend(rows(1, more))
    before, changes = state(buffer), buffer.storage.log.now.irregular
    killed_in(WRITES[name], buffer)
    assert state(buffer) == before
    assert buffer.storage.log.now.irregular > changes, "samplers look at the rows again"
    assert buffer.extend(rows(2, 2)).tolist() == [before[2], (before[2] + 1) % CAPACITY]
    assert buffer.write_count == before[1] + 2


def test_several_killed_writes_never_happened() -> None:
    buffer = killed_ring()
    buffer.extend(rows(1, 9))
    before = state(buffer)
    for _ in range(3):
        killed_in(WRITES["extend beyond the end"], buffer)
        killed_in(WRITES["some rows"], buffer)
    assert state(buffer) == before


def test_a_load_that_was_killed_leaves_the_buffer_empty(tmp_path: Path) -> None:
    buffer, other = killed_ring(), killed_ring()
    other.extend(rows(5, 6))
    other.dumps(tmp_path / "saved")
    killed_in(lambda buffer: buffer.loads(tmp_path / "saved"), buffer)
    assert (buffer._guard.read(lambda _: len(buffer), None), buffer.write_count, buffer.writer.cursor) == (0, 0, 0)
    buffer.loads(tmp_path / "saved")
    assert state(buffer) == state(other)


def test_a_write_without_memory_for_the_old_rows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    buffer = killed_ring()
    buffer.extend(rows(1, 3))
    before = state(buffer)
    monkeypatch.setattr(write_log.fs, "write_parts", refuse)
    with pytest.raises(OutOfSpaceError, match="not enough memory"):
        buffer.extend(rows(2, 2))
    assert state(buffer) == before
    assert buffer.storage.journal is not None
    buffer.share(False)
    assert buffer.storage.journal is None


# One writer and many readers, all killed now and then ---------------------------------------------


STRESS_CAPACITY, EPISODE, LONGEST = 1_000, 13, 300


def stress_rows(first: int, count: int) -> TensorDict:
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
    assert torch.equal(batch["number"] % STRESS_CAPACITY, batch["index"].flatten())


def stress_ring(storage: Callable[[int], Any], **arguments: Any) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=storage(STRESS_CAPACITY), batch_size=32, shared=True, **arguments)
    buffer.extend(stress_rows(0, 20))
    return buffer


def stress_write(buffer: TensorDictReplayBuffer, done: Any) -> None:
    draw = random.Random(os.getpid())
    while True:
        count = draw.choice([1, 1, 7, 32, LONGEST])
        if count == 1:
            buffer.add(stress_rows(buffer.write_count, 1)[0])
        else:
            buffer.extend(stress_rows(buffer.write_count, count))
        done.value += 1


def read_any(buffer: TensorDictReplayBuffer) -> None:
    check(buffer.sample())
    named = torch.randint(0, min(len(buffer), STRESS_CAPACITY), (8,))
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
        self.works = [(stress_write, (buffer, self.counts[0]))]
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


def torture(buffer: TensorDictReplayBuffer, readers: list[Callable[..., None]], operations: int, kills: int) -> None:
    """Kill so often, and go on until there were so many operations, some of each process, and two rings of rows."""
    workers, draw, killed = Workers(buffer, readers), random.Random(0), 0

    def is_enough() -> bool:
        done = killed == kills and workers.operations >= operations and all(count.value for count in workers.counts)
        return done and buffer.write_count > 2 * STRESS_CAPACITY

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


READERS = {"uniform": (read_any, None), "slices": (read_slices, partial(SliceSampler, slice_len=4, traj_key="episode"))}


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("storage", "operations", "kills"),
    [
        (LazyMemmapStorage, 800, 5),
        pytest.param(LazyMemmapStorage, 100_000, 80, marks=pytest.mark.slow),
        pytest.param(LazyTensorStorage, 30_000, 30, marks=pytest.mark.slow),
    ],
)
def test_rows_are_whole_whoever_is_killed(
    kind: str, storage: Callable[[int], Any], operations: int, kills: int
) -> None:
    once, sampler = READERS[kind]
    buffer = stress_ring(storage, sampler=sampler)
    torture(buffer, [once, once], operations, kills)
    check(buffer[torch.arange(STRESS_CAPACITY)])
    newest = np.arange(buffer.write_count - STRESS_CAPACITY, buffer.write_count)
    assert np.array_equal(np.sort(buffer[:]["number"].numpy()), newest)
