"""Random orders of which any part is computed by itself, and the parts of them that ranks get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..samplers.uniform import permutation, seed_of

Numbers: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]

_LISTED = 1 << 20
"""Up to so many numbers the order is a list, which is faster, and all orders of few numbers are equally likely."""

_ROUNDS = 6  # an even number
_ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_SHIFT = np.uint64(32)


class KeyedOrder:
    """A random order of the numbers below `size`; equal keys give equal orders.

    Beyond 2^20 numbers it is a permutation that is computed for the places that are asked for: a Feistel network on
    pairs of numbers below `a` and `b`, where `a * b` is little more than `size`, repeated for results that are too
    large (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). No process makes a list.
    """

    def __init__(self, size: int, key: int) -> None:
        self._size = size
        self._list: Numbers | None = None
        if size <= _LISTED:
            self._list = permutation(size, torch.Generator().manual_seed(key))
            return
        self._high = int(np.sqrt(size)) + 1
        self._low = -(-size // self._high)
        self._keys = [np.uint64(seed_of(key, number)) for number in range(_ROUNDS)]

    def at(self, places: Numbers) -> Numbers:
        """Return the numbers at these places, int64 `[n]`."""
        if self._list is not None:
            return self._list[places]
        found = self._permuted(places.astype(np.uint64))
        while len(outside := np.flatnonzero(found >= self._size)):
            found[outside] = self._permuted(found[outside])
        return found.astype(np.int64)

    def _permuted(self, words: _Words) -> _Words:
        sizes = np.uint64(self._high), np.uint64(self._low)
        one, other = np.divmod(words, sizes[1])
        for number, key in enumerate(self._keys):
            mixed = (other ^ key) * _ODD[0]
            mixed ^= mixed >> _SHIFT
            mixed *= _ODD[1]
            one, other = other, ((mixed >> _SHIFT) + one) % sizes[number % 2]
        found: _Words = one * sizes[1] + other
        return found


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of each epoch that is of one of several ranks.

    An epoch is divided into rounds of one batch a rank. All ranks get the same number of batches, and no element twice:
    the elements of the last round are divided among the ranks, so that their last batches are smaller. Where a round of
    its own would leave a rank without any, they are added to the last batches instead, one element to each at most.
    """

    rank: int = 0
    ranks: int = 1

    def batches(self, size: int, each: int, *, drop_last: bool) -> int:
        """Return how many batches of `each` elements this rank gets of `size`; incomplete rounds count or not."""
        own = size // self.ranks
        return own // each if drop_last else -(-own // each)

    def places(self, size: int, each: int, number: int, *, drop_last: bool) -> Numbers:
        """Return the places of a batch in the order of the epoch, int64 `[each]`; in the last round maybe others."""
        start = (number * self.ranks + self.rank) * each
        if drop_last or number < self.batches(size, each, drop_last=False) - 1:
            return np.arange(start, start + each)
        first = number * self.ranks * each
        own, more = divmod(size - first, self.ranks)
        start = first + self.rank * own + min(self.rank, more)
        return np.arange(start, start + own + (self.rank < more))
