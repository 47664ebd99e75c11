"""What checkpointers of whole episodes refuse: in one sentence, with everything left as it was."""

from __future__ import annotations

import shutil
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
from rbtool.core.errors import (
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    MissingKeyError,
    OutOfSpaceError,
    RbtoolError,
    SchemaError,
    UsageError,
)
from rbtool.core.format.manifest import MANIFEST, Manifest
from rbtool.core.storages.lazy_tensor import LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.datasets import write_walks

PLAN = BufferPlan(8, (8, 3), ends=0.4, seed=1, oddities=("jumps", "types"))
MAKERS: dict[str, Callable[..., Any]] = {
    "flat": FlatStorageCheckpointer, "nested": NestedStorageCheckpointer, "h5": H5StorageCheckpointer,
}  # fmt: skip
any_form = pytest.mark.parametrize("form", MAKERS)


def saved(form: str, path: Path, plan: BufferPlan = PLAN) -> Path:
    MAKERS[form]().dumps(plan.buffer()._storage, path)
    return path


def refused(form: str, path: Path, error: type[RbtoolError], match: str, plan: BufferPlan = PLAN) -> None:
    """Load into a full storage and an empty one; neither may change."""
    full, empty = plan.buffer()._storage, plan.storage()
    before = bits(full[:])
    for target in (full, empty):
        with pytest.raises(error, match=match) as raised:
            MAKERS[form]().loads(target, path)
        assert str(raised.value).count("\n") == 0
    assert bits(full[:]) == before
    assert not empty.initialized


# Loading -------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("form", ["flat", "nested"])
@pytest.mark.parametrize(
    ("damage", "error", "match"),
    [
        (lambda f: _cut(f / "observation.memmap"), CorruptDataError, "bytes"),
        (lambda f: (f / "action.memmap").unlink(), CorruptDataError, "missing"),
        (lambda f: (f / MANIFEST).unlink(), CorruptDataError, "manifest is missing"),
        (lambda f: _cut(f / "storage_metadata.json"), CorruptDataError, "bytes"),
        (lambda f: (f / "storage_metadata.json").unlink(), CorruptDataError, "missing"),
        (lambda f: (f / MANIFEST).write_text("{}"), FormatError, "no rbtool manifest"),
        (lambda f: (f / ".rbtool/episodes/length.memmap").unlink(), CorruptDataError, "missing"),
    ],
)
def test_damage_is_named(
    tmp_path: Path, form: str, damage: Callable[[Path], object], error: type[RbtoolError], match: str
) -> None:
    damage(saved(form, tmp_path / "saved"))
    refused(form, tmp_path / "saved", error, match)


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_swapped_fields_are_found(tmp_path: Path, form: str) -> None:
    folder = saved(form, tmp_path / "saved")
    one, other = folder / "done.memmap", folder / "terminated.memmap"
    held = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(held)
    refused(form, folder, CorruptDataError, "changed after it was written")


def test_a_missing_shape_table_is_found(tmp_path: Path) -> None:
    folder = saved("nested", tmp_path / "saved")
    (folder / "observation.shape.memmap").unlink()
    refused("nested", folder, CorruptDataError, "missing")


def test_mixed_lanes_are_found(tmp_path: Path) -> None:
    flat = saved("flat", tmp_path / "saved", BufferPlan(4, (4,), (2,), ends=0.0))
    path = flat / "observation.memmap"
    rows = np.fromfile(path, np.float64).reshape(2, -1)
    rows[::-1].tofile(path)
    refused("flat", flat, CorruptDataError, "changed", BufferPlan(4, (4,), (2,)))


@any_form
@pytest.mark.parametrize("cut", [1, 1000, 0.5])
def test_a_cut_h5_file_is_found(tmp_path: Path, form: str, cut: float) -> None:
    path = saved("h5", tmp_path / "saved.h5")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * cut) if cut < 1 else -int(cut)])
    refused("h5", path, CorruptDataError, "cut")
    if form != "h5":
        refused(form, path, FormatError, "writes a folder")


