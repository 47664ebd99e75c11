"""The rule which starts of a slice are legal: against a list of all starts, and numba's form against numpy's."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.kernels import rows, slices
from rbtool.core.kernels.slices import ANCHORS, SliceRule, SliceTable, SliceTables


@st.composite
def rules_of(draw: st.DrawFn) -> SliceRule:
    length = draw(st.integers(1, 6))
    minimum, left, right = draw(st.integers(1, length)), *(draw(st.integers(0, length - 1)) for _ in range(2))
    return SliceRule(length, minimum, left, right, draw(st.sampled_from(ANCHORS)))


rules = rules_of()


@pytest.fixture(autouse=True)
def _cold() -> Iterator[None]:
    yield
    rows._loops = None


def slices_in(rule: SliceRule, size: int) -> dict[int, list[int]]:
    """Every legal slice of a trajectory: the steps inside of it, by the start."""
    if size < rule.minimum:
        return {}
    length = min(size, rule.length)
    found = {}
    for start in range(-length, size + length):
        inside = [step for step in range(start, start + length) if 0 <= step < size]
        overhang = rule.left if start < 0 else rule.right
        if len(inside) == length or len(inside) >= rule.length - overhang:
            found[start] = inside
    starts = list(found)
    chosen = {"any": starts, "start": starts[:1], "end": starts[-1:]}[rule.anchor]
    return {start: found[start] for start in chosen}


@given(rules, st.integers(1, 9))
def test_the_rule_allows_all_legal_starts_and_no_others(rule: SliceRule, size: int) -> None:
    legal, sizes = slices_in(rule, size), np.array([size])
    places = np.arange(size)
    assert places[rule.allows(np.full(size, size), places)].tolist() == [start for start in legal if start >= 0]
    if not legal:
        return
    assert rule.starts(sizes).tolist() == [len(legal)]
    assert tuple(end.item() for end in rule.ends(sizes)) == (min(legal), max(legal))
    first, taken = rule.slices(np.full(len(legal), 7), np.full(len(legal), size), np.arange(len(legal)))
    assert (first - 7).tolist() == [inside[0] for inside in legal.values()]
    assert (taken is None) == rule.is_plain
    lengths = np.full(len(legal), rule.length) if taken is None else taken
    assert lengths.tolist() == [len(inside) for inside in legal.values()]


@given(rules, st.integers(1, 9), st.integers(0, 8), st.integers(0, 3))
def test_a_rule_that_looks_ahead_only_does_not_ask_what_came_before(
    rule: SliceRule, size: int, place: int, more: int
) -> None:
    if rule.looks_ahead_only and place < size:
        allowed = rule.allows(np.array([size - place]), np.array([0]))
        assert allowed == rule.allows(np.array([size + more]), np.array([place + more]))


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("by_start", [False, True])
@given(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), st.integers(1, 4), st.integers(0, 2**32))
def test_slices_are_the_same_with_and_without_numba(
    anchor: slices.Anchor, by_start: bool, counts: list[int], length: int, seed: int
) -> None:
    """Rings of 50 rows with trajectories of `length` to 9 steps, the oldest of which lost the steps before 7."""
    random, tables, rule = np.random.default_rng(seed), SliceTables(4), SliceRule(length, length, anchor=anchor)
    every = {}
    for number in (3, 0, 2):
        lasts = np.cumsum(random.integers(length, 10, 6)) + 6
        firsts = np.r_[7, lasts[:-1] + 1]
        sums = np.cumsum(rule.starts(lasts - firsts + 1)) + 5
        given_sums = (sums, int(sums[-1]) - 5, 5) if by_start else ()
        table = every[number] = SliceTable(firsts, lasts, 50, *given_sums)
        tables.put(number, table)
    members, stops = np.array([2, 0, 3]), np.cumsum(counts)
    chances = random.random(2 * int(stops[-1]))
    rows._loops = None
    plain = tables.draw(chances, members, stops, rule)
    assert rows.warm()
    np.testing.assert_array_equal(plain, tables.draw(chances, members, stops, rule))
    assert len(plain) == stops[-1] * length
    assert bool((np.diff(plain.reshape(-1, length), axis=1) % 50 == 1).all())
    for member, drawn in zip(members.tolist(), np.split(plain.reshape(-1, length), stops[:-1]), strict=True):
        table = every[member]
        legal = {
            (int(first) + start) % 50
            for first, last in zip(table.first, table.last, strict=True)
            for start in slices_in(rule, int(last - first + 1))
        }
        assert set(drawn[:, 0].tolist()) <= legal


@pytest.mark.parametrize("single", [False, True])
def test_slices_of_one_ring_are_the_same_with_and_without_numba(single: bool) -> None:
    table, rule = SliceTable(np.array([3, 8]), np.array([7, 4001]), 4000), SliceRule(3, 3)
    chances = np.random.default_rng(0).random(100_000, np.float32).astype(float)
    assert rows.warm()
    compiled = table.draw(chances, rule, single=single)
    with mock.patch.object(rows, "warm", return_value=False):
        np.testing.assert_array_equal(table.draw(chances, rule, single=single), compiled)
    if single:  # as torch multiplies: a few products are rounded up to the next start
        chosen = chances[:50_000] >= 0.5
        places = torch.from_numpy(chances[50_000:]).float() * torch.from_numpy(np.where(chosen, 3992, 3))
        expected = np.where(chosen, 8, 3) + places.long().numpy()
        np.testing.assert_array_equal(compiled.reshape(-1, 3)[:, 0], expected % 4000)
