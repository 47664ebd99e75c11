"""The test suite for slice samplers. To run it, subclass `SliceSamplerTests` and implement `make`.

The suite compares samplers with `RingModel`, which shares no code with them. The model receives the same writes as a
buffer, and stores for each slot which step was written and when. Two rows are consecutive if they are neighbours in the
ring, were written directly one after the other, and the signal marks no end of an episode between them. `legal_slices`
lists the slices that may be drawn from such runs, each with its exact probability.
"""

from __future__ import annotations

import math
import pickle
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from hypothesis import strategies as st
from tensordict import TensorDict

from ..buffers.tensordict import TensorDictReplayBuffer
from ..samplers.base import Sampler
from ..storages.lazy_tensor import LazyTensorStorage
from .rows import error_of

Signal: TypeAlias = Literal["ids", "done", "either"]
"""The signal that separates episodes: trajectory ids, the done flag, or one of several flags."""

SIGNALS: tuple[Signal, ...] = ("ids", "done", "either")

Coordinates: TypeAlias = tuple[int, ...]
"""The place of an element: its slot, and its lane if there are several."""

Slice: TypeAlias = tuple[Coordinates, ...]

Ending: TypeAlias = Literal["terminated", "truncated", "both", "nothing"]


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """One step of one lane, with a unique `number`."""

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
class Slicing:
    """The arguments of a slice sampler that decide which slices are legal, see `SliceSampler`.

    With `by_priority`, as for a `PrioritizedSliceSampler`, a trajectory may be shorter than a slice by the right span.
    """

    slice_len: int
    strict_length: bool = True
    span: tuple[int, int] = (0, 0)
    anchor: Literal["any", "start", "end"] = "any"
    weight: Literal["episode", "step"] = "episode"
    by_priority: bool = False


class RingModel:
    """A model of a ring: for each slot, its step and the time of writing, which counts rows.

    slot   0   1   2   3   4        capacity 5, seven rows written: the cursor is at slot 2
    time   5   6   2   3   4        slots 1 and 2 are neighbours, but 6 + 1 != 2: no episode continues there
    """

    def __init__(self, capacity: int, lanes: int = 1, ndim: int = 1) -> None:
        self.capacity, self.lanes, self.ndim = capacity, lanes, ndim
        self.steps: list[tuple[Step, ...] | None] = [None] * capacity
        self.times: list[int] = [-1] * capacity
        self.cursor = 0
        self.written = 0

    def extend(self, rows: Iterable[tuple[Step, ...]]) -> None:
        """Write rows at the cursor; a row has a step for every lane."""
        for row in rows:
            self.steps[self.cursor], self.times[self.cursor] = row, self.written
            self.cursor = (self.cursor + 1) % self.capacity
            self.written += 1

    def replace(self, slot: int, row: tuple[Step, ...]) -> None:
        """Overwrite a row; its time stays the same."""
        self.steps[slot] = row

    def loaded(self, capacity: int) -> RingModel:
        """Return the model of a buffer with another capacity after it has loaded the checkpoint of this one."""
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
        """Return all trajectories, each as the coordinates of its steps in order."""
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


def legal_slices(runs: Sequence[Slice], rule: Slicing) -> dict[Slice, Fraction]:
    """Return every legal slice with its probability."""
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


def _windows(run: Slice, rule: Slicing) -> list[Slice]:
    """Return the slices of one trajectory, one for each legal start; two starts may give the same slice."""
    if len(run) < rule.slice_len - rule.span[1] * rule.by_priority and rule.strict_length:
        return []
    length = min(len(run), rule.slice_len)
    missing = rule.slice_len - length
    left, right = (max(min(overhang, rule.slice_len - 1) - missing, 0) for overhang in rule.span)
    starts = range(-left, len(run) - length + right + 1)
    if rule.anchor == "start":
        starts = starts[:1]
    elif rule.anchor == "end":
        starts = starts[-1:]
    return [run[max(start, 0) : start + length] for start in starts]


