"""What every sampler must do: subclass `SamplerTests`, say how to make one, and pytest runs the rest."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from functools import partial

import torch

from ..samplers import Index, Sampler
from ..storages import TensorStorage
from .raising import error_of

__all__ = ["SamplerTests"]


class SamplerTests(ABC):
    """The contract of `Sampler`, on storages of one and of two dimensions."""

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
        assert not torch.equal(one, other)

    def test_the_generator_alone_decides(self) -> None:
        torch.manual_seed(1)
        one = self.drawn(5)
        torch.manual_seed(2)
        assert torch.equal(torch.stack(one), torch.stack(self.drawn(5)))  # type: ignore[arg-type]

    def test_state_goes_round(self) -> None:
        self.make().load_state_dict(self.make().state_dict())

    def test_a_pickle_leaves_the_generator_behind(self) -> None:
        sampler = self.make()
        sampler._rng = torch.Generator()
        assert pickle.loads(pickle.dumps(sampler))._rng is None
