from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rbtool.core.encodings.rows import Difference, compare_steps
from rbtool.core.format.episodes import EPISODES
from rbtool.core.open_steps import open_steps
from rbtool.core.testing.datasets import DatasetPlan, PlannedLeaf, relist, write_plan

LEAVES = (PlannedLeaf(("observation",), "float32", (2,), "state"), PlannedLeaf(("mask",), "int16", (), "root"))
PLAN = DatasetPlan((3, 4, 2), ("terminated", "open", "both"), (False,) * 3, LEAVES, text=True, seed=4)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("one", "other"):
        write_plan(PLAN, tmp_path / name)
    return tmp_path / "one", tmp_path / "other"


def compare(one: Path, other: Path) -> list[Difference]:
    with open_steps(one) as here, open_steps(other) as there:
        return compare_steps(here, there)


def test_equal_data_do_not_differ(pair: tuple[Path, Path]) -> None:
    assert compare(*pair) == []


@pytest.mark.parametrize("chunk", [1, 60, 1 << 20])
def test_rows_that_differ_are_named(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("rbtool.core.encodings.rows.CHUNK_BYTES", chunk)
    path = pair[1] / "mask.memmap"
    rows = np.fromfile(path, np.int16)
    rows[[4, 5, 8]] += 1
    path.write_bytes(rows.tobytes())
    assert compare(*pair) == [Difference("mask", "rows differ", 3, 4, 13)]


def test_the_sign_of_zero_is_a_difference(pair: tuple[Path, Path]) -> None:
    for folder, zero in zip(pair, (0.0, -0.0), strict=True):
        path = folder / "observation.memmap"
        rows = np.fromfile(path, np.float32)
        rows[2] = zero
        path.write_bytes(rows.tobytes())
    assert compare(*pair) == [Difference("observation", "rows differ", 1, 1, 3)]


def test_a_column_of_the_episode_table(pair: tuple[Path, Path]) -> None:
    path = pair[1] / EPISODES / "has_seed.memmap"
    path.write_bytes(bytes([1, 1, 0]))
    relist(pair[1])
    assert compare(*pair) == [Difference("episodes.has_seed", "False against True", 2, 3, 13)]


def test_text(pair: tuple[Path, Path]) -> None:
    path = pair[1] / ".rbtool/episodes_text.jsonl"
    path.write_text(path.read_text().replace("13", "14"))
    relist(pair[1])
    assert compare(*pair) == [Difference("episodes_text", "text differs", 1, 3, 13)]


def test_text_that_only_one_of_them_has(pair: tuple[Path, Path]) -> None:
    (pair[1] / ".rbtool/episodes_text.jsonl").unlink()
    relist(pair[1])
    assert compare(*pair) == [Difference("episodes_text", "text differs", 3, 0, 3)]


def test_other_fields(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "one")
    wider = replace(PLAN, leaves=(replace(LEAVES[0], shape=(3,)),))
    write_plan(wider, tmp_path / "other")
    found = {difference.key: difference.what for difference in compare(tmp_path / "one", tmp_path / "other")}
    assert found["observation"] == "float32 [2] against float32 [3]"
    assert found["next.observation"] == "float32 [2] against float32 [3]"
    assert found["mask"] == "int16 [] against nothing"


def test_another_number_of_steps(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "one")
    write_plan(replace(PLAN, lengths=(3, 4, 3)), tmp_path / "other")
    found = {difference.key: difference.what for difference in compare(tmp_path / "one", tmp_path / "other")}
    assert found["steps"] == "9 against 10"
    assert found["episodes.length"] == "2 against 3"
    assert "mask" not in found


def test_another_number_of_episodes(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "one")
    write_plan(replace(PLAN, lengths=(3, 6), endings=("open",) * 2, jumps=(False,) * 2), tmp_path / "other")
    found = {difference.key: difference.what for difference in compare(tmp_path / "one", tmp_path / "other")}
    assert found["episodes"] == "3 against 2"
