"""Reads what RLlib records: JSON lines of batches or transitions, and Parquet files of transitions or of episodes.

Imports pyarrow and msgpack; never ray.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.read_errors import no_match
from ...core.format.reader import Reader
from ...core.ted.episodes import Final
from ...core.ted.schema import Key, key_name, row_bytes, ted_fields
from ..files.end_meaning import EndMeaning, meaning_of_ends, refuse_ends
from ..files.episode_files import natural_order
from .blocks import DONES, EPS_ID, NEXT_OBS, STEP, TERMINATEDS, TIME_LIMIT, TRUNCATEDS, BatchFile, RowBlock
from .columns import BatchColumns
from .episodes import IdEpisode, IdRuns, runs_of
from .json_lines import JsonLines, is_other_document, looks_like_lines
from .parquet import ParquetRows, looks_like_parquet

PIECE_BYTES = 16 << 20
"""TED bytes of the rows in memory at a time."""
_UNREADABLE = (
    OSError, ValueError, LookupError, RuntimeError, NotImplementedError, EOFError, zipfile.BadZipFile, zlib.error,
    struct.error,
)  # fmt: skip
_RUN = re.compile(r"run-[0-9]{6,}-[0-9]+")
_BLOCK = re.compile(r"([0-9A-Za-z]+_[0-9a-f]+)_([0-9]{6,})-([0-9]+)\.parquet")
_MOST_ENVIRONMENTS = 16
_SUFFIXES = frozenset({".json", ".jsonl", ".parquet", ".zip"})
_HELD_BLOCKS = 8
_MOST_STEPS = 1 << 62


class RllibReader(Reader):
    """A file of RLlib's JSON lines or Parquet rows, or a folder of them, which are taken in the order of their names.

    A folder may be the one that `output` names, if there is a single run in it: `ENV/run-WORKER-COUNTER`.

    `obs` becomes `observation`, `new_obs` what is under `next`, whether it follows or not. `infos` is `info.infos`
    under `next`, any other column `info.NAME`. Episodes are numbered from 0 in the order of their first rows.

    Options: `ends` states what `dones` mean, `terminated` (as in RLlib, the default) or `truncated`. `trust_pickle`
    allows compressed columns to be read.

    Raises FormatError for columns that contradict each other and for batches of several policies, CorruptDataError
    for damage, UsageError for compressed columns that are not trusted, and for `ends` where `terminateds` state it.
    """

    piece_bytes = PIECE_BYTES
    option_names = frozenset({"ends", "trust_pickle"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether it is a file with RLlib's columns, or a folder whose first file of such a kind is one."""
        if path.is_dir():
            try:
                found = _named_so(_folder_of(path))
            except OSError as error:
                return no_match(error)
            return bool(found) and _is_one(found[0])
        return path.is_file() and _is_one(path)

    def on_open(self) -> None:
        """Open the files."""
        if self.path.is_dir():
            if len(runs := _runs_in(self.path)) > 1:
                raise FormatError(
                    f"{self.path} has {len(runs):,} runs, {runs[0].name} to {runs[-1].name}: RLlib may write rows of "
                    "one run again in the next, so that they are not read as one dataset",
                    hint=f"name the folder of one run, such as {runs[-1]}",
                )
            named = _named_so(_folder_of(self.path))
            self._others = [path.name for path in named if not _is_one(path) and is_other_document(path)]
            self._paths = [path for path in named if path.name not in set(self._others)]
        else:
            self._paths, self._others = [self.path], []
        if not self._paths:
            raise FormatError(f"{self.path} has no JSON lines or Parquet files with RLlib's columns")
        trusted = bool(self.options.get("trust_pickle"))
        self._opened: dict[int, BatchFile] = {}
        self._trusted = trusted
        self._blocks: list[tuple[int, Any]] = []
        self._starts: list[int] = []
        self._held: dict[int, RowBlock] = {}

    def _file(self, number: int) -> BatchFile:
        found = self._opened.get(number)
        if found is None:
            for other in list(self._opened):
                self._opened.pop(other).close()
            path = self._paths[number]
            with path.open("rb") as file:
                is_parquet = file.read(4) == b"PAR1"
            found = ParquetRows(path, trusted=self._trusted) if is_parquet else JsonLines(path, trusted=self._trusted)
            self._opened[number] = found
        return found

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Read all rows once, for their ids, flags and forms; none is kept."""
        columns, runs, rows, ended = BatchColumns(self.path), IdRuns(), 0, 0
        self._damage: list[CorruptDataError] = []
        self._damaged: Counter[str] = Counter()
        for number, path in enumerate(self._paths):
            if not self._can_open(number):
                continue
            for place, block in self._file(number).blocks():
                columns.add(block, path)
                ends = _ends(path, block)
                ended += int(ends.sum())
                for run in runs_of(block, ends, rows, number):
                    runs.add(run)
                self._blocks.append((number, place))
                self._starts.append(rows)
                rows += block.rows
            self._damage += self._file(number).damage.values()
            self._damaged[self._file(number).part] += len(self._file(number).damage)
        if not rows and self._damage:
            raise self._damage[0]
        if not rows:
            raise FormatError(f"{self.path} has no rows")
        self._rows = rows
        columns.finish()
        self._columns = columns
        self._meaning = self._meaning_of_flags(columns, ended)
        self._episodes = runs.episodes()
        progress(len(self._episodes))
        self._size = max(1, self.piece_bytes // max(1, row_bytes(ted_fields(columns.fields))))
        return self._facts()

    def _can_open(self, number: int) -> bool:
        """Open a file; note the damage of one of several that cannot be opened at all."""
        try:
            self._file(number)
        except (OSError, ValueError) as error:
            foreign = isinstance(error, RbtoolError) and not isinstance(error, CorruptDataError)
            if foreign or len(self._paths) == 1:
                raise
            reason = " ".join(str(error).split())[:200]
            what = error if isinstance(error, CorruptDataError) else None
            self._damage.append(what or CorruptDataError(f"{self._paths[number]} cannot be read: {reason}"))
            self._damaged["file"] += 1
            return False
        return True

    def _facts(self) -> SourceFacts:
        columns = self._columns
        return SourceFacts(
            source="rllib",
            id=self.path.stem,
            fields=columns.fields,
            episode_numbers=range(len(self._episodes)),
            steps=self._rows,
            renamed_keys={path: key_name(key) for path, key in columns.renamed.items()},
            dropped_keys=columns.dropped,
            notes=tuple(self._notes()),
            lengths=[len(episode) for episode in self._episodes],
            final_missing=not columns.has_next,
        )

    def _meaning_of_flags(self, columns: BatchColumns, ended: int) -> EndMeaning:
        if columns.has(TERMINATEDS):
            refuse_ends(self.path, self.options, f"has {TERMINATEDS}, which state what ends episodes")
            return EndMeaning(terminated=True)
        if columns.has_limits:
            refuse_ends(self.path, self.options, f"has infos with {TIME_LIMIT}, which state what ends episodes")
            return EndMeaning(terminated=True, note=f"time limits are those that infos state ({TIME_LIMIT})")
        if not columns.has(DONES):
            refuse_ends(self.path, self.options, f"has neither {DONES} nor {TERMINATEDS}: the option has no use")
            return EndMeaning(terminated=True, note="there are no flags: episodes end where their ids do, truncated")
        found = meaning_of_ends(
            self.options, "terminated", "dones are set at terminal states and time limits alike, and RLlib bootstraps "
            "from neither",
        )  # fmt: skip
        return found if ended else EndMeaning(found.terminated, note=f"{DONES} are set in no row")

    def _notes(self) -> Iterator[str]:
        if self._meaning.note:
            yield self._meaning.note
        yield from self._columns.notes
        if not self._columns.has(EPS_ID):
            yield "there is no eps_id: rows follow each other in the order of the files"
        bare = sum(episode.unshown for episode in self._episodes)
        if bare:
            cut = "is" if bare == 1 else "are"
            yield (
                f"{_episodes(bare)} without a flag {cut} cut at the end of a batch or file: there is neither {STEP} "
                f"nor {NEXT_OBS} to show whether the next rows follow; ends there are truncated"
            )
        gaps = sum(episode.inferred for episode in self._episodes) - bare
        if gaps and self._columns.has(EPS_ID):
            yield f"rows are missing after {_episodes(gaps)}, or the id is used again: ends there are truncated"
        elif gaps:
            yield f"the next rows do not follow after {_episodes(gaps)} without a flag: ends there are truncated"
        late = sum(episode.starts_late for episode in self._episodes)
        if late:
            yield f"the first rows of {_episodes(late)} are not in the files: {STEP} starts after 0"
        if self._damage:
            parts = " and ".join(
                f"{count:,} {part}{'s' if count > 1 else ''}" for part, count in self._damaged.items() if count
            )
            are = "is" if len(self._damage) == 1 else "are"
            yield f"{parts} {are} damaged and left out, and the steps there are missing: {self._damage[0]}"
        if self._others:
            names = ", ".join(self._others[:3]) + (", …" if len(self._others) > 3 else "")
            yield f"{len(self._others):,} files in the folder have none of RLlib's rows, and are not read: {names}"

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise the damage of the first line that has any, if all episodes were asked for."""
        if everything and self._damage:
            raise self._damage[0]

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        episode = self._episodes[number]
        held: _BlockRows | None = None
        for rows in self._slices(episode):
            if held is not None:
                yield self._piece(number, episode, held, rows, first=held.at == 0)
            held = rows
        if held is not None:
            yield self._piece(number, episode, held, None, first=held.at == 0)

    def _slices(self, episode: IdEpisode) -> Iterator[_BlockRows]:
        """Cut the rows of an episode where blocks end, and pieces get too large."""
        at = 0
        for start, stop in episode.ranges:
            while start < stop:
                number = bisect_right(self._starts, start) - 1
                begin = self._starts[number]
                block = self._block(number)
                end = min(stop, begin + block.rows, start + self._size)
                yield _BlockRows(block, start - begin, end - begin, at)
                at += end - start
                start = end

    def _block(self, number: int) -> RowBlock:
        found = self._held.pop(number, None)
        if found is None:
            file, place = self._blocks[number]
            found = self._columns.like(self._file(file).block(place))
            while len(self._held) >= _HELD_BLOCKS:
                self._held.pop(next(iter(self._held)))
        self._held[number] = found
        return found

    def _piece(
        self, number: int, episode: IdEpisode, rows: _BlockRows, after: _BlockRows | None, *, first: bool
    ) -> Piece:
        columns, following = {}, dict[Key, Array]()
        for path, key, timing in self._columns.sources:
            found = rows.block.columns[path][rows.start : rows.stop]
            if timing == "state" and not self._columns.has_next and after is not None:
                found = np.concatenate((found, after.block.columns[path][after.start : after.start + 1]))
            columns[key] = found
        for path, key in self._columns.next_sources:
            following[key] = rows.block.columns[path][rows.start : rows.stop]
        terminated, truncated = self._flags(rows)
        last = after is None
        return Piece(
            number, columns, terminated, truncated, first=first, last=last, next=following,
            text=self._columns.text_of(episode.key) if first else {},
            final=Final.OBSERVED if self._columns.has_next else Final.MISSING,
            inferred=last and episode.inferred,
        )  # fmt: skip

    def _flags(self, rows: _BlockRows) -> tuple[Array, Array]:
        def flag(name: str) -> Array:
            found = rows.block.columns.get((name,))
            return np.zeros(rows.stop - rows.start, bool) if found is None else found[rows.start : rows.stop] != 0

        none = np.zeros(rows.stop - rows.start, bool)
        if self._columns.has(TERMINATEDS):
            return flag(TERMINATEDS), flag(TRUNCATEDS)
        if self._columns.has_limits:
            limits = none if rows.block.limits is None else rows.block.limits[rows.start : rows.stop]
            return flag(DONES) & ~limits, limits
        return (flag(DONES), none) if self._meaning.terminated else (none, flag(DONES))

    def files(self) -> list[Path]:
        """The files with rows."""
        return self._paths

    def on_close(self) -> None:
        """Close the files."""
        for file in self._opened.values():
            file.close()


