"""The contract of readers of foreign formats, and the handling of final steps without a next observation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias, final, get_args

import numpy as np

from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, UsageError
from ..ted.episodes import Final
from ..ted.schema import REWARD, Field, Key, Timing, is_real, key_name
from .contracts import (
    Array,
    Closing,
    EpisodeBlock,
    Piece,
    SourceFacts,
    completed_block,
    form_of,
    own_attributes,
    refuse_overrides,
    require_block,
    require_truths,
)
from .digest import digest_file, file_state
from .episodes import EpisodeRanges, EpisodeRow, EpisodeTable, select_episodes
from .read_errors import understood
from .returns import EpisodeSummary


def completed(pieces: Iterable[Piece], choice: str, fields: Sequence[tuple[Field, Timing]]) -> Iterator[Piece]:
    """Complete the pieces of one episode; an episode that has no other step than the one left out has no pieces.

    One piece is held back, since the one after it may vanish. Pieces may lack columns.
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
    """The same piece as the truncated end of its episode."""
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
    """Raise FormatError for a piece that is not what the facts announce.

    `complete` states that it has all fields; `what` names it in messages.
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
from it; any other is left out, and the step before it becomes the truncated end. `drop` leaves all of them out,
`repeat` keeps all of them."""
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

    `facts` and `state` are what a survey found, None where unknown; `files` have the state of each file.
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


_FINAL = {
    "__init__": "on_open", "facts": "survey", "stated": "survey", "pieces": "read_episode",
    "blocks": "read_episodes", "recipe": "survey_state", "of_recipe": "take_survey",
    "episode_table": "read_outcomes", "digests": "files", "size": "files", "close": "on_close",
}  # fmt: skip
"""The methods that a reader has for its users, and what it implements in place of each."""


