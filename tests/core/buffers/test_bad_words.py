"""What cannot be meant is refused in a sentence, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, ListStorage


def rows(count: int) -> TensorDict:
    return TensorDict({"observation": torch.arange(count)}, [count])


@pytest.fixture
def buffer() -> ReplayBuffer:
    made = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    made.extend(rows(4))
    return made


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage, CompressedListStorage])
@pytest.mark.parametrize("size", [2.5, "x", True, 0, -1])
def test_a_capacity_that_is_none(kind, size):
    with pytest.raises(UsageError):
        kind(size)


@pytest.mark.parametrize("size", [2.5, "x", True, 0, -1])
def test_a_batch_size_that_is_none(size):
    with pytest.raises(UsageError, match="batch_size"):
        ReplayBuffer(storage=LazyTensorStorage(10), batch_size=size)


def test_nothing_at_all_is_not_written(buffer):
    with pytest.raises(SchemaError, match="forget to return"):
        buffer.extend(None)
    assert (len(buffer), buffer.write_count) == (4, 4)


def test_a_device_without_bytes(buffer):
    with pytest.raises(SchemaError, match="meta"):
        buffer.extend(rows(2).to("meta"))
    assert (len(buffer), buffer.write_count) == (4, 4)


@pytest.mark.parametrize(
    "damage",
    [
        {"_batch_size": "x"}, {"_batch_size": True}, {"_storage": {"bogus": 1}}, {"_rng": 3},
        {"_prefetch_state": {"a": 1}}, {"_writer": None},
    ],
    ids=lambda damage: next(iter(damage)),
)  # fmt: skip
def test_a_damaged_state_changes_nothing(buffer, damage):
    with pytest.raises((SchemaError, UsageError)):
        buffer.load_state_dict({**buffer.state_dict(), **damage})
    assert (len(buffer), buffer.batch_size, buffer[:]["observation"].tolist()) == (4, 2, [0, 1, 2, 3])


def test_no_state_at_all(buffer):
    with pytest.raises(SchemaError, match="_storage"):
        buffer.load_state_dict({"a": 1})
