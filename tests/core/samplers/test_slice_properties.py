"""Every slice sampler on every kind of ring: each legal slice with its exact probability, and nothing else.

Histories of writes, edits and samples come in any order. The slow model that samplers are held against is itself held
against what is known.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rbtool.core.samplers.base import Sampler
from rbtool.core.samplers.prioritized import PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.testing.slice_samplers import (
    CONTENTS,
    SIGNAL_OPTIONS,
    SIGNALS,
    SITUATIONS,
    RingModel,
    Slice,
    Slicing,
    Step,
    Twin,
    assert_drawn_as_expected,
    cut,
    episodes,
    expected_marks,
    legal_slices,
    rows_of,
    situation,
    step_lists,
    tensordict_of,
)

RULES = (
    Slicing(1),
    Slicing(2),
    Slicing(3, strict_length=False),
    Slicing(3, strict_length=False, weight="step"),
    Slicing(2, weight="step"),
    Slicing(3, strict_length=False, span=(2, 1)),
    Slicing(2, span=(0, 1)),
    Slicing(2, span=(1, 0), weight="step"),
    Slicing(3, strict_length=False, anchor="start"),
    Slicing(3, strict_length=False, anchor="end"),
    Slicing(2, anchor="end", weight="step"),
)

DRAWS = 1500


def arguments(rule: Slicing, signal: str) -> dict[str, Any]:
    return {
        "slice_len": rule.slice_len,
        "strict_length": rule.strict_length,
        "span": rule.span,
        "anchor": rule.anchor,
        "weight": rule.weight,
        **SIGNAL_OPTIONS[signal],  # type: ignore[index]
    }


def without_weights(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments that samplers without replacement have as well."""
    return {key: value for key, value in options.items() if key not in {"span", "weight"}}


def every_ring() -> list[Any]:
    """Each situation with each of the contents in one and two dimensions; signals and rules take turns."""
    found = []
    for number, (name, contents, ndim) in enumerate(product(SITUATIONS, CONTENTS, (1, 2))):
        signal, rule = SIGNALS[number % len(SIGNALS)], RULES[3 * number % len(RULES)]
        found.append((name, contents, ndim, signal, rule))
    return found


def drawn_from(twin: Twin, legal: dict[Slice, Any], rule: Slicing) -> Counter[Slice]:
    twin.buffer.set_rng(torch.Generator().manual_seed(7))
    drawn, info = twin.draw(DRAWS * rule.slice_len)
    assert len(drawn) == DRAWS
    said = {name: info["next", name].flatten().tolist() for name in ("truncated", "terminated", "done")}
    assert said | {"is_init": info["is_init"].flatten().tolist()} == expected_marks(twin.model, drawn)
    return Counter(drawn)


def require_probabilities(name: str, contents: str, ndim: int, signal: Any, rule: Slicing) -> None:
    twin = situation(name, contents, SliceSampler(**arguments(rule, signal)), lanes=ndim, ndim=ndim)
    legal = twin.legal(signal, rule)
    if not legal:
        with pytest.raises(RuntimeError, match="long"):
            twin.draw(rule.slice_len)
        return
    assert_drawn_as_expected(drawn_from(twin, legal, rule), legal)


@each("ring", every_ring())
def test_legal_slices_are_drawn_with_their_probability(ring: tuple[Any, ...]) -> None:
    require_probabilities(*ring)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("name", SITUATIONS)
def test_legal_slices_are_drawn_with_their_probability_in_all_combinations(
    name: str, contents: str, signal: Any, rule: Slicing
) -> None:
    for ndim in (1, 2):
        require_probabilities(name, contents, ndim, signal, rule)


# Priorities ------------------------------------------------------------------------------------------


def prioritised(rule: Slicing, signal: str, ndim: int, **options: Any) -> PrioritizedSliceSampler:
    given = {key: value for key, value in arguments(rule, signal).items() if key != "weight"}
    return PrioritizedSliceSampler(12 * ndim, 0.7, 0.4, **given | options)


def weighted(twin: Twin, signal: Any, rule: Slicing, priorities: dict[Any, float]) -> dict[Slice, Any]:
    """The exact probabilities where starts are drawn by priority."""
    legal = twin.legal(signal, replace(rule, by_priority=True))
    weights = {part: (priorities[part[0]] + 1e-8) ** 0.7 for part in legal}
    return {part: weight / sum(weights.values()) for part, weight in weights.items()}


