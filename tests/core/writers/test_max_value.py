"""A writer that keeps the elements with the highest rank, next to a model that compares all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import in_loops
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, tensorclass

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import (
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    MissingKeyError,
    SchemaError,
    UsageError,
)
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.writers import WriterTests
from rbtool.core.writers.max_value import TensorDictMaxValueWriter
from rbtool.core.writers.round_robin import RoundRobinWriter


class OfRankings(WriterTests):
    ndims = (1,)
    labels = True
    shares = False


@in_loops
class TestTensorDictMaxValueWriter(OfRankings):
    kinds = ("tensordict", "nested")

    def make(self) -> TensorDictMaxValueWriter:
        return TensorDictMaxValueWriter(rank_key="score")


@in_loops
class TestByANestedKey(OfRankings):
    kinds = ("nested",)

    def make(self) -> TensorDictMaxValueWriter:
        return TensorDictMaxValueWriter()


@tensorclass
class Scored:
    s: torch.Tensor


def top(capacity: int = 4, **options: object) -> TensorDictMaxValueWriter:
    writer = TensorDictMaxValueWriter(**{"rank_key": "s"} | options)
    writer.register_storage(LazyTensorStorage(capacity))
    return writer


def scored(values: list, dtype: torch.dtype | None = None) -> TensorDict:
    return TensorDict({"s": torch.tensor(values, dtype=dtype)}, [len(values)])


def kept(writer: TensorDictMaxValueWriter) -> list:
    return writer._storage[:]["s"].tolist()


def state(writer: TensorDictMaxValueWriter) -> tuple:
    rows = kept(writer) if len(writer._storage) else []
    return rows, writer._cursor, writer._write_count, str(writer.state_dict())


def test_the_highest_stay_and_the_index_tells_where() -> None:
    writer = top()
    batch = scored([5.0, 1.0, 9.0, 3.0, 7.0, 2.0])
    assert writer.extend(batch).tolist() == [0, -1, 2, 3, 1, -1]
    assert (kept(writer), writer._cursor, writer._write_count) == ([5, 7, 9, 3], 0, 5)
    assert writer.extend(scored([3.0, 3.0, 4.0])).tolist() == [-1, -1, 3]
    assert writer.extend(scored([0.0, 4.0])).tolist() == [-1, -1]
    assert writer.add(scored([100.0])[0]) == 3
    assert writer.add(scored([0.0])[0]) is None
    assert (kept(writer), writer._write_count) == ([5, 7, 9, 100], 7)
    assert writer._storage[:]["index"].tolist() == [0, 1, 2, 3]
    assert list(batch.keys()) == ["s"]


class Model:
    """The highest of all elements, one after the other, the slow way."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: list[tuple[float, int]] = []

    def offer(self, rank: float, element: int) -> None:
        if len(self.slots) < self.capacity:
            self.slots.append((rank, element))
            return
        lowest = min(range(self.capacity), key=lambda slot: (self.slots[slot][0], slot))
        if rank > self.slots[lowest][0]:
            self.slots[lowest] = (rank, element)


@given(
    capacity=st.integers(1, 6),
    batches=st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=9), max_size=6),
    singly=st.booleans(),
)
def test_the_ranking_keeps_what_the_model_keeps(capacity: int, batches: list[list[int]], singly: bool) -> None:
    writer, model, element = top(capacity), Model(capacity), 0
    for ranks in batches:
        numbers = torch.arange(element, element + len(ranks))
        batch = TensorDict({"s": torch.tensor(ranks) / 2, "n": numbers}, [len(ranks)])
        for rank, number in zip(ranks, numbers.tolist(), strict=True):
            model.offer(rank / 2, number)
        index = [writer.add(row) for row in batch] if singly else writer.extend(batch).tolist()
        held = [number for _, number in model.slots]
        if not singly:
            assert index == [held.index(number) if number in held else -1 for number in numbers.tolist()]
        assert writer._storage[:]["n"].tolist() == held
        assert writer._cursor == len(held) % capacity
        element += len(ranks)


