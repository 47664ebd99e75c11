"""The http transport beside a real server and the real client: ranges, headers, and what failures mean."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx2
import pytest
from cases import each
from loopback import Web
from static_server import SOUND, Fault, StaticServer
from waiting import HANG, run_threads

from rbtool import __version__
from rbtool.core.errors import AuthorisationError, DatasetNotFoundError, NetworkError, RbtoolError, UsageError
from rbtool.core.remote.http import HttpTransport, failure
from rbtool.core.remote.transport import Transient, read_range

DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("RBTOOL_TIMEOUT", str(HANG))


@pytest.fixture
def server() -> Iterator[StaticServer]:
    with StaticServer({"data/file.bin": DATA, "empty": b""}) as running:
        yield running


@pytest.fixture
def transport() -> Iterator[HttpTransport]:
    with HttpTransport(hint="log in") as made:
        yield made


def read(transport: HttpTransport, address: str, offset: int = 0) -> tuple[int, bytes]:
    with transport.open(address, offset) as (start, blocks):
        return start, b"".join(blocks)


def failed(transport: HttpTransport, address: str, offset: int = 0) -> RbtoolError:
    """The error that a read ends with, also if it might pass."""
    with pytest.raises((RbtoolError, Transient)) as raised:
        read(transport, address, offset)
    return raised.value.error if isinstance(raised.value, Transient) else raised.value


@pytest.mark.parametrize("offset", [0, 1, 5_000, len(DATA) - 1])
def test_reading_starts_at_the_offset(offset: int, server: StaticServer, transport: HttpTransport) -> None:
    assert read(transport, server.address("data/file.bin"), offset) == (offset, DATA[offset:])
    assert server.starts("data/file.bin") == [offset or None]


@pytest.mark.parametrize(
    "fault", [Fault(no_range=True), Fault(content_range="bytes 77-10239/10240"), Fault(content_range="nonsense")]
)
def test_a_server_without_ranges_starts_at_the_beginning(fault, server, transport) -> None:
    server.faults["data/file.bin"] = [fault]
    assert read(transport, server.address("data/file.bin"), 50) == (0, DATA)


def test_ranges_that_start_early_or_behind_the_end(server: StaticServer, transport: HttpTransport) -> None:
    assert read(transport, server.address("data/file.bin"), len(DATA)) == (0, DATA)
    assert server.starts("data/file.bin") == [len(DATA), None]
    server.faults["data/file.bin"] = [Fault(content_range="bytes 0-10239/10240", no_range=False)]
    with transport.open(server.address("data/file.bin"), 50) as (start, _):
        assert start == 0
    # Between two bounds, only what starts there is an answer.
    server.faults["data/file.bin"] = [Fault(content_range="bytes 0-10239/10240", no_range=False)]
    with transport.open_range(server.address("data/file.bin"), 50, 60) as (start, blocks):
        assert (start, b"".join(blocks)) == (0, DATA)


def test_requests_name_the_client_and_redirections_end(server: StaticServer, transport: HttpTransport) -> None:
    read(transport, server.address("empty"))
    headers = server.asked[0].headers
    assert headers["User-Agent"] == f"rbtool/{__version__}"
    assert headers["Accept-Encoding"] == "identity"
    server.faults["empty"] = [Fault(302, {"Location": "/empty"})]
    assert str(failed(transport, server.address("empty"))).endswith("it redirects without end")


class WithToken(HttpTransport):
    def headers(self, address: str, url: str) -> Mapping[str, str]:
        return {"Authorization": "Bearer hf_secret12345"}


def test_a_token_stays_on_its_host(server: StaticServer) -> None:
    with StaticServer({"elsewhere": DATA}) as other, WithToken() as transport:
        server.faults["empty"] = [Fault(302, {"Location": other.address("elsewhere")})]
        assert read(transport, server.address("empty"), 9) == (9, DATA[9:])
        assert "Authorization" not in other.asked[0].headers
        server.faults["empty"] = [Fault(307, {"Location": "/data/file.bin"})]
        assert read(transport, server.address("empty")) == (0, DATA)
    assert [asked.headers["Authorization"] for asked in server.asked] == ["Bearer hf_secret12345"] * 3


@each(
    ("status", "kind", "sentence"),
    [
        (400, NetworkError, "127.0.0.1 did not give file.bin: it answered 400 Bad Request"),
        (401, AuthorisationError, "127.0.0.1 gives file.bin only to authenticated users (401 Unauthorized)"),
        (403, AuthorisationError, "127.0.0.1 refuses access to file.bin (403 Forbidden)"),
        (404, DatasetNotFoundError, "127.0.0.1 does not have file.bin (404 Not Found)"),
        (410, DatasetNotFoundError, "127.0.0.1 does not have file.bin (410 Gone)"),
        (416, NetworkError, "127.0.0.1 did not give file.bin: it answered 416 Requested Range Not Satisfiable"),
        (304, NetworkError, "127.0.0.1 did not give file.bin: it answered 304 Not Modified"),
        (204, NetworkError, "127.0.0.1 did not give file.bin: it answered 204 No Content"),
    ],
)
def test_statuses_that_will_not_pass(status, kind, sentence, server, transport) -> None:
    server.faults["data/file.bin"] = [Fault(status)]
    with pytest.raises(kind) as raised:
        read(transport, server.address("data/file.bin?secret=1"))
    assert str(raised.value) == sentence
    assert raised.value.hint == ("log in" if kind is AuthorisationError else "")


@each("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_statuses_that_may_pass(status: int, server: StaticServer, transport: HttpTransport) -> None:
    server.faults["data/file.bin"] = [Fault(status, {"Retry-After": "17"})]
    with pytest.raises(Transient, match=r"127\.0\.0\.1 could not give file\.bin now") as raised:
        read(transport, server.address("data/file.bin"))
    assert raised.value.retry_after == 17
    assert isinstance(raised.value.error, NetworkError)


def test_a_connection_that_breaks_off_or_falls_silent_may_pass(server, transport, monkeypatch) -> None:
    address = server.address("data/file.bin")
    for fault in (Fault(reset=True), Fault(cut=100), Fault(cut=0)):
        server.faults["data/file.bin"] = [fault]
        with pytest.raises(Transient, match=r"file.bin could not be fetched from 127.0.0.1: the connection broke off"):
            read(transport, address)
    monkeypatch.setenv("RBTOOL_TIMEOUT", "0.2")
    server.faults["data/file.bin"] = [Fault(stall=100)]
    with HttpTransport() as short, pytest.raises(Transient, match=r"the server did not answer within 0\.2 s"):
        read(short, address)


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port: int = unused.getsockname()[1]
        return port


@each(
    ("address", "sentence"),
    [
        ("http://127.0.0.1:{port}/x", "x could not be fetched from 127.0.0.1: the connection was refused"),
        ("http://no-such-host.invalid/x", "x could not be fetched from no-such-host.invalid: its address could"),
        ("ftp://127.0.0.1/x", "the address of x is not one of http or https"),
        ("http://127.0.0.1:nothing/x", "the address of x is not one of http or https"),
        ("x", "the address of x is not one of http or https"),
    ],
)
def test_addresses_that_lead_nowhere(address: str, sentence: str, transport: HttpTransport) -> None:
    error = failed(transport, address.format(port=free_port()))
    assert isinstance(error, NetworkError)
    assert str(error).startswith(sentence)


def test_a_token_with_a_line_break_is_not_shown(server: StaticServer) -> None:
    class Broken(HttpTransport):
        def headers(self, address: str, url: str) -> Mapping[str, str]:
            return {"Authorization": "Bearer hf_secret\n12345"}

    with Broken() as transport:
        error = failed(transport, server.address("empty"))
    assert "hf_secret" not in f"{error} {error.hint}"
    assert error.hint == "a token must be one word, without a line break"


@each("value", ["socks5://user:pw@secret.host:1", "what://user:pw@secret.host:1", "http://secret:notaport"])
def test_a_proxy_that_cannot_be_used_is_not_shown(value, server, transport, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", value)
    error = failed(transport, server.address("empty"))
    assert isinstance(error, NetworkError)
    assert "proxy" in str(error)
    assert "secret" not in f"{error} {error.hint}"


def test_a_proxy_is_used_and_not_shown(server: StaticServer, transport: HttpTransport, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", server.address("").replace("//", "//user:pw@"))
    server.faults["http://far.example/x"] = [Fault(503)]
    server.files["http://far.example/x"] = DATA
    error = failed(transport, "http://far.example/x")
    assert str(error) == "far.example could not give x now (503 Service Unavailable)"
    assert "127.0.0.1" not in f"{error} {error.hint}"


def test_a_proxy_that_wants_a_password_is_named(server: StaticServer, transport: HttpTransport) -> None:
    server.faults["data/file.bin"] = [Fault(407)]
    assert "the proxy asks for a user and a password" in str(failed(transport, server.address("data/file.bin")))


def test_a_missing_proxy_is_hinted_at(transport: HttpTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    error = failed(transport, "http://far.example/x")
    assert str(error) == "x could not be fetched from far.example: the connection was refused"
    assert error.hint.startswith("a proxy is set in the environment")


@each("text", ["0", "-1", "soon", "nan", "inf"])
def test_a_timeout_that_makes_no_sense_is_refused(text: str, transport: HttpTransport, monkeypatch) -> None:
    monkeypatch.setenv("RBTOOL_TIMEOUT", text)
    with pytest.raises(UsageError, match="RBTOOL_TIMEOUT"):
        read(transport, "http://127.0.0.1/x")


@pytest.mark.parametrize("silent", [Fault(stall=0), Fault(stall=5_000)], ids=["at once", "in the middle"])
def test_a_read_that_waits_can_be_broken_off(silent: Fault, server: StaticServer, transport: HttpTransport) -> None:
    server.faults["data/file.bin"] = [silent, SOUND]

    def break_off() -> None:
        server.stalled.wait()
        transport.interrupt()

    helper = threading.Thread(target=break_off)
    helper.start()
    with pytest.raises(Transient, match="broke off"):
        read(transport, server.address("data/file.bin"))
    helper.join()
    assert read(transport, server.address("data/file.bin")) == (0, DATA)


def test_one_client_serves_many_threads(server: StaticServer, transport: HttpTransport) -> None:
    found: list[tuple[int, bytes]] = []

    def fetch() -> None:
        found.extend(read(transport, server.address("data/file.bin")) for _ in range(5))

    run_threads(*[fetch] * 4)
    assert found == [(0, DATA)] * 20


def test_ranges_come_by_one_connection(tmp_path: Path, transport: HttpTransport) -> None:
    (tmp_path / "file").write_bytes(bytes(range(250)) * 4_000)
    with Web(tmp_path) as web:
        for start in (0, 300_000, 900_000):
            read_range(transport, f"{web.url}/file", start, start + 100_000, lambda data, at: None, what="the file")
    assert (len(web.requests), web.connections) == (3, 1)


def test_a_transport_connects_when_it_is_used_and_may_be_closed_twice(server: StaticServer, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    transport = HttpTransport()
    transport.close()
    assert caplog.records == []
    read(transport, server.address("empty"))
    transport.close()
    transport.close()


def test_failures_have_the_error_of_their_cause() -> None:
    error = httpx2.ConnectError("failed", request=httpx2.Request("GET", "https://hub.example/a"))
    error.__cause__ = ssl.SSLCertVerificationError("self-signed")
    found = failure(error, "a")
    assert isinstance(found, NetworkError)
    assert str(found) == "a could not be fetched from hub.example: its certificate is not trusted"
    assert "SSL_CERT_FILE" in found.hint
    error = KeyError("x")
    assert failure(error, "x") is error
    error = failure(httpx2.Response(403), "the listing", hint="ask for access")
    assert isinstance(error, AuthorisationError)
    assert (str(error), error.hint) == ("the server refuses access to the listing (403 Forbidden)", "ask for access")
    response = httpx2.Response(404, request=httpx2.Request("GET", "https://user:pw@hub.example/a?token=1"))
    with pytest.raises(httpx2.HTTPStatusError) as raised:
        response.raise_for_status()
    assert str(failure(raised.value, "the listing")) == "hub.example does not have the listing (404 Not Found)"
