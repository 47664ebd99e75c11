"""Disks that fill up, break, or are out of our hands below a command: one sentence that names the file.

The next run completes. The calls of the C library fail in the real process: a shim in C, `failing_calls.c`, which is
compiled here, is loaded before it. All that a command does with files goes through it, also what HDF5 and Arrow do; a
thread that is in the kernel, or a map, does not.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import folder_of_commands
from hub import WRITER, Hub, UploadHub, lay_out_hub
from machine import files_of
from struck_work import DATA, prepare
from waiting import HANG

from rbtool.core.testing.datasets import write_walks

_SOURCE = Path(__file__).with_name("failing_calls.c")


class FailingCall(NamedTuple):
    """Calls of a kind (`read`, `fsync`, …) on paths that contain `path`, which fail with the error of that name.

    They fail from the `nth` on, counted from 1; `once` states that only that one does.
    """

    call: str
    error: str
    path: str | Path
    nth: int = 1
    once: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """What a command has to find in its environment."""
        code = getattr(errno, self.error)
        return {"FAILING_CALLS": f"{self.call}:{code}:{'=' * self.once}{self.nth}:{self.path}"}


@functools.cache
def commands_with_failing_calls() -> Path:
    """Return a folder to put in front of PATH; the test is skipped where there is no compiler, or no such loader."""
    compiler = shutil.which("cc")
    if compiler is None or os.uname().sysname != "Linux":
        pytest.skip("a compiler and the loader of Linux have calls fail")
    library = Path(tempfile.mkdtemp()) / "failing_calls.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, _SOURCE, "-ldl"], check=True)
    return folder_of_commands(str(library))


SLOW = pytest.mark.slow
STREAMED = "org/ted"
# Words, what they read below the sources, and what they write below the work folder; "" for nothing.
JOBS = {
    "minari": ("convert {sources}/source {work}/out", "sources/source", "out"),
    "atari": ("convert {sources}/run {work}/out", "sources/run", "out"),
    "gen_dgrl": ("convert {sources}/archive.tar.xz {work}/out --trust-pickle", "archive.tar.xz", "out"),
    "openx": ("convert {sources}/episodes {work}/out --trust-pickle --rlds-last step", "sources/episodes", "out"),
    "rlds": ("convert {sources}/shards {work}/out --num-workers 2 --resume", "sources/shards", "out"),
    "lerobot": ("convert {sources}/videos {work}/out --num-workers 2 --resume", "sources/videos", "out"),
    "to-npz": ("export {sources}/dataset {work}/out.npz --force", "sources/dataset", "out.npz"),
    "to-parquet": ("export {sources}/dataset {work}/out.parquet --force", "sources/dataset", "out.parquet"),
    "to-minari": ("export {sources}/dataset {work}/out --to minari --force", "sources/dataset", "out"),
    "to-rlds": ("export {sources}/dataset {work}/out --to rlds --force", "sources/dataset", "out"),
    "to-lerobot": ("export {sources}/dataset {work}/out --to lerobot --force", "sources/dataset", "out"),
    "download": ("download minari cartpole/scripted-v0", "", "root/minari/cartpole/scripted-v0"),
    "download-ted": (f"download hf://{STREAMED}", "", "root/hf/org/ted"),
    "stream": (f"sample hf://{STREAMED} --streaming -n 40 --seed 1 -q", "", ""),
}
WRITING = ("minari", "rlds", "to-npz", "to-lerobot", "download", "stream")
READING = ("minari", "atari", "openx", "rlds", "lerobot", "to-npz")
NO_LOCKS = "this file system has no file locks"
SPACE = "free some space"
# Calls below the work folder: the error, the exit code, and what the hint says.
WRITES = [
    ("write", "EIO", 1, "the disk or the file server failed"),
    ("write", "EDQUOT", 6, SPACE),
    ("write", "ENOSPC", 6, SPACE),
    ("fsync", "EIO", 1, "the disk or the file server failed"),
    ("fsync", "EDQUOT", 6, SPACE),
    ("close", "EIO", 1, "the disk or the file server failed"),
    ("close", "EDQUOT", 6, SPACE),
    ("create", "EROFS", 1, "choose another place"),
    ("create", "ESTALE", 1, "run it again"),
    ("mkdir", "EROFS", 1, "choose another place"),
    ("rename", "EXDEV", 1, "choose another place"),
    ("rename", "EIO", 1, "the disk or the file server failed"),
    ("flock", "ENOLCK", 1, NO_LOCKS),
    ("flock", "ENOSYS", 1, NO_LOCKS),
]
READS = [("open", "ESTALE"), ("open", "EIO"), ("read", "EIO"), ("read", "ESTALE"), ("stat", "ESTALE")]
EVERY_DAY = {
    ("minari", "close", "EIO"), ("minari", "write", "EIO"), ("rlds", "write", "EDQUOT"), ("rlds", "flock", "ENOLCK"),
    ("to-npz", "fsync", "EIO"), ("to-lerobot", "close", "EDQUOT"), ("download", "rename", "EXDEV"),
    ("download", "create", "EROFS"), ("stream", "close", "EIO"), ("stream", "flock", "ENOSYS"),
    ("openx", "read", "ESTALE"), ("lerobot", "open", "ESTALE"), ("atari", "read", "EIO"), ("minari", "read", "EIO"),
}  # fmt: skip


class Machine:
    """Runs jobs with a store below `work`; `fault` fails below them."""

    def __init__(self, sources: Path, work: Path, hub: Hub) -> None:
        self.sources, self.work = sources, work
        self.variables = {
            **hub.environment(work / "hf"), "RBTOOL_HOME": str(work / "root"), "RBTOOL_RETRIES": "2:0.01",
            "OMP_NUM_THREADS": "1", "HF_TOKEN": WRITER, "FAILING_CALLS": "",
        }  # fmt: skip
        self.variables.pop("RBTOOL_OFFLINE", None)

    def run(self, line: str, fault: FailingCall | None = None) -> subprocess.CompletedProcess[str]:
        words = line.format(sources=self.sources, work=self.work).split()
        return subprocess.run(
            [commands_with_failing_calls() / "rbtool", *words], cwd=self.work, capture_output=True, text=True,
            env=self.variables | (fault.variables if fault else {}), stdin=subprocess.DEVNULL, timeout=HANG,
            check=False,
        )  # fmt: skip

    def result(self, place: str) -> Any:
        """The digests of the files there but for those that state when it was made; None where there is nothing."""
        path = self.work / place
        if path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
        found = {name: digest for name, digest in files_of(path).items() if not name.endswith("manifest.json")}
        return found or None


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failing") / "sources"
    folder.mkdir()
    prepare(folder)
    lay_out_hub(DATA / "minari", folder / "hub")
    write_walks(folder / "hub" / STREAMED, [(6, "terminated"), (1, "truncated"), (9, "open"), (31, "both")] * 3)
    return folder


@pytest.fixture(scope="module")
def hub(sources: Path) -> Iterator[Hub]:
    with Hub(sources / "hub", lfs_threshold=1000) as served:
        yield served


@pytest.fixture
def machine(sources: Path, tmp_path: Path, hub: Hub) -> Machine:
    return Machine(sources, tmp_path, hub)


@pytest.fixture(scope="module")
def expected(sources: Path, hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each job leaves, or prints, where nothing fails."""
    known: dict[str, Any] = {}

    def found(job: str) -> Any:
        if job not in known:
            machine = Machine(sources, tmp_path_factory.mktemp(job), hub)
            done = machine.run(JOBS[job][0])
            assert done.returncode == 0, done.stderr
            known[job] = machine.result(JOBS[job][2]) if JOBS[job][2] else done.stdout
        return known[job]

    return found


