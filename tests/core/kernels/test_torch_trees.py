"""Trees of torch functions, on the CPU and on CUDA: deterministic algorithms, and what is read after a change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from rbtool.core.kernels.trees import TorchTree

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
GREATEST = 1 - 2.0**-53  # below 1


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("capacity", [1, 31, 33, 1025, 5000])
def test_deterministic_algorithms_draw_the_same(device: str, capacity: int) -> None:
    random = np.random.default_rng(capacity)
    weights = random.integers(0, 1000, capacity).astype(np.float64)
    weights[0] = 5
    tree, fractions, stops = TorchTree(capacity, device=device), random.random(1000), np.cumsum(weights)
    tree.set(torch.arange(capacity), torch.from_numpy(weights))
    expected = np.searchsorted(stops, fractions * stops[-1], side="right")
    assert tree.draw(torch.from_numpy(fractions))[0].tolist() == expected.tolist()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_deterministic_algorithms_never_draw_a_leaf_of_weight_zero(device: str, dtype: torch.dtype) -> None:
    random = np.random.default_rng(5)
    weights = 10.0 ** random.uniform(-15, 15, 3000) * (random.random(3000) < 0.4)
    tree = TorchTree(3000, dtype, device)
    tree.load(torch.from_numpy(weights))
    borders = np.cumsum(weights) / weights.sum()
    near = np.concatenate([borders, np.nextafter(borders, 0), random.random(5000), [0.0, GREATEST]])
    leaves, found = tree.draw(torch.from_numpy(near[near < 1]))
    assert (weights[leaves.cpu()] > 0).all()
    assert (found > 0).all()


CHANGES: dict[str, Callable[[TorchTree], object]] = {
    "set": lambda tree: tree.set(torch.tensor([39, 0]), torch.tensor([2.0, 3.0])),
    "fill": lambda tree: tree.fill(0, 39, 0.5),
    "load": lambda tree: tree.load(torch.ones(7)),
    "clear": TorchTree.clear,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_read_of_a_tree_is_as_of_now(device: str, change: str) -> None:
    tree = TorchTree(40, device=device)
    tree.load(torch.arange(1.0, 41.0))
    assert (tree.total, tree.minimum, tree.maximum) == (820, 1, 40)
    CHANGES[change](tree)
    weights = tree.weights().double().cpu()
    positive = weights[weights > 0]
    least = float(positive.min()) if len(positive) else math.inf
    assert (tree.total, tree.minimum, tree.maximum) == (float(weights.sum()), least, float(weights.max()))
