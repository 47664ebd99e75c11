"""`demo`: record episodes with gymnasium and run the verbs on them, up to a trained policy, a report, and a crash."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from ..encodings.compact import Form
from ..errors import RbtoolError, UsageError, suggests_keywords
from ..format import fs
from ..format.files import read_regular
from ..progress import Progress, Silent
from ..results import Published, Result


class DemoView(Protocol):
    """Receives the steps of the demo as they happen, dataset by dataset."""

    def dataset(self, name: str) -> None:
        """The commands from now on are for this dataset."""

    def command(self, line: str) -> None:
        """A shell command, before its verb runs."""

    def proved(self, sentence: str, *results: Any) -> None:
        """What the commands since the last call prove, and the results of their verbs."""


class _NoView:
    def dataset(self, name: str) -> None:
        pass

    def command(self, line: str) -> None:
        pass

    def proved(self, sentence: str, *results: Any) -> None:
        pass


_SOURCE, _CACHE = "minari", "MINARI_DATASETS_PATH"
"""The format of the recordings, and the environment variable for Minari's local cache."""
Observation: TypeAlias = np.ndarray[Any, Any]
Policy: TypeAlias = Callable[[Observation, np.random.Generator], Any]


@dataclass(frozen=True, slots=True)
class Recording:
    """A Minari dataset to record: id, environment, number of episodes, policy, and a sentence about it."""

    id: str
    environment: str
    episodes: int
    policy: Policy
    about: str

    @property
    def name(self) -> str:
        """The short name, used for files."""
        return self.id.split("/")[0]


def _balance(observation: Observation, draw: np.random.Generator) -> Any:
    """Push the cart under the falling pole; half of the actions are random, so that episode lengths differ."""
    wanted = int(observation[2] + 0.3 * observation[3] + 0.1 * observation[1] > 0)
    return np.int64(draw.integers(2) if draw.random() < 0.5 else wanted)


def _swing(observation: Observation, draw: np.random.Generator) -> Any:
    """Pump energy into the pendulum until it swings up, then balance it; with some noise."""
    cosine, sine, speed = map(float, observation)
    if cosine > 0.9:
        torque = -12 * math.atan2(sine, cosine) - 3 * speed
    else:
        torque = 2 * math.copysign(1, speed) * (speed**2 / 6 + 5 * cosine < 5)
    return np.asarray(np.clip([torque + draw.normal(0, 0.3)], -2, 2), np.float32)


RECORDINGS = (
    Recording("cartpole/demo-v0", "CartPole-v1", 40, _balance, "a scripted policy that acts at random half the time"),
    Recording("pendulum/demo-v0", "Pendulum-v1", 12, _swing, "a scripted policy that swings up and balances"),
)


@contextlib.contextmanager
def minari_folder(folder: Path) -> Iterator[None]:
    """Make `folder` the local cache of Minari within the context."""
    before = os.environ.get(_CACHE)
    os.environ[_CACHE] = str(folder.absolute())  # Minari joins a relative one twice
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CACHE]
        else:
            os.environ[_CACHE] = before


def _record_all(folder: Path, progress: Progress) -> None:
    """Record all of `RECORDINGS` into a new local cache of Minari at `folder`; the seeds are fixed.

    Fills `EpisodeBuffer`s directly, because Minari's own collector needs jax. The folder appears when it is complete.
    """
    building = folder.with_name(f".{folder.name}.new")
    fs.remove(building)
    fs.make_folder(building)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import minari

        progress.start("recording", sum(recording.episodes for recording in RECORDINGS), "episodes")
        with minari_folder(building):
            for recording in RECORDINGS:
                buffers = []
                for buffer in _recorded_episodes(recording):
                    buffers.append(buffer)
                    progress.advance(1)
                minari.create_dataset_from_buffers(
                    recording.id,
                    buffers,
                    env=recording.environment,
                    algorithm_name=recording.about,
                    author="rbtool demo",
                    description=f"{recording.environment}, played by {recording.about}",
                )
        progress.done()
    fs.rename(building, folder)


