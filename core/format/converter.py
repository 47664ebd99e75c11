"""The contracts that a converter implements: `Reader`, `Source` and `Sink`.

A `Reader` turns a path in a foreign format into episodes; final steps without a next observation are handled here. A
`Source` is a remote catalogue: which datasets exist, of which files they consist, and how to get them. It passes a
folder of fetched files to the `Reader` of the same name, and uses the network only in `ids`, `catalogue`, `describe`
and `fetch`. A `Sink` writes the chosen episodes of a dataset in another format.
"""

from __future__ import annotations

import difflib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, TypeAlias, final, get_args

import numpy as np

from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, SchemaError, UsageError
from ..progress import some_of
from ..ted.episodes import Final
from ..ted.schema import REWARD, Field, Key, Timing, is_real, key_name
from . import fs
from .contracts import (
    Array,
    Closing,
    EpisodeBlock,
    Piece,
    SourceFacts,
    SourceMetadata,
    StepReader,
    completed_block,
    form_of,
    own_attributes,
    refuse_overrides,
    require_block,
    require_truths,
)
from .documents import written_time
from .episodes import EpisodeRanges, EpisodeRow, EpisodeTable, select_episodes
from .files import digests_in, file_state, understood
from .manifest import Dropped
from .returns import EpisodeSummary, table_with_returns
from .videos import refuse_videos


def completed(pieces: Iterable[Piece], choice: str, fields: Sequence[tuple[Field, Timing]]) -> Iterator[Piece]:
    """Keep or drop the last step of each episode that has no observation after it, according to `--final-step`.

    A step that is kept gets the last observation again as its next one. If it is left out, the step before it becomes
    the truncated end, and an episode of that single step has no pieces at all. `completed_block` applies the same rule
    to many episodes at once.

    One piece is held back: if the next piece consists of a single step that is left out, the held one is the end.
    Pieces may lack columns.
    """
    held: Piece | None = None
    for piece in pieces:
        if not piece.last:
            if held is not None:
                yield held
            held = piece
            continue
        found = _completed(piece, choice, fields)
        if held is not None:
            yield held if found is not None else _ended(held)
        if found is not None:
            yield found
        held = None
    if held is not None:
        yield held


def _completed(piece: Piece, choice: str, fields: Sequence[tuple[Field, Timing]]) -> Piece | None:
    if not piece.is_unfinished:
        return piece
    states = {field.key for field, timing in fields if timing == "state"}
    if choice == "repeat" or (choice == "auto" and bool(piece.terminated[-1])):
        columns = {
            key: np.concatenate((rows, rows[-1:])) if key in states and key not in piece.next else rows
            for key, rows in piece.columns.items()
        }
        return replace(piece, columns=columns, final=Final.REPEATED)
    count = len(piece) - 1
    if not count:
        return None

    def kept(key: Key, rows: Array) -> Array:
        return rows if key in states and key not in piece.next else rows[:count]

    return _ended(
        replace(
            piece,
            columns={key: kept(key, rows) for key, rows in piece.columns.items()},
            next={key: rows[:count] for key, rows in piece.next.items()},
            terminated=piece.terminated[:count],
            truncated=piece.truncated[:count],
        )
    )


def _ended(piece: Piece) -> Piece:
    """Return the piece as the truncated end of its episode."""
    truncated = piece.truncated.copy()
    truncated[-1] = True
    return replace(piece, truncated=truncated, last=True, final=Final.DROPPED)


def rest_of_episode(piece: Piece, following: Iterator[EpisodeBlock | Piece]) -> Iterator[Piece]:
    """Yield a piece and those after it up to the last of its episode."""
    yield piece
    while not piece.last:
        part = next(following, None)
        if part is None:
            return
        if isinstance(part, EpisodeBlock):
            raise FormatError(f"episode {piece.episode} came with a block before its last piece")
        piece = part
        yield piece


def require_piece(piece: Piece, whole: SourceFacts, what: str, *, complete: bool) -> None:
    """Raise FormatError for a piece that contradicts the facts of the source.

    `complete` states that it has to have all fields; `what` names it in messages.
    """
    steps = len(piece)
    if not steps:
        raise FormatError(f"{what} came with a piece without steps")
    if piece.is_unfinished and not whole.final_missing:
        raise FormatError(
            f"{what} has no observation after its last step, and the facts do not state that one may lack"
        )
    for name, flags in (("terminated", piece.terminated), ("truncated", piece.truncated)):
        if flags.dtype != bool or flags.shape != (steps,):
            raise FormatError(f"{what}: {name} is {form_of(flags)}, expected bool [{steps}]")
        require_truths(flags, name, what)
    known = {field.key: (field, timing) for field, timing in whole.fields}
    odd = piece.columns.keys() ^ known.keys() if complete else piece.columns.keys() - known.keys()
    odd = odd | {key for key in piece.next if key not in known or known[key][1] != "state"}
    if odd:
        raise FormatError(f"{what} came with other fields than the facts name: {', '.join(sorted(map(key_name, odd)))}")
    expected = [(key, rows, piece.rows_of(key, known[key][1])) for key, rows in piece.columns.items()]
    expected += [(key, rows, steps) for key, rows in piece.next.items()]
    for key, rows, count in expected:
        field = known[key][0]
        if rows.dtype != field.numpy or rows.shape[1:] != field.shape:
            raise FormatError(
                f"{what}: {key_name(key)!r} is {form_of(rows)}, expected {field.dtype} {list(field.shape)} a row"
            )
        if len(rows) != count:
            raise FormatError(f"{what}: {key_name(key)!r} has {len(rows)} rows for {steps} steps, expected {count}")
        require_truths(rows, key_name(key), what)


