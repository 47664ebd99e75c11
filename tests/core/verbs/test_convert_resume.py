"""`convert --num-workers N --resume`: what was cut short and resumed ends with the bytes of one process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from d4rl_files import flat, random_episodes, write
from dataset_bytes import bytes_below
from waiting import wait_until

import rbtool
from rbtool.converters.d4rl.reader import D4rlReader
from rbtool.core.engine.tasks import Task
from rbtool.core.engine.workspace import journal_path, placed_folder, result_folder
from rbtool.core.errors import RbtoolError, UsageError
from rbtool.core.format import fs
from rbtool.core.format.packed.schema import RECORDS
from rbtool.core.verbs import convert_workers
from rbtool.core.verbs.convert_workers import ConversionRunner, Converted

LENGTHS = [3, 1, 9, 4, 1, 1, 30, 2, 5, 6, 1, 2, 8, 4, 3]
KINDS = [
    {"layout": "ted"},
    {"layout": "packed"},
    {"layout": "packed", "compress": ["observation=zstd:3", "action=lz4"]},
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["ted", "packed", "compressed"])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Episodes of which some have next observations that do not follow."""
    columns = flat(random_episodes(LENGTHS), following=True)
    columns["next_observations"][[2, 17, 20, 60]] += 1
    return write(tmp_path / "source.hdf5", columns)


