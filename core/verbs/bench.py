"""`bench`: time how fast rbtool and other libraries read one dataset, in four jobs that training consists of.

Every library first returns digests of its batches: they must equal the rows of the dataset, each row once per epoch.
Then the libraries are timed in rounds in which they take turns, so that a machine that slows down affects all of them
alike. Each library runs in its own process, with one torch thread.

- `frames`: batches of random rows, with all keys.
- `chunks`: for random rows, the next 16 actions, clamped at the end of the episode, and one image.
- `epoch`: all rows once in a random order, or the first 1,000 batches. The time includes starting the epoch, when
  some libraries already read ahead. The randomness of the order is the mean distance in the dataset between consecutive
  rows, divided by its value for a uniform order: 1 is uniform, 0 is the order of the dataset.
- `resume`: another process continues an epoch that stopped in the middle: the time until its next batch.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import CorruptDataError, UsageError, did_you_mean
from ..format import fs
from ..format.contracts import Array, StepReader
from ..format.files import read_regular
from ..format.locate import find_dataset
from ..format.staging import FileStaging, require_suffix
from ..format.videos import refuse_videos
from ..open_steps import open_steps
from ..options import takes
from ..progress import Progress
from ..report.charts import SUFFIXES, Bars, Chart, ChartLabels, file_bytes
from ..results import Result
from .bench_libraries import LIBRARIES, ROW, following, joined, row_digests
from .options import BENCH_JOBS, BenchOptions

_COMPARED, _SEED, _MOST_BATCHES = 4, 20_261_130, 1000
_PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    """The measurements of one library for one job.

    Attributes:
        rate: rows per second, median of the rounds; None for `resume`.
        seconds: seconds of a round, median of the rounds; for `resume`, until the first batch.
        cpu: processor seconds of a round, median of the rounds.
        memory: largest amount of anonymous memory, in bytes.
        read: bytes that a round reads from files, median of the rounds; reads of mapped memory are not counted.
        shuffled: how random the order of an `epoch` is: 1 is uniform, 0 the order of the dataset; None for other jobs.
        rank: 1 is the fastest.
    """

    rate: float | None
    seconds: float
    cpu: float
    memory: int
    read: int
    shuffled: float | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFigures:
    """The measurements of one library.

    Attributes:
        versions: the versions of Python and of the library.
        form: the file format that it reads; "" for the dataset itself.
        bytes: the size of its files.
        seconds: the time to write them.
        jobs: its figures by job, for the jobs that it can do.
        lacks: for each other job, why it cannot do it.
    """

    name: str
    versions: Mapping[str, str]
    form: str
    bytes: int
    seconds: float
    jobs: Mapping[str, JobFigures]
    lacks: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult(Result):
    """How fast libraries read a dataset, after a check that all read the same values.

    Attributes:
        dataset: the path of the dataset.
        steps, episodes, keys: the size of the dataset, and the fields that are read.
        action, image: the fields that the job `chunks` reads.
        machine: processors and memory.
        batch_size, chunk, batches, rounds: the arguments.
        libraries: the figures of each library.
        missing: libraries that are not installed.
        prepared_only: True if only the files of the libraries were written, and nothing was timed.
    """

    kind: ClassVar[str] = "bench"
    dataset: Path
    steps: int
    episodes: int
    keys: tuple[str, ...]
    action: str
    image: str
    machine: str
    batch_size: int
    chunk: int
    batches: int
    rounds: int
    libraries: tuple[LibraryFigures, ...]
    missing: tuple[str, ...]
    prepared_only: bool = False


@takes(BenchOptions)
def bench(options: BenchOptions) -> BenchResult:
    """Compare how fast rbtool and other libraries read a dataset.

    Every library runs in its own process and reads the same rows, which are first converted without loss to its own
    file format. Batches are compared with the dataset before anything is timed.

    Args:
        dataset: a path or `source:id`.
        folder: where the files of the libraries are kept for the next run; default: a temporary folder.
        libraries: which libraries, as `NAME` or `NAME=PYTHON` with the interpreter of an environment that has it;
            default: all that are installed here.
        jobs: which jobs: `frames`, `chunks`, `epoch`, `resume`; default: all.
        prepare: only write the files of the libraries.
        batch_size, chunk: rows per batch, and actions per chunk.
        batches, rounds: batches per round for `frames` and `chunks`, and the number of rounds.
        output: the file to draw a chart in (.svg, .png, .pdf); `force` replaces it.
        root: where datasets are stored.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        The figures.

    Raises:
        UsageError: a library is unknown or not installed, or the dataset has no actions or has kept videos.
        CorruptDataError: a library reads other values than the dataset has.
    """
    for job in options.jobs:
        if job not in BENCH_JOBS:
            known = ", ".join(BENCH_JOBS)
            raise UsageError(f"job {job!r} is unknown{did_you_mean(job, BENCH_JOBS)}", hint=f"known: {known}")
    staging = None
    if options.output is not None:
        destination = fs.expanded(options.output)
        suffix = require_suffix(destination, SUFFIXES)
        staging = FileStaging(destination, replace=options.force)
        staging.refuse_if_taken()
    path = find_dataset(options.dataset, options.root)
    progress = options.reporter
    with ExitStack() as stack:
        if options.folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rbtool-bench-")))
        else:
            fs.make_folder(folder := Path(options.folder))
        found, missing = contenders(options.libraries, stack)
        with open_steps(path) as reader:
            rows = PlainRows(reader, folder)
        progress.start("preparing", len(found), "packages")
        for one in found:
            make_form(one, rows, path)
            progress.advance(1)
        progress.done()
        race = Race(rows, options)
        if not options.prepare:
            progress.start("comparing", len(found), "packages")
            for one in found:
                race.compare(one)
                progress.advance(1)
            progress.done()
            race.run(found, progress)
        libraries = tuple(race.figures(one, found) for one in found)
    result = BenchResult(
        dataset=path, steps=rows.count, episodes=len(rows.lengths), keys=tuple(rows.types), action=rows.action,
        image=rows.image, machine=_machine(), batch_size=options.batch_size, chunk=options.chunk,
        batches=options.batches, rounds=options.rounds, libraries=libraries, missing=tuple(missing),
        prepared_only=options.prepare,
    )  # fmt: skip
    if staging is not None:
        with staging:
            fs.write_file(staging.path / f"bench{suffix}", file_bytes(charts_of(result), suffix, title="rbtool bench"))
            staging.publish_file(f"bench{suffix}")
    return result


def charts_of(result: BenchResult) -> list[Chart]:
    """Return a chart for each job: rows per second, or for `resume` the milliseconds until the next batch."""
    found: list[Chart] = []
    for job in BENCH_JOBS:
        figures = {one.name: one.jobs[job] for one in result.libraries if job in one.jobs}
        values = [one.seconds * 1e3 if one.rate is None else one.rate / 1e3 for one in figures.values()]
        labels = ChartLabels(title=job, y="ms, less is better" if job == "resume" else "1,000 rows/s, more is better")
        if figures:
            found.append(Bars(list(figures), np.array(values), labels))
    return found


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} processors, {memory:.0f} GiB"


class PlainRows:
    """Observations and actions of a dataset as npy files, which libraries convert and are compared with."""

    def __init__(self, reader: StepReader, folder: Path) -> None:
        refuse_videos(reader, "the forms of other libraries")
        fields = {one.name: one for one in reader.fields if one.role in ("observation", "action")}
        self.fields = {name: one for name, one in fields.items() if one.key[0] != "next"}
        actions = [name for name, one in self.fields.items() if one.role == "action"]
        states = [one for one in self.fields.values() if one.role == "observation"]
        if not actions or not states:
            raise UsageError(f"{reader.path} has no {'observations' if actions else 'actions'}, expected both")
        self.types = {name: (one.dtype, [*one.shape]) for name, one in self.fields.items()}
        self.action, self.image = actions[0], max(states, key=lambda one: one.row_bytes).name
        self.count, self.lengths = reader.manifest.steps, reader.episodes.length
        # Named by content: a kept folder may have files of other datasets, or of an earlier version of this one.
        self.forms = folder / reader.manifest.content_digest.rpartition(":")[2][:16]
        self._folder = self.forms / _PLAIN
        self.lengths_file = str(self._folder / "lengths.npy")
        if not Path(self.lengths_file).exists():  # it is written last
            fs.remove(self._folder)
            self._write(reader)
        self.arrays = {name: np.load(path, mmap_mode="r") for name, path in self.files.items()}

    @property
    def files(self) -> dict[str, str]:
        """The file of each key."""
        return {name: str(self._folder / f"{name}.npy") for name in (*self.types, ROW)}

    def _write(self, reader: StepReader) -> None:
        fs.make_folder(self._folder)
        for name, path in self.files.items():
            field = self.fields.get(name)
            shape, dtype = ((), np.dtype(np.int64)) if field is None else (field.shape, field.numpy)
            with fs.created(Path(path)) as file:
                np.lib.format.write_array_header_1_0(
                    file, {"descr": dtype.str, "fortran_order": False, "shape": (self.count, *shape)}
                )
                for start in range(0, self.count, 1024):
                    stop = min(start + 1024, self.count)
                    rows = np.arange(start, stop) if field is None else reader.read(field.key, start, stop)
                    file.write(np.ascontiguousarray(rows, dtype).data.cast("B"))
        with fs.created(unfinished := self._folder / "unfinished.npy") as file:
            np.lib.format.write_array(file, np.asarray(self.lengths, np.int64))
        fs.rename(unfinished, Path(self.lengths_file))

    def read(self, job: str, index: Array, steps: int) -> dict[str, Array]:
        """Return the values that a batch of a job must have."""
        if job == "frames":
            return {name: self.arrays[name][index] for name in self.types}
        rows = following(np.cumsum(self.lengths), index, steps)
        return {self.action: self.arrays[self.action][rows], self.image: self.arrays[self.image][index]}

    @functools.cached_property
    def content(self) -> str:
        """Return a digest of all rows that does not depend on their order."""
        parts: list[bytes] = []
        for start in range(0, self.count, 1024):
            parts += row_digests({name: self.arrays[name][start : start + 1024] for name in self.types}, self.types)
        return joined(sorted(parts))


class LibraryProcess:
    """A process that runs `bench_libraries.py` for one library, and answers requests in lines of JSON."""

    def __init__(self, name: str, python: str) -> None:
        self.name = name
        # stderr goes to a file: a pipe that nobody reads would fill up and block the process.
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        script = str(Path(__file__).with_name("bench_libraries.py"))
        try:
            self._process = subprocess.Popen(
                [python, "-P", script, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
                text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        except OSError as error:
            self._said.close()
            raise UsageError(f"{python} cannot be started: {error.strerror}") from error

    def ask(self, do: str, *arguments: Any) -> Any:
        """Call `do` in the process and return its result; NotImplementedError, with the reason, if it is not supported.

        Raises UsageError if it fails or the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps([do, *arguments]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._said.seek(0)
            said = self._said.read().strip().splitlines()
            raise UsageError(f"the process of {self.name} ended: {said[-1] if said else 'it said nothing'}")
        answer = json.loads(line)
        if "lacks" in answer:
            raise NotImplementedError(answer["lacks"])
        if "error" in answer:
            raise UsageError(f"{self.name} cannot do {do}: {answer['error']}")
        return answer["found"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()


@dataclass
class Contender:
    """A library that is compared: its process, its versions, the folder of its files, and the measurements.

    `taken` has the measurements of each round by job, `lacks` the reason for each job that the library cannot do.
    """

    name: str
    python: str
    process: LibraryProcess
    folder: Path = Path()
    seconds: float = 0.0
    shuffled: float | None = None

    def __post_init__(self) -> None:
        self.taken: dict[str, list[dict[str, Any]]] = {}
        self.lacks: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def median(self, job: str, what: str) -> float:
        """Return the median of the measurement `what` over the rounds of a job."""
        return float(statistics.median(each[what] for each in self.taken[job]))

    def opened(self, rows: PlainRows) -> LibraryProcess:
        """Open the files of the library in its process, and return that."""
        self.process.ask("open", str(self.folder), rows.types, rows.lengths_file, rows.action, rows.image)
        return self.process

    def close(self) -> None:
        """End the process."""
        self.process.close()

    def restarted(self, rows: PlainRows) -> LibraryProcess:
        """Replace the process by a new one with the files opened, and return that."""
        self.close()
        self.process = LibraryProcess(self.name, self.python)
        return self.opened(rows)


def contenders(asked: Sequence[str], stack: ExitStack) -> tuple[list[Contender], list[str]]:
    """Start a process for each of the libraries `asked`, or for all that are installed; also return those that are not.

    The processes end when `stack` is closed.
    """
    wanted = dict(one.partition("=")[::2] for one in asked) or dict.fromkeys(LIBRARIES, "")
    for name in wanted:
        if name not in LIBRARIES:
            known = ", ".join(LIBRARIES)
            raise UsageError(f"library {name!r} is unknown{did_you_mean(name, LIBRARIES)}", hint=f"known: {known}")
    found: list[Contender] = []
    missing: list[str] = []
    for name, python in wanted.items():
        one = Contender(name, python or sys.executable, LibraryProcess(name, python or sys.executable))
        stack.callback(one.close)
        one.versions = one.process.ask("versions")
        if one.versions:
            found.append(one)
        elif asked:
            raise UsageError(
                f"{python or 'this Python'} has no {LIBRARIES[name].package}",
                hint=f"name the interpreter of an environment that has it: {name}=PYTHON",
            )
        else:
            missing.append(name)
    return found, missing


def make_form(one: Contender, rows: PlainRows, dataset: Path) -> None:
    """Have a library write its files, unless they exist; `seconds.json`, which is written last, marks them complete."""
    if not LIBRARIES[one.name].form:
        one.folder = dataset
        return
    one.folder = rows.forms / one.name
    done = one.folder / "seconds.json"
    if not done.exists():
        fs.remove(one.folder)
        fs.make_folder(one.folder)
        one.seconds = one.process.ask("prepare", rows.files, rows.lengths_file, str(one.folder))
        fs.write_file(done, json.dumps(one.seconds).encode())
    one.seconds = json.loads(read_regular(done))


class Race:
    """Runs the jobs for all libraries, with the same rows for each."""

    def __init__(self, rows: PlainRows, options: BenchOptions) -> None:
        self._rows, self._options = rows, options
        self._jobs = tuple(options.jobs or BENCH_JOBS)
        self._random = np.random.default_rng(_SEED)
        self._half = max(1, -(-rows.count // options.batch_size) // 2)

    def _index(self) -> list[int]:
        found: list[int] = self._random.integers(0, self._rows.count, self._options.batch_size).tolist()
        return found

    def compare(self, one: Contender) -> None:
        """Compare the values that a library reads with the dataset; CorruptDataError if they differ."""
        process = one.opened(self._rows)
        for job in self._jobs:
            try:
                self._compare(one, job, process)
            except NotImplementedError as error:
                one.lacks[job] = str(error)

    def _compare(self, one: Contender, job: str, process: LibraryProcess) -> None:
        size, steps = self._options.batch_size, self._options.chunk
        if job in ("frames", "chunks"):
            for _ in range(_COMPARED):
                index = self._index()
                expected = self._rows.read(job, np.array(index), steps)
                digest = joined(row_digests(expected, {name: self._rows.types[name] for name in expected}))
                if process.ask("compared", job, index, steps) != digest:
                    raise CorruptDataError(f"{one.name} reads {job} that differ from the dataset")
            return
        whole = list(range(self._rows.count))
        if job == "epoch":
            found = process.ask("epoch", _SEED, size, len(whole))
            if sorted(found["order"]) != whole or found["content"] != self._rows.content:
                raise CorruptDataError(f"an epoch of {one.name} does not have each row of the dataset once")
            one.shuffled = float(np.abs(np.diff(found["order"])).mean() / (len(whole) / 3)) if len(whole) > 1 else 1.0
            return
        first = process.ask("epoch", _SEED, size, len(whole), self._half)
        process = one.restarted(self._rows)
        rest = process.ask("epoch", _SEED, size, len(whole), None, first["state"])
        if sorted(first["order"] + rest["order"]) != whole:
            raise CorruptDataError(f"{one.name} resumes an epoch with other rows than those that are left")

    def run(self, all_of_them: Sequence[Contender], progress: Progress) -> None:
        """Time all jobs in rounds. In each round the libraries take turns, starting with another one."""
        options = self._options
        progress.start("timing", options.rounds * len(self._jobs), "jobs")
        for turn in range(options.rounds):
            shift = turn % len(all_of_them)
            for job in self._jobs:
                indexes = [self._index() for _ in range(options.batches + 1)]
                for one in (*all_of_them[shift:], *all_of_them[:shift]):
                    if job not in one.lacks:
                        one.taken.setdefault(job, []).append(self._timed(one, job, indexes, turn))
                progress.advance(1)
        progress.done()

    def _timed(self, one: Contender, job: str, indexes: list[list[int]], turn: int) -> dict[str, Any]:
        size, count = self._options.batch_size, self._rows.count
        found: dict[str, Any]
        if job == "epoch":
            found = one.process.ask("timed_epoch", turn, size, _MOST_BATCHES)
        elif job == "resume":
            state = one.process.ask("epoch", turn, size, count, self._half)["state"]
            found = one.process.ask("timed_resume", turn, size, state)
        else:
            found = one.process.ask("timed", job, indexes, self._options.chunk)
        return found

    def figures(self, one: Contender, others: Sequence[Contender]) -> LibraryFigures:
        """Return the figures of a library, ranked among `others`."""
        jobs = {job: self._figures(one, job, others) for job in one.taken}
        size = sum(path.stat().st_size for path in one.folder.rglob("*") if path.is_file())
        form = LIBRARIES[one.name].form
        return LibraryFigures(
            name=one.name, versions=one.versions, form=form, bytes=size, seconds=one.seconds, jobs=jobs, lacks=one.lacks
        )

    @staticmethod
    def _figures(one: Contender, job: str, others: Sequence[Contender]) -> JobFigures:
        taken, seconds = one.taken[job], one.median(job, "wall")
        return JobFigures(
            rate=None if job == "resume" else taken[0]["rows"] / seconds,
            seconds=seconds,
            cpu=one.median(job, "cpu"),
            memory=max(each["memory"] for each in taken),
            read=int(one.median(job, "read")),
            shuffled=one.shuffled if job == "epoch" else None,
            rank=1 + sum(other.median(job, "wall") < seconds for other in others if job in other.taken),
        )
