"""`LanceReader`: LeRobot's datasets in Lance equal those in Parquet, samples a plain reading; what else there is."""

from __future__ import annotations

import gc
import io
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pytest
from cases import each
from conversions import WrittenReaderTests, converted, refused
from conversions import columns_of as columns_in
from lerobot_files import (
    as_png,
    change_in_lance,
    dataset_in_lance,
    decoded,
    end_lance,
    lance_blob,
    lance_rows,
    picture,
    random_takes,
    table_in_lance,
    table_of_a_file,
    write_dataset,
)
from PIL import Image

import rbtool
from rbtool.converters.files.pickles import end_process
from rbtool.converters.lance.reader import LanceReader
from rbtool.converters.lance.tables import LanceProcess
from rbtool.converters.lerobot.reader import LerobotReader
from rbtool.core.errors import OutOfSpaceError, SchemaError, UsageError
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.datasets import DatasetPlan, PlannedLeaf, write_plan

pytestmark = pytest.mark.skipif(find_spec("lance") is None, reason="pylance is not installed")
DATA = Path(__file__).parents[1] / "data" / "lance"
LENGTHS = (5, 1, 6, 9)


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    end_lance()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of LeRobot v3 in Parquet, with videos."""
    folder = tmp_path_factory.mktemp("lerobot") / "d"
    return write_dataset(folder, random_takes(LENGTHS), version="v3.0")


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Conversions of the source in Parquet, by the choice of images."""
    folder = tmp_path_factory.mktemp("parquet")
    return {one: rbtool.convert(source, folder / one, images=one) for one in ("keep", "decode")}


