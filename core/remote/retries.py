"""Trying again what may succeed later: back-off with jitter, and the server's own wish for how long to wait."""

from __future__ import annotations

import email.utils
import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..errors import RbtoolError, UsageError

if TYPE_CHECKING:
    import tenacity

T = TypeVar("T")

_LOG = logging.getLogger("rbtool.remote")
_VARIABLE = "RBTOOL_RETRIES"


class Transient(Exception):
    """A failure that may pass. `error` is what to raise once patience ends.

    `retry_after` is how many seconds the server asks to wait, None if it does not state.
    """

    def __init__(self, error: RbtoolError, retry_after: float | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.retry_after = retry_after


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
    """Call until there is no Transient, waiting longer each time, exactly as long as the server asks where it does.

    `attempts` replaces the number that `Patience.from_environment` gives. Before each wait the log and `note` receive
    the error and the time of the next attempt. Raises the `error` of the last Transient, at once if the server asks
    to wait for longer than anybody would; every other exception passes through. Signals interrupt the waiting.
    """
    import tenacity  # only when something is fetched: it would slow every start of the command line

    patience = Patience.from_environment()
    limit = max(1, patience.attempts if attempts is None else attempts)

    def report(state: tenacity.RetryCallState) -> None:
        wait = state.next_action.sleep if state.next_action else 0.0
        text = f"{_failure(state)}; trying again in {wait:.3g} s ({state.attempt_number} of {limit} attempts made)"
        _LOG.info(text)
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
    except (ArithmeticError, LookupError, TypeError, ValueError):  # whatever a header holds that is no date
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
