"""Composed, inverted and foreign transforms, and how buffers apply them on the way in and out."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.errors import SchemaError
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.transforms.base import CallableTransform, Compose, InvertTransform, Transform, as_transform
from rbtool.core.transforms.returns import MultiStepTransform


class Add(Transform):
    """Adds on the way out, subtracts on the way in."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.register_buffer("number", torch.tensor(number))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data + self.number

    def inv(self, data: torch.Tensor) -> torch.Tensor:
        return data - self.number


class Double(Add):
    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data * self.number

    def inv(self, data: torch.Tensor) -> torch.Tensor:
        return data / self.number


class Count(Transform):
    counts_writes = True


class Drop(Transform):
    def inv(self, data: object) -> None:
        return None


def test_inverses_are_applied_in_reverse_order() -> None:
    both = Compose(Add(1.0), Double(3.0))
    rows = torch.tensor([1.0, 2.0])
    assert both(rows).tolist() == [6.0, 9.0]
    assert both.inv(both(rows)).tolist() == [1.0, 2.0]
    assert (len(both), type(both[1]), [type(part) for part in both]) == (2, Double, [Add, Double])


def test_callables_and_inverted_transforms_are_wrapped() -> None:
    assert type(as_transform(len)) is CallableTransform
    assert type(as_transform(nn.Linear(1, 1))) is CallableTransform
    assert type(as_transform(Add(1.0), invert=True)) is InvertTransform
    with pytest.raises(RuntimeError, match="expected a transform or a callable, found a int"):
        as_transform(3)


def test_transforms_are_put_into_evaluation_mode() -> None:
    module = nn.Dropout(0.5)
    buffer = ReplayBuffer(storage=TensorStorage(torch.ones(100)), transform=module, batch_size=100)
    assert not module.training
    assert buffer.sample().tolist() == [1.0] * 100
    buffer.append_transform(late := nn.Dropout(0.5))
    assert not late.training


def test_a_buffer_applies_transforms_to_reads_and_inverses_to_writes() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=Compose(Add(1.0), Double(2.0)), batch_size=8)
    buffer.extend(torch.tensor([4.0, 6.0]))
    buffer.add(torch.tensor(8.0))
    assert buffer.storage[:].tolist() == [1.0, 2.0, 3.0]
    assert (buffer[:].tolist(), float(buffer[1])) == ([4.0, 6.0, 8.0], 6.0)
    assert set(buffer.sample().tolist()) <= {4.0, 6.0, 8.0}
    buffer[1:] = torch.tensor([10.0, 12.0])
    assert buffer.storage[:].tolist() == [1.0, 4.0, 5.0]


@pytest.mark.parametrize(("invert", "stored", "seen"), [(False, 3.0, 4.0), (True, 5.0, 4.0)])
def test_a_transform_can_be_inverted(invert: bool, stored: float, seen: float) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    assert buffer.append_transform(Add(1.0), invert=invert) is buffer
    buffer.extend(torch.tensor([4.0]))
    assert (buffer.storage[:].tolist(), buffer[:].tolist()) == ([stored], [seen])


class OfTorchRL(nn.Module):
    """Has the methods of TorchRL's transforms."""

    def inv(self, data: torch.Tensor) -> torch.Tensor:
        return self._inv_call(data)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data

    def _inv_call(self, data: torch.Tensor) -> torch.Tensor:
        return data

    def _call(self, data: torch.Tensor) -> torch.Tensor:
        return data


class Step(OfTorchRL):
    def _inv_call(self, data: torch.Tensor) -> torch.Tensor:
        return data * 3

    def _call(self, data: torch.Tensor) -> torch.Tensor:
        return data + 10


class Both(Step):
    def inv(self, data: torch.Tensor) -> torch.Tensor:
        return data * 100

    def _inv_call(self, data: torch.Tensor) -> torch.Tensor:  # beside `inv`: TorchRL calls this one
        return data * 3

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data + 20


class OnlyInv(OfTorchRL):
    def inv(self, data: torch.Tensor) -> torch.Tensor:
        return data * 100


