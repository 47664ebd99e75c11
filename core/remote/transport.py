"""The contract of transports; limits on size and time; checksums of remotes; retries; whether the network may be used.

Checksums are sha256, ids of git blobs, md5 and crc32c.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import io
import logging
import os
import random
import re
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import CorruptDataError, FormatError, NetworkError, RbtoolError, UsageError
from ..format.contracts import Closing
from ..format.files import open_regular, reading_from

if TYPE_CHECKING:
    import httpx2
    import tenacity


_BLOCK = 1 << 20


class ChecksumHasher:
    """Hashes the bytes of one file in order, and compares them with the announced checksum."""

    def __init__(self, checksum: str, state: Any) -> None:
        self.expected = checksum
        self._kind = checksum.partition(":")[0]
        self._state = state

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes."""
        self._state.update(data)

    @property
    def found(self) -> str:
        """The checksum of the bytes so far, written like the one expected."""
        return f"{self._kind}:{self._state.hexdigest()}"

    def matches(self) -> bool:
        """Return whether the bytes so far match the announced checksum."""
        return self.found == self.expected


class _Crc32c:
    """The CRC32C checksum of buckets, with the methods of hashlib's hashers."""

    def __init__(self) -> None:
        try:
            import google_crc32c
        except ImportError as error:
            raise UsageError(
                "checking crc32c checksums needs the package google-crc32c, which is not installed",
                hint="pip install 'rbtool[gcp]'",
            ) from error
        self._extend: Callable[[int, bytes], int] = google_crc32c.extend
        self._value = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        self._value = self._extend(self._value, bytes(data))

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class _Kind(NamedTuple):
    """A kind of checksum: its number of hex digits, and a function that creates a hasher for a file of a given size."""

    digits: int
    begin: Callable[[int], Any]


_KINDS = {
    "sha256": _Kind(64, lambda size: hashlib.sha256()),
    "git-sha1": _Kind(40, lambda size: hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)),
    "md5": _Kind(32, lambda size: hashlib.md5(usedforsecurity=False)),
    "crc32c": _Kind(8, lambda size: _Crc32c()),
}


def hasher(checksum: str, size: int) -> ChecksumHasher:
    """Create a hasher that compares a file of `size` bytes with a checksum.

    The checksum is `sha256:…`, `git-sha1:…` (the id of the git blob, whose hash includes the size), `md5:…` or
    `crc32c:…`, in lower-case hex. FormatError for any other text, UsageError for crc32c without the extra `gcp`.
    """
    kind, _, digits = checksum.partition(":")
    known = _KINDS.get(kind)
    if known is None:
        raise FormatError(f"the checksum {checksum!r} is of an unknown kind, expected one of {', '.join(_KINDS)}")
    if not re.fullmatch(f"[0-9a-f]{{{known.digits}}}", digits):
        raise FormatError(f"the checksum {checksum!r} is not {kind}: and {known.digits} lower-case hex digits")
    return ChecksumHasher(checksum, known.begin(size))


def matches(path: Path, size: int, checksum: str, *, within: int | None = None) -> bool:
    """Return whether the file at `path` has this size and checksum; its bytes are read only if the size is right.

    `within` is the descriptor of the parent folder; a link, or anything else but a file, does not match.
    """
    checking = hasher(checksum, size)
    try:
        descriptor = open_regular(path, within=within)
    except (FormatError, OSError):
        if within is None:
            raise
        return False
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if os.fstat(descriptor).st_size != size:
            return False
        with reading_from(path):
            for block in blocks_of(file):
                checking.update(block)
    return checking.matches()


def blocks_of(file: io.FileIO) -> Iterator[memoryview]:
    """Yield the bytes of a file in blocks of 1 MiB; the next block overwrites the one before."""
    buffer = memoryview(bytearray(_BLOCK))
    while got := file.readinto(buffer):
        yield buffer[:got]


T = TypeVar("T")

_LOG = logging.getLogger("rbtool.remote")
_LOG.addHandler(logging.NullHandler())  # without one, Python prints warnings of libraries on stderr
_VARIABLE = "RBTOOL_RETRIES"


