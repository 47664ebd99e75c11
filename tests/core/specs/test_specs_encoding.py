"""`encode`, `to_numpy`, and torch functions on specs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rbtool.core.specs.base import SpecTypeError
from rbtool.core.specs.bounded import Bounded, Unbounded
from rbtool.core.specs.categorical import Categorical


@pytest.mark.parametrize(
    "value", [[0, 1, 1], (0.0, 1.0, 1.0), np.array([0, 1, 1], np.int8), np.array([[0, 1, 1]], ">f8")]
)
def test_numbers_become_tensors_of_the_spec(value: Any) -> None:
    found = Bounded(0, 1, (3,)).encode(value)
    assert (found.dtype, found.tolist()) == (torch.float32, [0, 1, 1])


def test_tensors_pass_as_they_are() -> None:
    value = torch.zeros(9, dtype=torch.int8)
    assert Bounded(0, 1, (3,)).encode(value) is value


def test_lists_of_tensors_and_of_one_element() -> None:
    assert Unbounded((2,)).encode([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1, 2]
    assert Categorical(4).encode([3]).shape == ()
    assert Categorical(4).encode([[3]]).shape == ()
    assert Unbounded((-1, 2)).encode([[1, 2], [3, 4], [5, 6]]).shape == (3, 2)


@pytest.mark.parametrize(
    ("spec", "value", "error", "says"),
    [
        (Bounded(0, 1, (2, 3)), 0.5, RuntimeError, "does not fill"),
        (Bounded(0, 1, (3,)), np.zeros((5, 3)), RuntimeError, r"\[5, 3\]"),
        (Categorical(4), 1.5, RuntimeError, "does not fit"),
        (Categorical(4), float("nan"), RuntimeError, "does not fit"),
        (Categorical(4, dtype=torch.uint8), 300, RuntimeError, "does not fit"),
        (Categorical(2, dtype=torch.bool), 2, RuntimeError, "does not fit"),
        (Bounded(0, 1, ()), "a", TypeError, "numbers"),
        (Bounded(0, 1, ()), None, TypeError, "numbers"),
    ],
)
def test_what_cannot_be_encoded_is_refused(spec: Any, value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        spec.encode(value)


def test_the_callers_array_is_not_shared() -> None:
    array = np.array(0.5, np.float32)
    found = Bounded(0, 1, ()).encode(array)
    array[...] = 9
    assert found.item() == 0.5


def test_values_are_checked_where_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Bounded(0, 1, (1,))
    assert spec.encode([3.0]).tolist() == [3]
    assert spec.to_numpy(torch.tensor([3.0])).tolist() == [3]
    monkeypatch.setenv("CHECK_SPEC_ENCODE", "1")
    for ask in (lambda: spec.encode([3.0]), lambda: spec.to_numpy(torch.tensor([3.0]))):
        with pytest.raises(AssertionError, match="is not in BoundedContinuous"):
            ask()
    assert spec.to_numpy(torch.tensor([3.0]), safe=False).tolist() == [3]


def test_the_device_can_be_left_out() -> None:
    spec = Unbounded((1,), device="meta")
    assert spec.encode([3.0]).device.type == "meta"
    assert spec.encode([3.0], ignore_device=True).tolist() == [3]


def test_bfloat16_becomes_float32_in_numpy() -> None:
    assert Unbounded((1,), dtype=torch.bfloat16).to_numpy(torch.ones(1, dtype=torch.bfloat16)).dtype == np.float32


def test_encoded_values_can_be_remembered() -> None:
    spec = Categorical(4)
    with pytest.warns(UserWarning, match="experimental"):
        spec.memoize_encode()
    first = spec.encode(3)
    first += 1
    assert spec.encode(3).item() == 3
    assert spec.encode([2]).item() == 2
    spec.erase_memoize_cache()
    assert spec.encode(3).item() == 3
    assert spec == Categorical(4)
    with pytest.warns(UserWarning, match="experimental"):
        spec.memoize_encode(False)


def test_a_type_check_says_what_was_found() -> None:
    with pytest.raises(TypeError, match=r"'x' is of type torch.int32, expected a tensor of torch.float32"):
        Unbounded((1,)).type_check(torch.zeros(1, dtype=torch.int32), "x")
    with pytest.raises(TypeError, match="the value is a list"):
        Unbounded((1,)).type_check([1.0])


def test_torch_functions_on_specs() -> None:
    spec: Any = Bounded(torch.arange(3.0), 5)
    assert torch.index_select(spec, 0, torch.tensor([2, 0])).low.tolist() == [2, 0]
    assert torch.index_select(spec.expand(2, 3), -1, torch.tensor([1])).shape == (2, 1)
    with pytest.raises(NotImplementedError, match="out is set"):
        torch.stack([spec, spec], out=torch.zeros(2))
    with pytest.raises(SpecTypeError, match=r"torch.add does not take a spec"):
        torch.add(spec, 1)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda spec: spec.expand(3, 4), ValueError),
        (lambda spec: spec.expand(2), ValueError),
        (lambda spec: spec.reshape(5), ValueError),
        (lambda spec: spec.reshape(-1, -1), ValueError),
        (lambda spec: spec.unflatten(0, (2, 2)), ValueError),
        (lambda spec: spec.flatten(1, 0), ValueError),
        (lambda spec: spec.squeeze(2), IndexError),
        (lambda spec: spec.unsqueeze(4), IndexError),
        (lambda spec: spec.unbind(2), IndexError),
        (lambda spec: spec[0, 0, 0], IndexError),
        (lambda spec: spec[2], IndexError),
        (lambda spec: spec[..., ...], IndexError),
        (lambda spec: spec["a"], IndexError),
        (lambda spec: spec[True], IndexError),
        (lambda spec: spec.expand(-1, 2, 3).unbind(0), NotImplementedError),
    ],
)
def test_changes_of_shape_that_do_not_fit_are_refused(change: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        change(Bounded(torch.arange(6.0).reshape(2, 3), 9))


@pytest.mark.parametrize(
    "index", [[0, 1], [[0, 1], [1, 0]], range(2), [], [True, False], np.array([1, 0]), (slice(None), [2, 0])]
)
def test_indices_of_many_kinds(index: Any) -> None:
    low = np.arange(6.0).reshape(2, 3)
    part = np.asarray(index, dtype=None if len(index) else int) if not isinstance(index, tuple) else index
    assert Bounded(low, 9)[index].low.tolist() == low[part].tolist()


def test_names_of_one_thing() -> None:
    spec = Bounded(0, 1, (2, 3))
    assert spec.ndim == spec.ndimension() == 2
    assert torch.equal(spec.zeros((4,)), spec.zero((4,)))
    assert torch.equal(spec.ones(4), spec.one((4,)))
    assert spec.is_in(spec.sample((4,)))
    assert spec.clear_device_() is spec
    low, high = spec.space
    assert (low is spec.low, high is spec.high) == (True, True)


def test_a_value_outside_is_named_by_numbers_or_by_shape() -> None:
    spec = Bounded(0, 1, (2,))
    with pytest.raises(AssertionError, match=r"a tensor of torch.float32 \[2.0, 0.0\] is not in Bounded"):
        spec.assert_is_in(torch.tensor([2.0, 0.0]))
    with pytest.raises(AssertionError, match=r"a tensor of torch.float32 \[50, 2\] is not in"):
        spec.assert_is_in(torch.full((50, 2), 2.0))
    with pytest.raises(AssertionError, match="…") as raised:
        Categorical(2).assert_is_in("a" * 1000)
    assert len(str(raised.value)) < 400
