"""Prioritised buffers that are saved and loaded: ours go on exactly, TorchRL's have its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool.core.buffers.prioritized import PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer
from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.errors import RbtoolError
from rbtool.core.samplers.prioritized import PrioritizedSampler
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage

WRITTEN = Path(__file__).parents[2] / "data/torchrl_checkpoints"
STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage, LazyStackStorage, CompressedListStorage]


def made(storage: Any, seed: int = 0, **more: Any) -> TensorDictPrioritizedReplayBuffer:
    generator = torch.Generator().manual_seed(seed)
    return TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.5, storage=storage, batch_size=5, generator=generator, **more
    )


def steps(first: int, count: int) -> TensorDict:
    rows = torch.arange(first, first + count)
    return TensorDict({"a": rows, "td_error": (rows * 7 % 11).double()}, [count])


def used(buffer: TensorDictPrioritizedReplayBuffer) -> TensorDictPrioritizedReplayBuffer:
    """Write more than there is room for, and learn from some of it."""
    for first in range(0, 26, 4):
        buffer.extend(steps(first, 4))
        batch = buffer.sample()
        buffer.update_tensordict_priority(batch.set("td_error", 1 / (1.0 + batch["a"])))
    return buffer


@pytest.mark.parametrize("way", ["folder", "state"])
@pytest.mark.parametrize("prefetch", [None, 3])
@pytest.mark.parametrize("storage", STORAGES)
def test_the_next_thousand_draws_are_the_same(storage: Any, prefetch: int | None, way: str, tmp_path: Path) -> None:
    one, other = used(made(storage(20), prefetch=prefetch)), made(storage(20), seed=5, prefetch=prefetch)
    other.extend(steps(0, 9))
    if way == "folder":
        one.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    else:
        other.load_state_dict(one.state_dict())
    for turn in range(200):
        batch, again = one.sample(), other.sample()
        assert torch.equal(batch["index"], again["index"])
        assert torch.equal(batch["priority_weight"], again["priority_weight"])
        if turn % 10 == 0:
            for buffer in (one, other):
                buffer.extend(steps(turn, 3))
                buffer.update_priority(batch["index"], batch["index"] % 5 + 0.5)


def test_two_dimensions_go_round(tmp_path: Path) -> None:
    one, other = made(LazyTensorStorage(30, ndim=2)), made(LazyTensorStorage(30, ndim=2))
    numbers = torch.arange(28).reshape(4, 7)
    one.extend(TensorDict({"a": numbers, "td_error": numbers.float()}, [4, 7]))
    one.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert all(torch.equal(one.sample()["index"], other.sample()["index"]) for _ in range(200))
    both = [buffer.extend(TensorDict({"a": numbers, "td_error": numbers + 0.5}, [4, 7])) for buffer in (one, other)]
    assert torch.equal(*both)
    assert all(torch.equal(one.sample()["index"], other.sample()["index"]) for _ in range(200))


def test_a_buffer_of_one_sampler_loads_into_one_with_sugar(tmp_path: Path) -> None:
    sampler = PrioritizedSampler(20, alpha=0.7, beta=0.5)
    one = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=5)
    one.extend(steps(0, 12))
    one.dumps(tmp_path / "saved")
    other = made(LazyMemmapStorage(20))
    other.loads(tmp_path / "saved")
    generator = torch.Generator().manual_seed(2)
    one.set_rng(generator)
    other.set_rng(torch.Generator().manual_seed(2))
    assert all(torch.equal(one.sample()["index"], other.sample()["index"]) for _ in range(20))


def test_an_empty_buffer_goes_round(tmp_path: Path) -> None:
    one, other = made(LazyTensorStorage(20)), made(LazyTensorStorage(20))
    one.dumps(tmp_path / "saved")
    other.extend(steps(0, 3))
    other.loads(tmp_path / "saved")
    with pytest.raises(RuntimeError, match="empty"):
        other.sample()
    other.extend(steps(0, 2))
    assert set(other.sample()["index"].tolist()) <= {0, 1}


def test_rows_of_a_uniform_buffer_get_the_default_priority(tmp_path: Path) -> None:
    one = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=5)
    one.extend(steps(0, 12))
    one.dumps(tmp_path / "saved")
    other = used(made(LazyTensorStorage(20)))
    other.loads(tmp_path / "saved")
    batch = other.sample()
    assert batch["priority_weight"].tolist() == [1.0] * 5
    assert torch.equal(batch["a"], batch["index"])


@pytest.mark.parametrize("size", [10, 30])
def test_another_capacity_is_refused_and_changes_nothing(size: int, tmp_path: Path) -> None:
    used(made(LazyTensorStorage(20))).dumps(tmp_path / "saved")
    one, other = used(made(LazyTensorStorage(size))), used(made(LazyTensorStorage(size)))
    with pytest.raises(RuntimeError, match="20") as refused:
        other.loads(tmp_path / "saved")
    assert isinstance(refused.value, RbtoolError)
    assert all(torch.equal(one.sample()["index"], other.sample()["index"]) for _ in range(20))


@pytest.mark.parametrize("name", ["sumtree.memmap", "sampler_metadata.json"])
def test_a_damaged_folder_changes_nothing(name: str, tmp_path: Path) -> None:
    used(made(LazyTensorStorage(20))).dumps(tmp_path / "saved")
    file = tmp_path / "saved/sampler" / name
    file.write_bytes(file.read_bytes()[:-5])
    one, other = used(made(LazyTensorStorage(20), seed=1)), used(made(LazyTensorStorage(20), seed=1))
    with pytest.raises(RbtoolError):
        other.loads(tmp_path / "saved")
    assert all(torch.equal(one.sample()["index"], other.sample()["index"]) for _ in range(20))


# TorchRL's -------------------------------------------------------------------------------------------

CASES = ["sampler_prioritized_float32", "sampler_prioritized_max_within_buffer"]


def loaded(case: str, kind: type[ReplayBuffer] = TensorDictPrioritizedReplayBuffer) -> Any:
    facts = json.loads((WRITTEN / case / "case.json").read_text())["sampler"]
    exponents = {name: facts[name] for name in ("alpha", "beta", "eps")}
    within = case.endswith("within_buffer")
    more: Any = {"sampler": PrioritizedSampler(16, **exponents, max_priority_within_buffer=True)} if within else {}
    buffer = kind(**exponents, storage=LazyMemmapStorage(16), generator=torch.Generator().manual_seed(0), **more)
    buffer.loads(WRITTEN / case / "checkpoint")
    return buffer


@pytest.mark.parametrize("kind", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
@pytest.mark.parametrize("case", CASES)
def test_a_buffer_of_torchrl_draws_by_its_weights(case: str, kind: Any) -> None:
    buffer, expected = loaded(case, kind), np.load(WRITTEN / case / "expected_sampler.npz")
    drawn, info = buffer.sampler.sample(buffer.storage, 200_000)
    index, found = drawn.numpy(), info["priority_weight"].numpy()
    weights = expected["weights"][: len(buffer)]
    shares = np.bincount(index, minlength=len(buffer)) / len(index)
    assert shares == pytest.approx(weights / expected["weight_sum"], abs=0.004)
    np.testing.assert_allclose(found, expected["importance_weights"][index], rtol=1e-5)
    with np.load(WRITTEN / case / "expected.npz") as rows:
        assert np.array_equal(buffer[:]["observation"].numpy(), rows["observation"])


@pytest.mark.parametrize("case", CASES)
def test_a_buffer_of_torchrl_goes_back_as_it_came(case: str, tmp_path: Path) -> None:
    buffer = loaded(case)
    buffer.dumps(tmp_path / "saved")
    theirs, ours = WRITTEN / case / "checkpoint/sampler", tmp_path / "saved/sampler"
    assert {entry.name for entry in theirs.iterdir()} <= {entry.name for entry in ours.iterdir()}
    for name in ("sumtree.memmap", "mintree.memmap"):
        assert np.allclose(np.fromfile(ours / name), np.fromfile(theirs / name), rtol=1e-7, atol=0)
    facts, expected = (json.loads((folder / "sampler_metadata.json").read_text()) for folder in (ours, theirs))
    assert {name: facts[name] for name in expected} == expected


@pytest.mark.parametrize("case", CASES)
def test_a_buffer_of_torchrl_goes_on(case: str) -> None:
    buffer = loaded(case)
    assert buffer.sampler.default_priority == 7.25
    buffer.add(buffer[0].clone())
    row = (buffer.writer._cursor - 1) % 16
    buffer.update_priority(torch.arange(len(buffer)), 0.0)
    buffer.update_priority(row, 1.0)
    assert set(buffer.sample(50)["index"].tolist()) == {row}


def test_a_folder_of_ours_without_the_newer_files_still_loads(tmp_path: Path) -> None:
    """What another program reads is enough for us, too."""
    shutil.copytree(WRITTEN / CASES[0] / "checkpoint", tmp_path / "copy")
    one = loaded(CASES[0])
    one.dumps(tmp_path / "saved")
    for entry in (tmp_path / "saved/sampler").iterdir():
        if not (tmp_path / "copy/sampler" / entry.name).exists():
            entry.unlink()
    other = loaded(CASES[0])
    other.loads(tmp_path / "saved")
    assert all(torch.equal(one.sample(5)["index"], other.sample(5)["index"]) for _ in range(50))
