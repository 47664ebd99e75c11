"""What connections to buckets decide from an answer, and what a process has of its own."""

import os
import sys
from collections.abc import Iterator

import httpx2
import pytest

from rbtool.core.errors import NetworkError, UsageError
from rbtool.core.remote.folders import GcsTransport, RemoteFolder, S3Transport
from rbtool.core.remote.http import HttpTransport
from rbtool.core.remote.transport import Transient

ADDRESS = "s3://bucket/a.bin"


def refused(transport: HttpTransport, address: str, url: str, status: int, region: str = "") -> Exception:
    """What a refusal means, of a request that was signed for a region."""
    signed = {"authorization": f"AWS4-HMAC-SHA256 Credential=key/20260101/{region}/s3/aws4_request"} if region else {}
    request = httpx2.Request("GET", url, headers=signed)
    answer = httpx2.Response(
        status, headers={"x-amz-bucket-region": "sa-east-1"}, stream=httpx2.ByteStream(b""), request=request
    )
    return transport.refusal(answer, address)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Transport]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    transport = S3Transport()
    yield transport
    transport.close()


@pytest.mark.parametrize("status", [301, 400])
def test_requests_that_were_made_before_the_region_was_known_are_made_again(s3: S3Transport, status: int) -> None:
    """One made its URL before, and its signature after another thread had found out the region."""
    before, after = "https://bucket.s3.eu-central-1.amazonaws.com/a.bin", s3.url(ADDRESS)
    assert isinstance(refused(s3, ADDRESS, after, 301, "eu-central-1"), Transient)
    for url, region in [(before, "sa-east-1"), (before, ""), (before, "eu-central-1"), (after, "eu-central-1")]:
        assert isinstance(refused(s3, ADDRESS, url, status, region), Transient), (url, region)
    for region in ("sa-east-1", ""):
        assert isinstance(refused(s3, ADDRESS, after, status, region), NetworkError)


def test_each_request_to_a_private_bucket_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.auth", None)
    transport = GcsTransport()
    for _ in range(2):
        with pytest.raises(UsageError, match="need the package google-auth"):
            refused(transport, "gs://bucket/a.bin", transport.url("gs://bucket/a.bin"), 403)


def test_a_forked_process_has_connections_and_locks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RemoteFolder("https://here/d", "key", "d", {}, HttpTransport())
    here = folder.transport, folder.files_lock, folder.turn_lock
    with folder.turn_lock, monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        there = folder.transport, folder.files_lock, folder.turn_lock
        assert not any(own is other for own, other in zip(here, there, strict=True))
        assert (folder.transport, folder.files_lock, folder.turn_lock) == there
    assert (folder.transport, folder.files_lock, folder.turn_lock) == here
