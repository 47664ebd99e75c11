"""Checkpointers that save a storage as whole episodes, each observation once: flat, nested, and as an HDF5 file.

They write rbtool's layout, or TorchRL's with `compatible=True`, and load both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ..encodings.compact import CompactForm, CompactLayout
from ..encodings.flat import FlatReader
from ..encodings.foreign import OWN_FORM, ForeignReader, foreign_form
from ..encodings.h5 import Compression, H5Reader
from ..encodings.save import save_compact
from ..encodings.saved_digests import require_digests
from ..errors import (
    DatasetNotFoundError,
    FormatError,
    SchemaError,
    UsageError,
    did_you_mean,
    keywords_of,
    require_flags,
)
from ..format import fs
from ..format.manifest import is_inside
from ..format.memmap.builder import provenance_step
from ..format.staging import mend
from ..format.syncing import Durable
from ..options import PathLike
from ..progress import Silent
from ..storages.base import Storage, register_checkpointer
from ..storages.cursors import newest_row
from ..storages.lazy_tensor import LazyTensorStorage
from ..storages.packed import PackedRecording
from ..storages.pytree import is_tree, tree_spec_of
from ..storages.tensor import TensorStorage
from ..ted.schema import NEXT, key_name
from .base import Captured, CheckpointStaging, StorageCheckpointerBase, open_folder, require_writer
from .segments import CapturedRows
from .storage_rows import KeyLike, article, fill, fill_storage, held_keys, keys_of, require_keys, rows_of_storage


class EpisodeCheckpointer(StorageCheckpointerBase):
    """Saves the episodes of a storage of tensordicts, each observation once, and restores them bit for bit.

    Args:
        done_keys: the flags below `next` that end episodes; default done, terminated and truncated. Keys are texts or
            tuples of texts, with or without a leading `next`.
        reward_keys: the keys below `next` that are rewards rather than observations; default reward.
        compatible: whether to write TorchRL's layout, which does not keep everything. SchemaError for data that it
            cannot hold.
        options: other arguments for TorchRL's layout; see `open_compatible`.
    """

    form: ClassVar[CompactForm]
    """The layout that the subclass writes."""

    def __init__(
        self,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
        *,
        compatible: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        require_flags(compatible=compatible)
        super().__init__()
        for argument, keys in (("done_keys", done_keys), ("reward_keys", reward_keys)):
            if keys is not None and not keys_of(keys, argument):
                raise UsageError(f"{argument} names no key", hint="leave it out to have the keys TED has")
        self.done_keys = done_keys
        self.reward_keys = reward_keys
        self.compatible = compatible
        self._options = {"done_keys": done_keys, "reward_keys": reward_keys, **(options or {})}

    def dumps(self, storage: Storage, path: PathLike, *, durable: Durable = "full") -> None:
        """Write a checkpoint to `path`, atomically replacing an older one; parent folders are created.

        Raises:
            SchemaError: (a RuntimeError) nothing was written to the storage, it does not hold tensordicts, or its data
                has no done flags.
            MissingKeyError: (a KeyError) a done or reward key does not exist.
            UsageError: something that is not a checkpoint is at `path`.
            OutOfSpaceError: the disk is full.
        """
        source, name = self._hooked(storage, path), self._file_name(path)
        if self.compatible:
            with CheckpointStaging(path, durable) as staging:
                _save_compatible(source, self._built(staging.path, name), self.form, self._options)
                if name is None:
                    staging.publish_noted()
                else:  # a single file of TorchRL's cannot hold digests
                    staging.publish(name)
            return
        step = provenance_step(f"{type(self).__name__}.dumps", {}, {})
        with (
            rows_of_storage(source, self.done_keys, self.reward_keys, type(self).__name__) as rows,
            CheckpointStaging(path, durable) as staging,
        ):
            rows.verify_files()
            size = CompactLayout.of(rows.fields, self.form).bytes(rows.manifest.steps, rows.manifest.episodes)
            if self._compression.method is None:
                fs.require_space(staging.path, size)
            built = self._built(staging.path, name)
            save_compact(rows, built, self.form, rows.filled, self._compression, step, Silent())
            staging.publish(name)

    def capture(self, storage: Storage, path: Path) -> Captured | None:
        """Capture the rows as they are now.

        None with hooks, for a class with its own `dumps`, and if rows may change without being copied first
        (`TensorStorage.snapshot`).
        """
        own = type(self).dumps is EpisodeCheckpointer.dumps
        if not own or self._save_hooks or not isinstance(storage, TensorStorage):
            return None
        return CapturedRows.of(storage, path, partial(self.dumps, path=path))

    def loads(self, storage: Storage, path: PathLike) -> None:
        """Load a checkpoint, rbtool's or TorchRL's; each row gets its place in the storage that was saved.

        If this fails, nothing is changed.

        Raises:
            DatasetNotFoundError: (a FileNotFoundError) the path does not exist.
            FormatError: (a ValueError) another checkpointer, or another program, wrote it.
            CorruptDataError: (a ValueError) files are truncated or changed.
            SchemaError: (a RuntimeError) keys, types or shapes differ, or there is not enough room.
        """
        place = self._place(Path(path))
        if self._load_hooks:
            _tensor_storage(storage)
        if self._file_name(path) is None:
            require_digests(Path(path))
        theirs = is_compatible(place, self.form)
        with open_compatible(storage, place, self.form, self._options) if theirs else self._open(place) as reader:
            fresh = isinstance(storage, TensorStorage) and not storage.initialized and not self._load_hooks
            checks = reader.checks() if fresh and isinstance(reader, FlatReader) else []
            if not checks:
                reader.verify_files()
            for argument, keys in (("done_keys", self.done_keys), ("reward_keys", self.reward_keys)):
                require_keys(keys, argument, reader.fields, place, anywhere=theirs)
            if self._load_hooks:
                self._fill_through_hooks(_tensor_storage(storage), reader)
            else:
                fill(storage, reader, reader.filled, type(self).__name__, checks)

    def _hooked(self, storage: Storage, path: PathLike) -> Storage:
        """Return a storage with the results of the save hooks; the same storage if there are none."""
        if not self._save_hooks:
            return storage
        source = _tensor_storage(storage)
        data = self._through_save_hooks(source, source[:], path)
        hooked = TensorStorage(data, device="auto", ndim=source.ndim)
        if hooked.shape == source.shape:
            hooked.last_cursor = newest_row(source)  # a full ring does not continue at row 0
        return hooked

    def _place(self, folder: Path) -> Path:
        """Return the file or folder with the checkpoint.

        Raises:
            DatasetNotFoundError: the path does not exist.
            FormatError: it is not a checkpoint of this form.
        """
        mend(folder)
        place = folder if self._file_name(folder) else self._built(folder, None)
        if os.path.lexists(place):
            return place
        if not os.path.lexists(folder):
            raise DatasetNotFoundError(f"{folder} not found, expected the checkpoint of a storage")
        writer = f"{self.form.capitalize()}StorageCheckpointer"
        require_writer(folder, writer)
        if not folder.is_dir():
            raise FormatError(f"{folder} is neither a folder nor a file whose name ends in {place.suffix}")
        raise FormatError(f"{folder} has no {place.name}, which {article(writer)} writes")

    def _fill_through_hooks(self, target: TensorStorage, reader: FlatReader | H5Reader | ForeignReader) -> None:
        """Fill a storage with the results of the load hooks."""
        held = LazyTensorStorage(max(reader.filled.length, 1), ndim=len(reader.filled.shape))
        fill_storage(held, reader, reader.filled)
        data: Any = held[:]
        data = self._through_load_hooks(data, target.contents)
        structure = tree_spec_of(data, target.ndim)
        if not is_tree(structure):
            raise SchemaError(f"load hooks made a {structure} of the rows, expected a tensordict")
        tensors = structure.flatten(data)
        lead, filled = tensors[0].shape[: target.ndim], reader.filled
        unchanged = tuple(lead) == filled.shape
        target.fill(
            structure, tensors, lead.numel(), capacity=filled.rows if unchanged else None,
            last_row=filled.last_row if unchanged else None,
        )  # fmt: skip

    def _open(self, place: Path) -> FlatReader | H5Reader:
        return FlatReader(open_folder(place, f"{self.form.capitalize()}StorageCheckpointer"))

    def _file_name(self, path: PathLike) -> str | None:
        """Return the name of the single file at `path` that is the checkpoint; None if the checkpoint is a folder."""
        return None

    def _built(self, folder: Path, name: str | None) -> Path:
        """Return the path in a folder at which the checkpoint is written; `name` is the result of `_file_name`."""
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


class FlatStorageCheckpointer(EpisodeCheckpointer):
    """Saves each observation of an episode once, in one file for each leaf.

    A leaf with observations has one row more than steps in every episode, other leaves have one row for each step. If a
    next observation differs from the observation of the following row, all next observations of the episode are
    stored. Everything is restored bit for bit, into a storage of any capacity that holds the rows: done flags and
    rewards at the root, keys that exist only below `next`, and the last cursor.

    Args:
        done_keys: the flags below `next` that end episodes; default done, terminated and truncated. Keys are texts or
            tuples of texts, with or without a leading `next`.
        reward_keys: the keys below `next` that are rewards rather than observations; default reward.
        compatible: whether to write TorchRL's layout, which loses some of this. SchemaError for data that it cannot
            hold. Loading recognises both layouts.

    The layout and the names follow TorchRL.
    """

    form = "flat"

    def __init__(
        self,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
        *,
        compatible: bool = False,
    ) -> None:
        super().__init__(done_keys, reward_keys, compatible=compatible)


_NAMES = frozenset({"done_key", "shift_key", "is_full_key"})


class NestedStorageCheckpointer(EpisodeCheckpointer):
    """Saves the same files as a `FlatStorageCheckpointer`, and for each leaf a table of the shapes of its episodes.

    tensordict opens such a folder as ragged tensors `[episodes, rows, ...]`.

    Args:
        done_keys, reward_keys, compatible: see `FlatStorageCheckpointer`.
        **kwargs: `done_key`, `shift_key` and `is_full_key` name entries of TorchRL's layout, and only have an effect
            with `compatible=True`. UsageError for other arguments.
    """

    form = "nested"

    def __init__(
        self,
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
        *,
        compatible: bool = False,
        **kwargs: Any,
    ) -> None:
        _require_known(self, kwargs)
        super().__init__(done_keys, reward_keys, compatible=compatible, options=kwargs)


def _require_known(checkpointer: EpisodeCheckpointer, kwargs: dict[str, Any]) -> None:
    """Raise UsageError for an unknown argument."""
    unknown = sorted(kwargs.keys() - _NAMES)
    if unknown:
        known = sorted({*_NAMES, *keywords_of(type(checkpointer))} - {"options"})
        raise UsageError(
            f"{article(type(checkpointer).__name__)} has no argument {unknown[0]!r}{did_you_mean(unknown[0], known)}",
            hint=f"known: {', '.join(known)}",
        )


_SUFFIX = ".h5"


class H5StorageCheckpointer(EpisodeCheckpointer):
    """Saves the same leaves as a `FlatStorageCheckpointer` in one HDF5 file, with one dataset for each leaf.

    The file is `path` itself if its name ends in `.h5`, otherwise `checkpoint_file` in the folder `path`.

    Args:
        checkpoint_file: the name of the file in a folder.
        done_keys, reward_keys, compatible: see `FlatStorageCheckpointer`.
        h5_kwargs: arguments of h5py's `create_dataset` for every dataset: `compression` ("gzip" or "lzf"),
            `compression_opts`, `shuffle`, `fletcher32` and `chunks=True`. UsageError for others.
        **kwargs: see `NestedStorageCheckpointer`.
    """

    form = "h5"

    def __init__(
        self,
        *,
        checkpoint_file: str = "checkpoint.h5",
        done_keys: Sequence[KeyLike] | None = None,
        reward_keys: Sequence[KeyLike] | None = None,
        h5_kwargs: Mapping[str, Any] | None = None,
        compatible: bool = False,
        **kwargs: Any,
    ) -> None:
        _require_known(self, kwargs)
        if not is_inside(checkpoint_file) or "/" in checkpoint_file:
            raise UsageError(f"checkpoint_file is {checkpoint_file!r}, expected the name of a file")
        options = {"checkpoint_file": checkpoint_file, "h5_kwargs": h5_kwargs, **kwargs}
        super().__init__(done_keys, reward_keys, compatible=compatible, options=options)
        self.checkpoint_file = checkpoint_file
        self._chosen = Compression() if compatible else Compression.from_h5_kwargs(h5_kwargs)

    def _file_name(self, path: PathLike) -> str | None:
        file = Path(path)
        return file.name if file.suffix == _SUFFIX and not file.is_dir() else None

    def _built(self, folder: Path, name: str | None) -> Path:
        return folder / (name or self.checkpoint_file)

    def _open(self, place: Path) -> H5Reader:
        return H5Reader(place)

    @property
    def _compression(self) -> Compression:
        return self._chosen


_FILE = "checkpoint.h5"


def is_compatible(folder: PathLike, form: CompactForm) -> bool:
    """Whether `folder` holds a form in TorchRL's layout; for H5, it is the file or a folder with `checkpoint.h5`."""
    return foreign_form().form_at(_compatible_place(folder, form, {})) == form


