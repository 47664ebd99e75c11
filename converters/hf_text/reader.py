"""Reads and downloads text datasets in Parquet files or Arrow streams: every row is an episode of one step.

It reads any repository of a Hugging Face hub with Parquet files, and any folder that `save_to_disk` of the datasets
library wrote. The datasets library is never imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa

from ...core.errors import CorruptDataError, DatasetNotFoundError, FormatError, RbtoolError, UsageError
from ...core.format.contracts import Array, SourceFacts
from ...core.format.converter import RemoteDataset, safe_id
from ...core.format.documents import json_file, load_json
from ...core.format.files import no_match, read_regular
from ...core.format.manifest import Dropped
from ...core.remote.hub import HubRepositorySource
from ...core.ted.schema import (
    FLAGS,
    LONGEST_ROW,
    NEXT,
    REWARD,
    Field,
    Key,
    dtype_name,
    encode_text,
    length_key,
    safe_part,
    text_fields,
)
from ..files.arrow import STATE, ArrowPart, is_name, saved_files
from ..files.readers import RowReader

INFO = "dataset_info.json"
SPLITS = "dataset_dict.json"
"""The file that `save_to_disk` writes next to the folders of several splits."""
_SHARD = re.compile(r"(?P<split>.+?)-\d+-of-\d+(-[0-9a-f]+)?")
_DATA = "data"
_FIRST = ("train", "valid", "test")


@dataclass(frozen=True, slots=True)
class Split:
    """A split of a dataset: its name, its files in their order, and `config`, the folder of its configuration."""

    config: str
    name: str
    files: tuple[str, ...]

    @property
    def id(self) -> str:
        """The name of the split in an id, after the name of the repository."""
        return f"{self.config}:{self.name}" if self.config else self.name


def splits_among(paths: Iterable[str]) -> list[Split]:
    """Group the Parquet files of a repository into splits, by the naming scheme of the hub.

    `data/train-00000-of-00002-0123abcd.parquet` belongs to the split `train`, and so does `train.parquet`; a folder
    other than `data` is a configuration. Training data come first, then validation and test data.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(paths):
        place = PurePosixPath(path)
        if place.suffix.lower() != ".parquet" or any(part.startswith(".") for part in place.parts):
            continue
        shard = _SHARD.fullmatch(place.stem)
        folder = place.parent.as_posix()
        config = "" if folder in (".", _DATA) else folder.removeprefix(f"{_DATA}/")
        found.setdefault((config, shard["split"] if shard else place.stem), []).append(path)
    splits = [Split(config, name, tuple(files)) for (config, name), files in found.items()]
    return sorted(splits, key=lambda split: (split.config, *order_of(split.name)))


def order_of(split: str) -> tuple[int, str]:
    """Return the sort key of a split."""
    return next((at for at, start in enumerate(_FIRST) if split.startswith(start)), len(_FIRST)), split


def chosen(splits: Sequence[Split], wanted: str) -> list[Split]:
    """Return the splits that `wanted` names: a configuration, a split, `CONFIG:SPLIT`, or "" for all."""
    return [split for split in splits if wanted in ("", split.config, split.id)]


def saved_splits(path: Path) -> list[tuple[str, list[Path]]]:
    """Return the splits of a folder that `save_to_disk` wrote, each with its Arrow files; a single split has no name.

    Returns [] for any other folder. Raises FormatError if the folder's lists do not name its files.
    """
    if (path / SPLITS).is_file():
        listed = load_json(path / SPLITS)
        names = listed.get("splits") if isinstance(listed, dict) else None
        if not isinstance(names, list) or not all(is_name(name) for name in names):
            raise FormatError(f"{path / SPLITS} does not list the splits of the folder")
        return [(name, saved_files(path / name)) for name in sorted(names, key=order_of)]
    if (path / STATE).is_file() and (path / INFO).is_file():
        return [("", saved_files(path))]
    return []


_ROWS = 4096
_TEXT = (pa.types.is_string, pa.types.is_large_string)
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)


def is_text(kind: pa.DataType) -> bool:
    """Return whether values of this type are text, which may be dictionary-encoded."""
    return any(test(kind.value_type if pa.types.is_dictionary(kind) else kind) for test in _TEXT)


