"""Zarr stores of Diffusion Policy, UMI and DP3: read as zarr itself reads them, refused in a sentence, and exported."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import imagecodecs.numcodecs
import numcodecs
import numpy as np
import pytest
import zarr
from cases import each
from conversions import WrittenReaderTests, refused, with_options, written
from lerobot_files import decoded, picture, write_video

import rbtool
from rbtool.converters.zarr_store.reader import ZarrReader
from rbtool.converters.zarr_store.store import ZarrArray
from rbtool.core.errors import CorruptDataError, UsageError
from rbtool.core.format.converter import Reader
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.readers import joined

DATA = Path("tests/data/zarr")
SAMPLES = ["pusht_like.zarr", "umi_one_arm.zarr.zip", "dp3_sim.zarr", "dp_format3.zarr"]
INFOS = {"stage", "robot0_demo_start_pose", "robot0_demo_end_pose"}
Arrays = dict[str, Any]


SmallPieces = with_options(ZarrReader, 30_000)


def write_sharded(folder: Path) -> Path:
    rows = np.arange(23 * 40 * 30, dtype="i4").reshape(23, 40, 30)
    settings: dict[str, Any] = {"zarr_format": 3, "chunks": (3, 25, 30), "shards": (6, 50, 30)}
    return write(folder / "sharded.zarr", {"x": rows}, [5, 6, 14, 23], **settings)


class TestReader(WrittenReaderTests):
    kind, piece_bytes, has_rewards = ZarrReader, 30_000, False
    made = written({"sample": lambda _: DATA / "pusht_like.zarr", "shards": write_sharded})


def plain(path: Path) -> tuple[Arrays, np.ndarray]:
    """Read a store with zarr alone, as the `ReplayBuffer` of Diffusion Policy does."""
    if path.suffix == ".zip":
        imagecodecs.numcodecs.register_codecs("imagecodecs_jpegxl", verbose=False)
        with zarr.storage.ZipStore(path, mode="r") as store:
            return _plain(zarr.open_group(store, mode="r"))
    return _plain(zarr.open_group(path, mode="r"))


def _plain(root: Any) -> tuple[Arrays, np.ndarray]:
    data = {name: array[:] for name, array in root["data"].arrays()}
    ends = root["meta"]["episode_ends"][:]
    assert all(len(array) == ends[-1] for array in data.values())
    return data, ends


def read(path: Path, kind: type[Reader] = ZarrReader, **options: Any) -> tuple[Any, dict[str, list[np.ndarray]]]:
    """The facts, and by the names of keys the rows of each episode; of states without what came after the last step."""
    with kind(path, final_step="repeat", options=options) as reader:
        facts = reader.facts()
        episodes = joined(reader.pieces(), facts)
    found: dict[str, list[np.ndarray]] = {}
    for columns in episodes.values():
        steps = len(columns["terminations",])
        assert not columns["terminations",].any()
        assert columns["truncations",].tolist() == [False] * (steps - 1) + [True]
        for key, rows in columns.items():
            found.setdefault(".".join(key), []).append(rows[:steps])
    return facts, found


def write(
    path: Path, data: Mapping[str, Any], ends: Any, *, zarr_format: int = 2, dtype: Any = None, **settings: Any
) -> Path:
    """Write a store with zarr."""
    root = zarr.open_group(path, mode="w", zarr_format=zarr_format)
    for name, rows in data.items():
        root.create_array(f"data/{name}", data=np.asarray(rows), **settings)
    root.create_array("meta/episode_ends", data=np.asarray(ends, dtype))
    return path


def some(rows: int = 11) -> Arrays:
    return {
        "action": np.arange(rows * 2, dtype="f4").reshape(rows, 2),
        "state": np.arange(rows * 3, dtype="f8").reshape(rows, 3) / 7,
    }


@each("name", SAMPLES)
@each("kind", [ZarrReader, SmallPieces])
def test_samples_are_what_zarr_reads(name: str, kind: type[Reader]) -> None:
    data, ends = plain(DATA / name)
    facts, found = read(DATA / name, kind)
    keys = {
        one: ("action" if one == "action" else f"{'info' if one in INFOS else 'observation'}.{one}") for one in data
    }
    assert set(found) - {"terminations", "truncations"} == set(keys.values())
    for one, rows in data.items():
        parts = np.split(rows, ends[:-1])
        assert [len(part) for part in parts] == list(facts.lengths)
        for part, given in zip(parts, found[keys[one]], strict=True):
            assert given.dtype == part.dtype
            assert given.tobytes() == part.tobytes()
    assert any("no action" in note for note in facts.notes) == ("action" not in data)
    assert any("without a file" in note for note in facts.notes) == (name == "dp_format3.zarr")


def test_the_action_of_umi_is_made_of_the_next_poses() -> None:
    data, ends = plain(DATA / "umi_one_arm.zarr.zip")
    names = ["robot0_eef_pos", "robot0_eef_rot_axis_angle", "robot0_gripper_width"]
    poses = np.concatenate([data[name] for name in names], axis=1)
    facts, found = read(DATA / "umi_one_arm.zarr.zip", map=[f"action=next:{','.join(names)}"])
    assert list(facts.lengths) == [6, 4]
    with ZarrReader(DATA / "umi_one_arm.zarr.zip", options={"map": f"action=next:{','.join(names)}"}) as reader:
        pieces = list(reader.pieces())
    for part, frames, piece, actions in zip(
        np.split(poses, ends[:-1]), np.split(data["camera0_rgb"], ends[:-1]), pieces, found["action"], strict=True
    ):
        assert actions.tolist() == part[1:].tolist()
        assert piece.columns["observation", "camera0_rgb"].tolist() == frames.tolist()
        assert not piece.is_unfinished
    _, found = read(DATA / "umi_one_arm.zarr.zip", map={"action": names[:1]})
    assert np.concatenate(found["action"]).tolist() == data["robot0_eef_pos"].tolist()


CODECS: dict[str, dict[str, Any]] = {
    "raw": {"compressors": None},
    "zlib": {"compressors": numcodecs.Zlib(1)},
    "gzip": {"compressors": numcodecs.GZip(1)},
    "bz2": {"compressors": numcodecs.BZ2(1)},
    "lzma": {"compressors": numcodecs.LZMA()},
    "lz4": {"compressors": numcodecs.LZ4()},
    "zstd": {"compressors": numcodecs.Zstd(1)},
    "blosc lz4": {"compressors": numcodecs.Blosc("lz4", 5, 0)},
    "shuffle": {"compressors": numcodecs.Zlib(1), "filters": [numcodecs.Shuffle(4)]},
    "delta": {"compressors": numcodecs.Zstd(1), "filters": [numcodecs.Delta("f4")]},
    "as type": {"compressors": numcodecs.Blosc(), "filters": [numcodecs.AsType("f8", "f4")]},
    "checksum": {"compressors": None, "filters": [numcodecs.Adler32()]},
    "fortran": {"order": "F", "chunks": (4, 2)},
    "slashes": {"chunk_key_encoding": {"name": "v2", "separator": "/"}, "chunks": (4, 1)},
    "one row a chunk": {"chunks": (1, 2)},
    "large chunk": {"chunks": (100, 7)},
    "v3": {"zarr_format": 3},
    "v3 raw": {"zarr_format": 3, "compressors": None, "chunks": (4, 1)},
    "v3 blosc": {"zarr_format": 3, "compressors": zarr.codecs.BloscCodec(cname="lz4", shuffle="bitshuffle")},
    "v3 gzip": {"zarr_format": 3, "compressors": zarr.codecs.GzipCodec()},
    "v3 crc32c": {"zarr_format": 3, "compressors": [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]},
    "v3 big endian": {"zarr_format": 3, "serializer": zarr.codecs.BytesCodec(endian="big")},
    "v3 transposed": {"zarr_format": 3, "filters": [zarr.codecs.TransposeCodec(order=(1, 0))], "chunks": (4, 2)},
    "v3 keys of v2": {"zarr_format": 3, "chunk_key_encoding": {"name": "v2", "separator": "."}},
    "v3 dots": {"zarr_format": 3, "chunk_key_encoding": {"name": "default", "separator": "."}, "chunks": (4, 1)},
    "v3 shards": {"zarr_format": 3, "chunks": (2, 1), "shards": (4, 2)},
    "v3 shard at start": {
        "zarr_format": 3, "chunks": (2, 1),
        "shards": {"shape": (4, 2), "index_location": "start"},
    },
}  # fmt: skip


@each("name", CODECS)
def test_codecs_and_chunks(name: str, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 99, (11, 2)).astype("f4")
    path = write(tmp_path / "a.zarr", {"action": rows, "x": rows[::-1].copy()}, [4, 5, 11], **CODECS[name])
    _, found = read(path)
    assert np.concatenate(found["action"]).tolist() == rows.tolist()
    assert np.concatenate(found["observation.x"]).tolist() == rows[::-1].tolist()


@each("zarr_format", [2, 3])
@each("dtype", ["?", "i1", "u1", ">i2", "<u2", ">i4", "u4", ">i8", "u8", "f2", ">f4", "f8", "c8", ">c16"])
def test_element_types(dtype: str, zarr_format: int, tmp_path: Path) -> None:
    rows = (np.arange(22).reshape(11, 2) % 2 if dtype == "?" else np.arange(22).reshape(11, 2)).astype(dtype)
    path = write(tmp_path / "a.zarr", {"x": rows}, [4, 11], zarr_format=zarr_format, chunks=(3, 2))
    _, found = read(path)
    given = np.concatenate(found["observation.x"])
    assert given.dtype == rows.dtype.newbyteorder("=")
    assert given.tolist() == rows.tolist()


@each("dtype", ["u1", "i2", ">u4", "i8", "u8"])
def test_ends_are_integers_of_any_size(dtype: str, tmp_path: Path) -> None:
    facts, _ = read(write(tmp_path / "a.zarr", some(), [4, 4, 11], dtype=dtype))
    assert facts.lengths == [4, 7]
    assert list(facts.episode_numbers) == [0, 2]
    assert "1 episode without steps left out: 1" in facts.notes


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("fill", [0, 7])
def test_chunks_without_a_file_have_the_fill_value(fill: int, zarr_format: int, tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=zarr_format)
    made = root.create_array("data/x", shape=(12, 3), chunks=(4, 2), dtype="i4", fill_value=fill)
    made[4:8] = 5
    root.create_array("meta/episode_ends", data=np.array([5, 12]))
    facts, found = read(tmp_path / "a.zarr")
    assert np.concatenate(found["observation.x"]).tolist() == made[:].tolist()
    assert any("4 chunks of x without a file: their rows have its fill value" in note for note in facts.notes)


def test_what_else_is_in_a_store(tmp_path: Path) -> None:
    path, data = tmp_path / "a.zarr", some()
    write(path, data, [4, 5, 11])
    root = zarr.open_group(path, mode="a")
    root.create_array("data/obs/deep/x", data=np.arange(11, dtype="i2"))
    root.create_array("data/scalar", data=np.array(3.0))
    root.create_array("data/reward", data=np.arange(11.0)[:, None])
    root.create_array("data/done", data=np.zeros(11, bool))
    root.create_array("data/timestamp", data=np.arange(11) / 10)
    root.create_array("data/longer", data=np.arange(14, dtype="u1"))
    root.create_array("data/task", data=np.array(["pick"] * 4 + ["é"] + ["place"] * 6), chunks=(3,))
    root.create_array("data/words", data=np.array([f"{number}" for number in range(11)], "S4"))
    root.create_array("data/when", data=np.arange(11).astype("M8[s]"))
    root.create_array("meta/success", data=np.array([True, False, True]))
    root.create_array("meta/goals", data=np.zeros((3, 2)))
    root.create_array("other", data=np.zeros(3))
    root.attrs["robot"] = "arm"
    zarr.consolidate_metadata(path.as_posix())
    facts, found = read(path)
    assert np.concatenate(found["observation.obs.deep.x"]).tolist() == list(range(11))
    assert np.concatenate(found["reward"]).tolist() == list(range(11))
    assert np.concatenate(found["timestamp"]).tolist() == (np.arange(11) / 10).tolist()
    assert np.concatenate(found["observation.longer"]).tolist() == list(range(11))
    assert not np.concatenate(found["info.done"]).any()
    assert {one.key for one in facts.dropped_keys} == {
        "data/scalar", "data/words", "data/when", "meta/goals", "other"
    }  # fmt: skip
    assert any("3 rows of longer behind the last of meta/episode_ends" in note for note in facts.notes)
    assert json.loads(facts.documents["attributes.json"]) == {"": {"robot": "arm"}}
    with ZarrReader(path, final_step="repeat") as reader:
        texts = [piece.text for piece in reader.pieces() if piece.first]
    assert [text["language_instruction"] for text in texts] == ["pick", "é", "place"]
    assert [text["success"] for text in texts] == ["true", "false", "true"]
    assert rbtool.convert(path, tmp_path / "out").steps == 8  # there are rewards: a last row is no step
    rbtool.convert(path, tmp_path / "ted", final_step="repeat")
    rbtool.export(tmp_path / "ted", tmp_path / "b.zarr")
    one, other = (zarr.open_group(folder, mode="r") for folder in (path, tmp_path / "b.zarr"))
    for name in ("data/obs/deep/x", "data/reward", "data/done", "data/timestamp", "data/action", "meta/success"):
        assert other[name].dtype == one[name].dtype
        assert other[name][:].tolist() == one[name][:].tolist()
    assert other["meta/language_instruction"][:].tolist() == ["pick", "é", "place"]
    assert isinstance(other["data/obs"], zarr.Group)


@each("folder", ["", "some/a.zarr/"])
@each("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
@each("zarr_format", [2, 3])
def test_zip_files(zarr_format: int, method: int, folder: str, tmp_path: Path) -> None:
    data = some()
    source = write(tmp_path / "a", data, [4, 11], zarr_format=zarr_format)
    path = tmp_path / "a.zarr.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(f"{folder}data/state/.zattrs", "{}")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr(f"{folder}data/state/.zattrs", '{"unit": "m"}')
        archive.writestr("__MACOSX/._a", b"?")
        for file in sorted(source.rglob("*")):
            if file.is_file() and file.name != ".zattrs":
                archive.write(file, folder + file.relative_to(source).as_posix())
    facts, found = read(path)
    assert np.concatenate(found["action"]).tolist() == data["action"].tolist()
    assert np.concatenate(found["observation.state"]).tolist() == data["state"].tolist()
    assert json.loads(facts.documents["attributes.json"]) == {"data/state": {"unit": "m"}}


@pytest.mark.parametrize("name", ["data/camera0_rgb/.zarray", "data/camera0_rgb/7.0.0.0"])
def test_a_member_that_is_listed_by_another_name_is_found(name: str, tmp_path: Path) -> None:
    """The list of a zip file has no checksum: without its name an array would be left out, and a chunk be its fill."""
    data = (DATA / "umi_one_arm.zarr.zip").read_bytes()
    at = data.rindex(name.encode())
    (tmp_path / "a.zarr.zip").write_bytes(data[:at] + data[at:].replace(name.encode(), name.encode()[:-1] + b"?", 1))
    refused(tmp_path / "a.zarr.zip", "cannot be read", CorruptDataError)


def test_a_folder_around_one_store_and_videos_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "run" / "replay_buffer.zarr", some(), [4, 11])
    (tmp_path / "run" / "videos" / "0").mkdir(parents=True)
    (tmp_path / "run" / "videos" / "0" / "1.mp4").write_bytes(b"?")
    for path, why in ((tmp_path / "run", "no timestamp"), (tmp_path / "run" / "replay_buffer.zarr", "rbtool convert")):
        facts, _ = read(path)
        assert any(note.startswith("1 video in ") and why in note for note in facts.notes)
    write(tmp_path / "run" / "other.zarr", some(), [4, 11])
    assert not ZarrReader.recognises(tmp_path / "run")


def real_robot(folder: Path, lengths: tuple[int, ...] = (5, 4), cameras: int = 2, *, short: int = 0) -> list[list[Any]]:
    """Write a store of 10 rows a second with videos of 30 frames a second, and return the pictures of all frames."""
    times = [1.7e9 + 60 * number + np.arange(length) / 10 for number, length in enumerate(lengths)]
    rows = np.arange(sum(lengths) * 6.0).reshape(-1, 6)
    data = {"timestamp": np.concatenate(times), "action": rows, "robot_eef_pose": rows + 1}
    write(folder / "replay_buffer.zarr", data, np.cumsum(lengths))
    shown = []
    for number, length in enumerate(lengths):
        for camera in range(cameras):
            pictures = [picture(40 * camera + 7 * number + frame) for frame in range(3 * length - 2 - short)]
            write_video(folder / "videos" / str(number) / f"{camera}.mp4", pictures, fps=30)
            shown.append(decoded(folder / "videos" / str(number) / f"{camera}.mp4"))
    return shown


def test_videos_of_a_real_robot(tmp_path: Path) -> None:
    shown = real_robot(tmp_path / "run")
    _, found = read(tmp_path / "run", images="decode")
    for take, pictures in enumerate(shown):
        given = found[f"observation.image.{take % 2}"][take // 2]
        assert given.tolist() == np.stack(pictures[::3]).tolist()
    facts, found = read(tmp_path / "run")
    assert np.concatenate(found["video.observation.image.1"])[:, 1].tolist() == [0, 3, 6, 9, 12, 0, 3, 6, 9]
    assert len(facts.videos) == 8
    for workers in (0, 2):
        made = rbtool.convert(tmp_path / "run", tmp_path / f"out{workers}", num_workers=workers)
        assert rbtool.check(made.path, full=True).errors == 0
    skipped, found = read(tmp_path / "run", images="skip")
    assert not any("image" in key for key in found)
    assert any("4 videos in" in note for note in skipped.notes)


def test_videos_that_do_not_fit_the_rows(tmp_path: Path) -> None:
    real_robot(tmp_path / "held", cameras=1, short=2)
    facts, found = read(tmp_path / "held")
    assert found["video.observation.image.0"][0][:, 1].tolist() == [0, 3, 6, 9, 10]
    assert any("2 rows at the end of videos have the last frame" in note for note in facts.notes)
    real_robot(tmp_path / "short", cameras=1, short=4)
    assert "--images skip" in str(refused(tmp_path / "short", r"the last row at 0\.400 s").hint)
    real_robot(tmp_path / "gone")
    (tmp_path / "gone" / "videos" / "1" / "0.mp4").unlink()
    refused(tmp_path / "gone", "is missing", CorruptDataError)
    assert rbtool.convert(tmp_path / "gone", tmp_path / "out", skip_bad=True).episodes == 1


def test_a_chunk_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.arange(40 * 3000, dtype="i4").reshape(40, 3000)
    path = write(tmp_path / "a.zarr", {"x": rows}, [3, 9, 21, 40], chunks=(10, 2000))
    seen: list[tuple[int, ...]] = []
    decode = ZarrArray._chunk

    def counted(self: ZarrArray, at: tuple[int, ...]) -> Any:
        seen.extend([at] * (self.name == "data/x"))
        return decode(self, at)

    monkeypatch.setattr(ZarrArray, "_chunk", counted)
    with SmallPieces(path) as reader:
        assert sum(map(len, reader.pieces())) == 40
    assert seen == [(band, part) for band in range(4) for part in range(2)]


def edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in document.items() if value is not ...}))


def ends(*values: float, dtype: Any = "i8") -> Callable[[Path], None]:
    return lambda path: _put_ends(path, np.array(values, dtype))


def _put_ends(path: Path, values: np.ndarray) -> None:
    shutil.rmtree(path / "meta" / "episode_ends")
    zarr.open_group(path, mode="a").create_array("meta/episode_ends", data=values)


def array_2(name: str = "state", **changes: Any) -> Callable[[Path], None]:
    return lambda path: edit(path / "data" / name / ".zarray", **changes)


def unlink(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        if changes:
            edit((path / name).parent / ".zarray", **changes)

    return change


def write_chunk(data: bytes) -> Callable[[Path], Any]:
    return lambda path: (path / "data" / "state" / "0.0").write_bytes(data)


@each(
    ("change", "said"),
    [
        (ends(4, 30), "data/action has 11 rows, and the last of meta/episode_ends is 30"),
        (ends(4, 3, 11), "goes from 4 down to 3 at episode 1"),
        (ends(-4, 11), "goes from 0 down to -4 at episode 0"),
        (ends(4, 11, dtype="f8"), "expected integers"),
        (lambda path: _put_ends(path, np.array([[4, 11]])), "expected integers"),
        (lambda path: _put_ends(path, np.zeros(0, "i8")), "no episodes with steps: meta/episode_ends has 0 values"),
        (ends(0, 0), "chunks of meta/episode_ends are not there"),
        (unlink("meta/episode_ends/0"), "chunks of meta/episode_ends are not there"),
        (array_2(compressor={"id": "zip9"}), "its codec is 'zip9', which rbtool does not support"),
        (array_2(filters=[{"id": "delta", "x": 1}]), "'delta' cannot be made here"),
        (lambda path: (path / "data" / "state" / ".zarray").write_text("{"), "is not JSON"),
        (array_2(dtype="wrong"), "which Zarr does not have"),
        (array_2(dtype="|a3"), "which Zarr does not have"),  # the old name of S3
        (array_2(zarr_format=4), "zarr_format is 4, expected 2"),
        (array_2(chunks=[4]), "shape has 2 dimensions, and chunks 1"),
        (array_2(chunks=[0, 3]), "expected numbers of 1 or more"),
        (array_2(chunks=[1 << 40, 3]), "a chunk takes .* at most"),
        (array_2(shape=[11, 1 << 40]), "the rows of a chunk takes|at most"),
        (array_2(order="Z"), "order is 'Z', expected C or F"),
        (unlink("data/state/0.0", fill_value=None), "state no fill value for missing chunks"),
        (array_2(fill_value="x"), "fill_value is 'x', expected a value of type float64"),
        (lambda path: shutil.rmtree(path / "data"), "has no arrays of rows in data"),
        (write_chunk(b"\2\1\1\1"), "cannot be read"),
        (write_chunk(bytes(1 << 20)), "at most .* expected"),
    ],
)
def test_stores_that_make_no_sense_are_refused(change: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", some(), [4, 5, 11])
    change(path)
    refused(path, said)


@each(
    ("change", "said"),
    [
        ({"chunk_grid": {"name": "rectilinear"}}, "expected regular"),
        ({"codecs": [{"name": "zip9"}, {"name": "bytes"}]}, "'zip9', which rbtool does not support"),
        ({"codecs": []}, "its codecs do not include bytes"),
        ({"codecs": [{"name": "bytes", "configuration": {"endian": "odd"}}]}, "expected little or big"),
        ({"storage_transformers": [{"name": "x"}]}, "storage transformers"),
        ({"node_type": "tree"}, "states no node_type"),
        ({"zarr_format": 2}, "zarr_format is 2, expected 3"),
        ({"chunk_key_encoding": {"name": "own"}}, "expected default or v2"),
    ],
)
def test_arrays_of_format_3_that_make_no_sense_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", some(), [4, 5, 11], zarr_format=3)
    edit(path / "data" / "state" / "zarr.json", **change)
    refused(path, said)


@each(
    ("stated", "said"),
    [
        ("observation=x", "names the arrays that make the action"), ("action=next:stat", "did you mean 'state'"),
        ("action=next:action", "has data/action"),
    ],
)  # fmt: skip
def test_maps_that_are_refused(stated: str, said: str, tmp_path: Path) -> None:
    data = some()
    path = write(tmp_path / "a.zarr", data if stated.endswith(":action") else {"state": data["state"]}, [4, 5, 11])
    refused(path, said, UsageError, map=stated)


def test_python_objects_are_never_read(tmp_path: Path) -> None:
    """Neither an array of objects, nor one of numbers that a filter unpickles."""
    path = write(tmp_path / "a.zarr", some(), [4, 11])
    folder = path / "data" / "tools"
    folder.mkdir()
    (folder / ".zarray").write_text(json.dumps({
        "chunks": [11], "compressor": None, "dtype": "|O", "fill_value": 0, "filters": [{"id": "pickle"}], "order": "C",
        "shape": [11], "zarr_format": 2,
    }))  # fmt: skip
    (folder / "0").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    array_2("action", filters=[{"id": "pickle"}], dtype="<f4")(path)
    facts, found = read(path)
    assert found.keys() == {"observation.state", "terminations", "truncations"}
    why = "it holds Python objects, which are never read"
    assert {one.key: one.why for one in facts.dropped_keys} == {"data/tools": why, "data/action": why}


def test_text_of_any_length(tmp_path: Path) -> None:
    texts = ["open"] * 4 + ["close it, please" * 9] * 7
    for zarr_format in (2, 3):
        path = write(tmp_path / f"{zarr_format}.zarr", some(), [4, 11], zarr_format=zarr_format)
        made = zarr.open_group(path, mode="a").create_array("data/task", shape=11, chunks=3, dtype=str)
        made[:] = np.array(texts, object)
        with ZarrReader(path) as reader:
            assert [piece.text["language_instruction"] for piece in reader.pieces()] == [texts[0], texts[-1]]


@pytest.mark.parametrize("dest", ["out.zarr", "out.zarr.zip"])
def test_exports_of_other_datasets_have_the_same_keys_again(dest: str, tmp_path: Path) -> None:
    given = rbtool.convert(Path("tests/data/aloha/mobile_aloha"), tmp_path / "ted")
    rbtool.export(tmp_path / "ted", tmp_path / dest)
    found = rbtool.convert(tmp_path / dest, tmp_path / "again")
    assert "base_action" in {field.name for field in open_steps(found.path).fields}
    assert found.content_digest == given.content_digest


def test_two_stores_in_a_zip_file_are_not_one(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("left.zarr", "right.zarr"):
            source = write(tmp_path / name, some(), [4, 11])
            for file in sorted(source.rglob("*")):
                if file.is_file():
                    archive.write(file, file.relative_to(tmp_path).as_posix())
    assert not ZarrReader.recognises(path)


@each("dest", ["out.zarr", "out.zarr.zip"])
@each("name", SAMPLES)
def test_exports_are_the_store_that_was_read(name: str, dest: str, tmp_path: Path) -> None:
    data, stops = plain(DATA / name)
    first = rbtool.convert(DATA / name, tmp_path / "ted")
    result = rbtool.export(tmp_path / "ted", tmp_path / dest)
    assert not result.dropped_keys
    given, found = plain(tmp_path / dest)
    assert found.tolist() == stops.tolist()
    assert found.dtype == np.int64
    assert given.keys() == data.keys()
    for one, rows in data.items():
        assert given[one].dtype == rows.dtype
        assert given[one].tobytes() == rows.tobytes()
    again = rbtool.convert(tmp_path / dest, tmp_path / "again")
    assert (again.steps, again.renamed_keys) == (first.steps, first.renamed_keys)
    assert again.content_digest == first.content_digest
    rbtool.export(tmp_path / "ted", tmp_path / dest, force=True)
