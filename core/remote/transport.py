"""The contract of transports, and the limits on what they read: size, time, and whether the network may be used."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from ..errors import CorruptDataError, FormatError, NetworkError, UsageError
from ..format.contracts import Closing
from .checksums import hasher
from .retries import Transient, retrying

if TYPE_CHECKING:
    import httpx2


ERROR_BYTES = 64 << 10
"""Bytes of an answer that is no file and no listing: of an error, or of a redirection."""
PAGES = 2_000
"""Pages of one listing, of about a thousand entries each."""
LEAST_RATE = 128
"""Bytes a second: a server that sends fewer for a while is given up like one that is silent."""
_REDIRECTIONS = 20
_ANSWER_TIMES = 4  # the time-out of a single read, within which a whole head has to come
_READ_SECONDS = 30.0
_TIMEOUT = "RBTOOL_TIMEOUT"
_GZIP_OR_ZLIB = 47


def read_seconds() -> float:
    """Seconds of silence after which a server is given up: `RBTOOL_TIMEOUT`, else 30."""
    text = os.environ.get(_TIMEOUT, "").strip()
    try:
        seconds = float(text) if text else _READ_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UsageError(f"{_TIMEOUT}={text} is no time to wait: a number of seconds above 0 was expected")
    return seconds


@contextlib.contextmanager
def head_in_time(interrupt: Callable[[], None]) -> Iterator[None]:
    """Call `interrupt`, which breaks the connection off, in another thread if the head of an answer takes too long."""
    late = threading.Timer(_ANSWER_TIMES * read_seconds(), interrupt)
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


@contextlib.contextmanager
def answer_to(
    client: httpx2.Client, request: httpx2.Request, interrupt: Callable[[], None]
) -> Iterator[httpx2.Response]:
    """Send a request and give the answer, its body unread; redirections are followed without reading theirs.

    `interrupt` breaks connections off: it is called from another thread when the head of an answer takes too long,
    which the time-out of single reads does not bound.
    """
    import httpx2

    for _ in range(_REDIRECTIONS + 1):
        with head_in_time(interrupt):
            response = client.send(request, stream=True, follow_redirects=False)
        with contextlib.closing(response):
            if response.next_request is None:
                yield response
                return
            request = response.next_request
    raise httpx2.TooManyRedirects("too many redirections", request=request)


def paced(blocks: Iterable[bytes], what: str) -> Iterator[bytes]:
    """Yield blocks; raise Transient when they come at fewer than 128 bytes a second. Only waiting for them counts."""
    seconds = read_seconds()
    iterator = iter(blocks)
    waited, received = 0.0, 0
    while True:
        start = time.monotonic()
        block = next(iterator, None)
        if block is None:
            return
        waited += time.monotonic() - start
        received += len(block)
        if waited > seconds:
            if received < seconds * LEAST_RATE:
                raise Transient(NetworkError(f"{what} comes too slowly: {received:,} bytes in {waited:.0f} s"))
            waited, received = 0.0, 0
        yield block


def bounded(blocks: Iterable[bytes], encoding: str, limit: int, what: str) -> bytes:
    """Put a body together and unpack it (gzip, zlib); FormatError for one of more than `limit` bytes when unpacked."""
    known = {"": None, "identity": None, "gzip": _GZIP_OR_ZLIB, "deflate": _GZIP_OR_ZLIB}
    if encoding not in known:
        raise FormatError(f"{what} is compressed by {encoding!r:.40}, which was not asked for")
    form = known[encoding]
    unpacker = None if form is None else zlib.decompressobj(form)
    data = bytearray()
    try:
        for block in blocks:
            data += block if unpacker is None else unpacker.decompress(block, limit + 1 - len(data))
            if len(data) > limit:
                raise FormatError(f"{what} has more than {limit:,} bytes")
    except zlib.error as error:
        raise Transient(NetworkError(f"{what} makes no sense: it is not {encoding}")) from error
    if unpacker is not None and not unpacker.eof:
        raise Transient(NetworkError(f"{what} broke off"))
    return bytes(data)


class Answer(NamedTuple):
    """The bytes of a file from byte `start` on, in blocks, and which version of the file they are of.

    `size` is that of the whole file. `version` is a validator that only these very bytes have (a strong ETag, or a
    date of modification that is precise enough); both are None if the remote does not give them. `ends` states that the
    end of the blocks is certainly the end of the file, which an answer of unknown length may not state.
    """

    start: int
    blocks: Iterator[bytes]
    size: int | None = None
    version: str | None = None
    ends: bool = False


class Transport(Closing, ABC):
    """Reads the bytes behind addresses; safe to use from several threads at once."""

    @abstractmethod
    def open(self, address: str, offset: int) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """Begin to read at byte `offset` and give where the bytes start, and the bytes in blocks.

        They start at 0, or anywhere before `offset`, where the remote cannot begin at any byte. Opening and reading
        raise Transient for what may pass, and NetworkError, AuthorisationError or DatasetNotFoundError.
        """

    @contextlib.contextmanager
    def open_version(self, address: str, offset: int, version: str | None = None) -> Iterator[Answer]:
        """Begin to read as `open` does, and state what the remote has: for files without a checksum.

        With `version`, bytes from `offset` on are only asked for if the remote still has that version; whether it has
        is what the answer's `version` states. A transport without this method supports no versions and no sizes.
        """
        with self.open(address, offset) as (start, blocks):
            yield Answer(start, blocks)

    def interrupt(self) -> None:
        """Make reads that wait in other threads fail now; what is asked for later is not affected."""


_OURS = "RBTOOL_OFFLINE"
_TRUE = frozenset({"1", "true", "yes", "on"})


def require_network(what: str, *variables: str) -> None:
    """Raise NetworkError if the environment forbids the network to what is about to be done.

    `RBTOOL_OFFLINE` counts always, each of `variables` (`HF_HUB_OFFLINE` for a hub) as well; 1, true, yes and on in
    any case forbid, everything else does not. `what` begins the sentence: `listing hf://ORGANISATION`.
    """
    for variable in (_OURS, *variables):
        value = os.environ.get(variable, "").strip()
        if value.lower() in _TRUE:
            raise NetworkError(f"{what} needs the network, which {variable}={value} forbids", hint=f"unset {variable}")


def read_small(
    transport: Transport,
    address: str,
    *,
    limit: int,
    size: int | None = None,
    checksum: str | None = None,
) -> bytes:
    """Read a file into memory, trying again what may pass, and verify it where its size and checksum are known.

    Raises FormatError for one of more than `limit` bytes, CorruptDataError if the bytes never match, and what the
    transport raises.
    """

    def attempt() -> bytes:
        data = bytearray()
        with transport.open(address, 0) as (_, blocks):
            for block in blocks:
                data += block
                if len(data) > limit:
                    raise FormatError(f"{address} has more than the {limit:,} bytes that are expected there")
        if size is not None and checksum is not None:
            checking = hasher(checksum, size)
            checking.update(data)
            if len(data) != size or not checking.matches():
                raise Transient(CorruptDataError(f"{address} came with {len(data):,} bytes that are not {checksum}"))
        return bytes(data)

    return retrying(attempt)
