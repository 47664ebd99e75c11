"""Windows of steps of datasets: the episode table separates them, next to a flag of the caller's choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rbtool
from rbtool import Sequence
from rbtool.core.testing.datasets import write_mixture, write_packed, write_walks

EPISODES = [(9, "terminated"), (3, "truncated"), (1, "both"), (1, "terminated"), (12, "open"), (4, "terminated")]
NUMBERS = np.repeat(np.arange(len(EPISODES)), [length for length, _ in EPISODES])


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same episodes in both layouts."""
    work = tmp_path_factory.mktemp("walks")
    write_walks(work / "ted", EPISODES)  # type: ignore[arg-type]
    write_packed(work / "ted", work / "packed")
    return work


def assert_whole(batch: Any, width: int) -> None:
    index, valid = batch["index"].reshape(-1, width).numpy(), batch["validity_mask"].reshape(-1, width).numpy()
    for window, real in zip(index, valid, strict=True):
        assert len(set(NUMBERS[window])) == 1
        assert (np.diff(window[real]) == 1).all()
        assert set(window) == set(window[real])


@pytest.mark.parametrize("key", ["done", "terminated"])  # the table says the same, and more
@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_windows_stay_in_their_episodes(layout: str, key: str, walks: Path) -> None:
    unit = Sequence(4, burn_in=2, done_key=("next", key))
    dataset = rbtool.load_dataset(walks / layout, 16, seed=0, sample_unit=unit)
    for _ in range(10):
        batch = dataset.sample()
        assert batch.shape == (96,)
        assert_whole(batch, 6)
        assert batch["observation"].equal(dataset.storage[batch["index"]]["observation"])


@pytest.mark.parametrize("style", ["iterable", "map"])
def test_epochs_of_a_loader_have_each_anchor_once(style: Any, walks: Path) -> None:
    dataset = rbtool.load_dataset(
        walks / "ted", 8, seed=0, sample_unit=Sequence(3), sampler=rbtool.SamplerWithoutReplacement()
    )
    found = []
    for batch in rbtool.TorchLoader(rbtool.torch_dataset(dataset, seed=0, style=style)):
        assert_whole(batch, 3)
        found += batch["anchor_index"][::3].tolist()
    assert sorted(found) == list(range(len(NUMBERS)))


def test_rows_that_were_written_over_have_the_ends_of_their_flags(walks: Path) -> None:
    storage = rbtool.load_dataset(walks / "ted", 8).storage
    unit = Sequence(4, done_key=("next", "terminated"))
    assert unit.expand(torch.tensor([0, 9]), {}, storage)[0].tolist() == [0, 1, 2, 3, 9, 10, 11, 11]
    rows = storage[3:4].clone()
    rows["next", "terminated"][:] = True
    storage.set(torch.tensor([3]), rows)
    assert unit.expand(torch.tensor([2]), {}, storage)[0].tolist() == [2, 3, 3, 3]


def test_mixtures_have_no_windows(walks: Path, tmp_path: Path) -> None:
    write_mixture(tmp_path / "both.toml", walks / "ted", walks / "packed")
    with pytest.raises(rbtool.UsageError, match="draws single elements"):
        rbtool.load_dataset(tmp_path / "both.toml", 8, sample_unit=Sequence(2))
