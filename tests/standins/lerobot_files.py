"""LeRobot datasets written by plain pyarrow, json and PyAV, and a second reading that shares nothing with rbtool's."""

from __future__ import annotations

import functools
import io
import json
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")

CAMERA = "observation.images.top"
FPS = 10
SIZE = (32, 48)
"""Height and width."""
_INDEX = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}


@dataclass
class Take:
    """One episode: arrays of a row a frame, its `tasks` (one a row), and the numbers of its pictures."""

    columns: dict[str, Any]
    tasks: list[str]
    pictures: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tasks)


def random_takes(lengths: Sequence[int], *, seed: int = 0, done: bool = True) -> list[Take]:
    """Make episodes; the last row of each is `next.done`."""
    draw, found, first = np.random.default_rng(seed), [], 0
    for number, length in enumerate(lengths):
        ends = np.zeros(length, bool)
        ends[-1] = done
        columns = {
            "observation.state": draw.normal(size=(length, 3)).astype(np.float32),
            "observation.pose.arm": draw.normal(size=(length, 2)).astype(np.float64),
            "action": draw.normal(size=(length, 2)).astype(np.float32),
            "next.reward": draw.normal(size=length).astype(np.float32),
            "next.done": ends,
        }
        found.append(Take(columns, [f"do {number % 2}"] * length, list(range(first, first + length))))
        first += length
    return found


