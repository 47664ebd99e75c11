from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import wait

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.ensemble import ReplayBufferEnsemble
from rbtool.core.buffers.prioritized import TensorDictPrioritizedReplayBuffer
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.errors import UsageError
from rbtool.core.loading.torch_dataset import torch_dataset
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.samplers.prioritized_slices import PrioritizedSliceSampler
from rbtool.core.samplers.prompt_groups import PromptGroupSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.samplers.stream import StreamSampler, StreamSliceSampler
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.transforms.base import Compose
from rbtool.core.transforms.keyed import ExcludeTransform
from rbtool.core.writers.round_robin import RoundRobinWriter, TensorDictRoundRobinWriter


def test_what_there_is_without_arguments() -> None:
    buffer = ReplayBuffer()
    assert (type(buffer.storage), buffer.storage.max_size) == (ListStorage, 1_000)
    assert (type(buffer.sampler), type(buffer.writer)) == (RandomSampler, RoundRobinWriter)
    assert (len(buffer.transform), buffer.batch_size, buffer.dim_extend, buffer.shared) == (0, None, 0, False)
    assert type(TensorDictReplayBuffer().writer) is TensorDictRoundRobinWriter


def test_parts_may_be_made_by_callables() -> None:
    parts = {"sampler": SamplerWithoutReplacement, "writer": RoundRobinWriter}
    buffer = ReplayBuffer(storage=lambda: LazyTensorStorage(5), **parts)
    assert (buffer.storage.max_size, type(buffer.sampler)) == (5, SamplerWithoutReplacement)


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
    ],
)
def test_arguments_that_make_no_sense(arguments: dict, error: type[Exception]) -> None:
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
def test_words_are_neither_true_nor_false(make: Callable[[str], object], name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 'no', expected True or False"):
        make("no")


def test_the_bools_of_numpy_and_one_and_zero_are_flags() -> None:
    assert SamplerWithoutReplacement(np.True_, shuffle=np.False_).drop_last
    assert SliceSampler(slice_len=2, batched=1, pad_output=0).batched  # type: ignore[arg-type]


def test_dim_extend_is_set_once() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2))
    assert buffer.dim_extend == 1
    buffer.dim_extend = 0
    with pytest.raises(RuntimeError, match="dim_extend is 0 already"):
        buffer.dim_extend = 1
    assert buffer.extend(torch.zeros(4, 3)).shape == (12, 2)
    assert buffer.storage.shape == (4, 3)


def test_parts_are_made_when_first_needed() -> None:
    made = []
    buffer = ReplayBuffer(storage=lambda: made.append(1) or LazyTensorStorage(4), delayed_init=True)
    assert (made, buffer.initialized, buffer.stats()["initialized"]) == ([], False, False)
    buffer.extend(torch.arange(3))
    assert (made, buffer.initialized, len(buffer)) == ([1], True, 3)


def test_a_transform_factory_delays_the_making() -> None:
    buffer = ReplayBuffer(storage=TensorStorage(torch.arange(3)), transform_factory=lambda: lambda rows: rows + 1)
    assert not buffer.initialized
    assert buffer[:].tolist() == [1, 2, 3]


def test_an_attribute_that_is_not_there() -> None:
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


def test_set_storage_goes_on_behind_the_rows_that_are_there() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(torch.arange(3))
    held = LazyTensorStorage(6)
    held.set(range(2), torch.tensor([7, 8]))
    buffer.set_storage(held)
    buffer.add(torch.tensor(9))
    assert buffer[:].tolist() == [7, 8, 9]


def test_set_storage_takes_the_collation_along() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
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


def test_set_writer_goes_on_where_the_old_one_was() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(torch.arange(6))
    previous = buffer.writer
    assert buffer.set_writer(RoundRobinWriter(track_generations=True)) is previous
    buffer.extend(torch.tensor([10, 11]))
    assert (buffer[:].tolist(), buffer.write_count) == ([4, 5, 10, 11], 8)


def test_a_buffer_goes_when_nobody_has_it_any_more() -> None:
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
    assert repr(buffer).startswith("TensorDictReplayBuffer(storage=LazyTensorStorage(len=3, max_size=4), sampler=")
    assert repr(ReplayBuffer(delayed_init=True)) == "ReplayBuffer(initialized=False)"
