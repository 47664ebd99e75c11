"""The writer of the elements that rank highest."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from tensordict import is_tensor_collection, is_tensorclass

from ..errors import CorruptDataError, FormatError, MissingKeyError, SchemaError, UsageError
from ..storages import Storage
from .base import Writer
from .batches import Labels
from .state import counts_of, read_array, read_metadata, write_folder

__all__ = ["Number", "Offer", "Ranking", "TensorDictMaxValueWriter"]

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


Key: TypeAlias = str | tuple[str, ...]

_TOP_VALUES = "current_top_values.memmap"


class TensorDictMaxValueWriter(Writer):
    """Keeps the `max_size` elements of the highest rank; a new one takes the place of the lowest, if it is higher.

    The rank is the entry `rank_key` of a tensordict, by default `("next", "reward")`; where it has several numbers
    an element, `reduction` makes one of them: "sum", "mean", "median", "max" or "min". An element of equal rank stays
    out, and among equals the one in the lowest place leaves first. What is stored gets its place as `"index"`, except
    tensorclasses and storages whose rows have none; the caller's tensordict is never changed.

    UsageError (a ValueError) for a storage of several dimensions or another reduction; MissingKeyError (a KeyError)
    for data without the rank; SchemaError (a RuntimeError) for a rank that is no number, for data that is no
    tensordict, and for elements of more than one batch dimension. This writer cannot be shared between processes.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool.core.storages import TensorStorage
    >>> storage = TensorStorage(TensorDict({"score": torch.zeros(2)}, [2]))
    >>> writer = TensorDictMaxValueWriter(rank_key="score")
    >>> writer.register_storage(storage)
    >>> writer.extend(TensorDict({"score": torch.tensor([3.0, 1.0, 5.0, 2.0])}, [4]))
    tensor([ 0, -1,  1, -1])
    >>> storage[:]["score"]
    tensor([3., 5.])
    """

    keeps_order: ClassVar[bool] = False

    def __init__(
        self, rank_key: Key | Sequence[str] | None = None, reduction: str = "sum", *, compilable: bool = False
    ) -> None:
        super().__init__(compilable)
        if reduction not in _REDUCTIONS:
            raise UsageError(f"reduction is {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
        self.rank_key: Key = ("next", "reward") if rank_key is None else _key(rank_key)
        self.reduction = reduction
        self._ranking = Ranking()
        self._offer: Offer | None = None
        self._unranked = False
        self._labels = Labels()
        self._process = 0

    def check_storage(self, storage: Storage) -> None:
        """Refuse a storage of several dimensions."""
        if storage.ndim > 1:
            raise UsageError(
                f"{type(self).__name__} ranks elements of one dimension, the storage has {storage.ndim}",
                hint="write whole trajectories, as elements of a storage with ndim=1",
            )

    def on_register(self, storage: Storage, previous: Storage | None) -> None:
        """Rank what is in the storage at the first write, unless a state that was loaded before says how it ranks."""
        if previous is not None:
            self._ranking = Ranking()
            self.cursor = 0
        self._unranked = not len(self._ranking)
        self._labels, self._process = Labels(), os.getpid()

    # Writing ---------------------------------------------------------------------------------------

    def place(self, data: Any, count: int, capacity: int) -> torch.Tensor:
        """Name the places of the elements that rank high enough, -1 for the others.

        An element stays out, too, if a later one of the same batch takes its place.
        """
        self._prepare_ranking()
        offer = self._offer = self._ranking.offer(self._ranks(self._entry(data, batch=True), count), capacity)
        index = torch.full((count,), -1)
        if offer.places:
            index[torch.tensor(list(offer.places.values()))] = torch.tensor(list(offer.places))
        return index

    def place_one(self, data: Any, capacity: int) -> int | None:
        """Name the place of an element that ranks high enough."""
        self._prepare_ranking()
        entry = self._entry(data)
        if entry.numel() == 1 and self._ranking.turns_down(entry.item(), capacity):
            return None
        offer = self._offer = self._ranking.offer(self._ranks(entry, 1), capacity)
        return next(iter(offer.places), None)

    def prepare(self, data: Any, rows: int | range | torch.Tensor) -> Any:
        """Add the places as `"index"`."""
        return data if is_tensorclass(data) else self._labels.put(data, rows, self.storage)

    def on_written(self, rows: Any, capacity: int) -> None:
        """Count the elements, also those that lost their place to a later one of the same batch."""
        offer, self._offer = self._offer, None
        assert offer is not None  # place() made it
        self.cursor = len(self._ranking) % capacity
        self.write_count += offer.accepted - len(offer.places)

    def on_refused(self) -> None:
        """Have the ranking as it was."""
        if self._offer is not None:
            self._ranking.take_back(self._offer)
            self._offer = None

    def _prepare_ranking(self) -> None:
        storage = self.storage
        if storage.shared and os.getpid() != self._process:
            raise self._not_shared()
        if self._unranked:
            if len(storage):
                there = self._ranks(self._entry(storage.get(slice(None)), batch=True), len(storage))
                self._ranking.offer(there, storage.max_size)  # each takes the place it has
            self._unranked = False

    def _not_shared(self) -> SchemaError:
        return SchemaError(
            f"a {type(self).__name__} cannot be shared between processes: each would rank for itself",
            hint="let one process write",
        )

    def _entry(self, data: Any, *, batch: bool = False) -> torch.Tensor:
        """Return the entry that data, one element or a batch, is ranked by."""
        if not is_tensor_collection(data):
            raise SchemaError(f"{type(self).__name__} ranks tensordicts, found a {type(data).__name__}")
        if data.ndim > 1 + batch:
            raise SchemaError(
                f"elements of at most 1 batch dimension are ranked, found the batch size {list(data.batch_size)}"
            )
        found = data.get(self.rank_key, None)
        if not isinstance(found, torch.Tensor):
            raise MissingKeyError(f"the data has no tensor {self.rank_key!r} to rank it by, only {_names(data)}")
        if not found.numel():
            raise SchemaError(f"{self.rank_key!r} has the shape {list(found.shape)}: there is nothing to rank by")
        return found

    def _ranks(self, entry: torch.Tensor, count: int) -> torch.Tensor:
        """Make one number an element, float64 or int64 `[count]`; SchemaError if one of them is none."""
        kind = torch.float64 if entry.is_floating_point() else torch.int64
        values = entry.detach().to("cpu", kind).reshape(count, -1)
        ranks = values[:, 0] if values.shape[1] == 1 else _REDUCTIONS[self.reduction](values)
        if ranks.is_floating_point() and bool(ranks.isnan().any()):
            where = f"of element {int(ranks.isnan().nonzero()[0])} " if count > 1 else ""
            raise SchemaError(f"the rank {where}is nan, expected is a number")
        return ranks

    def reset(self) -> None:
        """Forget the ranking."""
        self._ranking = Ranking()
        self._unranked = False

    # State -----------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return `_rank_key` and `_top_values`: a rank and its place, `[n, 2]`."""
        return {"_rank_key": self.rank_key, "_top_values": self._ranking.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a ranking, and its rank key; SchemaError for one that is not such a writer's."""
        key, values = state.get("_rank_key"), state.get("_top_values")
        if key is None or not isinstance(values, torch.Tensor):
            raise SchemaError(f"a ranking is expected in the state, found {', '.join(map(str, state))}")
        key, ranking = _key(key), Ranking.of_state(values)
        capacity = None if self._storage is None else self._storage.max_size
        if capacity is not None and len(ranking) > capacity:
            raise SchemaError(f"{len(ranking)} elements are ranked in the state; this storage has room for {capacity}")
        self.cursor = len(ranking) % capacity if capacity else len(ranking)
        self.rank_key, self._ranking, self._unranked = key, ranking, False

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write `metadata.json` and, where something is ranked, `current_top_values.memmap`."""
        values = state["_top_values"]
        metadata = {
            "cursor": state["_cursor"],
            "write_count": state["_write_count"],
            "rank_key": state["_rank_key"],
            "dtype": str(values.dtype),
            "shape": list(values.shape) if len(values) else [0],
        }
        write_folder(folder, metadata, _TOP_VALUES, values)

    def read_state(self, folder: Path) -> dict[str, Any]:
        """Read what `write_state`, or TorchRL, wrote."""
        metadata = read_metadata(folder)
        if "rank_key" not in metadata:
            raise FormatError(f"{folder} holds no state of a {type(self).__name__}: it has no rank_key")
        cursor, write_count = counts_of(metadata, folder)
        values = torch.zeros(0, 2)
        if metadata.get("shape") != [0]:
            values = read_array(folder / _TOP_VALUES, metadata.get("dtype"), metadata.get("shape"))
        try:
            key, _ = _key(metadata["rank_key"]), Ranking.of_state(values)
        except (SchemaError, UsageError) as error:
            raise CorruptDataError(f"{folder} cannot be read: {error}") from error
        return {"_cursor": cursor, "_write_count": write_count, "_rank_key": key, "_top_values": values}

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise self._not_shared()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._process = os.getpid()

    def __repr__(self) -> str:
        asked = f"rank_key={self.rank_key!r}, reduction={self.reduction!r}"
        return f"{type(self).__name__}({asked}, ranked={len(self._ranking)})"


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda values: values.sum(1),
    "mean": lambda values: values.double().mean(1),
    "median": lambda values: values.median(1).values,
    "max": lambda values: values.amax(1),
    "min": lambda values: values.amin(1),
}


def _key(key: Any) -> Key:
    """Make a key of what a caller or a file calls one; UsageError for what cannot be a key."""
    if isinstance(key, str):
        return key
    if isinstance(key, Sequence) and key and all(isinstance(part, str) for part in key):
        return key[0] if len(key) == 1 else tuple(key)
    raise UsageError(f"the rank key is {key!r}, expected is a key or a tuple of keys")


def _names(data: Any) -> str:
    return ", ".join(map(str, data.keys(True, True))) or "nothing"
