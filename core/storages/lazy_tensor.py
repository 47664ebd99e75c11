"""Storages that create their tensors when the first data is written, in memory or in memory-mapped files.

Several processes write to the files through memory maps. A write through a map into a hole of a file kills the process
(SIGBUS) if the disk is full. Disk blocks are therefore allocated before rows are written, twice as many each time, so
that a full disk raises OutOfSpaceError with nothing changed. Allocating everything at the start would be as fast (0.8
ms per GB on ext4), but a buffer that is never filled would occupy its whole capacity; and a file system in memory takes
that memory at once (0.24 s per GB).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import signal
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from ..errors import CorruptDataError, FormatError, OutOfSpaceError, SchemaError, UsageError, require_flags, warn_caller
from ..format import fs
from ..format.documents import Count, decode, load_json
from ..format.manifest import HIDDEN
from ..torchrl_classes import counterpart
from .base import Storage
from .codec import byte_count, dtype_named
from .columns import Columns, MappedView, zeros
from .pytree import Path as Place
from .pytree import (
    TensorDictNode,
    TextGrows,
    TreeSpec,
    in_order,
    leaf_files,
    spec_from_json,
    spec_to_json,
    tree_documents,
    tree_spec_of,
)
from .tensor import TensorStorage
from .write_log import forks

_PUBLISHED = f"{HIDDEN}/maps.json"
_STEP = 1 << 20
_ZEROS = bytes(1 << 20)


class _LeafShape(NamedTuple):
    """Element type and full shape of a leaf, and so the size of its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return byte_count(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class _Published:
    """The document `maps.json`, in which a process describes the files it has made for processes that join later."""

    structure: Mapping[str, Any]
    leaves: tuple[tuple[str, str, tuple[Count, ...]], ...]


class MemoryMaps:
    """The memory-mapped files of a storage.

    A child process that gets this object uses the same files. A plain pickle holds the contents, which are written to a
    new temporary folder when it is loaded.

    Args:
        folder: where the files are; None for a temporary folder.
        remove: whether the files are removed with the storage.
        replace: whether files of the same names may be replaced; processes that have mapped the old ones keep them.
    """

    def __init__(self, folder: Path | None, *, remove: bool, replace: bool = False) -> None:
        self.folder = folder
        self.removes = remove
        self._replace = replace
        self._temporary = folder is None
        self._files: dict[str, _LeafShape] = {}
        self._documents: set[str] = set()
        self._reserved = 0
        self._inodes: dict[str, tuple[int, int]] = {}
        self._owner = os.getpid()

    def make_folder(self) -> Path:
        """Create the folder if it does not exist."""
        if self.folder is None:
            base = tempfile.gettempdir()
            with fs.announced("mkdir", base):
                self.folder = Path(tempfile.mkdtemp(prefix="rbtool-storage-", dir=base))
        else:
            fs.make_folder(self.folder)
        return self.folder

    # Making and opening ----------------------------------------------------------------------------

    def make(
        self,
        structure: TreeSpec,
        wanted: Sequence[tuple[torch.dtype, tuple[int, ...]]],
        lead: tuple[int, ...],
        *,
        join: bool = False,
    ) -> list[torch.Tensor]:
        """Create missing files and map all of them.

        Args:
            structure: how the data is nested.
            wanted: element type and row shape of each leaf.
            lead: the shape that counts elements.
            join: whether files that another process made for the same data may be used.

        Returns:
            The tensors, in the order of the leaves.

        Raises:
            SchemaError: there are other files already, or with `join` another process made them for different data.
        """
        folder = self.make_folder()
        names = leaf_files(structure)
        files = {name: _LeafShape(dtype, tuple(shape)) for name, (dtype, shape) in zip(names, wanted, strict=True)}
        with self._locked(folder) if join else contextlib.nullcontext():
            if join and (folder / _PUBLISHED).exists():
                self.joined()
                if self._files != files:
                    raise SchemaError(f"another process wrote data with other keys, types or shapes to {folder}")
                return self._open()
            before = list(self._files)
            try:
                self._create(folder, {name: file for name, file in files.items() if name not in self._files})
                self._describe(folder, tree_documents(structure, wanted, lead))
            except BaseException:
                self.keep_only(before)
                raise
            if join:
                self._publish(folder, structure)
        self._files = {name: self._files[name] for name in names}
        return self._open()

    def _create(self, folder: Path, files: dict[str, _LeafShape]) -> None:
        taken = next((name for name in files if (folder / name).exists()), None)
        if taken is not None and not self._replace:
            raise SchemaError(
                f"{folder / taken} already exists; left unchanged",
                hint="use existsok=True to replace it, or choose another scratch_dir",
            )
        for name, file in files.items():
            path = folder / name
            self._files[name] = file
            fs.make_folder(path.parent)
            fs.remove(path)
            if file.size:
                descriptor = fs.create(path)
                try:
                    fs.truncate(descriptor, file.size, path)
                    self._inodes[name] = _inode(descriptor)
                finally:
                    os.close(descriptor)
                _take_blocks(path, 0, self._reserved * (file.size // file.shape[0]))  # as many rows as the other files

    def _describe(self, folder: Path, documents: dict[str, bytes]) -> None:
        for name, document in documents.items():
            fs.make_folder((folder / name).parent)
            fs.replace_file(folder / name, document, synced=False)  # rows are not synced either; it takes milliseconds
        self._documents |= documents.keys()

    def replace(self, structure: TreeSpec, number: int, shape: tuple[int, ...], rows: torch.Tensor) -> torch.Tensor:
        """Make a file of bytes for a leaf, or replace the one that it has; processes that have mapped that one keep it.

        Args:
            structure: how the data will be nested.
            number: the number of the leaf.
            shape: its new shape.
            rows: its first rows, which may be narrower.

        Returns:
            The tensor.
        """
        names, folder = leaf_files(structure), self.make_folder()
        path, file = folder / names[number], _LeafShape(torch.uint8, shape)
        made = path.with_name(f".{path.name}.new")
        fs.make_folder(path.parent)
        fs.remove(made)
        try:
            descriptor = fs.create(made)
            try:
                fs.truncate(descriptor, file.size, made)
            finally:
                os.close(descriptor)
            _take_blocks(made, 0, len(rows) * math.prod(shape[1:]))
            if len(rows):
                _mapped(made, file)[: len(rows), ..., : rows.shape[-1]] = rows
            fs.rename(made, path)
        except BaseException:
            fs.remove(made)
            raise
        self._files[names[number]], self._reserved = file, min(self._reserved, len(rows))
        return _mapped(path, file)

    def describe(self, structure: TreeSpec, lead: tuple[int, ...]) -> None:
        """Write the `meta.json` files of a new structure, and remove files that it does not have."""
        folder, names = self.make_folder(), leaf_files(structure)
        self.keep_only(names)
        self._files = {name: self._files[name] for name in names}
        documents = tree_documents(structure, [*self._files.values()], lead)
        for name in self._documents - documents.keys():
            fs.remove(folder / name)
        self._documents &= documents.keys()
        self._describe(folder, documents)

    def _publish(self, folder: Path, structure: TreeSpec) -> None:
        leaves = [[name, str(file.dtype), list(file.shape)] for name, file in self._files.items()]
        fs.make_folder(folder / HIDDEN)
        document = {"structure": spec_to_json(structure), "leaves": leaves}
        fs.replace_file(folder / _PUBLISHED, json.dumps(document).encode(), synced=False)

    def joined(self) -> tuple[TreeSpec, list[torch.Tensor]]:
        """Open the files that another process made in the folder."""
        path = self.make_folder() / _PUBLISHED
        document = decode(_Published, load_json(path), str(path))
        structure = spec_from_json(document.structure)
        names = leaf_files(structure)
        if [name for name, _, _ in document.leaves] != names:
            raise FormatError(f"{path} lists files that do not match its structure", hint="create a new storage")
        self._files = {name: _LeafShape(dtype_named(dtype), shape) for name, dtype, shape in document.leaves}
        return structure, self._open()

    def open(self) -> list[torch.Tensor]:
        """Map files again, in a process that has got this object from another one."""
        return self._open()

    def _open(self) -> list[torch.Tensor]:
        folder = self.make_folder()
        return [_mapped(folder / name, file) for name, file in self._files.items()]

    @contextlib.contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fs.lock(descriptor, fcntl.LOCK_EX, folder)
            yield
        finally:
            os.close(descriptor)

    # Space -----------------------------------------------------------------------------------------

    def reserve(self, rows: int, valid: int) -> int:
        """Allocate disk blocks for the first `rows` rows, of which `valid` are written, and for some more.

        Returns:
            The number of rows that have blocks.

        Raises:
            OutOfSpaceError: the disk is full.
        """
        if rows <= self._reserved:
            return self._reserved
        width = max((file.size // max(file.shape[0], 1) for file in self._files.values()), default=0)
        generous = min(
            max(2 * rows, rows + _STEP // max(width, 1)), max(file.shape[0] for file in self._files.values())
        )
        start = max(self._reserved, valid)
        try:
            self._allocate(start, generous)
            self._reserved = generous
        except OSError as error:
            if not fs.out_of_space(error) and not isinstance(error, OutOfSpaceError):
                raise
            self._allocate(start, rows)
            self._reserved = rows
        return self._reserved

    def _allocate(self, start: int, stop: int) -> None:
        for name, file in self._files.items():
            width = file.size // max(file.shape[0], 1)
            if width:
                _take_blocks(self.make_folder() / name, start * width, stop * width)

    def write(self, number: int, offset: int, data: memoryview) -> bool:
        """Write bytes to a file that this object has made and mapped; disk blocks must be allocated there.

        Returns:
            False if the file was removed or replaced meanwhile.
        """
        name = list(self._files)[number]
        path = self.make_folder() / name
        try:
            descriptor = fs.open_to_fill(path)
        except OSError:
            return False
        try:
            if same := _inode(descriptor) == self._inodes.get(name):
                fs.pwrite(descriptor, data, offset, path)
            return same
        finally:
            os.close(descriptor)

    def count_written(self, rows: int) -> None:
        """Take into account that this many rows are written, some of them perhaps by other processes."""
        self._reserved = max(self._reserved, rows)

    # Removing --------------------------------------------------------------------------------------

    def keep_only(self, names: Sequence[str]) -> None:
        """Remove all other files."""
        for name in [name for name in self._files if name not in names]:
            fs.remove(self.make_folder() / name)
            del self._files[name]
        if not self._files:
            self._remove_documents()

    def remove(self) -> None:
        """Remove the files, and folders that become empty; open tensors stay usable."""
        if self.folder is None or not self.folder.is_dir():
            return
        if self._temporary:
            fs.remove(self.folder)
            return
        for name in self._files:
            fs.remove(self.folder / name)
        self._remove_documents()

    def _remove_documents(self) -> None:
        folder = self.make_folder()
        for name in (*self._documents, _PUBLISHED):
            fs.remove(folder / name)
        self._documents.clear()
        for inner, _, _ in sorted(os.walk(folder), reverse=True):
            if not any(Path(inner).iterdir()):
                fs.remove(Path(inner))

    def remove_if_owner(self) -> None:
        """Remove the files if this process made them: a forked child runs the same exit functions."""
        if os.getpid() == self._owner:
            self.remove()

    def remove_at_signals(self) -> None:
        """Also remove the files if SIGTERM or SIGHUP ends the process, for which exit functions do not run.

        A handler of the program is left alone, and only the main thread can set one.
        """
        _REMOVED_AT_SIGNALS.add(self)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, _remove_and_end)

    # Other processes -------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._files:
            return _of_state, (self.__dict__ | {"_owner": 0, "folder": None if self._temporary else self.folder},)
        contents = [tensor[: self._reserved].numpy().tobytes() for tensor in map(_bytes, self.open())]
        return _of_contents, (self._files, contents, self._reserved)


_REMOVED_AT_SIGNALS: weakref.WeakSet[MemoryMaps] = weakref.WeakSet()


def _remove_and_end(number: int, frame: Any) -> None:
    """Remove the files, then end the process by the signal, as without a handler."""
    try:
        for maps in tuple(_REMOVED_AT_SIGNALS):
            with contextlib.suppress(OSError):
                maps.remove_if_owner()
    finally:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _of_state(state: dict[str, Any]) -> MemoryMaps:
    maps = MemoryMaps(None, remove=False)
    maps.__dict__.update(state, _owner=os.getpid())
    return maps


def _of_contents(files: dict[str, _LeafShape], contents: list[bytes], rows: int) -> MemoryMaps:
    """Write pickled contents to a temporary folder."""
    maps = MemoryMaps(None, remove=True)
    folder = maps.make_folder()
    maps._create(folder, files)
    maps.reserve(rows, 0)
    for tensor, data in zip(maps.open(), contents, strict=True):
        if data:
            _bytes(tensor)[:rows] = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(rows, -1)
    return maps


def _pass_on(maps: MemoryMaps) -> tuple[Any, ...]:
    """Pickle for a child process, which uses the same files but does not remove them."""
    return _of_state, (maps.__dict__ | {"removes": False, "_owner": 0},)


ForkingPickler.register(MemoryMaps, _pass_on)


def _inode(descriptor: int) -> tuple[int, int]:
    """Return numbers that identify an open file: no other file gets them as long as it is mapped."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as rows of bytes."""
    return tensor.reshape(len(tensor), -1).view(torch.uint8) if tensor.numel() else tensor.new_empty(len(tensor), 0)


def _mapped(path: Path, file: _LeafShape) -> torch.Tensor:
    if path.is_symlink():  # rows would be written to its target
        raise CorruptDataError(f"{path} is a symbolic link, expected a regular file")
    found = path.stat().st_size if path.is_file() else 0
    if found < file.size:  # reading beyond the end of a mapped file would kill the process
        raise CorruptDataError(f"{path} has {found:,} bytes, expected {file.size:,}: it was cut or removed")
    tensor = mapped_tensor(path, file.dtype, file.shape, shared=True)
    return MappedView.of(tensor, str(path)) if file.size else tensor


def mapped_tensor(
    path: str | os.PathLike[str], dtype: torch.dtype, shape: Sequence[int], *, shared: bool
) -> torch.Tensor:
    """Map the beginning of a file as a tensor. A tensor without elements needs no file.

    Args:
        path: the file, at least as long as the tensor.
        dtype: the element type.
        shape: the shape.
        shared: whether edits of the tensor reach the file; otherwise the map is private, and the file is opened
            read-only.
    """
    size = byte_count(dtype, shape)
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8).view(dtype).view(tuple(shape))


def _take_blocks(path: Path, start: int, stop: int) -> None:
    """Allocate disk blocks for a range of bytes, which must not contain data: they may be overwritten with zeros."""
    descriptor = fs.open_to_fill(path)
    try:
        with fs.announced("allocate", path):
            if hasattr(os, "posix_fallocate"):
                with contextlib.suppress(_Unsupported):
                    return _fallocate(descriptor, start, stop)
        for place in range(start, stop, len(_ZEROS)):
            fs.pwrite(descriptor, memoryview(_ZEROS)[: stop - place], place, path)
    finally:
        os.close(descriptor)


class _Unsupported(Exception):
    """The file system cannot allocate blocks ahead."""


def _fallocate(descriptor: int, start: int, stop: int) -> None:
    if stop <= start:
        return
    try:
        os.posix_fallocate(descriptor, start, stop - start)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}:
            raise _Unsupported from error
        raise


Schema: TypeAlias = Literal["fixed", "open"]

_ALIGNMENT = 64


@counterpart
class LazyTensorStorage(TensorStorage):
    """Keeps up to `max_size` elements in tensors that are created when the first data is written.

    The tensors begin as zeros, and only take memory as rows are written. Agents that differ in entries or shapes are
    written as a lazy stack of tensordicts, at the root or in an entry, along a dimension after those that count
    elements. Each of them has tensors of its own, and rows are read as such stacks.

    Text, and other values that JSON has, may differ between rows. Every row takes as many bytes as the longest text;
    longer text makes the column wider, unless other processes use it.

    Args:
        max_size: the capacity in elements. With `ndim` above 1 it is rounded up to whole rows.
        device: where the tensors are; `"auto"` follows the first data.
        ndim: how many leading dimensions of the data count elements.
        checkpointer: saves and loads the storage.
        consolidated: whether all leaves of a tensordict are views of one buffer.
        shared_init: whether several processes, each with this storage, may write first: the first one creates the
            tensors as memory maps in a temporary folder. Otherwise the storage can only be passed to other processes
            once something was written.
        cleanup_memmap: whether that folder is removed with the storage.
        schema: `"fixed"` refuses data whose keys differ from the first data's. `"open"` writes zeros for missing
            keys, and adds a column for new ones, which is zero in older rows; a buffer that several processes write to
            refuses new ones. (In TorchRL, missing keys keep the bytes of the row that is overwritten, and some storages
            drop new keys.)

    Raises:
        UsageError: (a ValueError) arguments contradict each other, or `consolidated` is used for data that is not a
            tensordict.
        SchemaError: (a RuntimeError) when used: the keys differ, or an empty storage is passed to another process.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> storage = LazyTensorStorage(100)
    >>> storage.set(range(2), TensorDict({"action": torch.arange(2), "task": ["walk", "run"]}, [2]))
    >>> storage[torch.tensor([1, 0])].get("task").tolist()
    ['run', 'walk']
    """

    def __init__(
        self,
        max_size: int,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        compilable: bool = False,
        consolidated: bool = False,
        shared_init: bool = False,
        cleanup_memmap: bool = True,
        schema: Schema = "fixed",
        checkpointer: Any = None,
    ) -> None:
        require_flags(consolidated=consolidated, shared_init=shared_init, cleanup_memmap=cleanup_memmap)
        if schema not in {"fixed", "open"}:
            raise UsageError(f"schema is {schema!r}, expected 'fixed' or 'open'")
        if schema == "open" and shared_init:
            raise UsageError("shared_init needs schema='fixed', as the processes could not agree on new columns")
        if consolidated and shared_init:
            raise UsageError(
                "consolidated (one buffer for all leaves) and shared_init (one file each) exclude each other"
            )
        Storage.__init__(self, max_size, checkpointer, compilable)
        self._begin(ndim)
        self.device: Any = device if device == "auto" else _numbered(available_device(device))
        self.schema = schema
        self._asked = max_size
        self._consolidated = consolidated
        self._shared_init = shared_init
        self._maps: MemoryMaps | None = None
        self._forks = forks()  # -1 in a spawned process
        if shared_init:
            self._begin_shared(MemoryMaps(None, remove=cleanup_memmap))

    def _begin_shared(self, maps: MemoryMaps) -> None:
        """Make the folder in which the first process that writes will create the files, and share the counts."""
        if self.device != torch.device("cpu"):
            warn_caller(f"shared_init keeps rows on the CPU; device={str(self.device)!r} is ignored")
            self.device = torch.device("cpu")
        self._maps = maps
        self._share_counts()
        maps.make_folder()
        self._own(maps)

    def _own(self, maps: MemoryMaps) -> None:
        """Remove the files when this storage is deleted, in this process only."""
        if maps.removes:
            weakref.finalize(self, maps.remove_if_owner)
            maps.remove_at_signals()

    @property
    def initialized(self) -> bool:
        """Whether the tensors exist; with `shared_init`, another process may have made them."""
        if self._columns is None and self._shared_init and self._filled.value:
            self._join()
        return self._columns is not None

    # Making tensors --------------------------------------------------------------------------------

    def _allocate(self, structure: TreeSpec, rows: Sequence[tuple[torch.dtype, torch.Size]]) -> None:
        lanes = {shape[: self.ndim - 1] for _, shape in rows}
        if len(lanes) != 1 or len(min(lanes)) != self.ndim - 1 or not math.prod(min(lanes)):
            shapes = ", ".join(str(list(shape)) for _, shape in rows) or "no tensor"
            raise SchemaError(
                f"expected rows whose tensors share their first {self.ndim - 1} dimensions, found {shapes}"
            )
        if self._consolidated and not isinstance(structure, TensorDictNode):
            raise UsageError(f"consolidated=True needs a tensordict, found a {structure}")
        lane = lanes.pop()
        capacity = -(-self._asked // math.prod(lane))
        if self.device == "auto":
            self.device = torch.device("cpu")
        structure = structure.placed(self.device)
        wanted = [(dtype, (capacity, *shape)) for dtype, shape in rows]
        self._take(structure, self._make(structure, wanted, (capacity, *lane)))
        self.max_size = capacity * math.prod(lane)

    def _take(self, structure: TreeSpec, leaves: Sequence[torch.Tensor]) -> None:
        super()._take(structure, leaves)
        self.columns.write_file = None if self._maps is None else self._maps.write

    def _make(
        self, structure: TreeSpec, wanted: Sequence[tuple[torch.dtype, tuple[int, ...]]], lead: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Make zero tensors of these types and shapes."""
        if self._maps is not None:
            leaves = self._maps.make(structure, wanted, lead, join=self._shared_init)
            self._share_counts()
            return leaves
        if self._consolidated:
            return _in_one_buffer(wanted, self.device)
        return [zeros(dtype, shape, self.device) for dtype, shape in wanted]

    def _set_text(self, path: Place, node: TreeSpec | None, *, keep: bool) -> None:
        super()._set_text(path, node, keep=keep)
        if self._maps is not None:
            self._maps.describe(self.structure, tuple(self.columns.lead))

    def _text_column(
        self, structure: TreeSpec, path: Place, shape: tuple[int, ...], rows: torch.Tensor
    ) -> torch.Tensor:
        if self._maps is None:
            return super()._text_column(structure, path, shape, rows)
        return self._maps.replace(structure, list(structure.paths()).index(path), shape, rows)

    def _join(self) -> None:
        """Use the tensors that another process made."""
        maps = self._maps
        if maps is None:
            raise SchemaError("the storage has no files to share")
        structure, leaves = maps.joined()
        self._take(structure, leaves)
        self.max_size = math.prod(self.columns.lead)

    def _go_back(self, structure: TreeSpec | None, columns: Columns | None) -> None:
        super()._go_back(structure, columns)
        if columns is None:
            self.max_size = self._asked
        if self._maps is not None and not self._shared_init:
            self._maps.keep_only(leaf_files(structure) if structure else ())

    def _make_room(self, rows: slice | torch.Tensor) -> None:
        if self._maps is None:
            return
        start, top = (rows.start, rows.stop) if isinstance(rows, slice) else (0, int(rows.max()) + 1)
        columns = self.columns
        if top > columns.prepared:
            columns.prepared = columns.make_pages(start, top, self._maps.reserve(top, self._filled.value))

    @property
    def _takes_entries(self) -> bool:
        return self._maps is None and super()._takes_entries

    # Tensors of checkpoints ------------------------------------------------------------------------

    @property
    def takes_over(self) -> bool:
        """Whether `take_over` is possible: the rows are in the memory of this process, and nobody refers to them."""
        here = self._maps is None and not self._consolidated and not self.shared and self.journal is None
        return here and self.device in ("auto", torch.device("cpu")) and not (self.initialized and self.log.lent)

    def rows_for(self, lanes: Sequence[int]) -> int:
        """Return how many rows of this many lanes fit; also before the first write."""
        return self.columns.lead[0] if self.initialized else -(-self._asked // math.prod(lanes))

    def take_over(self, structure: TreeSpec, leaves: Sequence[torch.Tensor], rows: int, last_row: int | None) -> None:
        """Use these tensors as the contents, without a copy; `rows` of their rows are valid.

        Raises:
            SchemaError: names, types or shapes differ from earlier writes; nothing is changed.
        """
        if self.initialized:
            own = self._with_text_of(structure)
            leaves = in_order(own, structure, leaves)
            self._take_text(own, leaves, tuple(self.columns.lead))
            structure = own
        else:
            self.device = torch.device("cpu")
            structure = structure.placed(self.device)
        self._take(structure, leaves)
        self.max_size = math.prod(self.columns.lead)
        self._filled.value = rows
        self.mark_replaced(rows % self.columns.lead[0], last_row)

    # Data with other keys --------------------------------------------------------------------------

    def _values(self, data: Any, lead: tuple[int, ...]) -> list[torch.Tensor]:
        try:
            return super()._values(data, lead)
        except SchemaError as error:
            if self.schema == "fixed" or isinstance(error, TextGrows):
                raise
        brought = tree_spec_of(data, len(lead))
        shared = dict(brought.constants())
        for path, _ in self.structure.constants():
            if path not in shared:  # these rows have None there, so the value is no longer the same in all rows
                raise TextGrows(path, dict(self.structure.in_columns().texts())[path])
        structure = self.structure.joined(brought.placed(self.device))
        brought = brought.with_text_of(structure)
        values = dict(zip(brought.paths(), brought.flatten(data), strict=True))
        self._grow(structure, values, len(lead))
        columns = self.columns
        found = [
            values[path] if path in values else torch.zeros((*lead, *leaf.shape[self.ndim :]), dtype=leaf.dtype)
            for path, leaf in zip(self.structure.paths(), columns.leaves, strict=True)
        ]
        columns.check(found, lead)
        return found

    def _grow(self, structure: TreeSpec, values: Mapping[Place, torch.Tensor], lead: int) -> None:
        """Make columns of zeros for the entries that only `structure` has.

        They get the types and row shapes of `values`, whose first `lead` dimensions count elements.
        """
        columns, known = self.columns, dict(zip(self.structure.paths(), self.columns.leaves, strict=True))
        paths = list(structure.paths())
        if len(paths) == len(known):
            return
        if self.journal is not None or (self.shared and self._maps is None):
            added = ", ".join(".".join(path) for path in paths if path not in known)
            raise SchemaError(
                f"the data has the new entries {added}, but other processes use the present columns",
                hint="write a row with all entries before the storage is shared",
            )
        wanted = [
            (known[path].dtype, tuple(known[path].shape))
            if path in known
            else (values[path].dtype, (*columns.lead, *values[path].shape[lead:]))
            for path in paths
        ]
        if self._maps is not None:
            leaves = self._make(structure, wanted, tuple(columns.lead))
        else:
            leaves = [
                known[path] if path in known else zeros(dtype, shape, self.device)
                for path, (dtype, shape) in zip(paths, wanted, strict=True)
            ]
        self._take(structure, leaves)

    # Processes -------------------------------------------------------------------------------------

    def share(self) -> None:
        """Let processes started from now on see the same rows and length; SchemaError before the first write."""
        if self._maps is None or not self._filled.shared:
            super().share()

    @property
    def alone(self) -> bool:
        # Files in a temporary folder are only shared with processes that this one has forked or spawned.
        return super().alone or (self._maps is not None and not self._shared_init and self._forks == forks())

    def cleanup(self) -> bool:
        """Remove the files of a memory-mapped storage, and return whether there were any. Its tensors stay usable."""
        there = self._maps is not None and self._maps.folder is not None and self._maps.folder.is_dir()
        if there and self._maps is not None:
            self._maps.remove()
        return there

    def __getstate__(self) -> dict[str, Any]:
        if self.initialized and self._maps is not None:  # this also opens files that another process has made
            self._maps.count_written(self.rows)
        if get_spawning_popen() is not None and not (self.initialized or self._shared_init):
            raise SchemaError(
                f"an empty {type(self).__name__} cannot be passed to another process: both would make their own memory",
                hint="write to it first, or use shared_init=True",
            )
        state = super().__getstate__()
        if get_spawning_popen() is not None:
            state["_forks"] = self._forks = -1
        if self._maps is not None:
            state.pop("_leaves", None)  # the files hold them
            state.pop("_dtypes", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._maps is None:
            return
        self._own(self._maps)
        if self._shared_init:
            self._maps.make_folder()
        if self._structure is not None:
            self._share_counts()
            self._take(self._structure, self._maps.open())


def available_device(device: torch.device | str | int) -> torch.device:
    """Return a device; UsageError (a ValueError) if it is CUDA and there is none."""
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device is {str(device)!r}, which PyTorch does not find on this machine")
    return found


def _numbered(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _in_one_buffer(wanted: Sequence[tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> list[torch.Tensor]:
    """Make zeros as views of one buffer, each aligned for its type."""
    places, size = [], 0
    for dtype, shape in wanted:
        places.append(size)
        size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    buffer = zeros(torch.uint8, (size,), device)
    return [
        buffer[place : place + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for place, (dtype, shape) in zip(places, wanted, strict=True)
    ]


@counterpart
class LazyMemmapStorage(LazyTensorStorage):
    """Keeps up to `max_size` elements in memory-mapped files that are created when the first data is written.

    The files have the layout of a memory-mapped tensordict; nests of other kinds have one file for each leaf, at its
    path. Disk blocks are allocated as rows are written: a full disk raises OutOfSpaceError, with nothing changed. From
    the first megabyte on, a thread makes memory pages for the next rows, so that small writes need not wait for them.
    Forked and spawned processes see the same rows and length.

    Args:
        max_size: the capacity in elements.
        scratch_dir: the folder of the files; default a temporary one.
        device: only the CPU.
        existsok: whether existing files in the folder may be replaced.
        auto_cleanup: whether the files are removed when the storage is deleted or the process that made it exits; by
            default only those in a temporary folder. They are also removed if Ctrl-C, SIGTERM or SIGHUP ends the
            process, unless the program handles the signal itself, or the storage was not made in the main thread.
            SIGKILL leaves the files behind. `cleanup()` removes them at once.
        **options: the other arguments of `LazyTensorStorage`.

    Raises:
        UsageError: (a ValueError) the device is not the CPU.
        SchemaError: (a RuntimeError) at the first write: there are files already, and `existsok` is not set.
    """

    def __init__(
        self,
        max_size: int,
        *,
        scratch_dir: str | os.PathLike[str] | None = None,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        existsok: bool = False,
        compilable: bool = False,
        shared_init: bool = False,
        auto_cleanup: bool | None = None,
        schema: Schema = "fixed",
        checkpointer: Any = None,
    ) -> None:
        require_flags(existsok=existsok, shared_init=shared_init, auto_cleanup=auto_cleanup or False)
        if device != "auto" and torch.device(device).type != "cpu":
            raise UsageError(f"device is {str(device)!r}, but memory maps are on the CPU")
        super().__init__(
            max_size, device="cpu", ndim=ndim, compilable=compilable, schema=schema, checkpointer=checkpointer
        )
        folder = None if scratch_dir is None else Path(os.path.abspath(scratch_dir))
        removes = folder is None if auto_cleanup is None else auto_cleanup
        self._maps = MemoryMaps(folder, remove=removes, replace=existsok)
        self._shared_init = shared_init
        if folder is not None:
            self.log.lend()  # other processes may open the files by name
        if shared_init:
            self._begin_shared(self._maps)
        else:
            self._own(self._maps)

    @property
    def scratch_dir(self) -> Path | None:
        """The folder of the files; None until a temporary one is made."""
        return self._maps.folder if self._maps else None
