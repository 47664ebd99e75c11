"""Rows are equal where all their bits are, however few or many differ."""

from __future__ import annotations

import numpy as np
import pytest

from rbtool.core.ted.episodes import rows_equal


@pytest.mark.parametrize("shape", [(), (3,), (39,), (84, 84), (2, 0)])
@pytest.mark.parametrize("dtype", ["float64", "float32", "uint8", "complex128"])
def test_rows_are_compared_bit_by_bit(shape: tuple[int, ...], dtype: str) -> None:
    draw = np.random.default_rng(0)
    one = draw.integers(0, 256, (100, *shape, np.dtype(dtype).itemsize), np.uint8)
    for part in (0.0, 0.01, 0.5, 1.0):
        other = np.where(draw.random(one.shape) < part, draw.integers(0, 256, one.shape, np.uint8), one)
        expected = (one == other).reshape(100, -1).all(1)
        arrays = [
            rows.view(dtype).reshape(100, *shape) if rows.size else np.empty((100, *shape), dtype)
            for rows in (one, other)
        ]
        assert rows_equal(*arrays).tolist() == expected.tolist()
        assert rows_equal(arrays[0][:0], arrays[1][:0]).tolist() == []


def test_a_single_difference_is_found_in_every_row() -> None:
    one = np.full((50, 7), np.nan, np.float32)
    for row in range(50):
        other = one.copy()
        other[row, row % 7] = 0
        assert np.flatnonzero(~rows_equal(one, other)).tolist() == [row]
