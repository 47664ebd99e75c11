"""Folders of fetched files: recorded, locked, checked, removed; and no link below the root leads out of it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from static_server import StaticServer
from waiting import HANG

from rbtool import UsageError
from rbtool.core.errors import FormatError
from rbtool.core.format import fs
from rbtool.core.format.converter import Catalogue, RemoteDataset, RemoteFile
from rbtool.core.format.locate import KnownNames, Resolution
from rbtool.core.format.staging import Staging
from rbtool.core.remote.catalogue import CatalogueFile
from rbtool.core.remote.fetch import fetch_files
from rbtool.core.remote.http import HttpTransport
from rbtool.core.remote.originals import Originals, stored_originals
from rbtool.core.stats import StatsStore
from rbtool.core.testing.datasets import write_walks

DATA = b"some bytes"
SHA = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
DATASET = RemoteDataset("a/b-v0", "hf://x/a@1", "1", (RemoteFile("data/one", len(DATA), SHA, ("http://x/one",)),))


@pytest.fixture
def originals(tmp_path):
    found = Originals(tmp_path, "minari", "a/b-v0")
    with found.lock(lambda: None):
        found.begin(DATASET, ["data/one"], kept=False)
    (found.files / "data").mkdir(parents=True)
    (found.files / "data/one").write_bytes(DATA)
    return found


def test_a_record_stays_kept_once_it_was(originals, tmp_path):
    record = originals.record()
    assert record is not None
    assert (record.id, record.address, record.revision, record.kept) == ("a/b-v0", "hf://x/a@1", "1", False)
    assert [(file.path, file.size, file.checksum) for file in record.files] == [("data/one", len(DATA), SHA)]
    assert [(found.source, found.id) for found in stored_originals(tmp_path)] == [("minari", "a/b-v0")]
    for kept, expected in ((False, False), (True, True), (False, True)):
        originals.begin(DATASET, [], kept=kept)
        assert originals.record().kept is expected


def test_a_folder_that_stays_empty_is_removed_and_its_neighbours_are_kept(tmp_path):
    found = Originals(tmp_path, "minari", "a/b-v0")
    assert (found.record(), found.bytes(), list(found.problems())) == (None, 0, [])
    assert list(stored_originals(tmp_path)) == []
    with found.lock(lambda: None):
        assert found.folder.is_dir()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "minari/kept").mkdir(parents=True)
    with found.lock(lambda: None):
        pass
    assert [path.name for path in (tmp_path / "minari").iterdir()] == ["kept"]


def test_changed_bytes_and_missing_files_that_were_kept_are_a_problem(originals):
    assert list(originals.problems()) == []
    (originals.files / "data/one").write_bytes(DATA[::-1])
    (problem,) = originals.problems()
    assert SHA in problem
    (originals.files / "data/one").unlink()
    assert list(originals.problems()) == []
    originals.begin(DATASET, [], kept=True)
    assert len(list(originals.problems())) == 1


def test_a_damaged_record_is_a_format_error(originals):
    path = originals.folder / "fetched.json"
    outside = path.read_text().replace("data/one", "../../one")
    for document in ("{", "[]", '{"files": []}', '{"files": [{"path": "../up", "size": 1, "checksum": "md5:0"}]}'):
        path.write_text(document)
        with pytest.raises(FormatError):
            originals.record()
    path.write_text(outside)
    with pytest.raises(FormatError, match="outside"):
        originals.record()


def test_parts_count_as_present(originals):
    assert originals.present(DATASET) == len(DATA)
    (originals.files / "data/one").rename(originals.files / "data/one.part")
    os.truncate(originals.files / "data/one.part", 4)
    assert originals.present(DATASET) == 4


def test_files_of_an_older_state_are_removed(originals):
    for name in ("data/old", "data/one.part", "data/2/gone"):
        path = originals.files / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    originals.begin(DATASET, ["data/one"], kept=False)
    assert sorted(path.name for path in originals.files.rglob("*")) == ["data", "one", "one.part"]


def test_a_file_that_the_remote_changed_is_removed(originals):
    originals.begin(DATASET, [], kept=True)
    newer = replace(DATASET, files=(replace(DATASET.files[0], checksum="md5:0"), *DATASET.files[1:]))
    originals.begin(newer, [], kept=False)
    record = originals.record()
    assert (record.kept, record.asked, list(originals.problems())) == (True, (), [])
    assert not (originals.files / "data/one").exists()


def test_only_the_files_of_a_request_are_seen(originals):
    with originals.only(["data/one"]) as folder:
        assert folder == originals.files
    (originals.files / "data/2").mkdir()
    (originals.files / "data/2/other").write_bytes(b"x")
    with originals.only(["data/one"]) as folder:
        assert [path.name for path in folder.rglob("*")] == ["data", "one"]
        assert (folder / "data/one").read_bytes() == DATA
    assert not folder.exists()


@pytest.fixture
def waiting(originals):
    """Starts another process, which waits for the folder; once it has it, it prints whether the folder is there."""
    code = (
        "import sys, pathlib\n"
        "from rbtool.core.remote.originals import Originals\n"
        "originals = Originals(pathlib.Path(sys.argv[1]), 'minari', 'a/b-v0')\n"
        "with originals.lock(lambda: print('waiting', flush=True)):\n"
        "    print(originals.folder.is_dir(), flush=True)\n"
    )

    def start() -> subprocess.Popen[str]:
        root = originals.folder.parents[2]
        process = subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "waiting\n"
        return process

    return start


@pytest.mark.parametrize("removed", [False, True])
def test_one_process_at_a_time_has_the_folder(originals, waiting, removed):
    with originals.lock(lambda: None):
        process = waiting()
        if removed:
            originals.remove()  # then the other process makes a new one
    assert process.communicate(timeout=HANG)[0] == "True\n"


def test_an_empty_file_is_not_counted_as_fetched(originals):
    assert originals.has_any()
    (originals.files / "data/one").write_bytes(b"")
    assert not originals.has_any()


# A planted symbolic link below the root leads no write and no removal out of it.

CONTENT = b"rows" * 1000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root itself may be a link: only links below it are untrusted."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    return tmp_path / "root"


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing may happen while a test has it."""
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    (folder / "precious").write_text("mine")
    (folder / "deep" / "precious").write_text("mine")
    yield folder
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert found == {"precious", "deep", "deep/precious"}
    assert (folder / "precious").read_text() == (folder / "deep" / "precious").read_text() == "mine"


