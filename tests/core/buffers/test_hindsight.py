"""Hindsight relabelling against a slow model: goals, rewards and end flags at boundaries and wraps of rings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import groupby
from typing import Any

import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool import (
    HERReplayBuffer,
    HindsightStrategy,
    LazyTensorStorage,
    ListStorage,
    MissingKeyError,
    PrioritizedSampler,
    ReplayBufferEnsemble,
    SchemaError,
    SliceSampler,
    TensorDictReplayBuffer,
    UsageError,
)
from rbtool.core.samplers import hindsight
from rbtool.core.testing.buffers import moved
from rbtool.core.testing.slice_samplers import (
    CONTENTS,
    Coordinates,
    RingModel,
    Slice,
    Step,
    assert_drawn_as_expected,
    episodes,
    rows_of,
    step_lists,
    tensordict_of,
)

CAPACITY = 12


@pytest.fixture(autouse=True, params=[0, 50], ids=["together", "apart"])
def _reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and goals are read in one compiled call from the first batch on, or the first ones apart."""
    monkeypatch.setattr(hindsight, "_PATIENCE", request.param)


def reached(rows: Any) -> Any:
    """Reward 1 and termination where the goal is the number of the step itself."""
    found = rows["goal"] == rows["number"]
    return found.float().unsqueeze(-1), found.unsqueeze(-1)


def data_of(rows: list[tuple[Step, ...]], ndim: int = 1) -> TensorDict:
    """Steps whose achieved goal is their number; the goal of all is -1."""
    data = tensordict_of(rows, ndim)
    data["goal"] = torch.full_like(data["number"], -1)
    data["next", "goal"] = data["goal"].clone()
    data["next", "reward"] = torch.zeros(*data.shape, 1)
    return data


class Ring:
    """A relabelling buffer, and a model that receives the same writes."""

    def __init__(self, lanes: int = 1, storage: Any = None, **options: Any) -> None:
        self.ndim = min(lanes, 2)
        self.model = RingModel(CAPACITY, lanes, self.ndim)
        keys = {"goal_key": "goal", "achieved_goal_key": "number"}
        options = {"reward_fn": reached, "batch_size": 8, "generator": torch.Generator().manual_seed(3)} | options
        storage = LazyTensorStorage(CAPACITY * lanes, ndim=self.ndim) if storage is None else storage
        self.buffer = HERReplayBuffer(storage=storage, **keys, **options)

    def extend(self, rows: list[tuple[Step, ...]]) -> None:
        self.buffer.extend(data_of(rows, self.ndim))
        self.model.extend(rows)

    def goals(self, strategy: str) -> dict[Coordinates, list[int]]:
        """Return the goals that each element may get."""
        runs = [part for run in self.model.runs("either") for part in self._by_id(run)]
        everywhere = [place for run in runs for place in run]
        found = {}
        for run in runs:
            for number, place in enumerate(run):
                there = {"future": run[number:], "final": run[-1:], "episode": run, "random": everywhere}[strategy]
                found[place] = [self.model.step_at(other).number for other in there]
        return found

    def _by_id(self, run: Slice) -> list[Slice]:
        """Cut a run where trajectory ids change."""
        groups = groupby(run, key=lambda place: self.model.step_at(place).trajectory)
        return [tuple(part) for _, part in groups]


def filled(name: str, contents: str, lanes: int, **options: Any) -> Ring:
    lengths, endings = CONTENTS[contents]
    plenty = [episodes([*lengths[lane % len(lengths) :], *list(lengths) * 40], endings) for lane in range(lanes)]
    rows = rows_of(plenty, 3 * CAPACITY)
    ring = Ring(lanes, **options)
    count = {"partly filled": CAPACITY - 3, "exactly full": CAPACITY}.get(name, CAPACITY + 5)
    ring.extend(rows[:4])
    ring.buffer.sample()  # the trajectories are known from here on, and updated
    for first in range(4, count, 3):
        ring.extend(rows[first : min(first + 3, count)])
    if name == "refilled":
        ring.buffer.empty()
        ring.model = RingModel(CAPACITY, lanes, ring.ndim)
        ring.extend(rows[:7])
    return ring