# TorchRL's buffers call `_inv_call` on the way in and `forward` on the way out; turned round, `_call` on the way in.
@pytest.mark.parametrize(
    ("made", "invert", "stored", "seen"),
    [(Step, False, 6, 6), (Both, False, 6, 26), (Step, True, 12, 36), (Both, True, 22, 2200), (OfTorchRL, True, 2, 2)],
)
@pytest.mark.parametrize("write", [ReplayBuffer.extend, ReplayBuffer.write_all])
def test_methods_of_transforms_of_torchrl(made: Any, invert: bool, stored: int, seen: int, write: Any) -> None:
    buffer = ReplayBuffer(storage=TensorStorage(torch.zeros(2)))
    buffer.append_transform(made(), invert=invert)
    write(buffer, torch.tensor([2.0, 2.0]))
    assert (buffer.storage[:].tolist(), buffer[:].tolist()) == ([stored] * 2, [seen] * 2)


def test_an_inv_that_torchrl_does_not_call_is_not_called_but_named() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.warns(UserWarning, match=r"OnlyInv has inv\(\), .*: implement _inv_call\(\)"):
        buffer.append_transform(OnlyInv())
    buffer.extend(torch.tensor([2.0]))
    assert buffer.storage[:].tolist() == [2.0]


# The edge: TorchRL inserts no bare callables.
def test_callables_are_appended_and_inserted() -> None:
    buffer = ReplayBuffer(storage=TensorStorage(torch.tensor([1.0, 2.0])))
    buffer.append_transform(lambda rows: rows + 1).insert_transform(0, lambda rows: rows * 10)
    assert buffer[:].tolist() == [11.0, 21.0]
    with pytest.raises(ValueError, match="place is 5"):
        buffer.insert_transform(5, len)


def test_transforms_can_be_given_as_a_list() -> None:
    assert [type(part) for part in Compose([Add(1.0), len])] == [Add, CallableTransform]
    assert (len(Compose([])), len(Compose())) == (0, 0)
    with pytest.raises(SchemaError, match="found a list"):
        Compose([Add(1.0)], Add(2.0))


@pytest.mark.parametrize("place", ["construction", "append", "insert"])
def test_nested_compositions_are_flattened(place: str) -> None:
    inner, outer = Compose(Add(1.0), Compose(Double(2.0), abs)), Add(5.0)
    if place == "construction":
        both = Compose([outer, inner])
    else:
        both = Compose(outer).append(inner) if place == "append" else Compose(outer).insert(1, inner)
    assert [type(part) for part in both] == [Add, Add, Double, CallableTransform]
    assert both[1] is inner[0]
    assert both(torch.tensor([-8.0])).tolist() == [4.0]


def test_a_subclass_of_compose_is_not_flattened() -> None:
    class Once(Compose):
        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return data

    assert Compose(Once(Add(1.0)))(torch.ones(1)).tolist() == [1.0]


@pytest.mark.parametrize(
    ("index", "order"), [(0, [9, 1, 2]), (1, [1, 9, 2]), (2, [1, 2, 9]), (-1, [1, 9, 2]), (-2, [9, 1, 2])]
)
def test_transforms_are_inserted_as_into_a_list(index: int, order: list[int]) -> None:
    both = Compose(Add(1.0), Add(2.0))
    assert both.insert(index, Add(9.0)) is both
    assert [int(part.number) for part in both] == order
    assert set(both.state_dict()) == {f"transforms.{place}.number" for place in range(3)}


@pytest.mark.parametrize("index", [3, -3, 9, -9])
def test_places_outside_of_the_composition_are_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"place is {index}, expected one of 2 transforms"):
        Compose(Add(1.0), Add(2.0)).insert(index, Add(9.0))


def test_a_slice_of_a_composition_is_a_composition() -> None:
    three = Compose(Add(1.0), Double(2.0), Add(3.0))
    assert type(three[0:1]) is Compose
    assert list(three[1:]) == [three[1], three[2]]
    assert (three[1:](torch.ones(1)).tolist(), len(three[3:]), three[-1]) == ([5.0], 0, three[2])
    with pytest.raises(IndexError):
        three[3]


@pytest.mark.parametrize("ndim", [1, 2])
def test_data_that_a_transform_takes_away_is_not_written(ndim: int) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4, ndim=ndim), transform=Drop())
    for data in (torch.zeros(2, 2), TensorDict({"a": torch.zeros(2, 2)}, [2, 2])):
        for act in (buffer.extend, buffer.add):
            index = act(data)
            assert (index.shape, index.dtype) == ((0, ndim), torch.int64)
    assert (len(buffer), buffer.write_count) == (0, 0)


