"""Exports to files of other libraries: D4RL, d3rlpy, Stable-Baselines3 and robomimic."""

from __future__ import annotations

import json
import pickle
from abc import abstractmethod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from made_datasets import write_fields

import rbtool
from rbtool.converters.d3rlpy.reader import D3rlpyExporter
from rbtool.converters.d4rl.export import D4rlExporter
from rbtool.converters.robomimic.export import RobomimicExporter
from rbtool.converters.sb3.export import Sb3Exporter
from rbtool.core.errors import SchemaError
from rbtool.core.format.converter import Chosen, Sink
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.schema import EPISODE, NEXT_DONE, Key
from rbtool.core.testing.datasets import write_walks
from rbtool.core.testing.sinks import ROWS, SinkTests

DATA = Path(__file__).parents[1] / "data"
LENGTHS = (3, 4, 1)
"""Steps of the episodes that `SinkTests` chooses."""


class LibrarySinkTests(SinkTests):
    """The contract, but for leaves that the format names as left out, and for what follows from other leaves."""

    @abstractmethod
    def arrays(self, path: Path) -> dict[Key, Any]:
        """The rows of each leaf that the file has."""

    def read(self, path: Path, key: Key) -> Any:
        return self.arrays(path)[key]

    def test_every_leaf_has_the_rows_of_the_chosen_episodes(self, tmp_path: Path) -> None:
        with self.chosen(tmp_path).reader as reader:
            chosen = Chosen(reader, np.array(ROWS))
            sink = self.sink()(chosen, "test")
            sink.write(tmp_path / "file", lambda size: None)
            found = self.arrays(tmp_path / "file")
            left_out = {one.key for one in sink.dropped}
            for field in reader.fields:
                if field.name in left_out or field.key in {EPISODE, NEXT_DONE}:
                    assert field.key not in found
                    continue
                expected = np.concatenate(list(chosen.chunks(field.key, field.row_bytes)))
                assert found[field.key].shape == expected.shape, field.name
                assert np.array_equal(found[field.key], expected.astype(found[field.key].dtype)), field.name


class TestD4rl(LibrarySinkTests):
    def sink(self) -> type[Sink]:
        return D4rlExporter

    def arrays(self, path: Path) -> dict[Key, Any]:
        with h5py.File(path) as file:
            assert file["observations"].dtype == np.float64
            return {
                ("observation",): file["observations"][()],
                ("next", "observation"): file["next_observations"][()],
                ("action",): file["actions"][()],
                ("info", "success"): file["infos/success"][()],
                ("next", "reward"): file["rewards"][()][:, None],
                ("next", "terminated"): file["terminals"][()][:, None],
                ("next", "truncated"): file["timeouts"][()][:, None],
            }


class TestD3rlpy(LibrarySinkTests):
    def sink(self) -> type[Sink]:
        return D3rlpyExporter

    def arrays(self, path: Path) -> dict[Key, Any]:
        with h5py.File(path) as file:
            found = {
                name: [file[f"{name}_{number}"][()] for number in range(int(file["num_episodes"][()]))]
                for name in file["columns"].asstr()[()]
            }
        assert [len(one) for one in found["rewards"]] == list(LENGTHS)
        last = [np.arange(steps) == steps - 1 for steps in LENGTHS]
        terminated = np.concatenate([one & end for one, end in zip(found["terminated"], last, strict=True)])
        states = np.concatenate(found["observations"])
        with open_steps(path.parent / "walks") as reader:  # what is not in the file: after last steps, and both flags
            truncated = [reader.read(("next", "truncated"), start, start + 1) for start in (0, 1, 2, 5, 6, 7, 8, 9)]
            after = reader.read(("next", "observation"), 0, 10)[[0, 1, 2, 5, 6, 7, 8, 9]]
        inside = ~np.concatenate(last)
        assert np.array_equal(np.roll(states, -1, 0)[inside], after[inside])
        return {
            ("observation",): states,
            ("next", "observation"): after,
            ("action",): np.concatenate(found["actions"]),
            ("info", "success"): np.concatenate(found["success"]),
            ("next", "reward"): np.concatenate(found["rewards"]),
            ("next", "terminated"): terminated[:, None],
            ("next", "truncated"): np.concatenate(truncated),
        }