def with_priorities(twin: Twin) -> dict[tuple[int, ...], float]:
    """Give every element a priority of its own, the fifth one none; return them."""
    storage = twin.buffer.storage
    places = torch.cartesian_prod(*[torch.arange(size) for size in storage.shape]).reshape(len(storage), -1)
    priority = (torch.arange(len(storage)) * 7 % 11 + 0.25) * (torch.arange(len(storage)) % 5 != 4)
    twin.buffer.update_priority(places if storage.ndim > 1 else places[:, 0], priority)
    return dict(zip(map(tuple, places.tolist()), priority.tolist(), strict=True))


PRIORITISED_RULES = [rule for rule in RULES if rule.weight == "episode" and not rule.span[0]]


@each(("name", "contents", "ndim"), list(product(SITUATIONS, CONTENTS, (1, 2))))
def test_starts_are_drawn_by_priority_among_legal_ones(name: str, contents: str, ndim: int) -> None:
    number = SITUATIONS.index(name) * len(CONTENTS) + list(CONTENTS).index(contents)
    rule, signal = PRIORITISED_RULES[number % len(PRIORITISED_RULES)], SIGNALS[number % len(SIGNALS)]
    twin = situation(name, contents, prioritised(rule, signal, ndim), lanes=ndim, ndim=ndim)
    priorities = with_priorities(twin)
    chances = weighted(twin, signal, rule, priorities)
    if not chances:
        with pytest.raises(RuntimeError, match="long"):
            twin.draw(rule.slice_len)
        return
    drawn = drawn_from(twin, chances, rule)
    assert_drawn_as_expected(drawn, chances)


# Epochs ----------------------------------------------------------------------------------------------


@each(("name", "contents", "strict"), list(product(SITUATIONS, CONTENTS, (False, True))))
def test_an_epoch_visits_each_trajectory_once(name: str, contents: str, strict: bool) -> None:
    ndim = 1 + (SITUATIONS.index(name) + list(CONTENTS).index(contents) + strict) % 2
    rule = Slicing(2, strict_length=strict)
    sampler = SliceSamplerWithoutReplacement(**without_weights(arguments(rule, "done")))
    twin = situation(name, contents, sampler, lanes=ndim, ndim=ndim)
    runs = [run for run in twin.model.runs("done") if len(run) >= 2 or not strict]
    if not runs:
        with pytest.raises(RuntimeError, match="long"):
            twin.draw(4)
        return
    owner = {place: run for run in runs for place in run}
    legal, twin.buffer.sampler._rng = twin.legal("done", rule), torch.Generator().manual_seed(3)
    for _ in range(3):
        visited: Counter[Slice] = Counter()
        while not twin.buffer.sampler.ran_out or not visited:
            drawn, _ = twin.draw(4)
            assert len(drawn) == min(2, len(runs) - sum(visited.values()))
            assert set(drawn) <= set(legal)
            visited.update(owner[part[0]] for part in drawn)
        assert visited == Counter(runs)


def test_slices_of_an_epoch_have_their_probability() -> None:
    rule = Slicing(2, strict_length=False)
    sampler = SliceSamplerWithoutReplacement(slice_len=2, end_key=("next", "done"), strict_length=False)
    twin = situation("wrapped mid-episode", "ragged", sampler)
    sampler._rng = torch.Generator().manual_seed(3)
    drawn = Counter(part for _ in range(2000) for part in twin.draw(2)[0])
    assert_drawn_as_expected(drawn, legal_slices(twin.model.runs("done"), rule))
    assert cut(*sampler.sample(twin.buffer.storage, 2))


EXAMPLES = int(os.environ.get("RBTOOL_SLICE_EXAMPLES", "60"))
lengths = pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(10 * EXAMPLES, marks=pytest.mark.slow)])


def many(examples: int) -> settings:
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck))


rules = st.builds(
    Slicing,
    slice_len=st.integers(1, 4),
    strict_length=st.booleans(),
    anchor=st.sampled_from(["any", "start", "end"]),
    weight=st.sampled_from(["episode", "step"]),
)


@dataclass(frozen=True)
class History:
    """A ring, the rows that are there to be written, and what is done one after the other, each with a number."""

    capacity: int
    lanes: int
    ndim: int
    rows: list[tuple[Step, ...]]
    deeds: list[tuple[str, int]]

    def __repr__(self) -> str:
        return f"History({self.capacity} x {self.lanes}, ndim={self.ndim}, {self.rows}, {self.deeds})"


