from __future__ import annotations

import numpy as np
import pytest

from rbtool import UsageError
from rbtool.core.verbs.sample import SAMPLERS, SamplerOptions

LENGTH = {"slice_len": 4}


def options(sampler: str, **given) -> SamplerOptions:
    return SamplerOptions(sampler=sampler, **given)


@pytest.mark.parametrize(
    ("n", "slices", "size", "steps"),
    [
        (None, {"slice_len": 32}, 256, 32),
        (None, {"slice_len": 100}, 300, 100),
        (None, {"slice_len": 1000}, 1000, 1000),
        (None, {"num_slices": 7}, 259, 37),
        (None, {"num_slices": 8, "slice_len": 5}, 40, 5),
        (40, {"num_slices": 8, "slice_len": 5}, 40, 5),
        (40, {"num_slices": 8}, 40, 5),
        (40, {"slice_len": 8}, 40, 8),
    ],
)
def test_the_batch_of_slices(n, slices, size, steps) -> None:
    chosen = options("slice", **slices)
    assert chosen.batch_size(n) == size
    assert chosen.steps_of_a_slice(size) == steps


@pytest.mark.parametrize("sampler", ["random", "without-replacement", "prioritized"])
@pytest.mark.parametrize(("n", "size"), [(None, 256), (1, 1), (255, 255)])
def test_the_batch_of_steps(sampler, n, size) -> None:
    assert options(sampler).batch_size(n) == size


@pytest.mark.parametrize(
    ("n", "slices", "message", "hint"),
    [
        (10, {"slice_len": 3}, "10 steps, expected a multiple of the length of a slice, 3", "-n 9"),
        (1, {"slice_len": 3}, "1 steps, expected a multiple of the length of a slice, 3", "-n 3"),
        (11, {"num_slices": 4}, "11 steps, expected a multiple of the number of slices, 4", "-n 12"),
        (10, {"slice_len": 3, "num_slices": 4}, "-n 10: 4 slices of 3 steps are 12", "-n 12"),
        (0, {"slice_len": 3}, "-n is 0, expected at least 1", ""),
    ],
)
def test_a_batch_that_slices_do_not_make(n, slices, message, hint) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        options("slice", **slices).batch_size(n)
    assert raised.value.hint.startswith(hint)


def test_a_sampler_that_is_none() -> None:
    with pytest.raises(
        UsageError, match="the sampler is 'shuffled', expected one of random, without-replacement, slice,"
    ):
        options("shuffled")


GIVEN = {
    "slice_len": 4, "num_slices": 2, "weight": "step", "anchor": "end", "strict": False, "pad": True, "batched": True,
    "drop_last": True, "shuffle": False, "alpha": 0.5, "beta": 1.0, "priority": "next.reward",
}  # fmt: skip
FLAGS = {"strict": "--no-strict", "shuffle": "--no-shuffle"}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("name", "value"), GIVEN.items())
def test_an_option_is_taken_or_refused(sampler, name, value) -> None:
    given = {**(LENGTH if "slice_len" in SAMPLERS[sampler] else {}), name: value}
    if name in SAMPLERS[sampler]:
        assert options(sampler, **given).given() == given
        return
    flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
    with pytest.raises(UsageError) as raised:
        options(sampler, **given)
    assert str(raised.value) == f"{flag} is no option of the sampler {sampler}"
    takers = raised.value.hint.removeprefix("it is for ").split(", ")
    assert takers == [other for other, known in SAMPLERS.items() if name in known]


@pytest.mark.parametrize(
    ("sampler", "given", "message"),
    [
        ("slice", {"slice_len": 0}, "--slice-len is 0, expected 1 or more"),
        ("slice", {"num_slices": -1}, "--num-slices is -1, expected 1 or more"),
        ("slice", {**LENGTH, "weight": "row"}, "--weight is 'row', expected one of episode, step"),
        ("slice", {**LENGTH, "anchor": "mid"}, "--anchor is 'mid', expected one of any, start, end"),
        ("slice", {**LENGTH, "strict": True, "pad": True}, "--strict and --pad are both set"),
        ("slice", {}, "the sampler slice needs --slice-len or --num-slices"),
        ("prioritized-slice", {}, "the sampler prioritized-slice needs --slice-len or --num-slices"),
        ("prioritized", {"alpha": -0.1}, "--alpha is -0.1, expected a finite number from 0"),
        ("prioritized", {"alpha": float("nan")}, "--alpha is nan"),
        ("prioritized", {"beta": float("inf")}, "--beta is inf"),
    ],
)
def test_values_out_of_range(sampler, given, message) -> None:
    with pytest.raises(UsageError, match=message):
        options(sampler, **given)


@pytest.mark.parametrize("sampler", ["slice", "slice-without-replacement", "prioritized-slice"])
def test_no_episode_is_long_enough(sampler) -> None:
    lengths = np.array([3, 9, 1])
    options(sampler, slice_len=9).check_lengths(lengths, 9)
    options(sampler, slice_len=10, strict=False).check_lengths(lengths, 10)
    options("random").check_lengths(lengths, 10)
    with pytest.raises(
        UsageError, match="slices are 10 steps, expected at most 9: the longest of 3 episodes"
    ) as raised:
        options(sampler, slice_len=10).check_lengths(lengths, 10)
    assert "--pad" in raised.value.hint
