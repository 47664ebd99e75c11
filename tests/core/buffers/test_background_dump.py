"""Dumps that finish in the background: of one instant, in order, and no failure is lost."""

import errno
import gc
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from waiting import HANG

import rbtool
from rbtool import BackgroundDump, LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from rbtool.core.errors import OutOfSpaceError, UsageError

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
def test_it_holds_the_rows_as_of_the_call(kind: str, tmp_path: Path, disk: Disk) -> None:
    buffer = buffer_of(kind)
    handle = buffer.dumps(tmp_path / "saved", background=True)
    assert isinstance(handle, BackgroundDump)
    buffer.extend(rows(1000, 45))  # writers go on, over the first rows, too
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
    first.result()
    elsewhere.result()
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
            while not handle.done():
                time.sleep(0.01)
        del handle
        gc.collect()
        disk.ready.set()
        for thread in threading.enumerate():
            if thread.name == "rbtool-dump":
                thread.join()
    assert [one.category for one in found] == [RuntimeWarning]
    assert str(tmp_path / "saved") in str(found[0].message)
    assert "broken" in str(found[0].message)


def test_a_success_that_nobody_asks_for_is_no_news(tmp_path: Path) -> None:
    for _ in range(3):
        buffer_of().dumps(tmp_path / "saved", background=True)
    buffer_of(count=7).dumps(tmp_path / "saved")
    assert loaded(tmp_path / "saved") == list(range(7))


def test_what_fails_at_the_call_is_raised_there(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match=r"mine\.txt"):
        buffer_of().dumps(tmp_path / "notes", background=True)
    buffer_of().dumps(tmp_path / "saved", background=True).result()  # and the destination is free again


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


@pytest.mark.parametrize("state", ["whole", "broken"])
def test_the_end_of_the_program_waits_for_it(tmp_path: Path, state: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "saved", state], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "saved").is_dir() == (state == "whole")
    assert ("RuntimeWarning: the background dump to" in done.stderr) == (state == "broken"), done.stderr


def test_a_forked_process_has_no_part_in_it(tmp_path: Path, disk: Disk) -> None:
    buffer = buffer_of()
    handle = buffer.dumps(tmp_path / "saved", background=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(UsageError, match="runs in the process"):
                handle.result(HANG)
            disk.ready.set()
            buffer.dumps(tmp_path / "child", durable="none")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    disk.ready.set()
    handle.result()
    assert loaded(tmp_path / "saved") == loaded(tmp_path / "child") == list(range(30))


def test_an_ensemble_dumps_in_the_background(tmp_path: Path, disk: Disk) -> None:
    members = [buffer_of(count=10), buffer_of("flat", 20)]
    ensemble = rbtool.ReplayBufferEnsemble(*members, batch_size=4)
    handle = ensemble.dumps(tmp_path / "saved", background=True)
    members[0].extend(rows(10, 7))
    disk.ready.set()
    handle.result()
    found = rbtool.ReplayBufferEnsemble(buffer_of(count=0), buffer_of("flat", 0), batch_size=4)
    found.loads(tmp_path / "saved")
    assert found.storage.sizes == [10, 20]


@pytest.mark.parametrize("seed", range(3))
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
