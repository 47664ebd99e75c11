"""V-D4RL from a hub on loopback: exact ids, the fault table of downloads, and the documented class."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import ask, ask_one, failed
from hub import ALWAYS, Fault, Hub, fault_table
from machine import Machine
from shard_files import plain_vd4rl, random_vd4rl, rows_of_shards, write_vd4rl, write_vd4rl_shards

from rbtool.core.format.memmap.reader import TedReader

REPOSITORY = Path("conglu") / "vd4rl" / "vd4rl"
FILES, SHARDS = "main/walker_walk/random/64px", "main/walker_walk/random/84px"
TRAP = "distracting/main/walker_walk/random/64px"  # its path contains another id
EPISODES = random_vd4rl((5, 3, 4), terminal=(False, True, False))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    root = tmp_path / "hub"
    write_vd4rl(root / REPOSITORY / FILES, EPISODES)
    write_vd4rl(root / REPOSITORY / TRAP, random_vd4rl((2,), seed=9))
    write_vd4rl_shards(root / REPOSITORY / SHARDS, rows_of_shards(random_vd4rl((9, 9), channel_first=True)), (4, 14))
    (root / "conglu" / "vd4rl" / "README.md").write_text("hello")
    with Hub(root, lfs_threshold=1000, page_size=4) as served:
        yield served


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Machine:
    return Machine(hub, tmp_path)


def test_ids_are_the_paths_of_folders(hub: Hub, machine: Machine) -> None:
    ids, found = ask(machine.variables, "source:vd4rl", ["ids"], ["describe", FILES])
    assert ids["ids"] == sorted((FILES, SHARDS, TRAP))
    assert [file["path"] for file in found["files"]] == sorted(
        path.name for path in (hub.root / REPOSITORY / FILES).iterdir()
    )
    part = ask_one(machine.variables, "source:vd4rl", "describe", "main/walker_walk/random/64")
    assert "has no dataset" in failed(part, "DatasetNotFoundError").message


def test_a_folder_is_downloaded_converted_and_named_by_its_id(machine: Machine) -> None:
    document = machine.json("download", "vd4rl", FILES)
    assert (document["id"], document["episodes"], document["steps"]) == (FILES, 3, 12)
    assert not any("calls itself" in note or "unverified" in note for note in document["notes"])
    with TedReader(machine.store / "vd4rl" / FILES) as reader:
        found = reader.read(("next", "pixels"), 0, 12)
    assert found.tobytes() == b"".join(row["next.pixels"].tobytes() for row in plain_vd4rl(EPISODES))
    machine.hub.forget()
    assert machine.json("download", "vd4rl", FILES)["already_there"]
    assert machine.hub.paths("") == []
    assert machine.json("download", "vd4rl", SHARDS)["steps"] == 18
    assert machine.leftovers() == []


def test_an_unknown_folder_names_the_nearest(machine: Machine) -> None:
    done = machine.run("download", "vd4rl", "main/walker_walk/randm/64px")
    assert done.returncode == 4
    assert FILES in done.stderr
    assert machine.run("download", "vd4rl", "../main").returncode == 2


ONE = r"GET .*/resolve/.*T000001.*"
FAULTS = fault_table(ONE) | {
    "busy once": (Fault(ONE, "status:503"), 0, ""),
    "cut again and again": (Fault(ONE, "cut:500", ALWAYS), 0, "resuming at byte 1,000"),
    "always cut at once": (Fault(ONE, "cut:0", ALWAYS), 5, ""),
}


@pytest.mark.slow  # faults of a server and of a bucket are tried every day with OGBench and Gen-DGRL
@pytest.mark.parametrize("case", FAULTS)
def test_the_fault_table(case: str, machine: Machine) -> None:
    fault, code, sentence = FAULTS[case]
    machine.hub.faults.append(replace(fault))
    done = machine.run("download", "vd4rl", FILES)
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert (machine.store / "vd4rl" / FILES / ".rbtool").exists() == (code == 0)
    assert "internal error" not in done.stderr


def test_the_sound_files_of_a_folder_are_taken_with_skip_bad(tmp_path: Path) -> None:
    episodes = random_vd4rl((5, 3, 4))
    episodes[1].pop("image")
    write_vd4rl(tmp_path / "hub" / REPOSITORY / FILES, episodes)
    with Hub(tmp_path / "hub", lfs_threshold=1000, page_size=4) as hub:
        machine = Machine(hub, tmp_path)
        done = machine.run("download", "vd4rl", FILES)
        assert done.returncode == 1
        assert "add --skip-bad to convert the episodes that are sound" in done.stderr
        for there in (False, True):
            found = machine.json("download", "vd4rl", FILES, "--skip-bad")
            assert (found["episodes"], found["steps"], found["already_there"]) == (2, 9, there)
            assert found["request"]["options"] == {"skip_bad": True}
            assert any(note.startswith("episode 1 is left out: ") for note in found["notes"])
        assert "@" in found["path"]
        assert machine.run("download", "vd4rl", FILES).returncode == 1


SCRIPT = """
import json, torch
from rbtool import VD4RLExperienceReplay, load_dataset
from rbtool.core.errors import RbtoolError
data = VD4RLExperienceReplay(ID, 4)
batch, raw = data.sample(), VD4RLExperienceReplay(ID, 4, totensor=False)[:]
small = VD4RLExperienceReplay(ID, 4, image_size=3, num_workers=2, transform=lambda batch: batch).sample()
split = VD4RLExperienceReplay(ID, 2, split_trajs=True, totensor=False, download=False)[:]
refused = []
for arguments in ({"image_size": 3, "totensor": False}, {"camera": 1}, {"download": "again"}):
    try:
        VD4RLExperienceReplay(ID, 4, **arguments)
    except ValueError as error:
        refused.append(str(error))
