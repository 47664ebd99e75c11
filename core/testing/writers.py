"""What every writer must do: subclass `WriterTests` or `RingTests`, say how to make one, and pytest runs the rest.

Each test runs for every kind of data the writer takes, in storages of one and of two dimensions that are empty,
partly filled, exactly full and written around.
"""

from __future__ import annotations

import pickle
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict

from ..errors import SchemaError, UsageError
from ..storages import Storage, TensorStorage
from ..writers import Writer
from .raising import error_of

__all__ = [
    "CAPACITY",
    "LANES",
    "Case",
    "Listener",
    "RingTests",
    "WriterTests",
    "leaves_of",
    "numbered_rows",
    "same_leaves",
]

CAPACITY = 5
"""Rows in the storages of the suites."""

LANES = 3
"""Elements in a row where a storage has two dimensions."""

Leaves: TypeAlias = dict[tuple[str, ...], torch.Tensor]

FILLED = {"empty": 0, "partly filled": 3, "exactly full": CAPACITY, "wrapped": CAPACITY + 3}
KINDS = ("tensor", "tensordict", "nested", "tree")


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of data, the dimensions of the storage, and how many rows were written before the test begins."""

    kind: str
    ndim: int
    filled: str

    def __str__(self) -> str:
        return f"{self.kind}, ndim={self.ndim}, {self.filled}"

    def rows(self, first: int, count: int) -> Any:
        """Make the rows numbered from `first` on."""
        return numbered_rows(self.kind, self.ndim, range(first, first + count))

    def row(self, number: int) -> Any:
        """Make one row, without its leading dimension."""
        return _first(self.rows(number, 1))


def numbered_rows(kind: str, ndim: int, numbers: range) -> Any:
    """Make rows whose leaves all differ, of a tensor, a tensordict, a nested one or a nest of dicts and tuples."""
    count, lanes = len(numbers), (LANES,) * (ndim - 1)
    base = torch.tensor(list(numbers), dtype=torch.int64).reshape(count, *[1] * (ndim - 1))
    base = (base * 10 + torch.arange(lanes[0]) if lanes else base * 10).expand(count, *lanes)
    wide = base.unsqueeze(-1) * 2.0 + torch.tensor([0.25, 0.5])
    if kind == "tensor":
        return wide
    if kind == "tree":
        return {"a": wide, "b": [base + 7, (base.to(torch.int16),)]}
    rows = TensorDict({"observation": wide, "score": base + 0.5}, [count, *lanes])
    if kind == "nested":
        rows["next"] = TensorDict({"reward": base.unsqueeze(-1).double(), "deep": {"x": base + 3}}, [count, *lanes])
    return rows


def leaves_of(data: Any) -> Leaves:
    """List the tensors of a nest by their paths, leaving out the `"index"` that some writers store."""
    return {path: leaf for path, leaf in _walk(data, ()) if path != ("index",)}


def _walk(data: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    if isinstance(data, torch.Tensor):
        yield path, data
        return
    for key, child in data.items() if hasattr(data, "items") else enumerate(data):
        yield from _walk(child, (*path, str(key)))


def same_leaves(one: Any, other: Any) -> bool:
    """Tell whether two nests have the same tensors in the same places, leaving out `"index"`."""
    return _equal(leaves_of(one), leaves_of(other))


def _equal(one: Leaves, other: Leaves) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[path], other[path]) for path in one)


def _first(data: Any) -> Any:
    if isinstance(data, torch.Tensor | TensorDict):
        return data[0]
    if isinstance(data, dict):
        return {key: _first(child) for key, child in data.items()}
    return type(data)(_first(child) for child in data)


class Listener:
    """A buffer, as far as a storage knows one: it notes what it hears, and what the writer counted by then."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.heard: list[tuple[Any, int, int]] = []

    def mark_update(self, index: Any) -> None:
        """Note the index, the cursor and the count."""
        self.heard.append((index, self.writer.cursor, self.writer.write_count))


