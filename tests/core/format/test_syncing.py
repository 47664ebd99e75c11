"""What is published is on the disk before: every file and folder of it, whichever verb wrote it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import each
from waiting import HANG

from rbtool.core.errors import OutOfSpaceError
from rbtool.core.format import fs, syncing
from rbtool.core.format.staging import Staging
from rbtool.core.format.syncing import NewFile, write_file


def test_outside_a_staged_folder_a_file_is_synced_at_once(tmp_path, unsynced) -> None:
    with Staging(tmp_path / "made") as staging:
        write_file(tmp_path / "beside", b"x")
        write_file(staging.path / "inside", b"y")
        assert unsynced(tmp_path / "beside") == []
        assert unsynced(staging.path / "inside") == ["."]


def test_files_beyond_those_that_are_held_are_synced_at_once(tmp_path, unsynced, monkeypatch) -> None:
    monkeypatch.setattr(syncing, "_MOST_HELD", 3)
    with Staging(tmp_path / "made") as staging:
        for number in range(5):
            write_file(staging.path / str(number), b"x")
        assert [len(unsynced(staging.path / str(number))) for number in range(5)] == [1, 1, 1, 0, 0]


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    """A limit that leaves room for about 64 more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _open_files() + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_few_descriptors_are_enough_for_many_files(tmp_path, unsynced, few_descriptors) -> None:
    with Staging(tmp_path / "made") as staging:
        for number in range(200):
            write_file(staging.path / f"{199 - number:03}", b"x")
        assert _open_files() < few_descriptors - 16
        staging.publish()
    assert unsynced(tmp_path / "made") == []


def test_a_file_is_synced_at_once_if_no_more_may_be_open(tmp_path, unsynced, few_descriptors) -> None:
    with Staging(tmp_path / "made") as staging, contextlib.ExitStack() as others:
        file = NewFile(staging.path / "inside")
        with contextlib.suppress(OSError):
            while True:
                others.callback(os.close, os.dup(file.descriptor))
        file.append(memoryview(b"abc"))
        file.sync()
        file.close()
        assert unsynced(staging.path / "inside") == []


@pytest.mark.parametrize("published", [True, False])
def test_no_descriptor_is_left_open(tmp_path: Path, published: bool) -> None:
    before = _open_files()
    with Staging(tmp_path / "made") as staging:
        for number in range(9):
            write_file(staging.path / str(number), b"x")
        assert _open_files() >= before + 9
        if published:
            staging.publish()
    assert _open_files() == before
    assert (tmp_path / "made").exists() == published


def test_a_file_that_the_disk_does_not_take_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, path: Path) -> None:
        with fs.announced("fsync", path):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fs, "wait_for_writes", full)
    with Staging(tmp_path / "made") as staging:
        write_file(staging.path / "inside", b"y")
        with pytest.raises(OutOfSpaceError):
            staging.publish()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_sync_leaves_no_thread_and_publishes_nothing(tmp_path: Path, monkeypatch) -> None:
    asked: list[Path] = []
    interrupted = threading.Event()

    def slow(descriptor: int, path: Path) -> None:
        asked.append(path)
        if threading.current_thread() is threading.main_thread():
            interrupted.set()
            raise KeyboardInterrupt
        interrupted.wait(HANG)
        time.sleep(0.1)

    with Staging(tmp_path / "made") as staging:
        for number in range(100):
            write_file(staging.path / str(number), b"y")
        monkeypatch.setattr(fs, "fsync", slow)
        with pytest.raises(KeyboardInterrupt):
            staging.publish()
    assert len(asked) < 100
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rbtool-syncs")]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("allowed", [0, 2])
def test_threads_that_cannot_be_started_are_not_needed(tmp_path, unsynced, monkeypatch, allowed) -> None:
    """A limit on memory counts their stacks, 8 MB each."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with Staging(tmp_path / "made") as staging:
        for number in range(50):
            (staging.path / str(number)).mkdir()
            write_file(staging.path / str(number) / "file", b"y")
        staging.publish()
    assert len(started) == allowed
    assert unsynced(tmp_path / "made") == []


@pytest.mark.parametrize("place", ["3", "file 3"])
def test_a_sync_that_fails_in_some_thread_is_raised(tmp_path: Path, monkeypatch, place: str) -> None:
    fsync, sync_folder = fs.fsync, fs.sync_folder

    def failing(path: Path) -> None:
        if path.name == place:
            raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(fs, "fsync", lambda descriptor, path: (fsync(descriptor, path), failing(path)))
    monkeypatch.setattr(fs, "sync_folder", lambda path: (sync_folder(path), failing(path)))
    with Staging(tmp_path / "made") as staging:
        for number in range(40):
            (staging.path / str(number)).mkdir()
            write_file(staging.path / str(number) / f"file {number}", b"y")
        with pytest.raises(OSError, match="Input/output error"):
            staging.publish()
    assert list(tmp_path.iterdir()) == []


def test_a_descriptor_that_saw_a_failure_is_the_one_that_is_synced(tmp_path: Path, monkeypatch) -> None:
    """The system reports a failed write to those that have had the file open, and to nobody who opens it later."""
    asked: list[Any] = []
    with Staging(tmp_path / "made") as staging:
        file = NewFile(staging.path / "inside")
        file.append(memoryview(b"abc"))
        os.lseek(file.descriptor, 2, os.SEEK_SET)  # shared by duplicates, and by nothing that is opened apart
        file.sync()
        file.close()
        monkeypatch.setattr(fs, "fsync", lambda descriptor, path: asked.append(os.lseek(descriptor, 0, os.SEEK_CUR)))
        staging.publish()
    assert 2 in asked


# The one module that changes the file system.


@each("size", [1, 1 << 19, (1 << 19) + 1, 3 << 20])
def test_large_writes_arrive_whole(tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    descriptor = fs.create(tmp_path / "file")
    try:
        fs.write(descriptor, memoryview(data), tmp_path / "file")
        fs.pwrite(descriptor, memoryview(data), size, tmp_path / "file")
        fs.start_syncing(descriptor, 0, size)
    finally:
        os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == data + data


@each("below", ["", "x", "x/y"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        fs.make_folder(tmp_path / "file" / below)
    assert caught.value.filename.startswith(str(tmp_path / "file"))