def test_an_h5_file_of_somebody_else_is_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as h5:
        h5["observation"] = np.arange(3)
    refused("h5", tmp_path / "other.h5", FormatError, "that rbtool did not write")


@any_form
def test_the_checkpoint_of_another_form_is_named(tmp_path: Path, form: str) -> None:
    for other in {*MAKERS} - {form}:
        refused(form, saved(other, tmp_path / other), FormatError, f"{other.capitalize()}StorageCheckpointer")
    PLAN.buffer()._storage.dumps(tmp_path / "plain")
    refused(form, tmp_path / "plain", FormatError, "TensorStorageCheckpointer")
    with pytest.raises(FormatError, match=f"{form.capitalize()}StorageCheckpointer"):
        PLAN.storage().loads(saved(form, tmp_path / "mine"))


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_a_dataset_and_a_plain_folder_are_named(tmp_path: Path, form: str) -> None:
    write_walks(tmp_path / "dataset", [(5, "terminated")])
    refused(form, tmp_path / "dataset", FormatError, "is a dataset in layout ted")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/notes.txt").write_text("mine")
    refused(form, tmp_path / "plain", FormatError, "is no checkpoint")


@any_form
def test_where_nothing_is_there_is_nothing(tmp_path: Path, form: str) -> None:
    refused(form, tmp_path / "absent", DatasetNotFoundError, "absent")


@pytest.mark.parametrize("name", ["empty", "text", "text.h5"])
@any_form
def test_where_something_else_is_that_is_said(tmp_path: Path, form: str, name: str) -> None:
    (tmp_path / "empty").mkdir()
    for file in ("text", "text.h5"):
        (tmp_path / file).write_text("mine")
    refused(form, tmp_path / name, FormatError, name)


@pytest.mark.parametrize("other", MAKERS)
@any_form
def test_torchrls_layout_of_another_form_is_named(tmp_path: Path, form: str, other: str) -> None:
    plan = BufferPlan(8, (8,))
    MAKERS[other](compatible=True).dumps(plan.buffer()._storage, tmp_path / other)
    if form == other:
        MAKERS[form]().loads(plan.storage(), tmp_path / other)
        return
    refused(form, tmp_path / other, FormatError, rf"written by an? {other.capitalize()}StorageCheckpointer; this", plan)


def test_a_cut_h5_file_of_torchrl_is_found(tmp_path: Path) -> None:
    plan = BufferPlan(8, (8,))
    H5StorageCheckpointer(compatible=True).dumps(plan.buffer()._storage, tmp_path / "cut.h5")
    _cut(tmp_path / "cut.h5")
    refused("h5", tmp_path / "cut.h5", CorruptDataError, "HDF5 cannot read the file", plan)


def test_the_name_of_the_file_matters(tmp_path: Path) -> None:
    H5StorageCheckpointer(checkpoint_file="mine").dumps(PLAN.buffer()._storage, tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["mine"]
    refused("h5", tmp_path / "saved", FormatError, r"saved has no checkpoint\.h5, which an H5StorageChe")


@any_form
@pytest.mark.parametrize(
    ("target", "match"),
    [
        (lambda: LazyTensorStorage(7), "room for"),
        (lambda: LazyTensorStorage(16, ndim=2), "ndim=1"),
        (lambda: TensorStorage(torch.zeros(8)), "this storage holds"),
        (lambda: TensorStorage(TensorDict({"action": torch.zeros(8, 2)}, [8])), "this storage holds"),
    ],
)
def test_a_storage_that_does_not_fit_stays(
    tmp_path: Path, form: str, target: Callable[[], TensorStorage], match: str
) -> None:
    storage = target()
    with pytest.raises(SchemaError, match=match):
        MAKERS[form]().loads(storage, saved(form, tmp_path / "saved"))
    assert storage.rows in {0, 8}


# Saving --------------------------------------------------------------------------------------------


@any_form
@pytest.mark.parametrize(
    ("data", "match"),
    [
        (torch.zeros(4, 2), "tensordicts only"),
        ({"a": torch.zeros(4)}, "tensordicts only"),
        (TensorDict({"a": torch.zeros(4)}, [4]), "no done, terminated or truncated below"),
        (TensorDict({"a": torch.zeros(4), "done": torch.zeros(4, 1).bool()}, [4]), "the ends of episodes are unknown"),
        (TensorDict({"a": torch.zeros(4).to(torch.float8_e5m2), "next": {"done": torch.ones(4, 1)}}, [4]), "float8"),
    ],
)
def test_data_without_episodes_is_refused(tmp_path: Path, form: str, data: Any, match: str) -> None:
    with pytest.raises(SchemaError, match=match) as raised:
        MAKERS[form]().dumps(TensorStorage(data), tmp_path / "saved")
    assert "TensorStorageCheckpointer" in raised.value.hint
    assert not (tmp_path / "saved").exists()


@any_form
@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage, LazyTensorStorage])
def test_empty_storages_are_refused(tmp_path: Path, form: str, storage: Any) -> None:
    with pytest.raises(SchemaError, match="storage is empty"):
        MAKERS[form]().dumps(storage(3), tmp_path / "saved")


