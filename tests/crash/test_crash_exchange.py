"""Checkpoints in TorchRL's layouts, struck while they are written: the older one stays whole until the new one is."""

from collections.abc import Callable
from pathlib import Path

import pytest

JOBS = [f"{verb}-{form}" for verb in ("exchange", "give") for form in ("flat", "nested", "h5")]
EVERY_DAY = {"exchange-nested", "exchange-h5", "give-flat"}
Strike = Callable[..., dict[str, int]]


@pytest.mark.parametrize("job", sorted(EVERY_DAY))
def test_killed_here_and_there(strike: Strike, work: Path, job: str) -> None:
    counts = strike(work, job, "--strikes", "8", "--over")
    assert counts["old"] >= 3
    assert counts["new"] >= 1
    assert counts["old"] + counts["new"] == 8


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_killed_at_every_change_of_files(strike: Strike, work: Path, job: str) -> None:
    counts = strike(work, job, "--over", "--changes")
    assert counts["old"] + counts["new"] == counts["changes"]
    assert counts["new"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_a_disk_that_fills_up_leaves_everything_as_it_was(strike: Strike, small_disk: Path, job: str) -> None:
    counts = strike(small_disk, job, "--fault", "fill", "--strikes", "25", "--over")
    assert counts["old"] >= 3
