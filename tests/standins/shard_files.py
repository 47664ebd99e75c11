"""Files of DQN Replay, Gen-DGRL, Open X, V-D4RL and CALVIN, written by plain libraries, and read without rbtool."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from rbtool.core.open_steps import open_steps


def add_member(archive: tarfile.TarFile, name: str, data: bytes, **header: Any) -> None:
    """Append a file; `header` are attributes of its entry, such as `type`."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in header.items():
        setattr(member, key, value)
    archive.addfile(member, io.BytesIO(data))


Array = np.ndarray[Any, Any]
ATARI_NAMES = ("observation", "action", "reward", "terminal")
ATARI_FRAME = (6, 5)


@dataclass(frozen=True)
class Rows:
    """Rows of a run in the order of time, by column."""

    observation: Array
    action: Array
    reward: Array
    terminal: Array

    def __len__(self) -> int:
        return len(self.reward)

    def part(self, start: int, stop: int) -> Rows:
        return Rows(*(getattr(self, name)[start:stop] for name in ATARI_NAMES))


def random_rows(lengths: Sequence[int], *, seed: int = 0, tail: int = 0, blanks: int = 0) -> Rows:
    """Make terminated episodes of these lengths and an unfinished one of `tail`, each after so many blank rows."""
    draw = np.random.default_rng(seed)
    parts: dict[str, list[Array]] = {name: [] for name in ATARI_NAMES}
    for length, ends in [*((length, True) for length in lengths), *([(tail, False)] if tail else [])]:
        empty = np.zeros((blanks, *ATARI_FRAME), np.uint8)
        parts["observation"] += [empty, draw.integers(1, 256, (length, *ATARI_FRAME), np.uint8)]
        parts["action"] += [np.zeros(blanks, np.int32), draw.integers(0, 18, length).astype(np.int32)]
        parts["reward"] += [np.zeros(blanks, np.float32), draw.integers(-1, 2, length).astype(np.float32)]
        last = (np.arange(length) == length - 1) & ends
        parts["terminal"] += [np.zeros(blanks, np.uint8), last.astype(np.uint8)]
    return Rows(*(np.concatenate(parts[name]) for name in ATARI_NAMES))


def save_gzip(path: Path, array: Any) -> None:
    """Write an array as the published files are."""
    held = io.BytesIO()
    np.save(held, np.asarray(array))
    path.write_bytes(gzip.compress(held.getvalue(), mtime=0))


def load_gzip(path: Path) -> Array:
    """Read an array whole."""
    return np.asarray(np.load(io.BytesIO(gzip.decompress(path.read_bytes())), allow_pickle=False))


def atari_name(name: str, number: int) -> str:
    return f"$store$_{name}_ckpt.{number}.gz" if name in ATARI_NAMES else f"{name}_ckpt.{number}.gz"


def write_checkpoint(
    folder: Path, number: int, rows: Rows, add_count: int | None, invalid: Iterable[int] | None = ()
) -> None:
    """Write the files of a checkpoint whose slots have these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ATARI_NAMES:
        save_gzip(folder / atari_name(name, number), getattr(rows, name))
    if add_count is not None:
        save_gzip(folder / atari_name("add_count", number), np.array(add_count))
    if invalid is not None:
        save_gzip(folder / atari_name("invalid_range", number), np.array(list(invalid), np.int64))


def write_run(folder: Path, rows: Rows, stops: Sequence[int], *, first: int = 0) -> Path:
    """Write the rows in checkpoints that end before these rows, and at the end; `add_count` counts from `first`."""
    logs = folder / "replay_logs"
    for number, (start, stop) in enumerate(zip([0, *stops], [*stops, len(rows)], strict=True)):
        write_checkpoint(logs, number, rows.part(start, stop), first + stop)
    return folder


def write_rings(folder: Path, rows: Rows, capacity: int, *, numbers: Sequence[int] | None = None) -> Path:
    """Write the rows as Dopamine logs its ring: one row before it is full, the oldest one in the last slot."""
    logs = folder / "replay_logs"
    for number in range((len(rows) + 1) // capacity) if numbers is None else numbers:
        count = (number + 1) * capacity - 1
        newest = rows.part(count - capacity + 1, count)
        oldest = rows.part(count - capacity, count - capacity + 1) if number else random_rows((1,), seed=99)
        ring = Rows(*(np.concatenate((getattr(newest, name), getattr(oldest, name))) for name in ATARI_NAMES))
        invalid = [(capacity - 2 + place) % capacity for place in range(5)]
        write_checkpoint(logs, number, ring, count, invalid)
    return folder


def steps_of(rows: Rows, cuts: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Read rows step by step, as `--final-step auto` does: a cut is before each of `cuts`, and after the last row."""
    found: list[dict[str, Any]] = []
    episode, pending = 0, 0
    for at in range(len(rows)):
        ends, cut = bool(rows.terminal[at]), at + 1 in cuts or at + 1 == len(rows)
        if ends or not cut:
            found.append(
                {
                    "observation": rows.observation[at], "action": rows.action[at], "next.reward": rows.reward[at],
                    "next.observation": rows.observation[at if ends else at + 1], "next.terminated": ends,
                    "next.truncated": False, "episode": episode,
                }
            )  # fmt: skip
            pending += 1
        elif pending:
            found[-1]["next.truncated"] = True
        if ends or cut:
            episode, pending = episode + 1, 0
    return found


