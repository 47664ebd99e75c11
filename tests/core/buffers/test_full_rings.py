"""A full ring that is loaded into a larger storage goes on behind its newest row, with all that belongs to rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.prioritized import TensorDictPrioritizedReplayBuffer
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.checkpointers.episodes import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
)
from rbtool.core.checkpointers.tensor import TensorStorageCheckpointer
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.uniform import SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import LazyStackStorage, ListStorage
from rbtool.core.writers.round_robin import RoundRobinWriter

CHECKPOINTERS = [
    TensorStorageCheckpointer,
    FlatStorageCheckpointer,
    NestedStorageCheckpointer,
    H5StorageCheckpointer,
]


def steps(start: int, count: int) -> TensorDict:
    """Steps of episodes of four."""
    number = torch.arange(start, start + count)
    done = (number % 4 == 3).unsqueeze(1)
    after = {"obs": number.float() + 1, "done": done, "terminated": done, "reward": number.float().unsqueeze(1)}
    return TensorDict(
        {"obs": number.float(), "action": number, "done": torch.zeros_like(done),
         "terminated": torch.zeros_like(done), "next": TensorDict(after, [count])}, [count])  # fmt: skip


def made(capacity: int, kind: Any = TensorDictReplayBuffer, storage: Any = LazyTensorStorage, **more: Any) -> Any:
    return kind(storage=storage(capacity), **more)


def moved(one: Any, other: Any, way: str, path: Path) -> Any:
    if way == "state":
        other.load_state_dict(one.state_dict())
    else:
        one.dumps(path / "saved")
        if way == "TorchRL's":  # which has no hidden folders
            for hidden in [*(path / "saved").rglob(".rbtool")]:
                shutil.rmtree(hidden)
            (path / "saved/buffer_metadata.json").write_text('{"batch_size": null, "consume_after_n_samples": null}')
        other.loads(path / "saved")
    return other


def require_in_time(buffer: Any, written: int) -> None:
    """The buffer holds the last ten of so many steps, and goes on behind them."""
    action = torch.arange(written - 10, written)
    assert torch.equal(buffer[:]["action"], action)
    index = buffer.extend(steps(written, 5))
    assert index.tolist() == [10, 11, 12, 13, 14]
    assert torch.equal(buffer[:]["action"], torch.arange(written - 10, written + 5))
    assert torch.equal(buffer[:]["index"], torch.arange(15))
    assert (len(buffer), buffer.write_count, buffer.writer._cursor) == (15, written + 5, 15)


@pytest.mark.parametrize("checkpointer", CHECKPOINTERS)
@pytest.mark.parametrize("written", [10, 14, 20, 36])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_every_checkpointer(checkpointer: Any, written: int, storage: Any, tmp_path: Path) -> None:
    one, other = (made(size, storage=storage, checkpointer=checkpointer()) for size in (10, 1000))
    for start in range(0, written, 2):
        one.extend(steps(start, 2))
    require_in_time(moved(one, other, "folder", tmp_path), written)


@pytest.mark.parametrize("written", [10, 14])
@pytest.mark.parametrize("way", ["state", "TorchRL's"])
def test_states_and_checkpoints_of_torchrl(way: str, written: int, tmp_path: Path) -> None:
    one, other = made(10), made(20)
    for start in range(0, written, 2):
        one.extend(steps(start, 2))
    require_in_time(moved(one, other, way, tmp_path), written)


@pytest.mark.parametrize("way", ["state", "folder"])
@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
def test_lists(storage: Any, way: str, tmp_path: Path) -> None:
    one, other = made(10, storage=storage), made(20, storage=storage)
    one.extend(steps(0, 10))
    one.extend(steps(10, 4))
    moved(one, other, way, tmp_path)
    other.extend(steps(14, 2))
    found = [other[row] for row in range(12)]
    assert [int(item["action"]) for item in found] == list(range(4, 16))
    assert [int(item["index"]) for item in found] == list(range(12))


def test_a_storage_alone_keeps_its_rows_where_they_were(tmp_path: Path) -> None:
    one, storage = made(10), LazyTensorStorage(30)
    one.extend(steps(0, 10))
    one.extend(steps(10, 4))
    one.storage.dumps(tmp_path / "saved")
    storage.loads(tmp_path / "saved")
    assert torch.equal(storage[:]["action"], one[:]["action"])


@pytest.mark.parametrize("way", ["state", "folder"])
def test_a_ring_in_an_equal_one_stays_as_it_is(way: str, tmp_path: Path) -> None:
    one, other = made(10), made(10)
    one.extend(steps(0, 10))
    one.extend(steps(10, 4))
    moved(one, other, way, tmp_path)
    assert torch.equal(other[:]["action"], one[:]["action"])
    assert other.writer._cursor == 4


@pytest.mark.parametrize("way", ["state", "folder"])
def test_several_lanes(way: str, tmp_path: Path) -> None:
    one, other = (
        ReplayBuffer(storage=LazyTensorStorage(size, ndim=2), sampler=SamplerWithoutReplacement(), batch_size=3)
        for size in (12, 60)
    )
    for start in range(0, 8, 2):
        one.extend(torch.arange(start, start + 2) + 100 * torch.arange(2).unsqueeze(1))
    drawn = one.sample()
    moved(one, other, way, tmp_path)
    assert other[:].tolist() == [list(range(2, 8)), list(range(102, 108))]
    left = torch.cat([other.sample() for _ in range(3)])
    assert sorted([*drawn.tolist(), *left.tolist()]) == sorted(other[:].flatten().tolist())
    other.extend(torch.tensor([[8], [108]]))
    assert other[:].tolist() == [list(range(2, 9)), list(range(102, 109))]


@pytest.mark.parametrize("way", ["state", "folder"])
def test_batches_made_ahead_and_epochs_go_on_with_the_same_rows(way: str, tmp_path: Path) -> None:
    one, other = (made(size, sampler=SamplerWithoutReplacement(), batch_size=2, prefetch=2,
                       generator=torch.Generator().manual_seed(1)) for size in (10, 20))  # fmt: skip
    one.extend(steps(0, 10))
    one.extend(steps(10, 4))
    one.sample()
    moved(one, other, way, tmp_path)
    for _ in range(4):
        batch, expected = other.sample(), one.sample()
        assert torch.equal(batch["action"], expected["action"])
        assert torch.equal(batch["index"], batch["action"] - 4)


@pytest.mark.parametrize("way", ["state", "folder"])
def test_slices_follow_time(way: str, tmp_path: Path) -> None:
    one, other = (made(size, sampler=SliceSampler(slice_len=2), batch_size=40) for size in (10, 20))
    one.extend(steps(0, 10))
    one.extend(steps(10, 4))
    moved(one, other, way, tmp_path).extend(steps(14, 4))
    action = other.sample()["action"].view(-1, 2)
    assert torch.equal(action[:, 1] - action[:, 0], torch.ones(len(action), dtype=torch.int64))
    assert (action[:, 0] // 4 == action[:, 1] // 4).all()


@pytest.mark.parametrize("way", ["state", "folder"])
def test_epochs_of_trajectories_go_on_with_the_same_ones(way: str, tmp_path: Path) -> None:
    one, other = (
        made(size, sampler=SliceSamplerWithoutReplacement(slice_len=2, strict_length=False), batch_size=2)
        for size in (18, 40)
    )
    one.extend(steps(0, 18))
    one.extend(steps(18, 10))  # steps 10 to 27: episodes 2 to 6
    drawn = [int(one.sample()["action"][0]) // 4 for _ in range(2)]
    moved(one, other, way, tmp_path)
    drawn += [int(other.sample()["action"][0]) // 4 for _ in range(3)]
    assert sorted(drawn) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("way", ["state", "folder"])
def test_generations_go_with_their_rows(way: str, tmp_path: Path) -> None:
    one, other = (
        ReplayBuffer(storage=LazyTensorStorage(size), writer=RoundRobinWriter(track_generations=True))
        for size in (4, 8)
    )
    one.extend(torch.arange(4))
    one.extend(torch.arange(4, 6))
    moved(one, other, way, tmp_path)
    assert other[:].tolist() == [2, 3, 4, 5]
    assert other.writer.generations_of(torch.arange(6)).tolist() == [0, 0, 1, 1, -1, -1]


@pytest.mark.parametrize("way", ["state", "folder"])
def test_priorities_go_with_their_elements(way: str, tmp_path: Path) -> None:
    one, other = (
        TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=LazyTensorStorage(size, ndim=2), batch_size=500, dim_extend=0
        )
        for size in (8, 16)
    )
    data = torch.arange(12).reshape(6, 2)
    one.extend(TensorDict({"a": data[:4]}, [4, 2]))
    one.extend(TensorDict({"a": data[4:]}, [2, 2]))
    one.update_priority(torch.tensor([[0, 0], [3, 1]]), torch.tensor([5e6, 1e6]))  # rows 8 and 7
    moved(one, other, way, tmp_path)
    assert set(other.sample()["a"].tolist()) <= {7, 8}
    assert other[:]["a"].flatten().tolist() == list(range(4, 12))
