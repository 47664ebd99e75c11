"""V-D4RL folders written by plain NumPy and h5py, and a second reading of them that shares nothing with rbtool's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

Array = np.ndarray[Any, Any]


def random_episodes(
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


def write_files(folder: Path, episodes: Sequence[dict[str, Array]], *, packed: bool = True) -> Path:
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


def write_shards(
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


def plain_rows(episodes: Sequence[dict[str, Array]]) -> list[dict[str, Any]]:
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
