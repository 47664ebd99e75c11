"""Beside TorchRL: its transforms in our buffers, our folders in its buffers, and the other way round."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool.core.transforms.base import Compose

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    data = pytest.importorskip("torchrl.data")
    transforms = pytest.importorskip("torchrl.envs.transforms")


def steps(count: int = 7) -> TensorDict:
    rows = torch.arange(count)
    inner = {"reward": rows.float().unsqueeze(-1), "done": torch.zeros(count, 1, dtype=torch.bool)}
    return TensorDict({"a": rows, "observation": rows.double().unsqueeze(-1), "next": inner}, [count])


def test_its_transforms_in_our_buffers() -> None:
    change = transforms.DoubleToFloat(in_keys=["observation"], in_keys_inv=["observation"])
    for made in (change, transforms.Compose(change), Compose(change)):
        buffer = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(10), transform=made, batch_size=4)
        buffer.extend(steps().set("observation", steps()["observation"].float()))
        assert buffer.storage[:]["observation"].dtype == torch.float64
        assert buffer[:]["observation"].dtype == buffer.sample()["observation"].dtype == torch.float32
    renamed = rbtool.TensorDictReplayBuffer(
        storage=rbtool.LazyTensorStorage(10), transform=transforms.RenameTransform(["a"], ["b"]), batch_size=4
    )
    renamed.extend(steps())
    assert torch.equal((batch := renamed.sample())["b"], batch["index"])


def arguments(ours: bool, **more: Any) -> dict[str, Any]:
    home = rbtool if ours else data
    storage = home.LazyTensorStorage(10, ndim=more.pop("ndim", 1))
    sampler = (rbtool if ours else data).SamplerWithoutReplacement()
    module = torch.nn.Linear(1, 1)
    return {"storage": storage, "sampler": sampler, "transform": _Add(module), "batch_size": 3, **more}


class _Add(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: TensorDict) -> TensorDict:
        return batch.set("added", self.module(batch["next", "reward"]))


@pytest.mark.parametrize(("way", "ours_first"), [("folder", True), ("folder", False), ("state", False)])
@pytest.mark.parametrize("name", ["ReplayBuffer", "TensorDictReplayBuffer"])
def test_buffers_go_over(ours_first: bool, name: str, way: str, tmp_path: Path) -> None:
    homes = {True: rbtool, False: data}
    generator = torch.Generator().manual_seed(5)
    one = getattr(homes[ours_first], name)(**arguments(ours_first, generator=generator))
    other = getattr(homes[not ours_first], name)(**arguments(not ours_first, generator=torch.Generator()))
    one.extend(steps(13))
    one.sample()
    if way == "folder":
        if ours_first:
            one.storage.checkpointer = rbtool.TensorStorageCheckpointer(compatible=True)
        one.dumps(tmp_path / "saved")
        other.loads(tmp_path / "saved")
    else:
        other.load_state_dict(one.state_dict())
    assert (one[:] == other[:]).all()
    assert (len(other), other.write_count, other._writer._cursor, other.batch_size) == (10, 13, 3, 3)
    assert torch.equal(one._rng.get_state(), other._rng.get_state())
    assert [sorted(one.sample()["a"].tolist()) for _ in range(3)] == [
        sorted(other.sample()["a"].tolist()) for _ in range(3)
    ]
    other.extend(steps(2))
    assert other[:]["a"][3:5].tolist() == [0, 1]


def test_two_dimensions_go_over(tmp_path: Path) -> None:
    batch = TensorDict({"a": torch.arange(24).reshape(2, 12)}, [2, 12])
    ours = rbtool.TensorDictReplayBuffer(storage=rbtool.LazyMemmapStorage(20, ndim=2))
    theirs = data.TensorDictReplayBuffer(storage=data.LazyMemmapStorage(20, ndim=2))
    assert torch.equal(ours.extend(batch), theirs.extend(batch))
    assert (ours[:] == theirs[:]).all()
    ours.storage.checkpointer = rbtool.TensorStorageCheckpointer(compatible=True)
    ours.dumps(tmp_path / "ours")
    theirs.loads(tmp_path / "ours")
    assert (ours[:] == theirs[:]).all()
    theirs.dumps(tmp_path / "theirs")
    ours.loads(tmp_path / "theirs")
    assert (ours[:] == theirs[:]).all()
    assert json.loads((tmp_path / "ours/writer/metadata.json").read_text())["cursor"] == ours.writer._cursor == 2


@pytest.mark.parametrize("written", [False, True])
def test_torchrl_fails_on_our_own_form(tmp_path: Path, written: bool) -> None:
    ours = rbtool.ReplayBuffer(storage=rbtool.LazyTensorStorage(10))
    theirs = data.ReplayBuffer(storage=data.LazyTensorStorage(10))
    ours.extend(steps(13))
    ours.dumps(tmp_path / "saved")
    if written:
        theirs.extend(steps(3))
    with pytest.raises(FileNotFoundError, match=r"storage_metadata\.json"):
        theirs.loads(tmp_path / "saved")
