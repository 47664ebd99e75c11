"""Episodes, filter and where: what is left; and the expressions that choose it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.core.errors import UsageError
from rbtool.core.format.episodes import EpisodeRow, EpisodeTable
from rbtool.core.preprocess.operations.built_in import Name, parse_condition
from rbtool.core.preprocess.operations.program import program_of
from rbtool.core.preprocess.processor import BlockColumn
from rbtool.core.ted.episodes import EndReason
from rbtool.core.ted.schema import as_numbers

TABLE = EpisodeTable.from_rows(
    [
        EpisodeRow(number, length, total, terminated, not terminated, EndReason(0 if terminated else 1), seed)
        for number, length, total, terminated, seed in [
            (0, 60, 250.0, True, 7), (1, 40, 300.0, True, None),
            (5, 51, 200.5, False, 0), (6, 99, float("nan"), False, None),
        ]
    ]
)  # fmt: skip


@each(
    ("operations", "left"),
    [
        ({"filter": "length > 50 and return > 200"}, [0, 2]), ({"filter": ["length > 50", "truncated"]}, [2, 3]),
        ({"filter": "not terminated"}, [2, 3]), ({"filter": "done"}, [0, 1, 2, 3]), ({"filter": "seed == 0"}, [2]),
        ({"filter": "has_seed"}, [0, 2]), ({"filter": "return == return"}, [0, 1, 2]),
        ({"episodes": "0,5:7"}, [0, 2, 3]), ({"episodes": "0:2", "filter": "length < 50"}, [1]),
        ({"episodes": "5:"}, [2, 3]),
    ],
)  # fmt: skip
def test_episodes_are_chosen_from_the_table(operations, left):
    assert program_of(operations).selects(TABLE).tolist() == left
    assert program_of({"select": "action"}).selects(TABLE) is None


@each(
    ("operations", "words"),
    [
        ({"filter": "lenght > 3"}, "names 'lenght', which does not exist; did you mean 'length'"),
        ({"filter": "length"}, "compares 'length', which is neither true nor false, with nothing"),
        ({"filter": "has_seed and not seed"}, "compares 'seed'"),
        ({"filter": "1"}, "expected a comparison"),
        ({"filter": "length[0] > 3"}, "episodes have one length"),
        ({"filter": "__import__('os')"}, "not understood"),
        ({"filter": "length > 1000"}, "none of 4 episodes is left by length > 1000"),
        ({"episodes": "3"}, "asks for episode 3, which is not there"),
        ({"episodes": "a"}, "not understood"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(operations, words):
    with pytest.raises(UsageError, match=words):
        program_of(operations).selects(TABLE)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_where_splits_episodes_at_gaps(rows, work, apply, lengths, seed):
    made = fields, block = rows(lengths, ("terminated",), seed)
    keep = block.columns["next", "reward"].values[:, 0] > 0
    found = apply(work(made, where="reward > 0"), fields, block)
    kept = np.flatnonzero(keep)
    ends = np.cumsum(lengths) - 1
    gap_follows = [row not in ends and (row + 1) not in kept for row in kept]
    ended = [gap or row in ends for gap, row in zip(gap_follows, kept, strict=True)]
    assert found.columns["next", "truncated"].values[:, 0].tolist() == gap_follows
    assert found.columns["next", "done"].values[:, 0].tolist() == ended
    assert np.array_equal(found.columns["next", "terminated"].values[:, 0], np.isin(kept, ends))
    for key in (("observation", "position"), ("next", "observation", "position"), ("action",), ("episode",)):
        assert np.array_equal(found.columns[key].values, block.columns[key].values[kept])
    assert found.pieces.rows.sum() == len(kept)


@each(
    ("condition", "rows_left"),
    [
        ("not truncated", [0, 1, 3, 4]), ("next.truncated", [2]), ("flag", [0, 2, 4]), ("flag and not done", [0]),
        ("vector[1] >= 5", [2, 3, 4]), ("matrix[1, 0] == 6", [1]), ("half > 1", [3, 4]),
        ("half < 1e9 and half > -1e9 and flag", [0, 2, 4]), ("episode == 1", [3, 4]), ("1 < 2", [0, 1, 2, 3, 4]),
    ],
)  # fmt: skip
def test_rows_are_chosen_by_their_columns(rows, do, condition, rows_left):
    made = rows(
        [3, 2], ("truncated", "terminated"),
        flag=np.array([[True], [False], [True], [False], [True]]), vector=np.arange(10.0).reshape(5, 2),
        matrix=np.arange(20).reshape(5, 2, 2).astype(np.uint8), half=np.arange(5).astype(np.float16) / 2,
        row=np.arange(5),
    )  # fmt: skip
    assert do(made, where=condition)["row"].tolist() == rows_left


@each(
    ("condition", "words"),
    [
        ("observation > 1", "names 'observation', which does not exist; did you mean 'observation.count'"),
        ("observation.position > 1", r"observation.position has \[3\] numbers a row"),
        ("observation.position[3] > 1", r"observation.position\[3\], and"),
        ("observation.count[0] > 1", "has one number a row"),
        ("length > 1", "names 'length'"),
        ("action[0] = 1", "found '='"),
        ("reward", "compares 'reward', which is neither true nor false, with nothing"),
        ("done and action[0]", r"compares 'action\[0\]', which is"),
        ("wave > 1", "complex and have no order"),
    ],
)
def test_conditions_that_make_no_sense_are_refused(rows, do, condition, words):
    with pytest.raises(UsageError, match=words):
        do(rows([2], wave=np.array([1j, 2])), where=condition)


def test_a_flag_of_any_type_is_set_where_rows_are_left_out(rows, work, apply):
    fields, block = rows([4], row=np.arange(4))
    key = ("next", "truncated")
    bare = BlockColumn("bfloat16", np.zeros((4, 1), np.uint16))
    made = tuple(replace(field, dtype="bfloat16") if field.key == key else field for field in fields)
    block = replace(block, columns={**block.columns, key: bare})
    found = apply(work((made, block), where="row != 2"), made, block).columns[key]
    assert as_numbers(found.values, found.dtype).ravel().tolist() == [0, 1, 0]
    assert not bare.values.any()


def test_root_flags_are_reached_where_next_has_none(rows, do):
    made = rows([3], reward=np.arange(3.0))
    assert len(do(made, where="reward > 100")["episode"]) == 0
    fields, block = made
    bare = tuple(field for field in fields if field.key != ("next", "reward"))
    assert do((bare, block), where="reward > 0.5")["reward"].tolist() == [1, 2]


COLUMNS = {
    Name("length", ()): np.array([10, 50, 51, 200]),
    Name("return", ()): np.array([300.0, 10.0, 201.5, np.nan]),
    Name("next.truncated", ()): np.array([True, False, False, True]),
    Name("observation", (0,)): np.array([-1.0, 0.0, 0.5, 2.0]),
    Name("image", (1, 2)): np.array([0, 255, 7, 7], np.uint8),
}
KNOWN = {name.field: values.dtype == bool for name, values in COLUMNS.items()}


@each(
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


@each(
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
        ("length.real > 1", "names 'length.real', which does not exist"),
        ("lenght > 1", "names 'lenght', which does not exist; did you mean 'length'"),
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
def test_other_texts_are_refused_with_the_place_of_the_error(text: str, words: str) -> None:
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
