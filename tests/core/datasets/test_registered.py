"""Datasets under prefixes that a program registers."""

from __future__ import annotations

from typing import Any

import pytest

import rbtool
from rbtool.core.datasets import registered


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "_registered", {})


def loader(*arguments: Any, **options: Any) -> tuple[Any, Any]:
    return arguments, options


@pytest.mark.parametrize("dataset", [loader, f"{__name__}:loader"])
def test_what_is_registered_gets_the_name_and_the_arguments(dataset: Any) -> None:
    rbtool.register_dataset(" Mine ", dataset)
    assert rbtool.load_dataset("mine:a:b", 32, seed=3, own="x") == (("a:b", 32), {"seed": 3, "own": "x"})
    assert rbtool.load_dataset(dataset="MINE:a") == (("a",), {})


def test_other_names_are_looked_up_as_before() -> None:
    rbtool.register_dataset("mine", loader)
    with pytest.raises(rbtool.DatasetNotFoundError, match="nothing at"):
        rbtool.load_dataset("mine")
    with pytest.raises(rbtool.DatasetNotFoundError, match="yours:a"):
        rbtool.load_dataset("yours:a")


@pytest.mark.parametrize("taken", ["mine", "D4RL", "hf"])
def test_a_prefix_that_is_taken_is_replaced_only_if_asked_for(taken: str) -> None:
    rbtool.register_dataset("mine", loader)
    with pytest.raises(KeyError, match="is taken"):
        rbtool.register_dataset(taken, dict)
    rbtool.register_dataset(taken, lambda name: name, replace=True)
    assert rbtool.load_dataset(f"{taken}:x") == "x"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((3, loader), TypeError), (("", loader), ValueError), ((" ", loader), ValueError),
        (("a:b", loader), ValueError), (("a", 3), TypeError), (("a", "no place"), ValueError),
    ],
)  # fmt: skip
def test_what_cannot_be_registered_is_refused(arguments: tuple[Any, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match="expected"):
        rbtool.register_dataset(*arguments)


@pytest.mark.parametrize("place", ["no_such_module:x", f"{__name__}:no_such_name", f"{__name__}:__doc__"])
def test_a_place_where_nothing_can_be_called_is_one_sentence(place: str) -> None:
    rbtool.register_dataset("mine", place)
    with pytest.raises(rbtool.RbtoolError, match="the registered dataset"):
        rbtool.load_dataset("mine:x")
