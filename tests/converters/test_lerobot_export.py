"""`rbtool export --to lerobot`: rows and pixels that a plain reading, our reader and LeRobot itself find again."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from cases import each
from lerobot_files import CAMERA, plain_rows, random_takes, write_dataset
from PIL import Image
from table_files import flat, random_episodes, write_d4rl

import rbtool
from rbtool.converters.lerobot.export import LerobotExporter
from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.format.converter import Chosen
from rbtool.core.open_steps import open_steps

DATA = Path(__file__).parents[1] / "data" / "lerobot"
RECENT = (
    "jitter_4ms", "two_cameras_language", "subtasks_v05", "depth_image_m", "depth_video_mm", "groot_v21",
)  # fmt: skip


def exported(source: Path, folder: Path, images: str, **options: Any) -> Path:
    """Convert every step, and export them."""
    made = rbtool.convert(source, folder / "made", images=images, final_step="repeat")
    return rbtool.export(made.path, folder / "exported", to="lerobot", **options).path


def document(folder: Path, name: str = "info") -> Any:
    return json.loads((folder / f"meta/{name}.json").read_text())


def episodes_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    return rows


@pytest.mark.parametrize("images", ["keep", "decode"])
@pytest.mark.parametrize("name", ["v21", "v30"])
def test_a_plain_reading_of_the_export_equals_that_of_the_source(name: str, images: str, tmp_path: Path) -> None:
    before, after = plain_rows(DATA / name), plain_rows(exported(DATA / name, tmp_path, images))
    assert len(after) == len(before)
    for row, expected in zip(after, before, strict=True):
        assert np.array_equal(row.pop("observation.images.top"), expected.pop("observation.images.top"))
        for key in ("action", "observation.state"):
            assert np.array_equal(np.atleast_1d(row.pop(key)), np.atleast_1d(expected.pop(key)))
        assert row == expected


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of all files, with the pixels of images in columns."""
    tables = [pq.read_table(path) for path in sorted(folder.glob("data/*/*.parquet"))]
    rows: list[dict[str, Any]] = [row for table in tables for row in table.to_pylist()]
    for row in rows:
        for name, value in row.items():
            if isinstance(value, dict) and "bytes" in value:
                image = np.asarray(Image.open(io.BytesIO(value["bytes"])))
                row[name] = (str(image.dtype), image.tobytes())
            elif isinstance(value, list) and len(value) == 1 and not isinstance(value[0], dict):
                row[name] = value[0]
    return rows


