"""The contract of buffers, for those that sample by priority, in step with their writer and out of step."""

from __future__ import annotations

from itertools import product
from typing import Any

from rbtool.core.buffers.prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.testing.buffers import LANES, ROWS, BufferTests, make_class


def suite(buffer: type[ReplayBuffer], storage: type, content: str, ndim: int, sync: bool) -> type[BufferTests]:
    def made(**arguments: Any) -> ReplayBuffer:
        size = {"max_size": ROWS * LANES, "ndim": 2} if ndim == 2 else {"max_size": ROWS}
        return buffer(alpha=0.7, beta=0.5, storage=storage(**size), sync=sync, **arguments)

    name = f"Test{buffer.__name__}Of{storage.__name__}{content.title()}{ndim}D{'' if sync else 'Unsynced'}"
    return make_class(name, made, content=content, ndim=ndim, one_by_one=storage is ListStorage)


COMBINATIONS = [
    *product((PrioritizedReplayBuffer,), (LazyTensorStorage,), ("tensor", "tree"), (1, 2), (True,)),
    *product((TensorDictPrioritizedReplayBuffer,), (LazyTensorStorage,), ("nested",), (1, 2), (True,)),
    (TensorDictPrioritizedReplayBuffer, LazyMemmapStorage, "tensordict", 1, True),
    (PrioritizedReplayBuffer, ListStorage, "tree", 1, True),
    (PrioritizedReplayBuffer, LazyTensorStorage, "tensor", 1, False),
    (TensorDictPrioritizedReplayBuffer, LazyMemmapStorage, "tensordict", 1, False),
]
globals().update({made.__name__: made for made in (suite(*combination) for combination in COMBINATIONS)})
