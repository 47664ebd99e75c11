"""Files of every format with changed bytes: reading one gives its rows or one of our errors, in bounded time.

A file is changed as it is on the disk; what archives, compressed files and records hold is also changed and packed
again, with checksums that fit. In `make test-all` each reader gets 10,000 mutations or more; of those of HDF5 files of
robomimic and RoboSet, `test_h5_heap_mutations` has some.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import random
import shutil
import tarfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import shard_files
from damage import Change, mutated, read_whole, strike
from demonstration_files import imitation_table, random_episodes, write_parquet_folder
from lerobot_files import dataset_in_lance, end_lance, random_takes, write_dataset
from rlds_files import METADATA, RICH, random_episode, record, shard_of
from rlds_files import write_dataset as write_rlds_dataset
from table_files import WRITERS, column_map, flat, named, tables
from table_files import random_episodes as random_tabular_episodes

from rbtool.converters.aloha.reader import AlohaReader
from rbtool.converters.atari.reader import AtariReader
from rbtool.converters.calvin.reader import CalvinReader
from rbtool.converters.d3rlpy.reader import D3rlpyReader
from rbtool.converters.d4rl.reader import D4rlReader
from rbtool.converters.dapg.reader import DapgReader
from rbtool.converters.gen_dgrl.reader import GenDgrlReader
from rbtool.converters.imitation.reader import ImitationReader
from rbtool.converters.lance.reader import LanceReader
from rbtool.converters.lerobot.reader import LerobotReader
from rbtool.converters.logs.reader import LogReader
from rbtool.converters.ogbench.reader import OgbenchReader
from rbtool.converters.openml.reader import ArffFile
from rbtool.converters.openx.reader import OpenXReader
from rbtool.converters.rlds.reader import RldsReader
from rbtool.converters.rllib.reader import RllibReader
from rbtool.converters.robomimic.reader import RobomimicReader
from rbtool.converters.roboset.reader import RobosetReader
from rbtool.converters.sb3.reader import Sb3Reader
from rbtool.converters.table.reader import TableReader, overview
from rbtool.converters.tianshou.reader import TianshouReader
from rbtool.converters.vd4rl.reader import Vd4rlReader
from rbtool.converters.zarr_store.reader import ZarrReader
from rbtool.core.errors import RbtoolError
from rbtool.core.format.files import understood

DATA = Path(__file__).parents[1] / "data"
BATCHES = 5
TRUST = {"trust_pickle": True}


class Case(NamedTuple):
    """A reader and what it reads, of which files are changed.

    `write` puts the dataset into a folder, `few` and `many` are the mutations in `make test` and in `make test-all`,
    `names` are patterns of the files that are changed, and `share` of the mutations, or more, have to be refused.
    """

    kind: Any
    write: Callable[[Path], Path]
    few: int
    many: int
    names: tuple[str, ...] = ()
    options: Mapping[str, Any] = MappingProxyType({})
    change: Change = mutated
    read: Callable[[Any, Path, Mapping[str, Any]], None] = read_whole
    share: float = 0.0

    def strike(self, folder: Path, total: int, batch: int) -> None:
        """Read the dataset as it is, then the mutations, which are others in each batch."""
        path = self.write(folder)
        read = partial(self.read, self.kind, path, self.options)
        read()
        files = [file for name in self.names for file in sorted(path.glob(name))] or [path]
        refused = sum(strike(file, read, -(-total // len(files)), self.change, f"batch {batch}") for file in files)
        assert refused >= self.share * total


def data(name: str) -> Callable[[Path], Path]:
    """Write a copy of a file or folder of the tests' data."""

    def write(folder: Path) -> Path:
        source, copy = DATA / name, folder / Path(name).name
        return Path(shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy))

    return write


# HDF5: files of episodes, which are also read one by one


def read_episodes(kind: Any, path: Path, options: Mapping[str, Any]) -> None:
    horizon = {"horizon": 50} if kind is D4rlReader and b"timeouts" not in path.read_bytes() else {}
    if kind.recognises(path):
        with kind(path, options=horizon) as reader:
            for number in reader.stated().episode_numbers:
                with contextlib.suppress(RbtoolError):
                    assert sum(map(len, reader.pieces([number]))) == reader.episode_table([number]).steps
    read_whole(kind, path, horizon)


