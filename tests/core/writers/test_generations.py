"""Generations belong to the rows of a storage, whichever buffer or process writes or reads them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.writers.base import ImmutableDatasetWriter
from rbtool.core.writers.max_value import TensorDictMaxValueWriter
from rbtool.core.writers.round_robin import RoundRobinWriter

ROWS = torch.arange(4)


def steps(*rewards: float) -> TensorDict:
    return TensorDict({"next": {"reward": torch.tensor(rewards)}}, [len(rewards)])


def tracking(storage: LazyTensorStorage) -> ReplayBuffer:
    return ReplayBuffer(storage=storage, writer=RoundRobinWriter(track_generations=True))


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictMaxValueWriter, ImmutableDatasetWriter])
def test_a_writer_that_does_not_track_them_knows_none(writer: Any) -> None:
    storage = TensorStorage(steps(1, 2, 3, 4))
    made = writer()
    made.register_storage(storage)
    assert made.generations_of(ROWS).tolist() == [-1] * 4
    assert made.generations_of(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3)


def test_slots_that_are_not_there_have_none() -> None:
    buffer = tracking(LazyTensorStorage(4))
    buffer.extend(steps(1, 2))
    assert buffer.writer.generations_of(torch.tensor([[0, 3], [4, -1]])).tolist() == [[0, -1], [-1, -1]]
    assert buffer.writer.generations_of(99).item() == -1


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictMaxValueWriter])
def test_other_buffers_of_the_storage_count_on(writer: Any) -> None:
    storage = LazyTensorStorage(4)
    one = tracking(storage)
    one.extend(steps(1, 2))
    other = ReplayBuffer(storage=storage, writer=writer())
    other.extend(steps(5, 6, 7, 8))
    assert one.writer.generations_of(ROWS).tolist() == [1, 1, 0, 0]
    assert other.writer.generations_of(ROWS).tolist() == [-1] * 4
    third = tracking(storage)
    assert third.writer.generations_of(ROWS).tolist() == [1, 1, 0, 0]
    other.empty()
    assert third.writer.generations_of(ROWS).tolist() == [2, 2, 1, 1]


def test_another_writer_goes_on_with_them() -> None:
    buffer = tracking(LazyTensorStorage(4))
    buffer.extend(steps(1, 2))
    buffer.set_writer(RoundRobinWriter())
    buffer.extend(steps(3, 4, 5))
    buffer.set_writer(RoundRobinWriter(track_generations=True))
    assert buffer.writer.generations_of(ROWS).tolist() == [1, 0, 0, 0]
    copy = pickle.loads(pickle.dumps(buffer))
    copy.extend(steps(6))
    assert copy.writer.generations_of(ROWS).tolist() == [1, 1, 0, 0]
    assert buffer.writer.generations_of(ROWS).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("way", ["state", "folder"])
@pytest.mark.parametrize("capacity", [8, 12])
def test_a_loaded_storage_of_several_dimensions_has_them_before_it_is_written(
    tmp_path: Path, way: str, capacity: int
) -> None:
    def buffer(size: int) -> ReplayBuffer:
        storage = LazyTensorStorage(size, ndim=2)
        return ReplayBuffer(storage=storage, dim_extend=0, writer=RoundRobinWriter(track_generations=True))

    saved, loaded, again = buffer(8), buffer(capacity), buffer(capacity)
    saved.extend(TensorDict({"a": torch.arange(12).reshape(6, 2)}, [6, 2]))
    for number, (one, other) in enumerate([(saved, loaded), (loaded, again)]):
        if way == "state":
            other.load_state_dict(one.state_dict())
        else:
            one.dumps(tmp_path / str(number))
            other.loads(tmp_path / str(number))
    for other in (loaded, again):
        generations = dict(zip(other["a"][:, 0].tolist(), other.writer.generations_of(ROWS).tolist(), strict=True))
        assert generations == {4: 0, 6: 0, 8: 1, 10: 1}
