"""Bringing files to a folder: resumed after a cut, verified before they get their name, from mirrors in order.

A file that bears its own name is whole and matched its checksum once, or its size where the remote gives no checksum.
What is not yet whole is next to it as `<name>.part` and holds the first bytes of the file; after any crash,
the next fetch continues from there.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import CorruptDataError, FormatError, NetworkError, OutOfSpaceError, RbtoolError
from ..format import RemoteFile, fs, is_inside
from .checksums import hasher, matches
from .partial import Partial
from .retries import Transient, retrying
from .threads import Watch, ignore, run_together
from .transport import Transport
from .unverified import RECORD, fetch_unverified

__all__ = ["fetch_files"]

_PART = ".part"
_FAIR_BYTES = 1 << 20  # a cut after so many bytes, or this part of the file, was bad luck and not a bad server
_FAIR_PARTS = 64


class _Different(Exception):
    """The bytes are not those that were announced."""


def fetch_files(
    files: Sequence[RemoteFile],
    folder: Path,
    transport: Transport,
    *,
    progress: Callable[[int], None] | None = None,
    note: Callable[[str], None] | None = None,
    workers: int = 4,
) -> None:
    """Bring files to `folder`, each below its path, verified; several at a time.

    A file that is there with the right bytes is not fetched; one with other bytes is removed and fetched. A cut is
    resumed, and counts as a failed attempt only if it brought nothing. Bytes that do not match are thrown away and
    fetched once more from each address in turn.

    A file without a checksum must have the size that is listed, or else that of the answer, and is read again from the
    disk. It is resumed only in the same version, by the remote's own word. One that is there is taken as it is if it
    has the size that is listed, and fetched again if none is.

    `progress` receives how many more bytes are there and may be right, also those that were there before; negative
    when some turn out to be wrong. At the end the sum is the size of all files. `note` receives a sentence for each
    failure that is retried. Both are called in the calling thread.

    Raises what the first failure was: FormatError before anything is done for files that make no sense together,
    CorruptDataError for bytes that never match, OutOfSpaceError, or the NetworkError, AuthorisationError or
    DatasetNotFoundError of the file's first address. Parts stay, to be resumed.
    """
    parts = _parts(files, folder)
    jobs = [
        functools.partial(_fetch_file, file, folder, part, transport) for file, part in zip(files, parts, strict=True)
    ]
    watch = Watch(progress or ignore, note or ignore)
    run_together(jobs, watch, workers=workers, interrupt=transport.interrupt)


def _parts(files: Sequence[RemoteFile], folder: Path) -> list[Path]:
    """Check what the remote states about its files and choose the name of each one's part."""
    names = {file.path for file in files}
    if len(names) < len(files):
        raise FormatError("the remote lists a file twice")
    parts = []
    for file in files:
        if not is_inside(file.path):
            raise FormatError(f"the remote lists {file.path!r}, a path that leads out of the folder")
        if not file.addresses or (file.size is not None and file.size < 0):
            raise FormatError(f"the remote lists {file.path!r} with {file.size} bytes at {len(file.addresses)} places")
        if not names.isdisjoint(_folders_of(file.path)):
            raise FormatError(f"the remote lists a file in the way of {file.path!r}")
        if file.checksum is not None:
            hasher(file.checksum, file.known_size)
        part = file.path + _PART
        while part in names or part + RECORD in names:  # the dataset has a file of that very name
            part += _PART
        parts.append(folder / part)
    return parts


