from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import MissingKeyError
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.writers.round_robin import RoundRobinWriter


def numbers(count: int = 10, **arguments: object) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(count), **arguments)
    buffer.extend(torch.arange(count))
    return buffer


def lanes(**arguments: object) -> ReplayBuffer:
    """Three lanes of four steps, element `10 * lane + step`."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), **arguments)
    buffer.extend(torch.arange(4) + 10 * torch.arange(3).unsqueeze(1))
    return buffer


def test_a_batch_size_has_to_be_known() -> None:
    buffer = numbers()
    with pytest.raises(RuntimeError, match="needs a batch size"):
        buffer.sample()
    with pytest.raises(RuntimeError, match="batch size"):
        next(iter(buffer))
    assert buffer.sample(3).shape == (3,)


def test_another_batch_size_wins_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = numbers(batch_size=4, prefetch=1)
    with pytest.warns(UserWarning, match="a batch of 3 is drawn, the buffer's batch_size is 4"):
        assert buffer.sample(3).shape == (3,)
    monkeypatch.setenv("RL_WARNINGS", "0")
    assert buffer.sample(3).shape == (3,)
    assert buffer.sample(4).shape == (4,)


def test_an_empty_storage_cannot_be_sampled() -> None:
    for storage in (LazyTensorStorage(4), ListStorage(4)):
        with pytest.raises(RuntimeError, match="empty"):
            ReplayBuffer(storage=storage).sample(2)


def test_rows_of_a_storage_that_nothing_was_written_to() -> None:
    with pytest.raises(RuntimeError):
        ReplayBuffer(storage=LazyTensorStorage(4))[:]


def test_info_tells_the_index_and_the_generation() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True))
    buffer.extend(torch.arange(6))
    batch, info = buffer.sample(8, return_info=True)
    assert torch.equal(buffer.storage[info["index"]], batch)
    assert torch.equal(info["index_generation"], (info["index"] < 2).long())


@pytest.mark.parametrize("prefetch", [None, 3])
def test_iteration_covers_an_epoch(prefetch: int | None) -> None:
    buffer = numbers(sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=prefetch)
    for _ in range(2):
        batches = list(buffer)
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(torch.cat(batches).tolist()) == list(range(10))


@pytest.mark.parametrize("prefetch", [None, 3])
def test_iteration_leaves_the_last_batch_out(prefetch: int | None) -> None:
    buffer = numbers(sampler=SamplerWithoutReplacement(drop_last=True), batch_size=4, prefetch=prefetch)
    assert [[len(batch) for batch in buffer] for _ in range(2)] == [[4, 4], [4, 4]]


def test_plain_samples_go_on_epoch_after_epoch() -> None:
    buffer = numbers(sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=2)
    assert [len(buffer.sample()) for _ in range(7)] == [4, 4, 2, 4, 4, 2, 4]


def test_iteration_with_replacement_does_not_end() -> None:
    batches = iter(numbers(batch_size=4))
    assert [len(next(batches)) for _ in range(20)] == [4] * 20


# The edge: TorchRL's next() fails on plain tensors, and copies every time.
def test_next_gives_batches_and_none_at_the_end() -> None:
    buffer = numbers(4, sampler=SamplerWithoutReplacement(shuffle=False), batch_size=2)
    found = [buffer.next() for _ in range(6)]
    assert [None if batch is None else batch.tolist() for batch in found] == [[0, 1], [2, 3], None] * 2


def test_next_clears_the_device() -> None:
    buffer = TensorDictReplayBuffer(storage=TensorStorage(TensorDict({"a": torch.arange(4)}, [4])), batch_size=2)
    assert buffer.next().device is None


def test_names_of_entries() -> None:
    data = TensorDict({"a": torch.arange(3), "next": {"b": torch.arange(3) * 2}}, [3])
    buffer = ReplayBuffer(storage=TensorStorage(data))
    assert buffer["a"].tolist() == [0, 1, 2]
    assert buffer["next", "b"].tolist() == buffer["next"]["b"].tolist() == [0, 2, 4]
    tree = ReplayBuffer(storage=TensorStorage({"a": {"b": torch.arange(3)}}))
    assert tree["a", "b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("key", ["c", ("_data", "a"), ("a", "c"), ("next", "a")])
def test_entries_that_are_not_there_are_named(key: str | tuple[str, ...]) -> None:
    data = TensorDict({"a": torch.arange(3), "next": {"b": torch.arange(3)}}, [3])
    with pytest.raises(MissingKeyError, match="not found"):
        ReplayBuffer(storage=TensorStorage(data))[key]


@pytest.mark.parametrize("index", [10, -11, np.int64(10), torch.tensor([0, 10])])
def test_elements_that_are_not_there(index: object) -> None:
    with pytest.raises(IndexError):
        numbers()[index]


def test_kinds_of_indices() -> None:
    buffer = numbers()
    assert [int(buffer[index]) for index in (3, -1, np.int64(2), torch.tensor(4), (5,))] == [3, 9, 2, 4, 5]
    assert (buffer[20:].tolist(), buffer[np.array([1, 0])].tolist()) == ([], [1, 0])
    assert buffer[...].tolist() == list(range(10))


def test_ints_and_slices_are_views_and_the_rest_is_fresh() -> None:
    buffer = numbers()
    buffer[2:4].fill_(-1)
    buffer[torch.tensor([0, 1])].fill_(-2)
    assert buffer[:].tolist() == [0, 1, -1, -1, *range(4, 10)]


def test_read_all_in_order() -> None:
    assert (numbers().read_all_in_order(3).tolist(), len(numbers().read_all_in_order())) == ([0, 1, 2], 10)


# The edge: with dim_extend above 0, an int fails in TorchRL.
def test_users_see_their_own_layout() -> None:
    buffer = lanes()
    assert (buffer.storage.shape, buffer[:].shape, len(buffer)) == ((4, 3), (3, 4), 12)
    assert buffer[1].tolist() == [10, 11, 12, 13]
    assert buffer[-1:, 1:3].tolist() == [[21, 22]]
    assert buffer[[2, 0]].tolist() == [[20, 21, 22, 23], [0, 1, 2, 3]]
    assert buffer[buffer[:] > 12].tolist() == [13, 20, 21, 22, 23]
    assert int(buffer[2, 3]) == 23


def test_the_layout_without_a_swap() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=0)
    buffer.extend(torch.arange(12).reshape(4, 3))
    assert (buffer[1].tolist(), buffer[:, 1].tolist(), int(buffer[3, 2])) == ([3, 4, 5], [1, 4, 7, 10], 11)


def test_three_dimensions() -> None:
    data = torch.arange(24).reshape(2, 3, 4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(24, ndim=3))
    index = buffer.extend(data)
    assert (buffer.storage.shape, index.shape) == ((4, 3, 2), (24, 3))
    assert torch.equal(buffer[:], data)
    batch, info = buffer.sample(5, return_info=True)
    assert torch.equal(buffer.storage[info["index"]], batch)


def test_a_batch_with_too_few_dimensions_is_named() -> None:
    with pytest.raises(RuntimeError, match="grows along dimension 1"):
        ReplayBuffer(storage=LazyTensorStorage(12, ndim=2)).extend(torch.arange(4))


def test_collation_is_left_out_for_one_element() -> None:
    buffer = ReplayBuffer(storage=ListStorage(4), collate_fn=tuple)
    buffer.extend([[1, 2], [3]])
    assert (buffer[0], buffer[:], buffer[[1]]) == ([1, 2], ([1, 2], [3]), ([3],))


class LooksAtRows(RandomSampler):
    """Draws only rows that are even when it looks."""

    def sample(self, storage, batch_size):  # type: ignore[no-untyped-def]
        even = (storage[:] % 2 == 0).nonzero()[:, 0]
        index, info = super().sample(storage, batch_size)
        return even[index % len(even)], info


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_sampler_that_looks_at_rows_gets_those_it_saw(prefetch: int | None) -> None:
    buffer = numbers(sampler=LooksAtRows(), batch_size=4, prefetch=prefetch)
    seen = []
    for _ in range(5):
        seen.append(buffer.sample())
        buffer[:] = buffer[:] + 1
    assert not (torch.cat(seen) % 2).any()


def test_stats() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2, prefetch=3)
    buffer.extend(torch.arange(6))
    buffer.sample()
    expected = {"size": 6, "write_count": 6, "prefetch_queue_size": 3, "initialized": True}
    assert buffer.stats() == {**expected, "capacity": 8, "utilization": 0.75}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to copy to")
def test_pinning_without_an_accelerator_warns() -> None:
    buffer = numbers(pin_memory=True, batch_size=2)
    with pytest.warns(UserWarning, match="pin_memory=True has no effect"):
        assert buffer.sample().shape == (2,)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that are pinned; an accelerator seems to be there, whose memory "meta" stands in for."""
    found: list[torch.Tensor] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: found.append(tensor) or tensor)
    return found