GROUPS: dict[str, tuple[Any, int]] = {
    **{f"d4rl/{name}.hdf5": (D4rlReader, 2_000) for name in (
        "hopper_random-v2", "hopper_random_v0", "door_demos", "antmaze_like_goal", "kitchen_like_no_timeouts")},
    "robomimic/low_dim_v15.hdf5": (RobomimicReader, 1_700), "robomimic/isaac_stack_cube.hdf5": (RobomimicReader, 1_700),
    "aloha/mobile_aloha/episode_0.hdf5": (AlohaReader, 4_000),
    "aloha/sim_transfer_cube/episode_0.hdf5": (AlohaReader, 3_000),
    "aloha/robotwin2/data/episode0.hdf5": (AlohaReader, 3_000),
    "roboset/DAPG(expert)/door_v2d-v1/door_v2d-v1_seed1.h5": (RobosetReader, 3_400),
}  # fmt: skip
CASES = {name: Case(kind, data(name), 40, many, read=read_episodes) for name, (kind, many) in GROUPS.items()}


# Single files, and robot logs

JOINTS = "observation.state=/joint_states.position observation.image=/camera"
FILES: list[tuple[Any, str, dict[str, Any], int, int]] = [
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
CASES |= {name: Case(kind, data(name), few, many, options=options) for kind, name, options, few, many in FILES}


# Folders of which some files are changed


def openx(folder: Path) -> Path:
    shards = [shard_files.random_openx((3, 2)), shard_files.random_openx((2,), kind="JPEG")]
    return shard_files.write_openx(folder / "robots", shards)


def gen_dgrl(folder: Path, suffix: str = ".tar") -> Path:
    return shard_files.write_dgrl(folder / "dgrl" / f"bigfish{suffix}", shard_files.random_dgrl((3, 2, 4))).parent


def gen_dgrl_folder(folder: Path) -> Path:
    return shard_files.write_dgrl_folder(folder / "unpacked", shard_files.random_dgrl((3, 2, 4)))


def atari(folder: Path) -> Path:
    return shard_files.write_run(folder / "Pong" / "1", shard_files.random_rows((5, 7, 4), tail=3), [8])


def atari_rings(folder: Path) -> Path:
    return shard_files.write_rings(folder / "Pong" / "1", shard_files.random_rows((9, 4, 17), tail=14, blanks=3), 10)


def calvin(folder: Path) -> Path:
    spans = [(10, 12, "push", "a"), (11, 14, "pull", "b")]
    return shard_files.write_calvin(folder / "training", [(10, 14), (20, 22)], spans)


def ogbench(folder: Path, *, packed: bool) -> Path:
    folder = folder / "ogbench"
    folder.mkdir()
    if packed:
        for path in (DATA / "ogbench").glob("*.npz"):
            shutil.copy(path, folder)
        return folder
    with np.load(DATA / "ogbench" / "hoppermaze-medium-navigate-v0.npz") as file:
        np.savez(folder / "a-v0.npz", **file)
    return folder


def vd4rl(folder: Path, kind: str) -> Path:
    episodes = shard_files.random_vd4rl((5, 9, 4), terminal=(False, True, False))
    if kind == "shards":
        rows = shard_files.rows_of_shards(episodes)
        return shard_files.write_vd4rl_shards(folder / "d", rows, (4, 14), compression="gzip", chunks=True)
    return shard_files.write_vd4rl(folder / "d", episodes, packed=kind == "packed")


def rlds(folder: Path) -> Path:
    records = [record(RICH, random_episode(length, RICH, seed=length), METADATA) for length in (5, 1, 7)]
    return write_rlds_dataset(folder / "1.0.0", {"train": [records[:2], records[2:]]}, RICH, METADATA)


def trajectories_in_rows(folder: Path) -> Path:
    return write_parquet_folder(folder / "d", imitation_table(random_episodes((5, 4, 6))))


def images_in_columns(folder: Path) -> Path:
    return write_dataset(folder / "made", random_takes((3, 2)), images="image")


def in_archive(content: bytes, chance: random.Random) -> bytes:
    """Change a file in an archive, which stays sound."""
    held = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(content)) as source, tarfile.open(fileobj=held, mode="w") as target:
        members = source.getmembers()
        struck = chance.randrange(len(members))
        for number, member in enumerate(members):
            inner = source.extractfile(member).read()  # type: ignore[union-attr]
            shard_files.add_member(target, member.name, mutated(inner, chance) if number == struck else inner)
    return held.getvalue()


