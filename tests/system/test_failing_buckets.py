"""Buckets that fail, over TLS as the real ones: the right exit code, one sentence, and the next run completes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import Fault, Gcs, serve_tls, write_certificate
from machine import Machine
from rlds_files import PLAIN, random_episode, record, write_dataset

import rbtool

SLOW = pytest.mark.slow
BRIDGE, LARGE = "bridge/0.1.0", "large/1.0.0"
LIST, FILES, ONE = "/o[?]", "alt=media", "00001-of-00003.*alt=media"
SOON = {"Retry-After": "0"}
EVER = 999
FAULTS = [
    pytest.param(Fault(LIST, "status:403", EVER), 5, "the list of gs://lent/robotics/ is not", id="403"),
    pytest.param(Fault(FILES, "status:403", EVER, after=1), 5, "public: the server answered 403", id="403 later"),
    pytest.param(Fault(ONE, "status:401", EVER), 5, "public: the server answered 401", id="401 on a file"),
    pytest.param(Fault(LIST, "status:404", EVER), 4, "the list of gs://lent/robotics/ is not", id="404"),
    pytest.param(Fault(ONE, "status:404", EVER), 4, "gs://lent/robotics/bridge/0.1.0/toy", id="404 on a file"),
    pytest.param(Fault(ONE, "status:404"), 0, "", id="404 once: listed again"),
    pytest.param(Fault(ONE, "status:429", 2, headers=SOON), 0, "", id="two times 429"),
    pytest.param(Fault(LIST, "status:429", 2, headers=SOON), 0, "", id="429 on the list", marks=SLOW),
    pytest.param(Fault(ONE, "status:429", EVER, headers={"Retry-After": "9000"}), 5, "9,000 s", id="429 for hours"),
    pytest.param(Fault(LIST, "status:500"), 0, "", id="500 once"),
    pytest.param(Fault(FILES, "status:500", EVER, after=2), 5, "the server answered 500", id="500 for ever"),
    pytest.param(Fault(LIST, "status:503", EVER), 5, "the server answered 503", id="503 for ever", marks=SLOW),
    pytest.param(Fault(LIST, "reset"), 0, "", id="reset once", marks=SLOW),
    pytest.param(Fault(ONE, "reset", EVER), 5, "the connection broke off", id="reset for ever"),
    pytest.param(Fault(FILES, "cut:100", 3), 0, "", id="cut three times"),
    pytest.param(Fault(LIST, "cut:100"), 0, "", id="a list that is cut"),
    pytest.param(Fault(ONE, "cut:100", EVER), 5, "toy-train.tfrecord-00001-of-00003", id="cut for ever"),
    pytest.param(Fault(ONE, "length:-7"), 0, "", id="too small a length"),
    pytest.param(Fault(ONE, "length:7"), 0, "", id="too large a length", marks=SLOW),
    pytest.param(Fault(ONE, "corrupt"), 0, "", id="a corrupt byte once"),
    pytest.param(Fault(ONE, "corrupt", EVER), 1, "md5", id="a corrupt byte for ever"),
    pytest.param(Fault(ONE, "stall:100"), 0, "", id="silent in the middle, once"),
    pytest.param(Fault(FILES, "slow:0.3", 3), 0, "", id="slow", marks=SLOW),
    pytest.param(Fault(LIST, "slow:30", EVER), 5, "did not answer within 2 s", id="a silent list"),
    pytest.param(Fault(ONE, "slow:30", EVER), 5, "did not answer within 2 s", id="a silent file", marks=SLOW),
]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of buckets with a dataset in three shards, and one in a file of more than one piece."""
    root = tmp_path_factory.mktemp("buckets")
    records = [record(PLAIN, random_episode(length, seed=length)) for length in (9, 2, 14)]
    write_dataset(root / "lent" / "robotics" / BRIDGE, {"train": [[one] for one in records]}, PLAIN)
    frames: Any = {**PLAIN, "raw": ("tensor", "uint16", (1_500_000,), "bytes")}
    write_dataset(root / "lent" / "robotics" / LARGE, {"train": [[record(frames, random_episode(3, frames))]]}, frames)
    return root