def test_entries_on_a_device_are_not_pinned(pinned: list[torch.Tensor]) -> None:
    rows = {
        "here": torch.zeros(8),
        "there": torch.zeros(8, device="meta"),
        "in": {"there": torch.zeros(8, device="meta")},
    }
    batch = numbers(pin_memory=True, transform=lambda _: TensorDict(rows, [8]), batch_size=8).sample()
    assert [tensor.device.type for tensor in pinned] == ["cpu"]
    assert batch["there"].device.type == batch["in", "there"].device.type == "meta"
    pinned.clear()
    there = TensorDict({"there": rows["there"]}, [8], device="meta")
    for alone in (lambda _: there, lambda _: {"list": [rows["there"]]}):
        numbers(pin_memory=True, transform=alone, batch_size=8).sample()
    assert not pinned


def test_workers_leave_pinning_to_the_loader(pinned: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = numbers(pin_memory=True, batch_size=2)
    buffer.sample()
    assert len(pinned) == 1
    monkeypatch.setattr("rbtool.core.buffers.replay_buffer.get_worker_info", lambda: "a worker")
    buffer.sample()
    assert len(pinned) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_with_entries_on_the_gpu_are_pinned() -> None:
    data = TensorDict({"a": torch.arange(10)}, [10])
    buffer = TensorDictReplayBuffer(
        storage=TensorStorage(data), pin_memory=True, batch_size=2,
        transform=lambda batch: TensorDict({"a": batch["a"], "b": batch["a"].to("cuda")}, batch.batch_size),
    )  # fmt: skip
    batch = buffer.sample()
    assert batch["a"].is_pinned()
    assert torch.equal(batch["b"].cpu(), batch["a"])
    there = TensorDictReplayBuffer(storage=LazyTensorStorage(10, device="cuda"), pin_memory=True, batch_size=2)
    there.extend(data)
    assert there.sample()["a"].is_cuda


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("prefetch", [None, 2])
def test_batches_are_pinned(prefetch: int | None) -> None:
    data = TensorDict({"a": torch.arange(10)}, [10])
    buffer = TensorDictReplayBuffer(storage=TensorStorage(data), pin_memory=True, batch_size=2, prefetch=prefetch)
    for batch in (buffer.sample(), buffer.sample(), buffer[:], buffer[[1]]):
        assert batch["a"].is_pinned()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_info_lies_where_the_storage_is() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, device="cuda"), batch_size=4)
    buffer.extend(torch.arange(10))
    batch, info = buffer.sample(return_info=True)
    assert batch.device.type == info["index"].device.type == "cuda"
    assert torch.equal(batch, info["index"])
