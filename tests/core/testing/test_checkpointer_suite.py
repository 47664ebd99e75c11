"""A checkpointer written from the documentation passes the suite, and a broken one fails the test of its rule."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from npz_checkpointer import NpzCheckpointer
from row_storage import ObjectStorage
from suite_runs import Broken, failure, failures
from tensordict import TensorDict

from rbtool import (
    FlatStorageCheckpointer,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ListStorageCheckpointer,
    NestedStorageCheckpointer,
    Storage,
    StorageCheckpointerBase,
    TensorStorageCheckpointer,
)
from rbtool.core.checkpointers import base
from rbtool.core.checkpointers.base import RowsNote
from rbtool.core.encodings.saved_digests import DIGESTS, write_digests
from rbtool.core.errors import CorruptDataError, FormatError, SchemaError, UsageError
from rbtool.core.testing.checkpointers import CheckpointerTests, is_bitwise_equal


def suite_of(kind: type[StorageCheckpointerBase], **options: Any) -> type[CheckpointerTests]:
    return type("Suite", (CheckpointerTests,), {"make": lambda self: kind(), **options})


class TestTensors(CheckpointerTests):
    def make(self) -> StorageCheckpointerBase:
        return TensorStorageCheckpointer()

    hooks = False  # what a save hook makes is loaded in its own shape, only by the load hook that belongs to it


class TestFlat(CheckpointerTests):
    def make(self) -> StorageCheckpointerBase:
        return FlatStorageCheckpointer()


class TestNested(CheckpointerTests):
    def make(self) -> StorageCheckpointerBase:
        return NestedStorageCheckpointer()


class TestLists(CheckpointerTests):
    keeps_cursor = False

    def make(self) -> StorageCheckpointerBase:
        return ListStorageCheckpointer()

    def storage(self, capacity: int = 6) -> ListStorage:
        return ListStorage(capacity)

    def rows(self, first: int, count: int) -> list[Any]:
        return [{"a": torch.arange(row + 1), "b": f"row {row}", "c": row / 3} for row in range(first, first + count)]


class TestDocumented(CheckpointerTests):
    def make(self) -> StorageCheckpointerBase:
        return NpzCheckpointer()


def test_the_documented_checkpointer_is_short_and_uses_no_private_name() -> None:
    source = inspect.getsource(NpzCheckpointer)
    assert source.count("\n") <= 40
    assert re.search(r"\._(?!_init__\()", source) is None


# Each breaks one rule -----------------------------------------------------------------------------------------------

WRITE, READ = NpzCheckpointer.write, NpzCheckpointer.read


def negating(self, rows, folder):
    rows["action"].neg_()
    WRITE(self, rows, folder)


def leaving_a_file_open(self, folder, opened=[]):  # noqa: B006 - the files of all calls
    opened.append((folder / "rows.npz").open("rb"))
    return READ(self, folder)


def keeping_rows_in_memory(self, rows, folder):
    WRITE(self, rows, folder)
    type(self).kept = rows


def writing_elsewhere(self, rows, folder):
    WRITE(self, rows, folder)
    Path("rows.txt").write_text("rows")


def forgetting_the_cursor(self, storage, path):
    NpzCheckpointer.loads(self, storage, path)
    storage.last_cursor = None


def keeping_older_rows(self, storage, path):
    rows = self.read(Path(path))
    storage.set(range(len(rows)), rows)


def emptying_first(self, storage, path):
    storage.empty()
    NpzCheckpointer.loads(self, storage, path)


class OfTorchRL(StorageCheckpointerBase):
    """Overrides what TorchRL's documentation shows, and does its own book-keeping."""

    def dumps(self, storage, path):
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        NpzCheckpointer().write(storage[:], folder)
        (folder / "rows.json").write_text(json.dumps({"cursor": int(torch.as_tensor(list(storage.last_cursor))[-1])}))

    def loads(self, storage, path):
        rows = NpzCheckpointer().read(Path(path))
        storage.set(range(len(rows)), rows)
        storage.last_cursor = json.loads((Path(path) / "rows.json").read_text())["cursor"]


