"""Trajectories: queries of them, and draws that are expanded by a sample unit."""

from __future__ import annotations

import pickle
import threading
import warnings
from collections import Counter
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorClass, TensorDict, is_tensorclass, lazy_stack
from waiting import run_threads

import rbtool
from rbtool import (
    CatTensors,
    HERReplayBuffer,
    LazyTensorStorage,
    ListStorage,
    MissingKeyError,
    Normalize,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    RenameTransform,
    ReplayBuffer,
    ReplayBufferEnsemble,
    ReturnToGo,
    SamplerWithoutReplacement,
    SampleUnit,
    SchemaError,
    Sequence,
    SliceSampler,
    StoredFrameStack,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    Trajectory,
    TrajectoryPredicate,
    Transform,
    Transition,
    UsageError,
    filter_trajectories,
    iter_trajectories,
    traj,
)
from rbtool.core.testing.buffers import moved
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

# Queries ------------------------------------------------------------------------------------------


CAPACITY = 12


def steps(lengths: list[int]) -> TensorDict:
    """Trajectories whose rewards are 0, 1, 2 … and whose last step is terminated."""
    data = tensordict_of(rows_of([episodes(lengths, ["terminated"])], sum(lengths)))
    data["next", "reward"] = torch.cat([torch.arange(float(n)) for n in lengths]).unsqueeze(-1)
    data["observation"] = torch.arange(sum(lengths)).unsqueeze(-1) + torch.tensor([0.0, 0.5])
    return data


def stored(lengths: list[int], capacity: int = 10, storage: Any = LazyTensorStorage) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=storage(capacity))
    buffer.extend(steps(lengths))
    return buffer


def numbers(found: list[Trajectory]) -> list[list[int]]:
    return [one["number"].tolist() for one in found]


def runs_by_id(model: RingModel) -> list[list[int]]:
    """The numbers of the steps of each run of one id, in the order of time and lane by lane."""
    return [[model.step_at(place).number for place in run] for run in model.runs("ids")]


@each(("name", "contents", "ndim"), list(product(SITUATIONS, CONTENTS, (1, 2))))
def test_a_query_lists_the_trajectories_of_a_ring(name: str, contents: str, ndim: int) -> None:
    twin = situation(name, contents, lanes=ndim, ndim=ndim)
    assert numbers(twin.buffer.query()) == runs_by_id(twin.model)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 2), st.data(), st.booleans())
def test_a_query_lists_the_trajectories_after_any_history_of_writes(ndim: int, data: Any, by_flags: bool) -> None:
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
def test_a_batch_is_cut_where_the_id_changes(rows: list[tuple[Step, ...]]) -> None:
    groups = [[step.number for step in part] for _, part in groupby((row[0] for row in rows), lambda s: s.trajectory)]
    assert numbers(list(iter_trajectories(tensordict_of(rows)))) == groups


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_query_of_an_empty_storage_is_empty(storage: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=storage(20))
    assert buffer.query() == filter_trajectories(steps([2])[:0]) == []
    buffer.extend(steps([2, 5, 3]))
    assert [one.length for one in buffer.query(traj.length > 2)] == [5, 3]
    assert buffer.query(traj.length == 5)[0]["next", "reward"].flatten().tolist() == [0, 1, 2, 3, 4]


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


@each("name", CONDITIONS)
@each("kind", ["batch", "buffer"])
def test_conditions_choose_as_plain_python_does(name: str, kind: str) -> None:
    (condition, plain), lengths = CONDITIONS[name], [1, 3, 5, 2, 4]
    data: Any = stored(lengths, 20) if kind == "buffer" else steps(lengths)
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
def test_invalid_conditions_are_type_errors(use: Any) -> None:
    data = steps([3, 2])
    data["task"] = NonTensorStack(*["walk"] * 3, *["run"] * 2)
    with pytest.raises(TypeError):
        use(data)


def test_text_can_be_compared_and_identifies_trajectories() -> None:
    data = steps([3, 2]).exclude("episode")
    data["task"] = NonTensorStack(*["walk"] * 3, *["run"] * 2)
    found = filter_trajectories(data, (traj.task == "run").all(), trajectory_key="task")
    assert numbers(found) == [[3, 4]]
    assert len(filter_trajectories(data, traj.task.first() == "walk", trajectory_key="task")) == 1


