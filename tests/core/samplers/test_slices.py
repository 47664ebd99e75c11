"""`SliceSampler`: its arguments, what separates trajectories, and the sharp edges of TorchRL's."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict
from waiting import HANG, run_threads

import rbtool
from rbtool.core.buffers.ensemble import ReplayBufferEnsemble
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.datasets.storage import DatasetStorage
from rbtool.core.errors import RbtoolError
from rbtool.core.format.memmap.reader import TedReader
from rbtool.core.kernels import rows as row_kernels
from rbtool.core.kernels.slices import ANCHORS
from rbtool.core.samplers.prioritized import PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement, scaled
from rbtool.core.samplers.streaming_slice import StreamingSliceSampler
from rbtool.core.samplers.trajectories import trajectory_table
from rbtool.core.storages.base import Storage
from rbtool.core.storages.dataset import StepStorage
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.slice_samplers import SliceSamplerTests, cut

DONE = ("next", "done")
EPISODES = [(4, "terminated"), (1, "truncated"), (6, "open"), (2, "both")]
PRIORITIZED = partial(PrioritizedSliceSampler, 60, 0.7, 0.5)
KINDS = pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PRIORITIZED])


class TestSliceSampler(SliceSamplerTests):
    def make(self, **options: Any) -> SliceSampler:
        return SliceSampler(**options)


class TestSliceSamplerWithoutReplacement(SliceSamplerTests):
    replacement = False

    def make(self, **options: Any) -> SliceSamplerWithoutReplacement:
        return SliceSamplerWithoutReplacement(**options)


class TestInOrder(SliceSamplerTests):
    replacement = False

    def make(self, **options: Any) -> SliceSamplerWithoutReplacement:
        return SliceSamplerWithoutReplacement(shuffle=False, **options)


class TestPrioritizedSliceSampler(SliceSamplerTests):
    uniform_over = "step"  # all have the same priority

    def make(self, **options: Any) -> PrioritizedSliceSampler:
        return PrioritizedSliceSampler(24, 0.7, 0.5, **options)


def steps(count: int, length: int = 3, first: int = 0) -> TensorDict:
    """Rows of episodes of `length` steps."""
    number = torch.arange(first, first + count)
    done = ((number + 1) % length == 0).unsqueeze(-1)
    return TensorDict({"number": number, "episode": number // length, "next": {"done": done}}, [count])


def storage(**entries: Any) -> TensorStorage:
    return TensorStorage(TensorDict(entries, [len(next(iter(entries.values())))]))


def of_ids(ids: list[int], **entries: Any) -> TensorStorage:
    return storage(episode=torch.tensor(ids), **entries)


def flags(*ends: int) -> torch.Tensor:
    """Flags of single steps, `[steps, 1]`."""
    return torch.tensor(ends).bool().unsqueeze(-1)


def buffer_of(sampler: Any, capacity: int = 9, **options: Any) -> TensorDictReplayBuffer:
    options = {"batch_size": 4, **options}
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, **options)


def drawn(sampler: SliceSampler, where: Any, size: int = 600) -> set[tuple[int, ...]]:
    """The different slices of one large batch; in several dimensions, the coordinates of their steps one by one."""
    return {sum(part, ()) for part in cut(*sampler.sample(where, size))}


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
        ({"slice_len": 2, "ends": VECTOR[:5], "cache_values": True}, 4, RuntimeError, r"ends .* \[5\], expected \[6\]"),
        ({"slice_len": 2, "trajectories": VECTOR[:5], "cache_values": True}, 4, RuntimeError, r"trajectories .* \[5\]"),
    ],
)
def test_batches_that_cannot_be_drawn_are_refused(options: Any, batch: int, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        SliceSampler(**options).sample(TensorStorage(steps(6)), batch)


def test_signals_of_the_wrong_rank_are_refused() -> None:
    ids = storage(episode=torch.zeros(6, 2).long())
    with pytest.raises(RuntimeError, match=r"'episode' has the shape \[6, 2\], expected one id for each of \[6\]"):
        SliceSampler(slice_len=2).sample(ids, 4)
    lanes = LazyTensorStorage(12, ndim=2)
    lanes.set(range(6), TensorDict({"x": torch.zeros(6, 2)}, [6, 2]))
    with pytest.raises(RuntimeError, match=r"\[6\], expected \[6, 2\]"):
        SliceSampler(slice_len=2, ends=VECTOR, cache_values=True).sample(lanes, 4)


@pytest.mark.parametrize(("options", "shape"), [({"num_slices": 3}, (3, 4)), ({"slice_len": 3}, (4, 3))])
def test_the_number_of_slices_and_their_length_follow_from_each_other(options: Any, shape: tuple[int, int]) -> None:
    (index,), _ = SliceSampler(batched=True, **options).sample(of_ids([0] * 20), 12)
    assert index.shape == shape
    assert (index.diff(dim=1) == 1).all()


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        (False, {(0, 1, 2), (1, 2, 3)}),
        ((0, 1), {(0, 1, 2), (1, 2, 3), (2, 3)}),
        ((1, False), {(0, 1), (0, 1, 2), (1, 2, 3)}),
        (1, {(0, 1), (0, 1, 2), (1, 2, 3), (2, 3)}),
        ((False, True), {(0, 1, 2), (1, 2, 3), (2, 3), (3,)}),
        (True, {(0,), (0, 1), (0, 1, 2), (1, 2, 3), (2, 3), (3,)}),
    ],
)
def test_slices_hang_over_by_the_span(span: Any, expected: set[tuple[int, ...]]) -> None:
    assert drawn(SliceSampler(slice_len=3, span=span), of_ids([0] * 4), 900) == expected


def test_slices_follow_arguments_that_are_assigned_between_draws() -> None:
    where, sampler = of_ids([0] * 4 + [1] * 4), SliceSampler(slice_len=2, anchor="start")
    assert drawn(sampler, where) == {(0, 1), (4, 5)}
    sampler.anchor = "end"
    assert drawn(sampler, where) == {(2, 3), (6, 7)}
    sampler.anchor, sampler.span = "start", (1, 0)
    assert drawn(sampler, where) == {(0,), (4,)}  # cut to the step inside


@each("kind", [SliceSampler, SliceSamplerWithoutReplacement])
@each(
    "given",
    [
        {"traj_key": "episode", "truncated_key": "cut"},
        {"traj_key": ("collector", "traj_ids"), "truncated_key": None},
        {"end_key": ("next", "done")},
        {"end_keys": ["done", ("next", "truncated")]},
    ],
)
def test_keys_are_returned_as_they_were_given(kind: Any, given: dict[str, Any]) -> None:
    sampler = kind(slice_len=2, **given)
    expected = {"end_key": None if "end_keys" in given else DONE, "truncated_key": ("next", "truncated"), **given}
    for name in ("traj_key", "end_key", "end_keys", "truncated_key"):
        assert getattr(sampler, name) == expected.get(name)
    assert SliceSampler(slice_len=1, ends=VECTOR, cache_values=True).end_key is None


@pytest.mark.parametrize(
    ("options", "entries", "found"),
    [
        ({}, {"episode": torch.zeros(4)}, "episode"),
        ({}, {"collector": {"traj_ids": torch.zeros(4)}, "episode": torch.zeros(4)}, ("collector", "traj_ids")),
        ({}, {"next": {"done": torch.ones(4, 1).bool()}}, None),
        ({"traj_key": "id"}, {"id": torch.zeros(4), "episode": torch.zeros(4)}, "id"),
    ],
)
def test_the_entry_that_separates_trajectories_is_known_after_a_draw(options: Any, entries: Any, found: Any) -> None:
    sampler = SliceSampler(slice_len=1, **options)
    assert (sampler.traj_key, sampler.end_key) == (options.get("traj_key"), DONE)
    sampler.sample(TensorStorage(TensorDict(entries, [4])), 2)
    assert (sampler.traj_key, sampler.end_key, pickle.loads(pickle.dumps(sampler)).end_key) == (found, DONE, DONE)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 1000, 2**31 + 1, 2**53 - 1, 2**53])
def test_the_largest_fraction_chooses_the_last_number(size: int) -> None:
    assert scaled(np.array([0.0, np.nextafter(1.0, 0.0)]), size).tolist() == [0, size - 1]


# Signals -----------------------------------------------------------------------------------------------


def test_the_first_signal_that_is_stored_separates_trajectories() -> None:
    data = TensorDict(
        {
            "collector": {"traj_ids": torch.tensor([0, 0, 1, 1, 2, 2])},
            "episode": torch.tensor([0, 1, 1, 2, 2, 3]),
            "next": {"done": flags(1, 1, 0, 1, 1, 1)},
        },
        [6],
    )
    for keys, expected in [
        ((), {(0, 1), (2, 3), (4, 5)}),
        (("collector",), {(1, 2), (3, 4)}),
        (("collector", "episode"), {(2, 3)}),
    ]:
        assert drawn(SliceSampler(slice_len=2), TensorStorage(data.exclude(*keys))) == expected


def test_any_of_several_flags_ends_a_trajectory_and_missing_ones_are_ignored() -> None:
    both = storage(a=flags(0, 1, 0, 0, 0, 1), b=flags(0, 0, 0, 1, 0, 0))
    assert drawn(SliceSampler(slice_len=2, end_keys=["a", "b"]), both) == {(0, 1), (2, 3), (4, 5)}
    some = drawn(SliceSampler(slice_len=2, end_keys=["nowhere", "a"]), both)
    assert some == {(0, 1), (2, 3), (3, 4), (4, 5)}


def test_the_flag_of_one_agent_ends_the_trajectory() -> None:
    done = torch.zeros(6, 3, 1, dtype=torch.bool)
    done[1, 2] = True
    agents = TensorStorage(TensorDict({"next": {"done": done}}, [6]))
    assert drawn(SliceSampler(slice_len=2), agents) == {(0, 1), (2, 3), (3, 4), (4, 5)}


@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PRIORITIZED, StreamingSliceSampler])
def test_flags_in_a_lazy_stack_of_agents_are_found(kind: Any) -> None:
    done = torch.zeros(6, 1, dtype=torch.bool)
    agents = [TensorDict({"x": torch.ones(6, size), "next": {"done": done.clone()}}, [6]) for size in (2, 3)]
    agents[1]["next", "done"][1] = True
    buffer = buffer_of(kind(slice_len=2), 20)
    for _ in range(3):  # the table of trajectories is continued after a first draw
        rows = buffer.extend(LazyStackedTensorDict(*agents, stack_dim=1))
        batch = buffer.sample()
        pairs = batch["index"][:, 0].reshape(-1, 2)
        assert (pairs.diff() == 1).all()
        assert (pairs[:, 0] % 6 != 1).all()
        assert batch["next", "done"].shape == (4, 2, 1)
        assert batch["next", "truncated"][1::2].all()
    assert rows.tolist() == list(range(12, 18))


@pytest.mark.parametrize("make", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_any_storage_of_tensordicts_has_slices(make: Any) -> None:
    where = make(9)
    ReplayBuffer(storage=where).extend(list(steps(9).unbind(0)))
    assert drawn(SliceSampler(slice_len=2), where) == {(0, 1), (1, 2), (3, 4), (4, 5), (6, 7), (7, 8)}


@pytest.mark.parametrize(
    ("name", "signal"),
    [("ends", [[0, 1], [1, 0], [0, 0], [1, 1]]), ("trajectories", [[0, 0], [0, 1], [1, 1], [1, 1]])],
)
def test_given_signals_of_two_dimensions_separate_the_trajectories_of_each_lane(name: str, signal: Any) -> None:
    lanes = LazyTensorStorage(8, ndim=2)
    lanes.set(range(4), TensorDict({"x": torch.zeros(4, 2)}, [4, 2]))
    given = torch.tensor(signal) if name == "trajectories" else torch.tensor(signal).bool()
    sampler = SliceSampler(slice_len=2, cache_values=True, **{name: given})
    assert drawn(sampler, lanes) == {(0, 0, 1, 0), (2, 0, 3, 0), (1, 1, 2, 1), (2, 1, 3, 1)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"traj_key": "epsiode"}, r"'epsiode' is not in .* separated by 'next\.done'; did you mean 'episode'"),
        ({"end_key": "nowhere"}, "'nowhere' is not in .* separated by 'episode'"),
        ({"end_keys": ["nowhere", ("no", "where")]}, r"'nowhere' or 'no\.where' is not in"),
    ],
)
def test_a_missing_signal_is_replaced_by_the_other_kind_with_one_warning(options: dict[str, Any], words: str) -> None:
    where = of_ids([0, 0, 1, 1], next=TensorDict({"done": flags(0, 1, 0, 1)}, [4]))
    sampler = SliceSampler(slice_len=2, **options)
    with pytest.warns(UserWarning, match=words):
        sampler.sample(where, 2)
    where.set([0], where[[0]], set_cursor=False)  # the table is made again, and nothing is announced twice
    assert drawn(sampler, where) == {(0, 1), (2, 3)}


def test_a_storage_without_a_signal_is_a_key_error_that_names_the_keys() -> None:
    with pytest.raises(KeyError, match=r"collector\.traj_ids, episode, a, b\.c"):
        SliceSampler(slice_len=2, end_keys=["a", ("b", "c")]).sample(storage(x=torch.zeros(4)), 4)


def test_objects_without_entries_are_refused() -> None:
    where = ListStorage(4)
    where.set(range(2), ["one", "two"])
    with pytest.raises(RuntimeError, match="holds a str"):
        SliceSampler(slice_len=1).sample(where, 2)


def test_cached_values_do_not_outlive_a_write() -> None:
    sampler = SliceSampler(slice_len=2, cache_values=True)
    buffer = ReplayBuffer(storage=TensorStorage(of_ids([0, 0, 1, 1])[:]), sampler=sampler)
    assert drawn(sampler, buffer.storage) == {(0, 1), (2, 3)}
    buffer.storage[1] = TensorDict({"episode": torch.tensor(1)}, [])
    assert drawn(sampler, buffer.storage) == {(1, 2), (2, 3)}
    buffer.set_("episode", torch.zeros(4, dtype=torch.int64))
    assert drawn(sampler, buffer.storage) == {(0, 1), (1, 2), (2, 3)}


# Sharp edges, by their number in the specification -----------------------------------------------------


@pytest.mark.parametrize("name", ["ends", "trajectories"])
def test_edge_03_12_given_signals_stay_through_writes(name: str) -> None:
    signal = torch.tensor([0, 1, 0, 0, 1, 1]).bool() if name == "ends" else torch.tensor([0, 0, 1, 1, 1, 2])
    sampler = SliceSampler(slice_len=2, cache_values=True, **{name: signal})  # type: ignore[arg-type]
    buffer = buffer_of(sampler, 6)
    buffer.extend(steps(6, length=10))
    assert drawn(sampler, buffer.storage) == {(0, 1), (2, 3), (3, 4)}
    buffer.extend(steps(3, length=10))  # the newest row is 2, and the ring does not go on from row 5, an end, to row 0
    assert drawn(sampler, buffer.storage) == {(0, 1), (3, 4)}


def test_edge_03_17_trajectories_of_workers_that_take_turns_are_separated_by_ids() -> None:
    assert drawn(SliceSampler(slice_len=2), of_ids([0, 0, 1, 1, 0, 0, 1])) == {(0, 1), (2, 3), (4, 5)}


def test_edge_03_20_after_a_load_the_newest_row_is_an_end(tmp_path: Path) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), sampler=SliceSampler(slice_len=2, end_key=DONE))
    buffer.extend(steps(6, length=100))
    assert (5, 0) not in drawn(buffer.sampler, buffer.storage)
    buffer.extend(steps(2, length=100, first=6))
    around_the_ring = {(2, 3), (3, 4), (4, 5), (5, 0), (0, 1)}
    assert drawn(buffer.sampler, buffer.storage) == around_the_ring
    buffer.dumps(tmp_path / "saved")
    in_time_order = {(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)}  # a larger ring takes the rows from the oldest on
    for capacity, expected in [(6, around_the_ring), (9, in_time_order)]:
        other = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=SliceSampler(slice_len=2, end_key=DONE))
        other.loads(tmp_path / "saved")
        assert drawn(other.sampler, other.storage) == expected


# Padding and marks -------------------------------------------------------------------------------------


def test_padding_repeats_the_last_real_step_which_is_the_truncated_one() -> None:
    options: dict[str, Any] = {"slice_len": 4, "strict_length": False}
    (index,), info = SliceSampler(pad_output=True, **options).sample(of_ids([0, 0]), 8)
    assert index.tolist() == [0, 1, 1, 1] * 2
    assert info["collector", "mask"].tolist() == [True, True, False, False] * 2
    assert info["next", "truncated"].flatten().tolist() == [False, True, False, False] * 2
    (ragged,), info = SliceSampler(**options).sample(of_ids([0, 0]), 8)  # edge 03-10: slices can be told apart
    assert ragged.tolist() == [0, 1] * 2
    assert info["next", "truncated"].flatten().tolist() == [False, True] * 2


@KINDS
@pytest.mark.parametrize(
    ("options", "ids", "masked"),
    [
        ({"pad_output": True, "strict_length": False}, [0] * 4 + [1] * 2, False),
        ({"pad_output": True, "strict_length": False}, [0] * 4 + [1], True),  # also in a batch without padding
        ({"batched": True}, [0] * 4 + [1] * 2, True),
        ({}, [0] * 4 + [1] * 2, False),
    ],
)
def test_a_batch_has_a_mask_if_any_slice_of_the_storage_may_be_short(
    kind: Any, options: Any, ids: list[int], masked: bool
) -> None:
    sampler, where = kind(slice_len=2, **options), of_ids(ids)
    assert {("collector", "mask") in sampler.sample(where, 2)[1] for _ in range(8)} == {masked}


def test_a_span_may_leave_padding_in_every_batch() -> None:
    sampler = SliceSampler(slice_len=2, span=1, pad_output=True, strict_length=False)
    assert all(("collector", "mask") in sampler.sample(of_ids([0] * 4), 2)[1] for _ in range(8))


def test_marks_are_put_beside_the_truncated_key() -> None:
    where = of_ids([0] * 3, ended=flags(0, 0, 1))
    assert SliceSampler(slice_len=3, truncated_key=None).sample(where, 3)[1] == {}
    _, info = SliceSampler(slice_len=3, truncated_key=("a", "cut")).sample(where, 3)
    assert set(info) == {("a", "cut"), ("a", "done"), ("a", "terminated")}
    _, info = SliceSampler(slice_len=3, truncated_key="cut").sample(where, 3)
    last = [False, False, True]
    marks = {key: value.flatten().tolist() for key, value in info.items()}
    assert marks == {"cut": last, "done": last, "terminated": [False] * 3}


@each("batched", [False, True])
@each("trail", [(), (1,), (2, 1)])
def test_flags_are_as_stored_or_cut_whatever_their_shape(trail: tuple[int, ...], batched: bool) -> None:
    done, terminated = torch.zeros(2, 6, *trail, dtype=torch.bool)
    done[1], terminated[1] = True, True
    where = of_ids([0] * 6, next=TensorDict({"done": done, "terminated": terminated}, [6]))
    _, info = SliceSampler(slice_len=6, batched=batched, traj_key="episode").sample(where, 6)
    flat = {key: value.reshape(6, -1) for key, value in info.items() if key != ("collector", "mask")}
    for name, steps in {"truncated": [5], "done": [1, 5], "terminated": [1]}.items():
        value = flat["next", name]
        assert value.dtype == torch.bool
        assert value.all(1).nonzero().flatten().tolist() == value.any(1).nonzero().flatten().tolist() == steps
    assert info["next", "done"].shape == ((1, 6) if batched else (6,)) + (trail or (1,))


def test_the_first_step_of_every_slice_is_an_initial_one() -> None:
    initial = torch.arange(6) == 3
    for stored in (initial, initial.unsqueeze(-1)):
        (index,), info = SliceSampler(slice_len=3).sample(of_ids([0] * 6, is_init=stored), 30)
        assert info["is_init"].shape == (30, *stored.shape[1:])
        assert torch.equal(info["is_init"].flatten(), (torch.arange(30) % 3 == 0) | (index == 3))


@each("kind", [SliceSampler, SliceSamplerWithoutReplacement, PRIORITIZED])
@each("key", ["is_init", ("deep", "first"), "unknown", None])
@each("ensemble", [False, True])
def test_first_steps_are_marked_under_a_key_of_choice(kind: Any, key: Any, ensemble: bool) -> None:
    rows = steps(9).set("is_init", torch.zeros(9, 1, dtype=torch.bool)).set(("deep", "first"), torch.zeros(9).bool())
    members = [buffer_of(kind(slice_len=2, init_key=key)) for _ in range(1 + ensemble)]
    for member in members:
        member.extend(rows)
    source = ReplayBufferEnsemble(*members, batch_size=8, sample_from_all=True) if ensemble else members[0]
    batch = source.sample().reshape(-1)
    first = torch.tensor([True, False] * (len(batch) // 2))
    for entry in ("is_init", ("deep", "first")):
        assert torch.equal(batch[entry].flatten(), first if entry == key else torch.zeros_like(first))
    assert members[0].sampler.init_key == key
    assert batch.get("unknown", None) is None


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
    indices = []
    for one in (sampler, pickle.loads(pickled)):
        one._rng = torch.Generator().manual_seed(0)
        indices.append(one.sample(where, 40)[0][0])
    assert torch.equal(*indices)


# Datasets ----------------------------------------------------------------------------------------------


class Reads(StepStorage):
    """A storage on disk that knows which leaves were read."""

    def __init__(self, path: Path) -> None:
        super().__init__(TedReader(path))
        self.read: list[Any] = []

    def _tensors(self, fields: Any, numbers: Any) -> Any:
        wanted = list(fields)
        self.read += [(field.key, len(numbers)) for field in wanted]
        return super()._tensors(wanted, numbers)


def test_rows_on_disk_are_read_only_where_slices_lie(walks: Path) -> None:
    where = Reads(walks)
    found = drawn(SliceSampler(slice_len=2), where)
    assert {row for pair in found for row in pair} == {*range(4), *range(5, 13)}
    trajectory_table(where, SliceSampler(slice_len=2, end_key=DONE)._boundaries.source(where)).refresh()
    assert {key for key, rows in where.read[-3:]} >= {DONE}
    assert all(key == DONE for key, rows in where.read if rows == 13)


@pytest.mark.parametrize("options", [{}, {"end_key": DONE}, {"traj_key": "episode"}, {"weight": "step"}])
def test_slices_of_datasets_lie_in_one_episode_even_if_it_is_open(walks: Path, options: Any) -> None:
    sampler = SliceSampler(slice_len=6, strict_length=False, **options)
    buffer = load_dataset(walks, batch_size=240, sampler=sampler, seed=0)
    assert set(buffer.sample()["episode"].tolist()) == {0, 1, 2, 3}
    assert drawn(sampler, buffer.storage) == {(0, 1, 2, 3), (4,), tuple(range(5, 11)), (11, 12)}


def test_episodes_of_a_dataset_are_not_those_of_rows_written_over_it(walks: Path) -> None:
    by_flag, by_id = SliceSampler(slice_len=2, end_key=DONE), SliceSampler(slice_len=2)
    buffer = ReplayBuffer(storage=DatasetStorage(walks))
    rows = buffer[:].clone()
    rows["next", "done"][:] = True
    rows["episode"][:] = 9
    untouched = {(5, 6), (6, 7), (7, 8), (8, 9), (9, 10), (11, 12)}
    assert drawn(by_flag, buffer.storage) == drawn(by_id, buffer.storage) == untouched | {(0, 1), (1, 2), (2, 3)}
    buffer.extend(rows[:7])
    assert drawn(by_flag, buffer.storage) == untouched - {(5, 6), (6, 7)}
    assert drawn(by_id, buffer.storage) == untouched - {(6, 7)} | {(row, row + 1) for row in range(6)}


def test_whole_trajectories_have_no_slices(walks: Path) -> None:
    buffer = load_dataset(walks, batch_size=4, sampler=SliceSampler(slice_len=2), split_trajs=True)
    with pytest.raises(RuntimeError, match="'episode' has the shape"):
        buffer.sample()


# Buffers -----------------------------------------------------------------------------------------------


def of_three(kind: type[ReplayBuffer], **options: Any) -> Any:
    """A buffer of three episodes of ten steps, with a seed, whose batches are two slices of three steps."""
    generator = torch.Generator().manual_seed(0)
    sampler = SliceSampler(slice_len=3)
    buffer = kind(storage=LazyTensorStorage(30), sampler=sampler, batch_size=6, generator=generator, **options)
    buffer.extend(steps(30, 10).exclude("next"))
    return buffer


def test_marks_are_beside_the_batch_of_a_plain_buffer_and_in_that_of_a_tensordict_buffer() -> None:
    batch, info = of_three(ReplayBuffer).sample(return_info=True)
    assert ("next", "truncated") not in batch.keys(True)
    double = of_three(TensorDictReplayBuffer, transform=lambda batch: batch.set("twice", batch["number"] * 2))
    within = double.sample()
    for name in ("truncated", "done", "terminated"):
        assert torch.equal(info["next", name], within["next", name])
    assert torch.equal(batch["number"], within["number"])
    assert torch.equal(within["twice"], within["number"] * 2)
    assert within["index"].shape == (6, 1)
    assert torch.equal(within["index"][:, 0], within["number"])


def test_slices_are_the_same_with_prefetch() -> None:
    plain, ahead = of_three(TensorDictReplayBuffer), of_three(TensorDictReplayBuffer, prefetch=3)
    for _ in range(10):
        assert torch.equal(plain.sample()["number"], ahead.sample()["number"])


def test_threads_that_sample_from_one_storage_at_once_share_a_table() -> None:
    rows = steps(200_000, 7).exclude("next")
    for _ in range(10):
        where, barrier = TensorStorage(rows), threading.Barrier(4)
        samplers = [SliceSampler(slice_len=2) for _ in range(4)]

        def begin(sampler: SliceSampler, where: Storage = where, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(HANG)
            sampler.sample(where, 8)

        run_threads(*(partial(begin, sampler) for sampler in samplers))
        table = samplers[0].trajectories(where)
        assert table.count == -(-len(rows) // 7)
        assert all(sampler.trajectories(where) is table for sampler in samplers)


def sample_and_write(buffer: Any, queue: Any) -> None:
    queue.put(buffer.sample()["number"].tolist())
    buffer.extend(steps(30, 30, first=30).exclude("next"))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_other_processes_sample_and_what_they_write_is_seen(method: str) -> None:
    context = multiprocessing.get_context(method)
    buffer, queue = of_three(TensorDictReplayBuffer, shared=True), context.Queue()
    buffer.sample()
    process = context.Process(target=sample_and_write, args=(buffer, queue))
    process.start()
    found = torch.tensor(queue.get(timeout=HANG)).view(2, 3)
    process.join(HANG)
    assert process.exitcode == 0
    assert (found // 10 == found[:, :1] // 10).all()
    assert (found.diff(dim=1) == 1).all()
    assert buffer.sampler.trajectories(buffer.storage).count == 1
    assert buffer.sample()["number"].min() >= 30


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")


@pytest.mark.parametrize("generator", ["cpu", pytest.param("cuda", marks=cuda)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_batches_are_on_the_device_of_the_rows(device: str, generator: str) -> None:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(30, device=device),
        sampler=SliceSampler(slice_len=3),
        batch_size=6,
        generator=torch.Generator(generator).manual_seed(0),
    )
    buffer.extend(steps(40, 10).exclude("next"))
    batch = buffer.sample()
    assert {value.device.type for value in batch.values(True, True)} == {device}
    assert (batch["number"].view(2, 3).diff(dim=1) == 1).all()
    assert (batch["episode"].view(2, 3).diff(dim=1) == 0).all()


def test_trajectories_of_many_lanes_are_drawn_by_episode_or_by_step() -> None:
    ids = torch.zeros(400, 50, dtype=torch.int64)
    ids[:, 7] = torch.arange(400)
    where = TensorStorage(TensorDict({"episode": ids}, [400, 50]), ndim=2)
    index, _ = SliceSampler(slice_len=1, strict_length=False).sample(where, 4000)
    assert (index[1] == 7).float().mean() == pytest.approx(400 / 449, abs=0.05)
    index, _ = SliceSampler(slice_len=1, weight="step").sample(where, 4000)
    assert (index[1] == 7).float().mean() == pytest.approx(1 / 50, abs=0.02)


# The compiled call -------------------------------------------------------------------------------------

CAPACITY = 40


def written(lengths: list[int], rows: int) -> LazyTensorStorage:
    """A ring to which so many rows of episodes of these lengths, again and again, are written one after the other."""
    ids = torch.arange(len(lengths) * CAPACITY).repeat_interleave(torch.tensor(lengths * CAPACITY))[:rows]
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY))
    for part in TensorDict({"episode": ids}, [rows]).split(7):
        buffer.extend(part)
    return buffer.storage


def many_slices(where: LazyTensorStorage, seed: int, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sixty-four slices of three steps."""
    sampler = SliceSampler(slice_len=3, **options)
    sampler.generator = torch.Generator().manual_seed(seed)
    (index,), info = sampler.sample(where, 64 * 3)
    return index, {str(key): value for key, value in info.items()}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("weight", ["episode", "step"])