class Reads:
    """Which episodes are read, by any process, and where it is killed instead."""

    def __init__(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._log, self._monkeypatch = log, monkeypatch
        self._plain = D4rlReader._block
        self.kill_at(None)

    def kill_at(self, episode: int | None, *, after_another: bool = True) -> None:
        self._log.write_bytes(b"")

        def block(reader: D4rlReader, numbers: Any) -> Any:
            if episode in numbers:
                if after_another:
                    wait_until(lambda: self.finished() > 0, "the end of another chunk")
                os.kill(os.getpid(), signal.SIGKILL)
            with open(self._log, "a") as file:
                file.write("".join(f"{number}\n" for number in numbers))
            return self._plain(reader, numbers)

        self._monkeypatch.setattr(D4rlReader, "_block", block)

    def finished(self) -> int:
        """How many chunks the journal has, behind its first line."""
        journals = self._log.parent.glob(".out.*/work/journal.jsonl")
        return sum(len(path.read_bytes().splitlines()) - 1 for path in journals)

    def episodes(self) -> list[int]:
        return sorted(map(int, self._log.read_text().split()))


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(tmp_path / "reads", monkeypatch)


def cut_short(source: Path, reads: Reads, at: int = 10, workers: int = 1, **options: Any) -> Path:
    """Convert until a worker is killed at an episode; the folder that is left."""
    reads.kill_at(at)
    with pytest.raises(RbtoolError, match="killed by SIGKILL") as caught:
        rbtool.convert(source, source.parent / "out", num_workers=workers, **options)
    assert "chunks are kept: add --resume" in caught.value.hint
    reads.kill_at(None)
    [left] = source.parent.glob(".out.rbtool-new-*")
    return left


def resumed(source: Path, workers: int = 1, **options: Any) -> None:
    """Resume the conversion, and compare with that of one process."""
    out = source.parent / "out"
    rbtool.convert(source, out, num_workers=workers, resume=True, **options)
    assert not list(source.parent.glob(".out*"))
    made = bytes_below(out)
    shutil.rmtree(out)
    rbtool.convert(source, out, **options)
    assert made == bytes_below(out)


@kinds
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_only_what_is_left_is_read(source: Path, reads: Reads, kind: dict[str, Any], workers: int) -> None:
    cut_short(source, reads, **kind)
    rbtool.convert(source, source.parent / "out", num_workers=workers, resume=True, **kind)
    assert 10 in reads.episodes()
    assert 5 not in reads.episodes()
    shutil.rmtree(source.parent / "out")
    cut_short(source, reads, **kind)
    resumed(source, workers, **kind)


@kinds
def test_a_resumed_conversion_is_cut_short_again(source: Path, reads: Reads, kind: dict[str, Any]) -> None:
    for at in (5, 5, 10, 14):
        reads.kill_at(at, after_another=False)  # which one worker would not do
        with pytest.raises(RbtoolError):
            rbtool.convert(source, source.parent / "out", num_workers=1, resume=True, **kind)
    reads.kill_at(None)
    resumed(source, 2, **kind)


@kinds
def test_without_resume_a_conversion_starts_over(source: Path, reads: Reads, kind: dict[str, Any]) -> None:
    cut_short(source, reads, **kind)
    rbtool.convert(source, source.parent / "out", num_workers=2, **kind)
    assert reads.episodes() == list(range(len(LENGTHS)))
    assert not list(source.parent.glob(".out*"))


def test_resume_with_nothing_to_resume_just_runs(source: Path) -> None:
    resumed(source, 2)


OTHERS: list[dict[str, Any]] = [
    {"layout": "packed"}, {"episodes": "0:14"},
    {"layout": "packed", "compress": ["action=lz4"]},
]  # fmt: skip


@pytest.mark.parametrize("options", OTHERS)
def test_other_options_are_another_conversion(source: Path, reads: Reads, options: dict[str, Any]) -> None:
    left = cut_short(source, reads, layout="ted")
    before = journal_path(left).read_bytes()
    with pytest.raises(UsageError, match=r"the unfinished run at .* is another one: .* differ") as caught:
        rbtool.convert(source, source.parent / "out", num_workers=2, resume=True, **options)
    assert "leave --resume out" in caught.value.hint
    assert journal_path(left).read_bytes() == before
    resumed(source, layout="ted")


@pytest.mark.parametrize("change", ["value", "episode", "version"])
@pytest.mark.parametrize("layout", ["ted", pytest.param("packed", marks=pytest.mark.slow)])
def test_another_source_or_version_is_refused(
    source: Path, reads: Reads, layout: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_short(source, reads, layout=layout)
    columns = flat(random_episodes([*LENGTHS, 2] if change == "episode" else LENGTHS), following=True)
    if change == "version":
        monkeypatch.setattr(convert_workers, "created_by", lambda: "rbtool 99")
    else:
        columns["rewards"][-1] += 1
        source.unlink()
        write(source, columns)
    with pytest.raises(UsageError, match="version of rbtool differ" if change == "version" else "source"):
        rbtool.convert(source, source.parent / "out", num_workers=2, resume=True, layout=layout)
    made = rbtool.convert(source, source.parent / "out", num_workers=2, layout=layout)
    assert not rbtool.check(made.path).errors


def flip(path: Path, place: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def first_part(left: Path) -> Path:
    return min((left / "work" / "parts").iterdir())


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "rows": ("ted", lambda left: flip(placed_folder(left) / "action.memmap")),
    "short": ("ted", lambda left: (placed_folder(left) / "action.memmap").write_bytes(b"")),
    "no leaf": ("ted", lambda left: (placed_folder(left) / "action.memmap").unlink()),
    "a link": ("ted", lambda left: linked(placed_folder(left) / "action.memmap")),
    "records": ("packed", lambda left: flip(result_folder(left) / RECORDS, 5)),
    "no records": ("packed", lambda left: (result_folder(left) / RECORDS).unlink()),
    "fewer records": ("packed", lambda left: (result_folder(left) / RECORDS).write_bytes(b"x")),
    "part": ("packed", lambda left: flip(first_part(left))),
    "short part": ("packed", lambda left: first_part(left).write_bytes(b"x")),
    "no part": ("packed", lambda left: first_part(left).unlink()),
    "strange file": ("packed", lambda left: (result_folder(left) / "strange").write_bytes(b"x")),
    "journal end": ("packed", lambda left: flip(journal_path(left), -9)),
    "journal cut": ("ted", lambda left: os.truncate(journal_path(left), journal_path(left).stat().st_size - 3)),
    "journal begin": ("ted", lambda left: flip(journal_path(left))),
    "no journal": ("packed", lambda left: journal_path(left).unlink()),
}


def linked(path: Path) -> None:
    path.rename(path.parents[3] / "elsewhere")
    path.symlink_to(path.parents[3] / "elsewhere")


EVERY_DAY = {"journal cut", "strange file", "no journal"}


@pytest.mark.parametrize(
    "damage", [one if one in EVERY_DAY else pytest.param(one, marks=pytest.mark.slow) for one in DAMAGES]
)
def test_what_was_damaged_since_is_done_again(source: Path, reads: Reads, damage: str) -> None:
    layout, harm = DAMAGES[damage]
    left = cut_short(source, reads, 4, workers=2, layout=layout)
    harm(left)
    before = elsewhere.read_bytes() if (elsewhere := source.parent / "elsewhere").exists() else b""
    resumed(source, 2, layout=layout)
    assert not before or elsewhere.read_bytes() == before


@kinds
@pytest.mark.parametrize("over", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_conversion_that_ended_while_completing_is_completed(
    source: Path, reads: Reads, over: bool, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = source.parent / "out"
    if over:
        rbtool.convert(source, out, episodes="0:3", **kind)

    def stops(*names: Any, **folders: Any) -> None:
        raise KeyboardInterrupt

    for name in ("sync_folder", "exchange" if over else "rename"):
        with monkeypatch.context() as patched:
            patched.setattr(fs, name, stops)
            with pytest.raises(KeyboardInterrupt):
                rbtool.convert(source, out, num_workers=2, resume=True, force=True, **kind)
    reads.kill_at(None)
    resumed(source, 2, force=True, **kind)
    assert reads.episodes() == list(range(len(LENGTHS)))  # by the one process: the resumed one read nothing


def test_resume_needs_workers(source: Path) -> None:
    with pytest.raises(UsageError, match="--resume needs worker processes") as caught:
        rbtool.convert(source, source.parent / "out", resume=True)
    assert caught.value.hint == "add --num-workers N"


def test_a_ted_dataset_is_not_converted_by_workers(source: Path) -> None:
    rbtool.convert(source, source.parent / "one")
    with pytest.raises(UsageError, match="is about raw datasets"):
        rbtool.convert(source.parent / "one", source.parent / "out", num_workers=2, resume=True)


_SLOW = """
import os, sys, time
import rbtool
from rbtool.converters.d4rl.reader import D4rlReader
plain = D4rlReader._block
def slow(self, numbers):
    time.sleep(0.05)
    return plain(self, numbers)
D4rlReader._block = slow
rbtool.convert(sys.argv[1], sys.argv[2], num_workers=int(sys.argv[3]), layout=sys.argv[4], resume=True)
"""


@pytest.mark.parametrize("layout", ["ted", "packed"])
@pytest.mark.parametrize("kills", [2, pytest.param(25, marks=pytest.mark.slow)])
def test_a_killed_driver_continues(tmp_path: Path, layout: str, kills: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 9, 150).tolist()
    source = write(tmp_path / "source.hdf5", flat(random_episodes(lengths)))
    draw = np.random.default_rng(kills)
    out = tmp_path / "out"
    for _ in range(kills):
        workers = str(draw.integers(1, 4))
        with subprocess.Popen([sys.executable, "-c", _SLOW, source, out, workers, layout]) as process:
            more = progress_of(tmp_path) + 1
            wait_until(lambda more=more: process.poll() is not None or progress_of(tmp_path) >= more, "progress")
            time.sleep(draw.uniform(0, 0.1))
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    resumed(source, 2, layout=layout)


def progress_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(".out.*/work/journal.jsonl"))


def test_a_download_continues_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(Path(__file__).parents[2] / "data" / "minari"))
    plain, log, at = ConversionRunner.run, tmp_path / "log", [3]

    def run(self: ConversionRunner, task: Task) -> Converted:
        if task.index == at[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(log, "a") as file:
            file.write(f"{task.index}\n")
        return plain(self, task)

    monkeypatch.setattr(ConversionRunner, "run", run)
    arguments: dict[str, Any] = {"local": True, "root": tmp_path / "store", "num_workers": 1}
    with pytest.raises(RbtoolError, match="SIGKILL") as caught:
        rbtool.download("minari", "cartpole/scripted-v0", **arguments)
    assert "3 of 5 chunks are kept: run it again to continue from there" in caught.value.hint
    at[0] = -1
    made = rbtool.download("minari", "cartpole/scripted-v0", **arguments)
    assert sorted(log.read_text().split()) == ["0", "1", "2", "3", "4"]
    assert not rbtool.check(made.path).findings
    assert not list(made.path.parent.glob(".*"))
