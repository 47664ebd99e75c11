"""Folders of datasets that streams read: at a commit of a hub, in a bucket of S3 or Google Cloud, or on a web server.

Web servers and buckets need not list their files, since the manifest does. All are read over http by `HttpTransport`.
Credentials are found by botocore and google-auth in every process anew; no address, message or pickle contains them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from ..errors import (
    AuthorisationError,
    CorruptDataError,
    DatasetNotFoundError,
    NetworkError,
    RbtoolError,
    UsageError,
)
from ..format import fs
from ..format.contracts import Closing
from ..format.converter import RemoteFile
from ..format.documents import parse_json
from ..format.manifest import MANIFEST, Manifest, is_inside
from ..progress import redact
from .fetch import fetching
from .http import HttpTransport, failure
from .hub import Hub, hub_endpoint
from .hub_address import HubAddress
from .shards import SHARD_DIGESTS
from .threads import Job, Watch, ask_all, run_together
from .transport import ERROR_BYTES, Answer, Transient, paced, read_range, read_small, require_network, retrying

if TYPE_CHECKING:
    import httpx2


_LOG = logging.getLogger("rbtool.remote")
_DOCUMENT_BYTES = 256 << 20
_SCHEMES = ("s3", "gs", "http", "https")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", re.ASCII)
_HOST = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::[0-9]+)?", re.ASCII)


class RemoteFolder(Closing):
    """The files of a dataset at a remote, in the state that they had when the folder was opened.

    Each file has the remote's checksum or a version. `key` is a text that differs for every folder and state. A pickle
    contains the state; its copy, like a forked process, makes connections of its own.
    """

    def __init__(
        self, address: str, key: str, name: str, files: Mapping[str, RemoteFile], transport: HttpTransport
    ) -> None:
        self.address = address
        self.key = key
        self.name = name
        self.files = dict(files)
        self._kind = type(transport)
        self._begin(transport)

    def _begin(self, transport: HttpTransport) -> None:
        self._own = {os.getpid(): (transport, threading.Lock(), threading.Lock())}

    def _of_process(self) -> tuple[HttpTransport, threading.Lock, threading.Lock]:
        """Return the transport and the locks of this process.

        A forked process needs new ones: it inherits connections that its parent uses, and locks that nobody releases.
        `setdefault` is atomic, so that all threads get the same ones.
        """
        own = self._own.get(os.getpid())
        return own or self._own.setdefault(os.getpid(), (self._kind(), threading.Lock(), threading.Lock()))

    @property
    def transport(self) -> HttpTransport:
        """The connections of this process."""
        return self._of_process()[0]

    @property
    def files_lock(self) -> threading.Lock:
        """A lock for threads of this process whose files several shards share, so that only one fetches at a time."""
        return self._of_process()[1]

    @property
    def turn_lock(self) -> threading.Lock:
        """A lock of the thread of this process whose shard is fetched first."""
        return self._of_process()[2]

    def fetch(self, names: Sequence[str], folder: Path, *, pinned: Sequence[str] = (), workers: int = 4) -> None:
        """Fetch whole files into a folder, unless they exist there, and compare them with the remote's checksums.

        At the same time request the versions of the files `pinned`, without fetching them.
        """
        jobs = self._jobs(names, folder, pinned)
        run_together(jobs, Watch(), workers=workers, interrupt=self.transport.interrupt)

    def _jobs(self, names: Sequence[str], folder: Path, pinned: Sequence[str]) -> list[Job]:
        """Return the jobs of `fetch`. At a commit of a hub, files have only one version, so that none is pinned."""
        return fetching([self.files[name] for name in names], folder, self.transport)

    def read(self, name: str, start: int, stop: int, write: Callable[[memoryview, int], None]) -> None:
        """Pass bytes of a file to `write`; ChangedMeanwhileError if the remote now has another version of the file."""
        file, what = self.files[name], f"{name} of {self.address}"
        read_range(self.transport, file.addresses[0], start, stop, write, what=what, version=file.version)

    def close(self) -> None:
        """Close the connections."""
        self.transport.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("address", "key", "name", "files", "_kind")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin(self._kind())


def hub_folder(address: HubAddress) -> RemoteFolder:
    """Open a repository of a hub at the commit that its revision names now."""
    repository, hub = address.repository, Hub()
    with _closed_on_failure(hub):
        commit = hub.commit(repository, address.revision)
        found = hub.tree(repository, commit)
        places = {file.path: (hub.address(repository, commit, file.path),) for file in found}
    files = {file.path: RemoteFile(file.path, file.size, file.checksum, places[file.path]) for file in found}
    key = f"{hub_endpoint()}/{repository}@{commit}"
    return RemoteFolder(f"hf://{repository}@{commit[:7]}", key, repository.replace("/", "--"), files, hub)


@contextmanager
def _closed_on_failure(transport: HttpTransport) -> Iterator[None]:
    try:
        yield
    except BaseException:
        transport.close()
        raise


# Web servers and buckets ----------------------------------------------------------------------------


def is_web_address(text: str) -> bool:
    """Return whether a text starts like the address of a folder in a bucket or on a web server."""
    return text.partition("://")[0].lower() in _SCHEMES and "://" in text


def web_folder(text: str) -> RemoteFolder:
    """Open a folder in a bucket or on a web server: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `http(s)://…`.

    Reads the manifest and the digests of shards, in parallel. UsageError for other addresses, and for one with a
    password or a query; DatasetNotFoundError if there is no manifest; the errors of transports.
    """
    address = _web_address(text)
    scheme, _, rest = address.partition("://")
    kinds: dict[str, type[WebTransport]] = {"s3": S3Transport, "gs": GcsTransport}
    transport = kinds.get(scheme, WebTransport)()
    with _closed_on_failure(transport):
        documents = _documents(address, transport)
        origin = f"{address}/{MANIFEST}"
        manifest = Manifest.from_dict(parse_json(documents[MANIFEST], origin), origin)
        if outside := next((file.path for file in manifest.files if not is_inside(file.path)), None):
            raise CorruptDataError(f"the manifest of {address} lists {outside!r}, which leads out of the folder")
    found = {file.path: RemoteFile(file.path, file.size, None, _place(address, file.path)) for file in manifest.files}
    for name, data in documents.items():
        found[name] = RemoteFile(name, len(data), f"sha256:{hashlib.sha256(data).hexdigest()}", _place(address, name))
    name = re.sub(r"[^\w.-]+", "-", unquote(rest), flags=re.ASCII).strip("-")[-80:]
    folder = _WebFolder(address, f"{address}@{found[MANIFEST].checksum}", name, found, transport)
    folder.documents = documents
    return folder


class _WebFolder(RemoteFolder):
    """A folder whose files are those that its manifest lists; `documents` were read when it was opened.

    CorruptDataError if listed files are missing or have other sizes.
    """

    def _begin(self, transport: HttpTransport) -> None:
        super()._begin(transport)
        self.documents: dict[str, bytes] = {}  # until `fetch` writes them to files
        self._whole: list[str] = []

    def fetch(self, names: Sequence[str], folder: Path, *, pinned: Sequence[str] = (), workers: int = 4) -> None:
        super().fetch(names, folder, pinned=pinned, workers=workers)
        if self._whole:
            _LOG.warning(
                "%s is on a server that ignores byte ranges: each part of a file is read from the beginning of the "
                "file, which is slow; download the dataset, or use a server that supports ranges",
                self.address,
            )
            self._whole.clear()

    def _jobs(self, names: Sequence[str], folder: Path, pinned: Sequence[str]) -> list[Job]:
        for name in self.documents.keys() & set(names):
            data = self.documents.pop(name)
            if not (folder / name).exists():
                fs.make_folder((folder / name).parent)
                fs.replace_file(folder / name, data)
        asked = [name for name in pinned if self.files[name].checksum is self.files[name].version is None]
        jobs = super()._jobs(names, folder, ())
        jobs += [functools.partial(self._pin, name) for name in asked]
        return [functools.partial(self._expect, name, job) for name, job in zip((*names, *asked), jobs, strict=True)]

    def _pin(self, name: str, watch: Watch) -> None:
        """Request the size and the version of a file."""
        file = self.files[name]
        size, version, ranged = retrying(lambda: self.transport.look_up(*file.addresses), sleep=watch.sleep)
        if size not in (None, file.size):
            raise CorruptDataError(f"{self.address}: {name} has another size than its manifest lists")
        if not ranged and file.known_size > 1:
            self._whole.append(name)
        self.files[name] = replace(file, version=version)

    def _expect(self, name: str, job: Job, watch: Watch) -> None:
        """Run the job of a file; CorruptDataError if the file is missing although the manifest lists it."""
        try:
            job(watch)
        except DatasetNotFoundError as error:
            if self.files[name].checksum is not None:  # a document, which the manifest does not list
                raise
            raise CorruptDataError(f"{self.address} has no {name}, which its manifest lists") from error


def _place(address: str, name: str) -> tuple[str]:
    return (f"{address}/{quote(name)}",)


def _documents(address: str, transport: WebTransport) -> dict[str, bytes]:
    """Read the manifest and, if they exist, the digests of shards."""
    names = (MANIFEST, SHARD_DIGESTS)

    def read(name: str, watch: Watch) -> bytes:
        return read_small(transport, *_place(address, name), limit=_DOCUMENT_BYTES, sleep=watch.sleep)

    manifest, digests = ask_all([functools.partial(read, name) for name in names], transport)
    if isinstance(manifest, DatasetNotFoundError) and not manifest.hint:  # with a hint, the bucket itself is missing
        raise DatasetNotFoundError(f"{address} is not an rbtool dataset: it has no {MANIFEST}") from manifest
    if isinstance(manifest, RbtoolError):
        raise manifest
    if isinstance(digests, DatasetNotFoundError):
        return {MANIFEST: manifest}
    if isinstance(digests, AuthorisationError):
        said = "%s refuses %s, which counts as missing: S3 answers so where a bucket must not be listed"
        _LOG.warning(said, address, SHARD_DIGESTS)
        return {MANIFEST: manifest}
    if isinstance(digests, RbtoolError):
        raise digests
    return {MANIFEST: manifest, SHARD_DIGESTS: digests}


def _web_address(text: str) -> str:
    """Parse an address and return it without a slash at its end; messages do not repeat parts that may be secret."""
    scheme, _, rest = text.partition("://")
    scheme, rest = scheme.lower(), rest.rstrip("/")
    host, _, path = rest.partition("/")
    shown = redact(f"{scheme}://{rest.partition('?')[0].partition('#')[0]}")
    if "@" in host or (scheme in ("http", "https") and re.search(r"[?#]", rest)):
        raise UsageError(
            f"{shown} has a password, a query or a fragment, expected http(s)://HOST/FOLDER: what is secret must not "
            "be part of an address, which is recorded",
            hint="use s3:// or gs:// with credentials in the environment",
        )
    is_bucket = scheme in ("s3", "gs")
    if not (_BUCKET if is_bucket else _HOST).fullmatch(host) or not rest.isprintable() or not is_inside(path or host):
        raise UsageError(
            f"{shown} is not the address of a dataset",
            hint="write it like s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or https://HOST/FOLDER",
        )
    safe = "/" if is_bucket else "/%:@!$&'()*+,;=~"
    return f"{scheme}://{host}" + (f"/{quote(path, safe=safe)}" if path else "")


class WebTransport(HttpTransport):
    """Files on web servers, unless the environment forbids the network."""

    def named(self, address: str) -> str:
        """Return the address itself, which has no secrets, and which names the bucket, unlike the host."""
        return address

    @contextmanager
    def open_range(
        self, address: str, start: int, stop: int | None, version: str | None = None
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        _require_network(address)
        with super().open_range(address, start, stop, version) as opened:
            yield opened

    @contextmanager
    def open_version(self, address: str, offset: int, version: str | None = None) -> Iterator[Answer]:
        _require_network(address)
        with super().open_version(address, offset, version) as answer:
            yield answer


def _require_network(address: str) -> None:
    require_network(f"fetching from {address}")


# Buckets --------------------------------------------------------------------------------------------

_EXPIRED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestTimeTooSkewed"})
_READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"


class S3Transport(WebTransport):
    """Objects of S3, or of a server that speaks its protocol: the extra `s3`.

    botocore finds endpoint, region and credentials as the AWS command line does (`AWS_ENDPOINT_URL`, `AWS_PROFILE`, a
    role of the machine). Without credentials, requests are not signed. A bucket in another region than the configured
    one is requested from its own region.
    """

    def __init__(self) -> None:
        super().__init__(
            hint="credentials are found as by the AWS command line: AWS_PROFILE, AWS_ACCESS_KEY_ID, a role"
        )
        self._session: Any = None
        self._clients: dict[str | None, Any] = {}
        self._regions: dict[str, str] = {}
        self._making = threading.Lock()

    def _connected(self) -> httpx2.Client:
        client = super()._connected()
        client.event_hooks = {"request": [_without_token_elsewhere]}
        return client

    def url(self, address: str) -> str:
        bucket, key = _object_at(address)
        with _as_refusals(bucket):
            client = self._s3(bucket)  # the client does not sign: this only builds the address
            found: str = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key})
        return found

    def headers(self, address: str, url: str) -> Mapping[str, str]:
        """The signature, if there are credentials."""
        bucket = _object_at(address)[0]
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest

        with _as_refusals(bucket):
            with self._making:  # the first call searches for credentials, later ones renew them
                credentials = self._session.get_credentials()
                frozen = credentials and credentials.get_frozen_credentials()
            if not frozen:
                return {}
            request = AWSRequest(method="GET", url=url)
            S3SigV4Auth(frozen, "s3", self._region(bucket)).add_auth(request)
        return dict(request.headers.items())

    def refusal(self, response: httpx2.Response, address: str) -> Exception:
        bucket, region = _object_at(address)[0], response.headers.get("x-amz-bucket-region", "")
        # Several requests may be under way when the first answer tells the region. All are repeated that went to
        # another host or were signed for another region.
        asked = (response.history or [response])[0].request
        signature = asked.headers.get("authorization", "")
        meant = asked.url.host == urlsplit(self.url(address)).hostname and (not signature or f"/{region}/" in signature)
        if re.fullmatch(r"[a-z0-9-]{1,40}", region) and not (meant and region == self._region(bucket)):
            self._regions[bucket] = region
            return Transient(NetworkError(f"s3://{bucket} is in the region {region}"), 0.0)
        code = _code_of(response)
        said = f"S3 says {code}; " if code else ""
        if code == "NoSuchBucket":
            return DatasetNotFoundError(f"the bucket s3://{bucket} does not exist there", hint=self.hint)
        if code in _EXPIRED:
            return AuthorisationError(f"S3 refuses the credentials for s3://{bucket} ({code})", hint=self.hint)
        return failure(response, self.named(address), hint=said + self.hint)

    def _region(self, bucket: str) -> str:
        return str(self._s3(bucket).meta.region_name or "us-east-1")

    def _s3(self, bucket: str) -> Any:
        region = self._regions.get(bucket)
        with self._making:
            if region not in self._clients:
                try:
                    # Takes a quarter of a second to load, and is an extra.
                    import botocore
                    from botocore.config import Config
                    from botocore.session import get_session
                except ImportError as error:
                    raise UsageError(
                        f"s3://{bucket} needs the package botocore, which is not installed",
                        hint="pip install 'rbtool[s3]'",
                    ) from error
                if self._session is None:
                    self._session = get_session()
                    logging.getLogger("botocore.auth").addFilter(_without_tokens)
                unsigned = Config(signature_version=botocore.UNSIGNED)
                self._clients[region] = self._session.create_client("s3", region_name=region, config=unsigned)
            return self._clients[region]


def _without_token_elsewhere(request: httpx2.Request) -> None:
    """Remove the session token from a redirected request, from which the client removes only the signature."""
    if "authorization" not in request.headers:
        request.headers.pop("x-amz-security-token", None)


def _without_tokens(record: logging.LogRecord) -> bool:
    """Hide session tokens in botocore's log of signatures at level DEBUG."""
    record.msg, record.args = re.sub(r"(?i)(security-token:)\S+", r"\1***", record.getMessage()), ()
    return True


