"""Elements of different shapes, as whole trajectories are, in the storages that keep elements one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

import rbtool
from rbtool import CompressedListStorage, LazyStackStorage, ListStorage, SamplerWithoutReplacement

LENGTHS = (2, 3, 4)
KINDS = [ListStorage, LazyStackStorage, CompressedListStorage]


def trajectories() -> LazyStackedTensorDict:
    """Whole trajectories; every step has another action."""
    parts = [
        TensorDict({"action": torch.arange(100.0 * n, 100.0 * n + n), "td_error": torch.arange(1.0, 1 + n)}, [n])
        for n in LENGTHS
    ]
    return lazy_stack(parts, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [None, 2])
def test_whole_trajectories_are_written_and_sampled_with_their_numbers(kind: Any, prefetch: int | None) -> None:
    sampler = SamplerWithoutReplacement(shuffle=False)
    buffer = rbtool.TensorDictReplayBuffer(storage=kind(10), sampler=sampler, batch_size=6, prefetch=prefetch)
    given = trajectories()
    assert buffer.extend(given).tolist() == [0, 1, 2]
    assert buffer.extend(given).tolist() == [3, 4, 5]
    assert not any("index" in part.keys() for part in given.tensordicts)  # noqa: SIM118  # not a dict
    batch = buffer.sample()
    assert batch.batch_size == (6, -1)
    for number, element in enumerate(batch.unbind(0)):
        length = LENGTHS[number % 3]
        assert element["action"].tolist() == [100.0 * length + step for step in range(length)]
        assert element["index"].tolist() == [number] * length


@pytest.mark.parametrize("kind", KINDS)
def test_entries_of_different_shapes_are_written_too(kind: Any) -> None:
    rows = lazy_stack([TensorDict({"image": torch.full((2, n), float(n))}, [2]) for n in LENGTHS], 1)
    buffer = rbtool.TensorDictReplayBuffer(storage=kind(10), batch_size=5)
    buffer.extend(rows)
    batch = buffer.sample()
    assert batch.batch_size == (5, 3)
    for element in batch.unbind(0):
        assert [part["image"].tolist() for part in element.unbind(0)] == [[float(n)] * n for n in LENGTHS]


@pytest.mark.parametrize("kind", KINDS)
def test_priorities_of_whole_trajectories_are_those_of_all_their_steps(kind: Any) -> None:
    buffer = rbtool.TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=kind(3), sampler_device="cpu", batch_size=30
    )
    buffer.extend(trajectories())
    weights = [buffer.sampler.state_dict()["_sum_tree"].tolist()]
    batch = buffer.sample()
    for element in batch.tensordicts:
        element["td_error"] = element["td_error"] * 10
    buffer.update_tensordict_priority(batch)
    weights.append(buffer.sampler.state_dict()["_sum_tree"].tolist())
    assert weights[0] == [2, 3, 4]
    assert set(weights[1]) <= {2, 3, 4, 20, 30, 40}
    assert max(weights[1]) >= 20
