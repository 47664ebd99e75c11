"""Time batches with relabelled goals next to plain slices with the same number of steps, and next to TorchRL's.

    python benchmarks/hindsight.py [--rows 1000000] [--batch-size 256] [--rounds 500] [--limit 1.5]

Rows have 13 leaves of 790 bytes, as of a goal-conditioned robot, in episodes of 50 steps, in memory: in a
storage that is just full, and in a ring that has wrapped around. One side draws a batch in which 80 % of the steps get
the goals of later steps, with a sparse reward by distance; the other draws slices of 32 steps. The reward function is
included, and also timed by itself. The sides take turns in one process with one torch thread; figures are medians in
microseconds and their ratio. TorchRL is left out if it is not installed. Exits with 1 if the ratio to plain slices is
above the limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

import rbtool

try:
    import torchrl.data as peer
except ImportError:
    peer = None

LENGTH, CHUNK = 50, 10_000


def steps(rows: int) -> TensorDict:
    """Steps of a robot with a goal."""
    end = (torch.arange(rows) % LENGTH == LENGTH - 1).unsqueeze(-1)

    def state() -> dict[str, torch.Tensor]:
        goals = {name: torch.rand(rows, 3, dtype=torch.float64) for name in ("achieved_goal", "desired_goal")}
        return {"observation": torch.rand(rows, 39, dtype=torch.float64), **goals}

    flags = {"done": end, "truncated": end, "terminated": torch.zeros_like(end)}
    after = TensorDict({**state(), "reward": torch.zeros(rows, 1), **flags}, [rows])
    return TensorDict(
        {**state(), "action": torch.rand(rows, 4), "episode": torch.arange(rows) // LENGTH, "next": after}
    )


def reward(rows: Any) -> torch.Tensor:
    """Return 0 where the goal is close, else -1."""
    far = (rows["next", "achieved_goal"] - rows["desired_goal"]).norm(dim=-1, keepdim=True) > 0.05
    return -far.float()


def filled(buffer: Any, rows: int, more: int) -> Any:
    """Fill a buffer of so many rows, and write `more` over the oldest."""
    data = steps(CHUNK).auto_batch_size_(1)
    for start in range(0, rows + more, CHUNK):
        buffer.extend(data.clone().set("episode", data["episode"] + start))
    return buffer


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median microseconds of each."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - started)
    return {name: statistics.median(times[len(times) // 10 :]) * 1e6 for name, times in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--limit", type=float, default=1.5)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows, size, worst = chosen.rows, chosen.batch_size, 0.0
    print(f"{rows:,} rows, batches of {size}")
    for name, more in (("full", 0), ("wrapped", CHUNK)):
        storage = rbtool.LazyTensorStorage(rows)
        goals = {"terminated_fn": False, "achieved_goal_key": ("next", "achieved_goal")}
        ours = filled(rbtool.HERReplayBuffer(reward, storage=storage, batch_size=size, **goals), rows, more)
        sampler = rbtool.SliceSampler(slice_len=32)
        parts = {"writer": rbtool.ImmutableDatasetWriter(), "batch_size": size}
        plain = rbtool.TensorDictReplayBuffer(storage=storage, sampler=sampler, **parts)
        alone = ours.sample()[: int(0.8 * size)]
        calls = {"hindsight": ours.sample, "slices": plain.sample, "the reward alone": lambda rows=alone: reward(rows)}
        if peer is not None:
            arguments = {"storage": peer.LazyTensorStorage(rows), "batch_size": size}
            calls["TorchRL"] = filled(peer.HERReplayBuffer(reward, **arguments), rows, more).sample
        found = in_turns(calls, chosen.rounds)
        ratio = found["hindsight"] / found["slices"]
        worst = max(worst, ratio)
        print(
            f"  {name:8}", *(f"{what} {value:.0f} µs" for what, value in found.items()), f"ratio {ratio:.2f}", sep="  "
        )
    return int(worst > chosen.limit)


if __name__ == "__main__":
    sys.exit(main())
