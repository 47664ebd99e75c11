"""`sample`: what it draws and shows, every sampler and its options, and the timing."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import each
from tensordict import TensorDictBase

import rbtool
from rbtool import UsageError
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.open_steps import open_steps
from rbtool.core.results import to_document
from rbtool.core.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs import sample
from rbtool.core.verbs.options import SAMPLERS, SampleOptions
from rbtool.core.verbs.sample import timed

EPISODES = [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both")]


def test_sample_describes_the_drawn_rows(walks: Path) -> None:
    result, reader = rbtool.sample(walks, 50, seed=3), TedReader(walks)
    index = np.array(result.indices)
    assert (result.n, result.seed, len(index)) == (50, 3, 50)
    assert set(index) <= set(range(20))
    assert list(result.episodes) == reader.read(("episode",), 0, 20)[index].tolist()
    starts = dict(zip(reader.episodes.episode.tolist(), reader.episodes.start.tolist(), strict=True))
    assert [starts[episode] + step for episode, step in zip(result.episodes, result.steps, strict=True)] == list(index)
    fields = {field.key: field for field in result.fields}
    assert list(fields) == [field.name for field in reader.fields]
    observation = reader.read(("observation",), 0, 20)[index]
    found = fields["observation"]
    assert (found.dtype, found.shape, found.bytes) == ("float64", (50, 3), 50 * 24)
    assert (found.min, found.max) == (observation.min(), observation.max())
    assert found.mean == pytest.approx(observation.mean())
    done = fields["next.done"]
    assert (done.min, done.mean, done.max) == (None, None, None)
    assert done.true_fraction == reader.read(("next", "done"), 0, 20)[index].mean()


def test_a_seed_determines_the_rows_and_is_reported(walks: Path) -> None:
    first = rbtool.sample(walks, 64)
    assert rbtool.sample(walks, 64, seed=first.seed).indices == first.indices
    assert rbtool.sample(walks, 64).indices != first.indices


def test_a_dataset_is_sampled_by_its_id(tmp_path: Path) -> None:
    write_walks(tmp_path / "minari" / "walks" / "test-v0", EPISODES)
    assert rbtool.sample("minari:walks/test-v0", root=tmp_path).n == 256


def test_impossible_batches_and_empty_datasets_are_refused(walks: Path, written) -> None:
    for n, seed, message in ((0, 1, "-n is 0, expected"), (-2, 1, "-n is -2, expected"), (1, -1, "the seed is -1")):
        with pytest.raises(UsageError, match=message):
            rbtool.sample(walks, n, seed=seed)
    empty = written({Field(("x",), "int8", (), "info"): np.empty(0, np.int8)}, [])
    with pytest.raises(UsageError, match="has no steps to sample"):
        rbtool.sample(empty)


@pytest.mark.parametrize(
    ("dtype", "role", "values", "expected"),
    [
        ("float32", "info", [1.0, math.nan, 3.0], (1.0, 2.0, 3.0)),
        ("float32", "info", [math.nan] * 3, (None, None, None)),
        ("float16", "info", [math.inf, 1.0, 1.0], (1.0, math.inf, math.inf)),
        ("uint64", "info", [2**63, 2**63, 2**63], (2**63, 2.0**63, 2**63)),
        ("bfloat16", "info", [0x3F80, 0x4000, 0x4040], (1.0, 2.0, 3.0)),
        ("complex64", "info", [1j, 2j, 3j], (None, None, None)),
        ("uint8", "text", [65, 66, 67], (None, None, None)),
    ],
)
def test_nan_infinite_large_and_text_values_are_described(
    written, dtype: str, role, values: list, expected: tuple
) -> None:
    field = Field(("x",), dtype, (3,), role)
    path = written({field: np.array([values] * 4).astype(field.numpy)}, [4])
    result = rbtool.sample(path, 8, seed=0)
    (found,) = result.fields
    assert (found.min, found.mean, found.max) == pytest.approx(expected)
    assert (found.shape, found.true_fraction) == ((8, 3), None)
    assert to_document(result)["kind"] == "sample"


def test_wrong_options_are_refused_before_torch_is_imported(walks: Path) -> None:
    wrong = [
        {"sampler": "slice"}, {"sampler": "slice", "slice_len": 10}, {"sampler": "prioritized", "priority": "nothing"},
        {"sampler": "prioritized", "priority": "next.done"},
    ]  # fmt: skip
    script = f"""
import sys
import rbtool
for options in {wrong!r}:
    try:
        rbtool.sample({str(walks)!r}, **options)
    except rbtool.UsageError:
        print("torch" in sys.modules)