class Reader(Closing, ABC):
    """Reads one dataset in a foreign format; memory is bounded by a piece.

    The public methods are final: they open once, validate every piece, decide about last steps without an observation
    after them (`final_step`), raise what libraries raise for damaged files as CorruptDataError, and close. A subclass
    implements these:

    - `recognises(path)`: whether a path has this format, by content and not by name.
    - `on_open()`: open the files at `self.path`; optional.
    - `survey(progress)`: the facts of the whole source.
    - `read_episode(number)`: the pieces of one episode, each of bounded size.
    - `files()`: the files of the source below `self.folder`.
    - `on_close()`: close what `on_open` opened; optional.

    and may implement `read_episodes`, where many short episodes can be read together, `read_outcomes`, where rewards
    and flags can be read without the rest, `notes_on`, `videos_of` and `require_sound`, where they depend on the
    episodes chosen, `verify_read`, where the files have checksums. Options that a format needs are named in
    `option_names` and found in `self.options`. `core.testing.readers` holds the tests of the contract.
    """

    path: Path
    option_names: ClassVar[frozenset[str]] = frozenset()
    """Names of the options that the format takes: `horizon` is `--horizon` of the command line."""
    survey_workers: int = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_overrides(cls, own_attributes(cls, Reader), _FINAL)

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether `path` looks like this format. Must be cheap; raises OSError only where the disk fails."""

    def on_open(self) -> None:
        """Open the dataset at `self.path`, or raise FormatError."""

    @abstractmethod
    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts of all episodes from a pass over structure and text, not over the arrays.

        Called once. `progress` takes how many more episodes were looked at; `survey_workers` threads may help."""

    @abstractmethod
    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode in pieces of bounded size."""

    def read_episodes(self, numbers: Sequence[int]) -> Iterator[EpisodeBlock | Piece]:
        """Yield the steps of these episodes in this order: blocks of whole episodes, or the pieces of one episode.

        Both of bounded size. For formats of one table: a block of thousands of episodes costs as much as one of a few.
        """
        for number in numbers:
            yield from self.read_episode(number)

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield pieces of one episode whose columns may lack all fields but the reward, for the episode table.

        Not for sources with `Piece.next`: whether next rows follow needs all of them.
        """
        yield from self.read_episode(number)

    @abstractmethod
    def files(self) -> Iterable[Path]:
        """Return the files of the source, all below `self.folder`."""

    def notes_on(self, numbers: Sequence[int]) -> Sequence[str]:
        """Return sentences about these episodes that a user should read, following those of the facts."""
        return ()

    def videos_of(self, numbers: Sequence[int]) -> Mapping[str, Path | bytes]:
        """Return the files of kept videos that these episodes refer to, as in `SourceFacts.videos`."""
        return {}

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise FormatError or CorruptDataError if one of these episodes cannot be read.

        `everything` says that all episodes were requested: then the source also has to agree with its own totals.
        """

    def verify_read(self) -> None:
        """Raise CorruptDataError if what was read is damaged; called once the requested episodes were read.

        For formats whose checksums cover more than an episode, such as members of a zip file.
        """

    def on_close(self) -> None:
        """Close what `on_open` opened."""

    def survey_state(self) -> Any:
        """Return what `survey` left in this reader, to be pickled for another; None: that one surveys again."""
        return None

    def take_survey(self, state: Any) -> None:
        """Take over the `survey_state` of another reader of the same source, in place of a survey."""

    @property
    def folder(self) -> Path:
        """The folder to which the names of the files are relative: the path itself, or the folder of a single file."""
        return self.path if self.path.is_dir() else self.path.parent

    @final
    def __init__(self, path: Path, *, final_step: str = "auto", options: Mapping[str, Any] | None = None) -> None:
        """Open the dataset at `path`, or raise FormatError or DatasetNotFoundError.

        `final_step` (`auto`, `drop`, `repeat`) is what becomes of last steps without an observation after them.
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
            raise DatasetNotFoundError(f"there is nothing at {path}")
        with understood(path):
            self.on_open()
        self.__state = file_state(path) if path.is_file() else None

    @final
    def facts(
        self, selection: EpisodeRanges | None = None, *, progress: Callable[[int], None] | None = None
    ) -> SourceFacts:
        """Return what is known about the source before any step is read.

        With a selection, `episode_numbers`, `steps` and `notes` describe the selected episodes, and only these have to
        be sound; the fields are those of the whole source. Without one, the source must agree with its totals.
        `progress` gets how many more episodes were examined. UsageError for episodes that do not exist.
        """
        whole = self.__survey(progress)
        numbers = whole.episode_numbers if selection is None else select_episodes(selection, whole.episode_numbers)
        self.require_sound(numbers, everything=selection is None)
        notes, steps, lengths = [*whole.notes, *self.notes_on(numbers)], whole.steps, whole.lengths
        if whole.final_missing and self.final_step != "repeat":
            kept = self.__without_last_steps(whole, numbers)
            notes += [_vanished(sorted(left))] if (left := set(numbers) - kept.keys()) else []
            numbers, steps, lengths = list(kept), sum(kept.values()), list(kept.values())
        elif selection is not None:
            lengths = self.__lengths(whole, numbers)
            steps = sum(lengths)
        found = replace(whole, episode_numbers=numbers, steps=steps, lengths=lengths, notes=tuple(notes))
        return replace(found, videos=self.videos_of(numbers))

    @final
    def stated(self, *, progress: Callable[[int], None] | None = None) -> SourceFacts:
        """Return what the source states about all its episodes, whether they can be read or not."""
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
        return {path.relative_to(self.folder).as_posix(): digest_file(path) for path in self.files()}

    @final
    def size(self) -> int:
        """Bytes of the source's files."""
        return sum(path.stat().st_size for path in self.files())

    @final
    def recipe(self) -> ReaderRecipe:
        """Return how to open another reader of this source, in another process."""
        state = self.survey_state()
        facts = None if state is None else self.__facts
        files = {file: file_state(file) for file in self.files()}
        if self.__state is not None:
            files[self.path] = self.__state
        return ReaderRecipe(type(self), self.path, self.final_step, self.options, facts, state, files)

    @final
    @classmethod
    def of_recipe(cls, recipe: ReaderRecipe) -> Self:
        """Open the source of a recipe, without another survey where that has what the first one found.

        CorruptDataError where a file is another one by now.
        """
        found = cls(recipe.path, final_step=recipe.final_step, options=recipe.options)
        for file, state in recipe.files.items():
            if file_state(file)[1:] != state[1:]:  # a shared folder is another device on another machine
                found.close()
                raise CorruptDataError(f"{file} was changed or replaced while it was read", hint="run it again")
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
        """Return the lengths of these episodes, by number, once it is decided about their last steps."""
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
        """Refuse pieces that are not what the facts announce; `complete` states that they have all fields."""
        last: Piece | None = None
        for piece in _understood(self.path, pieces):
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
    """Raise what is wrong with the first of these episodes that cannot be read; `damaged` has it by their numbers."""
    for number in numbers if damaged else ():
        if number in damaged:
            raise damaged[number]


def _kept_ends(block: EpisodeBlock, final_step: FinalStep) -> Array:
    """Whether the last step of each episode is kept where no observation follows it."""
    if final_step == "auto":
        return np.asarray(block.terminated[block.stops - 1])
    return np.full(len(block.episodes), final_step == "repeat")


def _understood(path: Path, pieces: Iterator[Piece]) -> Iterator[Piece]:
    with understood(path):
        yield from pieces


def _vanished(numbers: Sequence[int]) -> str:
    names = ", ".join(map(str, numbers[:10])) + (", …" if len(numbers) > 10 else "")
    which = f"episode {names} is" if len(numbers) == 1 else f"{len(numbers)} episodes ({names}) are"
    return f"{which} left out: one step, without an observation after it (--final-step repeat keeps it)"


class PartsReader(Reader, ABC):
    """A reader of a source of which a stream reads one part after the other.

    A subclass may implement `shard_starts`, `evidence` and `settled`, with `settled_names`.
    """

    settled_names: ClassVar[frozenset[str]] = frozenset()
    """Names of the options whose default, `auto`, is decided by all episodes: parts of a dataset could differ."""

    def shard_starts(self) -> Sequence[int] | None:
        """Return the first episode of each part in which a stream reads the source; None if there are no parts.

        Called after the survey. The numbers ascend, and need not be numbers of episodes.
        """
        return None

    def evidence(self) -> Mapping[str, int]:
        """Return counts that decide about the options of `settled_names`; the counts of several parts are added."""
        return {}

    @classmethod
    def settled(cls, evidence: Mapping[str, int]) -> tuple[dict[str, str], bool]:
        """Return the options that such counts decide for, and whether more of them would hardly change that."""
        return {}, True