class Transient(Exception):
    """A temporary failure, after which a retry may succeed. `error` is raised after the last attempt.

    `retry_after` is the number of seconds that the server asks to wait, None if it does not state it.
    """

    def __init__(self, error: RbtoolError, retry_after: float | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.retry_after = retry_after


class ChangedMeanwhileError(NetworkError):
    """A remote has changed since the state for which a request was made."""


@dataclass(frozen=True, slots=True)
class Patience:
    """The number of attempts and the waits between them, in seconds: doubled each time, up to `longest_wait`.

    A server may ask for a wait of up to `longest_asked`; if it asks for more, the attempt is the last one.
    """

    attempts: int = 5
    first_wait: float = 0.5
    longest_wait: float = 30.0
    longest_asked: float = 300.0

    @classmethod
    def from_environment(cls) -> Patience:
        """Read `RBTOOL_RETRIES`: the number of attempts and, after a colon, the first wait, as in `8` or `8:0.05`.

        Raises UsageError for anything else.
        """
        text = os.environ.get(_VARIABLE, "").strip()
        if not text:
            return cls()
        attempts, colon, wait = text.partition(":")
        try:
            patience = cls(int(attempts), float(wait)) if colon else cls(int(attempts))
        except ValueError:
            patience = cls(0)
        if patience.attempts < 1 or not 0 <= patience.first_wait <= patience.longest_wait:
            raise UsageError(
                f"{_VARIABLE}={text} does not say how often to try: a number of attempts from 1 was expected, "
                "and perhaps the first wait in seconds, up to 30",
                hint=f"for instance {_VARIABLE}=8 or {_VARIABLE}=8:0.5",
            )
        return patience

    def wait(self, attempt: int) -> float:
        """Return the seconds to wait after attempt number `attempt` (from 1): 50 % to 100 % of the doubled wait.

        The random part keeps many clients that failed at the same time from retrying at the same time.
        """
        full = min(self.longest_wait, self.first_wait * 2.0 ** min(attempt - 1, 64))
        return full * random.uniform(0.5, 1.0)


def retrying(
    call: Callable[[], T],
    *,
    note: Callable[[str], None] | None = None,
    attempts: int | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Call until no Transient is raised, waiting longer each time, or exactly as long as the server asks.

    `attempts` replaces the number of `Patience.from_environment`. Before each wait `note`, or else the log at level
    WARNING, receives the error and the time until the next attempt. Raises the `error` of the last Transient, or of the
    first one for which the server asks to wait too long. Other exceptions pass through. Signals interrupt the wait.
    """
    import tenacity  # not at the top: the import would slow down every start of the command line

    patience = Patience.from_environment()
    limit = max(1, patience.attempts if attempts is None else attempts)

    def report(state: tenacity.RetryCallState) -> None:
        wait = state.next_action.sleep if state.next_action else 0.0
        text = f"{_failure(state)}; trying again in {wait:.3g} s ({state.attempt_number} of {limit} attempts made)"
        _LOG.log(logging.WARNING if note is None else logging.INFO, text)
        if note is not None:
            note(text)

    def wait(state: tenacity.RetryCallState) -> float:
        asked = _failure(state).retry_after
        return patience.wait(state.attempt_number) if asked is None else asked

    def stop(state: tenacity.RetryCallState) -> bool:
        return state.attempt_number >= limit or (_failure(state).retry_after or 0.0) > patience.longest_asked

    loop = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(Transient),
        wait=wait,
        stop=stop,
        sleep=sleep,
        before_sleep=report,
        reraise=True,
    )
    try:
        return loop(call)
    except Transient as last:
        raise _final(last, patience) from last


def retry_after(header: str | None) -> float | None:
    """Read a Retry-After header, seconds or an HTTP date, as seconds from now; None if it states neither."""
    text = (header or "").strip()
    if text.isascii() and text.isdecimal():
        return min(float(text), 1e9)
    try:
        when = email.utils.parsedate_to_datetime(text)
        return max(0.0, when.timestamp() - time.time())
    except (ArithmeticError, LookupError, TypeError, ValueError):  # the header is not a date
        return None


def _failure(state: tenacity.RetryCallState) -> Transient:
    """Return the failure of an attempt, which is a Transient because nothing else is retried."""
    error = state.outcome.exception() if state.outcome else None
    assert isinstance(error, Transient)
    return error


def _final(last: Transient, patience: Patience) -> RbtoolError:
    if last.retry_after is None or last.retry_after <= patience.longest_asked:
        return last.error
    return type(last.error)(
        f"{last.error.message}; the server asks to wait for {last.retry_after:,.0f} s",
        hint=last.error.hint or "try again then",
    )


ERROR_BYTES = 64 << 10
"""Limit on the size of an answer that is neither a file nor a listing, such as an error or a redirection."""
PAGES = 2_000
"""Limit on the number of pages of a listing, with about a thousand entries each."""
LEAST_RATE = 128
"""Bytes a second: a server that sends fewer for a while is treated like a silent one."""
SLOW_SECONDS = 5.0
"""Seconds without an answer, or with less than 2 kB a second, after which a log record calls the server slow."""
_REDIRECTIONS = 20
_SLOW_RATE = 2_000
_ANSWER_TIMES = 4  # time limit for the headers of an answer, in time-outs of a single read
_READ_SECONDS = 30.0
_TIMEOUT = "RBTOOL_TIMEOUT"
_GZIP_OR_ZLIB = 47


def read_seconds() -> float:
    """Return the time-out of a single read in seconds: `RBTOOL_TIMEOUT`, else 30."""
    text = os.environ.get(_TIMEOUT, "").strip()
    try:
        seconds = float(text) if text else _READ_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UsageError(f"{_TIMEOUT}={text} is not a time to wait, expected a number of seconds above 0")
    return seconds


@contextlib.contextmanager
def head_in_time(interrupt: Callable[[], None]) -> Iterator[None]:
    """Limit the time until the headers of an answer have arrived, which time-outs of single reads do not.

    After that time `interrupt`, which shuts down the connection, is called in another thread. A log record of level
    WARNING announces a server that is slow to answer.
    """
    answered, limit = threading.Event(), _ANSWER_TIMES * read_seconds()
    slow = min(SLOW_SECONDS, read_seconds() / 2)

    def watch() -> None:
        if not answered.wait(slow):
            _LOG.warning("no answer from the server for %.3g s; still waiting", slow)
            if not answered.wait(limit - slow):
                interrupt()

    with contextlib.suppress(RuntimeError):  # no thread can be started; then there is no such limit
        threading.Thread(target=watch, name="rbtool-answer", daemon=True).start()
    try:
        yield
    finally:
        answered.set()


@contextlib.contextmanager
def answer_to(
    client: httpx2.Client, request: httpx2.Request, interrupt: Callable[[], None]
) -> Iterator[httpx2.Response]:
    """Send a request and yield the answer with its body unread; redirections are followed without reading their bodies.

    `interrupt` shuts down connections; it is called from another thread if the headers of an answer take too long.
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
    """Yield blocks; raise Transient if they arrive at fewer than 128 bytes a second, counting only waiting time."""
    seconds = read_seconds()
    iterator = iter(blocks)
    waited, received, announced = 0.0, 0, False
    while True:
        start = time.monotonic()
        block = next(iterator, None)
        if block is None:
            return
        waited += time.monotonic() - start
        received += len(block)
        if waited > min(SLOW_SECONDS, seconds / 2) and received < waited * _SLOW_RATE and not announced:
            announced = True
            _LOG.warning("%s comes slowly: %s bytes in %.0f s; still waiting", what, f"{received:,}", waited)
        if waited > seconds:
            if received < seconds * LEAST_RATE:
                raise Transient(NetworkError(f"{what} comes too slowly: {received:,} bytes in {waited:.0f} s"))
            waited, received = 0.0, 0
        yield block


def bounded(blocks: Iterable[bytes], encoding: str, limit: int, what: str) -> bytes:
    """Join the blocks of a body and unpack it (gzip, zlib); FormatError if it has more than `limit` bytes unpacked."""
    known = {"": None, "identity": None, "gzip": _GZIP_OR_ZLIB, "deflate": _GZIP_OR_ZLIB}
    if encoding not in known:
        raise FormatError(f"{what} is compressed by {encoding!r:.40}, expected no compression")
    form = known[encoding]
    unpacker = None if form is None else zlib.decompressobj(form)
    data = bytearray()
    try:
        for block in blocks:
            data += block if unpacker is None else unpacker.decompress(block, limit + 1 - len(data))
            if len(data) > limit:
                raise FormatError(f"{what} has more than {limit:,} bytes")
            if unpacker is not None and unpacker.unused_data:  # a second gzip member, which zlib would ignore
                raise FormatError(f"{what} continues after the end of what is compressed")
    except zlib.error as error:
        raise Transient(NetworkError(f"{what} makes no sense: it is not {encoding}")) from error
    if unpacker is not None and not unpacker.eof:
        raise Transient(NetworkError(f"{what} broke off"))
    return bytes(data)


class Answer(NamedTuple):
    """The bytes of a file from byte `start` on, in blocks, and the version of the file.

    `size` is the size of the whole file. `version` is a validator that identifies exactly these bytes: a strong ETag,
    or a date of modification that is precise enough. Both are None if the remote does not state them. `ends` states
    whether the end of the blocks is certainly the end of the file; it is not if the connection may just have broken.
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
        """Begin to read at byte `offset`; yield the byte at which the answer starts, and its bytes in blocks.

        An answer may start before `offset`, often at 0, if the remote does not support ranges. Opening and reading
        raise Transient for temporary failures, and NetworkError, AuthorisationError or DatasetNotFoundError.
        """

    def open_range(
        self, address: str, start: int, stop: int, version: str | None = None
    ) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """Begin to read as `open` does, up to byte `stop`; more bytes may arrive.

        With `version`, as in `Answer`, bytes of another version raise ChangedMeanwhileError. A transport whose
        addresses identify a version ignores it.
        """
        return self.open(address, start)

    @contextlib.contextmanager
    def open_version(self, address: str, offset: int, version: str | None = None) -> Iterator[Answer]:
        """Begin to read as `open` does, and yield size and version, too: for files without a checksum.

        With `version`, the answer starts at `offset` only if the remote still has that version; compare the answer's
        `version`. A transport without this method supports no versions and no sizes.
        """
        with self.open(address, offset) as (start, blocks):
            yield Answer(start, blocks)

    def interrupt(self) -> None:
        """Make blocked reads in other threads fail now; later requests are not affected."""


_OURS = "RBTOOL_OFFLINE"
_TRUE = frozenset({"1", "true", "yes", "on"})


def require_network(what: str, *variables: str) -> None:
    """Raise NetworkError if the environment forbids the use of the network.

    `RBTOOL_OFFLINE` and each of `variables`, such as `HF_HUB_OFFLINE` for a hub, forbid it if they are 1, true, yes or
    on, in any case. `what` is about to be done; it begins the message: "listing hf://ORGANISATION".
    """
    for variable in (_OURS, *variables):
        value = os.environ.get(variable, "").strip()
        if value.lower() in _TRUE:
            again = f"unset {variable}" + (", or leave out --offline" if variable == _OURS else "")
            raise NetworkError(f"{what} needs the network, which {variable}={value} forbids", hint=again)


def read_range(
    transport: Transport,
    address: str,
    start: int,
    stop: int,
    write: Callable[[memoryview, int], None],
    *,
    what: str,
    version: str | None = None,
) -> None:
    """Pass the bytes `[start, stop)` of a file to `write(bytes, position)` as they arrive; resume after interruptions.

    Only attempts that bring no bytes count as failed, and are repeated as `retrying` does. NetworkError, which names
    `what`, if the file ends before; ChangedMeanwhileError for another `version` of it; other errors of transports.
    """
    position = start

    def attempt() -> None:
        nonlocal position
        before = position
        try:
            with transport.open_range(address, position, stop, version) as (begin, blocks):
                skip = position - begin
                if skip < 0:
                    raise NetworkError(f"another part of {what} came than requested")
                for block in blocks:
                    fresh = memoryview(block)[skip : skip + stop - position]
                    skip = max(0, skip - len(block))
                    write(fresh, position)
                    position += len(fresh)
                    if position == stop:
                        return
            raise Transient(NetworkError(f"{what} ended after {position:,} of {stop:,} bytes"))
        except Transient as failure:
            if position == before or failure.retry_after is not None:
                raise

    while position < stop:
        retrying(attempt)


def read_small(
    transport: Transport,
    address: str,
    *,
    limit: int,
    size: int | None = None,
    checksum: str | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> bytes:
    """Read a file into memory, with retries, and verify it if its size and checksum are known.

    Call `require_network` first. Raises FormatError for a file of more than `limit` bytes, CorruptDataError if the
    bytes never match, and the errors of transports.
    """

    def attempt() -> bytes:
        data = bytearray()
        with transport.open(address, 0) as (_, blocks):
            for block in blocks:
                data += block
                if len(data) > limit:
                    raise FormatError(f"{address} has more bytes than expected ({limit:,})")
        if size is not None and checksum is not None:
            checking = hasher(checksum, size)
            checking.update(data)
            if len(data) != size or not checking.matches():
                raise Transient(CorruptDataError(f"{address} came with {len(data):,} bytes that are not {checksum}"))
        return bytes(data)

    return retrying(attempt, sleep=sleep)
