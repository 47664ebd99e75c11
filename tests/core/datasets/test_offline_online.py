"""Offline data mixed with online data: fractions, annealing, prefilled buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rbtool
from rbtool import (
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    load_dataset,
    prefill_replay_buffer,
)


def mixed(walks: Path, **arguments: Any) -> OfflineToOnlineReplayBuffer:
    given: dict[str, Any] = {"online_capacity": 50, "batch_size": 10} | arguments
    return OfflineToOnlineReplayBuffer(load_dataset(walks, seed=0), **given)


def test_a_batch_has_the_rows_of_the_dataset_first_and_exactly_the_fraction(walks: Path) -> None:
    """TorchRL raises KeyError on `index` once both sides contribute."""
    buffer = mixed(walks, offline_fraction=0.3)
    assert buffer.sample()["source_id"].tolist() == [0] * 10
    data = buffer.offline_buffer[:8].exclude("index")
    data["action"] = data["action"] * 0 + 77
    buffer.extend(data)
    for size in (10, 7, 1, 33):
        batch = buffer.sample(size)
        offline = round(0.3 * size)
        assert batch["source_id"].tolist() == [0] * offline + [1] * (size - offline)
        assert torch.equal(batch["action"].reshape(size, -1)[:, 0] == 77, batch["source_id"] == 1)
    assert len(buffer) == 13 + 8
    _, info = buffer.sample(return_info=True)
    assert info["index"]["index"].shape == (10,)


def test_the_fraction_anneals_to_zero(walks: Path) -> None:
    buffer = mixed(walks, offline_fraction=0.5)
    buffer.extend(buffer.offline_buffer[:8].exclude("index"))
    counts = []
    for step in (0, 25, 50, 75, 100, 130):
        buffer.anneal(step, 100)
        counts.append(int((buffer.sample(40)["source_id"] == 0).sum()))
    assert counts == [20, 15, 10, 5, 0, 0]
    state = buffer.state_dict()
    other = mixed(walks)
    other.load_state_dict(state)
    assert other.offline_fraction == 0
    assert len(other) == len(buffer)
    empty = mixed(walks)
    empty.anneal(1, 1)
    with pytest.raises(RuntimeError, match="empty storage"):
        empty.sample()


def test_a_name_of_a_dataset_is_opened(walks: Path) -> None:
    buffer = OfflineToOnlineReplayBuffer(walks, online_capacity=5, batch_size=4, seed=3)
    assert torch.equal(buffer.sample()["action"], load_dataset(walks, 4, seed=3).sample()["action"])


@pytest.mark.parametrize(
    "arguments",
    [
        {"online_capacity": None},
        {"online_storage": LazyTensorStorage(3)},
        {"offline_fraction": 0},
        {"offline_fraction": 1},
        {"offline_fraction": 1.5},
        {"offline_fraction": "half"},
        {"seed": 1},
        {"batch_size": 0},
    ],
)
def test_arguments_that_make_no_sense_are_refused(walks: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        mixed(walks, **arguments)


def test_a_batch_without_a_size_is_refused(walks: Path) -> None:
    with pytest.raises(ValueError, match="batch size"):
        mixed(walks, batch_size=None).sample()
    with pytest.raises(ValueError, match="without batch_size"):
        OfflineToOnlineReplayBuffer(walks, online_capacity=5)
    with pytest.raises(ValueError, match="total"):
        mixed(walks).anneal(1, 0)


def test_a_full_prefill_copies_every_row_once_and_in_order(walks: Path) -> None:
    """TorchRL draws with replacement: 61 of 100 distinct rows."""
    dataset = load_dataset(walks, seed=0)
    for count in (None, 13, 99):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
        assert prefill_replay_buffer(rb, dataset, count, chunk_size=4) is rb
        assert torch.equal(rb[:]["action"], dataset[:]["action"])
        assert len(rb) == 13
    few = prefill_replay_buffer(TensorDictReplayBuffer(storage=LazyTensorStorage(20)), dataset, 5, chunk_size=2)
    assert len(few) == 5
    with pytest.raises(rbtool.UsageError):
        prefill_replay_buffer(few, dataset, 0)


def test_a_checkpoint_continues_with_the_same_batches_and_fraction(walks: Path, tmp_path: Path) -> None:
    buffer = mixed(walks, generator=torch.Generator().manual_seed(1))
    buffer.extend(buffer.offline_buffer[:8].exclude("index"))
    buffer.anneal(1, 4)
    buffer.sample()
    buffer.dumps(tmp_path / "saved")
    other = mixed(walks, generator=torch.Generator().manual_seed(2))
    other.loads(tmp_path / "saved")
    assert other.offline_fraction == buffer.offline_fraction
    for _ in range(3):
        one, two = buffer.sample(), other.sample()
        assert torch.equal(one["index", "index"], two["index", "index"])
    for each in (buffer, other):
        each.anneal(2, 4)
    assert other.offline_fraction == buffer.offline_fraction
    assert len(other) == len(buffer)


def test_other_checkpoints_are_refused_with_nothing_changed(walks: Path, tmp_path: Path) -> None:
    buffer = mixed(walks)
    members = ReplayBufferEnsemble(buffer.offline_buffer, buffer.online_buffer)
    members.dumps(tmp_path / "ensemble")
    with pytest.raises(ValueError, match="no offline_fraction"):
        buffer.loads(tmp_path / "ensemble")
    for state in ({}, {"mixture": members.state_dict()}, buffer.state_dict() | {"offline_fraction": 2}):
        with pytest.raises(RuntimeError, match="no offline_fraction"):
            buffer.load_state_dict(state)
    assert buffer.offline_fraction == 0.5
