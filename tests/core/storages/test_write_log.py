"""What a storage counts of its writes: rows of the ring, where it goes on, and everything else apart."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from processes import in_a_child
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.storages.base import Storage
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import LazyStackStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.storages.write_log import Change, Counter, WriteLog
from rbtool.core.testing.buffers import moved
from rbtool.core.writers.max_value import TensorDictMaxValueWriter
from rbtool.core.writers.round_robin import RoundRobinWriter

KINDS = [LazyTensorStorage, LazyMemmapStorage, LazyStackStorage]


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(float(count)), "y": torch.zeros(count)}, [count])


def filled(kind: type[Storage] = LazyTensorStorage, count: int = 6, capacity: int = 8) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=kind(capacity))  # type: ignore[call-arg]
    buffer.extend(rows(count))
    return buffer


@pytest.mark.parametrize("kind", KINDS)
def test_writes_of_the_ring_are_counted_each_behind_the_last(kind: type[Storage]) -> None:
    buffer = filled(kind)
    assert buffer.storage.log.now == (6, 6, 0)
    buffer.add(rows(1)[0])
    assert buffer.storage.log.now == (7, 7, 0)
    buffer.extend(rows(3))  # round the end
    assert buffer.storage.log.now == (10, 2, 0)
    buffer.extend(rows(21))  # more than there is room for
    assert buffer.storage.log.now == (31, 7, 0)
    buffer.extend(rows(1))
    assert buffer.storage.log.now == (32, 0, 0)


DEEDS: list[tuple[str, Callable[[ReplayBuffer], Any], Any]] = [
    ("a row by number", lambda buffer: buffer.storage.__setitem__(2, rows(1)[0]), slice(2, 3)),
    ("rows of a buffer", lambda buffer: buffer.__setitem__(slice(1, 3), rows(2)), slice(1, 3)),
    ("rows of choice", lambda buffer: buffer.writer.write_at(torch.tensor([4, 1]), rows(2)), [4, 1]),
    ("another length", lambda buffer: buffer.storage.set_length(3), None),
    ("a mark", lambda buffer: buffer.storage.mark_changed(), None),
]


@pytest.mark.parametrize(("deed", "expected"), [deed[1:] for deed in DEEDS], ids=[deed[0] for deed in DEEDS])
def test_other_changes_are_counted_apart(deed: Callable[[ReplayBuffer], Any], expected: Any) -> None:
    buffer = filled()
    deed(buffer)
    now = buffer.storage.log.now
    assert (now.rows, now.irregular > 0) == (6, True)
    changes = buffer.storage.log.since(0)
    assert changes is not None
    found = changes[-1].rows
    assert (found.tolist() if isinstance(found, torch.Tensor) else found) == expected


@pytest.mark.parametrize("deed", [deed[1] for deed in DEEDS[:3]], ids=[deed[0] for deed in DEEDS[:3]])
def test_the_ring_continues_after_a_write_elsewhere(deed: Callable[[ReplayBuffer], Any]) -> None:
    buffer = filled()
    deed(buffer)
    buffer.extend(rows(1))
    assert buffer.storage.log.now == (7, 7, 1)


def test_rows_of_a_change_are_those_of_the_write() -> None:
    """The caller may use its index again; so a checkpoint, and slices, are of the rows that were written."""
    storage, index = filled().storage, torch.tensor([4, 2])
    storage.set(index, rows(2))
    index.zero_()
    changes = storage.log.since(storage.log.now.irregular - 1)
    assert changes is not None
    assert changes[0].rows.tolist() == [4, 2]
    assert storage.last_cursor.tolist() == [4, 2]


def test_edits_of_entries_are_named() -> None:
    buffer = filled()
    buffer.set_("x", torch.ones(6))
    buffer.set_at_("y", torch.ones(2), slice(0, 2))
    buffer.update_({"x": torch.ones(6), "y": torch.ones(6)})
    assert buffer.storage.log.since(0) == [
        Change(keys=(("x",),)),
        Change(keys=(("y",),)),
        Change(keys=(("x",), ("y",))),
    ]


def test_a_write_that_fails_is_not_counted() -> None:
    buffer = filled()
    before = buffer.storage.log.now
    with pytest.raises(RuntimeError):
        buffer.extend(TensorDict({"x": torch.zeros(2, 3), "y": torch.zeros(2)}, [2]))
    assert buffer.storage.log.now == before


def test_an_emptied_storage_continues_at_the_first_row() -> None:
    buffer = filled()
    buffer.empty()
    assert buffer.storage.log.now.next_row == 0
    buffer.extend(rows(2))
    assert buffer.storage.log.now[:2] == (8, 2)
    wrapped = TensorStorage(rows(5))
    assert wrapped.log.now == (0, 0, 0)
    RoundRobinWriter().register_storage(wrapped)
    assert wrapped.log.now.next_row == 0


def test_rows_of_a_ranking_do_not_continue_the_ring() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter(rank_key="x"))
    buffer.extend(rows(4).flip(0))
    before = buffer.storage.log.now
    assert buffer.add(rows(1)[0] + 10) == 3  # in place of the smallest, which was written last
    assert buffer.storage.log.now.irregular == before.irregular + 1


@pytest.mark.parametrize("way", ["state", "folder"])
@pytest.mark.parametrize("capacity", [8, 11])
def test_a_load_continues_at_the_cursor_of_the_writer(way: str, capacity: int, tmp_path: Any) -> None:
    """The place of the newest row is in no checkpoint of a storage; the writer knows it."""
    buffer = filled(count=8)
    buffer.extend(rows(3))
    other = moved(buffer, ReplayBuffer(storage=LazyTensorStorage(capacity)), way, tmp_path / "saved")
    next_row = 3 if capacity == 8 else 8  # behind the rows, where there is room
    assert other.storage.log.now.next_row == next_row
    written = other.storage.log.now.rows
    other.extend(rows(2))
    assert other.storage.log.now[:2] == (written + 2, next_row + 2)


def test_old_changes_are_forgotten() -> None:
    log = WriteLog()
    for number in range(100):
        log.changed(Change(slice(number, number + 1)))
    assert log.since(0) is None
    assert log.since(98) == [Change(slice(98, 99)), Change(slice(99, 100))]
    assert log.since(100) == []


def test_scattered_rows_count_if_they_continue_the_ring() -> None:
    log = WriteLog()
    log.wrote(slice(0, 3), 5)
    log.wrote(torch.tensor([3, 4, 0, 1]), 5)
    assert log.now == (7, 2, 0)
    log.wrote(torch.tensor([2, 4]), 5)
    assert log.now == (7, 2, 1)
    log.wrote(torch.empty(0, dtype=torch.int64), 5)
    assert log.now == (7, 2, 1)


@pytest.mark.parametrize(("rows", "capacity"), [(slice(3, 7), 9), (torch.tensor([3, 4, 0, 1]), 5)])
def test_a_reader_sees_the_counts_before_a_write_or_after_it(rows: slice | torch.Tensor, capacity: int) -> None:
    """The next row without the rows shifted tables of trajectories for good: stacks had frames of another episode."""
    log = WriteLog()
    log.wrote(slice(0, 3), capacity)
    before, seen = log.now, []

    def read(frame: Any, event: str, argument: Any) -> Any:
        seen.append(log.now)  # in front of every line, as a reader in another process may
        return read

    known = sys.gettrace()
    sys.settrace(read)
    try:
        log.wrote(rows, capacity)
    finally:
        sys.settrace(known)
    assert log.now == (7, 7 % capacity, 0)
    assert set(seen) == {before, log.now}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda log: pickle.loads(pickle.dumps(log))])
def test_copies_keep_the_numbers_and_count_for_themselves(again: Callable[[WriteLog], WriteLog]) -> None:
    log = WriteLog()
    log.share_()
    log.wrote(slice(0, 3), 5)
    log.changed(Change(slice(0, 1)))
    other = again(log)
    log.changed()
    assert (other.now, log.now) == ((3, 3, 1), (3, 3, 2))
    assert other.since(0) is None


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [LazyTensorStorage, LazyMemmapStorage, partial(LazyTensorStorage, shared_init=True)])
def test_writes_of_another_process_are_counted(method: str, make: Callable[[int], Storage]) -> None:
    buffer = ReplayBuffer(storage=make(8), shared=True)
    buffer.extend(rows(6))
    buffer.storage.mark_changed()
    in_a_child(extend_and_replace, buffer, method=method)
    assert buffer.storage.log.now == (10, 2, 2)
    assert buffer.storage.log.since(1) is None  # which rows, only the other one knows


def extend_and_replace(buffer: ReplayBuffer) -> None:
    buffer.extend(rows(4))
    buffer.storage[1] = rows(1)[0]


def test_counters_have_64_bits() -> None:
    for shared in (False, True):
        counter = Counter((1 << 63) - 2, shared=shared)
        counter.value += 1
        assert counter.value == (1 << 63) - 1
        with pytest.raises(OverflowError, match="does not fit into 64 bits"):
            counter.value += 1
        assert counter.value == (1 << 63) - 1


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_child_continues_a_shared_counter(method: str) -> None:
    counter = Counter(1 << 40)
    assert counter.share_() is counter
    in_a_child(add_five, counter, method=method)
    assert (counter.value, counter.shared) == ((1 << 40) + 5, True)


def add_five(counter: Counter) -> None:
    counter.value += 5


def test_a_copy_of_a_counter_counts_for_itself_and_passes_no_queue() -> None:
    counter = Counter(3, shared=True)
    for other in (copy.deepcopy(counter), pickle.loads(pickle.dumps(counter))):
        other.value += 1
        assert (counter.value, other.value, other.shared) == (3, 4, False)
    with pytest.raises(RuntimeError, match="through inheritance"):
        ForkingPickler.dumps(counter)
