"""Storages that make their tensors after the first data, in memory or in memory-mapped files."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from tensordict import LazyStackedTensorDict

from ..errors import SchemaError, UsageError
from .base import Storage
from .columns import Columns, zeros
from .memory_maps import MemoryMaps
from .pytree import Path as Place
from .pytree import TensorDictNode, TreeSpec, tree_spec_of
from .snapshots import forks
from .tensor import TensorStorage
from .tree_files import in_order, leaf_files

Schema: TypeAlias = Literal["fixed", "open"]

_ALIGNMENT = 64


class LazyTensorStorage(TensorStorage):
    """Keeps up to `max_size` elements in tensors made, all zeros, after the first data that is written.

    Memory is taken as rows are written. With `ndim` above 1 the tensors have as many rows as hold `max_size` elements;
    `max_size` is then what these rows hold. `device="auto"` goes where the first data is. `consolidated` puts all
    leaves of a tensordict into one buffer (else UsageError, a ValueError).

    `shared_init` lets several processes, each with this storage, write first: who comes first makes the tensors, as
    memory maps in a temporary folder, which disappears with the storage unless `cleanup_memmap` is off. Without it
    a storage can be passed to other processes once something was written (else SchemaError).

    With `schema="fixed"`, data whose keys differ from those of the first data is refused (SchemaError names the
    keys). `schema="open"` writes zeros for a key that is missing, and gives a new one a column that is zero in older
    rows. Here we depart from TorchRL, which leaves old bytes under missing keys, and adds or drops new ones depending
    on the storage.
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
        if schema not in {"fixed", "open"}:
            raise UsageError(f"schema is {schema!r}; it can be 'fixed' or 'open'")
        if schema == "open" and shared_init:
            raise UsageError("shared_init needs schema='fixed': processes could not agree on new columns")
        if consolidated and shared_init:
            raise UsageError("consolidated puts all leaves into one buffer, shared_init into one file each: choose one")
        Storage.__init__(self, max_size, checkpointer, compilable)
        self._begin(ndim)
        self.device: Any = device if device == "auto" else _numbered(available_device(device))
        self.schema = schema
        self._asked = max_size
        self._consolidated = consolidated
        self._shared_init = shared_init
        self._maps: MemoryMaps | None = None
        self._forks = forks()  # -1 once it was passed to a spawned process
        if shared_init:
            self._begin_shared(MemoryMaps(None, remove=cleanup_memmap))

    def _begin_shared(self, maps: MemoryMaps) -> None:
        """Agree with the processes to come on where the memory will be."""
        if self.device != torch.device("cpu"):
            warnings.warn(f"shared_init keeps rows on the CPU; device={str(self.device)!r} is ignored", stacklevel=4)
            self.device = torch.device("cpu")
        self._maps = maps
        self._share_counts()
        maps.make_folder()
        self._own(maps)

    def _own(self, maps: MemoryMaps) -> None:
        """Have the files removed when this storage is no more, in this process only."""
        if maps.removes:
            weakref.finalize(self, maps.remove_if_owner)

    @property
    def initialized(self) -> bool:
        """Whether the tensors are there; with `shared_init`, also if another process made them."""
        if self._columns is None and self._shared_init and self._filled.value:
            self._join()
        return self._columns is not None

    # Making tensors --------------------------------------------------------------------------------

    def _initialize(self, index: Any, data: Any) -> None:
        if isinstance(index, tuple):
            raise SchemaError("single elements cannot be written yet: the storage is empty", hint="write rows first")
        rows = not isinstance(index, int)
        if rows and isinstance(data, list | LazyStackedTensorDict):
            if not len(data):
                raise SchemaError("the first write has no rows, expected one at least, which shows what a row is")
            data, rows = data[0] if isinstance(data, list) else data.unbind(0)[0], False
        if isinstance(data, LazyStackedTensorDict):
            data = data.contiguous()
        structure = tree_spec_of(data, self.ndim if rows else self.ndim - 1)
        leaves = structure.flatten(data)
        if rows and not all(leaf.dim() for leaf in leaves):
            raise SchemaError("the rows are a tensor without dimensions, expected a first one that counts them")
        if self.device == "auto" and leaves:
            self.device = leaves[0].device
        self._allocate(structure, [(leaf.dtype, leaf.shape[1:] if rows else leaf.shape) for leaf in leaves])

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

    def _make(
        self, structure: TreeSpec, wanted: Sequence[tuple[torch.dtype, tuple[int, ...]]], lead: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Make tensors of these types and shapes, all zeros."""
        if self._maps is not None:
            leaves = self._maps.make(structure, wanted, lead, join=self._shared_init)
            self._share_counts()
            return leaves
        if self._consolidated:
            return _in_one_buffer(wanted, self.device)
        return [zeros(dtype, shape, self.device) for dtype, shape in wanted]

    def _join(self) -> None:
        """Take over the tensors that another process made."""
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
        if self._maps is not None:
            top = rows.stop if isinstance(rows, slice) else int(rows.max()) + 1
            self._maps.reserve(top, self._filled.value)

    @property
    def _takes_entries(self) -> bool:
        return self._maps is None and super()._takes_entries

    # Memory of others ------------------------------------------------------------------------------

    @property
    def takes_over(self) -> bool:
        """Whether `take_over` is possible: rows are in memory of this process, and nobody has references to them."""
        here = self._maps is None and not self._consolidated and not self.shared and self.journal is None
        return here and self.device in ("auto", torch.device("cpu")) and not (self.initialized and self.log.lent)

    def rows_for(self, lanes: Sequence[int]) -> int:
        """Return the room for rows of so many lanes, also before the first write."""
        return self.columns.lead[0] if self.initialized else -(-self._asked // math.prod(lanes))

    def take_over(self, structure: TreeSpec, leaves: Sequence[torch.Tensor], rows: int, last_row: int | None) -> None:
        """Make these tensors, of which `rows` rows are valid, the contents in place of the ones there are.

        SchemaError, and nothing changes, for other names, types or shapes than those of what was written before.
        """
        if self.initialized:
            self.structure.refuse_other_constants(structure)
            leaves = in_order(self.columns.names, structure, leaves)
            self.columns.check(leaves, tuple(self.columns.lead))
            structure = self.structure
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
        except SchemaError:
            if self.schema == "fixed":
                raise
        brought = tree_spec_of(data, len(lead))
        values = dict(zip(brought.paths(), brought.flatten(data), strict=True))
        self._grow(self.structure.joined(brought.placed(self.device)), values, len(lead))
        columns = self.columns
        found = [
            values[path] if path in values else torch.zeros((*lead, *leaf.shape[self.ndim :]), dtype=leaf.dtype)
            for path, leaf in zip(self.structure.paths(), columns.leaves, strict=True)
        ]
        columns.check(found, lead)
        return found

    def _grow(self, structure: TreeSpec, values: Mapping[Place, torch.Tensor], lead: int) -> None:
        """Make columns, all zeros, for the entries that only `structure` has; `lead` dimensions count elements."""
        columns, known = self.columns, dict(zip(self.structure.paths(), self.columns.leaves, strict=True))
        paths = list(structure.paths())
        if len(paths) == len(known):
            return
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
        # Files that have no name for others are shared with those that this process starts.
        return super().alone or (self._maps is not None and not self._shared_init and self._forks == forks())

    def cleanup(self) -> bool:
        """Remove the files of a memory-mapped storage; return whether there were any. Its tensors stay usable."""
        there = self._maps is not None and self._maps.folder is not None and self._maps.folder.is_dir()
        if there and self._maps is not None:
            self._maps.remove()
        return there

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None and not (self.initialized or self._shared_init):
            raise SchemaError(
                f"an empty {type(self).__name__} cannot be passed to another process: both would make their own memory",
                hint="write to it first, or use shared_init=True",
            )
        state = super().__getstate__()
        if get_spawning_popen() is not None:
            state["_forks"] = self._forks = -1
        if self._maps is not None:
            state.pop("_leaves", None)  # they are in the files
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
    """Return a device; UsageError (a ValueError) for CUDA where there is none."""
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device is {str(device)!r}, expected one that PyTorch finds here")
    return found


def _numbered(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _in_one_buffer(wanted: Sequence[tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> list[torch.Tensor]:
    """Make zeros as views of one buffer, each at a place that suits its type."""
    places, size = [], 0
    for dtype, shape in wanted:
        places.append(size)
        size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    buffer = zeros(torch.uint8, (size,), device)
    return [
        buffer[place : place + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for place, (dtype, shape) in zip(places, wanted, strict=True)
    ]


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
            raise UsageError(f"device is {str(device)!r}, expected 'cpu' for a memory map")
        super().__init__(
            max_size, device="cpu", ndim=ndim, compilable=compilable, schema=schema, checkpointer=checkpointer
        )
        folder = None if scratch_dir is None else Path(os.path.abspath(scratch_dir))
        removes = folder is None if auto_cleanup is None else auto_cleanup
        self._maps = MemoryMaps(folder, remove=removes, replace=existsok)
        self._shared_init = shared_init
        if folder is not None:
            self.log.lend()  # the files have names that others may open
        if shared_init:
            self._begin_shared(self._maps)
        else:
            self._own(self._maps)

    @property
    def scratch_dir(self) -> Path | None:
        """The folder of the files; None where a temporary one is still to be made."""
        return self._maps.folder if self._maps else None
