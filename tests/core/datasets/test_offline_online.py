"""Offline data mixed with online data: fractions, annealing, prefilled buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensordict
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
        buffer.anneal(step=step, total_steps=100)
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
    ("arguments", "name"),
    [
        ({"online_capacity": None}, "online_capacity"), ({"online_storage": LazyTensorStorage(3)}, "online_storage"),
        *(({"offline_fraction": wrong}, "offline_fraction") for wrong in (0, 1, 1.5, "half")), ({"seed": 1}, "seed"),
        ({"batch_size": 0}, "batch_size"),
    ],
)  # fmt: skip
def test_arguments_without_sense_are_refused(walks: Path, arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        mixed(walks, **arguments)


def test_a_batch_without_a_size_is_refused(walks: Path) -> None:
    with pytest.raises(ValueError, match="batch size"):
        mixed(walks, batch_size=None).sample()
    with pytest.raises(ValueError, match="batch_size is None"):
        OfflineToOnlineReplayBuffer(walks, online_capacity=5)
    with pytest.raises(ValueError, match="total_steps is 0"):
        mixed(walks).anneal(1, 0)
    with pytest.raises(TypeError, match="did you mean 'total_steps'"):
        mixed(walks).anneal(1, total=3)


def test_a_full_prefill_copies_every_row_once_and_in_order(walks: Path) -> None:
    """TorchRL draws with replacement: 61 of 100 distinct rows."""
    dataset = load_dataset(walks, seed=0)
    for count in (None, 13, 99):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
        assert prefill_replay_buffer(rb, dataset, count, chunk_size=4) is rb
        assert torch.equal(rb[:]["action"], dataset[:]["action"])
        assert len(rb) == 13
    sized = load_dataset(walks, 8, seed=0)
    few = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
    prefill_replay_buffer(few, sized, np.int64(5), chunk_size=np.int64(2))  # type: ignore[arg-type]
    assert len(few) == 5
    for count in (0, 1.5):
        with pytest.raises(rbtool.UsageError, match=f"n_samples is {count}, expected a "):
            prefill_replay_buffer(few, dataset, count)  # type: ignore[arg-type]


def test_a_prefill_from_a_ring_is_in_the_order_of_time() -> None:
    for written, expected in ((14, range(4, 14)), (7, range(7))):
        ring = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
        for start in range(0, written, 7):
            ring.extend(tensordict.TensorDict({"a": torch.arange(start, start + 7)}, [7]))
        rb = prefill_replay_buffer(TensorDictReplayBuffer(storage=LazyTensorStorage(20)), ring, chunk_size=4)
        assert rb[:]["a"].tolist() == [*expected]


def test_a_prefill_with_a_chunk_that_cannot_be_drawn_writes_nothing(walks: Path) -> None:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
    slices = load_dataset(walks, 4, sampler=rbtool.SliceSampler(slice_len=2, strict_length=False), seed=0)
    with pytest.raises(rbtool.SchemaError, match="1 is not divisible by slice_len=2"):
        prefill_replay_buffer(rb, slices, 9, chunk_size=4)
    assert len(rb) == 0


def mixture(walks: Path, count: int = 2, **arguments: Any) -> ReplayBufferEnsemble:
    """An ensemble of the dataset, and of rings whose rows have other actions."""
    dataset = load_dataset(walks, seed=0)
    rings = [TensorDictReplayBuffer(storage=LazyTensorStorage(20)) for _ in range(count - 1)]
    for number, ring in enumerate(rings, 1):
        rows = dataset[:5].exclude("index")
        rows["action"] = rows["action"] + 100 * number
        ring.extend(rows)
    return ReplayBufferEnsemble(dataset, *rings, batch="exact", **arguments)


def test_the_length_counts_the_elements_of_a_mixture(walks: Path) -> None:
    buffer = OfflineToOnlineReplayBuffer(mixture(walks), online_capacity=50, batch_size=8, offline_fraction=0.5)
    assert len(buffer) == 18
    buffer.extend(buffer.offline_buffer[0][:4].exclude("index"))
    assert len(buffer) == 22
    assert "offline=18, online=4" in repr(buffer)
    assert buffer.sample()["source_id"].tolist() == [0, 0, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("nested", [False, True])
def test_a_mixture_fills_a_buffer_with_every_row_of_each_member_in_order(walks: Path, nested: bool) -> None:
    dataset = mixture(walks)
    members = [dataset[0], dataset[1]]
    if nested:
        dataset = ReplayBufferEnsemble(dataset, load_dataset(walks), batch="exact")
        members.append(dataset[1])
    for count in (None, 31, 10_000):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(50))
        prefill_replay_buffer(rb, dataset, count, chunk_size=4)
        assert torch.equal(rb[:]["action"], torch.cat([member[:]["action"] for member in members]))
        assert "source_id" not in rb[:]


@pytest.mark.parametrize("nested", [False, True])
def test_few_rows_of_a_mixture_are_drawn_by_its_weights(walks: Path, nested: bool) -> None:
    dataset = mixture(walks, p=[1, 3])
    whole = ReplayBufferEnsemble(dataset, mixture(walks, 3)[2], p=[1, 0], batch="exact") if nested else dataset
    rb = prefill_replay_buffer(TensorDictReplayBuffer(storage=LazyTensorStorage(50)), whole, 16, chunk_size=8)
    flat = rb[:]["action"].reshape(16, -1)[:, 0]
    assert len(rb) == 16
    assert int((flat > 50).sum()) == 12
    known = torch.cat([dataset[0][:]["observation"], dataset[1][:]["observation"]])
    assert all((row == known).all(-1).any() for row in rb[:]["observation"])


def test_a_mixture_of_other_entries_fills_a_buffer_by_its_policy(walks: Path) -> None:
    dataset = load_dataset(walks)
    ring = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
    ring.extend(dataset[:5].exclude("index").set("extra", torch.ones(5)))
    found = {}
    for schema in ("union", "intersect"):
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(50))
        both = ReplayBufferEnsemble(dataset, ring, batch="exact", schema=schema)  # type: ignore[arg-type]
        found[schema] = prefill_replay_buffer(rb, both)[:]
    assert found["union"]["extra"].tolist() == [0.0] * 13 + [1.0] * 5
    assert found["union"]["schema_mask", "extra"].tolist() == [False] * 13 + [True] * 5
    assert "extra" not in found["intersect"]
    with pytest.raises(rbtool.SchemaError, match="'extra': member 0 has none"):
        prefill_replay_buffer(rb, ReplayBufferEnsemble(dataset, ring, batch="exact"))


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


def test_a_load_that_fails_leaves_the_fraction(walks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed(walks, offline_fraction=0.25).dumps(tmp_path / "checkpoint")
    buffer = mixed(walks, offline_fraction=0.75)
    state = mixed(walks, offline_fraction=0.25).state_dict()

    def interrupted(self: Any, draws: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ReplayBufferEnsemble, "rotated_draws", interrupted)
        for load in (lambda: buffer.loads(tmp_path / "checkpoint"), lambda: buffer.load_state_dict(state)):
            with pytest.raises(KeyboardInterrupt):
                load()
            assert buffer.offline_fraction == 0.75
    buffer.anneal(1, 2)
    assert buffer.offline_fraction == 0.375
    buffer.loads(tmp_path / "checkpoint")
    assert buffer.offline_fraction == 0.25


def test_fractions_and_buffers_have_torchrls_names(walks: Path) -> None:
    assert isinstance(OfflineToOnlineReplayBuffer.offline_buffer, property)
    assert isinstance(OfflineToOnlineReplayBuffer.online_buffer, property)
    buffer = mixed(walks, offline_fraction=0.3)
    assert (buffer._offline_fraction, buffer._base_offline_fraction) == (0.3, 0.3)
    buffer._offline_fraction, buffer._base_offline_fraction = 0.2, 0.4
    assert buffer.offline_fraction == 0.2
    buffer.anneal(1, 2)
    assert buffer.offline_fraction == 0.2
    buffer.anneal(0, 2)
    assert buffer._offline_fraction == 0.4
    with pytest.raises(ValueError, match="offline_fraction"):
        buffer._base_offline_fraction = 1.5


def test_a_dataset_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="offline_dataset is a ListStorage, expected a buffer or a name"):
        OfflineToOnlineReplayBuffer(rbtool.ListStorage(3), online_capacity=3)  # type: ignore[arg-type]
