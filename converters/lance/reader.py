"""Reads datasets of LeRobot in Lance tables, and single tables of frames.

A dataset consists of three tables:

    frames.lance    one row per frame, in place of Parquet files; `observation.state` is named `observation_state`
    videos.lance    one row per video file, with its bytes
    meta.lance      the files of LeRobot's folder `meta`, beside or in place of that folder

Only the origin of rows and videos differs from LeRobot v3, so `LanceReader` extends the reader of LeRobot. Videos are
copied to temporary files while the reader is open.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format import fs
from ...core.format.contracts import Array, Closing, SourceFacts
from ...core.format.documents import dump_json, parse_json
from ...core.format.files import FETCH_AGAIN, no_match
from ...core.format.manifest import is_inside
from ...core.progress import counted
from ..files.images import image_form, is_image
from ..lerobot.metadata import (
    EPISODE_INDEX,
    FRAME_INDEX,
    FRAMES_TABLE,
    IMAGE,
    INDEX,
    INFO,
    META_TABLE,
    VIDEO,
    VIDEOS_TABLE,
    DatasetInfo,
    EpisodeEntry,
    Feature,
    looks_like_lerobot,
    read_episodes,
    read_info,
)
from ..lerobot.reader import (
    WITHOUT_IMAGES,
    DatasetSurvey,
    FoundDataset,
    LerobotReader,
    RowsFile,
    column_of,
    numbers_of,
    stored_form,
)
from .tables import LanceProcess, LanceTable, bytes_of, is_table, require_pylance

_DESCRIPTORS = Path("/proc/self/fd")
_ROWS = 1 << 16
_MOST_METADATA = 1 << 30
_PREFIXES = {"observation_images_": "observation.images.", "observation_": "observation.", "next_": "next."}
"""Prefixes of columns, and of the features of LeRobot that they stand for, in a table without metadata."""


class LanceRows(RowsFile):
    """A table of frames with the interface of a file of rows.

    `columns` maps features to columns that have other names. Without a column `frame_index`, it is computed from
    `index`.
    """

    def __init__(self, table: LanceTable, columns: Mapping[str, str]) -> None:
        self.path = table.path
        self._table = table
        self.rows = table.rows
        self._columns = dict(columns)
        features = {column: name for name, column in columns.items()}
        fields = [one.with_name(features.get(one.name, one.name)) for one in self._table.schema]
        self._counts = FRAME_INDEX not in {one.name for one in fields} and INDEX in {one.name for one in fields}
        self.schema = pa.schema([*fields, *([pa.field(FRAME_INDEX, pa.int64())] if self._counts else [])])

    def read(self, names: Sequence[str], start: int, stop: int) -> Any:
        wanted = [name for name in names if not (self._counts and name == FRAME_INDEX)]
        found = self._table.read([self._columns.get(name, name) for name in wanted], start, stop)
        columns = dict(zip(wanted, found.columns, strict=True))
        if len(wanted) < len(names):
            columns[FRAME_INDEX] = pa.chunked_array([pa.array(self._frames[start:stop])])
        return pa.table([columns[name] for name in names], names=list(names))

    @cached_property
    def _frames(self) -> Array:
        """The number of each row in its episode, from the column `index`."""
        episodes, places = (
            np.concatenate([np.zeros(0, np.int64), *self.whole(name)]) for name in (EPISODE_INDEX, INDEX)
        )
        begins = np.concatenate(([True], episodes[1:] != episodes[:-1]))[: len(episodes)]
        first = np.maximum.accumulate(np.where(begins, np.arange(len(episodes)), 0))
        frames: Array = places - places[first]
        return frames

    def whole(self, name: str) -> Iterator[Array]:
        """Yield a column of whole numbers in chunks."""
        for start in range(0, self.rows, _ROWS):
            table = self._table.read([self._columns.get(name, name)], start, min(start + _ROWS, self.rows))
            yield numbers_of(table, table.column_names[0], (), np.dtype(np.int64), self.path)

    def close(self) -> None:
        """Do nothing: `LanceReader` closes the process of the table."""


def columns_by_feature(info: DatasetInfo, names: Sequence[str], path: Path) -> dict[str, str]:
    """Return the columns of features whose names have dots; FormatError if two features have the same column."""
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name, feature in info.features.items():
        if feature.dtype == VIDEO:
            continue
        column = name if name in names else name.replace(".", "_")
        if column in taken:
            raise FormatError(
                f"{path}: the features {taken[column]!r} and {name!r} are both the column {column!r}: names in Lance "
                "have no dots",
                hint="rename one of them in LeRobot, and convert it again",
            )
        taken[column] = name
        if column != name and column in names:
            found[name] = column
    return found


def _dotted(name: str) -> str:
    if "." not in name:
        for prefix, stem in _PREFIXES.items():
            if name.startswith(prefix) and len(name) > len(prefix):
                return stem + name.removeprefix(prefix)
    return name


class _DatasetInLance(DatasetSurvey):
    """The survey of the table of frames of a dataset."""

    columns: Mapping[str, str]
    table: LanceTable

    def paths(self) -> list[str]:
        return [self.table.path.name]

    def open_rows(self, path: str) -> RowsFile:
        return LanceRows(self.table, self.columns)

    def why_absent(self, entry: EpisodeEntry) -> RbtoolError:
        return FormatError(f"{self.table.path} has no rows of episode {entry.number}, which is in the metadata")


class _TableOfFrames(_DatasetInLance):
    """The survey of a table of frames without metadata: episodes are found in the table alone."""

    def entries(self) -> dict[int, EpisodeEntry]:
        rows = LanceRows(self.table, self.columns)
        numbers = sorted({int(number) for part in rows.whole(EPISODE_INDEX) for number in np.unique(part)})
        if not numbers:
            raise FormatError(f"{self.table.path} has no rows")
        return {number: EpisodeEntry(number, None, (), self.table.path.name) for number in numbers}

    def tasks(self) -> dict[int, str]:
        return {}


class _Folder:
    """A temporary folder for copies of files, which is removed with the last reference to this object."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="rbtool-lance-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


