"""Buffers: how they are made, written and read, and what they refuse."""

from __future__ import annotations

import inspect
import io
import pickle
import shutil
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

import rbtool
from rbtool import ConsumingSampler, FormatError
from rbtool.core.buffers.ensemble import ReplayBufferEnsemble
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.errors import MissingKeyError, SchemaError, UsageError
from rbtool.core.loading.torch_dataset import torch_dataset
from rbtool.core.samplers.base import Sampler
from rbtool.core.samplers.prioritized import PrioritizedSampler, PrioritizedSliceSampler
from rbtool.core.samplers.prompt_groups import PromptGroupSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.staleness import StalenessAwareSampler
from rbtool.core.samplers.stream import StreamSampler, StreamSliceSampler
from rbtool.core.samplers.streaming_slice import StreamingSliceSampler
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.buffers import CONTENTS, LANES, ROWS, BufferTests, make_class, moved
from rbtool.core.transforms.base import Compose
from rbtool.core.transforms.keyed import ExcludeTransform, Transform
from rbtool.core.writers.base import ImmutableDatasetWriter
from rbtool.core.writers.max_value import TensorDictMaxValueWriter
from rbtool.core.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter

# Arguments and parts ------------------------------------------------------------------------------


def test_defaults() -> None:
    buffer = ReplayBuffer()
    assert (type(buffer.storage), buffer.storage.max_size) == (ListStorage, 1_000)
    assert (type(buffer.sampler), type(buffer.writer)) == (RandomSampler, RoundRobinWriter)
    assert (len(buffer.transform), buffer.batch_size, buffer.dim_extend, buffer.shared) == (0, None, 0, False)
    assert type(TensorDictReplayBuffer().writer) is TensorDictRoundRobinWriter
    assert {"storage", "sampler", "batch_size"} < set(inspect.signature(ReplayBuffer).parameters)


def test_newer_arguments_take_values_that_ask_for_nothing() -> None:
    nothing: dict[str, Any] = {"consume_after_n_samples": None, "sample_unit": None, "use_ray_service": False}
    nothing |= {"transport": "direct", "transport_options": {}, "service_backend_options": {}}
    assert not len(TensorDictReplayBuffer(storage=LazyTensorStorage(8), service_backend="direct", **nothing))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"storage": 3}, TypeError),
        ({"storage": lambda: 3}, TypeError),
        ({"sampler": "random"}, TypeError),
        ({"writer": RandomSampler()}, TypeError),
        ({"transform": 3}, RuntimeError),
        ({"transform": Compose(), "transform_factory": Compose}, TypeError),
        ({"prefetch": 2}, ValueError),
        ({"prefetch": -1, "batch_size": 2}, ValueError),
        ({"prefetch": 2, "batch_size": 2, "shared": True}, ValueError),
        ({"batch_size": 0}, ValueError),
        ({"dim_extend": -1}, ValueError),
        ({"dim_extend": 1}, ValueError),
        ({"sampler": SamplerWithoutReplacement(drop_last=True)}, ValueError),
        ({"consume_after_n_samples": True}, TypeError),
        ({"consume_after_n_samples": 1.0}, TypeError),
        ({"consume_after_n_samples": 0}, ValueError),
        ({"consume_after_n_samples": 1, "sampler": SliceSampler(slice_len=1)}, ValueError),
        ({"consume_after_n_samples": 1, "sampler": ConsumingSampler(3)}, ValueError),
        ({"consume_after_n_samples": 1, "batch_size": 2, "prefetch": 2}, ValueError),
        ({"consume_after_n_samples": 1, "shared": True}, ValueError),
        ({"consume_after_n_samples": 1, "storage": LazyTensorStorage(8, ndim=2)}, ValueError),
        ({"consume_after_n_samples": 1, "writer": TensorDictMaxValueWriter(rank_key="a")}, TypeError),
        ({"consume_after_n_samples": 1, "writer": type("W", (RoundRobinWriter,), {"write_at": None})()}, TypeError),
    ],
)
def test_unusable_arguments_are_refused(arguments: dict, error: type[Exception]) -> None:
    with pytest.raises(error):
        ReplayBuffer(**arguments)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda word: ReplayBuffer(shared=word), "shared"),
        (lambda word: ReplayBuffer(pin_memory=word), "pin_memory"),
        (lambda word: ReplayBuffer().dumps("nowhere", background=word), "background"),
        (lambda word: ReplayBuffer().loads("nowhere", verify=word), "verify"),
        (lambda word: ReplayBuffer(delayed_init=word), "delayed_init"),
        (lambda word: ReplayBuffer(compilable=word), "compilable"),
        (lambda word: ReplayBuffer().append_transform(abs, invert=word), "invert"),
        (lambda word: LazyTensorStorage(4, compilable=word), "compilable"),
        (lambda word: LazyTensorStorage(4, shared_init=word), "shared_init"),
        (lambda word: LazyMemmapStorage(4, existsok=word), "existsok"),
        (lambda word: LazyTensorStorage(4).loads("nowhere", verify=word), "verify"),
        (lambda word: RoundRobinWriter(track_generations=word), "track_generations"),
        (lambda word: ExcludeTransform("a", inverse=word), "inverse"),
        (lambda word: ReplayBufferEnsemble(ReplayBuffer(), sample_from_all=word), "sample_from_all"),
        (lambda word: TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, sync=word), "sync"),
        (lambda word: SliceSampler(slice_len=2, batched=word), "batched"),
        (lambda word: SliceSampler(slice_len=2, replacement=word), "replacement"),
        (lambda word: PrioritizedSliceSampler(9, 0.6, 0.4, slice_len=2, strict_length=word), "strict_length"),
        (lambda word: SliceSamplerWithoutReplacement(slice_len=2, shuffle=word), "shuffle"),
        (lambda word: SamplerWithoutReplacement(drop_last=word), "drop_last"),
        (lambda word: StreamSampler(shuffle=word), "shuffle"),
        (lambda word: StreamSliceSampler(slice_len=2, pad_output=word), "pad_output"),
        (lambda word: PrioritizedSampler(9, 0.6, 0.4, max_priority_within_buffer=word), "max_priority_within_buffer"),
        (lambda word: load_dataset("nowhere", streaming=word), "streaming"),
        (lambda word: torch_dataset("nowhere", drop_last=word), "drop_last"),
        (lambda word: PromptGroupSampler(num_groups=1, cache_groups=word), "cache_groups"),
    ],
)  # fmt: skip
def test_flags_do_not_take_words(make: Callable[[str], object], name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 'no', expected True or False"):
        make("no")


def test_flags_take_bools_of_numpy_and_one_and_zero() -> None:
    assert SamplerWithoutReplacement(np.True_, shuffle=np.False_).drop_last
    assert SliceSampler(slice_len=2, batched=1, pad_output=0).batched  # type: ignore[arg-type]


def test_dim_extend_is_set_once() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    assert buffer.dim_extend == 1
    with pytest.raises(RuntimeError, match="grows along dimension 1"):
        buffer.extend(torch.arange(4))
    buffer.dim_extend = 0
    with pytest.raises(RuntimeError, match="dim_extend is 0 already"):
        buffer.dim_extend = 1
    assert buffer.extend(torch.arange(12).reshape(4, 3)).shape == (12, 2)
    assert buffer.storage.shape == (4, 3)
    assert (buffer[1].tolist(), buffer[:, 1].tolist(), int(buffer[3, 2])) == ([3, 4, 5], [1, 4, 7, 10], 11)


def test_parts_are_made_when_first_needed() -> None:
    made = []
    buffer = ReplayBuffer(storage=lambda: made.append(1) or LazyTensorStorage(4), delayed_init=True)
    assert (made, buffer.initialized, buffer.stats()["initialized"]) == ([], False, False)
    buffer.extend(torch.arange(3))
    assert (made, buffer.initialized, len(buffer)) == ([1], True, 3)
    late = ReplayBuffer(storage=TensorStorage(torch.arange(3)), transform_factory=lambda: lambda rows: rows + 1)
    assert not late.initialized
    assert late[:].tolist() == [1, 2, 3]


def test_unknown_attributes_are_named() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ReplayBuffer().nothing  # noqa: B018


def test_the_generator_goes_to_all_parts_and_on_to_new_ones() -> None:
    generator = torch.Generator()
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), generator=generator)
    assert buffer.storage.generator is buffer.sampler._rng is buffer.writer._rng is generator
    previous = buffer.set_sampler(SamplerWithoutReplacement())
    assert (buffer.sampler._rng is generator, previous._rng) == (True, None)
    buffer.set_rng(other := torch.Generator())
    assert buffer.storage.generator is buffer.sampler._rng is buffer.writer._rng is other


