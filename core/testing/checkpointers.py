"""The test suite for checkpointers. To run it, subclass `CheckpointerTests` and implement `make`."""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from ..buffers.replay_buffer import ReplayBuffer
from ..checkpointers.base import StorageCheckpointerBase
from ..errors import DatasetNotFoundError, FormatError, SchemaError, UsageError
from ..format import fs
from ..storages.base import Storage
from ..storages.cursors import last_row
from ..storages.lazy_tensor import LazyTensorStorage
from .rows import error_of

CAPACITY = 6
_FEW_BYTES = 64
"""The limit of file sizes with which a write is made to fail."""


def is_bitwise_equal(one: Any, other: Any) -> bool:
    """Return whether two tensordicts, tensors or lists of them have the same keys, dtypes, shapes and bits."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_bitwise_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_bitwise_equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if not isinstance(one, TensorDictBase):
        return type(one) is type(other) and bool(one == other)
    keys = set(one.keys(True, True))
    return (
        one.batch_size == other.batch_size
        and keys == set(other.keys(True, True))
        and all(is_bitwise_equal(one.get(key), other.get(key)) for key in keys)
    )


class CheckpointerTests(ABC):
    """The contract of `StorageCheckpointerBase`. `make` returns a new checkpointer.

    A suite for data other than tensordicts also overrides `storage` and `rows`.
    """

    hooks = True
    """Whether hooks receive the rows and may change them."""
    keeps_cursor = True
    """Whether the checkpointer restores the storage's cursor; a buffer restores it from its writer in any case."""

    @abstractmethod
    def make(self) -> StorageCheckpointerBase:
        """Make a new checkpointer."""

    def storage(self, capacity: int = CAPACITY) -> Storage:
        """Make an empty storage of `capacity` rows."""
        return LazyTensorStorage(capacity)

    def rows(self, first: int, count: int) -> Any:
        """Make steps that differ in every row and key, of several dtypes, with NaN and -0.0 among them."""
        numbers = torch.arange(first, first + count)
        state = torch.stack([numbers, -numbers], -1).double() / 3
        state[numbers % 4 == 1, 0], state[numbers % 4 == 2, 1] = float("nan"), -0.0
        done = (numbers % 3 == 2).unsqueeze(-1)
        after = TensorDict({"state": state + 1, "reward": numbers.float()[:, None] * 0.1, "done": done}, [count])
        root = {"state": state, "action": numbers.to(torch.int16), "done": torch.zeros_like(done)}
        return TensorDict({**root, "next": after}, [count])

    def filled(self, count: int, capacity: int = CAPACITY, first: int = 0) -> Storage:
        """Make a storage with a new checkpointer, and write `count` rows into its ring."""
        storage = self.storage(capacity)
        storage.checkpointer = self.make()
        data = self.rows(first, count)
        for row in range(count):
            storage.set(range(row % capacity, row % capacity + 1), data[row : row + 1])
        return storage

    def assert_loads(self, path: Path, saved: Storage, into: Storage) -> None:
        """Assert that `into`, loaded from `path` by a new checkpointer, has the rows and the cursor of `saved`."""
        into.checkpointer = self.make()
        into.loads(path)
        assert is_bitwise_equal(into[:], saved[:])
        if self.keeps_cursor:
            assert last_row(into.last_cursor) == last_row(saved.last_cursor)

    def assert_untouched(self, storage: Storage, rows: Any, cursor: int | None) -> None:
        """Assert that a storage still has these rows and this cursor."""
        assert is_bitwise_equal(storage[:], rows)
        assert last_row(storage.last_cursor) == cursor

    def test_rows_come_back_bit_for_bit(self, tmp_path: Path) -> None:
        for count in (1, 4, CAPACITY, CAPACITY + 2):
            saved = self.filled(count)
            saved.dumps(tmp_path / str(count))
            self.assert_loads(tmp_path / str(count), saved, self.storage())

    def test_old_rows_are_replaced(self, tmp_path: Path) -> None:
        saved = self.filled(3)
        saved.dumps(tmp_path / "saved")
        self.assert_loads(tmp_path / "saved", saved, self.filled(CAPACITY + 1, first=40))

    def test_a_larger_storage_takes_the_rows(self, tmp_path: Path) -> None:
        saved = self.filled(4)
        saved.dumps(tmp_path / "saved")
        self.assert_loads(tmp_path / "saved", saved, self.storage(2 * CAPACITY))

    def test_a_storage_that_is_too_small_is_unchanged(self, tmp_path: Path) -> None:
        self.filled(CAPACITY).dumps(tmp_path / "saved")
        small = self.filled(2, CAPACITY - 2, first=40)
        rows, cursor = _copied(small[:]), last_row(small.last_cursor)
        assert isinstance(error_of(partial(small.loads, tmp_path / "saved")), SchemaError)
        self.assert_untouched(small, rows, cursor)

    def test_saving_changes_nothing(self, tmp_path: Path) -> None:
        storage = self.filled(CAPACITY + 2)
        rows, cursor = _copied(storage[:]), last_row(storage.last_cursor)
        storage.dumps(tmp_path / "saved")
        self.assert_untouched(storage, rows, cursor)

    def test_later_writes_do_not_reach_the_checkpoint(self, tmp_path: Path) -> None:
        saved, same = self.filled(4), self.filled(4)
        saved.dumps(tmp_path / "saved")
        loaded = self.storage()
        self.assert_loads(tmp_path / "saved", same, loaded)
        for storage in (saved, loaded):
            storage.set(range(2), self.rows(70, 2))
        self.assert_loads(tmp_path / "saved", same, self.storage())

    def test_each_checkpoint_has_its_own_rows(self, tmp_path: Path) -> None:
        checkpointer = self.make()
        storages = [self.filled(4, first=first) for first in (0, 50)]
        for number, storage in enumerate(storages):
            checkpointer.dumps(storage, tmp_path / str(number))
        for number, storage in enumerate(storages):
            other = self.storage()
            checkpointer.loads(other, tmp_path / str(number))
            assert is_bitwise_equal(other[:], storage[:])

    def test_an_older_checkpoint_is_replaced(self, tmp_path: Path) -> None:
        for storage in (self.filled(CAPACITY), self.filled(2, first=30)):
            storage.dumps(tmp_path / "saved")
            self.assert_loads(tmp_path / "saved", storage, self.storage())

    def test_an_older_checkpoint_survives_a_write_that_fails(self, tmp_path: Path) -> None:
        resource = __import__("resource") if os.name == "posix" else None
        if resource is None:
            return
        older = self.filled(CAPACITY)
        older.dumps(tmp_path / "saved")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FEW_BYTES, limits[1]))
        try:
            error = error_of(partial(self.filled(CAPACITY, first=30).dumps, tmp_path / "saved"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert isinstance(error, OSError)
        assert [entry.name for entry in tmp_path.iterdir()] == ["saved"]
        self.assert_loads(tmp_path / "saved", older, self.storage())

    def test_damage_is_found_and_changes_nothing(self, tmp_path: Path) -> None:
        self.filled(CAPACITY).dumps(tmp_path / "saved")
        files = [file for file in (tmp_path / "saved").rglob("*") if file.is_file() and file.stat().st_size]
        largest = max(files, key=lambda file: file.stat().st_size)
        data = largest.read_bytes()
        flipped = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        storage = self.filled(3, first=40)
        rows, cursor = _copied(storage[:]), last_row(storage.last_cursor)
        for damaged in (flipped, data[:-1], b""):
            fs.replace_file(largest, damaged)
            assert isinstance(error_of(partial(storage.loads, tmp_path / "saved")), FormatError)
            self.assert_untouched(storage, rows, cursor)

    def test_an_empty_storage_comes_back_empty(self, tmp_path: Path) -> None:
        storage = self.storage()
        storage.checkpointer = self.make()
        error = error_of(partial(storage.dumps, tmp_path / "saved"))
        if isinstance(error, SchemaError):  # formats of episodes need at least one row
            return
        assert error is None
        loaded = self.filled(3)
        loaded.loads(tmp_path / "saved")
        assert len(loaded) == 0

    def test_other_folders_are_refused(self, tmp_path: Path) -> None:
        storage = self.filled(3)
        assert isinstance(error_of(partial(storage.loads, tmp_path / "nothing")), DatasetNotFoundError)
        (tmp_path / "other").mkdir()
        fs.write_file(tmp_path / "other" / "notes.txt", b"mine")
        assert isinstance(error_of(partial(storage.loads, tmp_path / "other")), FormatError)
        assert isinstance(error_of(partial(storage.dumps, tmp_path / "other")), UsageError)
        assert [file.name for file in (tmp_path / "other").iterdir()] == ["notes.txt"]

    def test_only_the_folder_is_written_to(self, tmp_path: Path) -> None:
        before, place = Path.cwd(), tmp_path / "cwd"
        place.mkdir()
        os.chdir(place)
        try:
            self.filled(3).dumps(tmp_path / "parent" / "saved")
        finally:
            os.chdir(before)
        assert not list(place.iterdir())
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cwd", "parent"]
        assert [entry.name for entry in (tmp_path / "parent").iterdir()] == ["saved"]

    def test_files_are_closed(self, tmp_path: Path) -> None:
        descriptors = Path("/proc/self/fd")
        if not descriptors.is_dir():
            return
        saved, loaded = self.filled(4), self.filled(1)
        saved.dumps(tmp_path / "first")  # opens files that stay open from then on, such as a random source
        loaded.loads(tmp_path / "first")
        before = len(list(descriptors.iterdir()))
        saved.dumps(tmp_path / "second")
        loaded.loads(tmp_path / "second")
        assert len(list(descriptors.iterdir())) == before

    def test_hooks_change_the_written_and_the_read_rows(self, tmp_path: Path) -> None:
        if not self.hooks:
            return
        rows = self.filled(4)[:]
        storage = self.filled(4)
        assert storage.checkpointer.register_save_hook(lambda data, path: data[:2]) is None
        storage.dumps(tmp_path / "saved")
        loaded = self.storage()
        loaded.checkpointer = self.make()
        loaded.checkpointer.register_load_hook(lambda data, out: data[1:])
        loaded.loads(tmp_path / "saved")
        assert is_bitwise_equal(loaded[:], rows[1:2])

    def test_a_pickled_checkpointer_reads_the_same(self, tmp_path: Path) -> None:
        saved, loaded = self.filled(4), self.storage()
        saved.dumps(tmp_path / "saved")
        pickle.loads(pickle.dumps(saved.checkpointer)).loads(loaded, tmp_path / "saved")
        assert is_bitwise_equal(loaded[:], saved[:])

    def test_a_buffer_continues_from_its_checkpoint(self, tmp_path: Path) -> None:
        for count in (CAPACITY - 2, CAPACITY + 2):
            buffers = []
            for _ in range(2):
                storage = self.storage()
                storage.checkpointer = self.make()
                buffers.append(ReplayBuffer(storage=storage))
            saved, loaded = buffers
            for row in range(count):
                saved.extend(self.rows(row, 1))
            saved.dumps(tmp_path / str(count))
            loaded.loads(tmp_path / str(count))
            for buffer in buffers:
                buffer.extend(self.rows(80, 2))
            assert is_bitwise_equal(loaded[:], saved[:])
            assert loaded.write_count == saved.write_count == count + 2


def _copied(rows: Any) -> Any:
    return list(rows) if isinstance(rows, list) else rows.apply(torch.clone)  # a tensordict's clone() loses -0.0
