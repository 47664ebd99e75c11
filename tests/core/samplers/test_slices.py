"""`SliceSampler`: its arguments, what it takes for trajectories, and the sharp edges of TorchRL's."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import RbtoolError
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.storages.base import Storage
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage

DONE = ("next", "done")


def steps(count: int, length: int = 3, first: int = 0) -> TensorDict:
    """Rows of episodes of `length` steps."""
    number = torch.arange(first, first + count)
    done = ((number + 1) % length == 0).unsqueeze(-1)
    return TensorDict({"number": number, "episode": number // length, "next": {"done": done}}, [count])


def storage(**entries: torch.Tensor) -> TensorStorage:
    return TensorStorage(TensorDict(dict(entries), [len(next(iter(entries.values())))]))


def pairs(sampler: SliceSampler, where: Storage, draws: int = 200) -> set[tuple[int, ...]]:
    """Row numbers of many slices of two steps; coordinates in a row where the storage has several dimensions."""
    index, _ = sampler.sample(where, 2 * draws)
    return {tuple(pair) for pair in torch.stack([part.view(-1, 2) for part in index], -1).flatten(1).tolist()}


# Arguments ---------------------------------------------------------------------------------------------

VECTOR = torch.ones(6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, TypeError, "exactly one"),
        ({"num_slices": 2, "slice_len": 2}, TypeError, "exactly one"),
        ({"slice_len": 0}, ValueError, "slice_len is 0"),
        ({"num_slices": 2.0}, ValueError, "num_slices is 2.0"),
        ({"slice_len": 2, "end_key": "a", "end_keys": ["b"]}, RuntimeError, "one of them"),
        ({"slice_len": 2, "ends": VECTOR}, RuntimeError, "cache_values"),
        ({"slice_len": 2, "ends": VECTOR, "cache_values": True, "traj_key": "a"}, RuntimeError, "one of them"),
        ({"slice_len": 2, "ends": VECTOR, "trajectories": VECTOR, "cache_values": True}, RuntimeError, "one of them"),
        ({"slice_len": 2, "ends": VECTOR[:0], "cache_values": True}, RuntimeError, r"ends has the shape \[0\]"),
        ({"slice_len": 2, "pad_output": True}, ValueError, "strict_length"),
        ({"slice_len": 2, "span": -1}, ValueError, "span is -1"),
        ({"slice_len": 2, "span": (1, 2, 3)}, ValueError, "span"),
        ({"slice_len": 2, "weight": "length"}, ValueError, "'length'"),
        ({"slice_len": 2, "anchor": "middle"}, ValueError, "'middle'"),
        ({"slice_len": 2, "traj_key": 5}, ValueError, "the key is 5, expected"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as raised:
        SliceSampler(**options)
    assert isinstance(raised.value, RbtoolError)


@pytest.mark.parametrize(
    ("options", "batch", "error", "words"),
    [
        ({"slice_len": 3}, 4, RuntimeError, "4 is not divisible by slice_len=3"),
        ({"num_slices": 3}, 4, RuntimeError, "4 is not divisible by num_slices=3"),
        ({"slice_len": 3}, 0, ValueError, "batch_size is 0"),
        ({"slice_len": 4}, 4, RuntimeError, "slices of 4 steps: the 2 stored have 3 to 3 steps"),
        ({"num_slices": 2, "span": 2}, 4, ValueError, "span is 2, expected less than 2"),
        ({"slice_len": 2, "traj_key": "no", "end_key": "none"}, 4, KeyError, "no"),
        (
            {"slice_len": 2, "ends": VECTOR[:5], "cache_values": True},
            4,
            RuntimeError,
            r"ends has the shape \[5\], expected \[6\]",
        ),
        ({"slice_len": 2, "trajectories": VECTOR[:5], "cache_values": True}, 4, RuntimeError, r"trajectories .* \[5\]"),
    ],
)
def test_batches_that_cannot_be_are_refused(options: Any, batch: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        SliceSampler(**options).sample(TensorStorage(steps(6)), batch)


def test_a_signal_of_the_wrong_rank_is_refused() -> None:
    ids = storage(episode=torch.zeros(6, 2).long())
    with pytest.raises(
        RuntimeError, match=r"'episode' has the shape \[6, 2\], expected one id for each of \[6\] elements"
    ):
        SliceSampler(slice_len=2).sample(ids, 4)
    lanes = LazyTensorStorage(12, ndim=2)
    lanes.set(range(6), TensorDict({"x": torch.zeros(6, 2)}, [6, 2]))
    with pytest.raises(RuntimeError, match=r"\[6\], expected \[6, 2\]"):
        SliceSampler(slice_len=2, ends=VECTOR, cache_values=True).sample(lanes, 4)


# Signals -----------------------------------------------------------------------------------------------


def test_what_tells_trajectories_apart_is_found_in_order() -> None:
    ids, episode = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 1, 2, 2, 3])
    done = torch.tensor([1, 1, 0, 1, 1, 1]).bool().unsqueeze(-1)
    data = TensorDict({"collector": {"traj_ids": ids}, "episode": episode, "next": {"done": done}}, [6])
    for keys, expected in [
        ((), {(0, 1), (2, 3), (4, 5)}),
        (("collector",), {(1, 2), (3, 4)}),
        (("collector", "episode"), {(2, 3)}),
    ]:
        assert pairs(SliceSampler(slice_len=2), TensorStorage(data.exclude(*keys))) == expected


def test_several_flags_are_one_and_absent_ones_are_passed_over() -> None:
    flags = {"a": torch.tensor([0, 1, 0, 0, 0, 1]), "b": torch.tensor([0, 0, 0, 1, 0, 0])}
    both = storage(**{name: flag.bool().unsqueeze(-1) for name, flag in flags.items()})
    assert pairs(SliceSampler(slice_len=2, end_keys=["a", "b"]), both) == {(0, 1), (2, 3), (4, 5)}
    assert (1, 2) not in pairs(SliceSampler(slice_len=2, end_keys=["nowhere", "a"]), both)
    assert (3, 4) in pairs(SliceSampler(slice_len=2, end_keys=["nowhere", "a"]), both)


def test_flags_of_agents_are_one() -> None:
    done = torch.zeros(6, 3, 1, dtype=torch.bool)
    done[1, 2] = True
    agents = TensorStorage(TensorDict({"next": {"done": done}}, [6]))
    assert (1, 2) not in pairs(SliceSampler(slice_len=2), agents)


@pytest.mark.parametrize("make", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_any_storage_of_tensordicts_will_do(make: Any) -> None:
    where = make(9)
    ReplayBuffer(storage=where).extend(list(steps(9).unbind(0)))
    assert pairs(SliceSampler(slice_len=2), where) == {(0, 1), (1, 2), (3, 4), (4, 5), (6, 7), (7, 8)}


@pytest.mark.parametrize("name", ["ends", "trajectories"])
def test_signals_of_several_dimensions_have_lanes_of_their_own(name: str) -> None:
    lanes = LazyTensorStorage(8, ndim=2)
    lanes.set(range(4), TensorDict({"x": torch.zeros(4, 2)}, [4, 2]))
    ends = torch.tensor([[0, 1], [1, 0], [0, 0], [1, 1]]).bool()
    ids = torch.tensor([[0, 0], [0, 1], [1, 1], [1, 1]])
    sampler = SliceSampler(slice_len=2, cache_values=True, **{name: ends if name == "ends" else ids})
    assert pairs(sampler, lanes) == {(0, 0, 1, 0), (2, 0, 3, 0), (1, 1, 2, 1), (2, 1, 3, 1)}


# Sharp edges, by their number in the specification -----------------------------------------------------


def test_edge_03_9_trajectories_can_count_by_their_length() -> None:
    where = storage(episode=torch.tensor([0] * 9 + [1] * 2))
    torch.manual_seed(0)
    drawn = {}
    for weight in ("episode", "step"):
        index, _ = SliceSampler(slice_len=2, weight=weight).sample(where, 8000)  # type: ignore[arg-type]
        drawn[weight] = Counter((index[0][::2] >= 9).tolist())[True] / 4000
    assert drawn["episode"] == pytest.approx(1 / 2, abs=0.05)
    assert drawn["step"] == pytest.approx(1 / 9, abs=0.03)


def test_edge_03_10_slices_of_one_trajectory_can_be_told_apart() -> None:
    where = storage(episode=torch.tensor([0] * 3))
    sampler = SliceSampler(slice_len=4, strict_length=False, batched=True)
    (index,), info = sampler.sample(where, 8)
    assert index.tolist() == [[0, 1, 2, 2]] * 2
    assert info["collector", "mask"].tolist() == [[True, True, True, False]] * 2
    ragged, marks = SliceSampler(slice_len=4, strict_length=False).sample(where, 8)
    assert ragged[0].tolist() == [0, 1, 2] * 2
    assert marks["next", "truncated"].flatten().tolist() == [False, False, True] * 2


def test_edge_03_11_a_trajectory_goes_on_over_the_end_of_the_ring() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), sampler=SliceSampler(slice_len=2), batch_size=4)
    buffer.extend(steps(6, length=10))
    assert (5, 0) not in pairs(buffer.sampler, buffer.storage)
    buffer.extend(steps(2, length=10, first=6))
    found = pairs(buffer.sampler, buffer.storage)
    assert found == {(2, 3), (3, 4), (4, 5), (5, 0), (0, 1)}


@pytest.mark.parametrize("name", ["ends", "trajectories"])
def test_edge_03_12_what_was_given_stays_through_writes(name: str) -> None:
    signal = torch.tensor([0, 1, 0, 0, 1, 1]).bool() if name == "ends" else torch.tensor([0, 0, 1, 1, 1, 2])
    sampler = SliceSampler(slice_len=2, cache_values=True, **{name: signal})  # type: ignore[arg-type]
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), sampler=sampler, batch_size=4)
    buffer.extend(steps(6, length=10))
    assert pairs(sampler, buffer.storage) == {(0, 1), (2, 3), (3, 4)}
    buffer.extend(steps(3, length=10))  # the newest row is 2, and the ring does not go on from row 5, an end, to row 0
    assert pairs(sampler, buffer.storage) == {(0, 1), (3, 4)}


def test_edge_03_17_workers_that_take_turns_are_told_apart_by_their_ids() -> None:
    where = storage(episode=torch.tensor([0, 0, 1, 1, 0, 0, 1]))
    assert pairs(SliceSampler(slice_len=2), where) == {(0, 1), (2, 3), (4, 5)}


def test_edge_03_20_after_a_load_the_newest_row_is_an_end(tmp_path: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(6))
    buffer.extend(steps(8, length=100))
    buffer.dumps(tmp_path / "saved")
    in_time_order = {(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)}  # a larger ring takes the rows from the oldest on
    for capacity, expected in [(6, {(2, 3), (3, 4), (4, 5), (5, 0), (0, 1)}), (9, in_time_order)]:
        other = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=SliceSampler(slice_len=2, end_key=DONE))
        other.loads(tmp_path / "saved")
        assert pairs(other.sampler, other.storage) == expected


# What belongs to whom ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"batched": True}, {"strict_length": False, "pad_output": True}])
def test_a_batch_belongs_to_the_caller(options: dict[str, Any]) -> None:
    where = TensorStorage(steps(6).set("is_init", torch.zeros(6, 1, dtype=torch.bool)))
    sampler = SliceSampler(slice_len=2, **options)
    (index,), info = sampler.sample(where, 8)
    places = [value.data_ptr() for value in (index, *info.values())]
    assert len(set(places)) == len(places)
    kept = {key: info[key].clone() for key in ("is_init", ("next", "truncated"))}
    for value in (index, *info.values()):
        value.zero_()
    _, again = sampler.sample(where, 8)
    assert all(torch.equal(again[key], value) for key, value in kept.items())


def test_a_pickle_is_small_and_draws_the_same() -> None:
    where, sampler = TensorStorage(steps(3000)), SliceSampler(slice_len=2)
    sampler.sample(where, 4)
    pickled = pickle.dumps(sampler)
    assert len(pickled) < 3000
    other = pickle.loads(pickled)
    drawn = []
    for one in (sampler, other):
        one._rng = torch.Generator().manual_seed(0)
        drawn.append(one.sample(where, 40)[0][0])
    assert torch.equal(*drawn)


def test_without_replacement_it_is_its_sibling() -> None:
    assert type(SliceSampler(slice_len=2, replacement=False)) is SliceSamplerWithoutReplacement


def test_a_buffer_of_tensordicts_has_the_index_as_a_matrix() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(6), sampler=SliceSampler(slice_len=2), batch_size=4)
    buffer.extend(steps(6))
    batch = buffer.sample()
    assert batch["index"].shape == (4, 1)
    assert torch.equal(batch["index"][:, 0], batch["number"])
    assert batch["next", "truncated"].flatten().tolist() == [False, True] * 2


def test_slices_follow_arguments_that_are_assigned_between_draws() -> None:
    storage = TensorStorage(TensorDict({"episode": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])}, [8]))
    sampler = SliceSampler(slice_len=2, anchor="start")
    assert set(sampler.sample(storage, 40)[0][0][::2].tolist()) == {0, 4}
    sampler.anchor = "end"
    assert set(sampler.sample(storage, 40)[0][0][::2].tolist()) == {2, 6}
    sampler.anchor, sampler.span = "start", (1, 0)
    assert set(sampler.sample(storage, 40)[0][0].tolist()) == {0, 4}  # cut to the step inside