# The edge: TorchRL goes on writing into the old storage.
def test_set_storage_leaves_a_working_buffer() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2, prefetch=1)
    buffer.extend(torch.arange(6))
    buffer.sample()
    first = buffer.storage
    assert buffer.set_storage(LazyTensorStorage(8)) is first
    assert (len(buffer), buffer.extend(torch.arange(10, 15)).tolist()) == (0, [0, 1, 2, 3, 4])
    assert (buffer[:].tolist(), first[:].tolist()) == ([10, 11, 12, 13, 14], [4, 5, 2, 3])
    assert int(buffer.sample().min()) >= 10
    held = LazyTensorStorage(6)
    held.set(range(2), torch.tensor([7, 8]))
    buffer.set_storage(held)
    buffer.add(torch.tensor(9))
    assert buffer[:].tolist() == [7, 8, 9]
    buffer.set_storage(ListStorage(4))
    buffer.extend([torch.zeros(2), torch.ones(2)])
    assert buffer[:].shape == (2, 2)
    buffer.set_storage(ListStorage(4), collate_fn=len)
    buffer.extend([1, 2, 3])
    assert buffer[:] == 3


def test_set_sampler_starts_an_epoch_of_what_is_there() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), batch_size=2)
    buffer.extend(torch.arange(6))
    previous = buffer.sampler
    assert buffer.set_sampler(SamplerWithoutReplacement()) is previous
    assert sorted(torch.cat(list(buffer)).tolist()) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(TypeError):
        buffer.set_sampler(RoundRobinWriter())


def test_set_writer_continues_at_the_cursor_of_the_old_one() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(torch.arange(6))
    previous = buffer.writer
    assert buffer.set_writer(RoundRobinWriter(track_generations=True)) is previous
    buffer.extend(torch.tensor([10, 11]))
    assert (buffer[:].tolist(), buffer.write_count) == ([4, 5, 10, 11], 8)


def test_a_buffer_is_freed_with_its_last_reference() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2, prefetch=2)
    buffer.extend(torch.arange(4))
    buffer.sample()
    futures = [future for _, future in buffer._prefetcher._queue]
    wait(futures)
    gone = weakref.ref(buffer)
    del buffer, futures
    assert gone() is None


def test_repr_names_the_parts() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    buffer.extend(TensorDict({"a": torch.zeros(3)}, [3]))
    assert repr(buffer.storage) == "LazyTensorStorage(len=3, max_size=4)"
    assert repr(buffer).startswith("TensorDictReplayBuffer(storage=LazyTensorStorage(len=3, max_size=4), sampler=")
    assert repr(ReplayBuffer(delayed_init=True)) == "ReplayBuffer(initialized=False)"


# Writing and editing ------------------------------------------------------------------------------


def steps(count: int = 4, start: int = 0) -> TensorDict:
    rows = torch.arange(start, start + count)
    return TensorDict({"a": rows, "next": {"b": rows.float().unsqueeze(-1).expand(count, 2).clone()}}, [count])


def filled(**arguments: object) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), **arguments)
    buffer.extend(steps())
    return buffer


def state(buffer: ReplayBuffer) -> tuple[object, ...]:
    return buffer["a"].tolist(), buffer["next", "b"].tolist(), len(buffer), buffer.write_count, buffer.writer._cursor


# What counts as a batch ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (torch.zeros(3, 2), 3),
        (steps(3), 3),
        ([{"a": torch.zeros(2)}, {"a": torch.ones(2)}], 2),
        ((torch.zeros(3), torch.zeros(3, 2)), 3),
        ([torch.zeros(3), torch.ones(3)], 2),
        ({"a": {"b": torch.zeros(3), "c": [torch.zeros(3, 2), (torch.ones(3, 10),)]}}, 3),
    ],
)
def test_batches_of_every_kind_are_counted(data: object, length: int) -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10))
    assert buffer.extend(data).tolist() == list(range(length))
    assert len(buffer) == length


# The edge: leaves of different lengths surface as an error of broadcasting.
def test_leaves_of_different_lengths_are_named() -> None:
    with pytest.raises(SchemaError, match=r"a has 3, b\.0 has 2"):
        ReplayBuffer(storage=LazyTensorStorage(5)).extend({"a": torch.zeros(3), "b": [torch.zeros(2)]})


@pytest.mark.parametrize(
    ("data", "error"),
    [([], RuntimeError), (steps(0), IndexError), (iter([1]), TypeError), (torch.tensor(1), TypeError)],
)
def test_other_objects_than_batches_are_refused(data: object, error: type[Exception]) -> None:
    buffer = filled()
    before = state(buffer)
    with pytest.raises(error):
        buffer.extend(data)
    assert state(buffer) == before


