"""Gives a function the same random numbers whoever calls it, and leaves those of this process as they were."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["RandomState", "borrowed_generators", "mixed", "sow"]

_MASK = 2**64 - 1


def mixed(seed: int, number: int) -> int:
    """Mix a seed and the number of what it is for into 64 bits, where neighbours have nothing in common.

    SplitMix64 (Steele, Lea and Flood 2014): its finalizer over the seed, then its `number`-th output from there.
    """
    return _finalized(_finalized(seed & _MASK) + (number + 1) * 0x9E3779B97F4A7C15)


def _finalized(bits: int) -> int:
    bits &= _MASK
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK
    return bits ^ (bits >> 31)


def sow(bits: int) -> None:
    """Seed the global generators of torch (on the CPU), `random` and NumPy with 64 bits."""
    torch.default_generator.manual_seed(bits)
    random.seed(bits)
    # A user's function may draw from the legacy generator. The other half, for torch takes the lower one and runs
    # the same algorithm.
    np.random.seed(bits >> 32)  # noqa: NPY002


class RandomState:
    """Where the three generators stand now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()  # noqa: NPY002

    def restore(self) -> None:
        """Put the generators back to where they stood."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002

    def changed(self) -> bool:
        """Tell whether anything was drawn or seeded since."""
        if not torch.equal(self._torch, torch.get_rng_state()) or self._python != random.getstate():
            return True
        now: Any = np.random.get_state()  # noqa: NPY002
        return self._numpy[2:] != now[2:] or not np.array_equal(self._numpy[1], now[1])


@contextlib.contextmanager
def borrowed_generators() -> Iterator[None]:
    """Leave the three generators, however they are used inside, as they were."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()
