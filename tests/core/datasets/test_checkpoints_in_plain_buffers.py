"""What buffers on datasets and on recordings save goes into plain buffers, which write on behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from damage import without_digests

from rbtool.core.buffers.replay_buffer import ReplayBuffer
from rbtool.core.buffers.tensordict import TensorDictReplayBuffer
from rbtool.core.checkpointers.episodes import FlatStorageCheckpointer, H5StorageCheckpointer
from rbtool.core.datasets.buffer import load_dataset
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.packed import PackedStorage
from rbtool.core.verbs.convert import convert
from rbtool.core.writers.max_value import TensorDictMaxValueWriter


def plain(capacity: int, kind: Any = FlatStorageCheckpointer, **how: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(capacity, checkpointer=kind()), **how)


@pytest.mark.parametrize("kind", [FlatStorageCheckpointer, H5StorageCheckpointer])
@pytest.mark.parametrize("layout", ["ted", "packed"])
@pytest.mark.parametrize("more", [0, 5])
def test_rows_of_a_dataset_go_into_a_plain_buffer(
    walks: Path, tmp_path: Path, kind: Any, layout: str, more: int
) -> None:
    convert(walks, tmp_path / "dataset", layout=layout)
    source = load_dataset(tmp_path / "dataset")
    source._storage.checkpointer = kind()
    source.dumps(tmp_path / "saved")
    target = plain(len(source) + more, kind)
    target.loads(tmp_path / "saved")
    assert torch.equal(target[:]["observation"], source[:]["observation"])
    row = target[:1].clone()
    assert target.extend(row).tolist() == [len(source) if more else 0]
    assert target.write_count == len(source) + 1
    source.loads(tmp_path / "saved")


def test_a_ranking_is_made_of_the_rows(walks: Path, tmp_path: Path) -> None:
    source = load_dataset(walks)
    source._storage.checkpointer = FlatStorageCheckpointer()
    source.dumps(tmp_path / "saved")
    writer = TensorDictMaxValueWriter(rank_key=("next", "reward"))
    target = TensorDictReplayBuffer(
        storage=LazyTensorStorage(len(source), checkpointer=FlatStorageCheckpointer()), writer=writer
    )
    target.loads(tmp_path / "saved")
    lowest = int(target[:]["next", "reward"].argmin())
    row = target[:1].clone()
    row["next", "reward"][:] = 1e6
    target.extend(row)
    assert float(target[:]["next", "reward"][lowest]) == 1e6


def test_a_writer_whose_state_was_lost_is_still_found(tmp_path: Path, walks: Path) -> None:
    buffer = plain(20)
    buffer.extend(load_dataset(walks)[:])
    buffer.dumps(tmp_path / "saved")
    (tmp_path / "saved" / "writer" / "metadata.json").unlink()
    with pytest.raises(CorruptDataError, match=r"metadata\.json is missing"):
        plain(20).loads(tmp_path / "saved")
    with pytest.raises(DatasetNotFoundError, match="no writer's state"):
        plain(20).loads(without_digests(tmp_path / "saved"))


def test_a_recording_is_saved_by_its_buffer(tmp_path: Path, walks: Path) -> None:
    rows = load_dataset(walks)[:]
    buffer = ReplayBuffer(storage=PackedStorage.create(tmp_path / "recording"))
    buffer.extend(rows)
    buffer.dumps(tmp_path / "saved")
    target = plain(len(rows))
    target.loads(tmp_path / "saved")
    assert torch.equal(target[:]["action"], rows["action"])
