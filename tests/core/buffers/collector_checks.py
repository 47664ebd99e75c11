"""TorchRL's environments and collectors fill the buffers of a library, as in TorchRL's pages.

    python collector_checks.py rbtool|torchrl.data

prints a line for each check; the lines of both libraries are the same.
"""

from __future__ import annotations

import importlib
import logging
import sys
import tempfile
import warnings
from typing import Any

import torch
from tensordict import TensorDict, assert_allclose_td
from torchrl.collectors import Collector, MultiCollector
from torchrl.envs import (
    CatTensors,
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    ParallelEnv,
    RenameTransform,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
library: Any = importlib.import_module(sys.argv[1])
SLICES: dict[str, Any] = {"traj_key": ("collector", "traj_ids"), "truncated_key": None, "strict_length": False}


class Counter(EnvBase):
    """Counts its steps up to 5; all specs are the library's."""

    def __init__(self) -> None:
        super().__init__()
        flag = library.Binary(1, (1,), dtype=torch.bool)
        self.observation_spec = library.Composite(count=library.Unbounded((1,), dtype=torch.int64))
        self.action_spec = library.OneHot(4)
        self.reward_spec = library.Unbounded((1,))
        self.done_spec = library.Composite(done=flag, terminated=flag.clone())

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(self, tensordict: Any = None, **options: Any) -> TensorDict:
        return self._at(torch.zeros(1, dtype=torch.int64))

    def _step(self, tensordict: Any) -> TensorDict:
        return self._at(tensordict["count"] + 1).set("reward", torch.ones(1))

    def _at(self, count: torch.Tensor) -> TensorDict:
        return TensorDict({"count": count, "done": count >= 5, "terminated": count >= 5}, [])


def cart_pole() -> EnvBase:
    environment = GymEnv("CartPole-v1")
    environment.set_seed(0)
    return environment


def one_environment() -> Any:
    buffer = library.ReplayBuffer(
        storage=library.LazyTensorStorage(100), sampler=library.SliceSampler(num_slices=8, **SLICES), batch_size=64
    )
    for rows in Collector(TransformedEnv(cart_pole(), StepCounter()), frames_per_batch=10, total_frames=110):
        buffer.extend(rows)
    torch.manual_seed(1)
    return buffer[:]["next", "step_count"].flatten().tolist(), buffer.sample()["observation"].tolist()


def several_environments() -> Any:
    buffer = library.ReplayBuffer(
        storage=library.LazyTensorStorage(100, ndim=2), sampler=library.SliceSampler(num_slices=8, **SLICES)
    )
    for rows in Collector(SerialEnv(2, cart_pole), frames_per_batch=2, total_frames=202):
        buffer.extend(rows)
    return buffer[:].shape, buffer.sample(16).shape


def checkpoints_while_it_fills() -> Any:
    buffers = [library.ReplayBuffer(storage=library.LazyMemmapStorage(100, ndim=2)) for _ in range(2)]
    for buffer in buffers:
        buffer.storage.checkpointer = library.H5StorageCheckpointer()
    with tempfile.TemporaryDirectory() as folder:
        for rows in Collector(SerialEnv(3, cart_pole), frames_per_batch=22, total_frames=200):
            buffers[0].extend(rows)
            buffers[0].dumps(f"{folder}/buffer")
            buffers[1].loads(f"{folder}/buffer")
            assert_allclose_td(buffers[0][:], buffers[1][:])
    return buffers[0][:].shape, buffers[0]._storage.max_size


def processes(collector: Any, **options: Any) -> Any:
    """Return what a collector of two processes has put into a buffer that it does not write to itself."""
    buffer = library.ReplayBuffer(
        storage=library.LazyTensorStorage(100, ndim=2), sampler=library.SliceSampler(num_slices=4, **SLICES)
    )
    collecting = collector(frames_per_batch=20, total_frames=60, **options)
    for rows in collecting:
        buffer.extend(rows)
    collecting.shutdown()
    return buffer[:].shape, buffer[:]["count"].flatten().tolist(), buffer.sample(16)["count"].shape


def parallel_environments() -> Any:
    check_env_specs(ParallelEnv(2, Counter))
    return processes(lambda **options: Collector(ParallelEnv(2, Counter), **options))


def several_collectors() -> Any:
    return processes(lambda **options: MultiCollector([Counter, Counter], sync=True, cat_results="stack", **options))


def collectors_that_write() -> Any:
    buffer = library.TensorDictReplayBuffer(storage=library.LazyMemmapStorage(100), shared=True, batch_size=8)
    collecting = MultiCollector(
        [Counter, Counter], frames_per_batch=20, total_frames=40, replay_buffer=buffer, sync=True
    )
    for _ in collecting:
        pass
    collecting.shutdown()
    return len(buffer), sorted(buffer[:]["count"].flatten().tolist())


def transforms() -> Any:
    members = [
        library.TensorDictReplayBuffer(
            storage=library.LazyMemmapStorage(10), transform=Compose(RenameTransform([name], ["y"]), DoubleToFloat())
        )
        for name in ("a", "b")
    ]
    both = CatTensors(in_keys=["x", "y"], out_key="xy", del_keys=False)
    ensemble = library.ReplayBufferEnsemble(*members, p=[0.5, 0.5], transform=both)
    for number, name in enumerate("ab"):
        ensemble[number].extend(TensorDict({"x": torch.zeros(10, 1), name: torch.ones(10, 2).double()}, [10]))
    sample = ensemble.sample(10)
    return sample["xy"].tolist(), sample["y"].dtype


if __name__ == "__main__":
    for check in (
        one_environment,
        several_environments,
        checkpoints_while_it_fills,
        parallel_environments,
        several_collectors,
        collectors_that_write,
        transforms,
    ):
        torch.manual_seed(0)
        print(check.__name__, check(), flush=True)
