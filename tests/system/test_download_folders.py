"""`rbtool download roboset` and `robomimic` with every kind of bad luck: the next run completes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from demonstration_files import DOOR, LIFT, ROBOMIMIC_IDS, lay_out_folders
from hub import Fault, Hub
from machine import Machine
from waiting import HANG

import rbtool

FILE = r"GET .*/resolve/.*\.(h5|hdf5)"
FAULTS = [
    pytest.param(Fault(FILE, "status:404", 99), 4, "", id="404 on a file"),
    pytest.param(Fault("GET", "status:401", 99), 5, "401", id="401"),
    pytest.param(Fault("GET", "status:403", 99), 5, "403 Forbidden", id="403"),
    pytest.param(Fault(FILE, "status:429", 1, headers={"Retry-After": "0"}), 0, "", id="429 once"),
    pytest.param(Fault(FILE, "status:429", 99, headers={"Retry-After": "9000"}), 5, "9,000 s", id="429 for hours"),
    pytest.param(Fault("/api/", "status:500", 1), 0, "", id="500 once from the API"),
    pytest.param(Fault(FILE, "status:503", 99), 5, "503", id="503 for ever"),
    pytest.param(Fault(FILE, "reset", 1), 0, "", id="reset once"),
    pytest.param(Fault(FILE, "reset", 99), 5, "", id="reset for ever"),
    pytest.param(Fault(FILE, "corrupt", 1), 0, "", id="a corrupt byte once"),
    pytest.param(Fault(FILE, "corrupt", 99), 1, "sha256", id="a corrupt byte for ever"),
    pytest.param(Fault(FILE, "norange", 99), 0, "", id="no ranges"),
    pytest.param(Fault(FILE, "cut:9000", 1), 0, "", id="cut once"),
    pytest.param(Fault(FILE, "stall:9000", 1), 0, "", id="stalled once"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out_folders(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def expected(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    places = {
        "roboset": root / "jdvakil/RoboSet_Sim" / DOOR,
        "robomimic": root / "robomimic/robomimic_datasets/v1.5/lift/ph/low_dim_v15.hdf5",
    }
    folder = tmp_path_factory.mktemp("expected")
    return {name: rbtool.convert(place, folder / name).content_digest or "" for name, place in places.items()}


@pytest.fixture
def machine(root: Path, tmp_path: Path) -> Iterator[Machine]:
    with Hub(root) as hub:
        yield Machine(hub, tmp_path)


@pytest.mark.parametrize(("fault", "code", "sentence"), FAULTS)
def test_a_fault_is_survived_or_named_and_the_next_run_completes(
    machine: Machine, expected: dict[str, str], fault: Fault, code: int, sentence: str
) -> None:
    machine.hub.faults.append(replace(fault))
    done = machine.run("download", "roboset", DOOR)
    assert (done.returncode, done.stderr.count("Traceback")) == (code, 0), done.stderr
    assert sentence in done.stderr
    assert done.stderr.count("error: ") == (code != 0)
    machine.hub.faults.clear()
    assert machine.json("download", "roboset", DOOR)["content_digest"] == expected["roboset"]
    assert machine.leftovers() == []


def test_a_split_of_robomimic_and_the_whole_are_two_datasets(machine: Machine, expected: dict[str, str]) -> None:
    whole = machine.json("download", "robomimic", LIFT)
    assert (whole["content_digest"], whole["id"], whole["episodes"]) == (expected["robomimic"], LIFT, 6)
    assert whole["notes"] == machine.json("download", "robomimic", LIFT)["notes"]
    part = machine.json("download", "robomimic", LIFT, "--filter-key", "valid")
    assert (part["episodes"], part["path"] != whole["path"]) == (2, True)


def test_a_download_that_is_killed_continues_later(machine: Machine, expected: dict[str, str]) -> None:
    machine.hub.faults.append(Fault(FILE, "stall:20000", 99))
    process = machine.start("download", "robomimic", LIFT, RBTOOL_TIMEOUT=str(HANG))
    while not machine.hub.paths("/resolve/"):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=HANG)
    machine.hub.faults.clear()
    assert machine.json("download", "robomimic", LIFT)["content_digest"] == expected["robomimic"]
    assert machine.leftovers() == []


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["download", "roboset", "../up"], 2, "is not a dataset id"),
        (["download", "roboset", "DAPG(expert)"], 2, "may mean any of 2"),
        (["download", "roboset", "DAPG(expert)/door_v2d-v9"], 4, DOOR),
        (["download", "robomimic", "can/ph/low_dim"], 2, "can/ph/low_dim_v141, can/ph/low_dim_v15"),
        (["download", "robomimic", "lift/ph/image"], 4, "nearest"),
        (["download", "robomimic", LIFT, "--filter-key", "test"], 2, "there are train, valid"),
        (["download", "robomimic"], 2, "rbtool download robomimic lift/ph/low_dim"),
    ],
)
def test_bad_words(machine: Machine, words: list[str], code: int, sentence: str) -> None:
    done = machine.run(*words)
    assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr


def test_the_verbs_on_raw_files(machine: Machine, root: Path) -> None:
    raw = root / "robomimic/robomimic_datasets/v1.5/lift/ph/low_dim_v15.hdf5"
    assert machine.json("inspect", str(raw), "--filter-key", "train")["episodes"] == 4
    checked = machine.json("check", str(raw))
    assert (checked["errors"], checked["boundary"]["terminated"]) == (0, 6)
    assert machine.json("convert", str(raw), "out", "--ends", "truncated")["boundary"]["truncated"] == 6
    listed = machine.run("list", "--remote", "robomimic", "-q").stdout.split()
    assert listed == [f"robomimic:{name}" for name in ROBOMIMIC_IDS]
