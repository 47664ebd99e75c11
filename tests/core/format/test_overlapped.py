"""`OverlappedBuilder` writes in a thread: the same rows in the same order, and errors where they are looked for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

from rbtool.core.errors import OutOfSpaceError
from rbtool.core.format.episodes import EpisodeTable
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import Origin, OverlappedBuilder, RowBuilder

ORIGIN = Origin(Request("a", "a", "a"))


class Recorder(RowBuilder):
    """Keeps the numbers of rows, and raises at one of them."""

    def __init__(self, fails_at: int = -1) -> None:
        self.seen: list[int] = []
        self.threads: set[str] = set()
        self.finished = self.closed = 0
        self._fails_at = fails_at

    def append(self, columns: Mapping[Any, Any], last: Any = None) -> None:
        number = int(columns[("a",)][0])
        if number == self._fails_at:
            raise OutOfSpaceError("no space is left")
        self.seen.append(number)
        self.threads.add(threading.current_thread().name)

    def _complete(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Any:
        self.finished += 1

    def close(self) -> None:
        self.closed += 1


def rows(number: int) -> dict[Any, Any]:
    return {("a",): np.array([number])}


def test_rows_are_written_in_order_whichever_way_they_come() -> None:
    inner = Recorder()
    with OverlappedBuilder(inner) as builder:
        for number in range(60):
            if number % 7 == 3:
                builder.append(rows(number))
            else:
                builder.append_fresh(rows(number), np.ones(1, bool))
        builder.finish(EpisodeTable.from_rows([]), ORIGIN)
    assert inner.seen == list(range(60))
    assert (inner.finished, inner.closed) == (1, 1)
    assert inner.threads == {"MainThread", "rbtool-writer"}
    assert not [thread for thread in threading.enumerate() if thread.name == "rbtool-writer"]


def write(builder: RowBuilder, *, finish: bool = True) -> None:
    for number in range(20):
        builder.append_fresh(rows(number), np.ones(1, bool))
    if finish:
        builder.finish(EpisodeTable.from_rows([]), ORIGIN)
    else:
        builder.append(rows(20))


@pytest.mark.parametrize("fails_at", [0, 5, 19])
@pytest.mark.parametrize("finish", [False, True])
def test_an_error_of_the_thread_is_raised_and_nothing_is_written_after_it(fails_at: int, finish: bool) -> None:
    inner = Recorder(fails_at)
    with OverlappedBuilder(inner) as builder, pytest.raises(OutOfSpaceError, match="no space is left"):
        write(builder, finish=finish)
    assert inner.seen == list(range(fails_at))
    assert (inner.finished, inner.closed) == (0, 1)


def test_leaving_early_ends_the_thread_and_closes() -> None:
    inner = Recorder()
    with OverlappedBuilder(inner) as builder:
        builder.append_fresh(rows(0), np.ones(1, bool))
    assert (inner.finished, inner.closed) == (0, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "rbtool-writer"]


def test_rows_that_are_written_are_not_kept() -> None:
    """A part of a split may wait long for its next rows."""
    inner, given = Recorder(), rows(0)
    left = weakref.ref(given[("a",)])
    with OverlappedBuilder(inner) as builder:
        builder.append_fresh(given, np.ones(1, bool))
        del given
        wait_until(lambda: left() is None, "the release of rows that are written")
        assert inner.seen == [0]


def test_without_a_thread_rows_are_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on memory counts the stack of a thread, 8 MB."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    inner = Recorder()
    with OverlappedBuilder(inner) as builder:
        monkeypatch.setattr(threading.Thread, "start", refused)
        for number in range(3):
            builder.append_fresh(rows(number), np.ones(1, bool))
        monkeypatch.undo()
        builder.append_fresh(rows(3), np.ones(1, bool))
        builder.finish(EpisodeTable.from_rows([]), ORIGIN)
    assert inner.seen == [0, 1, 2, 3]
    assert inner.threads == {"MainThread", "rbtool-writer"}
