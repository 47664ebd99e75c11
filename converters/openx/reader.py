"""Reads Open X-Embodiment's shards of pickled episodes, one episode at a time. Never imports datasets or torch.

A first pass over all episodes finds their places, how they end, the forms of their leaves, and their errors. It
examines several episodes in parallel, each in a confined process; the results are used in order.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError, SchemaError
from ...core.format.contracts import Array, Closing, Piece, SourceFacts
from ...core.format.converter import PartsReader, refuse_damaged, require_trust
from ...core.format.files import no_match
from ...core.format.manifest import Dropped
from ...core.progress import counted
from ...core.ted.episodes import Final
from ...core.ted.schema import (
    ACTION,
    DTYPES,
    LONGEST_ROW,
    REWARD,
    Field,
    Key,
    Role,
    Timing,
    dtype_name,
    encode_text,
    key_name,
    length_key,
    text_fields,
)
from ..files.archives import ArchiveMember, CutError
from ..files.images import ImageForm, decode_image, require_images
from ..files.pickles import PickledArray, PickledBytes, Value
from ..files.readers import SurveyedReader
from ..files.rlds_steps import (
    IS_FIRST,
    IS_INIT,
    IS_LAST,
    IS_TERMINAL,
    STEP_FLAGS,
    LastStep,
    LastSteps,
    fillers,
    require_rlds_last,
    step_meaning,
)
from .shards import (
    RAGGED,
    Episode,
    EpisodeArchive,
    EpisodeArchives,
    EpisodeUnpickler,
    LeafForm,
    LeafPath,
    Step,
    dataset_name,
    has_episodes,
    is_episode,
    is_single_precision,
    joined_form,
    load_episode,
    missing_shards,
    numbers,
    pieces_of,
    require_one_dataset,
    shards_at,
)

_STEPS = "steps."


@dataclass(frozen=True, slots=True)
class FoundEpisode:
    """An episode of `length` steps in a member of the archive with index `shard`, and the flags of its last step."""

    shard: int
    member: ArchiveMember
    length: int
    is_last: bool
    is_terminal: bool
    text: Mapping[str, str]


@dataclass(slots=True)
class Column:
    """A leaf of all steps.

    `single` states that float32 can hold all values; `width` is the length of the longest text in bytes.
    """

    path: LeafPath
    form: LeafForm
    image: ImageForm | None = None
    single: bool = True
    width: int = 1

    @property
    def name(self) -> str:
        """The path with dots."""
        return key_name(self.path)

    @property
    def dtype(self) -> str:
        """The element type of the field; numbers of Python, always float64, become float32 if it can hold them."""
        if self.image is not None:
            return self.image.dtype
        return "float32" if self.form.python and self.form.dtype == "float64" and self.single else self.form.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.form.shape if self.image is None else self.image.shape


@dataclass(slots=True)
class Look:
    """The result of examining one episode.

    Attributes:
        what: the name of the episode in messages.
        length: the number of steps.
        text: the texts of the episode, from entries beside the steps.
        others: entries beside the steps that are left out, with the reason.
        forms: the forms of leaves.
        images: the forms of the images in the first step.
        doubles: leaves with numbers of Python that float32 cannot hold.
        widths: lengths of the longest texts in bytes.
        filler: which steps look like fillers, bool `[length]`.
        is_started: whether `is_first` is set in the first step, or there is no such flag.
        is_last: the flag of the last step.
        is_terminal: the flag of the last step.
    """

    what: str
    length: int
    text: Mapping[str, str]
    others: Mapping[str, str]
    forms: dict[LeafPath, LeafForm] = field(default_factory=dict)
    images: dict[LeafPath, ImageForm] = field(default_factory=dict)
    doubles: set[LeafPath] = field(default_factory=set)
    widths: dict[LeafPath, int] = field(default_factory=dict)
    filler: Array = field(default_factory=lambda: np.zeros(0, bool))
    is_started: bool = True
    is_last: bool = False
    is_terminal: bool = False


def examine(episode: Episode, member: ArchiveMember, *, images: bool) -> Look:
    """Examine an episode without decoding its images or reading all arrays; FormatError for contradictions in it."""
    text, others = _text(episode, member)
    look = Look(episode.what, episode.length, text, others)
    flags: dict[str, list[bool]] = {}
    filler: list[Array] = []
    for steps in episode.steps(0, episode.length):
        forms = episode.forms(steps)
        if not look.forms:
            look.forms = forms
            paths = [path for path, form in forms.items() if form.kind == "image"] if images else []
            look.images = {
                path: episode.image_form(steps[0][path], f"{episode.what}: {key_name(path)}") for path in paths
            }
        else:
            look.forms = {path: _across(look.forms.get(path), forms.get(path)) for path in look.forms | forms}
        _read_values(episode, steps, look, flags, filler)
    if filler:
        look.filler = np.concatenate(filler)
        look.is_last, look.is_terminal = _ends(flags, episode.what)
        look.is_started = IS_FIRST not in flags or flags[IS_FIRST][0]
    return look


def _text(episode: Episode, member: ArchiveMember) -> tuple[dict[str, str], dict[str, str]]:
    """Return the entries beside the steps that are a text or a number, and the reasons why others are left out."""
    found, others = {"file": member.name.rpartition("/")[2]}, {}
    for name, value in _flat(episode.others):
        plain: Any = value
        if isinstance(value, PickledBytes) or (isinstance(value, PickledArray) and not value.shape):
            [plain] = episode.fetched([value])
            plain = plain.item() if isinstance(plain, np.ndarray) else plain
        if isinstance(plain, bytes):
            plain = plain.decode("utf-8", "backslashreplace")
        if isinstance(plain, str | int | float):
            found[name.removeprefix("episode_metadata.")] = str(plain)
        elif value is not None and value != {}:
            others[name] = "an entry beside the steps that is neither text nor a number"
    return found, others


def _read_values(
    episode: Episode, steps: list[Step], look: Look, flags: dict[str, list[bool]], filler: list[Array]
) -> None:
    """Read the leaves of some steps that need examining; update `look`, and append to `flags` and `filler`."""
    asked = {path: form for path, form in look.forms.items() if _needs_values(path, form)}
    found = episode.columns(steps, asked)
    actions, rewards = [], None
    for path, form in asked.items():
        what = f"{episode.what}: {key_name(path)}"
        if form.kind == "text":
            look.widths[path] = max(look.widths.get(path, 1), *map(len, found[path]))
            if look.widths[path] > LONGEST_ROW:
                raise FormatError(f"{what} is text of more than {LONGEST_ROW:,} bytes")
            continue
        rows = numbers(found[path], form.dtype, form.shape, what)
        if form.python and rows.dtype == np.float64 and not is_single_precision(rows):
            look.doubles.add(path)
        if len(path) == 1 and path[0] in STEP_FLAGS:
            flags.setdefault(path[0], []).extend(_flag(rows, what))
        elif path[0] == ACTION[0]:
            actions.append(rows)
        elif path == REWARD:
            rewards = rows
    filler.append(fillers(actions, rewards, len(steps)))


class EpisodeSurvey:
    """Collects what was found in the episodes; the first readable one determines the form of all."""

    def __init__(self, *, images: bool) -> None:
        self._with_images = images
        self.columns: dict[LeafPath, Column] = {}
        self.dropped: dict[LeafPath, str] = {}
        self.others: dict[str, str] = {}
        self.last = LastSteps()
        self.unstarted = 0

    def look_at(self, episode: Episode, shard: int, member: ArchiveMember) -> FoundEpisode:
        """Examine an episode and add it; FormatError for one whose form differs from the first."""
        return self.take(examine(episode, member, images=self._with_images), shard, member)

    def take(self, look: Look, shard: int, member: ArchiveMember) -> FoundEpisode:
        """Add an examined episode; episodes come in order. FormatError for one whose form differs from the first."""
        self.others |= look.others
        if not look.length:
            return FoundEpisode(shard, member, 0, False, False, look.text)
        if self.columns:
            self._require_alike(look)
        else:
            self._take_first(look)
        for path, form in look.forms.items():
            if path in self.columns:
                column = self.columns[path]
                column.form = joined_form(column.form, form) or column.form
                column.single &= path not in look.doubles
                column.width = max(column.width, look.widths.get(path, 1))
        self.last.add(look.filler, is_last=look.is_last)
        self.unstarted += not look.is_started
        return FoundEpisode(shard, member, look.length, look.is_last, look.is_terminal, look.text)

    def _take_first(self, look: Look) -> None:
        for path, form in look.forms.items():
            if form.kind == "image" and not self._with_images:
                self.dropped[path] = "an image, left out by --images skip"
            elif form.kind in ("none", "other"):
                self.dropped[path] = form.why or "it has no value"
            elif step_meaning(path) is not None:
                self.columns[path] = Column(path, form, look.images.get(path))
        if not any(path[0] == ACTION[0] for path in self.columns):
            self.columns.clear()
            raise FormatError(f"{look.what}: its steps have no action" + _why(self.dropped, ACTION))
        if REWARD in self.columns and self.columns[REWARD].form.shape not in ((), (1,)):
            self.columns.clear()
            raise FormatError(f"{look.what}: rewards have a shape, expected one number per step")

    def _require_alike(self, look: Look) -> None:
        what = look.what
        for path in look.forms.keys() | self.columns.keys() | self.dropped.keys():
            if step_meaning(path) is None or path in self.dropped:
                continue
            name, form, column = key_name(path), look.forms.get(path), self.columns.get(path)
            if form is None or column is None:
                has = "lacks" if form is None else "has"
                raise FormatError(f"{what}: {name} must be in all episodes or in none: this one {has} it")
            if joined_form(column.form, form) is None:
                said = f": {form.why}" if form.why else f" is {form}, in other episodes {column.form}"
                raise FormatError(f"{what}: {name}{said}")
            if column.image is not None and look.images[path] != column.image:
                raise FormatError(f"{what}: {name} is {look.images[path]}, in other episodes {column.image}")

    def fields(self) -> tuple[tuple[tuple[Field, Timing], ...], tuple[Dropped, ...]]:
        """Return the fields of all columns, and the leaves that are left out; columns without a field are removed."""
        found: dict[Key, tuple[Field, Timing]] = {IS_INIT: (Field(IS_INIT, "bool", (1,), "info"), "step")}
        for path, column in [*self.columns.items()]:
            made = _fields_of(column)
            if isinstance(made, str) or any(field.key in found for field, _ in made):
                self.dropped[path] = made if isinstance(made, str) else "another field has its name"
                del self.columns[path]
            else:
                found |= {field.key: (field, timing) for field, timing in made}
        names = {f"{_STEPS}{key_name(path)}": why for path, why in self.dropped.items()} | self.others
        return tuple(found.values()), tuple(Dropped(name, why) for name, why in sorted(names.items()))


def _fields_of(column: Column) -> list[tuple[Field, Timing]] | str:
    """Return the fields of a column, or the reason why it has none."""
    key, role, timing = meaning_of(column)
    if column.form.kind == "text":
        return [(one, timing) for one in text_fields(key, column.width)]
    try:
        dtype = dtype_name(DTYPES[column.dtype]) if column.dtype in DTYPES else dtype_name(np.dtype(column.dtype))
    except SchemaError as error:
        return str(error)
    return [(Field(key, dtype, () if key == REWARD else column.shape, role), timing)]


def meaning_of(column: Column) -> tuple[Key, Role, Timing]:
    """Return key, role and timing of a column."""
    found = step_meaning(column.path)
    assert found is not None  # flags are not columns
    return found


def keys_of(column: Column) -> tuple[Key, ...]:
    """Return the keys of the fields of a column."""
    key = meaning_of(column)[0]
    return (key, length_key(key)) if column.form.kind == "text" else (key,)


def _needs_values(path: LeafPath, form: LeafForm) -> bool:
    """Return whether the survey needs the values: for flags, last steps, the width of text, or the precision."""
    if form.kind == "text":
        return True
    essential = path[0] == ACTION[0] or path == REWARD or (len(path) == 1 and path[0] in STEP_FLAGS)
    return form.kind == "number" and (essential or (form.python and form.dtype != "bool"))


def _across(one: LeafForm | None, other: LeafForm | None) -> LeafForm:
    return (None if one is None or other is None else joined_form(one, other)) or RAGGED


def _flag(rows: Array, what: str) -> list[bool]:
    if rows.size != len(rows) or ((rows != 0) & (rows != 1)).any():
        raise FormatError(f"{what} is not true or false in every step")
    found: list[bool] = (rows.reshape(-1) != 0).tolist()
    return found


def _ends(flags: Mapping[str, Sequence[bool]], what: str) -> tuple[bool, bool]:
    """Return `is_last` and `is_terminal` of the last step; FormatError for a flag that is set inside the episode."""
    for name, values in flags.items():
        inside = values[1:] if name == IS_FIRST else values[:-1]
        if any(inside):
            at = list(inside).index(True) + (name == IS_FIRST)
            raise FormatError(f"{what}: {name} is set in step {at} of {len(values)}, which is inside the episode")
    is_terminal = bool(flags.get(IS_TERMINAL, (False,))[-1])
    return bool(flags.get(IS_LAST, (False,))[-1]) or is_terminal, is_terminal


def _why(dropped: Mapping[LeafPath, str], path: LeafPath) -> str:
    return f" that can be read: {dropped[path]}" if path in dropped else ""


def _flat(nested: Mapping[str, Value], before: str = "") -> Iterator[tuple[str, Value]]:
    for name, value in nested.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


_AHEAD = 3
"""Number of episodes per thread that are examined ahead of their turn."""
FoundLook: TypeAlias = tuple[ArchiveMember, Callable[[], Look]]


class SurveyPool(Closing):
    """Examines episodes in `workers` threads, each with its own open archive and its own process for unpickling.

    While one process unpickles, this process examines an episode of another. With one worker, no thread is used.
    `skipped` counts files in archives that are not episodes. The process `first` is one of them and is left running,
    since starting a process takes longer than unpickling most episodes.
    """

    def __init__(
        self, shards: Sequence[EpisodeArchive], workers: int, *, images: bool, first: EpisodeUnpickler
    ) -> None:
        self.skipped = 0
        self._images = images
        self._shards = EpisodeArchives(shards)
        self._own = [EpisodeUnpickler() for _ in range(workers - 1)]
        self._all = [(EpisodeArchives(shards), unpickler) for unpickler in (first, *self._own)]
        self._free: SimpleQueue[tuple[EpisodeArchives, EpisodeUnpickler]] = SimpleQueue()
        for one in self._all:
            self._free.put(one)
        self._pool = ThreadPoolExecutor(workers, "look") if workers > 1 else None

    def looks(self, place: int) -> Iterator[FoundLook]:
        """Yield the episodes of a shard in order, each with a function that returns its look or raises its error.

        After the last one, raises the error of `Archive.members`, if any.
        """
        waiting: deque[tuple[ArchiveMember, Future[Look]]] = deque()
        wrong: FormatError | None = None
        members = self._episodes(place)
        try:
            while True:
                try:
                    member = next(members, None)
                except FormatError as error:  # raised after the members before it were yielded
                    member, wrong = None, error
                if member is None:
                    break
                if self._pool is None:
                    yield member, lambda member=member: self._look(place, member)  # type: ignore[misc]
                    continue
                waiting.append((member, self._pool.submit(self._look, place, member)))
                if len(waiting) > _AHEAD * len(self._all):
                    first, look = waiting.popleft()
                    yield first, look.result
            while waiting:
                first, look = waiting.popleft()
                yield first, look.result
        finally:
            for _, look in waiting:
                look.cancel()
        if wrong is not None:
            raise wrong

    def _episodes(self, place: int) -> Iterator[ArchiveMember]:
        for member in self._shards.members(place):
            if is_episode(member):
                yield member
            else:
                self.skipped += 1

    def _look(self, place: int, member: ArchiveMember) -> Look:
        archives, unpickler = one = self._free.get()
        try:
            episode = load_episode(unpickler, archives.archive(place), member)
            with unpickler.explained(episode.what):
                return examine(episode, member, images=self._images)
        finally:
            self._free.put(one)

    def close(self) -> None:
        """Wait for running examinations, and end all processes except the first."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._shards.close()
        for archives, _ in self._all:
            archives.close()
        for unpickler in self._own:
            unpickler.close()