LOADED, DAMAGED = "test_rows_come_back_bit_for_bit", "test_damage_is_found_and_changes_nothing"
OTHER_ROWS = {
    "loses a row": {"write": lambda self, rows, folder: WRITE(self, rows[:-1], folder)},
    "reads fewer rows": {"read": lambda self, folder: READ(self, folder)[1:]},
    "reads another dtype": {"read": lambda self, folder: READ(self, folder).apply(
        lambda leaf: leaf.float() if leaf.dtype is torch.float64 else leaf)},
    "forgets a key": {"write": lambda self, rows, folder: WRITE(self, rows.exclude("action"), folder)},
}  # fmt: skip
"""Rows of another number, dtype or structure than were saved, which are never loaded."""
BROKEN = {name: Broken(NpzCheckpointer, LOADED, members) for name, members in OTHER_ROWS.items()} | {
    "reads other values": Broken(NpzCheckpointer, LOADED, {"read": lambda self, folder: READ(self, folder).apply(
        lambda leaf: leaf + 1 if leaf.dtype is torch.int16 else leaf)}),
    "forgets NaN": Broken(NpzCheckpointer, LOADED, {"read": lambda self, folder: READ(self, folder).apply(
        lambda leaf: leaf.nan_to_num() if leaf.is_floating_point() else leaf)}),
    "reads in another order": Broken(NpzCheckpointer, LOADED, {
        "read": lambda self, folder: READ(self, folder).apply(lambda leaf: leaf.flip(0))}),
    "forgets the cursor": Broken(NpzCheckpointer, LOADED, {"loads": forgetting_the_cursor}),
    "keeps older rows": Broken(NpzCheckpointer, "test_old_rows_are_replaced", {"loads": keeping_older_rows}),
    "changes the rows": Broken(NpzCheckpointer, "test_saving_changes_nothing", {"write": negating}),
    "keeps the rows in memory": Broken(NpzCheckpointer, "test_each_checkpoint_has_its_own_rows", {
        "write": keeping_rows_in_memory, "read": lambda self, folder: self.kept}),
    "replaces a checkpoint in place": Broken(
        NpzCheckpointer, "test_an_older_checkpoint_survives_a_write_that_fails",
        {"dumps": lambda self, storage, path: OfTorchRL().dumps(storage, path)}),
    "empties the storage first": Broken(NpzCheckpointer, DAMAGED, {"loads": emptying_first}),
    "writes elsewhere": Broken(NpzCheckpointer, "test_only_the_folder_is_written_to", {"write": writing_elsewhere}),
    "leaves a file open": Broken(NpzCheckpointer, "test_files_are_closed", {"read": leaving_a_file_open}),
    "skips hooks": Broken(NpzCheckpointer, "test_hooks_change_the_written_and_the_read_rows", {
        "_through_load_hooks": lambda self, data, out: data}),
    "cannot be pickled": Broken(NpzCheckpointer, "test_a_pickled_checkpointer_reads_the_same", {
        "__getstate__": lambda self: {"hook": lambda: None}}),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpointer_fails(name: str) -> None:
    BROKEN[name].require_found(suite_of, __name__)


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_rows_of_another_shape_or_dtype_are_never_loaded(name: str, tmp_path: Path) -> None:
    suite = suite_of(type("Broken", (NpzCheckpointer,), OTHER_ROWS[name]))()
    storage, older = suite.filled(4), suite.filled(2, first=40)
    storage.dumps(tmp_path / "saved")
    rows = older[:].apply(torch.clone)
    with pytest.raises(CorruptDataError, match=r"Broken\.read\(\) returned .* was saved"):
        older.loads(tmp_path / "saved")
    assert len(older) == 2
    assert is_bitwise_equal(older[:], rows)


# Checkpointers that were written for TorchRL ------------------------------------------------------------------------


def test_a_checkpointer_written_for_torchrl_saves_and_loads_and_finds_no_damage(tmp_path: Path) -> None:
    suite = suite_of(OfTorchRL)()
    saved = suite.filled(4)
    saved.dumps(tmp_path / "saved")
    suite.assert_loads(tmp_path / "saved", saved, suite.storage())
    assert failure(suite_of(OfTorchRL), DAMAGED) is not None


class Counts(TensorStorageCheckpointer):
    saved = 0

    def dumps(self, storage, path):
        self.saved += 1
        super().dumps(storage, path)


def test_an_override_can_call_its_parents() -> None:
    assert failures(suite_of(Counts, hooks=False)) == {}


@pytest.mark.parametrize(("name", "instead"), list(base._FINAL.items()))
def test_final_methods_name_what_to_implement(name: str, instead: str) -> None:
    with pytest.raises(TypeError, match=rf"Own overrides {name}\(\).*final\n?.*implement {re.escape(instead)}"):
        type("Own", (NpzCheckpointer,), {name: lambda self: None})


@pytest.mark.parametrize("name", ["write", "read"])
def test_a_method_that_would_never_be_called_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Own implements {name}\(\), which its (dumps|loads)\(\) does not call"):
        type("Own", (TensorStorageCheckpointer,), {name: lambda self, *rows: None})


def test_without_write_and_read_there_is_no_checkpointer() -> None:
    for methods in ({}, {"write": lambda self, rows, folder: None}, {"dumps": lambda self, storage, path: None}):
        with pytest.raises(TypeError, match="read"):
            type("Own", (StorageCheckpointerBase,), methods)()


@pytest.mark.parametrize("kind", [ListStorage, LazyStackStorage, ObjectStorage])
def test_a_list_is_not_loaded_into_a_storage_of_tensors(kind: type[Storage], tmp_path: Path) -> None:
    class Lines(StorageCheckpointerBase):
        def write(self, rows: Any, folder: Path) -> None:
            (folder / "rows.txt").write_text("\n".join(map(str, rows)))

        def read(self, folder: Path) -> Any:
            return (folder / "rows.txt").read_text().split("\n")

    saved = kind(3)
    saved.checkpointer = Lines()
    saved.set(range(2), [TensorDict({"a": 1}), TensorDict({"a": 2})])
    saved.dumps(tmp_path / "lines")
    with pytest.raises(SchemaError, match="a list of objects; a LazyTensorStorage holds rows of tensors"):
        LazyTensorStorage(3, checkpointer=Lines()).loads(tmp_path / "lines")


def test_a_storage_of_lanes_comes_back(tmp_path: Path) -> None:
    rows = TensorDict({"a": torch.arange(12).reshape(4, 3)}, [4, 3])
    saved, loaded = (LazyTensorStorage(18, ndim=2, checkpointer=NpzCheckpointer()) for _ in range(2))
    saved.set(range(4), rows)
    saved.dumps(tmp_path / "saved")
    loaded.loads(tmp_path / "saved")
    assert torch.equal(loaded[:]["a"], rows["a"])
    assert loaded.shape == saved.shape


def test_files_named_by_newer_digests_are_kept(tmp_path: Path) -> None:
    suite = suite_of(NpzCheckpointer)()
    older = suite.filled(2, first=40)
    older.dumps(tmp_path / "saved")
    digests = tmp_path / "saved" / DIGESTS
    document = json.loads(digests.read_text())
    digests.write_text(json.dumps(document | {"format_version": 99}))
    with pytest.raises(UsageError, match="nothing was replaced"):
        suite.filled(4).dumps(tmp_path / "saved")
    digests.write_text(json.dumps(document))
    suite.assert_loads(tmp_path / "saved", older, suite.storage())


def test_a_checkpoint_of_a_newer_version_is_named_so_and_kept(tmp_path: Path) -> None:
    suite, folder = suite_of(NpzCheckpointer)(), tmp_path / "saved"
    suite.filled(2, first=40).dumps(folder)
    note = folder / RowsNote.FILE
    note.write_text(json.dumps(json.loads(note.read_text()) | {"format_version": 2}))
    (folder / DIGESTS).unlink()
    write_digests(folder)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(UsageError, match=r"was written by a newer rbtool: .* version 2, .*; nothing was replaced"):
        suite.filled(4).dumps(folder)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    with pytest.raises(FormatError, match=r"was written by a newer rbtool: .* version 2, this version reads 1"):
        suite.storage().loads(folder)


def test_rows_without_a_tensor_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    suite = suite_of(NpzCheckpointer)()
    suite.filled(2).dumps(tmp_path / "saved")
    storage = suite.filled(3, first=40)
    rows = storage[:].apply(torch.clone)
    storage.register_load_hook(lambda data, *_, **__: TensorDict({}, [2]))
    with pytest.raises(SchemaError, match="no tensor"):
        storage.loads(tmp_path / "saved")
    assert len(storage) == 3
    assert is_bitwise_equal(storage[:], rows)
