"""A test for each report of wrong rows in V-D4RL's and OGBench's data, or in what others made of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from shard_files import plain_vd4rl, random_vd4rl, rows_of_shards, write_vd4rl, write_vd4rl_shards
from static_server import Fault, StaticServer
from table_files import random_ogbench, write_ogbench

import rbtool
from rbtool.core.errors import FormatError, NetworkError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.ted.episodes import EndReason, Final

DATA = Path(__file__).parents[1] / "data"


def rows(path: Path, name: str) -> np.ndarray:
    with TedReader(path) as reader:
        return reader.read(tuple(name.split(".")), 0, reader.manifest.steps)


def test_drqv2_8_the_dummy_first_transition_is_no_step(tmp_path: Path) -> None:
    episodes = random_vd4rl((5, 3), channel_first=True)
    files = rbtool.convert(write_vd4rl(tmp_path / "files", episodes), tmp_path / "one")
    shards = rbtool.convert(write_vd4rl_shards(tmp_path / "shards", rows_of_shards(episodes)), tmp_path / "two")
    for result in (files, shards):
        assert result.steps == 8
        assert rows(result.path, "action").tobytes() == b"".join(
            row["action"].tobytes() for row in plain_vd4rl(episodes)
        )
        assert (rows(result.path, "action") != 0).all()


def test_v_d4rl_13_files_with_a_row_more_of_the_flags(tmp_path: Path) -> None:
    episodes = random_vd4rl((5, 4), terminal=(False, True))
    flags = ("is_first", "is_last", "is_terminal")
    cut = {name: values if name in flags else values[:-1] for name, values in episodes[1].items()}
    result = rbtool.convert(write_vd4rl(tmp_path / "last", [episodes[0], cut]), tmp_path / "out")
    assert (result.steps, result.boundary["end_of_file"]) == (8, 1)
    assert "the last row of 1 file is missing: only the flags have it" in result.notes
    assert rows(result.path, "next.pixels")[-1].tobytes() == episodes[1]["image"][-2].tobytes()
    with TedReader(result.path) as reader:
        assert reader.episodes.final.tolist() == [Final.OBSERVED] * 2
    first = {name: values if name in flags else values[1:] for name, values in episodes[1].items()}
    with pytest.raises(FormatError, match="it is not known which row is missing"):
        rbtool.convert(write_vd4rl(tmp_path / "first", [episodes[0], first]), tmp_path / "no")
    assert rbtool.convert(tmp_path / "first", tmp_path / "sound", skip_bad=True).steps == 5


def test_v_d4rl_the_last_next_frame_is_the_last_row_and_not_zero_or_another_episode(tmp_path: Path) -> None:
    episodes = random_vd4rl((5, 3, 4))
    result = rbtool.convert(write_vd4rl(tmp_path / "in", episodes), tmp_path / "out")
    ends = np.cumsum([5, 3, 4]) - 1
    for end, arrays in zip(ends, episodes, strict=True):
        assert rows(result.path, "next.pixels")[end].tobytes() == arrays["image"][-1].tobytes()


def test_ogbench_34_no_reward_is_made_up_for_states(tmp_path: Path) -> None:
    """Rewards of r(s) and of r(s') differ by a step; the file has neither, and nothing is written for them."""
    file = DATA / "ogbench" / "hoppermaze-medium-navigate-v0.npz"
    result = rbtool.convert(file, tmp_path / "out")
    with TedReader(result.path) as reader:
        assert ("next", "reward") not in {field.key for field in reader.fields}


def test_ogbench_the_last_row_is_the_next_observation_and_no_step(tmp_path: Path) -> None:
    columns = random_ogbench((4, 6))
    result = rbtool.convert(write_ogbench(tmp_path / "a-v0.npz", columns), tmp_path / "out")
    assert result.steps == 10
    for step, row in ((3, 4), (9, 11)):
        assert rows(result.path, "next.observation")[step].tobytes() == columns["observations"][row].tobytes()
    assert not (rows(result.path, "action")[:, None] == columns["actions"][[4, 11]]).all(-1).any()
    with TedReader(result.path) as reader:
        assert reader.episodes.end_reason.tolist() == [EndReason.TRUNCATED] * 2


def test_meerkat_311_an_interrupted_download_is_not_taken_for_a_finished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "scene-play-v0"
    for variable, value in (("NO_PROXY", "*"), ("no_proxy", "*"), ("RBTOOL_RETRIES", "1:0.001")):
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "store"))
    content = write_ogbench(tmp_path / "a.npz", random_ogbench((300,))).read_bytes()
    with StaticServer({f"{name}.npz": content, f"{name}-val.npz": content}) as server:
        monkeypatch.setenv("OGBENCH_URL", server.address(""))
        versions = Fault(headers={"ETag": '"one"'})
        broken = Fault(headers={"ETag": '"one"'}, cut=5_000)
        server.faults = {f"{name}.npz": [versions], f"{name}-val.npz": [versions, broken, Fault(status=503)]}
        with pytest.raises(NetworkError):
            rbtool.download("ogbench", name)
        assert not (tmp_path / "store" / "ogbench" / name).exists()
        server.faults[f"{name}-val.npz"] = [versions]
        assert rbtool.download("ogbench", name).steps == 600
        assert any((start or 0) >= 5_000 for start in server.starts(f"{name}-val.npz"))


SCRIPT = """
import sys
for name in ("ogbench", "mujoco", "dm_control", "gym", "tensorflow"):
    sys.modules[name] = None
import rbtool
for folder in sys.argv[2:]:
    rbtool.convert(folder, sys.argv[1], force=True)
assert "torch" not in sys.modules
"""


def test_d4rl_156_no_simulator_is_needed_to_read_arrays(tmp_path: Path) -> None:
    folders = [DATA / "ogbench", DATA / "vd4rl" / "64px", DATA / "vd4rl" / "84px"]
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "out", *folders], check=True)


def test_rl_3067_local_files_are_taken_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    for number, folder in enumerate((DATA / "ogbench", DATA / "vd4rl" / "64px", DATA / "vd4rl" / "84px")):
        assert rbtool.convert(folder, tmp_path / str(number)).steps