def expected_marks(model: RingModel, drawn: Sequence[Slice]) -> dict[str, list[bool]]:
    """Return the marks that the steps of drawn slices should get: beginnings of slices, and flags at their ends."""
    steps = [(model.step_at(place), number, len(part)) for part in drawn for number, place in enumerate(part)]
    last = [number == length - 1 for _, number, length in steps]
    return {
        "is_init": [step.first or number == 0 for step, number, _ in steps],
        "truncated": last,
        "terminated": [step.terminated for step, _, _ in steps],
        "done": [step.done or end for (step, _, _), end in zip(steps, last, strict=True)],
    }


def assert_drawn_as_expected(drawn: Mapping[Slice, int], chances: Mapping[Slice, Fraction]) -> None:
    """Compare the counts of drawn slices with their exact probabilities.

    Only legal slices may be drawn, and every legal slice must be drawn, unless it is too rare. The counts must pass a
    chi-square test whose bound is exceeded by chance once in a million times. With a fixed seed, the result is always
    the same.
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
    """Return the quantile 1 - 1e-6 of the chi-square distribution, by the approximation of Wilson and Hilferty."""
    if not freedom:
        return 1e-9
    width = 2 / (9 * freedom)
    return freedom * float(1 - width + 4.76 * math.sqrt(width)) ** 3 + 1


def episodes(
    lengths: Iterable[int], endings: Sequence[Ending], ids: Sequence[int] | None = None, first: int = 0
) -> list[Step]:
    """Return the steps of consecutive episodes; endings and ids are cycled through."""
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
    """Draw rows of several lanes: episodes of any length and ending, the last of each lane possibly incomplete."""
    ending = st.sampled_from(["terminated", "truncated", "both", "nothing"])
    lane = st.builds(
        episodes,
        lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5).map(lambda some: _repeated(some, rows)),
        endings=st.lists(ending, min_size=1, max_size=3),
        ids=st.none() | st.lists(st.integers(0, 2), min_size=2, max_size=3),
    )
    return st.tuples(*[lane] * lanes).map(lambda found: rows_of(found, rows))


def rows_of(lanes: Sequence[Sequence[Step]], count: int) -> list[tuple[Step, ...]]:
    """Combine lanes to rows, and give each step a unique number."""
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
    """Return rows as data for `extend`: `[rows]`, or `[lanes, rows]` for a storage with two dimensions."""
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


SIGNAL_OPTIONS: dict[Signal, dict[str, Any]] = {
    "ids": {"traj_key": "episode"},
    "done": {"end_key": ("next", "done")},
    "either": {"end_keys": [("next", "terminated"), ("next", "truncated")]},
}

CONTENTS: dict[str, tuple[Sequence[int], Sequence[Ending]]] = {
    "one step": ((1,), ("terminated",)),
    "ragged": ((3, 1, 5, 2), ("terminated", "truncated", "both")),
    "truncated": ((4, 3), ("truncated",)),
    "terminated": ((4, 3), ("terminated",)),
    "unterminated tail": ((3, 100), ("terminated",)),
}
"""Episode lengths and endings, which are cycled through."""

SITUATIONS = ("partly filled", "exactly full", "wrapped mid-episode", "re-used ids", "larger capacity", "refilled")

_CAPACITY = 12


class Twin:
    """A buffer and a model that receives the same writes."""

    def __init__(self, capacity: int, sampler: Sampler | None = None, lanes: int = 1, ndim: int = 1) -> None:
        storage = LazyTensorStorage(capacity * lanes, ndim=ndim)
        self.buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=8)
        self.model = RingModel(capacity, lanes, ndim)

    def extend(self, rows: Sequence[tuple[Step, ...]]) -> None:
        """Write rows at the cursor."""
        self.buffer.extend(tensordict_of(rows, self.model.ndim))
        self.model.extend(rows)

    def replace(self, slot: int, row: tuple[Step, ...]) -> None:
        """Overwrite one row without moving the cursor."""
        data = tensordict_of([row], self.model.ndim)
        data = data.transpose(0, 1) if self.model.ndim > 1 else data
        data["index"] = self.buffer.storage[slot : slot + 1]["index"]
        self.buffer.storage[slot : slot + 1] = data
        self.model.replace(slot, row)

    def loaded(self, capacity: int, sampler: Sampler | None = None) -> Twin:
        """Make a twin of another capacity that has loaded the rows of this one."""
        model = self.model.loaded(capacity)
        other = Twin(capacity, None, model.lanes, model.ndim)
        other.model = model
        other.buffer.storage.load_state_dict(self.buffer.storage.state_dict())
        other.buffer.writer.load_state_dict(self.buffer.writer.state_dict())
        if sampler is not None:
            other.buffer.set_sampler(sampler)
        return other

    def sample(self, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Draw a batch; return its index and info."""
        return self.buffer.sampler.sample(self.buffer.storage, batch_size)

    def draw(self, batch_size: int) -> tuple[list[Slice], dict[Any, Any]]:
        """Draw a batch; return its slices and info."""
        index, info = self.sample(batch_size)
        return cut(index, info), info

    def legal(self, signal: Signal, rule: Slicing) -> dict[Slice, Any]:
        """Return the slices that are legal now with their exact probabilities."""
        return legal_slices(self.model.runs(signal), rule)


