"""Entries that members do not have alike, and weights that change during training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from rbtool import (
    LazyTensorStorage,
    LinearScheduler,
    RandomSampler,
    ReplayBufferEnsemble,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)


def buffer_of(count: int, **entries: torch.Tensor) -> TensorDictReplayBuffer:
    """A ring of `count` elements with these entries, repeated."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement())
    nested = TensorDict({"shared": torch.arange(count)}, [count])
    for key, row in entries.items():
        nested[tuple(key.split("__"))] = row.expand(count, *row.shape).clone()
    buffer.extend(nested)
    return buffer


def members() -> list[TensorDictReplayBuffer]:
    return [buffer_of(10, next__goal=torch.ones(3)), buffer_of(7, only=torch.tensor(5, dtype=torch.int16))]


@pytest.mark.parametrize("batch", ["stack", "exact"])
@pytest.mark.parametrize("p", [None, [1, 0], [0, 1]])
def test_intersect_keeps_what_all_have_and_lists_the_rest(batch: Any, p: Any) -> None:
    buffer = ReplayBufferEnsemble(*members(), schema="intersect", batch=batch, p=p)
    assert buffer.dropped_keys == ("next.goal", "only")
    found = buffer.sample(6)
    assert set(found.keys()) == {"shared", "index", "source_id"}
    assert buffer.dropped_keys == ("next.goal", "only")


@pytest.mark.parametrize("batch", ["stack", "exact"])
@pytest.mark.parametrize("p", [None, [1, 0], [0, 1]])
def test_union_fills_with_zeros_and_adds_a_mask(batch: Any, p: Any) -> None:
    found = ReplayBufferEnsemble(*members(), schema="union", batch=batch, p=p).sample(6)
    first = found["source_id"] == 0
    assert torch.equal(found["schema_mask", "next", "goal"], first)
    assert torch.equal(found["schema_mask", "only"], ~first)
    assert torch.equal(found["next", "goal"], first[..., None].expand(*first.shape, 3).float())
    assert torch.equal(found["only"], (~first).to(torch.int16) * 5)
    assert "shared" not in found["schema_mask"]


@pytest.mark.parametrize("policy", ["union", "intersect"])
@pytest.mark.parametrize("batch", ["stack", "exact"])
@pytest.mark.parametrize("first", [True, False])
def test_masks_of_a_member_are_continued_where_values_are(policy: Any, batch: Any, first: bool) -> None:
    inner = ReplayBufferEnsemble(buffer_of(64, x=torch.ones(3)), buffer_of(64), schema="union", batch=batch)
    both = [inner, buffer_of(64, x=torch.ones(3))]
    buffer = ReplayBufferEnsemble(*(both if first else both[::-1]), schema=policy, batch=batch)
    for found in (buffer.sample(16), ReplayBufferEnsemble(buffer, schema="union", batch=batch).sample(16)):
        assert torch.equal(found["schema_mask", "x"], found["x"].bool().all(-1))
        assert torch.equal(found["schema_mask", "x"], found["source_id"] != (1 if first else 2))
        assert set(found["schema_mask"].keys()) == {"x"}
    assert buffer.dropped_keys == ()


@pytest.mark.parametrize("batch", ["stack", "exact"])
def test_masks_of_a_member_are_false_where_values_are_missing_again(batch: Any) -> None:
    inner = ReplayBufferEnsemble(buffer_of(64, x=torch.ones(3)), buffer_of(64), schema="union", batch=batch)
    found = ReplayBufferEnsemble(inner, buffer_of(64), schema="union", batch=batch).sample(16)
    assert torch.equal(found["schema_mask", "x"], found["source_id"] == 0)
    assert torch.equal(found["x"].bool().all(-1), found["source_id"] == 0)
    assert set(found["schema_mask"].keys()) == {"x"}
    left = ReplayBufferEnsemble(inner, buffer_of(64), schema="intersect", batch=batch)
    assert "schema_mask" not in left.sample(16)
    assert left.dropped_keys == ("x",)


@pytest.mark.parametrize("p", [None, [1, 0]])
def test_error_names_the_entry_whichever_members_are_drawn(p: Any) -> None:
    buffer = ReplayBufferEnsemble(*members(), schema="error", p=p)
    with pytest.raises(RuntimeError, match=r"'next.goal': member 0 has float32 \[3\], member 1 has none"):
        buffer.sample(4)
    assert ReplayBufferEnsemble(buffer_of(4), buffer_of(5), schema="error").sample(4).shape == (2, 2)