FinalStep: TypeAlias = Literal["auto", "drop", "repeat"]
"""`auto`: a terminated last step is kept, and its next observation repeats the last one, for no target bootstraps
from it; any other is left out, and the step before it becomes the truncated end, unless the source keeps all of them
(`SourceFacts.keeps_last`). `drop` leaves all of them out, `repeat` keeps all of them."""
FINAL_STEPS: tuple[FinalStep, ...] = get_args(FinalStep)


def require_final_step(name: str) -> FinalStep:
    """Return the choice of that name, or raise UsageError."""
    for known in FINAL_STEPS:
        if name == known:
            return known
    raise UsageError(f"--final-step is {name!r}, expected one of {', '.join(FINAL_STEPS)}")


@dataclass(frozen=True, slots=True)
class ReaderRecipe:
    """How to open a reader again, in any process.

    `facts` and `state` are the results of a survey, None if unknown; `files` has the state of each file.
    """

    kind: type[Reader]
    path: Path
    final_step: FinalStep
    options: Mapping[str, Any]
    facts: SourceFacts | None
    state: Any
    files: Mapping[Path, tuple[int, ...]]

    def open(self) -> Reader:
        """Open the reader; raises what that raises."""
        return self.kind.of_recipe(self)

    def require_unchanged(self) -> None:
        """Raise CorruptDataError if a file was changed or replaced since."""
        for file, state in self.files.items():
            if file_state(file)[1:] != state[1:]:  # without the device, whose number differs between machines
                raise CorruptDataError(f"{file} was changed or replaced while it was read", hint="run it again")


_FINAL_OF_READERS = {
    "__init__": "on_open", "facts": "survey", "stated": "survey", "pieces": "read_episode",
    "blocks": "read_episodes", "recipe": "survey_state", "of_recipe": "take_survey",
    "episode_table": "read_outcomes", "digests": "files", "size": "files", "close": "on_close",
}  # fmt: skip
"""The final methods of a reader, each with the method that a subclass implements instead."""