def is_number(kind: pa.DataType) -> bool:
    """Return whether values of this type are numbers or flags."""
    return any(test(kind) for test in _NUMBERS)


class TextPart(ArrowPart):
    """A file of a split."""

    def __init__(self, split: str, path: Path) -> None:
        super().__init__(path)
        self.split = split

    def has_text(self) -> bool:
        """Return whether the file has a column of text."""
        return any(is_text(field.type) for field in self.schema)

    def text_of(self, batch: pa.RecordBatch, name: str) -> list[bytes]:
        """Return the UTF-8 bytes of a column of text."""
        values = self._present(batch, name)
        found: list[bytes] = values.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
        return found

    def numbers_of(self, batch: pa.RecordBatch, name: str) -> Array:
        """Return a column of numbers."""
        found: Array = self._present(batch, name).to_numpy(zero_copy_only=False)
        return found

    def _present(self, batch: pa.RecordBatch, name: str) -> Any:
        values = batch.column(name)
        if values.null_count:
            raise FormatError(f"{self.path} has {values.null_count:,} rows without a value (null) in {name!r}")
        return values


SPLIT: Key = ("split",)
_TAKEN = {NEXT, "episode", *SPLIT, *REWARD, *(key[0] for key in FLAGS)}


@dataclass(frozen=True, slots=True)
class TextColumns:
    """The columns of all files.

    Attributes:
        text: the bytes of the longest text of each text column, by its key.
        numbers: the element type of each column of numbers, by its key.
        names: the column's own name, by its key.
        rows: the number of rows of each file.
        dropped: the columns that are left out.
    """

    text: Mapping[Key, int]
    numbers: Mapping[Key, str]
    names: Mapping[Key, str]
    rows: Sequence[int]
    dropped: tuple[Dropped, ...]

    @property
    def renamed(self) -> dict[str, str]:
        """The keys of columns whose names had to be changed, by those names."""
        return {name: key[0] for key, name in self.names.items() if key[0] != name}

    def rows_of(self, parts: Sequence[TextPart], split: str) -> list[int]:
        """Return the number of rows of each file of a split."""
        return [rows for part, rows in zip(parts, self.rows, strict=True) if part.split == split]


def columns_of(parts: Sequence[TextPart], progress: Callable[[int], None]) -> TextColumns:
    """Read all files once, to find the longest text of each column.

    Raises FormatError if there is no column of text or no row, and for missing values and text that is too long.
    """
    schema = parts[0].schema
    text = [field.name for field in schema if is_text(field.type)]
    numbers = [field.name for field in schema if is_number(field.type)]
    if len(set(schema.names)) < len(schema.names):
        raise FormatError(f"{parts[0].path} has two columns of one name")
    if not text:
        raise FormatError(f"{parts[0].path} has no column of text; it has {', '.join(schema.names) or 'no columns'}")
    longest, rows = dict.fromkeys(text, 1), []
    for part in parts:
        rows.append(0)
        for batch in part.batches([*text, *numbers], _ROWS):
            for name in text:
                longest[name] = max(longest[name], *map(len, part.text_of(batch, name)), 0)
                _require_room(part, name, longest[name])
            for name in numbers:
                part.numbers_of(batch, name)
            rows[-1] += batch.num_rows
            progress(batch.num_rows)
    if not sum(rows):
        raise FormatError(f"{parts[0].path} has no rows")
    keys = _keys(text, numbers)
    types = {name: dtype_name(np.dtype(schema.field(name).type.to_pandas_dtype())) for name in numbers}
    others = [field for field in schema if field.name not in keys]
    return TextColumns(
        text={keys[name]: longest[name] for name in text},
        numbers={keys[name]: types[name] for name in numbers},
        names={key: name for name, key in keys.items()},
        rows=rows,
        dropped=tuple(Dropped(one.name, f"its values are {one.type}, neither text nor numbers") for one in others),
    )


def _require_room(part: TextPart, name: str, longest: int) -> None:
    if longest > LONGEST_ROW:
        raise FormatError(
            f"{part.path} has a text of {longest:,} bytes in {name!r}; the limit is {LONGEST_ROW:,} bytes, because "
            "every row takes the space of the longest"
        )


