import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbtool import CorruptDataError
from rbtool.core.encodings.rows import (
    Boundaries,
    differing_rows,
    with_ends,
    without_ends,
)
from rbtool.core.format.episodes import EpisodeRow, EpisodeTable
from rbtool.core.ted.episodes import EndReason

lengths_of_episodes = st.lists(st.integers(1, 5), min_size=1, max_size=8)
shapes = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])


def table(lengths: list[int]) -> EpisodeTable:
    return EpisodeTable.from_rows(
        [EpisodeRow(i, n, 0.0, True, False, EndReason.TERMINATED) for i, n in enumerate(lengths)]
    )


@given(lengths_of_episodes, shapes, st.data())
def test_rows_with_ends_are_what_a_loop_over_episodes_gives(
    lengths: list[int], shape: tuple[int, ...], data: st.DataObject
) -> None:
    steps, size = sum(lengths), int(np.prod(shape))
    root = np.arange(steps * size, dtype=np.int32).reshape(steps, *shape)
    after, bounds = root + 1000, Boundaries(table(lengths), steps, "here")
    start = data.draw(st.integers(0, steps - 1))
    stop = data.draw(st.integers(start + 1, steps))
    last = set((np.cumsum(lengths) - 1).tolist())
    slow = [row for t in range(start, stop) for row in ([root[t], after[t]] if t in last else [root[t]])]
    ends = bounds.ends(start, stop)
    rows = with_ends(root[start:stop], after[start:stop], ends)
    np.testing.assert_array_equal(rows, np.stack(slow))
    np.testing.assert_array_equal(without_ends(rows, ends), root[start:stop])


@given(lengths_of_episodes)
def test_every_step_has_its_episode(lengths: list[int]) -> None:
    bounds = Boundaries(table(lengths), sum(lengths), "here")
    expected = np.repeat(np.arange(len(lengths)), lengths)
    np.testing.assert_array_equal(bounds.episode_of(np.arange(sum(lengths))), expected)
    assert [bounds.before(step) for step in range(sum(lengths))] == expected.tolist()


@pytest.mark.parametrize("lengths", [[2, 0, 1], [3, 1]])
def test_lengths_that_do_not_add_up_are_refused(lengths: list[int]) -> None:
    with pytest.raises(CorruptDataError, match="here: start and length"):
        Boundaries(table(lengths), 3, "here")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_bits_are_compared(dtype: str) -> None:
    one = np.array([[0.0, 1.0], [np.nan, 1.0], [0.0, 1.0], [5.0, 1.0]], dtype)
    other = np.array([[0.0, 1.0], [np.nan, 1.0], [-0.0, 1.0], [5.0, 2.0]], dtype)
    assert differing_rows(one, other).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("uint8", (3,)), ("uint8", ()), ("bool", (5, 1)), ("int16", (3,)), ("int64", ()), ("int8", (0,))],
)
def test_rows_of_every_width_are_compared(dtype: str, shape: tuple[int, ...]) -> None:
    one = np.ones((6, *shape), dtype)
    other = one.copy()
    other[[1, 4]] = 0
    assert differing_rows(one, other).tolist() == ([1, 4] if one.size else [])
    assert differing_rows(one, one.copy()).tolist() == []
