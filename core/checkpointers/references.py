"""Checkpointers of storages whose data stays where it is: they note which dataset or stream is read.

A packed dataset, which nobody can edit, need not be saved again; the shards of a stream are elsewhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..encodings.save import dataset_digests
from ..errors import CorruptDataError, SchemaError, UsageError
from ..format.documents import Count, decode, dump_json, load_json
from ..format.manifest import Manifest
from ..format.syncing import Durable, write_file
from ..storages.base import Storage, register_checkpointer
from ..storages.lazy_tensor import LazyTensorStorage
from ..storages.packed import PackedStorage
from ..storages.stream import StreamStorage
from .base import PACKED_FILE, STREAM_FILE, CheckpointStaging, StorageCheckpointerBase, open_folder, writer_of
from .storage_rows import PackedRows, fields_of, host_array, require_equal_rows
from .tensor import read_contents

_VERSION = 1


@dataclass(frozen=True, slots=True)
class _Note:
    """The document of a `PackedNote`."""

    path: str
    content_digest: str
    len: Count
    same_steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackedNote:
    """Which packed dataset a storage read: its place, its content digest and those of the datasets of the same steps
    that it was converted from, and the number of steps."""

    path: Path
    content_digest: str
    digests: frozenset[str]
    length: int

    @classmethod
    def of(cls, storage: PackedStorage) -> PackedNote:
        """Note what a storage reads."""
        known = dataset_digests(Manifest.load(storage.path)) | {storage.content_digest}
        return cls(storage.path, storage.content_digest, known, len(storage))

    @classmethod
    def load(cls, folder: Path) -> PackedNote:
        """Read a note; CorruptDataError for a damaged one."""
        file = folder / PACKED_FILE
        found = decode(_Note, load_json(file), str(file), CorruptDataError)
        digest = found.content_digest
        return cls(Path(found.path), digest, frozenset({digest, *found.same_steps}), found.len)

    def to_bytes(self) -> bytes:
        """The note as it is written."""
        others = sorted(self.digests - {self.content_digest})
        document = {
            "format_version": _VERSION, "path": str(self.path), "content_digest": self.content_digest,
            "same_steps": others, "len": self.length,
        }  # fmt: skip
        return dump_json(document, indent=1).encode()


class PackedStorageCheckpointer(StorageCheckpointerBase):
    """Saves a `PackedStorage` as the path and the content digest of its dataset, of which no row is copied.

    What is loaded must be of the same contents, wherever they lie: SchemaError if not. The checkpoint of a storage of
    tensors is loaded where it holds these very rows, like that of a buffer on the same dataset in layout `ted`. Hooks
    have nothing to work on, and are refused with a UsageError.
    """

    def dumps(self, storage: Storage, path: str | os.PathLike[str], *, durable: Durable = "full") -> None:
        """Write the note to the folder `path`; an older checkpoint is replaced at one instant."""
        note = PackedNote.of(self._checked(storage))
        with CheckpointStaging(path, durable) as staging:
            write_file(staging.path / PACKED_FILE, note.to_bytes())
            staging.publish_noted()

    def loads(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Check that the storage reads the dataset that was noted in the folder `path`, or whose rows are saved there.

        DatasetNotFoundError where there is no checkpoint, FormatError for another checkpointer's, CorruptDataError
        for a damaged one, SchemaError for other data.
        """
        target, folder = self._checked(storage), Path(path)
        if writer_of(folder) == "TensorStorageCheckpointer":
            _require_rows(target, open_folder(folder, "TensorStorageCheckpointer"))
            return
        note = PackedNote.load(open_folder(folder, "PackedStorageCheckpointer"))
        if target.content_digest not in note.digests and not note.digests & PackedNote.of(target).digests:
            raise SchemaError(f"{folder / PACKED_FILE} is of other data, which was at {note.path}, than {target.path}")

    def _checked(self, storage: Storage) -> PackedStorage:
        if not isinstance(storage, PackedStorage):
            raise UsageError(f"a PackedStorageCheckpointer serves packed datasets, found a {type(storage).__name__}")
        if self._save_hooks or self._load_hooks:
            raise UsageError("hooks change what is saved, and of a packed dataset no row is", hint="leave them out")
        return storage


def _require_rows(target: PackedStorage, folder: Path) -> None:
    """Raise SchemaError unless the rows of a storage of tensors are those of a packed dataset."""
    saved = read_contents(folder, LazyTensorStorage(1), raw=True)
    if saved is None or saved.lead != (len(target),) or saved.length != len(target):
        found = 0 if saved is None else saved.length
        raise SchemaError(f"{folder} holds {found:,} rows, {target.path} has {len(target):,} and cannot be written to")
    fields = fields_of(saved.structure, saved.tensors, 1)
    leaves = {field.key: leaf for field, leaf in zip(fields, saved.tensors, strict=True)}
    with PackedRows(target) as rows:
        require_equal_rows(
            rows, fields, lambda field, start, stop: host_array(leaves[field.key][start:stop], field), folder
        )


register_checkpointer(PackedStorage, PackedStorageCheckpointer)


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