def cases(jobs: tuple[str, ...], faults: list[Any]) -> list[Any]:
    found = [(job, *fault) for job in jobs for fault in faults]
    return [one if one[:3] in EVERY_DAY else pytest.param(*one, marks=SLOW) for one in found]


def assert_one_sentence(done: subprocess.CompletedProcess[str], error: str, place: Path) -> None:
    """One error that names a path, and neither an internal one nor a closed descriptor."""
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in done.stderr
    assert "internal error" not in line
    assert os.strerror(errno.EBADF).lower() not in line
    assert str(place) in line, line
    assert ".rbtool-new-" not in line
    assert error in {"EDQUOT", "ENOSPC"} or os.strerror(getattr(errno, error)).lower() in line


@pytest.mark.parametrize(("job", "call", "error", "code", "hint"), cases(WRITING, WRITES))
@pytest.mark.parametrize("nth", [1, pytest.param(3, marks=SLOW), pytest.param(6, marks=SLOW)])
def test_a_place_that_fails_is_named_and_the_next_run_completes(
    machine: Machine, expected: Any, job: str, call: str, error: str, code: int, hint: str, nth: int
) -> None:
    line, _, place = JOBS[job]
    wanted = expected(job)
    done = machine.run(line, FailingCall(call, error, machine.work, nth, once=call != "mkdir"))
    if done.returncode:
        assert done.returncode == code, done.stderr
        assert_one_sentence(done, error, machine.work)
        assert hint in done.stderr
        assert machine.result(place) is None or not place
    else:
        assert nth > 1, "nothing failed"
    again = machine.run(line)
    assert again.returncode == 0, again.stderr
    assert (machine.result(place) if place else again.stdout) == wanted
    assert not list(machine.work.glob(".*.rbtool-new-*"))


