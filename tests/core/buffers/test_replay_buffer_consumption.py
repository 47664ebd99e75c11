"""Buffers whose elements are consumed, against a model that counts."""

from __future__ import annotations

import io
import pickle
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool import (
    ConsumingSampler,
    FormatError,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from rbtool.core.testing.buffers import moved

CAPACITY = 8
DATA = Path(__file__).parents[2] / "data" / "torchrl_consuming"


def _saved(state: Any) -> bytes:
    torch.save(state, stream := io.BytesIO())
    return stream.getvalue()


def buffer_of(count: int = 0, n: int = 1, capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
    arguments = {"storage": LazyTensorStorage(capacity), "consume_after_n_samples": n, "batch_size": 2} | options
    buffer = ReplayBuffer(**arguments)
    if count:
        buffer.extend(torch.arange(count))
    return buffer


class Model:
    """Slots, how often each was sampled, and the consumed ones in their order."""

    def __init__(self, n: int) -> None:
        self.n, self.cursor, self.values, self.counts = n, 0, {}, {}
        self.free: list[int] = []

    def write(self, values: list[int]) -> list[int]:
        reused = self.free[: len(values)]
        slots = list(reused)
        while len(slots) < len(values):
            if self.cursor not in reused:
                slots.append(self.cursor)
            self.cursor = (self.cursor + 1) % CAPACITY
        for slot, value in zip(slots, values, strict=True):
            self.values[slot], self.counts[slot] = value, 0
            if slot in self.free:
                self.free.remove(slot)
        return slots

    def sampled(self, slots: list[int]) -> None:
        for slot in slots:
            assert slot not in self.free
            self.counts[slot] += 1
            if self.counts[slot] == self.n:
                self.free.append(slot)

    @property
    def live(self) -> int:
        return len(self.values) - len(self.free)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["write", "add", "sample", "update"]), st.integers(1, CAPACITY)), max_size=25
)


@settings(max_examples=120, deadline=None)
@given(ACTIONS, st.integers(1, 3), st.sampled_from([LazyTensorStorage, ListStorage]))
def test_histories(actions: list[Any], n: int, storage: Any) -> None:
    buffer, model, number = buffer_of(n=n, storage=storage(CAPACITY)), Model(n), 0
    for action, count in actions:
        if action == "write":
            fits = min(count, CAPACITY)
            values = list(range(number, number + fits))
            assert buffer.extend(torch.tensor(values)).tolist() == model.write(values)
            number += fits
        elif action == "add":
            assert [buffer.add(torch.tensor(number))] == model.write([number])
            number += 1
        elif action == "update" and model.values:
            slot = count % len(model.values)
            buffer.mark_update(slot)
            model.counts[slot] = 0
            model.free = [free for free in model.free if free != slot]
        elif action == "sample" and model.live:
            batch, info = buffer.sample(count, return_info=True) if count == 2 else _quiet(buffer, count)
            slots = info["index"].tolist()
            assert len(slots) == len(set(slots)) == min(count, model.live)
            assert batch.tolist() == [model.values[slot] for slot in slots]
            model.sampled(slots)
            assert buffer.sampler.ran_out is (model.live == 0)
        elif action == "sample":
            with pytest.raises(RuntimeError, match="empty storage"):
                buffer.sample()
        assert len(buffer) == model.live
        assert [int(value) for value in buffer.storage] == [model.values[slot] for slot in sorted(model.values)]


def _quiet(buffer: Any, count: int) -> Any:
    draw = buffer.draw(count)
    return buffer.batch_of(draw), draw.info


def test_slots_of_the_documented_example() -> None:
    buffer, live = buffer_of(100, capacity=100), torch.ones(100, dtype=torch.bool)
    live[[10, 20]] = False
    consumed = {"_live_mask": live, "_free_indices": torch.tensor([10, 20])}  # in the form of TorchRL
    buffer.sampler.load_state_dict(
        {"max_sample_count": 1, "_sample_count": (~live).long(), "_known_storage_len": 100} | consumed
    )
    assert buffer.extend(torch.arange(13)).tolist() == [10, 20, *range(10), 11]
    assert buffer.writer.cursor == 12


def test_iteration_ends_when_nothing_is_left() -> None:
    buffer = buffer_of(5, n=2)
    batches = list(buffer)
    assert all(len(batch) == len(batch.unique()) <= 2 for batch in batches)
    assert Counter(torch.cat(batches).tolist()) == dict.fromkeys(range(5), 2)
    assert list(buffer) == []
    assert len(buffer) == 0
    assert buffer[:].tolist() == [0, 1, 2, 3, 4]


def test_elements_are_equally_likely() -> None:
    found: Counter[int] = Counter()
    for seed in range(300):
        buffer = buffer_of(8, generator=torch.Generator().manual_seed(seed))
        found.update(buffer.sample().tolist())
    total = sum(found.values())
    assert all(abs(count - total / 8) < 5 * (total / 8) ** 0.5 for count in found.values())


@pytest.mark.parametrize("way", ["folder", "state"])
def test_saved_buffers_continue(way: str, tmp_path: Any) -> None:
    options = {"n": 2, "generator": torch.Generator().manual_seed(1)}
    first, second = buffer_of(7, **options), buffer_of(n=3, generator=torch.Generator())
    for _ in range(3):
        first.sample()
    moved(first, second, way, tmp_path / "saved")
    assert second.sampler.max_sample_count == 2
    for _ in range(3):
        assert first.sample().equal(second.sample())
    assert first.extend(torch.arange(4)).equal(second.extend(torch.arange(4)))
    assert [one.tolist() for one in first] == [one.tolist() for one in second]


