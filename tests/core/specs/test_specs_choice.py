"""Choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData

from rbtool.core.specs.bounded import Bounded, Unbounded
from rbtool.core.specs.categorical import Categorical
from rbtool.core.specs.composite import Composite
from rbtool.core.specs.non_tensor import Choice, NonTensor


def numbers() -> Choice:
    return Choice([Bounded(0, 1, (2,)), Bounded(5, 6, (2,))])


def texts() -> Choice:
    return Choice([NonTensorData("left"), NonTensorData("right")])


def test_each_value_of_a_batch_is_of_one_alternative() -> None:
    torch.manual_seed(0)
    drawn = numbers().rand((200,))
    low = (drawn <= 1).all(-1)
    assert bool((low | (drawn >= 5).all(-1)).all())
    assert 50 < int(low.sum()) < 150
    assert not numbers().is_in(torch.tensor([0.5, 5.5]))


def test_projection_goes_to_the_nearest_alternative() -> None:
    spec = numbers()
    found = spec.project(torch.tensor([[2.0, 0.5], [4.0, 5.5], [0.5, 0.5]]))
    assert found.tolist() == [[1, 0.5], [5, 5.5], [0.5, 0.5]]
    with pytest.raises(RuntimeError, match=r"\[3\]"):
        spec.project(torch.zeros(3))


def test_sharp_edge_7_zeros_and_ones_have_the_form_of_the_alternatives() -> None:
    assert numbers().one((3,)).tolist() == [[1, 1]] * 3
    assert numbers().zero().tolist() == [0, 0]
    assert texts().one().data == "left"


def test_data_that_are_no_tensors() -> None:
    torch.manual_seed(0)
    spec = texts()
    assert {spec.rand().data for _ in range(30)} == {"left", "right"}
    assert spec.is_in(spec.rand((5, 2)))
    assert not spec.is_in(NonTensorData("up"))
    assert spec.project(NonTensorData("up")).data == "left"
    assert (spec.cardinality(), spec.enumerate().tolist()) == (2, ["left", "right"])
    assert spec.to_numpy(spec.encode("right")) == "right"


def test_nests() -> None:
    one, other = (Composite(a=Bounded(low, low + 1, (2,))) for low in (0, 5))
    spec = Choice([one, other])
    assert spec.is_in(spec.rand((6,)))
    assert not spec.is_in(Composite(a=Bounded(2, 3, (2,))).rand())
    assert spec.is_in(spec.project(Composite(a=Bounded(2, 3, (2,))).rand()))


def test_values_are_counted_once() -> None:
    spec = Choice([Categorical(3), Categorical(5), Categorical(2)])
    assert (spec.cardinality(), spec.enumerate().tolist()) == (5, [0, 1, 2, 3, 4])
    assert numbers().cardinality() == float("inf")
    with pytest.raises(NotImplementedError):
        numbers().enumerate()


@pytest.mark.parametrize(
    ("choices", "error", "says"),
    [
        ((Categorical(3),), TypeError, "a list"),
        ([], TypeError, "a list"),
        (["a"], TypeError, "a choice is a str"),
        ([Categorical(3), Bounded(0, 1, (), dtype=torch.int64)], TypeError, "one class"),
        ([Unbounded((2,)), Unbounded((3,))], ValueError, "shape"),
        ([Unbounded(()), Unbounded((), dtype=torch.float64)], ValueError, "dtype"),
        ([NonTensor((), device="cpu"), NonTensor(())], ValueError, "device"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(choices: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Choice(choices)


def test_equal_choices_are_stacked_into_one() -> None:
    other = Choice([Bounded(0, 1, (2,)), Bounded(5, 7, (2,))])
    assert torch.stack([numbers(), other]).unbind() == (numbers(), other)
    stacked: Any = torch.stack([numbers(), numbers()], 1)
    assert (type(stacked), stacked.shape) == (Choice, (2, 2))


def test_a_size_becomes_unknown_in_all_or_none() -> None:
    spec = Choice([Bounded(0, 1, (2,)), Bounded(torch.tensor([0.0, 1.0]), 3)])
    with pytest.raises(ValueError, match="differs along"):
        spec.make_neg_dim(0)
    assert [choice.shape for choice in spec.choices] == [(2,), (2,)]
    spec = numbers()
    spec.make_neg_dim(0)
    assert spec.shape == (-1,)
    assert spec.space is not None


@given(st.lists(st.lists(st.floats(-1, 7), min_size=2, max_size=2), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_a_batch_is_in_if_each_of_its_values_is_of_one_alternative(rows: list[list[float]]) -> None:
    spec = Choice([Bounded(0, 1, (2,)), Bounded(5, 6, (2,))])
    value = torch.tensor(rows)
    expected = all(spec.is_in(row) for row in value)
    assert spec.is_in(value) == expected
    assert spec.is_in(value.unsqueeze(0)) == expected
    assert spec.is_in(torch.cat([value, spec.rand((3,))])) == expected


def test_a_batch_of_a_choice_of_stacks_is_in_value_by_value() -> None:
    spec = Choice([torch.stack([Categorical(n), Categorical(n + 1)]) for n in (2, 3)])
    assert spec.is_in(torch.tensor([[1, 2], [2, 3]]))
    assert not spec.is_in(torch.tensor([[1, 2], [3, 3]]))