# The edge: TorchRL puts "index" into the caller's tensordict.
@pytest.mark.parametrize("transform", [None, Transform()])
def test_the_callers_data_is_not_changed(transform: Transform | None) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), transform=transform)
    data, one = steps(), steps()[0]
    buffer.extend(data.lock_())
    buffer.add(one.lock_())
    assert (set(data.keys()), set(one.keys()), one.batch_size) == ({"a", "next"}, {"a", "next"}, ())
    assert buffer["index"].tolist() == [0, 1, 2, 3, 4]


def test_a_batch_is_not_added_as_one_element_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"batch size \[4\] is added as one element"):
        ReplayBuffer(storage=LazyTensorStorage(6)).add(steps())
    monkeypatch.setenv("RL_WARNINGS", "0")
    with warnings.catch_warnings(action="error"):
        ReplayBuffer(storage=LazyTensorStorage(6)).add(steps())


# Replacing -------------------------------------------------------------------------------------------


def test_write_all() -> None:
    buffer = filled()
    buffer.write_all(steps(2, start=10))
    assert (buffer["a"].tolist(), len(buffer), buffer.write_count) == ([10, 11, 2, 3], 4, 4)
    buffer.write_all(steps(4, start=20), end=4)
    assert buffer["a"].tolist() == [20, 21, 22, 23]
    with pytest.raises(RuntimeError):
        buffer.write_all(steps(3), end=2)


def test_elements_are_set_by_number_mask_list_and_key() -> None:
    buffer = filled()
    buffer[-1] = steps(1, start=9)[0]
    buffer[torch.tensor([True, False, False, False])] = steps(1, start=7)
    buffer[[2, 1]] = steps(2, start=5)
    assert buffer["a"].tolist() == [7, 6, 5, 9]
    buffer["a"] = torch.arange(4)
    buffer["next", "b"] = torch.ones(4, 2)
    assert (buffer["a"].tolist(), float(buffer["next", "b"].sum())) == ([0, 1, 2, 3], 8)
    with pytest.raises(IndexError, match="there are 4"):
        buffer[:6] = steps(6)


def test_elements_are_set_in_the_layout_of_the_user() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    buffer.extend(torch.arange(12).reshape(3, 4))
    buffer[1] = torch.full((4,), -1)
    buffer[:, 0] = torch.tensor([-2, -3, -4])
    buffer[2, 3] = torch.tensor(-5)
    assert buffer[:].tolist() == [[-2, 1, 2, 3], [-3, -1, -1, -1], [-4, 9, 10, -5]]
    with pytest.raises(IndexError):
        buffer[3] = torch.zeros(4, dtype=torch.int64)


def test_entries_are_set_in_the_layout_of_the_user() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    buffer.extend(TensorDict({"a": torch.arange(12).reshape(3, 4)}, [3, 4]))
    buffer.set_at_("a", torch.tensor([-1, -2, -3, -4]), 1)
    assert buffer["a"].tolist() == [[0, 1, 2, 3], [-1, -2, -3, -4], [8, 9, 10, 11]]
    buffer.set_("a", -torch.arange(12).reshape(3, 4))
    assert buffer.storage[:]["a"][:, 2].tolist() == [-8, -9, -10, -11]
    with pytest.raises(SchemaError, match=r"\[4, 3\], expected \[3, 4\]"):
        buffer.set_("a", torch.zeros(4, 3, dtype=torch.int64))


# Editing entries -------------------------------------------------------------------------------------


def test_entries_are_edited_in_place_and_past_transforms() -> None:
    buffer = filled(transform=lambda rows: rows.set("a", rows["a"] + 100))
    before = buffer.storage.log.now.irregular
    assert buffer.set_("a", torch.tensor([4, 3, 2, 1])) is buffer
    assert buffer.set_at_(("next", "b"), torch.full((2, 2), 9.0), [0, 3]) is buffer
    assert buffer.storage.log.now.irregular == before + 2
    assert buffer.storage[:]["a"].tolist() == [4, 3, 2, 1]
    assert buffer["next", "b"][:, 0].tolist() == [9, 1, 2, 9]


def test_update_replaces_several_entries() -> None:
    buffer = filled()
    new = {"a": torch.arange(4) + 10, "next": {"b": torch.zeros(4, 2)}}
    assert buffer.update_(new, keys_to_update=["a"]) is buffer
    assert (buffer["a"].tolist(), float(buffer["next", "b"].sum())) == ([10, 11, 12, 13], 12)
    buffer.update_(TensorDict(new, [4]))
    assert float(buffer["next", "b"].sum()) == 0


WHOLE = torch.arange(4) + 5


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (lambda buffer: buffer.update_({"a": WHOLE, "c": torch.zeros(4)}), MissingKeyError),
        (lambda buffer: buffer.update_({"a": WHOLE, "next": {"b": torch.zeros(4)}}), SchemaError),
        (lambda buffer: buffer.update_({"a": WHOLE.float()}), SchemaError),
        (lambda buffer: buffer.update_({"a": WHOLE[:3]}), SchemaError),
        (lambda buffer: buffer.update_({"next": torch.zeros(4)}), SchemaError),
        (lambda buffer: buffer.set_at_(("next", "b"), torch.zeros(3, 2), [0, 1]), SchemaError),
        (lambda buffer: buffer.set_at_(("next", "b"), torch.zeros(2, 2).double(), [0, 1]), SchemaError),
    ],
)
def test_edits_that_fail_change_nothing(edit: Callable[[ReplayBuffer], object], error: type[Exception]) -> None:
    buffer = filled()
    before = state(buffer)
    with pytest.raises(error):
        edit(buffer)
    assert state(buffer) == before


def test_priorities_are_refused_where_they_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="does not use priorities"):
        filled().update_priority(torch.tensor([0]), torch.tensor([1.0]))
    with pytest.raises(NotImplementedError, match="ReplayBuffer does not know"):
        filled().extend(steps(), update_priority=True)
    with pytest.raises(TypeError, match="cannot be used in a buffer with priorities"):
        PrioritizedReplayBuffer(alpha=0.5, beta=0.5, consume_after_n_samples=1)


def test_empty_may_keep_the_count() -> None:
    buffer = filled()
    buffer.empty(empty_write_count=False)
    assert (len(buffer), buffer.write_count, buffer.writer._cursor) == (0, 4, 0)


# The edge: emptying a dataset raises; it must not have changed anything then.
def test_a_dataset_that_allows_no_writing_stays_as_it_is() -> None:
    buffer = ReplayBuffer(storage=TensorStorage(torch.arange(3)), writer=ImmutableDatasetWriter())
    for act in (buffer.empty, lambda: buffer.extend(torch.arange(2)), lambda: buffer.add(torch.tensor(1))):
        with pytest.raises(RuntimeError, match="doesn't allow writing"):
            act()
    assert (len(buffer), buffer[:].tolist()) == (3, [0, 1, 2])


