"""`MinariReader`: the contract of readers in each storage format, random datasets, and damaged or hostile ones."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
from cases import each
from conversions import WrittenReaderTests, column, converted, refused, written
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from minari_oracle import NAMES, SPACES, assert_equals_minari, make_episode, write_minari
from PIL import Image
from pyarrow import dataset

from rbtool.converters.minari.reader import MinariReader, decode_images
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, UsageError
from rbtool.core.format.converter import Reader
from rbtool.core.format.locate import open_source
from rbtool.core.verbs.convert import convert
from rbtool.core.verbs.inspect import inspect

DATA = Path(__file__).parents[1] / "data" / "minari"
SPACE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
SAMPLES = ("griddict/random-infos-v0", "pixel/random-v0", "cartpole/scripted-arrow-v0", "griddict/random-parquet-v0")


class TestReader(WrittenReaderTests):
    kind, piece_bytes = MinariReader, 500
    made = written({name: lambda _, name=name: DATA / name for name in SAMPLES})

    def reader(self) -> type[Reader]:
        return MinariReader


@each("name", ["pendulum/random-v0", "cartpole/scripted-arrow-v0", "griddict/random-parquet-v0"])
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


def test_a_folder_that_is_absent_is_not_found() -> None:
    with pytest.raises(DatasetNotFoundError, match="not found"):
        MinariReader(Path("/nothing/here"))


def test_a_buffer_is_not_opened_on_a_raw_dataset() -> None:
    with pytest.raises(UsageError, match=r"a TED dataset is needed; .* is Minari") as caught:
        load_dataset(DATA / "tuple" / "trunc-v0")
    assert "rbtool convert" in caught.value.hint


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


def test_env_metadata_equal_those_of_torchrl() -> None:
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


@each("name", ["tuple/trunc-v0", "griddict/random-infos-v0"])
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


def test_episode_numbers_may_have_gaps_and_are_sorted_as_numbers(tmp_path: Path) -> None:
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
        assert reader.facts().notes == ("'notes' is not an episode and was left out",)


@each(("values", "widened"), [([1, 0, 2**40 + 1], [1.0, 0.0, 2.0**40 + 1]), ([1, 0, 2**60 + 1], None)])
def test_rewards_of_two_types_are_widened_and_noted_or_refused(
    values: list[int], widened: list[float] | None, tmp_path: Path
) -> None:
    folder = write_hdf5(tmp_path / "whole", {"episode_0": 2, "episode_1": 3})
    edit(folder, lambda file: put(file, "episode_1/rewards", np.array(values)))
    if widened is None:
        refused(folder, "'rewards' of episode 1 is int64")
        return
    with MinariReader(folder) as reader:
        assert reader.facts().notes == ("rewards are float64 in 1, int64 in 1 episodes; float64 holds them all",)
        last = list(reader.pieces())[-1].columns["reward",]
    assert (last.dtype, last.tolist()) == (np.float64, widened)


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


@each("data_format", ["arrow", "parquet"])
@each("rows", [{"max_rows_per_group": 3}, {"max_rows_per_group": 3, "max_rows_per_file": 6}])
def test_an_arrow_episode_in_several_batches_and_files(rows: dict[str, int], data_format: str, tmp_path: Path) -> None:
    space, draw = spaces.Dict(x=SPACE, t=spaces.Text(4)), np.random.default_rng(0)
    infos = {
        "a": {"b": [row / 2 for row in range(8)]}, "s": [f"row {row}" for row in range(8)],
        "l": [[1, row] for row in range(8)],
    }  # fmt: skip
    episode = make_episode(space, SPACE, 7, draw, infos=infos)
    folder = write_minari(tmp_path, "made/one-v0", space, SPACE, [episode], data_format=data_format)
    whole = convert(folder, tmp_path / "whole")
    part = folder / "data" / "0" / f"part-0.{data_format}"
    table = dataset.dataset(part, format=data_format).to_table()
    part.unlink()
    how = {"format": data_format, "min_rows_per_group": 1, "existing_data_behavior": "overwrite_or_ignore"}
    dataset.write_dataset(table, part.parent, **how, **rows)
    assert len(list(part.parent.glob("part-*"))) == (2 if "max_rows_per_file" in rows else 1)
    assert convert(folder, tmp_path / "split").content_digest == whole.content_digest


def test_a_slash_in_a_name_of_a_dict_space_is_kept(tmp_path: Path) -> None:
    space = spaces.Dict({"a/b": SPACE, "c/d/e": SPACE})
    episode = make_episode(space, SPACE, 3, np.random.default_rng(0))
    with converted(write_minari(tmp_path, "made/slash-v0", space, SPACE, [episode]), tmp_path / "ted") as reader:
        for name in space.spaces:
            found = reader.read(("next", "observation", name), 0, 3)
            assert found.tobytes() == episode.observations[name][1:].tobytes()


def test_a_type_that_the_space_does_not_say_is_kept_and_noted(tmp_path: Path) -> None:
    space, draw = spaces.Dict(x=SPACE, n=spaces.Discrete(5)), np.random.default_rng(0)
    rows = {"x": draw.normal(size=(4, 3)), "n": np.arange(4, dtype=np.int16)}
    episode = make_episode(space, SPACE, 3, draw, observations=rows)
    with converted(write_minari(tmp_path, "made/types-v0", space, SPACE, [episode]), tmp_path / "ted") as reader:
        assert tuple(sorted(reader.manifest.notes)) == (
            "observation.n is int16 in the data and int64 in the observation space; int16 is kept",
            "observation.x is float64 in the data and float32 in the observation space; float64 is kept",
        )
        assert column(reader, "next.observation.x").tobytes() == rows["x"][1:].tobytes()


SPACE_INPUT = spaces.Dict(x=spaces.Box(-np.inf, np.inf, (3,), np.float64), t=spaces.Text(5))
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)
LENGTHS = [4, 1, 6]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, draw = tmp_path_factory.mktemp("minari"), np.random.default_rng(3)
    episodes = [make_episode(SPACE_INPUT, ACTIONS, steps, draw) for steps in LENGTHS]
    return {
        name: write_minari(root, f"made/{name}-v0", SPACE_INPUT, ACTIONS, episodes, data_format=name)
        for name in ("hdf5", "arrow", "parquet")
    }


def refused_with(folder: Path, sentence: str, kind: type[FormatError] = FormatError, **how: Any) -> None:
    """The message begins with the sentence."""
    refused(folder, f"^{re.escape(sentence)}", kind, **how)


@pytest.fixture(params=["arrow", "parquet"])
def tables(request: pytest.FixtureRequest, originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals[request.param], tmp_path / "source"))


def part_of(folder: Path, episode: int) -> Path:
    (part,) = (folder / "data" / str(episode)).glob("part-0.*")
    return part


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals["hdf5"], tmp_path / "source"))


def edit(folder: Path, change: Callable[[h5py.File], Any]) -> None:
    with h5py.File(folder / "data" / "main_data.hdf5", "r+") as file:
        change(file)


def put(file: h5py.File, path: str, data: Any) -> None:
    del file[path]
    file.create_dataset(path, data=data)


def say(folder: Path, **entries: Any) -> None:
    path = folder / "data" / "metadata.json"
    document = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not ...}))


LENGTHS_DIFFER = "columns with one row for each step differ in length: "
STRUCTURE: list[tuple[Callable[[h5py.File], Any], str]] = [
    (lambda f: f.__delitem__("episode_1/rewards"), "episode 1 has no 'rewards'"),
    (lambda f: f.__delitem__("episode_2/truncations"), "episode 2 has no 'truncations'"),
    (lambda f: f.__delitem__("episode_0/actions"), "episode 0 has no 'actions'"),
    (lambda f: f.__delitem__("episode_0/observations"), "episode 0 has no 'observations/x'"),
    (lambda f: f.__delitem__("episode_0/observations/t"), "episode 0 has no 'observations/t'"),
    (
        lambda f: put(f, "episode_2/observations/x", np.zeros((6, 3))),
        "episode 2 has 6 rows of 'observations/x' for 6 steps, expected 7",
    ),
    (
        lambda f: put(f, "episode_2/actions", np.zeros((5, 2), "f4")),
        f"episode 2: {LENGTHS_DIFFER}actions 5, rewards 6, terminations 6, truncations 6",
    ),
    (
        lambda f: put(f, "episode_0/rewards", np.zeros(3)),
        f"episode 0: {LENGTHS_DIFFER}actions 4, rewards 3, terminations 4, truncations 4",
    ),
    (
        lambda f: put(f, "episode_0/terminations", np.zeros(9, bool)),
        f"episode 0: {LENGTHS_DIFFER}actions 4, rewards 4, terminations 9, truncations 4",
    ),
    (
        lambda f: put(f, "episode_1/observations/x", np.zeros((2, 3), "f4")),
        "episode 1: 'observations/x' is float32, but float64 in episode 0",
    ),
    (
        lambda f: put(f, "episode_1/observations/x", np.zeros((2, 4))),
        "episode 1: 'observations/x' has rows of shape [4], but the observation space says [3]",
    ),
    (
        lambda f: put(f, "episode_1/observations/x", ["a", "b"]),
        "episode 1: 'observations/x' does not hold array, as the observation space says: it holds text",
    ),
    (
        lambda f: put(f, "episode_1/observations/t", [1, 2]),
        "episode 1: 'observations/t' does not hold text, as the observation space says: it holds array",
    ),
    (
        lambda f: f.create_dataset("episode_1/observations/z", data=np.zeros(2)),
        "episode 1 has 'observations/z', which is not in the observation space",
    ),
    (
        lambda f: put(f, "episode_0/rewards", np.zeros((4, 2))),
        "episode 0: 'rewards' is not one number for each step",
    ),
    (
        lambda f: put(f, "episode_0/observations/t", np.array([b"\xff"] * 5, h5py.string_dtype())),
        "'observations/t' of episode 0 is not UTF-8 text",
    ),
    (
        lambda f: put(f, "episode_1/observations/t", ["a", "b" * 65537]),
        "'observations/t' of episode 1 has 65,537 bytes of text in row 1; rows of up to 65,536 bytes can be kept",
    ),
    (
        lambda f: put(f, "episode_0/truncations", [0, 0, 2, 1]),
        "episode 0 has 2 for 'truncations' of step 2, expected 0 or 1",
    ),
    (
        lambda f: [put(f, f"episode_1/{name}", np.zeros((0, 2) if name == "actions" else 0)) for name in STEPWISE],
        "episode 1 has no steps; every episode needs at least one",
    ),
    (
        lambda f: f.create_group("episode_1/infos/" + "/".join("x" * 40)),
        "episode 1 is nested more than 32 groups deep",
    ),
    (
        lambda f: f["episode_1"].create_dataset(b"caf\xe9", data=[1]),
        r"the name b'caf\xe9' in episode 1 is not UTF-8",
    ),
]  # fmt: skip
STEPWISE = ("actions", "rewards", "terminations", "truncations")


@each(("change", "sentence"), STRUCTURE)
def test_an_episode_that_is_not_sound_is_refused(
    change: Callable[[h5py.File], Any], sentence: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(originals["hdf5"], tmp_path / "source"))
    edit(folder, change)
    refused_with(folder, sentence)


def test_a_sound_part_of_a_damaged_dataset_can_be_had(folder: Path, originals: dict[str, Path], tmp_path: Path) -> None:
    edit(folder, STRUCTURE[0][0])
    refused_with(folder, "episode 1 has no 'rewards'", episodes="1:3")
    convert(folder, tmp_path / "ted", episodes="0,2")
    assert assert_equals_minari(tmp_path / "ted", originals["hdf5"], [0, 2]) > 0


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"total_steps": 12}, "metadata.json says 12 steps, but the data have 11"),
        ({"total_episodes": 4000}, "metadata.json says 4,000 episodes, but the data have 3"),
        ({"total_steps": -1}, "total_steps in metadata.json is -1, expected a whole number that is not negative"),
        ({"data_format": "zarr"}, "data_format in metadata.json is 'zarr'; known: hdf5, arrow, parquet"),
        ({"data_format": "arrow"}, "data_format in metadata.json is 'arrow', but the files in"),
        ({"observation_space": "{"}, "observation_space in metadata.json is not JSON:"),
        ({"action_space": '{"type": "Box"}'}, "action_space in metadata.json has a space of type Box without 'dtype'"),
        (
            {"action_space": '{"type": "Graph"}'},
            "action_space in metadata.json has a space of type 'Graph'; known: Box, Dict, Discrete,",
        ),
        ({"dataset_id": 3}, "dataset_id in metadata.json is 3, expected a name"),
    ],
)
def test_metadata_that_are_wrong_are_refused(
    entries: dict[str, Any], sentence: str, folder: Path, tmp_path: Path
) -> None:
    say(folder, **entries)
    refused_with(folder, sentence)


@pytest.mark.parametrize("entries", [{"total_steps": 12}, {"total_episodes": 4}])
def test_wrong_totals_do_not_matter_for_chosen_episodes(entries: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    say(folder, **entries)
    assert "--episodes 0:3" in refused(folder, "metadata.json says").hint
    assert convert(folder, tmp_path / "ted", episodes="0:3").steps == 11


def test_files_that_are_missing_or_no_metadata_are_refused(folder: Path) -> None:
    metadata = folder / "data" / "metadata.json"
    sound = metadata.read_text()
    for text, sentence in (("{", "is not JSON"), ("[]", "holds a JSON list, expected an object")):
        metadata.write_text(text)
        refused(folder, sentence)
    metadata.unlink()
    refused(folder, "metadata.json is missing")
    metadata.write_text(sound)
    (folder / "data" / "main_data.hdf5").unlink()
    refused(folder, "main_data.hdf5 is missing")


@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.999])
def test_an_hdf5_file_that_was_cut_is_refused(share: float, folder: Path) -> None:
    path = folder / "data" / "main_data.hdf5"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    refused_with(folder, f"the structure in {path} cannot be read, the file is damaged or was cut:", CorruptDataError)


def test_an_hdf5_file_that_is_empty_though_episodes_are_promised_is_refused(folder: Path) -> None:
    (folder / "data" / "main_data.hdf5").write_bytes(b"")
    refused_with(folder, "metadata.json says 3 episodes, but the data have 0")


def test_an_hdf5_file_with_holes_in_it_is_refused(folder: Path) -> None:
    path = folder / "data" / "main_data.hdf5"
    data = bytearray(path.read_bytes())
    places = [place for place in range(len(data) - 4) if data[place : place + 4] == b"TREE"]
    for place in places[len(places) // 2 :]:
        data[place : place + 4] = b"XXXX"
    path.write_bytes(data)
    refused(folder, "the file is damaged or truncated", CorruptDataError)


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_file_of_arrow_that_was_cut_is_refused(share: float, tables: Path) -> None:
    part = part_of(tables, 2)
    part.write_bytes(part.read_bytes()[: int(part.stat().st_size * share)])
    refused_with(tables, f"episode 2 in {part} cannot be read, the file is damaged or was cut:", CorruptDataError)


def test_an_episode_of_arrow_that_is_missing_is_refused(tables: Path) -> None:
    part = part_of(tables, 1)
    part.unlink()
    refused(tables, f"{part.name} is missing")


def test_metadata_of_an_episode_of_arrow_that_are_wrong_are_refused(tables: Path) -> None:
    path = tables / "data" / "2" / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_steps": 7}))
    refused_with(tables, "episode 2 has 7 observations for 7 steps")
    path.write_text("[]")
    refused_with(tables, f"{path} holds a JSON list, expected an object")


IMAGES = spaces.Box(0, 255, (32, 40, 3), np.uint8)


def write_images(tmp_path: Path, shape: tuple[int, ...], data_format: str) -> Path:
    draw = np.random.default_rng(0)
    images = [draw.integers(0, 255, shape).astype(np.uint8) for _ in range(4)]
    episode = make_episode(IMAGES, ACTIONS, 3, draw, observations=images)
    return write_minari(tmp_path / "source", "made/images-v0", IMAGES, ACTIONS, [episode], data_format=data_format)


def change_frame(folder: Path, data_format: str, change: Callable[[bytes], bytes]) -> None:
    """Replace the third frame by what `change` makes of it."""
    if data_format == "hdf5":
        with h5py.File(folder / "data" / "main_data.hdf5", "r+") as file:
            frames = file["episode_0/observations"]
            frames[2] = np.frombuffer(change(frames[2].tobytes()), np.uint8)
        return
    part = folder / "data" / "0" / f"part-0.{data_format}"
    table = dataset.dataset(part, format=data_format).to_table()
    frames = table["observations"].to_pylist()
    frames[2] = change(frames[2])
    table = table.set_column(table.schema.get_field_index("observations"), "observations", pa.array(frames))
    dataset.write_dataset(table, part.parent, format=data_format, existing_data_behavior="overwrite_or_ignore")


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
@pytest.mark.parametrize("change", [lambda frame: frame[: len(frame) // 2], lambda frame: b"no image"])
def test_an_image_that_is_damaged_is_refused(
    change: Callable[[bytes], bytes], data_format: str, tmp_path: Path
) -> None:
    folder = write_images(tmp_path, (32, 40, 3), data_format)
    change_frame(folder, data_format, change)
    message = "'observations' of episode 0, row 2: the image is damaged or was cut:"
    refused_with(folder, message, CorruptDataError)


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
def test_images_of_another_shape_than_the_space_says_are_refused(data_format: str, tmp_path: Path) -> None:
    message = "'observations' of episode 0, row 0: the image has shape [40, 40, 3], but its space says [32, 40, 3]"
    refused_with(write_images(tmp_path, (40, 40, 3), data_format), message)


@pytest.mark.parametrize("second", ["x" * 70_000, "y"])
def test_an_info_with_long_text_is_dropped_and_named(second: str, folder: Path, tmp_path: Path) -> None:
    edit(folder, lambda file: file.create_dataset("episode_1/infos/s", data=["x" * 70_000, second]))
    assert convert(folder, tmp_path / "ted").dropped_keys == (
        {"key": "info.s", "why": "episode 1 has 70,000 bytes of text in row 0; rows of up to 65,536 bytes can be kept"},
    )


def test_files_of_an_episode_of_arrow_that_differ_are_refused(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["arrow"], tmp_path / "source"))
    part = part_of(folder, 2)
    write_ipc(part.with_name("part-1.arrow"), dataset.dataset(part, format="arrow").to_table().drop_columns("rewards"))
    refused_with(folder, f"the files in {part.parent} differ in their columns")


def test_null_where_a_flag_belongs_is_refused(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["arrow"], tmp_path / "source"))
    part = part_of(folder, 0)
    table = dataset.dataset(part, format="arrow").to_table()
    terminations = pa.array([None, False, False, True, False])
    table = table.set_column(table.schema.get_field_index("terminations"), "terminations", terminations)
    part.unlink()
    write_ipc(part, table)
    refused_with(folder, "'terminations' of episode 0 has no value in 1 rows")


def write_ipc(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write(table)


@pytest.mark.parametrize("how", [{}, {"locking": False}])
def test_a_file_that_is_open_here_is_read(folder: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    with h5py.File(folder / "data" / "main_data.hdf5", **how):
        convert(folder, tmp_path / "ted")
    assert_equals_minari(tmp_path / "ted", folder)


def test_a_file_that_is_written_to_here_is_said_to_be_open(folder: Path) -> None:
    with h5py.File(folder / "data" / "main_data.hdf5", "r+", locking=False):
        refused(folder, "is open for writing in this process", UsageError)


BOX = spaces.Box(-np.inf, np.inf, (3,), np.float64)
STEPS = 4


@pytest.fixture
def folder_outside(tmp_path: Path) -> Path:
    episode = make_episode(BOX, BOX, STEPS, np.random.default_rng(3))
    return write_minari(tmp_path, "made/box-v0", BOX, BOX, [episode], data_format="hdf5")


def _external_storage(h5: h5py.File, secret: Path) -> None:
    h5.create_dataset("episode_0/rewards", (STEPS,), np.uint8, external=[(str(secret), 0, STEPS)])


def _external_link(h5: h5py.File, secret: Path) -> None:
    h5["episode_0/rewards"] = h5py.ExternalLink(str(secret), "/rewards")


def _virtual_dataset(h5: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout((STEPS,), float)
    layout[:] = h5py.VirtualSource(str(secret), "rewards", (STEPS,))
    h5.create_virtual_dataset("episode_0/rewards", layout)


def _unread_link(h5: h5py.File, secret: Path) -> None:
    h5["beside"] = h5py.ExternalLink(str(secret), "/")
    h5["episode_0/rewards"] = np.zeros(STEPS)


@pytest.mark.parametrize("trick", [_external_storage, _external_link, _virtual_dataset, _unread_link])
@pytest.mark.parametrize("kind", ["file", "fifo", "nothing"])
def test_no_other_file_is_read(trick: Callable[[h5py.File, Path], None], kind: str, folder_outside: Path) -> None:
    secret = folder_outside.parent / "secret"
    if kind == "file":
        with h5py.File(secret, "w") as h5:
            h5["rewards"] = np.arange(1.0, STEPS + 1)
    elif kind == "fifo":
        os.mkfifo(secret)
    with h5py.File(folder_outside / "data" / "main_data.hdf5", "r+") as h5:
        del h5["episode_0/rewards"]
        trick(h5, secret)
    for verb in (lambda: convert(folder_outside, folder_outside.parent / "ted"), lambda: inspect(folder_outside)):
        with pytest.raises(CorruptDataError, match="plain groups and datasets whose data are in the file itself"):
            verb()
    assert not (folder_outside.parent / "ted").exists()


def _jpeg(*size: int, mode: str = "RGB") -> bytes:
    made = io.BytesIO()
    Image.new(mode, size).save(made, "JPEG")
    return made.getvalue()


def test_an_image_larger_than_its_space_is_not_decoded() -> None:
    large = bytearray(_jpeg(64, 64))
    frame = large.index(b"\xff\xc0")
    large[frame + 5 : frame + 9] = (9_000).to_bytes(2) * 2  # height and width: 243 MB decoded
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError, match=r"has shape \[9000, 9000, 3\], but its space says \[64, 64, 3\]"):
        decode_images([bytes(large)], (64, 64, 3), "'observations' of episode 0", 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize(("mode", "shape"), [("RGB", (5, 7, 3)), ("L", (5, 7)), ("CMYK", (5, 7, 4))])
def test_images_of_their_space_are_decoded(mode: str, shape: tuple[int, ...]) -> None:
    assert decode_images([_jpeg(7, 5, mode=mode)] * 9, shape, "images", 0).shape == (9, *shape)


INFOS = st.dictionaries(NAMES, st.sampled_from(["number", "vector", "text", "constant", "nested"]), max_size=3)


def make_infos(kinds: dict[str, str], rows: int, draw: np.random.Generator) -> dict[str, Any]:
    made: dict[str, Any] = {
        "number": draw.integers(1 << 40, size=rows).tolist(),
        "vector": draw.normal(size=(rows, 3)),
        "text": [f"é{number}" for number in draw.integers(1 << 40, size=rows)],
        "constant": [f"all {rows}"] * rows,
        "nested": {"deep": draw.normal(size=rows).tolist()},
    }
    return {name: made[kind] for name, kind in kinds.items()}


@settings(max_examples=15, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(
    observations=SPACES, actions=SPACES, infos=INFOS, lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    data_format=st.sampled_from(["hdf5", "arrow", "parquet"]), piece_bytes=st.integers(1, 2000),
    seed=st.integers(0, 1 << 30),
)  # fmt: skip
def test_the_conversion_equals_minari(
    observations: spaces.Space[Any],
    actions: spaces.Space[Any],
    infos: dict[str, str],
    lengths: list[int],
    data_format: str,
    piece_bytes: int,
    seed: int,
) -> None:
    draw = np.random.default_rng(seed)
    episodes = [
        make_episode(observations, actions, steps, draw, infos=make_infos(infos, steps + 1, draw)) for steps in lengths
    ]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        folder = write_minari(root, "made/any-v0", observations, actions, episodes, data_format=data_format)
        whole = convert(folder, root / "whole")
        assert whole.dropped_keys == ()
        assert assert_equals_minari(root / "whole", folder) > 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MinariReader, "piece_bytes", piece_bytes)
            assert convert(folder, root / "cut").content_digest == whole.content_digest
