"""The ring beside a model of it that writes one element after the other."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import in_loops
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack, tensorclass

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError, UsageError
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.buffers import moved
from rbtool.core.testing.writers import RingTests
from rbtool.core.writers.base import ImmutableDatasetWriter
from rbtool.core.writers.max_value import TensorDictMaxValueWriter
from rbtool.core.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter


@in_loops
class TestRoundRobinWriter(RingTests):
    def make(self) -> RoundRobinWriter:
        return RoundRobinWriter()


@in_loops
class TestOfThisProcessAlone(RingTests):
    kinds = ("tensor",)
    shares = False

    def make(self) -> RoundRobinWriter:
        return RoundRobinWriter(compilable=True)


@in_loops
class TestWithGenerations(RingTests):
    kinds = ("tree",)

    def make(self) -> RoundRobinWriter:
        return RoundRobinWriter(track_generations=True)


@in_loops
class TestTensorDictRoundRobinWriter(RingTests):
    kinds = ("tensordict", "nested")
    labels = True

    def make(self) -> TensorDictRoundRobinWriter:
        return TensorDictRoundRobinWriter()


def ring(storage: object, **options: object) -> RoundRobinWriter:
    writer = RoundRobinWriter(**options)
    writer.register_storage(storage)
    return writer


def test_contiguous_rows_are_named_by_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    cursors, plain = [], TensorStorage.set
    monkeypatch.setattr(
        TensorStorage, "set", lambda self, cursor, data, **kw: (cursors.append(cursor), plain(self, cursor, data, **kw))
    )
    writer = ring(LazyTensorStorage(10))
    writer.extend(torch.arange(4))
    writer.extend(torch.arange(6))
    writer.add(torch.tensor(3))
    assert cursors == [range(4), range(4, 10), 0]


def test_write_at_leaves_the_cursor() -> None:
    storage = LazyTensorStorage(6)
    writer = ring(storage, track_generations=True)
    writer.extend(torch.arange(4))
    assert writer.write_at(torch.tensor([1, 3]), torch.tensor([50, 51])).tolist() == [1, 3]
    assert writer.write_at(1, torch.tensor(52)) == 1
    writer.write_at(torch.tensor([4]), torch.tensor([53]))
    writer.write_at(torch.tensor([1, 1]), torch.tensor([7, 8]))
    assert storage[:].tolist() == [0, 8, 2, 51, 53]
    assert (writer._cursor, writer._write_count) == (4, 10)
    assert writer.generations_of(torch.arange(6)).tolist() == [0, 4, 0, 1, 0, -1]


@pytest.mark.parametrize("rows", [torch.tensor([0, 9]), torch.tensor([5, 6]), 6])
def test_chosen_rows_beyond_the_capacity_or_a_gap_are_refused(rows: object) -> None:
    storage = LazyTensorStorage(6)
    writer = ring(storage, track_generations=True)
    writer.extend(torch.arange(4))
    with pytest.raises(RuntimeError):
        writer.write_at(rows, torch.zeros((2,) if isinstance(rows, torch.Tensor) else (), dtype=torch.int64))
    assert (writer._write_count, writer.generations_of(0).item()) == (4, 0)


def test_a_returned_index_belongs_to_the_caller() -> None:
    storage, chosen = LazyTensorStorage(4), torch.tensor([2, 1])
    writer = ring(storage)
    writer.extend(torch.arange(6)).zero_()
    assert torch.as_tensor(storage.last_cursor).tolist() == [0, 1, 2, 3, 0, 1]
    writer.write_at(chosen, torch.arange(2)).zero_()
    assert chosen.tolist() == [2, 1]
    assert torch.as_tensor(storage.last_cursor).tolist() == [0, 1, 2, 3, 0, 1]  # the ring continues where it was


def test_generations_of_coordinates_are_those_of_their_rows() -> None:
    writer = ring(LazyTensorStorage(12, ndim=2), track_generations=True)
    assert writer.generations_of(torch.tensor([[0, 1]])).tolist() == [-1]
    writer.extend(torch.arange(6).reshape(2, 3))
    assert writer.generations_of(torch.tensor([[0, 1], [3, 2]])).tolist() == [0, -1]
    assert writer.generations_of((torch.tensor([1, 2]), torch.tensor([0, 0]))).tolist() == [0, -1]


def test_generations_need_a_bounded_storage() -> None:
    with pytest.raises(UsageError, match="expected at most"):
        ring(ListStorage(), track_generations=True)


@pytest.mark.parametrize("capacity", [5, 9])
def test_a_state_loads_into_any_capacity_that_holds_it(tmp_path, capacity: int) -> None:
    writer = ring(LazyTensorStorage(7), track_generations=True)
    writer.extend(torch.arange(5))
    writer.dumps(tmp_path / "writer")
    other = ring(LazyTensorStorage(capacity), track_generations=True)
    other._storage.set(range(5), torch.arange(5))
    other.loads(tmp_path / "writer")
    assert other.generations_of(torch.arange(5)).tolist() == [0] * 5
    assert other.extend(torch.arange(1)).tolist() == [5 % capacity]


def test_generations_that_would_be_lost_are_an_error(tmp_path) -> None:
    writer = ring(LazyTensorStorage(7), track_generations=True)
    writer.extend(torch.arange(5))
    small = ring(LazyTensorStorage(4), track_generations=True)
    with pytest.raises(SchemaError, match="generations of 7 rows were saved, but this storage has 4"):
        small.load_state_dict(writer.state_dict())
    assert (small._cursor, small._write_count) == (0, 0)


def test_a_state_loaded_before_the_storage_is_known_is_kept(tmp_path) -> None:
    writer = ring(LazyTensorStorage(4), track_generations=True)
    writer.extend(torch.arange(6))
    other = RoundRobinWriter(track_generations=True)
    other.load_state_dict(writer.state_dict())
    storage = TensorStorage(writer._storage[:].clone())
    other.register_storage(storage)
    assert other._cursor == storage.log.now.next_row == 2
    assert other.generations_of(torch.arange(4)).tolist() == [1, 1, 0, 0]


def test_an_older_dump_is_replaced_whole(tmp_path) -> None:
    ring(LazyTensorStorage(4), track_generations=True).dumps(tmp_path)
    assert (tmp_path / "generation.memmap").stat().st_size == 32
    ring(LazyTensorStorage(4)).dumps(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["metadata.json"]


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        (None, DatasetNotFoundError),
        ("{", FormatError),
        ("[]", FormatError),
        ("{}", FormatError),
        ('{"cursor": -1, "write_count": 0}', FormatError),
        ('{"cursor": true, "write_count": 0}', FormatError),
        ('{"cursor": 1, "write_count": 1.5}', FormatError),
        ('{"cursor": 0, "write_count": 0, "rank_key": "x"}', FormatError),
        ('{"cursor": 0, "write_count": 0, "generation_shape": 4}', FormatError),
        ('{"cursor": 0, "write_count": 0, "generation_shape": [-4], "generation_dtype": "torch.int64"}', FormatError),
        ('{"cursor": 0, "write_count": 0, "generation_shape": [4], "generation_dtype": "torch.load"}', FormatError),
        ('{"cursor": 0, "write_count": 0, "generation_shape": [4], "generation_dtype": "int64"}', CorruptDataError),
    ],
)
def test_a_damaged_folder_changes_nothing(tmp_path, metadata: str | None, error: type[Exception]) -> None:
    if metadata is not None:
        (tmp_path / "metadata.json").write_text(metadata)
    writer = ring(LazyTensorStorage(4), track_generations=True)
    writer.extend(torch.arange(6))
    with pytest.raises(error):
        writer.loads(tmp_path)
    assert (writer._cursor, writer._write_count, writer.generations_of(0).item()) == (2, 6, 1)


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
    "tensor": lambda rows: TensorStorage(torch.zeros(rows).long()),
    "lazy": LazyTensorStorage,
    "list": ListStorage,
}


@pytest.mark.parametrize("kind", STORAGES)
@given(rows=st.integers(1, 9), operations=OPERATIONS)
def test_the_ring_is_that_of_the_model(kind: str, rows: int, operations: list[tuple[str, int]]) -> None:
    storage, writer, model, value = STORAGES[kind](rows), RoundRobinWriter(track_generations=True), Model(rows), 0
    storage.empty()
    writer.register_storage(storage)
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
def test_a_ring_of_two_dimensions_is_that_of_the_model(rows: int, lanes: int, batches: list[int]) -> None:
    storage, writer, model, value = LazyTensorStorage(rows * lanes, ndim=2), RoundRobinWriter(), Model(rows), 0
    writer.register_storage(storage)
    for count in batches:
        numbers = torch.arange(value, value + count).unsqueeze(1).expand(count, lanes)
        slots = [model.write(number) for number in range(value, value + count)]
        assert writer.extend(numbers).tolist() == [[slot, lane] for slot in slots for lane in range(lanes)]
        value += count
        valid = [slot for slot in model.slots if slot is not None]
        assert storage[:].tolist() == [[number] * lanes for number in valid]


@tensorclass
class Step:
    action: torch.Tensor


def labelling(storage: object) -> TensorDictRoundRobinWriter:
    writer = TensorDictRoundRobinWriter()
    writer.register_storage(storage)
    return writer


def zeros(*batch: int) -> TensorDict:
    return TensorDict({"x": torch.zeros(*batch, 2)}, list(batch))


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage])
@pytest.mark.parametrize("form", [TensorDict.clone, TensorDict.lock_, lambda rows: lazy_stack(list(rows.unbind(0)))])
def test_every_row_has_its_number_and_data_of_the_caller_none(kind: type, form: Any) -> None:
    storage = kind(4)
    writer = labelling(storage)
    writer.add(zeros(1)[0])
    for count in (2, 6):
        batch = form(zeros(count))
        writer.extend(batch)
        assert list(batch.keys()) == ["x"]
    assert [row["index"].item() for row in storage] == [0, 1, 2, 3]
    assert storage[0]["index"].dtype == torch.int64
    sampled = zeros(3).set("index", torch.tensor([7, 8, 9]))
    writer.extend(sampled)
    assert sampled["index"].tolist() == [7, 8, 9]
    assert [row["index"].item() for row in storage] == [0, 1, 2, 3]


def test_numbers_are_expanded_to_the_batch_dimensions() -> None:
    flat, deep = LazyTensorStorage(4), LazyTensorStorage(12, ndim=2)
    labelling(flat).extend(zeros(2, 3))
    writer = labelling(deep)
    writer.extend(zeros(2, 3))
    writer.add(zeros(3))
    assert flat[:]["index"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert deep[:]["index"].tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]


@pytest.mark.parametrize("kind", [LazyTensorStorage, ListStorage])
def test_nested_tensordicts_are_copied(kind: type) -> None:
    batch = zeros(3).set("next", zeros(3))
    storage = kind(4)
    labelling(storage).extend(batch) if kind is LazyTensorStorage else labelling(storage).add(batch)
    batch["next"]["x"] = torch.ones(3, 2)
    batch["next"]["more"] = torch.ones(3)
    kept = storage[0]["next"]
    assert list(kept.keys()) == ["x"]
    assert not kept["x"].any()
    assert list(batch.keys()) == ["x", "next"]


def test_rows_that_have_no_number_get_none() -> None:
    storage = TensorStorage(zeros(4))
    labelling(storage).extend(zeros(2) + 1)
    assert list(storage[:].keys()) == ["x"]
    storage.empty()
    labelling(storage).extend(zeros(2) + 1)
    assert storage[:]["x"].tolist() == [[1, 1], [1, 1]]
    classes = LazyTensorStorage(4)
    assert labelling(classes).extend(Step(torch.zeros(2, 3), batch_size=[2])).tolist() == [0, 1]
    assert type(classes[:]) is Step


@pytest.mark.parametrize("data", [torch.zeros(2), {"x": torch.zeros(2)}, [zeros(1)[0]]])
def test_only_tensordicts_are_labelled(data: object) -> None:
    storage = LazyTensorStorage(4)
    writer = labelling(storage)
    with pytest.raises(SchemaError, match="TensorDictRoundRobinWriter needs tensordicts, found a"):
        writer.extend(data)
    assert (len(storage), writer._cursor, writer._write_count) == (0, 0, 0)


ROWS = torch.arange(4)


def rewarded(*rewards: float) -> TensorDict:
    return TensorDict({"next": {"reward": torch.tensor(rewards)}}, [len(rewards)])


def tracking(storage: LazyTensorStorage) -> ReplayBuffer:
    return ReplayBuffer(storage=storage, writer=RoundRobinWriter(track_generations=True))


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictMaxValueWriter, ImmutableDatasetWriter])
def test_a_writer_that_does_not_track_generations_knows_none(writer: Any) -> None:
    storage = TensorStorage(rewarded(1, 2, 3, 4))
    made = writer()
    made.register_storage(storage)
    assert not made.tracks_generations
    assert made.generations_of(ROWS).tolist() == [-1] * 4
    assert made.generations_of(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3)


def test_slots_without_elements_have_no_generation() -> None:
    buffer = tracking(LazyTensorStorage(4))
    buffer.extend(rewarded(1, 2))
    assert buffer.writer.tracks_generations
    assert buffer.writer.generations_of(torch.tensor([[0, 3], [4, -1]])).tolist() == [[0, -1], [-1, -1]]
    assert buffer.writer.generations_of(99).item() == -1


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictMaxValueWriter])
def test_other_buffers_of_the_storage_continue_its_generations(writer: Any) -> None:
    storage = LazyTensorStorage(4)
    one = tracking(storage)
    one.extend(rewarded(1, 2))
    other = ReplayBuffer(storage=storage, writer=writer())
    other.extend(rewarded(5, 6, 7, 8))
    assert one.writer.generations_of(ROWS).tolist() == [1, 1, 0, 0]
    assert other.writer.generations_of(ROWS).tolist() == [-1] * 4
    third = tracking(storage)
    assert third.writer.generations_of(ROWS).tolist() == [1, 1, 0, 0]
    other.empty()
    assert third.writer.generations_of(ROWS).tolist() == [2, 2, 1, 1]


def test_another_writer_continues_the_generations() -> None:
    buffer = tracking(LazyTensorStorage(4))
    buffer.extend(rewarded(1, 2))
    buffer.set_writer(RoundRobinWriter())
    buffer.extend(rewarded(3, 4, 5))
    buffer.set_writer(RoundRobinWriter(track_generations=True))
    assert buffer.writer.generations_of(ROWS).tolist() == [1, 0, 0, 0]
    copy = pickle.loads(pickle.dumps(buffer))
    copy.extend(rewarded(6))
    assert copy.writer.generations_of(ROWS).tolist() == [1, 1, 0, 0]
    assert buffer.writer.generations_of(ROWS).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("way", ["state", "folder"])
@pytest.mark.parametrize("capacity", [8, 12])
def test_generations_of_several_dimensions_are_restored(tmp_path: Path, way: str, capacity: int) -> None:
    def buffer(size: int) -> ReplayBuffer:
        storage = LazyTensorStorage(size, ndim=2)
        return ReplayBuffer(storage=storage, dim_extend=0, writer=RoundRobinWriter(track_generations=True))

    saved = buffer(8)
    saved.extend(TensorDict({"a": torch.arange(12).reshape(6, 2)}, [6, 2]))
    loaded = moved(saved, buffer(capacity), way, tmp_path / "saved")
    for other in (loaded, moved(loaded, buffer(capacity), way, tmp_path / "again")):  # before it was written to
        generations = dict(zip(other["a"][:, 0].tolist(), other.writer.generations_of(ROWS).tolist(), strict=True))
        assert generations == {4: 0, 6: 0, 8: 1, 10: 1}
