"""Files that several processes write through memory maps without running into a full disk.

A write through a map into a hole of a file kills the process (SIGBUS) when the disk is full. So the blocks of rows are
taken before the rows are written, twice as many as needed each time: a full disk is then an `OutOfSpaceError`, and
nothing has changed. Taking all blocks at the start would need no more time (0.8 ms per GB on ext4), but a buffer that
is never filled would occupy its whole capacity, and on a file system in memory fill that (0.24 s per GB).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CorruptDataError, FormatError, OutOfSpaceError, SchemaError
from ..format import fs
from ..format.documents import Count, decode, load_json
from ..format.manifest import HIDDEN
from .codec import byte_count, dtype_named
from .pytree import TreeSpec
from .tree_files import leaf_files, spec_from_json, spec_to_json, tree_documents

_PUBLISHED = f"{HIDDEN}/maps.json"
_STEP = 1 << 20
_ZEROS = bytes(1 << 20)


class _LeafShape(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return byte_count(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class _Published:
    """The document with which a process describes the files that it made to others that use them."""

    structure: Mapping[str, Any]
    leaves: tuple[tuple[str, str, tuple[Count, ...]], ...]


class MemoryMaps:
    """The files behind a storage, in `folder`; None is a temporary one. `remove` has them removed with the storage.

    `replace` allows files of the same names to be replaced; processes that mapped those keep the old ones. A pickle
    holds the contents, and becomes a temporary folder of its own; a child process gets the same files.
    """

    def __init__(self, folder: Path | None, *, remove: bool, replace: bool = False) -> None:
        self.folder = folder
        self.removes = remove
        self._replace = replace
        self._temporary = folder is None
        self._files: dict[str, _LeafShape] = {}
        self._documents: set[str] = set()
        self._reserved = 0
        self._owner = os.getpid()

    def make_folder(self) -> Path:
        """Create the folder if it is not there yet."""
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
        """Create the files that are not there yet and map them all; tensors come in the order of the leaves.

        With `join`, files that another process made for the same data are taken; SchemaError if it is other data.
        SchemaError for files in the way.
        """
        folder = self.make_folder()
        names = leaf_files(structure)
        files = {name: _LeafShape(dtype, tuple(shape)) for name, (dtype, shape) in zip(names, wanted, strict=True)}
        with self._locked(folder) if join else contextlib.nullcontext():
            if join and (folder / _PUBLISHED).exists():
                self.joined()
                if self._files != files:
                    raise SchemaError(f"another process wrote data of other keys, types or shapes to {folder}")
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
                finally:
                    os.close(descriptor)
        self._reserved = 0

    def _describe(self, folder: Path, documents: dict[str, bytes]) -> None:
        for name, document in documents.items():
            fs.make_folder((folder / name).parent)
            fs.replace_file(folder / name, document)
        self._documents |= documents.keys()

    def _publish(self, folder: Path, structure: TreeSpec) -> None:
        leaves = [[name, str(file.dtype), list(file.shape)] for name, file in self._files.items()]
        fs.make_folder(folder / HIDDEN)
        document = {"structure": spec_to_json(structure), "leaves": leaves}
        fs.replace_file(folder / _PUBLISHED, json.dumps(document).encode())

    def joined(self) -> tuple[TreeSpec, list[torch.Tensor]]:
        """Open what another process made in the folder."""
        path = self.make_folder() / _PUBLISHED
        document = decode(_Published, load_json(path), str(path))
        structure = spec_from_json(document.structure)
        names = leaf_files(structure)
        if [name for name, _, _ in document.leaves] != names:
            raise FormatError(f"{path} lists other files than its structure has", hint="make a new storage")
        self._files = {name: _LeafShape(dtype_named(dtype), shape) for name, dtype, shape in document.leaves}
        return structure, self._open()

    def open(self) -> list[torch.Tensor]:
        """Map the files, which another process made, again."""
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

    def reserve(self, rows: int, valid: int) -> None:
        """Take the disk blocks of the first `rows` rows, of which `valid` are written; OutOfSpaceError without room."""
        if rows <= self._reserved:
            return
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

    def _allocate(self, start: int, stop: int) -> None:
        for name, file in self._files.items():
            width = file.size // max(file.shape[0], 1)
            if width:
                _take_blocks(self.make_folder() / name, start * width, stop * width)

    # Removing --------------------------------------------------------------------------------------

    def keep_only(self, names: Sequence[str]) -> None:
        """Remove the other files."""
        for name in [name for name in self._files if name not in names]:
            fs.remove(self.make_folder() / name)
            del self._files[name]
        if not self._files:
            self._remove_documents()

    def remove(self) -> None:
        """Remove the files, and the folders that are empty without them; tensors that are open stay usable."""
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
        """Remove the files if this is the process that made them: a forked child runs the same exit functions."""
        if os.getpid() == self._owner:
            self.remove()

    # Other processes -------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._files:
            return _of_state, (self.__dict__ | {"_owner": 0, "folder": None if self._temporary else self.folder},)
        contents = [tensor[: self._reserved].numpy().tobytes() for tensor in map(_bytes, self.open())]
        return _of_contents, (self._files, contents, self._reserved)


def _of_state(state: dict[str, Any]) -> MemoryMaps:
    maps = MemoryMaps(None, remove=False)
    maps.__dict__.update(state, _owner=os.getpid())
    return maps


def _of_contents(files: dict[str, _LeafShape], contents: list[bytes], rows: int) -> MemoryMaps:
    """Write what was pickled to a temporary folder."""
    maps = MemoryMaps(None, remove=True)
    folder = maps.make_folder()
    maps._create(folder, files)
    maps.reserve(rows, 0)
    for tensor, data in zip(maps.open(), contents, strict=True):
        if data:
            _bytes(tensor)[:rows] = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(rows, -1)
    return maps


def _pass_on(maps: MemoryMaps) -> tuple[Any, ...]:
    """What a child process gets: the same files, which are not its own to remove."""
    return _of_state, (maps.__dict__ | {"removes": False, "_owner": 0},)


ForkingPickler.register(MemoryMaps, _pass_on)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as rows of bytes."""
    return tensor.reshape(len(tensor), -1).view(torch.uint8) if tensor.numel() else tensor.new_empty(len(tensor), 0)


