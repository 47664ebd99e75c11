"""Where rows of text come from: a dataset that rbtool stored, or a folder of the datasets library."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptDataError, DatasetNotFoundError, FormatError, UsageError, did_you_mean
from ..format.contracts import StepReader
from ..format.digest import digest_bytes, digest_file
from ..open_steps import open_dataset
from ..verbs.download import download

SOURCE = "hf-text"
_SPLIT = ("split",)
_LENGTH = "_length"


class TextRows(ABC):
    """The rows of one split: how many, the name and digest of what they are from."""

    name: str
    count: int
    digest: str

    @abstractmethod
    def dataset(self, count: int) -> Any:
        """Return the first rows as a `datasets.Dataset`."""


class RowsOnDisk(TextRows):
    """A split in a folder that `save_to_disk` wrote."""

    def __init__(self, path: Path, split: str) -> None:
        import datasets

        if not path.is_dir():
            raise DatasetNotFoundError(f"there is no folder {path}, which should hold a saved dataset")
        try:
            found = datasets.load_from_disk(os.fspath(path))
        except (FileNotFoundError, ValueError, IndexError) as error:  # IndexError for a split without files
            raise FormatError(f"{path} has no rows that save_to_disk of the datasets library wrote: {error}") from error
        if isinstance(found, datasets.DatasetDict):
            _require_split(str(path), split, list(found))
            found = found[split]
        elif found.split is not None and str(found.split) != split:
            raise _no_split(str(path), split, [str(found.split)])
        self._found = found
        self.name, self.count = str(path), len(found)

    @cached_property
    def digest(self) -> str:  # type: ignore[override]
        """The digest of the files of the split."""
        files = sorted({Path(file["filename"]) for file in self._found.cache_files})
        return digest_bytes("\n".join(digest_file(file) for file in files).encode())

    def dataset(self, count: int) -> Any:
        return self._found.select(range(count))


class StoredRows(TextRows):
    """A split of a dataset that was downloaded from a hub."""

    def __init__(self, path: Path, name: str, split: str) -> None:
        self.name, self._path = name, path
        with open_dataset(path) as reader:
            names = json.loads(reader.documents()["splits.json"])["splits"]
            _require_split(f"{SOURCE}:{name}", split, names)
            self.digest = reader.manifest.content_digest
            steps = reader.manifest.steps
            numbers = reader.read(_SPLIT, 0, steps) if len(names) > 1 else np.zeros(steps, np.int64)
            self._rows = np.flatnonzero(numbers == names.index(split))
        self.count = len(self._rows)

    def dataset(self, count: int) -> Any:
        import datasets

        start = int(self._rows[0]) if count else 0  # the rows of a split follow each other
        with open_dataset(self._path) as reader:
            return datasets.Dataset.from_dict(_columns(reader, start, start + count))


def _columns(reader: StepReader, start: int, stop: int) -> dict[str, Any]:
    """The columns of some rows under the names that the source gave them; text as strings."""
    names = {there: name for name, there in reader.manifest.renamed_keys.items()}
    keys = {field.key for field in reader.fields}
    found: dict[str, Any] = {}
    for field in reader.fields:
        if len(field.key) > 1 or field.role not in ("text", "info") or field.key == _SPLIT:
            continue
        (name,) = field.key
        length = (name + _LENGTH,)
        if field.role == "text" and length in keys:
            rows, counts = reader.read(field.key, start, stop), reader.read(length, start, stop).tolist()
            try:
                found[names.get(name, name)] = [row[:n].tobytes().decode() for row, n in zip(rows, counts, strict=True)]
            except UnicodeDecodeError as error:
                raise CorruptDataError(f"{reader.path}: {name} is not UTF-8: {error}") from error
        elif field.role == "info":
            found[names.get(name, name)] = reader.read(field.key, start, stop)
    return found


def rows_on_disk(path: Path, split: str) -> TextRows:
    """Open a split of a folder that `save_to_disk` wrote."""
    return RowsOnDisk(path, split)


def stored_rows(name: str, split: str, root: Path) -> TextRows:
    """Open a split of a dataset of a hub, which is downloaded unless it is stored."""
    found = download(SOURCE, name, root=root)
    return StoredRows(found.path, found.id, split)


def _require_split(where: str, split: str, there: list[str]) -> None:
    if not isinstance(split, str):
        raise UsageError(f"split is {split!r}, expected the name of a split")
    if split not in there:
        raise _no_split(where, split, there)


def _no_split(where: str, split: str, there: list[str]) -> DatasetNotFoundError:
    return DatasetNotFoundError(
        f"{where} has no split {split!r}{did_you_mean(split, there)}", hint=f"there are {', '.join(there)}"
    )