def test_checkpoints_of_torchrl(tmp_path: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), consume_after_n_samples=1, batch_size=5)
    buffer.loads(DATA / "checkpoint")
    assert buffer.sampler.max_sample_count == 2
    assert buffer.sampler.freed(10).tolist() == [6, 0, 8, 7, 2, 1, 5]
    again = TensorDictReplayBuffer(storage=LazyTensorStorage(10), consume_after_n_samples=1, batch_size=5)
    moved(buffer, again, "folder", tmp_path / "saved")
    for one in (buffer, again):
        found = Counter(row for batch in one for row in batch["a"].tolist())
        assert found == {4: 2, 10: 1, 11: 1}
    assert again.extend(TensorDict({"a": torch.arange(3)}, [3])).tolist() == [6, 0, 8]


def test_states_are_tensors_and_numbers_in_the_form_of_torchrl(tmp_path: Any) -> None:
    buffer = buffer_of(7, n=2)
    buffer.sample()
    buffer.dumps(tmp_path / "saved")
    files = [file.name for file in (tmp_path / "saved" / "sampler").iterdir()]
    assert files == ["consuming_sampler.pt"]
    ours, theirs = (
        torch.load(folder / "sampler" / "consuming_sampler.pt", weights_only=True)
        for folder in (tmp_path / "saved", DATA / "checkpoint")
    )
    assert ours.keys() - theirs.keys() == {"_live_order"}
    assert not theirs.keys() - ours.keys()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no archive",
        pickle.dumps(print, protocol=2),
        _saved([1, 2]),
        _saved({"max_sample_count": 1}),
        _saved(dict.fromkeys(("max_sample_count", "_sample_count", "_live_mask", "_free_indices"), 1)),
    ],
)
def test_damaged_states_change_nothing(content: bytes, tmp_path: Any) -> None:
    shutil.copytree(DATA / "checkpoint", tmp_path / "saved")
    (tmp_path / "saved" / "sampler" / "consuming_sampler.pt").write_bytes(content)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), consume_after_n_samples=3, batch_size=5)
    buffer.extend(TensorDict({"a": torch.arange(4)}, [4]))
    with pytest.raises(FormatError):
        buffer.loads(tmp_path / "saved")
    assert buffer.sampler.max_sample_count == 3
    assert buffer[:]["a"].tolist() == [0, 1, 2, 3]


def test_checkpoints_of_the_other_kind(tmp_path: Any) -> None:
    consuming, plain = buffer_of(4), ReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=2)
    plain.extend(torch.arange(3))
    consuming.dumps(tmp_path / "consuming")
    plain.dumps(tmp_path / "plain")
    with pytest.raises(RuntimeError, match="consumes its elements"):
        plain.loads(tmp_path / "consuming")
    consuming.loads(tmp_path / "plain")
    assert len(consuming) == 3
    with pytest.raises(RuntimeError, match="missing in the state"):
        consuming.load_state_dict(plain.state_dict())


def test_a_full_ring_in_a_larger_storage(tmp_path: Any) -> None:
    buffer, larger = buffer_of(8), buffer_of(capacity=12)
    buffer.sample(2)
    buffer.extend(torch.tensor([8, 9, 10]))
    left = set(range(11)) - set(buffer.sample(2).tolist())
    moved(buffer, larger, "folder", tmp_path / "saved")
    assert {int(value) for batch in larger for value in batch} <= left
    assert len(larger.sampler.freed(20)) == 8


def test_other_parts() -> None:
    assert isinstance(buffer_of().sampler, ConsumingSampler)
    buffer = buffer_of(4, sampler=ConsumingSampler(1))
    buffer.sample()
    buffer.empty()
    assert (len(buffer), list(buffer.sampler.freed(4))) == (0, [])
    buffer.extend(torch.arange(4))
    buffer.set_sampler(RandomSampler())
    assert len(buffer) == 4
    buffer.set_sampler(ConsumingSampler(3))
    assert sum(map(len, buffer)) == 12
    buffer[0] = torch.tensor(7)
    assert buffer.sample().tolist() == [7]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"consume_after_n_samples": True}, TypeError),
        ({"consume_after_n_samples": 1.0}, TypeError),
        ({"consume_after_n_samples": 0}, ValueError),
        ({"sampler": SliceSampler(slice_len=1)}, ValueError),
        ({"sampler": ConsumingSampler(3)}, ValueError),
        ({"prefetch": 2}, ValueError),
        ({"shared": True}, ValueError),
        ({"storage": LazyTensorStorage(8, ndim=2)}, ValueError),
        ({"writer": TensorDictMaxValueWriter(rank_key="a")}, TypeError),
    ],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], error: type[Exception]) -> None:
    arguments = {"storage": LazyTensorStorage(8), "consume_after_n_samples": 1, "batch_size": 2}
    with pytest.raises(error):
        ReplayBuffer(**arguments | options)


def test_priorities_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot be used in a buffer with priorities"):
        PrioritizedReplayBuffer(alpha=0.5, beta=0.5, consume_after_n_samples=1)
