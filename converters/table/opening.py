"""Which kind of table is at a path, by its content, and how it is opened."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal, TypeAlias

from ...core.encodings.h5_layout import data_start
from ...core.errors import FormatError, RbtoolError
from ...core.format.digest import open_regular
from ...core.format.unreadable import no_match
from .columns import TableFile

Kind: TypeAlias = Literal["hdf5", "npz", "npy", "csv", "parquet"]
_KNOWN = "HDF5, npz, CSV, Parquet and folders of npy files can be read as tables"


def kind_of(path: Path) -> Kind | None:
    """Return the kind of table at a path; None for anything else. Text with commas counts as CSV."""
    if path.is_dir():
        from .arrays import npy_files

        with contextlib.suppress(FormatError, OSError):
            return "npy" if next(npy_files(path), None) is not None else None
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


def open_table(path: Path, *, trusted: bool = False) -> TableFile:
    """Open the table at a path; `trusted` allows pickles in its arrays to be read.

    FormatError for what is none, and CorruptDataError for a damaged one.
    """
    kind = kind_of(path)
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
        raise FormatError(f"{path} is a folder without npy files", hint=_KNOWN)
    if kind == "npz":
        from .arrays import NpzTable

        return NpzTable(path, trusted=trusted)
    from .text import CsvFile

    return CsvFile(path)