def test_without_a_policy_batches_are_lazy_and_exact_ones_refused() -> None:
    found = ReplayBufferEnsemble(*members(), sample_from_all=True).sample(4)
    assert isinstance(found, LazyStackedTensorDict)
    assert set(found.keys()) == {"shared", "index", "source_id"}
    with pytest.raises(RuntimeError, match=r"next\.goal"):
        ReplayBufferEnsemble(*members(), batch="exact").sample(4)


def test_the_report_names_what_differs_and_draws_nothing() -> None:
    buffer = ReplayBufferEnsemble(*members(), buffer_of(3, only=torch.tensor(1.0)))
    states = [member.sampler.state_dict()["_sample_list"] for member in buffer._members]
    torch.manual_seed(0)
    before = torch.get_rng_state()
    report = {one.key: one for one in buffer.schema_report()}
    assert torch.equal(torch.get_rng_state(), before)
    assert [member.sampler.state_dict()["_sample_list"] for member in buffer._members] == states
    assert {key: one.clash for key, one in report.items()} == {"next.goal": False, "only": True}
    assert dict(report["only"].members) == {0: None, 1: "int16 []", 2: "float32 []"}
    with pytest.raises(RuntimeError, match="'only': member 0 has none, member 1 has int16"):
        ReplayBufferEnsemble(*buffer._members, schema="union").sample(3)


def test_shapes_that_clash_are_refused_by_policies_and_lazy_without_one() -> None:
    two = [buffer_of(5, x=torch.ones(3)), buffer_of(5, x=torch.ones(4))]
    for schema in ("error", "intersect", "union"):
        with pytest.raises(RuntimeError, match=r"'x': member 0 has float32 \[3\], member 1 has float32 \[4\]"):
            ReplayBufferEnsemble(*two, schema=schema).sample(4)  # type: ignore[arg-type]
    assert isinstance(ReplayBufferEnsemble(*two, sample_from_all=True).sample(4), LazyStackedTensorDict)


def test_an_ensemble_with_a_policy_is_a_member() -> None:
    inner = ReplayBufferEnsemble(*members(), schema="union", batch="exact")
    outer = ReplayBufferEnsemble(inner, buffer_of(4), schema="intersect", batch="exact")
    found = outer.sample(9)
    assert set(found.keys()) == {"shared", "index", "source_id"}
    assert set(outer.dropped_keys) == {"next.goal", "only"}


# Weights ---------------------------------------------------------------------------------------------


def shares(buffer: ReplayBufferEnsemble) -> list[float]:
    return [round(float(share), 6) for share in buffer.sampler.shares(buffer.storage.sizes)]


def test_weights_by_number_by_size_and_by_temperature() -> None:
    buffer = ReplayBufferEnsemble(buffer_of(4), buffer_of(16), batch="exact")
    assert shares(buffer) == [0.5, 0.5]
    buffer.p = "size"
    assert shares(buffer) == [0.2, 0.8]
    buffer.temperature = 2.0
    assert shares(buffer) == [0.333333, 0.666667]
    buffer[0].extend(buffer[1][:12])
    assert shares(buffer) == [0.5, 0.5]
    buffer.p = [1, 9]
    assert shares(buffer) == [0.25, 0.75]
    buffer.temperature = 1e-3
    assert shares(buffer) == [0, 1]
    buffer.p = None
    assert shares(buffer) == [0.5, 0.5]


@pytest.mark.parametrize("temperature", [0, -1, math.nan, math.inf, "hot", None])
def test_a_temperature_is_a_positive_number(temperature: Any) -> None:
    buffer = ReplayBufferEnsemble(buffer_of(4))
    with pytest.raises(ValueError, match="temperature is"):
        buffer.temperature = temperature
    assert buffer.temperature == 1


def test_weights_change_during_training() -> None:
    buffer = ReplayBufferEnsemble(buffer_of(50), buffer_of(50), p=[1, 1], batch="exact")
    scheduler = LinearScheduler(buffer.sampler, "temperature", final_value=4.0, num_steps=2)
    scheduler.step()
    assert buffer.temperature == 2.5
    buffer.temperature = 1
    for first in (0, 3, 10):
        buffer.p = [first, 10 - first]
        assert (buffer.sample(100)["source_id"] == 0).sum() == 10 * first
    every = ReplayBufferEnsemble(buffer_of(4), buffer_of(4), sample_from_all=True)
    with pytest.raises(RuntimeError, match="sample_from_all"):
        every.p = [1, 2]
    sampler = SamplerEnsemble(RandomSampler(), RandomSampler(), RandomSampler())
    assert sampler[1:].p is None
    assert len(sampler[[0, 2]]) == 2
