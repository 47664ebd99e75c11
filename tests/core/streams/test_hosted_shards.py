"""Streams of a hub, of web servers and of buckets: what is fetched is compared with digests, kept videos are whole."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streaming
from botocore.session import get_session
from commands import run_command
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hub import ALWAYS, WRITER, Fault, Hub, UploadHub
from lerobot_files import random_takes, write_dataset
from loopback import Web
from machine import files_of
from streaming import batches_of, in_process
from waiting import HANG, wait_until

import rbtool
from rbtool.core.errors import CorruptDataError, FormatError
from rbtool.core.open_steps import open_dataset
from rbtool.core.remote.folders import web_folder
from rbtool.core.remote.shards import SHARD_DIGESTS, ShardDigests
from rbtool.core.streams.shards import HostedShards
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
    return {"already_there": json.loads(run_command(environment, "script", code, path).stdout)}


def files_of_rows(path: Path) -> list[str]:
    names = [name.relative_to(path).as_posix() for name in path.rglob("*")]
    return [name for name in names if name.endswith((".memmap", ".rows")) or "records" in name]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_any_byte_of_a_part_is_compared(uploaded: UploadHub, tmp_path: Path, every: int) -> None:
    environment = uploaded.environment(tmp_path / "home") | {"RBTOOL_HOME": str(tmp_path / "root")}
    names = sorted(files_of_rows(tmp_path / "made"))[::every]
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
    run_command(environment, "rbtool", "download", "hf://me/walks")
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
    assert ("has digests of other shards" in run_command(environment, "script", code).stderr) == noted


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
        done = run_command(kept_environment, "rbtool", "inspect", "--json", *words)
        return [field for field in json.loads(done.stdout)["fields"] if "video" in field["key"]]

    stored, streamed = shown(str(kept_datasets / "org" / "kept")), shown("hf://org/kept", "--streaming")
    assert {(field["role"], field["min"], field["max"]) for field in stored} == {("video", None, None)}
    assert [field["role"] for field in streamed] == ["video"] * len(stored)
    done = run_command(kept_environment, "rbtool", "inspect", "hf://org/kept", "--streaming")
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


# Web servers and buckets ----------------------------------------------------------------------------

SECRET = "wJalrXUtnFEMI-never-shown"


@pytest.fixture(scope="module")
def stored(datasets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `bucket/walks`, `bucket/my packed` with digests of shards, and `bucket/kept` with videos."""
    root = tmp_path_factory.mktemp("stored")
    shutil.copytree(datasets / "org" / "ted", root / "bucket" / "walks")
    packed = rbtool.convert(datasets / "org" / "ted", root / "bucket" / "my packed", layout="packed").path
    rbtool.write_shard_digests(packed)
    rbtool.convert(write_dataset(root / "source", random_takes((6, 1, 4)), version="v2.1"), root / "bucket" / "kept")
    return root


@pytest.fixture
def web(stored: Path) -> Iterator[Web]:
    with Web(stored) as served:
        yield served


@pytest.fixture
def web_environment(web: Web, tmp_path: Path) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "eu-central-1"}
    nothing = {"AWS_CONFIG_FILE": str(tmp_path / "none"), "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none")}
    places = {"RBTOOL_HOME": str(tmp_path / "root"), "RBTOOL_RETRIES": "3:0.01", "HOME": str(tmp_path)}
    return web.environment() | keys | nothing | places | {"NO_GCE_CHECK": "true"}


def addresses(web: Web, name: str) -> list[str]:
    return [f"{start}/{name}" for start in (f"{web.url}/bucket", "s3://bucket", "gs://bucket")]


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_folder_at_a_remote_has_the_batches_of_the_dataset(web, web_environment, stored, place) -> None:
    asked = [
        {"dataset": addresses(web, name)[place]} | more
        for name in ("walks", "my packed", "kept")
        for more in ({}, {"skip": 2, "window": 1}, {"slices": True})
    ]
    found = in_process(web_environment, *asked)
    names = [one["dataset"].rpartition("/")[2] for one in asked]
    more = [{key: value for key, value in one.items() if key != "dataset"} for one in asked]
    assert found == [batches_of(str(stored / "bucket" / name), **one) for name, one in zip(names, more, strict=True)]
    before = len(web.requests)
    assert in_process(web_environment, asked[0])[0] == found[0]
    documents = ("manifest.json", "shard-digests.json")  # which state is there is asked, rows are here
    assert {one.range for one in web.requests[before:] if not one.path.endswith(documents)} == {"bytes=0-0"}


