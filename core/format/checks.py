"""Rules about the folder of a dataset, and the sound episodes of a damaged dataset or a damaged source."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import CorruptDataError, FormatError
from ..progress import Progress, some_of
from ..ted.episodes import Final, rows_equal
from ..ted.rules import DATA_RULES, RULE_BY_ID, Finding, Places, Rows, Rule, Tally, data_rules
from ..ted.schema import (
    EPISODE,
    NEXT,
    NEXT_DONE,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    Field,
    Key,
    as_numbers,
    key_name,
    row_bytes,
    state_keys,
    ted_fields,
)
from .contracts import Array, PassedSteps, Piece, StepReader
from .converter import Reader
from .episodes import EpisodeTable
from .files import LEAVES_OUT
from .memmap.reader import FolderReader, TedReader
from .open_files import ListedFiles
from .returns import Ingest, return_field_of, running_return


class EpisodeTableRule(Rule):
    """The episode table agrees with the rows of every episode: number, place, return, and how it ends.

    `reward` is the leaf whose sum is the return; None if there is none. With `repeated`, the last next row of an
    episode has to be a repetition if the table says so.
    """

    rule_id = "TED010"

    def __init__(
        self, fields: Sequence[Field], steps: int, table: EpisodeTable, reward: Field | None, *, repeated: bool = False
    ) -> None:
        super().__init__(fields, steps)
        self.table = table
        self._repeated = state_keys(fields) if repeated and (table.final == Final.REPEATED).any() else []
        self._reward = reward
        self._problem = ""
        self._problems = 0
        self._bad = Tally()
        self._total = 0.0

    def see(self, rows: Rows) -> None:
        """Compare number, flags and return of the episodes in these rows."""
        if EPISODE in rows.columns:
            wrong = rows.columns[EPISODE].reshape(-1) != rows.episode
            if wrong.any():
                row = int(wrong.argmax())
                found = int(rows.columns[EPISODE].reshape(-1)[row])
                self._add(f"the row of {rows.place(row)} says it belongs to episode {found}", rows, wrong)
        ends = np.flatnonzero(rows.last)
        which = self.table.index_of_step(ends + rows.start)
        for key, column in ((NEXT_TERMINATED, self.table.terminated), (NEXT_TRUNCATED, self.table.truncated)):
            if key in rows.columns:
                wrong = rows.columns[key].reshape(len(rows), -1)[ends].any(1) != column[which]
                if wrong.any():
                    row = int(ends[wrong.argmax()])
                    self._add(f"{key[1]} of {rows.place(row)} differs from the table", rows, wrong, ends)
        self._see_repeated(rows, ends[self.table.final[which] == Final.REPEATED])
        if self._reward is not None:
            self._see_rewards(rows, as_numbers(rows.columns[self._reward.key], self._reward.dtype), ends)

    def _see_repeated(self, rows: Rows, ends: Array) -> None:
        for key in self._repeated:
            if not len(ends) or (NEXT, *key) not in rows.columns:
                continue
            wrong = ~rows_equal(rows.columns[NEXT, *key][ends], rows.columns[key][ends])
            if wrong.any():
                row = int(ends[wrong.argmax()])
                text = f"next.{key_name(key)} of {rows.place(row)} is not a repetition, although the table states one"
                self._add(text, rows, wrong, ends)

    def _see_rewards(self, rows: Rows, rewards: Array, ends: Array) -> None:
        begin, wrong, text = 0, np.zeros(len(ends), bool), ""
        for number, end in enumerate(ends.tolist()):
            total = running_return(0.0 if rows.first[begin] else self._total, rewards[begin : end + 1])
            row = int(self.table.index_of_step(np.array([rows.start + end]))[0])
            expected = float(self.table.total_reward[row])
            if total != expected and not (np.isnan(total) and np.isnan(expected)):
                text = text or f"episode {int(rows.episode[end])} returns {total!r}, the table states {expected!r}"
                wrong[number] = True
            begin = end + 1
        if text:
            self._add(text, rows, wrong, ends, count=int(wrong.sum()))
        if begin < len(rows):
            self._total = running_return(0.0 if rows.first[begin] else self._total, rewards[begin:])

    def _add(self, text: str, rows: Rows, wrong: Array, index: Array | None = None, *, count: int = 1) -> None:
        """Count problems, of which the first is described; `wrong` and `index` as in `Tally.add`."""
        self._problem = self._problem or text
        self._problems += count
        self._bad.add(rows, wrong, index)

    def findings(self) -> list[Finding]:
        """Report faults of the table itself first, then the first disagreement with the rows."""
        table, problems = self.table, [self._problem] * bool(self._problem)
        lengths = np.concatenate(([0], np.cumsum(table.length)))
        if empty := int((table.length < 1).sum()):
            problems.insert(0, "1 episode has no steps" if empty == 1 else f"{empty:,} episodes have no steps")
        if not np.array_equal(table.start, lengths[:-1]) or lengths[-1] != self.steps:
            text = f"start and length do not place the episodes one after the other over {self.steps:,} steps"
            problems.insert(0, text)
        more = len(problems) - bool(self._problem) + self._problems - 1
        text = f"{problems[0]} (and {more:,} more)" if more > 0 else "".join(problems)
        return [self.report("error", text, self._bad)] if problems else []


def rows_of(reader: StepReader, start: int, stop: int) -> Rows:
    """Read all leaves of rows `[start, stop)` together with their places in the episodes."""
    table = reader.episodes
    steps = np.arange(start, stop)
    which = table.index_of_step(steps)
    ends = table.start + table.length - 1
    columns = {field.key: reader.read(field.key, start, stop) for field in reader.fields}
    return Rows(
        start, columns, first=table.start[which] == steps, last=ends[which] == steps,
        episode=table.episode[which], explicit=table.explicit_next[which],
    )  # fmt: skip


def readable_rows(reader: StepReader, start: int, stop: int, bad: Array) -> Iterator[Rows]:
    """Yield rows `[start, stop)` without the rows of unreadable episodes, which are marked in `bad`."""
    try:
        yield rows_of(reader, start, stop)
    except CorruptDataError:
        table = reader.episodes
        first, last = table.index_of_step(np.array([start, stop - 1])).tolist()
        for row in range(first, last + 1):
            low, high = int(table.start[row]), int(table.start[row] + table.length[row])
            try:
                yield rows_of(reader, max(start, low), min(stop, high))
            except CorruptDataError:
                bad[row] = True


class FolderRule(NamedTuple):
    """A rule about files: `problems` returns a sentence for each problem.

    `listed`, if given, does the same for a folder of which perhaps only the manifest can be read; `places` returns the
    steps and episodes that the problems concern.
    """

    rule_id: str
    problems: Callable[[StepReader], list[str]]
    listed: Callable[[ListedFiles], list[str]] | None = None
    places: Callable[[StepReader], dict[str, Any]] | None = None

    def findings(self, reader: StepReader) -> list[Finding]:
        """Report what is wrong with the files of this dataset or checkpoint."""
        problems = self.problems(reader)
        return self._report(problems, **(self.places(reader) if problems and self.places else {}))

    def findings_of_files(self, files: ListedFiles) -> list[Finding]:
        """Report what is wrong with the files of a folder that cannot be opened as a whole."""
        return self._report(self.listed(files) if self.listed else [])

    def _report(self, problems: list[str], **places: Any) -> list[Finding]:
        return [Finding(*RULE_BY_ID[self.rule_id].named, "error", problem, **places) for problem in problems]


def file_problems(reader: StepReader) -> list[str]:
    """Describe what is wrong with the files, as the rules about files do, but name each file once."""
    files = reader.listed if isinstance(reader, FolderReader) else None
    wrong = {file.path for file in files.manifest.files if files.size_problem(file)} if files else set()
    found = [*_length_problems(reader, skipped=wrong), *size_problems(reader), *_digest_problems(reader)]
    return list(dict.fromkeys(found))


def _length_problems(reader: StepReader, skipped: Collection[str] = ()) -> list[str]:
    """Compare rows, types and shapes in the `meta.json` files with the manifest and with all files but `skipped`."""
    try:
        if isinstance(reader, TedReader):
            reader.check_tree(skipped)
    except FormatError as error:
        return [str(error)]
    return []


def size_problems(reader: StepReader) -> list[str]:
    """Compare the sizes of all files with the manifest."""
    return _listed_sizes(reader.listed) if isinstance(reader, FolderReader) else []


def _cut_steps(reader: StepReader) -> dict[str, Any]:
    """Return the steps for which the row of some leaf is lost, and their episodes."""
    steps = reader.manifest.steps
    kept = reader.kept_steps if isinstance(reader, FolderReader) else steps
    if kept == steps:
        return {}
    table = reader.episodes
    return {"steps": ((kept, steps),), "episodes": Places(table.episode[table.start + table.length > kept])}


def _listed_sizes(files: ListedFiles) -> list[str]:
    return [text for file in files.manifest.files if (text := files.size_problem(file))]


def _digest_problems(reader: StepReader) -> list[str]:
    """Read all files again and compare their digests with the manifest."""
    if isinstance(reader, FolderReader):
        return _listed_digests(reader.listed)
    try:
        reader.verify_files()
    except CorruptDataError as error:
        return [str(error)]
    return []


def _listed_digests(files: ListedFiles) -> list[str]:
    whole = [file for file in files.manifest.files if not files.size_problem(file)]
    return [text for text in (*map(files.problem, whole), files.manifest_problem()) if text]


FOLDER_RULES: tuple[FolderRule, ...] = (
    FolderRule("TED011", _length_problems),
    FolderRule("TED012", size_problems, _listed_sizes, _cut_steps),
    FolderRule("TED013", _digest_problems, _listed_digests),
)


_MOST_NAMED = 20

UNVERIFIED = (
    "the episodes taken break no rule, but no digest verifies them one by one: values of the damaged files that no "
    "rule checks, such as actions, may be wrong in them"
)
"""The note in the manifest of a dataset whose episodes come from damaged files."""


class SoundSteps(PassedSteps):
    """Some episodes of a dataset or checkpoint, one after another: those in the rows `rows` of its episode table.

    No digest covers these rows alone. `damage` describes the damaged files and the episodes that are left out.
    """

    def __init__(self, source: StepReader, rows: Array, notes: Sequence[str] = ()) -> None:
        super().__init__(source)
        self.rows = rows
        self.damage = tuple(notes)
        self._starts = source.episodes.start[rows]
        self._table = source.episodes.chosen(rows)
        self.manifest = replace(
            source.manifest, kind="dataset", steps=self._table.steps, episodes=len(rows),
            notes=(*source.manifest.notes, *notes),
        )  # fmt: skip

    @property
    def has_digests(self) -> bool:
        """Always false: no digest covers these rows alone."""
        return False

    @property
    def episodes(self) -> EpisodeTable:
        return self._table

    @property
    def episode_text(self) -> list[dict[str, str]] | None:
        texts = self.source.episode_text
        return None if texts is None else [texts[row] for row in self.rows.tolist()]

    def read(self, key: Key, start: int, stop: int) -> Array:
        leaf, table = self._leaf(key, start, stop), self._table
        parts = [np.empty((0, *leaf.shape), leaf.numpy)]
        if start < stop:
            first, last = table.index_of_step(np.array([start, stop - 1])).tolist()
            for row in range(first, last + 1):
                shift = int(self._starts[row] - table.start[row])
                low, high = max(start, int(table.start[row])), min(stop, int(table.start[row] + table.length[row]))
                parts.append(self.source.read(key, low + shift, high + shift))
        return np.concatenate(parts)

    def verify_files(self) -> None:
        """Do nothing: the files are known to be damaged, and the rows were checked by the rules of TED instead."""

    def again(self) -> SoundSteps:
        return type(self)(self.source.again(), self.rows, self.damage)


@contextlib.contextmanager
def damage_explained(path: Path, *, can_skip: bool) -> Iterator[None]:
    """Add a hint to errors about damaged files: how to see the damage and, with `can_skip`, how to take the rest."""
    try:
        yield
    except CorruptDataError as error:
        error.hint = error.hint or _check_hint(path) + (
            "; --skip-bad takes the sound episodes, if there are any" if can_skip else ""
        )
        raise


def _check_hint(path: Path) -> str:
    return f"see what is damaged: rbtool check {shlex.quote(str(path))}"


def sound_steps(reader: StepReader) -> StepReader:
    """Return the episodes of a damaged dataset whose rows all exist and violate no rule of TED as an error.

    If each episode has a digest of its own, as in a recording, these are the episodes that match it. The notes of the
    manifest list the damaged files and the episodes left out, and say so if nothing verifies single episodes. An
    undamaged `reader` is returned itself.

    Raises:
        CorruptDataError: no episode is sound.
    """
    problems = file_problems(reader)
    proven = reader.proven_episodes() if problems else None
    bad = _bad_episodes(reader)
    if proven is not None:
        bad |= ~proven
    if not problems and not bad.any():
        return reader
    if bad.all():
        first = f": {problems[0]}" if problems else ""
        raise CorruptDataError(f"{reader.path} has no episode that is sound{first}", hint=_check_hint(reader.path))
    numbers = reader.episodes.episode[bad].tolist()
    named = some_of(numbers, _MOST_NAMED)
    notes = list(problems)
    if numbers:
        notes.append(f"{len(numbers):,} of {len(bad):,} episodes are damaged and left out: {named}")
    if problems and proven is None:
        notes.append(UNVERIFIED)
    return SoundSteps(reader, np.flatnonzero(~bad), notes)


def _bad_episodes(reader: StepReader) -> Array:
    """Return for each episode whether rows of it are lost or break a rule, bool `[episodes]`."""
    table, steps = reader.episodes, reader.manifest.steps
    bad: Array = np.zeros(len(table), bool)
    table_rule = EpisodeTableRule(reader.fields, steps, table, return_field_of(reader.manifest))
    rules = [*(rule(reader.fields, steps) for rule in DATA_RULES), table_rule]
    for start, end in reader.chunks():
        for rows in readable_rows(reader, start, end, bad):
            for rule in rules:
                rule.see(rows)
    for finding in (finding for rule in rules for finding in rule.findings()):
        for first, after in finding.steps if finding.severity == "error" else ():
            low, high = table.index_of_step(np.array([first, after - 1])).tolist()
            bad[low : high + 1] = True
    return bad


_MOST_ROWS = 1 << 14
_MOST_BYTES = 16 << 20


def sound_episodes(reader: Reader, numbers: Sequence[int], progress: Progress) -> tuple[list[int], list[str]]:
    """Return the episodes among these that can be read and violate no rule of TED as an error, and notes on the others.

    CorruptDataError if no episode is sound.
    """
    run = SourcePass(reader, numbers, progress)
    unread = {number: (text, hint.removesuffix(LEAVES_OUT)) for number, (text, hint) in run.unread.items()}
    why = {number: with_hint(*error) for number, error in unread.items()}
    for finding in (finding for rule in run.rules for finding in rule.findings()):
        for first, after in finding.steps if finding.severity == "error" else ():
            for number in run.feeder.numbers_at(first, after):
                why.setdefault(number, finding.message)
    sound = [number for number in numbers if number not in why]
    if not sound:
        errors = {number: (text, "") for number, text in why.items()} | unread
        hinted = [number for number, (_, hint) in errors.items() if hint]
        named, hint = "", ""
        for number in [*hinted, *errors][:1]:  # preferably an episode whose error has a hint
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
    """Format ascending numbers, consecutive ones as `first..last`."""
    runs = (list(run) for _, run in itertools.groupby(enumerate(numbers), lambda at: at[1] - at[0]))
    ends = ((run[0][1], run[-1][1]) for run in runs)
    return ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in ends)


class SourcePass:
    """One pass over the episodes of a source, which applies the rules of TED to their rows.

    Afterwards `table` and `text` describe the episodes, `rules` have seen their rows, and `unread` has the message and
    the hint of each episode that cannot be read, by its number.
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
        self.table, self.text = ingest.table, ingest.text


