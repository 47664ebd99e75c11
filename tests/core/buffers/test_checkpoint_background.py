"""Dumps in the background: of one instant, in order, and no failure is lost."""

from __future__ import annotations

import copy
import errno
import gc
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import in_a_child
from tensordict import TensorDict
from waiting import HANG, wait_until

import rbtool
from rbtool import (
    BackgroundDump,
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    NestedStorageCheckpointer,
    ReplayBufferEnsemble,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)
from rbtool.core.checkpointers import segments
from rbtool.core.errors import OutOfSpaceError, UsageError
from rbtool.core.format import open_files
from rbtool.core.storages import write_log
from rbtool.core.storages.write_log import Snapshot

KINDS: dict[str, Any] = {
    "default": LazyTensorStorage,
    "memmap": LazyMemmapStorage,
    "flat": lambda size: LazyTensorStorage(size, checkpointer=rbtool.FlatStorageCheckpointer()),
    "h5": lambda size: LazyTensorStorage(size, checkpointer=rbtool.H5StorageCheckpointer()),
    "list": ListStorage,
}


def rows(start: int, count: int) -> TensorDict:
    """Steps that count themselves, in episodes of five."""
    number = torch.arange(start, start + count).unsqueeze(-1)
    after = {"observation": number + 1, "done": number % 5 == 4, "reward": number.double()}
    return TensorDict({"observation": number, "next": TensorDict(after, [count])}, [count])


def buffer_of(kind: str = "default", count: int = 30, size: int = 60) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=KINDS[kind](size), batch_size=4)
    if count:
        buffer.extend(rows(0, count))
    return buffer


def loaded(place: Path, kind: str = "default") -> list[int]:
    """The steps of a checkpoint, by their numbers."""
    found = buffer_of(kind, 0)
    found.loads(place)
    values: list[int] = found[:]["observation"].flatten().tolist()
    return values