@pytest.mark.parametrize(
    ("reduction", "ranks"),
    [("sum", [9, 8]), ("max", [6, 4]), ("min", [1, 0]), ("mean", [3, 8 / 3]), ("median", [2, 4])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_ranks_of_several_numbers_are_reduced(reduction: str, ranks: list[float], dtype: torch.dtype) -> None:
    writer = top(reduction=reduction)
    writer.extend(scored([[1, 2, 6], [4, 4, 0]], dtype))
    writer.add(scored([[1, 2, 6]], dtype)[0])
    found = sorted(writer._ranking._heap, key=lambda entry: entry[1])
    assert [rank for rank, _ in found] == pytest.approx([*ranks, ranks[0]])


def test_integers_of_64_bits_are_told_apart(tmp_path) -> None:
    writer = top(2)
    writer.extend(scored([2**60, 2**60 + 1]))
    assert writer.add(scored([2**60 + 1])[0]) == 0
    writer.dumps(tmp_path)
    other = top(2)
    other.loads(tmp_path)
    assert other._ranking.state().tolist() == [[2**60 + 1, 0], [2**60 + 1, 1]]


@pytest.mark.parametrize(
    "values", [[math.nan], [1.0, math.nan], [[1.0, math.nan], [2.0, 2.0]], [[math.inf, -math.inf]]]
)
def test_ranks_that_are_no_numbers_are_refused(values: list) -> None:
    writer = top()
    writer.extend(scored([3.0, 1.0]) if not isinstance(values[0], list) else scored([[3.0, 1.0]]))
    before = state(writer)
    with pytest.raises(RuntimeError, match=r"the rank (of element [01] )?is nan, expected a number"):
        writer.extend(scored(values))
    with pytest.raises(SchemaError, match="the rank is nan"):
        writer.add(TensorDict({"s": torch.tensor(math.nan)}, []))
    assert state(writer) == before


def test_a_failed_write_gives_free_places_back() -> None:
    writer = top(4)
    writer.extend(scored([3.0, 1.0]))
    before = state(writer)
    with pytest.raises(RuntimeError, match="score"):
        writer.extend(TensorDict({"s": torch.tensor([4.0, 2.0]), "score": torch.zeros(2)}, [2]))
    assert state(writer) == before
    assert writer.extend(scored([2.0, 5.0])).tolist() == [2, 3]


def test_infinite_ranks_are_ranks() -> None:
    writer = top(2)
    assert writer.extend(scored([-math.inf, math.inf, 0.0])).tolist() == [-1, 1, 0]
    assert sorted(kept(writer)) == [0, math.inf]


# TorchRL raises an AttributeError.
@pytest.mark.parametrize("kind", [KeyError, AttributeError])
def test_a_missing_rank_is_a_key_error_and_an_attribute_error(kind: type[Exception]) -> None:
    writer = TensorDictMaxValueWriter()
    writer.register_storage(LazyTensorStorage(4))
    with pytest.raises(kind) as raised:
        writer.extend(scored([1.0]))
    assert str(raised.value) == "the data has no tensor ('next', 'reward') to rank by, only s"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(3), "needs tensordicts, found a Tensor"),
        ([scored([1.0])[0]], "needs tensordicts, found a list"),
        (TensorDict({"s": torch.zeros(2, 3, 4)}, [2, 3, 4]), "at most 1 batch dimension"),
        (TensorDict({"s": torch.zeros(2, 0)}, [2]), "there is nothing to rank by"),
    ],
)
def test_data_that_cannot_be_ranked_are_a_runtime_error(data: object, message: str) -> None:
    writer = top()
    with pytest.raises(RuntimeError, match=message):
        writer.extend(data)
    assert state(writer)[:3] == ([], 0, 0)


def test_trajectories_and_tensorclasses_are_ranked_as_they_are() -> None:
    writer = top(1)
    rewards = torch.tensor([[1.0, 1.0], [5.0, -1.0], [0.0, 3.0]])
    assert writer.extend(TensorDict({"s": rewards}, [3, 2])).tolist() == [-1, 0, -1]
    assert kept(writer) == [[5, -1]]
    assert writer._storage[:]["index"].tolist() == [[0, 0]]
    assert writer.add(TensorDict({"s": torch.tensor([5.0, 2.0])}, [2])) == 0
    with pytest.raises(RuntimeError, match="at most 1 batch dimension"):
        writer.add(TensorDict({"s": torch.zeros(2, 2)}, [2, 2]))
    classes = top(1)
    assert classes.extend(Scored(s=torch.tensor([1.0, 2.0]), batch_size=[2])).tolist() == [-1, 0]
    assert type(classes._storage[:]) is Scored


def test_several_dimensions_and_other_reductions_are_value_errors() -> None:
    with pytest.raises(ValueError, match="needs a storage of one dimension, this one has 2"):
        TensorDictMaxValueWriter().register_storage(LazyTensorStorage(4, ndim=2))
    with pytest.raises(ValueError, match="reduction is 'product', expected one of sum, mean"):
        TensorDictMaxValueWriter(reduction="product")
    with pytest.raises(UsageError, match="the rank key is 3"):
        TensorDictMaxValueWriter(rank_key=3)


