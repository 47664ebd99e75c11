"""A storage whose tensors are memory maps of files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError
from .lazy_tensor import LazyTensorStorage, Schema
from .memory_maps import MemoryMaps

__all__ = ["LazyMemmapStorage"]


class LazyMemmapStorage(LazyTensorStorage):
    """Keeps up to `max_size` elements in memory-mapped files, made after the first data that is written.

    The files lie in `scratch_dir`, laid out as tensordict lays a memory-mapped tensordict (nests of other kinds: one
    file a leaf, at its path), or in a temporary folder. Files in the way raise SchemaError (a RuntimeError) unless
    `existsok`, which replaces them. Disk blocks are taken as rows are written; a full disk raises OutOfSpaceError
    and nothing changes. Devices other than the CPU raise UsageError (a ValueError). Forked and spawned processes see
    the same rows and the same length.

    `auto_cleanup` removes the files with the storage or at the exit of the process that made it, and in no other; it
    is on for a temporary folder and off for `scratch_dir`. No signal handler is installed for it: a process ended by
    a signal it does not handle leaves the files behind. `cleanup()` removes them at once. Other arguments are those
    of `LazyTensorStorage`.
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
        if device != "auto" and torch.device(device).type != "cpu":
            raise UsageError(f"memory maps are on the CPU, device={str(device)!r} was asked for")
        super().__init__(
            max_size, device="cpu", ndim=ndim, compilable=compilable, schema=schema, checkpointer=checkpointer
        )
        folder = None if scratch_dir is None else Path(os.path.abspath(scratch_dir))
        removes = folder is None if auto_cleanup is None else auto_cleanup
        self._maps = MemoryMaps(folder, remove=removes, replace=existsok)
        self._shared_init = shared_init
        if shared_init:
            self._begin_shared(self._maps)
        else:
            self._own(self._maps)

    @property
    def scratch_dir(self) -> Path | None:
        """The folder of the files; None where a temporary one is still to be made."""
        return self._maps.folder if self._maps else None
