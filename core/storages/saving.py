"""Which checkpointer saves and loads a storage."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ..errors import UsageError

__all__ = ["Saving", "register_checkpointer"]

_CHECKPOINTERS: dict[type[Any], Callable[[], Any]] = {}


def register_checkpointer(storage_class: type[Any], factory: Callable[[], Any]) -> None:
    """Say what makes the checkpointer of a storage, of this class or derived from it, that was given none.

    Checkpointers know storages and not the other way round: they register when `core.checkpointers` is imported.
    """
    _CHECKPOINTERS[storage_class] = factory


class Saving:
    """Saves and loads a storage with its checkpointer."""

    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    @property
    def checkpointer(self) -> Any:
        """What saves and loads this storage. Setting None goes back to the one that belongs to its class."""
        if self._checkpointer is None:
            self._checkpointer = _checkpointer_for(type(self))
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint to the folder `path`, with the storage's checkpointer."""
        self.checkpointer.dumps(self, path)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Take over what the checkpoint in the folder `path` holds."""
        self.checkpointer.loads(self, path)

    dump = save = dumps
    load = loads

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Have the checkpointer pass what it is about to write through `hook(data, path=...)`."""
        self.checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Have the checkpointer pass what it has read through `hook(data, out=...)`."""
        self.checkpointer.register_load_hook(hook)


def _checkpointer_for(storage_class: type[Any]) -> Any:
    for ancestor in storage_class.__mro__:
        if ancestor in _CHECKPOINTERS:
            return _CHECKPOINTERS[ancestor]()
    raise UsageError(
        f"no checkpointer is known for a {storage_class.__name__}",
        hint="import rbtool.core.checkpointers first, or give the storage a checkpointer",
    )