class _BlockRows:
    """Rows `[start, stop)` of a block; `at` is the step of the episode with which they start."""

    def __init__(self, block: RowBlock, start: int, stop: int, at: int) -> None:
        self.block, self.start, self.stop, self.at = block, start, stop, at


def _ends(path: Path, block: RowBlock) -> Array:
    """Return in which rows of a block a flag ends an episode."""
    ends = np.zeros(block.rows, bool) if block.limits is None else block.limits.copy()
    names = (TERMINATEDS, TRUNCATEDS) if (TERMINATEDS,) in block.columns else (DONES,)
    for name in names:
        flags = block.columns.get((name,))
        if flags is None:
            continue
        if flags.ndim != 1 or ((flags != 0) & (flags != 1)).any():
            raise FormatError(f"{path}: {name} has values other than 0 and 1")
        ends |= flags != 0
    return ends


def _episodes(count: int) -> str:
    return f"{count:,} episode{'s' if count > 1 else ''}"


def _runs_in(folder: Path) -> list[Path]:
    """List the folders of RLlib's runs in a folder, or one level further down, in their order; none beside files."""
    if _named_so(folder):
        return []
    inside = [path for path in folder.iterdir() if path.is_dir()]
    found = [path for path in inside if _RUN.fullmatch(path.name)]
    if not found and len(inside) <= _MOST_ENVIRONMENTS:
        found = [path for one in inside for path in one.iterdir() if _RUN.fullmatch(path.name) and path.is_dir()]
    return sorted(found)


def _folder_of(path: Path) -> Path:
    """The folder with the files: that of the first run, where they are not in the folder itself."""
    return next(iter(_runs_in(path)), path)


def _order(path: Path) -> tuple[bool, Any]:
    """How files are ordered: those of a run by when they were written and their block, others as people count."""
    block = _BLOCK.fullmatch(path.name)
    if block is None:
        return False, natural_order(path.name)
    return True, (block[1], int(block[2]), int(block[3]))


def _named_so(folder: Path) -> list[Path]:
    """List the files of a folder that may have rows, ordered as people count."""
    found = [path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES and path.is_file()]
    return sorted((path for path in found if not path.name.startswith(".")), key=_order)


def _is_one(path: Path) -> bool:
    try:
        return looks_like_lines(path) or looks_like_parquet(path)
    except (RbtoolError, *_UNREADABLE):
        return False
