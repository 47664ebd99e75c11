"""`check` of a raw dataset of another library: the rules of rows, on what a conversion would make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import FormatError
from ..format.contracts import Array, Piece, SourceFacts
from ..format.episodes import EpisodeRow, EpisodeTable
from ..format.manifest import Manifest
from ..format.reader import Reader
from ..format.returns import Ingest
from ..format.ted.builder import Origin, RowBuilder
from ..progress import Progress
from ..ted.episodes import BoundaryCounts
from ..ted.rules import DATA_RULES, Finding, Rows, Rule
from ..ted.schema import EPISODE, Key, row_bytes, ted_fields

_READS = "TED014", "opens"
_MOST_ROWS = 1 << 14
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SourceReport:
    """What the rules found, how many steps and episodes a conversion would have, and how those end."""

    findings: tuple[Finding, ...]
    steps: int
    episodes: int
    boundary: BoundaryCounts
    notes: tuple[str, ...]


def check_source(reader: Reader, progress: Progress) -> SourceReport:
    """Read all episodes, and run the rules on the rows of those that can be read; a finding names each other one.

    Memory is bounded by a piece of an episode. Raises what `Reader.facts` raises other than FormatError.
    """
    try:
        facts = reader.facts()
    except FormatError as error:
        return SourceReport((Finding(*_READS, "error", _said(error)),), 0, 0, BoundaryCounts(), ())
    rules = [rule(ted_fields(facts.fields), facts.steps) for rule in DATA_RULES]
    rows, unread = _run(reader, facts, rules, progress)
    findings = [finding for rule in rules for finding in rule.findings()]
    table = EpisodeTable.from_rows(rows)
    return SourceReport((*findings, *unread), table.steps, len(table), table.counts(), tuple(facts.notes))


def _run(
    reader: Reader, facts: SourceFacts, rules: Sequence[Rule], progress: Progress
) -> tuple[list[EpisodeRow], list[Finding]]:
    feeder = _Feeder(rules, row_bytes(ted_fields(facts.fields)))
    ingest, unread = Ingest(feeder, facts.fields), list[Finding]()
    progress.start("checking", facts.steps, "steps")
    for number in facts.episode_numbers:
        try:
            for piece in reader.pieces([number]):
                feeder.piece = piece
                ingest.add(piece)
                progress.advance(len(piece))
        except FormatError as error:
            feeder.break_off()
            unread.append(Finding(*_READS, "error", f"episode {number}: {_said(error)}", episodes=(number,)))
    feeder.flush()
    progress.done()
    return ingest.rows, unread


def _said(error: FormatError) -> str:
    return f"{error}; {error.hint}" if error.hint else str(error)


@dataclass
class _Feeder(RowBuilder):
    """Gives rows to the rules, some thousands at a time: episodes may be short."""

    rules: Sequence[Rule]
    bytes_a_row: int
    piece: Piece | None = None
    _start: int = 0
    _pending: list[tuple[Mapping[Key, Array], Array, bool, bool]] = field(default_factory=list)
    _rows: int = 0

    def append(self, columns: Mapping[Key, Array], last: Array | None = None) -> None:
        """Take the rows of `piece`."""
        if self.piece is None or last is None:
            raise FormatError("rows came without their piece")
        self._pending.append((columns, last, self.piece.first, bool(self.piece.next)))
        self._rows += len(last)
        if self._rows >= _MOST_ROWS or self._rows * self.bytes_a_row >= _MOST_BYTES:
            self.flush()

    def break_off(self) -> None:
        """End the episode that could not be read to its end, so that the next one is not taken for its continuation."""
        if self._pending:
            columns, last, first, explicit = self._pending[-1]
            self._pending[-1] = columns, np.append(last[:-1], True), first, explicit

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

    def _complete(self, table: EpisodeTable, origin: Origin, text: Sequence[dict[str, str]]) -> Manifest:
        raise NotImplementedError("nothing is written")

    def close(self) -> None:
        """There is nothing to close."""


def _marked(length: int, first: bool) -> Array:
    marks = np.zeros(length, bool)
    marks[0] = first
    return marks
