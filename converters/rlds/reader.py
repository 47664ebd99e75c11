"""Reads RLDS datasets prepared by TensorFlow Datasets, without TensorFlow, and downloads Open X-Embodiment.

A first pass over all records finds the episodes, how they end, and the common form of their columns. Downloads come
from public buckets, over https.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...core.errors import (
    AuthorisationError,
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    RbtoolError,
    UsageError,
)
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.converter import (
    Advance,
    Ids,
    LocalCache,
    Note,
    RemoteDataset,
    RemoteFile,
    Source,
    refuse_damaged,
    safe_id,
)
from ...core.format.files import LEAVES_OUT, no_match, read_regular
from ...core.format.manifest import Dropped
from ...core.progress import counted, some_of
from ...core.remote.bucket import Bucket, BucketObject
from ...core.remote.fetch import fetch_files
from ...core.remote.transport import Transport
from ...core.ted.episodes import Final
from ...core.ted.schema import Field, Key, Timing
from ..files.images import require_images, require_jpeg
from ..files.readers import OUTCOME_ROWS, SurveyedReader
from ..files.rlds_steps import IS_FIRST, IS_INIT, IS_LAST, IS_TERMINAL, LastStep, LastSteps, fillers, require_rlds_last
from .columns import OWN, EpisodeRecord, MetadataTexts, StepColumn, columns_of_steps, source_name, stored_seed
from .example import ExampleParser
from .shards import (
    AGAIN,
    TRUNCATED,
    Features,
    Leaf,
    RecordPlace,
    RecordShard,
    ShardFile,
    VersionLayout,
    layout_at,
    load_features,
    looks_like_rlds,
)

_SHOWN = 8
_MOST_DAMAGED = 100_000


class RldsEpisode(NamedTuple):
    """A record: its shard and place, its number of steps, and the flags of the last step.

    `inside` counts the terminal steps before the last one.
    """

    shard: int
    place: RecordPlace
    steps: int
    is_last: bool
    is_terminal: bool
    inside: int


@dataclass(slots=True)
class RldsSurvey:
    """The result of the pass over all records.

    Attributes:
        columns: the columns of steps.
        texts: the texts of episodes.
        episodes: the sound episodes by number.
        damaged: the errors of the other episodes by number.
        problems: errors of whole shards, whose records are missing or cannot be found.
        dropped: features that are left out.
        renamed: keys that differ from the name of their feature.
        last_steps: counts that tell whether last steps are only observations.
        ranges: the numbers of the episodes of each split, half-open.
        counts: numbers of `empty` and `unmarked` episodes (without `is_last`), and of `terminal` steps inside.
        invalid: episodes that the recorder marked as invalid.
    """

    columns: list[StepColumn] = field(default_factory=list)
    texts: MetadataTexts = field(default_factory=MetadataTexts)
    episodes: dict[int, RldsEpisode] = field(default_factory=dict)
    damaged: dict[int, RbtoolError] = field(default_factory=dict)
    problems: list[RbtoolError] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    last_steps: LastSteps = field(default_factory=LastSteps)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    invalid: list[int] = field(default_factory=list)


def survey(
    layout: VersionLayout,
    features: Features,
    parser: ExampleParser,
    split: str | None,
    progress: Callable[[int], None],
    *,
    images: bool,
) -> RldsSurvey:
    """Read every record of all splits, or of one split; `images` states whether images are kept.

    Episodes are numbered through all splits and shards. The numbers follow from the lengths of shards in
    `dataset_info.json`, so that they do not change if a shard is missing.
    """
    found = RldsSurvey()
    skipped = {TRUNCATED} if layout.is_export else set()
    steps = [leaf for leaf in features.steps if leaf.name not in skipped]
    found.columns, found.dropped, found.renamed = columns_of_steps(steps, images=images)
    found.texts = MetadataTexts.of([leaf for leaf in features.episode if not layout.is_export or leaf.name not in OWN])
    found.dropped += found.texts.dropped
    over = _Pass(found, features, parser, progress)
    first = 0
    for index, shard in enumerate(layout.shards):
        count = over.examine(index, shard, first) if split in (None, shard.split) else _size_of(shard)
        start = found.ranges.get(shard.split, (first, first))[0]
        found.ranges[shard.split] = start, first + count
        first += count
    for column in found.columns:
        if column.leaf.size < 0 and column.kind == "image" and column.found is None:
            column.why = column.why or "its shape is not stated, and there is no image to take it from"
    found.dropped += [Dropped(source_name(one.leaf), one.why) for one in found.columns if one.why]
    found.columns = [one for one in found.columns if not one.why]
    found.dropped += [Dropped(name, why) for name, why in sorted(found.texts.too_long.items())]
    return found


def _size_of(shard: ShardFile) -> int:
    """Return the number of records of a shard that is not read."""
    if shard.stated is not None:
        return shard.stated
    if not shard.path.is_file():
        return 0
    with shard.open() as opened:
        return opened.count()


class _Pass:
    """The pass over all records, which fills an `RldsSurvey`."""

    def __init__(
        self, found: RldsSurvey, features: Features, parser: ExampleParser, progress: Callable[[int], None]
    ) -> None:
        self._found = found
        self._parser = parser
        self._progress = progress
        self._leaves = {leaf.name: leaf for leaf in features.steps}
        self._actions = [one for one in found.columns if one.role == "action" and one.kind in ("numbers", "encoded")]
        self._reward = next((one for one in found.columns if one.role == "reward"), None)

    def examine(self, index: int, shard: ShardFile, first: int) -> int:
        """Read all records of a shard, of which the first is episode `first`; return how many numbers they take."""
        found, count = self._found, 0
        try:
            if not shard.path.is_file():
                stated = "" if shard.stated is None else f", which has {shard.stated:,} episodes"
                raise CorruptDataError(f"{shard.path} is missing{stated}", hint=f"fetch it{LEAVES_OUT}")
            with shard.open() as opened:
                for place, data in opened.records():
                    if shard.stated is not None and count == shard.stated:
                        raise FormatError(f"{shard.path} has more than the {count:,} records in dataset_info.json")
                    self._take(index, shard, first + count, place, data)
                    self._progress(1)
                    count += 1
            if shard.stated is not None and count < shard.stated:
                raise CorruptDataError(
                    f"{shard.path} has {count:,} records, and {shard.stated:,} in dataset_info.json", hint=AGAIN
                )
        except FormatError as error:
            found.problems.append(error)
        return count if shard.stated is None else shard.stated

    def _take(
        self, index: int, shard: ShardFile, number: int, place: RecordPlace, data: bytes | CorruptDataError
    ) -> None:
        found = self._found
        try:
            if isinstance(data, CorruptDataError):
                raise data
            record = EpisodeRecord(data, self._parser, self._leaves, f"episode {number} in {shard.path.name}")
            for column in found.columns:
                column.require(record)
            episode, invalid = self._flags(index, place, record), found.texts.take(record.example, record.what)
            filler = self._fillers(record)
            for column in found.columns:  # only now: a damaged episode must not widen or drop a column
                column.look(record)
            found.invalid += [number] if invalid else []
            self._count(episode, filler)
            found.episodes[number] = episode
        except FormatError as error:
            found.damaged[number] = error
            if len(found.damaged) > _MOST_DAMAGED:
                raise

    def _flags(self, index: int, place: RecordPlace, record: EpisodeRecord) -> RldsEpisode:
        """Return the episode with its last flags; FormatError for flags that mark several episodes in one record."""
        steps = record.steps
        first, last, terminal = (record.flags(name) for name in (IS_FIRST, IS_LAST, IS_TERMINAL))
        for name, flags in ((IS_FIRST, first[1:]), (IS_LAST, last[:-1])):
            if flags.any():
                at = int(flags.argmax()) + (name == IS_FIRST)
                raise FormatError(f"{record.what}: {name} is set in step {at:,} of {steps:,}, expected one episode")
        inside = int(terminal[:-1].sum())
        return RldsEpisode(index, place, steps, bool(steps and last[-1]), bool(steps and terminal[-1]), inside)

    def _count(self, episode: RldsEpisode, filler: Array) -> None:
        counts = self._found.counts
        counts["terminal"] += episode.inside
        if not episode.steps:
            counts["empty"] += 1
        else:
            counts["unmarked"] += not episode.is_last
            if self._actions:
                self._found.last_steps.add(filler, is_last=episode.is_last)

    def _fillers(self, record: EpisodeRecord) -> Array:
        """Return which steps look like fillers, bool `[T]`."""
        steps = record.steps

        def rows(column: StepColumn) -> Array:
            return next(iter(column.read(record, 0, steps).values())).reshape(steps, -1)

        if not steps:
            return np.zeros(0, bool)
        return fillers(map(rows, self._actions), None if self._reward is None else rows(self._reward), steps)


def notes_of(found: RldsSurvey, layout: VersionLayout) -> Iterator[str]:
    """Yield notes on splits, on episodes without steps or an end, and on what is left out of a damaged dataset."""
    if len(layout.splits) > 1:
        parts = ", ".join(
            f"{name} has episodes {start:,}..{stop - 1:,}" if stop > start else f"{name} has none"
            for name in layout.splits[:_SHOWN]
            for start, stop in (found.ranges.get(name, (0, 0)),)
        ) + (", …" if len(layout.splits) > _SHOWN else "")
        yield f"{len(layout.splits)} splits: {parts} (--filter-key reads one of them)"
    counts = found.counts
    if counts["empty"]:
        yield f"{counted(counts['empty'], 'episode')} without steps left out"
    if counts["unmarked"]:
        yield f"{counted(counts['unmarked'], 'incomplete episode')} without is_last at the end"
    if counts["terminal"]:
        yield f"is_terminal is set in {counted(counts['terminal'], 'step')} inside episodes, and kept there as a flag"
    if found.invalid:
        names = some_of(found.invalid, _SHOWN)
        yield f"{counted(len(found.invalid), 'episode')} that the recorder marked as invalid, and kept: {names}"
    for problem in found.problems[:_SHOWN]:
        yield f"left out: {problem.message}"
    if len(found.problems) > _SHOWN:
        yield f"left out: {len(found.problems) - _SHOWN:,} more shards"


COMPILED_BYTES = 512 << 20
"""Size of the shards from which compiled loops parse records, as they take 0.4 s to import."""


class RldsReader(SurveyedReader[RldsSurvey]):
    """Reads the folder of a version of a dataset, or a folder around it; each record of its shards is an episode.

    `action` belongs to a step, `reward` and `discount` come after it; all other features, such as `steps/observation`,
    have a value before and after a step. `is_first` becomes `is_init`, and `is_last` and `is_terminal` become the flags
    under `next`. Features of episodes become their texts. Episodes are numbered from 0 through all splits and shards.

    Options:
        rlds_last: whether the last step of an episode is only an `observation`, or a `step` like the others, or a step
            unless it has `is_last` (`flagged`); `auto` decides by the values.
        filter_key: the split to read.
        images: `decode` or `skip`.
        jpeg: `exact` or `fast`.

    Raises:
        FormatError: the dataset of TensorFlow Datasets is not RLDS.
        CorruptDataError: a file is damaged; a damaged episode raises it only when it is read.
    """

    option_names = frozenset({"rlds_last", "filter_key", "images", "jpeg"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether `path` is a folder with `features.json` or `dataset_info.json`, and shards."""
        try:
            return looks_like_rlds(path)
        except OSError as error:
            return no_match(error)

    def on_open(self) -> None:
        """Parse the options, and read the documents."""
        self._opened: tuple[int, RecordShard] | None = None
        self._choice = require_rlds_last(self.options.get("rlds_last"))
        self._images = require_images(self.options.get("images"), known=("decode", "skip"))
        self._jpeg = require_jpeg(self.options.get("jpeg"))
        self._layout = layout_at(self.path)
        self._features = load_features(self._layout.folder)
        split = self.options.get("filter_key")
        self._split = None if split is None else self._layout.require_split(split)

    @property
    def folder(self) -> Path:
        """The folder of the version."""
        return self._layout.folder

    def look(self, progress: Callable[[int], None]) -> RldsSurvey:
        """Read all records."""
        return survey(
            self._layout, self._features, self._parser, self._split, progress, images=self._images == "decode"
        )

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts of the dataset."""
        found = self.looked_over(progress)
        sound = {number: one for number, one in found.episodes.items() if self._rows(one)}
        if not sound:
            raise next(iter((*found.problems, *found.damaged.values())), FormatError(f"{self.path} has no steps"))
        numbers = sorted((*sound, *found.damaged))
        observed = [self._is_observed(one) for one in sound.values()]
        return SourceFacts(
            source="rlds",
            id=self._layout.id,
            fields=self._fields,
            episode_numbers=numbers,
            steps=sum(map(self._rows, sound.values())),
            renamed_keys=found.renamed,
            dropped_keys=tuple(found.dropped),
            notes=tuple(self._notes(found)),
            documents={path.name: read_regular(path) for path in self._layout.documents()},
            lengths=[self._rows(sound[number]) if number in sound else 0 for number in numbers],
            final_missing=not all(observed),
            last_terminated=None
            if any(observed)
            else [number in sound and sound[number].is_terminal for number in numbers],
        )

    def _notes(self, found: RldsSurvey) -> Iterator[str]:
        yield self._decision.note
        yield from notes_of(found, self._layout)
        alone = sum(one.steps == 1 and not self._rows(one) for one in found.episodes.values())
        if alone:
            yield f"{counted(alone, 'episode')} with only an observation and no step left out"

    @property
    def _fields(self) -> tuple[tuple[Field, Timing], ...]:
        fields = [(field, column.timing) for column in self.found.columns for field in column.fields()]
        return (*fields, (Field(IS_INIT, "bool", (1,), "info"), "step"))

    @cached_property
    def _decision(self) -> LastStep:
        if self._choice == "auto" and self._layout.is_export:
            return LastStep(True, False, "the last step of every episode is only an observation, as rbtool writes it")
        return self.found.last_steps.decide(self._choice)

    def _is_observed(self, one: RldsEpisode) -> bool:
        return self._decision.observed(is_last=one.is_last)

    def _rows(self, one: RldsEpisode) -> int:
        return max(0, one.steps - self._is_observed(one))

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise the error of the first of these episodes that cannot be read, or with `everything` of a shard."""
        found = self.found
        if everything and found.problems:
            raise found.problems[0]
        refuse_damaged(numbers, found.damaged)

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time; the whole record is in memory."""
        columns = [replace(column, jpeg=self._jpeg) for column in self.found.columns]
        for piece in self._pieces(number, columns, self.piece_rows(self._fields)):
            begins = np.zeros((len(piece), 1), bool)
            begins[0] = piece.first
            yield replace(piece, columns={**piece.columns, IS_INIT: begins})

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode."""
        yield from self._pieces(number, [one for one in self.found.columns if one.role == "reward"], OUTCOME_ROWS)

    def _pieces(self, number: int, columns: Sequence[StepColumn], rows: int) -> Iterator[Piece]:
        one = self.found.episodes[number]
        what = f"episode {number} in {self._path_of(one).name}"
        record = EpisodeRecord(self._data(one), self._parser, self._leaves, what)
        observed, length = self._is_observed(one), self._rows(one)
        terminal, cut = record.flags(IS_TERMINAL), np.zeros(record.steps, bool)
        if self._layout.is_export:
            cut = record.flags(TRUNCATED)
        if observed:  # flags in RLDS belong to the observation, which comes after the step before
            terminal, cut = terminal[1:], cut[1:]
        text = self.found.texts.read(record.example, record.what)
        seed = stored_seed(record.example) if self._layout.is_export else None
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            last = stop == length
            found: dict[Key, Array] = {}
            for column in columns:
                more = column.timing == "state" and (not last or observed)
                found |= column.read(record, start, stop + more)
            terminated, truncated = terminal[start:stop], cut[start:stop].copy()
            if last:
                truncated[-1] |= one.is_last and not terminated[-1]
            yield Piece(
                number, found, terminated, truncated, first=not start, last=last,
                seed=None if start else seed, text={} if start else text,
                final=Final.OBSERVED if observed else Final.MISSING,
            )  # fmt: skip

    @cached_property
    def _parser(self) -> ExampleParser:
        """The parser of records; with compiled loops for a dataset so large that their import pays off."""
        return ExampleParser(is_compiled=self._layout.stored_bytes() >= COMPILED_BYTES)

    @cached_property
    def _leaves(self) -> dict[str, Leaf]:
        return {leaf.name: leaf for leaf in self._features.steps}

    def _path_of(self, one: RldsEpisode) -> Path:
        return self._layout.shards[one.shard].path

    def _data(self, one: RldsEpisode) -> bytes:
        """Read a record; the shard that was read last stays open."""
        if self._opened is None or self._opened[0] != one.shard:
            self._close_shard()
            self._opened = one.shard, self._layout.shards[one.shard].open()
        return self._opened[1].read(one.place)

    def files(self) -> list[Path]:
        """The existing documents and shards."""
        return self._layout.files()

    def _close_shard(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    def on_close(self) -> None:
        """Close the shard that is open."""
        self._close_shard()


_VARIABLE = "RLDS_REMOTE"
_DEFAULTS = "gs://gresearch/robotics gs://gdm-robotics-open-x-embodiment"
_ADDRESS = re.compile(r"gs://(?P<bucket>[\w.-]+)(?:/(?P<prefix>[\w./-]*))?", re.ASCII)
_FEATURES = "features.json"


class BucketFolder(NamedTuple):
    """A folder in a bucket that contains datasets."""

    bucket: Bucket
    prefix: str

    @property
    def address(self) -> str:
        """The address of the folder, for messages."""
        return f"gs://{self.bucket.name}/{self.prefix}".rstrip("/")


class RldsSource(Source):
    """The RLDS datasets in the buckets of Open X-Embodiment.

    `RLDS_REMOTE` replaces the buckets by others, `gs://BUCKET/FOLDER`, separated by spaces. An id is the path of a
    version below such a folder, like `bridge/0.1.0`: a folder with `features.json`, in the first bucket that has it.
    Sizes and checksums come from the bucket. `--local` uses datasets in the folder of TensorFlow Datasets.
    """

    name = "rlds"
    local_cache = LocalCache("rlds", "TFDS_DATA_DIR", "~/tensorflow_datasets")

    @property
    def remote(self) -> str:
        """The addresses of the buckets, separated by spaces."""
        return os.environ.get(_VARIABLE) or _DEFAULTS

    @cached_property
    def _folders(self) -> list[BucketFolder]:
        found = []
        for address in self.remote.split():
            match = _ADDRESS.fullmatch(address)
            if match is None:
                raise UsageError(f"{_VARIABLE} is {address!r}, expected gs://BUCKET or gs://BUCKET/FOLDER")
            prefix = (match["prefix"] or "").strip("/")
            found.append(BucketFolder(Bucket(match["bucket"]), f"{prefix}/" if prefix else ""))
        return found

    def list_ids(self) -> Ids:
        """List the versions of all datasets, with one request for about every 1,000 files."""
        found: set[str] = set()
        closed: list[RbtoolError] = []
        for folder in self._folders:
            names = (one.name.removeprefix(folder.prefix) for one in _objects(folder, folder.prefix, closed))
            found |= {name.removesuffix(f"/{_FEATURES}") for name in names if name.endswith(f"/{_FEATURES}")}
        if not found:
            raise next(iter(closed), DatasetNotFoundError(f"{self.remote} has no datasets"))
        return Ids(tuple(sorted(found)), tuple(one.message for one in closed), unreachable=bool(closed))

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """List the files of a version in the first bucket that has it."""
        if revision is not None:
            raise UsageError(f"{self.remote} keeps no revisions", hint="leave out --revision")
        closed: list[RbtoolError] = []
        for folder in self._folders:
            prefix = f"{folder.prefix}{safe_id(dataset_id)}/"
            files = _files(_objects(folder, prefix, closed), prefix)
            if any(file.path == _FEATURES for file in files):
                return RemoteDataset(dataset_id, f"{folder.address}/{dataset_id}", None, files)
        said = f"{self.remote} has no dataset {dataset_id!r}: no folder of that name has a {_FEATURES}"
        raise next(iter(closed), DatasetNotFoundError(said))

    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Download files, all of one bucket, to `folder`."""
        transport: Transport = self._folders[0].bucket
        for one in self._folders:
            if files and files[0].addresses[0].startswith(f"gs://{one.bucket.name}/"):
                transport = one.bucket
        fetch_files(files, folder, transport, progress=progress, note=note)

    def on_close(self) -> None:
        """Close the connections, if there are any."""
        for folder in self.__dict__.get("_folders", ()):
            folder.bucket.close()


def _objects(folder: BucketFolder, prefix: str, closed: list[RbtoolError]) -> list[BucketObject]:
    """List objects; for a bucket without access or that does not exist, add the error to `closed` and list none."""
    try:
        return folder.bucket.objects(prefix)
    except (AuthorisationError, DatasetNotFoundError) as error:
        closed.append(error)
        return []


def _files(objects: Sequence[BucketObject], prefix: str) -> tuple[RemoteFile, ...]:
    """Return the visible files directly in a folder."""
    found = [
        RemoteFile(one.name.removeprefix(prefix), one.size, one.checksum, (one.address,))
        for one in objects
        if not one.name.removeprefix(prefix).startswith(".") and "/" not in one.name.removeprefix(prefix)
    ]
    return tuple(sorted(found, key=lambda file: file.path))
