"""`demo`: record episodes with gymnasium and run every verb on them, from Minari dataset to training batch."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np

from ..encodings.layout import Form
from ..errors import UsageError
from ..format import fs
from ..progress import Progress, Silent
from .results import Result

Observation: TypeAlias = np.ndarray[Any, Any]
Policy: TypeAlias = Callable[[Observation, np.random.Generator], Any]


@dataclass(frozen=True, slots=True)
class Recording:
    """A Minari dataset to record: id, environment, number of episodes, policy."""

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
    """Swing the pendulum up by its energy, then balance it; with some noise."""
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
    """Set `MINARI_DATASETS_PATH`, the local Minari cache, to `folder` within the context."""
    before = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = str(folder.absolute())  # Minari joins a relative one twice
    try:
        yield
    finally:
        if before is None:
            del os.environ["MINARI_DATASETS_PATH"]
        else:
            os.environ["MINARI_DATASETS_PATH"] = before


def record_all(folder: Path, progress: Progress) -> None:
    """Record all of `RECORDINGS` into a new Minari cache at `folder`; the seeds are fixed.

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
_PREP = '''"""What the demo runs on all rows: `rbtool preprocess DATASET --fn prep.py:NAME --dest DIR`.

A function gets a TensorDict of some rows and returns one. What was known before the action is at its root, what
came after it under "next": change both alike, and the next observation stays the observation of the next row.
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
    """Where everything is, and commands to continue with."""

    kind: ClassVar[str] = "demo"
    folder: Path
    root: Path
    datasets: tuple[DemoDataset, ...]
    suggestions: tuple[str, ...]
    seconds: float


def demo(
    folder: str | os.PathLike[str] = "rbtool-demo",
    *,
    progress: Progress | None = None,
    show: Callable[[Any], None] = lambda result: None,
) -> DemoResult:
    """Record CartPole and Pendulum episodes and run every verb on them, all inside `folder`.

    `show` is called with the results of inspect, check, verify and sample; `progress` gets a note with the shell
    command of each step. A second run keeps the recordings and `prep.py` and replaces the rest. Needs no network.
    Raises UsageError if `folder` is not empty and not from a demo.
    """
    started, home, progress = time.perf_counter(), Path(folder), progress or Silent()
    _claim(home)
    if not (home / "minari").exists():
        progress.note(f"recording episodes of {' and '.join(one.environment for one in RECORDINGS)}")
        record_all(home / "minari", progress)
    progress.note(f"$ export MINARI_DATASETS_PATH={_quoted(home / 'minari')} RBTOOL_HOME={_quoted(home / 'store')}")
    datasets = tuple(_DemoRun(home, recording, progress, show).run() for recording in RECORDINGS)
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
        raise UsageError(f"{home} is there already and not from a demo; it is left alone", hint="name another folder")
    fs.make_folder(home)
    for name, text in ((_MARK, "made by `rbtool demo`; remove the folder when you have seen it\n"), ("prep.py", _PREP)):
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

    def __init__(self, home: Path, recording: Recording, progress: Progress, show: Callable[[Any], None]) -> None:
        self.home = home
        self.recording = recording
        self.progress = progress
        self.show = show
        self.root = home / "store"
        self.stored = f"minari:{recording.id}"

    def run(self) -> DemoDataset:
        """Run all steps."""
        from .download import download
        from .sample import sample

        name = self.recording.name
        self._note_command("download", "minari", self.recording.id, "--local")
        with minari_folder(self.home / "minari"):
            got = download("minari", self.recording.id, local=True, root=self.root, progress=self.progress)
        self._inspect()
        normalised = self.home / "normalised" / name
        digest = self._preprocess(normalised)
        checkpoints = {str(form): self._save(normalised, form) for form in FORMS}
        self._load(checkpoints["flat"], self.home / "loaded" / name)
        self._note_command("sample", normalised, "-n", "256", "--seed", "0")
        self.show(sample(normalised, 256, seed=0))
        return DemoDataset(
            name=self.stored,
            source=self.home / "minari" / self.recording.id,
            steps=got.steps,
            episodes=got.episodes,
            dataset=self.root / "minari" / self.recording.id,
            content_digest=got.content_digest or "",
            normalised=normalised,
            normalised_digest=digest,
            checkpoints=checkpoints,
            loaded=self.home / "loaded" / name,
        )

    def _note_command(self, *words: str | Path, replaces: Path | None = None) -> None:
        """Note the shell command of the next step."""
        force = ["--force"] if replaces is not None and replaces.exists() else []
        self.progress.note(f"$ {shlex.join(['rbtool', *map(str, words), *force])}")

    def _inspect(self) -> None:
        from .inspect import inspect

        self._note_command("inspect", self.stored)
        self.show(inspect(self.stored, root=self.root))
        self._note_command("inspect", self.stored, "--episode", "0", "--head", "3")
        self.show(inspect(self.stored, root=self.root, episode=0, head=3))

    def _preprocess(self, dest: Path) -> str:
        from .check import check
        from .preprocess import preprocess

        function, root = f"{self.home / 'prep.py'}:{self.recording.name}", self.root
        self._note_command(
            "preprocess", self.stored, "--fn", function, "--dest", dest, "--num-workers", "2", replaces=dest
        )
        made = preprocess(self.stored, function, dest, num_workers=2, force=True, root=root, progress=self.progress)
        self._note_command("check", dest)
        self.show(check(dest, progress=self.progress))
        return made.content_digest or ""

    def _save(self, dataset: Path, form: Form) -> Path:
        from .checkpoint import save, verify

        dest = self.home / "checkpoints" / f"{self.recording.name}.{form}"
        self._note_command("checkpoint", "save", dataset, dest, "--as", form, replaces=dest)
        save(dataset, dest, form=form, force=True, progress=self.progress)
        self._note_command("checkpoint", "verify", dest, dataset)
        self.show(verify(dest, dataset, progress=self.progress))
        return dest

    def _load(self, saved: Path, dest: Path) -> None:
        from .checkpoint import load

        self._note_command("checkpoint", "load", saved, dest, replaces=dest)
        load(saved, dest, force=True, progress=self.progress)
