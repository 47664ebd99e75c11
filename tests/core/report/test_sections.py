"""The commands in a report make the dataset again."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import folder_of_commands
from waiting import HANG

import rbtool
from rbtool.core.format.manifest import Manifest, Provenance
from rbtool.core.options import VerbOptions
from rbtool.core.report import page
from rbtool.core.report.page import reproducing
from rbtool.core.verbs.options import ConvertOptions, DownloadOptions

DATA = Path(__file__).parents[2] / "data" / "minari"
CART = DATA / "cartpole" / "scripted-v0"


def made(folder: Path, kind: str) -> Path:
    """Make a dataset by a few verbs."""
    cart, dest = folder / "cart", folder / "made"
    if kind == "record":
        return rbtool.record("CartPole-v1", dest, episodes=3, seed=5, num_envs=2, max_steps=9).path
    rbtool.convert(CART, cart, episodes="0:6", layout="packed" if kind == "packed" else "ted")
    if kind == "packed":
        return cart
    if kind == "preprocess":
        operations = {"filter": ["return > 5"], "n_step": 3, "gamma": 0.9, "normalize": ["observation"]}
        rbtool.preprocess(cart, None, folder / "half", operations=operations, num_workers=0)
        rbtool.preprocess(folder / "half", None, dest, operations={"cast": ["observation=float64"]}, num_workers=0)
    elif kind == "split":
        rbtool.split(cart, folder / "parts", train=0.5, test=0.5, seed=3)
        return folder / "parts" / "train"
    elif kind == "checkpoint":
        rbtool.checkpoint.save(cart, folder / "cart.h5", form="h5")
        rbtool.checkpoint.load(folder / "cart.h5", dest)
    return dest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "preprocess", "split", "checkpoint", "record"])
def test_commands_make_the_dataset_again(tmp_path: Path, kind: str) -> None:
    manifest = Manifest.load(made(tmp_path, kind))
    commands = [command for _, command in reproducing(manifest)]
    assert all(commands)
    (tmp_path / "again").mkdir()
    path = f"{folder_of_commands()}:/usr/bin:/bin"
    subprocess.run(
        ["bash", "-ec", "\n".join(commands)], cwd=tmp_path / "again", check=True, capture_output=True, timeout=HANG,
        env={"PATH": path, "HOME": str(tmp_path)},
    )  # fmt: skip
    place = "DEST/train" if kind == "split" else "DEST"
    assert Manifest.load(tmp_path / "again" / place).content_digest == manifest.content_digest


def commands_of(verb: str, **arguments: Any) -> str:
    """The command of a dataset that was made in one step."""
    step = Provenance(verb, arguments, "0.1.0", {}, "2026-01-01")
    manifest: Any = SimpleNamespace(provenance=(step,), resolved_revision="abc")
    return reproducing(manifest)[0][1]


@pytest.mark.parametrize(
    ("verb", "arguments", "expected"),
    [
        ("download", {"source": "minari", "id": "a/b-v0", "local": True}, "rbtool download minari a/b-v0 --local"),
        ("download", {"source": "minari", "id": "a/b-v0"}, "rbtool download minari a/b-v0 --revision abc"),
        ("convert", {"path": "my file", "map": ["a=b"], "horizon": 3},
         "rbtool convert 'my file' DEST --horizon 3 --map a=b"),
        ("convert", {"path": "x", "max_episodes": 2}, "rbtool convert x DEST --max-episodes 2"),
        ("merge", {"datasets": ["a", "b c"], "schema": "union", "cast": True},
         "rbtool merge a 'b c' DEST --schema union --cast"),
        ("preprocess", {"function": "f.py:g", "unit": "row", "seed": 2, "chunk_size": 5},
         "rbtool preprocess DATASET --fn f.py:g --unit row --seed 2 --chunk-size 5 --dest DEST"),
        ("record", {"env": "A-v1", "policy": "my.py:act", "episodes": 3, "seed": 0, "render": True, "num_envs": 2},
         "rbtool record A-v1 DEST --episodes 3 --seed 0 --render --policy my.py:act"),
        ("record", {"env": "A-v1", "policy": "agents:act", "episodes": 3, "seed": 0}, ""),
        ("clean", {"dataset": "x", "drop": ["nan", "stuck"], "trim_idle": True, "dropped": {"TED007": [3]}},
         "rbtool clean x DEST --drop nan --drop stuck --trim-idle"),
        ("record", {}, ""),
        ("convert", {}, ""),
        ("merge", {"datasets": "a"}, ""),
    ],
)  # fmt: skip
def test_commands_have_the_recorded_arguments(verb: str, arguments: dict[str, Any], expected: str) -> None:
    command = commands_of(verb, **arguments)
    assert command == expected
    assert shlex.split(command) == shlex.split(expected)


@pytest.mark.parametrize("options", [ConvertOptions, DownloadOptions])
def test_commands_repeat_all_options_that_change_the_data(options: type[VerbOptions]) -> None:
    recorded = {name for name, one in options.described().items() if one.recorded}
    assert recorded <= set(page._OPTIONS)
