"""Datasets of a robot arm in LeRobot's layout: clean ones of many kinds, and copies with one defect each.

The arm moves between waypoints with a smooth velocity, its actions are where it will be some steps later, and each
camera draws the arm as it stands. `python tests/standins/robot_sets.py FOLDER` writes all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from lerobot_files import write_lines, write_video

CAMERAS = ("observation.images.front", "observation.images.wrist")
STATE, ACTION, TIMESTAMP = "observation.state", "action", "timestamp"
FEATURES = (STATE, ACTION)


@dataclass
class Kind:
    """What a set is like. `lead` is by how many steps actions precede states; `velocity` makes actions velocities.

    `scenes` has another background in each episode.
    """

    seed: int = 0
    episodes: int = 8
    length: int = 90
    spread: int = 12
    fps: int = 30
    joints: int = 6
    side: int = 48
    lead: int = 2
    noise: float = 2e-4
    scale: float = 1.0
    velocity: bool = False
    rewards: bool = False
    version: str = "v3.0"
    cameras: int = 2
    scenes: bool = False
    tasks: tuple[str, ...] = ("put the red cube into the box", "open the top drawer")


@dataclass
class Episode:
    """Columns of a row a step, the pictures of each camera, uint8 `[steps, side, side, 3]`, and the task."""

    columns: dict[str, Any]
    pictures: dict[str, Any]
    task: str

    def __len__(self) -> int:
        return len(self.columns[STATE])


@dataclass
class RobotSet:
    """The episodes of a set, entries of `info.json` that differ, and a change to the statistics once they are made."""

    kind: Kind
    episodes: list[Episode]
    draw: np.random.Generator
    info: dict[str, Any] = field(default_factory=dict)
    statistics: Callable[[dict[str, Any]], None] = lambda found: None


def _smooth(points: Any, steps: int, draw: np.random.Generator) -> Any:
    """Move from point to point with minimal jerk, in parts of unequal duration: float64 `[steps, joints]`."""
    share = draw.uniform(0.7, 1.3, len(points) - 1)
    edges = np.concatenate(([0], np.cumsum(share) / share.sum())) * (steps - 1)
    at = np.arange(steps)
    part = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, len(points) - 2)
    x = ((at - edges[part]) / (edges[part + 1] - edges[part]))[:, None]
    return points[part] + (points[part + 1] - points[part]) * (10 * x**3 - 15 * x**4 + 6 * x**5)


def _arm(state: Any, side: int, camera: int) -> Any:
    """Draw an arm of two links on a table, uint8 `[steps, side, side, 3]`; each camera looks from elsewhere."""
    first, second = (state[:, camera] * 1.3 + camera, state[:, 1 + camera] * 1.3 - camera)
    base = np.array([0.5, 0.9]) if camera == 0 else np.array([0.1, 0.5])
    elbow = base + 0.4 * np.stack((np.sin(first), -np.cos(first)), 1)
    hand = elbow + 0.35 * np.stack((np.sin(first + second), -np.cos(first + second)), 1)
    y, x = np.mgrid[:side, :side] / side
    image = np.empty((len(state), side, side, 3))
    image[..., 0] = 90 + 60 * x + 25 * np.sin(19 * x * (1 + camera)) * np.sin(17 * y)
    image[..., 1] = 110 - 50 * y + 20 * np.sin(23 * y)
    image[..., 2] = 70 + 40 * camera
    for start, stop, color in (
        (np.broadcast_to(base, elbow.shape), elbow, (220, 40, 40)),
        (elbow, hand, (40, 60, 230)),
    ):
        along = stop - start
        px, py = x[None] - start[:, 0, None, None], y[None] - start[:, 1, None, None]
        ax, ay = along[:, 0, None, None], along[:, 1, None, None]
        near = np.clip((px * ax + py * ay) / (along**2).sum(1)[:, None, None], 0, 1)
        mask = (px - near * ax) ** 2 + (py - near * ay) ** 2 < 0.06**2
        image[mask] = color
    return np.clip(image, 0, 255).astype(np.uint8)


def make(kind: Kind) -> RobotSet:
    """Make a clean set."""
    draw = np.random.default_rng(kind.seed)
    count = 5
    way = draw.uniform(-0.9, 0.9, (len(kind.tasks), count, kind.joints))
    way[:, -1] = way[:, 0]  # home
    grip = np.array([1.0, 1.0, 0.1, 0.9, 1.0])
    low, high = way.min((0, 1)), way.max((0, 1))
    way = np.where(high - low < 0.5, way * 2, way)
    episodes = []
    for number in range(kind.episodes):
        steps = kind.length + int(draw.integers(-kind.spread, kind.spread + 1))
        task = number % len(kind.tasks)
        points = way[task] + draw.normal(0, 0.06, way[task].shape)
        points = np.column_stack((points, grip + draw.normal(0, 0.01, count)))
        path = _smooth(points, steps + kind.lead, draw) * np.append(np.full(kind.joints, kind.scale), 1.0)
        state = path[:steps] + draw.normal(0, kind.noise, (steps, kind.joints + 1))
        action = path[kind.lead :] + draw.normal(0, kind.noise / 2, state.shape)
        if kind.velocity:
            action = np.gradient(path, axis=0)[kind.lead :] * kind.fps + draw.normal(0, kind.noise, state.shape)
        columns: dict[str, Any] = {
            STATE: state.astype(np.float32), ACTION: action.astype(np.float32),
            TIMESTAMP: (np.arange(steps) / kind.fps).astype(np.float32),
        }  # fmt: skip
        if kind.rewards:
            away = np.linalg.norm(state - points[3], axis=1) + 0.1 * np.linalg.norm(action - state, axis=1)
            columns["next.reward"] = -np.append(away[1:], away[-1]).astype(np.float32)
            columns["next.done"] = np.arange(steps) == steps - 1
        angles = path[:steps] / np.append(np.full(kind.joints, kind.scale), 1.0)
        pictures = {name: _arm(angles, kind.side, at) for at, name in enumerate(CAMERAS[: kind.cameras])}
        for one in pictures.values():
            if kind.scenes:
                one += (np.random.default_rng(number).uniform(0, 60, (1, kind.side, 1, 3))).astype(np.uint8)
            np.clip(one + draw.normal(0, 2.0, one.shape), 0, 255, out=one, casting="unsafe")
        episodes.append(Episode(columns, pictures, kind.tasks[task]))
    return RobotSet(kind, episodes, draw)


def statistics(values: Any) -> dict[str, Any]:
    """Return what `stats.json` says of a column."""
    values = np.asarray(values, np.float64).reshape(len(values), -1)
    found: dict[str, Any] = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    found |= {f"q{at:02d}": np.quantile(values, at / 100, axis=0) for at in (1, 10, 50, 90, 99)}
    return {name: one.tolist() for name, one in found.items()} | {"count": [len(values)]}


def _columns(made: RobotSet, numbers: Iterator[int], tasks: list[str]) -> Any:
    starts = np.cumsum([0, *map(len, made.episodes)])
    tables = []
    for number in numbers:
        one, steps = made.episodes[number], len(made.episodes[number])
        columns = {
            **one.columns, "frame_index": np.arange(steps), "episode_index": np.full(steps, number),
            "index": np.arange(starts[number], starts[number + 1]),
            "task_index": np.full(steps, tasks.index(one.task)),
        }  # fmt: skip
        tables.append(pa.table({
            name: pa.array(values) if values.ndim == 1
            else pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
            for name, values in columns.items()
        }))  # fmt: skip
    return pa.concat_tables(tables)


def write(made: RobotSet, folder: Path) -> Path:
    """Write a set: one file of all episodes in v3.0, one each in v2.1."""
    kind, new = made.kind, made.kind.version == "v3.0"
    (folder / "meta").mkdir(parents=True)
    tasks = list(dict.fromkeys(one.task for one in made.episodes))
    lengths = [len(one) for one in made.episodes]
    names = [f"joint_{at}.pos" for at in range(kind.joints)] + ["gripper.pos"]
    features = {
        name: {"dtype": str(values.dtype), "shape": list(values.shape[1:]) or [1],
               "names": names if values.ndim > 1 else None}
        for name, values in made.episodes[0].columns.items()
    } | {name: {"dtype": "int64", "shape": [1], "names": None}
         for name in ("frame_index", "episode_index", "index", "task_index")}  # fmt: skip
    for name in made.episodes[0].pictures:
        features[name] = {
            "dtype": "video", "shape": [kind.side, kind.side, 3], "names": ["height", "width", "channels"],
            "info": {"video.fps": kind.fps, "video.codec": "h264"},
        }  # fmt: skip
    info = {
        "codebase_version": kind.version, "robot_type": "arm", "fps": kind.fps, "total_episodes": len(lengths),
        "total_frames": sum(lengths), "total_tasks": len(tasks), "chunks_size": 1000,
        "splits": {"train": f"0:{len(lengths)}"}, "features": features,
    }  # fmt: skip
    numeric = {name: [one.columns[name] for one in made.episodes] for name in made.episodes[0].columns}
    figures = {name: statistics(np.concatenate(parts)) for name, parts in numeric.items()}
    made.statistics(figures)
    (folder / "meta/stats.json").write_text(json.dumps(figures))
    groups = [list(range(len(lengths)))] if new else [[number] for number in range(len(lengths))]
    for group in groups:
        stem = "file-000" if new else f"episode_{group[0]:06d}"
        path = folder / f"data/chunk-000/{stem}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(_columns(made, iter(group), tasks), path)
        for name in made.episodes[0].pictures:
            place = f"videos/{name}/chunk-000" if new else f"videos/chunk-000/{name}"
            pictures = np.concatenate([made.episodes[number].pictures[name] for number in group])
            write_video(folder / place / f"{stem}.mp4", pictures, fps=kind.fps, g="2", crf="23", preset="ultrafast")
    if new:
        _write_new_metadata(made, folder, tasks)
    else:
        write_lines(folder / "meta/tasks.jsonl", [{"task_index": at, "task": task} for at, task in enumerate(tasks)])
        write_lines(folder / "meta/episodes.jsonl", [
            {"episode_index": number, "tasks": [one.task], "length": len(one)}
            for number, one in enumerate(made.episodes)
        ])  # fmt: skip
    files = (
        ("data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
         "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4")
        if new else
        ("data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
         "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4")
    )  # fmt: skip
    info |= {"data_path": files[0], "video_path": files[1] if kind.cameras else None}
    (folder / "meta/info.json").write_text(json.dumps(info | made.info))
    return folder


def _write_new_metadata(made: RobotSet, folder: Path, tasks: list[str]) -> None:
    rows, start = [], 0
    for number, one in enumerate(made.episodes):
        row: dict[str, Any] = {
            "episode_index": number, "tasks": [one.task], "length": len(one), "data/chunk_index": 0,
            "data/file_index": 0, "dataset_from_index": start, "dataset_to_index": start + len(one),
        }  # fmt: skip
        for name in one.pictures:
            row |= {f"videos/{name}/chunk_index": 0, f"videos/{name}/file_index": 0,
                    f"videos/{name}/from_timestamp": start / made.kind.fps,
                    f"videos/{name}/to_timestamp": (start + len(one)) / made.kind.fps}  # fmt: skip
        rows.append(row)
        start += len(one)
    path = folder / "meta/episodes/chunk-000/file-000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    named = {"task_index": list(range(len(tasks))), "__index_level_0__": tasks}
    pq.write_table(pa.table(named), folder / "meta/tasks.parquet")


CLEAN: dict[str, Kind] = {
    "arm": Kind(),
    "older layout": Kind(1, version="v2.1", episodes=6),
    "degrees": Kind(2, scale=57.3, noise=0.02),
    "velocities": Kind(3, velocity=True),
    "slow camera": Kind(4, fps=10, length=60, lead=1),
    "one camera": Kind(5, cameras=1, joints=5, tasks=("fold the towel",)),
    "no camera": Kind(6, cameras=0, episodes=30),
    "rewards": Kind(7, rewards=True, cameras=0, episodes=20),
    "long": Kind(8, episodes=4, length=240, spread=40, cameras=1),
    "noisy": Kind(9, noise=3e-3),
    "many tasks": Kind(10, episodes=12, tasks=("pick the apple", "pick the pear", "stack both bowls")),
    "fast": Kind(11, fps=50, length=150, lead=4),
}
"""Clean sets, in which nothing should be found."""


class Defect(NamedTuple):
    """A defect: how a set is changed before it is written, or its folder afterwards, and what the set is like.

    `rules` are ids of which one has to be found."""

    rules: tuple[str, ...]
    change: Callable[[RobotSet], None] = lambda made: None
    after: Callable[[Path], None] = lambda folder: None
    kind: Kind = Kind()


def _edit(*columns: str, episode: int | None = 3) -> Callable[[Callable[..., Any]], Callable[[RobotSet], None]]:
    """Make a change of columns of one episode, or of all, from a function of an array and the set."""

    def made_of(change: Callable[..., Any]) -> Callable[[RobotSet], None]:
        def changed(made: RobotSet) -> None:
            for one in made.episodes if episode is None else [made.episodes[episode]]:
                for name in columns:
                    place = one.pictures if name in one.pictures else one.columns
                    place[name] = change(place[name].copy(), made)

        return changed

    return made_of


def _put(index: Any, value: Any) -> Callable[..., Any]:
    """Put a value, or what a function makes of the array, at an index."""

    def put(array: Any, made: RobotSet) -> Any:
        array[index] = value(array) if callable(value) else value
        return array

    return put


def _copied(
    made: RobotSet, number: int, source: int, start: int = 0, stop: int | None = None, noise: float = 0
) -> None:
    one = made.episodes[source]
    columns = {name: values[start:stop].copy() for name, values in one.columns.items()}
    columns[TIMESTAMP] = one.columns[TIMESTAMP][: len(columns[STATE])]
    for name in FEATURES:
        columns[name] += made.draw.normal(0, noise, columns[name].shape).astype(np.float32)
    made.episodes[number] = Episode(columns, {name: one.pictures[name][start:stop] for name in one.pictures}, one.task)


def _cut(made: RobotSet, number: int, start: int, stop: int) -> None:
    _copied(made, number, number, start, stop)


def _idle(made: RobotSet, start: slice, held: int) -> None:
    """Hold the pose at a step over some steps; pictures too."""
    one = made.episodes[2]
    for place in (one.columns, one.pictures):
        for name, values in place.items():
            if name != TIMESTAMP:
                values[start] = values[held]
    for name in FEATURES:
        shape = one.columns[name][start].shape
        one.columns[name][start] += made.draw.normal(0, made.kind.noise, shape).astype(np.float32)


def _reverse(made: RobotSet) -> None:
    for name in FEATURES:
        made.episodes[3].columns[name] = made.episodes[3].columns[name][::-1].copy()


def _swap_pictures(made: RobotSet) -> None:
    one, other = made.episodes[1], made.episodes[2]
    steps = min(len(one), len(other))
    _cut(made, 1, 0, steps)
    _cut(made, 2, 0, steps)
    made.episodes[1].pictures, made.episodes[2].pictures = made.episodes[2].pictures, made.episodes[1].pictures


def _swap_cameras(made: RobotSet) -> None:
    front, wrist = CAMERAS
    pictures = made.episodes[3].pictures
    pictures[front], pictures[wrist] = pictures[wrist], pictures[front]


def _same_cameras(made: RobotSet) -> None:
    for one in made.episodes:
        one.pictures[CAMERAS[1]] = one.pictures[CAMERAS[0]]


def _blurred(images: Any, made: RobotSet) -> Any:
    wide = images.astype(np.float32)
    for _ in range(6):
        for axis in (1, 2):
            wide = (np.roll(wide, 1, axis) + wide + np.roll(wide, -1, axis)) / 3
    return wide.astype(np.uint8)


def _repeat_names(made: RobotSet) -> None:
    for number, one in enumerate(made.episodes):
        one.task = "Put the red cube into the box." if number == 4 else "put the red cube into the box"


def edit_json(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change a JSON document in the folder of a set."""

    def edit(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        change(document)
        (folder / name).write_text(json.dumps(document))

    return edit


def _stats(change: Callable[[dict[str, Any]], None]) -> Callable[[RobotSet], None]:
    def set_it(made: RobotSet) -> None:
        made.statistics = change

    return set_it


def _wrong_moments(found: dict[str, Any]) -> None:
    one = found[STATE]
    one["mean"] = [value + 0.5 * std for value, std in zip(one["mean"], one["std"], strict=True)]
    one["std"] = [2 * std for std in one["std"]]


def _short_video(folder: Path) -> None:
    path = folder / f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4"
    from lerobot_files import decoded

    write_video(path, decoded(path)[:-3], fps=30, g="2")


def _orphan(folder: Path) -> None:
    path = folder / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 40), path.with_name("file-007.parquet"))