def cut(index: Any, info: dict[Any, Any]) -> list[Slice]:
    """Split a batch into its slices, without the steps that only pad a slice."""
    parts = index if isinstance(index, tuple) else (index,)
    coordinates = torch.stack([part.reshape(-1) for part in parts], -1).tolist()
    mask = info.get(("collector", "mask"))
    real = [True] * len(coordinates) if mask is None else mask.reshape(-1).tolist()
    ends = info["next", "truncated"].reshape(-1).tolist()
    slices: list[Slice] = []
    begun: list[tuple[int, ...]] = []
    for place, is_real, end in zip(coordinates, real, ends, strict=True):
        if is_real:
            begun.append(tuple(place))
        if is_real and end:
            slices.append(tuple(begun))
            begun = []
    assert not begun, "the last slice has no end"
    return slices


def situation(
    name: str, contents: str, sampler: Sampler | None = None, lanes: int = 1, ndim: int = 1, slots: int = _CAPACITY
) -> Twin:
    """Make a twin and fill it for one of the `SITUATIONS`, with one of the `CONTENTS`."""
    lengths, endings = CONTENTS[contents]
    ids = (0, 1) if name == "re-used ids" else None
    plenty = [
        episodes([*lengths[lane % len(lengths) :], *list(lengths) * 4 * slots], endings, ids) for lane in range(lanes)
    ]
    rows = rows_of(plenty, 3 * slots)
    if name == "partly filled":
        twin = Twin(slots, sampler, lanes, ndim)
        twin.extend(rows[: slots - 3])
    elif name == "exactly full":
        twin = Twin(slots, sampler, lanes, ndim)
        twin.extend(rows[:4])
        twin.extend(rows[4:slots])
    elif name in {"wrapped mid-episode", "re-used ids"}:
        twin = Twin(slots, sampler, lanes, ndim)
        for start in range(0, slots + 5, 5):
            twin.extend(rows[start : min(start + 5, slots + 5)])
    else:
        small = Twin(slots - 3, None, lanes, ndim)
        small.extend(rows[: slots - 3])
        small.extend(rows[slots - 3 : slots + 2])
        twin = small.loaded(slots, sampler)
        if name == "refilled":
            twin.extend(rows[slots + 2 : 2 * slots + 6])
    return twin


