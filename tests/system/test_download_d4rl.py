"""`rbtool download d4rl` with every kind of bad luck: the right exit code, and the next run completes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import Machine as AnyMachine
from static_server import SOUND, Fault, StaticServer
from table_files import flat, random_episodes, write_d4rl
from waiting import HANG

import rbtool

ID = "kitchen-complete-v0"  # a file without a known checksum
KNOWN = "hopper-medium-v2"
FILE = "kitchen/mini_kitchen_microwave_kettle_light_slider-v0.hdf5"
ETAG = {"ETag": '"one"'}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    columns = flat(random_episodes((280, 280, 50), width=60, ends=("timeout", "timeout", "none")), timeouts=False)
    return write_d4rl(tmp_path_factory.mktemp("file") / Path(FILE).name, columns)


@pytest.fixture(scope="module")
def expected(original: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return rbtool.convert(original, tmp_path_factory.mktemp("expected") / "out").content_digest or ""


class Machine(AnyMachine):
    """Runs `rbtool` with a store of its own and the server as its network."""

    def __init__(self, server: StaticServer, folder: Path) -> None:
        self.store = folder / "store"
        self.folder = folder
        clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        self.variables = {
            **clean, "RBTOOL_HOME": str(self.store), "D4RL_URL": server.address("base"), "RBTOOL_RETRIES": "3:0.01",
            "RBTOOL_TIMEOUT": str(HANG), "OMP_NUM_THREADS": "1", "D4RL_DATASET_DIR": str(folder / "cache"),
        }  # fmt: skip

    def patient(self, variables: dict[str, str]) -> dict[str, str]:
        return self.variables | variables


@pytest.fixture
def server(original: Path) -> Iterator[StaticServer]:
    with StaticServer({f"base/{FILE}": original.read_bytes()}) as running:
        running.faults[f"base/{FILE}"] = [Fault(headers=ETAG)]
        yield running


@pytest.fixture
def machine(server: StaticServer, tmp_path: Path) -> Machine:
    return Machine(server, tmp_path)


FAULTS = [
    pytest.param([Fault(status=404)], 4, "does not have", id="404"),
    pytest.param([Fault(status=401)], 5, "401", id="401"),
    pytest.param([Fault(status=403)], 5, "403", id="403"),
    pytest.param([Fault(status=429, headers={"Retry-After": "0"}), SOUND], 0, "", id="429 once"),
    pytest.param([Fault(status=429, headers={"Retry-After": "9000"})], 5, "9,000 s", id="429 with hours to wait"),
    pytest.param([Fault(status=503), SOUND], 0, "", id="503 once"),
    pytest.param([Fault(status=503)], 5, "503", id="503 for ever"),
    pytest.param([Fault(reset=True), SOUND], 0, "", id="reset once"),
    pytest.param([Fault(reset=True)], 5, "", id="reset for ever"),
    pytest.param([Fault(corrupt=0)], 1, "sends no D4RL file", id="no HDF5"),
    pytest.param([Fault(corrupt=41)], 1, "sends no D4RL file", id="a corrupt header"),
    pytest.param([SOUND, Fault(cut=5000), SOUND], 0, "", id="cut once"),
    pytest.param([SOUND, Fault(stall=5000), SOUND], 0, "", id="stalled once"),
    pytest.param([SOUND, Fault(no_range=True)], 0, "", id="no ranges"),
    pytest.param([SOUND, Fault(extra=b"more")], 1, "were announced", id="longer than announced"),
    pytest.param([SOUND, Fault(unannounced=True)], 0, "", id="no length the second time"),
]


@pytest.mark.parametrize(("faults", "code", "sentence"), FAULTS)
def test_a_fault_is_survived_or_named_and_the_next_run_completes(
    server: StaticServer, machine: Machine, expected: str, faults: list[Fault], code: int, sentence: str
) -> None:
    server.faults[f"base/{FILE}"] = list(faults)
    patience = {"RBTOOL_TIMEOUT": "2"} if any(fault.stall is not None for fault in faults) else {}
    done = machine.run("download", "d4rl", ID, **patience)
    assert (done.returncode, done.stderr.count("Traceback")) == (code, 0), done.stderr
    assert sentence in done.stderr
    assert done.stderr.count("error: ") == (code != 0)
    server.faults.clear()
    assert machine.json("download", "d4rl", ID)["content_digest"] == expected
    assert machine.leftovers() == []


@pytest.mark.parametrize("tenth", [1, 5, 9])
def test_a_body_that_is_cut_goes_on_where_it_ended(
    server: StaticServer, machine: Machine, original: Path, expected: str, tenth: int
) -> None:
    size = original.stat().st_size
    server.faults[f"base/{FILE}"] = [
        Fault(headers=ETAG),
        Fault(headers=ETAG, cut=size * tenth // 10),
        Fault(headers=ETAG),
    ]
    assert machine.json("download", "d4rl", ID)["content_digest"] == expected
    assert server.starts(f"base/{FILE}")[-1] is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_download_that_is_stopped_goes_on_later(
    server: StaticServer, machine: Machine, expected: str, number: signal.Signals
) -> None:
    server.faults[f"base/{FILE}"] = [Fault(headers=ETAG), Fault(headers=ETAG, stall=20_000), Fault(headers=ETAG)]
    process = machine.start("download", "d4rl", ID, RBTOOL_TIMEOUT=str(2 * HANG))
    assert server.stalled.wait(HANG)
    process.send_signal(number)
    _, err = process.communicate(timeout=HANG)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGKILL: -9}[number], err
    server.released.set()
    assert machine.json("download", "d4rl", ID)["content_digest"] == expected
    assert machine.leftovers() == []


def test_a_known_checksum_that_does_not_match(server: StaticServer, machine: Machine) -> None:
    server.files["base/gym_mujoco_v2/hopper_medium-v2.hdf5"] = b"\x89HDF\r\n\x1a\n" + bytes(1000)
    done = machine.run("download", "d4rl", KNOWN)
    assert done.returncode in (1, 5), done.stderr
    assert done.stderr.count("error: ") == 1
    assert not (machine.store / "d4rl" / KNOWN).exists()


def test_a_server_that_is_down_names_the_replacement(machine: Machine) -> None:
    done = machine.run("download", "d4rl", "door-human-v1", D4RL_URL="http://127.0.0.1:9/base")
    assert (done.returncode, "rbtool download minari door-human" in done.stderr) == (5, True), done.stderr


def test_the_cache_of_d4rl_and_a_truncated_file_in_it(machine: Machine, original: Path, expected: str) -> None:
    cached = machine.folder / "cache" / original.name
    cached.parent.mkdir()
    cached.write_bytes(original.read_bytes()[:9000])
    done = machine.run("download", "d4rl", ID, "--local")
    assert done.returncode == 1
    assert "9,000 bytes" in done.stderr
    assert f"hint: fetch it again: rbtool download d4rl {ID}" in done.stderr
    cached.write_bytes(original.read_bytes())
    assert machine.json("download", "d4rl", ID, "--local")["content_digest"] == expected


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["download", "d4rl", "../up-v0"], 2, "is not a dataset id"),
        (["download", "d4rl", "hopper-medium-v9"], 4, "hopper-medium-v2"),
        (["download", "d4rl", "hoper-medium"], 4, "nearest: hopper-medium"),
        (["download", "d4rl"], 2, "rbtool download d4rl hopper-medium-v2"),
        (["download", "d4rl", ID, "--revision", "main"], 2, "keeps no revisions"),
        (["download", "d4rl", "door-human-v1", "--local"], 4, "looked for door-human-v1.hdf5"),
    ],
)
def test_bad_words(machine: Machine, words: list[str], code: int, sentence: str) -> None:
    done = machine.run(*words)
    assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr


def test_the_verbs_on_a_raw_file(machine: Machine, original: Path) -> None:
    found = machine.json("inspect", str(original))
    assert (found["type"], found["episodes"], found["steps"]) == ("source", 3, 607)
    checked = machine.json("check", str(original))
    assert (checked["errors"], checked["boundary"]["truncated"]) == (0, 3)
    assert machine.json("convert", str(original), "out", "--horizon", "10")["episodes"] == 61
    listed = machine.run("list", "--remote", "d4rl", "kitchen", "-q").stdout.split()
    assert listed == [f"d4rl:kitchen-{name}-v0" for name in ("complete", "mixed", "partial")]
