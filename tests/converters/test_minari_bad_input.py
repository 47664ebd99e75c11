"""Damaged and contradictory Minari datasets: one sentence that says what was found, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest
from gymnasium import spaces
from minari_oracle import assert_equals_minari, make_episode, write_minari
from pyarrow import dataset

from rbtool.core.errors import CorruptDataError, FormatError, UsageError
from rbtool.core.verbs.convert import convert

SPACE = spaces.Dict(x=spaces.Box(-np.inf, np.inf, (3,), np.float64), t=spaces.Text(5))
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)
LENGTHS = [4, 1, 6]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, draw = tmp_path_factory.mktemp("minari"), np.random.default_rng(3)
    episodes = [make_episode(SPACE, ACTIONS, steps, draw) for steps in LENGTHS]
    return {
        name: write_minari(root, f"made/{name}-v0", SPACE, ACTIONS, episodes, data_format=name)
        for name in ("hdf5", "arrow", "parquet")
    }


def refused(folder: Path, tmp_path: Path, kind: type[FormatError] = FormatError, **how: Any) -> FormatError:
    with pytest.raises(kind) as caught:
        convert(folder, tmp_path / "ted", **how)
    assert not (tmp_path / "ted").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert "\n" not in caught.value.message
    return caught.value


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


LENGTHS_DIFFER = "columns that have one row a step differ in length: "
STRUCTURE: dict[str, tuple[Callable[[h5py.File], Any], str]] = {
    "no rewards": (lambda f: f.__delitem__("episode_1/rewards"), "episode 1 has no 'rewards'"),
    "no truncations": (lambda f: f.__delitem__("episode_2/truncations"), "episode 2 has no 'truncations'"),
    "no actions": (lambda f: f.__delitem__("episode_0/actions"), "episode 0 has no 'actions'"),
    "no observations": (lambda f: f.__delitem__("episode_0/observations"), "episode 0 has no 'observations/x'"),
    "no leaf": (lambda f: f.__delitem__("episode_0/observations/t"), "episode 0 has no 'observations/t'"),
    "N observations": (
        lambda f: put(f, "episode_2/observations/x", np.zeros((6, 3))),
        "episode 2 has 6 rows of 'observations/x' for 6 steps, expected 7",
    ),
    "short actions": (
        lambda f: put(f, "episode_2/actions", np.zeros((5, 2), "f4")),
        f"episode 2: {LENGTHS_DIFFER}actions 5, rewards 6, terminations 6, truncations 6",
    ),
    "short rewards": (
        lambda f: put(f, "episode_0/rewards", np.zeros(3)),
        f"episode 0: {LENGTHS_DIFFER}actions 4, rewards 3, terminations 4, truncations 4",
    ),
    "long flags": (
        lambda f: put(f, "episode_0/terminations", np.zeros(9, bool)),
        f"episode 0: {LENGTHS_DIFFER}actions 4, rewards 4, terminations 9, truncations 4",
    ),
    "other type": (
        lambda f: put(f, "episode_1/observations/x", np.zeros((2, 3), "f4")),
        "episode 1: 'observations/x' is float32, in episode 0 it is float64",
    ),
    "other shape": (
        lambda f: put(f, "episode_1/observations/x", np.zeros((2, 4))),
        "episode 1: 'observations/x' has rows of shape [4], the observation space says [3]",
    ),
    "text where numbers belong": (
        lambda f: put(f, "episode_1/observations/x", ["a", "b"]),
        "episode 1: 'observations/x' is not what the observation space says, array: it holds text",
    ),
    "numbers where text belongs": (
        lambda f: put(f, "episode_1/observations/t", [1, 2]),
        "episode 1: 'observations/t' is not what the observation space says, text: it holds array",
    ),
    "stranger": (
        lambda f: f.create_dataset("episode_1/observations/z", data=np.zeros(2)),
        "episode 1 holds 'observations/z', which the observation space does not name",
    ),
    "rewards of two": (
        lambda f: put(f, "episode_0/rewards", np.zeros((4, 2))),
        "episode 0: 'rewards' is not one number a step",
    ),
    "not UTF-8": (
        lambda f: put(f, "episode_0/observations/t", np.array([b"\xff"] * 5, h5py.string_dtype())),
        "'observations/t' of episode 0 is not UTF-8 text",
    ),
    "long text": (
        lambda f: put(f, "episode_1/observations/t", ["a", "b" * 65537]),
        "'observations/t' of episode 1 has 65,537 bytes of text in row 1; rows of up to 65,536 bytes can be kept",
    ),
    "flag of 2": (
        lambda f: put(f, "episode_0/truncations", [0, 0, 2, 1]),
        "episode 0 has 2 for 'truncations' of step 2, expected 0 or 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURE)
def test_an_episode_that_is_not_sound(name: str, folder: Path, tmp_path: Path) -> None:
    change, sentence = STRUCTURE[name]
    edit(folder, change)
    assert refused(folder, tmp_path).message.startswith(sentence)


def test_an_episode_without_steps(folder: Path, tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        for name in ("rewards", "terminations", "truncations"):
            put(file, f"episode_1/{name}", np.zeros(0))
        put(file, "episode_1/actions", np.zeros((0, 2), "f4"))

    edit(folder, change)
    assert refused(folder, tmp_path).message == "episode 1 has no steps; every episode needs one at least"


def test_a_sound_part_of_a_damaged_dataset_can_be_had(folder: Path, originals: dict[str, Path], tmp_path: Path) -> None:
    edit(folder, STRUCTURE["no rewards"][0])
    assert refused(folder, tmp_path, episodes="1:3").message == "episode 1 has no 'rewards'"
    convert(folder, tmp_path / "ted", episodes="0,2")
    assert assert_equals_minari(tmp_path / "ted", originals["hdf5"], [0, 2]) > 0


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"total_steps": 12}, "metadata.json says 12 steps, the data hold 11"),
        ({"total_episodes": 4000}, "metadata.json says 4,000 episodes, the data hold 3"),
        ({"total_steps": -1}, "total_steps in metadata.json is -1, expected a number of them"),
        ({"data_format": "zarr"}, "data_format in metadata.json is 'zarr'; known: hdf5, arrow, parquet"),
        ({"data_format": "arrow"}, "data_format in metadata.json is 'arrow', the files in"),
        ({"observation_space": "{"}, "observation_space in metadata.json is not JSON:"),
        ({"action_space": '{"type": "Box"}'}, "action_space in metadata.json has a space of type Box without 'dtype'"),
        (
            {"action_space": '{"type": "Graph"}'},
            "action_space in metadata.json has a space of type 'Graph'; known: Box, Dict, Discrete,",
        ),
        ({"dataset_id": 3}, "dataset_id in metadata.json is 3, expected a name"),
    ],
)
def test_metadata_that_are_wrong(entries: dict[str, Any], sentence: str, folder: Path, tmp_path: Path) -> None:
    say(folder, **entries)
    assert refused(folder, tmp_path).message.startswith(sentence)


@pytest.mark.parametrize("entries", [{"total_steps": 12}, {"total_episodes": 4}])
def test_wrong_totals_do_not_matter_for_chosen_episodes(entries: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    say(folder, **entries)
    hint = refused(folder, tmp_path).hint
    assert "--episodes 0:3" in hint
    assert convert(folder, tmp_path / "ted", episodes="0:3").steps == 11


@pytest.mark.parametrize(("text", "sentence"), [("{", "is not JSON"), ("[]", "holds a JSON list, expected an object")])
def test_metadata_that_cannot_be_read(text: str, sentence: str, folder: Path, tmp_path: Path) -> None:
    (folder / "data" / "metadata.json").write_text(text)
    assert sentence in refused(folder, tmp_path).message


def test_metadata_that_are_missing(folder: Path, tmp_path: Path) -> None:
    (folder / "data" / "metadata.json").unlink()
    assert "metadata.json is missing" in refused(folder, tmp_path).message


def test_data_that_are_missing(folder: Path, tmp_path: Path) -> None:
    (folder / "data" / "main_data.hdf5").unlink()
    assert refused(folder, tmp_path).message.endswith("main_data.hdf5 is missing")


@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 0.999])
def test_an_hdf5_file_that_was_cut(share: float, folder: Path, tmp_path: Path) -> None:
    path = folder / "data" / "main_data.hdf5"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    message = refused(folder, tmp_path, CorruptDataError).message
    assert message.startswith(f"the structure in {path} cannot be read, the file is damaged or was cut:")


def test_an_hdf5_file_that_is_empty_though_episodes_are_promised(folder: Path, tmp_path: Path) -> None:
    (folder / "data" / "main_data.hdf5").write_bytes(b"")
    assert refused(folder, tmp_path).message == "metadata.json says 3 episodes, the data hold 0"


def test_an_hdf5_file_with_holes_in_it(folder: Path, tmp_path: Path) -> None:
    path = folder / "data" / "main_data.hdf5"
    data = bytearray(path.read_bytes())
    places = [place for place in range(len(data) - 4) if data[place : place + 4] == b"TREE"]
    for place in places[len(places) // 2 :]:
        data[place : place + 4] = b"XXXX"
    path.write_bytes(data)
    assert "cannot be read, the file is damaged or was cut" in refused(folder, tmp_path, CorruptDataError).message


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_an_arrow_file_that_was_cut(share: float, data_format: str, originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals[data_format], tmp_path / "source"))
    part = folder / "data" / "2" / f"part-0.{data_format}"
    part.write_bytes(part.read_bytes()[: int(part.stat().st_size * share)])
    message = refused(folder, tmp_path, CorruptDataError).message
    assert message.startswith(f"episode 2 in {part} cannot be read, the file is damaged or was cut:")


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
def test_an_arrow_episode_that_is_missing(data_format: str, originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals[data_format], tmp_path / "source"))
    (folder / "data" / "1" / f"part-0.{data_format}").unlink()
    assert refused(folder, tmp_path).message.endswith(f"part-0.{data_format} is missing")


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
def test_an_arrow_episode_without_the_last_observation(
    data_format: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(originals[data_format], tmp_path / "source"))
    path = folder / "data" / "2" / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_steps": 7}))
    assert refused(folder, tmp_path).message.startswith("episode 2 has 7 observations for 7 steps")


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
def test_an_image_that_is_damaged(change: Callable[[bytes], bytes], data_format: str, tmp_path: Path) -> None:
    folder = write_images(tmp_path, (32, 40, 3), data_format)
    change_frame(folder, data_format, change)
    message = refused(folder, tmp_path, CorruptDataError).message
    assert message.startswith("'observations' of episode 0, row 2: the image is damaged or was cut:")


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
def test_images_of_another_shape_than_the_space_says(data_format: str, tmp_path: Path) -> None:
    message = refused(write_images(tmp_path, (40, 40, 3), data_format), tmp_path).message
    assert message == (
        "'observations' of episode 0, row 0: the image has shape [40, 40, 3], its space says [32, 40, 3]"
    )


def nest(file: h5py.File) -> None:
    file.create_group("episode_1/infos/" + "/".join("x" * 40))


MORE_STRUCTURE: dict[str, tuple[Callable[[h5py.File], Any], str]] = {
    "deep groups": (nest, "episode 1 is nested more than 32 groups deep"),
    "a name in Latin-1": (
        lambda f: f["episode_1"].create_dataset(b"caf\xe9", data=[1]),
        r"the name b'caf\xe9' in episode 1 is not UTF-8",
    ),
}


@pytest.mark.parametrize("name", MORE_STRUCTURE)
def test_groups_that_make_no_sense(name: str, folder: Path, tmp_path: Path) -> None:
    change, sentence = MORE_STRUCTURE[name]
    edit(folder, change)
    assert refused(folder, tmp_path).message == sentence


@pytest.mark.parametrize("second", ["x" * 70_000, "y"])
def test_an_info_with_long_text_is_dropped_and_named(second: str, folder: Path, tmp_path: Path) -> None:
    edit(folder, lambda file: file.create_dataset("episode_1/infos/s", data=["x" * 70_000, second]))
    assert convert(folder, tmp_path / "ted").dropped_keys == (
        {
            "key": "info.s",
            "why": "episode 1 has 70,000 bytes of text in row 0; rows of up to 65,536 bytes can be kept",
        },
    )


def test_arrow_files_of_an_episode_that_differ(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["arrow"], tmp_path / "source"))
    part = folder / "data" / "2" / "part-0.arrow"
    table = dataset.dataset(part, format="arrow").to_table().drop_columns("rewards")
    with pa.ipc.new_file(part.with_name("part-1.arrow"), table.schema) as writer:
        writer.write(table)
    assert refused(folder, tmp_path).message == f"the files in {part.parent} differ in their columns"


def test_episode_metadata_that_are_no_object(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["parquet"], tmp_path / "source"))
    path = folder / "data" / "2" / "metadata.json"
    path.write_text("[]")
    assert refused(folder, tmp_path).message == f"{path} holds a JSON list, expected an object"


def test_null_where_a_number_belongs(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(originals["arrow"], tmp_path / "source"))
    part = folder / "data" / "0" / "part-0.arrow"
    table = dataset.dataset(part, format="arrow").to_table()
    terminations = pa.array([None, False, False, True, False])
    table = table.set_column(table.schema.get_field_index("terminations"), "terminations", terminations)
    part.unlink()
    with pa.ipc.new_file(part, table.schema) as writer:
        writer.write(table)
    assert refused(folder, tmp_path).message == "'terminations' of episode 0 has no value in 1 rows"


@pytest.mark.parametrize("how", [{}, {"locking": False}])
def test_a_file_that_is_open_here_is_read(folder: Path, tmp_path: Path, how: dict[str, Any]) -> None:
    with h5py.File(folder / "data" / "main_data.hdf5", **how):
        convert(folder, tmp_path / "ted")
    assert_equals_minari(tmp_path / "ted", folder)


def test_a_file_that_is_written_to_here_is_said_to_be_open(folder: Path, tmp_path: Path) -> None:
    file = folder / "data" / "main_data.hdf5"
    with h5py.File(file, "r+", locking=False), pytest.raises(UsageError, match="is open for writing in this process"):
        convert(folder, tmp_path / "ted")