RINGS = [
    (name, contents, 1 + (one // 2 + two // 2 + three // 2) % 2, strategy)
    for one, name in enumerate(("partly filled", "exactly full", "wrapped", "refilled"))
    for two, contents in enumerate(CONTENTS)
    for three, strategy in enumerate(HindsightStrategy)
    if (one + two + three) % 2 == 0  # each pair occurs, and each of them with one lane and with two
]


def places_of(index: torch.Tensor) -> list[Coordinates]:
    return [tuple(row) for row in index.reshape(len(index), -1).tolist()]


@each(("name", "contents", "lanes", "strategy"), RINGS)
def test_goals_are_drawn_with_their_probability(name: str, contents: str, lanes: int, strategy: str) -> None:
    ring = filled(name, contents, lanes, strategy=strategy, her_ratio=0.75)
    legal, draws = ring.goals(strategy), 1600
    batch = ring.buffer.sample_with(torch.Generator().manual_seed(1), draws)
    places, goals = places_of(batch["index"]), batch["goal"].tolist()
    count = draws * 3 // 4
    chances: dict[Any, Fraction] = {}
    for place, numbers in legal.items():
        for number in numbers:
            chances[place, number] = Fraction(1, len(legal) * len(numbers))
    assert_drawn_as_expected(Counter(zip(places[:count], goals[:count], strict=True)), chances)
    assert set(goals[count:]) == {-1}
    assert_relabelled(ring, batch, count)


def assert_relabelled(ring: Ring, batch: TensorDict, count: int) -> None:
    """Hold rewards and flags of a batch against the steps of the model, one by one."""
    assert batch["next", "goal"].equal(batch["goal"])
    some = {*range(min(20, len(batch))), *range(max(count - 10, 0), min(count + 10, len(batch)))}
    for number, place in enumerate(places_of(batch["index"])):
        if number not in some:
            continue
        step = ring.model.step_at(place)
        assert int(batch["number"][number]) == step.number
        hit = number < count and int(batch["goal"][number]) == step.number
        terminated = hit if number < count else step.terminated
        expected = {
            "reward": float(hit),
            "terminated": terminated,
            "truncated": step.truncated or (step.terminated and not terminated),
            "done": step.done or terminated,
        }
        assert {key: batch["next", key][number].item() for key in expected} == expected


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 2), st.data(), st.sampled_from(list(HindsightStrategy)))
def test_goals_are_legal_after_any_history_of_writes(lanes: int, data: Any, strategy: str) -> None:
    ring = Ring(lanes, strategy=strategy, her_ratio=1.0)
    rows = data.draw(step_lists(lanes, 40))
    while rows:
        count = data.draw(st.integers(1, CAPACITY))
        ring.extend(rows[:count])
        rows = rows[count:]
        batch, legal = ring.buffer.sample(), ring.goals(strategy)
        for place, goal in zip(places_of(batch["index"]), batch["goal"].tolist(), strict=True):
            assert goal in legal[place]
        assert_relabelled(ring, batch, 8)


def test_an_empty_buffer_and_the_storage_stay_as_they_are() -> None:
    ring = Ring()
    with pytest.raises(RuntimeError, match="empty"):
        ring.buffer.sample()
    ring.extend(rows_of([episodes([3, 2, 9], ["terminated"])], 9))
    before = ring.buffer.storage[:].clone()
    ring.buffer.sample()
    assert (ring.buffer.storage[:] == before).all()
    assert (ring.buffer[:]["goal"] == -1).all()


FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "tensors": dict,
    "list": lambda: {"storage": ListStorage(CAPACITY)},
    "prefetch": lambda: {"prefetch": 2},
    "slices": lambda: {"sampler": SliceSampler(slice_len=2)},
    "batched slices": lambda: {"sampler": SliceSampler(slice_len=2, batched=True)},
    "prioritized": lambda: {"sampler": PrioritizedSampler(CAPACITY, 0.6, 0.4)},
}


@pytest.mark.parametrize(
    ("form", "fill"), [*((form, "wrapped") for form in FORMS if form != "tensors"), ("list", "exactly full")]
)
def test_steps_are_relabelled_with_other_parts(form: str, fill: str) -> None:
    options = FORMS[form]()
    ring = filled(fill, "ragged", 1, strategy="episode", **options)
    legal, seen = ring.goals("episode"), 0
    for _ in range(options.get("prefetch", 0)):
        ring.buffer.sample()  # batches made before the last writes
    for _ in range(10):
        batch = ring.buffer.sample().reshape(-1)
        for place, goal in zip(places_of(batch["index"].reshape(-1, 1)), batch["goal"].tolist(), strict=True):
            assert goal == -1 or goal in legal[place]
            seen += goal != -1
        hits = (batch["goal"] == batch["number"]).unsqueeze(-1)
        assert batch["next", "reward"].bool().equal(hits)
        relabelled = (batch["goal"] != -1).unsqueeze(-1)
        assert batch["next", "terminated"][relabelled].equal(hits[relabelled])
        assert (batch["next", "done"] >= batch["next", "terminated"]).all()
    assert seen == 60


