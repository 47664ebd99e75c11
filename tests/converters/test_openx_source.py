"""Open X-Embodiment from a hub on loopback: ids, downloads with faults, and the local folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commands import ask, ask_one, failed
from hub import Hub, fault_table
from machine import Machine
from shard_files import assert_equal_rows, random_openx, write_openx
from streaming import in_process

REPOSITORY = Path("jxu124") / "OpenX-Embodiment"
EPISODES = random_openx((5, 3, 4), side=16)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    root = tmp_path / "hub"
    write_openx(root / REPOSITORY / "toy", [EPISODES[:2], EPISODES[2:]])
    write_openx(root / REPOSITORY / "toy_two", [random_openx((2,))])
    (root / REPOSITORY / "OpenX-Embodiment.py").write_text("raise SystemExit('the loader script was run')")
    (root / REPOSITORY / "README.md").write_text("hello")
    with Hub(root, lfs_threshold=1000, page_size=4) as served:
        yield served


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path)


def test_ids_are_folders_and_files_their_shards(machine: Machine) -> None:
    ids, found = ask(machine.variables, "source:openx", ["ids"], ["describe", "toy"])
    assert ids["ids"] == ["toy", "toy_two"]
    assert [file["path"] for file in found["files"]] == ["toy_00000.tar", "toy_00001.tar"]
    assert (
        "has no dataset"
        in failed(ask_one(machine.variables, "source:openx", "describe", "to"), "DatasetNotFoundError").message
    )


def test_a_dataset_is_downloaded_converted_and_found_by_its_name(machine: Machine) -> None:
    words = ("download", "openx", "toy", "--trust-pickle", "--rlds-last", "step", "--final-step", "repeat")
    document = machine.json(*words)
    assert (document["id"], document["episodes"], document["steps"], document["layout"]) == ("toy", 3, 12, "packed")
    assert not any("unverified" in note for note in document["notes"])
    assert_equal_rows(Path(document["path"]), EPISODES, "step")
    machine.hub.forget()
    assert machine.json(*words)["already_there"]
    assert machine.hub.paths("") == []
    assert machine.leftovers() == []


def test_the_plain_name_opens_what_was_downloaded(machine: Machine) -> None:
    machine.json("download", "openx", "toy", "--trust-pickle")
    assert machine.json("inspect", "openx:toy")["episodes"] == 3
    assert not [path for path in machine.hub.paths("") if path.endswith(".py")]


def test_nothing_is_fetched_without_trust(machine: Machine) -> None:
    done = machine.run("download", "openx", "toy")
    assert done.returncode == 2
    assert "--trust-pickle" in done.stderr
    assert machine.hub.paths("/resolve/") == []


def test_the_remote_list_names_datasets_with_their_sizes(machine: Machine) -> None:
    found = machine.json("list", "--remote", "openx")
    assert [entry["name"] for entry in found["datasets"]] == ["openx:toy", "openx:toy_two"]
    assert all(entry["bytes"] > 0 for entry in found["datasets"])


ONE = r"GET .*/resolve/.*toy_00001.*"
FAULTS = fault_table(ONE)


@pytest.mark.slow  # faults of a server and of a bucket are tried every day with OGBench and Gen-DGRL
@pytest.mark.parametrize("case", FAULTS)
def test_the_fault_table(case: str, machine: Machine) -> None:
    fault, code, sentence = FAULTS[case]
    machine.hub.faults.append(replace(fault))
    done = machine.run("download", "openx", "toy", "--trust-pickle")
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert (machine.store / "openx" / "toy" / ".rbtool").exists() == (code == 0)
    assert "internal error" not in done.stderr


def test_a_shard_that_the_hub_lacks_is_named_and_skip_bad_goes_on(hub: Hub, tmp_path: Path) -> None:
    folder = hub.root / REPOSITORY / "toy"
    shutil.move(folder / "toy_00000.tar", folder / "toy_00002.tar")
    with Hub(hub.root, lfs_threshold=1000) as served:
        machine = Machine(served, tmp_path)
        done = machine.run("download", "openx", "toy", "--trust-pickle")
        assert done.returncode == 1
        assert "a shard is missing: toy_00000.tar" in done.stderr
        assert "--skip-bad" in done.stderr
        assert machine.json("download", "openx", "toy", "--trust-pickle", "--skip-bad")["episodes"] == 3


def test_a_local_folder_of_shards(machine: Machine) -> None:
    folder = machine.hub.root / REPOSITORY
    found = machine.json("download", "openx", "toy", "--local", "--trust-pickle", OPENX_DATASET_DIR=str(folder))
    assert (found["id"], found["episodes"]) == ("toy", 3)
    assert machine.hub.paths("") == []


def test_a_stream_reads_a_shard_at_a_time(machine: Machine) -> None:
    asked = {"dataset": "openx:toy", "trust_pickle": True, "rlds_last": "step", "batch_size": 4, "limit": None}
    options = {"trust_pickle": True, "rlds_last": "step"}
    local = {"dataset": "openx:toy", "batch_size": 4, "download": options}
    whole, rest, stored = in_process(machine.variables, asked, asked | {"skip": 1}, local)
    assert stored | {"steps": None} == whole | {"steps": None}
    document = machine.json("download", "openx", "toy", "--trust-pickle", "--rlds-last", "step")
    assert (sum(map(len, whole["steps"])), whole["episodes"]) == (document["steps"], 3)
    assert whole["shards"] > 2
    assert rest["steps"] == whole["steps"][1:]
    untrusted, texts = in_process(machine.variables, {"dataset": "openx:toy_two"}, asked | {"texts": True})
    assert untrusted["error"] == texts["error"] == "UsageError"
    assert "texts of its episodes in its shards" in texts["message"]