class Listens(RandomSampler):
    def __init__(self) -> None:
        self.heard: list[tuple[str, object]] = []

    def add(self, index: object) -> None:
        self.heard.append(("add", index))

    def extend(self, index: torch.Tensor) -> None:
        self.heard.append(("extend", index.tolist()))

    def mark_update(self, index: object, *, storage: object = None) -> None:
        self.heard.append(("mark", torch.as_tensor(index).tolist()))


def test_samplers_hear_of_writes() -> None:
    buffer = filled(sampler=Listens())
    buffer.add(steps(1)[0])
    buffer[0] = steps(1)[0]
    new = [("mark", [0, 1, 2, 3]), ("extend", [0, 1, 2, 3]), ("mark", 4), ("add", 4), ("mark", 0)]
    assert buffer.sampler.heard == new
    silent = buffer.set_sampler(RandomSampler())
    buffer.extend(steps(2))
    assert silent.heard == new
    buffer.set_sampler(again := Listens())
    assert again.heard == [("extend", [0, 1, 2, 3, 4, 5])]
    buffer.extend(steps(1))
    assert again.heard[1:] == [("mark", [1]), ("extend", [1])]


# Reading ------------------------------------------------------------------------------------------


def numbers(count: int = 10, **arguments: object) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(count), **arguments)
    buffer.extend(torch.arange(count))
    return buffer


def lanes(**arguments: object) -> ReplayBuffer:
    """Three lanes of four steps, element `10 * lane + step`."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), **arguments)
    buffer.extend(torch.arange(4) + 10 * torch.arange(3).unsqueeze(1))
    return buffer


def test_another_batch_size_wins_and_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = numbers(batch_size=4, prefetch=1)
    with pytest.warns(UserWarning, match="a batch of 3 is drawn, the buffer's batch_size is 4"):
        assert buffer.sample(3).shape == (3,)
    monkeypatch.setenv("RL_WARNINGS", "0")
    assert buffer.sample(3).shape == (3,)
    assert buffer.sample(4).shape == (4,)


def test_a_batch_size_has_to_be_known() -> None:
    buffer = ReplayBuffer(sampler=SliceSampler(slice_len=2))
    buffer.extend([TensorDict({"episode": torch.tensor(0)})] * 2)
    for call in (buffer.sample, buffer.can_sample, lambda: next(iter(buffer))):
        with pytest.raises(RuntimeError, match=r"batch.size"):
            call()
    assert buffer.sample(4).shape == (4,)
    assert buffer.can_sample(4)
    with pytest.raises(RuntimeError, match="not divisible by slice_len=2"):
        buffer.can_sample(3)


def test_info_tells_the_index_and_the_generation() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True))
    buffer.extend(torch.arange(6))
    batch, info = buffer.sample(8, return_info=True)
    assert torch.equal(buffer.storage[info["index"]], batch)
    assert torch.equal(info["index_generation"], (info["index"] < 2).long())


@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_iteration_covers_an_epoch(drop_last: bool, prefetch: int | None) -> None:
    buffer = numbers(sampler=SamplerWithoutReplacement(drop_last=drop_last), batch_size=4, prefetch=prefetch)
    for _ in range(2):
        batches = list(buffer)
        assert [len(batch) for batch in batches] == ([4, 4] if drop_last else [4, 4, 2])
        assert drop_last or sorted(torch.cat(batches).tolist()) == list(range(10))


def test_sample_continues_with_the_next_epoch() -> None:
    buffer = numbers(sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=2)
    assert [len(buffer.sample()) for _ in range(7)] == [4, 4, 2, 4, 4, 2, 4]


# The edge: TorchRL's next() fails on plain tensors, and copies every time.
def test_next_gives_batches_and_none_at_the_end() -> None:
    buffer = numbers(4, sampler=SamplerWithoutReplacement(shuffle=False), batch_size=2)
    found = [buffer.next() for _ in range(6)]
    assert [None if batch is None else batch.tolist() for batch in found] == [[0, 1], [2, 3], None] * 2


def test_next_clears_the_device() -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    buffer.extend(steps())
    assert buffer.sample().device == torch.device("cpu")
    assert buffer.next().device is None


def test_entries_are_read_by_key() -> None:
    data = TensorDict({"a": torch.arange(3), "next": {"b": torch.arange(3) * 2}}, [3])
    buffer = ReplayBuffer(storage=TensorStorage(data))
    assert buffer["a"].tolist() == [0, 1, 2]
    assert buffer["next", "b"].tolist() == buffer["next"]["b"].tolist() == [0, 2, 4]
    tree = ReplayBuffer(storage=TensorStorage({"a": {"b": torch.arange(3)}}))
    assert tree["a", "b"].tolist() == [0, 1, 2]
    for key in ("c", ("_data", "a"), ("a", "c"), ("next", "a")):
        with pytest.raises(MissingKeyError, match="not found"):
            buffer[key]


def test_elements_are_read_by_every_kind_of_index() -> None:
    buffer = numbers()
    assert [int(buffer[index]) for index in (3, -1, np.int64(2), torch.tensor(4), (5,))] == [3, 9, 2, 4, 5]
    assert (buffer[20:].tolist(), buffer[np.array([1, 0])].tolist()) == ([], [1, 0])
    assert buffer[...].tolist() == buffer.read_all_in_order().tolist() == list(range(10))
    assert buffer.read_all_in_order(3).tolist() == [0, 1, 2]
    for index in (-11, np.int64(10), torch.tensor([0, 10])):
        with pytest.raises(IndexError):
            buffer[index]


# The edge: with dim_extend above 0, an int fails in TorchRL.
def test_users_see_their_own_layout() -> None:
    buffer = lanes()
    assert (buffer.storage.shape, buffer[:].shape, len(buffer)) == ((4, 3), (3, 4), 12)
    assert buffer[1].tolist() == [10, 11, 12, 13]
    assert buffer[-1:, 1:3].tolist() == [[21, 22]]
    assert buffer[[2, 0]].tolist() == [[20, 21, 22, 23], [0, 1, 2, 3]]
    assert buffer[buffer[:] > 12].tolist() == [13, 20, 21, 22, 23]
    assert int(buffer[2, 3]) == 23


def test_three_dimensions() -> None:
    data = torch.arange(24).reshape(2, 3, 4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(24, ndim=3))
    index = buffer.extend(data)
    assert (buffer.storage.shape, index.shape) == ((4, 3, 2), (24, 3))
    assert torch.equal(buffer[:], data)
    batch, info = buffer.sample(5, return_info=True)
    assert torch.equal(buffer.storage[info["index"]], batch)


def test_collation_is_left_out_for_one_element() -> None:
    buffer = ReplayBuffer(storage=ListStorage(4), collate_fn=tuple)
    buffer.extend([[1, 2], [3]])
    assert (buffer[0], buffer[:], buffer[[1]]) == ([1, 2], ([1, 2], [3]), ([3],))


class LooksAtRows(RandomSampler):
    """Draws only rows that are even when it looks."""

    def sample(self, storage, batch_size):  # type: ignore[no-untyped-def]
        even = (storage[:] % 2 == 0).nonzero()[:, 0]
        index, info = super().sample(storage, batch_size)
        return even[index % len(even)], info


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_sampler_that_looks_at_rows_gets_those_it_saw(prefetch: int | None) -> None:
    buffer = numbers(sampler=LooksAtRows(), batch_size=4, prefetch=prefetch)
    seen = []
    for _ in range(5):
        seen.append(buffer.sample())
        buffer[:] = buffer[:] + 1
    assert not (torch.cat(seen) % 2).any()


@pytest.mark.parametrize(
    ("storage", "more"),
    [
        (ListStorage(10), {"capacity": 10, "utilization": 0.0}),
        (TensorStorage(torch.arange(4)), {"size": 4, "capacity": 4, "utilization": 1.0}),
        (lambda: ListStorage(10), {}),
        (None, {}),
    ],
)
def test_stats_of_a_buffer_that_is_not_built_yet(storage: Any, more: dict[str, Any]) -> None:
    buffer = ReplayBuffer(storage=storage, delayed_init=True, batch_size=2)
    expected = {"size": 0, "write_count": 0, "prefetch_queue_size": 0, "initialized": False, **more}
    assert (buffer.stats(), buffer.initialized) == (expected, False)


def test_stats_and_torchrls_names_tell_what_is_prefetched() -> None:
    for prefetch, names in ((None, (False, 0)), (3, (True, 3))):
        buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=2, prefetch=prefetch)
        assert (buffer._prefetch, buffer._prefetch_cap) == names
    buffer.extend(torch.arange(6))
    buffer.sample()
    expected = {"size": 6, "write_count": 6, "prefetch_queue_size": 3, "initialized": True}
    assert buffer.stats() == {**expected, "capacity": 8, "utilization": 0.75}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator to copy to")
def test_pinning_without_an_accelerator_warns() -> None:
    buffer = numbers(pin_memory=True, batch_size=2)
    with pytest.warns(UserWarning, match="pin_memory=True has no effect"):
        assert buffer.sample().shape == (2,)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The tensors that are pinned; an accelerator seems to be there, whose memory "meta" stands in for."""
    found: list[torch.Tensor] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: found.append(tensor) or tensor)
    return found


