"""`LerobotReader`: the contract of readers, and every row and pixel of files of v2.0, v2.1 and v3.0."""

from __future__ import annotations

import json
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lerobot_files import CAMERA, Take, plain_rows, random_takes, write_dataset

import rbtool
from rbtool.converters.lerobot.reader import LerobotReader
from rbtool.core.errors import UsageError
from rbtool.core.format.reader import FinalStep, Reader
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.episodes import Final
from rbtool.core.ted.schema import Key
from rbtool.core.testing.readers import ReaderTests

DATA = Path(__file__).parents[1] / "data" / "lerobot"
KEYS: dict[str, Key] = {
    "observation.state": ("observation", "state"), "action": ("action",), "timestamp": ("timestamp",),
    "frame_index": ("frame",), "index": ("info", "index"), "task_index": ("task_index",),
}  # fmt: skip


def small(path: Path, **arguments: Any) -> LerobotReader:
    size = 700 if arguments.get("options") == {"images": "keep"} else 40_000
    return type("Small", (LerobotReader,), {"piece_bytes": size})(path, **arguments)


class _Contract(ReaderTests):
    version, images, choice = "v2.1", "video", "decode"

    @pytest.fixture(autouse=True)
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = tmp_path_factory.mktemp("lerobot") / "d"
        self.folder = write_dataset(folder, random_takes((5, 1, 6, 9)), version=self.version, images=self.images)

    def source(self) -> Path:
        return self.folder

    def reader(self) -> type[Reader]:
        return LerobotReader

    def open(self) -> Reader:
        return LerobotReader(self.folder, options={"images": self.choice})

    def with_small_pieces(self) -> Reader:
        return small(self.folder, options={"images": self.choice})


class TestReaderOfEpisodeFiles(_Contract):
    """v2.1, with videos."""


class TestReaderOfKeptVideos(_Contract):
    """v3.0, with videos that are not decoded."""

    version, choice = "v3.0", "keep"


class TestReaderOfSharedFiles(_Contract):
    """v3.0, with videos."""

    version = "v3.0"


class TestReaderOfImageColumns(_Contract):
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
    whole = final_step == "repeat" or (final_step == "auto" and bool(rows[-1].get("next.done")))
    return len(rows) if whole else len(rows) - 1


@pytest.mark.parametrize("final_step", ["auto", "drop", "repeat"])
@pytest.mark.parametrize("name", ["g1", "v21", "v30"])
def test_rows_and_pixels_equal_a_plain_reading(name: str, final_step: FinalStep, tmp_path: Path) -> None:
    assert_equals_plain_reading(DATA / name, tmp_path / "out", final_step)


@pytest.mark.parametrize("images", ["video", "image", "none"])
@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
def test_each_version_with_each_kind_of_images(version: str, images: str, tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", random_takes((1, 4, 6, 1, 3)), version=version, images=images)
    assert_equals_plain_reading(folder, tmp_path / "out")


@settings(max_examples=12, deadline=None)
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
    write_dataset(
        folder / "d", random_takes(lengths, done=done), version=version, images="image", a_file=a_file
    )  # fmt: skip
    assert_equals_plain_reading(folder / "d", folder / "out", final_step)


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
    assert text == [{"language_instructions": '["open", "close"]'}, {"language_instruction": "do 1"}]


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


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("layout", ["ted", "packed"])
@pytest.mark.parametrize("images", ["keep", "decode"])
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
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"][CAMERA] |= {"shape": [3, 32, 48], "names": ["channels", "height", "width"]}
    (folder / "meta/info.json").write_text(json.dumps(info))
    expected = np.stack([row[CAMERA] for row in plain_rows(folder)])
    with LerobotReader(folder, options={"images": "decode"}) as reader:
        (piece,) = reader.pieces()
        assert np.array_equal(piece.columns["observation", "image", "top"][:3], np.moveaxis(expected, -1, 1))
