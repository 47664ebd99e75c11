"""Places, tallies, and the rule about recorded spaces."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.ted.rules import Places, Rows, SpaceRule, Tally
from rbtool.core.ted.schema import Field

# Places: sequences of numbers and of ranges that are arrays inside; and tallies, which make them.

PAIRS = ((0, 2), (5, 6), (7, 40))


@pytest.fixture(params=[(), PAIRS, (4, 1, 9)], ids=["none", "ranges", "numbers"])
def entries(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_places_are_a_sequence_of_their_entries(entries: Any) -> None:
    places = Places(np.array(entries, np.int64))
    assert (len(places), tuple(places), places) == (len(entries), entries, entries)
    assert [places[n] for n in range(-len(entries), len(entries))] == [*entries, *entries]
    assert places[1:] == entries[1:]
    assert all(type(number) is int for entry in places for number in np.ravel(entry).tolist())
    assert places == list(entries)
    assert hash(places) == hash(entries)
    assert places == copy.deepcopy(places) == pickle.loads(pickle.dumps(places))


@pytest.mark.parametrize("other", [PAIRS[:2], (*PAIRS, (50, 51)), ((0, 2), (5, 6), (7, 41)), 3, None, "abc"])
def test_places_differ_from_sequences_with_other_entries(other: Any) -> None:
    assert Places(np.array(PAIRS)) != other


def test_long_places_are_written_as_json_in_pieces() -> None:
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


# The rule about recorded spaces.

BOX = {"type": "Box", "dtype": "float32", "shape": [2], "low": -1.0, "high": [1.0, "inf"]}


def messages(spaces: Any, values: Any, key: tuple[str, ...] = ("action",), dtype: str = "float32") -> list[str]:
    """What the rule says of rows with these values."""
    array = np.asarray(values, "uint16" if dtype == "bfloat16" else dtype)
    flags = np.zeros(len(array), bool)
    rule = SpaceRule([Field(key, dtype, array.shape[1:], "action")], len(array), spaces=spaces)
    rule.see(Rows(0, {key: array}, flags, flags, np.zeros(len(array), int), flags))
    return [finding.message for finding in rule.findings()]


def test_values_outside_are_counted_and_named() -> None:
    found = messages({"action": BOX}, [[0, 9], [-1, 0], [1.5, 0], [0, -2], [np.nan, 0]])
    where = "(first: step 2, episode 0)"
    outside = "action is outside its recorded space, -1 to 1 … inf, in 2 of 5 steps"
    assert found == [f"{outside}: values outside it are from -2 to 1.5 {where}"]
    assert messages({"action": BOX}, [[1, 1e30]]) == []


@pytest.mark.parametrize(
    ("space", "dtype", "inside", "outside"),
    [
        ({"type": "Discrete", "n": 3}, "int64", [0, 2], [-1, 3]),
        ({"type": "Discrete", "n": 3, "start": -1}, "int8", [-1, 1], [-2, 2]),
        ({"type": "MultiBinary", "n": 1}, "int8", [0, 1], [-1, 2]),
        ({"type": "Box", "shape": [1], "low": 0.1, "high": 0.3}, "float32", [0.1, 0.3], [0.09, 0.31]),
        ({"type": "Box", "shape": [1], "low": "-inf", "high": 5}, "float64", [-1e300, 5], [5.1]),
        ({"type": "Box", "shape": [1], "low": -1e300, "high": 1}, "float16", [-6e4, 1], [2]),
        ({"type": "Box", "shape": [1], "low": 0.5, "high": 2.5}, "uint8", [1, 2], [0, 3]),
    ],
)
def test_spaces_of_many_kinds(space: Any, dtype: str, inside: list[float], outside: list[float]) -> None:
    assert messages({"action": space}, np.array(inside)[:, None], dtype=dtype) == []
    for value in outside:
        assert len(messages({"action": space}, [[value]], dtype=dtype)) == 1


def test_nested_spaces_are_those_of_nested_fields_and_of_next() -> None:
    inner = {"type": "Discrete", "n": 2}
    spaces = {"observation": {"type": "Dict", "subspaces": {"a": {"type": "Tuple", "subspaces": [None, inner]}}}}
    assert len(messages(spaces, [[5]], ("observation", "a", "1"), "int64")) == 1
    assert len(messages(spaces, [[5]], ("next", "observation", "a", "1"), "int64")) == 1
    assert messages(spaces, [[5]], ("observation", "a", "0"), "int64") == []


@pytest.mark.parametrize(
    ("space", "values", "dtype"),
    [
        (None, [[9]], "int64"),
        ({"type": "Text"}, [[9]], "uint8"),
        ({"type": "Box", "shape": [3], "low": [0, 0, 0], "high": [1, 1, 1]}, [[9, 9]], "float32"),
        ({"type": "Box", "shape": [1], "low": "-inf", "high": "inf"}, [[9]], "float32"),
        ({"type": "Box", "shape": [1], "low": 0, "high": 255}, [[9]], "uint8"),
        ({"type": "Box", "shape": [1], "low": 0, "high": 1}, [[9]], "bfloat16"),
        ({"type": "Box", "shape": [1], "low": 0, "high": 1}, [[True]], "bool"),
    ],
)
def test_spaces_without_limits_give_no_findings(space: Any, values: Any, dtype: str) -> None:
    assert messages({"action": space}, values, dtype=dtype) == []
