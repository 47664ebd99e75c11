"""Public buckets of Google Cloud Storage, read through its own client without an account: the extra `gcp`."""

from __future__ import annotations

import base64
import binascii
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from ..errors import AuthorisationError, DatasetNotFoundError, FormatError, NetworkError, RbtoolError, UsageError
from ..format.converter import StaleListing
from ..format.manifest import is_inside
from .http import causes_of
from .transport import (
    ERROR_BYTES,
    PAGES,
    Transient,
    Transport,
    head_in_time,
    paced,
    read_seconds,
    require_network,
    retry_after,
    retrying,
)

_PIECE = 8 << 20
_CONNECT_SECONDS = 10.0
_ANSWER_BYTES = 64 << 20
_OBJECTS = 1_000_000
_BUSY = frozenset({408, 429})
_FIRST_ERROR = 400
_NONSENSE = (AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""Errors that the client raises for answers of an unexpected form."""


@dataclass(frozen=True, slots=True)
class BucketObject:
    """An object of a bucket at the generation in the listing, with its checksum, `md5:…` or `crc32c:…`."""

    name: str
    size: int
    checksum: str
    address: str


class Bucket(Transport):
    """One bucket, and a transport for the objects in it. `STORAGE_EMULATOR_HOST` names another server.

    Retries of the client are off: its temporary failures become `Transient`, which `retrying` repeats as for other
    transports. UsageError if the client is not installed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._client: Any = None
        self._lock = threading.Lock()

    def objects(self, prefix: str = "") -> list[BucketObject]:
        """List all objects whose names begin with `prefix`, in one request for about 1,000 objects."""
        what = f"the list of gs://{self.name}/{prefix}"
        return retrying(lambda: self._list(prefix, what))

    @contextlib.contextmanager
    def open(self, address: str, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        parts = urlsplit(address)
        generation, _, size = parts.fragment.partition("/")
        name = unquote(parts.path.removeprefix("/"))
        if parts.scheme != "gs" or parts.netloc != self.name or not (generation + size).isdecimal():
            raise FormatError(f"{address} is not the address of an object in gs://{self.name}")
        require_network(f"fetching from gs://{self.name}")
        blob = self._connected().bucket(self.name).blob(name, generation=int(generation))
        yield offset, _pieces(blob, offset, int(size), f"gs://{self.name}/{name}")

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _list(self, prefix: str, what: str) -> list[BucketObject]:
        require_network(f"asking for {what}")
        client = self._connected()
        found: list[BucketObject] = []
        with _as_network_errors(what):
            pages = client.list_blobs(self.name, prefix=prefix, retry=None, timeout=_timeout()).pages
            for number, page in enumerate(pages):
                found += [self._object(blob) for blob in page if is_inside(blob.name)]  # skips objects of folders, `a/`
                if number >= PAGES or len(found) > _OBJECTS:
                    raise FormatError(f"{what} has no end: {number + 1:,} pages and {len(found):,} objects came")
        return found

    def _object(self, blob: Any) -> BucketObject:
        md5, crc32c = _hex(blob.md5_hash, 16), _hex(blob.crc32c, 4)
        checksum = f"md5:{md5}" if md5 else f"crc32c:{crc32c}" if crc32c else None
        if checksum is None or blob.size is None or blob.generation is None:
            raise FormatError(f"gs://{self.name} lists {blob.name!r} without a usable size, generation or checksum")
        address = f"gs://{self.name}/{quote(blob.name)}#{blob.generation}/{blob.size}"
        return BucketObject(blob.name, int(blob.size), checksum, address)

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                try:
                    # Takes a third of a second to load, and is an extra.
                    from google.cloud import storage  # type: ignore[import-untyped]
                except ImportError as error:
                    raise UsageError(
                        f"gs://{self.name} needs the package google-cloud-storage, which is not installed",
                        hint="pip install 'rbtool[gcp]'",
                    ) from error
                self._client = storage.Client.create_anonymous_client()
                self._client._bucket_metadata_cache = None  # it would also request the bucket's metadata, in a thread
                adapter = _bounded_adapter()
                for scheme in ("https://", "http://"):
                    self._client._http.mount(scheme, adapter)
            return self._client


class _AnswerError(Exception):
    """An answer with an error status, and the seconds to wait if the server states them."""

    def __init__(self, status: int, wait: float | None = None) -> None:
        super().__init__(status)
        self.status = status
        self.wait = wait


def _bounded_adapter() -> Any:
    """Create the adapter that sends the client's requests, and limits the size of answers, which the client does not.

    Answers with an error status are raised as _AnswerError before the client parses their body: it expects a form that
    proxies and gateways do not send.
    """
    from requests.adapters import HTTPAdapter
    from urllib3 import ProxyManager

    pools = _timely_pools()

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *arguments: Any, **named: Any) -> None:
            super().init_poolmanager(*arguments, **named)
            self.poolmanager.pool_classes_by_scheme = pools

        def proxy_manager_for(self, *arguments: Any, **named: Any) -> Any:
            manager = super().proxy_manager_for(*arguments, **named)
            if isinstance(manager, ProxyManager):  # a SOCKS proxy has other classes of connections
                manager.pool_classes_by_scheme = pools
            return manager

        def send(self, *arguments: Any, **named: Any) -> Any:
            response = super().send(*arguments, **named)
            if response.status_code >= _FIRST_ERROR:
                response.close()
                raise _AnswerError(response.status_code, retry_after(response.headers.get("Retry-After")))
            response.raw = _BoundedBody(response.raw, whole=response.status_code in {200, 206})
            return response

    return Adapter()


def _timely_pools() -> dict[str, Any]:
    """Return classes of urllib3's connection pools, by scheme, that limit the time until the headers have arrived."""
    from urllib3.connection import HTTPConnection, HTTPSConnection
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

    def timely(connection: Any, pool: Any) -> Any:
        class Timely(connection):  # type: ignore[misc]
            def getresponse(self) -> Any:
                waiting, late = self.sock, threading.Event()

                def break_off() -> None:
                    late.set()
                    with contextlib.suppress(OSError):
                        socket.socket.shutdown(waiting, socket.SHUT_RDWR)

                with head_in_time(break_off):
                    response = super().getresponse()
                if late.is_set():  # the part that arrived may look complete
                    raise TimeoutError("the head of the answer came too slowly")
                return response

        return type(pool.__name__, (pool,), {"ConnectionCls": Timely})

    return {"http": timely(HTTPConnection, HTTPConnectionPool), "https": timely(HTTPSConnection, HTTPSConnectionPool)}


class _BoundedBody:
    """A body of urllib3 with a limit on its unpacked size; a longer one is an error if `whole`, and cut otherwise."""

    def __init__(self, body: Any, *, whole: bool) -> None:
        self._body = body
        self._whole = whole
        self._limit = _ANSWER_BYTES if whole else ERROR_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)

    def stream(self, amount: int = 1 << 16, decode_content: bool | None = None) -> Iterator[bytes]:
        """Yield the body in blocks."""
        encoding = str(self._body.headers.get("Content-Encoding", "")).strip().lower()
        if decode_content and encoding not in {"", "identity", "gzip", "deflate"}:
            raise FormatError(f"a server's answer is compressed by {encoding!r:.40}, expected no compression")
        total = 0
        # Not `stream` of the body itself, which waits until a block is full.
        blocks = iter(lambda: self._body.read1(amount, decode_content), b"")
        try:
            for block in paced(blocks, "a server's answer"):
                total += len(block)
                if total <= self._limit:
                    yield block
                elif self._whole:
                    raise FormatError(f"a server's answer has more than {self._limit:,} bytes")
                else:
                    return
        finally:
            self._body.close()  # the client does not close a body that it has not read to its end

    def read(self, *arguments: Any, **named: Any) -> bytes:
        """Return nothing: the caller would discard the bytes."""
        return b""


