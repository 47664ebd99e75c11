"""Dataset repositories on a Hugging Face hub: listing and reading them, sources that download them, and uploads.

Token, endpoint, session and errors come from huggingface_hub, which reads its environment variables when it is
imported; it is imported at the first request. Pages of a listing are requested by this module, because huggingface_hub
waits without a limit for a silent server, and repeats each failed request six times.

An upload sends the objects first, each once, and then everything in one commit. huggingface_hub makes these requests.
It has one session for the process, without a time limit, and retries by rules of its own. Therefore its requests pass
through a `Gate`: in a context with a gate, they are sent, limited and retried like rbtool's own requests; all others
are not changed.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import io
import logging
import os
import re
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, cast
from urllib.parse import quote, urlencode, urlsplit

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
from ..format.converter import (
    Advance,
    Catalogue,
    CatalogueEntry,
    Ids,
    Note,
    RemoteDataset,
    RemoteFile,
    Source,
    StaleListing,
    safe_id,
)
from ..format.documents import parse_json, written_time
from ..format.files import FileRecord, Hasher, open_regular
from ..format.manifest import is_inside
from ..progress import redact
from .fetch import fetch_files
from .http import HttpTransport, asked_wait, failure, phrase_of
from .threads import Cancelled, Watch, ignore, run_together
from .transport import (
    ERROR_BYTES,
    PAGES,
    Answer,
    ChangedMeanwhileError,
    Transient,
    answer_to,
    blocks_of,
    bounded,
    hasher,
    head_in_time,
    matches,
    paced,
    read_seconds,
    require_network,
    retrying,
)

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi


TOKEN_HINT = "HF_TOKEN holds the token, or `hf auth login` stores one"
_WHAT = "the token for the hub"
_LONGEST_REASON = 300
_SESSION = threading.Lock()  # huggingface_hub has one session for the process
_SENSELESS = (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors that huggingface_hub raises for answers of an unexpected form, in addition to its own."""

Trace = Callable[[str, Mapping[str, Any]], None]


def hub_token(timeout: httpx2.Timeout, watch: Trace, interrupt: Callable[[], None]) -> str | None:
    """Return the token that huggingface_hub finds; None if there is none, or if it must not be sent implicitly.

    huggingface_hub may request a token from a server. Its answers are limited to 64 kB, each read to `timeout`, and all
    together to four times the time-out of a read; then `interrupt` shuts down the connections reported to `watch`.
    Raises AuthorisationError if the token is refused or invalid, and the error of `failure` if no server answers.
    """
    import httpx2
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import DeviceCodeError, OIDCError

    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return None
    try:
        with _bounded_session(timeout, watch), _plain_logs(), head_in_time(interrupt):
            token: object = get_token()  # it may come from a server, so its type is not certain
    except httpx2.RequestError as error:
        raise failure(error, _WHAT, hint=TOKEN_HINT) from error
    except (OIDCError, DeviceCodeError, httpx2.InvalidURL, *_SENSELESS) as error:
        reason = redact(str(error)).partition("\n")[0][:_LONGEST_REASON]
        raise AuthorisationError(f"a token for the hub could not be obtained: {reason}", hint=TOKEN_HINT) from error
    if token is None:
        return None
    if not (isinstance(token, str) and token.isascii() and token.isprintable()):
        raise AuthorisationError("the token for the hub has characters that no token has", hint=TOKEN_HINT)
    return token or None


@contextlib.contextmanager
def _bounded_session(timeout: httpx2.Timeout, watch: Trace) -> Iterator[None]:
    """Limit the size of answers and the waiting time of this thread's requests over huggingface_hub's session."""
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
    """Remove control characters and secrets from huggingface_hub's log, which repeats texts of the server."""
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


_DEFAULT_ENDPOINT = "https://huggingface.co"
_PAGE_BYTES = 64 << 20
_OF_BODIES = frozenset({b"content-encoding", b"content-length", b"transfer-encoding", b"x-hf-warning"})
_PINNED = re.compile(r"/resolve/[0-9a-f]{40}/")
_OWNER = re.compile(r"/datasets/([^/]+/[^/]+)/")


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A dataset repository, `OWNER/NAME`, and its newest commit; None if the listing does not state it."""

    name: str
    commit: str | None


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository, with the hub's checksum: of the bytes (`sha256:`) or of the git blob (`git-sha1:`)."""

    path: str
    size: int
    checksum: str