def _recorded_episodes(recording: Recording) -> Iterator[Any]:
    """Run the episodes and yield a Minari buffer for each."""
    import gymnasium
    from minari.data_collector import EpisodeBuffer

    draw = np.random.default_rng(0)
    environment = gymnasium.make(recording.environment)
    for number in range(recording.episodes):
        observation, _ = environment.reset(seed=number)
        buffer = EpisodeBuffer(id=number, seed=number, observations=[observation], actions=[])
        over = False
        while not over:
            action = recording.policy(observation, draw)
            observation, reward, terminated, truncated, _ = environment.step(action)
            buffer.observations.append(observation)
            buffer.actions.append(action)
            buffer.rewards.append(float(reward))
            buffer.terminations.append(terminated)
            buffer.truncations.append(truncated)
            over = terminated or truncated
        yield buffer
    environment.close()


FORMS: tuple[Form, ...] = ("ted", "flat", "nested", "h5")
_MARK = ".rbtool-demo"
_PREP = '''"""Functions that the demo runs on all rows: `rbtool preprocess DATASET --fn prep.py:NAME --dest DIR`.

A function gets a TensorDict of some rows and returns one. What was known before the action is at its root, what
came after it under "next". Both are changed alike here, so that the next observation still equals the observation
of the following row.
"""

import torch


def cartpole(rows):
    """Scale position, speed, angle and angular speed to about -1 ... 1."""
    return scaled(rows, [2.4, 3.0, 0.21, 3.0])


def pendulum(rows):
    """Scale the angular speed to -1 ... 1; cosine and sine are within it already."""
    return scaled(rows, [1.0, 1.0, 8.0])


def scaled(rows, scale):
    """Divide the observations, before and after the step."""
    for part in (rows, rows["next"]):
        part["observation"] = part["observation"] / torch.tensor(scale)
    return rows
'''
_TRAIN = '''"""Clone the policy of recorded episodes of CartPole: `python train.py DATASET`.

Prints the number of training steps and the mean return of the clone over ten episodes, several times.
"""

import sys
import tempfile

import torch

import rbtool

torch.manual_seed(0)
torch.set_num_threads(1)  # the network is too small for more
model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
dataset = rbtool.load_dataset(sys.argv[1], batch_size=256, seed=0)
act = lambda observation: int(model(torch.as_tensor(observation)).argmax())
for step in range(121):
    if step % 15 == 0:
        with tempfile.TemporaryDirectory() as folder:
            played = rbtool.record("CartPole-v1", folder + "/played", policy=act, episodes=10, seed=1000)
            print(step, round(rbtool.inspect(played.path).returns.mean), flush=True)
    batch = dataset.sample()
    loss = torch.nn.functional.cross_entropy(model(batch["observation"]), batch["action"])
    optimizer.zero_grad(), loss.backward(), optimizer.step()
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoDataset:
    """One dataset of the demo: the output path of each step, and content digests.

    `checkpoints` maps each form to its path. `loaded` is the dataset restored from one of them, with the digest of
    `normalised`.
    """

    name: str
    source: Path
    steps: int
    episodes: int
    dataset: Path
    content_digest: str
    normalised: Path
    normalised_digest: str
    checkpoints: Mapping[str, Path]
    loaded: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult(Result):
    """Where all results are, and commands to continue with."""

    kind: ClassVar[str] = "demo"
    folder: Path
    root: Path
    datasets: tuple[DemoDataset, ...]
    suggestions: tuple[str, ...]
    seconds: float


@suggests_keywords()
def demo(
    folder: str | os.PathLike[str] = "rbtool-demo",
    *,
    progress: Progress | None = None,
    view: DemoView | None = None,
) -> DemoResult:
    """Record CartPole and Pendulum episodes and run every verb on them, all inside one folder. Needs no network.

    A second run keeps the recordings and `prep.py` and replaces the rest.

    Args:
        folder: a new folder, or the folder of an earlier demo.
        progress: shows how far it is; default: nothing is shown.
        view: receives the shell command of each step, and what it proves.

    Returns:
        The folder and the datasets in it.

    Raises:
        UsageError: `folder` is not empty and not from a demo.
    """
    started, home = time.perf_counter(), Path(folder)
    progress, view = progress or Silent(), view or _NoView()
    _claim(home)
    raw = home / _SOURCE
    if not raw.exists():
        progress.note(f"recording episodes of {' and '.join(one.environment for one in RECORDINGS)}")
        _record_all(raw, progress)
    view.command(f"export {_CACHE}={_quoted(raw)} RBTOOL_HOME={_quoted(home / 'store')}")
    with minari_folder(raw):
        runs = [_DemoRun(home, one, view) for one in RECORDINGS]
        datasets = tuple(run.run(first=run is runs[0]) for run in runs)
    return DemoResult(
        folder=home,
        root=home / "store",
        datasets=datasets,
        suggestions=_suggestions(home, datasets[0]),
        seconds=round(time.perf_counter() - started, 1),
    )


def _claim(home: Path) -> None:
    """Create and mark the folder; UsageError if it is not empty and not from a demo."""
    if home.exists() and not (home / _MARK).exists() and not (home.is_dir() and not any(home.iterdir())):
        raise UsageError(f"{home} already exists and is not from a demo; left unchanged", hint="name another folder")
    fs.make_folder(home)
    mark = "made by `rbtool demo`; remove the folder when you have seen it\n"
    for name, text in ((_MARK, mark), ("prep.py", _PREP), ("train.py", _TRAIN)):
        if not (home / name).exists():
            fs.replace_file(home / name, text.encode())


def _suggestions(home: Path, dataset: DemoDataset) -> tuple[str, ...]:
    root = f"--root {_quoted(home / 'store')}"
    return (
        f"rbtool list {root}",
        f"rbtool inspect {_quoted(dataset.normalised)} --episode 0 --head 5",
        f"rbtool checkpoint save {_quoted(dataset.dataset)} {_quoted(home / 'mine.h5')} --as h5 --compression gzip",
    )


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


class _DemoRun:
    """Runs the verbs on one dataset."""

    def __init__(self, home: Path, recording: Recording, view: DemoView) -> None:
        self.home = home
        self.recording = recording
        self.view = view
        self.root = home / "store"
        self.stored = f"{_SOURCE}:{recording.id}"

    def run(self, *, first: bool) -> DemoDataset:
        """Run all steps; resuming, training and the report only for the first dataset."""
        name = self.recording.name
        self.view.dataset(self.stored)
        got = self._download()
        self._inspect()
        normalised = self.home / "normalised" / name
        digest = self._preprocess(normalised)
        self._check(normalised)
        checkpoints = self._save(normalised)
        self._load(checkpoints["flat"], self.home / "loaded" / name)
        self._sample(normalised)
        if first:
            self._resume(digest)
            self._train()
            self._report()
        return DemoDataset(
            name=self.stored,
            source=self.home / _SOURCE / self.recording.id,
            steps=got.steps,
            episodes=got.episodes,
            dataset=self.root / _SOURCE / self.recording.id,
            content_digest=got.content_digest or "",
            normalised=normalised,
            normalised_digest=digest,
            checkpoints=checkpoints,
            loaded=self.home / "loaded" / name,
        )

    def _command(self, *words: str | Path, replaces: Path | None = None) -> None:
        """Show the shell command of the next step."""
        force = ["--force"] if replaces is not None and replaces.exists() else []
        self.view.command(shlex.join(["rbtool", *map(str, words), *force]))

    def _download(self) -> Published:
        from .download import download

        self._command("download", _SOURCE, self.recording.id, "--local")
        got = download(_SOURCE, self.recording.id, local=True, root=self.root)
        self.view.proved(f"{got.steps:,} steps in {got.episodes:,} episodes, as TED; digest {got.content_digest}")
        return got

    def _inspect(self) -> None:
        from .inspect import InspectResult, inspect

        self._command("inspect", self.stored)
        whole = inspect(self.stored, root=self.root)
        assert isinstance(whole, InspectResult), "a stored dataset is one"
        ends = f"{whole.ends.terminated:,} terminated, {whole.ends.truncated:,} truncated"
        self.view.proved(f"how its {whole.episodes:,} episodes end: {ends}", whole)
        self._command("inspect", self.stored, "--episode", "0", "--head", "3")
        self.view.proved(
            "each step has its next observation; after the last step, it is the environment's final observation, not "
            "the start of the next episode",
            inspect(self.stored, root=self.root, episode=0, head=3),
        )

    def _preprocess(self, dest: Path) -> str:
        from ..preprocess.preprocess import preprocess

        function, root = f"{self.home / 'prep.py'}:{self.recording.name}", self.root
        self._command("preprocess", self.stored, "--fn", function, "--dest", dest, "--num-workers", "2", replaces=dest)
        made = preprocess(self.stored, function, dest, num_workers=2, force=True, root=root)
        self.view.proved(f"a function of yours, run on every step by two processes; digest {made.content_digest}")
        return made.content_digest or ""

    def _check(self, dataset: Path) -> None:
        from .check import check

        self._command("check", dataset)
        found = check(dataset)
        self.view.proved(f"{found.rules} rules on every step: {found.errors} errors, {found.warnings} warnings", found)

    def _save(self, dataset: Path) -> dict[str, Path]:
        from .checkpoint import save, verify

        place, force = self.home / "checkpoints" / self.recording.name, ""
        checkpoints, verified = {}, []
        for form in FORMS:
            dest = place.with_name(f"{place.name}.{form}")
            force = force or " --force" * dest.exists()
            save(dataset, dest, form=form, force=True)
            verified.append(verify(dest, dataset))
            checkpoints[str(form)] = dest
        saved, given = f"{_quoted(place)}.$form", _quoted(dataset)
        self.view.command(
            f"for form in {' '.join(map(str, FORMS))}; do rbtool checkpoint save {given} {saved} --as $form{force}"
            f" && rbtool checkpoint verify {saved} {given}; done"
        )
        equal = sum(one.equal for one in verified)
        self.view.proved(f"{equal} of {len(FORMS)} forms equal the dataset bit for bit", *verified)
        return checkpoints

    def _load(self, saved: Path, dest: Path) -> None:
        from .checkpoint import load

        self._command("checkpoint", "load", saved, dest, replaces=dest)
        loaded = load(saved, dest, force=True)
        self.view.proved(f"the same dataset again; digest {loaded.content_digest}")

    def _sample(self, dataset: Path) -> None:
        from .sample import sample

        self._command("sample", dataset, "-n", "256", "--seed", "0")
        drawn = sample(dataset, 256, seed=0)
        self.view.proved(f"a training batch: {drawn.n} steps of {len(set(drawn.episodes))} episodes", drawn)

    def _resume(self, digest: str) -> None:
        """Kill a run of `preprocess` in the middle and continue it."""
        from ..preprocess.preprocess import preprocess

        function, dest = f"{self.home / 'prep.py'}:{self.recording.name}", self.home / "resumed" / self.recording.name
        fs.remove(dest)
        words = ["preprocess", self.stored, "--fn", function, "--dest", str(dest), "--chunk-size", "50", "--resume"]
        self._command(*words)
        finished = _killed([sys.executable, "-m", "rbtool", *words, "--root", str(self.root.absolute())], dest)
        made = preprocess(self.stored, function, dest, chunk_size=50, resume=True, root=self.root)
        same = "the same" if made.content_digest == digest else "another"
        chunks = f"{finished:,} of {-(-made.steps // 50):,} chunks"
        self.view.proved(f"killed with kill -9 after {chunks}, and resumed: {same} digest")

    def _train(self) -> None:
        """Run the training script, and show the returns that it prints as a curve."""
        script, stored = self.home / "train.py", self.root / _SOURCE / self.recording.id
        self.view.command(shlex.join(["python", str(script), str(stored)]))
        done = subprocess.run([sys.executable, script, stored], capture_output=True, text=True, check=False)
        if done.returncode:  # users may have edited it
            why = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
            raise RbtoolError(f"{script} failed: {why}", hint=f"remove {script}, and the demo writes it again")
        returns = [int(value) for value in re.findall(r"^\d+ (\d+)$", done.stdout, re.MULTILINE)]
        curve = "".join(_BARS[value * (len(_BARS) - 1) // max(1, *returns)] for value in returns)
        shown = f"mean return {returns[0]} {curve} {returns[-1]}" if returns else "it prints no returns"
        self.view.proved(f"a clone of the policy that recorded it: {shown}")

    def _report(self) -> None:
        from .report import report

        page = self.home / "report.html"
        self._command("report", self.stored, "-o", page, replaces=page)
        try:
            report(self.stored, page, root=self.root, force=True)
        except UsageError as error:  # an extra is not installed
            self.view.proved(f"left out: {error}; {error.hint}")
        else:
            self.view.proved(f"all of it on one page: open {page} in a browser")


_BARS = "▁▂▃▄▅▆▇█"


def _killed(command: Sequence[str], dest: Path) -> int:
    """Run a command of `preprocess` and kill it after some chunks; return how many it has finished."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finished = 0
    try:
        while process.poll() is None and finished < _ENOUGH:
            time.sleep(0.001)
            for journal in dest.parent.glob(".*/work/journal.jsonl"):
                with contextlib.suppress(FileNotFoundError):  # the run has just ended
                    finished = max(finished, read_regular(journal).count(b"\n") - 1)
    finally:
        process.kill()
        process.wait()
    return finished


_ENOUGH = 20
"""The number of finished chunks after which the run is killed."""
