"""Every slice sampler on every kind of ring: each legal slice with its exact probability, and nothing else."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

from rbtool.core.samplers.prioritized_slices import PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.testing.slice_samplers import CONTENTS, SIGNAL_OPTIONS, SITUATIONS, Twin, cut, situation
from rbtool.core.testing.slices import (
    SIGNALS,
    Slice,
    SliceRule,
    assert_drawn_as_expected,
    expected_marks,
    legal_slices,
)

RULES = (
    SliceRule(1),
    SliceRule(2),
    SliceRule(3, strict_length=False),
    SliceRule(3, strict_length=False, weight="step"),
    SliceRule(2, weight="step"),
    SliceRule(3, strict_length=False, span=(2, 1)),
    SliceRule(2, span=(0, 1)),
    SliceRule(2, span=(1, 0), weight="step"),
    SliceRule(3, strict_length=False, anchor="start"),
    SliceRule(3, strict_length=False, anchor="end"),
    SliceRule(2, anchor="end", weight="step"),
)

DRAWS = 1500


def arguments(rule: SliceRule, signal: str) -> dict[str, Any]:
    return {
        "slice_len": rule.slice_len,
        "strict_length": rule.strict_length,
        "span": rule.span,
        "anchor": rule.anchor,
        "weight": rule.weight,
        **SIGNAL_OPTIONS[signal],  # type: ignore[index]
    }


def every_ring() -> list[Any]:
    """Each situation with each of the contents in one and two dimensions; signals and rules take turns."""
    found = []
    for number, (name, contents, ndim) in enumerate(product(SITUATIONS, CONTENTS, (1, 2))):
        for turn in range(2):
            signal, rule = SIGNALS[(number + turn) % len(SIGNALS)], RULES[(3 * number + turn) % len(RULES)]
            found.append(pytest.param(name, contents, ndim, signal, rule, id=f"{name}-{contents}-{ndim}-{turn}"))
    return found


def drawn_from(twin: Twin, legal: dict[Slice, Any], rule: SliceRule) -> Counter[Slice]:
    twin.buffer.set_rng(torch.Generator().manual_seed(7))
    drawn, info = twin.draw(DRAWS * rule.slice_len)
    assert len(drawn) == DRAWS
    said = {name: info["next", name].flatten().tolist() for name in ("truncated", "terminated", "done")}
    assert said | {"is_init": info["is_init"].flatten().tolist()} == expected_marks(twin.model, drawn)
    return Counter(drawn)


@pytest.mark.parametrize(("name", "contents", "ndim", "signal", "rule"), every_ring())
def test_legal_slices_are_drawn_with_their_probability(
    name: str, contents: str, ndim: int, signal: Any, rule: SliceRule
) -> None:
    twin = situation(name, contents, SliceSampler(**arguments(rule, signal)), lanes=ndim, ndim=ndim)
    legal = twin.legal(signal, rule)
    if not legal:
        with pytest.raises(RuntimeError, match="long"):
            twin.draw(rule.slice_len)
        return
    assert_drawn_as_expected(drawn_from(twin, legal, rule), legal)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("signal", SIGNALS)
@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("name", SITUATIONS)
def test_legal_slices_are_drawn_with_their_probability_in_all_combinations(
    name: str, contents: str, signal: Any, rule: SliceRule
) -> None:
    for ndim in (1, 2):
        test_legal_slices_are_drawn_with_their_probability(name, contents, ndim, signal, rule)


# Priorities ------------------------------------------------------------------------------------------


def prioritised(rule: SliceRule, signal: str, ndim: int, **options: Any) -> PrioritizedSliceSampler:
    given = {key: value for key, value in arguments(rule, signal).items() if key != "weight"}
    return PrioritizedSliceSampler(12 * ndim, 0.7, 0.4, **given | options)


def weighted(twin: Twin, signal: Any, rule: SliceRule, priorities: dict[tuple[int, ...], float]) -> dict[Slice, Any]:
    """The exact probabilities where starts are drawn by priority."""
    legal = twin.legal(signal, rule)
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


@pytest.mark.parametrize(("name", "contents", "ndim"), list(product(SITUATIONS, CONTENTS, (1, 2))))
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


@pytest.mark.parametrize(("name", "contents", "ndim"), list(product(SITUATIONS, CONTENTS, (1, 2))))
@pytest.mark.parametrize("strict", [False, True])
def test_an_epoch_visits_each_trajectory_once(name: str, contents: str, ndim: int, strict: bool) -> None:
    rule = SliceRule(2, strict_length=strict)
    given = {key: value for key, value in arguments(rule, "done").items() if key not in {"span", "weight"}}
    twin = situation(name, contents, SliceSamplerWithoutReplacement(**given), lanes=ndim, ndim=ndim)
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
    rule = SliceRule(2, strict_length=False)
    sampler = SliceSamplerWithoutReplacement(slice_len=2, end_key=("next", "done"), strict_length=False)
    twin = situation("wrapped mid-episode", "ragged", sampler)
    sampler._rng = torch.Generator().manual_seed(3)
    drawn = Counter(part for _ in range(2000) for part in twin.draw(2)[0])
    assert_drawn_as_expected(drawn, legal_slices(twin.model.runs("done"), rule))
    assert cut(*sampler.sample(twin.buffer.storage, 2))
