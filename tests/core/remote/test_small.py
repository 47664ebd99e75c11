"""Small files in memory, and many questions at once, without a server."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator

import pytest
from waiting import HANG

from rbtool.core.errors import CorruptDataError, FormatError, NetworkError, RbtoolError
from rbtool.core.remote.threads import ask_all
from rbtool.core.remote.transport import Transient, Transport, read_small

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


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RBTOOL_RETRIES", "3:0.001")


def test_a_file_is_read_and_verified() -> None:
    assert read_small(Replies(DATA), "x", limit=8, size=8, checksum=SHA256) == DATA
    assert read_small(Replies(b"anything"), "x", limit=8) == b"anything"


@pytest.mark.parametrize("first", [b"abc", b"abcdefgX", DATA + b"i", Transient(NetworkError("busy"))], ids=repr)
def test_what_does_not_match_is_read_again(first: bytes | Exception) -> None:
    transport = Replies(first, DATA)
    assert read_small(transport, "x", limit=99, size=8, checksum=SHA256) == DATA
    assert transport.left == []


def test_what_never_matches() -> None:
    with pytest.raises(CorruptDataError, match="x came with 3 bytes"):
        read_small(Replies(*[b"abc"] * 3), "x", limit=9, size=8, checksum=SHA256)


def test_what_is_too_long_is_not_read_to_its_end() -> None:
    with pytest.raises(FormatError, match=r"has more bytes than expected \(7\)"):
        read_small(Replies(DATA), "x", limit=7)


def answer(number: int) -> Callable[[], int]:
    def call() -> int:
        if number % 3 == 2:
            raise FormatError(f"odd {number}")
        return number

    return call


@pytest.mark.parametrize("count", [0, 1, 2, 20])
def test_all_answers_come_in_order_with_the_failures_among_them(count: int) -> None:
    heard: list[int] = []
    found = ask_all([answer(number) for number in range(count)], Replies(), done=heard.append)
    assert [str(one) if isinstance(one, RbtoolError) else one for one in found] == [
        f"odd {number}" if number % 3 == 2 else number for number in range(count)
    ]
    assert heard == [1] * count


def test_any_other_error_ends_it_all() -> None:
    held = threading.Event()

    class Held(Replies):
        def interrupt(self) -> None:
            held.set()

    def wait() -> None:
        held.wait(HANG)

    def fail() -> None:
        raise KeyError("a fault of ours")

    with pytest.raises(KeyError, match="a fault of ours"):
        ask_all([wait, fail, wait, wait], Held(), workers=2)
    assert held.is_set()


@pytest.mark.parametrize("startable", [0, 1])
def test_questions_are_answered_where_few_threads_can_be_started(
    startable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, left = threading.Thread.start, [startable]

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert ask_all([lambda number=number: number for number in range(5)], Replies()) == [0, 1, 2, 3, 4]  # type: ignore[misc]
