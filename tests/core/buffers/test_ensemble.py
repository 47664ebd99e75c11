"""Ensembles of buffers: batches, indices, members, and what is refused."""

from __future__ import annotations

import concurrent.futures
import copy
import math
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip
from tensordict import LazyStackedTensorDict, TensorDict

import rbtool
from rbtool import (
    Compose,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    Normalize,
    PrioritizedSliceSampler,
    RandomSampler,
    RenameTransform,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Resize,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SchemaError,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StorageEnsemble,
    StreamingSliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    ToTensorImage,
    UsageError,
    WriterEnsemble,
)
from rbtool.core.buffers import ensemble
from rbtool.core.testing.buffers import moved
from rbtool.core.testing.datasets import write_packed, write_walks


def numbers(count: int, start: int = 0) -> TensorDict:
    found = torch.arange(start, start + count)
    return TensorDict({"a": found, "next": {"b": found.float()[:, None]}}, [count])


def ring(start: int, count: int = 10, **arguments: Any) -> TensorDictReplayBuffer:
    """A ring with the elements `start` to `start + count`."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), **arguments)
    if count:
        buffer.extend(numbers(count, start))
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
    def made(key: Any) -> TensorDictReplayBuffer:
        pixels = {"in_keys": ["pixels", ("next", "pixels")]}
        changes = Compose(ToTensorImage(**pixels), Resize(32, **pixels), RenameTransform([key], ["renamed"]))
        return TensorDictReplayBuffer(storage=LazyMemmapStorage(10), transform=changes)

    def pixels(size: int) -> torch.Tensor:
        return torch.randint(255, (10, size, size, 3))

    rb0, rb1 = made(("some", "key")), made("another_key")
    rb = ReplayBufferEnsemble(rb0, rb1, p=[0.5, 0.5], transform=Resize(33, in_keys=["pixels"], out_keys=["pixels33"]))
    printed = repr(rb)
    assert printed.startswith("ReplayBufferEnsemble(\n    storages=StorageEnsemble(")
    assert "Resize(" in printed
    for number, (size, key) in enumerate(((244, ("some", "key")), (64, "another_key"))):
        data = {"pixels": pixels(size), ("next", "pixels"): pixels(size), key: torch.randn(10)}
        rb[number].extend(TensorDict(data, batch_size=[10]))
    for _ in range(2):
        sample = rb.sample(10)
        assert sample["next", "pixels"].shape == sample["pixels"].shape == (2, 5, 3, 32, 32)
        assert (sample["pixels33"].shape, sample["renamed"].shape) == ((2, 5, 3, 33, 33), (2, 5))


# Batches ---------------------------------------------------------------------------------------------


def test_a_batch_has_a_row_for_each_draw_and_is_labelled() -> None:
    members = rings(10, 5, 7)
    batch, info = ReplayBufferEnsemble(*members).sample(12, return_info=True)
    assert batch.shape == batch["index"].shape == info["index"]["index"].shape == (3, 4)
    require_labels(batch)
    assert info["index"].batch_size == (3,)
    assert torch.equal(info["source_id"], batch["source_id"])
    every = ReplayBufferEnsemble(*members, sample_from_all=True, num_buffer_sampled=2).sample(6)
    assert member_of(every)[:, 0].tolist() == [0, 1, 2]
    few = ReplayBufferEnsemble(*members, num_buffer_sampled=2, p=[0, 1, 0]).sample(6)
    assert (few.shape, set(member_of(few).flatten().tolist())) == ((2, 3), {1})


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


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([["a"], ["b", "c"]], ["a", "b", "c"]),
        ([["a"], ["b"]], ["a", "b"]),
        ([[torch.arange(2), "a"], [torch.arange(1), "b"]], None),
        ([[torch.arange(2)], [torch.arange(1)]], [[0, 1, 0]]),
    ],
)
def test_lists_of_objects_are_chained_and_tensors_in_lists_are_joined(batches: list, expected: Any) -> None:
    if expected is None:
        with pytest.raises(SchemaError, match="batches of str"):
            ensemble._concatenated(batches)
    else:
        found = ensemble._concatenated(batches)
        assert [part.tolist() if isinstance(part, torch.Tensor) else part for part in found] == expected


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
    parts = {"storages": storages, "samplers": samplers, "writers": writers}
    faults: list[tuple[Any, Any, str | None, type[Exception]]] = [
        (members, {"p": [1, 1], "sample_from_all": True}, "sample_from_all", RuntimeError),
        (members, parts, "one or the other", RuntimeError),
        ((), {"storages": storages, "samplers": samplers}, "writers", RuntimeError),
        ((), parts | {"p": [1, 2]}, "SamplerEnsemble", RuntimeError),
        ((), parts | {"samplers": SamplerEnsemble(RandomSampler())}, "one number", RuntimeError),
        ((), parts | {"storages": members[0].storage}, None, TypeError),
        ((members[0], members[1].storage), {}, None, TypeError),
        (members, {"collate_fns": [None]}, "collate_fns", TypeError),
        ((), {}, None, RuntimeError),
        (members, {"routing_key": "env", "routing_dim": 0}, "give one of them", UsageError),
        ([ReplayBufferEnsemble(*members)], {"routing_key": "env"}, "not routed to members that are", UsageError),
        *((members, arguments, None, ValueError) for arguments in (
            {"batch": "flat"}, {"temperature": 0}, {"temperature": True}, {"schema": "any"}, {"num_buffer_sampled": 0},
            {"num_buffer_sampled": 1, "batch": "exact"}, {"storage": ListStorage(3)},
        )),
    ]  # fmt: skip
    for given, arguments, words, error in faults:
        with pytest.raises(error, match=words):
            ReplayBufferEnsemble(*given, **arguments)
    with pytest.raises(TypeError, match="transforms"):
        StorageEnsemble(*storages.members, transforms=[None])


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


@pytest.mark.parametrize("batch", ["stack", "exact"])
@pytest.mark.parametrize("sampler", [SliceSampler, StreamingSliceSampler])
def test_members_are_weighed_by_what_they_can_draw(batch: Any, sampler: Any, tmp_path: Path) -> None:
    members = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler(slice_len=4, strict_length=True))
        for _ in range(3)
    ]
    buffer = ReplayBufferEnsemble(*members, p="sampleable", batch=batch, batch_size=12, generator=seeded())

    def write(member: int, count: int) -> None:
        members[member].extend(numbers(count).set("episode", torch.zeros(count, dtype=torch.int64)))

    write(0, 3)
    assert not buffer.can_sample()
    with pytest.raises(SchemaError, match="members 0, 1, 2 have nothing that can be drawn yet"):
        buffer.sample()
    write(0, 1)  # one slice
    write(1, 7)  # four
    assert buffer.can_sample()
    assert buffer.sampler.sampleable(buffer.storage, 12) == 5
    shares = torch.cat([buffer.sample()["source_id"].flatten() for _ in range(400)]).bincount(minlength=3) / 4800
    assert shares[2] == 0
    assert abs(float(shares[0]) - 0.2) < 0.04
    buffer.dumps(tmp_path / "saved")
    buffer.p = None
    assert not buffer.can_sample()  # of equal weights, also of the empty one
    buffer.loads(tmp_path / "saved")
    assert (buffer.p, buffer.can_sample()) == ("sampleable", True)
    write(2, 3)
    buffer.p = "size"
    assert not buffer.can_sample()  # three steps are too few
    buffer.p = [0, 1, 0]
    assert buffer.can_sample()


# Routing -------------------------------------------------------------------------------------------


def test_rows_are_written_to_the_members_that_they_name() -> None:
    writers = [TensorDictRoundRobinWriter(track_generations=number == 1) for number in range(3)]
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=writer) for writer in writers]
    buffer = ReplayBufferEnsemble(*members, routing_key="env")
    env = torch.tensor([2, 1, 1, 2, 1, 1])
    found = buffer.extend(numbers(6).set("env", env))
    assert found.batch_size == (6,)
    assert found["buffer_ids"].tolist() == env.tolist()
    assert found["index"].tolist() == [0, 0, 1, 1, 2, 0]
    assert found["index_generation"].tolist() == [-1, 1, 0, -1, 0, 1]
    assert [len(member) for member in members] == [0, 3, 2]
    assert members[1][:]["a"].tolist() == [5, 2, 4]
    found = buffer.add(numbers(1, 7)[0].set("env", 0))
    assert (found["buffer_ids"].tolist(), found["index"].tolist()) == ([0], [0])
    assert members[0][:]["a"].tolist() == [7]
    assert buffer.write_count == 7


@pytest.mark.parametrize("dim", [0, 1])
def test_each_member_gets_one_entry_along_a_dimension(dim: int) -> None:
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(9)) for _ in range(3)]
    buffer = ReplayBufferEnsemble(*members, routing_dim=dim)
    data = numbers(6).reshape(3, 2) if dim == 0 else numbers(6).reshape(3, 2).transpose(0, 1)
    found = buffer.extend(data)
    assert [member[:]["a"].tolist() for member in members] == [[0, 1], [2, 3], [4, 5]]
    flat = data["a"].reshape(-1)
    assert found["buffer_ids"].tolist() == (flat // 2).tolist()
    assert found["index"].tolist() == (flat % 2).tolist()
    if dim == 0:
        assert buffer.add(data[:, 0])["index"].tolist() == [2, 2, 2]
        assert [member[2]["a"].item() for member in members] == [0, 2, 4]


def test_rows_that_members_hold_back_or_reject_have_no_index() -> None:
    members = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(9), transform=rbtool.MultiStepTransform(n_steps=2, gamma=0.9)),
        TensorDictReplayBuffer(storage=LazyTensorStorage(1), writer=rbtool.TensorDictMaxValueWriter(rank_key="a")),
    ]
    buffer = ReplayBufferEnsemble(*members, routing_key="env")
    row = numbers(1, 5).set("env", torch.zeros(1, dtype=torch.int64))
    row["next"] = TensorDict({"reward": torch.ones(1, 1), "done": torch.zeros(1, 1, dtype=torch.bool)}, [1])
    row["next", "terminated"] = row["next", "done"]
    assert buffer.extend(row).shape == (0,)
    assert buffer.add(numbers(1, 5)[0].set("env", 1))["index"].tolist() == [0]
    assert buffer.add(numbers(1, 4)[0].set("env", 1)).shape == (0,)


@pytest.mark.parametrize(
    ("routing", "data", "error", "message"),
    [
        ({"routing_key": "env"}, numbers(2), KeyError, "no entry 'env'"),
        ({"routing_key": "env"}, numbers(2).set("env", torch.tensor([0, 3])), ValueError, "from 0 to 3, the members"),
        ({"routing_key": "env"}, numbers(2).set("env", torch.tensor([0, -1])), ValueError, "from -1 to 0"),
        ({"routing_key": "env"}, numbers(2).set("env", torch.zeros(2)), ValueError, r"torch.float32 \[2\]"),
        ({"routing_key": "env"}, numbers(2).set("env", torch.zeros(2, 2).long()), ValueError, r"\[2, 2\]"),
        ({"routing_key": "env"}, torch.arange(3), ValueError, "found a Tensor"),
        ({"routing_dim": 0}, numbers(2), ValueError, r"shape \[2\], expected 3 in dimension 0"),
        ({"routing_dim": 1}, numbers(3), ValueError, "in dimension 1"),
        ({}, numbers(3), RuntimeError, "cannot be written to"),
    ],
)
def test_data_that_cannot_be_routed_are_refused(
    routing: dict[str, Any], data: Any, error: type[Exception], message: str
) -> None:
    buffer = ReplayBufferEnsemble(*rings(0, 0, 0), **routing)
    with pytest.raises(error, match=message):
        buffer.extend(data)
    assert buffer.write_count == 0


def test_slices_of_routed_environments_hold_steps_of_one() -> None:
    members = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=StreamingSliceSampler(slice_len=3))
        for _ in range(2)
    ]
    buffer = ReplayBufferEnsemble(*members, routing_dim=0, p="sampleable", batch="exact", batch_size=6)
    step = TensorDict({"a": torch.tensor([0, 100]), "next": {"done": torch.zeros(2, 1, dtype=torch.bool)}}, [2])
    for number in range(6):
        assert buffer.can_sample() is (number > 2)
        buffer.add(step.clone().set("a", step["a"] + number))
    batch = torch.cat([buffer.sample()["a"] for _ in range(40)]).view(-1, 3)
    assert bool((batch.diff() == 1).all())
    assert {(0, 1, 2), (3, 4, 5), (100, 101, 102), (103, 104, 105)} <= set(map(tuple, batch.tolist()))


def test_an_ensemble_cannot_be_written_to_and_its_members_can() -> None:
    buffer = ReplayBufferEnsemble(*rings(5, 5))
    data = ring(0).sample(2).exclude("index")
    writes: list[tuple[type[Exception], Any]] = [
        (TypeError, lambda: buffer.add(data[0])),
        (TypeError, lambda: buffer.extend(data)),
        (TypeError, lambda: buffer.write_all(data)),
        (TypeError, lambda: buffer.__setitem__(0, data)),
        (TypeError, lambda: buffer.set_("a", 1)),
        (RuntimeError, lambda: buffer.writer.extend(data)),
        (RuntimeError, lambda: buffer.writer.add(data)),
        (RuntimeError, lambda: buffer.storage.set(0, data)),
        (RuntimeError, lambda: buffer.storage.extend(data)),
    ]
    for error, write in writes:
        with pytest.raises(error, match="cannot be written to"):
            write()
    with pytest.raises(TypeError):
        SamplerEnsemble(RandomSampler()).sample(ring(0, 2).storage, 2)
    buffer[1].extend(data)
    assert buffer.storage.sizes == [5, 7]
    assert buffer.write_count == 12


@pytest.mark.parametrize(("schema", "gone"), [("union", set()), ("intersect", {("a", "b")})])
def test_entries_with_one_name_in_dots_are_two_entries(schema: Any, gone: set[tuple[str, ...]]) -> None:
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(2)]
    members[0].extend(TensorDict({"a.b": torch.zeros(5), "a": {"b": torch.ones(5, dtype=torch.int64)}}, [5]))
    members[1].extend(TensorDict({"a.b": torch.zeros(5)}, [5]))
    made = ReplayBufferEnsemble(*members, sample_from_all=True, schema=schema)
    batch = made.sample(4)
    assert {("a.b",), ("a", "b")} - {(key,) if isinstance(key, str) else key for key in batch.keys(True, True)} == gone
    assert list(batch.get("schema_mask", TensorDict()).keys(True, True)) == ([] if gone else [("a", "b")])
    assert made.dropped_keys == tuple(".".join(key) for key in gone)


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


def prioritized(count: int) -> list[TensorDictPrioritizedReplayBuffer]:
    """So many rings of ten elements, from 1000 * i on."""
    members = []
    for number in range(count):
        one = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(10))
        one.extend(numbers(10, 1000 * number))
        members.append(one)
    return members


def test_priorities_go_to_the_members() -> None:
    buffer = ReplayBufferEnsemble(*prioritized(2), batch="exact")
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
    members = prioritized(3)
    inner = ReplayBufferEnsemble(*members[:2], batch="exact")
    outer = ReplayBufferEnsemble(inner, members[2], batch=batch, sample_from_all=True)
    for _ in range(5):
        sample = outer.sample(400)
        sample["td_error"] = (sample["a"] % 1000 == 5 + sample["a"] // 1000).float()
        outer.update_tensordict_priority(sample)
    assert set(outer.sample(400)["a"].flatten().tolist()) == {5, 1006, 2007}


def test_parts_make_an_ensemble_and_collate_functions_are_called() -> None:
    storages = [one.storage for one in rings(5, 5)]
    buffer = ReplayBufferEnsemble(
        storages=StorageEnsemble(*storages, transforms=[None, lambda rows: rows.set("a", rows["a"] + 1)]),
        samplers=SamplerEnsemble(RandomSampler(), RandomSampler(), sample_from_all=True),
        writers=WriterEnsemble(RoundRobinWriter(), RoundRobinWriter()),
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


# What an ensemble saves comes back ----------------------------------------------------------------


def make(filled: bool, **arguments: Any) -> ReplayBufferEnsemble:
    """An ensemble of a ring that has wrapped, one without replacement, a prioritised one, and an ensemble."""
    members: list[ReplayBuffer] = [
        TensorDictReplayBuffer(storage=LazyTensorStorage(10), transform=Normalize("a", scale=2.0)),
        TensorDictReplayBuffer(storage=LazyMemmapStorage(20), sampler=SamplerWithoutReplacement(), generator=seeded(9)),
        TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(15)),
    ]
    inner = [TensorDictReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
    if filled:
        for start, (count, buffer) in enumerate(zip((13, 7, 9, 4, 6), [*members, *inner], strict=True)):
            buffer.extend(numbers(count, 1000 * start))
    nested = ReplayBufferEnsemble(*inner, p=[1, 2], batch="exact")
    cast = TensorDictReplayBuffer(storage=LazyTensorStorage(3))
    if filled:
        cast.extend(numbers(3, 5000))
    for one in (members[1], members[2], nested, cast):
        one.append_transform(lambda batch: batch.set("a", batch["a"].float()))
    given = {"p": [1, 2, 3, 4, 1], "batch": "exact", "batch_size": 11, "generator": seeded()}
    given |= {"schema": "intersect"} | arguments  # one has weights of priorities
    return ReplayBufferEnsemble(*members, nested, cast, **given)


def drawn(buffer: ReplayBufferEnsemble) -> list[float]:
    return torch.cat([buffer.sample()["a"] for _ in range(12)]).tolist()


@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("way", ["state", "folder"])
def test_a_restored_ensemble_continues_with_the_same_batches(way: str, prefetch: int | None, tmp_path: Path) -> None:
    path, buffer = tmp_path / "saved", make(True, prefetch=prefetch)
    buffer.sample()
    buffer.p, buffer.temperature = [5, 4, 3, 2, 1], 2.0
    other = moved(buffer, make(False, generator=seeded(5), prefetch=prefetch), way, path)
    assert drawn(other) == drawn(buffer)
    assert torch.equal(other.p, buffer.p)
    assert other.temperature == 2.0
    again = moved(other, make(False, prefetch=prefetch), way, path)
    assert drawn(again) == drawn(other)
    for one in (buffer, other):
        one[0].extend(numbers(2))
    assert torch.equal(other[0].storage[:]["a"], buffer[0].storage[:]["a"])
    emptied = moved(make(False), make(True), way, path)
    assert emptied.storage.sizes == [0] * 5


def test_parts_of_an_ensemble_are_saved_by_themselves(tmp_path: Path) -> None:
    buffer, other = make(True), make(True, p=[1] * 5)
    buffer.dumps(tmp_path / "saved")
    assert {"0", "1", "2", "3", "4", "0_transform.pt"} <= {one.name for one in (tmp_path / "saved/storage").iterdir()}
    for name in ("sampler", "writer"):
        getattr(buffer, name).dumps(tmp_path / name)
        getattr(other, name).loads(tmp_path / name)
    assert torch.equal(other.p, buffer.p)
    assert [one.write_count for one in other.writer.members[:3]] == [13, 7, 9]


def test_a_full_ring_of_a_member_is_loaded_into_a_larger_one(tmp_path: Path) -> None:
    small, large = (
        ReplayBufferEnsemble(TensorDictReplayBuffer(storage=LazyTensorStorage(size)), batch_size=4) for size in (10, 20)
    )
    small[0].extend(numbers(13))
    moved(small, large, "folder", tmp_path / "saved")
    large[0].extend(numbers(1, 50))
    assert large[0][:]["a"].tolist() == [*range(3, 13), 50]


def test_a_checkpoint_of_another_set_of_members_is_refused_with_nothing_changed(tmp_path: Path) -> None:
    two = ReplayBufferEnsemble(*rings(5, 6), p=[1, 3], batch_size=4)
    two.dumps(tmp_path / "two")
    ring(0).dumps(tmp_path / "one")
    three = ReplayBufferEnsemble(*rings(7, 8, 9), batch_size=4)
    for load in (lambda: three.loads(tmp_path / "two"), lambda: three.load_state_dict(two.state_dict())):
        with pytest.raises(RuntimeError, match="2 members, this ensemble has 3"):
            load()
    with pytest.raises(ValueError, match="single buffer"):
        three.loads(tmp_path / "one")
    with pytest.raises(rbtool.FormatError, match="of an ensemble was found, expected one of a single buffer"):
        ring(0).loads(tmp_path / "two")
    with pytest.raises(RuntimeError):
        three.load_state_dict(ring(0).state_dict())
    assert three.storage.sizes == [7, 8, 9]
    assert three.p is None


def test_a_member_that_refuses_its_rows_is_named_and_all_stay_as_they_were(tmp_path: Path) -> None:
    two = ReplayBufferEnsemble(*rings(5, 6), batch_size=4, p=[1, 3])
    two.dumps(tmp_path / "two")
    state = copy.deepcopy(two.state_dict())
    lists = ReplayBufferEnsemble(ring(70, 3), ReplayBuffer(storage=ListStorage(4)), batch_size=4)
    lists[1].extend(["a", "b"])
    for load in (lambda: lists.loads(tmp_path / "two"), lambda: lists.load_state_dict(state)):
        with pytest.raises(rbtool.RbtoolError) as raised:
            load()
        assert "member 1 of the ensemble; nothing was loaded" in raised.value.hint
        assert lists.p is None
        assert lists[0][:]["a"].tolist() == [70, 71, 72]
        assert lists[1][:] == ["a", "b"]


def test_a_changed_byte_of_a_member_is_found_and_all_stay_as_they_were(tmp_path: Path) -> None:
    saved, other = make(True), make(True, generator=seeded(7))
    saved.dumps(tmp_path / "saved")
    flip(tmp_path / "saved" / "storage" / "4" / "segment-00000.memmap", 0)
    other.sample()
    other[0].extend(numbers(4, 90))
    unharmed = copy.deepcopy(other)
    with pytest.raises(rbtool.FormatError, match=r"changed|differ|digest") as raised:
        other.loads(tmp_path / "saved")
    assert "member 4 of the ensemble; nothing was loaded" in raised.value.hint
    require_alike(other, unharmed)


def require_alike(buffer: ReplayBufferEnsemble, other: ReplayBufferEnsemble) -> None:
    """Both have the same rows, and sample and write the same from now on."""
    assert drawn(buffer) == drawn(other)
    for each in (buffer, other):
        each[0].extend(numbers(2, 800))
    for one, same in zip(buffer.storage.leaves, other.storage.leaves, strict=True):
        assert torch.equal(one[:]["a"], same[:]["a"])
    assert buffer.write_count == other.write_count


@pytest.mark.parametrize("entry", ["_rng", "_prefetch_state", "_members"])
def test_a_dictionary_that_is_refused_at_its_end_leaves_all_as_they_were(entry: str) -> None:
    buffer, state = make(True, generator=seeded(7)), copy.deepcopy(make(True, p=[5, 4, 3, 2, 1]).state_dict())
    wrong: dict[str, Any] = {"_rng": ("x", "cpu"), "_prefetch_state": {"capacity": 0, "queue": ({"index": 1},)}}
    state[entry] = wrong.get(entry, [*state["_members"][:-1], {}])
    unharmed = copy.deepcopy(buffer)
    with pytest.raises(rbtool.RbtoolError):
        buffer.load_state_dict(state)
    assert torch.equal(buffer.p, unharmed.p)
    require_alike(buffer, unharmed)


def test_a_storage_ensemble_is_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    def storages(*sizes: int) -> StorageEnsemble:
        return StorageEnsemble(*(one.storage for one in rings(*sizes)))

    storage = storages(5, 0, 7)
    for way in ("state", "folder"):
        other = moved(storage, storages(0, 3, 0), way, tmp_path / "saved")
        assert other.sizes == [5, 0, 7]
        assert torch.equal(other[2][:]["a"], storage[2][:]["a"])
    other = storages(3, 0, 2)
    before = [other[member][:]["a"].clone() for member in (0, 2)]
    flip(tmp_path / "saved" / "2" / "segment-00000.memmap", 0)
    state = storage.state_dict() | {"2": ListStorage(3).state_dict()}
    for load in (lambda: other.loads(tmp_path / "saved"), lambda: other.load_state_dict(state)):
        with pytest.raises((rbtool.RbtoolError, KeyError)):
            load()
        assert other.sizes == [3, 0, 2]
        assert [other[member][:]["a"].tolist() for member in (0, 2)] == [rows.tolist() for rows in before]


def test_a_dataset_in_an_ensemble_is_saved_and_never_emptied(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(4, "open"), (6, "terminated")])
    dataset = rbtool.load_dataset(tmp_path / "walks", seed=0)
    live = TensorDictReplayBuffer(storage=LazyTensorStorage(30))
    live.extend(dataset[:3])
    buffer = ReplayBufferEnsemble(dataset, live, batch="exact", batch_size=6)
    buffer.dumps(tmp_path / "saved")
    fresh = rbtool.load_dataset(tmp_path / "walks", seed=1), TensorDictReplayBuffer(storage=LazyTensorStorage(30))
    other = ReplayBufferEnsemble(*fresh, batch="exact")
    other.loads(tmp_path / "saved")
    assert other.storage.sizes == [10, 3]
    assert torch.equal(other.sample(6)["index", "index"][:3], buffer.sample(6)["index", "index"][:3])
    with pytest.raises(RuntimeError, match="member 0"):
        buffer.empty()
    assert buffer.storage.sizes == [10, 3]
    with pytest.raises(ValueError, match="inside the dataset"):
        buffer.dumps(tmp_path / "walks" / "inside")


def test_emptying_and_exchanging_parts_of_members() -> None:
    buffer = ReplayBufferEnsemble(*rings(5, 6), batch="exact")
    buffer[1].set_storage(ring(1000, 9).storage)
    assert buffer.storage.sizes == [5, 9]
    assert buffer.sample(300)["index", "index"].max() == 8
    with pytest.raises(TypeError):
        buffer.set_sampler(SamplerWithoutReplacement())
    with pytest.raises(NotImplementedError):
        buffer.set_storage(buffer.storage)
    buffer.empty()
    assert buffer.storage.sizes == [0, 0]
    assert buffer.stats()["size"] == 0


@pytest.mark.parametrize("member", [0, 1, 2])
def test_a_fault_in_a_member_leaves_the_older_checkpoint(
    member: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = ReplayBufferEnsemble(*rings(5, 6, 7), batch_size=6, p=[1, 2, 3], generator=seeded())
    buffer.dumps(tmp_path / "saved")
    expected = buffer.sample()["a"]
    buffer[member].extend(numbers(3, 50))
    with monkeypatch.context() as patched:
        patched.setattr(type(buffer[member].storage), "dumps", _failing(buffer[member].storage))
        with pytest.raises(OSError, match="disk is full"):
            buffer.dumps(tmp_path / "saved")
    assert {one.name for one in tmp_path.iterdir()} == {"saved"}
    other = ReplayBufferEnsemble(*rings(0, 0, 0), batch_size=6, generator=seeded(5))
    other.loads(tmp_path / "saved")
    assert other.storage.sizes == [5, 6, 7]
    assert torch.equal(other.sample()["a"], expected)


def _failing(chosen: Any) -> Any:
    """Return a `dumps` that writes a part and fails for one storage."""
    whole = type(chosen).dumps

    def dumps(storage: Any, path: Any) -> None:
        whole(storage, path)
        if storage is chosen:
            raise OSError("the disk is full")

    return dumps


def test_states_of_samplers_are_loaded_all_or_none() -> None:
    buffer, other = (ReplayBufferEnsemble(*rings(9, 9), batch_size=4, sample_from_all=True) for _ in range(2))
    for each in (buffer, other):
        for member in (0, 1):
            each[member].set_sampler(SamplerWithoutReplacement())
        each.sample()
    state = other.sampler.state_dict() | {"1": {"unknown": 1}}
    before = [member.state_dict()["_sample_list"].tolist() for member in buffer.sampler.members]
    with pytest.raises(rbtool.SchemaError):
        buffer.sampler.load_state_dict(state)
    assert [member.state_dict()["_sample_list"].tolist() for member in buffer.sampler.members] == before


def test_hooks_are_refused_when_they_are_registered_and_members_take_them(tmp_path: Path) -> None:
    buffer = ReplayBufferEnsemble(*rings(5, 6), batch_size=4)
    for register in (buffer.register_save_hook, buffer.register_load_hook, buffer.storage.register_save_hook):
        with pytest.raises(ValueError, match="hooks") as raised:
            register(lambda data, **_: data)
        assert "members" in raised.value.hint  # type: ignore[attr-defined]
    paths: list[Path] = []
    buffer[1].register_save_hook(lambda data, path: paths.append(path) or data)
    buffer.dumps(tmp_path / "saved")
    assert len(paths) == 1


def test_threads_that_join_at_once_see_members_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that appears in both members: one thread compares them while the other one goes on."""
    joiner = ensemble.Joiner("error", stack=False)
    before = [(member, TensorDict({"a": torch.zeros(2)}, [2])) for member in (0, 1)]
    after = [(member, TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}, [2])) for member in (0, 1)]
    joiner.join(before)
    compared, other_is_done, calls = ensemble._compared, threading.Event(), []

    def slow(*arguments: Any) -> Any:
        found = compared(*arguments)
        calls.append(found)
        if len(calls) == 1:
            other_is_done.wait(1)  # without a lock the other thread ends meanwhile, with one it waits for this one
        return found

    monkeypatch.setattr(ensemble, "_compared", slow)

    def join_too() -> None:
        joiner.join(after)
        other_is_done.set()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(joiner.join, after), pool.submit(join_too)]
    assert [future.exception() for future in joining] == [None, None]
    assert calls