@pytest.mark.parametrize(("job", "call", "error"), cases(READING, READS))
@pytest.mark.parametrize("nth", [1, pytest.param(3, marks=SLOW), pytest.param(9, marks=SLOW)])
def test_a_source_that_cannot_be_read_is_named(
    machine: Machine, expected: Any, job: str, call: str, error: str, nth: int
) -> None:
    line, source, place = JOBS[job]
    wanted = expected(job)
    done = machine.run(line, FailingCall(call, error, source, nth))
    if done.returncode:
        assert done.returncode == 1, done.stderr
        assert_one_sentence(done, error, machine.sources)
        assert "hint: " in done.stderr
        assert machine.result(place) is None
    else:
        assert nth > 1, "nothing failed"
        assert machine.result(place) == wanted
    again = machine.run(line)
    assert again.returncode == 0, again.stderr
    assert machine.result(place) == wanted


@pytest.mark.parametrize("call", ["unlink", "rename"])
def test_what_cannot_be_removed_or_exchanged_does_not_hide_what_happened(
    machine: Machine, expected: Any, call: str
) -> None:
    """A result that is in place is one, also where its hidden folder stays; the next run sweeps that."""
    expected("to-npz")
    done = machine.run(JOBS["to-npz"][0], FailingCall(call, "EBUSY", "rbtool-new"))
    assert done.returncode == (0 if call == "unlink" else 1), done.stderr
    assert (machine.result("out.npz") == expected("to-npz")) == (call == "unlink")
    assert machine.run(JOBS["to-npz"][0]).returncode == 0
    assert not list(machine.work.glob(".*"))


@pytest.mark.parametrize(("job", "aside"), [("download", "/.cartpole%2F"), ("download-ted", "/.org%2F")])
def test_what_was_fetched_and_cannot_be_removed_is_a_note(
    machine: Machine, expected: Any, job: str, aside: str
) -> None:
    """The dataset is in place then; `cache prune` removes what is left."""
    line, _, place = JOBS[job]
    wanted = expected(job)
    done = machine.run(line, FailingCall("unlink", "EBUSY", aside))
    assert (done.returncode, done.stderr.count("error: ")) == (0, 0), done.stderr
    assert machine.result(place) == wanted
    assert "could not be removed (device or resource busy); rbtool cache prune removes them\n" in done.stderr
    assert list(machine.work.rglob("*%2F*"))
    again = machine.run(line)
    assert (again.returncode, "already there" in again.stderr) == (0, True), again.stderr
    assert machine.run("cache prune --yes").returncode == 0
    assert not list(machine.work.rglob("*%2F*"))
    assert machine.result(place) == wanted


