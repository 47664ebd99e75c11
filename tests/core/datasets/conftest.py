"""Datasets of a few short episodes, by path and below a storage root."""

from __future__ import annotations

from pathlib import Path

import pytest

from rbtool.core.testing.datasets import write_walks

EPISODES = [(4, "open"), (1, "terminated"), (6, "both"), (2, "truncated")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A storage root with `minari:D4RL/door/human-v2`, which has these episodes; the network is forbidden."""
    write_walks(tmp_path / "home" / "minari" / "D4RL" / "door" / "human-v2", EPISODES)  # type: ignore[arg-type]
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "no minari"))
    return tmp_path / "home"


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    """Four short episodes."""
    write_walks(tmp_path / "walks", EPISODES)  # type: ignore[arg-type]
    return tmp_path / "walks"
