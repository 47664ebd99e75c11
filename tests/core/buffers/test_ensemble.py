"""Ensembles of buffers: batches, indices and what is refused, by the spec."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

import rbtool
from rbtool import (
    Compose,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    RenameTransform,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Resize,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StorageEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    ToTensorImage,
    WriterEnsemble,
)
from rbtool.core.testing.datasets import write_walks


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


# The reference page ----------------------------------------------------------------------------------


def test_the_example_of_the_reference_page_runs_as_written() -> None:
    rb0 = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(10),
        transform=Compose(
            ToTensorImage(in_keys=["pixels", ("next", "pixels")]),
            Resize(32, in_keys=["pixels", ("next", "pixels")]),
            RenameTransform([("some", "key")], ["renamed"]),
        ),
    )
    rb1 = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(10),
        transform=Compose(
            ToTensorImage(in_keys=["pixels", ("next", "pixels")]),
            Resize(32, in_keys=["pixels", ("next", "pixels")]),
            RenameTransform(["another_key"], ["renamed"]),
        ),
    )
    rb = ReplayBufferEnsemble(rb0, rb1, p=[0.5, 0.5], transform=Resize(33, in_keys=["pixels"], out_keys=["pixels33"]))
    printed = repr(rb)
    assert printed.startswith("ReplayBufferEnsemble(\n    storages=StorageEnsemble(")
    assert "Resize(" in printed
    data0 = TensorDict(
        {
            "pixels": torch.randint(255, (10, 244, 244, 3)),
            ("next", "pixels"): torch.randint(255, (10, 244, 244, 3)),
            ("some", "key"): torch.randn(10),
        },
        batch_size=[10],
    )
    data1 = TensorDict(
        {
            "pixels": torch.randint(255, (10, 64, 64, 3)),
            ("next", "pixels"): torch.randint(255, (10, 64, 64, 3)),
            "another_key": torch.randn(10),
        },
        batch_size=[10],
    )
    rb[0].extend(data0)
    rb[1].extend(data1)
    for _ in range(2):
        sample = rb.sample(10)
        assert sample["next", "pixels"].shape == torch.Size([2, 5, 3, 32, 32])
        assert sample["pixels"].shape == torch.Size([2, 5, 3, 32, 32])
        assert sample["pixels33"].shape == torch.Size([2, 5, 3, 33, 33])
        assert sample["renamed"].shape == torch.Size([2, 5])


# Batches ---------------------------------------------------------------------------------------------


def test_a_batch_has_a_row_for_each_draw_and_is_labelled() -> None:
    batch, info = ReplayBufferEnsemble(*rings(10, 5, 7)).sample(12, return_info=True)
    assert batch.shape == (3, 4)
    assert batch["index"].shape == (3, 4)
    require_labels(batch)
    assert info["index"].batch_size == (3,)
    assert info["index"]["index"].shape == (3, 4)
    assert torch.equal(info["source_id"], batch["source_id"])


def test_sample_from_all_takes_each_member_once_and_num_buffer_sampled_sets_the_draws() -> None:
    members = rings(10, 5, 7)
    every = ReplayBufferEnsemble(*members, sample_from_all=True, num_buffer_sampled=2).sample(6)
    assert member_of(every)[:, 0].tolist() == [0, 1, 2]
    few = ReplayBufferEnsemble(*members, num_buffer_sampled=2, p=[0, 1, 0]).sample(6)
    assert few.shape == (2, 3)
    assert set(member_of(few).flatten().tolist()) == {1}


def test_the_index_of_a_batch_reads_the_same_rows() -> None:
    buffer = ReplayBufferEnsemble(*rings(10, 5))
    batch, info = buffer.sample(8, return_info=True)
    for index in (info["index"], batch["index"]):
        found = buffer.storage.get(index)
        assert [member for member, _ in found] == member_of(batch)[:, 0].tolist()
        assert torch.equal(torch.stack([rows["a"] for _, rows in found]), batch["a"])


@pytest.mark.parametrize("size", [1, 2, 7, 64, 257])
def test_exact_batches_have_any_size_and_the_right_shares(size: int) -> None:
    buffer = ReplayBufferEnsemble(*rings(10, 5, 7), p=[5, 3, 2], batch="exact", generator=seeded())
    total = torch.zeros(3)
    for _ in range(60):
        batch = buffer.sample(size)
        require_labels(batch)
        counts = member_of(batch).bincount(minlength=3)
        assert counts.sum() == size
        assert bool((counts - size * torch.tensor([0.5, 0.3, 0.2])).abs().max() < 1)
        total += counts
    assert torch.allclose(total / 60 / size, torch.tensor([0.5, 0.3, 0.2]), atol=0.35 / math.sqrt(size))


def test_exact_batches_give_members_with_slices_whole_slices() -> None:
    done = torch.zeros(20, 1, dtype=torch.bool)
    done[9::10] = True
    members = []
    for start in (0, 1000):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=4))
        buffer.extend(TensorDict({"a": torch.arange(start, start + 20), "next": {"done": done}}, [20]))
        members.append(buffer)
    buffer = ReplayBufferEnsemble(*members, batch="exact")
    for _ in range(20):
        batch = buffer.sample(12)
        steps = batch["a"].reshape(3, 4)
        assert torch.equal(steps - steps[:, :1], torch.arange(4).expand(3, 4))
        assert batch["next", "truncated"].reshape(3, 4)[:, -1].all()
    with pytest.raises(ValueError, match="multiple of 4"):
        buffer.sample(10)


def test_exact_batches_are_exact_at_the_end_of_an_epoch() -> None:
    members = [ring(0, 5, sampler=SamplerWithoutReplacement()), ring(1000, 3, sampler=SamplerWithoutReplacement())]
    buffer = ReplayBufferEnsemble(*members, batch="exact")
    for _ in range(30):
        assert buffer.sample(8).shape == (8,)


def test_a_short_draw_makes_a_lazy_batch() -> None:
    members = [ring(0, 5, sampler=SamplerWithoutReplacement(shuffle=False)), ring(1000, 10)]
    buffer = ReplayBufferEnsemble(*members, sample_from_all=True)
    buffer.sample(6)
    batch, info = buffer.sample(6, return_info=True)
    assert isinstance(batch, LazyStackedTensorDict)
    assert [len(part) for part in batch.tensordicts] == [2, 3]
    assert info["index"]["index"].is_nested
    for part in batch.tensordicts:
        require_labels(part)


def test_members_of_other_kinds_give_stacks() -> None:
    numbers = ReplayBuffer(storage=ListStorage(10)), ReplayBuffer(storage=LazyTensorStorage(10))
    for start, buffer in enumerate(numbers):
        buffer.extend(list(torch.arange(5) + 10 * start))
    assert ReplayBufferEnsemble(*numbers, sample_from_all=True).sample(6).shape == (2, 3)
    exact = ReplayBufferEnsemble(*numbers, batch="exact").sample(7)
    assert exact.shape == (7,)
    assert sorted((exact // 10).tolist()) == (exact // 10).tolist()


def test_storages_of_several_dimensions_are_indexed_by_coordinates() -> None:
    wide = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    wide.extend(TensorDict({"a": torch.arange(1000, 1012).reshape(3, 4), "next": {"b": torch.zeros(3, 4, 1)}}, [3, 4]))
    buffer = ReplayBufferEnsemble(ring(0), wide, sample_from_all=True)
    batch = buffer.sample(8)
    assert batch["index", "index"].shape == (2, 4, 2)
    assert bool((batch["index", "index"][0, :, 1] == -1).all())
    again = torch.stack([rows["a"] for _, rows in buffer.storage.get(batch["index"])])
    assert torch.equal(again, batch["a"])


# Indices ---------------------------------------------------------------------------------------------


def test_an_index_returns_a_member_or_an_ensemble_of_some() -> None:
    members = rings(10, 5, 7)
    buffer = ReplayBufferEnsemble(*members, p=[1, 2, 3], transform=lambda batch: batch, batch_size=4)
    assert buffer[1] is members[1]
    assert buffer[-1] is members[2]
    assert buffer[:] is buffer
    assert len(buffer) == 3
    for index in (slice(1, None), [1, 2], torch.tensor([1, 2]), torch.tensor([False, True, True])):
        part = buffer[index]
        assert isinstance(part, ReplayBufferEnsemble)
        assert [part[0], part[1]] == members[1:]
        assert torch.allclose(part.p, torch.tensor([0.4, 0.6]).double())
        assert part.transform is buffer.transform
        assert part.batch_size == 4
    for kind in (buffer.storage, buffer.sampler, buffer.writer):
        assert len(kind) == 3
        assert kind[:] is kind
        assert len(kind[1:]) == 2
        assert kind[0] is kind.members[0]


def test_rows_of_all_members_are_stacked_without_transforms() -> None:
    def negative(batch: TensorDict) -> TensorDict:
        return batch.set("a", -batch["a"])

    members = [ring(0, transform=negative), ring(1000)]
    buffer = ReplayBufferEnsemble(*members, transform=negative)
    assert buffer[:, [1, 3]]["a"].tolist() == [[1, 3], [1001, 1003]]
    assert buffer[1, [1, 3]]["a"].tolist() == [1001, 1003]
    assert buffer[:, 2]["a"].tolist() == [2, 1002]


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), RuntimeError),
        (0.5, TypeError),
        (torch.tensor(0.5), TypeError),
        ([0.5], TypeError),
        ("a", TypeError),
        (None, TypeError),
        (True, TypeError),
        (3, IndexError),
        (-4, IndexError),
        ([0, 3], IndexError),
        ((slice(None), 50), IndexError),
    ],
)
def test_other_indices_are_refused(index: Any, error: type[Exception]) -> None:
    buffer = ReplayBufferEnsemble(*rings(10, 5, 7))
    with pytest.raises(error):
        buffer[index]
    if not isinstance(index, tuple):
        for kind in (buffer.storage, buffer.sampler, buffer.writer):
            with pytest.raises(error):
                kind[index]


# What is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "p", [[1, -1], [0, 0], [1], [1, 2, 3], [1, math.nan], [1, math.inf], [[1, 2]], ["a", "b"], "number", 1.0]
)
def test_weights_that_make_no_sense_are_refused(p: Any) -> None:
    members = rings(5, 5)
    with pytest.raises(ValueError, match="p "):
        ReplayBufferEnsemble(*members, p=p)
    buffer = ReplayBufferEnsemble(*members, p=[1, 2])
    with pytest.raises(ValueError, match="p "):
        buffer.p = p
    assert torch.allclose(buffer.p * 3, torch.tensor([1.0, 2.0]).double())


def test_arguments_that_contradict_each_other_are_refused() -> None:
    members = rings(5, 5)
    storages, samplers, writers = (
        StorageEnsemble(*(one.storage for one in members)),
        SamplerEnsemble(*(one.sampler for one in members)),
        WriterEnsemble(*(one.writer for one in members)),
    )
    with pytest.raises(RuntimeError, match="sample_from_all"):
        ReplayBufferEnsemble(*members, p=[1, 1], sample_from_all=True)
    with pytest.raises(RuntimeError, match="one or the other"):
        ReplayBufferEnsemble(*members, storages=storages, samplers=samplers, writers=writers)
    with pytest.raises(RuntimeError, match="writers"):
        ReplayBufferEnsemble(storages=storages, samplers=samplers)
    with pytest.raises(RuntimeError, match="takes it"):
        ReplayBufferEnsemble(storages=storages, samplers=samplers, writers=writers, p=[1, 2])
    with pytest.raises(RuntimeError, match="one number"):
        ReplayBufferEnsemble(storages=storages, samplers=SamplerEnsemble(RandomSampler()), writers=writers)
    with pytest.raises(TypeError):
        ReplayBufferEnsemble(storages=members[0].storage, samplers=samplers, writers=writers)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ReplayBufferEnsemble(members[0], members[1].storage)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="transforms"):
        StorageEnsemble(*storages.members, transforms=[None])
    with pytest.raises(TypeError, match="collate_fns"):
        ReplayBufferEnsemble(*members, collate_fns=[None])
    with pytest.raises(RuntimeError):
        ReplayBufferEnsemble()
    for arguments in ({"batch": "flat"}, {"temperature": 0}, {"schema": "any"}, {"num_buffer_sampled": 0},
                      {"num_buffer_sampled": 1, "batch": "exact"}, {"storage": ListStorage(3)}):  # fmt: skip
        with pytest.raises(ValueError):
            ReplayBufferEnsemble(*members, **arguments)


def test_a_batch_that_the_draws_do_not_divide_is_refused() -> None:
    buffer = ReplayBufferEnsemble(*rings(5, 5, 5))
    with pytest.raises(ValueError, match="multiple of 3"):
        buffer.sample(10)
    with pytest.raises(ValueError, match="multiple of 2"):
        ReplayBufferEnsemble(*rings(5, 5, 5), num_buffer_sampled=2).sample(5)
    with pytest.raises(ValueError, match="at least 1"):
        buffer.sample(0)


def test_an_empty_member_is_named_unless_its_weight_is_zero() -> None:
    members = rings(5, 0)
    with pytest.raises(RuntimeError, match="member 1 has no elements"):
        ReplayBufferEnsemble(*members).sample(4)
    for p in ([1, 0], "size"):
        assert set(member_of(ReplayBufferEnsemble(*members, p=p).sample(4)).flatten().tolist()) == {0}
    with pytest.raises(RuntimeError, match="member 0 to 1"):
        ReplayBufferEnsemble(*rings(0, 0), p="size").sample(4)


def test_an_ensemble_cannot_be_written_to_and_its_members_can() -> None:
    buffer = ReplayBufferEnsemble(*rings(5, 5))
    data = ring(0).sample(2).exclude("index")
    writes = [
        lambda: buffer.add(data[0]),
        lambda: buffer.extend(data),
        lambda: buffer.write_all(data),
        lambda: buffer.__setitem__(0, data),
        lambda: buffer.set_("a", 1),
    ]
    for write in writes:
        with pytest.raises(TypeError, match="cannot be written to"):
            write()
    for write in (
        lambda: buffer.writer.extend(data),
        lambda: buffer.writer.add(data),
        lambda: buffer.storage.set(0, data),
        lambda: buffer.storage.extend(data),
    ):
        with pytest.raises(RuntimeError, match="cannot be written to"):
            write()
    with pytest.raises(TypeError):
        SamplerEnsemble(RandomSampler()).sample(members_storage(), 2)
    buffer[1].extend(data)
    assert buffer.storage.sizes == [5, 7]
    assert buffer.write_count == 12


def members_storage() -> LazyTensorStorage:
    storage = LazyTensorStorage(3)
    storage.set(range(2), torch.zeros(2))
    return storage


def test_clashing_dtypes_are_refused_instead_of_converted() -> None:
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(2)]
    for dtype, member in zip((torch.float32, torch.float64), members, strict=True):
        member.extend(TensorDict({"a": torch.zeros(5, dtype=dtype)}, [5]))
    for arguments in ({}, {"schema": "union"}, {"schema": "intersect"}, {"batch": "exact"}):
        with pytest.raises(RuntimeError, match="'a': member 0 has float32"):
            ReplayBufferEnsemble(*members, sample_from_all=True, **arguments).sample(4)


def test_an_entry_of_the_name_of_the_source_is_not_overwritten() -> None:
    member = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    member.extend(TensorDict({"source_id": torch.zeros(5)}, [5]))
    with pytest.raises(RuntimeError, match="source_id"):
        ReplayBufferEnsemble(member).sample(2)
    assert ReplayBufferEnsemble(member, source_key="origin").sample(2)["origin"].tolist() == [[0, 0]]
    assert "origin" not in ReplayBufferEnsemble(member, source_key=None).sample(2)


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
    rbtool.convert(tmp_path / "walks", tmp_path / "packed", layout="packed")
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
    stacked = ReplayBufferEnsemble(ReplayBufferEnsemble(*members), members[0]).sample(8)
    stacked["td_error"] = torch.ones(2, 4)
    ReplayBufferEnsemble(ReplayBufferEnsemble(*members), members[0]).update_tensordict_priority(stacked)


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
