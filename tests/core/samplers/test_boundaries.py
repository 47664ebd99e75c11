from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rbtool.core.samplers.trajectories import find_start_stop_traj

IDS = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1, 1, 1])


def found(**arguments: Any) -> list[tuple[int, int, int]]:
    start, stop, length = find_start_stop_traj(**arguments)
    assert start.shape == stop.shape == (len(length), 1)
    return list(zip(start[:, 0].tolist(), stop[:, 0].tolist(), length.tolist(), strict=True))


@pytest.mark.parametrize(
    ("at_capacity", "cursor", "expected"),
    [
        (True, 1, [(4, 1, 8), (2, 3, 2)]),
        (True, torch.tensor([0, 1]), [(4, 1, 8), (2, 3, 2)]),
        (True, range(5, 8), [(8, 1, 4), (2, 3, 2), (4, 7, 4)]),
        (True, None, [(4, 1, 8), (2, 3, 2)]),
        (False, None, [(0, 1, 2), (2, 3, 2), (4, 9, 6)]),
        (False, 9, [(0, 1, 2), (2, 3, 2), (4, 9, 6)]),
    ],
)
def test_ids_change_where_trajectories_end(at_capacity: bool, cursor: Any, expected: list[Any]) -> None:
    assert found(trajectory=IDS, at_capacity=at_capacity, cursor=cursor) == expected


def test_a_lane_without_an_end_has_its_last_row_as_one() -> None:
    assert found(trajectory=torch.zeros(4), at_capacity=True) == [(0, 3, 4)]
    assert found(end=torch.zeros(4, dtype=torch.bool), at_capacity=True) == [(0, 3, 4)]


def test_flags_end_trajectories_and_the_ring_goes_on() -> None:
    end = torch.tensor([0, 1, 0, 0, 1, 0], dtype=torch.bool)
    assert found(end=end, at_capacity=True, cursor=2) == [(5, 1, 3), (2, 2, 1), (3, 4, 2)]
    assert found(end=end, at_capacity=False) == [(0, 1, 2), (2, 4, 3), (5, 5, 1)]


def test_lanes_come_one_after_the_other() -> None:
    end = torch.zeros(4, 2, dtype=torch.bool)
    end[1, 1] = True
    start, stop, length = find_start_stop_traj(end=end, at_capacity=False)
    assert start.tolist() == [[0, 0], [0, 1], [2, 1]]
    assert stop.tolist() == [[3, 0], [1, 1], [3, 1]]
    assert length.tolist() == [4, 2, 2]
    three = find_start_stop_traj(end=end.unsqueeze(1), at_capacity=False)
    assert three[0].tolist() == [[0, 0, 0], [0, 0, 1], [2, 0, 1]]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, TypeError, "either trajectory or end"),
        ({"trajectory": IDS, "end": IDS}, TypeError, "either trajectory or end"),
        ({"trajectory": torch.zeros(0)}, RuntimeError, r"the signal has the shape \[0\]"),
        ({"end": torch.tensor(True)}, RuntimeError, r"the signal has the shape \[\]"),
    ],
)
def test_a_signal_that_is_none_is_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        find_start_stop_traj(at_capacity=True, **arguments)


@pytest.mark.parametrize(
    "cursor", [[], torch.tensor([], dtype=torch.int64), range(0), np.array([], int), slice(0, 0), (), "a", 6, -7]
)
def test_a_cursor_that_names_no_row_is_refused_where_it_counts(cursor: Any) -> None:
    end = torch.tensor([0, 0, 1, 0, 0, 1]).bool()
    with pytest.raises(RuntimeError, match="the cursor is"):
        find_start_stop_traj(end=end, at_capacity=True, cursor=cursor)
    assert find_start_stop_traj(end=end, at_capacity=False, cursor=cursor)[2].tolist() == [3, 3]


@pytest.mark.parametrize("cursor", [0, -6, range(4, 1, -4), torch.tensor([3, 0])])
def test_the_last_row_of_a_cursor_is_an_end(cursor: Any) -> None:
    end = torch.tensor([0, 0, 1, 0, 0, 1]).bool()
    row = 4 if isinstance(cursor, range) else 0
    assert [row] in find_start_stop_traj(end=end, at_capacity=True, cursor=cursor)[1].tolist()
