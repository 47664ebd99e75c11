"""Files over http: a thread-safe transport with explained failures, and base classes for sources of plain URLs.

Sources may have mirrors: base URLs in an environment variable, which are tried in order.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import socket
import ssl
import threading
import urllib.request
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote, urlsplit

from .. import __version__
from ..errors import (
    AuthorisationError,
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    NetworkError,
    RbtoolError,
    UsageError,
)
from ..format import fs
from ..format.converter import Advance, Note, RemoteDataset, RemoteFile, Source
from .fetch import fetch_files
from .transport import (
    Answer,
    ChangedMeanwhileError,
    Transient,
    Transport,
    answer_to,
    paced,
    read_seconds,
    require_network,
    retry_after,
    retrying,
)

if TYPE_CHECKING:
    import httpx2


_CONNECT_SECONDS = 10.0
_BUSY = frozenset({408, 425, 429})
_RANGE_NOT_SATISFIABLE = 416
_PROXY_HINT = "a proxy is set in the environment: check HTTPS_PROXY and HTTP_PROXY, or name the host in NO_PROXY"


class HttpTransport(Transport):
    """Reads files over http and https; the client is made at the first request and shared by all threads.

    Proxies and certificates come from the environment; `RBTOOL_TIMEOUT` is the number of seconds for which a server may
    be silent (30). `hint` is what to do when access is refused.
    """

    def __init__(self, *, hint: str = "") -> None:
        self.hint = hint
        self._client: httpx2.Client | None = None
        self._lock = threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def headers(self, address: str, url: str) -> Mapping[str, str]:
        """Return headers for requests of this address, whose `url` is given: a token, for instance.

        Authorization is not sent on to another host by redirections.
        """
        return {}

    def url(self, address: str) -> str:
        """Return the URL from which an address is requested; for addresses of http the address itself."""
        return address

    def named(self, address: str) -> str:
        """Return the name of the file at an address for messages: the last part of its path."""
        try:
            return PurePosixPath(unquote(urlsplit(address).path)).name or "the file"
        except ValueError:
            return "the file"

    def refusal(self, response: httpx2.Response, address: str) -> Exception:
        """Return the error for an answer without the file at an address, as `failure` does."""
        return failure(response, self.named(address), hint=self.hint)

    @contextlib.contextmanager
    def open(self, address: str, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        with self.open_range(address, offset, None) as opened:
            yield opened

    @contextlib.contextmanager
    def open_range(
        self, address: str, start: int, stop: int | None, version: str | None = None
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        what = self.named(address)
        with self._get(address, start, what, stop=stop, match=version) as response:
            found = _start_of(response, start, stop)
            if found is not None:
                blocks = self._blocks(response, what)
                yield found, blocks
                # A caller that has all bytes may not have read to the end of the body, which is needed to reuse the
                # connection. Without a Content-Length that could wait until the time-out, so it is left out then.
                if response.status_code == 206 and "Content-Length" in response.headers:
                    next(blocks, None)
                return
        # The range was refused, or the answer has another one.
        with self._get(address, 0, what, match=version) as response:
            if _start_of(response, 0) is None:
                raise NetworkError(f"{_host(response)} sends another part of {what} than requested")
            yield 0, self._blocks(response, what)

    @contextlib.contextmanager
    def open_version(self, address: str, offset: int, version: str | None = None) -> Iterator[Answer]:
        what = self.named(address)
        with self._get(address, offset if version else 0, what, version) as response:
            start = _start_of(response, offset)
            if start is not None:
                yield _answer(response, start, self._blocks(response, what), what)
                return
        with self._get(address, 0, what) as response:
            if _start_of(response, 0) is None:
                raise NetworkError(f"{_host(response)} sends another part of {what} than requested")
            yield _answer(response, 0, self._blocks(response, what), what)

    def look_up(self, address: str) -> tuple[int | None, str | None, bool]:
        """Return the size and the version of a file, as `Answer` has them, by a request for its first byte.

        Also return whether the server sent that byte alone: one that ignores ranges sends the whole file.
        """
        what = self.named(address)
        with self._get(address, 0, what, stop=1) as response:
            ranged = response.status_code == 206
            if ranged:  # the connection can be reused only after its body is read
                collections.deque(self._blocks(response, what), 0)
            return _size_of(response), _version_of(response), ranged

    def interrupt(self) -> None:
        with self._lock:
            sockets = list(self._sockets)
        for connection in sockets:
            with contextlib.suppress(OSError):
                # Closing a socket does not wake its readers, but shutting it down does. The method of the plain socket
                # is used because the one of a TLS socket would discard the TLS state while another thread reads.
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    @contextlib.contextmanager
    def _get(
        self, address: str, offset: int, what: str, version: str | None = None, stop: int | None = None,
        match: str | None = None,
    ) -> Iterator[httpx2.Response]:  # fmt: skip
        """Request the bytes `[offset, stop)` of an address, by default to its end.

        Answers with the status 200, 206 and, for a range, 416 are yielded; any other raises an error. With `version`
        the server sends the whole file instead of the range if it has another version (If-Range). With `match` another
        version raises ChangedMeanwhileError.
        """
        url = self.url(address)
        headers = {"Accept-Encoding": "identity", **self.headers(address, url)}
        if match is not None:
            headers["If-Match" if match.startswith('"') else "If-Unmodified-Since"] = match
        ranged = bool(offset) or stop is not None
        if ranged:
            headers["Range"] = f"bytes={offset}-" + ("" if stop is None else str(stop - 1))
            if version is not None:
                headers["If-Range"] = version
        client = self._connected()
        with contextlib.ExitStack() as stack:
            with _as_network_errors(what, self.hint):
                request = client.build_request("GET", url, headers=headers, extensions={"trace": self._watch})
                response = stack.enter_context(answer_to(client, request, self.interrupt))
            if match is not None and response.status_code == HTTPStatus.PRECONDITION_FAILED:
                raise _changed(response, what)
            if response.status_code not in (200, 206) and not (
                ranged and response.status_code == _RANGE_NOT_SATISFIABLE
            ):
                raise self.refusal(response, address)
            if match is not None and _version_of(response) != match:
                raise _changed(response, what)
            yield response

    def _blocks(self, response: httpx2.Response, what: str) -> Iterator[bytes]:
        with _as_network_errors(what, self.hint):
            yield from paced(response.iter_raw(), what)

    def _connected(self) -> httpx2.Client:
        import httpx2  # not at the top: the import would slow down every start of the command line

        with self._lock:
            if self._client is None:
                timeout = httpx2.Timeout(read_seconds(), connect=_CONNECT_SECONDS)
                agent = {"User-Agent": f"rbtool/{__version__}"}
                try:
                    self._client = httpx2.Client(timeout=timeout, headers=agent)
                except (ImportError, ValueError, httpx2.InvalidURL):
                    # Without the cause, which would show the proxy's address.
                    raise NetworkError(
                        "the proxy that the environment names cannot be used", hint=_PROXY_HINT
                    ) from None
            return self._client

    def _watch(self, event: str, info: Mapping[str, Any]) -> None:
        """Remember each new connection, so that `interrupt` can shut it down from another thread."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            connection = info["return_value"].get_extra_info("socket")
            if isinstance(connection, socket.socket):
                with self._lock:
                    self._sockets.add(connection)


