"""`convert` with worker processes: the same bytes as one process writes, and nothing where a worker fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from d4rl_files import flat, random_episodes, write
from dataset_bytes import bytes_below
from waiting import HANG

import rbtool
from rbtool.converters.d4rl.reader import D4rlReader
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError, UsageError
from rbtool.core.format.contracts import EpisodeBlock, Piece
from rbtool.core.format.locate import open_source
from rbtool.core.verbs import convert_workers

DATA = Path(__file__).parents[2] / "data"
LENGTHS = [3, 1, 9, 4, 1, 1, 30, 2, 5, 6, 1, 2, 8, 4, 3]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    kinds = [("terminal", "timeout", "both")[number % 3] for number in range(len(LENGTHS) - 1)]
    columns = flat(random_episodes(LENGTHS, ends=[*kinds, "none"]))
    columns["observations"][::7] = -0.0
    columns["observations"][1::7] = 0.0
    return write(tmp_path / "source.hdf5", columns)


def same_bytes(source: Path, folder: Path, *, workers: Sequence[int] = (1, 2, 3), **arguments: Any) -> None:
    rbtool.convert(source, folder / "one", **arguments)
    for number in workers:
        result = rbtool.convert(source, folder / f"by{number}", num_workers=number, **arguments)
        assert bytes_below(result.path) == bytes_below(folder / "one")
    assert sorted(path.name for path in folder.iterdir() if path != source) == sorted(
        ["one", *(f"by{number}" for number in workers)]
    )


@pytest.mark.parametrize("layout", ["ted", "packed"])
@pytest.mark.parametrize("final_step", ["auto", "drop", "repeat"])
def test_the_bytes_are_those_of_one_process(source: Path, layout: str, final_step: str, tmp_path: Path) -> None:
    same_bytes(source, tmp_path, layout=layout, final_step=final_step)


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_chosen_episodes_and_long_ones(
    source: Path, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(D4rlReader, "piece_bytes", 300)
    same_bytes(source, tmp_path, workers=(2,), layout=layout, episodes="1:8,11,14")


@pytest.mark.parametrize("layout", ["ted", "packed"])
@pytest.mark.parametrize("name", ["cartpole/scripted-v0", "tuple/trunc-v0", "pendulum/random-v0"])
def test_sources_of_other_formats(name: str, layout: str, tmp_path: Path) -> None:
    same_bytes(DATA / "minari" / name, tmp_path, workers=(2,), layout=layout)


@pytest.mark.parametrize("name", ["robomimic", "roboset", "vd4rl", "atari"])
def test_what_the_first_look_found_is_not_looked_for_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [file for file in sorted((DATA / name).rglob("*")) if file.suffix in (".hdf5", ".h5", ".npz")]
    [source, *_] = files or [DATA / name / "Pong" / "1"]
    kind = type(open_source(source))
    plain, parent = kind.survey, os.getpid()

    def survey(self: Any, progress: Any) -> Any:
        assert os.getpid() == parent, "a worker looks again"
        return plain(self, progress)

    monkeypatch.setattr(kind, "survey", survey)
    same_bytes(source, tmp_path, workers=(2,))


def test_compressed_fields(tmp_path: Path) -> None:
    same_bytes(
        DATA / "minari" / "cartpole" / "scripted-v0", tmp_path, workers=(2,), layout="packed",
        compress=["observation=zstd:3"],
    )  # fmt: skip


def test_next_rows_that_do_not_follow(tmp_path: Path) -> None:
    columns = flat(random_episodes(LENGTHS), following=True)
    columns["next_observations"][[2, 17, 20]] += 1
    same_bytes(write(tmp_path / "source.hdf5", columns), tmp_path, workers=(2,), layout="packed")


def test_new_interpreters_where_a_fork_is_not_safe(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_workers, "default_start_method", lambda: "forkserver")
    same_bytes(source, tmp_path, workers=(2,))


def test_a_dataset_without_steps(tmp_path: Path) -> None:
    file = write(tmp_path / "source.hdf5", flat(random_episodes([1, 1], ends=["timeout", "none"])))
    for workers in (0, 2):
        with pytest.raises(FormatError, match="no step is left"):
            rbtool.convert(file, tmp_path / "made", num_workers=workers)
    assert not (tmp_path / "made").exists()


def test_a_dry_run_starts_no_process(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_workers, "WorkerPool", None)
    assert rbtool.convert(source, tmp_path / "out", num_workers=2, dry_run=True).steps
    assert not (tmp_path / "out").exists()


def test_a_conversion_that_is_there_is_left_as_it_is(source: Path, tmp_path: Path) -> None:
    rbtool.convert(source, tmp_path / "out")
    assert rbtool.convert(source, tmp_path / "out", num_workers=2).already_there


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "source.hdf5")


def failing_at(monkeypatch: pytest.MonkeyPatch, fail: Any, number: int = 9) -> None:
    """Call `fail` where the rows of an episode are read, in whichever process."""
    plain = D4rlReader._block

    def block(self: D4rlReader, numbers: Any) -> EpisodeBlock:
        if number in numbers:
            fail()
        return plain(self, numbers)

    monkeypatch.setattr(D4rlReader, "_block", block)


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_an_error_in_a_worker_is_the_one_that_one_process_raises(
    source: Path, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise CorruptDataError("rows cannot be read", hint="fetch it again")

    failing_at(monkeypatch, fail)
    for workers in (0, 2):
        with pytest.raises(CorruptDataError, match="rows cannot be read") as raised:
            rbtool.convert(source, tmp_path / "out", num_workers=workers, layout=layout)
        assert raised.value.hint == "fetch it again"
        assert left_behind(tmp_path) == []


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_a_worker_that_is_killed_is_named(
    source: Path, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(
        RbtoolError, match=r"a worker process was killed by SIGKILL while it converted epi.* 9"
    ) as raised:
        rbtool.convert(source, tmp_path / "out", num_workers=2, layout=layout)
    assert "--num-workers 0" in str(raised.value.hint)
    assert bool(left_behind(tmp_path)) == ("add --resume" in str(raised.value.hint))


def test_a_bug_in_a_worker_is_one_sentence(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("no such thing")

    failing_at(monkeypatch, fail)
    with pytest.raises(RbtoolError, match=r"a worker process failed while it converted .*: AssertionError: no such"):
        rbtool.convert(source, tmp_path / "out", num_workers=2)


def test_other_lengths_than_announced_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(self: D4rlReader, numbers: Sequence[int]) -> Iterator[EpisodeBlock | Piece]:
        for number in numbers:
            if number != 6:
                yield from self.read_episode(number)
                continue
            [piece] = self.read_episode(number)
            yield Piece(
                number, {key: rows[:-1] for key, rows in piece.columns.items()}, piece.terminated[:-1],
                piece.truncated[1:], True, True, final=piece.final,
            )  # fmt: skip

    monkeypatch.setattr(D4rlReader, "read_episodes", short)
    with pytest.raises(RbtoolError, match="were announced"):
        rbtool.convert(source, tmp_path / "out", num_workers=2)
    assert left_behind(tmp_path) == []


def test_a_source_that_vanishes_before_the_workers_open_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = D4rlReader.close
    monkeypatch.setattr(D4rlReader, "on_close", lambda self: (self._file.close(), source.unlink(missing_ok=True)))
    assert plain is D4rlReader.close
    with pytest.raises(RbtoolError, match="source"):
        rbtool.convert(source, tmp_path / "out", num_workers=2)
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_source_that_is_replaced_before_the_workers_open_it(
    source: Path, is_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write(tmp_path / "other.hdf5", flat(random_episodes(LENGTHS[::-1])))
    given = source.parent / "folder" if is_folder else source
    if is_folder:
        given.mkdir()
        source = source.rename(given / source.name)

    def replace_it(self: D4rlReader) -> None:
        self._file.close()
        if other.exists():
            other.rename(source)

    monkeypatch.setattr(D4rlReader, "on_close", replace_it)
    with pytest.raises(CorruptDataError, match=r"source.hdf5 was changed or replaced while it was read"):
        rbtool.convert(given, tmp_path / "out", num_workers=2)
    assert not (tmp_path / "out").exists()


def test_numbers_of_workers(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--num-workers is -1"):
        rbtool.convert(source, tmp_path / "out", num_workers=-1)
    rbtool.convert(source, tmp_path / "out")
    with pytest.raises(UsageError, match="--num-workers is about raw datasets"):
        rbtool.convert(tmp_path / "out", tmp_path / "again", num_workers=2)


_INTERRUPTED = """
import os, signal, sys, time
import rbtool
from rbtool.converters.d4rl.reader import D4rlReader

