"""Reads what `export` wrote as HDF5, npz or Parquet: the rows of a dataset, with its episode table.

Exports to npz are also written here; the modules for HDF5 and Parquet import h5py and pyarrow. `numpy.load(path)` reads
the npz file, which contains no pickles:

observation.position   one array for each field, [steps, *shape]; parts of nested keys are joined by dots
instruction            text is uint8 [steps, L], UTF-8 padded with zeros; instruction_length has the bytes of each
episodes.start         the columns of the episode table, [episodes]: episode, start, length, return, terminated,
                       truncated, end_reason, explicit_next, seed, has_seed, and scores such as score.quality
episodes.text          the text of each episode, a JSON object, if any episode has text
about                  a JSON document with fields, shapes and spaces, as text
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...core.encodings.compact import flags_at
from ...core.encodings.h5 import begins_as_h5
from ...core.encodings.output_files import LatchedFile
from ...core.errors import CorruptDataError, FormatError, RbtoolError
from ...core.format import fs
from ...core.format.contracts import Array, FoundSteps
from ...core.format.converter import Sink
from ...core.format.documents import Count, decode, dump_json, newer_version, parse_json
from ...core.format.episodes import ALL_COLUMNS, COLUMNS, EpisodeTable
from ...core.format.files import digest_of_stats, no_match, open_regular
from ...core.format.manifest import Fields, Layout, Manifest, Request, SpaceDocument
from ...core.format.returns import sum_rewards
from ...core.ted.episodes import end_reason
from ...core.ted.schema import EPISODE, NEXT_TERMINATED, NEXT_TRUNCATED, Field, Key, encode_text, file_stem
from ..files.exports import FORMAT, ExportColumn, columns_of
from ..files.numpy_files import NpzFile, begins_as_zip
from .columns import VERSION, ExportFile, about, episode_columns, is_column, require_names

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the time of all members, so that equal data give equal bytes
_MOST_ABOUT, _MOST_TEXT = 64 << 20, 4 << 30
"""The largest description, and the largest column of the episode table, that are read, in bytes."""
_PARQUET, _TABLE = b"PAR1", "episodes."
_NO_TABLE = (
    "the episode table is derived from the rows: this Parquet file has the steps alone, without seeds, texts and the "
    "record of which next observations were stored"
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
    """The rows of an export. Exports have no digests; npz files have checksums.

    Raises FormatError for a path that is not an export, CorruptDataError for a damaged one and for one that contradicts
    its description.
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
                    f"{path}: the episode table has {len(table):,} episodes and {table.steps:,} steps, expected "
                    f"consecutive episodes as the description states: {about.episodes:,} with {about.steps:,} steps"
                )
            self.manifest = replace(self.manifest, boundary=table.counts())
        except BaseException:
            self.close()
            raise

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path,)

    @property
    def _file(self) -> ExportFile:
        """The open file, one for each process, because libraries keep buffers that processes must not share."""
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
        """The column that holds each field; a text and its lengths share a column if the file has strings."""
        listed = columns_of(self.fields) if self._file.has_strings else map(ExportColumn, self.fields)
        found = {}
        for column in listed:
            found[column.field.key] = column
            if column.length is not None:
                found[column.length.key] = column
        return found

    @cached_property
    def _stored_columns(self) -> dict[str, Array]:
        """The columns of the episode table that the file has, with their types verified."""
        found = self._file.episodes()
        for name, column in found.items():
            expected = ALL_COLUMNS.get(name, "float64")
            if column.ndim != 1 or column.dtype != np.dtype(expected):
                raise CorruptDataError(
                    f"{self.path}: {name!r} of the episodes is {column.dtype} {list(column.shape)}, expected one "
                    f"{expected} for each episode"
                )
        missing = [name for name in COLUMNS if found and name not in found and name != "explicit_start"]
        if missing:
            raise CorruptDataError(f"{self.path}: the episode table has no column {missing[0]!r}")
        if len({len(column) for column in found.values()}) > 1:
            raise CorruptDataError(f"{self.path}: the columns of the episode table differ in length")
        return found

    @cached_property
    def episodes(self) -> EpisodeTable:
        """The episode table; columns that the file lacks are derived from the rows."""
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
            raise CorruptDataError(f"{self.path} has a text of more than {width:,} bytes in {column.field.name}")
        characters, lengths = encode_text(texts, max(width, 1))
        return lengths.astype(leaf.numpy) if key == column.length.key else characters

    def documents(self) -> dict[str, bytes]:
        return self._file.documents()

    def verify_files(self) -> None:
        """Compare the data with their checksums, if the format has any."""
        self._file.verify()

    def close(self) -> None:
        file = self._files.pop(os.getpid(), None)
        if file is not None:
            file.close()