def read_rows(
    episode: Episode,
    columns: Sequence[Column],
    fields: Mapping[Key, Field],
    span: tuple[int, int],
    carried: Mapping[Key, Array] | None = None,
) -> dict[Key, Array]:
    """Read the rows `span` of some columns, by the keys of their fields.

    `carried` holds the first of these rows if they were read before. Raises FormatError for values that do not fit a
    field, CorruptDataError for damaged images.
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
    """Write the values of some steps to the rows from `at` on."""
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
                raise FormatError(f"{what} is longer than any text in the survey")
            target[...], held[keys[1]][rows] = encode_text(found, column.width)
        else:
            target[...] = numbers(found, column.dtype, column.shape, what).reshape(target.shape)


_MOST_DAMAGED = 1000
_MOST_ROWS = 512
_OUTCOME_ROWS = 1 << 12


@dataclass(frozen=True, slots=True)
class ShardSurvey:
    """The result of the pass over all shards.

    Attributes:
        fields: the fields with their timings.
        columns: the leaves that become fields.
        episodes: the sound episodes by number.
        damaged: the errors of the other episodes by number.
        problems: errors of missing shards, or of shards that end too early.
        dropped: leaves that are left out.
        notes: notes for the user.
        last: what last steps are.
        last_steps: the counts that this was decided by.
        headers: for each episode, the index of its archive and the position of its header in it.
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
        """Return whether the last step of an episode is only the observation after it."""
        return self.last.observed(is_last=one.is_last)

    def steps_of(self, one: FoundEpisode) -> int:
        """Return the number of steps of an episode, without a last one that is only an observation."""
        return max(0, one.length - self.is_observed(one))