@pytest.mark.parametrize("where", ["next", "root"])
def test_flags_separate_with_a_warning(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = steps([3, 2, 4]).exclude("episode")
    if where == "root":
        flags = [("next", name) for name in ("done", "terminated", "truncated")]
        data = data.set("done", data["next", "done"]).exclude(*flags)
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
def test_data_without_trajectories_are_refused(change: Any, options: Any, error: type[Exception], words: str) -> None:
    data = change(steps([3, 2]))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(data)
    for given_data in (data, buffer):
        with pytest.raises(error, match=words):
            filter_trajectories(given_data, **options)


def test_buffers_without_steps_in_order_cannot_be_queried() -> None:
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


@pytest.mark.parametrize("kind", ["batch", "buffer"])
def test_entries_and_parts_of_a_trajectory_are_read(kind: str) -> None:
    one = list(iter_trajectories(stored([3, 5], 8) if kind == "buffer" else steps([3, 5])))[1]
    assert repr(one).startswith("Trajectory(length=5, keys=['episode'")
    assert (one.length, len(one), float(one.total_reward)) == (5, 5, 10.0)
    assert one.reward.equal(one["next", "reward"])
    assert one.get("nothing", 3) == 3
    assert {"observation", "next"} <= set(one.keys())
    assert (type(one[1:3]), one[1:3].number.tolist()) == (Trajectory, [4, 5])
    assert one[torch.tensor([0, -1])].number.tolist() == [3, 7]
    assert (type(one[2]), one[2].batch_size, int(one[2]["number"])) == (Trajectory, (), 5)
    with pytest.raises(ValueError, match="expected one trajectory"):
        _ = one[2].length
    assert one.data["next"].batch_size == torch.Size([5])
    assert one["next"]["done"].flatten().tolist() == [False] * 4 + [True]
    with pytest.raises(AttributeError, match="nothing"):
        _ = one.nothing
    with pytest.raises(KeyError, match="nothing"):
        one["nothing"]


@each("kind", ["batch", "buffer"])
@each(
    ("use", "expected"),
    [
        (lambda one: (one.batch_size, one.shape, one.device, one.names), (torch.Size([5]),) * 2 + (None, [None])),
        (lambda one: bool((one == one.clone()).all()), True),
        (lambda one: (one == one).data["number"].tolist(), [True] * 5),
        (lambda one: one.clone().number.tolist(), [3, 4, 5, 6, 7]),
        (lambda one: str(one.to("cpu").device), "cpu"),
        (lambda one: [step["number"].item() for step in one.unbind(0)], [3, 4, 5, 6, 7]),
        (lambda one: dict(one.items())["data"]["number"].tolist(), [3, 4, 5, 6, 7]),
        (lambda one: one.to_tensordict()["data", "number"].tolist(), [3, 4, 5, 6, 7]),
        (lambda one: pickle.loads(pickle.dumps(one)).length, 5),
        (lambda one: isinstance(one, TensorClass) and is_tensorclass(one), True),
        (lambda one: one.get("reward").flatten().tolist(), [0, 1, 2, 3, 4]),
        (lambda one: one.get(("next", "reward")).shape, (5, 1)),
        (lambda one: (one.total_reward.dtype, one.total_reward.shape), (torch.float32, ())),
        (lambda one: hasattr(one, "_number"), False),
        (lambda one: ("next", "reward") in one.keys(True, True) and "next" not in one.keys(True, True), True),
        (lambda one: [part.number.tolist() for part in iter_trajectories(one)], [[3, 4, 5, 6, 7]]),
        (lambda one: torch.cat([one, one[:2]]).number.tolist(), [3, 4, 5, 6, 7, 3, 4]),
    ],
)  # fmt: skip
def test_a_trajectory_is_a_tensorclass(kind: str, use: Any, expected: Any) -> None:
    one = list(iter_trajectories(stored([3, 5], 8) if kind == "buffer" else steps([3, 5])))[1]
    assert use(one) == expected


def test_attributes_of_tensordicts_hide_entries_of_the_same_name() -> None:
    data = {"shape": torch.zeros(2), "value": torch.ones(2), "next": {"done": torch.ones(2)}}
    one = Trajectory(TensorDict(data, [2]))
    assert one.shape == torch.Size([2])
    assert (one["shape"].tolist(), one.value.tolist(), one.done.tolist()) == ([0, 0], [1, 1], [1, 1])


def test_a_trajectory_has_one_batch_dimension() -> None:
    assert (repr(Trajectory()), Trajectory().keys()) == ("Trajectory(batch_size=(), keys=[])", [])
    with pytest.raises(TypeError, match="a trajectory needs a tensordict"):
        Trajectory(torch.zeros(3))
    with pytest.raises(ValueError, match="one batch dimension"):
        Trajectory(steps([3, 3]).view(2, 3))


@pytest.mark.parametrize("kind", ["batch", "buffer"])
def test_stacks_of_trajectories_are_trajectories(kind: str) -> None:
    found = list(iter_trajectories(stored([2, 3]) if kind == "buffer" else steps([2, 3])))
    stack = lazy_stack(found)
    assert isinstance(stack, Trajectory)
    assert stack.batch_size == (2, -1)
    assert repr(stack).startswith("Trajectory(batch_size=(2, -1), keys=['episode'")
    assert (stack[1].length, stack[1]["next", "reward"].tolist()) == (3, [[0.0], [1.0], [2.0]])


class Doubles(Transform):
    """Doubles an entry, and counts the rows of each call."""

    def __init__(self, key: str = "observation", *, says: bool = True) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.key = key
        if says:
            self.in_keys, self.out_keys = [key], [key]

    def forward(self, data: Any) -> Any:
        self.rows.append(len(data))
        return data.copy().set(self.key, data[self.key] * 2)


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@pytest.mark.parametrize(
    ("condition", "says", "first", "kept"),
    [
        (traj.reward.sum() > 2, True, [], [3, 4]),
        (traj.reward.sum() > 2, False, [3, 1, 4, 2], [3, 4]),  # it might change rewards
        (traj.observation.min() < 10, True, [3, 1, 4, 2], [3, 1, 4]),
        (lambda one: one.observation.min() < 10, True, [3, 1, 4, 2], [3, 1, 4]),
        (None, True, [], [3, 1, 4, 2]),
    ],
)
def test_a_transform_runs_once_for_a_trajectory(
    condition: Any, says: bool, first: Any, kept: Any, storage: Any
) -> None:
    buffer, data = stored([3, 1, 4, 2], storage=storage), steps([3, 1, 4, 2])
    transform = Doubles(says=says)
    buffer.append_transform(transform)
    found = buffer.query(condition)
    assert transform.rows == first
    for one in found:
        for _ in range(2):
            assert one.observation.equal(data["observation"][one.number] * 2)
            assert one.data["observation"].equal(one.observation)
            assert one["next", "reward"].equal(data["next", "reward"][one.number])
    assert [len(one) for one in found] == kept
    assert transform.rows == (first or kept)


@pytest.mark.parametrize(
    ("transforms", "key", "expected"),
    [
        ([Normalize("observation", loc=1.0, scale=2.0)], "observation", lambda data: (data["observation"] - 1) / 2),
        ([Normalize("observation", loc=1.0), RenameTransform(["observation"], ["seen"])], "seen",
         lambda data: data["observation"] - 1),
        ([RenameTransform(["observation"], ["seen"]), Normalize("seen", loc=1.0)], ("seen",),
         lambda data: data["observation"] - 1),
        ([CatTensors(["observation", "more"], "all", del_keys=False)], "all",
         lambda data: torch.cat([data["observation"], data["more"]], -1)),
        ([Normalize("more", loc=3.0)], "observation", lambda data: data["observation"]),
        ([Normalize("more", loc=3.0)], ("next", "more"), lambda data: data["next", "more"] - 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_condition_runs_the_transforms_that_make_its_entries(
    transforms: Any, key: Any, expected: Any, storage: Any
) -> None:
    data = steps([3, 1, 4, 2])
    data["more"] = data["next", "more"] = -data["observation"] / 2
    data["other"] = torch.zeros(10)
    buffer = TensorDictReplayBuffer(storage=storage(10))
    buffer.extend(data)
    counted = Doubles("other")
    for transform in (*transforms[:1], counted, *transforms[1:]):
        buffer.append_transform(transform)
    limit = expected(data).float().mean()
    found = buffer.query(traj[key].mean() > limit)
    assert counted.rows == []
    parts = data.split([3, 1, 4, 2])
    assert numbers(found) == [one["number"].tolist() for one in parts if expected(one).double().mean() > limit]
    assert 0 < len(found) < 4
    for one in found:
        assert one[key].equal(one.data.get(key))


@pytest.mark.parametrize(
    ("transform", "key"),
    [(lambda: ReturnToGo(0.5), "return_to_go"), (lambda: StoredFrameStack(2, "observation", dim=-1), "observation")],
)
def test_a_transform_that_reads_other_entries_gets_them(transform: Any, key: str) -> None:
    buffer = stored([3, 1, 4, 2])
    buffer.append_transform(transform())
    means = [(one.data[key].double().mean(), one["number"].tolist()) for one in buffer.query()]
    limit = sum(mean for mean, _ in means) / 4
    assert numbers(buffer.query(traj[key].mean() > limit)) == [rows for mean, rows in means if mean > limit]


def test_overwritten_steps_are_refused_and_edits_are_seen() -> None:
    buffer = stored([3, 5])
    first, second = buffer.query()
    buffer.set_("number", buffer[:]["number"] + 100)
    assert second.number.tolist() == [103, 104, 105, 106, 107]
    second.number[0] = 0  # what was read is the trajectory's own
    assert second.data["number"].tolist() == second.number.tolist() == [0, 104, 105, 106, 107]
    second = buffer.query()[1]
    buffer.extend(steps([4]))  # to the rows 8, 9, 0, 1
    assert second.reward.flatten().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(SchemaError, match="overwritten"):
        _ = first.number
    buffer.empty()
    with pytest.raises(SchemaError, match="overwritten"):
        _ = second.data


@each(("name", "contents", "ndim"), list(product(SITUATIONS, CONTENTS, (1, 2))))
def test_a_query_of_an_ensemble_lists_the_trajectories_of_its_members(name: str, contents: str, ndim: int) -> None:
    twins = [situation(name, contents, lanes=ndim, ndim=ndim), situation("partly filled", "ragged", lanes=1, ndim=1)]
    inner = ReplayBufferEnsemble(twins[1].buffer, twins[1].buffer)
    ensemble = ReplayBufferEnsemble(twins[0].buffer, inner)
    first, second = (runs_by_id(twin.model) for twin in twins)
    every = [*first, *second, *second]
    assert numbers(ensemble.query()) == numbers(list(iter_trajectories(ensemble))) == every
    assert len(filter_trajectories(ensemble, traj.length > 1)) == sum(len(run) > 1 for run in every)


def test_members_transform_what_an_ensemble_lists() -> None:
    buffers = [stored([3, 5]), stored([3, 5])]
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


# Draws expanded by a sample unit ------------------------------------------------------------------


MARKS = {"anchor_index", "sequence_id", "step_in_sequence", "learning_mask", "validity_mask"}


def rows(count: int, lanes: int = 1) -> list[tuple[Step, ...]]:
    lengths = [3, 1, 5, 2] * count
    return rows_of([episodes(lengths[lane:], ["terminated", "truncated"]) for lane in range(lanes)], count)


def ring(unit: SampleUnit | None, count: int = 17, lanes: int = 1, kind: Any = None, **options: Any) -> Any:
    """Make a buffer of sequences, and write so many steps of ragged episodes into each lane."""
    storage = options.pop("storage", None) or LazyTensorStorage(CAPACITY * lanes, ndim=min(lanes, 2))
    options = {"batch_size": 4, "generator": torch.Generator().manual_seed(0)} | options
    buffer = (kind or TensorDictReplayBuffer)(storage=storage, sample_unit=unit, **options)
    write(buffer, rows(count, lanes))
    return buffer


def write(buffer: Any, steps: list[tuple[Step, ...]]) -> None:
    for first in range(0, len(steps), 5):
        buffer.extend(tensordict_of(steps[first : first + 5], buffer.storage.ndim))


def assert_whole(batch: TensorDict, unit: Sequence, lanes: int = 1) -> None:
    """Check that each window has the width of the unit and consecutive steps of one episode in one lane."""
    windows = batch.reshape(-1, unit.width)
    for window in windows.unbind(0):
        number, valid = window["number"], window["validity_mask"]
        assert number[valid].diff().eq(lanes).all()
        assert len(window["episode"].unique()) == 1
        assert not window["next", "done"][valid][:-1].any()
        assert number.unique().equal(number[valid])


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_batch_has_a_window_of_each_anchor(lanes: int, prefetch: int | None) -> None:
    unit = Sequence(4, burn_in=1)
    buffer = ring(unit, lanes=lanes, prefetch=prefetch)
    assert buffer.sample_unit is unit
    for _ in range(20):
        batch, info = buffer.sample(return_info=True)
        assert batch.shape == (20,)
        assert_whole(batch, unit, lanes)
        assert info.keys() == MARKS | {"index"}
        assert all(batch[key].equal(info[key]) for key in MARKS)
        found = buffer.storage[tuple(batch["index"].unbind(-1)) if lanes > 1 else batch["index"]]
        assert found["number"].equal(batch["number"])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 2), st.data(), st.sampled_from([None, 1, 3]), st.sampled_from(["pad", "stop"]))
def test_windows_are_whole_after_any_history_of_writes(
    lanes: int, data: Any, prefetch: int | None, boundary: Any
) -> None:
    unit = Sequence(3, boundary, burn_in=1)
    buffer, steps = ring(unit, 0, lanes, prefetch=prefetch), data.draw(step_lists(lanes, 40))
    while steps:
        count = data.draw(st.integers(1, CAPACITY))
        buffer.extend(tensordict_of(steps[:count], buffer.storage.ndim))
        steps = steps[count:]
        assert_whole(buffer.sample(), unit, lanes)


SAMPLERS = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=2, strict_length=False),
    "padded slices": lambda: SliceSampler(slice_len=4, strict_length=False, pad_output=True),
    "batched slices": lambda: SliceSampler(slice_len=4, strict_length=False, batched=True),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=2, strict_length=False),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_windows_are_whole_with_every_sampler(name: str) -> None:
    unit = Sequence(3)
    buffer = ring(unit, sampler=SAMPLERS[name]())
    stored = buffer[:]
    for _ in range(20):
        batch, info = buffer.sample(return_info=True)
        assert_whole(batch, unit)
        assert info.keys() - MARKS - {"index"} == ({"priority_weight"} if "prioritized" in name else set())
        for key in (("next", "truncated"), ("next", "done"), "is_init"):  # none of the marks of slices
            assert batch[key].equal(stored[key][batch["index"].reshape(-1)])
        if "prioritized" in name:
            weights = batch["priority_weight"].reshape(-1, 3)
            assert weights.equal(weights[:, :1].expand(-1, 3))


