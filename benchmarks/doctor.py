"""Time `rbtool check`: metadata alone, the rules about rows, and pictures.

    python benchmarks/doctor.py                all three
    python benchmarks/doctor.py metadata       check --profile form --no-data of 1,000 episodes of LeRobot
    python benchmarks/doctor.py rows           the rules about behaviour on rows of 24 float32, on one core
    python benchmarks/doctor.py pictures       a check of 100,000 steps with two cameras: as by default, and --full

Run it with OMP_NUM_THREADS=1. Imports are not counted. Figures are medians of several rounds; compare two versions on
the same machine, in turns.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import rbtool
from rbtool.core.doctor.doctor import Doctor
from rbtool.core.ted.rules import Rows
from rbtool.core.ted.schema import Field

_EPISODES, _STEPS, _FPS = 1_000, 200, 30
_STATE, _ACTION, _WIDTH = "observation.state", "action", 12
_CAMERAS = ("observation.images.front", "observation.images.wrist")
_ROWS, _AT_ONCE, _ROUNDS = 1 << 20, 1 << 14, 5
_SIZE, _FILMED = (96, 128), 100_000


def _table(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def _vectors(draw: Any, rows: int) -> Any:
    import pyarrow as pa

    values = np.cumsum(draw.normal(size=(rows, _WIDTH)), axis=0).astype(np.float32)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), _WIDTH)


def _columns(draw: Any, start: int, episodes: list[int], steps: int) -> dict[str, Any]:
    rows = len(episodes) * steps
    frame = np.tile(np.arange(steps), len(episodes))
    return {
        _STATE: _vectors(draw, rows), _ACTION: _vectors(draw, rows), "timestamp": (frame / _FPS).astype(np.float32),
        "frame_index": frame, "episode_index": np.repeat(episodes, steps), "index": start + np.arange(rows),
        "task_index": np.zeros(rows, np.int64),
    }  # fmt: skip


def made(folder: Path, version: str, *, episodes: int, steps: int, video: Path | None = None) -> Path:
    """Write a LeRobot dataset, v2.1 or v3.0, whose videos are `video`, or some bytes that are never read."""
    draw, new = np.random.default_rng(0), version == "v3.0"
    (folder / "meta").mkdir(parents=True)
    features: dict[str, Any] = {
        name: {"dtype": "float32", "shape": [_WIDTH], "names": None} for name in (_STATE, _ACTION)
    }
    features |= {
        name: {"dtype": "video", "shape": [*_SIZE, 3], "names": ["height", "width", "channels"]} for name in _CAMERAS
    }
    features |= {name: {"dtype": "int64", "shape": [1], "names": None}
                 for name in ("frame_index", "episode_index", "index", "task_index")}  # fmt: skip
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    files = (
        ("data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
         "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4")
        if new else
        ("data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
         "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4")
    )  # fmt: skip
    info = {
        "codebase_version": version, "fps": _FPS, "total_episodes": episodes, "total_frames": episodes * steps,
        "total_tasks": 1, "chunks_size": 1000, "splits": {"train": f"0:{episodes}"}, "features": features,
        "data_path": files[0], "video_path": files[1],
    }  # fmt: skip
    (folder / "meta/info.json").write_text(json.dumps(info))
    measures = {name: [0.0] * _WIDTH for name in ("min", "max", "mean", "std")} | {"count": [episodes * steps]}
    (folder / "meta/stats.json").write_text(json.dumps({_STATE: measures, _ACTION: measures}))
    groups = [[*range(episodes)]] if new else [[number] for number in range(episodes)]
    for group in groups:
        values = {"episode_chunk": 0, "episode_index": group[0], "chunk_index": 0, "file_index": 0}
        _table(folder / files[0].format(**values), _columns(draw, group[0] * steps, group, steps))
        for camera in _CAMERAS:
            path = folder / files[1].format(**values, video_key=camera)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(4096)) if video is None else os.link(video, path)
    if not new:
        lines = [{"episode_index": one, "tasks": ["move"], "length": steps} for one in range(episodes)]
        (folder / "meta/episodes.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
        (folder / "meta/tasks.jsonl").write_text('{"task_index": 0, "task": "move"}\n')
        stats = [{"episode_index": one, "stats": {_STATE: measures, _ACTION: measures}} for one in range(episodes)]
        (folder / "meta/episodes_stats.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in stats))
        return folder
    starts = np.arange(episodes) * steps
    entries: dict[str, Any] = {
        "episode_index": range(episodes), "tasks": [["move"]] * episodes, "length": [steps] * episodes,
        "data/chunk_index": [0] * episodes, "data/file_index": [0] * episodes, "dataset_from_index": starts,
        "dataset_to_index": starts + steps,
    }  # fmt: skip
    for camera in _CAMERAS:
        entries |= {f"videos/{camera}/{one}_index": [0] * episodes for one in ("chunk", "file")}
        entries |= {f"videos/{camera}/from_timestamp": starts / _FPS,
                    f"videos/{camera}/to_timestamp": (starts + steps) / _FPS}  # fmt: skip
    entries |= {f"stats/{name}/{measure}": [measures[measure]] * episodes
                for name in (_STATE, _ACTION) for measure in measures}  # fmt: skip
    _table(folder / "meta/episodes/chunk-000/file-000.parquet", entries)
    _table(folder / "meta/tasks.parquet", {"task_index": [0], "task": ["move"]})
    return folder


def timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def metadata(folder: Path) -> None:
    for version in ("v2.1", "v3.0"):
        source = made(folder / version, version, episodes=_EPISODES, steps=50)
        result = rbtool.check(source, profile="form", data=False)
        taken = [
            timed(lambda source=source: rbtool.check(source, profile="form", data=False)) for _ in range(2 * _ROUNDS)
        ]
        print(f"metadata     {version}: {statistics.median(taken):.3f} s, {len(result.findings)} findings")


def rows(doctor: type[Any] = Doctor) -> list[float]:
    """Return how many rows per second are checked, in episodes of about 200 steps."""
    draw = np.random.default_rng(0)
    fields = [Field(("observation", "state"), "float32", (_WIDTH,), "observation"),
              Field(("action",), "float32", (_WIDTH,), "action")]  # fmt: skip
    lengths = draw.integers(150, 250, _ROWS // 200)
    total = int(lengths.sum())
    first, episode = np.zeros(total, bool), np.repeat(np.arange(len(lengths)), lengths)
    first[np.cumsum([0, *lengths[:-1]])] = True
    state = np.sin(np.cumsum(draw.normal(0, 0.1, (total, _WIDTH)), axis=0)).astype(np.float32)
    action = np.roll(state, -1, axis=0)
    blocks = [
        Rows(
            start, {("observation", "state"): state[start:stop], ("action",): action[start:stop]},
            first=first[start:stop], last=np.append(first[1:], True)[start:stop], episode=episode[start:stop],
            explicit=first[start:stop] & False,
        )
        for start in range(0, total, _AT_ONCE) for stop in [min(start + _AT_ONCE, total)]
    ]  # fmt: skip

    def work() -> None:
        one = doctor(fields, Path(), is_raw=False, documents={}, renamed={}, profiles=("data", "robot"))
        for block in blocks:
            one.see(block)
        one.findings()

    return [total / timed(work) for _ in range(_ROUNDS)]


def pictures(folder: Path) -> None:
    import av

    steps = 200
    video = folder / "moving.mp4"
    draw, shade = np.random.default_rng(0), np.linspace(60, 180, _SIZE[1])
    with av.open(str(video), "w") as container:
        stream = container.add_stream("libx264", rate=_FPS, options={"g": "2", "crf": "23", "preset": "ultrafast"})
        (stream.height, stream.width), stream.pix_fmt = _SIZE, "yuv420p"
        for number in range(steps):
            image = np.repeat(np.tile(np.roll(shade, number), (_SIZE[0], 1))[..., None], 3, axis=2)
            image += draw.normal(0, 2, image.shape)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image.clip(0, 255).astype(np.uint8), "rgb24")))
        container.mux(stream.encode())
    source = made(folder / "filmed", "v2.1", episodes=_FILMED // steps, steps=steps, video=video)
    for full in (False, True):
        started = time.process_time()
        taken = timed(lambda full=full: rbtool.check(source, full=full))
        print(f"pictures     {_FILMED:,} steps, 2 cameras of {_SIZE[1]} x {_SIZE[0]}"
              f"{', --full' * full}: {taken:.1f} s, {time.process_time() - started:.1f} s of CPU")  # fmt: skip


def main() -> None:
    chosen = sys.argv[1:] or ["metadata", "rows", "pictures"]
    with tempfile.TemporaryDirectory() as place:
        if "metadata" in chosen:
            metadata(Path(place))
        if "rows" in chosen:
            print(f"rows         {statistics.median(rows()) / 1e6:.2f} million rows/s of {2 * _WIDTH} float32")
        if "pictures" in chosen:
            pictures(Path(place))


if __name__ == "__main__":
    main()