def test_entries_on_a_device_are_not_pinned(pinned: list[torch.Tensor]) -> None:
    there = torch.zeros(8, device="meta")
    rows = {"here": torch.zeros(8), "there": there, "in": {"there": there.clone()}}
    batch = numbers(pin_memory=True, transform=lambda _: TensorDict(rows, [8]), batch_size=8).sample()
    assert [tensor.device.type for tensor in pinned] == ["cpu"]
    assert batch["there"].device.type == batch["in", "there"].device.type == "meta"
    pinned.clear()
    for alone in (lambda _: TensorDict({"there": there}, [8], device="meta"), lambda _: {"list": [there]}):
        numbers(pin_memory=True, transform=alone, batch_size=8).sample()
    assert not pinned


def test_workers_leave_pinning_to_the_loader(pinned: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = numbers(pin_memory=True, batch_size=2)
    buffer.sample()
    assert len(pinned) == 1
    monkeypatch.setattr("rbtool.core.buffers.replay_buffer.get_worker_info", lambda: "a worker")
    buffer.sample()
    assert len(pinned) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_with_entries_on_the_gpu_are_pinned() -> None:
    data = TensorDict({"a": torch.arange(10)}, [10])
    buffer = TensorDictReplayBuffer(
        storage=TensorStorage(data), pin_memory=True, batch_size=2,
        transform=lambda batch: TensorDict({"a": batch["a"], "b": batch["a"].to("cuda")}, batch.batch_size),
    )  # fmt: skip
    batch = buffer.sample()
    assert batch["a"].is_pinned()
    assert torch.equal(batch["b"].cpu(), batch["a"])
    there = TensorDictReplayBuffer(storage=LazyTensorStorage(10, device="cuda"), pin_memory=True, batch_size=2)
    there.extend(data)
    assert there.sample()["a"].is_cuda


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("prefetch", [None, 2])
def test_batches_are_pinned(prefetch: int | None) -> None:
    data = TensorDict({"a": torch.arange(10)}, [10])
    buffer = TensorDictReplayBuffer(storage=TensorStorage(data), pin_memory=True, batch_size=2, prefetch=prefetch)
    for batch in (buffer.sample(), buffer.sample(), buffer[:], buffer[[1]]):
        assert batch["a"].is_pinned()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_info_lies_where_the_storage_is() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, device="cuda"), batch_size=4)
    buffer.extend(torch.arange(10))
    batch, info = buffer.sample(return_info=True)
    assert batch.device.type == info["index"].device.type == "cuda"
    assert torch.equal(batch, info["index"])


# What is refused ----------------------------------------------------------------------------------


def rows(count: int) -> TensorDict:
    return TensorDict({"observation": torch.arange(count)}, [count])


@pytest.fixture
def buffer() -> ReplayBuffer:
    made = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    made.extend(rows(4))
    return made


@pytest.mark.parametrize("size", [2.5, "x", True, 0, -1])
def test_sizes_that_are_no_positive_integers_are_refused(size):
    for kind in (LazyTensorStorage, LazyMemmapStorage, ListStorage, CompressedListStorage):
        with pytest.raises(UsageError):
            kind(size)
    with pytest.raises(UsageError, match="batch_size"):
        ReplayBuffer(storage=LazyTensorStorage(10), batch_size=size)


def test_none_and_meta_tensors_are_not_written(buffer):
    for data, words in ((None, "forget to return"), (rows(2).to("meta"), "meta")):
        with pytest.raises(SchemaError, match=words):
            buffer.extend(data)
        assert (len(buffer), buffer.write_count) == (4, 4)


@pytest.mark.parametrize(
    "damage",
    [
        {"_batch_size": "x"}, {"_batch_size": True}, {"_storage": {"bogus": 1}}, {"_rng": 3},
        {"_prefetch_state": {"a": 1}}, {"_writer": None},
    ],
    ids=lambda damage: next(iter(damage)),
)  # fmt: skip
def test_a_damaged_state_changes_nothing(buffer, damage):
    with pytest.raises((SchemaError, UsageError)):
        buffer.load_state_dict({**buffer.state_dict(), **damage})
    assert (len(buffer), buffer.batch_size, buffer[:]["observation"].tolist()) == (4, 2, [0, 1, 2, 3])
    with pytest.raises(SchemaError, match="_storage"):
        buffer.load_state_dict({"a": 1})


