"""A pass over all episodes: where they are, how they end, the form of their leaves, and what is wrong with them.

Several episodes are looked into at a time, each unpickled by a process of its own; the results come in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np

from ...core.errors import FormatError, SchemaError
from ...core.format.contracts import Array, Closing
from ...core.format.manifest import Dropped
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
    key_name,
    length_key,
    text_fields,
)
from ..files.archives import ArchiveMember
from ..files.images import ImageForm
from ..files.pickles import PickledArray, PickledBytes, Value
from ..files.rlds_steps import IS_FIRST, IS_INIT, IS_LAST, IS_TERMINAL, STEP_FLAGS, LastSteps, fillers, step_meaning
from .episodes import (
    Episode,
    EpisodeUnpickler,
    LeafForm,
    Path,
    Step,
    is_single_precision,
    joined_form,
    load_episode,
    numbers,
)
from .shards import EpisodeArchive, EpisodeArchives, is_episode

_STEPS = "steps."


@dataclass(frozen=True, slots=True)
class FoundEpisode:
    """An episode of `length` steps, in a member of the archive in place `shard`; the flags belong to its last one."""

    shard: int
    member: ArchiveMember
    length: int
    is_last: bool
    is_terminal: bool
    text: Mapping[str, str]


@dataclass(slots=True)
class Column:
    """A leaf of all steps: `single` states that float32 holds its values, `width` is the longest text in bytes."""

    path: Path
    form: LeafForm
    image: ImageForm | None = None
    single: bool = True
    width: int = 1

    @property
    def name(self) -> str:
        """The path as people type it."""
        return key_name(self.path)

    @property
    def dtype(self) -> str:
        """The element type of the field: Python writes every number as float64."""
        if self.image is not None:
            return self.image.dtype
        return "float32" if self.form.python and self.form.dtype == "float64" and self.single else self.form.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.form.shape if self.image is None else self.image.shape


@dataclass(slots=True)
class Look:
    """What one episode has: the forms of its leaves, `text` next to the steps, its flags, and where fillers are.

    `others` are the entries next to the steps that are left out.
    """

    what: str
    length: int
    text: Mapping[str, str]
    others: Mapping[str, str]
    forms: dict[Path, LeafForm] = field(default_factory=dict)
    images: dict[Path, ImageForm] = field(default_factory=dict)
    doubles: set[Path] = field(default_factory=set)
    widths: dict[Path, int] = field(default_factory=dict)
    filler: Array = field(default_factory=lambda: np.zeros(0, bool))
    is_started: bool = True
    is_last: bool = False
    is_terminal: bool = False


def examine(episode: Episode, member: ArchiveMember, *, images: bool) -> Look:
    """Read all of an episode but its images and arrays that need no look; FormatError for what contradicts itself."""
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
    """Return the entries next to the steps that are text or a number each, and why the others are left out."""
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
            others[name] = "an entry next to the steps that is neither text nor a number"
    return found, others


def _read_values(
    episode: Episode, steps: list[Step], look: Look, flags: dict[str, list[bool]], filler: list[Array]
) -> None:
    asked = {path: form for path, form in look.forms.items() if _is_looked_at(path, form)}
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
    """Looks at one episode after the other; the first one that can be read decides about the form of all."""

    def __init__(self, *, images: bool) -> None:
        self._with_images = images
        self.columns: dict[Path, Column] = {}
        self.dropped: dict[Path, str] = {}
        self.others: dict[str, str] = {}
        self.last = LastSteps()
        self.unstarted = 0

    def look_at(self, episode: Episode, shard: int, member: ArchiveMember) -> FoundEpisode:
        """Take the structure and the flags of an episode; FormatError for one that is not like the first."""
        return self.take(examine(episode, member, images=self._with_images), shard, member)

    def take(self, look: Look, shard: int, member: ArchiveMember) -> FoundEpisode:
        """Take what an episode has, in the order of the episodes; FormatError for one that is not like the first."""
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
            raise FormatError(f"{look.what}: rewards have a shape, expected a number a step")

    def _require_alike(self, look: Look) -> None:
        what = look.what
        for path in look.forms.keys() | self.columns.keys() | self.dropped.keys():
            if step_meaning(path) is None or path in self.dropped:
                continue
            name, form, column = key_name(path), look.forms.get(path), self.columns.get(path)
            if form is None or column is None:
                has = "lacks" if form is None else "has"
                raise FormatError(f"{what}: {name} is not in all episodes: this one {has} it")
            if joined_form(column.form, form) is None:
                said = f": {form.why}" if form.why else f" is {form}, in other episodes {column.form}"
                raise FormatError(f"{what}: {name}{said}")
            if column.image is not None and look.images[path] != column.image:
                raise FormatError(f"{what}: {name} is {look.images[path]}, in other episodes {column.image}")

    def fields(self) -> tuple[tuple[tuple[Field, Timing], ...], tuple[Dropped, ...]]:
        """Return the fields of all columns, and what is left out; columns without a field are removed."""
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
    """Return the fields of a column, or why it has none."""
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
    assert found is not None  # flags are no columns
    return found


def keys_of(column: Column) -> tuple[Key, ...]:
    """Return the keys of the fields of a column."""
    key = meaning_of(column)[0]
    return (key, length_key(key)) if column.form.kind == "text" else (key,)


def _is_looked_at(path: Path, form: LeafForm) -> bool:
    """Whether the values decide something: about flags, last steps, the width of text, or the precision."""
    if form.kind == "text":
        return True
    essential = path[0] == ACTION[0] or path == REWARD or (len(path) == 1 and path[0] in STEP_FLAGS)
    return form.kind == "number" and (essential or (form.python and form.dtype != "bool"))


def _across(one: LeafForm | None, other: LeafForm | None) -> LeafForm:
    found = None if one is None or other is None else joined_form(one, other)
    return (
        LeafForm("other", why="its values differ in form between the steps of an episode") if found is None else found
    )


def _flag(rows: Array, what: str) -> list[bool]:
    if rows.size != len(rows) or ((rows != 0) & (rows != 1)).any():
        raise FormatError(f"{what} is not true or false in every step")
    found: list[bool] = (rows.reshape(-1) != 0).tolist()
    return found


def _ends(flags: Mapping[str, Sequence[bool]], what: str) -> tuple[bool, bool]:
    """Return `is_last` and `is_terminal` of the last step; FormatError where a flag is set in the middle."""
    for name, values in flags.items():
        inside = values[1:] if name == IS_FIRST else values[:-1]
        if any(inside):
            at = list(inside).index(True) + (name == IS_FIRST)
            raise FormatError(f"{what}: {name} is set in step {at} of {len(values)}, which is inside the episode")
    is_terminal = bool(flags.get(IS_TERMINAL, (False,))[-1])
    return bool(flags.get(IS_LAST, (False,))[-1]) or is_terminal, is_terminal


def _why(dropped: Mapping[Path, str], path: Path) -> str:
    return f" that can be read: {dropped[path]}" if path in dropped else ""


def _flat(nested: Mapping[str, Value], before: str = "") -> Iterator[tuple[str, Value]]:
    for name, value in nested.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


_AHEAD = 3
"""Episodes for each thread that are looked into before their turn comes."""
FoundLook: TypeAlias = tuple[ArchiveMember, Callable[[], Look]]


class SurveyPool(Closing):
    """`workers` threads, each with its own archives and its own process that unpickles; without, this thread alone.

    While a process unpickles, this one looks into an episode of another. `skipped` counts the files that are none.
    `first` is one of the processes, and stays open: it takes longer to start than to unpickle most episodes.
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
        """Yield the members of a shard that are episodes, each with a function that returns the look or raises.

        Raises, after them, what `Archive.members` does.
        """
        waiting: deque[tuple[ArchiveMember, Future[Look]]] = deque()
        wrong: FormatError | None = None
        members = self._episodes(place)
        try:
            while True:
                try:
                    member = next(members, None)
                except FormatError as error:  # those before it come first
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
        """Wait for the looks that are under way, and end all processes but the first."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._shards.close()
        for archives, _ in self._all:
            archives.close()
        for unpickler in self._own:
            unpickler.close()
