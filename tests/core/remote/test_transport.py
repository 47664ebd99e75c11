"""Back-off, the variables that forbid the network, and small files in memory."""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from cases import each
from waiting import HANG

from rbtool.core.errors import CorruptDataError, FormatError, NetworkError, RbtoolError, UsageError
from rbtool.core.remote.threads import Watch, ask_all
from rbtool.core.remote.transport import (
    Patience,
    Transient,
    Transport,
    read_small,
    require_network,
    retry_after,
    retrying,
)


class Flaky:
    """Fails as planned, then returns how often it was called."""

    def __init__(self, *failures: Exception) -> None:
        self._failures = iter(failures)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        for failure in self._failures:
            raise failure
        return self.calls


def busy(wait: float | None = None, number: int = 0) -> Transient:
    return Transient(NetworkError(f"busy {number}", hint="patience"), wait)


@pytest.fixture
def waits() -> list[float]:
    return []


def test_only_transient_failures_are_retried(waits: list[float]) -> None:
    notes: list[str] = []
    assert retrying(Flaky(), sleep=waits.append) == 1
    call = Flaky(KeyError("x"))
    with pytest.raises(KeyError):
        retrying(call, sleep=waits.append)
    assert (call.calls, waits) == (1, [])
    assert retrying(Flaky(busy(), busy()), note=notes.append, sleep=waits.append) == 3
    assert len(waits) == 2
    assert [text.partition(";")[0] for text in notes] == ["busy 0", "busy 0"]


def test_retries_end_with_the_last_error(waits: list[float]) -> None:
    call = Flaky(*(busy(number=number) for number in range(9)))
    with pytest.raises(NetworkError, match="busy 4") as raised:
        retrying(call, sleep=waits.append)
    assert (call.calls, len(waits), raised.value.hint) == (5, 4, "patience")


def test_the_waits_double_with_jitter_up_to_the_longest(waits: list[float]) -> None:
    with pytest.raises(NetworkError):
        retrying(Flaky(*[busy()] * 20), attempts=12, sleep=waits.append)
    full = [min(30.0, 0.5 * 2**number) for number in range(11)]
    assert all(most / 2 <= wait <= most for wait, most in zip(waits, full, strict=True))
    assert len(set(waits)) == len(waits)


def test_the_wait_is_the_one_that_the_server_asks_for_unless_it_is_too_long() -> None:
    for asked in (0.0, 7.0, 299.5):
        waits: list[float] = []
        assert retrying(Flaky(busy(asked), busy(asked)), sleep=waits.append) == 3
        assert waits == [asked, asked]
    call = Flaky(busy(3600.0))
    with pytest.raises(NetworkError, match="busy 0; the server asks to wait for 3,600 s"):
        retrying(call, sleep=waits.append)
    assert (call.calls, len(waits)) == (1, 2)


@each(("text", "attempts", "first_wait"), [("", 5, 0.5), ("8", 8, 0.5), ("3:0.01", 3, 0.01), (" 1:0 ", 1, 0.0)])
def test_the_environment_sets_patience(text: str, attempts: int, first_wait: float, monkeypatch) -> None:
    monkeypatch.setenv("RBTOOL_RETRIES", text)
    patience = Patience.from_environment()
    assert (patience.attempts, patience.first_wait) == (attempts, first_wait)


@each("text", ["0", "-1", "many", "3:", "3:x", "3:nan", "3:-1", "3:31", "1.5", ":1"])
def test_a_patience_that_makes_no_sense_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_RETRIES", text)
    with pytest.raises(UsageError, match="RBTOOL_RETRIES"):
        retrying(Flaky())


def test_retry_after_is_in_seconds_or_a_date() -> None:
    seconds = {"0": 0.0, " 120 ": 120.0, None: None, "": None, "soon": None, "-1": None, "1.5": None, "٣": None}
    assert {header: retry_after(header) for header in seconds} == seconds
    later = retry_after(email.utils.formatdate(time.time() + 6000, usegmt=True))
    assert later is not None
    assert 6000 - HANG <= later <= 6000
    assert retry_after(email.utils.formatdate(time.time() - 60, usegmt=True)) == 0


class Interrupted(Flaky):
    """Is interrupted soon after it has failed."""

    def __call__(self) -> int:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return super().__call__()


