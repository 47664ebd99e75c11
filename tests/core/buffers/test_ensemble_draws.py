"""Batches of ensembles, against members that are drawn from one by one and against a model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from waiting import run_threads

from rbtool import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SamplerEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from rbtool.core.kernels import rows as row_kernels

# Members that are drawn from in one go ------------------------------------------------------------


CAPACITY, STEPS = 12, 3
Make = Callable[[], Any]
SAMPLERS: dict[str, Make] = {
    "uniform": RandomSampler,
    "priorities": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
    "weights in batches": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5, normalize="batch"),
    "slices": lambda: SliceSampler(slice_len=STEPS, traj_key="episode"),
    "slices by start": lambda: SliceSampler(slice_len=STEPS, end_key=("next", "done"), weight="step"),
    "first slices": lambda: SliceSampler(slice_len=STEPS, traj_key="episode", anchor="start", truncated_key="cut"),
    "last slices": lambda: SliceSampler(slice_len=1, traj_key="episode", anchor="end", truncated_key=None),
}


def episode(start: int, number: int, length: int, end: str) -> TensorDict:
    """The steps of an episode that is done, truncated or not finished."""
    flags = {name: torch.zeros(length, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    if end != "open":
        flags["done"][-1] = flags[end][-1] = True
    steps, first = torch.arange(start, start + length), torch.arange(length) == 0
    return TensorDict({"a": steps, "episode": torch.full((length,), number), "is_init": first, "next": flags}, [length])


def ring(
    member: int, lengths: Sequence[int], end: str, sampler: Any, storage: Any = None, **arguments: Any
) -> TensorDictReplayBuffer:
    """A ring with episodes of some lengths, the last with this end; its first step is 1000 * member."""
    buffer = TensorDictReplayBuffer(storage=storage or LazyTensorStorage(CAPACITY), sampler=sampler, **arguments)
    start = 1000 * member
    for number, length in enumerate(lengths):
        last = number == len(lengths) - 1
        buffer.extend(episode(start, number, length, end if last else ("terminated", "truncated")[number % 2]))
        start += length
    if isinstance(sampler, PrioritizedSampler) and lengths:
        buffer.update_priority(torch.arange(len(buffer)), torch.rand(len(buffer), generator=seeded(member)))
    return buffer


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_by_one() -> Any:
    """Has every member draw by itself."""
    return mock.patch.object(SamplerEnsemble, "joint", return_value=None)


def require_equal(one: Any, other: Any) -> None:
    assert set(one.keys(True)) == set(other.keys(True))
    for key in one.keys(True, True):
        assert one[key].dtype == other[key].dtype, key
        assert torch.equal(one[key], other[key]), key


full = st.sampled_from([(12,), (4, 8), (3,) * 4, (1,) * 9 + (3,)])  # exactly full
wrapped = st.lists(st.integers(1, 7), min_size=4, max_size=7).map(lambda found: (*found, 5))  # maybe in an episode
partly = st.lists(st.integers(1, 4), min_size=0, max_size=1).map(lambda found: (*found, 4))
lengths = st.one_of(partly, full, wrapped)
ends = st.sampled_from(["terminated", "truncated", "open"])
plans = st.lists(st.tuples(lengths, ends), min_size=1, max_size=4)
forms = st.sampled_from(["exact", "stack"])


@pytest.mark.parametrize("loops", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("kind", SAMPLERS)
@settings(deadline=None, max_examples=10)
@given(plans=plans, form=forms, seed=st.integers(0, 99))
def test_seeded_members_draw_what_they_draw_one_by_one(
    kind: str, loops: bool, plans: Any, form: Any, seed: int
) -> None:
    def made() -> ReplayBufferEnsemble:
        members = [ring(number, *plan, SAMPLERS[kind](), generator=seeded(number)) for number, plan in enumerate(plans)]
        return ReplayBufferEnsemble(*members, p=range(1, len(plans) + 1), batch=form, generator=seeded(seed))

    together, apart, size = made(), made(), 4 * STEPS * len(plans)
    compiled = row_kernels.compiled_loops() if loops else None
    for _ in range(3):
        with mock.patch.object(row_kernels, "_loops", compiled):
            found, info = together.sample(size, return_info=True)
        with one_by_one():
            expected, others = apart.sample(size, return_info=True)
        require_equal(found, expected)
        require_equal(TensorDict(info, info["index"].shape[:0]), TensorDict(others, []))
    assert together.sampler.joint(together.storage) is not None


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if "slices" in kind])
@settings(deadline=None, max_examples=25)
@given(plans=plans, form=forms, seed=st.integers(0, 99))
def test_slices_stay_in_an_episode_of_a_member(kind: str, plans: Any, form: Any, seed: int) -> None:
    members = [ring(number, *plan, SAMPLERS[kind]()) for number, plan in enumerate(plans)]
    buffer = ReplayBufferEnsemble(*members, batch=form, generator=seeded(seed))
    length = members[0].sampler.slice_len
    for turn in range(3):
        batch = buffer.sample(4 * length * len(plans)).reshape(-1)
        slices = batch.reshape(-1, length)
        if kind != "slices by start":  # by flags, an open episode continues in the next one
            assert bool((slices["episode"] == slices["episode"][:, :1]).all())
        assert torch.equal(slices["a"], slices["a"][:, :1] + torch.arange(length))
        assert torch.equal(slices["source_id"], slices["a"] // 1000)
        for number, member in enumerate(members):
            mine = batch[batch["source_id"] == number]
            stored = member.storage.get(mine["index", "index"])
            assert torch.equal(stored["a"], mine["a"])
            assert not stored["next", "done"].view(-1, length)[:, :-1].any()
            member.extend(episode(int(member[:]["a"].max()) + 1, 50 + turn, 4, "terminated"))


SHARES = {"uniform": [0.25] * 4, "priorities": [0.1, 0.2, 0.3, 0.4], "slices": [1 / 4, 1 / 4, 1 / 2],
          "slices by start": [1 / 3, 1 / 3, 1 / 3]}  # fmt: skip


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("form", ["exact", "stack"])
def test_rows_are_drawn_with_the_probabilities_of_their_samplers(kind: str, form: Any) -> None:
    """Of members with the weights 1 and 3; slices begin at step 0 and 1 of an episode of 4 steps, and 0 of one of 3."""
    members, lengths = [], (4, 3) if "slices" in kind else (4,)
    for number in range(2):
        sampler = PrioritizedSampler(CAPACITY, 1.0, 0.5, eps=0.0) if kind == "priorities" else SAMPLERS[kind]()
        members.append(ring(number, lengths, "terminated", sampler))
        if kind == "priorities":
            members[-1].update_priority(torch.arange(4), torch.arange(1.0, 5.0))
    buffer = ReplayBufferEnsemble(*members, p=[1, 3], batch=form, generator=seeded(5))
    size, step = (4800, STEPS) if "slices" in kind else (4800, 1)
    found = torch.zeros(2, 7)
    for _ in range(40):
        first = buffer.sample(size).reshape(-1)["a"][::step]
        found += first.unsqueeze(-1).eq(torch.tensor([[0], [1000]]).add(torch.arange(7)).reshape(-1)).sum(0).view(2, 7)
    starts = found[:, [0, 1, 4] if step > 1 else [0, 1, 2, 3]]
    assert starts.sum() == found.sum()
    within = starts / starts.sum(1, keepdim=True)
    assert torch.allclose(within, torch.tensor(SHARES[kind]).expand_as(within), atol=0.02)
    shares = starts.sum(1) / found.sum()
    assert torch.allclose(shares, torch.tensor([0.25, 0.75]), atol=0.12 if form == "stack" else 0.01)


# What changes ----------------------------------------------------------------------------------------


def test_arguments_and_parts_of_members_that_are_exchanged_are_followed() -> None:
    members = [ring(number, (6, 6), "terminated", SAMPLERS["slices"]()) for number in range(2)]
    buffer = ReplayBufferEnsemble(*members, batch="exact")
    assert buffer.sample(12).reshape(-1, STEPS)["episode"].diff(dim=1).eq(0).all()
    for member in members:
        member.set_sampler(SliceSampler(slice_len=6, traj_key="episode"))
    assert set(buffer.sample(24)["a"].reshape(-1, 6)[:, 0].tolist()) <= {0, 6, 1000, 1006}
    members[0].set_sampler(SliceSampler(slice_len=2, traj_key="episode"))  # no longer alike
    assert buffer.sample(24).shape == (24,)
    for member in members:
        member.set_sampler(PrioritizedSampler(CAPACITY, 1.0, 1.0, eps=0.0))
        member.update_priority(torch.arange(12), (torch.arange(12) == 7) + 1e-3)
    assert set((buffer.sample(40)["a"] % 1000).tolist()) >= {7}
    for member in members:
        member.sampler.beta = 0.0
    assert buffer.sample(40)["priority_weight"].eq(1).all()
    members[1].set_storage(ring(5, (3,), "open", RandomSampler()).storage)
    assert set((buffer.sample(40)["a"] // 1000).tolist()) == {0, 5}
    members[0].append_transform(lambda batch: batch.set("a", -batch["a"] - 1))
    assert buffer.sample(8)["a"].lt(0).sum() == 4


def test_a_member_without_a_long_trajectory_or_with_priorities_of_zero_is_refused_as_alone() -> None:
    slices = [ring(0, (6,), "open", SAMPLERS["slices"]()), ring(1, (2, 2), "open", SAMPLERS["slices"]())]
    with pytest.raises(RuntimeError, match="no trajectory is long enough"):
        ReplayBufferEnsemble(*slices, batch="exact").sample(12)
    with pytest.raises(RuntimeError, match="divisible"):
        ReplayBufferEnsemble(*slices).sample(8)
    rings = [ring(number, (6,), "open", PrioritizedSampler(CAPACITY, 1.0, 0.5, eps=0.0)) for number in range(2)]
    rings[1].update_priority(torch.arange(6), torch.zeros(6))
    with pytest.raises(RuntimeError, match="non-positive p_sum"):
        ReplayBufferEnsemble(*rings, batch="exact").sample(12)


def test_members_that_keep_their_info_are_joined_with_others() -> None:
    plain = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SAMPLERS["slices"]())
    other = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SAMPLERS["slices"](), writer=RoundRobinWriter())
    for number, member in enumerate((other, plain)):
        member.extend(ring(number, (4, 4), "open", None)[:].exclude("index"))
    batch, info = ReplayBufferEnsemble(other, plain, batch="exact").sample(12, return_info=True)
    assert not batch["next", "truncated"].view(-1, STEPS)[:, :-1].any()
    assert info["next", "truncated"].view(-1, STEPS)[:, -1].all()
    assert info["next", "truncated"].shape == (12, 1)


@pytest.mark.parametrize("kind", ["uniform", "priorities", "slices"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_and_states_have_the_batches_made_ahead(kind: str, copied: Any) -> None:
    def made(seed: int) -> ReplayBufferEnsemble:
        members = [ring(number, (5, 5), "open", SAMPLERS[kind]()) for number in range(2)]
        return ReplayBufferEnsemble(*members, batch="exact", batch_size=12, prefetch=2, generator=seeded(seed))

    buffer, other = made(1), made(2)
    buffer.sample()
    twin = copied(buffer)
    other.load_state_dict(buffer.state_dict())
    for _ in range(4):
        batch = buffer.sample()
        require_equal(batch, twin.sample())
        require_equal(batch, other.sample())


# Threads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["slices", "priorities"])
def test_ensembles_of_the_same_members_in_another_order_do_not_wait_for_each_other(kind: str) -> None:
    """Two ensembles are drawn from and saved, while a thread writes to each member."""
    members = [ring(number, (6, 6), "terminated", SAMPLERS[kind]()) for number in range(3)]
    ensembles = [ReplayBufferEnsemble(*members, batch="exact"), ReplayBufferEnsemble(*members[::-1], batch="exact")]

    def draw(ensemble: ReplayBufferEnsemble) -> None:
        for _ in range(150):
            batch = ensemble.sample(18)
            if kind == "slices":
                slices = batch.reshape(-1, STEPS)
                assert torch.equal(slices["a"] - slices["a"][:, :1], torch.arange(STEPS).expand(len(slices), STEPS))
            else:
                ensemble.update_tensordict_priority(batch.set("td_error", torch.rand(18)))

    def write(member: TensorDictReplayBuffer) -> None:
        start = int(member[:]["a"].max()) + 1
        for number in range(100):
            member.extend(episode(start + 4 * number, 100 + number, 4, "terminated"))

    def save(ensemble: ReplayBufferEnsemble) -> None:
        for _ in range(50):
            assert len(ensemble.state_dict()["_members"]) == 3

    jobs = [partial(job, one) for job in (draw, save) for one in ensembles] + [partial(write, one) for one in members]
    run_threads(*jobs)


# Rows are rows of the member that their labels name -----------------------------------------------


MODEL_STEPS = 2
MODEL_SAMPLERS: dict[str, Make] = {
    "uniform": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "priorities": SAMPLERS["priorities"],
    "slices": lambda: SliceSampler(slice_len=MODEL_STEPS, traj_key="episode", strict_length=False, pad_output=True),
}


@dataclass(frozen=True)
class Member:
    """The episodes that are written to a ring, and how it is kept and sampled."""

    lengths: tuple[int, ...]
    last: str
    sampler: str
    seeded: bool
    nested: bool
    as_list: bool

    def buffer(self, number: int) -> Any:
        """Make the ring, or an ensemble of it; rows are numbered from 1000 * `number` on."""
        storage = ListStorage(CAPACITY) if self.as_list else LazyTensorStorage(CAPACITY)
        generator, sampler = seeded(number) if self.seeded else None, MODEL_SAMPLERS[self.sampler]()
        made = ring(number, self.lengths, self.last, sampler, storage, generator=generator)
        return ReplayBufferEnsemble(made, batch="exact") if self.nested else made


model_lengths = st.one_of(
    st.just(()),  # empty
    st.lists(st.integers(1, 4), min_size=1, max_size=2),  # partly filled
    st.sampled_from([(12,), (1,) * 12, (5, 4, 3)]),  # exactly full
    st.lists(st.integers(1, 7), min_size=4, max_size=6),  # wrapped, maybe in an episode
).map(tuple)
members = st.builds(
    Member, model_lengths, ends, st.sampled_from(sorted(MODEL_SAMPLERS)), st.booleans(), st.booleans(), st.booleans()
)
choices = st.sampled_from([None, "size", "weights", "all"])


def require_rows(found: Any, buffer: ReplayBufferEnsemble) -> None:
    """Every row of a batch is the row of the member that it names."""
    parts = found.unbind(0) if buffer.batch == "stack" else [found]
    for part in parts:
        index, source = part["index"], part["source_id"]
        assert torch.equal(source, index["buffer_ids"])  # nested ensembles have one member
        for number in source.unique().tolist():
            mine = part[source == number] if len(part.batch_size) else part
            leaf = buffer.storage.leaves[number]
            rows = [leaf.get(int(row))["a"].item() for row in mine["index", "index"].reshape(-1)]
            assert mine["a"].tolist() == rows
            assert set((mine["a"] // 1000).tolist()) == {number}


def require_slices(found: Any, buffer: ReplayBufferEnsemble, plans: list[Member]) -> None:
    """Slices are of one episode each, in the order of its steps."""
    for number, plan in enumerate(plans):
        mine = found["source_id"] == number
        if plan.sampler != "slices" or not mine.any():
            continue
        steps, episodes = found["a"][mine].reshape(-1, MODEL_STEPS), found["episode"][mine].reshape(-1, MODEL_STEPS)
        assert bool((episodes == episodes[:, :1]).all())
        assert set((steps[:, 1] - steps[:, 0]).tolist()) <= {0, 1}  # padding repeats the step


@settings(deadline=None, max_examples=60)
@given(st.lists(members, min_size=1, max_size=4), choices, st.sampled_from(["stack", "exact"]), st.integers(0, 99))
def test_every_row_is_that_of_the_member_that_its_labels_name(
    plans: list[Member], choice: str | None, form: Any, seed: int
) -> None:
    some = {plan.sampler for plan in plans}
    assume(form == "exact" or len(some) == 1 or "epochs" not in some)  # short batches are refused by policies
    filled = [plan for plan in plans if plan.lengths]
    buffers = [plan.buffer(number) for number, plan in enumerate(plans)]
    weights = [float(bool(plan.lengths)) * (number + 1) for number, plan in enumerate(plans)]
    p = {"size": "size", "weights": weights if any(weights) else None}.get(choice or "")
    schema: Any = "intersect" if len(some) > 1 else None
    buffer = ReplayBufferEnsemble(
        *buffers, p=p, sample_from_all=choice == "all", batch=form, generator=seeded(seed), schema=schema
    )
    size = MODEL_STEPS * len(plans) * 6
    if not filled or (p is None and len(filled) < len(plans)):
        with pytest.raises(RuntimeError, match="empty storage"):
            buffer.sample(size)
        return
    for turn in range(3):
        found = buffer.sample(size)
        if form == "exact":
            assert found.shape == (size,)
            require_slices(found, buffer, plans)
        require_rows(found, buffer)
        if p is not None:  # weights change during training
            buffer.p = [weight * (turn + number + 1) for number, weight in enumerate(weights)]


@settings(deadline=None, max_examples=25)
@given(st.lists(members.filter(lambda one: bool(one.lengths)), min_size=1, max_size=3), st.booleans())
def test_a_state_continues_the_stream(plans: list[Member], exact: bool) -> None:
    some, size = {plan.sampler for plan in plans}, MODEL_STEPS * len(plans) * 4
    assume(exact or "epochs" not in some)
    options: dict[str, Any] = {"batch": "exact" if exact else "stack", "schema": "intersect" if len(some) > 1 else None}
    made = [
        ReplayBufferEnsemble(*[plan.buffer(n) for n, plan in enumerate(plans)], generator=seeded(seed), **options)
        for seed in (1, 2)
    ]
    made[0].sample(size)
    made[1].load_state_dict(made[0].state_dict())
    for _ in range(3):
        one, other = (buffer.sample(size) for buffer in made)
        for key in ("a", "source_id"):
            assert torch.equal(one[key], other[key])


@pytest.mark.parametrize("form", ["stack", "exact"])
def test_members_without_padding_have_a_mask_beside_those_with_some(form: Any) -> None:
    members = [ring(0, (length,), "terminated", MODEL_SAMPLERS["slices"]()) for length in (4, 1)]
    batch = ReplayBufferEnsemble(*members, batch=form, sample_from_all=True).sample(8)
    assert batch["collector", "mask"].flatten().tolist() == [True] * 4 + [True, False] * 2
