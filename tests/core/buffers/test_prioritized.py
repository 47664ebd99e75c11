"""Buffers that sample by priority: how priorities get in and count, what is saved, and other processes that write."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from processes import ChildError, in_a_child
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    WorkerSampler,
)
from rbtool.core.errors import RbtoolError
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.uniform import RandomSampler
from rbtool.core.storages.base import Storage
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.buffers import (
    EXPONENTS,
    draw_many,
    drawn_weights,
    expected,
    moved,
    of_steps,
    plain,
    steps,
    weighted,
)
from rbtool.core.writers.max_value import TensorDictMaxValueWriter
from rbtool.core.writers.round_robin import RoundRobinWriter

KINDS = [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer]


# Making one ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_has_the_size_of_the_storage_and_the_exponents(kind: Any) -> None:
    buffer = kind(alpha=0.7, beta=0.4, eps=1e-4, storage=LazyTensorStorage(12))
    sampler = buffer.sampler
    assert isinstance(sampler, PrioritizedSampler)
    assert (sampler.max_capacity, sampler.alpha, sampler.beta, sampler.eps) == (12, 0.7, 0.4, 1e-4)
    assert isinstance(buffer, TensorDictReplayBuffer) is (kind is TensorDictPrioritizedReplayBuffer)


def test_the_default_storage_is_a_list_of_a_thousand() -> None:
    buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.4)
    assert isinstance(buffer.storage, ListStorage)
    assert buffer.sampler.max_capacity == 1000
    assert buffer.extend(["a", "b"]).tolist() == [0, 1]
    buffer.update_priority(0, 0)
    assert set(buffer.sample(20)) == {"b"}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_made_when_they_are_needed(kind: Any) -> None:
    for late in ({"delayed_init": True}, {"transform_factory": lambda: lambda rows: rows}):
        buffer = kind(**EXPONENTS, storage=lambda: LazyTensorStorage(5), **late)
        assert not buffer.initialized
        buffer.extend(steps(3))
        assert (buffer.sampler.max_capacity, len(buffer.sample(2))) == (5, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_negative_exponents_are_refused_at_once(kind: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        kind(**EXPONENTS | {name: -0.1}, storage=LazyTensorStorage(3), delayed_init=True)


def test_a_given_sampler_excludes_arguments_of_the_default_one() -> None:
    sampler = PrioritizedSampler(10, alpha=0.3, beta=0.2)
    for kind in KINDS:
        assert kind(**EXPONENTS, storage=LazyTensorStorage(10), sampler=sampler).sampler is sampler
        with pytest.raises(TypeError, match="sampler_device") as refused:
            kind(**EXPONENTS, storage=LazyTensorStorage(10), sampler=sampler, sampler_device="cpu")
        assert isinstance(refused.value, RbtoolError)
    assert isinstance(plain(sampler=RandomSampler).sampler, RandomSampler)
    buffer = plain(sampler_device="cpu")
    buffer.extend(torch.arange(4))
    assert buffer.sample(return_info=True)[1]["priority_weight"].device.type == "cpu"


def test_priorities_grow_with_a_list_without_bounds(tmp_path: Path) -> None:
    buffer, other = plain(storage=ListStorage()), plain(storage=ListStorage())
    for first in range(0, 30, 3):
        index = buffer.extend([torch.tensor(row) for row in range(first, first + 3)])
        buffer.update_priority(index, torch.tensor([1.0, 2.0, 3.0]))
    assert drawn_weights(buffer) == expected(*[1, 2, 3] * 10)
    other.extend([torch.tensor(0)])
    assert drawn_weights(moved(buffer, other, "folder", tmp_path / "saved")) == expected(*[1, 2, 3] * 10)


# What already exists -------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_elements_of_another_storage_have_the_default_priority(sync: bool) -> None:
    buffer = plain(storage=TensorStorage(torch.arange(6)), sync=sync)
    assert drawn_weights(buffer) == expected(*[1] * 6)
    assert set(draw_many(buffer)[0].tolist()) == set(range(6))
    buffer.update_priority(torch.arange(6), torch.arange(6.0))
    buffer.set_storage(TensorStorage(torch.arange(8)))
    assert drawn_weights(buffer) == expected(*[1] * 8)
    buffer.update_priority(7, 3.0)
    assert drawn_weights(buffer) == expected(1, 1, 1, 1, 1, 1, 1, 3)
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    buffer.extend(torch.arange(2))
    assert drawn_weights(buffer) == expected(1, 1)
    other = ReplayBuffer(storage=TensorStorage(torch.arange(5)))
    other.set_sampler(PrioritizedSampler(5, **EXPONENTS))
    assert drawn_weights(other) == expected(1, 1, 1, 1, 1)


def test_two_buffers_of_one_storage_have_their_own_priorities() -> None:
    storage = LazyTensorStorage(10)
    one, other = plain(storage=storage), plain(storage=storage)
    one.extend(torch.arange(4))
    one.update_priority(0, 0.0)
    assert drawn_weights(one) == expected(0, 1, 1, 1)
    assert drawn_weights(other) == expected(1, 1, 1, 1)


# Priorities of what is written -----------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_new_elements_get_the_highest_priority_so_far(sync: bool) -> None:
    buffer = weighted(0.5, 3.0, 1.0, size=4, sync=sync)
    buffer.add(torch.tensor(3))
    assert drawn_weights(buffer) == expected(0.5, 3, 1, 3)
    buffer.extend(torch.arange(1))
    assert drawn_weights(buffer) == expected(3, 3, 1, 3)
    buffer.extend(torch.arange(7))
    assert drawn_weights(buffer) == expected(3, 3, 3, 3)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize(
    ("index", "marked"),
    [(1, {1}), (-1, {4}), (slice(1, 3), {1, 2}), ([0, -2], {0, 3}), (np.array([2]), {2}), (range(2), {0, 1}),
     (torch.tensor([True, False, False, True, False]), {0, 3}), (slice(None), {0, 1, 2, 3, 4}), ((slice(2),), {0, 1})],
)  # fmt: skip
def test_replaced_elements_get_the_highest_priority_so_far(index: Any, marked: set[int], sync: bool) -> None:
    buffer = weighted(1.0, 1.0, 1.0, 1.0, 1.0, sync=sync)
    buffer.update_priority(0, 4.0)
    buffer.update_priority(0, 1.0)
    buffer[index] = buffer[index]
    assert drawn_weights(buffer) == expected(*[4 if row in marked else 1 for row in range(5)])
    buffer.update_priority(torch.arange(5), 1.0)
    buffer.mark_update(index)
    assert drawn_weights(buffer) == expected(*[4 if row in marked else 1 for row in range(5)])


def test_priorities_come_with_the_data() -> None:
    buffer = of_steps()
    buffer.extend(steps(3, td_error=torch.tensor([0.5, 2.0, 1.0])))
    assert drawn_weights(buffer) == expected(0.5, 2, 1)
    buffer.extend(steps(2, td_error=torch.tensor([4.0, 4.0])), update_priority=False)
    assert drawn_weights(buffer) == expected(0.5, 2, 1, 2, 2)
    buffer.add(TensorDict({"a": torch.tensor(5), "td_error": torch.tensor(7.0)}))
    assert drawn_weights(buffer) == expected(0.5, 2, 1, 2, 2, 7)
    buffer.extend(steps(2, td_error=torch.zeros(2)), update_priority=True)
    assert drawn_weights(buffer)[6:] == [0, 0]


@pytest.mark.parametrize(
    ("reduction", "priority"), [("max", 5.0), ("min", 0.0), ("mean", 2.0), ("median", 1.0), ("sum", 6.0)]
)
def test_several_priorities_of_an_element_are_reduced(reduction: str, priority: float) -> None:
    buffer = of_steps(priority_key=("loss", "td"), reduction=reduction)
    several = torch.tensor([[0.0, 1.0, 5.0], [1.0, 1.0, 1.0]])
    buffer.extend(steps(2, loss=TensorDict({"td": several}, [2])))
    one = 3.0 if reduction == "sum" else 1.0
    assert drawn_weights(buffer) == expected(priority, one)
    buffer.update_tensordict_priority(draw_many(buffer)[0])
    assert drawn_weights(buffer) == expected(priority, one)
    for dtype in (torch.float16, torch.float64, torch.int64, torch.uint8):
        buffer = of_steps(reduction=reduction)
        buffer.extend(steps(2, td_error=several.to(dtype)))
        assert drawn_weights(buffer) == expected(priority, one)
    with pytest.raises(NotImplementedError, match="mode"):
        of_steps(reduction="mode")


def test_elements_that_are_ranked_out_get_no_priority() -> None:
    buffer = of_steps(3, writer=TensorDictMaxValueWriter(rank_key="a"))
    buffer.extend(steps(3, td_error=torch.tensor([1.0, 2.0, 3.0])))
    late = TensorDict({"a": torch.tensor([-5, 9]), "td_error": torch.tensor([100.0, 4.0])}, [2])
    assert buffer.extend(late).tolist() == [-1, 0]
    assert buffer.add(TensorDict({"a": torch.tensor(-7), "td_error": torch.tensor(50.0)})) is None
    assert drawn_weights(buffer) == expected(4, 2, 3)


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("inf")])
def test_bad_priorities_change_nothing_but_the_rows(bad: float) -> None:
    buffer = of_steps()
    buffer.extend(steps(3, td_error=torch.tensor([0.5, 2.0, 1.0])))
    with pytest.raises(RuntimeError, match="td_error") as failed:
        buffer.extend(steps(2, td_error=torch.tensor([1.0, bad])))
    assert "update_priority=False" in failed.value.hint  # type: ignore[attr-defined]
    assert drawn_weights(buffer) == expected(0.5, 2, 1, 2, 2)
    batch = buffer.sample()
    before = drawn_weights(buffer)
    with pytest.raises(ValueError, match="priorit"):
        buffer.update_tensordict_priority(batch.set("td_error", torch.full((4,), bad)))
    with pytest.raises(ValueError, match="priorit"):
        buffer.update_priority(1, bad)
    assert drawn_weights(buffer) == before


# Storages of several dimensions ----------------------------------------------------------------------


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("dim_extend", [0, 1])
def test_elements_of_two_dimensions_have_priorities(storage: type[Storage], dim_extend: int) -> None:
    buffer = of_steps(storage=storage(10, ndim=2), dim_extend=dim_extend)
    numbers = torch.arange(1.0, 13).reshape(3, 4)
    numbers = numbers if dim_extend else numbers.T
    index = buffer.extend(TensorDict({"a": numbers, "td_error": numbers}, numbers.shape))
    held = buffer.storage.get(slice(None))["a"].clone()
    assert (buffer.storage.max_size, len(index)) == (12, 12)
    assert drawn_weights(buffer) == expected(*held.flatten().tolist())
    batch = draw_many(buffer)[0]
    buffer.update_tensordict_priority(batch.set("td_error", 20 - batch["a"]))
    assert drawn_weights(buffer) == expected(*(20 - held).flatten().tolist())
    buffer[:, 2] = buffer[:][:, 2]
    priorities = 20 - held
    (priorities.T if dim_extend else priorities)[:, 2] = 19
    assert drawn_weights(buffer) == expected(*priorities.flatten().tolist())


def test_elements_of_two_dimensions_are_named_by_coordinates() -> None:
    buffer = plain(storage=LazyTensorStorage(10, ndim=2))
    index = buffer.extend(torch.arange(12).reshape(3, 4))
    buffer.update_priority(index, torch.arange(1.0, 13))
    assert drawn_weights(buffer) == expected(*range(1, 13))
    buffer.update_priority(tuple(index.unbind(-1)), 3.0)
    assert drawn_weights(buffer) == expected(*[1] * 12)
    buffer.update_priority(torch.tensor([[3, 2]]), 9.0)
    assert drawn_weights(buffer) == expected(*[3] * 11, 9)
    added = buffer.add(torch.arange(3))
    assert added.tolist() == [[0, 0], [0, 1], [0, 2]]
    assert drawn_weights(buffer) == expected(12, 12, 12, *[3] * 8, 9)


def test_padded_steps_of_slices_have_no_priority() -> None:
    buffer = of_steps()
    buffer.extend(steps(6))
    mask = torch.tensor([[True, True, True], [True, True, False]])
    batch = TensorDict({"index": torch.tensor([[0, 1, 2], [4, 5, 5]])}, [2, 3])
    batch["td_error"] = torch.tensor([[[0.5], [2.0], [3.0]], [[4.0], [5.0], [99.0]]])
    buffer.update_tensordict_priority(batch.set(("collector", "mask"), mask))
    assert drawn_weights(buffer) == expected(0.5, 2, 3, 1, 4, 5)


@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_padded_trajectories_have_one_priority_of_all_their_steps(reduction: str) -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    buffer = of_steps(storage=TensorStorage(TensorDict({"mask": mask}, [2, 3])), reduction=reduction, batch_size=40)
    batch = buffer.sample()
    assert batch["index"].shape == batch["priority_weight"].shape == (40, 3)
    errors = torch.tensor([[[1.0], [6.0], [2.0]], [[3.0], [70.0], [80.0]]])
    buffer.update_tensordict_priority(batch.set("td_error", errors[batch["index"][:, 0]]))
    assert drawn_weights(buffer) == expected(6 if reduction == "max" else 3, 3)
    buffer.update_tensordict_priority(batch.exclude("mask"))
    assert drawn_weights(buffer) == expected(*((6, 80) if reduction == "max" else (3, 51)))


# What users hand over -----------------------------------------------------------------------------


@each(
    "given",
    [
        lambda error: error, lambda error: error.unsqueeze(-1), lambda error: error.numpy(force=True),
        lambda error: error.tolist(), lambda error: error.double().requires_grad_() * 1,
        lambda error: error[:, None].numpy(force=True), lambda error: error.half(),
        lambda error: [one.requires_grad_() for one in error], lambda error: error.numpy()[::-1].copy()[::-1],
    ],
)  # fmt: skip
@each("as_index", [lambda index: index, lambda index: index.numpy(), lambda index: index.tolist()])
def test_priorities_and_indices_may_be_arrays_or_lists(
    given: Callable[[Any], Any], as_index: Callable[[Any], Any]
) -> None:
    buffer = plain()
    buffer.extend(torch.arange(4))
    _, info = draw_many(buffer, 50)
    buffer.update_priority(as_index(info["index"]), given(1 + info["index"].float()))
    assert drawn_weights(buffer) == expected(1, 2, 3, 4)


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
def test_one_priority_is_for_all_elements_or_for_each(shape: tuple[int, ...]) -> None:
    buffer = plain()
    index = buffer.extend(torch.arange(4))
    buffer.update_priority(index, torch.full(shape, 2.0))
    assert drawn_weights(buffer) == expected(1, 1, 1, 1)
    for other in ((4, 2), (3,)):
        with pytest.raises(RuntimeError, match="4"):
            buffer.update_priority(index, torch.ones(other))


def test_elements_and_priorities_that_are_no_numbers_are_refused() -> None:
    buffer = weighted(1.0, 1.0, 1.0, 1.0)
    for index in (slice(2), ..., None, "a", TensorDict({"index": torch.arange(2)}, [2])):
        with pytest.raises(TypeError, match=r"numbers.*found a"):
            buffer.update_priority(index, 1.0)
    for priority in (None, "high", [1.0, None, "x"], {"td_error": 1.0}):
        with pytest.raises(TypeError, match="priorities are numbers") as refused:
            buffer.update_priority([0, 1, 2], priority)
        assert isinstance(refused.value, RbtoolError)


@pytest.mark.parametrize("storage", [LazyStackStorage, ListStorage, CompressedListStorage, LazyTensorStorage])
def test_entries_that_users_add_to_batches_do_not_reach_the_elements(storage: Any) -> None:
    """Also where a batch is a stack of the very elements that are stored, and of one of them twice."""
    buffer = of_steps(storage=storage(2), batch_size=8)
    buffer.extend(steps(2))
    torch.manual_seed(0)
    batch = buffer.sample()
    batch["td_error"] = torch.arange(1.0, 9)
    assert batch["td_error"].tolist() == list(range(1, 9))
    buffer.update_tensordict_priority(batch)
    last = {int(row): position + 1.0 for position, row in enumerate(batch["index"])}
    assert drawn_weights(buffer) == expected(last[0], last[1])
    assert set(buffer[0].keys()) == {"a", "index"}
    buffer.sample()["a"] = torch.full((8,), -1)
    assert buffer[:]["a"].tolist() == [0, 1]


def test_priorities_of_a_batch_may_be_of_any_shape_and_type() -> None:
    buffer = of_steps()
    buffer.extend(steps(4))
    for error in (torch.ones(4, 1), np.ones(4, np.float32), torch.ones(4, requires_grad=True) * 2):
        batch = buffer.sample()
        batch["td_error"] = error
        buffer.update_tensordict_priority(batch)
    with pytest.raises(RuntimeError, match="td_error"):
        buffer.update_tensordict_priority(buffer.sample().set_non_tensor("td_error", "high"))
    with pytest.raises(RuntimeError, match="td_error"):
        buffer.extend(steps(4, td_error=torch.zeros(4, 0)))
    with pytest.raises(ValueError, match="expected a tensordict"):
        buffer.update_tensordict_priority({"index": torch.arange(4), "td_error": torch.ones(4)})
    buffer.update_tensordict_priority(buffer.sample()[:0])


@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("sync", [True, False])
def test_a_network_learns_from_samples_by_priority(prefetch: int | None, sync: bool) -> None:
    torch.manual_seed(3)
    net = torch.nn.Linear(2, 1)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    buffer = of_steps(64, batch_size=16, prefetch=prefetch, sync=sync)
    losses = []
    for step in range(60):
        seen = torch.randn(2, 2)
        buffer.extend(TensorDict({"seen": seen, "target": seen.sum(-1, keepdim=True)}, [2]))
        batch = buffer.sample()
        error = net(batch["seen"]) - batch["target"]
        loss = (batch["priority_weight"] * error.squeeze(-1) ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        batch["td_error"] = error.abs()
        buffer.update_tensordict_priority(batch)
        buffer.sampler.beta = min(1.0, 0.4 + step / 100)
        losses.append(loss.item())
    assert sum(losses[-10:]) < sum(losses[:10]) / 5
    assert (len(buffer), buffer.write_count) == (64, 120)


@pytest.mark.parametrize("cut", [lambda batch: batch[0], lambda batch: batch.reshape(2, 2), lambda batch: batch[1:3]])
def test_priorities_of_a_part_of_a_batch_are_updated(cut: Callable[[Any], Any]) -> None:
    buffer = of_steps()
    buffer.extend(steps(4))
    batch = cut(buffer.sample())
    batch["td_error"] = batch["index"] + 2.0
    buffer.update_tensordict_priority(batch)
    updated = set(batch["index"].flatten().tolist())
    assert drawn_weights(buffer) == expected(*[row + 2 if row in updated else 1 for row in range(4)])


# Saved and loaded ---------------------------------------------------------------------------------


WRITTEN = Path(__file__).parents[2] / "data/torchrl_checkpoints"
STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage, CompressedListStorage]


def made(storage: Any, seed: int = 0, **more: Any) -> TensorDictPrioritizedReplayBuffer:
    generator = torch.Generator().manual_seed(seed)
    return TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=storage, batch_size=5, generator=generator, **more
    )


def numbered_steps(first: int, count: int) -> TensorDict:
    rows = torch.arange(first, first + count)
    return TensorDict({"a": rows, "td_error": (rows * 7 % 11).double()}, [count])


def require_same_draws(one: Any, other: Any, count: int = 20) -> None:
    assert all(torch.equal(one.sample()["index"], other.sample()["index"]) for _ in range(count))


def used(buffer: TensorDictPrioritizedReplayBuffer) -> TensorDictPrioritizedReplayBuffer:
    """Write more than there is room for, and learn from some of it."""
    for first in range(0, 26, 4):
        buffer.extend(numbered_steps(first, 4))
        batch = buffer.sample()
        buffer.update_tensordict_priority(batch.set("td_error", 1 / (1.0 + batch["a"])))
    return buffer


@pytest.mark.parametrize("way", ["folder", "state"])
@pytest.mark.parametrize("storage", STORAGES)
def test_the_next_thousand_draws_are_the_same(storage: Any, way: str, tmp_path: Path) -> None:
    prefetch = (None, 3)[(STORAGES.index(storage) + (way == "state")) % 2]
    one, other = used(made(storage(20), prefetch=prefetch)), made(storage(20), seed=5, prefetch=prefetch)
    other.extend(numbered_steps(0, 9))
    moved(one, other, way, tmp_path / "saved")
    for turn in range(200):
        batch, again = one.sample(), other.sample()
        assert torch.equal(batch["index"], again["index"])
        assert torch.equal(batch["priority_weight"], again["priority_weight"])
        if turn % 10 == 0:
            for buffer in (one, other):
                buffer.extend(numbered_steps(turn, 3))
                buffer.update_priority(batch["index"], batch["index"] % 5 + 0.5)


def test_a_buffer_with_a_prioritized_sampler_loads_into_a_prioritized_buffer(tmp_path: Path) -> None:
    sampler = PrioritizedSampler(20, alpha=0.7, beta=0.5)
    one = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=5)
    one.extend(numbered_steps(0, 12))
    other = moved(one, made(LazyMemmapStorage(20)), "folder", tmp_path / "saved")
    for buffer in (one, other):
        buffer.set_rng(torch.Generator().manual_seed(2))
    require_same_draws(one, other)


def test_an_empty_buffer_is_saved_and_loaded(tmp_path: Path) -> None:
    one, other = made(LazyTensorStorage(20)), made(LazyTensorStorage(20))
    other.extend(numbered_steps(0, 3))
    moved(one, other, "folder", tmp_path / "saved")
    with pytest.raises(RuntimeError, match="empty"):
        other.sample()
    other.extend(numbered_steps(0, 2))
    assert set(other.sample()["index"].tolist()) <= {0, 1}


def test_rows_of_a_uniform_buffer_get_the_default_priority(tmp_path: Path) -> None:
    one = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=5)
    one.extend(numbered_steps(0, 12))
    batch = moved(one, used(made(LazyTensorStorage(20))), "folder", tmp_path / "saved").sample()
    assert batch["priority_weight"].tolist() == [1.0] * 5
    assert torch.equal(batch["a"], batch["index"])


@pytest.mark.parametrize(
    ("size", "cut", "error"),
    [
        (10, None, RuntimeError),
        (30, None, RuntimeError),
        (20, "sumtree.memmap", RbtoolError),
        (20, "sampler_metadata.json", RbtoolError),
    ],
)
def test_a_folder_that_does_not_fit_or_is_damaged_changes_nothing(
    size: int, cut: str | None, error: type[Exception], tmp_path: Path
) -> None:
    used(made(LazyTensorStorage(20))).dumps(tmp_path / "saved")
    if cut is not None:
        file = tmp_path / "saved/sampler" / cut
        file.write_bytes(file.read_bytes()[:-5])
    one, other = used(made(LazyTensorStorage(size), seed=1)), used(made(LazyTensorStorage(size), seed=1))
    with pytest.raises(error, match=cut or "20") as refused:
        other.loads(tmp_path / "saved")
    assert isinstance(refused.value, RbtoolError)
    require_same_draws(one, other)


# TorchRL's -------------------------------------------------------------------------------------------

CASES = ["sampler_prioritized_float32", "sampler_prioritized_max_within_buffer"]


def loaded(case: str, kind: type[ReplayBuffer] = TensorDictPrioritizedReplayBuffer) -> Any:
    facts = json.loads((WRITTEN / case / "case.json").read_text())["sampler"]
    exponents = {name: facts[name] for name in ("alpha", "beta", "eps")}
    within = case.endswith("within_buffer")
    more: Any = {"sampler": PrioritizedSampler(16, **exponents, max_priority_within_buffer=True)} if within else {}
    buffer = kind(**exponents, storage=LazyMemmapStorage(16), generator=torch.Generator().manual_seed(0), **more)
    buffer.loads(WRITTEN / case / "checkpoint")
    return buffer


@pytest.mark.parametrize("kind", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_torchrl_is_drawn_by_its_weights(case: str, kind: Any) -> None:
    buffer, expected = loaded(case, kind), np.load(WRITTEN / case / "expected_sampler.npz")
    drawn, info = buffer.sampler.sample(buffer.storage, 200_000)
    index, found = drawn.numpy(), info["priority_weight"].numpy()
    weights = expected["weights"][: len(buffer)]
    shares = np.bincount(index, minlength=len(buffer)) / len(index)
    assert shares == pytest.approx(weights / expected["weight_sum"], abs=0.004)
    np.testing.assert_allclose(found, expected["importance_weights"][index], rtol=1e-5)
    with np.load(WRITTEN / case / "expected.npz") as rows:
        assert np.array_equal(buffer[:]["observation"].numpy(), rows["observation"])
    assert buffer.sampler.default_priority == 7.25
    buffer.add(buffer[0].clone())
    row = (buffer.writer._cursor - 1) % 16
    buffer.update_priority(torch.arange(len(buffer)), 0.0)
    buffer.update_priority(row, 1.0)
    index = buffer.sample(50, return_info=True)[1]["index"]
    assert set(index.tolist()) == {row}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_torchrl_is_saved_as_it_was(case: str, tmp_path: Path) -> None:
    buffer = loaded(case)
    buffer.dumps(tmp_path / "saved")
    theirs, ours = WRITTEN / case / "checkpoint/sampler", tmp_path / "saved/sampler"
    assert {entry.name for entry in theirs.iterdir()} <= {entry.name for entry in ours.iterdir()}
    for name in ("sumtree.memmap", "mintree.memmap"):
        assert np.allclose(np.fromfile(ours / name), np.fromfile(theirs / name), rtol=1e-7, atol=0)
    facts, expected = (json.loads((folder / "sampler_metadata.json").read_text()) for folder in (ours, theirs))
    assert {name: facts[name] for name in expected} == expected


def test_a_folder_without_the_files_that_torchrl_lacks_is_loaded(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / CASES[0] / "checkpoint", tmp_path / "copy")
    one = loaded(CASES[0])
    one.dumps(tmp_path / "saved")
    for entry in (tmp_path / "saved/sampler").iterdir():
        if not (tmp_path / "copy/sampler" / entry.name).exists():
            entry.unlink()
    other = loaded(CASES[0])
    other.loads(tmp_path / "saved")
    assert all(torch.equal(one.sample(5)["index"], other.sample(5)["index"]) for _ in range(50))


# sync=False: other processes write, one keeps the priorities and catches up ---------------------------


def unsynced(kind: type = PrioritizedReplayBuffer, size: int = 10, **more: Any) -> Any:
    arguments = {"storage": LazyMemmapStorage(size), "batch_size": 4, "shared": True, "sync": False}
    return kind(**EXPONENTS | arguments | more)


def learner(*priorities: float, **more: Any) -> Any:
    """An unsynced buffer with as many elements, of these priorities."""
    buffer = unsynced(**more)
    buffer.update_priority(buffer.extend(torch.arange(len(priorities))), torch.tensor(priorities, dtype=torch.float32))
    return buffer


def priorities(buffer: Any) -> list[float]:
    """The priorities of all elements, with the highest one 1."""
    found = drawn_weights(buffer)
    return [round(weight / max(found), 4) for weight in found]


def write(buffer: Any, count: int) -> list[int]:
    index: list[int] = buffer.extend(torch.arange(count)).tolist()
    return index


def sample(buffer: Any) -> int:
    return len(buffer.sample())


def update(buffer: Any) -> None:
    buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_learner_catches_up_with_other_processes(method: str) -> None:
    buffer = learner(0.5, 2.0, 1.0)
    assert in_a_child(write, buffer, 4, method=method) == [3, 4, 5, 6]
    assert priorities(buffer) == [0.25, 1, 0.5, 1, 1, 1, 1]
    buffer.update_priority(torch.arange(7), torch.full((7,), 0.5))
    assert in_a_child(write, buffer, 5, method=method) == [7, 8, 9, 0, 1]
    assert priorities(buffer) == [1, 1, 0.25, 0.25, 0.25, 0.25, 0.25, 1, 1, 1]
    in_a_child(write, buffer, 10, method=method)
    assert priorities(buffer) == [1] * 10


@pytest.mark.slow
def test_a_spawned_child_writes_and_does_not_sample() -> None:
    buffer = unsynced()
    buffer.extend(torch.arange(3))
    for act in (sample, update):
        with pytest.raises(ChildError, match="only the process that created this buffer has its priorities"):
            in_a_child(act, buffer, method="spawn")
    assert sample(buffer) == 4


def test_the_sampler_of_a_spawned_child_only_hears_of_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = unsynced().sampler
    assert isinstance(sampler, PrioritizedSampler)
    assert "Learner" in repr(sampler)
    monkeypatch.setattr("rbtool.core.buffers.tensordict.get_spawning_popen", lambda: object())
    other = pickle.loads(pickle.dumps(sampler))
    assert isinstance(other, WorkerSampler)
    with pytest.raises(RuntimeError, match="that created this buffer"):
        other.sample(TensorStorage(torch.zeros(1)), 1)


@pytest.mark.slow
def test_with_sync_a_prioritised_sampler_is_not_shared() -> None:
    buffer = unsynced(sync=True)
    buffer.extend(torch.arange(3))
    with pytest.raises(RuntimeError, match="cannot go to another process") as refused:
        in_a_child(write, buffer, 1, method="spawn")
    assert "sync=False" in refused.value.hint  # type: ignore[attr-defined]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_a_copy_keeps_the_priorities_and_catches_up_on_its_own(copied: Callable[[Any], Any]) -> None:
    buffer = learner(1.0, 2.0, 4.0, storage=LazyTensorStorage(10), shared=False)
    other = copied(buffer)
    other.extend(torch.arange(2))
    assert priorities(other) == [0.25, 0.5, 1, 1, 1]
    assert priorities(buffer) == [0.25, 0.5, 1]


def test_a_priority_is_not_taken_back_by_catching_up() -> None:
    buffer = learner(0.25, 0.5, 1.0)
    assert priorities(buffer) == [0.25, 0.5, 1]
    buffer.extend(torch.arange(2))
    buffer.update_priority(3, 0.5)
    assert priorities(buffer) == [0.25, 0.5, 1, 0.5, 1]


def test_td_errors_of_new_data_are_left_alone() -> None:
    buffer = unsynced(TensorDictPrioritizedReplayBuffer)
    rows = TensorDict({"a": torch.arange(3), "td_error": torch.tensor([1.0, 2.0, 3.0])}, [3])
    for told in (None, False):
        buffer.extend(rows, update_priority=told)
    buffer.add(rows[2])
    assert priorities(buffer) == [1] * 7
    with pytest.raises(RuntimeError, match="update_priority=True") as refused:
        buffer.extend(rows, update_priority=True)
    assert isinstance(refused.value, RbtoolError)
    assert buffer.write_count == 7
    batch = buffer.sample()
    buffer.update_tensordict_priority(batch.set("td_error", torch.full((4,), 0.5)))
    assert priorities(buffer) == [0.5 if row in batch["index"] else 1 for row in range(7)]
    with pytest.raises(RuntimeError, match="update_priority=True"):
        unsynced().extend(torch.arange(3), update_priority=True)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"storage": LazyTensorStorage(10, ndim=2)}, "one dimension, this one has 2"),
        ({"writer": TensorDictMaxValueWriter()}, "RoundRobinWriter, found a TensorDictMaxValueWriter"),
        ({"sampler": RandomSampler()}, "makes its own sampler"),
    ],
)
def test_parts_that_cannot_be_unsynced_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        unsynced(**wrong)
    buffer = unsynced()
    buffer.extend(torch.arange(3))
    storage, writer = buffer.storage, buffer.writer
    for name, part in wrong.items():
        if name != "sampler":
            with pytest.raises(ValueError, match=words):
                getattr(buffer, f"set_{name}")(part)
    assert (buffer.storage, buffer.writer) == (storage, writer)
    buffer.set_writer(RoundRobinWriter())
    buffer.extend(torch.arange(3))
    assert priorities(buffer) == [1] * 6


@pytest.mark.parametrize("way", ["folder", "state"])
def test_a_restored_buffer_continues_unsynced(way: str, tmp_path: Path) -> None:
    seeded = torch.Generator().manual_seed(1)
    one = learner(*range(8), storage=LazyTensorStorage(10), generator=seeded)
    one.extend(torch.arange(4))
    other = moved(one, unsynced(storage=LazyTensorStorage(10)), way, tmp_path / "saved")
    assert all(torch.equal(one.sample(), other.sample()) for _ in range(30))
    assert priorities(other) == [1, 1, *(round(p / 7, 4) for p in range(2, 8)), 1, 1]


def test_a_folder_is_loaded_with_and_without_sync(tmp_path: Path) -> None:
    buffer = learner(1.0, 2.0, 4.0, storage=LazyTensorStorage(10))
    buffer.dumps(tmp_path / "saved")
    for sync in (True, False):
        other = unsynced(storage=LazyTensorStorage(10), sync=sync)
        other.extend(torch.arange(7))
        other.loads(tmp_path / "saved")
        other.extend(torch.arange(1))
        assert priorities(other) == [0.25, 0.5, 1, 1]
