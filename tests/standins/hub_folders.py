"""Lays files of robomimic and RoboSet out the way their repositories on the hub have them."""

from __future__ import annotations

import shutil
from pathlib import Path

from group_files import robomimic_demo, roboset_trial, write_demos, write_trials

__all__ = ["DOOR", "LIFT", "ROBOMIMIC_IDS", "ROBOSET_IDS", "lay_out_folders"]

DATA = Path(__file__).parents[1] / "data"
DOOR = "DAPG(expert)/door_v2d-v1"
LIFT = "lift/ph/low_dim"
ROBOSET_IDS = [DOOR, f"{DOOR}b", "FK1-v4(human)/human_demos_by_playdata"]
ROBOMIMIC_IDS = ["can/ph/low_dim_v141", "can/ph/low_dim_v15", "lift/ph/demo", LIFT]


def lay_out_folders(root: Path) -> Path:
    """Make both repositories; return `root`."""
    roboset = root / "jdvakil" / "RoboSet_Sim"
    shutil.copytree(DATA / "roboset" / DOOR, roboset / DOOR)
    write_trials(roboset / f"{DOOR}b" / "door_seed0.h5", {0: roboset_trial(4, seed=7, done=True)})
    for number in (60, 9):
        name = f"FK1_RelaxFixed_v2d-v4_{number}_trace.h5"
        write_trials(roboset / "FK1-v4(human)/human_demos_by_playdata" / name, {number: roboset_trial(5, seed=number)})
    (roboset / "README.md").write_text("MIT", encoding="utf-8")
    robomimic = root / "robomimic" / "robomimic_datasets"
    lift = robomimic / "v1.5/lift/ph"
    lift.mkdir(parents=True)
    shutil.copy(DATA / "robomimic" / "low_dim_v15.hdf5", lift / "low_dim_v15.hdf5")
    write_demos(lift / "demo_v15.hdf5", {0: robomimic_demo(4, obs=False, rewards=False)})
    for path in ("v1.5/can/ph/low_dim_v15.hdf5", "v1.4/can/ph/low_dim_v141.hdf5"):
        write_demos(robomimic / path, {0: robomimic_demo(6, seed=len(path)), 3: robomimic_demo(3, seed=3)})
    return root
