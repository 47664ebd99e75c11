"""Reads LeRobot's folders: rows of Parquet files, with the frames of videos. Never imports lerobot or torch.

A first pass over the small columns of all files finds which rows are which episode, and what is wrong with the
episodes that cannot be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.converter import PartsReader, refuse_damaged
from ...core.format.documents import dump_json, parse_json
from ...core.format.files import FETCH_AGAIN, no_match, read_regular
from ...core.format.manifest import Dropped
from ...core.ted.episodes import Final
from ...core.ted.schema import REWARD, row_bytes, ted_fields
from ..files.columns import BLOCK_BYTES
from ..files.end_meaning import EndMeaning, meaning_of_ends, refuse_ends
from ..files.images import Images, require_images
from .fields import (
    EPISODE_INDEX,
    FRAME_INDEX,
    LANGUAGE,
    NEXT_DONE,
    NEXT_FLAGS,
    NEXT_SUCCESS,
    NEXT_TERMINATED,
    NEXT_TRUNCATED,
    TASK_INDEX,
    TIMESTAMP,
    EndFlags,
    FeatureColumn,
    FeatureColumns,
    columns_of,
)
from .metadata import (
    IMAGE,
    INFO,
    VIDEO,
    DatasetInfo,
    EpisodeEntry,
    FrameEpisode,
    looks_like_lerobot,
    read_episodes,
    read_info,
    read_tasks,
    runs_of,
)
from .rows import RowsFile, column_images, numbers_of, stored_form, texts_of
from .videos import WITHOUT_IMAGES, EpisodeVideos, FoundVideo, VideoSurvey, kept_contents

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
                self._examine(path)
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

    def _examine(self, path: str) -> None:
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


PIECE_BYTES = BLOCK_BYTES
"""TED bytes of the rows in memory at a time."""
_OUTCOME_ROWS = 1 << 18
_DOCUMENT_BYTES = 4 << 20
_METADATA = frozenset({".json", ".jsonl", ".parquet"})


class LerobotReader(PartsReader):
    """The folder of a dataset of LeRobot, v2.0, v2.1 or v3.0, as `codebase_version` in `meta/info.json` states.

    Rows come from the Parquet files in `data`; an episode is the rows of one `episode_index`, and `frame_index`
    has to count them. `observation.images.top` is (observation, image, top), the parts of other names are the parts of
    their keys. Texts of tasks are the text `language_instruction` of episodes.

    Images in columns are decoded by Pillow. Videos are kept: rows refer to their frames (`format.videos`); with the
    option `images` set to `decode` they are decoded by PyAV, with `skip` all images are left out. The frame of a row is
    the one that is shown `frame_index / fps` seconds after the episode begins in the video, and one that is half a
    frame away is refused.

    Options: `images` is `keep`, `decode` or `skip`; `ends` states whether `next.done` and `next.success` mean
    terminations (`terminated`, the default) or time limits (`truncated`); `id` is the repository.

    Raises FormatError for what contradicts itself, CorruptDataError for damaged files.
    """

    piece_bytes = PIECE_BYTES
    option_names = frozenset({"id", "images", "ends"})

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether it is a folder with LeRobot's metadata."""
        try:
            return looks_like_lerobot(path)
        except (RbtoolError, OSError) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Read `info.json`."""
        self._images = require_images(self.options.get("images"), known=("keep", "decode", "skip"))
        self._info: DatasetInfo = read_info(self.path)
        self._meaning = self._meaning_of_ends()
        self._end_flags = EndFlags(self._meaning.terminated)
        self._state: FoundDataset | None = None
        self._files: dict[str, RowsFile] = {}
        self._open_videos: EpisodeVideos | None = None

    def _meaning_of_ends(self) -> EndMeaning:
        names = self._info.features.keys()
        if names & {NEXT_TERMINATED, NEXT_TRUNCATED}:
            refuse_ends(self.path, self.options, "has flags that state how episodes end")
            return EndMeaning(terminated=True)
        if not names & {NEXT_DONE, NEXT_SUCCESS}:
            refuse_ends(self.path, self.options, "has no flags: all episodes end truncated")
            return EndMeaning(terminated=True, note="there are no flags: all episodes end truncated")
        return meaning_of_ends(
            self.options, "terminated", "next.done is set at terminal states and at time limits alike"
        )  # fmt: skip

    @property
    def _found(self) -> FoundDataset:
        return self._surveyed(lambda files: None)

    def _surveyed(self, progress: Callable[[int], None]) -> FoundDataset:
        if self._state is None:
            survey = DatasetSurvey(self._info, self._images, ends_terminated=self._meaning.terminated)
            self._state = survey.find(progress)
        return self._state

    @property
    def _videos(self) -> EpisodeVideos:
        if self._open_videos is None:
            self._open_videos = EpisodeVideos(self._info, self._found.videos)
        return self._open_videos

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Read the small columns of all files and find the episodes."""
        found = self._surveyed(progress)
        numbers = sorted(found.episodes.keys() | found.damaged.keys())
        chosen = [found.episodes.get(number) for number in numbers]
        lengths = [0 if one is None else len(one) for one in chosen]
        asked = self.options.get("id")
        return SourceFacts(
            source="lerobot",
            id=str(asked) if asked is not None else self.path.absolute().name,
            fields=found.columns.fields,
            episode_numbers=numbers,
            steps=sum(lengths),
            renamed_keys=found.columns.renamed,
            dropped_keys=tuple(sorted(found.columns.dropped, key=lambda one: one.key)),
            notes=tuple(filter(None, (self._meaning.note, *found.notes))),
            documents=self._documents(),
            lengths=lengths,
            final_missing=True,
            last_terminated=[one is not None and one.terminated for one in chosen],
        )

    def _documents(self) -> dict[str, bytes]:
        """The metadata files that are not large; FormatError for JSON that is none."""
        found = {}
        for path in self._metadata():
            if path.parent.name == "meta" and path.stat().st_size <= _DOCUMENT_BYTES:
                found[f"meta/{path.name}"] = data = read_regular(path)
                for line in data.splitlines() if path.suffix == ".jsonl" else [data] * (path.suffix == ".json"):
                    parse_json(line, str(path))
        return found

    def _metadata(self) -> list[Path]:
        known = (path for path in (self.path / "meta").rglob("*") if path.suffix in _METADATA and path.is_file())
        return sorted(known)

    def survey_state(self) -> FoundDataset:
        """Return what the files hold."""
        return self._found

    def take_survey(self, state: FoundDataset) -> None:
        """Take over what the files hold."""
        self._state = state

    def shard_starts(self) -> list[int]:
        """The first episodes of the runs that a stream reads."""
        entries = list(read_episodes(self._info).values())
        paths = {path for entry in entries for path in (entry.data, *(one.path for one in entry.videos.values()))}
        sizes = {path: (self.path / path).stat().st_size for path in paths if (self.path / path).is_file()}
        return [run[0].number for run in runs_of(entries, sizes) if run]

    def require_sound(self, numbers: Sequence[int], *, everything: bool) -> None:
        """Raise what is wrong with the first of these episodes that cannot be read."""
        refuse_damaged(numbers, self._found.damaged)

    def videos_of(self, numbers: Sequence[int]) -> dict[str, Path | bytes]:
        """The videos of these episodes that are kept."""
        found = self._found
        names = [column.name for column in found.columns.columns if column.is_kept]
        chosen = [found.episodes[number] for number in numbers if number in found.episodes]
        paths = sorted({one.videos[name].path for one in chosen for name in names})
        return kept_contents(self._info, {path: found.videos[path] for path in paths})

    def read_episode(self, number: int) -> Iterator[Piece]:
        """Yield the steps of one episode, about `piece_bytes` at a time."""
        columns = self._found.columns
        rows = max(1, self.piece_bytes // max(1, row_bytes(ted_fields(columns.fields))))
        yield from self._pieces(number, columns.columns, rows)

    def read_outcomes(self, number: int) -> Iterator[Piece]:
        """Yield the rewards and flags of one episode."""
        rewards = [column for column in self._found.columns.columns if column.field.key == REWARD]
        yield from self._pieces(number, rewards, _OUTCOME_ROWS)

    def _pieces(self, number: int, columns: Sequence[FeatureColumn], rows: int) -> Iterator[Piece]:
        one = self._found.episodes[number]
        held: dict[str, Array] = {}
        for start in range(0, len(one), rows):
            stop = min(start + rows, len(one))
            last = stop == len(one)
            # A state has a row more than there are steps, which is the first one of the next piece: it is held.
            found = self._rows(one, columns, start + bool(held), min(stop + 1, len(one)))
            found = {name: np.concatenate((held[name], array)) if held else array for name, array in found.items()}
            held = {} if last else {name: array[-1:].copy() for name, array in found.items()}
            steps = stop - start
            flags = self._end_flags.of({name: found[name][:steps] for name in self._found.columns.flags}, steps)
            terminated, truncated = flags.terminated.copy(), flags.truncated.copy()
            if last:
                terminated[-1] = one.terminated
                truncated[-1] |= not one.terminated
            given = {
                column.field.key: found[column.name][: None if column.timing == "state" else steps]
                for column in columns
            }
            yield Piece(
                number, given, terminated, truncated, first=not start, last=last,
                text=dict(one.text) if not start else {}, final=Final.MISSING if last else Final.OBSERVED,
            )  # fmt: skip

    def _rows(self, one: FrameEpisode, columns: Sequence[FeatureColumn], start: int, stop: int) -> dict[str, Array]:
        """Read rows `[start, stop)` of an episode, by the names of features; flags are bool `[rows]`."""
        flags = self._found.columns.flags
        names = [column.name for column in columns if column.feature.dtype != VIDEO]
        file = self._file(one.path)
        table = file.read(list(dict.fromkeys([*names, *flags])), one.start + start, one.start + stop)
        found = {name: numbers_of(table, name, (), np.dtype(np.float64), file.path) != 0 for name in flags}
        for column in columns:
            form = column.field
            if column.feature.dtype == VIDEO:
                found[column.name] = self._videos.read(one, column, start, stop)
            elif column.feature.dtype == IMAGE:
                found[column.name] = column_images(table, column, file.path, one.start + start)
            elif column.name in flags:
                found[column.name] = found[column.name].reshape(-1)
            else:
                found[column.name] = numbers_of(table, column.name, form.shape, form.numpy, file.path)
        return found

    def _file(self, path: str) -> RowsFile:
        found = self._files.pop(path, None)
        if found is None:
            self._close_files()
            found = RowsFile(self.path / path)
        self._files[path] = found
        return found

    def _close_files(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def files(self) -> list[Path]:
        """The metadata, the files of rows, and the videos that are decoded."""
        found = self._found
        names = [column.name for column in found.columns.columns if column.feature.dtype == VIDEO]
        videos = {one.videos[name].path for one in found.episodes.values() for name in names}
        return [*self._metadata(), *(self.path / name for name in (*found.files, *sorted(videos)))]

    def on_close(self) -> None:
        """Close the files."""
        self._close_files()
        if self._open_videos is not None:
            self._open_videos.close()