"""
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "False\n" * len(wrong)


# Every sampler draws what it draws in a buffer, from every layout.
MORE_EPISODES = [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both"), (12, "terminated")]
LENGTHS = np.array([length for length, _ in MORE_EPISODES])
STEPS = int(LENGTHS.sum())

CASES = {
    "random": ({}, lambda: RandomSampler()),
    "without-replacement": ({}, lambda: SamplerWithoutReplacement()),
    "in order": (
        {"sampler": "without-replacement", "shuffle": False, "drop_last": True},
        lambda: SamplerWithoutReplacement(drop_last=True, shuffle=False),
    ),
    "slice": ({"slice_len": 4}, lambda: SliceSampler(slice_len=4)),
    "by number": ({"sampler": "slice", "num_slices": 3}, lambda: SliceSampler(num_slices=3)),
    "steps": (
        {"sampler": "slice", "slice_len": 4, "weight": "step", "anchor": "end"},
        lambda: SliceSampler(slice_len=4, weight="step", anchor="end"),
    ),
    "whole": (
        {"sampler": "slice", "slice_len": 12, "strict": False}, lambda: SliceSampler(slice_len=12, strict_length=False),
    ),
    "padded": (
        {"sampler": "slice", "slice_len": 12, "pad": True},
        lambda: SliceSampler(slice_len=12, strict_length=False, pad_output=True),
    ),
    "batched": (
        {"sampler": "slice", "slice_len": 6, "batched": True}, lambda: SliceSampler(slice_len=6, batched=True),
    ),
    "slice-without-replacement": ({"slice_len": 4}, lambda: SliceSamplerWithoutReplacement(slice_len=4)),
    "slices in order": (
        {"sampler": "slice-without-replacement", "slice_len": 4, "shuffle": False, "strict": False},
        lambda: SliceSamplerWithoutReplacement(slice_len=4, shuffle=False, strict_length=False),
    ),
    "epochs of padded ones": (
        {"sampler": "slice-without-replacement", "slice_len": 6, "pad": True, "anchor": "start", "drop_last": True},
        lambda: SliceSamplerWithoutReplacement(
            slice_len=6, strict_length=False, pad_output=True, anchor="start", drop_last=True
        ),
    ),
    "prioritized": ({}, lambda: PrioritizedSampler(STEPS, 0.6, 0.4)),
    "more alike": (
        {"sampler": "prioritized", "alpha": 0.3, "beta": 1.0}, lambda: PrioritizedSampler(STEPS, 0.3, 1.0),
    ),
    "prioritized, ragged": (
        {"sampler": "prioritized-slice", "slice_len": 6, "strict": False, "anchor": "end", "beta": 1.0},
        lambda: PrioritizedSliceSampler(STEPS, 0.6, 1.0, slice_len=6, strict_length=False, anchor="end"),
    ),
    "prioritized-slice": ({"slice_len": 4}, lambda: PrioritizedSliceSampler(STEPS, 0.6, 0.4, slice_len=4)),
}  # fmt: skip  # fmt: skip


@pytest.fixture(scope="module")
def more_walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset that no test changes."""
    path = tmp_path_factory.mktemp("sample") / "walks"
    write_walks(path, MORE_EPISODES)
    return path


def drawn(path: Path, case: str, n: int = 12, **more) -> rbtool.core.verbs.sample.SampleResult:
    arguments = {"sampler": case, **CASES[case][0], **more}
    return rbtool.sample(path, n, **arguments)


@pytest.mark.parametrize("case", CASES)
def test_the_batch_is_the_first_of_a_buffer_with_this_seed(more_walks: Path, case: str) -> None:
    result = drawn(more_walks, case, seed=7)
    batch = rbtool.load_dataset(more_walks, batch_size=12, sampler=CASES[case][1](), seed=7).sample()
    assert list(result.indices) == batch["index"].reshape(-1).tolist()
    leaves = {".".join(key) if isinstance(key, tuple) else key: value for key, value in batch.items(True, True)}
    assert {field.key for field in result.fields} == set(leaves) - {"index"}
    for field in result.fields:
        values = leaves[field.key]
        assert (field.shape, field.dtype) == (tuple(values.shape), str(values.dtype).removeprefix("torch."))
        if field.true_fraction is not None:
            assert field.true_fraction == pytest.approx(values.double().mean().item())
        else:
            assert field.mean == pytest.approx(values.double().mean().item())


