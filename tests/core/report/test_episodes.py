"""Episodes of a report: which are chosen, and their steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from report_data import write_shown

from rbtool.core.format.contracts import StepReader
from rbtool.core.open_steps import open_steps
from rbtool.core.progress import Silent
from rbtool.core.report import subject
from rbtool.core.report.figures import measure
from rbtool.core.report.subject import ShownEpisode, chosen_episodes, image_sources, show_episodes
from rbtool.core.testing.datasets import Ending, write_walks

WALKS: list[tuple[int, Ending]] = [(6, "terminated"), (1, "truncated"), (90, "open"), (4, "both"), (2, "terminated")]


def shown(reader: StepReader, most: int = 6, frame_bytes: int = 0) -> list[ShownEpisode]:
    return show_episodes(reader, measure(reader, Silent()), image_sources(reader), most, frame_bytes)


def test_the_best_worst_and_median_are_chosen(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", WALKS)
    with open_steps(tmp_path / "walks") as reader:
        table = reader.episodes
        found = chosen_episodes(table, 6, returns=True)
        without = chosen_episodes(table, 6, returns=False)
    rows = {reason: row for row, why in found for reason in why.split(", ")}
    returns = table.total_reward
    assert returns[rows["median return"]] == np.median(returns)
    assert (rows["highest return"], rows["lowest return"]) == (returns.argmax(), returns.argmin())
    assert (rows["longest"], rows["first"], rows["last"]) == (2, 0, 4)
    assert without == [(2, "longest"), (0, "first"), (4, "last")]
    assert len({row for row, _ in found}) == len(found)


@pytest.mark.parametrize("most", [1, 2, 6])
def test_no_more_are_chosen_than_asked_for(tmp_path: Path, most: int) -> None:
    write_walks(tmp_path / "walks", WALKS)
    with open_steps(tmp_path / "walks") as reader:
        assert len(chosen_episodes(reader.episodes, most, returns=True)) <= most


@pytest.mark.parametrize("limit", [500, 7])
def test_traces_are_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(subject, "_STEPS", limit)
    monkeypatch.setattr(subject, "_TOGETHER", 5)
    write_walks(tmp_path / "walks", WALKS)
    with open_steps(tmp_path / "walks") as reader:
        found = shown(reader)
        table = reader.episodes
        for one in found:
            assert (one.steps[0], one.steps[-1], one.length) == (0, one.length - 1, table.length[one.row])
            assert set(np.diff(one.steps[:-1])) <= {one.stride}
            rows = table.start[one.row] + one.steps
            reward, *actions = (trace.values for trace in one.traces)
            assert np.array_equal(reward, reader.read(("next", "reward"), 0, 103)[rows, 0])
            assert np.array_equal(np.stack(actions, 1), reader.read(("action",), 0, 103)[rows])
            assert one.total == table.total_reward[one.row]
    assert max(len(one.steps) for one in found) <= limit + 1


def test_frames_are_those_of_their_steps(tmp_path: Path) -> None:
    write_shown(tmp_path / "shown")
    with open_steps(tmp_path / "shown") as reader:
        found = shown(reader, frame_bytes=1 << 20)
    assert all(one.frames is not None and one.frames.count == len(one.frame_steps) == 12 for one in found)


def test_what_is_damaged_is_passed_over(tmp_path: Path) -> None:
    write_walks(tmp_path / "walks", WALKS)
    path = tmp_path / "walks" / "action.memmap"
    path.write_bytes(path.read_bytes()[: 7 * 8])
    with open_steps(tmp_path / "walks", damaged=True) as reader:
        assert {one.row for one in shown(reader)} <= {0, 1}