def hub_endpoint() -> str:
    """Return the address of the hub as huggingface_hub determines it, without importing huggingface_hub."""
    constants = sys.modules.get("huggingface_hub.constants")
    found = constants.ENDPOINT if constants else os.environ.get("HF_ENDPOINT", _DEFAULT_ENDPOINT)
    return str(found).rstrip("/")


class Hub(HttpTransport):
    """The hub that the environment names, and a transport for addresses on it. Safe to use from many threads.

    All methods raise NetworkError (at once under `RBTOOL_OFFLINE` and `HF_HUB_OFFLINE`), AuthorisationError or
    DatasetNotFoundError, and FormatError for invalid answers.
    """

    def __init__(self) -> None:
        super().__init__(hint=TOKEN_HINT)

    def repositories(self, owner: str) -> list[HubRepository]:
        """List the dataset repositories of a user or an organisation, by name."""
        what = f"the list of datasets of {owner}"
        entries = self._pages("/api/datasets", urlencode({"author": owner}), what)
        found = {}
        for entry in entries:
            name = entry.get("id")
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII):
                raise FormatError(f"{what} has a repository called {name!r}, expected OWNER/NAME")
            found[name] = HubRepository(name, _commit(entry))
        return [found[name] for name in sorted(found) if name.startswith(f"{owner}/")]

    def commit(self, repository: str, revision: str | None = None) -> str:
        """Return the commit of a branch, a tag or a commit; by default the newest of `main`."""
        path = f"/api/datasets/{quote(repository)}/revision/{quote(revision or 'main', safe='')}"
        what = f"the repository {repository}" + (f" at revision {revision}" if revision else "")
        try:
            document, *_ = retrying(functools.partial(self._ask, path, "", what))
        except AuthorisationError:
            self._require_listed(repository)
            raise
        commit = _commit(document)
        if commit is None:
            raise FormatError(f"the hub says of {what} that its commit is {document!r:.100}")
        return commit

    def tree(self, repository: str, commit: str, folder: str = "") -> list[HubFile]:
        """List the files of a repository at a commit, or below one folder; one request for about 1,000 files."""
        path = f"/api/datasets/{quote(repository)}/tree/{commit}" + (f"/{quote(folder, safe='')}" if folder else "")
        what = f"{folder or 'the files'} in the repository {repository} at {commit[:7]}"
        entries = self._pages(path, "recursive=true&expand=false", what)
        prefix = f"{folder}/" if folder else ""
        return [_file(entry, prefix, what) for entry in entries if entry.get("type") == "file"]

    def address(self, repository: str, revision: str, path: str) -> str:
        """Return the address of the bytes of a file."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(repository, path, repo_type="dataset", revision=revision)

    def headers(self, address: str, url: str) -> Mapping[str, str]:
        """Return the token for addresses on the hub, and nothing for others."""
        return self._headers if address.startswith(f"{self._endpoint}/") else {}

    @contextlib.contextmanager
    def open_range(
        self, address: str, start: int, stop: int | None, version: str | None = None
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        with _asked(address), super().open_range(address, start, stop, version) as opened:
            yield opened

    @contextlib.contextmanager
    def open_version(self, address: str, offset: int, version: str | None = None) -> Iterator[Answer]:
        with _asked(address), super().open_version(address, offset, version) as answer:
            yield answer

    @cached_property
    def _endpoint(self) -> str:
        from huggingface_hub import constants

        return constants.ENDPOINT

    @cached_property
    def _headers(self) -> dict[str, str]:
        # Not build_hf_headers, which requests a list of coding agents from the hub, and reads an answer of any size.
        token = hub_token(self._connected().timeout, self._watch, self.interrupt)
        authorization = {"authorization": f"Bearer {token}"} if token else {}
        return {"user-agent": f"rbtool/{__version__}", **authorization}

    def _require_listed(self, repository: str) -> None:
        """Raise DatasetNotFoundError if the public list of the owner's repositories does not contain the repository.

        The hub answers 401 both for a missing repository and for a private one.
        """
        owner = repository.partition("/")[0]
        if all(found.name != repository for found in self.repositories(owner)):
            raise DatasetNotFoundError(
                f"the hub shows no dataset repository {repository}: there is none, or it is private and needs HF_TOKEN"
            )

    def _pages(self, path: str, query: str, what: str) -> Iterator[dict[str, Any]]:
        """Yield the entries of a listing from all its pages."""
        seen, following, total = set(), query, 0
        while following not in seen:
            seen.add(following)
            page, link, size = retrying(functools.partial(self._ask, path, following, what))
            total += size
            if total > _PAGE_BYTES or len(seen) > PAGES:
                raise FormatError(f"{what} has no end: more than {len(seen) - 1:,} pages and {total:,} bytes came")
            if not isinstance(page, list) or not all(isinstance(entry, dict) for entry in page):
                raise FormatError(f"{what} is {page!r:.100} on the hub, expected a list of objects")
            yield from page
            if link is None:
                return
            if not page:
                raise FormatError(f"{what} has no end: an empty page of it is followed by another")
            # Only the query: a mirror returns links to the real hub, and the token must not be sent to another host.
            following = _query_of(link, what)
        raise FormatError(f"{what} has no end: a page of it is followed by itself")

    def _ask(self, path: str, query: str, what: str) -> tuple[Any, str | None, int]:
        """Request one JSON document; return it, the address of the next page, and its size in bytes."""
        require_network(f"asking the hub for {what}", "HF_HUB_OFFLINE")
        import httpx2
        from huggingface_hub import get_session
        from huggingface_hub.errors import OfflineModeIsEnabled

        timeout = self._connected().timeout
        address = f"{self._endpoint}{path}" + (f"?{query}" if query else "")
        headers, said = {**self._headers, "Accept-Encoding": "gzip"}, f"the hub's answer about {what}"
        client, watched = get_session(), {"trace": self._watch}
        try:
            request = client.build_request("GET", address, headers=headers, timeout=timeout, extensions=watched)
            with answer_to(client, request, self.interrupt) as response:
                if response.is_error:
                    _raise_for_status(response, what)
                encoding = response.headers.get("Content-Encoding", "").strip().lower()
                body = bounded(paced(response.iter_raw(), said), encoding, _PAGE_BYTES, said)
                link = response.links.get("next", {}).get("url")
        except (OfflineModeIsEnabled, httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise self._failure(error, what) from error
        return parse_json(body, said), link, len(body)

    def _failure(self, error: Exception, what: str) -> Exception:
        """Return the error for an exception of huggingface_hub or of its http client."""
        from huggingface_hub import errors

        if isinstance(error, errors.OfflineModeIsEnabled):
            return NetworkError(f"{what} needs the network, which huggingface_hub is set not to use")
        if isinstance(error, errors.GatedRepoError):
            page = _conditions(str(error.response.request.url))
            return AuthorisationError(f"{what} is gated: the hub gives it to those who accepted its terms", hint=page)
        if isinstance(error, errors.RevisionNotFoundError):
            said = f"the hub does not have {what}: there is no such revision"
            return DatasetNotFoundError(said, hint="--revision takes a branch, a tag or a commit of the repository")
        if isinstance(error, errors.DisabledRepoError):
            return AuthorisationError(f"the hub has disabled {what}")
        if isinstance(error, errors.RepositoryNotFoundError) and error.response.status_code == 401:
            said = f"the hub does not show {what}: it is private, or does not exist (401 Unauthorized)"
            return AuthorisationError(said, hint=TOKEN_HINT)
        response: httpx2.Response | None = getattr(error, "response", None)
        return failure(error if response is None else response, what, hint=TOKEN_HINT)


def _query_of(link: str, what: str) -> str:
    try:
        return urlsplit(link).query
    except ValueError as error:
        raise FormatError(f"{what} has a page after it at {link!r:.100}, which is not an address") from error


def _raise_for_status(response: httpx2.Response, what: str) -> None:
    """Raise the error of huggingface_hub that follows from the status and the hub's own headers."""
    import httpx2
    from huggingface_hub import hf_raise_for_status

    # Without the body, which it would read at any size, and without warnings, which it would log to stderr.
    headers = [(name, value) for name, value in response.headers.raw if name.lower() not in _OF_BODIES]
    bare = httpx2.Response(response.status_code, headers=headers, request=response.request)
    try:
        hf_raise_for_status(bare)
    except httpx2.HTTPError:
        raise
    except (AttributeError, TypeError, ValueError, RecursionError) as error:  # the answer is not in the form of a hub
        raise failure(response, what, hint=TOKEN_HINT) from error


