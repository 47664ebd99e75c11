"""The contract of transports, limits on what they read (size, time, whether the network may be used), and retries.

`Checksum` is what remotes give of their files: sha256, git blobs, md5 and crc32c.
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
    """Takes the bytes of one file in their order and determines whether they are the ones that were announced."""

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
        """Return whether the bytes so far are the whole file as it was announced."""
        return self.found == self.expected


class _Crc32c:
    """The CRC that buckets keep, behind the methods of hashlib."""

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
    """How many hex digits a kind of checksum has, and how to begin one for a file of so many bytes."""

    digits: int
    begin: Callable[[int], Any]


_KINDS = {
    "sha256": _Kind(64, lambda size: hashlib.sha256()),
    "git-sha1": _Kind(40, lambda size: hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)),
    "md5": _Kind(32, lambda size: hashlib.md5(usedforsecurity=False)),
    "crc32c": _Kind(8, lambda size: _Crc32c()),
}


def hasher(checksum: str, size: int) -> ChecksumHasher:
    """Begin to check a file of `size` bytes against `sha256:…`, `git-sha1:…`, `md5:…` or `crc32c:…` (lower-case hex).

    `git-sha1` is the id of the git blob, which begins with the size. Raises FormatError for any other text, and
    UsageError for crc32c without the extra `gcp`.
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
    """Yield the bytes of a file in blocks of 1 MiB; each is gone when the next is asked for."""
    buffer = memoryview(bytearray(_BLOCK))
    while got := file.readinto(buffer):
        yield buffer[:got]


T = TypeVar("T")

_LOG = logging.getLogger("rbtool.remote")
_LOG.addHandler(logging.NullHandler())  # without one, Python prints warnings of libraries on stderr
_VARIABLE = "RBTOOL_RETRIES"


class Transient(Exception):
    """A failure that may pass. `error` is what to raise once patience ends.

    `retry_after` is how many seconds the server asks to wait, None if it does not state.
    """

    def __init__(self, error: RbtoolError, retry_after: float | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.retry_after = retry_after


class ChangedMeanwhileError(NetworkError):
    """A remote has another state of something than the one that a request was made for."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How often something is tried in all, and the seconds to wait between: doubled each time, up to the longest.

    A server may ask for any wait up to `longest_asked`; who asks for more is not waited for at all.
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
        """Seconds to wait after attempt number `attempt` (from 1): between a half and all of the doubled wait.

        The jitter keeps many clients that failed together from coming back together.
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

    `attempts` replaces the number that `Patience.from_environment` gives. Before each wait `note`, or else the log at
    level WARNING, receives the error and the time of the next attempt. Raises the `error` of the last Transient, at
    once if the server asks to wait for longer than anybody would; every other exception passes through. Signals
    interrupt the waiting.
    """
    import tenacity  # only when something is fetched: it would slow every start of the command line

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
    except (ArithmeticError, LookupError, TypeError, ValueError):  # whatever a header holds that is not a date
        return None


def _failure(state: tenacity.RetryCallState) -> Transient:
    """The failure that a state is about: only a Transient is retried, so it is one."""
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
"""Bytes of an answer that is neither a file nor a listing: an error, or a redirection."""
PAGES = 2_000
"""Pages of one listing, of about a thousand entries each."""
LEAST_RATE = 128
"""Bytes a second: a server that sends fewer for a while is given up like one that is silent."""
SLOW_SECONDS = 5.0
"""Seconds without an answer, or with less than 2 kB a second of one, after which a log record names the server slow."""
_REDIRECTIONS = 20
_SLOW_RATE = 2_000
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
        raise UsageError(f"{_TIMEOUT}={text} is not a time to wait, expected a number of seconds above 0")
    return seconds


@contextlib.contextmanager
def head_in_time(interrupt: Callable[[], None]) -> Iterator[None]:
    """Call `interrupt`, which breaks the connection off, in another thread if the head of an answer takes too long.

    A log record of level WARNING announces a server that is slow to answer.
    """
    answered, limit = threading.Event(), _ANSWER_TIMES * read_seconds()
    slow = min(SLOW_SECONDS, read_seconds() / 2)

    def watch() -> None:
        if not answered.wait(slow):
            _LOG.warning("no answer from the server for %.3g s; still waiting", slow)
            if not answered.wait(limit - slow):
                interrupt()

    with contextlib.suppress(RuntimeError):  # no more threads can be started: the head has no limit of its own then
        threading.Thread(target=watch, name="rbtool-answer", daemon=True).start()
    try:
        yield
    finally:
        answered.set()


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
    """Put a body together and unpack it (gzip, zlib); FormatError for one of more than `limit` bytes when unpacked."""
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
            if unpacker is not None and unpacker.unused_data:  # another member, of which nothing would be unpacked
                raise FormatError(f"{what} continues after the end of what is compressed")
    except zlib.error as error:
        raise Transient(NetworkError(f"{what} makes no sense: it is not {encoding}")) from error
    if unpacker is not None and not unpacker.eof:
        raise Transient(NetworkError(f"{what} broke off"))
    return bytes(data)


class Answer(NamedTuple):
    """The bytes of a file from byte `start` on, in blocks, and which version of the file they are of.

    `size` is the size of the whole file. `version` is a validator that only these very bytes have (a strong ETag, or a
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

    def open_range(
        self, address: str, start: int, stop: int, version: str | None = None
    ) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """Begin to read as `open` does, where nothing from byte `stop` on is needed; more may come.

        With `version`, which `Answer` describes, bytes of another version raise ChangedMeanwhileError. A transport
        whose addresses name one version needs none.
        """
        return self.open(address, start)

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
    """Pass the bytes `[start, stop)` of a file to `write(bytes, position)` as they come; a cut is resumed.

    An attempt that brings nothing is counted, and repeated as `retrying` does. NetworkError, which names `what`, where
    the file ends before, and what the transport raises: ChangedMeanwhileError for another `version` of the file.
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
    """Read a file into memory, trying again what may pass, and verify it where its size and checksum are known.

    Call `require_network` first. Raises FormatError for one of more than `limit` bytes, CorruptDataError if the bytes
    never match, and what the transport raises.
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