def test_digests_that_are_refused_count_as_missing(web: Web, web_environment: dict[str, str]) -> None:
    web.faults.append(Fault("shard-digests", "status:403"))
    code = (
        "import logging, sys, rbtool; logging.basicConfig(); from rbtool.core.remote import shards; "
        "shards.SHARD_BYTES = 4000; rbtool.load_dataset(sys.argv[1], streaming=True)"
    )
    done = run_command(web_environment, "script", code, addresses(web, "walks")[0])
    assert "refuses .rbtool/shard-digests.json, which counts as missing" in done.stderr
    assert "parts of its files are compared with its episode table alone" in done.stderr


def test_what_is_needed_first_is_asked_for_together(web, web_environment, stored: Path) -> None:
    listed = len(files_of(stored / "bucket" / "walks")) - 1  # but for the manifest
    waves = {r"(manifest|shard-digests)\.json": 2, r"/walks/(?!\.rbtool/manifest)": listed, r"/(?!\.).*\.memmap": 8}
    # One request after another would wait for ever.
    web.faults += [Fault(match, f"together:{count}", times=count) for match, count in waves.items()]
    assert in_process(web_environment, {"dataset": addresses(web, "walks")[0]})[0]["steps"]
    assert not sum(fault.times for fault in web.faults)


def test_the_next_shard_begins_when_most_of_one_is_there(web, web_environment, stored: Path) -> None:
    web.faults.append(Fault(r"/next/terminated\.memmap", "held", after=1))  # after the look-up, of the first shard
    patient = web_environment | {"RBTOOL_TIMEOUT": str(HANG)}
    reading = threading.Thread(target=in_process, args=(patient, {"dataset": addresses(web, "walks")[0]}))
    reading.start()
    while len({one.range for one in list(web.requests) if one.path.endswith("action.memmap")}) < 3:
        reading.join(0.01)
        assert reading.is_alive()
    web.released.set()
    reading.join()


@pytest.mark.parametrize("fails", ["", r"/observation\.memmap"])
def test_an_open_that_fails_leaves_no_thread(web, web_environment, stored, tmp_path, monkeypatch, fails: str) -> None:
    for name, value in (web_environment | {"RBTOOL_RETRIES": "9:30"}).items():
        monkeypatch.setenv(name, value)
    address = addresses(web, "walks")[0]
    small = len(files_of(stored / "bucket" / "walks" / ".rbtool")) - 1
    held = Fault(r"/\.rbtool/(?!manifest|shard-digests)", "held", times=small)
    web.faults += [held] + [Fault(fails, "status:404")] * bool(fails)

    def interrupt() -> None:
        wait_until(lambda: not held.times, "requests for the small files")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    if not fails:
        helper.start()
    with pytest.raises(CorruptDataError if fails else KeyboardInterrupt):
        HostedShards(web_folder(address), tmp_path)
    for thread in threading.enumerate():
        if thread.name == "rbtool-fetch":
            thread.join(HANG / 2)
            assert not thread.is_alive()
    web.faults.clear()
    web.released.set()
    HostedShards(web_folder(address), tmp_path).close()


@pytest.mark.parametrize("kind", ["cut:1500", "reset", "status:503", "status:429", "norange", "corrupt"])
def test_a_fault_of_a_web_server_that_passes_changes_nothing(web, web_environment, stored, kind) -> None:
    web.faults.append(Fault(r"GET (?!.*/\.rbtool/)", kind, times=5, after=6, headers={"Retry-After": "0"}))
    found = in_process(web_environment, {"dataset": addresses(web, "my%20packed")[0]})[0]
    assert found == batches_of(str(stored / "bucket" / "my packed"))
    assert not web.faults[0].times


