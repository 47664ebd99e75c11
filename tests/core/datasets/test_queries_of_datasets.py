"""Trajectories of datasets: the episode table separates them, and nothing else is read than what is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rbtool
from rbtool import traj
from rbtool.core.storages.packed import PackedStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.datasets import write_packed, write_walks

EPISODES = [(9, "terminated"), (3, "truncated"), (1, "both"), (1, "terminated"), (12, "open"), (4, "terminated")]
LENGTHS = [length for length, _ in EPISODES]


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same episodes in both layouts."""
    work = tmp_path_factory.mktemp("walks")
    write_walks(work / "ted", EPISODES)  # type: ignore[arg-type]
    write_packed(work / "ted", work / "packed")
    return work


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_trajectories_are_the_episodes(layout: str, walks: Path) -> None:
    dataset = rbtool.load_dataset(walks / layout)
    found = rbtool.filter_trajectories(dataset)
    assert [one.length for one in found] == LENGTHS
    whole = dataset.storage[:]
    start = 0
    for one in found:
        assert (one.data == whole[start : start + one.length]).all()
        assert one.observation.equal(whole["observation"][start : start + one.length])
        start += one.length


@pytest.mark.parametrize(("layout", "kind"), [("ted", TensorStorage), ("packed", PackedStorage)])
def test_only_what_is_asked_for_is_read(layout: str, kind: Any, walks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = rbtool.load_dataset(walks / layout)
    totals = [float(one.data["next", "reward"].double().sum()) for one in dataset.query()]
    asked: list[Any] = []
    monkeypatch.setattr(kind, "read_at", lambda self, index: asked.append(index))
    assert [one.length for one in dataset.query(traj.length > 3)] == [9, 12, 4]
    middle = sorted(totals)[3]
    found = dataset.query(traj.total_reward >= middle)
    assert [float(one.total_reward) for one in found] == [total for total in totals if total >= middle]
    assert found[0]["observation"].shape[0] == found[0].length
    assert asked == []


def test_transforms_of_other_entries_are_left_out(walks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = rbtool.Normalize(["observation"], loc=1.0, scale=2.0)
    dataset = rbtool.load_dataset(walks / "ted", transform=scale)
    rewards = [one["next", "reward"] for one in dataset.query()]
    first = dataset.query()[0]
    assert first["observation"].equal(dataset[: first.length]["observation"])
    monkeypatch.setattr(rbtool.Normalize, "forward", lambda self, data: None)
    assert all(one["next", "reward"].equal(old) for one, old in zip(dataset.query(), rewards, strict=True))