@given(
    st.lists(st.integers(3, 17), min_size=1, max_size=6),
    st.sampled_from([8, CAPACITY - 1, CAPACITY, CAPACITY + 1, CAPACITY + 19, 3 * CAPACITY]),
    st.integers(0, 2**32),
)
def test_slices_are_the_same_with_and_without_a_compiled_call(
    weight: str, anchor: str, batched: bool, lengths: list[int], rows: int, seed: int
) -> None:
    where, options = written(lengths, rows), {"weight": weight, "anchor": anchor, "batched": batched}
    assert row_kernels.warm()
    index, info = many_slices(where, seed, **options)
    with mock.patch.object(row_kernels, "warm", return_value=False):
        plain, plain_info = many_slices(where, seed, **options)
    assert torch.equal(index, plain)
    assert info.keys() == plain_info.keys()
    assert all(torch.equal(value, plain_info[key]) for key, value in info.items())
    ids = where.get(index.reshape(-1))["episode"].view(-1, 3)
    assert (ids == ids[:, :1]).all()
    assert (index.reshape(-1, 3).diff(dim=1).remainder(CAPACITY) == 1).all()


@pytest.mark.parametrize("weight", ["episode", "step"])
@given(st.integers(0, 2**32))
def test_slices_are_the_same_as_those_that_might_be_cut(weight: str, seed: int) -> None:
    """Without `strict_length` slices are drawn in the way of those that may be shorter; here none is."""
    where = written([5, 8, 7], CAPACITY)
    assert row_kernels.warm()
    index, _ = many_slices(where, seed, weight=weight)
    other, _ = many_slices(where, seed, weight=weight, strict_length=False)
    assert torch.equal(index, other)


