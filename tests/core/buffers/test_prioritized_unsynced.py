"""`sync=False`: other processes write, one process keeps the priorities for itself and catches up."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer, WorkerSampler
from rbtool.core.errors import RbtoolError
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.uniform import RandomSampler
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.buffers import drawn_weights
from rbtool.core.writers.max_value import TensorDictMaxValueWriter
from rbtool.core.writers.round_robin import RoundRobinWriter

EXPONENTS: dict[str, Any] = {"alpha": 1.0, "beta": 1.0, "eps": 0.0}


def made(kind: type = PrioritizedReplayBuffer, size: int = 10, **more: Any) -> Any:
    arguments = {"storage": LazyMemmapStorage(size), "batch_size": 4, "shared": True, "sync": False}
    return kind(**EXPONENTS | arguments | more)


def priorities(buffer: Any) -> list[float]:
    """The priorities of all elements, with the highest one 1."""
    found = drawn_weights(buffer)
    return [round(weight / max(found), 4) for weight in found]


def in_a_child(act: Callable[..., Any], *arguments: Any, method: str) -> str:
    """Call a function in another process, and return what it returned or raised, as text."""
    context = multiprocessing.get_context(method)
    answers, told = context.Pipe(duplex=False)
    process = context.Process(target=report, args=(told, act, *arguments))
    process.start()
    told.close()
    said: str = answers.recv()
    process.join()
    return said


def report(told: Any, act: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        told.send(str(act(*arguments)))
    except Exception as error:
        told.send(f"{[kind.__name__ for kind in type(error).__mro__]}: {error}")


def write(buffer: Any, count: int) -> list[int]:
    index: list[int] = buffer.extend(torch.arange(count)).tolist()
    return index


def sample(buffer: Any) -> int:
    return len(buffer.sample())


def update(buffer: Any) -> None:
    buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_learner_catches_up_with_other_processes(method: str) -> None:
    buffer = made()
    buffer.extend(torch.arange(3))
    buffer.update_priority([0, 1, 2], [0.5, 2.0, 1.0])
    assert in_a_child(write, buffer, 4, method=method) == "[3, 4, 5, 6]"
    assert priorities(buffer) == [0.25, 1, 0.5, 1, 1, 1, 1]
    buffer.update_priority(torch.arange(7), torch.full((7,), 0.5))
    assert in_a_child(write, buffer, 5, method=method) == "[7, 8, 9, 0, 1]"
    assert priorities(buffer) == [1, 1, 0.25, 0.25, 0.25, 0.25, 0.25, 1, 1, 1]
    in_a_child(write, buffer, 10, method=method)
    assert priorities(buffer) == [1] * 10


@pytest.mark.slow
def test_a_spawned_child_writes_and_does_not_sample() -> None:
    buffer = made()
    buffer.extend(torch.arange(3))
    for act in (sample, update):
        said = in_a_child(act, buffer, method="spawn")
        assert "'RuntimeError'" in said
        assert "only the process that created this buffer has its priorities" in said
    assert sample(buffer) == 4


def test_what_is_passed_to_a_spawned_child(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = made().sampler
    with monkeypatch.context() as patch:
        patch.setattr("rbtool.core.buffers.prioritized.get_spawning_popen", lambda: object())
        other = pickle.loads(pickle.dumps(sampler))
    assert isinstance(other, WorkerSampler)
    with pytest.raises(RuntimeError, match="that created this buffer"):
        other.sample(TensorStorage(torch.zeros(1)), 1)


@pytest.mark.slow
def test_with_sync_a_prioritised_sampler_is_not_shared() -> None:
    buffer = made(sync=True)
    buffer.extend(torch.arange(3))
    with pytest.raises(RuntimeError, match="cannot go to another process") as refused:
        in_a_child(write, buffer, 1, method="spawn")
    assert "sync=False" in refused.value.hint  # type: ignore[attr-defined]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_a_copy_keeps_the_priorities_and_catches_up_on_its_own(copied: Callable[[Any], Any]) -> None:
    buffer = made(storage=LazyTensorStorage(10), shared=False)
    buffer.extend(torch.arange(3))
    buffer.update_priority([0, 1, 2], [1.0, 2.0, 4.0])
    other = copied(buffer)
    other.extend(torch.arange(2))
    assert priorities(other) == [0.25, 0.5, 1, 1, 1]
    assert priorities(buffer) == [0.25, 0.5, 1]


def test_a_priority_is_not_taken_back_by_catching_up() -> None:
    buffer = made()
    index = buffer.extend(torch.arange(3))
    buffer.update_priority(index, torch.tensor([0.25, 0.5, 1.0]))
    assert priorities(buffer) == [0.25, 0.5, 1]
    buffer.extend(torch.arange(2))
    buffer.update_priority(3, 0.5)
    assert priorities(buffer) == [0.25, 0.5, 1, 0.5, 1]


def test_td_errors_of_new_data_are_left_alone() -> None:
    buffer = made(TensorDictPrioritizedReplayBuffer)
    rows = TensorDict({"a": torch.arange(3), "td_error": torch.tensor([1.0, 2.0, 3.0])}, [3])
    for told in (None, False):
        buffer.extend(rows, update_priority=told)
    buffer.add(rows[2])
    assert priorities(buffer) == [1] * 7
    with pytest.raises(RuntimeError, match="update_priority=True") as refused:
        buffer.extend(rows, update_priority=True)
    assert isinstance(refused.value, RbtoolError)
    assert buffer.write_count == 7
    batch = buffer.sample()
    buffer.update_tensordict_priority(batch.set("td_error", torch.full((4,), 0.5)))
    expected = [0.5 if row in batch["index"] else 1 for row in range(7)]
    assert priorities(buffer) == expected


def test_the_same_call_on_a_plain_buffer() -> None:
    with pytest.raises(RuntimeError, match="update_priority=True"):
        made().extend(torch.arange(3), update_priority=True)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"storage": LazyTensorStorage(10, ndim=2)}, "one dimension, this one has 2"),
        ({"writer": TensorDictMaxValueWriter()}, "RoundRobinWriter, found a TensorDictMaxValueWriter"),
        ({"sampler": RandomSampler()}, "makes its own sampler"),
    ],
)
def test_what_does_not_go_with_it(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        made(**wrong)


def test_parts_that_do_not_go_with_it_change_nothing() -> None:
    buffer = made()
    buffer.extend(torch.arange(3))
    storage, writer = buffer.storage, buffer.writer
    with pytest.raises(ValueError, match="one dimension"):
        buffer.set_storage(LazyTensorStorage(10, ndim=2))
    with pytest.raises(ValueError, match="RoundRobinWriter"):
        buffer.set_writer(TensorDictMaxValueWriter())
    assert (buffer.storage, buffer.writer) == (storage, writer)
    buffer.set_writer(RoundRobinWriter())
    buffer.extend(torch.arange(3))
    assert priorities(buffer) == [1] * 6


@pytest.mark.parametrize("way", ["folder", "state"])
def test_a_saved_learner_goes_on(way: str, tmp_path: Path) -> None:
    def filled() -> Any:
        buffer = made(storage=LazyTensorStorage(10), generator=torch.Generator().manual_seed(1))
        buffer.extend(torch.arange(8))
        return buffer

    one, other = filled(), made(storage=LazyTensorStorage(10))
    one.update_priority(torch.arange(8), torch.arange(8.0))
    one.extend(torch.arange(4))
    if way == "folder":
        one.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    else:
        other.load_state_dict(one.state_dict())
    assert all(torch.equal(one.sample(), other.sample()) for _ in range(30))
    assert priorities(other) == [1, 1, *(round(p / 7, 4) for p in range(2, 8)), 1, 1]


def test_a_folder_of_a_learner_is_one_of_a_prioritised_sampler(tmp_path: Path) -> None:
    buffer = made(storage=LazyTensorStorage(10))
    buffer.extend(torch.arange(3))
    buffer.update_priority([0, 1, 2], [1.0, 2.0, 4.0])
    buffer.dumps(tmp_path / "saved")
    for sync in (True, False):
        other = made(storage=LazyTensorStorage(10), sync=sync)
        other.extend(torch.arange(7))
        other.loads(tmp_path / "saved")
        other.extend(torch.arange(1))
        assert priorities(other) == [0.25, 0.5, 1, 1]


def test_it_is_a_prioritised_sampler() -> None:
    sampler = made().sampler
    assert isinstance(sampler, PrioritizedSampler)
    sampler.beta = 0.25
    assert sampler.beta == 0.25
    assert re.search("Learner", repr(made()))
