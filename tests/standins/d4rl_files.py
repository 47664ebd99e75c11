"""D4RL files written by plain h5py, and a second reading of them that shares nothing with rbtool's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Episode:
    """Steps of an episode as they happened: `observations` has a row more than there are steps."""

    observations: Array
    actions: Array
    rewards: Array
    terminated: bool
    timed_out: bool

    def __len__(self) -> int:
        return len(self.rewards)


def random_episodes(
    lengths: Sequence[int],
    *,
    seed: int = 0,
    width: int = 3,
    actions: int = 2,
    dtype: str = "float32",
    ends: Sequence[str] | None = None,
) -> list[Episode]:
    """Make episodes whose ends are `terminal`, `timeout`, `both` or `none` (allowed for the last)."""
    draw = np.random.default_rng(seed)
    kinds = ends or [("terminal", "timeout")[number % 2] for number in range(len(lengths))]
    return [
        Episode(
            draw.normal(size=(length + 1, width)).astype(dtype),
            draw.normal(size=(length, actions)).astype(dtype),
            draw.normal(size=length).astype(dtype),
            kind in ("terminal", "both"),
            kind in ("timeout", "both"),
        )
        for length, kind in zip(lengths, kinds, strict=True)
    ]


def flat(episodes: Sequence[Episode], *, timeouts: bool = True, following: bool = False) -> dict[str, Array]:
    """Lay episodes out as D4RL does: one row a step, and no row for the observation after the last one."""
    columns = {
        "observations": np.concatenate([episode.observations[:-1] for episode in episodes]),
        "actions": np.concatenate([episode.actions for episode in episodes]),
        "rewards": np.concatenate([episode.rewards for episode in episodes]),
        "terminals": np.concatenate([_at_end(len(episode), episode.terminated) for episode in episodes]),
    }
    if timeouts:
        columns["timeouts"] = np.concatenate([_at_end(len(episode), episode.timed_out) for episode in episodes])
    if following:
        columns["next_observations"] = np.concatenate([episode.observations[1:] for episode in episodes])
    return columns


def _at_end(length: int, value: bool) -> Array:
    flags = np.zeros(length, bool)
    flags[-1] = value
    return flags


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    """Write columns by their path in the file; `options` are those of h5py for arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            array = np.ndim(values) > 0 and not isinstance(values, str | bytes)
            file.create_dataset(name, data=values, **(options if array else {}))
    return path


def plain_rows(columns: dict[str, Array], ends: Sequence[int]) -> list[dict[str, Any]]:
    """Read a file step by step, in the slowest and plainest way: `ends` are the rows that end an episode.

    `next` is None where the file has no observation after a step.
    """
    rows, episode, begin = [], 0, 0
    for row in range(len(columns["rewards"])):
        last = row in ends or row == len(columns["rewards"]) - 1
        following = columns["observations"][row + 1] if not last else None
        if "next_observations" in columns:
            following = columns["next_observations"][row]
        rows.append(
            {
                "episode": episode, "step": row - begin, "last": last, "next": following,
                "observation": columns["observations"][row], "action": columns["actions"][row],
                "reward": columns["rewards"][row], "terminated": bool(columns["terminals"][row]),
                "timeout": bool(columns["timeouts"][row]) if "timeouts" in columns else None,
            }
        )  # fmt: skip
        if last:
            episode, begin = episode + 1, row + 1
    return rows


def after_final_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What `--final-step auto` keeps of plain rows: unfinished last steps end one step earlier, or repeat."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if row["next"] is not None:
            kept.append(dict(row))
        elif row["terminated"]:
            kept.append({**row, "next": row["observation"]})
        elif kept and kept[-1]["episode"] == row["episode"]:
            kept[-1] = {**kept[-1], "last": True, "cut": True}
    return kept