def in_gzip(content: bytes, chance: random.Random) -> bytes:
    """Change the unpacked content of a file, and make its checksum match."""
    return gzip.compress(mutated(gzip.decompress(content), chance), 1)


def in_record(_: bytes, chance: random.Random) -> bytes:
    """Make a shard of one changed record with a matching checksum, so that all of it is parsed."""
    return shard_of([mutated(record(RICH, random_episode(7, RICH, seed=7), METADATA), chance)])


def read_compiled(kind: Any, path: Path, options: Mapping[str, Any]) -> None:
    with mock.patch("rbtool.converters.rlds.reader.COMPILED_BYTES", 0):
        read_whole(kind, path, options)


SHARDS = ("robots_*.tar",)
ARRAYS = tuple(
    f"replay_logs/{shard_files.atari_name(name, 0)}"
    for name in (*shard_files.ATARI_NAMES, "add_count", "invalid_range")
)
FRAMES = ("episode_0000010.npz", "episode_0000012.npz", "ep_start_end_ids.npy", "ep_lens.npy")
CAMERA = "observation.images.top"
V21 = (
    "meta/info.json", "meta/episodes.jsonl", "meta/tasks.jsonl", "data/chunk-000/episode_000001.parquet",
    f"videos/chunk-000/{CAMERA}/episode_000001.mp4",
)  # fmt: skip
V30 = (
    "meta/episodes/chunk-000/file-000.parquet", "meta/tasks.parquet", "data/chunk-000/file-000.parquet",
    f"videos/{CAMERA}/chunk-000/file-001.mp4",
)  # fmt: skip
PUSHT = ("data/img/.zarray", "data/img/0.0.0.0", "meta/episode_ends/.zarray", "meta/episode_ends/0")
FORMAT_3 = ("data/img/zarr.json", "data/img/c/1/0/0/0", "meta/episode_ends/c/0")
TAR, XZ = ("bigfish.tar",), ("bigfish.tar.xz",)
CASES |= {
    "openx": Case(OpenXReader, openx, 12, 4_000, SHARDS, TRUST, share=0.2),
    "openx pickles": Case(OpenXReader, openx, 12, 6_000, SHARDS, TRUST, in_archive, share=0.2),
    "gen_dgrl": Case(GenDgrlReader, gen_dgrl, 12, 2_500, TAR, TRUST, share=0.2),
    "gen_dgrl xz": Case(GenDgrlReader, partial(gen_dgrl, suffix=".tar.xz"), 12, 2_000, XZ, TRUST, share=0.2),
    "gen_dgrl pickles": Case(GenDgrlReader, gen_dgrl, 12, 4_500, TAR, TRUST, in_archive, share=0.2),
    "gen_dgrl folder": Case(GenDgrlReader, gen_dgrl_folder, 12, 1_000, (shard_files.name_of(0, 3),), TRUST, share=0.2),
    "calvin": Case(CalvinReader, calvin, 12, 6_000, FRAMES, TRUST, share=0.2),
    "calvin annotations": Case(CalvinReader, calvin, 12, 4_000, ("*/auto_lang_ann.npy",), TRUST, share=0.2),
    "atari": Case(AtariReader, atari, 12, 2_000, ARRAYS, share=0.2),
    "atari rings": Case(AtariReader, atari_rings, 12, 2_000, ARRAYS, share=0.2),
    "atari arrays": Case(AtariReader, atari, 12, 6_000, ARRAYS, change=in_gzip, share=0.2),
    "ogbench": Case(OgbenchReader, partial(ogbench, packed=True), 50, 5_000, ("*.npz",), share=0.2),
    "ogbench stored": Case(OgbenchReader, partial(ogbench, packed=False), 50, 5_000, ("*.npz",), share=0.2),
    **{f"vd4rl {kind}": Case(Vd4rlReader, partial(vd4rl, kind=kind), 50, 3_400, ("*",), share=0.2)
       for kind in ("packed", "stored", "shards")},
    "rlds shards": Case(RldsReader, rlds, 40, 2_000, ("*.tfrecord-*",), share=0.2),
    "rlds records": Case(RldsReader, rlds, 40, 2_000, ("*.tfrecord-00001-*",), change=in_record, share=0.2),
    "rlds compiled": Case(
        RldsReader, rlds, 40, 2_000, ("*.tfrecord-00001-*",), change=in_record, read=read_compiled, share=0.2),
    "rlds features": Case(RldsReader, rlds, 40, 2_000, ("features.json",), share=0.2),
    "rlds info": Case(RldsReader, rlds, 40, 2_000, ("dataset_info.json",), share=0.2),
    "imitation rows": Case(ImitationReader, trajectories_in_rows, 40, 5_000, ("data/*",)),
    "lerobot images": Case(LerobotReader, images_in_columns, 20, 1_000, ("data/chunk-000/episode_000000.parquet",)),
    "lerobot v2.1": Case(LerobotReader, data("lerobot/v21"), 40, 5_000, V21),
    "lerobot v3.0": Case(LerobotReader, data("lerobot/v30"), 32, 4_000, V30),
    "zarr 2": Case(ZarrReader, data("zarr/pusht_like.zarr"), 48, 4_000, PUSHT),
    "zarr 3": Case(ZarrReader, data("zarr/dp_format3.zarr"), 36, 3_000, FORMAT_3),
}  # fmt: skip


