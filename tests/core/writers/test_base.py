"""What a batch is, and what all writers do: refusing, sharing between processes, reading what TorchRL wrote."""

from __future__ import annotations

import json
import multiprocessing
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import ChildError, in_a_child
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from rbtool.core.errors import SchemaError
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.writers.base import ImmutableDatasetWriter, Writer, batch_length, capacity_rows
from rbtool.core.writers.max_value import TensorDictMaxValueWriter
from rbtool.core.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter

Pair = namedtuple("Pair", ["left", "right"])


@tensorclass
class Step:
    action: torch.Tensor


def td(rows: int, *more: int) -> TensorDict:
    return TensorDict({"a": torch.arange(rows)}, [rows, *more][:1])


BATCHES = [
    torch.zeros(3, 2),
    td(3),
    Step(torch.zeros(3), batch_size=[3]),
    LazyStackedTensorDict.lazy_stack([td(2)[0], td(2)[1], td(2)[0]]),
    [1, "two", None],
    [torch.zeros(5)] * 3,
    {"a": torch.zeros(3), "b": [torch.zeros(3, 1), (np.zeros(3), td(3))]},
    (torch.zeros(3), {"a": torch.zeros(3, 4)}),
    Pair(torch.zeros(3), torch.zeros(3)),
    range(3),
    {7, 8, 9},
    np.arange(3),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_a_batch_is_counted_along_its_first_dimension(batch: object) -> None:
    assert batch_length(batch) == 3


def test_leaves_that_disagree_are_named() -> None:
    batch = {"a": torch.zeros(3), "b": (torch.zeros(4), torch.zeros(3))}
    with pytest.raises(SchemaError, match=r"expected leaves of one length, a has 3, b.0 has 4, b.1 has 3"):
        batch_length(batch)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (iter([1]), "found a list_iterator"),
        ("text", "found a str"),
        (3, "found a int"),
        ((1, 2), "the entry '0' is a int"),
        ({"a": "text"}, "the entry 'a' is a str"),
        (torch.tensor(1.0), "the data has no dimensions, expected a batch of elements"),
        (td(2)[0], "the data has no dimensions, expected a batch of elements"),
        ({"a": torch.tensor(1.0)}, "the entry 'a' has no dimension"),
    ],
)
def test_other_objects_than_batches_are_type_errors(batch: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        batch_length(batch)


@pytest.mark.parametrize("batch", [[], (), {}, torch.zeros(0, 2), td(0), {"a": torch.zeros(0)}, range(0)])
@pytest.mark.parametrize("kind", [IndexError, RuntimeError])
def test_an_empty_batch_is_an_index_error_and_a_runtime_error(batch: object, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="expected a batch of at least one element, found none"):
        batch_length(batch)


@pytest.mark.parametrize(
    ("data", "batch", "ndim", "rows"),
    [
        (torch.zeros(4, 3), True, 2, 4),
        (torch.zeros(3), False, 2, 4),
        (torch.zeros(4, 3, 2), True, 3, 2),
        (torch.zeros(4, 3), True, 1, 10),
        ([torch.zeros(3), torch.zeros(3)], True, 2, 4),
        ({"a": [torch.zeros(4, 5)]}, True, 2, 2),
        (TensorDict({"a": torch.zeros(4, 3, 7)}, [4, 3]), True, 2, 4),
        (torch.zeros(4, 0), True, 2, 10),
    ],
)
def test_rows_hold_the_elements_asked_for(data: object, batch: bool, ndim: int, rows: int) -> None:
    assert capacity_rows(10, ndim, data, batch=batch) == rows


def test_rows_of_too_few_dimensions_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"expected data with at least 2 dimensions, found \[4\]"):
        capacity_rows(10, 2, TensorDict({"a": torch.zeros(4, 3)}, [4]), batch=True)


@pytest.mark.parametrize("write", ["add", "extend"])
def test_datasets_refuse_to_be_written(write: str) -> None:
    storage = TensorStorage(torch.arange(4))
    writer = ImmutableDatasetWriter()
    writer.register_storage(storage)
    with pytest.raises(RuntimeError, match="This dataset doesn't allow writing"):
        getattr(writer, write)(torch.zeros(1))
    with pytest.raises(SchemaError, match="This dataset doesn't allow writing"):
        writer._empty()
    assert (storage[:].tolist(), writer._cursor, writer._write_count) == ([0, 1, 2, 3], 0, 0)


def test_writers_of_datasets_have_no_state(tmp_path) -> None:
    writer = ImmutableDatasetWriter()
    writer.dumps(tmp_path)
    writer.loads(tmp_path)
    writer.load_state_dict(writer.state_dict())
    assert (writer.state_dict(), list(tmp_path.iterdir()), repr(writer)) == ({}, [], "ImmutableDatasetWriter()")
    with pytest.raises(SchemaError, match="has no state, found _cursor"):
        writer.load_state_dict({"_cursor": 0})


def rows(value: int, count: int = 3) -> TensorDict:
    return TensorDict({"x": torch.full((count,), float(value))}, [count])


