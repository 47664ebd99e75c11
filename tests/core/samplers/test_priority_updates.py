"""Updates of priorities that are checked and set in one compiled call do what those do that are checked one by one."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from rbtool.core.kernels.compiled_trees import CompiledTree
from rbtool.core.samplers.prioritized import Priorities

CAPACITY = 70
FAULTS = ["none", "negative", "infinite", "not a number", "no leaf", "skipped", "unknown", "too heavy", "too many"]


class PlainTree(CompiledTree):
    """A tree that leaves all checks to its caller."""

    def update(self, *arguments: Any) -> None:
        return None


def pair(dtype: torch.dtype, alpha: float, *, within: bool) -> tuple[Priorities, Priorities]:
    def made(kind: type[CompiledTree]) -> Priorities:
        return Priorities(CAPACITY, alpha, 0.0, dtype, within, None, kind)

    return made(CompiledTree), made(PlainTree)


def given(random: np.random.Generator, fault: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw elements, with repetitions, and their priorities, one of which has a fault."""
    count = int(random.integers(1, 40))
    numbers = torch.from_numpy(random.integers(0, 50, count))
    values = torch.from_numpy(random.integers(0, 9, count if random.random() < 0.8 else 1)).to(dtype)
    where, which = int(random.integers(len(values))), int(random.integers(count))
    bad = {"negative": -1e-3, "infinite": torch.inf, "not a number": torch.nan, "too heavy": 3e38}
    if fault in bad:
        values[where] = bad[fault]
    wrong = {"no leaf": CAPACITY, "skipped": -1, "unknown": 60}
    if fault in wrong:
        numbers[which] = wrong[fault]
    return numbers, torch.cat([values, values[:1]]).repeat(2) if fault == "too many" else values


def outcome(priorities: Priorities, *given: torch.Tensor, only_known: bool) -> str:
    try:
        priorities.update(*given, only_known=only_known)
    except Exception as error:  # whatever it is, it is the same
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(("dtype", "alpha"), [(torch.float32, 0.6), (torch.float64, 1.0), (torch.float32, 0.0)])
def test_both_ways_do_the_same(dtype: torch.dtype, alpha: float, within: bool) -> None:
    random = np.random.default_rng(0)
    fast, plain = pair(dtype, alpha, within=within)
    for _ in range(300):
        numbers, values = given(random, str(random.choice(FAULTS)), dtype)
        known = bool(random.random() < 0.7)
        seen = copy.deepcopy((numbers, values))
        assert outcome(fast, numbers, values, only_known=known) == outcome(plain, numbers, values, only_known=known)
        assert torch.equal(numbers, seen[0])
        assert torch.equal(values.nan_to_num(), seen[1].nan_to_num())
        assert torch.equal(fast.tree.weights(), plain.tree.weights())
        assert fast.known == plain.known
        state = plain.state_dict()
        assert all(np.array_equal(value, state[key]) for key, value in fast.state_dict().items())
        sums = [(tree.total, tree.minimum, tree.maximum) for tree in (fast.tree, plain.tree)]
        assert sums[0] == sums[1]


def test_one_call_is_enough_for_what_is_right() -> None:
    fast, _ = pair(torch.float32, 0.6, within=False)
    fast.set_known(50)
    weights = torch.rand(3)
    assert fast.tree.update(torch.tensor([3, 9, 3]), torch.tensor([1.0, 4, 4]), weights, 1e9, 50) == (4.0, 1)
    assert torch.equal(fast.tree.get(torch.tensor([9, 3])), weights[1:])
    for leaf, priority, weight in [(50, 1.0, 1.0), (-1, 1.0, 1.0), (3, -1.0, 1.0), (3, 1.0, 2e9)]:
        before = fast.tree.weights()
        given = torch.tensor([leaf]), torch.tensor([priority]), torch.tensor([weight])
        assert fast.tree.update(*given, 1e9, 50) is None
        assert torch.equal(fast.tree.weights(), before)
