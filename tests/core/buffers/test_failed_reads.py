"""A batch that cannot be made is delivered by the next call: nothing of an epoch is lost, and nothing comes twice."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool import (
    HERReplayBuffer,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from rbtool.core.samplers.base import Sampler

CAPACITY, BATCH = 24, 5
FILLS = {"partly filled": 17, "exactly full": 24, "wrapped mid-episode": 31}
EPISODES = {"one step": (1,), "ragged": (3, 1, 6, 2), "one, unterminated": (40,)}


class InTurn(Sampler):
    """Epochs in order, of a sampler that does not say that it reads no rows."""

    has_epochs = True

    def __init__(self) -> None:
        self.next = 0

    def draw(self, storage: Any, batch_size: int) -> Any:
        index = torch.arange(self.next, min(self.next + batch_size, len(storage)))
        self.next = 0 if index[-1] == len(storage) - 1 else self.next + batch_size
        self.ran_out = not self.next
        return index, {}


EPOCHS: dict[str, Callable[[], Sampler]] = {
    "without replacement": SamplerWithoutReplacement,
    "without replacement, in order": lambda: SamplerWithoutReplacement(shuffle=False),
    "slices": lambda: SliceSamplerWithoutReplacement(slice_len=1, traj_key="episode"),
    "in turn": InTurn,
}


class Faults:
    """Raises with every third call or so, in the order of a seed, and never twice running."""

    def __init__(self, seed: int, error: type[BaseException] = OSError) -> None:
        self.chances, self.error, self.count = torch.Generator().manual_seed(seed), error, 0
        self.failed = self.over = False

    def __call__(self) -> None:
        self.failed = not self.failed and not self.over and bool(torch.rand(1, generator=self.chances) < 0.4)
        if self.failed:
            self.count += 1
            raise self.error("the storage does not answer")


FAILS_AT_ONCE = next(seed for seed in range(99) if torch.rand(1, generator=torch.Generator().manual_seed(seed)) < 0.4)


def rows(count: int, lengths: tuple[int, ...]) -> TensorDict:
    ids = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths * count)[:count])[:count]
    return TensorDict({"a": torch.arange(count), "b": torch.zeros(count), "episode": ids}, [count])


def ring(sampler: Sampler, fill: str = "exactly full", episodes: str = "ragged", **options: Any) -> Any:
    made = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), sampler=sampler,
        **{"generator": torch.Generator().manual_seed(0), "batch_size": BATCH, **options},
    )  # fmt: skip
    for row in rows(FILLS[fill], EPISODES[episodes]).split(7):
        made.extend(row)
    return made


def failing_reads(buffer: Any, faults: Faults) -> None:
    get = buffer.storage.get

    def read(index: Any) -> Any:
        faults()
        return get(index)

    buffer.storage.get = read


class InPlace:
    """Changes the rows it gets, and may fail after that."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults

    def __call__(self, batch: Any) -> Any:
        batch["a"] += 1000
        batch["b"] = batch["b"] + 1
        if self.faults is not None:
            self.faults()
        return batch


def drawn(iterator: Iterator[Any], errors: tuple[type[BaseException], ...] = (OSError,)) -> Iterator[Any]:
    """The batches of an iterator that is asked again after each failure."""
    while True:
        with contextlib.suppress(*errors):
            batch = next(iterator, None)
            if batch is None:
                return
            yield batch