def wait(self, numbers):
    print("at work", flush=True)
    time.sleep(3600)

D4rlReader._block = wait
rbtool.convert(sys.argv[1], sys.argv[2], num_workers=2)
"""


def test_an_interrupt_ends_the_workers_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, source, tmp_path / "out"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "at work\n"  # workers print there
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=HANG)
    assert "KeyboardInterrupt" in printed
    assert len(workers) == 2
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert left_behind(tmp_path) == []


def test_no_torch_is_imported(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys, rbtool; rbtool.convert(sys.argv[1], sys.argv[2], num_workers=2); "
        "assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code, source, tmp_path / "out"], check=True)


def test_the_command_line(source: Path, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("rbtool")
    done = subprocess.run(
        [program, "convert", source, tmp_path / "out", "--num-workers", "2", "-q"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "out"))
    rbtool.convert(source, tmp_path / "one")
    assert (
        bytes_below(tmp_path / "out")["manifest"]["content_digest"]
        == (bytes_below(tmp_path / "one")["manifest"]["content_digest"])
    )


def test_zero_of_either_sign_is_the_same_end_of_a_range(tmp_path: Path) -> None:
    columns = flat(random_episodes([4, 4]))
    columns["rewards"][:] = np.float32(-0.0)
    columns["rewards"][3] = 0.0
    rbtool.convert(write(tmp_path / "a.hdf5", columns), tmp_path / "out")
    fields = json.loads((tmp_path / "out/.rbtool/manifest.json").read_text())["fields"]
    [reward] = [field for field in fields if field["key"] == ["next", "reward"]]
    assert str(reward["min"]) == str(reward["max"]) == "0.0"