def _orphan_video(folder: Path) -> None:
    path = folder / f"videos/{CAMERAS[0]}/chunk-000/file-000.mp4"
    path.with_name("file-009.mp4").write_bytes(path.read_bytes())


def _shift_lag(array: Any, made: RobotSet, by: int = 12) -> Any:
    return np.concatenate((np.repeat(array[:1], by, 0), array[:-by]))


def _clip(array: Any, made: RobotSet) -> Any:
    return np.clip(array, -0.35, 0.35)


def _rewards(change: Callable[[Any], Any]) -> Callable[[RobotSet], None]:
    return _edit("next.reward", episode=None)(lambda array, made: np.asarray(change(array), np.float32))


def _jitter(array: Any, made: RobotSet) -> Any:
    return (array + made.draw.uniform(-0.004, 0.004, array.shape)).astype(np.float32)


def _noisy(array: Any, made: RobotSet) -> Any:
    return (array + made.draw.normal(0, 0.05, array.shape)).astype(np.float32)


def _drop_rows(made: RobotSet) -> None:
    """Lose thirty steps in the middle, of which the times say nothing."""
    one = made.episodes[3]
    for place in (one.columns, one.pictures):
        for name, values in place.items():
            place[name] = np.delete(values, np.s_[20:50], axis=0)
    one.columns[TIMESTAMP] = (np.arange(len(one)) / made.kind.fps).astype(np.float32)


