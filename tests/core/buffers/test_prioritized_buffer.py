"""Buffers that sample by priority: how they are made, and every way in which priorities get in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import RbtoolError
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.uniform import RandomSampler
from rbtool.core.storages.base import Storage
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.buffers import EXPONENTS, draw_many, drawn_weights, expected, of_steps, plain, steps
from rbtool.core.writers.max_value import TensorDictMaxValueWriter

KINDS = [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer]


# Making one ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_sampler_is_of_the_storage_and_of_the_arguments(kind: Any) -> None:
    buffer = kind(alpha=0.7, beta=0.4, eps=1e-4, storage=LazyTensorStorage(12))
    sampler = buffer.sampler
    assert isinstance(sampler, PrioritizedSampler)
    assert (sampler.max_capacity, sampler.alpha, sampler.beta, sampler.eps) == (12, 0.7, 0.4, 1e-4)
    assert isinstance(buffer, TensorDictReplayBuffer) is (kind is TensorDictPrioritizedReplayBuffer)


def test_a_list_of_a_thousand_by_default() -> None:
    buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.4)
    assert isinstance(buffer.storage, ListStorage)
    assert buffer.sampler.max_capacity == 1000
    assert buffer.extend(["a", "b"]).tolist() == [0, 1]
    buffer.update_priority(0, 0)
    assert set(buffer.sample(20)) == {"b"}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_are_made_when_they_are_needed(kind: Any) -> None:
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


def test_a_sampler_of_ones_own() -> None:
    sampler = PrioritizedSampler(10, alpha=0.3, beta=0.2)
    for kind in KINDS:
        assert kind(**EXPONENTS, storage=LazyTensorStorage(10), sampler=sampler).sampler is sampler
        with pytest.raises(TypeError, match="sampler_device") as refused:
            kind(**EXPONENTS, storage=LazyTensorStorage(10), sampler=sampler, sampler_device="cpu")
        assert isinstance(refused.value, RbtoolError)
    assert isinstance(plain(sampler=RandomSampler).sampler, RandomSampler)


def test_the_sampler_may_be_named_to_be_on_the_cpu() -> None:
    buffer = plain(sampler_device="cpu")
    buffer.extend(torch.arange(4))
    assert buffer.sample(return_info=True)[1]["priority_weight"].device.type == "cpu"


def test_the_generator_decides() -> None:
    def numbers(seed: int) -> list[int]:
        buffer = plain(generator=torch.Generator().manual_seed(seed))
        buffer.extend(torch.arange(9))
        return [number for _ in range(9) for number in buffer.sample().tolist()]

    assert numbers(1) == numbers(1) != numbers(2)


def test_a_list_without_bounds(tmp_path: Path) -> None:
    buffer, other = plain(storage=ListStorage()), plain(storage=ListStorage())
    for first in range(0, 30, 3):
        index = buffer.extend([torch.tensor(row) for row in range(first, first + 3)])
        buffer.update_priority(index, torch.tensor([1.0, 2.0, 3.0]))
    assert drawn_weights(buffer) == expected(*[1, 2, 3] * 10)
    buffer.dumps(tmp_path / "saved")
    other.extend([torch.tensor(0)])
    other.loads(tmp_path / "saved")
    assert drawn_weights(other) == expected(*[1, 2, 3] * 10)


# What already exists -------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_a_storage_that_is_filled(sync: bool) -> None:
    buffer = plain(storage=TensorStorage(torch.arange(6)), sync=sync)
    assert set(draw_many(buffer)[0].tolist()) == set(range(6))
    assert drawn_weights(buffer) == expected(1, 1, 1, 1, 1, 1)


@pytest.mark.parametrize("sync", [True, False])
def test_another_storage(sync: bool) -> None:
    buffer = plain(3, sync=sync)
    buffer.extend(torch.arange(3))
    buffer.update_priority(0, 5.0)
    buffer.set_storage(TensorStorage(torch.arange(8)))
    assert drawn_weights(buffer) == expected(*[1] * 8)
    buffer.update_priority(7, 3.0)
    assert drawn_weights(buffer) == expected(1, 1, 1, 1, 1, 1, 1, 3)


def test_another_sampler_knows_what_is_there() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(torch.arange(5))
    buffer.set_sampler(PrioritizedSampler(10, **EXPONENTS))
    assert drawn_weights(buffer) == expected(1, 1, 1, 1, 1)


@pytest.mark.parametrize("sync", [True, False])
def test_emptied(sync: bool) -> None:
    buffer = plain(sync=sync)
    buffer.extend(torch.arange(9))
    buffer.update_priority(torch.arange(9), torch.arange(9.0))
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    buffer.extend(torch.arange(2))
    assert drawn_weights(buffer) == expected(1, 1)


def test_a_storage_of_two_buffers() -> None:
    storage = LazyTensorStorage(10)
    one, other = plain(storage=storage), plain(storage=storage)
    one.extend(torch.arange(4))
    one.update_priority(0, 0.0)
    assert drawn_weights(one) == expected(0, 1, 1, 1)
    assert drawn_weights(other) == expected(1, 1, 1, 1)


# Priorities of what is written -----------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_what_is_new_gets_the_highest_priority_so_far(sync: bool) -> None:
    buffer = plain(4, sync=sync)
    buffer.extend(torch.arange(3))
    buffer.update_priority([0, 1, 2], [0.5, 3.0, 1.0])
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
def test_what_is_replaced_gets_it_too(index: Any, marked: set[int], sync: bool) -> None:
    buffer = plain(sync=sync)
    buffer.extend(torch.arange(5))
    buffer.update_priority(torch.arange(5), torch.tensor([1.0, 1, 1, 1, 1]))
    buffer.update_priority(0, 4.0)
    buffer.update_priority(0, 1.0)
    buffer[index] = buffer[index]
    assert drawn_weights(buffer) == expected(*[4 if row in marked else 1 for row in range(5)])
    buffer.update_priority(torch.arange(5), 1.0)
    buffer.mark_update(index)
    assert drawn_weights(buffer) == expected(*[4 if row in marked else 1 for row in range(5)])


def test_priorities_that_come_with_the_data() -> None:
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
def test_the_reductions(reduction: str, priority: float) -> None:
    buffer = of_steps(priority_key=("loss", "td"), reduction=reduction)
    several = torch.tensor([[0.0, 1.0, 5.0], [1.0, 1.0, 1.0]])
    buffer.extend(steps(2, loss=TensorDict({"td": several}, [2])))
    one = 3.0 if reduction == "sum" else 1.0
    assert drawn_weights(buffer) == expected(priority, one)
    batch = draw_many(buffer)[0]
    buffer.update_tensordict_priority(batch)
    assert drawn_weights(buffer) == expected(priority, one)


def test_an_unknown_reduction() -> None:
    with pytest.raises(NotImplementedError, match="mode"):
        of_steps(reduction="mode")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.uint8])
def test_priorities_of_any_type(dtype: torch.dtype) -> None:
    for reduction in ("mean", "median"):
        buffer = of_steps(reduction=reduction)
        buffer.extend(steps(2, td_error=torch.tensor([[1, 2, 3], [4, 4, 4]], dtype=dtype)))
        assert drawn_weights(buffer) == expected(2, 4)


def test_elements_that_are_ranked_out_get_no_priority() -> None:
    writer = TensorDictMaxValueWriter(rank_key="a")
    buffer = of_steps(3, writer=writer)
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
def test_two_dimensions(storage: type[Storage], dim_extend: int) -> None:
    buffer = of_steps(storage=storage(10, ndim=2), dim_extend=dim_extend)
    numbers = torch.arange(1.0, 13).reshape(3, 4)
    if dim_extend == 0:
        numbers = numbers.T
    index = buffer.extend(TensorDict({"a": numbers, "td_error": numbers}, numbers.shape))
    assert (buffer.storage.max_size, len(index)) == (12, 12)
    assert drawn_weights(buffer) == expected(*buffer.storage.get(slice(None))["a"].flatten().tolist())
    batch = draw_many(buffer)[0]
    buffer.update_tensordict_priority(batch.set("td_error", 20 - batch["a"]))
    assert drawn_weights(buffer) == expected(*(20 - buffer.storage.get(slice(None))["a"]).flatten().tolist())
    buffer[:, 2] = buffer[:][:, 2]
    marked = torch.zeros(numbers.shape, dtype=torch.bool)
    marked[:, 2] = True
    marked = marked.T if dim_extend else marked
    assert drawn_weights(buffer) == expected(
        *torch.where(marked, 19, 20 - buffer.storage.get(slice(None))["a"]).flatten().tolist()
    )


def test_two_dimensions_in_plain_buffers() -> None:
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


def test_slices_of_steps() -> None:
    """What slice samplers give, told to be `[B, T]`: padded steps do not count."""
    buffer = of_steps()
    buffer.extend(steps(6))
    mask = torch.tensor([[True, True, True], [True, True, False]])
    batch = TensorDict({"index": torch.tensor([[0, 1, 2], [4, 5, 5]])}, [2, 3])
    batch["td_error"] = torch.tensor([[[0.5], [2.0], [3.0]], [[4.0], [5.0], [99.0]]])
    buffer.update_tensordict_priority(batch.set(("collector", "mask"), mask))
    assert drawn_weights(buffer) == expected(0.5, 2, 3, 1, 4, 5)


@pytest.mark.parametrize("reduction", ["max", "mean"])
def test_whole_trajectories(reduction: str) -> None:
    """Elements of several steps, padded to one length: one priority of all their steps, and of those alone."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    buffer = of_steps(storage=TensorStorage(TensorDict({"mask": mask}, [2, 3])), reduction=reduction, batch_size=40)
    batch = buffer.sample()
    assert batch["index"].shape == batch["priority_weight"].shape == (40, 3)
    errors = torch.tensor([[[1.0], [6.0], [2.0]], [[3.0], [70.0], [80.0]]])
    buffer.update_tensordict_priority(batch.set("td_error", errors[batch["index"][:, 0]]))
    assert drawn_weights(buffer) == expected(6 if reduction == "max" else 3, 3)
    buffer.update_tensordict_priority(batch.exclude("mask"))
    assert drawn_weights(buffer) == expected(*((6, 80) if reduction == "max" else (3, 51)))
