"""The element type that holds the values of several others without changing one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["wider"]

_MANTISSA = {2: 11, 4: 24, 8: 53}
"""Bits of a whole number that a float of so many bytes holds."""


def wider(names: Sequence[str]) -> str | None:
    """Return the type that NumPy promotes these to, or None where it does not hold every value of each.

    NumPy calls int64 to float64 safe; from 2**53 on it is not.
    """
    if len(set(names)) == 1:
        return names[0]
    dtypes = sorted(map(np.dtype, names), key=lambda dtype: (dtype.kind, dtype.itemsize))
    wide = np.result_type(*dtypes)
    return wide.name if all(_holds(wide, dtype) for dtype in dtypes) else None


def _holds(wide: np.dtype[np.generic], narrow: np.dtype[np.generic]) -> bool:
    if narrow.kind in "iu" and wide.kind in "fc":
        bits = 8 * narrow.itemsize - (narrow.kind == "i")
        return bits <= _MANTISSA[wide.itemsize // (2 if wide.kind == "c" else 1)]
    return np.can_cast(narrow, wide, "safe")
