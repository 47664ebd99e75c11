"""Fetching from a real server, with and without checksums: what is asked for, what is on the disk, which notes come."""

from __future__ import annotations

import hashlib
import json
import resource
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases import each
from static_server import SOUND, Fault, StaticServer
from waiting import HANG

from rbtool.core.errors import (
    AuthorisationError,
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    NetworkError,
    OutOfSpaceError,
    RbtoolError,
)
from rbtool.core.format import fs
from rbtool.core.format.converter import RemoteFile
from rbtool.core.remote.fetch import fetch_files
from rbtool.core.remote.http import HttpTransport

SIZE = 600_000  # more than two blocks of what is written at once
DATA = hashlib.shake_128(b"data").digest(SIZE)
TENTHS = [SIZE * tenth // 10 for tenth in range(1, 10)]


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def fetch_into(folder: Path, files: Sequence[RemoteFile], **options: Any) -> None:
    with HttpTransport() as transport:
        fetch_files(files, folder, transport, **options)


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
    """Fetches one file into a folder and gathers the notes on the way."""

    def __init__(self, server: StaticServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.target = folder / "deep" / "data.bin"
        self.part = folder / "deep" / "data.bin.part"
        self.record = folder / "deep" / "data.bin.part.json"
        self.progress: list[int] = []
        self.notes: list[str] = []

    def __call__(self, *places: str, data: bytes = DATA) -> None:
        self.fetch(len(data), sha256(data), places)

    def fetch(self, size: int | None, checksum: str | None, places: tuple[str, ...]) -> None:
        self.progress.clear()
        self.notes.clear()
        addresses = tuple(self.server.address(place) for place in places or ("data.bin",))
        file = RemoteFile("deep/data.bin", size, checksum, addresses)
        fetch_into(self.folder, [file], progress=self.progress.append, note=self.notes.append)

    def left(self, content: bytes, *, partial: bool = True) -> None:
        """Put there what an earlier run left."""
        self.target.parent.mkdir(exist_ok=True)
        (self.part if partial else self.target).write_bytes(content)

    def ends_with(self, data: bytes) -> bool:
        """Whether the file and nothing else is there, and its bytes were counted once."""
        names = [path.name for path in self.target.parent.iterdir()]
        return names == ["data.bin"] and self.target.read_bytes() == data and sum(self.progress) == len(data)

    @property
    def done(self) -> bool:
        return self.ends_with(DATA)


@pytest.fixture
def fetch(server: StaticServer, tmp_path: Path) -> Fetch:
    return Fetch(server, tmp_path)


def test_a_file_comes_with_one_request(fetch: Fetch) -> None:
    fetch()
    assert fetch.done
    assert fetch.server.starts("data.bin") == [None]
    assert (min(fetch.progress) > 0, fetch.notes) == (True, [])


@pytest.mark.parametrize("partial", [False, True])
def test_a_complete_file_or_part_needs_no_request(fetch: Fetch, partial: bool) -> None:
    fetch.left(DATA, partial=partial)
    fetch()
    assert fetch.done
    assert fetch.server.asked == []


@pytest.mark.parametrize("content", [b"", DATA[:-1], DATA + b"x", b"x" + DATA[1:]])
def test_a_file_that_is_there_with_other_bytes_is_replaced(content: bytes, fetch: Fetch) -> None:
    fetch.left(content, partial=False)
    fetch()
    assert fetch.done
    assert fetch.notes == ["deep/data.bin was there, but not as its source has it; it is fetched again"]


def test_links_in_the_places_of_files_are_not_followed(fetch: Fetch, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    fetch.left(b"")
    fetch.target.symlink_to(mine)
    fetch()
    assert fetch.done
    assert not fetch.target.is_symlink()
    fetch.target.unlink()
    fetch.part.symlink_to(mine)
    with pytest.raises(OSError):
        fetch()
    assert mine.read_bytes() == b"mine"


def test_a_folder_in_the_place_of_a_file_is_kept(fetch: Fetch) -> None:
    fetch.target.mkdir(parents=True)
    with pytest.raises(FormatError, match="is a folder"):
        fetch()
    assert fetch.target.is_dir()


def test_an_empty_file_needs_no_request(fetch: Fetch) -> None:
    fetch("empty", data=b"")
    assert fetch.target.read_bytes() == b""
    assert (fetch.server.asked, fetch.part.exists()) == ([], False)


@pytest.mark.parametrize("at", TENTHS)
@pytest.mark.parametrize("how", ["cut", "short"])
def test_a_cut_transfer_is_resumed_in_the_same_run(how: str, at: int, fetch: Fetch, monkeypatch) -> None:
    monkeypatch.setenv("RBTOOL_RETRIES", "1")  # a cut that brought bytes is forgiven
    cut = Fault(cut=at, unannounced=how == "short")
    fetch.server.faults["data.bin"] = [cut, SOUND]
    fetch()
    assert fetch.done
    assert fetch.server.starts("data.bin") == [None, at]
    assert min(fetch.progress) > 0
    assert fetch.notes[0].endswith(f"; resuming at byte {at:,}")


def test_cuts_that_bring_bytes_use_up_no_retries(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_RETRIES", "1")
    fetch.server.faults["data.bin"] = [Fault(cut=SIZE // 10)]
    fetch()
    assert fetch.done
    assert fetch.server.starts("data.bin") == [None, *TENTHS]


@pytest.mark.parametrize("fault", [Fault(cut=0), Fault(reset=True), Fault(500), Fault(503), Fault(429)])
def test_passing_faults_are_retried(fault: Fault, fetch: Fetch) -> None:
    fetch.server.faults["data.bin"] = [fault, fault, SOUND]
    fetch()
    assert fetch.done
    assert len(fetch.server.asked) == 3
    assert ["trying again" in note for note in fetch.notes] == [True, True]


@pytest.mark.parametrize("fault", [Fault(cut=0), Fault(reset=True), Fault(503), Fault(429)])
def test_retries_end(fault: Fault, fetch: Fetch) -> None:
    fetch.server.faults["data.bin"] = [fault]
    with pytest.raises(NetworkError, match=r"127\.0\.0\.1"):
        fetch()
    assert len(fetch.server.asked) == 3
    assert list(fetch.target.parent.iterdir()) == []


def test_a_server_that_asks_for_too_long_a_wait_is_asked_once(fetch: Fetch) -> None:
    fetch.server.faults["data.bin"] = [Fault(429, {"Retry-After": "86400"})]
    with pytest.raises(NetworkError, match="asks to wait for 86,400 s"):
        fetch()
    assert len(fetch.server.asked) == 1


def test_a_stalled_server_is_left_and_asked_for_the_rest(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_TIMEOUT", "1")  # the rest, too, has to come within that
    fetch.server.faults["data.bin"] = [Fault(stall=1_000), SOUND]
    fetch()
    assert fetch.done
    assert fetch.server.starts("data.bin") == [None, 1_000]


@pytest.mark.parametrize("at", TENTHS)
def test_the_next_run_resumes_where_one_gave_up(at: int, fetch: Fetch) -> None:
    fetch.server.faults["data.bin"] = [Fault(cut=at), Fault(503)]
    with pytest.raises(NetworkError):
        fetch()
    assert fetch.part.read_bytes() == DATA[:at]
    assert (fetch.target.exists(), sum(fetch.progress)) == (False, at)
    fetch.server.faults.clear()
    fetch.server.asked.clear()
    fetch()
    assert fetch.done
    assert fetch.server.starts("data.bin") == [at]


@pytest.mark.parametrize("at", TENTHS)
def test_a_server_without_ranges_sends_the_present_bytes_again(at: int, fetch: Fetch) -> None:
    fetch.left(DATA[:at])
    fetch.server.faults["data.bin"] = [Fault(no_range=True)]
    fetch()
    assert fetch.done
    assert min(fetch.progress) > 0


def test_a_server_without_ranges_that_always_cuts_uses_up_retries(fetch: Fetch) -> None:
    fetch.server.faults["data.bin"] = [Fault(no_range=True, cut=SIZE // 2)]
    with pytest.raises(NetworkError, match="broke off"):
        fetch()
    assert len(fetch.server.asked) == 4  # the first brought something, the three after it nothing
    assert fetch.part.read_bytes() == DATA[: SIZE // 2]


def test_a_file_that_is_shorter_than_announced_never_gets_its_name(fetch: Fetch) -> None:
    fetch.server.files["data.bin"] = DATA[:1_000]
    with pytest.raises(NetworkError, match="it ended after 1,000 of 600,000 bytes"):
        fetch()
    assert not fetch.target.exists()


@pytest.mark.parametrize("content", [b"", b"\0" * SIZE, DATA + b"x"])
def test_a_part_that_cannot_be_right_is_fetched_from_the_start(content: bytes, fetch: Fetch) -> None:
    fetch.left(content)
    fetch()
    assert fetch.done
    assert fetch.server.starts("data.bin") == [None]


def test_a_wrong_part_of_an_earlier_run_is_not_held_against_the_server(fetch: Fetch) -> None:
    fetch.left(b"\0" * SIZE)
    fetch.server.faults["data.bin"] = [Fault(corrupt=1), SOUND]
    fetch()
    assert fetch.done
    fetch.server.asked.clear()
    fetch.target.unlink()
    fetch.left(b"x" + DATA[1 : SIZE // 2])
    fetch()
    assert fetch.done
    assert fetch.server.starts("data.bin") == [SIZE // 2, None]
    assert min(fetch.progress) == -SIZE


@pytest.mark.parametrize("at", [0, SIZE // 2, SIZE - 1])
def test_a_corrupt_byte_is_fetched_again(at: int, fetch: Fetch) -> None:
    fetch.server.faults["data.bin"] = [Fault(corrupt=at), SOUND]
    fetch()
    assert fetch.done
    assert fetch.server.starts("data.bin") == [None, None]
    assert fetch.notes[0].endswith("; it is fetched again from the start")


@pytest.mark.parametrize("fault", [Fault(corrupt=7), Fault(extra=b"x"), Fault(extra=b"x", unannounced=True)])
def test_bytes_that_never_match_are_not_kept(fault: Fault, fetch: Fetch) -> None:
    fetch.server.faults["data.bin"] = [fault]
    with pytest.raises(CorruptDataError, match="nothing of it was kept") as raised:
        fetch()
    assert f"deep/data.bin is not what was announced: {sha256(DATA)}" in str(raised.value)
    assert len(fetch.server.asked) == 2
    assert list(fetch.target.parent.iterdir()) == []
    assert sum(fetch.progress) == 0


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(404), DatasetNotFoundError), (Fault(403), AuthorisationError), (Fault(503), NetworkError),
        (Fault(corrupt=7), CorruptDataError),
    ],
)  # fmt: skip
def test_mirrors_are_asked_in_order(fault: Fault, kind: type[RbtoolError], fetch: Fetch) -> None:
    fetch.server.faults["data.bin"] = [fault]
    fetch("data.bin", "mirror.bin")
    assert fetch.done
    fetch.target.unlink()
    fetch.server.faults["mirror.bin"] = [Fault(500)]
    with pytest.raises(kind, match="2 addresses were tried, and no other had it either"):
        fetch("data.bin", "mirror.bin")


def test_a_mirror_goes_on_with_what_the_first_brought(fetch: Fetch) -> None:
    fetch.server.faults["data.bin"] = [Fault(cut=1_000), Fault(404)]
    fetch("data.bin", "mirror.bin")
    assert fetch.done
    assert fetch.server.starts("mirror.bin") == [1_000]


@pytest.fixture
def small_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.usefixtures("small_files")
def test_want_of_space_ends_it_and_keeps_the_part(fetch: Fetch) -> None:
    with pytest.raises(OutOfSpaceError):
        fetch("data.bin", "mirror.bin")
    kept = fetch.part.read_bytes()
    assert len(kept) > 0
    assert kept == DATA[: len(kept)]
    assert fetch.server.starts("mirror.bin") == []


def test_progress_and_notes_come_in_the_calling_thread(server: StaticServer, tmp_path: Path) -> None:
    files = [RemoteFile(f"f{number}", SIZE, sha256(DATA), (server.address("data.bin"),)) for number in range(6)]
    server.faults["data.bin"] = [Fault(cut=5), Fault(cut=6), SOUND]
    heard: list[tuple[int, object]] = []

    def hear(what: object) -> None:
        heard.append((threading.get_ident(), what))

    fetch_into(tmp_path, files, progress=hear, note=hear, workers=3)
    assert {thread for thread, _ in heard} == {threading.get_ident()}
    assert sum(what for _, what in heard if isinstance(what, int)) == 6 * SIZE
    assert sorted(path.name for path in tmp_path.iterdir()) == [file.path for file in files]


def test_a_file_named_like_a_part_is_not_taken_for_one(server: StaticServer, tmp_path: Path) -> None:
    server.files = {"a.part": DATA[:1_000], "a": DATA}
    files = [RemoteFile(path, len(data), sha256(data), (server.address(path),)) for path, data in server.files.items()]
    for _ in range(2):
        fetch_into(tmp_path, files, workers=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == server.files
    assert [asked.start for asked in server.asked] == [None, None]


@each(
    ("paths", "sentence"),
    [
        (["../x"], "leads out of the folder"), (["/x"], "leads out of the folder"),
        (["a/../../x"], "leads out of the folder"), (["a\0b"], "leads out of the folder"),
        (["a/\udcff"], "leads out of the folder"), (["a/" * 2000 + "b"], "leads out of the folder"),
        ([""], "leads out of the folder"), (["a", "a"], "lists a file twice"), (["a", "a/b"], "in the way of 'a/b'"),
    ],
)  # fmt: skip
def test_lists_that_make_no_sense_are_refused_before_anything_is_done(paths, sentence, server, tmp_path) -> None:
    files = [RemoteFile(path, 1, "md5:" + "0" * 32, (server.address("data.bin"),)) for path in ("good", *paths)]
    with pytest.raises(FormatError, match=sentence):
        fetch_into(tmp_path, files)
    assert (server.asked, list(tmp_path.iterdir())) == ([], [])


@each(
    ("size", "checksum", "addresses", "sentence"),
    [
        (1, "md5:" + "0" * 32, (), None),
        (-1, "md5:" + "0" * 32, ("http://127.0.0.1/",), None),
        (1, "sha512:0", ("http://127.0.0.1/",), None),
        (None, "md5:" + "0" * 32, ("http://127.0.0.1/",), "without a size"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(size, checksum, addresses, sentence, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=sentence):
        fetch_into(tmp_path, [RemoteFile("a", size, checksum, addresses)])
    fetch_into(tmp_path / "absent", [])
    assert list(tmp_path.iterdir()) == []


# Fetching files for which the remote gives no checksum, from a real server that changes and fails.

HALF = SIZE // 2
OTHER = hashlib.shake_128(b"second version").digest(SIZE)
DATED = {"Last-Modified": "Mon, 02 Jan 2023 03:04:05 GMT"}
LATER = {"Last-Modified": "Tue, 03 Jan 2023 03:04:05 GMT"}


class Unverified(Fetch):
    """Fetches one file without a checksum into a folder."""

    def __call__(self, *places: str, size: int | None = SIZE) -> None:
        self.fetch(size, None, places)

    def fail(self, headers: Mapping[str, str] = DATED) -> None:
        """Fetch once from a server that breaks off after half of the file; its next answer is whole."""
        self.server.faults["data.bin"] = [Fault(cut=HALF, headers=headers), Fault(reset=True)]
        with pytest.raises(NetworkError):
            self()
        self.server.asked.clear()
        self.server.faults["data.bin"] = [Fault(headers=headers)]


@pytest.fixture
def unverified(server: StaticServer, tmp_path: Path) -> Unverified:
    return Unverified(server, tmp_path)


@pytest.mark.parametrize("size", [SIZE, None])
def test_unverified_files_come_with_one_request(unverified: Unverified, size: int | None) -> None:
    unverified(size=size)
    assert unverified.done
    assert unverified.server.starts("data.bin") == [None]
    unverified.target.unlink()
    unverified("empty", size=None)
    assert unverified.ends_with(b"")


def test_a_file_that_is_there_with_the_size_that_is_listed_is_kept(unverified: Unverified) -> None:
    unverified()
    unverified.server.asked.clear()
    unverified()
    assert unverified.server.asked == []
    unverified(size=None)  # nothing proves it: it is fetched again
    assert unverified.server.starts("data.bin") == [None]
    assert unverified.done


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1, 0])
def test_another_size_than_was_listed_is_refused(unverified: Unverified, size: int) -> None:
    with pytest.raises(CorruptDataError, match=rf"has {SIZE:,} bytes at 127.0.0.1, {size:,} were announced"):
        unverified(size=size)
    assert not unverified.target.exists()
    unverified.server.files["data.bin"] = DATA[:-1]
    unverified("data.bin", "mirror.bin")  # which has the size that is listed
    assert unverified.done


@pytest.mark.parametrize("validator", [DATED, {"ETag": '"v1"'}])
def test_a_part_is_resumed_if_the_version_is_confirmed(unverified: Unverified, validator: dict[str, str]) -> None:
    unverified.server.faults["data.bin"] = [Fault(cut=HALF, headers=validator), Fault(headers=validator)]
    unverified()
    assert unverified.done
    assert unverified.server.starts("data.bin") == [None, HALF]
    assert unverified.server.asked[-1].headers["If-Range"] in validator.values()
    unverified.target.unlink()
    unverified.fail(validator)
    assert json.loads(unverified.record.read_bytes())["bytes"] == HALF
    unverified()
    assert unverified.server.starts("data.bin") == [HALF]
    assert unverified.done


@pytest.mark.parametrize("late", [Fault(headers=LATER), Fault(headers=LATER, no_range=True), Fault()])
@pytest.mark.parametrize("run", ["same", "next"])
def test_two_versions_are_never_joined(unverified: Unverified, late: Fault, run: str) -> None:
    """The stand-in ignores If-Range, as some servers do: the version of its answer decides."""
    if run == "next":
        unverified.fail()
        unverified.server.faults["data.bin"] = [late]
    else:
        unverified.server.faults["data.bin"] = [Fault(cut=HALF, headers=DATED, corrupt=5), late]
    unverified.server.files["data.bin"] = OTHER
    unverified()
    assert unverified.ends_with(OTHER)
    assert any("changed at 127.0.0.1" in text for text in unverified.notes)


FRESH = {"Last-Modified": "Mon, 02 Jan 2033 03:04:05 GMT"}


@pytest.mark.parametrize("headers", [{}, {"ETag": 'W/"v1"'}, {"ETag": 'W/"v1"', **DATED}, {"ETag": "v1"}, FRESH])
def test_a_part_without_a_strong_validator_is_not_kept(unverified: Unverified, headers: dict[str, str]) -> None:
    unverified.server.faults["data.bin"] = [Fault(cut=HALF, headers=headers), Fault(headers=headers)]
    unverified()
    assert unverified.server.starts("data.bin") == [None, None]
    assert unverified.done
    unverified.target.unlink()
    unverified.fail(headers)
    assert list(unverified.target.parent.iterdir()) == []


@pytest.mark.parametrize("damage", ["other bytes", "shorter", "no record", "torn record", "other digest"])
def test_a_damaged_part_is_fetched_again_from_the_start(unverified: Unverified, damage: str) -> None:
    unverified.fail()
    part, record = bytearray(unverified.part.read_bytes()), unverified.record.read_bytes()
    if damage == "other bytes":
        part[100] ^= 1
        unverified.part.write_bytes(part)
    elif damage == "shorter":
        unverified.part.write_bytes(part[:-1])
    elif damage == "no record":
        unverified.record.unlink()
    elif damage == "torn record":
        unverified.record.write_bytes(record[:-3])
    else:
        unverified.record.write_bytes(json.dumps({**json.loads(record), "sha256": "0" * 64}).encode())
    unverified()
    assert unverified.server.starts("data.bin") == [None]
    assert unverified.done


def test_bytes_behind_the_recorded_ones_are_not_believed(unverified: Unverified) -> None:
    unverified.fail()
    with unverified.part.open("ab") as part:  # what a process that was killed had written since
        part.write(b"x" * 1000)
    unverified()
    assert unverified.server.starts("data.bin") == [HALF]
    assert unverified.done


def test_a_part_of_one_address_is_not_resumed_at_another(unverified: Unverified) -> None:
    unverified.fail()
    unverified.server.faults["mirror.bin"] = [Fault(headers=DATED)]
    unverified("mirror.bin")
    assert unverified.server.starts("mirror.bin") == [None]
    assert unverified.done


def test_an_answer_of_unknown_length_without_an_end_is_refused(unverified: Unverified) -> None:
    unverified.server.faults["data.bin"] = [Fault(unannounced=True)]
    with pytest.raises(NetworkError, match="whether it came whole cannot be determined"):
        unverified(size=None)
    assert not unverified.target.exists()
    unverified()  # the size that is listed decides
    assert unverified.done


def test_a_body_longer_than_announced_is_refused(unverified: Unverified) -> None:
    unverified.server.faults["data.bin"] = [Fault(unannounced=True, extra=b"x")]
    with pytest.raises(CorruptDataError, match=f"more than {SIZE:,} bytes"):
        unverified()
    assert not unverified.target.exists()


def test_an_encoding_that_was_not_asked_for_is_refused(unverified: Unverified) -> None:
    unverified.server.faults["data.bin"] = [Fault(headers={"Content-Encoding": "gzip"})]
    with pytest.raises(NetworkError, match="in the encoding gzip"):
        unverified()


def test_a_disk_that_gives_back_other_bytes_is_noticed(unverified: Unverified, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = fs.fsync

    def damaging(descriptor: int, path: Path) -> None:
        sync(descriptor, path)
        if path == unverified.part:
            with path.open("r+b") as part:
                part.seek(1000)
                part.write(b"\0\0\0\0")

    monkeypatch.setattr(fs, "fsync", damaging)
    with pytest.raises(CorruptDataError, match="does not read back from the disk"):
        unverified()
    assert list(unverified.target.parent.iterdir()) == []


def test_the_part_of_a_file_called_like_a_record_has_another_name(unverified: Unverified, server: StaticServer) -> None:
    paths = ("data.bin", "data.bin.part.json")
    fetch_into(unverified.folder, [RemoteFile(path, SIZE, None, (server.address("data.bin"),)) for path in paths])
    assert sorted(path.name for path in unverified.folder.iterdir()) == sorted(paths)