@pytest.fixture
def alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
def test_a_signal_ends_the_waiting() -> None:
    began, wait = time.monotonic(), Patience().longest_asked
    with pytest.raises(KeyboardInterrupt):
        retrying(Interrupted(busy(wait)))
    assert time.monotonic() - began < wait


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RBTOOL_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


@each("value", ["1", "true", "TRUE", "Yes", "on", " 1 "])
@each("name", ["RBTOOL_OFFLINE", "HF_HUB_OFFLINE"])
def test_a_true_value_forbids(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(NetworkError, match=f"listing the hub needs the network, which {name}=") as raised:
        require_network("listing the hub", "HF_HUB_OFFLINE")
    assert raised.value.hint.split(", ")[0] == f"unset {name}"
    assert ("--offline" in raised.value.hint) is (name == "RBTOOL_OFFLINE")
    monkeypatch.delenv(name)


def test_other_values_and_other_variables_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0", "false", "no", "off", "2"):
        monkeypatch.setenv("RBTOOL_OFFLINE", value)
        require_network("listing", "HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    require_network("listing a bucket")


DATA = b"abcdefgh"
SHA256 = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


class Replies(Transport):
    """Answers each request with the next of some bodies, in blocks of three bytes."""

    def __init__(self, *bodies: bytes | Exception) -> None:
        self.left = list(bodies)

    @contextlib.contextmanager
    def open(self, address: str, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        body = self.left.pop(0)
        if isinstance(body, Exception):
            raise body
        yield offset, (body[start : start + 3] for start in range(offset, len(body), 3))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_RETRIES", "3:0.001")


@pytest.mark.usefixtures("impatient")
def test_a_file_is_verified_and_not_read_beyond_its_size() -> None:
    assert read_small(Replies(DATA), "x", limit=8, size=8, checksum=SHA256) == DATA
    assert read_small(Replies(b"anything"), "x", limit=8) == b"anything"
    with pytest.raises(CorruptDataError, match="x came with 3 bytes"):
        read_small(Replies(*[b"abc"] * 3), "x", limit=9, size=8, checksum=SHA256)
    with pytest.raises(FormatError, match=r"has more bytes than expected \(7\)"):
        read_small(Replies(DATA), "x", limit=7)


@pytest.mark.usefixtures("impatient")
@each("first", [b"abc", b"abcdefgX", DATA + b"i", Transient(NetworkError("busy"))])
def test_a_file_that_does_not_match_is_read_again(first: bytes | Exception) -> None:
    transport = Replies(first, DATA)
    assert read_small(transport, "x", limit=99, size=8, checksum=SHA256) == DATA
    assert transport.left == []


def answer(number: int) -> Callable[[Watch], int]:
    def call(watch: Watch) -> int:
        if number % 3 == 2:
            raise FormatError(f"odd {number}")
        return number

    return call


@pytest.mark.usefixtures("impatient")
@each("count", [0, 1, 2, 20])
def test_all_answers_come_in_order_with_the_failures_among_them(count: int) -> None:
    heard: list[int] = []
    found = ask_all([answer(number) for number in range(count)], Replies(), done=heard.append)
    said = [str(one) if isinstance(one, RbtoolError) else one for one in found]
    assert said == [f"odd {number}" if number % 3 == 2 else number for number in range(count)]
    assert heard == [1] * count


@pytest.mark.usefixtures("impatient")
def test_any_other_error_ends_all_requests() -> None:
    held = threading.Event()

    class Held(Replies):
        def interrupt(self) -> None:
            held.set()

    def wait(watch: Watch) -> None:
        held.wait(HANG)
        watch.sleep(HANG)  # before another attempt, which nobody waits for

    def fail(watch: Watch) -> None:
        raise KeyError("a fault of ours")

    with pytest.raises(KeyError, match="a fault of ours"):
        ask_all([wait, fail, wait, wait], Held(), workers=2)
    assert held.is_set()
    for thread in threading.enumerate():
        if thread.name == "rbtool-fetch":
            thread.join(HANG / 2)
            assert not thread.is_alive()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("startable", [0, 1])
def test_questions_are_answered_where_few_threads_can_be_started(startable: int, monkeypatch) -> None:
    start, left = threading.Thread.start, [startable]

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert ask_all([lambda watch, number=number: number for number in range(5)], Replies()) == [0, 1, 2, 3, 4]  # type: ignore[misc]
