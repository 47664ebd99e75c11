"""Draws made ahead, reads that fail, and batches that are filled again."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import in_a_child
from tensordict import LazyStackedTensorDict, TensorDict
from waiting import HANG, run_threads

import rbtool
from rbtool import HERReplayBuffer, ListStorage, ReplayBufferEnsemble, SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import SchemaError
from rbtool.core.samplers.base import Sampler
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages import columns
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.testing.buffers import moved, of_steps
from rbtool.core.transforms.base import Transform

# Draws made ahead ---------------------------------------------------------------------------------


def numbers(**arguments: object) -> ReplayBuffer:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100), batch_size=8, **{"generator": torch.Generator().manual_seed(0), **arguments}
    )
    buffer.extend(torch.arange(100))
    return buffer


class Noise(Transform):
    draws = True

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return data + torch.rand(data.shape, generator=self.generator)


@pytest.mark.parametrize("sampler", [None, SamplerWithoutReplacement])
def test_prefetching_changes_no_batch(sampler: type | None) -> None:
    ahead, plain = numbers(prefetch=4, sampler=sampler), numbers(sampler=sampler)
    assert all(torch.equal(ahead.sample(), plain.sample()) for _ in range(50))


def test_transforms_run_in_other_threads() -> None:
    seen: set[int] = set()
    buffer = numbers(prefetch=2, transform=lambda rows: seen.add(threading.get_ident()) or rows)
    for _ in range(6):
        buffer.sample()
    assert seen - {threading.get_ident()}


# The edge: TorchRL's transforms ignore the generator.
@pytest.mark.parametrize("prefetch", [None, 3])
def test_transforms_draw_from_the_generator_and_restore_exactly(prefetch: int | None) -> None:
    buffer = numbers(prefetch=prefetch, transform=Noise())
    buffer.sample()
    state = pickle.dumps(buffer.state_dict())
    expected = [buffer.sample() for _ in range(9)]
    other = numbers(prefetch=prefetch, transform=Noise(), generator=None)
    other.load_state_dict(pickle.loads(state))
    assert all(torch.equal(batch, other.sample()) for batch in expected)


@pytest.mark.parametrize("sampler", [None, SamplerWithoutReplacement])
def test_the_state_is_that_of_the_last_batch_delivered(sampler: type | None) -> None:
    buffer = numbers(prefetch=3, sampler=sampler)
    for _ in range(5):
        buffer.sample()
    states = pickle.dumps(buffer.state_dict()), pickle.dumps(buffer)
    expected = [buffer.sample() for _ in range(1000)]
    other = numbers(prefetch=3, sampler=sampler, generator=None)
    other.load_state_dict(pickle.loads(states[0]))
    for restored in (other, pickle.loads(states[1])):
        assert all(torch.equal(batch, restored.sample()) for batch in expected)


def test_another_number_of_batches_ahead_is_refused() -> None:
    state = numbers(prefetch=3).state_dict()
    with pytest.raises(RuntimeError, match="3 batches prepared ahead, this buffer prepares 2"):
        numbers(prefetch=2).load_state_dict(state)


def test_a_state_of_torchrl_brings_its_queue() -> None:
    buffer = numbers(prefetch=2)
    state = buffer.state_dict()
    index = torch.arange(8)
    state["_prefetch_state"]["queue"] = ((index * 2, {"index": index}),)
    buffer.load_state_dict(state)
    batch, info = buffer.sample(return_info=True)
    assert (batch.tolist(), info["index"].tolist()) == (list(range(8)), list(range(8)))


def test_batches_are_snapshots_of_when_they_were_made() -> None:
    buffer = numbers(prefetch=2)
    buffer.sample()
    for _, future in list(buffer._prefetcher._queue):
        future.result(HANG)
    buffer[:] = torch.full((100,), -1)
    assert [bool((buffer.sample() == -1).all()) for _ in range(4)] == [False, False, True, True]


def test_an_error_in_a_thread_is_raised_with_its_batch_and_at_shutdown() -> None:
    buffer = numbers(prefetch=2, transform=lambda rows: 1 // 0)
    for call in (buffer.sample, buffer.sample, buffer.sample, buffer.shutdown):
        with pytest.raises(ZeroDivisionError):
            call()


def test_emptying_drops_the_batches_drawn_ahead() -> None:
    buffer = numbers(prefetch=2)
    buffer.sample()
    buffer.empty()
    buffer.extend(torch.tensor([7]))
    assert buffer.sample().tolist() == [7] * 8


def test_a_new_transform_takes_effect_at_once() -> None:
    buffer, plain = numbers(prefetch=2), numbers()
    assert torch.equal(buffer.sample(), plain.sample())
    buffer.append_transform(lambda rows: -rows)
    assert torch.equal(buffer.sample(), -plain.sample())


def test_a_forked_child_continues_with_the_same_batches() -> None:
    buffer = numbers(prefetch=2)
    buffer.sample()
    batches = in_a_child(lambda: [buffer.sample().tolist() for _ in range(5)])
    assert batches == [buffer.sample().tolist() for _ in range(5)]


def test_several_threads_share_the_queue() -> None:
    buffer = numbers(prefetch=2, sampler=SamplerWithoutReplacement)
    found: list[torch.Tensor] = []
    run_threads(*[lambda: found.extend(buffer.sample() for _ in range(26))] * 2)
    assert torch.equal(torch.cat(found).bincount(), torch.full((100,), 4))


class RunsDry(RandomSampler):
    """Fails at its fifth draw, then goes on."""

    def __init__(self) -> None:
        self.draws = 0

    def sample(self, storage, batch_size):  # type: ignore[no-untyped-def]
        self.draws += 1
        if self.draws == 5:
            raise RuntimeError("dry")
        return super().sample(storage, batch_size)


def test_a_draw_that_fails_loses_no_batch_that_was_drawn_before() -> None:
    buffer, plain = numbers(prefetch=2, sampler=RunsDry()), numbers()
    found = [buffer.sample(), buffer.sample()]
    with pytest.raises(RuntimeError, match="dry"):
        buffer.sample()
    found += [buffer.sample() for _ in range(5)]
    assert all(torch.equal(batch, plain.sample()) for batch in found)


def test_shutdown_ends_the_threads_and_loses_no_batch() -> None:
    before = {*threading.enumerate()}
    buffer, plain = numbers(prefetch=3), numbers()
    assert buffer.start() is buffer.client() is buffer
    drawn = [buffer.sample()]
    assert buffer.is_alive
    started = {*threading.enumerate()} - before
    assert started
    buffer.shutdown()
    assert not buffer.is_alive
    assert not any(thread.is_alive() for thread in started)
    drawn += [buffer.sample() for _ in range(5)]
    assert torch.equal(torch.stack(drawn), torch.stack([plain.sample() for _ in drawn]))


def test_shutdown_stops_waiting_after_a_timeout() -> None:
    reached, go_on = threading.Event(), threading.Event()
    buffer = numbers(prefetch=2, transform=lambda rows: (reached.set(), go_on.wait(HANG), rows)[2])
    reader = threading.Thread(target=buffer.sample)
    reader.start()
    assert reached.wait(HANG)
    with pytest.raises(TimeoutError, match=r"still being made after 0.05 seconds"):
        buffer.shutdown(timeout=0.05)
    assert buffer.is_alive
    go_on.set()
    reader.join()
    buffer.shutdown(timeout=HANG)
    assert not buffer.is_alive


# Reads that fail: nothing of an epoch is lost, and nothing comes twice ----------------------------


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
    if way == "pickle":
        other = pickle.loads(pickle.dumps(buffer))
        other.transform.transforms[0].func.faults = None
    elif way == "state":
        other.load_state_dict(pickle.loads(pickle.dumps(buffer.state_dict())))
    else:
        moved(buffer, other, way, tmp_path / "saved")
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


def test_a_slice_that_was_overwritten_since_is_not_delivered() -> None:
    buffer = ring(EPOCHS["slices"](), transform=InPlace(Faults(1)))
    while not failed(buffer.sample):
        pass
    buffer.extend(rows(CAPACITY, (4,)).apply(lambda value: value + 5000))
    found = values(drawn(iter(buffer)))
    assert found
    assert min(found) >= 6000


def test_a_batch_whose_rows_are_unchanged_is_delivered_after_writes_of_others() -> None:
    in_order = {"slice_len": 1, "shuffle": False, "traj_key": "episode", "anchor": "start"}
    faults = Faults(FAILS_AT_ONCE)
    buffer = ring(SliceSamplerWithoutReplacement(**in_order), "partly filled", transform=InPlace(faults))
    assert failed(buffer.sample)
    buffer.extend(rows(2, (2,)).apply(lambda value: value + 5000))
    twin = ring(SliceSamplerWithoutReplacement(**in_order), "partly filled")
    assert buffer.sample()["index"].tolist() == twin.sample()["index"].tolist()


def test_a_batch_that_failed_is_kept_for_a_call_of_its_size() -> None:
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


def test_without_epochs_only_the_last_failed_batch_is_kept() -> None:
    buffer = ring(RandomSampler(), batch_size=None, transform=InPlace(Faults(FAILS_AT_ONCE)))
    buffer.append_transform(lambda batch: batch["there is none"])
    for size in range(1, 20):
        with contextlib.suppress(OSError, KeyError):
            buffer.sample(size)
    assert len(buffer.state_dict()["_prefetch_state"]["queue"]) == 1


def test_removed_elements_are_not_delivered() -> None:
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
    after = {"reward": torch.zeros(CAPACITY, 1), "done": flags, "terminated": flags.clone()}
    steps["next"] = TensorDict(after, [CAPACITY])
    made.extend(steps)
    return made


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("sampler", ["without replacement", "slices"])
def test_a_batch_that_is_relabelled_again_has_the_same_goals(sampler: str, prefetch: int | None) -> None:
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


def test_lists_in_an_ensemble_are_read_again() -> None:
    members = [TensorDictReplayBuffer(storage=ListStorage(9), sampler=SamplerWithoutReplacement()) for _ in range(2)]
    for member in members:
        member.extend(rows(8, (2,)))
        failing_reads(member, Faults(5))
    buffer = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=4)
    found = torch.cat([ask(buffer, 4)["a"] for _ in range(4)], 1)
    assert found.sort(1).values.tolist() == [list(range(8))] * 2


# Batches that are filled again --------------------------------------------------------------------


ROWS = 100


def rows_of(count: int) -> TensorDict:
    number = torch.arange(count)
    after = TensorDict({"done": (number % 10 == 9)[:, None], "pixels": number.to(torch.uint8)[:, None]}, [count])
    return TensorDict({"observation": number.double()[:, None].expand(-1, 5), "step": number, "next": after}, [count])


def uniform(storage: Any = LazyTensorStorage, **options: Any) -> Any:
    return TensorDictReplayBuffer(storage=storage(ROWS), **options)


KINDS: dict[str, Callable[[], Any]] = {
    "uniform": uniform,
    "mapped": lambda: uniform(rbtool.LazyMemmapStorage),
    "bare": lambda: ReplayBuffer(storage=LazyTensorStorage(ROWS)),
    "prioritized": lambda: of_steps(ROWS, batch_size=None),
    "sliced": lambda: uniform(sampler=rbtool.SliceSampler(slice_len=4, end_key=("next", "done"))),
    "transformed": lambda: uniform(transform=lambda rows: rows.set("sum", rows["observation"].sum(-1))),
    "listed": lambda: uniform(ListStorage),
    "ahead": lambda: uniform(prefetch=2, batch_size=32),
}


def full(kind: str | Callable[[], Any]) -> Any:
    buffer = KINDS[kind]() if isinstance(kind, str) else kind()
    buffer.set_rng(torch.Generator().manual_seed(0))
    buffer.extend(rows_of(ROWS))
    return buffer


@pytest.fixture(params=[False, True], ids=["plain", "compiled"])
def _loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(columns, "_MANY", 0)


@pytest.mark.usefixtures("_loops")
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_is_filled_is_the_one_that_would_be_made(kind: str) -> None:
    fresh, again = full(kind), full(kind)
    out = again.sample(32)
    memory = {key: value.data_ptr() for key, value in out.items(True, True)}
    fresh.sample(32)
    for _ in range(3):
        assert again.sample(32, out=out) is out
        assert (out == fresh.sample(32)).all()
    assert memory == {key: value.data_ptr() for key, value in out.items(True, True)}


@pytest.mark.parametrize("lazy", [False, True])
def test_a_batch_of_elements_with_dimensions_is_filled(lazy: bool) -> None:
    agents = [TensorDict({"x": torch.rand(9, 2 + (lazy and number))}, [9]) for number in range(3)]
    rows = LazyStackedTensorDict(*agents, stack_dim=1) if lazy else torch.stack(agents, 1)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(9), batch_size=4)
    buffer.extend(rows)
    out = buffer.sample()
    before = out.clone()
    assert buffer.sample(out=out) is out
    assert not torch.equal(out["index"], before["index"])
    for number, agent in enumerate(agents):
        assert torch.equal(out[:, number]["x"], agent["x"][out["index"][:, number]])


@pytest.mark.usefixtures("_loops")
def test_a_storage_fills_what_it_returned() -> None:
    storage = full("uniform").storage
    out = storage.get(torch.arange(7))
    index = torch.tensor([5, -1, 5, 0, 99, 98, 3])
    assert storage.get(index, out=out) is out
    assert (out == storage.get(index)).all()
    with pytest.raises(IndexError):
        storage.get(torch.full((7,), ROWS), out=out)


WRONG: dict[str, Callable[[TensorDict, Any], Any]] = {  # batches that do not fit, made of the one that does
    "more entries": lambda batch, buffer: batch.set("more", torch.zeros(8)),
    "fewer entries": lambda batch, buffer: batch.exclude("step"),
    "another type": lambda batch, buffer: batch.set("observation", batch["observation"].float()),
    "another shape": lambda batch, buffer: batch.set("observation", batch["observation"][:, :4].contiguous()),
    "another size": lambda batch, buffer: buffer.sample(9),
    "not contiguous": lambda batch, buffer: batch.set("observation", torch.zeros(5, 8).double().T),
    "a graph": lambda batch, buffer: batch.set("observation", batch["observation"].requires_grad_()),
    "negated": lambda batch, buffer: batch.set("observation", torch._neg_view(batch["observation"])),
    "stored rows": lambda batch, buffer: buffer[:8],
    "one memory": lambda batch, buffer: batch.set("index", batch["step"]),
    "no tensordict": lambda batch, buffer: batch["observation"],
}


@pytest.mark.usefixtures("_loops")
@each("name", WRONG)
@each("used", [False, True])
@each("kind", ["uniform", "transformed"])
def test_a_batch_that_does_not_fit_is_refused_and_unchanged(kind: str, used: bool, name: str) -> None:
    buffer = full(kind)
    batch = buffer.sample(8)
    if used:
        buffer.sample(8, out=batch)
    out, stored = WRONG[name](batch, buffer), buffer[:].clone()
    before = copy.deepcopy(out.detach())
    with pytest.raises(SchemaError, match="out cannot be filled"):
        buffer.sample(8, out=out)
    assert (out.detach() == before).all()
    assert (buffer[:] == stored).all()


def test_the_draw_for_a_batch_that_does_not_fit_is_delivered_next() -> None:
    buffer = full(lambda: uniform(sampler=SamplerWithoutReplacement()))
    seen = [buffer.sample(25)["step"]]
    for _ in range(3):
        with pytest.raises(SchemaError):
            buffer.sample(25, out=buffer[:25])
        seen.append(buffer.sample(25)["step"])
    assert torch.cat(seen).sort().values.equal(torch.arange(ROWS))


def test_a_graph_notices_that_its_tensors_were_filled_again() -> None:
    buffer = full("bare")
    batch = buffer.sample(8)
    weight = torch.ones(5, dtype=torch.float64, requires_grad=True)
    loss = (batch["observation"] * weight).sum()
    buffer.sample(8, out=batch)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_batches_of_inference_are_filled() -> None:
    buffer = full("bare")
    with torch.inference_mode():
        batch = buffer.sample(8)
        buffer.sample(8, out=batch)
    assert batch["observation"][:, 0].equal(batch["step"].double())


def test_copies_and_pickles_fill_batches_of_their_own_rows() -> None:
    buffer = full("bare")
    batch = buffer.sample(8)
    buffer.sample(8, out=batch)
    for other in (copy.deepcopy(buffer.storage), pickle.loads(pickle.dumps(buffer.storage))):
        other[:] = rows_of(ROWS).apply(lambda value: torch.zeros_like(value))
        assert not other.get(torch.arange(8), out=batch)["observation"].any()


def test_an_ensemble_fills_batches_but_no_rows_of_its_members() -> None:
    members = full("uniform"), full("uniform")
    ensemble = rbtool.ReplayBufferEnsemble(*members, batch="exact")
    batch = ensemble.sample(16)
    assert ensemble.sample(16, out=batch) is batch
    batch.set("observation", members[1].storage.contents["observation"][:16])
    with pytest.raises(SchemaError, match="stored rows"):
        ensemble.sample(16, out=batch)


@pytest.mark.parametrize("members", [1, 2])
def test_loaded_slices_are_dropped_once_their_rows_are_overwritten(members: int) -> None:
    def extend(parts: list[ReplayBuffer], length: int, start: int) -> None:
        for part in parts:
            number = torch.arange(start, start + length)
            part.extend(TensorDict({"number": number, "episode": torch.full((length,), start)}, [length]))

    def slices(seed: int) -> tuple[ReplayBuffer, list[ReplayBuffer]]:
        ahead: dict[str, Any] = {"batch_size": 20, "prefetch": 3, "generator": torch.Generator().manual_seed(seed)}
        options = ahead if members == 1 else {}
        parts: list[ReplayBuffer] = [
            TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=5), **options)
            for _ in range(members)
        ]
        return (parts[0] if members == 1 else ReplayBufferEnsemble(*parts, **ahead)), parts

    for seed in range(5):
        saved, parts = slices(seed)
        extend(parts, 10, 0)
        extend(parts, 10, 100)
        saved.sample()
        loaded, parts = slices(0)
        loaded.load_state_dict(saved.state_dict())
        extend(parts, 7, 1000)
        for _ in range(4):
            assert (loaded.sample()["number"].reshape(-1, 5).diff() == 1).all()