def _folders_of(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _fetch_file(file: RemoteFile, folder: Path, part_path: Path, transport: Transport, watch: Watch) -> None:
    """Bring one file to its place, whatever of it is there already; into no folder that a link leads to."""
    target = folder / file.path
    with fs.folder_below(folder, target.parent, make=True) as within:
        if _is_there(file, target, within, watch):
            watch.progress(file.known_size)
        elif file.checksum is None:
            failures = fetch_unverified(file, target, part_path, within, transport, watch)
            if failures:
                raise _first_of(failures)
        else:
            _fetch_missing(file, target, part_path, within, transport, watch)


def _fetch_missing(
    file: RemoteFile, target: Path, part_path: Path, within: int, transport: Transport, watch: Watch
) -> None:
    with Partial(file, part_path, within, watch.progress, watch.check) as part:
        failures: list[RbtoolError] = []
        for address in file.addresses:
            try:
                _FileFetch(file, address, part, transport, watch).run()
                break
            except OutOfSpaceError:
                raise
            except RbtoolError as error:
                failures.append(error)
        else:
            watch.check()
            if not part.received or isinstance(failures[0], CorruptDataError):
                part.discard()
            raise _first_of(failures)
        part.sync()
        watch.check()
        part.publish(target)


def _is_there(file: RemoteFile, target: Path, within: int, watch: Watch) -> bool:
    """Return whether the file is there and right; one that is wrong is removed."""
    try:
        kind = os.stat(target.name, dir_fd=within, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(kind):
        raise FormatError(f"{target} is a folder, the file {file.path} belongs there")
    if _is_as_listed(file, target, within):
        return True
    watch.check()
    watch.note(f"{file.path} was there, but not as its source has it; it is fetched again")
    fs.remove(target, within=within)
    return False


def _is_as_listed(file: RemoteFile, target: Path, within: int) -> bool:
    if file.size is None:
        return False
    if file.checksum is None:
        found = os.stat(target.name, dir_fd=within, follow_symlinks=False)
        return stat.S_ISREG(found.st_mode) and found.st_size == file.size
    return matches(target, file.size, file.checksum, within=within)


def _first_of(failures: Sequence[RbtoolError]) -> RbtoolError:
    """The failure of the first address, which names how many others were tried."""
    first = failures[0]
    if len(failures) == 1:
        return first
    final = type(first)(
        f"{first.message}; {len(failures)} addresses were tried, and no other had it either", hint=first.hint
    )
    final.__cause__ = first
    return final


class _FileFetch:
    """Fetches what is missing of one file from one address."""

    def __init__(self, file: RemoteFile, address: str, part: Partial, transport: Transport, watch: Watch) -> None:
        self._file = file
        self._address = address
        self._part = part
        self._transport = transport
        self._watch = watch

    def run(self) -> None:
        """Complete the part; a part that does not match is thrown away and fetched from its start once."""
        for remedy in ("it is fetched again from the start", ""):
            try:
                self._complete()
                return
            except _Different as found:
                self._watch.check()
                self._part.restart()
                sentence = f"{self._file.path} is not what was announced: {self._file.checksum} was expected, {found}"
                if not remedy:
                    raise CorruptDataError(
                        f"{sentence} from {self._host}; nothing of it was kept",
                        hint="the file is damaged at its source or on the way: try again later",
                    ) from None
                self._watch.note(f"{sentence} from {self._host}; {remedy}")

    @property
    def _host(self) -> str:
        return urlsplit(self._address).hostname or "its source"

    @property
    def _too_short(self) -> str:
        size = f"{self._part.received:,} of {self._file.known_size:,} bytes"
        return f"{self._file.path} could not be fetched from {self._host}: it ended after {size}"

    def _complete(self) -> None:
        """Read until the part is whole and right, or raise _Different."""
        while not self._part.whole:
            retrying(self._attempt, note=self._watch.note, sleep=self._watch.sleep)
        if not self._part.matches():
            raise _Different(f"{self._part.found} came")

    def _attempt(self) -> None:
        """Make one request; a failure after a fair part of the file is reported and forgiven."""
        self._watch.check()
        before, fair = self._part.received, min(_FAIR_BYTES, self._file.known_size // _FAIR_PARTS)
        try:
            self._read()
            if not self._part.whole:
                raise Transient(NetworkError(self._too_short))
        except Transient as failure:
            if self._part.whole:
                return
            if self._part.received - before <= fair:
                raise
            self._watch.note(f"{failure}; going on from byte {self._part.received:,}")
            if failure.retry_after is not None:
                raise  # the server's wish goes before ours

    def _read(self) -> None:
        """Add to the part what one request brings; whatever ends it, what came is written."""
        try:
            with self._transport.open(self._address, self._part.received) as (start, blocks):
                skip = self._part.received - start
                if skip < 0:
                    raise NetworkError(f"{self._host} sends another part of {self._file.path} than was asked for")
                for block in blocks:
                    self._watch.check()
                    fresh, skip = block[skip:], max(0, skip - len(block))
                    if self._part.received + len(fresh) > self._file.known_size:
                        raise _Different(f"more than its {self._file.known_size:,} bytes came")
                    self._part.append(fresh)
        finally:
            if not self._watch.abandoned():
                self._part.flush()