@contextlib.contextmanager
def _asked(address: str) -> Iterator[None]:
    """Raise NetworkError if the network is forbidden, and add hints to the hub's refusals."""
    require_network(f"fetching from {urlsplit(address).hostname}", "HF_HUB_OFFLINE")
    try:
        yield
    except AuthorisationError as error:
        raise AuthorisationError(error.message, hint=_conditions(address)) from error
    except DatasetNotFoundError as error:
        if isinstance(error, StaleListing) or not _PINNED.search(address):
            raise
        raise StaleListing(error.message) from error


def _conditions(address: str) -> str:
    """Return a hint on what to do about a repository that may be gated."""
    found = _OWNER.search(urlsplit(address).path + "/")
    page = f"accept its terms at {hub_endpoint()}/datasets/{found[1]} if it is gated; " if found else ""
    return page + TOKEN_HINT


def _commit(document: Any) -> str | None:
    """Return the commit in a document of the hub about a repository; None if it has none."""
    sha = document.get("sha") if isinstance(document, dict) else None
    return sha if isinstance(sha, str) and re.fullmatch(r"[0-9a-f]{40}", sha) else None


def _file(entry: Mapping[str, Any], prefix: str, what: str) -> HubFile:
    """Parse one entry of a tree: a large file is stored by git LFS under its SHA-256, a small one as a git blob."""
    lfs = entry.get("lfs")
    kind, digits, oid = ("sha256", 64, lfs.get("oid")) if isinstance(lfs, dict) else ("git-sha1", 40, entry.get("oid"))
    path, size = entry.get("path"), entry.get("size")
    if not isinstance(path, str) or not path.startswith(prefix) or not is_inside(path) or "\\" in path:
        raise FormatError(f"{what} holds {path!r}, expected a path below it")
    if not isinstance(size, int) or size < 0 or not re.fullmatch(f"[0-9a-f]{{{digits}}}", str(oid)):
        raise FormatError(f"{what} holds {path!r} with size {size!r} and checksum {oid!r}")
    return HubFile(path, size, f"{kind}:{oid}")


