"""NonTensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from rbtool.core.specs.composite import Composite
from rbtool.core.specs.non_tensor import NonTensor


def test_the_example_is_drawn_in_the_shape_asked_for() -> None:
    drawn = NonTensor((3,), example_data={"a": 1}).rand((2,))
    assert drawn.batch_size == (2, 3)
    assert drawn.data == {"a": 1}


def test_membership_is_anything_but_tensors() -> None:
    spec = NonTensor((2,))
    assert [spec.is_in(value) for value in ("a", None, 3, np.zeros(3), NonTensorData("a"))] == [True] * 5
    assert [spec.is_in(value) for value in (torch.zeros(2), TensorDict({}))] == [False, False]
    with pytest.raises(TypeError, match="'x' is a Tensor"):
        spec.type_check(torch.zeros(2), "x")


def test_sharp_edge_6_projecting_gives_the_example() -> None:
    spec = NonTensor((), example_data="a")
    assert spec.project("b") == "b"
    assert spec.project(torch.zeros(2)).data == "a"


def test_sharp_edge_6_equality_looks_at_everything() -> None:
    specs = [
        NonTensor((2,)), NonTensor((3,)), NonTensor((2,), example_data="a"), NonTensor((2,), feature_dims=1),
        NonTensor((2,), device="cpu"), NonTensor((2,), dtype=torch.float32), NonTensor((2,), batched=True),
        NonTensor((2,), example_data=np.zeros(2)), NonTensor((2,), example_data=np.zeros(3)),
        NonTensor((2,), example_data=["b", "c"]), NonTensor((2,), example_data=["b", "c"], batched=True),
    ]  # fmt: skip
    for number, one in enumerate(specs):
        assert [other for other, spec in enumerate(specs) if spec == one] == [number]
    assert NonTensor((2,), example_data=np.ones(2)) == NonTensor((2,), example_data=np.ones(2))


def test_sharp_edge_6_feature_dims_leave_the_example_whole() -> None:
    for dims in (0, 1, 2):
        drawn = NonTensor((2, 3), example_data=["a", "b", "c"], feature_dims=dims).rand((4,))
        assert drawn.batch_size == (4, 2, 3)
        assert drawn.data == ["a", "b", "c"]


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


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="both set"):
        NonTensor((2,), batched=True, feature_dims=1)
    with pytest.raises(ValueError, match="feature_dims is 2"):
        NonTensor((2,), feature_dims=2)
    for example in ("ab", ["a"], 3):
        with pytest.raises(ValueError, match="nested sequences"):
            NonTensor((2,), example_data=example, batched=True)
    with pytest.raises(ValueError, match="one datum for each place"):
        NonTensor((-1,), example_data=["a"], batched=True)
    with pytest.raises(ValueError, match="any size"):
        NonTensor((1,), example_data=["a"], batched=True).make_neg_dim(0)


def test_values_are_wrapped_and_taken_out() -> None:
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


def test_in_a_composite() -> None:
    spec = Composite(text=NonTensor((), example_data="go"))
    drawn = spec.rand((3,))
    assert drawn["text"] == "go"
    assert spec.is_in(drawn)
    assert spec.project(TensorDict({"text": torch.zeros(3)}, [3]))["text"] == "go"
    with pytest.raises(NotImplementedError):
        spec.cardinality()
