"""TorchRL's collectors fill our buffers of one to three dimensions, as in the examples of its page on collectors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import rbtool

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    collectors = pytest.importorskip("torchrl.collectors")
    envs = pytest.importorskip("torchrl.envs")

N, FRAMES, IDS = 400, 80, ("collector", "traj_ids")
# Before TorchRL 0.11 the names were longer.
Collector = getattr(collectors, "Collector", None) or collectors.SyncDataCollector
MultiSyncCollector = getattr(collectors, "MultiSyncCollector", None) or collectors.MultiSyncDataCollector
make_env = partial(envs.GymEnv, "CartPole-v1", device="cpu")
SETUPS: dict[str, tuple[Any, int, tuple[int, ...]]] = {
    "one environment": (lambda: Collector(make_env(), None, **HOW), 1, (N,)),
    "a batched environment": (lambda: Collector(envs.SerialEnv(4, make_env), None, **HOW), 2, (100, 4)),
    "several processes": (lambda: MultiSyncCollector([make_env] * 2, None, cat_results="stack", **HOW), 2, (200, 2)),
    "several processes of batched ones": (
        lambda: MultiSyncCollector([partial(envs.SerialEnv, 2, make_env)] * 2, None, cat_results="stack", **HOW),
        3,
        (100, 2, 2),
    ),
}
HOW = {"frames_per_batch": FRAMES, "total_frames": 10 * FRAMES}


def collected(make: Any) -> Iterator[Any]:
    collector = make()
    try:
        yield from collector
    finally:
        collector.shutdown()


@pytest.mark.parametrize("name", SETUPS)
def test_slices_are_steps_of_one_trajectory(name: str) -> None:
    make, ndim, shape = SETUPS[name]
    memory = rbtool.ReplayBuffer(
        storage=rbtool.LazyTensorStorage(N, ndim=ndim),
        sampler=rbtool.SliceSampler(num_slices=4, traj_key=IDS),
        batch_size=16,
    )
    for data in collected(make):
        memory.extend(data)
    assert (len(memory), tuple(memory.storage.shape)) == (N, shape)
    for _ in range(20):
        batch = memory.sample().view(4, 4)
        assert bool((batch[IDS].diff(dim=1) == 0).all())
        assert torch.equal(batch["observation"][:, 1:], batch["next", "observation"][:, :-1])


def test_single_transitions_of_flat_data() -> None:
    memory = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(N))
    for data in collected(SETUPS["a batched environment"][0]):
        memory.extend(data.reshape(-1))
    assert (len(memory), memory.sample(32).shape) == (N, (32,))


def test_a_transform_that_flattens_does_so_to_batches() -> None:
    memory = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(N), transform=lambda data: data.reshape(-1))
    for data in collected(SETUPS["a batched environment"][0]):
        memory.extend(data)  # 4 elements of 20 steps
    assert (len(memory), memory.sample(8).shape) == (40, (160,))


def test_a_collector_writes_into_our_buffer_itself() -> None:
    memory = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyTensorStorage(N), batch_size=16)
    collector = Collector(make_env(), None, replay_buffer=memory, **HOW)
    seen = [(data, memory.write_count) for data in collector]
    collector.shutdown()
    assert seen == [(None, count) for count in range(FRAMES, 11 * FRAMES, FRAMES)]
    assert (len(memory), len(memory.sample())) == (N, 16)