def plant(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


def dataset(address: str) -> RemoteDataset:
    checksum = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
    return RemoteDataset("a-v0", "test:", None, (RemoteFile("data/rows", len(CONTENT), checksum, (address,)),))


@pytest.mark.parametrize("place", ["files", "files/data", "files/other", "files/data/rows", "files/data/rows.part"])
def test_fetching_removes_links_and_not_what_they_lead_to(root: Path, outside: Path, place: str, monkeypatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    originals = Originals(root, "minari", "a-v0")
    plant(originals.folder / place, outside / "precious" if "rows" in place else outside)
    with StaticServer({"rows": CONTENT}) as server, HttpTransport() as transport, originals.lock(lambda: None):
        remote = dataset(server.address("rows"))
        originals.begin(remote, remote.checksums, kept=True)
        fetch_files(remote.files, originals.files, transport)
    assert [path.name for path in originals.files.rglob("*")] == ["data", "rows"]
    assert (originals.files / "data" / "rows").read_bytes() == CONTENT
    assert list(originals.problems()) == []


def test_files_are_fetched_into_no_linked_folder(tmp_path: Path, outside: Path) -> None:
    plant(tmp_path / "files" / "data", outside)
    with HttpTransport() as transport, pytest.raises(UsageError, match="files/data is a symbolic link"):
        fetch_files(dataset("http://localhost/").files, tmp_path / "files", transport)


@pytest.mark.parametrize("place", ["minari", "minari/.originals", "minari/.originals/a-v0"])
def test_originals_lie_behind_no_link(root: Path, outside: Path, place: str) -> None:
    plant(root / place, outside)
    with pytest.raises(UsageError, match=f"{place} is a symbolic link"), Originals(root, "minari", "a-v0").lock(print):
        pass


def test_linked_originals_are_a_problem(root: Path, outside: Path) -> None:
    originals = Originals(root, "minari", "a-v0")
    with originals.lock(lambda: None):
        originals.begin(dataset("http://localhost/"), ["data/rows"], kept=True)
    plant(originals.files / "data", outside)
    assert ["is a symbolic link" in problem for problem in originals.problems()] == [True]


def _names(root: Path) -> None:
    KnownNames(root, "minari").put(Resolution("a", "a-v0", "latest"))


def _listing(root: Path) -> None:
    CatalogueFile(root, "minari", "key").save(Catalogue("test:", "2026-01-01T00:00:00Z", (), (), False))


@pytest.mark.parametrize(("place", "write"), [("minari", _names), ("minari/.catalogue", _listing)])
def test_nothing_is_written_behind_a_link(root, outside, place: str, write: Callable[[Path], None]) -> None:
    plant(root / place, outside)
    with pytest.raises(UsageError, match="is a symbolic link"):
        write(root)


def test_statistics_are_written_behind_no_link(root: Path, outside: Path, tmp_path: Path) -> None:
    plant(root / ".stats", outside)
    StatsStore(root).save(write_walks(tmp_path / "walks", [(3, "terminated")]), "", [], [])


@pytest.mark.parametrize("place", ["minari", "minari/deep", "minari/deep/a-v0"])
@pytest.mark.parametrize("replace", [True, False])
def test_datasets_are_published_behind_no_link(root: Path, outside: Path, place: str, replace: bool) -> None:
    plant(root / place, outside)
    staging = Staging(root / "minari" / "deep" / "a-v0", replace=replace, below=root)
    with pytest.raises(UsageError, match=f"{place} is a symbolic link"), staging:
        pass


def test_a_root_that_is_a_link_is_used(root: Path) -> None:
    with Staging(root / "minari" / "a-v0", below=root) as staging:
        fs.write_file(staging.path / "rows", CONTENT)
        assert staging.publish()
    _names(root)
    assert (root / "minari" / "a-v0" / "rows").read_bytes() == CONTENT
    assert KnownNames(root, "minari").get("a") == Resolution("a", "a-v0", "latest")


def test_a_linked_folder_of_an_earlier_run_is_not_taken_up(tmp_path: Path, outside: Path) -> None:
    plant(tmp_path / ".made.rbtool-new-01234567", outside)
    with Staging(tmp_path / "made", takes=lambda folder: True) as staging:
        assert not staging.taken_up
    plant(tmp_path / ".made.rbtool-old-01234567", outside)
    with Staging(tmp_path / "made") as staging:
        assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("how", [fs.open_to_fill, fs.open_to_change, fs.open_to_append])
def test_files_are_opened_to_be_written_behind_no_link(tmp_path, outside, how: Callable[[Path], int]) -> None:
    plant(tmp_path / "link", outside / "precious")
    with pytest.raises(OSError, match="link"):
        how(tmp_path / "link")


def test_a_use_leaves_its_time_on_no_linked_folder(tmp_path: Path, outside: Path) -> None:
    before = outside.stat().st_mtime_ns
    plant(tmp_path / "link", outside)
    fs.touch(tmp_path / "link")
    assert outside.stat().st_mtime_ns == before
