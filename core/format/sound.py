"""The sound episodes of a damaged dataset."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..errors import CorruptDataError
from ..ted import Key
from ..ted.checks import DATA_RULES
from .checks import EpisodeTableRule, file_problems, readable_rows
from .contracts import Array, StepReader
from .episodes import EpisodeTable
from .returns import return_field_of

__all__ = ["UNVERIFIED", "SoundSteps", "damage_explained", "sound_steps"]

_MOST_NAMED = 20

UNVERIFIED = (
    "the episodes taken break no rule, but no digest verifies them one by one: values of the damaged files that no "
    "rule checks, such as actions, may be wrong in them"
)
"""What is noted of episodes out of files that are damaged."""


class SoundSteps(StepReader):
    """Some episodes of a dataset or checkpoint, one after the other: those in the rows `rows` of its episode table.

    Its files have no digests that the rows could be compared with. `damage` says what is wrong with them, and which
    episodes are left out.
    """

    def __init__(self, source: StepReader, rows: Array, notes: Sequence[str] = ()) -> None:
        self.path = source.path
        self.rows = rows
        self.damage = tuple(notes)
        self._source = source
        columns = {name: column[rows] for name, column in source.episodes.columns().items()}
        self._starts, length = columns["start"], columns["length"]
        columns["start"] = np.cumsum(length) - length
        columns["explicit_start"] = np.full(len(rows), -1, np.int64)
        self._table = EpisodeTable.from_columns(columns)
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
        """The episode table of these alone."""
        return self._table

    @property
    def episode_text(self) -> list[dict[str, str]] | None:
        """Text that belongs to these episodes."""
        texts = self._source.episode_text
        return None if texts is None else [texts[row] for row in self.rows.tolist()]

    def read(self, key: Key, start: int, stop: int) -> Array:
        """Read rows of one leaf by position."""
        leaf, table = self._leaf(key, start, stop), self._table
        parts = [np.empty((0, *leaf.shape), leaf.numpy)]
        if start < stop:
            first, last = table.index_of_step(np.array([start, stop - 1])).tolist()
            for row in range(first, last + 1):
                shift = int(self._starts[row] - table.start[row])
                low, high = max(start, int(table.start[row])), min(stop, int(table.start[row] + table.length[row]))
                parts.append(self._source.read(key, low + shift, high + shift))
        return np.concatenate(parts)

    def documents(self) -> dict[str, bytes]:
        """The source's own metadata files by name."""
        return self._source.documents()

    def verify_files(self) -> None:
        """The files are known to be damaged: the rules have been tried on the rows instead."""

    def again(self) -> SoundSteps:
        """Return a reader of the very same files."""
        return type(self)(self._source.again(), self.rows, self.damage)

    def files_state(self) -> str:
        """Tell one state of the files from another without reading them."""
        return self._source.files_state()

    def close(self) -> None:
        """Close what is open."""
        self._source.close()


@contextlib.contextmanager
def damage_explained(path: Path, *, can_skip: bool) -> Iterator[None]:
    """Add to errors about damaged files how to see what is damaged and, with `can_skip`, how to take the rest."""
    try:
        yield
    except CorruptDataError as error:
        error.hint = error.hint or _look(path) + (
            "; --skip-bad takes the sound episodes, if there are any" if can_skip else ""
        )
        raise


def _look(path: Path) -> str:
    return f"see what is damaged: rbtool check {shlex.quote(str(path))}"


def sound_steps(reader: StepReader) -> StepReader:
    """The episodes of a damaged dataset of which all rows are there and break no rule of TED as an error.

    Where each episode has a digest of its own, as in a recording, those that match it. The notes of its manifest name
    the files that are damaged and the episodes that are left out, and say so where nothing verifies single episodes.
    `reader` itself where nothing is damaged; CorruptDataError where no episode is sound.
    """
    problems = file_problems(reader)
    proven = reader.proven_episodes() if problems else None
    bad = _bad_episodes(reader)
    if proven is not None:
        bad |= ~proven
    if not problems and not bad.any():
        return reader
    if bad.all():
        said = f": {problems[0]}" if problems else ""
        raise CorruptDataError(f"{reader.path} has no episode that is sound{said}", hint=_look(reader.path))
    numbers = reader.episodes.episode[bad].tolist()
    named = ", ".join(map(str, numbers[:_MOST_NAMED])) + (", …" if len(numbers) > _MOST_NAMED else "")
    notes = list(problems)
    if numbers:
        notes.append(f"{len(numbers):,} of {len(bad):,} episodes are damaged and left out: {named}")
    if problems and proven is None:
        notes.append(UNVERIFIED)
    return SoundSteps(reader, np.flatnonzero(~bad), notes)


def _bad_episodes(reader: StepReader) -> Array:
    """Of each episode, whether rows of it are lost or break a rule."""
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