# Parts that do not fit together -------------------------------------------------------------------


def fitting_steps(count: int) -> TensorDict:
    reward = torch.rand(count, 1)
    return TensorDict({"episode": torch.zeros(count).long(), "next": {"reward": reward}}, [count])


@pytest.mark.parametrize("make", [SliceSampler, SliceSamplerWithoutReplacement])
def test_slices_are_refused_where_a_ranking_chooses_the_rows(make: Any) -> None:
    storage, writer = LazyTensorStorage(8), TensorDictMaxValueWriter()
    ranked = TensorDictReplayBuffer(storage=storage, writer=writer)
    sliced = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=make(slice_len=2))
    for refused in (
        lambda: TensorDictReplayBuffer(storage=storage, writer=writer, sampler=make(slice_len=2)),
        lambda: ranked.set_sampler(make(slice_len=2)),
        lambda: sliced.set_writer(TensorDictMaxValueWriter()),
    ):
        with pytest.raises(ValueError, match=f"{make.__name__} needs them in order"):
            refused()
    too_small = PrioritizedSliceSampler(2, 1.0, 1.0, slice_len=2)
    with pytest.raises(ValueError, match="needs them in order"):  # which is said first
        ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), writer=TensorDictMaxValueWriter, sampler=too_small)


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer, PrioritizedReplayBuffer])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"service_backend": "thread"}, "Unsupported service backend 'thread', expected 'direct' or 'ray'"),
        ({"service_backend": 3}, "Unsupported service backend 3, expected"),
        ({"service_backend_options": {"remote_config": {}}}, "service_backend_options is .* in this process"),
        ({"transport": "ray"}, "transport is 'ray', expected 'auto' or 'direct' for a buffer in this process"),
        ({"transport": None}, "transport is None, expected"),
        ({"transport_options": {"timeout": 3}}, "transport_options is {'timeout': 3}, expected None or {}"),
    ],
)
def test_a_buffer_in_this_process_refuses_arguments_of_remote_ones(
    kind: Any, given: dict[str, Any], message: str
) -> None:
    more = {"alpha": 1.0, "beta": 1.0} if kind is PrioritizedReplayBuffer else {}
    with pytest.raises(ValueError, match=message):
        kind(storage=LazyTensorStorage(8), **more, **given)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bogus'"):
        kind(storage=LazyTensorStorage(8), **more, bogus=1)


def test_a_buffer_that_was_shut_down_is_not_started_again_and_can_be_written() -> None:
    buffer: Any = rbtool.RemoteTensorDictReplayBuffer(
        storage=LazyTensorStorage(8), sampler=SamplerWithoutReplacement(), batch_size=2
    )
    buffer.extend(TensorDict({"a": torch.arange(2)}, [2]))
    assert (buffer.start(), buffer.client(), buffer.service_backend) == (buffer, buffer, "direct")
    buffer.next()
    assert buffer.is_alive  # at the end of an epoch, too
    with pytest.raises(AttributeError):
        buffer.service_backend = "ray"
    buffer.shutdown()
    buffer.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        buffer.start()
    buffer.extend(TensorDict({"a": torch.arange(2)}, [2]))
    assert (buffer.is_alive, len(buffer), len(buffer.sample())) == (False, 4, 2)


SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "uniform": RandomSampler,
    "consuming": ConsumingSampler,
    "whole epochs": lambda: SamplerWithoutReplacement(drop_last=True),
    "slices": lambda: SliceSampler(slice_len=4),
    "a number of slices": lambda: SliceSampler(num_slices=2),
    "short slices": lambda: SliceSampler(slice_len=4, strict_length=False),
    "epochs of slices": lambda: SliceSamplerWithoutReplacement(slice_len=4, drop_last=True),
    "new slices": lambda: StreamingSliceSampler(slice_len=4),
    "prioritized": lambda: PrioritizedSampler(14, 1.0, 1.0),
    "prioritized slices": lambda: PrioritizedSliceSampler(14, 1.0, 1.0, slice_len=4),
    "fresh": lambda: StalenessAwareSampler(max_staleness=4),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_buffer_can_sample_if_and_only_if_a_batch_can_be_drawn(kind: str) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(14), sampler=SAMPLERS[kind](), batch_size=8)
    if isinstance(buffer.sampler, StalenessAwareSampler):
        buffer.sampler.consumer_version = 8
    answers = []
    for number in range(14):  # trajectories of 1, 4 and 9 steps
        able = buffer.can_sample()
        assert able is buffer.can_sample(8) is (buffer.sampler.sampleable(buffer.storage, 8) > 0)
        try:
            drawn = len(buffer.sample()) > 0
        except (SchemaError, UsageError):
            drawn = False
        assert able is drawn
        answers.append(able)
        done = torch.tensor([[number in (0, 4)]])
        step = {"policy_version": number, "next": {"done": done}}
        buffer.extend(TensorDict(step, []).expand(1))
    assert (answers[0], answers == sorted(answers), answers[-1]) == (False, True, True)


def test_nothing_can_be_sampled_by_priorities_of_zero() -> None:
    for sampler in (PrioritizedSampler(9, 1.0, 1.0, eps=0), PrioritizedSliceSampler(9, 1.0, 1.0, eps=0, slice_len=2)):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, batch_size=4)
        buffer.extend(TensorDict({"next": {"done": torch.zeros(9, 1, dtype=torch.bool)}}, [9]))
        assert buffer.can_sample()
        buffer.update_priority(torch.arange(9), 0.0)
        assert not buffer.can_sample()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SliceSampler(slice_len=2, end_keys="done"), "end_keys is 'done', expected a list"),
        (lambda: SliceSampler(slice_len=2, end_keys=("next", "done")), r"end_keys is \('next', 'done'\), expected"),
        (lambda: SliceSampler(slice_len=2, end_keys=[]), r"end_keys is \[\], expected a list"),
        (lambda: SliceSampler(slice_len=2, use_gpu="foo"), "use_gpu is 'foo'"),
        (lambda: SliceSampler(slice_len=2, compile="yes"), "compile is 'yes'"),  # type: ignore[arg-type]
        (lambda: PrioritizedSampler(10, 1, 1, device="foo"), "device is 'foo', which is not the name of a device"),
        (lambda: PrioritizedSampler(10, 1, 1, device="meta"), "kept on the CPU or a CUDA device"),
        pytest.param(
            lambda: PrioritizedSampler(10, 1, 1, device="cuda"),
            "this machine has no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
    ],
)
def test_unusable_arguments_of_samplers_are_named(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("place", [slice(3, 6), torch.tensor([5, 3, 4]), 4])
def test_rows_that_are_replaced_keep_their_numbers(place: Any) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    buffer.extend(fitting_steps(8))
    data = fitting_steps(3) if not isinstance(place, int) else fitting_steps(1)[0]
    buffer[place] = data
    assert data.get("index", None) is None
    assert buffer[:]["index"].tolist() == list(range(8))
    assert torch.equal(buffer[place]["next", "reward"], data["next", "reward"])


def test_the_first_element_fixes_the_schema_of_memory_maps() -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=1)
    buffer.add(TensorDict({"image": torch.full((3, 4), 7, dtype=torch.uint8), "label": torch.tensor(5)}))
    assert (buffer[0].batch_size, buffer[:].batch_size, buffer.sample().batch_size) == ((), (1,), (1,))
    assert (buffer[0]["image"] == 7).all()
    assert next(iter(buffer))["label"].tolist() == [5]


