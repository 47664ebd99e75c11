"""Every verb that writes, struck at its n-th change of the file system: by SIGKILL, and by a disk that fills up."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import rbtool
from rbtool.core.testing.walks import write_walks

SOURCE = Path(__file__).parents[1] / "data" / "minari" / "cartpole" / "scripted-v0"
RUNNER = Path(__file__).with_name("runner.py")
FORMS = ("ted", "flat", "nested", "h5")
JOBS = ("convert", "download", "preprocess", "preprocess-fewer",
        *(f"{verb}-{form}" for verb in ("save", "load") for form in FORMS),
        *(f"dump-{form}" for form in FORMS[1:]))  # fmt: skip


def _prepare(work: Path) -> None:
    """Lay out what the jobs read: small enough that a disk of a few megabytes holds it."""
    shutil.copytree(SOURCE, work / "source")
    write_walks(work / "dataset", [(40, "terminated"), (1, "truncated"), (70, "open"), (9, "both")])
    write_walks(work / "older", [(5, "truncated")], seed=1)
    for form in FORMS:
        rbtool.checkpoint.save(work / "dataset", work / f"saved-{form}", form=form)


def _strike(work: Path, *words: str) -> dict[str, int]:
    done = subprocess.run([sys.executable, RUNNER, work, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("prepared")
    _prepare(work)
    return work


@pytest.fixture
def work(prepared: Path) -> Iterator[Path]:
    """The jobs' folder, in memory where there is such a place: thousands of fsyncs wait for no disk there."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        shutil.copytree(prepared, Path(place) / "work")
        yield Path(place) / "work"


@pytest.mark.parametrize("job", JOBS)
def test_killed_anywhere_the_destination_is_old_or_new(work: Path, job: str) -> None:
    counts = _strike(work, job, "--every", "19" if job != "preprocess-fewer" else "43", "--over")
    assert counts["old"] >= 3
    assert counts["new"] >= 1
    assert counts["old"] + counts["new"] >= counts["operations"] // 43


@pytest.mark.slow
@pytest.mark.parametrize("over", [(), ("--over",)])
@pytest.mark.parametrize("job", JOBS)
def test_killed_at_every_single_operation(work: Path, job: str, over: tuple[str, ...]) -> None:
    counts = _strike(work, job, *over)
    assert counts["old"] + counts["new"] == counts["operations"]
    assert counts["new"] >= 1


@pytest.mark.parametrize("every", ["47", pytest.param("1", marks=pytest.mark.slow)])
def test_killed_with_workers_at_work(work: Path, every: str) -> None:
    counts = _strike(work, "preprocess-parent", "--every", every, "--over")
    assert counts["old"] >= 3


@pytest.mark.parametrize("every", ["47", pytest.param("1", marks=pytest.mark.slow)])
def test_a_killed_worker_is_replaced(work: Path, every: str) -> None:
    counts = _strike(work, "preprocess-worker", "--every", every, "--over")
    assert counts["old"] == 0
    assert counts["new"] >= 3


@pytest.fixture
def small_disk(tmp_path: Path, prepared: Path) -> Iterator[Path]:
    """A real file system of 12 MB with what the jobs read."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.decode().strip()}")
    try:
        shutil.copytree(prepared, place / "work")
        yield place / "work"
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("job", [job for job in JOBS if job != "preprocess-fewer"])
def test_a_disk_that_fills_up_leaves_everything_as_it_was(small_disk: Path, job: str) -> None:
    counts = _strike(small_disk, job, "--fault", "fill", "--every", "23", "--over")
    assert counts["old"] >= 3


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_a_disk_that_fills_up_at_every_single_operation(small_disk: Path, job: str) -> None:
    counts = _strike(small_disk, job, "--fault", "fill")
    assert counts["old"] + counts["new"] == counts["operations"]


def test_what_cannot_fit_is_refused_before_it_is_begun(small_disk: Path) -> None:
    filler = small_disk / "filler"
    filler.write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - (100 << 10)))
    with pytest.raises(rbtool.OutOfSpaceError, match=r"bytes free, .* are needed"):
        rbtool.convert(small_disk / "source", small_disk / "out")
    assert not (small_disk / "out").exists()
    filler.unlink()
    assert rbtool.convert(small_disk / "source", small_disk / "out").steps == 4864