def test_a_loaded_ranking_continues(tmp_path) -> None:
    writer = TensorDictMaxValueWriter(rank_key=["next", "reward"])
    writer.register_storage(LazyTensorStorage(3))
    batch = TensorDict({("next", "reward"): torch.tensor([[3.0], [1.0], [2.0], [5.0]])}, [4])
    writer.extend(batch)
    writer.dumps(tmp_path)
    other = top(3)
    other._storage.set(range(3), writer._storage[:])
    other.loads(tmp_path)
    assert (other.rank_key, other._write_count) == (("next", "reward"), 4)
    assert other.extend(batch + 1).tolist() == writer.extend(batch + 1).tolist() == [2, -1, -1, 0]
    assert other._ranking.state().tolist() == writer._ranking.state().tolist()


def test_an_empty_ranking_is_saved(tmp_path) -> None:
    full = top()
    full.extend(scored([1.0]))
    full.dumps(tmp_path)
    top().dumps(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["metadata.json"]
    full.loads(tmp_path)
    assert (len(full._ranking), full._write_count, full._cursor) == (0, 0, 0)


def folder_of(path, ranking: str, rows: list[list[float]]) -> None:
    (path / "metadata.json").write_text('{"cursor": 0, "write_count": 2, "rank_key": "s", ' + ranking + "}")
    (path / "current_top_values.memmap").write_bytes(torch.tensor(rows).numpy().tobytes())


@pytest.mark.parametrize(
    ("ranking", "rows", "error"),
    [
        ('"dtype": "torch.float32", "shape": [2, 2]', [[1.0, 0.0]], CorruptDataError),
        ('"dtype": "torch.float32", "shape": [2, 2]', [[1.0, 0.0], [2.0, 0.0]], CorruptDataError),
        ('"dtype": "torch.float32", "shape": [2, 2]', [[1.0, 0.0], [2.0, 0.5]], CorruptDataError),
        ('"dtype": "torch.float32", "shape": [2, 2]', [[math.nan, 0.0], [2.0, 1.0]], CorruptDataError),
        ('"dtype": "torch.float32", "shape": [4]', [[1.0, 0.0], [2.0, 1.0]], CorruptDataError),
        ('"dtype": "torch.nothing", "shape": [2, 2]', [[1.0, 0.0], [2.0, 1.0]], FormatError),
        ('"dtype": "torch.float32", "shape": [2, 2], "cursor": "x"', [[1.0, 0.0], [2.0, 1.0]], FormatError),
        ('"dtype": "torch.float32", "shape": [5, 2]', [[0.0, slot] for slot in range(5)], SchemaError),
    ],
)
def test_a_damaged_folder_changes_nothing(tmp_path, ranking: str, rows: list, error: type[Exception]) -> None:
    folder_of(tmp_path, ranking, rows)
    writer = top()
    writer.extend(scored([1.0, 3.0]))
    before = state(writer)
    with pytest.raises(error):
        writer.loads(tmp_path)
    assert state(writer) == before


def test_a_folder_of_another_writer_is_refused(tmp_path) -> None:
    with pytest.raises(DatasetNotFoundError):
        top().loads(tmp_path)
    RoundRobinWriter().dumps(tmp_path)
    with pytest.raises(FormatError, match="there is no rank_key"):
        top().loads(tmp_path)
    with pytest.raises(SchemaError, match="expected a ranking in the state, found _cursor"):
        top().load_state_dict(RoundRobinWriter().state_dict())


def test_rows_that_have_no_index_get_none() -> None:
    storage = TensorStorage(scored([0.0, 0.0]))
    writer = TensorDictMaxValueWriter(rank_key="s")
    writer.register_storage(storage)
    writer.extend(scored([3.0, 1.0, 2.0]))
    assert storage[:].to_dict() == {"s": pytest.approx(torch.tensor([3.0, 2.0]))}


def test_another_storage_is_ranked_from_the_start() -> None:
    writer = top(2)
    writer.extend(scored([3.0, 4.0]))
    writer.register_storage(LazyTensorStorage(2))
    assert writer.extend(scored([1.0])).tolist() == [0]
    assert repr(writer) == "TensorDictMaxValueWriter(rank_key='s', reduction='sum', ranked=1)"


@pytest.mark.parametrize("filled", [2, 3])
def test_elements_of_the_storage_are_ranked(filled):
    storage, held = LazyTensorStorage(3), [5.0, 1.0, 9.0][:filled]
    storage.set(range(filled), scored(held))
    writer = TensorDictMaxValueWriter(rank_key="s")
    writer.register_storage(storage)
    writer.extend(scored([7.0, 0.0]))
    assert sorted(kept(writer)) == sorted([*held, 7.0, 0.0])[-3:]


def test_elements_that_cannot_be_ranked_are_not_overwritten():
    writer = top(3)
    writer._storage.set(range(2), TensorDict({"other": torch.zeros(2)}, [2]))
    with pytest.raises(MissingKeyError, match="s"):
        writer.extend(scored([0.0, 0.0]).set("other", torch.zeros(2)))
    assert (len(writer._storage), writer._write_count) == (2, 0)


@pytest.mark.parametrize(("score", "place"), [(0.5, None), (1.0, None), (1.5, 1), (9.0, 1)])
def test_get_insert_index_tells_where_an_element_would_be_written(score: float, place: int | None) -> None:
    writer = top(3)
    assert writer.get_insert_index(scored([score])[0]) == 0
    writer.extend(scored([3.0, 1.0, 2.0]))
    for _ in range(2):  # asking changes nothing
        assert writer.get_insert_index(scored([score])[0]) == place
    assert writer.add(scored([score])[0]) == place


EDITS: dict[str, Callable[[TensorDictReplayBuffer], object]] = {
    "replaced": lambda buffer: buffer.__setitem__(0, buffer[0].clone().set("s", torch.tensor(100.0))),
    "stored": lambda buffer: buffer.storage.__setitem__([0], buffer[[0]].set("s", torch.tensor([100.0]))),
    "written again": lambda buffer: buffer.write_all(buffer[:].clone().set("s", torch.tensor([100.0, 9.0]))),
    "set": lambda buffer: buffer.set_("s", torch.tensor([100.0, 9.0])),
    "set in part": lambda buffer: buffer.set_at_("s", torch.tensor([100.0]), [0]),
    "updated": lambda buffer: buffer.update_({"s": torch.tensor([100.0, 9.0])}),
    "loaded": lambda buffer: buffer.storage.load_state_dict(filled_top(100.0, 9.0).storage.state_dict()),
}


def filled_top(*scores: float) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(rank_key="s"))
    buffer.extend(scored([*scores]).set("n", torch.arange(len(scores))))
    return buffer


