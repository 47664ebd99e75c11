"""Random histories of writes, dumps, kills and loads: what is loaded is what the buffer held at that dump."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.checkpointers import segments
from rbtool.core.format import syncing
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage

STEPS = 8
LAST_OPERATION = 110
"""More than most dumps of these buffers announce: a third of the processes are not killed."""
State = list[tuple[int, float]]


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have segments of few rows, all of them mapped, without waiting for the disk: no test pulls the plug."""

    def run_in_turn(calls: Sequence[Callable[[], None]], at_once: int) -> None:
        for call in calls:
            call()

    monkeypatch.setattr(segments, "_FEWEST_BYTES", 24)
    monkeypatch.setattr(segments, "_MAPPED_FROM", 1)
    monkeypatch.setattr(segments, "_ALIKE", 2)
    monkeypatch.setattr(segments, "_LARGE", 2)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(syncing, "run_together", run_in_turn)


class History:
    """A buffer with edits at random, and a model of it: the rows in their order, and those at the last dump."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        self.kind: Any = self.random.choice([LazyTensorStorage, LazyMemmapStorage])
        self.capacity = self.random.randint(1, 40)
        self.buffer = self.empty()
        self.model: State = []
        self.next = 0
        self.number = 0
        self.folder = folder
        self.saved: dict[str, State] = {}
        self.held: list[Any] = []

    def empty(self) -> ReplayBuffer:
        return ReplayBuffer(storage=self.kind(self.capacity))

    def rows(self, count: int) -> tuple[TensorDict, State]:
        numbers = torch.arange(self.number, self.number + count)
        self.number += count
        return TensorDict({"a": numbers, "b": numbers / 4}, [count]), [(int(n), n.item() / 4) for n in numbers]

    def extend(self) -> None:
        data, rows = self.rows(self.random.randint(1, self.capacity))
        self.buffer.extend(data)
        for row in rows:
            self.model[self.next : self.next + 1] = [row]
            self.next = (self.next + 1) % self.capacity

    def edit(self) -> None:
        if self.model:
            data, rows = self.rows(1)
            place = self.random.randrange(len(self.model))
            self.buffer.storage[place] = data[0]
            self.model[place] = rows[0]

    def lend(self) -> None:
        if self.model:
            self.held = [self.buffer.storage[: len(self.model)]]

    def edit_in_place(self) -> None:
        if self.held:
            data, rows = self.rows(1)
            place = self.random.randrange(len(self.held[0]))
            self.held[0]["a"][place], self.held[0]["b"][place] = data[0]["a"], data[0]["b"]
            if place < len(self.model):
                self.model[place] = rows[0]

    def clear(self) -> None:
        self.buffer.empty()
        self.model, self.next = [], 0

    def dump(self) -> None:
        name = self.random.choice(["one", "one", "two"])
        self.buffer.dumps(self.folder / name)
        self.saved[name] = list(self.model)

    def killed_dump(self) -> None:
        name = self.random.choice(["one", "two"])
        ended = self.dump_in_child(name, self.random.randint(0, LAST_OPERATION))
        if (self.folder / name).exists():
            found = state_of(self.loaded(name))
            assert found in ([self.model] if not ended else [self.model, self.saved.get(name)])
            self.saved[name] = found
        else:
            assert ended == -signal.SIGKILL
            assert name not in self.saved

    def dump_in_child(self, name: str, operations: int) -> int:
        """Dump in a process that is killed after so many changes of the file system; return how it ended."""
        child = os.fork()
        if not child:
            left = iter(range(operations))

            def strike(event: str, _: object) -> None:
                if event == "rbtool.fs" and next(left, -1) < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            gc.disable()
            sys.addaudithook(strike)
            try:
                self.buffer.dumps(self.folder / name)
                os._exit(0)
            finally:
                os._exit(1)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert ended in {0, -signal.SIGKILL}
        return ended

    def load(self) -> None:
        """Go on with what was saved, in this buffer or in a new one."""
        if self.saved:
            name = self.random.choice(list(self.saved))
            if self.random.random() < 0.5:
                self.buffer, self.held = self.empty(), []
            self.buffer.loads(self.folder / name)
            self.model = list(self.saved[name])
            self.next = self.buffer.writer.cursor

    def restore(self) -> None:
        """Put an older copy of a checkpoint in its place, as from a backup."""
        kept = self.folder / "backup"
        if kept.exists() and self.random.random() < 0.5:
            shutil.rmtree(self.folder / "one", ignore_errors=True)
            kept.rename(self.folder / "one")
            self.saved["one"] = self.saved.pop("backup")
        elif "one" in self.saved and not kept.exists():
            shutil.copytree(self.folder / "one", kept)
            self.saved["backup"] = list(self.saved["one"])

    def loaded(self, name: str) -> ReplayBuffer:
        other = ReplayBuffer(storage=LazyTensorStorage(self.capacity))
        other.loads(self.folder / name, verify=True)
        return other

    def run(self, steps: int) -> None:
        deeds = [self.edit, self.lend, self.load, self.restore, self.clear]
        deeds += [self.extend, self.edit_in_place, self.dump] * 3
        if self.random.random() < 0.1:  # a fork costs as much as all else
            deeds += [self.killed_dump] * 2
        for _ in range(steps):
            self.random.choice(deeds)()
            assert state_of(self.buffer) == self.model
        for name, expected in self.saved.items():
            assert state_of(self.loaded(name)) == expected


def state_of(buffer: ReplayBuffer) -> State:
    if not len(buffer):
        return []
    rows = buffer.storage[torch.arange(len(buffer))]
    return list(zip(rows["a"].tolist(), rows["b"].tolist(), strict=True))


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory where the system has one."""
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


def run_histories(seeds: range, memory: Path) -> None:
    for seed in seeds:
        folder = memory / str(seed)
        folder.mkdir()
        try:
            History(seed, folder).run(STEPS)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        shutil.rmtree(folder)


def test_loaded_rows_are_those_of_the_last_dump(memory: Path) -> None:
    run_histories(range(80), memory)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 10_000, 1_000))
def test_loaded_rows_are_those_of_the_last_dump_in_ten_thousand_histories(memory: Path, first: int) -> None:
    run_histories(range(first, first + 1_000), memory)