@each("case", CASES)
def test_rows_episodes_and_steps_agree(more_walks: Path, case: str) -> None:
    result, table = drawn(more_walks, case, seed=3), TedReader(more_walks).episodes
    starts = dict(zip(table.episode.tolist(), table.start.tolist(), strict=True))
    assert [starts[e] + s for e, s in zip(result.episodes, result.steps, strict=True)] == list(result.indices)
    assert result.n == len(result.indices)


@pytest.mark.parametrize("form", ["flat", "nested", "h5", "ted"])
def test_every_layout_gives_the_same_batch(more_walks: Path, tmp_path: Path, form: str) -> None:
    with open_steps(more_walks) as reader:
        save_checkpoint(reader, tmp_path / "saved", form)
    for case in CASES:
        one, other = drawn(more_walks, case, seed=1), drawn(tmp_path / "saved", case, seed=1)
        for name in ("indices", "episodes", "steps", "slices", "options"):
            assert getattr(one, name) == getattr(other, name), case
        assert sorted(one.fields, key=lambda field: field.key) == sorted(other.fields, key=lambda field: field.key)


@each("case", [case for case in CASES if {"slice_len", "num_slices"} & set(CASES[case][0])])
def test_slices_lie_within_episodes_and_describe_the_batch(more_walks: Path, case: str) -> None:
    for seed in range(3):
        result, rows = drawn(more_walks, case, n=24, seed=seed), []
        for one in result.slices:
            assert one.last - one.first + 1 == one.length <= LENGTHS[one.episode]
            assert one.start == int(LENGTHS[: one.episode].sum()) + one.first
            rows += [*range(one.start, one.start + one.length), *[one.start + one.length - 1] * one.padding]
        assert rows == list(result.indices), seed


def test_a_padded_slice_repeats_the_end_of_the_episode(more_walks: Path) -> None:
    result = drawn(more_walks, "padded", n=600, seed=0)
    assert Counter(one.length + one.padding for one in result.slices) == {12: 50}
    assert {one.length for one in result.slices} == set(LENGTHS.tolist())
    mask = next(field for field in result.fields if field.key == "collector.mask")
    assert mask.true_fraction == pytest.approx(sum(one.length for one in result.slices) / 600)


def test_slices_of_short_episodes_are_whole_episodes(more_walks: Path) -> None:
    result = drawn(more_walks, "whole", n=120, seed=0)
    assert len(result.slices) == 10
    assert [one.length for one in result.slices] == [LENGTHS[one.episode] for one in result.slices]
    assert result.n == sum(one.length for one in result.slices) < 120
    with pytest.raises(UsageError, match="slices are 13 steps, expected at most 12: the longest of 5 episodes"):
        rbtool.sample(more_walks, sampler="slice", slice_len=13)
    given = {"slice_len": 4, "weight": "step", "strict": True}
    result = rbtool.sample(more_walks, 8, sampler="slice", **given)
    assert (result.sampler, result.options) == ("slice", given)


@pytest.mark.parametrize("key", ["next.reward", "observation", "info.success"])
def test_priorities_are_read_from_a_leaf(more_walks: Path, key: str) -> None:
    result = rbtool.sample(more_walks, 400, sampler="prioritized", priority=key, alpha=1.0, seed=5)
    leaf = TedReader(more_walks).read(tuple(key.split(".")), 0, STEPS)
    priorities = np.abs(leaf.astype(np.float64)).reshape(STEPS, -1).max(1)
    buffer = rbtool.load_dataset(more_walks, batch_size=400, sampler=PrioritizedSampler(STEPS, 1.0, 0.4), seed=5)
    buffer.update_priority(torch.arange(STEPS), torch.from_numpy(priorities))
    batch: TensorDictBase = buffer.sample()
    assert list(result.indices) == batch["index"].tolist()
    expected, counts = 400 * priorities / priorities.sum(), np.bincount(result.indices, minlength=STEPS)
    assert ((counts - expected) ** 2 / expected).sum() < 2.5 * STEPS
    weights = next(field for field in result.fields if field.key == "priority_weight")
    assert weights.max == pytest.approx(batch["priority_weight"].max().item())


def test_only_steps_with_a_priority_begin_a_slice(written) -> None:
    chosen = np.zeros(20, np.float32)
    chosen[[3, 12]] = [2.0, -1.0]
    path = written({Field(("x",), "float32", (), "info"): chosen}, (10, 10))
    slices = rbtool.sample(path, 300, sampler="prioritized-slice", slice_len=3, priority="x", alpha=1.0).slices
    assert {(one.episode, one.first) for one in slices} == {(0, 3), (1, 2)}


