"""Loads by several threads: the same rows, all bytes compared, and nothing left of a load that fails."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import rbtool
from rbtool import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.checkpointers import storage_rows
from rbtool.core.encodings import rows as encoded_rows
from rbtool.core.errors import CorruptDataError, SchemaError

FORMS = {
    "flat": rbtool.FlatStorageCheckpointer,
    "nested": rbtool.NestedStorageCheckpointer,
    "h5": rbtool.H5StorageCheckpointer,
}


@pytest.fixture(autouse=True)
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than cores, and many parts to share."""
    monkeypatch.setattr(storage_rows, "threads_for_memory", lambda: 4)
    monkeypatch.setattr(encoded_rows, "LEAF_BYTES", 400)


def filled(form: str, rows: int, capacity: int) -> LazyTensorStorage:
    """A ring of episodes of 1 to 50 steps, of which some rows were written over."""
    storage = LazyTensorStorage(capacity, checkpointer=FORMS[form]())
    for start in range(0, rows, 7):
        count = min(7, rows - start)
        values = torch.rand(count, 5, dtype=torch.float64)
        ends = torch.rand(count, 1) < 0.1
        after = {"observation": values + 1, "done": ends, "reward": values[:, :1]}
        data = TensorDict({"observation": values, "next": TensorDict(after, [count])}, [count])
        storage.set(torch.arange(start, start + count) % capacity, data)
    return storage


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "capacity", "room"), [(1, 9, 9), (90, 200, 300), (200, 200, 200), (533, 200, 250)])
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_rows_come_back_bit_for_bit(form: str, rows: int, capacity: int, room: int, kind: Any, tmp_path: Path) -> None:
    saved, other = filled(form, rows, capacity), kind(room, checkpointer=FORMS[form]())
    saved.dumps(tmp_path / "saved")
    for _ in range(2):  # into an empty storage, and into one that holds rows
        other.loads(tmp_path / "saved")
        assert len(other) == len(saved)
        assert bool((other[:] == saved[:]).all())


def damaged(folder: Path) -> None:
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[-9] ^= 1
    largest.write_bytes(data)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_a_changed_byte_leaves_an_empty_storage_empty(form: str, kind: Any, tmp_path: Path) -> None:
    filled(form, 150, 200).dumps(tmp_path / "saved")
    damaged(tmp_path / "saved")
    other = kind(200, checkpointer=FORMS[form]())
    with pytest.raises(CorruptDataError, match="was changed"):
        other.loads(tmp_path / "saved")
    assert len(other) == 0
    assert not other.initialized
    whole = filled(form, 150, 200)
    whole.dumps(tmp_path / "whole")
    other.loads(tmp_path / "whole")
    assert bool((other[:] == whole[:]).all())


@pytest.mark.parametrize("form", FORMS)
def test_a_changed_byte_leaves_rows_as_they_were(form: str, tmp_path: Path) -> None:
    filled(form, 150, 200).dumps(tmp_path / "saved")
    damaged(tmp_path / "saved")
    other = filled(form, 40, 200)
    before = other[:].clone()
    with pytest.raises(CorruptDataError):
        other.loads(tmp_path / "saved")
    assert bool((other[:] == before).all())


@pytest.mark.parametrize("form", FORMS)
def test_too_many_rows_leave_an_empty_storage_empty(form: str, tmp_path: Path) -> None:
    filled(form, 150, 200).dumps(tmp_path / "saved")
    other = LazyTensorStorage(100, checkpointer=FORMS[form]())
    with pytest.raises(SchemaError):
        other.loads(tmp_path / "saved")
    assert not other.initialized