def test_flags_of_slices_stay_marked_where_they_are_cut() -> None:
    ring = filled("wrapped", "unterminated tail", 1, her_ratio=0.5)
    ring.buffer.set_sampler(SliceSampler(slice_len=4))
    batch = ring.buffer.sample().view(2, 4)
    assert batch["next", "truncated"][:, -1].all()
    assert batch["next", "done"][:, -1].all()
    hits = batch["goal"] == batch["number"]
    assert batch["next", "terminated"][0, :, 0].equal(hits[0])
    assert not batch["next", "terminated"][1].any()


def test_equal_seeds_give_equal_batches_with_and_without_prefetch() -> None:
    rows = rows_of([episodes([4, 3, 9], ["truncated"])], 11)
    found = []
    for options in ({}, {"prefetch": 3}):
        ring = Ring(**options)
        ring.extend(rows)
        found.append([ring.buffer.sample() for _ in range(5)])
    assert all((one == other).all() for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("way", ["folder", "state"])
def test_saved_batches_continue(way: str, tmp_path: Any) -> None:
    first, second = Ring(prefetch=2), Ring(prefetch=2)
    first.extend(rows_of([episodes([4, 3, 9], ["truncated"])], 11))
    first.buffer.sample()
    moved(first.buffer, second.buffer, way, tmp_path / "saved")
    for _ in range(4):
        assert (first.buffer.sample() == second.buffer.sample()).all()


def test_members_of_ensembles_are_relabelled() -> None:
    rings = [filled("wrapped", "ragged", 1, her_ratio=1.0) for _ in range(2)]
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(9))
    plain.extend(data_of(rows_of([episodes([9], ["truncated"])], 9)))
    ensemble = ReplayBufferEnsemble(*[ring.buffer for ring in rings], plain, batch="exact", batch_size=60)
    for _ in range(5):
        batch = ensemble.sample()
        assert (batch["goal"] == -1).equal(batch["source_id"] == 2)


def test_edits_in_place_are_seen_and_transforms_come_after() -> None:
    ring = filled("exactly full", "ragged", 1, strategy="final", her_ratio=1.0)
    ring.buffer.set_("number", ring.buffer[:]["number"] + 100)
    flags = torch.zeros(CAPACITY, 1, dtype=torch.bool)
    for key in ("done", "terminated", "truncated"):
        ring.buffer.set_(("next", key), flags)
    ring.buffer.set_("episode", torch.zeros(CAPACITY, dtype=torch.int64))
    ring.buffer.append_transform(lambda rows: rows.set("goal", rows["goal"] * 2))
    assert set(ring.buffer.sample()["goal"].tolist()) == {2 * (100 + CAPACITY - 1)}


def test_the_goal_may_be_what_a_step_achieved() -> None:
    data = three_episodes()
    data["next", "number"] = data["number"] + 1
    buffer = HERReplayBuffer(
        reached, strategy="final", her_ratio=1.0, goal_key="goal", achieved_goal_key=("next", "number"),
        storage=LazyTensorStorage(9), batch_size=20,
    )  # fmt: skip
    buffer.extend(data)
    batch = buffer.sample()
    last = {number: end for first, end in ((0, 4), (4, 7), (7, 9)) for number in range(first, end)}
    assert batch["goal"].tolist() == [last[number] for number in batch["number"].tolist()]


def three_episodes() -> TensorDict:
    return data_of(rows_of([episodes([4, 3, 2], ["terminated"])], 9))


@pytest.mark.parametrize("form", ["tensors", "list", "prefetch", "slices"])
def test_goals_before_the_step_are_announced_once_where_those_after_it_are_stored(form: str) -> None:
    ring, data = Ring(**FORMS[form]()), three_episodes()
    data["next", "number"] = data["number"] + 1
    ring.buffer.extend(data)
    with pytest.warns(UserWarning, match=r"achieved_goal_key=\('next', 'number'\) takes what") as caught:
        ring.buffer.sample()
    assert [one.filename for one in caught] == [__file__]
    for _ in range(5):
        ring.buffer.sample()
    nothing = Ring(her_ratio=0, **FORMS[form]())
    nothing.buffer.extend(data)
    nothing.buffer.sample()


def test_terminations_by_a_function_of_their_own_or_never() -> None:
    for given_fn, expected in ((lambda rows: torch.ones(6, 1), {True}), (False, {False})):
        ring = Ring(reward_fn=lambda rows: torch.ones(6, 1, dtype=torch.float64), terminated_fn=given_fn)
        ring.extend(rows_of([episodes([2], ["terminated"])], 2))
        batch = ring.buffer.sample()
        assert {*batch["next", "terminated"][:6].flatten().tolist()} == expected
        assert batch["next", "reward"].dtype == torch.float32
        assert batch["next", "done"].equal(batch["next", "terminated"] | batch["next", "truncated"])


