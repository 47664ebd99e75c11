"""What the three checkpointers that save whole episodes share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..encodings import (
    CompactForm,
    CompactLayout,
    Compression,
    FlatReader,
    H5Reader,
    require_digests,
    save_compact,
)
from ..errors import DatasetNotFoundError, FormatError, SchemaError, UsageError
from ..format import fs, mend, provenance_step
from ..progress import Silent
from ..storages import LazyTensorStorage, Storage, TensorStorage
from ..storages.layout import is_tree
from ..storages.structure import structure_of
from ..torchrl import TorchrlReader
from .base import StorageCheckpointerBase
from .filling import fill_storage
from .folders import CheckpointStaging, article, open_folder, require_writer
from .keys import KeyLike, keys_of, require_keys
from .other_rows import rows_of_storage
from .restoring import fill

__all__ = ["EpisodeCheckpointer"]


class EpisodeCheckpointer(StorageCheckpointerBase):
    """Saves the episodes of a storage of tensordicts, each observation once, and loads them back bit for bit.

    A subclass names the form. What `done_keys`, `reward_keys` and `compatible` mean is said there.
    """

    form: ClassVar[CompactForm]

    def __init__(
        self,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
        *,
        compatible: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        for argument, keys in (("done_keys", done_keys), ("reward_keys", reward_keys)):
            if keys is not None and not keys_of(keys, argument):
                raise UsageError(f"{argument} names no key", hint="leave it out to have the keys TED has")
        self.done_keys = done_keys
        self.reward_keys = reward_keys
        self.compatible = compatible
        self._options = {"done_keys": done_keys, "reward_keys": reward_keys, **(options or {})}

    def dumps(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint to `path`; parents are created, an older checkpoint is replaced at one instant.

        SchemaError (a RuntimeError) for a storage that nothing was written to, that holds no tensordicts, or whose
        data has no done flags; MissingKeyError (a KeyError) for a done or reward key that is not there; UsageError if
        something else lies at `path`; OutOfSpaceError for want of room.
        """
        source, name = self._hooked(storage, path), self._file_name(path)
        if self.compatible:
            from .compatible import save_compatible

            with CheckpointStaging(path) as staging:
                save_compatible(source, self._built(staging.path, name), self.form, self._options)
                if name is None:
                    staging.publish_noted()
                else:  # one file, which has no place for digests
                    staging.publish(name)
            return
        step = provenance_step(f"{type(self).__name__}.dumps", {}, {})
        with (
            rows_of_storage(source, self.done_keys, self.reward_keys, type(self).__name__) as rows,
            CheckpointStaging(path) as staging,
        ):
            rows.verify_files()
            size = CompactLayout.of(rows.fields, self.form).bytes(rows.manifest.steps, rows.manifest.episodes)
            if self._compression.method is None:
                fs.require_space(staging.path, size)
            built = self._built(staging.path, name)
            save_compact(rows, built, self.form, rows.filled, self._compression, step, Silent())
            staging.publish(name)

    def loads(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Put the rows of a checkpoint, ours or TorchRL's, where they were in the storage that was saved.

        DatasetNotFoundError (a FileNotFoundError) where there is none, FormatError for another checkpointer's and
        what others wrote, CorruptDataError for what was cut or changed (both ValueErrors), SchemaError (a
        RuntimeError) for data of other keys, types or shapes and for more than there is room for. Nothing has changed
        then.
        """
        from .compatible import is_compatible, open_compatible

        place = self._place(Path(path))
        if self._load_hooks:
            _tensor_storage(storage)
        if self._file_name(path) is None:
            require_digests(Path(path))
        theirs = is_compatible(place, self.form)
        with open_compatible(storage, place, self.form, self._options) if theirs else self._open(place) as reader:
            reader.verify_files()
            for argument, keys in (("done_keys", self.done_keys), ("reward_keys", self.reward_keys)):
                require_keys(keys, argument, reader.fields, place, anywhere=theirs)
            if self._load_hooks:
                self._fill_through_hooks(_tensor_storage(storage), reader)
            else:
                fill(storage, reader, reader.filled, type(self).__name__)

    def _hooked(self, storage: Storage, path: str | os.PathLike[str]) -> Storage:
        """Have the save hooks look at the rows, if there are any."""
        if not self._save_hooks:
            return storage
        source = _tensor_storage(storage)
        data = self._through_save_hooks(source, source[:], path)
        return TensorStorage(data, device="auto", ndim=source.ndim)

    def _place(self, folder: Path) -> Path:
        """Where the checkpoint is; DatasetNotFoundError where nothing is, FormatError where something else is."""
        mend(folder)
        place = folder if self._file_name(folder) else self._built(folder, None)
        if os.path.lexists(place):
            return place
        if not os.path.lexists(folder):
            raise DatasetNotFoundError(f"there is nothing at {folder}, the checkpoint of a storage is expected")
        writer = f"{self.form.capitalize()}StorageCheckpointer"
        require_writer(folder, writer)
        if not folder.is_dir():
            raise FormatError(f"{folder} is a file whose name does not end in {place.suffix}, or is no file at all")
        raise FormatError(f"{folder} has no {place.name}, which {article(writer)} writes")

    def _fill_through_hooks(self, target: TensorStorage, reader: FlatReader | H5Reader | TorchrlReader) -> None:
        """Have the load hooks look at the rows before they go into the storage."""
        held = LazyTensorStorage(max(reader.filled.length, 1), ndim=len(reader.filled.shape))
        fill_storage(held, reader, reader.filled)
        data: Any = held[:]
        data = self._through_load_hooks(data, target.contents)
        structure = structure_of(data, target.ndim)
        if not is_tree(structure):
            raise SchemaError(f"load hooks made a {structure} of the rows, a tensordict is expected")
        tensors = structure.leaves(data)
        lead, filled = tensors[0].shape[: target.ndim], reader.filled
        unchanged = tuple(lead) == filled.shape
        target.fill(
            structure, tensors, lead.numel(), capacity=filled.rows if unchanged else None,
            last_row=filled.last_row if unchanged else None,
        )  # fmt: skip

    def _open(self, place: Path) -> FlatReader | H5Reader:
        return FlatReader(open_folder(place, f"{self.form.capitalize()}StorageCheckpointer"))

    def _file_name(self, path: str | os.PathLike[str]) -> str | None:
        """Name of the file that is published alone; None where the whole folder is."""
        return None

    def _built(self, folder: Path, name: str | None) -> Path:
        """Where in a folder the checkpoint is built; `name` is what `_file_name` said."""
        return folder

    @property
    def _compression(self) -> Compression:
        return Compression()


def _tensor_storage(storage: Storage) -> TensorStorage:
    if not isinstance(storage, TensorStorage):
        raise UsageError(
            f"hooks change the rows of tensors, found {article(type(storage).__name__)}", hint="leave them out"
        )
    return storage