def _mapped(path: Path, file: _LeafShape) -> torch.Tensor:
    if path.is_symlink():  # rows would be written to the file that it leads to
        raise CorruptDataError(f"{path} is a symbolic link, expected a file of its own")
    found = path.stat().st_size if path.is_file() else 0
    if found < file.size:  # mapped beyond its end, a file kills the process that reads there
        raise CorruptDataError(f"{path} has {found:,} bytes, expected {file.size:,}: it was cut or removed")
    return mapped_tensor(path, file.dtype, file.shape, shared=True)


def mapped_tensor(
    path: str | os.PathLike[str], dtype: torch.dtype, shape: Sequence[int], *, shared: bool
) -> torch.Tensor:
    """Map the first bytes of a file, which is at least so long, as a tensor; without elements, no file is needed.

    With `shared`, edits of the tensor reach the file; else the map is private and the file is opened for reading only.
    """
    size = byte_count(dtype, shape)
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8).view(dtype).view(tuple(shape))


def _take_blocks(path: Path, start: int, stop: int) -> None:
    """Make room on the disk for bytes of a file that nobody uses yet."""
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
    """The file system takes no blocks ahead."""


def _fallocate(descriptor: int, start: int, stop: int) -> None:
    if stop <= start:
        return
    try:
        os.posix_fallocate(descriptor, start, stop - start)
    except OSError as error:
        if error.errno in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}:
            raise _Unsupported from error
        raise
