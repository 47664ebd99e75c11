"""A batch that cannot be made is made again: a loop that catches the error has every step of the epoch."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch_streams import EPISODES, SAMPLERS, Fails, Works, contents, opened, rows, taken

import rbtool

Walks = Callable[[str], Path]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


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
