"""Packed datasets, recordings and lists of steps, saved in the forms of whole episodes and loaded into each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from buffers_of_episodes import BufferPlan, bits
from tensordict import TensorDict

from rbtool.core.checkpointers.episodes import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    NestedStorageCheckpointer,
)
from rbtool.core.datasets.storage import DatasetStorage
from rbtool.core.errors import CorruptDataError, SchemaError, UsageError
from rbtool.core.opening import open_steps
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import LazyStackStorage, ListStorage
from rbtool.core.storages.packed import PackedStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.datasets import ODD_LEAVES, DatasetPlan, write_plan, write_walks
from rbtool.core.verbs.convert import convert

MAKERS: dict[str, Callable[..., Any]] = {
    "flat": FlatStorageCheckpointer, "nested": NestedStorageCheckpointer, "h5": H5StorageCheckpointer,
}  # fmt: skip
any_form = pytest.mark.parametrize("form", MAKERS)
PLAN = DatasetPlan((4, 1, 6), ("terminated", "both", "truncated"), (True, False, False), ODD_LEAVES, root_flags="set")


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    write_plan(PLAN, folder / "ted")
    convert(folder / "ted", folder / "packed", layout="packed")
    write_plan(DatasetPlan((4, 1, 6), PLAN.endings, (False,) * 3, ODD_LEAVES, seed=9), folder / "other")
    return folder


# Packed datasets -----------------------------------------------------------------------------------


@any_form
def test_a_packed_dataset_is_saved_and_loaded(form: str, datasets: Path, tmp_path: Path) -> None:
    packed, ted = PackedStorage(datasets / "packed"), DatasetStorage(datasets / "ted")
    MAKERS[form]().dumps(packed, tmp_path / "saved")
    MAKERS[form]().loads(packed, tmp_path / "saved")
    for target in (LazyTensorStorage(11), LazyTensorStorage(20), ListStorage(11), ted):
        MAKERS[form]().loads(target, tmp_path / "saved")
        rows = torch.stack(target[:]) if isinstance(target, ListStorage) else target[:]
        assert bits(rows) == bits(packed[:])


@any_form
def test_its_episodes_are_those_of_the_dataset(form: str, datasets: Path, tmp_path: Path) -> None:
    MAKERS[form]().dumps(PackedStorage(datasets / "packed"), tmp_path / "saved.h5")
    with open_steps(tmp_path / "saved.h5") as saved, open_steps(datasets / "packed") as dataset:
        assert saved.episodes.length.tolist() == dataset.episodes.length.tolist()
        assert saved.manifest.boundary.explicit_next == 1


@any_form
def test_tensors_of_the_same_rows_are_loaded(form: str, datasets: Path, tmp_path: Path) -> None:
    MAKERS[form]().dumps(DatasetStorage(datasets / "ted"), tmp_path / "saved")
    MAKERS[form]().loads(PackedStorage(datasets / "packed"), tmp_path / "saved")


@any_form
def test_other_rows_are_refused(form: str, datasets: Path, tmp_path: Path) -> None:
    packed = PackedStorage(datasets / "packed")
    edited = DatasetStorage(datasets / "ted")
    edited[3:4] = edited[3:4].clone().apply(lambda leaf: leaf + 1 if leaf.dtype == torch.float32 else leaf)
    for number, (source, match) in enumerate((
        (edited, "of step 3 of .* is not that of the PackedStorage"),
        (DatasetStorage(datasets / "other"), "is not that of the PackedStorage"),
        (TensorStorage(edited[:7]), r"holds 7 steps of a storage of \[7\], this one has 11"),
        (TensorStorage(edited[:].exclude("action")), "'action' of .* is not that"),
    )):  # fmt: skip
        MAKERS[form]().dumps(source, tmp_path / str(number))
        with pytest.raises(SchemaError, match=match):
            MAKERS[form]().loads(packed, tmp_path / str(number))


@any_form
def test_a_damaged_dataset_is_not_saved(form: str, datasets: Path, tmp_path: Path) -> None:
    convert(datasets / "ted", tmp_path / "packed", layout="packed")
    packed, file = PackedStorage(tmp_path / "packed"), tmp_path / "packed" / "records.bin"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptDataError, match=r"records\.bin"):
        MAKERS[form]().dumps(packed, tmp_path / "saved")
    convert(datasets / "other", tmp_path / "packed", layout="packed", force=True)
    with pytest.raises(CorruptDataError, match="it was replaced"):
        MAKERS[form]().dumps(packed, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_hooks_have_nothing_to_work_on(datasets: Path, tmp_path: Path) -> None:
    checkpointer = FlatStorageCheckpointer()
    checkpointer.dumps(PackedStorage(datasets / "packed"), tmp_path / "saved")
    checkpointer.register_load_hook(lambda data, out: data)
    checkpointer.register_save_hook(lambda data, path: data)
    for call in (checkpointer.dumps, checkpointer.loads):
        with pytest.raises(UsageError, match="hooks change the rows of tensors, found a PackedStorage"):
            call(PackedStorage(datasets / "packed"), tmp_path / "saved")


@any_form
def test_torchrl_gets_what_it_can_hold(form: str, datasets: Path, tmp_path: Path) -> None:
    write_walks(tmp_path / "ted", [(4, "terminated"), (3, "truncated")])
    convert(tmp_path / "ted", tmp_path / "packed", layout="packed")
    packed = PackedStorage(tmp_path / "packed")
    MAKERS[form](compatible=True).dumps(packed, tmp_path / "saved")
    MAKERS[form]().loads(packed, tmp_path / "saved")
    target = LazyTensorStorage(7)
    MAKERS[form]().loads(target, tmp_path / "saved")
    assert bits(target[:].select(*packed[:].keys(True, True))) == bits(packed[:])
    with pytest.raises(SchemaError, match="TorchRL's layout cannot hold"):
        MAKERS[form](compatible=True).dumps(PackedStorage(datasets / "packed"), tmp_path / "other")


# Recordings ----------------------------------------------------------------------------------------


def recorded(folder: Path) -> tuple[Any, TensorDict]:
    """A recording of two episodes, the second under way, and its rows."""
    rows = BufferPlan(9, (9,), ends=0.0).rows(np.random.default_rng(0), 9)
    for flag in ("done", "terminated"):
        rows["next", flag][4] = True
    recording = PackedStorage.create(folder)
    recording.set(range(3), rows[:3])
    recording.set(range(3, 9), rows[3:])
    return recording, rows


@any_form
@pytest.mark.parametrize("finished", [False, True])
def test_a_recording_is_saved(form: str, finished: bool, tmp_path: Path) -> None:
    recording, _ = recorded(tmp_path / "recording")
    if finished:
        recording.finish()
    MAKERS[form]().dumps(recording, tmp_path / "saved")
    MAKERS[form]().loads(recording, tmp_path / "saved")
    target = LazyTensorStorage(20)
    MAKERS[form]().loads(target, tmp_path / "saved")
    assert bits(target[:]) == bits(recording[:])
    with open_steps(next((tmp_path / "saved").glob("*.h5"), tmp_path / "saved")) as saved:
        assert saved.episodes.length.tolist() == [5, 4]


def test_a_recording_that_went_on_is_not_taken_back(tmp_path: Path) -> None:
    recording, rows = recorded(tmp_path / "recording")
    FlatStorageCheckpointer().dumps(recording, tmp_path / "saved")
    recording.set(9, rows[0])
    with pytest.raises(SchemaError, match="this one has 10 and cannot be written to"):
        FlatStorageCheckpointer().loads(recording, tmp_path / "saved")
    with pytest.raises(SchemaError, match="recording is empty"):
        FlatStorageCheckpointer().dumps(PackedStorage.create(tmp_path / "empty"), tmp_path / "nothing")


# Lists ---------------------------------------------------------------------------------------------


def listed(kind: type[ListStorage], capacity: int, plan: BufferPlan) -> ListStorage:
    storage = kind(capacity)
    for row, step in enumerate(plan.rows(np.random.default_rng(plan.seed), 13).unbind(0)):
        storage.set(row % capacity, step.clone())
    return storage


@any_form
@pytest.mark.parametrize("kind", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("capacity", [8, 13, 20])
def test_a_list_of_steps_is_saved_and_loaded(form: str, kind: type[ListStorage], capacity: int, tmp_path: Path) -> None:
    plan = BufferPlan(13, (13,), oddities=("jumps", "types", "root flags", "next only"), seed=3)
    source, target = listed(kind, capacity, plan), kind(capacity + 2)
    MAKERS[form]().dumps(source, tmp_path / "saved")
    MAKERS[form]().loads(target, tmp_path / "saved")
    assert [bits(item) for item in target] == [bits(item) for item in source]
    assert target.last_cursor == source.last_cursor
    tensors = LazyTensorStorage(capacity)
    MAKERS[form]().loads(tensors, tmp_path / "saved")
    assert bits(tensors[:]) == bits(torch.stack(list(source)))
    with pytest.raises(SchemaError, match="room for 3"):
        MAKERS[form]().loads(kind(3), tmp_path / "saved")
    assert target[0].batch_size == torch.Size([])


@any_form
@pytest.mark.parametrize(
    ("items", "match"),
    [
        (["a text"], "row 0 of the list is a str"),
        ([{"a": torch.zeros(1)}], "row 0 of the list is a dict"),
        ([TensorDict({"a": torch.zeros(3)}, [3])], r"row 0 of the list is batch size \[3\]"),
        ([TensorDict({"a": torch.zeros(3)}), TensorDict({"a": torch.zeros(4)})], "row 1 of the list has other entries"),
        ([TensorDict({"a": torch.zeros(3)}), TensorDict({"b": torch.zeros(3)})], "row 1 of the list has other entries"),
    ],
)
def test_lists_of_other_things_are_refused(form: str, items: list[Any], match: str, tmp_path: Path) -> None:
    storage = ListStorage(5)
    storage.set(range(len(items)), items)
    with pytest.raises(SchemaError, match=match) as raised:
        MAKERS[form]().dumps(storage, tmp_path / "saved")
    assert "ListStorageCheckpointer" in raised.value.hint


def test_lanes_are_no_list(tmp_path: Path) -> None:
    FlatStorageCheckpointer().dumps(BufferPlan(4, (4,), (2,)).buffer()._storage, tmp_path / "saved")
    with pytest.raises(SchemaError, match="ndim=2, a list has ndim=1"):
        FlatStorageCheckpointer().loads(ListStorage(8), tmp_path / "saved")


# Many and odd datasets of TorchRL's H5 layout ------------------------------------------------------


def test_numbers_of_another_byte_order_and_compressed_ones_are_read(tmp_path: Path) -> None:
    plan = BufferPlan(40, (40,), ends=0.5)
    H5StorageCheckpointer(compatible=True).dumps(plan.buffer()._storage, tmp_path / "saved.h5")
    with h5py.File(tmp_path / "saved.h5", "r+") as h5:
        for name in [name for name in h5 if name.startswith("traj")]:
            action, reward = h5[name]["action"][:], h5[name]["reward"][:]
            del h5[name]["action"], h5[name]["reward"]
            h5[name].create_dataset("action", data=action.astype(">f4"))
            h5[name].create_dataset("reward", data=reward, compression="gzip")
    target = plan.storage()
    H5StorageCheckpointer().loads(target, tmp_path / "saved.h5")
    source = plan.buffer()._storage[:]
    assert torch.equal(target[:]["action"], source["action"])
    assert torch.equal(target[:]["next", "reward"], source["next", "reward"])


def test_the_same_rows_are_the_same_bytes(tmp_path: Path) -> None:
    storage = BufferPlan(40, (25,), ends=0.5).buffer()._storage
    H5StorageCheckpointer(compatible=True).dumps(storage, tmp_path / "one.h5")
    time.sleep(1.1)  # HDF5 would write the time, in seconds
    H5StorageCheckpointer(compatible=True).dumps(storage, tmp_path / "other.h5")
    assert (tmp_path / "one.h5").read_bytes() == (tmp_path / "other.h5").read_bytes()