@pytest.mark.parametrize("form", ["tensors", "list", "prefetch", "slices"])
def test_stored_flags_stay_where_nothing_computes_them_and_a_warning_says_so_once(form: str) -> None:
    ring = Ring(reward_fn=lambda rows: reached(rows)[0], her_ratio=1.0, strategy="final", **FORMS[form]())
    data = three_episodes()
    ring.buffer.extend(data)
    with pytest.warns(UserWarning, match=r"'next.terminated' of relabelled steps .* pass terminated_fn;") as caught:
        ring.buffer.sample()
    assert [one.filename for one in caught] == [__file__]
    for _ in range(5):
        batch = ring.buffer.sample()
        assert batch["goal"].ge(0).all()
        assert batch["next", "reward"].bool().flatten().equal(batch["goal"] == batch["number"])
        for key in ("terminated", "done") if form != "slices" else ("terminated",):
            assert batch["next", key].equal(data["next", key][batch["number"]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"terminated_fn": lambda rows: reached(rows)[1]},
        {"reward_fn": reached},
        {"terminated_fn": False},
        {"her_ratio": 0.0},
    ],
    ids=["terminated is not stored", "terminated_fn", "reward_fn", "no goal ends", "ratio"],
)
def test_nothing_warns_of_flags_that_are_computed_or_not_there(options: dict[str, Any]) -> None:
    ring, data = Ring(**{"reward_fn": lambda rows: reached(rows)[0]} | options), three_episodes()
    ring.buffer.extend(data if options else data.exclude(("next", "terminated")))
    ring.buffer.sample()


def test_the_text_of_a_buffer_has_strategy_and_goals() -> None:
    shown = repr(Ring(strategy="final", her_ratio=0.5, reward_key=("next", "reward")).buffer)
    assert shown.startswith(
        "HERReplayBuffer(strategy='final', her_ratio=0.5, goal_key='goal', achieved_goal_key='number', "
        "reward_key=('next', 'reward'), storage=LazyTensorStorage(len=0, max_size=12), sampler=RandomSampler"
    )


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"reward_fn": None}, TypeError, "reward_fn is None"),
        ({"terminated_fn": True}, TypeError, "terminated_fn is True"),
        ({"her_ratio": 1.5}, ValueError, "from 0 to 1"),
        ({"her_ratio": True}, ValueError, "from 0 to 1"),
        ({"strategy": "past"}, ValueError, "future, final"),
        ({"reward_key": 3}, ValueError, "key"),
    ],
)
def test_unusable_arguments_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        Ring(**options)
    assert isinstance(raised.value, error)


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        (lambda data: data, {"reward_fn": lambda rows: torch.ones(6)}, UsageError, r"\[6\], expected rewards of shape"),
        (lambda data: data, {"reward_fn": lambda rows: 1.0}, UsageError, "a float, expected rewards"),
        (lambda data: data.exclude("goal"), {}, MissingKeyError, "the goal 'goal'"),
        (lambda data: data.exclude("number"), {}, MissingKeyError, "the achieved goal 'number'"),
        (lambda data: data.exclude(("next", "reward")), {}, MissingKeyError, "the reward 'next.reward'"),
        (lambda data: data.exclude("episode", *[("next", f"{k}ated") for k in ("termin", "trunc")], ("next", "done")),
         {}, MissingKeyError, "episodes cannot be separated"),
        (lambda data: data.set("number", data["number"].view(4, 1)), {}, SchemaError,
         r"the achieved goal is \[6, 1\], expected goals of shape \[6\]"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_relabelled(change: Any, options: Any, error: type[Exception], words: str) -> None:
    ring = Ring(**options)
    ring.buffer.extend(change(data_of(rows_of([episodes([4], ["terminated"])], 4))))
    with pytest.raises(error, match=words):
        ring.buffer.sample()


def test_whole_trajectories_are_refused() -> None:
    data = data_of(rows_of([episodes([4], ["terminated"])], 4))
    both = torch.stack([data, data])
    for given_data, words in (
        (both, r"\[2, 4\], .* \[2\] elements"),
        (both.exclude("episode"), r"\[4, 4\] for \[4\]"),
    ):
        buffer = HERReplayBuffer(reached, goal_key="goal", achieved_goal_key="number", storage=LazyTensorStorage(5))
        buffer.extend(given_data)
        with pytest.raises(SchemaError, match=words):
            buffer.sample(4)
