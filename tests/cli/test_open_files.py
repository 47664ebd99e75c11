"""Datasets with more columns than the shell allows files to be open."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rbtool.core.testing.datasets import DatasetPlan, PlannedLeaf, write_plan

SPLIT = ["split", "ted", "--dest", "parts", "--train", "0.5", "--val", "0.5", "--seed", "0"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 160 files."""
    folder = tmp_path_factory.mktemp("wide")
    leaves = tuple(PlannedLeaf(("extra", f"x{number}"), "float32", (2,), "state") for number in range(77))
    write_plan(DatasetPlan((5, 3, 7, 3), ("terminated",) * 4, (False,) * 4, leaves), folder / "ted")
    return folder


def split(folder: Path, soft: int, hard: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rbtool", *SPLIT, *words], cwd=folder, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_the_limit_of_a_shell_is_raised(wide: Path, layout: str) -> None:
    done = split(wide, 64, resource.getrlimit(resource.RLIMIT_NOFILE)[1], "--layout", layout, "--force")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("limit", [100, 200, 250, 310])
def test_a_limit_that_cannot_be_raised_is_one_sentence_and_leaves_nothing(wide: Path, limit: int) -> None:
    before = {path.name for path in wide.iterdir()}
    done = split(wide, limit, limit, "--layout", "ted", "--force")
    assert done.returncode != 0
    message, hint = done.stderr.splitlines()[-2:]
    assert f"too many open files (limit {limit})" in message or "more files than this process may hold" in message
    assert "ulimit -n" in hint
    assert {path.name for path in wide.iterdir()} == before
