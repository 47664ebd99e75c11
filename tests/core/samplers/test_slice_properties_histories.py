"""Every slice sampler through histories of writes, edits and samples, in any order."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rbtool.core.samplers.base import Sampler
from rbtool.core.samplers.prioritized_slices import PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.testing.slice_samplers import SIGNAL_OPTIONS, Twin
from rbtool.core.testing.slices import SIGNALS, Slice, SliceRule, Step, expected_marks, step_lists

EXAMPLES = int(os.environ.get("RBTOOL_SLICE_EXAMPLES", "60"))
ALPHA = 0.6

rules = st.builds(
    SliceRule,
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


def refused(twin: Twin, batch_size: int) -> bool:
    with pytest.raises(RuntimeError):
        twin.draw(batch_size)
    return True


def check_drawn(twin: Twin, rule: SliceRule, signal: Any, slices: int = 6) -> list[Slice]:
    """Draw once, and hold the slices and what is said of them against the model."""
    legal = twin.legal(signal, rule)
    if not legal:
        refused(twin, slices * rule.slice_len)
        return []
    drawn, info = twin.draw(slices * rule.slice_len)
    assert set(drawn) <= set(legal)
    said = {name: info["next", name].flatten().tolist() for name in ("truncated", "terminated", "done")}
    assert said | {"is_init": info["is_init"].flatten().tolist()} == expected_marks(twin.model, drawn)
    return drawn


quick = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
long = settings(max_examples=10 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

# With replacement ------------------------------------------------------------------------------------

left_and_right = st.tuples(st.integers(0, 3), st.integers(0, 3))


def slices_are_legal(
    history: History, rule: SliceRule, span: tuple[int, int], signal: Any, seed: int, again: bool
) -> None:
    left, right = (min(overhang, rule.slice_len - 1) for overhang in span)
    rule = SliceRule(rule.slice_len, rule.strict_length, (left, right) if again else (0, 0), rule.anchor, rule.weight)
    torch.manual_seed(seed)

    kept = {"slice_len": rule.slice_len, "strict_length": rule.strict_length, "anchor": rule.anchor}
    kept |= SIGNAL_OPTIONS[signal]

    def make(_: int) -> Sampler:
        if not again:
            return SliceSamplerWithoutReplacement(**kept)
        return SliceSampler(span=rule.span, weight=rule.weight, **kept)

    def check(twin: Twin) -> None:
        drawn = check_drawn(twin, rule, signal)
        assert len(drawn) in {0, 6} or not again

    run_through(history, make, check)


common = {
    "history": histories(),
    "rule": rules,
    "span": st.just((0, 0)) | left_and_right,
    "signal": st.sampled_from(SIGNALS),
    "seed": st.integers(0, 2**32),
}


@pytest.mark.parametrize("again", [True, False])
@quick
@given(**common)
def test_slices_are_legal(history: History, rule: SliceRule, span: Any, signal: Any, seed: int, again: bool) -> None:
    slices_are_legal(history, rule, span, signal, seed, again)


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False])
@long
@given(**common)
def test_slices_are_legal_at_length(
    history: History, rule: SliceRule, span: Any, signal: Any, seed: int, again: bool
) -> None:
    slices_are_legal(history, rule, span, signal, seed, again)


# By priority -----------------------------------------------------------------------------------------


def starts_are_weighed(history: History, rule: SliceRule, right: int, signal: Any, seed: int) -> None:
    """Hold the weights that starts are drawn by against the model, exactly: no chance has a part in it."""
    rule = SliceRule(rule.slice_len, rule.strict_length, (0, min(right, rule.slice_len - 1)), rule.anchor)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    options = {
        "slice_len": rule.slice_len,
        "strict_length": rule.strict_length,
        "span": rule.span,
        "anchor": rule.anchor,
        **SIGNAL_OPTIONS[signal],
    }

    def make(capacity: int) -> Sampler:
        return PrioritizedSliceSampler(capacity, ALPHA, 0.4, dtype=torch.float64, **options)

    def check(twin: Twin) -> None:
        drawn, sampler, storage = check_drawn(twin, rule, signal), twin.buffer.sampler, twin.buffer.storage
        if not drawn:
            return
        begins = {part[0] for part in twin.legal(signal, rule)}
        every, starts = sampler._priorities.tree.weights(), sampler._priorities.tree.starts.weights()
        width = storage.shape[1] if storage.ndim > 1 else 1
        expected = torch.zeros_like(every)
        for place in begins:
            flat = place[0] * width + (place[1] if storage.ndim > 1 else 0)
            expected[flat] = every[flat]
        assert torch.equal(starts, expected)
        places = torch.tensor([place for part in drawn for place in part])
        twin.buffer.update_priority(
            places if storage.ndim > 1 else places[:, 0], torch.rand(len(places), generator=generator) * 5
        )

    run_through(history, make, check)


by_priority = {**common, "span": st.integers(0, 2)}


@quick
@given(**by_priority)
def test_starts_have_the_weight_of_their_priority(
    history: History, rule: SliceRule, span: int, signal: Any, seed: int
) -> None:
    starts_are_weighed(history, rule, span, signal, seed)


@pytest.mark.slow
@long
@given(**by_priority)
def test_starts_have_the_weight_of_their_priority_at_length(
    history: History, rule: SliceRule, span: int, signal: Any, seed: int
) -> None:
    starts_are_weighed(history, rule, span, signal, seed)


# In epochs -------------------------------------------------------------------------------------------


def trajectories_come_once(history: History, rule: SliceRule, signal: Any, drop_last: bool, shuffle: bool) -> None:
    """Follow epochs while rows are written: nothing comes twice, and what stays comes before the next epoch."""
    rule = SliceRule(rule.slice_len, rule.strict_length, anchor=rule.anchor)
    seen: set[int] = set()
    fewest = 2 if drop_last else 1

    def make(_: int) -> Sampler:
        return SliceSamplerWithoutReplacement(
            slice_len=rule.slice_len,
            strict_length=rule.strict_length,
            anchor=rule.anchor,
            drop_last=drop_last,
            shuffle=shuffle,
            **SIGNAL_OPTIONS[signal],
        )

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


in_epochs = {
    "history": histories(("extend", "sample")),  # no row changes its trajectory once it was written
    "rule": rules,
    "signal": st.sampled_from(SIGNALS),
    "drop_last": st.booleans(),
    "shuffle": st.booleans(),
}


@quick
@given(**in_epochs)
def test_trajectories_come_once_an_epoch(
    history: History, rule: SliceRule, signal: Any, drop_last: bool, shuffle: bool
) -> None:
    trajectories_come_once(history, rule, signal, drop_last, shuffle)


@pytest.mark.slow
@long
@given(**in_epochs)
def test_trajectories_come_once_an_epoch_at_length(
    history: History, rule: SliceRule, signal: Any, drop_last: bool, shuffle: bool
) -> None:
    trajectories_come_once(history, rule, signal, drop_last, shuffle)