def _split(made: RobotSet) -> None:
    _copied(made, 7, 1)
    made.info = {"splits": {"train": "0:6", "val": "6:8"}}


_REWARDED = Kind(7, rewards=True, cameras=0, episodes=20)
_FRONT, _WRIST = CAMERAS
_GRIPPER = -1
_STILL = Kind(6, cameras=0)

OPEN: dict[str, Defect] = {
    "frozen camera": Defect(("PIC001",), _edit(_FRONT)(_put(np.s_[25:65], lambda one: one[25]))),
    "black frames": Defect(("PIC002",), _edit(_FRONT)(_put(np.s_[30:45], 0))),
    "wrong statistics": Defect(("MET001",), _stats(_wrong_moments)),
    "stuck joint": Defect(("MOT002",), _edit(STATE)(_put(np.s_[:, 2], lambda one: one[0, 2]))),
    "NaN action": Defect(("TED007",), _edit(ACTION)(_put((40, 1), np.nan))),
    "action spike": Defect(("MOT001",), _edit(ACTION)(_put((40, 1), lambda one: one[40, 1] + 6))),
    "duplicate": Defect(("EPI001",), lambda made: _copied(made, 5, 1)),
    "near duplicate": Defect(("EPI002",), lambda made: _copied(made, 5, 1, noise=1e-5)),
    "time gap": Defect(("TIM001", "TED014"), _edit(TIMESTAMP)(_put(np.s_[50:], lambda one: one[50:] + 0.5))),
    "jitter": Defect(("TIM002",), _edit(TIMESTAMP)(_jitter)),
    "idle start": Defect(("MOT006",), lambda made: _idle(made, np.s_[:60], 60), kind=Kind(spread=2)),
    "short video": Defect(("TED014",), after=_short_video),
    "total frames": Defect(("MET002",), lambda made: made.info.update(total_frames=500)),
    "empty task": Defect(("MET003",), lambda made: setattr(made.episodes[4], "task", "")),
    "clipped actions": Defect(("MOT004",), _edit(ACTION, episode=None)(_clip)),
    "short episode": Defect(("EPI004",), lambda made: _cut(made, 4, 20, 23)),
    "alternating gripper": Defect(
        ("MOT005",), _edit(ACTION)(_put(np.s_[:, _GRIPPER], lambda one: np.arange(len(one)) % 2))
    ),
    "orphan file": Defect(("TED014", "MET004"), after=_orphan),
    "lagging actions": Defect(("MOT007",), _edit(ACTION)(_shift_lag)),
    "reversed states": Defect(("PIC009",), _reverse),
}
"""Twenty defects that are often met."""

