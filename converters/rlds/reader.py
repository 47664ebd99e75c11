"""Reads RLDS datasets that TensorFlow Datasets prepared. Never imports TensorFlow.

A first pass over all records finds where episodes are, how they end, and what their columns have in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.converter import Reader, refuse_damaged
from ...core.format.files import LEAVES_OUT, no_match, read_regular
from ...core.format.manifest import Dropped
from ...core.ted.episodes import Final
from ...core.ted.schema import Field, Key, Timing, row_bytes, ted_fields
from ..files.columns import BLOCK_BYTES
from ..files.images import require_images, require_jpeg
from ..files.rlds_steps import (
    IS_FIRST,
    IS_INIT,
    IS_LAST,
    IS_TERMINAL,
    LastStep,
    LastSteps,
    fillers,
    require_rlds_last,
)
from .columns import OWN, EpisodeRecord, MetadataTexts, StepColumn, columns_of_steps, source_name, stored_seed
from .example import ExampleParser
from .features import Features, Leaf, load_features
from .shards import AGAIN, TRUNCATED, RecordPlace, RecordShard, ShardFile, VersionLayout, layout_at, looks_like_rlds

_SHOWN = 8
_MOST_DAMAGED = 100_000


class RldsEpisode(NamedTuple):
    """A record: its shard and place, how many steps it has, and the flags of the last one.

    `inside` are the steps before it that are terminal.
    """

    shard: int
    place: RecordPlace
    steps: int
    is_last: bool
    is_terminal: bool
    inside: int


@dataclass(slots=True)
class RldsSurvey:
    """What the pass found: `episodes` by number, and the errors of those in `damaged`.

    `problems` are about whole shards: records that are missing or cannot be found.
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
    """Look at every record of all splits, or of one; `images` states whether images are kept.

    Records are numbered in the order of the splits and of their shards, in which each has the place that
    `dataset_info.json` states, whether its shard is there or not.
    """
    found = RldsSurvey()
    skipped = {TRUNCATED} if layout.is_export else set()
    steps = [leaf for leaf in features.steps if leaf.name not in skipped]
    found.columns, found.dropped, found.renamed = columns_of_steps(steps, images=images)
    found.texts = MetadataTexts.of([leaf for leaf in features.episode if not layout.is_export or leaf.name not in OWN])
    found.dropped += found.texts.dropped
    looking = _Looking(found, features, parser, progress)
    first = 0
    for index, shard in enumerate(layout.shards):
        count = looking.examine(index, shard, first) if split in (None, shard.split) else _size_of(shard)
        start = found.ranges.get(shard.split, (first, first))[0]
        found.ranges[shard.split] = start, first + count
        first += count
    for column in found.columns:
        if column.leaf.size < 0 and column.kind == "image" and column.found is None:
            column.why = column.why or "its shape is not stated, and there are no images"
    found.dropped += [Dropped(source_name(one.leaf), one.why) for one in found.columns if one.why]
    found.columns = [one for one in found.columns if not one.why]
    found.dropped += [Dropped(name, why) for name, why in sorted(found.texts.too_long.items())]
    return found


def _size_of(shard: ShardFile) -> int:
    """How many records a shard has that is not read."""
    if shard.stated is not None:
        return shard.stated
    if not shard.path.is_file():
        return 0
    with shard.open() as opened:
        return opened.count()