def _layout_of(path: Path) -> Layout | None:
    """Return the format of an export, recognised by its content; None for anything else."""
    if path.is_dir():
        if not (path / "steps.parquet").is_file() or not (path / "episodes.parquet").is_file():
            return None
    elif not path.is_file():
        return None
    elif begins_as_h5(path):
        from ..files.hdf5 import names_in  # imports h5py, which only such files need

        if not {"steps", "episodes"} <= set(names_in(path)):  # opening the file with h5py may take seconds
            return None
        from .h5 import H5Exporter

        return "h5" if H5Exporter.made(path) else None
    elif begins_as_zip(path):
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
        return NpzExport(path)
    from .parquet import ParquetExport

    return ParquetExport(path)


# npz --------------------------------------------------------------------------------------------


class NpzExporter(Sink):
    """Writes a `.npz` file of any size, member by member."""

    keeps_scores = True

    @classmethod
    def made(cls, path: Path) -> bool:
        """Return whether the member `about` describes an export."""
        try:
            with NpzFile(path) as file:
                return "about" in file.names and FORMAT in str(file.whole("about", _MOST_ABOUT))
        except (RbtoolError, OSError) as error:
            return no_match(error)

    def prepare(self) -> None:
        """Raise SchemaError for bfloat16, which NumPy does not have, and for equal names."""
        self.refuse({"bfloat16"}, "NumPy")
        require_names([*map(_name, self.chosen.fields), *self._others()], "the npz file")

    def write_rows(self, target: Path, progress: Callable[[int], None]) -> None:
        """Write one field after the other."""
        with LatchedFile(target) as file:
            # A LatchedFile has all methods that ZipFile calls, but not all that typing.IO declares.
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
                for name, array in self._others().items():
                    _member(archive, name, array.dtype, array.shape, iter([array]))
                for field in self.chosen.fields:
                    shape = (self.chosen.steps, *field.shape)
                    _member(archive, _name(field), field.numpy, shape, self._rows(field, file, progress))
            file.check()
            fs.fsync(file.descriptor, target)

    def _others(self) -> dict[str, Array]:
        found = {f"episodes.{name}": column for name, column in episode_columns(self.chosen).items()}
        if self.chosen.text is not None:
            found["episodes.text"] = np.array([dump_json(row) for row in self.chosen.text], str)
        return found | {"about": np.array(about(self.chosen))}

    def _rows(self, field: Field, file: LatchedFile, progress: Callable[[int], None]) -> Iterator[Array]:
        for rows in self.chosen.chunks(field.key, field.row_bytes):
            yield rows
            file.check()
            progress(rows.nbytes)


def _member(
    archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], chunks: Iterator[Array]
) -> None:
    """Write one array in NumPy's format, chunk by chunk."""
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    with archive.open(zipfile.ZipInfo(f"{name}.npy", _EPOCH), "w", force_zip64=True) as member:
        member.write(header.getvalue())
        for rows in chunks:
            member.write(np.ascontiguousarray(rows).tobytes())


def _name(field: Field) -> str:
    return ".".join(file_stem(part) for part in field.key)


class NpzExport(ExportFile):
    """Reads what `NpzExporter` writes."""

    has_strings = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = NpzFile(path)

    def about(self) -> str:
        return str(self._file.whole("about", _MOST_ABOUT))

    def require(self, column: ExportColumn, steps: int) -> None:
        name = _name(column.field)
        if name not in self._file.names:
            raise self.lacks(column, "nothing")
        dtype, shape = self._file.form(name)
        if dtype != column.field.numpy or shape != (steps, *column.field.shape):
            raise self.lacks(column, f"{dtype} {list(shape)}")

    def rows(self, column: ExportColumn, start: int, stop: int) -> Array:
        return self._file.read(_name(column.field), start, stop)

    def strings(self, column: ExportColumn, start: int, stop: int) -> list[str]:
        raise self.lacks(column, "no strings")

    def episodes(self) -> dict[str, Array]:
        known = [name for name in self._file.names if name.startswith(_TABLE) and is_column(name.removeprefix(_TABLE))]
        return {name.removeprefix(_TABLE): self._file.whole(name, _MOST_TEXT) for name in known}

    def texts(self) -> list[str] | None:
        if "episodes.text" not in self._file.names:
            return None
        return [str(text) for text in np.atleast_1d(self._file.whole("episodes.text", _MOST_TEXT)).tolist()]

    def verify(self) -> None:
        self._file.verify()

    def close(self) -> None:
        self._file.close()
