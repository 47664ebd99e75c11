"""`RobosetExperienceReplay`: the documented constructor, over a hub on loopback, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from demonstration_files import DOOR, ROBOSET_IDS, after_final_step, lay_out_folders, plain_episodes
from hub import Hub
from machine import Machine

from rbtool import RobosetExperienceReplay
from rbtool.core.errors import UsageError

FILES = Path(__file__).parents[1] / "data" / "roboset" / DOOR


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Hub(lay_out_folders(tmp_path_factory.mktemp("hub"))) as server:
        yield server


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    hub.forget()
    return Machine(hub, tmp_path)


def run(machine: Machine, script: str) -> list[str]:
    begin = "import hashlib, json\nfrom rbtool import RobosetExperienceReplay, load_dataset\n"
    return machine.python(begin + script).splitlines()


SCRIPT = f"""
data = RobosetExperienceReplay({DOOR!r}, 32)
rows = data[:]
keys = [("observation",), ("next", "observation"), ("next", "info", "time"), ("action",), ("next", "reward")]
print(json.dumps([hashlib.sha256(rows[key].numpy().tobytes()).hexdigest() for key in keys]))
print(json.dumps(rows["next", "done"][:, 0].tolist()))
print(len(data), list(data.sample().batch_size), sorted(map(str, rows.keys())))
print(sorted(set(rows["episode"].tolist())), data.metadata["total_episodes"])
"""


def test_rows_are_those_of_both_files_and_never_zero_or_shifted_at_ends(machine: Machine) -> None:
    import hashlib

    digests, done, size, numbers = run(machine, SCRIPT)
    plain = [
        after_final_step(episode, terminated=True)
        for file in sorted(FILES.glob("*.h5"))
        for episode in plain_episodes(file, "/", "Trial").values()
    ]
    names = ("observations", "next:observations", "next:env_infos/time", "actions", "rewards")
    joined = [b"".join(episode[name].tobytes() for episode in plain) for name in names]
    assert json.loads(digests) == [hashlib.sha256(rows).hexdigest() for rows in joined]
    lengths = [len(episode["actions"]) for episode in plain]
    assert json.loads(done) == [step == length - 1 for length in lengths for step in range(length)]
    assert size == f"{sum(lengths)} [32] ['action', 'episode', 'info', 'next', 'observation']"
    assert numbers == f"{list(range(15))} 15"
    asked = len(machine.hub.paths())
    script = f"print(len(RobosetExperienceReplay({DOOR!r}, 4, download=False)), len(load_dataset('roboset:{DOOR}')))"
    assert run(machine, script) == ["356 356"]
    assert len(machine.hub.paths()) == asked


def test_the_list_of_what_there_is(machine: Machine) -> None:
    assert run(machine, "print(*RobosetExperienceReplay.available_datasets, sep='\\n')") == ROBOSET_IDS


def test_an_id_that_is_not_there_names_the_nearest(machine: Machine) -> None:
    script = """
try:
    RobosetExperienceReplay("DAPG(expert)/dor_v2d-v1", 2)
except FileNotFoundError as error:
    print(type(error).__name__, error.hint)
"""
    assert run(machine, script) == [f"DatasetNotFoundError nearest: {DOOR}, {DOOR}b"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [({"env": "door"}, "env would be for an environment"), ({"download": "again"}, "expected True, False or 'force'")],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        RobosetExperienceReplay(DOOR, 4, **arguments)  # type: ignore[arg-type]


def test_nothing_is_there_without_a_download(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="download is False"):
        RobosetExperienceReplay(DOOR, 4, download=False, root=tmp_path)
