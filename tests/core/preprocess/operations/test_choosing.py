"""Episodes, filter and where: what is left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.core.errors import UsageError
from rbtool.core.format.episodes import EpisodeRow, EpisodeTable
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


@pytest.mark.parametrize(
    ("operations", "left"),
    [
        ({"filter": "length > 50 and return > 200"}, [0, 2]),
        ({"filter": ["length > 50", "truncated"]}, [2, 3]),
        ({"filter": "not terminated"}, [2, 3]),
        ({"filter": "done"}, [0, 1, 2, 3]),
        ({"filter": "seed == 0"}, [2]),
        ({"filter": "has_seed"}, [0, 2]),
        ({"filter": "return == return"}, [0, 1, 2]),
        ({"episodes": "0,5:7"}, [0, 2, 3]),
        ({"episodes": "0:2", "filter": "length < 50"}, [1]),
        ({"episodes": "5:"}, [2, 3]),
    ],
)
def test_episodes_are_chosen_from_the_table(operations, left):
    assert program_of(operations).selects(TABLE).tolist() == left


def test_without_such_an_operation_nobody_chooses():
    assert program_of({"select": "action"}).selects(TABLE) is None


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ({"filter": "lenght > 3"}, "names 'lenght', which is not there; did you mean 'length'"),
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
def test_choices_that_cannot_be_made(operations, words):
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
    names = {
        ("next", "truncated"): gap_follows,
        ("next", "done"): [g or r in ends for g, r in zip(gap_follows, kept, strict=True)],
    }
    for key, expected in names.items():
        assert found.columns[key].values[:, 0].tolist() == expected
    assert np.array_equal(found.columns["next", "terminated"].values[:, 0], np.isin(kept, ends))
    for key in (("observation", "position"), ("next", "observation", "position"), ("action",), ("episode",)):
        assert np.array_equal(found.columns[key].values, block.columns[key].values[kept])
    assert found.pieces.rows.sum() == len(kept)


@pytest.mark.parametrize(
    ("condition", "rows_left"),
    [
        ("not truncated", [0, 1, 3, 4]),
        ("next.truncated", [2]),
        ("flag", [0, 2, 4]),
        ("flag and not done", [0]),
        ("vector[1] >= 5", [2, 3, 4]),
        ("matrix[1, 0] == 6", [1]),
        ("half > 1", [3, 4]),
        ("half < 1e9 and half > -1e9 and flag", [0, 2, 4]),
        ("episode == 1", [3, 4]),
        ("1 < 2", [0, 1, 2, 3, 4]),
    ],
)
def test_names_of_rows(rows, do, condition, rows_left):
    made = rows(
        [3, 2], ("truncated", "terminated"),
        flag=np.array([[True], [False], [True], [False], [True]]), vector=np.arange(10.0).reshape(5, 2),
        matrix=np.arange(20).reshape(5, 2, 2).astype(np.uint8), half=np.arange(5).astype(np.float16) / 2,
        row=np.arange(5),
    )  # fmt: skip
    assert do(made, where=condition)["row"].tolist() == rows_left


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("observation > 1", "names 'observation', which is not there; did you mean 'observation.count'"),
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
def test_conditions_that_make_no_sense(rows, do, condition, words):
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
