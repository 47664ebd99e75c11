from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from rbtool.core.errors import UsageError
from rbtool.core.format.episodes import EpisodeRow
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin
from rbtool.core.open_steps import open_steps
from rbtool.core.preprocess.selection import Plan, StepSelection, task_order
from rbtool.core.ted.episodes import EndReason, Final
from rbtool.core.ted.schema import Field


def taking(folder: Path, lengths: list[int], steps: int | None = None, final: Final = Final.OBSERVED) -> StepSelection:
    field = Field(("x",), "uint8", (64,), "observation")
    ended = {"end_reason": EndReason.TRUNCATED, "final": final}
    episodes = [EpisodeRow(n, length, 0.0, False, True, **ended) for n, length in enumerate(lengths)]
    with DatasetBuilder(folder, [field]) as builder:
        builder.append({("x",): np.zeros((sum(lengths), 64), np.uint8)})
        builder.finish(episodes, Origin(Request("t", "t", "t")))
    return StepSelection(open_steps(folder), None, steps)


class Counted:
    """As many steps of so many bytes, without a dataset."""

    def __init__(self, steps: int, row_bytes: int) -> None:
        self.steps, self.reader = steps, self
        self.fields = (Field(("x",), "uint8", (row_bytes,), "observation"),)


@pytest.mark.parametrize(
    ("steps", "row_bytes", "size"),
    [
        (2, 64, 256), (9_000, 64, 563), (9_000, 1 << 20, 16), (40, 1 << 25, 1), (40_000_000, 0, 65536),
        (100_000, 1024, 6250),
    ],
)  # fmt: skip
def test_the_chunk_size_depends_on_steps_and_rows_alone(steps: int, row_bytes: int, size: int) -> None:
    found = cast(StepSelection, Counted(steps, row_bytes))
    assert {Plan.of(found, None, workers, whole_episodes=False).chunk_size for workers in (None, 0, 1, 7)} == {size}


@pytest.mark.parametrize(("cores", "chunks", "workers"), [(1, 100, 0), (4, 100, 4), (4, 3, 3), (4, 1, 0)])
def test_there_are_as_many_workers_as_cores_or_chunks(
    tmp_path, monkeypatch, cores: int, chunks: int, workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert Plan.of(taking(tmp_path / "few", [chunks * 10]), 10, None, whole_episodes=False).workers == workers


def test_there_are_not_more_workers_than_chunks(tmp_path: Path) -> None:
    few = taking(tmp_path / "few", [30])
    assert [Plan.of(few, 10, workers, whole_episodes=False).workers for workers in (0, 1, 3, 9)] == [0, 1, 3, 3]


@pytest.mark.parametrize(
    ("steps", "final"), [(8, [Final.REPEATED] * 2), (3, [Final.REPEATED]), (5, [Final.REPEATED, Final.OBSERVED])]
)
def test_an_episode_that_is_cut_ends_with_an_observed_step(tmp_path: Path, steps: int, final: list[Final]) -> None:
    """The last step of the source, whose observation was repeated, is not in the selection."""
    few = taking(tmp_path / "few", [3, 5], steps=steps, final=Final.REPEATED)
    assert few.table.final.tolist() == final


def spans(plan: Plan) -> list[tuple[int, int]]:
    tasks = plan.tasks()
    assert [task.index for task in tasks] == list(range(len(tasks)))
    return [(task.start, task.stop) for task in tasks]


def test_tasks_cover_the_steps_once(tmp_path: Path) -> None:
    few = taking(tmp_path / "few", [25])
    assert spans(Plan.of(few, 10, 0, whole_episodes=False)) == [(0, 10), (10, 20), (20, 25)]
    first = StepSelection(few.reader, None, 20)
    assert spans(Plan.of(first, 10, 0, whole_episodes=False)) == [(0, 10), (10, 20)]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(10, [(0, 8), (8, 20), (20, 30), (30, 31)]), (1, [(0, 3), (3, 8), (8, 20), (20, 29), (29, 30), (30, 31)])],
)
def test_tasks_of_whole_episodes(tmp_path: Path, size: int, expected: list) -> None:
    few = taking(tmp_path / "few", [3, 5, 12, 9, 1, 1])
    assert spans(Plan.of(few, size, 0, whole_episodes=True)) == expected


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_the_last_and_the_middle_task_come_early(tmp_path: Path, count: int) -> None:
    tasks = Plan.of(taking(tmp_path / "few", [count]), 1, 0, whole_episodes=False).tasks()
    turn = task_order(tasks)
    assert sorted(turn) == tasks
    assert turn[0] == tasks[0]
    if count > 3:
        assert turn[1:3] == [tasks[-1], tasks[count // 2]]


def test_numbers_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    few = taking(tmp_path / "few", [5])
    with pytest.raises(UsageError, match="num_workers is -1"):
        Plan.of(few, None, -1, whole_episodes=False)
    with pytest.raises(UsageError, match="chunk_size is 0"):
        Plan.of(few, 0, None, whole_episodes=False)


def test_a_time_limit_needs_a_worker(tmp_path: Path) -> None:
    few = taking(tmp_path / "few", [5])
    assert Plan.of(few, None, None, whole_episodes=False, apart="a timeout").workers == 1
    with pytest.raises(UsageError, match="a timeout needs worker processes"):
        Plan.of(few, None, 0, whole_episodes=False, apart="a timeout")
