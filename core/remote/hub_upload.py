"""Upload to a dataset repository of a hub: objects first, each once, and then everything in one commit.

huggingface_hub makes the requests. It has one session for the process, without a limit of time, and repeats requests
by rules of its own. Here its requests pass through a gate: in a context that has one, each is sent, bounded and
repeated as our own requests are; all others pass as they were.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import quote

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
from ..format.digest import FileRecord, Hasher, open_regular
from ..format.documents import parse_json
from ..format.sources import Advance, Note
from ..progress import redact
from .checksums import blocks_of, hasher, matches
from .http import asked_wait, failure, phrase_of
from .hub import TOKEN_HINT, Hub, HubFile
from .threads import Cancelled, Watch, ignore, run_together
from .transport import Transient, bounded, paced, read_seconds, require_network, retrying

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi


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


MAIN = "main"
_WORKERS = 4
_SMALL = 32 << 20  # what a hub may keep in git itself, and names by its git blob


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file to upload: its path in the repository, its bytes or where they are, and their checksums.

    `git_sha1` is None for a large file, which no hub keeps in git.
    """

    path: str
    source: Path | bytes
    size: int
    sha256: str
    git_sha1: str | None

    @classmethod
    def of(cls, path: str, data: bytes) -> LocalFile:
        """Make one of bytes."""
        git = hasher("git-sha1:" + "0" * 40, len(data))
        git.update(data)
        return cls(path, data, len(data), f"sha256:{hashlib.sha256(data).hexdigest()}", git.found)

    @classmethod
    def read(cls, record: FileRecord, source: Path, advance: Advance) -> LocalFile:
        """Read a listed file; CorruptDataError if its bytes are not those that the manifest lists."""
        digest, sha256 = Hasher(), hashlib.sha256()
        git = hasher("git-sha1:" + "0" * 40, record.size) if record.size <= _SMALL else None
        size = 0
        with io.FileIO(open_regular(source)) as file:
            for block in blocks_of(file):
                digest.update(block)
                sha256.update(block)
                if git is not None:
                    git.update(block)
                size += len(block)
                advance(len(block))
        if size != record.size or digest.digest != record.digest:
            raise CorruptDataError(f"{record.path} was changed after it was written: its digest is not the manifest's")
        return cls(record.path, source, size, f"sha256:{sha256.hexdigest()}", git.found if git else None)

    def is_like(self, remote: HubFile) -> bool:
        """Return whether a file of the hub has the same path and bytes, by its size and checksum."""
        if (self.path, self.size) != (remote.path, remote.size):
            return False
        if remote.checksum.startswith("git-sha1:") and self.git_sha1 is None and isinstance(self.source, Path):
            return matches(self.source, self.size, remote.checksum)
        return remote.checksum in (self.sha256, self.git_sha1)


