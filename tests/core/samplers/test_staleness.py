"""StalenessAwareSampler against brute force: which elements, how often, in what order, on every kind of ring."""

from __future__ import annotations

import itertools
import math
import multiprocessing
from collections import Counter
from typing import Any

import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from waiting import HANG

from rbtool import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)

CAPACITY = 8
FILLS = {"one": 1, "partly filled": 5, "full": 8, "wrapped": 11, "wrapped twice": 21}
VERSIONS = {
    "one": lambda step: 3,
    "a step each": lambda step: step,
    "ragged": lambda step: step // 3,
    "back and forth": lambda step: step % 3,
    "future": lambda step: 40 + step // 2,
}


def rows(versions: list[Any], lanes: int = 0) -> TensorDict:
    version = torch.tensor(versions)
    if lanes:
        version = version[:, None] + torch.arange(lanes) // 2
    return TensorDict({"policy_version": version, "obs": torch.zeros(*version.shape, 2)}, version.shape)


def filled(fill: str, kind: str, storage: Any, sampler: Any, *, lanes: int = 0, seed: int = 0) -> ReplayBuffer:
    held = storage(CAPACITY * max(lanes, 1), ndim=2) if lanes else storage(CAPACITY)
    generator = torch.Generator().manual_seed(seed)
    buffer = ReplayBuffer(storage=held, sampler=sampler, dim_extend=0, generator=generator)
    versions = [VERSIONS[kind](step) for step in range(FILLS[fill])]
    for start in range(0, len(versions), 4):
        buffer.extend(rows(versions[start : start + 4], lanes))
        buffer.sample(1)  # so that the sampler follows each write
    return buffer


def stored(buffer: Any) -> dict[tuple[int, ...], float]:
    """The version of each element, read from the storage."""
    storage = buffer.storage
    return {
        place: float(storage[place[0]]["policy_version"][place[1:]])
        for place in itertools.product(*map(range, storage.shape))
    }


def drawn(buffer: Any, size: int) -> tuple[list[tuple[int, ...]], list[float]]:
    index, info = buffer.sampler.sample(buffer.storage, size)
    index = index if isinstance(index, tuple) else (index,)
    return list(zip(*(part.tolist() for part in index), strict=True)), info["staleness"].tolist()


def assert_as_stored(buffer: Any, limit: float = math.inf) -> None:
    """A batch of all that can be drawn has each element once, with its staleness."""
    now = buffer.sampler.consumer_version
    expected = {place: max(now - version, 0.0) for place, version in stored(buffer).items()}
    expected = {place: staleness for place, staleness in expected.items() if staleness <= limit}
    if not expected:
        with pytest.raises(RuntimeError, match="can be drawn"):
            drawn(buffer, 1)
        return
    places, staleness = drawn(buffer, len(expected))
    assert dict(zip(places, staleness, strict=True)) == expected
    many, _ = drawn(buffer, 4 * len(expected) + 1)
    assert set(many) <= expected.keys()


@each("lanes", [0, 3])
@each("kind", VERSIONS)
@each("fill", FILLS)
def test_every_ring(fill: str, kind: str, lanes: int) -> None:
    for storage, limit in itertools.product(
        (LazyTensorStorage, LazyMemmapStorage) if lanes else (LazyTensorStorage, ListStorage, LazyStackStorage),
        (-1, 0, 2),
    ):
        sampler = StalenessAwareSampler()
        buffer = filled(fill, kind, storage, sampler, lanes=lanes)
        for version in (0, 3, 6, 41):
            sampler.consumer_version, sampler.max_staleness = version, limit
            assert_as_stored(buffer, math.inf if limit < 0 else limit)


def chances(weights: list[float], size: int) -> dict[tuple[int, ...], float]:
    """The probability of each ordered draw of `size` elements, one after the other by weight."""
    found = {}
    for order in itertools.permutations([place for place, weight in enumerate(weights) if weight], size):
        chance, left = 1.0, sum(weights)
        for place in order:
            chance, left = chance * weights[place] / left, left - weights[place]
        found[order] = chance
    return found