class SliceSamplerTests(ABC):
    """The contract of a sampler of slices of trajectories."""

    replacement = True
    """Whether a trajectory may be drawn again before all others have been drawn."""

    uniform_over: Literal["episode", "step"] = "episode"
    """The unit that is drawn with equal probabilities by default: trajectories, or starts of slices."""

    @abstractmethod
    def make(self, **options: Any) -> Sampler:
        """Make a sampler for storages of 12 rows, with up to 2 lanes."""

    def twin(self, name: str = "wrapped mid-episode", contents: str = "ragged", ndim: int = 1, **options: Any) -> Twin:
        """Make a sampler on a buffer that is already filled."""
        options = {"slice_len": 2, "end_key": ("next", "done"), **options}
        return situation(name, contents, self.make(**options), lanes=ndim, ndim=ndim)

    def slices(self, twin: Twin, count: int, slice_len: int = 2) -> list[Slice]:
        """Draw slices, batch by batch."""
        drawn: list[Slice] = []
        while len(drawn) < count:
            drawn += twin.draw(4 * slice_len)[0]
        return drawn

    def test_slices_are_legal(self) -> None:
        for ndim in (1, 2):
            twin = self.twin(ndim=ndim)
            assert set(self.slices(twin, 40)) <= set(twin.legal("done", Slicing(2)))

    def test_an_index_has_a_tensor_for_each_dimension(self) -> None:
        for ndim in (1, 2):
            twin = self.twin(ndim=ndim, strict_length=False, batched=True)
            index, _ = twin.sample(6)
            assert isinstance(index, tuple)
            assert [(part.dtype, tuple(part.shape)) for part in index] == [(torch.int64, (3, 2))] * ndim

    def test_marks_of_steps_fit_the_data(self) -> None:
        merged = Twin(12, self.make(slice_len=6, traj_key="episode", strict_length=False))
        # Two episodes with the same id are one trajectory, which has flags in its middle.
        merged.extend(rows_of([episodes([4, 2, 1, 3], ["terminated", "truncated"], ids=(7, 7, 8, 8))], 10))
        for twin in (merged, *(self.twin(ndim=ndim, strict_length=False) for ndim in (1, 2))):
            for _ in range(6):
                drawn, info = twin.draw(6)
                marks = {"is_init": info["is_init"]} | {
                    name: info["next", name] for name in ("truncated", "terminated", "done")
                }
                steps = sum(map(len, drawn))
                assert {name: value.shape for name, value in marks.items()} == dict.fromkeys(marks, (steps, 1))
                found = {name: value.flatten().tolist() for name, value in marks.items()}
                assert found == expected_marks(twin.model, drawn)

    def test_batches_can_have_a_row_for_each_slice(self) -> None:
        flat, rows = (self.twin(strict_length=True, batched=batched) for batched in (False, True))
        for twin in (flat, rows):
            twin.buffer.set_rng(torch.Generator().manual_seed(4))
        for _ in range(3):
            (index, info), (table, said) = flat.sample(6), rows.sample(6)
            count = len(index[0]) // 2
            assert torch.equal(table[0], index[0].reshape(count, 2))
            assert said.pop(("collector", "mask")).all()
            assert said.keys() == info.keys()
            assert all(torch.equal(said[key], info[key].unflatten(0, (count, 2))) for key in info)

    def test_short_slices_repeat_their_last_step(self) -> None:
        twin = self.twin(slice_len=4, strict_length=False, batched=True)
        for _ in range(6):
            index, info = twin.sample(12)
            mask, end = info["collector", "mask"], info["next", "truncated"][..., 0]
            lengths = mask.sum(-1)
            assert (mask.shape, mask.dtype) == (index[0].shape, torch.bool)
            assert torch.equal(mask, torch.arange(4) < lengths[:, None])
            last = index[0].gather(1, lengths[:, None] - 1)
            assert ((index[0] == last) | mask).all()
            assert torch.equal(end & mask, torch.arange(4) == lengths[:, None] - 1)

    def test_a_batch_of_the_buffer_holds_the_slices(self) -> None:
        for ndim in (1, 2):
            twin = self.twin(ndim=ndim, strict_length=False)
            batch = twin.buffer.sample(8)
            places = [tuple(place) for place in batch["index"].reshape(len(batch), -1).tolist()]
            assert batch["number"].tolist() == [twin.model.step_at(place).number for place in places]

    def test_the_seed_decides(self) -> None:
        def drawn(seed: int) -> list[Slice]:
            twin = self.twin()
            twin.buffer.set_rng(torch.Generator().manual_seed(seed))
            return self.slices(twin, 40)

        assert drawn(3) == drawn(3) != drawn(4)

    def test_torch_manual_seed_decides(self) -> None:
        def drawn(seed: int) -> list[Slice]:
            torch.manual_seed(seed)
            return self.slices(self.twin(), 40)

        assert drawn(3) == drawn(3) != drawn(4)

    def test_writes_are_seen(self) -> None:
        twin = self.twin("partly filled", strict_length=False)
        rows = rows_of([episodes([2, 5] * 20, ["terminated"], first=1000)], 60)
        seen: Counter[str] = Counter()
        for start in range(60):
            twin.extend(rows[start : start + 1])
            drawn, _ = twin.draw(6)
            assert set(drawn) <= set(twin.legal("done", Slicing(2, strict_length=False)))
            seen.update("one" if len(part) == 1 else "two" for part in drawn)
        assert seen["two"]

    def test_an_indivisible_batch_size_is_a_runtime_error(self) -> None:
        error = error_of(partial(self.twin().draw, 7))
        assert isinstance(error, RuntimeError)
        assert "7" in str(error)
        assert "2" in str(error)

    def test_exactly_one_size_of_slices_must_be_given(self) -> None:
        for options in ({}, {"slice_len": 2, "num_slices": 3}):
            error = error_of(partial(self.make, **options))
            assert isinstance(error, TypeError)

    def test_no_trajectory_that_is_long_enough_is_a_runtime_error(self) -> None:
        error = error_of(partial(self.twin(slice_len=6, contents="ragged").draw, 6))
        assert isinstance(error, RuntimeError)
        assert "6" in str(error)

    def test_data_without_a_signal_are_a_key_error(self) -> None:
        storage = LazyTensorStorage(12)
        storage.set(range(8), tensordict_of(rows_of([episodes([8], ["terminated"])], 8)).select("number"))
        for options in ({}, {"end_key": ("next", "done")}, {"traj_key": "id"}):
            error = error_of(partial(self.make(slice_len=2, **options).sample, storage, 4))
            assert isinstance(error, KeyError)

    def test_an_empty_storage_is_a_runtime_error(self) -> None:
        twin = Twin(12, self.make(slice_len=2))
        assert isinstance(error_of(partial(twin.draw, 4)), RuntimeError)
        filled = self.twin()
        filled.buffer.empty()
        assert isinstance(error_of(partial(filled.draw, 4)), RuntimeError)

    def test_a_pickle_leaves_the_generator_behind(self) -> None:
        twin = self.twin()
        twin.buffer.set_rng(torch.Generator().manual_seed(0))
        twin.draw(4)
        again = pickle.loads(pickle.dumps(twin.buffer.sampler))
        assert again.generator is None
        other = self.twin()
        other.buffer.set_sampler(again)
        assert set(other.draw(4)[0]) <= set(other.legal("done", Slicing(2)))

    def test_slices_have_their_exact_probabilities(self) -> None:
        twin, rule = self.twin(), Slicing(2, weight=self.uniform_over)
        if self.replacement:
            twin.buffer.set_rng(torch.Generator().manual_seed(11))
            assert_drawn_as_expected(Counter(self.slices(twin, 2000)), twin.legal("done", rule))
