"""Downloading what was there before, in part, in another state, or under a name that means something else now."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import h5py
from hub import Fault, Hub
from machine import ARROW, DATA, DOOR, MAIN, SMALL, Machine


def test_what_is_kept_beside_does_not_get_in(machine, tmp_path, hub):
    fresh = Machine(hub, tmp_path / "fresh")
    fresh.folder.mkdir()
    expected = fresh.json("download", "minari", "griddict/random-parquet-v0", "--episodes", "2")
    machine.json("download", "minari", "griddict/random-parquet-v0", "--episodes", "0:2", "--keep-source")
    document = machine.json("download", "minari", "griddict/random-parquet-v0", "--episodes", "2")
    assert document["content_digest"] == expected["content_digest"]


def test_an_episode_that_the_remote_drops_is_gone(hub_root, tmp_path):
    root = Path(shutil.copytree(hub_root, tmp_path / "hub"))
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        machine.json("download", "minari", ARROW, "--keep-source")
        folder = root / "farama-minari" / ARROW / "data"
        shutil.rmtree(folder / "2")
        metadata = json.loads((folder / "metadata.json").read_text())
        (folder / "metadata.json").write_text(json.dumps(metadata | {"total_episodes": 2, "total_steps": 1000}))
        server.rescan()
        assert machine.json("download", "minari", ARROW, "--force")["episodes"] == 2
        assert machine.run("cache", "verify").returncode == 0


def test_originals_that_were_cut_are_not_taken_for_kept(machine, hub):
    machine.json("download", "minari", SMALL)
    hub.faults.append(Fault(MAIN, "status:503", 99))
    assert machine.run("download", "minari", SMALL, "--keep-source").returncode == 5
    hub.faults.clear()
    document = machine.json("download", "minari", SMALL, "--keep-source")
    assert (Path(document["originals"]) / "data/main_data.hdf5").is_file()


def test_originals_of_some_episodes_are_not_those_of_all(machine):
    machine.json("download", "minari", ARROW, "--episodes", "0", "--keep-source")
    document = machine.json("download", "minari", ARROW, "--keep-source")
    assert len(list(Path(document["originals"]).rglob("part-0.arrow"))) == 3


def test_originals_of_another_state_are_not_kept(hub_root, tmp_path):
    root = Path(shutil.copytree(hub_root, tmp_path / "hub"))
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        machine.json("download", "minari", SMALL)
        with h5py.File(root / "farama-minari" / SMALL / "data/main_data.hdf5", "r+") as file:
            file["episode_0/rewards"][0] += 1
        server.rescan()
        done = machine.run("download", "minari", SMALL, "--keep-source")
        assert done.returncode == 4  # the hub has forgotten the commit that it was made from


def test_some_episodes_of_the_remote_and_of_the_cache_are_one(machine):
    shutil.copytree(DATA / ARROW, machine.folder / "minari" / ARROW)
    machine.json("download", "minari", ARROW, "--episodes", "1")
    assert machine.json("download", "minari", ARROW, "--episodes", "1", "--local")["already_there"]


def test_an_id_without_a_namespace_is_there_at_once(tmp_path):
    root = tmp_path / "hub"
    shutil.copytree(DATA / SMALL, root / "farama-minari" / "flat-v0")
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        machine.json("download", "minari", "flat-v0")
        assert machine.json("download", "minari", "flat-v0", RBTOOL_OFFLINE="1")["already_there"]


def test_a_name_is_not_guessed_while_part_of_the_remote_is_down(hub_root, tmp_path):
    root = Path(shutil.copytree(hub_root, tmp_path / "hub"))
    shutil.copytree(DATA / SMALL, root / "farama-minari/cartpole/door-human-extra-v0")
    index = root / "farama-minari/cartpole/namespace_metadata.json"
    index.write_text(json.dumps({"datasets": ["cartpole/door-human-extra-v0"]}))
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        server.faults.append(Fault("/D4RL/resolve", "status:503", 99))
        done = machine.run("download", "minari", "door-human-v1")
        assert (done.returncode, "cannot be matched with the names" in done.stderr) == (5, True), done.stderr
        server.faults.clear()
        assert machine.json("download", "minari", "door-human-v1")["id"] == DOOR


def test_what_was_the_latest_is_asked_for_anew_when_it_is_gone(hub_root, tmp_path):
    root = Path(shutil.copytree(hub_root, tmp_path / "hub"))
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        assert machine.json("download", "minari", "D4RL/door/human")["id"] == DOOR
        shutil.copytree(root / "farama-minari" / DOOR, root / "farama-minari/D4RL/door/human-v3")
        index = root / "farama-minari/D4RL/namespace_metadata.json"
        index.write_text(json.dumps({"datasets": [DOOR, "D4RL/door/human-v3"]}))
        server.rescan()
        assert machine.json("download", "minari", "D4RL/door/human")["id"] == DOOR
        assert machine.run("cache", "rm", f"minari:{DOOR}", "--yes").returncode == 0
        assert machine.json("download", "minari", "D4RL/door/human")["id"] == "D4RL/door/human-v3"


def test_a_substitution_is_said_even_quietly(machine):
    done = machine.run("download", "minari", "door-human-v1", "-q")
    assert re.search(rf"door-human-v1 not found; us(ing|ed) {DOOR} \(disable with --exact-id\)", done.stderr)


def test_a_wait_is_said(machine, hub):
    hub.faults.append(Fault(MAIN, "status:429", 1, headers={"Retry-After": "1"}))
    assert "trying again in 1 s" in machine.run("download", "minari", SMALL).stderr


def test_the_remote_is_listed_and_the_listing_kept(machine, hub):
    document = machine.json("list", "--remote", "minari")
    entries = {entry["name"]: entry for entry in document["datasets"]}
    assert len(entries) == 9
    door = entries[f"minari:{DOOR}"]
    assert (door["steps"], door["episodes"], door["stored"]) == (6704, 25, False)
    assert door["bytes"] == sum(path.stat().st_size for path in (DATA / DOOR / "data").iterdir())
    hub.forget()
    again = machine.json("list", "--remote", "minari", "door", RBTOOL_OFFLINE="1")
    assert ([entry["name"] for entry in again["datasets"]], again["cached"]) == ([f"minari:{DOOR}"], True)
    assert hub.requests == []
    assert not machine.json("list", "--remote", "minari", "--refresh")["cached"]
    assert not any(path.endswith("/data/metadata.json") for path in hub.paths("/resolve/"))  # nothing has changed


def test_one_broken_repository_does_not_stop_the_listing(machine, hub):
    hub.faults.append(Fault("/cartpole/", "status:500", 99))
    document = machine.json("list", "--remote", "minari")
    assert len(document["datasets"]) == 6
    assert any("cartpole" in problem for problem in document["problems"])
    hub.faults.clear()
    document = machine.json("list", "--remote", "minari")
    assert (len(document["datasets"]), document["problems"], document["cached"]) == (9, [], False)
