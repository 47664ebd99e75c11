"""Datasets as buffers of d3rlpy, and back."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rbtool
from rbtool.adapters import from_d3rlpy, to_d3rlpy
from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.schema import Key
from rbtool.core.testing.datasets import write_walks

DATA = Path(__file__).parents[1] / "data" / "d3rlpy"
WALKS = [(3, "terminated"), (2, "truncated"), (4, "open"), (5, "both")]


@dataclass
class Episode:
    """An episode as d3rlpy has it."""

    observations: Any
    actions: Any
    rewards: Any
    terminated: bool

    def size(self) -> int:
        return len(self.actions)


@dataclass
class Buffer:
    episodes: list[Episode]


def some_episodes() -> Buffer:
    draw = np.random.default_rng(0)
    return Buffer(
        [
            Episode(
                draw.normal(size=(steps, 3)), draw.integers(4, size=(steps, 1)), draw.normal(size=(steps, 1)), ended
            )
            for steps, ended in ((4, True), (3, False), (1, False), (1, True))
        ]
    )


@pytest.mark.skipif(importlib.util.find_spec("d3rlpy") is not None, reason="d3rlpy is installed")
def test_without_the_library_the_error_says_how_to_get_it(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", WALKS)
    with pytest.raises(UsageError, match="d3rlpy") as caught:
        to_d3rlpy(tmp_path / "walks")
    assert "pip install --no-deps d3rlpy" in caught.value.hint


@pytest.mark.parametrize(
    ("final_step", "lengths", "terminated", "truncated"),
    [
        ("auto", [4, 2, 1], [True, False, True], [False, True, False]),
        ("repeat", [4, 3, 1, 1], [True, False, False, True], [False, True, True, False]),
        ("drop", [3, 2], [False, False], [True, True]),
    ],
)
def test_last_steps_are_decided_as_in_a_conversion(
    final_step: Any, lengths: list[int], terminated: list[bool], truncated: list[bool]
) -> None:
    buffer = some_episodes()
    steps = from_d3rlpy(buffer, final_step=final_step)
    numbers = steps["episode"].unique(return_counts=True)
    assert numbers[1].tolist() == lengths
    ends = np.cumsum(lengths) - 1
    for name, expected in (("terminated", terminated), ("truncated", truncated), ("done", [True] * len(lengths))):
        flags = steps["next", name]
        assert (flags.dtype, flags.shape) == (torch.bool, (sum(lengths), 1))
        assert flags[ends, 0].tolist() == expected
        assert flags.sum() == sum(expected)
    for number, length, end in zip(numbers[0].tolist(), lengths, ends.tolist(), strict=True):
        episode, rows = buffer.episodes[number], slice(end + 1 - length, end + 1)
        after = np.concatenate((episode.observations[1:], episode.observations[-1:]))
        assert np.array_equal(steps["observation"][rows], episode.observations[:length])
        assert np.array_equal(steps["next", "observation"][rows], after[:length])
        assert np.array_equal(steps["action"][rows], episode.actions[:length])
        assert np.array_equal(steps["next", "reward"][rows], episode.rewards[:length])
    rb = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(20), batch_size=4)
    rb.extend(steps)
    assert rb.sample()["next", "observation"].shape == (4, 3)


def test_a_buffer_without_whole_steps_is_refused() -> None:
    with pytest.raises(SchemaError, match="no steps"):
        from_d3rlpy(Buffer([Episode(np.zeros((1, 2)), np.zeros((1, 1)), np.zeros((1, 1)), False)]))
    with pytest.raises(UsageError, match="final-step"):
        from_d3rlpy(some_episodes(), final_step="never")  # type: ignore[arg-type]


def read(path: Path, key: Key) -> Any:
    with open_steps(path) as reader:
        return reader.read(key, 0, reader.manifest.steps)


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_a_dataset_becomes_a_buffer(tmp_path: Path) -> None:
    dataset = pytest.importorskip("d3rlpy.dataset")
    write_walks(tmp_path / "walks", WALKS)
    buffer = to_d3rlpy(tmp_path / "walks")
    assert isinstance(buffer, dataset.MDPDataset)
    assert isinstance(buffer, dataset.ReplayBuffer)
    assert [episode.size() for episode in buffer.episodes] == [3, 2, 4, 5]
    assert [episode.terminated for episode in buffer.episodes] == [True, False, False, True]
    assert buffer.transition_count == 3 + 1 + 3 + 5
    for name, key in (("observations", ("observation",)), ("actions", ("action",)), ("rewards", ("next", "reward"))):
        found = np.concatenate([getattr(episode, name) for episode in buffer.episodes])
        assert np.array_equal(found, read(tmp_path / "walks", key).astype(found.dtype)), name
    assert buffer.dataset_info.action_space.name == "CONTINUOUS"


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["vector", "tuple"])
@pytest.mark.parametrize("final_step", ["auto", "drop", "repeat"])
def test_a_buffer_is_the_dataset_of_its_dump_and_comes_back(name: str, final_step: Any, tmp_path: Path) -> None:
    dataset = pytest.importorskip("d3rlpy.dataset")
    with (DATA / f"{name}.h5").open("rb") as file:
        buffer = dataset.ReplayBuffer.load(file, dataset.InfiniteBuffer())
    path = rbtool.convert(DATA / f"{name}.h5", tmp_path / "made", final_step=final_step).path
    steps = from_d3rlpy(buffer, final_step=final_step)
    with open_steps(path) as reader:
        keys = {field.key for field in reader.fields}
        for key in keys - {("episode",)}:
            expected = reader.read(key, 0, reader.manifest.steps)
            assert np.array_equal(steps[key].reshape(expected.shape), expected), key
    if final_step == "repeat":
        again = to_d3rlpy(path)
        for one, other in zip(buffer.episodes, again.episodes, strict=True):
            assert one.terminated == other.terminated
            assert np.array_equal(one.actions.reshape(len(one), -1), other.actions)
            states = [episode.observations for episode in (one, other)]
            pairs = zip(*states, strict=True) if isinstance(states[0], list) else [states]
            assert all(np.array_equal(left, right) for left, right in pairs)


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_an_algorithm_of_d3rlpy_trains_on_a_dataset(tmp_path: Path) -> None:
    d3rlpy = pytest.importorskip("d3rlpy")
    rbtool.record("CartPole-v1", tmp_path / "cartpole", episodes=6, seed=0)
    buffer = to_d3rlpy(tmp_path / "cartpole")
    assert (buffer.dataset_info.action_space.name, buffer.dataset_info.action_size) == ("DISCRETE", 2)
    algorithm = d3rlpy.algos.DiscreteCQLConfig(batch_size=16).create(device="cpu:0")
    algorithm.build_with_dataset(buffer)
    losses = algorithm.update(buffer.sample_transition_batch(16))
    assert np.isfinite(losses["loss"])
