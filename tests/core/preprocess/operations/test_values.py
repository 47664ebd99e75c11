"""Operations on values: cast, clip-reward and normalize."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rbtool import Normalize as Transform
from rbtool.core.engine.tasks import ResultRefused
from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.preprocess.operations.base import cast_into
from rbtool.core.preprocess.operations.built_in import Constants, NormalizeFields
from rbtool.core.preprocess.operations.program import Program, ProgramProcessor, program_of
from rbtool.core.preprocess.processor import BlockColumn, Context
from rbtool.core.ted.schema import DTYPES, numpy_dtype


def cast(values, dtype, source=None):
    values = np.asarray(values)
    out = np.empty(values.shape, numpy_dtype(dtype))
    cast_into(out, BlockColumn(source or values.dtype.name, values), dtype, "x")
    return out


@each(
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
def test_values_that_fit_are_cast(values, dtype, expected):
    found = cast(values, dtype)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@each(
    ("values", "dtype", "words"),
    [
        ([0.5], "int64", "0.5 of 'x' cannot be represented as int64"),
        ([np.nan], "int32", "nan of 'x' cannot be represented as int32"),
        ([np.inf], "int32", "inf of 'x' cannot be represented as int32"),
        ([2.0**63], "int64", "cannot be represented as int64"),
        ([-129.0], "int8", "cannot be represented as int8"),
        ([300], "uint8", "300 of 'x' does not fit uint8, which goes from 0 to 255"),
        ([-1, 4], "uint64", "-1 of 'x' does not fit uint64"),
        ([2**24 + 1], "float32", "16777217 of 'x' may not be exact in float32"),
        ([1e39, -np.inf], "float32", "1e.39 of 'x' is too large for float32"),
        ([7e4], "float16", "too large for float16"),
        ([3.4e38], "bfloat16", "too large for bfloat16"),
        ([2], "bool", "2 of 'x' cannot be represented as bool"),
        ([1j], "float32", "cannot be represented as float32"),
    ],
)
def test_a_cast_that_loses_values_is_refused(values, dtype, words):
    with pytest.raises(ResultRefused, match=words):
        cast(values, dtype)


@given(arrays.arrays(np.float32, 20, elements=st.floats(width=32, min_value=-(2.0**126), max_value=2.0**126)))
def test_bfloat16_is_what_torch_makes_of_it(values):
    bits = cast(values, "bfloat16")
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(bits, expected)
    back = cast(bits, "float32", "bfloat16")
    np.testing.assert_array_equal(back, torch.from_numpy(values).bfloat16().float().numpy())


@each("source", [name for name in DTYPES if name != "bfloat16"])
@each("dtype", [name for name in DTYPES if name != "bfloat16"])
def test_ones_and_zeros_survive_every_cast(source, dtype):
    there = cast(np.array([[0, 1], [1, 0]]).astype(source), dtype)
    assert there.dtype == dtype
    assert (there == [[0, 1], [1, 0]]).all()


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


@each(
    ("cast", "words"),
    [
        ("observation=flaot32", "not an element type; did you mean 'float32'"),
        ("done=uint8", "cast next.done=uint8: it is bool in every dataset"),
        ("episode=int32", "cast episode"),
        ("observation", "it is written field=type"),
        ("=float32", "it is written field=type"),
    ],
)
def test_casts_that_make_no_sense_are_refused(rows, do, cast, words):
    with pytest.raises(UsageError, match=words):
        do(rows([2]), cast=cast)


@each(
    ("clip", "low", "high"),
    [("-1:1", -1, 1), (":0.5", -np.inf, 0.5), ("0:", 0, np.inf), ((-0.25, None), -0.25, np.inf)],
)
def test_rewards_are_clipped_and_nothing_else(rows, do, clip, low, high):
    made = rows([5, 3])
    before, after = do(made, select="observation,action"), do(made, clip_reward=clip)
    np.testing.assert_array_equal(after.pop("next.reward"), before.pop("next.reward").clip(low, high))
    assert all(np.array_equal(after[name], values) for name, values in before.items())


def test_rewards_are_clipped_and_returns_are_not(rows, do):
    made = rows([3], **{"next.reward": np.array([[-5], [3], [200]], np.int16)})
    assert do(made, clip_reward="-1:100")["next.reward"].tolist() == [[-1], [3], [100]]
    assert do(made, clip_reward="-1:100000")["next.reward"].tolist() == [[-1], [3], [200]]
    with pytest.raises(UsageError, match="int16, which cannot be clipped"):
        do(made, clip_reward="-0.5:1")
    made = rows([3], **{"next.reward": np.array([[5.0], [0.5], [7.0]])})
    found = do(made, clip_reward="-1:1", return_to_go=True)
    assert found["return_to_go"].tolist() == [[12.5], [7.5], [7.0]]
    assert found["next.reward"].tolist() == [[1.0], [0.5], [1.0]]


@each("clip", ["1", "2:1", ":", "a:b", 3, (1, 2, 3), "nan:1"])
def test_bounds_that_are_none_are_refused(rows, do, clip):
    with pytest.raises(UsageError, match=r"clip"):
        do(rows([2]), clip_reward=clip)


# Normalize: by which constants, of which rows, and how it is undone.


def constants_of(work):
    return {part.key: part for o in work.program.operations if isinstance(o, NormalizeFields) for part in o.constants}


def observations(made, name="position"):
    """Every observation of every episode, once."""
    _, block = made
    before, after = (block.columns[(*side, "observation", name)].values for side in ((), ("next",)))
    ends = np.cumsum(block.pieces.rows) - 1
    return np.concatenate([before, after[ends]]).astype(np.float64).reshape(len(before) + len(ends), -1)


@each(
    ("how", "loc", "scale"),
    [
        ("mean-std", lambda x: x.mean(0), lambda x: x.std(0)),
        ("min-max", lambda x: (x.max(0) + x.min(0)) / 2, lambda x: (x.max(0) - x.min(0)) / 2),
    ],
)
def test_both_sides_are_scaled_by_every_observation_once(rows, work, do, how, loc, scale):
    made = rows([40, 3, 1, 25])
    seen = observations(made)
    found = do(made, normalize=f"observation.position:{how}")
    before = do(made, select="observation")
    for name in ("observation.position", "next.observation.position"):
        assert found[name].dtype == np.float64
        np.testing.assert_allclose(found[name], (before[name] - loc(seen)) / scale(seen), rtol=1e-12, atol=1e-12)
    assert np.array_equal(found["observation.count"], before["observation.count"])


def test_min_max_keeps_every_observation_within_bounds(rows, do):
    found = do(rows([30, 1, 2]), cast="observation.position=float32", normalize={"observation": "min-max"})
    for name in ("position", "count"):
        both = [found[f"{side}observation.{name}"] for side in ("", "next.")]
        assert both[0].dtype == np.float32
        assert (min(map(np.min, both)), max(map(np.max, both))) == (-1, 1)


def test_quantiles_and_many_numbers_are_measured(rows, work):
    made = rows([5000, 3000])
    known = constants_of(work(made, normalize="observation.position:quantile"))["observation.position"]
    low, high = np.quantile(observations(made), [0.01, 0.99], axis=0)
    np.testing.assert_allclose(np.array(known.loc) + np.array(known.scale), high, rtol=0.005)
    np.testing.assert_allclose(np.array(known.loc) - np.array(known.scale), low, rtol=0.005)
    values = np.random.default_rng(1).normal(3, 2, (70_000, 4)).astype(np.float32)
    part = constants_of(work(rows([70_000], wide=values), normalize="wide"))["wide"]
    np.testing.assert_allclose(part.loc, values.mean(0, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(part.scale, values.std(0, dtype=np.float64), rtol=1e-12)


@each("how", ["mean-std", "min-max", "quantile"])
def test_constant_dimensions_are_moved_and_not_divided(rows, work, do, how):
    values = np.full((6, 3), 0.1)
    values[:, 1] = np.arange(6)
    made = rows([4, 2], constant=values, one=np.full(6, 7, np.uint8))
    known = work(made, normalize=[f"constant:{how}", f"one:{how}"])
    assert constants_of(known)["constant"].constant == (0, 2)
    assert constants_of(known)["one"].constant == (0,)
    assert "constant never varies in dimension 0, 2" in known.notes((), ())[0]
    found = do(made, normalize=[f"constant:{how}", f"one:{how}"])
    assert (found["constant"][:, [0, 2]] == 0).all()
    assert (found["one"] == 0).all()
    assert found["one"].dtype == np.float32


def test_values_that_are_not_finite_are_kept_and_do_not_count(rows, work, do):
    made = rows([5], odd=np.array([1.0, np.nan, 3.0, np.inf, 5.0]), nothing=np.full(5, np.nan))
    known = work(made, normalize="odd,nothing")
    part = constants_of(known)["odd"]
    assert (part.loc, part.nan, part.infinite) == ((3.0,), 1, 1)
    assert any("1 NaN and 1 infinite values of odd did not count" in note for note in known.notes((), ()))
    found = do(made, normalize="odd,nothing")
    assert np.isnan(found["odd"][1])
    assert found["odd"][3] == np.inf
    assert np.isnan(found["nothing"]).all()


def test_constants_are_those_of_the_requested_rows_and_fields(rows, work, do):
    made = rows([9, 9], x=np.arange(18.0))
    found = do(made, where="x < 4 or x >= 14", normalize="x:min-max")
    assert found["x"].tolist() == pytest.approx([(v - 8.5) / 8.5 for v in (0, 1, 2, 3, 14, 15, 16, 17)])
    assert constants_of(work(made, clip_reward="0:1", normalize="reward:min-max"))["next.reward"].loc == (0.5,)
    fields, _ = rows([2])
    names = {".".join(key) for key in ProgramProcessor(program_of({"normalize": "action"}), fields).reads(fields)}
    assert names == {"action"}
    images = np.random.default_rng(0).integers(0, 256, (6, 20, 20, 3)).astype(np.uint8)
    made = rows([6], image=images)
    part = constants_of(work(made, normalize="image"))["image"]
    assert (len(part.loc), part.loc[0]) == (1, pytest.approx(images.mean()))


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=5))
def test_parts_measure_what_the_whole_does(rows, work, cut, lengths):
    fields, block = rows(lengths)
    asked = ProgramProcessor(program_of({"normalize": ["observation", "action:quantile"]}), fields)
    started = asked.load(Context(fields, None, 0))
    whole = asked.with_measurements([started.measure(block)])
    parts = asked.with_measurements([started.measure(part) for part in cut(block, range(1, sum(lengths)))])
    assert constants_of(whole).keys() == constants_of(parts).keys()
    for key, part in constants_of(parts).items():
        np.testing.assert_allclose(part.loc, constants_of(whole)[key].loc, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(part.scale, constants_of(whole)[key].scale, rtol=1e-9, atol=1e-12)


def test_constants_are_used_again_and_undone(rows, work, apply, do):
    first, second = rows([20], seed=1), rows([7], seed=2)
    known = work(first, normalize="observation.position")
    other = ProgramProcessor(known.program, second[0])
    assert not other.needs_measuring
    part = constants_of(known)["observation.position"]
    values = second[1].columns["observation", "position"].values
    found = apply(other, *second).columns["observation", "position"].values
    np.testing.assert_allclose(found * part.scale + part.loc, values, rtol=1e-12)
    made = rows([12])
    part = constants_of(work(made, normalize="observation.position"))["observation.position"]
    transform = Transform("x", loc=torch.from_numpy(np.array(part.loc)), scale=torch.from_numpy(np.array(part.scale)))
    scaled = torch.from_numpy(do(made, normalize="observation.position")["observation.position"])
    expected = do(made, select="observation")["observation.position"]
    np.testing.assert_allclose(transform.inverse(scaled).numpy(), expected, rtol=1e-12)


def test_the_provenance_keeps_what_was_asked_for_and_what_was_found(rows, work):
    made = rows([5])
    asked = ProgramProcessor(program_of({"normalize": "action"}), made[0])
    said, found = asked.arguments(), work(made, normalize="action").arguments()
    assert said == {"operations": [{"name": "normalize", "key": "action", "method": "mean-std"}]}
    assert found["operations"] == said["operations"]
    assert [part["key"] for part in found["constants"][0]] == ["action"]


@each(
    ("operations", "words"),
    [
        ({"normalize": "action:mean-sdt"}, "expected one of mean-std, min-max, quantile; did you mean 'mean-std'"),
        ({"normalize": "done"}, "done of bool"),
        ({"normalize": "episode"}, "id of int64"),
        ({"normalize": "next.observation"}, "must change with it"),
        ({"normalize": ["observation", "observation.count"]}, "normalize has 'observation.count' twice"),
        ({"normalize": ","}, "empty name"),
    ],
)
def test_fields_that_cannot_be_normalized_are_refused(rows, work, operations, words):
    with pytest.raises(UsageError, match=words):
        work(rows([2]), **operations)


def test_constants_that_cannot_be_are_refused(rows, work):
    with pytest.raises(UsageError, match="before and after flatten"):
        Program((NormalizeFields("action"), *program_of({"flatten": True}).operations, NormalizeFields("observation")))
    program = Program((NormalizeFields("action", "mean-std", (Constants("action", (0.0,), (1.0,)),)),))
    with pytest.raises(UsageError, match="normalize has 1 constants for 'action', expected 2"):
        work(rows([2]), program)


def test_values_beyond_float64_are_normalized_or_refused(rows, work, do):
    with pytest.raises(SchemaError, match="spread beyond"):
        work(rows([4], x=np.array([-1.7e308, -1.7e308, -1.7e308, 1.7e308])), normalize="x")
    assert do(rows([2], x=np.array([-1.7e308, 1.7e308])), normalize="x")["x"].tolist() == [-1, 1]
