from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.core.preprocess.operations.filters import Name, parse_condition

COLUMNS = {
    Name("length", ()): np.array([10, 50, 51, 200]),
    Name("return", ()): np.array([300.0, 10.0, 201.5, np.nan]),
    Name("next.truncated", ()): np.array([True, False, False, True]),
    Name("observation", (0,)): np.array([-1.0, 0.0, 0.5, 2.0]),
    Name("image", (1, 2)): np.array([0, 255, 7, 7], np.uint8),
}
KNOWN = {name.field: values.dtype == bool for name, values in COLUMNS.items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("length > 50", [0, 0, 1, 1]),
        ("length > 50 and return > 200", [0, 0, 1, 0]),
        ("length > 50 or return > 200", [1, 0, 1, 1]),
        ("not next.truncated", [0, 1, 1, 0]),
        ("not not next.truncated", [1, 0, 0, 1]),
        ("next.truncated == true", [1, 0, 0, 1]),
        ("next.truncated != false and length < 100", [1, 0, 0, 0]),
        ("10 < length <= 51", [0, 1, 1, 0]),
        ("50<=length", [0, 1, 1, 1]),
        ("observation[0] >= -0.5 and observation[0] < 1e0", [0, 1, 1, 0]),
        ("observation[ 0 ] > -1", [0, 1, 1, 1]),
        ("image[1, 2] == 7", [0, 0, 1, 1]),
        ("return == return", [1, 1, 1, 0]),
        ("length == 10 or length == 50 and return > 200", [1, 0, 0, 0]),
        ("(length == 10 or length == 50) and return > 200", [1, 0, 0, 0]),
        ("not (length > 50 and return > 200)", [1, 1, 0, 1]),
        ("1 > 2", [0, 0, 0, 0]),
        ("true != next.truncated", [0, 1, 1, 0]),
        ("((not (next.truncated)))", [0, 1, 1, 0]),
    ],
)
def test_conditions_hold_where_they_should(text: str, expected: list[int]) -> None:
    condition = parse_condition(text, KNOWN)
    assert condition.holds(COLUMNS, 4).astype(int).tolist() == expected
    assert set(condition.names) <= set(COLUMNS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a field or a number, found the end"),
        ("length >", "found the end"),
        ("length > 50 and", "found the end"),
        ("length 50", r"found '50' at character 8"),
        ("length = 50", r"found '=' at character 8"),
        ("__import__('os')", r"found '\(' at character 11"),
        ("length + 1 > 3", r"found '\+' at character 8"),
        ("length > 'a'", '"\'" at character 10'),
        ("(length > 1", r"expected '\)', found the end"),
        ("length > 1)", r"found '\)'"),
        ("and", "found 'and' at character 1"),
        ("length.real > 1", "names 'length.real', which is not there"),
        ("lenght > 1", "names 'lenght', which is not there; did you mean 'length'"),
        ("observation[-1] > 1", r"found '\['"),
        ("1.2.3 > 1", "found '1'"),
        ("1", "expected a comparison, found the end"),
        ("true", "expected a comparison, found the end"),
        ("length and 5", "expected a comparison, found the end"),
        ("length and next.truncated", "compares 'length', which is neither true nor false, with nothing"),
        ("not length", "compares 'length', which is"),
        ("next.truncated or (length)", "compares 'length', which is"),
        ("observation[0]", r"compares 'observation\[0\]', which is"),
        ("1 < (length > 3)", r"expected a field or a number, found '\(' at character 5"),
        ("(length > 3) == true", r"expected 'and', 'or' or the end, found '==' at character 14"),
        ("length > not next.truncated", "found 'not' at character 10"),
        ("(" * 5000 + "length" + ")" * 5000, "nested less than 100 deep"),
    ],
)
def test_anything_else_is_told_with_its_place(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_condition(text, KNOWN)


NAMES = sorted(COLUMNS)
SIGNS = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
LEAVES = st.one_of(
    st.builds("{} {} {}".format, st.sampled_from([str(name) for name in NAMES]), SIGNS, st.integers(-5, 300)),
    st.sampled_from(["next.truncated", "next.truncated == False", "True == True"]),
)
TREES = st.recursive(
    LEAVES,
    lambda part: st.one_of(
        st.builds("({} and {})".format, part, part),
        st.builds("({} or {})".format, part, part),
        st.builds("(not {})".format, part),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_conditions_mean_what_they_mean_in_python(text: str) -> None:
    condition = parse_condition(text.replace("True", "true").replace("False", "false"))
    for row in range(4):
        code, scope = text, {}
        for number, name in enumerate(NAMES):
            code, scope = code.replace(str(name), f"v{number}"), scope | {f"v{number}": COLUMNS[name][row].item()}
        expected: Any = eval(code, {}, scope)
        assert condition.holds(COLUMNS, 4)[row] == bool(expected), (text, row)


@given(st.text(max_size=30))
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        parse_condition(text)
