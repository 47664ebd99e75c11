"""`upload`: send a dataset, unchanged, to a repository of a Hugging Face hub, in one commit.

The commit includes a dataset card, README.md, with metadata for the hub's lists and a description for people.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .. import __version__
from ..errors import CheckFailed, CorruptDataError, FormatError, NetworkError, UsageError, suggests_keywords
from ..format import fs
from ..format.checks import FOLDER_RULES
from ..format.documents import dump_json, written_time
from ..format.files import read_regular
from ..format.locate import find_dataset, refuse_empty
from ..format.manifest import MANIFEST, Manifest, has_manifest
from ..format.open_files import ListedFiles
from ..open_steps import open_dataset
from ..options import PathLike, takes
from ..progress import Progress, clean, readable_size, redact, some_of
from ..remote.hub import (
    MAIN,
    HubFile,
    HubWriter,
    LocalFile,
    SentFiles,
    differences,
    hub_endpoint,
    require_paths,
)
from ..remote.hub_address import HubAddress, Transfer, add_transfer, transfers_of
from ..remote.shards import SHARD_DIGESTS, EpisodeShards, ShardDigests
from ..remote.threads import ignore
from ..remote.transport import ChangedMeanwhileError, Transient, read_small, retrying
from ..results import Result, seconds_since
from ..stats import FieldStats
from ..ted.schema import key_name
from .check import CheckResult, check
from .options import UploadOptions
from .stats import stats

CARD = "README.md"
_KEPT = frozenset({CARD, ".gitattributes"})
"""Files that a repository may have besides the dataset: its card, and the settings of how the hub stores files."""
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
_DAMAGE = frozenset({"TED014", *(rule.rule_id for rule in FOLDER_RULES)})
_NAMED = 5
_BUCKETS = ("s3://", "gs://")
_AGAIN = "run it again: what was sent is not sent again"


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadResult(Result):
    """The dataset at `path` is in a repository: `address` names it with the commit.

    `branch` is the branch it was committed to. `files` and `bytes` count the dataset, `bytes_sent` the bytes that the
    hub did not have yet, without small files, which are part of the commit request. `deleted` are the files that the
    commit removed, `errors` and `warnings` count the findings of `check`. With `dry_run`, nothing is sent and `commit`
    is None. `already_there` is True if the branch had the same files.
    """

    kind: ClassVar[str] = "upload"
    path: Path
    address: str
    branch: str
    commit: str | None
    hub: str
    private: bool
    license: str
    steps: int
    episodes: int
    files: int
    bytes: int
    bytes_sent: int
    deleted: tuple[str, ...]
    errors: int
    warnings: int
    content_digest: str
    already_there: bool
    dry_run: bool
    notes: tuple[str, ...]
    seconds: float


@takes(UploadOptions)
def upload(asked: UploadOptions) -> UploadResult:
    """Upload a dataset to the repository `hf://OWNER/NAME` of a Hugging Face hub; `download` returns the same files.

    The dataset is checked first, and every file is compared with its digest. The uploaded files are the manifest and
    the files that it lists, a card (README.md) and, for streams, the digests of the shards. Large files are sent first,
    then one commit refers to all files, so that nobody sees half a dataset. Afterwards the files in the commit are
    compared with the local ones, and the commit is recorded in the dataset's folder. Files that the hub has are not
    sent again, so that the same call resumes an interrupted upload. The token is huggingface_hub's (`HF_TOKEN`).

    Args:
        dataset: a path or `source:id` of a dataset in TED.
        address: `hf://OWNER/NAME`. The repository is created if it does not exist.
        private: create a private repository; an existing public one is refused.
        license: an identifier of the hub, such as `cc-by-4.0`; default: the one on the repository's card.
        message: the commit message.
        revision: a branch, which is created if it does not exist; default: main.
        allow_errors: upload even if `check` finds errors; the card lists them. Files that differ from their digests are
            never uploaded.
        root: where stored datasets are.
        force: replace another dataset, and remove files that do not belong to this one; the history of the repository
            keeps them.
        dry_run: do everything but sending.
        progress: shows how far it is; default: nothing is shown.

    Returns:
        The commit. If the branch has the same files, nothing is sent, and `already_there` is True.

    Raises:
        UsageError: the address makes no sense, `dataset` is not a dataset in TED, the repository has other files, or is
            public although `private` is set.
        CheckFailed: `check` finds errors.
        CorruptDataError: files are damaged, or the files on the hub differ from them after the upload.
        NetworkError: the hub cannot be reached, or another client changes the branch meanwhile.
        AuthorisationError: the hub refuses the token.
    """
    started = time.perf_counter()
    address = asked.address
    if address.startswith(_BUCKETS):
        raise UsageError(
            f"{redact(address)} is not an address on a hub; nothing was uploaded",
            hint="run rbtool.write_shard_digests(path), then copy the dataset to the bucket with any program",
        )
    target = HubAddress.parse(address, asked.revision)
    if not address.startswith("hf:"):  # OWNER/NAME could also be meant as a path
        raise UsageError(f"{address} is not an address on a hub; nothing was uploaded", hint=f"write hf://{address}")
    if asked.license is not None and not _LICENSE.fullmatch(asked.license):
        raise UsageError(
            f"{asked.license!r} is not an identifier of a licence", hint="use one of the hub's, like mit or cc0-1.0"
        )
    path = find_dataset(asked.dataset, asked.root)
    _require_dataset(path)
    with ListedFiles.at(path) as files, HubWriter() as hub:
        return UploadResult(**_Upload(asked, hub, target, path, files).run(), seconds=seconds_since(started))


@suggests_keywords()
def write_shard_digests(dataset: PathLike, *, root: PathLike | None = None) -> Path:
    """Add the digests of its shards to a dataset, before a program other than `upload` copies it to a remote.

    Streams verify the ranges of rows that they fetch with these digests. All files are compared with the manifest
    first. The digests are not part of the dataset, whose content digest stays the same.

    Args:
        dataset: a path, `source:id` or `hf://OWNER/NAME` of a dataset on this disk.
        root: the folder of stored datasets; default `RBTOOL_HOME`, or else the cache folder of the platform.

    Returns:
        The file, `.rbtool/shard-digests.json`, which has to be copied as well.

    Raises:
        DatasetNotFoundError: (a FileNotFoundError) the dataset is missing.
        UsageError: (a ValueError) it is not a dataset in TED.
        CorruptDataError: a file does not match the manifest; nothing is written.
    """
    path = find_dataset(dataset, root)
    _require_dataset(path)
    with ListedFiles.at(path) as files, open_dataset(path) as reader:
        files.verify(files.manifest.files)
        if reader.manifest.content_digest != files.manifest.content_digest:
            raise UsageError(f"{path} was replaced meanwhile; nothing was written", hint="run it again")
        digests = ShardDigests.of(reader, files.place, ignore)
    fs.replace_file(path / SHARD_DIGESTS, digests.document())
    return path / SHARD_DIGESTS


def _require_dataset(path: Path) -> None:
    hint = f"convert it first: rbtool convert {shlex.quote(str(path))} DEST"
    if not has_manifest(path):
        refuse_empty(path)
        raise UsageError(f"{path} is not a dataset in TED, which an upload needs", hint=hint)
    kind = Manifest.load(path).kind
    if kind != "dataset":
        raise UsageError(f"{path} is a {kind}, expected a dataset", hint=hint)


@dataclass(frozen=True, slots=True)
class _RemoteState:
    """The state of a branch of the repository: its newest commit, its files, and its card.

    `parent` is None for a repository that does not exist. `is_new` is True if the branch does not exist or has no
    commits of its own yet.
    """

    parent: str | None
    tree: Mapping[str, HubFile]
    card: bytes
    private: bool
    is_new: bool


@dataclass
class _Upload:
    """One upload: `run` checks the dataset, sends its files and commits them."""

    asked: UploadOptions
    hub: HubWriter
    target: HubAddress
    path: Path
    files: ListedFiles
    notes: list[str] = field(default_factory=list)

    @property
    def _progress(self) -> Progress:
        return self.asked.reporter

    @property
    def _name(self) -> str:
        return self.target.repository

    @property
    def _branch(self) -> str:
        return self.target.revision or MAIN

    def run(self) -> dict[str, Any]:
        """Return the entries of an `UploadResult`."""
        self.hub.require_token(str(self.target))
        there = self._remote_state()
        checked = self._checked()
        local = self._local_files()
        deleted = self._superfluous(local, there)
        stated = license_of(there.card)
        chosen = self.asked.license or stated or "unknown"
        same = there.parent is not None and not deleted and not differences(local, there.tree)
        done = same and CARD in there.tree and stated == chosen and not there.is_new
        commit, sent = (there.parent, 0) if done else (None, 0)
        if not done and not self.asked.dry_run:
            card = DatasetCard(self.target, self.files.manifest, checked, chosen).document(
                there.card, self.path, self.asked.root, self._progress
            )
            commit, sent = self._send([*local, LocalFile.of(CARD, card)], deleted, there)
        if commit is not None and not self.asked.dry_run:
            self._record(commit)
        return self._entries(checked, there, chosen) | {
            "commit": commit, "address": self.target.at(commit) if commit else str(self.target), "bytes_sent": sent,
            "deleted": tuple(deleted), "already_there": done, "notes": tuple(self.notes),
        }  # fmt: skip

    def _entries(self, checked: CheckResult, there: _RemoteState, license: str) -> dict[str, Any]:
        manifest = self.files.manifest
        return {
            "path": self.path, "branch": self._branch, "hub": hub_endpoint(), "license": license,
            "private": self.asked.private if there.parent is None else there.private, "steps": manifest.steps,
            "episodes": manifest.episodes, "files": len(manifest.files) + 1, "bytes": manifest.bytes,
            "errors": checked.errors, "warnings": checked.warnings, "content_digest": manifest.content_digest,
            "dry_run": self.asked.dry_run,
        }  # fmt: skip

    # The local dataset ---------------------------------------------------------------------------------

    def _checked(self) -> CheckResult:
        """Run `check`; raise CorruptDataError for damaged files, and CheckFailed for other errors."""
        result = check(self.path, root=self.asked.root, progress=self._progress)
        if Manifest.load(self.path).content_digest != self.files.manifest.content_digest:
            raise UsageError(f"{self.path} was replaced meanwhile; nothing was uploaded", hint="run it again")
        errors = [finding for finding in result.findings if finding.severity == "error"]
        damaged = next((finding for finding in errors if finding.rule in _DAMAGE), None)
        if damaged is not None:
            raise CorruptDataError(f"{self.path} is damaged, and nothing was uploaded: {damaged.message}")
        if errors and not self.asked.allow_errors:
            more = f", the first of {len(errors)} errors" if len(errors) > 1 else ""
            raise CheckFailed(
                f"{self.path} breaks {errors[0].rule} {errors[0].name}{more}, and nothing was uploaded: "
                f"{errors[0].message}",
                hint="rbtool check lists all errors; --allow-errors uploads the dataset with a card that lists them",
            )
        return result

    def _local_files(self) -> list[LocalFile]:
        """Read and hash all files of the dataset, which have to match the manifest."""
        manifest = self.files.manifest
        self._progress.start("hashing", manifest.bytes, "bytes")
        found = [
            LocalFile.read(record, self.files.place(record.path), self._progress.advance) for record in manifest.files
        ]
        self._progress.done()
        local = [*found, LocalFile.of(MANIFEST, read_regular(self.files.place(MANIFEST)))]
        local += self._shard_digests()
        require_paths(local)
        return local

    def _shard_digests(self) -> Iterator[LocalFile]:
        """Yield a file with the digests of the shards; a single shard is covered by the manifest."""
        with open_dataset(self.path) as reader:
            if reader.manifest.content_digest != self.files.manifest.content_digest:
                raise UsageError(f"{self.path} was replaced meanwhile; nothing was uploaded", hint="run it again")
            if len(EpisodeShards.of(reader).rows) > 1:
                self._progress.start("hashing shards", self.files.manifest.bytes, "bytes")
                digests = ShardDigests.of(reader, self.files.place, self._progress.advance)
                self._progress.done()
                yield LocalFile.of(SHARD_DIGESTS, digests.document())

    # The repository ------------------------------------------------------------------------------------

    def _remote_state(self) -> _RemoteState:
        """Query the state of the repository."""
        self._progress.note(f"asking {hub_endpoint()} for {self.target}")
        private = self.hub.is_private(self._name)
        if private is None:
            return _RemoteState(None, {}, b"", self.asked.private, is_new=True)
        if self.asked.private and not private:
            raise UsageError(
                f"the repository {self._name} is public, not private; nothing was uploaded",
                hint="make it private in its settings, or leave out --private",
            )
        branches = self.hub.branches(self._name)
        parent = branches.get(self._branch, branches.get(MAIN))
        if parent is None:
            raise FormatError(f"the repository {self._name} has no branch {MAIN}")
        tree = {file.path: file for file in self.hub.tree(self._name, parent)}
        own = self._branch == MAIN or (self._branch in branches and parent != branches.get(MAIN))
        return _RemoteState(parent, tree, self._card_of(tree, parent), private, is_new=not own)

    def _card_of(self, tree: Mapping[str, HubFile], commit: str) -> bytes:
        card = tree.get(CARD)
        if card is None:
            return b""
        address = self.hub.address(self._name, commit, CARD)
        return read_small(self.hub, address, limit=CARD_BYTES, size=card.size, checksum=card.checksum)

    def _superfluous(self, local: list[LocalFile], there: _RemoteState) -> list[str]:
        """Return the files to delete; UsageError if the repository has foreign files and `force` is not set."""
        here = {file.path for file in local}
        foreign = sorted(there.tree.keys() - here - _KEPT)
        changed = [path for path in differences(local, there.tree) if path in there.tree]
        others = [path for path in foreign + changed if path != SHARD_DIGESTS]  # shards of other versions may differ
        if others and not (self.asked.force or there.is_new):
            named = some_of(others, _NAMED)
            what = "another dataset" if MANIFEST in there.tree else "other files"
            raise UsageError(
                f"{self.target} has {what} ({named}); nothing was uploaded",
                hint="--force replaces it, and the history of the repository keeps it; --revision names another branch",
            )
        return foreign

    # Sending -------------------------------------------------------------------------------------------

    def _send(self, files: list[LocalFile], deleted: list[str], there: _RemoteState) -> tuple[str, int]:
        """Send the files and commit them; return the commit and the bytes that had to be sent."""
        if there.parent is None:
            self.hub.create(self._name, private=self.asked.private, note=self._progress.note)
        if self._branch != MAIN and there.is_new:
            self.hub.create_branch(self._name, self._branch)
        parent = there.parent or self.hub.branches(self._name)[self._branch]
        missing = set(differences(files, there.tree))
        wanted = [file for file in files if file.path in missing]
        total = sum(file.size for file in wanted)
        count = "1 file" if len(wanted) == 1 else f"{len(wanted):,} files"
        self._progress.note(f"{count}, {readable_size(total)}, to {self.target}")
        self._progress.start("sending", total, "bytes")
        with self._resumable():
            advance, note = self._progress.advance, self._progress.note
            sent = self.hub.send(self._name, self._branch, wanted, progress=advance, note=note)
        self._progress.done()
        commit = retrying(functools.partial(self._commit, parent, sent, files, deleted), note=self._progress.note)
        self._require_same(files, commit)
        return commit, sum(sent.bytes)

    @contextlib.contextmanager
    def _resumable(self) -> Iterator[None]:
        """State that a repeated upload resumes: in the hint of a network error, or in a note if a signal stops it."""
        try:
            yield
        except NetworkError as error:
            error.hint = error.hint or _AGAIN
            raise
        except Exception:
            raise
        except BaseException:
            self._progress.note(_AGAIN)
            raise

    def _commit(self, parent: str, sent: SentFiles, files: list[LocalFile], deleted: list[str]) -> str:
        """Commit the files, if the branch has not changed; return the commit.

        If the branch has a new head with exactly these files, an earlier attempt has succeeded and its answer was lost:
        that head is returned. Any other head is a change by another client.
        """
        try:
            head = self.hub.branches(self._name).get(self._branch)
            if head == parent:
                message = self.asked.message or f"Upload with rbtool: {self.files.manifest.content_digest}"
                return self.hub.put(self._name, self._branch, parent, sent, deleted=deleted, message=message)
        except ChangedMeanwhileError:
            head = self.hub.branches(self._name).get(self._branch)
            if head == parent:  # another client's commit was in progress, and failed
                raise Transient(NetworkError(f"{self.target} is being changed by another client")) from None
        if head is not None and not self._problem(files, head):
            return head
        raise ChangedMeanwhileError(
            f"{self.target} was changed by another client during the upload; nothing was committed",
            hint="run it again: what was sent is not sent again",
        )

    def _require_same(self, files: list[LocalFile], commit: str) -> None:
        problem = self._problem(files, commit)
        if problem:
            raise CorruptDataError(
                f"{self.target.at(commit)} differs from the files that were sent: {problem}",
                hint="do not use that commit; rules of the repository (.gitignore, .gitattributes) may be the reason",
            )

    def _problem(self, files: list[LocalFile], commit: str) -> str:
        """Compare the files in a commit with the local ones; return the first difference, "" if there is none."""
        tree = {file.path: file for file in self.hub.tree(self._name, commit)}
        for path in differences(files, tree):
            return f"{path} is missing there" if path not in tree else f"{path} has other bytes there"
        foreign = sorted(tree.keys() - {file.path for file in files} - _KEPT)
        return f"it also has {foreign[0]}" if foreign else ""

    def _record(self, commit: str) -> None:
        manifest = self.files.manifest
        transfer = Transfer(
            "upload", f"hf://{self._name}", self.target.revision, commit, hub_endpoint(), manifest.content_digest,
            written_time(),
        )  # fmt: skip
        try:
            if transfer.what not in [before.what for before in transfers_of(self.path)]:
                add_transfer(self.path, transfer)
        except OSError as error:
            why = os.strerror(error.errno).lower() if error.errno else str(error)
            self.notes.append(f"the commit is not recorded in {self.path}: {why}")


CARD_BYTES = 1 << 20
"""A card of more bytes is not read."""
_BEGIN = "<!-- rbtool: what follows is made by rbtool upload, and replaced by the next one -->"
_END = "<!-- rbtool: the end of that -->"
_FENCE = "---"
_TASK = "reinforcement-learning"
_TAGS = ("reinforcement-learning", "offline-rl", "rbtool", "ted")
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "1B<n<10B")
_LARGER = ("10B<n<100B", "100B<n<1T", "n>1T")
_FINDINGS = 20
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class DatasetCard:
    """The card of a dataset: `README.md` with metadata in YAML, and a description between two marks."""

    address: HubAddress
    manifest: Manifest
    checked: CheckResult
    license: str

    def document(self, before: bytes, path: Path, root: str | os.PathLike[str] | None, progress: Progress) -> bytes:
        """Return the card of the dataset at `path`; text and metadata of others in the card `before` are kept.

        Statistics are computed unless they are cached. Raises FormatError if the old card cannot be parsed.
        """
        described: Sequence[FieldStats] = ()
        if self.manifest.steps:
            described = stats(path, root=root, progress=progress).fields
        entries, text = _parts(before)
        made = "\n".join((_BEGIN, *self._body(described), _END))
        return f"{_FENCE}\n{self._front(entries)}{_FENCE}\n{_replaced(text, made)}".encode()

    def _front(self, before: Mapping[str, Any]) -> str:
        """Return the metadata in YAML: existing entries are kept, except the licence and the size."""
        import yaml

        tags = before.get("tags")
        kept = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
        entries = {
            "pretty_name": self.address.repository.partition("/")[2],
            "task_categories": [_TASK],
            "viewer": False,  # the hub's viewer reads tables
            **before,
            "license": before["license"] if _named(before.get("license")) == self.license else self.license,
            "tags": [*kept, *(tag for tag in _TAGS if tag not in kept)],
            "size_categories": [_size_category(self.manifest.steps)],
        }
        return str(yaml.safe_dump(entries, sort_keys=False, allow_unicode=True))

    def _body(self, described: Sequence[FieldStats]) -> Iterator[str]:
        manifest, name = self.manifest, self.address.repository
        yield f"\n# {name}\n"
        yield (
            f"{manifest.steps:,} steps in {manifest.episodes:,} episodes of offline reinforcement learning, in the "
            f"format TED (layout {manifest.layout}). The files are those that `rbtool` wrote, byte for byte; every "
            "download is verified.\n"
        )
        yield f"```bash\npip install rbtool\nrbtool download {self.address}\n```\n"
        yield (
            "```python\nimport rbtool\n\n"
            f'buffer = rbtool.load_dataset("{self.address}", batch_size=256)\nbatch = buffer.sample()\n```\n'
        )
        yield "## Fields\n"
        yield from _table(("field", "type", "shape", "mean", "std", "min", "max"), self._fields(described))
        yield "## Episodes\n"
        yield from _table(("end", "episodes"), self._ends())
        yield "## Check\n"
        yield from self._findings()
        yield "## Origin\n"
        yield from self._origin()

    def _fields(self, described: Sequence[FieldStats]) -> Iterator[Sequence[str]]:
        known = {field.key: field for field in described}
        for leaf in self.manifest.fields:
            shape = " × ".join(map(str, leaf.shape)) or "scalar"
            yield code(key_name(leaf.key)), leaf.dtype, shape, *_numbers(known.get(leaf.key))

    def _ends(self) -> Iterator[Sequence[str]]:
        for name, count in self.manifest.boundary.to_dict().items():
            if count:
                yield name.replace("_", " "), f"{count:,}"

    def _findings(self) -> Iterator[str]:
        found = self.checked
        yield (
            f"`rbtool check` (rbtool {__version__}): {found.errors:,} errors, {found.warnings:,} warnings; "
            f"{found.rules:,} rules.\n"
        )
        for finding in found.findings[:_FINDINGS]:
            yield f"- {finding.severity} {finding.rule} {finding.name}: {code(finding.message)}"
        more = len(found.findings) - _FINDINGS
        if more > 0:
            yield f"- and {more:,} more"
        if found.findings:
            yield ""

    def _origin(self) -> Iterator[str]:
        for step in self.manifest.provenance:
            given = {name: _shortened(value) for name, value in step.arguments.items() if value not in (None, False)}
            arguments = f" {code(dump_json(given))}" if given else ""
            yield f"- {code(step.verb)}{arguments} {code(step.time)}, rbtool {code(step.version)}"
        for note in self.manifest.notes:
            yield f"- note: {code(note)}"
        yield f"- content digest: {code(self.manifest.content_digest)}\n"


def code(text: str) -> str:
    """Quote untrusted text as a Markdown code span, in which no link, HTML or table cell is interpreted."""
    plain = (
        clean(text.encode(errors="backslashreplace").decode())
        .replace("`", "'")
        .replace("|", "¦")
        .replace("<!--", "<!- -")
        .strip()
    )
    if len(plain) > _LONGEST:
        plain = f"{plain[:_LONGEST]}…"
    return f"`{plain}`" if plain else "` `"


def _shortened(value: Any) -> Any:
    """Replace an absolute path by its last name, so that the card does not reveal folders of this machine."""
    return f"…/{value.rstrip('/').rpartition('/')[2]}" if isinstance(value, str) and value.startswith("/") else value


def license_of(card: bytes) -> str | None:
    """Return the licence that a card states, None if it states none; FormatError if the card cannot be parsed."""
    return _named(_parts(card)[0].get("license"))


def _named(license: object) -> str | None:
    """Return the licence in metadata as text; several licences are joined by commas."""
    several = license if isinstance(license, list) else [license]
    return ", ".join(one for one in several if isinstance(one, str) and one) or None


def _parts(card: bytes) -> tuple[dict[str, Any], str]:
    """Split a card into its metadata and its text."""
    try:
        text = card.decode()
    except UnicodeDecodeError as error:
        raise _not_understood("it is not UTF-8 text") from error
    lines = text.replace("\r\n", "\n").removeprefix("\ufeff").split("\n")
    if lines[0].rstrip() != _FENCE or _FENCE not in [line.rstrip() for line in lines[1:]]:
        return {}, "\n".join(lines)
    end = 1 + [line.rstrip() for line in lines[1:]].index(_FENCE)
    return _metadata("\n".join(lines[1:end])), "\n".join(lines[end + 1 :])


_METADATA_BYTES = 64 << 10
_ALIASES, _DEPTH = 10, 40
"""The most YAML aliases and levels in metadata: nested aliases could expand to an exponential size."""
_PLAIN = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:0|[1-9][0-9]*)",
    "float": r"[-+]?(?:[0-9]+\.[0-9]*|[0-9]+(?=[eE])|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN)",
    "merge": r"<<",
}
"""Patterns of unquoted values that are not text, by YAML 1.2, as the hub reads metadata. PyYAML follows YAML 1.1, in
which `no` is false, `1:30` is 90, and `012` is 10."""


def _metadata(text: str) -> dict[str, Any]:
    """Parse the metadata of a card, which is untrusted: in bounded time and memory, without tags or objects."""
    import yaml

    loader: Any = type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
    for name, pattern in _PLAIN.items():
        loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"(?:{pattern})\\Z"), None)
    size, aliases, depth = len(text.encode()), 0, 0
    if size > _METADATA_BYTES:
        raise _not_understood(f"its metadata has {size:,} bytes, expected at most {_METADATA_BYTES:,}")
    try:
        for event in yaml.parse(text, loader):
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if aliases > _ALIASES or depth > _DEPTH:
                found = f"{_ALIASES} references" if aliases > _ALIASES else f"{_DEPTH} levels"
                raise _not_understood(f"its metadata has more than {found}")
            if getattr(event, "tag", None) is not None:
                raise _not_understood(f"its metadata has the tag {event.tag!r:.40}, expected plain YAML")
        entries = yaml.load(text, loader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        if isinstance(error, FormatError):
            raise
        raise _not_understood("its metadata is not YAML") from error
    if not isinstance(entries, dict | None):
        raise _not_understood(f"its metadata is a {type(entries).__name__}, expected a mapping")
    return entries or {}


def _not_understood(why: str) -> FormatError:
    return FormatError(f"the {CARD} of the repository cannot be parsed: {why}", hint="correct or remove it")


def _replaced(text: str, made: str) -> str:
    """Put the generated part into a text, in place of the previous one; without one, at the end."""
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if begin and end:
        return f"{before}{made}{after}"
    return f"{text.rstrip()}\n\n{made}\n" if text.strip() else f"\n{made}\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    listed = list(rows)
    if not listed:
        yield "none\n"
        return
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in listed:
        yield f"| {' | '.join(row)} |"
    yield ""


def _numbers(field: FieldStats | None) -> Sequence[str]:
    """Return mean, deviation and extremes of a leaf as text; for several dimensions, as ranges."""
    if field is None:
        return ("",) * 4
    spread = [_range(values) for values in (field.mean, field.std)]
    low, high = ([one for one in values if one is not None] for values in (field.min, field.max))
    return *spread, _number(min(low)) if low else "", _number(max(high)) if high else ""


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = _number(min(known)), _number(max(known))
    return low if low == high else f"{low} … {high}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _size_category(steps: int) -> str:
    """Return the hub's name for the size of a dataset of so many steps."""
    sizes = (*_SIZES, *_LARGER)
    place = 0
    while place + 1 < len(sizes) and steps >= 10 ** (place + 3):
        place += 1
    return sizes[place]
