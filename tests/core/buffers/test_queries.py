"""Trajectories of batches, buffers and datasets, against a slow model of rings, and conditions on them."""

from __future__ import annotations

import warnings
from itertools import groupby, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict, lazy_stack

from rbtool import (
    LazyTensorStorage,
    ListStorage,
    MissingKeyError,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SchemaError,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    Trajectory,
    TrajectoryPredicate,
    filter_trajectories,
    iter_trajectories,
    traj,
)
from rbtool.core.testing.slice_samplers import (
    CONTENTS,
    SITUATIONS,
    RingModel,
    Step,
    episodes,
    rows_of,
    situation,
    step_lists,
    tensordict_of,
)

CAPACITY = 12


def steps(lengths: list[int]) -> TensorDict:
    """Trajectories whose rewards are 0, 1, 2 … and whose last step is terminated."""
    data = tensordict_of(rows_of([episodes(lengths, ["terminated"])], sum(lengths)))
    data["next", "reward"] = torch.cat([torch.arange(float(n)) for n in lengths]).unsqueeze(-1)
    data["observation"] = torch.arange(sum(lengths)).unsqueeze(-1) + torch.tensor([0.0, 0.5])
    return data


def numbers(found: list[Trajectory]) -> list[list[int]]:
    return [one["number"].tolist() for one in found]


def runs_by_id(model: RingModel) -> list[list[int]]:
    """The numbers of the steps of each run of one id, in the order of time and lane by lane."""
    return [[model.step_at(place).number for place in run] for run in model.runs("ids")]


@pytest.mark.parametrize(("name", "contents", "ndim"), list(product(SITUATIONS, CONTENTS, (1, 2))))
def test_trajectories_of_rings(name: str, contents: str, ndim: int) -> None:
    twin = situation(name, contents, lanes=ndim, ndim=ndim)
    assert numbers(twin.buffer.query()) == runs_by_id(twin.model)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 2), st.data(), st.booleans())
def test_histories_of_writes(ndim: int, data: Any, by_flags: bool) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY * ndim, ndim=ndim))
    model = RingModel(CAPACITY, ndim, ndim)
    rows = data.draw(step_lists(ndim, 40))
    while rows:
        count = data.draw(st.integers(1, CAPACITY))
        given_rows, rows = rows[:count], rows[count:]
        found = tensordict_of(given_rows, ndim)
        buffer.extend(found.exclude("episode") if by_flags else found)
        model.extend(given_rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            listed = numbers(buffer.query())
        expected = model.runs("either" if by_flags else "ids")
        assert listed == [[model.step_at(place).number for place in run] for run in expected]


@settings(max_examples=25, deadline=None)
@given(step_lists(1, 20))
def test_batches(rows: list[tuple[Step, ...]]) -> None:
    groups = [[step.number for step in part] for _, part in groupby((row[0] for row in rows), lambda s: s.trajectory)]
    assert numbers(list(iter_trajectories(tensordict_of(rows)))) == groups


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_empty_and_list_storages(storage: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=storage(20))
    assert buffer.query() == []
    buffer.extend(steps([2, 5, 3]))
    assert [one.length for one in buffer.query(traj.length > 2)] == [5, 3]
    assert buffer.query(traj.length == 5)[0]["next", "reward"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert filter_trajectories(steps([2])[:0]) == []


CONDITIONS = {
    "length": (traj.length >= 3, lambda one: len(one) >= 3),
    "total": (traj.total_reward > 5, lambda one: one.total_reward > 5),
    "sum": (traj["next", "reward"].sum() == 3, lambda one: sum(one.reward.flatten().tolist()) == 3),
    "mean": (traj.reward.mean() < 1.5, lambda one: one.reward.mean() < 1.5),
    "max": (traj.reward.max() != 2, lambda one: one.reward.max() != 2),
    "min": (traj.number.min() <= 4, lambda one: one.number[0] <= 4),
    "first": (traj.number.first() > 1, lambda one: one.number[0] > 1),
    "last": (traj.number.last() < 9, lambda one: one.number[-1] < 9),
    "two": (traj.reward.sum() > traj.length, lambda one: one.reward.sum() > len(one)),
    "any": ((traj.number == 6).any(), lambda one: 6 in one.number),
    "all": ((traj.observation > 2).all(), lambda one: bool((one.observation > 2).all())),
    "and": ((traj.length > 1) & (traj.length < 4), lambda one: 1 < len(one) < 4),
    "or": ((traj.length < 2) | (traj.reward.max() > 2), lambda one: len(one) < 2 or one.reward.max() > 2),
    "not": (~(traj.length == 3), lambda one: len(one) != 3),
    "function": ((traj.length > 1) & (lambda one: one.number[0] > 2), lambda one: len(one) > 1 and one.number[0] > 2),
}


@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("kind", ["batch", "buffer"])
def test_conditions_choose_as_plain_python_does(name: str, kind: str) -> None:
    condition, plain = CONDITIONS[name]
    data: Any = steps([1, 3, 5, 2, 4])
    if kind == "buffer":
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20))
        buffer.extend(data)
        data = buffer
    every = filter_trajectories(data)
    chosen = numbers([one for one in every if plain(one)])
    assert numbers(filter_trajectories(data, condition)) == chosen
    assert 0 < len(chosen) < 5