def failure(cause: Exception | httpx2.Response, what: str, *, hint: str = "", done: str = "fetched from") -> Exception:
    """Return the error for an exception of the http client or for a response without the file.

    Returns a `Transient` for a temporary failure, an RbtoolError for a permanent one, and exceptions of other origin
    unchanged. Messages contain `what` was fetched and the host, but no query, user or proxy. `hint` is what to do about
    refused access; `done` is the verb in messages about failed requests, such as "sent to".
    """
    import httpx2

    if isinstance(cause, httpx2.HTTPStatusError):
        cause = cause.response
    if isinstance(cause, httpx2.Response):
        return _failed_answer(cause, what, hint)
    if isinstance(cause, httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return NetworkError(f"the address of {what} is not one of http or https")
    if isinstance(cause, httpx2.RequestError):
        return _failed_request(cause, what, done)
    return cause


def _changed(response: httpx2.Response, what: str) -> ChangedMeanwhileError:
    return ChangedMeanwhileError(
        f"{_host(response)} has another version of {what} than before: it has changed meanwhile",
        hint="open it again to read what is there now",
    )


def _failed_answer(response: httpx2.Response, what: str, hint: str) -> Exception:
    status, host = response.status_code, _host(response)
    answer = f"{status} {phrase_of(status)}".strip()
    if status == 401:
        return AuthorisationError(f"{host} gives {what} only to authenticated users ({answer})", hint=hint)
    if status == 403:
        return AuthorisationError(f"{host} refuses access to {what} ({answer})", hint=hint)
    if status in (404, 410):
        return DatasetNotFoundError(f"{host} does not have {what} ({answer})")
    if status == 407:
        return _refused_by_proxy(f"{what} could not be fetched from {host}")
    if status in _BUSY or status >= 500:
        return Transient(NetworkError(f"{host} could not give {what} now ({answer})"), asked_wait(response))
    return NetworkError(f"{host} did not give {what}: it answered {answer}")


def asked_wait(response: httpx2.Response) -> float | None:
    """Return the seconds that the server asks to wait: by Retry-After, or by its rate limit, as in `"api";r=0;t=55`."""
    asked = retry_after(response.headers.get("Retry-After"))
    window = re.search(r";\s*r=0\s*;\s*t=([0-9]{1,9})", response.headers.get("RateLimit", ""))
    return float(window[1]) if asked is None and window and response.status_code == 429 else asked


def _failed_request(error: httpx2.RequestError, what: str, done: str) -> Exception:
    import httpx2

    host = _host(error)
    failed = f"{what} could not be {done} {host}"
    if isinstance(error, httpx2.TooManyRedirects):
        return NetworkError(f"{failed}: it redirects without end")
    if isinstance(error, httpx2.LocalProtocolError):
        return NetworkError(
            f"{what} cannot be requested from {host}: the request would not be valid http",
            hint="a token must be one word, without a line break",
        )
    if isinstance(error, httpx2.ProxyError) and re.match(r"40[37]\b", str(error)):
        return _refused_by_proxy(failed)
    causes = list(causes_of(error))
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return NetworkError(
            f"{failed}: its certificate is not trusted",
            hint="SSL_CERT_FILE names the certificates to trust, if they are your own",
        )
    hint = _PROXY_HINT if isinstance(error, httpx2.ConnectError | httpx2.ProxyError) and _has_proxy() else ""
    return Transient(NetworkError(f"{failed}: {_reason(error, causes)}", hint=hint))


def _reason(error: httpx2.RequestError, causes: list[BaseException]) -> str:
    """Describe in plain words how a request failed."""
    import httpx2

    if isinstance(error, httpx2.ConnectTimeout):
        return f"no connection was made within {_CONNECT_SECONDS:g} s"
    if isinstance(error, httpx2.TimeoutException):
        return f"the server did not answer within {read_seconds():g} s"
    if isinstance(error, httpx2.ProxyError):
        return "the proxy made no connection"
    if isinstance(error, httpx2.ConnectError):
        if any(isinstance(cause, socket.gaierror) for cause in causes):
            return "its address could not be looked up"
        if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
            return "the connection was refused"
        return "it cannot be reached"
    if isinstance(error, httpx2.ProtocolError | httpx2.NetworkError):
        return "the connection broke off"
    return "it sent an invalid answer"


def _refused_by_proxy(failed: str) -> NetworkError:
    return NetworkError(
        f"{failed}: the proxy asks for a user and a password",
        hint="the address in HTTPS_PROXY or HTTP_PROXY may hold them",
    )


@contextlib.contextmanager
def _as_network_errors(what: str, hint: str) -> Iterator[None]:
    """Translate errors of the http client into rbtool's."""
    import httpx2

    try:
        yield
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise failure(error, what, hint=hint) from error


def _start_of(response: httpx2.Response, offset: int, stop: int | None = None) -> int | None:
    """Return the byte of the file at which the body starts; None if it is unknown or after `offset`.

    With a `stop` it has to start exactly at `offset`: an earlier start may be the late answer to another request.
    """
    if response.status_code == 200:
        return 0
    found = re.fullmatch(r"bytes ([0-9]{1,18})-[0-9]+/(?:[0-9]+|\*)", response.headers.get("Content-Range", "").strip())
    if response.status_code != 206 or found is None:
        return None
    start = int(found[1])
    return start if start == offset or (start < offset and stop is None) else None


def _answer(response: httpx2.Response, start: int, blocks: Iterator[bytes], what: str) -> Answer:
    """Return the answer of a response; NetworkError if it is encoded although no encoding was requested."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise NetworkError(f"{_host(response)} sends {what} in the encoding {encoding}, expected none")
    chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
    size = None if chunked and response.status_code == 200 else _size_of(response)
    return Answer(start, blocks, size, _version_of(response), ends=chunked or "Content-Length" in response.headers)


def _size_of(response: httpx2.Response) -> int | None:
    """Return the size of the whole file; None if the response does not state it."""
    if response.status_code in (206, _RANGE_NOT_SATISFIABLE):
        found = re.fullmatch(
            r"bytes (?:[0-9]+-[0-9]+|\*)/([0-9]{1,18})", response.headers.get("Content-Range", "").strip()
        )
    else:
        found = re.fullmatch(r"([0-9]{1,18})", response.headers.get("Content-Length", "").strip())
    return int(found[1]) if found else None


def _version_of(response: httpx2.Response) -> str | None:
    """Return a strong validator: an ETag that is not weak, or a date of modification at least a second ago."""
    tag = response.headers.get("ETag", "").strip()
    if tag:
        return tag if re.fullmatch(r'"[\x21\x23-\x7e]*"', tag) else None
    modified = response.headers.get("Last-Modified", "").strip()
    try:
        age = parsedate_to_datetime(response.headers.get("Date", "")) - parsedate_to_datetime(modified)
        return modified if age.total_seconds() >= 1 else None
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None


def _host(cause: httpx2.Response | httpx2.RequestError) -> str:
    try:
        return cause.request.url.host
    except RuntimeError:  # made by hand: it has no request
        return "the server"


def phrase_of(status: int) -> str:
    """Return the standard phrase of a status; "" for an unknown one."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, the most recent first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _has_proxy() -> bool:
    return any(urllib.request.getproxies().get(scheme) for scheme in ("http", "https", "all"))


class HttpSource(Source):
    """Datasets whose files are behind http or https addresses, with or without checksums.

    A subclass implements `remote`, `list_ids` and `addresses`, and `checksums` if they are known. A file without a
    checksum is compared with the size that its server states, and the manifest records that it is not verified by the
    remote. Such a source has no revisions.

    `look_up` calls `list_ids`, which should therefore cache a list that it requests. A request that does not go through
    `probe` has to call `require_network` first, since the transport ignores `RBTOOL_OFFLINE`.
    """

    def __init__(self) -> None:
        self.transport = HttpTransport()

    @abstractmethod
    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        """Return the addresses of every file of a dataset, in the order in which to try them, by the file's path."""

    def checksums(self, dataset_id: str) -> Mapping[str, str]:
        """Return the checksums that are known (`sha256:…`) by the file's path; none by default."""
        return {}

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Request the size and version of each file from its server."""
        if revision is not None:
            raise UsageError(f"{self.remote} keeps no revisions", hint="leave out --revision")
        if dataset_id not in self.ids().ids:
            raise DatasetNotFoundError(f"{self.remote} has no dataset {dataset_id}")
        known = self.checksums(dataset_id)
        files = [
            self.probe(path, places, known.get(path)) for path, places in sorted(self.addresses(dataset_id).items())
        ]
        return RemoteDataset(dataset_id, f"{self.remote.rstrip('/')}/{dataset_id}", None, tuple(files))

    def probe(self, path: str, addresses: Sequence[str], checksum: str | None = None) -> RemoteFile:
        """Request size and version of a file from the first server that answers; raise the first failure if none."""
        failures: list[RbtoolError] = []
        for address in addresses:
            require_network(f"asking {urlsplit(address).hostname}")
            try:
                size, version = retrying(lambda address=address: self._ask(address))  # type: ignore[misc]
            except RbtoolError as error:
                failures.append(error)
                continue
            if size is None and checksum is not None:
                failures.append(NetworkError(f"{urlsplit(address).hostname} does not give the size of {path}"))
                continue
            return RemoteFile(path, size, checksum, tuple(addresses), None if checksum else version)
        raise failures[0] if failures else DatasetNotFoundError(f"{self.remote} has no address for {path}")

    def _ask(self, address: str) -> tuple[int | None, str | None]:
        with self.transport.open_version(address, 0) as answer:
            return answer.size, answer.version

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Fetch the files into `folder`, a few at a time."""
        for host in {urlsplit(address).hostname for file in files for address in file.addresses}:
            require_network(f"fetching from {host}")
        fetch_files(files, folder, self.transport, progress=progress, note=note)

    def on_close(self) -> None:
        """Close the connections."""
        self.transport.close()


_ADDRESS = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", re.ASCII)  # without passwords, since addresses are recorded


@contextlib.contextmanager
def hint_on_failure(hint: str) -> Iterator[None]:
    """Add a hint to network errors that have none."""
    try:
        yield
    except (NetworkError, AuthorisationError, DatasetNotFoundError) as error:
        error.hint = error.hint or hint
        raise


class MirrorSource(HttpSource):
    """A source of files below base URLs (http or https), which an environment variable can replace by mirrors.

    A file with a checksum must match it. Any other file must begin with a signature of the format and pass
    `require_readable`; otherwise the next mirror is tried.
    """

    namespaced = False
    title: ClassVar[str]
    """The name of the format in sentences."""
    bases_variable: ClassVar[str]
    """The environment variable with base URLs, separated by blanks or commas, in the order in which to try them."""
    defaults: ClassVar[tuple[str, ...]]
    """The base URLs if that variable is not set."""
    signatures: ClassVar[tuple[bytes, ...]]
    """The possible first bytes of files, all of the same length."""
    server_hint: ClassVar[str] = ""
    """What a user can do if the servers fail: the hint of network errors that have none."""

    @abstractmethod
    def require_readable(self, path: Path) -> None:
        """Open a fetched file; FormatError if it is not in the format."""

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Describe the files of a dataset; UsageError for a revision, which mirrors do not keep."""
        if revision is not None:
            raise UsageError(f"{self.remote} keeps no revisions", hint="leave out --revision")
        files = self.find_files(dataset_id)
        return RemoteDataset(dataset_id, files[0].addresses[0], None, tuple(files))

    def find_files(self, dataset_id: str) -> Sequence[RemoteFile]:
        """Request size and version of the files of a dataset; DatasetNotFoundError if it is not published."""
        addresses = self.addresses(dataset_id)
        with self.explained():
            return [self.described(path, places) for path, places in addresses.items()]

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """Return the id, which the names of the files do not contain in full."""
        return {"id": dataset_id}

    def explained(self, file: RemoteFile | None = None) -> AbstractContextManager[None]:
        """Return a context that adds `server_hint` to network errors; they concern `file`, if it is known."""
        return hint_on_failure(self.server_hint)

    @property
    def bases(self) -> tuple[str, ...]:
        """The base URLs, without a slash at the end; UsageError if the variable has another form."""
        named = os.environ.get(self.bases_variable, "").replace(",", " ").split()
        for base in named:
            if not _ADDRESS.fullmatch(base):
                raise UsageError(
                    f"{self.bases_variable} has {re.sub('//[^/]*@', '//…@', base)!r}; base URLs like "
                    f"{self.defaults[0]} are expected",
                    hint=f"unset it for {self.defaults[0]}",
                )
        return tuple(base.rstrip("/") for base in named) or self.defaults

    @property
    def remote(self) -> str:
        """The first base URL."""
        return self.bases[0]

    def described(self, path: str, addresses: Sequence[str]) -> RemoteFile:
        """Describe a file by the first mirror that sends the right format; the later mirrors stay as alternatives."""
        failures: list[RbtoolError] = []
        for count, address in enumerate(addresses):
            require_network(f"asking {urlsplit(address).hostname}")
            try:
                size, version = retrying(lambda address=address: self._asked(path, address))  # type: ignore[misc]
            except RbtoolError as error:
                failures.append(error)
                continue
            return RemoteFile(path, size, None, tuple(addresses[count:]), version)
        raise failures[0]

    def _asked(self, path: str, address: str) -> tuple[int | None, str | None]:
        with self.transport.open_version(address, 0) as answer:
            head = b""
            while len(head) < len(self.signatures[0]) and (block := next(answer.blocks, b"")):
                head += block
            if not head.startswith(self.signatures):
                raise self._no_file(path, address, f"it begins with {head[:16]!r}")
            return answer.size, answer.version

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Fetch the files into `folder`."""
        for file in files:
            with self.explained(file):
                if file.checksum is not None:
                    super().download([file], folder, progress, note)
                else:
                    self._download_unverified(file, folder, progress, note)

    def _download_unverified(self, file: RemoteFile, folder: Path, progress: Advance, note: Note) -> None:
        """Fetch a file without a checksum from the first mirror that has it in the right format."""
        failures: list[RbtoolError] = []
        for address in file.addresses:
            received = 0

            def count(amount: int) -> None:
                nonlocal received
                received += amount
                progress(amount)

            try:
                super().download([replace(file, addresses=(address,))], folder, count, note)
                self._require_readable(folder / file.path, address)
            except (FormatError, NetworkError, AuthorisationError, DatasetNotFoundError) as error:
                progress(-received)
                failures.append(error)
                if address != file.addresses[-1]:
                    note(f"{error.message}: the next mirror is asked")
                continue
            return
        raise failures[0]

    def _require_readable(self, path: Path, address: str) -> None:
        """Open a fetched file, and remove it if it is not in the format."""
        try:
            self.require_readable(path)
        except FormatError as error:
            fs.remove(path)
            raise self._no_file(path.name, address, error.message) from error

    def _no_file(self, name: str, address: str, why: str) -> CorruptDataError:
        return CorruptDataError(
            f"{urlsplit(address).hostname} sends no {self.title} file as {name}, and nothing was kept: {why}",
            hint=f"try again later, or name another mirror: {self.bases_variable}=BASE",
        )
