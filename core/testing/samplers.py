"""What every sampler must do: subclass `SamplerTests`, say how to make one, and pytest runs the rest."""

from __future__ import annotations

import pickle
import tempfile
from abc import ABC, abstractmethod
from functools import partial
from itertools import product

import torch

from ..samplers import Index, Sampler
from ..storages import TensorStorage
from .raising import error_of

__all__ = ["EpochSamplerTests", "SamplerTests"]


class SamplerTests(ABC):
    """The contract of `Sampler`, on storages of one and of two dimensions."""

    shuffles = True
    """Whether chance has a part in it."""

    @abstractmethod
    def make(self) -> Sampler:
        """Make a fresh sampler."""

    def storage(self, shape: tuple[int, ...] = (100,)) -> TensorStorage:
        """Make a full storage to sample from."""
        return TensorStorage(torch.arange(torch.Size(shape).numel()).reshape(shape), ndim=len(shape))

    def drawn(self, seed: int, batches: int = 1) -> list[Index]:
        """Draw batches of 16 with a seeded generator."""
        sampler, storage = self.make(), self.storage()
        sampler._rng = torch.Generator().manual_seed(seed)
        return [sampler.sample(storage, 16)[0] for _ in range(batches)]

    def test_indices_are_valid_elements(self) -> None:
        index, info = self.make().sample(self.storage(), 16)
        assert isinstance(index, torch.Tensor)
        assert (index.dtype, index.shape) == (torch.int64, (16,))
        assert index in self.storage()
        assert all(len(value) == 16 for value in info.values())

    def test_indices_of_two_dimensions_are_a_pair(self) -> None:
        storage = self.storage((7, 3))
        index, _ = self.make().sample(storage, 16)
        assert isinstance(index, tuple)
        assert [(part.dtype, part.shape) for part in index] == [(torch.int64, (16,))] * 2
        assert torch.stack(index, -1) in storage

    def test_an_empty_storage_is_a_runtime_error(self) -> None:
        storage = self.storage()
        storage._empty()
        error = error_of(partial(self.make().sample, storage, 1))
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

    def test_an_empty_batch_is_a_value_error(self) -> None:
        assert isinstance(error_of(partial(self.make().sample, self.storage(), 0)), ValueError)

    def test_indices_stay_as_they_were_drawn(self) -> None:
        drawn = self.drawn(5, 3)
        assert torch.equal(torch.stack(drawn), torch.stack(self.drawn(5, 3)))  # type: ignore[arg-type]
        drawn[0].zero_()  # type: ignore[union-attr]
        assert torch.equal(drawn[1], self.drawn(5, 3)[1])  # type: ignore[arg-type]

    def test_state_goes_round(self) -> None:
        storage = self.storage()
        for drawn, way in product((0, 1, 4), ("state", "folder")):
            sampler, other = self.make(), self.make()
            sampler._rng, other._rng = torch.Generator().manual_seed(3), torch.Generator()
            for _ in range(drawn):
                sampler.sample(storage, 16)
            with tempfile.TemporaryDirectory() as folder:
                if way == "state":
                    other.load_state_dict(sampler.state_dict())
                else:
                    sampler.dumps(folder)
                    other.loads(folder)
            other._rng.set_state(sampler._rng.get_state())
            for _ in range(20):
                assert torch.equal(other.sample(storage, 16)[0], sampler.sample(storage, 16)[0])  # type: ignore[arg-type]
                assert other.ran_out == sampler.ran_out

    def test_emptied_it_forgets(self) -> None:
        sampler, storage = self.make(), self.storage()
        sampler.sample(storage, 16)
        storage._empty()
        sampler._empty()
        storage.set(range(40), torch.arange(40))
        index, _ = sampler.sample(storage, 40)
        assert index in storage

    def test_a_pickle_leaves_the_generator_behind(self) -> None:
        sampler = self.make()
        sampler._rng = torch.Generator()
        assert pickle.loads(pickle.dumps(sampler))._rng is None


class EpochSamplerTests(SamplerTests):
    """The contract of a sampler that goes through all elements before one comes again."""

    drops_last = False
    """Whether what is left at the end of an epoch, and is less than a batch, is left out."""

    def test_an_epoch_holds_every_element_once(self) -> None:
        for shape, size in product(((100,), (7, 3), (4, 3, 2)), (1, 4, 21)):
            sampler, storage = self.make(), self.storage(shape)
            for _ in range(3):
                drawn = self.epoch(sampler, storage, size)
                assert len(drawn) == len(set(drawn))
                assert len(drawn) == (len(storage) // size * size if self.drops_last else len(storage))

    def epoch(self, sampler: Sampler, storage: TensorStorage, size: int) -> list[tuple[int, ...]]:
        """Draw until the sampler says that the epoch is over; return coordinates."""
        drawn: list[tuple[int, ...]] = []
        for _ in range(len(storage) + 1):
            index, _ = sampler.sample(storage, size)
            parts = index if isinstance(index, tuple) else (index,)
            assert len(parts[0]) <= size
            drawn += zip(*(part.tolist() for part in parts), strict=True)
            if sampler.ran_out:
                return drawn
        raise AssertionError("the epoch does not end")

    def test_the_batches_that_remain_are_told(self) -> None:
        sampler, storage = self.make(), self.storage()
        sampler.sample(storage, 16)
        expected = 100 // 16 - self.drops_last
        for remaining in range(expected, 0, -1):
            assert (sampler._remaining_batches, sampler.ran_out) == (remaining, False)
            sampler.sample(storage, 16)
        assert sampler.ran_out is True

    def test_the_end_of_an_epoch_can_be_reset(self) -> None:
        sampler = self.make()
        for value in (True, False):
            sampler.ran_out = value
            assert sampler.ran_out is value
