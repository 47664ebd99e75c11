"""Files of imitation, d3rlpy, Stable-Baselines3 and DAPG written plainly, and read again without rbtool."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Episode:
    """Steps of an episode as they happened: `observations` has a row more than there are steps."""

    observations: Array
    actions: Array
    rewards: Array
    terminated: bool
    truncated: bool

    def __len__(self) -> int:
        return len(self.rewards)


def random_episodes(lengths: Sequence[int], ends: Sequence[str] | None = None, seed: int = 0) -> list[Episode]:
    """Make episodes that end `terminated`, `truncated`, or without a flag (`none`)."""
    draw = np.random.default_rng(seed)
    kinds = ends or [("terminated", "truncated")[number % 2] for number in range(len(lengths))]
    return [
        Episode(
            draw.normal(size=(length + 1, 3)).astype("float32"),
            draw.normal(size=(length, 2)).astype("float32"),
            draw.normal(size=length).astype("float32"),
            kind == "terminated",
            kind == "truncated",
        )
        for length, kind in zip(lengths, kinds, strict=True)
    ]


def write_imitation(path: Path, episodes: Sequence[Episode], infos: Sequence[Any] | None = None, **extra: Any) -> Path:
    """Write imitation's npz; `terminal` is set where an episode has a flag."""
    lengths = [len(one) for one in episodes]
    steps = sum(lengths)
    arrays: dict[str, Any] = {
        "obs": np.concatenate([one.observations for one in episodes]),
        "acts": np.concatenate([one.actions for one in episodes]),
        "infos": np.array(list(infos) if infos is not None else [{}] * steps, dtype=object),
        "terminal": np.array([one.terminated or one.truncated for one in episodes]),
        "indices": np.cumsum(lengths)[:-1],
        "rews": np.concatenate([one.rewards for one in episodes]),
    }
    arrays |= extra
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def imitation_table(episodes: Sequence[Episode], *, limits: bool = False) -> pa.Table:
    """Lay episodes out as imitation's Hugging Face datasets: a trajectory a row."""

    def infos(one: Episode) -> list[str]:
        last = {"TimeLimit.truncated": one.truncated} if limits else {}
        return ["{}"] * (len(one) - 1) + [json.dumps(last)] if len(one) else []

    return pa.table(
        {
            "obs": pa.array([one.observations.tolist() for one in episodes], pa.list_(pa.list_(pa.float32()))),
            "acts": pa.array([one.actions.tolist() for one in episodes], pa.list_(pa.list_(pa.float32()))),
            "infos": pa.array([infos(one) for one in episodes], pa.list_(pa.string())),
            "terminal": pa.array([one.terminated or one.truncated for one in episodes]),
            "rews": pa.array([one.rewards.tolist() for one in episodes], pa.list_(pa.float32())),
        }
    )


def write_dataset_folder(folder: Path, table: pa.Table, parts: int = 2) -> Path:
    """Write a table as `save_to_disk` of the datasets library does."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{parts:05d}.arrow" for number in range(parts)]
    size = -(-table.num_rows // parts)
    for number, name in enumerate(names):
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table.slice(number * size, size))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_parquet_folder(folder: Path, table: pa.Table) -> Path:
    """Write a table as the Hugging Face hub keeps it."""
    (folder / "data").mkdir(parents=True)
    pq.write_table(table, folder / "data" / "train-00000-of-00001.parquet", row_group_size=2)
    return folder


def write_d3rlpy(path: Path, episodes: Sequence[Episode], *, version: str = "2.1", **extra: Any) -> Path:
    """Write d3rlpy's file: an array for each column of each episode."""
    with h5py.File(path, "w") as file:
        file["columns"] = ["observations", "actions", "rewards", "terminated"]
        file["num_episodes"], file["version"] = len(episodes), version
        for number, one in enumerate(episodes):
            file[f"observations_{number}"] = one.observations[:-1]
            file[f"actions_{number}"] = one.actions
            file[f"rewards_{number}"] = one.rewards.reshape(-1, 1)
            file[f"terminated_{number}"] = one.terminated
        for name, value in extra.items():
            if name in file:
                del file[name]
            if value is not None:
                file[name] = value
    return path


def write_dapg(path: Path, episodes: Sequence[Episode], protocol: int = 3, **extra: Any) -> Path:
    """Write DAPG's pickle."""
    paths = [
        {
            "observations": one.observations[:-1], "actions": one.actions, "rewards": one.rewards,
            "init_state_dict": {"qpos": one.observations[0]}, **extra,
        }
        for one in episodes
    ]  # fmt: skip
    path.write_bytes(pickle.dumps(paths, protocol))
    return path


def write_flagged_paths(path: Path, episodes: Sequence[Episode]) -> Path:
    """Write the pickle of paths with next observations and the flags of every step."""
    paths = []
    for one in episodes:
        flags = np.zeros((2, len(one)), bool)
        flags[:, -1:] = [[one.terminated], [one.truncated]]
        paths.append(
            {
                "observations": one.observations[:-1], "next_observations": one.observations[1:],
                "actions": one.actions, "rewards": one.rewards, "terminals": flags[0], "timeouts": flags[1],
            }
        )  # fmt: skip
    path.write_bytes(pickle.dumps(paths))
    return path


def ring(episodes: Sequence[Sequence[Episode]], size: int, *, memory: bool = False) -> dict[str, Array]:
    """Fill a buffer of Stable-Baselines3 with the episodes of each environment, as many steps as all of them have."""
    steps = min(sum(map(len, one)) for one in episodes)
    count = len(episodes)
    first = episodes[0][0]
    arrays = {
        "observations": np.zeros((size, count, *first.observations.shape[1:]), "float32"),
        "next_observations": np.zeros((size, count, *first.observations.shape[1:]), "float32"),
        "actions": np.zeros((size, count, *first.actions.shape[1:]), "float32"),
        "rewards": np.zeros((size, count), "float32"),
        "dones": np.zeros((size, count), "float32"),
        "timeouts": np.zeros((size, count), "float32"),
    }
    position = 0
    rows = [[(one, step) for one in stream for step in range(len(one))] for stream in episodes]
    for at in range(steps):
        for environment in range(count):
            one, step = rows[environment][at]
            last = step == len(one) - 1
            arrays["observations"][position, environment] = one.observations[step]
            after = arrays["observations"] if memory else arrays["next_observations"]
            after[(position + 1) % size if memory else position, environment] = one.observations[step + 1]
            arrays["actions"][position, environment] = one.actions[step]
            arrays["rewards"][position, environment] = one.rewards[step]
            arrays["dones"][position, environment] = last and (one.terminated or one.truncated)
            arrays["timeouts"][position, environment] = last and one.truncated
        position = (position + 1) % size
    if memory:
        del arrays["next_observations"]
    return arrays | {"pos": np.array(position), "full": np.array(steps >= size)}
