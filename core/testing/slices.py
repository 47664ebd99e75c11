"""What slice samplers may draw, worked out slowly from the history of writes: the other side of their tests.

`RingModel` receives the same writes as a buffer and keeps, slot by slot, what was written and when. Two rows follow
each other if they lie next to each other in the ring, were written one right after the other, and the signal marks
no end of an episode between them. `legal_slices` lists what may be drawn of such runs, each with its exact
probability. Nothing here shares code, or a way of thinking, with the samplers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

import torch
from hypothesis import strategies as st
from tensordict import TensorDict

Signal: TypeAlias = Literal["ids", "done", "either"]
"""What separates episodes: trajectory ids, the done flag, or one of several flags."""

SIGNALS: tuple[Signal, ...] = ("ids", "done", "either")

Coordinates: TypeAlias = tuple[int, ...]
"""Where an element is: slot, and lane where there are several."""

Slice: TypeAlias = tuple[Coordinates, ...]

Ending: TypeAlias = Literal["terminated", "truncated", "both", "nothing"]


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """One step of one lane; `number` is its own and is never used again."""

    number: int
    trajectory: int
    terminated: bool = False
    truncated: bool = False
    first: bool = False

    @property
    def done(self) -> bool:
        """Whether one of the flags is set."""
        return self.terminated or self.truncated

    def __repr__(self) -> str:
        flags = "".join(letter for letter, flag in zip("tx", (self.terminated, self.truncated), strict=True) if flag)
        return f"{self.number}of{self.trajectory}{flags}"

    def ends(self, following: Step, signal: Signal) -> bool:
        """Return whether `signal` marks an end of the episode between this step and the following one."""
        if signal == "ids":
            return self.trajectory != following.trajectory
        return self.truncated or self.terminated if signal == "either" else self.done


@dataclass(frozen=True, slots=True)
class SliceRule:
    """The arguments of a slice sampler that decide what is legal; see `SliceSampler`."""

    slice_len: int
    strict_length: bool = True
    span: tuple[int, int] = (0, 0)
    anchor: Literal["any", "start", "end"] = "any"
    weight: Literal["episode", "step"] = "episode"


class RingModel:
    """The slots of a ring: which steps lie there, and the how-manieth row ever written each of them is."""

    def __init__(self, capacity: int, lanes: int = 1, ndim: int = 1) -> None:
        self.capacity, self.lanes, self.ndim = capacity, lanes, ndim
        self.steps: list[tuple[Step, ...] | None] = [None] * capacity
        self.times: list[int] = [-1] * capacity
        self.cursor = 0
        self.written = 0

    def extend(self, rows: Iterable[tuple[Step, ...]]) -> None:
        """Write rows, each a step of every lane, one after the other."""
        for row in rows:
            self.steps[self.cursor], self.times[self.cursor] = row, self.written
            self.cursor = (self.cursor + 1) % self.capacity
            self.written += 1

    def replace(self, slot: int, row: tuple[Step, ...]) -> None:
        """Write a row in place of another one, in whose time it stays."""
        self.steps[slot] = row

    def loaded(self, capacity: int) -> RingModel:
        """Return what a buffer of another capacity is once it has loaded the checkpoint of this one."""
        other = RingModel(capacity, self.lanes, self.ndim)
        more = capacity - self.capacity
        other.steps, other.times = [*self.steps, *[None] * more], [*self.times, *[-1] * more]
        other.cursor, other.written = self.cursor, self.written
        return other

    def step_at(self, place: Coordinates) -> Step:
        """Return the step at a place."""
        row = self.steps[place[0]]
        assert row is not None, f"slot {place[0]} was drawn and never written"
        return row[place[1] if self.ndim > 1 else 0]

    def follows(self, slot: int, lane: int, signal: Signal) -> bool:
        """Return whether the next slot of the ring continues the episode in this slot of a lane."""
        after = (slot + 1) % self.capacity
        here, there = self.steps[slot], self.steps[after]
        if here is None or there is None or self.times[after] != self.times[slot] + 1:
            return False
        return not here[lane].ends(there[lane], signal)

    def runs(self, signal: Signal) -> list[Slice]:
        """Return all trajectories, each as the places of its steps in order."""
        runs: list[Slice] = []
        for lane in range(self.lanes):
            filled = [slot for slot in range(self.capacity) if self.steps[slot] is not None]
            begins = [slot for slot in filled if not self.follows((slot - 1) % self.capacity, lane, signal)]
            for slot in sorted(begins, key=lambda slot: self.times[slot]):
                places = [slot]
                while self.follows(places[-1], lane, signal):
                    places.append((places[-1] + 1) % self.capacity)
                runs.append(tuple((place, lane) if self.ndim > 1 else (place,) for place in places))
        return runs


def legal_slices(runs: Sequence[Slice], rule: SliceRule) -> dict[Slice, Fraction]:
    """Return every slice that may be drawn with the probability of drawing it."""
    windows = {run: _windows(run, rule) for run in runs}
    windows = {run: found for run, found in windows.items() if found}
    chances: dict[Slice, Fraction] = {}
    total = sum(len(found) for found in windows.values())
    for found in windows.values():
        chance = Fraction(1, total) if rule.weight == "step" else Fraction(1, len(windows) * len(found))
        for window in found:
            chances[window] = chances.get(window, Fraction(0)) + chance
    assert not chances or sum(chances.values()) == 1
    return chances


def _windows(run: Slice, rule: SliceRule) -> list[Slice]:
    """Return the slices of one trajectory, one for each legal start; two starts may give the same slice."""
    if len(run) < rule.slice_len and rule.strict_length:
        return []
    length = min(len(run), rule.slice_len)
    left, right = (min(overhang, length - 1) for overhang in rule.span)
    starts = range(-left, len(run) - length + right + 1)
    if rule.anchor == "start":
        starts = starts[:1]
    elif rule.anchor == "end":
        starts = starts[-1:]
    return [run[max(start, 0) : start + length] for start in starts]


def expected_marks(model: RingModel, drawn: Sequence[Slice]) -> dict[str, list[bool]]:
    """Return the marks of the steps of drawn slices: where slices begin, and the flags at their ends."""
    steps = [(model.step_at(place), number, len(part)) for part in drawn for number, place in enumerate(part)]
    last = [number == length - 1 for _, number, length in steps]
    return {
        "is_init": [step.first or number == 0 for step, number, _ in steps],
        "truncated": last,
        "terminated": [step.terminated for step, _, _ in steps],
        "done": [step.done or end for (step, _, _), end in zip(steps, last, strict=True)],
    }


def assert_drawn_as_expected(drawn: Mapping[Slice, int], chances: Mapping[Slice, Fraction]) -> None:
    """Hold what was drawn, and how often, against exact probabilities: nothing else, all of it, chi-square.

    The bound is what chance alone exceeds once in a million times; with fixed seeds the outcome is always the same.
    """
    foreign = set(drawn) - set(chances)
    assert not foreign, f"drawn, but not legal: {sorted(foreign)[:3]}"
    draws = sum(drawn.values())
    expected = {key: float(chance) * draws for key, chance in chances.items()}
    missed = [key for key, number in expected.items() if number > 15 and not drawn.get(key)]
    assert not missed, f"legal, but never drawn: {missed[:3]}"
    common = [key for key, number in expected.items() if number >= 5]
    cells = [(drawn.get(key, 0), expected[key]) for key in common]
    rare = [key for key in expected if expected[key] < 5]
    if rare:
        cells.append((sum(drawn.get(key, 0) for key in rare), sum(expected[key] for key in rare)))
    statistic = sum((found - number) ** 2 / number for found, number in cells)
    assert statistic <= _bound(len(cells) - 1), f"chi-square is {statistic:.1f} of {len(cells)} kinds"


def _bound(freedom: int) -> float:
    """The quantile 1 - 1e-6 of the chi-square distribution, after Wilson and Hilferty."""
    if not freedom:
        return 1e-9
    width = 2 / (9 * freedom)
    return freedom * float(1 - width + 4.76 * math.sqrt(width)) ** 3 + 1


# Data ------------------------------------------------------------------------------------------------


def episodes(
    lengths: Iterable[int], endings: Sequence[Ending], ids: Sequence[int] | None = None, first: int = 0
) -> list[Step]:
    """Return the steps of episodes one after the other; endings and ids are gone through again and again."""
    steps: list[Step] = []
    for number, length in enumerate(lengths):
        ending, name = endings[number % len(endings)], ids[number % len(ids)] if ids else number
        for place in range(length):
            last = place == length - 1
            steps.append(
                Step(
                    number=first + len(steps),
                    trajectory=name,
                    terminated=last and ending in {"terminated", "both"},
                    truncated=last and ending in {"truncated", "both"},
                    first=place == 0,
                )
            )
    return steps


def step_lists(lanes: int, rows: int) -> st.SearchStrategy[list[tuple[Step, ...]]]:
    """Rows of several lanes, of episodes of any length and ending, the last one of each lane maybe cut off."""
    ending = st.sampled_from(["terminated", "truncated", "both", "nothing"])
    lane = st.builds(
        episodes,
        lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5).map(lambda some: _repeated(some, rows)),
        endings=st.lists(ending, min_size=1, max_size=3),
        ids=st.none() | st.lists(st.integers(0, 2), min_size=2, max_size=3),
    )
    return st.tuples(*[lane] * lanes).map(lambda found: rows_of(found, rows))


def rows_of(lanes: Sequence[Sequence[Step]], count: int) -> list[tuple[Step, ...]]:
    """Put lanes side by side, and give each step a number of its own."""
    rows = list(zip(*(lane[:count] for lane in lanes), strict=True))
    return [
        tuple(
            Step(time * len(row) + lane, step.trajectory, step.terminated, step.truncated, step.first)
            for lane, step in enumerate(row)
        )
        for time, row in enumerate(rows)
    ]


def _repeated(lengths: Sequence[int], rows: int) -> list[int]:
    return [*lengths] * -(-rows // sum(lengths))


def tensordict_of(rows: Sequence[tuple[Step, ...]], ndim: int = 1) -> TensorDict:
    """Return rows as data for `extend`: `[rows]`, or `[lanes, rows]` for a storage of two dimensions."""
    shape = (len(rows), len(rows[0])) if ndim > 1 else (len(rows),)

    def leaf(values: Iterable[int], dtype: torch.dtype, *trail: int) -> torch.Tensor:
        found = torch.tensor(list(values), dtype=dtype).reshape(*shape, *trail)
        return found.transpose(0, 1).contiguous() if ndim > 1 else found

    steps = [step for row in rows for step in row]
    flags = {
        name: leaf([getattr(step, name) for step in steps], torch.bool, 1)
        for name in ("done", "terminated", "truncated")
    }
    return TensorDict(
        {
            "number": leaf([step.number for step in steps], torch.int64),
            "episode": leaf([step.trajectory for step in steps], torch.int64),
            "is_init": leaf([step.first for step in steps], torch.bool, 1),
            "next": flags,
        },
        shape[::-1] if ndim > 1 else shape,
    )
