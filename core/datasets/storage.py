"""The storage of a dataset on disk: its rows are mapped copy-on-write, so that edits do not reach the disk."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from tensordict import TensorDict

from ..checkpointers.base import open_folder, writer_of
from ..checkpointers.references import PackedNote
from ..checkpointers.storage_rows import require_equal_rows
from ..checkpointers.tensor import TensorStorageCheckpointer
from ..encodings.save import dataset_digests
from ..errors import CorruptDataError, RbtoolError, SchemaError, UsageError, require_flags
from ..format import fs
from ..format.contracts import StepReader
from ..format.manifest import Manifest, has_manifest
from ..format.memmap.reader import TedReader
from ..format.memmap.tree import leaf_path
from ..format.open_files import ListedFiles
from ..format.packed.reader import PackedReader
from ..format.staging import may_be_shared, mend
from ..open_steps import is_steps, open_episodes
from ..progress import readable_size
from ..storages.base import Storage, register_checkpointer
from ..storages.columns import plain_column
from ..storages.dataset import MappedDataset, exceeds_memory, tensor_of, tensordict_of
from ..storages.lazy_tensor import mapped_tensor
from ..storages.packed import PackedStorage
from ..storages.pytree import tree_spec_of
from ..storages.tensor import TensorStorage
from ..ted.schema import NEXT_DONE, Array, Field, Key, Numbers, as_key, row_bytes

MASK: Key = ("mask",)
TRAJECTORY_IDS: Key = ("traj_ids",)
_PIECE = 16 << 20


def trajectory_lengths(episode_lengths: Array, done: Array) -> Array:
    """Count the steps of each trajectory, in storage order: int64 `[trajectories]`.

    A trajectory ends at the last step of its episode, and at each step where `done` (bool `[steps]`) is set.
    """
    ends = done.astype(bool, copy=True)
    ends[np.cumsum(episode_lengths[episode_lengths > 0]) - 1] = True
    return np.diff(np.flatnonzero(ends) + 1, prepend=0)


def padded(rows: TensorDict, lengths: Array) -> TensorDict:
    """Give every trajectory a row of its own: `[steps]` becomes `[trajectories, longest]`, padded with zeros.

    `lengths` are the lengths of all trajectories, in the order of the rows. `"mask"` (bool) is true for steps and false
    for padding, `"traj_ids"` (int64) is the number of the trajectory. The result is in memory; pages that contain only
    padding take none. Names and form match TorchRL's `split_trajectories`. SchemaError (a RuntimeError) if the data has
    entries of these names.
    """
    mask = torch.arange(int(lengths.max())) < torch.from_numpy(lengths).unsqueeze(1)
    places = mask.flatten().nonzero().squeeze(1)
    tensors: dict[Key, torch.Tensor] = {}
    for name in rows.keys(include_nested=True, leaves_only=True):
        key = as_key(name)
        if key in (MASK, TRAJECTORY_IDS):
            raise SchemaError(f"the dataset has an entry {key[0]!r} of its own, which the padded form needs")
        tensors[key] = _spread(cast("torch.Tensor", rows.get(key)), places, mask.shape)
    tensors[MASK] = mask
    tensors[TRAJECTORY_IDS] = torch.arange(len(lengths)).unsqueeze(1) * mask
    return tensordict_of(tensors, tuple(mask.shape))


def _spread(leaf: torch.Tensor, places: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """Put the rows of a leaf at these places of `lead`, and zeros elsewhere."""
    target = torch.zeros((lead.numel(), *leaf.shape[1:]), dtype=leaf.dtype)
    plain_column(target).index_copy_(0, places, plain_column(leaf))
    return target.reshape(*lead, *leaf.shape[1:])


Mode: TypeAlias = Literal["c", "r+"]
"""How a dataset is opened: with `c` (copy-on-write) edits stay in this process, with `r+` they go to the disk."""


_REOPENED = frozenset({"_leaves", "_dtypes", "_mapped", "_episode_lengths"})


class DatasetStorage(TensorStorage):
    """The steps of a dataset, one a row, mapped from the disk and loaded when first read.

    The rows of a checkpoint or an export are read into memory at once, and cannot be edited in place.

    A pickle only contains the path, and opens the dataset again, without edits of mode `c`. A forked process inherits
    the rows with all edits so far; later edits are separate.

    Args:
        path: the path of a dataset, or a reader that has it open.
        mode: in mode `c` (copy-on-write) edits of batches and of rows stay in this process. In mode `r+` edits of rows
            go to the files at once, and are visible to everybody who has them open. The digests in the manifest are
            then wrong, which `check` reports.
        split_trajs: whether each row is a padded trajectory, in memory; see `padded`.
        larger_than_memory: whether the files exceed the memory, by default determined from their sizes; if so, the
            system is advised which rows are read next.

    Raises:
        UsageError: (a ValueError) unknown mode, a dataset without steps, or `r+` with `split_trajs`.
        FormatError: the path is not a dataset.
        CorruptDataError: files are missing or cut, or another dataset has replaced the one that is reopened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | StepReader,
        *,
        mode: Mode = "c",
        split_trajs: bool = False,
        larger_than_memory: bool | None = None,
    ) -> None:
        require_flags(split_trajs=split_trajs)
        if mode not in get_args(Mode):
            raise UsageError(f"the mode is {mode!r}, expected 'c' (edits stay here) or 'r+' (edits are kept)")
        if split_trajs and mode == "r+":
            raise UsageError("mode is 'r+', expected 'c' with split_trajs=True: padded copies cannot be edited on disk")
        reader = path if isinstance(path, StepReader) else None
        self.path = (reader.path if reader is not None else Path(path)).absolute()  # type: ignore[arg-type]
        self.mode = mode
        self.split_trajs = split_trajs
        self.larger_than_memory = larger_than_memory
        self._mapped: MappedDataset | None = None
        self._episode_lengths: Numbers
        self.content_digest, tensors = self._open() if reader is None else self._map(reader)
        super().__init__(tensors)

    def _open(self) -> tuple[str, TensorDict]:
        """Open and map the dataset that is at the path at this time."""
        with self._reader() as reader:
            return self._map(reader)

    def _map(self, reader: StepReader) -> tuple[str, TensorDict]:
        """Map the files of an open dataset, or read the rows of other formats into memory."""
        if not reader.manifest.steps:
            raise UsageError(f"{self.path} has no steps to sample")
        if self.mode == "r+" and not (isinstance(reader, TedReader) and reader.manifest.kind == "dataset"):
            raise UsageError(f"{self.path} is not a dataset, and cannot be edited in place", hint=_as_dataset(reader))
        self._mapped = None
        if isinstance(reader, PackedReader):
            tensors = PackedStorage(reader)[:]
        elif not isinstance(reader, TedReader):
            tensors = _read_into_memory(reader)
        elif self.mode == "c":
            self._mapped = MappedDataset(reader, larger_than_memory=self.larger_than_memory)
            tensors = self._mapped.tensors
        else:
            tensors = _editable_tensors(reader)
        if self.split_trajs:
            self._mapped = None
            tensors = _trajectories(reader, tensors)
        self._episode_lengths = reader.episodes.length
        return reader.manifest.content_digest, tensors

    def _reader(self) -> StepReader:
        mend(self.path)
        if not has_manifest(self.path) and is_steps(self.path):
            return open_episodes(self.path)
        listed = ListedFiles.at(self.path)
        if listed.manifest.layout in {"flat", "nested"}:
            return open_episodes(self.path)
        if listed.manifest.layout == "packed" and self.split_trajs:
            return PackedReader(self.path, listed)
        return TedReader(self.path, listed)

    def read_at(self, index: Any) -> Any:
        """Read the rows at `index`; for a tensor, advise the system first if they may not be in memory."""
        if self._mapped is not None and type(index) is torch.Tensor and index.dtype is torch.int64:
            self.expect(index.numpy(force=True).reshape(-1))
        return super().read_at(index)

    @property
    def expects_rows(self) -> bool:
        """Whether `expect` has an effect: the files may exceed the memory."""
        return self._mapped is not None and self._mapped.advises

    def expect(self, rows: Array, key: Key | None = None) -> None:
        """Advise the system that rows, or rows of one entry, will be read, which may not be in memory."""
        if self._mapped is not None:
            self._mapped.expect(rows, key)

    def episode_lengths(self) -> Numbers | None:
        """Return the lengths of the episodes; None if rows are whole trajectories, or were overwritten."""
        if self.split_trajs or self.log.now.rows:
            return None
        return self._episode_lengths

    @property
    def _takes_entries(self) -> bool:
        return False  # new entries would be missing when the dataset is opened again

    def share(self) -> None:
        """Raise SchemaError in mode `c`, whose edits only this process sees. In mode `r+` the files are shared."""
        if self.mode == "c":
            raise SchemaError(
                f"{self.path} is open copy-on-write: no other process sees what is edited here",
                hint="other processes can read it without share(); mode='r+' edits the files",
            )
        self._share_counts()

    def read_again(self) -> None:
        """Read the rows from the disk again, which discards edits of mode `c`.

        CorruptDataError if the dataset was replaced meanwhile.
        """
        self._reopen()
        self.set_length(len(self._wrapped))

    def _reopen(self) -> None:
        digest, tensors = self._open()
        if digest != self.content_digest:
            raise CorruptDataError(
                f"{self.path} has the content {digest}, expected {self.content_digest}: it was replaced since"
            )
        structure = tree_spec_of(tensors, self.ndim)
        self._take(structure, structure.flatten(tensors))
        self._wrapped = tensors

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in _REOPENED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reopen()


