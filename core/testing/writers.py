"""The test suites for writers. To run one, subclass `WriterTests` or `RingTests` and implement `make`.

The tests run for every kind of data that the writer supports, and in storages with one or two dimensions that are
empty, partly filled, exactly full or wrapped around. Each pair of these properties occurs.
"""

from __future__ import annotations

import pickle
import tempfile
from abc import ABC, abstractmethod
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..buffers.replay_buffer import ReplayBuffer
from ..errors import SchemaError, UsageError
from ..samplers.trajectories import FixedBoundaries, trajectory_table
from ..storages.lazy_tensor import LazyTensorStorage
from ..storages.tensor import TensorStorage
from ..writers.base import Writer
from ..writers.round_robin import RoundRobinWriter
from .rows import (
    CAPACITY,
    FILLED,
    KINDS,
    LANES,
    Case,
    copied_leaves,
    error_of,
    layout_of,
    leaves_of,
    paired,
    restore,
    same_leaves,
    same_tensors,
    widened,
)


class CountingRecorder:
    """Records the elements that a storage reports, with the cursor and count of the writer at that time."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.marks: list[tuple[Any, int, int]] = []

    def mark_update(self, index: Any) -> None:
        """Record the index, the cursor and the count."""
        self.marks.append((index, self.writer.cursor, self.writer.write_count))


class WriterTests(ABC):
    """The contract of `Writer`. `make` returns a new writer for the `kinds` of data, in storages of `ndims` dimensions.

    Later rows have larger numbers in all leaves, so that a writer that keeps the best rows accepts all of them.
    """

    kinds: tuple[str, ...] = KINDS
    ndims: tuple[int, ...] = (1, 2)
    labels = False
    """Whether the data contain `"index"`."""
    shares = True
    """Whether other processes can write to the same storage."""

    @abstractmethod
    def make(self) -> Writer:
        """Make a new writer."""

    def rows(self, case: Case, first: int, count: int) -> Any:
        """Make rows as they are stored."""
        rows = case.rows(first, count)
        if self.labels:
            rows["index"] = torch.full(rows.batch_size, -1)
        return rows

    def storage(self, case: Case) -> TensorStorage:
        """Make an empty storage of `CAPACITY` rows for such data."""
        storage = TensorStorage(self.rows(case, 0, CAPACITY), ndim=case.ndim)
        storage.empty()
        return storage

    @classmethod
    def cases(cls) -> list[Case]:
        """Return the cases, in which each pair of properties occurs."""
        return [Case(*parts) for parts in paired(cls.kinds, cls.ndims, FILLED)]

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrise the tests that take a `case`."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases(), ids=str)

    def filled(self, case: Case) -> tuple[Writer, TensorStorage]:
        """Make a writer and a storage, and write the rows of the case."""
        writer, storage = self.make(), self.storage(case)
        writer.register_storage(storage)
        if count := FILLED[case.filled]:
            writer.extend(case.rows(0, count))
        return writer, storage

    def snapshot(self, writer: Writer, storage: TensorStorage) -> tuple[Any, ...]:
        """Copy everything that a failed write must not change."""
        rows = copied_leaves(storage[:]) if len(storage) else {}
        return rows, str(writer.state_dict()), len(storage), storage.log.now, str(storage.last_cursor)

    def assert_untouched(self, writer: Writer, storage: TensorStorage, before: tuple[Any, ...]) -> None:
        """Assert that nothing has changed since a snapshot."""
        now = self.snapshot(writer, storage)
        assert now[1:] == before[1:]
        assert same_tensors(now[0], before[0])

    def test_written_rows_are_found_at_their_index(self, case: Case) -> None:
        writer, storage = self.filled(case)
        for count in (1, 2, CAPACITY):
            rows = case.rows(100 * count, count)
            index = writer.extend(rows)
            assert index.dtype == torch.int64
            assert index.shape == ((count,) if case.ndim == 1 else (count * LANES, 2))
            found = storage.get(index if case.ndim == 1 else tuple(index.unbind(-1)))
            flat = {path: leaf.flatten(0, case.ndim - 1) for path, leaf in leaves_of(rows).items()}
            assert same_tensors(leaves_of(found), flat)

    def test_one_element_is_found_at_its_index(self, case: Case) -> None:
        writer, storage = self.filled(case)
        row = case.row(100)
        index = writer.add(row)
        if case.ndim == 1:
            assert type(index) is int
            assert same_leaves(storage[index], row)
        else:
            assert (index.dtype, index.shape) == (torch.int64, (LANES, 2))
            assert same_leaves(storage[int(index[0, 0])], row)
            assert index[:, 1].tolist() == list(range(LANES))

    def test_writes_are_counted(self, case: Case) -> None:
        writer, storage = self.filled(case)
        assert writer.write_count == FILLED[case.filled]
        writer.add(case.row(100))
        writer.extend(case.rows(101, 2))
        assert writer.write_count == FILLED[case.filled] + 3
        assert storage.shape[0] == min(FILLED[case.filled] + 3, CAPACITY)

    def test_the_data_of_the_caller_is_unchanged(self, case: Case) -> None:
        writer, _ = self.filled(case)
        rows, row = case.rows(100, 2), case.row(200)
        writer.extend(rows)
        writer.add(row)
        assert layout_of(rows) == layout_of(case.rows(100, 2))
        assert same_leaves(rows, case.rows(100, 2))
        assert layout_of(row) == layout_of(case.row(200))

    def test_later_changes_to_the_data_do_not_reach_the_storage(self, case: Case) -> None:
        writer, storage = self.filled(case)
        rows = case.rows(100, CAPACITY)
        writer.extend(rows)
        before = copied_leaves(storage[:])
        for leaf in leaves_of(rows).values():
            leaf.zero_()
        assert same_tensors(leaves_of(storage[:]), before)

    def test_a_failed_write_changes_nothing(self, case: Case) -> None:
        writer, storage = self.filled(case)
        recorder = CountingRecorder(writer)
        storage.attach(recorder)
        before = self.snapshot(writer, storage)
        for wrong, write in ((widened(case.rows(100, 2)), writer.extend), (widened(case.row(100)), writer.add)):
            names = layout_of(wrong)
            assert isinstance(error_of(partial(write, wrong)), RuntimeError)
            assert layout_of(wrong) == names
        self.assert_untouched(writer, storage, before)
        assert recorder.marks == []

    def test_attached_buffers_are_notified_after_a_write(self, case: Case) -> None:
        writer, storage = self.filled(case)
        recorder = CountingRecorder(writer)
        storage.attach(recorder)
        indices = [writer.extend(case.rows(100, 2)), writer.add(case.row(200))]
        assert len(recorder.marks) == 2
        (first, _, _), (second, cursor, count) = recorder.marks
        assert sorted(torch.as_tensor(first).flatten().tolist()) == sorted(indices[0].flatten().tolist())
        assert torch.equal(torch.as_tensor(second), torch.as_tensor(indices[1]))
        assert (cursor, count) == (writer.cursor, writer.write_count)

    def test_state_is_restored(self, case: Case) -> None:
        writer, storage = self.filled(case)
        with tempfile.TemporaryDirectory() as folder:
            writer.dumps(Path(folder) / "writer")
            for by_folder in (False, True):
                other, copy = self.make(), pickle.loads(pickle.dumps(storage))
                other.register_storage(copy)
                if by_folder:
                    other.loads(Path(folder) / "writer")
                else:
                    other.load_state_dict(writer.state_dict())
                assert (other.cursor, other.write_count) == (writer.cursor, writer.write_count)
                assert str(other.state_dict()) == str(writer.state_dict())
        assert torch.equal(other.extend(case.rows(100, 2)), writer.extend(case.rows(100, 2)))
        assert same_leaves(storage[:], copy[:])

    def test_an_unpickled_copy_continues_alike(self, case: Case) -> None:
        writer, storage = self.filled(case)
        writer.generator = torch.Generator()
        copy = pickle.loads(pickle.dumps(writer))
        assert copy.generator is None
        assert torch.equal(copy.extend(case.rows(100, 2)), writer.extend(case.rows(100, 2)))
        assert same_leaves(copy.storage[:], storage[:])

    def test_a_returned_index_is_a_copy(self, case: Case) -> None:
        writer, storage = self.filled(case)
        index = writer.extend(case.rows(100, 2))
        before = index.clone()
        writer.extend(case.rows(102, 2))
        assert torch.equal(index, before)
        state, rows = str(writer.state_dict()), copied_leaves(storage[:])
        index.fill_(-7)
        assert str(writer.state_dict()) == state
        assert same_tensors(leaves_of(storage[:]), rows)

    def test_overwritten_rows_are_counted(self, case: Case) -> None:
        storage, counter = self.storage(case), RoundRobinWriter(track_generations=True)
        counter.register_storage(storage)
        counter.extend(case.rows(0, CAPACITY) if not self.labels else self.rows(case, 0, CAPACITY))
        before = counter.generations_of(torch.arange(CAPACITY)).clone()
        writer = self.make()
        writer.register_storage(storage)
        written = torch.zeros(CAPACITY, dtype=torch.int64)
        for index in (writer.extend(case.rows(100, 2)), writer.add(case.row(102))):
            rows = torch.as_tensor(index).reshape(-1) if case.ndim == 1 else index[:, 0][::LANES]
            written.index_add_(0, rows, torch.ones_like(rows))
        assert torch.equal(counter.generations_of(torch.arange(CAPACITY)) - before, written)

    def test_a_buffer_continues_from_its_checkpoint(self, case: Case) -> None:
        for way in ("state", "folder"):
            buffers = [ReplayBuffer(storage=self.storage(case), writer=self.make(), dim_extend=0) for _ in range(2)]
            saved, other = buffers
            saved.extend(case.rows(0, 3))
            saved.extend(case.rows(3, 4))
            restore(other, saved, way)
            for buffer in buffers:
                buffer.extend(case.rows(100, 2))
            assert same_leaves(other[:], saved[:])
            assert other.write_count == saved.write_count == 9
            assert str(other.writer.state_dict()) == str(saved.writer.state_dict())

    def test_another_process_continues_the_counts(self) -> None:
        case = Case(self.kinds[0], 1, "empty")
        writer, storage = self.filled(case)
        if not self.shares:
            return
        storage.share()
        process = get_context("fork").Process(target=writer.extend, args=(case.rows(0, 3),))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert (writer.cursor, writer.write_count, len(storage)) == (3, 3, 3)
        writer.extend(case.rows(3, 1))
        assert same_leaves(storage[:], case.rows(0, 4))

    def test_an_emptied_writer_starts_again(self, case: Case) -> None:
        writer, storage = self.filled(case)
        for counted in (True, False):
            storage.empty()
            before = writer.write_count if counted else 0
            writer.empty(empty_write_count=not counted)
            assert writer.write_count == before
            index = writer.extend(case.rows(100, 1))
            assert int(index.flatten()[0]) == 0
            assert writer.write_count == before + 1
        assert writer.cursor == 1

    def test_counts_have_64_bits(self, case: Case) -> None:
        writer, _ = self.filled(case)
        writer.write_count = 2**31 - 1
        writer.extend(case.rows(100, 2))
        assert writer.write_count == 2**31 + 1

    def test_an_empty_batch_is_refused(self, case: Case) -> None:
        writer, storage = self.filled(case)
        before = self.snapshot(writer, storage)
        error = error_of(partial(writer.extend, case.rows(0, 0)))
        assert isinstance(error, RuntimeError)
        assert isinstance(error, IndexError)
        self.assert_untouched(writer, storage, before)

    def test_without_a_storage_nothing_can_be_written(self) -> None:
        case = Case(self.kinds[0], 1, "empty")
        for write, data in ((self.make().add, case.row(0)), (self.make().extend, case.rows(0, 2))):
            assert isinstance(error_of(partial(write, data)), UsageError)

    def test_an_invalid_state_is_refused(self, case: Case) -> None:
        writer, storage = self.filled(case)
        before = self.snapshot(writer, storage)
        good = writer.state_dict()
        for wrong in ({}, good | {"_cursor": -1}, good | {"_write_count": "x"}, good | {"_cursor": 1 << 63}):
            assert isinstance(error_of(partial(writer.load_state_dict, wrong)), SchemaError)
        self.assert_untouched(writer, storage, before)


class RingTests(WriterTests):
    """The contract of a writer that fills a storage row by row, and then starts again with the first row."""

    def test_rows_wrap_around(self, case: Case) -> None:
        writer, storage = self.filled(case)
        start = FILLED[case.filled]
        for count in (2, CAPACITY, 1, 2 * CAPACITY + 2):
            index = writer.extend(case.rows(start, count))
            expected = torch.arange(start, start + count) % CAPACITY
            rows = index if case.ndim == 1 else index[:, 0][::LANES]
            assert torch.equal(rows, expected)
            start += count
            assert (writer.cursor, writer.write_count) == (start % CAPACITY, start)
        newest = case.rows(start - CAPACITY, CAPACITY)
        slots = torch.arange(start - CAPACITY, start) % CAPACITY
        assert same_leaves(storage.get(slots), newest)

    def test_the_last_rows_of_a_batch_beyond_the_capacity_stay(self, case: Case) -> None:
        writer, storage = self.filled(case)
        count = 3 * CAPACITY + 1
        index = writer.extend(case.rows(100, count))
        assert len(index) == count * (1 if case.ndim == 1 else LANES)
        kept = index if case.ndim == 1 else index[:, 0][::LANES]
        assert same_leaves(storage.get(kept[-CAPACITY:]), case.rows(100 + count - CAPACITY, CAPACITY))
        assert len(storage) == storage.max_size

    def test_indices_of_two_dimensions_name_each_element(self, case: Case) -> None:
        writer, _ = self.filled(case)
        index = writer.extend(case.rows(100, 2))
        rows = [(FILLED[case.filled] + step) % CAPACITY for step in range(2)]
        expected = rows if case.ndim == 1 else [[row, lane] for row in rows for lane in range(LANES)]
        assert index.tolist() == expected

    def test_it_keeps_the_order_of_rows(self) -> None:
        assert self.make().keeps_order

    def test_a_storage_expects_the_next_write_at_the_loaded_cursor(self, case: Case) -> None:
        writer, storage = self.filled(case)
        writer.extend(case.rows(0, CAPACITY))
        for row in (3, 1):
            writer.load_state_dict(writer.state_dict() | {"_cursor": row})
            assert storage.log.now.next_row == writer.cursor == row

    def test_slices_follow_the_order_of_writes(self, case: Case) -> None:
        writer, storage = self.filled(case)
        start = FILLED[case.filled]
        for count in (1, 2, 1, CAPACITY, 3):
            if count > 1:
                writer.extend(case.rows(start, count))
            else:
                writer.add(case.row(start))
            start += count
            assert storage.log.now.next_row == writer.cursor == start % CAPACITY
            table = trajectory_table(storage, FixedBoundaries(np.zeros(storage.shape, bool)))
            table.refresh()
            rows = min(start, CAPACITY)
            assert (table.newest - table.oldest + 1, table.newest % CAPACITY) == (rows, (start - 1) % CAPACITY)
            assert table.runs()[2].tolist() == [rows] * (1 if case.ndim == 1 else LANES)

    def test_a_full_ring_continues_in_a_larger_storage(self, case: Case) -> None:
        if case.ndim > 1:
            return
        for way in ("state", "folder"):
            saved = ReplayBuffer(storage=self.storage(case), writer=self.make())
            other = ReplayBuffer(storage=LazyTensorStorage(3 * CAPACITY), writer=self.make())
            saved.extend(case.rows(0, CAPACITY + 3))
            restore(other, saved, way)
            assert same_leaves(other[:], case.rows(3, CAPACITY))
            index = other.extend(case.rows(CAPACITY + 3, 2))
            assert index.tolist() == [CAPACITY, CAPACITY + 1]
            assert same_leaves(other[:], case.rows(3, CAPACITY + 2))

    def test_a_load_without_a_state_continues_after_the_rows(self, case: Case) -> None:
        writer, storage = self.filled(case)
        writer.cursor, writer.write_count = 4, 77
        writer.resume_after()
        rows = storage.shape[0]
        assert (writer.cursor, writer.write_count) == (rows % CAPACITY, rows)

    def test_registered_to_another_storage_it_continues_after_its_rows(self, case: Case) -> None:
        writer, _ = self.filled(case)
        other = self.storage(case)
        other.set(range(2), self.rows(case, 50, 2))
        writer.register_storage(other)
        writer.extend(case.rows(100, 2))
        assert same_leaves(other[2:4], case.rows(100, 2))
        assert same_leaves(other[0:2], case.rows(50, 2))
