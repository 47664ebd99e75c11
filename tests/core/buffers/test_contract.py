"""The contract of buffers, for each kind of buffer, storage, content and number of dimensions."""

from __future__ import annotations

from itertools import product
from typing import Any

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.testing.buffers import CONTENTS, LANES, ROWS, BufferTests, make_class

TENSORDICTS = ("tensordict", "nested")
OF_ROWS = (LazyTensorStorage, LazyMemmapStorage)
OF_ITEMS = (ListStorage, LazyStackStorage, CompressedListStorage)
IN_STEP = {"alpha": 0.7, "beta": 0.5, "sync": True}
OUT_OF_STEP = IN_STEP | {"sync": False}


def suite(
    buffer: type[ReplayBuffer], storage: type, content: str, ndim: int, options: dict[str, Any]
) -> type[BufferTests]:
    size = {"max_size": ROWS * LANES, "ndim": 2} if ndim == 2 else {"max_size": ROWS}

    def made(**arguments: Any) -> ReplayBuffer:
        return buffer(storage=storage(**size), **options, **arguments)

    name = f"Test{buffer.__name__}Of{storage.__name__}{content.title()}{ndim}D"
    name += "" if options.get("sync", True) else "Unsynced"
    return make_class(name, made, content=content, ndim=ndim, one_by_one=storage in OF_ITEMS)


COMBINATIONS = [
    *product((ReplayBuffer,), OF_ROWS, CONTENTS, (1, 2), ({},)),
    *product((TensorDictReplayBuffer,), OF_ROWS, TENSORDICTS, (1, 2), ({},)),
    *product((ReplayBuffer,), (ListStorage,), CONTENTS, (1,), ({},)),
    *product((ReplayBuffer,), (CompressedListStorage,), ("tensor", *TENSORDICTS), (1,), ({},)),
    *product((TensorDictReplayBuffer,), OF_ITEMS, TENSORDICTS, (1,), ({},)),
    *product((PrioritizedReplayBuffer,), (LazyTensorStorage,), ("tensor", "tree"), (1, 2), (IN_STEP,)),
    *product((TensorDictPrioritizedReplayBuffer,), (LazyTensorStorage,), ("nested",), (1, 2), (IN_STEP,)),
    (TensorDictPrioritizedReplayBuffer, LazyMemmapStorage, "tensordict", 1, IN_STEP),
    (PrioritizedReplayBuffer, ListStorage, "tree", 1, IN_STEP),
    (PrioritizedReplayBuffer, LazyTensorStorage, "tensor", 1, OUT_OF_STEP),
    (TensorDictPrioritizedReplayBuffer, LazyMemmapStorage, "tensordict", 1, OUT_OF_STEP),
]
globals().update({made.__name__: made for made in (suite(*combination) for combination in COMBINATIONS)})
