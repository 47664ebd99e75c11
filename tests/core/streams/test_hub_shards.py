"""Streams of a hub compare what they fetch with digests: other bytes are fetched again, or are an error."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub import Fault, Hub
from hub_uploads import WRITER, UploadHub
from streaming import batches_of, in_process
from upload_machine import files_of

import rbtool
from rbtool.core.errors import FormatError
from rbtool.core.format.shards import SHARD_DIGESTS, ShardDigests
from rbtool.core.open_steps import open_dataset
from rbtool.core.testing.datasets import write_walks

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
def test_other_bytes_than_the_episode_table_states_are_fetched_again(
    datasets: Path, hub: Hub, environment: dict[str, str], leaf: str
) -> None:
    hub.faults.append(Fault(f"GET .*/resolve/[^/]+/{leaf}.memmap", "corrupt"))
    found = in_process(environment, {"dataset": "hf://org/ted"})[0]
    assert not hub.faults[0].times
    assert found == batches_of(str(datasets / "org" / "ted"))


@pytest.mark.parametrize(("leaf", "said"), [("episode", "number of another"), ("next/reward", "the return of an")])
def test_other_bytes_than_the_episode_table_states_are_an_error(
    hub: Hub, environment: dict[str, str], leaf: str, said: str
) -> None:
    hub.faults.append(Fault(f"GET .*/resolve/[^/]+/{leaf}.memmap", "corrupt", times=99))
    found = in_process(environment, {"dataset": "hf://org/ted"})[0]
    assert found["error"] == "CorruptDataError"
    assert said in found["message"]


@pytest.mark.parametrize("leaf", ["observation", "action", "next/observation"])
def test_a_shard_with_all_of_a_file_is_compared_with_its_digest(
    hub: Hub, environment: dict[str, str], leaf: str, tmp_path: Path
) -> None:
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
        "import json, sys, rbtool; from rbtool.core.format import shards; shards.SHARD_BYTES = 4000; "
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
        "import logging, rbtool; from rbtool.core.format import shards; logging.basicConfig(); "
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