@each("name", RECENT)
def test_a_recent_set_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    source = DATA / "recent" / name
    made = rbtool.convert(source, tmp_path / "made")
    assert not made.dropped_keys
    out = rbtool.export(made.path, tmp_path / "out", to="lerobot")
    assert not out.dropped_keys
    assert rows_of(out.path) == rows_of(source)
    assert len(rows_of(source)) == made.steps
    before, after = document(source), document(out.path)
    del after["exported_by"]
    if before["codebase_version"] == "v3.0":
        assert after == before
        tables = [pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet") for folder in (source, out.path)]
        assert sorted(tables[0].column_names) == sorted(tables[1].column_names)
        plain = [column for column in tables[0].column_names if not column.startswith("stats/")]
        for row, expected in zip(*(table.select(plain).to_pylist() for table in reversed(tables)), strict=True):
            times = [name for name in row if name.endswith("_timestamp")]
            assert [row.pop(name) for name in times] == pytest.approx([expected.pop(name) for name in times])
            assert row == expected
    else:
        assert (after["features"], after["robot_type"]) == (before["features"], before["robot_type"])
    for file in ("tasks.parquet", "subtasks.parquet"):
        if (source / "meta" / file).exists():
            found, expected = (pq.read_table(folder / "meta" / file) for folder in (out.path, source))
            assert found.to_pylist() == expected.to_pylist()
    if (source / "meta/modality.json").exists():
        assert (out.path / "meta/modality.json").read_bytes() == (source / "meta/modality.json").read_bytes()
    videos = [sorted(path.read_bytes() for path in folder.rglob("*.mp4")) for folder in (source, out.path)]
    assert videos[0] == videos[1]


@each("name", RECENT)
def test_statistics_are_those_of_all_rows_and_of_each_episode(name: str, tmp_path: Path) -> None:
    made = rbtool.convert(DATA / "recent" / name, tmp_path / "made")
    out = rbtool.export(made.path, tmp_path / "out", to="lerobot").path
    rows, stats, of_episodes = rows_of(out), document(out, "stats"), episodes_of(out)
    features = document(out)["features"]
    described = {name for name, entry in features.items() if entry["dtype"] not in ("string", "language")}
    assert stats.keys() == described
    for name in described:
        visual = features[name]["dtype"] in ("image", "video")
        for number, episode in enumerate([None, *of_episodes]):
            found = stats[name] if episode is None else {one: episode[f"stats/{name}/{one}"] for one in stats[name]}
            assert sorted(found) == sorted(["min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99"])
            chosen = [row for row in rows if episode is None or row["episode_index"] == number - 1]
            assert found["count"] == [len(chosen)]
            if visual:
                assert np.shape(found["mean"]) == (features[name]["shape"][2], 1, 1)
                continue
            values = np.array([row[name] for row in chosen], np.float64).reshape(len(chosen), -1)
            expected = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
            expected |= {f"q{at:02d}": np.quantile(values, at / 100, axis=0) for at in (1, 10, 50, 90, 99)}
            for one, numbers in expected.items():
                assert np.allclose(found[one], numbers, rtol=1e-9, atol=1e-9), (name, one)


def test_statistics_of_depths_are_in_their_unit(tmp_path: Path) -> None:
    metres, millimetres = (DATA / "recent" / name for name in ("depth_image_m", "depth_video_mm"))
    truth = np.load(DATA / "recent/depth_image_m_truth.npz")
    depths = np.stack([truth[name] for name in truth.files])
    for source in (metres, millimetres):
        made = rbtool.convert(source, tmp_path / f"{source.name}-made").path
        rbtool.export(made, tmp_path / source.name, to="lerobot")
    found = document(tmp_path / "depth_image_m", "stats")["observation.images.wrist_depth"]
    for one, expected in (("min", depths.min()), ("max", depths.max()), ("mean", depths.mean()), ("std", depths.std())):
        assert found[one][0][0][0] == pytest.approx(float(expected), rel=1e-6)
    assert found["q90"][0][0][0] == pytest.approx(float(np.quantile(depths, 0.9)), rel=4e-3)
    coded = document(tmp_path / "depth_video_mm", "stats")["observation.images.depth"]
    assert (coded["min"], coded["max"]) == ([[[10.0]]], [[[10000.0]]])


@each("name", RECENT)
def test_statistics_are_written_of_a_folder_and_of_a_dataset(name: str, tmp_path: Path) -> None:
    source = DATA / "recent" / name
    made = rbtool.convert(source, tmp_path / "made").path
    out = rbtool.export(made, tmp_path / "out", to="lerobot").path
    expected = document(out, "stats")
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    for path in (source, made):
        result = rbtool.stats(path, write_lerobot=tmp_path / f"{path.name}.json")
        assert (result.written, result.steps) == (tmp_path / f"{path.name}.json", result.steps)
        found = json.loads((tmp_path / f"{path.name}.json").read_text())
        assert found.keys() == expected.keys()
        for feature, numbers in expected.items():
            for one, value in numbers.items():
                assert np.allclose(found[feature][one], value, rtol=1e-6, atol=1e-9), (feature, one)
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    with pytest.raises(UsageError, match="already exists"):
        rbtool.stats(made, write_lerobot=tmp_path / "made.json")
    with pytest.raises(UsageError, match="overlap"):
        rbtool.stats(source, write_lerobot=source / "meta/other.json")


def test_rows_that_were_left_out_shift_times_and_language(tmp_path: Path) -> None:
    made = rbtool.convert(DATA / "recent/two_cameras_language", tmp_path / "made", episodes="0").path
    late = rbtool.preprocess(made, dest=tmp_path / "late", operations={"where": ["frame>=10"]}).path
    out = rbtool.export(late, tmp_path / "out", to="lerobot").path
    rows, before = rows_of(out), rows_of(DATA / "recent/two_cameras_language")[10:24]
    assert [row["frame_index"] for row in rows] == list(range(14))
    assert [row["timestamp"] for row in rows] == pytest.approx([at / 10 for at in range(14)], abs=1e-6)
    assert [row["language_events"] for row in rows] == [row["language_events"] for row in before]
    said = {one["content"]: one["timestamp"] for one in rows[0]["language_persistent"]}
    assert said["grasp it"] == 0.0
    assert "reach for the object" not in said
    assert said["carry it over"] == pytest.approx(0.6, abs=1e-6)
    slow = rbtool.preprocess(late, dest=tmp_path / "slow", operations={"resample": "5"}, num_workers=0).path
    slow_rows = rows_of(rbtool.export(slow, tmp_path / "slow-out", to="lerobot").path)
    assert slow_rows[0]["language_persistent"] == rows[0]["language_persistent"]
    pairs = zip(rows[::2], rows[1::2], strict=True)
    events = [[*early["language_events"], *later["language_events"]] for early, later in pairs]
    assert [row["language_events"] for row in slow_rows] == events
    assert any(events)
    with pytest.raises(UsageError, match="language_events of episode 0 are stated by frame"):
        rbtool.preprocess(late, dest=tmp_path / "wrong", operations={"resample": "5,from=30"}, num_workers=0)
    bare = rbtool.convert(DATA / "recent/subtasks_v05", tmp_path / "bare", episodes="0").path
    gaps = rbtool.preprocess(bare, _every_second, dest=tmp_path / "gaps").path
    result = rbtool.export(gaps, tmp_path / "again", to="lerobot")
    assert any(one.startswith("time stamps of 1 episode, which lack rows, are made anew") for one in result.notes)
    assert [row["timestamp"] for row in rows_of(result.path)] == pytest.approx([at / 10 for at in range(9)], abs=1e-6)


def _every_second(rows: Any) -> Any:
    return rows.set("frame", rows["frame"] * 2)


def test_what_merged_datasets_have_in_common_is_stated(tmp_path: Path) -> None:
    made = rbtool.convert(DATA / "recent/depth_video_mm", tmp_path / "made").path
    first = rbtool.export(made, tmp_path / "first", to="lerobot", episodes="0", robot_type="other").path
    named = rbtool.export(made, tmp_path / "second", to="lerobot", episodes="1", names=["action=a,b,c,d"]).path
    parts = [rbtool.convert(path, tmp_path / f"{path.name}-made").path for path in (first, named)]
    merged = rbtool.merge(parts, tmp_path / "merged").path
    out = rbtool.export(merged, tmp_path / "out", to="lerobot").path
    info, before = document(out), document(named)
    assert (info["fps"], info["robot_type"]) == (15, None)
    assert info["features"]["action"]["names"] is None
    for name in ("observation.state", "observation.images.depth"):
        assert info["features"][name] == before["features"][name]
    again = rbtool.convert(out, tmp_path / "again", images="decode").path
    found = rbtool.load_dataset(again)[:]["observation", "image", "depth"]
    assert found.equal(rbtool.load_dataset(merged)[:]["observation", "image", "depth"])


def test_videos_of_depths_without_metadata_of_their_own_are_described(tmp_path: Path) -> None:
    made = rbtool.convert(DATA / "recent/depth_video_mm", tmp_path / "made").path
    changed = {"rename": ["video.observation.image.depth=video.observation.image.far"]}
    renamed = rbtool.preprocess(made, dest=tmp_path / "renamed", operations=changed).path
    out = rbtool.export(renamed, tmp_path / "out", to="lerobot").path
    entry = document(out)["features"]["observation.images.far"]
    expected = document(DATA / "recent/depth_video_mm")["features"]["observation.images.depth"]
    assert entry["shape"] == expected["shape"]
    assert {name: value for name, value in expected["info"].items() if name in entry["info"]} == entry["info"]
    assert entry["info"]["video.depth_max"] == 10.0


def test_names_robot_and_modality_are_stated(tmp_path: Path) -> None:
    made = own_data(tmp_path, ["push"] * 4)
    modality = tmp_path / "modality.json"
    parts = {"state": {"arm": {"start": 0, "end": 2}}, "action": {"grip": {"start": 1, "end": 2}}}
    modality.write_text(json.dumps(parts))
    given: dict[str, Any] = {"to": "lerobot", "robot_type": "toy", "modality": modality}
    rbtool.export(made, tmp_path / "out", names=["action=push,close", "observation.state=a,b"], **given)
    info = document(tmp_path / "out")
    assert info["robot_type"] == "toy"
    names = [info["features"][one]["names"] for one in ("action", "observation.state")]
    assert names == [["push", "close"], ["a", "b"]]
    assert document(tmp_path / "out", "modality") == parts
    for names, message in (
        (["action=push"], "1 names for action, which has the shape"), (["move=x"], "move, which is not a feature"),
        (["action"], "expected a feature and its names"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            rbtool.export(made, tmp_path / "refused", names=names, **given)
    modality.write_text(json.dumps({"state": {"arm": {"start": 0, "end": 3}}}))
    with pytest.raises(UsageError, match=r"state arm has the range 0:3 of observation\.state"):
        rbtool.export(made, tmp_path / "refused", **given)
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("images", ["keep", "decode"])
def test_an_export_is_converted_to_the_same_rows(images: str, tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "d", random_takes((4, 1, 6)), version="v2.1")
    out = exported(source, tmp_path, images)
    again = rbtool.convert(out, tmp_path / "again", images=images, final_step="repeat").path
    found = rbtool.diff(tmp_path / "made", again)
    assert (found.equal, found.same) == (True, 3)


def test_the_metadata_are_those_of_version_3(tmp_path: Path) -> None:
    out = exported(DATA / "v21", tmp_path, "keep")
    info = document(out)
    assert (info["codebase_version"], info["fps"], info["total_episodes"], info["total_frames"]) == ("v3.0", 10, 4, 42)
    assert info["features"]["observation.images.top"]["shape"] == [48, 48, 3]
    episodes = episodes_of(out)
    assert [one["length"] for one in episodes] == [15, 5, 7, 15]
    assert [one["dataset_from_index"] for one in episodes] == [0, 15, 20, 27]
    assert [one["videos/observation.images.top/file_index"] for one in episodes] == [0, 1, 2, 3]
    tasks = pq.read_table(out / "meta/tasks.parquet")
    assert tasks.to_pylist() == [
        {"task_index": 0, "task": "push the square right"}, {"task_index": 1, "task": "push the square left"},
    ]  # fmt: skip
    rows = np.array([row["action"] for row in plain_rows(DATA / "v21")], np.float64)
    stats, images = (document(out, "stats")[name] for name in ("action", "observation.images.top"))
    pixels = np.stack([row["observation.images.top"] for row in plain_rows(DATA / "v21")]) / 255
    assert np.shape(images["mean"]) == (3, 1, 1)
    assert np.allclose(np.reshape(images["mean"], 3), pixels.mean(axis=(0, 1, 2)), atol=0.02)
    for name, expected in (("min", rows.min()), ("max", rows.max()), ("mean", rows.mean()), ("std", rows.std())):
        assert stats[name][0] == pytest.approx(expected, abs=1e-9)


def test_the_progress_of_kept_videos_ends_at_their_size(tmp_path: Path) -> None:
    dataset = rbtool.convert(DATA / "v30", tmp_path / "kept", images="keep").path
    with open_steps(dataset) as reader:
        sink = LerobotExporter(Chosen(reader, np.arange(len(reader.episodes.length))), "out")
        counts: list[int] = []
        sink.write(tmp_path / "out", counts.append)
        assert sum(counts) == sink.size()


def test_other_datasets_have_images_and_names_of_lerobot(tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "a.hdf5", flat(random_episodes((3, 4))))
    made = rbtool.convert(file, tmp_path / "made").path
    result = rbtool.export(made, tmp_path / "out", to="lerobot")
    assert any("fps is 1" in note for note in result.notes)
    rows = plain_rows(tmp_path / "out")
    with open_steps(made) as reader:
        assert np.array_equal([row["observation.state"] for row in rows], reader.read(("observation",), 0, len(rows)))
        assert [row["episode_index"] for row in rows] == np.repeat([0, 1], reader.episodes.length).tolist()
    assert {row["task"] for row in rows} == {"out"}


def own_data(folder: Path, tasks: list[str]) -> Path:
    """Convert a table of two episodes of two steps, whose columns have names."""
    lines = [f"{row}.5,{row},{-row},{row},{row % 2},{task}" for row, task in enumerate(tasks)]
    path = folder / "log.csv"
    path.write_text("x,y,grip,force,done,instruction\n" + "\n".join(lines) + "\n")
    pairs = ["observation=x,y action=force,grip language_instruction=instruction timestamp=y"]
    return rbtool.convert(path, folder / "made", format="table", map=pairs, ends="done").path


def test_own_data_have_their_rate_and_the_names_of_their_columns(tmp_path: Path) -> None:
    made = own_data(tmp_path, ["push"] * 4)
    result = rbtool.export(made, tmp_path / "out", to="lerobot", fps=50)
    assert not any("rate of steps" in note for note in result.notes)
    assert [one["key"] for one in result.dropped_keys] == ["timestamp"]
    info = document(tmp_path / "out")
    names = {name: feature["names"] for name, feature in info["features"].items()}
    assert info["fps"] == 50
    assert names["observation.state"] == ["x", "y"]
    assert names["action"] == ["force", "grip"]
    assert [row["timestamp"] for row in plain_rows(tmp_path / "out")] == pytest.approx([0, 0.02] * 2)
    again = rbtool.convert(tmp_path / "out", tmp_path / "again").path
    rbtool.export(again, tmp_path / "twice", to="lerobot")
    twice = document(tmp_path / "twice")
    assert (twice["fps"], twice["features"]["action"]["names"]) == (50, ["force", "grip"])


@pytest.mark.parametrize("tasks", [["push", "push", "lift", "lift"], ["push", "lift", "lift", "push"]])
def test_instructions_of_own_data_are_the_tasks_of_their_rows(tasks: list[str], tmp_path: Path) -> None:
    made = own_data(tmp_path, tasks)
    result = rbtool.export(made, tmp_path / "out", to="lerobot")
    assert not any("have the task" in note for note in result.notes)
    rows = plain_rows(tmp_path / "out")
    assert [row["task"] for row in rows] == tasks
    assert "language_instruction" not in rows[0]
    tasks_of = [one["tasks"] for one in episodes_of(tmp_path / "out")]
    assert tasks_of == [list(dict.fromkeys(tasks[:2])), list(dict.fromkeys(tasks[2:]))]
    assert rbtool.convert(tmp_path / "out", tmp_path / "again", final_step="repeat").steps == 4


@each(
    ("to", "fps", "message"),
    [("lerobot", 0, "--fps is 0"), ("lerobot", float("nan"), "--fps is nan"), ("npz", 50, "no option --fps")],
)
def test_a_rate_that_makes_no_sense_is_refused(to: str, fps: float, message: str, tmp_path: Path) -> None:
    made = own_data(tmp_path, ["push"] * 4)
    with pytest.raises(UsageError, match=message):
        rbtool.export(made, tmp_path / "out", to=to, fps=fps)
    assert not (tmp_path / "out").exists()


def test_only_chosen_episodes_are_written(tmp_path: Path) -> None:
    out = exported(DATA / "v30", tmp_path, "keep", episodes="1,3")
    assert [row["episode_index"] for row in plain_rows(out)] == [0] * 5 + [1] * 15
    before = [row for row in plain_rows(DATA / "v30") if row["episode_index"] in (1, 3)]
    for row, expected in zip(plain_rows(out), before, strict=True):
        assert np.array_equal(row["observation.images.top"], expected["observation.images.top"])
        assert row["task"] == expected["task"]


def test_tasks_that_change_inside_an_episode_stay_those_of_their_rows(tmp_path: Path) -> None:
    takes = random_takes((4, 3))
    takes[0].tasks = ["open", "open", "close", "close"]
    out = exported(write_dataset(tmp_path / "d", takes, images="none"), tmp_path, "skip")
    assert [row["task"] for row in plain_rows(out)] == [*takes[0].tasks, *takes[1].tasks]


def test_time_stamps_begin_at_0_after_a_cut_and_a_change_of_rate(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "d", random_takes((9, 4)), images="none")
    made = rbtool.convert(source, tmp_path / "made", final_step="repeat").path
    cut = rbtool.preprocess(made, None, tmp_path / "cut", operations={"where": "frame >= 2"}, num_workers=0).path
    slow = rbtool.preprocess(cut, None, tmp_path / "slow", operations={"resample": "5"}, num_workers=0).path
    rows = plain_rows(rbtool.export(slow, tmp_path / "out", to="lerobot").path)
    assert [row["timestamp"] for row in rows] == pytest.approx([0, 0.2, 0.4, 0.6, 0])


def test_rows_keep_their_tasks_where_those_before_them_are_gone(tmp_path: Path) -> None:
    takes = random_takes((6, 3))
    takes[0].tasks = ["open", "open", "close", "close", "open", "wipe"]
    made = rbtool.convert(write_dataset(tmp_path / "d", takes, images="none"), tmp_path / "made", final_step="repeat")

    def tasks(*before: dict[str, str], **operations: Any) -> list[str]:
        path = made.path
        for place, one in enumerate([*before, operations]):
            dest = tmp_path / f"cut{place}"
            path = rbtool.preprocess(path, None, dest, operations=one, num_workers=0, force=True).path
        out = rbtool.export(path, tmp_path / "out", to="lerobot", force=True).path
        return [row["task"] for row in plain_rows(out)]

    assert tasks(where="frame >= 2") == [*takes[0].tasks[2:], *takes[1].tasks[2:]]
    assert tasks(where="frame != 2") == [one for take in takes for one in take.tasks[:2] + take.tasks[3:]]
    assert tasks(rename_task="open=turn")[:6] == ["turn", "turn", "close", "close", "turn", "wipe"]
    assert tasks(rename_task="open=turn", where="frame >= 2")[:4] == ["close", "close", "turn", "wipe"]
    swapped = [{"rename_task": one} for one in ("open=x", "close=open", "x=close")]
    assert tasks(*swapped, where="frame >= 2")[:4] == ["open", "open", "close", "wipe"]
    assert episodes_of(tmp_path / "out")[0]["tasks"] == ["open", "close", "wipe"]
    assert tasks(where="frame == 2") == ["close", takes[1].tasks[2]]
    assert episodes_of(tmp_path / "out")[0]["tasks"] == ["close"]  # not those of rows that are gone
    assert tasks(task="0=tidy", where="frame >= 2") == ["tidy"] * 4 + takes[1].tasks[2:]


def test_many_episodes_are_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rbtool.converters.lerobot import export

    monkeypatch.setattr(export, "_DATA_MB", 0)
    monkeypatch.setattr(export, "_GROUP_BYTES", 1)
    source = write_dataset(tmp_path / "d", random_takes((4, 1, 6)), images="image")
    out = exported(source, tmp_path, "decode")
    assert len(list(out.glob("data/chunk-000/*.parquet"))) == 3
    for row, expected in zip(plain_rows(out), plain_rows(source), strict=True):
        assert np.array_equal(row[CAMERA], expected[CAMERA])


def test_the_work_grows_with_the_number_of_episodes_and_not_with_its_square(tmp_path: Path) -> None:
    calls = []
    for count in (60, 240):
        file = write_d4rl(tmp_path / f"{count}.h5", flat(random_episodes([2] * count)))
        made = rbtool.convert(file, tmp_path / str(count))
        with open_steps(made.path) as reader:
            sink = LerobotExporter(Chosen(reader, np.arange(len(reader.episodes.length))), "out")
            sink.check()
            calls.append(0)

            def counted(frame: FrameType, event: str, argument: object) -> None:
                calls[-1] += event == "call" and frame.f_globals["__name__"] == LerobotExporter.__module__

            sys.setprofile(counted)
            sink.write(tmp_path / f"out{count}", lambda size: None)
            sys.setprofile(None)
    assert calls[1] < 5 * calls[0]


@pytest.mark.parametrize("largest", [(1 << 63) - 1, 1 << 63])
def test_a_number_that_lerobot_cannot_read_is_refused(largest: int, tmp_path: Path) -> None:
    takes = random_takes((3, 2))
    for take in takes:
        take.columns["seed"] = np.zeros(len(take), np.uint64)
    takes[1].columns["seed"][0] = largest
    source = write_dataset(tmp_path / "d", takes, images="none")
    if largest < 1 << 63:
        assert max(row["seed"] for row in plain_rows(exported(source, tmp_path, "skip"))) == largest
        return
    with pytest.raises(SchemaError, match=f"seed is uint64 and has {largest}"):
        exported(source, tmp_path, "skip")
    assert not (tmp_path / "exported").exists()
    assert rbtool.export(tmp_path / "made", tmp_path / "first", to="lerobot", episodes="0").steps == 3


def test_names_that_are_taken_are_refused_and_others_folders_left_alone(tmp_path: Path) -> None:
    takes = random_takes((3,))
    takes[0].columns["timestamp_"] = takes[0].columns.pop("next.reward")
    made = rbtool.convert(write_dataset(tmp_path / "d", takes, images="none"), tmp_path / "made").path
    assert rbtool.export(made, tmp_path / "out", to="lerobot").steps == 3
    with pytest.raises(UsageError, match="already"):
        rbtool.export(made, tmp_path / "out", to="lerobot")
    assert rbtool.export(made, tmp_path / "out", to="lerobot", force=True).steps == 3
    with pytest.raises(UsageError, match="not an export in this format"):
        rbtool.export(made, tmp_path / "d", to="lerobot", force=True)
    taken = rbtool.preprocess(made, dest=tmp_path / "taken", operations={"rename": ["timestamp_=index"]})
    with pytest.raises(SchemaError, match="'index', which is taken"):
        rbtool.export(taken.path, tmp_path / "other", to="lerobot")


@pytest.mark.peer
@pytest.mark.parametrize("images", ["decode", "skip"])
def test_lerobot_opens_the_export(images: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("lerobot.datasets.lerobot_dataset")
    found = datasets.LeRobotDataset("local/data", root=exported(DATA / "v21", tmp_path, images))
    expected = plain_rows(DATA / "v21")
    assert len(found) == len(expected)
    for row in (0, 14, 15, 41):
        assert found[row]["observation.state"].tolist() == expected[row]["observation.state"]
        assert found[row]["task"] == expected[row]["task"]
        if images == "decode":
            pixels = (found[row]["observation.images.top"] * 255).round().to(int).permute(1, 2, 0).numpy()
            assert np.array_equal(pixels, expected[row]["observation.images.top"])


def test_kept_videos_have_the_frames_of_rows_at_another_rate(tmp_path: Path) -> None:
    made = rbtool.convert(DATA / "v30", tmp_path / "made").path
    key = ("observation", "image", "top")
    half = rbtool.preprocess(made, None, tmp_path / "half", operations={"resample": "5"}, num_workers=0).path
    rbtool.export(half, tmp_path / "fifth", to="lerobot")
    again = rbtool.convert(tmp_path / "fifth", tmp_path / "again").path
    found, expected = (rbtool.load_dataset(path)[:][key] for path in (again, half))
    assert torch.equal(found, expected)
    third = rbtool.preprocess(made, None, tmp_path / "third", operations={"resample": "3"}, num_workers=0).path
    with pytest.raises(SchemaError, match="not 1 / 3 s apart"):
        rbtool.export(third, tmp_path / "refused", to="lerobot")
    encoded = rbtool.preprocess(third, None, tmp_path / "encoded", operations={"encode": ["h264"]}, num_workers=0).path
    assert rbtool.export(encoded, tmp_path / "slow", to="lerobot").notes == ()
    again = rbtool.convert(tmp_path / "slow", tmp_path / "slow again").path
    found, expected = (rbtool.load_dataset(path)[:][key] for path in (again, encoded))
    assert torch.equal(found, expected)
