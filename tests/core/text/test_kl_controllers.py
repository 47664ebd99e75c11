"""Controllers of the KL coefficient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.errors import UsageError
from rbtool.core.text.rollouts import AdaptiveKLController, ConstantKLController

NAN, INFINITE = float("nan"), float("inf")


def test_a_constant_coefficient_stays() -> None:
    model = SimpleNamespace(kl_coef=0.3)
    assert ConstantKLController(kl_coef=0.2).update([1.0]) == 0.2
    assert ConstantKLController(model=model).update() == 0.3
    assert ConstantKLController(model=model, kl_coef=0.5).update([1.0]) == model.kl_coef == 0.5


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=9), st.floats(0.01, 2), st.floats(0.1, 20), st.integers(20, 99)
)
def test_the_adaptive_coefficient_follows_the_formula(
    values: list[float], first: float, target: float, horizon: int
) -> None:
    controller = AdaptiveKLController(init_kl_coef=first, target=target, horizon=horizon)
    error = min(max(-sum(values) / len(values) / first / target - 1, -0.2), 0.2)
    expected = first * (1 + error * len(values) / horizon)
    assert controller.update(torch.tensor(values, dtype=torch.float64)) == pytest.approx(expected, rel=1e-9)
    assert controller.coef == pytest.approx(expected, rel=1e-9)


def test_the_coefficient_goes_towards_the_target_and_to_the_model() -> None:
    model = SimpleNamespace(kl_coef=None)
    controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10, model=model)
    assert model.kl_coef == 0.1
    assert controller.update([-0.1 * 60]) == model.kl_coef == pytest.approx(0.102)
    assert controller.update([0.0]) == model.kl_coef == pytest.approx(0.102 * 0.98)


def test_a_model_without_a_coefficient_is_an_attribute_error() -> None:
    for controller in (
        lambda: ConstantKLController(model=torch.nn.Linear(1, 1)),
        lambda: AdaptiveKLController(init_kl_coef=0.1, target=1.0, horizon=9, model=object()),
    ):
        with pytest.raises(AttributeError, match="has no attribute kl_coef"):
            controller()


@pytest.mark.parametrize(
    "arguments",
    [
        {"init_kl_coef": 0}, {"init_kl_coef": NAN}, {"init_kl_coef": "much"}, {"init_kl_coef": None},
        {"target": -1.0}, {"target": INFINITE}, {"horizon": 0}, {"horizon": True},
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any]) -> None:
    ((name, _),) = arguments.items()
    with pytest.raises(UsageError, match=f"{name} is .* expected a number above 0"):
        AdaptiveKLController(**{"init_kl_coef": 0.1, "target": 6.0, "horizon": 10, **arguments})


@pytest.mark.parametrize("coef", [-0.1, NAN, INFINITE, "much", True])
def test_a_constant_that_is_no_coefficient_is_refused(coef: Any) -> None:
    with pytest.raises(UsageError, match="expected a number from 0"):
        ConstantKLController(kl_coef=coef)


def test_neither_coefficient_nor_model_is_refused() -> None:
    with pytest.raises(UsageError, match="kl_coef and model are None"):
        ConstantKLController()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "kl_values is None"), ([], "kl_values is empty"), ([0.1, NAN], "kl_values contains nan"),
        (["much"], "is not a number"), (0.5, "is a float"), ([0.0] * 50, "kl_values has 50 values"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_change_nothing(values: Any, message: str) -> None:
    controller = AdaptiveKLController(init_kl_coef=0.1, target=6.0, horizon=10)
    with pytest.raises(UsageError, match=message):
        controller.update(values)
    assert controller.coef == 0.1
