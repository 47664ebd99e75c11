"""Goes through the rows of lanes: where they end, and where the next observation is not what follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..format import Array, StepReader
from ..ted import NEXT, Field, Key, as_numbers, field_named
from .rows import differing_rows, leaf_parts
from .torchrl_header import TorchrlHeader

__all__ = ["StatePart", "state_parts", "step_ends"]


@dataclass(frozen=True, slots=True)
class StatePart:
    """Consecutive rows of a state, at the root and below `next`.

    `ends` are those of them behind which an episode ends, counted from the first. `broken` is the first row of the
    lane up to here whose next observation is not what follows though nothing ends there, None if there is none.
    """

    root: Array
    after: Array
    ends: Array
    broken: int | None


def state_parts(
    source: StepReader, key: Key, leaf: Field, header: TorchrlHeader, ends: Array, lane: int
) -> Iterator[StatePart]:
    """Yield the valid rows of a lane part by part; `ends` count over the capacity of all lanes, `source` over rows."""
    first, offset = lane * header.capacity, lane * header.rows
    own = ends[slice(*np.searchsorted(ends, (first, first + header.rows)))] - first
    held: Array | None = None
    for start, stop in leaf_parts(header.rows, leaf.row_bytes):
        root = source.read(key, offset + start, offset + stop)
        after = source.read((NEXT, *key), offset + start, offset + stop)
        wrong = differing_rows(after[:-1], root[1:]) + start
        if held is not None and len(differing_rows(held, root[:1])):
            wrong = np.append(start - 1, wrong)
        wrong = np.setdiff1d(wrong, own)
        held = after[-1:].copy()
        inside = own[slice(*np.searchsorted(own, (start, stop)))] - start
        yield StatePart(root, after, inside, int(wrong[0]) if len(wrong) else None)


def step_ends(source: StepReader, done: Key, header: TorchrlHeader) -> Array:
    """The steps, counted over the capacity of all lanes, behind which states have an extra row.

    Those are where any number of the flag `done` is set, and one in every lane that the layout takes for an end.
    """
    field, found = field_named(source.fields, done), [header.forced_steps]
    for start, stop in leaf_parts(source.manifest.steps, field.row_bytes):
        flags = as_numbers(source.read(field.key, start, stop), field.dtype).reshape(stop - start, -1) != 0
        lane, row = np.divmod(np.flatnonzero(flags.any(1)) + start, header.rows)
        found.append(lane * header.capacity + row)
    return np.unique(np.concatenate(found))
