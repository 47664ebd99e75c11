"""Where the trajectories in a block begin and end, for operations that look ahead in them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...ted import Key
from .fields import KEPT, Fields
from .lazy import Sheet

__all__ = ["flags_there", "last_rows"]


def flags_there(fields: Fields) -> tuple[Key, ...]:
    """The flags under `next` that there are."""
    return tuple(key for key in KEPT if key in fields)


def last_rows(sheet: Sheet, flags: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number the row with which the trajectory of each row ends: its episode's last, or one before that bears a flag.

    A flag in mid-episode is data and stays; but what comes after it did not follow from what came before.
    """
    ends = flags.copy()
    pieces = sheet.pieces
    ends[(pieces.starts + pieces.rows - 1)[pieces.rows > 0]] = True
    places = np.flatnonzero(ends)
    return places[np.searchsorted(places, np.arange(len(ends)))]
