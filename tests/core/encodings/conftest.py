import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan


@pytest.fixture(autouse=True, scope="package")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Thousands of small files are written here, and no test of this folder pulls the plug."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A dataset with every odd leaf, in which the next rows of episodes 1 and 4 do not follow."""
    plan = DatasetPlan(
        lengths=(4, 3, 1, 1, 2, 5),
        endings=("terminated", "truncated", "both", "open", "terminated", "open"),
        jumps=(False, True, False, False, True, False),
        leaves=ODD_LEAVES,
        root_flags="set",
        text=True,
        documents=True,
        seed=5,
    )
    write_plan(plan, tmp_path / "odd")
    return tmp_path / "odd"
