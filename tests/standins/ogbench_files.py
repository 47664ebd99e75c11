"""OGBench files written by plain NumPy, and a second reading of them that shares nothing with rbtool's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def random_columns(
    lengths: Sequence[int], *, seed: int = 0, unfinished: bool = False, visual: bool = False, flags: str = "float32"
) -> dict[str, Array]:
    """Make trajectories of these numbers of steps: each has a row more, the last one marked."""
    draw = np.random.default_rng(seed)
    rows = sum(lengths) + len(lengths)
    terminals = np.zeros(rows, flags)
    terminals[np.cumsum([length + 1 for length in lengths]) - 1] = 1
    if unfinished:
        terminals[-1] = 0
    observations = draw.integers(0, 256, (rows, 8, 8, 3), np.uint8) if visual else draw.normal(size=(rows, 3))
    return {
        "observations": observations if visual else observations.astype("float32"),
        "actions": draw.integers(0, 9, rows).astype("int32") if visual else draw.normal(size=(rows, 2)).astype("f4"),
        "terminals": terminals,
        "qpos": draw.normal(size=(rows, 4)).astype("float32"),
        "qvel": draw.normal(size=(rows, 4)).astype("float32"),
    }


def compact(columns: dict[str, Array]) -> dict[str, Array]:
    """The same trajectories as `ogbench.load_dataset(compact_dataset=True)` returns them."""
    last = columns["terminals"].astype("float32")
    terminals = [max(row, after) for row, after in zip(last, [*last[1:], 1], strict=True)]
    return columns | {"terminals": np.array(terminals, "f4"), "valids": 1 - last}


def write(path: Path, columns: dict[str, Any], *, packed: bool = True) -> Path:
    """Write columns as ogbench does, or uncompressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (np.savez_compressed if packed else np.savez)(path, **columns)
    return path


def plain_rows(columns: dict[str, Array], first: int = 0) -> list[dict[str, Any]]:
    """Read a file step by step, in the slowest and plainest way; `first` is the number of the first episode."""
    rows, episode, step = [], first, 0
    terminals = columns["terminals"].reshape(-1)
    for row in range(len(terminals)):
        if terminals[row]:
            if step:
                rows[-1]["last"] = rows[-1]["flagged"] = True
            episode, step = episode + 1, 0
            continue
        if row == len(terminals) - 1:  # the recording stops: this row is the last observation
            if step:
                rows[-1]["last"] = True
            continue
        rows.append(
            {
                "episode": episode, "step": step, "last": False, "flagged": False, "action": columns["actions"][row],
                "observation": columns["observations"][row], "next.observation": columns["observations"][row + 1],
                "info.qpos": columns["qpos"][row], "next.info.qpos": columns["qpos"][row + 1],
            }
        )  # fmt: skip
        step += 1
    return rows
