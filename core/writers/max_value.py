"""A writer that keeps the elements with the highest rank."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_tensor_collection, is_tensorclass

from ..errors import CorruptDataError, FormatError, MissingKeyError, SchemaError, UsageError, require_choice
from ..storages.base import Storage
from ..storages.tensor import TensorStorage
from ..storages.write_log import Written
from ..ted.schema import as_key
from ..torchrl_classes import counterpart
from .base import Labels, Writer, counts_of, read_array, read_metadata, write_folder

Number: TypeAlias = int | float


@dataclass(frozen=True, slots=True)
class Offer:
    """The result of `Ranking.offer`.

    Attributes:
        places: for each place that changes, the position of its new element in the batch.
        accepted: how many elements got a place, including those that a later element of the batch has replaced.
        displaced: the previous rank of each changed place, None if it was free; `take_back` restores it.
    """

    places: dict[int, int]
    accepted: int
    displaced: dict[int, Number | None]


class Ranking:
    """A heap of pairs of rank and place, the lowest rank first, for the places 0 to n - 1.

    Ranks are Python numbers: torch and NumPy would convert int64 to float64 when they are mixed, which is not exact.
    """

    def __init__(self, ranked: Iterable[tuple[Number, int]] = ()) -> None:
        self._heap = list(ranked)
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def rejects(self, rank: Number, capacity: int) -> bool:
        """Whether an element of this rank would be rejected."""
        return len(self._heap) >= capacity and rank <= self._heap[0][0]

    def offer(self, ranks: NDArray[Any], capacity: int) -> Offer:
        """Assign places to elements with these ranks, `[n]`, in their order.

        An element gets a free place, or the place of the element with the lowest rank if its own is higher. Among equal
        ranks, the lowest place is replaced first.
        """
        heap = self._heap
        positions: Sequence[int] = range(len(ranks))
        if len(heap) >= capacity and len(ranks) > 1:  # the lowest rank only rises: reject at once what is not above it
            candidates = (ranks > heap[0][0]).nonzero()[0]
            positions, ranks = candidates.tolist(), ranks[candidates]
        places: dict[int, int] = {}
        displaced: dict[int, Number | None] = {}
        accepted = 0
        for position, rank in zip(positions, ranks.tolist(), strict=True):
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
        """Undo the last offer."""
        displaced = offer.displaced
        kept = [(rank, slot) for rank, slot in self._heap if slot not in displaced]
        kept += [(rank, slot) for slot, rank in displaced.items() if rank is not None]
        heapq.heapify(kept)
        self._heap = kept

    def state(self) -> torch.Tensor:
        """Return pairs of rank and place, `[n, 2]`, lowest first: int64 if all ranks are integers, else float64."""
        whole = all(isinstance(rank, int) for rank, _ in self._heap)
        return torch.tensor(sorted(self._heap), dtype=torch.int64 if whole else torch.float64).reshape(-1, 2)

    @classmethod
    def of_state(cls, state: torch.Tensor) -> Ranking:
        """Restore a ranking; SchemaError if a rank is nan, or places are not 0 to n - 1."""
        if state.dim() != 2 or state.shape[1] != 2:
            raise SchemaError(f"the ranking has the shape {list(state.shape)}, expected [n, 2]")
        ranks, slots = state[:, 0], state[:, 1]
        if not state.is_floating_point():
            ranks = ranks.long()
        elif bool(ranks.isnan().any()):
            raise SchemaError("the ranking has a rank that is nan")
        if sorted(slots.tolist()) != list(range(len(slots))):
            raise SchemaError(f"the ranking has the places {slots.tolist()[:8]}, expected each number from 0 on once")
        return cls(zip(ranks.tolist(), slots.long().tolist(), strict=True))


Key: TypeAlias = str | tuple[str, ...]

_TOP_VALUES = "current_top_values.memmap"


class NoRankError(MissingKeyError, AttributeError):
    """Data to be written does not have the entry to rank by."""


@counterpart
class TensorDictMaxValueWriter(Writer):
    """Keeps the elements with the highest ranks, such as the rewards of steps or the returns of trajectories.

    Once the storage is full, a new element replaces the one with the lowest rank if its own is higher; an element of
    equal rank is rejected. Among stored elements of equal rank, the one in the lowest row is replaced first. Elements
    are stored with their row number as `"index"`, except tensorclasses, and except in storages whose rows have no such
    entry; the caller's tensordict is not changed. This writer cannot be shared between processes.

    Args:
        rank_key: the entry to rank by; default `("next", "reward")`.
        reduction: how several numbers of an element become one: `"sum"`, `"mean"`, `"median"`, `"max"` or `"min"`.
        compilable: see `Writer`.

    Raises:
        UsageError: (a ValueError) the reduction is unknown, or the storage has several dimensions.
        NoRankError: (a KeyError and an AttributeError) when written: the data does not have the entry.
        SchemaError: (a RuntimeError) when written: a rank is nan, the data is not a tensordict, or elements have more
            than one batch dimension.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool import TensorStorage
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
        require_choice("reduction", reduction, _REDUCTIONS)
        self.rank_key: Key = ("next", "reward") if rank_key is None else _key(rank_key)
        self.reduction = reduction
        self._ranking = Ranking()
        self._offer: Offer | None = None
        self._unranked = False
        self._seen: Written | None = None
        """The state of the storage's write log when the ranking was last complete; None before the first write."""
        self._labels = Labels()
        self._process = 0

    def check_storage(self, storage: Storage) -> None:
        """Refuse a storage of several dimensions."""
        if storage.ndim > 1:
            raise UsageError(
                f"{type(self).__name__} needs a storage of one dimension, this one has {storage.ndim}",
                hint="write whole trajectories, as elements of a storage with ndim=1",
            )

    def on_register(self, storage: Storage, previous: Storage | None) -> None:
        """Arrange for the stored elements to be ranked at the first write, unless a state was loaded before."""
        if previous is not None:
            self._ranking = Ranking()
            self.cursor = 0
        self._unranked, self._seen = not len(self._ranking), None
        self._labels, self._process = Labels(), os.getpid()

    # Writing ---------------------------------------------------------------------------------------

    def place(self, data: Any, count: int, capacity: int) -> torch.Tensor:
        """Return the places of the elements; -1 if they are rejected, or replaced by a later element of the batch."""
        self._prepare_ranking()
        offer = self._offer = self._ranking.offer(self._ranks(self._entry(data, batch=True), count), capacity)
        index = np.full(count, -1, np.int64)  # for few numbers, NumPy is three times as fast
        if offer.places:
            index[list(offer.places.values())] = list(offer.places)
        return torch.from_numpy(index)

    def place_one(self, data: Any, capacity: int) -> int | None:
        """Return the place of an element; None if it is rejected."""
        self._prepare_ranking()
        entry = self._entry(data)
        if entry.numel() == 1 and self._ranking.rejects(entry.item(), capacity):
            return None
        offer = self._offer = self._ranking.offer(self._ranks(entry, 1), capacity)
        return next(iter(offer.places), None)

    def get_insert_index(self, data: Any) -> int | None:
        """Return the place that `add` would give an element now; None if it would be rejected. Nothing is changed."""
        place = self.place_one(data, self.storage.max_size)
        self.on_refused()
        return place

    def prepare(self, data: Any, rows: int | range | torch.Tensor) -> Any:
        """Add the places as `"index"`, except to tensorclasses."""
        return data if is_tensorclass(data) else self._labels.put(data, rows, self.storage)

    def on_written(self, rows: Any, capacity: int) -> None:
        """Count the accepted elements, including those replaced by a later element of the batch."""
        offer, self._offer = self._offer, None
        assert offer is not None  # `place` set it
        self.cursor = len(self._ranking) % capacity
        self._seen = self.storage.log.now
        if replaced := offer.accepted - len(offer.places):
            self.write_count += replaced

    def on_refused(self) -> None:
        """Restore the ranking."""
        if self._offer is not None:
            self._ranking.take_back(self._offer)
            self._offer = None

    def _prepare_ranking(self) -> None:
        storage = self.storage
        if storage.shared and os.getpid() != self._process:
            raise self._not_shared()
        if self._unranked or self._is_outdated(storage):
            self._ranking = Ranking()
            if len(storage):
                # In order of rows, so that each gets the place it has.
                self._ranking.offer(self._ranks_in(storage), storage.max_size)
            self._unranked, self._seen = False, storage.log.now

    def _ranks_in(self, storage: Storage) -> NDArray[Any]:
        """Return the ranks of all stored elements."""
        if isinstance(storage, TensorStorage):
            return self._ranks(self._entry(storage.read_at(slice(None)), batch=True), len(storage))
        return np.concatenate([self._ranks(self._entry(storage.read_at(row)), 1) for row in range(len(storage))])

    def _is_outdated(self, storage: Storage) -> bool:
        """Return whether ranks of stored elements may have changed since the last write."""
        seen, now = self._seen, storage.log.now
        if seen is None or now == seen:
            return False
        key, changes = as_key(self.rank_key), storage.log.since(seen.irregular)
        if changes is None or now.rows != seen.rows:
            return True
        keys = [change.keys for change in changes]
        return any(some is None or any(one[: len(key)] == key[: len(one)] for one in some) for some in keys)

    def _not_shared(self) -> SchemaError:
        return SchemaError(
            f"a {type(self).__name__} cannot be shared between processes: each would have a ranking of its own",
            hint="let one process write",
        )

    def _entry(self, data: Any, *, batch: bool = False) -> torch.Tensor:
        """Return the rank entry of an element or a batch."""
        if not is_tensor_collection(data):
            raise SchemaError(f"{type(self).__name__} needs tensordicts, found a {type(data).__name__}")
        if data.ndim > 1 + batch:
            raise SchemaError(
                f"elements may have at most 1 batch dimension, found the batch size {list(data.batch_size)}"
            )
        found = data.get(self.rank_key, None)
        if not isinstance(found, torch.Tensor):
            names = ", ".join(map(str, data.keys(True, True))) or "nothing"
            raise NoRankError(f"the data has no tensor {self.rank_key!r} to rank by, only {names}")
        if not found.numel():
            raise SchemaError(f"{self.rank_key!r} has the shape {list(found.shape)}: there is nothing to rank by")
        return found

    def _ranks(self, entry: torch.Tensor, count: int) -> NDArray[Any]:
        """Reduce an entry to one rank for each element, float64 or int64 `[count]`; SchemaError for nan."""
        kind = torch.float64 if entry.is_floating_point() else torch.int64
        values = entry.detach().to("cpu", kind).reshape(count, -1)
        ranks = (values[:, 0] if values.shape[1] == 1 else _REDUCTIONS[self.reduction](values)).numpy()
        if np.isnan(ranks).any():
            where = f"of element {int(np.isnan(ranks).argmax())} " if count > 1 else ""
            raise SchemaError(f"the rank {where}is nan, expected a number")
        return ranks

    def reset(self) -> None:
        """Forget the ranking."""
        self._ranking = Ranking()
        self._unranked, self._seen = False, None

    # State -----------------------------------------------------------------------------------------

    def save_state(self) -> dict[str, Any]:
        """Return `_rank_key`, and `_top_values`: pairs of rank and place, `[n, 2]`."""
        return {"_rank_key": self.rank_key, "_top_values": self._ranking.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a ranking and its rank key; SchemaError for another kind of writer's state."""
        key, values = state.get("_rank_key"), state.get("_top_values")
        if key is None or not isinstance(values, torch.Tensor):
            raise SchemaError(f"expected a ranking in the state, found {', '.join(map(str, state))}")
        key, ranking = _key(key), Ranking.of_state(values)
        capacity = None if self._storage is None else self._storage.max_size
        if capacity is not None and len(ranking) > capacity:
            raise SchemaError(f"the state ranks {len(ranking)} elements, but this storage has room for {capacity}")
        self.cursor = len(ranking) % capacity if capacity else len(ranking)
        self.rank_key, self._ranking, self._unranked = key, ranking, False
        self._seen = None if self._storage is None else self._storage.log.now  # rows that are loaded later are ranked

    def write_state(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Write `metadata.json` and, unless the ranking is empty, `current_top_values.memmap`."""
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
        """Read a state written by `write_state` or by TorchRL."""
        metadata = read_metadata(folder)
        if "rank_key" not in metadata:
            raise FormatError(f"{folder} does not hold the state of a {type(self).__name__}: there is no rank_key")
        state, values = counts_of(metadata, folder), torch.zeros(0, 2)
        if metadata.get("shape") != [0]:
            values = read_array(folder / _TOP_VALUES, metadata.get("dtype"), metadata.get("shape"))
        try:
            key, _ = _key(metadata["rank_key"]), Ranking.of_state(values)
        except (SchemaError, UsageError) as error:
            raise CorruptDataError(f"{folder} cannot be read: {error}") from error
        return state | {"_rank_key": key, "_top_values": values}

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise self._not_shared()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._process = os.getpid()

    def __repr__(self) -> str:
        arguments = f"rank_key={self.rank_key!r}, reduction={self.reduction!r}"
        return f"{type(self).__name__}({arguments}, ranked={len(self._ranking)})"


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda values: values.sum(1),
    "mean": lambda values: values.double().mean(1),
    "median": lambda values: values.median(1).values,
    "max": lambda values: values.amax(1),
    "min": lambda values: values.amin(1),
}


def _key(key: Any) -> Key:
    """Return a key as a string, or as a tuple of several strings; UsageError for anything else."""
    if isinstance(key, str):
        return key
    if isinstance(key, Sequence) and key and all(isinstance(part, str) for part in key):
        return key[0] if len(key) == 1 else tuple(key)
    raise UsageError(f"the rank key is {key!r}, expected a key or a tuple of keys")
