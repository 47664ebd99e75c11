"""Stacks of frames of datasets, recordings and mixtures, against a walk through the episode table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streams import stream_buffer

import rbtool
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.loading.loader import TorchLoader
from rbtool.core.loading.torch_dataset import torch_dataset
from rbtool.core.open_steps import open_steps
from rbtool.core.samplers.slices import SliceSampler
from rbtool.core.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from rbtool.core.storages.dataset import MappedSteps, StepStorage
from rbtool.core.storages.packed import PackedStorage
from rbtool.core.testing.datasets import write_mixture, write_packed, write_walks
from rbtool.core.transforms.base import Compose
from rbtool.core.transforms.windows import StoredFrameStack

EPISODES = [(9, "terminated"), (3, "truncated"), (1, "both"), (1, "terminated"), (12, "open"), (4, "terminated")]
STEPS = 30
N = 4


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same episodes in both layouts, and packed with compressed observations."""
    work = tmp_path_factory.mktemp("walks")
    write_walks(work / "ted", EPISODES)  # type: ignore[arg-type]
    write_packed(work / "ted", work / "small", "observation=zstd:3")
    write_packed(work / "ted", work / "packed")
    return work


def walked(path: Path, padding: str) -> dict[str, np.ndarray[Any, Any]]:
    """The stacks of all steps, episode by episode."""
    with open_steps(path) as reader:
        table = reader.episodes
        now, then = (reader.read(key, 0, STEPS) for key in (("observation",), ("next", "observation")))
    root, following = np.zeros((STEPS, N, 3)), np.zeros((STEPS, N, 3))
    for start, length in zip(table.start.tolist(), table.length.tolist(), strict=True):
        filling = [now[start] if padding == "same" else np.zeros(3)] * N
        for step in range(start, start + length):
            frames = [*filling, *now[start : step + 1]]
            root[step] = frames[-N:]
            following[step] = [*root[step][1:], then[step]]
    return {"root": root, "next": following}


def require_walked(batch: Any, path: Path, padding: str = "constant") -> None:
    index, expected = batch["index"].reshape(-1).numpy(), walked(path, padding)
    assert np.array_equal(batch["observation"].reshape(-1, N, 3).numpy(), expected["root"][index])
    assert np.array_equal(batch["next", "observation"].reshape(-1, N, 3).numpy(), expected["next"][index])


def stack(padding: Any = "constant") -> StoredFrameStack:
    return StoredFrameStack(N, "observation", dim=-2, padding=padding)


@pytest.mark.parametrize("padding", ["same", "constant"])
@pytest.mark.parametrize("layout", ["ted", "packed", "small"])
def test_datasets(walks: Path, layout: str, padding: str) -> None:
    for sampler in (RandomSampler(), SamplerWithoutReplacement(), SliceSampler(slice_len=3)):
        buffer = load_dataset(walks / layout, 30, sampler=sampler, transform=stack(padding), seed=1)
        for _ in range(5):
            require_walked(buffer.sample(), walks / layout, padding)
    everything = buffer[:]
    everything["index"] = torch.arange(STEPS)
    require_walked(everything, walks / layout, padding)


STORAGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "mapped": ("ted", MappedSteps),
    "read row by row": ("ted", StepStorage),
    "views": ("packed", lambda reader: PackedStorage(reader, views=True)),
    "advised": ("small", lambda reader: PackedStorage(reader, larger_than_memory=True)),
}


@pytest.mark.parametrize("name", STORAGES)
def test_every_storage_of_a_dataset_is_stacked(walks: Path, name: str) -> None:
    layout, kind = STORAGES[name]
    with open_steps(walks / layout) as reader:
        require_walked(
            TensorDictReplayBuffer(storage=kind(reader), transform=stack(), batch_size=64).sample(), walks / layout
        )


def test_a_growing_recording_is_stacked(walks: Path, tmp_path: Path) -> None:
    rows, start = load_dataset(walks / "ted")[:], 0
    buffer = TensorDictReplayBuffer(storage=PackedStorage.create(tmp_path / "new"), transform=stack(), batch_size=64)
    for count in (5, 4, 3, 2, 7, 5):  # the last episode is under way
        buffer.extend(rows[start : start + count].exclude("episode"))
        start += count
        batch = buffer.sample()
        require_walked(batch, walks / "ted")
        assert int(batch["index"].max()) < start


@pytest.mark.parametrize("layout", ["ted", "packed"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_loaders_are_stacked(walks: Path, layout: str, workers: int) -> None:
    batches = list(TorchLoader(torch_dataset(walks / layout, 8, transform=stack(), seed=3), num_workers=workers))
    assert sorted(torch.cat([batch["index"] for batch in batches]).tolist()) == list(range(STEPS))
    for batch in batches:
        require_walked(batch, walks / layout)


def test_a_mixture_stacks_in_its_datasets(walks: Path, tmp_path: Path) -> None:
    write_mixture(tmp_path / "mix.toml", walks / "ted", walks / "packed")
    doubled = Compose(stack(), lambda batch: batch.set("observation", batch["observation"] * 2))
    batch = load_dataset(tmp_path / "mix.toml", 40, transform=doubled, seed=0).sample()
    assert set(batch["source_id"].tolist()) == {0, 1}
    batch["observation"] = batch["observation"] / 2
    batch["index"] = batch["index", "index"]
    require_walked(batch, walks / "ted")


def test_a_dataset_and_online_steps_are_stacked_together(walks: Path) -> None:
    buffer = rbtool.OfflineToOnlineReplayBuffer(
        walks / "packed", online_capacity=30, batch_size=40, transform=Compose(stack(), lambda batch: batch), seed=0
    )
    buffer.extend(load_dataset(walks / "ted")[:])
    batch = buffer.sample()
    assert batch["source_id"].tolist() == [0] * 20 + [1] * 20
    batch["index"] = batch["index", "index"]
    require_walked(batch, walks / "ted")


@pytest.mark.parametrize("known", [True, False])
def test_the_frames_of_a_stream_end_at_its_episodes(known: bool) -> None:
    lengths = [[3, 1], [], [4], [2, 2, 5]]
    buffer = stream_buffer(lengths, rbtool.StreamSampler(window=2, seed=1), 5, known=known)
    buffer.append_transform(StoredFrameStack(3, "x", dim=-1, padding_value=-1))
    for batch in buffer:
        newest = batch["x"][:, -1].clone()
        begins = torch.tensor([0, 3, 4, 8, 10, 12])
        begin = begins[torch.searchsorted(begins, newest, right=True) - 1]
        for back in (1, 2):
            expected = torch.where(newest - back >= begin, newest - back, -1)
            assert torch.equal(batch["x"][:, -1 - back], expected)