@pytest.fixture
def folder(source: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source as Lance tables, to be changed."""
    if not (kept := tmp_path_factory.getbasetemp() / "source-in-lance").exists():
        dataset_in_lance(source, kept)
    return Path(shutil.copytree(kept, tmp_path / "d"))


@pytest.fixture(scope="module")
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    yield (kept := [])
    for one in kept:
        end_process(one)


@pytest.fixture
def idle(processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let readers take over the process of others, as none of them changes a table: to start one takes 0.3 s."""
    start = LanceProcess._started

    def keep(process: LanceProcess) -> None:
        one, process._process = process._process, None
        ended = isinstance(getattr(sys.exc_info()[1], "__cause__", None), EOFError | BrokenPipeError)
        if one is not None:
            end_process(one) if ended else processes.append(one)

    monkeypatch.setattr(LanceProcess, "_started", lambda process: processes.pop() if processes else start(process))
    monkeypatch.setattr(LanceProcess, "close", keep)


class TestReader(WrittenReaderTests):
    """A dataset whose videos are decoded."""

    kind, options, piece_bytes = LanceReader, {"images": "decode"}, 40_000

    @pytest.fixture(autouse=True)
    def made(self, source: Path, idle: None, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.path = tmp_path_factory.getbasetemp() / f"lance-{type(self).__name__}"
        if not self.source().exists():
            self.copy(source)

    def copy(self, source: Path) -> None:
        dataset_in_lance(source, self.path, parts=3, meta="folder")


class TestReaderOfKeptVideos(TestReader):
    """A dataset whose videos are kept, with its metadata in a table."""

    options, piece_bytes = {"images": "keep"}, 700

    def copy(self, source: Path) -> None:
        dataset_in_lance(source, self.path, meta="table")


class TestReaderOfTables(TestReader):
    """A table of frames."""

    def copy(self, source: Path) -> None:
        frames_table(self.source())

    def source(self) -> Path:
        return self.path.with_suffix(".lance")


def frames_table(path: Path, **changed: Any) -> Path:
    """Write a table of frames in several fragments; `changed` are columns, None is left out."""
    numbers = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    draw, rows = np.random.default_rng(0), len(numbers)
    columns: dict[str, Any] = {
        "observation_state": vectors(draw.normal(size=(rows, 5)).astype("f4")),
        "action": vectors(draw.normal(size=(rows, 3)).astype("f4")),
        "next_reward": draw.normal(size=rows).astype("f4"),
        "episode_index": numbers, "frame_index": np.concatenate([np.arange(length) for length in LENGTHS]),
        "index": np.arange(rows), "observation_images_top": [as_png(picture(row)) for row in range(rows)],
    } | changed  # fmt: skip
    table = pa.table({name: values for name, values in columns.items() if values is not None})
    return table_in_lance(path, table, parts=3)


def vectors(values: Any) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def columns_of(path: Path) -> tuple[dict[str, Any], Any]:
    with open_steps(path) as reader:
        return columns_in(reader), (reader.episodes, reader.episode_text, reader.documents())


@pytest.mark.parametrize(
    ("version", "apart", "images"),
    [("2.0", True, "keep"), ("2.0", False, "decode"), ("2.1", True, "decode"), ("2.1", False, "keep"),
     ("2.2", True, "decode"), ("2.2", False, "keep")],
)  # fmt: skip
def test_a_dataset_is_the_one_in_parquet(source, plain, version: str, apart: bool, images: str, tmp_path) -> None:
    folder = dataset_in_lance(source, tmp_path / "lance", version=version, apart=apart, parts=4)
    result = rbtool.convert(folder, tmp_path / "out", images=images)
    assert result.content_digest == plain[images].content_digest
    (_, (_, texts, _)), (_, (_, others, documents)) = (columns_of(one.path) for one in (plain[images], result))
    assert texts == others
    assert "storage_format" not in json.loads(documents["meta/info.json"])
    assert not LerobotReader.recognises(folder)
    assert not LanceReader.recognises(source)


@pytest.mark.parametrize("meta", ["table", "folder"])
def test_metadata_are_read_from_the_folder_or_from_their_table(source, plain, meta: str, tmp_path: Path) -> None:
    folder = dataset_in_lance(source, tmp_path / "lance", meta=meta)
    for workers, images in ((0, "decode"), (2, "keep")):
        result = rbtool.convert(folder, tmp_path / images, images=images, num_workers=workers)
        assert result.content_digest == plain[images].content_digest


def test_pictures_in_columns_and_half_precision_equal_parquet(tmp_path: Path) -> None:
    takes = random_takes(LENGTHS)
    for take in takes:
        take.columns["observation.half"] = np.arange(len(take) * 4, dtype="f2").reshape(-1, 4) / 3
    plain = write_dataset(tmp_path / "plain", takes, version="v3.0", images="image")
    folder = dataset_in_lance(plain, tmp_path / "lance")
    digests = {rbtool.convert(one, tmp_path / f"{one.name}_out").content_digest for one in (plain, folder)}
    assert len(digests) == 1
    assert columns_of(tmp_path / "lance_out")[0]["observation.half"].dtype == np.float16


def test_a_sample_equals_a_plain_reading(tmp_path: Path) -> None:
    folder = DATA / "lerobot_lance"
    rows = lance_rows(folder / "frames.lance")
    (tmp_path / "video.mp4").write_bytes(lance_blob(folder / "videos.lance", "video_bytes"))
    pixels = decoded(tmp_path / "video.mp4")
    found, (episodes, texts, _) = columns_of(rbtool.convert(folder, tmp_path / "out", images="decode").path)
    assert episodes.length.tolist() == [8, 1, 11]
    assert [text["language_instruction"] for text in texts] == ["pick", "ouvrir la porte", "pick"]
    for key, name in (("observation.state", "observation_state"), ("action", "action"), ("timestamp", "timestamp")):
        assert found[key].tobytes() == np.array([row[name] for row in rows], "f4").tobytes()
    assert found["next.reward"][:, 0].tolist() == [np.float32(row["next_reward"]) for row in rows]
    assert found["next.terminated"][:, 0].tolist() == [row["next_done"] for row in rows]
    assert found["observation.image.top"].tobytes() == np.stack(pixels[:20]).tobytes()
    numbers = found["observation.image.top"][:, 3, 2::4, 0] > 127
    assert (numbers @ (1 << np.arange(8))).tolist() == list(range(20))


def test_a_table_of_frames_equals_a_plain_reading(tmp_path: Path) -> None:
    path = DATA / "frames_jpeg.lance"
    rows = lance_rows(path)
    result = rbtool.convert(path, tmp_path / "out")
    found, (episodes, _, _) = columns_of(result.path)
    assert episodes.length.tolist() == [8, 1, 11]
    for key, name in (("observation.state", "observation_state"), ("action", "action")):
        assert found[key].tobytes() == np.array([row[name] for row in rows], "f4").tobytes()
    pictures = [np.asarray(Image.open(io.BytesIO(row["observation_images_top"]))) for row in rows]
    assert found["observation.image.top"].tobytes() == np.stack(pictures).tobytes()
    assert any("dots in names of columns are restored" in note for note in result.notes)


def test_tables_with_other_columns(tmp_path: Path) -> None:
    rows = sum(LENGTHS)
    structs = pa.array([{"bytes": as_png(picture(row)), "path": None} for row in range(rows)])
    path = frames_table(
        tmp_path / "a.lance", frame_index=None, observation_images_top=structs, words=["a"] * rows,
        noise=[b"\x00\x01"] * rows, ragged=[[1.0] * (1 + row % 2) for row in range(rows)],
        half=vectors(np.arange(rows * 2, dtype="f2").reshape(-1, 2)), observation_more=np.arange(rows),
    )  # fmt: skip
    refused(path, r"'ragged' has lists of")
    change_in_lance(path, "drop_columns", ["ragged"])
    result = rbtool.convert(path, tmp_path / "out", final_step="repeat")
    found, (episodes, texts, _) = columns_of(result.path)
    assert episodes.length.tolist() == list(LENGTHS)
    assert found["frame"].tolist() == [row for length in LENGTHS for row in range(length)]
    assert found["half"].dtype == np.float16
    assert found["observation.more"].tolist() == list(range(rows))
    assert texts == [{"words": "a"}] * 4
    assert [one["key"] for one in result.dropped_keys] == ["noise"]
    assert found["observation.image.top"][7].tobytes() == picture(7).tobytes()


def test_the_newest_version_is_read_and_deleted_rows_are_not(source: Path, tmp_path: Path) -> None:
    path = frames_table(tmp_path / "a.lance")
    change_in_lance(path, "delete", "episode_index = 1")
    with converted(path, tmp_path / "out", final_step="repeat") as reader:
        assert reader.episodes.episode.tolist() == [0, 2, 3]
        assert columns_in(reader)["info.index"].tolist() == [*range(5), *range(6, 21)]
        notes = reader.manifest.notes
    assert any("row 5 of a.lance has index 6: rows were deleted or moved" in note for note in notes)
    change_in_lance(path, "delete", "index = 8")
    refused(path, "frame_index goes from 1 to 3")
    folder = dataset_in_lance(source, tmp_path / "d", parts=3)
    change_in_lance(folder / "frames.lance", "delete", "episode_index = 2")
    refused(folder, "has no rows of episode 2, which is in the metadata")
    kept = rbtool.convert(folder, tmp_path / "kept", skip_bad=True, images="decode")
    assert columns_of(kept.path)[1][0].episode.tolist() == [0, 1, 3]
    plain = rbtool.convert(source, tmp_path / "plain", episodes="0,1,3", images="decode")
    assert plain.content_digest == kept.content_digest


def test_copies_of_videos_are_removed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = dataset_in_lance(source, tmp_path / "d", meta="table")
    for workers, images in ((0, "keep"), (0, "skip"), (2, "decode")):
        rbtool.convert(folder, tmp_path / images, images=images, num_workers=workers)
    gc.collect()
    assert not list(tmp_path.glob("rbtool-lance-*"))


def test_an_export_to_parquet_is_no_lance(folder: Path, plain: dict[str, Any], tmp_path: Path) -> None:
    rbtool.convert(folder, tmp_path / "out")
    rbtool.export(tmp_path / "out", tmp_path / "back", to="lerobot")
    assert "storage_format" not in json.loads((tmp_path / "back" / "meta" / "info.json").read_text())
    assert rbtool.convert(tmp_path / "back", tmp_path / "again").content_digest == plain["keep"].content_digest


def _without(*names: str) -> Any:
    return lambda folder: [shutil.rmtree(folder / name) for name in names]


def _stated(**changed: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "meta" / "info.json"
        content = json.loads(path.read_text())
        content["features"] |= changed
        path.write_text(json.dumps(content))

    return change


def _videos(**columns: Any) -> Any:
    def change(folder: Path) -> None:
        shutil.rmtree(folder / "videos.lance")
        table_in_lance(folder / "videos.lance", pa.table(columns))

    return change


def _metadata(*names: str) -> Any:
    def change(folder: Path) -> None:
        shutil.rmtree(folder / "meta")
        shutil.rmtree(folder / "meta.lance")
        data = pa.array([b"{}"] * len(names), pa.large_binary())
        table_in_lance(folder / "meta.lance", pa.table({"path": list(names), "data": data}))

    return change


VECTOR = {"dtype": "float32", "shape": [5], "names": None}
TWO = {"chunk_index": [0, 0], "file_index": [0, 0], "video_bytes": [b"a", b"b"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("frames.lance"), r"frames\.lance is missing: it has the rows .* interrupted"),
        (_without("videos.lance"), r"videos\.lance is missing"),
        (_without("frames.lance/_versions"), r"frames\.lance is missing"),
        (_without("frames.lance/data"), "cannot be read, it is damaged or was cut"),
        (_stated(observation_state=VECTOR), "are both the column 'observation_state'"),
        (_stated(**{"observation.more": VECTOR}), "the files of rows lack it"),
        (_videos(video_key=["x"], file_index=[0]), "has no columns video_key, chunk_index, file_index and video_bytes"),
        (_videos(video_key=["x", "x"], **TWO), r"has the video videos/x/chunk-000/file-000\.mp4 twice"),
        (_videos(video_key=["../../x", "y"], **TWO), "outside the dataset"),
        (_videos(video_key=[None, "y"], **TWO), "row 0 does not name a video"),
        (_videos(video_key=["x", "y"], **TWO), "is missing: it has frames of"),
        (_metadata("info.json", "../x.json"), r"has a file '\.\./x\.json', which would be outside"),
        (_metadata("/etc/x.json"), "which would be outside"),
        (_metadata("meta/../../x"), "which would be outside"),
        (_metadata("info.json", "info.json"), "has the file 'info.json' twice"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(folder: Path, change: Any, message: str, tmp_path: Path) -> None:
    change(folder)
    refused(folder, message, format="lance")


@each(
    ("changed", "message"),
    [
        ({"episode_index": None}, "has no episode_index with frame_index or index"),
        ({"frame_index": None, "index": None}, "has no episode_index with frame_index or index"),
        ({"frame_index": None, "index": np.arange(21) * 2}, "frame_index goes from 0 to 2"),
        ({"episode_index": np.arange(21) % 3}, "are in 7 places"),
        ({"next_reward": pa.array([None, *np.arange(20.0)])}, "missing values"),
        ({"observation_images_top": [as_png(picture(0))] * 20 + [b""]}, "has no bytes of an image"),
    ],
)
def test_odd_tables_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    refused(frames_table(tmp_path / "a.lance", **changed), message)


def test_files_outside_of_a_table_are_not_read(source: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    shutil.rmtree(folder / "videos.lance")
    name = next(iter(path.name for path in (source / "videos").iterdir()))
    table_of_a_file(folder / "videos.lance", name, f"file://{tmp_path}/secret")
    refused(folder, "refers to the file 'file://")


def test_without_pylance_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    assert "rbtool[lance]" in refused(DATA / "frames_jpeg.lance", "Lance tables need pylance", UsageError).hint


def test_damaged_tables_are_named(folder: Path, tmp_path: Path) -> None:
    files = [*folder.glob("[!m]*/_versions/*.manifest"), *folder.glob("[!m]*/data/*.lance")]
    assert len(files) >= 4
    for path in files:
        sound = path.read_bytes()
        for changed in (b"", sound[: len(sound) // 2], sound[::-1]):
            path.write_bytes(changed)
            assert ".rs:" not in refused(folder, "", images="decode").message
        path.write_bytes(sound)


@pytest.mark.parametrize("images", ["keep", "decode"])
def test_an_export_is_read_as_what_it_was_made_of(images: str, source: Path, tmp_path: Path) -> None:
    made = rbtool.convert(source, tmp_path / "made", images=images, final_step="repeat").path
    found = rbtool.export(made, tmp_path / "out", to="lance").path
    assert rbtool.diff(made, rbtool.convert(found, tmp_path / "again", images=images, final_step="repeat").path).equal
    expected = {"frames.lance", "meta", "meta.lance"} | ({"videos.lance"} if images == "keep" else set())
    assert {one.name for one in found.iterdir()} == expected
    rows = lance_rows(found / "frames.lance")
    assert [row["index"] for row in rows] == list(range(sum(LENGTHS)))
    assert not [name for name in rows[0] if "." in name]
    stored = {row["path"]: row["data"] for row in lance_rows(found / "meta.lance")}
    files = [path for path in (found / "meta").rglob("*") if path.is_file()]
    assert stored == {path.relative_to(found / "meta").as_posix(): path.read_bytes() for path in files}
    assert rbtool.export(made, found, to="lance", force=True).path == found
    with pytest.raises(UsageError, match="already exists"):
        rbtool.export(made, found, to="lance")


def test_an_export_says_where_the_frames_of_videos_are(source: Path, tmp_path: Path) -> None:
    made = rbtool.convert(source, tmp_path / "made", final_step="repeat").path
    found = rbtool.export(made, tmp_path / "out", to="lance").path
    row, *_ = lance_rows(found / "videos.lance")
    data = lance_blob(found / "videos.lance", "video_bytes")
    assert data in [path.read_bytes() for path in source.rglob("*.mp4")]
    assert row["file_size"] == len(data)
    assert data[row["moov_offset"] + 4 : row["moov_offset"] + 8] == b"moov"
    assert int.from_bytes(data[row["moov_offset"] : row["moov_offset"] + 4], "big") == row["moov_size"]
    with av.open(io.BytesIO(data)) as container:
        packets = [one for one in container.demux(video=0) if one.pts is not None]
    keys = [one for one in packets if one.is_keyframe]
    assert row["kf_positions"] == [one.pos for one in keys]
    assert row["kf_indices"] == [sorted(one.pts for one in packets).index(key.pts) for key in keys]


def test_names_that_are_one_column_are_not_exported(tmp_path: Path) -> None:
    leaves = (
        PlannedLeaf(("observation", "a"), "float32", (2,), "state"),
        PlannedLeaf(("observation_a",), "int64", (), "root"),
    )
    write_plan(DatasetPlan((3,), ("terminated",), (False,), leaves), tmp_path / "made")
    with pytest.raises(SchemaError, match="would both be the column observation_a"):
        rbtool.export(tmp_path / "made", tmp_path / "out", to="lance")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_full_disk_is_named(source: Path, tmp_path: Path) -> None:
    with LanceProcess() as process:
        process.ask(DATA / "frames_jpeg.lance", "describe")
        assert process._process is not None
        resource.prlimit(process._process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
        video, *_ = source.rglob("*.mp4")
        with pytest.raises(OutOfSpaceError, match="no space is left for"):
            process.write(tmp_path / "a.lance", "write_files", [str(video)], "data", False, {"name": ["a"]})
