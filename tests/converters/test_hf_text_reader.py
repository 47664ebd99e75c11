"""Datasets of text: what `save_to_disk` wrote, and repositories of a hub on loopback, row by row."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from commands import ask, ask_one, failed
from hub import Hub
from machine import Machine
from text_files import COMPARISONS, SPLITS, TLDR, lay_out_text_hub, plain_rows, saved_tldr, write_parquet

import rbtool
from rbtool.converters.hf_text.reader import HfTextReader, splits_among
from rbtool.core.errors import CorruptDataError, FormatError
from rbtool.core.format.contracts import Piece, SourceFacts
from rbtool.core.format.memmap.reader import TedReader

SOURCE = "source:hf-text"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_tldr(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def root(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out_text_hub(tmp_path_factory.mktemp("hub"), saved)


@pytest.fixture
def machine(root: Path, tmp_path: Path) -> Iterator[Machine]:
    with Hub(root) as hub:
        yield Machine(hub, tmp_path)


def strings(reader: TedReader, name: str) -> list[str]:
    steps = reader.manifest.steps
    rows, lengths = reader.read((name,), 0, steps), reader.read((f"{name}_length",), 0, steps)
    assert not any(row[count:].any() for row, count in zip(rows, lengths, strict=True))
    return [row[:count].tobytes().decode() for row, count in zip(rows, lengths, strict=True)]


def assert_all_rows(path: Path, saved: Path, splits: Sequence[str] = SPLITS) -> None:
    expected = [(at, row) for at, split in enumerate(splits) for row in plain_rows(saved, split)]
    with TedReader(path) as reader:
        for name in ("prompt", "label"):
            assert strings(reader, name) == [row[name] for _, row in expected]
        if len(splits) > 1:
            assert reader.read(("split",), 0, len(expected)).tolist() == [at for at, _ in expected]
        assert json.loads(reader.documents()["splits.json"]) == {"splits": list(splits)}
        assert reader.episodes.length.tolist() == [1] * len(expected)
        assert reader.episodes.terminated.all()


def test_every_row_of_a_saved_dataset(saved: Path, tmp_path: Path) -> None:
    assert_all_rows(rbtool.convert(saved, tmp_path / "all").path, saved)
    with TedReader(rbtool.convert(saved / "valid", tmp_path / "one").path) as reader:
        assert strings(reader, "prompt") == [row["prompt"] for row in plain_rows(saved, "valid")]
        assert json.loads(reader.documents()["splits.json"]) == {"splits": [""]}  # it was saved alone, without a name


def test_inspect_check_and_sample_work(saved: Path, tmp_path: Path) -> None:
    found = rbtool.inspect(saved)
    assert (found.type, found.steps, found.episodes) == ("source", 150, 150)
    assert "0 train (50 rows), 1 valid (50 rows), 2 test (50 rows)" in found.notes[1]
    path = rbtool.convert(saved, tmp_path / "all").path
    assert rbtool.check(path).errors == 0
    batch = rbtool.load_dataset(path, 32, seed=0, transform=rbtool.DecodeText()).sample()
    texts = {(row["prompt"], row["label"]) for split in SPLITS for row in plain_rows(saved, split)}
    assert set(zip(batch["prompt"], batch["label"], strict=True)) <= texts


def test_small_blocks_and_chosen_rows_are_the_same(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HfTextReader(saved) as reader:
        whole = {piece.episode: piece.columns for piece in reader.pieces()}
    monkeypatch.setattr(HfTextReader, "block_bytes", 10_000)
    with HfTextReader(saved) as reader:
        for numbers in (range(150), [149, 3, 4, 70], [0]):
            for piece in reader.pieces(numbers):
                for key, rows in piece.columns.items():
                    assert np.array_equal(rows, whole[piece.episode][key])
        blocks = [block for block in reader.blocks([2, 3, 99, 5]) if not hasattr(block, "episode")]
    assert np.concatenate([block.episodes for block in blocks]).tolist() == [2, 3, 99, 5]
    for block in blocks:
        for at, number in enumerate(block.episodes.tolist()):
            assert all(np.array_equal(rows[at], whole[number][key][0]) for key, rows in block.columns.items())


def test_names_of_files_give_splits() -> None:
    paths = [
        "data/valid-00000-of-00001-0a.parquet", "data/train-00001-of-00002.parquet",
        "data/train-00000-of-00002.parquet", "test.parquet", ".git/x.parquet",
        "README.md", "main/train-00000-of-00001.parquet", "data/en/train.parquet",
    ]  # fmt: skip
    found = [(split.id, len(split.files)) for split in splits_among(paths)]
    assert found == [("train", 2), ("valid", 1), ("test", 1), ("en:train", 1), ("main:train", 1)]
    assert splits_among(paths)[0].files == (paths[2], paths[1])


def surveyed(columns: dict[str, Any], folder: Path) -> tuple[SourceFacts, list[Piece]]:
    write_parquet(folder / "source/data/train-00000-of-00001.parquet", columns)
    with HfTextReader(folder / "source", options={"id": "a/b"}) as reader:
        facts = reader.facts()
        pieces = list(reader.pieces())
    return facts, pieces


def test_columns_of_all_kinds(tmp_path: Path) -> None:
    columns = {
        "text": pa.array(["a", "ü", ""]).dictionary_encode(), "text_length": pa.array([7, 8, 9], pa.int16()),
        "action": pa.array([0.5, 1.5, 2.5]), "done": pa.array([True, False, True]), "next": ["x", "y", "z"],
        "list": [[1], [2], []], "shape": ["p", "q", "r"],
    }  # fmt: skip
    facts, pieces = surveyed(columns, tmp_path)
    fields = {field.name: (field.dtype, field.role) for field, _ in facts.fields}
    assert fields["text"] == ("uint8", "text")
    assert fields["text_length"] == ("int32", "text")
    assert fields["text_length_"] == ("int16", "info")
    assert (fields["done_"], fields["action"]) == (("bool", "info"), ("float64", "info"))
    assert facts.renamed_keys == {"text_length": "text_length_", "done": "done_", "next": "next_", "shape": "shape_"}
    assert [dropped.key for dropped in facts.dropped_keys] == ["list"]
    assert [piece.columns[("text_length",)][0] for piece in pieces] == [1, 2, 0]
    assert [piece.columns[("text_length_",)][0] for piece in pieces] == [7, 8, 9]
    assert pieces[1].columns[("text",)].tobytes() == "ü".encode()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a", None]}, "1 rows without a value \\(null\\) in 'text'"),
        ({"number": [1]}, "has no column of text"),
        ({"text": ["x" * 70_000]}, "has a text of 70,000 bytes in 'text'"),
        ({"text": pa.array([], "string")}, "has no rows"),
        ({"text": ["a"], "n": pa.array([None], "int64")}, "1 rows without a value \\(null\\) in 'n'"),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_read_are_refused(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=message):
        surveyed(columns, tmp_path)


def test_splits_with_other_columns_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "source/test-00000-of-00001.parquet", {"other": ["a"]})
    with pytest.raises(FormatError, match="have different columns"):
        surveyed({"text": ["a"]}, tmp_path)


def test_folders_of_steps_and_damaged_ones_are_not_taken_for_text(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    for name in ("dataset_dict.json", "train/state.json"):
        content = (folder / name).read_text()
        for wrong in ("{", "[]", '{"splits": ["../up"]}', '{"_data_files": [{"filename": "/etc/passwd"}]}'):
            (folder / name).write_text(wrong)
            assert not HfTextReader.recognises(folder)
        (folder / name).write_text(content)
    assert HfTextReader.recognises(folder)
    file = folder / "train/data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:30_000])
    with pytest.raises((CorruptDataError, FormatError)):
        rbtool.convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_download_from_a_hub_by_either_form(machine: Machine, saved: Path) -> None:
    found = machine.json("download", f"hf-text:{TLDR}")
    assert (found["id"], found["steps"]) == (TLDR, 150)
    assert_all_rows(Path(found["path"]), saved)
    assert machine.json("download", "hf-text", TLDR)["already_there"]
    assert machine.json("inspect", f"hf-text:{TLDR}")["episodes"] == 150
    assert machine.run("sample", f"hf-text:{TLDR}").returncode == 0
    assert b"license: mit" in (Path(found["path"]) / ".rbtool/source/README.md").read_bytes()
    assert machine.leftovers() == []


def test_one_split_is_downloaded_alone(machine: Machine, saved: Path) -> None:
    found = machine.json("download", f"hf-text:{TLDR}:valid")
    assert_all_rows(Path(found["path"]), saved, ["valid"])
    assert {name.split("-")[0] for name in machine.fetched("parquet")} == {"valid"}
    assert machine.json("download", f"hf-text:{TLDR}")["steps"] == 150
    assert machine.json("download", "hf-text:someone/maths:main")["steps"] == 1


def test_what_is_not_there_is_named(machine: Machine) -> None:
    for name, status, words in (
        (f"{TLDR}:vald", 4, "there are train, valid, test"), ("someone/csv", 4, "has no Parquet files"),
        ("someone/maths", 2, "main, socratic"), ("someone/nothing", 4, "someone/nothing"),
    ):  # fmt: skip
        done = machine.run("download", f"hf-text:{name}")
        assert (done.returncode, words in done.stderr) == (status, True), done.stderr


def test_the_source_lists_its_organisation_and_describes_files(root: Path, tmp_path: Path) -> None:
    with Hub(root) as hub:
        environment = hub.environment(tmp_path / "home")
        listed, found = ask(environment, SOURCE, ["ids"], ["describe", f"{TLDR}:test"])
        assert listed["ids"] == [COMPARISONS, TLDR]
        assert found["revision"] == hub.repositories[TLDR].commit
        assert [file["path"].split("-")[0] for file in found["files"]] == ["README.md", "data/test", "data/test"]
        assert all(file["checksum"] for file in found["files"])
        failed(ask_one(environment, SOURCE, "describe", "tldr"), "UsageError")
