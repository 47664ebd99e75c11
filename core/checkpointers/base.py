"""The contract of a checkpointer, which saves and loads a storage."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import SchemaError, UsageError
from ..format.contracts import FinalMethodError, delegate, own_attributes, refuse_overrides
from ..format.syncing import Durable
from ..storages.base import Storage
from ..storages.cursors import last_row
from .folders import CheckpointStaging, RowsNote, holds_objects, open_rows
from .loading import replace_rows

_FINAL = {
    "register_save_hook": "write(rows, folder)",
    "register_load_hook": "read(folder)",
    "dump": "write(rows, folder)",
    "save": "write(rows, folder)",
    "load": "read(folder)",
}
"""Methods that are the contract's own, or that nothing calls, and what a checkpointer implements instead."""


class Captured(Protocol):
    """Rows as they were at one instant, which `write` saves while writers continue; a context manager around that.

    `write` may run in any thread.
    """

    def write(self) -> None:
        """Write them to the folder that `capture` was given."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *raised: object) -> None: ...


def captured(storage: Any, path: Path) -> Captured | None:
    """Return the rows of a storage as they are now, for the folder `path`; None where `dumps` has to write them."""
    capture = getattr(storage.checkpointer, "capture", None)  # TorchRL's checkpointers have none
    return None if capture is None else capture(storage, path)


class StorageCheckpointerBase(ABC):  # noqa: B024 - abstract at run time, see below `read`
    r"""Writes a storage to a folder and reads it back.

    A checkpointer of your own implements two methods:

    - `write(rows, folder)` writes the rows of a storage into an empty folder;
    - `read(folder)` returns rows like those that `write` was given: the same keys, dtypes, shapes and values.

    `dumps` and `loads`, which storages call, do the book-keeping: they call the hooks, put a complete folder in place
    at one instant, record and verify the digests of all files, record the length, the capacity and the row that was
    written last, and replace the contents of a storage only after all rows were read and have the dtypes and shapes
    that were saved.

    Checkpointers that were written for TorchRL override `dumps` and `loads`, and keep working; what they override is
    theirs to do. Other public methods cannot be overridden: FinalMethodError (a TypeError) names what to implement.

    What is written passes first through the save hooks in the order in which they were registered, and what was read
    through the load hooks. Hooks belong to the object: they are neither saved nor pickled with it. Names and hooks
    are those of TorchRL.

    >>> import tempfile
    >>> from rbtool import ListStorage
    >>> class Lines(StorageCheckpointerBase):
    ...     def write(self, rows, folder):
    ...         (folder / "rows.txt").write_text("\n".join(rows))
    ...
    ...     def read(self, folder):
    ...         return (folder / "rows.txt").read_text().split("\n")
    >>> saved, other = ListStorage(3), ListStorage(3)
    >>> saved.checkpointer = other.checkpointer = Lines()
    >>> saved.set(range(2), ["one", "two"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved.dumps(f"{folder}/lines")
    ...     other.loads(f"{folder}/lines")
    >>> other[:]
    ['one', 'two']
    """

    _save_hooks: Sequence[Callable[..., Any]] = ()
    _load_hooks: Sequence[Callable[..., Any]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = own_attributes(cls, StorageCheckpointerBase)
        refuse_overrides(cls, own, _FINAL)
        for override, replaced in (("dumps", "write"), ("loads", "read")):
            if override in own and replaced not in own:
                delegate(cls, replaced)
            elif replaced in own and getattr(cls, override) is not getattr(StorageCheckpointerBase, override):
                raise FinalMethodError(
                    f"{cls.__name__} implements {replaced}(), which its {override}() does not call",
                    hint="derive from StorageCheckpointerBase, whose dumps() and loads() call write() and read()",
                )

    def __init__(self) -> None:
        self._save_hooks, self._load_hooks = [], []

    # What a checkpointer implements -----------------------------------------------------------------

    def write(self, rows: Any, folder: Path) -> None:
        """Write `rows` into `folder`, which exists and is empty, and close all files.

        `rows` is `storage[:]`, never empty, after the save hooks: a tensordict `[length, ...]`, a tensor, a nest of
        tensors, or a list of objects. It may be memory of the storage, and must not be changed. Files and folders
        may have any names but `.rbtool`. Raise SchemaError for data that cannot be written.
        """

    def read(self, folder: Path) -> Any:
        """Return the rows that `write` wrote into `folder`; its files were compared with their digests."""

    if (
        not TYPE_CHECKING
    ):  # a class that overrides `dumps` gets its `write` at run time, which a type checker cannot see
        write, read = abstractmethod(write), abstractmethod(read)

    # What storages call -----------------------------------------------------------------------------

    def dumps(self, storage: Storage, path: str | os.PathLike[str], *, durable: Durable = "full") -> None:
        """Write the storage to the folder `path`. An older checkpoint there is whole until the new one is.

        `durable` states what is waited for in case the machine itself stops: the bytes, folders and name ("full"),
        the bytes of the files ("data"), or nothing ("none").
        UsageError where something is at `path` that is no checkpoint of a storage.
        """
        rows = None
        if len(storage):
            rows = self._through_save_hooks(storage, storage[:], path)
        elif self._save_hooks:
            raise SchemaError("save hooks need data; nothing was ever written to the storage")
        note = RowsNote.of(type(self).__name__, storage, rows)
        with CheckpointStaging(path, durable) as staging:
            if rows is not None:
                self.write(rows, staging.path)
            note.save(staging.path)
            staging.publish_noted()

    def capture(self, storage: Storage, path: Path) -> Captured | None:
        """Return the rows as they are now, for the folder `path`; None where only `dumps` can write them, at once."""
        return None

    def loads(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Put what the folder `path` holds into the storage; nothing changes if that fails.

        DatasetNotFoundError (a FileNotFoundError) where there is nothing, FormatError for another checkpointer's,
        CorruptDataError for files that were changed and for rows of other dtypes or shapes than were saved (both
        ValueErrors), SchemaError (a RuntimeError) for data that the storage cannot hold.
        """
        folder, note = open_rows(path, type(self).__name__)
        if not note.length:
            storage.empty()
            return
        if note.objects != holds_objects(storage):
            kinds = ("a list of objects", "rows of tensors")
            saved, here = kinds if note.objects else reversed(kinds)
            raise SchemaError(f"{folder} holds {saved}; a {type(storage).__name__} holds {here}")
        rows = self.read(folder)
        note.require_same(rows, folder, type(self).__name__)
        if self._load_hooks:
            rows = self._through_load_hooks(rows, storage[:] if len(storage) else None)
        replace_rows(storage, rows, capacity=note.capacity, last_row=note.last_row)

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Have `hook(data, path=...)` return what is written instead of `data`.

        A hook with an attribute `is_full` or `shift` gets it set before: whether the storage is full, and which row
        the next write would take: the row after the last cursor, the capacity itself after the last row. One with a
        true `writes_in_place` gets no path.
        """
        _require_callable(hook)
        self._save_hooks = [*self._save_hooks, hook]

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Have `hook(data, out=...)` return what goes into the storage instead of `data`.

        `out` is what the storage holds now, or None if it has no tensors yet or the hook has a true `writes_in_place`.
        """
        _require_callable(hook)
        self._load_hooks = [*self._load_hooks, hook]

    def _through_save_hooks(self, storage: Storage, data: Any, path: str | os.PathLike[str]) -> Any:
        for hook in self._save_hooks:
            if hasattr(hook, "is_full"):
                hook.is_full = len(storage) == storage.max_size
            if hasattr(hook, "shift"):
                hook.shift = _shift(storage)
            data = hook(data, path=None if _writes_in_place(hook) else path)
        return data

    def _through_load_hooks(self, data: Any, out: Any) -> Any:
        for hook in self._load_hooks:
            data = hook(data, out=None if _writes_in_place(hook) else out)
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in {"_save_hooks", "_load_hooks"}}


def _writes_in_place(hook: Any) -> bool:
    """Whether a hook writes into the place it is given: then a failure behind it would leave half of it there."""
    return bool(getattr(hook, "writes_in_place", False))


def _require_callable(hook: Any) -> None:
    if not callable(hook):
        raise UsageError(f"a hook is called; a {type(hook).__name__} cannot be")


def _shift(storage: Storage) -> int:
    row = last_row(storage.last_cursor)
    if row is None:
        warnings.warn("the storage does not know its last cursor: the first row is taken for the oldest", stacklevel=5)
        return 0
    return row + 1
