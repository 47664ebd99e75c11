"""The test suites for samplers. To run one, subclass `SamplerTests` or `EpochSamplerTests` and implement `make`."""

from __future__ import annotations

import pickle
import tempfile
from abc import ABC, abstractmethod
from functools import partial
from itertools import product
from typing import Any

import torch

from ..buffers.replay_buffer import ReplayBuffer
from ..samplers.base import Index, Sampler
from ..storages.lazy_tensor import LazyTensorStorage
from ..storages.tensor import TensorStorage
from .rows import error_of, restore


class _Closed(TensorStorage):
    """A storage whose rows cannot be read."""

    def read_at(self, index: Any) -> Any:
        raise AssertionError("a sampler with reads_rows=False has read rows")


class SamplerTests(ABC):
    """The contract of `Sampler`, on storages of one and of two dimensions, alone and in a buffer."""

    shuffles = True
    """Whether draws are random."""

    @abstractmethod
    def make(self) -> Sampler:
        """Make a new sampler for up to 100 elements."""

    def storage(self, shape: tuple[int, ...] = (100,)) -> TensorStorage:
        """Make a full storage to sample from."""
        return TensorStorage(torch.arange(torch.Size(shape).numel()).reshape(shape), ndim=len(shape))

    def partly_filled(self, count: int, shape: tuple[int, ...] = (100,)) -> LazyTensorStorage:
        """Make a storage with room for `shape`, and write `count` rows to it."""
        storage = LazyTensorStorage(torch.Size(shape).numel(), ndim=len(shape))
        storage.set(range(count), torch.arange(count * torch.Size(shape[1:]).numel()).reshape(count, *shape[1:]))
        return storage

    def buffer(self, written: int = 80, *, capacity: int = 100, seed: int = 3, **arguments: Any) -> ReplayBuffer:
        """Make a buffer of numbered rows."""
        generator = torch.Generator().manual_seed(seed)
        storage = LazyTensorStorage(capacity)
        buffer = ReplayBuffer(storage=storage, sampler=self.make(), batch_size=16, generator=generator, **arguments)
        for start in range(0, written, 10):
            buffer.extend(torch.arange(start, min(start + 10, written)))
        return buffer

    def drawn(self, seed: int, batches: int = 1) -> list[Index]:
        """Draw batches of 16 with a seeded generator."""
        sampler, storage = self.make(), self.storage()
        sampler.generator = torch.Generator().manual_seed(seed)
        return [sampler.sample(storage, 16)[0] for _ in range(batches)]

    def test_indices_are_valid_elements(self) -> None:
        for storage, size in product((self.storage(), self.partly_filled(37)), (1, 16, 30)):
            index, info = self.make().sample(storage, size)
            assert isinstance(index, torch.Tensor)
            assert (index.dtype, index.shape) == (torch.int64, (size,))
            assert index in storage
            assert all(len(value) == size for value in info.values())

    def test_indices_of_two_dimensions_are_a_pair(self) -> None:
        for storage in (self.storage((7, 3)), self.partly_filled(4, (7, 3))):
            index, _ = self.make().sample(storage, 12)
            assert isinstance(index, tuple)
            assert [(part.dtype, part.shape) for part in index] == [(torch.int64, (12,))] * 2
            assert torch.stack(index, -1) in storage

    def test_rows_that_are_written_later_can_be_drawn(self) -> None:
        sampler, storage = self.make(), self.partly_filled(5)
        seen: set[int] = set()
        for count in range(5, 100, 5):
            index, _ = sampler.sample(storage, 5)
            assert index in storage
            seen |= set(index.tolist())  # type: ignore[union-attr]
            storage.set(range(count, count + 5), torch.arange(count, count + 5))
            sampler.extend(torch.arange(count, count + 5))
        for _ in range(200):
            seen |= set(sampler.sample(storage, 50)[0].tolist())  # type: ignore[union-attr]
        assert max(seen) >= 90

    def test_drawing_changes_no_row(self) -> None:
        sampler, storage = self.make(), self.storage()
        before = storage.log.now
        for _ in range(10):
            sampler.sample(storage, 16)
        assert storage.log.now == before
        assert torch.equal(storage[:], torch.arange(100))

    def test_a_sampler_that_reads_no_rows_reads_none(self) -> None:
        sampler = self.make()
        if not sampler.reads_rows:
            for _ in range(10):
                sampler.sample(_Closed(torch.arange(100)), 16)

    def test_an_empty_storage_is_a_runtime_error(self) -> None:
        error = error_of(partial(self.make().sample, LazyTensorStorage(100), 1))
        assert isinstance(error, RuntimeError)
        assert "empty" in str(error)

    def test_the_same_seed_gives_the_same_batches(self) -> None:
        one, again, other = (torch.stack(self.drawn(seed, 3)) for seed in (5, 5, 6))  # type: ignore[arg-type]
        assert torch.equal(one, again)
        assert torch.equal(one, other) is not self.shuffles

    def test_the_generator_alone_decides(self) -> None:
        torch.manual_seed(1)
        one = self.drawn(5)
        torch.manual_seed(2)
        assert torch.equal(torch.stack(one), torch.stack(self.drawn(5)))  # type: ignore[arg-type]
        state = torch.get_rng_state()
        self.drawn(5)
        assert torch.equal(torch.get_rng_state(), state)

    def test_an_empty_batch_is_a_value_error(self) -> None:
        for size in (0, -1):
            assert isinstance(error_of(partial(self.make().sample, self.storage(), size)), ValueError)

    def test_indices_stay_as_they_were_drawn(self) -> None:
        drawn = self.drawn(5, 3)
        assert torch.equal(torch.stack(drawn), torch.stack(self.drawn(5, 3)))  # type: ignore[arg-type]
        drawn[0].zero_()  # type: ignore[union-attr]
        assert torch.equal(drawn[1], self.drawn(5, 3)[1])  # type: ignore[arg-type]

    def test_state_is_restored(self) -> None:
        storage = self.storage()
        for drawn, way in product((0, 1, 4), ("state", "folder", "pickle")):
            sampler, other = self.make(), self.make()
            sampler.generator = torch.Generator().manual_seed(3)
            for _ in range(drawn):
                sampler.sample(storage, 16)
            with tempfile.TemporaryDirectory() as folder:
                if way == "state":
                    other.load_state_dict(sampler.state_dict())
                elif way == "folder":
                    sampler.dumps(folder)
                    other.loads(folder)
                else:
                    other = pickle.loads(pickle.dumps(sampler))
            other.generator = torch.Generator()
            other.generator.set_state(sampler.generator.get_state())
            for _ in range(20):
                assert torch.equal(other.sample(storage, 16)[0], sampler.sample(storage, 16)[0])  # type: ignore[arg-type]
                assert (other.ran_out, other.remaining_batches) == (sampler.ran_out, sampler.remaining_batches)

    def test_a_state_stays_as_it_was_saved(self) -> None:
        storage, sampler, other = self.storage(), self.make(), self.make()
        sampler.generator, other.generator = (torch.Generator().manual_seed(3) for _ in range(2))
        sampler.sample(storage, 16)
        other.sample(storage, 16)
        state = sampler.state_dict()
        for _ in range(3):
            sampler.sample(storage, 16)
        again = self.make()
        again.load_state_dict(state)
        again.generator = other.generator
        assert torch.equal(again.sample(storage, 16)[0], self.drawn(3, 2)[1])  # type: ignore[arg-type]

    def test_emptying_resets_the_state(self) -> None:
        sampler = self.make()
        sampler.sample(self.storage(), 16)
        sampler.empty()
        fewer = self.partly_filled(40)
        for _ in range(5):
            assert sampler.sample(fewer, 10)[0] in fewer

    def test_a_pickle_leaves_the_generator_behind(self) -> None:
        sampler = self.make()
        sampler.generator = torch.Generator()
        assert pickle.loads(pickle.dumps(sampler)).generator is None

    def test_only_samplers_with_epochs_run_out(self) -> None:
        sampler, storage = self.make(), self.storage()
        found = set()
        for _ in range(101):
            sampler.sample(storage, 1)
            found.add(sampler.ran_out)
        assert (True in found) is sampler.has_epochs
        assert bool(type(sampler).replacement) is not sampler.has_epochs

    def test_batches_of_a_buffer_are_the_rows_at_their_index(self) -> None:
        buffer = self.buffer()
        for _ in range(10):
            batch, info = buffer.sample(return_info=True)
            assert torch.equal(batch, info["index"])
            assert batch.max() < 80

    def test_a_buffer_that_prefetches_gives_the_same_batches(self) -> None:
        plain, ahead = self.buffer(), self.buffer(prefetch=3)
        for _ in range(20):
            assert torch.equal(plain.sample(), ahead.sample())

    def test_a_shared_buffer_gives_the_same_batches(self) -> None:
        plain, shared = self.buffer(), self.buffer().share()
        for _ in range(5):
            assert torch.equal(plain.sample(), shared.sample())

    def test_a_restored_buffer_gives_the_batches_that_were_next(self) -> None:
        for prefetch, way in product((None, 2), ("state", "folder")):
            saved, other = self.buffer(prefetch=prefetch), self.buffer(0, seed=4, prefetch=prefetch)
            for _ in range(3):
                saved.sample()
            restore(other, saved, way)
            for _ in range(20):
                assert torch.equal(other.sample(), saved.sample())

    def test_an_emptied_buffer_gives_new_rows(self) -> None:
        buffer = self.buffer()
        buffer.sample()
        buffer.empty()
        buffer.extend(torch.arange(200, 220))
        assert all(bool((buffer.sample() >= 200).all()) for _ in range(5))


