"""What is in a file that no format is recognised in, and how it could be converted all the same."""

from __future__ import annotations

import importlib
import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..declarations import declared
from ..errors import FormatError, RbtoolError
from .read_errors import understood

_QUICK_BYTES, _MOST_FILES = 64 << 20, 10_000
"""What a hint may look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnView:
    """A column: `rows` of `shape`; `key` is what it is proposed as, `why` why it cannot be mapped, both may be ""."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: int
    key: str
    why: str


@dataclass(frozen=True, slots=True)
class Overview:
    """The columns of a file: `file` is its kind in words, `format` the format that reads it with `options`.

    `options`, fields of `ReaderOptions`, are proposed from common names. `doubts` are sentences about what the names do
    not show; parts of options to be filled in are in capitals. `bytes` is the size of all its files.
    """

    file: str
    format: str
    columns: tuple[ColumnView, ...]
    options: Mapping[str, Any]
    doubts: tuple[str, ...]
    bytes: int


class OptionNeededError(FormatError):
    """A file of `format` does not state something that `options`, with parts to fill in, would."""

    def __init__(self, file: Path, what: str, *, hint: str, format: str, options: Mapping[str, Any]) -> None:
        super().__init__(f"{file} {what}", hint=hint)
        self._file, self._format, self._options = file, format, options

    def overview(self) -> Overview | None:
        """The columns of the file, and what is missing; None for a file that no table is seen in."""
        found = overview_of(self._file)
        return found and replace(found, format=self._format, options=self._options, doubts=(self.message,))


def overview_of(path: Path, files: str | None = None) -> Overview | None:
    """Look at a file with the formats that are never detected; None for one that they do not read either.

    `files` is the pattern of those files of a folder that are looked at. Raises FormatError and CorruptDataError for a
    file that is damaged.
    """
    for one in declared():
        if one.overview is None:
            continue
        module, _, name = one.overview.partition(":")
        with understood(path):
            found: Overview | None = getattr(importlib.import_module(f"{one.package}.{module}"), name)(path, files)
        if found is not None:
            return found
    return None


def convert_command(path: str | os.PathLike[str], overview: Overview) -> str:
    """The command line that an overview proposes."""
    words = ["rbtool", "convert", os.fspath(path), "DEST", "--from", overview.format]
    for name, value in overview.options.items():
        values: Sequence[Any] = value if isinstance(value, list) else [value]
        for one in values:
            words += [f"--{name.replace('_', '-')}", *([] if one is True else [str(one)])]
    return shlex.join(words)


def conversion_hint(path: Path) -> str:
    """How a file could be converted in which no format is recognised; "" where nothing is known. Never raises."""
    try:
        files = [path] if path.is_file() else itertools.islice(path.rglob("*"), _MOST_FILES + 1)
        sizes = [file.stat().st_size for file in files]
        if sum(sizes) > _QUICK_BYTES or len(sizes) > _MOST_FILES:
            return f"if it is a table, rbtool inspect {shlex.quote(str(path))} shows its columns"
        found = overview_of(path)
    except (RbtoolError, OSError):
        return ""
    if found is None:
        return ""
    doubts = f" ({'; '.join(found.doubts)})" if found.doubts else ""
    return f"its columns can be mapped: {convert_command(path, found)}{doubts}"