UPLOADS = [("read", "EIO"), ("read", "ESTALE"), ("open", "ESTALE"), ("write", "EDQUOT"), ("close", "EIO")]


@pytest.mark.parametrize(
    ("call", "error", "nth"),
    [
        ("read", "EIO", 1),
        ("open", "ESTALE", 3),
        ("write", "EDQUOT", 1),
        *(pytest.param(*one, nth, marks=SLOW) for one in UPLOADS for nth in (2, 4, 8, 16, 40)),
    ],
)
def test_an_upload_from_a_disk_that_fails_commits_all_or_nothing(
    sources: Path, tmp_path: Path, call: str, error: str, nth: int
) -> None:
    with UploadHub(tmp_path / "hub", lfs_threshold=1000) as served:
        machine = Machine(sources, tmp_path, served)
        shutil.copytree(sources / "dataset", tmp_path / "walks")
        done = machine.run("upload {work}/walks hf://me/walks", FailingCall(call, error, tmp_path / "walks", nth))
        if done.returncode:
            assert done.returncode == 1, done.stderr
            assert_one_sentence(done, error, tmp_path / "walks")
            history = served.histories.get("me/walks")
            assert history is None or "main" not in history.branches or len(history.at("main").files) < 2
        again = machine.run("upload {work}/walks hf://me/walks")
        assert again.returncode == 0, again.stderr
        back = machine.run("download hf://me/walks")
        assert back.returncode == 0, back.stderr
        assert files_of(tmp_path / "root/hf/me/walks") == files_of(sources / "dataset")


# Real file systems --------------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(place: Path, size: str) -> Iterator[Path]:
    """A file system of its own, in memory; the test is skipped where none can be mounted."""
    place.mkdir(parents=True, exist_ok=True)
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
    made = subprocess.run(words, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"mounting needs root: {made.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


FILLED = {"stream": ("400k", "root"), "download": ("1200k", "root"), "download-ted": ("300k", "root"),
          "to-npz": ("200k", "."), "to-lerobot": ("200k", "."), "to-minari": ("200k", "."), "rlds": ("400k", "."),
          "openx": ("400k", ".")}  # fmt: skip


@pytest.mark.parametrize("left", [0, 1, *(pytest.param(kb, marks=SLOW) for kb in (2, 4, 9, 14, 20, 28, 40))])
@pytest.mark.parametrize("job", [job if job in {"stream", "download-ted"} else pytest.param(job, marks=SLOW)
                                 for job in FILLED])  # fmt: skip
def test_a_disk_that_is_full_here_or_there(machine: Machine, expected: Any, job: str, left: int) -> None:
    """Of a real disk only `left` pages of 4 kB are free; then there is room, and the job completes."""
    wanted, (line, _, place), (size, where) = expected(job), JOBS[job], FILLED[job]
    with mounted(machine.work / where, size) as disk:
        filler = disk / "filler"
        free = os.statvfs(disk)
        filler.write_bytes(bytes((free.f_bavail - left) * free.f_bsize))
        done = machine.run(line)
        if done.returncode:
            assert done.returncode == 6, done.stderr
            assert_one_sentence(done, "ENOSPC", machine.work)
            assert SPACE in done.stderr
        else:
            assert left > 1, "nothing failed"
        filler.unlink()
        again = machine.run(line)
        assert again.returncode == 0, again.stderr
        assert (machine.result(place) if place else again.stdout) == wanted


def test_temporary_files_may_be_on_another_file_system(machine: Machine, expected: Any) -> None:
    """Two mounts: what is unpacked elsewhere is not renamed into place."""
    with mounted(machine.work / "tmp", "20m"), mounted(machine.work / "root", "20m"):
        machine.variables["TMPDIR"] = str(machine.work / "tmp")
        for job in ("download-ted", "stream", "gen_dgrl"):
            done = machine.run(JOBS[job][0])
            assert done.returncode == 0, done.stderr
            assert (machine.result(JOBS[job][2]) if JOBS[job][2] else done.stdout) == expected(job)
