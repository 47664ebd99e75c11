"""Time how much recording adds to a step, next to Minari's DataCollector, and the CPU share of recording frames.

    python benchmarks/recording.py [--rounds 9] [--episodes 200] [--frames 600] [--rates 60 250]

CartPole is run without recording, recorded by rbtool and collected by Minari, in turns in one process, with the same
seeds. The figures are medians of the microseconds per step in addition to the bare run, in CPU time and in wall time.
The first episode is timed separately, as the start: it creates the folder, and waits until both are on the disk.
Minari's collector needs jax (`minari[create]`); without it only rbtool is timed. Frames are uint8, 84 x 84 and 210 x
160 x 3, from an environment that only returns them; the share is the CPU time of recording a frame divided by the
duration of a step at each rate.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rbtool.core.recording.environments import RecordEpisodes

Times = tuple[float, float]
Measured = tuple[float, float, float]
Wrap = Callable[[gymnasium.Env[Any, Any], Path], gymnasium.Env[Any, Any]]


class Frames(gymnasium.Env[Any, Any]):
    """Returns frames that were made before."""

    def __init__(self, shape: tuple[int, ...], length: int) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(18)
        self._frames = np.random.default_rng(0).integers(0, 256, (16, *shape), np.uint8)
        self._length, self._step = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._step = 0
        return self._frames[0], {}

    def step(self, action: Any) -> Any:
        self._step += 1
        return self._frames[self._step % 16], 0.0, self._step == self._length, False, {}


def run(env: gymnasium.Env[Any, Any], episodes: int) -> tuple[int, Times]:
    """Run episodes of the same actions; return the steps, and CPU and wall time."""
    env.action_space.seed(0)
    steps, started = 0, (time.process_time(), time.perf_counter())
    for number in range(episodes):
        env.reset(seed=number)
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            ended = bool(terminated or truncated)
            steps += 1
    return steps, (time.process_time() - started[0], time.perf_counter() - started[1])


def bare(env: gymnasium.Env[Any, Any], place: Path) -> gymnasium.Env[Any, Any]:
    return env


def ours(env: gymnasium.Env[Any, Any], place: Path) -> gymnasium.Env[Any, Any]:
    return RecordEpisodes(env, place)


def minari(env: gymnasium.Env[Any, Any], place: Path) -> gymnasium.Env[Any, Any]:
    from minari import DataCollector

    collector: gymnasium.Env[Any, Any] = DataCollector(env)
    return collector


def a_step(make: Callable[[], gymnasium.Env[Any, Any]], wrap: Wrap, episodes: int) -> Measured:
    """Return the microseconds per step, CPU and wall time, and the milliseconds of the first episode."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        place = Path(folder) / "recorded"
        env = wrap(make(), place)
        _, (_, start) = run(env, 1)
        steps, (cpu, wall) = run(env, episodes)
        env.close()
        shutil.rmtree(place, ignore_errors=True)
    return 1e6 * cpu / steps, 1e6 * wall / steps, 1e3 * start


def compare(
    make: Callable[[], gymnasium.Env[Any, Any]], wraps: list[Wrap], episodes: int, rounds: int
) -> list[Measured]:
    """Run all sides in turns; return the medians of what each adds to the first."""
    found: list[list[Measured]] = [[] for _ in wraps]
    for _ in range(rounds):
        for times, wrap in zip(found, wraps, strict=True):
            times.append(a_step(make, wrap, episodes))
    first = found[0]
    return [
        (
            statistics.median(one[0] - base[0] for one, base in zip(times, first, strict=True)),
            statistics.median(one[1] - base[1] for one, base in zip(times, first, strict=True)),
            statistics.median(one[2] - base[2] for one, base in zip(times, first, strict=True)),
        )
        for times in found[1:]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--frames", type=int, default=600)
    parser.add_argument("--rates", type=int, nargs="+", default=[60, 250])
    options = parser.parse_args()
    wraps = [bare, ours, minari] if importlib.util.find_spec("jax") else [bare, ours]
    mine, *others = compare(lambda: gymnasium.make("CartPole-v1"), wraps, options.episodes, options.rounds)
    print(f"CartPole, random actions: {mine[0]:.1f} µs of CPU a step, {mine[1]:.1f} µs in all; start {mine[2]:.0f} ms")
    for theirs in others:
        print(f"Minari's DataCollector:   {theirs[0]:.1f} µs of CPU a step, {theirs[1]:.1f} µs in all")
        print(f"ratio:                    {theirs[0] / mine[0]:.1f} of CPU, {theirs[1] / mine[1]:.1f} in all")
    for shape in ((84, 84), (210, 160, 3)):
        [(cpu, wall, _)] = compare(lambda shape=shape: Frames(shape, options.frames), [bare, ours], 1, options.rounds)  # type: ignore[misc]
        shares = ", ".join(f"{cpu * rate / 1e4:.1f} % of {rate} steps a second" for rate in options.rates)
        print(f"frames of {' x '.join(map(str, shape))}: {cpu:.0f} µs of CPU, {wall:.0f} µs in all; {shares}")


if __name__ == "__main__":
    main()