@any_form
def test_compressed_lists_are_refused(tmp_path: Path, form: str) -> None:
    storage = CompressedListStorage(3)
    storage.set(0, PLAN.rows(np.random.default_rng(0), 1)[0])
    with pytest.raises(UsageError, match=r"^an? \w+ serves .*, found a CompressedListStorage\nhint") as raised:
        MAKERS[form]().dumps(storage, tmp_path / "saved")
    assert "CompressedListStorageCheckpointer" in raised.value.hint
    with pytest.raises(UsageError, match="found a CompressedListStorage"):
        MAKERS[form]().loads(storage, saved(form, tmp_path / "saved"))


SLIPS = pytest.mark.parametrize(
    ("keys", "match", "near"),
    [
        ({"reward_keys": ["rewrad"]}, "reward_keys names 'rewrad', but below 'next' .* has only .*reward", "reward"),
        ({"reward_keys": [("info", "bonus")]}, r"names 'info\.bonus', but", ""),
        ({"done_keys": ["done", ("next", "trunctaed")]}, "done_keys names 'trunctaed', but", "truncated"),
        ({"done_keys": ["observation_"]}, "done_keys names 'observation_', but", "observation"),
    ],
)


@any_form
@pytest.mark.parametrize("compatible", [False, True])
@SLIPS
def test_a_misspelt_key_is_named(
    tmp_path: Path, form: str, compatible: bool, keys: dict[str, Any], match: str, near: str
) -> None:
    plan = BufferPlan(8, (8,), ends=0.4)
    with pytest.raises(MissingKeyError, match=match) as raised:
        MAKERS[form](compatible=compatible, **keys).dumps(plan.buffer()._storage, tmp_path / "saved")
    assert raised.value.hint == (f"did you mean {near!r}?" if near else "")
    assert not (tmp_path / "saved").exists()
    MAKERS[form](compatible=compatible).dumps(plan.buffer()._storage, tmp_path / "saved")
    with pytest.raises(MissingKeyError, match=match):
        MAKERS[form](**keys).loads(plan.storage(), tmp_path / "saved")


@any_form
def test_keys_that_are_not_there(tmp_path: Path, form: str) -> None:
    data = TensorDict({"next": {"over": torch.ones(4, 1).bool()}}, [4])
    with pytest.raises(SchemaError, match="there is no truncated below"):
        MAKERS[form](done_keys=["truncated"]).dumps(TensorStorage(data), tmp_path / "saved")
    for wrong in ([3], [()], [("a", 3)], []):
        with pytest.raises(UsageError, match="done_keys"):
            MAKERS[form](done_keys=wrong)


