"""A dataset to do things with."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def walks(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A dataset of the `EPISODES` of the test's module."""
    from rbtool.core.testing.datasets import write_walks

    write_walks(tmp_path / "walks", request.module.EPISODES)
    return tmp_path / "walks"
