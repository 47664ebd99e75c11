"""Windows of steps against a plain walk: in rings and datasets, with samplers, in loaders, mixtures and streams."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import rbtool
from rbtool.core.errors import MissingKeyError, SchemaError, UsageError
from rbtool.core.samplers.base import Sampler
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.slice_samplers import (
    CONTENTS,
    SITUATIONS,
    Coordinates,
    RingModel,
    Twin,
    situation,
    step_lists,
    tensordict_of,
)
from rbtool.core.transforms.windows import Windows

# Rings -----------------------------------------------------------------------------------------------

OFFSETS = ([0], [0, 1, 2, 3], [-2, -1, 0], [3], [-5, 0, 5], [20, -20, 0])


def walked(model: RingModel, place: Coordinates, offset: int) -> tuple[int, bool]:
    """Walk step by step as long as the next one is of the episode and in the ring: the number, and if it fell short."""
    slot, *lanes = place
    lane, way = (lanes or [0])[0], 1 if offset > 0 else -1
    for left in range(abs(offset), 0, -1):
        earlier = slot if way > 0 else (slot - 1) % model.capacity
        if not (model.follows(earlier, lane, "ids") and model.follows(earlier, lane, "done")):
            return model.step_at((slot, *lanes)).number, left > 0
        slot = (slot + way) % model.capacity
    return model.step_at((slot, *lanes)).number, False


def require_windows(batch: Any, model: RingModel, offsets: Sequence[int], pad: str = "clamp") -> None:
    """Compare every step of a batch, by its index, with the walk."""
    places = batch["index"].reshape(-1, model.ndim).tolist()
    found = batch["number"].reshape(-1, len(offsets)).tolist()
    missing = batch["is_pad", "number"].reshape(-1, len(offsets)).tolist()
    assert len(places) == len(found) == len(missing)
    for place, numbers, pads in zip(places, found, missing, strict=True):
        wanted = [walked(model, tuple(place), offset) for offset in offsets]
        assert pads == [short for _, short in wanted], place
        assert numbers == [0 if short and pad == "zero" else number for number, short in wanted], place


def drawing(twin: Twin, sampler: Sampler, offsets: Sequence[int], pad: Any = "clamp", **more: Any) -> Any:
    return rbtool.TensorDictReplayBuffer(
        storage=twin.buffer.storage, sampler=sampler, transform=Windows({"number": list(offsets)}, pad=pad),
        batch_size=8, writer=rbtool.ImmutableDatasetWriter(), **more,
    )  # fmt: skip


@each("ndim", [1, 2])
@each("contents", CONTENTS)
@each("name", SITUATIONS)
def test_every_row_of_every_ring(name: str, contents: str, ndim: int) -> None:
    twin = situation(name, contents, lanes=ndim, ndim=ndim)
    for offsets, pad in product(OFFSETS, ("clamp", "zero")):
        buffer = drawing(twin, rbtool.RandomSampler(), offsets, pad)
        for _ in range(2):
            require_windows(buffer.sample(), twin.model, offsets, pad)


@given(st.data())
def test_windows_are_right_after_any_history(data: st.DataObject) -> None:
    capacity, lanes = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 2))
    twin, ndim = Twin(capacity, None, lanes, 2 if lanes > 1 else 1), 2 if lanes > 1 else 1
    rows, place = data.draw(step_lists(lanes, 3 * capacity)), 0
    offsets = data.draw(st.lists(st.integers(-6, 6), min_size=1, max_size=5))
    buffer = drawing(twin, rbtool.RandomSampler(), offsets)
    while place < len(rows):
        count = data.draw(st.integers(1, capacity))
        part, place = rows[place : place + count], place + count
        twin.buffer.extend(tensordict_of(part, ndim))
        twin.model.extend(part)
        require_windows(buffer.sample(), twin.model, offsets)


SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": rbtool.RandomSampler,
    "without replacement": rbtool.SamplerWithoutReplacement,
    "prioritized": lambda: rbtool.PrioritizedSampler(100, 0.6, 0.4),
    "prompt groups": lambda: rbtool.PromptGroupSampler(samples_per_group=2, group_key="episode"),
    "slices": lambda: rbtool.SliceSampler(slice_len=2, strict_length=False),
    "batched": lambda: rbtool.SliceSampler(slice_len=4, strict_length=False, pad_output=True, batched=True),
}


@pytest.mark.filterwarnings("ignore:the storage has")  # fewer elements of a group than samples
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler(name: str, prefetch: int | None) -> None:
    twin = situation("wrapped mid-episode", "ragged")
    buffer = drawing(twin, SAMPLERS[name](), [-1, 0, 1, 2], prefetch=prefetch)
    for _ in range(6):
        require_windows(buffer.sample(), twin.model, [-1, 0, 1, 2])


def test_indexed_rows_have_windows() -> None:
    twin = situation("wrapped mid-episode", "ragged")
    buffer = drawing(twin, rbtool.RandomSampler(), [0, 1])
    wanted = [[walked(twin.model, (row,), offset)[0] for offset in (0, 1)] for row in range(len(buffer))]
    assert buffer[:]["number"].tolist() == wanted
    assert buffer[3]["number"].tolist() == wanted[3]
    assert buffer[-1]["is_pad", "number"].shape == (2,)
    square = buffer[torch.tensor([[4, 1], [0, 11]])]["number"]
    assert square.tolist() == [[wanted[4], wanted[1]], [wanted[0], wanted[11]]]
    with pytest.raises(IndexError):
        buffer[12]


def test_steps_of_a_list_have_windows() -> None:
    steps = [TensorDict({"x": torch.tensor(n), "next": {"done": torch.tensor([n % 3 == 2])}}) for n in range(7)]
    buffer = rbtool.ReplayBuffer(storage=rbtool.ListStorage(10), transform=Windows({"x": (0, 3)}), batch_size=4)
    buffer.extend(steps)
    batch = buffer[torch.arange(7)]
    assert batch["x"].tolist() == [[0, 1, 2], [1, 2, 2], [2, 2, 2], [3, 4, 5], [4, 5, 5], [5, 5, 5], [6, 6, 6]]


def test_windows_are_of_one_moment_while_a_thread_writes() -> None:
    buffer = rbtool.TensorDictReplayBuffer(
        storage=rbtool.LazyTensorStorage(50), transform=Windows({"number": (-3, 5)}), batch_size=32
    )
    over = threading.Event()

    def write() -> None:
        number = torch.arange(buffer.write_count, buffer.write_count + 17)
        done = (number % 10 == 9).unsqueeze(-1)
        buffer.extend(TensorDict({"number": number, "next": {"done": done}}, [17]))

    def write_on() -> None:
        while not over.is_set():
            write()

    write()
    writer, drawn = threading.Thread(target=write_on), 0
    writer.start()
    try:
        while drawn < 300 or buffer.write_count == 17:
            batch = buffer.sample()
            real, anchor = ~batch["is_pad", "number"], batch["number"][:, 3:4]
            assert bool(((batch["number"] == anchor + torch.arange(-3, 5)) == real).all())
            assert bool((batch["number"] // 10 == anchor // 10).all())
            drawn += 1
    finally:
        over.set()
        writer.join()


def test_a_pickled_buffer_has_windows() -> None:
    twin = situation("partly filled", "ragged")
    buffer = pickle.loads(pickle.dumps(drawing(twin, rbtool.RandomSampler(), [0, 2])))
    require_windows(buffer.sample(), twin.model, [0, 2])


# How windows are written -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "offsets"),
    [
        ((0, 4), [0, 1, 2, 3]),
        ((-2, 1), [-2, -1, 0]),
        ("0:4", [0, 1, 2, 3]),
        (" -2 : 1 ", [-2, -1, 0]),
        ([0], [0]),
        ([5, -1, 5], [5, -1, 5]),
        (range(-4, 5, 4), [-4, 0, 4]),
        ("0s:0.5s", [0, 1, 2, 3, 4]),
        ("-0.1s:0.05s", [-1, 0]),
        ((0, 0.3), [0, 1, 2]),
        ([i / 10 for i in range(5)], [0, 1, 2, 3, 4]),
        ([-0.3, 0, 1], [-3, 0, 10]),
        ([0.10004], [1]),
        ((np.int64(0), np.int64(2)), [0, 1]),
        ([np.float32(0.2)], [2]),
    ],
)
def test_windows_are_given_as_bounds_texts_or_offsets(window: Any, offsets: list[int]) -> None:
    found = Windows({"x": window}, fps=10).windows["x"]
    assert found.tolist() == offsets
    assert found.dtype == np.int64


STORED = TensorDict(
    {"x": torch.zeros(4), "y": {"z": torch.zeros(4), "w": torch.zeros(4)}, "episode": torch.zeros(4)}, [4]
)


@pytest.mark.parametrize(
    ("windows", "error", "words"),
    [
        ({}, UsageError, "expected a dict"),
        ([("x", (0, 1))], UsageError, "expected a dict"),
        ({"x": (0, 0)}, UsageError, "no steps"),
        ({"x": []}, UsageError, "expected"),
        ({"x": (0, 1, 2)}, UsageError, "two bounds"),
        ({"x": 4}, UsageError, "expected"),
        ({"x": [True]}, UsageError, "expected"),
        ({"x": "0:1.5"}, UsageError, "expected"),
        ({"x": "0s:1"}, UsageError, "expected"),
        ({"x": ["a"]}, UsageError, "expected"),
        ({"x": "0s:1s"}, UsageError, "steps per second is unknown"),
        ({"x": [0.5]}, UsageError, "steps per second is unknown"),
        ({"x": (0, float("inf"))}, UsageError, "steps per second is unknown"),
        ({"X": (0, 1)}, MissingKeyError, "X is not in the data.*did you mean 'x'"),
        ({"y": (0, 1), "y.z": (0, 2)}, UsageError, "y.z has two windows"),
        ({"x": (0, 1), ("x",): (0, 2)}, UsageError, "x has two windows"),
        ({3: (0, 1)}, UsageError, "the key is 3"),
        ({"x": (0, 10**9)}, UsageError, "at most 1,048,576 away"),
        ({"x": "0:99999999999999999999"}, UsageError, "at most 1,048,576 away"),
        ({"x": range(10**12)}, UsageError, "at most 1,048,576 away"),
        ({"x": [2**63 - 1]}, UsageError, "at most 1,048,576 away"),
    ],
)
def test_windows_without_sense_are_refused(windows: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        rbtool.ReplayBuffer(storage=TensorStorage(STORED), transform=Windows(windows))[:]


def test_seconds_paddings_and_rates_without_sense_are_refused() -> None:
    for windows, words in (({"x": [0.05]}, "between two steps"), ({"x": [0.1, float("nan")]}, "finite")):
        with pytest.raises(UsageError, match=words):
            Windows(windows, fps=10)
    for fps in (0, "30"):
        with pytest.raises(UsageError, match=f"fps is {fps!r}"):
            Windows({"x": (0, 1)}, fps=fps)  # type: ignore[arg-type]
    assert Windows({"x": (0.0, 0.001)}, fps=50_000).windows["x"].tolist() == list(range(50))
    with pytest.raises(UsageError, match="pad is 'mirror'"):
        Windows({"x": (0, 1)}, pad="mirror")  # type: ignore[arg-type]


def test_a_buffer_that_relabels_refuses_windows() -> None:
    end, position = torch.tensor([[False], [False], [True]]), torch.arange(4).view(4, 1)
    steps = TensorDict({"achieved_goal": position[:3], "desired_goal": torch.full((3, 1), 9)}, [3])
    steps["next"] = TensorDict({"achieved_goal": position[1:], "reward": torch.zeros(3, 1), "done": end}, [3])
    buffer = rbtool.HERReplayBuffer(
        lambda rows: rows["desired_goal"].float(), storage=rbtool.LazyTensorStorage(10), batch_size=4,
        transform=Windows({"achieved_goal": (0, 2)}),
    )  # fmt: skip
    buffer.extend(steps)
    with pytest.raises(UsageError, match="would not relabel them"):
        buffer.sample()


def test_elements_without_windows_are_refused() -> None:
    whole = TensorDict({"x": torch.zeros(2, 4), "next": {"done": torch.zeros(2, 4, 1)}}, [2, 4])
    with pytest.raises(SchemaError, match="expected single steps"):
        rbtool.ReplayBuffer(storage=TensorStorage(whole), transform=Windows({"x": (0, 1)}))[:]
    taken, bare = STORED.clone().set("is_pad", torch.zeros(4)), STORED.exclude("episode")
    with pytest.raises(SchemaError, match="'is_pad' of its own"):
        rbtool.ReplayBuffer(storage=TensorStorage(taken), transform=Windows({"x": (0, 1)}))[:]
    with pytest.raises(MissingKeyError, match="episodes cannot be separated"):
        rbtool.ReplayBuffer(storage=TensorStorage(bare), transform=Windows({"x": (0, 1)}))[:]


def test_members_with_windows_of_other_lengths_are_refused() -> None:
    members = [
        rbtool.TensorDictReplayBuffer(storage=TensorStorage(STORED.clone()), transform=Windows({"x": (0, stop)}))
        for stop in (2, 3)
    ]
    with pytest.raises(SchemaError, match="members differ in 'x'"):
        rbtool.ReplayBufferEnsemble(*members, batch="exact", batch_size=4).sample()
