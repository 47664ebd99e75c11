"""The examples of the guide to adapters run: those of rbtool alone, and all where the other libraries are installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs/guides/adapters.md"
BLOCKS = re.findall(r"```py\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
OWN = [block for block in BLOCKS if "stable_baselines3" not in block and "d3rlpy" not in block]


def run(blocks: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)


def test_the_examples_without_other_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2 < len(OWN) < len(BLOCKS)
    run(OWN, tmp_path, monkeypatch)


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
def test_all_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("d3rlpy")
    run(BLOCKS, tmp_path, monkeypatch)
    assert (tmp_path / "collected").is_dir()
    assert (tmp_path / "replay").is_dir()