@pytest.mark.parametrize("case", ["slice", "slice-without-replacement", "prioritized-slice"])
def test_slices_use_the_episode_table_if_no_leaf_has_episodes(written, case: str) -> None:
    path = written({Field(("x",), "int32", (), "info"): np.arange(20, dtype=np.int32)}, (5, 9, 6))
    for one in drawn(path, case, n=12, seed=0).slices:
        assert 0 <= one.first <= one.last < (5, 9, 6)[one.episode]


@pytest.mark.parametrize(
    ("dtype", "role", "shape", "value", "message"),
    [
        ("bool", "info", (), True, r"--priority is 'x', which is bool \[\], expected real numbers"),
        ("uint8", "text", (4,), 65, "--priority is 'x', which is text"),
        ("complex64", "info", (), 1j, "--priority is 'x', which is complex64"),
        ("float32", "info", (0,), 0.0, r"--priority is 'x', which is float32 \[0\]"),
        ("float32", "info", (2,), np.nan, "which is nan at step 0 and not finite at 4 of 4 steps"),
        ("float16", "info", (), np.inf, "which is inf at step 0 and not finite at 4 of 4 steps"),
    ],
)
def test_leaves_that_cannot_be_priorities_are_refused(written, dtype, role, shape, value, message) -> None:
    field = Field(("x",), dtype, shape, role)
    path = written({field: np.full((4, *shape), value, field.numpy)}, (4,))
    with pytest.raises(UsageError, match=message):
        rbtool.sample(path, 2, sampler="prioritized", priority="x")


@each(("key", "near"), [("next.rewards", "; did you mean 'next.reward'?"), ("zzz", "")])
def test_an_unknown_priority_names_similar_fields(more_walks: Path, key: str, near: str) -> None:
    with pytest.raises(UsageError) as raised:
        rbtool.sample(more_walks, 2, sampler="prioritized", priority=key)
    assert str(raised.value) == f"field {key!r} not found{near}"
    assert raised.value.hint.startswith("fields are action, episode, ")


class Clock:
    """Replaces the module `time`; advances by `pace` at each look, and whenever a test moves it."""

    def __init__(self, pace: float) -> None:
        self.now, self.pace = 0.0, pace

    def perf_counter(self) -> float:
        self.now += self.pace
        return self.now


def test_timing_leaves_out_the_first_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(0.0), list[int]()
    monkeypatch.setattr(sample, "time", clock)

    def draw() -> int:
        clock.now += 0.001 if calls else 0.05
        calls.append(1)
        return 7

    timing = timed(draw, 0.02, step_bytes=10.0, threads=3)
    assert (timing.batches, timing.threads) == (20, 3)
    assert len(calls) > timing.batches
    assert (timing.median_us, timing.p95_us) == pytest.approx((1000, 1000))
    assert timing.batches_per_second == pytest.approx(timing.batches / timing.seconds, rel=1e-2)
    assert timing.steps_per_second == pytest.approx(7 * timing.batches_per_second)
    assert timing.bytes_per_second == pytest.approx(10 * timing.steps_per_second)


def test_timing_takes_two_seconds_unless_told_otherwise() -> None:
    for seconds, asked, limit in ((None, False, None), (None, True, 2.0), (0.5, True, 0.5)):
        assert SampleOptions("", time=asked, seconds=seconds).seconds_to_measure() == limit


@each(
    ("seconds", "asked", "message"),
    [
        (1.0, False, "--seconds needs --time"), (0.0, True, "--seconds is 0.0, expected a time above 0"),
        (math.nan, True, "--seconds is nan"), (math.inf, True, "--seconds is inf"),
    ],
)  # fmt: skip
def test_impossible_times_are_refused(seconds, asked, message) -> None:
    with pytest.raises(UsageError, match=message):
        SampleOptions("", time=asked, seconds=seconds).seconds_to_measure()


