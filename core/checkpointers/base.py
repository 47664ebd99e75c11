"""The contract of what saves and loads a storage."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..errors import UsageError
from ..storages import Storage
from ..storages.cursors import last_row

__all__ = ["StorageCheckpointerBase"]


class StorageCheckpointerBase(ABC):
    """Writes a storage to a folder and reads it back.

    What is written passes first through the save hooks in the order in which they were registered, and what was read
    through the load hooks. Hooks belong to the object: they are neither saved nor pickled with it. Names and hooks
    are those of TorchRL.
    """

    def __init__(self) -> None:
        self._save_hooks: list[Callable[..., Any]] = []
        self._load_hooks: list[Callable[..., Any]] = []

    @abstractmethod
    def dumps(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Write the storage to the folder `path`. An older checkpoint there is whole until the new one is."""

    @abstractmethod
    def loads(self, storage: Storage, path: str | os.PathLike[str]) -> None:
        """Put what the folder `path` holds into the storage; nothing changes if that fails."""

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Have `hook(data, path=...)` return what is written instead of `data`.

        A hook with an attribute `is_full` or `shift` is told before whether the storage is full, and which row the
        next write would take: the row after the last cursor, the capacity itself after the last row. One that says
        `writes_in_place` gets no path.
        """
        _require_callable(hook)
        self._save_hooks.append(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Have `hook(data, out=...)` return what goes into the storage instead of `data`.

        `out` is what the storage holds now, or None if it has no tensors yet or the hook says `writes_in_place`.
        """
        _require_callable(hook)
        self._load_hooks.append(hook)

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
        return self.__dict__ | {"_save_hooks": [], "_load_hooks": []}


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
