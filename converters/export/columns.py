"""Columns of an export, and the document that describes it: shared by all export formats, and by their reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from ...core.errors import CorruptDataError, SchemaError
from ...core.format.contracts import Array, Closing
from ...core.format.converter import Chosen
from ...core.format.documents import dump_json
from ...core.format.episodes import ALL_COLUMNS, SCORE
from ...core.format.memmap.builder import created_by
from ..files.exports import FORMAT, ExportColumn

VERSION = 1


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


def is_column(name: str) -> bool:
    """Return whether a column of an export belongs to the episode table."""
    return name in ALL_COLUMNS or name.startswith(SCORE)


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