@st.composite
def histories(draw: st.DrawFn, deeds: tuple[str, ...] = ("extend", "extend", "sample", "replace", "load")) -> History:
    """Histories that write at least one row."""
    lanes = draw(st.integers(1, 2))
    done = draw(st.lists(st.tuples(st.sampled_from(deeds), st.integers(0, 11)), max_size=20))
    return History(
        capacity=draw(st.integers(1, 9)),
        lanes=lanes,
        ndim=2 if lanes > 1 else draw(st.integers(1, 2)),
        rows=draw(step_lists(lanes, 60)),
        deeds=[("extend", draw(st.integers(0, 11))), *done],
    )


def run_through(history: History, make: Callable[[int], Sampler], check: Callable[[Twin], None]) -> None:
    """Do what a history says, to a buffer and to its model; `make` is told how many elements there are at most."""
    lanes, written = history.lanes, 0
    twin = Twin(history.capacity, make(history.capacity * lanes), lanes, history.ndim)
    for what, number in history.deeds:
        slot = number % twin.model.capacity
        if what == "extend" and written < len(history.rows):
            twin.extend(history.rows[written : written + 1 + number])
            written += 1 + number
        elif what == "replace" and twin.model.steps[slot] is not None:
            twin.replace(slot, history.rows[5 * number])
        elif what == "load":
            capacity = twin.model.capacity + number % 4
            twin = twin.loaded(capacity, make(capacity * lanes))
        elif what == "sample":
            check(twin)
    check(twin)


def check_drawn(twin: Twin, rule: Slicing, signal: Any, slices: int = 6) -> list[Slice]:
    """Draw once, and hold the slices and what is said of them against the model."""
    legal = twin.legal(signal, rule)
    if not legal:
        with pytest.raises(RuntimeError):
            twin.draw(slices * rule.slice_len)
        return []
    drawn, info = twin.draw(slices * rule.slice_len)
    assert set(drawn) <= set(legal)
    said = {name: info["next", name].flatten().tolist() for name in ("truncated", "terminated", "done")}
    assert said | {"is_init": info["is_init"].flatten().tolist()} == expected_marks(twin.model, drawn)
    return drawn


# Any history -----------------------------------------------------------------------------------------

left_and_right = st.tuples(st.integers(0, 3), st.integers(0, 3))
signals = st.sampled_from(SIGNALS)
seeds = st.integers(0, 2**32)


@lengths
@pytest.mark.parametrize("again", [True, False])
def test_slices_are_legal(again: bool, examples: int) -> None:
    @many(examples)
    @given(histories(), rules, st.just((0, 0)) | left_and_right, signals, seeds)
    def run(history: History, rule: Slicing, span: tuple[int, int], signal: Any, seed: int) -> None:
        span = (min(span[0], rule.slice_len - 1), min(span[1], rule.slice_len - 1)) if again else (0, 0)
        rule = replace(rule, span=span)
        options = arguments(rule, signal)
        torch.manual_seed(seed)

        def make(_: int) -> Sampler:
            return SliceSampler(**options) if again else SliceSamplerWithoutReplacement(**without_weights(options))

        def check(twin: Twin) -> None:
            drawn = check_drawn(twin, rule, signal)
            assert len(drawn) == 6 or not again or not twin.legal(signal, rule)

        run_through(history, make, check)

    run()


@lengths
def test_starts_have_the_weight_of_their_priority(examples: int) -> None:
    """Starts are drawn with exactly the weights of the model: they are compared, and nothing is drawn at random."""

    @many(examples)
    @given(histories(), rules, st.integers(0, 2), signals, seeds)
    def run(history: History, rule: Slicing, right: int, signal: Any, seed: int) -> None:
        rule = replace(rule, span=(0, min(right, rule.slice_len - 1)), weight="episode", by_priority=True)
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)

        def make(capacity: int) -> Sampler:
            options = arguments(rule, signal)
            del options["weight"]
            return PrioritizedSliceSampler(capacity, 0.6, 0.4, dtype=torch.float64, **options)

        def check(twin: Twin) -> None:
            drawn, sampler, storage = check_drawn(twin, rule, signal), twin.buffer.sampler, twin.buffer.storage
            if not drawn:
                return
            every, starts = sampler._priorities.tree.weights(), sampler._priorities.tree.starts.weights()
            width = storage.shape[1] if storage.ndim > 1 else 1
            expected = torch.zeros_like(every)
            for place in {part[0] for part in twin.legal(signal, rule)}:
                flat = place[0] * width + (place[1] if storage.ndim > 1 else 0)
                expected[flat] = every[flat]
            assert torch.equal(starts, expected)
            places = torch.tensor([place for part in drawn for place in part])
            priorities = torch.rand(len(places), generator=generator) * 5
            twin.buffer.update_priority(places if storage.ndim > 1 else places[:, 0], priorities)

        run_through(history, make, check)

    run()