class EpochSamplerTests(SamplerTests):
    """The contract of a sampler that draws every element once before any is drawn again."""

    drops_last = False
    """Whether an incomplete batch at the end of an epoch is dropped."""

    def test_an_epoch_holds_every_element_once(self) -> None:
        for shape, size in product(((100,), (7, 3), (4, 3, 2)), (1, 4, 21)):
            sampler, storage = self.make(), self.storage(shape)
            for _ in range(3):
                drawn = self.epoch(sampler, storage, size)
                assert len(drawn) == len(set(drawn))
                assert len(drawn) == (len(storage) // size * size if self.drops_last else len(storage))

    def epoch(self, sampler: Sampler, storage: TensorStorage, size: int) -> list[tuple[int, ...]]:
        """Draw until the sampler reports the end of the epoch; return coordinates."""
        drawn: list[tuple[int, ...]] = []
        for _ in range(len(storage) + 1):
            index, _ = sampler.sample(storage, size)
            parts = index if isinstance(index, tuple) else (index,)
            assert len(parts[0]) <= size
            drawn += zip(*(part.tolist() for part in parts), strict=True)
            if sampler.ran_out:
                return drawn
        raise AssertionError("the epoch does not end")

    def test_iteration_over_a_buffer_is_an_epoch(self) -> None:
        for prefetch in (None, 2):
            buffer = self.buffer(prefetch=prefetch)
            for _ in range(2):
                rows = torch.cat(list(buffer)).tolist()
                assert len(rows) == len(set(rows)) == 80

    def test_a_restored_buffer_finishes_the_epoch_in_a_larger_ring(self) -> None:
        for way in ("state", "folder"):
            saved, other = self.buffer(110), self.buffer(0, capacity=128, seed=4)
            drawn = [saved.sample() for _ in range(3)]
            restore(other, saved, way)
            rows = torch.cat([*drawn, *other]).tolist()
            assert len(rows) == len(set(rows)) == (96 if self.drops_last else 100)
            assert set(rows) <= set(range(10, 110))

    def test_an_epoch_begins_anew_on_request(self) -> None:
        sampler, storage = self.make(), self.storage()
        sampler.sample(storage, 20)
        sampler.begin_epoch()
        assert len(set(self.epoch(sampler, storage, 20))) == 100

    def test_the_batches_that_remain_are_counted(self) -> None:
        sampler, storage = self.make(), self.storage()
        sampler.sample(storage, 16)
        expected = 100 // 16 - self.drops_last
        for remaining in range(expected, 0, -1):
            assert (sampler.remaining_batches, sampler.ran_out) == (remaining, False)
            sampler.sample(storage, 16)
        assert sampler.ran_out is True

    def test_the_end_of_an_epoch_can_be_reset(self) -> None:
        sampler = self.make()
        for value in (True, False):
            sampler.ran_out = value
            assert sampler.ran_out is value