PIXELS = (3, 4, 4)


def random_dgrl(
    lengths: Sequence[int], *, seed: int = 0, wide: bool = False, done: bool = True
) -> list[dict[str, Array]]:
    """Make episodes of these numbers of steps; `wide` gives actions and rewards a dimension of one."""
    draw = np.random.default_rng(seed)
    tail = (1,) if wide else ()
    return [
        {
            "observations": draw.integers(0, 256, (length + 1, *PIXELS), np.uint8),
            "actions": draw.integers(0, 15, (length, *tail)),
            "rewards": draw.normal(size=(length, *tail)).astype("f4"),
            "dones": ((np.arange(length) == length - 1) & done).astype("f4"),
        }
        for length in lengths
    ]


def name_of(number: int, length: int, total: float = 0.0) -> str:
    return f"bigfish/20230329T{number:06d}_{number}_{length}_{number + 7}_{total:.1f}.npy"


def npy_of(content: Any) -> bytes:
    """A `.npy` file of one Python object."""
    held = io.BytesIO()
    np.save(held, np.array(content, object), allow_pickle=True)
    return held.getvalue()


def add_episode(archive: tarfile.TarFile, number: int, observations: Array, actions: Array, rewards: Array) -> None:
    dones = (np.arange(len(rewards)) == len(rewards) - 1).astype("f4")
    found = {"observations": observations, "actions": actions, "rewards": rewards, "dones": dones}
    add_member(archive, name_of(number, len(rewards)), npy_of(found))


