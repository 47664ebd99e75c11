"""Measure whether `score` ranks degraded copies of demonstrations below the good ones, on datasets of different origin.

    python benchmarks/scores.py [--episodes N] [--share F] [--seed N] [--draws N] [--set NAME] [DATASET]

One set is recorded from Pendulum-v1 with rbtool's controller, one is the arm of `tests/standins/robot_sets.py` in
LeRobot's layout, and one has the demonstrations of `examples/act.py`, in which only the picture shows the target. Any
dataset of good episodes can be given instead. A share of the episodes is copied and degraded, in one way at a time,
then in all ways together. The figures are areas under the ROC curve (AUC), the probability that a good episode has a
higher quality than a degraded one: the mean and the minimum over some draws. The target is a mean of at least 0.9 for
each of the first six kinds on two sets.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rbtool
from rbtool.core.format.contracts import Piece, StepReader
from rbtool.core.format.memmap.builder import DatasetBuilder, Origin
from rbtool.core.format.returns import Ingest
from rbtool.core.open_steps import open_steps
from rbtool.core.ted.schema import Field, Key, Timing, ted_fields

ROOT = Path(__file__).resolve().parent.parent
ACTION: Key = ("action",)


@dataclass
class Episode:
    """The states `[T + 1, ...]` and the actions `[T, ...]` of an episode, and its text."""

    states: dict[Key, Any]
    actions: Any
    text: Mapping[str, str]

    def __len__(self) -> int:
        return len(self.actions)

    def of_rows(self, rows: Any) -> Episode:
        """Return the steps of these rows of states, the last of which no action follows."""
        actions = self.actions[np.minimum(rows[:-1], len(self) - 1)]
        return Episode({key: values[rows] for key, values in self.states.items()}, actions, self.text)


@dataclass
class Demonstrations:
    """Good episodes, with the deviations of their numbers."""

    fields: list[tuple[Field, Timing]]
    episodes: list[Episode]

    @classmethod
    def read(cls, path: Path, most: int) -> Demonstrations:
        """Read the first episodes of a dataset."""
        with open_steps(path) as reader:
            states = [one for one in reader.fields if one.key[0] == "observation"]
            action = next(one for one in reader.fields if one.key == ACTION)
            texts = reader.episode_text or [{}] * len(reader.episodes)
            rows = zip(reader.episodes.start.tolist(), reader.episodes.length.tolist(), texts, strict=True)
            episodes = [_episode(reader, states, start, length, text) for start, length, text in list(rows)[:most]]
            fields: list[tuple[Field, Timing]] = [*((one, "state") for one in states), (action, "step")]
            return cls([(Field(one.key, one.dtype, one.shape, one.role), timing) for one, timing in fields], episodes)

    def spread(self, key: Key) -> Any:
        """Return the deviation of a field's numbers."""
        rows = [one.actions if key == ACTION else one.states[key] for one in self.episodes]
        return np.concatenate(rows).std(0)

    def numbers(self) -> list[Key]:
        """Return the states that are vectors of floating-point numbers."""
        return [one.key for one, timing in self.fields if timing == "state" and one.numpy.kind == "f"]

    def write(self, path: Path, episodes: Sequence[Episode]) -> None:
        """Write episodes as a dataset."""
        with DatasetBuilder(path, ted_fields(self.fields)) as builder:
            ingest = Ingest(builder, self.fields)
            for number, one in enumerate(episodes):
                last = np.arange(len(one)) == len(one) - 1
                columns = {**one.states, ACTION: one.actions}
                ingest.add(Piece(number, columns, last & False, last, first=True, last=True, text=one.text))
            builder.finish(
                ingest.table, Origin(rbtool.core.format.manifest.Request("made", "made", "made")), ingest.text
            )


def _episode(reader: StepReader, states: Sequence[Field], start: int, length: int, text: Mapping[str, str]) -> Episode:
    stop, found = start + length, {}
    for one in states:
        last = reader.read(("next", *one.key), stop - 1, stop)
        found[one.key] = np.concatenate([reader.read(one.key, start, stop), last])
    return Episode(found, reader.read(ACTION, start, stop), text)


# Ways to degrade a copy ----------------------------------------------------------------------------------


def noise(one: Episode, of: Demonstrations, draw: np.random.Generator) -> Episode:
    """Add Gaussian noise to the actions, 0.3 of their deviation."""
    added = 0.3 * of.spread(ACTION) * draw.normal(size=one.actions.shape)
    return Episode(one.states, (one.actions + added).astype(one.actions.dtype), one.text)


def tremor(one: Episode, of: Demonstrations, draw: np.random.Generator) -> Episode:
    """Let the states tremble, by half of their usual change in a step."""
    states = dict(one.states)
    for key in of.numbers():
        width = 0.5 * np.concatenate([np.diff(each.states[key], axis=0) for each in of.episodes]).std(0)
        added = width * draw.normal(size=states[key].shape)
        states[key] = (states[key] + added).astype(states[key].dtype)
    return Episode(states, one.actions, one.text)


