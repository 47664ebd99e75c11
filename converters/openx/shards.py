"""The shards of a dataset of Open X-Embodiment: tar archives `NAME_00000.tar` with a pickle for each episode."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format.contracts import Closing
from ...core.format.digest import read_regular, refuse_pointer
from ...core.format.read_errors import no_match
from ..files.archives import Archive, ArchiveMember, CutError, begins_as_archive

SUFFIX = ".tar"
_PICKLE_SUFFIXES = (".pickle", ".pkl")
_PICKLE = b"\x80"
_NUMBERED = re.compile(r"(?P<name>.*?)[_-]?(?P<number>\d{1,9})\.tar", re.ASCII | re.DOTALL)
_HEAD = 4096
_TRIED = 16
_SHARDS_TRIED = 3
_MOST_NAMED = 5
_EMPTY_BYTES = 10 << 10
_AGAIN = "fetch it again"


@dataclass(frozen=True, slots=True)
class EpisodeArchive:
    """An archive; `number` is the one in its name, None where it has none."""

    path: Path
    name: str
    number: int | None


def shards_at(path: Path) -> list[EpisodeArchive]:
    """Return the archive at a path, or those directly in a folder, in the order of their numbers."""
    return ordered_shards([path] if not path.is_dir() else [file for file in path.iterdir() if _is_shard(file)])


def ordered_shards(files: Iterable[Path]) -> list[EpisodeArchive]:
    """Return archives in the order of their numbers, by their names alone."""
    found = [_shard(file) for file in files]
    return sorted(found, key=lambda one: (one.name, -1 if one.number is None else one.number, one.path.name))


def _is_shard(file: Path) -> bool:
    return file.name.lower().endswith(SUFFIX) and not file.name.startswith(".") and file.is_file()


def _shard(file: Path) -> EpisodeArchive:
    match = _NUMBERED.fullmatch(file.name)
    if match is None:
        return EpisodeArchive(file, file.stem, None)
    return EpisodeArchive(file, match["name"], int(match["number"]))


def dataset_name(path: Path, shards: Sequence[EpisodeArchive]) -> str:
    """Return the name of the dataset, which its shards bear; that of the folder or file where they bear none."""
    return (shards[0].name if shards else "") or path.name.partition(".")[0]


def missing_shards(path: Path, shards: Sequence[EpisodeArchive]) -> list[CorruptDataError]:
    """Return an error for each shard that a folder lacks below the last one it has; of a single file none is known."""
    return lacking_shards(path, shards) if path.is_dir() else []


def lacking_shards(where: object, shards: Sequence[EpisodeArchive]) -> list[CorruptDataError]:
    """Return an error if these shards lack any below the last one; it names `where`."""
    numbers = {one.number for one in shards if one.number is not None}
    if not numbers:
        return []
    lacking = sorted(set(range(max(numbers))) - numbers)
    if not lacking:
        return []
    name = shards[0].path.name
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    width, stem = len(match["number"]), name[: match.start("number")]
    named = ", ".join(f"{stem}{number:0{width}}{SUFFIX}" for number in lacking[:_MOST_NAMED])
    more = f" and {len(lacking) - _MOST_NAMED:,} more" if len(lacking) > _MOST_NAMED else ""
    lacks = "a shard is" if len(lacking) == 1 else f"{len(lacking):,} shards are"
    return [CorruptDataError(f"{where}: {lacks} missing: {named}{more}")]


def require_one_dataset(path: Path, shards: Sequence[EpisodeArchive]) -> None:
    """Raise FormatError for a folder with shards of several datasets, or with one shard twice."""
    names = sorted({one.name for one in shards})
    if len(names) > 1:
        some = ", ".join(map(repr, names[:_MOST_NAMED]))
        raise FormatError(f"{path} has shards of several datasets: {some}", hint="put each in a folder of its own")
    numbers = [one.number for one in shards]
    if len(set(numbers)) < len(numbers):
        twice = next(one for one in shards if numbers.count(one.number) > 1)
        raise FormatError(f"{path} has two shards with the number {twice.number}")


def has_episodes(shards: Sequence[EpisodeArchive]) -> bool:
    """Whether one of the first shards that are not empty has a pickle of steps among its first members."""
    filled = (one.path for one in shards if not is_empty_archive(one.path))
    return any(_has_episode(path) for path in itertools.islice(filled, _SHARDS_TRIED))


def _has_episode(path: Path) -> bool:
    try:
        if not begins_as_archive(path):
            return False
        with Archive(path) as archive:
            for count, member in enumerate(archive.members()):
                if is_episode(member):
                    head = archive.read(member.start, min(member.size, _HEAD))
                    return head.startswith(_PICKLE) and b"steps" in head
                if count >= _TRIED:
                    break
    except (RbtoolError, OSError) as error:
        return no_match(error)
    return False


def is_episode(member: ArchiveMember) -> bool:
    """Whether a member is the pickle of an episode, by its name."""
    name = Path(member.name).name
    return name.lower().endswith(_PICKLE_SUFFIXES) and not name.startswith(".")


def is_empty_archive(path: Path) -> bool:
    """Whether a file is nothing but the end of an archive; a larger one of zeros is a copy that failed."""
    return path.stat().st_size <= _EMPTY_BYTES and not any(read_regular(path))


class EpisodeArchives(Closing):
    """Opens the archives of a dataset, one at a time. Not for several threads."""

    def __init__(self, shards: Sequence[EpisodeArchive]) -> None:
        self.all = tuple(shards)
        self._number = -1
        self._archive: Archive | None = None

    def archive(self, number: int) -> Archive:
        """Return the archive in that place; raises FormatError for a file that is none."""
        if self._archive is None or self._number != number:
            self.close()
            path = self.all[number].path
            refuse_pointer(path)
            if not path.stat().st_size:
                raise CutError(f"{path} is an empty file", hint=_AGAIN)
            if not begins_as_archive(path) and not is_empty_archive(path):
                raise CorruptDataError(f"{path} is no tar archive", hint=_AGAIN)
            self._number, self._archive = number, Archive(path)
        return self._archive

    def members(self, number: int) -> Iterator[ArchiveMember]:
        """Yield the files in an archive; raises what `Archive.members` does."""
        yield from self.archive(number).members()

    def close(self) -> None:
        if self._archive is not None:
            self._archive.close()
            self._archive = None
