"""Rows of several tables at once: the compiled loops do what the plain ones do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.kernels import parts

counts_of_parts = st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any)


@pytest.fixture(autouse=True)
def _cold() -> Iterator[None]:
    yield
    parts._loops = None


@given(counts_of_parts, st.integers(0, 2**32))
def test_fractions_are_scaled_alike_with_and_without_numba(counts: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    stops, sizes = np.cumsum(counts), random.integers(1, 1 << 40, len(counts))
    chances = random.random(int(stops[-1]))
    parts._loops = None
    plain = parts.scaled_parts(chances, stops, sizes)
    assert parts.warm()
    np.testing.assert_array_equal(plain, parts.scaled_parts(chances, stops, sizes))
    assert bool((plain < np.repeat(sizes, counts)).all())


def tables(count: int, rows: int) -> list[list[np.ndarray]]:
    """So many tables of three columns."""
    random = np.random.default_rng(count)
    return [
        [random.random((rows, 3)), random.integers(0, 99, rows), random.random((rows, 5)).astype(np.float16)]
        for _ in range(count)
    ]


def gathered(
    found: list[list[np.ndarray]], numbers: np.ndarray, members: list[int], counts: list[int]
) -> list[np.ndarray] | None:
    """Gather rows of some tables with the compiled loop; None if it refuses."""
    first, rows = found[0], len(found[0][0])
    places = np.array([[column.ctypes.data for column in table] for table in found], np.int64)
    widths = np.array([column[0].nbytes for column in first], np.int64)
    targets = [np.empty((len(numbers), *column.shape[1:]), column.dtype) for column in first]
    stops, lengths = np.cumsum(counts), np.full(len(members), rows)
    addresses = np.array([target.ctypes.data for target in targets])
    done = parts.gather_parts(places, widths, addresses, numbers, np.array(members), stops, lengths)
    return targets if done else None


@pytest.mark.parametrize("counts", [[1], [30, 0, 7], [3, 90, 40], [0, 0, 2]])
@pytest.mark.parametrize("runs", [False, True])
def test_rows_of_several_tables_are_gathered(counts: list[int], runs: bool) -> None:
    parts.warm()
    found, members = tables(3, 60), [2, 0, 1][: len(counts)]
    numbers = np.random.default_rng(0).integers(-60, 60, sum(counts))
    if runs:
        numbers = np.arange(len(numbers)) % 60
    targets, ids = gathered(found, numbers, members, counts), np.repeat(members, counts)
    assert targets is not None
    for column, target in enumerate(targets):
        expected = [found[member][column][number] for member, number in zip(ids, numbers, strict=True)]
        np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("number", [60, -61, 1 << 40])
def test_rows_that_are_not_there_are_refused(number: int) -> None:
    parts.warm()
    for numbers in (np.array([3, 4, 5, number]), np.array([number, *range(20)])):
        assert gathered(tables(2, 60), numbers, [1, 0], [2, len(numbers) - 2]) is None


def test_nothing_is_gathered_without_compiled_loops() -> None:
    assert gathered(tables(2, 5), np.zeros(3, np.int64), [0, 1], [1, 2]) is None


@pytest.mark.parametrize("anchor", parts.ANCHORS)
@pytest.mark.parametrize("by_start", [False, True])
@given(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), st.integers(1, 4), st.integers(0, 2**32))
def test_slices_are_drawn_alike_with_and_without_numba(
    anchor: str, by_start: bool, counts: list[int], length: int, seed: int
) -> None:
    """Rings of 50 rows with trajectories of `length` to 9 steps, the oldest of which lost the steps before 7."""
    random, tables = np.random.default_rng(seed), parts.SliceTables(4)
    for number in (3, 0, 2):
        lasts = np.cumsum(random.integers(length, 10, 6)) + 6
        firsts = np.r_[7, lasts[:-1] + 1]
        sums = np.cumsum(lasts - firsts + 2 - length) + 5
        given_sums = (sums, int(sums[-1]) - 5, 5) if by_start else ()
        tables.put(number, parts.SliceTable(firsts, lasts, 50, *given_sums))
    members, stops = np.array([2, 0, 3]), np.cumsum(counts)
    arguments = random.random(2 * int(stops[-1])), members, stops, length, anchor
    parts._loops = None
    plain = tables.draw(*arguments)
    assert parts.warm()
    np.testing.assert_array_equal(plain, tables.draw(*arguments))
    assert len(plain) == stops[-1] * length
    assert bool((np.diff(plain.reshape(-1, length), axis=1) % 50 == 1).all())
