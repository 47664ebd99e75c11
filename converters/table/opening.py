"""Which kind of table is at a path, by its content, and how it is opened: npz, npy and HDF5 here, others apart."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from ...core.encodings.h5 import begins_as_h5, data_start
from ...core.errors import CorruptDataError, FormatError, RbtoolError, UsageError
from ...core.format.contracts import Array
from ...core.format.files import no_match, open_regular
from ..files.numpy_files import NpyFile, NpzFile
from .columns import TEXT, TableColumn, TableFile, array_column, native

if TYPE_CHECKING:
    import h5py


class Hdf5File(TableFile):
    """An HDF5 file. What leads out of it (external links, virtual datasets) is refused."""

    kind = "HDF5 file"

    def __init__(self, path: Path) -> None:
        import h5py  # takes longer to load than most tables to open

        from ...core.encodings.hdf5_files import HeapValues, datasets_in, open_h5
        from ..files.hdf5 import require_whole_h5

        self.path = path
        if begins_as_h5(path):  # what precedes HDF5 elsewhere is not in the size that the header states
            require_whole_h5(path)
        self._file = h5py.File(open_h5(path))
        self._values = HeapValues(self._file.id)
        try:
            self._datasets = {name: item for name, item in datasets_in(self._file) if isinstance(item, h5py.Dataset)}
            self.columns = {name: self._column(name, dataset) for name, dataset in self._datasets.items()}
        except BaseException:
            self.close()
            raise

    def _column(self, name: str, dataset: h5py.Dataset) -> TableColumn:
        import h5py

        from ...core.encodings.hdf5_files import absurd_size

        if why := absurd_size(dataset.id) if dataset.shape is not None else "":
            raise CorruptDataError(f"{self.path}: {name!r} {why}", hint="copy or fetch the file again, whole")
        try:
            dtype = dataset.dtype
        except TypeError as error:  # h5py has none for some types of HDF5, and for damaged ones
            return TableColumn(
                name, "unknown", (), len(dataset) if dataset.shape else 0, f"its type cannot be read: {error}"
            )
        if h5py.check_string_dtype(dtype) and dataset.shape:
            return TableColumn(name, TEXT, dataset.shape[1:], dataset.shape[0])
        return array_column(name, dtype, dataset.shape)

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        found = {}
        for name in names:
            dataset = self._datasets[name]
            if self.columns[name].is_text:
                text = self._values.dataset(name, start, stop).asstr(errors="surrogateescape")
                found[name] = np.asarray(text[start:stop], object)
                continue
            rows = np.empty((stop - start, *dataset.shape[1:]), dataset.dtype)
            if rows.size:
                dataset.read_direct(rows, np.s_[start:stop])
            found[name] = native(rows)
        return found

    def read_key(self, column: TableColumn, start: int, stop: int) -> Array:
        rows = super().read_key(column, start, stop)
        if column.is_text:  # bytes that are not UTF-8 are shown as such
            texts = (one.encode(errors="surrogateescape").decode(errors="backslashreplace") for one in rows.flat)
            rows = np.array([*texts], object).reshape(rows.shape)
        return rows

    def close(self) -> None:
        self._values.close()
        self._file.close()


_DEEPEST = 8
_MOST_FILES = 1000


class NpzTable(TableFile):
    """A npz file, of which each array is a column. Rows that are read forward are unpacked once.

    `trusted` allows arrays of Python objects to be read, which are pickles.
    """

    kind = "npz file"

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.path = path
        self._file = NpzFile(path)
        try:
            with self._file.damage_first():
                self.columns = {name: self._column(name, trusted) for name in self._file.names}
        except BaseException:
            self.close()
            raise

    def _column(self, name: str, trusted: bool) -> TableColumn:
        why = ""
        if trusted and self._file.is_pickled(name) and self._file.form(name)[1]:
            why = _why_not(partial(self._file.unpickle, name), f"{self.path}: {name!r}")
        return _column(name, *self._file.form(name), pickled=self._file.is_pickled(name), why=why)

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        return {name: self._file.read(name, start, stop) for name in names}

    def verify_read(self) -> None:
        self._file.verify_read()

    def close(self) -> None:
        self._file.close()


class NpyFolder(TableFile):
    """A folder of `.npy` files, each a column; those in folders inside it are in groups.

    `trusted` allows arrays of Python objects to be read, which are pickles.
    """

    kind = "folder of npy files"

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.path = path
        self._arrays: dict[str, NpyFile] = {}
        self._files = [file for _, file in npy_files(path)]
        try:
            for name, file in npy_files(path):
                self._arrays[name] = NpyFile(file)
            self.columns = {name: _npy_column(name, array, trusted) for name, array in self._arrays.items()}
        except BaseException:
            self.close()
            raise

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, Array]:
        return {name: self._arrays[name].read(start, stop) for name in names}

    def files(self) -> list[Path]:
        return self._files

    def close(self) -> None:
        for array in self._arrays.values():
            array.close()


def _npy_column(name: str, array: NpyFile, trusted: bool) -> TableColumn:
    why = ""
    if trusted and array.is_pickled and array.header.shape:
        why = _why_not(array.unpickle, str(array.path))
    return _column(name, array.header.dtype, array.header.shape, pickled=array.is_pickled, why=why)


def _why_not(unpickle: Callable[[], None], what: str) -> str:
    """Read a pickle; return why it has no rows of one type, empty where it has."""
    try:
        unpickle()
    except FormatError as error:
        return f"it{error.message.removeprefix(what)}"
    return ""


def _column(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], *, pickled: bool, why: str) -> TableColumn:
    if pickled and shape:
        untrusted = "its elements are Python objects, a pickle, which --trust-pickle reads"
        return TableColumn(name, str(dtype), shape[1:], shape[0], why or untrusted, pickled=not why)
    if dtype.kind in "USO" and shape:
        return TableColumn(name, TEXT, shape[1:], shape[0])
    return array_column(name, dtype, shape)


def npy_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the `.npy` files below a folder, by their path in it without the suffix; links to folders are passed over.

    FormatError for folders that are nested too deep, and for more files than can be columns.
    """
    pending = [("", folder, 0)]
    found = []
    while pending:
        prefix, here, depth = pending.pop()
        if depth > _DEEPEST:
            raise FormatError(f"{here} is nested more than {_DEEPEST} folders deep")
        for entry in here.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                pending.append((f"{prefix}{entry.name}/", entry, depth + 1))
            elif entry.suffix == ".npy" and entry.is_file():
                found.append((f"{prefix}{entry.stem}", entry))
        if len(found) > _MOST_FILES:
            raise FormatError(f"{folder} has more than {_MOST_FILES:,} npy files: they are not columns of one table")
    yield from sorted(found)


Kind: TypeAlias = Literal["hdf5", "npz", "npy", "csv", "parquet", "files"]
_KNOWN = "HDF5, npz, CSV, Parquet and folders of npy, CSV or Parquet files can be read as tables"


def kind_of(path: Path) -> Kind | None:
    """Return the kind of table at a path; None for anything else. Text with commas counts as CSV."""
    if path.is_dir():
        from .text import table_files

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
        from .text import TableFiles

        return TableFiles(path, files)
    if kind == "hdf5":
        return Hdf5File(path)
    if kind == "parquet":
        from .parquet import ParquetFile

        return ParquetFile(path)
    if kind == "npy":
        return NpyFolder(path, trusted=trusted)
    if path.is_dir():
        raise FormatError(f"{path} is a folder without npy, CSV or Parquet files", hint=_KNOWN)
    if kind == "npz":
        return NpzTable(path, trusted=trusted)
    from .text import CsvFile

    return CsvFile(path)
