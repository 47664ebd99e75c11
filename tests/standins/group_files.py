"""HDF5 files with a group for each episode, written by plain h5py, and a plain reading of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Demo:
    """An episode: `columns` by their path in the group, `attributes` of the group."""

    columns: Mapping[str, Array]
    attributes: Mapping[str, Any] = field(default_factory=dict)


def robomimic_demo(
    steps: int, *, seed: int = 0, next_obs: bool = True, rewards: bool = True, success: bool = True, obs: bool = True
) -> Demo:
    """Make a demonstration of random numbers; its last step has `dones`, and a reward of 1 with `success`."""
    draw = np.random.default_rng(seed)
    hand, cubes = draw.normal(size=(steps + 1, 3)), draw.normal(size=(steps + 1, 2, 2)).astype("f4")
    columns: dict[str, Array] = {"actions": draw.normal(size=(steps, 2)), "states": draw.normal(size=(steps, 5))}
    if obs:
        columns |= {"obs/hand": hand[:-1], "obs/scene/cubes": cubes[:-1]}
        columns |= {"next_obs/hand": hand[1:], "next_obs/scene/cubes": cubes[1:]} if next_obs else {}
    if rewards:
        columns["rewards"], columns["dones"] = np.zeros(steps), np.zeros(steps, "i8")
        columns["rewards"][steps - 1 :], columns["dones"][steps - 1 :] = float(success), 1
    return Demo(columns, {"num_samples": steps})


def roboset_trial(steps: int, *, seed: int = 0, done: bool = False) -> Demo:
    """Make a trial of random numbers; its last step has `done`, if asked for."""
    draw = np.random.default_rng(seed)
    columns: dict[str, Array] = {
        "observations": draw.normal(size=(steps, 4)), "actions": draw.normal(size=(steps, 2)),
        "rewards": draw.normal(size=steps), "done": np.zeros(steps, bool),
        "env_infos/time": np.arange(steps, dtype="f8"), "env_infos/obs_dict/qp": draw.normal(size=(steps, 3)),
    }  # fmt: skip
    columns["done"][steps - 1 :] = done
    return Demo(columns)


def write_groups(
    path: Path, groups: Mapping[str, Demo], *, attributes: Mapping[str, Mapping[str, Any]] | None = None,
    more: Mapping[str, Any] | None = None, **options: Any,
) -> Path:  # fmt: skip
    """Write groups by their path; `attributes` by the path of a group, `more` are further datasets."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, demo in groups.items():
            group = file.create_group(name)
            for column, values in demo.columns.items():
                group.create_dataset(column, data=values, **(options if np.size(values) else {}))
            group.attrs.update(demo.attributes)
        for name, values in (attributes or {}).items():
            file.require_group(name).attrs.update(values)
        for name, value in (more or {}).items():
            file[name] = value
    return path


def write_demos(path: Path, demos: Mapping[int, Demo], *, masks: Mapping[str, Sequence[str]] | None = None) -> Path:
    """Write demonstrations by their numbers, as robomimic does, with splits."""
    attributes = {"data": {"total": sum(len(demo.columns.get("actions", ())) for demo in demos.values())}}
    more = {f"mask/{key}": np.array(names, "S") for key, names in (masks or {}).items()}
    return write_groups(
        path, {f"data/demo_{number}": demo for number, demo in demos.items()}, attributes=attributes, more=more
    )


def write_trials(path: Path, trials: Mapping[int, Demo]) -> Path:
    """Write trials by their numbers, as RoboHive does."""
    return write_groups(path, {f"Trial{number}": trial for number, trial in trials.items()})


def leaves(group: Any, prefix: str = "") -> dict[str, Array]:
    """Read all arrays below a group of an open file, by their paths."""
    found: dict[str, Array] = {}
    for name in group:
        item = group[name]
        if isinstance(item, h5py.Group):
            found |= leaves(item, f"{prefix}{name}/")
        else:
            found[prefix + name] = item[()]
    return found


def plain_episodes(path: Path, inside: str, prefix: str) -> dict[int, dict[str, Array]]:
    """Read all episodes by number, in numeric order."""
    with h5py.File(path) as file:
        found = {int(name.removeprefix(prefix)): leaves(file[inside][name]) for name in file[inside]}
    return dict(sorted(found.items()))


def after_final_step(columns: Mapping[str, Array], *, terminated: bool, choice: str = "auto") -> dict[str, Array]:
    """Rows of an episode without a last observation, once it is decided about its last step; `next:` follows."""
    repeat = choice == "repeat" or (choice == "auto" and terminated)
    rows = len(columns["actions"]) - (not repeat)
    kept = {name: values[:rows] for name, values in columns.items()}
    following = {
        f"next:{name}": np.concatenate((values[1:], values[-1:])) if repeat else values[1:]
        for name, values in columns.items()
    }
    return kept | following
