"""Batches arrive on the device, the same as without one, of mixtures too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch_streams import contents, opened, rows

import rbtool
from rbtool.core.testing.datasets import write_mixture

Walks = Callable[[str], Path]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


@pytest.mark.parametrize("ahead", [0, 1, 3, 100])
@pytest.mark.parametrize("sampler", ["without replacement", "slices"])
@pytest.mark.parametrize("device", DEVICES)
def test_batches_on_a_device_are_those_of_the_dataset(walks: Walks, device: str, sampler: str, ahead: int) -> None:
    expected = contents(opened(walks("ragged"), sampler))
    loader = rbtool.TorchLoader(opened(walks("ragged"), sampler), device=device, prefetch=ahead)
    batches = list(loader)
    assert {batch.device.type for batch in batches} == {device}
    assert all(value.device.type == device for batch in batches for value in batch.values(True, True))
    assert contents(batches) == expected


@pytest.mark.parametrize("device", DEVICES)
def test_batches_on_their_way_are_not_taken_yet(walks: Walks, device: str) -> None:
    loader = rbtool.TorchLoader(opened(walks("ragged")), device=device, prefetch=4)
    batches = iter(loader)
    first = [next(batches), next(batches)]
    again = rbtool.TorchLoader(opened(walks("ragged"), seed=99))
    again.load_state_dict(loader.state_dict())
    assert rows([*first, *again]) == rows(opened(walks("ragged")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_before_the_first_batch(walks: Walks) -> None:
    with pytest.raises(ValueError, match="which PyTorch does not find"):
        rbtool.TorchLoader(opened(walks("ragged")), device="cuda")


def test_workers_cannot_read_rows_on_the_gpu(walks: Walks) -> None:
    dataset = opened(walks("ragged"))
    dataset.buffer.storage.device = torch.device("cuda:0")
    with pytest.raises(ValueError, match="rows are on cuda:0"):
        rbtool.TorchLoader(dataset, num_workers=1)
    rbtool.TorchLoader(dataset)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("options", [{}, {"pin_memory": True}])
def test_rows_on_the_gpu_arrive_as_they_are(ahead: int, options: dict[str, bool]) -> None:
    made = [
        rbtool.ReplayBuffer(
            storage=rbtool.LazyTensorStorage(40, device=device), sampler=rbtool.SamplerWithoutReplacement()
        )
        for device in ("cuda", "cpu")
    ]  # fmt: skip
    found = []
    for buffer in made:
        buffer.extend(TensorDict({"a": torch.arange(40)}, [40]))
        loader = rbtool.TorchLoader(rbtool.torch_dataset(buffer, 8, seed=0), device="cuda", prefetch=ahead, **options)
        found.append([batch["a"] for batch in loader])
    assert all(batch.is_cuda for batches in found for batch in batches)
    assert torch.equal(torch.cat(found[0]), torch.cat(found[1]))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mixture_file_is_loaded(walks: Walks, tmp_path: Path, workers: int) -> None:
    write_mixture(tmp_path / "m.toml", walks("ragged"), walks("truncated"))
    made = [rbtool.torch_dataset(tmp_path / "m.toml", 8, sampler=None, seed=1, batches=20) for _ in range(2)]
    found = [list(rbtool.TorchLoader(one, num_workers=workers)) for one in made]
    assert contents(found[0]) == contents(found[1])
    sources = torch.cat([batch["source_id"].flatten() for batch in found[0]])
    assert sources.shape == (160,)
    assert 50 <= int((sources == 0).sum()) <= 110
