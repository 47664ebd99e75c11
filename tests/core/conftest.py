"""A dataset to do things with, and a current folder whose modules must not run."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def walks(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A dataset of the `EPISODES` of the test's module."""
    from rbtool.core.testing.datasets import write_walks

    write_walks(tmp_path / "walks", request.module.EPISODES)
    return tmp_path / "walks"


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
