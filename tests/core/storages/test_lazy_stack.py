from __future__ import annotations

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass

from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.storages.list_storage import LazyStackStorage


@tensorclass
class Step:
    observation: torch.Tensor


def ragged(number: int) -> TensorDict:
    return TensorDict({"a": torch.full((number + 1, 2), float(number))}, [number + 1])


def filled(rows: int = 5, **options: object) -> LazyStackStorage:
    storage = LazyStackStorage(10, **options)
    storage.set(range(rows), [ragged(number) for number in range(rows)])
    storage.last_cursor = None
    return storage


@pytest.mark.parametrize(
    ("stack_dim", "shape"), [(0, (3, -1)), (1, (-1, 3)), (-1, (-1, 3)), (-2, (3, -1))]
)  # a negative one counts from the end, with the new dimension counted in
def test_ragged_shapes_are_stacked_lazily(stack_dim: int, shape: tuple[int, ...]) -> None:
    found = filled(stack_dim=stack_dim)[[4, 0, 2]]
    assert type(found) is LazyStackedTensorDict
    assert found.batch_size == shape
    assert [part["a"][0, 0].item() for part in found.tensordicts] == [4, 0, 2]


@pytest.mark.parametrize("index", [slice(1, 3), [1, 2], torch.tensor([1, 2]), (torch.tensor([1, 2]),), range(1, 3)])
def test_indices(index: object) -> None:
    assert [part["a"].shape[0] for part in filled()[index].tensordicts] == [2, 3]


def test_an_int_reads_one_as_it_is() -> None:
    item = ragged(3)
    storage = LazyStackStorage(3)
    storage.set(0, item)
    assert storage[0] is item
    assert list(storage) == [item]


@pytest.mark.parametrize("stack_dim", [0, -1])
def test_no_rows_keep_keys_and_shapes(stack_dim: int) -> None:
    found = filled(stack_dim=stack_dim)[[]]
    assert found["a"].numel() == 0
    assert found.batch_size[stack_dim] == 0
    assert filled(0)[:].batch_size == (0,)


def test_a_tensorclass_is_kept() -> None:
    storage = LazyStackStorage(3)
    storage.set(range(2), [Step(torch.zeros(n), batch_size=[]) for n in (1, 2)])
    assert type(storage[:]) is Step
    assert storage[:].batch_size == (2,)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("text", "a str cannot be stacked lazily, expected a tensordict"),
        (torch.zeros(2), "a Tensor cannot be stacked lazily"),
        (TensorDict({}, []), "tensordicts of 0 and 1 batch dimensions cannot be in one lazy stack"),
        (TensorDict({}, [2, 3]), "tensordicts of 1 and 2 batch dimensions"),
    ],
)
def test_what_cannot_be_stacked_is_refused_and_changes_nothing(item: object, message: str) -> None:
    storage = filled(2)
    with pytest.raises(SchemaError, match=message):
        storage.set([0, 1], [ragged(7), item])
    assert storage[0]["a"].shape == (1, 2)
    assert len(storage) == 2


def test_a_stack_dim_that_cannot_be() -> None:
    with pytest.raises(SchemaError, match="tensordicts of 1 batch dimensions have no dimension 2"):
        filled(stack_dim=2)
    with pytest.raises(UsageError, match="expected an int"):
        LazyStackStorage(3, stack_dim=0.5)


def test_emptied_storages_take_other_dimensions() -> None:
    storage = filled(2)
    storage.empty()
    storage.set(0, TensorDict({"b": torch.zeros(2)}, []))
    assert storage[:].batch_size == (1,)


def test_the_device_moves_what_is_written() -> None:
    assert filled(device="meta")[:].tensordicts[0]["a"].device.type == "meta"


def test_the_length_is_kept_and_writes_overwrite() -> None:
    storage = filled(2)
    storage.set([1, 2], LazyStackedTensorDict(ragged(8), ragged(9)))
    assert [part["a"].shape[0] for part in storage[:].tensordicts] == [1, 9, 10]
    with pytest.raises(RuntimeError, match="row 10 cannot be written"):
        storage.set(10, ragged(0))


def test_a_state_goes_round_with_batch_sizes() -> None:
    storage, other = filled(), filled(1)
    other.load_state_dict(storage.state_dict())
    assert [part.batch_size for part in other[:].tensordicts] == [(n,) for n in range(1, 6)]
    other[0]["a"].fill_(9)
    assert storage[0]["a"].tolist() == [[0, 0]]


def test_a_state_of_other_things_changes_nothing() -> None:
    storage = filled(2)
    with pytest.raises(SchemaError, match="a Tensor cannot be stacked"):
        storage.load_state_dict({"_storage": [torch.zeros(2)]})
    with pytest.raises(SchemaError, match="batch dimensions cannot be in one"):
        storage.load_state_dict({"_storage": [ragged(1).state_dict(), NonTensorData("x").state_dict()]})
    assert len(storage) == 2


@pytest.mark.parametrize("index", [slice(None), [0, 1, 1]])
def test_batches_share_tensors_with_the_elements_but_no_entries(index: object) -> None:
    storage = filled(2)
    batch = storage[index]
    batch.tensordicts[1]["b"] = torch.zeros(2)
    assert set(storage[1].keys()) == {"a"}
    assert all("b" not in part for place, part in enumerate(batch.tensordicts) if place != 1)
    batch.tensordicts[1]["a"].fill_(7)
    assert storage[1]["a"].eq(7).all()
