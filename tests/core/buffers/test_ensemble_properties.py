"""Ensembles against a model: every row is a row of the member that its labels name, whatever the members hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)

CAPACITY, STEPS = 12, 2
SAMPLERS: dict[str, Callable[[], Any]] = {
    "uniform": RandomSampler,
    "epochs": SamplerWithoutReplacement,
    "priorities": lambda: PrioritizedSampler(CAPACITY, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=STEPS, traj_key="episode", strict_length=False, pad_output=True),
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
        generator = torch.Generator().manual_seed(number) if self.seeded else None
        ring = TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[self.sampler](), generator=generator)
        start = 1000 * number
        for episode, length in enumerate(self.lengths):
            ring.extend(self.episode(start, episode, length, self.last if episode == len(self.lengths) - 1 else "done"))
            start += length
        return ReplayBufferEnsemble(ring, batch="exact") if self.nested else ring

    @staticmethod
    def episode(start: int, episode: int, length: int, end: str) -> TensorDict:
        """Make the steps of an episode that is done, truncated or not finished."""
        flags = {name: torch.zeros(length, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
        if end != "open":
            flags["done"][-1] = flags["terminated" if end == "done" else "truncated"][-1] = True
        numbers = torch.arange(start, start + length)
        return TensorDict({"a": numbers, "episode": torch.full((length,), episode), "next": flags}, [length])


lengths = st.one_of(
    st.just(()),  # empty
    st.lists(st.integers(1, 4), min_size=1, max_size=2),  # partly filled
    st.sampled_from([(12,), (1,) * 12, (5, 4, 3)]),  # exactly full
    st.lists(st.integers(1, 7), min_size=4, max_size=6),  # wrapped, maybe in an episode
).map(tuple)
members = st.builds(
    Member, lengths, st.sampled_from(["done", "truncated", "open"]), st.sampled_from(sorted(SAMPLERS)), st.booleans(),
    st.booleans(), st.booleans(),
)  # fmt: skip
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
        steps, episodes = found["a"][mine].reshape(-1, STEPS), found["episode"][mine].reshape(-1, STEPS)
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
    buffer = ReplayBufferEnsemble(
        *buffers, p=p, sample_from_all=choice == "all", batch=form, generator=torch.Generator().manual_seed(seed),
        schema="intersect" if len(some) > 1 else None,
    )  # fmt: skip
    size = STEPS * len(plans) * 6
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
    some = {plan.sampler for plan in plans}
    assume(exact or "epochs" not in some)
    made = [
        ReplayBufferEnsemble(
            *[plan.buffer(number) for number, plan in enumerate(plans)], batch="exact" if exact else "stack",
            generator=torch.Generator().manual_seed(seed), schema="intersect" if len(some) > 1 else None,
        )
        for seed in (1, 2)
    ]  # fmt: skip
    size = STEPS * len(plans) * 4
    made[0].sample(size)
    made[1].load_state_dict(made[0].state_dict())
    for _ in range(3):
        one, other = (buffer.sample(size) for buffer in made)
        for key in ("a", "source_id"):
            assert torch.equal(one[key], other[key])