class HubSource(Source):
    """Datasets on the hub that the environment names (`HF_ENDPOINT`, `HF_TOKEN`)."""

    @property
    @abstractmethod
    def listed(self) -> str:
        """The owner or the repository whose datasets are listed."""

    @property
    def remote(self) -> str:
        """The address of the owner or the repository."""
        return f"hf://{self.listed}"

    @property
    def key(self) -> str:
        """The address of the owner or the repository, with the host of the hub."""
        return f"{hub_endpoint()}/{self.listed}"

    @cached_property
    def hub(self) -> Hub:
        """The connections to the hub."""
        return Hub()

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Fetch the files into `folder`, a few at a time."""
        fetch_files(files, folder, self.hub, progress=progress, note=note)

    def on_close(self) -> None:
        """Close the connections, if there are any."""
        if "hub" in self.__dict__:
            self.hub.close()


class HubRepositorySource(HubSource):
    """A source of dataset repositories: any one by its `OWNER/NAME`; the repositories of one owner are listed.

    A subclass sets `name` and `owner`, and implements `look_up` with `described`.
    """

    open_ended = True
    owner: ClassVar[str]
    """The organisation whose repositories are listed."""

    @property
    def listed(self) -> str:
        """The owner."""
        return self.owner

    def list_ids(self) -> Ids:
        """List the repositories of the owner."""
        return Ids(tuple(one.name for one in self.hub.repositories(self.owner)))

    def reader_options(self, dataset_id: str) -> Mapping[str, str]:
        """Return the id, which the files do not contain."""
        return {"id": dataset_id}

    def described(self, dataset_id: str, repository: str, commit: str, files: Iterable[HubFile]) -> RemoteDataset:
        """Describe a dataset that consists of these files of a repository."""
        remote = (
            RemoteFile(file.path, file.size, file.checksum, (self.hub.address(repository, commit, file.path),))
            for file in files
        )
        ordered = tuple(sorted(remote, key=lambda file: file.path))
        return RemoteDataset(dataset_id, f"hf://{repository}@{commit}", commit, ordered)


class HubFolderSource(HubSource):
    """A source of datasets in the folders of one dataset repository.

    A subclass sets `name`, `repository` and `suffixes`. By default every folder that directly contains files with these
    suffixes is a dataset of these files, and its id is its path below `folder`. A source with another rule overrides
    `datasets_among` and `place_of`.

    The revision of a dataset is the commit of the repository. Sizes and checksums come from the hub.
    """

    namespaced = False
    repository: ClassVar[str]
    """The repository with its owner: `OWNER/NAME`."""
    folder: ClassVar[str] = ""
    """The folder of the repository to which ids are relative."""
    suffixes: ClassVar[tuple[str, ...]]
    """The ends of the names of data files, in lower case."""

    @property
    def listed(self) -> str:
        """The repository."""
        return self.repository

    def datasets_among(self, files: Sequence[HubFile]) -> Mapping[str, Sequence[HubFile]]:
        """Return the files of each dataset, by id, given a listing of the whole repository."""
        start = f"{self.folder}/" if self.folder else ""
        found: dict[str, list[HubFile]] = {}
        for file in self.data_files(files):
            parent = _parent(file)
            if parent.startswith(start) and parent != start.rstrip("/"):
                found.setdefault(parent.removeprefix(start), []).append(file)
        return found

    def place_of(self, dataset_id: str) -> str | None:
        """Return the folder with the files of a dataset; None if they can only be found in the whole listing."""
        return f"{self.folder}/{dataset_id}" if self.folder else dataset_id

    def data_files(self, files: Iterable[HubFile]) -> list[HubFile]:
        """Return the data files, by their suffixes, without hidden ones."""
        return [
            file
            for file in files
            if file.path.lower().endswith(self.suffixes)
            and not any(part.startswith(".") for part in file.path.split("/"))
        ]

    def list_ids(self) -> Ids:
        """List the ids, with one request for the commit and one for about every 1,000 files."""
        return Ids(tuple(sorted(self._all())))

    def list_catalogue(self, known: Catalogue | None, progress: Callable[[int, int], None]) -> Catalogue:
        """List all datasets with their sizes, with the same requests as `list_ids`."""
        found = self._all()
        entries = tuple(CatalogueEntry(one, sum(file.size for file in found[one])) for one in sorted(found))
        progress(len(entries), len(entries))
        return Catalogue(self.remote, written_time(), entries)

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Find the files of a dataset, with one request for the commit and one or more for the files."""
        place = self.place_of(safe_id(dataset_id))
        commit = self.hub.commit(self.repository, revision)
        try:
            files = self.datasets_among(self.hub.tree(self.repository, commit, place or "")).get(dataset_id)
        except DatasetNotFoundError as error:
            raise self._not_found(dataset_id, commit, revision) from error
        if not files:
            raise self._not_found(dataset_id, commit, revision)
        parent = _parent(files[0])
        remote = (
            RemoteFile(
                file.path.removeprefix(parent).lstrip("/"), file.size, file.checksum,
                (self.hub.address(self.repository, commit, file.path),),
            )
            for file in files
        )  # fmt: skip
        where = f"{self.remote}@{commit}" + (f"/{parent}" if parent else "")
        return RemoteDataset(dataset_id, where, commit, tuple(sorted(remote, key=lambda file: file.path)))

    def _all(self) -> Mapping[str, Sequence[HubFile]]:
        """Return the files of all datasets at the newest commit; DatasetNotFoundError if there are none."""
        commit = self.hub.commit(self.repository)
        found = self.datasets_among(self.hub.tree(self.repository, commit))
        if not found:
            raise DatasetNotFoundError(f"{self.remote} has no datasets at {commit[:7]}")
        return found

    def _not_found(self, dataset_id: str, commit: str, revision: str | None) -> DatasetNotFoundError:
        where = f"at {revision} ({commit[:7]})" if revision else f"at {commit[:7]}"
        hint = "it may be there in another revision: leave out --revision for the newest" if revision else ""
        return DatasetNotFoundError(f"{self.remote} has no dataset {dataset_id!r} {where}", hint=hint)


