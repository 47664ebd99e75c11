"""A program gives the same however its rows are cut into blocks, and the same after a journey to another process."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PROGRAMS = [
    {"select": "observation"},
    {"cast": "observation.position=float32", "cat": "state=observation.position,observation.count"},
    {"flatten": True, "clip_reward": "-1:0.5", "normalize": ["observation", "reward:min-max"]},
    {"n_step": 3, "gamma": 0.9, "normalize": "observation:quantile", "exclude": "episode"},
    {"where": "reward > -0.5", "return_to_go": True, "rename": "observation=state"},
    {
        "where": ["observation.position[1] < 1 and not terminated", "1 < 2"],
        "n_step": 2,
        "mc_return": True,
        "gamma": 0.5,
    },
]
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)
ENDS = st.lists(st.sampled_from(["terminated", "truncated", "open"]), min_size=1, max_size=3)


@pytest.mark.parametrize("operations", PROGRAMS)
@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS, ends=ENDS, seed=st.integers(0, 99), data=st.data())
def test_any_cut_gives_the_same(operations, rows, work, apply, cut, columns, lengths, ends, seed, data):
    made = fields, block = rows(lengths, ends, seed)
    known = work(made, **operations)
    places = np.cumsum(lengths)[:-1].tolist() if known.whole_episodes else list(range(1, sum(lengths)))
    cuts = data.draw(st.lists(st.sampled_from(places))) if places else []
    whole = apply(known, fields, block)
    parts = [apply(pickle.loads(pickle.dumps(known)), fields, part) for part in cut(block, cuts)]
    found, expected = columns(parts), columns([whole])
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].tobytes() == values.tobytes(), name
    assert np.concatenate([part.pieces.rows for part in parts]).sum() == whole.rows
    if known.whole_episodes:
        for column in ("episode", "rows", "begins", "ends"):
            got = np.concatenate([getattr(part.pieces, column) for part in parts])
            assert got.tolist() == getattr(whole.pieces, column).tolist()


def test_no_rows_give_no_rows(rows, work, apply, cut):
    made = fields, block = rows([3, 2])
    empty = cut(block, [])[0].__class__(
        {key: column._replace(values=column.values[:0]) for key, column in block.columns.items()},
        block.pieces.of((), (), (), ()), 0,
    )  # fmt: skip
    for operations in PROGRAMS:
        assert apply(work(made, **operations), fields, empty).rows == 0


def test_episodes_of_which_nothing_is_left_are_no_trouble(rows, do):
    made = rows([3, 2])
    found = do(made, where="episode > 5", n_step=2, gamma=0.9, return_to_go=True)
    assert all(not len(values) for values in found.values())


def test_the_source_is_left_as_it_is(rows, work):
    fields, block = rows([4, 3])
    before = {key: column.values.copy() for key, column in block.columns.items()}
    work((fields, block), **PROGRAMS[5])
    assert all(np.array_equal(column.values, before[key]) for key, column in block.columns.items())
