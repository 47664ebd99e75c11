"""The ring beside a model of it that writes one element after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.errors import SchemaError
from rbtool.core.storages.base import Storage
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.writers.round_robin import RoundRobinWriter


class Model:
    """Slots, cursor, count and generations of a ring, the slow way."""

    def __init__(self, rows: int) -> None:
        self.slots: list[int | None] = [None] * rows
        self.generations = [-1] * rows
        self.cursor = self.count = 0

    def write(self, value: int) -> int:
        slot = self.cursor
        self.slots[slot] = value
        self.generations[slot] += 1
        self.cursor = (slot + 1) % len(self.slots)
        self.count += 1
        return slot

    def empty(self, counted: bool) -> None:
        self.slots = [None] * len(self.slots)
        self.generations = [number + (number >= 0) for number in self.generations]
        self.cursor = 0
        self.count = 0 if counted else self.count


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 25)),
        st.tuples(st.just("add"), st.just(1)),
        st.tuples(st.just("fail"), st.integers(1, 3)),
        st.tuples(st.just("empty"), st.integers(0, 1)),
    ),
    max_size=12,
)
STORAGES = {
    "tensor": lambda rows: TensorStorage(torch.zeros(rows, dtype=torch.int64)),
    "lazy": LazyTensorStorage,
    "list": ListStorage,
}


def emptied(storage: Storage) -> Storage:
    storage.empty()
    return storage


@pytest.mark.parametrize("kind", STORAGES)
@given(rows=st.integers(1, 9), operations=OPERATIONS)
def test_the_ring_is_as_its_model(kind: str, rows: int, operations: list[tuple[str, int]]) -> None:
    storage, writer, model, value = STORAGES[kind](rows), RoundRobinWriter(track_generations=True), Model(rows), 0
    writer.register_storage(emptied(storage) if kind == "tensor" else storage)
    for name, count in operations:
        numbers = torch.arange(value, value + count)
        if name == "extend":
            assert writer.extend(numbers).tolist() == [model.write(number) for number in numbers.tolist()]
        elif name == "add":
            assert writer.add(numbers[0]) == model.write(value)
        elif name == "empty":
            storage.empty()
            writer._empty(empty_write_count=bool(count))
            model.empty(bool(count))
        elif kind != "list" and storage.initialized:
            with pytest.raises(SchemaError):
                writer.extend(numbers.float())
        value += count
        valid = [slot for slot in model.slots if slot is not None]
        assert [int(row) for row in storage] == valid
        assert (writer._cursor, writer._write_count) == (model.cursor, model.count)
        assert writer.generations_of(torch.arange(rows)).tolist() == model.generations


@given(rows=st.integers(1, 5), lanes=st.integers(1, 3), batches=st.lists(st.integers(1, 12), max_size=6))
def test_rows_of_two_dimensions_are_as_the_model_says(rows: int, lanes: int, batches: list[int]) -> None:
    storage, writer, model, value = LazyTensorStorage(rows * lanes, ndim=2), RoundRobinWriter(), Model(rows), 0
    writer.register_storage(storage)
    for count in batches:
        numbers = torch.arange(value, value + count).unsqueeze(1).expand(count, lanes)
        slots = [model.write(number) for number in range(value, value + count)]
        assert writer.extend(numbers).tolist() == [[slot, lane] for slot in slots for lane in range(lanes)]
        value += count
        valid = [slot for slot in model.slots if slot is not None]
        assert storage[:].tolist() == [[number] * lanes for number in valid]
