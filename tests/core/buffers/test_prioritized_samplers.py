"""Samplers that a user made, with storages that they fit, that they do not fit, and that they grow with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import PrioritizedReplayBuffer, TensorDictReplayBuffer
from rbtool.core.errors import RbtoolError
from rbtool.core.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.buffers import EXPONENTS, drawn_weights, expected, moved, weighted
from rbtool.core.writers.max_value import TensorDictMaxValueWriter
from rbtool.core.writers.round_robin import RoundRobinWriter


def sampler(capacity: int = 10, **more: Any) -> PrioritizedSampler:
    return PrioritizedSampler(capacity, **EXPONENTS, **more)


# Growth --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "cpu"])
def test_samplers_grow_with_whole_rows_and_with_a_list_without_bounds(device: str | None) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2), sampler=sampler(device=device))
    index = buffer.extend(torch.arange(12).reshape(3, 4))
    assert buffer.sampler.max_capacity == buffer.storage.max_size == 12
    buffer.update_priority(index, torch.arange(1.0, 13))
    assert drawn_weights(buffer) == expected(*range(1, 13))
    buffer = ReplayBuffer(storage=ListStorage(), sampler=sampler(2, device=device))
    for first in range(0, 30, 3):
        index = buffer.extend([torch.tensor(row) for row in range(first, first + 3)])
        buffer.update_priority(index, torch.tensor([1.0, 2.0, 3.0]))
    assert drawn_weights(buffer) == expected(*[1, 2, 3] * 10)


def test_priorities_are_kept_when_a_sampler_grows() -> None:
    grows = sampler(4, max_priority_within_buffer=True, dtype=torch.float64)
    grows.update_priority(torch.arange(4), torch.tensor([1.0, 7.0, 0.0, 2.0]))
    grows.fit(TensorStorage(torch.arange(9)))
    grows.extend(torch.arange(4, 6))
    assert (grows.max_capacity, grows.default_priority, grows.dtype) == (9, 7, torch.float64)
    assert grows.state_dict()["_sum_tree"].tolist() == [1, 7, 0, 2, 7, 7, 0, 0, 0]


def test_a_sampler_whose_weights_would_overflow_does_not_grow() -> None:
    grows = sampler(2, dtype=torch.float64)
    grows.update_priority(0, 8e307)
    with pytest.raises(RuntimeError, match=r"a weight is 8e\+307, 10 elements can have up to 1\.7.*e\+307"):
        grows.fit(TensorStorage(torch.arange(10)))
    assert grows.max_capacity == 2
    assert grows.state_dict()["_sum_tree"].tolist() == [8e307, 0]


def of_slices(capacity: int) -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(capacity, **EXPONENTS, slice_len=2, end_key="end", strict_length=True)


def steps(lanes: int, count: int = 3) -> TensorDict:
    ends = torch.zeros(lanes, count, 1, dtype=torch.bool)
    ends[:, -1] = True
    return TensorDict({"end": ends, "a": torch.zeros(lanes, count)}, [lanes, count])


def test_slice_samplers_grow_with_a_storage_of_whole_rows() -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10, ndim=2), sampler=of_slices(10), dim_extend=1, batch_size=40
    )
    index = buffer.extend(steps(4))
    assert buffer.sampler.max_capacity == 12
    assert {(int(row), int(lane)) for row, lane in buffer.sample()["index"][::2]} == {
        (row, lane) for row in range(2) for lane in range(4)
    }
    buffer.update_priority(index, 0.0)
    buffer.update_priority(torch.tensor([[1, 3]]), 2.0)
    assert buffer.sample()["index"][::2].unique(dim=0).tolist() == [[1, 3]]


def test_slice_samplers_know_the_legal_starts_after_growing_between_batches() -> None:
    slices = of_slices(3)
    storage = TensorStorage(steps(1)[0])
    assert set(slices.sample(storage, 80)[0][0][::2].tolist()) == {0, 1}
    slices.fit(LazyTensorStorage(6))
    slices.update_priority(1, 3.0)
    assert set(slices.sample(storage, 80)[0][0][::2].tolist()) == {0, 1}
    slices.update_priority([0, 2], 0.0)
    assert set(slices.sample(storage, 80)[0][0][::2].tolist()) == {1}


@pytest.mark.parametrize("way", ["state", "folder"])
@pytest.mark.parametrize("fresh", [True, False])
def test_states_of_a_storage_of_whole_rows_are_taken_over(tmp_path: Path, way: str, fresh: bool) -> None:
    one, other = (
        ReplayBuffer(storage=LazyTensorStorage(10, ndim=2), sampler=sampler(), dim_extend=0) for _ in range(2)
    )
    one.update_priority(one.extend(torch.arange(12).reshape(3, 4)), torch.arange(1.0, 13))
    if not fresh:
        other.extend(torch.arange(8).reshape(2, 4))
    moved(one, other, way, tmp_path / "saved")
    assert other.sampler.max_capacity == 12
    assert drawn_weights(other) == expected(*range(1, 13))


@pytest.mark.parametrize("way", ["state", "folder"])
def test_states_of_another_fixed_capacity_are_refused(tmp_path: Path, way: str) -> None:
    one, other = (ReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler(size)) for size in (5, 10))
    for buffer in (one, other):
        buffer.extend(torch.arange(4))
    other.update_priority(1, 3.0)
    with pytest.raises(RuntimeError, match=r"5 priorities.*max_capacity is 10"):
        moved(one, other, way, tmp_path / "saved")
    assert drawn_weights(other) == expected(1, 3, 1, 1)


@pytest.mark.parametrize("capacity", ["0", "2.5", "NaN", "1e30"])
def test_folders_of_an_odd_capacity_are_refused(tmp_path: Path, capacity: str) -> None:
    grows = sampler(4)
    grows.on_attach(TensorStorage(torch.zeros(2, 2), ndim=2))
    grows.dumps(tmp_path)
    metadata = tmp_path / "sampler_metadata.json"
    metadata.write_text(metadata.read_text().replace('"_max_capacity": 4.0', f'"_max_capacity": {capacity}'))
    with pytest.raises(ValueError, match=r"_max_capacity is|has 32 bytes|cannot be read") as refused:
        grows.loads(tmp_path)
    assert isinstance(refused.value, RbtoolError)
    assert grows.state_dict()["_sum_tree"].tolist() == [1] * 4


# A capacity that is too small ----------------------------------------------------------------------

TOO_SMALL = "max_capacity is 5, but the storage has room for 10 elements"


@pytest.mark.parametrize("kind", [PrioritizedSampler, PrioritizedSliceSampler])
@pytest.mark.parametrize("storage", [lambda: LazyTensorStorage(10), lambda: ListStorage(10)])
@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictMaxValueWriter])
def test_a_sampler_that_is_too_small_grows_to_the_storage_with_a_warning(
    kind: Any, storage: Callable[[], Any], writer: Callable[[], Any]
) -> None:
    if kind is PrioritizedSliceSampler and writer is TensorDictMaxValueWriter:
        return  # these two are refused together
    more = {"num_slices": 1} if kind is PrioritizedSliceSampler else {}
    data = TensorDict({"next": {"reward": torch.arange(10.0), "done": torch.ones(10, dtype=torch.bool)}}, [10])
    with pytest.warns(UserWarning, match=TOO_SMALL) as told:
        buffer = ReplayBuffer(storage=storage(), sampler=kind(5, **EXPONENTS, **more), writer=writer())
    assert len(told) == 1
    for part in (data[:4], data[4:6], data[6:]):
        buffer.extend(part)
    buffer.update_priority(torch.arange(9), 0.0)
    assert buffer.sample(1)["next", "reward"].tolist() == [9.0]


def test_samplers_grow_with_a_new_storage_and_new_samplers_with_the_storage() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler(5))
    buffer.update_priority(buffer.extend(torch.arange(3)), torch.tensor([1.0, 2.0, 3.0]))
    with pytest.warns(UserWarning, match=TOO_SMALL):
        buffer.set_storage(TensorStorage(torch.arange(10)))
    assert drawn_weights(buffer) == expected(*[1] * 10)
    buffer.set_storage(LazyTensorStorage(20))  # no second warning
    buffer.extend(torch.arange(20))
    assert drawn_weights(buffer) == expected(*[1] * 20)
    other = weighted(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    with pytest.warns(UserWarning, match=TOO_SMALL):
        other.set_sampler(sampler(5))
    assert drawn_weights(other) == expected(*[1] * 6)


def test_priorities_from_before_the_buffer_are_kept() -> None:
    own = sampler()
    own.update_priority(torch.arange(3), torch.tensor([1.0, 2.0, 3.0]))
    buffer = ReplayBuffer(storage=TensorStorage(torch.arange(5)), sampler=own)
    assert drawn_weights(buffer) == expected(1, 2, 3, 3, 3)


# Elements that are not there -----------------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("index", [3, [0, 3], torch.tensor([1, 9]), torch.tensor([[2], [4]])])
def test_elements_that_the_storage_lacks_get_no_priority(own: bool, sync: bool, index: Any) -> None:
    more = {"sampler": sampler()} if own and sync else {"sync": sync}
    buffer = PrioritizedReplayBuffer(**EXPONENTS, storage=LazyTensorStorage(10), **more)
    buffer.extend(torch.arange(3))
    buffer.update_priority(0, 2.0)
    with pytest.raises(IndexError, match=r"no element \d: the storage has 3"):
        buffer.update_priority(index, 50.0)
    assert buffer.sampler.default_priority == 2
    assert drawn_weights(buffer) == expected(2, 1, 1)
    buffer.add(torch.tensor(3))
    assert drawn_weights(buffer) == expected(2, 1, 1, 2)


def test_elements_of_several_dimensions_that_the_storage_lacks_get_no_priority() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), sampler=sampler(12), dim_extend=0)
    buffer.extend(torch.arange(8).reshape(2, 4))
    with pytest.raises(IndexError, match="there is no element 8: the storage has 8"):
        buffer.update_priority(torch.tensor([[0, 0], [2, 0]]), 50.0)
    assert drawn_weights(buffer) == expected(*[1] * 8)


# Told once -----------------------------------------------------------------------------------------


class CountsBoth(PrioritizedSampler):
    heard = 0

    def extend(self, index: Any) -> None:
        self.heard += 1
        super().extend(index)

    def add(self, index: Any) -> None:
        self.heard += 1
        PrioritizedSampler.extend(self, index)

    def mark_update(self, index: Any, **more: Any) -> None:
        self.heard += 1
        super().mark_update(index, **more)


class Counts(CountsBoth):
    writes_are_updates = True


@pytest.mark.parametrize(("kind", "times"), [(Counts, 1), (CountsBoth, 2)])
@pytest.mark.parametrize("ndim", [1, 2])
def test_samplers_hear_of_each_write_once(kind: type[CountsBoth], times: int, ndim: int) -> None:
    own = kind(12, **EXPONENTS)
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=ndim), sampler=own, dim_extend=0)
    rows = torch.arange(8).reshape(4, 2) if ndim > 1 else torch.arange(4)
    buffer.extend(rows[:3])
    buffer.add(rows[3])
    assert buffer.sampler.heard == 2 * times
    buffer[1] = buffer[1]
    assert buffer.sampler.heard == 2 * times + 1


@pytest.mark.parametrize("index", [1, -1, slice(1, 2), (torch.tensor([1]),), [1, -2]])
def test_edits_in_place_of_storages_and_writers_are_heard(index: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), sampler=sampler(3))
    buffer.extend(torch.arange(3))
    buffer.update_priority(0, 5.0)
    buffer.storage[index] = buffer.storage[index]
    marked = {2} if index == -1 else {1}
    assert drawn_weights(buffer) == expected(*[5 if row == 0 or row in marked else 1 for row in range(3)])
    buffer.writer.write_at(torch.tensor([1, 2]), torch.tensor([7, 8]))
    assert drawn_weights(buffer) == expected(5, 5, 5)


@pytest.mark.parametrize(
    ("index", "marked"),
    [((torch.tensor([0, 1]), torch.tensor([1, 0])), {1, 2}), ((torch.tensor([-1]), torch.tensor([0])), {4}),
     ((slice(1, None), torch.tensor([1])), {3, 5})],
)  # fmt: skip
def test_edits_by_coordinates_are_heard(index: Any, marked: set[int]) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), sampler=sampler(6), dim_extend=0)
    buffer.update_priority(buffer.extend(torch.arange(6).reshape(3, 2)), 1.0)
    buffer.update_priority(torch.tensor([[0, 0]]), 4.0)
    buffer.update_priority(torch.tensor([[0, 0]]), 1.0)
    buffer.storage[index] = buffer.storage[index]
    assert drawn_weights(buffer) == expected(*[4 if number in marked else 1 for number in range(6)])


# Batches of elements one by one --------------------------------------------------------------------


@pytest.mark.parametrize("storage", [LazyStackStorage, ListStorage])
def test_entries_added_to_a_batch_do_not_reach_the_elements(storage: Any) -> None:
    elements = [TensorDict({"a": torch.zeros(n), "in": {"b": torch.ones(n)}}, []) for n in (1, 2, 3)]
    buffer = TensorDictReplayBuffer(storage=storage(5), sampler=sampler(), writer=RoundRobinWriter(), batch_size=20)
    buffer.extend(LazyStackedTensorDict.lazy_stack(elements))
    stored = [set(buffer[number].keys(True)) for number in range(3)]
    torch.manual_seed(0)
    batch = buffer.sample()
    for part in batch.tensordicts:
        part["td_error"], part["in", "c"] = torch.ones(1), torch.ones(1)
    assert [set(buffer[number].keys(True)) for number in range(3)] == stored
    assert len({id(part) for part in batch.tensordicts}) == 20
