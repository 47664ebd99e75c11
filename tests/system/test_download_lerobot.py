"""`rbtool download lerobot OWNER/NAME`: any repository of the hub, its tags, and faults of the network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import Fault, Hub
from machine import Machine
from streaming import in_process

import rbtool

DATA = Path(__file__).parents[1] / "data" / "lerobot"
OLD, NEW = "lerobot/toy_old", "someone/toy.new"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    for name, source in ((OLD, "v21"), (NEW, "v30")):
        shutil.copytree(DATA / source, folder / name)
        (folder / name / "README.md").write_text("apache-2.0")
    (folder / "someone/other").mkdir()
    (folder / "someone/other/data.csv").write_text("a\n1\n")
    return folder


@pytest.fixture
def machine(root: Path, tmp_path: Path) -> Iterator[Machine]:
    with Hub(root) as hub:
        for name in (OLD, NEW):
            hub.repositories[name].refs.add("v9.9" if name == OLD else "v3.0")
        yield Machine(hub, tmp_path)


@pytest.mark.parametrize(("name", "source"), [(OLD, "v21"), (NEW, "v30")])
def test_any_repository_is_downloaded_whole(name: str, source: str, machine: Machine, tmp_path: Path) -> None:
    found = machine.json("download", "lerobot", name)
    assert found["content_digest"] == rbtool.convert(DATA / source, tmp_path / "expected").content_digest
    assert (found["id"], found["steps"], found["episodes"]) == (name, 42, 4)
    assert machine.json("download", "lerobot", name)["already_there"]
    assert machine.leftovers() == []


def test_revisions_are_tags_too(machine: Machine) -> None:
    assert machine.json("download", "lerobot", NEW, "--revision", "v3.0")["episodes"] == 4
    done = machine.run("download", "lerobot", NEW, "--revision", "v2.1")
    assert (done.returncode, "no such revision" in done.stderr) == (4, True)


def test_words_find_a_repository_of_lerobot(machine: Machine) -> None:
    assert machine.json("download", "lerobot", "toy_old")["id"] == OLD
    listed = machine.json("list", "--remote", "lerobot")
    assert [one["name"] for one in listed["datasets"]] == [f"lerobot:{OLD}"]


def test_only_the_files_of_chosen_episodes_are_fetched(machine: Machine) -> None:
    found = machine.json("download", "lerobot", OLD, "--episodes", "1,3")
    assert found["episodes"] == 2
    fetched = [path for path in machine.hub.paths("/resolve/") if "episode_" in path]
    assert fetched
    assert not [path for path in fetched if "episode_000000" in path or "episode_000002" in path]


@pytest.mark.parametrize(("name", "source"), [(OLD, "v21"), (NEW, "v30")])
def test_videos_are_not_fetched_where_images_are_left_out(
    name: str, source: str, machine: Machine, tmp_path: Path
) -> None:
    found = machine.json("download", "lerobot", name, "--images", "skip")
    expected = rbtool.convert(DATA / source, tmp_path / "expected", images="skip")
    assert (found["content_digest"], found["notes"]) == (expected.content_digest, list(expected.notes))
    assert not [path for path in machine.hub.paths("/resolve/") if ".mp4" in path]


@pytest.mark.parametrize(("name", "shards"), [(OLD, 4), (NEW, 1)])
def test_a_stream_has_the_steps_of_the_download(name: str, shards: int, machine: Machine) -> None:
    asked = {"dataset": f"lerobot:{name}", "batch_size": 8, "window": 2}
    seconds = asked | {"windows": {"action": "-0.2s:0.3s"}}
    whole, rest, stored, near, near_stored = in_process(
        machine.variables, asked, asked | {"skip": 2}, asked | {"download": {}}, seconds, seconds | {"download": {}}
    )
    assert near_stored | {"steps": None} == near | {"steps": None}
    assert near["digest"] != whole["digest"]
    assert rest["steps"] == whole["steps"][2:]
    assert stored | {"steps": None} == whole | {"steps": None}
    assert (whole["shards"], whole["episodes"]) == (shards, 4)
    assert sum(map(len, whole["steps"])) == machine.json("download", "lerobot", name)["steps"]


@pytest.mark.parametrize("name", [OLD, NEW])
def test_a_stream_fetches_each_file_once(name: str, machine: Machine) -> None:
    in_process(machine.variables, {"dataset": f"lerobot:{name}", "batch_size": 8})
    fetched = machine.hub.paths(r"/resolve/.*meta/")
    assert fetched
    assert len(set(fetched)) == len(fetched)


@pytest.mark.parametrize(("name", "said"), [
    ("someone/other", "is not a dataset of LeRobot"), ("someone/nothing", "someone/nothing"),
])  # fmt: skip
def test_what_is_no_dataset_is_not_found(name: str, said: str, machine: Machine) -> None:
    done = machine.run("download", "lerobot", name)
    assert (done.returncode, done.stderr.count("error: "), said in done.stderr) == (4, 1, True), done.stderr


@pytest.mark.parametrize(("fault", "code"), [
    (Fault(r"GET .*/resolve/.*\.mp4", "cut:900", 1), 0), (Fault(r"GET .*/resolve/.*\.mp4", "corrupt", 1), 0),
    (Fault("GET", "status:401", 99), 5), (Fault(r"GET .*/resolve/", "status:429", 1, headers={"Retry-After": "0"}), 0),
])  # fmt: skip
def test_faults_are_survived_or_named_and_the_next_run_completes(fault: Fault, code: int, machine: Machine) -> None:
    machine.hub.faults.append(fault)
    done = machine.run("download", "lerobot", NEW)
    assert (done.returncode, done.stderr.count("Traceback")) == (code, 0), done.stderr
    machine.hub.faults.clear()
    assert machine.json("download", "lerobot", NEW)["episodes"] == 4
    assert machine.leftovers() == []
