"""Writes tensordicts in a ring, each row with its own number."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import is_tensor_collection, is_tensorclass

from ..errors import SchemaError
from ..storages import Storage
from .labels import Labels
from .round_robin import RoundRobinWriter

__all__ = ["TensorDictRoundRobinWriter"]


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """Writes like `RoundRobinWriter`, and stores with every tensordict the number of its row as `"index"`.

    `"index"` is int64 of the data's batch size. It goes into what is stored, never into the caller's tensordict.
    Tensorclasses are stored as they are, and so is what goes into a storage whose rows have no `"index"` already.
    SchemaError (a RuntimeError) for what is neither.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from rbtool.core.storages import TensorStorage
    >>> storage = TensorStorage(TensorDict({"action": torch.zeros(4), "index": torch.zeros(4).long()}, [4]))
    >>> writer = TensorDictRoundRobinWriter()
    >>> writer.register_storage(storage)
    >>> writer.extend(TensorDict({"action": torch.ones(3)}, [3]))
    tensor([0, 1, 2])
    >>> storage[:]["index"]
    tensor([0, 1, 2, 0])
    """

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        super().__init__(compilable, track_generations=track_generations)
        self._labels = Labels()

    def on_register(self, storage: Storage, previous: Storage | None) -> None:
        """Look anew whether the rows have a place for their numbers."""
        super().on_register(storage, previous)
        self._labels = Labels()

    def prepare(self, data: Any, rows: int | range | torch.Tensor) -> Any:
        """Add the numbers of the rows."""
        if is_tensorclass(data):
            return data
        if not is_tensor_collection(data):
            raise SchemaError(
                f"{type(self).__name__} writes tensordicts, found a {type(data).__name__}",
                hint="take a RoundRobinWriter",
            )
        return self._labels.put(data, rows, self.storage)