def test_an_epoch_has_each_anchor_once() -> None:
    buffer = ring(Sequence(2), sampler=SamplerWithoutReplacement(), batch_size=5)
    for _ in range(2):
        anchors = [anchor for batch in buffer for anchor in batch["anchor_index"][::2].tolist()]
        assert sorted(anchors) == list(range(CAPACITY))


@pytest.mark.parametrize(
    "options",
    [
        {"storage": ListStorage(CAPACITY)},
        {"storage": rbtool.LazyStackStorage(CAPACITY)},
        {"shared": True},
        {"transform": lambda batch: batch.set("double", batch["number"] * 2)},
    ],
    ids=["list", "stack", "shared", "transform"],
)
def test_windows_are_whole_in_every_kind_of_buffer(options: dict[str, Any]) -> None:
    buffer = ring(Sequence(3), **options)
    for _ in range(10):
        batch = buffer.sample()
        assert_whole(batch, Sequence(3))
        assert "transform" not in options or batch["double"].equal(batch["number"] * 2)


def test_the_info_marks_the_windows_of_tensors() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sample_unit=Sequence(3, done_key=None), batch_size=2)
    buffer.extend(torch.arange(13))
    batch, info = buffer.sample(return_info=True)
    assert batch.equal(torch.cat([torch.arange(10, 13), torch.arange(3, 10)])[info["index"]])
    assert (batch.view(2, 3).diff() == info["validity_mask"].view(2, 3)[:, 1:].long()).all()


