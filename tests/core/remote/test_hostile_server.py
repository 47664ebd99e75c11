"""Hostile servers: nothing they send is read, unpacked, followed or awaited without limit."""

from __future__ import annotations

import contextlib
import functools
import gc
import gzip
import itertools
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import HANG

from rbtool.converters.minari.metadata import ids_in
from rbtool.core.errors import AuthorisationError, FormatError, NetworkError, RbtoolError
from rbtool.core.remote.bucket import Bucket
from rbtool.core.remote.http import HttpTransport
from rbtool.core.remote.hub import Hub
from rbtool.core.remote.transport import bounded, read_small

# http.client keeps a view of a socket that urllib3 has closed, until it is collected: here, and in no later test.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:Exception ignored in. <socket.socket .closed.*:pytest.PytestUnraisableExceptionWarning",
    r"ignore:unclosed <socket.socket .closed.*:ResourceWarning",
)
ZEROS = bytes(1 << 16)
NINES = "9" * 5000
Send = Callable[[bytes], None]
Answer = Callable[[str, Send, str], None]


class Hostile:
    """Answers every request by what `answer(path, send, url)` sends, and counts the bytes."""

    def __init__(self, answer: Answer) -> None:
        outer = self
        self.sent = 0
        self.asked: list[str] = []

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    while line := self.rfile.readline():
                        while self.rfile.readline().strip():
                            pass
                        outer.asked.append(line.split()[1].decode())
                        answer(outer.asked[-1], self.send, outer.url)
                        break

            def send(self, data: bytes) -> None:
                if outer.stopping.is_set():
                    raise ConnectionError
                self.wfile.write(data)
                outer.sent += len(data)

        self.stopping = threading.Event()
        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture(scope="module", autouse=True)