def pauses(one: Episode, of: Demonstrations, draw: np.random.Generator) -> Episode:
    """Stop twice in mid-motion, each time for an eighth of the episode."""
    rows, pace = np.arange(len(one) + 1), np.zeros(len(one))
    for key in of.numbers():
        pace += np.abs(np.diff(one.states[key], axis=0) / np.maximum(of.spread(key), 1e-9)).sum(1)
    for place in sorted(draw.choice(len(one), 2, p=pace / pace.sum()), reverse=True):
        rows = np.insert(rows, place, np.full(max(2, len(one) // 8), rows[place]))
    return one.of_rows(rows)


def wrong_target(one: Episode, of: Demonstrations, draw: np.random.Generator) -> Episode:
    """Take the actions of another demonstration: the one that differs most, of eight."""
    others = [of.episodes[place] for place in draw.integers(len(of.episodes), size=8)]
    steps = [min(len(one), len(other)) for other in others]
    apart = [
        np.abs((other.actions[:count] - one.actions[:count]) / np.maximum(of.spread(ACTION), 1e-9)).mean()
        for other, count in zip(others, steps, strict=True)
    ]
    place = int(np.argmax(apart))
    cut = one.of_rows(np.arange(steps[place] + 1))
    return Episode(cut.states, others[place].actions[: steps[place]], one.text)


def cut_short(one: Episode, of: Demonstrations, draw: np.random.Generator) -> Episode:
    """End half way."""
    return one.of_rows(np.arange(len(one) // 2 + 1))


def backwards(one: Episode, of: Demonstrations, draw: np.random.Generator) -> Episode:
    """Reverse the order of states and actions."""
    return Episode({key: values[::-1].copy() for key, values in one.states.items()}, one.actions[::-1].copy(), one.text)


def detour(one: Episode, of: Demonstrations, draw: np.random.Generator) -> Episode:
    """Wander off and come back, smoothly, by a deviation of the states."""
    rows, middle = np.arange(len(one) + 1), draw.uniform(0.3, 0.7) * len(one)
    way = np.exp(-(((rows - middle) / (len(one) / 10)) ** 2))
    states = dict(one.states)
    for key in of.numbers():
        side = of.spread(key) * draw.choice([-1, 1], size=states[key].shape[1:])
        states[key] = (states[key] + way.reshape(-1, *[1] * side.ndim) * side).astype(states[key].dtype)
    return Episode(states, one.actions, one.text)


KINDS: dict[str, Callable[[Episode, Demonstrations, np.random.Generator], Episode]] = {
    "noise": noise, "tremor": tremor, "pauses": pauses, "wrong target": wrong_target, "cut short": cut_short,
    "backwards": backwards, "detour": detour,
}  # fmt: skip


# The measurement -----------------------------------------------------------------------------------------


def area(good: Any, bad: Any) -> float:
    """Return the probability that a good episode is above a bad one; ties count half."""
    return float((good[:, None] > bad).mean() + (good[:, None] == bad).mean() / 2)


def drawn(of: Demonstrations, count: int, draw: np.random.Generator) -> dict[str, list[Episode]]:
    """Return degraded copies of some episodes by the name of what was done to them, and some of all kinds."""
    found = {}
    for name, degrade in KINDS.items():
        chosen = draw.choice(len(of.episodes), count, replace=False)
        found[name] = [degrade(of.episodes[at], of, draw) for at in chosen]
    few = max(1, count // len(KINDS))
    return {**found, "all together": [one for each in found.values() for one in each[:few]]}


def measured(path: Path, of: Demonstrations, bad: Sequence[Episode]) -> float:
    """Score good and bad episodes together, and return the area under the curve of the quality."""
    of.write(path, [*of.episodes, *bad])
    quality = np.array([one.quality for one in rbtool.score(path).scores], float)
    return area(quality[: len(of.episodes)], quality[len(of.episodes) :])


def pendulum(folder: Path, episodes: int) -> Path:
    """Record Pendulum-v1."""
    rbtool.record("Pendulum-v1", folder / "pendulum", episodes=episodes, policy="expert", seed=0)
    return folder / "pendulum"


def arm(folder: Path, episodes: int) -> Path:
    """Convert the arm of the tests, without cameras, which moves between waypoints of its own in each episode."""
    sys.path.insert(0, str(ROOT / "tests" / "standins"))
    robot_sets = importlib.import_module("robot_sets")
    made = robot_sets.make(robot_sets.Kind(episodes=episodes, cameras=0))
    robot_sets.write(made, folder / "arm-raw")
    rbtool.convert(folder / "arm-raw", folder / "arm")
    return folder / "arm"


def reach(folder: Path, episodes: int) -> Path:
    """Convert the demonstrations of an example, 100 of them."""
    spec = importlib.util.spec_from_file_location("act", ROOT / "examples" / "act.py")
    assert spec is not None
    assert spec.loader is not None
    act = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(act)
    act.torch.manual_seed(0)
    act.demonstrate(str(folder), folder / "reach-raw")
    rbtool.convert(folder / "recording", folder / "reach")
    return folder / "reach"


SETS = {"pendulum": pendulum, "arm": arm, "reach": reach}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("dataset", type=Path, nargs="?")
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--set", choices=SETS, action="append", dest="sets")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        chosen = options.sets or list(SETS)
        paths = [options.dataset] if options.dataset else [SETS[name](folder, options.episodes) for name in chosen]
        for path in paths:
            of = Demonstrations.read(path, options.episodes)
            count = max(1, round(options.share * len(of.episodes)))
            print(f"{path.name}: {len(of.episodes)} good episodes, {count} degraded copies, {options.draws} draws")
            areas: dict[str, list[float]] = defaultdict(list)
            for seed in range(options.seed, options.seed + options.draws):
                for name, bad in drawn(of, count, np.random.default_rng(seed)).items():
                    areas[name].append(measured(folder / f"{path.name}-{seed}-{name}", of, bad))
            for name, each in areas.items():
                print(f"  {name:<14} AUC {np.mean(each):.3f}   at least {min(each):.3f}", flush=True)


if __name__ == "__main__":
    main()
