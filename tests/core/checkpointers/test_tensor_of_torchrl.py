from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rbtool.core.checkpointers.tensor import TensorStorageCheckpointer
from rbtool.core.errors import CorruptDataError, FormatError
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.testing.storages import same

DATA = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"
CASES = sorted(path.name for path in DATA.iterdir() if path.name.startswith(("td_", "pytree_", "tensor_")))


def steps(rows: int = 10, first: int = 0) -> TensorDict:
    numbers = torch.arange(first, first + rows)
    return TensorDict({"a": numbers, "next": {"b": torch.stack([numbers, -numbers], -1).double()}}, [rows])


def loaded(path: Path) -> LazyTensorStorage:
    storage = LazyTensorStorage(16)
    storage.loads(path)
    return storage


def nest(case: dict[str, Any]) -> Any:
    """One row that shows how the data of a case was made."""
    shape = case["capacity_shape"]
    leaves = {
        name: torch.zeros(entry["shape"][len(shape) :], dtype=getattr(torch, entry["dtype"]))
        for name, entry in case["keys"].items()
    }
    if case["case"] == "pytree_dotted_key":
        return {"a.b": leaves["a.b"], "c": {"d.e": leaves["c/d.e"]}}
    if case["case"].startswith("pytree_tuple"):
        return leaves["0"], leaves["1"]
    info = {"a": leaves["info/a"], "b": (leaves["info/b/0"], leaves["info/b/1"])}
    return {"obs": [leaves["obs/0"], leaves["obs/1"]], "info": info, "act": leaves["act"]}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_what_torchrl_saved_is_loaded(name: str, kind: Any) -> None:
    case, expected = json.loads((DATA / name / "case.json").read_text()), np.load(DATA / name / "expected.npz")
    storage = kind(case["capacity"], ndim=case["ndim"])
    if case["kind"] == "pytree":
        with pytest.raises(RuntimeError, match="lists, tuples or dicts"):
            storage.loads(DATA / name / "checkpoint" / "storage")
        storage.set(0, nest(case))
    storage.loads(DATA / name / "checkpoint" / "storage")
    assert (len(storage), storage.max_size) == (case["len"], case["capacity"])
    names = ["/".join(path) or "_-single-tensor-_" for path in storage.structure.paths()]
    assert sorted(names) == sorted(expected)
    turned = case["ndim"] > 1 and case["components"]["buffer_args"].get("dim_extend") != 0
    for key, leaf in zip(names, storage.columns.leaves, strict=True):
        rows = leaf[: storage.rows].transpose(0, case["ndim"] - 1) if turned else leaf[: storage.rows]
        found = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
        np.testing.assert_array_equal(found, expected[key])


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    shutil.copytree(DATA / "td_tensor_partly_7of16" / "checkpoint" / "storage", tmp_path / "theirs")
    return tmp_path / "theirs"


def test_a_file_that_is_missing_is_not_skipped(theirs: Path) -> None:
    (theirs / "observation.memmap").unlink()
    with pytest.raises(CorruptDataError, match=r"observation.memmap is missing, expected \d+ bytes"):
        loaded(theirs)


def test_a_file_that_was_cut(theirs: Path) -> None:
    os.truncate(theirs / "next" / "reward.memmap", 3)
    with pytest.raises(CorruptDataError, match=r"reward.memmap has 3 bytes, expected 64"):
        loaded(theirs)


@pytest.mark.parametrize("name", ["other.pickle", "pickle.pkl"])
def test_pickles_are_not_opened(theirs: Path, name: str) -> None:
    meta = json.loads((theirs / "meta.json").read_text())
    (theirs / "meta.json").write_text(json.dumps(meta | {"task": {"type": "NonTensorData"}}))
    (theirs / "task").mkdir()
    kind = "<class 'tensordict.tensorclass.NonTensorData'>"
    (theirs / "task" / "meta.json").write_text(json.dumps({"_type": kind, "_is_non_tensor": True}))
    (theirs / "task" / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(FormatError, match=f"'task' .* is a pickle, {name}, which is not opened"):
        loaded(theirs)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda meta: meta | {"len": -1}, FormatError, "does not say how many"),
        (lambda meta: meta | {"len": 17}, FormatError, "does not hold 17 elements"),
        (lambda meta: [meta], FormatError, "does not say how many"),
        (lambda meta: meta | {"is_pytree": True, "metadata": {"x": 1}}, FormatError, "without its type and shape"),
        (lambda meta: {"metadata": {}}, FormatError, "does not say how many"),
    ],
)
def test_metadata_that_make_no_sense(theirs: Path, change: Any, error: type[Exception], message: str) -> None:
    path = theirs / "storage_metadata.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(error, match=message):
        loaded(theirs)


def test_episodes_in_another_form_are_named(theirs: Path) -> None:
    meta = json.loads((theirs / "meta.json").read_text())
    flat = {key: {"type": "NonTensorData"} for key in ("is_full", "shift", "_storage_shape")}
    (theirs / "meta.json").write_text(json.dumps(meta | flat))
    with pytest.raises(FormatError, match=r"episodes in the layout flat; a TensorStorageCheckpointer takes rows"):
        loaded(theirs)


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["tensordict", "pytree", "tensor"])
def test_torchrl_loads_what_we_save(tmp_path: Path, kind: str) -> None:
    data = pytest.importorskip("torchrl.data", reason="needs TorchRL")
    rows = {"tensordict": steps(), "pytree": {"a": torch.arange(10), "b": (torch.ones(10),)}, "tensor": torch.ones(10)}
    ours, path = LazyTensorStorage(16, checkpointer=TensorStorageCheckpointer(compatible=True)), tmp_path / "saved"
    ours.set(range(10), rows[kind])
    ours.dumps(path)
    peer = data.LazyTensorStorage(16)
    peer.set(range(10), steps(10, 50) if kind == "tensordict" else rows[kind])
    peer.loads(path)
    assert (len(peer), same(peer[:10], rows[kind])) == (10, True)
