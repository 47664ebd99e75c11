"""`check` of a raw dataset of another library: the rules of rows, on what a conversion would make of it."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import CorruptDataError, FormatError
from ..format.contracts import Array, Piece
from ..format.read_errors import LEAVES_OUT
from ..format.reader import Reader
from ..format.returns import Ingest
from ..progress import Progress
from ..ted.episodes import BoundaryCounts
from ..ted.rules import RULE_BY_ID, Finding, Rows, Rule, data_rules
from ..ted.schema import EPISODE, Key, row_bytes, ted_fields
from .check_videos import VideoRule

_READS = RULE_BY_ID["TED014"].named
_MOST_ROWS = 1 << 14
_MOST_BYTES = 16 << 20
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What the rules found, how many steps and episodes a conversion would have, and how those end."""

    findings: tuple[Finding, ...]
    steps: int
    episodes: int
    boundary: BoundaryCounts
    notes: tuple[str, ...]


def check_source(reader: Reader, progress: Progress, *, full: bool = False) -> SourceReport:
    """Read all episodes, and run the rules on the rows of those that can be read; a finding names each other one.

    `full` decodes all frames of kept videos that rows refer to.

    Memory is bounded by a piece of an episode. Raises what `Reader.facts` raises other than FormatError.
    """
    try:
        stated = reader.stated()
        contents = reader.videos_of(stated.episode_numbers)
        videos = VideoRule(ted_fields(stated.fields), contents, reader.folder, progress, full=full)
        run = _Pass(reader, None, progress, videos)
    except FormatError as error:
        return SourceReport((Finding(*_READS, "error", _said(str(error), error.hint)),), 0, 0, BoundaryCounts(), ())
    findings = [finding for rule in run.rules for finding in rule.findings()]
    findings += [
        Finding(*_READS, "error", f"episode {one}: {_said(*error)}", episodes=(one,))
        for one, error in run.unread.items()
    ]
    table, notes = run.table, run.facts.notes
    try:
        notes = reader.facts().notes
    except FormatError as error:  # of the source as a whole, or of an episode that is named already
        findings += [] if run.unread else [Finding(*_READS, "error", _said(str(error), error.hint))]
    return SourceReport(tuple(findings), table.steps, len(table), table.counts(), (*notes, *videos.notes))


def sound_episodes(reader: Reader, numbers: Sequence[int], progress: Progress) -> tuple[list[int], list[str]]:
    """Return those of these episodes that can be read and break no rule as an error, and notes on the others.

    CorruptDataError where no episode is sound.
    """
    run = _Pass(reader, numbers, progress)
    unread = {number: (text, hint.removesuffix(LEAVES_OUT)) for number, (text, hint) in run.unread.items()}
    why = {number: _said(*error) for number, error in unread.items()}
    for finding in (finding for rule in run.rules for finding in rule.findings()):
        for first, after in finding.steps if finding.severity == "error" else ():
            for number in run.feeder.numbers_at(first, after):
                why.setdefault(number, finding.message)
    sound = [number for number in numbers if number not in why]
    if not sound:
        errors = {number: (text, "") for number, text in why.items()} | unread
        hinted = [number for number, (_, hint) in errors.items() if hint]
        named, hint = "", ""
        for number in [*hinted, *errors][:1]:  # an episode for which there is something to do, if there is one
            text, hint = errors[number]
            named = f": episode {number}: {text}"
        raise CorruptDataError(f"{reader.path} has no episode that is sound{named}", hint=hint)
    notes = [f"episode {number} is left out: {text}" for number, text in list(why.items())[:_MOST_NAMED]]
    if len(why) > _MOST_NAMED:
        rest = _as_ranges(sorted(list(why)[_MOST_NAMED:]))
        more = len(why) - _MOST_NAMED
        are = "is" if more == 1 else "are"
        notes.append(f"{more:,} more of {len(sound) + len(why):,} episodes {are} left out: {rest}")
    return sound, notes


def _as_ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers, those that follow each other as `first..last`."""
    runs = (list(run) for _, run in itertools.groupby(enumerate(numbers), lambda at: at[1] - at[0]))
    ends = ((run[0][1], run[-1][1]) for run in runs)
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in ends)


class _Pass:
    """A pass over all episodes: the episode `table`, the `rules`, and the errors of episodes that cannot be read.

    `unread` has, by the number of the episode, the message and the hint.
    """

    def __init__(self, reader: Reader, numbers: Sequence[int] | None, progress: Progress, *more: Rule) -> None:
        self.facts = reader.stated()
        fields = ted_fields(self.facts.fields)
        self.rules: list[Rule] = [*data_rules(fields, self.facts.steps, self.facts.spaces), *more]
        self.unread: dict[int, tuple[str, str]] = {}
        self.feeder = feeder = _Feeder(self.rules, row_bytes(fields))
        ingest = Ingest(feeder, self.facts.fields)
        progress.start("checking", self.facts.steps, "steps")
        for number in self.facts.episode_numbers if numbers is None else numbers:
            try:
                for piece in reader.pieces([number]):
                    feeder.piece = piece
                    ingest.add(piece)
                    progress.advance(len(piece))
            except FormatError as error:
                feeder.break_off()
                self.unread[number] = str(error), error.hint
        feeder.flush()
        progress.done()
        self.table = ingest.table


def _said(message: str, hint: str) -> str:
    return f"{message}; {hint}" if hint else message


@dataclass
class _Feeder:
    """Gives rows to the rules, some thousands at a time: episodes may be short."""

    rules: Sequence[Rule]
    bytes_a_row: int
    piece: Piece | None = None
    _episodes: list[tuple[int, int]] = field(default_factory=list)  # first row and number of each
    _start: int = 0
    _pending: list[tuple[Mapping[Key, Array], Array, bool, bool]] = field(default_factory=list)
    _rows: int = 0

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Take the rows of `piece`."""
        if self.piece is None or last is None:
            raise FormatError("rows came without their piece")
        if self.piece.first:
            self._episodes.append((self._start + self._rows, self.piece.episode))
        self._pending.append((columns, last, self.piece.first, bool(self.piece.next)))
        self._rows += len(last)
        if self._rows >= _MOST_ROWS or self._rows * self.bytes_a_row >= _MOST_BYTES:
            self.flush()

    def break_off(self) -> None:
        """End the episode that could not be read to its end, so that the next one is not taken for its continuation."""
        if self._pending:
            columns, last, first, explicit = self._pending[-1]
            self._pending[-1] = columns, np.append(last[:-1], True), first, explicit

    def numbers_at(self, start: int, stop: int) -> list[int]:
        """Return the numbers of the episodes that have rows in `[start, stop)`."""
        low, high = (bisect.bisect_right(self._episodes, row, key=lambda one: one[0]) for row in (start, stop - 1))
        return [number for _, number in self._episodes[low - 1 : high]]

    def flush(self) -> None:
        """Give what is pending to the rules."""
        if not self._pending:
            return
        parts, self._pending = self._pending, []
        columns = {key: np.concatenate([part[0][key] for part in parts]) for key in parts[0][0]}
        rows = Rows(
            self._start,
            columns,
            first=np.concatenate([_marked(len(last), first) for _, last, first, _ in parts]),
            last=np.concatenate([last for _, last, _, _ in parts]),
            episode=columns[EPISODE],
            explicit=np.concatenate([np.full(len(last), explicit) for _, last, _, explicit in parts]),
        )
        for rule in self.rules:
            rule.see(rows)
        self._start, self._rows = self._start + len(rows), 0


def _marked(length: int, first: bool) -> Array:
    marks = np.zeros(length, bool)
    marks[0] = first
    return marks