class _Copy(type(Path())):  # type: ignore[misc]
    """The path of a copy; holding it keeps the temporary folder alive."""

    folder: _Folder


class _CopiedVideos(Closing):
    """Copies videos out of a table when they are needed; calling it with a path in the dataset returns the copy.

    Args:
        table: the table of videos.
        info: the metadata of the dataset.
        folder: the folder for copies. With None, copies are unnamed files, which vanish with this process even if it
            is killed.
        most: how many copies are kept, None for all.
    """

    def __init__(self, table: LanceTable, info: DatasetInfo, folder: _Folder | None, most: int | None) -> None:
        self._table = table
        self._folder, self._most = folder, most
        self._there: dict[str, tuple[Path, int]] = {}
        self.rows: dict[str, int] = {}
        self._list(info)

    def _list(self, info: DatasetInfo) -> None:
        table, names = self._table, ["video_key", "chunk_index", "file_index"]
        if not {*names, "video_bytes"} <= set(table.schema.names):
            raise FormatError(f"{table.path} has no columns {', '.join(names)} and video_bytes")
        for row, values in enumerate(table.read(names, 0, table.rows).to_pylist()):
            key, numbers = values["video_key"], [values[name] for name in names[1:]]
            if not isinstance(key, str) or not all(isinstance(number, int) for number in numbers):
                raise FormatError(f"{table.path}: row {row} does not name a video")
            name = info.video_file(video_key=key, chunk_index=numbers[0], file_index=numbers[1])
            if self.rows.setdefault(name, row) != row:
                raise FormatError(f"{table.path} has the video {name} twice")

    def __call__(self, name: str) -> Path:
        """Return the copy of a video; for a video that is not in the table, a path that does not exist."""
        found = self._there.pop(name, None)
        if found is None:
            if name not in self.rows:
                return self._table.path / name
            found = self._copied(name)
        self._there[name] = found
        while self._most is not None and len(self._there) > self._most:
            self._remove(*self._there.pop(next(iter(self._there))))
        return found[0]

    def _copied(self, name: str) -> tuple[Path, int]:
        if self._folder is not None:
            target = _Copy(self._folder.path / VIDEOS_TABLE / name)
            target.folder = self._folder
            fs.make_folder(target.parent)
            descriptor = fs.create(target)
            try:
                self._table.copy_bytes("video_bytes", self.rows[name], descriptor, target)
            except BaseException:
                fs.remove(target)
                raise
            finally:
                fs.close(descriptor, target)
            return target, -1
        # No temporary folder here: a worker that is killed would leave it behind.
        with tempfile.TemporaryFile() as file:
            self._table.copy_bytes("video_bytes", self.rows[name], file.fileno(), Path(tempfile.gettempdir()) / "video")
            descriptor = os.dup(file.fileno())
        return _DESCRIPTORS / str(descriptor), descriptor

    def _remove(self, path: Path, descriptor: int) -> None:
        if descriptor < 0:
            fs.remove(path)
        else:
            os.close(descriptor)

    def close(self) -> None:
        """Close unnamed copies, and release the folder of the others."""
        while self._there:
            path, descriptor = self._there.popitem()[1]
            if descriptor >= 0:
                self._remove(path, descriptor)
        self._folder = None