MORE: dict[str, Defect] = {
    "constant episode": Defect(("EPI005",), _edit(*FEATURES)(_put(np.s_[:], lambda one: one[:1]))),
    "constant actions": Defect(("EPI005",), _edit(ACTION)(_put(np.s_[:], lambda one: one[:1]))),
    "white frames": Defect(("PIC002",), _edit(_WRIST)(_put(np.s_[10:20], 255))),
    "glitch": Defect(("PIC003",), _edit(_FRONT)(_put(40, lambda one: one[40, ::-1, ::-1] // 2 + 60))),
    "blur": Defect(("PIC004",), _edit(_FRONT)(_blurred)),
    "exposure": Defect(
        ("PIC005",), _edit(_FRONT)(_put(np.s_[50:], lambda one: np.clip(one[50:] * 1.5 + 30.0, 0, 255)))
    ),
    "same cameras": Defect(("PIC006",), _same_cameras),
    "swapped cameras": Defect(("PIC007",), _swap_cameras),
    "pictures of others": Defect(("PIC009",), _swap_pictures),
    "late pictures": Defect(("PIC008",), _edit(*CAMERAS)(lambda array, made: _shift_lag(array, made, 15))),
    "dark camera": Defect(("PIC002",), _edit(_WRIST)(_put(np.s_[:], 0))),
    "degrees": Defect(("MOT008",), _edit(STATE)(_put(np.s_[:, :6], lambda one: one[:, :6] * 57.29578))),
    "frozen state": Defect(("MOT003",), _edit(STATE)(_put(np.s_[30:55], lambda one: one[30]))),
    "idle end": Defect(("MOT006",), lambda made: _idle(made, np.s_[35:], 34)),
    "clipped once": Defect(("MOT004",), _edit(ACTION)(_clip)),
    "backward time": Defect(("TIM003", "TED014"), _edit(TIMESTAMP)(_put(np.s_[40:], lambda one: one[40:] - 0.2))),
    "equal times": Defect(("TIM003", "TED014"), _edit(TIMESTAMP)(_put(41, lambda one: one[40])), kind=_STILL),
    "late start": Defect(("TIM004", "TED014"), _edit(TIMESTAMP)(lambda array, made: array + np.float32(3.2))),
    "wrong rate": Defect(
        ("TIM005", "TED014"), _edit(TIMESTAMP, episode=None)(lambda array, made: array * 2), kind=_STILL
    ),
    "part of another": Defect(("EPI003",), lambda made: _copied(made, 5, 1, 10, 60)),
    "similar tasks": Defect(("MET003",), _repeat_names),
    "missing statistics": Defect(("MET001",), _stats(lambda found: found.pop(ACTION))),
    "statistics of NaN": Defect(("MET001",), _stats(lambda found: found[ACTION].update(std=[float("nan")] * 7))),
    "narrow statistics": Defect(
        ("MET001",), _stats(lambda found: found[STATE].update(max=[one / 2 for one in found[STATE]["max"]]))
    ),
    "total episodes": Defect(("MET002",), lambda made: made.info.update(total_episodes=9)),
    "noisy actions": Defect(("MOT009",), _edit(ACTION)(_noisy)),
    "copies across splits": Defect(("EPI001",), _split),
    "turned joint": Defect(("MOT010",), _edit(STATE)(_put(np.s_[:, 1], lambda one: -one[:, 1]))),
    "swapped joints": Defect(("MOT010",), _edit(STATE)(_put(np.s_[:, :2], lambda one: one[:, 1::-1]))),
    "lost rows": Defect(("MOT001", "MOT009"), _drop_rows),
    "other names": Defect(
        ("MET005",), after=edit_json("meta/info.json", lambda info: info["features"][STATE]["names"].pop())
    ),
    "orphan video": Defect(("MET004",), after=_orphan_video),
    "constant rewards": Defect(("REW001",), _rewards(lambda one: one * 0), kind=_REWARDED),
    "early rewards": Defect(
        ("REW002",), _rewards(lambda one: np.append(one[1:], one[-1:])), kind=replace(_REWARDED, noise=0.1)
    ),
    "early success": Defect(("REW002",), _rewards(lambda one: np.arange(len(one)) == len(one) - 2), kind=_REWARDED),
    "summed rewards": Defect(("REW003",), _rewards(np.cumsum), kind=_REWARDED),
    "time limits": Defect(("REW004",), kind=Kind(7, rewards=True, cameras=0, episodes=20, spread=0)),
}
"""More defects, of our own invention."""


def _repeat_rows(made: RobotSet) -> None:
    for name in FEATURES:
        made.episodes[3].columns[name][30:50] = made.episodes[3].columns[name][30]


def _pause(made: RobotSet) -> None:
    """Rest for fifty steps in the middle, while time goes on."""
    one = made.episodes[3]
    for name in FEATURES:
        values = one.columns[name]
        held = values[45] + made.draw.normal(0, made.kind.noise, (50, values.shape[1]))
        one.columns[name] = np.concatenate((values[:45], held, values[45:])).astype(np.float32)
    one.columns[TIMESTAMP] = (np.arange(len(one)) / made.kind.fps).astype(np.float32)


def _faster(made: RobotSet) -> None:
    one = made.episodes[3]
    _copied(made, 3, 3, 0, len(one) // 2)
    half = made.episodes[3]
    for name in FEATURES:
        half.columns[name] = one.columns[name][::2][: len(half)].copy()
    half.pictures = {name: one.pictures[name][::2][: len(half)] for name in one.pictures}


def _shuffled(made: RobotSet) -> None:
    one = made.episodes[3]
    order = made.draw.permutation(len(one))
    for name in FEATURES:
        one.columns[name] = one.columns[name][order]


def _global_times(made: RobotSet) -> None:
    start = 0.0
    for one in made.episodes:
        one.columns[TIMESTAMP] = (one.columns[TIMESTAMP] + start).astype(np.float32)
        start += len(one) / made.kind.fps


def _equal_actions(made: RobotSet) -> None:
    for one in made.episodes:
        one.columns[ACTION] = one.columns[STATE].copy()


def _noisy_pictures(images: Any, made: RobotSet) -> Any:
    return np.clip(images + made.draw.normal(0, 30, images.shape), 0, 255).astype(np.uint8)


RARE: dict[str, Defect] = {
    "swapped colours": Defect(("PIC010",), _edit(_FRONT)(lambda one, made: one[..., ::-1])),
    "grey episode": Defect(
        ("PIC010",), _edit(_FRONT)(lambda one, made: one * 0 + one.mean(-1, keepdims=True).astype(np.uint8))
    ),
    "mirrored camera": Defect(("PIC010", "PIC009"), _edit(_FRONT)(lambda one, made: one[:, :, ::-1])),
    "moved camera": Defect(("PIC010", "PIC009"), _edit(_FRONT)(lambda one, made: np.roll(one, (8, 12), (1, 2)))),
    "noisy pictures": Defect(("PIC010",), _edit(_FRONT)(_noisy_pictures)),
    "bright episode": Defect(
        ("PIC010",), _edit(_FRONT)(lambda one, made: np.clip(one + 60.0, 0, 255).astype(np.uint8))
    ),
    "slow camera": Defect(("PIC001",), _edit(_FRONT)(lambda one, made: np.repeat(one[::2], 2, axis=0)[: len(one)])),
    "dead camera": Defect(("PIC001",), _edit(_WRIST, episode=None)(_put(np.s_[:], lambda one: one[:1]))),
    "offset joint": Defect(("MOT010",), _edit(STATE)(_put(np.s_[:, 2], lambda one: one[:, 2] + 0.5))),
    "double speed": Defect(("MOT009", "EPI004"), _faster, kind=Kind(tasks=("push the block",))),
    "repeated rows": Defect(("MOT003", "MOT001"), _repeat_rows),
    "pause": Defect(("MOT011",), _pause, kind=_STILL),
    "backward pictures": Defect(
        ("PIC009",), _edit(*CAMERAS)(lambda one, made: one[::-1]), kind=Kind(tasks=("fold the towel",), scenes=True)
    ),
    "exchanged pictures": Defect(("PIC009",), _swap_pictures, kind=Kind(tasks=("fold the towel",), scenes=True)),
    "shuffled rows": Defect(("MOT001", "MOT009"), _shuffled),
    "half an episode": Defect(("EPI004",), lambda made: _cut(made, 4, 0, 40), kind=Kind(spread=3)),
    "changes as actions": Defect(
        ("MOT008", "MOT010"),
        lambda made: made.episodes[3].columns.update(
            {ACTION: np.diff(made.episodes[3].columns[ACTION], axis=0, append=made.episodes[3].columns[ACTION][-1:])}
        ),
    ),
    "lag of five": Defect(("MOT007",), _edit(ACTION)(lambda array, made: _shift_lag(array, made, 5))),
    "no task": Defect(("MET003",), lambda made: setattr(made.episodes[4], "task", "TODO")),
    "total videos": Defect(
        ("MET002",), lambda made: made.info.update(total_videos=7), kind=Kind(1, version="v2.1", episodes=6)
    ),
    "global times": Defect(("TIM004",), _global_times, kind=_STILL),
    "rounded states": Defect(("MOT002", "MOT009"), _edit(STATE)(lambda one, made: np.round(one * 4) / 4)),
    "actions are states": Defect(("MOT010",), _equal_actions),
    "NaN state": Defect(("TED007",), _edit(STATE)(_put((40, 1), np.nan))),
    "statistics of quantiles": Defect(
        ("MET001",), _stats(lambda found: found[ACTION].update(q01=found[ACTION]["q99"], q99=found[ACTION]["q01"]))
    ),
}
"""Defects that are rare, or hard to see."""

DEFECTS = OPEN | MORE | RARE


def write_defect(name: str, folder: Path) -> Path:
    """Write the set with a defect."""
    defect = DEFECTS[name]
    made = make(defect.kind)
    defect.change(made)
    write(made, folder)
    defect.after(folder)
    return folder


def _main(folder: Path) -> None:
    for name, kind in CLEAN.items():
        write(make(kind), folder / "clean" / name.replace(" ", "_"))
    for name in DEFECTS:
        write_defect(name, folder / "defects" / name.replace(" ", "_"))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