class Reader(Closing, ABC):
    """Reads one dataset in a foreign format; memory is bounded by a piece.

    The public methods are final: they open once, validate every piece, apply `final_step` to last steps without an
    observation after them, turn errors of libraries about damaged files into CorruptDataError, and close. A subclass
    implements these:

    - `recognises(path)`: whether a path has this format, by content and not by name.
    - `on_open()`: open the files at `self.path`; optional.
    - `survey(progress)`: the facts of the whole source.
    - `read_episode(number)`: the pieces of one episode, each of bounded size.
    - `files()`: the files of the source below `self.folder`.
    - `on_close()`: close what `on_open` opened; optional.

    and may implement

    - `read_episodes`, if many short episodes can be read together;
    - `read_outcomes`, if rewards and flags can be read without the other fields;
    - `notes_on`, `videos_of` and `require_sound`, if they depend on the chosen episodes;
    - `verify_read`, if the files have checksums;
    - `stated_metadata`, if the source has files of metadata.

    `option_names` has the names of the options that a format takes, and `self.options` their values.
    `core.testing.readers` has the tests of the contract.
    """

    path: Path
    option_names: ClassVar[frozenset[str]] = frozenset()
    """Names of the options that the format takes: `horizon` is `--horizon` of the command line."""
    survey_workers: int = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_overrides(cls, own_attributes(cls, Reader), _FINAL_OF_READERS)

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether `path` looks like this format. Must be cheap; raises OSError only where the disk fails."""

    def on_open(self) -> None:
        """Open the dataset at `self.path`, or raise FormatError."""

    @abstractmethod
    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts of all episodes from a pass over structure and text, not over the arrays.

        Called once. `progress` is called with the number of episodes examined since its last call; `survey_workers`
        threads may help."""

    @abstractmethod
    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode in pieces of bounded size."""

    def read_episodes(self, numbers: Sequence[int]) -> Iterator[EpisodeBlock | Piece]:
        """Yield the steps of these episodes in this order: blocks of whole episodes, or the pieces of one episode.

        Both have bounded size. For formats that store all episodes in one table, where reading thousands of episodes
        together takes as long as reading a few.
        """
        for number in numbers:
            yield from self.read_episode(number)

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield pieces of one episode whose columns may lack all fields but the reward, for the episode table.

        Not for sources with `Piece.next`, where all next rows are needed to find out whether they are explicit.
        """
        yield from self.read_episode(number)

    @abstractmethod
    def files(self) -> Iterable[Path]:
        """Return the files of the source, all below `self.folder`."""

    def notes_on(self, numbers: Sequence[int]) -> Sequence[str]:
        """Return sentences about these episodes that a user should read, in addition to the notes of the facts."""
        return ()

    def videos_of(self, numbers: Sequence[int]) -> Mapping[str, Path | bytes]:
        """Return the files of kept videos that these episodes refer to, as in `SourceFacts.videos`."""
        return {}

    def stated_metadata(self, *, files: bool = False) -> SourceMetadata | None:
        """Return the contents of the metadata files, without reading rows; None for a source that has no such files.

        With `files`, also check that all files exist and have the stated length.
        """
        return None

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise FormatError or CorruptDataError if one of these episodes cannot be read.

        With `everything` all episodes were requested, and the source also has to agree with its own totals.
        """

    def verify_read(self) -> None:
        """Raise CorruptDataError if what was read is damaged; called once the requested episodes were read.

        For formats whose checksums cover more than an episode, such as members of a zip file.
        """

    def on_close(self) -> None:
        """Close what `on_open` opened."""

    def survey_state(self) -> Any:
        """Return the attributes that `survey` set, to be pickled for another reader; None if that one has to survey."""
        return None

    def take_survey(self, state: Any) -> None:
        """Set the attributes that `survey` would set, from the `survey_state` of another reader of the same source."""

    @property
    def folder(self) -> Path:
        """The folder to which the names of the files are relative: the path itself, or the folder of a single file."""
        return self.path if self.path.is_dir() else self.path.parent

    @final
    def __init__(self, path: Path, *, final_step: str = "auto", options: Mapping[str, Any] | None = None) -> None:
        """Open the dataset at `path`, or raise FormatError or DatasetNotFoundError.

        `final_step` (`auto`, `drop`, `repeat`) chooses how last steps without an observation after them are treated.
        UsageError for `options` that the format does not have.
        """
        self.final_step: FinalStep = require_final_step(final_step)
        self.options: Mapping[str, Any] = dict(options or {})
        for name in self.options.keys() - self.option_names:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{path} is in a format that has no option {option}", hint=f"leave out {option}")
        self.path = path
        self.__facts: SourceFacts | None = None
        self.__numbers: frozenset[int] | None = None
        self.__closed = False
        if not path.exists():
            raise DatasetNotFoundError(f"{path} not found")
        with understood(path):
            self.on_open()
        self.__state = file_state(path) if path.is_file() else None

    @final
    def facts(
        self, selection: EpisodeRanges | None = None, *, progress: Callable[[int], None] | None = None
    ) -> SourceFacts:
        """Return what is known about the source before any step is read.

        With a selection, `episode_numbers`, `steps`, `lengths` and `notes` describe the selected episodes, and only
        these have to be sound; the fields describe the whole source. Without one, the source must agree with its
        totals. `progress` is called with the number of episodes examined since its last call. UsageError for episodes
        that do not exist.
        """
        whole = self.__survey(progress)
        numbers = whole.episode_numbers if selection is None else select_episodes(selection, whole.episode_numbers)
        self.require_sound(numbers, everything=selection is None)
        notes, steps, lengths = [*whole.notes, *self.notes_on(numbers)], whole.steps, whole.lengths
        if whole.final_missing and self.final_step != "repeat":
            kept = self.__without_last_steps(whole, numbers)
            notes += [_left_out_note(sorted(left))] if (left := set(numbers) - kept.keys()) else []
            numbers, steps, lengths = list(kept), sum(kept.values()), list(kept.values())
        elif selection is not None:
            lengths = self.__lengths(whole, numbers)
            steps = sum(lengths)
        found = replace(whole, episode_numbers=numbers, steps=steps, lengths=lengths, notes=tuple(notes))
        return replace(found, videos=self.videos_of(numbers))

    @final
    def stated(self, *, progress: Callable[[int], None] | None = None) -> SourceFacts:
        """Return the facts of all episodes of the source, whether they can be read or not."""
        return self.__survey(progress)

    @final
    def pieces(self, episodes: Sequence[int] | None = None) -> Iterator[Piece]:
        """Yield the steps of these episodes (by default all), in pieces of bounded size, each validated.

        Raises:
            UsageError: an episode does not exist.
            FormatError: a piece contradicts the facts.
        """
        whole = self.__survey(None)
        numbers = self.__known(whole, episodes)
        self.require_sound(numbers, everything=False)
        for number in numbers:
            found = self.__validated(whole, number, self.read_episode(number), complete=True)
            yield from self.__completed(whole, found)
        self.verify_read()

    @final
    def blocks(self, episodes: Sequence[int] | None = None) -> Iterator[EpisodeBlock | Piece]:
        """Yield the steps of these episodes as `pieces` does, many episodes together where the format reads them so.

        Every state of a block has its `next`. Raises what `pieces` raises.
        """
        whole = self.__survey(None)
        numbers = self.__known(whole, episodes)
        self.require_sound(numbers, everything=False)
        given, done = self.__parts(numbers), 0
        for part in given:
            if isinstance(part, EpisodeBlock):
                stop = done + len(part.episodes)
                require_block(part, numbers[done:stop], whole, str(self.path))
                block = completed_block(part, _kept_ends(part, self.final_step), whole.fields)
                if block is not None:
                    yield block
                done = stop
            elif done < len(numbers):
                found = self.__validated(whole, numbers[done], rest_of_episode(part, given), complete=True)
                yield from self.__completed(whole, found)
                done += 1
            else:
                raise FormatError(f"{self.path} came with a piece of episode {part.episode}, expected another")
        if done < len(numbers):
            raise FormatError(f"{self.path}: episode {numbers[done]} has no steps")
        self.verify_read()

    @final
    def episode_table(self, episodes: Sequence[int] | None = None) -> EpisodeTable:
        """Summarise these episodes (all by default), as a conversion would."""
        whole = self.__survey(None)
        numbers = self.__known(whole, episodes)
        self.require_sound(numbers, everything=False)
        return self.__table(whole, numbers)

    @final
    def digests(self) -> dict[str, str]:
        """Digest of every source file by its path inside `folder`."""
        return digests_in(self.folder, self.files())

    @final
    def size(self) -> int:
        """Bytes of the source's files."""
        return sum(path.stat().st_size for path in self.files())

    @final
    def recipe(self) -> ReaderRecipe:
        """Return a recipe to open another reader of this source, in any process."""
        state = self.survey_state()
        facts = None if state is None else self.__facts
        files = {file: file_state(file) for file in self.files()}
        if self.__state is not None:
            files[self.path] = self.__state
        return ReaderRecipe(type(self), self.path, self.final_step, self.options, facts, state, files)

    @final
    @classmethod
    def of_recipe(cls, recipe: ReaderRecipe) -> Self:
        """Open the source of a recipe, without another survey if the recipe has the results of the first one.

        CorruptDataError if a file was changed or replaced since.
        """
        found = cls(recipe.path, final_step=recipe.final_step, options=recipe.options)
        try:
            recipe.require_unchanged()
        except BaseException:
            found.close()
            raise
        if recipe.facts is not None:
            found.take_survey(recipe.state)
            found.__facts = recipe.facts
        return found

    @final
    def close(self) -> None:
        """Close the files; harmless when done twice."""
        if not self.__closed:
            self.__closed = True
            self.on_close()

    def __survey(self, progress: Callable[[int], None] | None) -> SourceFacts:
        if self.__facts is None:
            with understood(self.path):
                found = self.survey(progress or (lambda episodes: None))
            if found.lengths is not None and len(found.lengths) != len(found.episode_numbers):
                raise FormatError(
                    f"{self.path}: {len(found.episode_numbers)} episodes and {len(found.lengths)} lengths were found"
                )
            for field, _ in found.fields:
                if field.key == REWARD and not is_real(field.dtype):
                    raise FormatError(f"{self.path}: rewards are {field.dtype}, expected real numbers")
            if found.keeps_last and self.final_step == "auto":
                self.final_step = "repeat"
            self.__facts = found
        return self.__facts

    def __parts(self, numbers: Sequence[int]) -> Iterator[EpisodeBlock | Piece]:
        with understood(self.path):
            yield from self.read_episodes(numbers)

    def __known(self, whole: SourceFacts, episodes: Sequence[int] | None) -> Sequence[int]:
        if episodes is None:
            return whole.episode_numbers
        if self.__numbers is None:
            self.__numbers = frozenset(whole.episode_numbers)
        for number in episodes:
            if number not in self.__numbers:
                raise UsageError(f"{self.path} has no episode {number}")
        return episodes

    def __lengths(self, whole: SourceFacts, numbers: Sequence[int]) -> list[int]:
        if whole.lengths is None:
            return [int(length) for length in self.__table(whole, numbers).length]
        by_number = dict(zip(whole.episode_numbers, whole.lengths, strict=True))
        return [by_number[number] for number in numbers]

    def __without_last_steps(self, whole: SourceFacts, numbers: Sequence[int]) -> dict[int, int]:
        """Return the lengths of these episodes, by number, after `final_step` was applied; empty ones are left out."""
        if whole.last_terminated is None or whole.lengths is None:
            table = self.__table(whole, numbers)
            return dict(zip(table.episode.tolist(), table.length.tolist(), strict=True))
        repeats = self.final_step == "auto"
        known = zip(whole.episode_numbers, whole.lengths, whole.last_terminated, strict=True)
        found = {number: length - (not (repeats and terminated)) for number, length, terminated in known}
        return {number: found[number] for number in numbers if found[number]}

    def __table(self, whole: SourceFacts, numbers: Sequence[int]) -> EpisodeTable:
        rows = (self.__row(whole, number) for number in numbers)
        return EpisodeTable.from_rows([row for row in rows if row is not None])

    def __row(self, whole: SourceFacts, number: int) -> EpisodeRow | None:
        summary: EpisodeSummary | None = None
        found = self.__validated(whole, number, self.read_outcomes(number), complete=False)
        for piece in self.__completed(whole, found):
            summary = EpisodeSummary(piece) if summary is None else summary
            summary.add(piece)
            if piece.last:
                return summary.row(piece)
        return None

    def __completed(self, whole: SourceFacts, pieces: Iterator[Piece]) -> Iterator[Piece]:
        return completed(pieces, self.final_step, whole.fields) if whole.final_missing else pieces

    def __validated(
        self, whole: SourceFacts, number: int, pieces: Iterator[Piece], *, complete: bool
    ) -> Iterator[Piece]:
        """Raise FormatError for pieces that contradict the facts; `complete` states that they have all fields."""
        last: Piece | None = None
        for piece in _with_damage_named(self.path, pieces):
            what = f"{self.path}: episode {number}"
            if piece.episode != number:
                raise FormatError(f"{what} came with a piece of episode {piece.episode}")
            if piece.first != (last is None) or (last is not None and last.last):
                raise FormatError(f"{what} came with pieces that do not mark where it starts and ends")
            require_piece(piece, whole, what, complete=complete)
            last = piece
            yield piece
        if last is None or not last.last:
            raise FormatError(f"{self.path}: episode {number} {'has no steps' if last is None else 'has no end'}")


