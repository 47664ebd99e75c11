"""No two processes draw alike without a seed, and with one each worker of a loader has its own stream."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage
from rbtool.core.testing.datasets import write_walks

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


class Walks:
    """Opens a dataset in the worker."""

    def __init__(self, path: Path, seed: int | None) -> None:
        self.path, self.seed = path, seed

    def __call__(self) -> Any:
        return load_dataset(self.path, 8, seed=self.seed)


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
    source = Walks(walks, seed)
    found = [drawn(source if made_in_the_worker else source(), method) for _ in range(2)]
    assert all_differ(found[0])
    assert (found[0] == found[1]) is (seed is not None)


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("seed", [None, 3])
def test_what_was_drawn_before_is_not_repeated_by_workers(sampler: type, seed: int | None) -> None:
    buffer = rows(seed, sampler, prefetch=2)
    buffer.sample()
    assert all_differ(drawn(buffer))


def test_workers_that_start_anew_draw_anew() -> None:
    buffer = rows(seed=5)
    first, second = drawn(buffer), drawn(buffer)
    assert all_differ([first[0], second[0]])


def test_torchs_seed_decides_where_there_is_no_generator() -> None:
    def found() -> list[list[list[int]]]:
        torch.manual_seed(2)
        return drawn(rows())

    assert found() == found()


def in_children(act: Callable[[], Any]) -> list[Any]:
    """What a function returns in each of two forked processes, and then in this one."""
    context, found = multiprocessing.get_context("fork"), []
    for _ in range(2):
        queue = context.SimpleQueue()
        process = context.Process(target=_answer, args=(queue, act))
        process.start()
        found.append(queue.get())
        process.join()
    return [*found, act()]


def _answer(queue: Any, act: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    queue.put(act())


class Draw:
    """Draws three batches."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __call__(self) -> list[list[int]]:
        return [self.buffer.sample()["index"].tolist() for _ in range(3)]


@pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_children_without_a_seed_draw_their_own(sampler: type, prefetch: int | None) -> None:
    buffer = rows(sampler=sampler, prefetch=prefetch)
    buffer.sample()
    one, two, parent = in_children(Draw(buffer))
    assert all_differ([one, two])
    assert all_differ([two, parent])


@pytest.mark.parametrize("seed", [None, 4])
def test_children_draw_the_same_only_of_a_seed(walks: Path, seed: int | None) -> None:
    one, two, three = in_children(Draw(load_dataset(walks, 8, seed=seed)))
    assert (one == two == three) is (seed is not None)
    assert seed is not None or all_differ([one, two])


def test_a_plain_fork_without_a_seed() -> None:
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


def test_a_child_that_seeds_torch_gets_what_it_asks_for() -> None:
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


def test_several_workers_with_one_epoch_each_are_refused() -> None:
    loader = DataLoader(rows(sampler=SamplerWithoutReplacement), batch_size=None, num_workers=2)
    with pytest.raises(RuntimeError, match="each of 2 workers would go through a whole epoch"):
        next(iter(loader))


def test_a_loader_that_batches_batches_is_refused() -> None:
    with pytest.raises(RuntimeError, match="make batches of the batches") as caught:
        next(iter(DataLoader(rows(), batch_size=4)))
    assert "DataLoader(buffer, batch_size=None)" in str(caught.value.hint)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_loader_yields_batches_of_any_kind() -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=3)
    buffer.extend(torch.arange(10))
    assert next(iter(DataLoader(buffer, batch_size=None))).shape == (3,)


class Delegating(TensorDictReplayBuffer):
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()


class Generating(TensorDictReplayBuffer):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


@pytest.mark.parametrize("kind", [Delegating, Generating])
def test_a_loader_knows_a_buffer_that_iterates_in_its_own_way(kind: type[TensorDictReplayBuffer]) -> None:
    buffer = kind(storage=LazyMemmapStorage(10), batch_size=3)
    buffer.extend(TensorDict({"a": torch.arange(10)}, [10]))
    assert isinstance(next(iter(DataLoader(buffer, batch_size=None))), TensorDict)
