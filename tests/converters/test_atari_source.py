"""`AtariSource` on loopback: the fault table, the closed bucket, the local folder; and the documented class."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from conversions import FAULTS, MirrorSourceTests
from shard_files import random_rows, steps_of, write_run
from static_server import SOUND, Fault, StaticServer, mirror

import rbtool
from rbtool.core.errors import AuthorisationError, CorruptDataError, DatasetNotFoundError, RbtoolError, UsageError
from rbtool.core.open_steps import open_steps

ID = "Pong/1"
ROWS = random_rows((5, 3, 9, 1), tail=4)
FRAMES = "replay_logs/$store$_observation_ckpt.1.gz"


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("served") / "1", ROWS, (7,))


@pytest.fixture
def files(served: Path) -> dict[str, bytes]:
    return {path.relative_to(served).as_posix(): path.read_bytes() for path in served.rglob("*.gz")}


@pytest.fixture
def server(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StaticServer]:
    monkeypatch.setenv("ATARI_DATASET_DIR", str(tmp_path / "local"))
    served = {f"base/{ID}/{name}": content for name, content in files.items()}
    with mirror(StaticServer(served), "ATARI_URL", monkeypatch, tmp_path / "store") as running:
        yield running


class TestSource(MirrorSourceTests):
    name, id, count = "atari", ID, 300


def rows_at(path: Path) -> bytes:
    with open_steps(path) as reader:
        return reader.read(("observation",), 0, reader.manifest.steps).tobytes()


EXPECTED = b"".join(step["observation"].tobytes() for step in steps_of(ROWS))


def test_a_run_is_downloaded_joined_and_packed(server: StaticServer) -> None:
    result = rbtool.download("atari", ID)
    assert (result.id, result.layout, result.episodes, result.path.parts[-2:]) == (ID, "packed", 5, ("Pong", "1"))
    assert rows_at(result.path) == EXPECTED
    server.asked.clear()
    assert rbtool.download("atari", ID).already_there
    assert server.asked == []
    assert len(rbtool.load_dataset(f"atari:{ID}", 4)) == len(steps_of(ROWS))
    other = rbtool.download("atari", ID, layout="ted")
    assert other.path != result.path
    assert rbtool.diff(other.path, result.path).equal


@each(("asked", "meant"), [("Pong/6", "Pong/"), ("Pongg/1", "Pong/1"), ("Pong", "Pong/")])
def test_an_unknown_run_names_the_nearest(asked: str, meant: str, server: StaticServer) -> None:
    with pytest.raises(RbtoolError) as caught:
        rbtool.download("atari", asked)
    assert meant in f"{caught.value} {caught.value.hint}"


FAULTS_HERE = FAULTS | {"corrupt": ([SOUND, Fault(corrupt=400)], CorruptDataError)}


@pytest.mark.slow  # faults of a server and of a bucket are tried every day with OGBench and Gen-DGRL
@pytest.mark.parametrize("case", FAULTS_HERE)
def test_the_fault_table(case: str, server: StaticServer, tmp_path: Path) -> None:
    faults, kind = FAULTS_HERE[case]
    server.faults[f"base/{ID}/{FRAMES}"] = list(faults)
    if kind is not None:
        with pytest.raises(kind):
            rbtool.download("atari", ID)
        assert not (tmp_path / "store" / "atari" / ID).exists()
        server.faults.clear()
    assert rows_at(rbtool.download("atari", ID).path) == EXPECTED


def test_the_closed_bucket_is_stated_and_what_replaces_it_named(server: StaticServer) -> None:
    for name in server.files:
        server.faults[name] = [Fault(status=403)]
    with pytest.raises(AuthorisationError, match="403") as caught:
        rbtool.download("atari", ID)
    for part in ("closed since 2025", "RL Unplugged", "rbtool convert FOLDER DEST", "ATARI_DATASET_DIR", "ATARI_URL"):
        assert part in caught.value.hint


def test_a_checkpoint_that_lacks_a_file_and_one_that_is_missing(server: StaticServer) -> None:
    held = server.files.pop(f"base/{ID}/replay_logs/$store$_reward_ckpt.1.gz")
    with pytest.raises(DatasetNotFoundError, match=r"reward_ckpt\.1\.gz"):
        rbtool.download("atari", ID)
    server.files[f"base/{ID}/replay_logs/$store$_reward_ckpt.1.gz"] = held
    for name in [name for name in server.files if "ckpt.1" in name]:
        server.files[name.replace("ckpt.1", "ckpt.3")] = server.files.pop(name)
    assert rbtool.download("atari", ID).steps  # their rows follow one another, whatever the numbers


def test_the_local_folder_serves_without_the_network(
    served: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RBTOOL_HOME", str(tmp_path / "store"))
    monkeypatch.setenv("RBTOOL_OFFLINE", "1")
    monkeypatch.setenv("ATARI_DATASET_DIR", str(tmp_path / "local"))
    with pytest.raises(DatasetNotFoundError, match="looked in"):
        rbtool.download("atari", ID, local=True)
    shutil.copytree(served, tmp_path / "local" / ID)
    assert rows_at(rbtool.download("atari", ID, local=True).path) == EXPECTED
    buffer = rbtool.AtariDQNExperienceReplay("Pong/1", 4, root=tmp_path / "mine")
    assert buffer[:]["observation"].numpy().tobytes() == EXPECTED
    (tmp_path / "local" / "Pong" / "1").rename(tmp_path / "elsewhere")
    assert len(rbtool.AtariDQNExperienceReplay("Pong/1", 4, root=tmp_path / "mine")) == len(buffer)
    with pytest.raises(RbtoolError, match="needs the network"):
        rbtool.AtariDQNExperienceReplay("Pong/2", 4, root=tmp_path / "mine")


def test_the_documented_class(server: StaticServer) -> None:
    data = rbtool.AtariDQNExperienceReplay(ID, 6, num_procs=2, mp_start_method="spawn")
    steps = steps_of(ROWS)
    batch = data.sample()
    assert (batch["observation"].dtype, batch["observation"].shape) == (torch.uint8, (6, 6, 5))
    assert (batch["next", "reward"].shape, batch["next", "done"].shape) == ((6, 1), (6, 1))
    assert data[:]["next", "observation"].numpy().tobytes() == b"".join(s["next.observation"].tobytes() for s in steps)
    assert data.episodes.tolist() == [step["episode"] for step in steps]
    assert rbtool.AtariDQNExperienceReplay.available_datasets[0] == "AirRaid/1"
    assert data.metadata["total_steps"] == len(steps)
    with pytest.raises(RuntimeError):
        data.extend(batch)
    with pytest.raises(UsageError, match="sampler is set"):
        rbtool.AtariDQNExperienceReplay(ID, 6, slice_len=2, sampler=rbtool.RandomSampler())


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_slices_never_cross_a_terminal(replacement: bool, strict: bool, server: StaticServer) -> None:
    data = rbtool.AtariDQNExperienceReplay(ID, 9, slice_len=3, strict_len=strict, replacement=replacement)
    pairs = 0
    for _ in range(20):
        batch = data.sample()
        frames, following = batch["observation"].numpy(), batch["next", "observation"].numpy()
        inside = np.flatnonzero(~batch["next", "done"].numpy().reshape(-1)[:-1])
        same = batch["episode"].numpy()[inside] == batch["episode"].numpy()[inside + 1]
        at = inside[same]
        index = np.asarray(batch["index"]).reshape(-1)
        at = at[index[at + 1] == index[at] + 1]
        pairs += len(at)
        assert (following[at] == frames[at + 1]).all()
        assert len(batch) == 9 or not (strict and replacement)
    assert pairs


def stacks_of(steps: list[dict[str, Any]]) -> tuple[bytes, bytes]:
    """The frames of each step and the three before it in its episode, and those of its next frame."""
    found: tuple[list[bytes], list[bytes]] = ([], [])
    blanks, past, before = [np.zeros_like(steps[0]["observation"])] * 4, [], -1
    for step in steps:
        past = past if step["episode"] == before else blanks
        past, before = [*past[1:], step["observation"]], step["episode"]
        found[0].append(np.stack(past).tobytes())
        found[1].append(np.stack([*past[1:], step["next.observation"]]).tobytes())
    return b"".join(found[0]), b"".join(found[1])


def test_frames_are_stacked_within_episodes(server: StaticServer) -> None:
    data = rbtool.AtariDQNExperienceReplay(
        ID, 8, frame_stack=4, transform=lambda batch: batch.set("seen", batch["action"])
    )
    everything = data[:]
    assert everything["observation"].shape == (len(data), 4, 6, 5)
    found = [everything[key].numpy().tobytes() for key in ("observation", ("next", "observation"))]
    assert found == [*stacks_of(steps_of(ROWS))]
    batch = data.sample()
    for key in ("observation", ("next", "observation")):
        assert torch.equal(batch[key], everything[key][batch["index"]])
    assert torch.equal(batch["seen"], batch["action"])


def test_stacks_never_cross_a_cut(tmp_path: Path) -> None:
    logs = write_run(tmp_path / "1", ROWS, (7, 14)) / "replay_logs"
    for path in logs.glob("*_ckpt.1.gz"):
        path.unlink()
    write_run(tmp_path / "2", ROWS, (7, 14), first=1000)
    shutil.copy(tmp_path / "2" / "replay_logs" / "add_count_ckpt.2.gz", logs)
    rbtool.convert(tmp_path / "1", tmp_path / "out", skip_bad=True)
    data = rbtool.load_dataset(tmp_path / "out", transform=rbtool.StoredFrameStack(4, "observation"))
    with open_steps(tmp_path / "out") as reader:
        names = ("observation", "next.observation", "episode")
        columns = [reader.read(tuple(name.split(".")), 0, len(data)) for name in names]
    steps = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
    found = [data[:][key].numpy().tobytes() for key in ("observation", ("next", "observation"))]
    assert found == [*stacks_of(steps)]
    cuts = [at for at, step in enumerate(steps[1:], 1) if step["episode"] != steps[at - 1]["episode"]]
    assert 6 in cuts  # in the middle of two games: the checkpoint between them is missing
    assert not data[torch.tensor(cuts)]["observation"][:, :3].any()
