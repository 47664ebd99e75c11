"""A run that is resumed gives the result of one that was not interrupted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import rbtool
from rbtool.core.engine import workspace
from rbtool.core.format import fs
from rbtool.core.format.manifest import Manifest
from rbtool.core.preprocess.run import UnfinishedRun
from rbtool.core.progress import Silent

EPISODES = [(6, "terminated"), (1, "truncated"), (9, "open"), (4, "both"), (12, "truncated"), (1, "terminated")]


def run(source: Path, function, dest: Path, **options):
    return rbtool.preprocess(source, function, dest, **{"num_workers": 0, "chunk_size": 5, "retries": 0} | options)


def leftover(dest: Path) -> Path:
    [found] = dest.parent.glob(f".{dest.name}.rbtool-new-*")
    return found


def flaky():
    """Count the calls, and fail in the one that the environment names: nothing that a fingerprint of code sees."""
    calls = int(os.environ.get("CALLS", "0")) + 1
    os.environ["CALLS"] = str(calls)
    if calls == int(os.environ.get("FAILS", "-1")):
        raise OSError("the file server is away")


def noisy(td):
    flaky()
    td["noise"] = torch.rand(td.shape)
    return td


def halved(td):
    flaky()
    return td[: len(td) // 2]


@pytest.fixture
def fail_in(monkeypatch: pytest.MonkeyPatch):
    """Reset the count of calls and choose the one that fails."""

    def choose(number: int) -> None:
        monkeypatch.setenv("CALLS", "0")
        monkeypatch.setenv("FAILS", str(number))

    choose(-1)
    return choose


def calls() -> int:
    return int(os.environ["CALLS"])


@pytest.mark.parametrize(
    ("unit", "function"), [("step", noisy), ("step", halved), ("row", noisy), ("episode", halved), ("episode", noisy)]
)
def test_a_resumed_run_does_only_what_is_left(walks: Path, tmp_path: Path, fail_in, unit: str, function) -> None:
    options = {"unit": unit, "vmap": False if unit == "row" else None}
    whole = run(walks, function, tmp_path / "whole", **options)
    all_calls = calls()
    fail_in(all_calls - 1)
    with pytest.raises(rbtool.RbtoolError, match="the file server is away") as caught:
        run(walks, function, tmp_path / "made", **options)
    assert "add --resume" in caught.value.hint
    fail_in(-1)
    found = run(walks, function, tmp_path / "made", resume=True, **options)
    assert found.content_digest == whole.content_digest
    assert 0 < calls() <= all_calls // 2
    assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["made", "walks", "whole"]


def test_a_failure_of_the_first_chunk_leaves_nothing_to_resume(walks: Path, tmp_path: Path, fail_in) -> None:
    fail_in(1)
    with pytest.raises(rbtool.RbtoolError, match="the file server is away") as caught:
        run(walks, noisy, tmp_path / "made")
    assert "resume" not in caught.value.hint
    assert [entry.name for entry in tmp_path.iterdir()] == ["walks"]


def test_all_other_chunks_are_done_before_a_failure_is_raised(walks: Path, tmp_path: Path) -> None:
    def fails_on_two(td):
        if {3, 5} & set(td["episode"].tolist()):
            raise ValueError(f"episode {td['episode'].max().item()}")
        return td

    with pytest.raises(rbtool.RbtoolError) as caught:
        run(walks, fails_on_two, tmp_path / "made", unit="episode", keep_going=True)
    text = str(caught.value)
    assert text.startswith("2 of 6 chunks failed: ")
    assert "steps 16 to 19 (episode 3): ValueError: episode 3" in text
    assert "step 32 (episode 5): ValueError: episode 5" in text
    assert "4 of 6 chunks are kept" in caught.value.hint
    assert not (tmp_path / "made").exists()


def test_a_failed_chunk_is_tried_again(walks: Path, tmp_path: Path, fail_in) -> None:
    fail_in(3)
    found = run(walks, noisy, tmp_path / "made", retries=1)
    assert calls() == 8
    assert found.content_digest == run(walks, noisy, tmp_path / "whole").content_digest


def test_without_resume_a_run_starts_over(walks: Path, tmp_path: Path, fail_in) -> None:
    cut_short(walks, tmp_path / "made", fail_in)
    run(walks, noisy, tmp_path / "made")
    assert calls() == 7


def cut_short(walks: Path, dest: Path, fail_in) -> Path:
    fail_in(5)
    with pytest.raises(rbtool.RbtoolError):
        run(walks, noisy, dest)
    fail_in(-1)
    return leftover(dest)


@pytest.mark.parametrize("options", [{"chunk_size": 4}, {"seed": 1}, {"num_frames": 30}, {"unit": "episode"}])
def test_another_run_is_not_resumed(walks: Path, tmp_path: Path, fail_in, options: dict) -> None:
    left = cut_short(walks, tmp_path / "made", fail_in)
    with pytest.raises(rbtool.UsageError, match="is another one") as caught:
        run(walks, noisy, tmp_path / "made", resume=True, **options)
    assert "leave --resume out" in caught.value.hint
    assert left.exists()


def test_resume_without_an_unfinished_run_starts_one(walks: Path, tmp_path: Path, fail_in) -> None:
    assert run(walks, noisy, tmp_path / "made", resume=True).steps == 33


@pytest.mark.parametrize("damage", ["rows", "journal end", "journal begin", "leaf"])
def test_damaged_chunks_are_done_again(walks: Path, tmp_path: Path, fail_in, damage: str) -> None:
    left = cut_short(walks, tmp_path / "made", fail_in)
    log = workspace.journal_path(left)
    if damage == "rows":
        with open(workspace.placed_folder(left) / "action.memmap", "r+b") as file:
            file.write(b"\xff" * 8)
    elif damage == "leaf":
        (workspace.placed_folder(left) / "action.memmap").write_bytes(b"")
    elif damage == "journal end":
        log.write_bytes(log.read_bytes()[:-20])
    else:
        log.write_bytes(b"?" + log.read_bytes()[1:])
    notes = Notes()
    found = run(walks, noisy, tmp_path / "made", resume=True, progress=notes)
    assert found.content_digest == run(walks, noisy, tmp_path / "whole").content_digest
    over = f"the unfinished run at {left} has no journal to resume from: all is done again"
    assert (over in notes.texts) == (damage == "journal begin")


class Notes(Silent):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def test_a_journal_that_cannot_be_read_now_is_kept(walks: Path, tmp_path: Path, fail_in, monkeypatch) -> None:
    left = cut_short(walks, tmp_path / "made", fail_in)

    def fails(path: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(workspace, "read_regular", fails)
        with pytest.raises(OSError, match=r"journal\.jsonl"):
            run(walks, noisy, tmp_path / "made", resume=True)
    assert workspace.journal_path(left).exists()
    run(walks, noisy, tmp_path / "made", resume=True)
    assert calls() < 7


def test_a_run_that_ended_while_completing_is_completed(walks: Path, tmp_path: Path, fail_in, monkeypatch) -> None:
    whole = run(walks, noisy, tmp_path / "whole")
    rename, moved = fs.rename, []

    def stops(source: Path, target: Path, **folders: int) -> None:
        if moved:
            raise KeyboardInterrupt
        moved.append(target)
        rename(source, target, **folders)

    with monkeypatch.context() as patched:
        patched.setattr(fs, "rename", stops)
        with pytest.raises(KeyboardInterrupt):
            run(walks, noisy, tmp_path / "made")
    fail_in(1)
    found = run(walks, noisy, tmp_path / "made", resume=True)
    assert (found.content_digest, calls()) == (whole.content_digest, 0)
    assert Manifest.load(tmp_path / "made").content_digest == whole.content_digest


@pytest.mark.parametrize(
    ("function", "over", "gone"),
    [
        (noisy, False, ()), (halved, True, ()), (halved, False, ("journal.jsonl",)), (noisy, True, ("journal.jsonl",)),
        (noisy, False, ("action.memmap", "0.rows")), (halved, True, ("action.memmap", "0.rows")),
    ],
)  # fmt: skip
def test_a_run_killed_while_it_removes_a_folder_is_completed(
    walks: Path, tmp_path: Path, fail_in, monkeypatch, function, over: bool, gone: tuple[str, ...]
) -> None:
    whole = run(walks, function, tmp_path / "whole")
    if over:
        run(walks, torch.clone, tmp_path / "made")
    remove = fs.remove

    def stops(path: Path, **folders: int) -> None:
        for inner in sorted(path.rglob("*")):
            if inner.name in gone:
                remove(inner)
        if path.is_dir():
            raise KeyboardInterrupt
        remove(path, **folders)

    with monkeypatch.context() as patched:
        patched.setattr(fs, "remove", stops)
        with pytest.raises(KeyboardInterrupt):
            run(walks, function, tmp_path / "made", force=True)
    published = (tmp_path / "made").exists() and Manifest.load(tmp_path / "made").content_digest == whole.content_digest
    for number in range(2):
        fail_in(-1 if published or number else 1)
        found = run(walks, function, tmp_path / "made", resume=True, force=True)
        assert found.content_digest == whole.content_digest
        assert [entry.name for entry in sorted(tmp_path.iterdir())] == ["made", "walks", "whole"]


def test_a_journal_reads_as_it_was_written(walks: Path, tmp_path: Path, fail_in) -> None:
    left = cut_short(walks, tmp_path / "made", fail_in)
    found = UnfinishedRun.of(left)
    assert found is not None
    run_of, fields, finished = found
    assert run_of["chunk_size"] == 5
    assert {field.name for field in fields} >= {"noise", "action", "next.reward"}
    assert sum(one.rows for one in finished.values()) == 20 - 2  # the last task has three steps
    assert all(np.isfinite(one.returns).all() for one in finished.values())
