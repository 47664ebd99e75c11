"""Several passes over one data set at a time: each has its own epoch and seed to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from streams import contents, epochs, opened
from torch.utils.data import DataLoader

import rbtool
from rbtool.core.loading import torch_dataset
from rbtool.core.loading.torch_dataset import Passes

Walks = Callable[[str], Path]
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
MAKERS: dict[str, Callable[[Any], Any]] = {
    "data set": lambda dataset: dataset,
    "loader": rbtool.TorchLoader,
    "loader with workers": lambda dataset: rbtool.TorchLoader(dataset, num_workers=2),
    "DataLoader with workers": lambda dataset: DataLoader(dataset, batch_size=None, num_workers=2),
}
WITH_STATE = [name for name in MAKERS if not name.startswith("DataLoader")]


@pytest.mark.parametrize("kind", MAKERS)
def test_passes_that_take_turns_are_different_epochs(walks: Walks, kind: str) -> None:
    made = MAKERS[kind](opened(walks("ragged")))
    one, other = iter(made), iter(made)
    found: list[list[Any]] = [[], []]
    for pair in zip(one, other, strict=True):
        for batches, batch in zip(found, pair, strict=True):
            batches.append(batch)
    if kind not in WITH_STATE:  # whose workers start first decides
        found.sort(key=lambda batches: contents(batches) != epochs(walks("ragged"), 1)[0])
    assert list(map(contents, found)) == epochs(walks("ragged"), 2)


@pytest.mark.parametrize("kind", WITH_STATE)
def test_a_state_that_is_loaded_changes_no_pass_that_has_started(walks: Walks, kind: str) -> None:
    made = MAKERS[kind](opened(walks("ragged")))
    started = iter(made)
    first = [next(started), next(started)]
    state = opened(walks("ragged"), seed=99).state_dict() | {"batch": 2}
    made.load_state_dict(state)
    assert made.state_dict() == state
    assert contents([*first, *started]) == epochs(walks("ragged"), 1)[0]
    made.load_state_dict(state)
    assert contents(made) == epochs(walks("ragged"), 1, seed=99)[0][2:]


@pytest.mark.parametrize("kind", WITH_STATE)
def test_a_pass_that_has_ended_stays_so_and_changes_no_state(walks: Walks, kind: str) -> None:
    made = MAKERS[kind](opened(walks("ragged")))
    ended = iter(made)
    assert contents(ended) == epochs(walks("ragged"), 1)[0]
    started = iter(made)
    next(started)
    state = made.state_dict()
    assert next(ended, None) is None
    assert made.state_dict() == state


@pytest.mark.parametrize("kind", WITH_STATE)
def test_an_epoch_that_was_chosen_is_the_state(walks: Walks, kind: str) -> None:
    made = MAKERS[kind](opened(walks("ragged")))
    next(iter(made))
    made.set_epoch(7)
    state = made.state_dict()
    assert (state["epoch"], state["batch"]) == (7, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_of_one_data_set_do_not_change_each_others_pass(walks: Walks, workers: int) -> None:
    data = opened(walks("ragged"))
    one, other = (rbtool.TorchLoader(data, num_workers=workers) for _ in range(2))
    started = iter(one)
    first = [next(started)]
    other.load_state_dict(opened(walks("ragged"), seed=99).state_dict())
    found = contents(other)
    first.append(next(started))
    state = one.state_dict()
    assert (state["seed"], state["epoch"], state["batch"]) == (3, 0, 2)
    assert contents([*first, *started]) == epochs(walks("ragged"), 1)[0]
    assert found == epochs(walks("ragged"), 1, seed=99)[0]


def test_rows_written_are_found_by_passes_that_take_turns() -> None:
    buffer = rbtool.ReplayBuffer(
        storage=rbtool.LazyTensorStorage(20), sampler=rbtool.SamplerWithoutReplacement(), batch_size=4
    )
    buffer.extend(torch.arange(16))
    data = rbtool.torch_dataset(buffer, seed=1)
    passes = [iter(data), iter(data)]
    for stream in passes:
        next(stream)
    buffer.extend(torch.arange(2))
    for stream in passes:
        with pytest.raises(RuntimeError, match="written to the buffer during an epoch"):
            next(stream)


def test_a_persistent_worker_that_starts_its_next_pass_early_does_not_join_this_one(monkeypatch) -> None:
    shared, found = Passes(3), []
    for worker in (0, 0, 1, 1, 0, 1):
        info = SimpleNamespace(id=worker, num_workers=2, seed=100 + worker)
        monkeypatch.setattr(torch_dataset, "get_worker_info", lambda info=info: info)
        found.append((worker, shared.enter().epoch))
    assert found == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("how", ["seeded", "new loaders"])
def test_passes_with_equal_base_seeds_are_different_epochs(walks: Walks, how: str) -> None:
    data, found = opened(walks("ragged")), []
    loader: Any = DataLoader(data, batch_size=None, num_workers=2)
    for _ in range(3):
        if how == "seeded":
            torch.manual_seed(0)
        else:
            loader = DataLoader(data, batch_size=None, num_workers=2, generator=torch.Generator().manual_seed(0))
        found.append(contents(loader))
    assert found == epochs(walks("ragged"), 3)
