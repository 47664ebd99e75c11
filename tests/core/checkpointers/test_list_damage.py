from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from damage import without_digests
from tensordict import LazyStackedTensorDict, TensorDict

from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError
from rbtool.core.storages.list_storage import CompressedListStorage, ListStorage


def filled(*items: object) -> ListStorage:
    storage = ListStorage(20)
    storage.set(range(len(items)), list(items))
    return storage


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "storage"
    item = TensorDict({"a": torch.arange(6).reshape(3, 2), "b": torch.ones(3, dtype=torch.bfloat16), "s": "hey"}, [3])
    filled(item, torch.arange(4.0), "x").dumps(path)
    return path


def refuses(path: Path, error: type[Exception], message: str) -> None:
    storage = ListStorage(3)
    storage.set(0, "kept")
    with pytest.raises(error, match=message) as found:
        storage.loads(without_digests(path))
    assert "\n" not in str(found.value)
    assert storage[:] == ["kept"]


def test_nothing_there(tmp_path: Path) -> None:
    refuses(tmp_path / "absent", DatasetNotFoundError, "nothing at")
    refuses(tmp_path, FormatError, r"has no items\.json, which a ListStorageCheckpointer writes")


@pytest.mark.parametrize("size", [0, 10, 69, 71])
def test_a_cut_file(size: int, tmp_path: Path) -> None:
    path = saved(tmp_path)
    os.truncate(path / "items.memmap", size)
    refuses(path, CorruptDataError, rf"items.memmap has {size} bytes, expected 70: it was cut or overwritten")


def test_changed_bytes(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = bytearray((path / "items.memmap").read_bytes())
    data[30] ^= 1
    (path / "items.memmap").write_bytes(data)
    refuses(path, CorruptDataError, "items.memmap has other bytes than were written")


def test_a_missing_file(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / "items.memmap").unlink()
    refuses(path, CorruptDataError, r"items.memmap is missing, expected 70 bytes")


def test_a_checkpoint_of_another_class(tmp_path: Path) -> None:
    storage = CompressedListStorage(2)
    storage.set(0, torch.zeros(2))
    storage.dumps(tmp_path / "storage")
    refuses(tmp_path / "storage", FormatError, "was written by a CompressedListStorageCheckpointer; this is a List")


def test_more_than_there_is_room_for(tmp_path: Path) -> None:
    filled(*"abcd").dumps(tmp_path / "storage")
    refuses(tmp_path / "storage", SchemaError, "holds 4 objects; this storage has room for 3")


TENSOR = {"type": "tensor", "dtype": "torch.float32", "shape": [2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "does not describe a list of objects"),
        ({"format_version": 2}, "has format_version 2, expected 1"),
        ({"kinds": 3}, "has no list of kinds"),
        ({"items": {"a": 1}}, "or none of items"),
        ({"items": [-1]}, "names the kind -1; there are 1"),
        ({"items": [10**30]}, "names the kind 1000000000000000000000000000000; there are 1"),
        ({"items": [True]}, "names the kind True"),
        ({"items": [0.5]}, "names the kind 0.5"),
        ({"kinds": ["x"]}, "an item is described by 'x', expected an object"),
        ({"kinds": [{}]}, "None is no kind of item"),
        ({"kinds": [{"type": "tensorclass", "class": "os.system"}]}, "'tensorclass' is no kind of item"),
        ({"kinds": [{"type": "named_tuple", "class": "x", "items": []}]}, "'named_tuple' is no kind of item"),
        ({"kinds": [TENSOR | {"dtype": "exec('1')"}]}, "is not an element type of torch"),
        ({"kinds": [TENSOR | {"dtype": 5}]}, "5 is not an element type of torch"),
        ({"kinds": [TENSOR | {"shape": [-2]}]}, r"\[-2\] is no shape"),
        ({"kinds": [TENSOR | {"shape": "2"}]}, "'2' is no shape"),
        ({"kinds": [TENSOR | {"shape": [2**62]}]}, "is the shape of no tensor"),
        ({"kinds": [TENSOR | {"shape": [2**40]}]}, "items.memmap has 8 bytes, expected 4,398,046,511,104"),
        ({"kinds": [TENSOR | {"array": "matrix"}]}, "'matrix' is no kind of array"),
        ({"kinds": [{"type": "tensordict", "fields": [1]}]}, r"of a described item is \[1\], expected a Mapping"),
        ({"kinds": [{"type": "tensordict", "fields": {"a": TENSOR}, "batch_size": [3]}]}, "row 0 of .* contradicts"),
        ({"kinds": [{"type": "tensordict", "fields": {"a": TENSOR}, "names": ["x"]}]}, "cannot name the 0 dimensions"),
        ({"kinds": [{"type": "lazy_stack", "stack_dim": 0, "items": []}]}, "a lazy stack of 0 items"),
        ({"kinds": [{"type": "lazy_stack", "stack_dim": 1, "items": [TENSOR]}]}, "other things than tensordicts"),
        ({"kinds": [{"type": "other", "value": {"__type__": "pickle", "value": "x"}}]}, "cannot be read as 'pickle'"),
        ({"kinds": [{"type": "other", "value": {"__type__": "torch.device", "value": "x"}}]}, "is not the value of a"),
    ],
)  # fmt: skip
def test_hostile_descriptions(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "storage"
    filled(torch.zeros(2)).dumps(path)
    document = json.loads((path / "items.json").read_text()) | change
    (path / "items.json").write_text(json.dumps(document))
    refuses(path, ValueError, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("\ufeff1", "is not JSON"),
        ("[1]", "does not describe a list"),
        ("[" * 10**5, "nests deeper than 100 levels"),
        ("9" * 10**5, "is not JSON"),
    ],
)
def test_what_is_no_description(text: str, message: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / "items.json").write_text(text)
    refuses(path, FormatError, message)


def test_descriptions_nested_without_end(tmp_path: Path) -> None:
    path = tmp_path / "storage"
    filled(torch.zeros(2)).dumps(path)
    deep = '{"type":"list","items":[' * 450 + json.dumps(TENSOR) + "]}" * 450
    document = '{"format":"rbtool list","format_version":1,"bytes":8,"items":[0],"kinds":[%s]}'
    (path / "items.json").write_text(document % deep)
    refuses(path, FormatError, "nests deeper than 100 levels")


def test_a_stack_along_a_dimension_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "storage"
    filled(LazyStackedTensorDict(TensorDict({}, []))).dumps(path)
    document = json.loads((path / "items.json").read_text())
    document["kinds"][0]["stack_dim"] = 9
    (path / "items.json").write_text(json.dumps(document))
    refuses(path, FormatError, "row 0 of .* contradicts itself")


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_, **__: pytest.fail("unpickled"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    storage = ListStorage(3)
    storage.loads(path)
    assert len(storage) == 3
