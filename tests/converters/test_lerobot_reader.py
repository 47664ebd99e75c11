"""`LerobotReader`: every row and pixel of files of v2.0, v2.1 and v3.0, damaged and odd datasets, bounded memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import lerobot_files
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from cases import each
from conversions import WrittenReaderTests, refused
from damage import POINTER
from hypothesis import given, settings
from hypothesis import strategies as st
from lerobot_files import CAMERA, Take, picture, plain_rows, random_takes, write_dataset, write_lines, write_video

import rbtool
from rbtool.converters.lerobot.reader import LerobotReader, RowsFile
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError, UsageError
from rbtool.core.format.converter import FinalStep
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.episodes import Final
from rbtool.core.ted.schema import Key

DATA = Path(__file__).parents[1] / "data" / "lerobot"
KEYS: dict[str, Key] = {
    "observation.state": ("observation", "state"), "action": ("action",), "timestamp": ("timestamp",),
    "frame_index": ("frame",), "index": ("info", "index"), "task_index": ("task_index",),
}  # fmt: skip


class TestReaderOfEpisodeFiles(WrittenReaderTests):
    """v2.1, with videos."""

    kind, options, piece_bytes = LerobotReader, {"images": "decode"}, 40_000
    version, images = "v2.1", "video"

    def write(self, folder: Path) -> Path:
        return write_dataset(folder / "d", random_takes((5, 1, 6, 9)), version=self.version, images=self.images)


class TestReaderOfKeptVideos(TestReaderOfEpisodeFiles):
    """v3.0, with videos that are not decoded."""

    version, options, piece_bytes = "v3.0", {"images": "keep"}, 700


class TestReaderOfSharedFiles(TestReaderOfEpisodeFiles):
    """v3.0, with videos."""

    version = "v3.0"


class TestReaderOfImageColumns(TestReaderOfEpisodeFiles):
    """v2.0, with images in columns."""

    version, images = "v2.0", "image"


def image_keys(features: dict[str, Any]) -> dict[str, Key]:
    visual = [name for name, one in features.items() if one["dtype"] in ("image", "video")]
    return {name: ("observation", "image", name.rpartition(".")[2]) for name in visual}


def assert_equals_plain_reading(folder: Path, out: Path, final_step: FinalStep = "repeat", **options: Any) -> None:
    """Convert, and compare every row, the one after it and the ends with a plain reading."""
    result = rbtool.convert(folder, out, final_step=final_step, images="decode", **options)
    features = json.loads((folder / "meta/info.json").read_text())["features"]
    keys = {name: key for name, key in KEYS.items() if name in features} | image_keys(features)
    states = [name for name, key in keys.items() if key[0] == "observation"]
    with open_steps(result.path) as reader:
        steps = reader.manifest.steps
        found = {field.key: reader.read(field.key, 0, steps) for field in reader.fields}
        lengths, text = reader.episodes.length.tolist(), reader.episode_text
    at = 0
    assert text is not None
    episodes = [list(rows) for _, rows in groupby(plain_rows(folder), lambda row: row["episode_index"])]
    kept = [rows for rows in episodes if _kept(rows, final_step)]
    assert lengths == [_kept(rows, final_step) for rows in kept]
    for rows, length, words in zip(kept, lengths, text, strict=True):
        assert words["language_instruction"] == rows[0]["task"]
        for step in range(length):
            row, after = rows[step], rows[min(step + 1, len(rows) - 1)]
            for name, key in keys.items():
                expected = np.asarray(row[name], found[key].dtype).reshape(found[key].shape[1:])
                assert found[key][at].tobytes() == expected.tobytes(), (name, at)
            for name in states:
                key = ("next", *keys[name])
                assert found[key][at].tobytes() == np.asarray(after[name], found[key].dtype).tobytes(), (name, at)
            if "next.reward" in row:
                assert found["next", "reward"][at, 0] == np.float32(row["next.reward"])
            terminated = bool(row.get("next.done"))
            assert found["next", "terminated"][at, 0] == terminated
            assert found["next", "truncated"][at, 0] == (step == length - 1 and not terminated)
            at += 1
    assert at == steps


def _kept(rows: list[dict[str, Any]], final_step: str) -> int:
    """How many steps of an episode are kept."""
    keeps = "next.reward" not in rows[-1] or bool(rows[-1].get("next.done"))
    whole = final_step == "repeat" or (final_step == "auto" and keeps)
    return len(rows) if whole else len(rows) - 1


@each("final_step", ["auto", "drop", "repeat"])
@each("name", ["g1", "v21", "v30"])
def test_rows_and_pixels_equal_a_plain_reading(name: str, final_step: FinalStep, tmp_path: Path) -> None:
    assert_equals_plain_reading(DATA / name, tmp_path / "out", final_step)


def test_what_last_rows_cost_is_noted_where_there_are_rewards(tmp_path: Path) -> None:
    takes = random_takes((4, 3, 2), done=False)
    takes[1].columns["next.done"][-1] = True
    with LerobotReader(write_dataset(tmp_path / "d", takes, images="none")) as reader:
        facts = reader.facts()
        assert (facts.lengths, facts.steps) == ([3, 3, 1], 7)
        assert [note for note in facts.notes if note.startswith("2 rows of 3 episodes left out")]
    bare = write_dataset(tmp_path / "bare", [_without(take, "next.reward") for take in takes], images="none")
    with LerobotReader(bare) as reader:
        facts, table = reader.facts(), reader.episode_table()
        assert (facts.lengths, table.final.tolist()) == ([4, 3, 2], [Final.REPEATED] * 3)
        assert table.truncated.tolist() == [True, False, True]
        assert not [note for note in facts.notes if "left out" in note]
    with LerobotReader(bare, final_step="drop") as reader:
        assert reader.facts().lengths == [3, 2, 1]


@each("images", ["video", "image", "none"])
@each("version", ["v2.0", "v2.1", "v3.0"])
def test_each_version_with_each_kind_of_images(version: str, images: str, tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", random_takes((1, 4, 6, 1, 3)), version=version, images=images)
    assert_equals_plain_reading(folder, tmp_path / "out")


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6), version=st.sampled_from(["v2.0", "v2.1", "v3.0"]),
    a_file=st.integers(1, 4), done=st.booleans(), final_step=st.sampled_from(["auto", "repeat"]),
)  # fmt: skip
def test_any_episodes_come_back(
    lengths: list[int], version: str, a_file: int, done: bool, final_step: FinalStep,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    if final_step == "auto" and not done and set(lengths) == {1}:
        return  # no step is left, which is refused
    folder = tmp_path_factory.mktemp("any")
    write_dataset(folder / "d", random_takes(lengths, done=done), version=version, images="image", a_file=a_file)
    assert_equals_plain_reading(folder / "d", folder / "out", final_step)


def truth(name: str) -> np.ndarray[Any, Any]:
    with np.load(DATA / f"recent/{name}_truth.npz") as file:
        return np.stack([file[key] for key in file.files])[..., None]


def test_maps_of_depths_in_columns_are_those_that_were_recorded(tmp_path: Path) -> None:
    made = rbtool.convert(DATA / "recent/depth_image_m", tmp_path / "out").path
    expected = truth("depth_image_m")
    with open_steps(made) as reader:
        found = reader.read(("observation", "image", "wrist_depth"), 0, len(expected))
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("images", ["keep", "decode"])
def test_maps_of_depths_in_videos_are_millimetres(images: str, tmp_path: Path) -> None:
    made = rbtool.convert(DATA / "recent/depth_video_mm", tmp_path / "out", images=images).path
    expected = truth("depth_video_mm").clip(10, 10_000)
    found = rbtool.load_dataset(made)[:]["observation", "image", "depth"].numpy()
    assert found.dtype == np.uint16
    assert int(np.abs(found.astype(np.int64) - expected).max()) <= 1


@each("entries", [{"video.depth_max": 0.001}, {"video.shift": "far"}, {"video.use_log": None}, {"video.shift": -1}])
def test_a_range_of_depths_that_makes_no_sense_is_named(entries: dict[str, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "recent/depth_video_mm", tmp_path / "d")
    name = "observation.images.depth"
    change_feature(folder, name, info=features_of(folder)[name]["info"] | entries)
    with pytest.raises(FormatError, match="an impossible range"):
        LerobotReader(folder)


@pytest.mark.parametrize("rows", [1 << 16, 5])
def test_language_is_text_of_the_episodes(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rbtool.converters.lerobot.reader._ROWS", rows)
    folder = DATA / "recent/two_cameras_language"
    made = rbtool.convert(folder, tmp_path / "out", images="skip")
    assert [one["key"] for one in made.dropped_keys] == ["observation.images.front", "observation.images.wrist"]
    with open_steps(made.path) as reader:
        texts, lengths = reader.episode_text or [], reader.episodes.length.tolist()
    rows_there = pq.read_table(folder / "data/chunk-000/file-000.parquet").to_pylist()
    for text, length in zip(texts, lengths, strict=True):
        episode, rows_there = rows_there[:length], rows_there[length:]
        assert json.loads(text["language_persistent"]) == episode[0]["language_persistent"]
        events = json.loads(text["language_events"]) or {}
        assert [events.get(str(at), []) for at in range(length)] == [one["language_events"] for one in episode]


def test_language_that_differs_between_rows_is_kept_by_frame(tmp_path: Path) -> None:
    takes = random_takes((3, 2))
    said = [[{"role": "user", "content": str(row), "style": None}] for row in range(5)]
    takes[0].columns["language_persistent"], takes[1].columns["language_persistent"] = said[:3], [said[3], said[3]]
    folder = write_dataset(tmp_path / "d", takes, images="none")
    change_feature(folder, "language_persistent", dtype="language")
    made = rbtool.convert(folder, tmp_path / "out", final_step="repeat").path
    with open_steps(made) as reader:
        found = [json.loads(text["language_persistent"]) for text in reader.episode_text or []]
    assert found == [{"0": said[0], "1": said[1], "2": said[2]}, said[3]]


def test_images_are_left_out_on_demand(tmp_path: Path) -> None:
    result = rbtool.convert(DATA / "v30", tmp_path / "out", images="skip")
    assert [one["key"] for one in result.dropped_keys] == ["observation.images.top"]
    with open_steps(result.path) as reader:
        assert not [field for field in reader.fields if "image" in field.key]


def test_steps_after_an_unmarked_end_are_truncated_and_marked_ones_terminated(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", random_takes((4, 3)), images="none")
    with LerobotReader(folder) as reader:
        table = reader.episode_table()
        assert (table.terminated.tolist(), table.final.tolist()) == ([True] * 2, [Final.REPEATED] * 2)
        assert any("--ends truncated" in note for note in reader.facts().notes)
    with LerobotReader(folder, options={"ends": "truncated"}) as reader:
        table = reader.episode_table()
        assert (table.terminated.tolist(), table.final.tolist()) == ([False] * 2, [Final.DROPPED] * 2)
    bare = write_dataset(tmp_path / "bare", [_without(take, "next.done") for take in random_takes((4, 3))])
    with pytest.raises(UsageError, match="has no flags"):
        LerobotReader(bare, options={"ends": "truncated"})


def _without(take: Take, *names: str) -> Take:
    columns = {name: values for name, values in take.columns.items() if name not in names}
    return Take(columns, take.tasks, take.pictures)


def test_success_at_the_end_is_a_termination_and_is_kept_as_a_column(tmp_path: Path) -> None:
    takes = [_without(take, "next.done") for take in random_takes((4, 3))]
    for take, success in zip(takes, (True, False), strict=True):
        take.columns["next.success"] = np.array([False] * (len(take) - 1) + [success])
    result = rbtool.convert(write_dataset(tmp_path / "d", takes, images="none"), tmp_path / "out")
    with open_steps(result.path) as reader:
        assert reader.episodes.terminated.tolist() == [True, False]
        assert reader.read(("next", "success"), 0, 6).reshape(-1).tolist() == [False] * 3 + [True] + [False] * 2


def test_stated_flags_are_taken_as_they_are(tmp_path: Path) -> None:
    takes = [_without(take, "next.done") for take in random_takes((3, 3))]
    for take, flag in zip(takes, ("next.terminated", "next.truncated"), strict=True):
        for name in ("next.terminated", "next.truncated"):
            take.columns[name] = np.array([False, False, name == flag])
    with LerobotReader(write_dataset(tmp_path / "d", takes, images="none")) as reader:
        assert reader.episode_table().terminated.tolist() == [True, False]
    with pytest.raises(UsageError, match="flags that state how episodes end"):
        LerobotReader(tmp_path / "d", options={"ends": "terminated"})


def test_tasks_that_change_inside_an_episode_are_all_kept(tmp_path: Path) -> None:
    takes = random_takes((4, 3))
    takes[0].tasks = ["open", "open", "close", "close"]
    with LerobotReader(write_dataset(tmp_path / "d", takes, images="none")) as reader:
        text = [piece.text for piece in reader.pieces() if piece.first]
    assert text == [{"language_instructions": '{"0": "open", "1": "close"}'}, {"language_instruction": "do 1"}]


def test_tasks_are_named_by_their_column_or_by_the_index_of_pandas(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", random_takes((3, 3)), version="v3.0", images="none")
    path = folder / "meta/tasks.parquet"
    pq.write_table(pq.read_table(path).rename_columns(["task_index", "task"]), path)
    with LerobotReader(folder) as reader:
        assert [piece.text for piece in reader.pieces() if piece.first] == [
            {"language_instruction": "do 0"}, {"language_instruction": "do 1"},
        ]  # fmt: skip


def test_nested_lists_other_types_and_text_columns(tmp_path: Path) -> None:
    takes = random_takes((3, 2))
    for number, take in enumerate(takes):
        take.columns["action.chunk"] = np.arange(len(take) * 6, dtype=np.int32).reshape(len(take), 2, 3)
        take.columns["operator"] = [f"op {number}"] * len(take)
        del take.columns["action"]
    with LerobotReader(write_dataset(tmp_path / "d", takes, images="none")) as reader:
        fields = {field.name: (field.dtype, field.shape) for field, _ in reader.facts().fields}
        assert fields["action.chunk"] == ("int32", (2, 3))
        assert fields["observation.pose.arm"] == ("float64", (2,))
        pieces = list(reader.pieces())
        assert pieces[0].text["operator"] == "op 0"
        assert pieces[0].columns["action", "chunk"].reshape(-1).tolist() == list(range(18))


def test_a_type_that_the_stated_one_holds_becomes_it_and_another_is_kept(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", random_takes((3,)), images="none")
    path = folder / "data/chunk-000/episode_000000.parquet"
    table = pq.read_table(path)
    place = table.schema.get_field_index("observation.state")
    wide = pa.array(
        [[float(one) for one in row] for row in table["observation.state"].to_pylist()], pa.list_(pa.float64())
    )
    pq.write_table(table.set_column(place, "observation.state", wide), path)
    with LerobotReader(folder) as reader:
        fields = {field.name: field.dtype for field, _ in reader.facts().fields}
    assert fields["observation.state"] == "float64"  # float32 is stated, and would lose digits


@pytest.mark.parametrize(
    ("version", "layout", "images"),
    [("v2.1", "ted", "keep"), ("v2.1", "packed", "decode"), ("v3.0", "ted", "decode"), ("v3.0", "packed", "keep")],
)
def test_any_number_of_workers_writes_the_same_bytes(version: str, layout: str, images: str, tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", random_takes((5, 1, 6, 9)), version=version)
    digests = {
        rbtool.convert(folder, tmp_path / f"{count}", num_workers=count, layout=layout, images=images).content_digest
        for count in (0, 2)
    }
    assert len(digests) == 1


def test_a_video_folder_of_another_name_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    shutil.copytree(DATA / "v21", folder)
    (folder / "videos").rename(folder / "video")
    one, other = (
        rbtool.convert(path, tmp_path / f"{path.name} out", images="decode") for path in (DATA / "v21", folder)
    )
    assert one.content_digest == other.content_digest


def test_image_shapes_with_channels_first(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", random_takes((3,)))
    change_feature(folder, CAMERA, shape=[3, 32, 48], names=["channels", "height", "width"])
    expected = np.stack([row[CAMERA] for row in plain_rows(folder)])
    with LerobotReader(folder, options={"images": "decode"}) as reader:
        (piece,) = reader.pieces()
        assert np.array_equal(piece.columns["observation", "image", "top"][:3], np.moveaxis(expected, -1, 1))


ROWS = "data/chunk-000/episode_000001.parquet"
VIDEO = f"videos/chunk-000/{CAMERA}/episode_000001.mp4"


@pytest.fixture(params=["v2.1", "v3.0"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "d", random_takes((4, 3, 5)), version=request.param, a_file=1)


@pytest.fixture
def older(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "old", random_takes((4, 3, 5)))


def features_of(folder: Path) -> dict[str, Any]:
    stated: dict[str, Any] = json.loads((folder / "meta/info.json").read_text())["features"]
    return stated


def change_info(folder: Path, **entries: Any) -> None:
    path = folder / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def change_feature(folder: Path, name: str, **entries: Any) -> None:
    features = features_of(folder)
    change_info(folder, features=features | {name: features[name] | entries})


def change_rows(path: Path, change: Callable[[Any], Any]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def replaced(name: str, values: Any) -> Callable[[Any], Any]:
    return lambda table: table.set_column(table.schema.get_field_index(name), name, [values])


def test_an_empty_info_is_named_whatever_else_is_there(folder: Path) -> None:
    (folder / "meta/info.json").write_bytes(b"")
    refused(folder, "info.json is an empty file", CorruptDataError)


@pytest.mark.parametrize("name", ["meta/info.json", ROWS, VIDEO, "meta/tasks.jsonl"])
def test_pointers_of_git_lfs_are_named(name: str, older: Path) -> None:
    (older / name).write_bytes(POINTER)
    assert "git lfs pull" in refused(older, f"{name}.*git-lfs pointer|git-lfs pointer.*{name}").hint


def test_metadata_alone_are_no_dataset(folder: Path) -> None:
    shutil.rmtree(folder / "data")
    refused(folder, "no files of rows")


@pytest.mark.parametrize("entries", [
    {"codebase_version": "v1.6"}, {"codebase_version": None}, {"features": {}}, {"fps": 0}, {"fps": "10"},
    {"data_path": "../{episode_index}"}, {"data_path": "{episode_index.real}"}, {"data_path": 3},
    {"data_path": "data/{nothing}"}, {"chunks_size": -1}, {"features": {"a": 3}},
    {"features": {"action": {"dtype": "float32", "shape": [-2]}}},
])  # fmt: skip
def test_entries_of_info_that_make_no_sense_are_named(entries: dict[str, Any], folder: Path) -> None:
    change_info(folder, **entries)
    refused(folder, "info.json|outside the dataset")


def test_a_feature_without_a_column_is_named(folder: Path) -> None:
    extra = {"observation.extra": {"dtype": "float32", "shape": [2]}}
    change_info(folder, features=features_of(folder) | extra)
    refused(folder, "'observation.extra', and the files of rows lack it")


def test_mixed_versions_are_named(tmp_path: Path) -> None:
    takes = random_takes((3, 2))
    for number, (stated, other) in enumerate((("v2.1", "v3.0"), ("v3.0", "v2.1"))):
        folder = write_dataset(tmp_path / str(number), takes, version=other, codebase_version=stated)
        refused(folder, "versions are mixed")
    folder = write_dataset(tmp_path / "both", takes)
    shutil.copytree(DATA / "v30/data/chunk-000", folder / "data/chunk-000", dirs_exist_ok=True)
    refused(folder, "versions are mixed")


def assert_two_are_left(path: Path, said: str, *, video: bool = False) -> None:
    """Episode 1 is bad: it is named, and left out with `--skip-bad`; `video` states that its rows are sound."""
    assert said in refused(path, "", RbtoolError).message
    result = rbtool.convert(path, path.parent / "sound", skip_bad=True, final_step="repeat")
    assert (result.episodes, result.steps) == (2, 9)
    assert any("episode 1 is left out" in note and said in note for note in result.notes)
    assert not any("--skip-bad" in note for note in result.notes)
    chosen = rbtool.convert(path, path.parent / "chosen", episodes="0,2", final_step="repeat")
    assert chosen.steps == 9
    if video:
        assert rbtool.convert(path, path.parent / "bare", images="skip", final_step="repeat").steps == 12


def in_rows(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: change_rows(folder / ROWS, change)


def in_column(name: str, values: Any) -> Callable[[Path], None]:
    return in_rows(replaced(name, values))


def change_listed(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        rows = [json.loads(line) for line in (folder / "meta/episodes.jsonl").read_text().splitlines()]
        change(rows)
        write_lines(folder / "meta/episodes.jsonl", rows)

    return changed


def cut_rows(folder: Path) -> None:
    data = (folder / ROWS).read_bytes()
    (folder / ROWS).write_bytes(data[: len(data) // 2])


def copy_rows(folder: Path) -> None:
    shutil.copy(folder / ROWS, folder / "data/chunk-000/episode_000009.parquet")


def other_video(*numbers: int, rows: int = 32, **how: Any) -> Callable[[Path], None]:
    return lambda folder: write_video(folder / VIDEO, [picture(number)[:rows] for number in numbers], **how)


@each(
    ("change", "said", "video"),
    [
        (lambda folder: (folder / ROWS).unlink(), "episode_000001.parquet is missing", False),
        (cut_rows, "episode_000001.parquet cannot be read", False),
        (in_column("next.reward", pa.array([1.0, 2.0, 3.0])), "'next.reward' as float64", False),
        (in_rows(lambda table: table.drop_columns(["next.reward"])), "no column 'next.reward'", False),
        (in_column("frame_index", [0, 1, 3]), "frame_index goes from 1 to 3 at row 2", False),
        (change_listed(lambda rows: rows[1].update(length=7)), "3 rows of episode 1, but the metadata state 7", False),
        (change_listed(lambda rows: rows.pop(1)), "rows of episode 1, which is not in the metadata", False),
        (copy_rows, "rows of episode 1 are in 2 places", False),
        (in_column("task_index", [1, 1, 9]), "has the task 9", False),
        (in_column("timestamp", np.array([0, 0.1, 0.5], np.float32)), "row 2 has the timestamp 0.500 s", True),
        (lambda folder: (folder / VIDEO).unlink(), "episode_000001.mp4 is missing", True),
        (other_video(4, 5), "has 2 frames, and the rows of episode 1 need 3", True),
        (other_video(4, 5, 6, fps=25), "but no frame for row 2", True),
        (other_video(4, 5, 6, rows=16), "info.json states [32, 48, 3]", True),
    ],
)
def test_damage_of_an_episode_costs_that_episode(
    change: Callable[[Path], None], said: str, video: bool, tmp_path: Path
) -> None:
    folder = write_dataset(tmp_path / "old", random_takes((4, 3, 5)))
    change(folder)
    assert_two_are_left(folder, said, video=video)


def test_a_column_that_one_file_alone_has_is_named(older: Path) -> None:
    change_rows(older / ROWS, lambda table: table.append_column("force", pa.array([1.0, 2.0, 3.0])))
    result = rbtool.convert(older, older.parent / "all")
    assert [(one["key"], "1 of 3 files has it" in one["why"]) for one in result.dropped_keys] == [("force", True)]


def test_missing_values_are_named(older: Path) -> None:
    change_rows(older / ROWS, replaced("next.reward", pa.array([1.0, None, 2.0], pa.float32())))
    with pytest.raises(FormatError, match="missing values"), LerobotReader(older) as reader:
        list(reader.pieces())


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_of_a_subset_without_videos_the_episodes_asked_for_are_named_and_their_rows_can_be_taken(
    version: str, tmp_path: Path
) -> None:
    path = write_dataset(tmp_path / "d", random_takes((4, 3, 5, 2)), version=version, a_file=1)
    shutil.rmtree(path / "videos")
    for file in sorted(path.glob("data/*/*.parquet"))[:2]:
        file.unlink()
    video = "episode_00000{}.mp4" if version == "v2.1" else "file-00{}.mp4"
    chosen: list[dict[str, Any]] = [{"episodes": "2,3"}, {"episodes": "2,3", "skip_bad": True}, {"skip_bad": True}]
    for options in chosen:
        error = refused(path, rf"{video.format(2)} is missing.*episode 2 needs it", **options)
        assert "--images skip" in error.hint
        assert ("--skip-bad" in error.hint) == ("skip_bad" not in options)
    refused(path, "episode 0")
    refused(path, "episode 1", episodes="1")
    for alone in ({"episodes": "2"}, {"episodes": "2:", "max_episodes": 1}):
        assert refused(path, "", **alone).hint == "--images skip takes the steps without images"
    for number, options in enumerate(chosen):
        result = rbtool.convert(path, tmp_path / str(number), images="skip", final_step="repeat", **options)
        assert (result.episodes, result.steps) == (2, 7)
    found = rbtool.check(path)
    assert [one.episodes for one in found.findings] == [(0,), (1,), (2,), (3,)]


def test_frames_after_the_rows_are_left_out_and_counted(older: Path) -> None:
    write_video(older / VIDEO, [picture(number) for number in (4, 5, 6, 7)])
    notes = rbtool.convert(older, older.parent / "all").notes
    assert any("1 video of observation.images.top with more frames" in note for note in notes)


def shared_file(
    folder: Path, column: str, change: Callable[[list[float]], list[float]], lengths: tuple[int, ...] = (4, 3, 5)
) -> Path:
    """A dataset of v3 with one video, in whose metadata the times `column` of the episodes are changed."""
    made = write_dataset(folder, random_takes(lengths), version="v3.0", a_file=len(lengths))
    path, name = made / "meta/episodes/chunk-000/file-000.parquet", f"videos/{CAMERA}/{column}"
    times = change(pq.read_table(path)[name].to_pylist())
    change_rows(path, replaced(name, pa.array(times)))
    return made


@pytest.mark.parametrize("images", ["keep", "decode"])
def test_episodes_that_share_a_frame_are_left_out(images: str, tmp_path: Path) -> None:
    folder = shared_file(tmp_path / "d", "from_timestamp", lambda times: [times[0], times[1] - 0.1, times[2]])
    refused(folder, "frame 3 would belong to episode 0 and to episode 1", images=images)
    result = rbtool.convert(folder, tmp_path / "sound", images=images, skip_bad=True, final_step="repeat")
    assert (result.episodes, result.steps) == (1, 5)
    again = rbtool.convert(result.path, tmp_path / "again", skip_bad=True)
    for one in (result, again):
        undecoded = [note for note in one.notes if note.startswith("frames of kept videos were not decoded")]
        assert len(undecoded) == (images == "keep")


def test_what_comes_after_an_episode_inside_another_one_is_compared_with_both(tmp_path: Path) -> None:
    starts = [0.4, 0.1, 0.0, 0.8]  # frames 4:8, 1:4, 0:5, 8:12
    folder = shared_file(tmp_path / "d", "from_timestamp", lambda _: starts, lengths=(4, 3, 5, 4))
    refused(folder, "frame 4 would belong to episode 2 and to episode 0", episodes="0")
    assert rbtool.convert(folder, tmp_path / "sound", skip_bad=True, final_step="repeat").steps == 4


def test_times_that_end_before_the_rows_are_noted(tmp_path: Path) -> None:
    folder = shared_file(tmp_path / "d", "to_timestamp", lambda times: [times[0] - 0.1, *times[1:]])
    result = rbtool.convert(folder, tmp_path / "all", final_step="repeat")
    assert result.steps == 12
    assert any(note.startswith("to_timestamp of 1 episode leaves fewer frames") for note in result.notes)


def test_a_damaged_image_in_a_column_is_named_with_its_row(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", random_takes((4, 3, 5)), images="image")

    def cut(table: Any) -> Any:
        images = table[CAMERA].to_pylist()
        images[2]["bytes"] = images[2]["bytes"][:50]
        return replaced(CAMERA, images)(table)

    change_rows(folder / ROWS, cut)
    assert_two_are_left(folder, "'observation.images.top', row 2: the image is damaged", video=True)


def test_a_choice_for_images_that_is_not_known_is_a_usage_error(folder: Path) -> None:
    refused(folder, "--images is 'drop'", UsageError, images="drop")


def test_without_pyav_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    error = refused(folder, "", RbtoolError)
    assert (error.exit_code, error.hint) == (2, "pip install 'rbtool[video]'")
    assert rbtool.convert(folder, folder.parent / "bare", images="skip").episodes == 3


def test_many_episodes_that_are_missing_are_named_as_ranges(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "many", random_takes((2,) * 32), images="none")
    for number in (*range(24), 26, 28, 29):
        (folder / f"data/chunk-000/episode_{number:06}.parquet").unlink()
    result = rbtool.convert(folder, tmp_path / "out", skip_bad=True)
    assert result.episodes == 5
    assert result.notes[-1].endswith("7 more of 32 episodes are left out: 20..23, 26, 28..29")


MEASURED = """
import sys
import rbtool
from pathlib import Path
made = rbtool.convert(sys.argv[1], sys.argv[2], images=sys.argv[3], final_step="repeat")
most = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(made.steps, made.bytes >> 20, int(most.split()[1]) >> 10)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize(("images", "choice"), [("video", "decode"), ("video", "keep"), ("image", "decode")])
def test_a_large_dataset_converts_under_400_mib(
    images: str, choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lerobot_files, "SIZE", (480, 640))
    monkeypatch.setattr(lerobot_files, "picture", _noisy)
    source = write_dataset(tmp_path / "d", random_takes((700, 500)), version="v3.0", images=images)
    words = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "out"), choice]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    steps, size, mebibytes = map(int, done.stdout.split())
    assert steps == 1_200
    assert (size > 1_000) == (choice == "decode")
    assert mebibytes < 400
    assert rbtool.check(tmp_path / "out").errors == 0