@pytest.mark.parametrize("edit", EDITS)
def test_edited_elements_are_ranked_again(edit: str) -> None:
    buffer = filled_top(5.0, 9.0)
    whole = buffer[:].clone()
    buffer.update_({"n": whole["n"] + 1})  # which changes no rank
    assert not buffer.writer._is_outdated(buffer.storage)
    EDITS[edit](buffer)
    new = whole[:1].clone().set("s", torch.tensor([50.0]))
    assert buffer.extend(new).tolist() == [1]
    assert buffer[:]["s"].tolist() == [100, 50]
    assert buffer.add(whole[0]) is None


@pytest.mark.parametrize("kind", [LazyTensorStorage, ListStorage, LazyStackStorage])
def test_elements_that_are_edited_are_ranked_again(kind: Any) -> None:
    def ranks(*values: float) -> TensorDict:
        return TensorDict({"rank": torch.tensor(values, dtype=torch.float)}, [len(values)])

    buffer = TensorDictReplayBuffer(storage=kind(3), writer=TensorDictMaxValueWriter(rank_key="rank"))
    buffer.extend(ranks(1, 2, 3))
    buffer[0] = ranks(100)[0]
    buffer.extend(ranks(2.5))
    assert buffer[:]["rank"].tolist() == [100, 2.5, 3]
    other = TensorDictReplayBuffer(storage=kind(3), writer=TensorDictMaxValueWriter(rank_key="rank"))
    other.load_state_dict(buffer.state_dict())
    other[1] = ranks(50)[0]
    assert other.extend(ranks(4, 5)).tolist() == [-1, 2]
    assert other[:]["rank"].tolist() == [100, 50, 5]


def test_elements_of_another_writer_are_ranked() -> None:
    buffer, other = filled_top(5.0), RoundRobinWriter()
    other.register_storage(buffer.storage)
    other.extend(buffer[:].set("s", torch.tensor([7.0])))
    assert buffer.extend(buffer[:1].set("s", torch.tensor([6.0]))).tolist() == [0]
    assert buffer[:]["s"].tolist() == [6, 7]
