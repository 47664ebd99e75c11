"""A loopback http server of files, with ranges, that misbehaves on request and remembers what it was asked."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request; without any of it the request is answered as it should be.

    `status` and `headers` answer instead of the file. Of the file's body, `cut` bytes are sent before the connection
    breaks off, `stall` bytes before nothing more comes, and the byte at `corrupt` (counted in the file) is changed.
    `extra` bytes are sent after the last. `no_range` sends the whole file with 200; `content_range` is sent instead
    of the true one. `unannounced` leaves the length out: then only the end of the connection ends the body; `chunked`
    sends it in chunks, which announce no length and have an end.
    `wait_for_stall` answers only when another request stalls.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    reset: bool = False
    cut: int | None = None
    stall: int | None = None
    corrupt: int | None = None
    extra: bytes = b""
    no_range: bool = False
    content_range: str | None = None
    unannounced: bool = False
    chunked: bool = False
    wait_for_stall: bool = False


SOUND = Fault()


@dataclass(frozen=True)
class Asked:
    """One request: its path, where its range began (None without one) and its headers."""

    path: str
    start: int | None
    headers: Mapping[str, str]


class StaticServer:
    """Serves `files` by path. `faults` holds, by path, what happens to the next requests; the last one stays.

    End a list with `SOUND` for a fault that passes.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.faults: dict[str, list[Fault]] = {}
        self.asked: list[Asked] = []
        self.released = threading.Event()
        self.stalled = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def address(self, path: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{path}"

    def starts(self, path: str) -> list[int | None]:
        """Where the ranges of all requests for a path began."""
        return [asked.start for asked in self.asked if asked.path == path]

    def next_fault(self, path: str) -> Fault:
        planned = self.faults.get(path, [])
        return (planned.pop(0) if len(planned) > 1 else planned[0]) if planned else SOUND

    def __enter__(self) -> StaticServer:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(server: StaticServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):  # the client went away, as tests make it do
                super().handle()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].lstrip("/")
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(wanted[1]) if wanted else None
            server.asked.append(Asked(path, start, dict(self.headers.items())))
            fault = server.next_fault(path)
            with contextlib.suppress(ConnectionError):
                _answer(self, server, fault, server.files.get(path), start)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def _answer(
    request: BaseHTTPRequestHandler, server: StaticServer, fault: Fault, body: bytes | None, start: int | None
) -> None:
    if fault.wait_for_stall:
        server.stalled.wait()
    if fault.reset:
        _break_off(request)
    elif fault.status or body is None:
        _send_head(request, fault.status or 404, {"Content-Length": "0", **fault.headers})
    elif start is not None and not fault.no_range and start >= len(body):
        _send_head(request, 416, {"Content-Length": "0", "Content-Range": f"bytes */{len(body)}"})
    else:
        _send_file(request, server, fault, body, start)


def _send_file(
    request: BaseHTTPRequestHandler, server: StaticServer, fault: Fault, body: bytes, start: int | None
) -> None:
    first = 0 if start is None or fault.no_range else start
    sent = bytearray(body[first:])
    if fault.corrupt is not None and first <= fault.corrupt:
        sent[fault.corrupt - first] ^= 0xFF
    sent += fault.extra
    headers = dict(fault.headers)
    if fault.unannounced:
        headers["Connection"] = "close"
        request.close_connection = True
    elif fault.chunked:
        headers["Transfer-Encoding"] = "chunked"
        sent = bytearray(b"%x\r\n" % len(sent)) + sent + b"\r\n0\r\n\r\n"
    else:
        headers["Content-Length"] = str(len(sent))
    ranged = start is not None and not fault.no_range
    if ranged:
        headers["Content-Range"] = fault.content_range or f"bytes {first}-{len(body) - 1}/{len(body)}"
    _send_head(request, 206 if ranged else 200, headers)
    if fault.cut is not None:
        request.wfile.write(sent[: fault.cut])
        request.wfile.flush()
        _end(request)
    elif fault.stall is not None:
        request.wfile.write(sent[: fault.stall])
        request.wfile.flush()
        server.stalled.set()
        server.released.wait()
        _end(request)
    else:
        request.wfile.write(sent)


def _send_head(request: BaseHTTPRequestHandler, status: int, headers: Mapping[str, str]) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.end_headers()


def _end(request: BaseHTTPRequestHandler) -> None:
    """End the connection after what was sent."""
    request.close_connection = True
    with contextlib.suppress(OSError):
        request.connection.shutdown(socket.SHUT_RDWR)


def _break_off(request: BaseHTTPRequestHandler) -> None:
    """Reset the connection: the client gets an error, not an end."""
    request.close_connection = True
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    request.connection.close()


@contextlib.contextmanager
def serving(files: Mapping[str, bytes]) -> Iterator[StaticServer]:
    """Serve these files until the context ends."""
    with StaticServer(files) as server:
        yield server


@contextlib.contextmanager
def mirror(
    serving: contextlib.AbstractContextManager[StaticServer], variable: str, monkeypatch: pytest.MonkeyPatch,
    store: Path, *, base: str = "base/",
) -> Iterator[StaticServer]:  # fmt: skip
    """Serve as the mirror that `variable` names; downloads go below `store`, and what fails is asked again at once."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "*")
    monkeypatch.setenv("RBTOOL_RETRIES", "2:0.001")
    monkeypatch.setenv("RBTOOL_HOME", str(store))
    with serving as running:
        monkeypatch.setenv(variable, running.address(base))
        yield running