class HubWriter(Hub):
    """A hub whose dataset repositories are written to, by huggingface_hub; the token has to allow that.

    Raises what `Hub` does, and ChangedMeanwhileError where somebody else commits at the same time.
    """

    def require_token(self, address: str) -> None:
        """Raise AuthorisationError where no token is found."""
        if "authorization" not in self._headers:
            raise AuthorisationError(f"an upload to {address} needs a token, and none is found", hint=TOKEN_HINT)

    def is_private(self, repository: str) -> bool | None:
        """Whether a repository is private; None where the hub shows none of that name."""
        what = f"the repository {repository}"
        try:
            try:
                document, *_ = retrying(functools.partial(self._ask, f"/api/datasets/{quote(repository)}", "", what))
            except AuthorisationError:
                self._require_listed(repository)
                raise
        except DatasetNotFoundError:
            return None
        if not isinstance(document, dict):
            raise FormatError(f"the hub describes {what} by {document!r:.100}, expected an object")
        return bool(document.get("private"))

    def branches(self, repository: str) -> dict[str, str]:
        """The newest commit of each branch."""
        what = f"the branches of {repository}"
        document, *_ = retrying(functools.partial(self._ask, f"/api/datasets/{quote(repository)}/refs", "", what))
        try:
            found = {str(one["name"]): str(one["targetCommit"]) for one in document["branches"]}
        except (KeyError, TypeError) as error:
            raise FormatError(f"the hub describes {what} by {document!r:.100}, expected a list of them") from error
        return found

    def create(self, repository: str, *, private: bool, note: Note = ignore) -> None:
        """Make a repository; one that another process has just made is as good."""

        def attempt() -> None:
            if self.is_private(repository) is None:
                with self._hf_api(f"the new repository {repository}") as api:
                    api.create_repo(repository, repo_type="dataset", private=private or None)

        try:
            retrying(attempt, note=note)
        except ChangedMeanwhileError:
            if self.is_private(repository) is None:
                said = f"the repository {repository} is there, but the token does not show it"
                raise AuthorisationError(said, hint=TOKEN_HINT) from None

    def create_branch(self, repository: str, branch: str) -> None:
        """Make a branch that begins at the newest commit of `main`; one that is there is as good."""
        with self._hf_api(f"the branch {branch} of {repository}") as api:
            api.create_branch(repository, branch=branch, repo_type="dataset", exist_ok=True)

    def send(
        self, repository: str, branch: str, files: Sequence[LocalFile], *, progress: Advance = ignore,
        note: Note = ignore,
    ) -> SentFiles:  # fmt: skip
        """Send the objects of files that the hub does not have yet; a commit is to name them afterwards.

        `progress` receives bytes that need not be sent any more, negative ones where some are sent again.
        """
        sent = SentFiles([_operation(file) for file in files], [])
        pairs = zip(files, sent.operations, strict=True)
        jobs = [functools.partial(self._send, repository, branch, *pair, sent.bytes) for pair in pairs]
        with _without_bars():
            run_together(jobs, Watch(progress, note), workers=_WORKERS, interrupt=self.interrupt)
        return sent

    def _send(
        self, repository: str, branch: str, file: LocalFile, operation: CommitOperationAdd, sent: list[int],
        watch: Watch,
    ) -> None:  # fmt: skip
        """Send one file in such a way that it can be repeated and is counted.

        An open file goes by git LFS also where `hf_xet` is installed, whose requests no limit of ours reaches.
        """
        with _opened(file, watch.progress) as reading:
            before = operation.path_or_fileobj
            operation.path_or_fileobj = cast("BinaryIO", reading)
            with self._hf_api(file.path, watch, reading) as api:
                api.preupload_lfs_files(
                    repository, [operation], repo_type="dataset", revision=branch, num_threads=1, free_memory=False,
                    gitignore_content="# none",  # else rules of the repository would leave files out
                )  # fmt: skip
            operation.path_or_fileobj = before
        done = reading.reported if isinstance(reading, _Counted) else 0
        sent.append(done)
        watch.progress(file.size - done)

    def put(
        self, repository: str, branch: str, parent: str, sent: SentFiles, *, deleted: Sequence[str], message: str
    ) -> str:
        """Commit what was sent, and remove files, on top of the commit `parent`; return the commit.

        ChangedMeanwhileError if the branch is at another commit. A Transient may mean that it was done.
        """
        from huggingface_hub import CommitOperationDelete

        deletions = [CommitOperationDelete(path, is_folder=False) for path in deleted]
        with _without_bars(), self._hf_api(f"the commit to {repository}") as api:
            return api.create_commit(
                repository, [*sent.operations, *deletions], commit_message=message, repo_type="dataset",
                revision=branch, parent_commit=parent,
            ).oid  # fmt: skip

    @contextlib.contextmanager
    def _hf_api(self, what: str, watch: Watch | None = None, file: io.BufferedIOBase | None = None) -> Iterator[HfApi]:
        """Give the client, whose requests are sent as ours; `what` names in sentences what is sent."""
        from huggingface_hub import HfApi

        token = self._headers.get("authorization", "").removeprefix("Bearer ")
        with through(Gate(what, self._endpoint, self._watch, TOKEN_HINT, watch or Watch(), file)):
            yield HfApi(
                endpoint=self._endpoint, token=token or False, library_name="rbtool", library_version=__version__
            )


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the bars of the client, which are printed between our lines, unless the environment asks for them."""
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@dataclass(frozen=True, slots=True)
class SentFiles:
    """What a commit names: the operations of huggingface_hub, and how many bytes of each object had to be sent."""

    operations: list[CommitOperationAdd]
    bytes: list[int]


class _Counted(io.BufferedReader):
    """A file that reports how many of its bytes were read, and takes back those that are read again."""

    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(open_regular(path)))
        self.reported = 0
        self._advance = advance

    def read(self, size: int | None = -1, /) -> bytes:
        """Read bytes, and report them."""
        data = super().read(size)
        position = self.tell()
        self._advance(position - self.reported)
        self.reported = position
        return data


def require_paths(files: Sequence[LocalFile]) -> None:
    """Raise UsageError for a path that no hub takes, such as one below `.git`."""
    for file in files:
        _operation(file)


def _opened(file: LocalFile, advance: Callable[[int], None]) -> io.BytesIO | _Counted:
    return io.BytesIO(file.source) if isinstance(file.source, bytes) else _Counted(file.source, advance)


def _operation(file: LocalFile) -> CommitOperationAdd:
    from huggingface_hub import CommitOperationAdd

    try:
        source = file.source if isinstance(file.source, bytes) else os.fspath(file.source)
        made = CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=source)
    except ValueError as error:
        raise UsageError(
            f"{file.path} is a path that no hub takes",
            hint="layout packed has no paths of fields: rbtool convert DATASET DEST --layout packed",
        ) from error
    made.upload_info.sha256 = bytes.fromhex(file.sha256.partition(":")[2])
    return made


def differences(files: Sequence[LocalFile], tree: Mapping[str, HubFile]) -> list[str]:
    """Return the paths of files that a repository does not have, or has with other bytes."""
    return [file.path for file in files if file.path not in tree or not file.is_like(tree[file.path])]
