from __future__ import annotations

import contextlib
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from rbtool.core.preprocess.units import RandomState, mixed_seed, preserved_generators, seed_generators


def drawn() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.standard_normal(3).tolist()  # noqa: NPY002


def test_neighbours_have_nothing_in_common() -> None:
    bits = [mixed_seed(seed, number) for seed in range(-20, 20) for number in range(-1, 200)]
    assert len(set(bits)) == len(bits)
    assert all(0 <= value < 2**64 for value in bits)
    flips = [(one ^ other).bit_count() for one, other in pairwise(bits)]
    assert 30 < sum(flips) / len(flips) < 34
    assert min(flips) > 8


def test_the_mixture_is_fixed() -> None:
    assert [mixed_seed(0, 0), mixed_seed(0, 1)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
    ]  # the first outputs of SplitMix64


def test_the_same_bits_give_the_same_numbers() -> None:
    with preserved_generators():
        seed_generators(mixed_seed(7, 0))
        one = drawn()
        drawn()
        seed_generators(mixed_seed(7, 0))
        assert drawn() == one
        seed_generators(mixed_seed(8, 0))
        assert all(new != old for new, old in zip(drawn(), one, strict=True))


def test_generators_that_were_borrowed_go_on_as_before() -> None:
    with preserved_generators():
        seed_generators(3)
        random.gauss(0, 1)  # keeps a second number back
        state = RandomState()
        expected = drawn()
        state.restore()
        with contextlib.suppress(ZeroDivisionError), preserved_generators():
            seed_generators(4)
            raise ZeroDivisionError(drawn())
        assert drawn() == expected


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1),
        lambda: random.random(),
        lambda: np.random.rand(),  # noqa: NPY002
        lambda: np.random.randn(),  # noqa: NPY002
        lambda: torch.manual_seed(1),
        lambda: torch.nn.functional.dropout(torch.ones(4)),
    ],
)
def test_any_draw_is_noticed(draw: Any) -> None:
    with preserved_generators():
        state = RandomState()
        np.random.default_rng(0).random()
        torch.rand(1, generator=torch.Generator())
        assert not state.changed()
        draw()
        assert state.changed()
