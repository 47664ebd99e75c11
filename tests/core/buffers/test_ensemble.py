"""Ensembles of buffers: batches, indices and what is refused, by the spec."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

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
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    StorageEnsemble,
    TensorDictReplayBuffer,
    ToTensorImage,
    WriterEnsemble,
)


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


def test_an_ensemble_of_some_draws_as_often_as_that_of_all() -> None:
    buffer = ReplayBufferEnsemble(*rings(10, 5, 7), num_buffer_sampled=4)
    assert buffer[1:].sample(12).shape == (4, 3)
    assert buffer.sampler[1:].sample(buffer.storage[1:], 12)[0]["index"].shape == (4, 3)
    assert ReplayBufferEnsemble(*rings(10, 5, 7))[1:].sample(12).shape == (2, 6)


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
    with pytest.raises(RuntimeError, match="to the SamplerEnsemble instead"):
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
    for arguments in ({"batch": "flat"}, {"temperature": 0}, {"temperature": True}, {"schema": "any"},
                      {"num_buffer_sampled": 0}, {"num_buffer_sampled": 1, "batch": "exact"},
                      {"storage": ListStorage(3)}):  # fmt: skip
        with pytest.raises(ValueError):
            ReplayBufferEnsemble(*members, **arguments)


def test_a_batch_that_the_draws_do_not_divide_is_refused() -> None:
    buffer = ReplayBufferEnsemble(*rings(5, 5, 5))
    with pytest.raises(ValueError, match="multiple of 3"):
        buffer.sample(10)
    with pytest.raises(ValueError, match="multiple of 2"):
        ReplayBufferEnsemble(*rings(5, 5, 5), num_buffer_sampled=2).sample(5)
    with pytest.raises(ValueError, match="batch_size is 0"):
        buffer.sample(0)


def test_an_empty_member_is_named_unless_its_weight_is_zero() -> None:
    members = rings(5, 0)
    with pytest.raises(RuntimeError, match="member 1 has no elements"):
        ReplayBufferEnsemble(*members).sample(4)
    for p in ([1, 0], "size"):
        assert set(member_of(ReplayBufferEnsemble(*members, p=p).sample(4)).flatten().tolist()) == {0}
    with pytest.raises(RuntimeError, match="members 0, 1 have no elements"):
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