def values(batches: Any, key: str = "a") -> list[int]:
    return [value for batch in batches for value in batch[key].flatten().tolist()]


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(EPOCHS)), st.sampled_from(sorted(FILLS)), st.sampled_from(sorted(EPISODES)),
    st.sampled_from([None, 1, 3]), st.integers(0, 1000), st.sampled_from([OSError, KeyboardInterrupt]),
)  # fmt: skip
def test_an_epoch_has_every_step_once(
    sampler: str, fill: str, episodes: str, prefetch: int | None, seed: int, error: Any
) -> None:
    faults = Faults(seed, error)
    buffer, twin = (ring(EPOCHS[sampler](), fill, episodes, prefetch=prefetch) for _ in range(2))
    failing_reads(buffer, faults)
    for _ in range(2):
        found, expected = list(drawn(iter(buffer), (error,))), list(twin)
        assert [len(batch) for batch in found] == [len(batch) for batch in expected]
        if sampler == "slices":  # where a slice starts is drawn again
            assert sorted(values(found, "episode")) == sorted(values(expected, "episode"))
        else:
            assert values(found) == values(expected)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([*sorted(EPOCHS), "uniform"]), st.sampled_from(sorted(FILLS)), st.sampled_from([None, 1, 3]),
    st.integers(0, 1000),
)  # fmt: skip
def test_a_transform_that_fails_half_way_changes_no_batch(
    sampler: str, fill: str, prefetch: int | None, seed: int
) -> None:
    make = EPOCHS.get(sampler, RandomSampler)
    buffer = ring(make(), fill, prefetch=prefetch, transform=InPlace(Faults(seed)))
    twin = ring(make(), fill, prefetch=prefetch, transform=InPlace())
    for _ in range(12):
        expected, found = twin.sample(), None
        while found is None:
            with contextlib.suppress(OSError):
                found = buffer.sample()
        assert all(torch.equal(found[key], expected[key]) for key in ("a", "b", "index", "episode"))


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("way", ["state", "folder", "pickle"])
@pytest.mark.parametrize("sampler", [name for name in EPOCHS if name != "in turn"])  # which has no state
def test_a_copy_made_after_a_failure_has_it(sampler: str, way: str, prefetch: int | None, tmp_path: Path) -> None:
    faults = Faults(0)
    buffer = ring(EPOCHS[sampler](), prefetch=prefetch, transform=InPlace(faults))
    found: list[Any] = []
    while not failed(lambda: found.append(buffer.sample())):
        pass
    other = ring(EPOCHS[sampler](), prefetch=prefetch, transform=InPlace(), generator=None)
    if way == "state":
        other.load_state_dict(pickle.loads(pickle.dumps(buffer.state_dict())))
    elif way == "folder":
        buffer.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    else:
        other = pickle.loads(pickle.dumps(buffer))
    if way == "pickle":
        other.transform.transforms[0].func.faults = None
    twin = ring(EPOCHS[sampler](), transform=InPlace())
    expected = [*(twin.sample() for _ in found), *twin]
    assert values([*found, *other], "index") == values(expected, "index")


def failed(call: Callable[[], Any]) -> bool:
    try:
        call()
    except OSError:
        return True
    return False


def test_batches_made_ahead_are_made_again_of_the_rows_as_they_are_stored() -> None:
    buffer = ring(EPOCHS["slices"](), prefetch=2, transform=InPlace())
    buffer.sample()
    buffer.append_transform(lambda batch: batch)
    assert all(value == 1 for _ in range(4) for value in buffer.sample()["b"].tolist())


def test_a_slice_that_was_written_over_since_is_not_delivered() -> None:
    buffer = ring(EPOCHS["slices"](), transform=InPlace(Faults(1)))
    while not failed(buffer.sample):
        pass
    buffer.extend(rows(CAPACITY, (4,)).apply(lambda value: value + 5000))
    assert all(value >= 6000 for batch in drawn(iter(buffer)) for value in batch["a"].tolist())


def test_rows_that_were_left_alone_are_delivered_though_others_were_written() -> None:
    in_order = {"slice_len": 1, "shuffle": False, "traj_key": "episode", "anchor": "start"}
    faults = Faults(FAILS_AT_ONCE)
    buffer = ring(SliceSamplerWithoutReplacement(**in_order), "partly filled", transform=InPlace(faults))
    assert failed(buffer.sample)
    buffer.extend(rows(2, (2,)).apply(lambda value: value + 5000))
    twin = ring(SliceSamplerWithoutReplacement(**in_order), "partly filled")
    assert buffer.sample()["index"].tolist() == twin.sample()["index"].tolist()


def test_another_size_leaves_the_batch_for_a_call_that_asks_for_it() -> None:
    buffer, twin = (ring(SamplerWithoutReplacement(), batch_size=None) for _ in range(2))
    failing_reads(buffer, Faults(FAILS_AT_ONCE))
    assert failed(lambda: buffer.sample(5))
    first, second = twin.sample(5), twin.sample(3)
    assert ask(buffer, 3)["a"].tolist() == second["a"].tolist()
    assert ask(buffer, 5)["a"].tolist() == first["a"].tolist()


def ask(buffer: Any, size: int) -> Any:
    while True:
        with contextlib.suppress(OSError):
            return buffer.sample(size)


