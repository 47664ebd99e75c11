"""A dataset to do things with, and a current folder whose modules must not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def walks(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A dataset of the `EPISODES` of the test's module."""
    from rbtool.core.testing.datasets import write_walks

    write_walks(tmp_path / "walks", request.module.EPISODES)
    return tmp_path / "walks"


class Heard:
    """A progress that keeps all it is told, and calls `meanwhile` at every advance."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int | None, str]] = []
        self.advances: list[int] = []
        self.notes: list[str] = []
        self.ended = 0
        self.meanwhile: Callable[[], object] = lambda: None

    def start(self, label: str, total: int | None, unit: str) -> None:
        self.started.append((label, total, unit))

    def advance(self, amount: int) -> None:
        self.advances.append(amount)
        self.meanwhile()

    def done(self, remark: str = "") -> None:
        self.ended += 1

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def heard() -> Heard:
    return Heard()


PLANTED = (
    "json", "numpy", "torch", "random", "typing", "signal", "threading", "pickle", "tensordict", "cloudpickle", "numba",
    "zstandard", "xxhash", "typer", "tomllib", "multiprocessing", "ctypes", "colorsys",
)  # fmt: skip


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, full of modules that leave a file behind when they are run; returns that file."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path / "ran"
