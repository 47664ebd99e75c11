"""Places: sequences of numbers and of ranges that are arrays inside; and tallies, which make them."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.ted.rules import Places, Rows, Tally

PAIRS = ((0, 2), (5, 6), (7, 40))


@pytest.fixture(params=[(), PAIRS, (4, 1, 9)], ids=["none", "ranges", "numbers"])
def entries(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_it_is_a_sequence_of_the_same_entries(entries: Any) -> None:
    places = Places(np.array(entries, np.int64))
    assert (len(places), tuple(places), places) == (len(entries), entries, entries)
    assert [places[n] for n in range(-len(entries), len(entries))] == [*entries, *entries]
    assert places[1:] == entries[1:]
    assert all(type(number) is int for entry in places for number in np.ravel(entry).tolist())
    assert places == list(entries)
    assert hash(places) == hash(entries)
    assert places == copy.deepcopy(places) == pickle.loads(pickle.dumps(places))


@pytest.mark.parametrize("other", [PAIRS[:2], (*PAIRS, (50, 51)), ((0, 2), (5, 6), (7, 41)), 3, None, "abc"])
def test_it_differs_from_what_has_other_entries(other: Any) -> None:
    assert Places(np.array(PAIRS)) != other


def test_a_long_one_is_written_as_json_in_pieces() -> None:
    ranges = np.arange(100_000).reshape(-1, 2)
    pieces = list(Places(ranges).json_pieces())
    assert max(map(len, pieces)) < 1 << 19
    assert json.loads("".join(pieces)) == ranges.tolist() == Places(ranges).tolist()
    assert "".join(Places(ranges[:0]).json_pieces()) == "[]"
    assert len(repr(Places(ranges))) < 300


def _rows(start: int, episode: np.ndarray[Any, Any]) -> Rows:
    no = np.zeros(len(episode), bool)
    return Rows(start, {}, first=no, last=no, episode=episode, explicit=no)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60),
    st.lists(st.integers(1, 7), min_size=60, max_size=60),
    st.integers(1, 61),
)
def test_a_tally_has_every_step_and_episode(marks: Any, lengths: list[int], chunk: int) -> None:
    """Two rules of thumb mark rows of the same chunks, as the rule about the episode table does."""
    wrong = np.array(marks)
    episode = np.repeat(np.arange(60)[::-1] // 2, lengths)[: len(wrong)]
    tally = Tally()
    for start in range(0, len(wrong), chunk):
        rows = _rows(start, episode[start : start + chunk])
        tally.add(rows, wrong[start : start + chunk, 0])
        at = np.flatnonzero(np.arange(len(rows)) % 2 == 0)
        tally.add(rows, wrong[start : start + chunk, 1][at], at)
    marked = wrong[:, 0] | (wrong[:, 1] & (np.arange(len(wrong)) % chunk % 2 == 0))
    steps = [step for first, after in tally.places["steps"] for step in range(first, after)]
    assert steps == np.flatnonzero(marked).tolist()
    assert all(one[1] < other[0] for one, other in zip(tally.places["steps"], tally.places["steps"][1:], strict=False))
    assert sorted(tally.places["episodes"]) == sorted(set(episode[marked].tolist()))
    assert len(tally.places["episodes"]) == len(set(tally.places["episodes"]))


def test_millions_of_ranges_take_sixteen_bytes_each() -> None:
    import tracemalloc

    tally, episode = Tally(), np.zeros(1 << 16, np.int64)
    tracemalloc.start()
    for start in range(0, 1 << 20, 1 << 16):
        tally.add(_rows(start, episode), np.arange(1 << 16) % 2 == 0)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 17 * (1 << 19) + (1 << 16)
    assert len(tally.places["steps"]) == tally.count == 1 << 19
