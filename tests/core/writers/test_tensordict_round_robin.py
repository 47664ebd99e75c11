from __future__ import annotations

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from rbtool.core.errors import SchemaError
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.writers.round_robin import TensorDictRoundRobinWriter


@tensorclass
class Step:
    action: torch.Tensor


def ring(storage: object) -> TensorDictRoundRobinWriter:
    writer = TensorDictRoundRobinWriter()
    writer.register_storage(storage)
    return writer


def steps(*batch: int) -> TensorDict:
    return TensorDict({"x": torch.zeros(*batch, 2)}, list(batch))


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_every_row_has_its_number(kind: type) -> None:
    storage = kind(4)
    writer = ring(storage)
    writer.add(steps(1)[0])
    writer.extend(steps(2))
    writer.extend(steps(6))
    assert storage[:]["index"].tolist() == [0, 1, 2, 3]
    assert storage[:]["index"].dtype == torch.int64


def test_numbers_are_expanded_to_the_batch_dimensions() -> None:
    flat, deep = LazyTensorStorage(4), LazyTensorStorage(12, ndim=2)
    ring(flat).extend(steps(2, 3))
    writer = ring(deep)
    writer.extend(steps(2, 3))
    writer.add(steps(3))
    assert flat[:]["index"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert deep[:]["index"].tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]


def test_edge_01_12_the_callers_tensordict_gets_no_index() -> None:
    batch = steps(3)
    ring(LazyTensorStorage(4)).extend(batch)
    assert list(batch.keys()) == ["x"]
    sampled = steps(3).set("index", torch.tensor([7, 8, 9]))
    storage = LazyTensorStorage(4)
    ring(storage).extend(sampled)
    assert sampled["index"].tolist() == [7, 8, 9]
    assert storage[:]["index"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [LazyTensorStorage, ListStorage])
def test_nests_are_those_of_the_storage_alone(kind: type) -> None:
    batch = steps(3).set("next", steps(3))
    storage = kind(4)
    ring(storage).extend(batch) if kind is LazyTensorStorage else ring(storage).add(batch)
    batch["next"]["x"] = torch.ones(3, 2)
    batch["next"]["more"] = torch.ones(3)
    kept = storage[0]["next"]
    assert list(kept.keys()) == ["x"]
    assert not kept["x"].any()
    assert list(batch.keys()) == ["x", "next"]


def test_a_locked_tensordict_can_be_written() -> None:
    storage = LazyTensorStorage(4)
    ring(storage).extend(steps(3).lock_())
    assert storage[:]["index"].tolist() == [0, 1, 2]


def test_a_lazy_stack_can_be_written() -> None:
    storage = LazyTensorStorage(4)
    stack = LazyStackedTensorDict.lazy_stack([steps(1)[0] for _ in range(3)])
    ring(storage).extend(stack)
    assert storage[:]["index"].tolist() == [0, 1, 2]
    assert list(stack.keys()) == ["x"]


@pytest.mark.parametrize("kind", [ListStorage, LazyStackStorage])
def test_lists_keep_the_number_too(kind: type) -> None:
    storage = kind(4)
    ring(storage).extend(steps(6))
    assert [int(row["index"]) for row in storage] == [0, 1, 2, 3]


def test_tensorclasses_are_stored_as_they_are() -> None:
    storage = LazyTensorStorage(4)
    assert ring(storage).extend(Step(torch.zeros(2, 3), batch_size=[2])).tolist() == [0, 1]
    assert type(storage[:]) is Step


def test_rows_without_a_number_stay_without() -> None:
    storage = TensorStorage(steps(4))
    ring(storage).extend(steps(2) + 1)
    assert list(storage[:].keys()) == ["x"]
    storage.empty()
    ring(storage).extend(steps(2) + 1)
    assert storage[:]["x"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("data", [torch.zeros(2), {"x": torch.zeros(2)}, [steps(1)[0]]])
def test_what_is_no_tensordict_is_refused(data: object) -> None:
    storage = LazyTensorStorage(4)
    writer = ring(storage)
    with pytest.raises(SchemaError, match="TensorDictRoundRobinWriter needs tensordicts, found a"):
        writer.extend(data)
    assert (len(storage), writer._cursor, writer._write_count) == (0, 0, 0)