class TestSb3(LibrarySinkTests):
    def sink(self) -> type[Sink]:
        return Sb3Exporter

    def arrays(self, path: Path) -> dict[Key, Any]:
        state = state_of(path)
        count = state["pos"]
        assert not state["full"]
        assert state["buffer_size"] == len(state["rewards"]) == count + 1
        assert not state["actions"][count].any()
        dones, timeouts = (state[name][:count] for name in ("dones", "timeouts"))
        with open_steps(path.parent / "walks") as reader:  # an episode that ended with both flags is terminated
            both = np.flatnonzero(
                reader.read(("next", "terminated"), 9, 10) & reader.read(("next", "truncated"), 9, 10)
            )
        timeouts = timeouts.copy()
        timeouts[-1 - both] = 1
        return {
            ("observation",): state["observations"][:count, 0],
            ("next", "observation"): state["next_observations"][:count, 0],
            ("action",): state["actions"][:count, 0],
            ("next", "reward"): state["rewards"][:count],
            ("next", "terminated"): ((dones > 0) & (state["timeouts"][:count] == 0)),
            ("next", "truncated"): timeouts > 0,
        }


class TestRobomimic(LibrarySinkTests):
    def sink(self) -> type[Sink]:
        return RobomimicExporter

    def arrays(self, path: Path) -> dict[Key, Any]:
        with h5py.File(path) as file:
            assert list(file["data"]) == ["demo_0", "demo_2", "demo_3"]
            assert file["data"].attrs["total"] == sum(LENGTHS)
            demos = list(file["data"].values())
            assert [demo.attrs["num_samples"] for demo in demos] == list(LENGTHS)
            assert [demo.attrs["seed"] for demo in demos] == [7, 9, 10]
            assert demos[0].attrs["task"] == "walk 0 é"
            dones = [demo["dones"][()] for demo in demos]
            assert all(one.tolist() == [0] * (len(one) - 1) + [1] for one in dones)
            found = {
                key: np.concatenate([demo[name][()] for demo in demos])
                for key, name in {
                    ("observation",): "obs/flat", ("next", "observation"): "next_obs/flat", ("action",): "actions",
                    ("info", "success"): "success", ("next", "reward"): "rewards",
                }.items()
            }  # fmt: skip
            terminated = [demo["dones"][()] * (demo.attrs["rbtool_export"] == "terminated") for demo in demos]
        found["next", "reward"] = found["next", "reward"][:, None]
        found["next", "terminated"] = np.concatenate(terminated)[:, None].astype(bool)
        with open_steps(path.parent / "walks") as reader:  # of an episode with both flags, one is there
            found["next", "truncated"] = reader.read(("next", "truncated"), 0, 10)[[0, 1, 2, 5, 6, 7, 8, 9]]
        return found


