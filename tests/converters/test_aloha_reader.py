"""HDF5 files of ALOHA, ACT and their relatives: read as h5py and Pillow read them, and refused in a sentence."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from cases import each
from conversions import WrittenReaderTests, refused, with_options, written
from PIL import Image

import rbtool
from rbtool.converters.aloha.reader import AlohaReader
from rbtool.core.errors import UsageError
from rbtool.core.format.converter import Reader
from rbtool.core.testing.readers import joined

DATA = Path("tests/data/aloha")
SAMPLES = ["sim_transfer_cube", "mobile_aloha", "robotwin2"]
Rows = dict[str, Any]


SmallPieces = with_options(AlohaReader, 6_000)


def write_act(folder: Path) -> Path:
    for number, steps in ((0, 4), (2, 7), (10, 5)):
        write(folder / "mobile" / f"episode_{number}.hdf5", act(steps, number, packed=True))
    return folder / "mobile"


def write_robotwin(folder: Path) -> Path:
    for number, steps in ((0, 4), (1, 9), (2, 5)):
        write(folder / "task" / "data" / f"episode{number}.hdf5", robotwin(steps, number))
    (folder / "task" / "instructions").mkdir()
    (folder / "task" / "instructions" / "episode1.json").write_text('{"seen": ["lift it", "take it"], "unseen": []}')
    return folder / "task"


class TestReader(WrittenReaderTests):
    kind, piece_bytes, has_rewards = AlohaReader, 6_000, False
    made = written({"ACT": write_act, "RoboTwin": write_robotwin})


def jpeg(frame: np.ndarray, **how: Any) -> bytes:
    held = io.BytesIO()
    Image.fromarray(frame).save(held, how.pop("format", "JPEG"), **how)
    return held.getvalue()


def frames(steps: int, seed: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (steps, 12, 16, channels), np.uint8)


def padded(packed: list[bytes], more: int = 5) -> np.ndarray:
    """JPEG of frames in rows of one length, filled up with zeros."""
    made = np.zeros((len(packed), max(map(len, packed)) + more), np.uint8)
    for row, data in zip(made, packed, strict=True):
        row[: len(data)] = np.frombuffer(data, np.uint8)
    return made


def act(steps: int, seed: int = 0, *, packed: bool = False, dtype: str = "f4") -> Rows:
    draw = np.random.default_rng(seed)
    pictures = frames(steps, seed)
    found: Rows = {
        "action": draw.normal(size=(steps, 14)).astype(dtype),
        "observations/qpos": draw.normal(size=(steps, 14)).astype(dtype),
        "observations/qvel": draw.normal(size=(steps, 14)).astype(dtype),
        "observations/images/top": padded([jpeg(one) for one in pictures]) if packed else pictures,
    }
    return found | ({"compress_len": np.full((1, steps + 3), 99.0, "f4")} if packed else {})


def robotwin(rows: int, seed: int = 0) -> Rows:
    draw = np.random.default_rng(seed)
    packed = [jpeg(one) for one in frames(rows, seed)]
    return {
        "joint_action/left_arm": draw.normal(size=(rows, 6)),
        "joint_action/left_gripper": draw.normal(size=rows),
        "joint_action/vector": draw.normal(size=(rows, 14)),
        "observation/head_camera/rgb": np.array(packed, f"S{max(map(len, packed))}"),
        "observation/head_camera/intrinsic_cv": draw.normal(size=(rows, 3, 3)),
        "pointcloud": np.zeros((rows, 0)),
    }


def write(path: Path, rows: Mapping[str, Any], **attributes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, values in rows.items():
            if isinstance(values, list):
                made = file.create_dataset(name, (len(values),), h5py.vlen_dtype(np.uint8))
                for row, data in enumerate(values):
                    made[row] = np.frombuffer(data, np.uint8)
            else:
                file.create_dataset(name, data=values)
        file.attrs.update(attributes)
    return path


def read(path: Path, kind: type[Reader] = AlohaReader, **options: Any) -> tuple[Any, dict[int, Rows], list[Any]]:
    """The facts, and the rows of each episode by the names of keys; the texts of episodes."""
    with kind(path, options=options) as reader:
        facts = reader.facts()
        pieces = list(reader.pieces())
    episodes: dict[int, Rows] = {}
    for number, columns in joined(pieces, facts).items():
        episodes[number] = {".".join(key): rows for key, rows in columns.items() if key[0] != "next"}
        for key, rows in columns.items():  # what came after the last step, where a file has it
            if key[0] == "next":
                name = ".".join(key[1:])
                episodes[number][name] = np.concatenate((episodes[number][name], rows[-1:]))
    return facts, episodes, [piece.text for piece in pieces if piece.first]


def decoded(stored: Any) -> np.ndarray:
    """Decode rows of JPEG with Pillow, in whichever of the three ways they are stored."""
    rows = [bytes(row) if isinstance(row, bytes) else row.tobytes() for row in stored]
    return np.stack([np.asarray(Image.open(io.BytesIO(row))) for row in rows])


def plain(file: Path) -> Rows:
    """Read a file with h5py and Pillow alone, by the names in the file."""
    found: Rows = {}

    def take(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            rows = item[:]
            is_packed = rows.dtype.kind == "S" or ("images" in name and rows.ndim == 2)
            found[name] = decoded(rows) if is_packed else rows

    with h5py.File(file) as opened:
        opened.visititems(take)
    return found


@each("kind", [AlohaReader, SmallPieces])
@each("name", ["sim_transfer_cube", "mobile_aloha"])
def test_samples_of_act_are_what_h5py_and_pillow_read(name: str, kind: type[Reader]) -> None:
    facts, episodes, texts = read(DATA / name, kind)
    assert list(episodes) == [0, 1]
    assert texts == [{"sim": "true" if name.startswith("sim") else "false"}] * 2
    for number, given in episodes.items():
        rows = plain(DATA / name / f"episode_{number}.hdf5")
        rows.pop("compress_len", None)
        steps = len(rows["action"])
        keys = {one: one.replace("observations/images", "observation/image").replace("observations", "observation")
                for one in rows}  # fmt: skip
        assert {key.replace("/", ".") for key in keys.values()} | {"terminations", "truncations"} == set(given)
        for one, key in keys.items():
            found = given[key.replace("/", ".")]
            assert found.dtype == rows[one].dtype
            assert found[:steps].tobytes() == rows[one].tobytes()
        assert given["truncations"].tolist() == [False] * (steps - 1) + [True]
        assert not given["terminations"].any()
    assert {one.key for one in facts.dropped_keys} == ({"compress_len"} if name == "mobile_aloha" else set())
    assert any("--jpeg opencv" in note for note in facts.notes) == (name == "mobile_aloha")


@each("kind", [AlohaReader, SmallPieces])
def test_the_sample_of_robotwin_is_what_h5py_and_pillow_read(kind: type[Reader]) -> None:
    facts, episodes, texts = read(DATA / "robotwin2", kind)
    assert facts.lengths == [7, 10]
    for number, given in episodes.items():
        rows = plain(DATA / "robotwin2" / "data" / f"episode{number}.hdf5")
        assert given["action"].tolist() == rows["joint_action/vector"][1:].tolist()
        for camera in ("head_camera", "left_camera"):
            assert given[f"observation.image.{camera}"].tolist() == rows[f"observation/{camera}/rgb"].tolist()
            stored = rows[f"observation/{camera}/intrinsic_cv"]
            assert given[f"observation.{camera}.intrinsic_cv"].tolist() == stored.tolist()
        for one in rows:
            if one.startswith(("joint_action", "endpose")):
                assert given[f"observation.{one.replace('/', '.')}"].tolist() == rows[one].tolist()
    assert [text["language_instruction"] for text in texts] == ["lift the pot"] * 2
    assert json.loads(texts[0]["instructions"]) == {"seen": ["lift the pot"], "unseen": ["raise the pot"]}
    assert [one.key for one in facts.dropped_keys] == ["pointcloud"]
    assert read(DATA / "robotwin2" / "data")[0].lengths == [7, 10]


def test_the_files_of_robotwin_convert_from_their_folder_alone(tmp_path: Path) -> None:
    """Their instructions lie beside this folder, which was an internal error."""
    whole = rbtool.convert(DATA / "robotwin2", tmp_path / "whole")
    files = rbtool.convert(DATA / "robotwin2" / "data", tmp_path / "files")
    assert files.content_digest == whole.content_digest
    assert "../instructions/episode0.json" in rbtool.inspect(files.path).provenance[0].inputs


@each("name", ["mobile_aloha", "robotwin2"])
def test_opencv_gives_the_channels_as_they_were_encoded(name: str) -> None:
    facts, standard, _ = read(DATA / name)
    _, swapped, _ = read(DATA / name, jpeg="opencv")
    for number, rows in standard.items():
        for key, found in rows.items():
            other = swapped[number][key]
            assert other.tolist() == (found[..., ::-1] if ".image." in key else found).tolist()
    numbers = [0.0, 0.0]
    for rows in swapped.values():  # the last pixel has its column in channel 0, its row in 1, its number in 2
        for key in (key for key in rows if ".image." in key):
            last = rows[key][:, -1, -1].astype(float)
            numbers = [numbers[0] + abs(last[:, 0] - 255).mean(), numbers[1] + abs(last[:, 1] - 255).mean()]
    assert numbers[1] < 255
    assert facts.notes


def test_images_may_be_left_out_and_pictures_may_be_stored_in_any_way(tmp_path: Path) -> None:
    rows, pictures = act(5), frames(5, 3)
    packed = [jpeg(one) for one in pictures]
    stored = {
        "padded": padded(packed), "strings": np.array(packed, f"S{max(map(len, packed))}"), "lists": packed,
        "png": padded([jpeg(one, format="PNG") for one in pictures]),
        "gray": padded([jpeg(one[..., 0]) for one in pictures]),
    }  # fmt: skip
    more = {f"observations/images/{name}": values for name, values in stored.items()}
    depth = np.arange(5 * 6 * 4, dtype="u2").reshape(5, 6, 4)
    path = write(tmp_path / "episode_7.hdf5", rows | more | {"observations/images/cam_depth": depth}, sim=True)
    facts, episodes, _ = read(path)
    assert list(episodes) == [7]
    for name, values in stored.items():
        expected = pictures if name == "png" else decoded(padded(packed) if name == "lists" else values)
        assert episodes[7][f"observation.image.{name}"][:5].tolist() == expected.tolist()
    assert episodes[7]["observation.depth.cam_depth"][:5].tolist() == depth.tolist()
    skipped, episodes, _ = read(path, images="skip")
    assert not any(".image." in key for key in episodes[7])
    assert not any(".depth." in key for key in episodes[7])
    assert len(skipped.dropped_keys) == 7
    assert facts.steps == 5


def test_numbers_of_files_have_holes_and_are_counted(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        write(tmp_path / "d" / f"episode_{number}.hdf5", act(number + 1))
    facts, episodes, _ = read(tmp_path / "d")
    assert list(episodes) == [0, 2, 10]
    assert facts.lengths == [1, 3, 11]


def test_the_last_observation_where_it_is_there_and_columns_of_other_lengths(tmp_path: Path) -> None:
    longer = act(6)
    write(tmp_path / "a.hdf5", {name: rows[:5] if name == "action" else rows for name, rows in longer.items()})
    _, episodes, _ = read(tmp_path / "a.hdf5")
    assert episodes[0]["observation.qpos"].tolist() == longer["observations/qpos"].tolist()
    assert len(episodes[0]["action"]) == 5
    write(tmp_path / "b.hdf5", {name: rows if name == "action" else rows[:4] for name, rows in longer.items()})
    facts, episodes, _ = read(tmp_path / "b.hdf5")
    assert episodes[0]["action"].tolist() == longer["action"][:4].tolist()
    assert any("left out (2 rows of b.hdf5)" in note for note in facts.notes)
    write(tmp_path / "c.hdf5", longer | {"observations/effort": np.zeros((0,), "f4"), "base_action": np.ones((6, 2))})
    facts, episodes, _ = read(tmp_path / "c.hdf5")
    assert episodes[0]["base_action"].shape == (6, 2)
    assert [one.key for one in facts.dropped_keys] == ["observations/effort"]


@each("dtype", ["f8", ">f4", "f2"])
def test_forks_with_other_types_and_compression(dtype: str, tmp_path: Path) -> None:
    rows = act(6, dtype=dtype)
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name, values in rows.items():
            file.create_dataset(name, data=values, compression="gzip", chunks=(1, *values.shape[1:]))
    _, episodes, _ = read(tmp_path / "a.hdf5")
    assert episodes[0]["action"].dtype == np.dtype(dtype).newbyteorder("=")
    assert episodes[0]["action"].tolist() == rows["action"].tolist()
    assert episodes[0]["observation.image.top"][:6].tolist() == rows["observations/images/top"].tolist()


def test_robotwin_of_2026_and_robomind(tmp_path: Path) -> None:
    pictures = [jpeg(one) for one in frames(4, 1)]
    arm = np.arange(24.0).reshape(4, 6)
    aligned = {
        "state/left_arm_joint_states": arm, "action/left_arm_joint_states": arm + 6,
        "vision/cam_head/colors": np.array(pictures, f"S{max(map(len, pictures))}"),
        "vision/cam_head/intrinsic_matrix": np.ones((4, 3, 3)), "additional_info/frequency": np.array(15),
        "instructions": np.array(b'["open it", "pull"]'), "data_format_version": np.array(b"v1.0"),
    }  # fmt: skip
    _, episodes, texts = read(write(tmp_path / "episode3.hdf5", aligned, source_format="hdf5"))
    assert episodes[3]["action.left_arm_joint_states"].tolist() == (arm + 6).tolist()
    assert episodes[3]["observation.state.left_arm_joint_states"][:4].tolist() == arm.tolist()
    assert episodes[3]["observation.image.cam_head"][:4].tolist() == decoded(np.array(pictures)).tolist()
    assert texts[0]["language_instruction"] == "open it"
    assert (texts[0]["additional_info/frequency"], texts[0]["source_format"]) == ("15", "hdf5")
    raw = [*pictures[:3], frames(4, 1)[3].tobytes()]
    mind = {"puppet/joint_position": arm, "master/joint_position": arm + 1, "observations/rgb_images/top": raw}
    facts, episodes, _ = read(write(tmp_path / "trajectory.hdf5", mind))
    assert episodes[0]["action.joint_position"].tolist() == (arm + 1).tolist()
    assert episodes[0]["observation.puppet.joint_position"][:4].tolist() == arm.tolist()
    assert episodes[0]["observation.image.top"][3].tolist() == frames(4, 1)[3].tolist()
    assert any("master" in note for note in facts.notes)


def aligned(steps: int = 4) -> Rows:
    pictures = [jpeg(one) for one in frames(steps, 1)]
    arm = np.arange(steps * 6.0).reshape(steps, 6)
    return {"state/arm": arm, "action/arm": arm + 6, "vision/cam_head/colors": np.array(pictures, f"S{2_000}")}


def robomind(steps: int = 4) -> Rows:
    arm = np.arange(steps * 6.0).reshape(steps, 6)
    pictures = [jpeg(one) for one in frames(steps, 1)]
    return {"puppet/joint": arm, "master/joint": arm + 1, "observations/rgb_images/top": pictures}


@each(
    ("rows", "more"),
    [
        (act(4), ["observations/matrix"]), (aligned(), ["vision/cam_head/shape", "vision/cam_head/intrinsic_matrix"]),
        (robotwin(5), ["observation/head_camera/matrix"]), (robomind(), ["puppet_names", "observations/matrix"]),
    ],
)  # fmt: skip
def test_arrays_without_a_row_a_step_shorten_nothing(rows: Rows, more: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "episode_0.hdf5", rows | {name: np.ones((2, 3)) for name in more})
    facts, _, _ = read(path)
    assert facts.lengths == [4]
    assert set(more) <= {one.key for one in facts.dropped_keys}


@each(
    ("rows", "name"), [(act(4) | {"base_action": np.ones((4, 2))}, "base_action"), (aligned(), "action/arm"),
                       (robomind(), "master/joint")],
)  # fmt: skip
def test_actions_that_were_cut_in_one_file_are_kept(rows: Rows, name: str, tmp_path: Path) -> None:
    write(tmp_path / "d" / "episode_0.hdf5", rows)
    write(tmp_path / "d" / "episode_1.hdf5", rows | {name: rows[name][:2]})
    facts, episodes, _ = read(tmp_path / "d")
    assert facts.lengths == [4, 2]
    key = name.replace("/", ".").replace("master", "action")
    assert [one[key].tolist() for one in episodes.values()] == [rows[name].tolist(), rows[name][:2].tolist()]
    assert any("left out (2 rows of episode_1.hdf5)" in note for note in facts.notes)


def test_pictures_of_robomind_that_were_never_encoded_may_be_the_first(tmp_path: Path) -> None:
    rows = robomind()
    rows["observations/rgb_images/top"][:2] = [one.tobytes() for one in frames(2, 1)]
    _, episodes, _ = read(write(tmp_path / "trajectory.hdf5", rows))
    assert episodes[0]["observation.image.top"][:2].tolist() == frames(2, 1).tolist()


@each("name", ["", "data", "data/episode1.hdf5"])
def test_instructions_of_robotwin_are_beside_the_folder_of_files(name: str) -> None:
    _, _, texts = read(DATA / "robotwin2" / name)
    stated = json.loads((DATA / "robotwin2" / "instructions" / "episode1.json").read_text())
    assert texts[-1]["language_instruction"] == stated["seen"][0]


def drop(name: str) -> Callable[[h5py.File], Any]:
    return lambda file: file.__delitem__(name)


def put(values: Any, name: str = "observations/images/top") -> Callable[[h5py.File], Any]:
    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, data=values)

    return change


@each(
    ("change", "said"),
    [
        (drop("action"), "other groups"),
        (drop("observations/images/top"), "has no 'observations/images/top', which episode_0.hdf5"),
        (put(np.zeros((4, 7), "f4"), "action"), "has 'action' as float32 \\[7\\]"),
        (put(np.array([b"a"] * 4), "action"), "'action' cannot be read as rows"),
        (put(padded([jpeg(one[:6]) for one in frames(4, 0)])), "as uint8 \\[6, 16, 3\\]"),
        (put(np.array([b"x"] * 4)), "cannot be read|is not|image"),
        (put(padded([jpeg(one)[:300] for one in frames(4, 0)])), "is damaged or was cut"),
        (robotwin(4), "episode_1.hdf5 has other groups than the files of ALOHA beside it"),
        (900, "was cut"),
        (b"?" * 99, "is not an HDF5 file"),
    ],
)
def test_one_file_that_does_not_fit_is_refused_and_may_be_left_out(change: Any, said: str, tmp_path: Path) -> None:
    """`change` edits an open file, or is its new content, the size at which it is cut, or bytes for the first file."""
    folder = tmp_path / "d"
    for number in range(3):
        write(folder / f"episode_{number}.hdf5", act(4, number, packed=True), sim=False)
    file = folder / f"episode_{0 if isinstance(change, bytes) else 1}.hdf5"
    if isinstance(change, dict):
        write(file, change)
    elif isinstance(change, bytes | int):
        file.write_bytes(change if isinstance(change, bytes) else file.read_bytes()[:change])
    else:
        with h5py.File(file, "r+") as opened:
            change(opened)
    refused(folder, said)
    assert rbtool.convert(folder, tmp_path / "out", skip_bad=True).episodes == 2


@each("options", [{"jpeg": "fast"}, {"images": "keep"}])
def test_options_of_unknown_values_are_refused(options: dict[str, Any]) -> None:
    refused(DATA / "mobile_aloha", "expected", UsageError, **options)


def test_episodes_without_steps_are_named(tmp_path: Path) -> None:
    write(tmp_path / "d" / "episode0.hdf5", robotwin(1))
    refused(tmp_path / "d", "no episodes with steps")
    write(tmp_path / "d" / "episode1.hdf5", robotwin(3))
    facts, _, _ = read(tmp_path / "d")
    assert "1 episode without steps left out: episode0.hdf5" in facts.notes


def test_a_conversion_has_the_same_rows(tmp_path: Path) -> None:
    for name in SAMPLES:
        shutil.copytree(DATA / name, tmp_path / name)
        made = rbtool.convert(tmp_path / name, tmp_path / f"{name}.ted")
        assert made.layout == "packed"
        assert rbtool.check(made.path).errors == 0