def test_conditions_name_what_they_read() -> None:
    assert ((traj.length > 2) & (traj["next", "reward"].sum() > 1)).required_keys() == {("next", "reward")}
    assert ((traj.length > 2) | (lambda one: True)).required_keys() is None
    assert (traj.total_reward > 2).required_keys() == {"reward"}
    shown = "TrajectoryPredicate(((traj.length > 2) & ~(traj['next', 'reward'].max() < 1)))"
    assert repr((traj.length > 2) & ~(traj["next", "reward"].max() < 1)) == shown
    assert TrajectoryPredicate(len).required_keys() is None
    assert repr(traj.reward) == "traj.reward"


@pytest.mark.parametrize(
    "use",
    [
        lambda data: filter_trajectories(data, traj.reward > 1),
        lambda data: filter_trajectories(data, traj.observation.first() > 1),
        lambda data: filter_trajectories(data, lambda one: one.reward),
        lambda data: filter_trajectories(data, lambda one: None),
        lambda data: (traj.length > 1) and (traj.length > 2),
        lambda data: not (traj.length > 1),
        lambda data: 1 < traj.length < 3,
        lambda data: bool(traj.reward),
        lambda data: (traj.length > 1) & 3,
        lambda data: filter_trajectories(data, 3),
        lambda data: filter_trajectories(torch.zeros(3)),
        lambda data: filter_trajectories(data, traj.task.sum() > 1),
    ],
)
def test_what_is_no_condition_is_a_type_error(use: Any) -> None:
    data = steps([3, 2])
    data["task"] = NonTensorStack(*["walk"] * 3, *["run"] * 2)
    with pytest.raises(TypeError):
        use(data)


def test_text_and_text_ids() -> None:
    data = steps([3, 2]).exclude("episode")
    data["task"] = NonTensorStack(*["walk"] * 3, *["run"] * 2)
    found = filter_trajectories(data, (traj.task == "run").all(), trajectory_key="task")
    assert numbers(found) == [[3, 4]]
    assert len(filter_trajectories(data, traj.task.first() == "walk", trajectory_key="task")) == 1


@pytest.mark.parametrize("where", ["next", "root"])
def test_flags_separate_with_a_warning(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = steps([3, 2, 4]).exclude("episode")
    if where == "root":
        data = data.set("done", data["next", "done"]).exclude(
            ("next", "done"), ("next", "terminated"), ("next", "truncated")
        )
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(data)
    for given_data in (data, buffer):
        with pytest.warns(UserWarning, match="no trajectory ids"):
            assert [one.length for one in filter_trajectories(given_data)] == [3, 2, 4]
    monkeypatch.setenv("RL_WARNINGS", "0")
    assert len(buffer.query()) == 3


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        (lambda data: data.exclude("episode", "next"), {}, MissingKeyError, "cannot be separated"),
        (lambda data: data, {"trajectory_key": "run"}, MissingKeyError, "trajectory_key 'run'"),
        (lambda data: data, {"trajectory_key": 3}, ValueError, "key"),
    ],
)
def test_data_without_trajectories(change: Any, options: Any, error: type[Exception], words: str) -> None:
    data = change(steps([3, 2]))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(data)
    for given_data in (data, buffer):
        with pytest.raises(error, match=words):
            filter_trajectories(given_data, **options)