def test_without_epochs_the_last_failure_alone_is_kept() -> None:
    buffer = ring(RandomSampler(), batch_size=None, transform=InPlace(Faults(FAILS_AT_ONCE)))
    buffer.append_transform(lambda batch: batch["there is none"])
    for size in range(1, 20):
        with contextlib.suppress(OSError, KeyError):
            buffer.sample(size)
    assert len(buffer.state_dict()["_prefetch_state"]["queue"]) == 1


def test_what_is_removed_is_not_delivered() -> None:
    buffer = ring(SamplerWithoutReplacement())
    failing_reads(buffer, Faults(FAILS_AT_ONCE))
    assert failed(buffer.sample)
    buffer.empty()
    buffer.extend(rows(4, (2,)))
    assert sorted(values(drawn(iter(buffer)))) == [0, 1, 2, 3]


# Hindsight ------------------------------------------------------------------------------------------


def relabelling(sampler: str, faults: Faults | None, prefetch: int | None) -> HERReplayBuffer:
    def reward(steps: Any) -> Any:
        if faults is not None:
            faults()
        reached = steps["achieved_goal"] == steps["desired_goal"]
        return reached.float(), reached

    made = HERReplayBuffer(
        reward, storage=LazyTensorStorage(CAPACITY), sampler=EPOCHS[sampler](), batch_size=BATCH, prefetch=prefetch,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    steps, flags = rows(CAPACITY, (3, 1, 6, 2)), torch.zeros(CAPACITY, 1, dtype=torch.bool)
    flags[2::3] = True
    steps["achieved_goal"], steps["desired_goal"] = steps["a"].view(-1, 1), torch.full((CAPACITY, 1), -1)
    steps["next"] = TensorDict(
        {"reward": torch.zeros(CAPACITY, 1), "done": flags, "terminated": flags.clone()}, [CAPACITY]
    )
    made.extend(steps)
    return made


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("sampler", ["without replacement", "slices"])
def test_a_batch_that_is_relabelled_again_is_as_it_would_have_been(sampler: str, prefetch: int | None) -> None:
    faults = Faults(3)
    buffer, twin = relabelling(sampler, faults, prefetch), relabelling(sampler, None, prefetch)
    for _ in range(12):
        found, expected = ask(buffer, BATCH), twin.sample()
        assert (found == expected).all()
    assert faults.count


# Ensembles ------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    st.booleans(), st.booleans(), st.sampled_from([None, 2]), st.integers(0, 1000), st.sampled_from(sorted(EPOCHS))
)  # fmt: skip
def test_an_ensemble_loses_no_step_of_its_members(
    exact: bool, reads: bool, prefetch: int | None, seed: int, sampler: str
) -> None:
    faults = Faults(seed)
    members = [ring(EPOCHS[sampler](), generator=None) for _ in range(2)]
    for member in members if reads else ():
        failing_reads(member, faults)
    if not reads:
        members[1].append_transform(InPlace(faults))
    buffer = ReplayBufferEnsemble(
        *members, batch="exact" if exact else "stack", batch_size=6, prefetch=prefetch, sample_from_all=not exact,
        collate_fn=torch.cat,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    found = [ask(buffer, 6) for _ in range(24)]
    faults.over = True
    if exact:  # a part that is kept waits until a batch has room for it
        found += [ask(buffer, 6) for _ in range(40)]
    for number in range(2):
        own = [row for batch in found for row in batch[batch["source_id"] == number]["index", "index"].tolist()]
        members[number].storage.__dict__.pop("get", None)
        episodes = members[number].storage[torch.tensor(own)]["episode"].tolist()
        drawn_of = episodes if sampler == "slices" else own
        each = len(set(drawn_of))
        if exact:
            often = torch.tensor(drawn_of).bincount()
            assert often.max() - often[often > 0].min() <= 1
            continue
        whole = drawn_of[: len(drawn_of) // each * each]
        assert all(len(set(whole[start : start + each])) == each for start in range(0, len(whole), each))


def test_a_list_storage_in_an_ensemble_is_asked_again() -> None:
    members = [TensorDictReplayBuffer(storage=ListStorage(9), sampler=SamplerWithoutReplacement()) for _ in range(2)]
    for member in members:
        member.extend(rows(8, (2,)))
        failing_reads(member, Faults(5))
    buffer = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=4)
    found = [ask(buffer, 4) for _ in range(4)]
    assert [sorted(row for batch in found for row in batch["a"][number].tolist()) for number in range(2)] == [
        list(range(8))
    ] * 2
