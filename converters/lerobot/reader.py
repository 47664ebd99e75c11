"""Reads LeRobot's folders: rows of Parquet files, with the frames of videos. Never imports lerobot or torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ...core.errors import RbtoolError
from ...core.format.contracts import Array, Piece, SourceFacts
from ...core.format.digest import read_regular
from ...core.format.documents import parse_json
from ...core.format.read_errors import no_match
from ...core.format.reader import PartsReader, refuse_damaged
from ...core.ted.episodes import Final
from ...core.ted.schema import REWARD, row_bytes, ted_fields
from ..files.column_reader import BLOCK_BYTES
from ..files.end_meaning import EndMeaning, meaning_of_ends, refuse_ends
from ..files.images import require_images
from .fields import NEXT_DONE, NEXT_SUCCESS, NEXT_TERMINATED, NEXT_TRUNCATED, EndFlags, FeatureColumn
from .images import column_images
from .info import IMAGE, VIDEO, DatasetInfo, looks_like_lerobot, read_info
from .metadata import FrameEpisode, read_episodes
from .rows import RowsFile, numbers_of
from .runs import runs_of
from .survey import DatasetSurvey, FoundDataset
from .videos import EpisodeVideos, kept_contents

PIECE_BYTES = BLOCK_BYTES
"""TED bytes of the rows in memory at a time."""
_OUTCOME_ROWS = 1 << 18
_DOCUMENT_BYTES = 4 << 20
_METADATA = frozenset({".json", ".jsonl", ".parquet"})


class LerobotReader(PartsReader):
    """The folder of a dataset of LeRobot, v2.0, v2.1 or v3.0, as `codebase_version` in `meta/info.json` states.

    Rows are those of the Parquet files in `data`; an episode is the rows of one `episode_index`, and `frame_index`
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
