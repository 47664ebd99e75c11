"""A store with recordings in it, made once from the local Minari cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rbtool.core.testing.datasets import write_walks
from rbtool.core.verbs.download import download

DATA = Path(__file__).parents[2] / "data" / "minari"
DOOR, CART = "D4RL/door/human-v2", "cartpole/scripted-v0"
EPISODES = [(4, "open"), (1, "terminated"), (6, "both"), (2, "truncated")]


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage root with the door and the cart; tests read it."""
    root = tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(DATA))
        for name in (DOOR, CART):
            download("minari", name, local=True, root=root)
    return root


@pytest.fixture
def home(tmp_path: Path, stored: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it that a test may change, as the storage root; the network is forbidden."""
    root = Path(shutil.copytree(stored, tmp_path / "home"))
    monkeypatch.setenv("RBTOOL_HOME", str(root))
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "no minari"))
    return root


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    """Four short episodes."""
    write_walks(tmp_path / "walks", EPISODES)  # type: ignore[arg-type]
    return tmp_path / "walks"
