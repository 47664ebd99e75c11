"""Reads and downloads Gen-DGRL's episodes of Procgen (Mediratta et al. 2023), from archives or folders.

There are 128 datasets: 16 games in eight categories. An episode is a pickled dictionary of arrays. The folder of an
unpacked archive is read like the archive. Procgen is never imported.
"""

from __future__ import annotations

import bisect
import functools
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from ...core.errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, SchemaError
from ...core.format.contracts import Array, Closing, Piece, SourceFacts
from ...core.format.converter import Ids, LocalCache, Reader, refuse_damaged, require_trust, safe_id
from ...core.format.files import no_match, open_regular
from ...core.format.manifest import Dropped
from ...core.remote.catalogue import not_found
from ...core.remote.http import MirrorSource
from ...core.ted.schema import ACTION, REWARD, Field, Key, Timing, dtype_name
from ..files.archives import Archive, ArchiveMember, CutError, MemberFile, begins_as_archive
from ..files.numpy_files import MAGIC, ByteRange, read_header
from ..files.pickles import PickledArray, PickledList, PickleReader
from ..files.readers import OUTCOME_ROWS, SurveyedReader, natural_order

GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot", "heist", "jumper",
    "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip
CATEGORIES = {
    "1M_E": "1M/level_200/expert",
    "1M_S": "1M/level_200/suboptimal",
    "10M": "10M/level_200/expert",
    "25M": "25M/level_200/expert",
    "level_1_E": "100k/level_1/expert",
    "level_1_S": "100k/level_1/suboptimal",
    "level_40_E": "100k/level_40/expert",
    "level_40_S": "100k/level_40/suboptimal",
}
"""The path of each category below the base URL."""
SUFFIX = ".tar.xz"


@functools.cache
def published() -> dict[str, str]:
    """Return the path of each archive below the base URL, by id and in the order of the ids."""
    found = {
        f"{game}-{category}": f"{folder}/{game}{SUFFIX}"
        for game in GAMES
        for category, folder in CATEGORIES.items()
    }  # fmt: skip
    return dict(sorted(found.items()))


def id_of(path: Path) -> str:
    """Return the id of a published archive, packed or not, from its folders and name; else the name of the file."""
    parts = path.absolute().as_posix()
    plain = (parts.removesuffix(ending) for ending in (SUFFIX, ".tar", "") if parts.endswith(ending))
    end = f"{next(plain)}{SUFFIX}"
    known = next((name for name, file in published().items() if end.endswith(f"/{file}")), None)
    return known or path.name.partition(".")[0]


_EPISODE_SUFFIX = ".npy"


def episode_files(path: Path) -> list[Path]:
    """Return the files of episodes in a folder, or in its only subfolder, ordered by the numbers in their names."""
    for folder in (path, *_only_folder(path)):
        files = [
            file for file in folder.iterdir() if file.name.endswith(_EPISODE_SUFFIX) and not file.name.startswith(".")
        ]
        if files:
            return sorted(files, key=lambda file: natural_order(file.name))
    return []


def _only_folder(path: Path) -> list[Path]:
    folders = [one for one in path.iterdir() if one.is_dir() and not one.name.startswith(".")]
    return folders if len(folders) == 1 else []


class EpisodeFolder(Closing):
    """A folder of episode files with the interface of `Archive`: files are addressed as if concatenated.

    It must not be used by several threads at once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = episode_files(path)
        sizes = (file.stat().st_size if file.is_file() else 0 for file in self.files)
        self._stops = list(itertools.accumulate(sizes))
        self._number, self._descriptor = -1, -1

    def members(self) -> Iterator[ArchiveMember]:
        """Yield the files in their order; FormatError for one that is not a regular file."""
        start = 0
        for number, (file, stop) in enumerate(zip(self.files, self._stops, strict=True)):
            self._opened(number)
            yield ArchiveMember(file.relative_to(self.path).as_posix(), start, stop - start)
            start = stop

    def read(self, position: int, count: int) -> bytes:
        """Return `count` bytes of a member; CorruptDataError for a file that became shorter since it was listed."""
        if not count:
            return b""
        number = bisect.bisect_right(self._stops, position)
        descriptor = self._opened(number)
        at = position - (self._stops[number - 1] if number else 0)
        parts = []
        while count:
            part = os.pread(descriptor, count, at)
            if not part:
                raise CorruptDataError(f"{self.files[number]} became shorter while it was read")
            parts.append(part)
            at, count = at + len(part), count - len(part)
        return b"".join(parts)

    def _opened(self, number: int) -> int:
        if number != self._number:
            self.close()
            self._descriptor, self._number = open_regular(self.files[number]), number
        return self._descriptor

    def close(self) -> None:
        """Close the file that is open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._number = -1, -1