def _pieces(blob: Any, offset: int, size: int, what: str) -> Iterator[bytes]:
    """Yield the bytes from `offset` on, 8 MiB at a time, as they are stored."""
    while offset < size:
        stop = min(offset + _PIECE, size)
        with _as_network_errors(what):
            piece: bytes = blob.download_as_bytes(
                start=offset, end=stop - 1, raw_download=True, checksum=None, retry=None, timeout=_timeout()
            )
        yield piece
        if len(piece) != stop - offset:
            raise Transient(NetworkError(f"{what} came with {len(piece):,} of {stop - offset:,} bytes"))
        offset = stop


def _timeout() -> tuple[float, float]:
    return _CONNECT_SECONDS, read_seconds()


def _hex(text: str | None, length: int) -> str | None:
    """Turn the base64 of a checksum into hex digits."""
    try:
        found = base64.b64decode(text or "", validate=True)
    except binascii.Error:
        return None
    return found.hex() if len(found) == length else None


@contextlib.contextmanager
def _as_network_errors(what: str) -> Iterator[None]:
    """Translate errors of the client into rbtool's."""
    import google.auth.exceptions
    import requests
    import urllib3
    from google.api_core import exceptions

    try:
        yield
    except RbtoolError:
        raise
    except _AnswerError as error:
        raise _answered(error, what) from error
    except exceptions.GoogleAPICallError as error:  # a status below 400 other than success
        raise _answered(_AnswerError(int(error.code or 0)), what) from error
    except requests.exceptions.SSLError as error:
        raise _insecure(error, what) from error
    except requests.exceptions.InvalidURL:  # without the cause, which would show the address of a proxy
        said = f"{what} could not be fetched: the address of the server, or that of the proxy, cannot be used"
        raise NetworkError(said, hint="check STORAGE_EMULATOR_HOST, HTTPS_PROXY and HTTP_PROXY") from None
    except requests.exceptions.ProxyError as error:
        raise Transient(NetworkError(f"{what} could not be fetched: the proxy made no connection")) from error
    except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError) as error:
        said = f"{what} could not be fetched: the server did not answer within {read_seconds():g} s"
        raise Transient(NetworkError(said)) from error
    except (OSError, urllib3.exceptions.HTTPError, google.auth.exceptions.TransportError) as error:
        raise Transient(NetworkError(f"{what} could not be fetched: the connection broke off")) from error
    except _NONSENSE as error:  # an answer of a faulty server, or of a proxy on the way to it
        said = f"the server's answer about {what} makes no sense: {type(error).__name__}"
        raise Transient(FormatError(said)) from error


def _insecure(error: BaseException, what: str) -> Exception:
    """Return the error for a failed TLS connection; an untrusted certificate is not retried."""
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes_of(error)):
        return NetworkError(
            f"{what} could not be fetched: the server's certificate is not trusted",
            hint="REQUESTS_CA_BUNDLE names the certificates to trust, if they are your own",
        )
    return Transient(NetworkError(f"{what} could not be fetched: the connection broke off"))


def _answered(error: _AnswerError, what: str) -> Exception:
    """Return the error for an answer without the object."""
    status = error.status
    if status in (401, 403):
        return _refused(what, status)
    if status == 404:
        kind = DatasetNotFoundError if what.startswith("the list") else StaleListing
        return kind(f"{what} is not there: the server answered 404")
    if status in _BUSY or status >= 500:
        return Transient(NetworkError(f"{what} is not available now: the server answered {status}"), error.wait)
    return NetworkError(f"{what} is not available: the server answered {status}")


def _refused(what: str, status: int) -> AuthorisationError:
    hint = "only public buckets can be read"
    return AuthorisationError(f"{what} is not public: the server answered {status}", hint=hint)
