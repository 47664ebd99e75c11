"""How fetching ends early: another file's failure, an interruption, a kill; and that the next run goes on."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from processes import run_forked
from static_server import SOUND, Fault, StaticServer
from waiting import HANG

from rbtool.core.errors import DatasetNotFoundError, NetworkError
from rbtool.core.format.converter import RemoteFile
from rbtool.core.remote.fetch import fetch_files
from rbtool.core.remote.http import HttpTransport
from rbtool.core.remote.transport import Transport

DATA = hashlib.shake_128(b"data").digest(600_000)
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("RBTOOL_RETRIES", "3:0.001")
    monkeypatch.setenv("RBTOOL_TIMEOUT", str(HANG))


@pytest.fixture
def server() -> Iterator[StaticServer]:
    with StaticServer({"one": DATA, "two": DATA}) as running:
        yield running


def fetch(
    server: StaticServer, folder: Path, *names: str, workers: int = 2, checksum: str | None = DIGEST, **options: Any
) -> None:
    files = [RemoteFile(name, len(DATA), checksum, (server.address(name),)) for name in names]
    with HttpTransport() as transport:
        fetch_files(files, folder, transport, workers=workers, **options)


def kept(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def working() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rbtool-fetch"]


def require_ended() -> None:
    """Require that the transfers have been broken off, which ends their threads long before the silence of a server."""
    for thread in working():
        thread.join(HANG / 2)
    assert working() == []


@pytest.mark.parametrize("stalled_at", [0, 300_000])
def test_the_first_failure_ends_the_others(stalled_at: int, server: StaticServer, tmp_path: Path) -> None:
    server.faults = {"one": [Fault(stall=stalled_at), SOUND], "absent": [Fault(404, wait_for_stall=True)]}
    with pytest.raises(DatasetNotFoundError, match="absent"):
        fetch(server, tmp_path, "one", "absent", "two")
    require_ended()  # the transfer that waited was broken off
    part = kept(tmp_path).get("one.part", b"")  # what came before the end may not all have been read
    assert part == DATA[: len(part)]
    assert server.starts("two") == []
    fetch(server, tmp_path, "one", "two")
    assert kept(tmp_path) == {"one": DATA, "two": DATA}
    assert server.starts("one") == [None, len(part) or None]


@pytest.mark.parametrize("names", [("one",), ("one", "two")])
def test_an_interruption_ends_transfers_at_once(names: tuple[str, ...], server: StaticServer, tmp_path: Path) -> None:
    server.faults = {name: [Fault(stall=300_000), SOUND] for name in names}

    def interrupt() -> None:
        server.stalled.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        fetch(server, tmp_path, *names)
    helper.join()
    require_ended()
    assert kept(tmp_path)["one.part"] == DATA[: len(kept(tmp_path)["one.part"])]
    server.faults = {}  # the second file may not have been asked for yet, and would stall now
    fetch(server, tmp_path, *names)
    assert kept(tmp_path) == dict.fromkeys(names, DATA)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_exception_of_the_listener_ends_transfers(workers: int, server: StaticServer, tmp_path: Path) -> None:
    def fail(amount: int) -> None:
        raise BrokenPipeError(amount)

    with pytest.raises(BrokenPipeError):
        fetch(server, tmp_path, "one", "two", workers=workers, progress=fail)
    fetch(server, tmp_path, "one", "two", workers=workers)
    assert kept(tmp_path) == {"one": DATA, "two": DATA}


class Deaf(Transport):
    """Cannot be interrupted: sends half of `slow`, and the rest when it is released; has nothing else."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.released = threading.Event()
        self.ended = threading.Event()

    def open(self, address: str, offset: int) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        if address != "slow":
            self.begun.wait()
            raise DatasetNotFoundError(f"no {address}")
        return self._slow()

    @contextlib.contextmanager
    def _slow(self) -> Iterator[tuple[int, Iterator[bytes]]]:
        try:
            yield 0, self._blocks()
        finally:
            self.ended.set()

    def _blocks(self) -> Iterator[bytes]:
        yield DATA[:1_000]
        self.begun.set()
        self.released.wait()
        yield DATA[1_000:]


def test_a_transfer_that_cannot_be_broken_off_is_left_and_changes_no_file_later(tmp_path: Path) -> None:
    files = [RemoteFile(name, len(DATA), DIGEST, (name,)) for name in ("slow", "absent")]
    transport = Deaf()
    with pytest.raises(DatasetNotFoundError, match="no absent"):
        fetch_files(files, tmp_path, transport)
    left = kept(tmp_path)
    transport.released.set()
    for thread in working():
        thread.join()
    assert transport.ended.is_set()
    assert kept(tmp_path) == left == {"slow.part": b""}


class Ahead(Transport):
    """Starts behind what was asked for."""

    @contextlib.contextmanager
    def open(self, address: str, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        yield offset + 1, iter([DATA[offset + 1 :]])


def test_a_gap_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="another part of one"):
        fetch_files([RemoteFile("one", len(DATA), DIGEST, ("x",))], tmp_path, Ahead())
    assert kept(tmp_path) == {}


CHILD = """
import os, pathlib, signal, sys
from rbtool.core.format.converter import RemoteFile
from rbtool.core.remote.fetch import fetch_files
from rbtool.core.remote.http import HttpTransport
folder, digest, size, at, *addresses = sys.argv[1:]
count = 0
def strike(event, arguments):
    global count
    if event == "rbtool.fs":
        count += 1
        if count == int(at):
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(strike)
files = [RemoteFile(a.rpartition("/")[2], int(size), digest or None, (a,)) for a in addresses]
with HttpTransport() as transport:
    fetch_files(files, pathlib.Path(folder), transport)
"""


@pytest.mark.parametrize("checksum", [DIGEST, None])
def test_a_run_after_a_kill_at_any_change_of_the_disk_completes_the_file(checksum, server, tmp_path: Path) -> None:
    server.faults["one"] = [Fault(headers={"ETag": '"v1"'})]  # what a part without a checksum is resumed by
    for at in range(1, 99):
        folder = tmp_path / str(at)
        folder.mkdir()
        ended = run_forked(CHILD, folder, checksum or "", len(DATA), at, server.address("one"))
        assert kept(folder).keys() <= {"one", "one.part", "one.part.json"}
        assert kept(folder).get("one", DATA) == DATA
        fetch(server, folder, "one", checksum=checksum)
        assert kept(folder) == {"one": DATA}
        if ended.returncode == 0:
            break
    assert ended.returncode == 0
    assert 8 < at < 30  # few operations: blocks are written in big pieces