@pytest.mark.parametrize("ignores", [True, False])
def test_a_server_that_ignores_ranges_is_named_once(web, stored, tmp_path, caplog, ignores) -> None:
    web.faults.extend([Fault("GET ", "norange", times=ALWAYS)] * ignores)
    with HostedShards(web_folder(addresses(web, "my%20packed")[0]), tmp_path) as shards:
        shards.fetch(0, tmp_path / "0", lambda size: None)
    said = [record.getMessage() for record in caplog.records if "byte ranges" in record.getMessage()]
    assert len(said) == ignores


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("status:503", "NetworkError", "503"),
        ("status:403", "AuthorisationError", "S3 says AccessDenied"),
        ("status:400", "AuthorisationError", "ExpiredToken"),
        ("cut:0", "NetworkError", "broke off"),
        ("corrupt", "CorruptDataError", "other bytes"),
    ],
)
def test_what_a_bucket_refuses_for_good_is_one_sentence(web, web_environment, kind, error, said) -> None:
    codes = {"status:403": "AccessDenied", "status:400": "ExpiredToken"}
    body = f"<Error><Code>{codes.get(kind, 'SlowDown')}</Code></Error>"
    web.faults.append(Fault(r"GET (?!.*(/\.rbtool/|schema))", kind, times=ALWAYS, body=body))
    found = in_process(web_environment, {"dataset": "s3://bucket/my packed"})[0]
    assert (found["error"], "\n" in found["message"]) == (error, False)
    assert said in found["message"] + found["hint"]
    assert SECRET not in str(found)


_CHANGED = """
import sys, pathlib, rbtool
from rbtool.core.remote import shards
shards.SHARD_BYTES = 4000
address, file = sys.argv[1], pathlib.Path(sys.argv[2])
buffer = rbtool.load_dataset(address, 16, streaming=True, seed=0)
next(iter(buffer))
file.chmod(0o644)
file.write_bytes(bytes(reversed(file.read_bytes())))
try:
    list(buffer)
except rbtool.RbtoolError as error:
    print(type(error).__name__, error, error.hint)
"""


@pytest.mark.parametrize("conditional", [True, False])
def test_an_object_that_changed_since_the_stream_was_opened_is_an_error(stored, tmp_path, conditional) -> None:
    copy = shutil.copytree(stored / "bucket" / "walks", tmp_path / "there" / "bucket" / "walks")
    with Web(tmp_path / "there") as web:
        web.conditional = conditional
        places = web.environment() | {"RBTOOL_HOME": str(tmp_path / "root"), "RBTOOL_RETRIES": "2:0.01"}
        done = run_command(places, "script", _CHANGED, f"{web.url}/bucket/walks", copy / "observation.memmap")
    assert done.stdout.startswith("ChangedMeanwhileError")
    assert re.search(r"another version of \S+/observation\.memmap than before", done.stdout)
    assert "open it again" in done.stdout


def test_a_bucket_is_asked_in_its_own_region(web: Web, web_environment: dict[str, str], stored: Path) -> None:
    web.faults.append(Fault("GET /bucket", "status:301", 2, headers={"x-amz-bucket-region": "sa-east-1"}))
    assert in_process(web_environment, {"dataset": "s3://bucket/walks"})[0] == batches_of(str(stored / "bucket/walks"))
    regions = [(one.authorization or "").split("/")[2] for one in web.requests]
    assert regions[0] == "eu-central-1"
    assert set(regions[4:]) == {"sa-east-1"}  # the first two are asked together


def test_a_redirection_to_another_server_gets_no_session_token(web: Web, web_environment, stored: Path) -> None:
    seen: list[dict[str, str]] = []

    class Elsewhere(Web):
        handler = type(
            "Seen", (Web.handler,), {"answer": lambda self: (seen.append(dict(self.headers)), self.send(404, b""))}
        )

    with Elsewhere(stored) as other:
        web.faults.append(Fault("GET /bucket.*/manifest", "status:307", headers={"Location": f"{other.url}/taken"}))
        refused = in_process(web_environment | {"AWS_SESSION_TOKEN": SECRET}, {"dataset": "s3://bucket/walks"})[0]
    assert refused["error"] == "DatasetNotFoundError"
    assert seen
    assert SECRET not in str(seen)
    assert "Signature=" not in str(seen)


