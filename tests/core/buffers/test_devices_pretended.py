"""Buffers with rows on a GPU that is not there: the same batches as on the CPU, there, and no mixture of devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cuda import GPU, Pretended, PretendTensor, pretended_gpu
from tensordict import TensorDict

import rbtool
from rbtool.core.kernels.trees import TorchTree

CPU = torch.device("cpu")
CAPACITY = 60
SLICES: dict[str, Any] = {"slice_len": 3, "traj_key": "episode"}
PRIORITIES = (CAPACITY, 0.7, 0.5)
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": rbtool.RandomSampler,
    "without replacement": rbtool.SamplerWithoutReplacement,
    "slices": lambda: rbtool.SliceSampler(**SLICES),
    "short slices": lambda: rbtool.SliceSampler(slice_len=7, traj_key="episode", strict_length=False, pad_output=True),
    "spans": lambda: rbtool.SliceSampler(num_slices=7, end_key=("next", "done"), span=True),
    "slices without replacement": lambda: rbtool.SliceSamplerWithoutReplacement(**SLICES),
    "prioritized": lambda: rbtool.PrioritizedSampler(*PRIORITIES),
    "prioritized within": lambda: rbtool.PrioritizedSampler(*PRIORITIES, max_priority_within_buffer=True),
    "prioritized by batch": lambda: rbtool.PrioritizedSampler(*PRIORITIES, normalize="batch"),
    "prioritized slices": lambda: rbtool.PrioritizedSliceSampler(*PRIORITIES, **SLICES),
}


@pytest.fixture(autouse=True)
def gpu() -> Iterator[type[Pretended]]:
    with pretended_gpu() as found:
        yield found


def steps(count: int, device: torch.device, first: int = 0) -> TensorDict:
    numbers = torch.arange(first, first + count)
    done = (numbers % 5 == 4)[:, None]
    found = {"obs": numbers.float()[:, None].expand(count, 3).contiguous(), "episode": numbers // 5}
    found |= {"td_error": numbers % 7 + 1.0, "next": {"obs": found["obs"] + 1, "done": done}}
    return TensorDict(found, [count]).to(device)


def buffer(device: torch.device, sampler: str = "random", **more: Any) -> rbtool.TensorDictReplayBuffer:
    generator = torch.Generator().manual_seed(0)
    arguments = {"batch_size": 21, "generator": generator, "priority_key": "td_error"} | more
    storage = rbtool.LazyTensorStorage(CAPACITY, device=device)
    return rbtool.TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), **arguments)


def used(device: torch.device, sampler: str, data: torch.device) -> list[TensorDict]:
    """Write, sample, give priorities and write over the oldest rows, as a training loop does."""
    made, found = buffer(device, sampler), []
    made.extend(steps(35, data))
    for first in (35, 50, 80):
        batch = made.sample()
        assert {leaf.device for leaf in batch.values(True, True)} == {device}
        found.append(batch.clone().cpu())
        batch["td_error"] = batch["obs"][:, 0] % 11 + 1
        made.update_tensordict_priority(batch)
        made.extend(steps(30, data, first))
        made.add(steps(1, data, first + 30)[0])
    return found


@pytest.mark.parametrize("data", [GPU, CPU], ids=str)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_are_those_of_the_cpu(sampler: str, data: torch.device) -> None:
    for there, here in zip(used(GPU, sampler, data), used(CPU, sampler, CPU), strict=True):
        assert set(there.keys(True, True)) == set(here.keys(True, True))
        assert all(torch.allclose(there[key].double(), here[key].double(), rtol=1e-6) for key in here.keys(True, True))


@pytest.mark.parametrize(
    "index", [3, -1, [1, 2], slice(2, 9, 3), slice(None, None, -1), torch.tensor([[4, 2], [0, 1]])]
)
def test_rows_are_named_and_written_by_any_index(index: Any) -> None:
    made = [buffer(device) for device in (GPU, CPU)]
    for one, device in zip(made, (GPU, CPU), strict=True):
        one.extend(steps(30, device))
        one[index] = one[index].clone().apply(lambda leaf: leaf.new_ones(leaf.shape))
    there, here = (one[:]["obs"] for one in made)
    assert there.device == GPU
    assert torch.equal(there.cpu(), here)


def test_an_index_may_be_on_the_gpu() -> None:
    made = buffer(GPU)
    made.extend(steps(30, GPU))
    index = torch.tensor([7, 3]).to(GPU)
    assert made[index]["obs"][:, 0].tolist() == [7, 3]
    with pytest.raises(IndexError):
        made[torch.tensor([7, 99]).to(GPU)]


@pytest.mark.parametrize("place", [GPU, CPU], ids=str)
def test_priorities_may_be_given_from_anywhere(place: torch.device) -> None:
    made = buffer(GPU, "prioritized")
    made.extend(steps(30, GPU))
    numbers, given = torch.tensor([-1, 4, 4]), torch.tensor([9.0, 1.0, 2.0])
    made.update_priority(numbers.to(place), given)
    made.update_priority(numbers, given.to(place))
    made.update_priority(numbers.tolist(), given.tolist())
    assert made.sampler.device == GPU
    assert made.sampler.state_dict()["_sum_tree"][4] == pytest.approx(2**0.7, rel=1e-5)


def test_the_gpu_is_waited_for_a_few_times_a_batch(gpu: type[Pretended]) -> None:
    made = buffer(GPU, "prioritized")
    made.extend(steps(30, GPU))
    made.sample()
    gpu.waits = 0
    batch = made.sample()
    assert gpu.waits <= 2  # the index has to be in range
    made.update_priority(batch["index"], torch.ones(21).to(GPU))
    assert gpu.waits <= 12


def test_a_tree_is_read_at_once(gpu: type[Pretended]) -> None:
    tree = TorchTree(1000, device=GPU)
    tree.fill(0, 500, 2.0)
    gpu.waits = 0
    assert (tree.total, tree.minimum, tree.maximum) == (1000, 2, 2)
    leaves, _ = tree.draw(torch.rand(64, dtype=torch.float64))
    assert gpu.waits == 1
    assert leaves.device == GPU


def test_a_checkpoint_goes_from_one_device_to_the_other(tmp_path: Path) -> None:
    made = buffer(GPU, "prioritized")
    made.extend(steps(80, GPU))
    made.dumps(tmp_path / "saved")
    for device in (CPU, GPU):
        other = buffer(device, "prioritized")
        other.loads(tmp_path / "saved")
        assert torch.equal(other[:]["obs"].cpu(), made[:]["obs"].cpu())
        other.load_state_dict(made.state_dict())
        assert other.sample()["obs"].device == device


@pytest.mark.parametrize("device", [GPU, None], ids=str)
def test_tensors_of_the_gpu_are_not_pinned(device: torch.device | None) -> None:
    data = steps(30, GPU)
    rows = data if device else TensorDict(dict(data.items()), [30])
    made = rbtool.ReplayBuffer(storage=rbtool.TensorStorage(rows, device="auto"), batch_size=4, pin_memory=True)
    assert made.sample()["obs"].device == GPU


@pytest.mark.parametrize("sampler", ["random", "slices", "prioritized"])
def test_a_batch_on_the_gpu_is_filled_again(sampler: str) -> None:
    made, other = buffer(GPU, sampler), buffer(GPU, sampler)
    for one in (made, other):
        one.extend(steps(40, GPU))
    batch, first = made.sample(), other.sample()
    assert made.sample(out=batch) is batch
    again = other.sample()
    assert torch.equal(batch["obs"].cpu(), again["obs"].cpu())
    assert not torch.equal(first["obs"].cpu(), again["obs"].cpu())
    with pytest.raises(RuntimeError, match="on cuda:0"):
        made.sample(out=first.cpu())


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "multi step": lambda: rbtool.MultiStep(0.9, 3),
    "return to go": lambda: rbtool.ReturnToGo(gamma=0.9),
    "normalize": lambda: rbtool.Normalize(loc=torch.ones(3), scale=torch.ones(3) * 2, in_keys=["obs"]),
    "frames": lambda: rbtool.StoredFrameStack(3, in_keys=["frame"]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_compute_on_the_gpu(transform: str) -> None:
    found = []
    for device in (GPU, CPU):
        data = steps(70, device)
        data["frame"] = data["obs"].view(70, 1, 3, 1)
        data["next", "reward"] = data["obs"][:, :1]
        for name in ("terminated", "truncated"):
            data["next", name] = data["next", "done"]
        made = buffer(device, "slices", transform=TRANSFORMS[transform]())
        made.extend(data)
        batch = made.sample()
        assert {leaf.device for leaf in batch.values(True, True)} == {device}
        found.append(batch.cpu())
    there, here = found
    assert set(there.keys(True, True)) == set(here.keys(True, True))
    assert all(torch.allclose(there[key].double(), here[key].double()) for key in here.keys(True, True))


class Stream:
    """Stands in for a CUDA stream, where nothing is asynchronous."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: str) -> None: ...

    def record_event(self) -> str:
        return "done"


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("device", [GPU, CPU], ids=str)
def test_a_loader_brings_rows_of_any_device(device: torch.device, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: not tensor.is_cuda)
    monkeypatch.setattr(PretendTensor, "record_stream", lambda tensor, stream: None)
    made = buffer(device, "without replacement", batch_size=8)
    made.extend(steps(40, device))
    loader = rbtool.TorchLoader(rbtool.torch_dataset(made, seed=0), device="cuda", prefetch=ahead)
    batches = list(loader)
    assert {leaf.device for batch in batches for leaf in batch.values(True, True)} == {GPU}
    assert sorted(torch.cat([batch["obs"][:, 0].cpu() for batch in batches]).tolist()) == list(range(40))