def _what_was_there_before() -> None:
    """Take it out of the garbage collection: the one after each test then visits the objects of these tests alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], Hostile]]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("RBTOOL_RETRIES", "1")
    monkeypatch.setenv("RBTOOL_TIMEOUT", str(HANG))
    monkeypatch.delenv("RBTOOL_OFFLINE", raising=False)
    running: list[Hostile] = []

    def start(answer: Answer) -> Hostile:
        running.append(Hostile(answer))
        threading.Thread(target=running[-1].server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", running[-1].url)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", running[-1].url)
        return running[-1]

    yield start
    for server in running:
        server.stopping.set()
        server.server.shutdown()
        server.server.server_close()
    gc.collect()


def head(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", "Connection: close", *headers, "", ""]).encode()


def endless(status: str, *headers: str) -> Answer:
    """A body without end."""

    def answer(path: str, send: Send, url: str) -> None:
        send(head(status, *(header.format(url=url) for header in headers)))
        for _ in range(1 << 12):
            send(ZEROS)

    return answer


def say(body: str, status: str = "200 OK", *headers: str) -> Answer:
    data = body.encode()
    sent = head(status, "Content-Type: application/json", f"Content-Length: {len(data)}", *headers) + data
    return lambda path, send, url: send(sent)


def ask_http(url: str) -> object:
    with HttpTransport() as transport:
        return read_small(transport, f"{url}/file", limit=1 << 20)


def ask_hub(url: str) -> object:
    with Hub() as hub:
        return hub.tree("acme/one", "0" * 40)


def ask_bucket(url: str) -> object:
    with Bucket("acme") as bucket:
        return bucket.objects()


@functools.cache
def bomb(status: str) -> bytes:
    """A small body that unpacks to more than any limit."""
    packed = gzip.compress(b"[" + bytes(80 << 20))
    kind = "Content-Type: application/json"
    return head(status, "Content-Encoding: gzip", kind, f"Content-Length: {len(packed)}") + packed


CLIENTS = [ask_http, ask_hub, ask_bucket]
MOVED = "302 Found", "Location: {url}/again"


@pytest.mark.parametrize("ask", CLIENTS)
@pytest.mark.parametrize("status", [("404 Not Found",), ("503 Busy",), ("400 Bad Request",), ("401 No",), MOVED])
def test_bodies_that_are_no_file_are_not_read(ask: Any, status: tuple[str, ...], serve: Any) -> None:
    server = serve(endless(*status))
    with pytest.raises(RbtoolError):
        ask(server.url)
    assert server.sent < len(server.asked) * (32 << 20)  # what the sockets hold, of 256 MiB


@pytest.mark.parametrize("ask", CLIENTS[1:])
@pytest.mark.parametrize("status", ["200 OK", "404 Not Found"])
def test_bodies_that_unpack_to_gigabytes_are_not_unpacked(ask: Any, status: str, serve: Any) -> None:
    server = serve(lambda path, send, url: send(bomb(status)))
    with pytest.raises(RbtoolError, match=r"more than 67,108,864 bytes|404"):
        ask(server.url)


def test_bodies_are_unpacked_up_to_the_limit() -> None:
    packed = gzip.compress(b"x" * 1000)
    assert bounded(iter([packed[:9], packed[9:]]), "gzip", 1000, "it") == b"x" * 1000
    with pytest.raises(FormatError, match="more than 999 bytes"):
        bounded(iter([packed]), "gzip", 999, "it")
    with pytest.raises(FormatError, match="compressed by 'br'"):
        bounded(iter([b""]), "br", 999, "it")
    for blocks in ([packed + packed], [packed, packed]):
        with pytest.raises(FormatError, match="it continues after the end"):
            bounded(iter(blocks), "gzip", 5000, "it")


@pytest.mark.parametrize(("module", "ask"), [("hub", ask_hub), ("bucket", ask_bucket)])
def test_paging_ends(module: str, ask: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"rbtool.core.remote.{module}.PAGES", 5)
    numbers = itertools.count()

    def answer(path: str, send: Send, url: str) -> None:
        number = str(next(numbers))
        files = [{"type": "file", "path": number, "size": 1, "oid": "0" * 40}]
        objects = [{"name": number, "size": "1", "generation": "1", "crc32c": "AAAAAA=="}]
        page = files if module == "hub" else {"items": objects, "nextPageToken": number}
        say(json.dumps(page), "200 OK", f"Link: <{url}/x?cursor={number}>; rel=next")(path, send, url)

    server = serve(answer)
    with pytest.raises(FormatError, match="has no end"):
        ask(server.url)
    assert len(server.asked) == 6


def drip(send: Send, data: bytes) -> None:
    """Send something now and then, for longer than any test may take."""
    end = time.monotonic() + HANG
    while time.monotonic() < end:
        send(data)
        time.sleep(0.02)


def drip_body(path: str, send: Send, url: str) -> None:
    send(head("200 OK", "Content-Type: application/json"))
    drip(send, b" ")


def drip_head(path: str, send: Send, url: str) -> None:
    send(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    drip(send, b"x")


@pytest.mark.parametrize("ask", CLIENTS)
def test_a_body_or_a_head_that_drips_is_given_up(ask: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_TIMEOUT", "1")  # no silence between two drips takes so long
    with pytest.raises(NetworkError, match="comes too slowly"):
        ask(serve(drip_body).url)
    monkeypatch.setenv("RBTOOL_TIMEOUT", "0.2")
    with pytest.raises(NetworkError):
        ask(serve(drip_head).url)


@pytest.mark.parametrize("ask", CLIENTS)
@pytest.mark.parametrize(
    "header",
    [
        f"Content-Range: bytes {NINES}-{NINES}/*", f"Content-Length: {NINES}", f"Retry-After: {NINES}",
        "Retry-After: Mon, 01 Jan 99999 00:00:00 GMT", f"RateLimit: x;r=0;t={NINES}", "Location: http://[",
        "Location: http://\udcff", "Link: <http://[>; rel=next", f"Content-Encoding: {NINES}",
        "Content-Encoding: gzip",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "status", ["206 Partial", *(pytest.param(one, marks=pytest.mark.slow) for one in ("302 Found", "429 Wait"))]
)
def test_headers_that_make_no_sense_raise_no_other_error(ask: Any, header: str, status: str, serve: Any) -> None:
    whole = head(status, "Content-Type: application/json").replace(
        b"\r\n\r\n", b"\r\n" + header.encode("utf-8", "surrogateescape") + b"\r\n\r\n"
    )
    server = serve(lambda path, send, url: send(whole + b"[]"))
    with contextlib.suppress(RbtoolError):
        ask(server.url)


def test_an_index_is_read_in_one_pass_up_to_a_limit() -> None:
    names = [f"many/name-{number}-v0" for number in range(49_000)]
    ids, problems = ids_in("acme/many", json.dumps({"datasets": [*names, "other", None, ["x"]]}).encode())
    assert (len(ids), len(problems)) == (49_000, 3)
    index = json.dumps({"datasets": [f"many/name-{number}-v0" for number in range(50_001)]}).encode()
    with pytest.raises(FormatError, match="lists 50,001 datasets, expected 50,000 at most"):
        ids_in("acme/many", index)


TOKEN_ANSWERS = {
    "endless": endless("200 OK"),
    "endless error": endless("401 No"),
    "endless redirection": endless(*MOVED),
    "gzip bomb": lambda path, send, url: send(bomb("200 OK")),
    "drips": drip_body,
    "head drips": drip_head,
    "nothing": lambda path, send, url: None,
    "no object": say("[]"),
    "no token": say("{}"),
    "a number": say('{"access_token": 3}'),
    "odd time": say('{"access_token": "hf_x", "expires_in": [3]}'),
    "deep": say("[" * 60_000),
    "refused": say('{"error": "grant", "error_description": "\x1b]0;owned\x07"}', "400 Bad", "X-HF-Warning: \tboo"),
}


@pytest.fixture
def no_token(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RBTOOL_TIMEOUT", "0.3")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_IMPLICIT_TOKEN", False)


EMPTY = say("[]")


@pytest.mark.usefixtures("no_token")
@pytest.mark.parametrize("kind", TOKEN_ANSWERS)
@pytest.mark.parametrize("minted", [True, False])
def test_an_exchange_of_tokens_is_bounded(kind: str, minted: bool, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(TOKEN_ANSWERS[kind])
    monkeypatch.setattr("huggingface_hub.utils._auth._OIDC_TOKEN_CACHE", None)
    monkeypatch.setenv("HF_OIDC_RESOURCE", "acme")
    if minted:
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", f"{server.url}/mint")
        monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "request")
    else:
        monkeypatch.setenv("HF_OIDC_ID_TOKEN", "identity")
    start = time.monotonic()
    with pytest.raises((AuthorisationError, NetworkError, FormatError)) as refused:
        ask_hub(server.url)
    assert time.monotonic() - start < HANG
    assert len(refused.value.message) < 1000
    assert server.sent < 32 << 20  # what the sockets hold, of 256 MiB


@pytest.mark.usefixtures("no_token")
@pytest.mark.parametrize("kind", TOKEN_ANSWERS)
def test_a_refresh_of_a_token_is_bounded(kind, serve, tmp_path, monkeypatch, capfd) -> None:
    server = serve(lambda path, *rest: (TOKEN_ANSWERS[kind] if "oauth" in path else EMPTY)(path, *rest))
    (tmp_path / "token").write_text("hf_oldoldold")
    (tmp_path / "stored").write_text("[me]\nhf_token = hf_oldoldold\nrefresh_token = again\nexpires_at = 1\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_STORED_TOKENS_PATH", str(tmp_path / "stored"))
    monkeypatch.setattr("huggingface_hub.utils._auth._OAUTH_REFRESH_CACHE", None)
    start = time.monotonic()
    with contextlib.suppress(RbtoolError):
        ask_hub(server.url)
    assert time.monotonic() - start < HANG
    assert server.sent < 32 << 20
    assert "\x1b" not in capfd.readouterr().err


@pytest.mark.usefixtures("no_token")
def test_a_token_that_was_exchanged_is_sent(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_TIMEOUT", str(HANG))
    answer = say('{"access_token": "hf_exchanged", "expires_in": 3600}')
    server = serve(lambda path, *rest: (answer if "oauth" in path else EMPTY)(path, *rest))
    monkeypatch.setattr("huggingface_hub.utils._auth._OIDC_TOKEN_CACHE", None)
    monkeypatch.setenv("HF_OIDC_RESOURCE", "acme")
    monkeypatch.setenv("HF_OIDC_ID_TOKEN", "identity")
    with Hub() as hub:
        assert hub.tree("acme/one", "0" * 40) == []
        assert hub.headers(address := f"{server.url}/file", address)["authorization"] == "Bearer hf_exchanged"
