"""Buffers with slice samplers that TorchRL saved: they go on with its trajectories, its weights and its epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.samplers.prioritized_slices import PrioritizedSliceSampler
from rbtool.core.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage

WRITTEN = Path(__file__).parents[2] / "data/torchrl_checkpoints"
DONE = ("next", "done")


def loaded(case: str, sampler: Any, capacity: int = 16, ndim: int = 1, **more: Any) -> Any:
    storage = LazyMemmapStorage(capacity, ndim=ndim)
    buffer = TensorDictReplayBuffer(
        storage=storage, sampler=sampler, generator=torch.Generator().manual_seed(0), **more
    )
    buffer.loads(WRITTEN / case / "checkpoint")
    return buffer


def slices_of(buffer: ReplayBuffer, slices: int) -> set[tuple[tuple[int, ...], ...]]:
    """The slices of a large batch, each as the coordinates of its steps."""
    buffer._batch_size = None
    _, info = buffer.sample(slices * 3, return_info=True)
    index = info["index"] if isinstance(info["index"], tuple) else (info["index"],)
    steps = [tuple(step) for step in torch.stack(index, -1).reshape(-1, len(index)).tolist()]
    ends = (info["next", "truncated"].flatten().nonzero().flatten() + 1).tolist()
    return {tuple(steps[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)}


@pytest.mark.parametrize("case", ["sampler_slice_partly", "sampler_slice_wrapped", "sampler_slice_ndim2_wrapped"])
def test_every_slice_of_its_trajectories_and_no_other_is_drawn(case: str) -> None:
    facts = json.loads((WRITTEN / case / "case.json").read_text())
    sampler = SliceSampler(slice_len=3, end_key=DONE, strict_length=False)
    buffer = loaded(case, sampler, facts["capacity"], facts["ndim"])
    theirs, rows = np.load(WRITTEN / case / "expected_sampler.npz"), facts["capacity_shape"][0]
    expected = set()
    for start, length in zip(theirs["start"].tolist(), theirs["length"].tolist(), strict=True):
        for first in range(max(1, length - 2)):
            window = range(first, first + min(3, length))
            expected.add(tuple(((start[0] + step) % rows, *start[1:]) for step in window))
    assert slices_of(buffer, 4000) == expected


def test_the_weights_of_starts_go_round(tmp_path: Path) -> None:
    case = "sampler_prioritized_slice"
    sampler = PrioritizedSliceSampler(16, alpha=0.6, beta=0.4, slice_len=2, end_key=DONE, strict_length=False)
    buffer = loaded(case, sampler, batch_size=4)
    buffer.sample()
    buffer.dumps(tmp_path / "saved")
    ours, theirs = (folder / "sampler" for folder in (tmp_path / "saved", WRITTEN / case / "checkpoint"))
    for name in ("sumtree.memmap", "mintree.memmap"):
        assert np.allclose(np.fromfile(ours / name), np.fromfile(theirs / name), rtol=1e-7, atol=0)
    assert np.fromfile(ours / "sumtree.memmap").sum() == pytest.approx(16.850658, abs=1e-5)


def test_an_epoch_of_trajectories_goes_on() -> None:
    case = "sampler_slice_without_replacement"
    sampler = SliceSamplerWithoutReplacement(slice_len=3, end_key=DONE, strict_length=False)
    buffer = loaded(case, sampler, batch_size=6)
    trajectory = torch.cat([torch.zeros(1), buffer[:]["next", "done"].flatten()[:-1].cumsum(0)]).int()
    theirs = np.load(WRITTEN / case / "expected_sampler.npz")
    assert set(theirs["remaining"].tolist()) == {0, 4, 2}
    drawn = [set(trajectory[buffer.sample()["index"].flatten()].tolist()) for _ in range(2)]
    assert drawn[0] | drawn[1] == {0, 4, 2}
    assert not drawn[0] & drawn[1]
    assert buffer.sampler.ran_out
