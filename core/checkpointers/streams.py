"""Notes which data a stream reads: its shards are elsewhere, and nothing of them is saved."""

from __future__ import annotations

import os
from typing import Any

from ..errors import CorruptDataError, UsageError
from ..format.documents import decode, dump_json, load_json
from ..format.syncing import Durable, write_file
from ..storages.base import Storage, register_checkpointer
from ..storages.stream import StreamStorage
from .base import StorageCheckpointerBase
from .folders import STREAM_FILE, CheckpointStaging, open_folder


class StreamStorageCheckpointer(StorageCheckpointerBase):
    """Saves a `StreamStorage` as what identifies its data; loading compares. Hooks are refused with a UsageError."""

    def dumps(self, storage: Storage, path: str | os.PathLike[str], *, durable: Durable = "full") -> None:
        """Write the note to the folder `path`; an older checkpoint is replaced at one instant."""
        note = {"address": self._checked(storage).shards.address, **storage.state_dict()}
        with CheckpointStaging(path, durable) as staging:
            write_file(staging.path / STREAM_FILE, dump_json(note, indent=1).encode())
            staging.publish_noted()

    def loads(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Compare with the note in the folder `path`; SchemaError for other data.

        DatasetNotFoundError where there is no checkpoint, FormatError for another checkpointer's, CorruptDataError
        for a damaged one.
        """
        target = self._checked(storage)
        file = open_folder(path, type(self).__name__) / STREAM_FILE
        target.load_state_dict(decode(dict[str, Any], load_json(file), str(file), CorruptDataError))

    def _checked(self, storage: Storage) -> StreamStorage:
        if not isinstance(storage, StreamStorage):
            raise UsageError(f"a StreamStorageCheckpointer serves streams, found a {type(storage).__name__}")
        if self._save_hooks or self._load_hooks:
            raise UsageError("hooks change what is saved, and of a stream no row is", hint="leave them out")
        return storage


register_checkpointer(StreamStorage, StreamStorageCheckpointer)