class _Stub:
    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Gives classes that are not installed a stub."""

    def find_class(self, module: str, name: str) -> Any:
        return _Stub if module.startswith("stable_baselines3") else super().find_class(module, name)


def state_of(path: Path) -> dict[str, Any]:
    """The attributes of the buffer in a pickle."""
    with path.open("rb") as file:
        return _Unpickler(file).load().state  # type: ignore[no-any-return]


HORIZON = {"hopper_random_v0": 50, "door_demos": 40, "kitchen_like_no_timeouts": 60}
SOURCES = [
    *((to, file, {"final_step": "repeat"}) for to in ("d4rl", "d3rlpy") for file in sorted((DATA / to).glob("*.h*5"))),
    ("robomimic", DATA / "robomimic/low_dim_v15.hdf5", {}),
    ("robomimic", DATA / "robomimic/isaac_stack_cube.hdf5", {"final_step": "repeat"}),
    *(("sb3", DATA / "sb3" / name, {"trust_pickle": True}) for name in ("dict_two_envs.pkl", "her_one_env.pkl")),
    *(("sb3", DATA / "sb3" / name, {}) for name in ("full.npz", "partial.npz")),
]


@pytest.mark.parametrize(("to", "file", "options"), SOURCES, ids=[f"{to}-{file.stem}" for to, file, _ in SOURCES])
def test_a_file_of_the_library_comes_back(to: str, file: Path, options: dict[str, Any], tmp_path: Path) -> None:
    """What was converted from a library and is exported to it again is the same dataset."""
    horizon = {"horizon": HORIZON[file.stem]} if file.stem in HORIZON else {}
    first = rbtool.convert(file, tmp_path / "first", **options, **horizon)
    exported = rbtool.export(first.path, tmp_path / "exported", to=to)
    trust = {"trust_pickle": True} if to == "sb3" else {}
    again = rbtool.convert(exported.path, tmp_path / "again", **options | trust)
    assert exported.dropped_keys == ()
    assert again.content_digest == first.content_digest
    with open_steps(first.path) as one, open_steps(again.path) as other:
        documents = [reader.documents() for reader in (one, other)]
        assert one.episodes.columns().keys() == other.episodes.columns().keys()
        for name, column in one.episodes.columns().items():
            assert np.array_equal(column, other.episodes.columns()[name]), name
        assert one.episode_text == other.episode_text
    for found in documents:
        document = json.loads(found.pop("metadata.json", b"{}"))
        document.get("data", {}).pop("total", None)  # a published file states a wrong one
        found["metadata.json"] = json.dumps(document).encode()
    assert documents[0] == documents[1]


@pytest.mark.parametrize("name", ["hopper_random-v2.hdf5", "antmaze_like_goal.hdf5"])
def test_a_d4rl_file_is_the_one_it_was(name: str, tmp_path: Path) -> None:
    first = rbtool.convert(DATA / "d4rl" / name, tmp_path / "first", final_step="repeat")
    rbtool.export(first.path, tmp_path / "again.hdf5", to="d4rl")

    def content(path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def visit(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset):
                found[name] = item[()]

        with h5py.File(path) as file:
            file.visititems(visit)
        return found

    one, other = content(DATA / "d4rl" / name), content(tmp_path / "again.hdf5")
    assert one.keys() == other.keys()
    for path, values in one.items():
        assert np.array_equal(values, other[path]), path
        assert path.startswith("metadata/") or values.dtype == other[path].dtype, path


@pytest.mark.parametrize("to", ["d4rl", "sb3", "d3rlpy", "robomimic"])
def test_notes_name_what_a_format_cannot_say(to: str, tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", [(3, "terminated"), (2, "both"), (4, "truncated")])
    result = rbtool.export(tmp_path / "walks", tmp_path / "file", to=to, episodes="1:3")
    notes = " / ".join(result.notes)
    assert ("counted from 0" in notes) == (to != "robomimic")
    assert ("1 episode that ended terminated and truncated" in notes) == (to != "d4rl")
    assert {one["key"] for one in result.dropped_keys} == {"next.info.success"} | (
        {"info.success"} if to == "sb3" else set()
    )


@pytest.mark.parametrize("to", ["d4rl", "sb3", "d3rlpy", "robomimic"])
def test_several_actions_are_refused_with_the_command_that_joins_them(to: str, tmp_path: Path) -> None:
    arm, hand = np.ones((3, 2), np.float32), np.ones((3, 1), np.float32)
    fields = {"observation": np.ones((4, 2), np.float32), "action.arm": arm, "action.hand": hand, "reward": hand[:, 0]}
    write_fields(tmp_path / "two", fields)
    with pytest.raises(SchemaError, match=r"action\.arm, action\.hand") as caught:
        rbtool.export(tmp_path / "two", tmp_path / "file", to=to)
    assert "--cat action=action.arm,action.hand" in caught.value.hint
    assert not (tmp_path / "file").exists()


def test_actions_for_stable_baselines_are_scaled_from_their_bounds(tmp_path: Path) -> None:
    made = rbtool.record("Pendulum-v1", tmp_path / "pendulum", episodes=2, seed=1, max_steps=20)
    result = rbtool.export(made.path, tmp_path / "file", to="sb3")
    assert any("scaled from the bounds" in note for note in result.notes)
    state = state_of(tmp_path / "file")
    with open_steps(made.path) as reader:
        actions = reader.read(("action",), 0, 40)
    assert np.allclose(state["actions"][:40, 0] * 2, actions)
    assert state["action_space"].high == 2
    assert state["dones"].sum() == state["timeouts"].sum() == 2


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_stable_baselines_loads_an_export(tmp_path: Path) -> None:
    stable_baselines3 = pytest.importorskip("stable_baselines3")
    made = rbtool.record("Pendulum-v1", tmp_path / "pendulum", episodes=3, seed=1, max_steps=30)
    rbtool.export(made.path, tmp_path / "buffer.pkl", to="sb3")
    model = stable_baselines3.SAC("MlpPolicy", "Pendulum-v1", device="cpu", seed=0)
    model.load_replay_buffer(tmp_path / "buffer.pkl")
    assert model.replay_buffer.size() == 90
    model.learn(total_timesteps=110, log_interval=None)
    assert model.replay_buffer.full


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["vector", "tuple"])
def test_d3rlpy_loads_an_export(name: str, tmp_path: Path) -> None:
    dataset = pytest.importorskip("d3rlpy.dataset")
    made = rbtool.convert(DATA / "d3rlpy" / f"{name}.h5", tmp_path / "made", final_step="repeat")
    rbtool.export(made.path, tmp_path / "file.h5", to="d3rlpy")
    buffers = []
    for path in (DATA / "d3rlpy" / f"{name}.h5", tmp_path / "file.h5"):
        with path.open("rb") as file:
            buffers.append(dataset.ReplayBuffer.load(file, dataset.InfiniteBuffer()))
    assert buffers[0].size() == buffers[1].size()
    assert buffers[0].transition_count == buffers[1].transition_count
    for one, other in zip(*(buffer.episodes for buffer in buffers), strict=True):
        assert one.terminated == other.terminated
        for column in ("observations", "actions", "rewards"):
            pairs = [getattr(episode, column) for episode in (one, other)]
            parts = zip(*pairs, strict=True) if isinstance(pairs[0], list) else [pairs]
            assert all(np.array_equal(a, b) for a, b in parts), column
