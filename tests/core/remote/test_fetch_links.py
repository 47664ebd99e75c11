"""A planted symbolic link below the root leads no write and no removal out of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from static_server import StaticServer

from rbtool import UsageError
from rbtool.core.format import fs
from rbtool.core.format.locate import KnownNames, Resolution
from rbtool.core.format.sources import RemoteDataset, RemoteFile
from rbtool.core.format.staging import Staging
from rbtool.core.remote.catalogue import CatalogueFile
from rbtool.core.remote.fetch import fetch_files
from rbtool.core.remote.http import HttpTransport
from rbtool.core.remote.originals import Originals
from rbtool.core.stats import StatsStore
from rbtool.core.testing.datasets import write_walks

DATA = b"rows" * 1000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root itself may be a link: only links below it are untrusted."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    return tmp_path / "root"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    (folder / "precious").write_text("mine")
    (folder / "deep" / "precious").write_text("mine")
    return folder


@pytest.fixture(autouse=True)
def nothing_happens_outside(outside: Path):
    yield
    found = {path.relative_to(outside).as_posix() for path in outside.rglob("*")}
    assert found == {"precious", "deep", "deep/precious"}
    assert (outside / "precious").read_text() == (outside / "deep" / "precious").read_text() == "mine"


def plant(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


def dataset(address: str) -> RemoteDataset:
    checksum = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
    return RemoteDataset("a-v0", "test:", None, (RemoteFile("data/rows", len(DATA), checksum, (address,)),))


@pytest.mark.parametrize("place", ["files", "files/data", "files/other", "files/data/rows", "files/data/rows.part"])
def test_fetching_removes_links_and_not_what_they_lead_to(
    root: Path, outside: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    originals = Originals(root, "minari", "a-v0")
    plant(originals.folder / place, outside / "precious" if "rows" in place else outside)
    with StaticServer({"rows": DATA}) as server, HttpTransport() as transport, originals.lock(lambda: None):
        remote = dataset(server.address("rows"))
        originals.begin(remote, remote.checksums, kept=True)
        fetch_files(remote.files, originals.files, transport)
    assert [path.name for path in originals.files.rglob("*")] == ["data", "rows"]
    assert (originals.files / "data" / "rows").read_bytes() == DATA
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
    from rbtool.core.format.sources import Catalogue

    CatalogueFile(root, "minari", "key").save(Catalogue("test:", "2026-01-01T00:00:00Z", (), (), False))


@pytest.mark.parametrize(("place", "write"), [("minari", _names), ("minari/.catalogue", _listing)])
def test_nothing_is_remembered_behind_a_link(
    root: Path, outside: Path, place: str, write: Callable[[Path], None]
) -> None:
    plant(root / place, outside)
    with pytest.raises(UsageError, match="is a symbolic link"):
        write(root)


def test_statistics_are_remembered_behind_no_link(root: Path, outside: Path, tmp_path: Path) -> None:
    plant(root / ".stats", outside)
    StatsStore(root).save(write_walks(tmp_path / "walks", [(3, "terminated")]), [], [])


@pytest.mark.parametrize("place", ["minari", "minari/deep", "minari/deep/a-v0"])
@pytest.mark.parametrize("replace", [True, False])
def test_datasets_are_put_behind_no_link(root: Path, outside: Path, place: str, replace: bool) -> None:
    plant(root / place, outside)
    staging = Staging(root / "minari" / "deep" / "a-v0", replace=replace, below=root)
    with pytest.raises(UsageError, match=f"{place} is a symbolic link"), staging:
        pass


def test_a_root_that_is_a_link_is_used(root: Path) -> None:
    with Staging(root / "minari" / "a-v0", below=root) as staging:
        fs.write_file(staging.path / "rows", DATA)
        assert staging.publish()
    _names(root)
    assert (root / "minari" / "a-v0" / "rows").read_bytes() == DATA
    assert KnownNames(root, "minari").get("a") == Resolution("a", "a-v0", "latest")


def test_a_linked_folder_of_an_earlier_run_is_not_taken_up(tmp_path: Path, outside: Path) -> None:
    plant(tmp_path / ".made.rbtool-new-01234567", outside)
    with Staging(tmp_path / "made", takes=lambda folder: True) as staging:
        assert not staging.taken_up
    plant(tmp_path / ".made.rbtool-old-01234567", outside)
    with Staging(tmp_path / "made") as staging:
        assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("how", [fs.open_to_fill, fs.open_to_change, fs.open_to_append])
def test_files_are_opened_to_be_written_behind_no_link(
    tmp_path: Path, outside: Path, how: Callable[[Path], int]
) -> None:
    plant(tmp_path / "link", outside / "precious")
    with pytest.raises(OSError, match="link"):
        how(tmp_path / "link")


def test_a_use_leaves_its_time_on_no_linked_folder(tmp_path: Path, outside: Path) -> None:
    before = outside.stat().st_mtime_ns
    plant(tmp_path / "link", outside)
    fs.touch(tmp_path / "link")
    assert outside.stat().st_mtime_ns == before
