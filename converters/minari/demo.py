"""The datasets that `rbtool demo` records with gymnasium and Minari."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ...core.format import fs
from ...core.progress import Progress

Observation: TypeAlias = np.ndarray[Any, Any]
Policy: TypeAlias = Callable[[Observation, np.random.Generator], Any]


@dataclass(frozen=True, slots=True)
class Recording:
    """A Minari dataset to record: id, environment, number of episodes, policy."""

    id: str
    environment: str
    episodes: int
    policy: Policy
    about: str

    @property
    def name(self) -> str:
        """The short name, used for files."""
        return self.id.split("/")[0]


def _balance(observation: Observation, draw: np.random.Generator) -> Any:
    """Push the cart under the falling pole; half of the actions are random, so that episode lengths differ."""
    wanted = int(observation[2] + 0.3 * observation[3] + 0.1 * observation[1] > 0)
    return np.int64(draw.integers(2) if draw.random() < 0.5 else wanted)


def _swing(observation: Observation, draw: np.random.Generator) -> Any:
    """Swing the pendulum up by its energy, then balance it; with some noise."""
    cosine, sine, speed = map(float, observation)
    if cosine > 0.9:
        torque = -12 * math.atan2(sine, cosine) - 3 * speed
    else:
        torque = 2 * math.copysign(1, speed) * (speed**2 / 6 + 5 * cosine < 5)
    return np.asarray(np.clip([torque + draw.normal(0, 0.3)], -2, 2), np.float32)


RECORDINGS = (
    Recording("cartpole/demo-v0", "CartPole-v1", 40, _balance, "a scripted policy that acts at random half the time"),
    Recording("pendulum/demo-v0", "Pendulum-v1", 12, _swing, "a scripted policy that swings up and balances"),
)


@contextlib.contextmanager
def minari_folder(folder: Path) -> Iterator[None]:
    """Set `MINARI_DATASETS_PATH`, the local Minari cache, to `folder` within the context."""
    before = os.environ.get("MINARI_DATASETS_PATH")
    os.environ["MINARI_DATASETS_PATH"] = str(folder.absolute())  # Minari joins a relative one twice
    try:
        yield
    finally:
        if before is None:
            del os.environ["MINARI_DATASETS_PATH"]
        else:
            os.environ["MINARI_DATASETS_PATH"] = before


def record_all(folder: Path, progress: Progress) -> None:
    """Record all of `RECORDINGS` into a new cache at `folder`; the seeds are fixed.

    Fills `EpisodeBuffer`s directly, because Minari's own collector needs jax. The folder appears when it is complete.
    """
    building = folder.with_name(f".{folder.name}.new")
    fs.remove(building)
    fs.make_folder(building)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import minari

        progress.start("recording", sum(recording.episodes for recording in RECORDINGS), "episodes")
        with minari_folder(building):
            for recording in RECORDINGS:
                buffers = []
                for buffer in _recorded_episodes(recording):
                    buffers.append(buffer)
                    progress.advance(1)
                minari.create_dataset_from_buffers(
                    recording.id,
                    buffers,
                    env=recording.environment,
                    algorithm_name=recording.about,
                    author="rbtool demo",
                    description=f"{recording.environment}, played by {recording.about}",
                )
        progress.done()
    fs.rename(building, folder)


def _recorded_episodes(recording: Recording) -> Iterator[Any]:
    """Run the episodes and yield a Minari buffer for each."""
    import gymnasium
    from minari.data_collector import EpisodeBuffer

    draw = np.random.default_rng(0)
    environment = gymnasium.make(recording.environment)
    for number in range(recording.episodes):
        observation, _ = environment.reset(seed=number)
        buffer = EpisodeBuffer(id=number, seed=number, observations=[observation], actions=[])
        over = False
        while not over:
            action = recording.policy(observation, draw)
            observation, reward, terminated, truncated, _ = environment.step(action)
            buffer.observations.append(observation)
            buffer.actions.append(action)
            buffer.rewards.append(float(reward))
            buffer.terminations.append(terminated)
            buffer.truncations.append(truncated)
            over = terminated or truncated
        yield buffer
    environment.close()


class MinariDemo:
    """The recorder of `rbtool demo`."""

    recordings = RECORDINGS

    def record(self, folder: Path, progress: Progress) -> None:
        """Record all datasets into a new cache at `folder`, which appears when it is complete."""
        record_all(folder, progress)

    def cache_at(self, folder: Path) -> AbstractContextManager[None]:
        """Make `folder` the local Minari cache within the context."""
        return minari_folder(folder)
