"""Back-off: how often, how long, and when not at all."""

from __future__ import annotations

import email.utils
import signal
import time
from collections.abc import Iterator

import pytest
from waiting import HANG

from rbtool.core.errors import NetworkError, UsageError
from rbtool.core.remote.transport import Patience, Transient, retry_after, retrying


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


def test_what_passes_is_called_once(waits: list[float]) -> None:
    assert retrying(Flaky(), sleep=waits.append) == 1
    assert waits == []


def test_what_fails_twice_is_called_three_times(waits: list[float]) -> None:
    notes: list[str] = []
    assert retrying(Flaky(busy(), busy()), note=notes.append, sleep=waits.append) == 3
    assert len(waits) == 2
    assert [text.partition(";")[0] for text in notes] == ["busy 0", "busy 0"]


def test_patience_ends_with_the_last_error(waits: list[float]) -> None:
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


@pytest.mark.parametrize("asked", [0.0, 7.0, 299.5])
def test_the_server_is_waited_for_exactly(asked: float, waits: list[float]) -> None:
    assert retrying(Flaky(busy(asked), busy(asked)), sleep=waits.append) == 3
    assert waits == [asked, asked]


def test_a_server_that_asks_for_too_much_is_not_waited_for(waits: list[float]) -> None:
    call = Flaky(busy(3600.0))
    with pytest.raises(NetworkError, match="busy 0; the server asks to wait for 3,600 s"):
        retrying(call, sleep=waits.append)
    assert (call.calls, waits) == (1, [])


def test_other_failures_pass_through(waits: list[float]) -> None:
    call = Flaky(KeyError("x"))
    with pytest.raises(KeyError):
        retrying(call, sleep=waits.append)
    assert (call.calls, waits) == (1, [])


@pytest.mark.parametrize(
    ("text", "attempts", "first_wait"), [("", 5, 0.5), ("8", 8, 0.5), ("3:0.01", 3, 0.01), (" 1:0 ", 1, 0.0)]
)
def test_the_environment_sets_patience(
    text: str, attempts: int, first_wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RBTOOL_RETRIES", text)
    patience = Patience.from_environment()
    assert (patience.attempts, patience.first_wait) == (attempts, first_wait)


@pytest.mark.parametrize("text", ["0", "-1", "many", "3:", "3:x", "3:nan", "3:-1", "3:31", "1.5", ":1"])
def test_a_patience_that_makes_no_sense_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_RETRIES", text)
    with pytest.raises(UsageError, match="RBTOOL_RETRIES"):
        retrying(Flaky())


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("0", 0.0), (" 120 ", 120.0), (None, None), ("", None), ("soon", None), ("-1", None), ("1.5", None), ("٣", None)],
)
def test_retry_after_in_seconds(header: str | None, seconds: float | None) -> None:
    assert retry_after(header) == seconds


@pytest.mark.parametrize(("ahead", "least", "most"), [(6000, 6000 - HANG, 6000), (-60, 0, 0)])
def test_retry_after_as_a_date(ahead: int, least: float, most: float) -> None:
    seconds = retry_after(email.utils.formatdate(time.time() + ahead, usegmt=True))
    assert seconds is not None
    assert least <= seconds <= most


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