def refuse_damaged(numbers: Iterable[int], damaged: Mapping[int, RbtoolError]) -> None:
    """Raise the error of the first of these episodes that cannot be read; `damaged` has errors by episode number."""
    for number in numbers if damaged else ():
        if number in damaged:
            raise damaged[number]


def _kept_ends(block: EpisodeBlock, final_step: FinalStep) -> Array:
    """Return for each episode whether its last step is kept although no observation follows it."""
    if final_step == "auto":
        return np.asarray(block.terminated[block.stops - 1])
    return np.full(len(block.episodes), final_step == "repeat")


def _with_damage_named(path: Path, pieces: Iterator[Piece]) -> Iterator[Piece]:
    with understood(path):
        yield from pieces


def _left_out_note(numbers: Sequence[int]) -> str:
    names = some_of(numbers, 10)
    which = f"episode {names} is" if len(numbers) == 1 else f"{len(numbers)} episodes ({names}) are"
    return f"{which} left out: one step, without an observation after it (--final-step repeat keeps it)"


class PartsReader(Reader, ABC):
    """A reader of a source that a stream reads part by part.

    A subclass may implement `shard_starts`, `evidence` and `settled`, with `settled_names`.
    """

    settled_names: ClassVar[frozenset[str]] = frozenset()
    """Options whose default, `auto`, depends on all episodes, so that single parts could decide differently."""

    def shard_starts(self) -> Sequence[int] | None:
        """Return the first episode of each part in which a stream reads the source; None if it has no parts.

        Called after the survey. The numbers ascend, and need not be numbers of episodes.
        """
        return None

    def evidence(self) -> Mapping[str, int]:
        """Return counts that decide the options of `settled_names`; the counts of several parts are added."""
        return {}

    @classmethod
    def settled(cls, evidence: Mapping[str, int]) -> tuple[dict[str, str], bool]:
        """Return the options that such counts decide, and whether the counts of more parts would hardly change them."""
        return {}, True


