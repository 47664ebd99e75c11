"""The originals: files as fetched from a remote, kept below the storage root until they are converted, or for good."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from ..errors import FormatError, UsageError
from ..format import fs
from ..format.converter import RemoteDataset, RemoteFile
from ..format.documents import Count, decode, dump_json, load_json, written_time
from ..format.files import open_regular
from ..format.manifest import is_inside
from ..format.staging import lock_folder, remove_aside, sweep
from .fetch import RECORD
from .transport import blocks_of, hasher, matches

_FOLDER = ".originals"
_ATTEMPTS = 100
_RECORD = "fetched.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """A file to be fetched: its path, its size in bytes and the remote's checksum, None if unknown.

    `version` is the version of its `RemoteFile`; `received` is the digest of the received bytes, for a file without a
    checksum.
    """

    path: str
    size: Count | None
    checksum: str | None
    version: str | None = None
    received: str | None = None

    @classmethod
    def of(cls, file: RemoteFile, received: str | None = None) -> FetchedFile:
        """Return the record of a file as a remote lists it."""
        return cls(file.path, file.size, file.checksum, file.version, received)

    def remote(self) -> RemoteFile:
        """Return the file as the remote listed it, without addresses."""
        return RemoteFile(self.path, self.size, self.checksum, (), self.version)

    def to_dict(self) -> dict[str, Any]:
        """Return the entry in the record; `version` and `received` only if they are known."""
        later = {"version": self.version, "received": self.received}
        known = {name: text for name, text in later.items() if text is not None}
        return {"path": self.path, "size": self.size, "checksum": self.checksum} | known


@dataclass(frozen=True, slots=True)
class OriginalsRecord:
    """The record of the files in a folder of originals, finished or being fetched.

    `files` are all files of the dataset, `asked` the paths of those requested so far. `kept` states whether they are to
    be kept after the conversion.
    """

    id: str
    address: str
    revision: str | None
    kept: bool
    time: str
    files: tuple[FetchedFile, ...]
    asked: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> OriginalsRecord:
        """Read a record, or raise FormatError that names it."""
        found = decode(cls, load_json(path), str(path))
        if not all(is_inside(file.path) for file in found.files):
            raise FormatError(f"{path} lists files outside its folder")
        return found

    def dataset(self) -> RemoteDataset:
        """Return the dataset as it was listed, without the addresses of its files."""
        files = tuple(file.remote() for file in self.files)
        return RemoteDataset(self.id, self.address, self.revision, files)

    def to_bytes(self) -> bytes:
        """Return the record as it is written to disk."""
        document: dict[str, Any] = {"format_version": _VERSION, **asdict(self)}
        document["files"] = [file.to_dict() for file in self.files]
        return (dump_json(document, indent=1) + "\n").encode()


class Originals:
    """The folder of one dataset's originals, `<root>/<source>/.originals/<id>`, which may not exist.

    `files` is the folder of finished files, each verified before it got its name, and of the parts of others.
    """

    def __init__(self, root: Path, source: str, dataset_id: str) -> None:
        self.source = source
        self.id = dataset_id
        self._root = root
        self.folder = root / source / _FOLDER / quote(dataset_id, safe="")
        self.files = self.folder / "files"

    @property
    def _aside(self) -> Path:
        """The path next to which a folder is moved before its removal; the next process sweeps leftovers there."""
        return self.folder.parent.with_name(self.folder.name)

    @contextlib.contextmanager
    def lock(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Create the folder and lock it for this process; `waiting` is called if another process has the lock.

        On exit an empty folder is removed, and so are the folders above it, below the root, that are then empty.
        """
        descriptor = -1
        for attempt in itertools.count(1):
            try:
                descriptor = self._locked(waiting)
            except FileNotFoundError:  # another process removed an empty folder on the way to it
                if attempt >= _ATTEMPTS:
                    raise
            if descriptor >= 0:
                break
        try:
            sweep(self._aside, below=self._root)
            yield
        finally:
            self._remove_empty(descriptor)
            os.close(descriptor)

    def _locked(self, waiting: Callable[[], None]) -> int:
        """Create and lock the folder; return its descriptor, or -1 if it was removed meanwhile."""
        fs.make_folder_below(self._root, self.folder)
        with fs.folder_below(self._root, self.folder.parent) as within:
            descriptor = lock_folder(self.folder, within=within)
            if descriptor < 0 and self.folder.exists():
                waiting()
                descriptor = lock_folder(self.folder, wait=True, within=within)
            return descriptor

    def _remove_empty(self, descriptor: int) -> None:
        """Remove the folder, which is locked by a descriptor, and those above it, if there is nothing in them."""
        with contextlib.suppress(OSError, UsageError):
            with fs.folder_below(self._root, self.folder.parent) as within:
                facts = os.stat(self.folder.name, dir_fd=within, follow_symlinks=False)
                if facts.st_ino != os.fstat(descriptor).st_ino or os.listdir(descriptor):
                    return
                fs.remove_empty_folder(self.folder, within=within)
            for above in (self.folder.parent, self.folder.parent.parent):
                with fs.folder_below(self._root, above.parent) as within:
                    fs.remove_empty_folder(above, within=within)

    def record(self) -> OriginalsRecord | None:
        """Read the record; None if nothing was fetched yet. FormatError for a damaged record."""
        path = self.folder / _RECORD
        return OriginalsRecord.read(path) if path.is_file() else None

    def begin(self, dataset: RemoteDataset, asked: Iterable[str], *, kept: bool) -> None:
        """Record that the files `asked` of a dataset are to be fetched. Originals that were kept once stay kept.

        Files that differ from the current state of the remote are removed; files without a checksum are also removed if
        it is not certain that they are the same.
        """
        wanted, before = set(asked), None
        same: dict[str, FetchedFile] = {}
        with contextlib.suppress(FormatError):
            before = self.record()
        if before is not None:
            now = {file.path: file for file in dataset.files}
            same = {one.path: one for one in before.files if one.path in now and one.remote().is_same_as(now[one.path])}
            kept, wanted = kept or before.kept, wanted | (same.keys() & set(before.asked))
        self._remove_others(wanted)
        for path in set(dataset.unverified) - same.keys():
            self._remove_finished(path)
        files = tuple(
            FetchedFile.of(file, same[file.path].received if file.path in same else None) for file in dataset.files
        )
        there = tuple(file.path for file in files if file.path in wanted)
        record = OriginalsRecord(dataset.id, dataset.address, dataset.revision, kept, written_time(), files, there)
        fs.replace_file_below(self._root, self.folder / _RECORD, record.to_bytes())

    def _remove_finished(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, UsageError):
            parent = (self.files / path).parent
            with fs.folder_below(self._root, parent) as within:
                kind = os.stat(Path(path).name, dir_fd=within, follow_symlinks=False).st_mode
                if not stat.S_ISDIR(kind):
                    fs.remove(self.files / path, within=within)

    def take_digests(self, paths: Iterable[str]) -> dict[str, str]:
        """Record the sha256 of finished files for which the remote gives no checksum; return them by path."""
        record = self.record()
        digests = {path: _sha256_of(self.files / path) for path in paths}
        if record is not None and digests:
            files = (replace(file, received=digests.get(file.path, file.received)) for file in record.files)
            data = replace(record, files=tuple(files)).to_bytes()
            fs.replace_file_below(self._root, self.folder / _RECORD, data)
        return digests

    def _remove_others(self, wanted: Iterable[str]) -> None:
        """Remove all files but those wanted and their parts, all links, and the folders that are empty then."""
        with fs.folder_below(self._root, self.folder) as inside:
            if self.files.is_symlink():
                fs.remove(self.files, within=inside)
            if self.files.is_dir():
                self._remove_others_in(inside, wanted)

    def _remove_others_in(self, inside: int, wanted: Iterable[str]) -> None:
        names = {self.files / path for path in wanted}
        parts = {path.with_name(f"{path.name}.part") for path in names}
        names |= parts | {path.with_name(path.name + RECORD) for path in parts}
        # By descriptors, so that nothing is removed through links, also if one appears meanwhile.
        for folder, folders, files, within in os.fwalk(self.files.name, topdown=False, dir_fd=inside):
            for name in (*files, *folders):
                path, mode = self.folder / folder / name, os.stat(name, dir_fd=within, follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    with contextlib.suppress(OSError):  # not empty
                        fs.remove_empty_folder(path, within=within)
                elif path not in names or not stat.S_ISREG(mode):
                    fs.remove(path, within=within)
        with contextlib.suppress(OSError):  # not there, or not empty
            fs.remove_empty_folder(self.files, within=inside)

    @contextlib.contextmanager
    def only(self, paths: Iterable[str]) -> Iterator[Path]:
        """Yield a folder with exactly these files, so that a reader does not take other originals for part of them."""
        wanted = {self.files / path for path in paths}
        if wanted == {path for path in self.files.rglob("*") if not path.is_dir()}:
            yield self.files
            return
        chosen = self.folder / "chosen"
        fs.remove_below(self._root, chosen)
        try:
            for path in sorted(wanted):
                link = chosen / path.relative_to(self.files)
                fs.make_folder(link.parent)
                fs.link_to(path, link)
            yield chosen
        finally:
            fs.remove_below(self._root, chosen)

    def has(self, file: RemoteFile) -> bool:
        """Return whether a complete file is here, by its size."""
        path = self.files / file.path
        return path.is_file() and file.size in (None, path.stat().st_size)

    def has_any(self) -> bool:
        """Return whether any bytes have arrived."""
        return any(path.is_file() and path.stat().st_size for path in self.files.rglob("*"))

    def present(self, dataset: RemoteDataset) -> int:
        """Return the number of bytes of the dataset's files that have arrived, finished or in part; not verified."""
        found = 0
        for file in dataset.files:
            done = self.files / file.path
            for path in (done, done.with_name(f"{done.name}.part")):
                with contextlib.suppress(OSError):
                    size = path.stat().st_size
                    found += size if file.size is None else min(size, file.size)
                    break
        return found

    def bytes(self) -> int:
        """Bytes of all files here."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each file that does not match its checksum, or is missing although it was kept."""
        record = self.record()
        if record is None:
            return
        for file in record.files:
            path = self.files / file.path
            try:
                fs.refuse_links(self.folder, path)
            except UsageError as error:
                yield error.message
                continue
            if not path.is_file():
                if record.kept and file.path in record.asked:
                    yield f"{path} is missing"
            elif file.checksum is None:
                yield from _unverified_problems(path, file)
            elif not matches(path, file.remote().known_size, file.checksum):
                yield f"{path} does not match the checksum {file.checksum} of {record.address}"

    def remove(self) -> None:
        """Remove all files atomically; the caller must hold the lock."""
        remove_aside(self.folder, self._aside, below=self._root)

    def discard(self, note: Callable[[str], None]) -> None:
        """Remove all files, which are no longer needed; if that fails, pass the reason to `note`."""
        try:
            self.remove()
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            note(f"fetched files, no longer needed, could not be removed ({why}); rbtool cache prune removes them")


def _unverified_problems(path: Path, file: FetchedFile) -> Iterator[str]:
    """Compare a file without a checksum with its size, and with the digest of the received bytes."""
    size = path.stat().st_size
    if file.size not in (None, size):
        yield f"{path} has {size:,} bytes, expected {file.size:,}"
    elif file.received is not None and not matches(path, size, file.received):
        yield f"{path} is not as it was received: its digest is not {file.received}"


def _sha256_of(path: Path) -> str:
    checking = hasher("sha256:" + "0" * 64, 0)
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        for block in blocks_of(file):
            checking.update(block)
    return checking.found


def stored_originals(root: Path) -> Iterator[Originals]:
    """Yield all originals below the root, complete or not."""
    for folder in sorted(root.glob(f"*/{_FOLDER}/*")):
        if folder.is_dir():
            yield Originals(root, folder.parent.parent.name, unquote(folder.name))
