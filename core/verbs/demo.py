"""`demo`: record episodes with gymnasium and run every verb on them, from the source to training batches."""

from __future__ import annotations

import importlib
import os
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ..declarations import FormatDeclaration, declared
from ..encodings.layout import Form
from ..errors import UsageError
from ..format import fs
from ..progress import Progress, Silent
from .results import Result


class DemoRecording(Protocol):
    """A dataset that the demo records: its id, its environment, and a short name, used for files."""

    @property
    def id(self) -> str: ...

    @property
    def environment(self) -> str: ...

    @property
    def name(self) -> str: ...


class DemoRecorder(Protocol):
    """Records the datasets of the demo in the local cache of the source that declares it."""

    recordings: ClassVar[tuple[DemoRecording, ...]]

    def record(self, folder: Path, progress: Progress) -> None:
        """Record all datasets into a new cache at `folder`, which appears when it is complete."""

    def cache_at(self, folder: Path) -> AbstractContextManager[None]:
        """Make `folder` the local cache of the source within the context."""


def _recorder() -> tuple[FormatDeclaration, DemoRecorder]:
    """Return the first declared recorder, and the declaration of its source."""
    declaration = next(one for one in declared() if one.demo is not None)
    module, _, name = str(declaration.target("demo")).partition(":")
    made: DemoRecorder = getattr(importlib.import_module(module), name)()
    return declaration, made


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
    source, recorder = _recorder()
    raw = home / source.name
    if not raw.exists():
        progress.note(f"recording episodes of {' and '.join(one.environment for one in recorder.recordings)}")
        recorder.record(raw, progress)
    progress.note(f"$ export {source.variable}={_quoted(raw)} RBTOOL_HOME={_quoted(home / 'store')}")
    with recorder.cache_at(raw):
        datasets = tuple(_DemoRun(home, source.name, one, progress, show).run() for one in recorder.recordings)
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

    def __init__(
        self, home: Path, source: str, recording: DemoRecording, progress: Progress, show: Callable[[Any], None]
    ) -> None:
        self.home = home
        self.source = source
        self.recording = recording
        self.progress = progress
        self.show = show
        self.root = home / "store"
        self.stored = f"{source}:{recording.id}"

    def run(self) -> DemoDataset:
        """Run all steps."""
        from .download import download
        from .sample import sample

        name = self.recording.name
        self._note_command("download", self.source, self.recording.id, "--local")
        got = download(self.source, self.recording.id, local=True, root=self.root, progress=self.progress)
        self._inspect()
        normalised = self.home / "normalised" / name
        digest = self._preprocess(normalised)
        checkpoints = {str(form): self._save(normalised, form) for form in FORMS}
        self._load(checkpoints["flat"], self.home / "loaded" / name)
        self._note_command("sample", normalised, "-n", "256", "--seed", "0")
        self.show(sample(normalised, 256, seed=0))
        return DemoDataset(
            name=self.stored,
            source=self.home / self.source / self.recording.id,
            steps=got.steps,
            episodes=got.episodes,
            dataset=self.root / self.source / self.recording.id,
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