class _Looking:
    """Looks into one shard after the other."""

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
        """Look at all records of a shard, the first of which is episode `first`; return how many have a number."""
        found, count = self._found, 0
        try:
            if not shard.path.is_file():
                stated = "" if shard.stated is None else f", which has {shard.stated:,} episodes"
                raise CorruptDataError(f"{shard.path} is missing{stated}", hint=f"fetch it{LEAVES_OUT}")
            with shard.open() as opened:
                for place, data in opened.records():
                    if shard.stated is not None and count == shard.stated:
                        raise FormatError(f"{shard.path} has more than the {count:,} records that are stated of it")
                    self._take(index, shard, first + count, place, data)
                    self._progress(1)
                    count += 1
            if shard.stated is not None and count < shard.stated:
                raise CorruptDataError(
                    f"{shard.path} has {count:,} records, and {shard.stated:,} are stated of it", hint=AGAIN
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
            for column in found.columns:  # no column is widened or left out for an episode that is
                column.look(record)
            found.invalid += [number] if invalid else []
            self._count(episode, filler)
            found.episodes[number] = episode
        except FormatError as error:
            found.damaged[number] = error
            if len(found.damaged) > _MOST_DAMAGED:
                raise

    def _flags(self, index: int, place: RecordPlace, record: EpisodeRecord) -> RldsEpisode:
        """Return where the episode ends; FormatError for flags that mark several episodes in one record."""
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
    """Sentences on splits, on episodes without steps or an end, and on what is left out of a damaged dataset."""
    if len(layout.splits) > 1:
        parts = ", ".join(
            f"{name} has episodes {start:,}..{stop - 1:,}" if stop > start else f"{name} has none"
            for name in layout.splits[:_SHOWN]
            for start, stop in (found.ranges.get(name, (0, 0)),)
        ) + (", …" if len(layout.splits) > _SHOWN else "")
        yield f"{len(layout.splits)} splits: {parts} (--filter-key reads one of them)"
    counts = found.counts
    if counts["empty"]:
        yield f"{counts['empty']:,} episode{'s' if counts['empty'] > 1 else ''} without steps left out"
    if counts["unmarked"]:
        which = "1 episode does" if counts["unmarked"] == 1 else f"{counts['unmarked']:,} episodes do"
        yield f"{which} not end with is_last, and {'is' if counts['unmarked'] == 1 else 'are'} incomplete"
    if counts["terminal"]:
        yield f"is_terminal is set in {counts['terminal']:,} steps inside episodes, and stays a flag there"
    if found.invalid:
        names = ", ".join(map(str, found.invalid[:_SHOWN])) + (", …" if len(found.invalid) > _SHOWN else "")
        which = "1 episode is" if len(found.invalid) == 1 else f"{len(found.invalid):,} episodes are"
        yield f"{which} marked as invalid by the recorder, and kept: {names}"
    for problem in found.problems[:_SHOWN]:
        yield f"left out: {problem.message}"
    if len(found.problems) > _SHOWN:
        yield f"left out: {len(found.problems) - _SHOWN:,} more shards"


PIECE_BYTES = BLOCK_BYTES
"""TED bytes of the rows in memory at a time."""
COMPILED_BYTES = 512 << 20
"""Bytes of the shards from which on records are parsed by compiled loops, which take 0.4 s to import."""
_OUTCOME_ROWS = 1 << 20


class RldsReader(Reader):
    """The folder of a version of a dataset, or a folder around it: shards of records, each an episode.

    What is under `steps/observation`, and features of steps with other names, is there before and after a step;
    `action` belongs to it, `reward` and `discount` come after it. `is_first` becomes `is_init`, and `is_last` and
    `is_terminal` the flags under `next`.
    Features of episodes are their texts. Episodes are numbered from 0 in the order of the splits and their shards.

    Options: `rlds_last` states whether the last step of episodes is an observation only (`observation`), a `step`, or
    either (`auto`); `filter_key` is the split to read; `images` may be `skip`, and `jpeg` `fast`.

    Raises FormatError for other datasets of TensorFlow Datasets, CorruptDataError for damaged files. A damaged episode
    is refused once it is asked for.
    """

    piece_bytes = PIECE_BYTES
    option_names = frozenset({"rlds_last", "filter_key", "images", "jpeg"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether it is a folder with `features.json` or `dataset_info.json`, and shards."""
        try:
            return looks_like_rlds(path)
        except OSError as error:
            return no_match(error)

    def on_open(self) -> None:
        """Read the documents."""
        self._opened: tuple[int, RecordShard] | None = None
        self._found: RldsSurvey | None = None
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

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Look at all records."""
        if self._found is None:
            self._found = survey(
                self._layout, self._features, self._parser, self._split, progress, images=self._images == "decode"
            )
        found = self._found
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
            yield f"{alone:,} episode{'s' if alone > 1 else ''} of an observation and no step left out"

    @cached_property
    def _piece_rows(self) -> int:
        return max(1, self.piece_bytes // row_bytes(ted_fields(self._fields)))

    @property
    def _fields(self) -> tuple[tuple[Field, Timing], ...]:
        fields = [(field, column.timing) for column in self._all.columns for field in column.fields()]
        return (*fields, (Field(IS_INIT, "bool", (1,), "info"), "step"))

    @property
    def _all(self) -> RldsSurvey:
        if self._found is None:
            raise FormatError(f"{self.path} was not looked over")
        return self._found

    @cached_property
    def _decision(self) -> LastStep:
        if self._choice == "auto" and self._layout.is_export:
            return LastStep(True, False, "the last step of every episode is an observation only: rbtool wrote it so")
        return self._all.last_steps.decide(self._choice)

    def _is_observed(self, one: RldsEpisode) -> bool:
        return self._decision.observed(is_last=one.is_last)

    def _rows(self, one: RldsEpisode) -> int:
        return max(0, one.steps - self._is_observed(one))

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise what is wrong with the first of these episodes that cannot be read, or with a shard."""
        found = self._all
        if everything and found.problems:
            raise found.problems[0]
        refuse_damaged(numbers, found.damaged)

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time; its record is in memory."""
        columns = [replace(column, jpeg=self._jpeg) for column in self._all.columns]
        for piece in self._pieces(number, columns, self._piece_rows):
            begins = np.zeros((len(piece), 1), bool)
            begins[0] = piece.first
            yield replace(piece, columns={**piece.columns, IS_INIT: begins})

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode."""
        yield from self._pieces(number, [one for one in self._all.columns if one.role == "reward"], _OUTCOME_ROWS)

    def _pieces(self, number: int, columns: Sequence[StepColumn], rows: int) -> Iterator[Piece]:
        one = self._all.episodes[number]
        what = f"episode {number} in {self._path_of(one).name}"
        record = EpisodeRecord(self._data(one), self._parser, self._leaves, what)
        observed, length = self._is_observed(one), self._rows(one)
        terminal, cut = record.flags(IS_TERMINAL), np.zeros(record.steps, bool)
        if self._layout.is_export:
            cut = record.flags(TRUNCATED)
        if observed:  # a step ends with the observation after it
            terminal, cut = terminal[1:], cut[1:]
        text = self._all.texts.read(record.example, record.what)
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
        """Parses the records; compiled loops do where the dataset is so large that importing them takes less time."""
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
        """The documents and the shards that are there."""
        return self._layout.files()

    def survey_state(self) -> RldsSurvey | None:
        """Return what was found in the records."""
        return self._found

    def take_survey(self, state: RldsSurvey) -> None:
        """Take over what was found in the records."""
        self._found = state

    def _close_shard(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    def on_close(self) -> None:
        """Close the shard that is open."""
        self._close_shard()
