"""What a dump waits for, by `durable`, and that it is the same checkpoint with any."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip
from tensordict import TensorDict

import rbtool
from rbtool import LazyTensorStorage, TensorDictReplayBuffer
from rbtool.core.errors import CorruptDataError, UsageError

KINDS: dict[str, Callable[[], Any]] = {
    "default": rbtool.TensorStorageCheckpointer,
    "flat": rbtool.FlatStorageCheckpointer,
    "nested": rbtool.NestedStorageCheckpointer,
    "h5": rbtool.H5StorageCheckpointer,
    "compatible": lambda: rbtool.FlatStorageCheckpointer(compatible=True),
}


def rows(size: int) -> TensorDict:
    """Episodes of five steps."""
    state = torch.arange(size + 1).double().repeat(3, 1).T
    after = {"observation": state[1:], "done": (torch.arange(size) % 5 == 4).unsqueeze(-1), "reward": state[:-1, :1]}
    return TensorDict({"observation": state[:-1], "next": TensorDict(after, [size])}, [size])


def buffer_of(kind: str, size: int = 25) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40, checkpointer=KINDS[kind]()), batch_size=4)
    if size:
        buffer.extend(rows(size))
    return buffer


@pytest.mark.parametrize("kind", KINDS)
def test_each_level_waits_for_what_it_promises(kind: str, tmp_path: Path, synced: list[str]) -> None:
    waited = {}
    for durable in ("none", "data", "full"):
        synced.clear()
        buffer_of(kind).dumps(tmp_path / durable, durable=durable)  # type: ignore[arg-type]
        waited[durable] = {name: synced.count(name) for name in set(synced)}
    files = sum(path.is_file() for path in (tmp_path / "full").rglob("*"))
    folders = sum(path.is_dir() for path in (tmp_path / "full").rglob("*")) + 1
    assert waited["none"] == {}
    assert waited["data"]["file"] == waited["full"]["file"] == files
    assert "folder" not in waited["data"]
    assert waited["full"]["folder"] == folders + 1  # the one around it holds the name


@pytest.mark.parametrize("durable", ["none", "data", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_checkpoint_has_its_digests_with_each_level(kind: str, durable: Any, tmp_path: Path) -> None:
    saved, other = buffer_of(kind), buffer_of(kind, 0)
    saved.dumps(tmp_path / "saved", durable=durable)
    other.loads(tmp_path / "saved")
    assert torch.equal(other[:]["next", "observation"], saved[:]["next", "observation"])
    largest = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    flip(largest, largest.stat().st_size - 1)
    with pytest.raises(CorruptDataError):
        buffer_of(kind, 0).loads(tmp_path / "saved")


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_saves_itself_with_each_level(kind: str, tmp_path: Path, synced: list[str]) -> None:
    storage = buffer_of(kind).storage
    storage.dumps(tmp_path / "saved", durable="none")
    assert synced == []
    storage.dumps(tmp_path / "saved", durable="full")
    assert {"file", "folder"} <= set(synced)


def test_an_ensemble_saves_its_members_with_one_level(tmp_path: Path, synced: list[str]) -> None:
    ensemble = rbtool.ReplayBufferEnsemble(buffer_of("default"), buffer_of("flat"), batch_size=4)
    ensemble.dumps(tmp_path / "saved", durable="none")
    assert synced == []


def test_a_checkpointer_for_torchrl_needs_no_levels(tmp_path: Path, synced: list[str]) -> None:
    class Plain(rbtool.StorageCheckpointerBase):
        def dumps(self, storage: Any, path: Any) -> None:
            Path(path).mkdir()
            torch.save(len(storage), Path(path) / "rows.pt")

        def loads(self, storage: Any, path: Any) -> None:
            raise NotImplementedError

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(40, checkpointer=Plain()), batch_size=4)
    buffer.extend(rows(5))
    buffer.dumps(tmp_path / "none", durable="none")
    assert synced == []
    buffer.dumps(tmp_path / "full")
    assert {"file", "folder"} <= set(synced)


@pytest.mark.parametrize("durable", ["fully", "", None, True])
def test_another_level_is_refused(durable: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'none', 'data' or 'full'"):
        buffer_of("default").dumps(tmp_path / "saved", durable=durable)
    assert list(tmp_path.iterdir()) == []