class Disk:
    """A disk that waits, or fails, when files are synced in the background."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.error: OSError | None = None
        self._sync = os.fsync

    def fsync(self, descriptor: int) -> None:
        if threading.current_thread().name.startswith("rbtool"):
            assert self.ready.wait(HANG)
            if self.error is not None:
                raise self.error
        self._sync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk()
    monkeypatch.setattr(os, "fsync", found.fsync)
    yield found
    found.ready.set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_background_dump_holds_the_rows_as_of_the_call(kind: str, tmp_path: Path, disk: Disk) -> None:
    buffer = buffer_of(kind)
    handle = buffer.dumps(tmp_path / "saved", background=True)
    assert isinstance(handle, BackgroundDump)
    buffer.extend(rows(1000, 45))  # also over the first rows
    assert not handle.done()
    assert not (tmp_path / "saved").exists()
    with pytest.raises(TimeoutError):
        handle.result(timeout=0.01)
    disk.ready.set()
    handle.result()
    assert handle.done()
    assert loaded(tmp_path / "saved", kind) == list(range(30))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_the_next_dump_to_a_destination_waits(tmp_path: Path, disk: Disk) -> None:
    buffer = buffer_of()
    first = buffer.dumps(tmp_path / "saved", background=True)
    elsewhere = buffer.dumps(tmp_path / "elsewhere", background=True)
    buffer.extend(rows(30, 10))
    second = threading.Thread(target=buffer.dumps, args=(tmp_path / "saved",))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    buffer.extend(rows(40, 3))  # which does not keep writers waiting
    disk.ready.set()
    second.join()
    for handle in (first, elsewhere):
        handle.result()
    assert loaded(tmp_path / "saved") == list(range(43))
    assert loaded(tmp_path / "elsewhere") == list(range(30))


def test_a_failure_is_raised_by_result_and_leaves_the_older_one(tmp_path: Path, disk: Disk) -> None:
    disk.ready.set()
    buffer = buffer_of()
    buffer.dumps(tmp_path / "saved")
    disk.error = OSError(errno.EIO, "the disk is broken")
    buffer.extend(rows(30, 5))
    handle = buffer.dumps(tmp_path / "saved", background=True)
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            handle.result()
    assert "failed" in repr(handle)
    disk.error = None
    assert loaded(tmp_path / "saved") == list(range(30))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    buffer.dumps(tmp_path / "saved", background=True).result()
    assert loaded(tmp_path / "saved") == list(range(35))


@pytest.mark.parametrize("fails_first", [True, False])
def test_a_failure_that_nobody_asks_for_is_reported(tmp_path: Path, disk: Disk, fails_first: bool) -> None:
    disk.error = OSError(errno.EIO, "the disk is broken")
    handle = buffer_of().dumps(tmp_path / "saved", background=True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if fails_first:
            disk.ready.set()
            wait_until(handle.done, "the end of the dump")
        del handle
        gc.collect()
        disk.ready.set()
        for thread in threading.enumerate():
            if thread.name == "rbtool-dump":
                thread.join()
    ((message, category),) = [(str(one.message), one.category) for one in found]
    assert category is RuntimeWarning
    assert str(tmp_path / "saved") in message
    assert "broken" in message


def test_a_success_that_nobody_asks_for_is_not_reported(tmp_path: Path) -> None:
    for _ in range(3):
        buffer_of().dumps(tmp_path / "saved", background=True)
    buffer_of(count=7).dumps(tmp_path / "saved")
    assert loaded(tmp_path / "saved") == list(range(7))


def test_errors_of_the_call_are_raised_there(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match=r"mine\.txt"):
        buffer_of().dumps(tmp_path / "notes", background=True)
    (tmp_path / "notes" / "mine.txt").unlink()
    buffer_of().dumps(tmp_path / "notes", background=True).result()  # the destination is not taken any more


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"mounting a small file system needs root: {made.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("kind", ["default", "flat"])
def test_a_full_disk_leaves_the_older_checkpoint(kind: str, small_disk: Path) -> None:
    buffer_of(kind).dumps(small_disk / "saved", background=True).result()
    large = buffer_of(kind, 20_000, 20_000)
    with pytest.raises(OutOfSpaceError):
        large.dumps(small_disk / "saved", background=True).result()
    assert loaded(small_disk / "saved", kind) == list(range(30))
    assert [path.name for path in small_disk.iterdir()] == ["saved"]


def test_checkpoints_next_to_writers_are_of_one_instant(tmp_path: Path) -> None:
    """Two threads write ten rows at a time while dumps follow one another: none has half a write."""
    buffer, lock, written = buffer_of(count=10), threading.Lock(), [10]
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            with lock:
                buffer.extend(rows(written[0], 10))
                written[0] += 10
            time.sleep(0.001)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for number in range(12):
            before = written[0]
            handle = buffer.dumps(tmp_path / str(number % 3), background=True)
            after = written[0] + 10
            handle.result()
            found = loaded(tmp_path / str(number % 3))
            newest = max(found)
            assert sorted(found) == list(range(max(0, newest - 59), newest + 1))
            assert newest % 10 == 9
            assert before - 1 <= newest < after + 10
    finally:
        ended.set()
        for writer in writers:
            writer.join()


SCRIPT = """
import os, sys, threading, time
import torch
from tensordict import TensorDict
import rbtool

buffer = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(9))
buffer.extend(TensorDict({"a": torch.arange(9)}, [9]))
sync = os.fsync
def slow(descriptor):
    time.sleep(0.05)
    if sys.argv[2] == "broken":
        raise OSError(5, "the disk is broken")
    sync(descriptor)
os.fsync = slow
own = rbtool.core.storages.write_log.Snapshot.parts
def late(snapshot):
    while threading.main_thread().is_alive():  # the program ends before rows are written
        time.sleep(0.01)
    yield from own(snapshot)
