"""The specs of the rows of datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rbtool.core.datasets.buffer import DatasetReplayBuffer
from rbtool.core.datasets.load_dataset import load_dataset
from rbtool.core.specs.bounded import Bounded, Unbounded
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.testing.datasets import relist, write_walks

BOX = {"type": "Box", "shape": [2], "dtype": "float64", "low": -1.0, "high": 1.0}
OPEN = {"type": "Box", "shape": [3], "dtype": "float64", "low": "-inf", "high": "inf"}


def walks(folder: Path, spaces: Any) -> Any:
    write_walks(folder / "walks", [(10, "terminated"), (3, "truncated")])
    relist(folder / "walks", spaces=spaces)
    return load_dataset(folder / "walks", batch_size=4)


def test_every_field_has_a_spec_of_its_type_and_shape(tmp_path: Path) -> None:
    data = walks(tmp_path, {"action": BOX, "observation": OPEN})
    assert data.specs["action"] == Bounded(-1, 1, (2,), dtype=torch.float32)
    assert data.specs["observation"] == data.specs["next", "observation"] == Unbounded((3,), dtype=torch.float64)
    assert data.specs["next", "done"] == Unbounded((1,), dtype=torch.bool)
    batch = data.sample()
    assert set(data.specs.keys(True, True)) <= {*batch.keys(True, True)}
    action = data.specs.pop("action")
    assert data.specs.is_in(batch)
    assert action.is_in(action.project(batch["action"]))


@pytest.mark.parametrize(
    "space",
    [
        None,
        {"type": "Text"},
        {"type": "Box", "shape": [5], "dtype": "float32", "low": 0, "high": 1},
        {"type": "Dict", "subspaces": {"other": BOX}},
    ],
)
def test_a_space_that_does_not_fit_the_field_leaves_it_open(tmp_path: Path, space: Any) -> None:
    spaces = {} if space is None else {"action": space}
    assert walks(tmp_path, spaces).specs["action"] == Unbounded((2,), dtype=torch.float32)


def test_rows_in_memory_have_no_recorded_spec() -> None:
    with pytest.raises(RuntimeError, match="no dataset on disk"):
        _ = DatasetReplayBuffer(storage=LazyTensorStorage(3)).specs