def test_add_shows_a_transform_one_more_dimension() -> None:
    shapes = []

    class Look(Transform):
        def inv(self, data: TensorDict) -> TensorDict:
            shapes.append(data.batch_size)
            return data.set("b", data["a"] + 1)

    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=Look())
    data = TensorDict({"a": torch.tensor(5)}, [])
    assert buffer.add(data) == 0
    assert (shapes, buffer["b"].tolist(), set(data.keys())) == ([(1,)], [6], {"a"})


def test_one_element_may_become_several() -> None:
    class Twice(Transform):
        def inv(self, data: TensorDict) -> TensorDict:
            return torch.cat([data, data])

    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=Twice())
    assert buffer.add(TensorDict({"a": torch.tensor(5)}, [])).tolist() == [0, 1]


def test_locked_batches_are_unlocked_for_transforms() -> None:
    rows = TensorDict({"a": torch.arange(3)}, [3])
    buffer = ReplayBuffer(
        storage=TensorStorage(rows),
        collate_fn=lambda batch: batch.lock_(),
        transform=lambda batch: batch.set("b", batch["a"]),
    )
    assert set(buffer[:].keys()) == {"a", "b"}
    assert set(rows.keys()) == {"a"}


def test_states_have_the_names_of_torchrl() -> None:
    buffer = ReplayBuffer(storage=TensorStorage(torch.ones(3)), transform=nn.Linear(1, 1))
    buffer.append_transform(Add(3.0))
    state = buffer.state_dict()["_transforms"]
    assert set(state) == {"transforms.0.func.weight", "transforms.0.func.bias", "transforms.1.number"}
    other = ReplayBuffer(storage=TensorStorage(torch.ones(3)), transform=Compose(nn.Linear(1, 1), Add(0.0)))
    other.load_state_dict(buffer.state_dict())
    assert float(other.transform[1].number) == 3.0


def test_transforms_that_draw_get_the_generator() -> None:
    class Noise(Transform):
        draws = True

    generator, noise, deep = torch.Generator(), Noise(), Noise()
    buffer = ReplayBuffer(
        storage=TensorStorage(torch.ones(3)), transform=Compose(noise, Compose(deep)), generator=generator
    )
    buffer.append_transform(late := Noise(), invert=True)
    assert all(part.generator is generator for part in (noise, deep, late))
    assert buffer.transform.draws
    assert pickle.loads(pickle.dumps(Add(1.0))).number == 1


def test_sharing_moves_the_state_and_refuses_transforms_that_count_writes() -> None:
    buffer = ReplayBuffer(storage=TensorStorage(torch.ones(3)), transform=Add(1.0))
    buffer.share()
    assert buffer.transform[0].number.is_shared()
    with pytest.raises(SchemaError, match="Count changes its state with every write"):
        ReplayBuffer(storage=TensorStorage(torch.ones(3)), transform=Count()).share()


@pytest.mark.parametrize("add", ["append", "insert", "compose"])
@pytest.mark.parametrize("invert", [False, True])
def test_transforms_added_after_sharing_are_shared_or_refused(add: str, invert: bool) -> None:
    class CountOfTorchRL(torch.nn.Module):
        requires_shared_write_state = True

        def inv(self, data: object) -> object:
            return data

    def put(transform: object) -> None:
        if add == "append":
            buffer.append_transform(transform, invert=invert)
        elif add == "insert":
            buffer.insert_transform(0, transform, invert=invert)
        else:
            buffer.transform.append(as_transform(transform, invert=invert))

    buffer = ReplayBuffer(storage=TensorStorage(torch.ones(3)), shared=True)
    for unshared in (Count(), CountOfTorchRL(), MultiStepTransform(2, 0.9)):
        with pytest.raises(RuntimeError, match=r"state with every write|holds steps back"):
            put(unshared)
    assert not len(buffer.transform)
    put(late := Add(1.0))
    assert late.number.is_shared()
    assert buffer.share(False) is buffer
    put(Count())
    with pytest.raises(RuntimeError, match="state with every write"):
        buffer.share()
    assert not buffer.shared
    assert buffer.append_transform(Add(1.0)) is buffer
