"""`rbtool.adapters.sb3.ReplayBuffer` next to the buffers of Stable-Baselines3, and under its algorithms."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from made_datasets import write_fields

import rbtool
from rbtool.adapters.sb3 import ReplayBuffer
from rbtool.core.errors import MissingKeyError, SchemaError, UsageError
from rbtool.core.open_steps import open_steps

INSTALLED = importlib.util.find_spec("stable_baselines3") is not None
BOX = spaces.Box(-1, 1, (3,), np.float64)
DICT = spaces.Dict({"image": spaces.Box(0, 255, (2, 4, 4), np.uint8), "mode": spaces.Discrete(5)})
SPACES: dict[str, tuple[Any, Any]] = {
    "box": (BOX, spaces.Box(-2, 2, (2,), np.float64)),
    "images": (spaces.Box(0, 255, (2, 6, 6), np.uint8), spaces.Discrete(3)),
    "discrete": (spaces.Discrete(7), spaces.MultiDiscrete([2, 3])),
    "dict": (DICT, spaces.Discrete(3)),
}


@pytest.mark.skipif(INSTALLED, reason="Stable-Baselines3 is installed")
def test_without_the_library_the_error_says_how_to_get_it() -> None:
    with pytest.raises(UsageError, match="Stable-Baselines3") as caught:
        ReplayBuffer(10, BOX, BOX)
    assert caught.value.hint == "pip install 'rbtool[sb3]'"


def stacked(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {part: stacked([value[part] for value in values]) for part in values[0]}
    return np.stack(values)


def copied(values: Any) -> Any:
    return {part: rows.copy() for part, rows in values.items()} if isinstance(values, dict) else values.copy()


def fill(kind: str, n_envs: int, steps: int, *buffers: Any, seed: int = 0) -> None:
    """Add the same steps to all buffers, as vectorised environments that reset by themselves make them."""
    states, actions = SPACES[kind]
    draw = np.random.default_rng(seed)
    for number, space in enumerate(SPACES[kind]):
        space.seed(seed + number)
    before = stacked([states.sample() for _ in range(n_envs)])
    for _ in range(steps):
        after, reset = (stacked([states.sample() for _ in range(n_envs)]) for _ in range(2))
        action = stacked([actions.sample() for _ in range(n_envs)])
        done, reward = draw.random(n_envs) < 0.2, draw.normal(size=n_envs)
        infos = [{"TimeLimit.truncated": bool(end and draw.random() < 0.5)} for end in done]
        for buffer in buffers:
            buffer.add(copied(before), copied(after), action, reward, done, infos)
        before = copied(after)
        for one in np.flatnonzero(done):
            for target, source in zip(parts(before), parts(reset), strict=True):
                target[one] = source[one]


def parts(values: Any) -> list[Any]:
    return list(values.values()) if isinstance(values, dict) else [values]


def require_same_batches(one: Any, other: Any, size: int = 32) -> None:
    assert (one.size(), one.pos, one.full) == (other.size(), other.pos, other.full)
    for seed in range(3):
        batches = []
        for buffer in (one, other):
            np.random.seed(seed)  # noqa: NPY002
            batches.append(buffer.sample(size))
        assert type(batches[0]) is type(batches[1])
        for name in batches[0]._fields:
            values = [getattr(batch, name) for batch in batches]
            if values[0] is None:
                continue
            for left, right in zip(*map(parts, values), strict=True):
                assert (left.dtype, left.shape) == (right.dtype, right.shape), name
                assert torch.equal(left, right), name


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("steps", [1, 15, 50])
@pytest.mark.parametrize(
    "options", [{}, {"optimize_memory_usage": True}, {"handle_timeout_termination": False}], ids=str
)
def test_batches_are_those_of_the_library(
    kind: str, n_envs: int, steps: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Also in less memory, for which the library is not exact; also in files, and from a pickle."""
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    capacity = 20 * n_envs
    theirs = (buffers.DictReplayBuffer if kind == "dict" else buffers.ReplayBuffer)(
        capacity, *SPACES[kind], "cpu", n_envs, **{**options, "optimize_memory_usage": False}
    )
    ours = ReplayBuffer(capacity, *SPACES[kind], "cpu", n_envs, **options)
    mapped = ReplayBuffer(capacity, *SPACES[kind], "cpu", n_envs, **options, scratch_dir=tmp_path / "files")
    fill(kind, n_envs, steps, theirs, ours, mapped)
    for buffer in (ours, mapped, pickle.loads(pickle.dumps(ours)), pickle.loads(pickle.dumps(mapped))):
        require_same_batches(theirs, buffer)
        for name in ("actions", "rewards", "dones", "timeouts"):
            assert np.array_equal(getattr(theirs, name)[: theirs.size()], getattr(buffer, name)[: buffer.size()])
    again = pickle.loads(pickle.dumps(ours))
    fill(kind, n_envs, 7, theirs, again, seed=5)
    require_same_batches(theirs, again)
    assert (tmp_path / "files").is_dir()


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_less_memory_keeps_next_observations_at_ends_alone() -> None:
    pytest.importorskip("stable_baselines3")
    buffer = ReplayBuffer(1000, *SPACES["images"], "cpu", optimize_memory_usage=True)
    fill("images", 1, 300, buffer)
    assert not hasattr(buffer, "next_observations")
    assert len(buffer._next) == buffer.dones[:299].sum() + 1
    buffer.reset()
    assert buffer.size() == len(buffer._next) == 0


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"scratch_dir": "files"}, {"optimize_memory_usage": True}], ids=str)
def test_training_is_that_with_the_library_own_buffer(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    monkeypatch.chdir(tmp_path)
    weights = []
    for given in ({}, {"replay_buffer_class": ReplayBuffer, "replay_buffer_kwargs": dict(options)}):
        memory = given.get("replay_buffer_kwargs", {}).pop("optimize_memory_usage", False)
        env = sb3.common.env_util.make_vec_env("Pendulum-v1", n_envs=2, seed=3)
        model = sb3.SAC(
            "MlpPolicy", env, buffer_size=150, learning_starts=20, batch_size=16, seed=3, device="cpu",
            policy_kwargs={"net_arch": [16]}, optimize_memory_usage=memory, **given,
        )  # fmt: skip
        model.learn(240, log_interval=None)
        weights.append(torch.cat([one.flatten() for one in model.policy.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("algorithm", "env_id"), [("TD3", "Pendulum-v1"), ("DQN", "CartPole-v1")])
def test_an_algorithm_trains_saves_and_goes_on(algorithm: str, env_id: str, tmp_path: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    make = getattr(sb3, algorithm)
    vec = sb3.common.vec_env
    env = vec.VecNormalize(vec.DummyVecEnv([lambda: gym.make(env_id)]))
    options = {"replay_buffer_class": ReplayBuffer, "buffer_size": 500, "learning_starts": 20, "device": "cpu"}
    model = make("MlpPolicy", env, seed=0, **options)
    model.learn(60, log_interval=None)
    plain, normal = (model.replay_buffer.sample(400, env=one) for one in (None, env))
    assert normal.observations.abs().max() <= 10
    assert not torch.equal(plain.observations, normal.observations)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    again = make.load(tmp_path / "model", env=env, device="cpu")
    again.load_replay_buffer(tmp_path / "buffer.pkl")
    require_same_batches(model.replay_buffer, again.replay_buffer)
    again.learn(30, log_interval=None, reset_num_timesteps=False)
    assert 90 <= again.replay_buffer.size() <= 92  # a DQN takes four steps at once
    result = rbtool.convert(tmp_path / "buffer.pkl", tmp_path / "dataset", trust_pickle=True)
    assert result.steps == 60
    with open_steps(result.path) as reader:
        assert np.array_equal(reader.read(("observation",), 0, 60), model.replay_buffer.observations[:60, 0])
        assert np.array_equal(
            reader.read(("next", "observation"), 0, 60), model.replay_buffer.next_observations[:60, 0]
        )


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_a_model_starts_with_a_dataset(tmp_path: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    made = rbtool.record("Pendulum-v1", tmp_path / "pendulum", episodes=4, seed=1, max_steps=25)
    model = sb3.SAC("MlpPolicy", "Pendulum-v1", replay_buffer_class=ReplayBuffer, buffer_size=300, device="cpu", seed=0)
    model.replay_buffer.add_dataset(made.path)
    buffer = model.replay_buffer
    with open_steps(made.path) as reader:
        for name, key in (("observations", ("observation",)), ("next_observations", ("next", "observation"))):
            assert np.array_equal(getattr(buffer, name)[:100, 0], reader.read(key, 0, 100))
        actions = reader.read(("action",), 0, 100)
        assert np.array_equal(model.policy.scale_action(actions), buffer.actions[:100, 0])
        assert np.array_equal(buffer.rewards[:100], reader.read(("next", "reward"), 0, 100).astype(np.float32))
    assert buffer.dones.sum() == buffer.timeouts.sum() == 4
    assert (buffer.sample(64).dones == 0).all()
    model.learn(150, log_interval=None)
    assert buffer.size() == 250


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"optimize_memory_usage": True}], ids=str)
def test_environments_share_a_dataset(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    made = rbtool.record("CartPole-v1", tmp_path / "cartpole", episodes=5, seed=2)
    env = gym.make("CartPole-v1")
    assert made.steps % 3
    with pytest.warns(UserWarning, match="left out"):
        buffer = ReplayBuffer.from_dataset(made.path, env.observation_space, env.action_space, "cpu", 3, **options)
    share = made.steps // 3
    assert (buffer.size(), buffer.n_envs) == (share, 3)
    with open_steps(made.path) as reader:
        for one in range(3):
            rows = np.arange(one * share, (one + 1) * share)
            places = np.arange(share) * 3 + one
            for found, key in (
                (buffer._states_after(places)[""], ("next", "observation")),
                (buffer.actions[:, one], ("action",)),
            ):
                expected = reader.read(key, 0, made.steps)[rows]
                assert np.array_equal(found[:share], expected.reshape(share, -1)), key


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_dict_observations_of_a_dataset_and_what_does_not_fit(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3")
    rows = np.arange(15, dtype=np.float32).reshape(5, 3)
    fields = {
        "observation.image": rows,
        "observation.mode": np.arange(5),
        "action": np.arange(4),
        "reward": rows[:4, 0],
    }
    path = write_fields(tmp_path / "dict", fields)
    image = spaces.Box(-9, 99, (3,), np.float32)
    space = spaces.Dict({"image": image, "mode": spaces.Discrete(9)})
    buffer = ReplayBuffer.from_dataset(path, space, spaces.Discrete(9), "cpu")
    assert np.array_equal(buffer.observations["image"][:, 0], rows[:4])
    assert np.array_equal(buffer.next_observations["mode"][:, 0, 0], [1, 2, 3, 4])
    assert buffer.dones[:, 0].tolist() == [False, False, False, True]
    with pytest.raises(SchemaError, match="room for 3"):
        ReplayBuffer.from_dataset(path, space, spaces.Discrete(9), "cpu", buffer_size=3)
    other = spaces.Dict({"image": spaces.Box(0, 255, (3,), np.uint8), "mode": spaces.Discrete(9)})
    with pytest.raises(SchemaError, match=r"observation\.image is float32 \[3\]"):
        ReplayBuffer.from_dataset(path, other, spaces.Discrete(9), "cpu")
    with pytest.raises(MissingKeyError, match="observation"):
        ReplayBuffer.from_dataset(path, image, spaces.Discrete(9), "cpu")
