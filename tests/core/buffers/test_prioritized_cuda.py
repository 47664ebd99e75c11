"""Where rows and priorities live: on the CPU, on a GPU, and one here and the other there.

The three placements of TorchRL's reference page run on a GPU where there is one; what they show is run on the CPU
everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
from rbtool.core.errors import RbtoolError
from rbtool.core.storages.base import Storage
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.tensor import TensorStorage

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
ROWS, BATCH = 100_000, 65_536
EXPONENTS: dict[str, Any] = {"alpha": 0.7, "beta": 0.5}
CPU, CUDA = "cpu", "cuda"


def made(storage: Storage, **more: Any) -> TensorDictPrioritizedReplayBuffer:
    arguments = {"storage": storage, "batch_size": BATCH, "priority_key": "td_error", **EXPONENTS}
    return TensorDictPrioritizedReplayBuffer(**arguments | more)


def steps(count: int = ROWS, device: str = CPU) -> TensorDict:
    observation, error = torch.randn(count, 32, device=device), torch.ones(count, device=device)
    return TensorDict({"obs": observation, "td_error": error}, batch_size=[count], device=device)


def learn(buffer: TensorDictPrioritizedReplayBuffer, device: str, rows: int = ROWS) -> None:
    """Write, sample, give new priorities and see that they count: nothing with priority 0 is drawn any more."""
    data = steps(rows, device)
    buffer.extend(data)
    sample = buffer.sample()
    assert torch.equal(sample["obs"], data["obs"][sample["index"].to(device)])
    assert torch.equal(sample["priority_weight"], torch.ones_like(sample["priority_weight"]))
    sample["td_error"] = torch.rand(sample.shape, device=device)
    buffer.update_tensordict_priority(sample)
    everything = torch.arange(rows, device=device)
    buffer.update_priority(everything, (everything % 2).float())
    again = buffer.sample()
    assert (again["index"] % 2 == 1).float().mean() > 0.999
    assert {leaf.device.type for leaf in again.values()} == {device}
    assert again["priority_weight"].max() <= 1


def tree_device(buffer: Any) -> str:
    return torch.device(buffer.sampler.device).type


# On the CPU, everywhere ------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler_device", [None, "cpu", torch.device("cpu")])
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_the_example_of_the_reference_on_the_cpu(kind: Any, sampler_device: Any) -> None:
    buffer = made(kind(10_000), sampler_device=sampler_device, batch_size=4096)
    learn(buffer, CPU, 5_000)
    assert tree_device(buffer) == CPU


def test_a_memory_map_of_ones_own_choosing(tmp_path: Path) -> None:
    buffer = made(LazyMemmapStorage(1_000, scratch_dir=tmp_path / "rows"), sampler_device="cpu", batch_size=256)
    learn(buffer, CPU, 500)
    assert (tmp_path / "rows").is_dir()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("kind", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_a_gpu_that_is_not_there_is_named_in_a_sentence(kind: Any) -> None:
    with pytest.raises(RbtoolError, match="cuda"):
        kind(**EXPONENTS, storage=LazyTensorStorage(10), sampler_device="cuda")


@pytest.mark.parametrize("device", ["gpu", "cuda:x", 1.5])
def test_a_device_that_is_none(device: Any) -> None:
    with pytest.raises(RbtoolError, match=r"sampler_device|device"):
        PrioritizedReplayBuffer(**EXPONENTS, storage=LazyTensorStorage(10), sampler_device=device)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_nothing_asks_for_a_gpu(monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    def asked(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("CUDA was started")

    monkeypatch.setattr(torch.cuda, "_lazy_init", asked)
    buffer = made(LazyTensorStorage(1_000), sampler_device=device, batch_size=64)
    learn(buffer, CPU, 500)


# The placements of the reference page ------------------------------------------------------------------


@needs_a_gpu
def test_rows_and_priorities_on_the_gpu() -> None:
    buffer = made(LazyTensorStorage(1_000_000, device=CUDA))
    learn(buffer, CUDA)
    assert tree_device(buffer) == CUDA


@needs_a_gpu
def test_rows_in_a_memory_map_and_priorities_on_the_gpu(tmp_path: Path) -> None:
    buffer = made(LazyMemmapStorage(1_000_000, scratch_dir=tmp_path / "rows"), sampler_device=CUDA)
    learn(buffer, CPU)
    assert tree_device(buffer) == CUDA


@needs_a_gpu
def test_rows_on_the_gpu_and_priorities_on_the_cpu() -> None:
    buffer = made(LazyTensorStorage(1_000_000, device=CUDA), sampler_device=CPU)
    learn(buffer, CUDA)
    assert tree_device(buffer) == CPU


@needs_a_gpu
def test_a_storage_that_takes_the_device_of_its_first_rows() -> None:
    buffer = made(LazyTensorStorage(200_000, device="auto"))
    learn(buffer, CUDA)


@needs_a_gpu
def test_a_filled_storage_on_the_gpu() -> None:
    buffer = PrioritizedReplayBuffer(**EXPONENTS, storage=TensorStorage(torch.arange(100, device=CUDA)), batch_size=32)
    rows, info = buffer.sample(return_info=True)
    assert torch.equal(rows, info["index"])
    assert tree_device(buffer) == CUDA
    error = torch.rand(32, device=CUDA, requires_grad=True)
    buffer.update_priority(info["index"], error * 2)
    buffer.update_priority(info["index"].cpu(), error.cpu())
    buffer.update_priority(info["index"].tolist(), error.tolist())


@needs_a_gpu
@pytest.mark.parametrize("placement", [{"device": CUDA}, {"device": CPU}])
def test_saved_on_one_device_and_loaded_on_the_other(placement: dict[str, str], tmp_path: Path) -> None:
    one = made(LazyTensorStorage(1_000, **placement), batch_size=64)
    learn(one, placement["device"], 500)
    one.dumps(tmp_path / "saved")
    other = made(LazyTensorStorage(1_000, device=CPU if placement["device"] == CUDA else CUDA), batch_size=64)
    other.loads(tmp_path / "saved")
    assert (other.sample()["index"] % 2 == 1).float().mean() > 0.99


@needs_a_gpu
def test_bad_priorities_on_the_gpu_change_nothing() -> None:
    buffer = made(LazyTensorStorage(1_000, device=CUDA), batch_size=64)
    learn(buffer, CUDA, 500)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="priorit"):
            buffer.update_priority(torch.arange(3, device=CUDA), torch.tensor([1.0, bad, 1.0], device=CUDA))
    assert (buffer.sample()["index"] % 2 == 1).all()
