"""What the reference pages of TorchRL's data package show, with nothing but the import changed."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.samplers.uniform import SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.tensor import TensorStorage


def test_any_object_in_a_list_storage() -> None:
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.add("a string!")
    rb.extend([30, None])
    assert (rb[0], rb[1], rb[2], len(rb)) == ("a string!", 30, None, 3)
    assert rb[:] == ["a string!", 30, None]


def test_tensors_that_are_there_already() -> None:
    container = torch.empty(10, 3, 64, 64, dtype=torch.uint8)
    rb = ReplayBuffer(storage=TensorStorage(container))
    img = torch.randint(255, (3, 64, 64), dtype=torch.uint8)
    index = rb.add(img)
    assert torch.equal(rb[index], img)


def test_tensordicts_in_memory_maps() -> None:
    rb_td = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=1)
    img, label = torch.randint(255, (3, 64, 64), dtype=torch.uint8), torch.randint(100, ())
    rb_td.add(TensorDict({"img": img, "labels": label}, batch_size=[]))
    first_elt, storage, sample = rb_td[0], rb_td[:], rb_td.sample()
    assert torch.equal(first_elt["img"], img)
    assert (first_elt.batch_size, storage.batch_size, sample.batch_size) == ((), (1,), (1,))
    with pytest.warns(UserWarning, match="batch_size is 1"):
        assert torch.equal(rb_td.sample(128)["labels"], label.expand(128))
    data = next(iter(rb_td))
    assert torch.equal(data["img"][0], img)


def test_nests_in_memory_maps() -> None:
    rb_pytree = ReplayBuffer(storage=LazyMemmapStorage(10))
    data = {"a": {"b": torch.randn(3), "c": [torch.zeros(3, 2), (torch.ones(3, 10),)]}}
    rb_pytree.extend(data)
    assert len(rb_pytree) == 3
    assert torch.equal(rb_pytree[:]["a"]["b"], data["a"]["b"])
    assert rb_pytree[1]["a"]["c"][1][0].tolist() == [1.0] * 10
    with pytest.raises(RuntimeError):
        rb_pytree.extend({"a": {"b": torch.randn(3), "c": [torch.zeros(2, 2), (torch.ones(3, 10),)]}})
    assert len(rb_pytree) == 3


def test_a_list_is_a_sequence_and_a_tuple_a_nest() -> None:
    one, two = torch.zeros(3), torch.ones(3)
    as_list, as_tuple = ReplayBuffer(storage=LazyTensorStorage(10)), ReplayBuffer(storage=LazyTensorStorage(10))
    as_list.extend([one, two])
    as_tuple.extend((one, two))
    assert (len(as_list), len(as_tuple), type(as_tuple[:])) == (2, 3, tuple)


def worker(rb: TensorDictReplayBuffer) -> None:
    rb.extend(TensorDict({"a": torch.ones(10)}, [10]))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_buffer_that_another_process_extends(method: str) -> None:
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(21))
    rb.extend(TensorDict({"a": torch.zeros(10)}, [10]))
    proc = multiprocessing.get_context(method).Process(target=worker, args=(rb,))
    proc.start()
    proc.join()
    assert len(rb) == 20
    assert (rb[:]["a"][:10] == 0).all()
    assert (rb[:]["a"][10:20] == 1).all()
    rb.extend(TensorDict({"a": torch.full((2,), 2.0)}, [2]))
    assert rb["a"][[0, 20]].tolist() == [2, 2]


def test_the_state_of_a_buffer_on_disk(tmp_path: Path) -> None:
    def made() -> ReplayBuffer:
        sampler = SamplerWithoutReplacement()
        return ReplayBuffer(storage=LazyMemmapStorage(100, ndim=2), sampler=sampler, batch_size=6)

    rb, rb_test = made(), made()
    for start in range(0, 60, 22):
        steps = torch.arange(start, start + 22) + 1000 * torch.arange(3).unsqueeze(1)
        rb.extend(TensorDict({"steps": steps, "next": {"reward": steps.float().unsqueeze(-1)}}, [3, 22]))
        assert rb.storage.max_size == 102
        rb.dumps(tmp_path / "saved")
        rb_test.loads(tmp_path / "saved")
        assert (rb_test[:] == rb[:]).all()
        assert len(rb_test) == len(rb)
    torch.manual_seed(0)
    expected = [rb.sample() for _ in range(40)]
    torch.manual_seed(0)
    assert all((batch == rb_test.sample()).all() for batch in expected)


def test_interleaved_environments_are_flattened_on_the_way_in_by_the_user() -> None:
    memory = ReplayBuffer(storage=LazyTensorStorage(100), transform=lambda data: data.reshape(-1), batch_size=4)
    memory.extend(TensorDict({"a": torch.zeros(8, 2)}, [8]))
    assert memory.sample().batch_size == (4,)
