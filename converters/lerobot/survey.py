"""Which rows of which files are an episode, and what is wrong with those that cannot be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format.contracts import Array
from ...core.format.documents import dump_json
from ...core.format.manifest import Dropped
from ...core.format.read_errors import FETCH_AGAIN
from ..files.images import Images
from .fields import (
    EPISODE_INDEX,
    FRAME_INDEX,
    LANGUAGE,
    NEXT_FLAGS,
    TASK_INDEX,
    TIMESTAMP,
    EndFlags,
    FeatureColumns,
    columns_of,
)
from .info import INFO, VIDEO, DatasetInfo
from .metadata import EpisodeEntry, FrameEpisode, read_episodes, read_tasks
from .rows import RowsFile, numbers_of, stored_form, texts_of
from .videos import WITHOUT_IMAGES, FoundVideo, VideoSurvey

_ROWS = 1 << 16
_OLDER, _NEWER = "episode_", "file-"
"""How the names of files of rows begin in v2, and in v3."""


@dataclass
class FoundDataset:
    """What a look at all files found: `damaged` has the episodes that cannot be read, and why."""

    columns: FeatureColumns
    episodes: dict[int, FrameEpisode] = field(default_factory=dict)
    damaged: dict[int, RbtoolError] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    videos: dict[str, FoundVideo] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class _FrameRun:
    """Rows of one episode in one file; `tasks` and `text` hold what they have, in the order of the first rows."""

    path: str
    start: int
    stop: int
    frame: int
    done: bool
    tasks: list[int]
    text: dict[str, list[str]]
    problem: RbtoolError | None = None


class DatasetSurvey:
    """Looks at the small columns of all files of rows; `ends_terminated` states that `next.done` is a termination.

    `images` is what becomes of images.
    """

    def __init__(self, info: DatasetInfo, images: Images, *, ends_terminated: bool) -> None:
        self._info = info
        self._images = images
        self._flags = EndFlags(ends_terminated)
        self._entries = read_episodes(info)
        self._tasks = read_tasks(info)
        self._stored: dict[str, str] | None = None
        self._first = ""
        self._others: Counter[str] = Counter()  # columns that the first file has not, and how many files have them
        self._runs: dict[int, list[_FrameRun]] = {}
        self._unreadable: dict[str, RbtoolError] = {}
        self._inside = 0

    def find(self, progress: Callable[[int], None]) -> FoundDataset:
        """Find the episodes; `progress` takes how many more were looked at. Raises where no file can be read."""
        info = self._info
        paths = self._paths()
        for path in paths:
            try:
                self._look_into(path)
            except FormatError as error:
                self._unreadable[path] = error
            progress(1)
        if self._stored is None:
            raise next(iter(self._unreadable.values()))
        columns = columns_of(info, self._stored, self._images)
        found = FoundDataset(columns, files=paths)
        for number in sorted(self._entries.keys() | self._runs.keys()):
            try:
                found.episodes[number] = self._episode(number, columns)
            except FormatError as error:
                found.damaged[number] = error
        self._add_dropped(found)
        self._require_videos(found)
        found.notes += self._notes(found)
        return found

    def _paths(self) -> list[str]:
        """The files of rows that are there, and those that are named."""
        info = self._info
        folder = info.root / "data"
        there = {path.relative_to(info.root).as_posix() for path in folder.rglob("*.parquet") if path.is_file()}
        if not there:
            raise CorruptDataError(
                f"{info.root} has the metadata of {len(self._entries):,} episodes, and no files of rows in data",
                hint=FETCH_AGAIN,
            )
        other = _OLDER if info.shares_files else _NEWER
        odd = sorted(path for path in there if path.rpartition("/")[2].startswith(other))
        if odd:
            raise FormatError(
                f"{info.root} states {info.version}, and has {odd[0]} of another version: versions are mixed",
                hint=FETCH_AGAIN,
            )
        return sorted(there)

    def _look_into(self, path: str) -> None:
        info = self._info
        with RowsFile(info.root / path) as file:
            known = info.features.keys()
            stored = {one.name: stored_form(one.type) for one in file.schema}
            for name in (EPISODE_INDEX, FRAME_INDEX):
                if name not in stored:
                    raise FormatError(f"{file.path} has no column {name!r}")
            for name, dtype in () if self._stored is None else self._stored.items():
                if name in known and stored.get(name) != dtype:
                    has = f"{name!r} as {stored[name]}" if name in stored else f"no column {name!r}"
                    raise FormatError(f"{file.path} has {has}, and {self._first} has it as {dtype}")
            if self._stored is None:
                columns_of(info, stored, self._images)
                self._stored, self._first = stored, path
            self._others.update(stored.keys() - self._stored.keys() - known)
            small = [name for name in (TIMESTAMP, TASK_INDEX, *NEXT_FLAGS) if name in stored and name in known]
            texts = [name for name in known if stored.get(name) == "string"]
            names = [EPISODE_INDEX, FRAME_INDEX, *small, *texts]
            for start in range(0, file.rows, _ROWS):
                stop = min(start + _ROWS, file.rows)
                self._take(_RowBlock(file, path, file.read(names, start, stop), start, texts))

    def _take(self, block: _RowBlock) -> None:
        episodes, frames = block.integers(EPISODE_INDEX), block.integers(FRAME_INDEX)
        cuts = [0, *(np.flatnonzero(np.diff(episodes)) + 1).tolist(), len(episodes)]
        flags = self._flags.of(
            {name: block.floats(name) != 0 for name in NEXT_FLAGS if name in block.names}, len(frames)
        )
        for low, high in pairwise(cuts):
            run = _FrameRun(
                block.path, block.start + low, block.start + high, int(frames[low]), bool(flags.ends[high - 1]),
                block.distinct_tasks(low, high), block.distinct_texts(low, high),
            )  # fmt: skip
            jumps = np.flatnonzero(np.diff(frames[low:high]) != 1)
            if len(jumps):
                at = low + int(jumps[0])
                run.problem = FormatError(
                    f"{block.file.path}: frame_index goes from {frames[at]} to {frames[at + 1]} at row "
                    f"{block.start + at + 1:,}, inside episode {episodes[low]}"
                )
            run.problem = run.problem or self._drift(block, low, high, frames)
            self._inside += int((flags.terminated | flags.truncated)[low : high - 1].sum())
            self._add(int(episodes[low]), run)

    def _drift(self, block: _RowBlock, low: int, high: int, frames: Array) -> RbtoolError | None:
        """Return what is wrong with the times of rows, by which frames of videos are found."""
        if TIMESTAMP not in block.names or self._images == "skip" or not self._info.visual(VIDEO):
            return None
        stated, fps = block.floats(TIMESTAMP)[low:high], self._info.fps
        apart = np.abs(stated - frames[low:high] / fps)
        bad = ~(apart < 0.5 / fps)
        if not bad.any():
            return None
        at = low + int(bad.argmax())
        return FormatError(
            f"{block.file.path}: row {block.start + at:,} has the timestamp {stated[at - low]:.3f} s, its frame "
            f"{frames[at]} at {fps:g} frames a second is at {frames[at] / fps:.3f} s",
            hint=WITHOUT_IMAGES,
        )

    def _add(self, number: int, run: _FrameRun) -> None:
        """Take a run of rows; one that continues where a block was cut becomes part of the run before it."""
        runs = self._runs.setdefault(number, [])
        before = runs[-1] if runs else None
        if before is not None and before.path == run.path and before.stop == run.start:
            if before.frame + run.start - before.start != run.frame and before.problem is None:
                before.problem = FormatError(
                    f"{self._info.root / run.path}: frame_index does not go on at row {run.start:,}, inside episode "
                    f"{number}"
                )
            before.problem = before.problem or run.problem
            before.stop, before.done = run.stop, run.done
            before.tasks = list(dict.fromkeys([*before.tasks, *run.tasks]))
            before.text = {name: list(dict.fromkeys([*before.text[name], *run.text[name]])) for name in run.text}
            return
        runs.append(run)

    def _episode(self, number: int, columns: FeatureColumns) -> FrameEpisode:
        info, entry, runs = self._info, self._entries.get(number), self._runs.get(number, [])
        if entry is None:
            raise FormatError(
                f"{info.root / runs[0].path} has rows of episode {number}, which the metadata do not name"
            )
        if not runs:
            raise self._why_absent(entry)
        run = runs[0]
        if len(runs) > 1:
            raise FormatError(
                f"{info.root / run.path}: rows of episode {number} are in {len(runs)} places: from row {run.start:,}, "
                f"and from row {runs[1].start:,} of {runs[1].path}"
            )
        if entry.length is not None and entry.length != run.stop - run.start:
            raise FormatError(
                f"{info.root / run.path} has {run.stop - run.start:,} rows of episode {number}, the metadata state "
                f"{entry.length:,}"
            )
        if run.problem is not None:
            raise run.problem
        return FrameEpisode(
            number, run.path, run.start, run.stop, run.frame, run.done,
            self._text(entry, run), entry.videos,
        )  # fmt: skip

    def _why_absent(self, entry: EpisodeEntry) -> RbtoolError:
        path = self._info.root / entry.data
        if entry.data in self._unreadable:
            return self._unreadable[entry.data]
        if not path.is_file():
            return CorruptDataError(f"{path} is missing: it has the rows of episode {entry.number}")
        return FormatError(f"{path} has no rows of episode {entry.number}, which the metadata name")

    def _text(self, entry: EpisodeEntry, run: _FrameRun) -> dict[str, str]:
        unknown = [number for number in run.tasks if number not in self._tasks]
        if self._tasks and unknown:
            raise FormatError(f"{self._info.root / run.path}: episode {entry.number} has the task {unknown[0]}, which "
                              "the metadata do not name")  # fmt: skip
        tasks = [self._tasks[number] for number in run.tasks] if self._tasks else list(entry.tasks)
        found = {LANGUAGE: tasks[0]} if len(tasks) == 1 else {f"{LANGUAGE}s": dump_json(tasks)} if tasks else {}
        return found | {name: values[0] for name, values in run.text.items() if len(values) == 1}

    def _add_dropped(self, found: FoundDataset) -> None:
        """Note columns of a few files, and columns of text that vary within an episode: text belongs to whole ones."""
        for name, count in self._others.items():
            files = f"{count:,} of {len(found.files):,} files {'has' if count == 1 else 'have'} it"
            found.columns.dropped.append(Dropped(name, f"{INFO} does not name it, and {files}"))
        for name in found.columns.text:
            varies = sum(len(run.text.get(name, ())) > 1 for runs in self._runs.values() for run in runs)
            if varies:
                found.columns.dropped.append(
                    Dropped(name, f"it is text that varies within {varies:,} episodes; those of one text have it")
                )

    def _require_videos(self, found: FoundDataset) -> None:
        """Compare the files of videos with the rows."""
        videos = [column for column in found.columns.columns if column.feature.dtype == VIDEO]
        survey = VideoSurvey(self._info, videos)
        for number, episode in list(found.episodes.items()) if videos else ():
            try:
                survey.require(episode)
            except FormatError as error:
                found.damaged[number] = error
                del found.episodes[number]
        for number, problem in survey.shared().items():
            found.damaged[number] = problem
            del found.episodes[number]
        found.videos = survey.found()
        found.notes += survey.notes()

    def _notes(self, found: FoundDataset) -> Iterator[str]:
        info = self._info
        if self._inside:
            yield f"flags are set in {self._inside:,} rows inside episodes, and stay there"
        missing = [path for path in self._unreadable if all(path != one.data for one in self._entries.values())]
        if missing:
            yield f"{missing[0]} cannot be read, and the metadata name no episode in it: {self._unreadable[missing[0]]}"
        rows = sum(map(len, found.episodes.values()))
        if not found.damaged and info.frames is not None and info.frames != rows:
            yield f"{INFO} states {info.frames:,} frames, there are {rows:,}"
        if info.episodes is not None and info.episodes != len(self._entries):
            yield f"{INFO} states {info.episodes:,} episodes, the metadata name {len(self._entries):,}"


class _RowBlock:
    """Rows of the small columns of one file, from row `start` on."""

    def __init__(self, file: RowsFile, path: str, table: Any, start: int, texts: list[str]) -> None:
        self.file, self.path, self.start = file, path, start
        self._table = table
        self._texts = {name: texts_of(table, name, file.path) for name in texts}
        self.names = frozenset(table.column_names)
        self._tasks = self.integers(TASK_INDEX) if TASK_INDEX in self.names else np.zeros(0, np.int64)

    def integers(self, name: str) -> Array:
        return numbers_of(self._table, name, (), np.dtype(np.int64), self.file.path)

    def floats(self, name: str) -> Array:
        return numbers_of(self._table, name, (), np.dtype(np.float64), self.file.path)

    def distinct_tasks(self, low: int, high: int) -> list[int]:
        return list(dict.fromkeys(self._tasks[low:high].tolist()))

    def distinct_texts(self, low: int, high: int) -> dict[str, list[str]]:
        return {name: list(dict.fromkeys(texts[low:high])) for name, texts in self._texts.items()}
