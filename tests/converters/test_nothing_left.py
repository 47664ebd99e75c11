"""A source of which no step is left is refused alike in every format without an observation after the last step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from demonstration_files import random_episodes as demonstrations
from demonstration_files import (
    robomimic_demo,
    roboset_trial,
    rows_of_episode,
    write_d3rlpy,
    write_dapg,
    write_demos,
    write_lines,
    write_tianshou,
    write_trials,
)
from shard_files import random_rows, write_checkpoint
from table_files import column_map, flat, named, random_episodes, write_d4rl, write_h5

import rbtool
from rbtool.core.errors import FormatError

Written = tuple[Path, dict[str, Any]]


def d4rl(folder: Path) -> Written:
    return write_d4rl(folder / "a.hdf5", flat(random_episodes((1, 1), ends=("timeout", "none")))), {}


def robomimic(folder: Path) -> Written:
    demos = {number: robomimic_demo(1, next_obs=False, success=False) for number in range(2)}
    return write_demos(folder / "a.hdf5", demos), {}


def roboset(folder: Path) -> Written:
    return write_trials(folder / "a.h5", {0: roboset_trial(1), 1: roboset_trial(1)}), {}


def d3rlpy(folder: Path) -> Written:
    return write_d3rlpy(folder / "a.h5", demonstrations((1, 1), ends=("truncated", "truncated"))), {}


def tianshou(folder: Path) -> Written:
    streams = [demonstrations((1,), ends=("truncated",)) for _ in range(2)]
    return write_tianshou(folder / "a.hdf5", streams, 4, following=False), {}


def dapg(folder: Path) -> Written:
    return write_dapg(folder / "a.pickle", demonstrations((1, 1), ends=("truncated", "truncated"))), {
        "trust_pickle": True
    }


def rllib(folder: Path) -> Written:
    rows = [row for number in (1, 2) for row in rows_of_episode(number, 1, following=False, flags="", end="none")]
    return write_lines(folder / "a.json", rows), {}


def atari(folder: Path) -> Written:
    for number in range(2):
        write_checkpoint(folder / "a", number, random_rows((), tail=1), 5 * number + 1)
    return folder / "a", {}


def table(folder: Path) -> Written:
    file = write_h5(folder / "a.hdf5", named(flat(random_episodes((1, 1), ends=("timeout", "none")))))
    return file, {"format": "table", "map": column_map("hdf5"), "ends": "dead,late"}


def zarr_store(folder: Path) -> Written:
    root = zarr.open_group(folder / "a.zarr", mode="w")
    for name in ("data/x", "data/reward", "meta/episode_ends"):
        root.create_array(name, data=np.array([1, 2]))
    return folder / "a.zarr", {}


@pytest.mark.parametrize("made", [d4rl, robomimic, roboset, d3rlpy, tianshou, dapg, rllib, atari, table, zarr_store])
def test_no_step_left_is_an_error(made: Callable[[Path], Written], tmp_path: Path) -> None:
    path, options = made(tmp_path)
    with pytest.raises(FormatError, match="no step is left") as caught:
        rbtool.convert(path, tmp_path / "out", **options)
    assert "--final-step repeat" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
    assert rbtool.convert(path, tmp_path / "out", final_step="repeat", **options).steps == 2
