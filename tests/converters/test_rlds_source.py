"""RLDS originals from buckets on loopback: ids, downloads, and buckets that are closed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import ask, ask_one, failed
from loopback import Fault, Gcs
from rlds_files import PLAIN, random_episode, record, write_dataset

import rbtool
from rbtool.core.errors import UsageError
from rbtool.core.format.locate import source_class

REMOTES = "gs://gresearch/robotics gs://second"
BRIDGE = "bridge/0.1.0"


@pytest.fixture
def gcs(tmp_path: Path) -> Iterator[Gcs]:
    root = tmp_path / "gcs"
    records = [record(PLAIN, random_episode(length, seed=length)) for length in (9, 2, 14)]
    write_dataset(root / "gresearch" / "robotics" / BRIDGE, {"train": [records[:1], records[1:]]}, PLAIN)
    write_dataset(root / "second" / "toy" / "small" / "1.0.0", {"train": [records[:1]]}, PLAIN)
    (root / "gresearch" / "robotics" / "README.txt").write_text("hello")
    with Gcs(root, page_size=3) as served:
        yield served


@pytest.fixture
def environment(gcs: Gcs, tmp_path: Path) -> dict[str, str]:
    return {**gcs.environment(), "RLDS_REMOTE": REMOTES, "RBTOOL_HOME": str(tmp_path / "home")}


def test_ids_are_the_versions_of_all_buckets(environment: dict[str, str]) -> None:
    ids, one, other = ask(environment, "source:rlds", ["ids"], ["describe", BRIDGE], ["describe", "toy/small/1.0.0"])
    assert ids == {"ids": [BRIDGE, "toy/small/1.0.0"], "problems": [], "unreachable": False}
    assert (one["address"], one["revision"]) == (f"gs://gresearch/robotics/{BRIDGE}", None)
    assert [file["path"] for file in one["files"]] == [
        "dataset_info.json", "features.json", "toy-train.tfrecord-00000-of-00002", "toy-train.tfrecord-00001-of-00002",
    ]  # fmt: skip
    assert other["address"] == "gs://second/toy/small/1.0.0"
    assert all(file["checksum"].startswith("md5:") for file in (*one["files"], *other["files"]))


def test_files_come_verified_and_are_converted_as_the_originals(
    gcs: Gcs, environment: dict[str, str], tmp_path: Path
) -> None:
    gcs.faults = [Fault("GET .*00000-of.*", "corrupt")]
    found = ask_one(environment, "source:rlds", "fetch_dataset", BRIDGE, str(tmp_path / "to"))
    original = gcs.root / "gresearch" / "robotics" / BRIDGE
    for name in found["files"]:
        assert (tmp_path / "to" / name).read_bytes() == (original / name).read_bytes()
    one, other = rbtool.convert(original, tmp_path / "one"), rbtool.convert(tmp_path / "to", tmp_path / "other")
    assert one.content_digest == other.content_digest


def test_a_bucket_that_is_closed_is_named_and_the_next_one_is_asked(gcs: Gcs, environment: dict[str, str]) -> None:
    gcs.denied = {"gresearch"}
    ids, toy, gone = ask(environment, "source:rlds", ["ids"], ["describe", "toy/small/1.0.0"], ["describe", BRIDGE])
    assert (ids["ids"], ids["unreachable"], len(ids["problems"])) == (["toy/small/1.0.0"], True, 1)
    assert toy["address"].startswith("gs://second/")
    assert "is not public" in failed(gone, "AuthorisationError").message


def test_what_is_not_there_and_odd_addresses(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    failed(ask_one(environment, "source:rlds", "describe", "bridge"), "DatasetNotFoundError")
    failed(ask_one(environment, "source:rlds", "describe", BRIDGE, "v1"), "UsageError")
    monkeypatch.setenv("RLDS_REMOTE", "s3://other")
    with source_class("rlds")() as source, pytest.raises(UsageError, match=r"RLDS_REMOTE is 's3://other'"):
        source.ids()


def test_a_dataset_of_tensorflow_datasets_on_this_disk(
    gcs: Gcs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(gcs.root / "gresearch" / "robotics", tmp_path / "tfds")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "home"))
    result: Any = rbtool.download("rlds", BRIDGE, local=True)
    assert (result.id, result.episodes) == (BRIDGE, 3)
