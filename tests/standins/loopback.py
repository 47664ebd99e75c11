"""A server on loopback that remembers what it was asked and goes wrong on demand, with TLS where it is wanted.

`Gcs` stands in for the parts of the JSON API of Google Cloud Storage that anonymous readers use:
`<root>/<bucket>/<name of the object>`; `STORAGE_EMULATOR_HOST` points the real client there. `Web` serves files as they
are, as web servers and buckets do over plain http.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import json
import os
import re
import socket
import ssl
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

import google_crc32c
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from waiting import wait_until


class Asked(NamedTuple):
    """A request and how it was answered: with a status, or with `reset`."""

    method: str
    path: str
    status: int | str
    range: str | None
    authorization: str | None


@dataclass(slots=True)
class Fault:
    """What goes wrong with the first `times` requests whose `METHOD /path?query` matches, but for `after` before them.

    `status:503`   answer with that status, `body` and `headers`
    `reset`        close the connection without an answer
    `cut:100`      promise the whole body, send its first 100 bytes, close the connection
    `stall:100`    the same, but keep the connection open and silent
    `slow:0.1`     wait so many seconds before the answer
    `held`         wait before the answer until `released` is set
    `together:3`   wait before the answer until three requests that match are here
    `corrupt`      change the middle byte of the body
    `norange`      ignore the Range header: 200 and the whole body
    `length:-7`    state a length that is so many bytes off, and close the connection
    """

    match: str
    kind: str
    times: int = 1
    body: str = '{"error": "injected"}'
    headers: dict[str, str] = field(default_factory=dict)
    after: int = 0

    def argument(self, name: str) -> str | None:
        """What follows `name:` if the fault is of that kind."""
        kind, _, argument = self.kind.partition(":")
        return argument if kind == name else None

    @property
    def is_silence(self) -> bool:
        """Whether a client has to stop waiting by itself."""
        return self.argument("stall") is not None or float(self.argument("slow") or 0) > 10


class Loopback:
    """Serves on a free port of 127.0.0.1 while it is entered; `faults` and `requests` may be touched at any time."""

    handler: ClassVar[type[Handler]]

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.requests: list[Asked] = []
        self.stopping = threading.Event()
        self.released = threading.Event()
        self.connections = 0
        self._meetings: dict[int, threading.Barrier] = {}
        self._lock = threading.Lock()
        served = type("Served", (self.handler,), {"server_state": self})
        self._server = _Server(("127.0.0.1", 0), served)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def serve_with(self, context: ssl.SSLContext) -> None:
        """Encrypt what is sent from now on; each connection agrees on how in the thread that serves it."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.url = self.url.replace("http:", "https:")

    def meet(self, fault: Fault, count: int) -> None:
        """Wait until so many requests have the same fault."""
        with self._lock:
            meeting = self._meetings.setdefault(id(fault), threading.Barrier(count))
        meeting.wait()

    def remember(self, asked: Asked) -> None:
        """Add to the list of requests."""
        with self._lock:
            self.requests.append(asked)

    def take_fault(self, line: str) -> Fault:
        """Use up one turn of the first fault that matches; one of no kind if none does."""
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.match, line):
                    if fault.after > 0:
                        fault.after -= 1
                        break
                    fault.times -= 1
                    return fault
        return Fault("", "")

    def paths(self, pattern: str = "") -> list[str]:
        """Paths of the requests so far that match, in order."""
        with self._lock:
            return [asked.path for asked in self.requests if re.search(pattern, asked.path)]

    def forget(self) -> None:
        """Start counting requests anew."""
        with self._lock:
            self.requests.clear()

    def settle(self) -> None:
        """Wait until all requests that were sent are dealt with, also those whose client is gone."""
        address = self._server.server_address
        with socket.create_connection((str(address[0]), int(address[1]))) as last:
            last.sendall(b"GET /last HTTP/1.0\r\n\r\n")
            last.recv(1)  # connections are accepted in order: all that were made before have a thread now
        wait_until(lambda: not self._server.served, "the end of all connections")

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stopping.set()
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.served: set[socket.socket] = set()
        """The connections that have a thread."""

    def process_request(self, request: Any, client_address: Any) -> None:
        self.served.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.served.discard(request)

    def handle_error(self, *where: object) -> None:
        """Clients that go away are part of the play."""


