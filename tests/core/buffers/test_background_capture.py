"""Dumps in the background hold the buffer as of the call, whatever is written before the rows were read."""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from waiting import HANG

from rbtool import BackgroundDump, LazyMemmapStorage, LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from rbtool.core.checkpointers import segments
from rbtool.core.storages import write_log
from rbtool.core.storages.write_log import Snapshot

CAPACITY = 40
KINDS: dict[str, Any] = {
    "memory": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
    "consolidated": partial(LazyTensorStorage, consolidated=True),
    "lanes": partial(LazyTensorStorage, ndim=2),
    "open": partial(LazyTensorStorage, schema="open"),
}


def same(one: Any, other: Any) -> bool:
    """Compare states: nests of dicts, tensors and numbers."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    return bool(one == other)


class Gate:
    """A reader that passes one read at a time when it is closed, and reads at its own pace when it is open."""

    def __init__(self) -> None:
        self.steps, self.open, self.late = threading.Semaphore(0), True, False

    def read(self, own: Callable[..., Iterator[memoryview]], *arguments: Any) -> Iterator[memoryview]:
        for data in own(*arguments):
            yield data
            end = time.monotonic() + HANG
            while not self.open and not self.steps.acquire(timeout=0.01):
                if time.monotonic() > end:
                    self.open = self.late = True  # something waits that should not


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Small segments that are read row by row, at a gate."""
    found, own = Gate(), Snapshot.read
    monkeypatch.setattr(segments, "_FEWEST_BYTES", 24)
    monkeypatch.setattr(segments, "_MAPPED_FROM", 1)
    monkeypatch.setattr(segments, "_ALIKE", 2)
    monkeypatch.setattr(segments, "_LARGE", 2)
    monkeypatch.setattr(write_log, "_CHUNK", 16)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(Snapshot, "read", lambda *arguments: found.read(own, *arguments))
    yield found
    found.open = True
    assert not found.late