@lengths
def test_trajectories_come_once_an_epoch(examples: int) -> None:
    """While rows are written, no trajectory comes twice, and all that stay come before the next epoch."""

    @many(examples)
    @given(histories(("extend", "sample")), rules, signals, st.booleans(), st.booleans())
    def run(history: History, rule: Slicing, signal: Any, drop_last: bool, shuffle: bool) -> None:
        rule = replace(rule, weight="episode")
        seen: set[int] = set()
        fewest = 2 if drop_last else 1

        def make(_: int) -> Sampler:
            options = without_weights(arguments(rule, signal))
            return SliceSamplerWithoutReplacement(drop_last=drop_last, shuffle=shuffle, **options)

        def check(twin: Twin) -> None:
            for _ in range(2):
                runs = [run for run in twin.model.runs(signal) if len(run) >= rule.slice_len or not rule.strict_length]
                if len(runs) < fewest:
                    with pytest.raises((RuntimeError, ValueError)):
                        twin.draw(2 * rule.slice_len)
                    return
                members = [frozenset(twin.model.step_at(place).number for place in run) for run in runs]
                owner = {place: steps for run, steps in zip(runs, members, strict=True) for place in run}
                seen.update(step for steps in members if seen & steps for step in steps)  # they have grown
                if sum(not seen & steps for steps in members) < fewest:
                    seen.clear()
                drawn, _ = twin.draw(2 * rule.slice_len)
                assert set(drawn) <= set(twin.legal(signal, rule))
                for part in drawn:
                    assert not seen & owner[part[0]], "a trajectory came twice in an epoch"
                    seen.update(owner[part[0]])
                left = sum(not seen & steps for steps in members)
                assert len(drawn) == 2 or not left
                assert twin.buffer.sampler.ran_out is (left < fewest)
                if left < fewest:
                    seen.clear()

        run_through(history, make, check)

    run()


# The model -------------------------------------------------------------------------------------------

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


def test_ids_that_come_again_beyond_the_cursor_are_two_trajectories() -> None:
    model = RingModel(6)
    model.extend(rows_of([episodes([3, 2, 4], ["nothing"], ids=[0, 1])], 8))
    assert [len(run) for run in model.runs("ids")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Slicing(2), {(slot, 2): Fraction(1, 4) for slot in range(4)}),
        (Slicing(5), {(0, 5): Fraction(1)}),
        (Slicing(6), {}),
        (Slicing(6, strict_length=False), {(0, 5): Fraction(1)}),
        (Slicing(4, anchor="end"), {(1, 4): Fraction(1)}),
        (Slicing(4, anchor="start"), {(0, 4): Fraction(1)}),
        (Slicing(4, span=(0, 1)), {(0, 4): Fraction(1, 3), (1, 4): Fraction(1, 3), (2, 3): Fraction(1, 3)}),
        (Slicing(5, span=(2, 0)), {(0, 3): Fraction(1, 3), (0, 4): Fraction(1, 3), (0, 5): Fraction(1, 3)}),
    ],
)
def test_legal_slices_of_one_trajectory(rule: Slicing, expected: dict[tuple[int, int], Fraction]) -> None:
    assert starts(legal_slices([RUN], rule)) == expected


def test_weights_of_episodes_and_steps() -> None:
    runs = [RUN, ((7,), (8,))]
    by_episode, by_step = (starts(legal_slices(runs, Slicing(2, weight=weight))) for weight in ("episode", "step"))
    assert by_episode == {(slot, 2): Fraction(1, 8) for slot in range(4)} | {(7, 2): Fraction(1, 2)}
    assert by_step == {(slot, 2): Fraction(1, 5) for slot in (0, 1, 2, 3, 7)}


def test_wrong_probabilities_are_found() -> None:
    chances = legal_slices([RUN], Slicing(2))
    even = Counter(dict.fromkeys(chances, 250))
    assert_drawn_as_expected(even, chances)
    skewed = even + Counter({next(iter(chances)): 150})
    foreign = even + Counter({RUN: 1})
    partial = Counter({part: count for part, count in even.items() if part[0] != (2,)})
    for wrong in (skewed, foreign, partial):
        with pytest.raises(AssertionError):
            assert_drawn_as_expected(wrong, chances)


def test_data_of_the_model_have_its_lanes_and_flags() -> None:
    rows = rows_of([episodes([2, 3], ["terminated"]), episodes([4], ["truncated"])], 4)
    data = tensordict_of(rows, ndim=2)
    assert data.shape == (2, 4)
    assert data["number"].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert np.argwhere(data["next", "done"][..., 0].numpy()).tolist() == [[0, 1], [1, 3]]