@pytest.mark.parametrize(("size", "batch"), [(5, 2), (7, 2), (8, 3), (8, 8)])
def test_batches_have_their_exact_probabilities(size: int, batch: int) -> None:
    weigh = torch.tensor([0.0, 1.0, 4.0, 0.25])
    sampler = StalenessAwareSampler(staleness_weight_fn=lambda staleness: weigh[staleness.long()])
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, generator=torch.Generator().manual_seed(1))
    versions = [3, 0, 1, 1, 0, 2, 2, 1][:size]
    buffer.extend(rows(versions))
    sampler.consumer_version = 3
    weights = [float(weigh[3 - version]) for version in versions]
    expected = chances(weights, batch) if batch < 8 else None
    draws, found = 4000, Counter[tuple[int, ...]]()
    for _ in range(draws):
        places, _ = drawn(buffer, batch)
        found[tuple(place for (place,) in places)] += 1
    if expected is None:  # more than can be drawn: with replacement
        singles = Counter(place for order, count in found.items() for place in order for _ in range(count))
        found, draws = Counter({(place,): count for place, count in singles.items()}), draws * batch
        expected = chances(weights, 1)
    assert found.keys() <= expected.keys()
    for order, chance in expected.items():
        assert abs(found[order] - draws * chance) < 5 * math.sqrt(draws * chance) + 3


def test_elements_of_tiny_weight_are_drawn_after_all_others() -> None:
    """One element has nearly all of the weight: the others are found by comparing all."""
    weigh = torch.tensor([1e12, 1.0, 1.0, 1e-300], dtype=torch.float64)
    sampler = StalenessAwareSampler(staleness_weight_fn=lambda staleness: weigh[staleness.long()])
    buffer = ReplayBuffer(storage=LazyTensorStorage(50), sampler=sampler, generator=torch.Generator().manual_seed(1))
    buffer.extend(rows([3] + [2] * 24 + [0] * 25))
    sampler.consumer_version = 3
    for size in (20, 24, 50):
        places, _ = drawn(buffer, size)
        assert len(set(places)) == size
        assert places[0] == (0,)
        assert all(place < 25 for (place,) in places[: min(size, 25)])


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["extend", "add", "edit", "set", "publish", "empty"]), st.integers(0, 9)), max_size=15
)


