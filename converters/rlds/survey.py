"""The pass over all records of a dataset: where episodes are, how they end, and what their columns have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format.contracts import Array
from ...core.format.manifest import Dropped
from ...core.format.read_errors import LEAVES_OUT
from ...core.ted.schema import NEXT, NEXT_DONE, NEXT_TERMINATED, key_name
from ..files.rlds_steps import IS_FIRST, IS_INIT, IS_LAST, IS_TERMINAL, LastSteps, fillers, step_meaning
from .columns import EpisodeRecord, StepColumn, without_clashes
from .example import ExampleParser
from .features import STEPS, Features, Leaf
from .layout import TRUNCATED, ShardFile, VersionLayout
from .metadata import OWN, MetadataTexts
from .records import AGAIN, RecordPlace

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
        count = looking.look_into(index, shard, first) if split in (None, shard.split) else _size_of(shard)
        start = found.ranges.get(shard.split, (first, first))[0]
        found.ranges[shard.split] = start, first + count
        first += count
    for column in found.columns:
        if column.leaf.size < 0 and column.kind == "image" and column.found is None:
            column.why = column.why or "its shape is not stated, and there are no images"
    found.dropped += [Dropped(_source_name(one.leaf), one.why) for one in found.columns if one.why]
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

    def look_into(self, index: int, shard: ShardFile, first: int) -> int:
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


def columns_of_steps(
    leaves: Sequence[Leaf], *, images: bool = True
) -> tuple[list[StepColumn], list[Dropped], dict[str, str]]:
    """Return the columns, the features that cannot be one, and the names of those that have another name in TED."""
    columns: list[StepColumn] = []
    dropped: list[Dropped] = []
    for leaf in leaves:
        meaning = step_meaning(leaf.path)
        if meaning is None:
            continue
        key, role, timing = meaning
        why = leaf.why or ("--images skip leaves it out" if leaf.kind == "image" and not images else "")
        if role == "reward" and (leaf.kind != "numbers" or leaf.nested or leaf.size != 1):
            why = why or "a reward is one number a step"
        if why:
            dropped.append(Dropped(_source_name(leaf), why))
        else:
            columns.append(StepColumn(leaf, key, role, timing))
    without_clashes(columns)
    names = {
        ".".join(one.leaf.path): key_name((NEXT, *one.key) if one.timing == "result" else one.key) for one in columns
    }
    renamed = {name: key for name, key in names.items() if name != key}
    flags = {IS_FIRST: key_name(IS_INIT), IS_LAST: key_name(NEXT_DONE), IS_TERMINAL: key_name(NEXT_TERMINATED)}
    return columns, dropped, renamed | flags


def _source_name(leaf: Leaf) -> str:
    return f"{STEPS}/{leaf.name}"


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
