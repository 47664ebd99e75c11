"""Orders of which any part is computed by itself, and the shards of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbtool.core.loading import torch_dataset
from rbtool.core.loading.torch_dataset import KeyedOrder, Shard
from rbtool.core.samplers.uniform import seed_of

SHARDS = st.integers(1, 5).flatmap(lambda ranks: st.tuples(st.integers(ranks, 200), st.just(ranks), st.integers(1, 9)))


@pytest.fixture(params=["list", "network"])
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "network":
        monkeypatch.setattr(torch_dataset, "_LISTED", 0)


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 17, 100, 4095, 4096, 10_007])
def test_an_order_has_each_number_once(size: int) -> None:
    for key in range(5):
        assert sorted(KeyedOrder(size, key).at(np.arange(size))) == list(range(size))


@pytest.mark.usefixtures("_kind")
def test_any_part_of_an_order_is_that_of_the_whole() -> None:
    whole = KeyedOrder(1000, 3).at(np.arange(1000))
    places = np.array([999, 0, 17, 17, 500])
    assert KeyedOrder(1000, 3).at(places).tolist() == whole[places].tolist()
    assert (KeyedOrder(1000, 4).at(np.arange(1000)) != whole).any()


def test_long_orders_are_permutations_that_look_random() -> None:
    size = (1 << 20) + 7
    found = KeyedOrder(size, 11).at(np.arange(size))
    assert np.array_equal(np.bincount(found), np.ones(size))
    size = 3_000_000
    found = KeyedOrder(size, 5).at(np.arange(300_000))
    bins = found * 32 // size
    assert 0.5 < deviation(bins, 32) < 1.7
    assert 0.8 < deviation(bins[:-1] * 32 + bins[1:], 1024) < 1.2  # of neighbours
    assert 0.5 < deviation(found % 31, 31) < 1.7


def deviation(numbers: np.ndarray, bins: int) -> float:
    """Chi-square of counts in bins, over its degrees of freedom: about 1 for uniform numbers."""
    counts = np.bincount(numbers, minlength=bins)
    expected = len(numbers) / bins
    return float(((counts - expected) ** 2 / expected).sum() / (bins - 1))


def test_keys_give_independent_long_orders() -> None:
    size = 3_000_000
    found = np.array([KeyedOrder(size, key).at(np.array([0, 1])) for key in range(3000)])
    assert 0.4 < deviation(found[:, 0] * 32 // size, 32) < 1.8
    assert 0.4 < deviation((found[:, 1] - found[:, 0]) % size * 32 // size, 32) < 1.8
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0, 1), ((1 << 64) - 1, 0, 0)]
    assert len({seed_of(*key) for key in keys}) == len(keys)


@given(SHARDS)
@pytest.mark.slow
def test_ranks_have_all_elements_once_and_equally_many_batches(drawn: tuple[int, int, int]) -> None:
    size, ranks, each = drawn
    shards = [Shard(rank, ranks) for rank in range(ranks)]
    counts = {shard.batches(size, each, drop_last=False) for shard in shards}
    assert len(counts) == 1
    places = [[shard.places(size, each, n, drop_last=False) for n in range(max(counts))] for shard in shards]
    lengths = [[len(part) for part in parts] for parts in places]
    assert sorted(np.concatenate([part for parts in places for part in parts])) == list(range(size))
    assert all(set(parts[:-1]) <= {each} and 1 <= parts[-1] <= each + (ranks > 1) for parts in lengths)
    assert max(parts[-1] for parts in lengths) - min(parts[-1] for parts in lengths) <= 1


@given(SHARDS)
def test_without_incomplete_rounds_all_batches_are_whole(drawn: tuple[int, int, int]) -> None:
    size, ranks, each = drawn
    count = Shard(0, ranks).batches(size, each, drop_last=True)
    found = [Shard(r, ranks).places(size, each, n, drop_last=True) for r in range(ranks) for n in range(count)]
    assert all(len(part) == each for part in found)
    assert len({place for part in found for place in part}) == count * ranks * each
    assert size - count * ranks * each < ranks * each
    assert max((part.max() for part in found), default=0) < size
