from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError, UsageError
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.writers.round_robin import RoundRobinWriter


def ring(storage: object, **options: object) -> RoundRobinWriter:
    writer = RoundRobinWriter(**options)
    writer.register_storage(storage)
    return writer


def steps(rows: int, first: int = 0) -> TensorDict:
    return TensorDict({"x": torch.arange(first, first + rows)}, [rows])


def test_edge_01_1_a_failed_extend_leaves_length_and_counters() -> None:
    storage = LazyMemmapStorage(10)
    writer = ring(storage)
    writer.extend(steps(4))
    with pytest.raises(RuntimeError):
        writer.extend(TensorDict({"x": torch.zeros(3, 2, dtype=torch.int64)}, [3]))
    assert (len(storage), writer._cursor, writer._write_count) == (4, 4, 4)
    writer.extend(steps(2, 4))
    assert storage[:]["x"].tolist() == [0, 1, 2, 3, 4, 5]


def test_edge_01_2_counters_have_64_bits() -> None:
    writer = ring(LazyTensorStorage(3))
    writer.load_state_dict({"_cursor": 0, "_write_count": 2**40})
    writer.extend(torch.arange(1))
    assert writer._write_count == 2**40 + 1


def test_edge_01_3_another_storage_is_written_to() -> None:
    old, new = LazyTensorStorage(5), LazyTensorStorage(5)
    writer = ring(old)
    writer.extend(torch.arange(3))
    writer.register_storage(new)
    writer.extend(torch.arange(2) + 7)
    assert (old[:].tolist(), new[:].tolist()) == ([0, 1, 2], [7, 8])


def test_edge_01_8_a_list_is_elements_and_a_tuple_or_dict_is_a_nest() -> None:
    elements, nest = LazyTensorStorage(5), LazyTensorStorage(5)
    ring(elements).extend([{"a": torch.tensor(1)}, {"a": torch.tensor(2)}])
    ring(nest).extend(({"a": torch.arange(3)}, torch.arange(3)))
    assert elements[:]["a"].tolist() == [1, 2]
    assert nest[:][0]["a"].tolist() == [0, 1, 2]


def test_edge_01_9_missing_and_new_keys_are_refused_by_name() -> None:
    storage = LazyTensorStorage(5)
    writer = ring(storage)
    writer.extend(TensorDict({"a": torch.arange(2), "b": torch.arange(2)}, [2]))
    for keys, name in ((("a",), "b"), (("a", "b", "c"), "c")):
        with pytest.raises(SchemaError, match=name):
            writer.extend(TensorDict({key: torch.arange(2) for key in keys}, [2]))
    assert (len(storage), writer._cursor) == (2, 2)


def test_leaves_that_disagree_write_nothing() -> None:
    storage = LazyTensorStorage(5)
    writer = ring(storage)
    with pytest.raises(SchemaError, match="a has 3, b has 4"):
        writer.extend({"a": torch.zeros(3), "b": torch.zeros(4)})
    assert (len(storage), storage.initialized, writer._cursor) == (0, False, 0)


def test_a_bare_batch_beyond_an_empty_list_wraps() -> None:
    storage = ListStorage(10)
    assert ring(storage).extend(list(range(25))).tolist() == [number % 10 for number in range(25)]
    assert storage[:] == [20, 21, 22, 23, 24, 15, 16, 17, 18, 19]


def test_max_size_is_rounded_up_to_whole_rows() -> None:
    storage = LazyTensorStorage(10, ndim=2)
    writer = ring(storage)
    index = writer.extend(torch.arange(12).reshape(4, 3))
    assert (index.shape, storage.max_size, writer._cursor, writer._write_count) == ((12, 2), 12, 0, 4)
    writer.add(torch.tensor([-1, -2, -3]))
    assert storage[:][0].tolist() == [-1, -2, -3]


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


def test_a_writer_that_is_registered_to_rows_goes_on_behind_them() -> None:
    storage = LazyTensorStorage(5)
    storage.set(range(3), torch.arange(3))
    writer = ring(storage)
    assert writer.extend(torch.arange(1)).tolist() == [3]
    assert ring(TensorStorage(torch.arange(4)))._cursor == 0


def test_chosen_rows_are_written_and_the_cursor_stays() -> None:
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


def test_an_index_belongs_to_the_caller() -> None:
    storage, chosen = LazyTensorStorage(4), torch.tensor([2, 1])
    writer = ring(storage)
    writer.extend(torch.arange(6)).zero_()
    assert torch.as_tensor(storage.last_cursor).tolist() == [0, 1, 2, 3, 0, 1]
    writer.write_at(chosen, torch.arange(2)).zero_()
    assert chosen.tolist() == [2, 1]
    assert torch.as_tensor(storage.last_cursor).tolist() == [0, 1, 2, 3, 0, 1]  # the ring goes on where it was


def test_generations_of_coordinates_are_those_of_their_rows() -> None:
    writer = ring(LazyTensorStorage(12, ndim=2), track_generations=True)
    assert writer.generations_of(torch.tensor([[0, 1]])).tolist() == [-1]
    writer.extend(torch.arange(6).reshape(2, 3))
    assert writer.generations_of(torch.tensor([[0, 1], [3, 2]])).tolist() == [0, -1]
    assert writer.generations_of((torch.tensor([1, 2]), torch.tensor([0, 0]))).tolist() == [0, -1]


def test_generations_are_kept_only_when_asked_for() -> None:
    assert (RoundRobinWriter().tracks_generations, RoundRobinWriter(track_generations=True).tracks_generations) == (
        False,
        True,
    )
    assert ring(LazyTensorStorage(3)).generations_of(torch.arange(2)).tolist() == [-1, -1]
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
    other.register_storage(writer._storage)
    assert other._cursor == 2
    assert other.generations_of(torch.arange(4)).tolist() == [1, 1, 0, 0]


def test_an_older_dump_leaves_nothing_behind(tmp_path) -> None:
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