def picture(number: int) -> Any:
    """Make the picture of a frame: no two of the first 200 are alike."""
    height, width = SIZE
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = np.arange(width) * 5
    image[: height // 2, :, 1] = number % 200
    image[height // 2 :, :, 2] = 200 - number % 200
    return image


def write_video(path: Path, pictures: Sequence[Any], *, fps: int = FPS, codec: str = "libx264", **options: str) -> Path:
    """Encode pictures, one every 1 / fps seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps, options=options)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for number, image in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def decoded(path: Path) -> list[Any]:
    """Decode a video from the start to the end."""
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def _array(values: Any) -> Any:
    if isinstance(values, list):
        return pa.array(values)
    if values.ndim == 1:
        return pa.array(values)
    array = pa.array(values.reshape(-1))
    for size in values.shape[:0:-1]:
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _table(takes: Sequence[Take], first: int, tasks: Sequence[str], images: str) -> Any:
    """Rows of consecutive episodes, of which the first has the number `first`."""
    columns: dict[str, list[Any]] = {}
    for number, take in takes_of(takes, first):
        start = sum(len(one) for one in takes[:number])
        extra = {
            "timestamp": (np.arange(len(take)) / FPS).astype(np.float32),
            "frame_index": np.arange(len(take)),
            "episode_index": np.full(len(take), number),
            "index": np.arange(start, start + len(take)),
            "task_index": np.array([tasks.index(task) for task in take.tasks]),
        }
        if images == "image":
            extra[CAMERA] = [{"bytes": as_png(picture(one)), "path": None} for one in take.pictures]
        for name, values in {**take.columns, **extra}.items():
            columns.setdefault(name, []).append(_array(values))
    return pa.table({name: pa.concat_arrays(parts) for name, parts in columns.items()})


def takes_of(takes: Sequence[Take], first: int) -> list[tuple[int, Take]]:
    """Number episodes from `first` on."""
    return list(enumerate(takes))[first:]


def as_png(image: Any) -> bytes:
    """Encode a picture."""
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return out.getvalue()


def _features(take: Take, images: str) -> dict[str, Any]:
    found = {
        name: {
            "dtype": "string" if isinstance(values, list) else str(values.dtype),
            "shape": [1] if isinstance(values, list) or values.ndim == 1 else list(values.shape[1:]),
            "names": None,
        }
        for name, values in take.columns.items()
    }
    found |= {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in _INDEX.items()}
    if images != "none":
        found[CAMERA] = {"dtype": images, "shape": [*SIZE, 3], "names": ["height", "width", "channel"]}
    return found


def write_dataset(
    folder: Path, takes: Sequence[Take], *, version: str = "v2.1", images: str = "video", a_file: int = 2, **info: Any
) -> Path:
    """Write a dataset; `images` is `video`, `image` or `none`, and a file of v3 has `a_file` episodes."""
    (folder / "meta").mkdir(parents=True)
    tasks = list(dict.fromkeys(task for take in takes for task in take.tasks))
    stated = {
        "codebase_version": version, "robot_type": "toy", "fps": FPS, "total_episodes": len(takes),
        "total_frames": sum(map(len, takes)), "total_tasks": len(tasks), "chunks_size": 1000,
        "splits": {"train": f"0:{len(takes)}"}, "features": _features(takes[0], images),
    }  # fmt: skip
    write = _write_new if version == "v3.0" else _write_old
    stated |= write(folder, takes, tasks, images, a_file)
    (folder / "meta" / "info.json").write_text(json.dumps(stated | info))
    return folder


def _write_old(folder: Path, takes: Sequence[Take], tasks: list[str], images: str, a_file: int) -> dict[str, Any]:
    for number in range(len(takes)):
        path = folder / f"data/chunk-000/episode_{number:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(_table(takes[: number + 1], number, tasks, images), path)
        if images == "video":
            pictures = [picture(one) for one in takes[number].pictures]
            write_video(folder / f"videos/chunk-000/{CAMERA}/episode_{number:06d}.mp4", pictures, g="4")
    write_lines(folder / "meta/tasks.jsonl", [{"task_index": at, "task": task} for at, task in enumerate(tasks)])
    write_lines(folder / "meta/episodes.jsonl", [
        {"episode_index": number, "tasks": list(dict.fromkeys(take.tasks)), "length": len(take)}
        for number, take in enumerate(takes)
    ])  # fmt: skip
    return {
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_new(folder: Path, takes: Sequence[Take], tasks: list[str], images: str, a_file: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for at, first in enumerate(range(0, len(takes), a_file)):
        path = folder / f"data/chunk-000/file-{at:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        group = takes[: first + a_file]
        pq.write_table(_table(group, first, tasks, images), path, row_group_size=7)
        if images == "video":
            pictures = [picture(one) for _, take in takes_of(group, first) for one in take.pictures]
            write_video(folder / f"videos/{CAMERA}/chunk-000/file-{at:03d}.mp4", pictures, g="4")
        start = 0
        for number, take in takes_of(group, first):
            rows.append({
                "episode_index": number, "tasks": list(dict.fromkeys(take.tasks)), "length": len(take),
                "data/chunk_index": 0, "data/file_index": at,
                f"videos/{CAMERA}/chunk_index": 0, f"videos/{CAMERA}/file_index": at,
                f"videos/{CAMERA}/from_timestamp": start / FPS,
                f"videos/{CAMERA}/to_timestamp": (start + len(take)) / FPS, "stats/action/min": [0.0],
            })  # fmt: skip
            start += len(take)
    path = folder / "meta/episodes/chunk-000/file-000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    names = {"task_index": list(range(len(tasks))), "__index_level_0__": tasks}
    pq.write_table(pa.table(names), folder / "meta/tasks.parquet")
    return {
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }


def plain_rows(folder: Path) -> list[dict[str, Any]]:
    """Read all rows as dictionaries in the order of `index`, the pictures of videos and the texts of tasks included."""
    info = json.loads((folder / "meta/info.json").read_text())
    rows = [row for path in sorted(folder.glob("data/*/*.parquet")) for row in pq.read_table(path).to_pylist()]
    rows.sort(key=lambda row: row["index"])
    new = info["codebase_version"] == "v3.0"
    if new:
        named = pq.read_table(folder / "meta/tasks.parquet").to_pylist()
        tasks = {row["task_index"]: row.get("task", row.get("__index_level_0__")) for row in named}
        about = {row["episode_index"]: row for path in sorted(folder.glob("meta/episodes/*/*.parquet"))
                 for row in pq.read_table(path).to_pylist()}  # fmt: skip
    else:
        lines = (folder / "meta/tasks.jsonl").read_text().splitlines()
        tasks = {row["task_index"]: row["task"] for row in map(json.loads, lines)}
    videos: dict[Path, list[Any]] = {}
    for row in rows:
        row["task"] = tasks[row["task_index"]]
        for key, feature in info["features"].items():
            if feature["dtype"] == "image":
                row[key] = np.asarray(Image.open(io.BytesIO(row[key]["bytes"])).convert("RGB"))
            if feature["dtype"] != "video":
                continue
            number = row["episode_index"]
            if new:
                entry = about[number]
                place = {"video_key": key, "chunk_index": entry[f"videos/{key}/chunk_index"],
                         "file_index": entry[f"videos/{key}/file_index"]}  # fmt: skip
                first = round(entry[f"videos/{key}/from_timestamp"] * info["fps"])
            else:
                place, first = {"video_key": key, "episode_chunk": number // 1000, "episode_index": number}, 0
            path = folder / info["video_path"].format(**place)
            if path not in videos:
                videos[path] = decoded(path)
            row[key] = videos[path][first + row["frame_index"]]
    return rows


_lance: list[ProcessPoolExecutor] = []


def in_lance(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Have a function run in a process of its own: one that has imported pylance cannot fork, and tests do."""

    @functools.wraps(function)
    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        if multiprocessing.parent_process() is not None:
            return function(*args, **kwargs)
        if not _lance:
            _lance.append(ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")))
        return _lance[0].submit(call, *args, **kwargs).result()

    return call


def end_lance() -> None:
    """End the process of `in_lance`, if there is one."""
    while _lance:
        _lance.pop().shutdown()


@in_lance
def lance_rows(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a Lance table."""
    import lance

    rows: list[dict[str, Any]] = lance.dataset(str(path)).to_table().to_pylist()
    return rows


@in_lance
def lance_blob(path: Path, column: str) -> bytes:
    """Read the blob of the first row of a Lance table."""
    import lance

    [blob] = lance.dataset(str(path)).take_blobs(column, indices=[0])
    data: bytes = blob.readall()
    return data


@in_lance
def change_in_lance(path: Path, change: str, *arguments: Any) -> None:
    """Call a method of a Lance table, such as `delete`."""
    import lance

    getattr(lance.dataset(str(path)), change)(*arguments)


@in_lance
def table_of_a_file(path: Path, video: str, address: str) -> None:
    """Write a table of videos with one whose bytes are in another file."""
    import lance

    columns = {"video_key": pa.array([video]), "chunk_index": pa.array([0]), "file_index": pa.array([0])}
    schema = pa.schema([*pa.table(columns).schema, lance.blob_field("video_bytes")])
    table = pa.Table.from_arrays([*columns.values(), lance.blob_array([address])], schema=schema)
    table_in_lance(path, table, allow_external_blob_outside_bases=True)


@in_lance
def table_in_lance(path: Path, table: Any, *, version: str = "2.2", parts: int = 1, **options: Any) -> Path:
    """Write a Lance table, a version and a fragment for each of its `parts`."""
    import lance

    size = max(1, -(-table.num_rows // parts))
    for start in range(0, max(1, table.num_rows), size):
        mode = "append" if start else "create"
        lance.write_dataset(
            table.slice(start, size), str(path), mode=mode, data_storage_version=version, **options
        )  # fmt: skip
    return path


@in_lance
def dataset_in_lance(
    folder: Path, target: Path, *, version: str = "2.2", parts: int = 1, meta: str = "both", apart: bool = True
) -> Path:
    """Write a dataset of v3 as Lance tables; `meta` is in the folder, in its `table`, or `both`.

    With `apart`, bytes of videos are blobs: of the second kind from version 2.2 of the files on, else of the first.
    """
    import lance

    rows = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("data/*/*.parquet"))])
    rows = rows.rename_columns([name.replace(".", "_") for name in rows.column_names])
    table_in_lance(target / "frames.lance", rows.replace_schema_metadata(None), version=version, parts=parts)
    videos = sorted(folder.glob("videos/*/*/*.mp4"))
    if videos:
        names = [path.relative_to(folder / "videos").parts for path in videos]
        contents = [path.read_bytes() for path in videos]
        columns = {
            "video_key": pa.array([key for key, *_ in names]),
            "chunk_index": pa.array([int(chunk.removeprefix("chunk-")) for _, chunk, _ in names]),
            "file_index": pa.array([int(file.removeprefix("file-").removesuffix(".mp4")) for *_, file in names]),
        }
        if apart and version >= "2.2":
            fields, values = lance.blob_field("video_bytes"), lance.blob_array(contents)
        else:
            kind = {b"lance-encoding:blob": b"true"} if apart else None
            fields, values = (
                pa.field("video_bytes", pa.large_binary(), metadata=kind),
                pa.array(contents, pa.large_binary()),
            )
        schema = pa.schema([*pa.table(columns).schema, fields])
        table = pa.Table.from_arrays([*columns.values(), values], schema=schema)
        table_in_lance(target / "videos.lance", table, version=version)
    files = {path.relative_to(folder / "meta").as_posix(): path for path in sorted((folder / "meta").rglob("*.*"))}
    documents = {name: path.read_bytes() for name, path in files.items()}
    info = json.loads(documents["info.json"]) | {"storage_format": "lance"}
    documents["info.json"] = json.dumps(info, indent=4).encode()
    if meta != "table":
        for name, data in documents.items():
            (target / "meta" / name).parent.mkdir(parents=True, exist_ok=True)
            (target / "meta" / name).write_bytes(data)
    if meta != "folder":
        content = {"path": list(documents), "data": pa.array(documents.values(), pa.large_binary())}
        table_in_lance(target / "meta.lance", pa.table(content), version=version)
    return target
