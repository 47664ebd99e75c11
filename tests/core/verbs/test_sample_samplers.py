"""Every sampler of `sample` gives what it gives in a buffer, from every layout, and tells which slices it drew."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase

import rbtool
from rbtool.core.encodings.save import save_checkpoint
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.open_steps import open_steps
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.prioritized_slices import PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.ted.schema import Field
from rbtool.core.testing.datasets import write_walks

EPISODES = [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both"), (12, "terminated")]
LENGTHS = np.array([length for length, _ in EPISODES])
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
}  # fmt: skip


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", EPISODES)
    return tmp_path / "walks"


def drawn(path: Path, case: str, n: int = 12, **more) -> rbtool.core.verbs.sample.SampleResult:
    arguments = {"sampler": case, **CASES[case][0], **more}
    return rbtool.sample(path, n, **arguments)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 7])
def test_the_batch_is_the_first_of_a_buffer_with_that_seed(walks: Path, case: str, seed: int) -> None:
    result = drawn(walks, case, seed=seed)
    batch = rbtool.load_dataset(walks, batch_size=12, sampler=CASES[case][1](), seed=seed).sample()
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


@pytest.mark.parametrize("case", CASES)
def test_rows_episodes_and_steps_belong_together(walks: Path, case: str) -> None:
    result, table = drawn(walks, case, seed=3), TedReader(walks).episodes
    starts = dict(zip(table.episode.tolist(), table.start.tolist(), strict=True))
    assert [starts[e] + s for e, s in zip(result.episodes, result.steps, strict=True)] == list(result.indices)
    assert result.n == len(result.indices)


@pytest.mark.parametrize("form", ["flat", "nested", "h5", "ted"])
@pytest.mark.parametrize("case", CASES)
def test_every_layout_gives_the_same_batch(walks: Path, tmp_path: Path, form: str, case: str) -> None:
    with open_steps(walks) as reader:
        save_checkpoint(reader, tmp_path / "saved", form)
    one, other = drawn(walks, case, seed=1), drawn(tmp_path / "saved", case, seed=1)
    assert (one.indices, one.slices, one.options) == (other.indices, other.slices, other.options)
    assert sorted(one.fields, key=lambda field: field.key) == sorted(other.fields, key=lambda field: field.key)


@pytest.mark.parametrize("case", [case for case in CASES if {"slice_len", "num_slices"} & set(CASES[case][0])])
@pytest.mark.parametrize("seed", range(5))
def test_slices_tell_what_the_batch_holds(walks: Path, case: str, seed: int) -> None:
    result = drawn(walks, case, n=24, seed=seed)
    rows = []
    for one in result.slices:
        assert one.last - one.first + 1 == one.length <= LENGTHS[one.episode]
        assert one.start == int(LENGTHS[: one.episode].sum()) + one.first
        rows += [*range(one.start, one.start + one.length), *[one.start + one.length - 1] * one.padding]
    assert rows == list(result.indices)


def test_a_padded_slice_has_the_rest_of_the_episode(walks: Path) -> None:
    result = drawn(walks, "padded", n=600, seed=0)
    assert Counter(one.length + one.padding for one in result.slices) == {12: 50}
    assert {one.length for one in result.slices} == set(LENGTHS.tolist())
    mask = next(field for field in result.fields if field.key == "collector.mask")
    assert mask.true_fraction == pytest.approx(sum(one.length for one in result.slices) / 600)


def test_short_episodes_make_short_slices(walks: Path) -> None:
    result = drawn(walks, "whole", n=120, seed=0)
    assert len(result.slices) == 10
    assert [one.length for one in result.slices] == [LENGTHS[one.episode] for one in result.slices]
    assert result.n == sum(one.length for one in result.slices) < 120


def test_the_options_given_are_told(walks: Path) -> None:
    given = {"slice_len": 4, "weight": "step", "strict": True}
    result = rbtool.sample(walks, 8, sampler="slice", **given)
    assert (result.sampler, result.options) == ("slice", given)


# Priorities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["next.reward", "observation", "info.success"])
def test_priorities_come_from_a_leaf(walks: Path, key: str) -> None:
    result = rbtool.sample(walks, 400, sampler="prioritized", priority=key, alpha=1.0, seed=5)
    leaf = TedReader(walks).read(tuple(key.split(".")), 0, STEPS)
    priorities = np.abs(leaf.astype(np.float64)).reshape(STEPS, -1).max(1)
    buffer = rbtool.load_dataset(walks, batch_size=400, sampler=PrioritizedSampler(STEPS, 1.0, 0.4), seed=5)
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
def test_the_episode_table_serves_where_no_leaf_names_episodes(written, case: str) -> None:
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
def test_leaves_that_are_no_priorities(written, dtype, role, shape, value, message) -> None:
    field = Field(("x",), dtype, shape, role)
    path = written({field: np.full((4, *shape), value, field.numpy)}, (4,))
    with pytest.raises(rbtool.UsageError, match=message):
        rbtool.sample(path, 2, sampler="prioritized", priority="x")


@pytest.mark.parametrize(("key", "near"), [("next.rewards", "; did you mean 'next.reward'?"), ("zzz", "")])
def test_a_priority_that_is_not_there(walks: Path, key: str, near: str) -> None:
    with pytest.raises(rbtool.UsageError) as raised:
        rbtool.sample(walks, 2, sampler="prioritized", priority=key)
    assert str(raised.value) == f"field {key!r} not found{near}"
    assert raised.value.hint.startswith("fields are action, episode, ")


def test_no_episode_is_as_long_as_a_slice(walks: Path) -> None:
    with pytest.raises(rbtool.UsageError, match="slices are 13 steps, expected at most 12: the longest of 5 episodes"):
        rbtool.sample(walks, sampler="slice", slice_len=13)
