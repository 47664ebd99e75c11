"""Requests that huggingface_hub makes for us, under our limits of time and size and our number of attempts.

The client has one session for the process, without a limit of time, and repeats requests by rules of its own. Here its
requests pass through a gate: in a context that has one, each is sent, bounded and repeated as our own requests are;
all others pass as they were.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import AuthorisationError, DatasetNotFoundError, FormatError, NetworkError, RbtoolError
from ..format.documents import parse_json
from ..progress import redact
from .http import asked_wait, failure, phrase_of
from .threads import Cancelled, Watch
from .transport import Transient, bounded, paced, read_seconds, require_network, retrying

if TYPE_CHECKING:
    import httpx2

_ANSWER_BYTES = 1 << 20
_BUSY = frozenset({408, 425, 429})
_CHANGED = frozenset({409, 412})
_OCCUPIED = b"another conflicting operation is in progress"
"""For this the client asks again without end and without a pause."""
_CONNECT_SECONDS = 10.0
_COMMIT_TIMES = 10
"""A hub takes its time for a commit of many files: so many times what it may be silent otherwise."""
_OF_BODIES = frozenset({b"content-encoding", b"content-length", b"transfer-encoding", b"x-hf-warning"})
_LONGEST_REASON = 300
_LOGGER = "huggingface_hub"

Trace = Callable[[str, Mapping[str, Any]], None]


class ChangedMeanwhileError(NetworkError):
    """A repository has another state than the one that a request was made for."""


@dataclass(frozen=True, slots=True)
class Gate:
    """How the requests of huggingface_hub are sent in a context.

    `what` is sent to the hub at `endpoint`, as sentences name it; other hosts get no token. `trace` learns of
    connections. `file` is what is sent from, if anything: a request that is repeated sends it from the same place
    again. `hint` is what to do about refused access.
    """

    what: str
    endpoint: str
    trace: Trace
    hint: str
    watch: Watch
    file: io.BufferedIOBase | None = None

    def send(self, send: Callable[..., httpx2.Response], request: httpx2.Request, **given: Any) -> httpx2.Response:
        """Send a request by `send`; repeat it after what may pass, unless it must not be done twice."""
        if request.url.path.endswith("/agent-harnesses"):  # the client reports to the hub who calls it
            raise NetworkError("nothing needs the list of harnesses")
        start = None if self.file is None else self.file.seek(0, io.SEEK_CUR)
        is_commit = "/commit/" in request.url.path
        attempt = functools.partial(self._attempt, send, request, start, _COMMIT_TIMES if is_commit else 1, given)
        if is_commit or request.url.path.endswith("/repos/create"):
            return attempt()
        return retrying(attempt, note=self.watch.note, sleep=self.watch.sleep)

    def _attempt(
        self,
        send: Callable[..., httpx2.Response],
        request: httpx2.Request,
        start: int | None,
        times: int,
        given: Mapping[str, Any],
    ) -> httpx2.Response:
        import httpx2

        self.watch.check()
        if not str(request.url).startswith(f"{self.endpoint}/"):  # a hub states where objects go, and who verifies them
            request.headers.pop("authorization", None)
        if self.file is not None and start is not None:
            self.file.seek(start)
        seconds = read_seconds()
        limits = httpx2.Timeout(seconds, connect=_CONNECT_SECONDS, read=times * seconds).as_dict()
        request.extensions = {**request.extensions, "timeout": limits, "trace": self.trace}
        try:
            with contextlib.closing(send(request, **{**given, "stream": True})) as response:
                encoding = response.headers.get("Content-Encoding", "").strip().lower()
                body = bounded(paced(response.iter_raw(), self.what), encoding, _ANSWER_BYTES, "the hub's answer")
        except httpx2.RequestError as error:
            raise failure(error, self.what, hint=self.hint, done="sent to") from error
        if response.status_code == 409 and _OCCUPIED in body:
            raise Transient(NetworkError(f"{request.url.host} could not take {self.what} now: it makes another change"))
        headers = [(name, value) for name, value in response.headers.raw if name.lower() not in _OF_BODIES]
        whole = httpx2.Response(response.status_code, headers=headers, content=body, request=response.request)
        if response.status_code in _BUSY or response.status_code >= 500:
            raise refusal(whole, self.what, hint=self.hint)
        return whole


_GATE: contextvars.ContextVar[Gate | None] = contextvars.ContextVar("_GATE", default=None)


@contextlib.contextmanager
def through(gate: Gate) -> Iterator[None]:
    """Let what huggingface_hub requests in this context pass the gate; raise its errors as what they mean.

    Raises NetworkError at once where the network is forbidden.
    """
    require_network(f"sending {gate.what}", "HF_HUB_OFFLINE")
    _put_gate()
    before = _GATE.set(gate)
    try:
        yield
    except Exception as error:
        known = _known(error)
        if known is not None:
            raise known from known.__cause__  # it is the cause of what the client makes of it
        raise _meaning(error, gate) from error
    finally:
        _GATE.reset(before)


def _put_gate() -> None:
    """Put the gate in the way of the client's session, which is another one after each that the client closed."""
    from huggingface_hub import get_session

    session = get_session()
    if "send" not in vars(session):
        session.send = functools.partial(_pass, session.send)  # type: ignore[method-assign]
    for handler in logging.getLogger(_LOGGER).handlers:
        handler.addFilter(_is_heard)  # again and again is once


