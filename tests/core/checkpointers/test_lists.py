"""Checkpoints of lists of objects, plain and compressed: every item comes back, and bad input is refused."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import flip, without_digests
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack, tensorclass

from rbtool.core.checkpointers.lists import CompressedListStorageCheckpointer, ListStorageCheckpointer
from rbtool.core.encodings import saved_digests
from rbtool.core.errors import CorruptDataError, DatasetNotFoundError, FormatError, SchemaError, UsageError
from rbtool.core.storages.list_storage import CompressedListStorage, LazyStackStorage, ListStorage
from rbtool.core.storages.tensor import TensorStorage

Pair = namedtuple("Pair", ["left", "right"])


@tensorclass
class Step:
    observation: torch.Tensor


@tensorclass
class Note:
    text: str
    more: torch.Tensor | None = None


each_kind = pytest.mark.parametrize("kind", [ListStorage, CompressedListStorage])


def filled(*items: object, kind: type[ListStorage] = ListStorage, **options: object) -> ListStorage:
    storage = kind(20, **options)
    storage.set(range(len(items)), list(items))
    return storage


def compressed(*items: object, **options: object) -> ListStorage:
    return filled(*items, kind=CompressedListStorage, **options)


def nested() -> TensorDict:
    entries = {"a": torch.arange(6).reshape(3, 2), "n": {"b": torch.ones(3, dtype=torch.bfloat16)}, "s": "hey"}
    return TensorDict(entries, [3], device="cpu", names=["time"])


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def there_and_back(storage: ListStorage, path: Path, **options: object) -> ListStorage:
    storage.dumps(path)
    other = type(storage)(30, **options)
    other.set(0, torch.zeros(1))
    other.loads(path)
    return other


def test_section_4_6_lists_are_saved_instead_of_refused(tmp_path: Path) -> None:
    items = [
        torch.tensor(3), torch.zeros(2, 0), torch.ones(2, dtype=torch.complex64), np.arange(3, dtype=np.uint16),
        np.float32(2.5), "text \ud800", None, True, 2**80, -0.5, math.inf, {"a": (torch.ones(2), [1, {"b": None}])},
        [], (), TensorDict({}, [2]),
    ]  # fmt: skip
    found = there_and_back(filled(*items), tmp_path / "storage")[:]
    assert repr(found) == repr(items)
    assert [type(item) for item in found] == [type(item) for item in items]


def test_tensordicts_keep_batch_sizes_names_and_devices(tmp_path: Path) -> None:
    lazy = LazyStackedTensorDict(TensorDict({"u": torch.ones(1)}), TensorDict({"u": torch.ones(2)}), stack_dim=0)
    found, stacked = there_and_back(filled(nested(), lazy), tmp_path / "storage")[:]
    assert (found.batch_size, found["n"].batch_size, found.names, found.device.type) == ((3,), (3,), ["time"], "cpu")
    assert (found["n", "b"].tolist(), found["n", "b"].dtype, found["s"]) == ([1, 1, 1], torch.bfloat16, "hey")
    assert [part["u"].shape[0] for part in stacked.tensordicts] == [1, 2]


@pytest.mark.parametrize("kind", [LazyStackStorage, CompressedListStorage])
def test_storages_derived_from_lists_can_be_saved_as_lists(kind: type[ListStorage], tmp_path: Path) -> None:
    storage = kind(5)
    storage.checkpointer = ListStorageCheckpointer()
    storage.set(range(2), [TensorDict({"a": torch.full((n,), n)}, [n]) for n in (1, 2)])
    storage.dumps(tmp_path / "storage")
    other = kind(2)
    other.checkpointer = ListStorageCheckpointer()
    other.loads(tmp_path / "storage")
    assert [item["a"].tolist() for item in other] == [[1], [2, 2]]


@each_kind
def test_keys_with_dots_and_empty_lists_come_back(kind: type[ListStorage], tmp_path: Path) -> None:
    item = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    assert repr(there_and_back(filled(item, kind=kind), tmp_path / "storage")[0]) == repr(item)
    assert there_and_back(filled(kind=kind), tmp_path / "storage")[:] == []


def test_loaded_items_are_writable_and_on_the_device_of_the_storage(tmp_path: Path) -> None:
    filled(torch.zeros(3), torch.ones(2)).dumps(tmp_path / "storage")
    other = ListStorage(3)
    other.loads(tmp_path / "storage")
    other[0].fill_(9)
    assert [item.tolist() for item in other] == [[9, 9, 9], [1, 1]]
    there = ListStorage(3, device="meta")
    there.loads(tmp_path / "storage")
    assert there[0].device.type == "meta"


def test_items_of_the_same_kind_are_described_once(tmp_path: Path) -> None:
    filled(*(torch.tensor(n) for n in range(20))).dumps(tmp_path / "storage")
    document = json.loads((tmp_path / "storage/items.json").read_text())
    assert (len(document["kinds"]), document["items"]) == (1, [0] * 20)
    assert (tmp_path / "storage/items.memmap").stat().st_size == 160


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(),
    st.lists(st.integers(-5, 5), max_size=3).map(torch.tensor),
    st.binary(max_size=4).map(lambda data: np.array([*data])),
)  # fmt: skip
ITEMS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=6,
)


@given(st.lists(ITEMS, max_size=5))
def test_any_nest_comes_back(tmp_path_factory: pytest.TempPathFactory, items: list[object]) -> None:
    path = tmp_path_factory.mktemp("nests") / "storage"
    assert repr(there_and_back(filled(*items), path)[:]) == repr(items)


# What cannot be saved ------------------------------------------------------------------------------------


class _Vector:
    """Named in a file, and not a tensorclass."""


@each_kind
def test_tensorclasses_come_back_with_entries_that_only_some_of_a_stack_have(
    kind: type[ListStorage], tmp_path: Path
) -> None:
    stack = lazy_stack([Note(text="x"), Note(text="y", more=torch.ones(2))])
    filled(Step(torch.arange(2.0), batch_size=[2]), stack, kind=kind).dumps(tmp_path / "storage")
    loaded, other = filled(kind=kind), filled(kind=kind)
    loaded.loads(tmp_path / "storage")
    assert (type(loaded[0]), loaded[0].observation.tolist()) == (Step, [0, 1])
    other.load_state_dict(filled(stack, stack, kind=kind).state_dict())
    for found in (loaded[1], other[1]):
        assert (type(found), found[0].text, found[0].more, found[1].more.tolist()) == (Note, "x", None, [1, 1])


@pytest.mark.parametrize(
    ("item", "change", "message"),
    [
        *(
            (Step(torch.zeros(2), batch_size=[2]), {"class": name}, "not imported")
            for name in (f"{__name__}:_Vector", "os:system", "nowhere:Thing", "os.path")
        ),
        (LazyStackedTensorDict(TensorDict({}, [])), {"stack_dim": 9}, "row 0 of .* contradicts itself"),
    ],
)
def test_a_changed_description_of_an_item_is_refused(item: object, change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "storage"
    filled(item).dumps(path)
    document = json.loads((path / "items.json").read_text())
    document["kinds"][0] |= change
    (path / "items.json").write_text(json.dumps(document))
    refuses(path, ValueError if "stack_dim" in change else SchemaError, message)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (object(), "row 1: a object cannot be written to a checkpoint"),
        ({"a": {1, 2}}, "row 1: a set cannot be written"),
        ({1: "x"}, "row 1: 1 is a key of a dict; checkpoints can only hold text keys"),
        (Pair(1, 2), "row 1: a Pair is a named tuple"),
        (TensorDict({"s": print}, []), "row 1: a builtin_function_or_method cannot be written"),
        (torch.zeros(2).to_sparse(), "row 1: a Tensor cannot be written"),
        (np.array(["x"]), "row 1: a ndarray cannot be written"),
        (b"bytes", "row 1: a bytes cannot be written"),
    ],
)
def test_items_that_only_a_pickle_could_hold_are_refused_before_anything_is_written(
    item: object, message: str, tmp_path
) -> None:
    path = tmp_path / "storage"
    filled("old").dumps(path)
    with pytest.raises(SchemaError, match=message):
        filled("new", item).dumps(path)
    assert entries(tmp_path) == ["storage"]
    other = ListStorage(3)
    other.loads(path)
    assert other[:] == ["old"]


def test_a_list_that_holds_itself_and_a_storage_of_tensors_are_refused(tmp_path: Path) -> None:
    item: list[object] = []
    item.append(item)
    with pytest.raises(SchemaError, match="row 0 holds itself, or is nested too deeply"):
        filled(item).dumps(tmp_path / "storage")
    assert entries(tmp_path) == []
    with pytest.raises(UsageError, match="saves lists of objects, found a TensorStorage"):
        ListStorageCheckpointer().dumps(TensorStorage(torch.zeros(3)), tmp_path / "storage")


# Where it is written -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["precious.txt", "items.json/x.txt"])
def test_a_folder_that_is_no_checkpoint_is_left_alone(name: str, tmp_path: Path) -> None:
    path = tmp_path / "storage"
    (path / name).parent.mkdir(parents=True)
    (path / name).write_text("mine")
    with pytest.raises(UsageError, match="is not the checkpoint of a storage; left unchanged"):
        filled("x").dumps(path)
    assert (path / name).read_text() == "mine"


def test_another_file_in_a_checkpoint_is_not_lost(tmp_path: Path) -> None:
    filled("x").dumps(tmp_path / "storage")
    (tmp_path / "storage/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes.txt is not part of the checkpoint"):
        filled("y").dumps(tmp_path / "storage")
    assert (tmp_path / "storage/notes.txt").read_text() == "mine"


def test_an_empty_folder_and_a_checkpoint_of_another_class_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "storage"
    path.mkdir()
    compressed(torch.zeros(2)).dumps(path)
    assert there_and_back(filled("x"), path)[:] == ["x"]
    assert entries(path) == [".rbtool", "items.json", "items.memmap"]


# Hooks ---------------------------------------------------------------------------------------------------


@each_kind
def test_hooks_get_the_list(kind: type[ListStorage], tmp_path: Path) -> None:
    storage, other, seen = kind(5), kind(5), []
    storage.set(range(2), ["a", "b"])
    storage.register_save_hook(lambda items, path: [*items, Path(path).name])
    storage.dumps(tmp_path / "storage")
    other.set(0, "before")
    other.register_load_hook(lambda items, out: seen.append(out) or [item * 2 for item in items])
    other.loads(tmp_path / "storage")
    assert (other[:], seen) == (["aa", "bb", "storagestorage"], [["before"]])


def test_the_bytes_of_tensors_are_not_read_back_for_their_digest(tmp_path: Path, monkeypatch) -> None:
    read: list[str] = []
    own = saved_digests._digest

    def digest(file: Path, count: int) -> str:
        read.append(file.name)
        return own(file, count)

    monkeypatch.setattr(saved_digests, "_digest", digest)
    storage = ListStorage(3)
    storage.set(range(3), [torch.arange(5), torch.rand(2), torch.zeros(0)])
    storage.dumps(tmp_path / "saved")
    assert read == ["items.json"]
    assert saved_digests.require_digests(tmp_path / "saved") == {"items.json", "items.memmap"}


def saved(tmp_path: Path) -> Path:
    path = tmp_path / "storage"
    item = TensorDict({"a": torch.arange(6).reshape(3, 2), "b": torch.ones(3, dtype=torch.bfloat16), "s": "hey"}, [3])
    filled(item, torch.arange(4.0), "x").dumps(path)
    return path


def refuses(path: Path, error: type[Exception], message: str, kind: type[ListStorage] = ListStorage) -> None:
    storage = kind(3)
    storage.set(0, "kept")
    with pytest.raises(error, match=message) as found:
        storage.loads(without_digests(path))
    assert "\n" not in str(found.value)
    assert storage[:] == ["kept"]


@each_kind
def test_a_missing_or_foreign_checkpoint_is_refused(kind: Any, tmp_path: Path) -> None:
    other = CompressedListStorage if kind is ListStorage else ListStorage
    refuses(tmp_path / "absent", DatasetNotFoundError, "not found, expected", kind)
    if kind is ListStorage:
        refuses(tmp_path, FormatError, r"lacks the items\.json that a ListStorageCheckpointer writes")
    filled(torch.zeros(2), kind=other).dumps(tmp_path / "storage")
    message = f"was written by a {other.__name__}Checkpointer, and a {kind.__name__[:4]}"
    refuses(tmp_path / "storage", FormatError, message, kind)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *(
            (partial(os.truncate, length=size), f"has {size} bytes, expected 70: it was cut")
            for size in (0, 10, 69, 71)
        ),
        (partial(flip, at=30), "does not hold the bytes that were saved"),
        (Path.unlink, "is missing, expected 70 bytes"),
    ],
)
def test_a_damaged_file_is_refused(damage: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    damage(path / "items.memmap")
    refuses(path, CorruptDataError, f"items.memmap {message}")


@each_kind
def test_more_items_than_there_is_room_for_are_refused(kind: type[ListStorage], tmp_path: Path) -> None:
    filled(*"abcd", kind=kind).dumps(tmp_path / "storage")
    refuses(tmp_path / "storage", SchemaError, "holds 4 objects; this storage has room for 3", kind)


TENSOR = {"type": "tensor", "dtype": "torch.float32", "shape": [2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "does not describe a list of objects"),
        ({"format_version": 2}, "has format_version 2, expected 1"),
        ({"kinds": 3}, "lacks the list of kinds"),
        ({"items": {"a": 1}}, "or of items"),
        ({"items": [-1]}, "invalid kind -1, expected a number below 1"),
        ({"items": [10**30]}, "invalid kind 1000000000000000000000000000000, expected a number below 1"),
        ({"items": [True]}, "invalid kind True"),
        ({"items": [0.5]}, "invalid kind 0.5"),
        ({"kinds": ["x"]}, "an item is described by 'x', expected an object"),
        ({"kinds": [{}]}, "None is not a known kind of item"),
        ({"kinds": [{"type": "tensorclass", "class": "os:system"}]}, "fields"),
        ({"kinds": [{"type": "tensorclass", "class": 3, "fields": {"type": "tensordict", "fields": {}}}]}, "class"),
        ({"kinds": [{"type": "named_tuple", "class": "x", "items": []}]}, "'named_tuple' is not a known kind of item"),
        ({"kinds": [TENSOR | {"dtype": "exec('1')"}]}, "is not an element type of torch"),
        ({"kinds": [TENSOR | {"dtype": 5}]}, "5 is not an element type of torch"),
        ({"kinds": [TENSOR | {"shape": [-2]}]}, r"\[-2\] is not a shape"),
        ({"kinds": [TENSOR | {"shape": "2"}]}, "'2' is not a shape"),
        ({"kinds": [TENSOR | {"shape": [2**62]}]}, "is not the shape of a possible tensor"),
        ({"kinds": [TENSOR | {"shape": [2**40]}]}, "items.memmap has 8 bytes, expected 4,398,046,511,104"),
        ({"kinds": [TENSOR | {"array": "matrix"}]}, "'matrix' is not a known kind of array"),
        ({"kinds": [{"type": "tensordict", "fields": [1]}]}, r"of a described item is \[1\], expected a Mapping"),
        ({"kinds": [{"type": "tensordict", "fields": {"a": TENSOR}, "batch_size": [3]}]}, "row 0 of .* contradicts"),
        ({"kinds": [{"type": "tensordict", "fields": {"a": TENSOR}, "names": ["x"]}]}, "names for the 0 dimensions"),
        ({"kinds": [{"type": "lazy_stack", "stack_dim": 0, "items": []}]}, "a lazy stack of 0 items"),
        ({"kinds": [{"type": "lazy_stack", "stack_dim": 1, "items": [TENSOR]}]}, "can only consist of tensordicts"),
        ({"kinds": [{"type": "other", "value": {"__type__": "pickle", "value": "x"}}]}, "cannot be read as 'pickle'"),
        ({"kinds": [{"type": "other", "value": {"__type__": "torch.device", "value": "x"}}]}, "is not a valid"),
    ],
)  # fmt: skip
def test_hostile_descriptions_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "storage"
    filled(torch.zeros(2)).dumps(path)
    document = json.loads((path / "items.json").read_text()) | change
    (path / "items.json").write_text(json.dumps(document))
    refuses(path, ValueError, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"), ("\ufeff1", "is not JSON"), ("[1]", "does not describe a list"),
        ("[" * 10**5, "nests deeper than 100 levels"), ("9" * 10**5, "is not JSON"),
        ('{"kinds":[' + '{"type":"list","items":[' * 450 + "]}" * 450 + "]}", "nests deeper than 100 levels"),
    ],
)  # fmt: skip
def test_documents_that_describe_no_list_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / "items.json").write_text(text)
    refuses(path, FormatError, message)


@each_kind
def test_nothing_is_unpickled(kind: type[ListStorage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path) if kind is ListStorage else saved_compressed(tmp_path)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_, **__: pytest.fail("unpickled"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    storage = kind(3)
    storage.loads(path)
    assert len(storage) == (3 if kind is ListStorage else 2)
    assert kind is ListStorage or storage[0]["n", "b"].tolist() == [1, 1]


CASES = Path(__file__).parents[2] / "data" / "torchrl_checkpoints"
NAMES = ("compressed_td_partly", "compressed_td_wrapped", "compressed_tensor_full")


def nested_with_odd_keys() -> TensorDict:
    entries = {
        "a": torch.arange(6).reshape(3, 2), "shape": torch.ones(3), "shape_": torch.zeros(3), "a/b": torch.ones(3, 1),
        "n": {"b": torch.ones(3, dtype=torch.bfloat16), "..": torch.zeros(3)}, "s": ["x", "y", "z"], "q": "one",
    }  # fmt: skip
    return TensorDict(entries, [3], device="cpu")


# What TorchRL wrote --------------------------------------------------------------------------------------


def stacked(storage: CompressedListStorage) -> dict[str, np.ndarray]:
    found = torch.stack(storage[:])
    if isinstance(found, torch.Tensor):
        return {"_-single-tensor-_": found.numpy()}
    return {"/".join(key if isinstance(key, tuple) else (key,)): found[key].numpy() for key in found.keys(True, True)}


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_of_torchrl_are_read_bit_for_bit(name: str) -> None:
    case = json.loads((CASES / name / "case.json").read_text())
    storage = CompressedListStorage(case["capacity"])
    storage.loads(CASES / name / "checkpoint" / "storage")
    found, expected = stacked(storage), np.load(CASES / name / "expected.npz")
    assert len(storage) == case["len"]
    assert found.keys() == set(expected)
    for key, values in expected.items():
        assert (found[key].dtype, found[key].shape) == (values.dtype, values.shape)
        assert found[key].tobytes() == values.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_items_that_torchrl_wrote_are_saved_again_beside_new_ones(name: str, tmp_path: Path) -> None:
    storage = CompressedListStorage(20)
    storage.loads(CASES / name / "checkpoint" / "storage")
    storage.set(len(storage), storage[0])
    found = stacked(there_and_back(storage, tmp_path / "storage"))
    for key, values in np.load(CASES / name / "expected.npz").items():
        assert np.array_equal(found[key], np.concatenate([values, values[:1]]))
    codecs = json.dumps(json.loads((tmp_path / "storage/metadata.json").read_text()))
    assert '"zlib"' in codecs
    assert '"zstd"' in codecs


def test_a_custom_function_reads_items_without_a_codec() -> None:
    storage = CompressedListStorage(
        12, compression_fn=lambda tensor: tensor, decompression_fn=lambda data, about: (len(data), about["shape"])
    )
    storage.loads(CASES / "compressed_tensor_full/checkpoint/storage")
    assert storage[0] == (18, torch.Size([4]))


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")  # TorchRL's own
@pytest.mark.parametrize(
    "items",
    [
        [torch.arange(4.0) + number for number in range(5)],
        [torch.ones(3, dtype=torch.bfloat16)],
        [TensorDict({"a": torch.arange(6).reshape(3, 2) + number}, [3]) for number in range(3)],
        [TensorDict({"a": torch.zeros(2), "s": "text"}, []), torch.ones(2), 5, "text", None],
    ],
)
def test_torchrl_reads_ours(items: list[object], tmp_path: Path) -> None:
    peer = pytest.importorskip("torchrl.data").CompressedListStorage(10)
    compressed(*items, codec="zlib").dumps(tmp_path / "storage")
    peer.loads(tmp_path / "storage")
    assert len(peer) == len(items)
    for found, item in zip(peer, items, strict=True):
        if isinstance(item, TensorDict):
            assert found.batch_size == item.batch_size
            assert torch.equal(found["a"], item["a"])
            assert found.get("s", None) == item.get("s", None)
        else:
            assert torch.equal(found, item) if isinstance(item, torch.Tensor) else found == item


# Ours ----------------------------------------------------------------------------------------------------


def test_the_checkpointer_of_compressed_lists_refuses_plain_ones() -> None:
    assert type(CompressedListStorage(3).checkpointer) is CompressedListStorageCheckpointer
    with pytest.raises(UsageError, match="saves a CompressedListStorage, found a ListStorage"):
        CompressedListStorageCheckpointer().loads(ListStorage(3), "anywhere")


@pytest.mark.parametrize("codec", ["zstd", "zlib"])
def test_sharp_edges_6_and_20_nested_tensordicts_and_bfloat16_are_saved(codec: str, tmp_path: Path) -> None:
    (found,) = there_and_back(compressed(nested_with_odd_keys(), codec=codec), tmp_path / "storage")[:]
    assert (found.batch_size, found["n"].batch_size, found.device.type) == ((3,), (3,), "cpu")
    assert (found["n", "b"].dtype, found["s"], found["q"]) == (torch.bfloat16, ["x", "y", "z"], "one")
    assert (found["a"] == nested_with_odd_keys()["a"]).all()
    assert [found[key].sum().item() for key in ("shape", "shape_", "a/b", ("n", ".."))] == [3, 0, 3, 0]


def test_sharp_edge_6_the_codec_is_recorded(tmp_path: Path) -> None:
    compressed(torch.zeros(2), torch.zeros(2)).dumps(tmp_path / "storage")
    assert [about["codec"] for about in json.loads((tmp_path / "storage/metadata.json").read_text())] == ["zstd"] * 2
    other = CompressedListStorage(5, codec="zlib")
    other.loads(tmp_path / "storage")
    assert other[0].tolist() == [0, 0]


def test_every_kind_of_compressed_item_comes_back(tmp_path: Path) -> None:
    lazy = LazyStackedTensorDict(TensorDict({"u": torch.ones(1)}), TensorDict({"u": torch.ones(2)}))
    items = [{"a": (torch.ones(2), [1, None])}, np.arange(3), np.float32(4), "text", None, torch.zeros(0), {}, []]
    found = there_and_back(compressed(lazy, *items), tmp_path / "storage")
    assert [part["u"].shape[0] for part in found[0].tensordicts] == [1, 2]
    assert repr(found[1:]) == repr(items)


def test_sharp_edge_6_no_element_type_is_evaluated(tmp_path: Path) -> None:
    compressed(torch.zeros(2)).dumps(tmp_path / "storage")
    file, mark = tmp_path / "storage/metadata.json", tmp_path / "mark"
    text = file.read_text().replace("torch.float32", f"__import__('pathlib').Path('{mark}').touch()")
    file.write_text(text)
    refuses(tmp_path / "storage", FormatError, "is not an element type of torch", CompressedListStorage)
    assert not mark.exists()


def test_nothing_is_decompressed_to_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = compressed(nested_with_odd_keys(), torch.ones(2))
    monkeypatch.setattr(CompressedListStorage, "unpacked", lambda *_: pytest.fail("decompressed"))
    assert there_and_back(storage, tmp_path / "storage").bytes() == storage.bytes()


def test_custom_functions_are_needed_to_load_what_they_compressed(tmp_path: Path) -> None:
    def by_halves(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.half().view(torch.uint8).reshape(-1)

    def undo_halves(data: torch.Tensor, about: dict[str, Any]) -> torch.Tensor:
        return data.view(torch.float16).to(about["dtype"]).reshape(about["shape"])

    storage = compressed(torch.ones(2, 3), torch.zeros(0), compression_fn=by_halves, decompression_fn=undo_halves)
    found = there_and_back(storage, tmp_path / "storage", decompression_fn=undo_halves)
    assert [item.tolist() for item in found] == [[[1, 1, 1], [1, 1, 1]], []]
    with pytest.raises(UsageError, match="this storage has no decompression_fn"):
        CompressedListStorage(5).loads(tmp_path / "storage")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (object(), "row 1: a object cannot be written"),
        ({1: 2}, "row 1: 1 is a key of a dict"),
        ({"x": torch.zeros(1), "x.memmap": {"y": torch.zeros(1)}}, "need the same file"),
    ],
)
def test_a_compressed_item_that_cannot_be_saved_leaves_the_old_checkpoint(
    item: object, message: str, tmp_path: Path
) -> None:
    compressed("old").dumps(tmp_path / "storage")
    with pytest.raises(SchemaError, match=message):
        compressed("x", item).dumps(tmp_path / "storage")
    assert entries(tmp_path) == ["storage"]
    allowed = {"x": {"y": torch.zeros(1)}, "x.memmap": torch.zeros(1)}
    assert repr(there_and_back(compressed("x", allowed), tmp_path / "storage")[1]) == repr(allowed)


# What cannot be loaded -----------------------------------------------------------------------------------


def saved_compressed(tmp_path: Path) -> Path:
    path = tmp_path / "storage"
    compressed(TensorDict({"a": torch.arange(4), "n": {"b": torch.ones(2)}}, []), torch.zeros(2)).dumps(path)
    return path


@pytest.mark.parametrize("name", ["metadata.json", "data_indices.json"])
def test_a_missing_description_is_refused(name: str, tmp_path: Path) -> None:
    path = saved_compressed(tmp_path)
    (path / name).unlink()
    refuses(path, FileNotFoundError, f"lacks the {name} that a Compressed", CompressedListStorage)


@pytest.mark.parametrize("leaf", ["0/a.memmap", "0/n/b.memmap", "1/data.memmap"])
@pytest.mark.parametrize("change", [-1, 1, None])
def test_sharp_edge_8_files_of_a_wrong_size(leaf: str, change: int | None, tmp_path: Path) -> None:
    path = saved_compressed(tmp_path)
    file = path / "compressed_data" / leaf
    size = file.stat().st_size
    if change is None:
        file.unlink()
    else:
        os.truncate(file, size + change)
    message = f"is missing, expected {size} bytes" if change is None else f"expected {size}: it was cut or overwritten"
    refuses(path, CorruptDataError, message, CompressedListStorage)


@pytest.mark.parametrize("name", ["", "/1", "/0/n", "/0/meta.json"])
def test_missing_data_are_refused(name: str, tmp_path: Path) -> None:
    path = saved_compressed(tmp_path)
    gone = path / f"compressed_data{name}"
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    refuses(path, CorruptDataError, r"meta.json is missing", CompressedListStorage)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([0], "describes 2 objects, but numbers 1"),
        ([0, 1, 2], "describes 2 objects, but numbers 3"),
        ([0, -1], "invalid number -1, expected one below 2"),
        ([0, 10**30], "invalid number 10{30}, expected one below 2"),
        ([0, True], "invalid number True"),
        ([0, "../1"], "invalid number '../1'"),
        ([1, 1], "gives the same data to two objects"),
        ([0, None], "lacks the data of an object that has tensors"),
        ({"0": 0}, "must be lists"),
        ([1, 0], "does not describe a tensor 'a'"),
    ],
)
def test_hostile_indices_are_refused(indices: object, message: str, tmp_path: Path) -> None:
    path = saved_compressed(tmp_path)
    (path / "data_indices.json").write_text(json.dumps(indices))
    refuses(path, ValueError, message, CompressedListStorage)


def tagged(kind: str, value: object) -> dict[str, object]:
    return {"__type__": f"torch.{kind}", "value": value}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "pickle"}, "'pickle' is not a known kind of item"),
        ({"type": "tensordict"}, "'fields' of a described item is None"),
        ({"type": "mapping", "fields": {"../../x": {"type": "tensor"}}}, "does not describe a tensor"),
        ({"dtype": tagged("dtype", "__import__('os').abort()")}, "is not an element type of torch"),
        ({"dtype": {}}, "None is not an element type"),
        ({"shape": tagged("Size", [-1])}, "is not a shape"),
        ({"shape": tagged("Size", [2**70])}, "is not the shape of a possible tensor"),
        ({"shape": tagged("Size", [2**50])}, "cannot hold the"),
        ({"codec": "rot13"}, "the codec 'rot13' is unknown"),
        ({"codec": ["zstd"]}, r"the codec \['zstd'\] is unknown"),
        ({"codec": "custom"}, "has no decompression_fn"),
    ],
)
def test_hostile_descriptions_of_compressed_items_are_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "storage"
    compressed(torch.zeros(2)).dumps(path)
    (about,) = json.loads((path / "metadata.json").read_text())
    (path / "metadata.json").write_text(json.dumps([about | change]))
    refuses(path, ValueError, message, CompressedListStorage)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metadata.json", "{", "is not JSON"),
        ("metadata.json", "[" * 10**5, "nests deeper than 100 levels"),
        ("data_indices.json", "5", "must be lists"),
        *(
            ("compressed_data/1/meta.json", text, message)
            for text, message in (
                ("[]", "does not describe a tensor 'data'"),
                ('{"data":{"shape":[-4],"dtype":"torch.uint8"}}', "does not describe a tensor"),
                ('{"data":{"shape":5,"dtype":"torch.uint8"}}', "does not describe a tensor"),
                ('{"data":{"shape":[21],"dtype":"torch.int8"}}', "expected a byte vector"),
            )
        ),
    ],
)
def test_hostile_files_are_refused(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = saved_compressed(tmp_path)
    (path / name).write_text(text)
    refuses(path, ValueError, message, CompressedListStorage)


def test_changed_bytes_are_found_at_once_or_without_digests_when_read(tmp_path: Path) -> None:
    path = saved_compressed(tmp_path)
    file = path / "compressed_data/0/a.memmap"
    flip(file, file.stat().st_size // 2)
    storage = CompressedListStorage(3)
    with pytest.raises(CorruptDataError, match="does not hold the bytes that were saved"):
        storage.loads(path)
    storage.loads(without_digests(path))
    assert storage[1].tolist() == [0, 0]
    with pytest.raises(CorruptDataError, match="compressed bytes are cut or damaged"):
        storage[0]
