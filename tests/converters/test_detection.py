"""Formats are recognised by content, and no two readers claim the same files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import each
from table_files import flat, random_episodes, write_d4rl

import rbtool
from rbtool.core.errors import CorruptDataError, FormatError
from rbtool.core.format.locate import reader_class, reader_names

DATA = Path("tests/data")
FORMATS = [name for name in reader_names() if (DATA / name).is_dir()]


def places(folder: Path) -> Iterator[Path]:
    """Every file and every folder below a folder, which comes first."""
    yield folder
    yield from sorted(folder.rglob("*"))


def claimed(path: Path) -> set[str]:
    return {name for name in reader_names() if reader_class(name).recognises(path)}


@each("name", FORMATS)
def test_the_files_of_a_format_are_claimed_by_its_reader_alone(name: str) -> None:
    found = {path: claimed(path) for path in places(DATA / name)}
    assert {path: names for path, names in found.items() if not names <= {name}} == {}
    assert any(found.values())


@pytest.mark.parametrize("folder", sorted((DATA / "torchrl_checkpoints").iterdir())[::8], ids=lambda path: path.name)
def test_checkpoints_are_claimed_by_no_reader(folder: Path) -> None:
    assert {path: names for path in places(folder) if (names := claimed(path))} == {}


def test_odd_files_are_claimed_by_no_reader(tmp_path: Path) -> None:
    contents = {
        "empty": b"", "empty.npz": b"", "empty.hdf5": b"", "text.json": b"{}", "list.jsonl": b"[1]\n",
        "a.csv": b"a,b\n", "zip.npz": b"PK\x05\x06" + bytes(18), "noise.parquet": bytes(range(256)),
        "pickle.pkl": b"\x80\x04N.",
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert {path.name: names for path in places(tmp_path) if (names := claimed(path))} == {}
    assert claimed(tmp_path / "missing") == set()


def test_a_folder_around_a_dataset_is_not_taken_and_what_is_in_it_is_named(tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "folder" / "raw" / "a.hdf5", flat(random_episodes((3,))))
    (tmp_path / "folder" / "notes.txt").write_text("x")
    for call in (rbtool.inspect, rbtool.check, lambda path: rbtool.convert(path, tmp_path / "out")):
        with pytest.raises(FormatError) as caught:
            call(tmp_path / "folder")
        assert caught.value.hint == f"{file.parent} in it is in format d4rl"


def test_a_file_that_only_lies_beside_a_dataset_is_no_part_of_it(tmp_path: Path) -> None:
    write_d4rl(tmp_path / "a.hdf5", flat(random_episodes((3,))))
    (tmp_path / "steps.csv").write_text("obs,act,rew,done\n1,2,3,0\n1,2,3,1\n")
    assert [column.name for column in rbtool.inspect(tmp_path / "steps.csv").columns] == ["obs", "act", "rew", "done"]


@each("name", ["steps.csv", "a.npz", "a.hdf5", "a.json", "a.parquet", "a.pickle", "a"])
def test_an_empty_file_is_named_as_such(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    for call in (rbtool.inspect, rbtool.check, lambda path: rbtool.convert(path, tmp_path / "out")):
        with pytest.raises(CorruptDataError, match=f"{name} is an empty file"):
            call(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