Advance: TypeAlias = Callable[[int], None]
"""Is called with the number of additional bytes; negative if bytes turn out to be wrong."""
Note: TypeAlias = Callable[[str], None]
"""Is called with a sentence about a failure after which something is tried again."""


_LONGEST_ID = 200  # leaves room for the parts that file names add
_ODD = re.compile("[\0\ud800-\udfff]")


def safe_id(name: str) -> str:
    """Return a dataset id that cannot leave its folder, or raise UsageError."""
    parts = name.split("/")
    if not name or name.startswith(("/", "~")) or "\\" in name or _ODD.search(name) or re.match("[A-Za-z]:", name):
        raise UsageError(f"{name!r} is not a dataset id: ids are relative, like D4RL/door/human-v2")
    if len(name.encode()) > _LONGEST_ID:
        raise UsageError(f"{name[:40]}… is not a dataset id: ids have at most {_LONGEST_ID} bytes")
    if any(part in {"", ".", ".."} or part.startswith(".") for part in parts):
        raise UsageError(f"{name!r} is not a dataset id: no part of an id may be empty or begin with a dot")
    return name


@dataclass(frozen=True, slots=True)
class LocalCache:
    """A source's cache: the environment variable that names its folder, and the folder if that is not set."""

    source: str
    variable: str
    default: str

    @property
    def folder(self) -> Path:
        """The folder that holds `<id>`."""
        try:
            return fs.expanded(os.environ.get(self.variable) or self.default).absolute()
        except UsageError as error:
            error.hint = f"set {self.variable}, or HOME"
            raise

    def find(self, dataset_id: str, reader: type[Reader]) -> Path:
        """Return the folder of a dataset, or raise DatasetNotFoundError that names the folder searched."""
        path = self.folder / safe_id(dataset_id)
        if reader.recognises(path):
            return path
        raise DatasetNotFoundError(
            f"the local {self.source} cache {self.folder} has no dataset {dataset_id!r}: looked in {path}",
            hint=self._near(dataset_id, reader),
        )

    def ids(self, reader: type[Reader]) -> Iterator[str]:
        """Ids of all datasets in the cache."""
        for folder, names, _ in os.walk(self.folder):
            names[:] = sorted(name for name in names if not name.startswith("."))
            path = Path(folder)
            if path != self.folder and reader.recognises(path):
                names.clear()
                yield path.relative_to(self.folder).as_posix()

    def _near(self, dataset_id: str, reader: type[Reader]) -> str:
        known = list(self.ids(reader))
        bare = re.sub(r"-v\d+$", "", dataset_id)
        versions = [name for name in known if re.fullmatch(re.escape(bare) + r"-v\d+", name)]
        near = versions or difflib.get_close_matches(dataset_id, known, n=3, cutoff=0.4)
        if near:
            return f"there {'is' if len(near) == 1 else 'are'} {', '.join(near)}"
        return f"{self.variable} names the folder, if it is another; `rbtool convert PATH DEST` takes any path"


_FINAL_OF_SOURCES = {
    "ids": "list_ids", "catalogue": "list_catalogue", "describe": "look_up", "needed": "choose_files",
    "fetch": "download", "close": "on_close",
}  # fmt: skip
"""The final methods of a source, each with the method that a subclass implements instead."""


