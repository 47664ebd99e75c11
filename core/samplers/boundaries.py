"""Where trajectories begin and end, as a function of one signal."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import SchemaError
from ..storages.cursors import last_row
from .slices import ConflictingArgumentsError

__all__ = ["find_start_stop_traj"]


def find_start_stop_traj(
    *,
    trajectory: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    at_capacity: bool,
    cursor: Any = None,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the trajectories in a storage, by ids (`trajectory`) or flags (`end`) of shape `[rows, lanes, ...]`.

    Returns the first and last elements of all trajectories, int64 `[n, ndim]`, both included, and their lengths, int64
    `[n]`; lane by lane, by their last rows. They are on `device`, or else where the signal is.

    The last row ends a trajectory, unless the storage is at capacity: then the first row follows the last one, and
    only the newest row, the last of `cursor` (a row or rows, as they were written), is an end in any case; so is the
    last row of a lane that has no end at all. ConflictingArgumentsError (a TypeError) unless one signal is given,
    SchemaError (a RuntimeError) for one without elements and, at capacity, for a cursor that names no row. Samplers
    keep a `TrajectoryTable` instead, which is not made anew with every write.

    >>> ids = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1, 1, 1])
    >>> start, stop, length = find_start_stop_traj(trajectory=ids, at_capacity=True, cursor=1)
    >>> start.tolist(), stop.tolist(), length.tolist()
    ([[4], [2]], [[1], [3]], [8, 2])
    """
    if (trajectory is None) == (end is None):
        raise ConflictingArgumentsError("trajectory and end are the two signals, exactly one of them is expected")
    given = trajectory if trajectory is not None else end
    assert given is not None  # one of them is not
    if not given.dim() or not given.numel():
        raise SchemaError(f"the signal is {list(given.shape)}, one of at least one row is expected")
    signal = given if device is None else given.to(device)
    rows, others = len(signal), tuple(signal.shape[1:])
    flat = signal.reshape(rows, -1)
    ends = flat != flat.roll(-1, 0) if trajectory is not None else flat.bool()
    ends = ends.clone()
    if not at_capacity:
        ends[-1] = True
    elif cursor is not None:
        ends[_newest(cursor, rows)] = True
    ends[-1] |= ~ends.any(0)
    lane, stop = ends.T.nonzero(as_tuple=True)
    first_of_lane = torch.ones_like(lane, dtype=torch.bool)
    first_of_lane[1:] = lane[1:] != lane[:-1]
    counts = ends.sum(0)
    before = stop.roll(1)
    before[first_of_lane] = stop[counts.cumsum(0)[counts > 0] - 1]  # round the ring, before the first comes the last
    start = (before + 1) % rows
    length = (stop - start) % rows + 1
    lanes = torch.unravel_index(lane, others) if others else ()
    return torch.stack([start, *lanes], -1), torch.stack([stop, *lanes], -1), length


def _newest(cursor: Any, rows: int) -> int:
    """Return the last row of a cursor; SchemaError for one without rows, for one beyond them, and for what is none."""
    try:
        row = last_row(cursor + rows if isinstance(cursor, int) and -rows <= cursor < 0 else cursor)
    except (TypeError, ValueError, RuntimeError):
        row = None
    if row is None or row >= rows:
        raise SchemaError(
            f"the cursor is {cursor!r}, the row or rows of {rows} that were written last are expected: an int, or a "
            "tensor or a range of at least one"
        )
    return row
