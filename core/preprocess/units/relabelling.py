"""The function that relabels an episode, in the process that runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from ...buffers.relabelling import Relabelling
from ...samplers.achieved_goals import HindsightStrategy
from ...ted.schema import Key


class Relabeller:
    """Gives a random share of the steps of an episode goals that were achieved in it, and their consequences."""

    def __init__(
        self, function: Callable[[Any], Any], strategy: str, ratio: float, goal_key: Key, achieved_goal_key: Key
    ) -> None:
        self._relabelling = Relabelling(function, goal_key=goal_key, achieved_goal_key=achieved_goal_key)
        self._strategy = HindsightStrategy.of(strategy)
        self._ratio = ratio

    def __call__(self, episode: TensorDictBase) -> TensorDictBase:
        """Return an episode `[T]` with other goals, rewards and end flags, edited in place."""
        chances = torch.rand(2, len(episode), dtype=torch.float64).numpy()  # seeded by the episode
        chosen = np.flatnonzero(chances[0] < self._ratio)
        if not len(chosen):
            return episode
        reach = len(episode) - chosen
        places = torch.from_numpy(chosen + self._strategy.steps(chances[1][chosen], chosen, reach))
        rows = torch.from_numpy(chosen)
        part = episode[rows]
        self._relabelling.apply(part, episode.get(self._relabelling.achieved_goal_key)[places])
        for key in self._relabelling.changed:
            if (value := part.get(key, None)) is not None:
                episode.get(key)[rows] = value
        return episode
