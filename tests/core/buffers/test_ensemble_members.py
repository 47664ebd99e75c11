"""The members of ensembles: their random streams, kinds, priorities and parts."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SchemaError,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StorageEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    WriterEnsemble,
)
from rbtool.core.testing.datasets import write_packed, write_walks


def ring(start: int, count: int = 10, **arguments: Any) -> TensorDictReplayBuffer:
    """A ring with the elements `start` to `start + count`."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), **arguments)
    numbers = torch.arange(start, start + count)
    if count:
        buffer.extend(TensorDict({"a": numbers, "next": {"b": numbers.float()[:, None]}}, [count]))
    return buffer


def rings(*counts: int) -> list[TensorDictReplayBuffer]:
    """Rings whose elements are those of member i from 1000 * i on."""
    return [ring(1000 * number, count) for number, count in enumerate(counts)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def member_of(batch: TensorDict) -> torch.Tensor:
    return batch["a"] // 1000


def require_labels(batch: TensorDict) -> None:
    """Every row is of the member and of the row that its index names."""
    assert torch.equal(batch["index", "buffer_ids"], member_of(batch))
    assert torch.equal(batch["source_id"], member_of(batch))
    assert torch.equal(batch["index", "index"], batch["a"] % 1000)
    assert torch.equal(batch["next", "b"][..., 0], batch["a"].float())


# Random streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{"p": [1, 2]}, {"batch": "exact"}, {"p": "size", "batch": "exact"}])
def test_the_generator_decides_on_members_and_rows(arguments: dict[str, Any]) -> None:
    def batches(seed: int) -> list[int]:
        torch.manual_seed(len(arguments) + seed * 17)
        buffer = ReplayBufferEnsemble(*rings(10, 8), generator=seeded(3), **arguments)
        torch.rand(seed)
        return torch.cat([buffer.sample(8)["a"].flatten() for _ in range(5)]).tolist()

    assert batches(0) == batches(1)
    before = torch.get_rng_state()
    ReplayBufferEnsemble(*rings(10, 8), generator=seeded(), **arguments).sample(8)
    assert torch.equal(before, torch.get_rng_state())


def test_members_keep_a_generator_of_their_own() -> None:
    own = ring(0, generator=seeded(7))
    buffer = ReplayBufferEnsemble(own, ring(1000), generator=seeded(1))
    assert own._rng is not buffer._rng
    assert buffer[1]._rng is buffer._rng
    buffer.set_rng(other := seeded(2))
    assert own._rng is not other
    assert buffer[1]._rng is other


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_continue_the_stream_of_the_ensemble(copied: Any) -> None:
    buffer = ReplayBufferEnsemble(*rings(10, 10), batch="exact", generator=seeded())
    buffer.sample(6)
    other = copied(buffer)
    assert other[0]._rng is other._rng
    assert other[0]._rng is not buffer._rng
    for _ in range(3):
        one, two = buffer.sample(40), other.sample(40)
        assert torch.equal(one["a"], two["a"])
        assert not torch.equal(one["a"][:20], one["a"][20:] - 1000)


def test_a_loader_takes_the_batches_of_an_ensemble() -> None:
    buffer = ReplayBufferEnsemble(*rings(10, 10), batch="exact", batch_size=6, generator=seeded())
    loader = torch.utils.data.DataLoader(buffer, batch_size=None, num_workers=2)
    found = []
    for batch, _ in zip(loader, range(4), strict=False):
        require_labels(batch)
        found.append(batch["a"].tolist())
    assert found[0] != found[1]


# Members of unequal kinds ----------------------------------------------------------------------------


def test_datasets_a_packed_one_and_a_ring_are_members(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(4, "open"), (6, "terminated"), (5, "truncated")])
    write_packed(tmp_path / "walks", tmp_path / "packed")
    ted, packed = (rbtool.load_dataset(tmp_path / name, seed=0) for name in ("walks", "packed"))
    live = TensorDictReplayBuffer(storage=LazyTensorStorage(30))
    live.extend(ted[:])
    buffer = ReplayBufferEnsemble(ted, packed, live, batch="exact", generator=seeded())
    assert buffer.schema_report() == ()
    for _ in range(5):
        batch = buffer.sample(20)
        for member in range(3):
            rows = batch[batch["source_id"] == member]
            expected = ted[rows["index", "index"]]
            for key in expected.exclude("index").keys(True, True):
                assert torch.equal(rows[key], expected[key])


