"""Files of many libraries, and robot logs, with changed bytes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from damage import strike, strike_in_folder
from demonstration_files import imitation_table, random_episodes, write_parquet_folder
from lerobot_files import dataset_in_lance, end_lance, random_takes, write_dataset

from rbtool.converters.d3rlpy.reader import D3rlpyReader
from rbtool.converters.dapg.reader import DapgReader
from rbtool.converters.imitation.reader import ImitationReader
from rbtool.converters.lance.reader import LanceReader
from rbtool.converters.lerobot.reader import LerobotReader
from rbtool.converters.logs.reader import LogReader
from rbtool.converters.rllib.reader import RllibReader
from rbtool.converters.sb3.reader import Sb3Reader
from rbtool.converters.tianshou.reader import TianshouReader
from rbtool.converters.zarr_store.reader import ZarrReader
from rbtool.core.format.converter import Reader

DATA = Path(__file__).parents[1] / "data"
TRUST = {"trust_pickle": True}
JOINTS = "observation.state=/joint_states.position observation.image=/camera"
FILES: list[tuple[type[Reader], str, dict[str, Any], int, int]] = [
    (RllibReader, "rllib/cartpole_small.json", {}, 40, 5_000),
    (RllibReader, "rllib/cartpole-v1.jsonl", {}, 40, 5_000),
    (RllibReader, "rllib/cartpole-v1_large/1_000000_000000.parquet", {}, 40, 5_000),
    (RllibReader, "rllib/pendulum_expert_sac_3eps.zip", TRUST, 10, 1_250),
    (ImitationReader, "imitation/cartpole_expert_4.npz", TRUST, 15, 5_000),
    (D3rlpyReader, "d3rlpy/vector.h5", {}, 40, 5_000),
    (D3rlpyReader, "d3rlpy/tuple.h5", {}, 40, 5_000),
    (Sb3Reader, "sb3/partial.npz", {}, 40, 5_000),
    (Sb3Reader, "sb3/memory.npz", {}, 40, 5_000),
    (TianshouReader, "tianshou/vector_dict_obs.hdf5", {}, 40, 4_900),
    (TianshouReader, "tianshou/replay_wrapped.hdf5", {}, 40, 4_900),
    (TianshouReader, "tianshou/objects.hdf5", TRUST, 10, 200),
    (ZarrReader, "zarr/umi_one_arm.zarr.zip", {}, 40, 4_000),
    (DapgReader, "dapg/door-v0_demos_3.pickle", TRUST, 15, 10_000),
    (LogReader, "logs/ros2_markers.mcap", {
        "map": f"{JOINTS}/color/image_raw/compressed action=/leader/command.data reward=/task/reward", "fps": 50.0,
        "episodes_by": "topic:/episode/marker", "clock": "header",
    }, 15, 2_000),
    (LogReader, "logs/json_unicode.mcap", {
        "map": "observation=/机械臂/状态.q action=/commande/été.u", "fps": 9.0
    }, 15, 2_000),
    (LogReader, "logs/proto_unchunked.mcap", {"map": "observation=state.q action=command.u", "fps": 10.0}, 15, 2_000),
    (LogReader, "logs/ros1_sim_clock.bag", {"map": f"{JOINTS}/image_raw action=/cmd_vel", "fps": 30.0}, 15, 2_000),
    (LogReader, "logs/rosbag2_sqlite/rosbag2_sqlite.db3", {
        "map": f"{JOINTS}/image_raw action=/arm/goal.position", "fps": 30.0
    }, 15, 2_000),
]  # fmt: skip
"""A reader, a file, its options, and how many mutations: in `make test`, and in `make test-all`, 10,000 a reader."""
IDS = [name for _, name, *_ in FILES]


@pytest.mark.parametrize(("kind", "name", "options", "few", "many"), FILES, ids=IDS)
def test_a_few_mutations(
    kind: type[Reader], name: str, options: dict[str, Any], few: int, many: int, tmp_path: Path
) -> None:
    strike(kind, DATA / name, tmp_path, few, options)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "options", "few", "many"), FILES, ids=IDS)
def test_many_mutations(
    kind: type[Reader], name: str, options: dict[str, Any], few: int, many: int, tmp_path: Path
) -> None:
    strike(kind, DATA / name, tmp_path, many, options)


@pytest.mark.parametrize("count", [40, pytest.param(5_000, marks=pytest.mark.slow)])
def test_mutations_of_a_trajectory_a_row(count: int, tmp_path: Path) -> None:
    folder = write_parquet_folder(tmp_path / "d", imitation_table(random_episodes((5, 4, 6))))
    (source,) = (folder / "data").iterdir()
    strike(ImitationReader, source, tmp_path, count, {})


STORES = {
    "pusht_like.zarr": ["data/img/.zarray", "data/img/0.0.0.0", "meta/episode_ends/.zarray", "meta/episode_ends/0"],
    "dp_format3.zarr": ["data/img/zarr.json", "data/img/c/1/0/0/0", "meta/episode_ends/c/0"],
}
"""Stores, and which of their files are changed."""


@pytest.mark.parametrize("count", [12, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", STORES)
def test_mutations_of_one_file_of_a_store(name: str, count: int, tmp_path: Path) -> None:
    strike_in_folder(ZarrReader, DATA / "zarr" / name, STORES[name], tmp_path, count)


# Datasets of LeRobot in which one file has changed bytes: rows, metadata, and videos.

CAMERA = "observation.images.top"
LEROBOT = {
    "v21": [
        "meta/info.json", "meta/episodes.jsonl", "meta/tasks.jsonl", "data/chunk-000/episode_000001.parquet",
        f"videos/chunk-000/{CAMERA}/episode_000001.mp4",
    ],
    "v30": [
        "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet", "data/chunk-000/file-000.parquet",
        f"videos/{CAMERA}/chunk-000/file-001.mp4",
    ],
}  # fmt: skip
"""Datasets, and which of their files are changed."""


@pytest.mark.parametrize("count", [8, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LEROBOT)
def test_mutations_of_one_file_of_lerobot(name: str, count: int, tmp_path: Path) -> None:
    strike_in_folder(LerobotReader, DATA / "lerobot" / name, LEROBOT[name], tmp_path, count)


@pytest.mark.parametrize("count", [20, pytest.param(1_000, marks=pytest.mark.slow)])
def test_mutations_of_lerobot_s_images_in_columns(count: int, tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "made", random_takes((3, 2)), images="image")
    strike_in_folder(LerobotReader, folder, ["data/chunk-000/episode_000000.parquet"], tmp_path, count)


@pytest.mark.parametrize("batch", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 6))])
def test_mutations_of_lance_tables(batch: int, tmp_path: Path) -> None:
    """Of each file 60 in every slow batch: a process is started for each."""
    if find_spec("lance") is None:
        pytest.skip("pylance is not installed")
    plain = write_dataset(tmp_path / "plain", random_takes((3, 2, 4)), version="v3.0")
    folder = dataset_in_lance(plain, tmp_path / "made", meta="table")
    end_lance()
    tables = (*folder.rglob("*.manifest"), *folder.glob("*/data/*.lance"))
    files = sorted(path.relative_to(folder).as_posix() for path in tables)
    strike_in_folder(LanceReader, folder, files, tmp_path, 60 if batch else 2, batch=batch)