class StaleListing(DatasetNotFoundError):
    """The remote no longer has a file that it listed; the caller has to describe the dataset again."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a remote dataset.

    Attributes:
        path: relative to the dataset's folder, with `/` between its parts.
        checksum: the remote's checksum of the bytes: `sha256:…`, `git-sha1:…` (of the git blob), `md5:…` or `crc32c:…`
            in lower-case hex. None if there is none, as for plain URLs; then the file is only verified by its size, and
            the manifest records that.
        size: in bytes; None if the remote does not state it, which is only allowed without a checksum.
        addresses: from where it can be fetched, in the order in which to try them.
        version: a text that changes with the bytes, such as an ETag; None if there is none, or a checksum instead.
    """

    path: str
    size: int | None
    checksum: str | None
    addresses: tuple[str, ...]
    version: str | None = None

    @property
    def known_size(self) -> int:
        """The size; FormatError for a file with a checksum and without a size, 0 for one that has neither."""
        if self.size is None and self.checksum is not None:
            raise FormatError(f"the remote lists {self.path!r} with a checksum and without a size")
        return self.size or 0

    def is_same_as(self, other: RemoteFile) -> bool:
        """Whether both are certainly the same bytes: by checksum, else by size and version, which must be known."""
        if self.checksum is not None or other.checksum is not None:
            return self.checksum == other.checksum
        return self.version is not None and (self.size, self.version) == (other.size, other.version)


@dataclass(frozen=True, slots=True)
class RemoteDataset:
    """One dataset at one state of the remote.

    Attributes:
        address: where it is, for people: `hf://ORGANISATION/REPOSITORY@9f31c2e…/door/human-v2`.
        revision: the exact state, which can be requested from the remote again; None if it keeps no history.
        steps, episodes: what the source's own metadata claims; None if it does not say.
    """

    id: str
    address: str
    revision: str | None
    files: tuple[RemoteFile, ...]
    steps: int | None = None
    episodes: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all files whose size is known."""
        return sum(file.known_size for file in self.files)

    @property
    def checksums(self) -> dict[str, str]:
        """The remote's checksum of every file that has one, by its path."""
        return {file.path: file.checksum for file in self.files if file.checksum is not None}

    @property
    def unverified(self) -> tuple[str, ...]:
        """Paths of the files for which the remote gives no checksum."""
        return tuple(file.path for file in self.files if file.checksum is None)

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all files."""
        return tuple(file.path for file in self.files)


@dataclass(frozen=True, slots=True)
class RemoteShard:
    """A part of a remote dataset that can be read alone: its files, including metadata.

    `episodes` are the numbers of its episodes, `A:B` or several of these; None if it has all episodes in its files,
    which are then numbered from 0 in each shard. With a `span` it is the part of its only file that begins in these
    bytes.
    """

    files: tuple[RemoteFile, ...]
    episodes: str | None = None
    span: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Ids:
    """Ids of all datasets of a remote, sorted; `problems` has a sentence for each part that could not be read.

    `unreachable` states that some of these parts may be readable another time, so that an unlisted dataset may exist.
    """

    ids: tuple[str, ...]
    problems: tuple[str, ...] = ()
    unreachable: bool = False


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """What a catalogue states about one dataset; None for what the remote does not state.

    `state` is a text that changes when the dataset does; if it is unchanged, a later listing can reuse the entry.
    """

    id: str
    bytes: int | None = None
    steps: int | None = None
    episodes: int | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All datasets of a remote, ordered by id, as they were at `fetched` (UTC, ISO 8601).

    `problems` and `unreachable` are explained at `Ids`.
    """

    remote: str
    fetched: str
    entries: tuple[CatalogueEntry, ...]
    problems: tuple[str, ...] = ()
    unreachable: bool = False


