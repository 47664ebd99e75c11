"""A folder with datasets to type commands in, and a shell to type them into."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import folder_of_commands
from hub import Hub, lay_out_hub
from made_datasets import write_fields

import rbtool
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.recording import PackedRecorder

DATA = Path(__file__).parents[1] / "data" / "minari"
PREP = '''
def normalise(rows):
    """Halve the observations, before and after the step."""
    for part in (rows, rows["next"]):
        part["observation"] = part["observation"] / 2
    return rows
'''
JQ = """#!{python}
import json, sys
print(json.load(sys.stdin)[sys.argv[1].removeprefix(".")])
"""
Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the examples of the help pages take for granted."""
    folder = tmp_path_factory.mktemp("template")
    for name in ("cartpole/scripted-v0", "pendulum/random-v0", "tuple/trunc-v0"):
        shutil.copytree(DATA / name, folder / "minari" / name)
    shutil.copy(DATA.parent / "d4rl" / "kitchen_like_no_timeouts.hdf5", folder / "kitchen.hdf5")
    (folder / "prep.py").write_text(PREP)
    (folder / "train.py").write_text("from torchrl.data import ReplayBuffer\n")
    (folder / "log.csv").write_text("obs_0,obs_1,force,r,done\n" + "0.5,-1,0.25,1,0\n0.75,2,-0.5,1,1\n" * 3)
    shutil.copy(DATA.parent / "logs" / "ros2_markers.mcap", folder / "run.mcap")
    rbtool.convert(folder / "minari/cartpole/scripted-v0", folder / "cartpole")
    rbtool.checkpoint.save(folder / "cartpole", folder / "cartpole.h5", form="h5")
    rbtool.checkpoint.save(folder / "cartpole", folder / "torchrl", form="nested", for_library="torchrl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(folder / "minari"))
        rbtool.download("minari", "cartpole/scripted-v0", local=True, root=folder / "home")
    _record(folder / "cartpole", folder / "recording")
    images = np.random.default_rng(0).integers(0, 256, (9, 24, 32, 3), np.uint8)
    write_fields(folder / "push", {"reward": np.zeros(8), "pixels": images})
    return folder


def _record(dataset: Path, place: Path) -> None:
    """Record two episodes as a process does that is killed before it has finished."""
    with TedReader(dataset) as reader:
        recorder, table = PackedRecorder(place, reader.fields), reader.episodes
        for start, length in zip(table.start[:2].tolist(), table.length[:2].tolist(), strict=True):
            columns = {field.key: reader.read(field.key, start, start + length) for field in reader.fields}
            recorder.add_episode(columns, episode=0)
        recorder.close()


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> Path:
    """A copy of the template that a test may change."""
    return Path(shutil.copytree(template, tmp_path / "work"))


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of commands that a machine may lack."""
    folder = tmp_path_factory.mktemp("tools")
    if shutil.which("jq") is None:
        (folder / "jq").write_text(JQ.format(python=sys.executable))
        (folder / "jq").chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub with the datasets of tests/data."""
    with Hub(lay_out_hub(DATA, tmp_path_factory.mktemp("hub"))) as server:
        yield server


@pytest.fixture(scope="session")
def variables(tools: Path, hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a user who has set nothing, but for where the hub is."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], str(tools)])
    ours = ("RBTOOL_", "MINARI_", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "PYTHON", "COLUMNS", "LINES", "COV_", "XDG_")
    network = hub.environment(tmp_path_factory.mktemp("hf"))
    return {name: value for name, value in network.items() if not name.startswith(ours)} | {"PATH": path}


@pytest.fixture(scope="session")
def environment(variables: dict[str, str]) -> dict[str, str]:
    """What commands see; `rbtool` is forked from a process that has imported everything already."""
    return variables | {"PATH": os.pathsep.join([str(folder_of_commands()), variables["PATH"]])}


@pytest.fixture(scope="session")
def demo(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A demo that was run in a shell: its folder, and what it said."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(["rbtool", "demo"], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture(scope="session")
def real(variables: dict[str, str]) -> dict[str, str]:
    """The variables that make commands start as they do for a user."""
    return {"PATH": variables["PATH"]}


@pytest.fixture
def shell(template: Path, environment: dict[str, str]) -> Shell:
    """Run a line of bash, with `pipefail`, in the template unless another folder is given; variables by keyword."""

    def run(line: str, cwd: Path = template, **variables: str) -> subprocess.CompletedProcess[str]:
        places = {"RBTOOL_HOME": str(cwd / "home"), "MINARI_DATASETS_PATH": str(cwd / "minari")}
        return subprocess.run(
            ["bash", "-c", f"set -o pipefail; {line}"], cwd=cwd, env=environment | places | variables,
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    return run
