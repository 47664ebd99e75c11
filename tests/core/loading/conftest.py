"""Datasets with episodes of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from streams import EPISODES

from rbtool.core.testing.datasets import write_walks


@pytest.fixture(scope="session")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where a dataset with episodes of a kind is."""
    folder = tmp_path_factory.mktemp("walks")
    for name, episodes in EPISODES.items():
        write_walks(folder / name, episodes)
    return lambda name: folder / name
