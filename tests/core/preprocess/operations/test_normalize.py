"""Normalize: by which constants, of which rows, and how it is undone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool import Normalize as Transform
from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.preprocess.operations.program import Program, ProgramProcessor, program_of
from rbtool.core.preprocess.operations.values import Constants, NormalizeFields
from rbtool.core.preprocess.processor import Context


def constants_of(work):
    return {part.key: part for o in work.program.operations if isinstance(o, NormalizeFields) for part in o.constants}


def observations(made, name="position"):
    """Every observation of every episode, once."""
    _, block = made
    before, after = (block.columns[(*side, "observation", name)].values for side in ((), ("next",)))
    ends = np.cumsum(block.pieces.rows) - 1
    return np.concatenate([before, after[ends]]).astype(np.float64).reshape(len(before) + len(ends), -1)


@pytest.mark.parametrize(
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


def test_quantiles_go_to_minus_one_and_one(rows, work):
    made = rows([5000, 3000])
    known = constants_of(work(made, normalize="observation.position:quantile"))["observation.position"]
    low, high = np.quantile(observations(made), [0.01, 0.99], axis=0)
    np.testing.assert_allclose(np.array(known.loc) + np.array(known.scale), high, rtol=0.005)
    np.testing.assert_allclose(np.array(known.loc) - np.array(known.scale), low, rtol=0.005)


@pytest.mark.parametrize("how", ["mean-std", "min-max", "quantile"])
def test_what_never_varies_is_moved_and_not_divided(rows, work, do, how):
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


def test_what_is_not_finite_does_not_count_and_stays(rows, work, do):
    made = rows([5], odd=np.array([1.0, np.nan, 3.0, np.inf, 5.0]), nothing=np.full(5, np.nan))
    known = work(made, normalize="odd,nothing")
    part = constants_of(known)["odd"]
    assert (part.loc, part.nan, part.infinite) == ((3.0,), 1, 1)
    assert any("1 NaN and 1 infinite values of odd did not count" in note for note in known.notes((), ()))
    found = do(made, normalize="odd,nothing")
    assert np.isnan(found["odd"][1])
    assert found["odd"][3] == np.inf
    assert np.isnan(found["nothing"]).all()


def test_images_share_one_pair_of_constants(rows, work):
    images = np.random.default_rng(0).integers(0, 256, (6, 20, 20, 3)).astype(np.uint8)
    made = rows([6], image=images)
    part = constants_of(work(made, normalize="image"))["image"]
    assert (len(part.loc), part.loc[0]) == (1, pytest.approx(images.mean()))


def test_the_rows_that_reach_it_count(rows, work, do):
    made = rows([9, 9], x=np.arange(18.0))
    found = do(made, where="x < 4 or x >= 14", normalize="x:min-max")
    assert found["x"].tolist() == pytest.approx([(v - 8.5) / 8.5 for v in (0, 1, 2, 3, 14, 15, 16, 17)])
    assert constants_of(work(made, clip_reward="0:1", normalize="reward:min-max"))["next.reward"].loc == (0.5,)


def test_only_what_is_measured_is_read_to_measure(rows):
    fields, _ = rows([2])
    names = {".".join(key) for key in ProgramProcessor(program_of({"normalize": "action"}), fields).reads(fields)}
    assert names == {"action"}


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


def test_the_constants_undo_it_in_the_transform(rows, work, do):
    made = rows([12])
    part = constants_of(work(made, normalize="observation.position"))["observation.position"]
    transform = Transform(
        "x", **{name: torch.tensor(getattr(part, name), dtype=torch.float64) for name in ("loc", "scale")}
    )
    scaled = torch.from_numpy(do(made, normalize="observation.position")["observation.position"])
    expected = do(made, select="observation")["observation.position"]
    np.testing.assert_allclose(transform.inverse(scaled).numpy(), expected, rtol=1e-12)


def test_known_constants_are_used_as_they_are(rows, work, apply):
    first, second = rows([20], seed=1), rows([7], seed=2)
    known = work(first, normalize="observation.position")
    other = ProgramProcessor(known.program, second[0])
    assert not other.needs_measuring
    part = constants_of(known)["observation.position"]
    values = second[1].columns["observation", "position"].values
    found = apply(other, *second).columns["observation", "position"].values
    np.testing.assert_allclose(found * part.scale + part.loc, values, rtol=1e-12)


def test_the_provenance_keeps_what_was_asked_for_and_what_was_found(rows, work):
    made = rows([5])
    asked = ProgramProcessor(program_of({"normalize": "action"}), made[0])
    said, found = asked.arguments(), work(made, normalize="action").arguments()
    assert said == {"operations": [{"name": "normalize", "key": "action", "method": "mean-std"}]}
    assert found["operations"] == said["operations"]
    assert [part["key"] for part in found["constants"][0]] == ["action"]


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ({"normalize": "action:mean-sdt"}, "expected one of mean-std, min-max, quantile; did you mean 'mean-std'"),
        ({"normalize": "done"}, "done of bool"),
        ({"normalize": "episode"}, "id of int64"),
        ({"normalize": "next.observation"}, "has to stay like it"),
        ({"normalize": ["observation", "observation.count"]}, "normalize has 'observation.count' twice"),
        ({"normalize": ","}, "empty name"),
    ],
)
def test_what_cannot_be_normalized(rows, work, operations, words):
    with pytest.raises(UsageError, match=words):
        work(rows([2]), **operations)


def test_one_pass_cannot_measure_what_another_changes():
    with pytest.raises(UsageError, match="before and after flatten"):
        Program((NormalizeFields("action"), *program_of({"flatten": True}).operations, NormalizeFields("observation")))


def test_constants_of_other_fields_are_refused(rows, work):
    program = Program((NormalizeFields("action", "mean-std", (Constants("action", (0.0,), (1.0,)),)),))
    with pytest.raises(UsageError, match="normalize has 1 constants for 'action', expected 2"):
        work(rows([2]), program)


def test_values_spread_beyond_float64_are_refused(rows, work):
    with pytest.raises(SchemaError, match="spread beyond"):
        work(rows([4], x=np.array([-1.7e308, -1.7e308, -1.7e308, 1.7e308])), normalize="x")


def test_values_whose_squares_are_beyond_float64_are_normalized(rows, do):
    assert do(rows([2], x=np.array([-1.7e308, 1.7e308])), normalize="x")["x"].tolist() == [-1, 1]


def test_many_numbers_are_measured_part_by_part(rows, work):
    values = np.random.default_rng(1).normal(3, 2, (70_000, 4)).astype(np.float32)
    part = constants_of(work(rows([70_000], wide=values), normalize="wide"))["wide"]
    np.testing.assert_allclose(part.loc, values.mean(0, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(part.scale, values.std(0, dtype=np.float64), rtol=1e-12)