def test_buffers_without_steps_in_order() -> None:
    ranked = TensorDictReplayBuffer(storage=LazyTensorStorage(9), writer=TensorDictMaxValueWriter(rank_key="number"))
    ranked.extend(steps([3, 2]))
    with pytest.raises(ValueError, match="puts rows anywhere"):
        ranked.query()
    tensors = ReplayBuffer(storage=LazyTensorStorage(9))
    tensors.extend(torch.arange(3))
    with pytest.raises(TypeError, match="holds a Tensor"):
        tensors.query()
    with pytest.raises(ValueError, match="puts rows anywhere"):
        ReplayBufferEnsemble(ranked, ranked, batch="exact").query()
    with pytest.raises(ValueError, match="one batch dimension"):
        Trajectory(steps([3, 3]).view(2, 3))


@pytest.mark.parametrize("kind", ["batch", "buffer"])
def test_a_trajectory(kind: str) -> None:
    data: Any = steps([3, 5])
    if kind == "buffer":
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
        buffer.extend(data)
        data = buffer
    one = list(iter_trajectories(data))[1]
    assert (one.length, float(one.total_reward)) == (5, 10.0)
    assert one.reward.equal(one["next", "reward"])
    assert one.get("nothing", 3) == 3
    assert {"observation", "next"} <= set(one.keys())
    part = one[1:3]
    assert isinstance(part, Trajectory)
    assert part.number.tolist() == [4, 5]
    assert one[torch.tensor([0, -1])].number.tolist() == [3, 7]
    assert one[2]["number"] == 5
    assert one[2].batch_size == torch.Size([])
    assert one.data["next"].batch_size == torch.Size([5])
    assert one["next"]["done"].flatten().tolist() == [False] * 4 + [True]
    with pytest.raises(AttributeError, match="nothing"):
        _ = one.nothing
    with pytest.raises(KeyError, match="nothing"):
        one["nothing"]
    assert repr(one).startswith("Trajectory(length=5, keys=['episode'")


def test_trajectories_are_stacked_by_their_data() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    buffer.extend(steps([2, 3]))
    stack = lazy_stack([one.data for one in buffer.query()])
    assert stack.batch_size == (2, -1)
    assert stack.get(("next", "reward"), as_list=True)[1].tolist() == [[0.0], [1.0], [2.0]]


def test_overwritten_steps_are_refused_and_edits_are_seen() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(steps([3, 5]))
    first, second = buffer.query()
    buffer.set_("number", buffer[:]["number"] + 100)
    assert second.number.tolist() == [103, 104, 105, 106, 107]
    buffer.extend(steps([4]))  # to the rows 8, 9, 0, 1
    assert second.reward.flatten().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(SchemaError, match="overwritten"):
        _ = first.number
    buffer.empty()
    with pytest.raises(SchemaError, match="overwritten"):
        _ = second.data


def test_results_pass_the_transforms() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(steps([3, 5]))
    buffer.append_transform(lambda rows: rows.set("number", rows["number"] * 2))
    assert numbers(buffer.query((traj.number > 7).any())) == [[6, 8, 10, 12, 14]]


@pytest.mark.parametrize(("name", "contents", "ndim"), list(product(SITUATIONS, CONTENTS, (1, 2))))
def test_trajectories_of_ensembles(name: str, contents: str, ndim: int) -> None:
    twins = [situation(name, contents, lanes=ndim, ndim=ndim), situation("partly filled", "ragged", lanes=1, ndim=1)]
    inner = ReplayBufferEnsemble(twins[1].buffer, twins[1].buffer)
    ensemble = ReplayBufferEnsemble(twins[0].buffer, inner)
    first, second = (runs_by_id(twin.model) for twin in twins)
    assert numbers(ensemble.query()) == [*first, *second, *second]
    assert numbers(list(iter_trajectories(ensemble))) == numbers(ensemble.query())
    assert len(filter_trajectories(ensemble, traj.length > 1)) == sum(
        len(run) > 1 for run in [*first, *second, *second]
    )


def test_members_transform_what_an_ensemble_lists() -> None:
    buffers = [TensorDictReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
    for buffer in buffers:
        buffer.extend(steps([3, 5]))
    buffers[1].append_transform(lambda rows: rows.set("number", rows["number"] * 2))
    ensemble = ReplayBufferEnsemble(*buffers)
    assert numbers(ensemble.query((traj.number > 7).any())) == [[6, 8, 10, 12, 14]]
    found = ensemble.query()
    buffers[0].extend(steps([10]))
    with pytest.raises(SchemaError, match="overwritten"):
        _ = found[0].data
    ensemble.append_transform(lambda rows: rows)
    with pytest.raises(NotImplementedError, match="query its members"):
        ensemble.query()