def test_a_draw_follows_every_write() -> None:
    """The kept list of trajectories is replaced: rows that were overwritten are not drawn as parts of old episodes."""
    buffer, seen = buffer_of(SliceSampler(slice_len=3), CAPACITY, batch_size=64 * 3), set()
    for number in range(60):
        buffer.extend(TensorDict({"episode": torch.full([5], number)}, [5]))
        ids = buffer.sample()["episode"].view(-1, 3)
        assert (ids == ids[:, :1]).all()
        assert set(ids.unique().tolist()) <= set(range(number - CAPACITY // 5 + 1, number + 1))
        seen |= set(ids.unique().tolist())
    assert seen == set(range(60))


# TorchRL -----------------------------------------------------------------------------------------------


def data_of(library: Any, kind: str, lanes: int, rows: int, capacity: int, seeded: bool, **options: Any) -> Any:
    """A buffer of a library with `rows` steps of episodes, in rings of `capacity` rows, whose sampler has a seed."""
    drawn = torch.Generator().manual_seed(rows)
    ids = torch.repeat_interleave(torch.arange(rows), torch.randint(4, 9, (rows,), generator=drawn))[: rows * lanes]
    ids = torch.stack([ids[lane:].unique_consecutive(return_inverse=True)[1][:rows] for lane in range(lanes)])
    done = torch.cat([ids[:, 1:] != ids[:, :-1], torch.ones(lanes, 1, dtype=torch.bool)], 1).unsqueeze(-1)
    data = TensorDict(
        {"episode": ids, "number": torch.arange(ids.numel()).view_as(ids), "next": {"done": done}}, ids.shape
    )
    buffer = library.TensorDictReplayBuffer(
        storage=library.LazyTensorStorage(capacity * lanes, ndim=2 if lanes > 1 else 1),
        sampler=getattr(library, kind)(**options),
        batch_size=12,
        **({"dim_extend": 1} if lanes > 1 else {}),
    )
    for part in data.split(7, 1):
        buffer.extend(part if lanes > 1 else part[0])
    if seeded:
        buffer.set_rng(torch.Generator().manual_seed(3))
    return buffer


@pytest.mark.peer
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("boundary", [{"traj_key": "episode"}, {"end_key": DONE}])
@pytest.mark.parametrize(("rows", "capacity"), [(60, 100), (60, 60), (131, 60), (97, 50)])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SliceSampler", {"slice_len": 3}),
        ("SliceSampler", {"num_slices": 2}),
        ("SliceSampler", {"slice_len": 6, "strict_length": False}),
        ("SliceSampler", {"slice_len": 6, "strict_length": False, "pad_output": True}),
        ("SliceSamplerWithoutReplacement", {"slice_len": 1}),
        ("SamplerWithoutReplacement", {}),
        ("RandomSampler", {}),
    ],
)
def test_draws_are_those_of_torchrl(
    kind: str, options: Any, lanes: int, rows: int, capacity: int, boundary: Any, seeded: bool
) -> None:
    peer = pytest.importorskip("torchrl.data")
    found = []
    for library in (peer, rbtool):
        buffer = data_of(library, kind, lanes, rows, capacity, seeded, **options, **(boundary if options else {}))
        torch.manual_seed(5)
        found.append([buffer.sample()["number"].flatten().tolist() for _ in range(9)])
    assert found[0] == found[1]


