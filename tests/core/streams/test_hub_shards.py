"""Streams of a hub: what is fetched is compared with digests, and kept videos are fetched whole."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streaming
from hub import ALWAYS, WRITER, Fault, Hub, UploadHub
from lerobot_files import random_takes, write_dataset
from machine import files_of
from streaming import batches_of, in_process

import rbtool
from rbtool.core.errors import FormatError
from rbtool.core.open_steps import open_dataset
from rbtool.core.remote.shards import SHARD_DIGESTS, ShardDigests
from rbtool.core.testing.datasets import write_walks

# Streams of a hub compare what they fetch with digests: other bytes are fetched again, or are an error.

STREAM = {"dataset": "hf://me/walks"}
EPISODES: Any = [(6, "terminated"), (1, "truncated"), (9, "open"), (31, "both")] * 12


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the repository `org/ted`."""
    root = tmp_path_factory.mktemp("hub")
    write_walks(root / "org" / "ted", EPISODES)
    return root


@pytest.fixture
def hub(datasets: Path) -> Iterator[Hub]:
    with Hub(datasets, lfs_threshold=1000) as served:
        yield served


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return hub.environment(tmp_path / "home") | {"RBTOOL_HOME": str(tmp_path / "root"), "RBTOOL_RETRIES": "3:0.01"}


@pytest.mark.parametrize("leaf", ["episode", "next/reward"])
def test_other_bytes_than_the_episode_table_states_are_fetched_again(datasets, hub, environment, leaf) -> None:
    hub.faults.append(Fault(f"GET .*/resolve/[^/]+/{leaf}.memmap", "corrupt"))
    found = in_process(environment, {"dataset": "hf://org/ted"})[0]
    assert not hub.faults[0].times
    assert found == batches_of(str(datasets / "org" / "ted"))


@pytest.mark.parametrize(("leaf", "said"), [("episode", "number of another"), ("next/reward", "the return of an")])
def test_other_bytes_than_the_episode_table_states_are_an_error(hub, environment, leaf, said) -> None:
    hub.faults.append(Fault(f"GET .*/resolve/[^/]+/{leaf}.memmap", "corrupt", times=99))
    found = in_process(environment, {"dataset": "hf://org/ted"})[0]
    assert found["error"] == "CorruptDataError"
    assert said in found["message"]


@pytest.mark.parametrize("leaf", ["observation", "action", "next/observation"])
def test_a_shard_with_all_of_a_file_is_compared_with_its_digest(hub, environment, leaf, tmp_path) -> None:
    hub.root = tmp_path / "hub"
    write_walks(hub.root / "org" / "small", EPISODES[:3])
    hub.rescan()
    hub.faults.append(Fault(f"GET .*/{leaf}.memmap", "corrupt", times=99))
    failed = in_process(environment, {"dataset": "hf://org/small"})[0]
    assert failed["error"] == "CorruptDataError"
    assert f"{leaf}.memmap" in failed["message"]
    hub.faults.clear()
    assert in_process(environment, {"dataset": "hf://org/small"})[0] == batches_of(str(hub.root / "org" / "small"))


# Digests of shards ----------------------------------------------------------------------------------


@pytest.fixture(params=["ted", "packed"])
def uploaded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[UploadHub]:
    """A hub with `me/walks`, as the command uploads it: a shard has a part of each file."""
    write_walks(tmp_path / "walks", EPISODES)
    made = rbtool.convert(tmp_path / "walks", tmp_path / "made", layout=request.param).path
    with UploadHub(tmp_path / "uploads", lfs_threshold=1000) as served:
        upload_of(served, made, tmp_path)
        yield served


def upload_of(served: UploadHub, path: Path, tmp_path: Path) -> dict[str, Any]:
    code = (
        "import json, sys, rbtool; from rbtool.core.remote import shards; shards.SHARD_BYTES = 4000; "
        "made = rbtool.upload(sys.argv[1], 'hf://me/walks'); print(json.dumps(made.already_there))"
    )
    environment = served.environment(tmp_path / "home") | {"HF_TOKEN": WRITER}
    done = subprocess.run(
        [sys.executable, "-c", code, path], env=environment, capture_output=True, text=True, check=True
    )
    return {"already_there": json.loads(done.stdout)}


def files_of_rows(path: Path) -> list[str]:
    names = [name.relative_to(path).as_posix() for name in path.rglob("*")]
    return [name for name in names if name.endswith((".memmap", ".rows")) or "records" in name]


def test_any_byte_of_a_part_is_compared(uploaded: UploadHub, tmp_path: Path) -> None:
    environment = uploaded.environment(tmp_path / "home") | {"RBTOOL_HOME": str(tmp_path / "root")}
    names = files_of_rows(tmp_path / "made")
    assert names
    for name in names:
        uploaded.faults[:] = [Fault(f"GET .*/resolve/[^/]+/{re.escape(name)}", "corrupt", times=99)]
        found = in_process(environment | {"RBTOOL_HOME": str(tmp_path / name.replace("/", "-"))}, STREAM)[0]
        assert found.get("error") == "CorruptDataError", name
        assert name in found["message"]
    uploaded.faults.clear()
    assert in_process(environment, STREAM)[0] == batches_of(str(tmp_path / "made"))