# Tables


def write_table(folder: Path, kind: str) -> Path:
    steps = (5, 1, 7, 4)
    columns = named(flat(random_tabular_episodes(steps)), traj=np.repeat(np.arange(4), steps))
    return WRITERS[kind](folder / "a", columns)


def write_arff(folder: Path) -> Path:
    (folder / "a.arff").write_bytes(tables()["adult"].arff())
    return folder / "a.arff"


def read_table(kind: Any, path: Path, options: Mapping[str, Any]) -> None:
    with understood(path):
        overview(path)
    with TableReader(path, options=options) as reader:
        facts = reader.facts()
        steps = sum(map(len, reader.pieces()))
        assert steps == facts.steps == reader.episode_table().steps


def read_arff(kind: Any, path: Path, options: Mapping[str, Any]) -> None:
    with understood(path):
        for block in ArffFile(path).blocks():
            assert block


CASES |= {
    f"table {kind}": Case(
        TableReader, partial(write_table, kind=kind), 40, 1_700, ("obs.npy",) if kind == "npy" else (),
        {"map": column_map(kind), "ends": "dead,late", "episode_key": "traj"}, read=read_table,
    )
    for kind in WRITERS
} | {"arff": Case(ArffFile, write_arff, 40, 1_700, read=read_arff)}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_few_mutations(name: str, tmp_path: Path) -> None:
    CASES[name].strike(tmp_path, CASES[name].few, 0)


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(1, BATCHES + 1))
@pytest.mark.parametrize("name", CASES)
def test_many_mutations(name: str, batch: int, tmp_path: Path) -> None:
    CASES[name].strike(tmp_path, CASES[name].many // BATCHES, batch)


def tables_in_lance(folder: Path) -> Path:
    plain = write_dataset(folder / "plain", random_takes((3, 2, 4)), version="v3.0")
    made = dataset_in_lance(plain, folder / "made", meta="table")
    end_lance()
    return made


@pytest.mark.parametrize("batch", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, 6))])
def test_mutations_of_lance_tables(batch: int, tmp_path: Path) -> None:
    """A process is started for each: every day there are two of each file, and 60 in every slow batch."""
    if find_spec("lance") is None:
        pytest.skip("pylance is not installed")
    files = ("**/*.manifest", "*/data/*.lance")
    Case(LanceReader, tables_in_lance, 0, 0, files).strike(tmp_path, 480 if batch else 16, batch)
