"""Reads what `export` wrote as one HDF5 or npz file, or as Parquet: the rows of a dataset, with its episode table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from ...core.encodings.compact import flags_at
from ...core.encodings.h5 import begins_as_h5
from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format.contracts import Array, FoundSteps
from ...core.format.documents import Count, decode, newer_version, parse_json
from ...core.format.episodes import ALL_COLUMNS, EpisodeTable
from ...core.format.files import digest_of_stats, no_match, open_regular
from ...core.format.manifest import Fields, Layout, Manifest, Request, SpaceDocument
from ...core.format.returns import sum_rewards
from ...core.ted.episodes import end_reason
from ...core.ted.schema import EPISODE, NEXT_TERMINATED, NEXT_TRUNCATED, Key, encode_text
from ..files.exports import ExportColumn, columns_of
from ..files.numpy_files import begins_as_zip
from .columns import VERSION, ExportFile

_PARQUET = b"PAR1"
_NO_TABLE = (
    "the episode table follows from the rows: this Parquet file has the steps alone, without seeds, texts and what was "
    "known of next observations"
)


@dataclass(frozen=True, slots=True)
class _About:
    """The document that describes an export, see `columns.about`."""

    format: str
    version: Count
    created_by: str
    source: str
    id: str
    steps: Count
    episodes: Count
    fields: Fields
    spaces: Mapping[str, SpaceDocument] = field(default_factory=dict)
    renamed_keys: Mapping[str, str] = field(default_factory=dict)


class ExportedSteps(FoundSteps):
    """The rows of an export. Its files have no digests; an npz file has checksums.

    FormatError for what is not an export, CorruptDataError for one that is damaged or contradicts its description.
    """

    @classmethod
    def recognises(cls, path: Path) -> bool:
        try:
            return _layout_of(path) is not None
        except (RbtoolError, OSError) as error:
            no_match(error)
            return False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[int, ExportFile] = {}
        layout = _layout_of(path)
        if layout is None:
            raise FormatError(f"{path} is not an export of rbtool")
        self._layout: Layout = layout
        try:
            about = self._described()
            self.manifest = Manifest(
                kind="dataset", layout=layout, request=Request(about.source, about.id, about.id), steps=about.steps,
                episodes=about.episodes, fields=about.fields, files=(), content_digest=digest_of_stats(path),
                created_by=about.created_by, spaces=about.spaces, renamed_keys=about.renamed_keys,
                notes=() if self._stored_columns else (_NO_TABLE,),
            )  # fmt: skip
            for column in {id(one): one for one in self._columns.values()}.values():
                self._file.require(column, about.steps)
            table = self.episodes
            if len(table) != about.episodes or not table.covers(about.steps):
                raise CorruptDataError(
                    f"{path}: the episode table has {len(table):,} episodes and {table.steps:,} steps, which have to "
                    f"follow each other; the description states {about.episodes:,} and {about.steps:,}"
                )
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path,)

    @property
    def _file(self) -> ExportFile:
        """The open file, each process its own: libraries keep buffers of theirs."""
        here = os.getpid()
        if here not in self._files:
            self._files[here] = _opened(self.path, self._layout)
        return self._files[here]

    def _described(self) -> _About:
        document = parse_json(self._file.about(), str(self.path))
        version = document.get("version") if isinstance(document, dict) else None
        if type(version) is int and version > VERSION:
            raise newer_version(str(self.path), version, VERSION)
        return decode(_About, document, str(self.path), CorruptDataError)

    @cached_property
    def _columns(self) -> dict[Key, ExportColumn]:
        """The column that holds each leaf: one for a text and its lengths, where the file has strings."""
        listed = columns_of(self.fields) if self._file.has_strings else map(ExportColumn, self.fields)
        found = {}
        for column in listed:
            found[column.field.key] = column
            if column.length is not None:
                found[column.length.key] = column
        return found

    @cached_property
    def _stored_columns(self) -> dict[str, Array]:
        """The columns of the episode table that the file has, of the types of the table."""
        found = self._file.episodes()
        for name, column in found.items():
            if column.ndim != 1 or column.dtype != np.dtype(ALL_COLUMNS[name]):
                raise CorruptDataError(
                    f"{self.path}: {name!r} of the episodes is {column.dtype} {list(column.shape)}, expected one "
                    f"{ALL_COLUMNS[name]} an episode"
                )
        if len({len(column) for column in found.values()}) > 1:
            raise CorruptDataError(f"{self.path}: the columns of the episode table differ in length")
        return found

    @cached_property
    def episodes(self) -> EpisodeTable:
        """The table that is stored; what it lacks follows from the rows."""
        columns = dict(self._stored_columns)
        if "length" not in columns:
            starts = self._file.starts()
            columns |= {"start": starts, "length": np.diff(starts, append=self.manifest.steps)}
        count, ends = len(columns["length"]), columns["start"] + columns["length"] - 1
        for key in (NEXT_TERMINATED, NEXT_TRUNCATED):
            if key[1] not in columns:
                columns[key[1]] = flags_at(self, key, ends)
        if "end_reason" not in columns:
            flags = zip(columns["terminated"].tolist(), columns["truncated"].tolist(), strict=True)
            columns["end_reason"] = np.array([end_reason(*pair) for pair in flags], np.uint8)
        if "episode" not in columns and any(one.key == EPISODE for one in self.fields):
            numbers = [self.read(EPISODE, start, start + 1).reshape(-1)[0] for start in columns["start"].tolist()]
            columns["episode"] = np.array(numbers, np.int64)
        columns.setdefault("episode", np.arange(count))
        if "return" not in columns:
            columns["return"] = sum_rewards(self, columns["start"], columns["length"])
        columns["explicit_start"] = np.full(count, -1)
        return EpisodeTable.from_columns({name: np.zeros(count) for name in ALL_COLUMNS} | columns)

    @cached_property
    def episode_text(self) -> list[dict[str, str]] | None:
        texts = self._file.texts()
        if texts is None:
            return None
        if len(texts) != self.manifest.episodes:
            raise CorruptDataError(f"{self.path} has the text of {len(texts):,} episodes, expected one for each")
        origin = f"{self.path}: the text of an episode"
        return [decode(dict[str, str], parse_json(text, origin), origin, CorruptDataError) for text in texts]

    def read(self, key: Key, start: int, stop: int) -> Array:
        leaf = self._leaf(key, start, stop)
        if start == stop or not leaf.row_bytes:
            return np.zeros((stop - start, *leaf.shape), leaf.numpy)
        column = self._columns[key]
        if column.length is None:
            return self._file.rows(column, start, stop).reshape(stop - start, *leaf.shape)
        texts = [text.encode() for text in self._file.strings(column, start, stop)]
        width = column.field.shape[0]
        if max(map(len, texts)) > width:
            raise CorruptDataError(f"{self.path} has text of more than {width:,} bytes in {column.field.name}")
        characters, lengths = encode_text(texts, max(width, 1))
        return lengths.astype(leaf.numpy) if key == column.length.key else characters

    def documents(self) -> dict[str, bytes]:
        return self._file.documents()

    def verify_files(self) -> None:
        """Compare what has a checksum with it."""
        self._file.verify()

    def close(self) -> None:
        file = self._files.pop(os.getpid(), None)
        if file is not None:
            file.close()


def _layout_of(path: Path) -> Layout | None:
    """Return the format of an export, by its content; None for anything else."""
    if path.is_dir():
        if not (path / "steps.parquet").is_file() or not (path / "episodes.parquet").is_file():
            return None
    elif not path.is_file():
        return None
    elif begins_as_h5(path):
        from ..files.hdf5 import names_in  # loads h5py, which is needed for such files alone

        if not {"steps", "episodes"} <= set(names_in(path)):  # to open all of a file may take seconds
            return None
        from .h5 import H5Exporter

        return "h5" if H5Exporter.made(path) else None
    elif begins_as_zip(path):
        from .npz import NpzExporter

        return "npz" if NpzExporter.made(path) else None
    elif not _begins_as_parquet(path):
        return None
    from .parquet import ParquetExporter

    return "parquet" if ParquetExporter.made(path) else None


def _begins_as_parquet(path: Path) -> bool:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(len(_PARQUET)) == _PARQUET


def _opened(path: Path, layout: Layout) -> ExportFile:
    if layout == "h5":
        from .h5 import H5Export

        return H5Export(path)
    if layout == "npz":
        from .npz import NpzExport

        return NpzExport(path)
    from .parquet import ParquetExport

    return ParquetExport(path)
