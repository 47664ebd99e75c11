"""The slow model that slice samplers are held against, itself held against what is known."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from rbtool.core.testing.slices import (
    RingModel,
    SliceRule,
    Step,
    assert_drawn_as_expected,
    episodes,
    legal_slices,
    rows_of,
    tensordict_of,
)

RUN = tuple((slot,) for slot in range(5))


def model_of(lengths: list[int], capacity: int, rows: int) -> RingModel:
    model = RingModel(capacity)
    model.extend(rows_of([episodes(lengths, ["terminated"])], rows))
    return model


def lengths_of(model: RingModel) -> list[int]:
    return [len(run) for run in model.runs("done")]


def slots_of(model: RingModel) -> list[list[int]]:
    return [[slot for (slot,) in run] for run in model.runs("done")]


def starts(chances: dict[tuple[tuple[int, ...], ...], Fraction]) -> dict[tuple[int, int], Fraction]:
    return {(part[0][0], len(part)): chance for part, chance in chances.items()}


@pytest.mark.parametrize(
    ("lengths", "capacity", "rows", "expected"),
    [
        ([3, 2, 4], 10, 7, [3, 2, 2]),  # partly filled: the last valid row is an end
        ([3, 2, 4], 9, 9, [3, 2, 4]),  # full: the last row and the first one do not follow each other
        ([3, 2, 4, 8], 9, 12, [2, 4, 3]),  # wrapped: the oldest begins at the cursor
        ([30], 9, 30, [9]),  # one trajectory longer than the ring
    ],
)
def test_trajectories_of_a_ring(lengths: list[int], capacity: int, rows: int, expected: list[int]) -> None:
    assert lengths_of(model_of(lengths, capacity, rows)) == expected


def test_the_ring_of_the_specification() -> None:
    model = RingModel(10)
    model.extend(rows_of([episodes([4, 8, 10], ["terminated"], ids=[0, 1, 2])], 12))
    model.cursor = 2
    assert [len(run) for run in model.runs("ids")] == [2, 8]
    assert model.runs("ids")[1][0] == (4,)


def test_a_larger_capacity_cuts_where_the_rows_end() -> None:
    model = model_of([5, 30], 6, 10).loaded(8)
    assert slots_of(model) == [[4], [5], [0, 1, 2, 3]]
    model.extend([(Step(99, 7),)])
    assert slots_of(model) == [[5], [0, 1, 2, 3, 4]]


def test_ids_that_come_again_across_the_cursor_are_two_trajectories() -> None:
    model = RingModel(6)
    model.extend(rows_of([episodes([3, 2, 4], ["nothing"], ids=[0, 1])], 8))
    assert [len(run) for run in model.runs("ids")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (SliceRule(2), {(slot, 2): Fraction(1, 4) for slot in range(4)}),
        (SliceRule(5), {(0, 5): Fraction(1)}),
        (SliceRule(6), {}),
        (SliceRule(6, strict_length=False), {(0, 5): Fraction(1)}),
        (SliceRule(4, anchor="end"), {(1, 4): Fraction(1)}),
        (SliceRule(4, anchor="start"), {(0, 4): Fraction(1)}),
        (SliceRule(4, span=(0, 1)), {(0, 4): Fraction(1, 3), (1, 4): Fraction(1, 3), (2, 3): Fraction(1, 3)}),
        (SliceRule(5, span=(2, 0)), {(0, 3): Fraction(1, 3), (0, 4): Fraction(1, 3), (0, 5): Fraction(1, 3)}),
    ],
)
def test_legal_slices_of_one_trajectory(rule: SliceRule, expected: dict[tuple[int, int], Fraction]) -> None:
    assert starts(legal_slices([RUN], rule)) == expected


def test_weights_of_episodes_and_steps() -> None:
    runs = [RUN, ((7,), (8,))]
    by_episode, by_step = (starts(legal_slices(runs, SliceRule(2, weight=weight))) for weight in ("episode", "step"))
    assert by_episode == {(slot, 2): Fraction(1, 8) for slot in range(4)} | {(7, 2): Fraction(1, 2)}
    assert by_step == {(slot, 2): Fraction(1, 5) for slot in (0, 1, 2, 3, 7)}


def test_what_is_drawn_wrongly_is_found() -> None:
    chances = legal_slices([RUN], SliceRule(2))
    even = Counter(dict.fromkeys(chances, 250))
    assert_drawn_as_expected(even, chances)
    skewed = even + Counter({next(iter(chances)): 150})
    foreign = even + Counter({RUN: 1})
    partial = Counter({part: count for part, count in even.items() if part[0] != (2,)})
    for wrong in (skewed, foreign, partial):
        with pytest.raises(AssertionError):
            assert_drawn_as_expected(wrong, chances)


def test_data_lie_as_the_model_says() -> None:
    rows = rows_of([episodes([2, 3], ["terminated"]), episodes([4], ["truncated"])], 4)
    data = tensordict_of(rows, ndim=2)
    assert data.shape == (2, 4)
    assert data["number"].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert np.argwhere(data["next", "done"][..., 0].numpy()).tolist() == [[0, 1], [1, 3]]
