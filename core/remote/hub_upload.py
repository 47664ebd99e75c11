"""Upload to a dataset repository of a hub: objects first, each once, and then everything in one commit."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast
from urllib.parse import quote

from .. import __version__
from ..errors import AuthorisationError, CorruptDataError, DatasetNotFoundError, FormatError, UsageError
from ..format.digest import FileRecord, Hasher, open_regular
from ..format.sources import Advance, Note
from .checksums import blocks_of, hasher, matches
from .hub import TOKEN_HINT, Hub, HubFile
from .hub_session import ChangedMeanwhileError, Gate, through
from .threads import Watch, ignore, run_together
from .transport import retrying

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

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