@pytest.mark.parametrize("sampler", ["random", "without-replacement"])
def test_batches_of_a_dataset_are_timed(tmp_path: Path, sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_walks(tmp_path / "walks", [(6, "open"), (4, "terminated")])
    plain = rbtool.sample(tmp_path / "walks", 5, sampler=sampler, seed=2)
    monkeypatch.setattr(sample, "time", Clock(0.001))
    result = rbtool.sample(tmp_path / "walks", 5, sampler=sampler, seed=2, time=True, seconds=0.05)
    assert plain.timing is None
    assert result.indices == plain.indices  # the batch shown is the first, and those timed come after it
    assert result.timing is not None
    assert result.timing.seconds <= 0.1
    row_bytes = sum(field.bytes for field in result.fields) / 5
    assert result.timing.bytes_per_second == pytest.approx(result.timing.steps_per_second * row_bytes)


LENGTH = {"slice_len": 4}


def options(sampler: str, n: int | None = None, **given) -> SampleOptions:
    return SampleOptions("", n, sampler=sampler, **given)


@each(
    ("n", "slices", "size", "steps"),
    [
        (None, {"slice_len": 32}, 256, 32), (None, {"slice_len": 100}, 300, 100),
        (None, {"slice_len": 1000}, 1000, 1000), (None, {"num_slices": 7}, 259, 37),
        (None, {"num_slices": 8, "slice_len": 5}, 40, 5), (40, {"num_slices": 8, "slice_len": 5}, 40, 5),
        (40, {"num_slices": 8}, 40, 5), (40, {"slice_len": 8}, 40, 8),
    ],
)  # fmt: skip
def test_slices_determine_the_size_of_the_batch(n, slices, size, steps) -> None:
    chosen = options("slice", n, **slices)
    assert (chosen.batch_size(), chosen.steps_of_a_slice(size)) == (size, steps)
    for sampler in ("random", "without-replacement", "prioritized"):
        assert [options(sampler, count).batch_size() for count in (None, 1, 255)] == [256, 1, 255]


@each(
    ("n", "slices", "message", "hint"),
    [
        (10, {"slice_len": 3}, "10 steps, expected a multiple of the length of a slice, 3", "-n 9"),
        (1, {"slice_len": 3}, "1 steps, expected a multiple of the length of a slice, 3", "-n 3"),
        (11, {"num_slices": 4}, "11 steps, expected a multiple of the number of slices, 4", "-n 12"),
        (10, {"slice_len": 3, "num_slices": 4}, "-n 10: 4 slices of 3 steps are 12", "-n 12"),
        (0, {"slice_len": 3}, "-n is 0, expected at least 1", ""),
    ],
)
def test_a_batch_that_slices_do_not_fill_is_refused(n, slices, message, hint) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        options("slice", n, **slices).batch_size()
    assert raised.value.hint.startswith(hint)


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(UsageError, match="is 'shuffled', expected one of random, without-replacement, slice,"):
        options("shuffled")


GIVEN = {
    "slice_len": 4, "num_slices": 2, "weight": "step", "anchor": "end", "strict": False, "pad": True, "batched": True,
    "drop_last": True, "shuffle": False, "alpha": 0.5, "beta": 1.0, "priority": "next.reward",
}  # fmt: skip
FLAGS = {"strict": "--no-strict", "shuffle": "--no-shuffle"}


@each("sampler", SAMPLERS)
def test_an_option_is_taken_or_refused_by_each_sampler(sampler) -> None:
    for name, value in GIVEN.items():
        given = {**(LENGTH if "slice_len" in SAMPLERS[sampler] else {}), name: value}
        if name in SAMPLERS[sampler]:
            assert options(sampler, **given).given() == given
            continue
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        with pytest.raises(UsageError) as raised:
            options(sampler, **given)
        assert str(raised.value) == f"{flag} is not an option of the sampler {sampler}"
        takers = raised.value.hint.removeprefix("it is for ").split(", ")
        assert takers == [other for other, known in SAMPLERS.items() if name in known]


@each(
    ("sampler", "given", "message"),
    [
        ("slice", {"slice_len": 0}, "--slice-len is 0, expected 1 or more"),
        ("slice", {"slice_len": "3"}, "--slice-len is '3', expected 1 or more"),
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
def test_values_out_of_range_are_refused(sampler, given, message) -> None:
    with pytest.raises(UsageError, match=message):
        options(sampler, **given)


@each("sampler", ["slice", "slice-without-replacement", "prioritized-slice"])
def test_slices_longer_than_all_episodes_are_refused(sampler) -> None:
    lengths = np.array([3, 9, 1])
    options(sampler, slice_len=9).check_lengths(lengths, 9)
    options(sampler, slice_len=10, strict=False).check_lengths(lengths, 10)
    options("random").check_lengths(lengths, 10)
    message = "slices are 10 steps, expected at most 9: the longest of 3 episodes"
    with pytest.raises(UsageError, match=message) as raised:
        options(sampler, slice_len=10).check_lengths(lengths, 10)
    assert "--pad" in raised.value.hint
