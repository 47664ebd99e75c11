"""The token for a Hugging Face hub, from wherever huggingface_hub has it, within bounds.

huggingface_hub may ask a server for it: in CI it exchanges an OIDC token (`HF_OIDC_RESOURCE`), and a token of
`hf auth login` that expires soon is refreshed. Those requests have no limit of their own on the size of an answer and
on the time that it takes as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import AuthorisationError
from ..secrets import redact
from .bounds import ERROR_BYTES, bounded, head_in_time, paced
from .http import failure

if TYPE_CHECKING:
    import httpx2

__all__ = ["TOKEN_HINT", "hub_token"]

TOKEN_HINT = "HF_TOKEN holds the token, or `hf auth login` stores one"
_WHAT = "the token for the hub"
_LONGEST_REASON = 300
_SESSION = threading.Lock()  # huggingface_hub has one session for the process
_SENSELESS = (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What huggingface_hub raises for answers of another shape than it expects, next to its own errors."""

Watch = Callable[[str, Mapping[str, Any]], None]


def hub_token(timeout: httpx2.Timeout, watch: Watch, interrupt: Callable[[], None]) -> str | None:
    """Return the token that huggingface_hub finds, None where there is none or it may not be sent.

    Answers of up to 64 kB are read for it, each read within `timeout`, and all of them within four times the
    time-out of a read: then `interrupt` breaks off the connections that `watch` was called with. Raises
    AuthorisationError where the token is refused or makes no sense, and what `failure` returns where no server answers.
    """
    import httpx2
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import DeviceCodeError, OIDCError

    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    try:
        with _bounded_session(timeout, watch), _plain_logs(), head_in_time(interrupt):
            token: object = get_token()  # a server may have stated what it is
    except httpx2.RequestError as error:
        raise failure(error, _WHAT, hint=TOKEN_HINT) from error
    except (OIDCError, DeviceCodeError, httpx2.InvalidURL, *_SENSELESS) as error:
        reason = redact(str(error)).partition("\n")[0][:_LONGEST_REASON]
        raise AuthorisationError(f"no token for the hub could be had: {reason}", hint=TOKEN_HINT) from error
    if token is None:
        return None
    if not (isinstance(token, str) and token.isascii() and token.isprintable()):
        raise AuthorisationError("the token for the hub has characters that no token has", hint=TOKEN_HINT)
    return token or None


@contextlib.contextmanager
def _bounded_session(timeout: httpx2.Timeout, watch: Watch) -> Iterator[None]:
    """Bound what requests of this thread over huggingface_hub's session read and how long they wait."""
    import httpx2
    from huggingface_hub import get_session

    thread = threading.get_ident()

    def before(request: httpx2.Request) -> None:
        if threading.get_ident() == thread:
            request.extensions = {**request.extensions, "trace": watch}

    def after(response: httpx2.Response) -> None:
        if threading.get_ident() != thread:
            return
        stream = response.stream
        assert isinstance(stream, httpx2.SyncByteStream)
        encoding = response.headers.pop("Content-Encoding", "").strip().lower()
        response.headers.pop("X-HF-Warning", None)  # huggingface_hub would log each to stderr
        try:
            body = bounded(paced(stream, _WHAT), encoding, ERROR_BYTES, _WHAT)
        finally:
            stream.close()
        response.stream = httpx2.ByteStream(body)

    with _SESSION:
        session = get_session()
        patient, hooks = session.timeout, session.event_hooks
        session.timeout = timeout
        session.event_hooks = {
            "request": [*hooks["request"], before],
            "response": [after, *hooks["response"]],
        }
        try:
            yield
        finally:
            session.timeout, session.event_hooks = patient, hooks


@contextlib.contextmanager
def _plain_logs() -> Iterator[None]:
    """Let huggingface_hub print no control characters and no secrets of an answer: it logs what a server states."""
    handlers = logging.getLogger("huggingface_hub").handlers
    for handler in handlers:
        handler.addFilter(_plain)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_plain)


def _plain(record: logging.LogRecord) -> bool:
    text = redact(record.getMessage())[: 2 * _LONGEST_REASON]
    record.msg = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    record.args = ()
    return True
