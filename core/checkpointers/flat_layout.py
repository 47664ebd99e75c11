"""The flat and the ragged layout of hooks: which leaf goes where, and tensors that hold them in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase, is_tensor_collection

from ..encodings.rows import leaf_parts
from ..errors import CorruptDataError, SchemaError
from ..format.contracts import Array
from ..storages.codec import dtype_named
from ..storages.tensor import TensorStorage
from ..ted.schema import NEXT, Field, Key, key_name
from ..torchrl.layout import STORAGE_SHAPE, TorchrlHeader, TorchrlKeys, TorchrlSink
from ..torchrl.writer import state_parts, step_ends, write_leaves
from .storage_rows import StorageRows

ROWS = "ragged_rows"
SHAPES = "ragged_shapes"


def ragged_tensor(shapes: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a ragged tensor for rows of these shapes, int64 `[n, dimensions]`, and a view `[rows, ...]` of its memory.

    All rows have one shape, that is: `shapes` differ in the first column only.
    """
    rows, tail = int(shapes[:, 0].sum()), shapes[0, 1:].tolist()
    ragged: torch.Tensor = MemoryMappedTensor.empty(shapes, dtype=dtype)
    strides = torch.empty((rows, *tail), device="meta").stride()
    flat = torch.empty(0, dtype=dtype).set_(ragged.untyped_storage(), 0, (rows, *tail), strides)
    return ragged, flat


def dense_rows(ragged: torch.Tensor) -> torch.Tensor:
    """Return the rows of a ragged tensor `[rows, ...]`, one element behind the other."""
    return torch.cat([part.as_subclass(torch.Tensor) for part in ragged.unbind(0)])


def without_ragged(data: Any) -> Any:
    """Replace each ragged tensor of a tensordict by a pair of dense ones."""
    if not isinstance(data, TensorDictBase):
        return data
    found = TensorDict({}, [])
    ragged = False
    for key, value in data.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            shapes = torch.tensor([list(part.shape) for part in value.unbind(0)])
            found.set(key, TensorDict({ROWS: dense_rows(value), SHAPES: shapes}, []))
            ragged = True
        elif is_tensor_collection(value) and isinstance(value, TensorDictBase):
            inner = without_ragged(value)
            ragged |= inner is not value
            found.set(key, inner)
        else:
            found.set(key, value)
    return found if ragged else data


def with_ragged(data: Any) -> Any:
    """Undo `without_ragged`; CorruptDataError for shapes that do not fit the rows."""
    if not isinstance(data, TensorDictBase):
        return data
    found, count = {}, None
    for key, value in data.items():
        if isinstance(value, TensorDictBase):
            if set(value.keys()) == {ROWS, SHAPES}:
                value = _ragged(value[ROWS], value[SHAPES])
                count = value.size(0)
            else:
                value = with_ragged(value)
        found[key] = value
    if count is None and all(found[key] is data.get(key) for key in found):
        return data
    return TensorDict(found, data.batch_size if count is None else [count])


def _ragged(rows: torch.Tensor, shapes: torch.Tensor) -> torch.Tensor:
    whole = shapes.dim() == 2 and len(shapes) and shapes.shape[1] == rows.dim() and int(shapes.min()) >= 0
    if not whole or int(shapes[:, 0].sum()) != len(rows) or bool((shapes[:, 1:] != shapes[0, 1:]).any()):
        raise CorruptDataError(f"a table of shapes {list(shapes.shape)} does not fit rows {list(rows.shape)}")
    ragged, flat = ragged_tensor(shapes, rows.dtype)
    flat.copy_(rows)
    return ragged


class MemorySink(TorchrlSink):
    """Makes a tensordict `result` of the leaves: flat, or with the trajectories as ragged tensors."""

    def __init__(self, *, nested: bool) -> None:
        self.result: TensorDict | None = None
        self._nested = nested
        self._leaves: dict[Key, torch.Tensor] = {}
        self._trajectories = 0

    def begin(self, leaf: Field, counts: Array) -> None:
        dtype, rows = dtype_named(f"torch.{leaf.dtype}"), int(counts.sum())
        self._trajectories = len(counts)
        if self._nested and leaf.row_bytes:
            shapes = torch.tensor([[count, *leaf.shape] for count in counts.tolist()])
            self._leaves[leaf.key], self._rows = ragged_tensor(shapes, dtype)
        else:
            self._leaves[leaf.key] = self._rows = torch.empty((rows, *leaf.shape), dtype=dtype)
        self._row = 0

    def append(self, rows: Array) -> None:
        tensor = torch.from_numpy(rows if rows.flags.writeable else rows.copy())
        last = self._row + len(rows)
        same = tensor.dtype is self._rows.dtype
        self._rows[self._row : last].copy_(tensor if same else tensor.view(self._rows.dtype))
        self._row = last

    def skip(self, rows: int) -> None:
        self._rows[self._row : self._row + rows].zero_()
        self._row += rows

    def end(self) -> None:
        """Nothing is gathered."""

    def finish(self, header: TorchrlHeader, keys: TorchrlKeys) -> None:
        batch = [self._trajectories] if self._nested else []
        entries: dict[str, Any] = {
            keys.is_full: header.full, keys.shift: header.shift, STORAGE_SHAPE: list(header.shape)
        }  # fmt: skip
        result = TensorDict({}, batch)
        for name, value in entries.items():
            result.set_non_tensor(name, value)
        for key, leaf in self._leaves.items():
            result.set(key, leaf)
        self.result = result

    def close(self) -> None:
        """Nothing is open."""


