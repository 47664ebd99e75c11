"""MinariReader: the contract of readers in each storage format, what it recognises, and its facts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from gymnasium import spaces
from minari_oracle import make_episode, write_minari
from pyarrow import dataset

from rbtool.converters.minari.reader import MinariReader
from rbtool.core.errors import DatasetNotFoundError, FormatError
from rbtool.core.format.locate import open_source
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.reader import Reader
from rbtool.core.testing.readers import ReaderTests
from rbtool.core.verbs.convert import convert

DATA = Path(__file__).parents[1] / "data" / "minari"
SPACE = spaces.Box(-np.inf, np.inf, (3,), np.float32)


class _SmallPieces(MinariReader):
    piece_bytes = 500


class MinariReaderTests(ReaderTests):
    folder: Path

    def source(self) -> Path:
        return self.folder

    def reader(self) -> type[Reader]:
        return MinariReader

    def with_small_pieces(self) -> Reader:
        return _SmallPieces(self.folder)


class TestHdf5(MinariReaderTests):
    folder = DATA / "griddict" / "random-infos-v0"


class TestImages(MinariReaderTests):
    folder = DATA / "pixel" / "random-v0"


class TestArrow(MinariReaderTests):
    folder = DATA / "cartpole" / "scripted-arrow-v0"


class TestParquet(MinariReaderTests):
    folder = DATA / "griddict" / "random-parquet-v0"


@pytest.mark.parametrize("name", ["pendulum/random-v0", "cartpole/scripted-arrow-v0", "griddict/random-parquet-v0"])
def test_the_folder_may_have_any_name_and_the_inner_one_will_do(name: str, tmp_path: Path) -> None:
    outer = shutil.copytree(DATA / name, tmp_path / "some where")
    inner = shutil.copytree(DATA / name / "data", tmp_path / "inner")
    with open_source(outer) as one, open_source(outer / "data") as two, open_source(inner) as three:
        assert one.facts().id == two.facts().id == three.facts().id == name
        assert one.digests() == two.digests() == three.digests()
        assert set(one.facts().documents) == {"metadata.json"}


def test_traces_of_a_download_do_not_matter(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "cartpole" / "scripted-arrow-v0", tmp_path / "it")
    for place in (folder, folder / "data"):
        (place / ".cache" / "huggingface").mkdir(parents=True)
        (place / ".cache" / "huggingface" / "metadata.json").write_text("{")
    with MinariReader(folder) as reader:
        assert reader.facts().steps == 1500
        assert not [name for name in reader.digests() if ".cache" in name]


def test_nothing_there() -> None:
    with pytest.raises(DatasetNotFoundError, match="there is nothing at"):
        MinariReader(Path("/nothing/here"))


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(FormatError, match="unknown format; supported: "):
        open_source(tmp_path)


def test_facts_of_a_nested_dataset() -> None:
    with MinariReader(DATA / "griddict" / "random-infos-v0") as reader:
        facts = reader.facts()
    found = {".".join(field.key): (field.dtype, field.shape, field.role, timing) for field, timing in facts.fields}
    assert found == {
        "observation.agent.heading": ("int64", (), "observation", "state"),
        "observation.agent.pos": ("int64", (2,), "observation", "state"),
        "observation.goal": ("float32", (2,), "observation", "state"),
        "observation.mission": ("uint8", (9,), "text", "state"),
        "observation.mission_length": ("int32", (), "text", "state"),
        "observation.visited": ("int8", (25,), "observation", "state"),
        "action": ("int64", (), "action", "step"),
        "reward": ("float64", (), "reward", "result"),
        "info.debug.pos_f": ("float64", (2,), "info", "state"),
        "info.debug.t": ("int64", (), "info", "state"),
        "info.distance": ("float64", (), "info", "state"),
        "info.success": ("bool", (), "info", "state"),
    }
    assert (facts.source, facts.id, facts.steps, len(facts.episode_numbers)) == (
        "minari", "griddict/random-infos-v0", 181, 15
    )  # fmt: skip


def test_spaces_are_strict_json_with_uniform_bounds_as_one_number() -> None:
    with MinariReader(DATA / "D4RL" / "door" / "human-v2") as reader:
        spaces_found = reader.facts().spaces
    assert spaces_found == {
        "observation": {"type": "Box", "dtype": "float64", "shape": [39], "low": "-inf", "high": "inf"},
        "action": {"type": "Box", "dtype": "float32", "shape": [28], "low": -1.0, "high": 1.0},
    }
    with MinariReader(DATA / "cartpole" / "scripted-v0") as reader:
        low = reader.facts().spaces["observation"]["low"]
    assert low == [-4.800000190734863, "-inf", -0.41887903213500977, "-inf"]


def test_the_metadata_files_are_kept_byte_for_byte() -> None:
    folder = DATA / "D4RL" / "door" / "human-v2"
    with MinariReader(folder) as reader:
        documents = reader.facts().documents
    assert documents == {
        "metadata.json": (folder / "data" / "metadata.json").read_bytes(),
        "namespace_metadata.json": (folder.parent / "namespace_metadata.json").read_bytes(),
    }


def test_env_metadata_are_those_of_torchrl() -> None:
    with MinariReader(DATA / "pendulum" / "random-v0") as reader:
        assert reader.facts().env_metadata == TORCHRL_PENDULUM


TORCHRL_PENDULUM: dict[str, Any] = {
    "env_spec": {
        "id": "Pendulum-v1", "entry_point": "gymnasium.envs.classic_control.pendulum:PendulumEnv",
        "reward_threshold": None, "nondeterministic": False, "max_episode_steps": 200, "order_enforce": True,
        "disable_env_checker": False, "kwargs": {}, "namespace": None, "name": "Pendulum", "version": 1,
        "additional_wrappers": [], "vector_entry_point": None,
    },
    "total_episodes": 5, "total_steps": 1000, "dataset_id": "pendulum/random-v0", "combined_datasets": [],
    "observation_space": {
        "type": "Box", "low": [-1.0, -1.0, -8.0], "high": [1.0, 1.0, 8.0], "dtype": "float32", "shape": [3]
    },
    "action_space": {"type": "Box", "low": [-2.0], "high": [2.0], "dtype": "float32", "shape": [1]},
    "data_path": "data", "minari_version": "0.5.4", "namespace": "pendulum", "dataset_name": "random", "version": 0,
}  # fmt: skip
"""What TorchRL 0.14 wrote for this very dataset, but for its absolute `data_path`."""


@pytest.mark.parametrize("name", ["tuple/trunc-v0", "griddict/random-infos-v0"])
def test_spaces_that_torchrl_cannot_say_have_no_env_metadata(name: str) -> None:
    with MinariReader(DATA / name) as reader:
        assert reader.facts().env_metadata is None


def test_text_in_a_dict_is_null_for_torchrl(tmp_path: Path) -> None:
    space = spaces.Dict(x=SPACE, t=spaces.Text(4), n=spaces.Discrete(3))
    episode = make_episode(space, SPACE, 3, np.random.default_rng(0))
    with MinariReader(write_minari(tmp_path, "made/text-v0", space, SPACE, [episode])) as reader:
        metadata = reader.facts().env_metadata or {}
    children = metadata["observation_space"]["subspaces"]
    assert children["t"] is None
    assert children["n"] == {"type": "Discrete", "n": 3, "dtype": "int64", "shape": []}
    assert (metadata["namespace"], metadata["dataset_name"], metadata["env_spec"]) == ("made", "text", None)


def write_hdf5(folder: Path, lengths: dict[str, int], **metadata: Any) -> Path:
    """Write a dataset the way old and odd tools may have done it."""
    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for name, steps in lengths.items():
            rows = np.arange(steps + 1.0) + 100 * int(name.split("_")[-1])
            for key, data in (
                ("observations", rows), ("actions", rows[:-1, None].astype(">f4")), ("rewards", rows[:-1]),
                ("terminations", np.zeros(steps, np.uint8)), ("truncations", np.arange(steps) + 1.0 == steps),
            ):  # fmt: skip
                file[f"{name}/{key}"] = data
    (folder / "data" / "metadata.json").write_text(json.dumps({"total_episodes": len(lengths)} | metadata))
    return folder


def test_very_old_metadata_without_format_and_spaces(tmp_path: Path) -> None:
    with MinariReader(write_hdf5(tmp_path / "old-v0", {"episode_0": 2, "episode_1": 3})) as reader:
        facts, pieces = reader.facts(), list(reader.pieces())
    assert (facts.id, facts.spaces, facts.env_metadata) == ("old-v0", {}, None)
    assert [(field.name, field.dtype, field.shape) for field, _ in facts.fields] == [
        ("observation", "float64", ()), ("action", "float32", (1,)), ("reward", "float64", ())
    ]  # fmt: skip
    assert pieces[1].columns["observation",].tolist() == [100, 101, 102, 103]
    assert pieces[1].truncated.tolist() == [False, False, True]


def test_numbers_with_holes_and_in_their_own_order(tmp_path: Path) -> None:
    lengths = {"episode_10": 1, "episode_9": 2, "episode_2": 3, "episode_100": 4}
    with MinariReader(write_hdf5(tmp_path / "holes", lengths)) as reader:
        facts = reader.facts()
        assert list(facts.episode_numbers) == [2, 9, 10, 100]
        assert [len(piece) for piece in reader.pieces()] == [3, 2, 1, 4]
        assert list(reader.facts([(9, 11)]).episode_numbers) == [9, 10]


def test_what_lies_beside_the_episodes_is_named(tmp_path: Path) -> None:
    folder = write_hdf5(tmp_path / "more", {"episode_0": 2})
    with h5py.File(folder / "data" / "main_data.hdf5", "r+") as file:
        file["notes"] = 3
    with MinariReader(folder) as reader:
        assert reader.facts().notes == ("'notes' is no episode and was left out",)


def test_rewards_of_two_types_are_widened_and_noted(tmp_path: Path) -> None:
    folder = write_hdf5(tmp_path / "whole", {"episode_0": 2, "episode_1": 3})
    with h5py.File(folder / "data" / "main_data.hdf5", "r+") as file:
        del file["episode_1/rewards"]
        file["episode_1/rewards"] = np.array([1, 0, 2**40 + 1])
    with MinariReader(folder) as reader:
        assert reader.facts().notes == ("rewards are float64 in 1, int64 in 1 episodes; float64 holds them all",)
        last = list(reader.pieces())[-1].columns["reward",]
    assert (last.dtype, last.tolist()) == (np.float64, [1.0, 0.0, 2.0**40 + 1])


def test_a_reward_that_cannot_be_widened_is_refused(tmp_path: Path) -> None:
    folder = write_hdf5(tmp_path / "whole", {"episode_0": 2, "episode_1": 1})
    with h5py.File(folder / "data" / "main_data.hdf5", "r+") as file:
        del file["episode_1/rewards"]
        file["episode_1/rewards"] = np.array([2**60 + 1])
    with MinariReader(folder) as reader, pytest.raises(FormatError, match=r"'rewards' of episode 1 is int64"):
        list(reader.pieces())


def test_images_of_one_jpeg_length_and_of_several(tmp_path: Path) -> None:
    space, draw = spaces.Box(0, 255, (32, 32, 3), np.uint8), np.random.default_rng(0)
    plain = [np.full((32, 32, 3), 7, np.uint8)] * 4
    episodes = [make_episode(space, SPACE, 3, draw, observations=plain), make_episode(space, SPACE, 3, draw)]
    folder = write_minari(tmp_path, "made/images-v0", space, SPACE, episodes)
    with h5py.File(folder / "data" / "main_data.hdf5") as file:
        assert file["episode_0/observations"].ndim == 2
        assert file["episode_1/observations"].ndim == 1
    with MinariReader(folder) as reader:
        first, second = (piece.columns["observation",] for piece in reader.pieces())
    assert first.shape == second.shape == (4, 32, 32, 3)
    assert np.ptp(first.astype(int)) <= 2
    assert np.ptp(second.astype(int)) > 50


def test_an_empty_dataset(tmp_path: Path) -> None:
    folder = write_minari(tmp_path, "made/none-v0", SPACE, spaces.Discrete(3), [])
    with MinariReader(folder) as reader:
        facts = reader.facts()
        assert (facts.steps, list(facts.episode_numbers), list(reader.pieces())) == (0, [], [])
        assert len(reader.episode_table()) == 0
    assert {field.name: field.dtype for field, _ in facts.fields} == {
        "observation": "float32", "action": "int64", "reward": "float64"
    }  # fmt: skip


def test_reading_needs_neither_minari_nor_gymnasium_nor_torch() -> None:
    script = (
        "import sys; from pathlib import Path; from rbtool.core.format.locate import open_source\n"
        f"for folder in Path({str(DATA)!r}).glob('*/*-v0'):\n"
        "    with open_source(folder) as reader: reader.facts(); list(reader.pieces())\n"
        "print({'minari', 'gymnasium', 'torch', 'tensordict'} & sys.modules.keys())"  # pyarrow imports pandas itself
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
@pytest.mark.parametrize("rows", [{"max_rows_per_group": 3}, {"max_rows_per_group": 3, "max_rows_per_file": 6}])
def test_an_arrow_episode_in_several_batches_and_files(rows: dict[str, int], data_format: str, tmp_path: Path) -> None:
    space, draw = spaces.Dict(x=SPACE, t=spaces.Text(4)), np.random.default_rng(0)
    every = range(8)
    infos = {
        "a": {"b": [row / 2 for row in every]},
        "s": [f"row {row}" for row in every],
        "l": [[1, row] for row in every],
    }
    episode = make_episode(space, SPACE, 7, draw, infos=infos)
    folder = write_minari(tmp_path, "made/one-v0", space, SPACE, [episode], data_format=data_format)
    whole = convert(folder, tmp_path / "whole")
    part = folder / "data" / "0" / f"part-0.{data_format}"
    table = dataset.dataset(part, format=data_format).to_table()
    part.unlink()
    dataset.write_dataset(
        table,
        part.parent,
        format=data_format,
        min_rows_per_group=1,
        existing_data_behavior="overwrite_or_ignore",
        **rows,
    )
    assert len(list(part.parent.glob("part-*"))) == (2 if "max_rows_per_file" in rows else 1)
    assert convert(folder, tmp_path / "split").content_digest == whole.content_digest


def test_a_slash_in_a_name_of_a_dict_space(tmp_path: Path) -> None:
    space = spaces.Dict({"a/b": SPACE, "c/d/e": SPACE})
    episode = make_episode(space, SPACE, 3, np.random.default_rng(0))
    convert(write_minari(tmp_path, "made/slash-v0", space, SPACE, [episode]), tmp_path / "ted")
    with TedReader(tmp_path / "ted") as reader:
        for name in space.spaces:
            found = reader.read(("next", "observation", name), 0, 3)
            assert found.tobytes() == episode.observations[name][1:].tobytes()


def test_a_type_that_the_space_does_not_say_is_kept_and_noted(tmp_path: Path) -> None:
    space, draw = spaces.Dict(x=SPACE, n=spaces.Discrete(5)), np.random.default_rng(0)
    rows = {"x": draw.normal(size=(4, 3)), "n": np.arange(4, dtype=np.int16)}
    episode = make_episode(space, SPACE, 3, draw, observations=rows)
    result = convert(write_minari(tmp_path, "made/types-v0", space, SPACE, [episode]), tmp_path / "ted")
    assert tuple(sorted(result.notes)) == (
        "observation.n is int16 in the data and int64 in the observation space; int16 is kept",
        "observation.x is float64 in the data and float32 in the observation space; float64 is kept",
    )
    with TedReader(tmp_path / "ted") as reader:
        assert reader.read(("next", "observation", "x"), 0, 3).tobytes() == rows["x"][1:].tobytes()
