"""Every verb that writes, struck at its n-th change of the file system: by SIGKILL, and by a disk that fills up."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import rbtool

FORMS = ("ted", "flat", "nested", "h5")
JOBS = ("convert", "convert-archive", "convert-blocks", "convert-checkpoints", "convert-episodes", "convert-shards",
        "convert-videos",
        "download", "preprocess", "preprocess-fewer", "preprocess-shared", "preprocess-videos", "merge", "split", "mix",
        *(f"{verb}-{form}" for verb in ("save", "load") for form in FORMS),
        *(f"dump-{form}" for form in FORMS[1:]))  # fmt: skip
# Every day a writer of each kind is killed; the others write through one of these. A full disk is met by fewer: what
# they do about it is the same code.
EVERY_DAY = {
    "convert",
    "convert-blocks",
    "download",
    "preprocess-fewer",
    "preprocess-videos",
    "merge",
    "split",
    "mix",
    "save-h5",
    "dump-nested",
}
# Of two operations between which no file changes, both leave the same. The others are struck where files change, a
# quarter of their operations; these two at all of them, to show that it is the same.
EVERY_OPERATION = {"mix", "save-h5"}
FILLED_EVERY_DAY = {"convert", "convert-blocks", "preprocess-fewer", "split", "mix", "save-h5", "dump-nested"}


def struck(every_day: set[str]) -> list[object]:
    return [job if job in every_day else pytest.param(job, marks=pytest.mark.slow) for job in JOBS]


def places(job: str) -> list[str]:
    return [] if job in EVERY_OPERATION else ["--changes"]


Strike = Callable[..., dict[str, int]]


@pytest.mark.parametrize("job", struck(EVERY_DAY))
def test_killed_anywhere_the_destination_is_old_or_new(strike: Strike, work: Path, job: str) -> None:
    counts = strike(work, job, "--strikes", "5", "--over")
    assert counts["old"] >= 2
    assert counts["new"] >= 1
    assert counts["old"] + counts["new"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_killed_at_every_change_of_files(strike: Strike, work: Path, job: str) -> None:
    counts = strike(work, job, "--over", *places(job))
    assert counts["old"] + counts["new"] == counts["operations" if job in EVERY_OPERATION else "changes"]
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


@pytest.mark.parametrize("layout", ["ted", "packed"])
@pytest.mark.parametrize("strikes", [("--strikes", "3"), pytest.param(("--changes",), marks=pytest.mark.slow)])
def test_killed_with_converting_workers(strike: Strike, work: Path, layout: str, strikes: tuple[str, ...]) -> None:
    counts = strike(work, f"convert-{layout}-parent", *strikes, "--over")
    assert counts["old"] >= 1


@pytest.mark.parametrize("layout", ["ted", "packed"])
@pytest.mark.parametrize("strikes", [("--strikes", "3"), pytest.param(("--changes",), marks=pytest.mark.slow)])
def test_a_killed_worker_ends_a_conversion(strike: Strike, work: Path, layout: str, strikes: tuple[str, ...]) -> None:
    counts = strike(work, f"convert-{layout}-worker", *strikes, "--over")
    assert counts["old"] >= 1


@pytest.mark.parametrize("job", struck(FILLED_EVERY_DAY))
def test_a_disk_that_fills_up_leaves_everything_as_it_was(strike: Strike, small_disk: Path, job: str) -> None:
    counts = strike(small_disk, job, "--fault", "fill", "--strikes", "7" if job in FILLED_EVERY_DAY else "25", "--over")
    assert counts["old"] >= (2 if job == "mix" else 3)  # a mixture file is small


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_a_disk_that_fills_up_at_every_change_of_files(strike: Strike, small_disk: Path, job: str) -> None:
    counts = strike(small_disk, job, "--fault", "fill", *places(job))
    assert counts["old"] + counts["new"] == counts["operations" if job in EVERY_OPERATION else "changes"]


def test_what_cannot_fit_is_refused_before_it_is_started(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - (100 << 10)))
    with pytest.raises(rbtool.OutOfSpaceError, match=r"bytes free, .* are needed"):
        rbtool.convert(small_disk / "source", small_disk / "out")
    assert not (small_disk / "out").exists()
    filler.unlink()
    assert rbtool.convert(small_disk / "source", small_disk / "out").steps == 4864
