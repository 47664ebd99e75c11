"""`rbtool download` from a hub on loopback: real processes, real client."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
from hub import Hub
from machine import DATA, DOOR, SMALL, Machine

from rbtool.core.encodings.compact import compare_steps
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.format.packed.reader import PackedReader


def test_the_first_line_a_user_types(machine):
    done = machine.run("download", "minari", "door-human-v1")
    folder = machine.store / "minari" / DOOR
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert f"door-human-v1 not found; using {DOOR} (disable with --exact-id)" in done.stderr
    assert machine.leftovers() == []
    with TedReader(folder) as ours, h5py.File(DATA / DOOR / "data/main_data.hdf5") as theirs:
        request = ours.manifest.request
        assert (request.asked, request.id, request.origin) == ("minari:door-human-v1", DOOR, "remote")
        assert (ours.manifest.episodes, ours.manifest.steps) == (25, 6704)
        row = 0
        for number in range(25):
            episode = theirs[f"episode_{number}"]
            steps = len(episode["rewards"])
            rows = (row, row + steps)
            assert np.array_equal(ours.read(("observation",), *rows), episode["observations"][:-1])
            assert np.array_equal(ours.read(("next", "observation"), *rows), episode["observations"][1:])
            assert np.array_equal(ours.read(("action",), *rows), episode["actions"])
            assert np.array_equal(ours.read(("next", "reward"), *rows)[:, 0], episode["rewards"])
            row += steps
        assert row == ours.manifest.steps


def test_the_document_says_what_was_asked_and_what_it_means(machine):
    document = machine.json("download", "minari", "door-human-v1")
    assert (document["asked"], document["resolved"], document["id"]) == ("door-human-v1", "words", DOOR)
    assert document["request"]["asked"] == "minari:door-human-v1"
    assert document["fetched_from"].startswith("hf://farama-minari/D4RL@")
    assert document["fetch"]["files"] == 2


def test_what_is_there_is_answered_at_once_without_the_network(machine, hub):
    first = machine.json("download", "minari", "door-human-v1")
    hub.forget()
    for words in (["minari", "door-human-v1"], ["minari", DOOR], [f"minari:{DOOR}"]):
        again = machine.json("download", *words, RBTOOL_OFFLINE="1")
        assert (again["already_there"], again["content_digest"]) == (True, first["content_digest"])
    assert hub.requests == []


def test_the_local_cache_and_the_remote_make_one_and_the_same(machine, hub):
    shutil.copytree(DATA / SMALL, machine.folder / "minari" / SMALL)
    first = machine.json("download", "minari", SMALL)
    again = machine.json("download", "minari", SMALL, "--local")
    assert (again["already_there"], again["content_digest"]) == (True, first["content_digest"])
    with h5py.File(machine.folder / "minari" / SMALL / "data/main_data.hdf5", "r+") as file:
        file["episode_0/rewards"][0] += 1
    done = machine.run("download", "minari", SMALL, "--local")
    assert (done.returncode, "another state of the source" in done.stderr) == (2, True)


def test_a_packed_download_is_what_packing_makes_of_a_plain_one(machine, hub):
    document = machine.json("download", "minari", SMALL, "--layout", "packed", "--compress", "observation=zstd:3")
    plain = machine.json("download", "minari", SMALL)
    assert document["path"] != plain["path"]
    packed = machine.folder / "packed"
    machine.json("convert", plain["path"], str(packed), "--layout", "packed", "--compress", "observation=zstd:3")
    with PackedReader(Path(document["path"])) as found, PackedReader(packed) as expected:
        found.verify_files()
        assert compare_steps(expected, found) == []
        assert found.manifest.content_digest == expected.manifest.content_digest
    hub.forget()
    again = machine.json("download", "minari", SMALL, "--layout", "packed", "--compress", "observation=zstd:3")
    assert (again["already_there"], hub.requests) == (True, [])


def test_a_dataset_without_a_version_is_its_latest(machine):
    document = machine.json("download", "minari", "D4RL/door/human")
    assert (document["id"], document["resolved"]) == (DOOR, "latest")


def test_an_exact_id_is_taken_as_it_is(machine):
    done = machine.run("download", "minari", "door-human-v1", "--exact-id")
    assert (done.returncode, done.stdout) == (4, "")
    assert "D4RL/door/human-v2" in done.stderr


def test_a_namespaced_id_with_a_version_is_never_replaced(machine):
    done = machine.run("download", "minari", "D4RL/door/human-v1")
    assert (done.returncode, done.stdout) == (4, "")
    assert "nearest: D4RL/door/human-v2" in done.stderr


def test_several_candidates_are_listed(machine):
    done = machine.run("download", "minari", "cartpole")
    assert done.returncode == 2
    assert all(name in done.stderr for name in ("cartpole/scripted", "cartpole/single-episode"))


def test_a_dataset_without_a_namespace(hub_root, tmp_path, expected):
    root = tmp_path / "hub"
    shutil.copytree(DATA / SMALL, root / "farama-minari" / "flat-v0")
    with Hub(root) as server:
        document = Machine(server, tmp_path).json("download", "minari", "flat-v0")
    assert document["content_digest"] == expected(SMALL)


def test_episodes_of_an_arrow_dataset_fetch_only_their_files(machine):
    document = machine.json("download", "minari", "cartpole/scripted-arrow-v0", "--episodes", "1")
    assert document["episodes"] == 1
    assert machine.fetched().count("part-0.arrow") == 1
    assert "@" in Path(document["path"]).name


def test_episodes_are_chosen_by_their_numbers_where_those_have_gaps(hub_root, tmp_path):
    root = tmp_path / "hub"
    data = shutil.copytree(DATA / SMALL, root / "farama-minari" / "flat-v0") / "data"
    with h5py.File(data / "main_data.hdf5", "r+") as file:
        last = max(file, key=lambda name: int(name.removeprefix("episode_")))
        file.move(last, "episode_70")
        file["episode_70"].attrs["id"] = 70
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        planned = machine.json("download", "minari", "flat-v0", "--episodes", "70", "--dry-run")
        assert any("not their numbers" in note for note in planned["notes"])
        assert machine.json("download", "minari", "flat-v0", "--episodes", "70")["episodes"] == 1
        assert machine.json("download", "minari", "flat-v0", "--episodes", "50:")["episodes"] == 1
        refused = machine.run("download", "minari", "flat-v0", "--episodes", "60")
    assert (refused.returncode, "episode 60, which is not there" in refused.stderr) == (2, True)


def test_a_dry_run_fetches_and_writes_nothing(machine):
    document = machine.json("download", "minari", SMALL, "--dry-run")
    assert document["dry_run"]
    assert (document["fetch"]["files"], document["fetch"]["bytes_present"]) == (2, 0)
    assert document["fetch"]["bytes"] == sum(path.stat().st_size for path in (DATA / SMALL / "data").iterdir())
    assert "main_data.hdf5" not in machine.fetched()
    assert not machine.store.exists()


def test_the_originals_are_kept_where_asked(machine, hub):
    document = machine.json("download", "minari", SMALL, "--keep-source")
    kept = Path(document["originals"])
    assert (kept / "data/main_data.hdf5").read_bytes() == (DATA / SMALL / "data/main_data.hdf5").read_bytes()
    hub.forget()
    some = machine.json("download", "minari", SMALL, "--episodes", "0:2")
    assert (some["episodes"], [name for name in machine.fetched() if name.endswith("hdf5")]) == (2, [])
    assert kept.is_dir()


def test_originals_can_be_had_of_a_dataset_that_is_there(machine):
    machine.json("download", "minari", SMALL)
    document = machine.json("download", "minari", SMALL, "--keep-source")
    assert document["already_there"]
    assert (Path(document["originals"]) / "data/main_data.hdf5").is_file()


def test_a_frozen_dataset_is_compared_with_the_remote(hub_root, tmp_path):
    root = Path(shutil.copytree(hub_root, tmp_path / "hub"))
    with Hub(root) as server:
        machine = Machine(server, tmp_path)
        assert machine.run("download", "minari", SMALL, "--frozen").returncode == 4
        machine.json("download", "minari", SMALL)
        (root / "farama-minari/cartpole/README.md").write_text("a new word\n")
        server.rescan()
        assert machine.json("download", "minari", SMALL, "--frozen")["already_there"]
        with h5py.File(root / "farama-minari" / SMALL / "data/main_data.hdf5", "r+") as file:
            file["episode_0/rewards"][0] += 1
        server.rescan()
        done = machine.run("download", "minari", SMALL, "--frozen")
        assert (done.returncode, "has changed since" in done.stderr) == (3, True)
        assert machine.run("download", "minari", SMALL).returncode == 0


def test_a_revision_is_a_dataset_of_its_own(machine, hub):
    commit = hub.repositories["farama-minari/cartpole"].commit
    document = machine.json("download", "minari", SMALL, "--revision", commit)
    assert "@" in Path(document["path"]).name
    assert document["request"]["revision"] == commit
    done = machine.run("download", "minari", SMALL, "--revision", "nowhere")
    assert (done.returncode, "nowhere" in done.stderr) == (4, True)
