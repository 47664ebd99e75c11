"""Reads runs of the DQN Replay dataset: checkpoints of gzip files, streamed. Never imports Dopamine or an emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.converter import Reader
from ...core.format.documents import dump_json
from ...core.format.files import no_match
from ...core.format.manifest import Dropped
from ...core.ted.episodes import Final
from ...core.ted.schema import Field, Key, Timing, dtype_name, row_bytes, ted_fields
from ..files.columns import BLOCK_BYTES
from .run import (
    ACTION,
    LOGS,
    OBSERVATION,
    REWARD,
    CheckpointRows,
    RunEpisode,
    RunSurvey,
    checkpoints_at,
    look_over,
    looks_like_run,
)

PIECE_BYTES = BLOCK_BYTES
"""TED bytes of the rows in memory at a time."""
_OUTCOME_ROWS = 1 << 20
_OPEN = 2
_KEYS: dict[str, Key] = {OBSERVATION: ("observation",), ACTION: ("action",), REWARD: ("reward",)}


class AtariReader(Reader):
    """The folder of a run, or its `replay_logs`: `$store$_observation_ckpt.0.gz` and the like.

    Frames are `observation`, one a row and never stacked, `action` and `reward` are as stored; `terminal` ends an
    episode. Checkpoints are in the order of their numbers. Rows of two are joined where `add_count` states that they
    follow one another; where they do not, the episode is cut. Rows that `invalid_range` names are left out, unless all
    that they lack is in the checkpoint before or after. Blank rows before episodes are no steps.

    There is no frame after the last step of an episode. A checkpoint that is missing or damaged is an error; where
    chosen episodes are asked for, it is left out, and named in a note.

    Option: `id`, the published run that the folder is.
    """

    piece_bytes = PIECE_BYTES
    option_names = frozenset({"id"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether it is a folder with the files of a checkpoint."""
        try:
            return looks_like_run(path)
        except OSError as error:
            return no_match(error)

    def on_open(self) -> None:
        """Find the files."""
        self._open: dict[int, CheckpointRows] = {}
        self._verdicts: dict[int, CorruptDataError | None] = {}
        self._touched: set[int] = set()
        self._run: RunSurvey | None = None
        if not looks_like_run(self.path):
            raise FormatError(f"{self.path} has no checkpoints, which are files like $store$_observation_ckpt.0.gz")

    @property
    def _found(self) -> RunSurvey:
        if self._run is None:
            self._run = look_over(checkpoints_at(self.path), self.path, self._are_zero)
            self._touched.clear()
        return self._run

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Read the small arrays of all checkpoints and find the episodes."""
        run = self._found
        progress(len(run.episodes))
        if not run.episodes:
            raise (run.problems or (FormatError(f"{self.path} has no steps"),))[0]
        lengths = [len(one) for one in run.episodes]
        asked = self.options.get("id")
        others = sorted({name for one in run.checkpoints for name in one.others})
        return SourceFacts(
            source="atari",
            id=str(asked) if asked is not None else _id_of(self.path),
            fields=self._fields(run),
            episode_numbers=range(len(lengths)),
            steps=sum(lengths),
            dropped_keys=tuple(Dropped(name, "it is not part of the published layout") for name in others),
            notes=(*run.notes, *(f"left out: {problem.message}" for problem in run.problems)),
            documents={"checkpoints.json": dump_json({"checkpoints": run.stated}, indent=1).encode()},
            lengths=lengths,
            final_missing=True,
            last_terminated=[one.terminated for one in run.episodes],
        )

    @staticmethod
    def _fields(run: RunSurvey) -> tuple[tuple[Field, Timing], ...]:
        forms = {name: (dtype_name(dtype), shape) for name, (dtype, shape) in run.form.columns.items()}
        return (
            (Field(_KEYS[OBSERVATION], *forms[OBSERVATION], "observation"), "state"),
            (Field(_KEYS[ACTION], *forms[ACTION], "action"), "step"),
            (Field(_KEYS[REWARD], *forms[REWARD], "reward"), "result"),
        )

    def survey_state(self) -> RunSurvey:
        """Return the time line."""
        return self._found

    def take_survey(self, state: RunSurvey) -> None:
        """Take over the time line."""
        self._run = state

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise what is wrong with the first checkpoint that is left out, if everything was asked for."""
        if everything and self._found.problems:
            raise self._found.problems[0]

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        run = self._found
        rows = max(1, self.piece_bytes // max(1, row_bytes(ted_fields(self._fields(run)))))
        yield from self._pieces(number, tuple(_KEYS), rows)

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode."""
        yield from self._pieces(number, (REWARD,), _OUTCOME_ROWS)

    def _pieces(self, number: int, names: Sequence[str], rows: int) -> Iterator[Piece]:
        run, kept = self._found, np.zeros(0)
        one = run.episodes[number]
        try:
            if OBSERVATION in names:
                self._require_blank(number, one)
            for start in range(one.start, one.stop, rows):
                stop = min(start + rows, one.stop)
                found = {
                    _KEYS[name]: self._read(self._found, name, start, stop) for name in names if name != OBSERVATION
                }
                if OBSERVATION in names:
                    after = self._read(self._found, OBSERVATION, start + (start > one.start), min(stop + 1, one.stop))
                    frames = np.concatenate((kept, after)) if start > one.start else after
                    found[_KEYS[OBSERVATION]], kept = frames, frames[-1:].copy()
                yield _piece(number, one, found, start, stop)
        except RbtoolError:
            self._touched.clear()
            raise

    def _require_blank(self, number: int, one: RunEpisode) -> None:
        if one.blanks and not self._are_zero(self._found, one.start - one.blanks, one.start):
            raise FormatError(
                f"{self.path}: episode {number} has frames in the {one.blanks} rows before it, which are blank before "
                "other episodes"
            )

    def _are_zero(self, run: RunSurvey, start: int, stop: int) -> bool:
        return not self._read(run, OBSERVATION, start, stop).any()

    def _read(self, run: RunSurvey, name: str, start: int, stop: int) -> Array:
        """Read rows of the run; none of them where the range is empty."""
        if start == stop:
            dtype, shape = run.form.columns[name]
            return np.zeros((0, *shape), dtype)
        parts = [self._opened(run, place).read(name, *slots) for place, *slots in run.parts(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _opened(self, run: RunSurvey, place: int) -> CheckpointRows:
        self._touched.add(place)
        found = self._open.pop(place, None)
        if found is None:
            while len(self._open) >= _OPEN:
                oldest = next(iter(self._open))
                if oldest in self._touched:
                    self._verdict(oldest)
                self._open.pop(oldest).close()
            found = CheckpointRows(run.checkpoints[place])
        self._open[place] = found
        return found

    def _verdict(self, place: int) -> CorruptDataError | None:
        """Return what is wrong with the files of a checkpoint that were read; they are read to their ends for it."""
        if place not in self._verdicts:
            try:
                self._open[place].verify_read()
                self._verdicts[place] = None
            except CorruptDataError as error:
                self._verdicts[place] = error
        return self._verdicts[place]

    def verify_read(self) -> None:
        """Raise CorruptDataError for the first checkpoint that is damaged, of those that were read."""
        touched, self._touched = sorted(self._touched), set()
        for place in touched:
            damage = self._verdict(place)
            if damage is not None:
                raise damage

    def files(self) -> list[Path]:
        """The files of all checkpoints that can be read."""
        return [path for one in self._found.checkpoints for path in one.paths.values()]

    def on_close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()


def _piece(number: int, one: RunEpisode, columns: dict[Key, Array], start: int, stop: int) -> Piece:
    terminated = np.zeros(stop - start, bool)
    last = stop == one.stop
    terminated[-1] = last and one.terminated
    return Piece(
        number, columns, terminated, np.zeros(stop - start, bool), first=start == one.start, last=last,
        final=Final.MISSING,
    )  # fmt: skip


def _id_of(path: Path) -> str:
    """`Pong/1` for the folder of a run, else the name of the folder."""
    run = path.absolute()
    run = run.parent if run.name == LOGS else run
    return f"{run.parent.name}/{run.name}" if run.name.isdecimal() and run.parent.name else run.name
