"""Which elements rank highest, and which place each has."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..errors import SchemaError

__all__ = ["Number", "Offer", "Ranking"]

Number: TypeAlias = int | float


@dataclass(frozen=True, slots=True)
class Offer:
    """What came of offering elements: which one has which place now, and how often a place was given.

    `displaced` holds the ranks that these places had before, None for a free one.
    """

    places: dict[int, int]
    accepted: int
    displaced: dict[int, Number | None]


class Ranking:
    """The places 0 to n - 1 and the rank of the element in each, with the lowest at hand.

    Ranks are Python's own numbers: integers of 64 bits keep all of them.
    """

    def __init__(self, ranked: Iterable[tuple[Number, int]] = ()) -> None:
        self._heap = list(ranked)
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def turns_down(self, rank: Number, capacity: int) -> bool:
        """Tell whether an element of this rank would stay out."""
        return len(self._heap) >= capacity and rank <= self._heap[0][0]

    def offer(self, ranks: torch.Tensor, capacity: int) -> Offer:
        """Give places to those of the elements, in their order, that rank high enough.

        An element takes a free place, or else that of the lowest, if its own rank is strictly higher; of equal ones
        the lowest place is taken first.
        """
        heap, offered = self._heap, ranks
        positions: Sequence[int] = range(len(ranks))
        if len(heap) >= capacity and len(ranks) > 1:  # the lowest can only rise: most are turned down at once
            candidates = (ranks > heap[0][0]).nonzero().squeeze(1)
            positions, offered = candidates.tolist(), ranks[candidates]
        places: dict[int, int] = {}
        displaced: dict[int, Number | None] = {}
        accepted = 0
        for position, rank in zip(positions, offered.tolist(), strict=True):
            if len(heap) < capacity:
                slot = len(heap)
                displaced[slot] = None
                heapq.heappush(heap, (rank, slot))
            elif rank > heap[0][0]:
                lowest, slot = heap[0]
                displaced.setdefault(slot, lowest)
                heapq.heapreplace(heap, (rank, slot))
            else:
                continue
            accepted += 1
            places[slot] = position
        return Offer(places, accepted, displaced)

    def take_back(self, offer: Offer) -> None:
        """Have all as it was before the offer that was made last."""
        displaced = offer.displaced
        kept = [(rank, slot) for rank, slot in self._heap if slot not in displaced]
        kept += [(rank, slot) for slot, rank in displaced.items() if rank is not None]
        heapq.heapify(kept)
        self._heap = kept

    def state(self) -> torch.Tensor:
        """Return `[n, 2]`, a rank and its place a row, lowest first: int64 if all ranks are integers, else float64."""
        whole = all(isinstance(rank, int) for rank, _ in self._heap)
        return torch.tensor(sorted(self._heap), dtype=torch.int64 if whole else torch.float64).reshape(-1, 2)

    @classmethod
    def of_state(cls, state: torch.Tensor) -> Ranking:
        """Make what `state` was called on; SchemaError for ranks that are no numbers, and for places with gaps."""
        if state.dim() != 2 or state.shape[1] != 2:
            raise SchemaError(f"the ranking has the shape {list(state.shape)}, expected is [n, 2]")
        ranks, slots = state[:, 0], state[:, 1]
        if not state.is_floating_point():
            ranks = ranks.long()
        elif bool(ranks.isnan().any()):
            raise SchemaError("the ranking holds nan where a rank should be")
        if sorted(slots.tolist()) != list(range(len(slots))):
            raise SchemaError(f"the ranking gives the places {slots.tolist()[:8]}, expected is each from 0 on, once")
        return cls(zip(ranks.tolist(), slots.long().tolist(), strict=True))
