"""Reads Open X-Embodiment's shards of pickled episodes, an episode at a time. Never imports datasets or torch."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.converter import PartsReader, refuse_damaged, require_trust
from ...core.format.files import no_match
from ...core.format.manifest import Dropped
from ...core.progress import counted
from ...core.ted.episodes import Final
from ...core.ted.schema import REWARD, Field, Key, Timing, encode_text, key_name, row_bytes, ted_fields
from ..files.archives import ArchiveMember, CutError
from ..files.columns import BLOCK_BYTES
from ..files.images import decode_image, require_images
from ..files.rlds_steps import IS_INIT, LastStep, LastSteps, require_rlds_last
from .episodes import Episode, EpisodeUnpickler, Step, load_episode, numbers
from .shards import (
    EpisodeArchives,
    dataset_name,
    has_episodes,
    missing_shards,
    pieces_of,
    require_one_dataset,
    shards_at,
)
from .survey import Column, EpisodeSurvey, FoundEpisode, SurveyPool, keys_of


def read_rows(
    episode: Episode,
    columns: Sequence[Column],
    fields: Mapping[Key, Field],
    span: tuple[int, int],
    carried: Mapping[Key, Array] | None = None,
) -> dict[Key, Array]:
    """Read the rows of `span` of these columns, by the keys of their fields; those in `carried` are the first of them.

    Raises FormatError for values that a field does not hold, CorruptDataError for images that are damaged.
    """
    start, stop = span
    keys = [key for column in columns for key in keys_of(column)]
    held = {key: np.empty((stop - start, *fields[key].shape), fields[key].numpy) for key in keys}
    at = 0
    for key, array in (carried or {}).items():
        at = len(array)
        held[key][:at] = array
    for steps in episode.steps(start + at, stop):
        _fill(episode, steps, columns, held, at)
        at += len(steps)
    return held


def _fill(
    episode: Episode, steps: Sequence[Step], columns: Sequence[Column], held: Mapping[Key, Array], at: int
) -> None:
    """Put the values of some steps into the rows from `at` on."""
    forms = {column.path: column.form for column in columns}
    for path in forms:
        if any(path not in step for step in steps):
            raise FormatError(f"{episode.what}: {key_name(path)} is not in every step")
    values = episode.columns(steps, forms)
    rows = slice(at, at + len(steps))
    for column in columns:
        found, keys, what = values[column.path], keys_of(column), f"{episode.what}: {column.name}"
        target = held[keys[0]][rows]
        if column.image is not None:
            for number, data in enumerate(found):
                target[number] = decode_image(data, column.image, what)
        elif column.form.kind == "text":
            if max(map(len, found)) > column.width:
                raise FormatError(f"{what} is longer than any text before")
            target[...], held[keys[1]][rows] = encode_text(found, column.width)
        else:
            target[...] = numbers(found, column.dtype, column.shape, what).reshape(target.shape)


PIECE_BYTES = BLOCK_BYTES
"""TED bytes of the rows in memory at a time."""
_MOST_DAMAGED = 1000
_MOST_ROWS = 512
_OUTCOME_ROWS = 1 << 12


@dataclass(frozen=True, slots=True)
class ShardSurvey:
    """What a pass over all shards found.

    `headers` are the archives and the positions in them at which episodes begin. `damaged` are the episodes that cannot
    be read, `problems` what is missing: shards, or the end of one.
    """

    fields: tuple[tuple[Field, Timing], ...]
    columns: tuple[Column, ...]
    episodes: Mapping[int, FoundEpisode]
    damaged: Mapping[int, RbtoolError]
    problems: tuple[RbtoolError, ...]
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]
    last: LastStep
    last_steps: LastSteps
    headers: tuple[tuple[int, int], ...]

    def is_observed(self, one: FoundEpisode) -> bool:
        """Whether the last step of an episode is the observation after it."""
        return self.last.observed(is_last=one.is_last)

    def steps_of(self, one: FoundEpisode) -> int:
        """Return how many steps of an episode are more than an observation."""
        return max(0, one.length - self.is_observed(one))


class OpenXReader(PartsReader):
    """A folder of shards, `NAME_00000.tar` and so on, or one of them: tar archives with a pickle for each episode.

    The pickle is a dictionary with the list `steps`, as `datasets` writes the examples of RLDS. `observation` and what
    else is in every step have a row before and after each step; `action` and names that begin so belong to a step,
    `reward` and `discount` come after it. Images are decoded to `[height, width, channels]`; text is stored as bytes
    and their number. Lists of Python's floats become float32 where that holds every value in them. Episodes are
    numbered in the order of the shards, and bear the name of their `file` and what `episode_metadata` has as text.

    Options: `trust_pickle` is needed: episodes are pickles. `rlds_last` states what the last step is, `images` whether
    images are decoded or left out (`skip`). `id`, the published dataset that the shards are.

    Raises UsageError without trust, FormatError for pickles of something else and for archives that hold more than
    files below a folder, CorruptDataError for damage. An episode that differs in form from the first, and a shard that
    is missing, are refused once they are asked for.
    """

    piece_bytes = PIECE_BYTES
    option_names = frozenset({"id", "images", "rlds_last", "trust_pickle"})
    settled_names = frozenset({"rlds_last"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether one of the first shards has a pickle with steps among its first members."""
        try:
            return has_episodes(shards_at(path))
        except (RbtoolError, OSError, ValueError, LookupError) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Find the shards."""
        self._found: ShardSurvey | None = None
        self._unpickler = EpisodeUnpickler()
        shards = shards_at(self.path)
        if not shards:
            raise FormatError(f"{self.path} has no tar archives")
        require_one_dataset(self.path, shards)
        self._choice = require_rlds_last(self.options.get("rlds_last"))
        self._images = require_images(self.options.get("images"), known=("decode", "skip")) == "decode"
        require_trust(self.path, self.options.get("trust_pickle"), "its episodes are pickles, which can run anything")
        self._shards = EpisodeArchives(shards)

    @property
    def _all(self) -> ShardSurvey:
        if self._found is None:
            self._found = self._look(lambda episodes: None)
        return self._found

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Read all shards, and look at every episode."""
        self._found = found = self._look(progress)
        kept = {number: one for number, one in found.episodes.items() if found.steps_of(one)}
        listed = sorted(kept.keys() | found.damaged.keys())
        lengths = [found.steps_of(kept[number]) if number in kept else 0 for number in listed]
        asked, lacking = self.options.get("id"), [one for one in kept.values() if not found.is_observed(one)]
        all_lack = len(lacking) == len(kept)
        return SourceFacts(
            source="openx",
            id=str(asked) if asked is not None else dataset_name(self.path, self._shards.all),
            fields=found.fields,
            episode_numbers=listed,
            steps=sum(lengths),
            renamed_keys=_renamed(found),
            dropped_keys=found.dropped,
            notes=found.notes,
            lengths=lengths,
            final_missing=bool(lacking),
            last_terminated=[number in kept and kept[number].is_terminal for number in listed] if all_lack else None,
        )

    def _look(self, progress: Callable[[int], None]) -> ShardSurvey:
        survey = EpisodeSurvey(images=self._images)
        episodes: dict[int, FoundEpisode] = {}
        damaged: dict[int, RbtoolError] = {}
        problems: list[RbtoolError] = [*missing_shards(self.path, self._shards.all)]
        headers: list[tuple[int, int]] = []
        number = 0
        with SurveyPool(self._shards.all, self.survey_workers, images=self._images, first=self._unpickler) as surveys:
            for place in range(len(self._shards.all)):
                try:
                    for member, look in surveys.looks(place):
                        headers.append((place, member.header))
                        try:
                            episodes[number] = survey.take(look(), place, member)
                        except CutError:
                            raise
                        except RbtoolError as error:
                            damaged[number] = error
                            if len(damaged) > _MOST_DAMAGED:
                                raise
                        number += 1
                        progress(1)
                except (CutError, CorruptDataError) as error:
                    if len(damaged) > _MOST_DAMAGED:
                        raise
                    problems.append(error)
        fields, dropped = survey.fields()
        last = survey.last.decide(self._choice)
        if not survey.columns:
            raise next(iter([*problems, *damaged.values()]), FormatError(f"{self.path} has no steps"))
        notes = [
            last.note,
            *self._notes(survey, episodes, surveys.skipped),
            *(f"left out: {one.message}" for one in problems),
        ]
        return ShardSurvey(
            fields,
            tuple(survey.columns.values()),
            episodes,
            damaged,
            tuple(problems),
            dropped,
            tuple(notes),
            last,
            survey.last,
            tuple(headers),
        )

    def _notes(self, survey: EpisodeSurvey, episodes: Mapping[int, FoundEpisode], skipped: int) -> Iterator[str]:
        empty = sum(not one.length for one in episodes.values())
        if empty:
            yield f"{empty:,} episode{'s' if empty > 1 else ''} without steps left out"
        if skipped:
            yield f"{skipped:,} file{'s' if skipped > 1 else ''} in the archives that are no episodes"
        if survey.unstarted:
            yield f"is_first is not set in the first step of {survey.unstarted:,} of {len(episodes):,} episodes"
        open_ended = sum(one.length > 0 and not one.is_last for one in episodes.values())
        if open_ended:
            does, be = ("does", "is") if open_ended == 1 else ("do", "are")
            yield f"{counted(open_ended, 'episode')} {does} not end with is_last, and {be} incomplete"
        doubles = [one.name for one in survey.columns.values() if one.form.python and one.dtype == "float64"]
        if doubles:
            yield f"float64, since float32 does not hold all values: {', '.join(doubles)}"

    def _load(self, place: int, member: ArchiveMember) -> Episode:
        return load_episode(self._unpickler, self._shards.archive(place), member)

    def survey_state(self) -> ShardSurvey:
        """Return what the shards hold."""
        return self._all

    def take_survey(self, state: ShardSurvey) -> None:
        """Take over what the shards hold."""
        self._found = state

    def shard_starts(self) -> list[int]:
        """The first episodes of the parts of archives that a stream reads."""
        sizes = [shard.path.stat().st_size for shard in self._shards.all]
        parts = [(place, start) for place, size in enumerate(sizes) for start, _ in pieces_of(size)]
        return [bisect.bisect_left(self._all.headers, part) for part in parts]

    def evidence(self) -> Mapping[str, int]:
        """What is counted of last steps."""
        return asdict(self._all.last_steps)

    @classmethod
    def settled(cls, evidence: Mapping[str, int]) -> tuple[dict[str, str], bool]:
        """What last steps are; it is sure unless all look like fillers, and that may be chance."""
        counted = LastSteps(**evidence)
        found = counted.decide("auto")
        return {"rlds_last": found.choice}, found.is_observation or counted.end_fillers < counted.ends

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise what is wrong with the first of these episodes that cannot be read, or with the shards."""
        found = self._all
        refuse_damaged(numbers, found.damaged)
        if everything and found.problems:
            raise found.problems[0]

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        found = self._all
        rows = max(1, min(_MOST_ROWS, self.piece_bytes // max(1, row_bytes(ted_fields(found.fields)))))
        yield from self._pieces(number, rows, found.columns)

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode."""
        rewards = [column for column in self._all.columns if column.path == REWARD]
        yield from self._pieces(number, _OUTCOME_ROWS, rewards)

    def _pieces(self, number: int, rows: int, columns: Sequence[Column]) -> Iterator[Piece]:
        found = self._all
        one = found.episodes[number]
        timings = {field.key: timing for field, timing in found.fields}
        fields = {field.key: field for field, _ in found.fields}
        length, is_observed = found.steps_of(one), found.is_observed(one)
        episode = self._load(one.shard, one.member)
        if episode.length != one.length:
            raise CorruptDataError(f"{episode.what} has changed while it was read")
        carried: dict[Key, Array] = {}
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            last = stop == length
            with self._unpickler.explained(episode.what):
                held = read_rows(episode, columns, fields, (start, min(stop + 1, one.length)), carried)
            carried = {} if last else {key: array[-1:] for key, array in held.items()}
            flags = np.zeros((2, stop - start), bool)
            flags[:, -1] = last and one.is_terminal, last and one.is_last and not one.is_terminal
            cut = {key: array if timings[key] == "state" else array[: stop - start] for key, array in held.items()}
            if len(columns) == len(found.columns):
                cut[IS_INIT] = np.zeros((stop - start, 1), bool)
                cut[IS_INIT][0] = not start
            yield Piece(
                number, cut, flags[0], flags[1], first=not start, last=last, text={} if start else one.text,
                final=Final.OBSERVED if is_observed or not last else Final.MISSING,
            )  # fmt: skip

    def files(self) -> list[Path]:
        """The shards."""
        return [shard.path for shard in self._shards.all]

    def on_close(self) -> None:
        """Close the archives, and end the process that unpickles."""
        if hasattr(self, "_shards"):
            self._shards.close()
        self._unpickler.close()


def _renamed(found: ShardSurvey) -> dict[str, str]:
    timings = {field.key: timing for field, timing in found.fields}
    made = {}
    for column in found.columns:
        key = keys_of(column)[0]
        name = key_name(key) if timings[key] != "result" else f"next.{key_name(key)}"
        if name != column.name:
            made[column.name] = name
    return {**made, "is_first": "is_init", "is_last": "next.done", "is_terminal": "next.terminated"}