AT_ROOT = "at_root"


@dataclass(frozen=True, slots=True)
class FlatPlan:
    """The rows of a tensordict, turned so that the oldest comes first, and the leaf that stores each of them.

    To TorchRL's layout this adds two nodes where they are needed: `next` for keys that are below `next` only, or whose
    rows do not follow; `at_root` for done flags and rewards of the root. `states` have one row more behind every end;
    both mappings are by the TED key of the rows.
    """

    source: StorageRows
    header: TorchrlHeader
    ends: Array
    states: Mapping[Key, Field]
    steps: Mapping[Key, Field]

    @classmethod
    def of(cls, data: TensorDictBase, keys: TorchrlKeys, is_full: bool, shift: int) -> FlatPlan:
        """Check the rows; SchemaError for data without rows of tensors, and for names that the layout reserves."""
        header = _header(data, is_full, shift)
        storage = TensorStorage(data, device="auto", ndim=data.ndim)
        constant = next(storage.structure.constants(), None)
        if constant is not None:
            raise SchemaError(f"{key_name(constant[0])} is no tensor; rows of tensors can be laid out flat")
        storage.last_cursor = (shift - 1) % len(data) if is_full else None
        source = StorageRows(storage, [(NEXT, *keys.done)])
        taken = next((field for field in source.fields if field.key[0] in keys.names | {AT_ROOT}), None)
        if taken is not None:
            raise SchemaError(f"there is an entry {taken.name!r}, a name that the flat layout needs itself")
        ends = step_ends(source, (NEXT, *keys.done), header)
        return cls(source, header, ends, *_leaves(source, header, ends, keys))

    def write(self, sink: TorchrlSink, keys: TorchrlKeys) -> None:
        """Write all leaves."""
        write_leaves(self.source, sink, self.header, self.ends, self.states, self.steps, every=True)
        sink.finish(self.header, keys)


def _leaves(
    source: StorageRows, header: TorchrlHeader, ends: Array, keys: TorchrlKeys
) -> tuple[dict[Key, Field], dict[Key, Field]]:
    """Choose the leaves that have one row more behind every end, and those of one row a step."""
    known = {field.key: field for field in source.fields}
    results = {*keys.dones, *keys.rewards}
    states: dict[Key, Field] = {}
    places: dict[Key, Key] = {}
    for key, field in known.items():
        after = known.get((NEXT, *key))
        if key[0] == NEXT:
            places[key] = key[1:] if key[1:] in results else key
        elif key not in results:
            places[key] = key
            alike = after is not None and (field.dtype, field.shape) == (after.dtype, after.shape)
            if alike and _follows(source, header, ends, field):
                states[key] = field
        elif key not in keys.dones or after is None or not _is_unset(source, field):
            places[key] = (AT_ROOT, *key)
    for key in states:
        del places[key], places[NEXT, *key]
    steps = {key: Field(place, known[key].dtype, known[key].shape, known[key].role) for key, place in places.items()}
    return states, steps


def _follows(source: StorageRows, header: TorchrlHeader, ends: Array, state: Field) -> bool:
    """Whether the next rows of a state, as far as rows were written, are the rows that follow."""
    return not any(
        part.broken is not None and part.broken <= header.forced
        for lane in range(header.lanes)
        for part in state_parts(source, state.key, state, header, ends, lane)
    )


def _is_unset(source: StorageRows, field: Field) -> bool:
    return not any(source.read(field.key, *part).any() for part in leaf_parts(source.manifest.steps, field.row_bytes))


def _header(data: Any, is_full: bool, shift: int) -> TorchrlHeader:
    if not isinstance(data, TensorDictBase) or not data.ndim or not data.numel():
        what = f"batch size {list(data.batch_size)}" if isinstance(data, TensorDictBase) else type(data).__name__
        raise SchemaError(f"expected a tensordict of rows [time, ...], found {what}")
    if abs(shift) > len(data) or (shift < 1 and not is_full and shift):
        raise SchemaError(f"shift is {shift}; the {len(data):,} rows are counted from 1")
    return TorchrlHeader(tuple(data.batch_size), is_full, shift or len(data), data.numel())