class SelectedEntries(DatasetStorage):
    """A dataset with only some of its entries, under other names: `entries` maps new names to keys of the dataset."""

    entries: ClassVar[Mapping[Key, Key]]

    def _map(self, reader: StepReader) -> tuple[str, TensorDict]:
        digest, rows = super()._map(reader)
        chosen = {name: cast("torch.Tensor", rows.get(key)) for name, key in self.entries.items()}
        return digest, tensordict_of(chosen, tuple(rows.batch_size))


def _as_dataset(reader: StepReader) -> str:
    verb = "checkpoint load" if reader.manifest.kind == "checkpoint" else "convert"
    return f"make a dataset of it: rbtool {verb} {shlex.quote(str(reader.path))} DEST"


def _read_into_memory(reader: StepReader) -> TensorDict:
    """Read all rows, leaf after leaf; UsageError if they do not fit into memory."""
    steps, size = reader.manifest.steps, row_bytes(reader.fields) * reader.manifest.steps
    if exceeds_memory(size):
        raise UsageError(
            f"{reader.path} has rows of {readable_size(size)}, which do not fit into memory; a dataset need not",
            hint=_as_dataset(reader),
        )
    tensors: dict[Key, torch.Tensor] = {}
    for field in reader.fields:
        rows = np.empty((steps, *field.shape), field.numpy)
        size = max(1, _PIECE // max(1, field.row_bytes))
        for start in range(0, steps, size):
            rows[start : start + size] = reader.read(field.key, start, min(start + size, steps))
        tensors[field.key] = tensor_of(rows, field)
    return tensordict_of(tensors, (steps,))


def _trajectories(reader: StepReader, rows: TensorDict) -> TensorDict:
    steps = reader.manifest.steps
    has_flag = any(field.key == NEXT_DONE for field in reader.fields)
    done = rows[NEXT_DONE].reshape(steps, -1).any(1) if has_flag else torch.zeros(steps, dtype=torch.bool)
    return padded(rows, trajectory_lengths(reader.episodes.length, done.numpy()))


def _editable_tensors(reader: TedReader) -> TensorDict:
    """Map the leaves so that writes go to their files."""
    steps = reader.manifest.steps
    tensors = {field.key: _editable(reader.listed, field, steps) for field in reader.fields}
    return tensordict_of(tensors, (steps,))


def _editable(files: ListedFiles, field: Field, steps: int) -> torch.Tensor:
    dtype, shape = getattr(torch, field.dtype), (steps, *field.shape)
    size, name = steps * field.row_bytes, leaf_path(field.key)
    if not size:  # there is no file
        return torch.empty(shape, dtype=dtype)
    path, found = files.root / name, files.size(name) or 0
    if found != size:  # torch would lengthen a file that is too short
        raise CorruptDataError(f"{path} has {found:,} bytes, expected {size:,}: it was cut, removed or overwritten")
    if not os.access(files.place(name), os.W_OK):
        raise UsageError(f"{path} may not be written to, which mode='r+' requires", hint="open it with mode='c'")
    _refuse_links(files, name)
    if may_be_shared(os.fstat(files.descriptor(name))):  # root may write to it all the same
        raise UsageError(
            f"{path} may be part of other datasets, too (a hard link, or read-only); mode='r+' would change them",
            hint=_copy_hint(files),
        )
    return mapped_tensor(files.place(name), dtype, shape, shared=True)


def _refuse_links(files: ListedFiles, name: str) -> None:
    """Raise UsageError if an open file is reached by a symbolic link below the root.

    The file found without following links has to be the open one. The open file is mapped, so that a link that replaces
    it later has no effect.
    """
    path, opened = files.root / name, os.fstat(files.descriptor(name))
    try:
        with fs.folder_below(files.root, path.parent) as within:
            found = os.stat(path.name, dir_fd=within, follow_symlinks=False)
    except UsageError as error:
        raise UsageError(error.message, hint=_copy_hint(files)) from error
    if not os.path.samestat(found, opened):
        raise UsageError(
            f"{path} is a symbolic link; mode='r+' would change the file that it leads to", hint=_copy_hint(files)
        )


def _copy_hint(files: ListedFiles) -> str:
    return f"edit a copy: rbtool convert {shlex.quote(str(files.root))} DEST --layout ted"


class DatasetStorageCheckpointer(TensorStorageCheckpointer):
    """Saves the rows of a `DatasetStorage`, which may have been edited, like a `TensorStorageCheckpointer`.

    Also loads the checkpoint of a `PackedStorage`, which only names a dataset, if that has the same steps as this
    storage's dataset; the storage then reads its rows from the disk again. SchemaError if the steps differ, or if that
    cannot be determined.
    """

    def loads(self, storage: Storage, path: str | os.PathLike[str], *, verify: bool = False) -> None:
        """Put the rows of the checkpoint in the folder `path` into the storage; nothing changes if that fails."""
        folder = Path(path)
        if not isinstance(storage, DatasetStorage) or writer_of(folder) != "PackedStorageCheckpointer":
            super().loads(storage, folder, verify=verify)
            return
        if self._load_hooks:
            raise UsageError(f"{folder} holds no row that hooks could change", hint="leave them out")
        if storage.split_trajs:
            raise SchemaError(f"{folder} is of single steps, the rows of this storage are whole trajectories")
        _require_same_steps(storage, PackedNote.load(open_folder(folder, "PackedStorageCheckpointer")), folder)
        storage.read_again()


def _require_same_steps(storage: DatasetStorage, note: PackedNote, folder: Path) -> None:
    """Raise SchemaError unless the dataset of a storage has the same steps as the dataset named in a checkpoint."""
    with open_episodes(storage.path) as reader:
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