def _parent(file: HubFile) -> str:
    return file.path.rpartition("/")[0]


_ANSWER_BYTES = 1 << 20
_BUSY = frozenset({408, 425, 429})
_CHANGED = frozenset({409, 412})
_OCCUPIED = b"another conflicting operation is in progress"
"""The text of an answer after which huggingface_hub retries forever and without a pause."""
_CONNECT_SECONDS = 10.0
_COMMIT_TIMES = 10
"""The factor by which the time-out for a commit is longer, as a hub takes long to commit many files."""
_LOGGER = "huggingface_hub"


@dataclass(frozen=True, slots=True)
class Gate:
    """Sends the requests of huggingface_hub in a context.

    Attributes:
        what: what is sent, for messages.
        endpoint: the address of the hub; other hosts get no token.
        trace: is called for each new connection.
        hint: what to do about refused access.
        watch: the functions of the job that makes the requests.
        file: the file that is sent, if any; a repeated request sends it from the same position again.
    """

    what: str
    endpoint: str
    trace: Trace
    hint: str
    watch: Watch
    file: io.BufferedIOBase | None = None

    def send(self, send: Callable[..., httpx2.Response], request: httpx2.Request, **given: Any) -> httpx2.Response:
        """Send a request by `send`; retry it after temporary failures, unless it must not be made twice."""
        if request.url.path.endswith("/agent-harnesses"):  # the client's report to the hub on who calls it
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
        if not str(request.url).startswith(f"{self.endpoint}/"):  # the hub may send objects to another host
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
    """Send huggingface_hub's requests in this context through a gate, and translate its errors into rbtool's.

    Raises NetworkError at once if the network is forbidden.
    """
    require_network(f"sending {gate.what}", "HF_HUB_OFFLINE")
    _put_gate()
    before = _GATE.set(gate)
    try:
        yield
    except Exception as error:
        known = _known(error)
        if known is not None:
            raise known from known.__cause__  # the client's error, which wraps it, would be shown otherwise
        raise _meaning(error, gate) from error
    finally:
        _GATE.reset(before)


