"""Progress in a log: a line at each tenth of slow work, one line of quick work."""

from __future__ import annotations

import time

import pytest
from rich.progress import Task, TaskID

from rbtool.cli import progress as module
from rbtool.cli.progress import LineProgress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def lines():
    return []


@pytest.fixture
def progress(lines):
    return LineProgress(lines.append, lines.append)


def test_slow_work_gives_a_line_every_tenth(progress, lines, clock):
    progress.start("converting", 1000, "steps")
    clock.now = 5
    for _ in range(1000):
        progress.advance(1)
    progress.done()
    assert [line.partition(" (")[0] for line in lines] == [f"converting {n}0 %" for n in range(1, 11)]
    assert lines[0] == "converting 10 % (100 of 1,000 steps, 20 steps/s, 0:45 left)"
    assert lines[-1] == "converting 100 % (1,000 of 1,000 steps)"


def test_hours_that_are_left(progress, lines, clock):
    progress.start("converting", 100_000, "steps")
    clock.now = 3600
    progress.advance(10_000)
    assert lines == ["converting 10 % (10,000 of 100,000 steps, 3 steps/s, 9:00:00 left)"]


def test_quick_work_gives_one_line(progress, lines, clock):
    progress.start("converting", 1000, "steps")
    for _ in range(10):
        progress.advance(100)
    assert lines == ["converting 100 % (1,000 of 1,000 steps)"]


def test_tenths_that_are_jumped_over_are_left_out(progress, lines, clock):
    progress.start("hashing", 50_000_000, "bytes")
    clock.now = 2
    progress.advance(20_000_000)
    progress.advance(30_000_000)
    assert lines == ["hashing 40 % (20.0 MB of 50.0 MB, 10.0 MB/s, 0:03 left)", "hashing 100 % (50.0 MB of 50.0 MB)"]


def test_work_of_unknown_length_is_counted_at_its_end(progress, lines, clock):
    progress.start("reading", None, "steps")
    progress.advance(1234)
    progress.done()
    assert lines == ["reading done (1,234 steps)"]


def test_each_stage_counts_anew(progress, lines, clock):
    for label in ("one", "two"):
        progress.start(label, 2, "steps")
        progress.advance(2)
        progress.done("all well")
    progress.note("a word")
    assert lines == [
        "one 100 % (2 of 2 steps)", "one done (all well)", "two 100 % (2 of 2 steps)", "two done (all well)", "a word",
    ]  # fmt: skip


def test_nothing_to_do_is_no_division_by_zero(progress, lines, clock):
    progress.start("converting", 0, "steps")
    progress.advance(0)
    progress.done()
    assert lines == []


@pytest.mark.parametrize(
    ("label", "count", "line"),
    [
        ("looking over", 1, "looked over 1 episode"),
        ("looking over", 4, "looked over 4 episodes"),
        ("reading", 1, "reading done (1 episode)"),
    ],
)
def test_a_stage_without_a_total_says_what_was_done(label, count, line):
    lines = []
    progress = LineProgress(lines.append, lines.append)
    progress.start(label, None, "episodes")
    progress.advance(count)
    progress.done()
    assert lines == [line]


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (100, "  converting                 2.5 MB ━━━━━━━━━━━━━━━━━━━━  50 % 12.1 MB/s  0:03 left"),
        (80, "  converting          2.5 MB ━━━━━━━━━━━━━━━━━  50 % 12.1 MB/s  0:03 left"),
        (60, "  converting          2.5 MB ━━━━━━━━  50 % 0:03 left"),
        (48, "  converting          2.5 MB ━━━━━━━━  50 %"),
        (40, "  converting          2.5 MB  50 %"),
    ],
)
def test_a_narrow_terminal_keeps_percent_and_size(width, shown):
    fields = {"count": "2.5 MB", "speed": "12.1 MB/s  0:03 left"}
    task = Task(TaskID(0), "converting", 5_000_000, 2_500_000, _get_time=time.monotonic, fields=fields)
    assert module._stage_line(task, width).plain == shown
    assert len(shown) <= width