def _keys(text: Sequence[str], numbers: Sequence[str]) -> dict[str, Key]:
    """Return the key of every column: its name, with `_` appended until the key is free."""
    taken: set[Key] = {(name,) for name in _TAKEN}
    keys: dict[str, Key] = {}
    for name in (*text, *numbers):
        key = (safe_part(name),)
        while key in taken or (name in text and length_key(key) in taken):
            key = (key[0] + "_",)
        keys[name] = key
        taken |= {key, length_key(key)} if name in text else {key}
    return keys


_DOCUMENTS = ("README.md", "dataset_info.json", "dataset_dict.json")
_TRAJECTORIES = frozenset({"obs", "acts", "terminal"})
"""The columns of folders that the imitation library saves with the same functions; `ImitationReader` reads them."""


class HfTextReader(RowReader):
    """Reads a folder that `save_to_disk` of the datasets library wrote, or the Parquet files of a hub repository.

    A column of text becomes two fields: `NAME`, UTF-8 bytes padded with zeros to the longest text, and `NAME_length`.
    Columns of numbers are kept as they are, and other columns are left out. If there are several splits, `split` is the
    number of the row's split, int64; the notes and `splits.json` have their names. Every row is an episode of one step,
    which is terminated; it has no action, reward or next observation.

    Options: `id` is the id of a downloaded dataset, whose files are Parquet files.

    Raises FormatError for splits with different columns, missing values and text of more than 64 KiB, CorruptDataError
    for damage.
    """

    option_names = frozenset({"id"})
    block_bytes = 16 << 20
    """The size of the rows that are read at a time, in bytes."""

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the path is a folder of `save_to_disk` with a column of text."""
        try:
            parts = [TextPart(name, file) for name, files in saved_splits(path) for file in files[:1]][:1]
            return bool(parts) and parts[0].has_text() and not parts[0].names >= _TRAJECTORIES
        except (RbtoolError, OSError, ValueError, LookupError, RuntimeError) as error:
            return no_match(error)

    def on_open(self) -> None:
        """Find the files of every split and their columns."""
        if "id" in self.options:
            below = {file.relative_to(self.path).as_posix(): file for file in self.path.rglob("*") if file.is_file()}
            splits = [(split.name, [below[name] for name in split.files]) for split in splits_among(below)]
        else:
            splits = saved_splits(self.path)
        if not splits:
            raise FormatError(f"{self.path} has neither Parquet files nor the files that save_to_disk writes")
        self._splits = [name for name, _ in splits]
        self._parts = [TextPart(name, file) for name, files in splits for file in files]
        for part in self._parts[1:]:
            if not part.schema.equals(self._parts[0].schema):
                raise FormatError(f"{part.path} and {self._parts[0].path} have different columns")
        self._columns: TextColumns | None = None

    def survey(self, progress: Callable[[int], None]) -> SourceFacts:
        """Read all text once, for the length of the longest."""
        columns = self._known(progress)
        rows = sum(columns.rows)
        notes = ["every row is an episode of one step: text, without action, reward and next observation"]
        if len(self._splits) > 1:
            of_split = ((name, sum(columns.rows_of(self._parts, name))) for name in self._splits)
            listed = ", ".join(f"{at} {name} ({count:,} rows)" for at, (name, count) in enumerate(of_split))
            notes.append(f"the splits by their number in {SPLIT[0]}: {listed}")
        documents = {name: read_regular(self.path / name) for name in _DOCUMENTS if (self.path / name).is_file()}
        documents["splits.json"] = json_file({"splits": self._splits})
        return SourceFacts(
            source="hf-text",
            id=self.id_or(self.path.name),
            fields=tuple((field, "step") for field in self._fields()),
            episode_numbers=range(rows),
            steps=rows,
            renamed_keys=columns.renamed,
            dropped_keys=columns.dropped,
            notes=tuple(notes),
            documents=documents,
            lengths=[1] * rows,
        )

    def _known(self, progress: Callable[[int], None] = lambda rows: None) -> TextColumns:
        if self._columns is None:
            self._columns = columns_of(self._parts, progress)
        return self._columns

    def _fields(self) -> list[Field]:
        columns = self._known()
        found = [field for key, width in columns.text.items() for field in text_fields(key, width)]
        found += [Field(key, dtype, (), "info") for key, dtype in columns.numbers.items()]
        return found + ([Field(SPLIT, "int64", (), "info")] if len(self._splits) > 1 else [])

    def row_blocks(self) -> Iterator[Mapping[Key, Array]]:
        """Yield the rows of all files in blocks."""
        columns = self._known()
        count = max(1, self.block_bytes // max(1, sum(field.row_bytes for field in self._fields())))
        for part, rows in zip(self._parts, columns.rows, strict=True):
            seen = 0
            for batch in part.batches(list(columns.names.values()), _ROWS):
                for start in range(0, batch.num_rows, count):
                    block = self._encoded(batch.slice(start, count), columns, part)
                    seen += len(next(iter(block.values())))
                    yield block
            if seen != rows:
                raise CorruptDataError(f"{part.path} changed while it was read")

    def _encoded(self, batch: pa.RecordBatch, columns: TextColumns, part: TextPart) -> dict[Key, Array]:
        found: dict[Key, Array] = {}
        for key, width in columns.text.items():
            values = part.text_of(batch, columns.names[key])
            if max(map(len, values), default=0) > width:
                raise CorruptDataError(f"{part.path} changed while it was read")
            found[key], found[length_key(key)] = encode_text(values, width)
        for key, dtype in columns.numbers.items():
            found[key] = part.numbers_of(batch, columns.names[key]).astype(dtype)
        if len(self._splits) > 1:
            found[SPLIT] = np.full(batch.num_rows, self._splits.index(part.split), np.int64)
        return found

    def files(self) -> list[Path]:
        """Return the files with rows."""
        return [part.path for part in self._parts]


CARD = "README.md"
"""The card of a repository, which states the licence."""
_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?::(?P<part>.+))?", re.ASCII)


class HfTextSource(HubRepositorySource):
    """Downloads any dataset repository with Parquet files.

    An id is `OWNER/NAME` for all splits, or `OWNER/NAME:SPLIT`; of a repository with several configurations,
    `OWNER/NAME:CONFIG` or `OWNER/NAME:CONFIG:SPLIT`. Ids are not looked up in a catalogue; only the repositories of
    `CarperAI` are listed.
    """

    name = "hf-text"
    owner = "CarperAI"

    def look_up(self, dataset_id: str, revision: str | None, totals: bool) -> RemoteDataset:
        """Find the files of a dataset, with one request for the commit and one for every 1,000 files or so."""
        named = _NAME.fullmatch(safe_id(dataset_id))
        if named is None:
            raise UsageError(f"{dataset_id!r} is not a repository", hint="write it like OWNER/NAME or OWNER/NAME:SPLIT")
        repository = named["repository"]
        commit = self.hub.commit(repository, revision)
        listed = {file.path: file for file in self.hub.tree(repository, commit)}
        where = f"hf://{repository} at {revision or commit[:7]}"
        splits = _wanted(splits_among(listed), named["part"] or "", where)
        paths = [path for split in splits for path in split.files]
        files = [listed[path] for path in (*paths, *([CARD] if CARD in listed else []))]
        return self.described(dataset_id, repository, commit, files)


def _wanted(splits: Sequence[Split], part: str, where: str) -> list[Split]:
    """Return the splits that `part` names, which have to belong to one configuration."""
    if not splits:
        raise DatasetNotFoundError(
            f"{where} has no Parquet files, and only those can be read", hint="--revision takes a branch or a commit"
        )
    found = chosen(splits, part)
    if not found:
        there = ", ".join(dict.fromkeys(split.id for split in splits))
        raise DatasetNotFoundError(f"{where} has no split {part!r}", hint=f"there are {there}")
    configs = list(dict.fromkeys(split.config for split in found))
    if len(configs) > 1:
        raise UsageError(
            f"{where} has {len(configs)} configurations, expected the name of one of them",
            hint=f"add one of these to the id, after a colon: {', '.join(filter(None, configs))}",
        )
    return found