def _pass(send: Callable[..., httpx2.Response], request: httpx2.Request, **given: Any) -> httpx2.Response:
    gate = _GATE.get()
    return send(request, **given) if gate is None else gate.send(send, request, **given)


def _is_heard(record: logging.LogRecord) -> bool:
    """Whether the client's log is for the user: not where we report what happens."""
    return _GATE.get() is None


def _known(error: BaseException) -> Exception | None:
    """Find the error of ours, or of the file that is sent, that an error of the client is about."""
    import httpx2

    found: BaseException | None = error
    while found is not None:
        if isinstance(found, RbtoolError | Transient | Cancelled):
            return found
        if isinstance(found, OSError) and not isinstance(found, httpx2.HTTPError) and found.errno is not None:
            return found
        found = found.__cause__ or found.__context__
    return None


def _meaning(error: Exception, gate: Gate) -> Exception:
    """Describe what an error of huggingface_hub means."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    found: BaseException | None = error
    while found is not None:  # what the storage of objects answers is the cause of a RuntimeError
        response: httpx2.Response | None = getattr(found, "response", None)
        if response is not None:
            return refusal(response, gate.what, hint=gate.hint)
        found = found.__cause__
    if isinstance(error, OfflineModeIsEnabled):
        return NetworkError(f"{gate.what} needs the network, which huggingface_hub is set not to use")
    reason = " ".join(redact(str(error)).split())[:_LONGEST_REASON]
    return FormatError(f"{gate.what} could not be sent: huggingface_hub says {reason or type(error).__name__!r}")


def refusal(response: httpx2.Response, what: str, *, hint: str) -> Exception:
    """Describe what it means that a hub did not take something: a `Transient`, or an RbtoolError."""
    status, host = response.status_code, response.request.url.host
    answer = f"{status} {phrase_of(status)}".strip()
    if status == 401:
        return AuthorisationError(f"{host} takes {what} only from authenticated users ({answer})", hint=hint)
    if status == 403:
        return AuthorisationError(f"{host} refuses {what} ({answer}): the token has no right to write there", hint=hint)
    if status == 404:
        return DatasetNotFoundError(f"{host} has no place for {what} ({answer})")
    if status in _CHANGED:
        return ChangedMeanwhileError(f"{host} did not take {what}: it has changed meanwhile ({answer})")
    if status == 413:
        return NetworkError(f"{what} is too large for {host} ({answer})")
    if status in _BUSY or status >= 500:
        return Transient(NetworkError(f"{host} could not take {what} now ({answer})"), asked_wait(response))
    return NetworkError(f"{host} did not take {what}: it answered {answer}{_said(response)}")


def _said(response: httpx2.Response) -> str:
    """What the hub gives as the reason, "" for nothing."""
    said = response.headers.get("X-Error-Message", "")
    with contextlib.suppress(FormatError, AttributeError):
        said = said or parse_json(response.content, "the hub's answer").get("error", "")
    return f": {' '.join(redact(str(said)).split())[:_LONGEST_REASON]}" if said else ""