class WriterTests(ABC):
    """The contract of `Writer`. `make` returns a fresh writer that takes the `kinds` of data in `ndims` dimensions.

    Later rows of the suite rank higher in all their leaves, so that writers which choose take them.
    """

    kinds: tuple[str, ...] = KINDS
    ndims: tuple[int, ...] = (1, 2)
    labels = False
    """Whether `"index"` is stored beside the data."""

    @abstractmethod
    def make(self) -> Writer:
        """Make a fresh writer."""

    def rows(self, case: Case, first: int, count: int) -> Any:
        """Make rows as they lie in the storage."""
        rows = case.rows(first, count)
        if self.labels:
            rows["index"] = torch.full(rows.batch_size, -1)
        return rows

    def storage(self, case: Case) -> Storage:
        """Make an empty storage of `CAPACITY` rows for such data."""
        storage = TensorStorage(self.rows(case, 0, CAPACITY), ndim=case.ndim)
        storage._empty()
        return storage

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Have pytest run the tests that take a `case` with every one of them."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", [Case(*parts) for parts in product(self.kinds, self.ndims, FILLED)], ids=str)

    def filled(self, case: Case) -> tuple[Writer, Storage]:
        """Make a writer and a storage into which it wrote what the case says."""
        writer, storage = self.make(), self.storage(case)
        writer.register_storage(storage)
        if count := FILLED[case.filled]:
            writer.extend(case.rows(0, count))
        return writer, storage

    def snapshot(self, writer: Writer, storage: Storage) -> tuple[Any, ...]:
        """Copy whatever a failed write must leave alone."""
        rows = _copied(storage[:]) if len(storage) else {}
        return rows, str(writer.state_dict()), len(storage), storage.revision, str(storage._last_cursor)

    def assert_untouched(self, writer: Writer, storage: Storage, before: tuple[Any, ...]) -> None:
        """Assert that a snapshot made now is like the one made before."""
        now = self.snapshot(writer, storage)
        assert now[1:] == before[1:]
        assert _equal(now[0], before[0])

    def test_what_was_written_is_found_at_its_index(self, case: Case) -> None:
        writer, storage = self.filled(case)
        for count in (1, 2, CAPACITY):
            rows = case.rows(100 * count, count)
            index = writer.extend(rows)
            assert index.dtype == torch.int64
            assert index.shape == ((count,) if case.ndim == 1 else (count * LANES, 2))
            found = storage.get(index if case.ndim == 1 else tuple(index.unbind(-1)))
            flat = {path: leaf.flatten(0, case.ndim - 1) for path, leaf in leaves_of(rows).items()}
            assert _equal(leaves_of(found), flat)

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

    def test_the_callers_data_stays_as_it_is(self, case: Case) -> None:
        writer, _ = self.filled(case)
        rows, row = case.rows(100, 2), case.row(200)
        writer.extend(rows)
        writer.add(row)
        assert _layout(rows) == _layout(case.rows(100, 2))
        assert same_leaves(rows, case.rows(100, 2))
        assert _layout(row) == _layout(case.row(200))

    def test_later_changes_to_the_callers_data_do_not_reach_the_storage(self, case: Case) -> None:
        writer, storage = self.filled(case)
        rows = case.rows(100, CAPACITY)
        writer.extend(rows)
        before = _copied(storage[:])
        for leaf in leaves_of(rows).values():
            leaf.zero_()
        assert _equal(leaves_of(storage[:]), before)

    def test_a_failed_write_changes_nothing(self, case: Case) -> None:
        writer, storage = self.filled(case)
        listener = Listener(writer)
        storage.attach(listener)
        before = self.snapshot(writer, storage)
        for wrong, write in ((_widened(case.rows(100, 2)), writer.extend), (_widened(case.row(100)), writer.add)):
            names = _layout(wrong)
            assert isinstance(error_of(partial(write, wrong)), RuntimeError)
            assert _layout(wrong) == names
        self.assert_untouched(writer, storage, before)
        assert listener.heard == []

    def test_attached_buffers_hear_of_a_write_when_it_is_done(self, case: Case) -> None:
        writer, storage = self.filled(case)
        listener = Listener(writer)
        storage.attach(listener)
        indices = [writer.extend(case.rows(100, 2)), writer.add(case.row(200))]
        assert len(listener.heard) == 2
        (first, _, _), (second, cursor, count) = listener.heard
        assert sorted(torch.as_tensor(first).flatten().tolist()) == sorted(indices[0].flatten().tolist())
        assert torch.equal(torch.as_tensor(second), torch.as_tensor(indices[1]))
        assert (cursor, count) == (writer.cursor, writer.write_count)

    def test_state_goes_round(self, case: Case) -> None:
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

    def test_a_pickle_goes_on_alike(self, case: Case) -> None:
        writer, storage = self.filled(case)
        writer.generator = torch.Generator()
        copy = pickle.loads(pickle.dumps(writer))
        assert copy.generator is None
        assert torch.equal(copy.extend(case.rows(100, 2)), writer.extend(case.rows(100, 2)))
        assert same_leaves(copy.storage[:], storage[:])

    def test_emptied_it_starts_again(self, case: Case) -> None:
        writer, storage = self.filled(case)
        for counted in (False, True):
            storage._empty()
            writer.empty(empty_write_count=not counted)
            before = writer.write_count
            index = writer.extend(case.rows(100, 1))
            assert int(index.flatten()[0]) == 0
            assert writer.write_count == before + 1
        assert writer.cursor == 1

    def test_counts_have_64_bits(self, case: Case) -> None:
        writer, _ = self.filled(case)
        writer.write_count = 2**31 - 1
        writer.extend(case.rows(100, 2))
        assert writer.write_count == 2**31 + 1

    def test_a_batch_has_elements(self, case: Case) -> None:
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

    def test_a_state_of_something_else_is_refused(self, case: Case) -> None:
        writer, storage = self.filled(case)
        before = self.snapshot(writer, storage)
        good = writer.state_dict()
        for wrong in ({}, good | {"_cursor": -1}, good | {"_write_count": "x"}, good | {"_cursor": 1 << 63}):
            assert isinstance(error_of(partial(writer.load_state_dict, wrong)), SchemaError)
        self.assert_untouched(writer, storage, before)


