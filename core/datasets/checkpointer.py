"""Saves and loads buffers on datasets: a checkpoint of a dataset in one layout is also one of it in the other."""

from __future__ import annotations

import os
from pathlib import Path

from ..checkpointers import PackedNote, TensorStorageCheckpointer, open_folder, require_equal_rows, writer_of
from ..encodings import dataset_digests
from ..errors import RbtoolError, SchemaError, UsageError
from ..format import Manifest, PackedReader, TedReader
from ..storages import Storage, register_checkpointer
from .storage import DatasetStorage

__all__ = ["DatasetStorageCheckpointer"]


class DatasetStorageCheckpointer(TensorStorageCheckpointer):
    """Saves the rows of a `DatasetStorage`, which may have been edited, as a `TensorStorageCheckpointer` does.

    It also loads the checkpoint of a `PackedStorage`, which notes a dataset, where that has the same steps: then the
    storage has the rows of its dataset again, as they are on the disk. SchemaError where it has others, or where
    there is no indication whether it has.
    """

    def loads(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Put the rows of the checkpoint in the folder `path` into the storage; nothing changes if that fails."""
        folder = Path(path)
        if not isinstance(storage, DatasetStorage) or writer_of(folder) != "PackedStorageCheckpointer":
            super().loads(storage, folder)
            return
        if self._load_hooks:
            raise UsageError(f"{folder} holds no row that hooks could change", hint="leave them out")
        if storage.split_trajs:
            raise SchemaError(f"{folder} is of single steps, the rows of this storage are whole trajectories")
        _require_same_steps(storage, PackedNote.load(open_folder(folder, "PackedStorageCheckpointer")), folder)
        storage.read_again()


def _require_same_steps(storage: DatasetStorage, note: PackedNote, folder: Path) -> None:
    """Raise SchemaError unless the dataset of a storage has the steps of the one that was noted."""
    with TedReader(storage.path) as reader:
        if storage.mode == "r+":  # the files may have been edited since the manifest was written
            reader.verify_files()
        if note.digests & (dataset_digests(reader.manifest) | {reader.manifest.content_digest}):
            return
        other = f"{folder} is of other data, which was at {note.path}, than {storage.path}"
        try:
            noted = Manifest.load(note.path)
            if noted.content_digest != note.content_digest:
                raise SchemaError(f"{other}; {note.path} was replaced since")
            with PackedReader(note.path) as packed:
                if noted.steps != reader.manifest.steps:
                    raise SchemaError(other)
                require_equal_rows(
                    reader, list(packed.fields), lambda field, *part: packed.read(field.key, *part), note.path
                )
        except SchemaError:
            raise
        except (RbtoolError, OSError) as error:
            raise SchemaError(f"{other}; {note.path} cannot be compared ({error})") from error


register_checkpointer(DatasetStorage, DatasetStorageCheckpointer)
