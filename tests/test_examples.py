"""The scripts in examples/ run as a user runs them, and learn more than what they are compared with."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Interpreter
from source_tree import ROOT
from waiting import HANG

EXAMPLES = {example.stem: example for example in (ROOT / "examples").glob("*.py")}

# Of the last line, the first number is what the script compares its second number with.
Judgement = Callable[[float, float], bool]
SHORT: dict[str, tuple[int, Judgement]] = {
    "act": (300, lambda before, learned: learned > before + 15),
    "bc": (100, lambda dataset, clone: clone > 1.2 * dataset),
    "decision_transformer": (90, lambda random, learned: learned < 0.9 * random),
    "dqn": (1200, lambda random, learned: learned > 1.8 * random),
    # An episode that never gets up the hill has a return of -200.
    "offline_to_online": (600, lambda dataset, learned: dataset < -150 and learned > -190),
}
FULL: dict[str, Judgement] = {
    "act": lambda before, learned: before < 10 and learned > 70,
    "bc": lambda dataset, clone: clone > 1.5 * dataset,
    "decision_transformer": lambda random, learned: learned < 0.5 * random,
    "dqn": lambda random, learned: learned > 5 * random,
    "offline_to_online": lambda dataset, learned: learned > dataset + 15,
}
# With TorchRL beside rbtool; TorchRL warns about itself.
OF_TORCHRL: dict[str, tuple[int, Judgement]] = {
    "torchrl_dqn": (1600, lambda random, learned: learned > 3 * random),
    "torchrl_sac": (3200, lambda random, learned: learned > random + 300),
}


def figures(printed: str) -> tuple[float, float]:
    """Return the first two numbers with decimals of the last line."""
    first, second = re.findall(r"-?\d+\.\d+", printed.splitlines()[-1])[:2]
    return float(first), float(second)


def run(name: str, *arguments: object, cwd: Path, warnings: str = "error") -> subprocess.CompletedProcess[str]:
    """Run an example as from a shell."""
    command = [sys.executable, "-W", warnings, str(EXAMPLES[name]), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=HANG, check=False)


def test_the_examples_are_short() -> None:
    assert EXAMPLES.keys() - OF_TORCHRL.keys() == SHORT.keys() == FULL.keys()
    for example in EXAMPLES.values():
        assert len([line for line in example.read_text(encoding="utf-8").splitlines() if line.strip()]) < 100


def test_the_guide_for_robots_shows_parts_of_the_script() -> None:
    page, script = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/guides/robots.md", "examples/act.py"))
    shown = re.findall(r"^```py\n( .*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(shown) == 4
    assert [part for part in shown if part not in script] == []


QUICK = ("bc", "dqn")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(SHORT)]
)
def test_a_few_steps_learn_something(name: str, interpreter: Interpreter, tmp_path: Path) -> None:
    steps, is_learned = SHORT[name]
    plot = ("--plot", "curve.svg") if name == "bc" else ()
    done = interpreter.run(EXAMPLES[name].read_text(encoding="utf-8"), "--steps", steps, *plot, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert is_learned(*figures(done.stdout)), done.stdout
    assert [file.read_text(encoding="utf-8")[:5] for file in tmp_path.iterdir()] == ["<?xml"][: len(plot)]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FULL))
def test_a_whole_run_learns_its_task_and_draws_its_curve(name: str, tmp_path: Path) -> None:
    done = run(name, "--plot", "curve.png", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert FULL[name](*figures(done.stdout)), done.stdout
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_same_seed_prints_the_same(tmp_path: Path) -> None:
    runs = [run("dqn", "--steps", 600, "--seed", seed, cwd=tmp_path).stdout for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.slow
def test_without_the_dataset_the_car_stays_in_the_valley(tmp_path: Path) -> None:
    dataset, alone = figures(run("offline_to_online", "--ring-only", "--steps", 1500, cwd=tmp_path).stdout)
    assert alone < dataset


@pytest.mark.peer
@pytest.mark.parametrize("name", sorted(OF_TORCHRL))
def test_torchrl_trains_on_specs_and_buffers_of_rbtool(name: str) -> None:
    pytest.importorskip("torchrl")
    steps, is_learned = OF_TORCHRL[name]
    done = run(name, "--steps", steps, cwd=Path.cwd(), warnings="ignore")  # PYTHONPATH may be relative
    assert done.returncode == 0, done.stderr
    assert is_learned(*figures(done.stdout)), done.stdout
