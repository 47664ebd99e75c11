"""`MemmapBuilder` and `OverlappedBuilder`: what they write, in which order, and where errors are looked for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

from rbtool import CorruptDataError, FormatError
from rbtool.core.errors import OutOfSpaceError
from rbtool.core.format.episodes import EpisodeTable
from rbtool.core.format.files import digest_file
from rbtool.core.format.manifest import Request
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin, OverlappedBuilder, RowBuilder
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.returns import Ingest
from rbtool.core.ted.schema import NEXT_REWARD, ted_fields
from rbtool.core.testing.datasets import WALK_FIELDS, relist, walk_pieces, write_walks

ORIGIN = Origin(Request("a", "a", "a"))
ENDINGS = st.sampled_from(["terminated", "truncated", "both", "open"])
EPISODES = st.lists(st.tuples(st.integers(1, 7), ENDINGS), min_size=1, max_size=6)


@settings(deadline=None, max_examples=30)
@given(EPISODES, st.integers(1, 9))
def test_content_never_depends_on_how_episodes_are_cut(tmp_path_factory, episodes, piece) -> None:
    folder = tmp_path_factory.mktemp("cut")
    whole = write_walks(folder / "whole", episodes)
    assert write_walks(folder / "cut", episodes, piece_steps=piece).content_digest == whole.content_digest


@settings(deadline=None, max_examples=30)
@given(EPISODES)
def test_rows_are_those_of_the_source_and_only_open_ends_get_a_flag(tmp_path_factory, episodes) -> None:
    folder = tmp_path_factory.mktemp("rows") / "data"
    write_walks(folder, episodes)
    with TedReader(folder) as reader:
        table = reader.episodes
        for row, piece in enumerate(walk_pieces(episodes)):
            start, stop = int(table.start[row]), int(table.start[row] + table.length[row])
            states = piece.columns[("observation",)]
            np.testing.assert_array_equal(reader.read(("observation",), start, stop), states[:-1])
            np.testing.assert_array_equal(reader.read(("next", "observation"), start, stop), states[1:])
            flags = reader.read(("next", "truncated"), start, stop)[:, 0]
            expected = piece.truncated.copy()
            expected[-1] |= episodes[row][1] == "open"
            np.testing.assert_array_equal(flags, expected)
            done = reader.read(("next", "done"), start, stop)[:, 0]
            np.testing.assert_array_equal(done, piece.terminated | expected)


def test_the_episode_table_describes_each_episode(tmp_path: Path) -> None:
    manifest = write_walks(tmp_path / "data", [(5, "terminated"), (1, "truncated"), (3, "open"), (2, "both")])
    with TedReader(tmp_path / "data") as reader:
        table = reader.episodes
        assert table.start.tolist() == [0, 5, 6, 9]
        assert table.end_reason.tolist() == [0, 1, 3, 2]
        assert table.truncated.tolist() == [False, True, True, True]
        assert table.seed.tolist() == [7, 8, 9, 10]
        rewards = reader.read(NEXT_REWARD, 0, manifest.steps)
        assert table.total_reward[2] == pytest.approx(rewards[6:9].sum())
        assert reader.episode_text == [{"task": f"walk {n} é"} for n in range(4)]
        assert table.index_of_step(np.array([0, 4, 5, 6, 10])).tolist() == [0, 0, 1, 2, 3]


def test_ranges_leave_nan_out(tmp_path: Path) -> None:
    with DatasetBuilder(tmp_path / "data", ted_fields(WALK_FIELDS)) as builder:
        ingest = Ingest(builder, WALK_FIELDS)
        for piece in walk_pieces([(4, "open")]):
            piece.columns[("observation",)][1] = np.nan
            piece.columns[("observation",)][2, 0] = np.inf
            ingest.add(piece)
        manifest = builder.finish(ingest.table, ORIGIN)
    assert manifest.ranges[("observation",)] is not None
    assert manifest.ranges[("observation",)][1] == np.inf
    assert np.isfinite(manifest.ranges[("observation",)][0])
    assert manifest.ranges[("next", "done")] is None


def test_a_column_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    with DatasetBuilder(tmp_path / "data", ted_fields(WALK_FIELDS)) as builder:
        ingest = Ingest(builder, WALK_FIELDS)
        [piece] = walk_pieces([(4, "open")])
        columns = dict(piece.columns) | {("observation",): piece.columns[("observation",)][:-1]}
        object.__setattr__(piece, "columns", columns)
        with pytest.raises(FormatError, match="'observation' has 4 rows for 4 steps, expected 5"):
            ingest.add(piece)


def test_digests_are_those_of_the_files(tmp_path: Path) -> None:
    data = tmp_path / "data"
    manifest = write_walks(data, [(300, "open")] * 40)
    for file in manifest.files:
        assert digest_file(data / file.path) == file.digest
    listed = {file.path for file in manifest.files} | {".rbtool/manifest.json"}
    assert listed == {path.relative_to(data).as_posix() for path in data.rglob("*") if path.is_file()}
    for name in ("observation.memmap", "next/meta.json", ".rbtool/episodes/return.memmap"):
        sound = (data / name).read_bytes()
        changed = bytearray(sound)
        changed[len(sound) // 2] ^= 1
        (data / name).write_bytes(changed)
        with pytest.raises(CorruptDataError, match="digest does not match"), TedReader(data) as reader:
            reader.verify_files()
        (data / name).write_bytes(sound)


def test_an_episode_table_that_contradicts_the_manifest_is_refused(tmp_path: Path) -> None:
    write_walks(tmp_path / "one", [(4, "open")])
    write_walks(tmp_path / "two", [(4, "open"), (2, "open")])
    for path in (tmp_path / "one" / ".rbtool" / "episodes").iterdir():
        path.unlink()
    TedReader(tmp_path / "two").episodes.save(tmp_path / "one")
    relist(tmp_path / "one")
    with pytest.raises(CorruptDataError, match="2 episodes and 6 steps, the manifest states 1 and 4"):
        _ = TedReader(tmp_path / "one").episodes


# `OverlappedBuilder` writes in a thread: the same rows in the same order, and errors where they are looked for.


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


@each("fails_at", [0, 5, 19])
@each("finish", [False, True])
def test_an_error_of_the_thread_is_raised_and_ends_the_writing(fails_at: int, finish: bool) -> None:
    def write() -> None:
        for number in range(20):
            builder.append_fresh(rows(number), np.ones(1, bool))
        if finish:
            builder.finish(EpisodeTable.from_rows([]), ORIGIN)
        builder.append(rows(20))

    inner = Recorder(fails_at)
    with OverlappedBuilder(inner) as builder, pytest.raises(OutOfSpaceError, match="no space is left"):
        write()
    assert inner.seen == list(range(fails_at))
    assert (inner.finished, inner.closed) == (0, 1)


def test_rows_are_not_kept_and_leaving_early_ends_the_thread() -> None:
    """A part of a split may wait long for its next rows."""
    inner, given = Recorder(), rows(0)
    left = weakref.ref(given[("a",)])
    with OverlappedBuilder(inner) as builder:
        builder.append_fresh(given, np.ones(1, bool))
        del given
        wait_until(lambda: left() is None, "the release of rows that are written")
        assert inner.seen == [0]
    inner = Recorder()
    with OverlappedBuilder(inner) as builder:
        builder.append_fresh(rows(0), np.ones(1, bool))
    assert (inner.finished, inner.closed) == (0, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "rbtool-writer"]


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
