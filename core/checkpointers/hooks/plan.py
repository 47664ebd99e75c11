"""Which leaf of a tensordict of TED rows goes where in the flat layout, so that all of it comes back.

To TorchRL's layout this adds two nodes, which are there only where they are needed: below `next` what is below `next`
only, or does not follow; below `at_root` done flags and rewards that are at the root.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from ...encodings import leaf_parts, with_ends
from ...errors import SchemaError
from ...format import Array
from ...storages import TensorStorage
from ...ted import NEXT, Field, Key, field_named, key_name
from ...torchrl import (
    Counts,
    TorchrlHeader,
    TorchrlKeys,
    TorchrlSink,
    state_parts,
    step_ends,
)
from ..storage_rows import StorageRows

__all__ = ["AT_ROOT", "FlatPlan"]

AT_ROOT = "at_root"


@dataclass(frozen=True, slots=True)
class FlatPlan:
    """The rows of a tensordict, turned so that the oldest comes first, and the place of each leaf.

    `states` have one row more behind every end; `steps` map the places of the others to the keys they come from.
    """

    source: StorageRows
    header: TorchrlHeader
    ends: Array
    states: list[Key]
    steps: Mapping[Key, Key]

    @classmethod
    def of(cls, data: TensorDictBase, keys: TorchrlKeys, is_full: bool, shift: int) -> FlatPlan:
        """Look the rows over; SchemaError for what are no rows, and for names that the layout needs itself."""
        header = _header(data, is_full, shift)
        storage = TensorStorage(data, device="auto", ndim=data.ndim)
        constant = next(storage.structure.constants(), None)
        if constant is not None:
            raise SchemaError(f"{key_name(constant[0])} is no tensor; rows of tensors can be laid out flat")
        storage.last_cursor = (shift - 1) % len(data) if is_full else None
        source = StorageRows(storage, [(NEXT, *keys.done)])
        known = {field.key: field for field in source.fields}
        taken = next((key for key in known if key[0] in keys.names | {AT_ROOT}), None)
        if taken is not None:
            raise SchemaError(f"there is an entry {key_name(taken)!r}, a name that the flat layout needs itself")
        ends = step_ends(source, (NEXT, *keys.done), header)
        plan = cls(source, header, ends, [], {})
        return cls(source, header, ends, *plan._places(known, keys))

    def write(self, sink: TorchrlSink, keys: TorchrlKeys) -> None:
        """Write all leaves."""
        counts = Counts(self.header, self.ends, every=True)
        for key in self.states:
            leaf = self._leaf(key, key)
            sink.begin(leaf, counts.states)
            for lane in range(self.header.lanes):
                for part in state_parts(self.source, key, leaf, self.header, self.ends, lane):
                    sink.append(with_ends(part.root, part.after, part.ends))
            sink.end()
        for place, key in self.steps.items():
            leaf = self._leaf(key, place)
            sink.begin(leaf, counts.steps)
            for start, stop in leaf_parts(self.header.steps, leaf.row_bytes):
                sink.append(self.source.read(key, start, stop))
            sink.end()
        sink.finish(self.header, keys)

    def _places(self, known: Mapping[Key, Field], keys: TorchrlKeys) -> tuple[list[Key], dict[Key, Key]]:
        results = {*keys.dones, *keys.rewards}
        states, steps = [], {}
        for key, field in known.items():
            inner = key[1:]
            if key[0] == NEXT:
                steps[inner if inner in results else key] = key
            elif key in results:
                made_up = key in keys.dones and (NEXT, *key) in known
                if not (made_up and self._is_unset(field)):
                    steps[AT_ROOT, *key] = key
            else:
                steps[key] = key
        for key in [key for key in steps if key[0] not in {NEXT, AT_ROOT} and (NEXT, *key) in steps]:
            root, after = known[key], known[NEXT, *key]
            if (root.dtype, root.shape) == (after.dtype, after.shape) and self._follows(key, root):
                states.append(key)
                del steps[key], steps[NEXT, *key]
        return states, steps

    def _follows(self, key: Key, leaf: Field) -> bool:
        """Whether the next rows of a state, as far as anything was written, are the rows that follow."""
        written = self.header.capacity if self.header.full else self.header.forced + 1
        return not any(
            part.broken is not None and part.broken < written
            for lane in range(self.header.lanes)
            for part in state_parts(self.source, key, leaf, self.header, self.ends, lane)
        )

    def _is_unset(self, field: Field) -> bool:
        return not any(
            self.source.read(field.key, *part).any() for part in leaf_parts(self.header.steps, field.row_bytes)
        )

    def _leaf(self, key: Key, place: Key) -> Field:
        field = field_named(self.source.fields, key)
        return Field(place, field.dtype, field.shape, field.role)


def _header(data: Any, is_full: bool, shift: int) -> TorchrlHeader:
    if not isinstance(data, TensorDictBase) or not data.ndim or not data.numel():
        what = f"batch size {list(data.batch_size)}" if isinstance(data, TensorDictBase) else type(data).__name__
        raise SchemaError(f"a tensordict of rows [time, ...] is expected, found {what}")
    if abs(shift) > len(data) or (shift < 1 and not is_full and shift):
        raise SchemaError(f"shift is {shift}; the {len(data):,} rows are counted from 1")
    return TorchrlHeader(tuple(data.batch_size), is_full, shift or len(data), data.numel())