class Source(Closing, ABC):
    """A remote catalogue of datasets in one format.

    The public methods are final. A subclass implements these:

    - `remote`: the remote that is used, as text for people; a class attribute or a property.
    - `list_ids()`: the ids of all datasets.
    - `look_up(dataset_id, revision, totals)`: the files of one dataset.
    - `download(files, folder, progress, note)`: bring files to a folder; `core.remote.fetch_files` does that.

    and may implement `key`, `list_catalogue`, `choose_files`, `files_read`, `episode_numbers`, `reader_options`,
    `on_close`, and for streams `shards`, `lacking`, `fetch_part`, `episode_number`. `core.remote.HttpSource` is a base
    class for sources of plain URLs, with less to implement; `core.testing.sources` has the tests of the contract.

    Every method that talks to the network raises NetworkError (also where the network is forbidden),
    AuthorisationError, DatasetNotFoundError, or FormatError for answers that make no sense.
    """

    name: ClassVar[str]
    """Name of the source, and of the reader for the files that it fetches."""

    local_cache: ClassVar[LocalCache | None] = None
    """The cache of the source's own tools."""

    namespaced: ClassVar[bool] = True
    """Whether ids have a namespace, like `D4RL/door/human-v2`; an id without one may be an older name."""

    open_ended: ClassVar[bool] = False
    """Whether an id with an owner, `OWNER/NAME`, need not be listed, because no list has all datasets."""

    pickled: ClassVar[bool] = False
    """Whether nothing can be read without unpickling; then downloads need `trust_pickle`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_overrides(cls, own_attributes(cls, Source), _FINAL_OF_SOURCES)

    @property
    @abstractmethod
    def remote(self) -> str:
        """The remote in use, which the environment may choose: `hf://ORGANISATION`."""

    @property
    def key(self) -> str:
        """A text that identifies the remote including its host, and names the cached catalogue. Default: `remote`."""
        return self.remote

    @abstractmethod
    def list_ids(self) -> Ids:
        """Return the ids of all datasets, with as few requests as possible."""

    def list_catalogue(self, known: Catalogue | None, progress: Callable[[int, int], None]) -> Catalogue:
        """Return all datasets with what the remote states about them; the default only gives their ids.

        Entries of `known` whose state is unchanged need not be requested again. `progress` is called with the number of
        datasets that are done, and their total number.
        """
        found = self.ids()
        entries = tuple(CatalogueEntry(one) for one in found.ids)
        progress(len(entries), len(entries))
        return Catalogue(self.remote, written_time(), entries, found.problems, found.unreachable)

    @abstractmethod
    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Return the files of exactly this dataset, at a branch, tag or commit (None: the newest).

        Its steps and episodes are only needed with `totals`. DatasetNotFoundError if the id does not exist.
        """

    def choose_files(self, dataset: RemoteDataset, episodes: EpisodeRanges) -> Sequence[RemoteFile]:
        """Return the files that hold these episodes and all metadata; all files by default."""
        return dataset.files

    def files_read(self, files: Sequence[RemoteFile], options: Mapping[str, Any]) -> Sequence[RemoteFile]:
        """Return the files that the reader opens with these options; by default all."""
        return files

    def shards(self, dataset: RemoteDataset, folder: Path) -> Sequence[RemoteShard]:
        """Return the parts of a dataset that a stream reads one after another; by default a single part.

        Files that have to be fetched to find the shards are put into `folder`, and not fetched again for each shard.
        """
        return [RemoteShard(dataset.files)]

    def lacking(self, dataset: RemoteDataset) -> Sequence[RbtoolError]:
        """Return errors about files that the dataset should have and the remote does not have; none by default."""
        return ()

    def episode_number(self, text: Mapping[str, str]) -> int | None:
        """Return an episode's number in the whole dataset, given its texts; None if they do not state it.

        For sources whose `shards` number their episodes from 0.
        """
        return None

    def fetch_part(self, shard: RemoteShard, folder: Path) -> bool:
        """Fetch a shard with a `span` into `folder`, as a file of its own; return whether any episode begins in it.

        Raises what `fetch` raises. For sources whose `shards` have such parts.
        """
        raise NotImplementedError(f"{self.name} has no shards that are parts of files")

    @abstractmethod
    def download(self, files: Sequence[RemoteFile], folder: Path, progress: Advance, note: Note) -> None:
        """Fetch the files into `folder`, as `fetch` promises."""

    def episode_numbers(self, dataset: RemoteDataset) -> Sequence[int] | None:
        """Return the numbers of its episodes, ascending, where the names of its files give them; else None."""
        return None

    def reader_options(self, dataset_id: str) -> Mapping[str, Any]:
        """Return the reader's options (of its `option_names`) for the files of a dataset; none by default."""
        return {}

    def on_close(self) -> None:
        """Close connections."""

    @final
    def ids(self) -> Ids:
        """List the ids, sorted. FormatError for a remote that lists one twice."""
        found = self.list_ids()
        if len(set(found.ids)) < len(found.ids):
            twice = next(one for one in found.ids if found.ids.count(one) > 1)
            raise FormatError(f"{self.remote} lists {twice!r} twice")
        return found if list(found.ids) == sorted(found.ids) else replace(found, ids=tuple(sorted(found.ids)))

    @final
    def catalogue(
        self, known: Catalogue | None = None, *, progress: Callable[[int, int], None] | None = None
    ) -> Catalogue:
        """List all datasets with their sizes, steps and episodes, as far as the remote states them."""
        return self.list_catalogue(known, progress or (lambda done, total: None))

    @final
    def describe(self, dataset_id: str, revision: str | None = None, *, totals: bool = False) -> RemoteDataset:
        """Find the files of exactly this dataset; FormatError if the remote answers with another one."""
        found = self.look_up(dataset_id, revision, totals)
        if found.id != dataset_id:
            raise FormatError(f"{self.remote} answered with {found.id!r}, expected {dataset_id!r}")
        return found

    @final
    def needed(
        self,
        dataset: RemoteDataset,
        episodes: EpisodeRanges | None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> Sequence[RemoteFile]:
        """Choose the files with these episodes and all metadata that the reader opens with these options."""
        chosen = dataset.files if episodes is None else self.choose_files(dataset, episodes)
        chosen = self.files_read(chosen, options)
        if not {file.path for file in chosen} <= set(dataset.paths):
            raise FormatError(f"files were chosen that {dataset.address} does not have")
        return chosen

    @final
    def fetch(
        self,
        files: Sequence[RemoteFile],
        folder: Path,
        *,
        progress: Advance | None = None,
        note: Note | None = None,
    ) -> None:
        """Fetch the files to `folder` and verify each; files that already exist and are sound are not fetched again.

        `progress` is called with the number of additional sound bytes, including existing ones; `note` is called with a
        sentence about each failure that is retried. An interrupted fetch keeps its files, and the next one resumes.

        Raises:
            OutOfSpaceError: the disk is full.
            CorruptDataError: the bytes of a file never match its checksum.
            StaleListing: the remote has changed since it was described.
            FormatError: a file is missing in the end.
        """
        self.download(files, folder, progress or (lambda amount: None), note or (lambda text: None))
        for file in files:
            path = folder / file.path
            if not path.is_file() or file.size not in (None, path.stat().st_size):
                raise FormatError(f"{self.name} did not bring {file.path} with {file.size} bytes to {folder}")

    @final
    def close(self) -> None:
        """Close the connections, if there are any."""
        self.on_close()


_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Chosen:
    """Episodes of a dataset, one after another: those in the rows `rows`, ascending, of its episode table."""

    reader: StepReader
    rows: Array

    @cached_property
    def table(self) -> EpisodeTable:
        """The episode table of these alone; `start` counts from the first of their steps."""
        return table_with_returns(self.reader).chosen(self.rows)

    @property
    def steps(self) -> int:
        """Steps of these episodes."""
        return self.table.steps

    @property
    def fields(self) -> tuple[Field, ...]:
        """The TED leaves."""
        return self.reader.fields

    @cached_property
    def text(self) -> list[dict[str, str]] | None:
        """The texts of the episodes; None if there are none."""
        texts = self.reader.episode_text
        return None if texts is None else [texts[row] for row in self.rows.tolist()]

    def episode(self, position: int) -> tuple[int, int]:
        """Return the half-open range of steps, in the whole dataset, of the episode at `position`."""
        table, row = self.reader.episodes, int(self.rows[position])
        start = int(table.start[row])
        return start, start + int(table.length[row])

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the half-open ranges of steps of these episodes in the whole dataset, adjacent ones merged."""
        first = last = 0
        for position in range(len(self.rows)):
            start, stop = self.episode(position)
            if start != last:
                if last > first:
                    yield first, last
                first = start
            last = stop
        if last > first:
            yield first, last

    def chunks(self, key: Key, row_bytes: int) -> Iterator[Array]:
        """Yield all rows of a leaf in chunks of about 4 MB; `row_bytes` is the size of a row."""
        size = max(1, _CHUNK_BYTES // max(1, row_bytes))
        for first, last in self.spans():
            for start in range(first, last, size):
                yield self.reader.read(key, start, min(start + size, last))


class Sink(ABC):
    """Writes episodes in one format.

    `keeps_videos` states that the format can hold kept videos; other formats refuse a dataset with them. `keeps_scores`
    states that the format can hold the scores of episodes. `option_names` has the names of the options that the format
    takes, such as `fps` for `--fps`, and `self.options` their values.

    The public methods are final. A subclass implements `made(path)`; `prepare()`, which refuses data that the format
    cannot hold; and `write_rows(target, progress)`. It may implement `size`.

    `notes` has sentences on how the export differs from the dataset, `dropped` the keys left out; both are known once
    `check` has returned.
    """

    keeps_videos: ClassVar[bool] = False
    keeps_scores: ClassVar[bool] = False
    option_names: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_overrides(cls, own_attributes(cls, Sink), {"check": "prepare", "write": "write_rows"})

    def __init__(self, chosen: Chosen, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Take the episodes and the name of the destination; UsageError for `options` that the format does not have."""
        self.chosen = chosen
        self.name = name
        self.options: Mapping[str, Any] = dict(options or {})
        for option in self.options.keys() - self.option_names:
            raise UsageError(f"an export in this format has no option --{option}", hint=f"leave out --{option}")
        self._prepared = False
        self.notes: list[str] = []
        self.dropped: list[Dropped] = []

    @classmethod
    @abstractmethod
    def made(cls, path: Path) -> bool:
        """Return whether `path` is an export in this format without other files in it; must not raise."""

    @classmethod
    def statistics_of(cls, path: Path) -> tuple[int, int, dict[str, Any]]:
        """Return the steps, the episodes and the statistics of a dataset, which is rbtool's or in this format.

        UsageError for a format without statistics.
        """
        raise UsageError("this format has no statistics")

    @abstractmethod
    def prepare(self) -> None:
        """Raise SchemaError if the format cannot hold the data, and fill `notes` and `dropped`; called once."""

    def size(self) -> int:
        """Bytes that the rows take before compression."""
        return sum(field.row_bytes for field in self.chosen.fields) * self.chosen.steps

    @abstractmethod
    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write everything to the new file or folder `target` and sync it.

        `progress` is called with the number of additional bytes of rows, `size` in total.
        """

    @final
    def check(self) -> None:
        """Raise SchemaError if the format cannot hold the data, before anything is written."""
        if not self._prepared:
            if not self.keeps_videos:
                refuse_videos(self.chosen.reader, "an export in this format")
            self.prepare()
            self._prepared = True

    @final
    def write(self, target: Path, progress: Callable[[int], None]) -> None:
        """Check, then write everything to `target`, which must not exist; SchemaError if the format wrote nothing."""
        self.check()
        if target.exists():
            raise UsageError(f"{target} already exists")
        self.write_rows(target, progress)
        if not target.exists():
            raise SchemaError(f"{type(self).__name__} has written nothing to {target}")

    def refuse(self, dtypes: set[str], what: str) -> None:
        """Raise SchemaError for the first field of one of these element types."""
        for field in self.chosen.fields:
            if field.dtype in dtypes:
                raise SchemaError(
                    f"{field.name} is {field.dtype}, which {what} does not know",
                    hint="convert the field first",
                )


# Trust ------------------------------------------------------------------------------------------


def require_trust(path: Path, trusted: object, why: str = "it is a pickle, which can run anything") -> None:
    """Raise UsageError unless the user trusts a file; `why` states why that is necessary."""
    if not trusted:
        raise UsageError(
            f"{path} is not read: {why}",
            hint="if you trust its origin, add --trust-pickle: arrays and plain containers are then read from it, in a "
            "process without network",
        )