def extend_once(writer: Writer, value: int) -> list[int]:
    index: list[int] = writer.extend(rows(value)).tolist()
    return index


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [RoundRobinWriter, TensorDictRoundRobinWriter])
def test_a_child_continues_the_same_ring(method: str, kind: type[RoundRobinWriter]) -> None:
    storage, writer = LazyMemmapStorage(8), kind(track_generations=True)
    writer.register_storage(storage)
    writer.extend(rows(1))
    assert in_a_child(extend_once, writer, 2, method=method) == [3, 4, 5]
    assert (writer._cursor, writer._write_count, len(storage)) == (6, 6, 6)
    writer.extend(rows(3))
    assert storage[:]["x"].tolist() == [3, 1, 1, 2, 2, 2, 3, 3]
    assert writer.generations_of(torch.arange(8)).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_ranking_belongs_to_one_process() -> None:
    writer = TensorDictMaxValueWriter(rank_key="x")
    writer.register_storage(LazyMemmapStorage(8))
    writer.extend(rows(1))
    process = multiprocessing.get_context("spawn").Process(target=extend_once, args=(writer, 2))
    with pytest.raises(RuntimeError, match="cannot be shared between processes"):
        process.start()
    with pytest.raises(ChildError, match=r"SchemaError: .* cannot be shared between processes"):
        in_a_child(extend_once, writer, 2)
    assert writer._write_count == 3


CASES = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"
MAX_VALUE = ("writer_max_value_full", "writer_max_value_nested_rank_key", "writer_max_value_partly")
ROUND_ROBIN = ("writer_round_robin_generations", "writer_td_round_robin_generations_partly")


def loaded(writer: Writer, case: str) -> tuple[dict, dict]:
    """Load a case's writer, with a storage of as many rows; return its facts and its expected arrays."""
    facts = json.loads((CASES / case / "case.json").read_text())
    storage = LazyTensorStorage(facts["capacity"])
    storage.set(range(facts["len"]), TensorDict({"score": torch.zeros(facts["len"], 1)}, [facts["len"]]))
    writer.register_storage(storage)
    writer.loads(CASES / case / "checkpoint" / "writer")
    assert (writer._cursor, writer._write_count) == (facts["cursor"], facts["write_count"])
    return facts, dict(np.load(CASES / case / "expected_sampler.npz"))


@pytest.mark.parametrize("case", MAX_VALUE)
def test_a_ranking_of_torchrl_is_read_and_continued(case: str) -> None:
    writer = TensorDictMaxValueWriter()
    facts, expected = loaded(writer, case)
    assert writer.rank_key == (("next", "reward") if "nested" in case else "score")
    assert writer._ranking.state().tolist() == sorted(expected["heap"].tolist())
    writer.rank_key = "score"
    lowest, slot = min(expected["heap"].tolist())
    free = facts["len"] < facts["capacity"]
    batch = TensorDict({"score": torch.tensor([[lowest], [100.0]])}, [2])
    assert writer.extend(batch).tolist() == ([6, 7] if free else [-1, int(slot)])


@pytest.mark.parametrize("case", ROUND_ROBIN)
def test_generations_of_torchrl_are_read_by_a_writer_that_tracks_them(case: str) -> None:
    writer, other = RoundRobinWriter(track_generations=True), TensorDictRoundRobinWriter()
    facts, expected = loaded(writer, case)
    assert writer.generations_of(torch.arange(facts["capacity"])).tolist() == expected["generation"].tolist()
    loaded(other, case)
    assert "_generation" not in other.state_dict()


@pytest.mark.peer
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("name", ["RoundRobinWriter", "TensorDictRoundRobinWriter"])
def test_torchrl_reads_our_ring(tmp_path, name: str, tracked: bool) -> None:
    data = pytest.importorskip("torchrl.data.replay_buffers")
    writer = RoundRobinWriter(track_generations=tracked)
    writer.register_storage(LazyTensorStorage(4))
    writer.extend(torch.arange(6))
    writer.dumps(tmp_path)
    theirs = getattr(data, name)(track_generations=tracked)
    theirs.register_storage(data.LazyTensorStorage(4))
    theirs.loads(tmp_path)
    state = theirs.state_dict()
    assert (state["_cursor"], state["_write_count"]) == (2, 6)
    assert not tracked or state["_generation"].tolist() == [1, 1, 0, 0]
    theirs.load_state_dict(writer.state_dict())
    writer.load_state_dict(theirs.state_dict())


@pytest.mark.peer
@pytest.mark.parametrize("ranks", [[], [3.0, 1.0, 2.0, 7.0, 5.0], [3, 1, 2, 7, 5]])
def test_torchrl_reads_our_ranking(tmp_path, ranks: list) -> None:
    data = pytest.importorskip("torchrl.data.replay_buffers")
    writer = TensorDictMaxValueWriter(rank_key=("next", "reward"))
    writer.register_storage(LazyTensorStorage(4))
    if ranks:
        writer.extend(TensorDict({("next", "reward"): torch.tensor(ranks)}, [len(ranks)]))
    writer.dumps(tmp_path)
    theirs = data.TensorDictMaxValueWriter()
    theirs.register_storage(data.LazyTensorStorage(4))
    theirs.loads(tmp_path)
    assert sorted(map(tuple, theirs._current_top_values)) == sorted(writer._ranking._heap)
    assert theirs._cursor == writer._cursor