@any_form
def test_what_is_in_the_way_stays(tmp_path: Path, form: str) -> None:
    write_walks(tmp_path / "dataset", [(5, "terminated")])
    digest = Manifest.load(tmp_path / "dataset").content_digest
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/notes.txt").write_text("mine")
    (tmp_path / "file.h5").write_bytes(b"mine")
    with h5py.File(tmp_path / "theirs.h5", "w") as h5:
        h5["a"] = 1
    shutil.copytree(saved(form, tmp_path / "with"), tmp_path / "mixed")
    (tmp_path / "mixed/notes.txt").write_text("mine")
    for name in ("dataset", "dataset/inside", "plain", "file.h5", "theirs.h5", "mixed"):
        with pytest.raises(UsageError):
            MAKERS[form]().dumps(PLAN.buffer()._storage, tmp_path / name)
    assert Manifest.load(tmp_path / "dataset").content_digest == digest
    assert (tmp_path / "file.h5").read_bytes() == b"mine"
    assert (tmp_path / "mixed/notes.txt").read_text() == "mine"


@any_form
def test_an_older_checkpoint_of_any_form_is_replaced(tmp_path: Path, form: str) -> None:
    for other in MAKERS:
        saved(form, saved(other, tmp_path / "saved"))
        target = PLAN.storage()
        MAKERS[form]().loads(target, tmp_path / "saved")
    PLAN.buffer()._storage.dumps(tmp_path / "saved")
    saved(form, tmp_path / "saved")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


@any_form
def test_a_full_disk_leaves_the_older_checkpoint(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(form, tmp_path / "saved")
    before = {path: path.read_bytes() for path in (tmp_path / "saved").rglob("*") if path.is_file()}

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    for call in ("writev", "pwritev"):
        monkeypatch.setattr(f"os.{call}", full)
    with pytest.raises(OutOfSpaceError):
        saved(form, tmp_path / "saved", BufferPlan(6, (6,)))
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "kwargs",
    [{"compression": "szip"}, {"compression": "gzip", "compression_opts": 12}, {"dtype": "f8"}, {"chunks": (3,)},
     {"compression": "lzf", "compression_opts": 3}, {"shuffle": 3}],
)  # fmt: skip
def test_what_hdf5_cannot_do_everywhere_is_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="h5_kwargs has"):
        H5StorageCheckpointer(h5_kwargs=kwargs)


@pytest.mark.parametrize("name", ["", "a/b.h5", "..", "/x.h5"])
def test_the_file_has_a_name(name: str) -> None:
    with pytest.raises(UsageError, match="checkpoint_file"):
        H5StorageCheckpointer(checkpoint_file=name)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="no argument 'shift'"):
        NestedStorageCheckpointer(shift="s")


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"compression": "gzip", "compression_opts": 9}, ("gzip", 9, True, False)),
        ({"compression": 2, "shuffle": False}, ("gzip", 2, False, False)),
        ({"compression": "lzf", "fletcher32": True}, ("lzf", None, True, True)),
        ({"chunks": True}, (None, None, False, False)),
    ],
)
def test_h5_kwargs_reach_the_datasets(tmp_path: Path, kwargs: dict[str, Any], expected: tuple[Any, ...]) -> None:
    H5StorageCheckpointer(h5_kwargs=kwargs).dumps(PLAN.buffer()._storage, tmp_path / "saved.h5")
    with h5py.File(tmp_path / "saved.h5") as h5:
        found = h5["observation"]
        assert (found.compression, found.compression_opts, found.shuffle, found.fletcher32) == expected
        assert found.chunks is not None
    target = PLAN.storage()
    H5StorageCheckpointer().loads(target, tmp_path / "saved.h5")
    assert bits(target[:]) == bits(PLAN.buffer()._storage[:])


@any_form
@pytest.mark.parametrize("argument", ["done_keys", "reward_keys"])
@pytest.mark.parametrize("keys", [5, 0, 1.5, [5], [()], False])
def test_keys_that_are_none_are_named(form: str, argument: str, keys: Any) -> None:
    with pytest.raises(UsageError, match=f"^{argument} .*texts or tuples of texts"):
        MAKERS[form](**{argument: keys})
