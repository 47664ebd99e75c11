"""Saving and loading take a few megabytes, however much there is."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rbtool.core.checkpointers.episodes import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
)
from rbtool.core.storages.tensor import TensorStorage

MOST = 24 << 20


def steps(rows: int, lanes: tuple[int, ...]) -> TensorDict:
    """About 100 MB of episodes of 50 steps, in which every tenth next observation does not follow."""
    observation = torch.rand(rows + 1, *lanes, 128)
    after = observation[1:].clone()
    after[::10] += 1
    done = (torch.arange(rows) % 50 == 49).view(-1, *([1] * len(lanes)), 1).expand(rows, *lanes, 1)
    return TensorDict({"observation": observation[:-1], "next": {"observation": after, "done": done}}, [rows, *lanes])


@pytest.mark.parametrize("lanes", [(), (8,)])
@pytest.mark.parametrize(
    "kind", [FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer], ids=lambda kind: kind.form
)
def test_memory_is_bounded(tmp_path: Path, kind: type[FlatStorageCheckpointer], lanes: tuple[int, ...]) -> None:
    source = TensorStorage(steps(100_000 // (8 if lanes else 1), lanes), ndim=1 + len(lanes))
    source.last_cursor = 1_000  # as if the ring had begun anew
    target = TensorStorage(source[:].clone(), ndim=1 + len(lanes))
    tracemalloc.start()
    try:
        kind().dumps(source, tmp_path / "saved")
        assert tracemalloc.get_traced_memory()[1] < MOST
        tracemalloc.reset_peak()
        kind().loads(target, tmp_path / "saved")
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
    assert torch.equal(target[:]["next", "observation"], source[:]["next", "observation"])
