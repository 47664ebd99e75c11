"""A batch that cannot be made is made again: a loop that catches the error has every step of the epoch."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch_streams import EPISODES, SAMPLERS, contents, opened, rows

import rbtool

Walks = Callable[[str], Path]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Fails:
    """Changes the rows, and fails with the second batch that a process makes, and every third one, or so, after it."""

    def __init__(self, every: int = 3) -> None:
        self.calls, self.every = 0, every

    def __call__(self, batch: Any) -> Any:
        batch["action"] = batch["action"] + 1
        self.calls += 1
        if self.calls % self.every == 2:
            raise OSError("the storage does not answer")
        return batch


class Works(Fails):
    def __call__(self, batch: Any) -> Any:
        batch["action"] = batch["action"] + 1
        return batch


def taken(batches: Iterator[Any]) -> tuple[list[Any], int]:
    """The batches of an iterator that is asked again after each failure, and how many failures there were."""
    found, failures = [], 0
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found, failures
        except OSError:
            failures += 1


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("episodes", EPISODES)
@pytest.mark.parametrize("make", [iter, lambda dataset: iter(rbtool.TorchLoader(dataset))])
def test_a_pass_has_every_batch_in_order(walks: Walks, episodes: str, sampler: str, make: Any) -> None:
    expected = contents(opened(walks(episodes), sampler, transform=Works()))
    found, failures = taken(make(opened(walks(episodes), sampler, transform=Fails())))
    assert contents(found) == expected
    assert failures or len(expected) < 2


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_with_workers_has_every_batch_in_order(walks: Walks, persistent: bool) -> None:
    expected = opened(walks("ragged"), transform=Works())
    loader = rbtool.TorchLoader(
        opened(walks("ragged"), transform=Fails(9)), num_workers=2, persistent_workers=persistent
    )
    for _ in range(1 + persistent):
        found, failures = taken(iter(loader))
        assert contents(found) == contents(expected)
        assert failures


@pytest.mark.parametrize("persistent", [False, True])
def test_a_failure_ends_the_workers(walks: Walks, persistent: bool) -> None:
    before = set(multiprocessing.active_children())
    dataset = opened(walks("ragged"), transform=Fails())
    loader = rbtool.TorchLoader(dataset, num_workers=2, persistent_workers=persistent)
    with pytest.raises(OSError, match="does not answer"):
        list(batches := iter(loader))
    assert set(multiprocessing.active_children()) <= before
    assert len(list(itertools.islice(batches, 1))) == 1


def test_the_workers_of_a_torch_loader_lose_no_batch(walks: Walks) -> None:
    dataset = opened(walks("ragged"), transform=Fails())
    found, failures = taken(iter(DataLoader(dataset, batch_size=None, num_workers=2)))
    assert sorted(map(tuple, rows(found))) == sorted(map(tuple, rows(opened(walks("ragged")))))
    assert failures


@pytest.mark.parametrize("loader", [False, True])
def test_the_state_after_a_failure_has_the_batch_that_failed(walks: Walks, loader: bool) -> None:
    dataset = opened(walks("ragged"), transform=Fails())
    source = rbtool.TorchLoader(dataset) if loader else dataset
    batches, found = iter(source), []
    with contextlib.suppress(OSError):
        while True:
            found.append(next(batches))
    again = opened(walks("ragged"), seed=99)
    again.load_state_dict(source.state_dict())
    assert rows([*found, *again]) == rows(opened(walks("ragged")))


def streamed(path: Path, transform: Any = None) -> Any:
    stream = rbtool.load_dataset(path, 4, streaming=True, transform=transform)
    return rbtool.StreamDataset(stream, seed=3)


def test_a_stream_has_every_batch_in_order(walks: Walks) -> None:
    found, failures = taken(iter(streamed(walks("ragged"), Fails())))
    assert contents(found) == contents(streamed(walks("ragged"), Works()))
    assert failures


def test_the_state_of_a_stream_after_a_failure_has_the_batch_that_failed(walks: Walks) -> None:
    stream, found = streamed(walks("ragged"), Fails()), []
    batches = iter(stream)
    with contextlib.suppress(OSError):
        while True:
            found.append(next(batches))
    state = stream.state_dict()
    for again in (streamed(walks("ragged")), stream):  # another process, and this one
        again.load_state_dict(state)
        assert rows([*found, *taken(iter(again))[0]]) == rows(streamed(walks("ragged")))


def test_another_pass_of_a_stream_has_no_batch_of_the_one_before(walks: Walks) -> None:
    stream = streamed(walks("ragged"), Fails())
    with contextlib.suppress(OSError):
        list(stream)
    found, _ = taken(iter(stream))
    assert len({row for batch in rows(found) for row in batch}) == sum(map(len, rows(found)))