class LanceReader(LerobotReader):
    """Reads a dataset of LeRobot whose rows are in `frames.lance`, or a Lance table with one row per frame.

    A dataset is read like one of LeRobot v3, with the options of `LerobotReader`. In a single table, `episode_index`
    with `frame_index` or `index` defines the episodes; bytes of images are decoded, and dots in names are restored
    after `observation`, `observation.images` and `next`. The newest version of a table is read.

    Raises:
        UsageError: pylance is not installed.
        FormatError: the tables contradict each other.
        CorruptDataError: a table is damaged.
    """

    _folder: _Folder | None = None
    _copied: _CopiedVideos | None = None

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether `path` is a folder with LeRobot's metadata and Lance tables, or a Lance table."""
        try:
            return path.is_dir() and (looks_like_lerobot(path, in_lance=True) or is_table(path))
        except (RbtoolError, OSError) as error:
            return no_match(error)

    @property
    def _is_dataset(self) -> bool:
        return not is_table(self.path)

    @property
    def _frames(self) -> Path:
        return self.path / FRAMES_TABLE if self._is_dataset else self.path

    def _read_info(self) -> DatasetInfo:
        require_pylance()
        if self._is_dataset and not is_table(self._frames):
            raise CorruptDataError(
                f"{self._frames} is missing: it has the rows of the dataset; its conversion may have been interrupted",
                hint=FETCH_AGAIN,
            )
        self._process = LanceProcess()
        try:
            self._table = LanceTable(self._process, self._frames)
            info = self._info_of_dataset(self._table) if self._is_dataset else self._info_of_table(self._table)
            self._columns = columns_by_feature(info, self._table.schema.names, self._frames)
        except BaseException:
            self._process.close()
            raise
        return info

    def _info_of_dataset(self, table: LanceTable) -> DatasetInfo:
        rows = {} if (self.path / INFO).is_file() else self._packed_metadata()
        info = read_info(self.path, self._metadata_in(rows[INFO]) if INFO in rows else None)
        names = set(table.schema.names)

        def as_stored(feature: Feature) -> Feature:
            """Return a video as images if the table has them as a column."""
            there = feature.name in names or feature.name.replace(".", "_") in names
            return replace(feature, dtype=IMAGE) if feature.dtype == VIDEO and there else feature

        features = {name: as_stored(one) for name, one in info.features.items()}
        return replace(info, features=features)

    @functools.cached_property
    def _metadata_table(self) -> LanceTable:
        table = LanceTable(self._process, self.path / META_TABLE)
        if not {"path", "data"} <= set(table.schema.names):
            raise FormatError(f"{table.path} has no columns path and data with the files of meta")
        return table

    def _packed_metadata(self) -> dict[str, int]:
        """Return the rows of files in `meta.lance` by their paths in the dataset."""
        table, found = self._metadata_table, dict[str, int]()
        for row, name in enumerate(table.read(["path"], 0, table.rows).column("path").to_pylist()):
            if not isinstance(name, str) or not is_inside(name.removeprefix("meta/")):
                raise FormatError(f"{table.path} has a file {str(name)[:200]!r}, which would be outside its folder")
            if found.setdefault(f"meta/{name.removeprefix('meta/')}", row) != row:
                raise FormatError(f"{table.path} has the file {name!r} twice")
        return found

    def _metadata_in(self, row: int) -> bytes:
        table = self._metadata_table
        value = table.read(["data"], row, row + 1).column("data")[0].as_py()
        data = bytes_of(value, f"{table.path}: 'data', row {row}")
        if len(data) > _MOST_METADATA:
            raise FormatError(f"{table.path}: row {row} has a file of {len(data):,} bytes, too large for metadata")
        return data

    def _unpack_metadata(self) -> None:
        """Write the metadata to a temporary folder if they are only in their table.

        Only the survey needs this folder; a worker process, which may be killed at any time, would leave it behind.
        """
        if not self._is_dataset or (self.path / INFO).is_file():
            return
        self._folder = _Folder()
        for name, row in self._packed_metadata().items():
            fs.make_folder((self._folder.path / name).parent)
            fs.write_file(self._folder.path / name, self._metadata_in(row), synced=False)
        self._info = replace(self._info, root=self._folder.path)

    def _info_of_table(self, table: LanceTable) -> DatasetInfo:
        """Return the metadata of a single table, with features made from its columns."""
        features: dict[str, Feature] = {}
        for one in table.schema:
            name = _dotted(one.name)
            if name in features:
                raise FormatError(f"{self.path} has two columns that would be {name!r}")
            features[name] = self._feature(table, name, one)
        if EPISODE_INDEX not in features or not {FRAME_INDEX, INDEX} & features.keys():
            raise FormatError(
                f"{self.path} has no {EPISODE_INDEX} with {FRAME_INDEX} or {INDEX}, "
                "so its rows are not frames of episodes",
                hint="a dataset of LeRobot is the folder of its tables",
            )
        features.setdefault(FRAME_INDEX, Feature(FRAME_INDEX, "int64", ()))
        return DatasetInfo(self.path, "v3.0", 1.0, features, "", None, 1000, None, None)

    def _feature(self, table: LanceTable, name: str, field: Any) -> Feature:
        kind = field.type
        pictures = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_struct(kind)
        if pictures and table.rows:
            value = column_of(table.read([field.name], 0, 1), field.name)[0].as_py()
            data = value.get("bytes") if isinstance(value, dict) else value
            if isinstance(data, bytes) and is_image(data):
                form = image_form(data, f"{self.path}: {field.name!r}, row 0")
                return Feature(name, IMAGE, form.shape, ("height", "width", "channels"))
        sizes = []
        while pa.types.is_fixed_size_list(kind):
            sizes.append(kind.list_size)
            kind = kind.value_type
        if not sizes and (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and table.rows:
            first = column_of(table.read([field.name], 0, 1), field.name)[0].as_py()
            sizes = list(np.shape(first)) if first is not None else []
        return Feature(name, stored_form(field.type), tuple(sizes))

    def _find_videos(self, *, named: bool = True) -> None:
        """Prepare the copying of videos, which happens when they are needed."""
        columns = self._info.visual(VIDEO)
        if not columns or self._images == "skip":
            return
        if not is_table(self.path / VIDEOS_TABLE):
            raise CorruptDataError(f"{self.path / VIDEOS_TABLE} is missing: it has the videos", hint=WITHOUT_IMAGES)
        most = None if self._images == "keep" else max(4, 2 * len(columns))
        table = LanceTable(self._process, self.path / VIDEOS_TABLE)
        self._copied = _CopiedVideos(table, self._info, _Folder() if named else None, most)
        self._info = replace(self._info, videos=self._copied)

    def _notes_on_videos(self) -> Iterator[str]:
        if self._copied is not None:
            entries = read_episodes(self._info).values()
            other = self._copied.rows.keys() - {place.path for entry in entries for place in entry.videos.values()}
            if other:
                yield f"{counted(len(other), 'video')} of {VIDEOS_TABLE} left out: no episode needs them"

    # The contract --------------------------------------------------------------------------------

    def look(self, progress: Callable[[int], None]) -> FoundDataset:
        """Survey the table of frames and the videos."""
        self._unpack_metadata()
        self._find_videos()
        kind = _DatasetInLance if self._is_dataset else _TableOfFrames
        survey = type("Survey", (kind,), {"columns": self._columns, "table": self._table})
        found: FoundDataset = survey(
            self._info, self._images, ends_terminated=self._meaning.terminated
        ).find(progress)  # fmt: skip
        found.notes += [*self._notes_on_videos(), *self._notes_on_order()]
        if not self._is_dataset and self._columns:
            found.notes.append(
                "there are no metadata: dots in names of columns are restored ("
                + ", ".join(f"{column} is {name}" for name, column in list(self._columns.items())[:3])
                + ("…)" if len(self._columns) > 3 else ")")
            )
        return found

    def _notes_on_order(self) -> Iterator[str]:
        """Compare `index` with the positions of rows, which LeRobot assumes to be equal."""
        rows, start = LanceRows(self._table, self._columns), 0
        if INDEX not in rows.schema.names:
            return
        for part in rows.whole(INDEX):
            odd = part != np.arange(start, start + len(part))
            if odd.any():
                at = int(odd.argmax())
                yield (
                    f"row {start + at:,} of {self._frames.name} has index {part[at]:,}: rows were deleted or moved, "
                    "and LeRobot's own reader would return wrong rows"
                )
                return
            start += len(part)

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Return the facts of the dataset."""
        facts = super().survey(progress)
        documents = {name: _without_storage(data) if name == INFO else data for name, data in facts.documents.items()}
        return replace(facts, source="lance", documents=documents)

    def survey_state(self) -> Any:
        """Return the result of the survey, for a reader in another process."""
        return self.found

    def take_survey(self, state: Any) -> None:
        """Take over the survey of another process; to decode videos, prepare unnamed copies of them."""
        self._found = state
        if self._images == "decode":
            self._find_videos(named=not _DESCRIPTORS.is_dir())

    def _open_rows(self, path: str) -> RowsFile:
        return LanceRows(self._table, self._columns)

    def shard_starts(self) -> list[int]:
        """Return the first episode alone: a table is a single part of a stream."""
        return [min(self.found.episodes, default=0)]

    def files(self) -> list[Path]:
        """The metadata, and the files of the newest versions of the tables."""
        found = [path for path in self._metadata() if path.is_relative_to(self.path)]
        tables = [self._frames]
        if self._is_dataset and self._info.visual(VIDEO) and self._images != "skip":
            tables.append(self.path / VIDEOS_TABLE)
        if not found and self._is_dataset:
            tables.append(self.path / META_TABLE)
        for path in tables:
            found += LanceTable(self._process, path).files()
        return found

    def on_close(self) -> None:
        """Close the tables, and remove the copies of videos."""
        super().on_close()
        if self._copied is not None:
            self._copied.close()
        self._process.close()
        self._folder = None


def _without_storage(data: bytes) -> bytes:
    """Return `info.json` without `storage_format`, which does not apply to a converted dataset."""
    content = parse_json(data, INFO)
    if isinstance(content, dict) and content.pop("storage_format", None) is not None:
        return (dump_json(content, indent=4) + "\n").encode()
    return data