def test_preallocated_tensors_are_overwritten_from_the_first_row_on() -> None:
    buffer = ReplayBuffer(storage=TensorStorage(torch.zeros(10, 3)))
    assert buffer.add(torch.ones(3)) == 0
    assert (buffer[0].tolist(), len(buffer)) == ([1.0] * 3, 10)


# Elements of different shapes ---------------------------------------------------------------------


LENGTHS = (2, 3, 4)
KINDS = [ListStorage, LazyStackStorage, CompressedListStorage]


def trajectories() -> LazyStackedTensorDict:
    """Whole trajectories; every step has another action."""
    return lazy_stack([
        TensorDict({"action": torch.arange(100.0 * n, 100.0 * n + n), "td_error": torch.arange(1.0, 1 + n)}, [n])
        for n in LENGTHS
    ])  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefetch", [None, 2])
def test_whole_trajectories_are_written_and_sampled_with_their_numbers(kind: Any, prefetch: int | None) -> None:
    sampler = SamplerWithoutReplacement(shuffle=False)
    buffer = TensorDictReplayBuffer(storage=kind(10), sampler=sampler, batch_size=6, prefetch=prefetch)
    given = trajectories()
    assert [buffer.extend(given).tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert not any("index" in part.keys() for part in given.tensordicts)  # noqa: SIM118  # not a dict
    batch = buffer.sample()
    assert batch.batch_size == (6, -1)
    for number, element in enumerate(batch.unbind(0)):
        assert element["action"].tolist() == given[number % 3]["action"].tolist()
        assert element["index"].tolist() == [number] * LENGTHS[number % 3]


@pytest.mark.parametrize("kind", KINDS)
def test_entries_of_different_shapes_are_written_too(kind: Any) -> None:
    rows = lazy_stack([TensorDict({"image": torch.full((2, n), float(n))}, [2]) for n in LENGTHS], 1)
    buffer = TensorDictReplayBuffer(storage=kind(10), batch_size=5)
    buffer.extend(rows)
    batch = buffer.sample()
    assert batch.batch_size == (5, 3)
    for element in batch.unbind(0):
        assert [part["image"].tolist() for part in element.unbind(0)] == [[float(n)] * n for n in LENGTHS]


@pytest.mark.parametrize("kind", KINDS)
def test_priorities_of_whole_trajectories_are_those_of_all_their_steps(kind: Any) -> None:
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=kind(3), sampler_device="cpu", batch_size=30
    )
    buffer.extend(trajectories())
    weights = [buffer.sampler.state_dict()["_sum_tree"].tolist()]
    batch = buffer.sample()
    for element in batch.tensordicts:
        element["td_error"] = element["td_error"] * 10
    buffer.update_tensordict_priority(batch)
    weights.append(buffer.sampler.state_dict()["_sum_tree"].tolist())
    assert weights[0] == [2, 3, 4]
    assert set(weights[1]) <= {2, 3, 4, 20, 30, 40}
    assert max(weights[1]) >= 20


TENSORDICTS = ("tensordict", "nested")
OF_ROWS = (LazyTensorStorage, LazyMemmapStorage)
OF_ITEMS = (ListStorage, LazyStackStorage, CompressedListStorage)
IN_STEP = {"alpha": 0.7, "beta": 0.5, "sync": True}
OUT_OF_STEP = IN_STEP | {"sync": False}


def suite(
    buffer: type[ReplayBuffer], storage: type, content: str, ndim: int, options: dict[str, Any]
) -> type[BufferTests]:
    size = {"max_size": ROWS * LANES, "ndim": 2} if ndim == 2 else {"max_size": ROWS}

    def made(**arguments: Any) -> ReplayBuffer:
        return buffer(storage=storage(**size), **options, **arguments)

    name = f"Test{buffer.__name__}Of{storage.__name__}{content.title()}{ndim}D"
    name += "" if options.get("sync", True) else "Unsynced"
    return make_class(name, made, content=content, ndim=ndim, one_by_one=storage in OF_ITEMS)


