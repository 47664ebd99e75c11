"""ArrayRecord shards: the same rows as of TFRecord shards, through the library of the format."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from rlds_files import METADATA, RICH, random_episode, record, write_dataset

import rbtool
from rbtool.core.errors import CorruptDataError, UsageError


@pytest.fixture
def records() -> list[bytes]:
    return [record(RICH, random_episode(length, RICH, seed=length), METADATA) for length in (5, 2, 7, 4)]


@pytest.fixture
def folder(records: list[bytes], tmp_path: Path) -> Path:
    """Four episodes in two shards."""
    made = write_dataset(tmp_path / "array" / "1.0.0", {"train": [records[:3], records[3:]]}, RICH, METADATA)
    library = importlib.import_module("array_record.python.array_record_module")
    for number, part in enumerate((records[:3], records[3:])):
        (made / f"toy-train.tfrecord-{number:05}-of-00002").unlink()
        writer = library.ArrayRecordWriter(str(shard(made, number)), "group_size:1")
        for one in part:
            writer.write(one)
        writer.close()
    info = json.loads((made / "dataset_info.json").read_text())
    (made / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "array_record"}))
    return made


def shard(folder: Path, number: int) -> Path:
    return folder / f"toy-train.array_record-{number:05}-of-00002"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rows_are_those_of_tfrecords(workers: int, folder: Path, records: list[bytes], tmp_path: Path) -> None:
    plain = write_dataset(tmp_path / "plain" / "1.0.0", {"train": [records]}, RICH, METADATA)
    one = rbtool.convert(folder, tmp_path / "one", num_workers=workers, rlds_last="observation")
    assert one.content_digest == rbtool.convert(plain, tmp_path / "two", rlds_last="observation").content_digest
    (folder / "dataset_info.json").unlink()
    assert rbtool.inspect(folder).episodes == 4


def test_damage_is_named_and_the_rest_can_be_kept(folder: Path, tmp_path: Path) -> None:
    shard(folder, 0).write_bytes(shard(folder, 0).read_bytes()[:70_000])
    with pytest.raises(CorruptDataError, match="array_record-00000-of-00002 is damaged") as caught:
        rbtool.convert(folder, tmp_path / "out")
    assert "\n" not in caught.value.message
    assert rbtool.convert(folder, tmp_path / "rest", skip_bad=True).episodes == 1
    (folder / "dataset_info.json").unlink()
    with pytest.raises(CorruptDataError, match="array_record-00000-of-00002 is damaged"):
        rbtool.convert(folder, tmp_path / "out")


def test_without_the_library_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    with pytest.raises(UsageError, match="the package array-record is not installed") as caught:
        rbtool.inspect(folder)
    assert caught.value.hint == "pip install 'rbtool[array-record]'"
