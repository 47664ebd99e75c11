"""Notes which dataset a storage reads: one that nobody can edit need not be saved again."""

from __future__ import annotations

import os
from typing import Any

from ..dataset import dump_json, fs, load_json
from ..errors import CorruptDataError, SchemaError, UsageError
from ..storages import PackedStorage, Storage, register_checkpointer
from .base import StorageCheckpointerBase
from .folders import PACKED_FILE, CheckpointStaging, open_folder

__all__ = ["PackedStorageCheckpointer"]


class PackedStorageCheckpointer(StorageCheckpointerBase):
    """Saves a `PackedStorage` as the path and the content digest of its dataset, of which no row is copied.

    What is loaded must open the same contents, wherever they lie: SchemaError if not. Hooks have nothing to work on,
    and are refused with a UsageError.
    """

    def dumps(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Write the note to the folder `path`; an older checkpoint is replaced at one instant."""
        source = self._checked(storage)
        document = {
            "format_version": 1, "path": str(source.path), "content_digest": source.content_digest, "len": len(source),
        }  # fmt: skip
        with CheckpointStaging(path) as staging:
            fs.write_file(staging.path / PACKED_FILE, dump_json(document, indent=1).encode())
            staging.publish()

    def loads(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Check that the storage reads the dataset that was noted in the folder `path`.

        DatasetNotFoundError where there is no checkpoint, FormatError for another checkpointer's, CorruptDataError
        for a damaged note, SchemaError for another dataset.
        """
        target = self._checked(storage)
        note = open_folder(path, type(self).__name__) / PACKED_FILE
        document: Any = load_json(note)
        try:
            digest, place = str(document["content_digest"]), str(document["path"])
        except (KeyError, TypeError) as error:
            raise CorruptDataError(f"{note} is damaged: {error!r}") from error
        if digest != target.content_digest:
            raise SchemaError(f"{note} is of other data, which lay at {place}, than {target.path}")

    def _checked(self, storage: Storage) -> PackedStorage:
        if not isinstance(storage, PackedStorage):
            raise UsageError(f"a PackedStorageCheckpointer serves packed datasets, found a {type(storage).__name__}")
        if self._save_hooks or self._load_hooks:
            raise UsageError("hooks change what is saved, and of a packed dataset no row is", hint="leave them out")
        return storage


register_checkpointer(PackedStorage, PackedStorageCheckpointer)
