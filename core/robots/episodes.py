"""Operations on whole episodes: their tasks, their idle ends, the rate of their steps, and their time stamps."""

from __future__ import annotations

import contextlib
import json
import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ..engine.tasks import ResultRefused
from ..errors import UsageError, did_you_mean
from ..format.contracts import Array, StepReader
from ..format.documents import dump_json
from ..format.episodes import normal_form, parse_episodes, select_episodes
from ..format.language import EVENTS, PERSISTENT, TASK, TASKS, Said, parse_said, said_in_rows, tasks_of
from ..format.threads import available_memory
from ..format.videos import at_rate, stated_fps
from ..preprocess.operations.base import (
    KEPT,
    BoundOperation,
    Columns,
    Derivation,
    Discount,
    FieldChanges,
    Fields,
    LazyBatch,
    LazyColumn,
    Operation,
    RowOperation,
    in_next,
    names_of,
    number_of,
    pairs_of,
)
from ..preprocess.processor import EpisodeTexts, Pieces
from ..progress import counted, readable_size
from ..stats import Moments, QuantileSketch
from ..ted.schema import (
    EPISODE,
    NEXT,
    Field,
    Key,
    as_numbers,
    encode_text,
    is_floating,
    key_name,
    length_key,
    row_bytes,
)
from .action_space import Place, between, fields_after, is_rotation, names_of_numbers, rotation, rotations_after

# The tasks of episodes: the instruction of a robot, as text

_ROWS = 1 << 16
"""The number of rows that are read at a time."""
_MOST = 1000
"""The largest number of steps that resampling makes of one step."""
_LONGEST = 100_000_000
"""The largest number of steps of a resampled episode."""


def _ranges(reader: StepReader) -> Iterator[tuple[int, int]]:
    """Divide all rows into ranges that do not depend on the fields, so that the rounding of sums does not either."""
    for low in range(0, reader.manifest.steps, _ROWS):
        yield low, min(low + _ROWS, reader.manifest.steps)


class _TaskOperation(RowOperation):
    """Changes the tasks of episodes, and the tasks of rows if rows have their own."""

    @abstractmethod
    def new(self) -> str:
        """Return the new text."""

    @abstractmethod
    def chooses(self, texts: Array, episodes: Array) -> Array:
        """Return which rows get the new text, given the text of each row, as bytes, and the number of its episode."""

    def plan(self, fields: Fields) -> BoundOperation:
        keys = _row_tasks(fields)
        if keys and EPISODE not in fields:
            raise UsageError(f"{self.name} needs the field episode, because rows have tasks of their own")
        width = len(self.new().encode())
        wider = {key: replace(fields[key], shape=(max(width, *fields[key].shape),)) for key in keys}
        return _BoundTasks(fields.replaced(wider), self, {one: key for key in keys for one in (key, length_key(key))})


def _row_tasks(fields: Fields) -> list[Key]:
    """Return the text fields that hold the tasks of rows."""
    return [field.key for field in fields if field.role == "text" and field.key[-1] == TASK]


def _as_bytes(rows: Array, lengths: Array) -> Array:
    """Return rows of UTF-8 bytes as an array of objects."""
    found = np.empty(len(rows), object)
    found[:] = [row[:size].tobytes() for row, size in zip(rows, lengths.tolist(), strict=True)]
    return found


class _BoundTasks(BoundOperation):
    def __init__(self, after: Fields, asked: _TaskOperation, texts: Mapping[Key, Key]) -> None:
        super().__init__(after)
        self._asked, self._texts = asked, texts

    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        texts = {self._texts[key] for key in wanted if key in self._texts}
        return {*wanted, *texts, *map(length_key, texts), *([EPISODE] if texts else [])}

    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        found: dict[Key, Any] = {key: batch.columns[key] for key in wanted}
        for key in wanted & self._texts.keys():
            text = self._texts[key]
            rows = _as_bytes(batch.columns[text].values, batch.columns[length_key(text)].values)
            rows[self._asked.chooses(rows, batch.columns[EPISODE].values)] = self._asked.new().encode()
            characters, lengths = encode_text(rows.tolist(), self.after[text].shape[0])
            found[key] = characters if key == text else lengths
        return found