def open_compatible(storage: Storage, folder: PathLike, form: CompactForm, options: Mapping[str, Any]) -> ForeignReader:
    """Open a checkpoint in TorchRL's layout, to load it into a storage of any capacity that holds the rows.

    The layout does not hold next observations that differ from the following rows, and neither done flags nor a reward
    at the root. Done flags at the root are restored as False, if the storage has any.

    Args:
        storage: the storage that will be filled.
        folder: the checkpoint.
        form: its form.
        options: the arguments of the checkpointer: done_key, done_keys, reward_keys, shift_key, is_full_key,
            checkpoint_file.

    Raises:
        FormatError: (a ValueError) it has another layout.
        CorruptDataError: (a ValueError) it is truncated.
    """
    place = _compatible_place(folder, form, options)
    found = foreign_form().form_at(place)
    if found != form:
        raise FormatError(f"{place} is {f'in the layout {found}' if found else 'no checkpoint of TorchRL'}, not {form}")
    return foreign_form().open(place, options, held_keys(storage))


def _save_compatible(storage: Storage, folder: PathLike, form: CompactForm, options: Mapping[str, Any]) -> None:
    """Write a storage in the layout of TorchRL 0.14.

    Args:
        storage: the storage.
        folder: an empty folder in a staging area; for H5 also the file.
        form: the form.
        options: see `open_compatible`; also `h5_kwargs`, see `H5StorageCheckpointer`.

    Raises:
        SchemaError: (a RuntimeError) nothing was written to the storage, or the layout cannot hold its data: values
            that are not tensors, and data that the writer of the layout refuses.
        OutOfSpaceError: the disk is full.
    """
    done_key = foreign_form().done_key(options)
    values = isinstance(storage, TensorStorage) and storage.initialized and storage.structure.values()
    value = next(values or iter(()), None)
    if value is not None:
        raise SchemaError(f"{key_name(value[0])} is not a tensor, as TorchRL's layout requires", hint=OWN_FORM)
    compression = Compression.from_h5_kwargs(options.get("h5_kwargs")) if form == "h5" else None
    checkpointer = f"{form.capitalize()}StorageCheckpointer"
    with rows_of_storage(storage, [(NEXT, *done_key)], options.get("reward_keys"), checkpointer) as rows:
        require_keys(options.get("done_keys"), "done_keys", rows.fields, rows.path)
        rows.verify_files()
        place = _compatible_place(folder, form, options)
        foreign_form().write(rows, place, form, rows.filled, options, Silent(), compression)


def _compatible_place(folder: PathLike, form: CompactForm, options: Mapping[str, Any]) -> Path:
    place = Path(folder)
    return place / (options.get("checkpoint_file") or _FILE) if form == "h5" and place.is_dir() else place


register_checkpointer(PackedRecording, FlatStorageCheckpointer)