@contextmanager
def _as_refusals(bucket: str) -> Iterator[None]:
    """Translate botocore's errors about profiles, regions and credentials into rbtool's."""
    try:
        yield
    except RbtoolError:
        raise
    except Exception as error:
        if type(error).__module__.startswith("botocore"):
            said = " ".join(redact(str(error)).split())[:300]
            raise AuthorisationError(f"credentials for s3://{bucket} could not be obtained: {said}") from None
        if not isinstance(error, ValueError):
            raise
        raise UsageError(  # without botocore's words, which repeat the endpoint
            f"s3://{bucket} cannot be addressed: the endpoint that is configured is not a URL",
            hint="AWS_ENDPOINT_URL is written like https://HOST:PORT",
        ) from None


def _code_of(response: httpx2.Response) -> str:
    """Return the error code in the body of an answer; "" if there is none."""
    import httpx2

    with suppress(httpx2.HTTPError, Transient):
        head = next(paced(response.iter_raw(), "an answer"), b"")[:ERROR_BYTES]
        if found := re.search(rb"<Code>(\w{1,60})</Code>", head):
            return found[1].decode()
    return ""


class GcsTransport(WebTransport):
    """Objects of Google Cloud Storage, by its XML API: public ones, and others with credentials of the extra `gcp`.

    Credentials are searched for only after a request without them was refused. `STORAGE_EMULATOR_HOST` names another
    server.
    """

    def __init__(self) -> None:
        super().__init__(hint="credentials: GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`")
        self._credentials: Any = None
        self._looked = False
        self._finding = threading.Lock()

    def url(self, address: str) -> str:
        server = os.environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
        return f"{server if '://' in server else f'http://{server}'}/{address.partition('://')[2]}"

    def headers(self, address: str, url: str) -> Mapping[str, str]:
        """The token, once one is needed."""
        if self._credentials is None:
            return {}
        with self._finding, _as_google_refusals(address):
            if not self._credentials.valid:
                from google.auth.transport.requests import Request

                self._credentials.refresh(Request())
            return {"Authorization": f"Bearer {self._credentials.token}"}

    def refusal(self, response: httpx2.Response, address: str) -> Exception:
        if response.status_code in (401, 403) and self._found_credentials(address, response):
            return Transient(NetworkError(f"{address} is not public"), 0.0)
        return failure(response, self.named(address), hint=self.hint)

    def _found_credentials(self, address: str, response: httpx2.Response) -> bool:
        """Search for credentials once; return whether the refused request was made without them and can be repeated."""
        with self._finding:
            if not self._looked:
                try:
                    import google.auth
                    from google.auth.exceptions import DefaultCredentialsError
                except ImportError as error:
                    raise UsageError(
                        f"{address} is not public: credentials need the package google-auth, which is not installed",
                        hint="pip install 'rbtool[gcp]'",
                    ) from error
                with _as_google_refusals(address), suppress(DefaultCredentialsError):
                    self._credentials, _ = google.auth.default(scopes=[_READ_ONLY])
                self._looked = True  # only after success, so that waiting threads get the same error
        return self._credentials is not None and "authorization" not in response.request.headers


@contextmanager
def _as_google_refusals(address: str) -> Iterator[None]:
    from google.auth.exceptions import GoogleAuthError

    try:
        yield
    except GoogleAuthError as error:
        said = " ".join(redact(str(error)).split())[:300]
        raise AuthorisationError(f"credentials for {address} could not be obtained: {said}") from None


def _object_at(address: str) -> tuple[str, str]:
    """Return the bucket and the key in an address."""
    bucket, _, key = address.partition("://")[2].partition("/")
    return bucket, unquote(key)