print(json.dumps({
    "len": len(data), "pixels": [str(batch["pixels"].dtype), *batch["pixels"].shape, float(batch["pixels"].max()) <= 1],
    "next": list(batch["next", "pixels"].shape), "raw": raw["pixels"].numpy().tobytes().hex(),
    "small": [list(small["pixels"].shape), list(small["next", "pixels"].shape)], "mask": int(split["mask"].sum()),
    "keys": sorted(k if isinstance(k, str) else ".".join(k) for k in raw.keys(True, True)),
    "init": raw["is_init"][:, 0].tolist(), "done": raw["next", "done"][:, 0].tolist(), "refused": refused,
    "stored": len(load_dataset("vd4rl:" + ID)), "ids": VD4RLExperienceReplay.available_datasets,
}))
"""


def test_the_documented_class(machine: Machine) -> None:
    found, rows = json.loads(machine.python(f"ID = {FILES!r}\n{SCRIPT}")), plain_vd4rl(EPISODES)
    assert (found["len"], found["stored"], found["mask"]) == (12, 12, 12)
    assert found["pixels"] == ["torch.float32", 4, 3, 6, 5, True]
    assert found["next"] == [4, 3, 6, 5]
    assert found["small"] == [[4, 3, 3, 3]] * 2
    assert bytes.fromhex(found["raw"]) == b"".join(row["pixels"].tobytes() for row in rows)
    assert found["init"] == [row["is_init"] for row in rows]
    assert found["done"] == [row["last"] for row in rows]
    assert found["keys"] == [
        "action", "episode", "is_init", "next.discount", "next.done", "next.pixels", "next.reward",
        "next.state.height", "next.state.orientations", "next.terminated", "next.truncated", "pixels", "state.height",
        "state.orientations",
    ]  # fmt: skip
    assert ["needs totensor=True" in found["refused"][0], "environment" in found["refused"][1]] == [True, True]
    assert found["ids"] == sorted((FILES, SHARDS, TRAP))


def test_a_copy_of_the_folder_gives_the_same_rows(machine: Machine, tmp_path: Path) -> None:
    machine.json("download", "vd4rl", FILES)
    shutil.copytree(machine.hub.root / REPOSITORY / FILES, tmp_path / "copy")
    document = machine.json("convert", str(tmp_path / "copy"), str(tmp_path / "same"))
    first = machine.json("inspect", f"vd4rl:{FILES}")
    assert document["content_digest"] == first["content_digest"]
    assert np.isclose(first["returns"]["mean"] * 3, sum(float(row["next.reward"]) for row in plain_vd4rl(EPISODES)))
