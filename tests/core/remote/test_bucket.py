"""A bucket on loopback, read by the real client in processes of their own."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from commands import ask, ask_one, failed
from loopback import Fault, Gcs
from waiting import wait_until

SMALL = b'{"a": 1}'
LARGE = random.Random(7).randbytes((8 << 20) + 1000)
NAMES = ["a/data/large.bin", "a/data/sm#ll %.json", "b/x.json", "empty.bin"]


@pytest.fixture
def gcs(tmp_path: Path) -> Iterator[Gcs]:
    for name, data in zip(NAMES, (LARGE, SMALL, SMALL, b""), strict=True):
        path = tmp_path / "gcs" / "public" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with Gcs(tmp_path / "gcs", page_size=3) as served:
        yield served


def one(gcs: Gcs, *call: object, bucket: str = "public", **variables: str) -> Any:
    return ask_one({**gcs.environment(), **variables}, "bucket", *call, arguments=(bucket,))


def test_objects_from_all_pages_or_below_a_prefix(gcs: Gcs) -> None:
    found = one(gcs, "objects")
    assert [(entry["name"], entry["size"]) for entry in found] == [
        (name, size) for name, size in zip(NAMES, (len(LARGE), len(SMALL), len(SMALL), 0), strict=True)
    ]
    assert found[0]["checksum"] == f"md5:{hashlib.md5(LARGE).hexdigest()}"
    assert len(gcs.paths("/o[?]")) == 2
    found = one(gcs, "objects", "a/data/")
    assert [entry["name"] for entry in found] == NAMES[:2]


def test_names_that_are_no_paths_and_objects_without_md5(gcs: Gcs) -> None:
    facts = {"size": "1", "generation": "1", "crc32c": "AAAAAA=="}
    items = [{"name": name, **facts} for name in ("a/../../x", "/x", "a//x", "folder/", "good")]
    gcs.faults = [Fault("/o[?]", "status:200", body=json.dumps({"items": items}))]
    found = one(gcs, "objects")
    assert [entry["name"] for entry in found] == ["good"]
    gcs.without_md5 = True
    found = one(gcs, "objects", "b/")
    assert found[0]["checksum"] == f"crc32c:{google_crc32c.value(SMALL):08x}"


def test_bytes_in_pieces_from_anywhere(gcs: Gcs) -> None:
    calls = [["digest_of", 0, start] for start in (0, 1, len(LARGE) - 1, len(LARGE))]
    calls += [["digest_of", index, 0] for index in (1, 3)]
    found = ask(gcs.environment(), "bucket", *calls, arguments=("public",))
    parts = [LARGE, LARGE[1:], LARGE[-1:], b"", SMALL, b""]
    assert found == [hashlib.sha256(part).hexdigest() for part in parts]
    assert [asked.range for asked in gcs.requests if asked.range][:2] == ["bytes=0-8388607", "bytes=8388608-8389607"]


def test_another_generation_makes_the_listing_stale(gcs: Gcs) -> None:
    found = one(gcs, "objects", "b/")
    (gcs.root / "public" / "b" / "x.json").write_bytes(b"changed!")
    failed(one(gcs, "read", found[0]["address"]), "StaleListing")


def test_a_bucket_that_is_not_there_or_not_public(gcs: Gcs) -> None:
    found = one(gcs, "objects", bucket="nothing")
    assert "gs://nothing" in failed(found, "DatasetNotFoundError").message
    gcs.denied = {"public"}
    assert "public buckets" in failed(one(gcs, "objects"), "AuthorisationError").hint


BUSY = '{"error": {"code": 503, "message": "busy"}}'
PASSING = [
    Fault("", "status:503", body=BUSY), Fault("", "status:502"), Fault("", "status:500", body="<html>"),
    Fault("", "status:429", body=BUSY, headers={"Retry-After": "0"}), Fault("", "reset"), Fault("", "cut:5"),
]  # fmt: skip


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.kind)
def test_passing_faults_are_retried(gcs: Gcs, fault: Fault) -> None:
    gcs.faults = [replace(fault, match=match) for match in ("/b/public/o[?]", "alt=media")]
    assert one(gcs, "digest_of", 2, 0, "retried") == hashlib.sha256(SMALL).hexdigest()
    assert [len(gcs.paths("alt=media")), len(gcs.paths("/o[?]"))] == [2, 3]


def test_retries_end(gcs: Gcs) -> None:
    gcs.faults = [Fault("/o[?]", "status:503", times=99, body=BUSY)]
    assert "answered 503" in failed(one(gcs, "objects"), "NetworkError").message
    assert len(gcs.paths("/o[?]")) == 3
    gcs.faults = [Fault("/o[?]", "status:429", body=BUSY, headers={"Retry-After": "4000"})]
    assert "asks to wait for 4,000 s" in failed(one(gcs, "objects"), "NetworkError").message


@pytest.mark.parametrize("kind", ["stall:0", "stall:3"])
def test_a_silent_server_is_not_waited_for(gcs: Gcs, kind: str) -> None:
    gcs.faults = [Fault("/o[?]", kind, times=99)]
    failed(one(gcs, "objects", RBTOOL_TIMEOUT="0.2", RBTOOL_RETRIES="2:0.01"), "NetworkError")
    wait_until(lambda: gcs.faults[0].times <= 97, "the arrival of two requests")
    assert gcs.faults[0].times == 97


@pytest.mark.parametrize("proxy", ["http://ann:secret@127.0.0.1:9", "nonsense://ann:secret@127.0.0.1:9"])
def test_a_proxy_is_used_and_not_named(gcs: Gcs, proxy: str) -> None:
    through = {"NO_PROXY": "", "no_proxy": "", "HTTP_PROXY": proxy, "http_proxy": proxy}
    found = failed(one(gcs, "objects", **through), "NetworkError")
    assert "proxy" in found.message
    assert "secret" not in found.message + found.hint
    assert gcs.requests == []


def test_nothing_is_requested_if_the_network_is_forbidden(gcs: Gcs) -> None:
    calls = [["objects"], ["read", "gs://public/b/x.json#1/8"]]
    for outcome in ask({**gcs.environment(), "RBTOOL_OFFLINE": "1"}, "bucket", *calls, arguments=("public",)):
        failed(outcome, "NetworkError")
    assert gcs.requests == []


@pytest.mark.parametrize(
    "body", ["<html>", "[]", '{"items": [{"name": "x", "size": "1", "generation": "1"}]}', '{"items": 7}']
)
def test_answers_that_make_no_sense_are_refused(gcs: Gcs, body: str) -> None:
    gcs.faults = [Fault("/o[?]", "status:200", times=99, body=body)]
    failed(one(gcs, "objects"), "RbtoolError")


def test_addresses_of_other_objects_are_refused(gcs: Gcs) -> None:
    addresses = ("gs://other/x#1/2", "gs://public/x", "gs://public/x#1/a", "https://public/x#1/2")
    for outcome in ask(gcs.environment(), "bucket", *(["read", one] for one in addresses), arguments=("public",)):
        failed(outcome, "FormatError")


def test_a_missing_client_is_named() -> None:
    code = (
        "import sys; sys.modules['google.cloud'] = None\n"
        "from rbtool.core.remote.bucket import Bucket\n"
        "from rbtool.core.errors import UsageError\n"
        "try: Bucket('x').objects()\n"
        "except UsageError as error: print(error.hint)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "pip install 'rbtool[gcp]'"
