"""The folder that crash tests strike: sources of every kind that the jobs of `tests/crash/runner.py` read."""

import shutil
from pathlib import Path

from rlds_files import PLAIN, random_episode, record, write_dataset
from shard_files import random_dgrl, random_rows, write_dgrl, write_openx, write_run
from shard_files import random_openx as random_robot_episodes

import rbtool
from rbtool.core.testing.datasets import write_walks

DATA = Path(__file__).parents[1] / "data"
SOURCE = DATA / "minari" / "cartpole" / "scripted-v0"
TABLE = DATA / "d4rl" / "hopper_random-v2.hdf5"
VIDEOS, CAMERAS = DATA / "lerobot" / "v21", DATA / "lerobot" / "recent" / "two_cameras_language"
FORMS = ("ted", "flat", "nested", "h5")


def prepare(work: Path) -> None:
    """Lay out what the jobs read: small enough that a disk of a few megabytes holds it."""
    shutil.copytree(SOURCE, work / "source")
    shutil.copy(TABLE, work / "table.hdf5")
    shutil.copytree(VIDEOS, work / "videos")
    rbtool.convert(CAMERAS, work / "kept")
    write_run(work / "run", random_rows((9, 4), tail=3), (5, 11))
    write_dgrl(work / "archive.tar.xz", random_dgrl((9, 1, 4)))
    write_openx(work / "episodes", [random_robot_episodes((5, 2)), random_robot_episodes((4,))])
    records = [record(PLAIN, random_episode(length, seed=length)) for length in (9, 2, 14)]
    write_dataset(work / "shards", {"train": [records[:1], records[1:]]}, PLAIN)
    write_walks(work / "dataset", [(40, "terminated"), (1, "truncated"), (70, "open"), (9, "both")])
    write_walks(work / "older", [(5, "truncated")], seed=1)
    write_walks(work / "frozen", [(350, "terminated"), (250, "truncated")])
    for leaf in (work / "frozen").rglob("*.memmap"):
        leaf.chmod(0o444)
    for form in FORMS:
        rbtool.checkpoint.save(work / "dataset", work / f"saved-{form}", form=form)
