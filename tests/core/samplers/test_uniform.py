"""`RandomSampler` and `SamplerWithoutReplacement`: even chances, epochs that grow, and their states."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError, UsageError
from rbtool.core.samplers.base import Sampler
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.samplers import EpochSamplerTests, SamplerTests


class TestRandomSampler(SamplerTests):
    def make(self) -> RandomSampler:
        return RandomSampler()


def chi_square(counts: torch.Tensor) -> float:
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


@each("seed", range(5))
@each(("shape", "valid"), [((100,), 100), ((100,), 37), ((20, 5), 20), ((50, 4, 2), 9)])
def test_all_elements_are_equally_likely(shape: tuple[int, ...], valid: int, seed: int) -> None:
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


def test_the_seed_of_torch_counts_without_a_generator() -> None:
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


def test_a_random_sampler_has_no_state(tmp_path: Path) -> None:
    sampler = RandomSampler()
    sampler.dumps(tmp_path)
    sampler.loads(tmp_path)
    assert (list(tmp_path.iterdir()), sampler.state_dict()) == ([], {})
    with pytest.raises(SchemaError, match="has no state, found cursor"):
        sampler.load_state_dict({"cursor": 1})


def test_priorities_are_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="RandomSampler does not use priorities"):
        RandomSampler().update_priority(torch.tensor([0]), 1.0)


def test_notices_do_not_change_a_random_sampler() -> None:
    sampler: Sampler = RandomSampler()
    sampler.add(0)
    sampler.extend(torch.arange(3))
    sampler.mark_update(0)
    sampler._empty()
    sampler.ran_out = True
    assert (sampler.ran_out, sampler.default_priority, sampler._remaining_batches > 2**60) == (False, 1.0, True)
    assert repr(sampler) == "RandomSampler()"


CASES = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"


class TestSamplerWithoutReplacement(EpochSamplerTests):
    def make(self) -> SamplerWithoutReplacement:
        return SamplerWithoutReplacement()


class TestInOrder(EpochSamplerTests):
    shuffles = False

    def make(self) -> SamplerWithoutReplacement:
        return SamplerWithoutReplacement(shuffle=False)


class TestWithoutIncompleteBatches(EpochSamplerTests):
    drops_last = True

    def make(self) -> SamplerWithoutReplacement:
        return SamplerWithoutReplacement(drop_last=True)


def rows(count: int, capacity: int = 100) -> LazyTensorStorage:
    storage = LazyTensorStorage(capacity)
    storage.set(range(count), torch.arange(count))
    return storage


def grow(storage: LazyTensorStorage, count: int) -> None:
    storage.set(range(len(storage), len(storage) + count), torch.zeros(count, dtype=torch.int64))


def in_order(**options: bool) -> SamplerWithoutReplacement:
    return SamplerWithoutReplacement(shuffle=False, **options)


def test_the_last_batch_of_an_epoch_reports_its_end() -> None:
    sampler, storage = in_order(), rows(10)
    found = []
    for _ in range(6):
        index, _ = sampler.sample(storage, 4)
        found.append((len(index), sampler.ran_out, sampler._remaining_batches))
    assert found == [(4, False, 2), (4, False, 1), (2, True, 3)] * 2


def test_incomplete_batches_are_left_out() -> None:
    sampler, storage = in_order(drop_last=True), rows(10)
    drawn = [(sampler.sample(storage, 4)[0].tolist(), sampler.ran_out) for _ in range(3)]
    assert drawn == [([0, 1, 2, 3], False), ([4, 5, 6, 7], True), ([0, 1, 2, 3], False)]


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    growth=st.lists(st.integers(0, 5), min_size=12, max_size=12),
    start=st.integers(1, 20),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_edge_03_8_no_element_comes_twice_in_an_epoch(
    sizes: list[int], growth: list[int], start: int, shuffle: bool, drop_last: bool, seed: int
) -> None:
    sampler, storage = SamplerWithoutReplacement(drop_last, shuffle), rows(start)
    sampler._rng = torch.Generator().manual_seed(seed)
    seen: Counter[int] = Counter()
    for size, more in zip(sizes, growth, strict=False):
        if drop_last and size > len(storage):
            with pytest.raises(ValueError, match=r"expected at most .* with drop_last=True"):
                sampler.sample(storage, size)
            continue
        left = sampler._sample_list
        cut = drop_last and left is not None and len(left) + len(storage) - sampler.len_storage < size
        seen = Counter() if cut else seen
        seen.update(sampler.sample(storage, size)[0].tolist())
        assert max(seen.values()) == 1
        if sampler.ran_out:
            assert drop_last or len(seen) == len(storage)
            assert len(seen) > len(storage) - size
            seen = Counter()
        grow(storage, more)


def test_edge_03_8_late_elements_come_in_the_same_epoch() -> None:
    sampler, storage = in_order(), rows(6)
    first = sampler.sample(storage, 4)[0].tolist()
    grow(storage, 3)
    assert [first, sampler.sample(storage, 4)[0].tolist(), sampler.ran_out] == [[0, 1, 2, 3], [4, 5, 6, 7], False]
    assert (sampler.sample(storage, 4)[0].tolist(), sampler.ran_out) == ([8], True)


@pytest.mark.parametrize("late", [1, 3, 1500])
def test_late_elements_come_at_any_time(late: int) -> None:
    places = []
    for seed in range(300):
        sampler, storage = SamplerWithoutReplacement(), rows(4, 2000)
        sampler._rng = torch.Generator().manual_seed(seed)
        sampler.sample(storage, 1)
        grow(storage, late)
        order = sampler.sample(storage, 3 + late)[0].tolist()
        assert len(set(order)) == 3 + late
        places.append(order.index(4) / (2 + late))
    # The mean of 300 uniform places has a standard deviation below 0.03 (coarse places have up to 0.5 / sqrt(300)).
    assert abs(sum(places) / len(places) - 0.5) < 0.15
    assert {0.0, 1.0} <= set(places) or late == 1500


def test_a_storage_that_was_emptied_starts_an_epoch() -> None:
    sampler, storage = in_order(), rows(6)
    sampler.sample(storage, 4)
    storage.empty()
    grow(storage, 3)
    assert sampler.sample(storage, 4)[0].tolist() == [0, 1, 2]
    sampler.sample(storage, 1)
    sampler._empty()
    assert sampler.sample(storage, 2)[0].tolist() == [0, 1]


def test_edge_03_8_remaining_batches_follow_the_batch_size() -> None:
    sampler, storage = in_order(), rows(10)
    assert sampler._remaining_batches > 2**60
    sampler.sample(storage, 4)
    assert sampler._remaining_batches == 2
    sampler.sample(storage, 1)
    assert sampler._remaining_batches == 5
    dropping = in_order(drop_last=True)
    dropping.sample(storage, 3)
    assert dropping._remaining_batches == 2


def test_edge_03_8_shuffle_is_saved(tmp_path: Path) -> None:
    sampler, other, storage = in_order(), SamplerWithoutReplacement(), rows(10)
    sampler.sample(storage, 4)
    sampler.dumps(tmp_path)
    other.loads(tmp_path)
    for _ in range(4):
        assert torch.equal(other.sample(storage, 4)[0], sampler.sample(storage, 4)[0])
    assert other.shuffle is False


def test_a_state_is_not_changed_by_later_draws() -> None:
    sampler, storage = SamplerWithoutReplacement(), rows(10)
    sampler.sample(storage, 4)
    state = sampler.state_dict()
    before = state["_sample_list"].tolist()
    for late in (0, 5, 0, 0):
        grow(storage, late)
        sampler.sample(storage, 4)[0].zero_()
    assert state["_sample_list"].tolist() == before


def test_all_orders_of_an_epoch_are_equally_likely() -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    sampler, storage = SamplerWithoutReplacement(), rows(4)
    sampler._rng = torch.Generator().manual_seed(0)
    for _ in range(2400):
        counts[tuple(sampler.sample(storage, 4)[0].tolist())] += 1
    assert len(counts) == math.factorial(4)
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 23 + 6 * math.sqrt(46)


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": False, "drop_last": True}])
def test_replacement_false_makes_the_sampler_without_replacement(options: dict[str, bool]) -> None:
    sampler = RandomSampler(replacement=False, **options)
    assert type(sampler) is SamplerWithoutReplacement
    assert (sampler.drop_last, sampler.shuffle) == (options.get("drop_last", False), options.get("shuffle", True))
    assert type(SamplerWithoutReplacement(replacement=False)) is SamplerWithoutReplacement
    assert type(RandomSampler(replacement=True)) is RandomSampler


def test_replacement_of_a_sampler_without_a_counterpart_is_a_type_error() -> None:
    class Own(RandomSampler):
        pass

    for kind, replacement in ((Own, False), (SamplerWithoutReplacement, True)):
        with pytest.raises(TypeError, match=f"a {kind.__name__} cannot be made with replacement={replacement}"):
            kind(replacement=replacement)


def test_refused_batches_change_nothing() -> None:
    sampler, storage = in_order(drop_last=True), rows(5)
    sampler.sample(storage, 2)
    with pytest.raises(UsageError, match="batch_size is 0"):
        sampler.sample(storage, 0)
    with pytest.raises(ValueError, match="batch_size is 6, expected at most 5"):
        sampler.sample(storage, 6)
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        sampler.sample(LazyTensorStorage(3), 1)
    assert sampler.sample(storage, 2)[0].tolist() == [2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"len_storage": 3},
        {"_sample_list": torch.tensor([0.5])},
        {"_sample_list": torch.tensor([[1]])},
        {"_sample_list": torch.tensor([10])},
        {"_sample_list": torch.tensor([-1])},
        {"_sample_list": [1, 2]},
    ],
)
def test_refused_states_change_nothing(wrong: dict[str, Any]) -> None:
    sampler, storage = in_order(), rows(10)
    sampler.sample(storage, 4)
    with pytest.raises(SchemaError):
        sampler.load_state_dict(sampler.state_dict() | wrong)
    assert sampler.sample(storage, 4)[0].tolist() == [4, 5, 6, 7]


def test_a_state_of_another_sampler_is_refused() -> None:
    with pytest.raises(SchemaError, match="len_storage, _sample_list, drop_last, _ran_out is missing"):
        in_order().load_state_dict({})


def test_a_damaged_folder_changes_nothing(tmp_path: Path) -> None:
    sampler, other, storage = in_order(), in_order(), rows(10)
    sampler.sample(storage, 4)
    with pytest.raises(DatasetNotFoundError):
        other.loads(tmp_path)
    sampler.dumps(tmp_path)
    (tmp_path / "_sample_list.memmap").write_bytes(b"\0" * 8)
    with pytest.raises(CorruptDataError):
        other.loads(tmp_path)
    sampler.dumps(tmp_path)
    (tmp_path / "len_storage.memmap").write_bytes(np.int64(3).tobytes())
    with pytest.raises(CorruptDataError):
        other.loads(tmp_path)
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(FormatError):
        other.loads(tmp_path)
    assert other.sample(storage, 4)[0].tolist() == [0, 1, 2, 3]


def test_a_second_dump_replaces_the_first(tmp_path: Path) -> None:
    sampler, other, storage = in_order(), in_order(), rows(10)
    for _ in range(2):
        in_order().dumps(tmp_path)
        other.loads(tmp_path)
        assert other._sample_list is None
        sampler.sample(storage, 4)
        sampler.dumps(tmp_path)
        other.loads(tmp_path)
        assert torch.equal(other._sample_list, sampler._sample_list)
    assert TensorDict.load_memmap(tmp_path)["len_storage"].item() == 10


@pytest.mark.parametrize("name", ["drop_last", "mid_epoch", "untouched"])
def test_folders_of_torchrl_are_read(name: str) -> None:
    folder = CASES / f"sampler_without_replacement_{name}"
    facts, sampler = json.loads((folder / "case.json").read_text()), SamplerWithoutReplacement()
    sampler.loads(folder / "checkpoint" / "sampler")
    if name == "untouched":
        assert sampler._sample_list is None
        return
    expected = np.load(folder / "expected_sampler.npz")
    assert sampler._sample_list.tolist() == expected["remaining"].tolist()
    assert (sampler.drop_last, sampler.ran_out) == (bool(expected["drop_last"]), bool(expected["ran_out"]))
    drawn = [sampler.sample(TensorStorage(torch.zeros(facts["len"])), 4)[0].tolist() for _ in range(2)]
    remaining = expected["remaining"].tolist()
    assert drawn[0] == remaining[:4]
    assert sampler.drop_last or drawn[1] == remaining[4:]


@pytest.mark.peer
@pytest.mark.parametrize("drawn", [0, 2])
def test_torchrl_reads_ours(tmp_path, drawn: int) -> None:
    data = pytest.importorskip("torchrl.data.replay_buffers")
    sampler, theirs, storage = SamplerWithoutReplacement(drop_last=True), data.SamplerWithoutReplacement(), rows(10)
    for _ in range(drawn):
        sampler.sample(storage, 3)
    sampler.dumps(tmp_path)
    theirs.loads(tmp_path)
    assert str(theirs._sample_list) == str(sampler._sample_list)
    assert bool(theirs.drop_last) is True
    theirs.load_state_dict(sampler.state_dict())
    sampler.load_state_dict(theirs.state_dict())


def test_a_buffer_that_consumes_elements_cannot_be_shared_later() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), consume_after_n_samples=1, batch_size=4)
    with pytest.raises(UsageError, match="only one process can consume elements"):
        buffer.share()
    assert not buffer.shared
    buffer.extend(torch.arange(4))
    assert sorted(buffer.sample().tolist()) == [0, 1, 2, 3]