def write_dgrl(path: Path, episodes: Sequence[Any], *, form: int = tarfile.GNU_FORMAT) -> Path:
    """Write a file for each episode; the archive is compressed unless its name ends in `.tar`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w" if path.suffix == ".tar" else "w:xz", format=form) as archive:
        for number, episode in enumerate(episodes):
            length = len(episode["rewards"]) if isinstance(episode, dict) and "rewards" in episode else 0
            add_member(archive, name_of(number, length), npy_of(episode))
    return path


def write_dgrl_folder(path: Path, episodes: Sequence[Any]) -> Path:
    """Write the files of an unpacked archive."""
    archive = write_dgrl(path.with_suffix(".tar"), episodes)
    with tarfile.open(archive) as opened:
        opened.extractall(path, filter="data")
    archive.unlink()
    return path


SIDE = 6


def encoded(pixels: Array, kind: str = "PNG") -> bytes:
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, kind)
    return held.getvalue()


def decoded(data: bytes) -> Array:
    with Image.open(io.BytesIO(data)) as image:
        return np.array(image)


def random_openx_episode(
    length: int, *, seed: int = 0, kind: str = "PNG", side: int = SIDE, terminal: bool = True, filler: bool = False
) -> dict[str, Any]:
    """Make an episode as the hub has them; the last step is a `filler` without an action, or a step as the others."""
    draw = np.random.default_rng(seed)

    def step(number: int) -> dict[str, Any]:
        last = number == length - 1
        empty = filler and last
        return {
            "observation": {
                "image": {"bytes": encoded(draw.integers(0, 256, (side, side, 3), np.uint8), kind), "path": None},
                "state": draw.normal(size=3).astype("f4").tolist(),
            },
            "action": {
                "world_vector": [0.0, 0.0] if empty else draw.normal(size=2).astype("f4").tolist(),
                "gripper": np.float32(0.0 if empty else draw.normal()),
            },
            "reward": np.float32(0.0 if empty else draw.normal()),
            "discount": np.float32(1.0),
            "is_first": number == 0,
            "is_last": last,
            "is_terminal": last and terminal,
            "language_instruction": f"move {seed}é",
            "language_embedding": draw.normal(size=4).astype("f4").tolist(),
        }

    return {"steps": [step(number) for number in range(length)], "episode_metadata": {"file_path": f"ep{seed}"}}


def random_openx(lengths: Sequence[int], **options: Any) -> list[dict[str, Any]]:
    """Make episodes of these numbers of steps; every second one is not terminal."""
    return [random_openx_episode(length, seed=at, terminal=at % 2 == 0, **options) for at, length in enumerate(lengths)]


def write_openx_shard(path: Path, episodes: Sequence[Any], *, first: int = 0, protocol: int = 4) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for at, episode in enumerate(episodes):
            data = episode if isinstance(episode, bytes) else pickle.dumps(episode, protocol)
            add_member(archive, f"{path.parent.name}_{first + at:05}.data.pickle", data)
    return path


def write_openx(folder: Path, shards: Sequence[Sequence[Any]]) -> Path:
    """Write shards of these episodes, `FOLDER_00000.tar` and so on; return the folder."""
    first = 0
    for number, episodes in enumerate(shards):
        write_openx_shard(folder / f"{folder.name}_{number:05}.tar", episodes, first=first)
        first += len(episodes)
    return folder


def read_plainly(folder: Path) -> list[dict[str, Any]]:
    """Unpickle all episodes of a folder without the reader."""
    found = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            found += [pickle.loads(archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]
    return found


def rows_of(episode: dict[str, Any], last: str) -> dict[str, Array]:
    """The TED rows of one episode, of which nothing is left out; `last` is `observation` or `step`."""
    steps = episode["steps"]
    count = len(steps) - (last == "observation")

    def column(*path: str, of: Sequence[Any]) -> Array:
        found = []
        for one in of:
            for part in path:
                one = one[part]
            found.append(decoded(one["bytes"]) if isinstance(one, dict) else one)
        return np.array(found)

    def states(*path: str) -> tuple[Array, Array]:
        rows = column(*path, of=steps)
        return rows[:count], rows[1:] if last == "observation" else np.concatenate((rows[1:], rows[-1:]))

    found = {
        "action.world_vector": column("action", "world_vector", of=steps[:count]).astype("f4"),
        "action.gripper": column("action", "gripper", of=steps[:count]),
        "next.reward": column("reward", of=steps[:count]).reshape(-1, 1),
        "next.discount": column("discount", of=steps[:count]),
    }
    for path in (("observation", "image"), ("observation", "state"), ("language_embedding",)):
        before, after = states(*path)
        single = "f4" if before.dtype == np.float64 else before.dtype
        found[".".join(path)], found[".".join(("next", *path))] = before.astype(single), after.astype(single)
    ends = np.zeros((3, count, 1), bool)
    ends[0, 0] = True
    ends[1, -1], ends[2, -1] = steps[-1]["is_terminal"], steps[-1]["is_last"] and not steps[-1]["is_terminal"]
    found["is_init"], found["next.terminated"], found["next.truncated"] = ends
    found["next.done"] = ends[1] | ends[2]
    return found


def assert_equal_rows(path: Path, episodes: Sequence[dict[str, Any]], last: str) -> None:
    """Compare every value with a plain reading of the pickles."""
    expected = [rows_of(one, last) for one in episodes]
    with open_steps(path) as reader:
        columns = {field.name: reader.read(field.key, 0, reader.manifest.steps) for field in reader.fields}
        text = reader.episode_text
    for name in expected[0]:
        rows = np.concatenate([one[name] for one in expected])
        assert (columns[name].dtype, columns[name].shape) == (rows.dtype, rows.shape), name
        assert columns[name].tobytes() == rows.tobytes(), name
    lengths = columns["language_instruction_length"].tolist()
    found = [rows[:n].tobytes().decode() for rows, n in zip(columns["language_instruction"], lengths, strict=True)]
    counts = [len(one["next.reward"]) for one in expected]
    said = [one["steps"][0]["language_instruction"] for one in episodes]
    assert found == [one for one, count in zip(said, counts, strict=True) for _ in range(count)]
    assert columns["episode"].tolist() == [at for at, count in enumerate(counts) for _ in range(count)]
    assert [one["file_path"] for one in text or ()] == [one["episode_metadata"]["file_path"] for one in episodes]


def random_vd4rl(
    lengths: Sequence[int], *, seed: int = 0, terminal: Sequence[bool] = (), channel_first: bool = False
) -> list[dict[str, Array]]:
    """Make episodes of these numbers of steps, as rows of what led to them: the first row has no action."""
    draw = np.random.default_rng(seed)
    shape = (3, 6, 5) if channel_first else (6, 5, 3)
    found = []
    for number, length in enumerate(lengths):
        rows = length + 1
        ends = bool(terminal[number]) if terminal else False
        action, reward = draw.normal(size=(rows, 2)).astype("f4"), draw.normal(size=rows).astype("f4")
        action[0], reward[0] = 0, 0
        discount = np.ones(rows, "f4")
        discount[-1] = not ends
        found.append(
            {
                "image": draw.integers(0, 256, (rows, *shape), np.uint8), "action": action, "reward": reward,
                "discount": discount, "is_first": np.arange(rows) == 0, "is_last": np.arange(rows) == rows - 1,
                "is_terminal": (np.arange(rows) == rows - 1) & ends, "height": draw.normal(size=rows).astype("f4"),
                "orientations": draw.normal(size=(rows, 4)).astype("f4"),
            }
        )  # fmt: skip
    return found


def write_vd4rl(folder: Path, episodes: Sequence[dict[str, Array]], *, packed: bool = True) -> Path:
    """Write an npz file for each episode, in the order of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, arrays in enumerate(episodes):
        name = f"20220101T{number:06d}-{'ab' * 16}-{len(arrays['reward'])}.npz"
        (np.savez_compressed if packed else np.savez)(folder / name, **arrays)
    return folder


