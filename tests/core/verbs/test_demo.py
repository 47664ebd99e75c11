"""`demo` as a function: what it makes, what it leaves alone, and a second run."""

import os
from pathlib import Path

import pytest

import rbtool
from rbtool.core.verbs.demo import DemoResult, minari_folder


@pytest.fixture
def result(tmp_path: Path) -> DemoResult:
    return rbtool.demo(tmp_path / "here")


@pytest.mark.parametrize("before", [None, "mine"])
def test_the_variable_of_the_caller_is_restored(before: str | None, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("MINARI_DATASETS_PATH", raising=False)
    if before:
        monkeypatch.setenv("MINARI_DATASETS_PATH", before)
    with minari_folder(tmp_path):
        assert os.environ["MINARI_DATASETS_PATH"] == str(tmp_path)
    assert os.environ.get("MINARI_DATASETS_PATH") == before


@pytest.mark.slow
def test_a_second_run_keeps_recordings_and_edits(result: DemoResult) -> None:
    before = {path: path.stat().st_mtime_ns for path in (result.folder / "minari").rglob("*")}
    prep = result.folder / "prep.py"
    prep.write_text(prep.read_text().replace("2.4", "1.2"))
    again = rbtool.demo(result.folder)
    assert {path: path.stat().st_mtime_ns for path in (result.folder / "minari").rglob("*")} == before
    assert [one.content_digest for one in again.datasets] == [one.content_digest for one in result.datasets]
    assert again.datasets[0].normalised_digest != result.datasets[0].normalised_digest
    assert again.datasets[1].normalised_digest == result.datasets[1].normalised_digest


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    for folder in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(rbtool.UsageError, match="left unchanged"):
            rbtool.demo(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
