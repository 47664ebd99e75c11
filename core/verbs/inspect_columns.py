"""What `inspect` returns for a table in no known format: its columns, and how it could be converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ..format.overview import ColumnView, Overview, convert_command
from ..results import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnsResult(Result):
    """The columns of a table in no known format. `file` is its kind in words.

    `command` is the command line that would convert it, and `format` and `options` are those of `convert`: they are
    proposed from the names of the columns. `doubts` are sentences on what the names do not show.
    """

    kind: ClassVar[str] = "columns"
    path: Path
    file: str
    bytes: int
    columns: tuple[ColumnView, ...]
    format: str
    options: Mapping[str, Any]
    command: str
    doubts: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, asked: str, overview: Overview) -> ColumnsResult:
        """Make the result of the overview of a file that the user calls `asked`."""
        return cls(
            path=path, file=overview.file, bytes=overview.bytes, columns=overview.columns,
            format=overview.format, options=overview.options, command=convert_command(asked, overview),
            doubts=overview.doubts,
        )  # fmt: skip
