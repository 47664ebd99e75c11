"""Which kind of table is at a path, by its content, and how it is opened."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal, TypeAlias

from ...core.encodings.h5 import data_start
from ...core.errors import FormatError, RbtoolError, UsageError
from ...core.format.files import no_match, open_regular
from .columns import TableFile

Kind: TypeAlias = Literal["hdf5", "npz", "npy", "csv", "parquet", "files"]
_KNOWN = "HDF5, npz, CSV, Parquet and folders of npy, CSV or Parquet files can be read as tables"


def kind_of(path: Path) -> Kind | None:
    """Return the kind of table at a path; None for anything else. Text with commas counts as CSV."""
    if path.is_dir():
        from .arrays import npy_files
        from .folder import table_files

        with contextlib.suppress(FormatError, OSError):
            if next(npy_files(path), None) is not None:
                return "npy"
            return "files" if next(table_files(path), None) is not None else None
        return None
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            head = file.read(8)
        if data_start(path) is not None:
            return "hdf5"
        if head.startswith(b"PK\3\4"):
            return "npz"
        if head.startswith(b"PAR1"):
            return "parquet"
        return "csv" if _is_csv(path) else None
    except (OSError, RbtoolError) as error:
        no_match(error)
        return None


def _is_csv(path: Path) -> bool:
    from .text import read_header

    with os.fdopen(open_regular(path), "rb") as file:
        _, names, _ = read_header(file, path)
    return path.suffix.lower() in {".csv", ".tsv"} or (
        len(names) > 1 and not any(set(name) & set("{}[]<>") for name in names)
    )


def open_table(path: Path, *, trusted: bool = False, files: str | None = None) -> TableFile:
    """Open the table at a path; `trusted` allows pickles in its arrays to be read.

    `files` is a pattern of the CSV or Parquet files of a folder that are the table. FormatError for what is none, and
    CorruptDataError for a damaged one.
    """
    if files is not None and not path.is_dir():
        raise UsageError(f"--files chooses files of a folder, and {path} is none", hint="leave out --files")
    kind = kind_of(path) if files is None else "files"
    if kind == "files":
        from .folder import TableFiles

        return TableFiles(path, files)
    if kind == "hdf5":
        from .hdf5 import Hdf5File

        return Hdf5File(path)
    if kind == "parquet":
        from .parquet import ParquetFile

        return ParquetFile(path)
    if kind == "npy":
        from .arrays import NpyFolder

        return NpyFolder(path, trusted=trusted)
    if path.is_dir():
        raise FormatError(f"{path} is a folder without npy, CSV or Parquet files", hint=_KNOWN)
    if kind == "npz":
        from .arrays import NpzTable

        return NpzTable(path, trusted=trusted)
    from .text import CsvFile

    return CsvFile(path)
