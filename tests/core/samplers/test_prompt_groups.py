"""PromptGroupSampler against brute force: groups, elements of groups, and what is chosen after every kind of write."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import warnings
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from rbtool import (
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PromptGroupSampler,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from rbtool.core.samplers.prompt_groups import GroupedRows

CAPACITY = 10
STRATEGIES = ("random", "recency", "reward", "variance")
FILLS = {"one": 1, "partly filled": 7, "full": 10, "wrapped": 14, "wrapped twice": 27}
QUERIES = {
    "one": lambda step: 3,
    "four each": lambda step: step // 4,
    "back and forth": lambda step: step % 3,
    "one each": lambda step: step,
}


def rows(queries: list[Any], first: int = 0) -> TensorDict:
    rewards = [(7 * step) % 5 for step in range(first, first + len(queries))]
    reward = torch.tensor(rewards, dtype=torch.float64).view(-1, 1)
    return TensorDict({"query": torch.tensor(queries), "next": {"reward": reward}}, [len(queries)])


def buffer_of(sampler: Any, storage: Any = LazyTensorStorage, seed: int = 0) -> Any:
    return ReplayBuffer(
        storage=storage(CAPACITY), sampler=sampler, generator=torch.Generator().manual_seed(seed), batch_size=4
    )


def drawn(buffer: Any, size: int) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        index, info = buffer.sampler.sample(buffer.storage, size)
    assert info == {}
    return index.tolist()  # type: ignore[no-any-return]


class Model:
    """Which rows were written when, in a ring."""

    def __init__(self) -> None:
        self.clock, self.cursor = 0, 0
        self.written: dict[int, int] = {}

    def write(self, count: int) -> None:
        for _ in range(count):
            self.touch(self.cursor)
            self.cursor = (self.cursor + 1) % CAPACITY

    def touch(self, row: int) -> None:
        self.clock += 1
        self.written[row] = self.clock


def assert_best(strategy: str, chosen: list[int], members: list[int], rewards: list[float], model: Model) -> None:
    """The elements chosen of one group, without those that were drawn again, are the best ones."""
    count = len(chosen)
    assert len(set(chosen)) == count
    assert set(chosen) <= set(members)
    values = [rewards[row] for row in chosen]
    if strategy == "recency":
        assert chosen == sorted(members, key=model.written.__getitem__)[-count:]
    elif strategy == "reward":
        assert values == sorted((rewards[row] for row in members), reverse=True)[:count]
    elif strategy == "variance":
        best = max(np.var([rewards[row] for row in some]) for some in itertools.combinations(members, count))
        assert values == sorted(values)
        assert math.isclose(np.var(values), best, abs_tol=1e-9)


def assert_drawn(buffer: Any, model: Model, groups: int, each: int) -> None:
    stored = buffer.storage[:]
    ids, rewards = stored["query"].tolist(), stored["next", "reward"].flatten().tolist()
    members = defaultdict(list)
    for row, query in enumerate(ids):
        members[query].append(row)
    batch = drawn(buffer, groups * each)
    parts = [batch[start : start + each] for start in range(0, len(batch), each)]
    assert len(parts) == groups
    found = [ids[part[0]] for part in parts]
    first = found[: len(members)]
    assert len(set(first)) == len(first)
    for part, query in zip(parts, found, strict=True):
        assert {ids[row] for row in part} == {query}
        assert_best(buffer.sampler.strategy, part[: len(members[query])], members[query], rewards, model)


@each("kind", QUERIES)
@each("fill", FILLS)
def test_every_ring(fill: str, kind: str) -> None:
    turn = list(FILLS).index(fill) + list(QUERIES).index(kind)
    storage: Any = (LazyTensorStorage, LazyMemmapStorage, LazyStackStorage)[turn % 3]
    for strategy, cached in itertools.product(STRATEGIES, (True, False)):
        buffer, model = (
            buffer_of(PromptGroupSampler(num_groups=2, strategy=strategy, cache_groups=cached), storage),
            Model(),
        )
        for start in range(0, FILLS[fill], 4):
            queries = [QUERIES[kind](step) for step in range(start, min(start + 4, FILLS[fill]))]
            buffer.extend(rows(queries, start))
            model.write(len(queries))
            assert_drawn(buffer, model, 2, 3)
        for count in (1, 2, 5):
            assert_drawn(buffer, model, 2, count)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["extend", "add", "edit", "mark", "all", "renew", "empty", "copy"]), st.integers(0, 9)),
    max_size=15,
)


@settings(max_examples=100)
@given(ACTIONS, st.sampled_from([LazyTensorStorage, LazyStackStorage]), st.sampled_from(STRATEGIES), st.booleans())
def test_batches_are_right_after_any_history(actions: list[Any], storage: Any, strategy: str, always: bool) -> None:
    buffer, model = buffer_of(PromptGroupSampler(samples_per_group=2, strategy=strategy), storage), Model()
    buffer.extend(rows([0, 1, 1]))
    model.write(3)
    for turn, (action, number) in enumerate(actions):
        row = number % len(buffer)
        if action == "extend" and number:
            buffer.extend(rows([(turn + step) // 3 for step in range(number)], turn))
            model.write(number)
        elif action == "add":
            buffer.add(rows([number], turn)[0])
            model.write(1)
        elif action == "edit":
            buffer[row] = rows([number], turn)[0]
            model.touch(row)
        elif action == "mark":
            buffer.mark_update(row)
            model.touch(row)
        elif action == "all":
            buffer[:] = rows([step % (number + 1) for step in range(len(buffer))], turn)
            for each in range(len(buffer)):
                model.touch(each)
        elif action == "renew":  # the groups are made again from the storage; a ring knows its order
            before = buffer.sampler
            buffer.set_sampler(PromptGroupSampler(samples_per_group=2, strategy=strategy))
            buffer.sampler.load_state_dict(before.state_dict())
        elif action == "empty":
            buffer.empty()
            model = Model()
            buffer.extend(rows([number, 2]))
            model.write(2)
        elif action == "copy":
            buffer = copy.deepcopy(buffer)
        if always or turn == len(actions) - 1:
            assert_drawn(buffer, model, 2, 2)


def test_a_sampler_that_is_set_later_knows_the_newest_rows() -> None:
    buffer, model = ReplayBuffer(storage=LazyTensorStorage(CAPACITY)), Model()
    for start in (0, 7):
        buffer.extend(rows([1] * 7, start))
        model.write(7)
    buffer.set_sampler(PromptGroupSampler(num_groups=1, strategy="recency"))
    assert drawn(buffer, 4) == [0, 1, 2, 3]
    assert drawn(buffer, 7) == [7, 8, 9, 0, 1, 2, 3]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_and_elements_are_equally_likely(strategy: str) -> None:
    buffer = buffer_of(PromptGroupSampler(num_groups=2, strategy=strategy))
    queries = [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]
    data = rows(queries)
    data["next", "reward"].zero_()  # all are equal: chance decides
    buffer.extend(data)
    found = Counter[tuple[int, int]]()
    draws = 1500
    for _ in range(draws):
        batch = drawn(buffer, 4)
        found.update((queries[row], row) for row in batch)
    for query, size in ((0, 5), (1, 2), (2, 3)):
        total = sum(count for (group, _), count in found.items() if group == query)
        assert abs(total - 2 * draws * 2 / 3) < 5 * math.sqrt(draws)
        if strategy != "recency":
            each = [found[query, row] for row, group in enumerate(queries) if group == query]
            assert len(each) == size
            assert all(abs(count - total / size) < 6 * math.sqrt(total / size) for count in each)


def test_strings_and_tokens_name_groups() -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyStackStorage(10), sampler=PromptGroupSampler(num_groups=3), batch_size=6
    )
    buffer.extend(TensorDict({"query": NonTensorStack(*"aabbccaabb")}, [10]))
    index = buffer.sample()["index"].tolist()
    assert {frozenset("aabbccaabb"[row] for row in index[start : start + 2]) for start in (0, 2, 4)} == {
        frozenset(name) for name in "abc"
    }
    tokens = torch.tensor([[1, 2], [1, 2], [1, 3], [1, 3]])
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(9), sampler=PromptGroupSampler(num_groups=2), batch_size=4
    )
    buffer.extend(TensorDict({"query": tokens}, [4]))
    assert sorted(map(sorted, buffer.sample()["index"].view(2, 2).tolist())) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("way", ["dumps", "state_dict", "pickle"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_saved_buffers_continue(strategy: str, way: str, tmp_path: Any) -> None:
    one, other = (buffer_of(PromptGroupSampler(num_groups=2, strategy=strategy), seed=seed) for seed in (1, 2))
    for start in range(0, 24, 6):
        one.extend(rows([step // 4 % 4 for step in range(start, start + 6)], start))
        drawn(one, 4)
    one[3] = rows([2], 5)[0]
    other.extend(rows([5, 5]))
    if way == "dumps":
        one.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    elif way == "state_dict":
        other.load_state_dict(one.state_dict())
    else:
        state = one.sampler.generator.get_state()
        other = pickle.loads(pickle.dumps(one))
        other.set_rng(torch.Generator().set_state(state))
    for start in (24, 30):
        assert [drawn(one, 4) for _ in range(5)] == [drawn(other, 4) for _ in range(5)]
        for buffer in (one, other):
            buffer.extend(rows([3] * 6, start))


def test_recency_is_kept_in_a_larger_storage(tmp_path: Any) -> None:
    one = buffer_of(PromptGroupSampler(num_groups=1, strategy="recency"))
    for start in (0, 7):
        one.extend(rows([1] * 7, start))
    one[6] = rows([1])[0]
    assert drawn(one, 3) == [2, 3, 6]
    one.dumps(tmp_path / "saved")
    other = ReplayBuffer(storage=LazyTensorStorage(15), sampler=PromptGroupSampler(num_groups=1, strategy="recency"))
    other.loads(tmp_path / "saved")
    assert drawn(other, 3) == [8, 9, 2]
    other.extend(rows([1]))
    assert drawn(other, 3) == [9, 2, 10]


def test_states_of_torchrl_are_read() -> None:
    sampler = PromptGroupSampler(num_groups=1, strategy="recency")
    buffer = buffer_of(sampler)
    buffer.extend(rows([1] * 4))
    sampler.load_state_dict({"position_recency": torch.tensor([4, 9, 6, 8]), "recency_clock": 9})
    assert drawn(buffer, 4) == [0, 2, 3, 1]
    buffer.add(rows([1])[0])
    assert drawn(buffer, 2) == [1, 4]
    sampler.load_state_dict({})
    with pytest.raises(RuntimeError, match="len_storage"):
        sampler.load_state_dict({"len_storage": 3})


def test_small_groups_are_announced_once() -> None:
    buffer = buffer_of(PromptGroupSampler(num_groups=2))
    buffer.extend(rows([1, 1, 2]))
    with pytest.warns(UserWarning, match="drawn repeatedly"):
        buffer.sample()
    assert len(buffer.sample()) == 4


def test_the_generator_alone_decides() -> None:
    buffers = [buffer_of(PromptGroupSampler(num_groups=2), seed=seed) for seed in (5, 5, 6)]
    before = torch.get_rng_state()
    batches = []
    for buffer in buffers:
        buffer.extend(rows([step // 3 for step in range(10)]))
        batches.append([drawn(buffer, 6) for _ in range(10)])
    assert batches[0] == batches[1] != batches[2]
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, TypeError),
        ({"num_groups": 1, "samples_per_group": 1}, TypeError),
        ({"num_groups": 2.0}, TypeError),
        ({"samples_per_group": True}, TypeError),
        ({"num_groups": 0}, ValueError),
        ({"samples_per_group": -1}, ValueError),
        ({"num_groups": 1, "strategy": "best"}, ValueError),
        ({"num_groups": 1, "group_key": 3}, ValueError),
    ],
)
def test_arguments_without_sense_are_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        PromptGroupSampler(**arguments)


@pytest.mark.parametrize("arguments", [{"num_groups": 3}, {"samples_per_group": 3}])
def test_batch_sizes_that_cannot_be_divided_are_refused(arguments: dict[str, Any]) -> None:
    buffer = buffer_of(PromptGroupSampler(**arguments))
    buffer.extend(rows([1] * 4))
    with pytest.raises(ValueError, match="cannot be divided by"):
        buffer.sample()


def test_storages_without_groups_are_refused() -> None:
    listed = ReplayBuffer(storage=ListStorage(10), sampler=PromptGroupSampler(num_groups=1), batch_size=2)
    listed.extend(rows([1] * 4))
    with pytest.raises(TypeError, match="ListStorage"):
        listed.sample()
    lanes = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2), sampler=PromptGroupSampler(num_groups=1), batch_size=2)
    lanes.extend(TensorDict({"query": torch.zeros(2, 3)}, [2, 3]))
    with pytest.raises(NotImplementedError, match="2"):
        lanes.sample()
    with pytest.raises(RuntimeError, match="empty"):
        buffer_of(PromptGroupSampler(num_groups=1)).sample()


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyStackStorage])
def test_entries_that_do_not_fit_are_refused(storage: Any) -> None:
    cases = [
        ({"other": torch.zeros(4)}, {}, KeyError, "query"),
        ({"query": torch.full((4,), torch.nan)}, {}, RuntimeError, "NaN"),
        ({"query": torch.zeros(4)}, {"strategy": "reward"}, KeyError, "next.reward"),
        ({"query": torch.zeros(4), "r": torch.zeros(4, 2)}, {"strategy": "reward", "reward_key": "r"},
         (RuntimeError, TypeError), "one number"),
        ({"query": torch.zeros(4), "r": torch.full((4,), torch.nan)}, {"strategy": "variance", "reward_key": "r"},
         RuntimeError, "is NaN"),
    ]  # fmt: skip
    for entries, arguments, error, message in cases:
        buffer = buffer_of(PromptGroupSampler(num_groups=1, **arguments), storage)  # type: ignore[arg-type]
        buffer.extend(TensorDict(entries, [4]))
        for kind in error if isinstance(error, tuple) else (error,):
            with pytest.raises(kind, match=message):
                buffer.sample()


@pytest.mark.parametrize("kind", [int, float, str, lambda number: (number, -number)])
def test_rows_placed_at_once_are_grouped_as_one_by_one(kind: Any) -> None:
    rows = np.random.default_rng(0).permutation(300)
    ids = [kind(int(number)) for number in np.random.default_rng(1).integers(-20, 20, 300)]
    whole, single = GroupedRows(), GroupedRows()
    whole.place(rows, ids)
    single.place(np.arange(300), [None] * 300)
    single.place(rows, ids)
    for groups in (whole, single):
        expected = {new: {row for row, own in zip(rows.tolist(), ids, strict=True) if own == new} for new in ids}
        assert sorted(map(sorted, expected.values())) == sorted(sorted(groups.members(n)) for n in range(len(groups)))
        assert sorted(groups.in_order().tolist()) == list(range(300))
    again = GroupedRows()
    again.place(whole.in_order(), [dict(zip(rows.tolist(), ids, strict=True))[row] for row in whole.in_order()])
    assert again.in_order().tolist() == whole.in_order().tolist()
    whole.place(rows[:150], ids[150:])  # later moves find every row where it is
    moved = dict(zip(rows.tolist(), ids[150:] + ids[150:], strict=True))
    assert {moved[row] for row in whole.members(0)} == {moved[whole.members(0)[0]]}
    assert len(whole) == len(set(moved.values()))
