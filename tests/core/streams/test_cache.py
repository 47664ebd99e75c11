"""Shards in a folder of bounded size: what is fetched, kept and removed, with threads, other processes and kills."""

from __future__ import annotations

import fcntl
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from waiting import HANG

import rbtool
from rbtool.core.format import fs
from rbtool.core.storages.dataset import OpenShard
from rbtool.core.streams.shards import CachedShards, ShardFiles


class LocalFiles(ShardFiles):
    """Shards of three steps, which are files."""

    address = identity = "local files"

    def __init__(self, count: int) -> None:
        self.count = count
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.count

    def size(self, number: int) -> int:
        return 4096

    def fetch(self, number: int, folder: Path, more: Any = None) -> None:
        self.fetched.append(number)
        torch.save(torch.arange(3) + 3 * number, folder / "rows")

    def open(self, number: int, folder: Path) -> OpenShard:
        storage = rbtool.TensorStorage(torch.load(folder / "rows"))
        return OpenShard(storage, 0, torch.tensor([3]).numpy())


def shards_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_shards_that_are_used_are_kept(tmp_path: Path) -> None:
    files = LocalFiles(6)
    shards = CachedShards(files, tmp_path, 3 * 4096)
    shards.expect([0, 1])
    assert shards.take(0).storage.get(slice(None)).tolist() == [0, 1, 2]
    for number in (1, 2, 3, 4):
        shards.expect([0, number])
        assert shards.take(number).storage.get(0) == 3 * number
    shards.take(0)
    assert files.fetched.count(0) == 1
    shards.close()
    assert "0" in shards_in(tmp_path)
    assert len(shards_in(tmp_path)) <= 3


class GrowingFiles(LocalFiles):
    """Shards that turn out to take 8 kB more."""

    def fetch(self, number: int, folder: Path, more: Any = None) -> None:
        more(8192)
        super().fetch(number, folder)


def test_a_shard_that_takes_more_than_was_known_makes_room_for_it(tmp_path: Path) -> None:
    shards = CachedShards(GrowingFiles(3), tmp_path, 3 * 4096)
    assert shards.take(0).rows == 3
    with pytest.raises(rbtool.UsageError, match="used at the same time take"):
        shards.take(1)
    shards.expect([1])
    assert shards.take(1).rows == 3
    assert shards_in(tmp_path) == ["1"]


def test_a_shard_that_does_not_fit_is_not_fetched_ahead(tmp_path: Path) -> None:
    files = GrowingFiles(2)
    shards = CachedShards(files, tmp_path, 5 * 4096)
    shards.expect([0, 1])
    assert shards.take(0).rows == 3
    shards.close()
    assert (files.fetched, shards_in(tmp_path)) == ([0], ["0"])


def test_a_shard_is_kept_while_it_is_read(tmp_path: Path) -> None:
    class Decoded(LocalFiles):
        def open(self, number: int, folder: Path) -> OpenShard:
            return super().open(number, folder)._replace(decode=lambda rows: (folder / "rows").stat() and rows)

    shards = CachedShards(Decoded(2), tmp_path, 4096)
    read = [shards.take(0)]
    shards.expect([1])
    threading.Timer(0.3, read.clear).start()
    assert shards.take(1).rows == 3
    assert not read


def test_threads_that_take_one_shard_open_it_once(tmp_path: Path) -> None:
    class SlowFiles(LocalFiles):
        def open(self, number: int, folder: Path) -> OpenShard:
            time.sleep(0.05)
            return super().open(number, folder)

    shards = CachedShards(SlowFiles(3), tmp_path, 2 * 4096)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(shards.take, [0] * 4))
    for number in (1, 2):
        shards.expect([number])
        shards.take(number)
    assert not (tmp_path / "0").exists()


def test_a_shard_that_another_process_has_open_is_not_waited_for(tmp_path: Path) -> None:
    files = LocalFiles(1)
    (tmp_path / "coming").mkdir()
    with (tmp_path / "0.lock").open("a") as other, ThreadPoolExecutor(1) as pool:
        fcntl.flock(other, fcntl.LOCK_SH)
        taken = pool.submit(CachedShards(files, tmp_path, 1 << 20).take, 0)
        time.sleep(0.1)
        files.fetch(0, tmp_path / "coming")
        (tmp_path / "coming").rename(tmp_path / "0")
        try:
            assert taken.result(timeout=HANG).storage.get(0) == 0
        finally:
            fcntl.flock(other, fcntl.LOCK_UN)


def test_a_kill_while_a_shard_is_removed_leaves_no_half_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = CachedShards(LocalFiles(3), tmp_path, 4096)
    shards.take(0)
    shards.expect([])
    remove = fs.remove

    def killed(path: Path) -> None:
        if path.exists():
            (path / "rows").unlink()
            raise SystemExit(137)

    monkeypatch.setattr(fs, "remove", killed)
    with pytest.raises(SystemExit):
        shards.take(1)
    monkeypatch.setattr(fs, "remove", remove)
    shards = CachedShards(LocalFiles(3), tmp_path, 4096)
    assert shards.take(0).storage.get(0) == 0


def test_copies_open_their_shards_again(tmp_path: Path) -> None:
    shards = CachedShards(LocalFiles(2), tmp_path, 1 << 20)
    shards.take(1)
    copy = pickle.loads(pickle.dumps(shards))
    assert copy.take(1).storage.get(0) == 3
    assert not copy.files.fetched[1:]


def test_parts_that_a_killed_process_left_are_removed(tmp_path: Path) -> None:
    (tmp_path / "2.part").mkdir()
    CachedShards(LocalFiles(3), tmp_path, 1 << 20).take(0)
    assert not (tmp_path / "2.part").exists()


def test_an_open_stream_is_not_pruned(tmp_path: Path) -> None:
    shards = CachedShards(LocalFiles(2), tmp_path / ".streams" / "one" / "shards", 1 << 20)
    shards.take(0)
    assert rbtool.cache.prune(root=tmp_path).removed == ()
    shards.close()
    assert len(rbtool.cache.prune(root=tmp_path).removed) == 1


def test_requests_end_with_the_stream(tmp_path: Path) -> None:
    shards = CachedShards(LocalFiles(40), tmp_path, 1 << 20, threads=2)
    shards.expect(list(range(40)))
    shards.close()
    assert not [one for one in psutil.Process().open_files() if str(tmp_path) in one.path]


_LEAVING = """
import os, pathlib, signal, sys, threading, time
import rbtool
from rbtool.core.streams.shards import CachedShards, ShardFiles
from rbtool.core.storages.dataset import OpenShard

class Slow(ShardFiles):
    address = identity = "slow files"
    __len__ = lambda self: 9
    size = lambda self, number: 1
    open = lambda self, number, folder: OpenShard.nothing()
    def fetch(self, number, folder, more):
        while number:
            time.sleep(0.01)

shards = CachedShards(Slow(), pathlib.Path(sys.argv[1]), 1 << 20)
shards.expect([1, 2, 3])
shards.take(0)
if sys.argv[2] == "interrupted":
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    shards.take(1)
"""


@pytest.mark.parametrize(
    ("how", "code"), [("done", 0), pytest.param("interrupted", -signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_process_that_ends_does_not_wait_for_requests(tmp_path: Path, how: str, code: int) -> None:
    command = [sys.executable, "-c", _LEAVING, str(tmp_path / "shards"), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("Traceback") == (how == "interrupted")