def test_a_private_bucket_of_google_is_read_with_a_key(web: Web, web_environment, stored, tmp_path) -> None:
    web.token = f"ya29.{SECRET}"
    refused = in_process(web_environment, {"dataset": "gs://bucket/walks"})[0]
    assert refused["error"] == "AuthorisationError"
    assert "GOOGLE_APPLICATION_CREDENTIALS" in refused["hint"]
    secret = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    key = {
        "type": "service_account", "client_email": "me@example.com", "private_key": secret.decode(),
        "private_key_id": "1", "token_uri": f"{web.url}/token",
    }  # fmt: skip
    (tmp_path / "key.json").write_text(json.dumps(key))
    named = web_environment | {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json")}
    assert in_process(named, {"dataset": "gs://bucket/walks"})[0] == batches_of(str(stored / "bucket" / "walks"))
    assert {one.authorization for one in web.requests[-50:]} == {f"Bearer {web.token}"}


@pytest.mark.parametrize(
    "address",
    [
        f"https://me:{SECRET}@host/walks", f"https://host/walks?X-Amz-Signature={SECRET}", f"s3://{SECRET}@bucket/x",
        f"https://host/walks#{SECRET}", f"s3://AKIA1:ab/{SECRET}@bucket/x",
    ],
)  # fmt: skip
def test_an_address_with_a_secret_is_refused_without_showing_it(address: str) -> None:
    with pytest.raises(rbtool.UsageError) as raised:
        rbtool.load_dataset(address, streaming=True)
    assert SECRET not in f"{raised.value} {raised.value.hint}"


def test_digests_of_shards_are_written_for_what_the_manifest_states(stored: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(stored / "bucket" / "walks", tmp_path / "walks")
    before = files_of(copy)
    assert rbtool.write_shard_digests(copy) == copy / SHARD_DIGESTS
    assert {name: data for name, data in files_of(copy).items() if name != SHARD_DIGESTS} == before
    assert not rbtool.check(copy).errors
    (copy / SHARD_DIGESTS).unlink()
    file = copy / "action.memmap"
    file.chmod(0o644)
    file.write_bytes(bytes(reversed(file.read_bytes())))
    with pytest.raises(rbtool.CorruptDataError, match=r"action\.memmap"):
        rbtool.write_shard_digests(copy)
    assert not (copy / SHARD_DIGESTS).exists()
    with pytest.raises(rbtool.UsageError, match="nothing was uploaded") as raised:
        rbtool.upload(copy, "s3://bucket/walks")
    assert "write_shard_digests" in raised.value.hint


@pytest.mark.parametrize("address", ["s3://", "s3://a b/c", "http:///x", "https://host/../x", "gs://UPPER/x"])
def test_what_is_no_address_of_a_folder_is_refused(address: str) -> None:
    with pytest.raises(rbtool.UsageError, match="not the address of a dataset"):
        rbtool.load_dataset(address, streaming=True)


def test_a_bucket_or_a_server_may_be_the_folder_and_an_endpoint_is_a_url(stored: Path, web_environment) -> None:
    with Web(stored / "bucket") as below, Web(stored / "bucket" / "walks") as server:
        found = in_process(web_environment, {"dataset": f"{server.url}/"})
        found += in_process(web_environment | {"AWS_ENDPOINT_URL": below.url}, {"dataset": "s3://walks"})
        assert found == [batches_of(str(stored / "bucket" / "walks"))] * 2
        wrong = below.url.replace("http://", f"me:{SECRET}@")
        refused = in_process(web_environment | {"AWS_ENDPOINT_URL": wrong}, {"dataset": "s3://bucket/walks"})[0]
    assert (refused["error"], "AWS_ENDPOINT_URL" in refused["hint"]) == ("UsageError", True)
    assert SECRET not in str(refused)


def test_without_network_or_dataset_or_files(web: Web, web_environment: dict[str, str], stored: Path, tmp_path) -> None:
    asked = [{"dataset": address} for address in addresses(web, "walks")]
    offline = in_process(web_environment | {"RBTOOL_OFFLINE": "1"}, *asked)
    assert [one["error"] for one in offline] == ["NetworkError"] * 3
    assert not web.requests
    found = in_process(web_environment, *({"dataset": address} for address in addresses(web, "none")))
    assert [(one["error"], one["message"].endswith("manifest.json")) for one in found] == [
        ("DatasetNotFoundError", True)
    ] * 3
    names = ("action.memmap", ".rbtool/episodes/meta.json")
    for number, name in enumerate(names):
        (shutil.copytree(stored / "bucket" / "walks", tmp_path / "there" / str(number)) / name).unlink()
    web.root = tmp_path / "there"
    found = in_process(web_environment, *({"dataset": f"{web.url}/{number}"} for number in range(len(names))))
    assert [(one["error"], one["message"].partition(" has no ")[2]) for one in found] == [
        ("CorruptDataError", f"{name}, which its manifest lists") for name in names
    ]


_WORKERS = """
import logging, pickle, sys, torch, rbtool
from rbtool.core.remote import shards
logging.basicConfig(level=logging.DEBUG)
shards.SHARD_BYTES = 4000  # in spawned workers, too
def main():
    buffer = rbtool.load_dataset(sys.argv[1], 16, streaming=True, seed=0)
    written = pickle.dumps(buffer.storage.shards)
    for secret in sys.argv[3:]:
        assert secret.encode() not in written
    steps = rbtool.StreamDataset(buffer, seed=0)
    loader = torch.utils.data.DataLoader(steps, batch_size=None, num_workers=2, multiprocessing_context=sys.argv[2])
    print(sum(len(batch) for batch in loader))
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_a_bucket_and_show_no_secret(web, web_environment, tmp_path: Path, context: str) -> None:
    (tmp_path / "script.py").write_text(_WORKERS)
    token = f"{SECRET}-session"
    words = [sys.executable, str(tmp_path / "script.py"), "s3://bucket/walks", context, SECRET, token]
    places = web_environment | {"AWS_SESSION_TOKEN": token, "PYTHONPATH": ""}
    done = subprocess.run(words, env=places, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [str(sum(length for length, _ in EPISODES))]), done.stderr
    assert "botocore.auth" in done.stderr
    assert done.stderr.count("has no .rbtool/shard-digests.json") == 1
    assert SECRET not in done.stderr
    assert "Signature=" not in done.stdout


@pytest.mark.slow
def test_the_command_line_shows_and_samples_a_bucket(web: Web, web_environment: dict[str, str]) -> None:
    for words in (["inspect"], ["sample", "-n", "4"]):
        line = [words[0], "s3://bucket/walks", *words[1:], "--streaming", "--json"]
        done = run_command(web_environment, "rbtool", *line)
        assert "s3://bucket/walks" in done.stdout
        assert SECRET not in done.stdout + done.stderr


@pytest.fixture
def moto(tmp_path: Path) -> Iterator[str]:
    """The address of a server that speaks S3 and verifies signatures once it is told so."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (tmp_path / "moto.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as running:
        wait_until(lambda: running.poll() is not None or b"Running on" in (tmp_path / "moto.log").read_bytes(), "moto")
        yield f"http://127.0.0.1:{port}"
        running.kill()


def test_a_server_that_verifies_signatures_gives_a_private_bucket(moto, stored, web_environment, tmp_path) -> None:
    session = get_session()
    session.set_credentials("any", "thing")
    s3, iam = (session.create_client(name, region_name="eu-west-1", endpoint_url=moto) for name in ("s3", "iam"))
    s3.create_bucket(Bucket="private", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    for path in (file for file in (stored / "bucket" / "my packed").rglob("*") if file.is_file()):
        key = f"data sets/walks/{path.relative_to(stored / 'bucket' / 'my packed').as_posix()}"
        s3.put_object(Bucket="private", Key=key, Body=path.read_bytes())
    iam.create_user(UserName="me")
    may = {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::private/*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [may]})
    iam.put_user_policy(UserName="me", PolicyName="read", PolicyDocument=policy)
    key = iam.create_access_key(UserName="me")["AccessKey"]
    plain = {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(f"{moto}/moto-api/reset-auth", b"0", plain)).close()
    mine = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
    places = web_environment | {"AWS_ENDPOINT_URL": moto, "AWS_DEFAULT_REGION": "eu-west-1"}
    asked = {"dataset": "s3://private/data sets/walks"}
    assert in_process(places | mine, asked)[0] == batches_of(str(stored / "bucket" / "my packed"))
    wrong = {"AWS_SECRET_ACCESS_KEY": SECRET, "RBTOOL_HOME": str(tmp_path / "other")}
    refused = in_process(places | mine | wrong, asked)[0]
    assert (refused["error"], "SignatureDoesNotMatch" in refused["hint"]) == ("AuthorisationError", True)
    assert SECRET not in str(refused)
