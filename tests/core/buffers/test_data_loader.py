"""Buffers in loaders: the length of an epoch, and random streams of workers."""

from __future__ import annotations

import gc
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import in_a_child
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.testing.datasets import write_walks

# The length of a loader ---------------------------------------------------------------------------


def filled(
    sampler: Any, batch_size: int | None, episodes: list[int], kind: Any = TensorDictReplayBuffer, **arguments: Any
) -> TensorDictReplayBuffer:
    buffer = kind(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=batch_size, **arguments)
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


def test_asking_for_the_length_changes_no_batch() -> None:
    def drawn(*, count: bool) -> list[list[int]]:
        generator = torch.Generator().manual_seed(1)
        buffer = filled(SliceSamplerWithoutReplacement(slice_len=2), 4, [3, 2, 4, 5, 2], generator=generator)
        loader, found = loader_of(buffer), []
        for batch in loader:
            found.append(batch["index"].tolist())
            assert not count or len(loader) == 3
        return found

    assert drawn(count=True) == drawn(count=False)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_length_does_not_change_in_the_middle_of_an_epoch(workers: int) -> None:
    buffer = filled(SamplerWithoutReplacement(), 4, [10])
    loader = loader_of(buffer, num_workers=workers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where iteration yields more than the length
        for _ in range(2):
            assert [len(loader) for _ in loader] == [3, 3, 3]
    buffer.extend(TensorDict({"a": torch.arange(3), "episode": torch.zeros(3, dtype=torch.int64)}, [3]))
    assert len(loader) == len(list(loader)) == 4


@pytest.mark.parametrize(
    "sampler", [RandomSampler(), SliceSampler(slice_len=2), PrioritizedSampler(1000, 0.7, 0.5), None]
)
def test_a_loader_that_never_ends_has_no_length(sampler: Any) -> None:
    kind = TensorDictReplayBuffer if sampler else partial(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5)
    loader = loader_of(filled(sampler, 4, [10], kind=kind))
    with pytest.raises(TypeError, match=r"has no len\(\)"):
        len(loader)
    assert next(iter(loader)).shape == (4,)


@pytest.mark.parametrize(
    ("size", "arguments", "words", "hint"),
    [
        (4, {"batch_size": 4}, "make batches of the batches", "DataLoader(buffer, batch_size=None)"),
        (4, {"batch_size": None, "num_workers": 2}, "each of 2 workers", ""),
        (None, {"batch_size": None}, "needs a buffer with a batch_size", ""),
    ],
)
def test_loaders_that_cannot_iterate_over_an_epoch_have_no_length(
    size: int | None, arguments: dict[str, Any], words: str, hint: str
) -> None:
    loader: Any = DataLoader(filled(SamplerWithoutReplacement(), size, [10]), **arguments)
    for use in (len, lambda loader: next(iter(loader))):
        with pytest.raises(RuntimeError, match=words) as refused:
            use(loader)
        assert hint in str(refused.value.hint)  # type: ignore[attr-defined]


class Rows(IterableDataset[int]):
    """Yields the numbers of the elements of a buffer."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return len(self.buffer)

    def __iter__(self) -> Iterator[int]:
        yield from range(len(self))


def test_other_datasets_count_elements() -> None:
    loader: Any = DataLoader(Rows(filled(RandomSampler(), 4, [10])), batch_size=3)
    assert len(loader) == len(list(loader)) == 4


def test_buffers_keep_no_frames_of_callers() -> None:
    buffer = filled(RandomSampler(), 2, [3])

    def use() -> weakref.ref[set[int]]:
        held = {1}  # by the caller alone
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


# Random streams -----------------------------------------------------------------------------------


ROWS = 1000


def rows(seed: int | None = None, sampler: Any = RandomSampler, **arguments: Any) -> TensorDictReplayBuffer:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    storage = LazyMemmapStorage(ROWS)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler(), generator=generator, batch_size=20, **arguments)
    buffer.extend(TensorDict({"a": torch.arange(ROWS)}, [ROWS]))
    return buffer


class Stream(IterableDataset[tuple[int, list[int]]]):
    """Three batches of a buffer, which already exists or is made in the worker."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        buffer = self.buffer() if callable(self.buffer) else self.buffer
        worker: Any = get_worker_info()
        for _ in range(3):
            yield worker.id, buffer.sample()["index"].tolist()


def drawn(buffer: Any, method: str = "fork") -> list[list[list[int]]]:
    """What each of two workers drew."""
    loader: Any = DataLoader(Stream(buffer), batch_size=None, num_workers=2, multiprocessing_context=method)
    found: list[list[list[int]]] = [[], []]
    for worker, index in loader:
        found[worker].append(index)
    return found


def all_differ(found: list[list[list[int]]]) -> bool:
    batches = [tuple(index) for batches in found for index in batches]
    return len(set(batches)) == len(batches) == 6


def open_walks(path: Path, seed: int | None) -> Any:
    return load_dataset(path, 8, seed=seed)


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", [(300, "terminated"), (200, "truncated")])
    return tmp_path / "walks"


@pytest.mark.parametrize(
    ("seed", "made_in_the_worker", "method"),
    [
        (None, False, "fork"),
        (None, True, "fork"),
        (7, False, "fork"),
        (7, True, "fork"),
        pytest.param(None, False, "spawn", marks=pytest.mark.slow),
        pytest.param(7, False, "spawn", marks=pytest.mark.slow),
    ],
)
def test_workers_of_a_loader_do_not_repeat_each_other(
    walks: Path, seed: int | None, made_in_the_worker: bool, method: str
) -> None:
    source = partial(open_walks, walks, seed)
    found = [drawn(source if made_in_the_worker else source(), method) for _ in range(2)]
    assert all_differ(found[0])
    assert (found[0] == found[1]) is (seed is not None)


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("seed", [None, 3])
def test_workers_do_not_repeat_what_was_drawn_before(sampler: type, seed: int | None) -> None:
    buffer = rows(seed, sampler, prefetch=2)
    buffer.sample()
    assert all_differ(drawn(buffer))


def test_workers_that_start_again_draw_other_batches() -> None:
    buffer = rows(seed=5)
    first, second = drawn(buffer), drawn(buffer)
    assert all_differ([first[0], second[0]])


def test_workers_follow_the_seed_of_torch_without_a_generator() -> None:
    def found() -> list[list[list[int]]]:
        torch.manual_seed(2)
        return drawn(rows())

    assert found() == found()


def in_children(act: Callable[[], Any]) -> list[Any]:
    """What a function returns in each of two forked processes, and then in this one."""
    return [in_a_child(act), in_a_child(act), act()]


def draws(buffer: Any) -> Callable[[], list[list[int]]]:
    return lambda: [buffer.sample()["index"].tolist() for _ in range(3)]


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_children_without_a_seed_draw_their_own(sampler: type, prefetch: int | None) -> None:
    buffer = rows(sampler=sampler, prefetch=prefetch)
    buffer.sample()
    one, two, parent = in_children(draws(buffer))
    assert all_differ([one, two])
    assert all_differ([two, parent])


@pytest.mark.parametrize("seed", [None, 4])
def test_children_draw_the_same_only_of_a_seed(walks: Path, seed: int | None) -> None:
    one, two, three = in_children(draws(load_dataset(walks, 8, seed=seed)))
    assert (one == two == three) is (seed is not None)
    assert seed is not None or all_differ([one, two])


def test_a_plain_fork_without_a_seed_draws_its_own() -> None:
    buffer, (read, write) = rows(), os.pipe()
    found = []
    for _ in range(2):
        child = os.fork()
        if not child:
            os.write(write, pickle.dumps(buffer.sample()["index"].tolist()))
            os._exit(0)
        os.waitpid(child, 0)
        found.append(tuple(pickle.loads(os.read(read, 1 << 16))))
    assert len({*found, tuple(buffer.sample()["index"].tolist())}) == 3


def test_a_child_that_seeds_torch_draws_by_that_seed() -> None:
    buffer = rows()

    def seeded() -> list[int]:
        buffer.sample()
        torch.manual_seed(1)
        found: list[int] = buffer.sample()["index"].tolist()
        return found

    one, two, three = in_children(seeded)
    assert one == two == three


# A buffer that is the data set of a loader itself -----------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_loader_yields_the_batches_of_a_buffer(workers: int) -> None:
    loader = DataLoader(rows(seed=1), batch_size=None, num_workers=workers)
    batches = [batch for batch, _ in zip(loader, range(4), strict=False)]
    assert all(isinstance(batch, TensorDict) and torch.equal(batch["a"], batch["index"]) for batch in batches)
    assert len({tuple(batch["index"].tolist()) for batch in batches}) == 4
    assert all(batch.shape == (20,) for batch in batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_goes_through_an_epoch(workers: int) -> None:
    loader = DataLoader(rows(sampler=SamplerWithoutReplacement), batch_size=None, num_workers=workers)
    for _ in range(2):
        index = torch.cat([batch["index"] for batch in loader])
        assert torch.equal(index.sort().values, torch.arange(ROWS))
        assert not torch.equal(index, torch.arange(ROWS))


class Generating(TensorDictReplayBuffer):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


@pytest.mark.parametrize("kind", [TensorDictReplayBuffer, Generating])
def test_a_loader_yields_batches_of_any_subclass(kind: type[TensorDictReplayBuffer]) -> None:
    made = type("Own", (kind,), {"__len__": kind.__len__, "__iter__": kind.__iter__})
    buffer = made(storage=LazyMemmapStorage(10), batch_size=3, sampler=SamplerWithoutReplacement())
    buffer.extend(TensorDict({"a": torch.arange(10)}, [10]))
    assert isinstance(next(iter(loader_of(buffer))), TensorDict)
    assert (len(buffer), len(loader_of(buffer))) == (10, 4)
    plain = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=3)
    plain.extend(torch.arange(10))
    assert next(iter(loader_of(plain))).shape == (3,)
