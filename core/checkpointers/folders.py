"""Folders that hold a storage's checkpoint: which class wrote one, and how one takes the place of another."""

from __future__ import annotations

import os
from pathlib import Path

from ..dataset import Staging, has_manifest, mend
from ..errors import DatasetNotFoundError, FormatError, UsageError

__all__ = ["COMPRESSED_FILES", "LIST_FILE", "CheckpointStaging", "open_folder"]

LIST_FILE = "items.json"
COMPRESSED_FILES = ("metadata.json", "data_indices.json")

_WRITERS = {
    "ListStorageCheckpointer": (LIST_FILE,),
    "CompressedListStorageCheckpointer": COMPRESSED_FILES,
    "TensorStorageCheckpointer": ("storage_metadata.json",),
}
"""The files by which a checkpoint shows what wrote it."""


class CheckpointStaging(Staging):
    """A `Staging` for the checkpoint of a storage.

    An older checkpoint at the destination, of whatever storage, is replaced at one instant; an empty folder, too.
    UsageError for anything else there, and for a checkpoint in which somebody keeps files of another kind.
    """

    def __init__(self, destination: str | os.PathLike[str]) -> None:
        super().__init__(Path(destination), replace=True)

    def refuse_if_taken(self) -> None:
        """Raise UsageError if what lies at the destination may not be replaced; changes nothing."""
        around = next((place for place in (self.destination, *self.destination.parents) if has_manifest(place)), None)
        if around is not None:
            raise UsageError(f"{self.destination} lies in the dataset {around}", hint="choose another destination")
        if not os.path.lexists(self.destination):
            return
        if not self.destination.is_dir() or (_writer_of(self.destination) is None and any(self.destination.iterdir())):
            raise UsageError(
                f"{self.destination} is there already and is not the checkpoint of a storage; it is left alone",
                hint="choose another destination",
            )
        strange = next((file for file in self.destination.rglob("*") if not _looks_like_ours(file)), None)
        if strange is not None:
            raise UsageError(f"{strange} is not part of the checkpoint it lies in; nothing is replaced")


def _looks_like_ours(file: Path) -> bool:
    return not file.is_symlink() and (file.is_dir() or file.suffix in {".json", ".memmap"})


def _writer_of(folder: Path) -> str | None:
    for writer, files in _WRITERS.items():
        if all((folder / name).is_file() for name in files):
            return writer
    return None


def open_folder(path: str | os.PathLike[str], writer: str) -> Path:
    """Return the folder of a checkpoint that `writer` can read.

    DatasetNotFoundError (a FileNotFoundError) if nothing is there or its files are missing, FormatError (a
    ValueError) if another checkpointer wrote it.
    """
    folder = Path(path)
    mend(folder)
    if not folder.is_dir():
        raise DatasetNotFoundError(f"{folder} is not a folder, the checkpoint of a storage is expected there")
    found = _writer_of(folder)
    if found not in (writer, None):
        raise FormatError(f"{folder} was written by a {found}; this is a {writer}")
    missing = [name for name in _WRITERS[writer] if not (folder / name).is_file()]
    if missing:
        raise DatasetNotFoundError(f"{folder} has no {missing[0]}, which a {writer} writes")
    return folder
