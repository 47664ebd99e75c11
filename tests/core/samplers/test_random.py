from __future__ import annotations

import pytest
import torch

from rbtool import RandomSampler, Sampler, TensorStorage
from rbtool.core.errors import SchemaError, UsageError
from rbtool.core.testing.samplers import SamplerTests


class TestRandomSampler(SamplerTests):
    def make(self) -> RandomSampler:
        return RandomSampler()


def chi_square(counts: torch.Tensor) -> float:
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("shape", "valid"), [((100,), 100), ((100,), 37), ((20, 5), 20), ((50, 4, 2), 9)])
def test_every_element_is_drawn_alike(shape: tuple[int, ...], valid: int, seed: int) -> None:
    storage = TensorStorage(torch.zeros(shape), ndim=len(shape))
    storage.empty()
    storage.set(range(valid), torch.zeros(valid, *shape[1:]))
    sampler = RandomSampler()
    sampler._rng = torch.Generator().manual_seed(seed)
    index, _ = sampler.sample(storage, 40_000)
    counts = torch.zeros(storage.shape)
    place = index if isinstance(index, tuple) else (index,)
    counts.index_put_(place, torch.ones(40_000), accumulate=True)
    freedom = len(storage) - 1
    # Far in the tail (six standard deviations): wrong weights miss this by an order of magnitude.
    assert chi_square(counts) < freedom + 6 * (2 * freedom) ** 0.5


def test_without_a_generator_torch_decides() -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(3)
        index, _ = RandomSampler().sample(TensorStorage(torch.arange(10**6)), 8)
        return index

    assert torch.equal(draw(), draw())


def test_indices_have_64_bits() -> None:
    class Huge(TensorStorage):
        def __len__(self) -> int:
            return 2**40

    index, _ = RandomSampler().sample(Huge(torch.zeros(3)), 64)
    assert int(index.max()) > 2**33


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_has_elements(batch_size: int) -> None:
    with pytest.raises(UsageError, match=f"batch_size is {batch_size}"):
        RandomSampler().sample(TensorStorage(torch.arange(3)), batch_size)


def test_there_is_no_state_on_disk(tmp_path) -> None:
    sampler = RandomSampler()
    sampler.dumps(tmp_path)
    sampler.loads(tmp_path)
    assert (list(tmp_path.iterdir()), sampler.state_dict()) == ([], {})
    with pytest.raises(SchemaError, match="has no state, found cursor"):
        sampler.load_state_dict({"cursor": 1})


def test_priorities_are_turned_down_aloud() -> None:
    with pytest.warns(UserWarning, match="RandomSampler does not look at priorities"):
        RandomSampler().update_priority(torch.tensor([0]), 1.0)


def test_what_a_sampler_without_state_answers() -> None:
    sampler: Sampler = RandomSampler()
    sampler.add(0)
    sampler.extend(torch.arange(3))
    sampler.mark_update(0)
    sampler._empty()
    sampler.ran_out = True
    assert (sampler.ran_out, sampler.default_priority, sampler._remaining_batches > 2**60) == (False, 1.0, True)
    assert repr(sampler) == "RandomSampler()"
