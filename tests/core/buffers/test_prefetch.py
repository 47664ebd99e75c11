from __future__ import annotations

import multiprocessing
import pickle
import threading

import pytest
import torch
from tensordict import TensorDict
from waiting import HANG

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.transforms.base import Transform


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


class Threads(Transform):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.seen.add(threading.get_ident())
        return data


@pytest.mark.parametrize("sampler", [None, SamplerWithoutReplacement])
def test_threads_change_no_batch(sampler: type | None) -> None:
    ahead, plain = numbers(prefetch=4, sampler=sampler), numbers(sampler=sampler)
    assert all(torch.equal(ahead.sample(), plain.sample()) for _ in range(50))


def test_workers_do_the_transforms() -> None:
    transform = Threads()
    buffer = numbers(prefetch=2, transform=transform)
    for _ in range(6):
        buffer.sample()
    assert transform.seen - {threading.get_ident()}


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


def test_what_goes_wrong_in_a_thread_is_raised_with_its_batch() -> None:
    buffer = numbers(prefetch=2, transform=lambda rows: 1 // 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            buffer.sample()


def test_emptying_forgets_what_was_drawn() -> None:
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


def test_a_forked_child_goes_on_with_the_same_batches() -> None:
    buffer = numbers(prefetch=2)
    buffer.sample()
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    process = context.Process(target=lambda: found.put([buffer.sample().tolist() for _ in range(5)]))
    process.start()
    batches = found.get()
    process.join()
    assert batches == [buffer.sample().tolist() for _ in range(5)]


def test_tensordicts_carry_their_own_index() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=8, prefetch=3)
    buffer.extend(TensorDict({"a": torch.arange(50)}, [50]))
    assert all(torch.equal(batch["a"], batch["index"]) for batch in (buffer.sample() for _ in range(20)))


def test_several_threads_share_the_queue() -> None:
    buffer = numbers(prefetch=2, sampler=SamplerWithoutReplacement)
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.extend(buffer.sample() for _ in range(26))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
    found = [buffer.sample() for _ in range(2)]
    with pytest.raises(RuntimeError, match="dry"):
        buffer.sample()
    found += [buffer.sample() for _ in range(5)]
    assert all(torch.equal(batch, plain.sample()) for batch in found)


class Waits(Transform):
    def __init__(self) -> None:
        super().__init__()
        self.reached, self.open = threading.Event(), threading.Event()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.reached.set()
        self.open.wait(HANG)
        return data


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
    waits = Waits()
    buffer = numbers(prefetch=2, transform=waits)
    reader = threading.Thread(target=buffer.sample)
    reader.start()
    assert waits.reached.wait(HANG)
    with pytest.raises(TimeoutError, match=r"still being made after 0.05 seconds"):
        buffer.shutdown(timeout=0.05)
    assert buffer.is_alive
    waits.open.set()
    reader.join()
    buffer.shutdown(timeout=HANG)
    assert not buffer.is_alive


def test_shutdown_raises_what_went_wrong_in_a_thread() -> None:
    buffer = numbers(prefetch=2, transform=lambda rows: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        buffer.sample()
    with pytest.raises(ZeroDivisionError):
        buffer.shutdown()