@KINDS
@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_multiplier_of_torchrl_draws_larger_batches(kind: Any, prefetch: int | None) -> None:
    for options in [{"slice_len": 2}, {"num_slices": 2}][: 2 if kind is SliceSampler else 1]:
        sampler = kind(**options)
        buffer = buffer_of(sampler, 60, prefetch=prefetch)
        buffer.extend(steps(60, length=6))
        for multiplier, size in ((3, 12), (None, 4), (1, 4)):
            sampler._batch_size_multiplier = multiplier
            buffer.forget_drawn()
            batch = buffer.sample()
            assert batch.shape == (size,)
            assert (batch["number"].view(-1, sampler.slice_len or size // 2).diff() == 1).all()


def test_ensembles_do_not_draw_at_once_from_samplers_with_a_multiplier() -> None:
    sampler = SliceSampler(slice_len=2)
    assert sampler.whole_slices is not None
    sampler._batch_size_multiplier = 2
    assert sampler.whole_slices is None


def test_a_second_buffer_of_a_full_ring_continues_where_the_first_one_wrote() -> None:
    first = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=3), batch_size=300)
    first.extend(TensorDict({"number": torch.arange(13), "next": {"done": torch.zeros(13, 1).bool()}}, [13]))
    second = ReplayBuffer(storage=first.storage, sampler=SliceSampler(slice_len=3), batch_size=300)
    assert second.writer.cursor == 3
    for buffer in (first, second):
        assert (buffer.sample()["number"].view(-1, 3).diff() == 1).all()


@pytest.mark.parametrize("make", [SliceSampler, SliceSamplerWithoutReplacement])
def test_ids_that_are_added_later_separate_trajectories(make: Any) -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=make(slice_len=3), batch_size=30)
    buffer.extend(TensorDict({"next": {"done": torch.zeros(10, 1).bool()}}, [10]))
    buffer.sample()
    buffer["episode"] = torch.arange(10) // 5
    for _ in range(4):
        assert (buffer.sample()["episode"].view(-1, 3).diff() == 0).all()
