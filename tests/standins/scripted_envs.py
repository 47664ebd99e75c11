"""Environments that log what they return, and the values of spaces read back from recorded rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from rbtool.core.open_steps import open_steps

Plan = Sequence[tuple[int, str]]
"""Episodes in turn: their length, and how they end: terminated, truncated, both."""


@dataclass
class Logged:
    """One episode as the environment returned it."""

    observations: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    flags: list[tuple[bool, bool]] = field(default_factory=list)
    infos: list[dict[str, Any]] = field(default_factory=list)
    seed: int | None = None


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """Draws observations from its space, ends episodes as planned, and logs copies of all that it returns."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        plan: Plan,
        info: Callable[[int, int], dict[str, Any]] = lambda episode, step: {},
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._plan, self._info = plan, info
        self.log: list[Logged] = []
        self._draw = np.random.default_rng(0)

    def _observe(self, step: int) -> tuple[Any, dict[str, Any]]:
        observation, info = self.observation_space.sample(), self._info(len(self.log) - 1, step)
        self.log[-1].observations.append(copy.deepcopy(observation))
        self.log[-1].infos.append(copy.deepcopy(info))
        return observation, info

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.log.append(Logged(seed=seed))
        return self._observe(0)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        episode = self.log[-1]
        length, ending = self._plan[(len(self.log) - 1) % len(self._plan)]
        episode.actions.append(copy.deepcopy(action))
        step = len(episode.actions)
        ended = step == length
        flags = (ended and ending in ("terminated", "both"), ended and ending in ("truncated", "both"))
        episode.rewards.append(float(self._draw.normal()))
        episode.flags.append(flags)
        observation, info = self._observe(step)
        return observation, episode.rewards[-1], *flags, info


def run(env: gymnasium.Env[Any, Any], episodes: int, *, tail: int = 0) -> None:
    """Run episodes to their ends, and `tail` steps of one more."""
    for number in range(episodes + (tail > 0)):
        env.reset(seed=number)
        ended, left = False, tail if number == episodes else -1
        while not ended and left:
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            ended, left = terminated or truncated, left - 1


class CountingEnv(gymnasium.Env[Any, Any]):
    """Observes `[number of the environment, number of the episode, number of the step]`; every row shows its place."""

    def __init__(self, number: int, lengths: Sequence[int]) -> None:
        self.observation_space = spaces.Box(-1, 1 << 40, (3,), np.int64)
        self.action_space = spaces.Discrete(1 << 30)
        self._number, self._lengths = number, lengths
        self._episode, self._step = -1, 0

    @property
    def _length(self) -> int:
        return self._lengths[self._episode % len(self._lengths)]

    def _observation(self) -> tuple[Any, dict[str, Any]]:
        info = {"step": self._step, "at_end": {"episode": self._episode}} if self._step == self._length else {}
        return np.array([self._number, self._episode, self._step]), {"always": self._step} | info

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._episode, self._step = self._episode + 1, 0
        return self._observation()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        assert self._step <= self._length, "a step after the end"
        ended = self._step == self._length
        observation, info = self._observation()
        reward = 1000.0 * self._episode + self._step
        return observation, reward, ended and self._episode % 2 == 0, ended and self._episode % 2 == 1, info


class Recorded:
    """The rows of a dataset, as arrays by the dotted names of their fields."""

    def __init__(self, dest: Path) -> None:
        with open_steps(dest) as reader:
            reader.verify_files()
            self.manifest, self.table = reader.manifest, reader.episodes
            steps = reader.manifest.steps
            self.columns = {one.name: reader.read(one.key, 0, steps) for one in reader.fields}

    def episode(self, row: int) -> dict[str, np.ndarray[Any, Any]]:
        """The columns of one episode."""
        start = int(self.table.start[row])
        return {name: rows[start : start + int(self.table.length[row])] for name, rows in self.columns.items()}


def value_at(space: spaces.Space[Any], name: str, row: dict[str, Any]) -> Any:
    """Read a value of a space back from a row: dotted names to what that row has."""
    if isinstance(space, spaces.Dict):
        reserved = {"shape": "shape_"}
        return {key: value_at(part, f"{name}.{reserved.get(key, key)}", row) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(value_at(part, f"{name}.{number}", row) for number, part in enumerate(space.spaces))
    if isinstance(space, spaces.Text):
        return row[name][: row[f"{name}_length"]].tobytes().decode()
    if isinstance(space, spaces.OneOf):
        chosen = int(row[f"{name}.choice"])
        return np.int64(chosen), value_at(space.spaces[chosen], f"{name}.{chosen}", row)
    if isinstance(space, spaces.Sequence):
        count = int(row[f"{name}.count"])
        values = _items(space.feature_space, f"{name}.items", row, count)
        if not space.stack:
            return values
        return concatenate(space.feature_space, values, create_empty_array(space.feature_space, count))
    if isinstance(space, spaces.Graph):
        return _graph(space, name, row)
    return row[name]


def _items(space: spaces.Space[Any], name: str, row: dict[str, Any], count: int) -> tuple[Any, ...]:
    below = {key: rows for key, rows in row.items() if key.startswith(name)}
    return tuple(value_at(space, name, {key: rows[at] for key, rows in below.items()}) for at in range(count))


def _graph(space: spaces.Graph, name: str, row: dict[str, Any]) -> spaces.GraphInstance:
    nodes, edges = int(row[f"{name}.nodes_count"]), int(row[f"{name}.edges_count"])
    links = None if edges < 0 else row[f"{name}.edge_links"][:edges]
    values = None if edges < 0 or space.edge_space is None else row[f"{name}.edges"][:edges]
    return spaces.GraphInstance(row[f"{name}.nodes"][:nodes], values, links)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal to the bit; the type of links of graphs, of which spaces state none, is free."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, spaces.GraphInstance):
        links = one.edge_links is None or other.edge_links is None or np.array_equal(one.edge_links, other.edge_links)
        none = (one.edge_links is None) == (other.edge_links is None)
        return same(one.nodes, other.nodes) and same(one.edges, other.edges) and links and none
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if one is None or isinstance(one, str):
        return bool(one == other)
    a, b = np.asarray(one), np.asarray(other)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