@pytest.fixture(scope="module")
def expected(buckets: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The content digest of the dataset in three shards."""
    made = rbtool.convert(buckets / "lent" / "robotics" / BRIDGE, tmp_path_factory.mktemp("made") / "bridge")
    return made.content_digest


@pytest.fixture
def gcs(buckets: Path, certificate: Path) -> Iterator[Gcs]:
    served = Gcs(buckets, page_size=3)
    serve_tls(served, certificate)
    with served:
        yield served


class Reader(Machine):
    """A user's machine that trusts the certificate of the buckets."""

    def __init__(self, gcs: Gcs, certificate: Path, folder: Path) -> None:
        self.hub, self.folder, self.store = gcs, folder, folder / "store"
        self.variables = {
            **gcs.environment(), "RLDS_REMOTE": "gs://lent/robotics", "RBTOOL_HOME": str(self.store),
            "RBTOOL_RETRIES": "4:0.01", "OMP_NUM_THREADS": "1",
            "REQUESTS_CA_BUNDLE": str(certificate),
        }  # fmt: skip


@pytest.fixture
def machine(gcs: Gcs, certificate: Path, tmp_path: Path) -> Reader:
    return Reader(gcs, certificate, tmp_path)


def fetched(gcs: Gcs) -> set[str]:
    """The files that came whole."""
    return {one.path.partition("?")[0] for one in gcs.requests if "alt=media" in one.path and one.status in (200, 206)}


@pytest.mark.parametrize(("fault", "code", "sentence"), FAULTS)
def test_a_fault_is_survived_or_named_and_the_next_run_completes(
    gcs: Gcs, machine: Reader, expected: str, fault: Fault, code: int, sentence: str
) -> None:
    gcs.faults.append(dataclasses.replace(fault))
    done = machine.run("download", "rlds", BRIDGE)
    assert (done.returncode, done.stderr.count("Traceback")) == (code, 0), done.stderr
    assert (done.stderr.count("error: "), sentence in done.stderr) == (int(code != 0), True), done.stderr
    assert gcs.faults[0].times < fault.times
    gcs.faults.clear()
    assert machine.json("download", "rlds", BRIDGE)["content_digest"] == expected
    assert machine.leftovers() == []


def test_what_came_whole_is_not_fetched_again(gcs: Gcs, machine: Reader, expected: str) -> None:
    gcs.faults.append(Fault("00002-of-00003.*alt=media", "status:500", EVER))
    assert machine.run("download", "rlds", BRIDGE).returncode == 5
    before = fetched(gcs)
    assert before
    gcs.faults.clear()
    gcs.forget()
    assert machine.json("download", "rlds", BRIDGE)["content_digest"] == expected
    assert not before & fetched(gcs)


def test_a_large_file_continues_at_the_piece_that_was_cut(gcs: Gcs, machine: Reader) -> None:
    gcs.faults.append(Fault("tfrecord.*alt=media", "cut:100000", after=1))
    assert machine.json("download", "rlds", LARGE)["episodes"] == 1
    ranges = [one.range for one in gcs.requests if "tfrecord" in one.path and "alt=media" in one.path]
    assert len(ranges) == 3
    assert ranges[0] == "bytes=0-8388607"
    assert ranges[1] == ranges[2]


def test_a_certificate_that_is_not_trusted_is_named_at_once(gcs: Gcs, machine: Reader) -> None:
    del machine.variables["REQUESTS_CA_BUNDLE"]
    done = machine.run("download", "rlds", BRIDGE)
    assert done.returncode == 5, done.stderr
    assert "certificate is not trusted\nhint: REQUESTS_CA_BUNDLE names" in done.stderr
    assert "again" not in done.stderr
    assert gcs.requests == []