class RingTests(WriterTests):
    """The contract of a writer that fills row after row and then starts again."""

    def test_rows_go_round(self, case: Case) -> None:
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

    def test_of_a_batch_beyond_the_capacity_the_last_rows_stay(self, case: Case) -> None:
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

    def test_registered_to_another_storage_it_goes_on_behind_its_rows(self, case: Case) -> None:
        writer, _ = self.filled(case)
        other = self.storage(case)
        other.set(range(2), self.rows(case, 50, 2))
        writer.register_storage(other)
        writer.extend(case.rows(100, 2))
        assert same_leaves(other[2:4], case.rows(100, 2))
        assert same_leaves(other[0:2], case.rows(50, 2))


def _copied(data: Any) -> Leaves:
    return {path: leaf.clone() for path, leaf in leaves_of(data).items()}


def _layout(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.dtype, tuple(data.shape)
    return {str(k): _layout(v) for k, v in (data.items() if hasattr(data, "items") else enumerate(data))}


def _widened(data: Any) -> Any:
    """Make the last dimension of one leaf longer, which does not fit any more."""
    if isinstance(data, torch.Tensor):
        return torch.cat([data, data[..., :1]], -1)
    copied = data.copy()
    key = "a" if "a" in copied.keys() else "observation"  # noqa: SIM118 - a tensordict is no container of keys
    wide = copied[key]
    copied[key] = torch.cat([wide, wide[..., :1]], -1)
    return copied
