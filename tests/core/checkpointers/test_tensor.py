"""Checkpoints of tensors, ours and those of TorchRL: rows come back, damage and misfits change nothing."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from damage import without_digests
from strikes import forked, kill
from tensordict import NonTensorData, TensorDict, tensorclass
from torch.utils._pytree import tree_leaves, tree_map

from rbtool.core.checkpointers.lists import ListStorageCheckpointer
from rbtool.core.checkpointers.tensor import TensorStorageCheckpointer, walk_tree
from rbtool.core.errors import (
    CorruptDataError,
    DatasetNotFoundError,
    FormatError,
    OutOfSpaceError,
    SchemaError,
    UsageError,
)
from rbtool.core.storages.lazy_tensor import LazyMemmapStorage, LazyTensorStorage
from rbtool.core.storages.list_storage import CompressedListStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage
from rbtool.core.testing.storages import same


@tensorclass
class Step:
    observation: torch.Tensor
    action: torch.Tensor


def steps(rows: int = 10, first: int = 0) -> TensorDict:
    numbers = torch.arange(first, first + rows)
    return TensorDict({"a": numbers, "next": {"b": torch.stack([numbers, -numbers], -1).double()}}, [rows])


def saved(tmp_path: Path, data: Any = None, capacity: int = 16, *, compatible: bool = True) -> Path:
    storage = LazyTensorStorage(capacity, checkpointer=TensorStorageCheckpointer(compatible=compatible))
    storage.set(range(10), steps() if data is None else data)
    storage.dumps(tmp_path / "saved")
    return tmp_path / "saved"


def compatible() -> TensorStorageCheckpointer:
    return TensorStorageCheckpointer(compatible=True)


def loaded(path: Path, capacity: int = 16) -> LazyTensorStorage:
    storage = LazyTensorStorage(capacity)
    storage.loads(path)
    return storage


# Ours ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        steps(),
        torch.arange(20).reshape(10, 2).to(torch.uint32),
        {"a.b": torch.arange(10), "c": [torch.ones(10, 2), (torch.zeros(10, 0),)], 3: steps()},
        Step(torch.ones(10, 2), torch.arange(10), batch_size=[10]),
        steps().set("task", NonTensorData({"name": "door", "seeds": [1, 2]}, batch_size=[10])),
        TensorDict({"shape": torch.arange(10), "device": torch.ones(10), "_type": torch.zeros(10)}, [10]),
    ],
    ids=["tensordict", "tensor", "nest", "tensorclass", "constant", "reserved names"],
)
@pytest.mark.parametrize("capacity", [10, 16, 100])
@pytest.mark.parametrize("compatible", [False, True])
def test_rows_come_back_in_a_storage_of_any_sufficient_capacity(
    tmp_path, data, capacity: int, compatible: bool
) -> None:
    storage = loaded(saved(tmp_path, data, compatible=compatible), capacity)
    assert (len(storage), storage.max_size, storage.last_cursor) == (10, capacity, 9)
    assert type(storage[:]) is type(data)
    assert same(storage[:], data)


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("inner", ["b", "c.d"])
def test_keys_with_dots_come_back(tmp_path: Path, kind: type[LazyTensorStorage], filled: bool, inner: str) -> None:
    data = {"a.b": torch.arange(10), "a": {inner: torch.arange(10, 20)}}
    for number, (given, compatible) in enumerate([(data, inner != "b"), (TensorDict(data, [10]), False)]):
        path = saved(tmp_path / str(number), given, compatible=compatible)
        storage = kind(16)
        if filled:
            storage.set(range(10), tree_map(torch.zeros_like, data) if number == 0 else given.apply(torch.zeros_like))
        storage.loads(path)
        assert same(storage[:], given)


def test_the_cursor_is_kept(tmp_path: Path) -> None:
    storage = LazyTensorStorage(10)
    storage.set(range(10), steps())
    storage.set(torch.tensor([0, 1, 2]), steps(3, 10))
    storage.dumps(tmp_path / "saved")
    assert loaded(tmp_path / "saved", 10).last_cursor == 2


def test_files_have_the_size_of_the_capacity_and_take_room_for_the_rows(tmp_path: Path) -> None:
    path = saved(tmp_path, capacity=1 << 24)
    found = (path / "next" / "b.memmap").stat()
    assert found.st_size == 1 << 28
    assert found.st_blocks * 512 <= 1 << 16
    assert same(TensorDict.load_memmap(path)[:10], steps())


def test_empty_storages_are_saved_without_rows(tmp_path: Path) -> None:
    LazyTensorStorage(10).dumps(tmp_path / "saved")
    storage = TensorStorage(steps())
    storage.loads(tmp_path / "saved")
    assert (len(storage), loaded(tmp_path / "saved").initialized) == (0, False)
    storage = TensorStorage(steps())
    storage.empty()
    storage.dumps(tmp_path / "saved")
    assert len(loaded(tmp_path / "saved")) == 0


@pytest.mark.parametrize("file", ["a.memmap", "next/b.memmap"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: os.truncate(path, 100), "100 bytes"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "cut or overwritten"),
        (lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]), "does not hold the bytes that were saved"),
    ],
)
def test_damage_is_found_and_changes_nothing(tmp_path: Path, file: str, damage: Any, message: str) -> None:
    path, storage = saved(tmp_path), TensorStorage(steps(10, 50))
    damage(path / file)
    with pytest.raises(CorruptDataError, match=message):
        storage.loads(path)
    assert same(storage[:], steps(10, 50))
    assert storage.log.now == (0, 0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has {}, expected an object with format_version"),
        ("[1]", "expected an object"),
        ("{", "is not JSON"),
        ('{"format_version": 99}', "has format version 99"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = without_digests(saved(tmp_path))
    (path / ".rbtool" / "storage.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        loaded(path)


def test_a_manifest_cannot_name_files_outside(tmp_path: Path) -> None:
    path = without_digests(saved(tmp_path))
    manifest = path / ".rbtool" / "storage.json"
    manifest.write_text(manifest.read_text().replace("a.memmap", "../a.memmap"))
    with pytest.raises(CorruptDataError, match="outside of its folder"):
        loaded(path)


def test_names_that_an_older_version_did_not_escape_are_found_but_never_outside(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    inside = folder / "a b"
    inside.mkdir(parents=True)
    common = {"shape": [3], "_type": "<class 'tensordict._td.TensorDict'>"}
    (folder / "meta.json").write_text(json.dumps(common | {"a b": {"type": "TensorDict"}}))
    (inside / "meta.json").write_text(json.dumps(common | {"c d": {"dtype": "torch.int64"} | common}))
    (inside / "c d.memmap").touch()
    _, (leaf,) = walk_tree(folder, 1)
    assert (leaf.name, leaf.file) == (("a b", "c d"), "a b/c d.memmap")
    (inside / "meta.json").write_text(json.dumps(common | {"..": {"type": "TensorDict"}}))
    with pytest.raises(CorruptDataError, match=r"%2E%2E/meta\.json is missing"):
        walk_tree(folder, 1)


def test_another_length_than_was_saved_is_refused(tmp_path: Path) -> None:
    path = without_digests(saved(tmp_path))
    (path / "storage_metadata.json").write_text('{"metadata": {}, "is_pytree": false, "len": 9}')
    with pytest.raises(CorruptDataError, match="says 9 elements, but 10 were saved"):
        loaded(path)


@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (steps(5), "10 saved elements do not fit: this storage has room for 5"),
        (TensorDict({"a": torch.arange(10)}, [10]), "holds a, next.b, but this storage holds a"),
        (steps().set("a", torch.ones(10)), r"a is torch.int64 \[10\], expected torch.float32 \[10\]"),
        (steps().set(("next", "b"), torch.ones(10, 3).double()), r"next.b is .* \[10, 2\], expected .* \[10, 3\]"),
        (steps(), "'task' is 'door' in the saved data, but 'nothing' here"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, data, message: str, compatible: bool) -> None:
    path = saved(tmp_path, steps().set("task", NonTensorData("door")), compatible=compatible)
    held = data if "task" in message else data.clone().set("task", NonTensorData("door"))
    storage = TensorStorage(held)
    with pytest.raises(RuntimeError, match=message):
        storage.loads(path)
    assert (storage.log.now, same(storage[:], held)) == ((0, 0, 0), True)


def test_other_dimensions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="saved with ndim=1, but this storage has ndim=2"):
        LazyTensorStorage(16, ndim=2).loads(saved(tmp_path))


def test_a_class_that_is_not_loaded_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, Step(torch.ones(10, 2), torch.arange(10), batch_size=[10]))
    storage = TensorStorage(Step(torch.zeros(10, 2), torch.zeros(10).long(), batch_size=[10]))
    monkeypatch.delitem(sys.modules, __name__)
    with pytest.raises(SchemaError, match=r"class Step of the module .*, which is not imported"):
        loaded(path)
    assert __name__ not in sys.modules
    storage.loads(path)
    assert storage[:].action.tolist() == list(range(10))


# Places --------------------------------------------------------------------------------------------


def test_a_smaller_checkpoint_leaves_no_stale_files(tmp_path: Path) -> None:
    saved(tmp_path, steps().set("extra", torch.ones(10)))
    assert not (saved(tmp_path) / "extra.memmap").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, storage = saved(tmp_path), TensorStorage(steps(10, 50), checkpointer=compatible())
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1000, 1000, 239))
    with pytest.raises(OutOfSpaceError, match="239 bytes free, 240 are needed"):
        storage.dumps(path)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert same(loaded(path)[:], steps())


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [lambda: LazyTensorStorage(3, checkpointer=compatible()), lambda: ListStorage(3), lambda: CompressedListStorage(3)],
    ids=["compatible", "list", "compressed list"],
)
def test_killed_at_any_change_the_old_checkpoint_or_the_new_one_is_there(tmp_path: Path, make: Any) -> None:
    def save(path: Path, value: int = 1) -> None:
        storage = make()
        storage.set(range(3), list(torch.full((3, 2), value)))
        storage.dumps(path)

    save(tmp_path / "older", 0)
    found: list[int] = []
    for at in itertools.count(1):
        out = tmp_path / str(at)
        shutil.copytree(tmp_path / "older", out / "saved")
        status, _ = forked(save, out, out / "saved", kill, at)
        other = make()
        other.loads(out / "saved")
        found.append(sum(item.sum().item() for item in other[:]))
        if not status:
            break
        assert os.WIFSIGNALED(status)
        save(out / "saved")
        assert [place.name for place in out.iterdir()] == ["saved"]
    assert at > 10
    assert found == sorted(found)
    assert set(found) == {0, 6}


def test_a_folder_that_is_no_checkpoint_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"lacks the storage_metadata\.json"):
        loaded(tmp_path)
    with pytest.raises(DatasetNotFoundError, match="not found, expected"):
        loaded(tmp_path / "absent")
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(UsageError, match="is not the checkpoint of a storage; left unchanged"):
        TensorStorage(steps()).dumps(tmp_path)
    path = saved(tmp_path)
    (path / "mine.txt").write_text("kept")
    with pytest.raises(UsageError, match="is not part of the checkpoint"):
        TensorStorage(steps()).dumps(path)


@pytest.mark.parametrize("name", ["mine.json", "notes.memmap", "sub/mine.json", ".rbtool/mine.json", "storage.json"])
@pytest.mark.parametrize("kind", ["segments", "compatible", "TorchRL's", "nest"])
def test_a_file_that_looks_like_part_of_a_checkpoint_is_left_alone(tmp_path: Path, kind: str, name: str) -> None:
    data: Any = {"a.b": torch.ones(4), "c": [torch.ones(4)]} if kind == "nest" else steps()
    storage = TensorStorage(data, checkpointer=TensorStorageCheckpointer(compatible=kind != "segments"))
    path = tmp_path / "saved"
    for _ in range(2):
        storage.dumps(path)
        if kind in ("TorchRL's", "nest"):
            shutil.rmtree(path / ".rbtool")
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("{}")
    with pytest.raises(UsageError, match=f"{name} is not part of the checkpoint"):
        storage.dumps(path)
    assert (path / name).read_text() == "{}"


@pytest.mark.parametrize(
    "files",
    [
        {"items.json": "{}", "items.memmap": ""}, {"segments.json": "{}"}, {"packed.json": "[]"},
        {"stream.json": "{}"}, {"ensemble.json": "{}"}, {"storage_metadata.json": '{"mine": 1}'},
        {"metadata.json": "{}", "data_indices.json": "[]"},
    ],
    ids=lambda files: next(iter(files)),
)  # fmt: skip
def test_other_documents_with_the_names_of_ours_are_left_alone(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match="nothing was replaced"):
        TensorStorage(steps()).dumps(tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == files


def test_checkpoints_and_storages_of_other_classes_are_refused(tmp_path: Path) -> None:
    storage = ListStorage(10)
    storage.set(0, torch.ones(2))
    storage.dumps(tmp_path / "list")
    with pytest.raises(FormatError, match="was written by a ListStorageCheckpointer"):
        loaded(tmp_path / "list")
    with pytest.raises(UsageError, match="saves storages of tensors, found a ListStorage"):
        TensorStorageCheckpointer().dumps(storage, tmp_path / "other")
    with pytest.raises(ValueError, match="ListStorage"):
        ListStorageCheckpointer().loads(LazyTensorStorage(3), tmp_path / "list")


def test_values_that_only_a_pickle_holds_are_refused(tmp_path: Path) -> None:
    storage = TensorStorage(steps().set("task", NonTensorData(object())))
    with pytest.raises(SchemaError, match="can be saved"):
        storage.dumps(tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_a_storage_that_lives_there_is_described_in_place(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(16, scratch_dir=tmp_path / "live")
    storage.set(range(10), steps())
    storage.dumps(tmp_path / "live")
    storage.set(range(10, 12), steps(2, 10))
    assert same(loaded(tmp_path / "live")[:], steps())
    storage.loads(tmp_path / "live")
    assert len(storage) == 10
    with pytest.raises(SchemaError, match="would replace the files in"):
        LazyMemmapStorage(16, scratch_dir=tmp_path / "live", existsok=True).loads(tmp_path / "live")


# Hooks ---------------------------------------------------------------------------------------------


class Doubling:
    is_full: bool | None = None
    shift: int | None = None

    def __call__(self, data: TensorDict, path: Any = None, out: Any = None) -> TensorDict:
        self.path, self.out = path, out
        return TensorDict({"twice": data["a"] * 2, "full": NonTensorData(self.is_full)}, [])


def test_hooks_see_and_change_the_saved_rows(tmp_path: Path) -> None:
    storage, hook = LazyTensorStorage(10), Doubling()
    storage.set(range(10), steps())
    storage.register_save_hook(hook)
    storage.dumps(tmp_path / "saved")
    assert (hook.is_full, hook.shift, hook.path) == (True, 10, tmp_path / "saved")
    opened = TensorDict.load_memmap(tmp_path / "saved")
    assert (opened["twice"].tolist(), opened["full"]) == (list(range(0, 20, 2)), True)
    other = LazyTensorStorage(12)
    other.register_load_hook(lambda data, out: {"a": data["twice"] // 2, "none": torch.full((10,), out is None)})
    other.loads(tmp_path / "saved")
    assert (other[:]["a"].tolist(), other[:]["none"].all()) == (list(range(10)), True)


def test_hooks_are_callable_and_warn_without_a_cursor(tmp_path: Path) -> None:
    storage, hook = TensorStorage(steps()), Doubling()
    storage.register_save_hook(hook)
    with pytest.warns(UserWarning, match="the row written last is unknown"):
        storage.dumps(tmp_path / "saved")
    assert hook.shift == 0
    with pytest.raises(UsageError, match="a hook must be callable"):
        TensorStorage(torch.ones(10)).register_save_hook("hook")  # type: ignore[arg-type]


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize(
    "data", [torch.arange(6.0), {"a": torch.arange(6.0), "b": (torch.ones(6, 2), [torch.arange(6)])}]
)
def test_hooks_take_tensors_and_nests(tmp_path: Path, data: Any, written: bool) -> None:
    storage, other = LazyTensorStorage(8), LazyTensorStorage(9)
    storage.set(range(6), data)
    storage.register_save_hook(lambda data, path: tree_map(lambda leaf: leaf + 1, data))
    storage.dumps(tmp_path / "saved")
    if written:
        other.set(range(2), tree_map(lambda leaf: leaf[:2], data))
    other.register_load_hook(lambda data, out: tree_map(lambda leaf: leaf * 2, data))
    other.loads(tmp_path / "saved")
    expected = tree_map(lambda leaf: (leaf + 1) * 2, data)
    pairs = zip(tree_leaves(other[:]), tree_leaves(expected), strict=True)
    assert all(torch.equal(found, leaf) for found, leaf in pairs)
    assert len(other) == 6


DATA = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"
CASES = sorted(path.name for path in DATA.iterdir() if path.name.startswith(("td_", "pytree_", "tensor_")))


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


@each("name", CASES)
@each("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_checkpoints_of_torchrl_are_loaded(name: str, kind: Any) -> None:
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


def test_damage_to_a_folder_of_torchrl_is_found(theirs: Path) -> None:
    os.truncate(theirs / "next" / "reward.memmap", 3)
    with pytest.raises(CorruptDataError, match=r"reward.memmap has 3 bytes, expected 64"):
        loaded(theirs)
    (theirs / "next" / "reward.memmap").unlink()
    with pytest.raises(CorruptDataError, match=r"reward.memmap is missing, expected \d+ bytes"):
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
    ("change", "message"),
    [
        (lambda meta: meta | {"len": -1}, "does not contain the number"),
        (lambda meta: meta | {"len": 17}, "does not hold 17 elements"),
        (lambda meta: [meta], "does not contain the number"),
        (lambda meta: meta | {"is_pytree": True, "metadata": {"x": 1}}, "without its type and shape"),
        (lambda meta: {"metadata": {}}, "does not contain the number"),
    ],
)
def test_metadata_that_make_no_sense_are_refused(theirs: Path, change: Any, message: str) -> None:
    path = theirs / "storage_metadata.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(FormatError, match=message):
        loaded(theirs)


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["tensordict", "pytree", "tensor"])
def test_torchrl_loads_our_checkpoints(tmp_path: Path, kind: str) -> None:
    data = pytest.importorskip("torchrl.data", reason="needs TorchRL")
    rows = {"tensordict": steps(), "pytree": {"a": torch.arange(10), "b": (torch.ones(10),)}, "tensor": torch.ones(10)}
    path = saved(tmp_path, rows[kind])
    peer = data.LazyTensorStorage(16)
    peer.set(range(10), steps(10, 50) if kind == "tensordict" else rows[kind])
    peer.loads(path)
    assert (len(peer), same(peer[:10], rows[kind])) == (10, True)
