"""The test suites for storages. To run one, subclass `StorageTests` and implement `make`.

For storages that start empty, subclass `StorageFillTests` and implement `make_empty`: its tests run for kinds of data,
numbers of dimensions and fill levels.
"""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..buffers.replay_buffer import ReplayBuffer
from ..samplers.slices import SliceSampler
from ..storages.base import Storage
from .rows import LANES, MarkRecorder, episode_steps, error_of, overwrite, paired, same, sample_rows, spoiled

ROWS = 10


def writable(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """Skip a test for storages that cannot be written."""

    def run(self: StorageTests) -> None:
        if self.writes:
            test(self)

    run.__name__ = test.__name__
    return run


class StorageTests(ABC):
    """The contract of `Storage`. `make` returns a new storage with ten valid rows that all differ."""

    writes = True
    """Whether this storage can be written."""

    @abstractmethod
    def make(self) -> Storage:
        """Make a storage with ten valid rows that all differ."""

    def test_counts_its_rows(self) -> None:
        storage = self.make()
        assert storage.shape[0] == ROWS
        assert len(storage) == storage.shape.numel()
        assert len(storage) <= storage.max_size
        assert storage.ndim == len(storage.shape)

    def test_iteration_yields_the_rows_in_order(self) -> None:
        storage = self.make()
        items = list(storage)
        assert len(items) == ROWS
        assert all(same(item, storage[row]) for row, item in enumerate(items))
        assert not any(same(items[0], item) for item in items[1:])

    def test_every_way_to_name_rows_gives_the_same_ones(self) -> None:
        storage = self.make()
        rows = [7, 2, 2, 9]
        expected = storage.get(torch.tensor(rows))
        mask = torch.zeros(ROWS, dtype=torch.bool)
        mask[[3, 4]] = True
        assert same(storage[rows], expected)
        assert same(storage[[-3, 2, -8, 9]], expected)
        assert same(storage[mask], storage[3:5])
        assert same(storage[range(3, 5)], storage[torch.tensor([3, 4])])
        assert same(storage[...], storage[:])
        assert same(storage[-1], storage[ROWS - 1])

    def test_unknown_rows_are_index_errors(self) -> None:
        for index in (ROWS, -ROWS - 1, [0, ROWS], torch.tensor([-ROWS - 1])):
            assert isinstance(error_of(partial(self.make().get, index)), IndexError)

    def test_slices_that_go_backwards_read_backwards(self) -> None:
        storage = self.make()
        assert same(storage[::-1], storage[list(range(ROWS))[::-1]])
        assert same(storage[8:2:-3], storage[[8, 5]])
        assert same(storage[2:8:-1], storage[0:0])

    def test_whole_numbers_of_every_type_name_rows(self) -> None:
        storage = self.make()
        expected = storage.get(torch.tensor([7, 2]))
        for name in ("int8", "uint8", "int32", "uint16", "uint64", ">i4"):
            assert same(storage[np.array([7, 2], name)], expected)
        for dtype in (torch.uint8, torch.int16, torch.int32):
            assert same(storage[torch.tensor([7, 2], dtype=dtype)], expected)
        assert same(storage[np.int32(7)], storage[7])
        assert same(storage[np.array(7)], storage[7])

    def test_invalid_indices_are_index_errors(self) -> None:
        storage = self.make()
        unknown = (None, 1.5, [1.5], torch.ones(2), np.ones(2), np.float64(1), [1j], "a", ["a"], True, {1: 2}, 10**30)
        for index in (*unknown, [[1, 2], [3]], [True] * (ROWS - 1), object()):
            error = error_of(partial(storage.get, index))
            assert isinstance(error, IndexError), index
            assert "\n" not in str(error)

    def test_an_empty_index_gives_no_rows(self) -> None:
        storage = self.make()
        assert same(storage[[]], storage[0:0])

    def test_contains(self) -> None:
        storage = self.make()
        assert 0 in storage
        assert ROWS - 1 in storage
        assert ROWS not in storage
        assert storage.contains(-1) is False

    def test_flattens_to_the_same_elements(self) -> None:
        flat = self.make().flatten()
        assert flat.ndim == 1
        assert len(flat) == len(self.make())

    def test_state_is_restored(self) -> None:
        saved, other = self.make(), self.make()
        other.load_state_dict(saved.state_dict())
        assert same(other[:], saved[:])

    def test_rows_read_by_number_are_copies(self) -> None:
        storage, untouched = self.make(), self.make()
        if not storage.returns_objects:
            overwrite(storage.get(torch.tensor([1, 2])))
            assert same(storage[:], untouched[:])

    @writable
    def test_attached_buffers_are_notified_of_rows_replaced_by_index(self) -> None:
        storage, recorder = self.make(), MarkRecorder()
        storage.attach(recorder)
        storage[3:5] = storage[[7, 8]]
        storage.set(3, storage[9])
        assert recorder.marks == [slice(3, 5)]
        storage.detach(recorder)
        storage[3:5] = storage[[7, 8]]
        assert len(recorder.marks) == 1

    @writable
    def test_a_write_is_read_back_and_counted(self) -> None:
        storage = self.make()
        before, item = storage.log.now, storage[torch.tensor([8, 5])]
        storage[torch.tensor([1, 0])] = item
        assert same(storage[[1, 0]], item)
        assert storage.log.now != before
        assert storage.last_cursor is None
        storage.set(3, storage[torch.tensor([9])][0] if isinstance(item, torch.Tensor) else storage[9])
        assert same(storage[3], storage[9])
        assert storage.last_cursor == 3

    @writable
    def test_a_write_backwards_is_read_backwards(self) -> None:
        storage = self.make()
        items = storage[[1, 3, 5]]
        storage[4:1:-1] = items
        assert same(storage[[4, 3, 2]], items)
        storage[1:4:-1] = storage[0:0]
        assert same(storage[4:1:-1], items)

    @writable
    def test_a_failed_write_changes_nothing(self) -> None:
        storage, untouched = self.make(), self.make()
        for cursor in (torch.tensor([0, 1, 2]), storage.shape[0] + 10**6):
            assert isinstance(error_of(partial(storage.set, cursor, storage[0:2])), RuntimeError)
        assert same(storage[:], untouched[:])
        assert (len(storage), storage.last_cursor) == (len(untouched), None)

    @writable
    def test_it_can_be_emptied_and_filled_again(self) -> None:
        storage, rows = self.make(), self.make()[:]
        before = storage.log.now
        storage.empty()
        assert (len(storage), list(storage)) == (0, [])
        assert storage.log.now != before
        assert isinstance(error_of(partial(storage.get, 0)), IndexError)
        storage.set(range(ROWS), rows)
        assert same(storage[:], rows)


CAPACITY = 8
FILLS = {"empty": [], "partly filled": [3, 2], "exactly full": [5, 3], "wrapped": [5, 3, 4]}
"""The number of rows in each write."""


class StorageFillTests(ABC):
    """The contract of a storage that starts empty, for every kind of data, `ndim` and fill level."""

    kinds: tuple[str, ...] = ("tensor", "tensordict", "nested tensordict", "pytree")
    ndims: tuple[int, ...] = (1, 2)
    saves = True
    """Whether the storage has a checkpointer."""

    alike = True
    """Whether all elements must have the same keys, dtypes and shapes."""

    @abstractmethod
    def make_empty(self, max_size: int, ndim: int) -> Storage:
        """Make an empty storage with room for `max_size` elements."""

    @classmethod
    def cases(cls) -> list[tuple[str, int, str]]:
        """Return the cases, in which each pair of properties occurs."""
        return paired(cls.kinds, cls.ndims, FILLS)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrise the tests that take a case."""
        if "case" in metafunc.fixturenames:
            cases = self.cases()
            metafunc.parametrize("case", cases, ids=[f"{kind}-{ndim}d-{fill}" for kind, ndim, fill in cases])

    def filled(self, case: tuple[str, int, str]) -> tuple[Storage, list[int]]:
        """Make the storage of a case; return it with the number of the row in each slot."""
        kind, ndim, fill = case
        storage = self.make_empty(CAPACITY * LANES ** (ndim - 1), ndim)
        held: dict[int, int] = {}
        written = 0
        for count in FILLS[fill]:
            rows = list(range(written, written + count))
            places = [row % CAPACITY for row in rows]
            storage.set(torch.tensor(places), sample_rows(kind, rows, ndim))
            held.update(zip(places, rows, strict=True))
            written += count
        return storage, [held[place] for place in range(len(held))]

    def read(self, storage: Storage, rows: list[int] | None = None) -> Any:
        """Read rows, all by default, as one nest of tensors."""
        return storage[:] if rows is None else storage.get(torch.tensor(rows, dtype=torch.int64))

    def holds(self, storage: Storage, case: tuple[str, int, str], rows: list[int]) -> bool:
        """Return whether a storage holds exactly these rows."""
        if len(storage) != len(rows) * LANES ** (case[1] - 1) or storage.shape[0] != len(rows):
            return False
        return not rows or same(self.read(storage), sample_rows(case[0], rows, case[1]))

    def test_written_rows_are_there(self, case: tuple[str, int, str]) -> None:
        storage, rows = self.filled(case)
        assert self.holds(storage, case, rows)
        assert storage.max_size == CAPACITY * LANES ** (case[1] - 1)
        assert (len(rows) - 1 in storage, len(rows) in storage) == (bool(rows), False)

    def test_rows_are_read_in_any_order(self, case: tuple[str, int, str]) -> None:
        storage, rows = self.filled(case)
        if not rows:
            assert isinstance(error_of(partial(storage.get, 0)), RuntimeError | IndexError)
            return
        order = [4, 0, 4, 1]
        expected = sample_rows(case[0], [rows[place] for place in order], case[1])
        assert same(self.read(storage, order), expected)
        assert isinstance(error_of(partial(self.read, storage, [len(rows)])), IndexError)

    def test_unfitting_data_are_refused_and_change_nothing(self, case: tuple[str, int, str]) -> None:
        storage, rows = self.filled(case)
        before = (storage.log.now, storage.last_cursor, storage.max_size)
        three, other = sample_rows(case[0], [50, 51, 52], case[1]), {"other": torch.zeros(3, LANES)}
        refused = [([0, 1], three), ([0, CAPACITY, 1], three), ([0, 1, 2], "text"), ([0, 1, 2], other)]
        for places, data in refused if rows else refused[:-1]:
            cursor = torch.tensor(places)
            assert isinstance(error_of(partial(storage.set, cursor, data)), RuntimeError)
            assert (storage.log.now, storage.last_cursor, storage.max_size) == before
            assert self.holds(storage, case, rows)

    def test_a_write_that_fails_in_the_middle_changes_nothing(self, case: tuple[str, int, str]) -> None:
        storage, rows = self.filled(case)
        before = (storage.log.now, storage.last_cursor)
        for bad in spoiled(*case[:2]) if rows and self.alike else ():
            assert isinstance(error_of(partial(storage.set, torch.tensor([1, 0]), bad)), RuntimeError)
            assert self.holds(storage, case, rows)
        assert (storage.log.now, storage.last_cursor) == before

    def test_written_data_is_copied(self, case: tuple[str, int, str]) -> None:
        storage, rows = self.filled(case)
        if not rows or storage.returns_objects:
            return
        for cursor, numbers in ((torch.tensor([0, 1]), [60, 61]), (range(1, 3), [62, 63])):
            data = sample_rows(case[0], numbers, case[1])
            storage.set(cursor, data)
            overwrite(data)
        assert self.holds(storage, case, [60, 62, 63, *rows[3:]])

    def test_the_write_log_follows_the_ring(self, case: tuple[str, int, str]) -> None:
        storage, _ = self.filled(case)
        written = sum(FILLS[case[2]])
        assert storage.log.now == (written, written % CAPACITY, 0)

    def test_other_changes_are_in_the_write_log(self, case: tuple[str, int, str]) -> None:
        storage, rows = self.filled(case)
        state, row = copy.deepcopy(storage.state_dict()), sample_rows(case[0], [70], case[1])
        acts: dict[str, Callable[[], Any]] = {
            "set": partial(storage.set, torch.tensor([1]), row),
            "replace": partial(storage.__setitem__, [1], row),
            "load": partial(storage.load_state_dict, state),
            "empty": storage.empty,
        }
        for name, act in acts.items() if rows else ():
            seen, cursor = storage.log.now, storage.last_cursor
            act()
            changes = storage.log.since(seen.irregular)
            assert changes, name
            assert storage.log.now.rows == seen.rows
            named = [None if change.rows is None else torch.arange(CAPACITY)[change.rows] for change in changes]
            if name in {"set", "replace"}:
                assert any(known is None or 1 in known for known in named)
            assert name != "replace" or storage.last_cursor is cursor
            assert name != "empty" or storage.last_cursor is None

    def test_slices_stay_inside_episodes(self) -> None:
        if "tensordict" not in self.kinds:
            return
        buffer, first = self._buffer(), 0
        for counts in ((7, 6, 9), (11, 4, 8, 7)):
            for count in counts:
                buffer.extend(episode_steps(first, count))
                first += count
                self._require_whole_slices(buffer)
            buffer[3:6] = episode_steps(int(buffer[3]["step"]), 3, every=2)
            self._require_whole_slices(buffer)
            other = self._buffer()
            other.extend(episode_steps(2000, 17))
            self._require_whole_slices(other)
            other.load_state_dict(buffer.state_dict())
            self._require_whole_slices(other)
            buffer.empty()

    def _buffer(self) -> ReplayBuffer:
        sampler = SliceSampler(slice_len=3, end_key=("next", "done"))
        return ReplayBuffer(storage=self.make_empty(20, 1), sampler=sampler, batch_size=96)

    def _require_whole_slices(self, buffer: ReplayBuffer) -> None:
        rows = buffer.sample()
        step, done = rows["step"].reshape(-1, 3), rows["next", "done"].reshape(-1, 3)
        assert bool((step.diff(dim=1) == 1).all())
        assert not bool(done[:, :2].any())

    def test_a_state_that_does_not_fit_changes_nothing(self, case: tuple[str, int, str]) -> None:
        storage, rows = self.filled(case)
        small = self.make_empty(LANES ** (case[1] - 1), case[1])
        small.set(torch.tensor([0]), sample_rows(case[0], [70], case[1]))
        before = small.log.now
        if len(rows) > 1:
            assert isinstance(error_of(partial(small.load_state_dict, storage.state_dict())), RuntimeError)
            assert self.holds(small, case, [70])
            assert small.log.now == before

    def test_it_is_emptied_and_filled_again(self, case: tuple[str, int, str]) -> None:
        storage, _ = self.filled(case)
        storage.empty()
        assert self.holds(storage, case, [])
        storage.set(torch.tensor([0, 1]), sample_rows(case[0], [60, 61], case[1]))
        assert self.holds(storage, case, [60, 61])

    def test_its_state_fills_another(self, case: tuple[str, int, str]) -> None:
        storage, rows = self.filled(case)
        other = self.make_empty(storage.max_size, case[1])
        other.load_state_dict(storage.state_dict())
        assert self.holds(other, case, rows)

    def test_a_pickle_is_a_copy(self, case: tuple[str, int, str]) -> None:
        storage, rows = self.filled(case)
        other = pickle.loads(pickle.dumps(storage))
        storage.set(torch.tensor([0, 1]), sample_rows(case[0], [60, 61], case[1]))
        assert self.holds(other, case, rows)
        other.set(torch.tensor([0, 1]), sample_rows(case[0], [70, 71], case[1]))
        assert self.holds(other, case, [70, 71, *rows[2:]])

    def test_a_checkpoint_fills_others(self, case: tuple[str, int, str], tmp_path: Path) -> None:
        if not self.saves:
            return
        storage, rows = self.filled(case)
        storage.dumps(tmp_path / "saved")
        for room in (storage.max_size, storage.max_size + LANES):
            other = self.make_empty(room, case[1])
            other.loads(tmp_path / "saved")
            assert self.holds(other, case, rows)
