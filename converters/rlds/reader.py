"""Reads RLDS datasets that TensorFlow Datasets prepared. Never imports TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ...core.errors import FormatError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.digest import read_regular
from ...core.format.read_errors import no_match
from ...core.format.reader import Reader, refuse_damaged
from ...core.ted.episodes import Final
from ...core.ted.schema import Field, Key, Timing, row_bytes, ted_fields
from ..files.column_reader import BLOCK_BYTES
from ..files.images import require_images, require_jpeg
from ..files.rlds_steps import IS_INIT, IS_TERMINAL, LastStep, require_rlds_last
from .columns import EpisodeRecord, StepColumn
from .example import ExampleParser
from .features import Leaf, load_features
from .layout import TRUNCATED, layout_at, looks_like_rlds
from .metadata import stored_seed
from .records import RecordShard
from .survey import RldsEpisode, RldsSurvey, notes_of, survey

PIECE_BYTES = BLOCK_BYTES
"""TED bytes of the rows in memory at a time."""
COMPILED_BYTES = 512 << 20
"""Bytes of the shards from which on records are parsed by compiled loops, which take 0.4 s to import."""
_OUTCOME_ROWS = 1 << 20


class RldsReader(Reader):
    """The folder of a version of a dataset, or a folder around it: shards of records, each an episode.

    What is under `steps/observation`, and features of steps with other names, is there before and after a step;
    `action` belongs to it, `reward` and `discount` come after it. `is_first` becomes `is_init`, and `is_last` and
    `is_terminal` the flags under `next`.
    Features of episodes are their texts. Episodes are numbered from 0 in the order of the splits and their shards.

    Options: `rlds_last` states whether the last step of episodes is an observation only (`observation`), a `step`, or
    either (`auto`); `filter_key` is the split to read; `images` may be `skip`, and `jpeg` `fast`.

    Raises FormatError for other datasets of TensorFlow Datasets, CorruptDataError for damaged files. A damaged episode
    is refused once it is asked for.
    """

    piece_bytes = PIECE_BYTES
    option_names = frozenset({"rlds_last", "filter_key", "images", "jpeg"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether it is a folder with `features.json` or `dataset_info.json`, and shards."""
        try:
            return looks_like_rlds(path)
        except OSError as error:
            return no_match(error)

    def on_open(self) -> None:
        """Read the documents."""
        self._opened: tuple[int, RecordShard] | None = None
        self._found: RldsSurvey | None = None
        self._choice = require_rlds_last(self.options.get("rlds_last"))
        self._images = require_images(self.options.get("images"), known=("decode", "skip"))
        self._jpeg = require_jpeg(self.options.get("jpeg"))
        self._layout = layout_at(self.path)
        self._features = load_features(self._layout.folder)
        split = self.options.get("filter_key")
        self._split = None if split is None else self._layout.require_split(split)

    @property
    def folder(self) -> Path:
        """The folder of the version."""
        return self._layout.folder

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Look at all records."""
        if self._found is None:
            self._found = survey(
                self._layout, self._features, self._parser, self._split, progress, images=self._images == "decode"
            )
        found = self._found
        sound = {number: one for number, one in found.episodes.items() if self._rows(one)}
        if not sound:
            raise next(iter((*found.problems, *found.damaged.values())), FormatError(f"{self.path} has no steps"))
        numbers = sorted((*sound, *found.damaged))
        observed = [self._is_observed(one) for one in sound.values()]
        return SourceFacts(
            source="rlds",
            id=self._layout.id,
            fields=self._fields,
            episode_numbers=numbers,
            steps=sum(map(self._rows, sound.values())),
            renamed_keys=found.renamed,
            dropped_keys=tuple(found.dropped),
            notes=tuple(self._notes(found)),
            documents={path.name: read_regular(path) for path in self._layout.documents()},
            lengths=[self._rows(sound[number]) if number in sound else 0 for number in numbers],
            final_missing=not all(observed),
            last_terminated=None
            if any(observed)
            else [number in sound and sound[number].is_terminal for number in numbers],
        )

    def _notes(self, found: RldsSurvey) -> Iterator[str]:
        yield self._decision.note
        yield from notes_of(found, self._layout)
        alone = sum(one.steps == 1 and not self._rows(one) for one in found.episodes.values())
        if alone:
            yield f"{alone:,} episode{'s' if alone > 1 else ''} of an observation and no step left out"

    @cached_property
    def _piece_rows(self) -> int:
        return max(1, self.piece_bytes // row_bytes(ted_fields(self._fields)))

    @property
    def _fields(self) -> tuple[tuple[Field, Timing], ...]:
        fields = [(field, column.timing) for column in self._all.columns for field in column.fields()]
        return (*fields, (Field(IS_INIT, "bool", (1,), "info"), "step"))

    @property
    def _all(self) -> RldsSurvey:
        if self._found is None:
            raise FormatError(f"{self.path} was not looked over")
        return self._found

    @cached_property
    def _decision(self) -> LastStep:
        if self._choice == "auto" and self._layout.is_export:
            return LastStep(True, False, "the last step of every episode is an observation only: rbtool wrote it so")
        return self._all.last_steps.decide(self._choice)

    def _is_observed(self, one: RldsEpisode) -> bool:
        return self._decision.observed(is_last=one.is_last)

    def _rows(self, one: RldsEpisode) -> int:
        return max(0, one.steps - self._is_observed(one))

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise what is wrong with the first of these episodes that cannot be read, or with a shard."""
        found = self._all
        if everything and found.problems:
            raise found.problems[0]
        refuse_damaged(numbers, found.damaged)

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time; its record is in memory."""
        columns = [replace(column, jpeg=self._jpeg) for column in self._all.columns]
        for piece in self._pieces(number, columns, self._piece_rows):
            begins = np.zeros((len(piece), 1), bool)
            begins[0] = piece.first
            yield replace(piece, columns={**piece.columns, IS_INIT: begins})

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode."""
        yield from self._pieces(number, [one for one in self._all.columns if one.role == "reward"], _OUTCOME_ROWS)

    def _pieces(self, number: int, columns: Sequence[StepColumn], rows: int) -> Iterator[Piece]:
        one = self._all.episodes[number]
        what = f"episode {number} in {self._path_of(one).name}"
        record = EpisodeRecord(self._data(one), self._parser, self._leaves, what)
        observed, length = self._is_observed(one), self._rows(one)
        terminal, cut = record.flags(IS_TERMINAL), np.zeros(record.steps, bool)
        if self._layout.is_export:
            cut = record.flags(TRUNCATED)
        if observed:  # a step ends with the observation after it
            terminal, cut = terminal[1:], cut[1:]
        text = self._all.texts.read(record.example, record.what)
        seed = stored_seed(record.example) if self._layout.is_export else None
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            last = stop == length
            found: dict[Key, Array] = {}
            for column in columns:
                more = column.timing == "state" and (not last or observed)
                found |= column.read(record, start, stop + more)
            terminated, truncated = terminal[start:stop], cut[start:stop].copy()
            if last:
                truncated[-1] |= one.is_last and not terminated[-1]
            yield Piece(
                number, found, terminated, truncated, first=not start, last=last,
                seed=None if start else seed, text={} if start else text,
                final=Final.OBSERVED if observed else Final.MISSING,
            )  # fmt: skip

    @cached_property
    def _parser(self) -> ExampleParser:
        """Parses the records; compiled loops do where the dataset is so large that importing them takes less time."""
        return ExampleParser(is_compiled=self._layout.stored_bytes() >= COMPILED_BYTES)

    @cached_property
    def _leaves(self) -> dict[str, Leaf]:
        return {leaf.name: leaf for leaf in self._features.steps}

    def _path_of(self, one: RldsEpisode) -> Path:
        return self._layout.shards[one.shard].path

    def _data(self, one: RldsEpisode) -> bytes:
        """Read a record; the shard that was read last stays open."""
        if self._opened is None or self._opened[0] != one.shard:
            self._close_shard()
            self._opened = one.shard, self._layout.shards[one.shard].open()
        return self._opened[1].read(one.place)

    def files(self) -> list[Path]:
        """The documents and the shards that are there."""
        return self._layout.files()

    def survey_state(self) -> RldsSurvey | None:
        """Return what was found in the records."""
        return self._found

    def take_survey(self, state: RldsSurvey) -> None:
        """Take over what was found in the records."""
        self._found = state

    def _close_shard(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    def on_close(self) -> None:
        """Close the shard that is open."""
        self._close_shard()