rbtool.core.storages.write_log.Snapshot.parts = late
handle = buffer.dumps(sys.argv[1], background=True)
assert not handle.done()
"""


@pytest.mark.parametrize("state", ["whole", pytest.param("broken", marks=pytest.mark.slow)])
def test_the_end_of_the_program_waits_for_it(tmp_path: Path, state: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "saved", state], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved").is_dir() == (state == "whole")
    assert ("RuntimeWarning: the background dump to" in done.stderr) == (state == "broken"), done.stderr


def test_a_forked_child_cannot_wait_for_the_dump_and_makes_its_own(tmp_path: Path, disk: Disk) -> None:
    buffer = buffer_of()
    handle = buffer.dumps(tmp_path / "saved", background=True)

    def dump() -> None:
        with pytest.raises(UsageError, match="runs in the process"):
            handle.result(HANG)
        disk.ready.set()
        buffer.dumps(tmp_path / "child", durable="none")

    assert in_a_child(dump) is None
    disk.ready.set()
    handle.result()
    assert loaded(tmp_path / "saved") == loaded(tmp_path / "child") == list(range(30))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_histories_with_failures_share_only_what_is_the_same(tmp_path: Path, disk: Disk, seed: int) -> None:
    """Writes, dumps that fail or not, and loads, against a model; segments have 16 rows, and are shared."""
    disk.ready.set()
    draw, model, saved = random.Random(seed), torch.zeros(0), torch.zeros(0)
    buffer = rbtool.ReplayBuffer(storage=LazyTensorStorage(80), batch_size=4)
    for step in range(40):
        count = draw.randint(1, 20)
        values = torch.full((count,), float(step)) + torch.arange(count) / 100
        buffer.extend(TensorDict({"a": values.unsqueeze(-1).expand(count, 16_384)}, [count]))
        model = torch.cat([model, values])[-80:]
        disk.error = OSError(errno.EIO, "the disk is broken") if draw.random() < 0.3 else None
        handle = buffer.dumps(tmp_path / "saved", background=True)
        if disk.error is None:
            handle.result()
            saved = model
        else:
            with pytest.raises(OSError, match="broken"):
                handle.result()
            disk.error = None
        if not len(saved):
            continue
        other = rbtool.ReplayBuffer(storage=LazyTensorStorage(80), batch_size=4)
        other.loads(tmp_path / "saved", verify=True)
        found = other[:]["a"]
        assert torch.equal(found[:, 0].sort()[0], saved.sort()[0])
        assert bool((found == found[:, :1]).all())
        if draw.random() < 0.2:  # continue from what was loaded, mapped segments included
            buffer, model = other, saved


# The buffer as of the call, whatever is written before the rows were read -------------------------


CAPACITY = 40
STORAGES: dict[str, Any] = {
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

    never_empty, verify = False, True

    def __init__(self, kind: str, seed: int) -> None:
        self.draw, self.kind, self.number, self.views = random.Random(seed), kind, 0, list[Any]()
        self.buffer = self.empty_buffer()

    def empty_buffer(self) -> TensorDictPrioritizedReplayBuffer:
        return TensorDictPrioritizedReplayBuffer(
            storage=STORAGES[self.kind](CAPACITY), alpha=0.7, beta=0.9, batch_size=3, priority_key="error"
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
            self.buffer[(slice(None), chosen) if self.kind == "lanes" else chosen] = data

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

    def another(self, seeds: int) -> Any:
        """An empty one of the same kind."""
        return Story(self.kind, self.draw.randrange(seeds))

    def load(self) -> None:
        other = self.another(9)
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
        often = [self.add, self.replace, self.replace_in_storage, *[self.extend, self.prioritize] * 2]
        rare = [self.empty, self.extend]
        if lends:
            rare += [self.edit_entry, self.view, self.edit_view, self.load]
        self.draw.choice(self.draw.choice([often, often, rare]))()

    def loaded(self, place: Path) -> Any:
        found = self.another(1 << 30)
        found.number = self.number
        found.buffer.loads(place, verify=self.verify)
        return found


@pytest.mark.parametrize("lends", [False, True], ids=["apart", "lent"])
@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_a_background_dump_is_the_state_as_of_the_call(
    kind: str, seed: int, lends: bool, tmp_path: Path, gate: Gate
) -> None:
    """Changes at random between the reads of single rows; now and then, the buffer continues from what was loaded."""
    require_states_as_of_calls(Story(kind, seed), 6, lends, tmp_path, gate)


def require_states_as_of_calls(story: Story, dumps: int, lends: bool, folder: Path, gate: Gate) -> None:
    for _ in range(dumps):
        for _ in range(story.draw.randint(0, 3)):
            story.change(lends=lends)
        if story.never_empty and not len(story.buffer):
            story.extend()
        expected = story.state()
        gate.open = lends  # who needs references waits for the reader
        handle = story.buffer.dumps(folder / "saved", background=True)
        for _ in range(story.draw.randint(0, 6)):
            story.change(lends=lends)
            for _ in range(story.draw.randint(0, 5)):
                gate.steps.release()
        gate.open = True
        handle.result(HANG)
        again = story.loaded(folder / "saved")
        assert same(again.state(), expected)
        assert not story.buffer.storage.log.snapshots
        assert [path.name for path in folder.iterdir()] == ["saved"]
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
    require_captured(begun, tmp_path, gate)


def require_captured(begun: Begun, folder: Path, gate: Gate) -> None:
    """The rows may be replaced before the dump has read them."""
    story, expected, handle = begun
    story.extend()
    story.empty()
    story.extend()
    assert not handle.done()
    gate.open = True
    handle.result(HANG)
    assert same(story.loaded(folder / "saved").state(), expected)


def test_old_rows_are_kept_up_to_a_limit(
    begun: Begun, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_changes_past_the_buffer_wait_for_the_dump(way: str, begun: Begun, tmp_path: Path, gate: Gate) -> None:
    story, expected, handle = begun
    storage = story.buffer.storage

    def view() -> None:
        story.view()
        story.edit_view()

    ways: dict[str, Callable[[], Any]] = {
        "view": view,
        "contents": lambda: storage.contents["a"].fill_(-1),
        "fork": lambda: in_a_child(story.extend),
        "share": storage.share,
    }
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
        in_a_child(time.sleep, 0)
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


def test_two_dumps_at_once_are_of_their_calls(begun: Begun, tmp_path: Path, gate: Gate) -> None:
    story, first, handle = begun
    story.replace()
    second = story.state()
    other = story.buffer.dumps(tmp_path / "other", background=True)
    story.replace()
    story.extend()
    gate.open = True
    for dump, name, expected in ((handle, "saved", first), (other, "other", second)):
        dump.result(HANG)
        assert same(story.loaded(tmp_path / name).state(), expected)


# All forms of checkpoints, and ensembles ----------------------------------------------------------


FORMS: dict[str, Callable[[], Any]] = {
    "flat": FlatStorageCheckpointer,
    "nested": NestedStorageCheckpointer,
    "h5": H5StorageCheckpointer,
    "gzip": partial(H5StorageCheckpointer, h5_kwargs={"compression": "gzip"}),
    "compatible": partial(TensorStorageCheckpointer, compatible=True),
}


class Episodes(Story):
    """Random changes of a buffer of short episodes, whose storage has a checkpointer of some form."""

    never_empty, verify = True, False

    def __init__(self, kind: str, seed: int, form: str) -> None:
        self.form = form
        super().__init__(kind, seed)

    def empty_buffer(self) -> Any:
        buffer = super().empty_buffer()
        buffer.storage.checkpointer = FORMS[self.form]()
        return buffer

    def rows(self, count: int) -> TensorDict:
        rows = super().rows(count)
        shape = rows.batch_size
        end = torch.tensor([self.draw.random() < 0.3 for _ in range(shape.numel())]).view(*shape, 1)
        after = {"done": end, "reward": torch.rand(*shape, 1), "a": rows["a"] + 1 / 64}
        return rows.set("next", TensorDict(after, shape))

    def another(self, seeds: int) -> Episodes:
        return Episodes(self.kind, self.draw.randrange(seeds), self.form)


@pytest.mark.parametrize(
    ("form", "kind", "lends"),
    [
        pytest.param(form, kind, (one + two) % 2 == 0, id=f"{form}-{kind}")
        for one, form in enumerate(FORMS)
        for two, kind in enumerate(("memory", "memmap", "lanes", "open"))
    ],
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_every_form_is_the_state_as_of_the_call(
    kind: str, form: str, seed: int, lends: bool, tmp_path: Path, gate: Gate
) -> None:
    story = Episodes(kind, seed, form)
    story.extend()
    lends = lends == (seed % 2 == 0)
    require_states_as_of_calls(story, 4, lends, tmp_path, gate)


def filled_episodes(form: str) -> Episodes:
    story = Episodes("memory", 0, form)
    story.buffer.extend(story.rows(CAPACITY))
    return story


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_returns_before_rows_are_read(
    form: str, maps: bool, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not maps:
        monkeypatch.setattr(open_files, "_LOCAL", frozenset())
    story = filled_episodes(form)
    expected, gate.open = story.state(), False
    handle = story.buffer.dumps(tmp_path / "saved", background=True)
    require_captured((story, expected, handle), tmp_path, gate)


@pytest.mark.parametrize("form", ["flat", "nested", "h5"])
def test_data_that_a_form_cannot_hold_is_reported_by_result(form: str, tmp_path: Path) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4, checkpointer=FORMS[form]()), batch_size=2)
    buffer.extend(TensorDict({"a": torch.zeros(3)}, [3]))
    handle = buffer.dumps(tmp_path / "saved", background=True)
    with pytest.raises(RuntimeError, match="done"):
        handle.result(HANG)
    assert not list(tmp_path.iterdir())
    assert not buffer.storage.log.snapshots


@pytest.mark.parametrize("form", ["flat", "nested", "h5"])  # which needs load hooks then
def test_save_hooks_look_at_the_rows_at_the_call(form: str, tmp_path: Path, gate: Gate) -> None:
    story = filled_episodes(form)
    seen: list[Any] = []
    story.buffer.storage.checkpointer.register_save_hook(lambda data, path=None: seen.append(path) or data)
    expected = story.state()
    handle = story.buffer.dumps(tmp_path / "saved", background=True)
    assert len(seen) == 1
    story.extend()
    handle.result(HANG)
    assert same(story.loaded(tmp_path / "saved").state()["rows"], expected["rows"])


def test_an_ensemble_captures_its_members(tmp_path: Path, gate: Gate) -> None:
    """Of a list, which cannot be captured, the rows are written at the call; a member without rows has none."""

    def members() -> list[TensorDictReplayBuffer]:
        mapped = LazyMemmapStorage(CAPACITY, checkpointer=FlatStorageCheckpointer())
        storages = [LazyTensorStorage(CAPACITY), mapped, ListStorage(CAPACITY), LazyTensorStorage(CAPACITY)]
        return [TensorDictReplayBuffer(storage=storage, batch_size=4) for storage in storages]

    def rows(number: float) -> TensorDict:
        end = torch.arange(CAPACITY).view(-1, 1) % 5 == 4
        value = torch.full((CAPACITY, 3), number)
        return TensorDict({"a": value, "next": {"a": value, "done": end, "reward": end.float()}}, [CAPACITY])

    def held(buffers: list[TensorDictReplayBuffer]) -> list[float]:
        return [float(buffer[torch.arange(len(buffer))]["a"].mean()) for buffer in buffers if len(buffer)]

    story, other = members(), members()
    for number, buffer in enumerate(story[:3]):
        buffer.extend(rows(number + 1.0))
    ensemble = ReplayBufferEnsemble(*story, batch_size=8, p=[0.4, 0.3, 0.3, 0.0])
    for repeat in range(2):
        gate.open, expected = False, held(story)
        handle = ensemble.dumps(tmp_path / "saved", background=True)
        for number, buffer in enumerate(story[:3]):
            buffer.extend(rows(10.0 * number + repeat))
        assert not handle.done()
        gate.open = True
        handle.result(HANG)
        ReplayBufferEnsemble(*other, batch_size=8, p=[0.4, 0.3, 0.3, 0.0]).loads(tmp_path / "saved")
        assert held(other) == expected
        assert all(not buffer.storage.log.snapshots for buffer in story[:2])
