"""`len(DataLoader(buffer, batch_size=None))` is the number of batches of an epoch, or a TypeError without epochs."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset

from rbtool.core.buffers.prioritized import TensorDictPrioritizedReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyTensorStorage


def filled(sampler: Any, batch_size: int | None, episodes: list[int], **arguments: Any) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000), sampler=sampler, batch_size=batch_size, **arguments
    )
    if rows := sum(episodes):
        episode = torch.repeat_interleave(torch.arange(len(episodes)), torch.tensor(episodes))
        buffer.extend(TensorDict({"a": torch.arange(rows), "episode": episode}, [rows]))
    return buffer


def loader_of(buffer: Any, **arguments: Any) -> Any:
    return DataLoader(buffer, batch_size=None, **arguments)


@settings(max_examples=60, deadline=None)
@given(
    episodes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    size=st.integers(1, 12),
    drop_last=st.booleans(),
    prefetch=st.sampled_from([None, 2]),
)
def test_the_length_is_the_number_of_batches_of_elements(
    episodes: list[int], size: int, drop_last: bool, prefetch: int | None
) -> None:
    if drop_last and size > sum(episodes):
        return
    buffer = filled(SamplerWithoutReplacement(drop_last), size, episodes, prefetch=prefetch)
    loader = loader_of(buffer)
    for _ in range(2):
        assert len(loader) == len(list(loader))
    assert len(buffer) == sum(episodes)


@settings(max_examples=60, deadline=None)
@given(
    episodes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    slices=st.integers(1, 4),
    steps=st.integers(1, 9),
    drop_last=st.booleans(),
    strict=st.booleans(),
)
def test_the_length_is_the_number_of_batches_of_slices(
    episodes: list[int], slices: int, steps: int, drop_last: bool, strict: bool
) -> None:
    eligible = sum(length >= steps or not strict for length in episodes)
    if eligible < (slices if drop_last else 1):
        return
    sampler = SliceSamplerWithoutReplacement(num_slices=slices, drop_last=drop_last, strict_length=strict)
    loader = loader_of(filled(sampler, slices * steps, episodes))
    for _ in range(2):
        assert len(loader) == len(list(loader))


def test_counting_changes_nothing_that_is_drawn() -> None:
    def drawn(*, count: bool) -> list[list[int]]:
        generator = torch.Generator().manual_seed(1)
        sampler = SliceSamplerWithoutReplacement(slice_len=2)
        buffer = filled(sampler, 4, [3, 2, 4, 5, 2], generator=generator)
        loader, found = loader_of(buffer), []
        for batch in loader:
            found.append(batch["index"].tolist())
            assert not count or len(loader) == 3
        return found

    assert drawn(count=True) == drawn(count=False)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_length_does_not_change_in_the_middle_of_an_epoch(workers: int) -> None:
    loader = loader_of(filled(SamplerWithoutReplacement(), 4, [10]), num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where iteration yields more than the length
        for _ in range(2):
            assert [len(loader) for _ in loader] == [3, 3, 3]


def test_rows_that_are_added_count() -> None:
    buffer = filled(SamplerWithoutReplacement(), 4, [10])
    loader = loader_of(buffer)
    assert len(loader) == 3
    buffer.extend(TensorDict({"a": torch.arange(3), "episode": torch.zeros(3, dtype=torch.int64)}, [3]))
    assert len(loader) == len(list(loader)) == 4


@pytest.mark.parametrize("sampler", [RandomSampler(), SliceSampler(slice_len=2), PrioritizedSampler(1000, 0.7, 0.5)])
def test_a_loader_that_never_ends_has_no_length(sampler: Any) -> None:
    loader = loader_of(filled(sampler, 4, [10]))
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(loader)
    assert next(iter(loader)).shape == (4,)


def test_a_buffer_of_priorities_has_no_length_in_a_loader() -> None:
    buffer = TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(10), batch_size=4)
    buffer.extend(TensorDict({"a": torch.arange(8)}, [8]))
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(loader_of(buffer))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"batch_size": 4}, "make batches of the batches"),
        ({"batch_size": None, "num_workers": 2}, "each of 2 workers"),
    ],
)
def test_what_cannot_iterate_has_no_length_either(arguments: dict[str, Any], sentence: str) -> None:
    loader: Any = DataLoader(filled(SamplerWithoutReplacement(), 4, [10]), **arguments)
    with pytest.raises(RuntimeError, match=sentence):
        len(loader)


def test_without_a_batch_size_there_is_no_length() -> None:
    with pytest.raises(RuntimeError, match="needs a buffer with a batch_size"):
        len(loader_of(filled(SamplerWithoutReplacement(), None, [10])))


class Counting(TensorDictReplayBuffer):
    def __len__(self) -> int:
        return super().__len__()


def test_a_subclass_with_a_length_of_its_own() -> None:
    buffer = Counting(storage=LazyTensorStorage(10), sampler=SamplerWithoutReplacement(), batch_size=3)
    buffer.extend(TensorDict({"a": torch.arange(10)}, [10]))
    assert (len(buffer), len(loader_of(buffer))) == (10, 4)


class Rows(IterableDataset[int]):
    """Yields the numbers of the elements of a buffer."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return len(self.buffer)

    def __iter__(self) -> Iterator[int]:
        yield from range(len(self))


def test_other_data_sets_count_elements() -> None:
    loader: Any = DataLoader(Rows(filled(RandomSampler(), 4, [10])), batch_size=3)
    assert len(loader) == len(list(loader)) == 4


class Held:
    """Something that a caller holds while it uses a buffer."""


def test_what_the_caller_holds_is_freed_at_once() -> None:
    buffer = filled(RandomSampler(), 2, [3])

    def use() -> weakref.ref[Held]:
        held = Held()
        len(buffer)
        iter(buffer)
        return weakref.ref(held)

    enabled = gc.isenabled()
    gc.disable()
    try:
        assert use()() is None
    finally:
        if enabled:
            gc.enable()
