"""What a verb publishes is on the disk before: every file and folder of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from unsynced import unsynced

import rbtool
from rbtool.core.format.staging import Staging
from rbtool.core.testing.datasets import write_walks

TABLE = Path(__file__).parents[2] / "data" / "d4rl" / "hopper_random-v2.hdf5"
Job = Callable[[Path, Path], object]

JOBS: dict[str, Job] = {
    "convert": lambda data, dest: rbtool.convert(TABLE, dest),
    "convert with workers": lambda data, dest: rbtool.convert(TABLE, dest, num_workers=2),
    "convert to packed": lambda data, dest: rbtool.convert(TABLE, dest, layout="packed"),
    "repack": lambda data, dest: rbtool.convert(data, dest, layout="packed", compress=["observation=zstd"]),
    "preprocess": lambda data, dest: rbtool.preprocess(data, dest=dest, operations={"normalize": ["observation"]}),
    "split": lambda data, dest: rbtool.split(data, dest, train=0.5, val=0.5),
    "save": lambda data, dest: rbtool.checkpoint.save(data, dest, form="flat"),
    "save to one file": lambda data, dest: rbtool.checkpoint.save(data, dest.with_suffix(".h5"), form="h5"),
}


@pytest.mark.parametrize("job", JOBS)
def test_all_of_it_is_on_the_disk_before_it_is_published(
    job: str, tmp_path: Path, synced_states: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_walks(tmp_path / "data", [(40, "terminated"), (30, "open"), (9, "truncated"), (5, "both")])
    left: list[list[str]] = []
    publish = Staging._place_folder, Staging._place_file

    def looking(place: Callable[[Staging, Path], bool]) -> Callable[[Staging, Path], bool]:
        def placed(staging: Staging, built: Path) -> bool:
            left.append(unsynced(built, synced_states))
            return place(staging, built)

        return placed

    monkeypatch.setattr(Staging, "_place_folder", looking(publish[0]))
    monkeypatch.setattr(Staging, "_place_file", looking(publish[1]))
    JOBS[job](tmp_path / "data", tmp_path / "made")
    assert left == [[]]