def ensemble(device: torch.device, sampler: str) -> rbtool.ReplayBufferEnsemble:
    members = [buffer(device, sampler, batch_size=6) for _ in range(3)]
    for number, member in enumerate(members):
        member.extend(steps(20 + 9 * number, device))
    return rbtool.ReplayBufferEnsemble(*members, batch_size=18, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("sampler", ["random", "slices", "slices without replacement", "prioritized"])
def test_ensembles_draw_what_they_draw_on_the_cpu(sampler: str) -> None:
    there, here = ensemble(GPU, sampler), ensemble(CPU, sampler)
    for _ in range(4):
        batch = there.sample()
        assert batch["obs"].device == GPU
        assert torch.equal(batch["obs"].cpu(), here.sample()["obs"])


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_goals_are_relabelled_as_on_the_cpu(strategy: str) -> None:
    def sampled(device: torch.device) -> TensorDict:
        data = steps(90, CPU)
        data["goal"], data["next", "goal"] = -data["obs"], -data["obs"]
        data["next", "terminated"], data["next", "truncated"] = data["next", "done"], data["next", "done"].clone()
        data["next", "reward"] = data["obs"][:, :1]
        made = rbtool.HERReplayBuffer(
            storage=rbtool.LazyTensorStorage(CAPACITY, device=device), goal_key="goal", batch_size=16,
            achieved_goal_key=("next", "obs"), strategy=strategy, generator=torch.Generator().manual_seed(3),
            reward_fn=lambda rows: ((rows["goal"] == rows["next", "obs"])[:, :1].float(), rows["next", "done"]),
        )  # fmt: skip
        made.extend(data[:50].to(device))
        made.sample()
        made.extend(data[50:].to(device))
        return made.sample()

    there, here = sampled(GPU), sampled(CPU)
    assert {leaf.device for leaf in there.values(True, True)} == {GPU}
    assert all(torch.equal(there[key].cpu(), here[key]) for key in here.keys(True, True))