class Story:
    """A prioritized buffer, and random changes of it."""

    def __init__(self, kind: str, seed: int) -> None:
        self.draw, self.kind, self.number, self.views = random.Random(seed), kind, 0, list[Any]()
        self.buffer = self.empty_buffer()

    def empty_buffer(self) -> TensorDictPrioritizedReplayBuffer:
        return TensorDictPrioritizedReplayBuffer(
            storage=KINDS[self.kind](CAPACITY), alpha=0.7, beta=0.9, batch_size=3, priority_key="error"
        )

    def rows(self, count: int) -> TensorDict:
        shape = [2, count] if self.kind == "lanes" else [count]
        self.number += 1
        numbers = self.number + torch.arange(count).expand(shape) / 64
        data = {"a": numbers.clone(), "b": numbers.bfloat16(), "none": torch.zeros(*shape, 0)}
        return TensorDict({**data, "n": {"c": (numbers * 8).long().unsqueeze(-1)}}, shape)

    def extend(self) -> None:
        self.buffer.extend(self.rows(self.draw.randint(1, 2 * CAPACITY if self.kind != "lanes" else CAPACITY // 2)))

    def add(self) -> None:
        if self.kind != "lanes":
            self.buffer.add(self.rows(1)[0])

    def replace(self) -> None:
        if rows := self.buffer.storage.shape[0]:
            count = self.draw.randint(1, rows)
            data = self.rows(count)
            chosen = torch.tensor([self.draw.randrange(rows) for _ in range(count)])
            if self.kind == "lanes":
                self.buffer[:, chosen] = data
            else:
                self.buffer[chosen] = data

    def replace_in_storage(self) -> None:
        storage = self.buffer.storage
        if rows := storage.shape[0]:
            count = self.draw.randint(1, rows)
            others = torch.tensor([self.draw.randrange(rows) for _ in range(count)])
            start = self.draw.randint(0, rows - count)
            storage[start : start + count] = storage[others]

    def prioritize(self) -> None:
        if len(self.buffer):
            batch = self.buffer.sample()
            batch["error"] = torch.rand(len(batch)) * 9
            self.buffer.update_tensordict_priority(batch)

    def empty(self) -> None:
        self.buffer.empty()

    def edit_entry(self) -> None:
        if len(self.buffer):
            self.buffer.set_("a", torch.full(self.buffer[:]["a"].shape, float(self.number)))

    def view(self) -> None:
        if len(self.buffer):
            self.views.append(self.buffer.storage[0 : self.buffer.storage.shape[0]])

    def edit_view(self) -> None:
        for view in self.views:
            view["a"].fill_(-float(self.draw.random()))

    def load(self) -> None:
        other = Story(self.kind, self.draw.randrange(9))
        other.extend()
        self.buffer.load_state_dict(other.buffer.state_dict())

    def state(self) -> dict[str, Any]:
        rows = self.buffer.storage.shape[0]
        held = {}
        if len(self.buffer):
            found = self.buffer.storage[torch.arange(rows)]
            held = {str(key): value.clone() for key, value in found.items(True, True)}
        return {
            "rows": held,
            "writer": copy.deepcopy(self.buffer.writer.state_dict()),
            "sampler": copy.deepcopy(self.buffer.sampler.state_dict()),
        }

    def change(self, *, lends: bool) -> None:
        often = [
            self.extend,
            self.extend,
            self.add,
            self.replace,
            self.replace_in_storage,
            self.prioritize,
            self.prioritize,
        ]
        rare = [self.empty, self.extend]
        if lends:
            rare += [self.edit_entry, self.view, self.edit_view, self.load]
        self.draw.choice(self.draw.choice([often, often, rare]))()

    def loaded(self, place: Path) -> Story:
        found = Story(self.kind, self.draw.randrange(1 << 30))
        found.number = self.number
        found.buffer.loads(place, verify=True)
        return found


@pytest.mark.parametrize("lends", [False, True], ids=["apart", "lent"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_it_is_the_state_as_of_the_call(kind: str, seed: int, lends: bool, tmp_path: Path, gate: Gate) -> None:
    """Changes at random between the reads of single rows; the buffer goes on from what was loaded now and then."""
    story = Story(kind, seed)
    for _ in range(6):
        for _ in range(story.draw.randint(0, 3)):
            story.change(lends=lends)
        expected = story.state()
        gate.open = lends  # who needs references waits for the reader
        handle = story.buffer.dumps(tmp_path / "saved", background=True)
        for _ in range(story.draw.randint(0, 6)):
            story.change(lends=lends)
            for _ in range(story.draw.randint(0, 5)):
                gate.steps.release()
        gate.open = True
        handle.result(HANG)
        again = story.loaded(tmp_path / "saved")
        assert same(again.state(), expected)
        assert not story.buffer.storage.log.snapshots
        if story.draw.random() < 0.3:
            story = again


def filled(kind: str = "memory") -> Story:
    story = Story(kind, 0)
    story.buffer.extend(story.rows(CAPACITY // (1 + (kind == "lanes"))))
    return story


@pytest.fixture
def begun(tmp_path: Path, gate: Gate) -> tuple[Story, dict[str, Any], BackgroundDump]:
    """A dump of which nothing was read yet."""
    story = filled("memmap")
    expected, gate.open = story.state(), False
    return story, expected, story.buffer.dumps(tmp_path / "saved", background=True)


Begun = tuple[Story, dict[str, Any], BackgroundDump]


def test_the_call_returns_before_rows_are_read(begun: Begun, tmp_path: Path, gate: Gate) -> None:
    story, expected, handle = begun
    story.extend()
    story.empty()
    story.extend()
    assert not handle.done()
    gate.open = True
    handle.result(HANG)
    assert same(story.loaded(tmp_path / "saved").state(), expected)


def test_what_is_kept_is_bounded(begun: Begun, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    story, expected, handle = begun
    monkeypatch.setattr(write_log, "_MOST_KEPT", 100)
    writer = threading.Thread(target=lambda: [story.replace() for _ in range(4)])
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()  # it replaces more than may be kept
    (snapshot,) = story.buffer.storage.log.snapshots
    assert snapshot._bytes <= 100
    gate.open = True
    writer.join(HANG)
    handle.result(HANG)
    assert same(story.loaded(tmp_path / "saved").state(), expected)


@pytest.mark.parametrize("way", ["view", "contents", "fork", "share"])
def test_what_cannot_be_followed_waits(way: str, begun: Begun, tmp_path: Path, gate: Gate) -> None:
    story, expected, handle = begun
    storage = story.buffer.storage

    def forked() -> None:
        child = multiprocessing.get_context("fork").Process(target=story.extend)
        child.start()
        child.join()

    def contents() -> None:
        storage.contents["a"].fill_(-1)

    def view() -> None:
        story.view()
        story.edit_view()

    ways = {"view": view, "contents": contents, "fork": forked, "share": storage.share}
    other = threading.Thread(target=ways[way])
    other.start()
    other.join(0.2)
    assert other.is_alive() or way == "share"  # a memory map is shared already
    gate.open = True
    other.join(HANG)
    handle.result(HANG)
    assert same(story.loaded(tmp_path / "saved").state(), expected)


@pytest.mark.parametrize("kind", ["memory", "memmap"])
def test_rows_that_others_may_change_are_read_at_the_call(kind: str, tmp_path: Path, gate: Gate) -> None:
    story = filled(kind)
    if kind == "memory":
        story.view()
    else:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,))
        child.start()
        child.join()
    expected = story.state()
    handle = story.buffer.dumps(tmp_path / "saved", background=True)
    assert not story.buffer.storage.log.snapshots
    story.edit_view()
    story.extend()
    handle.result(HANG)
    assert same(story.loaded(tmp_path / "saved").state(), expected)


def test_a_failure_frees_writers_and_leaves_the_older_one(
    begun: Begun, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    story, expected, handle = begun
    gate.open = True
    handle.result(HANG)
    story.extend()
    gate.open = False
    broken = story.buffer.dumps(tmp_path / "saved", background=True)
    monkeypatch.setattr(Snapshot, "read", lambda *arguments: 1 / 0)
    gate.open = True
    with pytest.raises(ZeroDivisionError):
        broken.result(HANG)
    assert not story.buffer.storage.log.snapshots
    story.replace()
    assert same(story.loaded(tmp_path / "saved").state(), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_two_dumps_at_once(begun: Begun, tmp_path: Path, gate: Gate) -> None:
    story, first, handle = begun
    story.replace()
    second = story.state()
    other = story.buffer.dumps(tmp_path / "other", background=True)
    story.replace()
    story.extend()
    gate.open = True
    handle.result(HANG)
    other.result(HANG)
    assert same(story.loaded(tmp_path / "saved").state(), first)
    assert same(story.loaded(tmp_path / "other").state(), second)
