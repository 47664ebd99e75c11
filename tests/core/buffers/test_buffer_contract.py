"""The contract of buffers, for each kind of buffer, storage, content and number of dimensions."""

from __future__ import annotations

from itertools import product
from typing import Any

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.testing.buffers import CONTENTS, LANES, ROWS, BufferTests, make_class

TENSORDICTS = ("tensordict", "nested")
OF_ROWS = (LazyTensorStorage, LazyMemmapStorage)
OF_ITEMS = (ListStorage, LazyStackStorage, CompressedListStorage)


def suite(buffer: type[ReplayBuffer], storage: type, content: str, ndim: int) -> type[BufferTests]:
    def made(**arguments: Any) -> ReplayBuffer:
        more = {"ndim": 2} if ndim == 2 else {}
        return buffer(storage=storage(ROWS * (LANES if ndim == 2 else 1), **more), **arguments)

    name = f"Test{buffer.__name__}Of{storage.__name__}{content.title()}{ndim}D"
    return make_class(name, made, content=content, ndim=ndim, one_by_one=storage in OF_ITEMS)


COMBINATIONS = [
    *product((ReplayBuffer,), OF_ROWS, CONTENTS, (1, 2)),
    *product((TensorDictReplayBuffer,), OF_ROWS, TENSORDICTS, (1, 2)),
    *((ReplayBuffer, ListStorage, content, 1) for content in CONTENTS),
    *((ReplayBuffer, CompressedListStorage, content, 1) for content in ("tensor", *TENSORDICTS)),
    *(
        (buffer, storage, content, 1)
        for buffer in (TensorDictReplayBuffer,)
        for storage in OF_ITEMS
        for content in TENSORDICTS
    ),
]
globals().update({made.__name__: made for made in (suite(*combination) for combination in COMBINATIONS)})
