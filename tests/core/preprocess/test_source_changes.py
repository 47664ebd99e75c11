"""What is made of a source that is damaged, or that changes meanwhile, is not published, and not gone on with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rbtool
from rbtool.core.errors import CorruptDataError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.testing.datasets import write_walks

EPISODES = [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both")] * 5


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    write_walks(tmp_path / "walks", EPISODES)
    return tmp_path / "walks"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", [pytest.param("early", marks=pytest.mark.slow), "late"])
def test_a_source_that_changes_meanwhile_is_not_published(
    walks: Path, tmp_path: Path, workers: int, where: str
) -> None:
    file = walks / "observation.memmap"
    place = 8 if where == "early" else file.stat().st_size - 8
    first = TedReader(walks).read(("observation",), 0, 1)[0, 0]

    def function(td):
        if td["observation"][0, 0].item() == first:
            with file.open("r+b") as opened:
                opened.seek(place)
                opened.write(b"changed!")
        return td

    with pytest.raises(rbtool.CorruptDataError, match=r"was changed (while it was read|after it was written)"):
        rbtool.preprocess(walks, function, tmp_path / "made", num_workers=workers, chunk_size=9)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["walks"]


def test_a_change_that_came_after_the_check_is_seen(
    walks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TedReader, "verify_files", lambda self: None)

    def function(td):
        (walks / "action.memmap").touch()
        return td

    with pytest.raises(rbtool.CorruptDataError, match=r"walks was changed while it was read"):
        rbtool.preprocess(walks, function, tmp_path / "made", num_workers=0, chunk_size=9)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["walks"]


def test_damage_ends_the_run_as_soon_as_it_is_known(
    walks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def verify(self):
        raise rbtool.CorruptDataError("damaged")

    def function(td):
        calls.append(len(td))
        return td

    monkeypatch.setattr(TedReader, "verify_files", verify)
    with pytest.raises(rbtool.CorruptDataError, match="damaged"):
        rbtool.preprocess(walks, function, tmp_path / "made", num_workers=0, chunk_size=1)
    assert len(calls) < 100
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["walks"]


def damaged(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("workers", [0, 2])
def test_leaves_that_are_not_read_are_left_to_check(walks: Path, tmp_path: Path, workers: int) -> None:
    chosen = {"select": ["observation"]}
    rbtool.preprocess(walks, None, tmp_path / "sound", operations=chosen, num_workers=workers, chunk_size=9)
    damaged(walks / "action.memmap")
    rbtool.preprocess(walks, None, tmp_path / "made", operations=chosen, num_workers=workers, chunk_size=9)
    digests = [TedReader(tmp_path / name).manifest.content_digest for name in ("sound", "made")]
    assert digests[0] == digests[1]
    with TedReader(walks) as reader, pytest.raises(CorruptDataError):
        reader.verify_files()


@pytest.mark.parametrize("file", ["action.memmap", "next/reward.memmap", "next/terminated.memmap"])
@pytest.mark.parametrize("operations", [None, {"select": ["action"]}])
def test_damage_of_what_is_read_is_seen(walks: Path, tmp_path: Path, file: str, operations: object) -> None:
    damaged(walks / file)
    function = None if operations else lambda td: td
    with pytest.raises(rbtool.CorruptDataError, match="was changed after it was written"):
        rbtool.preprocess(walks, function, tmp_path / "made", operations=operations, num_workers=0)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["walks"]


def test_chunks_of_other_files_are_not_resumed(walks: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mended"

    def function(td):
        if td["episode"][0] > 10 and not mark.exists():
            raise OSError("the file server is away")
        return td

    def run(**options) -> None:
        rbtool.preprocess(walks, function, tmp_path / "made", num_workers=0, chunk_size=9, **options)

    with pytest.raises(rbtool.RbtoolError, match="file server"):
        run()
    mark.touch()
    os.utime(walks / "observation.memmap", ns=(0, 0))
    with pytest.raises(rbtool.UsageError, match=r"is another one: files of the source differ"):
        run(resume=True)
    run()
    assert TedReader(tmp_path / "made").manifest.content_digest == TedReader(walks).manifest.content_digest
