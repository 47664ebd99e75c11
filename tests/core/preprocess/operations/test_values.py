"""Cast and clip-reward: what values become, and what is refused rather than lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rbtool.core.engine.tasks import ResultRefused
from rbtool.core.errors import UsageError
from rbtool.core.preprocess.operations.base import cast_into
from rbtool.core.preprocess.processor import BlockColumn
from rbtool.core.ted.schema import DTYPES, numpy_dtype


def cast(values, dtype, source=None):
    values = np.asarray(values)
    out = np.empty(values.shape, numpy_dtype(dtype))
    cast_into(out, BlockColumn(source or values.dtype.name, values), dtype, "x")
    return out


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (np.array([0.1, -2.5, np.nan, np.inf]), "float32", np.array([0.1, -2.5, np.nan, np.inf], np.float32)),
        (np.array([0.1, 1e-300]), "float32", np.array([0.1, 0], np.float32)),
        (np.array([1.0, -3.0]), "int8", np.array([1, -3], np.int8)),
        (np.array([255, 0], np.int64), "uint8", np.array([255, 0], np.uint8)),
        (np.array([2**24, -(2**24)]), "float32", np.array([2.0**24, -(2.0**24)], np.float32)),
        (np.array([0, 1], np.uint8), "bool", np.array([False, True])),
        (np.array([True, False]), "float32", np.array([1, 0], np.float32)),
        (np.array([1 + 0j, 2]), "float64", np.array([1.0, 2.0])),
        (np.array([1.5, 2]), "complex64", np.array([1.5, 2], np.complex64)),
        (np.array([2**63], np.uint64), "uint64", np.array([2**63], np.uint64)),
        (np.empty(0), "int8", np.empty(0, np.int8)),
    ],
)
def test_what_fits_is_cast(values, dtype, expected):
    found = cast(values, dtype)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("values", "dtype", "words"),
    [
        ([0.5], "int64", "0.5 of 'x' cannot be represented as int64"),
        ([np.nan], "int32", "nan of 'x' cannot be represented as int32"),
        ([np.inf], "int32", "inf of 'x' cannot be represented as int32"),
        ([2.0**63], "int64", "cannot be represented as int64"),
        ([-129.0], "int8", "cannot be represented as int8"),
        ([300], "uint8", "300 of 'x' does not fit uint8, which goes from 0 to 255"),
        ([-1, 4], "uint64", "-1 of 'x' does not fit uint64"),
        ([2**24 + 1], "float32", "16777217 of 'x' need not be exact in float32"),
        ([1e39, -np.inf], "float32", "1e.39 of 'x' is too large for float32"),
        ([7e4], "float16", "too large for float16"),
        ([3.4e38], "bfloat16", "too large for bfloat16"),
        ([2], "bool", "2 of 'x' cannot be represented as bool"),
        ([1j], "float32", "cannot be represented as float32"),
    ],
)
def test_what_would_be_lost_is_refused(values, dtype, words):
    with pytest.raises(ResultRefused, match=words):
        cast(values, dtype)


@given(arrays.arrays(np.float32, 20, elements=st.floats(width=32, min_value=-(2.0**126), max_value=2.0**126)))
def test_bfloat16_is_what_torch_makes_of_it(values):
    bits = cast(values, "bfloat16")
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(bits, expected)
    np.testing.assert_array_equal(
        cast(bits, "float32", "bfloat16"), torch.from_numpy(values).bfloat16().float().numpy()
    )


@pytest.mark.parametrize("source", [name for name in DTYPES if name != "bfloat16"])
@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bfloat16"])
def test_ones_and_zeros_survive_every_cast(source, dtype):
    there = cast(np.array([[0, 1], [1, 0]]).astype(source), dtype)
    assert there.dtype == dtype
    assert (
        there.astype(int).tolist() == [[0, 1], [1, 0]] if "complex" not in dtype else (there == [[0, 1], [1, 0]]).all()
    )


@given(st.sampled_from(["int8", "uint8", "int32", "uint64", "float16", "float32"]), st.integers(-(2**64), 2**65))
def test_a_whole_number_stays_itself_or_is_refused(dtype, number):
    values = np.array([float(number)])
    try:
        found = cast(values, dtype)
    except ResultRefused:
        return
    if "float" not in dtype:
        assert int(found[0]) == int(values[0])


def test_cast_changes_both_sides_and_groups(rows, do):
    made = rows([4, 2])
    before, after = do(made, select="observation"), do(made, cast=["observation.position=float32", "reward=float32"])
    for name in ("observation.position", "next.observation.position", "next.reward"):
        assert after[name].dtype == np.float32
        np.testing.assert_array_equal(after[name], before[name].astype(np.float32))
    assert {v.dtype.name for k, v in do(made, cast="observation=float64").items() if "observation" in k} == {"float64"}


@pytest.mark.parametrize(
    ("cast", "words"),
    [
        ("observation=flaot32", "not an element type; did you mean 'float32'"),
        ("done=uint8", "cast next.done=uint8: it is bool in every dataset"),
        ("episode=int32", "cast episode"),
        ("observation", "it is written field=type"),
        ("=float32", "it is written field=type"),
    ],
)
def test_casts_that_make_no_sense(rows, do, cast, words):
    with pytest.raises(UsageError, match=words):
        do(rows([2]), cast=cast)


@pytest.mark.parametrize(
    ("clip", "low", "high"),
    [("-1:1", -1, 1), (":0.5", -np.inf, 0.5), ("0:", 0, np.inf), ((-0.25, None), -0.25, np.inf)],
)
def test_rewards_are_clipped_and_nothing_else(rows, do, clip, low, high):
    made = rows([5, 3])
    before, after = do(made, select="observation,action"), do(made, clip_reward=clip)
    np.testing.assert_array_equal(after.pop("next.reward"), before.pop("next.reward").clip(low, high))
    assert all(np.array_equal(after[name], values) for name, values in before.items())


def test_whole_rewards_are_clipped_to_whole_bounds(rows, do):
    made = rows([3], **{"next.reward": np.array([[-5], [3], [200]], np.int16)})
    assert do(made, clip_reward="-1:100")["next.reward"].tolist() == [[-1], [3], [100]]
    assert do(made, clip_reward="-1:100000")["next.reward"].tolist() == [[-1], [3], [200]]
    with pytest.raises(UsageError, match="int16, which cannot be clipped"):
        do(made, clip_reward="-0.5:1")


def test_returns_are_those_of_rewards_that_were_not_clipped(rows, do):
    made = rows([3], **{"next.reward": np.array([[5.0], [0.5], [7.0]])})
    found = do(made, clip_reward="-1:1", return_to_go=True)
    assert found["return_to_go"].tolist() == [[12.5], [7.5], [7.0]]
    assert found["next.reward"].tolist() == [[1.0], [0.5], [1.0]]


@pytest.mark.parametrize("clip", ["1", "2:1", ":", "a:b", 3, (1, 2, 3), "nan:1"])
def test_bounds_that_are_none_are_refused(rows, do, clip):
    with pytest.raises(UsageError, match=r"clip"):
        do(rows([2]), clip_reward=clip)
