"""What other processes see of a buffer, and what they may do to it."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage


def in_a_child(act: Callable[..., Any], *arguments: Any, method: str = "fork") -> str:
    """Call a function in another process, and return what it returned or raised, as text."""
    context = multiprocessing.get_context(method)
    found = context.SimpleQueue()
    process = context.Process(target=_report, args=(found, act, *arguments))
    process.start()
    said = found.get()
    process.join()
    return said


def _report(found: Any, act: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        found.put(str(act(*arguments)))
    except Exception as error:
        found.put(f"{type(error).__name__}: {error}")


def extend(buffer: ReplayBuffer, first: int) -> list[int]:
    index = buffer.extend(torch.arange(first, first + 3))
    assert buffer[:][index].tolist() == [first, first + 1, first + 2]
    return index.tolist()


def made(storage: type, **arguments: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=storage(10), **arguments)
    buffer.extend(torch.arange(3))
    return buffer


@pytest.mark.parametrize(
    ("storage", "shared"), [(LazyMemmapStorage, False), (LazyMemmapStorage, True), (LazyTensorStorage, True)]
)
def test_a_forked_child_goes_on_in_the_same_ring(storage: type, shared: bool) -> None:
    buffer = made(storage, shared=shared)
    assert in_a_child(extend, buffer, 100) == "[3, 4, 5]"
    assert buffer[:].tolist() == [0, 1, 2, 100, 101, 102]
    assert in_a_child(extend, buffer, 200) == "[6, 7, 8]"
    assert extend(buffer, 300) == [9, 0, 1]
    assert (len(buffer), buffer.write_count, buffer.writer._cursor) == (10, 12, 2)


# The edge: length and cursor are shared where the rows are not.
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_forked_child_with_rows_of_its_own_leaves_the_parents_alone(storage: type) -> None:
    buffer = made(storage)
    assert in_a_child(extend_tensors, buffer, 100) == "[3, 4, 5]"
    assert (buffer[:].tolist(), len(buffer), buffer.write_count, buffer.writer._cursor) == ([0, 1, 2], 3, 3, 3)
    assert extend_tensors(buffer, 200) == [3, 4, 5]


def extend_tensors(buffer: ReplayBuffer, first: int) -> list[int]:
    return buffer.extend(list(torch.arange(first, first + 3))).tolist()


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_writes_that_nobody_would_see_are_refused(storage: type) -> None:
    buffer = ReplayBuffer(storage=storage(10), shared=True)
    if storage is ListStorage:
        buffer.extend([torch.tensor(1)])
    before = len(buffer)
    said = in_a_child(extend_tensors, buffer, 100)
    assert said.startswith("SchemaError: this process has a private copy of the rows")
    assert (len(buffer), buffer.write_count) == (before, before)


def test_a_shared_buffer_shares_its_next_storage_too() -> None:
    buffer = made(LazyTensorStorage, shared=True)
    buffer.set_storage(LazyTensorStorage(5))
    buffer.extend(torch.arange(1))
    assert in_a_child(extend, buffer, 100) == "[1, 2, 3]"
    assert buffer[:].tolist() == [0, 100, 101, 102]


def test_sharing_after_the_first_write() -> None:
    buffer = made(LazyTensorStorage)
    buffer.share()
    assert in_a_child(extend, buffer, 100) == "[3, 4, 5]"
    assert len(buffer) == 6


@pytest.mark.slow
@pytest.mark.parametrize("storage", [LazyMemmapStorage, LazyTensorStorage])
def test_a_spawned_child_goes_on_in_the_same_ring(storage: type) -> None:
    buffer = made(storage, shared=True)
    assert in_a_child(extend, buffer, 100, method="spawn") == "[3, 4, 5]"
    assert buffer[:].tolist() == [0, 1, 2, 100, 101, 102]
    assert extend(buffer, 200) == [6, 7, 8]


@pytest.mark.parametrize("storage", [ListStorage, LazyTensorStorage, LazyMemmapStorage])
def test_what_cannot_be_passed_on_is_refused(storage: type) -> None:
    buffer = ReplayBuffer(storage=storage(10))
    process = multiprocessing.get_context("spawn").Process(target=extend, args=(buffer, 1))
    with pytest.raises(RuntimeError):
        process.start()


def sample_many(buffer: TensorDictReplayBuffer) -> bool:
    return all(torch.equal(batch["a"], batch["index"]) for batch in (buffer.sample() for _ in range(20)))


def test_a_forked_child_samples() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, prefetch=2)
    buffer.extend(TensorDict({"a": torch.arange(10)}, [10]))
    buffer.sample()
    assert in_a_child(sample_many, buffer) == "True"


def test_a_copy_of_a_shared_buffer_is_shared_by_itself() -> None:
    buffer = made(LazyTensorStorage, shared=True)
    other = pickle.loads(pickle.dumps(buffer))
    assert in_a_child(extend, other, 100) == "[3, 4, 5]"
    assert (other[:].tolist(), buffer[:].tolist()) == ([0, 1, 2, 100, 101, 102], [0, 1, 2])