def rows_of_shards(episodes: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """The rows of all episodes under the names of the shards: no state but pixels, and a step type."""
    kinds = []
    for arrays in episodes:
        kind = np.ones(len(arrays["reward"]), np.int64)
        kind[-1] = 2
        kind[0] = 0
        kinds.append(kind)
    names = {"observation": "image", "action": "action", "reward": "reward", "discount": "discount"}
    found = {name: np.concatenate([arrays[old] for arrays in episodes]) for name, old in names.items()}
    return {**found, "step_type": np.concatenate(kinds)}


def write_vd4rl_shards(
    folder: Path, rows: dict[str, Array], cuts: Sequence[int] = (), *, name: str = "{}.hdf5", **options: Any
) -> Path:
    """Write rows in shards that are cut before these rows, without regard to the ends of episodes."""
    folder.mkdir(parents=True, exist_ok=True)
    stops = [*cuts, len(rows["reward"])]
    for number, (start, stop) in enumerate(zip([0, *cuts], stops, strict=True)):
        with h5py.File(folder / name.format(number), "w") as file:
            for key, values in rows.items():
                part = values[start:stop]
                file.create_dataset(key, data=part, **(options if part.size else {}))
    return folder


def plain_vd4rl(episodes: Sequence[dict[str, Array]]) -> list[dict[str, Any]]:
    """Read episodes step by step, in the slowest and plainest way."""
    rows = []
    for number, arrays in enumerate(episodes):
        for step in range(len(arrays["reward"]) - 1):
            last = step == len(arrays["reward"]) - 2
            row = {
                "episode": number, "is_init": step == 0, "last": last, "pixels": arrays["image"][step],
                "next.pixels": arrays["image"][step + 1], "action": arrays["action"][step + 1],
                "next.reward": arrays["reward"][step + 1], "next.discount": arrays["discount"][step + 1],
                "terminated": last and arrays["discount"][step + 1] == 0,
            }  # fmt: skip
            for name in ("height", "orientations"):
                if name in arrays:
                    row |= {f"state.{name}": arrays[name][step], f"next.state.{name}": arrays[name][step + 1]}
            rows.append(row)
    return rows


TRUST: dict[str, Any] = {"trust_pickle": True}


def calvin_frame(number: int, **more: Any) -> dict[str, Array]:
    """Make the arrays of a frame from its number."""
    draw = np.random.default_rng(number)
    found = {
        "rgb_static": draw.integers(0, 256, (4, 5, 3), dtype="uint8"),
        "rgb_gripper": draw.integers(0, 256, (3, 3, 3), dtype="uint8"),
        "depth_static": draw.random((4, 5), dtype="float32"), "robot_obs": draw.normal(size=15),
        "scene_obs": draw.normal(size=24), "actions": draw.normal(size=7), "rel_actions": draw.normal(size=7),
    }  # fmt: skip
    return {name: value for name, value in (found | more).items() if value is not None}


def write_calvin(
    folder: Path, recordings: Sequence[tuple[int, int]], annotations: Sequence[tuple[int, int, str, str]] | None = None,
    *, names: str = "episode_{:07d}.npz", language: str = "lang_annotations", **more: Any,
) -> Path:  # fmt: skip
    """Write a split of CALVIN with a frame beyond each recording; `more` are arrays of all frames, None for none."""
    folder.mkdir(parents=True)
    for first, last in recordings:
        for number in range(first, last + 2):
            np.savez_compressed(folder / names.format(number), **calvin_frame(number, **more))
    np.save(folder / "ep_start_end_ids.npy", np.array(recordings).reshape(-1, 2))
    np.save(folder / "ep_lens.npy", np.array([last - first + 1 for first, last in recordings]))
    if annotations is not None:
        content = {
            "language": {
                "ann": [text for *_, text, _ in annotations], "task": [task for *_, task in annotations],
                "emb": np.zeros((len(annotations), 1, 4), "float32"),
            },
            "info": {"episodes": [], "indx": [(first, last) for first, last, *_ in annotations]},
        }  # fmt: skip
        (folder / language).mkdir()
        np.save(folder / language / "auto_lang_ann.npy", content, allow_pickle=True)  # type: ignore[arg-type]
    return folder
