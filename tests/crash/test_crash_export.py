"""An export that is killed, or finds the disk full, leaves what was at its destination, or the whole new one."""

from collections.abc import Callable
from pathlib import Path

import pytest

FORMS = ("h5", "lerobot", "minari", "npz", "parquet", "rlds")
Strike = Callable[..., dict[str, int]]


@pytest.mark.parametrize("form", FORMS)
def test_killed_here_and_there(strike: Strike, work: Path, form: str) -> None:
    counts = strike(work, f"export-{form}", "--strikes", "8", "--over")
    assert counts["old"] >= 3
    assert counts["new"] >= 1
    assert counts["old"] + counts["new"] == 8


@pytest.mark.parametrize("form", ["minari", "npz"])
def test_a_disk_that_fills_up_here_and_there(strike: Strike, small_disk: Path, form: str) -> None:
    # most operations remove the older folder, which needs no room: of fewer strikes one alone would meet a write
    counts = strike(small_disk, f"export-{form}", "--fault", "fill", "--strikes", "16", "--over")
    assert counts["old"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_killed_at_every_change_of_files(strike: Strike, work: Path, form: str) -> None:
    counts = strike(work, f"export-{form}", "--over", "--changes")
    assert counts["old"] + counts["new"] == counts["changes"]
    assert counts["old"] >= 3
    assert counts["new"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_disk_that_fills_up_at_every_change_of_files(strike: Strike, small_disk: Path, form: str) -> None:
    counts = strike(small_disk, f"export-{form}", "--fault", "fill", "--over", "--changes")
    assert counts["old"] + counts["new"] == counts["changes"]
    assert counts["old"] >= 3
