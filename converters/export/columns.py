"""Columns of an export, and the document that describes it: shared by all export formats, and by their reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...core.errors import CorruptDataError, SchemaError
from ...core.format.contracts import Array, Closing
from ...core.format.documents import dump_json
from ...core.format.memmap.builder import created_by
from ...core.format.sinks import Chosen
from ...core.ted.schema import Field, Key

FORMAT = "rbtool export"
"""Identifies a file or folder as an export."""
VERSION = 1


@dataclass(frozen=True, slots=True)
class ExportColumn:
    """A leaf of the data; for text, `length` is the leaf with the number of bytes of each row."""

    field: Field
    length: Field | None = None

    @property
    def bytes(self) -> int:
        """Bytes of a row as it is stored here."""
        return self.field.row_bytes + (self.length.row_bytes if self.length else 0)

    def chunks(self, chosen: Chosen) -> Iterator[Array | list[str]]:
        """Yield all rows in chunks: arrays, or strings where the leaf is text."""
        rows = chosen.chunks(self.field.key, self.bytes)
        if self.length is None:
            yield from rows
            return
        lengths = chosen.chunks(self.length.key, self.bytes)
        for characters, sizes in zip(rows, lengths, strict=True):
            yield decoded(characters, sizes, self.field.name)


def columns_of(fields: tuple[Field, ...]) -> list[ExportColumn]:
    """Pair text with its lengths; everything else is a column of its own."""
    by_key = {field.key: field for field in fields}
    texts: dict[Key, Field] = {}
    for field in fields:
        length = by_key.get((*field.key[:-1], field.key[-1] + "_length"))
        if field.role == "text" and field.dtype == "uint8" and len(field.shape) == 1 and length and not length.shape:
            texts[field.key] = length
    lengths = {length.key for length in texts.values()}
    return [ExportColumn(field, texts.get(field.key)) for field in fields if field.key not in lengths]


def decoded(characters: Array, lengths: Array, name: str) -> list[str]:
    """Return rows of UTF-8 bytes as strings."""
    try:
        return [row[:size].tobytes().decode() for row, size in zip(characters, lengths.tolist(), strict=True)]
    except UnicodeDecodeError as error:
        raise CorruptDataError(f"{name} is text, but not UTF-8: {error.reason}") from error


def require_names(names: list[str], format_name: str) -> None:
    """Raise SchemaError if two leaves would get one name."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SchemaError(f"two leaves would both be called {twice[0]!r} in {format_name}; rename one of them")


def episode_columns(chosen: Chosen) -> dict[str, Array]:
    """The columns of the episode table that have a meaning outside rbtool."""
    columns = chosen.table.columns()
    del columns["explicit_start"]
    return columns


def about(chosen: Chosen) -> str:
    """Describe an export in strict JSON: origin, fields, shapes and spaces."""
    manifest = chosen.reader.manifest
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "created_by": created_by(),
        "source": manifest.request.source,
        "id": manifest.request.id,
        "steps": chosen.steps,
        "episodes": len(chosen.rows),
        "fields": [
            {"key": list(field.key), "dtype": field.dtype, "shape": list(field.shape), "role": field.role}
            for field in chosen.fields
        ],
        "spaces": dict(manifest.spaces),
        "renamed_keys": dict(manifest.renamed_keys),
    }
    return dump_json(document)


class ExportFile(Closing, ABC):
    """An open export, as its reader needs it. Raises CorruptDataError for what is damaged.

    `has_strings` states whether text is stored as strings, and not as bytes with their lengths.
    """

    has_strings: ClassVar[bool] = True
    path: Path

    @abstractmethod
    def about(self) -> str:
        """Return the document that `about` wrote."""

    @abstractmethod
    def require(self, column: ExportColumn, steps: int) -> None:
        """Raise CorruptDataError unless a column is there, of its type and shape, with a row for each step."""

    @abstractmethod
    def rows(self, column: ExportColumn, start: int, stop: int) -> Array:
        """Read rows of a column of numbers, which there are, in any shape of that size."""

    @abstractmethod
    def strings(self, column: ExportColumn, start: int, stop: int) -> list[str]:
        """Read rows of a column of strings."""

    @abstractmethod
    def episodes(self) -> dict[str, Array]:
        """Return the columns of the episode table; {} where the file has none, and `starts` of the episodes."""

    def starts(self) -> Array:
        """Return the first step of each episode, int64, where there is no episode table."""
        raise CorruptDataError(f"{self.path} has no episode table")

    @abstractmethod
    def texts(self) -> list[str] | None:
        """Return the text of each episode as JSON; None where there is none."""

    def documents(self) -> dict[str, bytes]:
        """Return the metadata files of the source."""
        return {}

    def verify(self) -> None:
        """Compare with checksums, where the format has such."""

    def lacks(self, column: ExportColumn, found: object) -> CorruptDataError:
        """Make the error for a column that is not there as the description states; `found` describes it."""
        field = column.field
        return CorruptDataError(
            f"{self.path} has {found} for {field.name}, expected rows of {field.dtype} {list(field.shape)}"
        )