def _noisy(number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    image = np.zeros((480, 640, 3), np.uint8)
    image[..., 0] = (np.arange(640) + number) % 256
    image[::7, :, 1] = number % 256
    image[64 : 64 + 96, number % 500 : number % 500 + 96] = np.random.default_rng(number).integers(0, 255, (96, 96, 3))
    return image


def test_short_episodes_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = random_takes((3, 1, 4) * 30)
    source = write_dataset(tmp_path / "d", takes, version="v3.0", images="none", a_file=60)
    for path in source.glob("data/*/*.parquet"):  # a group of rows for each episode, as LeRobot writes them
        table = pq.read_table(path)
        with pq.ParquetWriter(path, table.schema) as writer:
            for number in range(len(takes)):
                writer.write_table(table.filter(pc.field("episode_index") == number))
    spans: list[tuple[int, int]] = []
    read = RowsFile.read

    def counted(file: RowsFile, names: Sequence[str], start: int, stop: int) -> Any:
        spans.append((start, stop))
        return read(file, names, start, stop)

    monkeypatch.setattr(RowsFile, "read", counted)
    made = rbtool.convert(source, tmp_path / "made", final_step="repeat")
    assert (made.episodes, made.steps) == (90, 240)
    assert len(spans) < 10
    texts = rbtool.load_dataset(made.path, texts=True)[:]["language_instruction"]
    assert list(texts) == [task for take in takes for task in take.tasks]
    dropped = rbtool.convert(source, tmp_path / "dropped", final_step="drop")
    assert (dropped.episodes, dropped.steps) == (60, 150)
    texts = rbtool.load_dataset(dropped.path, texts=True)[:]["language_instruction"]
    assert list(texts) == [task for take in takes for task in take.tasks[:-1]]
