"""`OgbenchSource`: two files a dataset, mirrors in order, files opened before they are taken, and ogbench's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import each
from conversions import FAULTS, MirrorSourceTests
from static_server import SOUND, Fault, StaticServer, mirror
from table_files import plain_ogbench, random_ogbench, write_ogbench

import rbtool
from rbtool.converters.ogbench.reader import OgbenchSource, file_name
from rbtool.core.errors import (
    CheckFailed,
    CorruptDataError,
    DatasetNotFoundError,
    NetworkError,
    RbtoolError,
    UsageError,
)
from rbtool.core.format.locate import reader_class
from rbtool.core.format.memmap.reader import TedReader

ID = "antmaze-giant-navigate-v0"  # the first of all
TRAIN, VAL = f"{ID}.npz", f"{ID}-val.npz"
COLUMNS = {TRAIN: random_ogbench((5, 9, 4)), VAL: random_ogbench((3, 2), seed=1)}


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("files")
    return {name: write_ogbench(folder / name, columns).read_bytes() for name, columns in COLUMNS.items()}


@pytest.fixture
def server(contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StaticServer]:
    files = {f"base/{name}": content for name, content in contents.items()}
    with mirror(StaticServer(files), "OGBENCH_URL", monkeypatch, tmp_path / "store") as running:
        yield running


class TestSource(MirrorSourceTests):
    name, id, count = "ogbench", ID, 85


@each(
    ("dataset_id", "file"),
    [
        ("cube-single-play-v0", "cube-single-play-v0"),
        ("cube-single-play-singletask-v0", "cube-single-play-v0"),
        ("cube-double-play-singletask-task2-v0", "cube-double-play-v0"),
        ("antmaze-large-navigate-oraclerep-v0", "antmaze-large-navigate-v0"),
    ],
)
def test_words_that_are_not_in_the_name_of_the_file(dataset_id: str, file: str) -> None:
    assert file_name(dataset_id) == file


def test_both_files_are_fetched_opened_and_one_dataset(server: StaticServer) -> None:
    result = rbtool.download("ogbench", ID)
    assert (result.id, result.episodes, result.steps) == (ID, 5, 23)
    assert f"episodes 0:3 are {TRAIN} (train) and 3:5 are {VAL} (val)" in result.notes
    assert any(note.startswith("unverified by the remote") for note in result.notes)
    assert result.fetched_from == server.address(f"base/{TRAIN}")
    with TedReader(result.path) as reader:
        found = reader.read(("observation",), 0, 23)
    expected = plain_ogbench(COLUMNS[TRAIN]) + plain_ogbench(COLUMNS[VAL], 3)
    assert found.tobytes() == b"".join(row["observation"].tobytes() for row in expected)
    server.asked.clear()
    assert rbtool.download("ogbench", ID.removesuffix("-v0")).already_there
    assert server.asked == []
    assert rbtool.load_dataset(f"ogbench:{ID}", batch_size=4).sample()["next", "observation"].shape == (4, 3)


def test_options_make_other_datasets(server: StaticServer) -> None:
    plain, zero = rbtool.download("ogbench", ID), rbtool.download("ogbench", ID, reward="zero")
    val = rbtool.download("ogbench", ID, filter_key="val")
    assert len({plain.path, zero.path, val.path}) == 3
    assert (zero.steps, val.steps, val.episodes) == (23, 5, 2)


def test_a_task_is_the_same_file_without_its_rewards(server: StaticServer) -> None:
    name = "antmaze-giant-navigate-singletask-task3-v0"
    result = rbtool.download("ogbench", name)
    assert (result.id, result.steps) == (name, 23)
    assert f"{name} is the file {ID}, which does not have the rewards of the task" in result.notes
    assert not any("calls itself" in note for note in result.notes)


def test_ids_that_are_not_published_are_asked_for_or_refused(server: StaticServer, contents: dict[str, bytes]) -> None:
    server.files |= {"base/mine-play-v0.npz": contents[TRAIN], "base/mine-play-v0-val.npz": contents[VAL]}
    assert rbtool.download("ogbench", "mine-play-v0").steps == 23
    server.asked.clear()
    with pytest.raises(DatasetNotFoundError, match="among 85") as caught:
        rbtool.download("ogbench", "antmaze-giant-navigat-v0")
    assert ID in caught.value.hint
    assert [asked.path for asked in server.asked] == ["base/antmaze-giant-navigat-v0.npz"]
    with pytest.raises(UsageError, match="is not a dataset id"):
        rbtool.download("ogbench", "../antmaze-v0")
    for odd in ("ant maze-v0", "antmaze-v0", "a/b-v0"):
        with pytest.raises(RbtoolError):
            rbtool.download("ogbench", odd, exact_id=True)
    with pytest.raises(DatasetNotFoundError, match="published as a folder of many files") as caught:
        rbtool.download("ogbench", "cube-double-play-100m-v0")
    assert "/cube-double-play-100m-v0" in caught.value.hint


FAULTS_HERE = FAULTS | {
    "cut at first": ([Fault(cut=800), SOUND], None),
    "cut without ranges": ([Fault(cut=800, no_range=True), Fault(no_range=True)], None),
    "length unknown": ([Fault(unannounced=True)], NetworkError),
    "other bytes": ([Fault(corrupt=300)], CorruptDataError),
    "always cut": ([Fault(cut=0)], NetworkError),
}


@pytest.mark.parametrize("name", [TRAIN, VAL])
@pytest.mark.parametrize("case", FAULTS_HERE)
def test_the_fault_table(case: str, name: str, server: StaticServer, tmp_path: Path) -> None:
    faults, kind = FAULTS_HERE[case]
    server.faults[f"base/{name}"] = list(faults)
    if kind is None:
        assert rbtool.download("ogbench", ID).steps == 23
        return
    with pytest.raises(kind) as caught:
        rbtool.download("ogbench", ID)
    if kind is not CorruptDataError:
        assert "OGBENCH_URL" in caught.value.hint
    assert not (tmp_path / "store" / "ogbench" / ID).exists()


@each("body", [b"<!DOCTYPE html><html>Not today</html>", b"PK\x03\x04" + bytes(500)])
def test_what_is_no_npz_is_not_believed(server: StaticServer, body: bytes, tmp_path: Path) -> None:
    server.files[f"base/{VAL}"] = body
    with pytest.raises(CorruptDataError, match="sends no OGBench file") as caught:
        rbtool.download("ogbench", ID)
    assert "OGBENCH_URL" in caught.value.hint
    assert not list((tmp_path / "store").rglob(VAL))


def test_a_truncated_file_at_the_source_is_not_believed(server: StaticServer, contents: dict[str, bytes]) -> None:
    server.files[f"base/{TRAIN}"] = contents[TRAIN][:-40]
    with pytest.raises(CorruptDataError, match="it was cut"):
        rbtool.download("ogbench", ID)


def test_mirrors_are_tried_in_order(
    server: StaticServer, monkeypatch: pytest.MonkeyPatch, contents: dict[str, bytes]
) -> None:
    server.files = {f"html/{TRAIN}": b"<html>", f"html/{VAL}": contents[VAL]}
    server.files |= {f"good/{name}": content for name, content in contents.items()}
    monkeypatch.setenv("OGBENCH_URL", ", ".join(server.address(base) for base in ("none", "html", "good")))
    assert rbtool.download("ogbench", ID).steps == 23
    assert f"good/{TRAIN}" in {asked.path for asked in server.asked}
    assert f"good/{VAL}" not in {asked.path for asked in server.asked}


@each("value", ["ftp://x/y", "x.org", "https://someone:secret@x.org/data"])
def test_a_base_url_of_another_form_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OGBENCH_URL", value)
    with pytest.raises(UsageError, match="OGBENCH_URL has") as caught:
        rbtool.download("ogbench", ID)
    assert "secret" not in f"{caught.value}{caught.value.hint}"


def test_revisions_and_changes(server: StaticServer) -> None:
    with pytest.raises(UsageError, match="keeps no revisions"):
        rbtool.download("ogbench", ID, revision="main")
    server.faults = {f"base/{name}": [Fault(headers={"ETag": '"one"'})] for name in (TRAIN, VAL)}
    rbtool.download("ogbench", ID)
    assert rbtool.download("ogbench", ID, frozen=True).already_there
    server.faults[f"base/{VAL}"] = [Fault(headers={"ETag": '"two"'})]
    with pytest.raises(CheckFailed):
        rbtool.download("ogbench", ID, frozen=True)


def test_the_folder_of_ogbench(contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name, value in (("OGBENCH_DATASET_DIR", cache), ("RBTOOL_HOME", tmp_path / "store"), ("RBTOOL_OFFLINE", "1")):
        monkeypatch.setenv(name, str(value))
    cache.mkdir()
    for name, content in contents.items():
        (cache / name).write_bytes(content)
    write_ogbench(cache / "scene-play-v0.npz", random_ogbench((2,)))  # without its validation file
    result = rbtool.download("ogbench", ID, local=True)
    assert (result.steps, result.episodes, result.request["origin"]) == (23, 5, "local")
    assert list(OgbenchSource.local_cache.ids(reader_class("ogbench"))) == [ID]
    task = rbtool.download("ogbench", "antmaze-giant-navigate-singletask-v0", local=True)
    assert task.content_digest == result.content_digest
    with pytest.raises(DatasetNotFoundError, match=r"looked for scene-play-v0-val\.npz"):
        rbtool.download("ogbench", "scene-play-v0", local=True)
    with pytest.raises(DatasetNotFoundError, match=r"looked for cube-single-play-v0\.npz") as caught:
        rbtool.download("ogbench", "cube-single-play-v0", local=True)
    assert "OGBENCH_DATASET_DIR" in caught.value.hint