def with_hint(message: str, hint: str) -> str:
    """Return message and hint of an error as one sentence."""
    return f"{message}; {hint}" if hint else message


@dataclass
class _Feeder:
    """Gathers rows and passes some thousands at a time to the rules, because episodes may be short."""

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
        if self._rows >= _MOST_ROWS or self._rows * self.bytes_a_row >= _MOST_BYTES:
            self.flush()  # before these rows are added, so that `break_off` finds the last ones pending
        if self.piece.first:
            self._episodes.append((self._start + self._rows, self.piece.episode))
        self._pending.append((columns, last, self.piece.first, bool(self.piece.next)))
        self._rows += len(last)

    def break_off(self) -> None:
        """Truncate an episode that could not be read further, so that rules do not join it with the next one."""
        if self._pending and not self._pending[-1][1][-1]:
            columns, last, first, explicit = self._pending[-1]
            ends = np.append(last[:-1], True)
            flags = {key: columns[key] | ends[:, None] for key in (NEXT_TRUNCATED, NEXT_DONE)}
            self._pending[-1] = {**columns, **flags}, ends, first, explicit

    def numbers_at(self, start: int, stop: int) -> list[int]:
        """Return the numbers of the episodes that have rows in `[start, stop)`."""
        low, high = (bisect.bisect_right(self._episodes, row, key=lambda one: one[0]) for row in (start, stop - 1))
        return [number for _, number in self._episodes[low - 1 : high]]

    def flush(self) -> None:
        """Pass the pending rows to the rules."""
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
