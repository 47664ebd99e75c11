"""Calls of a user's function, seeded, with its side effects on this process undone."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import torch

from ..failures import FunctionFailed

__all__ = ["RandomState", "UserFunction", "mixed_seed", "preserved_generators", "seed_generators"]

_MASK = 2**64 - 1


def mixed_seed(seed: int, number: int) -> int:
    """Mix a seed and the number of what it is for into 64 bits, where neighbours have nothing in common.

    SplitMix64 (Steele, Lea and Flood 2014): its finalizer over the seed, then its `number`-th output from there.
    """
    return _finalized(_finalized(seed & _MASK) + (number + 1) * 0x9E3779B97F4A7C15)


def _finalized(bits: int) -> int:
    bits &= _MASK
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK
    return bits ^ (bits >> 31)


def seed_generators(bits: int) -> None:
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
def preserved_generators() -> Iterator[None]:
    """Leave the three generators, however they are used inside, as they were."""
    before = RandomState()
    try:
        yield
    finally:
        before.restore()


class UserFunction:
    """A loaded function. `label` is how people name it."""

    def __init__(self, label: str, function: Callable[[Any], Any]) -> None:
        self.label = label
        self._function = function

    def vmapped(self) -> Self:
        """Return the function of many rows that calls this one of single rows once; each row draws its own numbers."""
        return type(self)(self.label, torch.vmap(self._function, randomness="different"))

    def __call__(self, argument: Any, steps: tuple[int, int]) -> Any:
        """Call it inside `running`; FunctionFailed, with the steps, for whatever it raises but an interruption."""
        process = os.getpid()
        try:
            return self._function(argument)
        except (Exception, SystemExit) as error:
            raise FunctionFailed.of(error, steps) from error
        finally:
            if os.getpid() != process:
                os._exit(0)  # it forked: the child must not go on with the job as if it were this process

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let what it prints go to stderr, and put the global random generators back afterwards."""
        with preserved_generators(), contextlib.redirect_stdout(sys.stderr):
            yield
