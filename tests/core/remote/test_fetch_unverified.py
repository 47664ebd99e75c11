"""Fetching files for which the remote gives no checksum, from a real server that changes and fails."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from static_server import SOUND, Fault, StaticServer
from waiting import HANG

from rbtool.core.errors import CorruptDataError, FormatError, NetworkError
from rbtool.core.format import fs
from rbtool.core.format.sources import RemoteFile
from rbtool.core.remote.fetch import fetch_files
from rbtool.core.remote.http import HttpTransport

SIZE = 600_000
DATA = hashlib.shake_128(b"first version").digest(SIZE)
OTHER = hashlib.shake_128(b"second version").digest(SIZE)
DATED = {"Last-Modified": "Mon, 02 Jan 2023 03:04:05 GMT"}
LATER = {"Last-Modified": "Tue, 03 Jan 2023 03:04:05 GMT"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("RBTOOL_RETRIES", "3:0.001")
    monkeypatch.setenv("RBTOOL_TIMEOUT", str(HANG))


@pytest.fixture
def server() -> Iterator[StaticServer]:
    with StaticServer({"data.bin": DATA, "mirror.bin": DATA, "empty": b""}) as running:
        yield running


class Fetch:
    """Fetches one file without a checksum into a folder."""

    def __init__(self, server: StaticServer, folder: Path) -> None:
        self.server = server
        self.target = folder / "deep" / "data.bin"
        self.part = folder / "deep" / "data.bin.part"
        self.record = folder / "deep" / "data.bin.part.json"
        self.folder = folder
        self.progress: list[int] = []
        self.notes: list[str] = []

    def __call__(self, *places: str, size: int | None = SIZE) -> None:
        self.progress.clear()
        self.notes.clear()
        addresses = tuple(self.server.address(place) for place in places or ("data.bin",))
        with HttpTransport() as transport:
            file = RemoteFile("deep/data.bin", size, None, addresses)
            fetch_files([file], self.folder, transport, progress=self.progress.append, note=self.notes.append)

    def ends_with(self, data: bytes) -> bool:
        """Whether the file and nothing else is there, and its bytes were counted once."""
        names = [path.name for path in self.target.parent.iterdir()]
        return names == ["data.bin"] and self.target.read_bytes() == data and sum(self.progress) == len(data)

    def fail(self, *faults: Fault) -> None:
        """Fetch once from a server that breaks off; the last of the faults stays."""
        self.server.faults["data.bin"] = list(faults)
        with pytest.raises(NetworkError):
            self()
        self.server.asked.clear()


@pytest.fixture
def fetch(server: StaticServer, tmp_path: Path) -> Fetch:
    return Fetch(server, tmp_path)


@pytest.mark.parametrize("size", [SIZE, None])
def test_a_file_comes_with_one_request(fetch: Fetch, size: int | None) -> None:
    fetch(size=size)
    assert fetch.ends_with(DATA)
    assert fetch.server.starts("data.bin") == [None]


def test_an_empty_file_comes(fetch: Fetch) -> None:
    fetch("empty", size=None)
    assert fetch.ends_with(b"")


def test_a_file_that_is_there_with_the_size_that_is_listed_is_kept(fetch: Fetch) -> None:
    fetch()
    fetch.server.asked.clear()
    fetch()
    assert fetch.server.asked == []
    fetch(size=None)  # nothing proves it: it is fetched again
    assert fetch.server.starts("data.bin") == [None]
    assert fetch.ends_with(DATA)


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, 0])
def test_another_size_than_was_listed_is_refused(fetch: Fetch, size: int) -> None:
    with pytest.raises(CorruptDataError, match=rf"has {SIZE:,} bytes at 127.0.0.1, {size:,} were announced"):
        fetch(size=size)
    assert not fetch.target.exists()


def test_a_mirror_with_the_right_size_is_taken(fetch: Fetch) -> None:
    fetch.server.files["data.bin"] = DATA[:-1]
    fetch("data.bin", "mirror.bin")
    assert fetch.ends_with(DATA)


@pytest.mark.parametrize("validator", [DATED, {"ETag": '"v1"'}])
def test_a_cut_is_resumed_in_the_same_run_if_the_version_is_confirmed(fetch: Fetch, validator: dict[str, str]) -> None:
    fetch.server.faults["data.bin"] = [Fault(cut=300_000, headers=validator), Fault(headers=validator)]
    fetch()
    assert fetch.ends_with(DATA)
    assert fetch.server.starts("data.bin") == [None, 300_000]
    assert fetch.server.asked[-1].headers["If-Range"] in validator.values()


@pytest.mark.parametrize("validator", [DATED, {"ETag": '"v1"'}])
def test_a_part_is_resumed_by_the_next_run(fetch: Fetch, validator: dict[str, str]) -> None:
    fetch.fail(Fault(cut=300_000, headers=validator), Fault(reset=True))
    assert json.loads(fetch.record.read_bytes())["bytes"] == 300_000
    fetch.server.faults["data.bin"] = [Fault(headers=validator)]
    fetch()
    assert fetch.server.starts("data.bin") == [300_000]
    assert fetch.ends_with(DATA)


@pytest.mark.parametrize("late", [Fault(headers=LATER), Fault(headers=LATER, no_range=True), Fault()])
@pytest.mark.parametrize("run", ["same", "next"])
def test_two_versions_are_never_joined(fetch: Fetch, late: Fault, run: str) -> None:
    """The stand-in ignores If-Range, as some servers do: the version of its answer decides."""
    if run == "next":
        fetch.fail(Fault(cut=300_000, headers=DATED), Fault(reset=True))
        fetch.server.files["data.bin"] = OTHER
        fetch.server.faults["data.bin"] = [late]
        fetch()
    else:
        fetch.server.files["data.bin"] = OTHER
        fetch.server.faults["data.bin"] = [Fault(cut=300_000, headers=DATED, corrupt=5), late]
        fetch()
    assert fetch.ends_with(OTHER)
    assert any("changed at 127.0.0.1" in text for text in fetch.notes)


@pytest.mark.parametrize("headers", [{}, {"ETag": 'W/"v1"'}, {"ETag": 'W/"v1"', **DATED}, {"ETag": "v1"}])
def test_a_part_without_a_strong_validator_is_fetched_again(fetch: Fetch, headers: dict[str, str]) -> None:
    fetch.server.faults["data.bin"] = [Fault(cut=300_000, headers=headers), Fault(headers=headers)]
    fetch()
    assert fetch.server.starts("data.bin") == [None, None]
    assert fetch.ends_with(DATA)


def test_a_part_without_a_validator_does_not_stay(fetch: Fetch) -> None:
    fetch.fail(Fault(cut=300_000), Fault(reset=True))
    assert list(fetch.target.parent.iterdir()) == []


def test_a_date_that_is_too_fresh_is_no_validator(fetch: Fetch) -> None:
    now = {"Last-Modified": "Mon, 02 Jan 2033 03:04:05 GMT"}
    fetch.server.faults["data.bin"] = [Fault(cut=300_000, headers=now), Fault(headers=now)]
    fetch()
    assert fetch.server.starts("data.bin") == [None, None]


@pytest.mark.parametrize("damage", ["other bytes", "shorter", "no record", "torn record", "other digest"])
def test_a_damaged_part_is_fetched_again_from_the_start(fetch: Fetch, damage: str) -> None:
    fetch.fail(Fault(cut=300_000, headers=DATED), Fault(reset=True))
    part, record = bytearray(fetch.part.read_bytes()), fetch.record.read_bytes()
    if damage == "other bytes":
        part[100] ^= 1
    fetch.part.write_bytes(part[:-1] if damage == "shorter" else part)
    if damage == "no record":
        fetch.record.unlink()
    elif damage == "torn record":
        fetch.record.write_bytes(record[:-3])
    elif damage == "other digest":
        fetch.record.write_bytes(json.dumps({**json.loads(record), "sha256": "0" * 64}).encode())
    fetch.server.faults["data.bin"] = [Fault(headers=DATED)]
    fetch()
    assert fetch.server.starts("data.bin") == [None]
    assert fetch.ends_with(DATA)


def test_bytes_behind_the_recorded_ones_are_not_believed(fetch: Fetch) -> None:
    fetch.fail(Fault(cut=300_000, headers=DATED), Fault(reset=True))
    with fetch.part.open("ab") as part:  # what a process that was killed had written since
        part.write(b"x" * 1000)
    fetch.server.faults["data.bin"] = [Fault(headers=DATED)]
    fetch()
    assert fetch.server.starts("data.bin") == [300_000]
    assert fetch.ends_with(DATA)


def test_a_part_of_one_address_is_not_resumed_at_another(fetch: Fetch) -> None:
    fetch.fail(Fault(cut=300_000, headers=DATED), Fault(reset=True))
    fetch.server.faults["mirror.bin"] = [Fault(headers=DATED)]
    fetch("mirror.bin")
    assert fetch.server.starts("mirror.bin") == [None]
    assert fetch.ends_with(DATA)


def test_an_answer_of_unknown_length_without_an_end_is_refused(fetch: Fetch) -> None:
    fetch.server.faults["data.bin"] = [Fault(unannounced=True)]
    with pytest.raises(NetworkError, match="whether it came whole cannot be determined"):
        fetch(size=None)
    assert not fetch.target.exists()
    fetch()  # the size that is listed decides
    assert fetch.ends_with(DATA)


def test_a_body_longer_than_announced_is_refused(fetch: Fetch) -> None:
    fetch.server.faults["data.bin"] = [Fault(unannounced=True, extra=b"x")]
    with pytest.raises(CorruptDataError, match=f"more than {SIZE:,} bytes"):
        fetch()
    assert not fetch.target.exists()


def test_an_encoding_that_was_not_asked_for_is_refused(fetch: Fetch) -> None:
    fetch.server.faults["data.bin"] = [Fault(headers={"Content-Encoding": "gzip"})]
    with pytest.raises(NetworkError, match="in the encoding gzip"):
        fetch()


def test_a_disk_that_gives_back_other_bytes_is_noticed(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = fs.fsync

    def damaging(descriptor: int, path: Path) -> None:
        sync(descriptor, path)
        if path == fetch.part:
            with path.open("r+b") as part:
                part.seek(1000)
                part.write(b"\0\0\0\0")

    monkeypatch.setattr(fs, "fsync", damaging)
    with pytest.raises(CorruptDataError, match="does not read back from the disk"):
        fetch()
    assert list(fetch.target.parent.iterdir()) == []


def test_a_checksum_needs_a_size(fetch: Fetch, tmp_path: Path) -> None:
    with HttpTransport() as transport, pytest.raises(FormatError, match="without a size"):
        fetch_files([RemoteFile("a", None, "md5:" + "0" * 32, ("http://127.0.0.1/",))], tmp_path, transport)


def test_the_part_of_a_file_called_like_a_record_has_another_name(fetch: Fetch, server: StaticServer) -> None:
    paths = ("data.bin", "data.bin.part.json")
    files = [RemoteFile(path, SIZE, None, (server.address("data.bin"),)) for path in paths]
    with HttpTransport() as transport:
        fetch_files(files, fetch.folder, transport)
    assert sorted(path.name for path in fetch.folder.iterdir()) == sorted(paths)


def test_a_fault_that_passes_is_noted_and_forgiven(fetch: Fetch) -> None:
    fetch.server.faults["data.bin"] = [Fault(status=503), SOUND]
    fetch()
    assert fetch.ends_with(DATA)
    assert "trying again" in fetch.notes[0]
