"""Segments of many dumps: small ones are merged, few rows are kept twice, and little is written again."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.buffers.base import ReplayBuffer
from rbtool.core.checkpointers import segments
from rbtool.core.checkpointers.segments import (
    Segment,
    SegmentManifest,
    common,
    count_of,
    cut,
    joined,
    merged,
    without,
    written,
)
from rbtool.core.storages.lazy_tensor import LazyTensorStorage

ROWS, BLOCK = 4096, 4


@pytest.fixture(autouse=True)
def many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have as many blocks as a large storage has, of four rows, without waiting for the disk."""
    monkeypatch.setattr(segments, "_FEWEST_BYTES", 8 * BLOCK)
    monkeypatch.setattr(segments, "_MAPPED_FROM", 1)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def document(path: Path) -> SegmentManifest:
    folder = path / "storage"
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return SegmentManifest.load(folder, descriptor)
    finally:
        os.close(descriptor)


class Ring:
    """A full buffer of numbers, its checkpoint, and how many rows each dump wrote."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, 0
        self.buffer = ReplayBuffer(storage=LazyTensorStorage(ROWS))
        self.extend(ROWS)
        self.buffer.dumps(path)

    def extend(self, count: int) -> None:
        if count:
            self.buffer.extend(torch.arange(self.number, self.number + count))
        self.number += count

    def dump(self) -> int:
        """Dump; return how many rows were written."""
        before = {segment.number for segment in document(self.path).segments}
        self.buffer.dumps(self.path)
        return sum(segment.rows for segment in document(self.path).segments if segment.number not in before)

    def require_same(self) -> None:
        other = ReplayBuffer(storage=LazyTensorStorage(ROWS))
        other.loads(self.path, verify=True)
        every = torch.arange(ROWS)
        assert torch.equal(other.storage[every], self.buffer.storage[every])

    def require_few(self) -> None:
        """Few segments, of which little is kept for nothing."""
        found = document(self.path)
        assert len(found.segments) <= 60
        assert sum(segment.rows for segment in found.segments) <= ROWS * 5 // 4 + BLOCK


@pytest.mark.parametrize(("count", "times"), [(1, 4.5), (4, 3.5), (40, 2.5), (41, 2.5), (400, 1.5), (3000, 1.4)])
def test_rows_are_written_a_few_times(tmp_path: Path, count: int, times: float) -> None:
    ring, taken = Ring(tmp_path / "saved"), list[int]()
    for number in range(150):
        ring.extend(count)
        taken.append(ring.dump())
        ring.require_few()
        if not number % 30:
            ring.require_same()
    ring.require_same()
    assert sum(taken) <= times * count * len(taken)
    assert sorted(taken)[len(taken) // 2] == count  # most dumps write the new rows and no more


@pytest.mark.parametrize("seed", range(3))
def test_writes_of_all_sizes(tmp_path: Path, seed: int) -> None:
    draw, ring = random.Random(seed), Ring(tmp_path / "saved")
    for number in range(120):
        ring.extend(draw.choice([0, 1, 3, 40, 41, 700, ROWS + 5]))
        if draw.random() < 0.3:
            rows = torch.tensor([draw.randrange(ROWS) for _ in range(draw.choice([1, 2, 30]))])
            ring.buffer.storage[rows] = -torch.arange(number, number + len(rows))
        ring.dump()
        ring.require_few()
        if draw.random() < 0.1:
            ring.require_same()
    ring.require_same()


def test_rows_that_were_handed_out_cost_little_more(tmp_path: Path) -> None:
    """A segment of which some rows are in later ones cannot be compared with memory: the rest of it is written."""
    ring = Ring(tmp_path / "saved")
    view = ring.buffer.storage[:ROWS]
    taken = list[int]()
    for number in range(120):
        ring.extend(40)
        taken.append(ring.dump())
        ring.require_few()
        if not number % 40:
            view[5 * number] = -number
            assert ring.dump() > 0
            ring.require_same()
    assert sum(taken) <= 120 * (40 + ROWS // 16)
    assert ring.dump() == 0


def test_a_storage_that_fills_up(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "saved")
    ring.buffer, ring.number = ReplayBuffer(storage=LazyTensorStorage(1 << 20)), 0
    taken = 0
    for _ in range(200):
        ring.extend(50)
        taken += ring.dump()
        assert len(document(ring.path).segments) <= 60
    other = ReplayBuffer(storage=LazyTensorStorage(1 << 20))
    other.loads(ring.path, verify=True)
    assert torch.equal(other.storage[torch.arange(10_000)], torch.arange(10_000))
    assert taken <= 5 * 10_000


# Runs ----------------------------------------------------------------------------------------------

RUNS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9))).map(
    lambda pairs: joined((start, start + count) for start, count in pairs)
)


def rows_in(runs: list[tuple[int, int]]) -> set[int]:
    return {row for start, stop in runs for row in range(start, stop)}


def tidy(runs: list[tuple[int, int]]) -> bool:
    """Whether runs ascend, are not empty and do not overlap."""
    return all(one[0] < one[1] <= other[0] for one, other in itertools.pairwise([*runs, (1 << 20, 0)]))


@given(RUNS, RUNS)
def test_runs_are_sets_of_rows(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    for found, expected in (
        (joined([*one, *other]), rows_in(one) | rows_in(other)),
        (common(one, other), rows_in(one) & rows_in(other)),
        (without(one, other), rows_in(one) - rows_in(other)),
    ):
        assert rows_in(found) == expected
        assert count_of(found) == len(expected)
        assert tidy(found)


@given(RUNS, st.integers(1, 20), st.integers(1, 8))
def test_runs_are_cut_into_parts_alike(runs: list[tuple[int, int]], most: int, block: int) -> None:
    groups = cut(runs, most, block)
    assert [row for group in groups for start, stop in group for row in range(start, stop)] == sorted(rows_in(runs))
    assert all(tidy(group) and count_of(group) < 2 * most + block for group in groups)


def _segments(draw: random.Random, rows: int) -> Iterator[Segment]:
    for number in range(draw.randint(0, 40)):
        start = draw.randrange(rows)
        yield Segment(number, ((start, draw.randint(start + 1, rows)),))


@given(st.integers(0, 10_000), st.integers(1, 600), st.integers(1, 8))
def test_what_is_kept_and_written_are_all_rows(seed: int, rows: int, block: int) -> None:
    draw = random.Random(seed)
    before = SegmentManifest(None, 1, rows, rows, None, rows, True, (), tuple(_segments(draw, rows)))
    start = draw.randrange(rows)
    left = without([(0, rows)], [(start, draw.randint(start, rows))])
    kept = merged({one: runs for one, runs in before.valid(left) if runs}, rows, block)
    new = written(kept, rows, block, 99)
    found = [row for runs in kept.values() for row in rows_in(list(runs))]
    found += [row for segment in new for row in rows_in(list(segment.runs))]
    assert sorted(found) == list(range(rows))
    assert sum(one.rows - count_of(runs) for one, runs in kept.items()) <= max(rows // 4, block)