class Handler(BaseHTTPRequestHandler, ABC):
    """Answers GET and HEAD through `answer`, which a stand-in writes; the faults are dealt with here."""

    protocol_version = "HTTP/1.1"
    server_state: Any
    fault: Fault

    def setup(self) -> None:
        super().setup()
        self.server_state.connections += 1

    @abstractmethod
    def answer(self) -> None:
        """Answer the request with `send`, `send_json` or `send_file`."""

    def do_GET(self) -> None:
        self.fault = self.server_state.take_fault(f"{self.command} {self.path}")
        if self.fault.kind == "reset":
            self._reset()
            return
        self.server_state.stopping.wait(float(self.fault.argument("slow") or 0))
        if self.fault.kind == "held":
            self.server_state.released.wait()
        if together := self.fault.argument("together"):
            self.server_state.meet(self.fault, int(together))
        status = self.fault.argument("status")
        if status is not None:
            self.send(int(status), self.fault.body.encode(), self.fault.headers)
            return
        self.answer()

    do_HEAD = do_GET

    def log_message(self, *said: object) -> None:
        """Say nothing: `requests` has it all."""

    def send_json(self, document: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with a JSON document."""
        self.send(status, json.dumps(document).encode(), headers)

    def send_file(self, data: bytes, headers: Mapping[str, str]) -> None:
        """Answer with the bytes of a file, or those that the Range header asks for."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted is None or self.fault.kind == "norange":
            self.send(200, data, headers, "application/octet-stream")
            return
        first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
        if first >= len(data):
            self.send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        part = {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"}
        self.send(206, data[first : last + 1], part, "application/octet-stream")

    def send(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, kind: str = "application/json"
    ) -> None:
        """Answer, with what the fault does to the body."""
        self._remember(status)
        if self.fault.kind == "corrupt" and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 0x5A]) + body[middle + 1 :]
        self.send_response(status)
        stated = len(body) + int(self.fault.argument("length") or 0)
        self.close_connection = self.close_connection or stated != len(body)
        for name, value in {"Content-Type": kind, "Content-Length": str(max(0, stated)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send_body(body)

    def _send_body(self, body: bytes) -> None:
        cut, stall = self.fault.argument("cut"), self.fault.argument("stall")
        if cut is None and stall is None:
            self.wfile.write(body)
            return
        self.wfile.write(body[: int(cut or stall or 0)])
        self.wfile.flush()
        self.close_connection = True
        if stall is not None:
            self.server_state.stopping.wait()

    def _reset(self) -> None:
        self._remember("reset")
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _remember(self, status: int | str) -> None:
        headers = self.headers
        self.server_state.remember(
            Asked(self.command, self.path, status, headers.get("Range"), headers.get("Authorization"))
        )


def write_certificate(folder: Path) -> Path:
    """Write a key and its certificate, which is its own authority, to one file: those who trust it name that file."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    places = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(places, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = folder / "loopback.pem"
    path.write_bytes(key.private_bytes(*form) + made.public_bytes(serialization.Encoding.PEM))
    return path


def serve_tls(server: Loopback, certificate: Path) -> None:
    """Have a stand-in that has not been entered yet serve over TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.serve_with(context)


_HASHES = {"md5": "md5Hash", "crc32c": "crc32c"}


class _GcsHandler(Handler):
    server_state: Gcs

    def answer(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if bucket := re.fullmatch(r"/storage/v1/b/([^/]+)", parts.path):  # the client looks, for its traces
            self.send_json({"kind": "storage#bucket", "id": bucket[1], "name": bucket[1], "location": "US"})
            return
        found = re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?", parts.path)
        if found is None:
            self._refuse(404, "Not Found")
        elif found[1] in self.server_state.denied:
            self._refuse(401, "Anonymous caller does not have storage.objects.list access to the bucket.")
        elif not (self.server_state.root / found[1]).is_dir():
            self._refuse(404, "The specified bucket does not exist.")
        elif found[2] is None:
            self._list(found[1], query)
        else:
            self._object(found[1], unquote(found[2]), query)

    def _refuse(self, status: int, why: str) -> None:
        self.send_json({"error": {"code": status, "message": why}}, status)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        base = self.server_state.root / bucket
        names = sorted(path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file())
        names = [name for name in names if name.startswith(query.get("prefix", ""))]
        first, size = int(query.get("pageToken", 0)), self.server_state.page_size
        items = [self._facts(bucket, name) for name in names[first : first + size]]
        more = {"nextPageToken": str(first + size)} if first + size < len(names) else {}
        self.send_json({"kind": "storage#objects", "items": items, **more})

    def _object(self, bucket: str, name: str, query: dict[str, str]) -> None:
        path = self.server_state.root / bucket / name
        if not path.is_file() or query.get("generation") not in (None, self._generation(path)):
            self._refuse(404, f"No such object: {bucket}/{name}")
        elif query.get("alt") != "media":
            self.send_json(self._facts(bucket, name))
        else:
            facts = self._facts(bucket, name)
            digests = ",".join(f"{key}={facts[name]}" for key, name in _HASHES.items() if name in facts)
            self.send_file(path.read_bytes(), {"X-Goog-Hash": digests, "X-Goog-Generation": facts["generation"]})

    def _generation(self, path: Path) -> str:
        """A number that another content of the object does not have."""
        return str(int(hashlib.md5(path.read_bytes()).hexdigest()[:12], 16))

    def _facts(self, bucket: str, name: str) -> dict[str, Any]:
        path = self.server_state.root / bucket / name
        data, address = path.read_bytes(), f"/storage/v1/b/{bucket}/o/{quote(name, safe='')}"
        facts = {
            "kind": "storage#object", "id": f"{bucket}/{name}/1", "name": name, "bucket": bucket, "etag": "x",
            "generation": self._generation(path), "metageneration": "1", "size": str(len(data)),
            "crc32c": base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode(),
            "selfLink": f"{self.server_state.url}{address}",
            "mediaLink": f"{self.server_state.url}/download{address}?alt=media",
        }  # fmt: skip
        if not self.server_state.without_md5:
            facts["md5Hash"] = base64.b64encode(hashlib.md5(data).digest()).decode()
        return facts


class Gcs(Loopback):
    """Buckets below `root`; those in `denied` refuse everybody. Composite objects have no MD5: `without_md5`."""

    handler = _GcsHandler

    def __init__(self, root: Path, *, page_size: int = 1000) -> None:
        super().__init__()
        self.root, self.page_size = root, page_size
        self.denied: set[str] = set()
        self.without_md5 = False

    def environment(self) -> dict[str, str]:
        """Variables for a process that is to use this server."""
        unset = ("RBTOOL_OFFLINE", "MINARI_REMOTE", "GOOGLE_APPLICATION_CREDENTIALS")
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        loopback = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        return {**inherited, **loopback, "STORAGE_EMULATOR_HOST": self.url}


class _WebHandler(Handler):
    server_state: Web

    def answer(self) -> None:
        path = self.server_state.root / unquote(urlsplit(self.path).path).lstrip("/")
        if self.server_state.token and self.headers.get("Authorization") != f"Bearer {self.server_state.token}":
            self.send(401, b"")
            return
        if not path.is_file():
            self.send(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        data = path.read_bytes()
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        if self.server_state.conditional and self.headers.get("If-Match", tag) != tag:
            self.send(412, b"")
            return
        self.send_file(data, {"ETag": tag} if self.server_state.tagged else {})

    def do_POST(self) -> None:
        """Give the token to those who prove with a key who they are."""
        self.fault = Fault("", "")
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_json({"access_token": self.server_state.token, "expires_in": 3600, "token_type": "Bearer"})


class Web(Loopback):
    """The files below `root`; with a `token` for those who send it, without `tagged` without versions.

    Without `conditional` it gives what there is also to those who ask for a version.
    """

    handler = _WebHandler

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root, self.token = root, ""
        self.tagged = self.conditional = True

    def environment(self) -> dict[str, str]:
        """Variables for a process that is to use this server, as a bucket of Google Cloud and of S3, too."""
        inherited = {name: value for name, value in os.environ.items() if name != "RBTOOL_OFFLINE"}
        inherited |= dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
        return inherited | {"STORAGE_EMULATOR_HOST": self.url, "AWS_ENDPOINT_URL": self.url}