@settings(max_examples=80)
@given(ACTIONS, st.sampled_from([LazyTensorStorage, ListStorage]), st.sampled_from([-1, 0, 2]))
def test_batches_are_right_after_any_history(actions: list[Any], storage: Any, limit: int) -> None:
    sampler = StalenessAwareSampler(limit)
    buffer = ReplayBuffer(storage=storage(CAPACITY), sampler=sampler, generator=torch.Generator().manual_seed(0))
    buffer.extend(rows([0, 0]))
    for action, number in actions:
        if action == "extend" and number:
            buffer.extend(rows([sampler.consumer_version + step // 3 for step in range(min(number, CAPACITY))]))
        elif action == "add":
            buffer.add(rows([number])[0])
        elif action == "edit":
            buffer[number % len(buffer)] = rows([number])[0]
        elif action == "set":
            buffer[:] = rows([number] * len(buffer))
        elif action == "publish":
            sampler.increment_consumer_version()
        elif action == "empty":
            buffer.empty()
            assert sampler.consumer_version == 0
            buffer.extend(rows([number]))
        assert_as_stored(buffer, math.inf if limit < 0 else limit)


def test_entries_edited_in_place_are_seen() -> None:
    sampler = StalenessAwareSampler(0)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler)
    buffer.extend(rows([0] * 8))
    assert len(set(buffer.sample(8)["index"].tolist())) == 8
    buffer.set_("policy_version", torch.arange(8))
    sampler.consumer_version = 8
    with pytest.raises(RuntimeError, match="least staleness is 1 at version 8"):
        buffer.sample(2)
    sampler.consumer_version = 6
    assert set(buffer.sample(9)["index"].tolist()) == {6, 7}


def test_samples_have_their_staleness() -> None:
    sampler = StalenessAwareSampler(version_key=("collector", "version"))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=9)
    buffer.extend(TensorDict({"collector": {"version": torch.arange(9).view(9, 1)}}, [9]))
    sampler.consumer_version = 10
    batch = buffer.sample()
    assert batch["staleness"].dtype == torch.float32
    assert torch.equal(batch["staleness"], 10.0 - batch["collector", "version"][:, 0])


@pytest.mark.parametrize("way", ["dumps", "state_dict"])
def test_saved_buffers_continue(way: str, tmp_path: Any) -> None:
    one = filled("wrapped", "ragged", LazyTensorStorage, StalenessAwareSampler(3))
    one.sampler.consumer_version = 4
    other = filled("one", "one", LazyTensorStorage, StalenessAwareSampler())
    if way == "dumps":
        one.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    else:
        other.load_state_dict(one.state_dict())
    assert one.sampler.state_dict() == other.sampler.state_dict() == {"consumer_version": 4, "max_staleness": 3}
    for _ in range(5):
        assert drawn(one, 3) == drawn(other, 3)


def test_the_generator_alone_decides() -> None:
    one, again, other = (
        filled("full", "ragged", LazyTensorStorage, StalenessAwareSampler(), seed=seed) for seed in (5, 5, 6)
    )
    before = torch.get_rng_state()
    batches = [[drawn(buffer, 3) for _ in range(10)] for buffer in (one, again, other)]
    assert batches[0] == batches[1] != batches[2]
    assert torch.equal(before, torch.get_rng_state())


def _publish(buffer: Any) -> None:
    buffer.extend(rows([7, 7]))
    buffer.sampler.consumer_version = 7


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_processes_write_and_publish(start: str) -> None:
    sampler = StalenessAwareSampler(0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, shared=True, batch_size=1)
    buffer.extend(rows([0] * 4))
    assert sorted(drawn(buffer, 4)[0]) == [(row,) for row in range(4)]
    process = multiprocessing.get_context(start).Process(target=_publish, args=(buffer,))
    process.start()
    process.join(HANG)
    assert process.exitcode == 0
    assert sampler.consumer_version == 7
    assert sorted(drawn(buffer, 2)[0]) == [(4,), (5,)]


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_staleness": -2},
        {"max_staleness": float("nan")},
        {"max_staleness": True},
        {"max_staleness": "1"},
        {"staleness_weight_fn": 3},
        {"version_key": 3},
    ],
)
def test_arguments_without_sense_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"max_staleness|staleness_weight_fn|the key"):
        StalenessAwareSampler(**arguments)


@pytest.mark.parametrize("version", [1.5, "1", None, True])
def test_consumer_versions_without_sense_are_refused(version: Any) -> None:
    with pytest.raises(ValueError, match="consumer_version"):
        StalenessAwareSampler().consumer_version = version


def test_entries_that_are_no_versions_are_refused() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=StalenessAwareSampler(), batch_size=2)
    buffer.extend(TensorDict({"obs": torch.zeros(4)}, [4]))
    with pytest.raises(KeyError, match="policy_version"):
        buffer.sample()
    for values, message in (
        (torch.zeros(4, 2), "one id for each"),
        (torch.zeros(4, dtype=torch.complex64), "versions as numbers"),
        (torch.full((4,), torch.nan), "not finite"),
    ):
        buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=StalenessAwareSampler(), batch_size=2)
        buffer.extend(TensorDict({"policy_version": values}, [4]))
        with pytest.raises(RuntimeError, match=message):
            buffer.sample()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda staleness: -staleness - 1, "negative"),
        (lambda staleness: staleness / 0, "not finite"),
        (lambda staleness: torch.ones(3, 3), "one weight for each"),
    ],
)
def test_functions_that_return_no_weights_are_refused(function: Any, message: str) -> None:
    buffer = filled("full", "ragged", ListStorage, StalenessAwareSampler())
    buffer.sampler.staleness_weight_fn = function
    with pytest.raises(ValueError, match=message):
        buffer.sample(2)


def test_states_of_other_samplers_are_refused() -> None:
    sampler = StalenessAwareSampler(2)
    sampler.consumer_version = 3
    with pytest.raises(RuntimeError, match="missing"):
        sampler.load_state_dict({"len_storage": 3})
    assert sampler.state_dict() == {"consumer_version": 3, "max_staleness": 2}
