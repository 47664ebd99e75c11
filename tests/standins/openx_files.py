"""Shards of Open X-Embodiment written by plain tarfile, pickle and Pillow, and read back by them."""

from __future__ import annotations

import io
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from archive_files import add
from PIL import Image

from rbtool.core.open_steps import open_steps

Array = np.ndarray[Any, Any]
SIDE = 6


def encoded(pixels: Array, kind: str = "PNG") -> bytes:
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, kind)
    return held.getvalue()


def decoded(data: bytes) -> Array:
    with Image.open(io.BytesIO(data)) as image:
        return np.array(image)


def random_episode(
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


def random_episodes(lengths: Sequence[int], **options: Any) -> list[dict[str, Any]]:
    """Make episodes of these numbers of steps; every second one is not terminal."""
    return [random_episode(length, seed=at, terminal=at % 2 == 0, **options) for at, length in enumerate(lengths)]


def write_shard(path: Path, episodes: Sequence[Any], *, first: int = 0, protocol: int = 4) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for at, episode in enumerate(episodes):
            data = episode if isinstance(episode, bytes) else pickle.dumps(episode, protocol)
            add(archive, f"{path.parent.name}_{first + at:05}.data.pickle", data)
    return path


def write_shards(folder: Path, shards: Sequence[Sequence[Any]]) -> Path:
    """Write shards of these episodes, `FOLDER_00000.tar` and so on; return the folder."""
    first = 0
    for number, episodes in enumerate(shards):
        write_shard(folder / f"{folder.name}_{number:05}.tar", episodes, first=first)
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
