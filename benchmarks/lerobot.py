"""Time frames of LeRobot's videos, random batches and whole episodes, next to bare PyAV and to the lerobot package.

    python benchmarks/lerobot.py [FOLDER]      a LeRobot dataset with videos; by default one is generated
    python benchmarks/lerobot.py FOLDER --peer PYTHON    also the lerobot package of that interpreter (v3.0 only)

Both sides take turns, and the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

import rbtool
from rbtool.core.encodings.video import VideoFile

_FRAMES, _EPISODES, _SIZE, _BATCH, _ROUNDS = 200, 6, (240, 320), 32, 7
_PEER = """
import json, sys, time, numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
data = LeRobotDataset("local/data", root=sys.argv[1], video_backend=sys.argv[2])
draw = np.random.default_rng(0)
for line in sys.stdin:
    rows = draw.integers(0, len(data), int(line))
    started = time.perf_counter()
    for row in rows:
        data[int(row)]
    print(json.dumps(int(line) / (time.perf_counter() - started)), flush=True)
"""


def made(folder: Path, episodes: int = _EPISODES) -> Path:
    """Write a dataset of v3.0 whose frames are noise that moves, encoded as lerobot does: AV1, a key frame in two."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    camera, fps = "observation.images.top", 30
    rows, entries, total = [], [], 0
    video = folder / f"videos/{camera}/chunk-000/file-000.mp4"
    video.parent.mkdir(parents=True)
    base = np.random.default_rng(0).integers(0, 255, (*_SIZE, 3), np.uint8)
    base = np.asarray(torch.nn.functional.avg_pool2d(torch.from_numpy(base).movedim(-1, 0).float(), 9, 1, 4))
    base = np.moveaxis(base, 0, -1).astype(np.uint8)
    with av.open(str(video), "w") as container:
        stream = container.add_stream("libsvtav1", rate=fps, options={"g": "2", "crf": "30", "preset": "12"})
        stream.height, stream.width, stream.pix_fmt = *_SIZE, "yuv420p"
        for episode in range(episodes):
            entries.append({
                "episode_index": episode, "tasks": ["move"], "length": _FRAMES, "data/chunk_index": 0,
                "data/file_index": 0, "dataset_from_index": total, "dataset_to_index": total + _FRAMES,
                f"videos/{camera}/chunk_index": 0, f"videos/{camera}/file_index": 0,
                f"videos/{camera}/from_timestamp": total / fps,
                f"videos/{camera}/to_timestamp": (total + _FRAMES) / fps,
            })  # fmt: skip
            for frame in range(_FRAMES):
                image = av.VideoFrame.from_ndarray(np.ascontiguousarray(np.roll(base, total, 1)), format="rgb24")
                image.pts, image.time_base = total, Fraction(1, fps)
                container.mux(stream.encode(image))
                rows.append({
                    "action": 0.5, "timestamp": np.float32(frame / fps), "frame_index": frame,
                    "episode_index": episode, "index": total, "task_index": 0,
                })  # fmt: skip
                total += 1
        container.mux(stream.encode())
    kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
    columns = [
        {"name": name, "field_name": name, "pandas_type": one, "numpy_type": other, "metadata": None}
        for name, (one, other) in kinds.items()
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
    numbers = ("frame_index", "episode_index", "index", "task_index")
    floats = ("action", "timestamp")
    schema = pa.schema([(name, pa.float32() if name in floats else pa.int64()) for name in (*floats, *numbers)])
    for path, table in {
        "data/chunk-000/file-000.parquet": pa.Table.from_pylist(rows, schema),
        "meta/episodes/chunk-000/file-000.parquet": pa.Table.from_pylist(entries),
        "meta/tasks.parquet": pa.table({"task_index": [0], "task": ["move"]}).replace_schema_metadata(
            {"pandas": json.dumps(pandas)}
        ),
    }.items():  # fmt: skip
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / path)
    dtypes = {name: "float32" if name in floats else "int64" for name in schema.names}
    features: dict[str, Any] = {name: {"dtype": one, "shape": [1], "names": None} for name, one in dtypes.items()}
    features[camera] = {"dtype": "video", "shape": [*_SIZE, 3], "names": ["height", "width", "channels"]}
    info = {
        "codebase_version": "v3.0", "fps": fps, "robot_type": None, "total_episodes": episodes, "total_frames": total,
        "total_tasks": 1, "chunks_size": 1000, "splits": {"train": f"0:{episodes}"}, "features": features,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "data_files_size_in_mb": 100, "video_files_size_in_mb": 200,
    }  # fmt: skip
    (folder / "meta/info.json").write_text(json.dumps(info))
    (folder / "meta/stats.json").write_text("{}")
    return folder


def timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def bare(path: Path, most: int) -> None:
    """Decode the first frames of a video with plain PyAV."""
    with av.open(str(path)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            frame.to_ndarray(format="rgb24")
            if number + 1 == most:
                return


def ours(path: Path, most: int) -> None:
    """Read the same frames in batches of 16."""
    with VideoFile(path) as video:
        for start in range(0, most, 16):
            video.read(np.arange(start, min(start + 16, most)))


def sequential(path: Path) -> None:
    with VideoFile(path) as video:
        most = min(len(video), 400)
    ratios, rates = [], []
    for _ in range(_ROUNDS):
        plain, own = timed(lambda: bare(path, most)), timed(lambda: ours(path, most))
        ratios.append(plain / own)
        rates.append(most / own)
    print(f"sequential   {statistics.median(rates):,.0f} frames/s, {statistics.median(ratios):.2f} x bare PyAV")


def random_frames(dataset: Path, raw: Path, peer: str | None, backend: str) -> None:
    buffer = rbtool.load_dataset(dataset, _BATCH, seed=0)
    buffer.sample()
    command = [peer or "", "-c", _PEER, str(raw), backend]
    process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) if peer else None
    rates, ratios = [], []
    for _ in range(_ROUNDS):
        rates.append(_BATCH / timed(buffer.sample))
        if process is not None and process.stdin is not None and process.stdout is not None:
            print(_BATCH, file=process.stdin, flush=True)
            ratios.append(rates[-1] / json.loads(process.stdout.readline()))
    said = f", {statistics.median(ratios):.2f} x lerobot ({backend})" if ratios else ""
    print(f"random       {statistics.median(rates):,.0f} steps/s, each with its next frame{said}")
    if process is not None:
        process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--peer")
    parser.add_argument("--backend", default="pyav")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        raw = given.folder or made(Path(place) / "raw")
        dataset = rbtool.convert(raw, Path(place) / "kept", skip_bad=True).path
        videos = sorted(raw.rglob("*.mp4"))
        print(f"{len(videos)} videos, torch {torch.__version__}, PyAV {av.__version__}", file=sys.stderr)
        sequential(videos[-1])
        random_frames(dataset, raw, given.peer, given.backend)


if __name__ == "__main__":
    main()