OBSERVATION: Key = ("observation",)
_NAMES = ("observations", "actions", "rewards", "dones")
_HEAD = 16 << 10
_LARGEST = 512 << 20
_TRIED = 16
_MOST_DAMAGED = 1000
_NAMED = re.compile(r"\d{8}T\d{6}_\d+_\d+_(-?\d{1,18})_[^_]+", re.ASCII)
_AFTER = (
    "the observation after the last step of an episode is stored as in the archive: Procgen resets at once, so it may "
    "show the next level; no target bootstraps from it"
)


@dataclass(frozen=True, slots=True)
class ArchivedEpisode:
    """An episode of `length` steps in a member of the archive; `terminated` if `dones` is set in its last step."""

    member: ArchiveMember
    length: int = 0
    terminated: bool = False


@dataclass(frozen=True, slots=True)
class ArchiveSurvey:
    """The results of a pass over an archive.

    `damaged` has an error for each episode that cannot be read, `problem` the error of an archive that was cut.
    """

    fields: tuple[tuple[Field, Timing], ...]
    episodes: Mapping[int, ArchivedEpisode]
    damaged: Mapping[int, RbtoolError]
    problem: RbtoolError | None
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]


class GenDgrlReader(SurveyedReader[ArchiveSurvey]):
    """Reads a `.tar.xz` or `.tar` archive, a folder with an archive and nothing else, or the folder of an unpacked one.

    The archive has an `.npy` file for each episode: a pickled dictionary of four arrays.

    `observations` (T + 1 rows) become `observation`, `actions` become `action`, `rewards` become `next.reward`, and
    `dones` marks the last step as terminated. Episodes are numbered in the order of the archive, or of the names in a
    folder. Each has the name of its file as the text `file`, and as its seed the seed of the level in that name.
    Observations that are stored as floats are converted back to uint8.

    Options: `trust_pickle` is required, because episodes are pickles. `id` is the id of the published dataset.

    Raises UsageError without `trust_pickle`, FormatError for pickles of something else and for archives that hold more
    than files below a folder, CorruptDataError for damaged ones.
    """

    option_names = frozenset({"id", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the path is an archive with an episode among its first members."""
        try:
            with _opened(path) as archive:
                return _has_episode(archive)
        except (RbtoolError, OSError, ValueError, LookupError) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Open the archive."""
        self._unpickler: PickleReader | None = None
        self._archive = _opened(self.path)
        try:
            require_trust(
                self.path, self.options.get("trust_pickle"), "its episodes are pickles, which can run anything"
            )
        except BaseException:
            self._archive.close()
            raise

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Unpack the whole archive, and examine every episode."""
        found = self.looked_over(progress)
        episodes = {number: one for number, one in found.episodes.items() if one.length}
        numbers = sorted(episodes.keys() | found.damaged.keys())
        lengths = [episodes[number].length if number in episodes else 0 for number in numbers]
        return SourceFacts(
            source="gen_dgrl",
            id=self.id_or(id_of(self._archive.path)),
            fields=found.fields,
            episode_numbers=numbers,
            steps=sum(lengths),
            renamed_keys={"observations": "observation", "actions": "action", "rewards": "next.reward"},
            dropped_keys=found.dropped,
            notes=found.notes,
            lengths=lengths,
        )

    def look(self, progress: Callable[[int], None]) -> ArchiveSurvey:
        forms: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        episodes: dict[int, ArchivedEpisode] = {}
        damaged: dict[int, RbtoolError] = {}
        problem, others, number, skipped = None, set[str](), 0, 0
        try:
            for member in self._archive.members():
                if not _is_episode(member):
                    skipped += 1
                    continue
                try:
                    arrays, more = self._load(member)
                    episodes[number] = self._episode(member, arrays, forms)
                    others |= more
                except CutError:
                    raise
                except RbtoolError as error:
                    damaged[number] = error
                    if len(damaged) > _MOST_DAMAGED:
                        raise
                number += 1
                progress(1)
        except CutError as error:
            problem = error
        if not any(one.length for one in episodes.values()):
            raise problem or next(iter(damaged.values()), FormatError(f"{self.path} has no steps"))
        empty = sum(not one.length for one in episodes.values())
        notes = [_AFTER]
        notes += [f"{empty:,} episode{'s' if empty > 1 else ''} without steps left out"] if empty else []
        notes += (
            [f"{skipped:,} file{'s' if skipped > 1 else ''} in the archive that are not episodes"] if skipped else []
        )
        notes += [f"the rest of the archive is left out: {problem.message}"] if problem is not None else []
        dropped = tuple(Dropped(name, "it is not part of the published layout") for name in sorted(others))
        return ArchiveSurvey(_fields(forms), episodes, damaged, problem, dropped, tuple(notes))

    def _episode(
        self,
        member: ArchiveMember,
        arrays: Mapping[str, PickledArray],
        forms: dict[str, tuple[np.dtype[Any], tuple[int, ...]]],
    ) -> ArchivedEpisode:
        """Check the arrays of an episode; the first episode decides about the form of all."""
        what, steps = f"{self.path}: {member.name}", len(arrays["rewards"])
        for name in _NAMES:
            array, rows = arrays[name], steps + (name == "observations")
            if not array.shape or array.shape[0] != rows:
                raise FormatError(f"{what}: {name} have {len(array):,} rows, expected {rows:,} for {steps:,} rewards")
            width = array.shape[1:]
            if name in ("rewards", "dones") and width not in ((), (1,)):
                raise FormatError(f"{what}: {name} have the shape {list(array.shape)}, expected a value for each step")
            form = array.dtype.newbyteorder("="), () if name in ("rewards", "dones") else width
            if array.dtype.kind not in "biuf":
                raise FormatError(f"{what}: {name} are {array.dtype}, expected numbers")
            if steps and name != "dones" and forms.setdefault(name, form) != form:
                raise FormatError(f"{what}: {name} are {form[0]} {list(form[1])}, but in other episodes "
                                  f"{forms[name][0]} {list(forms[name][1])}")  # fmt: skip
        if not steps:
            return ArchivedEpisode(member)
        dones = self._rows(arrays["dones"], 0, steps).reshape(steps)
        if ((dones != 0) & (dones != 1)).any() or dones[:-1].any():
            raise FormatError(f"{what}: dones are set before the last step, or have values other than 0 and 1")
        return ArchivedEpisode(member, steps, bool(dones[-1]))

    def _load(self, member: ArchiveMember) -> tuple[dict[str, PickledArray], set[str]]:
        """Unpickle an episode in a separate process; return its arrays, and the names of any other entries."""
        what = f"{self.path}: {member.name}"
        head = self._archive.read(member.start, min(member.size, _HEAD))
        header = read_header(_Head(head, member.size), what)
        if not header.stored.hasobject or header.shape:
            raise FormatError(f"{what} is an array of {header.stored}, expected a pickled dictionary")
        body = MemberFile(self._archive, member.start + header.size, member.size - header.size, head[header.size :])
        try:
            found = self._reader().load(cast(BinaryIO, body), member.size - header.size)
            if isinstance(found, PickledList) and len(found) == 1:  # the 0-d array around the dictionary
                [found] = self._reader().items(found)
        except CorruptDataError as error:
            raise CorruptDataError(f"{what}: {error.message}", hint=error.hint) from error
        except FormatError as error:
            raise FormatError(f"{what}: {error.message}", hint=error.hint) from error
        if not isinstance(found, dict):
            raise FormatError(f"{what} is not a dictionary of arrays")
        arrays = {name: array for name, array in found.items() if name in _NAMES and isinstance(array, PickledArray)}
        lacking = [name for name in _NAMES if name not in arrays]
        if lacking:
            raise FormatError(f"{what} has no array {lacking[0]!r}")
        return arrays, found.keys() - arrays.keys()

    def _reader(self) -> PickleReader:
        if self._unpickler is None:
            self._unpickler = PickleReader("the episode", _LARGEST)
        return self._unpickler

    def _rows(self, array: PickledArray, start: int, stop: int) -> Array:
        return self._reader().rows(array, start, stop)

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise the error of the first of these episodes that cannot be read, or of a cut archive if all are read."""
        found = self.found
        refuse_damaged(numbers, found.damaged)
        if everything and found.problem is not None:
            raise found.problem

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        yield from self._pieces(number, self.piece_rows(self.found.fields), outcomes=False)

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode."""
        yield from self._pieces(number, OUTCOME_ROWS, outcomes=True)

    def _pieces(self, number: int, rows: int, *, outcomes: bool) -> Iterator[Piece]:
        one = self.found.episodes[number]
        arrays, _ = self._load(one.member)
        text, seed = {"file": Path(one.member.name).name}, _seed_of(one.member.name)
        for start in range(0, one.length, rows):
            stop = min(start + rows, one.length)
            columns: dict[Key, Array] = {REWARD: self._rows(arrays["rewards"], start, stop).reshape(stop - start)}
            if not outcomes:
                columns[ACTION] = self._rows(arrays["actions"], start, stop)
                columns[OBSERVATION] = self._pixels(one, self._rows(arrays["observations"], start, stop + 1))
            flags = np.zeros(stop - start, bool)
            flags[-1] = one.terminated and stop == one.length
            yield Piece(
                number, columns, flags, np.zeros(stop - start, bool), first=not start, last=stop == one.length,
                seed=None if start else seed, text={} if start else text,
            )  # fmt: skip

    def _pixels(self, one: ArchivedEpisode, rows: Array) -> Array:
        """Convert observations that are stored as floats back to uint8; FormatError if that would change a value."""
        if rows.dtype.kind != "f":
            return rows
        with np.errstate(invalid="ignore"):
            found = rows.astype(np.uint8)
        if not (found == rows).all():
            raise FormatError(
                f"{self.path}: {one.member.name} has observations that are not whole numbers from 0 to 255"
            )
        return found

    def files(self) -> list[Path]:
        """Return the archive, or the files of episodes."""
        return self._archive.files

    def on_close(self) -> None:
        """Close the archive, and end the process that unpickles."""
        self._archive.close()
        if self._unpickler is not None:
            self._unpickler.close()
            self._unpickler = None


def _fields(forms: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> tuple[tuple[Field, Timing], ...]:
    def stated(name: str) -> tuple[str, tuple[int, ...]]:
        dtype, shape = forms[name]
        try:
            return dtype_name(dtype), shape
        except SchemaError as error:
            raise FormatError(f"{name}: {error}") from error

    pixels, shape = stated("observations")
    return (
        (Field(OBSERVATION, "uint8" if "float" in pixels else pixels, shape, "observation"), "state"),
        (Field(ACTION, *stated("actions"), "action"), "step"),
        (Field(REWARD, *stated("rewards"), "reward"), "result"),
    )


def _opened(path: Path) -> Archive | EpisodeFolder:
    """Open an archive, a folder that holds only one, or the folder of an unpacked one; else raise FormatError."""
    if path.is_dir():
        files = [file for file in path.iterdir() if not file.name.startswith(".")]
        if len(files) == 1 and files[0].is_file() and begins_as_archive(files[0]):
            return Archive(files[0])
        if (folder := EpisodeFolder(path)).files:
            return folder
    elif path.is_file() and begins_as_archive(path):
        return Archive(path)
    raise FormatError(
        f"{path} has no episodes, expected a .tar.xz or .tar archive of .npy files, or the folder of an unpacked one"
    )


def _is_episode(member: ArchiveMember) -> bool:
    name = Path(member.name).name
    return name.endswith(_EPISODE_SUFFIX) and not name.startswith(".")


def _seed_of(name: str) -> int | None:
    """Return the seed of the level from the name of an episode, `TIME_NUMBER_LENGTH_SEED_RETURN`, or None."""
    found = _NAMED.fullmatch(Path(name).name.removesuffix(_EPISODE_SUFFIX))
    return int(found[1]) if found is not None and int(found[1]) >= 0 else None


def _has_episode(archive: Archive | EpisodeFolder) -> bool:
    for count, member in enumerate(archive.members()):
        if _is_episode(member):
            head = archive.read(member.start, min(member.size, _HEAD))
            return head.startswith(MAGIC) and b"'|O'" in head[:128] and b"observations" in head
        if count >= _TRIED:
            break
    return False


class _Head(ByteRange):
    """The first bytes of a range of `size` bytes, to read a header from."""

    def __init__(self, head: bytes, size: int) -> None:
        self.size = size
        self._head = io.BytesIO(head)

    def read_into(self, target: memoryview, position: int) -> None:
        self._head.seek(position)
        if self._head.readinto(target) < len(target):
            raise CorruptDataError(f"the header of an array was cut, or is longer than {_HEAD:,} bytes")


_VARIABLE = "GEN_DGRL_URL"


class GenDgrlCache(LocalCache):
    """A folder with datasets at their published paths: as `.tar.xz`, as `.tar`, or unpacked."""

    def find(self, dataset_id: str, reader: type[Reader]) -> Path:
        """Return the archive of a dataset; DatasetNotFoundError if it is not in the folder."""
        path = _path_of(safe_id(dataset_id))
        found = self._copy(path)
        if found is None:
            raise DatasetNotFoundError(
                f"the local {self.source} folder {self.folder} has no dataset {dataset_id!r}: looked for "
                f"{self.folder / path}, for a .tar and for a folder",
                hint=f"{self.variable} names the folder, if it is another",
            )
        return found

    def ids(self, reader: type[Reader]) -> Iterator[str]:
        """Yield the ids of all datasets whose archive is in the folder."""
        return (name for name, path in published().items() if self._copy(path) is not None)

    def _copy(self, path: str) -> Path | None:
        packed = self.folder / path
        plain = packed.with_name(packed.name.removesuffix(SUFFIX))
        if packed.is_file():
            return packed
        archive = plain.with_name(f"{plain.name}.tar")
        return archive if archive.is_file() else plain if plain.is_dir() else None


class GenDgrlSource(MirrorSource):
    """Downloads from Gen-DGRL's server, or from the mirrors in `GEN_DGRL_URL` (base URLs, tried in their order).

    A dataset is one archive, which is accepted if it is an xz file with an episode.
    """

    name = "gen_dgrl"
    title = "Gen-DGRL"
    bases_variable = _VARIABLE
    defaults = ("https://dl.fbaipublicfiles.com/DGRL/Procgen/Datasets/Compressed",)
    signatures = (b"\xfd7zXZ\x00",)
    server_hint = f"Gen-DGRL's server may be down: try later, or name a mirror: {_VARIABLE}=BASE"
    pickled = True
    local_cache = GenDgrlCache("gen_dgrl", "GEN_DGRL_DATASET_DIR", "~/gen_dgrl")

    def list_ids(self) -> Ids:
        """List the 128 ids, which are part of this package, without a request."""
        return Ids(tuple(published()))

    def addresses(self, dataset_id: str) -> Mapping[str, Sequence[str]]:
        """Return the address of the archive on each mirror."""
        path = _path_of(dataset_id)
        return {path.rpartition("/")[2]: [f"{base}/{path}" for base in self.bases]}

    def require_readable(self, path: Path) -> None:
        """Read the first members; FormatError if none of them is an episode."""
        if not GenDgrlReader.recognises(path):
            raise FormatError("it is not an archive of episodes")


def _path_of(dataset_id: str) -> str:
    path = published().get(dataset_id)
    if path is None:
        raise not_found(dataset_id, list(published()), "gen_dgrl")
    return path
