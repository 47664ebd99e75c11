"""The columns of an export and the document that describes it, which all export formats and their reader share."""

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
    """Raise SchemaError if two fields would get the same name."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SchemaError(f"two fields would both be called {twice[0]!r} in {format_name}; rename one of them")


def episode_columns(chosen: Chosen) -> dict[str, Array]:
    """Return the columns of the episode table that mean something outside of rbtool."""
    columns = chosen.table.columns()
    del columns["explicit_start"]
    return columns


def is_column(name: str) -> bool:
    """Return whether a column of an export belongs to the episode table."""
    return name in ALL_COLUMNS or name.startswith(SCORE)


def about(chosen: Chosen) -> str:
    """Return the JSON document that describes an export: origin, fields, shapes and spaces."""
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
    """An open export, which `ExportedSteps` reads. Methods raise CorruptDataError for damaged files.

    `has_strings` states whether text is stored as strings; otherwise it is stored as padded bytes and their lengths.
    """

    has_strings: ClassVar[bool] = True
    path: Path

    @abstractmethod
    def about(self) -> str:
        """Return the document that the function `about` made."""

    @abstractmethod
    def require(self, column: ExportColumn, steps: int) -> None:
        """Raise CorruptDataError unless the file has the column, with its type and shape and a row for each step."""

    @abstractmethod
    def rows(self, column: ExportColumn, start: int, stop: int) -> Array:
        """Read rows of a column of numbers; the caller reshapes them."""

    @abstractmethod
    def strings(self, column: ExportColumn, start: int, stop: int) -> list[str]:
        """Read rows of a column of strings."""

    @abstractmethod
    def episodes(self) -> dict[str, Array]:
        """Return the columns of the episode table; {} if the file has none, and only `starts` of the episodes."""

    def starts(self) -> Array:
        """Return the first step of each episode, int64, if there is no episode table."""
        raise CorruptDataError(f"{self.path} has no episode table")

    @abstractmethod
    def texts(self) -> list[str] | None:
        """Return the text of each episode as JSON; None if the export has no texts."""

    def documents(self) -> dict[str, bytes]:
        """Return the metadata files of the source."""
        return {}

    def verify(self) -> None:
        """Compare the data with their checksums, if the format has any."""

    def lacks(self, column: ExportColumn, found: object) -> CorruptDataError:
        """Return the error for a column that contradicts the description of the export; `found` is what is stored."""
        field = column.field
        return CorruptDataError(
            f"{self.path} has {found} for {field.name}, expected rows of {field.dtype} {list(field.shape)}"
        )
