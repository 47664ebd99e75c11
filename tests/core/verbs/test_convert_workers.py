"""`convert` with worker processes: the bytes of one process, also after a stop and `--resume`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_datasets import bytes_below
from table_files import flat, random_episodes, write_d4rl
from waiting import HANG, wait_until

import rbtool
from rbtool.converters.d4rl.reader import D4rlReader
from rbtool.core.engine.tasks import Task
from rbtool.core.engine.workspace import journal_path, placed_folder, result_folder
from rbtool.core.errors import CorruptDataError, FormatError, RbtoolError, UsageError
from rbtool.core.format import fs
from rbtool.core.format.contracts import EpisodeBlock, Piece
from rbtool.core.format.locate import open_source
from rbtool.core.format.packed.schema import RECORDS
from rbtool.core.verbs import convert_workers
from rbtool.core.verbs.convert_workers import ConversionRunner, Converted

# `convert` with worker processes: the same bytes as one process writes, and nothing where a worker fails.

DATA = Path(__file__).parents[2] / "data"
LENGTHS = [3, 1, 9, 4, 1, 1, 30, 2, 5, 6, 1, 2, 8, 4, 3]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    kinds = [("terminal", "timeout", "both")[number % 3] for number in range(len(LENGTHS) - 1)]
    columns = flat(random_episodes(LENGTHS, ends=[*kinds, "none"]))
    columns["observations"][::7] = -0.0
    columns["observations"][1::7] = 0.0
    return write_d4rl(tmp_path / "source.hdf5", columns)


def same_bytes(source: Path, folder: Path, *, workers: Sequence[int] = (1, 3), **arguments: Any) -> None:
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
def test_chosen_episodes_and_long_ones(source: Path, layout: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(D4rlReader, "piece_bytes", 300)
    same_bytes(source, tmp_path, workers=(2,), layout=layout, episodes="1:8,11,14")


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("ted", "minari/cartpole/scripted-v0"), ("packed", "minari/cartpole/scripted-v0"),
        ("packed", "minari/tuple/trunc-v0"), ("ted", "minari/pendulum/random-v0"),
        ("ted", "tianshou/vector_dict_obs.hdf5"), ("packed", "tianshou/last_frames.hdf5"),
        ("packed", "calvin/task_D_D"), ("ted", "lance/lerobot_lance"), ("packed", "lance/frames_jpeg.lance"),
    ],
)  # fmt: skip
def test_sources_of_other_formats(name: str, layout: str, tmp_path: Path) -> None:
    same_bytes(DATA / name, tmp_path, workers=(2,), layout=layout)


@pytest.mark.parametrize("name", ["aloha", "robomimic", "roboset", "vd4rl", "atari"])
def test_what_the_first_look_found_is_not_looked_for_again(name: str, tmp_path: Path, monkeypatch) -> None:
    files = [file for file in sorted((DATA / name).rglob("*")) if file.suffix in (".hdf5", ".h5", ".npz")]
    [source, *_] = files or [DATA / name / "Pong" / "1"]
    kind = type(open_source(source))
    plain, parent = kind.survey, os.getpid()

    def survey(self: Any, progress: Any) -> Any:
        assert os.getpid() == parent, "a worker looks again"
        return plain(self, progress)

    monkeypatch.setattr(kind, "survey", survey)
    same_bytes(source, tmp_path, workers=(2,))


@pytest.mark.parametrize("name", ["zarr/pusht_like.zarr", "zarr/umi_one_arm.zarr.zip"])
def test_episodes_that_share_chunks(name: str, tmp_path: Path) -> None:
    same_bytes(DATA / name, tmp_path, workers=(2,))


def test_compressed_fields(tmp_path: Path) -> None:
    same_bytes(
        DATA / "minari" / "cartpole" / "scripted-v0", tmp_path, workers=(2,), layout="packed",
        compress=["observation=zstd:3"],
    )  # fmt: skip


def test_next_rows_that_do_not_follow(tmp_path: Path) -> None:
    columns = flat(random_episodes(LENGTHS), following=True)
    columns["next_observations"][[2, 17, 20]] += 1
    same_bytes(write_d4rl(tmp_path / "source.hdf5", columns), tmp_path, workers=(2,), layout="packed")


def test_new_interpreters_where_a_fork_is_not_safe(source: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(convert_workers, "default_start_method", lambda: "forkserver")
    same_bytes(source, tmp_path, workers=(2,))


def test_a_dataset_without_steps(tmp_path: Path) -> None:
    file = write_d4rl(tmp_path / "source.hdf5", flat(random_episodes([1, 1], ends=["timeout", "none"])))
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
def test_an_error_in_a_worker_is_the_one_that_one_process_raises(source, layout: str, tmp_path, monkeypatch) -> None:
    def fail() -> None:
        raise CorruptDataError("rows cannot be read", hint="fetch it again")

    failing_at(monkeypatch, fail)
    for workers in (0, 2):
        with pytest.raises(CorruptDataError, match="rows cannot be read") as raised:
            rbtool.convert(source, tmp_path / "out", num_workers=workers, layout=layout)
        assert raised.value.hint == "fetch it again"
        assert left_behind(tmp_path) == []


@pytest.mark.parametrize("layout", ["ted", "packed"])
def test_a_worker_that_is_killed_is_named(source: Path, layout: str, tmp_path: Path, monkeypatch) -> None:
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


def test_other_lengths_than_announced_are_refused(source: Path, tmp_path: Path, monkeypatch) -> None:
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
    with pytest.raises(RbtoolError, match="steps, expected"):
        rbtool.convert(source, tmp_path / "out", num_workers=2)
    assert left_behind(tmp_path) == []


def test_a_source_that_vanishes_before_the_workers_open_it(source: Path, tmp_path: Path, monkeypatch) -> None:
    plain = D4rlReader.close
    monkeypatch.setattr(D4rlReader, "on_close", lambda self: (self._file.close(), source.unlink(missing_ok=True)))
    assert plain is D4rlReader.close
    with pytest.raises(RbtoolError, match="source"):
        rbtool.convert(source, tmp_path / "out", num_workers=2)
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_source_that_is_replaced_before_the_workers_open_it(source, is_folder: bool, tmp_path, monkeypatch) -> None:
    other = write_d4rl(tmp_path / "other.hdf5", flat(random_episodes(LENGTHS[::-1])))
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


def test_a_source_that_changes_while_workers_convert(source: Path, tmp_path: Path, monkeypatch) -> None:
    """It is digested meanwhile: then the digest would not be of what they have read."""

    def touch(folder: Path, files: list[Path]) -> dict[str, str]:
        return {path.name: str(os.utime(path, (0, 0))) for path in files}

    monkeypatch.setattr("rbtool.core.verbs.convert.digests_in", touch)
    with pytest.raises(CorruptDataError, match=r"source.hdf5 was changed or replaced while it was read"):
        rbtool.convert(source, tmp_path / "out", num_workers=2)
    assert left_behind(tmp_path) == []


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
    rbtool.convert(write_d4rl(tmp_path / "a.hdf5", columns), tmp_path / "out")
    fields = json.loads((tmp_path / "out/.rbtool/manifest.json").read_text())["fields"]
    [reward] = [field for field in fields if field["key"] == ["next", "reward"]]
    assert str(reward["min"]) == str(reward["max"]) == "0.0"


# `convert --num-workers N --resume`: what was cut short and resumed ends with the bytes of one process.

KINDS = [
    {"layout": "ted"},
    {"layout": "packed"},
    {"layout": "packed", "compress": ["observation=zstd:3", "action=lz4"]},
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["ted", "packed", "compressed"])


@pytest.fixture
def resumed_source(tmp_path: Path) -> Path:
    """Episodes of which some have next observations that do not follow."""
    columns = flat(random_episodes(LENGTHS), following=True)
    columns["next_observations"][[2, 17, 20, 60]] += 1
    return write_d4rl(tmp_path / "source.hdf5", columns)


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


def cut_short(resumed_source: Path, reads: Reads, at: int = 10, workers: int = 1, **options: Any) -> Path:
    """Convert until a worker is killed at an episode; the folder that is left."""
    reads.kill_at(at)
    with pytest.raises(RbtoolError, match="killed by SIGKILL") as caught:
        rbtool.convert(resumed_source, resumed_source.parent / "out", num_workers=workers, **options)
    assert "chunks are kept: add --resume" in caught.value.hint
    reads.kill_at(None)
    [left] = resumed_source.parent.glob(".out.rbtool-new-*")
    return left


def resumed(resumed_source: Path, workers: int = 1, **options: Any) -> None:
    """Resume the conversion, and compare with that of one process."""
    rbtool.convert(resumed_source, resumed_source.parent / "out", num_workers=workers, resume=True, **options)
    require_whole(resumed_source, **options)


def require_whole(resumed_source: Path, **options: Any) -> None:
    """Compare what was made with the conversion of one process."""
    out = resumed_source.parent / "out"
    assert not list(resumed_source.parent.glob(".out*"))
    made = bytes_below(out)
    shutil.rmtree(out)
    rbtool.convert(resumed_source, out, **options)
    assert made == bytes_below(out)


@kinds
@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_only_what_is_left_is_read(resumed_source: Path, reads: Reads, kind: dict[str, Any], workers: int) -> None:
    cut_short(resumed_source, reads, **kind)
    rbtool.convert(resumed_source, resumed_source.parent / "out", num_workers=workers, resume=True, **kind)
    assert 10 in reads.episodes()
    assert 5 not in reads.episodes()
    require_whole(resumed_source, **kind)


@kinds
def test_a_resumed_conversion_is_cut_short_again(resumed_source: Path, reads: Reads, kind: dict[str, Any]) -> None:
    for at in (5, 5, 14):
        reads.kill_at(at, after_another=False)  # which one worker would not do
        with pytest.raises(RbtoolError):
            rbtool.convert(resumed_source, resumed_source.parent / "out", num_workers=1, resume=True, **kind)
    reads.kill_at(None)
    resumed(resumed_source, 2, **kind)


@kinds
def test_without_resume_a_conversion_starts_over(resumed_source: Path, reads: Reads, kind: dict[str, Any]) -> None:
    cut_short(resumed_source, reads, **kind)
    rbtool.convert(resumed_source, resumed_source.parent / "out", num_workers=2, **kind)
    assert reads.episodes() == list(range(len(LENGTHS)))
    assert not list(resumed_source.parent.glob(".out*"))


def test_resume_with_nothing_to_resume_just_runs(resumed_source: Path) -> None:
    resumed(resumed_source, 2)


OTHERS: list[dict[str, Any]] = [
    {"layout": "packed"}, {"episodes": "0:14"},
    {"layout": "packed", "compress": ["action=lz4"]},
]  # fmt: skip


@pytest.mark.parametrize("options", OTHERS)
def test_other_options_are_another_conversion(resumed_source: Path, reads: Reads, options: dict[str, Any]) -> None:
    left = cut_short(resumed_source, reads, layout="ted")
    before = journal_path(left).read_bytes()
    with pytest.raises(UsageError, match=r"the unfinished run at .* is another one: .* differ") as caught:
        rbtool.convert(resumed_source, resumed_source.parent / "out", num_workers=2, resume=True, **options)
    assert "leave --resume out" in caught.value.hint
    assert journal_path(left).read_bytes() == before
    resumed(resumed_source, layout="ted")


@pytest.mark.parametrize("change", ["value", "episode", "version"])
@pytest.mark.parametrize("layout", ["ted", pytest.param("packed", marks=pytest.mark.slow)])
def test_another_source_or_version_is_refused(resumed_source, reads, layout, change, monkeypatch) -> None:
    cut_short(resumed_source, reads, layout=layout)
    columns = flat(random_episodes([*LENGTHS, 2] if change == "episode" else LENGTHS), following=True)
    if change == "version":
        monkeypatch.setattr(convert_workers, "created_by", lambda: "rbtool 99")
    else:
        columns["rewards"][-1] += 1
        resumed_source.unlink()
        write_d4rl(resumed_source, columns)
    with pytest.raises(UsageError, match="version of rbtool differ" if change == "version" else "source"):
        rbtool.convert(resumed_source, resumed_source.parent / "out", num_workers=2, resume=True, layout=layout)
    made = rbtool.convert(resumed_source, resumed_source.parent / "out", num_workers=2, layout=layout)
    assert not rbtool.check(made.path).errors


def flip(path: Path, place: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def first_part(left: Path) -> Path:
    return min((left / "work" / "parts").iterdir())


TED: dict[str, Any] = {"layout": "ted"}
PACKED: dict[str, Any] = {"layout": "packed"}
COMPRESSED: dict[str, Any] = {"layout": "packed", "compress": ["action=lz4"]}
DAMAGES: dict[str, tuple[dict[str, Any], Callable[[Path], object]]] = {
    "rows": (TED, lambda left: flip(placed_folder(left) / "action.memmap")),
    "short": (TED, lambda left: (placed_folder(left) / "action.memmap").write_bytes(b"")),
    "no leaf": (TED, lambda left: (placed_folder(left) / "action.memmap").unlink()),
    "a link": (TED, lambda left: linked(placed_folder(left) / "action.memmap")),
    "placed records": (PACKED, lambda left: flip(placed_folder(left) / RECORDS, 5)),
    "no placed records": (PACKED, lambda left: (placed_folder(left) / RECORDS).unlink()),
    "records": (COMPRESSED, lambda left: flip(result_folder(left) / RECORDS, 5)),
    "no records": (COMPRESSED, lambda left: (result_folder(left) / RECORDS).unlink()),
    "fewer records": (COMPRESSED, lambda left: (result_folder(left) / RECORDS).write_bytes(b"x")),
    "part": (COMPRESSED, lambda left: flip(first_part(left))),
    "short part": (COMPRESSED, lambda left: first_part(left).write_bytes(b"x")),
    "no part": (COMPRESSED, lambda left: first_part(left).unlink()),
    "strange file": (PACKED, lambda left: (placed_folder(left) / "strange").write_bytes(b"x")),
    "strange result": (COMPRESSED, lambda left: (result_folder(left) / "strange").write_bytes(b"x")),
    "journal end": (PACKED, lambda left: flip(journal_path(left), -9)),
    "journal cut": (TED, lambda left: os.truncate(journal_path(left), journal_path(left).stat().st_size - 3)),
    "journal begin": (TED, lambda left: flip(journal_path(left))),
    "no journal": (PACKED, lambda left: journal_path(left).unlink()),
}


def linked(path: Path) -> None:
    path.rename(path.parents[3] / "elsewhere")
    path.symlink_to(path.parents[3] / "elsewhere")


EVERY_DAY = {"journal cut", "placed records", "strange file", "no journal"}


@pytest.mark.parametrize(
    "damage", [one if one in EVERY_DAY else pytest.param(one, marks=pytest.mark.slow) for one in DAMAGES]
)
def test_what_was_damaged_since_is_done_again(resumed_source: Path, reads: Reads, damage: str) -> None:
    kind, harm = DAMAGES[damage]
    left = cut_short(resumed_source, reads, 4, workers=2, **kind)
    harm(left)
    before = elsewhere.read_bytes() if (elsewhere := resumed_source.parent / "elsewhere").exists() else b""
    resumed(resumed_source, 2, **kind)
    assert not before or elsewhere.read_bytes() == before


@kinds
@pytest.mark.parametrize("over", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_conversion_that_ended_while_completing_is_completed(resumed_source, reads, over, kind, monkeypatch) -> None:
    out = resumed_source.parent / "out"
    if over:
        rbtool.convert(resumed_source, out, episodes="0:3", **kind)

    def stops(*names: Any, **folders: Any) -> None:
        raise KeyboardInterrupt

    for name in ("sync_folder", "exchange" if over else "rename"):
        with monkeypatch.context() as patched:
            patched.setattr(fs, name, stops)
            with pytest.raises(KeyboardInterrupt):
                rbtool.convert(resumed_source, out, num_workers=2, resume=True, force=True, **kind)
    reads.kill_at(None)
    resumed(resumed_source, 2, force=True, **kind)
    assert reads.episodes() == list(range(len(LENGTHS)))  # by the one process: the resumed one read nothing


def test_resume_needs_workers(resumed_source: Path) -> None:
    with pytest.raises(UsageError, match="--resume needs worker processes") as caught:
        rbtool.convert(resumed_source, resumed_source.parent / "out", resume=True)
    assert caught.value.hint == "add --num-workers N"


def test_a_ted_dataset_is_not_converted_by_workers(resumed_source: Path) -> None:
    rbtool.convert(resumed_source, resumed_source.parent / "one")
    with pytest.raises(UsageError, match="is about raw datasets"):
        rbtool.convert(resumed_source.parent / "one", resumed_source.parent / "out", num_workers=2, resume=True)


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
    resumed_source = write_d4rl(tmp_path / "source.hdf5", flat(random_episodes(lengths)))
    draw = np.random.default_rng(kills)
    out = tmp_path / "out"
    for _ in range(kills):
        workers = str(draw.integers(1, 4))
        with subprocess.Popen([sys.executable, "-c", _SLOW, resumed_source, out, workers, layout]) as process:
            more = progress_of(tmp_path) + 1
            wait_until(lambda more=more: process.poll() is not None or progress_of(tmp_path) >= more, "progress")
            time.sleep(draw.uniform(0, 0.1))
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    resumed(resumed_source, 2, layout=layout)


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
    assert rbtool.check(made.path).errors == 0
    assert not list(made.path.parent.glob(".*"))
