"""Networks that fail in the middle of many files: the next run goes on where one ended, with the same bytes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub import Fault, Hub, UploadHub
from machine import Machine, Uploader, files_of
from streaming import batches_of, in_process
from waiting import HANG

from rbtool.core.testing.datasets import write_walks

SLOW = pytest.mark.slow
EPISODES: Any = [(6, "terminated"), (1, "truncated"), (9, "open"), (31, "both")] * 12
STREAMED, ROWS = "hf://org/ted", "GET .*/resolve/.*memmap"
SOON = {"Retry-After": "0"}
FAULTS = [
    pytest.param(Fault(ROWS, "status:401", 999, after=12), 5, "AuthorisationError", id="revoked after some files"),
    pytest.param(Fault(ROWS, "status:403", 999, after=16), 5, "AuthorisationError", id="forbidden later", marks=SLOW),
    pytest.param(Fault(ROWS, "reset", 999, after=12), 5, "NetworkError", id="the network is gone", marks=SLOW),
    pytest.param(Fault(ROWS, "status:503", 999, after=20), 5, "NetworkError", id="503 for ever", marks=SLOW),
    pytest.param(Fault(ROWS, "status:429", 2, headers=SOON, after=7), 0, "", id="two times 429"),
    pytest.param(Fault(ROWS, "status:502", 2, after=9), 0, "", id="a burst of 502", marks=SLOW),
    pytest.param(Fault(ROWS, "length:-7", 3, after=5), 0, "", id="too small a length"),
    pytest.param(Fault(ROWS, "length:7", 3, after=5), 0, "", id="too large a length", marks=SLOW),
    pytest.param(Fault(ROWS, "cut:100", 6, after=5), 0, "", id="cut inside ranges", marks=SLOW),
]


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repositories")
    write_walks(root / "org" / "ted", EPISODES)
    return root


@pytest.fixture
def hub(repositories: Path) -> Iterator[Hub]:
    with Hub(repositories, lfs_threshold=1000) as served:
        yield served


@pytest.mark.parametrize(("fault", "code", "error"), FAULTS)
def test_a_stream_has_the_same_batches_now_or_in_the_next_run(
    repositories: Path, hub: Hub, tmp_path: Path, fault: Fault, code: int, error: str
) -> None:
    places = {"RBTOOL_HOME": str(tmp_path / "root"), "RBTOOL_RETRIES": "3:0.01", "RBTOOL_TIMEOUT": str(HANG)}
    environment, expected = hub.environment(tmp_path / "home") | places, batches_of(str(repositories / "org" / "ted"))
    hub.faults.append(dataclasses.replace(fault))
    first = in_process(environment, {"dataset": STREAMED})[0]
    assert hub.faults[0].times < fault.times
    if code:
        assert (first["error"], "127.0.0.1" in first["message"], "\n" in first["message"]) == (error, True, False)
        fetched = {asked.path for asked in hub.requests if asked.status == 200 and "memmap" in asked.path}
        hub.faults.clear()
        hub.forget()
        first = in_process(environment, {"dataset": STREAMED})[0]
        assert not fetched & set(hub.paths("memmap"))  # what was whole is not fetched again
    assert first == expected


@pytest.mark.parametrize(("fault", "code", "error"), FAULTS)
def test_a_download_is_the_same_now_or_in_the_next_run(
    repositories: Path, hub: Hub, tmp_path: Path, fault: Fault, code: int, error: str
) -> None:
    machine = Machine(hub, tmp_path)
    hub.faults.append(dataclasses.replace(fault))
    done = machine.run("download", STREAMED, "--json")
    assert done.returncode == code, done.stderr
    if code:
        document = json.loads(done.stdout)["error"]
        assert (document["type"], "127.0.0.1" in document["message"]) == (error, True), done.stderr
        assert not (machine.store / "hf/org/ted").exists()
        fetched = {asked.path for asked in hub.requests if asked.status == 200 and "memmap" in asked.path}
        hub.faults.clear()
        hub.forget()
        assert machine.run("download", STREAMED).returncode == 0
        assert len(fetched & set(hub.paths("memmap"))) <= 4  # those that were on their way when another one failed
    assert files_of(machine.store / "hf/org/ted") == files_of(repositories / "org" / "ted")
    assert machine.leftovers() == []


@pytest.mark.parametrize(
    ("kind", "code"), [("status:403", 5), pytest.param("status:503", 5, marks=SLOW), ("status:502", 0)]
)
def test_an_upload_that_is_refused_after_some_objects_commits_nothing_half(
    repositories: Path, tmp_path: Path, kind: str, code: int
) -> None:
    with UploadHub(tmp_path / "hub", lfs_threshold=100) as hub:
        machine = Uploader(hub, tmp_path)
        dataset = str(repositories / "org" / "ted")
        hub.faults.append(Fault("PUT /lfs/", kind, 999 if code else 2, after=3))
        done = machine.run("upload", dataset, "hf://me/walks")
        assert done.returncode == code, done.stderr
        assert done.stderr.count("error: ") == bool(code)
        if code:
            assert len(hub.histories["me/walks"].commits) == 1  # the empty one of a new repository
            hub.faults.clear()
            hub.forget()
            sent = len(hub.objects)
            assert sent >= 3
            assert machine.run("upload", dataset, "hf://me/walks").returncode == 0
            assert len([one for one in hub.requests if one.method == "PUT"]) == len(hub.objects) - sent
        assert machine.run("download", "hf://me/walks").returncode == 0
        assert files_of(machine.store / "hf/me/walks") == files_of(repositories / "org" / "ted")