def test_the_digests_of_shards_are_on_the_hub_only(uploaded: UploadHub, tmp_path: Path) -> None:
    assert upload_of(uploaded, tmp_path / "made", tmp_path) == {"already_there": True}
    assert SHARD_DIGESTS in uploaded.histories["me/walks"].at("main").files
    environment = uploaded.environment(tmp_path / "home") | {"RBTOOL_HOME": str(tmp_path / "root")}
    words = [sys.executable, "-m", "rbtool", "download", "hf://me/walks"]
    subprocess.run(words, env=environment, capture_output=True, check=True)
    there, here = (files_of(path) for path in (tmp_path / "root/hf/me/walks", tmp_path / "made"))
    assert SHARD_DIGESTS not in there
    assert there == here


@pytest.mark.parametrize(
    "change", [{"bounds": [0, 1]}, {"content_digest": "xxh3-128:" + "0" * 32}, {"format_version": 2}]
)
def test_digests_of_other_shards_are_not_compared(datasets: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    with open_dataset(datasets / "org" / "ted") as reader:
        bounds = np.array([0, 2, len(reader.episodes)])
        digests = ShardDigests(reader.manifest.content_digest, tuple(bounds.tolist()), {"a": ("", "")})
        assert ShardDigests.parse(digests.document(), reader, bounds) == digests
        assert not digests.fits("b", 0, tmp_path, (0, 0))
        changed = json.loads(digests.document()) | change
        if "bounds" in change:
            changed["files"] = {"a": [""]}
        assert ShardDigests.parse(json.dumps(changed).encode(), reader, bounds) is None
        with pytest.raises(FormatError, match="one digest for each shard"):
            ShardDigests.parse(json.dumps(changed | {"files": {"a": []}}).encode(), reader, bounds)


@pytest.mark.parametrize("uploaded", ["ted"], indirect=True)
@pytest.mark.parametrize(("size", "noted"), [(4000, False), (2500, True), (1 << 20, False)])
def test_digests_that_cannot_be_compared_are_noted(uploaded: UploadHub, tmp_path: Path, size: int, noted: bool) -> None:
    code = (
        "import logging, rbtool; from rbtool.core.remote import shards; logging.basicConfig(); "
        f"shards.SHARD_BYTES = {size}; rbtool.load_dataset('hf://me/walks', 16, streaming=True)"
    )
    environment = uploaded.environment(tmp_path / "home") | {"RBTOOL_HOME": str(tmp_path / "root")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ("has digests of other shards" in done.stderr) == noted


@pytest.mark.parametrize("uploaded", ["ted"], indirect=True)
def test_an_upload_adds_the_digests_that_an_older_one_lacks(uploaded: UploadHub, tmp_path: Path) -> None:
    document = uploaded.tree("me/walks")[SHARD_DIGESTS]
    environment = uploaded.environment(tmp_path / "home") | {"RBTOOL_HOME": str(tmp_path / "root")}
    uploaded.push("me/walks", {SHARD_DIGESTS: None})
    assert in_process(environment, STREAM)[0] == batches_of(str(tmp_path / "made"))
    for left in (None, b"of another version"):
        uploaded.push("me/walks", {SHARD_DIGESTS: left})
        assert upload_of(uploaded, tmp_path / "made", tmp_path) == {"already_there": False}
        assert uploaded.tree("me/walks")[SHARD_DIGESTS] == document


# Streams of datasets on a hub that keep videos: the files of a shard are fetched whole, into the bounded cache.

LENGTHS = (6, 1, 4, 9, 5, 7, 3, 8, 2, 6)
KEPT: dict[str, Any] = {"dataset": "hf://org/kept"}


@pytest.fixture(scope="module", params=["v2.1-ted", "v3.0-packed"])
def kept_datasets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one repository, `org/kept`: with a video of each episode, and with several in one."""
    version, layout = request.param.split("-")
    root = tmp_path_factory.mktemp("hub")
    source = write_dataset(root.parent / f"{root.name}-source", random_takes(LENGTHS), version=version)
    rbtool.convert(source, root / "org" / "kept", layout=layout)
    return root


@pytest.fixture
def kept_hub(kept_datasets: Path) -> Iterator[Hub]:
    with Hub(kept_datasets, lfs_threshold=1000) as served:
        yield served


@pytest.fixture
def kept_environment(kept_hub: Hub, tmp_path: Path) -> dict[str, str]:
    return kept_hub.environment(tmp_path / "home") | {"RBTOOL_HOME": str(tmp_path / "root"), "RBTOOL_RETRIES": "3:0.01"}


def test_a_stream_has_the_batches_of_the_dataset(kept_datasets: Path, kept_environment: dict[str, str]) -> None:
    seconds = {"windows": {"action": "0s:0.3s", "observation.image": "-0.1s:0.1s"}}
    asked: list[Any] = [{}, {"slices": True}, {"skip": 2}, {"window": 1, "seed": 9, "cache_size": "300kB"}, seconds]
    found = in_process(kept_environment, *(KEPT | one for one in asked))
    assert found == [batches_of(str(kept_datasets / "org" / "kept"), **one) for one in asked]
    assert found[0]["shards"] > 2
    assert sorted(step for batch in found[0]["steps"] for step in batch) == list(range(sum(LENGTHS)))


def test_references_to_frames_are_shown_as_videos(kept_datasets: Path, kept_environment: dict[str, str]) -> None:
    def shown(*words: str) -> list[dict[str, Any]]:
        line = [sys.executable, "-m", "rbtool", "inspect", "--json", *words]
        done = subprocess.run(line, env=kept_environment, capture_output=True, text=True, check=True)
        return [field for field in json.loads(done.stdout)["fields"] if "video" in field["key"]]

    stored, streamed = shown(str(kept_datasets / "org" / "kept")), shown("hf://org/kept", "--streaming")
    assert {(field["role"], field["min"], field["max"]) for field in stored} == {("video", None, None)}
    assert [field["role"] for field in streamed] == ["video"] * len(stored)
    done = subprocess.run(
        [sys.executable, "-m", "rbtool", "inspect", "hf://org/kept", "--streaming"],
        env=kept_environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [line.split()[1:] for line in done.stdout.splitlines() if ".front" in line or "video" in line] == [
        ["video"]
    ] * len(stored)


def videos_asked(kept_hub: Hub) -> list[str]:
    return [one.path.split("?")[0].rpartition("/")[2] for one in kept_hub.requests if ".mp4" in one.path]


def test_a_video_is_fetched_once_and_not_again(kept_hub: Hub, kept_environment: dict[str, str], kept_datasets) -> None:
    in_process(kept_environment, KEPT)
    before = len(kept_hub.requests)
    assert sorted(videos_asked(kept_hub)) == sorted(path.name for path in (kept_datasets / "org/kept").rglob("*.mp4"))
    in_process(kept_environment, KEPT)
    assert not [one.path for one in kept_hub.requests[before:] if "/api/" not in one.path]


@pytest.mark.parametrize("kind", ["corrupt", "cut:1500"])
def test_a_fault_of_one_answer_changes_nothing(kept_datasets, kept_hub, kept_environment, kind) -> None:
    kept_hub.faults.append(Fault(r"GET .*\.mp4", kind, times=2))
    assert in_process(kept_environment, KEPT)[0] == batches_of(str(kept_datasets / "org" / "kept"))


@pytest.mark.parametrize(("kind", "error"), [("corrupt", "CorruptDataError"), ("status:401", "AuthorisationError")])
def test_a_video_that_cannot_be_fetched_is_one_sentence(kept_datasets, kept_hub, kept_environment, kind, error) -> None:
    kept_hub.faults.append(Fault(r"GET .*\.mp4", kind, times=ALWAYS))
    found = in_process(kept_environment, KEPT)[0]
    assert (found.get("error"), "\n" in found["message"]) == (error, False)
    kept_hub.faults.clear()
    assert in_process(kept_environment, KEPT)[0] == batches_of(str(kept_datasets / "org" / "kept"))


def test_videos_are_compared_with_the_manifest(kept_datasets: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(kept_datasets / "org", tmp_path / "hub" / "org") / "kept"
    video = next(copy.rglob("*.mp4"))
    video.chmod(0o644)
    video.write_bytes(bytes(reversed(video.read_bytes())))  # of the same size, and with checksums of the hub
    with Hub(tmp_path / "hub", lfs_threshold=1000) as kept_hub:
        places = kept_hub.environment(tmp_path / "home") | {"RBTOOL_HOME": str(tmp_path / "root")}
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
def test_the_cache_stays_within_its_size_at_any_time(kept_environment: dict[str, str], tmp_path: Path) -> None:
    limit, most = 300_000, 0
    asked = json.dumps([KEPT | {"window": 1, "batch_size": 4, "cache_size": limit}])
    command = [sys.executable, streaming.__file__, asked]
    with subprocess.Popen(command, env=kept_environment, stdout=subprocess.PIPE) as running:
        while running.poll() is None:
            most = max(most, bytes_of_shards(tmp_path / "root"))
        assert b"error" not in running.communicate()[0]
    assert 0 < most <= limit


def test_a_cache_that_cannot_hold_the_videos_is_refused(kept_environment: dict[str, str]) -> None:
    found = in_process(kept_environment, KEPT | {"window": 1, "cache_size": "30kB"})[0]
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
def test_copies_and_workers_of_a_loader_decode_the_same(kept_environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _COPIED], env=kept_environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, [str(sum(LENGTHS))]), done.stderr
