"""Whole slices of one lane are drawn by a compiled call where there is one: the same rows as without it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.kernels import rows as row_kernels
from rbtool.core.kernels.slices import ANCHORS
from rbtool.core.samplers.slices import SliceSampler
from rbtool.core.storages.lazy_tensor import LazyTensorStorage

CAPACITY = 40


def written(lengths: list[int], rows: int) -> LazyTensorStorage:
    """A ring into which so many rows of episodes of these lengths, again and again, are written one after the other."""
    ids = torch.arange(len(lengths) * CAPACITY).repeat_interleave(torch.tensor(lengths * CAPACITY))[:rows]
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    for part in TensorDict({"episode": ids}, [rows]).split(7):
        buffer.extend(part)
    return buffer.storage


def drawn(storage: LazyTensorStorage, seed: int, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sixty-four slices of three steps."""
    sampler = SliceSampler(slice_len=3, **options)
    sampler.generator = torch.Generator().manual_seed(seed)
    (index,), info = sampler.sample(storage, 64 * 3)
    return index, {str(key): value for key, value in info.items()}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("weight", ["episode", "step"])
@given(
    st.lists(st.integers(3, 17), min_size=1, max_size=6),
    st.sampled_from([8, CAPACITY - 1, CAPACITY, CAPACITY + 1, CAPACITY + 19, 3 * CAPACITY]),
    st.integers(0, 2**32),
)
def test_slices_are_the_same_with_and_without_a_compiled_call(
    weight: str, anchor: str, batched: bool, lengths: list[int], rows: int, seed: int
) -> None:
    storage = written(lengths, rows)
    options = {"weight": weight, "anchor": anchor, "batched": batched}
    assert row_kernels.warm()
    index, info = drawn(storage, seed, **options)
    with mock.patch.object(row_kernels, "warm", return_value=False):
        plain, plain_info = drawn(storage, seed, **options)
    assert torch.equal(index, plain)
    assert info.keys() == plain_info.keys()
    assert all(torch.equal(value, plain_info[key]) for key, value in info.items())
    steps = storage.get(index.reshape(-1))["episode"].view(-1, 3)
    assert (steps == steps[:, :1]).all()
    assert (index.reshape(-1, 3).diff(dim=1).remainder(CAPACITY) == 1).all()


@pytest.mark.parametrize("weight", ["episode", "step"])
@given(st.integers(0, 2**32))
def test_slices_are_the_same_as_those_that_might_be_cut(weight: str, seed: int) -> None:
    """Without `strict_length` slices are drawn in the way of those that may be shorter; here none is."""
    storage = written([5, 8, 7], CAPACITY)
    assert row_kernels.warm()
    index, _ = drawn(storage, seed, weight=weight)
    other, _ = drawn(storage, seed, weight=weight, strict_length=False)
    assert torch.equal(index, other)


def test_a_draw_follows_every_write() -> None:
    """The kept list of trajectories is replaced: rows that were overwritten are not drawn as parts of old episodes."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SliceSampler(slice_len=3))
    seen = set()
    for number in range(60):
        buffer.extend(TensorDict({"episode": torch.full([5], number)}, [5]))
        ids = buffer.sample(64 * 3)["episode"].view(-1, 3)
        assert (ids == ids[:, :1]).all()
        assert set(ids.unique().tolist()) <= set(range(number - CAPACITY // 5 + 1, number + 1))
        seen |= set(ids.unique().tolist())
    assert seen == set(range(60))
