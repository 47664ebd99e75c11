"""What holds for every test."""

import gc
import importlib.metadata
import os
import pwd
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings
from processes import Interpreter

# On a loaded machine, one case may wait for seconds: Hypothesis measures no times. It draws the same examples in each
# run, so that no test fails by chance; with `--hypothesis-profile=random`, as in `make test-all`, it draws others, and
# more of them.
_UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", **_UNTIMED, derandomize=True, max_examples=40)
settings.register_profile("random", **_UNTIMED, derandomize=False, max_examples=100)  # whatever CI says
settings.load_profile("same")


def pytest_configure() -> None:
    """Restore the usual meaning of signals that are ignored by inheritance (`nohup`, `&` in a script).

    An ignored signal stays ignored in every process that a test starts, and would never end it.
    """
    usual = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
    for name, handler in usual.items():
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_finish() -> None:
    """Take what was imported out of the garbage collection: a test that collects then visits its own objects alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """Runs scripts in processes of their own, which have imported torch and tensordict and nothing of rbtool."""
    running = Interpreter("torch", "tensordict", environment=os.environ | {"OMP_NUM_THREADS": "1"})
    yield running
    running.close()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was waited for, and what the disk was asked to start with: `file`, `folder`, `started`."""
    from rbtool.core.format import fs

    found: list[str] = []
    sync, begin = os.fsync, fs.start_syncing

    def noting(descriptor: int) -> None:
        found.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def beginning(*arguments: Any) -> None:
        found.append("started")
        begin(*arguments)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(fs, "start_syncing", beginning)
    return found


@pytest.fixture
def two_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sources that another installed package brings, `shelf` and `crate`: rbtool may have none of its own."""
    plain = importlib.metadata.entry_points
    added = [importlib.metadata.EntryPoint(name, "shelves:Shelf", "rbtool.sources") for name in ("shelf", "crate")]

    def found(**chosen: str) -> Any:
        return added if chosen == {"group": "rbtool.sources"} else plain(**chosen)

    monkeypatch.setattr(importlib.metadata, "entry_points", found)


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whom the system does not know, as in a container, without HOME."""

    def unknown(number: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "RBTOOL_HOME", "XDG_CACHE_HOME", "MINARI_DATASETS_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], list[str]]:
    """Lists what is in a folder and was changed since it was synced; everything that is synced from now on is noted."""
    noted: dict[int, tuple[int, int]] = {}
    sync = os.fsync

    def noting(descriptor: int) -> None:
        sync(descriptor)
        here = os.fstat(descriptor)
        noted[here.st_ino] = here.st_size, here.st_mtime_ns

    def unsynced(built: Path) -> list[str]:
        states = {path: path.stat() for path in [built, *built.rglob("*")]}
        return [
            str(path.relative_to(built))
            for path, here in states.items()
            if noted.get(here.st_ino) != (here.st_size, here.st_mtime_ns)
        ]

    monkeypatch.setattr(os, "fsync", noting)
    return unsynced
