"""Checkpointers of packed datasets and streams, which save a reference to the data in place of its rows.

A packed dataset cannot change, so it need not be saved again; the shards of a stream are stored elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..encodings.save import dataset_digests
from ..errors import CorruptDataError, SchemaError, UsageError
from ..format.documents import Count, decode, dump_json, load_json
from ..format.manifest import Manifest
from ..format.syncing import Durable, write_file
from ..options import PathLike
from ..storages.base import Storage, register_checkpointer
from ..storages.dataset import StreamStorage
from ..storages.lazy_tensor import LazyTensorStorage
from ..storages.packed import PackedStorage
from .base import PACKED_FILE, STREAM_FILE, CheckpointStaging, StorageCheckpointerBase, open_folder, writer_of
from .storage_rows import PackedRows, fields_of, host_array, require_equal_rows
from .tensor import read_contents

_VERSION = 1


@dataclass(frozen=True, slots=True)
class _Note:
    """The JSON form of a `PackedNote`."""

    path: str
    content_digest: str
    len: Count
    same_steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackedNote:
    """The reference to a packed dataset.

    Attributes:
        path: the dataset when it was saved.
        content_digest: its content digest.
        digests: its content digest, and the digests of datasets with the same steps from which it was converted.
        length: the number of steps.
    """

    path: Path
    content_digest: str
    digests: frozenset[str]
    length: int

    @classmethod
    def of(cls, storage: PackedStorage) -> PackedNote:
        """Return the reference to the dataset of a storage."""
        known = dataset_digests(Manifest.load(storage.path)) | {storage.content_digest}
        return cls(storage.path, storage.content_digest, known, len(storage))

    @classmethod
    def load(cls, folder: Path) -> PackedNote:
        """Read a note; CorruptDataError if it is damaged."""
        file = folder / PACKED_FILE
        found = decode(_Note, load_json(file), str(file), CorruptDataError)
        digest = found.content_digest
        return cls(Path(found.path), digest, frozenset({digest, *found.same_steps}), found.len)

    def to_bytes(self) -> bytes:
        """Return the note as it is written."""
        others = sorted(self.digests - {self.content_digest})
        document = {
            "format_version": _VERSION, "path": str(self.path), "content_digest": self.content_digest,
            "same_steps": others, "len": self.length,
        }  # fmt: skip
        return dump_json(document, indent=1).encode()


class PackedStorageCheckpointer(StorageCheckpointerBase):
    """Saves a `PackedStorage` as path and content digest of its dataset; no rows are copied.

    Loading checks that the storage reads a dataset with the same contents, at any path; SchemaError otherwise. A
    checkpoint of a tensor storage with the same rows can also be loaded, for example one of a buffer on the same
    dataset in layout `ted`. Hooks raise UsageError, because there are no rows that they could change.
    """

    def dumps(self, storage: Storage, path: PathLike, *, durable: Durable = "full") -> None:
        """Write the note to the folder `path`, atomically replacing an older checkpoint."""
        note = PackedNote.of(self._checked(storage))
        with CheckpointStaging(path, durable) as staging:
            write_file(staging.path / PACKED_FILE, note.to_bytes())
            staging.publish_noted()

    def loads(self, storage: Storage, path: PathLike) -> None:
        """Check that the storage reads the dataset that was saved in the folder `path`, or one with the same rows.

        Raises:
            DatasetNotFoundError: the path does not exist.
            FormatError: another checkpointer wrote it.
            CorruptDataError: it is damaged.
            SchemaError: the contents differ.
        """
        target, folder = self._checked(storage), Path(path)
        if writer_of(folder) == "TensorStorageCheckpointer":
            _require_rows(target, open_folder(folder, "TensorStorageCheckpointer"))
            return
        note = PackedNote.load(open_folder(folder, "PackedStorageCheckpointer"))
        if target.content_digest not in note.digests and not note.digests & PackedNote.of(target).digests:
            raise SchemaError(
                f"{folder / PACKED_FILE} refers to other data, which was at {note.path}, than {target.path} holds"
            )

    def _checked(self, storage: Storage) -> PackedStorage:
        if not isinstance(storage, PackedStorage):
            raise UsageError(f"a PackedStorageCheckpointer saves packed datasets, found a {type(storage).__name__}")
        if self._save_hooks or self._load_hooks:
            raise UsageError("hooks cannot be used: no rows of a packed dataset are saved", hint="leave them out")
        return storage


def _require_rows(target: PackedStorage, folder: Path) -> None:
    """Raise SchemaError unless the rows of a tensor storage equal the packed dataset's."""
    saved = read_contents(folder, LazyTensorStorage(1), raw=True)
    if saved is None or saved.lead != (len(target),) or saved.length != len(target):
        found = 0 if saved is None else saved.length
        raise SchemaError(
            f"{folder} holds {found:,} rows, but {target.path} has {len(target):,} and cannot be written to"
        )
    fields = fields_of(saved.structure, saved.tensors, 1)
    leaves = {field.key: leaf for field, leaf in zip(fields, saved.tensors, strict=True)}
    with PackedRows(target) as rows:
        require_equal_rows(
            rows, fields, lambda field, start, stop: host_array(leaves[field.key][start:stop], field), folder
        )


register_checkpointer(PackedStorage, PackedStorageCheckpointer)


class StreamStorageCheckpointer(StorageCheckpointerBase):
    """Saves the identity of the data of a `StreamStorage`; loading compares it. Hooks raise UsageError."""

    def dumps(self, storage: Storage, path: PathLike, *, durable: Durable = "full") -> None:
        """Write the note to the folder `path`, atomically replacing an older checkpoint."""
        note = {"address": self._checked(storage).shards.address, **storage.state_dict()}
        with CheckpointStaging(path, durable) as staging:
            write_file(staging.path / STREAM_FILE, dump_json(note, indent=1).encode())
            staging.publish_noted()

    def loads(self, storage: Storage, path: PathLike) -> None:
        """Compare the data with the note in the folder `path`.

        Raises:
            DatasetNotFoundError: the path does not exist.
            FormatError: another checkpointer wrote it.
            CorruptDataError: it is damaged.
            SchemaError: the contents differ.
        """
        target = self._checked(storage)
        file = open_folder(path, type(self).__name__) / STREAM_FILE
        target.load_state_dict(decode(dict[str, Any], load_json(file), str(file), CorruptDataError))

    def _checked(self, storage: Storage) -> StreamStorage:
        if not isinstance(storage, StreamStorage):
            raise UsageError(f"a StreamStorageCheckpointer saves streams, found a {type(storage).__name__}")
        if self._save_hooks or self._load_hooks:
            raise UsageError("hooks cannot be used: no rows of a stream are saved", hint="leave them out")
        return storage


register_checkpointer(StreamStorage, StreamStorageCheckpointer)