def in_turns(buffer: type[ReplayBuffer], contents: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Each of the contents in each storage of rows, with one dimension and with two in turn."""
    pairs = product(enumerate(OF_ROWS), enumerate(contents))
    return [(buffer, storage, content, 1 + (one + other) % 2, {}) for (one, storage), (other, content) in pairs]


COMBINATIONS = [
    *in_turns(ReplayBuffer, CONTENTS),
    *in_turns(TensorDictReplayBuffer, TENSORDICTS),
    *product((ReplayBuffer,), (ListStorage,), CONTENTS, (1,), ({},)),
    *product((ReplayBuffer,), (CompressedListStorage,), ("tensor", *TENSORDICTS), (1,), ({},)),
    *product((TensorDictReplayBuffer,), OF_ITEMS, TENSORDICTS, (1,), ({},)),
    *product((PrioritizedReplayBuffer,), (LazyTensorStorage,), ("tensor", "tree"), (1, 2), (IN_STEP,)),
    *product((TensorDictPrioritizedReplayBuffer,), (LazyTensorStorage,), ("nested",), (1, 2), (IN_STEP,)),
    (TensorDictPrioritizedReplayBuffer, LazyMemmapStorage, "tensordict", 1, IN_STEP),
    (PrioritizedReplayBuffer, ListStorage, "tree", 1, IN_STEP),
    (PrioritizedReplayBuffer, LazyTensorStorage, "tensor", 1, OUT_OF_STEP),
    (TensorDictPrioritizedReplayBuffer, LazyMemmapStorage, "tensordict", 1, OUT_OF_STEP),
]
RULES = [name for name in dir(BufferTests) if name.startswith("test_")]


@pytest.mark.parametrize("rule", RULES)
@each("kind", [suite(*combination) for combination in COMBINATIONS])
def test_every_buffer_keeps_the_contract(kind: type[BufferTests], rule: str) -> None:
    getattr(kind(), rule)()


CAPACITY = 8
DATA = Path(__file__).parents[2] / "data" / "torchrl_consuming"


def _saved(state: Any) -> bytes:
    torch.save(state, stream := io.BytesIO())
    return stream.getvalue()


def buffer_of(count: int = 0, n: int = 1, capacity: int = CAPACITY, **options: Any) -> ReplayBuffer:
    """A buffer of the numbers up to `count`, which consumes each after `n` samples."""
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
def test_elements_are_consumed_and_their_slots_reused_as_in_the_model(actions: list[Any], n: int, storage: Any) -> None:
    buffer, model, number = buffer_of(n=n, storage=storage(CAPACITY)), Model(n), 0
    for action, count in actions:
        if action == "write":
            values = list(range(number, number + count))
            assert buffer.extend(torch.tensor(values)).tolist() == model.write(values)
            number += count
        elif action == "add":
            assert [buffer.add(torch.tensor(number))] == model.write([number])
            number += 1
        elif action == "update" and model.values:
            slot = count % len(model.values)
            buffer.mark_update(slot)
            model.counts[slot] = 0
            model.free = [free for free in model.free if free != slot]
        elif action == "sample" and model.live:
            draw = buffer.draw(count)
            slots = draw.info["index"].tolist()
            assert len(slots) == len(set(slots)) == min(count, model.live)
            assert buffer.batch_of(draw).tolist() == [model.values[slot] for slot in slots]
            model.sampled(slots)
            assert buffer.sampler.ran_out is (model.live == 0)
        elif action == "sample":
            with pytest.raises(RuntimeError, match="empty storage"):
                buffer.sample()
        assert len(buffer) == model.live
        assert [int(value) for value in buffer.storage] == [model.values[slot] for slot in sorted(model.values)]


def test_consumed_slots_are_written_before_the_cursor_moves() -> None:
    buffer, live = buffer_of(100, capacity=100), torch.ones(100, dtype=torch.bool)
    live[[10, 20]] = False
    consumed = {"_live_mask": live, "_free_indices": torch.tensor([10, 20])}  # in the form of TorchRL
    buffer.sampler.load_state_dict(
        {"max_sample_count": 1, "_sample_count": (~live).long(), "_known_storage_len": 100} | consumed
    )
    assert buffer.extend(torch.arange(13)).tolist() == [10, 20, *range(10), 11]
    assert buffer.writer.cursor == 12


def test_iteration_ends_when_everything_is_consumed() -> None:
    buffer = buffer_of(5, n=2)
    batches = list(buffer)
    assert all(len(batch) == len(batch.unique()) <= 2 for batch in batches)
    assert Counter(torch.cat(batches).tolist()) == dict.fromkeys(range(5), 2)
    assert (list(buffer), len(buffer), buffer[:].tolist()) == ([], 0, [0, 1, 2, 3, 4])


def test_consumed_elements_are_drawn_with_equal_probability() -> None:
    found: Counter[int] = Counter()
    for seed in range(300):
        buffer = buffer_of(8, generator=torch.Generator().manual_seed(seed))
        found.update(buffer.sample().tolist())
    assert all(abs(found[element] - 75) < 5 * 75**0.5 for element in range(8))


@pytest.mark.parametrize("way", ["folder", "state"])
def test_saved_buffers_consume_the_same_elements(way: str, tmp_path: Any) -> None:
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


def test_checkpoints_with_and_without_consumption_are_not_confused(tmp_path: Any) -> None:
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


def test_a_full_ring_is_consumed_in_a_larger_storage(tmp_path: Any) -> None:
    buffer, larger = buffer_of(8), buffer_of(capacity=12)
    buffer.sample(2)
    buffer.extend(torch.tensor([8, 9, 10]))
    left = set(range(11)) - set(buffer.sample(2).tolist())
    moved(buffer, larger, "folder", tmp_path / "saved")
    assert {int(value) for batch in larger for value in batch} <= left
    assert len(larger.sampler.freed(20)) == 8


def test_elements_are_live_again_when_the_buffer_is_emptied_or_gets_another_sampler() -> None:
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


# Names of TorchRL ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ensemble", [False, True])
def test_the_replay_lock_excludes_writers_and_draws_of_other_threads(ensemble: bool) -> None:
    member = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    member.extend(torch.arange(2))
    buffer = ReplayBufferEnsemble(member, batch_size=2) if ensemble else member
    done: list[str] = []
    threads = [
        threading.Thread(target=lambda: done.append(f"written {len(member.extend(torch.arange(2)))}")),
        threading.Thread(target=lambda: done.append(f"drawn {len(buffer.sample())}")),
    ]
    lock = buffer._replay_lock
    with lock, lock:
        lock.acquire()
        buffer.sample()
        member.add(torch.tensor(7))
        for thread in threads:
            thread.start()
            thread.join(0.05)
        assert (done, len(member)) == ([], 3)
        lock.release()
    for thread in threads:
        thread.join()
    assert sorted(done)[0].startswith("drawn")
    assert len(done) == 2


@pytest.mark.parametrize("kind", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_prioritised_buffers_name_their_sampler(kind: Any) -> None:
    buffer = kind(alpha=0.7, beta=0.5, storage=LazyTensorStorage(6))
    assert buffer.prioritized_sampler is buffer.sampler
    assert buffer.sampler.max_size == buffer.sampler.max_capacity == 6
    assert isinstance(PrioritizedSampler.max_size, property)


@pytest.mark.parametrize("kind", [ListStorage, LazyStackStorage, CompressedListStorage])
def test_lists_of_storages_have_torchrls_name(kind: Any) -> None:
    storage = kind(4)
    storage.set(range(3), TensorDict({"a": torch.arange(3)}, [3]))
    assert isinstance(storage._storage, list)
    assert len(storage._storage) == 3
    storage._storage.clear()
    assert len(storage) == 3


def test_ensembles_of_samplers_count_their_parts() -> None:
    members = RandomSampler(), RandomSampler(), RandomSampler()
    assert isinstance(rbtool.SamplerEnsemble.num_buffer_sampled, property)
    assert rbtool.SamplerEnsemble(*members).num_buffer_sampled == 3
    assert rbtool.SamplerEnsemble(*members, sample_from_all=True).num_buffer_sampled == 3
    few = rbtool.SamplerEnsemble(*members, num_buffer_sampled=6)
    assert (few.num_buffer_sampled, few[:2].num_buffer_sampled) == (6, 6)
    assert rbtool.SamplerEnsemble(*members)[1:].num_buffer_sampled == 2
    assert rbtool.SamplerEnsemble(*members, batch="exact")[1:].num_buffer_sampled == 2