class OpenXReader(SurveyedReader[ShardSurvey], PartsReader):
    """Reads a folder of shards `NAME_00000.tar`, `NAME_00001.tar`, …, or one of them, with one pickle per episode.

    A pickle is a dictionary with the list `steps`, written by the library datasets from RLDS. `action` and names that
    begin with it belong to a step, `reward` and `discount` come after it; all other leaves, such as `observation`, have
    a value before and after a step. Images are decoded to `[height, width, channels]`; text is stored as bytes and a
    length. Numbers of Python become float32 if it can hold all of them. Episodes are numbered through all shards; the
    name of their `file` and the entries of `episode_metadata` become texts.

    Options:
        trust_pickle: required, since episodes are pickles.
        rlds_last: what the last step of an episode is.
        images: `decode` or `skip`.
        id: the id of the published dataset.

    Raises:
        UsageError: `trust_pickle` is not set.
        FormatError: a pickle is not an episode, or an archive holds more than files below one folder.
        CorruptDataError: a file is damaged, or a shard is missing.

    Episodes whose form differs from the first, and missing shards, raise an error only when they are read.
    """

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
        """Find the shards, and check the options."""
        self._unpickler = EpisodeUnpickler()
        shards = shards_at(self.path)
        if not shards:
            raise FormatError(f"{self.path} has no tar archives")
        require_one_dataset(self.path, shards)
        self._choice = require_rlds_last(self.options.get("rlds_last"))
        self._images = require_images(self.options.get("images"), known=("decode", "skip")) == "decode"
        require_trust(self.path, self.options.get("trust_pickle"), "its episodes are pickles, which can run anything")
        self._shards = EpisodeArchives(shards)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Examine every episode of all shards, and return the facts."""
        found = self.looked_over(progress)
        kept = {number: one for number, one in found.episodes.items() if found.steps_of(one)}
        listed = sorted(kept.keys() | found.damaged.keys())
        lengths = [found.steps_of(kept[number]) if number in kept else 0 for number in listed]
        lacking = [one for one in kept.values() if not found.is_observed(one)]
        all_lack = len(lacking) == len(kept)
        return SourceFacts(
            source="openx",
            id=self.id_or(dataset_name(self.path, self._shards.all)),
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

    def look(self, progress: Callable[[int], None]) -> ShardSurvey:
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
            yield f"{counted(empty, 'episode')} without steps left out"
        if skipped:
            yield f"{counted(skipped, 'file')} in the archives that are not episodes"
        if survey.unstarted:
            yield f"is_first is not set in the first step of {survey.unstarted:,} of {len(episodes):,} episodes"
        open_ended = sum(one.length > 0 and not one.is_last for one in episodes.values())
        if open_ended:
            yield f"{counted(open_ended, 'incomplete episode')} without is_last at the end"
        doubles = [one.name for one in survey.columns.values() if one.form.python and one.dtype == "float64"]
        if doubles:
            yield f"float64, since float32 cannot hold all values: {', '.join(doubles)}"

    def _load(self, place: int, member: ArchiveMember) -> Episode:
        return load_episode(self._unpickler, self._shards.archive(place), member)

    def shard_starts(self) -> list[int]:
        """Return the first episode of each part of an archive that a stream reads at once."""
        sizes = [shard.path.stat().st_size for shard in self._shards.all]
        parts = [(place, start) for place, size in enumerate(sizes) for start, _ in pieces_of(size)]
        return [bisect.bisect_left(self.found.headers, part) for part in parts]

    def evidence(self) -> Mapping[str, int]:
        """Return the counts by which it is decided what last steps are."""
        return asdict(self.found.last_steps)

    @classmethod
    def settled(cls, evidence: Mapping[str, int]) -> tuple[dict[str, str], bool]:
        """Decide what last steps are, and whether this is certain.

        It is uncertain if all last steps look like fillers, but so few that this may be chance.
        """
        counts = LastSteps(**evidence)
        found = counts.decide("auto")
        return {"rlds_last": found.choice}, found.is_observation or counts.end_fillers < counts.ends

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise the error of the first of these episodes that cannot be read, or with `everything` of a shard."""
        found = self.found
        refuse_damaged(numbers, found.damaged)
        if everything and found.problems:
            raise found.problems[0]

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        found = self.found
        rows = min(_MOST_ROWS, self.piece_rows(found.fields))
        yield from self._pieces(number, rows, found.columns)

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode."""
        rewards = [column for column in self.found.columns if column.path == REWARD]
        yield from self._pieces(number, _OUTCOME_ROWS, rewards)

    def _pieces(self, number: int, rows: int, columns: Sequence[Column]) -> Iterator[Piece]:
        found = self.found
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
        """Close the archives, and end the process for unpickling."""
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