def test_batches_made_ahead_are_windows_of_the_time_of_their_draw() -> None:
    unit = Sequence(4)
    buffer = ring(unit, prefetch=3)
    buffer.sample()
    last = int(buffer[:]["number"].max())
    write(buffer, [(Step(100 + number, 7 + number // 4),) for number in range(9)])
    for _ in range(3):
        batch = buffer.sample()
        assert_whole(batch, unit)
        assert int(batch["number"].max()) <= last


@pytest.mark.parametrize("prefetch", [None, 2])
def test_windows_are_whole_while_another_thread_writes(prefetch: int | None) -> None:
    unit = Sequence(4, burn_in=2)
    buffer = ring(unit, sampler=PrioritizedSampler(CAPACITY, 0.7, 0.5), prefetch=prefetch)
    batches: list[TensorDict] = []
    seen: set[int] = set()
    ended = threading.Event()

    def write_on() -> None:
        while not ended.is_set():
            write(buffer, rows(400))

    def read_on() -> None:
        try:
            while len(batches) < 200 or len(seen) <= 2 * CAPACITY:
                batches.append(buffer.sample())
                seen.update(batches[-1]["number"].tolist())
        finally:
            ended.set()

    run_threads(write_on, read_on)  # neither waits for the other
    for batch in batches:
        windows = batch.reshape(-1, unit.width)
        for number, episode, valid in zip(windows["number"], windows["episode"], windows["validity_mask"], strict=True):
            assert number[valid].diff().eq(1).all()
            assert len(episode.unique()) == 1


def test_equal_generators_draw_equal_batches() -> None:
    plain, ahead = ring(Sequence(3)), ring(Sequence(3), prefetch=2)
    assert all((plain.sample() == ahead.sample()).all() for _ in range(5))
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    one, other = (buffer.sample_with(generator) for buffer, generator in zip((plain, ahead), generators, strict=True))
    assert (one == other).all()


def test_anchors_are_those_that_the_sampler_draws_without_a_unit() -> None:
    plain, windows = ring(None), ring(Sequence(3))
    transitions = ring(Transition())
    for _ in range(5):
        batch = plain.sample()
        assert windows.sample()["anchor_index"][::3].equal(batch["index"])
        assert (transitions.sample() == batch).all()


# Priorities ------------------------------------------------------------------------------------------


def prioritized(**options: Any) -> Any:
    return ring(Sequence(3), kind=TensorDictPrioritizedReplayBuffer, alpha=1.0, beta=1.0, eps=0.0, **options)


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_anchor_gets_the_highest_priority_of_its_steps(lanes: int) -> None:
    buffer = prioritized(lanes=lanes, batch_size=500)
    batch = buffer.sample()
    batch["td_error"] = torch.where(batch["validity_mask"], batch["number"].double() % 7 + 0.5, 1000.0)
    buffer.update_tensordict_priority(batch)
    highest: Counter[Any] = Counter()
    steps = batch[batch["validity_mask"]]
    for anchor, error in zip(steps["anchor_index"].reshape(len(steps), -1).tolist(), steps["td_error"], strict=True):
        highest[tuple(anchor)] = max(highest[tuple(anchor)], float(error))
    drawn = buffer.sampler.sample(buffer.storage, 20_000)[0]
    counts = Counter(zip(*(part.tolist() for part in (drawn if lanes > 1 else [drawn])), strict=True))
    assert len(highest) == CAPACITY * lanes  # all of them
    for anchor, priority in highest.items():
        assert counts[anchor] / 20_000 == pytest.approx(priority / highest.total(), rel=0.2)


def test_batches_without_priorities_or_marks() -> None:
    buffer = prioritized()
    batch = buffer.sample()
    buffer.update_tensordict_priority(batch)  # the default
    for key in ("anchor_index", "validity_mask"):
        with pytest.raises(KeyError, match=f'no "{key}"'):
            buffer.update_tensordict_priority(batch.exclude(key).set("td_error", torch.ones(12)))
    batch["validity_mask"][:] = False
    buffer.update_tensordict_priority(batch.set("td_error", torch.ones(12)))


# State -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "capacity"),
    [
        *product(("folder", "state"), (CAPACITY, CAPACITY + 6)),
        ("pickle", CAPACITY),
    ],
)
def test_a_restored_buffer_continues_with_the_same_windows(how: str, capacity: int, tmp_path: Path) -> None:
    unit = Sequence(3, burn_in=1)
    first = ring(unit, prefetch=2)
    second = ring(unit, 0, prefetch=2, storage=LazyTensorStorage(capacity))
    first.sample()
    if how == "pickle":
        second = pickle.loads(pickle.dumps(first))
    else:
        moved(first, second, how, tmp_path / "saved")
    for _ in range(5 if capacity == CAPACITY else 2):  # in another capacity, steps have other numbers
        one, other = first.sample(), second.sample()
        assert (one.exclude("index", "anchor_index") == other.exclude("index", "anchor_index")).all()
        assert second.storage[other["anchor_index"]]["number"].equal(first.storage[one["anchor_index"]]["number"])


@pytest.mark.parametrize("how", ["folder", "state"])
def test_a_saved_buffer_does_not_depend_on_the_unit(how: str, tmp_path: Path) -> None:
    plain = moved(ring(Sequence(3)), ring(None, 0), how, tmp_path / "saved")
    assert plain.sample().shape == (4,)


def test_restored_batches_whose_rows_are_overwritten_are_dropped() -> None:
    unit = Sequence(4)
    first, second = ring(unit, prefetch=3), ring(unit, 0, prefetch=3)
    first.sample()
    second.load_state_dict(first.state_dict())
    write(second, [(Step(100 + number, 7 + number // 4),) for number in range(9)])
    for _ in range(5):
        assert_whole(second.sample(), unit)


# Parts -----------------------------------------------------------------------------------------------


class Pairs(SampleUnit):
    """Each element and the one at the same place from the other end."""

    def expand(self, index: Any, info: Any, storage: Any) -> tuple[Any, dict[Any, Any]]:
        return torch.stack([index, len(storage) - 1 - index], -1).reshape(-1), {"pair": torch.arange(2 * len(index))}


def test_users_can_define_units() -> None:
    batch = ring(Pairs()).sample().view(4, 2)
    assert (batch["index"].sum(1) == CAPACITY - 1).all()
    assert batch["pair"].flatten().tolist() == list(range(8))
    wrong = Pairs()
    wrong.expand = lambda index, info, storage: index  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="expected index and info"):
        ring(wrong).sample()
    for other in ("x", Sequence, 3):
        for kind in (ReplayBuffer, TensorDictReplayBuffer):
            with pytest.raises(TypeError, match="expected a SampleUnit"):
                kind(storage=LazyTensorStorage(8), sample_unit=other)


def test_windows_are_whole_after_parts_are_made_late_or_exchanged() -> None:
    buffer = ring(Sequence(3), 0, delayed_init=True)
    write(buffer, rows(9))
    assert_whole(buffer.sample(), Sequence(3))
    buffer.set_sampler(SamplerWithoutReplacement())
    assert buffer.sample().shape == (12,)
    buffer.set_storage(LazyTensorStorage(6))
    write(buffer, rows(8))
    assert_whole(buffer.sample(), Sequence(3))
    with pytest.raises(ValueError, match="puts rows anywhere, and a Sequence needs them in order"):
        buffer.set_writer(TensorDictMaxValueWriter())


def test_goals_in_hindsight_are_those_of_the_steps() -> None:
    def reached(found: Any) -> Any:
        hit = found["number"] == found["goal"]
        return hit.float(), hit.unsqueeze(-1)

    buffer = ring(
        Sequence(3), 0, kind=HERReplayBuffer, reward_fn=reached, her_ratio=1.0, strategy="final", goal_key="goal",
        achieved_goal_key="number", reward_key="reward",
    )  # fmt: skip
    data = tensordict_of(rows(11))
    buffer.extend(data.set("goal", torch.zeros(11, dtype=torch.int64)).set("reward", torch.zeros(11)))
    batch = buffer.sample()
    last = {0: 2, 1: 3, 2: 8, 3: 10}
    assert batch["goal"].tolist() == [last[episode] for episode in batch["episode"].tolist()]


def test_units_are_refused_where_steps_have_no_order() -> None:
    with pytest.raises(UsageError, match="slots of consumed elements"):
        ring(Sequence(2), consume_after_n_samples=1)
    with pytest.raises(UsageError, match="member 0 has the sample unit"):
        ReplayBufferEnsemble(ring(Sequence(2)), ring(None))
    with pytest.raises(UsageError, match="the ensemble has the sample unit"):
        ReplayBufferEnsemble(ring(None), sample_unit=Sequence(2))
    assert ReplayBufferEnsemble(ring(Transition()), batch_size=2).sample().shape == (1, 2)
    with pytest.raises(RuntimeError, match="empty"):
        ring(Sequence(2), 0).sample()
