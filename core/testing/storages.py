"""What every storage must do: subclass `StorageTests`, say how to make one, and pytest runs the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..storages import Storage
from ..storages.structure import structure_of
from .raising import error_of

__all__ = ["StorageTests", "same", "writable"]

ROWS = 10


def same(one: Any, other: Any) -> bool:
    """Tell whether two nests of tensors have the same leaves, bit for bit and type for type."""
    structure = structure_of(one)
    pairs = zip(structure.leaves(one), structure.leaves(other), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def writable(test: Callable[[Any], None]) -> Callable[[Any], None]:
    """Leave a test out for storages that cannot be written."""

    def run(self: StorageTests) -> None:
        if self.writes:
            test(self)

    run.__name__ = test.__name__
    return run


class StorageTests(ABC):
    """The contract of `Storage`. `make` returns a fresh storage of ten valid rows that all differ."""

    writes = True
    """Whether this storage can be written."""

    @abstractmethod
    def make(self) -> Storage:
        """Make a storage with ten valid rows, of which no two are alike."""

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

    def test_rows_that_are_not_there_are_index_errors(self) -> None:
        for index in (ROWS, -ROWS - 1, [0, ROWS], torch.tensor([-ROWS - 1])):
            assert isinstance(error_of(partial(self.make().get, index)), IndexError)

    def test_no_rows_can_be_asked_for(self) -> None:
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

    def test_state_goes_round(self) -> None:
        saved, other = self.make(), self.make()
        other.load_state_dict(saved.state_dict())
        assert same(other[:], saved[:])

    @writable
    def test_a_write_is_read_back_and_counted(self) -> None:
        storage = self.make()
        before, item = storage.revision, storage[torch.tensor([8, 5])]
        storage[torch.tensor([1, 0])] = item
        assert same(storage[[1, 0]], item)
        assert storage.revision > before
        assert storage._last_cursor is None
        storage.set(3, storage[torch.tensor([9])][0] if isinstance(item, torch.Tensor) else storage[9])
        assert same(storage[3], storage[9])
        assert storage._last_cursor == 3

    @writable
    def test_a_failed_write_changes_nothing(self) -> None:
        storage, untouched = self.make(), self.make()
        for cursor in (torch.tensor([0, 1, 2]), storage.shape[0] + 10**6):
            assert isinstance(error_of(partial(storage.set, cursor, storage[0:2])), RuntimeError)
        assert same(storage[:], untouched[:])
        assert (len(storage), storage._last_cursor) == (len(untouched), None)

    @writable
    def test_emptied_and_filled_again(self) -> None:
        storage, rows = self.make(), self.make()[:]
        before = storage.revision
        storage._empty()
        assert (len(storage), list(storage)) == (0, [])
        assert storage.revision > before
        assert isinstance(error_of(partial(storage.get, 0)), IndexError)
        storage.set(range(ROWS), rows)
        assert same(storage[:], rows)
