"""A user's machine that downloads from a stand-in hub and uploads to it, by commands in processes of their own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commands import run_command
from hub import WRITER, Hub, UploadHub
from waiting import HANG

import rbtool
from rbtool.core.format.manifest import TRANSFERS
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan, write_walks

DATA = Path(__file__).parents[1] / "data" / "minari"
DOOR = "D4RL/door/human-v2"
SMALL = "cartpole/scripted-v0"
ARROW = "cartpole/scripted-arrow-v0"
MAIN = r"GET .*/resolve/.*main_data\.hdf5"
INFO = r"GET .*/resolve/.*scripted-v0/data/metadata\.json"


class Machine:
    """Runs `rbtool` with a store of its own, below `folder`, and the hub as its network.

    Commands wait 2 s for a hub that a fault silences, and for any other as long as a slow machine may need.
    """

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.hub = hub
        self.folder = folder
        self.store = folder / "store"
        self.variables = {
            **hub.environment(folder / "hf"),
            "RBTOOL_HOME": str(self.store),
            "MINARI_DATASETS_PATH": str(folder / "minari"),
            "RBTOOL_RETRIES": "3:0.01",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command as a fresh process, which can be sent signals."""
        return subprocess.Popen(
            [sys.executable, "-m", "rbtool", *words], text=True, cwd=self.folder, env=self.patient(variables),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return run_command(self.patient(variables), "rbtool", *words, cwd=self.folder, check=False)

    def patient(self, variables: dict[str, str]) -> dict[str, str]:
        """The variables of a command, with how long it waits."""
        patience = "2" if any(fault.is_silence for fault in self.hub.faults) else str(HANG)
        return {**self.variables, "RBTOOL_TIMEOUT": patience, **variables}

    def python(self, script: str) -> str:
        """Run Python, where a warning is an error unless the script says otherwise, and return what it prints."""
        strict = f"import warnings\nwarnings.simplefilter('error')\n{script}"
        return run_command(self.patient({}), "script", strict, cwd=self.folder).stdout

    def json(self, *words: str, **variables: str) -> dict[str, Any]:
        """Run a command that must succeed, and read its document."""
        done = self.run(*words, "--json", **variables)
        assert done.returncode == 0, done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def fetched(self, pattern: str = "") -> list[str]:
        """Names of the files that the hub was asked for, in order."""
        return [Path(path).name for path in self.hub.paths("/resolve/") if pattern in path]

    def leftovers(self) -> Sequence[Path]:
        """Everything below the store that is neither a dataset nor remembers what words mean."""
        hidden = [path for path in self.store.rglob(".*") if path.name not in {".rbtool", ".names.json"}]
        return [path for path in hidden if path.is_file() or any(path.rglob("*"))]


ODD_PLAN = DatasetPlan(
    (3, 1, 4), ("terminated", "truncated", "both"), (False, True, False), ODD_LEAVES, text=True, documents=True
)
"""Leaves of every kind, of which some have no elements; names that files cannot have; text; an empty document."""


class Uploader(Machine):
    """Runs commands with a token that may write."""

    def __init__(self, hub: UploadHub, folder: Path) -> None:
        super().__init__(hub, folder)
        self.variables |= {"HF_TOKEN": WRITER}


def write_layouts(folder: Path) -> dict[str, Path]:
    """Write datasets of each layout, by name: an hour's walk in three of them, an odd one, and one without a step."""
    found = {name: folder / name for name in ("ted", "packed", "compressed", "odd", "empty")}
    write_walks(found["ted"], [(400, "terminated"), (1, "truncated"), (700, "both")])
    rbtool.convert(found["ted"], found["packed"], layout="packed")
    rbtool.convert(found["ted"], found["compressed"], layout="packed", compress=["observation=zstd:3"])
    write_plan(ODD_PLAN, found["odd"])
    write_walks(found["empty"], [])
    return found


def files_of(folder: Path) -> dict[str, str]:
    """The digest of every file of a dataset, but for the record of its transfers."""
    files = (path for path in folder.rglob("*") if path.is_file())
    found = {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    found.pop(TRANSFERS, None)
    return found
