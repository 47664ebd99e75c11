"""The rule about recorded spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rbtool.core.ted.rules import Rows, SpaceRule
from rbtool.core.ted.schema import Field

BOX = {"type": "Box", "dtype": "float32", "shape": [2], "low": -1.0, "high": [1.0, "inf"]}


def messages(spaces: Any, values: Any, key: tuple[str, ...] = ("action",), dtype: str = "float32") -> list[str]:
    """What the rule says of rows with these values."""
    array = np.asarray(values, "uint16" if dtype == "bfloat16" else dtype)
    flags = np.zeros(len(array), bool)
    rule = SpaceRule([Field(key, dtype, array.shape[1:], "action")], len(array), spaces=spaces)
    rule.see(Rows(0, {key: array}, flags, flags, np.zeros(len(array), int), flags))
    return [finding.message for finding in rule.findings()]


def test_values_outside_are_counted_and_named() -> None:
    found = messages({"action": BOX}, [[0, 9], [-1, 0], [1.5, 0], [0, -2], [np.nan, 0]])
    where = "(first: step 2, episode 0)"
    outside = "action is outside its recorded space, -1 to 1 … inf, in 2 of 5 steps"
    assert found == [f"{outside}: values outside it are from -2 to 1.5 {where}"]
    assert messages({"action": BOX}, [[1, 1e30]]) == []


@pytest.mark.parametrize(
    ("space", "dtype", "inside", "outside"),
    [
        ({"type": "Discrete", "n": 3}, "int64", [0, 2], [-1, 3]),
        ({"type": "Discrete", "n": 3, "start": -1}, "int8", [-1, 1], [-2, 2]),
        ({"type": "MultiBinary", "n": 1}, "int8", [0, 1], [-1, 2]),
        ({"type": "Box", "shape": [1], "low": 0.1, "high": 0.3}, "float32", [0.1, 0.3], [0.09, 0.31]),
        ({"type": "Box", "shape": [1], "low": "-inf", "high": 5}, "float64", [-1e300, 5], [5.1]),
        ({"type": "Box", "shape": [1], "low": -1e300, "high": 1}, "float16", [-6e4, 1], [2]),
        ({"type": "Box", "shape": [1], "low": 0.5, "high": 2.5}, "uint8", [1, 2], [0, 3]),
    ],
)
def test_spaces_of_many_kinds(space: Any, dtype: str, inside: list[float], outside: list[float]) -> None:
    assert messages({"action": space}, np.array(inside)[:, None], dtype=dtype) == []
    for value in outside:
        assert len(messages({"action": space}, [[value]], dtype=dtype)) == 1


def test_nested_spaces_are_those_of_nested_fields_and_of_next() -> None:
    inner = {"type": "Discrete", "n": 2}
    spaces = {"observation": {"type": "Dict", "subspaces": {"a": {"type": "Tuple", "subspaces": [None, inner]}}}}
    assert len(messages(spaces, [[5]], ("observation", "a", "1"), "int64")) == 1
    assert len(messages(spaces, [[5]], ("next", "observation", "a", "1"), "int64")) == 1
    assert messages(spaces, [[5]], ("observation", "a", "0"), "int64") == []


@pytest.mark.parametrize(
    ("space", "values", "dtype"),
    [
        (None, [[9]], "int64"),
        ({"type": "Text"}, [[9]], "uint8"),
        ({"type": "Box", "shape": [3], "low": [0, 0, 0], "high": [1, 1, 1]}, [[9, 9]], "float32"),
        ({"type": "Box", "shape": [1], "low": "-inf", "high": "inf"}, [[9]], "float32"),
        ({"type": "Box", "shape": [1], "low": 0, "high": 255}, [[9]], "uint8"),
        ({"type": "Box", "shape": [1], "low": 0, "high": 1}, [[9]], "bfloat16"),
        ({"type": "Box", "shape": [1], "low": 0, "high": 1}, [[True]], "bool"),
    ],
)
def test_what_has_no_limit_to_compare_with_is_left_alone(space: Any, values: Any, dtype: str) -> None:
    assert messages({"action": space}, values, dtype=dtype) == []