def _put_gate() -> None:
    """Wrap `send` of the client's session, which the client replaces after it has closed one."""
    from huggingface_hub import get_session

    session = get_session()
    if "send" not in vars(session):
        session.send = functools.partial(_pass, session.send)  # type: ignore[method-assign]
    for handler in logging.getLogger(_LOGGER).handlers:
        handler.addFilter(_is_heard)  # adding a filter twice has no effect


def _pass(send: Callable[..., httpx2.Response], request: httpx2.Request, **given: Any) -> httpx2.Response:
    gate = _GATE.get()
    return send(request, **given) if gate is None else gate.send(send, request, **given)


def _is_heard(record: logging.LogRecord) -> bool:
    """Return whether a record of the client's log is shown: not inside a gate, which reports failures itself."""
    return _GATE.get() is None


def _known(error: BaseException) -> Exception | None:
    """Return the error of rbtool or of the sent file that an error of the client wraps; None if there is none."""
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
    """Return the error for an exception of huggingface_hub in a gate."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    found: BaseException | None = error
    while found is not None:  # an answer of the object storage is the cause of a RuntimeError
        response: httpx2.Response | None = getattr(found, "response", None)
        if response is not None:
            return refusal(response, gate.what, hint=gate.hint)
        found = found.__cause__
    if isinstance(error, OfflineModeIsEnabled):
        return NetworkError(f"{gate.what} needs the network, which huggingface_hub is set not to use")
    reason = " ".join(redact(str(error)).split())[:_LONGEST_REASON]
    return FormatError(f"{gate.what} could not be sent: huggingface_hub says {reason or type(error).__name__!r}")


def refusal(response: httpx2.Response, what: str, *, hint: str) -> Exception:
    """Return the error for an upload that a hub refused: a `Transient`, or an RbtoolError."""
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
    """Return the reason that the hub states, as the end of a sentence; "" without one."""
    said = response.headers.get("X-Error-Message", "")
    with contextlib.suppress(FormatError, AttributeError):
        said = said or parse_json(response.content, "the hub's answer").get("error", "")
    return f": {' '.join(redact(str(said)).split())[:_LONGEST_REASON]}" if said else ""


MAIN = "main"
_WORKERS = 4
_SMALL = 32 << 20  # smaller files may be stored in git itself, and are identified by their git blob


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file to upload: its path in the repository, its bytes or their path on disk, and their checksums.

    `git_sha1` is None for a large file, which no hub stores in git.
    """

    path: str
    source: Path | bytes
    size: int
    sha256: str
    git_sha1: str | None

    @classmethod
    def of(cls, path: str, data: bytes) -> LocalFile:
        """Return a file with these bytes."""
        git = hasher("git-sha1:" + "0" * 40, len(data))
        git.update(data)
        return cls(path, data, len(data), f"sha256:{hashlib.sha256(data).hexdigest()}", git.found)

    @classmethod
    def read(cls, record: FileRecord, source: Path, advance: Advance) -> LocalFile:
        """Read a listed file and compute its checksums; CorruptDataError if its bytes do not match the manifest."""
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
    """A hub whose dataset repositories are written to, through huggingface_hub; the token has to allow that.

    Raises the errors of `Hub`, and ChangedMeanwhileError if somebody else commits at the same time.
    """

    def require_token(self, address: str) -> None:
        """Raise AuthorisationError if no token is found."""
        if "authorization" not in self._headers:
            raise AuthorisationError(f"an upload to {address} needs a token, and none is found", hint=TOKEN_HINT)

    def is_private(self, repository: str) -> bool | None:
        """Return whether a repository is private; None if the hub shows none of that name."""
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
        """Return the newest commit of each branch."""
        what = f"the branches of {repository}"
        document, *_ = retrying(functools.partial(self._ask, f"/api/datasets/{quote(repository)}/refs", "", what))
        try:
            found = {str(one["name"]): str(one["targetCommit"]) for one in document["branches"]}
        except (KeyError, TypeError) as error:
            raise FormatError(f"the hub describes {what} by {document!r:.100}, expected a list of them") from error
        return found

    def create(self, repository: str, *, private: bool, note: Note = ignore) -> None:
        """Create a repository, unless another process has just created it."""

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
        """Create a branch at the newest commit of `main`, unless it exists."""
        with self._hf_api(f"the branch {branch} of {repository}") as api:
            api.create_branch(repository, branch=branch, repo_type="dataset", exist_ok=True)

    def send(
        self, repository: str, branch: str, files: Sequence[LocalFile], *, progress: Advance = ignore,
        note: Note = ignore,
    ) -> SentFiles:  # fmt: skip
        """Send the objects of files that the hub does not have yet; `put` commits them afterwards.

        `progress` is called with the number of bytes that are done, negative if some have to be sent again.
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
        """Send one file, counted and repeatable.

        An open file is sent by git LFS even if `hf_xet` is installed, whose requests cannot be limited.
        """
        with _opened(file, watch.progress) as reading:
            before = operation.path_or_fileobj
            operation.path_or_fileobj = cast("BinaryIO", reading)
            with self._hf_api(file.path, watch, reading) as api:
                api.preupload_lfs_files(
                    repository, [operation], repo_type="dataset", revision=branch, num_threads=1, free_memory=False,
                    gitignore_content="# none",  # otherwise rules of the repository could skip files
                )  # fmt: skip
            operation.path_or_fileobj = before
        done = reading.reported if isinstance(reading, _Counted) else 0
        sent.append(done)
        watch.progress(file.size - done)

    def put(
        self, repository: str, branch: str, parent: str, sent: SentFiles, *, deleted: Sequence[str], message: str
    ) -> str:
        """Commit the sent files and the removal of others, on top of the commit `parent`; return the new commit.

        ChangedMeanwhileError if the branch is at another commit. After a Transient the commit may exist all the same.
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
        """Return the client, with its requests sent through a gate; `what` is what is sent, for messages."""
        from huggingface_hub import HfApi

        token = self._headers.get("authorization", "").removeprefix("Bearer ")
        with through(Gate(what, self._endpoint, self._watch, TOKEN_HINT, watch or Watch(), file)):
            yield HfApi(
                endpoint=self._endpoint, token=token or False, library_name="rbtool", library_version=__version__
            )


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the client's progress bars, which would mix with rbtool's output, unless the environment sets them."""
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
    """The files of a commit: the operations of huggingface_hub, and how many bytes of each object had to be sent."""

    operations: list[CommitOperationAdd]
    bytes: list[int]


class _Counted(io.BufferedReader):
    """A file that reports how many of its bytes were read; after seeking back it reports a negative number."""

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
    """Raise UsageError for a path that no hub accepts, such as one below `.git`."""
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