@dataclass(frozen=True)
class SetTask(_TaskOperation):
    """Sets the task of some episodes, given by their numbers in the source, such as `0:50,75`.

    It replaces the tasks that they had. Numbers are written as for `--episodes`: a range selects the existing episodes
    in it, a single number has to exist.
    """

    name: ClassVar[str] = "task"
    episodes: str
    text: str

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        pairs = pairs_of(value, cls.name, "episodes=text, like 0:50='pick the cube'")
        made = [cls(numbers, str(text)) for numbers, text in pairs]
        known: dict[str | None, str] = {}
        for one in made:
            if (text := known.setdefault(normal_form(one.episodes), one.text)) != one.text:
                raise UsageError(f"--task gives episodes {one.episodes} two texts, {text!r} and {one.text!r}")
        return made

    def __post_init__(self) -> None:
        with self._named():
            parse_episodes(self.episodes)
        if not self.text.strip():
            raise UsageError(f"the task of episodes {self.episodes} is empty, expected a text")

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Replace `--episodes` by the name of this option in errors about the numbers of episodes."""
        try:
            yield
        except UsageError as error:
            message = error.message.replace("--episodes", f"--{self.name}")
            raise UsageError(message, hint=error.hint) from None

    def new(self) -> str:
        return self.text

    def chooses(self, texts: Array, episodes: Array) -> Array:
        chosen = np.zeros(len(episodes), bool)
        for first, stop in parse_episodes(self.episodes):
            chosen |= (episodes >= first) & (episodes < (np.inf if stop is None else stop))
        return chosen

    def texts(self, numbers: Sequence[int], texts: EpisodeTexts) -> EpisodeTexts:
        with self._named():
            chosen = set(select_episodes(parse_episodes(self.episodes), numbers))
        known = texts or [{}] * len(numbers)
        return [
            {name: value for name, value in text.items() if name != TASKS} | {TASK: self.text}
            if number in chosen
            else text
            for number, text in zip(numbers, known, strict=True)
        ]


@dataclass(frozen=True)
class RenameTask(_TaskOperation):
    """Renames a task in all episodes that have it; a new text that is already a task merges the two."""

    name: ClassVar[str] = "rename-task"
    task: str
    to: str

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        # Pairs apply at once, so a text that one pair makes must not be renamed by another: that one runs first.
        left: dict[str, str] = {}
        for old, new in pairs_of(value, cls.name, "old=new, like 'pick=pick the cube'"):
            if (text := left.setdefault(old, str(new))) != str(new):
                raise UsageError(f"--rename-task gives {old!r} two texts, {text!r} and {str(new)!r}")
        while left:
            ready = [old for old, new in left.items() if new == old or new not in left]
            if not ready:
                raise UsageError(
                    f"--rename-task swaps {' and '.join(map(repr, left))}, which would merge them",
                    hint="rename one of them to a third text first, and to its final text in another run",
                )
            yield from (cls(old, left.pop(old)) for old in ready)

    def settled(self, reader: StepReader, before: Sequence[Operation]) -> RenameTask:
        known = dict.fromkeys(task for text in reader.episode_text or () for task in tasks_of(text))
        for key in _row_tasks(Fields.of(reader.fields)):
            for low, high in _ranges(reader):
                rows = _as_bytes(reader.read(key, low, high), reader.read(length_key(key), low, high))
                known |= dict.fromkeys(row.decode(errors="replace") for row in dict.fromkeys(rows.tolist()))
        known |= dict.fromkeys(one.new() for one in before if isinstance(one, _TaskOperation))
        if self.task not in known:
            there = ", ".join(map(repr, known)) or "none"
            raise UsageError(
                f"no episode has the task {self.task!r}{did_you_mean(self.task, known)}", hint=f"the tasks are {there}"
            )
        return self

    def new(self) -> str:
        return self.to

    def chooses(self, texts: Array, episodes: Array) -> Array:
        return np.array([text == self.task.encode() for text in texts.tolist()], bool)

    def texts(self, numbers: Sequence[int], texts: EpisodeTexts) -> EpisodeTexts:
        return [{name: self._renamed(name, value) for name, value in text.items()} for text in texts]

    def _renamed(self, name: str, value: str) -> str:
        if name not in (TASK, TASKS):
            return value
        # Rows refer to the tasks of an episode by their keys, or their positions, which stay the same.
        found: Any = json.loads(value) if name == TASKS else value
        if isinstance(found, dict):
            return dump_json({key: self.to if task == self.task else task for key, task in found.items()})
        if isinstance(found, list):
            return dump_json([self.to if task == self.task else task for task in found])
        return self.to if value == self.task else value


# Rows that are cut off or resampled

_MAD = 1.4826
_MEAN = 1.2533
"""The factors from the median, and from the mean, of absolute values to the standard deviation of normal noise."""
_TIME: Key = ("timestamp",)
_FRAME: Key = ("frame",)


@dataclass(frozen=True)
class TrimIdle(RowOperation):
    """Cuts off the rows without motion at both ends of episodes, except for `keep` rows at each end.

    A row moves if a number of the state changes during the step, or a number of the action changes from the row before,
    by more than `threshold` units. The unit of a number is the median of its absolute changes over the dataset, times
    1.4826, which is the standard deviation if the changes are normal noise; if most changes are 0, as for a gripper, it
    is their mean times 1.2533. Numbers that never change are ignored, and pauses in the middle are kept.

    The rewards of removed rows are added to the first or the last row that is kept, and the last one gets the end flags
    of the episode, so that returns and ends do not change. An episode without any motion is removed.

    `keys` are the fields to look at, by default actions and observations of up to one dimension; `units` has the units
    of all their numbers, which are measured if not given.

    With `cuts`, no motion is looked for: there are three numbers for each episode, its number in the source and the
    numbers of rows to cut off at its beginning and at its end. In Python this is written `trim_idle={4: (57, 0)}`.
    """

    name: ClassVar[str] = "trim-idle"
    whole_episodes: ClassVar[bool] = True
    makes_rows: ClassVar[bool] = True
    threshold: float
    keep: int = 1
    keys: tuple[str, ...] = ()
    units: tuple[float, ...] = ()
    cuts: tuple[int, ...] = ()

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        if isinstance(value, Mapping):
            return [cls(0.0, 0, cuts=tuple(int(part) for number, ends in value.items() for part in (number, *ends)))]
        threshold, *rest = str(value).split(":", 2)
        keep = rest[0] if rest and rest[0] else "1"
        if not keep.isdecimal():
            raise UsageError(f"--trim-idle {value!r}: {keep!r} is not a number of rows to keep", hint=_TRIM)
        keys = names_of(rest[1], cls.name) if len(rest) > 1 else ()
        return [cls(number_of(threshold, cls.name), int(keep), keys)]

    def __post_init__(self) -> None:
        if not (0 <= self.threshold < math.inf) or self.keep < 0:
            wrong = f"keeps {self.keep} rows" if self.keep < 0 else f"has the threshold {self.threshold:g}"
            raise UsageError(f"trim-idle {wrong}, expected a number from 0", hint=_TRIM)
        if len(self.cuts) % 3 or any(rows < 0 for at, rows in enumerate(self.cuts) if at % 3):
            raise UsageError("trim-idle expects cuts of three numbers: an episode, and the rows to cut at either end")

    def settled(self, reader: StepReader, before: Sequence[Operation]) -> TrimIdle:
        if self.units or self.cuts:
            return self
        fields = Fields.of(reader.fields)
        keys = self._watched(fields)
        units: list[float] = []
        for key in keys:
            width = math.prod(fields[key].shape)
            moments, sketch = Moments(width), QuantileSketch(width)
            for low, high in _ranges(reader):
                read = {one: as_numbers(reader.read(one, low, high), fields[one].dtype) for one in _pair(fields, key)}
                changes = np.abs(_changes(read, key))
                if in_next(key) not in fields:  # the first row of an episode follows no other
                    starts = reader.episodes.start
                    changes = np.delete(changes, [0, *(starts[(starts > low) & (starts < high)] - low)], 0)
                moments.merge(Moments.of(changes))
                sketch.update(changes)
            [median] = sketch.quantiles((0.5,), moments.min, moments.max)
            scale = np.where(median > 0, _MAD * median, _MEAN * moments.mean)
            units += np.where(moments.count > 0, scale, 0.0).tolist()
        return replace(self, keys=tuple(map(key_name, keys)), units=tuple(units))

    def _watched(self, fields: Fields) -> list[Key]:
        """Return the fields whose changes are motion."""
        if self.keys:
            found = [key for name in self.keys for key in fields.covered(name) if key[0] != NEXT]
        else:
            found = [
                field.key
                for field in fields
                if field.role in ("action", "observation")
                and field.key[0] != NEXT
                and len(field.shape) <= 1
                and is_floating(field.dtype)
            ]
        if not found:
            raise UsageError("trim-idle finds no action or observation to look at", hint=_TRIM)
        return found

    def plan(self, fields: Fields) -> BoundOperation:
        if self.cuts:
            if EPISODE not in fields:
                raise UsageError("trim-idle needs the field episode to know which rows to cut")
            return _BoundTrim(fields, self, [EPISODE])
        keys = self._watched(fields)
        width = sum(math.prod(fields[key].shape) for key in keys)
        if len(self.units) != width:
            raise UsageError(f"trim-idle has {len(self.units)} units, expected {width}, one for each number")
        return _BoundTrim(fields, self, keys)


_TRIM = "write it like 0.1, 0.1:5 to keep 5 rows at either end, or 0.1:5:observation.state,action"


def _pair(fields: Fields, key: Key) -> list[Key]:
    return [one for one in (key, in_next(key)) if one in fields]


def _changes(read: Mapping[Key, Array], key: Key) -> Array:
    """Return the change of a field in each step; or, if it is not under `next`, from the row before."""
    values = read[key].reshape(len(read[key]), -1).astype(np.float64)
    if (after := in_next(key)) in read:
        found: Array = read[after].reshape(len(values), -1) - values
        return found
    return np.diff(values, axis=0, prepend=values[:1])


class _BoundTrim(BoundOperation):
    def __init__(self, fields: Fields, asked: TrimIdle, keys: list[Key]) -> None:
        super().__init__(fields)
        self._asked, self._keys = asked, keys
        self._looked = {one for key in keys for one in _pair(fields, key)}

    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        return wanted | self._looked

    def _kept(self, batch: LazyBatch) -> tuple[Array, Array]:
        """Return the first kept row of each run, and the row after the last kept one; equal if no row is kept."""
        pieces, units, at = batch.pieces, np.array(self._asked.units), 0
        starts, stops = pieces.starts, pieces.starts + pieces.rows
        if self._asked.cuts:
            given = np.array(self._asked.cuts, np.int64).reshape(-1, 3)
            ends = {number: cut for number, *cut in given.tolist()}
            numbers = batch.columns[EPISODE].values[np.minimum(starts, max(0, pieces.steps - 1))]
            lead, tail = np.array([ends.get(int(number), (0, 0)) for number in numbers], np.int64).reshape(-1, 2).T
            low = np.minimum(starts + lead, stops)
            return low, np.maximum(low, stops - tail)
        moves = np.zeros(pieces.steps, bool)
        some = pieces.rows > 0
        for key in self._keys:
            read = {one: batch.columns[one].numbers for one in _pair(self.after, key)}
            changes = np.abs(_changes(read, key))
            if in_next(key) not in self.after:
                changes[pieces.starts[some]] = 0
            unit = units[at : at + changes.shape[1]]
            at += changes.shape[1]
            moves |= ((changes > self._asked.threshold * unit) & (unit > 0)).any(1)
        rows = np.flatnonzero(moves)
        first, last = np.searchsorted(rows, starts), np.searchsorted(rows, stops) - 1
        idle = first > last
        edges = np.append(rows, 0)
        low = np.maximum(starts, edges[first] - self._asked.keep)
        high = np.minimum(stops, edges[last] + 1 + self._asked.keep)
        return np.where(idle, starts, low), np.where(idle, starts, high)

    def pieces(self, batch: LazyBatch) -> Pieces:
        low, high = self._kept(batch)
        return replace(batch.pieces, rows=high - low)

    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        low, high = self._kept(batch)
        starts, stops, some = batch.pieces.starts, batch.pieces.starts + batch.pieces.rows, high > low
        starts, stops, low, high = starts[some], stops[some], low[some], high[some]
        rows = np.concatenate([np.arange(a, b) for a, b in zip(low, high, strict=True)] or [np.zeros(0, np.int64)])
        ends = np.cumsum(high - low)

        def joined(how: np.ufunc, values: Array, kept: Array) -> Array:
            """Combine the values of removed rows into the last and the first kept row."""
            for place, (a, b, c, d) in enumerate(zip(starts, low, high, stops, strict=True)):
                for row, cut in ((ends[place] - 1, values[c:d]), (ends[place] - (c - b), values[a:b])):
                    kept[row] = how(kept[row], how.reduce(cut, axis=0))
            return kept

        found: dict[Key, Any] = {}
        for key in wanted:
            found[key] = batch.columns[key].taken(rows)
            if key in KEPT:
                flags = found[key].values.copy()
                flags[ends - 1] = batch.columns[key].values[stops - 1]
                found[key] = LazyColumn.given(key_name(key), found[key].dtype, flags)
            elif key[0] == NEXT and self.after[key].dtype == "bool" and key[1:] not in self.after:  # such as success
                flags = joined(np.logical_or, batch.columns[key].values, found[key].values.copy())
                found[key] = LazyColumn.given(key_name(key), found[key].dtype, flags)
            elif _is_reward(key):
                found[key] = joined(np.add, batch.columns[key].numbers, _exact(batch.columns[key].numbers[rows]))
        return found


def _is_reward(key: Key) -> bool:
    return key[0] == NEXT and key[-1] == "reward"


def _exact(numbers: Array) -> Array:
    """Convert numbers to float64 or int64, in which they can be summed."""
    return numbers.astype(np.float64 if numbers.dtype.kind == "f" else np.int64)


_EARLY = 0.2345
"""The position within its frame at which an event stated by frame is assumed to happen. It is not 0, so that the event
stays in its row if time stamps are slightly off, and an odd number, so that rows at other rates do not begin there.
"""
WAYS = ("nearest", "linear", "hold", "sum")
"""How values are resampled: the value nearest in time; interpolated between the two values around; the last value
before; or the sum of values that add up over the time of a step."""


@dataclass(frozen=True)
class Resample(RowOperation):
    """Resamples episodes to `fps` steps per second.

    Times are read from the field `timestamp`, or counted at the rate `source`. By default, `source` is the rate in the
    metadata, or that of the median time step; it also defines the duration of an episode of a single step. The new
    steps of an episode begin at its first time stamp, and cover it up to the end of its last step:

        old steps at 10 per second    |  0  |  1  |  2  |  3  |  4  |
        new steps at 5 per second     |     0     |     1     |     2     |

    Floats of up to one dimension are interpolated. Actions are held: a step gets the last action given before it began.
    Integers, text, images and frames of videos are taken from the nearest row in time. `ways` overrides this, as in
    `action=linear`, with `nearest`, `linear`, `hold`, or `sum` for values that add up over time, such as delta actions;
    rotations in a field are interpolated as rotations with `observation.state[3:7]=quat-xyzw`. Fields under `next` have
    the value at the end of the step. Rewards are summed, and flags of rows that become one are combined with OR. Time
    stamps count at the new rate from the first one on, and `frame` from its first number. Events of LeRobot's language
    are assigned to the step during which they happen.
    """

    name: ClassVar[str] = "resample"
    whole_episodes: ClassVar[bool] = True
    makes_rows: ClassVar[bool] = True
    fps: float
    source: float | None = None
    ways: tuple[str, ...] = ()
    _gone: ClassVar[Mapping[int, Collection[Any]]] = {}  # `settled` sets it

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        fps, *rest = (part.strip() for part in str(value).split(","))
        source = [part.removeprefix("from=") for part in rest if part.startswith("from=")]
        ways = tuple(part for part in rest if not part.startswith("from="))
        return [cls(number_of(fps, cls.name), number_of(source[-1], "from") if source else None, ways)]

    def __post_init__(self) -> None:
        for rate in (self.fps, self.source):
            if rate is not None and not 1e-6 <= rate <= 1e6:
                raise UsageError(f"resample is {rate:g} steps per second, expected 1e-06 to 1e+06")
        for text in self.ways:
            name, _, way = text.partition("=")
            if "[" in name:
                Place.parsed(name)
                rotation(way)
            elif way not in WAYS:
                raise UsageError(
                    f"--resample has {text!r}, expected FIELD=HOW",
                    hint=f"write it like 10,action=linear; HOW is {', '.join(WAYS)}; of rotations "
                    "observation.state[3:7]=quat-xyzw",
                )

    def settled(self, reader: StepReader, before: Sequence[Operation]) -> Resample:
        retimed = [one.fps for one in before if isinstance(one, Retime | Resample)]
        source = self.source or (retimed[-1] if retimed else _rate_of(reader))
        made = replace(self, source=source, ways=tuple(self._resolved(reader, before)))
        made._require_room(reader)
        object.__setattr__(made, "_gone", made._gone_with_their_rows(reader, before))
        return made

    def _require_room(self, reader: StepReader) -> None:
        """Raise UsageError for a rate that is surely a mistake, or makes more steps than fit into memory."""
        more = self.fps / (self.source or self.fps)
        if more > _MOST:
            raise UsageError(
                f"resample makes {more:,.0f} steps of each one, from {self.source:g} to {self.fps:g} per second, "
                f"expected at most {_MOST:,}"
            )
        # Pictures do not count, because other operations may leave them out or encode them.
        size = row_bytes(field for field in reader.fields if len(field.shape) < 2)
        longest, available = int(reader.episodes.length.max(initial=0)), available_memory()
        if more > 1 and available is not None and longest * more * size > available:
            raise UsageError(
                f"resample makes {longest * more:,.0f} steps of the longest episode, which has {longest:,}: their "
                f"{readable_size(int(longest * more * size))} do not fit into memory"
            )

    def _resolved(self, reader: StepReader, before: Sequence[Operation]) -> Iterator[str]:
        """Yield the ways with resolved ranges; UsageError for rotations that would be interpolated as numbers."""
        fields, names = fields_after(reader, before), names_of_numbers(reader, before)
        widths = {field.name: field.shape[0] for field in fields if len(field.shape) == 1}
        ways = {field.name: _way_of(field) for field in fields}
        turned: set[tuple[str, int]] = set()
        for text in self.ways:
            name, _, way = text.partition("=")
            if "[" in name and (place := Place.parsed(name)).key in widths:
                place = place.resolved(widths[place.key], names.get(place.key, ()))
                turned.add((place.key, place.start))
                yield f"{place}={way}"
                continue
            if fields.has_name(name):
                ways |= dict.fromkeys(map(key_name, fields.covered(name)), way)
            yield text
        for key, places in rotations_after(reader, before).items():
            missed = [f"{place}={how}" for place, how in places if (key, place.start) not in turned]
            if missed and ways.get(key) == "linear":
                raise UsageError(
                    f"{key} has rotations, which cannot be interpolated as numbers: {', '.join(missed)}",
                    hint=f"add them: --resample {','.join([f'{self.fps:g}', *self.ways, *missed])}",
                )

    def _gone_with_their_rows(
        self, reader: StepReader, before: Sequence[Operation]
    ) -> dict[int, set[int | tuple[float, float] | None]]:
        """Return the events of each episode whose rows do not exist, and which no other row must get instead.

        Raises UsageError if the time of events that are stated by frame is not known, and if an operation before
        removes rows, because it is not known yet which ones.
        """
        keys, table, rate = {field.key for field in reader.fields}, reader.episodes, self.source
        retimed = [one.fps for one in before if isinstance(one, Retime)]
        found = {}
        for place, text in enumerate(reader.episode_text or ()):
            said, fits = parse_said(text.get(EVENTS, "[]"), EVENTS), False
            if None in said:
                continue
            for one in before:
                if isinstance(one, Resample):
                    return {}  # that operation has left them out, and stated the other events by their times
                if isinstance(one, TrimIdle) or (isinstance(one, RowOperation) and one.drops_rows):
                    raise UsageError(
                        f"{one.name} and {self.name} in one run would assign {EVENTS} of removed rows to other rows",
                        hint=f"run {one.name} first, and {self.name} on its result",
                    )
            if _FRAME in keys and (retimed or _TIME in keys) and rate is not None:
                rows = int(table.start[place]), int(table.start[place] + table.length[place])
                frames = reader.read(_FRAME, *rows).reshape(-1)
                times = (frames / retimed[-1] if retimed else reader.read(_TIME, *rows).reshape(-1)).astype(np.float64)
                heard = said_in_rows({at: [at] for at in said}, frames, times)
                found[int(table.episode[place])] = said.keys() - {at for row in heard for at in row}
                late = times * rate - frames
                fits = bool(((late <= _EARLY) & (late > _EARLY - 1)).all())
            if not fits and any(isinstance(at, int) for at in said):
                raise UsageError(
                    f"{EVENTS} of episode {table.episode[place]} are stated by frame, but its time stamps do not tell "
                    f"when these frames are at {rate or 0:g} frames per second"
                )
        return found

    def documents(self, documents: Mapping[str, bytes]) -> Mapping[str, bytes]:
        return at_rate(documents, self.fps)

    def texts(self, numbers: Sequence[int], texts: EpisodeTexts) -> EpisodeTexts:
        """Return the texts with events stated by time; language that lasts from a time on does not change."""
        if any(text.get(PERSISTENT, "[]").startswith("{") for text in texts):
            raise UsageError(f"{PERSISTENT} differs between the rows of an episode, which resample cannot keep apart")
        return [
            text | {EVENTS: self._by_time(text[EVENTS], self._gone.get(number, ()))} if EVENTS in text else text
            for number, text in zip(numbers, texts or [{}] * len(numbers), strict=True)
        ]

    def _by_time(self, text: str, gone: Collection[Any]) -> str:
        """Return events for rows at the new rate, each in the row during which it happens."""
        said = parse_said(text, EVENTS)
        if None in said:
            return text
        source, step = self.source or self.fps, 1 / self.fps
        times = {
            at[1] if isinstance(at, tuple) else (int(at or 0) + _EARLY) / source: value
            for at, value in said.items()
            if at not in gone
        }
        return dump_json({f"{at - step:.6f}s:{at:.6f}s": value for at, value in times.items()})

    def plan(self, fields: Fields) -> BoundOperation:
        if _TIME not in fields and self.source is None:
            raise UsageError(
                "resample needs the rate of the steps: there is no field timestamp, and no metadata state the rate",
                hint=f"add it: --resample {self.fps:g},from=50",
            )
        ways = {field.key: _way_of(field) for field in fields}
        turns: dict[Key, list[tuple[Place, str]]] = {}
        for text in self.ways:
            name, _, way = text.partition("=")
            if "[" in name:
                key, place = self._rotation_in(fields, Place.parsed(name), way)
                turns.setdefault(key, []).append((place, way))
                continue
            for key in fields.covered(name):
                if key in KEPT or _is_reward(key) or (way in ("linear", "sum") and not is_floating(fields[key].dtype)):
                    raise UsageError(f"resample: {key_name(key)} is {fields[key].dtype}, which cannot be {way}")
                ways[key] = way
        for field in fields:
            if field.key[0] == NEXT and field.key[1:] in ways:
                ways[field.key] = ways[field.key[1:]]
        return _BoundResample(replace(fields, rate=self.fps), self, ways, turns)

    @staticmethod
    def _rotation_in(fields: Fields, place: Place, how: str) -> tuple[Key, Place]:
        key = tuple(place.key.split("."))
        if key not in fields or key[0] == NEXT or len(fields[key].shape) != 1 or not is_floating(fields[key].dtype):
            raise UsageError(f"resample: {place.key!r} has no rotations: it is not a field with vectors of floats")
        place = place.resolved(fields[key].shape[0])
        if place.width != rotation(how).width:
            raise UsageError(f"resample: {place} has {place.width} numbers, but {how} has {rotation(how).width}")
        return key, place


def _rate_of(reader: StepReader) -> float | None:
    """Return the rate in the metadata, or that of the median time step; None if neither is known."""
    source = stated_fps(reader)
    if source is None and any(field.key == _TIME for field in reader.fields):
        table, rows = reader.episodes, min(reader.manifest.steps, _ROWS)
        steps = np.diff(reader.read(_TIME, 0, rows).reshape(-1).astype(np.float64))
        within = np.delete(steps, table.start[(table.start > 0) & (table.start < rows)] - 1)
        median = float(np.median(within)) if len(within) else 0.0
        source = 1 / median if median > 0 else None
    return source


def _way_of(field: Field) -> str:
    if field.key in KEPT or (field.key[0] == NEXT and field.dtype == "bool"):
        return "or"
    if _is_reward(field.key):
        return "reward"
    if field.role == "action":
        return "hold"
    fractions = is_floating(field.dtype) and len(field.shape) <= 1 and field.role != "text"
    return "linear" if fractions else "nearest"


class _Grid:
    """The times of the old and of the new steps of an episode.

    `times` has the beginnings of the old steps and the end of the last one, `edges` the same for the `rows` new steps,
    and `into` the new step in which each old step ends. Differences below 1 % of a step count as rounding.
    """

    def __init__(self, times: Array, step: float, fps: float) -> None:
        self.times = np.append(times, times[-1] + step)
        if not (np.diff(self.times) > 0).all():
            raise ResultRefused("the time stamps of an episode do not increase, so it cannot be resampled")
        begin, near = times[0], 0.01 / fps
        self.rows = max(1, math.ceil((self.times[-1] - begin - near) * fps))
        if self.rows > _LONGEST:
            raise ResultRefused(
                f"an episode of {counted(len(times), 'step')} lasts {self.times[-1] - begin:g} s by its time stamps, "
                f"which is {self.rows:,} steps at {fps:g} per second, expected at most {_LONGEST:,}"
            )
        self.edges = begin + np.arange(self.rows + 1) / fps
        after = np.ceil((self.times[1:] - begin - near) * fps) - 1
        self.into = np.clip(after, 0, self.rows - 1).astype(np.int64)
        self._near = min(near, 0.01 * step)

    def at(self, values: Array, times: Array, knots: Array, way: str) -> Array:
        """Return values at some times, given the values at the times `knots`.

        `way` is one of `WAYS`, or a representation of rotations.
        """
        times = np.clip(times, knots[0], knots[-1])
        before = np.clip(np.searchsorted(knots, times + self._near, "right") - 1, 0, len(knots) - 1)
        after = np.minimum(before + 1, len(knots) - 1)
        if way == "hold":
            held: Array = values[before]
            return held
        share = np.clip((times - knots[before]) / np.where(after > before, knots[after] - knots[before], 1), 0, 1)
        if way == "nearest":
            return values[np.where(share > 0.51, after, before)]  # halfway, always the first: clocks have noise
        if way != "linear":
            return between(way, values[before], values[after], share)
        share = share.reshape(-1, *(1,) * (values.ndim - 1))
        low, high = values[before].astype(np.float64), values[after].astype(np.float64)
        found: Array = np.where(share > 0, low + share * (high - low), low)
        return found

    def summed(self, values: Array) -> Array:
        """Return the sums of values over the time of each new step; a value is spread evenly over its old step."""
        total = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, 0, np.float64)])
        return np.diff(self.at(total, self.edges, self.times, "linear"), axis=0)

    def joined(self, values: Array) -> Array:
        """Return the sums of the values of the old steps that end in each new step."""
        found = np.zeros((self.rows, *values.shape[1:]), values.dtype)
        np.add.at(found, self.into, values)
        return found


class _BoundResample(BoundOperation):
    def __init__(
        self,
        fields: Fields,
        asked: Resample,
        ways: Mapping[Key, str],
        turns: Mapping[Key, Sequence[tuple[Place, str]]],
    ) -> None:
        super().__init__(fields)
        self._asked, self._ways, self._turns = asked, ways, turns

    def inputs(self, wanted: frozenset[Key]) -> Iterable[Key]:
        pairs = {other for key in wanted for other in (in_next(key), key[1:] if key[0] == NEXT else key)}
        return {key for key in (*wanted, *pairs, _TIME) if key in self.after}

    def _grids(self, batch: LazyBatch) -> list[tuple[int, int, _Grid]]:
        """Return the first row of each run, the row after its last one, and its times."""
        pieces, found = batch.pieces, []
        source = self._asked.source or self._asked.fps
        for start, rows in zip(pieces.starts.tolist(), pieces.rows.tolist(), strict=True):
            if not rows:
                continue
            if _TIME in self.after:
                times = batch.columns[_TIME].numbers[start : start + rows].reshape(rows).astype(np.float64)
            else:
                times = np.arange(rows) / source
            step = float(np.median(np.diff(times))) if rows > 1 else 1 / source
            found.append((start, start + rows, _Grid(times, step, self._asked.fps)))
        return found

    def pieces(self, batch: LazyBatch) -> Pieces:
        rows = batch.pieces.rows.copy()
        rows[rows > 0] = [grid.rows for _, _, grid in self._grids(batch)]
        return replace(batch.pieces, rows=rows)

    def compute(self, batch: LazyBatch, wanted: frozenset[Key]) -> Columns:
        grids = self._grids(batch)
        found = {}
        for key in wanted:
            parts = [self._of_run(batch, key, start, stop, grid) for start, stop, grid in grids]
            whole = np.concatenate(parts) if parts else batch.columns[key].values
            field = self.after[key]
            found[key] = LazyColumn.given(field.name, field.dtype, whole) if whole.dtype == field.numpy else whole
        return found

    def _of_run(self, batch: LazyBatch, key: Key, start: int, stop: int, grid: _Grid) -> Array:
        way, rows = self._ways[key], slice(start, stop)
        column = batch.columns[key]
        if key == _TIME:
            times: Array = grid.edges[:-1].reshape(-1, *column.shape)
            return times
        if way == "or":
            flags = column.numbers[rows] != 0
            joined: Array = (grid.joined(flags.astype(np.int64)) > 0).astype(column.numbers.dtype)
            return joined
        if way == "reward":
            return grid.joined(_exact(column.numbers[rows]))
        if way == "sum":
            return grid.summed(column.numbers[rows])
        values = column.values if way != "linear" else column.numbers
        if key == _FRAME and self._counts(values[rows]):
            return np.arange(values[start], values[start] + grid.rows)
        root = key[1:] if key[0] == NEXT else key
        if root not in self.after:  # a field only under `next`: its value after the last old step that has ended
            return values[rows][np.maximum(np.searchsorted(grid.into, np.arange(grid.rows), "right") - 1, 0)]
        at, knots = grid.edges[1:] if key[0] == NEXT else grid.edges[:-1], grid.times[:-1]
        known = batch.columns[root].values if way != "linear" else batch.columns[root].numbers
        known = known[rows]
        if in_next(root) in self.after:
            last = batch.columns[in_next(root)]
            final = last.values[stop - 1 : stop] if way != "linear" else last.numbers[stop - 1 : stop]
            known, knots = np.concatenate([known, final]), grid.times
        found = grid.at(known, at, knots, way)
        turned = self._turns.get(root, ())
        if turned:
            if way != "linear":  # linear values are numbers already
                known, found = as_numbers(known, column.dtype), as_numbers(found, column.dtype)
            found = found.astype(np.float64)
        for place, how in turned:
            turns = place.of(known)
            if not is_rotation(turns, how).all():
                raise ResultRefused(f"{place} is not a rotation in {how} everywhere")
            found[:, place.start : place.stop] = grid.at(turns, at, knots, how)
        return found

    @staticmethod
    def _counts(values: Array) -> bool:
        return values.ndim == 1 and values.dtype.kind in "iu" and bool((np.diff(values) == 1).all())


_NEAR = 1e-4
"""How much later than its row, in seconds, lasting language may begin, because time stamps are rounded."""


@dataclass(frozen=True)
class Retime(RowOperation):
    """Sets `timestamp` to `frame / fps`, in seconds, because the clocks of recorders jitter, and LeRobot compares time
    stamps with videos.

    The rate in the metadata becomes `fps`, so that time stamps and windows in seconds agree.
    """

    name: ClassVar[str] = "retime"
    fps: float

    @classmethod
    def from_option(cls, value: Any, discount: Discount) -> Iterable[Operation]:
        return [cls(number_of(value, cls.name))]

    def __post_init__(self) -> None:
        if not 1e-6 <= self.fps <= 1e6:
            raise UsageError(f"--retime is {self.fps:g}, expected frames per second from 1e-06 to 1e+06")

    def settled(self, reader: StepReader, before: Sequence[Operation]) -> Retime:
        """Raise UsageError if language that is stated by time would move to other rows with the new time stamps."""
        keys, table = {field.key for field in reader.fields}, reader.episodes
        for place, text in enumerate(reader.episode_text or ()):
            events, lasting = (parse_said(text.get(name, "[]"), name) for name in (EVENTS, PERSISTENT))
            timed: Said = {at: said for at, said in events.items() if isinstance(at, tuple)}
            since = [one.get("timestamp") for said in lasting.values() for one in said if isinstance(one, dict)]
            begin = np.array([at for at in since if at is not None], np.float64)
            # `resample` states events by time.
            resampled = "resample" in [one.name for one in before] and events.keys() - {None}
            if not (timed or len(begin) or resampled):
                continue
            stays = False
            if {_FRAME, _TIME} <= keys and not resampled:
                rows = int(table.start[place]), int(table.start[place] + table.length[place])
                frames, times = (reader.read(key, *rows).reshape(-1) for key in (_FRAME, _TIME))
                stamps = np.asarray(frames, np.float64) / self.fps
                before_and_after = [
                    (said_in_rows(timed, frames, at), (at[:, None] + _NEAR >= begin).tolist()) for at in (times, stamps)
                ]
                stays = before_and_after[0] == before_and_after[1]
            if not stays:
                raise UsageError(
                    f"--retime {self.fps:g} would move the language of episode {table.episode[place]} to other rows: "
                    f"its {PERSISTENT if len(begin) else EVENTS} are stated by time, and time stamps change",
                    hint="run retime first, and resample on its result" if resampled else "",
                )
        return self

    def documents(self, documents: Mapping[str, bytes]) -> Mapping[str, bytes]:
        return at_rate(documents, self.fps)

    def plan(self, fields: Fields) -> BoundOperation:
        if _FRAME not in fields or fields[_FRAME].shape:
            raise UsageError("--retime needs the field frame, the number of each row in its episode")
        known = fields.by_key.get(_TIME)
        kept = known is not None and is_floating(known.dtype) and known.dtype != "bfloat16" and not known.shape
        field = known if known is not None and kept else Field(_TIME, "float32", (), "info")

        def stamps(inputs: Sequence[LazyColumn]) -> Array:
            # Not cast here, so that values too large for the field's type are refused instead of becoming infinite.
            found: Array = np.asarray(inputs[0].numbers, np.float64) / self.fps
            return found

        after = fields.replaced({_TIME: field}, made=[] if known else [_TIME])
        return FieldChanges(after, {_TIME: Derivation((_FRAME,), stamps)})
