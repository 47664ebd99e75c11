"""Streams of datasets on a hub that keep videos: the files of a shard are fetched whole, into the bounded cache."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import streaming
from hub import ALWAYS, Fault, Hub
from lerobot_files import random_takes, write_dataset
from streaming import batches_of, in_process

import rbtool

LENGTHS = (6, 1, 4, 9, 5, 7, 3, 8, 2, 6)
KEPT: dict[str, Any] = {"dataset": "hf://org/kept"}


@pytest.fixture(scope="module", params=["v2.1-ted", "v3.0-packed"])
def datasets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one repository, `org/kept`: with a video of each episode, and with several in one."""
    version, layout = request.param.split("-")
    root = tmp_path_factory.mktemp("hub")
    source = write_dataset(root.parent / f"{root.name}-source", random_takes(LENGTHS), version=version)
    rbtool.convert(source, root / "org" / "kept", layout=layout)
    return root


@pytest.fixture
def hub(datasets: Path) -> Iterator[Hub]:
    with Hub(datasets, lfs_threshold=1000) as served:
        yield served


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return hub.environment(tmp_path / "home") | {"RBTOOL_HOME": str(tmp_path / "root"), "RBTOOL_RETRIES": "3:0.01"}


def test_a_stream_has_the_batches_of_the_dataset(datasets: Path, environment: dict[str, str]) -> None:
    asked: list[Any] = [{}, {"slices": True}, {"skip": 2}, {"window": 1, "seed": 9, "cache_size": "300kB"}]
    found = in_process(environment, *(KEPT | one for one in asked))
    assert found == [batches_of(str(datasets / "org" / "kept"), **one) for one in asked]
    assert found[0]["shards"] > 2
    assert sorted(step for batch in found[0]["steps"] for step in batch) == list(range(sum(LENGTHS)))


def test_references_to_frames_are_shown_as_videos(datasets: Path, environment: dict[str, str]) -> None:
    def shown(*words: str) -> list[dict[str, Any]]:
        line = [sys.executable, "-m", "rbtool", "inspect", "--json", *words]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
        return [field for field in json.loads(done.stdout)["fields"] if "video" in field["key"]]

    stored, streamed = shown(str(datasets / "org" / "kept")), shown("hf://org/kept", "--streaming")
    assert {(field["role"], field["min"], field["max"]) for field in stored} == {("video", None, None)}
    assert [field["role"] for field in streamed] == ["video"] * len(stored)
    done = subprocess.run(
        [sys.executable, "-m", "rbtool", "inspect", "hf://org/kept", "--streaming"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [line.split()[1:] for line in done.stdout.splitlines() if ".front" in line or "video" in line] == [
        ["video"]
    ] * len(stored)


def videos_asked(hub: Hub) -> list[str]:
    return [one.path.split("?")[0].rpartition("/")[2] for one in hub.requests if ".mp4" in one.path]


def test_a_video_is_fetched_once_and_not_again(hub: Hub, environment: dict[str, str], datasets: Path) -> None:
    in_process(environment, KEPT)
    before = len(hub.requests)
    assert sorted(videos_asked(hub)) == sorted(path.name for path in (datasets / "org/kept").rglob("*.mp4"))
    in_process(environment, KEPT)
    assert not [one.path for one in hub.requests[before:] if "/api/" not in one.path]


@pytest.mark.parametrize("kind", ["corrupt", "cut:1500"])
def test_a_fault_of_one_answer_changes_nothing(
    datasets: Path, hub: Hub, environment: dict[str, str], kind: str
) -> None:
    hub.faults.append(Fault(r"GET .*\.mp4", kind, times=2))
    assert in_process(environment, KEPT)[0] == batches_of(str(datasets / "org" / "kept"))


@pytest.mark.parametrize(("kind", "error"), [("corrupt", "CorruptDataError"), ("status:401", "AuthorisationError")])
def test_a_video_that_cannot_be_fetched_is_one_sentence(
    datasets: Path, hub: Hub, environment: dict[str, str], kind: str, error: str
) -> None:
    hub.faults.append(Fault(r"GET .*\.mp4", kind, times=ALWAYS))
    found = in_process(environment, KEPT)[0]
    assert (found.get("error"), "\n" in found["message"]) == (error, False)
    hub.faults.clear()
    assert in_process(environment, KEPT)[0] == batches_of(str(datasets / "org" / "kept"))


def test_videos_are_compared_with_the_manifest(datasets: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(datasets / "org", tmp_path / "hub" / "org") / "kept"
    video = next(copy.rglob("*.mp4"))
    video.write_bytes(bytes(reversed(video.read_bytes())))  # of the same size, and with checksums of the hub
    with Hub(tmp_path / "hub", lfs_threshold=1000) as hub:
        places = hub.environment(tmp_path / "home") | {"RBTOOL_HOME": str(tmp_path / "root")}
        found = in_process(places, KEPT)[0]
    assert found["error"] == "CorruptDataError"
    assert f"{video.name} of hf://org/kept" in found["message"]


# The cache ------------------------------------------------------------------------------------------


def bytes_of_shards(root: Path) -> int:
    """The bytes that shards take, those on their way too; a file of several shards counts once."""
    sizes = {}
    for parent, _, names in os.walk(root / ".streams"):
        for name in names if "shards" in parent else ():
            with contextlib.suppress(FileNotFoundError):
                found = Path(parent, name).lstat()
                sizes[found.st_ino] = found.st_blocks * 512
    return sum(sizes.values())


@pytest.mark.slow
def test_the_cache_stays_within_its_size_at_any_time(environment: dict[str, str], tmp_path: Path) -> None:
    limit, most = 300_000, 0
    asked = json.dumps([KEPT | {"window": 1, "batch_size": 4, "cache_size": limit}])
    command = [sys.executable, streaming.__file__, asked]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as running:
        while running.poll() is None:
            most = max(most, bytes_of_shards(tmp_path / "root"))
        assert b"error" not in running.communicate()[0]
    assert 0 < most <= limit


def test_a_cache_that_cannot_hold_the_videos_is_refused(environment: dict[str, str]) -> None:
    found = in_process(environment, KEPT | {"window": 1, "cache_size": "30kB"})[0]
    assert found["error"] == "UsageError"
    assert "a smaller window" in found["hint"]


_COPIED = """
import pickle, torch, rbtool
buffer = rbtool.load_dataset("hf://org/kept", 16, streaming=True, seed=0)
copy = pickle.loads(pickle.dumps(buffer.storage.shards))
for shard in range(len(copy)):
    own, other = (shards.take(shard) for shards in (buffer.storage.shards, copy))
    rows = torch.arange(own.rows).numpy()
    assert (own.read(rows) == other.read(rows)).all()
loader = torch.utils.data.DataLoader(rbtool.StreamDataset(buffer, seed=0), batch_size=None, num_workers=2)
print(sum(len(batch) for batch in loader))
"""


@pytest.mark.slow
def test_copies_and_workers_of_a_loader_decode_the_same(environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", _COPIED], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [str(sum(LENGTHS))]), done.stderr
