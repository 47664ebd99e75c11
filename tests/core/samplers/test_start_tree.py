from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rbtool.core.samplers.prioritized import StartTree

SIZE = 37

leaves = st.lists(st.integers(0, SIZE - 1), max_size=12)
deeds = st.lists(
    st.one_of(
        st.tuples(st.just("set"), leaves),
        st.tuples(st.just("same"), leaves),
        st.tuples(st.just("fill"), st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)),
        st.tuples(st.just("allow"), leaves.map(lambda some: sorted(set(some)))),
        st.tuples(st.just("only"), leaves),
        st.tuples(st.just("load"), st.integers(0, SIZE)),
    ),
    max_size=12,
)


@given(deeds, st.integers(0, 2**32), st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None)
def test_both_trees_follow_a_plain_list(found: list[tuple[str, list[int]]], seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree, weights, legal = StartTree(SIZE, dtype), torch.zeros(SIZE, dtype=dtype), torch.zeros(SIZE, dtype=torch.bool)
    for what, where in found:
        if what == "load":
            given_weights = torch.rand(where, generator=generator, dtype=dtype)  # type: ignore[call-overload]
            tree.load(given_weights)
            weights = torch.cat([given_weights, torch.zeros(SIZE - where, dtype=dtype)])  # type: ignore[operator]
        elif what == "fill":
            tree.fill(*where, 0.5)
            weights[slice(*where)] = 0.5
        else:
            index = torch.tensor(where, dtype=torch.int64)
            values, flags = torch.rand(len(where), generator=generator, dtype=dtype), torch.rand(SIZE) < 0.5
            if what == "set":
                tree.set(index, values)
                for leaf, value in zip(where, values, strict=True):
                    weights[leaf] = value
            elif what == "same":
                tree.set(index, 0.25)
                weights[index] = 0.25
            elif what == "allow":
                tree.allow(index, flags[: len(where)])
                legal[index] = flags[: len(where)]
            else:
                tree.allow_only(flags)
                legal = flags
    assert torch.equal(tree.weights(), weights)
    assert torch.equal(tree.starts.weights(), weights.where(legal, 0))
    assert tree.total == pytest.approx(float(weights.where(legal, 0).double().sum()))
    assert tree.maximum == pytest.approx(float(weights.max()))
    assert tree.minimum == pytest.approx(float(weights[weights > 0].min()) if weights.any() else math.inf)


def test_only_legal_starts_are_drawn() -> None:
    tree = StartTree(10, torch.float32)
    tree.fill(0, 10, 2.0)
    tree.allow(torch.tensor([3, 7]), torch.tensor([True, True]))
    index, weights = tree.draw(torch.rand(50, dtype=torch.float64))
    assert (set(index.tolist()), set(weights.tolist())) == ({3, 7}, {2.0})


def test_one_that_grows_remembers_what_is_legal() -> None:
    tree = StartTree(4, torch.float64)
    tree.fill(0, 4, 2.0)
    tree.allow(torch.tensor([1, 3]), torch.tensor([True, True]))
    larger = tree.grown(30)
    assert (larger.capacity, larger.total, larger.dtype) == (30, 4, torch.float64)
    assert larger.weights().tolist() == [2.0] * 4 + [0.0] * 26
    assert set(larger.draw(torch.rand(50, dtype=torch.float64))[0].tolist()) == {1, 3}


def test_a_pickle_forgets_what_is_legal() -> None:
    tree = StartTree(10, torch.float64)
    tree.fill(0, 4, 2.0)
    tree.allow_only(torch.ones(10, dtype=torch.bool))
    again = pickle.loads(pickle.dumps(tree))
    assert (again.weights().tolist(), again.total) == ([2.0] * 4 + [0.0] * 6, 0)
