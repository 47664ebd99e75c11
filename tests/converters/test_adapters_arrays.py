"""`qlearning_arrays` and `sequence_dataset`: the arrays that D4RL makes of its files, and what a dataset adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import rbtool
from rbtool.adapters import qlearning_arrays, sequence_dataset
from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.format.contracts import Array
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.datasets import write_walks

FILE = Path(__file__).parents[1] / "data" / "d4rl" / "hopper_random-v2.hdf5"
WALKS = [(3, "terminated"), (2, "truncated"), (4, "open"), (1, "both")]


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rbtool.convert(FILE, tmp_path_factory.mktemp("d4rl") / "hopper").path


@pytest.fixture(scope="module")
def raw() -> dict[str, Array]:
    with h5py.File(FILE) as file:
        return {name: file[name][()] for name in ("observations", "actions", "rewards", "terminals", "timeouts")}


def rows_of(path: Path, key: tuple[str, ...]) -> Any:
    with open_steps(path) as reader:
        return reader.read(key, 0, reader.manifest.steps)


def test_dropping_timeouts_gives_the_arrays_of_d4rl(hopper: Path, raw: dict[str, Array]) -> None:
    """D4RL has no next observations: it takes the following row, and leaves out steps at time limits, and the last."""
    kept = np.flatnonzero(~raw["timeouts"][:-1])
    found = qlearning_arrays(hopper, timeouts="drop")
    for name in ("observations", "actions", "rewards", "terminals"):
        expected = raw[name][kept]
        assert np.array_equal(found[name], expected.astype(found[name].dtype)), name
        assert found[name].dtype == (bool if name == "terminals" else np.float32)
    inside = ~found["terminals"]
    assert np.array_equal(found["next_observations"][inside], raw["observations"][kept + 1][inside].astype(np.float32))


def test_timeouts_are_kept_with_the_observation_after_them(hopper: Path, raw: dict[str, Array]) -> None:
    found = qlearning_arrays(hopper, dtype=None)
    assert len(found["rewards"]) == len(raw["rewards"])
    assert found["rewards"].shape == raw["rewards"].shape
    assert np.array_equal(found["terminals"], raw["terminals"])
    with h5py.File(FILE) as file:
        assert np.array_equal(found["next_observations"], file["next_observations"][()])
        assert found["next_observations"].dtype == file["next_observations"].dtype


def test_steps_without_a_known_next_observation_are_left_out(tmp_path: Path, raw: dict[str, Array]) -> None:
    with h5py.File(tmp_path / "file.hdf5", "w") as file:
        file.update(raw)
    path = rbtool.convert(tmp_path / "file.hdf5", tmp_path / "repeated", final_step="repeat").path
    ended = raw["timeouts"].copy()
    ended[-1] |= not raw["terminals"][-1]
    assert len(qlearning_arrays(path)["rewards"]) == len(ended) - ended.sum()


def test_a_buffer_of_a_dataset_is_taken_for_it(hopper: Path) -> None:
    found, expected = qlearning_arrays(rbtool.load_dataset(hopper)), qlearning_arrays(hopper)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_episodes_are_sequences(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", WALKS)
    rows = {name: rows_of(tmp_path / "walks", key) for name, key in (
        ("observations", ("observation",)), ("next_observations", ("next", "observation")), ("actions", ("action",)),
        ("rewards", ("next", "reward")), ("terminals", ("next", "terminated")), ("timeouts", ("next", "truncated")),
        ("infos/success", ("info", "success")),
    )}  # fmt: skip
    episodes = list(sequence_dataset(tmp_path / "walks"))
    assert [len(episode["rewards"]) for episode in episodes] == [3, 2, 4, 1]
    for name, values in rows.items():
        shape = values.shape[:1] if name in {"rewards", "terminals", "timeouts"} else values.shape
        joined = np.concatenate([episode.pop(name) for episode in episodes])
        assert joined.dtype == values.dtype
        assert np.array_equal(joined, values.reshape(shape)), name
    assert not any(episodes)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_what_is_added_and_padded(gamma: float, tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", WALKS)
    options: dict[str, Any] = {"timesteps": True, "returns_to_go": True, "gamma": gamma}
    episodes = [list(sequence_dataset(tmp_path / "walks", pad=pad, **options)) for pad in (None, "zero")]
    for (length, _), whole, padded in zip(WALKS, *episodes, strict=True):
        assert whole["timesteps"].tolist() == list(range(length))
        expected = [(whole["rewards"][step:] * gamma ** np.arange(length - step)).sum() for step in range(length)]
        assert np.allclose(whole["returns_to_go"], expected)
        assert whole["returns_to_go"].dtype == whole["rewards"].dtype
        assert padded.pop("masks").tolist() == [True] * length + [False] * (4 - length)
        assert padded.keys() == whole.keys()
        for name, values in padded.items():
            assert len(values) == 4
            assert np.array_equal(values[:length], whole[name])
            assert not values[length:].any(), name


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    rbtool.record("CartPole-v1", tmp_path / "cartpole", episodes=1, seed=0)
    with pytest.raises(UsageError, match="expected 'keep' or 'drop'"):
        qlearning_arrays(tmp_path / "cartpole", timeouts="yes")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected 'zero'"):
        sequence_dataset(tmp_path / "cartpole", pad="one")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="gamma"):
        sequence_dataset(tmp_path / "cartpole", returns_to_go=True, gamma=2)


def test_several_observations_are_refused_with_the_command_that_joins_them(tmp_path: Path) -> None:
    data = FILE.parents[1] / "sb3" / "dict_two_envs.pkl"
    path = rbtool.convert(data, tmp_path / "dict", trust_pickle=True).path
    with pytest.raises(SchemaError, match=r"observation\.image") as caught:
        qlearning_arrays(path)
    assert "--flatten" in caught.value.hint
