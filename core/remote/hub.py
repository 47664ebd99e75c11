"""Dataset repositories on a Hugging Face hub: which there are, what is in them, and sources that download them.

Token, endpoint, session and errors come from huggingface_hub, which reads its variables when it is imported:
that is when a hub is first asked. Pages of a listing are turned here. Its own way of doing that waits for a silent
server without end, regardless of the session, and repeats failed requests six times, each time that we do.
"""

from __future__ import annotations

import contextlib
import functools
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
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote, urlencode, urlsplit

from .. import __version__
from ..errors import AuthorisationError, DatasetNotFoundError, FormatError, NetworkError
from ..format.documents import parse_json, written_time
from ..format.manifest import is_inside
from ..format.sources import (
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
from ..progress import redact
from .fetch import fetch_files
from .http import HttpTransport, failure
from .transport import ERROR_BYTES, PAGES, Answer, answer_to, bounded, head_in_time, paced, require_network, retrying

if TYPE_CHECKING:
    import httpx2


TOKEN_HINT = "HF_TOKEN holds the token, or `hf auth login` stores one"
_WHAT = "the token for the hub"
_LONGEST_REASON = 300
_SESSION = threading.Lock()  # huggingface_hub has one session for the process
_SENSELESS = (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What huggingface_hub raises for answers of another shape than it expects, next to its own errors."""

Trace = Callable[[str, Mapping[str, Any]], None]


def hub_token(timeout: httpx2.Timeout, watch: Trace, interrupt: Callable[[], None]) -> str | None:
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
def _bounded_session(timeout: httpx2.Timeout, watch: Trace) -> Iterator[None]:
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


_DEFAULT_ENDPOINT = "https://huggingface.co"
_PAGE_BYTES = 64 << 20
_OF_BODIES = frozenset({b"content-encoding", b"content-length", b"transfer-encoding", b"x-hf-warning"})
_PINNED = re.compile(r"/resolve/[0-9a-f]{40}/")
_OWNER = re.compile(r"/datasets/([^/]+/[^/]+)/")


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A dataset repository, `name` with its owner; `commit` is its newest, None where the listing does not state."""

    name: str
    commit: str | None


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository, with the hub's checksum: of the bytes (`sha256:`) or of the git blob (`git-sha1:`)."""

    path: str
    size: int
    checksum: str


def hub_endpoint() -> str:
    """Return the address of the hub, as huggingface_hub sees it, without importing that."""
    constants = sys.modules.get("huggingface_hub.constants")
    found = constants.ENDPOINT if constants else os.environ.get("HF_ENDPOINT", _DEFAULT_ENDPOINT)
    return str(found).rstrip("/")


class Hub(HttpTransport):
    """The hub that the environment names, and a transport for addresses on it. Safe to use from many threads.

    Everything raises NetworkError (at once under `RBTOOL_OFFLINE` and `HF_HUB_OFFLINE`), AuthorisationError or
    DatasetNotFoundError, and FormatError for answers that make no sense.
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
        """Find the commit that a branch, a tag or a commit names: `main` by default."""
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
        """List all files of a repository at a commit, or those below one folder: a request for every 1,000 or so."""
        path = f"/api/datasets/{quote(repository)}/tree/{commit}" + (f"/{quote(folder, safe='')}" if folder else "")
        what = f"{folder or 'the files'} in the repository {repository} at {commit[:7]}"
        entries = self._pages(path, "recursive=true&expand=false", what)
        prefix = f"{folder}/" if folder else ""
        return [_file(entry, prefix, what) for entry in entries if entry.get("type") == "file"]

    def address(self, repository: str, revision: str, path: str) -> str:
        """Where the bytes of a file are."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(repository, path, repo_type="dataset", revision=revision)

    def headers(self, address: str) -> Mapping[str, str]:
        """The token, for the hub alone."""
        return self._headers if address.startswith(f"{self._endpoint}/") else {}

    @contextlib.contextmanager
    def open_range(self, address: str, start: int, stop: int | None) -> Iterator[tuple[int, Iterator[bytes]]]:
        with _asked(address), super().open_range(address, start, stop) as opened:
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
        # Not build_hf_headers: it asks the hub which coding agents there are, and reads any answer whole.
        token = hub_token(self._connected().timeout, self._watch, self.interrupt)
        authorization = {"authorization": f"Bearer {token}"} if token else {}
        return {"user-agent": f"rbtool/{__version__}", **authorization}

    def _require_listed(self, repository: str) -> None:
        """Raise DatasetNotFoundError if the owner's list, which can be seen, does not have the repository.

        The hub answers 401 for one that is not there as for one that is private.
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
            # Only the query: a mirror hands out links to the real hub, and the token must go nowhere else.
            following = _query_of(link, what)
        raise FormatError(f"{what} has no end: a page of it is followed by itself")

    def _ask(self, path: str, query: str, what: str) -> tuple[Any, str | None, int]:
        """Get one JSON document, the address of the page after it, and its size in bytes."""
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
        """Describe what an error of huggingface_hub or its http client means."""
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
            said = f"the hub does not show {what}: it is private, or there is no such thing (401 Unauthorized)"
            return AuthorisationError(said, hint=TOKEN_HINT)
        response: httpx2.Response | None = getattr(error, "response", None)
        return failure(error if response is None else response, what, hint=TOKEN_HINT)


def _query_of(link: str, what: str) -> str:
    try:
        return urlsplit(link).query
    except ValueError as error:
        raise FormatError(f"{what} has a page after it at {link!r:.100}, which is no address") from error


def _raise_for_status(response: httpx2.Response, what: str) -> None:
    """Raise the error of huggingface_hub that the status and the hub's own headers give."""
    import httpx2
    from huggingface_hub import hf_raise_for_status

    # Of the body, it would read and unpack any length; of the warnings, it would log each to stderr.
    headers = [(name, value) for name, value in response.headers.raw if name.lower() not in _OF_BODIES]
    bare = httpx2.Response(response.status_code, headers=headers, request=response.request)
    try:
        hf_raise_for_status(bare)
    except httpx2.HTTPError:
        raise
    except (AttributeError, TypeError, ValueError, RecursionError) as error:  # the body is not what a hub states
        raise failure(response, what, hint=TOKEN_HINT) from error


@contextlib.contextmanager
def _asked(address: str) -> Iterator[None]:
    """Refuse to ask where the network is forbidden, and raise what the hub's refusals mean."""
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
    """What to do about a repository that may be gated."""
    found = _OWNER.search(urlsplit(address).path + "/")
    page = f"accept its terms at {hub_endpoint()}/datasets/{found[1]} if it is gated; " if found else ""
    return page + TOKEN_HINT


def _commit(document: Any) -> str | None:
    """The commit in what the hub states about a repository."""
    sha = document.get("sha") if isinstance(document, dict) else None
    return sha if isinstance(sha, str) and re.fullmatch(r"[0-9a-f]{40}", sha) else None


def _file(entry: Mapping[str, Any], prefix: str, what: str) -> HubFile:
    """Read one entry of a tree; a large file is kept by git LFS under its SHA-256, a small one is a git blob."""
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
        """What the datasets are listed from: an owner or a repository."""

    @property
    def remote(self) -> str:
        """The address of what is listed."""
        return f"hf://{self.listed}"

    @property
    def key(self) -> str:
        """The address of what is listed, with the host of the hub."""
        return f"{hub_endpoint()}/{self.listed}"

    @cached_property
    def hub(self) -> Hub:
        """The connections to the hub."""
        return Hub()

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Bring the files to `folder`, a few at a time."""
        fetch_files(files, folder, self.hub, progress=progress, note=note)

    def on_close(self) -> None:
        """Close the connections, if there are any."""
        if "hub" in self.__dict__:
            self.hub.close()


class HubRepositorySource(HubSource):
    """Any dataset repository, by its `OWNER/NAME`, which is taken as it is; the repositories of one owner are listed.

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
        """The id, which the files do not state."""
        return {"id": dataset_id}

    def described(self, dataset_id: str, repository: str, commit: str, files: Iterable[HubFile]) -> RemoteDataset:
        """Describe a dataset that is made of these files of a repository."""
        remote = (
            RemoteFile(file.path, file.size, file.checksum, (self.hub.address(repository, commit, file.path),))
            for file in files
        )
        ordered = tuple(sorted(remote, key=lambda file: file.path))
        return RemoteDataset(dataset_id, f"hf://{repository}@{commit}", commit, ordered)


class HubFolderSource(HubSource):
    """The datasets in one dataset repository.

    A subclass sets `name`, `repository` and `suffixes`. By default every folder that has files of these suffixes in it
    is a dataset of those files, without those in folders inside it. Its id is its path below `folder`, and names that
    very folder. A source with another rule overrides `datasets_among` and `place_of`.

    The revision of a dataset is the commit that its files are taken from. Sizes and checksums come from the hub.
    """

    namespaced = False
    repository: ClassVar[str]
    """The repository with its owner: `OWNER/NAME`."""
    folder: ClassVar[str] = ""
    """The folder of the repository that ids begin below."""
    suffixes: ClassVar[tuple[str, ...]]
    """The ends of the names of data files, in lower case."""

    @property
    def listed(self) -> str:
        """The repository."""
        return self.repository

    def datasets_among(self, files: Sequence[HubFile]) -> Mapping[str, Sequence[HubFile]]:
        """Return the ids of all datasets, each with its files, by a listing of the whole repository."""
        start = f"{self.folder}/" if self.folder else ""
        found: dict[str, list[HubFile]] = {}
        for file in self.data_files(files):
            parent = _parent(file)
            if parent.startswith(start) and parent != start.rstrip("/"):
                found.setdefault(parent.removeprefix(start), []).append(file)
        return found

    def place_of(self, dataset_id: str) -> str | None:
        """Return the folder whose files make up a dataset; None where only a listing of the repository shows them."""
        return f"{self.folder}/{dataset_id}" if self.folder else dataset_id

    def data_files(self, files: Iterable[HubFile]) -> list[HubFile]:
        """Return the data files, by their suffixes; hidden ones are none."""
        return [
            file
            for file in files
            if file.path.lower().endswith(self.suffixes)
            and not any(part.startswith(".") for part in file.path.split("/"))
        ]

    def list_ids(self) -> Ids:
        """List the ids: a request for the commit, and one for every 1,000 files or so."""
        return Ids(tuple(sorted(self._all())))

    def list_catalogue(self, known: Catalogue | None, progress: Callable[[int, int], None]) -> Catalogue:
        """List all datasets with their sizes, by the same requests."""
        found = self._all()
        entries = tuple(CatalogueEntry(one, sum(file.size for file in found[one])) for one in sorted(found))
        progress(len(entries), len(entries))
        return Catalogue(self.remote, written_time(), entries)

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Find the files of a dataset: a request for the commit, and one or more for the files."""
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
        """All datasets at the newest commit; DatasetNotFoundError for a repository without any."""
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
