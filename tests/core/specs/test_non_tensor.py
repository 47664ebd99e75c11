"""NonTensor and Choice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from rbtool.core.specs.base import Stacked
from rbtool.core.specs.bounded import Bounded, Unbounded
from rbtool.core.specs.categorical import Categorical
from rbtool.core.specs.composite import Composite, StackedComposite
from rbtool.core.specs.non_tensor import Choice, NonTensor


def test_non_tensors_draw_the_whole_example_in_the_requested_shape() -> None:
    drawn = NonTensor((3,), example_data={"a": 1}).rand((2,))
    assert (drawn.batch_size, drawn.data) == ((2, 3), {"a": 1})
    for dims in (0, 1, 2):
        drawn = NonTensor((2, 3), example_data=["a", "b", "c"], feature_dims=dims).rand((4,))
        assert (drawn.batch_size, drawn.data) == ((4, 2, 3), ["a", "b", "c"])


def test_non_tensors_are_anything_but_tensors() -> None:
    spec = NonTensor((2,))
    assert [spec.is_in(value) for value in ("a", None, 3, np.zeros(3), NonTensorData("a"))] == [True] * 5
    assert [spec.is_in(value) for value in (torch.zeros(2), TensorDict({}))] == [False, False]
    with pytest.raises(TypeError, match="'x' is a Tensor"):
        spec.type_check(torch.zeros(2), "x")


def test_projecting_gives_the_example() -> None:
    spec = NonTensor((), example_data="a")
    assert spec.project("b") == "b"
    assert spec.project(torch.zeros(2)).data == "a"


def test_equality_ignores_only_feature_dims() -> None:
    specs = [
        NonTensor((2,)), NonTensor((3,)), NonTensor((2,), example_data="a"),
        NonTensor((2,), device="cpu"), NonTensor((2,), dtype=torch.float32),
        NonTensor((2,), example_data=np.zeros(2)), NonTensor((2,), example_data=np.zeros(3)),
        NonTensor((2,), example_data=["b", "c"]), NonTensor((2,), example_data=["b", "c"], batched=True),
    ]  # fmt: skip
    for number, one in enumerate(specs):
        assert [other for other, spec in enumerate(specs) if spec == one] == [number]
    assert NonTensor((2,)) == NonTensor((2,), feature_dims=0) == NonTensor((2,), batched=True)
    assert NonTensor((2,), example_data=np.ones(2)) == NonTensor((2,), example_data=np.ones(2))


def test_a_batched_example_has_one_datum_a_place() -> None:
    spec = NonTensor((2, 2), example_data=[["a", "b"], ["c", ["d"]]], batched=True)
    assert spec.rand().tolist() == [["a", "b"], ["c", ["d"]]]
    assert spec.rand((3,)).batch_size == (3, 2, 2)
    assert spec[0].rand().tolist() == ["a", "b"]
    assert spec[1, 0].rand().data == "c"
    assert spec[:, 1].example_data == ["b", ["d"]]
    assert spec.flatten().example_data == ["a", "b", "c", ["d"]]


def test_differing_examples_are_stacked_into_a_batch() -> None:
    stacked = torch.stack([NonTensor((), example_data="a"), NonTensor((), example_data="b")])
    assert stacked.batched
    assert stacked.rand().tolist() == ["a", "b"]
    assert stacked.unbind(0)[1].example_data == "b"


def test_non_tensor_arguments_that_do_not_fit_are_refused() -> None:
    for batched in (True, False):
        with pytest.raises(ValueError, match="both set"):
            NonTensor((2,), batched=batched, feature_dims=1)
    with pytest.raises(ValueError, match="feature_dims is 2"):
        NonTensor((2,), feature_dims=2)
    with pytest.raises(ValueError, match="nested sequences"):
        NonTensor((2,), example_data=["a"], batched=True)
    with pytest.raises(ValueError, match="one datum for each element"):
        NonTensor((-1,), example_data=["a"], batched=True)
    with pytest.raises(ValueError, match="all sizes are fixed"):
        NonTensor((1,), example_data=["a"], batched=True).make_neg_dim(0)
    spec = NonTensor((2,), example_data=["a", "b"], batched=True)
    with pytest.raises(ValueError, match="nested sequences"):
        spec.shape = torch.Size([3])
    with pytest.raises(ValueError, match="all sizes are fixed"):
        spec.expand(-1, 2)
    assert spec.rand().tolist() == ["a", "b"]
    assert NonTensor((3,), batched=True, example_data="x").example_data == "x"


def test_non_tensor_values_are_wrapped_and_taken_out() -> None:
    spec = NonTensor((2,), example_data="a")
    wrapped = spec.encode("b")
    assert (wrapped.data, wrapped.batch_size) == ("b", (2,))
    assert spec.encode(wrapped) is wrapped
    assert spec.to_numpy(wrapped) == "b"
    assert spec.to_numpy(NonTensor((2,), example_data=["c", "d"], batched=True).rand()) == ["c", "d"]
    with pytest.raises(AssertionError):
        spec.to_numpy(torch.zeros(2), safe=True)


def test_the_device_is_forgotten_on_demand() -> None:
    spec = NonTensor((2,), device="cpu")
    assert spec.clear_device_().device is None
    assert spec.to(torch.float32) is spec
    for one in (Choice([spec.to("cpu")]), Stacked(spec.to("cpu"), spec.to("cpu"), dim=0)):
        assert one.clear_device_().device is None
    nests = [Composite({"in": {"text": NonTensor((), device="cpu")}}, device="cpu") for _ in range(2)]
    stack: Any = StackedComposite(*nests, dim=0)
    assert stack.clear_device_()["in", "text"].device is None
    assert {nest["in", "text"].device for nest in nests} == {None}


def test_non_tensors_in_a_composite() -> None:
    spec = Composite(text=NonTensor((), example_data="go"))
    drawn = spec.rand((3,))
    assert drawn["text"] == "go"
    assert spec.is_in(drawn)
    assert spec.project(TensorDict({"text": torch.zeros(3)}, [3]))["text"] == "go"
    with pytest.raises(NotImplementedError):
        spec.cardinality()
    spec = Composite(text=NonTensor((3,), example_data="x"), shape=(3,))
    assert form(spec.rand().get("text")) == ((), (3,))
    assert form(spec.rand((2,)).get("text")) == ((2,), (3,))
    assert spec.rand((2,))[1]["text"] == "x"


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


def test_choices_project_to_the_nearest_alternative() -> None:
    spec = numbers()
    found = spec.project(torch.tensor([[2.0, 0.5], [4.0, 5.5], [0.5, 0.5]]))
    assert found.tolist() == [[1, 0.5], [5, 5.5], [0.5, 0.5]]
    with pytest.raises(RuntimeError, match=r"\[3\]"):
        spec.project(torch.zeros(3))


def test_zeros_and_ones_have_the_form_of_the_alternatives() -> None:
    assert numbers().one((3,)).tolist() == [[1, 1]] * 3
    assert numbers().zero().tolist() == [0, 0]
    assert texts().one().data == "left"


def test_choices_among_data_that_are_no_tensors() -> None:
    torch.manual_seed(0)
    spec = texts()
    assert {spec.rand().data for _ in range(30)} == {"left", "right"}
    assert spec.is_in(spec.rand((5, 2)))
    assert not spec.is_in(NonTensorData("up"))
    assert spec.project(NonTensorData("up")).data == "left"
    assert (spec.cardinality(), spec.enumerate().tolist()) == (2, ["left", "right"])
    assert spec.to_numpy(spec.encode("right")) == "right"


def test_choices_among_nests() -> None:
    one, other = (Composite(a=Bounded(low, low + 1, (2,))) for low in (0, 5))
    spec = Choice([one, other])
    assert spec.is_in(spec.rand((6,)))
    assert not spec.is_in(Composite(a=Bounded(2, 3, (2,))).rand())
    assert spec.is_in(spec.project(Composite(a=Bounded(2, 3, (2,))).rand()))


def test_choices_count_each_value_once() -> None:
    spec = Choice([Categorical(3), Categorical(5), Categorical(2)])
    assert (spec.cardinality(), spec.enumerate().tolist()) == (5, [0, 1, 2, 3, 4])
    assert numbers().cardinality() == float("inf")
    with pytest.raises(NotImplementedError):
        numbers().enumerate()


@each(
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


def test_choices_have_an_unknown_size_in_all_alternatives_or_none() -> None:
    spec = Choice([Bounded(0, 1, (2,)), Bounded(torch.tensor([0.0, 1.0]), 3)])
    with pytest.raises(ValueError, match="differ along"):
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


def form(value: Any) -> tuple[Any, ...]:
    """The shape of the stack of a value, and the batch size of its parts."""
    lead: tuple[int, ...] = ()
    while isinstance(value, NonTensorStack):
        lead, value = (*lead, len(value)), value[0]
    return lead, tuple(value.batch_size)


@each(
    ("arguments", "dims", "batch", "expected"),
    [
        ({}, 2, (), ((), (3, 4))),
        ({}, 2, (2,), ((2,), (3, 4))),
        ({"feature_dims": 1}, 1, (), ((3,), (4,))),
        ({"feature_dims": 1}, 1, (2, 5), ((2, 5, 3), (4,))),
        ({"feature_dims": 0}, 0, (2,), ((), (2, 3, 4))),
        ({"batched": True}, 0, (2,), ((), (2, 3, 4))),
    ],
)
def test_the_last_dimensions_are_those_of_the_datum(arguments: Any, dims: int, batch: Any, expected: Any) -> None:
    spec = NonTensor((3, 4), example_data="x", **arguments)
    assert (spec.feature_dims, spec.batched) == (dims, "batched" in arguments)
    for drawn in (spec.rand(batch), spec.zero(batch), spec.one(batch), spec.clone().rand(batch)):
        assert form(drawn) == expected
        assert drawn.batch_size == (*batch, 3, 4)
        assert spec.is_in(drawn)
    for changed in (spec.expand(2, 3, 4), spec.unsqueeze(0), spec.to("cpu"), spec[None], torch.stack([spec, spec])):
        assert (changed.feature_dims, changed.batched) == (dims, spec.batched)
    assert spec[0, 0].feature_dims == 0


@each("spec", [NonTensor((3,), example_data="x"), Choice([Unbounded((3,)), Unbounded((3,))])])
def test_attributes_are_assigned(spec: Any) -> None:
    for name, value in {"shape": torch.Size([5]), "device": torch.device("meta"), "dtype": torch.float64}.items():
        setattr(spec, name, value)
        assert getattr(spec, name) == value
    assert (spec.rand((2,)).shape, spec.zero().device) == ((2, 5), torch.device("meta"))
    spec.space, spec.domain = None, "other"
    assert (spec.space, spec.domain) == (None, "other")