def test_an_ensemble_of_ensembles_names_the_leaf_and_reads_its_rows_again() -> None:
    a, b, c, d = rings(10, 5, 7, 9)
    inner = ReplayBufferEnsemble(b, c)
    exact = ReplayBufferEnsemble(b, c, batch="exact")
    for nested in (inner, exact):
        for batch_of in ("stack", "exact"):
            outer = ReplayBufferEnsemble(a, nested, d, batch=batch_of, sample_from_all=True)  # type: ignore[arg-type]
            batch = outer.sample(12)
            assert torch.equal(batch["source_id"], member_of(batch))
            assert torch.equal(batch["index", "index"], batch["a"] % 1000)
            ids = torch.tensor([0, 1, 1, 2])[member_of(batch)]
            assert torch.equal(batch["index", "buffer_ids"], ids)
            index = batch["index"].set("source_id", batch["source_id"])
            found = torch.cat([rows["a"] for _, rows in outer.storage.get(index)])
            assert torch.equal(found, batch["a"].flatten())
    assert inner.storage.sizes == [5, 7]
    assert outer.storage.sizes == [10, 12, 9]


def test_priorities_go_to_the_members() -> None:
    members = []
    for start in (0, 1000):
        one = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(10))
        one.extend(TensorDict({"a": torch.arange(start, start + 10)}, [10]))
        members.append(one)
    buffer = ReplayBufferEnsemble(*members, batch="exact")
    batch = buffer.sample(400)
    assert batch["priority_weight"].shape == (400,)
    batch["td_error"] = (batch["a"] == 3).float() + (batch["a"] == 1007).float()
    buffer.update_tensordict_priority(batch)
    assert set(buffer.sample(100)["a"].tolist()) == {3, 1007}
    index = buffer.sample(4)["index"]
    buffer.update_priority(index, 5.0)
    with pytest.raises(RuntimeError, match="priorities are"):
        buffer.update_priority(index, torch.ones(3))
    with pytest.raises(TypeError):
        buffer.update_priority(torch.arange(3), 1.0)


@pytest.mark.parametrize("batch", ["stack", "exact"])
def test_priorities_go_to_the_members_of_members(batch: Any) -> None:
    members = [TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(10)) for _ in range(3)]
    for start, one in enumerate(members):
        one.extend(TensorDict({"a": torch.arange(start * 1000, start * 1000 + 10)}, [10]))
    inner = ReplayBufferEnsemble(*members[:2], batch="exact")
    outer = ReplayBufferEnsemble(inner, members[2], batch=batch, sample_from_all=True)
    for _ in range(5):
        sample = outer.sample(400)
        sample["td_error"] = (sample["a"] % 1000 == 5 + sample["a"] // 1000).float()
        outer.update_tensordict_priority(sample)
    assert set(outer.sample(400)["a"].flatten().tolist()) == {5, 1006, 2007}


def test_parts_make_an_ensemble_and_collate_functions_are_called() -> None:
    storages, samplers, writers = [], [], []
    for one in rings(5, 5):
        storages.append(one.storage)
        samplers.append(RandomSampler())
        writers.append(RoundRobinWriter())
    buffer = ReplayBufferEnsemble(
        storages=StorageEnsemble(*storages, transforms=[None, lambda rows: rows.set("a", rows["a"] + 1)]),
        samplers=SamplerEnsemble(*samplers, sample_from_all=True),
        writers=WriterEnsemble(*writers),
        collate_fn=lambda parts: torch.cat([part["a"] for part in parts]),
        collate_fns=[lambda rows: rows.set("a", rows["a"] * 10), None],
    )
    batch = buffer.sample(20)
    assert bool((batch[:10] % 10 == 0).all())
    assert bool((batch[10:] > 1000).all())


SHORT: dict[str, Any] = {
    "short": lambda: SliceSampler(traj_key="episode", slice_len=4, strict_length=False),
    "cut": lambda: SliceSampler(traj_key="episode", slice_len=2, span=1),
    "prioritized": lambda: PrioritizedSliceSampler(20, 0.5, 0.5, traj_key="episode", slice_len=4, strict_length=False),
    "epochs": lambda: SliceSamplerWithoutReplacement(traj_key="episode", num_slices=2),
}


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("length", [3, 6])
def test_samplers_of_short_slices_are_refused_in_exact_batches_whatever_is_drawn(kind: str, length: int) -> None:
    """Also where all trajectories are long enough: in a ring they need not stay so."""
    rings = [TensorDictReplayBuffer(storage=LazyTensorStorage(20)) for _ in range(2)]
    for ring in rings:
        ring.extend(TensorDict({"episode": torch.arange(12) // length}, [12]))
    buffer = ReplayBufferEnsemble(*rings, batch="exact")
    rings[1].set_sampler(SHORT[kind]())
    for refused in (
        lambda: ReplayBufferEnsemble(*rings, batch="exact"),
        lambda: buffer.sample(8),
        lambda: buffer.sample_counts([4, 4]),
        lambda: buffer.sampler.sample(buffer.storage, 8),
    ):
        with pytest.raises(SchemaError, match=r"member 1 .* may return fewer steps") as caught:
            refused()
        assert "strict_length=True" in caught.value.hint
