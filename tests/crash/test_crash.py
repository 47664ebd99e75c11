"""Every verb that writes, struck at its n-th change of the file system: by SIGKILL, and by a disk that fills up."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rbtool
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan, write_walks

FORMS = ("ted", "flat", "nested", "h5")
JOBS = ("convert", "convert-archive", "convert-blocks", "convert-checkpoints", "convert-episodes", "convert-shards",
        "convert-videos",
        "download", "preprocess", "preprocess-fewer", "preprocess-shared", "preprocess-videos", "merge", "split", "mix",
        *(f"{verb}-{form}" for verb in ("save", "load") for form in FORMS),
        *(f"dump-{form}" for form in FORMS[1:]))  # fmt: skip
# Every day a writer of each kind is killed; the others write through one of these. A full disk is met by fewer: what
# they do about it is the same code.
EVERY_DAY = {
    "convert", "convert-blocks", "download", "preprocess-fewer", "preprocess-videos", "merge", "split", "mix",
    "save-h5", "dump-nested",
}  # fmt: skip
# Of two operations between which no file changes, both leave the same. The others are struck where files change, a
# quarter of their operations; these two at all of them, to show that it is the same.
EVERY_OPERATION = {"mix", "save-h5"}
EXPORTS = [f"export-{form}" for form in ("h5", "lerobot", "minari", "npz", "parquet", "rlds")]
EXPORTED_EVERY_DAY = ["export-h5", "export-lerobot", "export-rlds"]
EXCHANGES = [f"{verb}-{form}" for verb in ("exchange", "give") for form in FORMS[1:]]
EXCHANGED_EVERY_DAY = ["exchange-nested", "exchange-h5", "give-flat"]
FILLED_EVERY_DAY = {"convert", "split", "mix", "save-h5", "dump-nested"}


def slow(*cases: object) -> list[object]:
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow) for one in cases]


def places(job: str) -> list[str]:
    return [] if job in EVERY_OPERATION else ["--changes"]


def struck(job: str, counts: dict[str, int]) -> bool:
    """Tell whether a job was struck at all its places."""
    return counts["old"] + counts["new"] == counts["operations" if job in EVERY_OPERATION else "changes"]


Strike = Callable[..., dict[str, int]]


@pytest.mark.parametrize(
    ("job", "strikes", "least"),
    [
        *((job, 3, 1) for job in JOBS if job in EVERY_DAY),
        *slow(*((job, 3, 1) for job in JOBS if job not in EVERY_DAY)),
        *((job, 8, 3) for job in (*EXPORTED_EVERY_DAY, *EXCHANGED_EVERY_DAY)),
    ],
)  # fmt: skip
def test_killed_here_and_there_the_destination_is_old_or_new(
    strike: Strike, work: Path, job: str, strikes: int, least: int
) -> None:
    counts = strike(work, job, "--strikes", str(strikes), "--over")
    assert counts["old"] >= least
    assert counts["new"] >= 1
    assert counts["old"] + counts["new"] == strikes


@pytest.mark.slow
@pytest.mark.parametrize("job", [*JOBS, *EXPORTS, *EXCHANGES])
def test_killed_at_every_change_of_files(strike: Strike, work: Path, job: str) -> None:
    counts = strike(work, job, "--over", *places(job))
    assert struck(job, counts)
    assert counts["old"] >= (3 if job in EXPORTS else 0)
    assert counts["new"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_killed_where_nothing_was_before(strike: Strike, work: Path, job: str) -> None:
    counts = strike(work, job, "--changes", "--strikes", "30")
    assert counts["old"] + counts["new"] == min(30, counts["changes"])  # mix has fewer
    assert counts["new"] >= 1


@pytest.mark.parametrize("strikes", [("--strikes", "4"), pytest.param(("--changes",), marks=pytest.mark.slow)])
def test_killed_with_workers_at_work(strike: Strike, work: Path, strikes: tuple[str, ...]) -> None:
    counts = strike(work, "preprocess-parent", *strikes, "--over")
    assert counts["old"] >= 2


@pytest.mark.parametrize("strikes", [("--strikes", "4"), pytest.param(("--changes",), marks=pytest.mark.slow)])
def test_a_killed_worker_is_replaced(strike: Strike, work: Path, strikes: tuple[str, ...]) -> None:
    counts = strike(work, "preprocess-worker", *strikes, "--over")
    assert counts["old"] == 0
    assert counts["new"] >= 3


# Where a worker and its parent are killed does not depend on the layout: every day each has one of them.
FEW_OR_ALL = {
    every_day: [
        (every_day, ("--strikes", "3")),
        *(pytest.param(layout, ("--changes",), marks=pytest.mark.slow) for layout in ("ted", "packed")),
    ]
    for every_day in ("ted", "packed")
}


@pytest.mark.parametrize(("layout", "strikes"), FEW_OR_ALL["ted"])
def test_killed_with_converting_workers(strike: Strike, work: Path, layout: str, strikes: tuple[str, ...]) -> None:
    counts = strike(work, f"convert-{layout}-parent", *strikes, "--over")
    assert counts["old"] >= 1


@pytest.mark.parametrize(("layout", "strikes"), FEW_OR_ALL["packed"])
def test_a_killed_worker_ends_a_conversion(strike: Strike, work: Path, layout: str, strikes: tuple[str, ...]) -> None:
    counts = strike(work, f"convert-{layout}-worker", *strikes, "--over")
    assert counts["old"] >= 1


@pytest.mark.parametrize(
    ("job", "strikes"),
    [
        *((job, 7) for job in JOBS if job in FILLED_EVERY_DAY),
        *slow(*((job, 25) for job in (*JOBS, *EXCHANGES) if job not in FILLED_EVERY_DAY)),
        # most operations remove the older folder, which needs no room: of fewer strikes one alone would meet a write
        *((f"export-{form}", 16) for form in ("minari", "npz")),
    ],
)  # fmt: skip
def test_a_disk_that_fills_up_leaves_everything_as_it_was(
    strike: Strike, small_disk: Path, job: str, strikes: int
) -> None:
    counts = strike(small_disk, job, "--fault", "fill", "--strikes", str(strikes), "--over")
    assert counts["old"] >= (2 if job in {"mix", "export-minari", "export-npz"} else 3)  # a mixture file is small


@pytest.mark.slow
@pytest.mark.parametrize("job", [*JOBS, *EXPORTS])
def test_a_disk_that_fills_up_at_every_change_of_files(strike: Strike, small_disk: Path, job: str) -> None:
    counts = strike(small_disk, job, "--fault", "fill", *places(job), *(["--over"] if job in EXPORTS else []))
    assert struck(job, counts)
    assert counts["old"] >= (3 if job in EXPORTS else 0)


def test_what_cannot_fit_is_refused_before_it_is_started(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - (100 << 10)))
    with pytest.raises(rbtool.OutOfSpaceError, match=r"bytes free, .* are needed"):
        rbtool.convert(small_disk / "source", small_disk / "out")
    assert not (small_disk / "out").exists()
    filler.unlink()
    assert rbtool.convert(small_disk / "source", small_disk / "out").steps == 4864


# Uploads to a hub and downloads from one are killed at each request, and at each change of files.

HUB_SCRIPT = Path(__file__).with_name("hub_transfers.py")


def struck_at_hub(work: Path, *words: str) -> int:
    """Run the script; how often it struck."""
    write_walks(work / "walks", [(40, "terminated"), (1, "truncated"), (70, "open"), (9, "both")])
    done = subprocess.run([sys.executable, HUB_SCRIPT, work, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: int = json.loads(done.stdout)["struck"]
    return found


@pytest.mark.parametrize(
    ("verb", "where", "every", "least"),
    [
        ("download", "operations", 299, 2),
        *slow(("upload", "requests", 1, 80), ("upload", "operations", 1, 3), ("download", "requests", 1, 25),
              ("download", "operations", 5, 100), ("stream", "operations", 7, 90)),
    ],
)  # fmt: skip
def test_kills_of_hub_transfers(tmp_path: Path, verb: str, where: str, every: int, least: int) -> None:
    assert struck_at_hub(tmp_path, verb, where, "--every", str(every)) >= least


# A recorder that is killed anywhere loses the episode that is under way, and no other. A repair is begun again.

RECORDER = Path(__file__).with_name("recorder.py")
RECORDED = DatasetPlan((4, 1, 6), ("terminated", "both", "truncated"), (False, True, False), ODD_LEAVES[:6])


@pytest.mark.parametrize(
    ("job", "every", "restored"),
    [
        ("recorder", 3, "0123"), ("repair", 6, "3"), ("environment", 6, "014"),
        *slow(("recorder", 1, "0123"), ("repair", 1, "3"), ("environment", 1, "01234")),
    ],
)  # fmt: skip
def test_kills_of_a_recorder_and_of_a_repair(memory: Path, job: str, every: int, restored: str) -> None:
    write_plan(RECORDED, memory / "ted")
    command = [sys.executable, RECORDER, memory, job, "--every", str(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)["restored"].keys()
    assert found >= {*restored} if restored == "014" else found == {*restored}
