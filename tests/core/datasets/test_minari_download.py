"""`MinariExperienceReplay` and a hub: the reference page's example, and nothing asked that need not be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from download_machine import Machine
from forked_scripts import Interpreter
from hub import Hub
from minari_hub import lay_out_hub

DATA = Path(__file__).parents[2] / "data" / "minari"
DOOR, CART = "D4RL/door/human-v2", "cartpole/scripted-v0"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Hub(lay_out_hub(DATA, tmp_path_factory.mktemp("hub"))) as server:
        yield server


@pytest.fixture(scope="module")
def python(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    """Runs scripts with everything imported, in the environment of a machine whose network is the hub."""
    machine = Machine(hub, tmp_path_factory.mktemp("machine"))
    running = Interpreter("rbtool.core.datasets.buffer", "huggingface_hub", environment=machine.variables)
    yield running
    running.close()


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    hub.forget()
    return Machine(hub, tmp_path)


def run(machine: Machine, python: Interpreter, script: str) -> str:
    """Run Python on that machine, where a warning is an error unless the script says otherwise; return what it says."""
    begin = "import warnings\nfrom rbtool import MinariExperienceReplay, load_dataset\n"
    ran = python.run(begin + script, cwd=machine.folder, environment=machine.variables)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


EXAMPLE = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    data = MinariExperienceReplay("door-human-v1", batch_size=32, download="force")
for sample in data:
    break
print([str(warning.message) for warning in caught])
print({key if isinstance(key, str) else ".".join(key): list(sample[key].shape) for key in sorted(sample.keys(True, True), key=str)})
print({str(sample[key].dtype) for key in ("observation", ("next", "reward"))}, sample["action"].dtype)
"""  # noqa: E501


def test_the_example_of_the_reference_page(machine: Machine, python: Interpreter) -> None:
    warned, shapes, dtypes = run(machine, python, EXAMPLE).splitlines()
    assert warned == f"['door-human-v1 not found; using {DOOR}']"
    assert eval(shapes) == {
        "next.done": [32, 1], "next.observation": [32, 39], "next.reward": [32, 1], "next.terminated": [32, 1],
        "next.truncated": [32, 1], "action": [32, 28], "episode": [32], "index": [32], "observation": [32, 39],
    }  # fmt: skip
    assert dtypes == "{'torch.float64'} torch.float32"
    before = len(machine.hub.paths(""))
    script = """
data = MinariExperienceReplay("door-human-v1", 32)
print(len(data), len(load_dataset("minari:door-human-v1")), data.data_path)
"""
    assert run(machine, python, script) == f"6704 6704 {machine.store / 'minari' / DOOR}\n"
    assert len(machine.hub.paths("")) == before


@pytest.mark.slow
def test_it_is_fetched_once_and_by_force_again(machine: Machine, python: Interpreter) -> None:
    script = f"""
for download in (True, True, False, "force", True):
    data = MinariExperienceReplay({CART!r}, 2, root="data", download=download)
print(data.data_path)
"""
    assert run(machine, python, script) == f"{machine.folder / 'data' / CART}\n"
    assert len(machine.fetched("main_data")) == 2
    assert {path.name for path in (machine.folder / "data").iterdir()} == {"cartpole", ".rbtool-store"}


@pytest.mark.slow
def test_damage_is_mended_by_force(machine: Machine, python: Interpreter) -> None:
    script = f"""
data = MinariExperienceReplay({CART!r}, 2)
(data.data_path / "action.memmap").write_bytes(b"")
print(len(MinariExperienceReplay({CART!r}, 2, download="force")[:]["action"]) == len(data))
"""
    assert run(machine, python, script) == "True\n"


def test_the_list_of_what_there_is(machine: Machine, python: Interpreter) -> None:
    ids = run(machine, python, "print(*MinariExperienceReplay.available_datasets, sep='\\n')").split()
    assert ids == sorted(path.parent.parent.relative_to(DATA).as_posix() for path in DATA.rglob("data/metadata.json"))


def test_what_the_hub_does_not_have(machine: Machine, python: Interpreter) -> None:
    script = """
try:
    MinariExperienceReplay("D4RL/door/human-v9", 2)
except FileNotFoundError as error:
    print(type(error).__name__, error.hint)
"""
    said = run(machine, python, script)
    assert said.startswith("DatasetNotFoundError ")
    assert DOOR in said
    assert not (machine.store / "minari" / "D4RL").exists()
