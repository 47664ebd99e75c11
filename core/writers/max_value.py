"""Keeps the elements that rank highest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from tensordict import is_tensor_collection, is_tensorclass

from ..errors import CorruptDataError, FormatError, MissingKeyError, SchemaError, UsageError
from ..storages import Storage
from .base import Writer, counts_in
from .batches import batch_length
from .folder import counts_of, read_array, read_metadata, write_folder
from .labels import Labels
from .ranking import Ranking

__all__ = ["TensorDictMaxValueWriter"]

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

    in_time: ClassVar[bool] = False

    def __init__(
        self, rank_key: Key | Sequence[str] | None = None, reduction: str = "sum", *, compilable: bool = False
    ) -> None:
        super().__init__(compilable)
        if reduction not in _REDUCTIONS:
            raise UsageError(f"reduction is {reduction!r}, expected one of {', '.join(_REDUCTIONS)}")
        self.rank_key: Key = ("next", "reward") if rank_key is None else _key(rank_key)
        self.reduction = reduction
        self._ranking = Ranking()
        self._unranked = False
        self._labels = Labels()
        self._process = 0

    def register_storage(self, storage: Storage) -> None:
        """Write into this storage from now on; UsageError for one of several dimensions.

        What is in it is ranked at the first write, unless a state that is loaded before says how it ranks.
        """
        if storage is self._storage:
            return
        if storage.ndim > 1:
            raise UsageError(
                f"{type(self).__name__} ranks elements of one dimension, the storage has {storage.ndim}",
                hint="write whole trajectories, as elements of a storage with ndim=1",
            )
        if self._storage is not None:
            self._ranking = Ranking()
            self._cursor = 0
        self._unranked = not len(self._ranking)
        self._storage, self._labels, self._process = storage, Labels(), os.getpid()

    def go_on_behind(self) -> None:
        """Rank what is in the storage at the first write."""
        super().go_on_behind()
        self._ranking, self._unranked = Ranking(), True

    # Writing ---------------------------------------------------------------------------------------

    def add(self, data: Any) -> int | None:
        """Write one element if it ranks high enough; return its index, or None if it stays out."""
        storage, entry = self._own_storage(), self._entry(data)
        if entry.numel() == 1 and self._ranking.turns_down(entry.item(), storage.max_size):
            return None
        with self._ranking.offered(self._ranks(entry, 1), storage.max_size) as offer:
            if not offer.places:
                return None
            (slot,) = offer.places
            storage.set(slot, self._labelled(data, slot))
        self._written(slot, 1)
        return slot

    def extend(self, data: Any) -> torch.Tensor:
        """Write those elements of a batch that rank high enough; return int64 `[n]`, -1 for what stays out.

        An element stays out, too, if a later one of the same batch takes its place.
        """
        storage, count = self._own_storage(), batch_length(data)
        index = torch.full((count,), -1)
        with self._ranking.offered(self._ranks(self._entry(data, batch=True), count), storage.max_size) as offer:
            if not offer.places:
                return index
            slots = torch.tensor(sorted(offer.places))
            chosen = torch.tensor([offer.places[slot] for slot in slots.tolist()])
            whole = torch.equal(chosen, torch.arange(count))  # in which case there is nothing to gather
            storage.set(slots, self._labelled(data if whole else data[chosen], slots))
        index[chosen] = slots
        self._written(slots, offer.accepted)
        return index

    def _own_storage(self) -> Storage:
        storage = self._registered()
        if storage.shared and os.getpid() != self._process:
            raise self._not_shared()
        if self._unranked:
            self._rank_what_is_there(storage)
        return storage

    def _rank_what_is_there(self, storage: Storage) -> None:
        if len(storage):
            there = self._ranks(self._entry(storage.get(slice(None)), batch=True), len(storage))
            with self._ranking.offered(there, storage.max_size):
                pass  # each takes the place it has
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

    def _labelled(self, data: Any, rows: int | torch.Tensor) -> Any:
        return data if is_tensorclass(data) else self._labels.put(data, rows, self._registered())

    def _written(self, index: int | torch.Tensor, count: int) -> None:
        self._cursor = len(self._ranking) % self._registered().max_size
        self._write_count += count
        self._count_generations(torch.as_tensor(index).reshape(-1))
        self._mark_update(index)

    def _empty(self, empty_write_count: bool = True) -> None:
        super()._empty(empty_write_count)
        self._ranking = Ranking()
        self._unranked = False

    # State -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return `_cursor`, `_write_count`, `_rank_key` and `_top_values`: a rank and its place, `[n, 2]`."""
        state = {"_cursor": self._cursor, "_write_count": self._write_count, "_rank_key": self.rank_key}
        return {**state, "_top_values": self._ranking.state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state, its rank key too; SchemaError for one that is not such a writer's."""
        _, write_count = counts_in(state_dict)
        key, values = state_dict.get("_rank_key"), state_dict.get("_top_values")
        if key is None or not isinstance(values, torch.Tensor):
            raise SchemaError(f"a ranking is expected in the state, found {', '.join(map(str, state_dict))}")
        self._take_over(write_count, _key(key), Ranking.of_state(values))

    def dumps(self, path: str | os.PathLike[str]) -> None:
        """Write `metadata.json` and, where something is ranked, `current_top_values.memmap` into the folder `path`."""
        values = self._ranking.state()
        metadata = {
            "cursor": self._cursor,
            "write_count": self._write_count,
            "rank_key": self.rank_key,
            "dtype": str(values.dtype),
            "shape": list(values.shape) if len(values) else [0],
        }
        write_folder(Path(path), metadata, _TOP_VALUES, values)

    def loads(self, path: str | os.PathLike[str]) -> None:
        """Take over what `dumps`, here or in TorchRL, wrote, its rank key too."""
        folder = Path(path)
        metadata = read_metadata(folder)
        if "rank_key" not in metadata:
            raise FormatError(f"{folder} holds no state of a {type(self).__name__}: it has no rank_key")
        _, write_count = counts_of(metadata, folder)
        values = torch.zeros(0, 2)
        if metadata.get("shape") != [0]:
            values = read_array(folder / _TOP_VALUES, metadata.get("dtype"), metadata.get("shape"))
        try:
            key, ranking = _key(metadata["rank_key"]), Ranking.of_state(values)
        except (SchemaError, UsageError) as error:
            raise CorruptDataError(f"{folder} cannot be read: {error}") from error
        self._take_over(write_count, key, ranking)

    def _take_over(self, write_count: int, key: Key, ranking: Ranking) -> None:
        capacity = None if self._storage is None else self._storage.max_size
        if capacity is not None and len(ranking) > capacity:
            raise SchemaError(f"{len(ranking)} elements are ranked in the state; this storage has room for {capacity}")
        self._cursor = len(ranking) % capacity if capacity else len(ranking)
        self._write_count, self.rank_key, self._ranking = write_count, key, ranking
        self._unranked = False

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
